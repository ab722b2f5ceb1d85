"""OpenAI's Responses interface, `/v1/responses`: request bodies, the answer and the route.

The server stores nothing, so there is no `previous_response_id`. A client can send the messages, calls and reasoning of
an answer back as `input`.
"""

from __future__ import annotations

import functools
import secrets
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

from fastapi import FastAPI, Request
from pydantic import BeforeValidator, Discriminator, Field, Tag
from starlette.responses import Response

from specjax.checkpoint.prompts import Chat
from specjax.engine import Completion, StreamChunk
from specjax.engine.chat.calls import strict_json
from specjax.engine.chat.message_format import PLAIN, AnswerForm, Begin, Change, Effort, End, Grow, Part, ReplyOptions
from specjax.engine.grammar import Grammar
from specjax.serve.app import STREAM, Extension, Generation, Queued
from specjax.serve.dialects.answer_items import Items, assistant_turns, earlier_call, named_event, text_of
from specjax.serve.errors import ApiError, bad_request
from specjax.serve.fields import UNSUPPORTED, Body, Flag, Integer, Text, Values, texts
from specjax.serve.openai_answers import Answer
from specjax.serve.openai_requests import (
    EFFORT,
    FIELDS,
    CallArguments,
    ChatFields,
    JsonSchemaFormat,
    NewTokens,
    SamplingFields,
    TaskBody,
    UnusedFields,
    chat_task,
    check_model,
    grammar_of_type,
)
from specjax.serve.tokenising import Rules, Task
from specjax.serve.tools import Choice, FunctionName, FunctionTool, Tool, ToolFields, ToolList, as_choice


class InputPart(Body):
    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: Any = None  # part of an answer that a client sends back; not used
    logprobs: Any = None


TextOrParts = Annotated[
    Items[InputPart],
    texts("text parts", lambda text: {"type": "text", "text": text}, json_schema_input_type=Text | Items[InputPart]),
]


class Item(Body):
    """An item of the conversation."""

    id: Any = None  # part of an answer that a client sends back; not used
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
        return {"role": role, "content": text_of(self.content)}


class InputCall(Item):
    type: Literal["function_call"]
    call_id: Text
    name: Text
    namespace: Text | None = None
    arguments: CallArguments = None

    def for_template(self) -> dict[str, Any]:
        return earlier_call(self.call_id, full_name(self.namespace, self.name), self.arguments)


class InputCustomCall(Item):
    type: Literal["custom_tool_call"]
    call_id: Text
    name: Text
    input: Text

    def for_template(self) -> dict[str, Any]:
        return earlier_call(self.call_id, self.name, {"input": self.input})


class InputResult(Item):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Text
    output: TextOrParts

    def for_template(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": text_of(self.output)}


class ReasoningPart(Body):
    type: Literal["reasoning_text", "text"]
    text: Text


class InputReasoning(Item):
    type: Literal["reasoning"]
    encrypted_content: Any = None  # of another provider; not used
    summary: Any = None  # not used
    content: Items[ReasoningPart] | None = None

    def for_template(self) -> dict[str, Any]:
        thoughts = text_of(self.content or ())
        return {"role": "assistant", "content": ""} | ({"reasoning_content": thoughts} if thoughts else {})


def _type(item: Any) -> Any:
    if isinstance(item, Item):
        return item.type  # pyright: ignore[reportAttributeAccessIssue]
    return (item.get("type") or "message") if isinstance(item, dict) else "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCustomCall, Tag("custom_tool_call")]
    | Annotated[InputResult, Tag("function_call_output")]
    | Annotated[InputResult, Tag("custom_tool_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(_type),
]
InputItems = Annotated[Items[InputItem], Field(min_length=1)]


class Origin(NamedTuple):
    """A function as the request names it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class FlatTool(FunctionTool):
    type: Literal["function"]

    def functions(self) -> list[tuple[FunctionTool, Origin]]:
        return [(self, Origin(self.name))]


class NamespaceTool(Body):
    """A group of functions, such as those of an MCP server. A call names the group and the function."""

    type: Literal["namespace"]
    name: FunctionName
    description: Text | None = Field(None, description="Part of the first function's description.")
    tools: ToolList[FlatTool]

    def functions(self) -> list[tuple[FunctionTool, Origin]]:
        pairs, about = [], self.description
        for tool in self.tools:
            names = {"name": full_name(self.name, tool.name), "description": _paragraphs(about, tool.description)}
            pairs.append((tool.model_copy(update=names), Origin(tool.name, self.name)))
            about = None
        return pairs


class CustomFormat(Body):
    type: Literal["text", "grammar"]
    syntax: Text | None = None
    definition: Text | None = None


class CustomTool(Body):
    """A function whose only argument is a text. The model sees its grammar, which is not enforced."""

    type: Literal["custom"]
    name: FunctionName
    description: Text | None = None
    format: CustomFormat | None = Field(None, description="A grammar is part of the description.")

    def functions(self) -> list[tuple[FunctionTool, Origin]]:
        grammar = self.format and self.format.definition and f"Grammar of the input:\n{self.format.definition}"
        about = _paragraphs(self.description, grammar)
        schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        function = FunctionTool.model_construct(name=self.name, description=about, parameters=schema, strict=None)
        return [(function, Origin(self.name, is_custom=True))]


def full_name(namespace: str | None, name: str) -> str:
    """The name of a function in prompts: `mcp__files` and `read` give `mcp__files__read`."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def _paragraphs(*texts: str | None) -> str | None:
    return "\n\n".join(filter(None, texts)) or None


def _custom_input(arguments: str) -> str:
    """The text of a custom tool's call. Arguments without one are the text themselves."""
    try:
        value = strict_json(arguments or "{}", partial=True)
    except ValueError:
        return arguments
    text = value.get("input", "") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


class FlatChoice(Body):
    type: Literal["function"]
    name: FunctionName


FlatToolChoice = Annotated[
    Choice,
    BeforeValidator(
        functools.partial(as_choice, flat=True), json_schema_input_type=Literal["none", "auto", "required"] | FlatChoice
    ),
]
FlatTools = ToolList[Annotated[FlatTool | NamespaceTool | CustomTool, Field(discriminator="type")]]


class TextFormat(JsonSchemaFormat):
    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Body):
    unsupported: ClassVar[Mapping[str, Values]] = {"verbosity": ("medium",)}

    format: TextFormat | None = None

    def chosen(self) -> Grammar | None:
        if self.format is None:
            return None
        if self.format.type == "json_schema" and self.format.schema is None:
            raise bad_request("text.format.schema is required", "text")
        return grammar_of_type(self.format.type, self.format.schema)


class ReasoningOptions(Body):
    unsupported: ClassVar[Mapping[str, Values]] = {"summary": ("auto",), "generate_summary": ("auto",)}

    effort: Effort | None = Field(None, description=EFFORT)


class ResponseStreamOptions(Body):
    unsupported: ClassVar[Mapping[str, Values]] = {"include_obfuscation": (False,)}

    reasoning_summary_delivery: Any = None  # not used: there are no summaries


Included: TypeAlias = Literal[
    "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]  # fmt: skip


class ResponsesRequest(SamplingFields, TaskBody, UnusedFields, ChatFields):
    asked = FIELDS | {"text": TextOptions.chosen}
    unsupported: ClassVar[Mapping[str, Values]] = UNSUPPORTED | {
        "background": (False,), "context_management": ([],), "conversation": (),
        "max_tool_calls": (), "moderation": (), "previous_response_id": (),
        "truncation": ("disabled",),
    }  # fmt: skip

    model: Text | None = None
    input: Annotated[
        InputItems,
        texts("input items", lambda text: {"role": "user", "content": text}, json_schema_input_type=Text | InputItems),
    ]
    reasoning: ReasoningOptions | None = None
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
    # Accepted, and not used.
    include: Annotated[list[Included], Field(max_length=16, fail_fast=True)] | None = Field(
        None, description="Parts that no answer of this server has: encrypted reasoning, results of hosted tools."
    )
    stream_options: ResponseStreamOptions | None = None
    prompt_cache_retention: Text | None = None

    @property
    def names(self) -> dict[str, str]:
        return super().names | {"max_new_tokens": "max_output_tokens"}

    def task(self, rules: Rules) -> Task:
        check_model(self.model, rules.model)
        tools = [Tool.model_construct(type="function", function=function) for function, _ in self.functions()]
        functions = ToolFields.model_construct(
            tools=tools, tool_choice=self.tool_choice, parallel_tool_calls=self.parallel_tool_calls
        )
        make = functools.partial(self.params, rules, max_new_tokens=self.max_output_tokens, logprobs=None)
        effort = self.reasoning.effort if self.reasoning is not None else None
        chat = functools.partial(self._chat, sanitize=rules.sanitize_control_tokens)
        return chat_task(self, functions, chat, rules, make, "input", ("reasoning", effort))

    def functions(self) -> list[tuple[FunctionTool, Origin]]:
        """The functions of all tools, with the names that prompts have."""
        return [pair for tool in self.tools or () for pair in tool.functions()]

    def _chat(self, *, sanitize: bool) -> Chat:
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        items: Iterable[Item] = self.input
        return self.sanitized(Chat([*system, *assistant_turns(item.for_template() for item in items)]), sanitize)


PREFIXES = {"text": "msg", "call": "fc", "thoughts": "rs"}  # prefixes of the ids of items
NAMES = {"text": "output_text", "call": "function_call_arguments", "thoughts": "reasoning_text"}  # in event types


@dataclass
class ResponsesAnswer(Answer):
    id: str  # resp_...
    model: str
    body: ResponsesRequest
    task: Task
    thinking: bool = False  # the prompt ends inside reasoning
    form: AnswerForm = PLAIN
    created: int = field(default_factory=lambda: int(time.time()))
    _number: int = 0  # number of the next event

    def __post_init__(self) -> None:
        self._origins = {function.name: origin for function, origin in self.body.functions()}
        self._reply = (self.task.reply or ReplyOptions()).reply(thinking=self.thinking)

    def whole(self, done: list[Completion]) -> dict[str, Any]:
        self._reply.changes(done[0].text, last=True)
        return self._response(done[0])

    def events(self, chunk: StreamChunk) -> list[bytes]:
        """The events of one chunk, in OpenAI's order."""
        events, done = [], chunk.completion
        if not self._number:
            response = self._response(None)
            events += [self._event("response.created", response=response)]
            events += [self._event("response.in_progress", response=response)]
        for change in self._reply.changes(chunk.text, last=done is not None):
            events += self._changed(change, done)
        if done is not None:
            events += [self._event(f"response.{_status(done)}", response=self._response(done))]
        return events

    def error(self, error: ApiError) -> bytes:
        problem = error.body()["error"]
        return self._event("error", code=problem["code"], message=problem["message"], param=problem["param"])

    def _changed(self, change: Change, done: Completion | None) -> list[bytes]:
        index, part, origin = change.number, change.part, self._origin(change.part)
        is_call, is_custom = part.kind == "call", part.kind == "call" and origin.is_custom
        name = "custom_tool_call_input" if is_custom else NAMES[part.kind]
        place: dict[str, Any] = {"output_index": index, "item_id": self._item_id(index, part)}
        place |= {} if is_call else {"content_index": 0}
        more = {"logprobs": []} if part.kind == "text" else {}
        events = list[bytes]()
        match change:
            case Begin():
                item = self._item(index, part, "in_progress")
                events = [self._event("response.output_item.added", output_index=index, item=item)]
                if not is_call:
                    events += [self._event("response.content_part.added", **place, part=_content(part, ""))]
            case Grow() if not is_custom:
                events = [self._event(f"response.{name}.delta", **place, delta=change.text, **more)]
            case End():
                whole = {"arguments": part.text, "name": origin.name} if is_call else {"text": part.text}
                if is_custom:  # so far the text was a part of a JSON string
                    whole = {"input": _custom_input(part.text)}
                    events = [self._event(f"response.{name}.delta", **place, delta=whole["input"])]
                events += [self._event(f"response.{name}.done", **place, **whole, **more)]
                if not is_call:
                    events += [self._event("response.content_part.done", **place, part=_content(part, part.text))]
                item = self._item(index, part, self._part_status(part, done))
                events += [self._event("response.output_item.done", output_index=index, item=item)]
        return events

    def _event(self, kind: str, **more: Any) -> bytes:
        self._number += 1
        return named_event({"type": kind, "sequence_number": self._number - 1, **more})

    def _item_id(self, index: int, part: Part) -> str:
        return f"{PREFIXES[part.kind]}_{self.id.removeprefix('resp_')}{index or ''}"

    def _item(self, index: int, part: Part, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(index, part), "status": status}
        begun = status == "in_progress"
        content = [] if begun else [_content(part, part.text)]
        match part.kind:
            case "call":
                origin, arguments = self._origin(part), "" if begun else part.text
                item |= {"call_id": part.id, "name": origin.name}
                if origin.is_custom:
                    return item | {"type": "custom_tool_call", "input": _custom_input(arguments)}
                item |= {} if origin.namespace is None else {"namespace": origin.namespace}
                return item | {"type": "function_call", "arguments": arguments}
            case "text":
                return item | {"type": "message", "role": "assistant", "content": content}
            case "thoughts":
                return item | {"type": "reasoning", "summary": [], "content": content}

    def _origin(self, part: Part) -> Origin:
        return self._origins.get(part.name, Origin(part.name))

    def _part_status(self, part: Part, done: Completion | None) -> str:
        """The status of a part that has ended: only the last part, or a call that is cut off, may be incomplete."""
        if part.is_cut:
            return "incomplete"
        return "completed" if done is None or part is not self._reply.parts[-1] else _status(done)

    def _response(self, done: Completion | None) -> dict[str, Any]:
        """The response, with all its items once it is complete."""
        sampling, body = self.task.sampling[0], self.body
        status = "in_progress" if done is None else _status(done)
        items: list[dict[str, Any]] = []
        if done is not None:
            items = [self._item(i, part, self._part_status(part, done)) for i, part in enumerate(self._reply.parts)]
        sent = body.model_dump(mode="json", include={"tools"}, exclude_none=True)
        format: dict[str, Any] = {"type": "text"}
        if body.text is not None and body.text.format is not None:
            format = body.text.format.model_dump(mode="json", exclude_none=True)
            format = format if format["type"] != "json_schema" else {"name": "", **format}
        choice: Any = "auto" if body.tool_choice is None else body.tool_choice.type
        if body.tool_choice is not None and body.tool_choice.function is not None:
            choice = {"type": "function", "name": body.tool_choice.function.name}
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
            "output": items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": format},
            "tool_choice": choice,
            "tools": [
                {"strict": False, **tool} if tool["type"] == "function" else tool for tool in sent.get("tools", ())
            ],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if done is None else self._usage(done),
            "user": body.user,
            "seed": None if done is None else done.seed,
        }

    def _usage(self, done: Completion) -> dict[str, Any]:
        has_thought = any(part.kind == "thoughts" for part in self._reply.parts)
        thought = self.form.reasoning_tokens(done.output_ids, self._reply.called) if has_thought else 0
        return {
            "input_tokens": done.prompt_tokens,
            "input_tokens_details": {"cached_tokens": done.cached_tokens},
            "output_tokens": done.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": done.prompt_tokens + done.completion_tokens,
        }


def _content(part: Part, text: str) -> dict[str, Any]:
    if part.kind == "thoughts":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(done: Completion) -> str:
    return "incomplete" if done.finish_reason["type"] == "length" else "completed"


def add_routes(app: FastAPI, generation: Generation) -> None:
    def answer(body: ResponsesRequest, queued: Queued) -> Answer:
        model, form = generation.model, generation.form
        return ResponsesAnswer(queued.id, model, body, queued.task, thinking=queued.thinking, form=form)

    @app.post("/v1/responses", tags=["OpenAI"], responses=STREAM)
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        id = f"resp_{secrets.token_hex(12)}"
        return await generation.respond(request, body, id, functools.partial(answer, body))


EXTENSION = Extension(add_routes)
