"""Anthropic's Messages interface, `/v1/messages` and `/v1/messages/count_tokens`: bodies, answers, errors and routes.

If the last message is the assistant's, the answer continues it.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from fastapi import FastAPI, Request
from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from specjax.checkpoint.prompts import Chat
from specjax.engine import Completion, StreamChunk
from specjax.engine.chat.calls import strict_json
from specjax.engine.chat.message_format import AnswerForm, Begin, Change, Effort, End, Grow, Part, Reply, ReplyOptions
from specjax.engine.grammar import Grammar
from specjax.serve.app import STREAM, Extension, Generation, Queued, while_connected
from specjax.serve.dialects.answer_items import Items, assistant_turns, earlier_call, named_event, text_of
from specjax.serve.errors import ApiError
from specjax.serve.fields import (
    UNSUPPORTED,
    Body,
    Flag,
    Integer,
    Metadata,
    StopStrings,
    Text,
    Values,
    texts,
)
from specjax.serve.openai_answers import Answer
from specjax.serve.openai_requests import (
    EFFORT,
    FIELDS,
    ChatFields,
    JsonSchemaFormat,
    NewTokens,
    SamplingFields,
    TaskBody,
    chat_task,
    check_model,
    with_tools,
)
from specjax.serve.tokenising import Rules, Task, refusal
from specjax.serve.tools import (
    Choice,
    FunctionChoice,
    FunctionName,
    FunctionTool,
    Tool,
    ToolFields,
    ToolList,
    object_schema,
)

PATH = "/v1/messages"
ERROR_TYPES = {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}  # by status
NOT_BUILT: dict[str, Values] = {
    "container": (), "mcp_servers": ([],),
}  # fmt: skip


class Block(Body):
    cache_control: Any = None  # not used: the prefix cache is always on


class TextBlock(Block):
    unsupported: ClassVar[Mapping[str, Values]] = {"citations": ([],)}

    type: Literal["text"]
    text: Text


TextOrBlocks = Annotated[
    Items[TextBlock],
    texts("text blocks", lambda text: {"type": "text", "text": text}, json_schema_input_type=Text | Items[TextBlock]),
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


class RedactedBlock(Block):
    """Thoughts that another provider encrypted, and that no template can render."""

    type: Literal["redacted_thinking"]
    data: Any = None  # not used


Blocks = Items[
    Annotated[TextBlock | CallBlock | ResultBlock | ThoughtsBlock | RedactedBlock, Field(discriminator="type")]
]
BELONGS = dict.fromkeys(("tool_use", "thinking", "redacted_thinking"), "assistant") | {"tool_result": "user"}


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
        """Yields a message for each result of a call, then the message itself."""
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
                    yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text_of(block.content or ())}
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

    def as_tool(self) -> Tool:
        function = FunctionTool.model_construct(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool.model_construct(type="function", function=function)


class AnthropicChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = Field(None, description="Only with the type `tool`.")
    disable_parallel_tool_use: Flag | None = Field(None, description="true = at most one call.")

    @model_validator(mode="after")
    def _check(self) -> AnthropicChoice:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("name", "must have a name if, and only if, its type is tool")
        return self


class Thinking(Body):
    type: Literal["disabled", "adaptive", "enabled"]
    budget_tokens: NewTokens | None = Field(
        None, description="Only with the type `enabled`: most tokens of thoughts, after which their end is forced."
    )
    display: Literal["summarized", "omitted"] | None = Field(None, description="omitted: `thinking` is empty.")

    @model_validator(mode="after")
    def _check(self) -> Thinking:
        if self.budget_tokens is not None and self.type != "enabled":
            raise PydanticCustomError("budget", "has budget_tokens, which needs the type enabled")
        return self


class OutputFormat(JsonSchemaFormat):
    type: Literal["json_schema"]


class OutputConfig(Body):
    unsupported: ClassVar[Mapping[str, Values]] = {"task_budget": ()}

    effort: Effort | None = Field(None, description=EFFORT)
    format: OutputFormat | None = None


class CountTokensRequest(ChatFields):
    unsupported = NOT_BUILT

    model: Text | None = None
    system: TextOrBlocks | None = None
    messages: Annotated[Items[AnthropicMessage], Field(min_length=1)]
    tools: ToolList[AnthropicTool] | None = Field(
        None, description="Functions that the model may call; their names differ."
    )
    tool_choice: AnthropicChoice | None = Field(
        None, description="Default: auto. none = leave `tools` out of the prompt; any, or a tool = call one."
    )
    thinking: Thinking | None = Field(
        None, description="Sets `enable_thinking` of the chat template: enabled and adaptive = true, disabled = false."
    )
    output_config: OutputConfig | None = Field(None, description="JSON is written on one line.")
    output_format: OutputFormat | None = Field(None, description="The older name of `output_config.format`.")
    cache_control: Any = None  # not used

    def functions(self) -> ToolFields:
        """The functions in the form of chat completions."""
        choice = self.tool_choice or AnthropicChoice(type="auto", name=None, disable_parallel_tool_use=None)
        kind = {"auto": "auto", "any": "required", "tool": "function", "none": "none"}[choice.type]
        function = None if choice.name is None else FunctionChoice.model_construct(name=choice.name)
        return ToolFields.model_construct(
            tools=[tool.as_tool() for tool in self.tools or ()],
            tool_choice=Choice.model_construct(type=kind, function=function),
            parallel_tool_calls=not choice.disable_parallel_tool_use,
        )

    def chat(self, *, sanitize: bool) -> Chat:
        system = [] if self.system is None else [{"role": "system", "content": text_of(self.system)}]
        messages = assistant_turns(turn for message in self.messages for turn in message.for_template())
        last = messages[-1]
        variables = {"continue_final_message": last["role"] == "assistant" and not last.get("tool_calls")}
        if self.thinking is not None:
            variables["enable_thinking"] = self.thinking.type != "disabled"
        return self.sanitized(Chat([*system, *messages], variables), sanitize)

    def effort(self, form: AnswerForm) -> tuple[str, str | None]:
        """The field with the effort of reasoning, and its value."""
        effort = self.output_config and self.output_config.effort
        if effort == "high" and form.efforts is not None and "high" not in form.efforts:
            effort = None  # the default of this interface
        return "output_config", effort


class MessagesRequest(CountTokensRequest, SamplingFields, TaskBody):
    asked = FIELDS | {
        "output_config": lambda config: config.format and Grammar.json(config.format.schema),
        "output_format": lambda format: Grammar.json(format.schema),
    }
    unsupported = UNSUPPORTED | NOT_BUILT

    max_tokens: NewTokens = Field(description="New tokens.")
    stop_sequences: StopStrings | None = Field(
        None, description="The text ends before a stop sequence. Separated reasoning may hold one."
    )
    stop: None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    n: Annotated[Integer, Field(ge=1, le=1)] | None = None
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
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            more["thinking_token_budget"] = self.thinking.budget_tokens
        make = functools.partial(self.params, rules, **more)
        chat = functools.partial(self.chat, sanitize=rules.sanitize_control_tokens)
        return chat_task(self, self.functions(), chat, rules, make, "messages", self.effort(rules.form))


DELTAS = {  # kind of a part -> type of its deltas, and name of their text
    "text": ("text_delta", "text"),
    "thoughts": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


@dataclass
class MessagesAnswer(Answer):
    id: str  # msg_...
    model: str
    prompt_tokens: int
    reply: Reply
    omits_thoughts: bool = False  # their blocks are empty
    _begun: bool = False

    def whole(self, done: list[Completion]) -> dict[str, Any]:
        first = done[0]
        self.reply.changes(first.text, last=True)
        return self._message(first.cached_tokens) | {
            "content": [_block(part, self._shown(part, part.text)) for part in self.reply.parts],
            **self._ending(first),
            "usage": self._usage(first.cached_tokens, first.completion_tokens),
        }

    def events(self, chunk: StreamChunk) -> list[bytes]:
        events: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            events.append({"type": "message_start", "message": self._message(chunk.cached_tokens)})
        done = chunk.completion
        for change in self.reply.changes(chunk.text, last=done is not None):
            if not isinstance(change, Grow) or self._shown(change.part, change.text):
                events.append(_changed(change))
        if done is not None:
            usage = {"output_tokens": done.completion_tokens}
            events.append({"type": "message_delta", "delta": self._ending(done), "usage": usage})
            events.append({"type": "message_stop"})
        return list(map(named_event, events))

    def error(self, error: ApiError) -> bytes:
        return named_event(error_body(error))

    def _message(self, cached: int) -> dict[str, Any]:
        """A message without content."""
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": [],
            "stop_reason": None, "stop_sequence": None, "usage": self._usage(cached, 0),
        }  # fmt: skip

    def _shown(self, part: Part, text: str) -> str:
        return "" if part.kind == "thoughts" and self.omits_thoughts else text

    def _usage(self, cached: int, output: int) -> dict[str, int]:
        """The usage in Anthropic's form: `input_tokens` excludes cached tokens."""
        return {
            "input_tokens": self.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output,
        }

    def _ending(self, done: Completion) -> dict[str, Any]:
        if done.finish_reason["type"] == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        matched = done.finish_reason.get("matched")
        if isinstance(matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        return {"stop_reason": "tool_use" if self.reply.has_called else "end_turn", "stop_sequence": None}


def _block(part: Part, text: str) -> dict[str, Any]:
    match part.kind:
        case "text":
            return {"type": "text", "text": text}
        case "thoughts":
            return {"type": "thinking", "thinking": text, "signature": ""}
        case "call":
            return {"type": "tool_use", "id": part.id, "name": part.name, "input": _input(text)}


def _input(text: str) -> dict[str, Any]:
    """Arguments as an object. If they are cut off, the last member is left out, as in Anthropic's clients; invalid JSON
    becomes the member `INVALID_JSON`, as in Anthropic's interface."""
    try:
        value = strict_json(text or "{}", partial=True)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}


def _changed(change: Change) -> dict[str, Any]:
    match change:
        case Begin():
            return {"type": "content_block_start", "index": change.number, "content_block": _block(change.part, "")}
        case Grow():
            kind, name = DELTAS[change.part.kind]
            delta = {"type": kind, name: change.text}
            return {"type": "content_block_delta", "index": change.number, "delta": delta}
        case End():
            return {"type": "content_block_stop", "index": change.number}


def error_body(error: ApiError) -> dict[str, Any]:
    """Anthropic's form of an error, with OpenAI's error inside."""
    problem = error.body()["error"]
    if error.status != 401:
        default = "api_error" if error.status >= 500 else "invalid_request_error"
        problem["type"] = ERROR_TYPES.get(error.status, default)
    return {"type": "error", "error": problem}


def add_routes(app: FastAPI, generation: Generation) -> None:
    model = generation.model

    def answer(body: MessagesRequest, queued: Queued) -> Answer:
        reply = (queued.task.reply or ReplyOptions()).reply(thinking=queued.thinking)
        omits = body.thinking is not None and body.thinking.display == "omitted"
        return MessagesAnswer(queued.id, model, len(queued.sequences[0].prompt), reply, omits)

    @app.post(PATH, tags=["Anthropic"], responses=STREAM)
    async def messages(request: Request, body: MessagesRequest) -> Response:
        return await generation.respond(request, body, f"msg_{secrets.token_hex(12)}", functools.partial(answer, body))

    @app.post(f"{PATH}/count_tokens", tags=["Anthropic"])
    async def count_tokens(request: Request, body: CountTokensRequest) -> dict[str, Any]:
        check_model(body.model, model)
        form, engine = generation.form, generation.runner.engine
        plain = body.chat(sanitize=generation.settings.sanitize_control_tokens)
        chat = with_tools(plain, form, body.functions().chosen(form), body.effort(form))
        try:
            job = generation.tokenising.submit(request.state.reading.size, lambda: len(engine.encode(chat)))
            return {"input_tokens": await while_connected(request, asyncio.wrap_future(job))}
        except ValueError as error:
            raise refusal(error, {}, "messages") from error


EXTENSION = Extension(add_routes, error_forms={PATH: error_body})
