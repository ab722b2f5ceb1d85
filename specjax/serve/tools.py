"""Fields of a chat about the functions that the model may call."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from specjax.engine.grammar import Grammar
from specjax.serve.call_grammar import any_arguments, call_grammar
from specjax.serve.errors import bad_request
from specjax.serve.fields import Body, Flag, Text, at_most, finite
from specjax.serve.forms import AnswerForm
from specjax.serve.reply import ReplyOptions
from specjax.serve.structured import INVALID

MAX_TOOLS = 128  # functions of a request; OpenAI's limit
NAME = r"^[a-zA-Z0-9_-]{1,64}$"  # OpenAI's; also without a line break at the end, which `$` would allow
CHOICES = ("none", "auto", "required")


def _name(name: Any) -> Any:
    if isinstance(name, str) and (name.endswith("\n") or not 1 <= len(name) <= 64):
        raise PydanticCustomError("name", "must have 1 to 64 letters, digits, underscores and dashes")
    return name


FunctionName = Annotated[Text, Field(pattern=NAME), BeforeValidator(_name)]


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


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True), at_most(MAX_TOOLS)]


class FunctionChoice(Body):
    name: FunctionName


class NamedChoice(Body):
    type: Literal["function"]
    function: FunctionChoice


class Choice(Body):
    """`tool_choice`, a word or an object, in one form."""

    type: Literal["none", "auto", "required", "function"]
    function: FunctionChoice | None = None


def _as_object(value: Any) -> Any:
    if isinstance(value, str) and value in CHOICES:
        return {"type": value}
    if isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("function"), dict):
        return value
    problem = f'must be one of {", ".join(CHOICES)}, or {{"type": "function", "function": {{"name": ...}}}}'
    raise PydanticCustomError("choice", "{problem}", {"problem": problem})


ToolChoice = Annotated[
    Choice, BeforeValidator(_as_object, json_schema_input_type=Literal["none", "auto", "required"] | NamedChoice)
]


class ToolFields(Body):
    """Fields of a chat beside its messages."""

    tools: Tools | None = Field(None, description="Functions that the model may call; their names differ.")
    tool_choice: ToolChoice | None = Field(
        None,
        description="Default: auto. none = leave `tools` out of the prompt; required, or a function = call one.",
    )
    parallel_tool_calls: Flag | None = Field(None, description="false = at most one call.")
    separate_reasoning: Flag | None = Field(
        None, description="false = reasoning is part of the content. Default: `reasoning_content`."
    )
    stream_reasoning: Flag | None = Field(
        None, description="false = a stream sends reasoning in one piece, once it has ended."
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
            return Grammar("lark", source)
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
        reasoning = reasoning and form.thinks and self.separate_reasoning is not False
        if not offered and not reasoning:
            return None
        return ReplyOptions(
            parser=form.parser if offered else None,
            names=tuple(tool["function"]["name"] for tool in offered),
            most=self.most,
            hidden=form.special if hide else frozenset(),
            reasoning=reasoning,
            gathered=self.stream_reasoning is False,
            schemas={tool["function"]["name"]: tool["function"]["parameters"] for tool in offered},
        )
