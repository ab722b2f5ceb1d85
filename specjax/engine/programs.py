"""Programs by key, each compiled once: on demand, ahead of use, or in the background while requests run."""

from __future__ import annotations

import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import takewhile
from types import TracebackType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from specjax.engine.arrays import Output
from specjax.engine.buckets import Buckets
from specjax.engine.keys import Key
from specjax.progress import progress_bar

logger = logging.getLogger(__name__)

Program: TypeAlias = Callable[[list[Any], list[Any], np.ndarray], tuple[list[Any], Output]]
"""(leaves of params, leaves of the state, packed input) -> (leaves of the next state, output). Donates the state."""


class Unavailable(RuntimeError):
    """No executable that could run some requests fits into the memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """True for exceptions of the compiler or of a program that mean that memory has run out."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return "RESOURCE_EXHAUSTED" in str(error)
    return isinstance(error, MemoryError | Unavailable)


class Programs(ABC):
    """Programs by key, compiled at most once. Safe to call from several threads.

    A key whose compilation or program runs out of memory is remembered and logged once; `first_usable` then takes
    another size. Other exceptions of tracing and compiling are raised by each `get` of the program.

    Attributes:
        launch_lock: held while a program is launched and, on a GPU, while one is compiled: XLA times candidates on the
            device, where nothing else may run meanwhile.
        announce: called with each key that is about to be compiled.
        progress: whether stderr shows a bar while a program compiles that has none in another bar.
    """

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._futures: dict[Key, Future[Program]] = {}
        self._programs: dict[Key, Program] = {}  # of the futures that are done
        self._failed: dict[Key, str] = {}  # out of memory: the message; an exception would keep its frames alive
        self._broken: dict[Key, tuple[Exception, TracebackType | None]] = {}  # failed for another reason
        self._later: list[Key] = []  # to be compiled by `_worker`
        self._current: Key | None = None  # that it compiles now
        self._worker: threading.Thread | None = None  # of `compile_later`, while it runs
        self._closed = False
        self._waiting: set[int] = set()  # threads that wait for a compiler in `get`
        self._quiet: set[int] = set()  # threads whose compilations have no bar of their own
        self.progress = False
        self._lock = threading.Lock()  # for `_futures`
        self.launch_lock = threading.RLock()
        self.announce: Callable[[Key], None] = lambda key: None
        self._compiling = False  # with `launch_lock` held
        self._exclusive = jax.default_backend() != "cpu"

    @abstractmethod
    def _compile(self, key: Key) -> Program:
        """Compiles the program of a key. Raises whatever the compiler raises."""

    @abstractmethod
    def admit(self, *, resumed: bool) -> Callable[..., Any]:
        """The program that puts a request into the state."""

    def compiled(self) -> set[Key]:
        return set(self._programs)

    @property
    def pending(self) -> set[Key]:
        """Keys that are still to be compiled in the background."""
        if not (waiting := {*self._later} if self._current is None else {*self._later, self._current}):
            return waiting
        return waiting - self.compiled() - {*self._failed, *self._broken}

    def is_waiting(self, thread: int | None) -> bool:
        """Whether the thread with this `ident` waits for a program to be compiled or, on a GPU, any is compiled."""
        return thread in self._waiting or self._compiling

    def get(self, key: Key) -> Program:
        """The program of a key; compiles it, or waits for the thread that does. Raises Unavailable if the key has
        run out of memory before, and whatever tracing and compiling raise."""
        if key in self._failed:
            raise Unavailable(f"{key}: {self._failed[key]}")
        if key in self._broken:
            error, where = self._broken[key]
            raise error.with_traceback(where)  # the first one, as each raise adds frames
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
            if is_out_of_memory(error):
                self.fail(key, error)
            elif isinstance(error, Exception):
                self._broken[key] = error, error.__traceback__
            del self._futures[key]
            future.set_exception(RuntimeError(f"compiling {key} was interrupted") if interrupted else error)
            raise

    def first_usable(self, keys: Iterable[Key]) -> tuple[Key, Program]:
        """The first of these keys whose program fits into memory, and the program. Raises Unavailable if none does, and
        whatever tracing and compiling raise."""
        problem = "there is none"
        for key in keys:
            try:
                return key, self.get(key)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                problem = f"{key}: {self._failed.get(key, error)}"
        raise Unavailable(f"no size of batch can run ({problem})")

    def fail(self, key: Key, error: BaseException) -> None:
        """Records that the program of a key does not fit into memory, and logs it the first time."""
        problem = _first_line(error)
        if key not in self._failed:
            logger.error("Out of memory for the program of %s; using smaller ones: %s", key, problem)
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
        """True if the program of a key has run out of memory."""
        return key in self._failed

    def is_broken(self, error: BaseException) -> bool:
        """Whether this exception made a program fail for another reason than memory. It will be raised again."""
        return any(error is known for known, _ in self._broken.values())

    def is_settled(self, key: Key) -> bool:
        """True if `get` would not block: the program is compiled, or is known to fail."""
        return key in self._programs or key in self._failed or key in self._broken

    def warm_up(self, keys: Iterable[Key], *, progress: bool = True, strict: bool = True) -> None:
        """Compiles these and what every request needs, with a bar on stderr for `progress`. On a CPU a second thread
        helps, to which JAX's settings by `with` do not apply.

        Args:
            strict: also raise if a program runs out of memory. False: leave such programs out.

        Raises:
            Unavailable: not `strict`, and no program of a kind fits into memory.
            Exception: whatever tracing and compiling raise. A key that has failed before is tried again if `strict`.
        """
        keys = list(keys)
        if strict:
            for key in keys:
                self._failed.pop(key, None)
                self._broken.pop(key, None)
        missing = sorted(set(keys) - self.compiled(), key=lambda key: (key.kind != "step", key))  # steps take longest
        errors: list[BaseException] = []
        # Each key goes to one of the two threads, the second of which may outlive an interrupted main thread.
        left = takewhile(lambda key: not errors and threading.main_thread().is_alive(), missing)

        def work() -> None:
            try:
                self._get_all(left, bar, lambda error: not strict and is_out_of_memory(error))
            except BaseException as error:
                errors.append(error)

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
        for kind in {key.kind for key in keys}:
            self.first_usable(sorted((key for key in keys if key.kind == kind), key=self.has_failed))

    def compile_later(self, keys: Iterable[Key], *, ahead: bool = True, progress: bool = False) -> threading.Thread:
        """Compiles these one by one in the background thread while requests run, and returns the thread. Failures are
        logged, and raised when the program is used.

        The interpreter waits at its end for the program that is being compiled, and for no further one: a thread inside
        of XLA would not survive it.

        Args:
            ahead: before those that wait already, each with its own bar; False: after them, a start's last programs.
            progress: show one bar for all.
        """
        with self._lock:
            known = {*self._futures, *self._failed, *self._broken, *self._later}
            missing = [key for key in keys if key not in known]
            self._later = [*missing, *self._later] if ahead else [*self._later, *missing]
            if self._worker is None:
                work = partial(self._work, admits=not ahead, shown=progress and bool(self._later))
                self._worker = threading.Thread(target=work, name="specjax-compile", daemon=False)
                self._worker.start()
            return self._worker

    def _work(self, *, admits: bool, shown: bool) -> None:
        """Compiles what waits; first the admission of resumed requests if `admits`."""
        if admits:
            self.admit(resumed=True)
        with progress_bar("Compiling in the background", len(self._later), "bucket", shown=shown) as bar:
            while self._goes_on:
                with self._lock:
                    if not self._later:
                        self._worker = None
                        break
                    self._current = self._later.pop(0)
                bar.set_postfix_str(f"{self._current.kind} {self._current.width}")
                try:
                    with self._quietly() if shown or admits else contextlib.nullcontext():
                        self.get(self._current)
                except Exception as error:
                    if not is_out_of_memory(error):  # which `fail` has logged
                        logger.error("A program could not be compiled; requests that need it will fail", exc_info=error)
                self._current = None
                bar.update()
        with self._lock:
            if self._worker is threading.current_thread():  # it was closed
                self._worker = None

    def compile_ahead(self, key: Key) -> bool:
        """Whether `get` answers at once, or no other thread will compile the key (after `close`). If not, one does."""
        if self.is_settled(key) or self._closed:
            return True
        self.compile_later([key])
        return False

    def _get_all(self, keys: Iterable[Key], bar: tqdm, leave_out: Callable[[Exception], bool]) -> None:
        """Compiles these. Raises the exceptions that `leave_out` returns False for."""
        for key in keys:
            bar.set_postfix_str(f"{key.kind} {key.width}")
            try:
                with self._quietly():
                    self.get(key)
            except Exception as error:
                if not leave_out(error):
                    raise
            bar.update()

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        thread = threading.get_ident()
        self._quiet.add(thread)
        try:
            yield
        finally:
            self._quiet.discard(thread)

    def _bar(self, key: Key) -> tqdm:
        """The progress bar for compiling a key in this thread."""
        shown = self.progress and threading.get_ident() not in self._quiet
        return progress_bar(f"Compiling {key.kind} {key.width}", 1, "program", shown=shown)

    @property
    def _goes_on(self) -> bool:
        """Whether the background may begin with another program."""
        return not self._closed and threading.main_thread().is_alive()

    def close(self) -> None:
        """Ends the background's work after the program that it is compiling."""
        self._closed = True

    def reopen(self) -> None:
        """After `close`: the background may work again."""
        self._closed = False

    def join(self, timeout: float | None = None) -> bool:
        """After `close`: waits for the background thread. True: it has ended."""
        if (worker := self._worker) is None:
            return True
        worker.join(timeout)
        return not worker.is_alive()

    @contextlib.contextmanager
    def _device_idle(self) -> Iterator[None]:
        with self.launch_lock:
            jax.block_until_ready(jnp.zeros(()) + 1)  # after all that has been launched; it may be stuck
            self._compiling = True
            try:
                yield
            finally:
                self._compiling = False


def _first_line(error: BaseException) -> str:
    return (str(error).strip().partition("\n")[0] or type(error).__name__)[:500]
