"""Choices that only a measurement can make, and the record that keeps them: beside the compiled programs, by device,
versions and shapes.

`measure` times the candidates of each `Task`, in stages, until the budget ends; it knows neither kernels nor engines.
`specjax.engine.tuning_tasks` has the tasks of an engine. What is being tried is written down first, so that a candidate
that ends the process is left out by the next start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from specjax_kernels.search import Say, search, tell

from specjax.checkpoint.files import default_cache_dir, write_text
from specjax.progress import progress_bar

logger = logging.getLogger(__name__)

Stage = Literal["products", "attention", "steps"]

SHARES: dict[Stage, float] = {"products": 0.4, "attention": 0.6, "steps": 1.0}
"""The share of the budget at which a stage ends. What it leaves is the next one's."""

CANDIDATE_SECONDS = 60.0  # after which a kernel's candidate, compiling included, counts as hung
STEP_SECONDS = 600.0  # the same of a whole step


class Stuck(RuntimeError):
    """A candidate did not end. The device may be stuck in it, so the process is of no more use."""


@dataclass(frozen=True)
class Trial:
    """A task that has begun: its inputs are on the device."""

    start: Any  # what runs without a measurement; a candidate is any hashable value that `plain` takes
    around: Callable[[Any], Iterable[Any]]  # candidates after another one
    score: Callable[[Any], float]  # a candidate's time over the start's; infinite: it does not run, or is wrong
    seconds: Callable[[], float | None]  # of the start; None: it has not been timed


@dataclass(frozen=True)
class Task:
    """One choice.

    Attributes:
        name: the entry of a table, or words.
        begin: (say) -> the trial. `say` takes lines about candidates that fail.
        value: seconds of a step that it is about, as the cost model has them. The largest first.
        bytes, flops: read and written, and computed, by the start: what the device's ceilings are compared with.
        limit: seconds that one candidate may take.
    """

    stage: Stage
    name: str
    begin: Callable[[Say], Trial]
    value: float = 0.0
    bytes: int = 0
    flops: int = 0
    limit: float = CANDIDATE_SECONDS


@dataclass(frozen=True)
class Result:
    """What came of a task; candidates are as `plain` gives them."""

    stage: Stage
    name: str
    choice: Any
    score: float  # the choice's time over the start's
    seconds: float | None  # of the start
    tried: list[Any]  # [candidate, score], null: it does not run, or is wrong
    bytes: int = 0
    flops: int = 0
    finished: bool = True  # False: the budget ended in it


@dataclass(frozen=True)
class Tuning:
    """All that was measured for one device, versions and shapes."""

    of: dict[str, Any]  # see `specjax.engine.tuning_tasks.identity`
    results: tuple[Result, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)  # candidate -> why
    trying: str = ""  # the candidate under way
    seconds: float = 0.0  # that measuring took
    tasks: int = 0  # that there are
    ended: bool = False  # by itself: all was measured, or the budget was spent
    copy_speed: float | None = None  # bytes/s, a plain copy's
    product_speed: float | None = None  # flops a second, a large product's

    @property
    def complete(self) -> bool:
        return len(self.results) == self.tasks and all(result.finished for result in self.results)

    def named(self, stage: Stage) -> dict[str, Result]:
        """The results of a stage, by name."""
        return {result.name: result for result in self.results if result.stage == stage}


def plain(candidate: Any) -> Any:
    """A candidate as JSON holds it."""
    return asdict(candidate) if is_dataclass(candidate) and not isinstance(candidate, type) else candidate


# The record.


def file_for(of: Mapping[str, Any], folder: Path | None = None) -> Path:
    """`folder`: None: that of this user's cache."""
    name = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:24]
    return (folder or default_cache_dir() / "tuning") / f"{name}.json"


def read(of: Mapping[str, Any], folder: Path | None = None) -> Tuning | None:
    """The record for this device, these versions and shapes; None: there is none that can be used. A candidate in which
    the process ended is among those left out."""
    file = file_for(of, folder)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        tuning = Tuning(**{**found, "results": tuple(Result(**each) for each in found["results"])})
        if tuning.of != json.loads(json.dumps(of)):
            raise ValueError("it is of something else")
        for result in tuning.results:
            float(result.score)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("the measurements in %s are not used: %s", file, str(error)[:200])
        return None
    if tuning.trying:
        why = "an earlier process ended in it"
        logger.warning("%s is left out: %s (%s)", tuning.trying, why, file)
        tuning = replace(tuning, left_out=tuning.left_out | {tuning.trying: why}, trying="")
    return tuning


def write(tuning: Tuning, folder: Path | None = None) -> None:
    """Replaces the record. A failure is logged: the next start measures again."""
    file = file_for(tuning.of, folder)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(asdict(tuning), indent=1, allow_nan=False) + "\n")
    except OSError as error:
        logger.warning("measurements cannot be kept in %s: %s", file, error)


# Measuring.


def measure(
    tasks: Sequence[Task],
    before: Tuning,
    *,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    keep: Callable[[Tuning], None] = write,
    begin_stage: Callable[[Stage, Tuning], None] = lambda stage, tuning: None,
    progress: bool = False,
) -> Tuning:
    """Runs the tasks that `before` has no finished result of, stage by stage and the most valuable first. Stops between
    two candidates, when the time is over or too short for one that takes as long as the stage's last. The result has
    all that was measured.

    Args:
        seconds: the budget.
        clock: seconds, from anywhere.
        keep: called before each candidate and after each task with what is known so far.
        begin_stage: called before a stage's first task.
        progress: show a bar on stderr.

    Raises:
        Stuck: a candidate took longer than its task's limit. It is left out from then on.
    """
    begun, now, stages = clock(), replace(before, tasks=len(tasks), ended=False), list(SHARES)
    pace = _Pace(clock)
    ordered = sorted(tasks, key=lambda task: (stages.index(task.stage), -task.value))

    def note(**changes: Any) -> None:
        nonlocal now
        now = replace(now, **changes, seconds=before.seconds + clock() - begun)
        keep(now)

    title = f"Measuring on this device, at most {seconds:.0f} s"
    with progress_bar(title, len(tasks), "choice", shown=progress) as bar:
        for task in ordered:
            known = now.named(task.stage).get(task.name)
            if known is not None and known.finished:
                bar.update()
                continue
            if not pace.task(task.stage, begun + seconds * SHARES[task.stage]):
                continue
            if task.stage in stages:
                del stages[: stages.index(task.stage) + 1]
                begin_stage(task.stage, now)
            bar.set_postfix_str(task.name)
            result = _run(task, now, pace, note)
            if result is not None:
                others = [each for each in now.results if (each.stage, each.name) != (task.stage, task.name)]
                note(results=(*others, result))
                bar.update(result.finished)
    note(ended=True)
    return now


@dataclass
class _Pace:
    """Whether there is time for another candidate."""

    clock: Callable[[], float]
    stage: Stage | None = None
    end: float = 0.0  # of the stage
    last: float = 0.0  # seconds that the stage's last candidate took
    cut: bool = False  # whether the answer was no in the task under way

    def task(self, stage: Stage, end: float) -> bool:
        """Before a task: whether it can begin."""
        if stage != self.stage:
            self.stage, self.end, self.last = stage, end, 0.0
        self.cut = False
        return self.going()

    def going(self) -> bool:
        now = self.clock()
        self.cut |= now >= self.end or now + self.last > self.end
        return not self.cut

    def taking(self, limit: float, function: Callable[[], Any]) -> Any:
        """`within`, timed."""
        begun = self.clock()
        try:
            return within(limit, function)
        finally:
            self.last = self.clock() - begun


def _run(task: Task, now: Tuning, pace: _Pace, note: Callable[..., None]) -> Result | None:
    """None: the task cannot be begun, or its start cannot be measured."""
    said: list[str] = []
    left_out = dict(now.left_out)
    label = f"{task.name}: the start"
    if label in left_out:
        return None
    try:
        note(trying=label)
        trial = pace.taking(task.limit, lambda: task.begin(said.append))
    except Exception as error:
        _leave_out(label, error, left_out, note)
        return None

    def score(candidate: Any) -> float:
        label = f"{task.name}: {candidate}"
        if label in left_out:
            return math.inf
        note(trying=label)
        said.clear()
        try:
            found = pace.taking(task.limit, lambda: trial.score(candidate))
        except Exception as error:
            _leave_out(label, error, left_out, note)
            return math.inf
        if not math.isfinite(found):
            left_out[label] = said[-1].strip() if said else "it does not run, or is wrong"
        return found

    try:
        found = search(trial.start, score, lambda candidate, value: None, around=trial.around, going=pace.going)
        taken = trial.seconds()
    except Stuck:
        raise
    except Exception as error:
        _leave_out(label, error, left_out, note)
        return None
    finally:
        note(trying="", left_out=left_out)  # also when the user interrupts: the candidate is not to blame
    tried = [[plain(one), value if math.isfinite(value) else None] for one, value in found.tried.items()]
    chosen, finished = plain(found.blocks), not pace.cut
    return Result(task.stage, task.name, chosen, found.score, taken, tried, task.bytes, task.flops, finished)


def _leave_out(label: str, error: Exception, left_out: dict[str, str], note: Callable[..., None]) -> None:
    """Raises a `Stuck` on."""
    lines: list[str] = []
    tell(lines.append, "", error)
    left_out[label] = lines[0].removeprefix(": ")
    logger.info("%s is left out: %s", label, left_out[label])
    note(trying="", left_out=left_out)
    if isinstance(error, Stuck):
        raise error


def within(limit: float, function: Callable[[], Any]) -> Any:
    """What a function returns or raises, called in a thread. Raises Stuck if that takes longer than `limit` seconds;
    the thread cannot be ended."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="specjax-measure", daemon=True)
    thread.start()
    thread.join(limit)
    if not outcome:
        raise Stuck(f"did not end in {limit:g} s; it is left out from now on, start again")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value
