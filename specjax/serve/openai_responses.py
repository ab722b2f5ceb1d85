"""Request bodies of OpenAI's Responses interface, `/v1/responses`.

The server stores nothing, so there is no `previous_response_id`. A client can send the messages, calls and reasoning of
an answer back as `input`. `specjax.serve.responses_answer` makes the answers.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from specjax.checkpoint.prompts import Chat
from specjax.serve import structured
from specjax.serve.fields import UNSUPPORTED, Body, Flag, Integer, Text, Values, at_most, texts
from specjax.serve.messages import MAX_MESSAGES, CallArguments, assistant_turns, earlier_call
from specjax.serve.protocol import (
    MISPLACED,
    NewTokens,
    SamplingFields,
    TaskBody,
    UnusedFields,
    chat_task,
    check_model,
)
from specjax.serve.structured import FIELDS, TextOptions
from specjax.serve.task import Rules, Task
from specjax.serve.tools import FlatToolChoice, FlatTools, ToolFields, as_tool


class InputPart(Body):
    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: Any = None  # of an answer that a client sends back; not used
    logprobs: Any = None


InputParts = Annotated[list[InputPart], Field(max_length=MAX_MESSAGES, fail_fast=True), at_most(MAX_MESSAGES)]
TextOrParts = Annotated[
    InputParts,
    texts("text parts", lambda text: {"type": "text", "text": text}, json_schema_input_type=Text | InputParts),
]


class Item(Body):
    """An item of the conversation."""

    id: Any = None  # of an answer that a client sends back; not used
    status: Any = None

    @abstractmethod
    def for_template(self) -> dict[str, Any]:
        """The item as a message for the chat template."""


class InputMessage(Item):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrParts
    phase: Any = None

    def for_template(self) -> dict[str, Any]:
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "".join(part.text for part in self.content)}


class InputCall(Item):
    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: CallArguments = None

    def for_template(self) -> dict[str, Any]:
        return earlier_call(self.call_id, self.name, self.arguments)


class InputResult(Item):
    type: Literal["function_call_output"]
    call_id: Text
    output: TextOrParts

    def for_template(self) -> dict[str, Any]:
        text = "".join(part.text for part in self.output)
        return {"role": "tool", "tool_call_id": self.call_id, "content": text}


class ReasoningPart(Body):
    type: Literal["reasoning_text", "text"]
    text: Text


class InputReasoning(Item):
    unsupported: ClassVar[Mapping[str, Values]] = {"encrypted_content": ("",)}

    type: Literal["reasoning"]
    summary: Any = None  # not used
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None

    def for_template(self) -> dict[str, Any]:
        thoughts = "".join(part.text for part in self.content or ())
        return {"role": "assistant", "content": ""} | ({"reasoning_content": thoughts} if thoughts else {})


def _type(item: Any) -> Any:
    if isinstance(item, Item):
        return item.type  # pyright: ignore[reportAttributeAccessIssue]
    return (item.get("type") or "message") if isinstance(item, dict) else "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputResult, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(_type),
]
InputItems = Annotated[
    list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), at_most(MAX_MESSAGES)
]


class ResponsesRequest(SamplingFields, TaskBody, UnusedFields):
    asked = FIELDS | {"text": TextOptions.chosen}
    unsupported: ClassVar[Mapping[str, Values]] = UNSUPPORTED | structured.UNSUPPORTED | {
        "json_schema": (),
        "background": (False,), "context_management": ([],), "conversation": (), "include": ([],),
        "max_tool_calls": (), "moderation": (), "previous_response_id": (),
        "prompt": (), "reasoning": ({},), "stream_options": ({}, {"include_obfuscation": False}),
        "top_logprobs": (0,),
        "truncation": ("disabled",), "logprobs": (False,),
    }  # fmt: skip
    elsewhere: ClassVar[Mapping[str, tuple[str, Values]]] = {
        name: advice for name, advice in MISPLACED.items() if name != "text"
    } | {
        "messages": ("a response has input", ()),
        "max_tokens": ("it is called max_output_tokens", ()),
        "max_completion_tokens": ("it is called max_output_tokens", ()),
        "min_tokens": ("chats and completions have it", (0,)),
    }

    model: Text | None = None
    input: Annotated[
        InputItems,
        texts("input items", lambda text: {"role": "user", "content": text}, json_schema_input_type=Text | InputItems),
    ]
    instructions: Text | None = Field(None, description="System message before the input.")
    max_output_tokens: NewTokens | None = Field(None, description="New tokens. Default: as many as fit.")
    n: Annotated[Integer, Field(ge=1, le=1)] | None = None
    text: TextOptions | None = Field(None, description="The form of the text. JSON is written on one line.")
    tools: FlatTools | None = Field(None, description="Functions that the model may call; their names differ.")
    tool_choice: FlatToolChoice | None = Field(
        None,
        description="Default: auto. none = leave `tools` out of the prompt; required, or a function = call one.",
    )
    parallel_tool_calls: Flag | None = Field(None, description="false = at most one call.")
    prompt_cache_retention: Text | None = None  # accepted, and not used

    @property
    def names(self) -> dict[str, str]:
        return super().names | {"max_new_tokens": "max_output_tokens"}

    def task(self, rules: Rules) -> Task:
        check_model(self.model, rules.model)
        functions = ToolFields.model_construct(
            tools=None if self.tools is None else [as_tool(each) for each in self.tools],
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
        )
        make = functools.partial(self.params, rules, max_new_tokens=self.max_output_tokens, logprobs=None)
        return chat_task(self, functions, self._chat, rules, make, "input")

    def _chat(self) -> Chat:
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        items: Iterable[Item] = self.input
        return Chat([*system, *assistant_turns(item.for_template() for item in items)])
