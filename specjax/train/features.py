"""The frozen target's outputs for packed rows: what the head reads and is taught by, computed in each step or once.

On a CPU the target's forward costs more than training the head, so `FeatureStore` keeps its outputs. A row's values
come from the forward over its batch of the first epoch, whenever that forward runs, so a resumed run that lost the
features in memory continues bit for bit. On disk they survive the process, in a folder named after everything they
depend on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from specjax.config import ModelConfig
from specjax.models import make_target
from specjax.models.target import Target, no_past
from specjax.train.data import Rows, batch_rows
from specjax.train.unroll import Teacher, packed_attention, packed_mask
from specjax.types import Weights

MODES = ("none", "memory", "disk")
CHUNK = 512  # tokens whose full logits exist at one time


class FeatureError(ValueError):
    """The features cannot be stored."""


def training_target(config: ModelConfig, dtype: str) -> Target:
    """The target for packed rows: no pages, differentiable attention, computing in `dtype`."""
    return make_target(replace(config, dtype=dtype), backend=packed_attention)


def teach(target: Target, features: tuple[int, ...] | str) -> Callable[[Weights, Rows], Teacher]:
    """(target parameters, batch) -> Teacher, for `jax.jit`."""

    def run(params: Weights, batch: Rows) -> Teacher:
        past = no_past(target, len(batch.tokens))
        embedded, mask = target.embed(params, batch.tokens), packed_mask(batch.segments)
        output = target.forward(params, embedded, batch.positions, mask, *past, features=features)
        assert output.features is not None
        # In chunks: the logits of all tokens may be gigabytes.
        flat = output.hidden.reshape(-1, output.hidden.shape[-1])
        chunks = jnp.pad(flat, ((0, -len(flat) % CHUNK), (0, 0))).reshape(-1, CHUNK, flat.shape[1])
        top = jax.lax.map(lambda part: jnp.argmax(target.unembed(params, part), axis=-1).astype(jnp.int32), chunks)
        top = top.reshape(-1)[: len(flat)].reshape(batch.tokens.shape)
        return Teacher(output.features, output.hidden, top)

    return run


class FeatureStore:
    """Features of rows by index.

    Args:
        teach: rows -> numpy `Teacher` of these rows, in `dtype`.
        mode: memory or disk, in a folder below `folder`.
        widths: F and M.
        batch, seed: of the run, see `batch_rows`.
        identity: names everything else that the values depend on, except the rows.

    Raises FeatureError: too little memory or disk space.
    """

    def __init__(
        self, teach: Callable[[Rows], Teacher], rows: Rows, *, mode: str, folder: Path, widths: tuple[int, int],
        dtype: str, batch: int, seed: int, identity: str,
    ) -> None:  # fmt: skip
        count = len(rows.tokens)
        self._teach, self._rows, self._batch, self._seed = teach, rows, batch, seed
        token = np.dtype([("features", dtype, widths[0]), ("hidden", dtype, widths[1]), ("top", np.int32)])
        if mode == "memory":
            needed, free = prod(rows.tokens.shape) * token.itemsize, psutil.virtual_memory().available
            _check_room("memory", "", needed, free)
            self._kept, self._done = np.empty(rows.tokens.shape, token), np.zeros(count, np.uint8)
        else:
            digest = hashlib.sha256(json.dumps(("rows.bin", identity, dtype, batch, seed)).encode())
            digest.update(rows.tokens.tobytes() + rows.segments.tobytes())
            self._kept, self._done = _open(folder / digest.hexdigest()[:16], token, rows.tokens.shape)
        self._group = np.zeros(count, np.int64)  # each row's batch in the first epoch
        for number in reversed(range(-(-count // batch))):
            self._group[batch_rows(number, count, batch, seed)] = number

    @property
    def done(self) -> int:
        """Rows computed so far."""
        return int(self._done.sum())

    def get(self, wanted: np.ndarray) -> Teacher:
        """The features of the rows `wanted`, in this order."""
        for number in np.unique(self._group[wanted[self._done[wanted] == 0]]):
            members = batch_rows(int(number), len(self._group), self._batch, self._seed)
            found = self._teach(Rows(*(part[members] for part in self._rows)))
            mine = self._group[members] == number
            for name in Teacher._fields:
                self._kept[name][members[mine]] = getattr(found, name)[mine]
            if isinstance(self._kept, np.memmap):
                self._kept.flush()  # before the rows are marked as done
            self._done[members[mine]] = 1
        return Teacher._make(self._kept[name][wanted] for name in Teacher._fields)


def _check_room(mode: str, where: str, needed: int, free: int) -> None:
    if needed > free:
        other = "another --feature-folder" if where else "--features disk"
        raise FeatureError(
            f"--features {mode} needs {needed / 1e9:.1f} GB{where}, and {free / 1e9:.1f} GB are free; give {other}, "
            "less data, or --features none"
        )


def _open(folder: Path, token: np.dtype, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Rows in a mapped file, and which of them an earlier run computed."""
    file, mark, size = folder / "rows.bin", folder / "done.bin", prod(shape) * token.itemsize
    try:
        folder.mkdir(parents=True, exist_ok=True)
        missing = size - (file.stat().st_blocks * 512 if file.exists() else 0)
        _check_room("disk", f" more in {folder}", missing, shutil.disk_usage(folder).free)
        with file.open("ab") as stream:
            # If the disk fills up later, writing to a mapped file kills the process.
            os.posix_fallocate(stream.fileno(), 0, size)
        done = np.memmap(mark, np.uint8, "r+" if mark.exists() else "w+", shape=shape[:1])
        return np.memmap(file, token, "r+", shape=shape), done
    except OSError as error:
        raise FeatureError(f"--features disk cannot use {folder}: {error.strerror or error}") from None
