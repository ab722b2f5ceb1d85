"""Losses against plain numpy, one slot at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.train.unroll import LOSSES, feature_regression


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
        "token": -np.log(q[label]),
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


@pytest.mark.parametrize("name", ["cross_entropy", "acceptance", "hybrid"])
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
