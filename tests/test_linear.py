"""`linear` and `unembed`: whichever implementation runs, the reference's product; each runs where it should."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax_kernels import CHEAP_ROWS, linear, reference, unembed
from specjax_kernels.cpu import rows as cpu_rows
from specjax_kernels.linear import PARTS
from specjax_kernels.specs import PRODUCTS, Product

ULP = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}


@pytest.fixture(params=["kernel", "no kernel"])
def kernel(request, monkeypatch) -> bool:
    """Whether the CPU's kernels can be called. They can where the tests run: Numba is a dependency."""
    if request.param == "kernel":
        return True
    monkeypatch.setattr(cpu_rows, "unmet", lambda dtype, transposed: "as where Numba is not installed")
    return False


def product_of(spec: Product):
    if spec.kind == "linear":
        return lambda x, weight: linear(x, weight)  # a new function: nothing of an earlier trace is reused
    return lambda x, weight: unembed(x, weight, transposed=spec.kind == "transposed")


def lowered(spec: Product, platform: str) -> str:
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in spec.arguments()]
    return jax.jit(product_of(spec)).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()


def how(text: str, rows: int) -> str:
    """A call of the kernel, or a product for each row with a batch of `PARTS`, or one product; never two of these."""
    called, parts = text.count("stablehlo.custom_call @specjax_rows"), f"tensor<{PARTS}x" in text
    found = "kernel" if called else "parts" if parts else "plain"
    assert called <= 1 and text.count("dot_general") == {"kernel": 0, "parts": rows, "plain": 1}[found]
    return found


@pytest.mark.parametrize("spec", PRODUCTS, ids=lambda spec: spec.name)
def test_the_result_is_the_references(kernel, spec):
    x, weight = spec.arguments()
    found = jax.jit(product_of(spec))(x, weight)
    expected = reference.linear(x, weight, transposed=spec.kind == "transposed")
    assert found.shape == expected.shape and found.dtype == (spec.dtype if spec.kind == "linear" else jnp.float32)
    scale = np.sqrt(x.shape[-1])  # the standard deviation of the result
    once = 4 * ULP[spec.dtype] if spec.kind == "linear" and spec.dtype != "float32" else 0.0
    np.testing.assert_allclose(
        np.asarray(found, np.float32), np.asarray(expected), rtol=0, atol=(8e-6 + once) * max(scale, 1)
    )


@pytest.mark.parametrize("spec", PRODUCTS, ids=lambda spec: spec.name)
def test_where_each_implementation_runs(kernel, spec):
    rows, depth, stored = spec.rows, spec.weight[0], spec.stored or spec.dtype
    if not rows:
        return
    on_accelerator = how(lowered(spec, "cuda"), rows)
    assert on_accelerator == "plain"
    divides = spec.kind == "transposed" or depth % cpu_rows.DEEP == 0
    if kernel and rows <= cpu_rows.MOST_ROWS and divides and stored in cpu_rows.STORED:
        expected = "kernel"
    else:
        in_parts = spec.dtype == stored == "float32" and spec.kind != "transposed"
        expected = "parts" if in_parts and rows <= CHEAP_ROWS and depth % PARTS == 0 else "plain"
    assert how(lowered(spec, "cpu"), rows) == expected


def test_a_process_that_computes_on_an_accelerator_does_not_compile_the_kernel(monkeypatch):
    spec = Product("counted", "linear", (1, 1, 96), (96, 64))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(cpu_rows, "unmet", lambda dtype, transposed: pytest.fail("asked for"))
    assert how(lowered(spec, "cuda"), 1) == "plain"
    assert how(lowered(spec, "cpu"), 1) == "parts"


@pytest.mark.parametrize("weight", [(96, 2, 32), (96, 67), (1536, 40)], ids=str)
def test_a_few_rows_are_bit_for_bit_the_rows_alone(kernel, weight):
    """A token that is checked beside drafts gets the very numbers that it gets alone."""
    rng = np.random.default_rng(2)
    most = cpu_rows.MOST_ROWS if kernel else CHEAP_ROWS
    x, weight = rng.standard_normal((1, most, weight[0]), np.float32), rng.standard_normal(weight, np.float32)
    product = jax.jit(lambda x, weight: linear(x, weight))
    alone = np.concatenate([np.asarray(product(x[:, i : i + 1], weight)) for i in range(most)], axis=1)
    for rows in range(1, most + 1):
        np.testing.assert_array_equal(np.asarray(product(x[:, :rows], weight)), alone[:, :rows])


@pytest.mark.parametrize("spec", PRODUCTS, ids=lambda spec: spec.name)
@pytest.mark.optimized
def test_the_weight_is_not_copied(kernel, spec):
    rows, stored = spec.rows, spec.stored or spec.dtype
    depth = spec.x[-1]
    called = kernel and rows <= cpu_rows.MOST_ROWS and stored in cpu_rows.STORED and depth % cpu_rows.DEEP == 0
    parts = rows <= CHEAP_ROWS and spec.dtype == stored == "float32" and spec.kind == "linear" and depth % PARTS == 0
    if not rows or not (called or parts):
        pytest.skip("XLA's product of several rows copies it")
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in spec.arguments()]
    compiled = jax.jit(product_of(spec)).lower(*shapes).compile()
    assert "conditional" not in compiled.as_text(), "nothing is decided while it runs"
    padded = rows + -rows % cpu_rows.TOGETHER
    output = 4 * math.prod(spec.weight) // depth * padded
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary <= (cpu_rows.PARTS + 1) * output + 8 * padded * depth + 4096, "the parts of the result, at most"


def test_gradients_are_those_of_the_plain_product(kernel):
    rng = np.random.default_rng(1)
    x, weight = (jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in ((1, 1, 16), (16, 2, 4)))
    found = jax.grad(lambda x, w: (linear(x, w) ** 2).sum(), argnums=(0, 1))(x, weight)
    plain = jax.grad(lambda x, w: (jnp.einsum("bnm,mgo->bngo", x, w) ** 2).sum(), argnums=(0, 1))(x, weight)
    for one, other in zip(found, plain, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_the_derivatives_of_logits_are_those_of_the_product(dtype, tolerance, transposed):
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(2, 3, 16)), rng.normal(size=(16, 7))
    weight = rng.normal(size=(2, 3, 7))
    given = w.T if transposed else w
    found = jax.grad(
        lambda x, w: jnp.sum(unembed(x, w, transposed=transposed) * jnp.asarray(weight, jnp.float32)), argnums=(0, 1)
    )(jnp.asarray(x, dtype), jnp.asarray(given, dtype))
    to_w = np.einsum("bnm,bnw->mw", x, weight)
    wanted = np.einsum("bnw,mw->bnm", weight, w), to_w.T if transposed else to_w
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == dtype
        np.testing.assert_allclose(mine.astype(jnp.float32), theirs, atol=tolerance * abs(theirs).max())


def test_a_product_in_half_precision_is_rounded_once(kernel):
    """The sum over M in float32, then one rounding: bit for bit, as the rows are short."""
    rng = np.random.default_rng(2)
    x, w = jnp.asarray(rng.normal(size=(2, 4, 8)), "bfloat16"), jnp.asarray(rng.normal(size=(8, 3, 5)), "bfloat16")
    exact = np.einsum("bnm,mkq->bnkq", np.asarray(x, np.float64), np.asarray(w, np.float64))
    np.testing.assert_array_equal(
        linear(x, w).astype(jnp.float32), jnp.asarray(exact, jnp.float32).astype("bfloat16").astype(jnp.float32)
    )
    gradient = jax.grad(lambda x: linear(x, w).sum().astype(jnp.float32))(x)
    wanted = np.asarray(w, np.float64).sum((1, 2))
    np.testing.assert_allclose(gradient.astype(jnp.float32), np.broadcast_to(wanted, x.shape), atol=0.05)


def test_a_weight_wider_than_the_activations_is_refused():
    with pytest.raises(ValueError, match="a bfloat16 product needs a bfloat16 weight, got float32"):
        linear(jnp.ones((1, 1, 8), jnp.bfloat16), jnp.ones((8, 2), jnp.float32))
