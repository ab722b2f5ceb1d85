"""The accept length of a head: the engine decodes held-back prompts with it.

Training accuracy shows how often a head is right on given text. Accept length shows its worth, and reveals a mismatch
between training and serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from specjax.config import HeadConfig
from specjax.drafters import Params, TreeShape, eagle_drafter
from specjax.engine import Engine, SamplingParams
from specjax.engine.config import EngineConfig
from specjax.models.target import Target
from specjax.types import Weights

MAX_ROWS = 16


class Measured(NamedTuple):
    accept_length: float  # emitted tokens / verification forwards, the bonus included
    by_depth: list[float]  # accepted share, at depth d, of drafts whose parent was accepted
    tokens: int
    steps: int


def by_depth(histogram: Sequence[int]) -> list[float]:
    """Steps by number of accepted drafts -> conditional acceptance at each depth reached, from 1."""
    reached = [sum(histogram[d:]) for d in range(len(histogram))]
    return [round(deeper / reached[d], 4) for d, deeper in enumerate(reached[1:]) if reached[d]]


class Measure:
    """One engine for all measurements of a run; each call puts another head into it.

    Args:
        target, params: as they will serve.
        prompts: token ids.
        shape: of the draft trees.
    """

    def __init__(
        self, target: Target, params: Weights, tokenizer: Any, head: HeadConfig, draft: Weights,
        prompts: Sequence[list[int]], *, shape: TreeShape, max_new_tokens: int, eos_ids: tuple[int, ...],
    ) -> None:  # fmt: skip
        rows, longest = min(MAX_ROWS, len(prompts)), max(map(len, prompts)) + max_new_tokens
        config = EngineConfig(
            max_running_requests=rows,
            context_length=min(longest, target.config.max_positions),
            max_total_tokens=rows * (longest + 64 + 4 * shape.nodes),
            random_seed=0,
        )
        drafter = eagle_drafter(target, head, shape)
        self._engine = Engine(target, Params(params, draft), tokenizer, drafter, config=config, eos_ids=eos_ids)
        self._target_params, self._prompts = params, list(prompts)
        self._sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0)

    def __call__(self, draft: Weights) -> Measured:
        self._engine.params = Params(self._target_params, jax.block_until_ready(draft))
        done = self._engine.generate(self._prompts, self._sampling)
        histogram = [sum(bins) for bins in zip(*(one.spec_accept_histogram for one in done), strict=True)]
        steps = sum(histogram)
        emitted = sum(count * (accepted + 1) for accepted, count in enumerate(histogram))
        return Measured(round(emitted / max(steps, 1), 4), by_depth(histogram), emitted, steps)
