"""Shapes of published models and of an EAGLE-3 head, random weights, and the bytes that a step must read."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from specjax_kernels import Quantised
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specjax import ModelConfig, RopeConfig
from specjax.checkpoint.block_head import default_block_features
from specjax.config import AssistantConfig, BlockConfig, DeltaNet, Experts, HeadConfig, LayerKinds
from specjax.models import init_params, table
from specjax.models.head_spec import head_sizes, head_table
from specjax.models.mtp_spec import mtp_sizes, mtp_table
from specjax.models.params import Leaf, dimensions, input_letters, is_product, map_leaves, output_major

ROPE = RopeConfig(theta=500000.0, scaling="llama3", factor=8.0)


def llama_8b(layers: int) -> ModelConfig:
    return ModelConfig(
        "llama", 128256, 4096, 14336, layers, 32, 8, 128, 1e-5, ROPE, 131072, tied_embeddings=False, dtype="bfloat16"
    )


def qwen3_8b(layers: int) -> ModelConfig:
    return ModelConfig(
        "qwen3", 151936, 4096, 12288, layers, 32, 8, 128, 1e-6, RopeConfig(theta=1000000.0), 40960,
        tied_embeddings=False, dtype="bfloat16",
    )  # fmt: skip


def qwen3_30b(layers: int) -> ModelConfig:
    """Qwen3-30B-A3B: 128 experts in each layer, 8 for each token."""
    return ModelConfig(
        "qwen3_moe", 151936, 2048, 6144, layers, 32, 4, 128, 1e-6, RopeConfig(theta=1000000.0), 40960,
        tied_embeddings=False, experts=Experts(128, 8, 768, tuple(range(layers))), dtype="bfloat16",
    )  # fmt: skip


def qwen3_5_27b(layers: int) -> ModelConfig:
    """Qwen3.5-27B: attention in every fourth layer, a gated delta net in the others."""
    delta = DeltaNet(tuple(i for i in range(layers) if (i + 1) % 4), 16, 48, 128, 128)
    return ModelConfig(
        "qwen3_next", 248320, 5120, 17408, layers, 24, 4, 256, 1e-6, RopeConfig(theta=1e7, partial=0.25), 262144,
        tied_embeddings=False, delta=delta, dtype="bfloat16",
    )  # fmt: skip


def gemma4_e4b(own: str = "sssssf" * 4, shared: str = "sssssf" * 3) -> ModelConfig:
    """Layers with keys of their own, then layers that share them; s with a window, f without."""
    kinds = LayerKinds(512, 2, shared=len(shared), inputs=256, input_vocab=262144)
    return ModelConfig(
        "gemma4", 262144, 2560, 10240, len(own + shared), 8, 2, 256, 1e-6,
        RopeConfig(1e6, "proportional", partial=0.25), 131072, tied_embeddings=True,
        windows=tuple(512 if kind == "s" else None for kind in own + shared), window_rope=RopeConfig(1e4),
        query_scale=1.0, logit_softcap=30.0, kinds=kinds, dtype="bfloat16",
    )  # fmt: skip


def assistant_head(target: ModelConfig) -> AssistantConfig:
    """The assistant of E4B."""
    kinds = replace(cast(LayerKinds, target.kinds), shared=4, inputs=0, input_vocab=0)
    layer = replace(
        target, hidden_size=256, intermediate_size=2048, num_layers=4, num_heads=4, windows=(512, 512, 512, None),
        logit_softcap=None, kinds=kinds,
    )  # fmt: skip
    return AssistantConfig(
        layer=layer, target_layers=target.num_layers, count=1, vocab_size=target.vocab_size,
        backbone_size=target.hidden_size, centroids=2048, best=32,
    )  # fmt: skip


def gpt_oss_20b(layers: int) -> ModelConfig:
    """32 experts in each layer, 4 for each token; 120b has 36 layers and 128 experts."""
    rope = RopeConfig(
        150000.0, "yarn", 32.0, original_max_position=4096, truncate=False, magnitude=0.1 * math.log(32) + 1
    )
    return ModelConfig(
        "gpt_oss", 201088, 2880, 2880, layers, 64, 8, 64, 1e-5, rope, 131072, tied_embeddings=False,
        attention_bias=True, output_bias=True, windows=(128, None) * (layers // 2),
        experts=Experts(32, 4, 2880, tuple(range(layers))), dtype="bfloat16",
    )  # fmt: skip


def eagle3_head(target: ModelConfig, vocab_size: int = 32000) -> HeadConfig:
    """A head like the published ones: the target's widths, three auxiliary layers, a draft vocabulary (at most V)."""
    last = target.num_layers - 1
    aux_layers = (min(1, last), max(target.num_layers // 2 - 1, 0), max(last - 3, 0))
    width = target.hidden_size
    return HeadConfig(
        "eagle3", width, 3 * width, target.intermediate_size, target.num_heads, target.num_kv_heads, target.head_dim,
        target.norm_epsilon, target.rope, min(vocab_size, target.vocab_size),
        aux_layers=aux_layers, own_head=True, mapped=True, dtype=target.dtype,
    )  # fmt: skip


def block_head(target: ModelConfig) -> HeadConfig:
    """A head like DFlash's published ones: five layers, blocks of 16 slots, and the target's embedding and output."""
    layers, like = 5, eagle3_head(target)
    taps = tuple(max(layer, 0) for layer in default_block_features(target.num_layers, layers))  # of tiny targets, too
    changes = {"kind": "block", "feature_size": layers * target.hidden_size, "aux_layers": taps, "layers": layers}
    changes |= {"vocab_size": target.vocab_size, "own_head": False, "mapped": False, "block": 16}
    masks = {"mask_token": target.vocab_size - 1, "windows": (None,) * layers, "causal": (False,) * layers}
    return BlockConfig(**vars(like) | changes | masks, from_anchor=False)


def write_checkpoint(folder: Path, config: ModelConfig) -> None:
    """Writes a random Llama with a tokenizer of bytes, in the layout of the hub."""
    m, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    small = config.num_kv_heads * config.head_dim
    layer = {f"self_attn.{name}_proj": (size, m) for name, size in (("q", heads), ("k", small), ("v", small))}
    layer |= {"self_attn.o_proj": (m, heads), "mlp.gate_proj": (inner, m), "mlp.up_proj": (inner, m)}
    layer |= {"mlp.down_proj": (m, inner), "input_layernorm": (m,), "post_attention_layernorm": (m,)}
    shapes = {f"model.layers.{i}.{name}": shape for i in range(config.num_layers) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens": (config.vocab_size, m), "model.norm": (m,), "lm_head": (config.vocab_size, m)}
    block = np.random.default_rng(0).normal(0, m**-0.5, 2**20).astype(jnp.bfloat16)
    save_file(
        {f"{name}.weight": np.resize(block, shape) for name, shape in shapes.items()}, folder / "model.safetensors"
    )
    settings = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": config.vocab_size, "hidden_size": m,
        "intermediate_size": inner, "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim, "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope.theta, "max_position_embeddings": config.max_positions, "dtype": "bfloat16",
        "tie_word_embeddings": False, "eos_token_id": 0, "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: config.vocab_size - 1]
    core = Tokenizer(models.BPE({"<end>": 0} | {letter: i + 1 for i, letter in enumerate(letters)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>").save_pretrained(folder)


def nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def least_bytes(
    target: ModelConfig, head: HeadConfig | None = None, steps: int = 0, *, quantization: str = "none"
) -> dict[str, float]:
    """Bytes of weights that a step must read, once for each forward. `quantization`: none, int8 or int4 for the head
    (int8's scales are not counted)."""
    m, v, size = target.hidden_size, target.vocab_size, jnp.dtype(target.dtype).itemsize
    mlp = 3 * target.intermediate_size
    attention = (target.num_heads + 2 * target.num_kv_heads) * target.head_dim
    output = target.num_heads * target.head_dim * m
    sizes = {"target_bytes": size * (target.num_layers * (m * (attention + mlp) + output) + m * v)}
    if head is None:
        return sizes
    w = head.vocab_size
    layer = 2 * m * attention + output + m * mlp
    # levels 2 .. D and the observed tokens; D times the vocabulary
    size = {"int8": 1, "int4": 5 / 8}.get(quantization, size)
    return sizes | {"head_bytes": size * (steps * (layer + m * w) + 3 * m * m)}


def kv_bytes(config: ModelConfig | HeadConfig) -> int:
    """Bytes of the keys and values of one token in all layers."""
    layers = config.num_layers if isinstance(config, ModelConfig) else getattr(config, "layers", 1)
    return 2 * layers * config.num_kv_heads * config.head_dim * jnp.dtype(config.dtype).itemsize


def random_target(config: ModelConfig, seed: int = 0) -> Any:
    """Normal weights of a target, scaled so that products keep their scale. The device makes leaves in turn, which
    needs memory for the model and one leaf."""
    shapes = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    return _fill(shapes, jax.random.key(seed))


def random_head(head: HeadConfig, config: ModelConfig, seed: int = 1, *, quantization: str = "none") -> Any:
    """Random weights of a draft head for this target; `quantization`: see `head_shapes`."""
    return _fill(head_shapes(head, config, quantization), jax.random.key(seed))


def head_shapes(head: HeadConfig | AssistantConfig, config: ModelConfig, quantization: str = "none") -> Any:
    """Shapes of a head's parameters; `quantization`: none, int8, int4 or, of experts, mxfp4, in the layout of the
    loaded ones."""
    if isinstance(head, AssistantConfig):
        return _shapes(mtp_table(head), mtp_sizes(head), head.dtype, quantization)
    return _shapes(head_table(head), head_sizes(head, config.vocab_size), head.dtype, quantization)


def target_shapes(config: ModelConfig, quantization: str = "none") -> Any:
    """Shapes of a target's parameters, as `head_shapes`."""
    return _shapes(table(config), dimensions(config), config.dtype, quantization)


def _shapes(declared: Any, sizes: Any, dtype: str, quantization: str) -> Any:
    struct = jax.ShapeDtypeStruct

    def shape(leaf: Leaf) -> Any:
        floats = quantization == "none" or (quantization == "mxfp4" and "experts" not in leaf.axes)
        if floats or leaf.name == "embed" or not is_product(leaf):
            return struct(leaf.shape(sizes), jnp.dtype(leaf.dtype or dtype))
        depth = prod(sizes[letter] for letter in input_letters(leaf))
        *out, _ = output_major(leaf).shape({**sizes, "@": depth})
        if quantization == "int8":
            return Quantised(struct((*out, depth), jnp.int8), struct((*out, 1), jnp.float32))
        if quantization == "mxfp4":
            return Quantised(struct((*out, depth // 2), jnp.uint8), struct((*out, depth // 32), jnp.uint8))
        groups = struct((*out, depth // 32), jnp.float16)
        return Quantised(struct((*out, depth // 2), jnp.uint8), groups, groups)

    return map_leaves(declared, shape)


@partial(jax.jit, static_argnums=(2, 3))
def _normal(key: jax.Array, scale: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * scale.astype(dtype)


def _fill(shapes: Any, key: jax.Array) -> Any:
    def leaf(path: Any, shape: Any, index: int) -> jax.Array:
        name = getattr(path[-1], "key", None)
        if shape.dtype == jnp.int8:  # codes; uniform ones have a standard deviation of 73
            return jax.random.randint(jax.random.fold_in(key, index), shape.shape, -127, 128, jnp.int8)
        if name is None:  # scales, which follow the codes
            return jnp.full(shape.shape, paths[index - 1][1].shape[-1] ** -0.5 / 73, shape.dtype)
        if jnp.issubdtype(shape.dtype, jnp.integer):  # token ids of the draft vocabulary
            return jnp.arange(shape.shape[0], dtype=shape.dtype)
        if len(shape.shape) == 1:
            return jnp.ones(shape.shape, shape.dtype)
        inputs = {"embed": 1, "output": prod(shape.shape[:-1])}.get(name, shape.shape[0])
        return _normal(jax.random.fold_in(key, index), jnp.float32(inputs**-0.5), shape.shape, shape.dtype)

    paths, tree = jax.tree_util.tree_flatten_with_path(shapes)
    return jax.tree.unflatten(tree, [leaf(path, shape, index) for index, (path, shape) in enumerate(paths)])
