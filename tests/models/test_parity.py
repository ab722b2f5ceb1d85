"""Logits of all families against transformers, on random models: in one block, through pages, and in a tree. Prefixes
are committed block by block, so that every block but the first also attends to pages."""

from __future__ import annotations

import dataclasses
import inspect
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax_kernels import CAUSAL, pack_bits
from tiny_checkpoints import save_model
from toy_models import as_arrays, random_tree

from specjax.cache import Block, PoolShape, RowMoves, commit, init_cache, read_rows, take_path
from specjax.checkpoint import load_params, model_config, resolve
from specjax.config import ModelConfig, RopeConfig
from specjax.models import make_target
from specjax.models.target import Target, hidden_states
from specjax.tree import ancestor_mask

TOLERANCE = 2e-4

LLAMA_3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# As in the checkpoints, but with wavelengths on both sides of the bounds and positions beyond the original length.
LLAMA_3_1 = {"rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 32} | LLAMA_3
LLAMA_3_2 = {"rope_theta": 500.0, "factor": 32.0, "original_max_position_embeddings": 16} | LLAMA_3

UNTIED = {"tie_word_embeddings": False}
SHORT_OR_LONG = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 3.0, 9.0, 20.0]}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 500.0, "original_max_position_embeddings": 32} | SHORT_OR_LONG
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GPT_OSS = {"head_dim": 16, "sliding_window": 20, "num_local_experts": 8, "num_experts_per_tok": 4}
GPT_OSS |= {"rope_parameters": YARN | {"truncate": False}, "num_hidden_layers": 3, "intermediate_size": 24}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}
DEEPSEEK = {"num_key_value_heads": 4, "n_group": 4, "topk_group": 2, "n_routed_experts": 16, "num_experts_per_tok": 3}
DEEPSEEK |= LATENT | {"moe_intermediate_size": 24, "first_k_dense_replace": 1, "num_hidden_layers": 3, "head_dim": 8}
DELTA = {"head_dim": 16, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 6}
DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12}
TWO = {"num_hidden_layers": 2, "full_attention_interval": 2}  # experts increase rounding errors
SHARED = {"shared_expert_intermediate_size": 20}

GEMMA_4 = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 6, "hidden_size_per_layer_input": 0}
GEMMA_4 |= {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
GEMMA_4 |= {"final_logit_softcapping": 30.0}
GEMMA_4_LARGE = GEMMA_4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
# 16 channels: norms of 4 numbers amplify rounding errors.
GEMMA_4_SMALL = GEMMA_4 | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 300}
GEMMA_4_SMALL |= {"num_kv_shared_layers": 3}
GEMMA_4_EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 8}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("Llama", UNTIED | {"num_key_value_heads": 4}),
    "llama 3": ("Llama", UNTIED | {"num_attention_heads": 8}),
    "llama 3.1": ("Llama", UNTIED | {"head_dim": 16, "rope_parameters": LLAMA_3_1}),
    "llama 3.2": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True, "rope_parameters": LLAMA_3_2}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}}),
    "biases": (
        "Llama",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
        | {"attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ("Mistral", UNTIED | {"sliding_window": 20}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 windows": ("Qwen2", UNTIED | {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen2 yarn": ("Qwen2", UNTIED | {"rope_parameters": YARN}),
    "mimo": ("MiMo", UNTIED | {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 640000.0}}),
    "qwen3": ("Qwen3", UNTIED | {"head_dim": 16, "attention_bias": True}),
    "qwen3 moe": ("Qwen3Moe", UNTIED | EXPERTS | {"head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "gpt oss": ("GptOss", UNTIED | GPT_OSS),
    "gpt oss plain": (
        "GptOss",
        UNTIED | GPT_OSS | {"num_key_value_heads": 1, "attention_bias": False, "num_local_experts": 40}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "gemma 2": ("Gemma2", {"head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 24}),
    "gemma 3": (
        "Gemma3",
        {"head_dim": 16, "sliding_window": 20, "num_hidden_layers": 3, "sliding_window_pattern": 2}
        | {"query_pre_attn_scalar": 24},
    ),
    "gemma 4 e2b": ("Gemma4", GEMMA_4_SMALL | {"use_double_wide_mlp": True, "num_key_value_heads": 1}),
    "gemma 4 e4b": ("Gemma4", GEMMA_4_SMALL),
    "gemma 4 12b": ("Gemma4Unified", {k: v for k, v in GEMMA_4_LARGE.items() if "per_layer" not in k}),
    "gemma 4 26b": ("Gemma4", GEMMA_4_LARGE | GEMMA_4_EXPERTS),
    "gemma 4 31b": ("Gemma4", GEMMA_4_LARGE | {"num_attention_heads": 8, "num_key_value_heads": 4}),
    "phi 3": ("Phi3", UNTIED | {"sliding_window": 30, "pad_token_id": 0}),
    "phi 3 longrope": ("Phi3", UNTIED | {"rope_parameters": LONG_ROPE, "pad_token_id": 0}),
    "phi 4 mini": (
        "Phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75}}
        | {"head_dim": 16, "tie_word_embeddings": True, "pad_token_id": 0},
    ),
    "deepseek v3": (
        "DeepseekV3", UNTIED | DEEPSEEK | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}}
    ),
    "qwen3.5": ("Qwen3_5", UNTIED | DELTA),
    "qwen3.5 moe": ("Qwen3_5Moe", UNTIED | DELTA | EXPERTS | SHARED | TWO),
    "qwen3 next": ("Qwen3Next", UNTIED | DELTA | EXPERTS | SHARED | TWO | {"linear_num_value_heads": 4}),
    "deepseek v3 lite": ("DeepseekV3", UNTIED | DEEPSEEK | {"q_lora_rank": None, "attention_bias": True}),
}  # fmt: skip
LENGTHS = (90, 77)
"""Tokens of the two sequences: beyond every original length above, and not a multiple of anything."""


class Model(NamedTuple):
    config: ModelConfig
    target: Target
    params: Any
    oracle: Any  # transformers' model

    def expected(self, tokens) -> np.ndarray:
        """transformers' logits [X, V] of one sequence, float32."""
        import torch

        torch.set_num_threads(1)  # threads that share cores with other processes wait for each other
        with torch.inference_mode():
            return self.oracle(torch.tensor([[int(token) for token in tokens]])).logits[0].numpy()


def load(folder, dtype: str = "float32") -> tuple[ModelConfig, Target, Any]:
    files = resolve(str(folder), progress=False)
    config = model_config(files.config, dtype=dtype)
    return config, make_target(config), load_params(files, config, progress=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Shape to folder, saved on first use. Weights are large, so that every part of the model changes the logits."""
    root, saved = tmp_path_factory.mktemp("parity"), {}

    def folder(shape: str):
        if shape not in saved:
            saved[shape] = root / shape.replace(" ", "-")
            name, changes = SHAPES[shape]
            common = {"max_position_embeddings": 512, "initializer_range": 0.2}
            save_model(saved[shape], f"{name}ForCausalLM", seed=len(saved), **common | changes)
        return saved[shape]

    return folder


ALIKE = {
    "llama 2", "llama 3.2", "llama linear", "biases", "qwen2", "mimo", "qwen3", "gpt oss plain", "phi 3", "phi 4 mini",
    "qwen3.5 moe", "deepseek v3 lite", "gemma 4 e4b", "gemma 4 31b",
}  # fmt: skip
"""Shapes whose trees and single rows are computed as those of others; slow."""


@pytest.fixture(
    scope="module", params=[pytest.param(shape, marks=pytest.mark.slow if shape in ALIKE else ()) for shape in SHAPES]
)
def model(request, folders) -> Model:
    import transformers

    folder, name = folders(request.param), SHAPES[request.param][0]
    kind = getattr(transformers, f"{'Qwen2' if name == 'MiMo' else name}ForCausalLM")
    return Model(*load(folder), kind.from_pretrained(folder, attn_implementation="eager").eval())


@partial(jax.jit, static_argnums=0)
def _forward(target, params, tokens, depth, mask, cache, table, start, rows):
    x, cache = target.embed(params, tokens), read_rows(cache, rows, start)
    output = target.forward(params, x, start[:, None] + depth, mask, cache, table, start)
    return target.unembed(params, output.hidden), output.block


class Reader:
    """Runs `rows` sequences through a model, block by block, with pages and row states in random order."""

    def __init__(self, config: ModelConfig, target: Target, params: Any, *, page_size: int = 4, rows: int = 2) -> None:
        self.target, self.params = target, params
        pages = 2 * 32 + 1
        self.cache = init_cache(target.pages, PoolShape(pages, page_size), rows=3)
        self.rows = RowMoves(*[jnp.asarray([2, 0][:rows], jnp.int32)] * 2)
        order = np.random.default_rng(0).permutation(pages)[:64]
        self.table = jnp.asarray(order.reshape(2, 32)[:rows].astype(np.int32))
        self.length = jnp.zeros(rows, jnp.int32)

    def look(self, tokens: np.ndarray, depth=None, mask=CAUSAL) -> tuple[np.ndarray, Block]:
        """Logits of a block after the committed tokens; commits nothing."""
        tokens = jnp.asarray(tokens, jnp.int32)
        if depth is None:
            depth = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        past = self.cache, self.table, self.length, self.rows
        logits, block = _forward(self.target, self.params, tokens, depth, mask, *past)
        return np.asarray(logits), block

    def keep(self, block: Block, count: list[int]) -> None:
        added = jnp.asarray(count, jnp.int32)
        self.cache = commit(self.cache, block, self.table, self.length, added, after=(), rows=self.rows)
        self.length = self.length + added

    def read(self, texts: list[np.ndarray], width: int) -> list[np.ndarray]:
        """Logits of the texts, read in chunks of at most `width`."""
        parts: list[list[np.ndarray]] = [[] for _ in texts]
        done = [0] * len(texts)
        while any(d < len(text) for d, text in zip(done, texts, strict=True)):
            block = np.zeros((len(texts), width), np.int32)
            count = [min(width, len(text) - d) for d, text in zip(done, texts, strict=True)]
            for row, text in enumerate(texts):
                block[row, : count[row]] = text[done[row] : done[row] + count[row]]
            logits, keys_values = self.look(block)
            self.keep(keys_values, count)
            for row in range(len(texts)):
                parts[row].append(logits[row, : count[row]])
                done[row] += count[row]
        return [np.concatenate(arrays) for arrays in parts]


def some_texts(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 300, length) for length in LENGTHS]


def close(logits: np.ndarray, expected: np.ndarray, atol: float = TOLERANCE) -> None:
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=atol)


WIDTHS = {"in one piece": max(LENGTHS), "in chunks": 13, "token by token": 1}
TWICE = {("llama 2", "in one piece"), ("biases", "in one piece"), ("llama 3", "token by token")}
TWICE |= {("qwen3.5", "in one piece"), ("qwen3.5", "token by token")}
TWICE |= {("gemma 4 e2b", "in one piece"), ("gemma 4 e2b", "token by token")}
"""Shapes and widths besides chunks. Other differences between shapes do not depend on the width."""


@pytest.mark.parametrize(
    ("model", "width"),
    [
        pytest.param(
            shape, width, id=f"{shape}-{name}",
            marks=() if name == "in chunks" or (shape, name) in TWICE else pytest.mark.slow,
        )
        for shape in SHAPES
        for name, width in WIDTHS.items()
    ],
    indirect=["model"],
)  # fmt: skip
def test_logits_equal_transformers(model, width):
    texts = [text[: 40 if width == 1 else None] for text in some_texts()]
    for text, logits in zip(texts, Reader(*model[:3]).read(texts, width), strict=True):
        expected = model.expected(text)
        assert expected.std() > 0.5, "the weights are too small to tell models apart"
        close(logits, expected)


@pytest.mark.parametrize("model", ["llama 3", "gemma 3", "qwen3 moe", "deepseek v3"], indirect=True)
def test_hidden_states_equal_transformers(model):
    import torch

    texts, last = some_texts(), model.config.num_layers - 1
    tokens = np.zeros((2, max(LENGTHS)), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    final = jax.jit(partial(hidden_states, model.target))(model.params, tokens)
    layers = hidden_states(model.target, model.params, jnp.asarray(tokens), tuple(range(last)))
    for row, text in enumerate(texts):
        with torch.inference_mode():
            ids = torch.tensor([[int(token) for token in text]])
            streams = [layer[0].numpy() for layer in model.oracle(ids, output_hidden_states=True).hidden_states]
        close(final[row, : len(text)], streams[-1], atol=2e-3)
        close(layers[row, : len(text)], np.concatenate(streams[1:-1], axis=1), atol=2e-3)


@pytest.mark.parametrize(
    ("tokens", "features", "problem"),
    [
        (4, (2,), r'must be "final" or layers from 0 to 1, got \(2,\)'),
        (4, (0, -1), r"got \(0, -1\)"),
        (4, (), r"got \(\)"),
        (600, "final", "the texts have 600 tokens, and the model 512 positions"),
    ],
)
def test_hidden_states_refusals(folders, tokens, features, problem):
    _, target, params = load(folders("llama 3"))
    with pytest.raises(ValueError, match=problem):
        hidden_states(target, params, jnp.zeros((1, tokens), jnp.int32), features)


def test_decoding_after_prefill(model):
    """One row, whose products a CPU splits, at positions beyond the original length of scaled models."""
    text = some_texts(1)[0]
    reader = Reader(*model[:3], rows=1)
    reader.read([text[:-6]], 13)
    (logits,) = reader.read([text[-6:]], 1)
    close(logits, model.expected(text)[-6:])


def test_tree_paths_equal_texts(model):
    """Two trees at different prefix lengths; then a committed path is a prefix."""
    texts = [text[:-8] for text in some_texts(2)]
    reader, rng = Reader(*model[:3]), np.random.default_rng(3)
    reader.read([text[:-1] for text in texts], 13)
    trees = [random_tree(int(text[-1]), 12, 300, rng, depth=6) for text in texts]
    drawn = as_arrays(trees, 12)
    logits, block = reader.look(drawn.tokens, drawn.depth, pack_bits(ancestor_mask(drawn)))
    assert min(max(map(depth_of(tree), range(12))) for tree in trees) > 2
    for row, (text, tree) in enumerate(zip(texts, trees, strict=True)):
        for node in range(len(tree.tokens)):
            close(logits[row, node], model.expected([*text[:-1], *(tree.tokens[i] for i in path_to(tree, node))])[-1])

    paths = [path_to(tree, max(range(12), key=depth_of(tree))) for tree in trees]
    padded = np.array([path + [0] * (7 - len(path)) for path in paths], np.int32)
    reader.keep(take_path(block, jnp.asarray(padded)), [len(path) for path in paths])
    after = np.array([[5, 6], [7, 8]])
    logits, _ = reader.look(after)
    for row, (text, tree, path) in enumerate(zip(texts, trees, paths, strict=True)):
        whole = [*text[:-1], *(tree.tokens[i] for i in path), *after[row]]
        close(logits[row], model.expected(whole)[-2:])


def path_to(tree, node: int) -> list[int]:
    """Node indices from the root."""
    return [node] if tree.parents[node] < 0 else [*path_to(tree, tree.parents[node]), node]


def depth_of(tree):
    return lambda node: len(path_to(tree, node))


# Half precision: the largest difference in logits whose standard deviation is 1. Measured: 0.15 and 0.016.
HALF = {"bfloat16": 0.3, "float16": 0.03}


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision(folders, dtype):
    folder = folders("llama 3.1")
    exact, half = (Reader(*load(folder, name)) for name in ("float32", dtype))
    leaves = jax.tree.leaves((half.params, half.cache))
    assert {str(leaf.dtype) for leaf in leaves} == {dtype}
    texts = some_texts()
    for expected, logits in zip(exact.read(texts, 13), half.read(texts, 13), strict=True):
        assert logits.dtype == np.float32
        print(dtype, "std", expected.std(), "largest difference", np.abs(expected - logits).max())
        close(logits, expected, HALF[dtype])


def test_dynamic_scaling_equals_token_by_token_decoding(tmp_path):
    """In transformers, a rotation beyond the original length depends on the length of the text up to the token. Chunks
    must give the rotations of token-by-token decoding."""
    import torch
    from transformers import DynamicCache, LlamaForCausalLM

    dynamic = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
    changes = {"max_position_embeddings": 24, "initializer_range": 0.2, "rope_parameters": dynamic}
    save_model(tmp_path, "LlamaForCausalLM", **changes)
    config, target, params = load(tmp_path)
    assert config.max_positions == 96
    text = some_texts()[0][:60]
    oracle = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    expected, cache = [], DynamicCache(config=oracle.config)
    # transformers 5.24 has renamed the argument.
    options = {"cache" if "cache" in inspect.signature(oracle.forward).parameters else "past_key_values": cache}
    with torch.inference_mode():
        for token in text:
            out = oracle(torch.tensor([[int(token)]]), use_cache=True, **options)
            expected.append(out.logits[0, 0].numpy())
    (logits,) = Reader(config, target, params, rows=1).read([text], 13)
    close(logits, np.stack(expected))
    unscaled = dataclasses.replace(config, rope=RopeConfig(theta=500.0))
    (other,) = Reader(unscaled, make_target(unscaled), params, rows=1).read([text], 13)
    assert np.abs(logits - other)[30:].max() > 100 * TOLERANCE
    close(other[:24], logits[:24])


def test_longrope_within_the_original_length(folders):
    """Short factors if no text may be longer. transformers uses them for each shorter text."""
    import transformers

    folder = folders("phi 3 longrope")
    files = resolve(str(folder), progress=False)
    config = model_config(files.config, dtype="float32", context_length=32)
    params = load_params(files, config, progress=False)
    oracle = transformers.Phi3ForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model = Model(config, make_target(config), params, oracle)
    texts = [text[:32] for text in some_texts()]
    for text, logits in zip(texts, Reader(*model[:3]).read(texts, 13), strict=True):
        close(logits, model.expected(text))
