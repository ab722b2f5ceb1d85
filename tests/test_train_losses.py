"""Losses against plain numpy, one slot at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.layers import logits, project
from specjax.train.losses import LOSSES, feature_regression


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def oracle(name: str, x: np.ndarray, p: np.ndarray, label: int) -> float:
    q = softmax(x)
    rate = sum(min(a, b) for a, b in zip(p, q, strict=True))
    entropy = -sum(a * np.log(b) for a, b in zip(p, q, strict=True))
    share = np.exp(-3 * rate)
    return {
        "cross_entropy": entropy,
        "greedy": -np.log(q[p.argmax()]),
        "token": -np.log(q[label]),
        "total_variation": sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2,
        "acceptance": -np.log(rate),
        "hybrid": share * entropy + (1 - share) * (1 - rate),
    }[name]


def case(seed: int, size: int = 9) -> tuple[np.ndarray, np.ndarray, int]:
    rng = np.random.default_rng(seed)
    x, p = rng.normal(0, 2, size), softmax(rng.normal(0, 2, size))
    return x.astype(np.float32), p.astype(np.float32), int(rng.integers(size))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(4))
def test_a_loss_is_what_its_formula_says(name, seed):
    x, p, label = case(seed)
    found = LOSSES[name](jnp.asarray(x), jnp.asarray(p), jnp.int32(label))
    np.testing.assert_allclose(found, oracle(name, x.astype(np.float64), p.astype(np.float64), label), rtol=2e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_has_the_shape_of_the_slots(name):
    x, p = jnp.zeros((2, 3, 5)), jnp.full((2, 3, 5), 0.2)
    found = LOSSES[name](x, p, jnp.zeros((2, 3), jnp.int32))
    assert found.shape == (2, 3) and found.dtype == jnp.float32


@pytest.mark.parametrize("name", ["cross_entropy", "total_variation", "acceptance", "hybrid"])
def test_nothing_is_better_than_the_targets_own_distribution(name):
    """At q = p no step lowers the loss, and elsewhere a small step along the gradient does."""
    x, p, label = case(7)
    loss = lambda logits: LOSSES[name](logits, jnp.asarray(p), jnp.int32(label))  # noqa: E731
    best = loss(jnp.log(jnp.asarray(p)))
    for seed in range(20):
        other = np.log(p) + np.random.default_rng(seed).normal(0, 0.1, p.size).astype(np.float32)
        assert loss(jnp.asarray(other)) >= best - 1e-6
    before, gradient = jax.value_and_grad(loss)(jnp.asarray(x))
    assert loss(jnp.asarray(x) - 0.05 * gradient) < before


def test_no_overlap_has_a_finite_loss():
    x, p = jnp.asarray([100.0, 0.0, 0.0]), jnp.asarray([0.0, 0.5, 0.5])
    for name, loss in LOSSES.items():
        value, gradient = jax.value_and_grad(loss)(x, p, jnp.int32(1))
        assert jnp.isfinite(value) and jnp.isfinite(gradient).all(), name


def test_feature_regression_is_smooth_l1():
    rng = np.random.default_rng(0)
    a, b = rng.normal(0, 2, (2, 3, 8)).astype(np.float32)
    wanted = [np.mean([0.5 * d * d if abs(d) < 1 else abs(d) - 0.5 for d in row]) for row in a - b]
    np.testing.assert_allclose(feature_regression(jnp.asarray(a), jnp.asarray(b)), wanted, rtol=1e-6)


# The products of a training step.


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_the_derivatives_of_logits_are_those_of_the_product(dtype, tolerance):
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(2, 3, 16)), rng.normal(size=(16, 7))
    weight = rng.normal(size=(2, 3, 7))
    found = jax.grad(lambda x, w: jnp.sum(logits(x, w) * jnp.asarray(weight, jnp.float32)), argnums=(0, 1))(
        jnp.asarray(x, dtype), jnp.asarray(w, dtype)
    )
    wanted = np.einsum("bnw,mw->bnm", weight, w), np.einsum("bnm,bnw->mw", x, weight)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == dtype
        np.testing.assert_allclose(mine.astype(jnp.float32), theirs, atol=tolerance * abs(theirs).max())


def test_a_projection_in_half_precision_is_rounded_once():
    """The sum over M in float32, then one rounding: bit for bit, as the rows are short."""
    rng = np.random.default_rng(2)
    x, w = jnp.asarray(rng.normal(size=(2, 4, 8)), "bfloat16"), jnp.asarray(rng.normal(size=(8, 3, 5)), "bfloat16")
    found = project(x, w, precision=jax.lax.Precision.DEFAULT)
    exact = np.einsum("bnm,mkq->bnkq", np.asarray(x, np.float64), np.asarray(w, np.float64))
    np.testing.assert_array_equal(
        found.astype(jnp.float32), jnp.asarray(exact, jnp.float32).astype("bfloat16").astype(jnp.float32)
    )
    gradient = jax.grad(lambda x: project(x, w, precision=jax.lax.Precision.DEFAULT).sum().astype(jnp.float32))(x)
    wanted = np.asarray(w, np.float64).sum((1, 2))
    np.testing.assert_allclose(gradient.astype(jnp.float32), np.broadcast_to(wanted, x.shape), atol=0.05)
