"""Tree attention of a few tokens on a CPU, in float32: what `specjax_kernels.xla` computes, in one call.

XLA:CPU makes some twenty small operations of each trip over the committed pages, among them copies of the keys and
values, and a step has a loop of them for every layer. Here the keys and values are read where they lie in the pages. A
tile is one request's query heads that share one head of keys and values.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float32, Int32

from specjax_kernels.cpu import Tools, callable_here, register

MOST_TOKENS = 16
"""New tokens of a request up to which it is used: a prefill's products are XLA's, which has blocks for them."""

CHUNK = 128
"""Keys whose scores are kept at a time, and the most that a block may have."""

MASKED, FLOOR = -1e30, -1e20
"""As in `specjax_kernels.xla`: a score that does not count, and the least peak of a row."""

_FLOAT = 4


def unmet() -> str | None:
    """Why the kernel cannot be called in this process; None: it can. The first call compiles it (a second or two)."""
    return register("specjax_tree_attention", _attention)


def takes(new: int, block: int, *arrays: Array | None) -> bool:
    """Whether `attend` is made for so many new tokens and block keys, in such arrays (None: values that are the keys'
    are not), and can be called in this process."""
    fits = (
        0 < new <= MOST_TOKENS
        and 0 < block <= CHUNK
        and all(array is not None and array.dtype == jnp.float32 for array in arrays)
    )
    return fits and callable_here() and unmet() is None


def attend(
    rows: Float32[Array, "B K R E"],
    k_block: Float32[Array, "B C K E"],
    v_block: Float32[Array, "B C K Ev"],
    k_pages: Float32[Array, "P S K E"],
    v_pages: Float32[Array, "P S K Ev"],
    page_table: Int32[Array, "B T"],
    prefix_length: Int32[Array, "B"],
    visible: Int32[Array, "B N C"],
) -> Float32[Array, "B K R Ev"]:
    """Softmax(rows . keys) . values over each request's committed tokens and the visible ones of its block.

    Args:
        rows: scaled queries, R = N * G: query n, head g of its group.
        visible: 1 where query n sees block key c. All see the committed tokens.

    A row that sees nothing is 0; so is one of a request whose prefix_length is negative.
    """
    out = jax.ShapeDtypeStruct((*rows.shape[:3], v_block.shape[3]), jnp.float32)
    scores = jax.ShapeDtypeStruct((*rows.shape[:3], CHUNK), jnp.float32)
    call = jax.ffi.ffi_call("specjax_tree_attention", (out, scores), vmap_method="sequential")
    return call(rows, k_block, v_block, k_pages, v_pages, page_table, prefix_length, visible)[0]


def _attention(tools: Tools) -> tuple[Any, Any]:
    """Arguments and results are those of `attend`; the second result is for the scores of a chunk."""
    carray, floats, integers, bits, float_of = tools.carray, tools.floats, tools.integers, tools.bits, tools.float_of
    argument, size, result = tools.argument, tools.argument_size, tools.result

    @tools.reordered
    def dot(first: int, second: int, width: int) -> Any:
        x, y, total = carray(floats(first), (width,)), carray(floats(second), (width,)), np.float32(0)
        for i in range(width):
            total += x[i] * y[i]
        return total

    @tools.inlined
    def add_scaled(to: int, scale: Any, of: int, width: int) -> None:
        x, y = carray(floats(to), (width,)), carray(floats(of), (width,))
        for i in range(width):
            x[i] += scale * y[i]

    @tools.inlined
    def exponentials(at: int, less: Any, count: int) -> Any:
        """exp(x - less) of each x at an address, in place, and their sum. Within 2 units in the last place: the
        polynomial of Cephes' expf. Written for vectors: Numba calls the C library once for each."""
        x = carray(floats(at), (count,))
        for i in range(count):
            value = max(x[i] - less, np.float32(-88))
            turns = value * np.float32(1.44269504088896341) + np.float32(12582912)  # 1.5 * 2 ** 23 rounds it
            whole = turns - np.float32(12582912)
            rest = value - whole * np.float32(0.693359375)
            rest = rest + whole * np.float32(2.12194440e-4)
            power = np.float32(1.9875691500e-4)
            power = power * rest + np.float32(1.3981999507e-3)
            power = power * rest + np.float32(8.3334519073e-3)
            power = power * rest + np.float32(4.1665795894e-2)
            power = power * rest + np.float32(1.6666665459e-1)
            power = power * rest + np.float32(5.0000001201e-1)
            power = power * rest * rest + rest + np.float32(1)
            two_to = float_of(np.int32((bits(turns) - np.int32(0x4B400000) + np.int32(127)) << np.int32(23)))
            shown = power * two_to if x[i] == x[i] else x[i]  # what is not a number stays so
            x[i] = np.float32(0) if x[i] <= np.float32(MASKED * 0.5) else shown
        total = np.float32(0)
        for i in range(count):
            total += x[i]
        return total

    @tools.inlined
    def tiles(call: int) -> int:
        return size(call, 0, 0) * size(call, 0, 1)

    def tile(call: int, index: int) -> int:
        heads, rows, width = size(call, 0, 1), size(call, 0, 2), size(call, 0, 3)
        block, wide = size(call, 2, 1), size(call, 2, 3)
        pages, slots, table_width, new = size(call, 3, 0), size(call, 3, 1), size(call, 5, 1), size(call, 7, 1)
        request, head = index // heads, index % heads
        group = rows // new
        queries = argument(call, 0) + _FLOAT * index * rows * width
        block_keys, block_values = argument(call, 1), argument(call, 2)
        page_keys, page_values = argument(call, 3), argument(call, 4)
        out = result(call, 0) + _FLOAT * index * rows * wide
        scores = result(call, 1) + _FLOAT * index * rows * CHUNK
        table = carray(integers(argument(call, 5) + 4 * request * table_width), (table_width,))
        committed = carray(integers(argument(call, 6)), (request + 1,))[request]
        visible = carray(integers(argument(call, 7) + 4 * request * new * block), (new * block,))
        mixed = carray(floats(out), (rows * wide,))
        for i in range(rows * wide):
            mixed[i] = 0
        if committed < 0:
            return 0
        committed = min(committed, slots * table_width)
        for row in range(rows):
            peak, total = np.float32(FLOOR), np.float32(0)
            mine, weights = out + _FLOAT * row * wide, scores + _FLOAT * row * CHUNK
            chunk = carray(floats(weights), (CHUNK,))
            start = 0
            while True:
                # Chunks of committed tokens, which are the same whatever the block; the block is the last one.
                paged = start < committed
                count = min(CHUNK, committed - start) if paged else block
                highest = np.float32(FLOOR)
                for token in range(count):
                    if paged:
                        page = table[(start + token) // slots]
                        place = (page * slots + (start + token) % slots) * heads + head
                        seen = 0 <= page < pages
                        key = page_keys + _FLOAT * width * place
                    else:
                        seen = visible[(row // group) * block + token] != 0
                        key = block_keys + _FLOAT * width * ((request * block + token) * heads + head)
                    chunk[token] = dot(queries + _FLOAT * row * width, key, width) if seen else np.float32(MASKED)
                    highest = max(highest, chunk[token])
                if highest > peak:
                    decay = np.float32(np.exp(peak - highest))
                    total *= decay
                    for i in range(wide):
                        mixed[row * wide + i] *= decay
                    peak = highest
                total += exponentials(weights, peak, count)
                for token in range(count):
                    if chunk[token] == 0:  # what nobody sees may hold anything
                        continue
                    if paged:
                        place = (table[(start + token) // slots] * slots + (start + token) % slots) * heads + head
                        value = page_values + _FLOAT * wide * place
                    else:
                        value = block_values + _FLOAT * wide * ((request * block + token) * heads + head)
                    add_scaled(mine, chunk[token], value, wide)
                if not paged:
                    break
                start += count
            if not total <= 0:
                for i in range(wide):
                    mixed[row * wide + i] /= total
        return 0

    return tiles, tile
