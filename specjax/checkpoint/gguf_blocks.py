"""The quantised types of GGUF files, block by block: the bytes of a row of blocks as a `Stored` matrix.

A block holds 32 or 256 weights of a row. Where a type has 4 bits, byte j of 16 or 32 holds one weight in each half. All
scales and minimums keep the numbers that the file has, in two levels where it has two (the K types), so nothing is
rounded. Source: ggml's `ggml-common.h` and `ggml-quants.c`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from specjax.checkpoint.four_bits import unpack
from specjax.checkpoint.stored import Rows, Stored, by_rows

HALF = np.dtype("<f2")


class Kind(NamedTuple):
    weights: int  # of a block
    size: int  # bytes of a block
    read: Callable[[np.ndarray], Stored]  # [rows, blocks, size] -> the matrix
    by_parts: bool = True  # whether `read` calculates, so that its temporary arrays should be small


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at a byte of each block, a view [rows, blocks]."""
    return blocks[..., at : at + 2].view(HALF)[..., 0]


def _from(blocks: np.ndarray, at: int, dtype: type = np.uint8) -> Rows:
    """The bytes of each block from there on, [rows, bytes], copied as one element a block."""
    size = blocks.shape[-1] - at
    elements = blocks[..., at:].view(np.dtype((np.void, size)))[..., 0]

    def write(rows: slice, found: np.ndarray) -> None:
        found.view(elements.dtype)[...] = elements[rows]

    return Rows((len(blocks), elements.shape[1] * size), np.dtype(dtype), write)


def _nibbles(blocks: np.ndarray) -> np.ndarray:
    """The codes of 256 weights in the last 128 bytes: each 32 bytes hold 32 weights in their low halves and the next 32
    in their high ones."""
    runs = _from(blocks, blocks.shape[-1] - 128).whole().view("V16")
    first, second = (runs[:, i::2].copy().view(np.uint8) for i in (0, 1))
    runs[:, ::2], runs[:, 1::2] = (first & 15 | second << 4).view("V16"), (first >> 4 | second & 0xF0).view("V16")
    return runs.view(np.uint8)


def _q4_0(blocks: np.ndarray) -> Stored:
    return Stored(_from(blocks, 2), scale := _half(blocks, 0), 4, zero=np.full(scale.shape, 8, np.int8))


def _q4_1(blocks: np.ndarray) -> Stored:
    return Stored(_from(blocks, 4), _half(blocks, 0), 4, offset=_half(blocks, 2))


def _fifth(blocks: np.ndarray, at: int) -> np.ndarray:
    """The fifth bit of 32 weights, from 4 bytes; uint8 [rows, weights], 0 or 16."""
    bits = np.unpackbits(np.ascontiguousarray(blocks[..., at : at + 4]), axis=-1, bitorder="little")
    return (bits << 4).reshape(len(blocks), -1)


def _q5_0(blocks: np.ndarray) -> Stored:
    codes = unpack(_from(blocks, 6).whole()) | _fifth(blocks, 2)
    return Stored((codes.astype(np.int8) - 16).astype(np.int8), _half(blocks, 0))


def _q5_1(blocks: np.ndarray) -> Stored:
    codes = unpack(_from(blocks, 8).whole()) | _fifth(blocks, 4)
    return Stored(codes.astype(np.int8), _half(blocks, 0), offset=_half(blocks, 2))


def _q8_0(blocks: np.ndarray) -> Stored:
    return Stored(_from(blocks, 2, np.int8), _half(blocks, 0))


def _six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight minimums of 6 bits in 12 bytes; uint8 [rows, 8 * blocks] each."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    least = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    return scale.reshape(len(packed), -1), least.reshape(len(packed), -1)


def _q4_k(blocks: np.ndarray) -> Stored:
    scale, least = _six_bits(blocks[..., 4:16])
    return Stored(_nibbles(blocks), scale, 4, None, least, _half(blocks, 0), -_half(blocks, 2))


def _q5_k(blocks: np.ndarray) -> Stored:
    scale, least = _six_bits(blocks[..., 4:16])
    codes = unpack(_from(blocks, 48).whole(), 32)
    # Bit i of byte j belongs to weight j of the i-th run of 32.
    fifth = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = codes | (fifth << 4).reshape(len(blocks), -1)
    return Stored(codes.astype(np.int8), scale, 8, None, least, _half(blocks, 0), -_half(blocks, 2))


def _q6_k(blocks: np.ndarray) -> Stored:
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 2, 32)  # halves of 128 weights, each two runs of 32 bytes
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    four = np.concatenate([low & 15, low >> 4], axis=3)
    two = high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    codes = (four | two << 4).reshape(len(blocks), -1)
    scale = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).reshape(len(blocks), -1)
    return Stored((codes.astype(np.int8) - 32).astype(np.int8), scale, super_scale=_half(blocks, 208))


KINDS: dict[str, Kind] = {
    "Q4_0": Kind(32, 18, _q4_0, by_parts=False),
    "Q4_1": Kind(32, 20, _q4_1, by_parts=False),
    "Q5_0": Kind(32, 22, _q5_0),
    "Q5_1": Kind(32, 24, _q5_1),
    "Q8_0": Kind(32, 34, _q8_0, by_parts=False),
    "Q4_K": Kind(256, 144, _q4_k),
    "Q5_K": Kind(256, 176, _q5_k),
    "Q6_K": Kind(256, 210, _q6_k),
}


def read(kind: str, rows: Any) -> Stored:
    """The matrix whose rows of blocks are `rows`, uint8 [rows, bytes]."""
    known = KINDS[kind]
    blocks = np.asarray(rows).reshape(len(rows), -1, known.size)
    return (
        by_rows(len(rows), blocks[0].nbytes, lambda part: known.read(blocks[part]))
        if known.by_parts
        else known.read(blocks)
    )
