"""Launch parameters of the GPU kernels: block sizes, splits, warps and pipeline stages.

A rule of thumb covers every shape. Measured entries of `launch_table.json`, one per GPU generation, dtype, head width
and number of query rows, take precedence. The number of splits is not in the table: it follows from the programs per
multiprocessor, the batch and the size of the page table.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import NamedTuple

from specjax_kernels.platforms import generation

TABLE = Path(__file__).parent / "launch_table.json"


class Generation(NamedTuple):
    multiprocessors: int  # of its largest common GPU
    shared_memory: int  # bytes that one program may have


GENERATIONS = {
    "8.0": Generation(108, 163 * 1024),  # A100
    "8.6": Generation(84, 99 * 1024),  # A10, RTX 3090
    "8.9": Generation(128, 99 * 1024),  # L40, RTX 4090
    "9.0": Generation(132, 227 * 1024),  # H100, H200
    "10.0": Generation(148, 227 * 1024),  # B200
    "12.0": Generation(170, 99 * 1024),  # RTX 5090
}
"""By compute capability."""

UNKNOWN = Generation(132, 99 * 1024)  # also for programs compiled without a GPU
MOST_SPLITS = 64  # the combine reads all partial results of a query at once
LEAST_SPLIT = 128  # committed tokens of a split, at least

# The widest heads of keys and of values whose tiles fit in registers and shared memory.
WIDEST = {"float32": (256, 256), "bfloat16": (1024, 512), "float16": (1024, 512)}

# Most bytes that a program loads ahead by the rule of thumb: two programs fit a larger multiprocessor.
IN_FLIGHT = 96 * 1024


@dataclasses.dataclass(frozen=True)
class Blocks:
    """An entry of the table. `rows` and `tokens` are powers of two, 16 or more."""

    rows: int  # query rows of one program
    tokens: int  # keys of one trip
    warps: int
    stages: int  # tiles of keys and values in flight
    programs: int  # wanted for each multiprocessor, by splitting the committed tokens


@dataclasses.dataclass(frozen=True)
class Launch(Blocks):
    """`Blocks` and the grid of one call."""

    tiles: int  # of query rows
    splits: int  # of the committed tokens


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()


def padded(width: int) -> int:
    """The width of a tile for a head: loads need powers of two, tensor cores 16 or more."""
    return max(16, power_of_two(width))


def too_wide(dtype: str, E: int, Ev: int) -> str | None:
    """The reason why heads of these widths do not fit the kernels, or None."""
    keys, values = WIDEST[dtype]
    if keys >= E and Ev <= values:
        return None
    return f"heads up to {keys} wide for keys and {values} for values in {dtype}, got E = {E}, Ev = {Ev}"


def key(dtype: str, width: int, rows: int) -> str:
    """Key of the table for a dtype, a head width and the query rows (N * G) of a key/value head, rounded to powers of
    two from 16 to 256: 'bfloat16 width 128 rows 32'."""
    return f"{dtype} width {padded(width)} rows {min(256, max(16, power_of_two(rows)))}"


def rule_of_thumb(dtype: str, width: int, rows: int, generation: str | None = None) -> Blocks:
    """Blocks for shapes that are not measured. `width`: the larger width of keys and values.

    Exact float32 products do not run on tensor cores: their tiles are in registers, which 16 rows fill. A tile of 64
    rows needs the registers of 8 warps.
    """
    wide, half = padded(width), dtype != "float32"
    if half:
        most_rows, tokens = (64, 64) if wide <= 128 else (32, 32) if wide <= 256 else (16, 16)
    else:
        most_rows, tokens = 16, 32 if wide <= 64 else 16
    tile = 2 * tokens * wide * (2 if half else 4)  # keys and values
    fit = GENERATIONS.get(generation or "", UNKNOWN).shared_memory // tile
    stages = max(1, min(fit, 4, max(2, IN_FLIGHT // tile)))  # at least two if they fit: one tile is never in flight
    block = min(most_rows, max(16, power_of_two(rows)))
    return Blocks(block, tokens, 8 if wide > 256 or block > 32 else 4, stages, programs=4)


@functools.cache
def table() -> dict[str, dict[str, Blocks]]:
    """The measured entries: generation -> `key` -> blocks."""
    return {
        generation: {name: Blocks(**blocks) for name, blocks in entries.items()}
        for generation, entries in json.loads(TABLE.read_text()).items()
    }


def launch_for(dtype: str, width: int, rows: int, heads: int, context: int) -> Launch:
    """The grid of one call, for max(E, Ev), N * G rows, B * K heads and T * S tokens of context."""
    device = generation()
    blocks = table().get(device or "", {}).get(key(dtype, width, rows)) or rule_of_thumb(dtype, width, rows, device)
    tiles = math.ceil(rows / blocks.rows)
    wanted = blocks.programs * GENERATIONS.get(device or "", UNKNOWN).multiprocessors
    most = min(MOST_SPLITS, math.ceil(context / LEAST_SPLIT), max(1, wanted // (heads * tiles)))
    splits = 1 << most.bit_length() - 1  # a power of two, rounded down
    return Launch(**vars(blocks), tiles=tiles, splits=splits)
