"""Where a step's time goes: the same step as three programs, each waited for. For debugging: it costs what it shows.

A step is one program otherwise, which nothing can look into from outside.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from specjax.compiling import compiler_options
from specjax.drafters.base import Drafter, Params
from specjax.models.protocol import Target
from specjax.step import DecodeState, StepConfig, StepInput, StepOutput, check_phase, commit_phase, draft_phase


@dataclass
class PhaseTimes:
    """Seconds, over all steps. Whoever reports takes differences."""

    steps: int = 0
    draft: float = 0.0  # the drafter's proposal
    verify: float = 0.0  # the target's forward and the walk
    commit: float = 0.0  # pages, rows, and what the drafter makes of the tokens that became certain

    def since(self, before: PhaseTimes) -> dict[str, float]:
        """Milliseconds a step, by phase."""
        steps = max(self.steps - before.steps, 1)
        return {
            name: 1e3 * (getattr(self, name) - getattr(before, name)) / steps for name in ("draft", "verify", "commit")
        }


def compile_in_phases(
    target: Target,
    drafter: Drafter,
    config: StepConfig,
    shapes: tuple[Params, DecodeState, StepInput],
    times: PhaseTimes,
    finish: Callable[[StepOutput], Any],
) -> Callable[[Params, DecodeState, StepInput], tuple[DecodeState, Any]]:
    """`speculate_step`, and `finish` of its output, as a function that adds to `times`."""
    params, state, inputs = shapes

    def last(params: Params, state: DecodeState, inputs: StepInput, tree: Any, checked: Any) -> Any:
        state, output = commit_phase(params, state, inputs, tree, checked, drafter=drafter, config=config)
        return state, finish(output)

    propose = partial(draft_phase, drafter=drafter, config=config)
    check = partial(check_phase, target=target, drafter=drafter, config=config)
    tree, _ = jax.eval_shape(propose, params, state, inputs)
    checked = jax.eval_shape(check, params, state, inputs, tree)
    jit = partial(jax.jit, compiler_options=compiler_options())
    first_program = jit(propose, donate_argnums=1).lower(params, state, inputs).compile()
    second_program = jit(check).lower(params, state, inputs, tree).compile()
    third_program = jit(last, donate_argnums=1).lower(params, state, inputs, tree, checked).compile()

    def step(params: Params, state: DecodeState, inputs: StepInput) -> tuple[DecodeState, Any]:
        jax.block_until_ready(state)
        started = time.perf_counter()
        tree, state = jax.block_until_ready(first_program(params, state, inputs))
        drafted = time.perf_counter()
        checked = jax.block_until_ready(second_program(params, state, inputs, tree))
        verified = time.perf_counter()
        result = jax.block_until_ready(third_program(params, state, inputs, tree, checked))
        times.steps += 1
        times.draft += drafted - started
        times.verify += verified - drafted
        times.commit += time.perf_counter() - verified
        return result

    return step
