"""The parts of an answer in order: reasoning, text and function calls. Each part begins, grows and ends.

    <think>2 + 2 is 4.</think>It is 4.<tool_call>{"name": "f", "arguments": {}}</tool_call>

    Begin(0, thoughts), Grow(0, "2 + 2 is 4."), End(0), Begin(1, text), ... , End(1), Begin(2, call of f), ...

OpenAI's Responses and Anthropic's Messages have answers of this form. Their requests hold the same parts as separate
items, which `assistant_turns` merges for chat templates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from specjax.serve.message_format import Delta, Reply, is_whole
from specjax.serve.openai_answers import event

Kind: TypeAlias = Literal["thoughts", "text", "call"]


@dataclass
class Part:
    kind: Kind
    id: str = ""  # of a call
    name: str = ""  # of the called function
    text: str = ""  # so far; a call's arguments are JSON that may be cut off

    @property
    def is_cut(self) -> bool:
        """True for a call with incomplete arguments."""
        return self.kind == "call" and not is_whole(self.text)


class Begin(NamedTuple):
    number: int
    part: Part


class Grow(NamedTuple):
    number: int
    part: Part
    text: str


class End(NamedTuple):
    number: int
    part: Part


Change: TypeAlias = Begin | Grow | End


class Parts:
    """The parts of one answer, in `items`: at least one. Without a `reply` the only part is text."""

    def __init__(self, reply: Reply | None) -> None:
        self._reply = reply
        self.items: list[Part] = []

    @property
    def has_called(self) -> bool:
        return self._reply is not None and self._reply.has_called

    @property
    def called(self) -> str:
        """The text from a call in reasoning that has no end."""
        return "" if self._reply is None else self._reply.called

    def feed(self, text: str, *, last: bool = False) -> list[Change]:
        """Adds text of the model. Returns the changes. `last`: no text follows."""
        changes: list[Change] = []
        if self._reply is None:
            changes += self._put("text", text)
        else:
            for delta in self._reply.feed(text, last=last):
                changes += self._read(delta)
        if last:
            if not self.items:
                changes += self._put("text", "")
            changes.append(End(len(self.items) - 1, self.items[-1]))
        return changes

    def _read(self, delta: Delta) -> Iterable[Change]:
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                yield from self._begin(Part("call", call["id"], function["name"]))
            yield from self._put("call", function.get("arguments", ""))
        if thoughts := delta.get("reasoning_content"):
            yield from self._put("thoughts", thoughts)
        if content := delta.get("content"):
            yield from self._put("text", content)

    def _put(self, kind: Kind, text: str) -> Iterable[Change]:
        """Extends the last part, or begins another."""
        if not self.items or self.items[-1].kind != kind:
            yield from self._begin(Part(kind))
        if text:
            self.items[-1].text += text
            yield Grow(len(self.items) - 1, self.items[-1], text)

    def _begin(self, part: Part) -> Iterable[Change]:
        if self.items:
            yield End(len(self.items) - 1, self.items[-1])
        self.items.append(part)
        yield Begin(len(self.items) - 1, part)


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
