"""Stream deltas on their way from the engine's thread to the event loop of their request.

Text without stop strings is made in a separate thread: the engine's thread passes on which sequences have changed, and
launches the next step in the meantime.

    engine's thread:  put  ->  [changes]  ->  tokens to text  ->  call_soon_threadsafe  ->  Listener.queue
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import NamedTuple

from specjax.engine import Completion, StreamChunk
from specjax.engine.generation import DeltaReader
from specjax.engine.sequence import AbortCode, FinishReason, Sequence

logger = logging.getLogger("specjax.serve")

MAX_UNREAD = 64  # deltas of a sequence that wait for their client; then its next delta is delayed, and larger
FAILED_REQUEST = "the request failed; the server's log has the reason"


class Listener:
    """Receives one request's stream deltas in its event loop; without `streams` only the last of each sequence."""

    def __init__(self, sequences: list[Sequence], *, streams: bool = True) -> None:
        self.sequences, self.streams = sequences, streams
        self.readers = [DeltaReader(sequence, index) for index, sequence in enumerate(sequences)]
        self.ended = set[int]()  # indices of sequences whose last chunk has been sent
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[StreamChunk] = asyncio.Queue()

    @property
    def full(self) -> bool:
        return self.queue.qsize() >= MAX_UNREAD * len(self.sequences)

    def aborted(self, index: int, message: str, code: AbortCode | None = None) -> StreamChunk:
        """The last chunk of a sequence that ends with `message`. Does not read the sequence, because the engine's
        thread may be stuck while changing it."""
        id, reason = self.sequences[index].id, FinishReason("abort", message=message, code=code)
        return StreamChunk(index, "", [], Completion(id, "", [], 0, reason.as_dict(0), 0, 0.0, [], 0))

    async def chunks(self) -> AsyncIterator[StreamChunk]:
        """Stream deltas until every sequence has finished."""
        running = len(self.sequences)
        while running:
            chunk = await self.queue.get()
            running -= chunk.completion is not None
            yield chunk


def send(chunks: Iterable[tuple[Listener, StreamChunk]]) -> None:
    """Delivers chunks from any thread, with one wake-up of their event loop."""

    def put(pairs: list[tuple[Listener, StreamChunk]]) -> None:
        for listener, chunk in pairs:
            listener.queue.put_nowait(chunk)

    for loop, pairs in itertools.groupby(chunks, key=lambda pair: pair[0].loop):
        with contextlib.suppress(RuntimeError):  # the loop is closed, and all its clients are gone
            loop.call_soon_threadsafe(put, list(pairs))


class Change(NamedTuple):
    """The state of a sequence after a step."""

    sequence: Sequence
    listener: Listener
    place: int  # index of the sequence in the listener
    tokens: int | None  # number of output tokens; None: it has finished, and does not change any more


class Delivery(threading.Thread):
    """Sends the deltas of changed sequences in the order of `put`. `stop` sends the rest, and ends the thread.

    Args:
        interval: minimum number of tokens in a delta, except the last one.
        failed: called with a sequence whose text cannot be made, before its client gets an answer.
    """

    def __init__(self, interval: int, failed: Callable[[Sequence], None]) -> None:
        super().__init__(name="specjax-delivery", daemon=True)
        self._interval, self._failed = interval, failed
        self._changes: SimpleQueue[list[Change] | None] = SimpleQueue()

    def put(self, changes: list[Change]) -> None:
        """Called by the engine's thread, which makes the text of sequences with stop strings, before the next step."""
        ready = [change for change in changes if not change.sequence.output.stream.late]
        if ready:
            send(self._chunks(ready))
        if len(ready) < len(changes):
            self._changes.put([change for change in changes if change.sequence.output.stream.late])

    def run(self) -> None:
        while (changes := self._changes.get()) is not None:
            send(self._chunks(changes))

    def stop(self) -> None:
        self._changes.put(None)
        self.join()

    def _chunks(self, changes: list[Change]) -> Iterator[tuple[Listener, StreamChunk]]:
        for sequence, listener, index, tokens in changes:
            reader = listener.readers[index]
            if index in listener.ended or (tokens is not None and tokens - reader.tokens < self._interval):
                continue
            if tokens is not None and listener.full:  # its output stays in the sequence
                continue
            try:
                chunk = reader.take(tokens if sequence.output.stream.late else None)
            except BaseException:  # including a panic of `tokenizers`; other sequences continue
                logger.exception("request %s failed", sequence.id)
                self._failed(sequence)
                chunk = listener.aborted(index, FAILED_REQUEST)
            if chunk is None:
                continue
            if chunk.completion is not None:
                listener.ended.add(index)
            yield listener, chunk
