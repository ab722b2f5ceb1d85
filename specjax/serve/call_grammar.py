"""The grammar of function calls in a model's own format, for answers that must be calls (`tool_choice`).

    start: SPACE calls
    calls: call (SPACE call)*
    call: <[151657]> SPACE (call0 | call1) "}" SPACE <[151658]>
    call0: "{\\"name\\": \\"add\\", \\"arguments\\": " arguments0
    arguments0: %json {"type": "object", ...}

A marker that is a token is written as its number, else as text. What follows such a grammar, `specjax.serve.calls`
reads as calls. The model may think before: that is not a part of the grammar.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from specjax.serve.calls import CallParser, DeepSeek, DeepSeek31, Hermes, KimiK2, Llama3, Mistral, MistralNamed

STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as Python writes it."""
SPACE = "\n"  # up to two line breaks
INDEX = "#"  # a number


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
        (),
        (("<tool_call>",), SPACE),
        lambda name: _member(name, "arguments"),
        ("}", SPACE, ("</tool_call>",)),
        (SPACE,),
        (),
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
        (SPACE,),
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
    KimiK2: _Shape(
        (("<|tool_calls_section_begin|>",),),
        (("<|tool_call_begin|>",),),
        lambda name: (f"functions.{name}:", INDEX, ("<|tool_call_argument_begin|>",)),
        (("<|tool_call_end|>",),),
        (),
        (("<|tool_calls_section_end|>",),),
    ),
}


def call_grammar(
    parser: type[CallParser],
    tools: Sequence[Mapping[str, Any]],
    tokens: Mapping[str, int],
    *,
    most: int | None = None,
    text: bool = False,
    answer: Mapping[str, Any] | None = None,
) -> str:
    """A grammar in llguidance's dialect of Lark: one or more calls, and nothing else.

    Args:
        parser: of the model's format.
        tools: the functions that may be called, in OpenAI's form.
        tokens: ids of the markers that are tokens.
        most: calls; None: any number.
        text: text may stand before and after calls, and instead of them.
        answer: the schema of JSON that may stand instead of calls; None: no JSON may.

    Raises:
        ValueError: the calls cannot be told from text, because their marker is no token; or their arguments are no
            JSON, for which there is no such grammar.
    """
    if parser not in _SHAPES:
        known = "tool_choice auto without strict functions"
        raise ValueError(f"the arguments of this model's calls are no JSON, so that only {known} is supported")
    shape = _SHAPES[parser]

    def written(parts: Sequence[str | tuple[str]]) -> str:
        found = []
        for part in parts:
            if part == SPACE:
                found.append("SPACE")
            elif part == INDEX:
                found.append("INDEX")
            elif isinstance(part, tuple) and part[0] in tokens:
                found.append(f"<[{tokens[part[0]]}]>")
            else:
                found.append(json.dumps(part if isinstance(part, str) else part[0], ensure_ascii=False))
        return " ".join(found)

    any_call = " | ".join(f"call{i}" for i in range(len(tools)))
    further = "" if shape.joins is None or most == 1 else f"({written(shape.joins)} call)*"
    lines = [
        f"calls: {written(shape.opens)} call {further} {written(shape.closes)}",
        f"call: {written(shape.before)} ({any_call}) {written(shape.after)}",
    ]
    for i, function in enumerate(tool["function"] for tool in tools):
        lines.append(f"call{i}: {written(shape.name(function['name']))} arguments{i}")
        lines.append(f"arguments{i}: {_json(_closed(function['parameters']))}")
    lines.append(r"SPACE: /\n{0,2}/")
    if any(INDEX in shape.name("") for _ in tools):
        lines.append("INDEX: /[0-9]{1,3}/")
    if text:
        lines += _beside_text(shape, tokens, several=most != 1)
    else:
        lines.append(f"start: SPACE {'calls' if answer is None else '(calls | answer)'}")
    if answer is not None:
        lines.append(f"answer: {_json(answer)}")
    return "\n".join(lines)


def _beside_text(shape: _Shape, tokens: Mapping[str, int], *, several: bool) -> list[str]:
    marks = [*shape.opens, *shape.before]
    if not marks:  # the whole answer is a call, and no text looks like one
        return ["start: TEXT | SPACE calls", r"TEXT: /(\s*[^\s{](?s:.*))?/"]
    if not isinstance(marks[0], tuple) or marks[0][0] not in tokens:
        raise ValueError("the marker of calls is no token of this model")
    return [f"start: TEXT (calls TEXT){'*' if several else '?'}", "TEXT: /(?s:.*)/"]


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({'x-guidance': STYLE, **schema})}"


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of arguments, without others than it names, unless it says otherwise."""
    open_ended = ("additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if")
    closed = {} if any(key in schema for key in open_ended) else {"properties": {}, "additionalProperties": False}
    return {"type": "object", **closed, **schema}


def any_arguments(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function whose arguments may be any object."""
    parameters = {"type": "object", "additionalProperties": True}
    return {**tool, "function": {**tool["function"], "parameters": parameters}}
