"""The speed of a draft tree, predicted without running it.

    tokens/s  =  batch * accept length / (draft time + verify time + the rest of a step)

    accept length   replayed: one recorded run of each variant says what a tree of any shape accepts at each position
                    of each text (`specjax.bench.replay`). At temperature 0 and batch size 1 it is what a run would
                    count, exactly, but for near ties of the target's logits in products of another width
    draft time      measured once for each variant and number of levels (`specjax.bench.step_costs`)
    verify time     measured once for each number of nodes
    the rest        committing, measured by depth; and what a run of the current tree took beyond the sum of its parts.
                    If the parts took longer than the run, they are scaled to it instead

N-gram trees differ in size from step to step, and a step checks the narrowest of its compiled widths that holds the
largest tree. So the texts of a batch are replayed side by side, step by step, until the first one ends, and each step
has the cost of its width.

What is not exact: levels and node counts between measured ones are interpolated; the parts were measured behind one
context, the mean one; and n-grams of a batch are replayed as if its requests had run one after another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from specjax.bench.grid import Point
from specjax.bench.replay import Candidacy, Recording
from specjax.bench.results import accept_length, add_histograms
from specjax.bench.step_costs import StepCosts
from specjax.drafters import Drafter
from specjax.engine.buckets import Buckets


class Steps(NamedTuple):
    """Steps of a point, replayed."""

    widths: Counter[int]  # by nodes that are checked
    tokens: int  # emitted by all requests
    histogram: list[int]  # steps of single requests by drafts accepted

    @property
    def number(self) -> int:
        return self.widths.total()


@dataclass(frozen=True)
class Prediction:
    """Of a point at one batch size. `step`: mean seconds."""

    point: Point
    batch: int
    accept_length: float
    step: float
    tokens_per_second: float

    def as_dict(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            **self.point.numbers,
            "accept_length": round(self.accept_length, 4),
            "step_ms": round(1e3 * self.step, 4),
            "tokens_per_second": round(self.tokens_per_second, 3),
        }


def step_widths(drafter: Drafter, batch: int, platform: str | None = None) -> tuple[int, ...]:
    """Tree widths that the engine's step of a full batch chooses among."""
    buckets = Buckets.build(platform or jax.default_backend(), drafter, rows=batch, request_pages=1)
    return buckets.tree_widths(batch)


class Texts:
    """Recorded texts, in groups that would run together, and what is known of them by variant.

    Args:
        recordings: variant -> texts, in the same order.
    """

    def __init__(self, recordings: Mapping[str, Sequence[tuple[Recording, int]]]) -> None:
        self._known = {name: [Candidacy(*one) for one in texts] for name, texts in recordings.items()}
        self._counted: dict[Any, Steps] = {}

    def steps(self, point: Point, groups: Iterable[Sequence[int]], widths: Sequence[int]) -> Steps:
        """A point's steps of groups of texts, each until the first of the group ends.

        Args:
            groups: indices of texts.
            widths: see `step_widths`.
        """
        groups = tuple(map(tuple, groups))
        key = point, groups, tuple(widths)
        if key not in self._counted:
            known = self._known[point.variant]
            every = {i: known[i].outcomes(point.levels, point.nodes) for group in groups for i in group}
            lists = {i: [each.tolist() for each in outcome] for i, outcome in every.items()}
            parts = [_together([(known[i].tokens - 1, lists[i]) for i in group], point.levels) for group in groups]
            checked: Counter[int] = Counter()
            for part in parts:
                for nodes, count in part.widths.items():
                    checked[next((width for width in widths if width >= nodes), widths[-1])] += count
            histogram = add_histograms(part.histogram for part in parts)
            self._counted[key] = Steps(checked, sum(part.tokens for part in parts), histogram)
        return self._counted[key]


def _together(texts: Sequence[tuple[int, list[list[int]]]], most: int) -> Steps:
    """Steps of texts that run side by side, each given by its tokens to emit and its outcomes.

    `most`: drafts that a step can accept.
    """
    places = [0] * len(texts)
    widths: Counter[int] = Counter()
    histogram, tokens = [0] * (most + 1), 0
    while all(place < last for place, (last, _) in zip(places, texts, strict=True)):
        nodes = 1
        for row, (last, (accepted, valid)) in enumerate(texts):
            place = places[row]
            nodes = max(nodes, valid[place])
            emitted = min(accepted[place] + 1, last - place)
            histogram[emitted - 1] += 1
            tokens += emitted
            places[row] += emitted
        widths[nodes] += 1
    return Steps(widths, tokens, histogram)


def mean_parts(steps: Steps, point: Point, costs: StepCosts) -> float:
    """Mean seconds of a step, by the costs of its parts."""
    taken = sum(
        count * costs.seconds(point.variant, point.levels, nodes, point.depth) for nodes, count in steps.widths.items()
    )
    return taken / max(steps.number, 1)


def predict(point: Point, steps: Steps, costs: StepCosts) -> Prediction:
    """The speed of a point whose steps were replayed, in tokens a second of the whole batch."""
    step = mean_parts(steps, point, costs)
    rate = steps.tokens / (step * steps.number) if steps.number else 0.0
    return Prediction(point, costs.batch, accept_length(steps.histogram), step, rate)
