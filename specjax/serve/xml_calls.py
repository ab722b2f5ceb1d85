"""Function calls whose arguments are not JSON, but members between tags, with values as they are.

    <tool_call>\\n<function=add>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>       Qwen3-Coder
    <tool_call>add\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>                    GLM

They become JSON, `{"a": 1}`, one member at a time. `typed_value` decides by the function's schema whether `1` is a
string or a number.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import warnings
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal
from urllib.parse import unquote

from specjax.serve.calls import LIMIT, MOST, Arguments, CallParser, Head, strict_json

_WORDS = ("true", "false", "null")
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


class TaggedCalls(CallParser):
    """Calls with a tag for each argument.

    Args:
        schemas: by function, the JSON schema of its parameters.
    """

    name: ClassVar[re.Pattern[str]]  # up to the first argument or the end of the call; group `name`
    key: ClassVar[re.Pattern[str]]  # before a value; group `key`
    opens: ClassVar[str]  # the beginning of `key`
    example: ClassVar[str]  # matches `key`
    value_end: ClassVar[re.Pattern[str]]  # its end tag or, where that may be missing, the next `key`; group `next`
    ends: ClassVar[tuple[str, ...]]  # after the last argument
    line_breaks: ClassVar[bool] = False  # one stands before each value, and one after it

    def __init__(
        self, names: Collection[str] = (), *, schemas: Mapping[str, Mapping[str, Any]] | None = None, **more: Any
    ) -> None:
        super().__init__(names, **more)
        self._schemas, self._called = schemas or {}, ""
        self._keys: list[str] = []  # of this call so far

    def _find_head(self) -> Head | Literal[False] | None:
        if match := self.name.match(self._held[:LIMIT]):
            self._called, self._keys = match["name"].strip(), []
            return Head(self._called, match.end())
        return None if len(self._held) < LIMIT and self._may_name(self._held) else False

    def _may_name(self, text: str) -> bool:
        """Whether a call may begin with this text, which is short of its first argument."""
        name, _, rest = text.lstrip().partition(">" if self.line_breaks else "\n")
        known = any(each.startswith(name.strip()) for each in self._names)
        marks = (self.opens, *self.ends)
        return known and any(mark.startswith(rest.strip()) or rest.strip().startswith(mark) for mark in marks)

    def _arguments(self) -> bool:
        rest = self._held.lstrip()
        if match := self.key.match(rest[:LIMIT]):
            self._held, self._at = rest[match.end() :], 0
            self._keys.append(match["key"])
            self._state = self._value
            return True
        begun = any(mark.startswith(rest) and mark != rest for mark in self.ends) or (
            len(rest) < LIMIT and any(self.key.fullmatch(rest + self.example[at:]) for at in range(len(self.example)))
        )
        if begun and not self._last:
            return False
        if begun:
            self._held = ""  # cut off, as the arguments are
        else:
            self._add(Arguments("}" if self._keys else "{}"))
        return self._enter(self._close)

    def _next_key(self, found: re.Match[str]) -> bool:
        """Whether a tag ends a value without an end tag, and is not a part of it."""
        key, named = found["next"], self._schemas.get(self._called, {}).get("properties")
        start, mark = found.start(), self.begins[-1]
        if (at := self._held.rfind(mark, max(0, start - LIMIT), start)) >= 0:  # of another call, after the end of this
            head = self.name.match(self._held, at + len(mark))
            if head and head.end() == start and head["name"].strip() in self._names:
                return any(self._held.find(end, 0, at) >= 0 for end in self.ends)
        named = named if isinstance(named, Mapping) else {}
        if key in self._keys or (named and key not in named):
            return False
        before = self._held[max(0, start - LIMIT) : start].rstrip(" \t")
        return not before or before.endswith("\n") or (bool(named) and not self.line_breaks)

    def _value(self) -> bool:
        ends = self.value_end.finditer(self._held, self._at)
        found = next((end for end in ends if end["next"] is None or self._next_key(end)), None)
        if found is None and not self._last:
            self._at = max(0, len(self._held) - LIMIT)
            return False
        at, end = found.span() if found else (len(self._held), len(self._held))
        whole = found is not None and found["next"] is None
        if not whole:  # no end tag: the value ends at the next argument, or before it with the call
            places = [place for mark in self.ends if (place := self._held.find(mark, 0, at)) >= 0]
            at = end = min(places, default=at)
        cut = not whole and at == len(self._held)
        text, self._held = self._held[:at], self._held[end:]
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
        known = any(each.startswith(name.strip()) for each in self._names)
        return known and any(mark.startswith(tag + rest) for mark in (self.opens, *self.ends))


def typed_value(text: str, name: str, schema: Mapping[str, Any]) -> Any:
    """The value that a text between tags stands for: the first of these that the schema allows.

    - null, if the text is `null`
    - the text as a string; a schema that does not mention the argument allows it
    - the text read as JSON, with words such as `TRUE` in any case
    - the text read as a Python literal, as in vLLM and SGLang: `['a', None]`

    If the schema allows none of them, the value is the JSON or else the literal, if the schema allows its type, members
    and items aside. Otherwise it is the text read as JSON, or the text if it is not JSON.

    Args:
        name: of the argument.
        schema: of the object of all arguments.
    """

    def allowed(value: Any, *, exact: bool = True) -> bool:
        return _allows(schema, {name: value}, schema, exact, {})

    if text == "null" and allowed(None):
        return None
    if allowed(text):
        return text
    bare = text.strip()
    try:
        read = strict_json(bare.lower() if bare.lower() in _WORDS else bare)
    except ValueError:
        read = text
    values = text, read, _literal(bare, text)
    found = [value for value in values if allowed(value)] or [each for each in values if allowed(each, exact=False)]
    outer = {dict: {}, list: []}  # in place of a value with members or items
    found += [each for each in values[1:] if allowed(outer.get(type(each), each), exact=False)]
    return found[0] if found else read


def _literal(text: str, default: Any) -> Any:
    """The value of a Python literal that JSON can express, else `default`."""
    if len(text) <= MOST:  # of longer texts the syntax tree takes too much memory
        with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            with warnings.catch_warnings(action="ignore"):
                found = ast.literal_eval(text)
            return strict_json(json.dumps(found))
    return default


def _allows(schema: Any, value: Any, root: Mapping[str, Any], exact: bool, known: dict[tuple[str, int], bool]) -> bool:
    """True if a JSON schema allows a value. Types, members and listed values are checked; other keywords are ignored.

    Args:
        root: the schema that references are relative to.
        exact: False: `enum` and `const` allow other values of the same types, and members may be added.
        known: results by reference and id of the value. A reference that leads to itself allows nothing.
    """
    if not isinstance(schema, Mapping):
        return schema is not False
    if value is None and schema.get("nullable") is True:
        return True
    if isinstance(reference := schema.get("$ref"), str):
        place = reference, id(value)
        if place not in known:
            known[place] = False
            known[place] = _allows(_part(root, reference), value, root, exact, known)
        if not known[place]:
            return False
    implied = "object" if "properties" in schema else "array" if "items" in schema else []
    types = schema.get("type", implied)
    types = types if isinstance(types, list) else [types]
    if types and not any(each in _types(value) or each not in _TYPES for each in types):
        return False
    for listed in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(listed, list):
            same = [each for each in listed if {*_types(each)} & {*_types(value)}]
            if not (value in same if exact else same):
                return False
    members, others = schema.get("properties"), schema.get("additionalProperties", True)
    members = members if isinstance(members, dict) else {}
    others = True if others is False and not exact else others
    if isinstance(value, dict) and not all(
        _allows(members.get(key, others), each, root, exact, known) for key, each in value.items()
    ):
        return False
    return all(
        check(_allows(each, value, root, exact, known) for each in schema[key])
        for key, check in (("allOf", all), ("anyOf", any), ("oneOf", any))
        if isinstance(schema.get(key), list)
    )


def _types(value: Any) -> tuple[str, ...]:
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case int() | float():
            return ("number", "integer") if value == int(value) else ("number",)
        case str():
            return ("string",)
        case _:
            return ("object",) if isinstance(value, dict) else ("array",)


def _part(root: Any, reference: str) -> Any:
    """The part of a schema that a reference names. True, which allows everything, if there is none."""
    if not reference.startswith("#"):
        return True
    for name in unquote(reference).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and name.isdecimal() and int(name) < len(root):
            root = root[int(name)]
        elif isinstance(root, dict) and name in root:
            root = root[name]
        else:
            return True
    return root
