"""The JSON of request bodies, within limits that hold before any of it becomes objects.

The parser holds Python's global lock, and a value of two bytes (`[]`) becomes an object of 64. So the values are
counted first, with numpy and in pieces: one body can neither fill the memory nor stop the other requests.
"""

from __future__ import annotations

import numpy as np
import pydantic_core
from starlette.requests import Request

from specjax.serve.errors import ApiError, bad_request

MAX_VALUES = 2**20  # most values of a body (numbers, strings, objects, ...), for a batch of prompts of token ids
MAX_NODES = 2**17  # most lists, objects and members of objects in a body, which cost more than numbers do
INLINE_BYTES = 2**14  # bodies up to this many bytes are read on the event loop: a thread would take longer
_PIECE = 2**20  # bytes that are counted at once


async def receive_body(request: Request) -> bytearray:
    """The bytes of a body, in one copy. Raises an ApiError, a 415, if it is not sent as JSON."""
    # A web page may send any other type to a local server unasked.
    sent_as = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if sent_as != "application/json" and not (sent_as.startswith("application/") and sent_as.endswith("+json")):
        raise ApiError(415, f"the body must be sent as Content-Type: application/json, got {sent_as or 'none'!r:.80}")
    data = bytearray()
    async for piece in request.stream():
        data += piece
    return data


class Budget:
    """The JSON values that one request holds."""

    def __init__(self) -> None:
        self._values = self._nodes = 0

    def parse(self, data: bytes | bytearray) -> object:
        """Counts the values of one more text of JSON, and parses it. Infinity and NaN pass: fields refuse them by name.

        Raises an ApiError: 413, more values than a request may hold; 400, no JSON, or nested too deeply.
        """
        values, nodes = count_values(data)
        self._values += values
        self._nodes += nodes
        if self._values > MAX_VALUES or self._nodes > MAX_NODES:
            problem = f"{self._values} JSON values, {self._nodes} of them lists, objects or members of objects"
            limits = f"at most {MAX_VALUES} and {MAX_NODES} are read"
            raise ApiError(413, f"the body holds {problem}; {limits}", code="body_too_large")
        try:
            return pydantic_core.from_json(data, cache_strings="keys")
        except ValueError as error:
            raise bad_request(f"the body is not valid JSON: {error}") from error


def count_values(data: bytes | bytearray) -> tuple[int, int]:
    """(values, nodes): upper bounds of a JSON text's values, and of its lists, objects and members, without parsing.

    Strings count as one value each. In invalid JSON the counts hold up to the first error, where the parser stops.
    """
    commas = brackets = colons = 0
    inside, left = np.uint8(0), b""
    for start in range(0, len(data), _PIECE):
        piece = left + bytes(data[start : start + _PIECE])
        # An escape that the next piece completes goes there.
        left = b"\\" if (len(piece) - len(piece.rstrip(b"\\"))) % 2 else b""
        piece = piece[: len(piece) - len(left)].replace(b"\\\\", b"").replace(b'\\"', b"")
        if not piece:
            continue
        letters = np.frombuffer(piece, np.uint8)
        string = np.bitwise_xor.accumulate((letters == ord('"')).view(np.uint8)) ^ inside
        inside = string[-1]
        outside = letters * (string ^ 1)  # 0 in strings
        commas += int(np.count_nonzero(outside == ord(",")))
        colons += int(np.count_nonzero(outside == ord(":")))
        brackets += int(np.count_nonzero((outside == ord("[")) | (outside == ord("{"))))
    return commas + brackets + 1, brackets + colons
