"""Host functions for loading: codes of 4 bits from published words to `Quantised`'s layout, and 8-bit quantisation.

They work on numpy arrays, whatever the device, and equal `specjax.checkpoint.quantised` and
`specjax_kernels.quantise` bit for bit. Every function returns False, with nothing written, where it is not compiled:
loading does not wait for a compiler. `prepare` compiles them for later processes.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from specjax_kernels.cpu.runtime import Tools, host_function, is_missed

_KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}


def prepare(*, every: bool = False) -> None:
    """Compiles the functions that this process called in vain; `every`: all of them."""
    missed = {name for name in _BUILDS if every or is_missed(f"specjax_repacking_{name}")}
    if "magnitudes" in missed:
        missed.add("codes")  # which is called after it
    for name in sorted(missed):
        host_function(f"specjax_repacking_{name}", _BUILDS[name], compile=True)


def from_rows(words: np.ndarray, found: np.ndarray) -> bool:
    """`pack_rows` of int32 [out, in / 8], of any strides, to C-contiguous uint8 [out, in / 2]."""
    return _call("from_rows", words, *words.strides, len(found), found.shape[1] // 16, found)


def from_awq(words: np.ndarray, found: np.ndarray) -> bool:
    """`pack_awq` of int32 [in, out / 8], whose rows may lie apart, to C-contiguous uint8 [out, in / 2]."""
    return _call("from_awq", words, words.strides[0], words.shape[1], len(words) // 32, found)


def magnitudes(matrix: np.ndarray, found: np.ndarray) -> bool:
    """The largest magnitude of each row of a C-contiguous float matrix, to float32 [rows]; not finite where a number of
    the row is not."""
    kind = _KINDS.get(matrix.dtype.name)
    return kind is not None and _call("magnitudes", matrix, kind, *matrix.shape, found)


def codes(matrix: np.ndarray, scale: np.ndarray, found: np.ndarray) -> bool:
    """`quantise`'s codes of a C-contiguous float matrix, whose finite scales are float32 [rows], to C-contiguous int8
    or float8_e4m3fn."""
    kind = _KINDS.get(matrix.dtype.name)
    is_fp8 = int(found.dtype.name == "float8_e4m3fn")
    return kind is not None and _call("codes", matrix, kind, *matrix.shape, scale, is_fp8, found)


def _call(name: str, *arguments: Any) -> bool:
    function = host_function(f"specjax_repacking_{name}", _BUILDS[name])
    if function is None:
        return False
    values = (each.ctypes.data if isinstance(each, np.ndarray) else each for each in arguments)
    function(*map(ctypes.c_int64, values))
    return True


def _from_rows(tools: Tools) -> Any:
    integers, longs = tools.integers, tools.longs

    @tools.inlined
    def spread(word: Any) -> Any:
        """The eight nibbles of a word as the low halves of eight bytes."""
        wide = np.int64(word) & 0xFFFFFFFF
        wide = (wide | wide << 16) & 0x0000FFFF0000FFFF
        wide = (wide | wide << 8) & 0x00FF00FF00FF00FF
        return (wide | wide << 4) & 0x0F0F0F0F0F0F0F0F

    # An index of zero cannot be negative, which Numba would check: addresses move instead.
    def work(words: int, across: int, along: int, rows: int, blocks: int, found: int) -> int:
        for first in range(0, rows, 16):  # 16 words of transposed rows are a line of the cache
            for block in range(blocks):
                for row in range(first, min(first + 16, rows)):
                    word, out = words + row * across + 4 * block * along, longs(found + 16 * (row * blocks + block), 2)
                    one, two = integers(word, 1)[0], integers(word + along, 1)[0]
                    three, four = integers(word + 2 * along, 1)[0], integers(word + 3 * along, 1)[0]
                    out[0], out[1] = spread(one) | spread(three) << 4, spread(two) | spread(four) << 4
        return 0

    return work


def _from_awq(tools: Tools) -> Any:
    integers, longs = tools.integers, tools.longs

    @tools.inlined
    def joined(first: Any, second: Any) -> Any:
        """A byte for each of rows 0, 4, 1, 5, 2, 6, 3, 7: the code of `first` low, that of `second` high."""
        low, high = np.int64(first) & 0xFFFFFFFF, np.int64(second) & 0xFFFFFFFF
        even = low & 0x0F0F0F0F | (high & 0x0F0F0F0F) << 4
        odd = low >> 4 & 0x0F0F0F0F | high & 0xF0F0F0F0
        return even | odd << 32

    @tools.inlined
    def swapped(first: int, second: int, shift: int, mask: int) -> Any:
        """Transposes 2 x 2 squares of so many bits."""
        return first & mask | (second & mask) << shift, first >> shift & mask | second & ~mask

    @tools.inlined
    def pair(word: int, along: int) -> Any:
        return joined(integers(word, 1)[0], integers(word + 16 * along, 1)[0])

    def work(words: int, along: int, count: int, blocks: int, found: int) -> int:
        for first in range(0, count, 16):
            for part in range(2 * blocks):
                for column in range(first, min(first + 16, count)):
                    word = words + (part // 2 * 32 + part % 2 * 8) * along + 4 * column
                    a0 = pair(word, along)
                    a1 = pair(word + along, along)
                    a2 = pair(word + 2 * along, along)
                    a3 = pair(word + 3 * along, along)
                    a4 = pair(word + 4 * along, along)
                    a5 = pair(word + 5 * along, along)
                    a6 = pair(word + 6 * along, along)
                    a7 = pair(word + 7 * along, along)
                    a0, a4 = swapped(a0, a4, 32, 0x00000000FFFFFFFF)
                    a1, a5 = swapped(a1, a5, 32, 0x00000000FFFFFFFF)
                    a2, a6 = swapped(a2, a6, 32, 0x00000000FFFFFFFF)
                    a3, a7 = swapped(a3, a7, 32, 0x00000000FFFFFFFF)
                    a0, a2 = swapped(a0, a2, 16, 0x0000FFFF0000FFFF)
                    a1, a3 = swapped(a1, a3, 16, 0x0000FFFF0000FFFF)
                    a4, a6 = swapped(a4, a6, 16, 0x0000FFFF0000FFFF)
                    a5, a7 = swapped(a5, a7, 16, 0x0000FFFF0000FFFF)
                    a0, a1 = swapped(a0, a1, 8, 0x00FF00FF00FF00FF)
                    a2, a3 = swapped(a2, a3, 8, 0x00FF00FF00FF00FF)
                    a4, a5 = swapped(a4, a5, 8, 0x00FF00FF00FF00FF)
                    a6, a7 = swapped(a6, a7, 8, 0x00FF00FF00FF00FF)
                    to, row = found + 8 * (16 * column * blocks + part), 16 * blocks
                    longs(to, 1)[0] = a0
                    longs(to + 4 * row, 1)[0] = a1
                    longs(to + row, 1)[0] = a2
                    longs(to + 5 * row, 1)[0] = a3
                    longs(to + 2 * row, 1)[0] = a4
                    longs(to + 6 * row, 1)[0] = a5
                    longs(to + 3 * row, 1)[0] = a6
                    longs(to + 7 * row, 1)[0] = a7
        return 0

    return work


def _magnitudes(tools: Tools) -> Any:
    integers, halves, floats, float_of, wide = tools.integers, tools.halves, tools.floats, tools.float_of, tools.half

    def work(matrix: int, kind: int, rows: int, columns: int, found: int) -> int:
        out = floats(found, rows)
        for row in range(rows):
            # Magnitudes are in the order of their bits.
            if kind == 0:
                whole, most = integers(matrix + 4 * row * columns, columns), np.int32(0)
                for column in range(columns):
                    most = max(most, np.int32(whole[column] & np.int32(0x7FFFFFFF)))
                out[row] = float_of(most)
            else:
                short, high = halves(matrix + 2 * row * columns, columns), np.uint16(0)
                for column in range(columns):
                    high = max(high, np.uint16(short[column] & np.uint16(0x7FFF)))
                out[row] = float_of(np.int32(np.int32(high) << np.int32(16))) if kind == 1 else wide(high)
        return 0

    return work


def _codes(tools: Tools) -> Any:
    floats, halves, octets = tools.floats, tools.halves, tools.octets
    bits, float_of, widened, half = tools.bits, tools.float_of, tools.widened, tools.half
    rounding = np.float32(12582912)  # 1.5 * 2**23: a small number added to it is rounded to the nearest integer
    zero, limit, fine, one = np.int32(0x4B400000), np.float32(2**-6), np.float32(512), np.float32(1)

    @tools.inlined
    def whole(number: Any) -> Any:
        return np.int32(bits(number + rounding) - zero)

    @tools.inlined
    def eighth(number: Any) -> Any:
        """The bits of the nearest float8_e4m3fn; magnitudes below 464."""
        raw = bits(number)
        size = np.int32(raw & np.int32(0x7FFFFFFF))
        normal = np.int32(np.int32(size + np.int32(0x7FFFF) + (size >> np.int32(20) & np.int32(1))) >> np.int32(20))
        small = whole(float_of(size) * fine)
        code = small if float_of(size) < limit else np.int32(normal - np.int32(960))
        return np.int32(code | (raw >> np.int32(24) & np.int32(0x80)))

    def work(matrix: int, kind: int, rows: int, columns: int, scales: int, is_fp8: int, found: int) -> int:
        every = floats(scales, rows)
        for row in range(rows):
            scale = every[row] if every[row] != 0 else one
            out = octets(found + row * columns, columns)
            if kind == 0:
                long = floats(matrix + 4 * row * columns, columns)
                if is_fp8:
                    for column in range(columns):
                        out[column] = np.uint8(eighth(long[column] / scale))
                else:
                    for column in range(columns):
                        out[column] = np.uint8(whole(long[column] / scale))
            else:
                short = halves(matrix + 2 * row * columns, columns)
                if kind == 1 and is_fp8:
                    for column in range(columns):
                        out[column] = np.uint8(eighth(widened(short[column]) / scale))
                elif kind == 1:
                    for column in range(columns):
                        out[column] = np.uint8(whole(widened(short[column]) / scale))
                elif is_fp8:
                    for column in range(columns):
                        out[column] = np.uint8(eighth(half(short[column]) / scale))
                else:
                    for column in range(columns):
                        out[column] = np.uint8(whole(half(short[column]) / scale))
        return 0

    return work


_BUILDS = {"from_rows": _from_rows, "from_awq": _from_awq, "magnitudes": _magnitudes, "codes": _codes}
