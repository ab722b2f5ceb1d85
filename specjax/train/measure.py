"""The accept length of a head: the engine decodes held-back prompts with it.

Training accuracy shows how often a head is right on given text. Accept length shows its worth, and reveals a mismatch
between training and serving.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import jax

from specjax.drafters import Params, TreeShape, eagle_drafter
from specjax.engine import Engine, SamplingParams
from specjax.engine.config import EngineConfig
from specjax.models import make_target
from specjax.train.inputs import Inputs
from specjax.train.options import MeasureSettings
from specjax.types import Weights

MAX_ROWS = 16


class Measured(NamedTuple):
    accept_length: float  # emitted tokens / verification forwards, the bonus included
    by_depth: list[float]  # accepted share, at depth d, of drafts whose parent was accepted
    tokens: int
    steps: int


class Measure:
    """One engine for all measurements of a run; each call puts another head into it.

    Args:
        target_params, draft: parameters in the serving dtype.
        prompts: token ids.
    """

    def __init__(
        self, settings: MeasureSettings, inputs: Inputs, target_params: Weights, draft: Weights,
        prompts: list[list[int]],
    ) -> None:  # fmt: skip
        shape = TreeShape(settings.measure_steps, 1, settings.measure_steps + 1)
        rows, longest = min(MAX_ROWS, len(prompts)), max(map(len, prompts)) + settings.measure_tokens
        config = EngineConfig(
            max_running_requests=rows,
            context_length=min(longest, inputs.config.max_positions),
            max_total_tokens=rows * (longest + 64 + 4 * shape.nodes),
            random_seed=0,
        )
        target = make_target(inputs.config)
        drafter = eagle_drafter(target, replace(inputs.head, dtype=inputs.config.dtype), shape)
        self._target_params, self._prompts = target_params, prompts
        self._engine = Engine(
            target, Params(target_params, draft), inputs.tokenizer, drafter, config=config, eos_ids=inputs.eos_ids
        )
        self._sampling = SamplingParams(max_new_tokens=settings.measure_tokens, temperature=0.0)

    def __call__(self, draft: Weights) -> Measured:
        self._engine.params = Params(self._target_params, jax.block_until_ready(draft))
        done = self._engine.generate(self._prompts, self._sampling)
        # Steps by number of accepted drafts; and those that accepted at least so many.
        histogram = [sum(bins) for bins in zip(*(one.spec_accept_histogram for one in done), strict=True)]
        reached = [sum(histogram[depth:]) for depth in range(len(histogram))]
        by_depth = [round(deeper / before, 4) for before, deeper in pairwise(reached) if before]
        steps, emitted = sum(histogram), sum(reached)
        return Measured(round(emitted / max(steps, 1), 4), by_depth, emitted, steps)
