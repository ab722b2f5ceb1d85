"""Launch parameters of the GPU kernels: block sizes, splits, warps and pipeline stages.

A rule of thumb covers every shape; measured entries of `launch_table.json`, one per GPU generation, dtype, head width
and number of query rows, go first. The number of splits is not in the table: it follows from the programs per
multiprocessor, the batch and the size of the page table.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax

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

# Bytes of tiles that a program loads ahead by the rule of thumb, so that two programs fit a larger multiprocessor.
IN_FLIGHT = 96 * 1024


@dataclasses.dataclass(frozen=True)
class Blocks:
    """What the table holds."""

    rows: int  # query rows of one program: a power of two, 16 or more
    tokens: int  # keys of one trip: a power of two, 16 or more
    warps: int
    stages: int  # tiles of keys and values in flight
    programs: int  # wanted for each multiprocessor, by splitting the committed tokens


@dataclasses.dataclass(frozen=True)
class Launch(Blocks):
    """`Blocks`, and the grid they make for one call."""

    tiles: int  # of query rows
    splits: int  # of the committed tokens


def power_of_two(number: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << max(0, number - 1).bit_length()


def padded(width: int) -> int:
    """The width of a tile that holds a head: loads take powers of two, tensor cores 16 or more."""
    return max(16, power_of_two(width))


def too_wide(dtype: str, E: int, Ev: int) -> str | None:
    """Why heads do not fit the kernels; None: they do."""
    keys, values = WIDEST[dtype]
    if keys >= E and Ev <= values:
        return None
    return f"heads up to {keys} wide for keys and {values} for values in {dtype}, got E = {E}, Ev = {Ev}"


def key(dtype: str, width: int, rows: int) -> str:
    """The table's name for a dtype, a head width and the query rows (N * G) of a key/value head, rounded to powers of
    two from 16 to 256.

    >>> key("bfloat16", 128, 8 * 4)
    'bfloat16 width 128 rows 32'
    """
    return f"{dtype} width {padded(width)} rows {min(256, max(16, power_of_two(rows)))}"


def rule_of_thumb(dtype: str, width: int, rows: int, generation: str | None = None) -> Blocks:
    """For shapes that are not measured. `width`: of keys or values, the larger one.

    Tiles of exact float32 products, which do not run on tensor cores, live in registers, and 16 rows fill those. A tile
    of 64 rows needs the registers of 8 warps.
    """
    wide, half = padded(width), dtype != "float32"
    if half:
        most_rows, tokens = (64, 64) if wide <= 128 else (32, 32) if wide <= 256 else (16, 16)
    else:
        most_rows, tokens = 16, 32 if wide <= 64 else 16
    tile = 2 * tokens * wide * (2 if half else 4)  # keys and values
    fit = GENERATIONS.get(generation or "", UNKNOWN).shared_memory // tile
    stages = max(1, min(fit, 4, max(2, IN_FLIGHT // tile)))  # one tile in flight is none: two, where they fit
    block = min(most_rows, max(16, power_of_two(rows)))
    return Blocks(block, tokens, 8 if wide > 256 or block > 32 else 4, stages, programs=4)


@functools.cache
def table() -> dict[str, dict[str, Blocks]]:
    """The measured entries: generation -> `key` -> blocks; empty without a file. ValueError: names a wrong entry."""
    if not TABLE.exists():
        return {}
    return {
        generation: {name: entry(f"{TABLE}: {generation}: {name}", value) for name, value in entries.items()}
        for generation, entries in json.loads(TABLE.read_text()).items()
    }


def entry(where: str, value: Any) -> Blocks:
    """An entry as JSON holds it. ValueError: names what is wrong, and `where` it is."""
    names = [field.name for field in dataclasses.fields(Blocks)]
    powers = {"rows": 16, "tokens": 16, "warps": 1}  # fields that are powers of two, and their least values
    if not isinstance(value, dict) or set(value) != set(names) or not all(isinstance(x, int) for x in value.values()):
        raise ValueError(f"{where} must give the whole numbers {', '.join(names)}, got {value}")
    for name, number in value.items():
        if number < powers.get(name, 1):
            raise ValueError(f"{where}: {name} must be at least {powers.get(name, 1)}, got {number}")
        if name in powers and number != power_of_two(number):
            raise ValueError(f"{where}: {name} must be a power of two, got {number}")
    return Blocks(**value)


def on_nvidia() -> bool:
    """Whether JAX's default device is an NVIDIA GPU. AMD's have the same backend, "gpu"."""
    return jax.default_backend() == "gpu" and "cuda" in jax.devices()[0].client.platform_version.lower()


def generation() -> str | None:
    """The compute capability of JAX's default device ("9.0": Hopper), None: it is no NVIDIA GPU."""
    return str(jax.devices()[0].compute_capability) if on_nvidia() else None


def has_kernels() -> bool:
    """Whether Triton compiles for JAX's default device: an NVIDIA GPU, Ampere (8.0) or newer."""
    capability = generation()
    return capability is not None and int(capability.partition(".")[0]) >= 8


def refuse_unless_ampere(implementation: str) -> None:
    """Raises NotImplementedError on a device that Triton does not compile for."""
    if not has_kernels():
        device = f"{jax.devices()[0]}" + (f" of compute capability {found}" if (found := generation()) else "")
        raise NotImplementedError(
            f"implementation {implementation!r} of tree_attention runs on NVIDIA GPUs of compute capability 8.0 "
            f"(Ampere) and up, and JAX's default device is {device}. Implementation 'xla' runs everywhere"
        )


def launch_for(dtype: str, width: int, rows: int, heads: int, context: int, *, blocks: Blocks | None = None) -> Launch:
    """The grid of one call, for max(E, Ev), N * G rows, B * K heads and T * S tokens of context. `blocks`: in
    place of the table and the rule of thumb."""
    device = generation()
    if blocks is None:
        name = key(dtype, width, rows)
        blocks = table().get(device or "", {}).get(name) or rule_of_thumb(dtype, width, rows, device)
    tiles = math.ceil(rows / blocks.rows)
    wanted = blocks.programs * GENERATIONS.get(device or "", UNKNOWN).multiprocessors
    most = min(MOST_SPLITS, math.ceil(context / LEAST_SPLIT), max(1, wanted // (heads * tiles)))
    splits = 1 << most.bit_length() - 1  # a power of two, rounded down
    return Launch(**vars(blocks), tiles=tiles, splits=splits)
