"""Function calls whose arguments are not JSON, but members between tags, with values as they are.

    <tool_call>\\n<function=add>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>       Qwen3-Coder
    <tool_call>add\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>                    GLM

They become JSON, `{"a": 1}`, one member at a time. Only the schema of a function tells the text `1` from the number:
parameters that are strings stay text, others are read as JSON and, where they are none, are text, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal

from specjax.serve.calls import LIMIT, Arguments, CallParser, Head

_PYTHON = {"True": "true", "False": "false", "None": "null"}  # what models write for JSON's words


class TaggedCalls(CallParser):
    """Calls with a tag for each argument.

    Args:
        texts: by function, its parameters that are strings.
    """

    name: ClassVar[re.Pattern[str]]  # up to the first argument or the end of the call; group `name`
    key: ClassVar[re.Pattern[str]]  # before a value; group `key`
    opens: ClassVar[str]  # the beginning of `key`
    value_end: ClassVar[str]
    ends: ClassVar[tuple[str, ...]]  # after the last argument
    line_breaks: ClassVar[bool] = False  # one stands before each value, and one after it

    def __init__(
        self, names: Collection[str] = (), *, texts: Mapping[str, Collection[str]] | None = None, **more: Any
    ) -> None:
        super().__init__(names, **more)
        self._texts, self._called, self._key, self._first = texts or {}, "", "", True

    def _find_head(self) -> Head | Literal[False] | None:
        if match := self.name.match(self._held[:LIMIT]):
            self._called, self._first = match["name"].strip(), True
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
            self._held, self._key, self._at = rest[match.end() :], match["key"], 0
            self._state = self._value
            return True
        marks = (self.opens, *self.ends)
        begun = rest.startswith(self.opens) and len(rest) < LIMIT
        if not self._last and (begun or not rest or any(mark.startswith(rest) and mark != rest for mark in marks)):
            return False
        if begun or any(mark.startswith(rest) and mark != rest for mark in marks):
            self._held = ""  # cut off, as the arguments are
        else:
            self._add(Arguments("{}" if self._first else "}"))
        return self._enter(self._close)

    def _value(self) -> bool:
        at = self._held.find(self.value_end, self._at)
        if at < 0 and not self._last:
            self._at = max(0, len(self._held) - len(self.value_end) + 1)
            return False
        text = self._held if at < 0 else self._held[:at]
        self._held = "" if at < 0 else self._held[at + len(self.value_end) :]
        if self.line_breaks:
            text = text.removeprefix("\n")
            text = text if at < 0 else text.removesuffix("\n")
        value = as_json(text, is_text=self._key in self._texts.get(self._called, ()))
        if at < 0 and value.startswith('"'):
            value = value[:-1]  # cut off
        key = json.dumps(self._key, ensure_ascii=False)
        self._add(Arguments(f"{'{' if self._first else ', '}{key}: {value}"))
        self._first = False
        return self._enter(self._close if at < 0 else self._arguments)


class QwenCoder(TaggedCalls):
    """Qwen3-Coder. The outer tag may be missing."""

    begins = ("<tool_call>", "<function=")
    closers = ("</function>", "</tool_call>")
    joins = ("<function=",)
    name = re.compile(r"(?P<name>[^<>\n]+)>\s*(?=<parameter=|</function>|</tool_call>)")
    key = re.compile(r"<parameter=(?P<key>[^<>\n]+)>")
    opens, value_end, ends = "<parameter=", "</parameter>", ("</function>", "</tool_call>")
    line_breaks = True


class Glm(TaggedCalls):
    """GLM-4.5 and 4.6."""

    begins = ("<tool_call>",)
    closers = ("</tool_call>",)
    name = re.compile(r"\s*(?P<name>[^<>\n]+?)\s*(?=<arg_key>|</tool_call>)")
    key = re.compile(r"<arg_key>(?P<key>[^<>]+)</arg_key>\s*<arg_value>")
    opens, value_end, ends = "<arg_key>", "</arg_value>", ("</tool_call>",)

    def _may_name(self, text: str) -> bool:
        name, tag, rest = text.strip().partition("<")
        known = any(each.startswith(name.strip()) for each in self._names)
        return known and any(mark.startswith(tag + rest) for mark in (self.opens, *self.ends))


def as_json(text: str, *, is_text: bool) -> str:
    """A value as JSON. `is_text`: it is a string; else one only where it is no JSON."""
    if not is_text:
        try:
            bare = text.strip()
            return json.dumps(json.loads(_PYTHON.get(bare, bare), parse_constant=_refuse), ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def text_parameters(function: Mapping[str, Any]) -> tuple[str, ...]:
    """The parameters of a function in OpenAI's form that can only be strings."""
    properties = (function.get("parameters") or {}).get("properties")
    if not isinstance(properties, dict):
        return ()
    return tuple(name for name, schema in properties.items() if isinstance(schema, dict) and _is_text(schema))


def _is_text(schema: Mapping[str, Any]) -> bool:
    if "type" in schema:
        return schema["type"] in ("string", ["string"])
    if isinstance(values := schema.get("enum"), list):
        return all(isinstance(value, str) for value in values)
    return isinstance(schema.get("const"), str)
