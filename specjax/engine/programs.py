"""The programs of an engine: what each computes, how it is compiled, and when.

A program is compiled once: before the engine is ready (`warm_up`), when a request needs it (`get`), or in one
background thread while requests run (`compile_later`, `compile_ahead`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from specjax_kernels.platforms import of_default_device

from specjax.cache import pool_shape
from specjax.drafters.base import Params, Speculation
from specjax.engine.buckets import PLAIN, Buckets, Key
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
from specjax.gpu import compiler_options
from specjax.models.target import Target
from specjax.parallel.sharding import everywhere, under
from specjax.progress import progress_bar
from specjax.state import DecodeState
from specjax.step import StepConfig, prefill_step, speculate_step
from specjax.verify import Verifier, verify_tree

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 0.01  # between two looks for the end of a pause


class Programs:
    """Programs by key. Thread-safe.

    A key whose program does not fit into memory is remembered and logged once; `first_usable` then takes another size.
    Other errors of tracing and compiling are raised by each `get` of the program.

    Args:
        new_pages: maximum number of pages that a row gets between two steps.
        room: bytes of the device that a program may need beside its arguments; None: unknown. A program that needs more
            fails when it is compiled, so that smaller ones run from the start.
    """

    def __init__(
        self,
        target: Target,
        speculation: Speculation,
        buckets: Buckets,
        params: Params,
        state: Resident,
        *,
        new_pages: int,
        room: int | None = None,
        verify: Verifier = verify_tree,
        trace: bool = False,
        mesh: Mesh | None = None,
    ) -> None:
        self._target, self._speculation, self._trace = target, speculation, trace
        self._buckets, self._verify, self._room, self._mesh = buckets, verify, room, mesh

        def shape(leaf: Any) -> jax.ShapeDtypeStruct:
            where = None if mesh is None else leaf.sharding
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        self._params, self._state = jax.tree.map(shape, (params, state))
        self.state_shapes: DecodeState = self._state.decode
        self.new_pages, self._pages = new_pages, pool_shape(state.decode.cache).pages

        self._admit: dict[bool, Callable[..., Resident]] = {}
        self._programs: dict[Key, Program] = {}
        self._failed: dict[Key, tuple[Exception, TracebackType | None]] = {}
        self._compilers: dict[Key, threading.Lock] = {}  # held while the key is compiled
        self._waiting: set[int] = set()  # threads that wait for a compilation in `get`
        self._later: dict[Key, bool] = {}  # for the background thread: requests wait. Replaced, never changed
        self._worker: threading.Thread | None = None  # the background thread, until `_later` is empty
        self._lock = threading.Lock()  # for changes of `_compilers`, `_later` and `_worker`
        self._exclusive = jax.default_backend() != "cpu"
        self._compiling = False  # with `launch_lock` held
        # Held during a launch and, on a GPU, during a compilation: XLA times candidates on the device.
        self.launch_lock = threading.RLock()
        self.announce: Callable[[Key], None] = lambda key: None  # called with each key before it is compiled
        self.busy: Callable[[], bool] = lambda: False  # True while requests wait or run
        self.progress = False  # show a bar on stderr while a request waits for a compilation

    # State

    def compiled(self) -> set[Key]:
        return set(self._programs)

    @property
    def pending(self) -> set[Key]:
        """Keys that the background thread has yet to compile."""
        return {key for key in self._later if not self._is_settled(key)}

    def _is_settled(self, key: Key) -> bool:
        """True if `get` would not block: the program is compiled, or is known to fail."""
        return key in self._programs or key in self._failed

    def has_failed(self, key: Key) -> bool:
        """True if the program of a key does not fit into memory."""
        return key in self._failed and isinstance(self._failed[key][0], MemoryError)

    def is_broken(self, error: BaseException) -> bool:
        """True if `get` raises this error again: a program cannot be compiled, for another reason than memory."""
        return any(error is failure for failure, _ in [*self._failed.values()])

    def is_waiting(self, thread: int | None) -> bool:
        """True if the thread with this `ident` waits for a compilation or, on a GPU, any thread compiles."""
        return thread in self._waiting or self._compiling

    # When programs are compiled

    def get(self, key: Key) -> Program:
        """Returns the program of a key; compiles it, or waits for the thread that does. Raises MemoryError if it does
        not fit into memory, and whatever tracing and compiling raise."""
        return self._get(key, bar=self.progress)

    def _get(self, key: Key, *, bar: bool) -> Program:
        """Compiles in this thread, where JAX's context managers apply."""
        if (program := self._lookup(key)) is not None:
            return program
        with self._lock:
            compiler = self._compilers.setdefault(key, threading.Lock())
        thread = threading.get_ident()
        self._waiting.add(thread)
        try:
            with compiler:
                if (program := self._lookup(key)) is None:
                    with progress_bar(f"Compiling {key.kind} {key.width}", 1, "program", shown=bar) as shown:
                        program = self._programs[key] = self._try(key)
                        shown.update()
                return program
        finally:
            self._waiting.discard(thread)

    def _try(self, key: Key) -> Program:
        """Remembers an error, but no interrupt."""
        try:
            return self._compile(key)
        except Exception as error:
            if is_out_of_memory(error):
                problem = f"{key}: {_first_line(error)}"
                logger.error("Out of memory for the program of %s; using other ones: %s", key, _first_line(error))
                self._failed[key] = MemoryError(problem), None  # never raised itself: its traceback would keep frames
                raise MemoryError(problem) from error
            self._failed[key] = error, error.__traceback__
            raise

    def _lookup(self, key: Key) -> Program | None:
        """Returns the program if it is compiled. Raises its remembered error."""
        if key not in self._failed:
            return self._programs.get(key)
        error, where = self._failed[key]
        if isinstance(error, MemoryError):
            raise MemoryError(str(error))
        raise error.with_traceback(where)  # the first traceback: each raise adds frames

    def first_usable(self, keys: Iterable[Key]) -> tuple[Key, Program]:
        """Returns the first key whose program fits into memory, and the program. Raises MemoryError if none does, and
        whatever tracing and compiling raise."""
        problem = "there is none"
        for key in keys:
            try:
                return key, self.get(key)
            except MemoryError as error:
                problem = str(error)
        raise MemoryError(f"no size of batch can run ({problem})")

    def warm_up(self, keys: Iterable[Key], *, progress: bool = True, strict: bool = True) -> None:
        """Compiles these keys and the admission of requests. On a CPU a second thread helps, in which JAX's context
        managers do not apply.

        Args:
            progress: show a bar on stderr.
            strict: raise if a program does not fit into memory, and try again what failed before. False: leave such
                programs out.

        Raises:
            MemoryError: a program does not fit into memory; if not `strict`, no program of a kind does.
            Exception: whatever tracing and compiling raise.
        """
        keys = list(keys)
        if strict:
            for key in keys:
                self._failed.pop(key, None)
        missing = sorted(set(keys) - self.compiled(), key=lambda key: (key.kind != "step", key))  # steps take longest
        left = iter(missing)  # each key goes to one of the two threads
        errors, begun, compiled = list[BaseException](), time.monotonic(), list[str]()

        def work() -> None:
            for key in left:
                if errors or not threading.main_thread().is_alive():  # an interrupted thread ends the other one
                    break
                bar.set_postfix_str(f"{key.kind} {key.width}")
                started = time.monotonic()
                try:
                    self._get(key, bar=False)
                    compiled.append(f"{key} ({time.monotonic() - started:.1f} s)")
                except BaseException as error:
                    if strict or not isinstance(error, MemoryError):
                        errors.append(error)
                bar.update()

        with progress_bar("Compiling", len(missing), "bucket", shown=progress and bool(missing)) as bar:
            # While XLA compiles one program on a CPU, or reads it from the disk, Python traces the next.
            helper = threading.Thread(target=work, name="specjax-compile-2", daemon=False)
            if len(missing) > 1 and not self._exclusive:
                helper.start()
            self.admit(resumed=False)
            work()
            if helper.ident and not any(isinstance(error, KeyboardInterrupt) for error in errors):
                helper.join()
            bar.set_postfix_str("")
        if errors:
            raise errors[0]
        if compiled:
            logger.info("Compiled in %.1f s: %s", time.monotonic() - begun, "; ".join(compiled))
        for kind in {key.kind for key in keys}:
            self.first_usable(key for key in keys if key.kind == kind)

    def compile_ahead(self, key: Key) -> bool:
        """True if `get` would not block. Otherwise the background thread compiles the program next."""
        if not (settled := self._is_settled(key)):
            self.compile_later([key], wanted=True)
        return settled

    def compile_later(self, keys: Iterable[Key], *, wanted: bool = False, progress: bool = False) -> threading.Thread:
        """Compiles these one by one in the background thread, and returns the thread. Errors are logged, and raised
        when the program is used.

        The interpreter waits at its exit for the program that is being compiled, since a thread inside XLA would not
        survive the exit, and for no further one.

        Args:
            wanted: requests wait for these, which are compiled before others, each with its own bar.
            progress: show one bar for all.
        """
        with self._lock:
            new = {key: wanted for key in keys if not self._is_settled(key)}
            first, last = (new, self._later) if wanted else (self._later, new)
            self._later = first | {key: value for key, value in last.items() if key not in first}
            if self._worker is None or not self._worker.is_alive():
                work = partial(self._work, progress=progress and bool(self._later))
                self._worker = threading.Thread(target=work, name="specjax-compile", daemon=False)
                self._worker.start()
            return self._worker

    def _work(self, *, progress: bool) -> None:
        """The background thread. Begins with the admission of resumed requests, which any load may need."""
        with _failures_logged():
            self.admit(resumed=True)
        begun, count = time.monotonic(), len(self.compiled())
        with progress_bar("Compiling in the background", len(self._later), "bucket", shown=progress) as bar:
            while (key := self._next()) is not None:
                bar.set_postfix_str(f"{key.kind} {key.width}")
                started = time.monotonic()
                with _failures_logged():
                    self._get(key, bar=self.progress and not progress and self._later.get(key, False))
                bar.update()
                self._pause(time.monotonic() - started)
        compiled = len(self.compiled()) - count
        logger.info("Compiled %d programs in the background in %.1f s", compiled, time.monotonic() - begun)

    def _pause(self, seconds: float) -> None:
        """On a GPU, where compiling stops all requests, lets these run as long as the last compilation took. Ends
        early if no request runs, or one waits for a program."""
        end = time.monotonic() + seconds
        while self._exclusive and self.busy() and time.monotonic() < end and threading.main_thread().is_alive():
            if not self._later or any(self._later.get(key) for key in self.pending):
                return
            time.sleep(PAUSE_SECONDS)

    def _next(self) -> Key | None:
        """The next key for the background thread, which ends at None."""
        with self._lock:
            goes_on = threading.main_thread().is_alive()
            self._later = {key: wanted for key, wanted in self._later.items() if goes_on and not self._is_settled(key)}
            if not self._later:
                self._worker = None
            return next(iter(self._later), None)

    def close(self, timeout: float | None = None) -> bool:
        """Cancels what the background thread has not begun, and waits for it. Returns True if it has ended."""
        with self._lock:
            self._later, worker = {}, self._worker
        if worker is not None:
            worker.join(timeout)
        return worker is None or not worker.is_alive()

    # What programs compute

    def admit(self, *, resumed: bool) -> Callable[[Resident, np.ndarray], Resident]:
        """Returns the function that puts a packed `admission` into the state; compiles it at its first use. `resumed`:
        the request has emitted tokens."""
        if resumed in self._admit:
            return self._admit[resumed]
        rows, finished = self.state_shapes.rows, self.state_shapes.finished
        row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), rows)
        arguments = (rows, finished, self._input((admission_size(row, resumed=resumed),)))
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
            self._compiling = True
            try:
                yield
            finally:
                self._compiling = False

    def _input(self, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        where = None if self._mesh is None else everywhere(self._mesh)
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=where)

    def _function(self, key: Key) -> tuple[partial[Any], partial[Any], tuple[int, int]]:
        """The function of a key's program, the function that unpacks its input, and the input's shape."""
        tables: dict[str, Any] = {"width": key.table, "pages": self._pages}
        drafter = self._speculation.drafter
        fixed: dict[str, Any] = {"target": self._target}
        if key.kind in ("prefill", "scoring"):
            shape, unpack = (key.rows, PREFILL_NUMBERS + key.width + key.table), partial(unpack_prefill, **tables)
            function, config = prefill_step, StepConfig(prompt_logprobs=key.kind == "scoring", tokens=key.tokens)
        else:
            widths = self._buckets.step_widths(key)
            drafter = self._speculation.within(widths[-1])
            if key.nodes == PLAIN and self._speculation.costly_observe:  # its requests never draft
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


@contextlib.contextmanager
def _failures_logged() -> Iterator[None]:
    """Logs the errors of a compilation in the background, which no caller sees."""
    try:
        yield
    except MemoryError:  # logged when it was recorded
        pass
    except Exception as error:
        logger.error("A program could not be compiled; requests that need it will fail", exc_info=error)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().partition("\n")[0] or type(error).__name__)[:500]
