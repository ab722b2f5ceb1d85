"""Building blocks that the families share: projections, RMS norm and rotary embeddings."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32
from specjax_kernels import cpu_product

from specjax.config import RopeConfig
from specjax.types import Positions

PARTS = 4
"""Into which a CPU without `specjax_kernels.cpu_product` splits the product of one row. On 2 cores 2, 3 and 8 parts are
slower."""

FEW_ROWS = 3
"""Up to which such a CPU takes row by row: the weight of one row's product is still in the cache for the next one's. Of
the plain product's time two rows take three quarters, three four fifths, four all of it."""


def precision_of(dtype: str) -> jax.lax.Precision:
    """float32 products default to TF32 on recent GPUs; float32 is promised, so ask for it."""
    return jax.lax.Precision.HIGHEST if dtype == "float32" else jax.lax.Precision.DEFAULT


def project(
    x: Float[Array, "B N M"], weight: Float[Array, "M *out"], *, precision: jax.lax.Precision
) -> Float[Array, "B N *out"]:
    """x times weight, over the weight's first axis.

    In float32 a CPU's product of a few rows is that of `specjax_kernels.cpu_product`, where it can be called: it takes
    as long as reading the weight. Where it cannot: XLA:CPU does not use all cores for the product of one row and a
    matrix, but it does for a batch of them. So the sum over M is taken in `PARTS` parts, which are the batch, and as
    the plain product of several rows copies the weight first, up to `FEW_ROWS` are taken one by one. Either way a row
    gets the same numbers alone and beside others. Other platforms, and half precision, which would round each part, get
    the plain product.
    """

    def plain(x: Array, weight: Array) -> Array:
        return jnp.einsum("bnm,m...->bn...", x, weight, precision=precision)

    def in_parts(x: Array, weight: Array) -> Array:
        parts = weight.reshape(PARTS, -1, *weight.shape[1:])

        def of_row(row: Array) -> Array:
            sums = jnp.einsum("cm,cm...->c...", row, parts, precision=precision)
            # Added one by one: that becomes a part of what follows, where a reduction would be an operation of its own.
            return sum(sums[1:], start=sums[0])

        rows = [of_row(row) for row in x.reshape(-1, PARTS, parts.shape[1])]
        return jnp.stack(rows).reshape(*x.shape[:2], *weight.shape[1:])

    def by_kernel(x: Array, weight: Array) -> Array:
        product = cpu_product.few_rows(x.reshape(-1, x.shape[2]), weight.reshape(weight.shape[0], -1))
        return product.reshape(*x.shape[:2], *weight.shape[1:])

    rows = x.shape[0] * x.shape[1]
    if x.dtype != jnp.float32:
        return (
            plain(x, weight) if rows == 1 else jax.lax.platform_dependent(x, weight, cpu=_rounded_once, default=plain)
        )
    depth, columns = weight.shape[0], math.prod(weight.shape[1:])
    if cpu_product.takes(rows, depth, columns, x.dtype, weight.dtype):
        return jax.lax.platform_dependent(x, weight, cpu=by_kernel, default=plain)
    if not 0 < rows <= FEW_ROWS or depth % PARTS:
        return plain(x, weight)
    return jax.lax.platform_dependent(x, weight, cpu=in_parts, default=plain)


def _rounded_once(x: Float[Array, "B N M"], weight: Float[Array, "M *out"]) -> Float[Array, "B N *out"]:
    """The product with a float32 result, rounded: what `plain` gives, by way of XLA:CPU's fast one."""
    out = logits(x, weight.reshape(weight.shape[0], -1)).astype(x.dtype)
    return out.reshape(*x.shape[:2], *weight.shape[1:])


def similarities(x: Float[Array, "... M"], rows: Float[Array, "W M"]) -> Float32[Array, "... W"]:
    """The products of every x with every one of the rows, in float32: `logits` for an embedding that is also the output
    layer."""

    def plain(x: Array, rows: Array) -> Array:
        precision = precision_of(str(x.dtype))
        return jnp.einsum("...m,wm->...w", x, rows, precision=precision, preferred_element_type=jnp.float32)

    def by_kernel(x: Array, rows: Array) -> Array:
        return cpu_product.few_rows_dot(x.reshape(-1, x.shape[-1]), rows).reshape(*x.shape[:-1], -1)

    if cpu_product.takes(math.prod(x.shape[:-1]), *rows.shape[::-1], x.dtype, rows.dtype, transposed=True):
        return jax.lax.platform_dependent(x, rows, cpu=by_kernel, default=plain)
    return plain(x, rows)


@jax.custom_vjp
def logits(x: Float[Array, "B N M"], weight: Float[Array, "M W"]) -> Float32[Array, "B N W"]:
    """x times weight, in float32 whatever their dtype.

    Its derivatives are products in the dtype of x and weight, with float32 sums: those of the float32 result would cost
    a training step twice as much.
    """
    precision = precision_of(str(x.dtype))
    if x.dtype == jnp.float32:
        return project(x, weight, precision=precision)
    return jnp.einsum("bnm,mw->bnw", x, weight, precision=precision, preferred_element_type=jnp.float32)


def _logits_forward(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return logits(x, weight), (x, weight)


def _logits_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, weight = saved
    gradient = gradient.astype(x.dtype)
    options: Any = {"precision": precision_of(str(x.dtype)), "preferred_element_type": jnp.float32}
    to_x = jnp.einsum("bnw,mw->bnm", gradient, weight, **options)
    to_weight = jnp.einsum("bnm,bnw->mw", x, gradient, **options)
    return to_x.astype(x.dtype), to_weight.astype(weight.dtype)


logits.defvjp(_logits_forward, _logits_backward)


def rms_norm(x: Float[Array, "... M"], weight: Float[Array, "M"], epsilon: float) -> Float[Array, "... M"]:
    """x / rms(x) * weight; the statistics in float32, the product in x's dtype (as Hugging Face's Llama does)."""
    wide = x.astype(jnp.float32)
    if x.size == x.shape[-1]:
        # The same mean of one row, with nothing between the sum and the root: XLA:GPU needs that to make one kernel of
        # a single row's norm, as it does of several rows' anyway. For those a CPU is slower this way.
        mean = jnp.sum((wide * wide + epsilon) * (1 / x.shape[-1]), axis=-1, keepdims=True)
    else:
        mean = jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon
    scale = jax.lax.rsqrt(mean)
    return jnp.expand_dims(weight, tuple(range(x.ndim - 1))) * (wide * scale).astype(x.dtype)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Rotations per token of each pair of channels, float32 [E / 2].

    `llama3` (Llama 3.1): wavelengths above original_max / low_freq_factor are stretched by `factor`, those below
    original_max / high_freq_factor kept, the ones between interpolated. Source: Hugging Face `modeling_rope_utils`.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequency = (1.0 / np.float32(rope.theta) ** exponent).astype(np.float32)
    if rope.scaling == "none":
        return frequency
    if rope.scaling == "linear":
        return frequency / np.float32(rope.factor)
    wavelength = 2 * math.pi / frequency
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - low) / (high - low)
    blended = (1 - smooth) * frequency / rope.factor + smooth * frequency
    scaled = np.where(wavelength > rope.original_max_position / low, frequency / rope.factor, blended)
    return np.where(wavelength < rope.original_max_position / high, frequency, scaled).astype(np.float32)


def rotations(
    rope: RopeConfig, head_dim: int, positions: Positions
) -> tuple[Float32[Array, "B N E2"], Float32[Array, "B N E2"]]:
    """cos and sin of each position's angles, [B, N, E / 2]. Computed once a forward."""
    angle = positions.astype(jnp.float32)[..., None] * inverse_frequencies(rope, head_dim)[None, None]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Float[Array, "B N *heads E"], cos: Float32[Array, "B N E2"], sin: Float32[Array, "B N E2"]) -> Array:
    """Rotary embedding in the half-split layout: channel i is paired with channel i + E / 2."""
    between = tuple(range(2, x.ndim - 1))
    cos, sin = jnp.expand_dims(cos, between), jnp.expand_dims(sin, between)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
