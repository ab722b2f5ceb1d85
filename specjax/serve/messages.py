"""Chat messages as clients send them to messages as templates take them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specjax.serve.errors import ApiError, bad_request

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""To the roles that templates know: `developer` is OpenAI's newer word for `system`."""

PASSED_ON = ("name", "tool_calls", "tool_call_id")
"""Further fields that a template may use."""

HARMLESS: dict[str, tuple[Any, ...]] = {"refusal": (), "annotations": ([],), "audio": (), "function_call": ()}
"""Fields of an answer that a client sends back, with the values that say nothing (null always does)."""


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of a chat, each with a role and a string as content.

    Raises:
        ApiError: it is not a list of messages, or one holds what a text model cannot read.
    """
    if not isinstance(messages, list) or not messages:
        raise bad_request(f"messages must be a list that is not empty, got {messages!r:.60}", "messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _wrong(f"{where} must be an object with role and content, got {message!r:.60}")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _wrong(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r:.60}")
    for name, value in message.items():
        says_nothing = name in HARMLESS and value in (None, *HARMLESS[name])
        if name not in ("role", "content", *PASSED_ON) and not says_nothing:
            raise _wrong(f"{where} holds {name!r}, which is not supported")
    calls = message.get("tool_calls")
    read: dict[str, Any] = {
        "role": ROLES[role],
        "content": _content(message.get("content"), f"{where}.content", bool(calls)),
    }
    for name in ("name", "tool_call_id"):
        if (value := message.get(name)) is not None:
            if not isinstance(value, str):
                raise _wrong(f"{where}.{name} must be a string, got {value!r:.60}")
            read[name] = value
    if calls:
        if role != "assistant":
            raise _wrong(f"{where}.tool_calls belong to the assistant, not to {role}")
        read["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(_list(calls, where))]
    return read


def _content(content: Any, where: str, has_calls: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and has_calls:
        return ""
    if not isinstance(content, list) or not content:
        allowed = "a string, a list of text parts, or null beside tool_calls"
        raise _wrong(f"{where} must be {allowed}, got {content!r:.60}")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _wrong(f'{where}[{index}] must be {{"type": "text", "text": ...}}: this model reads text only')
        if extra := sorted(set(part) - {"type", "text"}):
            raise _wrong(f"{where}[{index}] holds {extra[0]!r}, which is not supported")
        texts.append(part["text"])
    return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    """Templates want the arguments as an object; OpenAI sends them as a string of JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong(f"{where} must be an object with a function that has a name")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise _wrong(f"{where}.function.arguments is not valid JSON: {arguments!r:.60}") from None
    if not isinstance(arguments, Mapping):
        raise _wrong(f"{where}.function.arguments must be an object, got {arguments!r:.60}")
    return dict(call) | {"function": dict(function) | {"arguments": arguments}}


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong(f"{where}.tool_calls must be a list, got {value!r:.60}")
    return value


def _wrong(message: str) -> ApiError:
    return bad_request(message, "messages")
