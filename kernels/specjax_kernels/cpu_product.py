"""The product of a few rows and a matrix on a CPU, in float32, at the price of reading the matrix once.

A step of decoding multiplies a few rows (the tokens to verify) with every weight of the target. On a CPU that takes as
long as reading the weights from memory; further rows could be free. XLA:CPU takes half as long again for two rows, and
nearly twice as long for four. These kernels read each weight once, for all rows. A row's sums are taken in the same
order however many rows there are, so its result is, bit for bit, that of the row alone.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float32

from specjax_kernels.cpu import Tools, callable_here, register

MOST_ROWS = 8
"""Up to which XLA's own product takes longer (measured: 8 rows, all of SmolLM2-135M's layers)."""

DEEP = 8
"""Rows of the matrix that are read side by side: the sums are loaded and stored once for so many products."""

TOGETHER = 4
"""Rows of x that share one reading from memory into registers; more would not have enough of those. Further rows find
the matrix in the cache."""

PARTS = 8
"""Into which a sum is split where the matrix is narrow: what the threads share out."""

WIDE = 4096
"""Columns of a tile, at most. Narrower ones are slower: memory is read in longer runs."""

ROWS_OF_A_TILE = 512
"""Of a transposed matrix."""

_FLOAT = 4
_PRODUCT, _DOT = "specjax_few_rows", "specjax_few_rows_dot"


def parts_of(depth: int, columns: int) -> int:
    """Into how many sums the product with a [depth, columns] matrix is split, which are then added; 0: none fits.

    With the tiles of the columns these are what the threads share out.
    """
    if columns == 0 or depth == 0:
        return 0
    parts = max(1, PARTS // ((columns + WIDE - 1) // WIDE))
    while parts and depth % (parts * DEEP):
        parts -= 1
    return parts


def unmet(transposed: bool = False) -> str | None:
    """Why a kernel cannot be called in this process; None: it can. The first call loads it, or
    compiles it, which takes seconds."""
    return register(_DOT, _dots) if transposed else register(_PRODUCT, _products)


def takes(rows: int, depth: int, columns: int, *dtypes: Any, transposed: bool = False) -> bool:
    """Whether `few_rows` (or, transposed, `few_rows_dot`) is made for such a product, of arrays of such dtypes, and can
    be called in this process."""
    fits = 0 < rows <= MOST_ROWS and all(dtype == jnp.float32 for dtype in dtypes)
    fits = fits and (columns > 0 < depth if transposed else parts_of(depth, columns) > 0)
    return fits and callable_here() and unmet(transposed) is None


@jax.custom_jvp
def few_rows(x: Float32[Array, "N M"], matrix: Float32[Array, "M O"]) -> Float32[Array, "N O"]:
    """x times matrix, on a CPU; for what `takes` accepts.

    Args:
        x: up to `MOST_ROWS` rows.
        matrix: read where it lies, row after row.

    Differentiable (its derivatives are XLA's products); `jax.vmap` calls it for one after the other.
    """
    (rows, depth), columns = x.shape, matrix.shape[1]
    result = jax.ShapeDtypeStruct((parts_of(depth, columns), rows, columns), jnp.float32)
    sums = jax.ffi.ffi_call(_PRODUCT, result, vmap_method="sequential")(x, matrix)
    # Added one by one: that becomes a part of what follows, where a reduction would be an operation of its own.
    return sum(sums[1:], start=sums[0])


@jax.custom_jvp
def few_rows_dot(x: Float32[Array, "N M"], matrix: Float32[Array, "O M"]) -> Float32[Array, "N O"]:
    """x times the transposed matrix: `few_rows` for embeddings that are the output layer as well."""
    # Always whole groups of rows: then there is one loop, and one order of its sums.
    padded = jnp.pad(x, ((0, -x.shape[0] % TOGETHER), (0, 0)))
    result = jax.ShapeDtypeStruct((x.shape[0], matrix.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(_DOT, result, vmap_method="sequential")(padded, matrix)


_exactly = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


@few_rows.defjvp
def _few_rows_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (x, matrix), (dx, dmatrix) = primals, tangents
    return few_rows(x, matrix), _exactly(dx, matrix) + _exactly(x, dmatrix)


@few_rows_dot.defjvp
def _few_rows_dot_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (x, matrix), (dx, dmatrix) = primals, tangents
    return few_rows_dot(x, matrix), _exactly(dx, matrix.T) + _exactly(x, dmatrix.T)


def _common(tools: Tools) -> tuple[Any, ...]:
    """The tools of both kernels. As names: Numba takes functions from those around it, and no fields."""
    return tools.carray, tools.floats, tools.argument, tools.argument_size, tools.result


def _source_of_sums(rows: int) -> str:
    """Source of a loop over one tile: so many rows of x times `DEEP` rows of the matrix, added to the sums.

    Written out, since Numba has no arrays that live in registers.
    """
    lines = ["def add(x, x_apart, matrix, apart, out, out_apart, width):"]
    for row in range(rows):
        lines += [f"    out{row} = carray(floats({_FLOAT} * {row} * out_apart + out), (width,))"]
        lines += [f"    row{row} = carray(floats({_FLOAT} * {row} * x_apart + x), ({DEEP},))"]
        lines += [f"    x{row}_{m} = row{row}[{m}]" for m in range(DEEP)]
    lines += [f"    matrix{m} = carray(floats({_FLOAT} * {m} * apart + matrix), (width,))" for m in range(DEEP)]
    lines += ["    for column in range(width):"]
    lines += [f"        weight{m} = matrix{m}[column]" for m in range(DEEP)]
    for row in range(rows):
        products = "".join(f" + x{row}_{m} * weight{m}" for m in range(DEEP))
        lines += [f"        out{row}[column] = out{row}[column]{products}"]
    return "\n".join(lines)


def sums_of(tools: Tools, rows: int) -> Any:
    """For kernels: add(x, x_apart, matrix, apart, out, out_apart, width) adds to `width` columns of as many rows of
    sums the products of rows of x, `DEEP` numbers each, and `DEEP` rows of a matrix. Addresses, and floats from one row
    to the next."""
    scope: dict[str, Any] = {"carray": tools.carray, "floats": tools.floats}
    exec(_source_of_sums(rows), scope)
    return tools.inlined(scope["add"])


def dots_of(tools: Tools) -> Any:
    """For kernels: dots(x, other, depth) gives the products of `TOGETHER` rows of x, which follow each other, and
    another row. Addresses, and the floats of a row."""
    carray, floats = tools.carray, tools.floats

    @tools.reordered
    def dots(x: int, other: int, depth: int) -> Any:
        weights, x0 = carray(floats(other), (depth,)), carray(floats(x), (depth,))
        x1 = carray(floats(x + _FLOAT * depth), (depth,))
        x2 = carray(floats(x + _FLOAT * 2 * depth), (depth,))
        x3 = carray(floats(x + _FLOAT * 3 * depth), (depth,))
        sum0 = sum1 = sum2 = sum3 = np.float32(0)
        for m in range(depth):
            weight = weights[m]
            sum0 += x0[m] * weight
            sum1 += x1[m] * weight
            sum2 += x2[m] * weight
            sum3 += x3[m] * weight
        return sum0, sum1, sum2, sum3

    return dots


def _products(tools: Tools) -> tuple[Any, Any]:
    """`few_rows`: a tile is a part of the sums of some columns. (x [N, M], matrix [M, O]) -> sums [parts, N, O]."""
    carray, floats, argument, size, result = _common(tools)
    add1, add2, add3, add4 = (sums_of(tools, rows) for rows in range(1, TOGETHER + 1))
    parts_for = tools.inlined(parts_of)

    @tools.inlined
    def tiles_across(columns: int) -> int:
        return (columns + WIDE - 1) // WIDE

    def tiles(call: int) -> int:
        return parts_for(size(call, 0, 1), size(call, 1, 1)) * tiles_across(size(call, 1, 1))

    def tile(call: int, index: int) -> int:
        rows, depth, columns = size(call, 0, 0), size(call, 0, 1), size(call, 1, 1)
        across, deep = tiles_across(columns), depth // parts_for(depth, columns)
        wide = ((columns + across - 1) // across + 15) // 16 * 16  # whole lines of the cache
        part, first = index // across, (index % across) * wide
        width = min(wide, columns - first)
        out = result(call, 0) + _FLOAT * (part * rows * columns + first)
        for row in range(rows):
            zeroed = carray(floats(out + _FLOAT * row * columns), (width,))
            for column in range(width):
                zeroed[column] = 0.0
        for m in range(part * deep, part * deep + deep, DEEP):
            matrix = argument(call, 1) + _FLOAT * (m * columns + first)
            for row in range(0, rows, TOGETHER):
                x = argument(call, 0) + _FLOAT * (row * depth + m)
                to, left = out + _FLOAT * row * columns, rows - row
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


def _dots(tools: Tools) -> tuple[Any, Any]:
    """`few_rows_dot`: a tile is some rows of the matrix. (x [N padded, M], matrix [O, M]) -> [N, O]."""
    carray, floats, argument, size, result = _common(tools)
    result_size, dots = tools.result_size, dots_of(tools)

    def tiles(call: int) -> int:
        return (size(call, 1, 0) + ROWS_OF_A_TILE - 1) // ROWS_OF_A_TILE

    def tile(call: int, index: int) -> int:
        padded, depth, columns = size(call, 0, 0), size(call, 0, 1), size(call, 1, 0)
        rows = result_size(call, 0, 0)
        first = index * ROWS_OF_A_TILE
        for row in range(0, padded, TOGETHER):
            x = argument(call, 0) + _FLOAT * row * depth
            out = carray(floats(result(call, 0) + _FLOAT * row * columns), (TOGETHER * columns,))
            for column in range(first, min(first + ROWS_OF_A_TILE, columns)):
                sum0, sum1, sum2, sum3 = dots(x, argument(call, 1) + _FLOAT * column * depth, depth)
                out[column] = sum0
                if row + 1 < rows:
                    out[columns + column] = sum1
                if row + 2 < rows:
                    out[2 * columns + column] = sum2
                if row + 3 < rows:
                    out[3 * columns + column] = sum3
        return 0

    return tiles, tile


KERNELS = (_DOT, _dots), (_PRODUCT, _products)
"""For `register`. The first serves a prefill, too."""
