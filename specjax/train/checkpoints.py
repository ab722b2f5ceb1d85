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
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import jax
import orbax.checkpoint as ocp

from specjax.checkpoint.files import try_lock, write_text
from specjax.train import differences
from specjax.train.update import TrainState

LOCK = ".lock"


class RunError(ValueError):
    """The run's folder cannot be used, or a checkpoint not be written or read."""


class RunFolder(AbstractContextManager["RunFolder"]):
    """`--output` of a run, for one process at a time.

    Resuming with other `settings`, JSON values, is refused. A run without a checkpoint begins anew with them.

    Raises RunError: the folder cannot be written, is in use, or holds a run with other settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, keep: int) -> None:
        self.folder, self._checkpoints, self._metrics = folder, folder / "checkpoints", folder / "metrics.jsonl"
        file = folder / "run.json"
        with ExitStack() as stack, _run_errors(f"--output {folder} cannot be used"):
            folder.mkdir(parents=True, exist_ok=True)
            if not file.exists() and any(entry.name != LOCK for entry in folder.iterdir()):
                raise RunError(f"--output {folder} holds files, and no run.json: it is no run; give another folder")
            if (lock := try_lock(folder / LOCK)) is None:
                raise RunError(f"--output {folder} is in use by another process; wait for it or give another folder")
            stack.enter_context(lock)
            if file.exists() and any(entry.name.isdecimal() for entry in self._checkpoints.glob("*")):
                known, wanted = json.loads(file.read_text(encoding="utf-8")), json.loads(json.dumps(settings))
                known.pop("steps", None)  # which may change; earlier versions kept it here
                if changed := differences(known, wanted):
                    raise RunError(
                        f"--output {folder} holds a run with other settings: {changed}. Give the same ones to resume "
                        "it, or another --output to start anew"
                    )
            else:
                write_text(file, json.dumps(settings, indent=2) + "\n")
            logging.getLogger("absl").setLevel(logging.WARNING)  # orbax reports each file
            options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
            manager = ocp.CheckpointManager(self._checkpoints.absolute(), options=options)
            self._manager = stack.enter_context(manager)
            self._stack = stack.pop_all()

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def latest(self) -> int | None:
        """The step of the newest checkpoint."""
        return self._manager.latest_step()

    def restore(self, like: TrainState) -> TrainState:
        """The newest checkpoint; `like` has its shapes, dtypes and shardings. Raises RunError: it cannot be read."""
        problem = f"the checkpoint of step {self.latest} in {self._checkpoints} cannot be read"
        with _run_errors(problem, "; remove its folder to go on from the one before"):
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
            return cast(TrainState, self._manager.restore(self.latest, args=ocp.args.StandardRestore(abstract)))

    def save(self, state: TrainState) -> None:
        """Raises RunError: it cannot be written; the one before is whole."""
        step, before = int(state.step), self.latest
        if before == step:
            return
        kept = "there is none before it" if before is None else f"that of step {before} is whole"
        problem = f"the checkpoint of step {step} cannot be written to {self._checkpoints}"
        with _run_errors(problem, f"; {kept}. Make room and run the same command again"):
            needed, free = sum(leaf.nbytes for leaf in jax.tree.leaves(state)), shutil.disk_usage(self.folder).free
            if needed > free:  # orbax would find out in the middle, in several threads, each of which reports it
                raise OSError(errno.ENOSPC, f"it takes {needed / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free")
            self._manager.save(step, args=ocp.args.StandardSave(state))
            self._manager.wait_until_finished()

    def rewind(self, step: int) -> None:
        """Drop the lines of later steps from the log."""
        kept = [json.dumps(row) + "\n" for row in read_metrics(self.folder) if row["step"] <= step]
        with _run_errors(f"{self._metrics} cannot be written"):
            write_text(self._metrics, "".join(kept))

    def log(self, row: Mapping[str, Any]) -> None:
        advice = ". Make room and run the same command again: it goes on from the last checkpoint"
        with _run_errors(f"{self._metrics} cannot be written", advice), self._metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that belong to a step; one that a killed run left unfinished is not there."""
    file = folder / "metrics.jsonl"
    found: list[dict[str, Any]] = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []:
        with suppress(json.JSONDecodeError):
            if isinstance(row := json.loads(line), dict) and isinstance(row.get("step"), int):
                found.append(row)
    return found


@contextmanager
def _run_errors(problem: str, advice: str = "") -> Iterator[None]:
    try:
        yield
    except RunError:
        raise
    except Exception as error:  # orbax and tensorstore have no common base
        reason = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
        raise RunError(f"{problem} ({reason.splitlines()[0]:.300}){advice}") from error
