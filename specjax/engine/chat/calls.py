"""Parsers of function calls in a model's text, which comes in pieces: one class for each format.

    parser = Hermes({"add"})
    parser.feed('Sum: <tool_call>{"name": "add", "argu')    -> [Text("Sum: ")]
    parser.feed('ments": {"a": [1')                         -> [Call("add"), Arguments('{"a": [')]
    parser.feed(']}}</tool_call>', last=True)               -> [Arguments("1]}")]

The concatenated parts do not depend on the pieces. A call is announced after its name, one of the request's functions,
and the beginning of its arguments; text that turns out not to be a call is plain text. Arguments are passed on as the
model writes them: they may be cut off by the limit of tokens, or be invalid JSON.

Most formats write arguments as JSON. `TaggedCalls` reads values between tags, which become JSON when the call ends:

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
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias
from urllib.parse import unquote


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
MAX_TRIALS = 256  # places in thoughts where a call seems to begin, before further ones are ignored
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
PEOPLE = {"user", "assistant", "all"}  # recipients of Harmony's messages that are not functions
_LAST_LINE_BREAK = re.compile(r"\n[ \t]*\Z")
_PLAIN_KEY = re.compile(r"[\w.$-]+")
_ARGUMENT_TAG = re.compile(r"</?(?:parameter|arg_)")
KEY_PADDING = " \t\n\"'"  # characters around a key that are not a part of it
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


def _from_json(text: str, **options: bool) -> Any:
    import pydantic_core  # engines without functions do not need it

    return pydantic_core.from_json(text, **options)


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


Found: TypeAlias = Head | Literal[False] | None
"""The head of a call. False: no call begins here. None: undecided without more text."""


class CallParser:
    """Parses the text of one answer, in pieces. This base class has no format: all of it is text.

    Args:
        names: functions that may be called.
        hidden: special tokens of the format, which never become text.
        most: maximum number of reported calls; None: all.
        schemas: maps functions to the JSON schemas of their parameters, for formats whose values have no types.
    """

    begins: ClassVar[tuple[str, ...]] = ()  # strings before one or several calls
    closers: ClassVar[tuple[str, ...]] = ()  # strings that may follow a call
    joins: ClassVar[tuple[str, ...]] = ()  # strings after which another call may follow
    bare_begin: ClassVar[tuple[str, ...]] = ()  # expressions for calls inside of text that begin without a marker
    repeats: ClassVar[bool] = False  # another call may follow at once
    text_arguments: ClassVar[bool] = False  # templates expect the arguments of earlier calls as JSON, not as objects
    id_length: ClassVar[int | None] = None  # number of letters and digits of ids in templates
    numbered_ids: ClassVar[bool] = False  # templates expect ids of the form functions.add:0, counted over the chat

    def __init__(
        self, names: Collection[str] = (), *, hidden: Collection[str] = (), most: int | None = None,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        self._names, self.hidden, self._most = frozenset(names), frozenset(hidden), most
        self._schemas = schemas or {}
        self._marks = (*self.begins, *sorted(self.hidden - {*self.begins}))
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
                self._raw = "" if mark in self.hidden else mark
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
            if head.whole:
                self._add(Arguments(head.whole))
            return self._enter(self._close)
        return self._enter(self._arguments)

    def _arguments(self) -> bool:
        text, count = self._json.read(self._rest, last=self._last)
        self._rest = self._rest[count:]
        if text:
            self._add(Arguments(text))
        if self._json.broken and self._rest[:1] in ("]", "}"):  # passed on, because without it they seem cut off
            self._add(Arguments(self._rest[0]))
            self._rest = self._rest[1:]
        if self._json.ended or self._json.broken or self._last:
            return self._enter(self._members if self._in_object else self._close)
        return False

    def _members(self) -> bool:
        """After arguments that are a member of an object, up to its end. Unknown members may be misplaced arguments:
        the arguments become invalid."""
        rest = self._rest.lstrip()
        if not rest and not self._last:
            return False
        if not rest.startswith((",", "}")):
            return self._enter(self._close)
        if not self._at:
            self._rest, self._json = rest, JsonObject("}")
        _, count = self._json.read(self._rest[self._at :], last=self._last)
        self._at += count
        if not (self._json.ended or self._json.broken or self._last):
            return False
        text, self._rest = self._rest[: self._at], self._rest[self._at :]
        if self._json.ended and not _known_members(text):
            self._add(Arguments(text))
        return self._enter(self._close)

    def _close(self) -> bool:
        rest = self._rest.lstrip()
        while closer := next((mark for mark in self.closers if rest.startswith(mark)), None):
            self._rest = rest[len(closer) :]
            rest = self._rest.lstrip()
        if join := next((mark for mark in self.joins if rest.startswith(mark)), None):
            self._raw += "" if join in self.hidden else self._rest[: -len(rest)] + join
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

    def _find_head(self) -> Found:
        """The head at the beginning of `_rest`."""
        return self._object_head()

    def _object_head(self, start: int = 0) -> Found:
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

    def _matched_head(self, pattern: re.Pattern[str]) -> Found:
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
    bare_begin = (r"(?m:^)\{",)
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

    def _find_head(self) -> Found:
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

    def _find_head(self) -> Found:
        head = self._matched_head(self.head)
        return False if head is None and self.closers[0] in self._rest.partition("{")[0] else head


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

    The channel analysis is thoughts, JSON for a function is a call, all other messages are text. Other words after the
    channel or the recipient are dropped. If the recipient is unknown or gets no JSON, the text includes the header from
    the recipient on. Text that spells a marker counts as one, except in strings of arguments. `opened`: the text begins
    with a header, else inside of a message to the user.
    """

    begins = ("<|channel|>", "<|start|>", "<|message|>", "<|constrain|>")
    closers = ("<|end|>", "<|call|>", "<|return|>")

    _MARK = re.compile(r"<\|(?:start|channel|message|constrain|end|call|return)\|>")
    _HEADER_END = re.compile(r"<\|(?:message|end|call|return)\|>|(?<=\S)\s*<\|start\|>")
    _ROLE = re.compile(r"\s*(?:<\|start\|>\s*)?(?:assistant(?!\w)\s*)?")
    _CHANNEL = re.compile(r"<\|channel\|>\s*(?:(?P<channel>analysis|commentary|final)(?![^\s<])\s*)?")
    _RECIPIENT = re.compile(r"(?<![^\s>])to=(?P<to>[^\s<]+)\s*")
    _TYPE = re.compile(
        r"<\|constrain\|>\s*(?:[^\s<{\[]{,64}(?![^\s<{\[])\s*)?|(?:json|code)\s*(?![^{\[])", re.IGNORECASE
    )
    _PARTS = (_CHANNEL, _RECIPIENT, _TYPE)
    _OPENED = re.compile(r'\{\s*(?:"(?:[^"\\]|\\.)*(?:\\|"\s*(?::\s*)?)?)?\Z', re.DOTALL)
    """Matches an object that ends before its first value."""

    def __init__(self, names: Collection[str] = (), *, opened: bool = True, **more: Any) -> None:
        super().__init__(names, **more)
        self._state = self._header if opened else self._message
        self._kind: type[Text | Thought] = Text
        self._name = ""  # the recipient of a message that is a call if JSON follows
        self._recipient = ""  # the header from the recipient on

    def _header(self) -> bool:
        end = self._HEADER_END.search(self._rest, 0, LIMIT)
        is_cut = end is None and len(self._rest) < LIMIT
        if is_cut and not (self._last and self._rest):
            return False
        text = self._rest[: end.start() if end else LIMIT]
        channels, recipients = [*self._CHANNEL.finditer(text)], [*self._RECIPIENT.finditer(text)]
        channel = next((match["channel"] for match in reversed(channels) if match["channel"]), None)
        self._parts.append(Message())
        self._kind = Thought if channel == "analysis" else Text
        names = {match["to"].removeprefix("functions.") for match in recipients if match["to"] not in PEOPLE}
        self._name = next(iter(names)) if len(names) == 1 and names <= self._names else ""
        start = recipients[0].start() if names else len(text)
        self._recipient = self._words(text[start:])
        if end is not None and end[0] == "<|message|>":
            parts = sorted(match.start() for match in (*channels, *recipients))
            lead = self._ROLE.sub("", text[: parts[0]] if parts else self._TYPE.sub("", text), count=1)
            self._say(self._words(lead))
            if names and not self._name:
                self._say(self._recipient)
            size = end.end()
        else:
            size = self._without_message(text, is_cut, start)
        self._rest = self._rest[size:]
        return self._enter(self._object if self._name else self._message)

    def _without_message(self, text: str, is_cut: bool, recipient: int) -> int:
        """The size of a header that `<|message|>` does not end. `recipient`: its place."""
        size = self._ROLE.match(text).end()  # type: ignore[union-attr]
        held = begun(text, (*self.begins, *self.closers))
        header = text if self._MARK.fullmatch(text[len(text) - held :]) else text[: len(text) - held]
        while match := next((match for part in self._PARTS if (match := part.match(header, size))), None):
            size = match.end()
        if self._name:
            at = text.find("{", size)
            if at < 0 and (is_cut or text[size:]):  # cut off, or text
                self._name = ""
                return len(text) if is_cut else recipient
            return size if at < 0 else at
        size = min(size, recipient)
        rest, names = header[size:], [prefix + name for name in self._names for prefix in ("to=", "to=functions.")]
        is_begun = any(word.startswith(rest) for word in ("analysis", "commentary", "final", "assistant", *names))
        is_typed = "<|constrain|>" in header and rest[:1] not in '{["'
        return len(text) if is_cut and size and (is_begun or is_typed) else size

    def _object(self) -> bool:
        """Before the arguments of a call."""
        self._rest = rest = self._rest.lstrip()
        is_open = len(rest) < LIMIT and self._OPENED.match(rest) is not None
        is_bare = not rest or self._MARK.match(rest) is not None
        marks = (*self.begins, *self.closers)
        if not self._last and (is_open or not rest or any(mark.startswith(rest) and mark != rest for mark in marks)):
            return False
        if not (is_open or is_bare or re.match(_BEGUN, rest[:LIMIT])):
            self._say(self._recipient)
            return self._enter(self._message)
        self._count += 1
        self._kind = Text
        self._add(Call(self._name))
        if is_bare:
            self._add(Arguments("{}"))
        return self._enter(self._message if is_bare else self._arguments)

    def _close(self) -> bool:
        return self._enter(self._message)

    def _message(self) -> bool:
        end = self._MARK.search(self._rest)
        held = 0 if end or self._last else begun(self._rest, (*self.begins, *self.closers))
        size = end.start() if end else len(self._rest) - held
        self._say(self._rest[:size])
        self._rest, mark = self._rest[size:], end[0] if end else ""
        if mark not in ("<|start|>", "<|channel|>"):
            self._rest = self._rest[len(mark) :]
        if mark in ("<|message|>", "<|constrain|>"):
            return True
        return end is not None and self._enter(self._header)

    def _words(self, header: str) -> str:
        """Words of a header as a line."""
        words = " ".join(self._MARK.sub(" ", header).split())
        return words and words + "\n"

    def _say(self, text: str) -> None:
        if text:
            self._parts.append(self._kind(text))


def begun(text: str, marks: Collection[str]) -> int:
    """Number of characters at the end of a text that may begin one of these strings."""
    longest = max(map(len, marks), default=1) - 1
    sizes = range(min(longest, len(text)), 0, -1)
    return next((size for size in sizes if any(mark.startswith(text[-size:]) for mark in marks)), 0)


def _known_members(text: str) -> bool:
    """True if these members, which follow the arguments in the object of a call, are not arguments."""
    try:
        return _from_json("{" + text.lstrip(" \t\n\r,")).keys() <= {*_KEYS, "index"}
    except ValueError:
        return False


def whole_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call that is a JSON object with its members in any order; None if it is not a call."""
    try:
        call = _from_json(JsonObject().read(text, last=True)[0])
        if isinstance(call.get("function"), dict):
            call = call["function"]
        name = call.get("name", call.get("function"))
        arguments = call.get("arguments", call.get("parameters"))
        written = arguments if isinstance(arguments, str) else None  # some models write the arguments as text
        arguments = _from_json(written) if written else {} if arguments in (None, "") else arguments
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        if not call.keys() & {"arguments", "parameters"} and not call.keys() <= {*_KEYS}:
            return None  # they may be under another name
        return name, written or json.dumps(arguments, allow_nan=False)
    except ValueError:
        return None


def strict_json(text: str, *, partial: bool = False) -> Any:
    """Parses JSON. Raises ValueError also for NaN, too large numbers, lone surrogates, and more than about 200 levels,
    which strict clients refuse. `partial`: the text may be cut off, without its last value."""
    try:
        value = _from_json(text, allow_inf_nan=False)
    except ValueError as error:
        if not partial or not str(error).startswith("EOF"):  # else it would return the part before the error
            raise
        value = _from_json(text, allow_inf_nan=False, allow_partial=True)
    json.dumps(value, allow_nan=False)  # 1e999 is infinite
    return value


class CallSearch:
    """Finds the first whole call in text that comes in pieces, such as thoughts that may not end before it.

    Args:
        make: makes a parser of the format that hides no markers: they are text that ends a trial.

    Attributes:
        held: text from the call on; without one, from where a call may begin.
        found: `held` begins with a whole call.
    """

    def __init__(self, make: Callable[[], CallParser]) -> None:
        self._make, format = make, make()
        self._begins = format.begins
        self._begin = re.compile("|".join((*map(re.escape, format.begins), *format.bare_begin)))
        self._before = "\n"  # the character before `held`
        self._trial: CallParser | None = None  # reads `held`
        self._trials = 0  # parsers that found no call
        self._arguments: str | None = None  # of the call that `_trial` reads
        self.held, self.found = "", False

    def feed(self, text: str, *, last: bool = False) -> str:
        """Adds text. Returns the text that is before a call. `last`: no text follows."""
        self.held, passed = self.held + text, ""
        while not self.found:
            if self._trial is None:
                begin = self._begin.search(self._before + self.held, 1) if self._trials < MAX_TRIALS else None
                undecided = 0 if last else begun(self.held, self._begins)
                passed += self._pass(begin.start() - 1 if begin else len(self.held) - undecided)
                if begin is None:
                    break
                self._trial, text, self._arguments = self._make(), self.held, None
            is_call = self._read(self._trial, text, last)
            if is_call is None and not last:
                break
            self.found = self._is_whole() if is_call is None else is_call
            if not self.found:
                self._trial, self._trials = None, self._trials + 1
                passed += self._pass(1)
        return passed

    def _pass(self, size: int) -> str:
        text, self.held = self.held[:size], self.held[size:]
        self._before = text[-1:] or self._before
        return text

    def _read(self, trial: CallParser, text: str, last: bool) -> bool | None:
        """True if the text begins with a whole call, False if it does not, None if that is undecided."""
        for start in range(0, max(len(text), 1), LIMIT):  # most trials end in the first piece
            end = start + LIMIT
            for part in trial.feed(text[start:end], last=last and end >= len(text)):
                match part:
                    case Text() if self._arguments is None and part.text.strip():
                        return False
                    case Text() | Call() if self._arguments is not None:
                        return self._is_whole()
                    case Call():
                        self._arguments = ""
                    case Arguments():
                        self._arguments = (self._arguments or "") + part.text
        return None

    def _is_whole(self) -> bool:
        try:
            return isinstance(strict_json(self._arguments or ""), dict)
        except ValueError:
            return False


@dataclass
class _Value:
    """The value of an argument, whose end has not been found."""

    key: str
    start: int
    is_repaired: bool = False  # a part of its tags is missing
    nests: bool = True  # calls that it quotes have ends of their own
    depth: int = 0  # quoted calls that have not ended
    quotes: bool = False  # it quotes calls
    end: int | None = None  # the latest place before the end of a call
    bare_ends: list[int] = field(default_factory=list)  # ends of a call without an end tag of the value before
    broken_at: int | None = None  # place of a malformed argument that follows


class TaggedCalls(CallParser):
    """Calls with a tag for each argument.

    A value may hold tags. It ends at the first end tag before a key that the schema names and that has not been given,
    or at the last one before the end of a call, up to the next call or the end of the text. Calls are announced when
    they are complete, or cut off by the end of the text, because a call with a malformed argument is text.
    """

    name: ClassVar[re.Pattern[str]]  # up to the first argument or the end of the call; group `name`
    name_begun: ClassVar[re.Pattern[str]]  # a part of it; groups `name`, `rest`
    key: ClassVar[re.Pattern[str]]  # before a value; group `key`
    broken_key: ClassVar[re.Pattern[str]]  # `key` without a part of its tags that has one possible reading
    key_start: ClassVar[re.Pattern[str]]  # the beginning of any such tag; group `key`
    value_end: ClassVar[str]
    opens: ClassVar[str]  # the beginning of `key`
    example: ClassVar[str]  # matches `key`
    line_breaks: ClassVar[bool] = False  # a line break precedes and follows each value

    def __init__(self, names: Collection[str] = (), **more: Any) -> None:
        super().__init__(names, **more)
        closers = "|".join(map(re.escape, self.closers))
        outer, begin = "".join(rf"(?:{re.escape(mark)}\s*)?" for mark in self.begins[:-1]), re.escape(self.begins[-1])
        self._ends = re.compile(rf"\s*(?:(?:{closers})\s*)+")
        self._begin = re.compile(rf"\s*{outer}{begin}")
        self._tags = re.compile(rf"{re.escape(self.value_end)}|{closers}|{begin}")
        self._schema: Mapping[str, Any] = {}  # of the call's arguments
        self._keys: Mapping[str, Any] | None = None  # keys that the schema names; None: it allows all
        self._called = ""  # the function, once its name is read
        self._given: list[tuple[_Value, str]] = []  # complete values and their texts
        self._value: _Value | None = None

    def _enter(self, state: Callable[[], bool]) -> bool:
        self._called = ""
        return super()._enter(state)

    def _find_head(self) -> Found:
        if not self._called:
            match = self.name.match(self._rest[:LIMIT])
            if match is None or match["name"].strip() not in self._names:
                return None if match is None and len(self._rest) < LIMIT and self._may_name(self._rest) else False
            self._called, self._given, self._value = match["name"].strip(), [], None
            self._schema, self._at = self._schemas.get(self._called, {}), match.end()
            named = self._schema.get("properties")
            is_open = any(self._schema.get(word) for word in ("additionalProperties", "patternProperties"))
            self._keys = named if isinstance(named, Mapping) and named and not is_open else None
        if self._value is None:
            if self._ends.match(self._rest, self._at):
                return Head(self._called, self._at, "{}")
            is_settled = self._last or len(self._rest) > self._at + LIMIT
            value = self._argument(self._at, any_key=True, repair=is_settled)
            if value is None and self._last and self._begins_key(self._rest[self._at :]):
                return Head(self._called, len(self._rest), "")  # cut off
            if value is None:
                return self._malformed(self._at) if is_settled else None
            self._value, self._at = value, value.start
        while self._at < (settled := len(self._rest) - (0 if self._last else LIMIT)):
            tag = self._tags.search(self._rest, self._at)
            if tag is None or tag.start() >= settled:
                self._at = settled
            elif (head := self._read_tag(self._value, tag)) is not None:
                return head
            elif self._value.broken_at is not None:
                break
        if self._value.broken_at is not None:
            return self._malformed(self._value.broken_at)
        return self._at_last(self._value) if self._last else None

    def _may_name(self, text: str) -> bool:
        """True if a call may begin with this text, which ends before the first argument."""
        match = self.name_begun.fullmatch(text.strip())
        if match is None or not any(function.startswith(match["name"].strip()) for function in self._names):
            return False
        return any(mark.startswith(match["rest"] or "") for mark in (self.opens, *self.closers))

    def _begins_key(self, text: str) -> bool:
        return any(self.key.fullmatch(text.strip() + self.example[at:]) for at in range(len(self.example)))

    def _argument(self, at: int, *, any_key: bool = False, repair: bool = True) -> _Value | None:
        """The argument whose tag stands at this place, after white space.

        Args:
            any_key: the schema need not name the key, if it is a word.
            repair: a part of the tag may be missing.
        """
        given = [value.key for value, _ in self._given] + ([self._value.key] if self._value else [])
        at += len(self._rest[at : at + LIMIT]) - len(self._rest[at : at + LIMIT].lstrip())
        for pattern in (self.key, self.broken_key)[: 1 + repair]:
            if match := pattern.match(self._rest, at):
                key, is_broken = match["key"], pattern is self.broken_key
                if self._keys and key not in self._keys and key.strip(KEY_PADDING) in self._keys:
                    key = key.strip(KEY_PADDING)
                is_plain = any_key and not is_broken and _PLAIN_KEY.fullmatch(key) and key not in given
                if is_plain or self._may_follow(key, given):
                    return _Value(key, match.end(), is_broken)
        return None

    def _may_follow(self, key: str, given: Collection[str]) -> bool:
        return key not in given and (self._keys is None or key in self._keys)

    def _is_head(self, at: int) -> bool:
        """True if a call begins after the marker that ends at this place."""
        head = self.name.match(self._rest, at)
        return head is not None and head["name"].strip() in self._names

    def _read_tag(self, value: _Value, tag: re.Match[str]) -> Found:
        """Reads a tag inside or after a value. None: the call goes on."""
        self._at, start = tag.end(), tag.start()
        if tag[0] == self.begins[-1]:
            if not self._is_head(self._at):
                return None
            if value.end is not None or value.bare_ends:
                return self._close_call(value)
            value.depth, value.quotes = value.depth + value.nests, True
        elif run := self._ends.match(self._rest, self._at if tag[0] == self.value_end else start):
            self._at = run.end()
            if value.depth:
                value.depth -= 1
            elif tag[0] == self.value_end:
                value.end = start
            else:
                value.bare_ends.append(start)
        elif not value.depth:
            following = self._argument(self._at)
            if following is None and start - value.start <= CHUNK:
                other = self._argument(self._at, any_key=True, repair=False)
                following = other if other and self._is_typed(value.key, self._rest[value.start : start]) else None
            if following is not None:
                self._given.append((value, self._trimmed(self._rest[value.start : start])))
                self._value, self._at = following, following.start
            elif (begin := self._begin.match(self._rest, self._at)) and self._is_head(begin.end()):
                value.end = start
            elif self._keys and (begin := self.key_start.match(self._rest, self._at)):
                given = [value.key, *(value.key for value, _ in self._given)]
                value.broken_at = start if self._may_follow(begin["key"], given) else None
        return None

    def _at_last(self, value: _Value) -> Found:
        """The call at the end of the text."""
        if value.end is None and value.quotes and value.nests:
            self._value, self._at = replace(value, nests=False, depth=0, quotes=False, bare_ends=[]), value.start
            return self._find_head()
        end = value.end if value.end is not None else value.bare_ends[-1] if value.bare_ends else None
        if end is not None and (value.nests or self._tags.split(self._rest[end:])[-1].strip() == ""):
            return self._close_call(value)
        text, tag, rest = self._rest[value.start :].rpartition(self.value_end)
        rest = rest.strip()
        if tag and (self._begins_key(rest) or any(mark.startswith(rest) for mark in self.closers)):
            arguments = self._as_json([*self._given, (value, self._trimmed(text))])
            arguments = arguments and arguments[:-1]
        else:
            arguments = self._as_json([*self._given, (value, self._rest[value.start :])])
            arguments = arguments and arguments[: -2 if arguments[-2] == '"' else -1]
        return self._malformed(value.start) if arguments is None else Head(self._called, len(self._rest), arguments)

    def _close_call(self, value: _Value) -> Found:
        """The call whose last value ends at the latest end of a call."""
        end = value.bare_ends[-1] if value.end is None else value.end
        text, arguments = self._rest[value.start : end], None
        if value.end is not None:
            arguments, end = self._as_json([*self._given, (value, self._trimmed(text))]), end + len(self.value_end)
        elif len(value.bare_ends) == 1 and not value.is_repaired and self.value_end not in text:
            arguments = self._as_json([*self._given, (value, _LAST_LINE_BREAK.sub("", text))])
        return self._malformed(end) if arguments is None else Head(self._called, end, arguments)

    def _malformed(self, at: int) -> Literal[False] | None:
        """Makes the call text, up to its first end after this place. None: it has not ended."""
        first = at if self._last else max(at, len(self._rest) - 2 * CHUNK)
        places = [place for mark in self.closers if (place := self._rest.find(mark, first)) >= 0]
        run = self._ends.match(self._rest, min(places)) if places else None
        if run is None and not self._last:
            return None
        size = run.end() if run else len(self._rest)
        text, self._rest = self._rest[:size], self._rest[size:]
        for mark in self.hidden:
            text = text.replace(mark, "")
        self._raw += text
        return False

    def _trimmed(self, text: str) -> str:
        return text.removesuffix("\n") if self.line_breaks else text

    def _as_json(self, members: list[tuple[_Value, str]]) -> str | None:
        """The arguments; None if one of them is malformed."""
        keys, pairs = [value.key for value, _ in members], list[str]()
        for value, text in members:
            if value.is_repaired and _ARGUMENT_TAG.search(text):
                return None
            parts = self._parts_of(value.key, text, keys)
            if any(self._is_mistyped(key, part) for key, part in parts[1:]):
                parts = [(value.key, text)]
            for key, part in parts:
                if self._tags.search(part) and self._is_mistyped(key, part):
                    return None
                keys.append(key)
                typed = typed_value(part.removeprefix("\n" * self.line_breaks), key, self._schema)
                pairs.append(f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(typed, ensure_ascii=False)}")
        return f"{{{', '.join(pairs)}}}"

    def _is_typed(self, key: str, text: str) -> bool:
        """True if the text is a value of a type other than string, and so does not hold tags."""
        return not isinstance(typed_value(text, key, self._schema), str) and text != "null"

    def _is_mistyped(self, key: str, text: str) -> bool:
        """True if the schema allows no string, and the text is not a value of another type."""
        types = argument_types(key, self._schema)
        is_text = not types or "string" in types
        return not is_text and isinstance(typed_value(text, key, self._schema), str)

    def _parts_of(self, key: str, text: str, given: Collection[str]) -> list[tuple[str, str]]:
        """The value of a key, and the arguments in it whose end tags before them are missing."""
        parts, start, known = list[tuple[str, str]](), 0, {*given}
        for tag in self.key.finditer(text) if self.value_end not in text else ():
            is_line = not (before := text[start : tag.start()].rstrip(" \t")) or before.endswith("\n")
            if self._may_follow(tag["key"], known) and (is_line or (self._keys is not None and not self.line_breaks)):
                parts.append((key, _LAST_LINE_BREAK.sub("", text[start : tag.start()])))
                key, start = tag["key"], tag.end()
                known.add(key)
        return [*parts, (key, text[start:])]


class QwenCoder(TaggedCalls):
    """Qwen3-Coder. The outer tag may be missing."""

    begins = ("<tool_call>", "<function=")
    closers = ("</function>", "</tool_call>")
    joins = ("<function=",)
    name = re.compile(r"(?P<name>[^<>\n]+)>\s*(?=<parameter=|</function>|</tool_call>)")
    name_begun = re.compile(r"(?P<name>[^>]*)(?:>\s*(?P<rest>.*))?", re.DOTALL)
    key = re.compile(r"<parameter=(?P<key>[^<>\n]{1,256})>")
    broken_key = re.compile(r"<parameter=(?P<key>[\w.-]{1,256})(?=\n)")
    key_start = re.compile(r"\s*<parameter=\s*[\"']?(?P<key>[\w.-]+)")
    value_end, opens, example = "</parameter>", "<parameter=", "<parameter=a>"
    line_breaks = True


class Glm(TaggedCalls):
    """GLM-4.5 and 4.6."""

    begins = ("<tool_call>",)
    closers = ("</tool_call>",)
    name = re.compile(r"\s*(?P<name>[^\s<>](?:[^<>\n]*[^\s<>])?)\s*(?=<arg_key>|</tool_call>)")
    name_begun = re.compile(r"(?P<name>[^<]*)(?P<rest>.*)", re.DOTALL)
    key = re.compile(r"<arg_key>(?P<key>[^<>]{1,256})</arg_key>\s{,64}<arg_value>")
    broken_key = re.compile(r"<arg_key>(?P<key>[^<>]{1,256})(?:</arg_key>(?!\s*<)\n?|<arg_value>)")
    key_start = re.compile(r"\s*<arg_key>\s*(?P<key>[\w.-]+)")
    value_end, opens, example = "</arg_value>", "<arg_key>", "<arg_key>a</arg_key><arg_value>"


def typed_value(text: str, name: str, schema: Mapping[str, Any]) -> Any:
    """The value of a text between tags. A string, if the schema allows one or does not mention the argument; else the
    text read as JSON, with words such as `TRUE` in any case, or as a Python literal, as in SGLang; else the text.

    Args:
        name: name of the argument.
        schema: schema of the object of all arguments.
    """
    types = argument_types(name, schema)
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


def argument_types(name: str, schema: Mapping[str, Any]) -> set[str]:
    """Names of the types that a schema allows for an argument; empty: any."""
    members = schema.get("properties")
    return _types(members.get(name) if isinstance(members, Mapping) else None, schema, {})


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
