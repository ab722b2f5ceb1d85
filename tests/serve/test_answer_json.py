"""Answers of all routes are strict JSON for any text of a model, and streams add up to whole answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pydantic_core
import pytest
from body_helpers import CHAT, COMPLETE, GENERATE, HELLO, MESSAGES, RESPONSES, RULES, read_request
from engine_helpers import idle_sequence, tokenizer
from fastapi.responses import JSONResponse
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_helpers import CALLS, calls_of, hidden, joined

from specjax.engine import Completion, StreamChunk
from specjax.engine.chat.message_format import PARSERS, AnswerForm
from specjax.serve.dialects.anthropic import MessagesAnswer, MessagesRequest
from specjax.serve.dialects.responses import ResponsesAnswer, ResponsesRequest
from specjax.serve.openai_answers import Answer, OpenAIAnswer, TokenNames
from specjax.serve.openai_requests import ChatRequest, CompletionRequest
from specjax.serve.sglang_generate import GenerateAnswer, GenerateRequest

NAMES = ("add", "noop")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": ["number", "array", "object"]}, "b": {"type": "integer"}, "s": {"type": "string"}},
}
LEAST: dict[str, tuple[Any, dict[str, Any]]] = {
    CHAT: (ChatRequest, {"messages": HELLO,
           "tools": [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]}),
    RESPONSES: (ResponsesRequest, {"input": "hello",
                "tools": [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]}),
    MESSAGES: (MessagesRequest, {"messages": HELLO, "max_tokens": 9,
               "tools": [{"name": name, "input_schema": SCHEMA} for name in NAMES]}),
    COMPLETE: (CompletionRequest, {"prompt": "hello"}),
    GENERATE: (GenerateRequest, {"text": "hello"}),
}  # fmt: skip
WITH_CALLS = (CHAT, RESPONSES, MESSAGES)


def answer(route: str, parser: str) -> Answer:
    """Makes one answer, without an engine."""
    kind, least = LEAST[route]
    form = AnswerForm(PARSERS[parser], takes_tools=True, thinks=True, special=hidden(parser))
    body, task, _ = read_request(kind, json.dumps(least).encode(), replace(RULES, form=form))
    match route:
        case "/v1/responses":
            return ResponsesAnswer("resp_1", "toy", body, task)
        case "/v1/messages":
            assert task.reply is not None
            return MessagesAnswer("msg_1", "toy", 5, task.reply.reply(thinking=False))
        case "/generate":
            return GenerateAnswer([idle_sequence()], 4, False, lambda sequence, output: 0)
        case _:
            return OpenAIAnswer("1", "toy", body, task, 4, TokenNames(tokenizer()))


def done(text: str) -> Completion:
    return Completion("1", text, [1, 2], 5, {"type": "stop", "matched": 2}, 1, 2.0, [0, 1], 0)


def strict(data: bytes | str) -> Any:
    """Parses JSON as the strictest clients do: without infinity, NaN, large floats and single surrogates."""
    text = data if isinstance(data, str) else data.decode("utf-8")
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    assert pydantic_core.from_json(text, allow_inf_nan=False) == value
    return value


def whole(route: str, parser: str, text: str) -> list[tuple[str, Any]]:
    """Kinds and texts of the parts of an answer that is not a stream."""
    body = strict(bytes(JSONResponse(answer(route, parser).whole([done(text)])).body))
    match route:
        case "/v1/responses":
            return items(body["output"])
        case "/v1/messages":
            fields = {"text": "text", "thinking": "thinking", "tool_use": "input"}
            return [(block.get("name", block["type"]), block[fields[block["type"]]]) for block in body["content"]]
        case "/generate":
            return [("text", body["text"])]
        case "/v1/completions":
            return [("text", body["choices"][0]["text"])]
    return message_parts(body["choices"][0]["message"])


def items(output: list[Any]) -> list[tuple[str, Any]]:
    return [(item["name"], item["arguments"]) if item["type"] == "function_call" else
            (item["type"], item["content"][0]["text"]) for item in output]  # fmt: skip


def message_parts(message: dict[str, Any]) -> list[tuple[str, Any]]:
    parts = [("thoughts", message["reasoning_content"] or ""), ("text", message["content"] or "")]
    return [*parts, *calls_of(message)]


def streamed(route: str, parser: str, pieces: list[str]) -> list[tuple[str, Any]]:
    """The parts of a stream, put together as clients do."""
    maker, events = answer(route, parser), list[Any]()
    chunks = [StreamChunk(0, piece, [1], None) for piece in pieces]
    chunks.append(StreamChunk(0, "", [], done("".join(pieces))))
    for event in (event for chunk in chunks for event in maker.events(chunk)):
        line = event.decode("ascii").removesuffix("\n\n").split("data: ")[1]
        assert "\n" not in line
        events.append(strict(line))
    match route:
        case "/v1/responses":
            return responses_parts(events)
        case "/v1/messages":
            return messages_parts(events)
        case "/generate":
            return [("text", events[-1]["text"])]
        case "/v1/completions":
            return [("text", "".join(event["choices"][0]["text"] for event in events))]
    return message_parts(joined([event["choices"][0]["delta"] for event in events]))


def responses_parts(events: list[Any]) -> list[tuple[str, Any]]:
    output = events[-1]["response"]["output"]
    deltas = dict[int, str]()
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] = deltas.get(event["output_index"], "") + event["delta"]
    parts = items(output)
    assert [text for _, text in parts] == [deltas.get(index, "") for index in range(len(output))]
    return parts


def messages_parts(events: list[Any]) -> list[tuple[str, Any]]:
    blocks: list[tuple[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            kind = event["content_block"]["type"]
            blocks.append((event["content_block"]["name"], [""]) if kind == "tool_use" else (kind, ""))
        elif event["type"] == "content_block_delta":
            kind, before = blocks.pop()
            (text,) = (value for key, value in event["delta"].items() if key != "type")
            blocks.append((kind, [*before, text] if isinstance(before, list) else before + text))
    return [(kind, parsed("".join(text)) if isinstance(text, list) else text) for kind, text in blocks]


def parsed(text: str) -> Any:
    """The JSON of the deltas; JSON that is cut off lacks its last value."""
    try:
        try:
            value = pydantic_core.from_json(text or "{}")
        except ValueError as error:
            if not str(error).startswith("EOF"):
                raise
            value = pydantic_core.from_json(text, allow_partial=True)
        json.dumps(value, allow_nan=False)
    except ValueError:
        return {"INVALID_JSON": text}
    return value


def both(route: str, parser: str, text: str, size: int = 0) -> list[tuple[str, Any]]:
    """The parts of an answer, which streams have, too. `size`: characters of a delta; 0: about 30 deltas."""
    parts, size = whole(route, parser, text), size or 1 + len(text) // 30
    for pieces in ([text], [text[at : at + size] for at in range(0, len(text), size)]):
        assert streamed(route, parser, pieces) == parts
    return parts


TAGGED: dict[str, tuple[str, Callable[[str, str], str]]] = {
    "coder": (
        "qwen3_coder",
        lambda key, value: f"<tool_call><function=add><parameter={key}>{value}</parameter></function></tool_call>",
    ),
    "glm": (
        "glm45", lambda key, value: f"<tool_call>add<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>"
    ),
}  # fmt: skip
VALUES = (
    "1e999", "NaN", "Infinity", "9" * 5000, "007", "True", "None", r'"\ud83d"', r'"\ud83d\u0041 \ud83d"', r'"\q\u12"',
    '"a\x01\n"', r'"\ud83d\ude00\\ud83d\""', "true", "[null, 0, 2]",
)  # fmt: skip


def call(name: str, given: str) -> str:
    """The text of a call of `add`."""
    return CALLS[name].replace("NAME", "add").replace("JSON", given)


@pytest.mark.parametrize("route", WITH_CALLS)
def test_deeply_nested_arguments(route):
    """Anthropic's input is an object, so arguments of hundreds of levels become a text within it."""
    for depth in (5, 150, 700, 5000):
        text = '{"a": ' + "[" * depth + "]" * depth + "}"
        result = both(route, "qwen25", call("qwen", text))[-1][1]
        assert result == (text if route != MESSAGES else strict(text) if depth < 199 else {"INVALID_JSON": text})


@pytest.mark.parametrize(
    ("written", "expected"),
    [('{"a": 1, b}', {"INVALID_JSON": '{"a": 1, b}'}), ('{"a": 1,}', {"INVALID_JSON": '{"a": 1,}'}),
     ('{"a": 1, "s": "x', {"a": 1}), ('{"s": "x', {}), ('{"s": "\\ud83d', {}),
     ('{"a": 1e999', {"INVALID_JSON": '{"a": 1e999'}), ('{"a": tru', {}),
     *((written, {"INVALID_JSON": written}) for written in (
         '{"s": "/tmp/x" "b": true}', '{"s": "/tmp/x" "b": tr', '{"a": [1 2], "b": 3}', '{"s": "say "hi" now"}',
         '{"s": "x", "a": new york}', '{"a": 2024-01-01T10:00}', '{"a": 10:00, "b": 1}', '{"a": not sure, "b": 1}',
         '{"a": [x y]}', '{"a": {"c": new "york"}}', '{"a": "10":00}', '{"a": {"c": 1}:NaN}', '{"a": 1, "s": ne'))],
)  # fmt: skip
def test_input_of_wrong_or_cut_off_arguments(written, expected):
    """OpenAI's clients get the text unchanged."""
    text = call("deepseekv31", written)
    text = text if written.endswith("}") else text[: text.index(written) + len(written)]
    assert both(MESSAGES, "deepseekv31", text, 1)[-1] == ("add", expected)
    assert both(CHAT, "deepseekv31", text, 1)[-1] == both(RESPONSES, "deepseekv31", text, 1)[-1] == ("add", written)


PIECES = (
    *(marker for parser in {*PARSERS.values()} for marker in parser.markers()), "<think>", "</think>", "[", "]", "{",
    "}", '"', "\\", "\\ud83d", "\\udc00", "\\u00", ",", ":", " ", "\n", "\x00", "<", "add",
    '{"name": "add", "arguments": ', '{"name": "add", "parameters": ', '{"a": ', '"a": 1', "NaN", "-Infinity", "1e999",
    "1" * 400, "None", "é", "😀", "\u2028", "functions.add:0", "<function=add>", "<parameter=a>", "<parameter=s>",
    "</parameter>", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "null", "['", "']",
)  # fmt: skip
SKELETONS = st.sampled_from(sorted(CALLS)).flatmap(
    lambda name: st.lists(st.sampled_from([*PIECES, *VALUES]), max_size=6).map(
        lambda parts: (name.split()[0], call(name, '{"a": ' + "".join(parts) + "}"))
    )
)
TAGS = st.sampled_from(sorted(TAGGED)).flatmap(
    lambda name: st.tuples(st.sampled_from("abs"), st.lists(st.sampled_from([*PIECES, *VALUES]), max_size=6)).map(
        lambda key_and_parts: (TAGGED[name][0], TAGGED[name][1](key_and_parts[0], "".join(key_and_parts[1])))
    )
)
ANY = st.tuples(
    st.sampled_from(sorted(PARSERS)), st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=20).map("".join)
)


@settings(max_examples=80)
@given(SKELETONS | TAGS | ANY, st.sampled_from(sorted(LEAST)), st.integers(1, 9))
def test_random_texts_give_strict_json(case, route, size):
    both(route, *case, size)
