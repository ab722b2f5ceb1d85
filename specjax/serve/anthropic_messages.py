"""Request bodies of Anthropic's Messages interface, `/v1/messages` and `/v1/messages/count_tokens`.

If the last message is the assistant's, the answer continues it.
`specjax.serve.messages_answer` makes the answers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from specjax.checkpoint.prompts import Chat
from specjax.serve import structured
from specjax.serve.fields import (
    UNSUPPORTED,
    Body,
    Flag,
    Integer,
    Metadata,
    StopStrings,
    Text,
    Values,
    at_most,
    texts,
)
from specjax.serve.forms import AnswerForm
from specjax.serve.messages import MAX_MESSAGES, assistant_turns, earlier_call
from specjax.serve.protocol import (
    MISPLACED,
    NewTokens,
    SamplingFields,
    TaskBody,
    chat_task,
    check_model,
    with_tools,
)
from specjax.serve.structured import FIELDS, OutputConfig, OutputFormat
from specjax.serve.task import Rules, Task
from specjax.serve.tools import (
    MAX_TOOLS,
    FunctionName,
    FunctionTool,
    ToolFields,
    as_tool,
    choice_of,
    object_schema,
)

NOT_BUILT: dict[str, Values] = {
    "container": (), "context_management": (), "mcp_servers": ([],),
}  # fmt: skip


class Block(Body):
    cache_control: Any = None  # not used: the prefix cache is always on


class TextBlock(Block):
    unsupported: ClassVar[Mapping[str, Values]] = {"citations": ([],)}

    type: Literal["text"]
    text: Text


TextBlocks = Annotated[list[TextBlock], Field(max_length=MAX_MESSAGES, fail_fast=True), at_most(MAX_MESSAGES)]
TextOrBlocks = Annotated[
    TextBlocks,
    texts("text blocks", lambda text: {"type": "text", "text": text}, json_schema_input_type=Text | TextBlocks),
]


class CallBlock(Block):
    unsupported: ClassVar[Mapping[str, Values]] = {"caller": ({"type": "direct"},)}

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]


class ResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: TextOrBlocks | None = None
    is_error: Flag | None = Field(None, description="Not part of the prompt; the content describes the error.")


class ThoughtsBlock(Block):
    type: Literal["thinking"]
    thinking: Text
    signature: Any = None  # not used


Blocks = Annotated[
    list[Annotated[TextBlock | CallBlock | ResultBlock | ThoughtsBlock, Field(discriminator="type")]],
    Field(max_length=MAX_MESSAGES, fail_fast=True),
    at_most(MAX_MESSAGES),
]
BELONGS = {"tool_use": "assistant", "thinking": "assistant", "tool_result": "user"}


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Blocks, texts("blocks", lambda text: {"type": "text", "text": text}, json_schema_input_type=Text | Blocks)
    ]

    @model_validator(mode="after")
    def _check(self) -> AnthropicMessage:
        for block in self.content:
            owner = BELONGS.get(block.type)
            if owner not in (None, self.role):
                problem = "has a block of {kind}, which belongs to the {owner}, not to the {role}"
                raise PydanticCustomError("block", problem, {"kind": block.type, "owner": owner, "role": self.role})
        return self

    def for_template(self) -> Iterable[dict[str, Any]]:
        """A message for each result of a call, then the message."""
        message: dict[str, Any] = {"role": self.role, "content": ""}
        alone = True
        for block in self.content:
            match block:
                case TextBlock():
                    message["content"] += block.text
                case ThoughtsBlock():
                    message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
                case CallBlock():
                    (call,) = earlier_call(block.id, block.name, block.input)["tool_calls"]
                    message.setdefault("tool_calls", []).append(call)
                case ResultBlock():
                    alone = False
                    yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content or [])}
        if alone or message["content"]:
            yield message


class AnthropicTool(Body):
    unsupported: ClassVar[Mapping[str, Values]] = {
        "allowed_callers": (["direct"],), "defer_loading": (False,), "input_examples": ([],),
        "eager_input_streaming": (True, False),
    }  # fmt: skip

    type: Literal["custom"] | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: Annotated[dict[str, Any], BeforeValidator(object_schema)]
    strict: Flag | None = Field(None, description="true = the input follows `input_schema`.")
    cache_control: Any = None  # not used

    def as_function(self) -> FunctionTool:
        return FunctionTool.model_construct(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )


AnthropicTools = Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS, fail_fast=True), at_most(MAX_TOOLS)]


class AnthropicChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = Field(None, description="Of the type `tool`.")
    disable_parallel_tool_use: Flag | None = Field(None, description="true = at most one call.")

    @model_validator(mode="after")
    def _check(self) -> AnthropicChoice:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("name", "must have a name if, and only if, its type is tool")
        return self


class Thinking(Body):
    unsupported: ClassVar[Mapping[str, Values]] = {"budget_tokens": (), "display": ("summarized",)}

    type: Literal["disabled", "adaptive"]


class CountTokensRequest(Body):
    unsupported = NOT_BUILT | {"output_config": ({},), "output_format": ()}

    model: Text | None = None
    system: TextOrBlocks | None = None
    messages: Annotated[
        list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), at_most(MAX_MESSAGES)
    ]
    tools: AnthropicTools | None = Field(None, description="Functions that the model may call; their names differ.")
    tool_choice: AnthropicChoice | None = Field(
        None, description="Default: auto. none = leave `tools` out of the prompt; any, or a tool = call one."
    )
    thinking: Thinking | None = Field(
        None, description="Sets `enable_thinking` of the chat template: adaptive = true, disabled = false."
    )
    cache_control: Any = None  # not used

    def functions(self) -> ToolFields:
        """The functions in the form of chat completions."""
        choice = self.tool_choice
        kinds = {"auto": "auto", "any": "required", "tool": "function", "none": "none"}
        return ToolFields.model_construct(
            tools=None if self.tools is None else [as_tool(each.as_function()) for each in self.tools],
            tool_choice=None if choice is None else choice_of(kinds[choice.type], choice.name),
            parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
        )

    def chat(self) -> Chat:
        system = [] if self.system is None else [{"role": "system", "content": _text(self.system)}]
        messages = assistant_turns(message for each in self.messages for message in each.for_template())
        last = messages[-1]
        variables = {"continue_final_message": last["role"] == "assistant" and not last.get("tool_calls")}
        if self.thinking is not None:
            variables["enable_thinking"] = self.thinking.type == "adaptive"
        return Chat([*system, *messages], variables)

    def prompt(self, form: AnswerForm) -> Chat:
        """The chat for the model's template. Raises an ApiError if the model takes no functions."""
        return with_tools(self.chat(), form, self.functions().offered(form))


class MessagesRequest(CountTokensRequest, SamplingFields, TaskBody):
    asked = FIELDS | {"output_config": OutputConfig.chosen, "output_format": OutputFormat.chosen}
    unsupported = UNSUPPORTED | structured.UNSUPPORTED | NOT_BUILT | {"json_schema": ()}
    elsewhere: ClassVar[Mapping[str, tuple[str, Values]]] = MISPLACED | {
        "max_completion_tokens": ("it is called max_tokens", ()),
        "min_tokens": ("chats and completions have it", (0,)),
        "prompt": ("there are messages", ()),
    }

    max_tokens: NewTokens = Field(description="New tokens.")
    stop_sequences: StopStrings | None = Field(
        None, description="The text ends before a stop sequence. Separated reasoning may hold one."
    )
    stop: None = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        None, description="it is called stop_sequences here"
    )
    n: Annotated[Integer, Field(ge=1, le=1)] | None = None
    output_config: OutputConfig | None = Field(None, description="JSON is written on one line.")
    output_format: OutputFormat | None = Field(None, description="The older name of `output_config.format`.")
    # Accepted, and not used.
    metadata: Metadata | None = None
    service_tier: Text | None = None
    inference_geo: Text | None = None

    @property
    def names(self) -> dict[str, str]:
        return super().names | {"max_new_tokens": "max_tokens", "stop": "stop_sequences"}

    def task(self, rules: Rules) -> Task:
        check_model(self.model, rules.model)
        more: dict[str, Any] = {"max_new_tokens": self.max_tokens, "logprobs": None, "stop": self.stop_sequences}
        return chat_task(
            self, self.functions(), self.chat, rules, functools.partial(self.params, rules, **more), "messages"
        )


def _text(blocks: list[TextBlock]) -> str:
    return "".join(block.text for block in blocks)
