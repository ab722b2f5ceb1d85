"""Llama-3.1-8B's shape, an EAGLE-3 head for it, random weights of any shape, and the least bytes that a step reads."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from specjax_kernels import Quantised

from specjax import ModelConfig, RopeConfig
from specjax.config import Experts, HeadConfig
from specjax.models import init_params
from specjax.models.head_spec import head_sizes, head_table
from specjax.models.params import Leaf, input_letters, is_product, map_leaves, output_major

ROPE = RopeConfig(theta=500000.0, scaling="llama3", factor=8.0)


def llama_8b(layers: int) -> ModelConfig:
    return ModelConfig(
        "llama", 128256, 4096, 14336, layers, 32, 8, 128, 1e-5, ROPE, 131072, tied_embeddings=False, dtype="bfloat16"
    )


def qwen3_30b(layers: int) -> ModelConfig:
    """Qwen3-30B-A3B: a mixture of 128 experts in each layer, 8 of them a token."""
    return ModelConfig(
        "qwen3_moe", 151936, 2048, 6144, layers, 32, 4, 128, 1e-6, RopeConfig(theta=1000000.0), 40960,
        tied_embeddings=False, experts=Experts(128, 8, 768, tuple(range(layers))), dtype="bfloat16",
    )  # fmt: skip


def eagle3_head(target: ModelConfig, vocab_size: int = 32000) -> HeadConfig:
    """As published heads are: the target's widths, three auxiliary layers, a draft vocabulary (at most V)."""
    last = target.num_layers - 1
    aux_layers = (min(1, last), max(target.num_layers // 2 - 1, 0), max(last - 3, 0))
    width = target.hidden_size
    return HeadConfig(
        "eagle3", width, 3 * width, target.intermediate_size, target.num_heads, target.num_kv_heads, target.head_dim,
        target.norm_epsilon, target.rope, min(vocab_size, target.vocab_size),
        aux_layers=aux_layers, own_head=True, mapped=True, dtype=target.dtype,
    )  # fmt: skip


def nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def least_bytes(
    target: ModelConfig, head: HeadConfig | None = None, steps: int = 0, *, quantization: str = "none"
) -> dict[str, float]:
    """Weights that a step must read, each once a forward: what bounds it however few kernels there are. `quantization`:
    of the head's, none or int8 (whose scales are not counted)."""
    m, v, size = target.hidden_size, target.vocab_size, jnp.dtype(target.dtype).itemsize
    mlp = 3 * target.intermediate_size
    attention = (target.num_heads + 2 * target.num_kv_heads) * target.head_dim
    output = target.num_heads * target.head_dim * m
    found = {"target_bytes": size * (target.num_layers * (m * (attention + mlp) + output) + m * v)}
    if head is None:
        return found
    w = head.vocab_size
    layer = 2 * m * attention + output + m * mlp
    # levels 2 .. D and the observed tokens; D times the vocabulary
    size = 1 if quantization == "int8" else size
    return found | {"head_bytes": size * (steps * (layer + m * w) + 3 * m * m)}


def kv_bytes(config: ModelConfig | HeadConfig) -> int:
    """Of one committed token, in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * jnp.dtype(config.dtype).itemsize


def random_target(config: ModelConfig, seed: int = 0) -> Any:
    """A target's normal weights, whose products keep their scale. They are made leaf by leaf where they will stay: of a
    model of 16 GB no more is ever in memory than itself and one leaf."""
    shapes = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    return _fill(shapes, jax.random.key(seed))


def random_head(head: HeadConfig, config: ModelConfig, seed: int = 1, *, quantization: str = "none") -> Any:
    """The same for a draft head of this target; `quantization` as `head_shapes`."""
    return _fill(head_shapes(head, config, quantization), jax.random.key(seed))


def head_shapes(head: HeadConfig, config: ModelConfig, quantization: str = "none") -> Any:
    """The shapes of a head's parameters; `quantization`: none, or int8 as `specjax.checkpoint.load_head` makes them."""
    sizes = head_sizes(head, config.vocab_size)

    def shape(leaf: Leaf) -> Any:
        if quantization == "none" or leaf.name == "embed" or not is_product(leaf):
            return jax.ShapeDtypeStruct(leaf.shape(sizes), jnp.dtype(leaf.dtype or head.dtype))
        depth = prod(sizes[letter] for letter in input_letters(leaf))
        *out, _ = output_major(leaf).shape({**sizes, "@": depth})
        arrays = jax.ShapeDtypeStruct((*out, depth), jnp.int8), jax.ShapeDtypeStruct((*out, 1), jnp.float32)
        return Quantised(*arrays)

    return map_leaves(head_table(head), shape)


def normal(shape: Any, key: jax.Array, scale: float = 1.0) -> jax.Array:
    """A leaf of the shape and dtype of `shape`."""
    return _normal(key, jnp.float32(scale), tuple(shape.shape), jnp.dtype(shape.dtype))


@partial(jax.jit, static_argnums=(2, 3))
def _normal(key: jax.Array, scale: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * scale.astype(dtype)


def _fill(shapes: Any, key: jax.Array) -> Any:
    def leaf(path: Any, shape: Any, index: int) -> jax.Array:
        name = getattr(path[-1], "key", None)
        if shape.dtype == jnp.int8:  # codes of 8 bits; a uniform one has the deviation 73
            return jax.random.randint(jax.random.fold_in(key, index), shape.shape, -127, 128, jnp.int8)
        if name is None:  # their scales, after the codes
            return jnp.full(shape.shape, paths[index - 1][1].shape[-1] ** -0.5 / 73, shape.dtype)
        if jnp.issubdtype(shape.dtype, jnp.integer):  # the ids of a head's vocabulary
            return jnp.arange(shape.shape[0], dtype=shape.dtype)
        if len(shape.shape) == 1:
            return jnp.ones(shape.shape, shape.dtype)
        inputs = {"embed": 1, "output": prod(shape.shape[:-1])}.get(name, shape.shape[0])
        return normal(shape, jax.random.fold_in(key, index), inputs**-0.5)

    paths, tree = jax.tree_util.tree_flatten_with_path(shapes)
    return jax.tree.unflatten(tree, [leaf(path, shape, index) for index, (path, shape) in enumerate(paths)])
