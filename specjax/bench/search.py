"""Finds the fastest draft tree: records, measures, predicts every point of a grid, and runs the best few."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax

from specjax import checkpoint
from specjax.bench import results
from specjax.bench.contenders import EngineContender, Source, shaped
from specjax.bench.experiment import Experiment, GroupRun, Plan, groups
from specjax.bench.grid import Grid, Point
from specjax.bench.log import Log
from specjax.bench.methods import Method
from specjax.bench.prediction import Prediction, mean_parts, predict, step_widths
from specjax.bench.recording import Recorded
from specjax.bench.sets import Conversation
from specjax.bench.step_costs import StepCosts, measure_costs
from specjax.drafters import DraftOptions, Ngram, NoDraft
from specjax.drafters.options import ModelOptions
from specjax.load import choose, requested

logger = logging.getLogger(__name__)

NONE = Method("NONE", "none", draft=NoDraft())
CALIBRATION = 4  # groups of conversations of each set that say what a step takes beyond its parts


def current_options(model: Mapping[str, Any], draft: DraftOptions | str) -> DraftOptions:
    """The options with every number of the tree that would be used: given ones, those measured for a shipped head, or
    the algorithm's. AUTO becomes what it chooses.

    Args:
        model: `specjax.load.load`'s arguments, without the draft's.

    Raises:
        ValueError: there is no such tree; or a drafter from outside has none that could be changed.
    """
    if isinstance(draft, str):
        raise ValueError(f"algorithm {draft}: the tree of a drafter from outside is its own affair")
    options, _ = requested(model["model"], draft)
    files = checkpoint.resolve(model["model"], revision=model["revision"])
    config = checkpoint.model_config(files.config, dtype=model["dtype"])
    found = choose(options, files, config)
    chosen = found.options
    if isinstance(chosen, Ngram):
        chosen = chosen.on(jax.default_backend())
        return replace(chosen, nodes=chosen.width)
    if not isinstance(chosen, ModelOptions):
        return chosen
    shape = chosen.shape(found.tree or chosen.automatic(config.family))
    if found.head is not None:  # its folder is this machine's
        chosen = replace(chosen, path=None)
    return replace(chosen, steps=shape.steps, topk=shape.topk, nodes=shape.nodes)


def distinct(points: Sequence[Point], count: int) -> list[Point]:
    """Of points in their order the first `count` that differ from each other in levels and in nodes; where there are
    fewer, those that differ in nodes, and then the others.

    The best points of a grid are near-copies of one another, whose runs would say one thing several times.
    """
    left, found = [*points], list[Point]()
    while left and len(found) < count:
        nodes, levels = {one.nodes for one in found}, {one.levels for one in found}
        # The first of those that repeat the least.
        best = min(left, key=lambda point: 2 * (point.nodes in nodes) + (point.levels in levels))
        found.append(best)
        left.remove(best)
    return found


@dataclass(frozen=True)
class Measured:
    """A run of a point, or of no drafts."""

    batch: int
    name: str
    tokens_per_second: float  # while all requests of a group decode
    accept_length: float
    steps: int  # of single requests
    texts: dict[str, int]  # turns by verdict, against those without drafts

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Search:
    """One search over a grid.

    Attributes:
        predictions: of each batch size, all points, the best first.
        plain: tokens a second without drafts, of each batch size, as the calibration measured them.
        costs: of each batch size.
        verified: runs of each batch size.
        seconds: that this process took for each part; what the log held took none.
    """

    def __init__(self, grid: Grid, plan: Plan, source: Source, log: Log, *, progress: bool = True) -> None:
        self.grid, self.plan, self._source, self._log, self._progress = grid, plan, source, log, progress
        self._current = self.method(grid.current)
        self._loaded = source.load(self._current)
        source.derive(NONE, self._current)
        self._plan = replace(plan, methods=(NONE, self._current), baseline=NONE.name)
        self.experiment = Experiment(self._plan, source, log, progress=progress)
        self.predictions: dict[int, list[Prediction]] = {}
        self.plain: dict[int, float] = {}
        self.costs: dict[int, StepCosts] = {}
        self.verified: dict[int, list[Measured]] = {}
        self.seconds: dict[str, float] = {}

    def method(self, point: Point) -> Method:
        return Method(point.name, point.name, draft=point.draft)

    def run(self, best: int) -> None:
        """Measures what the log lacks, predicts all points, and runs of each batch size the `best` best ones that
        differ (`distinct`), the best over all sizes, the current one and none."""
        with self._timed("recording"):
            self.recorded = Recorded(self.experiment, self._loaded, self.grid, self._log, progress=self._progress)
        for batch in self.plan.batch_sizes:
            with self._timed("costs of a step"):
                self.costs[batch], self.plain[batch] = self._measure(batch)
            with self._timed("predicting"):
                found = [predict(point, self._steps(point, batch), self.costs[batch]) for point in self.grid.points]
                self.predictions[batch] = sorted(found, key=lambda one: -one.tokens_per_second)
        with self._timed("running the best"):
            for batch in self.plan.batch_sizes:
                points = distinct([one.point for one in self.predictions[batch]], best)
                self.verified[batch] = self._verify(batch, dict.fromkeys([self.overall(), *points, self.grid.current]))

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - started

    # Measured

    def _measure(self, batch: int) -> tuple[StepCosts, float]:
        key = ("costs", batch)
        if key not in self._log:
            runs: dict[str, list[GroupRun]] = {NONE.name: [], "current": []}
            costs = measure_costs(
                self._loaded, self.grid, batch, self.recorded.context, temperature=self.plan.temperatures[0],
                beside=self._calibration(batch, runs), progress=self._progress,
            )  # fmt: skip
            costs, plain = self._fitted(batch, runs, costs)
            self._log.add(key, {"costs": costs.as_dict(), "plain": plain})
        found = self._log[key]
        return StepCosts.from_dict(found["costs"]), found["plain"]

    def _calibration(self, batch: int, runs: dict[str, list[GroupRun]]) -> list[Callable[[], None]]:
        """A call for each of the first groups of each set, which runs it without drafts and with the current tree, and
        adds to `runs`."""
        experiment, methods = self.experiment, {NONE.name: NONE, "current": self._current}
        contenders = {
            name: EngineContender(self._source.engine(one, experiment.config(batch))) for name, one in methods.items()
        }
        for contender in contenders.values():
            experiment.warm_up(contender, batch)

        def run(group: Sequence[Conversation], first: bool) -> None:
            for name, contender in contenders.items():
                if first:  # of a set
                    contender.forget()
                runs[name].append(experiment.complete(contender, group, self.plan.temperatures[0]))

        return [
            partial(run, group, index == 0)
            for each in experiment.sets.values()
            for index, group in enumerate(groups(each, batch)[:CALIBRATION])
        ]

    def _fitted(self, batch: int, runs: Mapping[str, Sequence[GroupRun]], costs: StepCosts) -> tuple[StepCosts, float]:
        """Costs fitted to the measured steps of the current tree; tokens a second without drafts."""

        def total(name: str, part: str) -> float:
            return float(sum(getattr(window, part) for run in runs[name] for window in run.windows))

        if not total("current", "steps") or not total(NONE.name, "steps"):
            raise ValueError(
                f"--batch-sizes {batch}: no step was seen in which all requests decode; give a larger --max-new-tokens"
            )
        steps = self._steps(self.grid.current, batch, CALIBRATION)
        parts = mean_parts(steps, self.grid.current, costs)
        measured = total("current", "seconds") / total("current", "steps")
        if measured < parts:
            logger.warning(
                "Batch size %d: a step takes %.1f ms in a run, and its parts take %.1f ms when timed alone, as on a "
                "busy machine. The parts are scaled to the run; runs of the best trees decide",
                batch, 1e3 * measured, 1e3 * parts,
            )  # fmt: skip
        return costs.fitted(measured, parts), total(NONE.name, "tokens") / total(NONE.name, "seconds")

    # Predicted

    def _steps(self, point: Point, batch: int, most: int = 0) -> Any:
        widths = step_widths(shaped(point.draft, self._loaded), batch)
        return self.recorded.texts.steps(point, self.recorded.groups(batch, most), widths)

    def overall(self) -> Point:
        """The point with the best speed-up over all batch sizes, as predicted: the largest geometric mean."""
        rates = {batch: {one.point: one for one in each} for batch, each in self.predictions.items()}

        def speed(point: Point) -> float:
            return sum(math.log(max(by[point].tokens_per_second, 1e-9)) for by in rates.values())

        return max(self.grid.points, key=speed)

    # Verified

    def _verify(self, batch: int, points: Mapping[Point, Any]) -> list[Measured]:
        methods = [NONE, *map(self.method, points)]
        for one in methods:
            self._source.derive(one, self._current)
        plan = replace(self._plan, methods=tuple(methods), batch_sizes=(batch,))
        texts = [one.text for one in methods]
        # Other points, as with another --best, are another comparison.
        digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:8]
        log = Log(self._log.folder / f"verified-batch-{batch}-{digest}", {"methods": texts, **self._log.identity})
        experiment = Experiment(plan, self._source, log, progress=self._progress)
        experiment.run()
        rows, samples = experiment.rows()
        whole = results.ALL if len(experiment.sets) > 1 else next(iter(experiment.sets))
        found = []
        for row in rows:
            if row["set"] == whole:
                own = samples[" ".join(str(row[name]) for name in ("set", "temperature", "batch", "method"))]
                rate = results.rate(own, "full_tokens", "full_seconds").value
                steps = row["verify_steps"]
                found.append(Measured(batch, row["method"], rate, row["accept_length"], steps, row["texts"]))
        return found

    # The result

    def recommended(self) -> tuple[DraftOptions, dict[str, float]]:
        """The options that were measured to be the fastest, over all batch sizes by the geometric mean, and the
        speed-up of each method that ran in all of them."""
        speeds: dict[str, float] = {}
        for name in {one.name for one in next(iter(self.verified.values()))}:
            each = [_rate(runs, name) / _rate(runs, NONE.name) for runs in self.verified.values() if _rate(runs, name)]
            if len(each) == len(self.verified):
                speeds[name] = math.exp(sum(map(math.log, each)) / len(each))
        return self.options(max(speeds, key=speeds.__getitem__)), speeds

    def fastest(self, batch: int) -> DraftOptions:
        """The options that were measured to be the fastest at one batch size."""
        return self.options(max(self.verified[batch], key=lambda one: one.tokens_per_second).name)

    def options(self, name: str) -> DraftOptions:
        return next((point.draft for point in self.grid.points if point.name == name), NoDraft())


def _rate(runs: Sequence[Measured], name: str) -> float:
    return next((one.tokens_per_second for one in runs if one.name == name), 0.0)
