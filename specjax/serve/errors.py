"""Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from itertools import islice
from typing import Any

SHOWN = 60
"""Most characters of a client's value that a message repeats."""


class ApiError(Exception):
    """A request that gets an error instead of an answer."""

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
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        return error_body(self.status, str(self), param=self.param, code=self.code)


KINDS = {401: "authentication_error", 429: "rate_limit_error"}


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, *, retry_after: int, close: bool = False) -> ApiError:
    """`close`: the connection ends with this answer."""
    headers = {"Retry-After": str(retry_after)} | ({"Connection": "close"} if close else {})
    return ApiError(503, message, code="unavailable", headers=headers)


class _Short(reprlib.Repr):
    """Looks at the first items only: `repr` would write all of a million tokens before it is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxlong = 3, SHOWN, SHOWN, SHOWN

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:  # the base class sorts all keys
        if level <= 0:
            return "{...}"
        shown = [f"{self.repr1(key, level - 1)}: {self.repr1(x[key], level - 1)}" for key in islice(x, self.maxdict)]
        return "{" + ", ".join([*shown, *(["..."] if len(x) > self.maxdict else [])]) + "}"


_SHORT = _Short()


def shown(value: Any) -> str:
    """A client's value for an error message: at most `SHOWN` characters, made in constant time."""
    return _SHORT.repr(value)[:SHOWN]
