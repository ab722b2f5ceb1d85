"""Products of activations and weights, and the RMS norm before them.

`linear` is for the layers and `unembed` for the output layer. Platform, dtypes, shape and number of rows choose the
implementation. `reference.linear` defines the products, `quantised.dequantise` the weights of few bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32

from specjax_kernels import mesh, quantised
from specjax_kernels.cpu import rows as cpu_rows
from specjax_kernels.platforms import by_platform
from specjax_kernels.quantised import Quantised, dot

Activation: TypeAlias = Callable[[Array, Array], Array]


class Norm(NamedTuple):
    """The arguments of `rms_norm` besides its input."""

    weight: Float[Array, "M"]
    epsilon: float
    offset: float = 0.0


def rms_norm(
    x: Float[Array, "... M"], weight: Float[Array, "M"], epsilon: float, *, offset: float = 0.0
) -> Float[Array, "... M"]:
    """x / rms(x) * weight; the statistics in float32, the product in x's dtype (as Hugging Face's Llama does). With an
    offset the factor is offset + weight and the product float32 (Gemma)."""
    wide = x.astype(jnp.float32)
    if x.size == x.shape[-1]:
        # XLA:GPU fuses the norm of a single row into one kernel only without operations between the sum and the root.
        # It fuses several rows in both forms, and this form is slower on a CPU.
        mean = jnp.sum((wide * wide + epsilon) * (1 / x.shape[-1]), axis=-1, keepdims=True)
    else:
        mean = jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon
    scale = jax.lax.rsqrt(mean)
    weight = jnp.expand_dims(weight, tuple(range(x.ndim - 1)))
    if offset:
        return (wide * scale * (offset + weight.astype(jnp.float32))).astype(x.dtype)
    return weight * (wide * scale).astype(x.dtype)


def linear(
    x: Float[Array, "B N M"],
    weight: Float[Array, "M *out"] | Quantised,
    *,
    norm: Norm | None = None,
    bias: Array | None = None,
    gated: Activation | None = None,
    residual: Array | None = None,
) -> Float[Array, "B N ..."]:
    """x times weight, contracted over the weight's first axis. Sums are float32; half-precision results are rounded
    once.

    Args:
        weight: [M, *out] in x's dtype or, if x is float32, in bfloat16 or float16. Or quantised and output-major,
            [*out, M], with the result of the dequantised weights.
        norm: applied to x first (`rms_norm`).
        bias: [*out], added to the product.
        gated: an activation; out is [2, I], gate and up, and the result ``gated(gate, up)``, [B, N, I].
        residual: added to the result; it has the same shape.

    Returns:
        [B, N, *out] in x's dtype. Float32 products are exact, even if XLA defaults to TF32.

    Raises:
        ValueError: the weight is wider than x, or quantised in a way that `quantised.check` refuses.
    """
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.epsilon, offset=norm.offset)
    out = _matrix_product(x, weight)
    if bias is not None:
        out = out + bias[None, None]
    if gated is not None:
        out = gated(out[:, :, 0], out[:, :, 1])
    return out if residual is None else residual + out


def _matrix_product(x: Array, weight: Any) -> Array:
    if isinstance(weight, Quantised):
        return quantised.product(x, weight, x.dtype)
    _check(x, weight)
    if x.dtype == jnp.float32:
        return cast(Array, _product(x, weight, 0))
    plain = functools.partial(dot, axis=0, out=x.dtype)
    if x.shape[0] * x.shape[1] == 1 and not _has_cpu_kernel(x, weight, 0):
        return plain(x, weight)

    def rounded(x: Array, weight: Array) -> Array:  # XLA:CPU is faster with a float32 result
        return cast(Array, _product(x, weight, 0)).astype(x.dtype)

    return by_platform(x, weight, cpu=rounded, default=plain)


def unembed(
    x: Float[Array, "... M"], weight: Float[Array, "A1 A2"] | Quantised, *, transposed: bool = False
) -> Float32[Array, "... W"]:
    """Logits of the output layer, float32 for all dtypes.

    The weight is [M, W] or, transposed (an embedding that is also the output layer), [W, M]; dtypes as in `linear`. A
    quantised weight is always [W, M]. The derivatives are products in the dtypes of x and weight with float32 sums,
    twice as fast as float32 products.
    """
    if isinstance(weight, Quantised):
        return quantised.product(x, weight, jnp.float32)
    _check(x, weight)
    return cast(Array, _product(x, weight, 1 if transposed else 0))


def _check(x: Array, weight: Array) -> None:
    if x.dtype != weight.dtype and x.dtype != jnp.float32:
        raise ValueError(f"a {x.dtype} product needs a {x.dtype} weight, got {weight.dtype}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: Array, weight: Array, axis: int) -> Array:
    """The product with float32 sums and a float32 result."""
    plain = functools.partial(dot, axis=axis, out=jnp.float32)
    if not _has_cpu_kernel(x, weight, axis):
        return plain(x, weight)
    return by_platform(x, weight, cpu=functools.partial(_by_kernel, axis=axis), default=plain)


def _product_backward(axis: int, saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, weight = saved
    rows, matrix = x.reshape(-1, x.shape[-1]), weight.reshape(weight.shape[0], -1)
    gradient = gradient.astype(x.dtype).reshape(rows.shape[0], -1)
    to_x = dot(gradient, matrix, 1 - axis, jnp.float32)
    first, second = (rows, gradient) if axis == 0 else (gradient, rows)
    to_weight = dot(first.T, second, 0, jnp.float32)
    return to_x.reshape(x.shape).astype(x.dtype), to_weight.reshape(weight.shape).astype(weight.dtype)


_product.defvjp(lambda x, weight, axis: (_product(x, weight, axis), (x, weight)), _product_backward)


def _has_cpu_kernel(x: Array, weight: Array, axis: int) -> bool:
    rows, shape = math.prod(x.shape[:-1]), weight.shape
    return mesh.devices() == 1 and cpu_rows.takes(
        rows, shape[0], math.prod(shape[1:]), weight.dtype, transposed=axis == 1
    )


def _by_kernel(x: Array, weight: Array, axis: int) -> Array:
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    out = cpu_rows.multiply(rows, weight.reshape(weight.shape[0], -1), transposed=axis == 1)
    return out.reshape(*x.shape[:-1], *(weight.shape[:1] if axis else weight.shape[1:]))
