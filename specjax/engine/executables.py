"""The executables of an engine: a dictionary of programs, each compiled once, on demand or ahead of use."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from specjax_kernels.cpu import attention as cpu_attention
from specjax_kernels.cpu import object_code
from tqdm import tqdm

from specjax.cache import pool_shape
from specjax.checkpoint.files import default_cache_dir
from specjax.compiling import compiler_options
from specjax.drafters.base import Drafter, Params
from specjax.drafters.deferred import Deferred
from specjax.engine import program_store
from specjax.engine.buckets import JUMP, Buckets, Key
from specjax.engine.constrained import constrained_size, constrained_step, propose_step, unpack_constrained
from specjax.engine.packing import (
    Resident,
    admission_size,
    admit_packed,
    unpack_catch_up,
    unpack_prefill,
    unpack_step,
)
from specjax.engine.transfers import Output, packed, packed_lag
from specjax.models.target import Target
from specjax.progress import progress_bar
from specjax.state import DecodeState
from specjax.step import (
    StepConfig,
    catch_up_step,
    check_phase,
    commit_phase,
    draft_phase,
    prefill_step,
    speculate_step,
)
from specjax.verify import Verifier, verify_tree

logger = logging.getLogger(__name__)

Program: TypeAlias = Callable[[list[Any], list[Any], np.ndarray], tuple[list[Any], Output]]
"""(leaves of params, leaves of the state, packed input) -> (leaves of the next state, output). Donates the state."""


def use_compilation_cache() -> None:
    """Keeps compiled programs in `default_cache_dir`, so that a second start compiles nothing. Respects JAX's own
    settings."""
    folder = default_cache_dir()
    object_code.keep_in(folder / "kernels")
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(folder / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        program_store.keep_in(folder / "programs")


class Unavailable(RuntimeError):
    """No executable that could run some requests can be compiled or has room to run."""


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


class Executables:
    """Programs by key, compiled at most once. Safe to call from several threads.

    A key whose compilation fails, or that runs out of memory, is remembered and logged once; `first_usable` then takes
    another size.

    Attributes:
        new_pages: most pages that a row may get between two steps.
        room: bytes of the device that a program may hold beside its arguments; None: not known. A program that needs
            more fails when it is compiled, so that smaller ones serve, not when a large batch first runs.
        options: XLA's, in place of those that `specjax.compiling` names; for programs that are compiled from then on.
        launch_lock: held while a program is launched and, on a GPU, while one is compiled: XLA times candidates on the
            device, where nothing else may run meanwhile.
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
        deferred: Deferred | None = None,
        verify: Verifier = verify_tree,
        trace: bool = False,
        time_phases: bool = False,
    ) -> None:
        self._target, self._drafter, self._buckets, self._trace = target, drafter, buckets, trace
        self._verify, self._deferred, self._room = verify, deferred, room
        self.options: dict[str, str | None] = {}
        self.phase_times = PhaseTimes() if time_phases else None
        self._params, self._state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, state))
        self.state_shapes: DecodeState = self._state.decode
        self.new_pages, self._pages = new_pages, pool_shape(state.decode.cache).pages
        self._admit: dict[bool, Callable[..., Resident]] = {}
        self._futures: dict[Key, Future[Program]] = {}
        self._programs: dict[Key, Program] = {}  # of the futures that are done
        self._failed: dict[Key, str] = {}  # the message; an exception would keep its frames alive
        self._background: list[Key] = []  # keys of `warm_up_in_background` while it runs
        self._later: list[Key] = []  # and of `compile_later`
        self._closed = False
        self._waiting: set[int] = set()  # threads that wait for a compiler in `get`
        self._lock = threading.Lock()  # for `_futures`
        self.launch_lock = threading.RLock()
        self._compiling = False  # with `launch_lock` held
        self._exclusive = jax.default_backend() != "cpu"

    def compiled(self) -> set[Key]:
        return set(self._programs)

    @property
    def pending(self) -> set[Key]:
        """Keys that are still to be compiled in the background."""
        if not (waiting := {*self._background, *self._later}):
            return waiting
        return waiting - self.compiled() - set(self._failed)

    def is_waiting(self, thread: int | None) -> bool:
        """Whether the thread with this `ident` waits for a program to be compiled or, on a GPU, any is compiled."""
        return thread in self._waiting or self._compiling

    def admit(self, *, resumed: bool) -> Callable[[Resident, np.ndarray], Resident]:
        """Puts a packed `admission` into the state, which it takes over. `resumed`: whether it has emitted tokens.
        Compiled at the first use or by `warm_up`."""
        if resumed in self._admit:
            return self._admit[resumed]
        rows, finished = self.state_shapes.rows, self.state_shapes.finished
        row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), rows)
        packed = jax.ShapeDtypeStruct((admission_size(row, resumed=resumed),), np.int32)
        arguments = (rows, finished, packed)
        with self.launch_lock:
            program = program_store.stored(
                admit_packed,
                arguments,
                lambda function: jax.jit(function, donate_argnums=(0, 1)).lower(*arguments).compile(),
            )

        def admit(state: Resident, packed: np.ndarray) -> Resident:
            rows, finished = program(state.decode.rows, state.decode.finished, packed)
            return state._replace(decode=state.decode._replace(rows=rows, finished=finished))

        self._admit[resumed] = admit
        return admit

    def get(self, key: Key) -> Program:
        """The program of a key; compiles it, or waits for the thread that does. Raises Unavailable if the key has
        failed before, and whatever the compiler raises."""
        if key in self._failed:
            raise Unavailable(f"{key}: {self._failed[key]}")
        if (program := self._programs.get(key)) is not None:
            return program
        with self._lock:
            mine = key not in self._futures
            future = self._futures.setdefault(key, Future())
        thread = threading.get_ident()
        self._waiting.add(thread)
        try:
            if mine:
                self._fulfil(key, future)
            return future.result()
        finally:
            self._waiting.discard(thread)

    def _fulfil(self, key: Key, future: Future[Program]) -> None:
        """Compiles in this thread, so that JAX's settings by `with` apply."""
        try:
            self._programs[key] = program = self._compile(key)
            future.set_result(program)
        except BaseException as error:
            interrupted = not isinstance(error, Exception)  # this thread alone
            if not interrupted:
                self.fail(key, error)
            del self._futures[key]
            future.set_exception(RuntimeError(f"compiling {key} was interrupted") if interrupted else error)
            raise

    def first_usable(self, keys: Iterable[Key]) -> tuple[Key, Program]:
        """The first of these keys whose program exists or can be compiled, and the program. Raises Unavailable if there
        is none."""
        problem = "there is none"
        for key in keys:
            try:
                return key, self.get(key)
            except Exception as error:  # logged by `fail`
                problem = f"{key}: {self._failed.get(key, error)}"
        raise Unavailable(f"no size of batch can run ({problem})")

    def fail(self, key: Key, error: BaseException) -> None:
        """Remembers that a key cannot be used, and logs it the first time."""
        problem = _first_line(error)
        if key not in self._failed:
            logger.error("There will be no program for %s, other sizes are used instead: %s", key, problem)
            logger.debug("%s", key, exc_info=error)
        self._failed[key] = problem

    def fail_from(self, key: Key, error: BaseException) -> None:
        """`fail` for a program that ran out of memory, and for all that need more. Raises Unavailable if none needs
        less; nothing is remembered then: memory may come back."""
        rare = (*self._buckets.constrained_keys(), *self._buckets.scoring_keys())
        known = {key, *self._buckets.all_keys(), *rare}
        alike = [other for other in known if other.kind == key.kind]
        larger = [other for other in alike if other.needs_no_less(key)]
        if all(other in larger or self.has_failed(other) for other in alike):
            raise Unavailable(f"no memory for {key}, and there is nothing smaller: {_first_line(error)}") from error
        for other in larger:
            self.fail(other, error)

    def has_failed(self, key: Key) -> bool:
        return key in self._failed

    def warm_up(self, keys: Iterable[Key], *, progress: bool = True, strict: bool = True) -> None:
        """Compiles these and what every request needs, with a bar on stderr for `progress`. On a CPU a second thread
        helps, to which JAX's settings by `with` do not apply.

        Args:
            strict: raise the first failure, also of a key that failed before. False: leave out what fails.

        Raises:
            Unavailable: not `strict`, and all programs of a kind have failed.
        """
        keys = list(keys)
        if strict:
            for key in keys:
                self._failed.pop(key, None)
        missing = sorted(set(keys) - self.compiled(), key=lambda key: (key.kind != "step", key))  # steps take longest
        errors: list[BaseException] = []
        left = takewhile(lambda key: not errors, missing)  # each key goes to one of the two threads

        def work() -> None:
            try:
                self._get_all(left, bar, strict=strict)
            except BaseException as error:
                errors.append(error)

        with progress_bar("Compiling", len(missing), "bucket", shown=progress and bool(missing)) as bar:
            # While XLA compiles one program on a CPU, or reads it from the disk, Python traces the next.
            helper = threading.Thread(target=work, name="specjax-compile-2", daemon=True)
            if len(missing) > 1 and not self._exclusive:
                helper.start()
            for resumed in (False, True):
                self.admit(resumed=resumed)
            work()
            if helper.ident and not any(isinstance(error, KeyboardInterrupt) for error in errors):
                helper.join()
        if errors:
            raise errors[0]
        for kind in {key.kind for key in keys}:
            self.first_usable(sorted((key for key in keys if key.kind == kind), key=self.has_failed))

    def warm_up_in_background(self, keys: Iterable[Key], *, progress: bool = True) -> threading.Thread:
        """Compiles these one by one in a thread of its own, which `close` ends. Leaves out what fails."""
        missing = [key for key in keys if key not in self._futures and key not in self._failed]
        self._background = missing

        def run() -> None:
            shown = progress and bool(missing)
            with progress_bar("Compiling in the background", len(missing), "bucket", shown=shown) as bar:
                self._get_all(takewhile(lambda key: not self._closed, missing), bar, strict=False)
            self._background = []

        thread = threading.Thread(target=run, name="specjax-compile", daemon=True)
        thread.start()
        return thread

    def compile_later(self, keys: Iterable[Key]) -> None:
        """Compiles these one by one in a thread, while requests run. Leaves out what fails."""
        with self._lock:
            idle = not self._later
            known = {*self._futures, *self._failed, *self._later}
            self._later += [key for key in keys if key not in known]
            if not (idle and self._later):
                return

        def run() -> None:
            while not self._closed:
                with contextlib.suppress(Exception):  # logged by `fail`
                    self.get(self._later[0])
                with self._lock:
                    self._later.pop(0)
                    if not self._later:
                        return

        threading.Thread(target=run, name="specjax-compile-later", daemon=True).start()

    def compile_ahead(self, key: Key) -> bool:
        """Whether `get` answers at once. If not, another thread compiles the key."""
        if key in self._failed or key in self.compiled():
            return True
        self.compile_later([key])
        return False

    def _get_all(self, keys: Iterable[Key], bar: tqdm, *, strict: bool) -> None:
        for key in keys:
            bar.set_postfix_str(f"{key.kind} {key.width}")
            with contextlib.nullcontext() if strict else contextlib.suppress(Exception):  # logged by `fail`
                self.get(key)
            bar.update()

    def close(self) -> None:
        """Ends the background's work after the program that it is compiling."""
        self._closed = True

    def variant(self, key: Key, tree_width: int, options: Mapping[str, str | None] = MappingProxyType({})) -> Program:
        """A step of another tree width, or with other options of XLA's than `options`: for measurements, not kept
        here. Raises whatever the compiler raises."""
        return self._compile(key, (tree_width,), options)

    def _compile(
        self, key: Key, widths: tuple[int, ...] = (), options: Mapping[str, str | None] = MappingProxyType({})
    ) -> Program:
        function, unpack, shape = self._function(key, widths)
        arguments: Any = (self._params, self._state, jax.ShapeDtypeStruct(shape, np.int32))
        if self.phase_times is not None and key.kind == "step":
            with self.launch_lock:
                return _compile_in_phases(arguments, unpack, self.phase_times, **function.keywords)
        chosen = compiler_options(**{**self.options, **options})
        leaves, tree = jax.tree.flatten(arguments)
        count = len(jax.tree.leaves(self._params))

        def compile(function: Callable[..., Any]) -> jax.stages.Compiled:
            def flat(params: list[Any], state: list[Any], inputs: Any) -> Any:
                state, output = function(*jax.tree.unflatten(tree, [*params, *state, inputs]))
                return jax.tree.leaves(state), output

            flat.__name__ = flat.__qualname__ = getattr(function, "__name__", key.kind)
            jitted = jax.jit(flat, donate_argnums=1, compiler_options=chosen)
            lowered = jitted.lower(leaves[:count], leaves[count:-1], leaves[-1])
            with self._device_idle() if self._exclusive else contextlib.nullcontext():
                return lowered.compile()

        kernels = cpu_attention.prepare(self._target.config.dtype)
        # A proposal packs its own output.
        pack = {"catch-up": packed_lag, "propose": _call}.get(key.kind, packed)
        program = program_store.stored(
            partial(_from_packed, function, unpack, pack), arguments, compile, (chosen, kernels)
        )
        if self._room is not None and (temporaries := program.memory_analysis().temp_size_in_bytes) > self._room:
            raise MemoryError(
                f"{key} needs {temporaries / 1e9:.3f} GB beside its arguments, and {self._room / 1e9:.3f} GB are left "
                "beside weights and KV pool; give a lower EngineConfig.mem_fraction or fewer max_total_tokens"
            )
        return program

    def _function(self, key: Key, widths: tuple[int, ...]) -> tuple[partial[Any], partial[Any], tuple[int, int]]:
        """What a key's program computes, what unpacks its input, and that input's shape. `widths`: of a step's trees;
        (): as the key says."""
        tables: dict[str, Any] = {"width": key.table, "pages": self._pages}
        if key.kind == "catch-up":
            assert self._deferred is not None
            function = partial(catch_up_step, drafter=self._deferred.inner, width=key.width)
            return function, partial(unpack_catch_up, **tables), (key.rows, 1)
        drafter = self._drafter if self._deferred is None else self._deferred.lazy
        fixed: dict[str, Any] = {"target": self._target}
        if key.kind in ("prefill", "scoring"):
            shape, unpack = (key.rows, 3 + key.width + key.table), partial(unpack_prefill, **tables)
            function, config = prefill_step, StepConfig(prompt_logprobs=key.kind == "scoring")
        else:
            widths, constrained = widths or self._buckets.step_widths(key), key.kind == "constrained"
            if widths != (1,) or self._deferred is None:
                drafter = self._drafter.within(self._buckets.tree_widths(key.width)[-1] if constrained else widths[-1])
            fixed |= {"verify": self._verify}
            shape, unpack = (key.width, 2 + self.new_pages), partial(unpack_step, **tables)
            function, config = speculate_step, StepConfig(widths, self._trace)
            if key.kind == "propose":
                function, fixed = propose_step, {}
            elif constrained:
                vocab_size, nodes = self._target.config.vocab_size, widths[-1]
                # Its `observe` alone is called. Forced tokens may make a deeper tree than its own.
                depth = max(drafter.depth, min(nodes, JUMP) - 1)
                drafter = drafter._replace(depth=depth, width=max(drafter.width, nodes))
                shape = (key.width, constrained_size(self.new_pages, nodes, vocab_size))
                unpack = partial(unpack_constrained, **tables, new_pages=self.new_pages, nodes=nodes)
                function = constrained_step
        # `resize` has nothing to trace, but would be a part of the program's name.
        return partial(function, **fixed, drafter=drafter._replace(resize=None), config=config), unpack, shape

    @contextlib.contextmanager
    def _device_idle(self) -> Iterator[None]:
        with self.launch_lock:
            jax.block_until_ready(jnp.zeros(()) + 1)  # after all that has been launched; it may be stuck
            self._compiling = True
            try:
                yield
            finally:
                self._compiling = False


def _from_packed(
    function: Callable[..., Any], unpack: Callable[..., Any], pack: Callable[..., Any], params: Params,
    state: Resident, inputs: Any,
) -> tuple[Resident, Output]:  # fmt: skip
    """A program whose input and output are packed, to be traced."""
    given, tables = unpack(inputs, state.tables)
    decode, output = pack(function, params, state.decode, given)
    return Resident(decode, tables), output


def _call(function: Callable[..., Any], *given: Any) -> Any:
    return function(*given)


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


def _first_line(error: BaseException) -> str:
    return (str(error).strip().partition("\n")[0] or type(error).__name__)[:500]
