"""Function calls of Gemma 4, whose arguments are an object in a syntax of their own:

    <|tool_call>call:add{a:1,note:<|"|>two words<|"|>,list:[1,true],more:{key:null}}<tool_call|>

Strings stand between marks, without escapes. Keys are bare, or between marks. Bare values become what the schema of the
arguments allows, without one JSON or else strings. A call is announced when it is complete, or cut off by the end of
the text.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from specjax.engine.chat.calls import LIMIT, MOST, CallParser, Found, Head, strict_json, typed_value

MARK = '<|"|>'
_HEAD = re.compile(r"\s*(?:call:)?\s*(?P<name>[^\s{}()<:]+)\s*(?=[{(])")
_BRACKET = re.compile(re.escape(MARK) + r"|[{}()\[\]]")
_CLOSING = {"{": "}", "(": ")", "[": "]"}
_KEY = re.compile(
    rf"\s*(?:{re.escape(MARK)}(?P<marked>.*?){re.escape(MARK)}|(?P<bare>[^\s:{{}}\[\],]+))\s*:\s*", re.DOTALL
)
_BARE = re.compile(r"[^,{}()\[\]]*")
_WRITTEN_KEY = r"[^\s:{}()\[\],]+"  # without marks, in forced calls


class Gemma4(CallParser):
    begins = ("<|tool_call>",)
    closers = ("<tool_call|>",)

    def __init__(self, names: Collection[str] = (), **more: Any) -> None:
        super().__init__(names, **more)
        self._open: list[str] = []  # closing brackets that must follow, the innermost last
        self._marked = False  # inside of a string

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        return (*super().markers(), MARK)

    def _find_head(self) -> Found:
        head = _HEAD.match(self._rest[:LIMIT])
        if head is None:
            begun = "".join(self._rest[:LIMIT].split())
            heads = (f"{lead}{name}" for name in self._names for lead in ("call:", ""))
            return None if any(head.startswith(begun) for head in heads) else False
        if head["name"] not in self._names:
            return False
        if not self._at:
            self._at, self._open, self._marked = head.end(), [], False
        ended = self._find_end()
        if ended is None:  # the brackets do not match
            return False
        if not ended and not self._last:
            return None if self._at <= MOST else False
        schema = self._schemas.get(head["name"], {})
        reader = _Reader(self._rest[head.end() : self._at], schema)
        try:
            reader.members()
        except _CutOff:
            if ended:
                return False
        except ValueError:
            return False
        return Head(head["name"], self._at, "".join(reader.json))

    def _find_end(self) -> bool | None:
        """Moves to the end of the arguments. False: they go on. None: the brackets do not match."""
        while match := _BRACKET.search(self._rest, self._at):
            bracket, self._at = match[0], match.end()
            if bracket == MARK:
                self._marked = not self._marked
            elif self._marked:
                continue
            elif bracket in _CLOSING:
                self._open.append(_CLOSING[bracket])
            elif self._open.pop() != bracket:
                return None
            elif not self._open:
                return True
        self._at = len(self._rest) if self._last else max(self._at, len(self._rest) - len(MARK) + 1)
        return False


class _CutOff(ValueError):
    pass


class _Reader:
    """Converts arguments to pieces of JSON, as far as the text goes. `members` raises _CutOff at its end, ValueError if
    the text has another syntax."""

    def __init__(self, text: str, schema: Mapping[str, Any]) -> None:
        self.text, self.at, self.json, self.schema = text, 0, list[str](), schema

    def members(self, *, top: bool = True) -> None:
        """An object, in brackets of any kind."""
        closing = _CLOSING[self._next()]
        self.json.append("{")
        comma = ""
        while self._peek() != closing:
            if comma and self._next() != ",":
                raise ValueError("a comma is missing")
            key = _KEY.match(self.text, self.at)
            if key is None:
                raise _CutOff if ":" not in self.text[self.at :] else ValueError("no key")
            name = key["bare"] if key["marked"] is None else key["marked"]
            self.at = key.end()
            self.json += [comma, json.dumps(name, ensure_ascii=False), ": "]
            self._value(name if top else None)
            comma = ", "
        self.at += 1
        self.json.append("}")

    def _list(self) -> None:
        self.at += 1
        self.json.append("[")
        comma = ""
        while self._peek() != "]":
            if comma and self._next() != ",":
                raise ValueError("a comma is missing")
            self.json.append(comma)
            self._value(None)
            comma = ", "
        self.at += 1
        self.json.append("]")

    def _value(self, key: str | None) -> None:
        """`key`: of an argument, whose type the schema may name."""
        first = self._peek()
        if self.text.startswith(MARK, self.at):
            start = self.at + len(MARK)
            end = self.text.find(MARK, start)
            text = json.dumps(self.text[start : end if end >= 0 else None], ensure_ascii=False)
            self.json.append(text if end >= 0 else text[:-1])
            self.at = end + len(MARK)
            if end < 0:
                raise _CutOff
        elif first in "{(":
            self.members(top=False)
        elif first == "[":
            self._list()
        else:
            bare = _BARE.match(self.text, self.at)
            assert bare is not None
            if bare.end() == len(self.text):
                raise _CutOff
            self.at, text = bare.end(), bare[0].strip()
            value: Any = text
            if key is not None and key in self.schema.get("properties", {}):
                value = typed_value(text, key, self.schema)
            else:
                with contextlib.suppress(ValueError):
                    value = strict_json(text)
            self.json.append(json.dumps(value, ensure_ascii=False))

    def _peek(self) -> str:
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1
        if self.at >= len(self.text):
            raise _CutOff
        return self.text[self.at]

    def _next(self) -> str:
        character = self._peek()
        self.at += 1
        return character


_UNREAD = {"$defs", "$schema", "additionalProperties", "default", "description", "examples", "items", "properties",
           "required", "title", "type", "enum", "const", "nullable"}  # fmt: skip
"""Keywords that the grammar follows, or that exclude no value."""
_NUMBERS = {"integer": "INTEGER", "number": "NUMBER", "boolean": "BOOLEAN", "null": '"null"'}


def argument_rules(name: str, schema: Mapping[str, Any], tokens: Mapping[str, int], *, strict: bool) -> list[str]:
    """Rules of llguidance's Lark for the arguments of a function, the first one named `name`. Members have the order of
    the schema. Values whose schema has other keywords may be anything, unless `strict`.

    Raises:
        ValueError: strings cannot be distinguished from text, because their mark is not a token, or a `strict` schema
            has a keyword that the rules cannot follow.
    """
    if MARK not in tokens:
        raise ValueError(f"the mark of strings, {MARK}, is not a token of this model")
    rules = _Rules(name, f"<[{tokens[MARK]}]>", strict)
    rules.lines.append(f"{name}: {rules.object(schema)}")
    return rules.lines


class _Rules:
    def __init__(self, name: str, mark: str, strict: bool) -> None:
        self.name, self.mark, self.strict, self.lines = name, mark, strict, list[str]()
        self._any = ""

    def object(self, schema: Mapping[str, Any], depth: int = 0) -> str:
        members, required = schema.get("properties", {}), schema.get("required", ())
        if not members and schema.get("additionalProperties", True) not in (False, None):
            return self.anything(only_object=True)
        rest, first = "", ""  # what may follow a member, and what may stand after the bracket
        for key, member in reversed(members.items()):
            pair = f"{self._key(key)} {self.value(member, depth + 1)}"
            rule = self._rule(f'"," {pair} {rest}')
            here = f"{pair} {rest}"
            first = self._rule(here if key in required else f"({here} | {first})" if first else f"({here})?")
            rest = rule if key in required else self._rule(f"({rule} | {rest})") if rest else f"{rule}?"
        return f'"{{" {first} "}}"'

    def value(self, schema: Any, depth: int = 0) -> str:
        known = isinstance(schema, Mapping) and depth <= MAX_RULES
        other = schema.keys() - _UNREAD if known else set[str]()
        if not known or other:
            if self.strict:
                names = f"{sorted(other)}" if known else "so deep schemas"
                raise ValueError(f"strict arguments of this model's calls cannot follow {names}")
            return self.anything()
        if (choices := schema.get("enum", [schema["const"]] if "const" in schema else None)) is not None:
            return f"({' | '.join(map(self._literal, choices))})"
        kinds = schema.get("type", "object" if "properties" in schema else None)
        if kinds is None:
            return self.anything()
        kinds = [*(kinds if isinstance(kinds, list) else [kinds]), *(["null"] * bool(schema.get("nullable")))]
        return f"({' | '.join(self._of(kind, schema, depth) for kind in kinds)})"

    def anything(self, *, only_object: bool = False) -> str:
        if not self._any:
            self._any = any_value = f"{self.name}any"
            pair = f'(BARE | {self.mark} TEXTS {self.mark}) ":" {any_value}'
            self.lines += [
                f'{any_value}object: "{{" ({pair} ("," {pair})*)? "}}"',
                f"{any_value}: {any_value}object | {self._of('string', {}, 0)} | {' | '.join(_NUMBERS.values())}"
                f' | "[" ({any_value} ("," {any_value})*)? "]"',
            ]
        return f"{self._any}object" if only_object else self._any

    def _of(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        if kind == "string":
            return f"{self.mark} TEXTS {self.mark}"
        if kind == "object":
            return self.object(schema, depth)
        if kind == "array":
            item = self.value(schema.get("items", {}), depth + 1)
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind not in _NUMBERS:
            raise ValueError(f"{kind!r} is not a type of JSON schemas")
        return _NUMBERS[kind]

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.mark} {_quoted(value)} {self.mark}" if value else f"{self.mark} {self.mark}"
        if isinstance(value, Mapping | list):
            raise ValueError("strings, numbers, booleans and null can be members of an enum")
        return _quoted(json.dumps(value))

    def _key(self, key: str) -> str:
        bare = re.fullmatch(_WRITTEN_KEY, key)
        return _quoted(f"{key}:") if bare else f'{self.mark} {_quoted(key)} {self.mark} ":"'

    def _rule(self, body: str) -> str:
        name = f"{self.name}m{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name


TERMINALS = [
    r"TEXTS: /(?s:.*)/",
    f"BARE: /{_WRITTEN_KEY}/",
    r"INTEGER: /-?(0|[1-9][0-9]*)/",
    r"NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
    r"BOOLEAN: /true|false/",
]
MAX_RULES = 16  # depth of schemas


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
