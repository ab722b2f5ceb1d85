"""`project`: the product of a few rows, which a CPU takes in parts, is the plain product in every respect but speed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.layers import FEW_ROWS, PARTS, project

HIGHEST = jax.lax.Precision.HIGHEST
SHAPES = {
    "attention's": ((1, 1, 96), (96, 3, 5, 16)),
    "a gated MLP's": ((1, 1, 96), (96, 2, 256)),
    "plain": ((1, 1, 1536), (1536, 576)),
    "a width that does not split": ((1, 1, 90), (90, 64)),
    "two rows": ((1, 2, 96), (96, 64)),
    "two requests": ((2, 1, 96), (96, 64)),
    "three rows": ((1, 3, 96), (96, 2, 32)),
    "four rows": ((2, 2, 96), (96, 64)),
}


def lowered(x: tuple[int, ...], weight: tuple[int, ...], platform: str, dtype=jnp.float32) -> str:
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in (x, weight)]
    traced = jax.jit(lambda x, w: project(x, w, precision=HIGHEST)).trace(*shapes)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def in_parts(text: str, rows: int) -> bool:
    """A product for each row has a batch of `PARTS`, or there is one; none for another platform beside it."""
    found = f"tensor<{PARTS}x" in text
    assert text.count("dot_general") == (rows if found else 1)
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_product(shape):
    x_shape, w_shape = SHAPES[shape]
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal(x_shape, np.float32), rng.standard_normal(w_shape, np.float32)
    exact = np.tensordot(x.astype(np.float64), weight.astype(np.float64), 1)
    found = jax.jit(lambda x, w: project(x, w, precision=HIGHEST))(x, weight)
    assert found.shape == exact.shape and found.dtype == jnp.float32
    scale = np.sqrt(w_shape[0])  # the standard deviation of the result
    np.testing.assert_allclose(np.asarray(found), exact, rtol=0, atol=2e-6 * scale)


@pytest.mark.parametrize("shape", SHAPES)
def test_only_a_few_rows_on_a_cpu_are_taken_in_parts(shape):
    x, weight = SHAPES[shape]
    rows = x[0] * x[1]
    assert in_parts(lowered(x, weight, "cpu"), rows) == (rows <= FEW_ROWS and weight[0] % PARTS == 0)
    assert not in_parts(lowered(x, weight, "cuda"), rows)
    assert not in_parts(lowered(x, weight, "cpu", jnp.bfloat16), rows), "each part would be rounded"


def test_a_few_rows_are_bit_for_bit_the_rows_alone():
    """A token that is checked beside drafts gets the very numbers that it gets alone."""
    rng = np.random.default_rng(2)
    x, weight = rng.standard_normal((1, FEW_ROWS, 96), np.float32), rng.standard_normal((96, 2, 32), np.float32)
    product = jax.jit(lambda x, w: project(x, w, precision=HIGHEST))
    alone = np.concatenate([np.asarray(product(x[:, i : i + 1], weight)) for i in range(FEW_ROWS)], axis=1)
    np.testing.assert_array_equal(np.asarray(product(x, weight)), alone)


@pytest.mark.parametrize("shape", [name for name, (x, _) in SHAPES.items() if x[0] * x[1] <= FEW_ROWS])
def test_the_weight_is_not_copied(shape):
    x_shape, w_shape = SHAPES[shape]
    shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in (x_shape, w_shape)]
    compiled = jax.jit(lambda x, w: project(x, w, precision=HIGHEST)).lower(*shapes).compile()
    assert "conditional" not in compiled.as_text(), "nothing is decided while it runs"
    output = 4 * int(np.prod(w_shape[1:])) * x_shape[0] * x_shape[1]
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary <= (PARTS + 1) * output + 4096, "the parts of the result, at most"
    assert temporary < 4 * np.prod(w_shape) / 4


def test_gradients_are_those_of_the_plain_product():
    """Training goes through it too."""
    rng = np.random.default_rng(1)
    x, weight = (jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in ((1, 1, 16), (16, 4)))
    x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    split = jax.grad(lambda x, w: (project(x, w, precision=HIGHEST) ** 2).sum(), argnums=(0, 1))(x, weight)
    plain = jax.grad(lambda x, w: (jnp.einsum("bnm,mo->bno", x, w) ** 2).sum(), argnums=(0, 1))(x, weight)
    for one, other in zip(split, plain, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-4, atol=1e-5)
