"""The product of a few rows with the norm before it and the activation or sum after it, for NVIDIA GPUs, in Pallas.

A step at a small batch reads each weight once and does little with it, so its time is that of the reads and of starting
kernels. This is one kernel where XLA has two or three. A program makes a tile of outputs from all of the depth:

    grid (tiles of outputs, tiles of rows)
    step k:  sums += (x[rows, k] * norm weight[k]) @ weight[k, outputs]        squares += x[rows, k] ** 2
    end:     y = sums * rsqrt(mean(squares) + epsilon) + bias;  activation(gate) * up;  y + residual

x is read by every program, from the L2 cache; weights are read once by each tile of rows. The norm's scale follows the
product, so that one pass over x does for both; in float16, where x times the norm's weight may overflow, it precedes it
in a pass of its own.

Pallas's Triton backend is deprecated (jax 0.11), see `pallas_triton.py`. On a CPU Pallas interprets the kernel, for
tests.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax_kernels.choice import ProductBlocks
from specjax_kernels.launch import padded
from specjax_kernels.norm import Norm

warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)

TILE = {2: 64, 4: 16}  # rows of one program, at most, by bytes of a number: exact float32 products fill registers


class Static(NamedTuple):
    """What the kernel is compiled for, besides shapes."""

    epsilon: float
    offset: float
    activation: Callable[[Array], Array] | None
    tile: int
    blocks: ProductBlocks
    extra: tuple[str, ...]  # the arrays there are besides x and the weight, in order


def multiply(
    x: Array,
    weight: Array,
    *,
    norm: Norm | None = None,
    bias: Array | None = None,
    gated: Callable[[Array], Array] | None = None,
    residual: Array | None = None,
    blocks: ProductBlocks,
    interpret: bool = False,
) -> Array:
    """x [R, M] times weight [M, W] or, `gated`, [M, 2, W]: [R, W] in x's dtype, which is the weight's.

    Args:
        bias: [W] or, `gated`, [2, W].
        gated: the activation of the first half, as a function of a float32 array.
        residual: [R, W].
    """
    rows, width = x.shape[0], weight.shape[-1]
    tile = min(padded(rows), TILE[x.dtype.itemsize])
    given = {"norm": None if norm is None else norm.weight, "bias": bias, "residual": residual}
    extra = {name: array for name, array in given.items() if array is not None}
    epsilon, offset = (0.0, 0.0) if norm is None else norm[1:]
    static = Static(epsilon, offset, gated, tile, blocks, tuple(extra))
    if not gated:
        weight = weight[:, None]
        extra |= {} if bias is None else {"bias": bias[None]}
    return pl.pallas_call(
        functools.partial(_kernel, static=static),
        grid=(pl.cdiv(width, blocks.columns), pl.cdiv(rows, tile)),
        out_shape=jax.ShapeDtypeStruct((rows, width), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        name="few_rows",
    )(x, weight, *extra.values())


def _kernel(x_ref: Any, weight_ref: Any, *refs: Any, static: Static) -> None:
    """One program: `tile` rows, `blocks.columns` outputs."""
    out_ref, at, blocks, dtype = refs[-1], dict(zip(static.extra, refs, strict=False)), static.blocks, x_ref.dtype
    (rows, depth), (gates, width) = x_ref.shape, weight_ref.shape[1:]
    step = blocks.depth
    row = pl.program_id(1) * static.tile + _range(static.tile)
    column = pl.program_id(0) * blocks.columns + _range(blocks.columns)
    is_row = None if rows % static.tile == 0 else (row < rows)[:, None]
    is_column = None if width % blocks.columns == 0 else (column < width)[None, :]
    scale_first = "norm" in at and dtype == jnp.float16
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None

    def inputs(k: Array) -> tuple[Array, Array | None, Array]:
        """Indices of the depth, which of them there are (None: all), and x there, float32."""
        index = k * step + _range(step)
        inside = None if depth % step == 0 else index < depth
        x = _load(x_ref.at[row[:, None], index[None, :]], _both(is_row, None if inside is None else inside[None, :]))
        return index, inside, x

    def square(k: Array, squares: Array) -> Array:
        x = inputs(k)[2].astype(jnp.float32)
        return squares + x * x

    def scale_of(squares: Array) -> Array:
        return jax.lax.rsqrt(jnp.sum(squares, axis=1) * (1 / depth) + static.epsilon)[:, None]

    trips, squares = pl.cdiv(depth, step), jnp.zeros((static.tile, step), jnp.float32)
    scale = jnp.ones((static.tile, 1), jnp.float32)
    if scale_first:
        scale = scale_of(jax.lax.fori_loop(jnp.int32(0), jnp.int32(trips), square, squares))

    def trip(k: Array, carry: tuple[Array, tuple[Array, ...]]) -> tuple[Array, tuple[Array, ...]]:
        squares, sums = carry
        index, inside, x = inputs(k)
        if "norm" in at:
            wide = x.astype(jnp.float32)
            factor = _load(at["norm"].at[index], inside).astype(jnp.float32) + static.offset
            squares = squares + wide * wide
            x = ((wide * scale if scale_first else wide) * factor[None, :]).astype(dtype)
        mask = _both(None if inside is None else inside[:, None], is_column)
        tiles = [_load(weight_ref.at[index[:, None], gate, column[None, :]], mask) for gate in range(gates)]
        return squares, tuple(
            one + jnp.dot(x, tile, precision=precision, preferred_element_type=jnp.float32)
            for one, tile in zip(sums, tiles, strict=True)
        )

    sums = (jnp.zeros((static.tile, blocks.columns), jnp.float32),) * gates
    squares, sums = jax.lax.fori_loop(jnp.int32(0), jnp.int32(trips), trip, (squares, sums))
    if "norm" in at and not scale_first:
        scale = scale_of(squares)
        sums = tuple(one * scale for one in sums)
    if "bias" in at:
        of_column = None if is_column is None else is_column[0]
        biases = (_load(at["bias"].at[gate, column], of_column) for gate in range(gates))
        sums = tuple(one + bias.astype(jnp.float32)[None, :] for one, bias in zip(sums, biases, strict=True))
    y, place, mask = sums[0], (row[:, None], column[None, :]), _both(is_row, is_column)
    if static.activation is not None:
        y = static.activation(y) * sums[1]
    if "residual" in at:
        y = y + _load(at["residual"].at[place], mask).astype(jnp.float32)
    plgpu.store(out_ref.at[place], y.astype(dtype), mask=mask)


def _load(ref: Any, mask: Array | None) -> Array:
    return plgpu.load(ref) if mask is None else plgpu.load(ref, mask=mask, other=0)


def _both(one: Array | None, other: Array | None) -> Array | None:
    """Both masks, of which None lets everything pass."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _range(size: int) -> Array:
    return jnp.arange(size, dtype=jnp.int32)
