"""uvicorn's HTTP/1.1 connection with limits that it lacks: the size of headers, their framing, and the pace of clients.

A connection without a started request is idle, which is not limited here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from http import HTTPStatus
from typing import Any, NamedTuple

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from specjax.serve.errors import ApiError

logger = logging.getLogger("specjax.serve")

MAX_HEADER = 64 * 2**10  # bytes of a request line with its headers
MAX_LINES = 200  # lines of headers
MAX_UNREAD = 64 * 2**10  # bytes of an answer that wait for their client before the answer is paused


class Pace(NamedTuple):
    """Minimum number of bytes that must move within a number of seconds."""

    seconds: int
    size: int


SENDING = Pace(10, 10_000)  # a client sends a request; the header must be complete in this time
READING = Pace(30, 10_000)  # a client reads an answer of which more than MAX_UNREAD waits


class _Parser(h11.Connection):
    """Refuses large headers, and bodies whose end a proxy may see elsewhere. Counts the bytes of bodies."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER)
        self.received = 0

    def next_event(self) -> Any:
        before = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        event = super().next_event()
        if isinstance(event, h11.Data):
            self.received += len(event.data)
        elif isinstance(event, h11.Request | h11.EndOfMessage):
            self.received += SENDING.size  # always enough
            head = before[: len(before) - len(self.trailing_data[0])] if before else b""
            lines = max(len(event.headers), head.count(b"\n") - 2)  # of trailers; of the request with folded lines
            if len(head) > MAX_HEADER or lines > MAX_LINES:
                problem = f"the headers have {len(head)} bytes and {lines} lines; at most {MAX_HEADER} and {MAX_LINES}"
                raise h11.RemoteProtocolError(problem, error_status_hint=431)
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                raise h11.RemoteProtocolError("a request has Content-Length or Transfer-Encoding, not both")
        return event


class Connection(H11Protocol):
    """Closes the connection of a client that keeps no `Pace`. Seconds are counted one by one: the time in which this
    process was suspended is not the client's fault."""

    conn: _Parser

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _Parser()
        self._pace: Pace | None = None  # None: no timer runs
        self._moved, self._seconds = 0, 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(MAX_UNREAD)  # with TLS the default is 512 KB

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        error = sys.exception()
        large = isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431
        self._refuse(431 if large else 400, f"invalid HTTP request: {error or msg}"[:256])

    def _watch(self) -> None:
        if self._pace is None and (pace := self._required()) is not None:
            self._restart(pace)
            self.loop.call_later(1.0, self._tick)

    def _required(self) -> Pace | None:
        """The pace that the client must keep now."""
        if self.flow.write_paused or self.transport.is_closing():  # closing waits for the rest of an answer
            return READING
        state = self.conn.their_state
        sends = state is h11.SEND_BODY and not self.flow.read_paused
        return SENDING if sends or (state is h11.IDLE and self.conn.trailing_data[0]) else None

    def _position(self, pace: Pace) -> int:
        return self.conn.received if pace is SENDING else -self.transport.get_write_buffer_size()

    def _restart(self, pace: Pace) -> None:
        self._pace, self._moved, self._seconds = pace, self._position(pace), 0

    def _tick(self) -> None:
        pace = self._required() if self in self.connections else None
        if pace is None:
            self._pace = None
            return
        self._seconds += 1
        if pace is not self._pace or self._position(pace) - self._moved >= pace.size:
            self._restart(pace)
        elif self._seconds >= pace.seconds:
            does = "sent" if pace is SENDING else "read"
            self._refuse(408, f"the client {does} less than {pace.size} bytes in {pace.seconds} s")
            self._restart(READING)
        self.loop.call_later(1.0, self._tick)

    def _refuse(self, status: int, message: str) -> None:
        """Closes the connection, with an error unless an answer has begun."""
        logger.warning("%s:%s - connection closed: %s", *(self.client or ("unknown", 0)), message)
        if self._pace is READING or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        if self.cycle is not None:  # the application must not answer, too
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        body = json.dumps(ApiError(status, message).body()).encode()
        reason = HTTPStatus(status).phrase.encode()
        for event in (
            h11.Response(status_code=status, headers=headers, reason=reason), h11.Data(data=body), h11.EndOfMessage(),
        ):  # fmt: skip
            self.transport.write(self.conn.send(event))
        self.transport.close()
