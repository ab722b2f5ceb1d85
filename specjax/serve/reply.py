"""Parses the text of an answer, in pieces, into an assistant's message: reasoning, content and function calls.

    <think>\\n2 + 2 is 4.\\n</think>\\n\\nIt is 4.<tool_call>{"name": ...
           reasoning_content          content   tool_calls

Whole answers and streams use the same code: the concatenated deltas of a stream are the message.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from specjax.engine.text import Thoughts
from specjax.serve.calls import Arguments, Call, CallParser, JsonObject, TaggedCalls, Text

Delta: TypeAlias = dict[str, Any]


class _Trimmed:
    """Removes white space at the start and the end of a text that comes in pieces."""

    def __init__(self, *, start: bool, end: bool) -> None:
        self.start, self._end = start, end
        self._space = ""  # at the end so far, or before a part that was cut out

    def add(self, text: str) -> str:
        if self.start:
            text = text.lstrip()
            if not text:
                return ""
            self.start = False
        text = self._space + text
        self._space = text[len(text.rstrip()) :] if self._end else ""
        return text[: len(text) - len(self._space)]

    def cut(self) -> None:
        """Marks the place of a part that is cut out. White space after it is dropped; white space before it is kept
        if more text follows."""
        self.start = True

    def end(self) -> str:
        return "" if self.start else self._space


class Reply:
    """The message of one choice.

    Args:
        parser: parser of calls.
        reasoning: separate reasoning from content.
        thinking: the prompt ends inside reasoning.
        gathered: send reasoning as one delta, once it has ended.
    """

    def __init__(self, parser: CallParser, *, reasoning: bool, thinking: bool = False, gathered: bool = False) -> None:
        self._parser, self._gathered = parser, gathered
        self._split = Thoughts(thinking) if reasoning else None
        self._thoughts = _Trimmed(start=True, end=True)
        self._text = _Trimmed(start=False, end=True)
        self._deltas: list[Delta] = []
        self._content = ""
        self._thought = ""
        self._calls: list[dict[str, Any]] = []

    @property
    def has_thought(self) -> bool:
        return self._split is not None and self._split.begun

    @property
    def has_called(self) -> bool:
        """True if there are calls, the last one is complete, and the text does not end where another one begins."""
        return bool(self._calls) and not self._parser.is_cut and is_whole(self._calls[-1]["function"]["arguments"])

    def feed(self, text: str, *, last: bool = False) -> list[Delta]:
        """Adds text, and returns new deltas of the message. `last`: no text follows."""
        if self._split is not None:
            thoughts, text = self._split.split(text, last=last)
            self._emit("reasoning_content", self._thoughts.add(thoughts))
        answering = self._split is None or self._split.ended
        if self._gathered and self._thought and (last or answering):
            self._deltas.append({"reasoning_content": self._thought})
            self._gathered = False
        if answering:
            self._answer(text, last)
        deltas, self._deltas = self._deltas, []
        return deltas

    def message(self) -> dict[str, Any]:
        """The whole message, after the last text."""
        content = None if self._calls and not self._content else self._content
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self._split is not None:
            message["reasoning_content"] = self._thought or None
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def _answer(self, text: str, last: bool) -> None:
        for part in self._parser.feed(text, last=last):
            match part:
                case Text():
                    self._emit("content", self._text.add(part.text))
                case Call():
                    self._text.cut()
                    self._call(part.name)
                case Arguments():
                    self._argue(part.text)
        if last:
            self._emit("content", self._text.end())

    def _emit(self, field: str, text: str) -> None:
        if not text:
            return
        if field == "content":
            self._content += text
        else:
            self._thought += text
            if self._gathered:
                return
        if self._deltas and field in self._deltas[-1]:
            self._deltas[-1][field] += text
        else:
            self._deltas.append({field: text})

    def _call(self, name: str) -> None:
        call = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {"name": name, "arguments": ""}}
        self._deltas.append(
            {"tool_calls": [{"index": len(self._calls), **call, "function": {"name": name, "arguments": ""}}]}
        )
        self._calls.append(call)

    def _argue(self, text: str) -> None:
        self._calls[-1]["function"]["arguments"] += text
        piece = {"index": len(self._calls) - 1, "function": {"arguments": text}}
        before = self._deltas[-1].get("tool_calls", [{}])[0] if self._deltas else {}
        if before.get("index") == piece["index"] and "id" not in before:
            before["function"]["arguments"] += text
        else:
            self._deltas.append({"tool_calls": [piece]})


def is_whole(arguments: str) -> bool:
    """True if the JSON object of a call's arguments is closed, not cut off."""
    reader = JsonObject()
    reader.read(arguments)
    return reader.ended


@dataclass(frozen=True)
class ReplyOptions:
    """How the answers to one request become messages.

    Attributes:
        parser: parser of calls in the model's format; None: no functions were offered.
        names: names of the offered functions.
        most: maximum number of reported calls; None: all.
        hidden: special tokens that the text keeps for the parsers, and that never become content.
        reasoning, gathered: as `Reply`.
        schemas: maps functions to the JSON schemas of their parameters.
    """

    parser: type[CallParser] | None = None
    names: tuple[str, ...] = ()
    most: int | None = None
    hidden: frozenset[str] = frozenset()
    reasoning: bool = False
    gathered: bool = False
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def reply(self, *, thinking: bool) -> Reply:
        more: dict[str, Any] = {"hidden": self.hidden, "most": self.most}
        if self.parser is not None and issubclass(self.parser, TaggedCalls):
            more["schemas"] = self.schemas
        parser = (self.parser or CallParser)(self.names, **more)
        return Reply(parser, reasoning=self.reasoning, thinking=thinking, gathered=self.gathered)
