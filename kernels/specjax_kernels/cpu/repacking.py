"""Host functions for loading: codes of 4 bits from published words to `Quantised`'s layout, and 8-bit quantisation.

They work on numpy arrays for any device, and equal `specjax.checkpoint.quantised` and `specjax_kernels.quantise`
bit for bit. Every function returns False and writes nothing if it is not compiled: loading does not block on a
compiler. `prepare` compiles them for later processes.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from specjax_kernels.cpu.runtime import Tools, host_function, is_missed

_KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}


def prepare(*, every: bool = False) -> None:
    """Compiles the functions that this process needed; `every`: all of them."""
    missed = {name for name in _BUILDS if every or is_missed(f"specjax_repacking_{name}")}
    if "magnitudes" in missed:
        missed.add("codes")  # it is called next
    for name in sorted(missed):
        host_function(f"specjax_repacking_{name}", _BUILDS[name], compile=True)


def from_rows(words: np.ndarray, out: np.ndarray) -> bool:
    """`pack_rows` of int32 [out, in / 8], of any strides, to C-contiguous uint8 [out, in / 2]."""
    return _call("from_rows", words, *words.strides, len(out), out.shape[1] // 16, out)


def from_awq(words: np.ndarray, out: np.ndarray) -> bool:
    """`pack_awq` of int32 [in, out / 8], of any row stride, to C-contiguous uint8 [out, in / 2]."""
    return _call("from_awq", words, words.strides[0], words.shape[1], len(words) // 32, out)


def magnitudes(matrix: np.ndarray, out: np.ndarray) -> bool:
    """The largest magnitude of each row of a C-contiguous float matrix, to float32 [rows]. Rows with infinity or NaN
    have a magnitude that is not finite."""
    kind = _KINDS.get(matrix.dtype.name)
    return kind is not None and _call("magnitudes", matrix, kind, *matrix.shape, out)


def codes(matrix: np.ndarray, scale: np.ndarray, out: np.ndarray) -> bool:
    """`quantise`'s codes of a C-contiguous float matrix with finite scales, float32 [rows], to C-contiguous int8 or
    float8_e4m3fn."""
    kind = _KINDS.get(matrix.dtype.name)
    is_fp8 = int(out.dtype.name == "float8_e4m3fn")
    return kind is not None and _call("codes", matrix, kind, *matrix.shape, scale, is_fp8, out)


def _call(name: str, *arguments: Any) -> bool:
    function = host_function(f"specjax_repacking_{name}", _BUILDS[name])
    if function is None:
        return False
    values = (value.ctypes.data if isinstance(value, np.ndarray) else value for value in arguments)
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

    # Numba would check other indices than 0 for negative values.
    def work(words: int, across: int, along: int, rows: int, blocks: int, to: int) -> int:
        for first in range(0, rows, 16):  # 16 words of transposed rows are a line of the cache
            for block in range(blocks):
                for row in range(first, min(first + 16, rows)):
                    word, out = words + row * across + 4 * block * along, longs(to + 16 * (row * blocks + block))
                    one, two = integers(word)[0], integers(word + along)[0]
                    three, four = integers(word + 2 * along)[0], integers(word + 3 * along)[0]
                    out[0], out[1] = spread(one) | spread(three) << 4, spread(two) | spread(four) << 4
        return 0

    return work


def _from_awq(tools: Tools) -> Any:
    integers = tools.integers

    @tools.inlined
    def joined(first: Any, second: Any) -> Any:
        """A byte for each of rows 0, 4, 1, 5, 2, 6, 3, 7: the code of `first` low, that of `second` high."""
        low, high = np.int64(first) & 0xFFFFFFFF, np.int64(second) & 0xFFFFFFFF
        even = low & 0x0F0F0F0F | (high & 0x0F0F0F0F) << 4
        odd = low >> 4 & 0x0F0F0F0F | high & 0xF0F0F0F0
        return even | odd << 32

    @tools.inlined
    def swapped(first: int, second: int, shift: int, mask: int) -> Any:
        """Transposes 2 x 2 squares of `shift` bits."""
        return first & mask | (second & mask) << shift, first >> shift & mask | second & ~mask

    @tools.inlined
    def pair(word: int, along: int) -> Any:
        return joined(integers(word)[0], integers(word + 16 * along)[0])

    # Generated, because Numba has no arrays in registers.
    lines = ["def transpose(word, along, out, row):"]
    lines += [f"    a{i} = pair(word + {i} * along, along)" for i in range(8)]
    for step, mask in ((4, 0x00000000FFFFFFFF), (2, 0x0000FFFF0000FFFF), (1, 0x00FF00FF00FF00FF)):
        firsts = [i for i in range(8) if not i & step]
        lines += [f"    a{i}, a{i + step} = swapped(a{i}, a{i + step}, {8 * step}, {mask})" for i in firsts]
    lines += [f"    longs(out + {i // 2 + 4 * (i % 2)} * row)[0] = a{i}" for i in range(8)]
    scope = {"pair": pair, "swapped": swapped, "longs": tools.longs}
    exec("\n".join(lines), scope)
    transpose = tools.inlined(scope["transpose"])

    def work(words: int, along: int, count: int, blocks: int, out: int) -> int:
        for first in range(0, count, 16):
            for part in range(2 * blocks):
                for column in range(first, min(first + 16, count)):
                    word = words + (part // 2 * 32 + part % 2 * 8) * along + 4 * column
                    transpose(word, along, out + 8 * (16 * column * blocks + part), 16 * blocks)
        return 0

    return work


def _magnitudes(tools: Tools) -> Any:
    integers, halves, floats, float_of, wide = tools.integers, tools.halves, tools.floats, tools.float_of, tools.half

    def work(matrix: int, kind: int, rows: int, columns: int, to: int) -> int:
        out = floats(to)
        for row in range(rows):
            # Magnitudes are in the order of their bits.
            if kind == 0:
                whole, most = integers(matrix + 4 * row * columns), np.int32(0)
                for column in range(columns):
                    most = max(most, np.int32(whole[column] & np.int32(0x7FFFFFFF)))
                out[row] = float_of(most)
            else:
                short, high = halves(matrix + 2 * row * columns), np.uint16(0)
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

    def work(matrix: int, kind: int, rows: int, columns: int, scales: int, is_fp8: int, to: int) -> int:
        every = floats(scales)
        for row in range(rows):
            scale = every[row] if every[row] != 0 else one
            out = octets(to + row * columns)
            if kind == 0:
                long = floats(matrix + 4 * row * columns)
                if is_fp8:
                    for column in range(columns):
                        out[column] = np.uint8(eighth(long[column] / scale))
                else:
                    for column in range(columns):
                        out[column] = np.uint8(whole(long[column] / scale))
            else:
                short = halves(matrix + 2 * row * columns)
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
