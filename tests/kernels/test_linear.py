"""`linear` and `unembed` against the reference, with and without the CPU kernels."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from specjax_kernels import linear, reference, unembed
from specjax_kernels.cpu import quantised as cpu_quantised
from specjax_kernels.cpu import rows as cpu_rows


class Product(NamedTuple):
    """One shape of `linear` or `unembed`."""

    name: str
    kind: Literal["linear", "unembed", "transposed"]
    x: tuple[int, ...]  # [B, N, M]
    weight: tuple[int, ...]  # [M, *out]; transposed [W, M]
    dtype: str = "float32"  # of x
    stored: str | None = None  # dtype of the weight; None: that of x

    @property
    def rows(self) -> int:
        return math.prod(self.x[:-1])

    def arguments(self) -> tuple[Array, Array]:
        """x and weight, standard normals."""
        rng = np.random.default_rng(0)
        x, weight = (rng.standard_normal(shape, dtype=np.float32) for shape in (self.x, self.weight))
        return jnp.asarray(x, self.dtype), jnp.asarray(weight, self.stored or self.dtype)


PRODUCTS = (
    Product("qkv", "linear", (1, 1, 96), (96, 3, 5, 16)),
    Product("down", "linear", (1, 1, 1536), (1536, 576)),
    Product("indivisible-depth", "linear", (1, 1, 90), (90, 64)),
    Product("seven-rows", "linear", (1, 7, 64), (64, 3, 5, 16)),
    Product("eight-rows", "linear", (2, 4, 96), (96, 33)),
    Product("nine-rows", "linear", (3, 3, 96), (96, 64)),
    Product("several-tiles", "linear", (1, 2, 96), (96, 2, 4089)),
    Product("no-rows", "linear", (0, 3, 16), (16, 8)),
    Product("bfloat16", "linear", (1, 4, 96), (96, 2, 40), "bfloat16"),
    Product("bfloat16-one-row", "linear", (1, 1, 576), (576, 64), "bfloat16"),
    Product("float16", "linear", (1, 4, 96), (96, 40), "float16"),
    Product("stored-bfloat16", "linear", (1, 5, 576), (576, 96), stored="bfloat16"),
    Product("stored-float16", "linear", (1, 3, 576), (576, 96), stored="float16"),
    Product("stored-bfloat16-many-rows", "linear", (1, 9, 96), (96, 40), stored="bfloat16"),
    Product("head", "unembed", (1, 3, 64), (64, 1000)),
    Product("tied", "transposed", (2, 3, 60), (1100, 60)),
    Product("tied-stored-bfloat16", "transposed", (1, 4, 64), (700, 64), stored="bfloat16"),
    Product("tied-bfloat16-many-rows", "transposed", (1, 9, 64), (100, 64), "bfloat16"),
)

ULP = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}


@pytest.fixture(params=["kernel", "no kernel"])
def kernel(request, monkeypatch) -> bool:
    """Whether the CPU kernels can be called, which need Numba."""
    if request.param == "kernel":
        return True
    for module in (cpu_rows, cpu_quantised):
        monkeypatch.setattr(module, "unmet", lambda *_: "as where Numba is not installed")
    return False


def product_of(spec: Product):
    if spec.kind == "linear":
        return lambda x, weight: linear(x, weight)  # a new function: nothing of an earlier trace is reused
    return lambda x, weight: unembed(x, weight, transposed=spec.kind == "transposed")


def lowered(spec: Product, platform: str) -> str:
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in spec.arguments()]
    return jax.jit(product_of(spec)).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()


def assert_one_product(text: str, *, kernel: bool) -> None:
    """The program has either a call of the CPU kernel or a product of XLA."""
    counts = text.count("stablehlo.custom_call @specjax_"), text.count("dot_general")
    assert counts == ((1, 0) if kernel else (0, 1))


def has_kernel(spec: Product) -> bool:
    """Whether the CPU kernels take this product."""
    aligned = spec.x[-1] % (16 if spec.kind == "transposed" else cpu_rows.DEEP) == 0
    return 0 < spec.rows <= cpu_rows.MOST_ROWS and aligned and (spec.stored or spec.dtype) in cpu_rows.STORED


@pytest.mark.parametrize("spec", PRODUCTS, ids=lambda spec: spec.name)
def test_products(kernel, spec):
    x, weight = spec.arguments()
    output = jax.jit(product_of(spec))(x, weight)
    expected = reference.linear(x, weight, transposed=spec.kind == "transposed")
    assert output.shape == expected.shape and output.dtype == (spec.dtype if spec.kind == "linear" else jnp.float32)
    scale = np.sqrt(x.shape[-1])  # the standard deviation of the result
    once = 4 * ULP[spec.dtype] if spec.kind == "linear" and spec.dtype != "float32" else 0.0
    np.testing.assert_allclose(
        np.asarray(output, np.float32), np.asarray(expected), rtol=0, atol=(8e-6 + once) * max(scale, 1)
    )
    if spec.rows:
        assert_one_product(lowered(spec, "cuda"), kernel=False)
        assert_one_product(lowered(spec, "cpu"), kernel=kernel and has_kernel(spec))


def test_no_cpu_kernel_in_a_process_with_an_accelerator(monkeypatch):
    spec = Product("counted", "linear", (1, 1, 96), (96, 64))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(cpu_rows, "unmet", lambda dtype: pytest.fail("asked for"))
    for platform in ("cuda", "cpu"):
        assert_one_product(lowered(spec, platform), kernel=False)


@pytest.mark.parametrize("spec", list(filter(has_kernel, PRODUCTS)), ids=lambda spec: spec.name)
@pytest.mark.optimized
def test_the_weight_is_not_copied(spec):
    rows, depth = spec.rows, spec.x[-1]
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in spec.arguments()]
    compiled = jax.jit(product_of(spec)).lower(*shapes).compile()
    assert "conditional" not in compiled.as_text()
    output = 4 * math.prod(spec.weight) // depth * rows
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary <= (cpu_rows.PARTS + 1) * output + 8 * rows * depth + 4096, "at most the parts of the result"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_derivatives(kernel, dtype, tolerance, transposed):
    rng = np.random.default_rng(1)
    x, w, factor = (rng.normal(size=shape) for shape in ((2, 3, 16), (16, 7), (2, 3, 7)))
    to_w = np.einsum("bnm,bnw->mw", x, factor)
    expected = np.einsum("bnw,mw->bnm", factor, w), to_w.T if transposed else to_w

    def loss(x, w):
        return jnp.sum(unembed(x, w, transposed=transposed) * jnp.asarray(factor, jnp.float32))

    arguments = jnp.asarray(x, dtype), jnp.asarray(w.T if transposed else w, dtype)
    for ours, theirs in zip(jax.grad(loss, argnums=(0, 1))(*arguments), expected, strict=True):
        assert ours.dtype == dtype
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs, atol=tolerance * abs(theirs).max())
    if not transposed and dtype == "float32":  # several axes of outputs
        several = jax.grad(lambda x, w: jnp.sum(linear(x, w) ** 2), argnums=1)(arguments[0], arguments[1][:, None])
        plain = jax.grad(lambda x, w: jnp.sum(jnp.dot(x, w) ** 2), argnums=1)(*arguments)
        np.testing.assert_allclose(several[:, 0], plain, rtol=1e-4, atol=1e-4)


def test_a_product_in_half_precision_is_rounded_once(kernel):
    """After a sum over M in float32, which is exact for short rows."""
    rng = np.random.default_rng(2)
    x, w = jnp.asarray(rng.normal(size=(2, 4, 8)), "bfloat16"), jnp.asarray(rng.normal(size=(8, 3, 5)), "bfloat16")
    exact = np.einsum("bnm,mkq->bnkq", np.asarray(x, np.float64), np.asarray(w, np.float64))
    np.testing.assert_array_equal(
        linear(x, w).astype(jnp.float32), jnp.asarray(exact, jnp.float32).astype("bfloat16").astype(jnp.float32)
    )
    gradient = jax.grad(lambda x: linear(x, w).sum().astype(jnp.float32))(x)
    expected = np.broadcast_to(np.asarray(w, np.float64).sum((1, 2)), x.shape)
    np.testing.assert_allclose(gradient.astype(jnp.float32), expected, atol=0.05)


def test_a_weight_wider_than_the_activations_is_refused():
    with pytest.raises(ValueError, match="a bfloat16 product needs a bfloat16 weight, got float32"):
        linear(jnp.ones((1, 1, 8), jnp.bfloat16), jnp.ones((8, 2), jnp.float32))
