"""Target features of training rows, computed once: on a CPU the target's forward costs more than training the head.

A row's values come from the forward over its batch of the first epoch, whenever that forward runs, so a resumed run
that lost the features in memory continues bit for bit. On disk the features survive the process, in a folder named
after everything they depend on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from specjax.train.memory import available_memory
from specjax.train.packing import Rows, batch_rows

MODES = ("none", "memory", "disk")

Shapes = dict[str, tuple[tuple[int, ...], type]]
"""Shape and stored type of each array."""


class FeatureError(ValueError):
    """The features cannot be stored."""


class Kept(NamedTuple):
    """A `Teacher` on the host."""

    features: np.ndarray  # [rows, N, F]
    hidden: np.ndarray  # [rows, N, M]
    top: np.ndarray  # [rows, N]


class FeatureStore:
    """Features of rows by index.

    Args:
        teach: rows -> `Kept` of these rows, in `dtype`.
        mode: memory or disk.
        folder: parent of the folder on disk.
        widths: F and M.
        batch, seed: of the run, see `batch_rows`.
        identity: names everything else that the values depend on, except the rows.

    Raises:
        FeatureError: too little memory or disk space.
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
        self._teach, self._rows, self._batch, self._seed, self._dtype = teach, rows, batch, seed, dtype
        stored = np.uint16 if dtype == "bfloat16" else np.dtype(dtype).type  # numpy stores bfloat16 as its bits
        shapes: Shapes = {
            "features": ((count, length, widths[0]), stored),
            "hidden": ((count, length, widths[1]), stored),
            "top": ((count, length), np.int32),
        }
        self._done: np.ndarray = np.zeros(count, np.uint8)
        if mode == "memory":
            self._arrays = _allocate(shapes)
        else:
            self._arrays, self._done = _open(folder / _fingerprint(rows, identity, dtype, batch, seed), shapes, count)
        self._group = np.full(count, -1, np.int64)  # each row's batch in the first epoch
        for number in range(-(-count // batch)):
            members = batch_rows(number, count, batch, seed)
            fresh = members[self._group[members] < 0]
            self._group[fresh] = number

    @property
    def done(self) -> int:
        """Rows computed so far."""
        return int(self._done.sum())

    def get(self, wanted: np.ndarray) -> Kept:
        """The features of the rows `wanted`, in this order."""
        for number in np.unique(self._group[wanted[self._done[wanted] == 0]]):
            members = batch_rows(int(number), len(self._group), self._batch, self._seed)
            found = self._teach(Rows(*(part[members] for part in self._rows)))
            mine = self._group[members] == number
            for name, array in self._arrays.items():
                array[members[mine]] = np.asarray(getattr(found, name)).view(array.dtype)[mine]
            for array in self._arrays.values():
                if isinstance(array, np.memmap):
                    array.flush()  # before the rows are marked as done
            self._done[members[mine]] = 1
        return Kept(self._view("features")[wanted], self._view("hidden")[wanted], self._arrays["top"][wanted])

    def _view(self, name: str) -> np.ndarray:
        array = self._arrays[name]
        return array.view(ml_dtypes.bfloat16) if self._dtype == "bfloat16" else array


def _fingerprint(rows: Rows, *identity: object) -> str:
    digest = hashlib.sha256(json.dumps(identity).encode())
    for part in (rows.tokens, rows.segments):
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()[:16]


def _allocate(shapes: Shapes) -> dict[str, np.ndarray]:
    """Arrays in memory."""
    needed, free = sum(_sizes(shapes).values()), available_memory()
    if free is not None and needed > free:
        raise FeatureError(
            f"--features memory needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; give --features disk, "
            "less data, or --features none"
        )
    return {name: np.empty(shape, kind) for name, (shape, kind) in shapes.items()}


def _sizes(shapes: Shapes) -> dict[str, int]:
    return {name: prod(shape) * np.dtype(kind).itemsize for name, (shape, kind) in shapes.items()}


def _open(folder: Path, shapes: Shapes, count: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Arrays in mapped files, and which rows they already hold."""
    files, sizes = {name: folder / f"{name}.bin" for name in shapes}, _sizes(shapes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        missing = sum(sizes.values()) - sum(file.stat().st_blocks * 512 for file in files.values() if file.exists())
        free = shutil.disk_usage(folder).free
        if missing > free:
            raise FeatureError(
                f"--features disk needs {missing / 1e9:.1f} GB more in {folder}, where {free / 1e9:.1f} GB are free; "
                "give another --feature-folder, less data, or --features none"
            )
        for name, file in files.items():
            with file.open("ab") as stream:
                # If the disk fills up later, writing to a mapped file kills the process.
                os.posix_fallocate(stream.fileno(), 0, sizes[name])
        arrays = {name: np.memmap(files[name], kind, "r+", shape=shape) for name, (shape, kind) in shapes.items()}
        mark = folder / "done.bin"
        done = np.memmap(mark, np.uint8, "r+" if mark.exists() else "w+", shape=(count,))
    except OSError as error:
        raise FeatureError(f"--features disk cannot use {folder}: {error.strerror or error}") from None
    return dict(arrays), done
