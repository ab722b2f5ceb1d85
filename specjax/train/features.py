"""What the target says of training rows, kept: on a CPU its forward costs more than the head's training.

Each row's values are those of one forward, with the rows of its batch in the first epoch, whenever that forward
happens: so a run that lost what it kept in memory goes on bit for bit. On disk they survive the process, in a folder
named after everything they depend on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from specjax.train.packing import Rows, batch_rows

MODES = ("none", "memory", "disk")


class FeatureError(ValueError):
    """The features cannot be kept."""


class Kept(NamedTuple):
    """A `Teacher`, on the host."""

    features: np.ndarray  # [rows, N, F]
    hidden: np.ndarray  # [rows, N, M]
    top: np.ndarray  # [rows, N]


class FeatureStore:
    """Rows' features by index, computed once.

    Args:
        teach: rows -> `Kept` of the same rows, in the dtype to compute in.
        widths: F and M.
        identity: what the values depend on besides the rows' tokens.
    """

    def __init__(
        self,
        teach: Callable[[Rows], Kept],
        rows: Rows,
        *,
        mode: str,
        folder: Path,
        widths: tuple[int, int],
        dtype: str,
        batch: int,
        seed: int,
        identity: str,
    ) -> None:
        count, length = rows.tokens.shape
        self._teach, self._rows, self._batch, self._seed = teach, rows, batch, seed
        kinds = {"features": (widths[0], _stored(dtype)), "hidden": (widths[1], _stored(dtype)), "top": (0, np.int32)}
        shapes = {name: ((count, length, *([width] if width else [])), kind) for name, (width, kind) in kinds.items()}
        self._dtype = dtype
        if mode == "memory":
            _check_memory(sum(_size(*each) for each in shapes.values()))
            self._arrays = {name: np.empty(shape, kind) for name, (shape, kind) in shapes.items()}
            self._done: np.ndarray = np.zeros(count, np.uint8)
        else:
            folder = folder / _fingerprint(rows, identity, dtype, batch, seed)
            self._arrays, self._done = _open(folder, shapes, count)
        self._group = np.full(count, -1, np.int64)  # the batch of the first epoch that a row is in
        for number in range(-(-count // batch)):
            members = batch_rows(number, count, batch, seed)
            fresh = members[self._group[members] < 0]
            self._group[fresh] = number

    @property
    def done(self) -> int:
        """Rows that are there."""
        return int(self._done.sum())

    def get(self, wanted: np.ndarray) -> Kept:
        """The features of rows, in their order."""
        for number in np.unique(self._group[wanted[self._done[wanted] == 0]]):
            members = batch_rows(int(number), len(self._group), self._batch, self._seed)
            found = self._teach(Rows(*(part[members] for part in self._rows)))
            mine = self._group[members] == number
            for name, array in self._arrays.items():
                array[members[mine]] = np.asarray(getattr(found, name)).view(array.dtype)[mine]
            for array in self._arrays.values():
                if isinstance(array, np.memmap):
                    array.flush()  # before the mark that they are there
            self._done[members[mine]] = 1
        return Kept(self._view("features")[wanted], self._view("hidden")[wanted], self._arrays["top"][wanted])

    def _view(self, name: str) -> np.ndarray:
        array = self._arrays[name]
        return array.view(ml_dtypes.bfloat16) if self._dtype == "bfloat16" else array


def _stored(dtype: str) -> type:
    """numpy keeps no bfloat16 in files: its bits."""
    return {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32}[dtype]


def _fingerprint(rows: Rows, *identity: object) -> str:
    digest = hashlib.sha256(json.dumps(identity).encode())
    for part in (rows.tokens, rows.segments):
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()[:16]


def _size(shape: tuple[int, ...], kind: type) -> int:
    return int(np.prod(shape)) * np.dtype(kind).itemsize


def _check_memory(needed: int) -> None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux: what is free is not known
        return
    if needed > free:
        raise FeatureError(
            f"--features memory needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; give --features disk, "
            "less data, or --features none"
        )


def _open(
    folder: Path, shapes: dict[str, tuple[tuple[int, ...], type]], count: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    sizes = {name: _size(*each) for name, each in shapes.items()}
    files = {name: folder / f"{name}.bin" for name in shapes}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        missing = sum(
            size - (files[name].stat().st_blocks * 512 if files[name].exists() else 0) for name, size in sizes.items()
        )
        free = shutil.disk_usage(folder).free
        if missing > free:
            raise FeatureError(
                f"--features disk needs {missing / 1e9:.1f} GB more in {folder}, where {free / 1e9:.1f} GB are free; "
                "give another --feature-folder, less data, or --features none"
            )
        for name, size in sizes.items():
            with files[name].open("ab") as stream:
                # A disk that is full later kills a process that writes to its mapped files.
                os.posix_fallocate(stream.fileno(), 0, size)
        arrays: dict[str, np.ndarray] = {
            name: np.memmap(files[name], kind, "r+", shape=shape) for name, (shape, kind) in shapes.items()
        }
        mark = folder / "done.bin"
        done = np.memmap(mark, np.uint8, "r+" if mark.exists() else "w+", shape=(count,))
    except OSError as error:
        raise FeatureError(f"--features disk cannot use {folder}: {error.strerror or error}") from None
    return arrays, done
