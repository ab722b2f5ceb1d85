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

import numpy as np

from specjax.train.memory import available_memory
from specjax.train.packing import Rows, batch_rows

MODES = ("none", "memory", "disk")


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
        self, teach: Callable[[Rows], Kept], rows: Rows, *, mode: str, folder: Path, widths: tuple[int, int],
        dtype: str, batch: int, seed: int, identity: str,
    ) -> None:  # fmt: skip
        count, length = rows.tokens.shape
        self._teach, self._rows, self._batch, self._seed = teach, rows, batch, seed
        token = np.dtype([("features", dtype, widths[0]), ("hidden", dtype, widths[1]), ("top", np.int32)])
        if mode == "memory":
            self._kept, self._done = _allocate(token, (count, length))
        else:
            name = _fingerprint(rows, "rows.bin", identity, dtype, batch, seed)
            self._kept, self._done = _open(folder / name, token, (count, length))
        self._group = np.zeros(count, np.int64)  # each row's batch in the first epoch
        for number in reversed(range(-(-count // batch))):
            self._group[batch_rows(number, count, batch, seed)] = number

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
            for name in Kept._fields:
                self._kept[name][members[mine]] = getattr(found, name)[mine]
            if isinstance(self._kept, np.memmap):
                self._kept.flush()  # before the rows are marked as done
            self._done[members[mine]] = 1
        return Kept(*(self._kept[name][wanted] for name in Kept._fields))


def _fingerprint(rows: Rows, *identity: object) -> str:
    digest = hashlib.sha256(json.dumps(identity).encode())
    for part in (rows.tokens, rows.segments):
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()[:16]


def _allocate(token: np.dtype, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Rows in memory, and which of them are computed: none."""
    needed, free = prod(shape) * token.itemsize, available_memory()
    if free is not None and needed > free:
        raise FeatureError(
            f"--features memory needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; give --features disk, "
            "less data, or --features none"
        )
    return np.empty(shape, token), np.zeros(shape[0], np.uint8)


def _open(folder: Path, token: np.dtype, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Rows in a mapped file, and which of them an earlier run computed."""
    file, mark, size = folder / "rows.bin", folder / "done.bin", prod(shape) * token.itemsize
    try:
        folder.mkdir(parents=True, exist_ok=True)
        missing = size - (file.stat().st_blocks * 512 if file.exists() else 0)
        free = shutil.disk_usage(folder).free
        if missing > free:
            raise FeatureError(
                f"--features disk needs {missing / 1e9:.1f} GB more in {folder}, where {free / 1e9:.1f} GB are free; "
                "give another --feature-folder, less data, or --features none"
            )
        with file.open("ab") as stream:
            # If the disk fills up later, writing to a mapped file kills the process.
            os.posix_fallocate(stream.fileno(), 0, size)
        done = np.memmap(mark, np.uint8, "r+" if mark.exists() else "w+", shape=shape[:1])
        return np.memmap(file, token, "r+", shape=shape), done
    except OSError as error:
        raise FeatureError(f"--features disk cannot use {folder}: {error.strerror or error}") from None
