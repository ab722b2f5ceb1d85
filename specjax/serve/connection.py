"""HTTP connections: uvicorn's, with answers in OpenAI's form where it has plain text, and limits where it has none.

uvicorn's protocol classes parse requests and run the app. This module decides their own answers (400 for what is not
HTTP), their time limits (for the rest of headers, and for the rest of a body after its answer) and their end when the
server stops. While the app reads a body, `specjax.serve.middleware` limits its time.

    connected -> headers -> body -> answer -> headers ...
    `part` is the incomplete part of a request. None: uvicorn's keep-alive time-out or the app decide.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import json
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from starlette.datastructures import Headers
from uvicorn.protocols.http.h11_impl import H11Protocol

from specjax.cli.flags import ServerSettings
from specjax.serve.errors import error_body
from specjax.serve.middleware import CROWDED, WHOLE, log_answer, request_id
from specjax.serve.runner import SHUT_DOWN

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError:  # an extra of uvicorn, which is faster
    HttpToolsProtocol = None

LINGER = 1.0
"""Seconds in which a refused client may still send: closing at once could destroy the answer on its way."""

MOST_HEADERS = 65_536
"""Bytes of headers. h11 has its own, lower limit; httptools has none."""

Part = Literal["headers", "body"]


def is_answering(connection: Any) -> bool:
    """Whether an answer has been written in part."""
    cycle = getattr(connection, "cycle", None)
    return cycle is not None and cycle.response_started and not cycle.response_complete


class _Guarded:
    """Mixed into uvicorn's protocol classes, which have the attributes without a value here."""

    transport: Any
    flow: Any
    loop: Any
    cycle: Any
    client: Any
    connections: Any
    server_state: Any
    app_state: dict[str, Any]
    timeout_keep_alive: float
    timeout_keep_alive_task: Any
    timeout_keep_alive_handler: Any

    receive_timeout: float  # seconds that a client may pause within a request
    max_connections: int  # requests of further connections get a 503; beyond twice as many, connections are cut

    part: Part | None = None
    """The incomplete part of a request of which some bytes have come."""

    _began = 0.0  # when the first byte of the incomplete request came, or the connection
    _heard = 0.0  # when the last byte came
    _headers = 0  # bytes of incomplete headers
    _timer: asyncio.TimerHandle | None = None
    _refused = False  # the last answer has been written

    # Called by asyncio

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        count = len(self.connections)
        if count > 2 * self.max_connections:
            transport.abort()
        elif count > self.max_connections:
            self.app_state = self.app_state | {CROWDED: count}
        self._began = self._heard = self.loop.time()
        self._watch(self.receive_timeout)

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        super().connection_lost(error)  # type: ignore[misc]

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._heard = self.loop.time()
        if self.part is None:
            self._began, self._headers = self._heard, 0
        super().data_received(data)  # type: ignore[misc]
        if self._refused or self.transport.is_closing():
            return
        if self.part is None:
            self._keep_alive()
            return
        if self.part == "headers":
            self._headers += len(data)
            if self._headers > MOST_HEADERS:
                self._refuse(431, f"the headers are larger than {MOST_HEADERS} bytes")
                return
        if self._timer is None:
            self._watch(self.receive_timeout)

    # Called by uvicorn

    def send_400_response(self, msg: str) -> None:
        """Called while uvicorn handles the parser's error, which says more than `msg`."""
        error = sys.exc_info()[1]
        about = f": {error!s:.200}" if error is not None and str(error) else ""
        self._refuse(getattr(error, "error_status_hint", 400), f"{msg.rstrip('.')}{about}")

    def shutdown(self) -> None:
        """The server stops: answers may end, and incomplete requests are refused."""
        if self._refused:
            self.transport.abort()
        elif self.part is not None and not is_answering(self):
            self._refuse(503, SHUT_DOWN, {"Retry-After": "30"})
        else:
            super().shutdown()  # type: ignore[misc]

    # Called here

    @property
    def _open(self) -> bool:
        """Whether the app has a request without a complete answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._look)

    def _look(self) -> None:
        """Refuses a client that has been too slow. One timer a connection, and none while the app works."""
        self._timer = None
        if self._refused or self.transport.is_closing():
            return
        now = self.loop.time()
        if self.part is None:
            if self.cycle is None:  # connected, and nothing sent
                self.transport.close()
            return
        left = self._began + self.receive_timeout - now
        if self.part == "body":
            left = min(self._heard + self.receive_timeout, self._began + WHOLE * self.receive_timeout) - now
        if left > 0 or (self.part == "body" and self._open):  # the middleware limits a body that the app reads
            self._watch(max(left, self.receive_timeout / 10))
        elif self.part == "body":  # answered already
            self.transport.close()
        else:
            self._refuse(408, f"the headers were not complete within {self.receive_timeout:g} s (--receive-timeout)")

    def _keep_alive(self) -> None:
        """Restarts uvicorn's timer for idle connections, which any byte ends, even the rest of an answered body."""
        if self.cycle is not None and self.cycle.response_complete and self.timeout_keep_alive_task is None:
            handler = self.timeout_keep_alive_handler
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, handler)

    def _refuse(self, status: int, message: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        """Answers without the app, and ends the connection."""
        if is_answering(self):  # too late for another answer
            self.transport.close()
            return
        scope, id = {"method": "-", "path": "-", "http_version": "1.1", "client": self.client}, request_id(Headers())
        if self._open:
            scope, id = self.cycle.scope, request_id(Headers(scope=self.cycle.scope))
            self.cycle.disconnected = True  # the app writes no answer then
            self.cycle.message_event.set()
        body = json.dumps(error_body(status, message)).encode()
        fields = {
            **{name.decode(): value.decode() for name, value in self.server_state.default_headers},
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            "x-request-id": id,
            **headers,
        }
        lines = [f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}", *(f"{k}: {v}" for k, v in fields.items())]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        log_answer(scope, status, id)
        self._refused = True
        self.flow.resume_reading()
        with contextlib.suppress(OSError):  # the client has left
            if self.transport.can_write_eof():
                self.transport.write_eof()
        self.loop.call_later(LINGER, self.transport.abort)


class H11Connection(_Guarded, H11Protocol):  # type: ignore[misc]
    @property
    def part(self) -> Part | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        # By name: h11's states are classes of their own, one of which is the value.
        state = str(self.conn.their_state)
        if state == "SEND_BODY":
            return "body"
        return "headers" if state == "IDLE" and self.conn.trailing_data[0] else None


if HttpToolsProtocol is not None:

    class HttpToolsConnection(_Guarded, HttpToolsProtocol):  # type: ignore[misc]
        def on_message_begin(self) -> None:
            self.part = "headers"
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self.part = "body"
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self.part = None
            super().on_message_complete()


def connection_class(settings: ServerSettings) -> type[asyncio.Protocol]:
    """The `http` of `uvicorn.Config`: over httptools where that is installed, as uvicorn chooses, else over h11."""
    base: Any = H11Connection if HttpToolsProtocol is None else HttpToolsConnection
    limits = {"receive_timeout": settings.receive_timeout, "max_connections": settings.max_connections}
    return type(base.__name__, (base,), limits)
