"""The optimiser by name, its schedule and clipping."""

from __future__ import annotations

from typing import Any

import optax
from optax.contrib import MuonDimensionNumbers, muon

from specjax.types import Weights

OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("cosine", "linear", "constant")

MUON_AXES: dict[str, MuonDimensionNumbers] = {
    "fc": MuonDimensionNumbers((0,), (1,)),
    "qkv": MuonDimensionNumbers((0,), (1, 2, 3)),
    "output": MuonDimensionNumbers((0, 1, 2), (3,)),
    "gate_up": MuonDimensionNumbers((0,), (1, 2)),
    "down": MuonDimensionNumbers((0,), (1,)),
}
"""Input and output axes of the matrices that Muon orthogonalises. Norms, biases, embedding and the language model head
get Adam, as its authors advise."""

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
    name: str,
    rate: optax.Schedule,
    *,
    beta1: float,
    beta2: float,
    weight_decay: float,
    clip_norm: float,
    clip_value: float,
) -> optax.GradientTransformation:
    """Clips by global norm, then by value (0: not at all). Only matrices decay; under Muon, those that it handles."""

    def matrices(params: Weights) -> dict[str, bool]:
        return {name: leaf.ndim > 1 and not name.endswith("bias") for name, leaf in params.items()}

    if name == "adamw":
        core = optax.adamw(rate, b1=beta1, b2=beta2, weight_decay=weight_decay, mask=matrices)
    else:

        def axes(params: Any) -> Any:  # pytrees, of which optax has types of its own
            return {name: MUON_AXES.get(name) for name in params}

        core = muon(
            rate,
            beta=0.95,
            weight_decay=weight_decay,
            adam_b1=beta1,
            adam_b2=beta2,
            muon_weight_dimension_numbers=axes,
            consistent_rms=MUON_RMS,
        )
    clips = [optax.clip_by_global_norm(clip_norm)] if clip_norm else []
    clips += [optax.clip(clip_value)] if clip_value else []
    return optax.chain(*clips, core)
