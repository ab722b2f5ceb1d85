"""Parsers of function calls in a model's text, which comes in pieces: one class for each format.

    parser = Hermes({"add"})
    parser.feed('Sum: <tool_call>{"name": "add", "argu')    -> [Text("Sum: ")]
    parser.feed('ments": {"a": [1')                         -> [Call("add"), Arguments('{"a": [')]
    parser.feed(']}}</tool_call>', last=True)               -> [Arguments("1]}")]

The concatenated parts do not depend on the pieces. A call is announced after its name, one of the request's functions,
and the beginning of its arguments; text that turns out not to be a call is plain text. Arguments are passed on as the
model writes them: they may be cut off by the limit of tokens, or be invalid JSON.

Most formats write arguments as JSON. `TaggedCalls` reads values between tags, which become JSON one member at a time:

    <tool_call>\\n<function=add>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>       Qwen3-Coder
    <tool_call>add\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>                    GLM
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias
from urllib.parse import unquote

import pydantic_core


class Text(NamedTuple):
    text: str


class Call(NamedTuple):
    """A call begins; its arguments follow."""

    name: str


class Arguments(NamedTuple):
    """A piece of the JSON arguments of the last call."""

    text: str


class Thought(NamedTuple):
    text: str


class Message(NamedTuple):
    """Another message begins. Its text is not joined to the text before."""


Part: TypeAlias = Text | Call | Arguments | Thought | Message

LIMIT = 512  # maximum number of characters of a call before its arguments, to pass these on early
MOST = 2**16  # maximum number of characters of a call whose members have another order; it is read as a whole
CHUNK = 4096  # characters per pass, which keeps the cost linear in the text
_BEGUN = r"(?=\{\s*(?:\}|\"(?:[^\"\\]|\\.)*\"\s*:\s*[\[{\"\dtfnTFNI-]))"
"""Matches before an object that is empty or whose first value begins. Values include words of Python and JavaScript:
True, None, NaN, Infinity."""
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"(?:name|function)"\s*:\s*"(?P<name>[^"\\]*)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*' + _BEGUN
)
"""A call as an object, up to its arguments, with the members in the usual order."""
_KEYS = ("name", "type", "function", "arguments", "parameters", "id")
_FIRST = re.compile(r'\{\s*(?:"(?P<key>[^"]*)(?P<closed>"\s*(?::\s*(?:"(?P<value>[^"\\]*)")?)?)?)?')
_IN_STRING = re.compile(r'(?:[^"\\\x00-\x1f]|\\[^\x00-\x1f])+')
_OUTSIDE = re.compile(r'[^"{}\[\]<]+')
_WORDS = ("true", "false", "null")
_TYPES = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
MAX_DEPTH = 8  # of schemas in which the type of an argument is looked up


class JsonObject:
    """Reads a JSON object that comes in pieces; checks only brackets and strings. Control characters in strings are
    escaped."""

    def __init__(self, opened: str = "") -> None:
        """`opened`: closing brackets that must follow, the innermost first."""
        self._closing = [*opened]
        self._in_string = False
        self.ended = False
        self.broken = False  # the next character cannot belong to it

    def read(self, text: str, *, last: bool = False) -> tuple[str, int]:
        """Reads up to the end of the object, or to a backslash at the end of the text. `last`: no text follows.

        Returns the JSON to pass on, and the number of characters that were read.
        """
        output: list[str] = []
        at = 0
        while at < len(text) and not self.ended:
            if run := (_IN_STRING if self._in_string else _OUTSIDE).match(text, at):
                output.append(run[0])
                at = run.end()
                continue
            character = text[at]
            if self._in_string:
                if character == "\\" and at + 1 == len(text) and not last:
                    break
                output.append(character if character in '"\\' else json.dumps(character)[1:-1])
                self._in_string = character != '"'
            elif character == "<" or (character in "}]" and self._closing[-1:] != [character]):
                self.broken = True
                break
            else:
                output.append(character)
                self._in_string = character == '"'
                if character in "{[":
                    self._closing.append("}" if character == "{" else "]")
                elif character in "}]":
                    self._closing.pop()
                    self.ended = not self._closing
            at += 1
        return "".join(output), at


class Head(NamedTuple):
    """The beginning of a call, up to its arguments."""

    name: str
    length: int  # characters
    whole: str | None = None  # all arguments, if the length includes them


class CallParser:
    """Parses the text of one answer, in pieces. This base class has no format: all of it is text.

    Args:
        names: functions that may be called.
        hidden: special tokens of the format, which never become text.
        most: maximum number of reported calls; None: all.
    """

    begins: ClassVar[tuple[str, ...]] = ()  # strings before one or several calls
    closers: ClassVar[tuple[str, ...]] = ()  # strings that may follow a call
    joins: ClassVar[tuple[str, ...]] = ()  # strings after which another call may follow
    repeats: ClassVar[bool] = False  # another call may follow at once
    text_arguments: ClassVar[bool] = False  # templates expect the arguments of earlier calls as JSON, not as objects
    id_length: ClassVar[int | None] = None  # number of letters and digits of ids in templates
    numbered_ids: ClassVar[bool] = False  # templates expect ids of the form functions.add:0, counted over the chat

    def __init__(self, names: Collection[str] = (), *, hidden: Collection[str] = (), most: int | None = None) -> None:
        self._names, self._hidden, self._most = frozenset(names), frozenset(hidden), most
        self._marks = (*self.begins, *sorted(self._hidden - {*self.begins}))
        self._state: Callable[[], bool] = self._text
        self._rest = ""  # undecided text
        self._raw = ""  # text before it, which is plain text if no call follows
        self._last = False
        self._count = 0
        self._parts: list[Part] = []
        self._json = JsonObject()
        self._at = 0  # characters of `_rest` that `_json` has read
        self._in_object = False  # the arguments are a member of an object
        self.is_cut = False  # the text ended inside the beginning of a call, before it was announced

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        """Strings that delimit calls; special tokens in some vocabularies."""
        return tuple(mark for mark in (*cls.begins, *cls.closers, *cls.joins) if len(mark) > 3)

    def feed(self, text: str, *, last: bool = False) -> list[Part]:
        """Adds text, and returns the parts that it completes. `last`: no text follows."""
        for start in range(0, max(len(text), 1), CHUNK):
            self._rest += text[start : start + CHUNK]
            self._last = last and start + CHUNK >= len(text)
            while self._state():
                pass
        parts, self._parts = self._parts, []
        return parts

    # States: methods that read from `_rest`, and return True if the next state can run at once.

    def _text(self) -> bool:
        places = [(at, mark) for mark in self._marks if (at := self._rest.find(mark)) >= 0]
        if places:
            at, mark = min(places)
            self._say(self._rest[:at])
            self._rest = self._rest[at + len(mark) :]
            if mark in self.begins:
                self._raw = "" if mark in self._hidden else mark
                self._enter(self._close if mark in self.begins[:-1] else self._head)
            return True
        undecided = begun(self._rest, self._marks)
        if self._last:
            self.is_cut, undecided = self.is_cut or undecided > 1, 0
        self._say(self._rest[: len(self._rest) - undecided])
        self._rest = self._rest[len(self._rest) - undecided :]
        return False

    def _head(self) -> bool:
        head = self._find_head()
        if head is None and not self._last:
            return False
        if head is None:  # a list may end with a separator
            self.is_cut = bool(self._rest.strip()) or self._raw.strip() not in (";", ",")
        if not head or head.name not in self._names:
            return self._no_call()
        self.is_cut = False
        self._rest = self._rest[head.length :]
        self._raw = ""
        self._count += 1
        self._add(Call(head.name))
        if head.whole is not None:
            self._add(Arguments(head.whole))
            return self._enter(self._close)
        return self._enter(self._arguments)

    def _arguments(self) -> bool:
        text, count = self._json.read(self._rest, last=self._last)
        self._rest = self._rest[count:]
        if text:
            self._add(Arguments(text))
        if self._json.ended or self._json.broken or self._last:
            return self._enter(self._tail if self._in_object else self._close)
        return False

    def _tail(self) -> bool:
        """After arguments that are a member of an object."""
        rest = self._rest.lstrip()
        if not rest and not self._last:
            return False
        if not rest.startswith((",", "}")):
            return self._enter(self._close)
        self._enter(self._members)
        self._rest, self._json = rest, JsonObject("}")
        return True

    def _members(self) -> bool:
        _, count = self._json.read(self._rest, last=self._last)
        self._rest = self._rest[count:]
        return self._enter(self._close) if self._json.ended or self._json.broken or self._last else False

    def _close(self) -> bool:
        rest = self._rest.lstrip()
        while closer := next((mark for mark in self.closers if rest.startswith(mark)), None):
            self._rest = rest[len(closer) :]
            rest = self._rest.lstrip()
        if join := next((mark for mark in self.joins if rest.startswith(mark)), None):
            self._raw += "" if join in self._hidden else self._rest[: -len(rest)] + join
            self._rest = rest[len(join) :]
            return self._enter(self._head)
        if self.repeats and rest.startswith("{"):
            return self._enter(self._head)
        if not self._last and any(mark.startswith(rest) for mark in (*self.closers, *self.joins)):
            return False
        return self._no_call()

    def _no_call(self) -> bool:
        self._say(self._raw)
        self._raw = ""
        return self._enter(self._text)

    def _enter(self, state: Callable[[], bool]) -> bool:
        self._state, self._at, self._json = state, 0, JsonObject()
        return True

    # Heads

    def _find_head(self) -> Head | Literal[False] | None:
        """The head at the beginning of `_rest`. False: no call begins here. None: undecided without more text."""
        return self._object_head()

    def _object_head(self, start: int = 0) -> Head | Literal[False] | None:
        """The head of a call that is an object with a name and arguments, after `start` characters."""
        self._in_object = True
        if match := _HEAD.match(self._rest[:LIMIT], start):
            return Head(match["name"], match.end())
        start = len(self._rest) - len(self._rest[start:].lstrip())
        if start == len(self._rest):
            return None
        if not self._may_be_call(self._rest[start:]):
            return False
        self._at = max(self._at, start)
        _, count = self._json.read(self._rest[self._at :], last=self._last)
        self._at += count
        if self._at > MOST:
            return False
        if self._json.ended:
            call = whole_call(self._rest[start : self._at])
            return Head(call[0], self._at, call[1]) if call else False
        return False if self._json.broken else None

    def _may_be_call(self, text: str) -> bool:
        """True if an object with this beginning may be a call. Other JSON is not delayed for long."""
        match = _FIRST.match(text)
        if match is None or (match["key"] is None and text[match.end() :]):
            return False
        key = match["key"] or ""
        if match["closed"] is None:
            return any(name.startswith(key) for name in _KEYS)
        return key in _KEYS and (key != "name" or match["value"] is None or match["value"] in self._names)

    def _matched_head(self, pattern: re.Pattern[str]) -> Head | Literal[False] | None:
        """The head of a call that begins with the name; `pattern` matches it."""
        self._in_object = False
        if match := pattern.match(self._rest[:LIMIT]):
            return Head(match[match.lastgroup or 0].strip(), match.end())
        return False if len(self._rest) >= LIMIT else None

    # Parts

    def _say(self, text: str) -> None:
        if text:
            self._parts.append(Text(text))

    def _add(self, part: Call | Arguments) -> None:
        if self._most is None or self._count <= self._most:
            self._parts.append(part)


class Hermes(CallParser):
    """`<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`: Qwen2.5, Qwen3, MiMo, Hermes."""

    begins = ("<tool_call>",)
    closers = ("</tool_call>",)


class Llama3(CallParser):
    """`{"name": "add", "parameters": {"a": 1}}` as the whole answer, or after `<|python_tag|>`, separated by semicolons
    or spaces: Llama 3.1, 3.2, 3.3."""

    begins = ("<|python_tag|>",)
    joins = (";", ",", "<|python_tag|>")
    repeats = True

    _begun = False

    def _text(self) -> bool:
        if not self._begun:
            rest = self._rest.lstrip()
            if not rest and not self._last:
                return False
            self._begun = True
            if rest.startswith("{"):
                return self._enter(self._head)
        return super()._text()


class Mistral(CallParser):
    """`[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]`, or in later models `[TOOL_CALLS]add[ARGS]{"a": 1}`."""

    begins = ("[TOOL_CALLS]",)
    closers = ("]",)
    joins = (",",)
    id_length = 9

    _NAMED = re.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]*\s*)?(?:\[ARGS\])?\s*" + _BEGUN)

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        return (*super().markers(), "[CALL_ID]", "[ARGS]")

    def _find_head(self) -> Head | Literal[False] | None:
        rest = self._rest.lstrip()
        if not rest:
            return None
        if rest[0] in "[{":
            return self._object_head(len(self._rest) - len(rest) + (rest[0] == "["))
        if not re.match(r"[\w.-]+\s*(?:[\[{]|$)", rest):
            return False
        return self._matched_head(self._NAMED)


class NamedCalls(CallParser):
    """Calls that begin with a name, which `head` matches, and end with the first of `closers`."""

    head: ClassVar[re.Pattern[str]]  # up to the arguments
    separator: ClassVar[str]  # between name and arguments

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        return (*super().markers(), cls.separator)

    def _find_head(self) -> Head | Literal[False] | None:
        head = self._matched_head(self.head)
        return False if head is None and self.closers[0] in self._rest else head


class DeepSeek(NamedCalls):
    """Between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`: V3 and R1

        <｜tool▁call▁begin｜>function<｜tool▁sep｜>add\\n```json\\n{"a": 1}\\n```<｜tool▁call▁end｜>

    and V3.1 `<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>`."""

    begins = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    closers = ("<｜tool▁call▁end｜>", "```", "<｜tool▁calls▁end｜>")
    joins = ("<｜tool▁call▁begin｜>",)
    separator = "<｜tool▁sep｜>"
    text_arguments = True
    head = re.compile(
        r"\s*(?:function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```(?:json)?\s*|(?P<bare>[^\n<]+)<｜tool▁sep｜>\s*)" + _BEGUN
    )


class MistralNamed(Mistral):
    """Models that write `[TOOL_CALLS]add[ARGS]{"a": 1}`. Both classes read both forms."""


class DeepSeek31(DeepSeek):
    """V3.1. Both classes read both forms."""


class KimiK2(NamedCalls):
    """Kimi K2, between `<|tool_calls_section_begin|>` and `<|tool_calls_section_end|>`

    <|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>"""

    begins = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    closers = ("<|tool_call_end|>", "<|tool_calls_section_end|>")
    joins = ("<|tool_call_begin|>",)
    separator = "<|tool_call_argument_begin|>"
    numbered_ids = True
    head = re.compile(r"\s*(?:functions\.)?(?P<name>[^\s<:]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*" + _BEGUN)


class Harmony(CallParser):
    """Messages of gpt-oss. Their headers have a role, a recipient, a channel and a type, which may be missing

        <|channel|>analysis<|message|>A city.<|end|>
        <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>

    The channel analysis is thoughts, a message to a function is a call, all others are text. A header from its first
    unknown word or recipient is a part of its message. Text that spells a marker counts as one. `opened`: the text
    begins with a header, else inside of a message to the user.
    """

    begins = ("<|channel|>", "<|start|>", "<|message|>", "<|constrain|>")
    closers = ("<|end|>", "<|call|>", "<|return|>")

    _MARK = re.compile(r"<\|(?:start|channel|message|constrain|end|call|return)\|>")
    _HEADER_END = re.compile(r"<\|(?:message|end|call|return)\|>|(?<=\S)\s*<\|start\|>")
    _HEADER = re.compile(
        r"\s*(?:<\|start\|>\s*)?(?:assistant(?!\w)\s*)?(?:to=(?P<role>[^\s<]+)\s*)?"
        r"(?:<\|channel\|>\s*(?:(?P<channel>analysis|commentary|final)(?![^\s<])\s*)?)?"
        r"(?:to=(?P<to>[^\s<]+)\s*)?(?:<\|constrain\|>\s*)?(?:(?:json|code)\s*\Z)?"
    )

    def __init__(self, names: Collection[str] = (), *, opened: bool = True, **more: Any) -> None:
        super().__init__(names, **more)
        self._state = self._header if opened else self._message
        self._kind: type[Text | Thought | Arguments] = Text
        self._is_bare = False  # a call without arguments so far

    def _header(self) -> bool:
        end = self._HEADER_END.search(self._rest, 0, LIMIT)
        is_cut = end is None and len(self._rest) < LIMIT
        if is_cut and not (self._last and self._rest):
            return False
        text = self._rest[: end.start() if end else LIMIT]
        header = self._HEADER.match(text)
        assert header is not None, "all of its parts are optional"
        size, recipient = header.end(), "role" if header["role"] else "to"
        name = (header[recipient] or "").removeprefix("functions.")
        if header[recipient] and name not in self._names:
            size = header.start(recipient) - len("to=")
        words = ("analysis", "commentary", "final", "assistant", *(f"to=functions.{name}" for name in self._names))
        if is_cut and size and any(word.startswith(text[size:]) for word in words):
            size = len(text)
        self._parts.append(Message())
        self._kind = Thought if header["channel"] == "analysis" else Text
        if end is not None and end[0] == "<|message|>":
            if unknown := self._MARK.sub(" ", text[size:]).split():
                self._speak(" ".join(unknown) + "\n")
            size = end.end()
        if name in self._names and size > len(text) * is_cut:
            self._kind, self._is_bare = Arguments, True
            self._count += 1
            self._add(Call(name))
        self._rest = self._rest[size:]
        return self._enter(self._message)

    def _message(self) -> bool:
        end = self._MARK.search(self._rest)
        held = 0 if end or self._last else begun(self._rest, (*self.begins, *self.closers))
        size = end.start() if end else len(self._rest) - held
        text, mark = self._rest[:size], end[0] if end else ""
        if self._kind is Arguments:
            arguments, count = self._json.read(text, last=self._last or end is not None)
            if arguments:
                self._add(Arguments(arguments))
            self._is_bare = self._is_bare and not text[:count].strip()
            if self._json.ended or self._json.broken:
                self._kind = Text
            elif end is None:
                size = count
            text = text[count:size]
        self._speak(text)
        self._rest = self._rest[size:]
        if mark not in ("<|start|>", "<|channel|>"):
            self._rest = self._rest[len(mark) :]
        if mark in ("<|message|>", "<|constrain|>"):
            return True
        if self._kind is Arguments and self._is_bare and (end or self._last):
            self._add(Arguments("{}"))
        return end is not None and self._enter(self._header)

    def _speak(self, text: str) -> None:
        if text:
            self._parts.append(Thought(text) if self._kind is Thought else Text(text))


def begun(text: str, marks: Collection[str]) -> int:
    """Number of characters at the end of a text that may begin one of these strings."""
    longest = max(map(len, marks), default=1) - 1
    sizes = range(min(longest, len(text)), 0, -1)
    return next((size for size in sizes if any(mark.startswith(text[-size:]) for mark in marks)), 0)


def whole_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call that is a JSON object with its members in any order; None if it is not a call."""
    try:
        call = pydantic_core.from_json(JsonObject().read(text, last=True)[0])
        if isinstance(call.get("function"), dict):
            call = call["function"]
        name = call.get("name", call.get("function"))
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):  # some models write the arguments as text
            arguments = arguments or "{}"
            return (
                (name, arguments)
                if isinstance(name, str) and isinstance(pydantic_core.from_json(arguments), dict)
                else None
            )
        if not isinstance(name, str) or not isinstance(arguments, dict | None):
            return None
        return name, json.dumps(arguments or {}, allow_nan=False)
    except ValueError:
        return None


def strict_json(text: str, *, partial: bool = False) -> Any:
    """Parses JSON. Raises ValueError also for NaN, too large numbers, lone surrogates, and more than about 200 levels,
    which strict clients refuse. `partial`: the text may be cut off, without its last value."""
    try:
        value = pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError as error:
        if not partial or not str(error).startswith("EOF"):  # else it would return the part before the error
            raise
        value = pydantic_core.from_json(text, allow_inf_nan=False, allow_partial=True)
    json.dumps(value, allow_nan=False)  # 1e999 is infinite
    return value


class TaggedCalls(CallParser):
    """Calls with a tag for each argument. `schemas`: maps functions to the JSON schemas of their parameters."""

    name: ClassVar[re.Pattern[str]]  # up to the first argument or the end of the call; group `name`
    key: ClassVar[re.Pattern[str]]  # before a value; group `key`
    opens: ClassVar[str]  # the beginning of `key`
    example: ClassVar[str]  # matches `key`
    value_end: ClassVar[re.Pattern[str]]  # the end tag of a value, or the next `key` if that is missing; group `next`
    ends: ClassVar[tuple[str, ...]]  # after the last argument
    line_breaks: ClassVar[bool] = False  # a line break precedes and follows each value

    def __init__(
        self, names: Collection[str] = (), *, schemas: Mapping[str, Mapping[str, Any]] | None = None, **more: Any
    ) -> None:
        super().__init__(names, **more)
        self._schemas, self._called = schemas or {}, ""
        self._keys: list[str] = []  # keys of this call so far

    def _find_head(self) -> Head | Literal[False] | None:
        if match := self.name.match(self._rest[:LIMIT]):
            self._called, self._keys = match["name"].strip(), []
            return Head(self._called, match.end())
        return None if len(self._rest) < LIMIT and self._may_name(self._rest) else False

    def _may_name(self, text: str) -> bool:
        """True if a call may begin with this text, which ends before the first argument."""
        name, _, rest = text.lstrip().partition(">" if self.line_breaks else "\n")
        if not any(function.startswith(name.strip()) for function in self._names):
            return False
        marks = (self.opens, *self.ends)
        return any(mark.startswith(rest.strip()) or rest.strip().startswith(mark) for mark in marks)

    def _arguments(self) -> bool:
        rest = self._rest.lstrip()
        if match := self.key.match(rest[:LIMIT]):
            self._rest, self._at = rest[match.end() :], 0
            self._keys.append(match["key"])
            self._state = self._value
            return True
        begun = any(mark.startswith(rest) and mark != rest for mark in self.ends) or (
            len(rest) < LIMIT and any(self.key.fullmatch(rest + self.example[at:]) for at in range(len(self.example)))
        )
        if begun and not self._last:
            return False
        if begun:
            self._rest = ""  # cut off
        else:
            self._add(Arguments("}" if self._keys else "{}"))
        return self._enter(self._close)

    def _next_key(self, tag: re.Match[str]) -> bool:
        """True if a tag ends a value without an end tag, and is not a part of the value."""
        key, named = tag["next"], self._schemas.get(self._called, {}).get("properties")
        start, mark = tag.start(), self.begins[-1]
        if (at := self._rest.rfind(mark, max(0, start - LIMIT), start)) >= 0:  # the next call, after the end of this
            head = self.name.match(self._rest, at + len(mark))
            if head and head.end() == start and head["name"].strip() in self._names:
                return any(self._rest.find(end, 0, at) >= 0 for end in self.ends)
        named = named if isinstance(named, Mapping) else {}
        if key in self._keys or (named and key not in named):
            return False
        before = self._rest[max(0, start - LIMIT) : start].rstrip(" \t")
        return not before or before.endswith("\n") or (bool(named) and not self.line_breaks)

    def _value(self) -> bool:
        ends = self.value_end.finditer(self._rest, self._at)
        tag = next((end for end in ends if end["next"] is None or self._next_key(end)), None)
        if tag is None and not self._last:
            self._at = max(0, len(self._rest) - LIMIT)
            return False
        at, end = tag.span() if tag else (len(self._rest), len(self._rest))
        whole = tag is not None and tag["next"] is None
        if not whole:  # no end tag: the value ends at the next argument, or with the call
            places = [place for mark in self.ends if (place := self._rest.find(mark, 0, at)) >= 0]
            at = end = min(places, default=at)
        cut = not whole and at == len(self._rest)
        text, self._rest = self._rest[:at], self._rest[end:]
        if self.line_breaks:
            text = text.removeprefix("\n")
        if not cut and not whole:
            text = re.sub(r"\n[ \t]*\Z", "", text)
        elif not cut and self.line_breaks:
            text = text.removesuffix("\n")
        value = json.dumps(typed_value(text, self._keys[-1], self._schemas.get(self._called, {})), ensure_ascii=False)
        if cut and value.startswith('"'):
            value = value[:-1]
        key = json.dumps(self._keys[-1], ensure_ascii=False)
        self._add(Arguments(f"{'{' if len(self._keys) == 1 else ', '}{key}: {value}"))
        return self._enter(self._close if cut else self._arguments)


class QwenCoder(TaggedCalls):
    """Qwen3-Coder. The outer tag may be missing."""

    begins = ("<tool_call>", "<function=")
    closers = ("</function>", "</tool_call>")
    joins = ("<function=",)
    name = re.compile(r"(?P<name>[^<>\n]+)>\s*(?=<parameter=|</function>|</tool_call>)")
    key = re.compile(r"<parameter=(?P<key>[^<>\n]{1,256})>")
    value_end = re.compile(r"<(?:/parameter>|parameter=(?P<next>[^<>\n]{1,256})>)")
    opens, example, ends = "<parameter=", "<parameter=a>", ("</function>", "</tool_call>")
    line_breaks = True


class Glm(TaggedCalls):
    """GLM-4.5 and 4.6."""

    begins = ("<tool_call>",)
    closers = ("</tool_call>",)
    name = re.compile(r"\s*(?P<name>[^<>\n]+?)\s*(?=<arg_key>|</tool_call>)")
    key = re.compile(r"<arg_key>(?P<key>[^<>]{1,256})</arg_key>\s{,64}<arg_value>")
    value_end = re.compile(r"<(?:/arg_value>|arg_key>(?P<next>[^<>]{1,256})</arg_key>\s{,64}<arg_value>)")
    opens, example, ends = "<arg_key>", "<arg_key>a</arg_key><arg_value>", ("</tool_call>",)

    def _may_name(self, text: str) -> bool:
        name, tag, rest = text.strip().partition("<")
        if not any(function.startswith(name.strip()) for function in self._names):
            return False
        return any(mark.startswith(tag + rest) for mark in (self.opens, *self.ends))


def typed_value(text: str, name: str, schema: Mapping[str, Any]) -> Any:
    """The value of a text between tags. A string, if the schema allows one or does not mention the argument; else the
    text read as JSON, with words such as `TRUE` in any case, or as a Python literal, as in SGLang; else the text.

    Args:
        name: name of the argument.
        schema: schema of the object of all arguments.
    """
    members = schema.get("properties")
    types = _types(members.get(name) if isinstance(members, Mapping) else None, schema, {})
    if text == "null" and (not types or "null" in types):
        return None
    if not types or "string" in types:
        return text
    bare = text.strip()
    with contextlib.suppress(ValueError):
        return strict_json(bare.lower() if bare.lower() in _WORDS else bare)
    if len(bare) <= MOST:  # of longer texts the syntax tree takes too much memory
        with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            with warnings.catch_warnings(action="ignore"):
                value = strict_json(json.dumps(ast.literal_eval(bare)))
            return value if _TYPES[type(value)] in types else text
    return text


def _types(schema: Any, root: Mapping[str, Any], known: dict[str, set[str]], depth: int = 0) -> set[str]:
    """Names of the types that a schema allows; empty: any.

    Args:
        known: results of references. Each is followed once, since many may lead to one schema, or back to themselves.
        depth: number of enclosing schemas, at most `MAX_DEPTH`.
    """
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in known:
            known[reference] = set()
            known[reference] = _types(_part(root, reference), root, known, depth + 1)
        return known[reference]
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(listed, list):
        return {_TYPES[type(value)] for value in listed}
    names = schema.get("type", "object" if "properties" in schema else "array" if "items" in schema else [])
    types = {name for name in (names if isinstance(names, list) else [names]) if name in _TYPES.values()}
    for key in ("allOf", "anyOf", "oneOf"):
        if not types and isinstance(options := schema.get(key), list):
            several = [_types(option, root, known, depth + 1) for option in options]
            types = set().union(*several) if key == "allOf" or all(several) else types
    return types | ({"null"} if types and schema.get("nullable") is True else set())


def _part(root: Any, reference: str) -> Any:
    """The part of a schema that a reference such as `#/$defs/Name` names; None if there is none."""
    for name in unquote(reference).removeprefix("#").split("/")[1:]:
        root = root.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root if reference.startswith("#") else None
