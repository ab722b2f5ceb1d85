"""The grammar of function calls in a model's own format, for answers that must be calls (`tool_choice`).

    start: "\\n"{0,2} call ("\\n" call)*
    call: <[151657]> "\\n" (call0 | call1) "\\n" <[151658]>
    call0: "{\\"name\\": \\"add\\", \\"arguments\\": " arguments0 "}"
    arguments0: %json {"type": "object", ...}

A marker that is a token is written as its number, else as text. What follows such a grammar, `specjax.serve.calls`
reads as calls. The model may think before: that is not a part of the grammar.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from specjax.serve.calls import CallParser, DeepSeek, DeepSeek31, Hermes, Llama3, Mistral, MistralNamed

STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as Python writes it."""


class _Shape(NamedTuple):
    """What stands around calls: strings are text, and tuples of one string are markers."""

    opens: Sequence[str | tuple[str]]
    before: Sequence[str | tuple[str]]  # each call
    name: Callable[[str], Sequence[str | tuple[str]]]  # before its arguments
    after: Sequence[str | tuple[str]]
    joins: Sequence[str | tuple[str]] | None  # between calls; None: there is only one
    closes: Sequence[str | tuple[str]]


def _member(name: str, arguments: str) -> Sequence[str]:
    return (f'{{"name": "{name}", "{arguments}": ',)


_SHAPES: dict[type[CallParser], _Shape] = {
    Hermes: _Shape(
        (), (("<tool_call>",), "\n"), lambda name: _member(name, "arguments"), ("}\n", ("</tool_call>",)), ("\n",), ()
    ),
    # Their templates refuse conversations with several calls at once.
    Llama3: _Shape((), (), lambda name: _member(name, "parameters"), ("}",), None, ()),
    Mistral: _Shape((("[TOOL_CALLS]",), "["), (), lambda name: _member(name, "arguments"), ("}",), (", ",), ("]",)),
    MistralNamed: _Shape((), (("[TOOL_CALLS]",),), lambda name: (name, ("[ARGS]",)), (), (), ()),
    DeepSeek: _Shape(
        (("<｜tool▁calls▁begin｜>",),),
        (("<｜tool▁call▁begin｜>",), "function", ("<｜tool▁sep｜>",)),
        lambda name: (f"{name}\n```json\n",),
        ("\n```", ("<｜tool▁call▁end｜>",)),
        ("\n",),
        (("<｜tool▁calls▁end｜>",),),
    ),
    DeepSeek31: _Shape(
        (("<｜tool▁calls▁begin｜>",),),
        (("<｜tool▁call▁begin｜>",),),
        lambda name: (name, ("<｜tool▁sep｜>",)),
        (("<｜tool▁call▁end｜>",),),
        (),
        (("<｜tool▁calls▁end｜>",),),
    ),
}


def call_grammar(
    parser: type[CallParser],
    tools: Sequence[Mapping[str, Any]],
    tokens: Mapping[str, int],
    *,
    name: str | None = None,
    most: int | None = None,
) -> str:
    """A grammar in llguidance's dialect of Lark: one or more calls, and nothing else.

    Args:
        parser: of the model's format.
        tools: the functions, in OpenAI's form.
        tokens: ids of the markers that are tokens.
        name: the only function that may be called; None: any.
        most: calls; None: any number.
    """
    shape = _SHAPES[parser]

    def written(parts: Sequence[str | tuple[str]]) -> str:
        found = []
        for part in parts:
            if isinstance(part, tuple) and part[0] in tokens:
                found.append(f"<[{tokens[part[0]]}]>")
            else:
                found.append(json.dumps(part if isinstance(part, str) else part[0], ensure_ascii=False))
        return " ".join(found)

    functions = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    several = "" if shape.joins is None or most == 1 else f"({written(shape.joins)} call)*"
    any_call = " | ".join(f"call{i}" for i in range(len(functions)))
    lines = [
        f"start: SPACE {written(shape.opens)} call {several} {written(shape.closes)}",
        f"call: {written(shape.before)} ({any_call}) {written(shape.after)}",
        r"SPACE: /\n{0,2}/",
    ]
    for i, function in enumerate(functions):
        lines.append(f"call{i}: {written(shape.name(function['name']))} arguments{i}")
        lines.append(f"arguments{i}: %json {json.dumps(_closed(function['parameters']) | {'x-guidance': STYLE})}")
    return "\n".join(lines)


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of arguments, without others than it names, unless it says otherwise."""
    open_ended = ("additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if")
    closed = {} if any(key in schema for key in open_ended) else {"properties": {}, "additionalProperties": False}
    return {"type": "object", **closed, **schema}
