"""The product of a few float32 rows and a stored matrix on a CPU, in the time of reading the matrix once.

XLA:CPU takes nearly twice as long for four rows as for one, and writes a float32 copy of a bfloat16 weight in every
call. These kernels read each weight once for up to four rows, and widen it in registers. The order of a row's sums does
not depend on the number of rows, so its result is bit for bit that of the row alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32

from specjax_kernels.cpu.runtime import Tools, callable_here, register

MOST_ROWS = 8  # the largest number of rows for which XLA's own product takes longer
TOGETHER = 4  # rows of x that share one widened weight; several rows are padded to a multiple of it
DEEP = 4  # rows of the matrix that are read side by side, so that sums are loaded and stored once for all of them
PARTS = 8  # partial sums of a narrow matrix, so that threads share the work and read long runs of memory
WIDE = 4096  # columns of a tile, at most
TRANSPOSED_TILE = 512  # rows of a transposed matrix in one tile
STORED = {"float32": 4, "bfloat16": 2}  # dtypes of a matrix, and the bytes of a number


def parts_of(depth: int, columns: int) -> int:
    """The number of partial sums of a product with a [depth, columns] matrix; 0: no number fits."""
    if columns == 0 or depth == 0:
        return 0
    parts = max(1, PARTS // ((columns + WIDE - 1) // WIDE))
    while parts and depth % (parts * DEEP):
        parts -= 1
    return parts


def takes(rows: int, depth: int, columns: int, dtype: Any, *, transposed: bool = False) -> bool:
    """Whether `multiply` can be called here for so many rows and a [depth, columns] matrix, transposed or not.

    The first call loads the kernel or compiles it, which takes seconds.
    """
    name = jnp.dtype(dtype).name
    fits = 0 < rows <= MOST_ROWS and name in STORED
    fits = fits and (depth > 0 < columns if transposed else parts_of(depth, columns) > 0)
    return fits and callable_here() and unmet(name, transposed) is None


def unmet(dtype: str, transposed: bool) -> str | None:
    """Why the kernel cannot be called in this process; None: it can."""
    return register(_name(dtype, transposed), partial(_transposed if transposed else _product, dtype=dtype))


def prepare(dtype: str) -> None:
    """Loads or compiles the kernels for weights of this dtype. For a thread beside loading."""
    if dtype in STORED and callable_here():
        unmet(dtype, False)
        unmet(dtype, True)


def _name(dtype: Any, transposed: bool) -> str:
    return f"specjax_rows_{dtype}{'_transposed' if transposed else ''}"


def multiply(
    x: Float32[Array, "N M"], matrix: Float[Array, "A1 A2"], *, transposed: bool = False
) -> Float32[Array, "N W"]:
    """x times matrix [M, W] or, transposed, times matrix [W, M]. For what `takes` accepts; vmapped, one by one."""
    rows = x.shape[0]
    padded = x if rows == 1 and not transposed else jnp.pad(x, ((0, -rows % TOGETHER), (0, 0)))
    parts = () if transposed else (parts_of(*matrix.shape),)
    shape = (*parts, padded.shape[0], matrix.shape[0 if transposed else 1])
    name = _name(matrix.dtype, transposed)
    sums = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(shape, jnp.float32), vmap_method="sequential")(padded, matrix)
    if transposed:
        return sums[:rows]
    # Added one by one: XLA fuses additions into what follows, and keeps a reduction as an operation of its own.
    return sum(sums[1:, :rows], start=sums[0, :rows])


def _storage(tools: Tools, dtype: str) -> tuple[Any, Any, int]:
    """For a matrix of this dtype: array at an address, the float32 of a stored number, bytes of a number."""
    if dtype == "bfloat16":
        return tools.halves, tools.widened, STORED[dtype]

    @tools.inlined
    def same(number: Any) -> Any:
        return number

    return tools.floats, same, STORED[dtype]


def _product(tools: Tools, dtype: str) -> tuple[Any, Any]:
    """(x [N, M], matrix [M, W]) -> sums [parts, N, W]. A tile is a part of the sums of some columns."""
    # As names: Numba reads functions and numbers from the enclosing scope, and no fields.
    floats, (stored, wide, item) = tools.floats, _storage(tools, dtype)
    argument, size, result = tools.argument, tools.argument_size, tools.result
    parts_for = tools.inlined(parts_of)

    @tools.inlined
    def tiles_across(columns: int) -> int:
        return (columns + WIDE - 1) // WIDE

    @tools.inlined
    def add_row(x: int, matrix: int, columns: int, out: int, width: int) -> None:
        """Adds the products of four numbers of x and four rows of the matrix, in the order of `add`."""
        line = item * columns
        m0, m1 = stored(matrix, width), stored(matrix + line, width)
        m2, m3 = stored(matrix + 2 * line, width), stored(matrix + 3 * line, width)
        sums, row = floats(out, width), floats(x, 4)
        a0, a1, a2, a3 = row[0], row[1], row[2], row[3]
        for column in range(width):
            w0, w1, w2, w3 = wide(m0[column]), wide(m1[column]), wide(m2[column]), wide(m3[column])
            sums[column] = sums[column] + a0 * w0 + a1 * w1 + a2 * w2 + a3 * w3

    @tools.inlined
    def add(x: int, depth: int, matrix: int, columns: int, out: int, width: int) -> None:
        """Adds the products of four rows of x, four numbers each, and four rows of the matrix."""
        line = item * columns
        m0, m1 = stored(matrix, width), stored(matrix + line, width)
        m2, m3 = stored(matrix + 2 * line, width), stored(matrix + 3 * line, width)
        o0, o1 = floats(out, width), floats(out + 4 * columns, width)
        o2, o3 = floats(out + 8 * columns, width), floats(out + 12 * columns, width)
        x0, x1 = floats(x, 4), floats(x + 4 * depth, 4)
        x2, x3 = floats(x + 8 * depth, 4), floats(x + 12 * depth, 4)
        a0, a1, a2, a3 = x0[0], x0[1], x0[2], x0[3]
        b0, b1, b2, b3 = x1[0], x1[1], x1[2], x1[3]
        c0, c1, c2, c3 = x2[0], x2[1], x2[2], x2[3]
        d0, d1, d2, d3 = x3[0], x3[1], x3[2], x3[3]
        for column in range(width):
            w0, w1, w2, w3 = wide(m0[column]), wide(m1[column]), wide(m2[column]), wide(m3[column])
            o0[column] = o0[column] + a0 * w0 + a1 * w1 + a2 * w2 + a3 * w3
            o1[column] = o1[column] + b0 * w0 + b1 * w1 + b2 * w2 + b3 * w3
            o2[column] = o2[column] + c0 * w0 + c1 * w1 + c2 * w2 + c3 * w3
            o3[column] = o3[column] + d0 * w0 + d1 * w1 + d2 * w2 + d3 * w3

    def tiles(call: int) -> int:
        return parts_for(size(call, 0, 1), size(call, 1, 1)) * tiles_across(size(call, 1, 1))

    def tile(call: int, index: int) -> int:
        rows, depth, columns = size(call, 0, 0), size(call, 0, 1), size(call, 1, 1)
        across, deep = tiles_across(columns), depth // parts_for(depth, columns)
        most = ((columns + across - 1) // across + 31) // 32 * 32  # whole cache lines
        part, first = index // across, (index % across) * most
        width = min(most, columns - first)
        out = result(call, 0) + 4 * (part * rows * columns + first)
        for row in range(rows):
            sums = floats(out + 4 * row * columns, width)
            for column in range(width):
                sums[column] = 0.0
        for m in range(part * deep, part * deep + deep, DEEP):
            matrix = argument(call, 1) + item * (m * columns + first)
            if rows == 1:
                add_row(argument(call, 0) + 4 * m, matrix, columns, out, width)
            for row in range(0, rows // TOGETHER * TOGETHER, TOGETHER):
                add(argument(call, 0) + 4 * (row * depth + m), depth, matrix, columns, out + 4 * row * columns, width)
        return 0

    return tiles, tile


def _transposed(tools: Tools, dtype: str) -> tuple[Any, Any]:
    """(x [N, M], matrix [W, M]) -> [N, W]. A tile is some rows of the matrix."""
    floats, (stored, wide, item) = tools.floats, _storage(tools, dtype)
    argument, size, result = tools.argument, tools.argument_size, tools.result

    @tools.reordered
    def dots(x: int, other: int, depth: int) -> Any:
        """The products of four rows of x and one row of the matrix."""
        weights, x0 = stored(other, depth), floats(x, depth)
        x1, x2 = floats(x + 4 * depth, depth), floats(x + 8 * depth, depth)
        x3 = floats(x + 12 * depth, depth)
        sum0 = sum1 = sum2 = sum3 = np.float32(0)
        for m in range(depth):
            weight = wide(weights[m])
            sum0 += x0[m] * weight
            sum1 += x1[m] * weight
            sum2 += x2[m] * weight
            sum3 += x3[m] * weight
        return sum0, sum1, sum2, sum3

    def tiles(call: int) -> int:
        return (size(call, 1, 0) + TRANSPOSED_TILE - 1) // TRANSPOSED_TILE

    def tile(call: int, index: int) -> int:
        rows, depth, columns = size(call, 0, 0), size(call, 0, 1), size(call, 1, 0)
        first = index * TRANSPOSED_TILE
        for row in range(0, rows, TOGETHER):
            x = argument(call, 0) + 4 * row * depth
            out = floats(result(call, 0) + 4 * row * columns, TOGETHER * columns)
            for column in range(first, min(first + TRANSPOSED_TILE, columns)):
                sums = dots(x, argument(call, 1) + item * column * depth, depth)
                out[column], out[columns + column] = sums[0], sums[1]
                out[2 * columns + column], out[3 * columns + column] = sums[2], sums[3]
        return 0

    return tiles, tile
