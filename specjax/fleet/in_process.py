"""Requests to an ASGI application in this process, without a socket.

For callers that have a transport of their own, such as Ray Serve's replicas. The answer's chunks come as the
application sends them. Knows neither the engine nor the routes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message

MOST_AHEAD = 64  # messages of an answer that may wait for their reader


class Answer(NamedTuple):
    """Status, headers in lower case, and the body's chunks, which must be read to the end or closed."""

    status: int
    headers: list[tuple[str, str]]
    chunks: AsyncGenerator[bytes, None]

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([chunk async for chunk in self.chunks])


async def call(
    app: ASGIApp,
    method: str,
    path: str,
    *,
    query: bytes = b"",
    headers: Iterable[tuple[str, str]] = (),
    body: bytes = b"",
) -> Answer:
    """Sends one request. Returns when the first chunk of the body is there: until then nothing has been answered.

    Closing the chunks early, or cancelling this call, cancels the request. Raises what the application raises before
    its first chunk; reading the chunks raises what it raises later.
    """
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query,
        "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers],
        "client": None,
        "server": None,
        "state": {},
    }
    messages: asyncio.Queue[Message | Exception] = asyncio.Queue(MOST_AHEAD)
    unread = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        for message in unread:
            return message
        await asyncio.Event().wait()  # a caller that leaves cancels the task instead
        raise AssertionError

    async def run() -> None:
        problem: Exception = RuntimeError(f"{method} {path}: the application ended without a whole answer")
        try:
            await app(scope, receive, messages.put)
        except Exception as error:
            problem = error
        await messages.put(problem)  # not read after a whole answer

    task = asyncio.create_task(run())

    async def stop() -> None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    try:
        start = _checked(await messages.get())
        first = _checked(await messages.get())
        while not first.get("body") and first.get("more_body"):
            first = _checked(await messages.get())
    except BaseException:
        await stop()
        raise

    async def chunks() -> AsyncGenerator[bytes, None]:
        now: Any = first
        try:
            yield b""  # closing a generator that was never begun runs nothing
            while True:
                parts = [now.get("body", b"")]
                while now.get("more_body") and not messages.empty():  # what is there already goes with it
                    now = _checked(messages.get_nowait())
                    parts.append(now.get("body", b""))
                if together := b"".join(parts):
                    yield together
                if not now.get("more_body"):
                    return
                now = _checked(await messages.get())
        finally:
            await stop()

    found = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in start["headers"]]
    content = chunks()
    await anext(content)
    return Answer(start["status"], found, content)


def _checked(message: Message | Exception) -> Message:
    if isinstance(message, Exception):
        raise message
    return message
