"""The optimiser by name, its schedule and clipping."""

from __future__ import annotations

from typing import Any

import optax
from optax.contrib import MuonDimensionNumbers, muon

from specjax.models.params import Table
from specjax.types import Weights

OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("cosine", "linear", "constant")

MUON_RMS = 0.2
"""Muon's updates are scaled to this root mean square, which is about Adam's: one learning rate then suits both
(Moonlight, arXiv 2502.16982)."""


def schedule(name: str, learning_rate: float, *, steps: int, warmup: int, final: float) -> optax.Schedule:
    """Linear warm-up from 0, then down to `final` times the peak at `steps`."""
    rest = max(steps - warmup, 1)
    decay = {
        "cosine": optax.cosine_decay_schedule(learning_rate, rest, alpha=final),
        "linear": optax.linear_schedule(learning_rate, learning_rate * final, rest),
        "constant": optax.constant_schedule(learning_rate),
    }[name]
    # The first update has rate / warm-up and not 0, which would be a step for nothing.
    return optax.join_schedules(
        [optax.linear_schedule(learning_rate / max(warmup, 1), learning_rate, max(warmup - 1, 1)), decay], [warmup]
    )


def make_optimizer(
    name: str, rate: optax.Schedule, table: Table, *,
    beta1: float, beta2: float, weight_decay: float, clip_norm: float, clip_value: float,
) -> optax.GradientTransformation:  # fmt: skip
    """Clips by global norm, then by value (0: not at all).

    Matrices and the embedding decay, norms and biases do not. Muon orthogonalises matrices, and only these decay;
    norms, biases, embedding and output layer get Adam, as Muon's authors advise.

    Args:
        table: declares the parameters.
    """
    leaves = {leaf.name: leaf for scope in table for leaf in scope.leaves}

    def decays(params: Weights) -> dict[str, bool]:
        return {name: leaves[name].init == "normal" for name in params}

    def axes(params: Any) -> Any:  # pytrees, of which optax has types of its own
        matrices = {name: leaf.matrix for name, leaf in leaves.items() if "vocab" not in leaf.axes}
        return {name: MuonDimensionNumbers(*found) if (found := matrices.get(name)) else None for name in params}

    if name == "adamw":
        core = optax.adamw(rate, b1=beta1, b2=beta2, weight_decay=weight_decay, mask=decays)
    else:
        core = muon(
            rate, beta=0.95, weight_decay=weight_decay, adam_b1=beta1, adam_b2=beta2,
            muon_weight_dimension_numbers=axes, consistent_rms=MUON_RMS,
        )  # fmt: skip
    clips = [optax.clip_by_global_norm(clip_norm)] if clip_norm else []
    clips += [optax.clip(clip_value)] if clip_value else []
    return optax.chain(*clips, core)
