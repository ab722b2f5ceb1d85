"""What training asks of a draft, whatever its kind: a head (`head`) or a model of its own (`student`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from specjax.checkpoint import ModelFiles
from specjax.config import ModelConfig
from specjax.drafters import Drafter, Standalone, TreeShape
from specjax.models.head_spec import ALGORITHMS
from specjax.models.params import Table
from specjax.models.target import Target
from specjax.train.data import Rows
from specjax.train.options import LossSettings
from specjax.train.unroll import Loss, Objective, Teacher
from specjax.types import Weights


@dataclass(frozen=True)
class DraftSource:
    """The target that a draft is trained for, except its weights."""

    files: ModelFiles
    tokenizer: Any
    config: ModelConfig  # in the serving dtype
    eos_ids: tuple[int, ...]


@runtime_checkable
class Draft(Protocol):
    """A draft in training, made before data and weights are read, so that wrong settings are refused early.

    Trained weights are a flat dict of float32 leaves; `table` declares them, by "scope/name" where a scope has a name.
    """

    files: frozenset[str]  # that its exported folder may hold
    table: Table
    features: Any  # which outputs of the target it reads; see `specjax.drafters.base.Drafter`
    feature_size: int  # F, their width

    def __init__(self, options: Any, source: DraftSource) -> None:
        """Raises ValueError or CheckpointError: a setting is wrong, or not for this kind."""
        ...

    def choose_vocabulary(self, rows: Rows) -> dict[str, Any]:
        """Look at the data once; returns facts for the log and the model card."""
        ...

    def first_params(self, target_params: Weights) -> Weights:
        """What training begins with, float32."""
        ...

    def split(self, params: Weights, first: Callable[[], tuple[Teacher, Rows]]) -> tuple[Weights, Weights]:
        """Trained and frozen leaves of the first parameters. `first`: the target's outputs for the first batch."""
        ...

    def loss(self, target: Target) -> Loss:
        """The loss in the training dtype; called after `split`."""
        ...

    def exported(self, weights: Weights, frozen: Weights) -> Weights:
        """The draft's parameters, of which `export` writes the rounded ones and `served` makes `Params.draft`."""
        ...

    def served(self, params: Any, *dtypes: str) -> Any:
        """`Params.draft`, converted to each of the dtypes in turn."""
        ...

    def drafter(self, target: Target, shape: TreeShape) -> Drafter: ...

    @property
    def title(self) -> str:
        """What it is, for the model card."""
        ...

    @property
    def description(self) -> str:
        """Its size and what reads it, for the model card."""
        ...

    def export(self, folder: Path, params: Weights, card: str) -> Path: ...


TRAINING = {name: spec.training for name, spec in ALGORITHMS.items()} | {
    Standalone.algorithm: {"loss": "cross_entropy", "weights": (1.0,)}
}
"""Fields of the `Objective` of each kind, where a setting is not given."""


def objective(algorithm: str, settings: LossSettings) -> Objective:
    """What is minimised; settings that are not given are as the kind's authors train it. ValueError: wrong weights."""
    default = Objective(**TRAINING[algorithm])
    first, given = default.weights[0], " ".join(settings.round_weights)
    try:
        weights = tuple(map(float, settings.round_weights))
    except ValueError:
        raise ValueError(f"--round-weights must be numbers, got {given}") from None
    if any(not 0 <= weight < float("inf") for weight in weights):
        raise ValueError(f"--round-weights must be at least 0, got {given}")
    if weights and not any(weights):
        raise ValueError("--round-weights must not all be 0: nothing would be learnt")
    rounds = settings.rounds or len(weights or default.weights)
    if not weights:
        usual = default.weights[:rounds] if len(default.weights) > 1 else ()
        weights = (*usual, *(first * 0.8**j for j in range(len(usual), rounds)))
    if len(weights) != rounds:
        raise ValueError(f"--round-weights gives {len(weights)} weights for {rounds} --rounds; give one each")
    scale = 1.0 if settings.loss_weight is None else settings.loss_weight / first
    changes = {"loss": settings.loss, "regression": settings.regression_weight, "noise": settings.feature_noise}
    return default._replace(
        weights=tuple(weight * scale for weight in weights),
        temperature=settings.teacher_temperature,
        **{name: value for name, value in changes.items() if value is not None},
    )
