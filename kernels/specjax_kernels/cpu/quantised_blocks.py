"""The product of many float32 rows and a quantised matrix on a CPU: a panel of the matrix at a time is widened into a
cache, where all rows of x are multiplied with it.

Dequantised as a whole, a matrix goes to memory and back, which takes longer than its products with some hundred rows;
`quantised_rows` widens it again for every eight rows. A row's sums are taken in one order however many rows there are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32

from specjax_kernels.cpu.quantised_dots import Layout, emit_widened
from specjax_kernels.cpu.quantised_rows import MOST_ROWS, scales_reader
from specjax_kernels.cpu.runtime import Tools, callable_here, register
from specjax_kernels.cpu.vectors import Vectors, lanes

BLOCKS = {16: (14, 8), 8: (6, 3)}
"""By the processor's lanes, rows of x that are multiplied together: the most whose sums with a panel fit in registers
(32 of 16 lanes, or 16 of 8), and fewer for the rest. A last block takes rows along that another has multiplied, too."""

TILES = 32  # of a matrix, at most; a tile has whole panels
UNROLLED = 4  # inputs of one turn of the inner loop, of which layouts have a multiple


def takes(rows: int, layout: Layout | None) -> bool:
    """Whether `multiply` can be called here. The first call loads the kernel or compiles it, which takes seconds."""
    return rows > MOST_ROWS and layout is not None and callable_here() and unmet(layout) is None


def unmet(layout: Layout) -> str | None:
    """Why the kernel cannot be called in this process; None: it can."""
    return register(f"{layout.name}_blocks", partial(_kernel, layout=layout))


def multiply(x: Float32[Array, "N M"], layout: Layout, codes: Array, *scales: Array) -> Float32[Array, "N W"]:
    """x times the transpose of the matrix [W, M] of these codes; see `quantised_rows.multiply`. Vmapped, one by one."""
    columns, panel = codes.shape[0], 2 * lanes()
    of_tile = panels_of_tile(columns, panel)
    tiles = -(-columns // (of_tile * panel))
    # A panel, some widened rows of codes, and the sums of a panel that is not full.
    room = (panel + panel // 2) * x.shape[1] + BLOCKS[panel // 2][0] * panel
    shapes = [
        jax.ShapeDtypeStruct((x.shape[0], columns), jnp.float32),
        jax.ShapeDtypeStruct((tiles, room), jnp.float32),
    ]
    return jax.ffi.ffi_call(f"{layout.name}_blocks", shapes, vmap_method="sequential")(x, codes, *scales)[0]


def panels_of_tile(columns: int, panel: int) -> int:
    panels = (columns + panel - 1) // panel
    return (panels + TILES - 1) // TILES


def _kernel(tools: Tools, layout: Layout) -> tuple[Any, Any]:
    """(x [N, M], codes, scales) -> [N, W] and memory for each tile. A tile is some panels."""
    argument, size, result, result_size = tools.argument, tools.argument_size, tools.result, tools.result_size
    width = lanes()
    panel, (most, few) = 2 * width, BLOCKS[width]
    scales_of, per_tile, floats = scales_reader(tools, layout), tools.inlined(panels_of_tile), tools.floats
    widen = tools.emitted(10, partial(emit_widened, layout))
    turn, block = tools.emitted(3, _turn), tools.emitted(6, partial(_block, (most, few)))

    def tiles(call: int) -> int:
        columns = size(call, 1, 0)
        rows_of_tile = per_tile(columns, panel) * panel
        return (columns + rows_of_tile - 1) // rows_of_tile

    def tile(call: int, index: int) -> int:
        rows, depth, columns = size(call, 0, 0), size(call, 0, 1), size(call, 1, 0)
        xs, codes, outs = argument(call, 0), argument(call, 1), result(call, 0)
        scales = scales_of(call)
        across = per_tile(columns, panel) * panel
        packed = result(call, 1) + 4 * index * result_size(call, 1, 1)
        wide = packed + 4 * panel * depth
        spare = wide + 4 * width * depth
        for first in range(index * across, min(index * across + across, columns), panel):
            count = min(panel, columns - first)
            for half in range(0, panel, width):
                start = min(first + half, columns)
                end = min(first + half + width, columns)
                for n in range(start, end):
                    widen(n, wide + 4 * (n - start) * depth, codes, depth, *scales)
                turn(wide, packed + 4 * half, depth)
            row = 0
            while row < rows:
                these = most if rows - row > few else few
                row = min(row, rows - these)
                x, out = xs + 4 * row * depth, outs + 4 * (row * columns + first)
                if count == panel:
                    block(these, x, packed, depth, out, columns)
                else:
                    block(these, x, packed, depth, spare, panel)
                    for n in range(these):
                        found, kept = floats(spare + 4 * n * panel, count), floats(out + 4 * n * columns, count)
                        for column in range(count):
                            kept[column] = found[column]
                row += these
        return 0

    return tiles, tile


def _turn(b: Any, values: Any) -> None:
    """Writes `lanes` rows [lanes, depth] as columns of a panel [depth, 2 lanes]: squares are turned in registers."""
    v = Vectors(b)
    rows, panel, depth = values
    word, width = v.word, v.width
    with v.control.for_range(b, b.udiv(depth, word(width)), intp=word) as loop:
        at = b.mul(loop.index, word(width))
        square = [
            v.load(v.lanes, b.add(rows, b.mul(word(4), b.add(at, b.mul(depth, word(row)))))) for row in range(width)
        ]
        step = 1
        while step < width:  # swaps the off-diagonal squares of `step` in squares of twice the size
            keep = [i + (i & step > 0) * (width - step) for i in range(width)]
            swap = [i + step if not i & step else i + width for i in range(width)]
            square = [
                v.shuffled(square[row], square[row + step], keep)
                if not row & step
                else v.shuffled(square[row - step], square[row], swap)
                for row in range(width)
            ]
            step *= 2
        for k, column in enumerate(square):
            place = b.add(panel, b.mul(word(8 * width), b.add(at, word(k))))
            v.store(column, place)


def _block(sizes: tuple[int, ...], b: Any, values: Any) -> None:
    """The products of `count` rows of x, one of `sizes`, and a panel: sums in registers over all inputs."""
    count, x, panel, depth, out, apart = values
    for rows in sizes:
        with b.if_then(b.icmp_signed("==", count, count.type(rows))):
            v = Vectors(b)
            word, width = v.word, v.width
            xs = [b.add(x, b.mul(b.mul(depth, word(4)), word(row))) for row in range(rows)]
            sums = [[v.variable(v.zeros()) for _ in range(2)] for _ in xs]
            with v.control.for_range(b, b.udiv(depth, word(UNROLLED)), intp=word) as loop:
                for k in range(UNROLLED):
                    at = b.add(b.mul(loop.index, word(UNROLLED)), word(k))
                    line = b.add(panel, b.mul(at, word(8 * width)))
                    weights = [v.load(v.lanes, b.add(line, word(4 * width * half))) for half in range(2)]
                    for address, of_row in zip(xs, sums, strict=True):
                        place = b.add(address, b.mul(at, word(4)))
                        number = v.splat(b.load(b.inttoptr(place, v.float.as_pointer()), align=4))
                        for weight, total in zip(weights, of_row, strict=True):
                            b.store(v.fused(number, weight, b.load(total)), total)
            for row, of_row in enumerate(sums):
                for half, total in enumerate(of_row):
                    place = b.add(out, b.mul(word(4), b.add(b.mul(apart, word(row)), word(width * half))))
                    v.store(b.load(total), place)
