"""The product of a few float32 rows and a stored matrix [M, W] on a CPU, in the time of reading the matrix once.

XLA:CPU takes nearly twice as long for four rows as for one, and writes a float32 copy of a bfloat16 weight in every
call. These kernels read each weight once for up to four rows and widen it in registers. The order of a row's sums does
not depend on the number of rows, so its result has the bits of the row alone. Read `_product`, then `adder`. The
kernels of `quantised` take matrices [W, M], whose weights are their codes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32

from specjax_kernels.cpu.runtime import Tools, callable_here, register

MOST_ROWS = 8  # the largest number of rows for which XLA's own product takes longer
TOGETHER = 4  # rows of x that share a widened weight
DEEP = 8  # rows of the matrix that share one load and store of the sums
PARTS = 8  # partial sums of a narrow matrix, so that threads share the work and read long runs of memory
WIDE = 4096  # columns of a tile, at most
STORED = {"float32": 4, "bfloat16": 2, "float16": 2}  # dtypes of a matrix, and the bytes of a number


def parts_of(depth: int, columns: int) -> int:
    """The number of partial sums of a product with a [depth, columns] matrix; 0: there is no kernel."""
    if columns == 0 or depth == 0:
        return 0
    parts = max(1, PARTS // ((columns + WIDE - 1) // WIDE))
    while parts and depth % (parts * DEEP):
        parts -= 1
    return parts


def takes(rows: int, height: int, width: int, dtype: Any) -> bool:
    """True if `multiply` supports this number of rows and a [height, width] matrix. The first call loads the kernel or
    compiles it, which takes seconds."""
    name = jnp.dtype(dtype).name
    fits = 0 < rows <= MOST_ROWS and name in STORED and parts_of(height, width) > 0
    return fits and callable_here() and unmet(name) is None


def unmet(dtype: str) -> str | None:
    """The reason why this process cannot call the kernel, or None."""
    return register(f"specjax_rows_{dtype}", partial(_product, dtype=dtype))


def multiply(x: Float32[Array, "N M"], matrix: Float[Array, "M W"]) -> Float32[Array, "N W"]:
    """x times a matrix, if `takes` accepts them. `vmap` calls it in sequence."""
    shape = jax.ShapeDtypeStruct((parts_of(*matrix.shape), x.shape[0], matrix.shape[1]), jnp.float32)
    kernel = jax.ffi.ffi_call(f"specjax_rows_{matrix.dtype}", shape, vmap_method="sequential")
    sums = kernel(x, matrix)
    # XLA fuses additions with later operations, but not a reduction.
    return sum(sums[1:], start=sums[0])


def _storage(tools: Tools, dtype: str) -> tuple[Any, Any, int]:
    """Functions for a matrix of this dtype, (address, count) -> array and number -> float32, and a number's bytes."""
    if dtype != "float32":
        return tools.halves, tools.widened if dtype == "bfloat16" else tools.half, STORED[dtype]

    @tools.inlined
    def same(number: Any) -> Any:
        return number

    return tools.floats, same, STORED[dtype]


def adder(tools: Tools, dtype: str, rows: int, deep: int) -> Any:
    """Makes add(x, x_apart, matrix, apart, out, out_apart, width) for kernels: it adds to `rows` rows of sums the
    products of `rows` rows of x, `deep` numbers each, and `deep` rows of a matrix. Arguments are addresses, and numbers
    from one row to the next. The code is generated because Numba has no arrays in registers."""
    stored, wide, item = _storage(tools, dtype)
    lines = ["def add(x, x_apart, matrix, apart, out, out_apart, width):"]
    lines += [f"    m{m} = stored(matrix + {item * m} * apart)" for m in range(deep)]
    for n in range(rows):
        lines += [f"    o{n} = floats(out + {4 * n} * out_apart)"]
        lines += [f"    row{n} = floats(x + {4 * n} * x_apart)"]
        lines += [f"    x{n}_{m} = row{n}[{m}]" for m in range(deep)]
    lines += ["    for column in range(width):"]
    lines += [f"        w{m} = wide(m{m}[column])" for m in range(deep)]
    for n in range(rows):
        lines += [f"        o{n}[column] = o{n}[column]" + "".join(f" + x{n}_{m} * w{m}" for m in range(deep))]
    scope = {"floats": tools.floats, "stored": stored, "wide": wide}
    exec("\n".join(lines), scope)
    return tools.inlined(scope["add"])


def _product(tools: Tools, dtype: str) -> tuple[Any, Any]:
    """(x [N, M], matrix [M, W]) -> sums [parts, N, W]. A tile is a part of the sums of some columns."""
    # Numba reads functions and numbers from the enclosing scope, but no fields.
    floats, item = tools.floats, STORED[dtype]
    argument, size, result = tools.argument, tools.argument_size, tools.result
    add1, add2, add3, add4 = (adder(tools, dtype, rows, DEEP) for rows in range(1, TOGETHER + 1))
    parts_for = tools.inlined(parts_of)

    @tools.inlined
    def tiles_across(columns: int) -> int:
        return (columns + WIDE - 1) // WIDE

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
            sums = floats(out + 4 * row * columns)
            for column in range(width):
                sums[column] = 0.0
        for m in range(part * deep, part * deep + deep, DEEP):
            matrix = argument(call, 1) + item * (m * columns + first)
            for row in range(0, rows, TOGETHER):
                x, to, left = argument(call, 0) + 4 * (row * depth + m), out + 4 * row * columns, rows - row
                if left >= 4:
                    add4(x, depth, matrix, columns, to, columns, width)
                elif left == 3:
                    add3(x, depth, matrix, columns, to, columns, width)
                elif left == 2:
                    add2(x, depth, matrix, columns, to, columns, width)
                else:
                    add1(x, depth, matrix, columns, to, columns, width)
        return 0

    return tiles, tile
