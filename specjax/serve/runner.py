"""The thread that owns the engine: it loads it, steps it, and hands out what each step brought.

Everything that touches the engine runs here, between two steps. Others leave commands (`submit`, `abort`, `call`) and
get their news through their own event loop, one wake-up for each step.

    event loop:  submit ->  [commands]  -> enqueue, step, step, ...  -> call_soon_threadsafe -> Listener.queue
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from enum import Enum
from types import TracebackType
from typing import Any, TypeVar

from specjax.engine import Engine, StreamChunk
from specjax.engine.deltas import take_delta
from specjax.engine.generation import forget_frames
from specjax.engine.request import Sequence, Status
from specjax.serve.listener import ENGINE_GONE, ENGINE_STUCK, FAILED_REQUEST, FAILED_STEP, Listener, tell
from specjax.serve.report import Report
from specjax.serve.watchdog import Watchdog

logger = logging.getLogger("specjax.serve")

Result = TypeVar("Result")


class State(Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class QueueFull(Exception):
    """Too many requests wait already."""


class EngineStuck(RuntimeError):
    """A step or a command did not end within `--watchdog-timeout`."""


class Reservation:
    """Places in the queue for a request that is not tokenised yet. Leaving the block gives back what is not used."""

    def __init__(self, runner: Runner, count: int) -> None:
        self._runner, self._count = runner, count

    def submit(self, listener: Listener) -> None:
        """Queues the request's sequences in these places.

        Raises:
            ValueError: an id is in use.
        """
        self._runner._submit(listener, self)

    def take(self) -> int:
        """The places, which are no longer this reservation's. With the runner's lock held."""
        count, self._count = self._count, 0
        return count

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner._release(self)


class Runner(threading.Thread):
    """Call `start`, and wait for `state` to be READY."""

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        *,
        max_queued_requests: int = 512,
        stream_interval: int = 1,
        decode_log_interval: int = 40,
        watchdog_timeout: float = 300.0,
        warm_up: bool = True,
        progress: bool = True,
    ) -> None:
        super().__init__(name="specjax-engine", daemon=True)
        self.state = State.LOADING
        self.failure: BaseException | None = None
        self.ready_at = time.time()
        # Called when `state` has changed, from this thread or the watchdog's.
        self.on_change: Callable[[], None] = lambda: None
        self._make_engine = make_engine
        self._max_queued = max_queued_requests
        self._stream_interval = stream_interval
        self._log_interval = decode_log_interval
        self._watchdog_timeout = watchdog_timeout
        self._warm_up, self._progress = warm_up, progress
        self._engine: Engine | None = None
        self._behind: threading.Thread | None = None
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stop_requested = False
        self._ended: str | None = None  # why no request is taken any more
        self._reserved = 0  # places of requests that are being tokenised
        self._calls: set[Future[Any]] = set()  # what `call` has promised
        # For the watchdog: whether anything is under way, and a number that changes with each step and command.
        self._busy, self._beat = False, 0
        self._watchdog = Watchdog(
            timeout=watchdog_timeout,
            beat=lambda: self._beat if self._busy else None,
            excused=lambda: self.engine.executables.is_waiting(self.ident),
            act=self._give_up,
        )
        # Who waits for a sequence, and its index there. By identity: an id may be used again once its answer is known.
        self._places: dict[Sequence, tuple[Listener, int]] = {}

    @property
    def engine(self) -> Engine:
        """Read-only for other threads, and only once loaded."""
        assert self._engine is not None, "the engine is not loaded"
        return self._engine

    @property
    def loaded(self) -> bool:
        return self._engine is not None

    @property
    def unfinished(self) -> int:
        """Sequences that are waiting or running."""
        return len(self._places)

    @property
    def pending(self) -> int:
        """Sequences that are being tokenised, waiting or running."""
        return len(self._places) + self._reserved

    # From any thread

    @property
    def capacity(self) -> int:
        """Most sequences that may run or wait."""
        return self.engine.config.max_running_requests + self._max_queued

    def reserve(self, count: int) -> Reservation:
        """Places for `count` sequences that are yet to be made, so that the queue's limit counts them, too.

        Raises:
            QueueFull: too many wait already.
        """
        with self._wake:
            if self.pending + count > self.capacity:
                raise QueueFull(f"{self.pending} requests run or wait; at most {self.capacity} may")
            self._reserved += count
        return Reservation(self, count)

    def submit(self, listener: Listener) -> None:
        """Queues a request's sequences. Its news go to the listener.

        Raises:
            QueueFull: too many wait already.
            ValueError: an id is in use.
        """
        with self.reserve(len(listener.sequences)) as places:
            places.submit(listener)

    def _submit(self, listener: Listener, places: Reservation) -> None:
        with self._wake:
            if self._ended is not None:
                count = len(listener.sequences)
                tell((listener, listener.aborted(index, self._ended)) for index in range(count))
                return
            taken = {sequence.id for sequence in list(self._places)}
            for sequence in listener.sequences:
                if sequence.id in taken:
                    raise ValueError(f"a request with id {sequence.id!r} is running")
                taken.add(sequence.id)
            self._reserved -= places.take()
            for index, sequence in enumerate(listener.sequences):
                self._places[sequence] = (listener, index)
            self._command(lambda: self._enqueue(listener))

    def _release(self, places: Reservation) -> None:
        with self._wake:
            self._reserved -= places.take()

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """Ends these, if they still run; their pages come back before the next step."""
        left = [sequence for sequence in sequences if sequence in self._places]
        if left:
            with self._wake:
                self._command(lambda: self._abort(left))

    def call(self, function: Callable[[Engine], Result]) -> Future[Result]:
        """Runs a function on the engine, between two steps. Fails with a RuntimeError if the engine ends before."""
        future: Future[Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(self.engine)
            except Exception as error:
                _settle(future, error=error)
            else:
                _settle(future, result)

        with self._wake:
            if self._ended is not None:
                future.set_exception(RuntimeError(self._ended))
                return future
            self._calls.add(future)
            self._command(run)
        future.add_done_callback(self._calls.discard)
        return future

    def drain(self) -> None:
        """No new requests."""
        self.state = State.DRAINING

    def abort_all(self, message: str) -> None:
        """Ends all that runs or waits, with `message` as the reason."""

        def run() -> None:
            running = list(self._places)
            for sequence in running:
                self._end(sequence, message)
            self._deliver(running)

        with self._wake:
            self._command(run)

    def end_all(self, message: str, failure: BaseException | None = None) -> None:
        """Ends all that runs or waits, with `message` as the reason, and takes nothing more. The engine is done with.

        Unlike `abort_all` this does not need the engine's thread, which may be stuck in a step for ever: it is left
        behind. With `failure` the state becomes FAILED.
        """
        with self._wake:
            self._ended = message
            self._stop_requested = True
            places, self._places = self._places, {}
            calls = list(self._calls)
            self._commands.clear()
            self._wake.notify_all()
        tell((listener, listener.aborted(index, message)) for listener, index in places.values())
        for future in calls:
            _settle(future, error=RuntimeError(message))
        if failure is not None:
            if self.failure is None:
                self.failure = failure
            self._change(State.FAILED)

    def stop(self, timeout: float | None = None) -> bool:
        """Ends the thread after the step under way, and the compiling behind. True: both have ended."""
        with self._wake:
            self._stop_requested = True
            self._wake.notify()
        threads = [thread for thread in (self, self._behind) if thread is not None and thread.ident is not None]
        for thread in threads:
            thread.join(timeout)
        return not any(thread.is_alive() for thread in threads)

    # In this thread

    def run(self) -> None:
        try:
            self._engine = self._make_engine()
            if self._warm_up:
                self._engine.warm_up(self._engine.single_request_keys(), progress=self._progress, strict=False)
            _allocate(self._engine)
            if self._warm_up:
                self._behind = self._engine.warm_up_in_background(progress=self._progress)
            self.ready_at = time.time()
            self._watchdog.start()
            self._change(State.READY)
            self._loop(Report(self._engine, interval=self._log_interval))
        except BaseException as error:
            self.end_all(ENGINE_GONE, failure=error)
        finally:
            self._watchdog.stop()
            if self._engine is not None:
                self._engine.executables.close()

    def _loop(self, report: Report) -> None:
        engine = self.engine
        while True:
            with self._wake:
                self._busy = False
                while not (self._commands or engine.unfinished or self._stop_requested):
                    self._wake.wait()
                if self._stop_requested:
                    return
                commands = list(self._commands)
                self._commands.clear()
                self._busy, self._beat = True, self._beat + 1
            for command in commands:
                self._beat += 1
                try:
                    command()
                except Exception:  # one request's trouble
                    logger.exception("A command to the engine failed")
            if not engine.unfinished:
                continue
            self._beat += 1
            try:
                news = engine.step()
            except Exception as error:
                logger.exception("A step failed: all running requests end, the engine starts anew")
                forget_frames(error)
                engine.reset(FAILED_STEP)
                with self._wake:
                    news = list(self._places)  # also those that had ended in this step
            self._deliver(news)
            report.after_step()

    def _give_up(self, seconds: float) -> None:
        """The watchdog's: this thread is stuck."""
        frame = sys._current_frames().get(self.ident or 0)
        where = "".join(traceback.format_stack(frame)) if frame is not None else "  unknown\n"
        problem = f"a step or command has not ended for {seconds:.0f} s (--watchdog-timeout {self._watchdog_timeout:g})"
        logger.error("The engine is stuck, all requests end: %s. Its thread is at:\n%s", problem, where)
        self.end_all(ENGINE_STUCK, failure=EngineStuck(problem))

    def _enqueue(self, listener: Listener) -> None:
        for sequence in listener.sequences:
            if sequence in self._places:  # not if it has been aborted before it was queued
                try:
                    self.engine.enqueue(sequence)
                except Exception:
                    logger.exception("request %s could not be queued", sequence.id)
                    self._end(sequence, FAILED_REQUEST)
                    self._deliver([sequence])

    def _abort(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if self._places.pop(sequence, None) is not None:
                self._end(sequence, None)

    def _end(self, sequence: Sequence, message: str | None) -> None:
        """In the engine, if it is there."""
        if self.engine.find(sequence.id) is sequence:
            self.engine.abort(sequence.id, message)
        elif sequence.status is not Status.FINISHED:
            sequence.abort(message)
            sequence.status = Status.FINISHED

    def _deliver(self, news: Iterable[Sequence]) -> None:
        found: list[tuple[Sequence, Listener, int]] = []
        with self._wake:
            for sequence in news:
                if (place := self._places.get(sequence)) is None:
                    continue
                finished = sequence.status is Status.FINISHED
                if not finished and len(sequence.output) - sequence.sent_tokens < self._stream_interval:
                    continue
                if finished:
                    del self._places[sequence]
                found.append((sequence, *place))
        chunks: list[tuple[Listener, StreamChunk]] = []
        for sequence, listener, index in found:
            try:
                chunk = take_delta(sequence, index)
            except Exception:  # of its text; the others go on
                logger.exception("request %s failed", sequence.id)
                self._abort([sequence])
                chunk = listener.aborted(index, FAILED_REQUEST)
            if chunk is not None:
                chunks.append((listener, chunk))
        tell(chunks)

    def _command(self, command: Callable[[], None]) -> None:
        """With `_wake` held."""
        self._commands.append(command)
        self._wake.notify()

    def _change(self, state: State) -> None:
        if self.state is not State.DRAINING:
            self.state = state
        self.on_change()


def _settle(future: Future[Any], result: Any = None, *, error: BaseException | None = None) -> None:
    """Unless it is done: the watchdog and the engine's thread may both know an end."""
    with contextlib.suppress(InvalidStateError):
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


def _allocate(engine: Engine) -> None:
    """Waits for the KV pool, so that READY means that there is one.

    Raises:
        RuntimeError: there is not enough memory.
    """
    try:
        engine.wait_until_allocated()
    except Exception as error:
        raise RuntimeError(
            f"the KV pool of {engine.intake.pool_tokens} tokens (--max-total-tokens) and the state of "
            f"{engine.config.max_running_requests} requests (--max-running-requests) could not be allocated: {error}"
        ) from error


def describe(engine: Engine, model: str) -> dict[str, Any]:
    """What `/get_model_info` tells."""
    config = engine.target.config
    return {
        "model_path": model,
        "is_generation": True,
        "dtype": config.dtype,
        "vocab_size": engine.vocab_size,
        "context_length": engine.context_length,
        "max_total_num_tokens": engine.intake.pool_tokens,
        "max_running_requests": engine.config.max_running_requests,
        "page_size": engine.pool.page_size,
        "speculative_algorithm": engine.drafter.name,
        "speculative_num_draft_tokens": engine.drafter.width,
        "device": engine.device_name,
        "compiling": engine.executables.pending,  # buckets that are still compiled behind
    }
