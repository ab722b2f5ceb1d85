"""Tensors in safetensors files: what there is, one tensor at a time, and writing.

The safetensors library checks and writes the files. It copies what it reads and has no numpy type for FP8, so tensors
are handed out as views of the memory-mapped file here: what is resident is what the caller copies out of them.
bfloat16 comes as ``ml_dtypes.bfloat16``. Knows nothing of models.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specjax.checkpoint.errors import CheckpointError, listed

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
}
# Never parameters: token ids and masks beside the weights of a draft head.
INTEGERS: dict[str, np.dtype] = {
    **{f"I{bits}": np.dtype(f"i{bits // 8}") for bits in (64, 32, 16, 8)},
    **{f"U{bits}": np.dtype(f"u{bits // 8}") for bits in (64, 32, 16, 8)},
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: ``stop - start`` bytes of ``file`` from byte ``start``."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def read(self, *, integers: bool = False) -> np.ndarray:
        """The tensor as a read-only view of the file.

        Args:
          integers: allow integers and bools too.

        Raises:
          CheckpointError: the file stores it in another type than ``DTYPES`` (and ``INTEGERS``, if allowed) has, or in
            a shape that numpy cannot have.
        """
        dtypes = DTYPES | INTEGERS if integers else DTYPES
        if self.dtype not in dtypes:
            quantised = "" if integers else " (quantised checkpoints are not supported)"
            raise CheckpointError(
                f"tensor {self.name} in {self.file} has type {self.dtype}; supported: {listed(dtypes)}{quantised}"
            )
        try:
            if self.start == self.stop:  # which cannot be mapped
                return np.empty(self.shape, dtypes[self.dtype])
            # One mapping per tensor: its pages can be reclaimed as soon as the caller has copied them.
            return np.memmap(self.file, dtypes[self.dtype], "r", self.start, self.shape)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"tensor {self.name} in {self.file}, of shape {self.shape!r:.80}, cannot be read ({error})"
            ) from error


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file, whose header the library has checked against the file's size.

    Raises:
      CheckpointError: not a safetensors file, a damaged or a truncated one.
    """
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
        name: TensorEntry(name, file, entry["dtype"], tuple(entry["shape"]), *(8 + length + n for n in offsets))
        for name, entry in header.items()
        if (offsets := entry["data_offsets"])
    }


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The library takes the last of two equal names."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"its header has {Counter(name for name, _ in pairs).most_common(1)[0][0]!r:.60} twice")
    return found


def read_headers(files: Iterable[Path]) -> dict[str, TensorEntry]:
    """The tensors of all shards of a checkpoint.

    Raises:
      CheckpointError: as ``read_header``, and for a tensor that two shards hold.
    """
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        found = read_header(file)
        for name in found.keys() & tensors.keys():
            raise CheckpointError(
                f"tensor {name} is in both {tensors[name].file} and {file}; keep one of the two files"
            )
        tensors |= found
    return tensors


def same_content(first: TensorEntry, second: TensorEntry, rows: int = 4096) -> bool:
    """Whether two tensors are equal, compared a few rows at a time."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    a, b = first.read(), second.read()
    return all(np.array_equal(a[i : i + rows], b[i : i + rows]) for i in range(0, len(a), rows))


def save_tensors(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a safetensors file that transformers accepts.

    Raises:
      OSError: it cannot be written.
    """
    whole = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    try:
        save_file(whole, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{file}: {error}") from error
    file.chmod(0o644)  # the library gives no one else access


def save_shards(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    max_bytes: int = 1 << 30,
) -> None:
    """Write float32 tensors as model.safetensors, or as several files and their index.

    Args:
      folder: exists.
      shapes: name -> shape.
      read: gives a tensor by its name; those of one file are held at once.
      max_bytes: of one file, unless a single tensor is larger.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    plan = split_state_dict_into_shards_factory(
        dict(shapes),
        get_storage_size=lambda shape: 4 * prod(shape),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_bytes,
    )
    for file, names in plan.filename_to_tensors.items():
        save_tensors(folder / file, {name: np.asarray(read(name), np.float32) for name in names})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
