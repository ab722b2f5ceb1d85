"""Which operations of a step on an NVIDIA GPU run as kernels of ours, where XLA has its own: a table by measurement.

`choice_table.json` has, for each compute capability, two kinds of entries. Products (`pallas_few_rows.py`), by dtype,
weight and rows, rounded up to a power of two:

    "bfloat16 4096 x 6144 rows 8": {"columns": 32, "depth": 128, "warps": 4, "stages": 5}    a kernel with these blocks
    "bfloat16 4096 x 2 x 14336 rows 8": "xla"                                                [M, 2, I]: gate and up

and `"pages": "pallas"`, one kernel that writes the pages of all layers (`pallas_pages.py`). What the table lacks is
XLA's. Only a device can tell which is faster, so the table is empty until one has measured. Entries that this process
has measured on its device, or read (`use`), go before the table's.

A product's implementation must depend on nothing but the device, the dtype, the weight's shape and the number of rows:
then plain decoding and a tree of as many rows compute the same numbers, and near-ties fall alike.

The environment variable SPECJAX_GPU_KERNELS overrides the table: "pallas" takes every kernel that there is, with blocks
by rule of thumb (on a CPU, Pallas interprets them: for tests), "xla" takes none.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax

from specjax_kernels import launch, mesh

TABLE = Path(__file__).parent / "choice_table.json"
VARIABLE = "SPECJAX_GPU_KERNELS"
MOST_ROWS = 64  # of a product; more are bound by arithmetic, which is XLA's business

Name: TypeAlias = Literal["xla", "pallas"]


@dataclasses.dataclass(frozen=True)
class ProductBlocks:
    """Launch parameters of `pallas_few_rows.multiply`."""

    columns: int  # outputs of one program: a power of two, 16 or more
    depth: int  # inputs of one trip: a power of two, 16 or more
    warps: int
    stages: int  # trips whose weights are in flight


def key(dtype: str, shape: tuple[int, ...], rows: int) -> str:
    """The table's name of a product with a weight [M, W] or [M, 2, W].

    >>> key("bfloat16", (4096, 6144), 5)
    'bfloat16 4096 x 6144 rows 8'
    """
    return f"{dtype} {' x '.join(map(str, shape))} rows {launch.power_of_two(rows)}"


def rule_of_thumb(dtype: str, shape: tuple[int, ...], rows: int, generation: str | None = None) -> ProductBlocks:
    """For products that are not measured. All stages fit the shared memory, beside those of a second program where it
    is large."""
    size, gates = (4 if dtype == "float32" else 2), len(shape) - 1
    if size == 4:
        columns, depth, most = 32, 32, 4  # exact products, not on tensor cores, fill registers
    elif gates == 2:
        columns, depth, most = 64, 64, 4
    else:
        columns, depth, most = 32, 128, 5
    while depth > 16 and shape[0] % depth and shape[0] % (depth // 2) == 0:
        depth //= 2  # without a mask in the loop
    tile = min(launch.padded(rows), 64 if size == 2 else 16)
    stage = depth * (tile + gates * columns) * size
    available = launch.GENERATIONS.get(generation or "", launch.UNKNOWN).shared_memory
    return ProductBlocks(columns, depth, 4, max(1, min(most, available // stage)))


_measured: dict[str, ProductBlocks | Name] = {}


def use(entries: Mapping[str, ProductBlocks | Name]) -> None:
    """Sets the entries, by `key` or "pages", that this process takes before the table's, in place of those set before.
    They are of JAX's default device. Before anything is traced: what has been traced keeps what it had."""
    global _measured
    if dict(entries) != _measured:
        _measured = dict(entries)
        jax.clear_caches()  # of traces


def in_use() -> dict[str, ProductBlocks | Name]:
    """The entries that `use` has set."""
    return dict(_measured)


def digest() -> str:
    """A name of all entries that `use` and `launch.use` have set; empty: none."""
    found = sorted(map(repr, [*_measured.items(), *launch.in_use().items()]))
    return hashlib.sha256("\n".join(found).encode()).hexdigest() if found else ""


@functools.cache
def table() -> dict[str, dict[str, ProductBlocks | Name]]:
    """The measured entries: compute capability -> name -> blocks or the implementation; empty without a file.
    ValueError: names a wrong entry."""
    if not TABLE.exists():
        return {}
    return {
        generation: {name: entry(f"{TABLE}: {generation}: {name}", name, value) for name, value in entries.items()}
        for generation, entries in json.loads(TABLE.read_text()).items()
    }


def entry(where: str, name: str, value: Any) -> ProductBlocks | Name:
    """The entry of a name as JSON holds it. ValueError: says what is wrong, and `where` it is."""
    if value == "xla" or (name == "pages" and value == "pallas"):
        return value
    if name == "pages":
        raise ValueError(f'{where} must be "xla" or "pallas", got {value!r}')
    return launch.blocks_of(ProductBlocks, where, value, {"columns": 16, "depth": 16, "warps": 1})


def write_table(generation: str, entries: dict[str, ProductBlocks | Name], file: Path = TABLE) -> None:
    """Adds or replaces entries of one compute capability, and keeps the others."""
    launch.write_entries(generation, {name: plain(value) for name, value in entries.items()}, file)
    table.cache_clear()


def plain(value: ProductBlocks | Name) -> Any:
    """An entry as JSON holds it."""
    return value if isinstance(value, str) else dataclasses.asdict(value)


def forced() -> Name | None:
    """What `VARIABLE` says, None: nothing. ValueError: it says something else than a `Name`."""
    name = os.environ.get(VARIABLE) or None
    if name not in (None, "xla", "pallas"):
        raise ValueError(f"the environment variable {VARIABLE} is xla, pallas, or not set; got {name!r}")
    return name


def product_blocks(dtype: str, shape: tuple[int, ...], rows: int) -> ProductBlocks | None:
    """Blocks of the product's kernel; None: XLA multiplies. `shape`: of the weight, [M, W] or [M, 2, W]."""
    name, device = forced(), launch.generation()
    if name == "xla" or not 0 < rows <= MOST_ROWS or 0 in shape:
        return None
    found = _found(key(dtype, shape, rows))
    if isinstance(found, ProductBlocks):
        return found
    return rule_of_thumb(dtype, shape, rows, device) if name == "pallas" else None


def pages_in_one_kernel() -> bool:
    """Whether one kernel writes the pages of all layers."""
    return mesh.devices() == 1 and (forced() or _found("pages")) == "pallas"


def _found(name: str) -> ProductBlocks | Name | None:
    return _measured.get(name) or table().get(launch.generation() or "", {}).get(name)
