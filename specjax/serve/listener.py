"""Where a request's news arrive in its event loop, and what it is told when it ends without an answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable

from specjax.engine import Completion, StreamChunk
from specjax.engine.request import Sequence

FAILED_STEP = "the engine failed and was reset; the request can be sent again"
FAILED_REQUEST = "the request failed; the server's log has the reason"
ENGINE_GONE = "the engine failed and the server ends; the request can be sent again when it is back"
ENGINE_STUCK = "the engine is stuck and the server ends; the request can be sent again when it is back"
SHUT_DOWN = "the server is shutting down"

SEND_AGAIN = (FAILED_STEP, ENGINE_GONE, ENGINE_STUCK, SHUT_DOWN)
"""Why a request was aborted that may succeed when it is sent again: a 503, not a 500."""


class Listener:
    """Where one request's news arrive, in its event loop."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[StreamChunk | None] = asyncio.Queue()

    def close(self) -> None:
        """Nobody is interested any more: `chunks` ends."""
        self.queue.put_nowait(None)

    def aborted(self, index: int, message: str) -> StreamChunk:
        """The last chunk of a sequence that ends with `message`, made without looking into the sequence.

        The engine's thread may be stuck in the middle of changing it.
        """
        reason = {"type": "abort", "message": message}
        id = self.sequences[index].id
        return StreamChunk(index, "", [], Completion(id, "", [], 0, reason, 0, 0.0, [], 0))

    async def chunks(self) -> AsyncIterator[StreamChunk]:
        """News until every sequence has finished, or `close`."""
        left = len(self.sequences)
        while left:
            chunk = await self.queue.get()
            if chunk is None:
                return
            left -= chunk.completion is not None
            yield chunk


def tell(items: Iterable[tuple[Listener, StreamChunk]]) -> None:
    """Hands out chunks from any thread, with one wake-up for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Listener, StreamChunk]]] = {}
    for item in items:
        by_loop.setdefault(item[0].loop, []).append(item)
    for loop, its in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there
            loop.call_soon_threadsafe(_put, its)


def _put(items: list[tuple[Listener, StreamChunk]]) -> None:
    for listener, chunk in items:
        listener.queue.put_nowait(chunk)
