"""uvicorn's HTTP/1.1 connection with limits that it lacks: the size of headers, their framing, and the pace of clients.

A connection without a started request is idle, which is not limited here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from specjax.serve.errors import ApiError

logger = logging.getLogger("specjax.serve")

MAX_HEADER = 64 * 2**10  # bytes of a request line with its headers
MAX_LINES = 200  # lines of headers
MAX_UNREAD = 64 * 2**10  # bytes of an answer that wait for their client before the answer is paused
SENDING = 10  # seconds in which a header, and then MIN_BYTES of its body or all the rest, must arrive
READING = 30  # seconds in which MIN_BYTES of a paused answer must be read
MIN_BYTES = 10_000


class _Parser(h11.Connection):
    """Refuses large headers, and bodies whose end a proxy may see elsewhere. Counts the bytes of bodies."""

    received = 0

    def next_event(self) -> Any:
        before = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        event = super().next_event()
        if isinstance(event, h11.Data):
            self.received += len(event.data)
        elif isinstance(event, h11.Request | h11.EndOfMessage):
            self.received += MIN_BYTES  # always enough
            head = before[: len(before) - len(self.trailing_data[0])] if before else b""
            lines = max(len(event.headers), head.count(b"\n") - 2)  # of trailers; of the request with folded lines
            if len(head) > MAX_HEADER or lines > MAX_LINES:
                problem = f"more than {MAX_HEADER} bytes or {MAX_LINES} lines of headers"
                raise h11.RemoteProtocolError(problem, error_status_hint=431)
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                raise h11.RemoteProtocolError("a request has Content-Length or Transfer-Encoding, not both")
        return event


class Connection(H11Protocol):
    """Closes the connection of a client that sends or reads too slowly."""

    _limit, _moved, _seconds = 0, 0, 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn: _Parser = _Parser(h11.SERVER, MAX_HEADER)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(MAX_UNREAD)  # with TLS the default is 512 KB

    def send_400_response(self, msg: str) -> None:
        error = sys.exception()
        large = isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431
        self._refuse(431 if large else 400, f"invalid HTTP request: {error or msg}"[:256])

    def check_pace(self) -> None:
        """Called every second. Counts calls, because a client is not slow while this process is suspended."""
        sends, limit, moved = self.conn.their_state, 0, 0
        if self.flow.write_paused or self.transport.is_closing():  # closing waits for the rest of an answer
            limit, moved = READING, -self.transport.get_write_buffer_size()
        elif (sends is h11.SEND_BODY and not self.flow.read_paused) or (
            sends is h11.IDLE and self.conn.trailing_data[0]
        ):
            limit, moved = SENDING, self.conn.received
        if not limit or limit != self._limit or moved - self._moved >= MIN_BYTES:
            self._limit, self._moved, self._seconds = limit, moved, 0
            return
        self._seconds += 1
        if self._seconds >= limit:
            does = "sent" if limit == SENDING else "read"
            self._refuse(408, f"the client {does} less than {MIN_BYTES} bytes in {limit} s")

    def _refuse(self, status: int, message: str) -> None:
        """Closes the connection, with an error unless an answer has begun."""
        logger.warning("%s:%s - connection closed: %s", *(self.client or ("unknown", 0)), message)
        if self._limit == READING or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        if self.cycle is not None:  # the application must not answer, too
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = json.dumps(ApiError(status, message).body())
        lines = "Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close"
        head = "\r\n".join((f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *lines))
        self.transport.write(f"{head}\r\n\r\n{body}".encode())
        self.transport.close()
