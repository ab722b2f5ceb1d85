"""`Service`, the interface of engines to the routes, and `Runner`, the thread that loads and steps one engine.

Everything that touches the engine runs in this thread, between two steps. Other threads queue commands (`submit`,
`abort`, `call`). Stream deltas reach event loops through `Delivery`, with one wake-up for each step.

    event loop:  submit ->  [commands]  -> enqueue, step, step, ...  -> Delivery -> Listener.queue
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import re
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as List
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

from specjax.engine import Engine
from specjax.engine.generation import forget_frames
from specjax.engine.sequence import AbortCode, Sequence, Status
from specjax.serve.delivery import FAILED_REQUEST, Change, Delivery, Listener, send
from specjax.serve.errors import (
    ABORTED,
    ENGINE_GONE,
    ENGINE_STUCK,
    FAILED_STEP,
    NO_PROGRAM,
    PAUSED,
    Pause,
    State,
    bad_request,
    unavailable,
)
from specjax.serve.metrics import Report, Traffic
from specjax.serve.server_settings import ServerSettings

logger = logging.getLogger("specjax.serve")

Result = TypeVar("Result")
SEQUENCE_OF_REQUEST = re.compile("(_[0-9]+)?(-[0-9]+)?")
"""What follows a request's id in the ids of its sequences: the number of its prompt, and of its answer."""


class Places:
    """Places in the queue, reserved for requests while they are tokenised."""

    def __init__(self, service: Service) -> None:
        self._service, self._lock = service, threading.Lock()
        self.reserved = 0

    @property
    def taken(self) -> int:
        return self._service.unfinished + self.reserved

    @contextlib.contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Reserves `count` places; queue the sequences before the context ends. Raises an ApiError, a 503, if the queue
        is full."""
        with self._lock:
            if self.taken + count > (capacity := self._service.capacity):
                problem = f"{self.taken} requests run or wait; at most {capacity} may"
                raise unavailable(f"the queue is full: {problem}", retry_after=1)
            self.reserved += count
        try:
            yield
        finally:
            with self._lock:
                self.reserved -= count


class EngineStuck(RuntimeError):
    """A step or a command did not end within `--watchdog-timeout`."""


class Watchdog(threading.Thread):
    """Detects a stuck thread.

    Args:
        timeout: seconds without progress after which the watched thread is stuck.
        beat: returns a number that changes with each progress, None while there is no work.
        excused: returns True while the thread waits for compilation, which has no time limit.
        act: called once, from this thread, with the seconds without progress. Then this thread ends.
    """

    def __init__(
        self, *, timeout: float, beat: Callable[[], int | None], excused: Callable[[], bool],
        act: Callable[[float], None],
    ) -> None:  # fmt: skip
        super().__init__(name="specjax-watchdog", daemon=True)
        self._beat, self._excused, self._act = beat, excused, act
        self._timeout, self._interval = timeout, min(1.0, timeout / 8)
        self._seen: int | None = None
        self._stuck = 0.0
        self._stopped = threading.Event()

    def look(self, elapsed: float) -> float | None:
        """Checks once, `elapsed` seconds after the previous check. Returns the seconds without progress if they exceed
        the timeout.

        The time between two checks is capped: a process that was suspended for an hour is not stuck.
        """
        beat = self._beat()
        if beat is None or beat != self._seen or self._excused():
            self._seen, self._stuck = beat, 0.0
            return None
        self._stuck += min(elapsed, 2 * self._interval)
        return self._stuck if self._stuck > self._timeout else None

    def run(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(self._interval):
            now = time.monotonic()
            if (seconds := self.look(now - last)) is not None:
                self._act(seconds)
                return
            last = now

    def stop(self) -> None:
        self._stopped.set()


class Service(ABC):
    """One or several engines behind one queue. Call `start`, and wait for `state` to be READY.

    Properties and methods cover all `ranks`, the engines' runners. A `Runner` is its own only rank.
    """

    ranks: List[Runner]
    on_change: Callable[[], None]  # called after changes of `state`, from any thread
    places: Places  # of sequences that are tokenised, wait or run

    @abstractmethod
    def submit(self, listener: Listener) -> None:
        """Queues a request's sequences. Raises an ApiError, a 400, if an id is in use."""

    @property
    def engine(self) -> Engine:
        """The engine with the smallest pool, whose limits all requests must keep. Read-only for other threads, and only
        once loaded."""
        engines = [rank._engine for rank in self.ranks if rank._engine is not None]
        assert engines, "the engine is not loaded"
        return min(engines, key=lambda engine: engine.intake.pool_tokens)

    @property
    def state(self) -> State:
        """READY once all engines are."""
        states = {rank._state for rank in self.ranks}
        return next((s for s in (State.FAILED, State.DRAINING, State.LOADING) if s in states), State.READY)

    @property
    def failure(self) -> BaseException | None:
        return next((rank._failure for rank in self.ranks if rank._failure is not None), None)

    @property
    def ready_at(self) -> float:
        return max(rank._ready_at for rank in self.ranks)

    @property
    def loaded(self) -> bool:
        return all(rank._engine is not None for rank in self.ranks)

    @property
    def paused(self) -> bool:
        return any(rank._paused for rank in self.ranks)

    @property
    def unfinished(self) -> int:
        """Number of sequences that wait or run."""
        return sum(len(rank._listeners) for rank in self.ranks)

    @property
    def capacity(self) -> int:
        """Maximum number of sequences that may wait or run."""
        return sum(rank.engine.config.max_running_requests + rank._settings.max_queued_requests for rank in self.ranks)

    def start(self) -> None:
        for rank in self.ranks:
            rank.start()

    def abort(self, sequences: List[Sequence]) -> None:
        """Ends these sequences if they still run; their pages are free before the next step."""
        for rank in self.ranks:
            rank.abort(sequences)

    def abort_named(self, name: str | None) -> int:
        """Ends the requests of this name, with their prompts and choices (`name_1`, `name-1`); None: all. Their clients
        get an answer. Returns the number of sequences."""
        return sum(rank.abort_named(name) for rank in self.ranks)

    def drain(self) -> None:
        """Accepts no new requests."""
        for rank in self.ranks:
            rank.drain()

    def end_all(self, message: str, failure: BaseException | None = None) -> None:
        """Ends all requests, with `message` as the reason, and accepts no more. The engine is not used again.

        Does not need the engine's thread, which may be stuck in a step. With `failure` the state becomes FAILED.
        """
        for rank in self.ranks:
            rank.end_all(message, failure)

    def stop(self, timeout: float | None = None) -> bool:
        """Ends the threads after the current step, and background work. Returns True if all have ended."""
        for rank in self.ranks:
            rank.stop(0.0)  # request the end of all before waiting for the first
        ended = [rank.stop(timeout) for rank in self.ranks]
        return all(ended)


class Runner(threading.Thread, Service):
    """The service of one engine."""

    def __init__(self, make_engine: Callable[[], Engine], settings: ServerSettings, *, warm_up: bool = True) -> None:
        super().__init__(name="specjax-engine", daemon=True)
        self.ranks = [self]
        self._state, self._paused = State.LOADING, False
        self._failure: BaseException | None = None
        self._ready_at = time.time()
        self.on_change = lambda: None
        self._make_engine, self._settings, self._warm_up = make_engine, settings, warm_up
        self._engine: Engine | None = None
        self._helpers: list[threading.Thread] = []  # prepare later requests in the background
        self._commands: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._stop_requested = False
        self._ended: str | None = None  # why requests are no longer accepted
        self.places = Places(self)
        self._calls: set[Future[Any]] = set()  # futures of `call` that are not done
        # For the watchdog: True while a step or command runs, and a number that changes with each of them.
        self._busy, self._beat = False, 0
        self._watchdog = Watchdog(
            timeout=settings.watchdog_timeout,
            beat=lambda: self._beat if self._busy else None,
            excused=lambda: self.engine.programs.compiling,
            act=self._give_up,
        )
        # Unfinished sequence -> its listener, and its index there. Keyed by identity: an id may be used again once its
        # answer is complete.
        self._listeners: dict[Sequence, tuple[Listener, int]] = {}
        self.traffic = Traffic()
        self._delivery = Delivery(settings.stream_interval, lambda sequence: self.abort([sequence]))

    # From any thread

    def submit(self, listener: Listener, indices: Iterable[int] | None = None) -> None:
        """`indices`: of the listener's sequences to queue; None: all."""
        indices = list(range(len(listener.sequences)) if indices is None else indices)
        sequences = [listener.sequences[index] for index in indices]
        with self._wake:
            if self._ended is not None:
                message = self._ended
                send((listener, listener.aborted(index, message, AbortCode.ENGINE)) for index in indices)
                return
            check_ids(sequences, self.ids)
            self._listeners |= {listener.sequences[index]: (listener, index) for index in indices}
            self.traffic.arrived(sequences)
            self._command(lambda: self._enqueue(sequences))

    @property
    def ids(self) -> list[str]:
        """Ids of the sequences that wait or run."""
        with self._wake:
            return [sequence.id for sequence in self._listeners]

    def abort(self, sequences: List[Sequence]) -> None:
        with self._wake:
            if gone := [sequence for sequence in sequences if self._listeners.pop(sequence, None) is not None]:
                self._command(lambda: self._forget(gone))

    def abort_named(self, name: str | None) -> int:
        def is_meant(id: str) -> bool:  # a pattern with the name in it would stay in the cache of `re`
            return name is None or (id.startswith(name) and SEQUENCE_OF_REQUEST.fullmatch(id, len(name)) is not None)

        with self._wake:
            matches = [sequence for sequence in self._listeners if is_meant(sequence.id)]
            self._command(lambda: self._end_with_answer(matches, ABORTED))
        return len(matches)

    def call(self, function: Callable[[Engine], Result]) -> Future[Result]:
        """Runs a function on the engine, between two steps. Fails with a RuntimeError if the engine ends before."""
        future: Future[Result] = Future()

        def run() -> None:
            with contextlib.suppress(InvalidStateError):  # cancelled, or ended by the watchdog
                try:
                    future.set_result(function(self.engine))
                except Exception as error:
                    future.set_exception(error)

        with self._wake:
            if self._ended is not None:
                future.set_exception(RuntimeError(self._ended))
                return future
            self._calls.add(future)
            self._command(run)
        future.add_done_callback(self._calls.discard)
        return future

    def pause(self, mode: Pause) -> Future[int]:
        """Draws no more tokens until `go_on`; new requests wait. `mode`: as `PauseRequest`. Returns the number of
        sequences that end or wait."""

        def stop(engine: Engine) -> int:
            self._paused = True
            with self._wake:
                sequences = list(self._listeners)
            if mode == "abort":
                self._end_with_answer(sequences, PAUSED)
            elif mode == "retract":
                engine.retract_all()
            return len(sequences)

        return self.call(stop)

    @property
    def _has_work(self) -> bool:
        return not self._paused and bool(self.engine.unfinished or self.engine.changed)

    def go_on(self) -> Future[bool]:
        """Ends a pause. Returns False if there was none."""

        def start(_: Engine) -> bool:
            paused, self._paused = self._paused, False
            return paused

        return self.call(start)

    def drain(self) -> None:
        self._state = State.DRAINING

    def end_all(self, message: str, failure: BaseException | None = None) -> None:
        with self._wake:
            self._ended = message
            self._stop_requested = True
            listeners, self._listeners = self._listeners, {}
            calls = list(self._calls)
            self._commands.clear()
            self._wake.notify_all()
        if failure is not None:
            self._failure = self._failure or failure
            self._change(State.FAILED)
        places = listeners.values()
        send((listener, listener.aborted(index, message, AbortCode.ENGINE)) for listener, index in places)
        for future in calls:
            with contextlib.suppress(InvalidStateError):  # it has ended in the meantime
                future.set_exception(RuntimeError(message))

    def stop(self, timeout: float | None = None) -> bool:
        with self._wake:
            self._stop_requested = True
            self._wake.notify()
        for thread in itertools.chain([self], self._helpers):  # this thread may add helpers until it ends
            if thread.ident is not None:
                thread.join(timeout)
        compiled = self._engine is None or self._engine.programs.close(timeout)
        return compiled and not any(thread.is_alive() for thread in (self, *self._helpers))

    # In this thread

    def run(self) -> None:
        try:
            self._engine = self._make_engine()
            if self._warm_up:
                self._engine.warm_up(self._engine.buckets.ready_keys(), strict=False)
            started = time.monotonic()
            self._allocate(self._engine)
            if (waited := time.monotonic() - started) >= 0.1:
                logger.info("Waited %.1f s for the allocation of the KV pool", waited)
            if self._warm_up:
                self._engine.warm_up_in_background(then=collect_often)
            self._ready_at = time.time()
            self._watchdog.start()
            self._delivery.start()
            self._change(State.READY)
            if self._warm_up:
                grammars = self._engine.intake.grammars
                self._helpers.append(threading.Thread(target=grammars.prepare, name="specjax-grammars", daemon=True))
                self._helpers[-1].start()
            self._loop(Report(self._engine, interval=self._settings.decode_log_interval))
        except BaseException as error:
            self.end_all(ENGINE_GONE, failure=error)
        finally:
            self._watchdog.stop()
            if self._delivery.is_alive():
                self._delivery.stop()
            if self._engine is not None:
                self._engine.programs.close(0.0)

    def _allocate(self, engine: Engine) -> None:
        """Waits until the KV pool is allocated."""
        try:
            engine.wait_until_allocated()
        except Exception as error:
            pool = f"the KV pool of {engine.intake.pool_tokens} tokens (--max-total-tokens)"
            state = f"the state of {engine.config.max_running_requests} requests (--max-running-requests)"
            raise RuntimeError(f"{pool} and {state} could not be allocated: {error}") from error

    def _loop(self, report: Report) -> None:
        engine = self.engine
        while True:
            with self._wake:
                self._busy = False
                self._wake.wait_for(lambda: self._commands or self._stop_requested or self._has_work)
                if self._stop_requested:
                    return
                commands, self._commands = self._commands, []
                self._busy, self._beat = True, self._beat + 1
            for command in commands:
                self._beat += 1
                try:
                    command()
                except Exception:  # the fault of one request
                    logger.exception("A command to the engine failed")
            if not self._has_work:
                continue
            self._beat += 1
            try:
                changed = engine.step()
            except Exception as error:
                logger.exception("A step failed: all running requests end, and the engine is reset")
                forget_frames(error)
                broken = engine.programs.is_broken(error)
                message, code = (NO_PROGRAM, None) if broken else (FAILED_STEP, AbortCode.ENGINE)
                engine.reset(message, code)
                with self._wake:
                    changed = list(self._listeners)  # including sequences that had ended in this step
            self.traffic.changed(changed)
            self._deliver(changed)
            report.after_step()
            self.traffic.throughput = report.throughput

    def _give_up(self, seconds: float) -> None:
        frame = sys._current_frames().get(self.ident or 0)
        where = "".join(traceback.format_stack(frame)) if frame is not None else "  unknown\n"
        limit = f"--watchdog-timeout {self._settings.watchdog_timeout:g}"
        problem = f"a step or command has not ended for {seconds:.0f} s ({limit})"
        logger.error("The engine is stuck, all requests end: %s. Its thread is at:\n%s", problem, where)
        self.end_all(ENGINE_STUCK, failure=EngineStuck(problem))

    def _enqueue(self, sequences: List[Sequence]) -> None:
        for sequence in sequences:
            if sequence in self._listeners:  # else it was aborted before it was queued
                try:
                    self.engine.enqueue(sequence)
                except Exception:
                    logger.exception("request %s could not be queued", sequence.id)
                    self._end(sequence, FAILED_REQUEST)
                    self._deliver([sequence])

    def _forget(self, sequences: list[Sequence], message: str | None = None, code: AbortCode | None = None) -> None:
        for sequence in sequences:
            self._end(sequence, message, code)
            self.traffic.gone(sequence)

    def _end_with_answer(self, sequences: list[Sequence], message: str) -> None:
        running = [sequence for sequence in sequences if sequence in self._listeners]
        self._forget(running, message, AbortCode.REQUESTED)
        self._deliver(running)

    def _end(self, sequence: Sequence, message: str | None, code: AbortCode | None = None) -> None:
        if not self.engine.end(sequence, message, code) and sequence.status is not Status.FINISHED:
            sequence.abort(message, code)
            sequence.status = Status.FINISHED

    def _deliver(self, changed: Iterable[Sequence]) -> None:
        """Passes these sequences to the delivery, which sends their stream deltas."""
        changes: list[Change] = []
        with self._wake:
            for sequence in changed:
                if (place := self._listeners.get(sequence)) is None:
                    continue
                if finished := sequence.status is Status.FINISHED:
                    del self._listeners[sequence]
                if finished or place[0].streams:
                    changes.append(Change(sequence, *place, None if finished else len(sequence.output.tokens)))
        if changes:
            self._delivery.put(changes)

    def _command(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _change(self, state: State) -> None:
        if self._state not in (State.DRAINING, State.FAILED):
            self._state = state
        self.on_change()


def collect_often() -> None:
    """Lets Python collect the little garbage of each request before it fills memory. A start leaves 400,000 objects, of
    which each scan would take 0.2 s: later ones leave them out."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def check_ids(sequences: Iterable[Sequence], running: Iterable[str]) -> None:
    """Raises an ApiError, a 400, if an id is running, or if two of the sequences have the same id."""
    taken = set(running)
    for sequence in sequences:
        if sequence.id in taken:
            raise bad_request(f"a request with id {sequence.id!r} is running", "rid")
        taken.add(sequence.id)
