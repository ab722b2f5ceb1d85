"""A mixture of experts: its three ways of computing the same sum."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax_kernels import Quantised, quantise

from specjax.config import Experts
from specjax.models import experts as experts_module
from specjax.models.experts import mixture
from specjax.models.families import GptOssLayer

EXPERTS = Experts(16, 4, 32, (0,))
SHAPES = {
    "router": (64, 16), "router_bias": (16,), "experts_gate_up": (16, 64, 2, 32), "experts_down": (16, 32, 64),
    "experts_gate_up_bias": (16, 2, 32), "experts_down_bias": (16, 64),
}  # fmt: skip


def leaf_of(name: str, kind: str) -> jax.Array | Quantised:
    matrix = np.random.default_rng(list(SHAPES).index(name)).normal(0, 0.3, SHAPES[name]).astype(np.float32)
    if kind == "float32" or name not in ("experts_gate_up", "experts_down"):
        return jnp.asarray(matrix)
    rows = np.moveaxis(matrix, 1, -1)
    if kind != "mxfp4":
        return jax.tree.map(jnp.asarray, quantise(rows, kind))
    codes = np.random.default_rng(0).integers(0, 256, (*rows.shape[:-1], rows.shape[-1] // 2), np.uint8)
    return Quantised(jnp.asarray(codes), jnp.full((*rows.shape[:-1], rows.shape[-1] // 32), 124, jnp.uint8))


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("kind", ["float32", "int8", "int4", "mxfp4"])
def test_ways_agree(monkeypatch, kind, biases):
    """One expert after another (CPUs), all side by side (GPUs), and rows sorted by expert (many tokens)."""
    weights = {name: leaf_of(name, kind) for name in SHAPES if biases or "bias" not in name}
    x = jnp.asarray(np.random.default_rng(9).standard_normal((1, 3, 64), np.float32))

    def mixed() -> np.ndarray:
        return np.asarray(mixture(x, weights, EXPERTS, activation=GptOssLayer.activation))

    one_by_one = mixed()
    with monkeypatch.context() as patch:
        patch.setattr(experts_module, "_on_each_platform", lambda cpu, elsewhere, *arguments: elsewhere(*arguments))
        side_by_side = mixed()
    with monkeypatch.context() as patch:
        grouped = experts_module._grouped
        patch.setattr(experts_module, "_gathered", lambda *a, spread, **options: grouped(*a, **options))
        sorted_rows = mixed()
    assert one_by_one.std() > 0.1
    np.testing.assert_allclose(side_by_side, one_by_one, rtol=0, atol=2e-5)
    np.testing.assert_allclose(sorted_rows, one_by_one, rtol=0, atol=2e-5)
