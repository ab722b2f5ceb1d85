"""What stands before every route: request ids, the API key, readiness, and the size of bodies. Plain ASGI."""

from __future__ import annotations

import hmac
import logging
import secrets
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specjax.serve.errors import ApiError, unavailable
from specjax.serve.runner import Runner, State

logger = logging.getLogger("specjax.serve")

MAX_BODY = 32 * 2**20
"""Bytes of a request body."""

OPEN = "/health"
"""Answers whoever asks, in any state."""


class Gate:
    def __init__(self, app: ASGIApp, *, runner: Runner, api_key: str | None) -> None:
        self._app, self._runner = app, runner
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        id = request_id(headers)

        client = "{}:{}".format(*(scope.get("client") or ("unknown", 0)))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = id
                line = f"{scope['method']} {quote(scope['path'])} HTTP/{scope['http_version']}"
                logger.info('%s - "%s" %d, request %s', client, line, message["status"], id)
            await send(message)

        try:
            self._check(scope["path"], headers)
            await self._app(scope, _limited(receive), send_with_id)
        except ApiError as error:
            await error_response(error)(scope, receive, send_with_id)

    def _check(self, path: str, headers: Headers) -> None:
        if path == OPEN:
            return
        if self._key is not None:
            given = headers.get("authorization", "")
            scheme, _, token = given.partition(" ")
            right = hmac.compare_digest(token.strip().encode("latin-1"), self._key)  # the bytes as they came
            if scheme.lower() != "bearer" or not right:
                raise ApiError(
                    401,
                    "this server needs its API key, as `Authorization: Bearer KEY`",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        check_state(self._runner)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > MAX_BODY:
            raise _too_large()


def check_state(runner: Runner) -> None:
    """Whether the engine takes requests.

    Raises:
        ApiError: 503, it does not.
    """
    if runner.state is State.LOADING:
        raise unavailable("the model is loading", retry_after=5)
    if runner.state is State.DRAINING:
        raise unavailable("the server is shutting down", retry_after=30)
    if runner.state is State.FAILED:
        raise unavailable("the engine has failed; see the server's log", retry_after=60)


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, headers=error.headers)


def request_id(headers: Headers) -> str:
    """The client's, if it is printable ASCII and short; else a new one."""
    given = headers.get("x-request-id", "")
    return given if 0 < len(given) <= 128 and given.isascii() and given.isprintable() else secrets.token_hex(12)


def _limited(receive: Receive) -> Receive:
    """Bodies without a length are counted as they come."""
    seen = 0

    async def counted() -> Any:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > MAX_BODY:
            raise _too_large()
        return message

    return counted


def _too_large() -> ApiError:
    # The rest of the body is not read, so the connection cannot go on.
    return ApiError(413, f"the body is larger than {MAX_BODY} bytes", headers={"Connection": "close"})
