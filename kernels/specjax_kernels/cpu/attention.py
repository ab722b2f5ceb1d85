"""Tree attention of a few float32 tokens on a CPU in one call, with the result of `specjax_kernels.xla`.

XLA:CPU makes some twenty small operations of each chunk of committed tokens, among them copies of the keys and values,
and loops over the chunks in every layer. This kernel reads keys and values in their pages. A tile is four query rows of
a request that share a head of keys and values.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax_kernels.call import Call
from specjax_kernels.cpu.rows import DEEP, STORED, TOGETHER, adder, dots_of, unmet
from specjax_kernels.cpu.runtime import Tools, callable_here, register
from specjax_kernels.masks import FLOOR, MASKED, block_visibility

MOST_TOKENS = 16  # new tokens of a request; for more XLA has blocked products
CHUNK = 128  # keys whose scores are kept at a time, and the largest number of block keys
NAME = "specjax_tree_attention"


def prepare(dtype: str) -> list[str | None]:
    """Loads or compiles all kernels for weights of this dtype, so that XLA knows them before a stored program that
    names them is loaded. Returns for each why it cannot be called here; None: it can."""
    if dtype not in STORED or not callable_here():
        return []
    reasons = [unmet(dtype, transposed) for transposed in (False, True)]
    return [*reasons, register(NAME, _attention)] if dtype == "float32" else reasons


def takes(call: Call) -> bool:
    """Whether `attend` can be called here. The first call loads the kernel or compiles it, which takes seconds."""
    fits = call.q.dtype == jnp.float32 and call.q.shape[1] <= MOST_TOKENS and call.k_block.shape[1] <= CHUNK
    fits = fits and call.v_block is not None and call.window is None and call.softcap is None
    return fits and callable_here() and register(NAME, _attention) is None


def attend(call: Call) -> Array:
    """`tree_attention` of what `takes` accepts; vmapped, one by one."""
    B, H, N, C, K, G, E, Ev = call.shape[:8]
    pad = -N * G % TOGETHER  # always whole groups of rows: one loop, and one order of its sums
    rows = (call.q * call.scale).reshape(B, N, K, G, E).swapaxes(1, 2).reshape(B, K, N * G, E)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, pad), (0, 0)))
    visible = jnp.broadcast_to(block_visibility(call.mask, N, C), (B, N, C)).astype(jnp.int32)
    visible = jnp.pad(jnp.repeat(visible, G, axis=1), ((0, 0), (0, pad), (0, 0)))
    shapes = [jax.ShapeDtypeStruct((B, K, N * G + pad, width), jnp.float32) for width in (Ev, CHUNK + 2 + Ev)]
    kernel = jax.ffi.ffi_call(NAME, shapes, vmap_method="sequential")
    blocks = (call.k_block, call.v_block, call.k_pages, call.v_pages)
    out = kernel(rows, *blocks, call.page_table, call.prefix_length, visible)[0]
    out = jnp.where((call.prefix_length >= 0)[:, None, None, None], out[:, :, : N * G], 0)
    return out.reshape(B, K, N, G, Ev).swapaxes(1, 2).reshape(B, N, H, Ev)


def _attention(tools: Tools) -> tuple[Any, Any]:
    """(queries [B, K, R, E], k_block, v_block, k_pages, v_pages, page_table, prefix_length, visible int32 [B, R, C]) ->
    out [B, K, R, Ev] and, for each row, a chunk's scores, their peak and total so far, the values mixed so far."""
    floats, integers, bits, float_of = tools.floats, tools.integers, tools.bits, tools.float_of
    argument, size, result = tools.argument, tools.argument_size, tools.result
    dots = dots_of(tools, "float32")
    add_values, add_value = (adder(tools, "float32", TOGETHER, deep) for deep in (DEEP, 1))

    @tools.inlined
    def exponentials(at: int, less: Any, count: int) -> Any:
        """exp(x - less) of each x at an address, in place, and their sum. Within 2 units in the last place: the
        polynomial of Cephes' expf. Numba calls the C library for each number; this loop becomes vectors."""
        x = floats(at, count)
        for i in range(count):
            value = max(x[i] - less, np.float32(-88))
            shifted = value * np.float32(1.44269504088896341) + np.float32(12582912)  # 1.5 * 2 ** 23 rounds it
            whole = shifted - np.float32(12582912)
            rest = value - whole * np.float32(0.693359375)
            rest = rest + whole * np.float32(2.12194440e-4)
            power = np.float32(1.9875691500e-4)
            power = power * rest + np.float32(1.3981999507e-3)
            power = power * rest + np.float32(8.3334519073e-3)
            power = power * rest + np.float32(4.1665795894e-2)
            power = power * rest + np.float32(1.6666665459e-1)
            power = power * rest + np.float32(5.0000001201e-1)
            power = power * rest * rest + rest + np.float32(1)
            scale = float_of(np.int32((bits(shifted) - np.int32(0x4B400000) + np.int32(127)) << np.int32(23)))
            known = power * scale if x[i] == x[i] else x[i]  # NaN stays NaN
            x[i] = np.float32(0) if x[i] <= np.float32(MASKED * 0.5) else known
        total = np.float32(0)
        for i in range(count):
            total += x[i]
        return total

    @tools.inlined
    def highest_of(at: int, count: int) -> Any:
        """The largest of some scores, in four chains of comparisons that do not wait for one another."""
        x = floats(at, count)
        first = second = third = fourth = np.float32(FLOOR)
        for i in range(0, count - 3, 4):
            first, second = max(first, x[i]), max(second, x[i + 1])
            third, fourth = max(third, x[i + 2]), max(fourth, x[i + 3])
        for i in range(count // 4 * 4, count):
            first = max(first, x[i])
        return max(max(first, second), max(third, fourth))

    @tools.inlined
    def run_at(token: int, left: int, table: Any, slots: int, pages: int) -> Any:
        """The number of committed tokens, of `left` from this one on, that lie in one page, and the row of the pool
        where they begin; -1: in a hole."""
        page, slot = table[token // slots], token % slots
        return min(slots - slot, left), page * slots + slot if 0 <= page < pages else -1

    def tiles(call: int) -> int:
        return size(call, 0, 0) * size(call, 0, 1) * (size(call, 0, 2) // TOGETHER)

    def tile(call: int, index: int) -> int:
        heads, rows, width = size(call, 0, 1), size(call, 0, 2), size(call, 0, 3)
        block, wide, slots, table_width = size(call, 2, 1), size(call, 2, 3), size(call, 3, 1), size(call, 5, 1)
        pair, row = index // (rows // TOGETHER), index % (rows // TOGETHER) * TOGETHER
        request, head = pair // heads, pair % heads
        apart = CHUNK + 2 + wide
        queries = argument(call, 0) + 4 * (pair * rows + row) * width
        scratch = result(call, 1) + 4 * (pair * rows + row) * apart
        state, mixed = floats(scratch, TOGETHER * apart), scratch + 4 * (CHUNK + 2)
        table = integers(argument(call, 5) + 4 * request * table_width, table_width)
        visible = integers(argument(call, 7) + 4 * (request * rows + row) * block, TOGETHER * block)
        committed = min(integers(argument(call, 6), request + 1)[request], slots * table_width)
        for n in range(TOGETHER):
            state[n * apart + CHUNK] = FLOOR
            for i in range(CHUNK + 1, apart):
                state[n * apart + i] = 0
        start, paged = 0, True
        while paged:  # chunks of committed tokens, which are the same whatever the block; the block is the last one
            paged = start < committed
            count = min(CHUNK, committed - start) if paged else block
            keys = argument(call, 3 if paged else 1) + 4 * width * head
            values = argument(call, 4 if paged else 2) + 4 * wide * head
            token = 0
            while token < count:
                run, place = count, request * block
                if paged:
                    run, place = run_at(start + token, count - token, table, slots, size(call, 3, 0))
                for i in range(token, token + run):
                    score = np.float32(MASKED), np.float32(MASKED), np.float32(MASKED), np.float32(MASKED)
                    if place >= 0:
                        score = dots(queries, keys + 4 * width * heads * (place + i - token), width)
                    state[i], state[apart + i], state[2 * apart + i], state[3 * apart + i] = score
                token += run
            for n in range(TOGETHER):
                if not paged:
                    for i in range(block):
                        if visible[n * block + i] == 0:
                            state[n * apart + i] = MASKED
                peak = max(state[n * apart + CHUNK], highest_of(scratch + 4 * n * apart, count))
                if peak > state[n * apart + CHUNK]:
                    decay = np.float32(np.exp(state[n * apart + CHUNK] - peak))
                    for i in range(CHUNK + 1, apart):
                        state[n * apart + i] *= decay
                    state[n * apart + CHUNK] = peak
                state[n * apart + CHUNK + 1] += exponentials(scratch + 4 * n * apart, peak, count)
            token = 0
            while token < count:
                if paged:
                    run, place = run_at(start + token, count - token, table, slots, size(call, 3, 0))
                else:  # a slot that no row sees may hold anything: 0 * NaN is NaN
                    seen = visible[token] + visible[block + token]
                    seen += visible[2 * block + token] + visible[3 * block + token]
                    run, place = 1, request * block + token if seen > 0 else -1
                value, done = values + 4 * wide * heads * place, 0
                if place >= 0:
                    while done + DEEP <= run:
                        add_values(scratch + 4 * (token + done), apart, value, wide * heads, mixed, apart, wide)
                        value, done = value + 4 * wide * heads * DEEP, done + DEEP
                    while done < run:
                        add_value(scratch + 4 * (token + done), apart, value, wide * heads, mixed, apart, wide)
                        value, done = value + 4 * wide * heads, done + 1
                token += run
            start += count
        out = floats(result(call, 0) + 4 * (pair * rows + row) * wide, TOGETHER * wide)
        for n in range(TOGETHER):
            total = state[n * apart + CHUNK + 1]
            for i in range(wide):
                out[n * wide + i] = state[n * apart + CHUNK + 2 + i] / (total if total > 0 else np.float32(1))
        return 0

    return tiles, tile
