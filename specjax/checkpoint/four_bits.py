"""Codes of 4 bits from the words of published formats to the layout of `specjax_kernels.Quantised`, and back.

Of 32 codes of a row, byte j of 16 holds code j in its low half and code j + 16 in its high half. Words are converted a
few rows at a time, and two codes stay in a byte, which takes less time and memory than a byte for each.
"""

from __future__ import annotations

import numpy as np

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds this column of the eight
ROWS = 64  # at a time; a multiple of 8


def unpack(codes: np.ndarray, run: int = 16) -> np.ndarray:
    """Of each run of bytes the low halves, then the high ones: uint8 [out, in / 2] to [out, in], from 0 to 15. Runs of
    16 are that layout, where this is the inverse of `specjax_kernels`' `pack`."""
    halves = codes.reshape(len(codes), -1, 1, run)
    return np.concatenate([halves & 15, halves >> 4], axis=2).reshape(len(codes), -1)


def from_rows(words: np.ndarray, found: np.ndarray | None = None) -> np.ndarray:
    """Little-endian words [out, in / 8] of 32 bits, whose nibbles are codes from the low end; `in` is a multiple of 32.
    They may lie transposed, as in GPTQ's files. Written to `found`, uint8 [out, in / 2] and C-contiguous, if given."""
    from specjax_kernels.cpu import repacking

    found = np.empty((len(words), words.shape[1] * 4), np.uint8) if found is None else found
    if repacking.from_rows(words, found):
        return found
    for start in range(0, len(words), ROWS):
        block = np.ascontiguousarray(words[start : start + ROWS])
        halves = np.ascontiguousarray(block.view(np.uint64).reshape(-1, 2).T).view(np.uint8)
        even, odd = _joined(*halves)
        pairs = odd.astype(np.uint16) << 8 | even
        found[start : start + ROWS] = pairs.view(np.uint8).reshape(-1, found.shape[1])
    return found


def from_awq(words: np.ndarray, found: np.ndarray | None = None) -> np.ndarray:
    """AWQ's words [in, out / 8], of eight rows each, to codes [out, in / 2]; `in` is a multiple of 32. `found`: as for
    `from_rows`."""
    from specjax_kernels.cpu import repacking

    inside, count = words.shape
    found = np.empty((8 * count, inside // 2), np.uint8) if found is None else found
    if repacking.from_awq(words, found):
        return found
    whole, found = found, found.reshape(count, 8, -1)
    for start in range(0, count, ROWS // 8):
        part = slice(start, start + ROWS // 8)
        halves = np.ascontiguousarray(words[:, part]).view(np.uint8).reshape(inside // 32, 2, -1)
        for nibble, joined in enumerate(_joined(halves[:, 0], halves[:, 1])):
            found[part, list(AWQ_ORDER[nibble::2])] = joined.reshape(inside // 2, -1, 4).transpose(1, 2, 0)
    return whole


def rows_from_awq(words: np.ndarray, rows: slice, found: np.ndarray) -> None:
    """Those rows of `from_awq`, to `found`, uint8 [rows, in / 2]."""
    some = words[:, rows.start // 8 : -(-rows.stop // 8)]
    if rows.start % 8 or rows.stop % 8:
        found[...] = from_awq(some)[rows.start % 8 :][: len(found)]
    else:
        from_awq(some, found)


def _joined(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The even nibbles of bytes and the odd ones: those of `first` in the low halves, of `second` in the high ones."""
    return first & 15 | second << 4, first >> 4 | second & 0xF0
