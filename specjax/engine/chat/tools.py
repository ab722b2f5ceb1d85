"""Function calls: the functions of a chat, and the grammar of answers that must be calls.

    start: SPACE calls
    calls: call (SPACE call)*
    call: (call0 | call1) "}" SPACE <[151658]>
    call0: <[151657]> SPACE "{\\"name\\": \\"add\\", \\"arguments\\": " arguments0
    arguments0: %json {"type": "object", ...}

A marker that is a token is written as its number, else as text. `specjax.engine.chat.calls` parses text of such a
grammar. Reasoning before the calls is not part of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from specjax.checkpoint.prompts import Chat, Prompt
from specjax.engine.chat.calls import (
    CallParser,
    DeepSeek,
    DeepSeek31,
    Harmony,
    Hermes,
    KimiK2,
    Llama3,
    Mistral,
    MistralNamed,
)
from specjax.engine.chat.gemma_calls import TERMINALS, Gemma4, argument_rules
from specjax.engine.chat.message_format import AnswerForm, ReplyOptions
from specjax.engine.grammar import HARMONY_MARKS, JSON_STYLE, Grammar, harmony_turn
from specjax.engine.sampling_params import SamplingParams
from specjax.limits import ParameterError, shown

MAX_TOOLS = 128  # functions of a request; OpenAI's limit
NAME = r"^[a-zA-Z0-9_-]{1,64}$"  # OpenAI's
CHOICES = ("none", "auto", "required")


def schema_problem(schema: Mapping[str, Any]) -> str:
    """Why parameters are not a JSON schema of an object; "" if they are."""
    required = schema.get("required", [])
    if schema.get("type", "object") != "object":
        return 'must be the schema of an object, {"type": "object", ...}'
    if not isinstance(schema.get("properties", {}), dict):
        return "must have an object of schemas as properties"
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return "must have a list of names as required"
    return ""


def for_template(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """A function in the form for chat templates."""
    function: dict[str, Any] = {"name": name, "description": description or ""}
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


@dataclass(frozen=True)
class Tools:
    """The functions of a chat, and which of them the answer must call. `read` makes them from a caller's arguments.

    Attributes:
        functions: as `for_template` makes them; their names differ.
        choice: auto: the model chooses; required: the answer must be a call; none: the model sees no functions.
        forced: name of the function that must be called; None: the model chooses.
        strict: names of functions whose arguments follow their schema, also where the model chooses.
        single: at most one call.
        reasoning: separate reasoning from content.
    """

    functions: Sequence[Mapping[str, Any]] = ()
    choice: str = "auto"
    forced: str | None = None
    strict: Container[str] = ()
    single: bool = False
    reasoning: bool = True

    @classmethod
    def read(cls, tools: Sequence[Mapping[str, Any] | Callable[..., Any]], choice: str) -> Tools:
        """Reads functions in OpenAI's form, or Python functions whose annotations and docstrings give the schema, and
        none, auto, required or the name of a function. Raises ParameterError."""
        read, strict = list[Mapping[str, Any]](), set[str]()
        for index, tool in enumerate(tools):
            if callable(tool):
                from transformers.utils.chat_template_utils import get_json_schema

                try:
                    tool = cast(Mapping[str, Any], get_json_schema(tool))
                except Exception as error:  # of `transformers`, about annotations and docstrings
                    raise ParameterError(f"tools[{index}]", f"has no schema: {error}") from error
            function = tool.get("function") if isinstance(tool, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(name, str) or not re.match(NAME, name):
                form = '{"type": "function", "function": {"name": ..., "parameters": {...}}}, or a function of Python'
                raise ParameterError(f"tools[{index}]", f"must be {form}, got {shown(tool)}")
            parameters = function.get("parameters") or {}
            is_object = isinstance(parameters, Mapping)
            if problem := schema_problem(parameters) if is_object else "must be a JSON schema":
                raise ParameterError(f"tools[{index}].function.parameters", problem)
            read.append(for_template(name, function.get("description"), parameters))
            strict |= {name} if function.get("strict") else set()
        forced = None if choice in CHOICES else choice
        return cls(read, choice if forced is None else "function", forced, frozenset(strict))

    @property
    def must(self) -> bool:
        """True if the answer must be a call."""
        return self.choice not in ("none", "auto")

    @property
    def most(self) -> int | None:
        """Maximum number of calls in an answer; None: unlimited."""
        return 1 if self.single or self.forced is not None else None

    @property
    def offered(self) -> list[Mapping[str, Any]]:
        """The functions for the chat template."""
        return [] if self.choice == "none" else list(self.functions)

    def checked(self, form: AnswerForm) -> Tools:
        """These tools. Raises ParameterError if they contradict each other, or the model has no place for functions."""
        if self.functions and form.refusal:
            raise ParameterError("tools", f"are not supported: {form.refusal}")
        names = [tool["function"]["name"] for tool in self.functions]
        if twice := next((name for index, name in enumerate(names) if name in names[:index]), None):
            raise ParameterError("tools", f"has two functions with the name {twice!r}")
        if self.must and not names:
            raise ParameterError("tool_choice", f"{self.choice} needs tools to choose from")
        if self.forced is not None and self.forced not in names:
            known = f"one of tools ({', '.join(names)})"
            raise ParameterError("tool_choice", f"names {shown(self.forced)}, which is not {known}")
        return self

    def plan(
        self, form: AnswerForm, answer: Grammar | None, field: str | None = "grammar", *, hide: bool = True
    ) -> tuple[ReplyOptions | None, dict[str, Any]]:
        """How the answer is parsed, None if all of it is content, and the fields of `SamplingParams` for that.

        Args:
            answer: grammar of an answer that is not a call; the parameter `field` gave it.
            hide: leave special tokens out of the content.

        Raises:
            ParameterError: the answer can follow no grammar.
        """
        grammar = self._constraint(form, answer, field)
        # A grammar can begin after the reasoning only if a token ends it.
        free = form.end_think is not None or (answer is None and not (self.offered and self.must))
        reply = self._reply(form, hide=hide, thinks=free and form.thinks)
        special = () if reply is None else tuple(sorted(reply.hidden))
        after = form.harmony or (reply is not None and reply.reasoning)
        return reply, {"kept_special_tokens": special, "grammar": grammar, "stop_after_reasoning": after}

    def applied(
        self, prompt: Prompt, params: SamplingParams, form: AnswerForm
    ) -> tuple[Chat, SamplingParams, ReplyOptions | None]:
        """A list of messages and parameters with these functions, and how the answer is parsed. Raises
        ParameterError."""
        if not isinstance(prompt, list | tuple) or not all(isinstance(message, Mapping) for message in prompt):
            raise ParameterError("tools", f"need a list of messages as prompt, got {shown(prompt)}")
        chat = prompt if isinstance(prompt, Chat) else Chat(cast(Any, prompt))
        reply, fields = self.checked(form).plan(form, params.grammar, hide=params.skip_special_tokens)
        return self.chat(form, chat, [_as_turn(message) for message in chat]), replace(params, **fields), reply

    def chat(self, form: AnswerForm, chat: Chat, turns: Sequence[Mapping[str, Any]], **variables: Any) -> Chat:
        """A chat of these turns for the model's template, with earlier calls in the model's form and the offered
        functions. `variables`: of the template, beside those of `chat`."""
        more = {"tools": self.offered} if self.offered else {}
        template, sanitize = {**chat.template, **more, **variables}, chat.sanitize_control_tokens
        return Chat(form.for_template(list(turns)), template, sanitize_control_tokens=sanitize)

    def _constraint(self, form: AnswerForm, answer: Grammar | None, field: str | None) -> Grammar | None:
        """The grammar of the answer: calls, if the choice or strict functions require it, else `answer`."""
        must = self.must
        strict = [name for tool in self.functions if (name := tool["function"]["name"]) in self.strict]
        if not self.offered or form.parser is None or not (must or strict or answer):
            return answer
        if answer is not None and answer.kind != "json_schema":
            raise ParameterError(f"{field}", "excludes tools: the answer could not be a call")
        functions = [tool for tool in self.offered if self.forced in (None, tool["function"]["name"])]
        free = not must and answer is None
        if free:
            functions = [tool if tool["function"]["name"] in strict else any_arguments(tool) for tool in functions]
        try:
            schema = None if must or answer is None else json.loads(answer.source or "{}") or {"type": "object"}
            if not isinstance(schema, dict | None):
                raise ParameterError(f"{field}", "must be a schema that is an object beside tools")
            source = call_grammar(
                form.parser, functions, form.tokens, strict=strict, most=self.most, text=free, answer=schema
            )
            return Grammar("lark", source, "" if form.parser is Harmony else None)
        except ParameterError:
            raise
        except (ValueError, RecursionError) as error:
            where = f"{field}" if isinstance(error, json.JSONDecodeError) else "tools"
            raise ParameterError(where, f"can be followed by no grammar: {str(error)[:200]}") from error

    def _reply(self, form: AnswerForm, *, hide: bool, thinks: bool) -> ReplyOptions | None:
        """`thinks`: the answer may begin with reasoning."""
        reasoning = thinks and self.reasoning
        if not self.offered and not reasoning and not form.harmony:
            return None
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.offered}
        return ReplyOptions(
            parser=form.parser if self.offered and form.parser else Harmony if form.harmony else None,
            names=tuple(name for name in schemas if self.forced in (None, name)),
            most=self.most,
            hidden=form.special if hide else frozenset(),
            reasoning=reasoning,
            thinks=thinks,
            marks=form.marks,
            schemas=schemas,
        )


def _as_turn(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message for chat templates: with content, and with the arguments of calls as objects, not as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"].get("arguments") or {}
        try:
            parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:  # as the model wrote it
            parsed = arguments
        arguments = parsed if isinstance(parsed, dict) else arguments
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


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
