"""How long steps take, by batch bucket and tree: what was measured, else what the cost model predicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from specjax.costs import PLAIN, AcceptLength, Decoding, Machine, Tree, step_cost
from specjax.drafters.base import Drafter
from specjax.engine.tuning import Tuning

STEP_TIMES = "step times, batch "


def tree_of(drafter: Drafter) -> Tree:
    """The tree that a drafter proposes."""
    return PLAIN if drafter.width == 1 else Tree(drafter.depth, drafter.topk, drafter.width)


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of a step.

    Attributes:
        measured: batch bucket -> tree (`PLAIN`: none) -> milliseconds, of this device.
        predicted: the same for all that was not measured, from the cost model; None: nothing is predicted.
    """

    measured: Mapping[int, Mapping[Tree, float]] = field(default_factory=dict)
    predicted: tuple[Decoding, Machine] | None = None

    @classmethod
    def of(cls, tuning: Tuning | None, model: Decoding | None = None, on: Machine | None = None) -> StepTimes:
        """The step times of a record, and predictions for a model on a machine where both are given."""
        measured: dict[int, dict[Tree, float]] = {}
        for name, result in (tuning.named("steps") if tuning else {}).items():
            if name.startswith(STEP_TIMES) and result.seconds is not None:
                measured[int(name.removeprefix(STEP_TIMES))] = {
                    Tree(*tree): 1e3 * score * result.seconds for tree, score in result.tried if score is not None
                }
        return cls(measured, None if model is None or on is None else (model, on))

    def milliseconds(self, batch: int, tree: Tree = PLAIN, *, context: int = 1024) -> float | None:
        """Of a step of `batch` requests; None: neither measured nor predicted.

        A prediction is scaled by what measurements were of their predictions: of the same bucket where there are some,
        else of all.
        """
        if (known := self.measured.get(batch, {}).get(tree)) is not None:
            return known
        if self.predicted is None:
            return None
        near = {batch: self.measured[batch]} if self.measured.get(batch) else self.measured
        ratios = [
            math.log(taken / self._predict(size, one, context))
            for size, trees in near.items()
            for one, taken in trees.items()
        ]
        scale = math.exp(sum(ratios) / len(ratios)) if ratios else 1.0
        return scale * self._predict(batch, tree, context)

    def best(self, batch: int, trees: Iterable[Tree], accept: AcceptLength, *, context: int = 1024) -> Tree:
        """The tree with the most tokens a second for a batch, of those whose time is known and of none at all
        (`PLAIN`); of equal ones the earliest, and `PLAIN` before all. `accept`: tokens that a request emits in a step
        of a tree."""
        rates = {
            tree: (1.0 if tree == PLAIN else accept(tree)) / taken
            for tree in (PLAIN, *trees)
            if (taken := self.milliseconds(batch, tree, context=context)) is not None
        }
        return max(rates, key=rates.__getitem__, default=PLAIN)

    def _predict(self, batch: int, tree: Tree, context: int) -> float:
        assert self.predicted is not None
        model, on = self.predicted
        return 1e3 * step_cost(model, on, batch=batch, tree=tree, context=context).seconds
