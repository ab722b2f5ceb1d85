"""Products of activations and weights, and the RMS norm before them.

`linear` is for the layers and `unembed` for the output layer. Platform, dtypes, shape and number of rows choose the
implementation. `reference.linear` defines the products, `quantised.dequantise` the weights of few bits; activations are
not quantised. In order: both operations, products of float weights, of quantised weights, and XLA's product.

Implementations of a product with quantised weights:

| device | rows | implementation |
|---|---|---|
| CPU | up to 16 | `cpu/quantised.py`: codes are widened in registers |
| CPU | more | `cpu/quantised.py`: one panel at a time is widened in the cache |
| CPU, without Numba | any | the weights are dequantised to float32, then XLA's product |
| NVIDIA, a scale for each output | any | XLA's product of codes, which it widens inside; then the scale |
| NVIDIA, groups | up to 64 | `gpu_quantised.py`: codes are widened in registers |
| NVIDIA, groups; other accelerators | more | the weights are dequantised to x's dtype, then XLA's product |
| NVIDIA before Ampere | any | the same operations, by elements or in parts (`dot`) |
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32

from specjax_kernels import gpu_language, gpu_quantised, mesh
from specjax_kernels.cpu import quantised as cpu_quantised
from specjax_kernels.cpu import rows as cpu_rows
from specjax_kernels.cpu.runtime import callable_here
from specjax_kernels.cpu.vectors import LANES
from specjax_kernels.platforms import after, before_ampere, by_platform, generation, on_nvidia
from specjax_kernels.quantised import Quantised, check, dequantise, scales, split_axes

Activation: TypeAlias = Callable[[Array, Array], Array]

FEW_ROWS, WIDENED = 4, 2**25
"""See `dot`."""


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
        return quantised_product(x, weight, x.dtype)
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
        return quantised_product(x, weight, jnp.float32)
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
    rows, (height, *width) = math.prod(x.shape[:-1]), weight.shape
    if mesh.devices() > 1:
        return False
    if axis == 0:
        return cpu_rows.takes(rows, height, math.prod(width), weight.dtype)
    layout = cpu_quantised.Layout.of_weights(str(weight.dtype))
    fits = rows <= cpu_rows.MOST_ROWS and height > 0 < width[0] and width[0] % LANES == 0
    return fits and str(weight.dtype) in cpu_rows.STORED and cpu_quantised.takes(rows, layout)


def _by_kernel(x: Array, weight: Array, axis: int) -> Array:
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    if axis == 0:
        out = cpu_rows.multiply(rows, weight.reshape(weight.shape[0], -1))
        return out.reshape(*x.shape[:-1], *weight.shape[1:])
    out = cpu_quantised.multiply(rows, cpu_quantised.Layout.of_weights(str(weight.dtype)), weight)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def skips_padding(params: Any) -> bool:
    """True if products with these parameters in this process skip the last rows of x that are all zeros."""
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Quantised))
    return callable_here() and any(isinstance(leaf, Quantised) for leaf in leaves)


def quantised_product(x: Array, leaf: Quantised, dtype: Any) -> Array:
    """x [..., M] times the transpose of the dequantised weights [*out, M]: [..., *out] in a dtype; sums are float32.

    Under a mesh a device has the outputs or the inputs of `Quantised.split`; sums over inputs are added.
    """
    check(leaf)
    if x.shape[-1] != leaf.depth:
        raise ValueError(f"a quantised weight of shape {leaf.shape} takes {leaf.depth} inputs, got {x.shape[-1]}")
    if mesh.devices() == 1:
        return _on_one_device(x, leaf, dtype)
    inputs, last = leaf.split == -1, x.ndim - 1

    def on_each(x: Array, leaf: Quantised) -> Array:
        if inputs:
            return jax.lax.psum(_on_one_device(x, leaf, jnp.float32), mesh.AXIS).astype(dtype)
        return _on_one_device(x, leaf, dtype)

    result = -1 if leaf.split is None or inputs else last + leaf.codes.ndim + leaf.split
    return mesh.apart(on_each, (last if inputs else -1, split_axes(leaf)), result, x, leaf)


def _on_one_device(x: Array, leaf: Quantised, dtype: Any) -> Array:
    rows = x.reshape(-1, leaf.depth)
    if leaf.order is not None:
        rows = rows[:, leaf.order]
    arrays, of_arrays = jax.tree.flatten(_matrix(leaf))

    def by(implementation: Any, *arguments: Array) -> Array:
        return implementation(arguments[0], jax.tree.unflatten(of_arrays, arguments[1:])).astype(dtype)

    def by_gpu_kernel(rows: Array, matrix: Quantised) -> Array:
        return (_gpu_kernel(rows, leaf, dtype) or by_dequantising)(rows, matrix)

    layout = cpu_quantised.layout_of(leaf)
    cpu = by_cpu_kernel if cpu_quantised.takes(rows.shape[0], layout) else by_dequantising
    if leaf.scale is None:
        cuda = default = by_dequantising
    elif leaf.scale.shape[-1] == 1 and leaf.bits == 8:
        cuda = default = by_channel
    else:
        cuda, default = by_gpu_kernel, by_dequantising
    branches = {"cpu": cpu, "cuda": cuda, "default": default}
    bound = {platform: functools.partial(by, implementation) for platform, implementation in branches.items()}
    out = by_platform(rows, *arrays, **bound)
    return out.reshape(*x.shape[:-1], *leaf.out)


def products_of_rows(x: Array, leaf: Quantised, ids: Array) -> Array:
    """Each row of x [R, M] times its own matrix of a leaf [X, *out, M], of the index `ids` int32 [R]: [R, *out] in x's
    dtype. Not for CPUs, where it would need much memory. Only the codes of these matrices are read."""
    arrays, of_arrays = jax.tree.flatten(leaf)

    def summed(x: Array, ids: Array, *arrays: Array) -> Array:
        weights = dequantise(jax.tree.unflatten(of_arrays, arrays)[ids], x.dtype).astype(jnp.float32)
        wide = x.reshape(len(x), *(1,) * (weights.ndim - 2), -1).astype(jnp.float32)
        return jnp.sum(wide * weights, axis=-1).astype(x.dtype)

    def by_kernel(x: Array, ids: Array, *arrays: Array) -> Array:
        leaf = jax.tree.unflatten(of_arrays, arrays)
        # XLA would write its scales in float32. It fuses those of other formats.
        kernel = _gpu_kernel(x[:1], leaf, x.dtype) if leaf.is_mxfp4 else None
        if kernel is None:
            return summed(x, ids, *arrays)
        return kernel(x, _matrix(leaf), ids=ids, out=math.prod(leaf.out[1:])).reshape(len(x), *leaf.out[1:])

    return by_platform(x, ids, *arrays, cuda=by_kernel, default=summed)


def _matrix(leaf: Quantised) -> Quantised:
    """The leaf without `order`, with all outputs in one axis."""

    def flat(array: Any) -> Array:
        return jnp.asarray(array).reshape(-1, array.shape[-1])

    return jax.tree.map(flat, dataclasses.replace(leaf, order=None))


def _gpu_kernel(rows: Array, leaf: Quantised, dtype: Any) -> Any:
    """The implementation for an NVIDIA GPU, or None if it does not take this product."""
    if not gpu_quantised.takes(rows.shape[0], leaf) or before_ampere():
        return None
    if not on_nvidia() and not gpu_language.lowers():  # cross-compilation
        return None
    fp8 = leaf.codes.dtype == jnp.float8_e4m3fn
    if fp8 and on_nvidia() and tuple(map(int, str(generation()).split("."))) < (8, 9):
        return None  # Triton does not convert it
    return functools.partial(gpu_quantised.multiply, dtype=dtype)


def by_cpu_kernel(rows: Array, leaf: Quantised) -> Array:
    layout = cpu_quantised.layout_of(leaf)
    assert layout is not None
    codes, *others = jax.tree.leaves(leaf)
    return cpu_quantised.multiply(rows.astype(jnp.float32), layout, codes, *others)


def by_dequantising(rows: Array, leaf: Quantised) -> Array:
    """The product with dequantised weights: in float32 on a CPU, elsewhere in x's dtype with float32 sums."""

    def plain(rows: Array, *arrays: Array, dtype=rows.dtype) -> Array:
        weights = dequantise(jax.tree.unflatten(kind, arrays), dtype)
        return dot(rows.astype(dtype), weights, 1, jnp.float32, stored=False)

    arrays, kind = jax.tree.flatten(leaf)
    if rows.dtype == jnp.float32:
        return plain(rows, *arrays)
    return by_platform(rows, *arrays, cpu=functools.partial(plain, dtype=jnp.float32), default=plain)


def by_channel(rows: Array, leaf: Quantised) -> Array:
    """The product of codes, then one scale for each output. Codes of 8 bits are exact in every dtype of x, and XLA
    widens them inside its product."""
    scale, offset = scales(leaf)
    out = dot(rows, jnp.asarray(leaf.codes), 1, jnp.float32)
    wide = [jnp.repeat(array[:, 0], leaf.rows) for array in (scale, offset) if array is not None]
    if leaf.shift:
        wide.append(wide[0] * jnp.float32(-leaf.shift))
    out = out * wide[0][None]
    if len(wide) == 1:
        return out
    return out + jnp.sum(rows.astype(jnp.float32), axis=1, keepdims=True) * wide[1][None]


def dot(x: Array, weight: Array, axis: int, out: Any, *, stored: bool = True) -> Array:
    """XLA's product over the last axis of x and one axis of the weight; float32 products are exact.

    Before Ampere, XLA cannot widen a weight inside its product. There a few rows are multiplied and summed by elements,
    in one kernel; more rows by parts of at most `WIDENED` weights, one after another. `stored`: the weight is an array
    in memory, not a result.
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    axes = (((x.ndim - 1,), (axis,)), ((), ()))

    def product(part: Array) -> Array:
        return jax.lax.dot_general(x, part.astype(x.dtype), axes, precision=precision, preferred_element_type=out)

    rows = math.prod(x.shape[:-1])
    taken = stored and weight.dtype == x.dtype != jnp.bfloat16 and (x.dtype == jnp.dtype(out) or rows > 1)
    if taken or not rows or not before_ampere():
        return product(weight)
    shape = (*x.shape[:-1], *(weight.shape[1:] if axis == 0 else weight.shape[:1]))
    matrix = weight.reshape(weight.shape[0], -1)
    if rows <= FEW_ROWS:
        wide = matrix.astype(jnp.float32)
        sums = [(wide * jnp.expand_dims(row, 1 - axis)).sum(axis) for row in x.reshape(rows, -1).astype(jnp.float32)]
        return jnp.stack(sums).astype(out).reshape(shape)
    width, parts = -(-matrix.shape[1 - axis] // -(-matrix.size // WIDENED)), [x]
    for start in range(0, matrix.shape[1 - axis], width):
        end = min(start + width, matrix.shape[1 - axis])
        parts.append(product(after(jax.lax.slice_in_dim(matrix, start, end, axis=1 - axis), parts[-1])))
    return jnp.concatenate(parts[1:], axis=-1).reshape(shape)
