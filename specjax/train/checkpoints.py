"""A run's folder: checkpoints that are whole or not there, the settings they belong to, and the log of metrics.

    checkpoints/<step>/    orbax: weights, optimiser state, step
    run.json               the settings that decide what is computed
    metrics.jsonl          one object a line; lines of steps that a resumed run does again are dropped

A checkpoint is written beside and renamed, so a run that is killed, or whose disk is full, keeps the one before.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

import jax
import orbax.checkpoint as ocp

from specjax.checkpoint.files import try_lock, write_text
from specjax.train.update import TrainState

LOCK = ".lock"


class RunError(ValueError):
    """The run's folder cannot be used, or a checkpoint not be written or read."""


class RunFolder:
    """`--output` of a run, for one process at a time.

    Args:
        settings: JSON values; resuming with others is refused. A run without a checkpoint has nothing to resume, and
            begins anew with them.

    Raises:
        RunError: the folder cannot be written, is in use, or holds a run with other settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, keep: int) -> None:
        self.folder = folder
        self._metrics: TextIO | None = None
        wanted = json.loads(json.dumps(settings))
        file = folder / "run.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not file.exists() and {entry.name for entry in folder.iterdir()} - {LOCK}:
                raise RunError(f"--output {folder} holds files, and no run.json: it is no run; give another folder")
            lock = try_lock(folder / LOCK)
        except OSError as error:
            raise RunError(f"--output {folder} cannot be used: {error.strerror or error}") from None
        if lock is None:
            raise RunError(f"--output {folder} is in use by another process; wait for it or give another folder")
        self._lock = lock.lock
        try:
            if file.exists() and _has_checkpoint(folder):
                _compare(json.loads(file.read_text(encoding="utf-8")), wanted, folder)
            else:
                write_text(file, json.dumps(wanted, indent=2) + "\n")
            logging.getLogger("absl").setLevel(logging.WARNING)  # orbax tells of each file
            options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
            self._manager = ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options)
        except BaseException as error:
            self._lock.release()
            if not isinstance(error, (OSError, json.JSONDecodeError)):
                raise
            reason = getattr(error, "strerror", None) or error
            raise RunError(f"--output {folder} cannot be used: {reason}") from None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()
        self._lock.release()

    @property
    def latest(self) -> int | None:
        """The step of the newest checkpoint."""
        return self._manager.latest_step()

    def restore(self, like: TrainState) -> TrainState:
        """The newest checkpoint; `like` has its shapes, dtypes and shardings.

        Raises:
            RunError: it cannot be read.
        """
        step = self.latest
        try:
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
            return cast(TrainState, self._manager.restore(step, args=ocp.args.StandardRestore(abstract)))
        except Exception as error:  # orbax and tensorstore have no common base
            raise RunError(
                f"the checkpoint of step {step} in {self.folder / 'checkpoints'} cannot be read "
                f"({_first_line(error)}); remove its folder to go on from the one before"
            ) from error

    def save(self, state: TrainState) -> None:
        """Raises RunError: it cannot be written; the one before is whole."""
        step, before = int(state.step), self.latest
        if before == step:
            return
        try:
            self._check_room(state)
            self._manager.save(step, args=ocp.args.StandardSave(state))
            self._manager.wait_until_finished()
        except Exception as error:
            kept = "there is none before it" if before is None else f"that of step {before} is whole"
            raise RunError(
                f"the checkpoint of step {step} cannot be written to {self.folder / 'checkpoints'} "
                f"({_first_line(error)}); {kept}. Make room and run the same command again"
            ) from error

    def _check_room(self, state: TrainState) -> None:
        """Raises OSError. Orbax finds a full disk only in the middle, in several threads, each of which tells of it."""
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise OSError(errno.ENOSPC, f"it takes {needed / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free")

    @contextmanager
    def metrics(self, step: int) -> Iterator[None]:
        """Opens the log, which then ends at `step`."""
        file = self.folder / "metrics.jsonl"
        kept = [line for line in read_metrics(self.folder) if line["step"] <= step]
        try:
            write_text(file, "".join(json.dumps(line) + "\n" for line in kept))
            self._metrics = file.open("a", encoding="utf-8")
        except OSError as error:
            raise RunError(f"{file} cannot be written: {error.strerror or error}") from None
        with self._metrics:
            yield
        self._metrics = None

    def log(self, row: Mapping[str, Any]) -> None:
        assert self._metrics is not None
        try:
            self._metrics.write(json.dumps(row) + "\n")
            self._metrics.flush()
        except OSError as error:
            raise RunError(
                f"{self._metrics.name} cannot be written: {error.strerror or error}. Make room and run the same "
                "command again: it goes on from the last checkpoint"
            ) from None


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; one that a killed run left unfinished is not there."""
    file = folder / "metrics.jsonl"
    found = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def _has_checkpoint(folder: Path) -> bool:
    return any(file.name.isdecimal() for file in (folder / "checkpoints").glob("*"))


def _compare(there: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    differing = [
        f"{name if ' ' in name else '--' + name} was {there.get(name)!r:.60} and is {wanted.get(name)!r:.60}"
        for name in sorted({*there, *wanted})
        if there.get(name) != wanted.get(name)
    ]
    if differing:
        raise RunError(
            f"--output {folder} holds a run with other settings: {'; '.join(differing)}. Give the same ones to resume "
            "it, or another --output to start anew"
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
