"""Gated delta nets against the recurrence along each path, in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specjax_kernels import CAUSAL, pack_bits

from specjax.models.delta import CHUNK, Recurrent, advance, delta_net, inverse

H, J, K, U, T = 2, 3, 4, 5, 4
Y = 2 * K + J * U


def random_net(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "taps": rng.normal(size=(H, Y, 1, T)),
        "decay": rng.normal(size=(H, J)) - 1,
        "decay_bias": rng.normal(size=(H, J)),
    }


def random_rows(seed: int, batch: int) -> Recurrent:
    rng = np.random.default_rng(seed)
    return Recurrent(*(rng.normal(size=(batch, *shape)) for shape in ((H, J, K, U), (T - 1, H, Y))))


def along(net: dict[str, np.ndarray], rows: Recurrent, b: int, mixed: np.ndarray, rates: np.ndarray) -> Any:
    """Output of the last token of a text, and the rows after it: token by token, head by head."""
    state, window = np.array(rows.state[b]), list(np.array(rows.window[b]))
    out = np.zeros((H, J, U))
    for x, rate in zip(mixed, rates, strict=True):
        window.append(x)
        y = sum(net["taps"][:, :, 0, i] * window[i - T] for i in range(T))
        y = y / (1 + np.exp(-y))
        for h in range(H):
            q, k = (z / np.sqrt((z * z).sum() + 1e-6) for z in (y[h, :K], y[h, K : 2 * K]))
            for j in range(J):
                value = y[h, 2 * K + j * U : 2 * K + (j + 1) * U]
                beta = 1 / (1 + np.exp(-rate[h, j]))
                g = -np.exp(net["decay"][h, j]) * np.logaddexp(0, rate[h, J + j] + net["decay_bias"][h, j])
                state[h, j] *= np.exp(g)
                state[h, j] += np.outer(k, beta * (value - k @ state[h, j]))
                out[h, j] = q @ state[h, j] / np.sqrt(K)
    return out, Recurrent(state, np.stack(window[-(T - 1) :]))


def single(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


run = jax.jit(lambda mixed, rates, net, mask, rows: delta_net(mixed, rates, net, mask, rows))


def paths(parents: list[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for node, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), node])
    return found


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_trees_equal_the_recurrence(data):
    width, batch, seed = data.draw(st.sampled_from((1, 2, 5, 9, 16))), 2, data.draw(st.integers(0, 10**6))
    rng, net, rows = np.random.default_rng(seed), random_net(seed), random_rows(seed + 1, 2)
    mixed, rates = rng.normal(size=(batch, width, H, Y)), rng.normal(size=(batch, width, H, 2 * J))
    every = [paths([data.draw(st.integers(-1 if i == 0 else 0, i - 1)) for i in range(width)]) for _ in range(batch)]
    mask = np.zeros((batch, width, width), bool)
    for b, found in enumerate(every):
        for node, path in enumerate(found):
            mask[b, node, path] = True
    output, block = run(*single((mixed, rates, net)), jnp.asarray(pack_bits(mask)), single(rows))
    deepest = [max(found, key=len) for found in every]
    for b, found in enumerate(every):
        for node, path in enumerate(found):
            expected, _ = along(net, rows, b, mixed[b, path], rates[b, path])
            np.testing.assert_allclose(output[b, node], expected, atol=2e-5)
    padded = np.array([path + [0] * (width - len(path)) for path in deepest])
    taken = jax.tree.map(
        lambda x: np.take_along_axis(np.asarray(x), padded.reshape(2, -1, *[1] * (x.ndim - 2)), 1), block
    )
    after = advance(single(rows), single(taken), jnp.asarray([len(path) for path in deepest], jnp.int32))
    for b, path in enumerate(deepest):
        _, expected = along(net, rows, b, mixed[b, path], rates[b, path])
        for leaf, wanted in zip(after, expected, strict=True):
            np.testing.assert_allclose(leaf[b], wanted, atol=2e-5)


@pytest.mark.parametrize("width", [3, CHUNK, CHUNK + 1, 2 * CHUNK + 9])
def test_chunks_equal_the_recurrence(width):
    """Rows commit all tokens, some, or none; what lies beyond them may be NaN."""
    rng, net, rows = np.random.default_rng(width), random_net(width), random_rows(7, 3)
    mixed, rates = rng.normal(size=(3, width, H, Y)), rng.normal(size=(3, width, H, 2 * J))
    output, block = run(*single((mixed, rates, net)), CAUSAL, single(rows))
    length = [width, width // 2, 0]
    for at in {0, width // 2, width - 1}:
        expected, _ = along(net, rows, 0, mixed[0, : at + 1], rates[0, : at + 1])
        np.testing.assert_allclose(output[0, at], expected, atol=3e-5)
    broken = jax.tree.map(lambda x: np.array(x), block)
    for leaf in broken[:3]:
        leaf[1, width // 2 :], leaf[2] = np.nan, np.nan
    after = advance(single(rows), jax.tree.map(jnp.asarray, broken), jnp.asarray(length, jnp.int32))
    for b, count in enumerate(length):
        _, expected = along(net, rows, b, mixed[b, :count], rates[b, :count])
        for leaf, wanted in zip(after, expected, strict=True):
            np.testing.assert_allclose(leaf[b], wanted, atol=3e-5)


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_inverse(size):
    """Also of a matrix whose powers grow: equal keys, no decay, steps of 1."""
    for strict in (np.tril(np.random.default_rng(size).normal(size=(2, size, size)), -1) / 4, np.tri(size, k=-1)[None]):
        found = np.asarray(inverse(jnp.asarray(strict, jnp.float32)))
        np.testing.assert_allclose(found, np.linalg.inv(np.eye(size) + strict), atol=1e-4)
