"""Random requests to all routes that generate, and their replies, for `soak.py`. The same seed gives the same request.

`FIELDS` has the kinds of requests. The prompt is a part of a corpus. `ask` sends a request and reads its reply. An
answer and a stream with the same text give the same reply.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
from serving import HERE

from specjax.serve.errors import FAILED_STEP

sys.path.insert(0, str(HERE / "tests" / "helpers"))
from body_helpers import CHAT, COMPLETE, GENERATE, MESSAGES, RESPONSES
from tool_helpers import ANTHROPIC, FLAT, TOOLS


class Request(NamedTuple):
    path: str
    body: dict[str, Any]


class Reply(NamedTuple):
    end: str  # why the text ended, "left", or the status of an error
    text: str = ""
    problem: str = ""  # the message of an error

    @property
    def failed_step(self) -> bool:
        return FAILED_STEP in self.problem


PROMPTS: dict[str, Callable[[str, int], dict[str, Any]]] = {
    GENERATE: lambda text, tokens: {"text": text, "max_new_tokens": tokens},
    COMPLETE: lambda text, tokens: {"prompt": text, "max_tokens": tokens},
    CHAT: lambda text, tokens: {"messages": [{"role": "user", "content": text}], "max_tokens": tokens},
    RESPONSES: lambda text, tokens: {"input": text, "max_output_tokens": tokens},
    MESSAGES: lambda text, tokens: {"messages": [{"role": "user", "content": text}], "max_tokens": tokens},
}
PATHS = (*PROMPTS,)
TOP_LEVEL = ("text", "stream", "rid", "return_logprob")  # fields of /generate outside of sampling_params


def json_fields(path: str, rng: random.Random) -> dict[str, Any]:
    """A schema. Most are new to the server, and large ones are compiled in a separate process."""
    names = [f"{letter}{rng.choice([0, rng.randrange(10**6)])}" for letter in "abcdefgh"[: rng.choice([1, 2, 8])]]
    kinds: list[Any] = [{"type": "integer"}, {"type": "boolean"}, {"enum": ["yes", "no"]}, {"type": "string"}]
    schema = {"type": "object", "properties": {name: rng.choice(kinds) for name in names}, "required": names}
    named = {"name": "answer", "schema": schema}
    return {
        GENERATE: {"json_schema": json.dumps(schema)},
        RESPONSES: {"text": {"format": {"type": "json_schema", **named}}},
        MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    }.get(path, {"response_format": {"type": "json_schema", "json_schema": named}})


def choice_fields(path: str, rng: random.Random) -> dict[str, Any]:
    return {"n": 2} | {COMPLETE: {"logprobs": 2}, CHAT: {"logprobs": True}, GENERATE: {"return_logprob": True}}[path]


def tool_fields(path: str, rng: random.Random) -> dict[str, Any]:
    return {
        CHAT: {"tools": TOOLS, "tool_choice": rng.choice(["required", "auto"])},
        RESPONSES: {"tools": FLAT, "tool_choice": "auto"},
        MESSAGES: {"tools": ANTHROPIC, "tool_choice": {"type": "any"}},
    }[path]


class Kind(NamedTuple):
    weight: int
    fields: Callable[[str, random.Random], dict[str, Any]]
    paths: tuple[str, ...] = PATHS


FIELDS: dict[str, Kind] = {
    "plain": Kind(30, lambda path, rng: {}),
    "long": Kind(8, lambda path, rng: {}),
    "penalties": Kind(8, lambda path, rng: {"frequency_penalty": 0.5, "repetition_penalty": 1.2}),
    "bias": Kind(8, lambda path, rng: {"logit_bias": {str(token): 20 for token in range(70, 86)}}),
    "stop": Kind(8, lambda path, rng: {"stop": [rng.choice("aeiou"), "the"]}, (GENERATE, COMPLETE, CHAT)),
    "choices": Kind(6, choice_fields, (GENERATE, COMPLETE, CHAT)),
    "regex": Kind(6, lambda path, rng: {"regex": f"[a-f]{{{rng.randint(1, 9)}}}( [0-9]+){{2}}"}),
    "lark": Kind(3, lambda path, rng: {"ebnf": 'start: WORD ("," WORD)*\nWORD: /[a-z]{1,4}/'}),
    "json": Kind(8, json_fields),
    "tools": Kind(8, tool_fields, (CHAT, RESPONSES, MESSAGES)),
}
"""Kinds of requests; `bias` favours the words of the random draft heads."""
WRONG: list[dict[str, Any]] = [
    {"temperature": -1}, {"regex": "("}, {"ebnf": "start: unknown"}, {"max_new_tokens": "x"},
    {"logit_bias": {"99999999": 1}}, {"stop": 5}, {"json_schema": "{"},
]  # fmt: skip
"""Fields of /generate that are refused."""


def make_request(rng: random.Random, corpus: str, *, paths: tuple[str, ...] = PATHS, **more: Any) -> Request:
    """A random request to one of `paths`. `more`: further fields."""
    kinds = {name: kind for name, kind in FIELDS.items() if set(kind.paths) & set(paths)}
    (name,) = rng.choices([*kinds], [kind.weight for kind in kinds.values()])
    path = rng.choice([path for path in FIELDS[name].paths if path in paths])
    long, size, tokens = name == "long", rng.randint(1, 60), rng.randint(1, 24)
    size, tokens = (size + 200, tokens + 120) if long else (size, tokens)
    begin = rng.randrange(len(corpus) - size)
    sampling = {"temperature": 0} if rng.random() < 0.5 else {"temperature": 0.8, "top_p": 0.95, "seed": begin}
    body = PROMPTS[path](corpus[begin : begin + size], tokens) | sampling | FIELDS[name].fields(path, rng)
    body |= {"stream": name != "choices" and rng.random() < 0.5} | more
    if path == GENERATE:
        body["sampling_params"] = {name: body.pop(name) for name in [*body] if name not in TOP_LEVEL}
    return Request(path, body)


TEXTS = {"text", "content", "arguments", "partial_json", "input", "reasoning_content", "thinking"}
ENDS = {"finish_reason", "stop_reason"}


def values(document: Any, names: set[str]) -> Iterator[str]:
    """The texts with these names in a JSON document. Of an object its `type`, else its JSON; `text` may be a format."""
    if isinstance(document, list):
        for item in document:
            yield from values(item, names)
    elif isinstance(document, dict):
        for name, item in document.items():
            if name in names and isinstance(item, str if name == "text" else str | dict):
                yield item if isinstance(item, str) else item.get("type") or json.dumps(item)
            else:
                yield from values(item, names)


def read(path: str, documents: list[Any]) -> Reply:
    """Reads an answer, or the events of a stream."""
    for document in documents:
        if isinstance(document, dict):
            error = document.get("response", document).get("error")
            if error or document.get("type") == "error":
                return Reply("error", problem=str(error or document))
    if path in (GENERATE, RESPONSES):  # the last event has the whole text
        documents = documents[-1:]
    ends = {*values(documents, ENDS | {"status"} if path == RESPONSES else ENDS)}
    if not ends:
        return Reply("cut", problem=f"{path} ends without a reason")
    return Reply(",".join(sorted(ends)), "".join(values(documents, TEXTS)))


async def ask(client: httpx.AsyncClient, request: Request, *, events: int | None = None) -> Reply:
    """The reply to a request. `events`: closes the connection after this number of events."""
    documents: list[Any] = []
    try:
        async with client.stream("POST", request.path, json=request.body) as response:
            if response.status_code != 200:
                return Reply(str(response.status_code), problem=(await response.aread()).decode()[:500])
            if not request.body["stream"]:
                return read(request.path, [json.loads(await response.aread())])
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    documents.append(json.loads(line[6:]))
                    if events is not None and len(documents) >= events:
                        return Reply("left")
    except httpx.HTTPError as error:
        return Reply("lost", problem=repr(error))
    return read(request.path, documents)
