"""The frozen target's outputs for packed rows: the head's inputs and its teacher, computed in each step or once.

On a CPU the target's forward costs more than the head's update, so `FeatureStore` writes its outputs to disk. Later
runs reuse them; the folder's name is a hash of their inputs. A row's values always come from the forward over its
batch of the first epoch, so a resumed run without the folder continues bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specjax.cache import Weights
from specjax.config import ModelConfig
from specjax.models import make_target
from specjax.models.target import Target, no_past
from specjax.train.data import Rows, batch_rows
from specjax.train.unroll import Teacher, packed_attention, packed_mask

CHUNK = 512  # tokens whose logits are in memory together


def training_target(config: ModelConfig, dtype: str) -> Target:
    """The target for packed rows, without pages, computing in `dtype`."""
    return make_target(replace(config, dtype=dtype), backend=packed_attention)


def teach(target: Target, features: tuple[int, ...] | str) -> Callable[[Weights, Rows], Teacher]:
    """(target parameters, batch) -> Teacher, for `jax.jit`."""

    def run(params: Weights, batch: Rows) -> Teacher:
        past = no_past(target, len(batch.tokens))
        embedded, mask = target.embed(params, batch.tokens), packed_mask(batch.segments)
        output = target.forward(params, embedded, batch.positions, mask, *past, features=features)
        assert output.features is not None
        # In chunks, since the logits of all tokens may take gigabytes.
        flat = output.hidden.reshape(-1, output.hidden.shape[-1])
        chunks = jnp.pad(flat, ((0, -len(flat) % CHUNK), (0, 0))).reshape(-1, CHUNK, flat.shape[1])
        top = jax.lax.map(lambda part: jnp.argmax(target.unembed(params, part), axis=-1).astype(jnp.int32), chunks)
        top = top.reshape(-1)[: len(flat)].reshape(batch.tokens.shape)
        return Teacher(output.features, output.hidden, top)

    return run


class FeatureStore:
    """Features of rows by index, in files of a folder below `folder`.

    Args:
        teach: rows -> numpy `Teacher` in `dtype`.
        widths: F and M.
        batch, seed: arguments of `batch_rows`.
        identity: describes all other inputs of the values, except the rows.

    Raises ValueError if the folder cannot be written, or the disk has too little space.
    """

    def __init__(
        self, teach: Callable[[Rows], Teacher], rows: Rows, *, folder: Path, widths: tuple[int, int],
        dtype: str, batch: int, seed: int, identity: str,
    ) -> None:  # fmt: skip
        count = len(rows.tokens)
        self._teach, self._rows, self._batch, self._seed = teach, rows, batch, seed
        token = np.dtype([("features", dtype, widths[0]), ("hidden", dtype, widths[1]), ("top", np.int32)])
        digest = hashlib.sha256(json.dumps(("rows.bin", identity, dtype, batch, seed)).encode())
        digest.update(rows.tokens.tobytes() + rows.segments.tobytes())
        self._stored, self._done = _open(folder / digest.hexdigest()[:16], token, rows.tokens.shape)
        self._group = np.zeros(count, np.int64)  # each row's batch in the first epoch
        for number in reversed(range(-(-count // batch))):
            self._group[batch_rows(number, count, batch, seed)] = number

    def get(self, numbers: np.ndarray) -> Teacher:
        """The features of these rows, in this order."""
        for number in np.unique(self._group[numbers[self._done[numbers] == 0]]):
            members = batch_rows(int(number), len(self._group), self._batch, self._seed)
            teacher = self._teach(Rows(*(part[members] for part in self._rows)))
            new = self._group[members] == number
            for name in Teacher._fields:
                self._stored[name][members[new]] = getattr(teacher, name)[new]
            self._stored.flush()  # before the rows are marked as done
            self._done[members[new]] = 1
        return Teacher._make(self._stored[name][numbers] for name in Teacher._fields)


def _open(folder: Path, token: np.dtype, shape: tuple[int, int]) -> tuple[np.memmap, np.memmap]:
    """Rows in a mapped file, and flags of the rows that are computed."""
    file, mark, size = folder / "rows.bin", folder / "done.bin", prod(shape) * token.itemsize
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as stream:
            # Reserve the space now: writing to a mapped file on a full disk kills the process.
            os.posix_fallocate(stream.fileno(), 0, size)
        done = np.memmap(mark, np.uint8, "r+" if mark.exists() else "w+", shape=shape[:1])
        return np.memmap(file, token, "r+", shape=shape), done
    except OSError as error:
        raise ValueError(
            f"--features disk cannot use {folder}, which needs {size / 1e9:.1f} GB: {error.strerror or error}; give "
            "another --feature-folder, less data, or --features none"
        ) from None
