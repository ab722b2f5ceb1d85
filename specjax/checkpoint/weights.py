"""Tensors in safetensors files: what there is, one tensor at a time, and writing.

The safetensors library checks and writes the files. It copies what it reads and has no numpy type for FP8, so tensors
are handed out as views of the memory-mapped file here: what is resident is what the caller copies out of them.
bfloat16 comes as ``ml_dtypes.bfloat16``. Knows nothing of models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeVar

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specjax.checkpoint.errors import CheckpointError, listed

T = TypeVar("T")

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

DTYPES = {"F32": np.dtype("f4"), "F16": np.dtype("f2"), "BF16": np.dtype(ml_dtypes.bfloat16), "F64": np.dtype("f8")}
# Never parameters: token ids and masks beside the weights of a draft head.
INTEGERS = {f"{kind}{8 * size}": np.dtype(f"{kind.lower()}{size}") for kind in "IU" for size in (8, 4, 2, 1)}
INTEGERS["BOOL"] = np.dtype("?")


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: in ``file`` from byte ``start`` on."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    def read(self, *, integers: bool = False) -> np.ndarray:
        """The tensor as a read-only view of the file, of a type in ``DTYPES`` (or ``INTEGERS``, if ``integers``)."""
        dtypes = DTYPES | INTEGERS if integers else DTYPES
        if self.dtype not in dtypes:
            quantised = "" if integers else " (quantised checkpoints are not supported)"
            raise CheckpointError(
                f"tensor {self.name} in {self.file} has type {self.dtype}; supported: {listed(dtypes)}{quantised}"
            )
        try:
            if 0 in self.shape:  # which cannot be mapped
                return np.empty(self.shape, dtypes[self.dtype])
            # One mapping per tensor: its pages can be reclaimed as soon as the caller has copied them.
            return np.memmap(self.file, dtypes[self.dtype], "r", self.start, self.shape)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"tensor {self.name} in {self.file}, of shape {self.shape!r:.80}, cannot be read ({error})"
            ) from error


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file, whose header the library has checked against the file's size."""
    try:
        with safe_open(file, framework="numpy"), file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length).decode(), object_pairs_hook=_unique)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} is not a readable safetensors file, or a truncated one ({error}); download or copy it again"
        ) from error
    header.pop("__metadata__", None)
    return {
        name: TensorEntry(name, file, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The library takes the last of two equal names."""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("its header has a name twice")
    return found


def read_headers(files: Iterable[Path]) -> dict[str, TensorEntry]:
    """``read_shards`` with ``read_header``."""
    return read_shards(files, read_header)


def read_shards(files: Iterable[Path], read: Callable[[Path], Mapping[str, T]]) -> dict[str, T]:
    """What ``read`` finds in all shards of a checkpoint, by tensor; none may be in two of them."""
    tensors: dict[str, T] = {}
    for file in files:
        found = read(file)
        if twice := found.keys() & tensors.keys():
            raise CheckpointError(f"tensors {listed(twice)} are in {file} and in another shard; keep one of the two")
        tensors |= found
    return tensors


def same_content(first: np.ndarray, second: np.ndarray, rtol: float = 0, atol: float = 0) -> bool:
    """Whether two matrices of floats are equal within ``np.allclose``'s tolerances, compared a few rows at a time."""
    blocks = (slice(start, start + 4096) for start in range(0, len(first), 4096))
    return first.shape == second.shape and all(
        np.allclose(np.float32(first[rows]), np.float32(second[rows]), rtol, atol) for rows in blocks
    )


def save_tensors(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a safetensors file that transformers accepts; ``OSError`` if that fails."""
    whole = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    try:
        save_file(whole, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{file}: {error}") from error
    file.chmod(0o644)  # the library gives no one else access


def save_shards(folder: Path, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], np.ndarray]) -> None:
    """Write float32 tensors of ``shapes`` as model.safetensors, or as several files of about 1 GiB and their index.

    ``read`` gives a tensor by its name; those of one file are held in memory at once.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    plan = split_state_dict_into_shards_factory(
        dict(shapes),
        get_storage_size=lambda shape: 4 * prod(shape),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=1 << 30,
    )
    for file, names in plan.filename_to_tensors.items():
        save_tensors(folder / file, {name: np.asarray(read(name), np.float32) for name in names})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
