"""ASGI middleware before every route: request ids, the API key, readiness, and limits of bodies."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specjax.acceptance import SyntheticAcceptance
from specjax.engine.generation import forget_frames
from specjax.serve.errors import SHUT_DOWN, ApiError, ErrorForm, State, form_of, shown, unavailable
from specjax.serve.runner import Service
from specjax.serve.server_settings import ServerSettings

logger = logging.getLogger("specjax.serve")

MAX_BODY = 32 * 2**20  # bytes of a request body
MAX_BODIES = 2**30  # bytes of the bodies of all unanswered requests
HEALTH = "/health"  # answers in any state
PAGE = "/"  # the chat page: static and without secrets
OPEN = (HEALTH, PAGE)  # paths that need no API key
COMMANDS = ("/abort_request", "/continue_generation", "/flush_cache", "/pause_generation")  # change the engine's state
# Origins that may be the server's own: a page can give its own name the server's address (DNS rebinding), but no other
# name. A page at an IP address or at localhost comes from that address.
OWN_ORIGIN = re.compile(r"https?://((?:localhost|[\d.]+|\[[\da-f:.]+\])(?::\d+)?)")
MAX_PATH = 256  # bytes of a path in the log and in messages
MAX_METHOD = 16  # bytes of a method there
MAX_REASON = 256  # characters of an error's message in the log
CLOSE = {"Connection": "close"}
LAST_SEND = 0.1  # seconds to send an answer when the server ends; its client may not read
SYNTHETIC = "X-Specjax-Synthetic-Acceptance"  # header of every answer with `SyntheticAcceptance`
INTERNAL = "internal error; the server's log has it"


class Gate:
    """Checks every request before its route, limits the size of its body, and logs the answer. HEAD is answered as GET,
    without the body. `error_forms`: as in `form_of`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        runner: Service,
        settings: ServerSettings,
        error_forms: Mapping[str, ErrorForm] = MappingProxyType({}),
    ) -> None:
        self._app, self._runner, self._settings = app, runner, settings
        self._error_forms = error_forms
        self._bytes = 0  # of the bodies of all unanswered requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the lifespan of an application that another server runs
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        id, form = request_id(headers), form_of(scope["path"], self._error_forms)
        size, answered, reason = 0, False, ""

        async def receive_limited() -> Message:
            """The next message of a body. Raises an ApiError if the bodies are too large."""
            nonlocal size
            message = await receive()
            new = len(message.get("body", b""))
            size += new
            self._bytes += new
            if size > MAX_BODY:
                raise _too_large()
            if self._bytes > MAX_BODIES:
                raise unavailable("the bodies of other requests fill the memory for them", retry_after=1, close=True)
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                answer = MutableHeaders(scope=message)
                answer["X-Request-Id"] = id
                if self._runner.loaded and isinstance(self._runner.engine.verify, SyntheticAcceptance):
                    answer[SYNTHETIC] = "text is not the model's: drafts are accepted at given rates"
                log_answer(scope, message["status"], id, reason)
            elif scope["method"] == "HEAD":
                message["body"] = b""
            await send(message)

        try:
            self._check(scope, headers)
            routed = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self._app(routed, receive_limited, send_with_id)
        except ApiError as error:
            forget_frames(error)  # or they keep the body until the next garbage collection
            reason = str(error)
            await error.response(form)(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the server ends
            if not answered:
                async with asyncio.timeout(LAST_SEND):
                    await unavailable(SHUT_DOWN, retry_after=30, close=True).response(form)(
                        scope, receive, send_with_id
                    )
            raise
        except Exception as error:
            forget_frames(error)
            if answered:  # too late for an error: cut the connection
                raise
            logger.exception("request %s failed", id)
            await ApiError(500, INTERNAL).response(form)(scope, receive, send_with_id)
        finally:
            self._bytes -= size

    def _check(self, scope: Scope, headers: Headers) -> None:
        path = scope["path"]
        if path in OPEN:
            return
        if self._settings.api_key:
            scheme, _, token = headers.get("authorization", "").partition(" ")
            if not scheme:  # some clients send only the key, in a header of its own
                scheme, token = "bearer", headers.get("x-api-key", "")
            # Headers are decoded as latin-1. Comparing with all keys keeps the time independent of the key.
            sent = token.strip().encode("latin-1")
            valid = sum(hmac.compare_digest(sent, key.encode()) for key in self._settings.api_key) > 0
            if scheme.lower() != "bearer" or not valid:
                needs = "this server needs its API key, as `Authorization: Bearer KEY` or `x-api-key: KEY`"
                raise ApiError(401, needs, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if path in COMMANDS:
            check_origin(headers, self._settings.allowed_origins)
        # During a drain, `Generation.respond` refuses new requests. Routers and Prometheus read the state meanwhile.
        if self._runner.state is not State.DRAINING or not self._runner.loaded:
            check_state(self._runner)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > MAX_BODY:
            raise _too_large()


def check_origin(headers: Headers, allowed: Collection[str]) -> None:
    """Raises an ApiError, a 403, if a web page of another server sent the request. Browsers add `Origin` to every POST;
    other programs send none."""
    origin = headers.get("origin")
    if origin is None or origin in allowed or "*" in allowed:
        return
    own = OWN_ORIGIN.fullmatch(origin)
    if own is None or own[1] != headers.get("host"):
        origins = f"the origins of --allowed-origins (now {', '.join(allowed) or 'none'})"
        raise ApiError(
            403, f"web pages of {shown(origin)} send no commands to this server; only its own and {origins} do"
        )


def check_state(runner: Service) -> None:
    """Raises an ApiError, a 503, if the engine accepts no requests."""
    if runner.state is State.LOADING:
        raise unavailable("the model is loading", retry_after=5)
    if runner.state is State.DRAINING:
        raise unavailable(SHUT_DOWN, retry_after=30, close=True)
    if runner.state is State.FAILED:
        raise unavailable("the engine has failed; see the server's log", retry_after=60)


def request_id(headers: Headers) -> str:
    """The client's request id if it is short and has only letters, digits and `.:/+=@-_`, else a new id."""
    id = headers.get("x-request-id", "")
    return id if re.fullmatch(r"[\w.:/+=@-]{1,128}", id, re.ASCII) else secrets.token_hex(12)


def shown_path(path: str) -> str:
    """A path for log lines and messages: printable, and cut to `MAX_PATH` bytes."""
    text = quote(path[:MAX_PATH], errors="replace")
    return text if len(text) <= MAX_PATH and len(path) <= MAX_PATH else text[: MAX_PATH - 3] + "..."


def log_answer(scope: Mapping[str, Any], status: int, id: str, reason: str) -> None:
    """Writes a line about an answer. `reason`: of an error. Probes of `/health` are many: at level debug."""
    client = "{}:{}".format(*(scope.get("client") or ("unknown", 0)))
    line = f"{scope['method'][:MAX_METHOD]} {shown_path(scope['path'])} HTTP/{scope['http_version']}"
    reason = reason[:MAX_REASON]
    if not (reason.isascii() and reason.isprintable()):
        reason = ascii(reason)[1:-1][:MAX_REASON]
    level = logging.DEBUG if scope["path"] == HEALTH else logging.INFO
    logger.log(level, '%s - "%s" %d, request %s%s', client, line, status, id, f": {reason}" if reason else "")


def _too_large() -> ApiError:
    # The rest of the body is not read, so the connection cannot be used again.
    return ApiError(413, f"the body is larger than {MAX_BODY} bytes", headers=CLOSE)
