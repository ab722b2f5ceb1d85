"""Draws against the oracle: each part of the rule, all parts together, and the distribution of draws."""

import ast
import pathlib

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import oracle
import pytest
import scipy.stats
from hypothesis import given, settings
from oracle import Sampling
from toy_models import SEEDS, history, sampling_rows, some_sampling

from specjax import sampling
from specjax.sampling import DrawInputs

BATCH, VOCABULARY = 8, 37
NEAR = 1e-4  # smaller gaps may be resolved differently in float32

draw = jax.jit(sampling.draw)
rngs = st.integers(0, 2**32).map(np.random.default_rng)


def single(request):
    return jax.tree.map(lambda leaf: leaf[0], sampling_rows([request], VOCABULARY))


def some_logits(rng, *shape):
    """Normal logits, some rounded to give ties."""
    logits = rng.normal(0, 2, shape)
    return (logits if rng.random() < 0.7 else np.round(logits)).astype(np.float32)


def pack_allowed(allowed):
    return jnp.asarray(oracle.pack_bits(allowed))


@pytest.mark.parametrize("seed", SEEDS)
def test_noise(seed):
    words = jnp.asarray(sampling.seed_words(seed))
    assert tuple(np.asarray(words).tolist()) == oracle.key_words(seed)
    for position in (0, 5, 100_000, 2**31 - 1):
        actual = sampling.gumbel_noise(words, jnp.int32(position), VOCABULARY)
        np.testing.assert_allclose(actual, oracle.noise(seed, position, VOCABULARY), rtol=1e-6, atol=1e-6)


def test_noise_does_not_depend_on_flags_of_jax():
    words = jnp.asarray(sampling.seed_words(11))
    expected = oracle.noise(11, 3, VOCABULARY)
    for flag, value in (
        ("jax_threefry_partitionable", False),
        ("jax_default_prng_impl", "rbg"),
        ("jax_enable_x64", True),
        ("jax_high_dynamic_range_gumbel", True),
    ):
        before = jax.config.values[flag]
        jax.config.update(flag, value)
        try:
            actual = jax.jit(sampling.gumbel_noise, static_argnums=2)(words, jnp.int32(3), VOCABULARY)
        finally:
            jax.config.update(flag, before)
        assert actual.dtype == jnp.float32
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6, err_msg=flag)


def test_tail_of_the_noise():
    """About 64 of 2**24 values have probabilities below 2**-18; they differ and follow the distribution."""
    noise = jax.jit(jax.vmap(sampling.gumbel_noise, in_axes=(None, 0, None)), static_argnums=2)
    words = jnp.asarray(sampling.seed_words(1))
    actual = np.asarray(noise(words, jnp.arange(64, dtype=jnp.int32), 2**18)).ravel()
    assert np.isfinite(actual).all()
    exponential = np.exp(-actual.astype(np.float64))
    rare = exponential[exponential < 2**-18]
    assert 30 < len(rare) < 100
    assert len(np.unique(rare)) == len(rare)
    assert scipy.stats.kstest(rare * 2**18, "uniform").pvalue > 1e-3
    assert scipy.stats.kstest(exponential[: 2**16], "expon").pvalue > 1e-3
    largest = np.argmax(actual)
    position, token = divmod(int(largest), 2**18)
    np.testing.assert_allclose(actual[largest], oracle.noise(1, position, 2**18)[token], rtol=1e-6)


def test_capacity_of_a_row():
    row = sampling.sampling_row(2000, stop_ids=tuple(range(8)), logit_bias=dict.fromkeys(range(1024), 1.0))
    assert row.stop_ids.tolist() == list(range(8))
    assert row.bias_ids.tolist() == list(range(1024))
    with pytest.raises(ValueError, match=r"9 stop ids.* 8"):
        sampling.sampling_row(2000, stop_ids=tuple(range(9)))
    with pytest.raises(ValueError, match=r"1025 entries.* 1024"):
        sampling.sampling_row(2000, logit_bias=dict.fromkeys(range(1025), 1.0))


@jax.jit
def edit(logits, row, in_prompt, counts, emitted):
    biased = logits + sampling.bias_of(jax.tree.map(lambda x: x[None], row), len(logits))[0]
    logits = sampling.add_penalties(biased, row, in_prompt, counts)
    return sampling.mask_stops(logits, row, emitted)


def test_tiny_repetition_penalty():
    row = jax.tree.map(jnp.asarray, sampling.sampling_row(3, repetition_penalty=5e-324))
    seen, counts = jnp.array([True, True, False]), jnp.zeros(3, jnp.int32)
    actual = edit(jnp.array([30.0, 0.0, 1.0]), row, seen, counts, jnp.int32(0))
    assert np.isfinite(np.asarray(actual)).all() and int(jnp.argmax(actual)) == 0


@given(rngs)
def test_editing_logits(rng):
    request = some_sampling(rng, VOCABULARY)
    prompt, generated = rng.integers(0, VOCABULARY, (2, 6)).tolist()
    generated = generated[: int(rng.integers(7))]
    logits = some_logits(rng, VOCABULARY)
    past = history([prompt], [generated], VOCABULARY)
    actual = edit(jnp.asarray(logits), single(request), past.in_prompt[0], past.counts[0], jnp.int32(len(generated)))
    expected = oracle.edited_logits(logits, request, prompt, generated)
    masked = np.isinf(expected)
    np.testing.assert_allclose(np.asarray(actual)[~masked], expected[~masked], rtol=1e-5, atol=1e-5)
    assert (np.asarray(actual)[masked] <= -1e30).all()


def by_sorting(values, weights, need):
    order = np.argsort(-values, kind="stable")
    reached = np.cumsum(weights[order])
    count = int(np.sum(reached < need)) + 1
    inside = np.zeros(len(values), bool)
    inside[order[:count]] = True
    return inside


@given(rngs)
def test_smallest_prefix(rng):
    """Small whole weights have exact sums. -0 equals +0."""
    values = rng.choice(np.float32([-np.inf, -1e30, -2.5, -1, -1e-30, -0.0, 0, 1e-30, 1, 2.5, 1e30]), VOCABULARY)
    weights = rng.integers(0, 4, VOCABULARY).astype(np.float32)
    need = np.float32(rng.integers(1, 80))
    actual = jax.jit(sampling.smallest_prefix)(values, weights, need)
    np.testing.assert_array_equal(actual, by_sorting(values, weights, need))


@jax.jit
def truncate(logits, row):
    scaled = logits / row.temperature
    return sampling.cut_min_p(sampling.truncate(scaled, row), row, jnp.max(scaled))


@settings(max_examples=200)
@given(rngs)
def test_truncation(rng):
    request = some_sampling(rng, VOCABULARY, temperature=float(rng.choice([0.3, 1.0, 1.7])))
    logits = some_logits(rng, VOCABULARY)
    expected, margin = oracle.truncated_logits(logits, request)
    if margin < NEAR:
        return
    actual = np.asarray(truncate(jnp.asarray(logits), single(request)))
    np.testing.assert_array_equal(actual > -np.inf, expected > -np.inf)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def batch_of_draws(rng, **fixed):
    """Requests with prompts, outputs and drafted paths; some with a grammar."""
    requests = [some_sampling(rng, VOCABULARY, **fixed) for _ in range(BATCH)]
    prompts = rng.integers(0, VOCABULARY, (BATCH, 5)).tolist()
    generated = [rng.integers(0, VOCABULARY, int(rng.integers(1, 6))).tolist() for _ in range(BATCH)]
    paths = [rng.integers(0, VOCABULARY, int(rng.integers(0, 4))).tolist() for _ in range(BATCH)]
    allowed = rng.random((BATCH, VOCABULARY)) < rng.choice([0.3, 1.1])
    allowed[:, int(rng.integers(VOCABULARY))] = True
    return requests, prompts, generated, paths, allowed, some_logits(rng, BATCH, VOCABULARY)


def arguments(requests, prompts, generated, paths, allowed, logits, order=None):
    """Arguments of `draw`; `order`: slots of the requests in the state."""
    order = np.arange(len(requests)) if order is None else order
    past = history([prompts[i] for i in np.argsort(order)], [generated[i] for i in np.argsort(order)], VOCABULARY)
    inputs = DrawInputs(
        sampling_rows(requests, VOCABULARY), past, jnp.asarray(order, jnp.int32), jnp.ones(len(requests), bool)
    )
    before = [len(g) + len(p) for g, p in zip(generated, paths, strict=True)]
    position = [len(p) + b for p, b in zip(prompts, before, strict=True)]
    path = np.array([[*p, *[-1] * (3 - len(p))] for p in paths], np.int32)
    counts = jnp.asarray(position, jnp.int32), jnp.asarray(before, jnp.int32), jnp.asarray(path)
    return jnp.asarray(logits), inputs, *counts, pack_allowed(allowed)


def expected_draws(requests, prompts, generated, paths, allowed, logits):
    return [
        oracle.draw(logits[i], requests[i], prompts[i], generated[i] + paths[i], allowed[i])
        for i in range(len(requests))
    ]


@settings(max_examples=150)
@given(rngs)
def test_draws_with_all_parts(rng):
    case = batch_of_draws(rng)
    actual = draw(*arguments(*case, order=rng.permutation(BATCH)))
    for i, expected in enumerate(expected_draws(*case)):
        assert int(actual[i]) == expected.token or expected.gap < NEAR, (case[0][i], expected)


@pytest.mark.parametrize("params", [
    Sampling(temperature=0.6, top_p=0.9),
    Sampling(temperature=1.0, min_p=0.05, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5),
    Sampling(temperature=1.0, top_k=7, top_p=0.8, bias={3: 2.0}, stop_ids=(5,), min_tokens=9),
])  # fmt: skip
def test_distribution_of_draws(params):
    """Chi-square of 4096 draws against the exact distribution, over seeds."""
    count, vocab = 4096, 12
    logits = np.random.default_rng(3).normal(0, 0.7, vocab).astype(np.float32)
    prompt, generated = [1, 2, 2], [3, 3, 4]
    law = oracle.distribution(logits, params, prompt, generated)
    rows = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape[1:])), sampling_rows([params], vocab))
    past = history([prompt], [generated], vocab)
    seeds = np.arange(count, dtype=np.uint32)
    rows = rows._replace(seed=jnp.asarray(np.stack([seeds * 3, seeds], axis=1)))
    position = jnp.full(count, 6, jnp.int32)
    slots, active = jnp.zeros(count, jnp.int32), jnp.ones(count, bool)
    before, path = jnp.full(count, 3, jnp.int32), jnp.full((count, 1), -1, jnp.int32)
    stacked = jnp.broadcast_to(jnp.asarray(logits), (count, vocab))
    drawn = np.asarray(draw(stacked, DrawInputs(rows, past, slots, active), position, before, path))
    observed = np.bincount(drawn, minlength=vocab)
    assert (observed[law == 0] == 0).all()
    likely = law > 0
    assert likely.sum() > 2
    assert scipy.stats.chisquare(observed[likely], law[likely] / law[likely].sum() * count).pvalue > 1e-3


def test_shapes_in_annotations_are_strings():
    """``Float32[Array, V]`` would not be checked; ruff's UP037 strips the quotes of one-letter shapes."""
    folder = pathlib.Path(sampling.__file__).parent
    lost = [
        f"{path.relative_to(folder)}:{node.lineno}: {ast.unparse(node)}"
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and hasattr(jaxtyping, node.value.id)
        and isinstance(node.slice, ast.Tuple)
        and not (isinstance(node.slice.elts[1], ast.Constant) and isinstance(node.slice.elts[1].value, str))
    ]
    assert not lost, "\n".join(lost)
