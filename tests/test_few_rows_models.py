"""Which products of a model run as kernels of few rows, and that a step's results stay what they are."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax_kernels import CAUSAL, arrays, choice

from specjax import ModelConfig, Params, PoolShape, RopeConfig, StepInput, init_state, make_drafter
from specjax.cache import init_cache
from specjax.config import HeadConfig, Latent
from specjax.drafters.table import options_of
from specjax.models import init_params, make_target
from specjax.models.draft_head import init_head_params
from specjax.step import StepConfig, speculate_step

POOL, TABLE = PoolShape(pages=8, page_size=4), 4
SIZES = (31, 32, 48, 2, 4, 2, 8, 1e-5, RopeConfig(), 256)


def model(family: str, **changes) -> ModelConfig:
    return ModelConfig(family, *SIZES, tied_embeddings=True, **changes)


LATENT = Latent(rank=16, query_rank=24, nope_dim=8, rope_dim=8, value_dim=8)
MODELS = {
    "llama": (model("llama"), 4),
    "qwen2": (model("qwen2", attention_bias=True), 4),
    "gemma2": (model("gemma2", windows=(4, None)), 2 * 4),  # two kinds of layers
    "deepseek_v3": (model("deepseek_v3", latent=LATENT, query_scale=0.25), 6),
}
"""And how many products are in the program, where layers of one kind are there once: qkv, output, gate and up, down;
of latent attention four in the place of two."""


def kernels(text: str, name: str) -> int:
    """Calls of the Triton kernel in a lowered program."""
    return sum("__gpu$xla.gpu.triton" in line and name in line for line in text.splitlines())


def forward_of(config: ModelConfig, rows: int):
    """A forward of new functions, so that nothing of an earlier trace is reused; and the shapes of its arguments."""
    target = make_target(config)

    def forward(params, tokens, cache):
        positions = 3 + jnp.arange(rows, dtype=jnp.int32)[None, :]
        table, length = jnp.arange(TABLE, dtype=jnp.int32)[None, :], jnp.full((1,), 3, jnp.int32)
        x = target.embed(params, tokens)
        return target.forward(params, x, positions, CAUSAL, cache, table, length)[:3:2]

    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    cache = jax.eval_shape(lambda: init_cache(target.pages, POOL))
    return jax.jit(forward), (params, jax.ShapeDtypeStruct((1, rows), jnp.int32), cache)


@pytest.mark.parametrize("name", MODELS)
def test_the_products_of_a_layer(name: str, monkeypatch) -> None:
    config, products = MODELS[name]
    found = {}
    for setting in ("xla", "pallas"):
        monkeypatch.setenv(choice.VARIABLE, setting)
        for rows in (3, choice.MOST_ROWS + 1):
            run, shapes = forward_of(config, rows)
            text = run.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
            found[setting, rows] = kernels(text, "few_rows")
    assert found.pop(("pallas", 3)) == products
    assert not any(found.values())


@pytest.mark.parametrize(
    "name", ["qwen2", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "qwen2")]
)
def test_a_forward_is_the_same(name: str, monkeypatch) -> None:
    config, rows = MODELS[name][0], 3
    rng = np.random.default_rng(0)
    params = init_params(config, jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 1 else leaf, params)  # text that varies
    cache = jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype),
        init_cache(make_target(config).pages, POOL),
    )
    tokens = jnp.array([[3, 7, 11]], jnp.int32)
    results = []
    for setting in ("xla", "pallas"):
        monkeypatch.setenv(choice.VARIABLE, setting)
        results.append(arrays(forward_of(config, rows)[0](params, tokens, cache)))
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-4, atol=1e-4)


def test_a_step_commits_the_same(monkeypatch) -> None:
    """A draft head, its tree, and both models' pages: by few kernels on a GPU, and the same numbers here."""
    config = model("llama")
    head = HeadConfig("eagle", 32, 32, 48, 4, 2, 8, 1e-5, RopeConfig(), 31)
    texts, states = {}, {}
    for setting in ("xla", "pallas"):
        monkeypatch.setenv(choice.VARIABLE, setting)
        target = make_target(config)
        drafter = make_drafter(options_of("EAGLE", steps=2, topk=2, nodes=4), target=target, head=head)
        params = Params(init_params(config, jax.random.key(0)), init_head_params(head, target, jax.random.key(1)))
        state = init_state(params, target=target, drafter=drafter, rows=2, pool=POOL)
        state = state._replace(rows=state.rows._replace(limit=state.rows.limit + 20), finished=jnp.zeros(2, bool))
        inputs = StepInput(
            jnp.arange(2, dtype=jnp.int32), jnp.arange(2 * TABLE, dtype=jnp.int32).reshape(2, TABLE), jnp.ones(2, bool)
        )
        step = jax.jit(
            functools.partial(speculate_step, target=target, drafter=drafter, config=StepConfig((drafter.width,)))
        )
        texts[setting] = step.trace(params, state, inputs).lower(lowering_platforms=("cuda",)).as_text()
        for _ in range(3):
            state, output = step(params, state, inputs)
        assert np.all(np.asarray(output.emitted) > 0)
        states[setting] = state.cache, state.draft, state.rows.prefix_length, state.root
    assert kernels(texts["xla"], "copy_rows") == kernels(texts["xla"], "few_rows") == 0
    assert kernels(texts["pallas"], "copy_rows") == 3, "rows of the path, the target's pages, the head's pages"
    assert kernels(texts["pallas"], "few_rows") >= 8
    for one, other in zip(*map(jax.tree.leaves, states.values()), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-3, atol=1e-4)
