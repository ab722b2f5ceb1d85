"""Chat messages: the form that clients send, and the form for chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from specjax.checkpoint.prompts import Chat
from specjax.serve.errors import ApiError, bad_request
from specjax.serve.fields import Body, Flag, Text, Values, at_most, texts

MAX_MESSAGES = 2**14  # messages of a chat, parts of a message
MAX_CALLS = 2**10  # tool calls of a message
MAX_NAMES = 64  # variables of the chat template
MAX_VARIABLES = 2**14  # characters of all variables as JSON


def _arguments(value: Any, info: Any) -> Any:
    """Arguments of a call as an object, the form for templates. OpenAI's clients send the JSON text of a model.

    Text that is not a JSON object stays unchanged: a model's mistake must not end the conversation.
    """
    if not isinstance(value, str | dict | None):
        raise PydanticCustomError("arguments", "must be an object or a string")
    if not isinstance(value, str):
        return value or {}
    try:
        arguments = info.context.parse(value.encode()) if value.strip() else {}  # a function without parameters
    except ApiError as error:
        if error.status != 400:
            raise
        return value
    return arguments if isinstance(arguments, dict) else value


CallArguments = Annotated[
    Any,
    BeforeValidator(_arguments, json_schema_input_type=str | dict[str, Any] | None),
    Field(validate_default=True, description="An object, or its JSON text."),
]


class ToolFunction(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: Text
    arguments: CallArguments = None


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="allow")

    function: ToolFunction


class TextPart(Body):
    type: Literal["text"]
    text: Text


Parts = Annotated[list[TextPart], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), at_most(MAX_MESSAGES)]
Content = Annotated[
    Parts, texts("text parts", lambda text: {"type": "text", "text": text}, json_schema_input_type=Text | Parts)
]


class Message(Body):
    unsupported: ClassVar[Mapping[str, Values]] = {
        "refusal": ("",), "audio": (), "function_call": (), "reasoning": ("",), "tools": ([],), "prefix": (False,),
        "partial": (False,),
    }  # fmt: skip

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = Field(None, description="Null only beside tool_calls.")
    name: Text | None = None
    reasoning_content: Text | None = Field(None, description="Reasoning of the assistant; templates may omit it.")
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: Text | None = None
    annotations: Any = None  # part of an answer that a client sends back; not used

    @model_validator(mode="after")
    def _check(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            problem = "has tool_calls, which belong to the assistant, not to {role}"
            raise PydanticCustomError("tool_calls", problem, {"role": self.role})
        if self.reasoning_content and self.role != "assistant":
            problem = "has reasoning_content, which belongs to the assistant, not to {role}"
            raise PydanticCustomError("reasoning_content", problem, {"role": self.role})
        if self.content is None and not self.tool_calls:
            problem = "needs a content: a string, a list of text parts, or null beside tool_calls"
            raise PydanticCustomError("content", problem)
        return self

    def for_template(self) -> dict[str, Any]:
        """The message with a string as content. `developer` is OpenAI's newer name of `system`."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": "".join(part.text for part in self.content or ())}
        others = ("name", "tool_call_id", "reasoning_content")
        message |= {name: value for name in others if (value := getattr(self, name)) is not None}
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message


def _few_characters(value: Any) -> Any:
    """Checks the length of the template variables as JSON."""
    if isinstance(value, dict) and len(text := json.dumps(value)) > MAX_VARIABLES:
        numbers = {"length": len(text), "most": MAX_VARIABLES}
        problem = "has {length} characters of JSON; at most {most} are supported"
        raise PydanticCustomError("too_long_json", problem, numbers)
    return value


class TemplateFields(Body):
    """Arguments of the chat template."""

    add_generation_prompt: Flag | None = Field(
        None, description="Begin a message of the assistant. Default: true, false with `continue_final_message`."
    )
    continue_final_message: Flag | None = Field(
        None, description="Continue the last message, which is the assistant's."
    )
    chat_template_kwargs: (
        Annotated[dict[str, Any], Field(max_length=MAX_NAMES), at_most(MAX_NAMES), AfterValidator(_few_characters)]
        | None
    ) = Field(None, description=f"Variables of the chat template; at most {MAX_VARIABLES} characters of JSON.")

    def chat(self, messages: list[Message]) -> Chat:
        """The prompt. Raises an ApiError if fields exclude each other, or the last message cannot continue."""
        if self.continue_final_message:
            if self.add_generation_prompt:
                problem = "and add_generation_prompt exclude each other: continue the last message, or begin a new one"
                raise bad_request(f"continue_final_message {problem}", "continue_final_message")
            if messages[-1].role != "assistant" or messages[-1].content is None:
                problem = f"needs an assistant's message with content at the end, not one of the {messages[-1].role}"
                raise bad_request(f"continue_final_message {problem}", "continue_final_message")
        fields = {name: getattr(self, name) for name in ("add_generation_prompt", "continue_final_message")}
        variables = self.chat_template_kwargs or {}
        if taken := next((name for name in (*fields, "tools") if name in variables), None):
            raise bad_request(f"chat_template_kwargs may not set {taken}, a field of the body", "chat_template_kwargs")
        fields = {name: value for name, value in fields.items() if value is not None}
        return Chat([message.for_template() for message in messages], {**variables, **fields})


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), at_most(MAX_MESSAGES)]
