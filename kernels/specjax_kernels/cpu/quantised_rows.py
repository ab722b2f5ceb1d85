"""The product of a few float32 rows and a quantised matrix on a CPU, in little more than the time of reading its codes.

Codes become float32 in registers, once for several rows of x. The products of a group of codes are added up first and
multiplied by the group's scale then: sum(x * (code * scale + offset)) = scale * sum(x * code) + offset * sum(x). Codes
in 16 bits are the weights themselves. A row's sums are taken in one order however many rows there are, so its result is
bit for bit that of the row alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float32

from specjax_kernels.cpu import object_code
from specjax_kernels.cpu.quantised_dots import LANES, Layout, emit
from specjax_kernels.cpu.runtime import Tools, callable_here, register

MOST_ROWS = 16  # for more `quantised_blocks` takes less time
TOGETHER = {True: 8, False: 3}  # rows of x that share a weight: with 32 registers of 16 lanes, or 16 of 8
TILE = 512  # rows of codes in one tile, at most
TILES = 16  # of a matrix of so many times `LANES` rows or more, at least: the threads share them


def takes(rows: int, layout: Layout | None) -> bool:
    """Whether `multiply` can be called here. The first call loads the kernel or compiles it, which takes seconds."""
    if layout is None or not 0 < rows <= MOST_ROWS:
        return False
    return callable_here() and unmet(layout) is None


def unmet(layout: Layout) -> str | None:
    """Why the kernel cannot be called in this process; None: it can."""
    return register(layout.name, partial(_kernel, layout=layout))


def multiply(x: Float32[Array, "N M"], layout: Layout, codes: Array, *scales: Array) -> Float32[Array, "N W"]:
    """x times the transpose of the matrix [W, M] of these codes [W, ...]. `scales`: the scales and, where the layout
    has them, offsets, super-scales and super-offsets, each [W / n, ...] for n rows that share theirs. Vmapped, one by
    one."""
    columns = codes.shape[0]
    shapes = [jax.ShapeDtypeStruct((x.shape[0], columns), jnp.float32)]
    if layout.has_offset:  # memory for each tile's sums of the groups of x
        tiles = -(-columns // tile_rows(columns))
        shapes.append(jax.ShapeDtypeStruct((tiles, max(TOGETHER.values()), scales[0].shape[1] + LANES), jnp.float32))
    return jax.ffi.ffi_call(layout.name, shapes, vmap_method="sequential")(x, codes, *scales)[0]


def tile_rows(columns: int) -> int:
    """Rows of codes in a tile."""
    return max(LANES, min(TILE, (columns // TILES + LANES - 1) // LANES * LANES))


def _kernel(tools: Tools, layout: Layout) -> tuple[Any, Any]:
    """(x [N, M], codes, scales) -> [N, W] and, with offsets, memory. A tile is some rows of codes."""
    argument, size, result, result_size = tools.argument, tools.argument_size, tools.result, tools.result_size
    products = products_of(tools, layout)
    scales_of, rows_of_tile, has_memory = scales_reader(tools, layout), tools.inlined(tile_rows), layout.has_offset

    def tiles(call: int) -> int:
        columns = size(call, 1, 0)
        return (columns + rows_of_tile(columns) - 1) // rows_of_tile(columns)

    def tile(call: int, index: int) -> int:
        rows, depth, columns = size(call, 0, 0), size(call, 0, 1), size(call, 1, 0)
        xs, codes, outs, most = argument(call, 0), argument(call, 1), result(call, 0), rows_of_tile(columns)
        scale, offset, super_scale, super_offset, groups, shared = scales_of(call)
        memory = 0
        if has_memory:
            memory = result(call, 1) + 4 * index * result_size(call, 1, 1) * result_size(call, 1, 2)
        start, end = index * most, min(index * most + most, columns)
        products(
            rows, start, end, codes, scale, offset, super_scale, super_offset, xs, memory, outs, depth, columns, groups,
            shared,
        )  # fmt: skip
        return 0

    return tiles, tile


def scales_reader(tools: Tools, layout: Layout) -> Any:
    """For kernels whose arguments are (x, codes, scales): a function from a call to the addresses of scales, offsets,
    super-scales and super-offsets (0: none), the groups of a row, and the rows of codes that share their scales."""
    argument, size = tools.argument, tools.argument_size
    has_scale, has_offset, coarse = bool(layout.scale), bool(layout.offset), layout.coarse
    super_at = 4 if has_offset else 3

    @tools.inlined
    def scales_of(call: int) -> Any:
        scale = offset = super_scale = super_offset = 0
        groups = shared = 1
        if has_scale:
            scale, groups, shared = argument(call, 2), size(call, 2, 1), size(call, 1, 0) // size(call, 2, 0)
        if has_offset:
            offset = argument(call, 3)
        if coarse > 0:
            super_scale = argument(call, super_at)
            if has_offset:
                super_offset = argument(call, super_at + 1)
        return scale, offset, super_scale, super_offset, groups, shared

    return scales_of


def products_of(tools: Tools, layout: Layout) -> Any:
    """For kernels: the products of all rows of x and rows `start` to `end` of the codes. Arguments are addresses and
    sizes; `memory`: of the sums of x's groups, where there are offsets; `shared`: rows of codes that share their
    scales."""
    together, has_memory = TOGETHER[object_code.has("avx512f")], layout.has_offset
    dots, floats = tools.emitted(15, partial(emit, layout, together)), tools.floats

    @tools.reordered
    def sum_of(at: int, count: int) -> Any:
        total, numbers = np.float32(0), floats(at, count)
        for i in range(count):
            total += numbers[i]
        return total

    @tools.inlined
    def products(
        rows: int, start: int, end: int, codes: int, scale: int, offset: int, super_scale: int, super_offset: int,
        xs: int, memory: int, outs: int, depth: int, columns: int, groups: int, shared: int,
    ) -> None:  # fmt: skip
        # Two long runs of memory, which the processor reads ahead; neighbouring rows would spoil that.
        apart = (end - start + 1) // 2
        for row in range(0, rows, together):
            count, x, out = min(together, rows - row), xs + 4 * row * depth, outs + 4 * row * columns
            if has_memory:
                group = depth // groups
                for n in range(count):
                    of_groups = floats(memory + 4 * n * (groups + LANES), groups)
                    for i in range(groups):
                        of_groups[i] = sum_of(x + 4 * (n * depth + i * group), group)
            for first in range(start, start + apart):
                second = min(first + apart, end - 1)
                dots(
                    count, first, second, codes, scale, offset, super_scale, super_offset, x, memory, out, depth,
                    columns, groups, shared,
                )  # fmt: skip

    return products
