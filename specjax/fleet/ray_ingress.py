"""HTTP requests to replicas of Ray Serve: `Ingress` forwards them, and `call` runs them in the replica's application.

Ray Serve answers requests of a dead replica with a 500; the ingress sends them to another replica, as long as no part
of the answer has reached the client: a whole answer until it is complete, a stream until its first event. A stream that
has begun ends with an error event.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message

from specjax.cli.serve import extensions
from specjax.serve.app import error_forms
from specjax.serve.errors import ApiError, form_of, unavailable
from specjax.serve.openai_answers import event

logger = logging.getLogger("specjax.serve")

ATTEMPTS = 3
PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/generate", "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", "/v1/models", "/health",
)  # fmt: skip
"""Paths that any replica can answer. All other paths, such as `/metrics` and `/flush_cache`, are about one replica."""
GONE = "every replica that was asked died before it could answer; the request can be sent again"
BROKEN = "the replica died in the middle of the answer; the request can be sent again"


async def when_complete(items: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
    """The items of `SpecjaxServer.http`: the status with the headers, then chunks of the body. Yields nothing before
    the first event of a stream, or the whole of any other body, has arrived."""
    status, headers = await anext(items)
    is_stream = any(name.lower() == "content-type" and "text/event-stream" in value for name, value in headers)
    chunks = []
    async for chunk in items:
        chunks.append(chunk)
        if is_stream:
            break
    yield status, headers
    for chunk in chunks:
        yield chunk
    async for chunk in items:
        yield chunk


async def first_alive(send: Callable[[], Any]) -> AsyncGenerator[Any, None]:
    """The items of the asynchronous iterable that `send` returns. If the replica dies before the first item, calls
    `send` again.

    Raises:
        ApiError, a 503: no replica answered, or one died after its first item.
    """
    from ray.exceptions import RayActorError  # type: ignore
    from ray.serve.exceptions import DeploymentUnavailableError  # type: ignore

    for attempt in range(1, ATTEMPTS + 1):
        begun = False
        try:
            async for item in send():
                begun = True
                yield item
            return
        except RayActorError as error:
            if begun:
                raise unavailable(BROKEN, retry_after=1) from error
            logger.warning("A replica died before it answered, attempt %d of %d", attempt, ATTEMPTS)
        except DeploymentUnavailableError as error:
            raise unavailable(f"no replica can be started: {error}", retry_after=60) from error
    raise unavailable(GONE, retry_after=5)


class Ingress:
    """Forwards HTTP requests unchanged to replicas of `SpecjaxServer`; `replicas` is the handle that Ray binds."""

    def __init__(self, replicas: Any) -> None:
        self._replicas, self._forms = replicas.options(stream=True), error_forms(extensions())

    async def __call__(self, request: Request) -> Response:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", "").rstrip("/"))
        form = form_of(path, self._forms)
        if path not in PATHS and not path.startswith("/v1/models/"):
            return ApiError(404, f"there is no {path} here").response(form)
        body, headers = await request.body(), request.headers.items()
        query = request.scope.get("query_string", b"")
        items = first_alive(
            lambda: when_complete(self._replicas.http.remote(request.method, path, query, list(headers), body))
        )
        try:
            status, answer_headers = await anext(items)
        except ApiError as error:
            return error.response(form)

        async def chunks() -> AsyncGenerator[bytes, None]:
            async with contextlib.aclosing(items):
                try:
                    async for chunk in items:
                        yield chunk
                except ApiError as error:  # only in a stream: any other answer is whole before it is sent
                    yield event(error.body())

        others = {name: value for name, value in answer_headers if name != "x-request-id"}  # Ray Serve adds its own
        return StreamingResponse(chunks(), status, others)


MAX_AHEAD = 64  # maximum number of unread messages of an answer


async def call(
    app: ASGIApp,
    method: str,
    path: str,
    *,
    query: bytes = b"",
    headers: Iterable[tuple[str, str]] = (),
    body: bytes = b"",
) -> AsyncGenerator[Any, None]:
    """Sends one request. Yields the status with the headers, in lower case, then the chunks of the body.

    Yields nothing before the first chunk has arrived: until then, the request can be sent again. Raises the
    application's exceptions. Closing the generator cancels the request.
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
    try:
        start, message = _checked(await messages.get()), _checked(await messages.get())
        while not message.get("body") and message.get("more_body"):
            message = _checked(await messages.get())
        fields = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in start["headers"]]
        yield start["status"], fields
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
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _checked(message: Message | Exception) -> Message:
    if isinstance(message, Exception):
        raise message
    return message
