"""Function calls in a model's text, found as the text comes: one class for each format that model families write.

    parser = Hermes({"add"})
    parser.feed('Sum: <tool_call>{"name": "add", "argu')    -> [Text("Sum: ")]
    parser.feed('ments": {"a": [1')                         -> [Call("add"), Arguments('{"a": [')]
    parser.feed(']}}</tool_call>', last=True)               -> [Arguments("1]}")]

What is fed at once makes no difference to what all parts together say. A call is announced once its name, one of the
request's functions, and the beginning of its arguments have been read; before that, text that turns out to be no call
is plain text. Arguments are passed on as the model writes them, like OpenAI's: they may be cut off by the limit of
tokens, or have brackets and commas in wrong places. `JsonObject` mends values that strict clients refuse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import pydantic_core


class Text(NamedTuple):
    text: str


class Call(NamedTuple):
    """A call begins; its arguments follow."""

    name: str


class Arguments(NamedTuple):
    """A piece of the arguments of the last call, which is JSON."""

    text: str


Part: TypeAlias = Text | Call | Arguments

LIMIT = 512  # characters from the beginning of a call within which its arguments begin, for these to be passed on early
MOST = 2**16  # characters of a call that is read as a whole, because its members have another order
CHUNK = 4096  # characters that are read at once, so that the cost is linear in the text
_BEGUN = r"(?=\{\s*(?:\}|\"(?:[^\"\\]|\\.)*\"\s*:\s*[\[{\"\dtfnTFNI-]))"
"""Matches before an object that is empty or whose first value begins. Words of Python and JavaScript are values, too:
True, None, NaN, Infinity."""
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"(?:name|function)"\s*:\s*"(?P<name>[^"\\]*)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*' + _BEGUN
)
"""A call as an object, up to its arguments, with the members in the usual order."""
_KEYS = ("name", "type", "function", "arguments", "parameters", "id")
_FIRST = re.compile(r'\{\s*(?:"(?P<key>[^"]*)(?P<closed>"\s*(?::\s*(?:"(?P<value>[^"\\]*)")?)?)?)?')


_IN_STRING = re.compile(
    r'[^"\\\x00-\x1f]+|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[\da-fA-F]{4}'
    r"|u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2})"
)
"""Matches characters of a string, or one escape. Surrogates match in pairs."""
_ESCAPE_BEGUN = re.compile(
    r"\\(?:u(?:[\da-fA-F]{0,3}|[dD][89abAB][\da-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][\da-fA-F]?)?)?)?)?)?)?\Z"
)
"""Matches an incomplete escape at the end of a text."""
_SPACE = re.compile(r"[ \t\n\r]+")
_WORD = re.compile(r'[^"{}\[\]<,: \t\n\r]+')  # a number, or a word such as true


class JsonObject:
    """Reads an object of JSON that comes in pieces, as far as its brackets and strings go.

    Values that strict clients refuse become strings: `NaN` becomes `"NaN"`, and 1e999, which exceeds a double,
    `"1e999"`. Words that are only a part of a value, as in `new york`, stay as they are. Invalid escapes in strings,
    such as a lone surrogate, get a second backslash. Control characters in strings are escaped.
    """

    def __init__(self, opened: str = "") -> None:
        """`opened`: the brackets that have to be closed, the innermost first."""
        self._closing = [*opened]
        self._in_string = self._at_value = False
        self._in_value = True  # no colon can follow
        self.ended = False
        self.broken = False  # what comes next cannot belong to it

    def read(self, text: str, *, last: bool = False) -> tuple[str, int]:
        """Reads on, up to the end of the object or to an incomplete escape or word. `last`: nothing follows.

        Returns the JSON to pass on, and the number of characters that were read.
        """
        found: list[str] = []
        at = 0
        while at < len(text) and not self.ended:
            character = text[at]
            if run := (_IN_STRING if self._in_string else _SPACE).match(text, at):
                found.append(run[0])
                at = run.end()
                continue
            if self._in_string:
                if character == "\\" and _ESCAPE_BEGUN.match(text, at):
                    if not last:
                        break
                    found.append(text[at:])  # cut off
                    at = len(text)
                    continue
                found.append(character if character == '"' else json.dumps(character)[1:-1])
                self._in_string = character != '"'
            elif word := _WORD.match(text, at):
                if word.end() == len(text) and not last:
                    break
                as_it_is = not self._at_value or word.end() == len(text) or _is_json(word[0])
                if not as_it_is:
                    follows = text[word.end() :].lstrip(" \t\n\r")[:1]
                    if not follows and not last:
                        break
                    as_it_is = follows not in ("}", "]", ",")  # a part of a wrong value, or cut off
                found.append(word[0] if as_it_is else json.dumps(word[0], ensure_ascii=False))
                self._at_value = False
                at = word.end()
                continue
            elif character == "<" or (character in "}]" and self._closing[-1:] != [character]):
                self.broken = True
                break
            else:
                found.append(character)
                self._in_string = character == '"'
                if character in "{[":
                    self._closing.append("}" if character == "{" else "]")
                elif character in "}]":
                    self._closing.pop()
                    self.ended = not self._closing
                if character in "{[,":
                    self._at_value = self._in_value = self._closing[-1:] == ["]"]
                else:
                    self._at_value = character == ":" and not self._in_value
                    self._in_value |= character != '"'
            at += 1
        return "".join(found), at


class Head(NamedTuple):
    """The beginning of a call, up to its arguments."""

    name: str
    length: int  # characters
    whole: str | None = None  # all arguments, if the length includes them and all other members


class CallParser:
    """The text of one answer, in pieces. Without a format of calls: all of it is text.

    Args:
        names: functions that may be called.
        hidden: special tokens of the format, which never become text.
        most: calls that are reported; None: all.
    """

    begins: ClassVar[tuple[str, ...]] = ()  # strings that begin one call or several
    closers: ClassVar[tuple[str, ...]] = ()  # may follow a call
    joins: ClassVar[tuple[str, ...]] = ()  # another call may follow these
    repeats: ClassVar[bool] = False  # another call may follow at once
    text_arguments: ClassVar[bool] = False  # templates take the arguments of earlier calls as JSON, not as objects
    id_length: ClassVar[int | None] = None  # characters, letters and digits, of ids that templates take
    numbered_ids: ClassVar[bool] = False  # templates take ids of the form functions.add:0, counted over the chat

    def __init__(self, names: Collection[str] = (), *, hidden: Collection[str] = (), most: int | None = None) -> None:
        self._names, self._hidden, self._most = frozenset(names), frozenset(hidden), most
        self._marks = (*self.begins, *sorted(self._hidden - {*self.begins}))
        self._state: Callable[[], bool] = self._text
        self._held = ""  # what is not decided
        self._raw = ""  # was read before it, and is text if no call follows
        self._last = False
        self._count = 0
        self._parts: list[Part] = []
        self._json = JsonObject()
        self._at = 0  # characters of `_held` that `_json` has read
        self._in_object = False  # the arguments are a member of an object
        self.is_cut = False  # the text ended inside the beginning of a call, before it was announced

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        """Strings that delimit calls; special tokens in some vocabularies."""
        return tuple(mark for mark in (*cls.begins, *cls.closers, *cls.joins) if len(mark) > 3)

    def feed(self, text: str, *, last: bool = False) -> list[Part]:
        """Adds text; the parts that it completes. With `last` everything held back is decided."""
        for start in range(0, max(len(text), 1), CHUNK):
            self._held += text[start : start + CHUNK]
            self._last = last and start + CHUNK >= len(text)
            while self._state():
                pass
        parts, self._parts = self._parts, []
        return parts

    # States: each reads what it can of `_held`, and returns whether another state goes on at once.

    def _text(self) -> bool:
        found = [(at, mark) for mark in self._marks if (at := self._held.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            self._say(self._held[:at])
            self._held = self._held[at + len(mark) :]
            if mark in self.begins:
                self._raw = "" if mark in self._hidden else mark
                self._enter(self._close if mark in self.begins[:-1] else self._head)
            return True
        kept = begun(self._held, self._marks)
        if self._last:
            self.is_cut, kept = self.is_cut or kept > 1, 0
        self._say(self._held[: len(self._held) - kept])
        self._held = self._held[len(self._held) - kept :]
        return False

    def _head(self) -> bool:
        head = self._find_head()
        if head is None and not self._last:
            return False
        if head is None:  # a list may end with a separator
            self.is_cut = bool(self._held.strip()) or self._raw.strip() not in (";", ",")
        if not head or head.name not in self._names:
            return self._no_call()
        self.is_cut = False
        self._held = self._held[head.length :]
        self._raw = ""
        self._count += 1
        self._add(Call(head.name))
        if head.whole is not None:
            self._add(Arguments(head.whole))
            return self._enter(self._close)
        return self._enter(self._arguments)

    def _arguments(self) -> bool:
        text, count = self._json.read(self._held, last=self._last)
        self._held = self._held[count:]
        if text:
            self._add(Arguments(text))
        if self._json.ended or self._json.broken or self._last:
            return self._enter(self._tail if self._in_object else self._close)
        return False

    def _tail(self) -> bool:
        """The rest of the object of which the arguments are a member."""
        rest = self._held.lstrip()
        if not rest and not self._last:
            return False
        if rest.startswith((",", "}")):
            self._held, self._json = rest, JsonObject("}")
            return self._enter(self._members, keep=True)
        return self._enter(self._close)

    def _members(self) -> bool:
        _, count = self._json.read(self._held, last=self._last)
        self._held = self._held[count:]
        return self._enter(self._close) if self._json.ended or self._json.broken or self._last else False

    def _close(self) -> bool:
        rest = self._held.lstrip()
        while closer := next((mark for mark in self.closers if rest.startswith(mark)), None):
            self._held = rest[len(closer) :]
            rest = self._held.lstrip()
        if join := next((mark for mark in self.joins if rest.startswith(mark)), None):
            self._raw += "" if join in self._hidden else self._held[: -len(rest)] + join
            self._held = rest[len(join) :]
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

    def _enter(self, state: Callable[[], bool], *, keep: bool = False) -> bool:
        self._state, self._at = state, 0
        if not keep:
            self._json = JsonObject()
        return True

    # Heads

    def _find_head(self) -> Head | Literal[False] | None:
        """The head that `_held` begins with. False: no call begins here. None: more text is needed to know."""
        return self._object_head()

    def _object_head(self, start: int = 0) -> Head | Literal[False] | None:
        """Of a call that is an object with a name and arguments, after `start` characters."""
        self._in_object = True
        if match := _HEAD.match(self._held[:LIMIT], start):
            return Head(match["name"], match.end())
        start = len(self._held) - len(self._held[start:].lstrip())
        if start == len(self._held):
            return None
        if not self._may_be_call(self._held[start:]):
            return False
        self._at = max(self._at, start)
        _, count = self._json.read(self._held[self._at :], last=self._last)
        self._at += count
        if self._at > MOST:
            return False
        if self._json.ended:
            found = whole_call(self._held[start : self._at])
            return Head(found[0], self._at, found[1]) if found else False
        return False if self._json.broken else None

    def _may_be_call(self, text: str) -> bool:
        """Whether an object with this beginning may be a call, so that other JSON is not held back for long."""
        match = _FIRST.match(text)
        if match is None or (match["key"] is None and text[match.end() :]):
            return False
        key = match["key"] or ""
        if match["closed"] is None:
            return any(each.startswith(key) for each in _KEYS)
        return key in _KEYS and (key != "name" or match["value"] is None or match["value"] in self._names)

    def _matched_head(self, pattern: re.Pattern[str]) -> Head | Literal[False] | None:
        """Of a call that begins with the name, as `pattern` has it."""
        self._in_object = False
        if match := pattern.match(self._held[:LIMIT]):
            return Head(match[match.lastgroup or 0].strip(), match.end())
        return False if len(self._held) >= LIMIT else None

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
    """`{"name": "add", "parameters": {"a": 1}}` as the whole answer, or after `<|python_tag|>`; between several are
    semicolons or spaces: Llama 3.1, 3.2, 3.3."""

    begins = ("<|python_tag|>",)
    joins = (";", ",", "<|python_tag|>")
    repeats = True

    _begun = False

    def _text(self) -> bool:
        if not self._begun:
            rest = self._held.lstrip()
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
        rest = self._held.lstrip()
        if not rest:
            return None
        if rest[0] in "[{":
            return self._object_head(len(self._held) - len(rest) + (rest[0] == "["))
        if not re.match(r"[\w.-]+\s*(?:[\[{]|$)", rest):
            return False
        return self._matched_head(self._NAMED)


class DeepSeek(CallParser):
    """Between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`, of V3 and R1

        <｜tool▁call▁begin｜>function<｜tool▁sep｜>add\\n```json\\n{"a": 1}\\n```<｜tool▁call▁end｜>

    and of V3.1 `<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>`."""

    begins = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    closers = ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
    joins = ("<｜tool▁call▁begin｜>",)
    text_arguments = True

    _NAMED = re.compile(
        r"\s*(?:function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```(?:json)?\s*|(?P<bare>[^\n<]+)<｜tool▁sep｜>\s*)" + _BEGUN
    )

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        return (*super().markers(), "<｜tool▁sep｜>")

    def _find_head(self) -> Head | Literal[False] | None:
        head = self._matched_head(self._NAMED)
        return False if head is None and self.closers[1] in self._held else head


class MistralNamed(Mistral):
    """Models that write `[TOOL_CALLS]add[ARGS]{"a": 1}`. Both are read in both forms."""


class DeepSeek31(DeepSeek):
    """V3.1. Both are read in both forms."""


class KimiK2(CallParser):
    """Kimi K2, between `<|tool_calls_section_begin|>` and `<|tool_calls_section_end|>`

    <|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>"""

    begins = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    closers = ("<|tool_call_end|>", "<|tool_calls_section_end|>")
    joins = ("<|tool_call_begin|>",)
    numbered_ids = True

    _NAMED = re.compile(r"\s*(?:functions\.)?(?P<name>[^\s<:]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*" + _BEGUN)

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        return (*super().markers(), "<|tool_call_argument_begin|>")

    def _find_head(self) -> Head | Literal[False] | None:
        head = self._matched_head(self._NAMED)
        return False if head is None and self.closers[0] in self._held else head


def begun(text: str, marks: Collection[str]) -> int:
    """Characters at the end of a text that may begin one of these strings."""
    longest = max(map(len, marks), default=1) - 1
    sizes = range(min(longest, len(text)), 0, -1)
    return next((size for size in sizes if any(mark.startswith(text[-size:]) for mark in marks)), 0)


def whole_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call that is a JSON object with its members in any order; None: it is none."""
    try:
        found = strict_json(JsonObject().read(text, last=True)[0])
        if isinstance(found.get("function"), dict):
            found = found["function"]
        name = found.get("name", found.get("function"))
        given = found.get("arguments", found.get("parameters"))
        if isinstance(given, str):  # some models write the arguments as text
            given = given or "{}"
            return (name, given) if isinstance(name, str) and isinstance(strict_json(given), dict) else None
        if not isinstance(name, str) or not isinstance(given, dict | None):
            return None
        return name, json.dumps(given or {})
    except ValueError:
        return None


def strict_json(text: str, *, partial: bool = False) -> Any:
    """Parses JSON. Raises ValueError also for NaN, numbers that are too large, lone surrogates, and more than about 200
    levels, which strict clients refuse. `partial`: the text may be cut off; its last value is then left out."""
    try:
        found = pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError as error:
        if not partial or not str(error).startswith("EOF"):  # of wrong JSON it would return what is before the error
            raise
        found = pydantic_core.from_json(text, allow_inf_nan=False, allow_partial=True)
    json.dumps(found, allow_nan=False)  # 1e999 is infinite
    return found


def _is_json(text: str) -> bool:
    try:
        strict_json(text)
    except ValueError:
        return False
    return True
