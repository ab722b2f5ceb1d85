"""Request bodies without a server: the smallest of each route, values at the limits, and how they are read."""

from __future__ import annotations

import json
from typing import Any

from specjax.serve.dialects.anthropic import MessagesRequest
from specjax.serve.dialects.responses import ResponsesRequest
from specjax.serve.errors import ApiError
from specjax.serve.fields import Reading
from specjax.serve.openai_requests import ChatRequest, CompletionRequest
from specjax.serve.sglang_generate import GenerateRequest
from specjax.serve.tokenising import Rules, Task

CHAT, COMPLETE, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "hello"}]
LEAST: dict[str, dict[str, Any]] = {CHAT: {"messages": HELLO}, COMPLETE: {"prompt": "x"}, GENERATE: {"text": "x"}}
EVERY_LEAST = LEAST | {RESPONSES: {"input": "hello"}, MESSAGES: {"messages": HELLO, "max_tokens": 9}}
KINDS: dict[str, type] = {
    CHAT: ChatRequest, COMPLETE: CompletionRequest, GENERATE: GenerateRequest, RESPONSES: ResponsesRequest,
    MESSAGES: MessagesRequest,
}  # fmt: skip
RULES = Rules("toy", 516, 128, 127, {})

EDGES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3.0, 2.5, 127, 128, 129, 2**31, 2**53, 2**63 - 1, 2**63, 10**400, 1e-320, 1e4,
    1e308, -0.0, -2, -100, -101, "", "x", "x" * 256, "x" * 300, "default", "auto", "\x00", [], {}, [[]], [None], [0],
    [264], [265], [5, 6.0], [0] * 127, [0] * 200, [[0], [1]], [[0], "a"], ["a", "b"], [""], ["a"] * 17, [1] * 1025,
    {"5": 1e-320}, {"-0": 1}, {"264": 100}, {"265": 1}, {"1_0": 1}, {"5": 101}, {"include_usage": True},
    {"type": "text"}, [{"role": "user", "content": []}], [{"role": "assistant", "content": None}],
    [{"role": "system", "content": [{"type": "text", "text": ""}], "name": "n", "tool_calls": []}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
]  # fmt: skip
"""Values of fields at, just inside and just outside the limits of some field."""


def read_request(kind: type, data: bytes, rules: Rules) -> tuple[Any, Task, Reading]:
    """Reads a body as `BodyRoute` and the handler do."""
    reading = Reading()
    body = kind.read(reading.parse(data), reading)
    return body, body.task(rules), reading


def task(path: str, body: Any, rules: Rules = RULES) -> Task:
    return read_request(KINDS[path], json.dumps(body).encode(), rules)[1]


def refusal(path: str, body: Any, intake: Any = None, rules: Rules = RULES) -> ApiError | None:
    """The error of a body. With an `intake` also errors of the sequences that an engine would run."""
    try:
        request = task(path, body, rules)
        if intake is not None:
            request.sequences(intake, "r")
    except ApiError as error:
        return error
    return None
