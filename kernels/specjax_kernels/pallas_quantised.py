"""The product of a few rows and a `Quantised` weight with a scale for each group, for NVIDIA GPUs, in Pallas.

XLA would write the dequantised weight to memory and read it again. Here a program makes a tile of outputs: it reads
their codes once, widens them in registers to x's dtype without rounding, and multiplies each group in tensor cores.
Scales are applied to the groups' sums, which are float32.

    grid (tiles of outputs, tiles of rows)
    step k:  part = x[rows, codes of step k] @ codes[outputs, step k].T        a step is a group or a part of one
             sums += part * scale[outputs, group] + sum(x) * offset[outputs, group]

A trip of the loop has several steps, for enough bytes in flight. Pallas's Triton backend is deprecated (jax 0.11), see
`pallas_triton.py`. A CPU interprets the kernel, for tests.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

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


def multiply(x: Array, leaf: Quantised, dtype: Any = jnp.float32, *, interpret: bool = False) -> Array:
    """x [N, M] times the transpose of a leaf [W, M] without `order`: [N, W] in a dtype."""
    rows, outputs = x.shape[0], leaf.out[0]
    tile = min(padded(rows), TILE[x.dtype.itemsize])
    arrays, kind = jax.tree.flatten(leaf)
    return pl.pallas_call(
        functools.partial(_kernel, kind=kind, leaf=_shapes(leaf), rows=rows, tile=tile),
        grid=(pl.cdiv(outputs, OUTPUTS), pl.cdiv(rows, tile)),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name="quantised_rows",
    )(x, *arrays)


def _shapes(leaf: Quantised) -> Quantised:
    """The leaf with shapes instead of arrays, which a kernel must not capture."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), leaf)


def _kernel(x_ref: Any, *refs: Any, kind: Any, leaf: Quantised, rows: int, tile: int) -> None:
    """One program: `tile` rows of x, `OUTPUTS` outputs."""
    *arrays, out_ref = refs
    at: Quantised = jax.tree.unflatten(kind, arrays)
    step, packed, dtype = step_of(leaf, x_ref.dtype.itemsize), leaf.bits == 4, x_ref.dtype
    row, output = pl.program_id(1) * tile + _range(tile), pl.program_id(0) * OUTPUTS + _range(OUTPUTS)
    is_row, is_output = row < rows, output < leaf.out[0]
    last = jnp.minimum(output, leaf.out[0] - 1)  # outputs past the end read the last output and write nothing
    codes_of_step = _range(step // 2 if packed else step)
    in_step = codes_of_step % (PACKED // 2) + codes_of_step // (PACKED // 2) * PACKED  # of the low halves
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None

    def inputs(column: Array) -> Array:
        return plgpu.load(x_ref.at[row[:, None], column[None, :]], mask=is_row[:, None], other=0)

    def of_group(ref: Any, coarse: Any, group: Array) -> Array:
        """A scale or an offset for each output, float32."""
        shared = last // leaf.rows
        scale = plgpu.load(ref.at[shared, group]).astype(jnp.float32)
        if coarse is None:
            return scale
        many = ref.shape[1] // coarse.shape[1]
        return scale * plgpu.load(coarse.at[shared, group // many]).astype(jnp.float32)

    def dot(x: Array, codes: Array) -> Array:
        dims = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(x, codes, dims, precision=precision, preferred_element_type=jnp.float32)

    def exact(codes: Array) -> Array:
        if leaf.shift:
            codes = codes.astype(jnp.int32) - leaf.shift
        return codes.astype(jnp.float32).astype(dtype)

    def add(k: Array, sums: Array) -> Array:
        group = k * step // leaf.group
        codes = plgpu.load(at.codes.at[last[:, None], (k * codes_of_step.shape[0] + codes_of_step)[None, :]])
        if packed:
            low, high = inputs(k * step + in_step), inputs(k * step + in_step + PACKED // 2)
            codes = codes.astype(jnp.int32)
            parts = [(low, exact(codes & 15)), (high, exact(codes >> 4))]
        else:
            parts = [(inputs(k * step + codes_of_step), exact(codes))]
        part = functools.reduce(jnp.add, [dot(*both) for both in parts])
        sums = sums + part * of_group(at.scale, at.super_scale, group)[None, :]
        if at.offset is not None:
            total = functools.reduce(jnp.add, [jnp.sum(x.astype(jnp.float32), axis=1) for x, _ in parts])
            sums = sums + total[:, None] * of_group(at.offset, at.super_offset, group)[None, :]
        return sums

    steps = leaf.depth // step
    together = next(n for n in range(max(1, TRIP // (tile * step)), 0, -1) if steps % n == 0)

    def trip(k: Array, sums: Array) -> Array:
        for n in range(together):
            sums = add(k * together + n, sums)
        return sums

    sums = jax.lax.fori_loop(jnp.int32(0), jnp.int32(steps // together), trip, jnp.zeros((tile, OUTPUTS), jnp.float32))
    sums = sums.astype(out_ref.dtype)
    plgpu.store(out_ref.at[row[:, None], output[None, :]], sums, mask=is_row[:, None] & is_output[None, :])


def _range(size: int) -> Array:
    return jnp.arange(size, dtype=jnp.int32)
