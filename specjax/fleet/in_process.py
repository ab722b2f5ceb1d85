"""Requests to an ASGI application in this process, without a socket, for replicas of Ray Serve.

The chunks of an answer are available as soon as the application sends them. Independent of the engine and the routes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message

MAX_AHEAD = 64  # maximum number of unread messages of an answer


class Answer(NamedTuple):
    """Status, headers in lower case, and the chunks of the body, which must be read to the end or closed."""

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
    """Sends one request. Returns after the first chunk of the body: before it, the request can be sent again.

    Closing the chunks early, or cancelling this call, cancels the request. Raises the application's exceptions before
    its first chunk; reading the chunks raises later ones.
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
    messages: asyncio.Queue[Message | Exception] = asyncio.Queue(MAX_AHEAD)
    unread = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        for message in unread:
            return message
        await asyncio.Event().wait()  # there is no disconnect message: leaving cancels the task
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
        message: Any = first
        try:
            yield b""  # closing a generator before its first step runs no `finally`
            while True:
                parts = [message.get("body", b"")]
                while message.get("more_body") and not messages.empty():  # join the chunks that have arrived
                    message = _checked(messages.get_nowait())
                    parts.append(message.get("body", b""))
                if data := b"".join(parts):
                    yield data
                if not message.get("more_body"):
                    return
                message = _checked(await messages.get())
        finally:
            await stop()

    fields = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in start["headers"]]
    content = chunks()
    await anext(content)
    return Answer(start["status"], fields, content)


def _checked(message: Message | Exception) -> Message:
    if isinstance(message, Exception):
        raise message
    return message
