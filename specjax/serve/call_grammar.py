"""Grammars of function calls in a model's format, for answers that must be calls (`tool_choice`).

    start: SPACE calls
    calls: call (SPACE call)*
    call: <[151657]> SPACE (call0 | call1) "}" SPACE <[151658]>
    call0: "{\\"name\\": \\"add\\", \\"arguments\\": " arguments0
    arguments0: %json {"type": "object", ...}

A marker that is a token is written as its number, else as text. `specjax.serve.calls` parses text of such a grammar
as calls. Reasoning before the calls is not part of the grammar.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

from specjax.engine.grammar import JSON_STYLE
from specjax.serve.calls import CallParser, DeepSeek, DeepSeek31, Hermes, KimiK2, Llama3, Mistral, MistralNamed

SPACE = "\n"  # up to two line breaks
INDEX = "#"  # a number


class _Shape(NamedTuple):
    """The parts around calls: strings are text, and tuples of one string are markers."""

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
    # Llama's templates refuse conversations with several calls at once.
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
    strict: Container[str] | None = None,
    most: int | None = None,
    text: bool = False,
    answer: Mapping[str, Any] | None = None,
) -> str:
    """A grammar in llguidance's dialect of Lark: one or more calls, and nothing else.

    Args:
        parser: parser of the model's format.
        tools: the functions that may be called, in OpenAI's form.
        tokens: ids of the markers that are tokens.
        strict: names of functions whose whole schema is followed; keywords that the library does not support are
            ignored in other schemas. None: all are strict.
        most: maximum number of calls; None: unlimited.
        text: allow text before, after and instead of calls.
        answer: schema of JSON that is allowed instead of calls; None: no JSON is allowed.

    Raises:
        ValueError: calls cannot be distinguished from text, because their marker is not a token, or the format of
            their arguments is not JSON.
    """
    if parser not in _SHAPES:
        supported = "tool_choice auto without strict functions"
        raise ValueError(f"the arguments of this model's calls are not JSON, so only {supported} is supported")
    shape = _SHAPES[parser]

    def written(parts: Sequence[str | tuple[str]]) -> str:
        terms = []
        for part in parts:
            if part == SPACE:
                terms.append("SPACE")
            elif part == INDEX:
                terms.append("INDEX")
            elif isinstance(part, tuple) and part[0] in tokens:
                terms.append(f"<[{tokens[part[0]]}]>")
            else:
                terms.append(json.dumps(part if isinstance(part, str) else part[0], ensure_ascii=False))
        return " ".join(terms)

    if answer is not None and not (shape.opens or shape.before):
        return _call_or_answer(shape, tools, answer)
    any_call = " | ".join(f"call{i}" for i in range(len(tools)))
    further = "" if shape.joins is None or most == 1 else f"({written(shape.joins)} call)*"
    lines = [
        f"calls: {written(shape.opens)} call {further} {written(shape.closes)}",
        f"call: {written(shape.before)} ({any_call}) {written(shape.after)}",
    ]
    for i, function in enumerate(tool["function"] for tool in tools):
        lines.append(f"call{i}: {written(shape.name(function['name']))} arguments{i}")
        lenient = strict is not None and function["name"] not in strict
        lines.append(f"arguments{i}: {_json(_closed(function['parameters']), lenient=lenient)}")
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


def _call_or_answer(shape: _Shape, tools: Sequence[Mapping[str, Any]], answer: Mapping[str, Any]) -> str:
    """One schema for calls and answers without a marker between them: the lexer would prefer the start of a call, which
    is longer, in every answer that is an object. All functions are strict, because leniency would apply to the answer
    as well."""
    schemas = []
    for place, function in enumerate(tool["function"] for tool in tools):
        (start,) = shape.name(function["name"])
        assert isinstance(start, str)
        ((named, name), (arguments, _)) = json.loads(f"{start}null{shape.after[0]}").items()
        parameters = _moved(_closed(function["parameters"]), f"#/anyOf/{place}/properties/{arguments}")
        members = {named: {"const": name}, arguments: parameters}
        schemas.append({"type": "object", "properties": members, "required": [*members], "additionalProperties": False})
    schemas.append(_moved(answer, f"#/anyOf/{len(tools)}"))
    style = {"x-guidance": answer["x-guidance"]} if "x-guidance" in answer else {}
    return f"start: SPACE answer\nanswer: {_json({'anyOf': schemas, **style})}\nSPACE: /\\n{{0,2}}/"


def _moved(schema: Any, place: str) -> Any:
    """A schema with its references to its own parts changed for its place in another schema."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, Mapping) or isinstance(schema.get("$id"), str):  # references are relative to the id
        return schema

    def moved(key: str, value: Any) -> Any:
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            return place + value[1:]
        return value if key in ("const", "enum", "default", "examples") else _moved(value, place)

    return {key: moved(key, value) for key, value in schema.items()}


def _beside_text(shape: _Shape, tokens: Mapping[str, int], *, several: bool) -> list[str]:
    marks = [*shape.opens, *shape.before]
    if not marks:  # the whole answer is a call or text that does not begin with a brace
        return ["start: TEXT | SPACE calls", r"TEXT: /(\s*[^\s{](?s:.*))?/"]
    if not isinstance(marks[0], tuple) or marks[0][0] not in tokens:
        raise ValueError("the marker of calls is not a token of this model")
    return [f"start: TEXT (calls TEXT){'*' if several else '?'}", "TEXT: /(?s:.*)/"]


def _json(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    style = JSON_STYLE | ({"lenient": True} if lenient else {})
    return f"%json {json.dumps({'x-guidance': style, **schema})}"


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of arguments that allows no further members, unless it says otherwise."""
    open_ended = ("additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if")
    closed = {} if any(key in schema for key in open_ended) else {"properties": {}, "additionalProperties": False}
    return {"type": "object", **closed, **schema}


def any_arguments(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function whose arguments may be any object."""
    parameters = {"type": "object", "additionalProperties": True}
    return {**tool, "function": {**tool["function"], "parameters": parameters}}
