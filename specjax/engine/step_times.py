"""How long steps take, by batch bucket and tree: what was measured, else what the cost model predicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from specjax_kernels import Quantised

from specjax import devices
from specjax.config import HeadConfig, MtpConfig
from specjax.costs import PLAIN, AcceptLength, Decoding, Machine, Tree, machine, step_cost
from specjax.drafters.base import Drafter, Params
from specjax.models.params import Bits
from specjax.models.target import Target
from specjax.outline import Outline


def tree_of(drafter: Drafter) -> Tree:
    """The tree that a drafter mostly proposes."""
    typical = drafter.typical or drafter
    return PLAIN if drafter.width == 1 else Tree(typical.depth, typical.topk, typical.width)


def stored_bits(params: Any) -> Bits | None:
    """How a model's matrices are quantised, on average; None: they have its dtype."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda leaf: isinstance(leaf, Quantised))
    few = [(getattr(path[-1], "key", None), leaf) for path, leaf in leaves if isinstance(leaf, Quantised)]
    if not few:
        return None
    names, stored = {name for name, _ in few}, jax.tree.leaves([leaf for _, leaf in few])
    weights = sum(math.prod(leaf.shape) for _, leaf in few)
    bits = 8 * sum(leaf.size * leaf.dtype.itemsize for leaf in stored)
    return Bits(bits / weights, bool(names & {"embed", "head"}), "embed" in names)


def predictions(
    target: Target, params: Params, drafter: Drafter, draft_model: HeadConfig | MtpConfig | Target | None, kind: str
) -> tuple[Decoding, Machine] | None:
    """What `StepTimes` predicts from, on a device with the driver's name `kind`; None: it is none of the known ones, or
    the target is of no known family.

    Args:
        draft_model: the head, layers or model that drafts.
    """
    if (device := devices.named(kind)) is None:
        return None
    model = draft_model if isinstance(draft_model, Target) else None
    head = None if isinstance(draft_model, Target) else draft_model
    bits = stored_bits(params.target), stored_bits(params.draft)
    described = Outline(target, params, drafter, head, model, *bits, headers=True)
    try:
        return Decoding.of(described), machine(device, target.config.dtype, "gpu")
    except ValueError:  # a target of the user's own declares no layers
        return None


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of a step.

    Attributes:
        measured: batch bucket -> tree (`PLAIN`: none) -> milliseconds, of this device.
        predicted: the same for all that was not measured, from the cost model; None: nothing is predicted.
    """

    measured: Mapping[int, Mapping[Tree, float]] = field(default_factory=dict)
    predicted: tuple[Decoding, Machine] | None = None

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
