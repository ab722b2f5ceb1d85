"""The answer to `/v1/responses`: a list of messages, calls and reasoning, whole or as OpenAI's events."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from specjax.engine import Completion, StreamChunk
from specjax.serve.errors import ApiError
from specjax.serve.openai_responses import ResponsesRequest
from specjax.serve.parts import Begin, Change, End, Grow, Part, Parts
from specjax.serve.responses import Answer, named_event, reasoning_tokens
from specjax.serve.task import Task

PREFIXES = {"text": "msg", "call": "fc", "thoughts": "rs"}  # of the ids of items


@dataclass
class ResponsesAnswer(Answer):
    id: str  # resp_...
    model: str
    body: ResponsesRequest
    task: Task
    thinking: bool = False  # the prompt has begun the model's thoughts
    end_think: int | None = None  # the token that ends them
    created: int = field(default_factory=lambda: int(time.time()))
    _number: int = 0  # of the next event

    def __post_init__(self) -> None:
        self._parts = Parts(None if self.task.reply is None else self.task.reply.reply(thinking=self.thinking))

    def whole(self, done: list[Completion]) -> dict[str, Any]:
        self._parts.feed(done[0].text, last=True)
        return self._response(done[0])

    def events(self, chunk: StreamChunk) -> list[bytes]:
        """The events of one chunk, which follow one another as OpenAI's do."""
        found, done = [], chunk.completion
        if not self._number:
            response = self._response(None)
            found += [self._event("response.created", response=response)]
            found += [self._event("response.in_progress", response=response)]
        for change in self._parts.feed(chunk.text, last=done is not None):
            found += self._changed(change, done)
        if done is not None:
            found += [self._event(f"response.{_status(done)}", response=self._response(done))]
        return found

    def error(self, error: ApiError) -> bytes:
        problem = error.body()["error"]
        return self._event("error", code=problem["code"], message=problem["message"], param=problem["param"])

    def _changed(self, change: Change, done: Completion | None) -> list[bytes]:
        index, part = change.number, change.part
        at: dict[str, Any] = {"output_index": index, "item_id": self._item_id(index, part)}
        inside = at | {"content_index": 0}
        match part.kind:
            case "call":
                name, about = "function_call_arguments", at
            case "text":
                name, about = "output_text", inside
            case "thoughts":
                name, about = "reasoning_text", inside
        has_logprobs = {"logprobs": []} if part.kind == "text" else {}
        match change:
            case Begin():
                item = self._item(index, part, "in_progress")
                found = [self._event("response.output_item.added", output_index=index, item=item)]
                if part.kind != "call":
                    found += [self._event("response.content_part.added", **inside, part=_content(part, ""))]
            case Grow():
                found = [self._event(f"response.{name}.delta", **about, delta=change.text, **has_logprobs)]
            case End():
                whole = {"arguments": part.text, "name": part.name} if part.kind == "call" else {"text": part.text}
                found = [self._event(f"response.{name}.done", **about, **whole, **has_logprobs)]
                if part.kind != "call":
                    found += [self._event("response.content_part.done", **inside, part=_content(part, part.text))]
                item = self._item(index, part, self._part_status(part, done))
                found += [self._event("response.output_item.done", output_index=index, item=item)]
        return found

    def _event(self, kind: str, **more: Any) -> bytes:
        self._number += 1
        return named_event({"type": kind, "sequence_number": self._number - 1, **more})

    def _item_id(self, index: int, part: Part) -> str:
        return f"{PREFIXES[part.kind]}_{self.id.removeprefix('resp_')}{index or ''}"

    def _item(self, index: int, part: Part, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(index, part), "status": status}
        begun = status == "in_progress"
        match part.kind:
            case "call":
                arguments = "" if begun else part.text
                return item | {"type": "function_call", "call_id": part.id, "name": part.name, "arguments": arguments}
            case "text":
                content = [] if begun else [_content(part, part.text)]
                return item | {"type": "message", "role": "assistant", "content": content}
            case "thoughts":
                content = [] if begun else [_content(part, part.text)]
                return item | {"type": "reasoning", "summary": [], "content": content}

    def _part_status(self, part: Part, done: Completion | None) -> str:
        """Status of a part that has ended: only an answer's last part, or a call that is cut off, may be incomplete."""
        if part.is_cut:
            return "incomplete"
        return "completed" if done is None or part is not self._parts.found[-1] else _status(done)

    def _response(self, done: Completion | None) -> dict[str, Any]:
        """The response, with all its items once it is complete."""
        sampling, body = self.task.sampling[0], self.body
        status = "in_progress" if done is None else _status(done)
        items: list[dict[str, Any]] = []
        if done is not None:
            items = [self._item(i, part, self._part_status(part, done)) for i, part in enumerate(self._parts.found)]
        sent = body.model_dump(mode="json", include={"tools"}, exclude_none=True)
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
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": _format(body)},
            "tool_choice": _choice(body),
            "tools": [tool | {"strict": tool.get("strict", False)} for tool in sent.get("tools", ())],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if done is None else self._usage(done),
            "user": body.user,
            "seed": None if done is None else done.seed,
        }

    def _usage(self, done: Completion) -> dict[str, Any]:
        thought = any(part.kind == "thoughts" for part in self._parts.found)
        return {
            "input_tokens": done.prompt_tokens,
            "input_tokens_details": {"cached_tokens": done.cached_tokens},
            "output_tokens": done.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens([done], self.end_think) if thought else 0},
            "total_tokens": done.prompt_tokens + done.completion_tokens,
        }


def _content(part: Part, text: str) -> dict[str, Any]:
    if part.kind == "thoughts":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(done: Completion) -> str:
    return "incomplete" if done.finish_reason["type"] == "length" else "completed"


def _format(body: ResponsesRequest) -> dict[str, Any]:
    if body.text is None or body.text.format is None:
        return {"type": "text"}
    found = body.text.format.model_dump(mode="json", exclude_none=True)
    return found if found["type"] != "json_schema" else {"name": "", **found}


def _choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice
    if choice is None:
        return "auto"
    return choice.type if choice.function is None else {"type": "function", "name": choice.function.name}
