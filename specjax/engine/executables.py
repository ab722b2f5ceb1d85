"""The executables of an engine: what each program computes, for arguments of which shapes, and how it is compiled."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from specjax_kernels.cpu import object_code
from specjax_kernels.platforms import of_default_device

from specjax.cache import pool_shape
from specjax.checkpoint.files import default_cache_dir
from specjax.compiling import compiler_options
from specjax.drafters.base import Drafter, Params
from specjax.engine.arrays import (
    Output,
    Resident,
    admission_size,
    admit_packed,
    packed,
    unpack_prefill,
    unpack_step,
)
from specjax.engine.buckets import Buckets
from specjax.engine.grammar_steps import constrained_size, constrained_step, propose_step, unpack_constrained
from specjax.engine.keys import PLAIN, Key
from specjax.engine.programs import Program, Programs
from specjax.models.target import Target
from specjax.sharding import everywhere, under
from specjax.state import DecodeState
from specjax.step import (
    StepConfig,
    check_phase,
    commit_phase,
    draft_phase,
    prefill_step,
    speculate_step,
)
from specjax.verify import Verifier, verify_tree


def use_compilation_cache() -> None:
    """Keeps compiled programs in `default_cache_dir`, so that a second start compiles nothing. Respects JAX's own
    settings."""
    folder = default_cache_dir()
    object_code.keep_in(folder / "kernels")
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(folder / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


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


class Executables(Programs):
    """The programs of an engine.

    Attributes:
        new_pages: most pages that a row may get between two steps.
        room: bytes of the device that a program may hold beside its arguments; None: not known. A program that needs
            more fails when it is compiled, so that smaller ones serve, not when a large batch first runs.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        buckets: Buckets,
        params: Params,
        state: Resident,
        *,
        new_pages: int,
        room: int | None = None,
        verify: Verifier = verify_tree,
        trace: bool = False,
        time_phases: bool = False,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(buckets)
        self._target, self._drafter, self._trace = target, drafter, trace
        self._verify, self._room = verify, room
        self.phase_times = PhaseTimes() if time_phases else None
        self._mesh = mesh

        def shape(leaf: Any) -> jax.ShapeDtypeStruct:
            where = None if mesh is None else leaf.sharding
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        self._params, self._state = jax.tree.map(shape, (params, state))
        self.state_shapes: DecodeState = self._state.decode
        self.new_pages, self._pages = new_pages, pool_shape(state.decode.cache).pages
        self._admit: dict[bool, Callable[..., Resident]] = {}

    def admit(self, *, resumed: bool) -> Callable[[Resident, np.ndarray], Resident]:
        """Puts a packed `admission` into the state, which it takes over. `resumed`: whether it has emitted tokens.
        Compiled at the first use or by `warm_up`."""
        if resumed in self._admit:
            return self._admit[resumed]
        rows, finished = self.state_shapes.rows, self.state_shapes.finished
        row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), rows)
        packed = self._input((admission_size(row, resumed=resumed),))
        arguments = (rows, finished, packed)
        places: dict[str, Any] = {} if self._mesh is None else {"out_shardings": everywhere(self._mesh)}
        with self.launch_lock if self._exclusive else contextlib.nullcontext(), under(self._mesh):
            program = jax.jit(admit_packed, donate_argnums=(0, 1), **places).lower(*arguments).compile()

        def admit(state: Resident, packed: np.ndarray) -> Resident:
            rows, finished = program(state.decode.rows, state.decode.finished, packed)
            return state._replace(decode=state.decode._replace(rows=rows, finished=finished))

        self._admit[resumed] = admit
        return admit

    def _compile(self, key: Key) -> Program:
        if not self._exclusive:
            self.announce(key)
        function, unpack, shape = self._function(key)
        arguments: Any = (self._params, self._state, self._input(shape))
        if self.phase_times is not None and key.kind == "step":
            with self.launch_lock:
                return _compile_in_phases(arguments, unpack, self.phase_times, **function.keywords)
        leaves, tree = jax.tree.flatten(arguments)
        count = len(jax.tree.leaves(self._params))

        def flat(params: list[Any], state: list[Any], inputs: Any) -> Any:
            given = jax.tree.unflatten(tree, [*params, *state, inputs])
            new, output = _from_packed(function, unpack, key, *given)
            return jax.tree.leaves(new), output

        flat.__name__ = flat.__qualname__ = key.kind
        places: Any = {}
        if self._mesh is not None:
            places["out_shardings"] = [leaf.sharding for leaf in leaves[count:-1]], everywhere(self._mesh)
        jitted = jax.jit(flat, donate_argnums=1, compiler_options=compiler_options(), **places)
        with self._bar(key) as bar, under(self._mesh), of_default_device():
            lowered = jitted.lower(leaves[:count], leaves[count:-1], leaves[-1])
            with self._device_idle() if self._exclusive else contextlib.nullcontext():
                if self._exclusive:  # with the lock, so that all processes compile between the same launches
                    self.announce(key)
                program: Any = lowered.compile()
            bar.update()
        if self._room is not None and (temporaries := program.memory_analysis().temp_size_in_bytes) > self._room:
            raise MemoryError(
                f"{key} needs {temporaries / 1e9:.3f} GB beside its arguments, and {self._room / 1e9:.3f} GB are left "
                "beside weights and KV pool; give a lower EngineConfig.mem_fraction or fewer max_total_tokens"
            )
        return program

    def _input(self, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        """What the host sends, to every device."""
        where = None if self._mesh is None else everywhere(self._mesh)
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=where)

    def _function(self, key: Key) -> tuple[partial[Any], partial[Any], tuple[int, int]]:
        """What a key's program computes, what unpacks its input, and that input's shape."""
        tables: dict[str, Any] = {"width": key.table, "pages": self._pages}
        drafter = self._drafter
        fixed: dict[str, Any] = {"target": self._target}
        if key.kind in ("prefill", "scoring"):
            shape, unpack = (key.rows, 3 + key.width + key.table), partial(unpack_prefill, **tables)
            function, config = prefill_step, StepConfig(prompt_logprobs=key.kind == "scoring", tokens=key.tokens)
        else:
            widths = self._buckets.step_widths(key)
            drafter = drafter.within(widths[-1])
            if key.nodes == PLAIN and drafter.costly_observe:  # its requests never draft
                drafter = drafter._replace(features=None, observe=lambda params, state, context, seen: state)
            fixed |= {"verify": self._verify}
            shape, unpack = (key.width, 2 + self.new_pages), partial(unpack_step, **tables)
            function, config = speculate_step, StepConfig(widths, self._trace)
            if key.kind == "propose":
                function, fixed = propose_step, {}
            elif key.kind == "constrained":
                vocab_size, nodes = self._target.config.vocab_size, widths[-1]
                shape = (key.width, constrained_size(self.new_pages, nodes, vocab_size))
                unpack = partial(unpack_constrained, **tables, new_pages=self.new_pages, nodes=nodes)
                function = constrained_step
        return partial(function, **fixed, drafter=drafter, config=config), unpack, shape


def _from_packed(
    function: Callable[..., Any], unpack: Callable[..., Any], key: Key, params: Params, state: Resident, inputs: Any
) -> tuple[Resident, Output]:
    """A program whose input and output are packed, to be traced. A proposal packs its own output."""
    given, tables = unpack(inputs, state.tables)
    call = function if key.kind == "propose" else partial(packed, function)
    decode, output = call(params, state.decode, given)
    return Resident(decode, tables), output


def _compile_in_phases(
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

    def timed(name: str, program: Callable[..., Any], *given: Any) -> Any:
        started = time.perf_counter()
        result = jax.block_until_ready(program(*given))
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
