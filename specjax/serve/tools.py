"""Function calls: fields of a chat about its functions, and the grammar of answers that must be calls.

    start: SPACE calls
    calls: call (SPACE call)*
    call: (call0 | call1) "}" SPACE <[151658]>
    call0: <[151657]> SPACE "{\\"name\\": \\"add\\", \\"arguments\\": " arguments0
    arguments0: %json {"type": "object", ...}

A marker that is a token is written as its number, else as text. `specjax.serve.calls` parses text of such a grammar.
Reasoning before the calls is not part of the grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from specjax.engine.grammar import HARMONY_MARKS, JSON_STYLE, Grammar, harmony_turn
from specjax.serve.calls import CallParser, DeepSeek, DeepSeek31, Harmony, Hermes, KimiK2, Llama3, Mistral, MistralNamed
from specjax.serve.errors import INVALID, bad_request
from specjax.serve.fields import Body, Flag, Text, at_most, finite
from specjax.serve.gemma_calls import TERMINALS, Gemma4, argument_rules
from specjax.serve.message_format import AnswerForm, ReplyOptions

MAX_TOOLS = 128  # functions of a request; OpenAI's limit
NAME = r"^[a-zA-Z0-9_-]{1,64}$"  # OpenAI's
CHOICES = ("none", "auto", "required")


FunctionName = Annotated[Text, Field(pattern=NAME)]


def object_schema(schema: Any) -> Any:
    """Checks that parameters are a JSON schema of an object. Its members must not be null."""
    if not isinstance(schema, dict):
        return schema
    required, problem = schema.get("required", []), ""
    if schema.get("type", "object") != "object":
        problem = 'must be the schema of an object, {"type": "object", ...}'
    elif not isinstance(schema.get("properties", {}), dict):
        problem = "must have an object of schemas as properties"
    elif not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        problem = "must have a list of names as required"
    if problem:
        raise PydanticCustomError("parameters", "{problem}", {"problem": problem})
    return finite(schema)


class FunctionTool(Body):
    name: FunctionName
    description: Text | None = None
    parameters: Annotated[dict[str, Any], BeforeValidator(object_schema)] | None = Field(
        None, description="The JSON schema of an object. Default: no parameters."
    )
    strict: Flag | None = Field(None, description="true = the arguments follow `parameters`.")


class Tool(Body):
    type: Literal["function"]
    function: FunctionTool

    def for_template(self) -> dict[str, Any]:
        """The function for chat templates: with a description, and without `strict`, which the model must not see."""
        function: dict[str, Any] = {"name": self.function.name, "description": self.function.description or ""}
        function["parameters"] = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


Item = TypeVar("Item")
ToolList = Annotated[list[Item], Field(max_length=MAX_TOOLS, fail_fast=True), at_most(MAX_TOOLS)]


class FunctionChoice(Body):
    name: FunctionName


class NamedChoice(Body):
    type: Literal["function"]
    function: FunctionChoice


class Choice(Body):
    """`tool_choice`, a word or an object, in one form."""

    type: Literal["none", "auto", "required", "function"]
    function: FunctionChoice | None = None


def as_choice(value: Any, *, flat: bool = False) -> Any:
    """`tool_choice` as an object. `flat`: the name is a member of it, as in the Responses interface."""
    if isinstance(value, str) and value in CHOICES:
        return {"type": value}
    if isinstance(value, dict) and value.get("type") == "function":
        if flat and "name" in value:
            return {"type": "function", "function": {"name": value["name"]}}
        if not flat and isinstance(value.get("function"), dict):
            return value
    named = '"name": ...' if flat else '"function": {"name": ...}'
    problem = f'must be one of {", ".join(CHOICES)}, or {{"type": "function", {named}}}'
    raise PydanticCustomError("choice", "{problem}", {"problem": problem})


ToolChoice = Annotated[
    Choice, BeforeValidator(as_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedChoice)
]


class ToolFields(Body):
    """Fields of a chat beside its messages."""

    tools: ToolList[Tool] | None = Field(None, description="Functions that the model may call; their names differ.")
    tool_choice: ToolChoice | None = Field(
        None,
        description="Default: auto. none = leave `tools` out of the prompt; required, or a function = call one.",
    )
    parallel_tool_calls: Flag | None = Field(None, description="false = at most one call.")
    separate_reasoning: Flag | None = Field(
        None, description="false = reasoning is part of the content. Default: `reasoning_content`."
    )

    @property
    def must(self) -> bool:
        """True if the answer must be a call."""
        return self.tool_choice is not None and self.tool_choice.type in ("required", "function")

    @property
    def forced(self) -> str | None:
        """Name of the function that must be called; None: the model chooses."""
        choice = self.tool_choice
        return choice.function.name if choice is not None and choice.function is not None else None

    def offered(self, form: AnswerForm) -> list[dict[str, Any]]:
        """The functions for the chat template. Raises an ApiError if the fields are wrong, or the model has no place
        for functions."""
        tools, choice = self.tools or [], self.tool_choice.type if self.tool_choice else "auto"
        if tools and form.refusal:
            raise bad_request(f"tools are not supported: {form.refusal}", "tools", "unsupported")
        names = [tool.function.name for tool in tools]
        if twice := next((name for index, name in enumerate(names) if name in names[:index]), None):
            raise bad_request(f"tools has two functions with the name {twice!r}", "tools")
        if choice in ("required", "function") and not tools:
            raise bad_request(f"tool_choice {choice} needs tools to choose from", "tool_choice")
        if self.forced is not None and self.forced not in names:
            raise bad_request(f"tool_choice names {self.forced!r}, which is not one of tools", "tool_choice")
        return [] if choice == "none" else [tool.for_template() for tool in tools]

    @property
    def most(self) -> int | None:
        """Maximum number of calls in an answer; None: unlimited."""
        return 1 if self.parallel_tool_calls is False or self.forced is not None else None

    def constraint(
        self, form: AnswerForm, offered: list[dict[str, Any]], answer: Grammar | None, field: str | None
    ) -> Grammar | None:
        """The grammar of the answer: calls, if `tool_choice` or strict functions require it, else `answer`, from the
        field `field`. Raises an ApiError if the two exclude each other, or no grammar can be made."""
        must = self.must
        strict = [tool.function.name for tool in self.tools or () if tool.function.strict]
        if not offered or form.parser is None or not (must or strict or answer):
            return answer
        if answer is not None and answer.kind != "json_schema":
            raise bad_request(f"{field} excludes tools: the answer could not be a call", field)
        functions = [tool for tool in offered if self.forced in (None, tool["function"]["name"])]
        free = not must and answer is None
        if free:
            functions = [tool if tool["function"]["name"] in strict else any_arguments(tool) for tool in functions]
        try:
            schema = None if must or answer is None else json.loads(answer.source or "{}") or {"type": "object"}
            if not isinstance(schema, dict | None):
                raise bad_request(f"{field} must be a schema that is an object beside tools", field)
            source = call_grammar(
                form.parser, functions, form.tokens, strict=strict, most=self.most, text=free, answer=schema
            )
            return Grammar("lark", source, "" if form.parser is Harmony else None)
        except (ValueError, RecursionError) as error:
            where = field if isinstance(error, json.JSONDecodeError) else "tools"
            raise bad_request(f"no grammar can be made of {where}: {str(error)[:200]}", where, INVALID) from error

    def reply(
        self, form: AnswerForm, offered: list[dict[str, Any]], *, hide: bool, reasoning: bool = True
    ) -> ReplyOptions | None:
        """How the answer is parsed; None: all of it is content.

        Args:
            hide: leave special tokens out of the content.
            reasoning: the answer may begin with reasoning, if the model reasons.
        """
        thinks = reasoning and form.thinks
        reasoning = thinks and self.separate_reasoning is not False
        if not offered and not reasoning and not form.harmony:
            return None
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in offered}
        return ReplyOptions(
            parser=form.parser if offered and form.parser else Harmony if form.harmony else None,
            names=tuple(name for name in schemas if self.forced in (None, name)),
            most=self.most,
            hidden=form.special if hide else frozenset(),
            reasoning=reasoning,
            thinks=thinks,
            marks=form.marks,
            schemas=schemas,
        )


class _Shape(NamedTuple):
    """Text of calls. SPACE is up to two line breaks, INDEX a number; the parser's markers may be tokens."""

    call: str  # of the function NAME with the arguments JSON
    joins: str | None = ""  # between calls; None: there is only one
    opens: str = ""  # before all calls
    closes: str = ""

    @property
    def is_bare(self) -> bool:
        """True if calls begin without a marker."""
        return (self.opens + self.call).startswith("{")


_SHAPES: dict[type[CallParser], _Shape] = {
    Hermes: _Shape('<tool_call>SPACE{"name": "NAME", "arguments": JSON}SPACE</tool_call>', "SPACE"),
    # Llama's templates refuse conversations with several calls at once.
    Llama3: _Shape('{"name": "NAME", "parameters": JSON}', None),
    Mistral: _Shape('{"name": "NAME", "arguments": JSON}', ", ", "[TOOL_CALLS][", "]"),
    MistralNamed: _Shape("[TOOL_CALLS]NAME[ARGS]JSON"),
    DeepSeek: _Shape(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nJSON\n```<｜tool▁call▁end｜>",
        "SPACE",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    DeepSeek31: _Shape(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>",
        opens="<｜tool▁calls▁begin｜>",
        closes="<｜tool▁calls▁end｜>",
    ),
    KimiK2: _Shape(
        "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>JSON<|tool_call_end|>",
        opens="<|tool_calls_section_begin|>",
        closes="<|tool_calls_section_end|>",
    ),
    Gemma4: _Shape("<|tool_call>call:NAMEJSON<tool_call|>"),
    # A call ends the output.
    Harmony: _Shape("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>JSON", None),
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
    shape, functions = _SHAPES[parser], [tool["function"] for tool in tools]
    if answer is not None and shape.is_bare:
        return _call_or_answer(shape, functions, answer)
    pieces = re.compile(f"(SPACE|INDEX|{'|'.join(map(re.escape, parser.markers()))})")

    def term(piece: str, name: str) -> str:
        if piece in tokens:
            return f"<[{tokens[piece]}]>"
        return piece if piece in ("SPACE", "INDEX") else json.dumps(piece.replace("NAME", name), ensure_ascii=False)

    def terms(text: str, name: str = "") -> str:
        return " ".join(term(piece, name) for piece in pieces.split(text) if piece)

    start, end = shape.call.split("JSON")
    further = "" if shape.joins is None or most == 1 else f"({terms(shape.joins)} call)*"
    lines = [
        f"calls: {terms(shape.opens)} call {further} {terms(shape.closes)}",
        f"call: ({' | '.join(f'call{i}' for i in range(len(tools)))}) {terms(end)}",
    ]
    for i, function in enumerate(functions):
        lines.append(f"call{i}: {terms(start, function['name'])} arguments{i}")
        lenient = strict is not None and function["name"] not in strict
        parameters = _closed(function["parameters"])
        if parser is Gemma4:
            lines += argument_rules(f"arguments{i}", parameters, tokens, strict=not lenient)
        else:
            lines.append(f"arguments{i}: {_json(parameters, lenient=lenient)}")
    if parser is Harmony:
        if missing := [mark for mark in HARMONY_MARKS if mark not in tokens]:
            raise ValueError(f"{missing[0]} is not a token of this model")
        lines.append(harmony_turn(tokens, "TEXT" if text else None if answer is None else _json(answer), calls=True))
        return "\n".join(lines)
    lines += TERMINALS if parser is Gemma4 else ()
    lines.append(r"SPACE: /\n{0,2}/")
    if "INDEX" in shape.call:
        lines.append("INDEX: /[0-9]{1,3}/")
    if not text:
        lines.append(f"start: SPACE {'calls' if answer is None else '(calls | answer)'}")
    elif shape.is_bare:  # the whole answer is a call, or text that does not begin with a brace
        lines += ["start: TEXT | SPACE calls", r"TEXT: /(\s*[^\s{](?s:.*))?/"]
    elif pieces.split(shape.opens + shape.call)[1] in tokens:
        lines += [f"start: TEXT (calls TEXT){'?' if most == 1 else '*'}", "TEXT: /(?s:.*)/"]
    else:
        raise ValueError("the marker of calls is not a token of this model")
    if answer is not None:
        lines.append(f"answer: {_json(answer)}")
    return "\n".join(lines)


def _call_or_answer(shape: _Shape, functions: Sequence[Mapping[str, Any]], answer: Mapping[str, Any]) -> str:
    """One schema for calls and answers without a marker between them: the lexer would prefer the start of a call, which
    is longer, in every answer that is an object. All functions are strict, because leniency would apply to the answer
    as well."""
    schemas = []
    for place, function in enumerate(functions):
        ((named, name), (arguments, _)) = json.loads(
            shape.call.replace("NAME", function["name"]).replace("JSON", "null")
        ).items()
        parameters = _embedded(_closed(function["parameters"]), str(place))
        members = {named: {"const": name}, arguments: parameters}
        schemas.append({"type": "object", "properties": members, "required": [*members], "additionalProperties": False})
    schemas.append(_embedded(answer, "answer"))
    style = {"x-guidance": answer["x-guidance"]} if "x-guidance" in answer else {}
    return f"start: SPACE answer\nanswer: {_json({'anyOf': schemas, **style})}\nSPACE: /\\n{{0,2}}/"


def _embedded(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A schema as a part of another one. Its references are relative to an id, which draft 7 ignores beside `$ref`."""
    reference = {"allOf": [{"$ref": schema["$ref"]}, *schema.get("allOf", ())]} if "$ref" in schema else {}
    return {"$id": f"urn:{name}", **{key: value for key, value in schema.items() if key != "$ref"}, **reference}


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
