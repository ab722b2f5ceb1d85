"""HTTP connections: uvicorn's protocol class over h11, with time limits and errors in OpenAI's form.

uvicorn limits neither the time for headers, nor the time for the rest of an answered body, nor silent connections, and
answers malformed requests with plain text. `specjax.serve.middleware` limits the time of bodies that the app reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import sys
from typing import Any, Literal

from starlette.datastructures import Headers
from uvicorn.protocols.http.h11_impl import H11Protocol

from specjax.serve.errors import SHUT_DOWN, ApiError, unavailable
from specjax.serve.middleware import CROWDED, WHOLE, log_answer, request_id
from specjax.serve.server_settings import ServerSettings

LINGER = 1.0  # seconds until a refused connection is cut; cutting it at once could discard the answer


class Connection(H11Protocol):
    settings: ServerSettings  # set by `connection_class`

    _began = 0.0  # time of the first byte of the incomplete request, or of the connection
    _heard = 0.0  # time of the last byte
    _timer: asyncio.TimerHandle | None = None
    _refused = False  # True after the last answer

    @property
    def part(self) -> Literal["headers", "body"] | None:
        """The incomplete part of the current request. None: uvicorn's keep-alive or the app limits the time."""
        # h11's states are classes, compared here by name.
        state = str(self.conn.their_state)
        if state == "SEND_BODY":
            return "body"
        return "headers" if state == "IDLE" and self.conn.trailing_data[0] else None

    @property
    def is_answering(self) -> bool:
        """True if a part of an answer has been written."""
        return self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete

    @property
    def _open(self) -> bool:
        """True if the app has a request without a complete answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        count, most = len(self.connections), self.settings.max_connections
        if count > 2 * most:
            transport.abort()
        elif count > most:
            self.app_state = self.app_state | {CROWDED: count}
        self._began = self._heard = self.loop.time()
        self._watch(self.settings.receive_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._heard = self.loop.time()
        if self.part is None:
            self._began = self._heard
        super().data_received(data)
        if self._refused or self.transport.is_closing():
            return
        if self.part is not None:
            if self._timer is None:
                self._watch(self.settings.receive_timeout)
        elif self.cycle is not None and self.cycle.response_complete and self.timeout_keep_alive_task is None:
            # uvicorn stops its idle timer at any byte, even of the rest of an answered body.
            handler = self.timeout_keep_alive_handler
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, handler)

    def send_400_response(self, msg: str) -> None:
        """Adds the parser's error, which uvicorn is handling, to `msg`."""
        error = sys.exc_info()[1]
        about = f": {error!s:.200}" if error is not None and str(error) else ""
        self._refuse(ApiError(getattr(error, "error_status_hint", 400), f"{msg.rstrip('.')}{about}"))

    def shutdown(self) -> None:
        """Called when the server stops: refuses an incomplete request, and lets an answer end."""
        if self._refused:
            self.transport.abort()
        elif self.part is not None and not self.is_answering:
            self._refuse(unavailable(SHUT_DOWN, retry_after=30))
        else:
            super().shutdown()

    def _watch(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._look)

    def _look(self) -> None:
        """Refuses a client that is too slow. A connection has one timer, and none while the app works."""
        self._timer = None
        if self._refused or self.transport.is_closing():
            return
        part, pause = self.part, self.settings.receive_timeout
        if part is None:
            if self.cycle is None:  # connected, and nothing sent
                self.transport.close()
            return
        end = self._began + pause if part == "headers" else min(self._heard + pause, self._began + WHOLE * pause)
        left = end - self.loop.time()
        if left > 0 or (part == "body" and self._open):  # the middleware limits a body that the app reads
            self._watch(max(left, pause / 10))
        elif part == "body":  # answered already
            self.transport.close()
        else:
            self._refuse(ApiError(408, f"the headers were not complete within {pause:g} s (--receive-timeout)"))

    def _refuse(self, error: ApiError) -> None:
        """Sends an error without the app, and ends the connection."""
        if self.is_answering:  # too late for another answer
            self.transport.close()
            return
        scope, id = {"method": "-", "path": "-", "http_version": "1.1", "client": self.client}, request_id(Headers())
        if self._open:
            scope = dict(self.cycle.scope)
            id = request_id(Headers(scope=scope))
            self.cycle.disconnected = True  # the app writes no answer then
            self.cycle.message_event.set()
        answer = error.response()
        answer.headers.update({"connection": "close", "x-request-id": id})
        fields = [b"%s: %s" % field for field in (*self.server_state.default_headers, *answer.raw_headers)]
        first = f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}".encode()
        self.transport.write(b"\r\n".join([first, *fields, b"", bytes(answer.body)]))
        log_answer(scope, error.status, id)
        self._refused = True
        self.flow.resume_reading()
        with contextlib.suppress(OSError):  # the client has left
            if self.transport.can_write_eof():
                self.transport.write_eof()
        self.loop.call_later(LINGER, self.transport.abort)


def connection_class(settings: ServerSettings) -> type[asyncio.Protocol]:
    """The `http` of `uvicorn.Config`."""
    return type("Connection", (Connection,), {"settings": settings})
