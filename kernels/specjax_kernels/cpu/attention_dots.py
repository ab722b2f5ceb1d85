"""What attention on a CPU computes of query rows and a run of keys and values, written in LLVM's vectors.

All sums stay in registers. A score's sum and a mixed value's sum are taken in one order, whatever else is computed
beside them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from specjax_kernels.cpu.vectors import Vectors
from specjax_kernels.masks import FLOOR, MASKED

ROWS = 4  # query rows that share what is read
LOWEST = -60.0
"""Weights below exp(LOWEST) of the largest, which is 1, count as 0: no float32 sum shows them, and their products with
values would be too small for normal numbers, with which processors take many times as long."""


def emit_scores(b: Any, values: Any) -> None:
    """Scores of `ROWS` rows and `count` keys, to `out` + i of each row; up to LANES / `ROWS` - 1 numbers more are
    written. `apart`: numbers from one key to the next."""
    _scores(b, *values)


def emit_first_scores(b: Any, values: Any) -> None:
    """The same of keys that are in memory. `ahead`, `beside`: a key and a value that are read later, as many of each of
    which are fetched."""
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
    """Adds `count` values to the sums of `ROWS` rows at `out`, each times a row's weight. `apart`: numbers from one
    value to the next, of `width` each."""
    weights, weights_apart, at_values, apart, count, out, out_apart, width = values
    v = Vectors(b)
    word, most = v.word, v.width // ROWS
    rows = [b.mul(b.mul(weights_apart, word(4)), word(row)) for row in range(ROWS)]

    def add(first: Any, vectors: int) -> None:
        """To some vectors, the first of which begins with this number."""
        first = b.mul(first, word(4))
        to = [
            b.add(b.add(out, first), b.mul(word(4), b.add(b.mul(out_apart, word(row)), word(v.width * i))))
            for row in range(ROWS)
            for i in range(vectors)
        ]
        sums = [v.variable(v.load(v.lanes, place)) for place in to]
        with v.control.for_range(b, count, intp=word) as loop:
            line = b.add(b.add(at_values, first), b.mul(b.mul(loop.index, apart), word(4)))
            found = [v.load(v.lanes, b.add(line, word(4 * v.width * i))) for i in range(vectors)]
            for row, offset in enumerate(rows):
                place = b.add(b.add(weights, offset), b.mul(loop.index, word(4)))
                weight = v.splat(b.load(b.inttoptr(place, v.float.as_pointer()), align=4))
                for value, total in zip(found, sums[row * vectors : (row + 1) * vectors], strict=True):
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
    """exp(score - peak) of `count` scores in place, and their sum to `out`. `peak`: an address.

    Within 2 units in the last place: the polynomial of Cephes' expf. See `LOWEST`. NaN stays NaN.
    """
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
    v.store(b.extract_element(v.folded(b.load(total), 1), v.ir.IntType(32)(0)), out)


@contextlib.contextmanager
def _vectors(v: Vectors, count: Any) -> Iterator[tuple[Any, Any]]:
    """A loop over `count` numbers, a vector at a time: the index of its first number, and which of them are there."""
    b, word = v.b, v.word
    places = v.vector(v.ir.IntType(32))
    lane = v.ir.Constant(places, list(range(v.width)))
    with v.control.for_range(b, b.udiv(b.add(count, word(v.width - 1)), word(v.width)), intp=word) as loop:
        index = b.mul(loop.index, word(v.width))
        yield index, b.icmp_signed("<", lane, v.splat(b.trunc(b.sub(count, index), places.element)))
