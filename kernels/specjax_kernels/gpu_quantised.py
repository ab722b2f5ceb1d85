"""The product of a few rows and a `Quantised` weight with a scale for each group, for NVIDIA GPUs (`gpu_language`).

XLA would write the dequantised weight to memory and read it again. Here a program makes a tile of outputs: it reads
their codes once, widens them in registers to x's dtype without rounding, and multiplies each group in tensor cores.
Scales are applied to the groups' sums, which are float32.

    grid (tiles of outputs, tiles of rows)
    step k:  part = x[rows, codes of step k] @ codes[outputs, step k].T        a step is a group or a part of one
             sums += part * scale[outputs, group] + sum(x) * offset[outputs, group]

A trip of the loop has several steps, for enough bytes in flight.
"""

from __future__ import annotations

from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jax import Array

from specjax_kernels import gpu_language
from specjax_kernels.gpu_language import Constants, at, device, dot, loop, tl
from specjax_kernels.launch import padded
from specjax_kernels.quantised import PACKED, Quantised

MOST_ROWS = 64  # for more rows dequantising the weight once is faster
OUTPUTS = 32  # of one program
# By the bytes of a number of x, because exact float32 products fill registers:
STEP = {2: 128, 4: 32}  # codes of one step, at most
TILE = {2: 64, 4: 16}  # rows of x of one program, at most
TRIP = 4096  # codes of one trip times rows of the tile, at most
WARPS, STAGES = 4, 4


def step_of(leaf: Quantised, bytes_of_x: int = 2) -> int:
    """The codes of one step: the largest power of two that divides a group, `STEP` at most."""
    return min(STEP[bytes_of_x], leaf.group & -leaf.group)


def takes(rows: int, leaf: Quantised) -> bool:
    """True if `multiply` has a kernel for this format: tensor cores need steps of a multiple of 16."""
    return 0 < rows <= MOST_ROWS and step_of(leaf) >= 16 and 0 not in leaf.out


def multiply(
    x: Array, leaf: Quantised, dtype: Any = jnp.float32, *, ids: Array | None = None, out: int | None = None
) -> Array:
    """x [N, M] times the transpose of a leaf [W, M] without `order`: [N, W] in a dtype. With `ids` int32 [N] the leaf
    is [X * out, M], and row n of x is multiplied with the matrix [out, M] of the index ids[n]: [N, out]."""
    rows, out = x.shape[0], leaf.out[0] if out is None else out
    tile = min(padded(rows if ids is None else 1), TILE[x.dtype.itemsize])
    step = step_of(leaf, x.dtype.itemsize)
    steps = leaf.depth // step
    s = Constants(
        rows=rows, out=out, depth=leaf.depth, tile=tile, outputs=OUTPUTS, step=step, half=PACKED // 2,
        together=next(n for n in range(max(1, TRIP // (tile * step)), 0, -1) if steps % n == 0),  # steps of a trip
        group=leaf.group, groups=leaf.scale.shape[-1], shared=leaf.rows,
        coarse=0 if leaf.super_scale is None else leaf.super_scale.shape[-1],  # super-scales of an output
        shift=leaf.shift, packed=leaf.bits == 4, mxfp4=leaf.is_mxfp4, offset=leaf.offset is not None,
        chosen=ids is not None,
    )  # fmt: skip
    # Any array replaces one that the leaf lacks.
    parts = (leaf.codes, leaf.scale, leaf.offset, leaf.super_scale, leaf.super_offset)
    arrays = (jnp.asarray(x if part is None else part) for part in parts)
    names = ("codes", "scale", "offset", "super_scale", "super_offset")
    grid = (-(-out // OUTPUTS), -(-rows // tile) if ids is None else rows)
    outputs = {"out": jax.ShapeDtypeStruct((rows, out), dtype)}
    inputs = {"x": x} | dict(zip(names, arrays, strict=True)) | {"ids": leaf.codes if ids is None else ids}
    return gpu_language.run(quantised_rows, inputs, outputs, grid=grid, warps=WARPS, stages=STAGES, s=s)["out"]


@device
@no_type_check
def exact(codes, dtype, s: tl.constexpr):
    """Codes in x's dtype; of MXFP4 divided by 2 ** 14, see `quantised._codes`."""
    if s.mxfp4:
        bits = tl.cast((codes & 7) << 9 | (codes & 8) << 12, tl.int16)
        return tl.cast(tl.cast(bits, tl.float16, bitcast=True), dtype)
    if s.shift:
        codes = tl.cast(codes, tl.int32) - s.shift
    return tl.cast(tl.cast(codes, tl.float32), dtype)


@device
@no_type_check
def of_group(scale, super_scale, shared, group, s: tl.constexpr):
    """A scale or an offset for each output, float32."""
    factor = tl.load(at(scale, (s.groups,), (shared, group)))
    if s.mxfp4:
        return tl.cast(tl.cast(factor, tl.int32) << 23, tl.float32, bitcast=True)
    factor = tl.cast(factor, tl.float32)
    if s.coarse:
        coarse = tl.load(at(super_scale, (s.coarse,), (shared, group // (s.groups // s.coarse))))
        factor = factor * tl.cast(coarse, tl.float32)
    return factor


@device
@no_type_check
def add_trip(trip, sums, fixed, s: tl.constexpr):
    """Adds the products of several steps: f32 [tile, outputs]."""
    x, codes, scale, offset, super_scale, super_offset, row, last = fixed
    is_row = (row < s.rows)[:, None]
    for n in tl.static_range(tl.constexpr(s.together)):
        k = trip * s.together + n
        start = k * s.step
        group = start // s.group
        if s.packed:
            byte = tl.arange(0, s.step // 2)
            place = (last[:, None], (k * (s.step // 2) + byte)[None, :])  # a division of `start` would hide alignment
            both = tl.cast(tl.load(at(codes, (s.depth // 2,), place)), tl.int32)
            column = start + byte % s.half + byte // s.half * (2 * s.half)  # of the low halves
            low = tl.load(at(x, (s.depth,), (row[:, None], column[None, :])), mask=is_row, other=0)
            high = tl.load(at(x, (s.depth,), (row[:, None], (column + s.half)[None, :])), mask=is_row, other=0)
            part = dot(low, exact(both & 15, low.dtype, s), True) + dot(high, exact(both >> 4, low.dtype, s), True)
            total = tl.sum(tl.cast(low, tl.float32), 1) + tl.sum(tl.cast(high, tl.float32), 1)
        else:
            column = start + tl.arange(0, s.step)
            weights = tl.load(at(codes, (s.depth,), (last[:, None], column[None, :])))
            inputs = tl.load(at(x, (s.depth,), (row[:, None], column[None, :])), mask=is_row, other=0)
            part = dot(inputs, exact(weights, inputs.dtype, s), True)
            total = tl.sum(tl.cast(inputs, tl.float32), 1)
        if s.mxfp4:
            part = part * 16384.0
        sums = sums + part * of_group(scale, super_scale, last // s.shared, group, s)[None, :]
        if s.offset:
            sums = sums + total[:, None] * of_group(offset, super_offset, last // s.shared, group, s)[None, :]
    return sums


@device
@no_type_check
def quantised_rows(x, codes, scale, offset, super_scale, super_offset, ids, out, s: tl.constexpr):
    """One program: `tile` rows of x [N, M], or a row with its own matrix; `OUTPUTS` outputs. The other arguments are
    those of `Quantised`."""
    output = tl.program_id(0) * s.outputs + tl.arange(0, s.outputs)
    row = tl.program_id(1) * s.tile + tl.arange(0, s.tile)
    last = tl.minimum(output, s.out - 1)  # outputs past the end read the last output and write nothing
    if s.chosen:
        row = tl.program_id(1) + tl.arange(0, s.tile) * s.rows  # the others lie past the end
        last = last + tl.load(at(ids, (), (tl.program_id(1),))) * s.out
    fixed = (x, codes, scale, offset, super_scale, super_offset, row, last)
    trips = s.depth // (s.step * s.together)
    sums = loop(add_trip, 0, trips, 1, tl.zeros((s.tile, s.outputs), tl.float32), fixed, s, True)
    tl.store(
        at(out, (s.out,), (row[:, None], output[None, :])),
        sums,
        mask=(row < s.rows)[:, None] & (output < s.out)[None, :],
    )
