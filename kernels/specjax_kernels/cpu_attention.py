"""Tree attention of a few tokens on a CPU, in float32: what `specjax_kernels.xla` computes, in one call.

XLA:CPU makes some twenty small operations of each trip over the committed pages, among them copies of the keys and
values, and a step has a loop of them for every layer. Here the keys and values are read where they lie in the pages. A
tile is up to four of a request's query rows that share one head of keys and values.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float32, Int32

from specjax_kernels.cpu import Tools, callable_here, register
from specjax_kernels.cpu_product import DEEP, TOGETHER, dots_of, sums_of

MOST_TOKENS = 16
"""New tokens of a request up to which it is used: a prefill's products are XLA's, which has blocks for them."""

CHUNK = 128
"""Keys whose scores are kept at a time, and the most that a block may have."""

MASKED, FLOOR = -1e30, -1e20
"""As in `specjax_kernels.xla`: a score that does not count, and the least peak of a row."""

_FLOAT = 4
_NAME = "specjax_tree_attention"


def unmet() -> str | None:
    """Why the kernel cannot be called in this process; None: it can. The first call loads it, or
    compiles it, which takes seconds."""
    return register(_NAME, _attention)


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
    # Always whole groups of rows: then there is one loop, and one order of its sums.
    padded = jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % TOGETHER), (0, 0)))
    out = jax.ShapeDtypeStruct((*rows.shape[:3], v_block.shape[3]), jnp.float32)
    scratch = jax.ShapeDtypeStruct((*padded.shape[:3], CHUNK + 2 + v_block.shape[3]), jnp.float32)
    call = jax.ffi.ffi_call(_NAME, (out, scratch), vmap_method="sequential")
    return call(padded, k_block, v_block, k_pages, v_pages, page_table, prefix_length, visible)[0]


def _attention(tools: Tools) -> tuple[Any, Any]:
    """Arguments and results are those of `attend`. The second result is, for each row, a chunk's scores, their peak and
    their total so far, and the values mixed so far."""
    carray, floats, integers, bits, float_of = tools.carray, tools.floats, tools.integers, tools.bits, tools.float_of
    argument, size, result, result_size = tools.argument, tools.argument_size, tools.result, tools.result_size
    dots, add_values = dots_of(tools), sums_of(tools, TOGETHER)

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
    def highest_of(at: int, count: int) -> Any:
        """The largest of some scores; four at a time, since one comparison would wait for the one before."""
        x = carray(floats(at), (count,))
        first = second = third = fourth = np.float32(FLOOR)
        for i in range(0, count - 3, 4):
            first, second = max(first, x[i]), max(second, x[i + 1])
            third, fourth = max(third, x[i + 2]), max(fourth, x[i + 3])
        for i in range(count // 4 * 4, count):
            first = max(first, x[i])
        return max(max(first, second), max(third, fourth))

    @tools.inlined
    def run_at(token: int, left: int, table: Any, slots: int, pages: int) -> Any:
        """How many of `left` committed tokens, from this one on, lie next to each other, and where: in one page; -1: in
        none that exists."""
        page, slot = table[token // slots], token % slots
        return min(slots - slot, left), page * slots + slot if 0 <= page < pages else -1

    @tools.inlined
    def score(queries: int, key: int, apart: int, width: int, state: Any, row: int, first: int, run: int) -> None:
        """Scores of a run of tokens, whose keys are `apart` floats from each other, for each row of queries; `row`: the
        floats from one row's state to the next's. Without keys (address 0) they do not count."""
        for i in range(run):
            score0 = score1 = score2 = score3 = np.float32(MASKED)
            if key != 0:
                score0, score1, score2, score3 = dots(queries, key + _FLOAT * apart * i, width)
            state[first + i], state[row + first + i] = score0, score1
            state[2 * row + first + i], state[3 * row + first + i] = score2, score3

    @tools.inlined
    def mix(weights: int, value: int, apart: int, width: int, mixed: int, row: int, run: int) -> None:
        """Adds to each row's mixed values those of a run of tokens, times their weights."""
        done = 0
        while done + DEEP <= run:
            add_values(weights + _FLOAT * done, row, value + _FLOAT * apart * done, apart, mixed, row, width)
            done += DEEP
        for i in range(done, run):
            for index in range(TOGETHER):
                weight = carray(floats(weights + _FLOAT * row * index), (run,))[i]
                add_scaled(mixed + _FLOAT * row * index, weight, value + _FLOAT * apart * i, width)

    @tools.inlined
    def tiles(call: int) -> int:
        return size(call, 0, 0) * size(call, 0, 1) * (size(call, 0, 2) // TOGETHER)

    def tile(call: int, index: int) -> int:
        heads, padded, width = size(call, 0, 1), size(call, 0, 2), size(call, 0, 3)
        block, wide, rows = size(call, 2, 1), size(call, 2, 3), result_size(call, 0, 2)
        pages, slots, table_width, new = size(call, 3, 0), size(call, 3, 1), size(call, 5, 1), size(call, 7, 1)
        group, groups = rows // new, padded // TOGETHER
        pair, first_row = index // groups, index % groups * TOGETHER  # a pair of a request and a head
        request, head = pair // heads, pair % heads
        queries = argument(call, 0) + _FLOAT * (pair * padded + first_row) * width
        apart = CHUNK + 2 + wide
        scratch = result(call, 1) + _FLOAT * (pair * padded + first_row) * apart
        state = carray(floats(scratch), (TOGETHER * apart,))
        own_rows = min(TOGETHER, rows - first_row)
        out = carray(floats(result(call, 0) + _FLOAT * (pair * rows + first_row) * wide), (own_rows * wide,))
        table = carray(integers(argument(call, 5) + 4 * request * table_width), (table_width,))
        committed = carray(integers(argument(call, 6)), (request + 1,))[request]
        visible = carray(integers(argument(call, 7) + 4 * request * new * block), (new * block,))
        if committed < 0:
            for i in range(own_rows * wide):
                out[i] = 0
            return 0
        committed = min(committed, slots * table_width)
        for row in range(TOGETHER):
            state[row * apart + CHUNK] = FLOOR
            for i in range(CHUNK + 1, apart):
                state[row * apart + i] = 0
        mixed = scratch + _FLOAT * (CHUNK + 2)
        start = 0
        while True:
            # Chunks of committed tokens, which are the same whatever the block; the block is the last one.
            paged = start < committed
            count = min(CHUNK, committed - start) if paged else block
            keys = argument(call, 3 if paged else 1) + _FLOAT * width * head
            values = argument(call, 4 if paged else 2) + _FLOAT * wide * head
            token = 0
            while token < count:
                run, place = count, request * block
                if paged:
                    run, place = run_at(start + token, count - token, table, slots, pages)
                key = keys + _FLOAT * width * heads * place if place >= 0 else 0
                score(queries, key, width * heads, width, state, apart, token, run)
                token += run
            for row in range(TOGETHER):
                at = row * apart
                if not paged:
                    query = min((first_row + row) // group, new - 1)
                    for i in range(block):
                        if visible[query * block + i] == 0:
                            state[at + i] = MASKED
                highest = highest_of(scratch + _FLOAT * at, count)
                if highest > state[at + CHUNK]:
                    decay = np.float32(np.exp(state[at + CHUNK] - highest))
                    for i in range(CHUNK + 1, apart):
                        state[at + i] *= decay
                    state[at + CHUNK] = highest
                state[at + CHUNK + 1] += exponentials(scratch + _FLOAT * at, state[at + CHUNK], count)
            if not paged:
                break
            token = 0
            while token < count:
                run, place = run_at(start + token, count - token, table, slots, pages)
                if place >= 0:
                    value = values + _FLOAT * wide * heads * place
                    mix(scratch + _FLOAT * token, value, wide * heads, wide, mixed, apart, run)
                token += run
            start += count
        for i in range(block):
            value = values + _FLOAT * wide * heads * (request * block + i)
            for row in range(TOGETHER):
                query = min((first_row + row) // group, new - 1)
                if visible[query * block + i] != 0:  # what nobody sees may hold anything
                    add_scaled(mixed + _FLOAT * row * apart, state[row * apart + i], value, wide)
        for row in range(own_rows):
            total = state[row * apart + CHUNK + 1]
            for i in range(wide):
                value_mixed = state[row * apart + CHUNK + 2 + i]
                out[row * wide + i] = value_mixed if total <= 0 else value_mixed / total
        return 0

    return tiles, tile


KERNELS = ((_NAME, _attention),)
"""For `register`."""
