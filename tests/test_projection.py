"""`project`: the product of a few rows, for which a CPU has a kernel (or takes it in parts, where that cannot be
called), is the plain product in every respect but speed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax_kernels import cpu_product

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
    "seven rows": ((1, 7, 64), (64, 3, 5, 16)),
    "eight rows": ((2, 4, 96), (96, 33)),
    "nine rows": ((3, 3, 96), (96, 64)),
    "wider than a tile": ((1, 2, 96), (96, 2, cpu_product.WIDE - 7)),
    "no rows": ((0, 3, 16), (16, 8)),
}


@pytest.fixture(params=["kernel", "no kernel"])
def kernel(request, monkeypatch) -> bool:
    """Whether the kernel for a few rows can be called. It can where the tests run: Numba is a dependency."""
    if request.param == "kernel":
        assert cpu_product.unmet() is None
        return True
    monkeypatch.setattr(cpu_product, "unmet", lambda transposed=False: "as where Numba is not installed")
    return False


def lowered(x: tuple[int, ...], weight: tuple[int, ...], platform: str, dtype=jnp.float32) -> str:
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in (x, weight)]
    traced = jax.jit(lambda x, w: project(x, w, precision=HIGHEST)).trace(*shapes)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def how(text: str, rows: int) -> str:
    """A call of the kernel, or a product for each row with a batch of `PARTS`, or one product; never two of these."""
    called, parts = text.count("stablehlo.custom_call @specjax_few_rows"), f"tensor<{PARTS}x" in text
    found = "kernel" if called else "parts" if parts else "plain"
    assert called <= 1 and text.count("dot_general") == {"kernel": 0, "parts": rows, "plain": 1}[found]
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_product(kernel, shape):
    x_shape, w_shape = SHAPES[shape]
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal(x_shape, np.float32), rng.standard_normal(w_shape, np.float32)
    exact = np.tensordot(x.astype(np.float64), weight.astype(np.float64), 1)
    found = jax.jit(lambda x, w: project(x, w, precision=HIGHEST))(x, weight)
    assert found.shape == exact.shape and found.dtype == jnp.float32
    scale = np.sqrt(w_shape[0])  # the standard deviation of the result
    np.testing.assert_allclose(np.asarray(found), exact, rtol=0, atol=2e-6 * scale)


@pytest.mark.parametrize("shape", SHAPES)
def test_only_a_few_rows_on_a_cpu_are_taken_otherwise(kernel, shape):
    x, weight = SHAPES[shape]
    rows, depth = x[0] * x[1], weight[0]
    if kernel and rows <= cpu_product.MOST_ROWS and depth % cpu_product.DEEP == 0:
        expected = "kernel"
    else:
        expected = "parts" if rows <= FEW_ROWS and depth % PARTS == 0 else "plain"
    if rows:
        assert how(lowered(x, weight, "cpu"), rows) == expected
    assert how(lowered(x, weight, "cuda"), rows) == "plain"
    assert how(lowered(x, weight, "cpu", jnp.bfloat16), rows) == "plain", "each part would be rounded"


def test_a_process_that_computes_on_an_accelerator_does_not_compile_the_kernel(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(cpu_product, "unmet", lambda transposed=False: pytest.fail("asked for"))
    assert how(lowered((1, 1, 96), (96, 64), "cuda"), 1) == "plain"
    assert how(lowered((1, 1, 96), (96, 64), "cpu"), 1) == "parts"


@pytest.mark.parametrize("weight", [(96, 2, 32), (96, 67), (1536, 40)], ids=str)
def test_a_few_rows_are_bit_for_bit_the_rows_alone(kernel, weight):
    """A token that is checked beside drafts gets the very numbers that it gets alone."""
    rng = np.random.default_rng(2)
    most = cpu_product.MOST_ROWS if kernel else FEW_ROWS
    x, weight = rng.standard_normal((1, most, weight[0]), np.float32), rng.standard_normal(weight, np.float32)
    product = jax.jit(lambda x, w: project(x, w, precision=HIGHEST))
    alone = np.concatenate([np.asarray(product(x[:, i : i + 1], weight)) for i in range(most)], axis=1)
    for rows in range(1, most + 1):
        np.testing.assert_array_equal(np.asarray(product(x[:, :rows], weight)), alone[:, :rows])


@pytest.mark.optimized
@pytest.mark.parametrize("shape", [name for name, (x, _) in SHAPES.items() if 0 < x[0] * x[1] <= cpu_product.MOST_ROWS])
def test_the_weight_is_not_copied(kernel, shape):
    x_shape, w_shape = SHAPES[shape]
    rows, depth = x_shape[0] * x_shape[1], w_shape[0]
    if rows > FEW_ROWS and not kernel:
        pytest.skip("the plain product copies it")
    shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in (x_shape, w_shape)]
    compiled = jax.jit(lambda x, w: project(x, w, precision=HIGHEST)).lower(*shapes).compile()
    assert "conditional" not in compiled.as_text(), "nothing is decided while it runs"
    output = 4 * int(np.prod(w_shape[1:])) * rows
    temporary = compiled.memory_analysis().temp_size_in_bytes
    parts = cpu_product.parts_of(depth, output // rows // 4) if kernel else PARTS
    assert temporary <= (max(parts, PARTS) + 1) * output + 4096, "the parts of the result, at most"
    if rows <= FEW_ROWS:
        assert temporary < 4 * np.prod(w_shape) / 4


def test_gradients_are_those_of_the_plain_product(kernel):
    """Training goes through it too."""
    rng = np.random.default_rng(1)
    x, weight = (jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in ((1, 1, 16), (16, 4)))
    x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    split = jax.grad(lambda x, w: (project(x, w, precision=HIGHEST) ** 2).sum(), argnums=(0, 1))(x, weight)
    plain = jax.grad(lambda x, w: (jnp.einsum("bnm,mo->bno", x, w) ** 2).sum(), argnums=(0, 1))(x, weight)
    for one, other in zip(split, plain, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-4, atol=1e-5)
