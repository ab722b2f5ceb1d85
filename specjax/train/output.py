"""What a run writes: checkpoints, metrics, the model card and a plot of the curves.

    checkpoints/<step>/    orbax: weights, optimiser state, step
    run.json               the settings that decide the results
    metrics.jsonl          an object a line; a resumed run drops the lines of steps that it repeats
    curves.png             with matplotlib

A complete checkpoint becomes visible by a rename: a killed run, or a full disk, leaves the previous checkpoint.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import numpy as np
import orbax.checkpoint as ocp

from specjax.checkpoint.files import replacing, try_lock, write_text
from specjax.train import differences

logger = logging.getLogger(__name__)

LOCK = ".lock"
State = TypeVar("State")
KEPT_CHECKPOINTS = 2


class RunError(ValueError):
    """The run's folder cannot be used, or a checkpoint cannot be written or read."""


class RunFolder(AbstractContextManager["RunFolder"]):
    """`--output` of a run, locked for this process, with the last checkpoints.

    `settings` are JSON values that a resumed run must repeat; without a checkpoint they may change.

    Raises RunError if the folder cannot be written, is in use, or contains a run with other settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder, self._checkpoints, self._metrics = folder, folder / "checkpoints", folder / "metrics.jsonl"
        file = folder / "run.json"
        with ExitStack() as stack, _run_errors(f"--output {folder} cannot be used"):
            folder.mkdir(parents=True, exist_ok=True)
            if not file.exists() and any(entry.name != LOCK for entry in folder.iterdir()):
                raise RunError(
                    f"--output {folder} contains files but no run.json, so it is no run; give another folder"
                )
            if (lock := try_lock(folder / LOCK)) is None:
                raise RunError(f"--output {folder} is in use by another process; wait for it or give another folder")
            stack.enter_context(lock)
            if file.exists() and any(entry.name.isdecimal() for entry in self._checkpoints.glob("*")):
                earlier, current = json.loads(file.read_text(encoding="utf-8")), json.loads(json.dumps(settings))
                if changed := differences(earlier, current):
                    raise RunError(
                        f"--output {folder} contains a run with other settings: {changed}. Give the same settings to "
                        "resume it, or another --output to start a new run"
                    )
            else:
                write_text(file, json.dumps(settings, indent=2) + "\n")
            logging.getLogger("absl").setLevel(logging.WARNING)  # orbax reports each file
            options = ocp.CheckpointManagerOptions(max_to_keep=KEPT_CHECKPOINTS, enable_async_checkpointing=False)
            manager = ocp.CheckpointManager(self._checkpoints.absolute(), options=options)
            self._manager = stack.enter_context(manager)
            self._stack = stack.pop_all()

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def latest(self) -> int | None:
        """The step of the newest checkpoint."""
        return self._manager.latest_step()

    def restore(self, like: State) -> State:
        """The newest checkpoint, with the shapes, dtypes and shardings of `like`. Raises RunError."""
        problem = f"the checkpoint of step {self.latest} in {self._checkpoints} cannot be read"
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        usual, sys.unraisablehook = sys.unraisablehook, _ignore
        try:
            state = self._manager.restore(self.latest, args=ocp.args.StandardRestore(abstract))
        except Exception as error:
            # The hook stays: orbax's threads end later than this, and so do the errors of other arrays.
            raise RunError(
                f"{problem} ({_reason(error)}); remove its folder to resume from the previous one"
            ) from error
        sys.unraisablehook = usual
        return cast(State, state)

    def save(self, step: int, state: Any) -> None:
        """Raises RunError if the checkpoint cannot be written; the previous checkpoint stays."""
        previous = self.latest
        if previous == step:
            return
        left = "there is no earlier checkpoint" if previous is None else f"the checkpoint of step {previous} is whole"
        problem = f"the checkpoint of step {step} cannot be written to {self._checkpoints}"
        with _run_errors(problem, f"; {left}. Make room and run the same command again"):
            self._manager.save(step, args=ocp.args.StandardSave(state))
            self._manager.wait_until_finished()

    def rewind(self, step: int) -> None:
        """Drop the lines of later steps from metrics.jsonl."""
        lines = [json.dumps(row) + "\n" for row in read_metrics(self.folder) if row["step"] <= step]
        with _run_errors(f"{self._metrics} cannot be written"):
            write_text(self._metrics, "".join(lines))

    def log(self, row: Mapping[str, Any]) -> None:
        advice = ". Make room and run the same command again: it resumes from the last checkpoint"
        with _run_errors(f"{self._metrics} cannot be written", advice), self._metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl that have a step."""
    file = folder / "metrics.jsonl"
    rows: list[dict[str, Any]] = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []:
        with suppress(json.JSONDecodeError):
            if isinstance(row := json.loads(line), dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows


@contextmanager
def _run_errors(problem: str, advice: str = "") -> Iterator[None]:
    try:
        yield
    except RunError:
        raise
    except Exception as error:  # orbax and tensorstore have no common base
        raise RunError(f"{problem} ({_reason(error)}){advice}") from error


def _ignore(error: Any) -> None:
    """A `sys.unraisablehook`. Python would print the error of each coroutine that reads an array."""


def _reason(error: Exception) -> str:
    reason = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return f"{reason.splitlines()[0]:.300}"


def model_card(
    *, title: str, target: str, description: str, facts: Mapping[str, Any], command: str, step: int,
    metrics: Sequence[Mapping[str, Any]],
) -> str:  # fmt: skip
    """Markdown, without front matter."""
    values = {name: ", ".join(value) if isinstance(value, list) else value for name, value in facts.items()}
    sections = [
        f"# {title}",
        f"Proposes tokens for {target}, which verifies them: it changes the speed of decoding and never the text.\n"
        f"{description}",
        "## Data",
        "\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in values.items()),
        f"## Command\n\n```sh\n{command}\n```\n\nThis is the draft after step {step}.",
    ]
    measured, trained = ({row["step"]: row for row in metrics if name in row} for name in ("accept_length", "loss"))
    if measured:
        last = measured[max(measured)]
        shares = ", ".join(f"{share:.2f}" for share in last["by_depth"])
        sections += [
            "## Accept length",
            f"{last['accept_length']:.3f} tokens per verification (bonus included), greedy, a chain, on prompts held "
            f"back from the training data, in the engine: {last['tokens']} tokens in {last['steps']} steps. Acceptance "
            f"by depth, of drafts whose parent was accepted: {shares}.",
        ]
    # About 12 lines: measured steps or, if there are none, logged steps.
    if steps := list(measured or trained):
        table = ["| step | tokens seen | loss | right by round | accept length |", "|---|---|---|---|---|"]
        for step in sorted({*steps[:: -(-len(steps) // 12)], steps[-1]}):
            row = trained.get(max((other for other in trained if other <= step), default=0), {})
            right = " ".join(f"{value:.2f}" for value in row.get("matched", [])[:5])
            length = measured.get(step, {}).get("accept_length", "")
            table.append(f"| {step} | {row.get('tokens', '')} | {row.get('loss', '')} | {right} | {length} |")
        sections += ["## Curves", "\n".join(table)]
    return "\n\n".join(sections) + "\n"


def plot(folder: Path) -> Path | None:
    """Write curves.png: loss, accuracy by round and accept length over tokens seen.

    Returns None if there is nothing to draw, or if matplotlib is not installed.
    """
    rows = read_metrics(folder)
    trained = [row for row in rows if "loss" in row]
    if not trained:
        return None
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    except ImportError:
        logger.warning("no curves.png: matplotlib is not installed (pip install -e '.[train]')")
        return None
    tokens = {row["step"]: row["tokens"] for row in trained}
    measured = [row for row in rows if "accept_length" in row and row["step"] in tokens]
    figure = Figure(figsize=(13, 4), layout="constrained")
    loss, right, accept = figure.subplots(1, 3, sharex=True)
    loss.plot([*tokens.values()], [row["loss"] for row in trained], "o-", markersize=4)
    for j in range(len(trained[0]["matched"])):
        right.plot([*tokens.values()], [row["matched"][j] for row in trained], "o-", markersize=4, label=f"round {j}")
    right.legend()
    for points, name, style, label in (
        (measured, "accept_length", "o-", "engine, held back"),
        (measured, "simulated", "s--", "simulated, held back"),
        (trained, "simulated", ":", "simulated, training text"),
    ):
        lengths = [row.get(name, np.nan) for row in points]
        accept.plot([tokens[row["step"]] for row in points], lengths, style, label=label)
    accept.legend()
    titles = ("loss", "right, of the training text's tokens", "accept length")
    for axes, title in zip((loss, right, accept), titles, strict=True):
        axes.set(title=title, xlabel="tokens seen")
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_formatter(EngFormatter())
    file = folder / "curves.png"
    with replacing(file) as draft:
        figure.savefig(draft, dpi=120)
    return file
