"""Fields of a chat about its functions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from specjax.engine.chat.message_format import AnswerForm
from specjax.engine.chat.tools import CHOICES, MAX_TOOLS, NAME, Tools, for_template, schema_problem
from specjax.limits import ParameterError
from specjax.serve.errors import INVALID, bad_request
from specjax.serve.fields import Body, Flag, Text, at_most, finite

FunctionName = Annotated[Text, Field(pattern=NAME)]


def object_schema(schema: Any) -> Any:
    """Checks that parameters are a JSON schema of an object. Its members must not be null."""
    if not isinstance(schema, dict):
        return schema
    if problem := schema_problem(schema):
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

    def chosen(self, form: AnswerForm) -> Tools:
        """The functions, and which of them the answer must call. Raises an ApiError if the fields are wrong, or the
        model has no place for functions."""
        functions, choice = [tool.function for tool in self.tools or ()], self.tool_choice
        tools = Tools(
            [for_template(function.name, function.description, function.parameters) for function in functions],
            "auto" if choice is None else choice.type,
            None if choice is None or choice.function is None else choice.function.name,
            frozenset(function.name for function in functions if function.strict),
            single=self.parallel_tool_calls is False,
            reasoning=self.separate_reasoning is not False,
        )
        with refused("unsupported" if functions and form.refusal else None):
            return tools.checked(form)


@contextlib.contextmanager
def refused(code: str | None = None) -> Iterator[None]:
    """Turns a ParameterError of `Tools` into an ApiError with this code, or INVALID if another error caused it."""
    try:
        yield
    except ParameterError as error:
        raise bad_request(str(error), error.name, INVALID if error.__cause__ else code) from error
