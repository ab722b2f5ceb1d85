"""The parts of an answer in order: thoughts, text and function calls, each of which begins, grows and ends.

    <think>2 + 2 is 4.</think>It is 4.<tool_call>{"name": "f", "arguments": {}}</tool_call>

    Begin(0, thoughts), Grow(0, "2 + 2 is 4."), End(0), Begin(1, text), ... , End(1), Begin(2, call of f), ...

Interfaces whose answers are lists of such parts (OpenAI's responses, Anthropic's messages) write them in their words.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from specjax.serve.reply import Delta, Reply, is_whole

Kind: TypeAlias = Literal["thoughts", "text", "call"]


@dataclass
class Part:
    kind: Kind
    id: str = ""  # of a call
    name: str = ""  # of the function
    text: str = ""  # so far; of a call its arguments, as JSON that may be cut off

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
    """The parts of one answer. Without a `reply` all of it is text; there is always at least one part."""

    def __init__(self, reply: Reply | None) -> None:
        self._reply = reply
        self.found: list[Part] = []

    @property
    def has_called(self) -> bool:
        """See `Reply.has_called`."""
        return self._reply is not None and self._reply.has_called

    def feed(self, text: str, *, last: bool = False) -> list[Change]:
        """Adds text of the model's; what it changes. `last`: nothing follows."""
        changes: list[Change] = []
        if self._reply is None:
            changes += self._put("text", text)
        else:
            for delta in self._reply.feed(text, last=last):
                changes += self._read(delta)
        if last:
            if not self.found:
                changes += self._put("text", "")
            changes.append(End(len(self.found) - 1, self.found[-1]))
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
        """More of the last part, or the beginning of another."""
        if not self.found or self.found[-1].kind != kind:
            yield from self._begin(Part(kind))
        if text:
            self.found[-1].text += text
            yield Grow(len(self.found) - 1, self.found[-1], text)

    def _begin(self, part: Part) -> Iterable[Change]:
        if self.found:
            yield End(len(self.found) - 1, self.found[-1])
        self.found.append(part)
        yield Begin(len(self.found) - 1, part)
