"""`specjax_kernels.argmax` against numpy's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax_kernels import argmax


def rows(kind: str) -> np.ndarray:
    rng = np.random.default_rng(7)
    x = rng.normal(size=(3, 5, 301)).astype(np.float32)
    match kind:
        case "equal":
            return rng.integers(0, 4, x.shape).astype(np.float32)
        case "nan":
            x[rng.random(x.shape) < 0.01] = np.nan
        case "infinite":
            x[0, 0], x[0, 1], x[1, 2, 17], x[2, 3, 5:9] = -np.inf, np.inf, np.inf, -np.inf
        case "zeros":
            x = np.where(rng.random(x.shape) < 0.5, np.float32(0), np.float32(-0.0))
    return x


@pytest.mark.parametrize("kind", ["any", "equal", "nan", "infinite", "zeros"])
def test_argmax(kind):
    x = rows(kind)
    found = np.asarray(jax.jit(argmax)(jnp.asarray(x)))
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, np.argmax(x, axis=-1))
    np.testing.assert_array_equal(np.asarray(argmax(jnp.asarray(x[0, 0]))), np.argmax(x[0, 0]))


def test_a_gpu_reduces_both_at_once():
    text = jax.jit(argmax).trace(jnp.asarray(rows("any"))).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.reduce") == 1
