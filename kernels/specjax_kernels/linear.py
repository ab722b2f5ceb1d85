"""Products of activations and weights: `linear` for the layers, `unembed` for the output layer.

Platform, dtypes, shape and number of rows choose the implementation. `reference.linear` defines the products.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32

from specjax_kernels import mesh, quantised_product
from specjax_kernels.cpu import rows as cpu_rows
from specjax_kernels.norm import Norm, rms_norm
from specjax_kernels.platforms import by_platform
from specjax_kernels.quantised import Quantised

# Number of partial sums in a one-row float32 product on a CPU: XLA:CPU uses all cores for a batch of products only. On
# 2 cores 2, 3 and 8 parts are slower.
PARTS = 4
# Largest number of float32 rows that a CPU multiplies one by one, which costs it clearly less than a wide product: two
# rows take three quarters of the time, three rows four fifths, four rows all of it.
CHEAP_ROWS = 3


Activation: TypeAlias = Callable[[Array], Array]


def linear(
    x: Float[Array, "B N M"],
    weight: Float[Array, "M *out"] | Quantised,
    *,
    norm: Norm | None = None,
    bias: Array | None = None,
    gated: Activation | None = None,
    residual: Array | None = None,
) -> Float[Array, "B N ..."]:
    """x times weight, over the weight's first axis. Sums are float32; half-precision results are rounded once.

    Args:
        weight: [M, *out], stored in x's dtype or, beside a float32 x, in bfloat16 or float16. Or quantised, which is
            output-major: [*out, M]. Then the result is that of the dequantised weights.
        norm: the product is of `rms_norm` of x.
        bias: [*out], added to the product.
        gated: an activation; out is [2, I], and the result ``gated(out[0]) * out[1]``, [B, N, I].
        residual: added to the result, whose shape it has.

    Returns:
        [B, N, *out] in x's dtype. Float32 products are exact float32, also where XLA defaults to TF32.

    Raises:
        ValueError: the weight is wider than x, or quantised in a way that `quantised.check` refuses.
    """
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.epsilon, offset=norm.offset)
    out = _matrix_product(x, weight)
    if bias is not None:
        out = out + bias[None, None]
    if gated is not None:
        out = gated(out[:, :, 0]) * out[:, :, 1]
    return out if residual is None else residual + out


def _matrix_product(x: Array, weight: Any) -> Array:
    if isinstance(weight, Quantised):
        return quantised_product.product(x, weight, x.dtype)
    _check(x, weight)
    if x.dtype == jnp.float32:
        return cast(Array, _product(x, weight, 0))
    plain = functools.partial(_dot, axis=0, out=x.dtype)
    if x.shape[0] * x.shape[1] == 1 and not _has_cpu_kernel(x, weight, 0):
        return plain(x, weight)

    def rounded(x: Array, weight: Array) -> Array:  # XLA:CPU is faster with a float32 result
        return cast(Array, _product(x, weight, 0)).astype(x.dtype)

    return by_platform(x, weight, cpu=rounded, default=plain)


def unembed(
    x: Float[Array, "... M"], weight: Float[Array, "A1 A2"] | Quantised, *, transposed: bool = False
) -> Float32[Array, "... W"]:
    """Logits of the output layer, float32 whatever the dtypes.

    The weight is [M, W] or, transposed (an embedding that is also the output layer), [W, M]; dtypes as in `linear`. A
    quantised weight is [W, M] whatever `transposed` says. The derivatives are products in the dtypes of x and weight
    with float32 sums, twice as fast as float32 products.
    """
    if isinstance(weight, Quantised):
        return quantised_product.product(x, weight, jnp.float32)
    _check(x, weight)
    return cast(Array, _product(x, weight, 1 if transposed else 0))


def _check(x: Array, weight: Array) -> None:
    if x.dtype != weight.dtype and x.dtype != jnp.float32:
        raise ValueError(f"a {x.dtype} product needs a {x.dtype} weight, got {weight.dtype}")


def _dot(x: Array, weight: Array, axis: int, out: Any) -> Array:
    """XLA's own product over x's last axis and the given axis of the weight."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    axes = (((x.ndim - 1,), (axis,)), ((), ()))
    return jax.lax.dot_general(x, weight.astype(x.dtype), axes, precision=precision, preferred_element_type=out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: Array, weight: Array, axis: int) -> Array:
    """The product with float32 sums and a float32 result."""
    plain = functools.partial(_dot, axis=axis, out=jnp.float32)
    rows, depth = math.prod(x.shape[:-1]), x.shape[-1]
    if _has_cpu_kernel(x, weight, axis):
        return by_platform(x, weight, cpu=functools.partial(_by_kernel, axis=axis), default=plain)
    cheap = axis == 0 and 0 < rows <= CHEAP_ROWS and depth % PARTS == 0 and mesh.devices() == 1
    if x.dtype == weight.dtype == jnp.float32 and cheap:
        return by_platform(x, weight, cpu=_in_parts, default=plain)
    return plain(x, weight)


def _product_backward(axis: int, saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, weight = saved
    rows, matrix = x.reshape(-1, x.shape[-1]), weight.reshape(weight.shape[0], -1)
    gradient = gradient.astype(x.dtype).reshape(rows.shape[0], -1)
    to_x = _dot(gradient, matrix, 1 - axis, jnp.float32)
    first, second = (rows, gradient) if axis == 0 else (gradient, rows)
    to_weight = _dot(first.T, second, 0, jnp.float32)
    return to_x.reshape(x.shape).astype(x.dtype), to_weight.reshape(weight.shape).astype(weight.dtype)


_product.defvjp(lambda x, weight, axis: (_product(x, weight, axis), (x, weight)), _product_backward)


def _in_parts(x: Array, weight: Array) -> Array:
    """Row by row, each row in `PARTS` partial sums. A row gets the same numbers alone and beside others."""
    parts = weight.reshape(PARTS, -1, *weight.shape[1:])

    def of_row(row: Array) -> Array:
        sums = jnp.einsum("cm,cm...->c...", row, parts, precision=jax.lax.Precision.HIGHEST)
        # Added one by one: XLA fuses additions into what follows, and keeps a reduction as an operation of its own.
        return sum(sums[1:], start=sums[0])

    rows = [of_row(row) for row in x.reshape(-1, PARTS, parts.shape[1])]
    return jnp.stack(rows).reshape(*x.shape[:-1], *weight.shape[1:])


def _has_cpu_kernel(x: Array, weight: Array, axis: int) -> bool:
    rows, shape = math.prod(x.shape[:-1]), weight.shape
    return mesh.devices() == 1 and cpu_rows.takes(
        rows, shape[0], math.prod(shape[1:]), weight.dtype, transposed=axis == 1
    )


def _by_kernel(x: Array, weight: Array, axis: int) -> Array:
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    out = cpu_rows.multiply(rows, weight.reshape(weight.shape[0], -1), transposed=axis == 1)
    return out.reshape(*x.shape[:-1], *(weight.shape[:1] if axis else weight.shape[1:]))
