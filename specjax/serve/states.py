"""The states of a server, how it may pause, and the messages of requests that end without an answer."""

from __future__ import annotations

from enum import Enum
from typing import Literal, TypeAlias

Pause: TypeAlias = Literal["abort", "retract", "in_place"]

# Messages of requests that end without an answer.
FAILED_STEP = "the engine failed and was reset; the request can be sent again"
NO_PROGRAM = "a program that the request needs cannot be compiled; the log says why"
ENGINE_GONE = "the engine failed and the server ends; the request can be sent again when it is back"
ENGINE_STUCK = "the engine is stuck and the server ends; the request can be sent again when it is back"
SHUT_DOWN = "the server is shutting down"
ABORTED = "the request was aborted (/abort_request)"
SEND_AGAIN = (FAILED_STEP, ENGINE_GONE, ENGINE_STUCK, SHUT_DOWN)  # a 503, not a 500


class State(Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
