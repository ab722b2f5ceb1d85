"""Helpers of both interfaces, whose answers are lists of items: reasoning, text and function calls.

Their requests hold the same parts as separate items, which `assistant_turns` merges for chat templates.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

from pydantic import Field

from specjax.serve.fields import at_most
from specjax.serve.openai_answers import event
from specjax.serve.openai_requests import MAX_MESSAGES

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(max_length=MAX_MESSAGES, fail_fast=True), at_most(MAX_MESSAGES)]


def text_of(parts: Iterable[Any]) -> str:
    """The text of parts that have one."""
    return "".join(part.text for part in parts)


def named_event(data: dict[str, Any]) -> bytes:
    """A server-sent event whose name is the `type` of its data."""
    return b"event: " + data["type"].encode() + b"\n" + event(data)


def assistant_turns(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for chat templates: merges consecutive messages of the assistant, whose reasoning, text and calls are
    separate items in requests."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        last = turns[-1] if turns else {}
        if message["role"] != "assistant" or last.get("role") != "assistant":
            turns.append(dict(message))
            continue
        last["content"] += message["content"]
        if thoughts := message.get("reasoning_content"):
            last["reasoning_content"] = last.get("reasoning_content", "") + thoughts
        if calls := message.get("tool_calls"):
            last["tool_calls"] = [*last.get("tool_calls", ()), *calls]
    return turns


def earlier_call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A message with a call that the assistant made."""
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
