"""The answer to `/v1/messages`: a list of blocks of text, thoughts and calls, whole or as Anthropic's events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specjax.engine import Completion, StreamChunk
from specjax.serve.calls import strict_json
from specjax.serve.errors import ApiError
from specjax.serve.parts import Begin, Change, End, Grow, Part, Parts
from specjax.serve.reply import Reply
from specjax.serve.responses import Answer, named_event

DELTAS = {  # the type of a delta, and the name of its text
    "text": ("text_delta", "text"),
    "thoughts": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


@dataclass
class MessagesAnswer(Answer):
    id: str  # msg_...
    model: str
    prompt_tokens: int
    reply: Reply | None = None  # None: the text as it is
    _begun: bool = False

    def __post_init__(self) -> None:
        self._parts = Parts(self.reply)

    def whole(self, done: list[Completion]) -> dict[str, Any]:
        first = done[0]
        self._parts.feed(first.text, last=True)
        return self._message(first.cached_tokens) | {
            "content": [_block(part, part.text) for part in self._parts.found],
            **self._ending(first),
            "usage": self._usage(first.cached_tokens, first.completion_tokens),
        }

    def events(self, chunk: StreamChunk) -> list[bytes]:
        found: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            found.append({"type": "message_start", "message": self._message(chunk.cached_tokens)})
        done = chunk.completion
        found += map(_changed, self._parts.feed(chunk.text, last=done is not None))
        if done is not None:
            usage = {"output_tokens": done.completion_tokens}
            found.append({"type": "message_delta", "delta": self._ending(done), "usage": usage})
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

    def _ending(self, done: Completion) -> dict[str, Any]:
        if done.finish_reason["type"] == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        matched = done.finish_reason.get("matched")
        if isinstance(matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        return {"stop_reason": "tool_use" if self._parts.has_called else "end_turn", "stop_sequence": None}


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
    becomes the member `INVALID_JSON`, Anthropic's name for it."""
    try:
        found = strict_json(text or "{}", partial=True)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": text}


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
