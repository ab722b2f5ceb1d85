"""uvicorn's HTTP/1.1 connection with limits that it lacks: the size of headers, their framing, and the pace of clients.

A connection without a started request is idle; uvicorn's timeout between two requests is the only one for it.
"""

from __future__ import annotations

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
SENDING = 10  # seconds in which a header, and then MIN_BYTES of its body or all the rest, must arrive
READING = 30  # seconds in which MIN_BYTES of an answer that waits for its client must be read
MIN_BYTES = 10_000
TOO_LARGE = f"more than {MAX_HEADER} bytes or {MAX_LINES} lines of headers"


class _Parser(h11.Connection):
    """Refuses large headers, and bodies whose end a proxy may see elsewhere. Counts the bytes of bodies."""

    received = 0

    def next_event(self) -> Any:
        before = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        event = super().next_event()
        if isinstance(event, h11.Data):
            self.received += len(event.data)
        elif isinstance(event, h11.Request | h11.EndOfMessage):  # the latter has the trailers
            self.received += MIN_BYTES  # always enough
            head = before.removesuffix(self.trailing_data[0])
            size = len(head) or sum(len(name) + len(value) for name, value in event.headers)
            lines = max(head.count(b"\n") - 2, len(event.headers))
            if size > MAX_HEADER or lines > MAX_LINES:
                raise h11.RemoteProtocolError(TOO_LARGE, error_status_hint=431)
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                raise h11.RemoteProtocolError("a request has Content-Length or Transfer-Encoding, not both")
        return event


class Connection(H11Protocol):
    """Closes the connection of a client that sends or reads too slowly. The limits in seconds count calls of
    `check_pace`, because a client is not slow while this process is suspended."""

    _limit, _moved, _seconds = 0, 0, 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn: _Parser = _Parser(h11.SERVER, MAX_HEADER)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._limit = 0  # more than MIN_BYTES were read

    def send_400_response(self, msg: str) -> None:
        status = 431 if getattr(sys.exception(), "error_status_hint", 400) == 431 else 400
        self._refuse(status, TOO_LARGE if status == 431 else f"invalid HTTP request: {sys.exception() or msg}"[:256])

    def check_pace(self) -> None:
        """Called every second."""
        sends, limit, moved = self.conn.their_state, 0, 0
        begun = sends is h11.SEND_BODY or (sends is h11.IDLE and self.conn.trailing_data[0] != b"")
        if self.flow.write_paused or self.transport.is_closing():  # closing waits for the rest of an answer
            limit, moved = READING, -self.transport.get_write_buffer_size()
        elif begun and not self.flow.read_paused:
            limit, moved = SENDING, self.conn.received
        self._seconds += 1
        if not limit or limit != self._limit or moved - self._moved >= MIN_BYTES:
            self._limit, self._moved, self._seconds = limit, moved, 0
        elif self._seconds >= limit:
            does = "sent" if limit == SENDING else "read"
            self._refuse(408, f"the client {does} less than {MIN_BYTES} bytes in {limit} s")

    def _refuse(self, status: int, message: str) -> None:
        """Closes the connection, with an error unless an answer has begun."""
        logger.warning("%s:%s - connection closed: %s", *(self.client or ("unknown", 0)), message)
        if self._limit == READING or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = json.dumps(ApiError(status, message).body())
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())
        self.transport.close()
