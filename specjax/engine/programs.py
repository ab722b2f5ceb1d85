"""The programs of an engine: what each computes, and how it is compiled.

Each program is a future. One thread compiles them in order, first those that requests wait for (`want`), and on a CPU
the thread of `warm_up` helps.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from functools import cached_property, partial
from types import TracebackType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from specjax_kernels.platforms import of_default_device

from specjax.cache import pool_shape
from specjax.drafters.base import Params, Speculation, have_rows
from specjax.engine.device import (
    PREFILL_NUMBERS,
    Program,
    Resident,
    admission_size,
    admit_packed,
    is_out_of_memory,
    packed,
    unpack_prefill,
    unpack_step,
)
from specjax.engine.grammar_steps import constrained_size, constrained_step, propose_step, unpack_constrained
from specjax.engine.plan import Key, Ready
from specjax.gpu import compiler_options
from specjax.models.target import Target
from specjax.parallel.sharding import everywhere, under
from specjax.progress import progress_bar
from specjax.state import DecodeState
from specjax.step import StepConfig, prefill_step, speculate_step
from specjax.verify import Verifier, verify_tree

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 0.01  # between two looks for the end of a pause
TURN_SECONDS = 0.0005
"""Switch interval of threads while the background thread compiles. A step takes the interpreter's lock many times; with
Python's 5 ms each time, steps took up to 0.3 s beside a thread that traces."""


class Failure(NamedTuple):
    """Result of a compilation that raised."""

    error: Exception
    where: TracebackType | None

    def again(self) -> Exception:
        """The error to raise. Each raise adds frames to a traceback, which would keep what these hold."""
        if isinstance(self.error, MemoryError):
            return MemoryError(str(self.error))
        return self.error.with_traceback(self.where)


class Programs:
    """Programs by key. Thread-safe.

    A key whose program does not fit into memory is remembered and logged once; the plan then takes another size. Other
    errors of tracing and compiling are raised by each `get` of the program.

    Args:
        state: arrays, or their shapes.
        table: pages in the page tables of the rows.
        new_pages: maximum number of pages that a row gets between two steps.
        room: bytes of the device that a program may need beside its arguments; None: unknown. A program that needs more
            fails when it is compiled, so that smaller ones run from the start.
    """

    def __init__(
        self,
        target: Target,
        speculation: Speculation,
        params: Params,
        state: DecodeState,
        *,
        table: int,
        new_pages: int,
        room: int | None = None,
        verify: Verifier = verify_tree,
        trace: bool = False,
        mesh: Mesh | None = None,
    ) -> None:
        self._target, self._speculation, self._trace = target, speculation, trace
        self._verify, self._room, self._mesh = verify, room, mesh
        self._ragged = target.ragged and mesh is None and jax.default_backend() == "cpu"

        def shape(leaf: Any) -> jax.ShapeDtypeStruct:
            where = None if mesh is None else leaf.sharding
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        self._params, self.state_shapes = jax.tree.map(shape, (params, state))
        tables: Any = self._input((state.finished.shape[0], table))
        self._state = Resident(self.state_shapes, tables)
        self.new_pages, self._pages = new_pages, pool_shape(state.cache).pages
        self._have_rows = have_rows(speculation.drafter, self._params, pool_shape(state.cache))

        self._futures: dict[Key, Future[Program | Failure]] = {}
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="specjax-compile")
        self._warming = False  # `warm_up` runs, which has a bar for all
        self._wanted: set[Key] = set()  # requests wait for these
        self._seconds: dict[Key, float] = {}  # of each compilation
        self._ended = 0.0  # when the last one ended
        self._lock = threading.RLock()  # for changes of the futures, of `_ready` and of `_wanted`
        self._ready = Ready()
        self._exclusive = jax.default_backend() != "cpu"
        self.compiling = False  # with `launch_lock` held, on a GPU
        # Held during a launch and, on a GPU, during a compilation: XLA times candidates on the device.
        self.launch_lock = threading.RLock()
        self.announce: Callable[[Key], None] = lambda key: None  # called with each key before it is compiled
        self.busy: Callable[[], bool] = lambda: False  # True while requests wait or run
        self.progress = False  # show a bar on stderr while a request waits for a compilation

    # State

    def ready(self) -> Ready:
        """The programs that the plan may use."""
        return self._ready

    def compiled(self) -> set[Key]:
        return {key for key, result in self._results().items() if not isinstance(result, Failure)}

    @property
    def pending(self) -> set[Key]:
        """Keys that are not compiled yet."""
        with self._lock:
            return {key for key, future in self._futures.items() if not future.done()}

    @property
    def quiet_since(self) -> float:
        """When the last compilation ended, in seconds of `perf_counter`; infinity while one runs. It slows programs on
        a CPU, and delays the reading of their results."""
        with self._lock:
            return math.inf if any(future.running() for future in self._futures.values()) else self._ended

    def is_broken(self, error: BaseException) -> bool:
        """True if `get` raises this error again: a program cannot be compiled, for another reason than memory."""
        return any(isinstance(result, Failure) and result.error is error for result in self._results().values())

    def _results(self) -> dict[Key, Program | Failure]:
        with self._lock:
            done = {key: future for key, future in self._futures.items() if future.done() and not future.cancelled()}
            return {key: future.result() for key, future in done.items()}

    def _update(self) -> None:
        """Sets what `ready` returns; with `_lock` held."""
        done = self._results()
        failed = {key for key, got in done.items() if isinstance(got, Failure) and _is_memory(got.error)}
        self._ready = Ready(frozenset(done.keys() - failed), frozenset(failed))

    # When programs are compiled

    def get(self, key: Key) -> Program:
        """Returns the program of a key, after its compilation. Raises MemoryError if it does not fit into memory, and
        whatever tracing and compiling raise."""
        while True:
            with self._lock:
                self.want([key])
                future = self._futures[key]
            try:
                result = future.result()
            except CancelledError:  # by `close`, or an interrupt of another thread
                continue
            if isinstance(result, Failure):
                raise result.again()
            return result

    def compile_later(self, keys: Iterable[Key], then: Callable[[], None] = lambda: None) -> None:
        """Compiles these one by one in the background, and calls `then`. Errors are logged, and raised when the program
        is used.

        The interpreter waits at its exit for the program that is being compiled, since a thread inside XLA would not
        survive the exit, and for no further one.
        """
        with self._lock:
            new = self._submit(keys)
        self._executor.submit(self._report, new, time.monotonic(), then)

    def want(self, keys: Collection[Key]) -> None:
        """Compiles these before all others that are not begun: requests wait for them."""
        with self._lock:
            self._submit(keys)
            self._wanted |= {key for key in keys if not self._futures[key].done()}

    def wait(self, timeout: float | int | None = None) -> bool:
        """Waits until nothing is pending. Returns True if nothing is."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                futures = [future for future in self._futures.values() if not future.done()]
            if not futures:
                return True
            if wait(futures, None if end is None else max(end - time.monotonic(), 0.0)).not_done:
                return False

    def close(self, timeout: float | int | None = None) -> bool:
        """Cancels what is not begun, and waits for the rest. Returns True if nothing is being compiled."""
        with self._lock:
            for future in self._futures.values():
                future.cancel()
        return self.wait(timeout)

    def warm_up(self, keys: Iterable[Key], *, progress: bool = True, strict: bool = True) -> None:
        """Compiles these keys and the admission of requests. On a CPU this thread helps: while XLA compiles one
        program, or reads it from the disk, Python traces the next.

        Args:
            progress: show a bar on stderr.
            strict: raise if a program does not fit into memory, and try again what failed before. False: leave such
                programs out.

        Raises:
            MemoryError: a program does not fit into memory; if not `strict`, no program of a kind does.
            Exception: whatever tracing and compiling raise.
        """
        keys, begun = list(keys), time.monotonic()
        with self._lock:
            if strict:
                for key, result in self._results().items():
                    if key in keys and isinstance(result, Failure):
                        del self._futures[key]
                self._update()
            missing = [key for key in keys if not self._has(key)]
            missing.sort(key=lambda key: (key.kind != "step", key))  # steps take longest
            self._warming = True
            self.want(missing)
        try:
            with progress_bar("Compiling", len(missing), "bucket", shown=progress and bool(missing)) as bar:
                _ = self.admit
                while not self._exclusive and (key := self._claim(missing)) is not None:
                    bar.set_postfix_str(f"{key.kind} {key.width}")
                    self._fulfil(key)
                    bar.update()
                for key in missing:
                    bar.set_postfix_str(f"{key.kind} {key.width}")
                    with contextlib.suppress(MemoryError):  # raised below
                        self.get(key)
                    bar.update(sum(key not in self.pending for key in missing) - bar.n)
                bar.set_postfix_str("")
        finally:
            self._warming = False
        if missing:
            names = "; ".join(f"{key} ({self._seconds[key]:.1f} s)" for key in missing if key in self._seconds)
            logger.info("Compiled in %.1f s: %s", time.monotonic() - begun, names)
        failed = self._ready.failed
        for key in keys:
            if strict or key not in failed or all(other in failed for other in keys if other.kind == key.kind):
                self.get(key)

    def _has(self, key: Key) -> bool:
        return (future := self._futures.get(key)) is not None and not future.cancelled()

    def _submit(self, keys: Iterable[Key]) -> list[Key]:
        """Makes futures for what has none, and lets the background thread fulfil as many; with `_lock` held. Returns
        these keys."""
        new = [key for key in keys if not self._has(key)]
        for key in new:
            self._futures.pop(key, None)  # cancelled
            self._futures[key] = Future()
            self._executor.submit(self._work)
        return new

    def _claim(self, among: Collection[Key] | None = None) -> Key | None:
        """The next key that is to be compiled, which the caller does: one that requests wait for, else the oldest."""
        with self._lock:
            queued = [key for key, future in self._futures.items() if not future.running() and not future.done()]
            queued = [key for key in queued if among is None or key in among]
            key = min(queued, key=lambda key: key not in self._wanted, default=None)
            if key is not None:
                self._futures[key].set_running_or_notify_cancel()
            return key

    def _fulfil(self, key: Key, *, logs: bool = False) -> None:
        """Compiles a program in this thread. `logs`: logs an error that the caller does not raise."""
        try:
            result = self._try(key)
        except BaseException:
            with self._lock:
                self._futures.pop(key).set_exception(CancelledError())  # for threads that wait, which try again
            raise
        if logs and isinstance(result, Failure) and not _is_memory(result.error):  # memory is logged with the key
            logger.error("A program could not be compiled; requests that need it will fail", exc_info=result.error)
        with self._lock:
            self._futures[key].set_result(result)
            self._update()

    def _work(self) -> None:
        """Compiles the next program in the background thread, unless `warm_up` has, or the interpreter ends."""
        try:
            self._executor.submit(int)  # does nothing, but fails as soon as the interpreter ends
        except RuntimeError:
            return
        if (key := self._claim()) is None:
            return
        shown = self.progress and key in self._wanted and not self._warming
        with progress_bar(f"Compiling {key.kind} {key.width}", 1, "program", shown=shown) as bar, _short_turns():
            self._fulfil(key, logs=True)
            bar.update()
        self._pause(self._seconds[key])

    def _report(self, keys: list[Key], begun: float, then: Callable[[], None]) -> None:
        """Logs the end of `compile_later`."""
        if self.pending & set(keys):  # requests wanted others first
            time.sleep(PAUSE_SECONDS)
            with contextlib.suppress(RuntimeError):  # the interpreter ends
                self._executor.submit(self._report, keys, begun, then)
            return
        if count := len(self._results().keys() & set(keys)):
            logger.info("Compiled %d programs in the background in %.1f s", count, time.monotonic() - begun)
        then()

    def _try(self, key: Key) -> Program | Failure:
        """Remembers an error, but no interrupt."""
        begun = time.monotonic()
        try:
            return self._compile(key)
        except Exception as error:
            if not is_out_of_memory(error):
                return Failure(error, error.__traceback__)
            logger.error("Out of memory for the program of %s; using other ones: %s", key, _first_line(error))
            return Failure(MemoryError(f"{key}: {_first_line(error)}"), None)
        finally:
            self._wanted.discard(key)
            self._ended = time.perf_counter()
            self._seconds[key] = time.monotonic() - begun

    def _pause(self, seconds: float) -> None:
        """On a GPU, where compiling stops all requests, lets these run as long as the last compilation took. Ends
        early if no request runs, or one waits for a program."""
        end = time.monotonic() + seconds
        while self._exclusive and self.busy() and time.monotonic() < end and threading.main_thread().is_alive():
            if self._wanted & (pending := self.pending) or not pending:
                return
            time.sleep(PAUSE_SECONDS)

    # What programs compute

    def draft_rows(self, decode: DecodeState) -> list[Any]:
        """The leaves of the drafter's state that have a row for each request."""
        return list(itertools.compress(jax.tree.leaves(decode.draft), self._have_rows))

    @cached_property
    def admit(self) -> Callable[[Resident, np.ndarray], Resident]:
        """The function that puts a packed `admission` into the state; compiled at its first use."""
        shapes, drafts = self.state_shapes, self.draft_rows(self.state_shapes)
        packed = self._input((admission_size(shapes.rows, drafts),), np.uint8)
        places: dict[str, Any] = {}
        if self._mesh is not None:
            whole = everywhere(self._mesh)
            places = {"out_shardings": (whole, whole, [leaf.sharding for leaf in drafts])}
        with self.launch_lock if self._exclusive else contextlib.nullcontext(), under(self._mesh):
            jitted = jax.jit(admit_packed, donate_argnums=(0, 1, 2), **places)
            program = jitted.lower(shapes.rows, shapes.finished, drafts, packed).compile()

        def admit(state: Resident, packed: np.ndarray) -> Resident:
            decode = state.decode
            rows, finished, drafts = program(decode.rows, decode.finished, self.draft_rows(decode), packed)
            leaves, tree = jax.tree.flatten(decode.draft)
            new = iter(drafts)
            leaves = [next(new) if has_rows else leaf for leaf, has_rows in zip(leaves, self._have_rows, strict=True)]
            draft = jax.tree.unflatten(tree, leaves)
            return state._replace(decode=decode._replace(rows=rows, finished=finished, draft=draft))

        return admit

    def _compile(self, key: Key) -> Program:
        if not self._exclusive:
            self.announce(key)
        function, unpack, shape = self._function(key)
        arguments: Any = (self._params, self._state, self._input(shape))
        leaves, tree = jax.tree.flatten(arguments)
        count = len(jax.tree.leaves(self._params))
        call = function if key.kind == "propose" else partial(packed, function)  # a proposal packs its own output

        def flat(params: list[Any], state: list[Any], inputs: Any) -> Any:
            whole_params, whole_state, inputs = jax.tree.unflatten(tree, [*params, *state, inputs])
            unpacked, tables = unpack(inputs, whole_state.tables)
            decode, output = call(whole_params, whole_state.decode, unpacked)
            return jax.tree.leaves(Resident(decode, tables)), output

        flat.__name__ = flat.__qualname__ = key.kind
        places: Any = {}
        if self._mesh is not None:
            places["out_shardings"] = [leaf.sharding for leaf in leaves[count:-1]], everywhere(self._mesh)
        jitted = jax.jit(flat, donate_argnums=1, compiler_options=compiler_options(), **places)
        with under(self._mesh), of_default_device():
            lowered = jitted.lower(leaves[:count], leaves[count:-1], leaves[-1])
            with self._device_idle() if self._exclusive else contextlib.nullcontext():
                if self._exclusive:  # with the lock, so that all processes compile between the same launches
                    self.announce(key)
                program: Any = lowered.compile()
        if self._room is not None and (temporaries := program.memory_analysis().temp_size_in_bytes) > self._room:
            raise MemoryError(
                f"{key} needs {temporaries / 1e9:.3f} GB beside its arguments, and {self._room / 1e9:.3f} GB are left "
                "beside weights and KV pool; give a lower mem_fraction or fewer max_total_tokens"
            )
        return program

    @contextlib.contextmanager
    def _device_idle(self) -> Iterator[None]:
        with self.launch_lock:
            jax.block_until_ready(jnp.zeros(()) + 1)  # runs after all earlier launches; it may block for long
            self.compiling = True
            try:
                yield
            finally:
                self.compiling = False

    def _input(self, shape: tuple[int, ...], dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
        where = None if self._mesh is None else everywhere(self._mesh)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    def _function(self, key: Key) -> tuple[partial[Any], partial[Any], tuple[int, int]]:
        """The function of a key's program, the function that unpacks its input, and the input's shape."""
        tables: dict[str, Any] = {"width": key.table, "pages": self._pages}
        drafter = self._speculation.drafter
        fixed: dict[str, Any] = {"target": self._target}
        if key.kind in ("prefill", "scoring"):
            shape, unpack = (key.rows, PREFILL_NUMBERS + key.width + key.table), partial(unpack_prefill, **tables)
            function = prefill_step
            config = StepConfig(prompt_logprobs=key.kind == "scoring", tokens=key.tokens, ragged=self._ragged)
        else:
            drafter = self._speculation.within(key.nodes)
            if key.nodes == 1 and self._speculation.costly_observe:  # its requests never draft
                drafter = drafter._replace(features=None, observe=lambda params, state, context, seen: state)
            fixed |= {"verify": self._verify}
            shape, unpack = (key.width, 2 + self.new_pages), partial(unpack_step, **tables)
            nodes = min(key.nodes, drafter.width)
            function, config = speculate_step, StepConfig(nodes, self._trace, ragged=self._ragged)
            if key.kind == "propose":
                function, fixed = propose_step, {}
            elif key.kind == "constrained":
                vocab_size = self._target.config.vocab_size
                shape = (key.width, constrained_size(self.new_pages, nodes, vocab_size))
                unpack = partial(unpack_constrained, **tables, new_pages=self.new_pages, nodes=nodes)
                function = constrained_step
        return partial(function, **fixed, drafter=drafter, config=config), unpack, shape


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
    """Lets other threads have the interpreter's lock after `TURN_SECONDS`."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(TURN_SECONDS, before))
    try:
        yield
    finally:
        if before > TURN_SECONDS:  # else another engine has set it
            sys.setswitchinterval(before)


def _is_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().partition("\n")[0] or type(error).__name__)[:500]
