"""`/v1/responses` and `/v1/messages`, through the clients of their makers: the texts are the chat's."""

from __future__ import annotations

import json
import re
import threading

import anthropic
import openai
import pytest
from body_helpers import CHAT, RULES, STRICT, read_request
from engine_helpers import END, make_engine, shared_engine, toy
from server_helpers import SECONDS, begun, running

from specjax.cli.flags import ServerSettings
from specjax.engine import Engine
from specjax.serve.dialects.anthropic import CountTokensRequest, MessagesRequest
from specjax.serve.dialects.responses import ResponsesRequest
from specjax.serve.errors import ApiError

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER, ASSISTANT = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "the hell"}
LEAST = {ResponsesRequest: {"input": "hello"}, MessagesRequest: {"messages": [USER], "max_tokens": 9}}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return shared_engine("NGRAM")


@pytest.fixture(scope="module")
def server(engine):
    with running(engine, ServerSettings(api_key=("key",))) as served:
        yield served


@pytest.fixture(scope="module")
def ours(server):
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key="key", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def theirs(server):
    with anthropic.Anthropic(base_url=server.base, api_key="key", max_retries=0) as client:
        yield client


def expected(messages: list, **fields) -> str:
    return shared_engine("NONE").generate(messages, {"temperature": 1.0, **fields}).text


# OpenAI's responses

SAMPLING = {"temperature": 0.8, "top_p": 0.9}


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ({"input": "hello"}, [USER]),
        ({"input": [USER, ASSISTANT, USER]}, [USER, ASSISTANT, USER]),
        ({"input": "hello", "instructions": "be"}, [{"role": "system", "content": "be"}, USER]),
        (
            {"input": [{"role": "developer", "content": [{"type": "input_text", "text": "b"}] * 2, "type": "message"}]},
            [{"role": "system", "content": "bb"}],
        ),
    ],
)
def test_a_response_is_the_chats_text(engine, ours, given, messages):
    found = ours.responses.create(model="toy", max_output_tokens=12, extra_body={"seed": 3}, **SAMPLING, **given)
    assert found.output_text == expected(messages, max_new_tokens=12, seed=3, **SAMPLING)
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert found.usage.input_tokens == len(engine.encode(messages)) and found.usage.output_tokens == 12
    assert found.usage.total_tokens == found.usage.input_tokens + 12
    assert found.id.startswith("resp_") and found.output[0].id.startswith("msg_") and found.model == "toy"
    assert (found.temperature, found.top_p, found.max_output_tokens) == (0.8, 0.9, 12)
    again = [*given["input"], *found.output] if isinstance(given["input"], list) else [USER, *found.output]
    longer = ours.responses.create(model="toy", input=[*again, USER], max_output_tokens=2)
    assert longer.usage.input_tokens > found.usage.input_tokens, "what a client got it can send back"


def test_the_events_of_a_response(engine, ours):
    fields = {"model": "toy", "input": "hello", "max_output_tokens": 15, "temperature": 0}
    whole = ours.responses.create(**fields)
    events = list(ours.responses.create(stream=True, **fields))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * len(deltas),
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text and len(deltas) > 1
    assert events[-1].response.usage == whole.usage and events[0].response.status == "in_progress"


def test_a_response_that_ends_by_itself(engine, ours):
    found = ours.responses.create(
        model="toy", input="hello", max_output_tokens=20, extra_body={"stop_token_ids": [END], "logit_bias": {END: 100}}
    )
    assert (found.status, found.incomplete_details, found.output_text) == ("completed", None, "")
    fields = {"model": "toy", "input": "hello", "extra_body": {"stop": ["e", "a"], "seed": 1}}
    whole = ours.responses.create(**fields)
    with ours.responses.stream(**fields) as stream:  # gathers the events, and so checks their order
        assert stream.get_final_response().output_text == whole.output_text != ""


# Anthropic's messages


@pytest.mark.parametrize(
    ("given", "messages", "variables"),
    [
        ({"messages": [USER]}, [USER], {}),
        ({"messages": [USER], "system": "be"}, [{"role": "system", "content": "be"}, USER], {}),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in ("hel", "lo")]}],
             "system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}]},
            [{"role": "system", "content": "be"}, USER],
            {},
        ),
        ({"messages": [USER, {"role": "system", "content": "be"}]}, [USER, {"role": "system", "content": "be"}], {}),
        ({"messages": [USER, ASSISTANT]}, [USER, ASSISTANT], {"continue_final_message": True}),
    ],
)  # fmt: skip
def test_a_message_is_the_chats_text(engine, server, theirs, given, messages, variables):
    sampling = {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "seed": 3}  # newer clients have no names for them
    found = theirs.messages.create(model="toy", max_tokens=12, **given, extra_body=sampling)
    chat = {"messages": messages, "max_tokens": 12, **variables, **sampling}
    with server.client(headers={"Authorization": "Bearer key"}) as client:
        answer = client.post(CHAT, json=chat).json()
    assert found.content[0].text == answer["choices"][0]["message"]["content"]
    assert (found.stop_reason, found.stop_sequence, found.role) == ("max_tokens", None, "assistant")
    usage = found.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == answer["usage"]["prompt_tokens"]
    assert usage.output_tokens == 12 and found.id.startswith("msg_")
    count = theirs.messages.count_tokens(model="toy", **given)
    assert count.input_tokens == answer["usage"]["prompt_tokens"]


def test_the_events_of_a_message(theirs):
    fields = {"model": "toy", "max_tokens": 15, "messages": [USER], "extra_body": {"temperature": 0}}
    whole = theirs.messages.create(**fields)
    events = list(theirs.messages.create(stream=True, **fields))
    kinds = [event.type for event in events]
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert kinds == [
        "message_start", "content_block_start", *["content_block_delta"] * len(deltas), "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert "".join(deltas) == whole.content[0].text and len(deltas) > 1
    assert events[-2].usage.output_tokens == 15 and events[-2].delta.stop_reason == "max_tokens"
    with theirs.messages.stream(**fields) as stream:
        assert stream.get_final_message().content[0].text == whole.content[0].text


def test_why_a_message_ends(theirs, engine):
    fields = {"model": "toy", "max_tokens": 40, "messages": [USER]}
    greedy = {"temperature": 0}
    text = theirs.messages.create(**fields, extra_body=greedy).content[0].text
    found = theirs.messages.create(**fields, extra_body=greedy, stop_sequences=["~~", text[9:11]])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", text[9:11])
    assert found.content[0].text == text[: text.find(text[9:11])]
    ended = theirs.messages.create(**fields, extra_body={"stop_token_ids": [END], "logit_bias": {END: 100}})
    assert (ended.stop_reason, ended.stop_sequence, ended.content[0].text) == ("end_turn", None, "")


# Both


@pytest.mark.parametrize(
    ("kind", "change", "param"),
    [
        (ResponsesRequest, {"input": []}, "input"),
        (ResponsesRequest, {"input": None}, "input"),
        (ResponsesRequest, {"input": [{"type": "function_call_output", "call_id": "c"}]}, "input"),
        (ResponsesRequest, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        (ResponsesRequest, {"max_output_tokens": 0}, "max_output_tokens"),
        (ResponsesRequest, {"max_tokens": 5}, "max_tokens"),
        (ResponsesRequest, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (ResponsesRequest, {"tools": [{"type": "web_search"}]}, "tools"),
        (ResponsesRequest, {"text": {"format": {"type": "json_schema"}}}, "text"),
        (ResponsesRequest, {"reasoning": {"effort": "high"}}, "reasoning"),
        (ResponsesRequest, {"background": True}, "background"),
        (ResponsesRequest, {"n": 2}, "n"),
        (ResponsesRequest, {"messages": [USER]}, "messages"),
        (ResponsesRequest, {"model": "other"}, "model"),
        *(
            (kind, {name: value}, name)
            for kind in (ResponsesRequest, MessagesRequest)
            for name, value in (
                ("response_format", {"type": "json_object"}),
                ("guided_choice", ["a"]),
                ("json_schema", {}),
            )
        ),
        (MessagesRequest, {"max_tokens": None}, "max_tokens"),
        (MessagesRequest, {"max_tokens": 0}, "max_tokens"),
        (MessagesRequest, {"messages": []}, "messages"),
        (MessagesRequest, {"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        (MessagesRequest, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
        (MessagesRequest, {"tools": [{"name": "f"}]}, "tools"),
        (MessagesRequest, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        (MessagesRequest, {"stop": ["a"]}, "stop"),
        (MessagesRequest, {"stop_sequences": ["a"] * 17}, "stop_sequences"),
        (MessagesRequest, {"system": 5}, "system"),
        (MessagesRequest, {"temperature": -1}, "temperature"),
        (MessagesRequest, {"n": 2}, "n"),
    ],
)
def test_what_is_refused(kind, change, param):
    body = {name: value for name, value in (LEAST[kind] | change).items() if (name, value) != ("max_tokens", None)}
    with pytest.raises(ApiError) as caught:
        read_request(kind, json.dumps(body).encode(), RULES)
    assert caught.value.param == param and caught.value.status in (400, 404)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stop": "x"}, "stop must be null: it is called stop_sequences here, got 'x'"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name must match the pattern ^"),
        ({"n": True}, "n must be a valid integer, got true"),
    ],
)
def test_words_of_refusals(change, said):
    with pytest.raises(ApiError, match=re.escape(said)):
        read_request(MessagesRequest, json.dumps(LEAST[MessagesRequest] | change).encode(), RULES)


@pytest.mark.parametrize("kind", LEAST)
def test_what_changes_nothing_passes_even_strictly(kind):
    others = {name: values for name, values in kind.unsupported.items() if name not in kind.model_fields}
    harmless = {name: value for name, values in others.items() for value in values}
    _, expected, _ = read_request(kind, json.dumps(LEAST[kind]).encode(), STRICT)
    _, found, reading = read_request(kind, json.dumps(harmless | LEAST[kind]).encode(), STRICT)
    assert found == expected and not reading.headers


def test_errors_in_anthropics_form(server, theirs):
    for call in (
        lambda: theirs.messages.create(model="toy", max_tokens=0, messages=[USER]),
        lambda: theirs.messages.create(model="toy", max_tokens=5, messages=[{"role": "user", "content": "x" * 10_000}]),
        lambda: theirs.messages.count_tokens(model="toy", messages=[]),
    ):
        with pytest.raises(anthropic.BadRequestError) as caught:
            call()
        assert caught.value.body["type"] == "error" and caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError) as missing:
        theirs.messages.create(model="other", max_tokens=5, messages=[USER])
    assert missing.value.body["error"]["type"] == "not_found_error"
    with server.client(headers={"x-api-key": "key"}) as client:
        for answer in (
            client.get(MESSAGES),
            client.post(MESSAGES, content=b"x"),
            client.post(f"{MESSAGES}/no", json={}),
        ):
            assert answer.status_code in (404, 405, 415) and answer.json()["type"] == "error", answer.text
        assert "type" not in client.get(RESPONSES).json()
    stranger = anthropic.Anthropic(base_url=server.base, api_key="wrong", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model="toy", max_tokens=5, messages=[USER])
    with anthropic.Anthropic(base_url=server.base, auth_token="key", max_retries=0) as client:
        assert client.messages.create(model="toy", max_tokens=2, messages=[USER]).usage.output_tokens == 2


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_an_error_in_a_stream_is_an_event(path):
    engine = make_engine(toy(), "NONE", warm=False)
    with running(engine) as server:
        stop = threading.Event()
        server.runner.call(lambda engine: stop.wait(SECONDS))
        kind = ResponsesRequest if path == RESPONSES else MessagesRequest
        try:
            text = begun(lambda: server.post(path, LEAST[kind] | {"stream": True, "timeout": 0.1})).text
        finally:
            stop.set()
        first, second = text.strip().split("\n")
        found = json.loads(second.removeprefix("data: "))
        assert first == "event: error" and found["type"] == "error"
        assert (found if path == RESPONSES else found["error"])["code"] == "timeout"


def test_count_tokens_takes_the_fields_of_a_message():
    assert set(CountTokensRequest.model_fields) < set(MessagesRequest.model_fields)
