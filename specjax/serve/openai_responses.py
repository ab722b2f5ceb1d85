"""OpenAI's Responses interface, `/v1/responses`: text in, text out. A thin layer over the chat.

Nothing is stored, so there is no `previous_response_id`; tools and structured output are those of chat completions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from specjax.engine import Completion, StreamChunk
from specjax.engine.intake import Chat
from specjax.serve import structured
from specjax.serve.errors import ApiError
from specjax.serve.fields import UNSUPPORTED, Body, Flag, Integer, Metadata, Salt, Text, Values, at_most, texts
from specjax.serve.messages import MAX_MESSAGES
from specjax.serve.protocol import MISPLACED, SALT, NewTokens, SamplingFields, TaskBody, check_model
from specjax.serve.responses import Answer, named_event
from specjax.serve.task import Rules, Task


class InputPart(Body):
    place = "input[].content[]."

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: Any = None  # of an answer that a client sends back; not used
    logprobs: Any = None


InputParts = Annotated[list[InputPart], Field(max_length=MAX_MESSAGES, fail_fast=True), at_most(MAX_MESSAGES)]


class InputItem(Body):
    place = "input[]."

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[
        InputParts,
        texts("text parts", lambda text: {"type": "text", "text": text}, json_schema_input_type=Text | InputParts),
    ]
    id: Any = None  # of an answer that a client sends back; not used
    status: Any = None
    phase: Any = None

    def for_template(self) -> dict[str, Any]:
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "".join(part.text for part in self.content)}


InputItems = Annotated[
    list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), at_most(MAX_MESSAGES)
]


class ResponsesRequest(SamplingFields, TaskBody):
    unsupported: ClassVar[Mapping[str, Values]] = UNSUPPORTED | structured.UNSUPPORTED | {
        "json_schema": (),
        "background": (False,), "context_management": ([],), "conversation": (), "include": ([],),
        "max_tool_calls": (), "moderation": (), "parallel_tool_calls": (True, False), "previous_response_id": (),
        "prompt": (), "reasoning": ({},), "stream_options": ({}, {"include_obfuscation": False}),
        "text": ({}, {"format": {"type": "text"}}, {"verbosity": "medium"}), "top_logprobs": (0,),
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

    model: Text | None = Field(None, json_schema_extra={"enum": "$models"})
    input: Annotated[
        InputItems,
        texts("input items", lambda text: {"role": "user", "content": text}, json_schema_input_type=Text | InputItems),
    ]
    instructions: Text | None = Field(None, description="A system message before the input.")
    max_output_tokens: NewTokens | None = Field(None, description="New tokens. Default: what fits.")
    stream: Flag | None = None
    n: Annotated[Integer, Field(ge=1, le=1)] | None = None
    cache_salt: Salt | None = Field(None, description=SALT)
    # Accepted, and not used.
    metadata: Metadata | None = None
    user: Text | None = None
    store: Flag | None = Field(None, description="Nothing is stored.")
    service_tier: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None

    @property
    def names(self) -> dict[str, str]:
        return super().names | {"max_new_tokens": "max_output_tokens"}

    def task(self, rules: Rules, reading: Any) -> Task:
        check_model(self.model, rules.model)
        params = self.params(rules, max_new_tokens=self.max_output_tokens, logprobs=None)
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        chat = Chat([*system, *(item.for_template() for item in self.input)])
        return Task([chat], [params], names=self.names, prompt_field="input")


@dataclass
class ResponsesAnswer(Answer):
    id: str  # resp_...
    model: str
    body: ResponsesRequest
    task: Task
    created: int = field(default_factory=lambda: int(time.time()))
    _number: int = 0  # of the next event
    _text: str = ""

    def whole(self, done: list[Completion]) -> dict[str, Any]:
        return self._response(self._message(done[0].text, _status(done[0])), done[0])

    def events(self, chunk: StreamChunk) -> list[bytes]:
        """The events of one chunk, which follow one another as OpenAI's do."""
        found, part = [], {"output_index": 0, "content_index": 0, "item_id": self._item}
        if not self._number:
            response = self._response(None, None)
            found += [self._event("response.created", response=response)]
            found += [self._event("response.in_progress", response=response)]
            item = self._message(None, "in_progress")
            found += [self._event("response.output_item.added", output_index=0, item=item)]
            found += [self._event("response.content_part.added", **part, part=_part(""))]
        if chunk.text:
            self._text += chunk.text
            found += [self._event("response.output_text.delta", **part, delta=chunk.text, logprobs=[])]
        if (done := chunk.completion) is not None:
            found += [self._event("response.output_text.done", **part, text=self._text, logprobs=[])]
            found += [self._event("response.content_part.done", **part, part=_part(self._text))]
            item = self._message(self._text, _status(done))
            found += [self._event("response.output_item.done", output_index=0, item=item)]
            found += [self._event(f"response.{_status(done)}", response=self._response(item, done))]
        return found

    def error(self, error: ApiError) -> bytes:
        problem = error.body()["error"]
        return self._event("error", code=problem["code"], message=problem["message"], param=problem["param"])

    @property
    def _item(self) -> str:
        return f"msg_{self.id.removeprefix('resp_')}"

    def _event(self, kind: str, **more: Any) -> bytes:
        self._number += 1
        return named_event({"type": kind, "sequence_number": self._number - 1, **more})

    def _message(self, text: str | None, status: str) -> dict[str, Any]:
        content = [] if text is None else [_part(text)]
        return {"id": self._item, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, item: dict[str, Any] | None, done: Completion | None) -> dict[str, Any]:
        """The response with its message, once that is complete."""
        sampling, body = self.task.sampling[0], self.body
        status = "in_progress" if done is None else _status(done)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": [] if item is None else [item],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if done is None else _usage(done),
            "user": body.user,
            "seed": None if done is None else done.seed,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(done: Completion) -> str:
    return "incomplete" if done.finish_reason["type"] == "length" else "completed"


def _usage(done: Completion) -> dict[str, Any]:
    return {
        "input_tokens": done.prompt_tokens,
        "input_tokens_details": {"cached_tokens": done.cached_tokens},
        "output_tokens": done.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": done.prompt_tokens + done.completion_tokens,
    }
