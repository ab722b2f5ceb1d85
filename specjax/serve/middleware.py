"""ASGI middleware before every route: request ids, the API key, readiness, HEAD, and limits of bodies."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specjax.serve.errors import ApiError, unavailable
from specjax.serve.runner import SHUT_DOWN, Runner, State

logger = logging.getLogger("specjax.serve")

MAX_BODY = 32 * 2**20
"""Bytes of a request body."""

MAX_BODIES = 2**30
"""Bytes of all bodies that are held at once. A body is held until its request has been answered."""

WHOLE = 10.0
"""A whole request may take this many times as long as one pause in it."""

OPEN = "/health"
"""The path that needs no key, and answers in any state."""

CROWDED = "specjax.crowded"
"""In the scope's state, set by the connection: how many connections are open, where that is too many."""

CLOSE = {"Connection": "close"}

INTERNAL = "internal error; the server's log has it"


class HeadWithoutBody:
    """Answers HEAD with the headers of GET. uvicorn cuts the body off, other ASGI servers may not."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_headers(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        head = scope["type"] == "http" and scope["method"] == "HEAD"
        await self._app(scope, receive, send_headers if head else send)


class Gate:
    def __init__(self, app: ASGIApp, *, runner: Runner, api_key: str | None, receive_timeout: float = 60.0) -> None:
        self._app, self._runner, self._timeout = app, runner, receive_timeout
        self._held = 0  # bytes of bodies
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        id = request_id(headers)
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["X-Request-Id"] = id
                log_answer(scope, message["status"], id)
            await send(message)

        body = _Body(self, receive)
        try:
            self._check(scope, headers)
            await self._app(scope, body.receive, send_with_id)
        except ApiError as error:
            await error_response(error)(scope, receive, send_with_id)
        except Exception:
            if started:  # all that is left is to cut the connection
                raise
            logger.exception("request %s failed", shown_id(id))
            await error_response(ApiError(500, INTERNAL))(scope, receive, send_with_id)
        finally:
            body.release()

    def _check(self, scope: Scope, headers: Headers) -> None:
        if scope["path"] == OPEN:
            return
        if crowd := scope.get("state", {}).get(CROWDED):
            raise unavailable(f"{crowd} connections are open, too many (--max-connections)", retry_after=1, close=True)
        if self._key is not None:
            given = headers.get("authorization", "")
            scheme, _, token = given.partition(" ")
            right = hmac.compare_digest(token.strip().encode("latin-1"), self._key)  # the bytes as they came
            if scheme.lower() != "bearer" or not right:
                needs = "this server needs its API key, as `Authorization: Bearer KEY`"
                raise ApiError(401, needs, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        check_state(self._runner)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > MAX_BODY:
            raise _too_large()


def check_state(runner: Runner) -> None:
    """
    Raises:
        ApiError: 503, the engine takes no requests.
    """
    if runner.state is State.LOADING:
        raise unavailable("the model is loading", retry_after=5)
    if runner.state is State.DRAINING:
        raise unavailable(SHUT_DOWN, retry_after=30, close=True)
    if runner.state is State.FAILED:
        raise unavailable("the engine has failed; see the server's log", retry_after=60)


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, headers=error.headers)


def request_id(headers: Headers) -> str:
    """The client's, if it is printable ASCII and short; else a new one."""
    given = headers.get("x-request-id", "")
    return given if 0 < len(given) <= 128 and given.isascii() and given.isprintable() else secrets.token_hex(12)


def shown_id(id: str) -> str:
    """The id as the log shows it: in quotes if it could be mistaken for something else."""
    return id if re.fullmatch(r"[\w.:/+=@-]+", id, re.ASCII) else json.dumps(id)


def log_answer(scope: Scope, status: int, id: str) -> None:
    client = "{}:{}".format(*(scope.get("client") or ("unknown", 0)))
    line = f"{scope['method']} {quote(scope['path'])} HTTP/{scope['http_version']}"
    logger.info('%s - "%s" %d, request %s', client, line, status, shown_id(id))


class _Body:
    """The receiving end of a request: bodies are counted as they come, and must come in time."""

    def __init__(self, gate: Gate, receive: Receive) -> None:
        self._gate, self._receive = gate, receive
        self._bytes, self._whole = 0, False
        self._began = asyncio.get_running_loop().time()

    async def receive(self) -> Message:
        """The next message; see ASGI.

        Raises:
            ApiError: 408, 413 or 503: the body is too slow, too large, or there is no room for it.
        """
        if self._whole:  # only a disconnect can come now
            return await self._receive()
        pause = self._gate._timeout
        deadline = min(asyncio.get_running_loop().time() + pause, self._began + WHOLE * pause)
        try:
            async with asyncio.timeout_at(deadline):
                message = await self._receive()
        except TimeoutError:
            limits = f"at most {pause:g} s without a byte, {WHOLE * pause:g} s for the whole (--receive-timeout)"
            raise ApiError(408, f"the request was not complete in time: {limits}", headers=CLOSE) from None
        size = len(message.get("body", b""))
        self._whole = not message.get("more_body", False)
        self._bytes += size
        self._gate._held += size
        if self._bytes > MAX_BODY:
            raise _too_large()
        if self._gate._held > MAX_BODIES:
            raise unavailable("the bodies of other requests fill the memory for them", retry_after=1, close=True)
        return message

    def release(self) -> None:
        self._gate._held -= self._bytes
        self._bytes = 0


def _too_large() -> ApiError:
    # The rest of the body is not read, so the connection cannot go on.
    return ApiError(413, f"the body is larger than {MAX_BODY} bytes", headers=CLOSE)
