"""States of a server, and errors. Their default form is OpenAI's, `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel
from starlette.responses import JSONResponse

Pause: TypeAlias = Literal["abort", "retract", "in_place"]


class State(Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


# Messages for requests that end without an answer.
FAILED_STEP = "the engine failed and was reset; the request can be sent again"
NO_PROGRAM = "a program that the request needs cannot be compiled; the log says why"
ENGINE_GONE = "the engine failed and the server ends; the request can be sent again when it is back"
ENGINE_STUCK = "the engine is stuck and the server ends; the request can be sent again when it is back"
SHUT_DOWN = "the server is shutting down"
ABORTED = "the request was aborted (/abort_request)"
PAUSED = "the request was aborted (/pause_generation with mode abort)"

INVALID = "invalid_grammar"  # code of errors in grammars, which the schemas of bodies cannot detect
SHOWN = 60  # maximum number of characters of a client's value in a message


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorAnswer(BaseModel):
    error: ErrorBody


class ApiError(Exception):
    """An error that becomes the answer to a request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "authentication_error" if self.status == 401 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self, form: Callable[[ApiError], dict[str, Any]] = body) -> JSONResponse:
        return JSONResponse(form(self), self.status, headers=self.headers)


ErrorForm: TypeAlias = Callable[[ApiError], dict[str, Any]]
"""Makes the JSON body of an error."""


def form_of(path: str, forms: Mapping[str, ErrorForm]) -> ErrorForm:
    """The form of errors at a path. `forms`: by prefix of the path; by default OpenAI's."""
    return next((form for prefix, form in forms.items() if path.startswith(prefix)), ApiError.body)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, *, retry_after: int, close: bool = False) -> ApiError:
    """A 503. `close`: close the connection after this answer."""
    headers = {"Retry-After": str(retry_after)} | ({"Connection": "close"} if close else {})
    return ApiError(503, message, code="unavailable", headers=headers)


class _Short(reprlib.Repr):
    """`reprlib.Repr` with JSON's true, false, null, NaN and Infinity."""

    def repr_bool(self, value: bool, level: int) -> str:
        return "true" if value else "false"

    def repr_NoneType(self, value: None, level: int) -> str:
        return "null"

    def repr_float(self, value: float, level: int) -> str:
        text = repr(value)
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(text, text)


_SHORT = _Short()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, SHOWN, SHOWN, SHOWN


def shown(value: Any) -> str:
    """A client's value for an error message, cut to `SHOWN` characters without formatting all of a huge value."""
    return _SHORT.repr(value)[:SHOWN]
