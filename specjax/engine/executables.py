"""The executables of an engine: one for each batch bucket and chunk width, compiled once."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from specjax_kernels.cpu import object_code, rows
from specjax_kernels.cpu.runtime import callable_here

from specjax.checkpoint.files import default_cache_dir
from specjax.compiling import compiler_options
from specjax.drafters.base import Drafter, Params
from specjax.engine import program_store
from specjax.engine.buckets import Buckets
from specjax.engine.outputs import Output, pack
from specjax.engine.phases import PhaseTimes, compile_in_phases
from specjax.engine.sequence import Sequence
from specjax.models.target import Target
from specjax.progress import progress_bar
from specjax.step import (
    DecodeState,
    PrefillInput,
    Row,
    StepConfig,
    StepInput,
    admit,
    prefill_step,
    speculate_step,
    tree_widths,
)
from specjax.verify import Verifier, verify_tree

logger = logging.getLogger(__name__)


class Key(NamedTuple):
    """Which executable. `width` is the batch bucket of a step, the chunk width of a prefill."""

    kind: str  # "step" or "prefill"
    width: int
    table: int

    def __str__(self) -> str:
        what = "a step of" if self.kind == "step" else "a prefill of"
        unit = "requests" if self.kind == "step" else "tokens"
        return f"{what} {self.width} {unit} with {self.table} pages each"


Program: TypeAlias = Callable[..., tuple[DecodeState, Output]]
"""(params, state, inputs) -> (the next state, output); takes the state over."""


def use_compilation_cache(folder: Path | None = None) -> None:
    """Keeps compiled programs on disk, so that a second start compiles nothing. Respects JAX's own settings.

    Args:
        folder: of the programs; CPU kernels are always kept in `default_cache_dir`.
    """
    object_code.keep_in(default_cache_dir() / "kernels")
    if jax.config.values["jax_compilation_cache_dir"] is None:
        folder = folder or default_cache_dir() / "xla"
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        program_store.keep_in(folder.with_name(program_store.FOLDER))


def _step(params: Params, state: DecodeState, inputs: StepInput, **fixed: Any) -> tuple[DecodeState, Output]:
    state, output = speculate_step(params, state, inputs, **fixed)
    return state, pack(output)


def _prefill(params: Params, state: DecodeState, inputs: PrefillInput, **fixed: Any) -> tuple[DecodeState, Output]:
    state, output = prefill_step(params, state, inputs, **fixed)
    return state, pack(output)


class Unavailable(RuntimeError):
    """No executable that could run some requests can be compiled or has room to run."""


class Executables:
    """A dictionary of programs that are compiled on demand and at most once. Safe to call from several threads.

    A key whose compilation fails, or that runs out of memory, is remembered and logged once; `first_usable` then takes
    another size.

    Attributes:
        launch_lock: held while a program is launched and, on a GPU, while one is compiled: XLA times candidates on the
            device, where nothing else may run meanwhile.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        buckets: Buckets,
        params: Params,
        state: DecodeState,
        *,
        verify: Verifier = verify_tree,
        trace: bool = False,
        time_phases: bool = False,
    ) -> None:
        self._target, self._drafter, self._buckets, self._trace = target, drafter, buckets, trace
        self._verify = verify
        self.phase_times = PhaseTimes() if time_phases else None
        self._shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, state))
        self._futures: dict[Key, Future[Program]] = {}
        self._failed: dict[Key, str] = {}  # the message; an exception would keep its frames alive
        self._pending: set[Key] = set()  # what `warm_up_in_background` still has to do
        self._closed = threading.Event()
        self._waiting: set[int] = set()  # threads that wait for a compiler in `get`
        self._lock = threading.Lock()
        self.launch_lock = threading.RLock()
        self._compiling = False  # with `launch_lock` held
        self._exclusive = jax.default_backend() != "cpu"

    # Which executables there are

    @property
    def state_shapes(self) -> DecodeState:
        return self._shapes[1]

    def all_keys(self) -> list[Key]:
        """Every executable the engine can need, those for a single request first."""
        steps = [Key("step", batch, table) for batch in self._buckets.batches for table in self._buckets.tables]
        chunks = [Key("prefill", chunk, table) for chunk in self._buckets.chunks for table in self._buckets.tables]
        first = self._buckets.batches[0]
        return chunks + sorted(steps, key=lambda key: (key.width != first, key.width, key.table))

    def single_request_keys(self) -> list[Key]:
        """Executables that one request at a time needs."""
        first = self._buckets.batches[0]
        return [key for key in self.all_keys() if key.kind == "prefill" or key.width == first]

    def first_keys(self, sequences: Iterable[Sequence], page_size: int, rows: int) -> list[Key]:
        """Executables that these sequences will certainly need, if they are all that runs."""
        keys: dict[Key, None] = {}
        count, table = 0, self._buckets.tables[0]
        for sequence in sequences:
            table = max(table, self._buckets.table(-(-sequence.most_tokens // page_size)))
            left = len(sequence.context)
            while left > 0:
                width = self._buckets.chunk(left)
                keys[Key("prefill", width, table)] = None
                left -= width
            count += 1
        widths = self._buckets.shrinking(min(count, rows), tree_widths(self._drafter))
        return [*keys, *(Key("step", width, table) for width in widths)]

    def step_keys(self, count: int, pages: int) -> Iterator[Key]:
        """Programs that can serve `count` requests of up to `pages` pages, the best first.

        1. The smallest compiled batch that fits and does not draft less: an idle row costs less than a compiler, and
           the last requests of a wide run are to speculate.
        2. While that batch compiles in the background, the largest compiled one, which serves them in parts.
        3. What must be compiled first: batches that fit, then smaller ones.
        """
        compiled, widths = self.compiled(), self._buckets.substitutes(count, tree_widths(self._drafter))
        for table in self._buckets.tables_for(pages):
            fitting = [Key("step", batch, table) for batch in widths]
            others = [Key("step", batch, table) for batch in self._buckets.batches]
            larger = [key for key in others if key.width >= count and key not in fitting]
            smaller = [key for key in others[::-1] if key.width < count]
            yield from (key for key in fitting if key in compiled)
            if self.is_pending(fitting[0]):
                yield from (key for key in smaller if key in compiled)
            yield from (*fitting, *larger, *smaller)

    def compiled(self) -> set[Key]:
        with self._lock:
            return {key for key, future in self._futures.items() if future.done()}

    def is_pending(self, key: Key) -> bool:
        """Whether the key is still to be compiled in the background."""
        with self._lock:
            return key in self._pending

    @property
    def pending(self) -> int:
        """Executables that are still to be compiled in the background."""
        with self._lock:
            return len(self._pending)

    def is_waiting(self, thread: int | None) -> bool:
        """Whether the thread with this `ident` waits for a program to be compiled or, on a GPU, any is compiled."""
        return thread in self._waiting or self._compiling

    # Getting one

    @cached_property
    def admit(self) -> Callable[[DecodeState, Any, Row], DecodeState]:
        """Puts a row into the state, which it takes over. Compiled at the first use or by `warm_up`."""
        state = self.state_shapes
        row = jax.tree.map(lambda rows: jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype), state.rows)
        arguments = (state, jax.ShapeDtypeStruct((), np.int32), row)
        with self.launch_lock:
            return program_store.stored(
                admit, arguments, lambda function: jax.jit(function, donate_argnums=0).lower(*arguments).compile()
            )

    def get(self, key: Key) -> Program:
        """The program of a key; compiles it, or waits for the thread that does.

        Raises:
            Unavailable: the key has failed before.
            Exception: whatever the compiler raised.
        """
        with self._lock:
            if key in self._failed:
                raise Unavailable(f"{key}: {self._failed[key]}")
            mine = key not in self._futures
            future = self._futures.setdefault(key, Future())
        if future.done():
            return future.result()
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
            future.set_result(self._compile(key))
        except BaseException as error:
            with self._lock:
                del self._futures[key]
            if isinstance(error, Exception):
                self.fail(key, error)
                future.set_exception(error)
            else:  # an interrupt is this thread's alone
                future.set_exception(RuntimeError(f"compiling {key} was interrupted"))
            raise

    def first_usable(self, keys: Iterable[Key]) -> tuple[Key, Program]:
        """The program of the first of these keys that has one; compiles it where needed.

        Raises:
            Unavailable: none of them has one.
        """
        problem = "there is none"
        for key in keys:
            try:
                return key, self.get(key)
            except Unavailable as error:
                problem = str(error)
            except Exception as error:  # logged by `fail`
                problem = f"{key}: {_first_line(error)}"
        raise Unavailable(f"no size of batch can run ({problem})")

    # Failures

    def fail(self, key: Key, error: BaseException) -> None:
        """Remembers that a key cannot be used, and logs it the first time."""
        problem = _first_line(error)
        with self._lock:
            known = key in self._failed
            self._failed[key] = problem
        if not known:
            logger.error("There will be no program for %s, other sizes are used instead: %s", key, problem)
            logger.debug("%s", key, exc_info=error)

    def fail_from(self, key: Key, error: BaseException) -> None:
        """`fail` for a program that ran out of memory, and for all that need more.

        Raises:
            Unavailable: there is none that needs less. Nothing is remembered then: memory may come back.
        """
        alike = [other for other in {key, *self.all_keys()} if other.kind == key.kind]
        larger = [other for other in alike if other.width >= key.width and other.table >= key.table]
        if all(other in larger or self.has_failed(other) for other in alike):
            raise Unavailable(f"no memory for {key}, and there is nothing smaller: {_first_line(error)}") from error
        for other in larger:
            self.fail(other, error)

    def has_failed(self, key: Key) -> bool:
        return key in self._failed

    # Ahead of use

    def warm_up(self, keys: Iterable[Key], *, progress: bool = True, strict: bool = True) -> None:
        """Compiles these and what every request needs. On a CPU a second thread helps, to which JAX's settings by
        `with` do not apply.

        Args:
            progress: show a bar on stderr.
            strict: stop at the first failure, also of a key that failed before, and raise it. False: leave out what
                fails.

        Raises:
            Unavailable: not `strict`, and all programs of a kind have failed.
        """
        keys = list(keys)
        if strict:
            with self._lock:
                for key in keys:
                    self._failed.pop(key, None)
        missing = [key for key in keys if key not in self.compiled()]
        # Steps take longest. The threads share the iterator: each key goes to one of them.
        left = iter(sorted(missing, key=lambda key: key.kind != "step"))
        failed: list[BaseException] = []
        bar = progress_bar("Compiling", len(missing), "bucket", shown=progress and bool(missing))

        def work() -> None:
            try:
                for key in left:
                    if failed:
                        return
                    bar.set_postfix_str(f"{key.kind} {key.width}")
                    with contextlib.nullcontext() if strict else contextlib.suppress(Exception):
                        self.get(key)
                    bar.update()
            except BaseException as error:
                failed.append(error)

        # While XLA compiles one program on a CPU, or reads it from the disk, Python traces the next.
        helper = threading.Thread(target=work, name="specjax-compile-2", daemon=True)
        two = not self._exclusive and len(missing) > 1
        with bar:
            if two:
                helper.start()
            _ = self.admit
            work()
            if two and not any(isinstance(error, KeyboardInterrupt) for error in failed):
                helper.join()
        if failed:
            raise failed[0]
        for kind in {key.kind for key in keys}:
            self.first_usable(sorted((key for key in keys if key.kind == kind), key=self.has_failed))

    def warm_up_in_background(self, keys: Iterable[Key], *, progress: bool = True) -> threading.Thread:
        """Compiles these one by one in a thread of its own, which `close` ends. Leaves out what fails."""
        with self._lock:
            missing = [key for key in keys if key not in self._futures and key not in self._failed]
            self._pending.update(missing)
        shown = progress and bool(missing)

        def run() -> None:
            try:
                with progress_bar("Compiling in the background", len(missing), "bucket", shown=shown) as bar:
                    for key in missing:
                        if self._closed.is_set():
                            return
                        bar.set_postfix_str(f"{key.kind} {key.width}")
                        with contextlib.suppress(Exception):  # logged by `fail`
                            self.get(key)
                        with self._lock:
                            self._pending.discard(key)
                        bar.update()
            finally:
                with self._lock:
                    self._pending.difference_update(missing)

        thread = threading.Thread(target=run, name="specjax-compile", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Ends the background's work after the program that it is compiling."""
        self._closed.set()

    # The compiler

    def _compile(self, key: Key) -> Program:
        shape = partial(jax.ShapeDtypeStruct, dtype=np.int32)
        batch = key.width if key.kind == "step" else 1
        common: Any = (shape((batch,)), shape((batch, key.table)), jax.ShapeDtypeStruct((batch,), np.bool_))
        if key.kind == "step":
            config = StepConfig(self._buckets.tree_widths(batch, tree_widths(self._drafter)), self._trace)
            function, inputs = _step, StepInput(*common)
        else:
            chunk: Any = {"tokens": shape((1, key.width)), "length": shape((1,)), "next_token": shape((1,))}
            config, function, inputs = StepConfig(), _prefill, PrefillInput(*common, **chunk)
        fixed: dict[str, Any] = {"target": self._target, "drafter": self._drafter, "config": config}
        if key.kind == "step":
            fixed["verify"] = self._verify
        arguments: Any = (*self._shapes, inputs)
        if self.phase_times is not None and key.kind == "step":
            with self.launch_lock:
                return compile_in_phases(**fixed, arguments=arguments, times=self.phase_times)
        options = compiler_options()

        def compile(function: Callable[..., Any]) -> jax.stages.Compiled:
            jitted = jax.jit(function, donate_argnums=1, compiler_options=options)
            return self._compiled(jitted.lower(*arguments))

        return program_store.stored(partial(function, **fixed), arguments, compile, (options, self._cpu_kernels()))

    def _compiled(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        if not self._exclusive:
            return lowered.compile()
        with self.launch_lock:
            jax.block_until_ready(jnp.zeros(()) + 1)  # after all that has been launched; it may be stuck
            self._compiling = True
            try:
                return lowered.compile()
            finally:
                self._compiling = False

    def _cpu_kernels(self) -> list[str | None]:
        """Why each of the CPU's kernels cannot be called here; None: it can. Programs name those that they call, which
        must be known to XLA before a stored program is loaded."""
        dtype = self._target.config.dtype
        if dtype not in rows.STORED or not callable_here():
            return []
        return [rows.unmet(dtype, transposed) for transposed in (False, True)]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().partition("\n")[0] or type(error).__name__)[:500]
