"""The thread that owns the engine: it loads it, steps it, and hands out what each step brought.

Everything that touches the engine runs here, between two steps. Others leave commands (`submit`, `abort`, `call`) and
get their news through their own event loop, one wake-up for each step.

    event loop:  submit ->  [commands]  -> enqueue, step, step, ...  -> call_soon_threadsafe -> Listener.queue
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from enum import Enum
from typing import Any, TypeVar

from specjax.engine import Engine, StreamChunk
from specjax.engine.news import take_news
from specjax.engine.request import Sequence, Status
from specjax.serve.report import Report

logger = logging.getLogger("specjax.serve")

FAILED_STEP = "the engine failed and was reset; the request can be sent again"
FAILED_REQUEST = "the request failed; the server's log has the reason"
SHUT_DOWN = "the server is shutting down"

Result = TypeVar("Result")


class State(Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class QueueFull(Exception):
    """Too many requests wait already."""


class Listener:
    """Where one request's news arrive, in its event loop."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[StreamChunk | None] = asyncio.Queue()

    def close(self) -> None:
        """Nobody is interested any more: `chunks` ends."""
        self.queue.put_nowait(None)

    async def chunks(self) -> AsyncIterator[StreamChunk]:
        """News until every sequence has finished, or `close`."""
        left = len(self.sequences)
        while left:
            chunk = await self.queue.get()
            if chunk is None:
                return
            left -= chunk.completion is not None
            yield chunk


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
        self.on_change: Callable[[], None] = lambda: None  # called from this thread when `state` has changed
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
        self._step_began: float | None = None
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
    def stalled(self) -> float | None:
        """Seconds that the step under way has taken, if that is more than the watchdog allows."""
        began = self._step_began
        seconds = 0.0 if began is None else time.monotonic() - began
        return seconds if seconds > self._watchdog_timeout else None

    # From any thread

    @property
    def capacity(self) -> int:
        """Most sequences that may run or wait."""
        return self.engine.config.max_running_requests + self._max_queued

    def submit(self, listener: Listener) -> None:
        """Queues a request's sequences. Its news go to the listener.

        Raises:
            QueueFull: too many wait already.
            ValueError: an id is in use.
        """
        with self._wake:
            if len(self._places) + len(listener.sequences) > self.capacity:
                raise QueueFull(f"{len(self._places)} requests run or wait; at most {self.capacity} may")
            taken = {sequence.id for sequence in list(self._places)}
            for sequence in listener.sequences:
                if sequence.id in taken:
                    raise ValueError(f"a request with id {sequence.id!r} is running")
                taken.add(sequence.id)
            for index, sequence in enumerate(listener.sequences):
                self._places[sequence] = (listener, index)
            self._command(lambda: self._enqueue(listener))

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """Ends these, if they still run; their pages come back before the next step."""
        left = [sequence for sequence in sequences if sequence in self._places]
        if left:
            with self._wake:
                self._command(lambda: self._abort(left))

    def call(self, function: Callable[[Engine], Result]) -> Future[Result]:
        """Runs a function on the engine, between two steps."""
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(function(self.engine))
            except Exception as error:
                future.set_exception(error)

        with self._wake:
            self._command(run)
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
                self._engine.warm_up(self._engine.single_request_keys(), progress=self._progress)
                self._behind = self._engine.warm_up_behind(progress=self._progress)
            self.ready_at = time.time()
            self._change(State.READY)
            self._loop(Report(self._engine, interval=self._log_interval))
        except BaseException as error:
            self.failure = error
            self._change(State.FAILED)
            for sequence in (running := list(self._places)):
                sequence.abort(FAILED_STEP)
                sequence.status = Status.FINISHED
            self._deliver(running)
        finally:
            if self._engine is not None:
                self._engine.executables.close()

    def _loop(self, report: Report) -> None:
        engine = self.engine
        while True:
            with self._wake:
                while not (self._commands or engine.unfinished or self._stop_requested):
                    self._wake.wait()
                if self._stop_requested:
                    return
                commands = list(self._commands)
                self._commands.clear()
            for command in commands:
                try:
                    command()
                except Exception:  # one request's trouble
                    logger.exception("A command to the engine failed")
            if not engine.unfinished:
                continue
            self._step_began = time.monotonic()
            try:
                news = engine.step()
            except Exception:
                logger.exception("A step failed: all running requests end, the engine starts anew")
                engine.reset(FAILED_STEP)
                news = list(self._places)  # also those that had ended in this step
            finally:
                self._step_began = None
            self._deliver(news)
            report.after_step()

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
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Listener, StreamChunk]]] = {}
        for sequence in news:
            if sequence not in self._places:
                continue
            finished = sequence.status is Status.FINISHED
            if not finished and len(sequence.output) - sequence.sent_tokens < self._stream_interval:
                continue
            listener, index = self._places[sequence]
            if finished:
                del self._places[sequence]
            chunk = take_news(sequence, index)
            if chunk is not None:
                by_loop.setdefault(listener.loop, []).append((listener, chunk))
        for loop, items in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put, items)
            except RuntimeError:  # the loop is closed: nobody is there
                continue

    def _command(self, command: Callable[[], None]) -> None:
        """With `_wake` held."""
        self._commands.append(command)
        self._wake.notify()

    def _change(self, state: State) -> None:
        if self.state is not State.DRAINING:
            self.state = state
        self.on_change()


def _put(items: list[tuple[Listener, StreamChunk]]) -> None:
    for listener, chunk in items:
        listener.queue.put_nowait(chunk)


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
        "compiling": engine.executables.coming,  # buckets that are still compiled behind
    }
