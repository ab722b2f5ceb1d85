"""The deployment between Ray Serve's proxies and the replicas: it sends requests of a dead replica to another one.

Ray Serve itself answers these with a 500. A request can be sent again until a part of its answer has reached the
client: a whole answer until it is complete, a stream until its first event. A stream that has begun ends with an error
event.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from specjax.cli.serve import error_forms
from specjax.serve.answers import event
from specjax.serve.errors import ApiError, form_of, unavailable

logger = logging.getLogger("specjax.serve")

ATTEMPTS = 3
PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/generate", "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", "/v1/models", "/health",
)  # fmt: skip
"""Paths that any replica can answer. All other paths, such as `/metrics` and `/flush_cache`, are about one replica."""
GONE = "every replica that was asked died before it could answer; the request can be sent again"
BROKEN = "the replica died in the middle of the answer; the request can be sent again"


def is_stream(headers: list[tuple[str, str]]) -> bool:
    """True if these are the headers of server-sent events."""
    return any(name.lower() == "content-type" and "text/event-stream" in value for name, value in headers)


async def when_complete(items: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
    """The items of `SpecjaxServer.http`: the status with the headers, then chunks of the body. Yields nothing before
    the first event of a stream, or the whole of any other body, has arrived."""
    status, headers = await anext(items)
    chunks = []
    async for chunk in items:
        chunks.append(chunk)
        if is_stream(headers):
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
        self._replicas = replicas.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", "").rstrip("/"))
        form = form_of(path, error_forms())
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
