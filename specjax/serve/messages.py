"""Chat messages as clients send them to messages as templates take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.serve.errors import ApiError, bad_request, shown
from specjax.serve.fields import Ignored, Values, asks_for_nothing
from specjax.serve.json_body import Budget, parse_json

MAX_MESSAGES = 2**14
"""Messages of a chat, parts of a message."""

MAX_CALLS = 2**10
"""Tool calls of a message."""

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""To the roles that templates know: `developer` is OpenAI's newer word for `system`."""

PASSED_ON = ("name", "tool_calls", "tool_call_id")
"""Further fields that a template may use."""

UNSUPPORTED: dict[str, Values] = {
    "refusal": ("",), "audio": (), "function_call": (), "reasoning": ("",), "reasoning_content": ("",), "tools": ([],),
    "prefix": (False,), "partial": (False,),
}  # fmt: skip
"""Fields that a template might put into the prompt, with the values that say nothing (null always does)."""

HARMLESS = ("annotations",)
"""Fields of an answer that a client sends back."""


def read_messages(messages: Any, ignored: Ignored) -> list[dict[str, Any]]:
    """The messages of a chat, each with a role and a string as content.

    Raises:
        ApiError: it is not a list of messages, or one holds what a text model cannot read.
    """
    if not isinstance(messages, list) or not messages:
        raise bad_request(f"messages must be a list that is not empty, got {shown(messages)}", "messages")
    if len(messages) > MAX_MESSAGES:
        raise _wrong(f"{len(messages)} messages; at most {MAX_MESSAGES} are read")
    arguments = Budget()
    return [_message(message, f"messages[{index}]", ignored, arguments) for index, message in enumerate(messages)]


def _message(message: Any, where: str, ignored: Ignored, budget: Budget) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _wrong(f"{where} must be an object with role and content, got {shown(message)}")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _wrong(f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}")
    for name, value in message.items():
        if name in UNSUPPORTED:
            if not asks_for_nothing(value, UNSUPPORTED[name]):
                raise _wrong(f"{where}.{name} is not supported, got {shown(value)}")
        elif name not in ("role", "content", *PASSED_ON, *HARMLESS):
            ignored.add(name, "messages[].", "messages")
    calls = _list(message.get("tool_calls"), where)
    read: dict[str, Any] = {
        "role": ROLES[role],
        "content": _content(message.get("content"), f"{where}.content", bool(calls), ignored),
    }
    for name in ("name", "tool_call_id"):
        if (value := message.get(name)) is not None:
            if not isinstance(value, str):
                raise _wrong(f"{where}.{name} must be a string, got {shown(value)}")
            read[name] = value
    if calls:
        if role != "assistant":
            raise _wrong(f"{where}.tool_calls belong to the assistant, not to {role}")
        read["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]", budget) for i, call in enumerate(calls)]
    return read


def _content(content: Any, where: str, has_calls: bool, ignored: Ignored) -> str:
    if isinstance(content, str):
        return content
    if content is None and has_calls:
        return ""
    if not isinstance(content, list) or not content:
        allowed = "a string, a list of text parts, or null beside tool_calls"
        raise _wrong(f"{where} must be {allowed}, got {shown(content)}")
    if len(content) > MAX_MESSAGES:
        raise _wrong(f"{where} has {len(content)} parts; at most {MAX_MESSAGES} are read")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _wrong(f'{where}[{index}] must be {{"type": "text", "text": ...}}: this model reads text only')
        for name in part:
            if name not in ("type", "text"):
                ignored.add(name, "messages[].content[].", "messages")
        texts.append(part["text"])
    return "".join(texts)


def _call(call: Any, where: str, budget: Budget) -> dict[str, Any]:
    """Templates want the arguments as an object; OpenAI sends them as a string of JSON, written by a model.

    A string that is no object after all is passed on as it is: the conversation it is part of must not end with it.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong(f"{where} must be an object with a function that has a name")
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}  # of a function that takes none
    elif isinstance(arguments, str):
        try:
            found = parse_json(arguments.encode(), budget)
        except ApiError as error:
            if error.status != 400:
                raise
            found = None
        arguments = found if isinstance(found, Mapping) else arguments
    elif not isinstance(arguments, Mapping):
        raise _wrong(f"{where}.function.arguments must be an object or a string, got {shown(arguments)}")
    return dict(call) | {"function": dict(function) | {"arguments": arguments}}


def _list(calls: Any, where: str) -> list[Any]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise _wrong(f"{where}.tool_calls must be a list, got {shown(calls)}")
    if len(calls) > MAX_CALLS:
        raise _wrong(f"{where} has {len(calls)} tool calls; at most {MAX_CALLS} are read")
    return calls


def _wrong(message: str) -> ApiError:
    return bad_request(message, "messages")
