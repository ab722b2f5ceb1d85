"""Tree attention of float32 tokens on a CPU in one call, with the result of `specjax_kernels.xla`.

XLA:CPU makes some twenty small operations of each chunk of committed tokens, among them copies of the keys and values,
and loops over the chunks in every layer. This kernel reads keys and values in their pages. A tile is some query rows
of a request that share a head of keys and values.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax_kernels.call import Call
from specjax_kernels.cpu.attention_dots import (
    ROWS,
    emit_exponentials,
    emit_first_scores,
    emit_highest,
    emit_masked,
    emit_mixed,
    emit_scores,
)
from specjax_kernels.cpu.rows import STORED, unmet
from specjax_kernels.cpu.runtime import Tools, callable_here, register
from specjax_kernels.cpu.vectors import LANES
from specjax_kernels.masks import FLOOR, MASKED, block_visibility

MOST_TOKENS = 128  # new tokens of a request; with more XLA's products are as fast
CHUNK = 128  # keys whose scores are kept at a time
GROUPS = 4  # of rows, in a tile at most: they read a chunk one after another
SCORES = CHUNK + LANES  # room for them: some more are written than there are keys
NUMBERS = 3  # of a row: the highest score so far, the sum of exponentials, a number of the chunk
NAME = "specjax_tree_attention"


def prepare(dtype: str) -> list[str | None]:
    """Loads or compiles kernels that every model of this dtype calls. Returns for each why it cannot be called here;
    None: it can."""
    if dtype not in STORED or not callable_here():
        return []
    if dtype == "float32":  # its weights may have any format, so tracing compiles the kernels of their products
        return [register(NAME, _attention)]
    return [unmet(dtype, transposed) for transposed in (False, True)]


def takes(call: Call) -> bool:
    """Whether `attend` can be called here. The first call loads the kernel or compiles it, which takes seconds."""
    fits = call.q.dtype == jnp.float32 and call.q.shape[1] <= MOST_TOKENS
    fits = fits and call.v_block is not None and call.window is None and call.softcap is None
    fits = fits and call.shape.E % LANES == 0 == call.shape.Ev % LANES
    return fits and callable_here() and register(NAME, _attention) is None


def attend(call: Call) -> Array:
    """`tree_attention` of what `takes` accepts; vmapped, one by one."""
    B, H, N, C, K, G, E, Ev = call.shape[:8]
    pad = -N * G % ROWS  # always whole groups of rows: one loop, and one order of its sums
    rows = (call.q * call.scale).reshape(B, N, K, G, E).swapaxes(1, 2).reshape(B, K, N * G, E)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, pad), (0, 0)))
    visible = jnp.broadcast_to(block_visibility(call.mask, N, C), (B, N, C)).astype(jnp.int32)
    visible = jnp.pad(jnp.repeat(visible, G, axis=1), ((0, 0), (0, pad), (0, -C % LANES)))
    shapes = [jax.ShapeDtypeStruct((B, K, N * G + pad, width), jnp.float32) for width in (Ev, SCORES + NUMBERS + Ev)]
    kernel = jax.ffi.ffi_call(NAME, shapes, vmap_method="sequential")
    blocks = (call.k_block, call.v_block, call.k_pages, call.v_pages)
    queries = jnp.full(B, N, jnp.int32) if call.queries is None else call.queries
    out = kernel(rows, *blocks, call.page_table, call.prefix_length, visible, queries * G)[0]
    out = jnp.where((call.prefix_length >= 0)[:, None, None, None], out[:, :, : N * G], 0)
    return out.reshape(B, K, N, G, Ev).swapaxes(1, 2).reshape(B, N, H, Ev)


def _attention(tools: Tools) -> tuple[Any, Any]:
    """(queries [B, K, R, E], k_block, v_block, k_pages, v_pages, page_table, prefix_length, visible int32 [B, R, C],
    number of rows that count int32 [B]) -> out [B, K, R, Ev] and, for each row, a chunk's scores, their peak and total
    so far, the values mixed so far."""
    floats, integers = tools.floats, tools.integers
    argument, size, result = tools.argument, tools.argument_size, tools.result
    scores, first_scores = tools.emitted(7, emit_scores), tools.emitted(9, emit_first_scores)
    add_values = tools.emitted(8, emit_mixed)
    mask = tools.emitted(3, emit_masked)
    highest, exponentials = tools.emitted(3, emit_highest), tools.emitted(4, emit_exponentials)

    @tools.inlined
    def run_at(token: int, left: int, table: Any, slots: int, pages: int) -> Any:
        """The number of committed tokens, of `left` from this one on, that lie in one page, and the row of the pool
        where they begin; -1: in a hole."""
        page, slot = table[token // slots], token % slots
        return min(slots - slot, left), page * slots + slot if 0 <= page < pages else -1

    @tools.inlined
    def parts_of(groups: int) -> int:
        """In how many tiles the groups of `ROWS` rows are that share a head."""
        return (groups + GROUPS - 1) // GROUPS

    @tools.inlined
    def seen(visible: Any, token: int, padded: int) -> Any:
        """Whether some row of a tile sees a token of the block."""
        found = visible[token] + visible[padded + token] + visible[2 * padded + token] + visible[3 * padded + token]
        return found > 0

    @tools.inlined
    def any_seen(visible: Any, count: int, padded: int) -> Any:
        found = False
        for token in range(count):
            found = found or seen(visible, token, padded)
        return found

    @tools.inlined
    def weigh(row: int, count: int, apart: int) -> None:
        """Makes weights of a chunk's scores in place, and brings what the row has mixed so far to their scale."""
        state, numbers = floats(row, apart), row + 4 * SCORES
        highest(row, count, numbers + 8)
        if state[SCORES + 2] > state[SCORES]:
            decay = np.float32(np.exp(state[SCORES] - state[SCORES + 2]))
            for i in range(SCORES + NUMBERS, apart):
                state[i] *= decay
            state[SCORES + 1] *= decay
            state[SCORES] = state[SCORES + 2]
        exponentials(row, numbers, count, numbers + 8)
        state[SCORES + 1] += state[SCORES + 2]

    def tiles(call: int) -> int:
        return size(call, 0, 0) * size(call, 0, 1) * parts_of(size(call, 0, 2) // ROWS)

    def tile(call: int, index: int) -> int:
        heads, rows, width = size(call, 0, 1), size(call, 0, 2), size(call, 0, 3)
        block, wide, table_width, padded = size(call, 2, 1), size(call, 2, 3), size(call, 5, 1), size(call, 7, 2)
        pages, slots = size(call, 3, 0), size(call, 3, 1)
        groups, parts = rows // ROWS, parts_of(rows // ROWS)
        pair, part = index // parts, index % parts
        request, head = pair // heads, pair % heads
        first, end = groups * part // parts * ROWS, groups * (part + 1) // parts * ROWS
        apart = SCORES + NUMBERS + wide
        table = integers(argument(call, 5) + 4 * request * table_width, table_width)
        committed = min(integers(argument(call, 6), request + 1)[request], slots * table_width)
        counted = (integers(argument(call, 8), request + 1)[request] + ROWS - 1) // ROWS * ROWS  # whole groups
        for row in range(max(first, counted), end):
            out = floats(result(call, 0) + 4 * (pair * rows + row) * wide, wide)
            for i in range(wide):
                out[i] = 0
        end = min(end, counted)
        for row in range(first, end):
            state = floats(result(call, 1) + 4 * (pair * rows + row) * apart, apart)
            state[SCORES] = FLOOR
            for i in range(SCORES + 1, apart):
                state[i] = 0
        start, blocked = 0, 0
        while blocked < block:  # chunks of committed tokens, which are the same whatever the block, then of the block
            paged = start < committed
            count = min(CHUNK, committed - start if paged else block - blocked)
            keys = argument(call, 3 if paged else 1) + 4 * width * head
            values = argument(call, 4 if paged else 2) + 4 * wide * head
            for row in range(first, end, ROWS):  # of each chunk, which stays in the cache meanwhile
                queries = argument(call, 0) + 4 * (pair * rows + row) * width
                scratch = result(call, 1) + 4 * (pair * rows + row) * apart
                shown = argument(call, 7) + 4 * ((request * rows + row) * padded + blocked)
                visible = integers(shown, ROWS * padded - blocked)
                if not paged and not any_seen(visible, count, padded):
                    continue
                token = 0
                while token < count:
                    run, place = count, request * block + blocked
                    if paged:
                        run, place = run_at(start + token, count - token, table, slots, pages)
                    if place >= 0:
                        key, at = keys + 4 * width * heads * place, scratch + 4 * token
                        if row > first:  # the first rows have fetched it
                            scores(queries, key, width * heads, width, run, at, apart)
                        else:
                            ahead = place
                            if paged and start + token + run < committed:
                                ahead = max(place, run_at(start + token + run, 1, table, slots, pages)[1])
                            ahead = keys + 4 * width * heads * ahead
                            beside = values + 4 * width * heads * place if wide == width else key
                            first_scores(queries, key, width * heads, width, run, ahead, beside, at, apart)
                    else:
                        for n in range(ROWS):
                            masked = floats(scratch + 4 * (n * apart + token), run)
                            for i in range(run):
                                masked[i] = MASKED
                    token += run
                for n in range(ROWS):
                    at = scratch + 4 * n * apart
                    if not paged:
                        mask(at, shown + 4 * n * padded, count)
                    weigh(at, count, apart)
                token = 0
                while token < count:
                    if paged:
                        run, place = run_at(start + token, count - token, table, slots, pages)
                    else:  # a slot that no row sees may hold anything: 0 * NaN is NaN
                        run, place = 1, -1
                        if seen(visible, token, padded):
                            place = request * block + blocked + token
                            while token + run < count and seen(visible, token + run, padded):
                                run += 1
                    if place >= 0:
                        value, mixed = values + 4 * wide * heads * place, scratch + 4 * (SCORES + NUMBERS)
                        add_values(scratch + 4 * token, apart, value, wide * heads, run, mixed, apart, wide)
                    token += run
            if paged:
                start += count
            else:
                blocked += count
        for row in range(first, end):
            state = floats(result(call, 1) + 4 * (pair * rows + row) * apart, apart)
            out = floats(result(call, 0) + 4 * (pair * rows + row) * wide, wide)
            total = state[SCORES + 1]
            for i in range(wide):
                out[i] = state[SCORES + NUMBERS + i] / (total if total > 0 else np.float32(1))
        return 0

    return tiles, tile
