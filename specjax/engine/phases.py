"""Steps whose three phases are timed, for `EngineConfig.time_phases`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from specjax.compiling import compiler_options
from specjax.drafters.base import Drafter
from specjax.engine.arrays import Output, Resident, packed
from specjax.engine.device import Program
from specjax.models.target import Target
from specjax.step import StepConfig, check_phase, commit_phase, draft_phase
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
    arguments: Any,
    unpack: Callable[..., Any],
    times: PhaseTimes,
    *,
    target: Target,
    drafter: Drafter,
    verify: Verifier,
    config: StepConfig,
) -> Program:
    """`speculate_step` for arguments of these shapes, as a function that adds to `times`."""

    params, state, inputs = arguments
    trees = jax.tree.structure(params), jax.tree.structure(state)
    propose = partial(draft_phase, drafter=drafter, config=config)
    check = partial(check_phase, target=target, drafter=drafter, verify=verify, config=config)
    finish = partial(packed, commit_phase, drafter=drafter, config=config)
    jit = partial(jax.jit, compiler_options=compiler_options())
    unpacked = jit(unpack, donate_argnums=1).lower(inputs, state.tables).compile()
    arguments = (params, state.decode, jax.eval_shape(unpack, inputs, state.tables)[0])
    tree, _ = jax.eval_shape(propose, *arguments)
    checked = jax.eval_shape(check, *arguments, tree)
    draft = jit(propose, donate_argnums=1).lower(*arguments).compile()
    check_program = jit(check).lower(*arguments, tree).compile()
    commit = jit(finish, donate_argnums=1).lower(*arguments, tree, checked).compile()

    def timed(name: str, program: Callable[..., Any], *inputs: Any) -> Any:
        started = time.perf_counter()
        result = jax.block_until_ready(program(*inputs))
        setattr(times, name, getattr(times, name) + time.perf_counter() - started)
        return result

    def step(params_leaves: list[Any], leaves: list[Any], packed: np.ndarray) -> tuple[list[Any], Output]:
        params, state = map(jax.tree.unflatten, trees, (params_leaves, leaves))
        jax.block_until_ready(state)
        times.steps += 1
        inputs, tables = unpacked(packed, state.tables)
        tree, decode = timed("draft", draft, params, state.decode, inputs)
        checked = timed("verify", check_program, params, decode, inputs, tree)
        decode, output = timed("commit", commit, params, decode, inputs, tree, checked)
        return jax.tree.leaves(Resident(decode, tables)), output

    return step
