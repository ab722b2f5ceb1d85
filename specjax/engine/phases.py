"""A step as three programs, each waited for, to measure drafting, verifying and committing. Slower; for debugging."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from specjax.compiling import compiler_options
from specjax.drafters.base import Drafter, Params
from specjax.engine.outputs import Output, packed
from specjax.models.target import Target
from specjax.step import DecodeState, StepConfig, StepInput, check_phase, commit_phase, draft_phase
from specjax.verify import Verifier


@dataclass
class PhaseTimes:
    """Seconds, over all steps. Reports take differences."""

    steps: int = 0
    draft: float = 0.0  # the drafter's proposal
    verify: float = 0.0  # the target's forward and the walk
    commit: float = 0.0  # pages, rows, and the drafter's `observe`

    def since(self, before: PhaseTimes) -> dict[str, float]:
        """Milliseconds a step, by phase."""
        steps = max(self.steps - before.steps, 1)
        names = ("draft", "verify", "commit")
        return {name: 1e3 * (getattr(self, name) - getattr(before, name)) / steps for name in names}


def compile_in_phases(
    arguments: Any, times: PhaseTimes, *, target: Target, drafter: Drafter, verify: Verifier, config: StepConfig
) -> Any:
    """`speculate_step` for arguments of these shapes, as a function that adds to `times`."""

    propose = partial(draft_phase, drafter=drafter, config=config)
    check = partial(check_phase, target=target, drafter=drafter, verify=verify, config=config)
    finish = partial(packed, commit_phase, drafter=drafter, config=config)
    tree, _ = jax.eval_shape(propose, *arguments)
    checked = jax.eval_shape(check, *arguments, tree)
    jit = partial(jax.jit, compiler_options=compiler_options())
    draft = jit(propose, donate_argnums=1).lower(*arguments).compile()
    check_program = jit(check).lower(*arguments, tree).compile()
    commit = jit(finish, donate_argnums=1).lower(*arguments, tree, checked).compile()

    def timed(name: str, program: Callable[..., Any], *given: Any) -> Any:
        started = time.perf_counter()
        result = jax.block_until_ready(program(*given))
        setattr(times, name, getattr(times, name) + time.perf_counter() - started)
        return result

    def step(params: Params, state: DecodeState, inputs: StepInput) -> tuple[DecodeState, Output]:
        jax.block_until_ready(state)
        times.steps += 1
        tree, state = timed("draft", draft, params, state, inputs)
        checked = timed("verify", check_program, params, state, inputs, tree)
        return timed("commit", commit, params, state, inputs, tree, checked)

    return step
