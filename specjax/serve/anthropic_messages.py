"""Anthropic's Messages interface, `/v1/messages` and `/v1/messages/count_tokens`: text in, text out. A thin layer over
the chat. A conversation that ends with a message of the assistant is continued there, as Anthropic does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from specjax.engine import Completion, StreamChunk
from specjax.engine.intake import Chat
from specjax.serve import structured
from specjax.serve.errors import ApiError
from specjax.serve.fields import (
    UNSUPPORTED,
    Body,
    Flag,
    Integer,
    Metadata,
    Salt,
    StopStrings,
    Text,
    Values,
    at_most,
    texts,
)
from specjax.serve.messages import MAX_MESSAGES
from specjax.serve.protocol import MISPLACED, SALT, NewTokens, SamplingFields, TaskBody, check_model
from specjax.serve.responses import Answer, named_event
from specjax.serve.task import Rules, Task

NOT_BUILT: dict[str, Values] = {
    "tools": ([],), "tool_choice": ({"type": "auto"}, {"type": "none"}), "thinking": ({"type": "disabled"},),
    "container": (), "context_management": (), "mcp_servers": ([],), "output_config": ({},), "output_format": (),
}  # fmt: skip


class TextBlock(Body):
    place = "messages[].content[]."
    unsupported: ClassVar[Mapping[str, Values]] = {"citations": ([],)}

    type: Literal["text"]
    text: Text
    cache_control: Any = None  # not used: what is common to prompts is always reused


Blocks = Annotated[list[TextBlock], Field(max_length=MAX_MESSAGES, fail_fast=True), at_most(MAX_MESSAGES)]
TextOrBlocks = Annotated[
    Blocks, texts("text blocks", lambda text: {"type": "text", "text": text}, json_schema_input_type=Text | Blocks)
]


class AnthropicMessage(Body):
    place = "messages[]."

    role: Literal["user", "assistant", "system"]
    content: TextOrBlocks

    def for_template(self) -> dict[str, Any]:
        return {"role": self.role, "content": _text(self.content)}


class CountTokensRequest(Body):
    unsupported = NOT_BUILT

    model: Text | None = Field(None, json_schema_extra={"enum": "$models"})
    system: TextOrBlocks | None = None
    messages: Annotated[
        list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), at_most(MAX_MESSAGES)
    ]
    cache_control: Any = None  # not used

    def chat(self) -> Chat:
        system = [] if self.system is None else [{"role": "system", "content": _text(self.system)}]
        go_on = self.messages[-1].role == "assistant"
        return Chat([*system, *(each.for_template() for each in self.messages)], {"continue_final_message": go_on})


class MessagesRequest(CountTokensRequest, SamplingFields, TaskBody):
    unsupported = UNSUPPORTED | structured.UNSUPPORTED | NOT_BUILT | {"json_schema": ()}
    elsewhere: ClassVar[Mapping[str, tuple[str, Values]]] = MISPLACED | {
        "max_completion_tokens": ("it is called max_tokens", ()),
        "min_tokens": ("chats and completions have it", (0,)),
        "prompt": ("there are messages", ()),
    }

    max_tokens: NewTokens = Field(description="New tokens.")
    stop_sequences: StopStrings | None = Field(None, description="Never in the text.")
    stop: None = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        None, description="It is called stop_sequences here."
    )
    stream: Flag | None = None
    n: Annotated[Integer, Field(ge=1, le=1)] | None = None
    cache_salt: Salt | None = Field(None, description=SALT)
    # Accepted, and not used.
    metadata: Metadata | None = None
    service_tier: Text | None = None
    inference_geo: Text | None = None

    @property
    def names(self) -> dict[str, str]:
        return super().names | {"max_new_tokens": "max_tokens", "stop": "stop_sequences"}

    def task(self, rules: Rules, reading: Any) -> Task:
        check_model(self.model, rules.model)
        more: dict[str, Any] = {"max_new_tokens": self.max_tokens, "logprobs": None, "stop": self.stop_sequences}
        return Task([self.chat()], [self.params(rules, **more)], names=self.names, prompt_field="messages")


def _text(blocks: list[TextBlock]) -> str:
    return "".join(block.text for block in blocks)


@dataclass
class MessagesAnswer(Answer):
    id: str  # msg_...
    model: str
    prompt_tokens: int
    _begun: bool = False

    def whole(self, done: list[Completion]) -> dict[str, Any]:
        first = done[0]
        return self._message(first.cached_tokens) | {
            "content": [{"type": "text", "text": first.text}],
            **_ending(first),
            "usage": self._usage(first.cached_tokens, first.completion_tokens),
        }

    def events(self, chunk: StreamChunk) -> list[bytes]:
        found: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            found.append({"type": "message_start", "message": self._message(chunk.cached_tokens)})
            found.append({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
        if chunk.text:
            delta = {"type": "text_delta", "text": chunk.text}
            found.append({"type": "content_block_delta", "index": 0, "delta": delta})
        if (done := chunk.completion) is not None:
            found.append({"type": "content_block_stop", "index": 0})
            usage = {"output_tokens": done.completion_tokens}
            found.append({"type": "message_delta", "delta": _ending(done), "usage": usage})
            found.append({"type": "message_stop"})
        return list(map(named_event, found))

    def error(self, error: ApiError) -> bytes:
        return named_event(error.anthropic_body())

    def _message(self, cached: int) -> dict[str, Any]:
        """A message that has just begun."""
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": [],
            "stop_reason": None, "stop_sequence": None, "usage": self._usage(cached, 0),
        }  # fmt: skip

    def _usage(self, cached: int, output: int) -> dict[str, int]:
        """As Anthropic counts: what was cached is not a part of `input_tokens`."""
        return {
            "input_tokens": self.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output,
        }


def _ending(done: Completion) -> dict[str, Any]:
    if done.finish_reason["type"] == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    matched = done.finish_reason.get("matched")
    if isinstance(matched, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": "end_turn", "stop_sequence": None}
