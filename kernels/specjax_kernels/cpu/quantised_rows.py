"""The product of a few float32 rows and a quantised matrix on a CPU, in little more than the time of reading its codes.

Codes become float32 weights in registers, once for several rows of x. Of 4 bits there are sixteen in a group: with
AVX-512 they fill a register, out of which a permutation takes them. A row's sums are taken in one order however many
rows there are, so its result is bit for bit that of the row alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32

from specjax_kernels.cpu.quantised_dots import LANES, Layout, code_rows, emit
from specjax_kernels.cpu.runtime import Tools, callable_here, register
from specjax_kernels.cpu.vectors import lanes

MOST_ROWS = 16  # for more `quantised_blocks` takes less time
TOGETHER = {16: 8, 8: 3}  # rows of x that share a weight, by the lanes of 32 registers or of 16
TILE = 512  # rows of codes in one tile, at most
TILES = 2
"""Tiles of a matrix for each thread, at least. With more, which are shorter, a greater part of each is read before its
prefetches arrive."""


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
    shape = jax.ShapeDtypeStruct((x.shape[0], codes.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(layout.name, shape, vmap_method="sequential")(x, codes, *scales)


def tile_rows(columns: int, threads: int) -> int:
    """Rows of codes in a tile."""
    tiles = TILES * threads
    return max(LANES, min(TILE, (columns + tiles * LANES - 1) // (tiles * LANES) * LANES))


def _kernel(tools: Tools, layout: Layout) -> tuple[Any, Any]:
    """(x [N, M], codes, scales) -> [N, W]. A tile is some rows of codes."""
    argument, size, result = tools.argument, tools.argument_size, tools.result
    products, scales_of = products_of(tools, layout), scales_reader(tools, layout)
    rows_of_tile, threads = tools.inlined(tile_rows), tools.threads

    def tiles(call: int) -> int:
        columns = size(call, 1, 0)
        most = rows_of_tile(columns, threads())
        return (columns + most - 1) // most

    def tile(call: int, index: int) -> int:
        rows, depth, columns = size(call, 0, 0), size(call, 0, 1), size(call, 1, 0)
        scale, offset, super_scale, super_offset, groups, shared = scales_of(call)
        most = rows_of_tile(columns, threads())
        start, end = index * most, min(index * most + most, columns)
        x, codes, out = argument(call, 0), argument(call, 1), result(call, 0)
        products(
            rows, start, end, x, out, codes, columns, depth, scale, offset, super_scale, super_offset, groups, shared
        )
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
    sizes; the last are what `scales_reader` reads."""
    width = lanes()
    together = TOGETHER[width]
    dots, of_codes = tools.emitted(14, partial(emit, layout, together)), tools.inlined(code_rows)

    @tools.inlined
    def products(
        rows: int, start: int, end: int, x: int, out: int, codes: int, columns: int, depth: int, scale: int,
        offset: int, super_scale: int, super_offset: int, groups: int, shared: int,
    ) -> None:  # fmt: skip
        for row in range(0, rows, together):
            count, at, to = min(together, rows - row), x + 4 * row * depth, out + 4 * row * columns
            for first in range(start, end, of_codes(count, width)):
                dots(
                    count, first, end - 1, at, to, codes, columns, depth, scale, offset, super_scale, super_offset,
                    groups, shared,
                )  # fmt: skip

    return products
