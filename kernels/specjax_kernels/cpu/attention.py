"""Tree attention of float32 tokens on a CPU in one call, with the result of `specjax_kernels.xla`.

XLA:CPU runs some twenty small operations for each chunk of committed tokens, among them copies of the keys and values,
and loops over the chunks in every layer. This kernel reads keys and values in their pages. A tile is some query rows
of a request that share a key/value head.

`_attention` is the kernel; the `emit_` functions write its inner loops in LLVM's vectors, with all sums in registers.
Each score and each mixed value is summed in a fixed order, so the results of a row do not depend on other rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax_kernels.call import FLOOR, MASKED, Call, block_visibility
from specjax_kernels.cpu import quantised as cpu_quantised
from specjax_kernels.cpu import rows as cpu_rows
from specjax_kernels.cpu.runtime import Tools, callable_here, register
from specjax_kernels.cpu.vectors import LANES, Vectors

MOST_TOKENS = 256  # new tokens of a request; for more XLA's products are as fast
CHUNK = 128  # keys whose scores are in memory at a time
ROWS = 4  # query rows that share one reading of keys and values
GROUPS = 4  # groups of `ROWS` rows in a tile, at most; they read a chunk in turn
SCORES = CHUNK + LANES  # room for a chunk's scores, which are written in whole vectors
NUMBERS = 3  # a row's highest score and sum of exponentials so far, and the chunk's highest score or sum
NAME = "specjax_tree_attention"
LOWEST = -60.0
"""Weights below exp(LOWEST) of the largest, which is 1, count as 0: they do not change a float32 sum, and products of
denormal numbers are slow."""


def prepare(dtype: str) -> None:
    """Loads or compiles the kernels of every model of this dtype."""
    if dtype not in cpu_rows.STORED or not callable_here():
        return
    if dtype == "float32":  # its weights may have any format, so tracing compiles the kernels of their products
        register(NAME, _attention)
        return
    cpu_rows.unmet(dtype)
    cpu_quantised.unmet(1, cpu_quantised.Layout.of_weights(dtype))


def takes(call: Call) -> bool:
    """True if `attend` supports the call. The first call loads the kernel or compiles it, which takes seconds."""
    fits = call.q.dtype == jnp.float32 and call.q.shape[1] <= MOST_TOKENS
    fits = fits and call.v_block is not None and call.window is None and call.softcap is None
    fits = fits and call.shape.E % LANES == 0 == call.shape.Ev % LANES
    return fits and callable_here() and register(NAME, _attention) is None


def attend(call: Call) -> Array:
    """`tree_attention` of a call that `takes` accepts. `vmap` calls it in sequence."""
    B, H, N, C, K, G, E, Ev = call.shape[:8]
    pad = -N * G % ROWS  # whole groups of rows
    rows = (call.q * call.scale).reshape(B, N, K, G, E).swapaxes(1, 2).reshape(B, K, N * G, E)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, pad), (0, 0)))
    visible = jnp.broadcast_to(block_visibility(call.mask, N, C), (B, N, C)).astype(jnp.int32)
    visible = jnp.pad(jnp.repeat(visible, G, axis=1), ((0, 0), (0, pad), (0, -C % LANES)))
    shapes = [jax.ShapeDtypeStruct((B, K, N * G + pad, width), jnp.float32) for width in (Ev, SCORES + NUMBERS + Ev)]
    kernel = jax.ffi.ffi_call(NAME, shapes, vmap_method="sequential")
    blocks = (call.k_block, call.v_block, call.k_pages, call.v_pages)
    queries = jnp.full(B, N, jnp.int32) if call.queries is None else call.queries
    # Without sinks a row's sums begin with a score of `FLOOR`, whose weight is 0.
    sinks = jnp.full((K, G), FLOOR, jnp.float32) if call.sinks is None else call.sinks.astype(jnp.float32).reshape(K, G)
    out = kernel(rows, *blocks, call.page_table, call.prefix_length, visible, queries * G, sinks)[0]
    out = jnp.where((call.prefix_length >= 0)[:, None, None, None], out[:, :, : N * G], 0)
    return out.reshape(B, K, N, G, Ev).swapaxes(1, 2).reshape(B, N, H, Ev)


def _attention(tools: Tools) -> tuple[Any, Any]:
    """(queries [B, K, R, E], k_block, v_block, k_pages, v_pages, page_table, prefix_length, visible int32 [B, R, C],
    number of valid rows int32 [B], sinks [K, G]) -> out [B, K, R, Ev] and, for each row, a chunk's scores, the peak and
    total so far, and the mixed values so far."""
    floats, integers = tools.floats, tools.integers
    argument, size, result = tools.argument, tools.argument_size, tools.result
    scores, first_scores = tools.emitted(7, emit_scores), tools.emitted(9, emit_first_scores)
    add_values = tools.emitted(8, emit_mixed)
    mask = tools.emitted(3, emit_masked)
    highest, exponentials = tools.emitted(3, emit_highest), tools.emitted(4, emit_exponentials)

    @tools.inlined
    def run_at(token: int, left: int, table: Any, slots: int, pages: int) -> Any:
        """The number of committed tokens in this token's page, at most `left`, and their first row of the pool (-1: the
        page is a hole)."""
        page, slot = table[token // slots], token % slots
        return min(slots - slot, left), page * slots + slot if 0 <= page < pages else -1

    @tools.inlined
    def parts_of(groups: int) -> int:
        """The number of tiles for the groups of `ROWS` rows that share a head."""
        return (groups + GROUPS - 1) // GROUPS

    @tools.inlined
    def seen(visible: Any, token: int, padded: int) -> Any:
        """True if a row of a tile sees a token of the block."""
        count = visible[token] + visible[padded + token] + visible[2 * padded + token] + visible[3 * padded + token]
        return count > 0

    @tools.inlined
    def any_seen(visible: Any, count: int, padded: int) -> Any:
        some = False
        for token in range(count):
            some = some or seen(visible, token, padded)
        return some

    @tools.inlined
    def weigh(row: int, count: int, apart: int) -> None:
        """Replaces a chunk's scores by weights and rescales the row's sums."""
        state, numbers = floats(row), row + 4 * SCORES
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
        table = integers(argument(call, 5) + 4 * request * table_width)
        committed = min(integers(argument(call, 6))[request], slots * table_width)
        sinks, group = floats(argument(call, 9)), size(call, 9, 1)
        valid = integers(argument(call, 8))[request]
        counted = (valid + ROWS - 1) // ROWS * ROWS  # whole groups
        for row in range(max(first, counted), end):
            out = floats(result(call, 0) + 4 * (pair * rows + row) * wide)
            for i in range(wide):
                out[i] = 0
        end = min(end, counted)
        for row in range(first, end):
            state = floats(result(call, 1) + 4 * (pair * rows + row) * apart)
            for i in range(SCORES + 1, apart):
                state[i] = 0
            state[SCORES] = sinks[head * group + row % group]
            if state[SCORES] > FLOOR:
                state[SCORES + 1] = 1
        start, blocked = 0, 0
        while blocked < block:  # chunks of committed tokens, which do not depend on the block, then of the block
            paged = start < committed
            count = min(CHUNK, committed - start if paged else block - blocked)
            keys = argument(call, 3 if paged else 1) + 4 * width * head
            values = argument(call, 4 if paged else 2) + 4 * wide * head
            for row in range(first, end, ROWS):  # the chunk stays in the cache
                queries = argument(call, 0) + 4 * (pair * rows + row) * width
                scratch = result(call, 1) + 4 * (pair * rows + row) * apart
                shown = argument(call, 7) + 4 * ((request * rows + row) * padded + blocked)
                visible = integers(shown)
                if not paged and not any_seen(visible, count, padded):
                    continue
                token = 0
                while token < count:
                    run, place = count, request * block + blocked
                    if paged:
                        run, place = run_at(start + token, count - token, table, slots, pages)
                    if place >= 0:
                        key, at = keys + 4 * width * heads * place, scratch + 4 * token
                        if row > first:  # the first rows have prefetched it
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
                            masked = floats(scratch + 4 * (n * apart + token))
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
                    else:  # a slot that no row sees may hold NaN, and 0 * NaN is NaN
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
            state = floats(result(call, 1) + 4 * (pair * rows + row) * apart)
            out = floats(result(call, 0) + 4 * (pair * rows + row) * wide)
            total = state[SCORES + 1]
            for i in range(wide):
                out[i] = 0 if row >= valid else state[SCORES + NUMBERS + i] / (total if total > 0 else np.float32(1))
        return 0

    return tiles, tile


def emit_scores(b: Any, values: Any) -> None:
    """Scores of `ROWS` rows and `count` keys, to `out` + i of each row, in whole vectors. `apart`: numbers from one key
    to the next."""
    _scores(b, *values)


def emit_first_scores(b: Any, values: Any) -> None:
    """`emit_scores` for keys in memory. Also prefetches `count` keys at `ahead` and `count` values at `beside`."""
    queries, keys, apart, depth, count, ahead, beside, out, out_apart = values
    _scores(b, queries, keys, apart, depth, count, out, out_apart, fetched=(ahead, beside))


def _scores(
    b: Any, queries: Any, keys: Any, apart: Any, depth: Any, count: Any, out: Any, out_apart: Any, *,
    fetched: tuple[Any, ...] = (),
) -> None:  # fmt: skip
    v = Vectors(b)
    word, together = v.word, v.width // ROWS
    line = b.mul(depth, word(4))
    rows = [b.add(queries, b.mul(line, word(row))) for row in range(ROWS)]
    blocks = b.udiv(b.add(count, word(together - 1)), word(together))
    with v.control.for_range(b, blocks, intp=word) as block:
        begin = b.mul(block.index, word(together))
        last = b.sub(count, word(1))
        places = [b.add(begin, word(i)) for i in range(together)]
        places = [b.select(b.icmp_unsigned("<", place, last), place, last) for place in places]
        offsets = [b.mul(b.mul(place, apart), word(4)) for place in places]
        sums = [[v.variable(v.zeros()) for _ in offsets] for _ in rows]
        with v.control.for_range(b, b.udiv(depth, word(v.width)), intp=word) as loop:
            at = b.mul(loop.index, word(4 * v.width))
            of_keys = []
            for offset in offsets:
                of_keys.append(v.load(v.lanes, b.add(keys, b.add(offset, at))))
                for place in fetched:
                    v.prefetch(b.add(place, b.add(offset, at)))
            for row, of_row in zip(rows, sums, strict=True):
                query = v.load(v.lanes, b.add(row, at))
                for key, total in zip(of_keys, of_row, strict=True):
                    b.store(v.fused(query, key, b.load(total)), total)
        totals = v.totals([b.load(total) for of_row in sums for total in of_row])
        for row in range(ROWS):
            some = v.shuffled(totals, totals, [row * together + i for i in range(together)])
            v.store(some, b.add(out, b.mul(word(4), b.add(begin, b.mul(out_apart, word(row))))))


def emit_mixed(b: Any, values: Any) -> None:
    """Adds `count` values, each times a row's weight, to the sums of `ROWS` rows at `out`. `apart`: numbers from one
    value of `width` numbers to the next."""
    weights, weights_apart, at_values, apart, count, out, out_apart, width = values
    v = Vectors(b)
    word, most = v.word, v.width // ROWS
    rows = [b.mul(b.mul(weights_apart, word(4)), word(row)) for row in range(ROWS)]

    def add(first: Any, vectors: int) -> None:
        """Adds to `vectors` vectors, from the number `first` on."""
        first = b.mul(first, word(4))
        to = [
            b.add(b.add(out, first), b.mul(word(4), b.add(b.mul(out_apart, word(row)), word(v.width * i))))
            for row in range(ROWS)
            for i in range(vectors)
        ]
        sums = [v.variable(v.load(v.lanes, place)) for place in to]
        with v.control.for_range(b, count, intp=word) as loop:
            line = b.add(b.add(at_values, first), b.mul(b.mul(loop.index, apart), word(4)))
            loaded = [v.load(v.lanes, b.add(line, word(4 * v.width * i))) for i in range(vectors)]
            for row, offset in enumerate(rows):
                place = b.add(b.add(weights, offset), b.mul(loop.index, word(4)))
                weight = v.splat(b.load(b.inttoptr(place, v.float.as_pointer()), align=4))
                for value, total in zip(loaded, sums[row * vectors : (row + 1) * vectors], strict=True):
                    b.store(v.fused(weight, value, b.load(total)), total)
        for place, total in zip(to, sums, strict=True):
            v.store(b.load(total), place)

    whole = b.udiv(width, word(most * v.width))
    with v.control.for_range(b, whole, intp=word) as loop:
        add(b.mul(loop.index, word(most * v.width)), most)
    done = b.mul(whole, word(most * v.width))
    with v.control.for_range(b, b.udiv(b.sub(width, done), word(v.width)), intp=word) as loop:
        add(b.add(done, b.mul(loop.index, word(v.width))), 1)


def emit_masked(b: Any, values: Any) -> None:
    """Sets the scores of keys that are not visible (int32 0 at `visible`) to `MASKED`, whole vectors at a time."""
    scores, visible, count = values
    v = Vectors(b)
    words = v.vector(v.ir.IntType(32))
    with _vectors(v, count) as (index, _):
        offset = b.mul(index, v.word(4))
        place = b.add(scores, offset)
        hidden = b.icmp_signed("==", v.load(words, b.add(visible, offset)), v.constant(words, 0))
        v.store(b.select(hidden, v.constant(v.lanes, MASKED), v.load(v.lanes, place)), place)


def emit_highest(b: Any, values: Any) -> None:
    """Writes the largest of `count` scores to `out`, at least `FLOOR`. NaN is never the largest."""
    scores, count, out = values
    v = Vectors(b)
    peak = v.variable(v.constant(v.lanes, FLOOR))
    with _vectors(v, count) as (index, there):
        score, most = v.load(v.lanes, b.add(scores, b.mul(index, v.word(4)))), b.load(peak)
        higher = b.and_(there, b.fcmp_ordered(">", score, most))
        b.store(b.select(higher, score, most), peak)
    lanes = b.load(peak)
    while lanes.type.count > 1:
        half = lanes.type.count // 2
        low, high = (v.shuffled(lanes, lanes, [*range(at, at + half)]) for at in (0, half))
        lanes = b.select(b.fcmp_ordered(">", low, high), low, high)
    v.store(b.extract_element(lanes, v.ir.IntType(32)(0)), out)


def emit_exponentials(b: Any, values: Any) -> None:
    """exp(score - peak) of `count` scores in place, and their sum to `out`, by the polynomial of Cephes' expf, within 2
    units in the last place. `peak`: an address. See `LOWEST`. NaN stays NaN."""
    scores, peak, count, out = values
    v = Vectors(b)
    words = v.vector(v.ir.IntType(32))

    def number(value: float) -> Any:
        return v.constant(v.lanes, float(np.float32(value)))

    less = v.splat(b.load(b.inttoptr(peak, v.float.as_pointer()), align=4))
    total = v.variable(v.zeros())
    with _vectors(v, count) as (index, there):
        place = b.add(scores, b.mul(index, v.word(4)))
        score = v.load(v.lanes, place)
        value = b.fsub(score, less)
        value = b.select(b.fcmp_ordered(">", value, number(LOWEST)), value, number(LOWEST))
        shifted = v.fused(value, number(1.44269504088896341), number(12582912.0))  # 1.5 * 2 ** 23 rounds it
        whole = b.fsub(shifted, number(12582912.0))
        rest = v.fused(whole, number(-0.693359375), value)
        rest = v.fused(whole, number(2.12194440e-4), rest)
        power = number(1.9875691500e-4)
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            power = v.fused(power, rest, number(factor))
        power = b.fadd(v.fused(b.fmul(power, rest), rest, rest), number(1.0))
        exponent = b.add(b.sub(b.bitcast(shifted, words), v.constant(words, 0x4B400000)), v.constant(words, 127))
        power = b.fmul(power, b.bitcast(b.shl(exponent, v.constant(words, 23)), v.lanes))
        power = b.select(b.fcmp_ordered("<=", value, number(LOWEST)), v.zeros(), power)
        power = b.select(b.fcmp_unordered("uno", score, score), score, power)
        v.store(power, place)
        b.store(b.fadd(b.load(total), b.select(there, power, v.zeros())), total)
    v.store(v.total(b.load(total)), out)


@contextlib.contextmanager
def _vectors(v: Vectors, count: Any) -> Iterator[tuple[Any, Any]]:
    """A loop over `count` numbers in vectors. Yields the index of a vector's first number, and which numbers exist."""
    b, word = v.b, v.word
    places = v.vector(v.ir.IntType(32))
    lane = v.ir.Constant(places, list(range(v.width)))
    with v.control.for_range(b, b.udiv(b.add(count, word(v.width - 1)), word(v.width)), intp=word) as loop:
        index = b.mul(loop.index, word(v.width))
        yield index, b.icmp_signed("<", lane, v.splat(b.trunc(b.sub(count, index), places.element)))
