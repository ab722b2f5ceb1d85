"""What is not supported gets a 400 that names it, in OpenAI's error body; nothing is a 422 or a 500.

The server refuses unknown fields, too; `test_serve_fields.py` has the ones that pass.
"""

from __future__ import annotations

import gzip
import json
import socket
from typing import Any

import openai
import pytest
from engine_helpers import shared_engine
from server_helpers import SECONDS, Running, braked, running, slow_down, wait_until

from specjax.cli.flags import ServerSettings
from specjax.serve import middleware

HELLO = [{"role": "user", "content": "hello"}]
CHAT, COMPLETE, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


@pytest.fixture(scope="module")
def server():
    with running(shared_engine("NGRAM"), ServerSettings(strict_fields=True)) as served:
        yield served


def check_error(response, status: int, param: str | None = None, said: str = "") -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, body
    error = body["error"]
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    assert param is None or error["param"] == param, error
    assert said in error["message"], error
    return error


BOTH: dict[str, tuple[dict, str, str]] = {  # fields, param, what is said
    "n zero": ({"n": 0}, "n", "from 1 to 128"),
    "n negative": ({"n": -1}, "n", "-1"),
    "n many": ({"n": 129}, "n", "128"),
    "n float": ({"n": 1.5}, "n", "integer"),
    "n bool": ({"n": True}, "n", "integer"),
    "tokens zero": ({"max_tokens": 0}, "max_tokens", "at least 1, got 0"),
    "tokens negative": ({"max_tokens": -5}, "max_tokens", "-5"),
    "tokens text": ({"max_tokens": "5"}, "max_tokens", "integer"),
    "tokens beyond the context": ({"max_tokens": 1000}, "max_tokens", "context of 128"),
    "stop many": ({"stop": ["a"] * 17}, "stop", "at most 16"),
    "stop empty": ({"stop": ""}, "stop", "must not be empty"),
    "stop holds empty": ({"stop": ["a", ""]}, "stop", "stop[1] must not be empty"),
    "stop number": ({"stop": 5}, "stop", "string"),
    "stop numbers": ({"stop": [5]}, "stop", "string"),
    "temperature": ({"temperature": -0.1}, "temperature", "-0.1"),
    "temperature text": ({"temperature": "hot"}, "temperature", "number"),
    "temperature bool": ({"temperature": True}, "temperature", "number"),
    "top_p zero": ({"top_p": 0}, "top_p", "above 0"),
    "top_p": ({"top_p": 1.01}, "top_p", "1.01"),
    "top_k": ({"top_k": -2}, "top_k", "at least -1, got -2"),
    "min_p": ({"min_p": 1.5}, "min_p", "1.5"),
    "frequency": ({"frequency_penalty": 2.5}, "frequency_penalty", "-2 to 2"),
    "presence": ({"presence_penalty": -2.5}, "presence_penalty", "-2 to 2"),
    "repetition zero": ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    "repetition": ({"repetition_penalty": 2.1}, "repetition_penalty", "2.1"),
    "seed": ({"seed": 2**63}, "seed", "to 9223372036854775807"),
    "seed huge": ({"seed": -(10**30)}, "seed", "from -9223372036854775808"),
    "seed float": ({"seed": 1.5}, "seed", "integer"),
    "bias key": ({"logit_bias": {"a": 1}}, "logit_bias", "not a token id"),
    "bias key float": ({"logit_bias": {"1.5": 1}}, "logit_bias", "not a token id"),
    "bias key odd": ({"logit_bias": {"1_0": 1}}, "logit_bias", "not a token id"),
    "bias outside": ({"logit_bias": {"99999": 1}}, "logit_bias", "99999"),
    "bias negative": ({"logit_bias": {"-1": 1}}, "logit_bias", "-1"),
    "bias value": ({"logit_bias": {"5": 101}}, "logit_bias", "-100 to 100"),
    "bias text": ({"logit_bias": {"5": "1"}}, "logit_bias", "number"),
    "bias many": ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "1024"),
    "bias list": ({"logit_bias": [5]}, "logit_bias", "object"),
    "stream": ({"stream": "yes"}, "stream", "boolean"),
    "options without stream": ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    "options unknown": ({"stream": True, "stream_options": {"x": 1}}, "stream_options", "x"),
    "options obfuscation": ({"stream": True, "stream_options": {"include_obfuscation": True}}, None, "obfuscation"),
    "response_format": ({"response_format": {"type": "structural_tag"}}, "response_format", "json_schema"),
    "tools": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "not supported"),
    "tool_choice": ({"tool_choice": "required"}, "tool_choice", "tool_choice"),
    "min_tokens": ({"min_tokens": 20, "max_tokens": 10}, "min_tokens", "(10), got 20"),
    "min_tokens negative": ({"min_tokens": -1}, "min_tokens", "-1"),
    "stop_token_ids": ({"stop_token_ids": [5, -7]}, "stop_token_ids", "-7"),
    "stop_token_ids text": ({"stop_token_ids": ["a"]}, "stop_token_ids", "integer"),
    "ignore_eos": ({"ignore_eos": 1}, "ignore_eos", "boolean"),
    "user": ({"user": 5}, "user", "string"),
    "unknown": ({"beam_width": 5}, "beam_width", "unknown field"),
    "unknown null": ({"beam_width": None}, "beam_width", "unknown field"),
    "model": ({"model": 5}, "model", "string"),
}  # fmt: skip


@pytest.mark.parametrize("case", BOTH)
@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_both_refuse(server: Running, path, case):
    fields, param, said = BOTH[case]
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    check_error(server.post(path, prompt | fields), 400, param, said)
    # A refusal comes before the first byte of a stream.
    if "stream" not in fields:
        streamed = server.post(path, prompt | {"stream": True} | fields)
        if case != "options without stream":
            check_error(streamed, 400, param, said)


PART = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": [1]}}
MESSAGES: dict[str, Any] = {
    "null": None, "empty": [], "no list": "hello", "object": {"role": "user", "content": "x"}, "number": [123],
    "nothing": [{}], "no content": [{"role": "user"}], "null content": [{"role": "user", "content": None}],
    "role": [{"role": "robot", "content": "x"}], "role type": [{"role": 5, "content": "x"}], "image": [PART],
    "parts empty": [{"role": "user", "content": []}], "part text": [{"role": "user", "content": ["x"]}],
    "content number": [{"role": "user", "content": 5}], "key": [{"role": "user", "content": "x", "weight": 1}],
    "refusal": [*HELLO, {"role": "assistant", "content": None, "refusal": "no"}],
    "null without calls": [*HELLO, {"role": "assistant", "content": None}],
    "bad arguments": [*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
    "calls of a user": [{"role": "user", "content": "x", "tool_calls": [CALL]}],
    "calls no list": [*HELLO, {"role": "assistant", "content": "x", "tool_calls": {"a": 1}}],
}  # fmt: skip


@pytest.mark.parametrize("case", MESSAGES)
def test_messages_that_are_refused(server, case):
    check_error(server.post(CHAT, {"messages": MESSAGES[case]}), 400, "messages")


def test_messages_missing(server):
    check_error(server.post(CHAT, {"model": "toy"}), 400, "messages")


CHAT_ONLY = {
    "logprobs": {"logprobs": 5}, "top_logprobs": {"top_logprobs": 5}, "functions": {"functions": [{"name": "f"}]},
    "function_call": {"function_call": {"name": "f"}}, "parallel_tool_calls": {"parallel_tool_calls": 1},
    "modalities": {"modalities": ["audio"]}, "audio": {"audio": {"voice": "x"}}, "prompt": {"prompt": "x"},
    "prediction": {"prediction": {"type": "content"}}, "reasoning_effort": {"reasoning_effort": "high"},
    "max_completion_tokens": {"max_completion_tokens": 0}, "best_of": {"best_of": 2}, "echo": {"echo": True},
}  # fmt: skip


@pytest.mark.parametrize("param", CHAT_ONLY)
def test_fields_that_chat_refuses(server, param):
    check_error(server.chat(**CHAT_ONLY[param]), 400, param)


NO_PROMPTS: list[Any] = [
    "",
    [],
    [""],
    ["a", ""],
    [[]],
    [5, "a"],
    ["a", 5],
    [[5], "a"],
    5,
    None,
    {"a": 1},
    [True],
    [1.5],
]


@pytest.mark.parametrize("prompt", NO_PROMPTS, ids=str)
def test_prompts_that_are_refused(server, prompt):
    check_error(server.complete(prompt), 400, "prompt")


@pytest.mark.parametrize("prompt", [[99999], [-1], [[5], [99999]], [10**30]])
def test_token_ids_outside_the_vocabulary(server, prompt):
    check_error(server.complete(prompt), 400, "prompt")


def test_completions_refuse(server):
    check_error(server.complete(best_of=2), 400, "best_of", "not supported")
    check_error(server.complete(n=2, best_of=3), 400, "best_of")
    check_error(server.complete(suffix="x"), 400, "suffix", "not supported")
    check_error(server.complete(logprobs=6), 400, "logprobs", "0 to 5")
    check_error(server.complete(logprobs=-1), 400, "logprobs")
    check_error(server.complete(logprobs=True), 400, "logprobs")
    check_error(server.chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", "0 to 20")
    check_error(server.chat(logprobs=False, top_logprobs=1), 400, "top_logprobs")
    check_error(server.chat(logprobs=True, top_logprobs=-1), 400, "top_logprobs")
    check_error(server.complete(min_tokens=17), 400, "min_tokens", "16")
    check_error(server.post(COMPLETE, {}), 400, "prompt")


def test_a_prompt_that_leaves_no_room(server):
    error = check_error(server.complete("x" * 200), 400, "prompt", "context is 128")
    assert "200 tokens" in error["message"] and error["code"] == "context_length_exceeded"
    error = check_error(server.complete("x" * 100, max_tokens=29), 400, "max_tokens")
    assert "100" in error["message"] and "29" in error["message"] and "128" in error["message"]
    check_error(server.complete("x", max_tokens=10**300), 400, "max_tokens", "max_tokens 1000")["message"].index("...")
    check_error(server.chat("x" * 200), 400, "messages", "context")
    assert server.complete("x" * 120).json()["usage"]["completion_tokens"] == 8, "the default shrinks"


SAMPLING = {
    "unknown": {"foo": 1}, "range": {"temperature": -1}, "type": {"temperature": "x"}, "n": {"n": 0},
    "ours": {"speculate": False}, "limit": {"max_new_tokens": -1}, "bool": {"top_k": True}, "stop": {"stop": 5},
    "context": {"max_new_tokens": 999},
}  # fmt: skip


@pytest.mark.parametrize("case", SAMPLING)
def test_sampling_parameters_of_generate(server, case):
    check_error(server.post(GENERATE, {"text": "x", "sampling_params": SAMPLING[case]}), 400)


GENERATES: dict[str, Any] = {
    "nothing": {}, "both": {"text": "x", "input_ids": [5]}, "empty": {"text": ""}, "list": {"text": []},
    "ids in text": {"text": [5]}, "text in ids": {"input_ids": "x"}, "outside": {"input_ids": [99999]},
    "params list": {"text": ["a", "b"], "sampling_params": [{}]}, "params text": {"text": "x", "sampling_params": "x"},
    "params of one": {"text": "x", "sampling_params": [5]}, "no params": {"text": "x", "sampling_params": []},
    "n differ": {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]},
    "rid": {"text": "x", "rid": 5}, "rids": {"text": ["a", "b"], "rid": ["same", "same"]},
    "rid long": {"text": "x", "rid": "x" * 300},
    "start": {"text": "x", "return_logprob": True, "logprob_start_len": 1},
    "top many": {"text": "x", "return_logprob": True, "top_logprobs_num": 21},
    "unknown": {"text": "x", "foo": 1}, "messages": {"messages": HELLO},
}  # fmt: skip


@pytest.mark.parametrize("case", GENERATES)
def test_generate_refuses(server, case):
    check_error(server.post(GENERATE, GENERATES[case]), 400)


def test_a_request_id_in_use(server):
    body = {"text": "hello", "rid": "twice", "sampling_params": {"max_new_tokens": 100}}
    with (
        braked(server.engine, after=4),
        server.client() as client,
        client.stream("POST", GENERATE, json=body | {"stream": True}) as first,
    ):
        check_error(server.post(GENERATE, body), 400, "rid", "'twice' is running")
        assert first.status_code == 200
    server.wait_idle()
    assert server.post(GENERATE, body | {"sampling_params": {"max_new_tokens": 1}}).status_code == 200


def test_models_that_are_not_here(server):
    for path, prompt in ((CHAT, {"messages": HELLO}), (COMPLETE, {"prompt": "x"})):
        error = check_error(server.post(path, prompt | {"model": "gpt"}), 404, "model", "'toy'")
        assert error["code"] == "model_not_found"
    assert server.complete(model=None, max_tokens=1).json()["model"] == "toy"


@pytest.mark.parametrize("path", [CHAT, COMPLETE, GENERATE])
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"null", b'"x"', b"\xff\xfe", b'{"a": NaN', b"[" * 100_000, b'{"prompt": "\\ud800"}', b"{} {}"],
)
def test_bodies_that_are_no_object(server, path, body):
    with server.client() as client:
        check_error(client.post(path, content=body, headers={"Content-Type": "application/json"}), 400)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "frequency_penalty", "logit_bias"])
def test_numbers_that_are_none(server, field, value):
    value = f'{{"5": {value}}}' if field == "logit_bias" else value
    body = f'{{"prompt": "x", "max_tokens": 1, "{field}": {value}}}'
    with server.client() as client:
        response = client.post(COMPLETE, content=body, headers={"Content-Type": "application/json"})
    check_error(response, 400, field)


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '[{"b": [NaN]}]'])
@pytest.mark.parametrize(
    ("path", "least"), [(CHAT, '"messages": [{"role": "user", "content": "x"}]'), ("/v1/responses", '"input": "x"')]
)
def test_metadata_that_is_no_json(server, path, least, value):
    """Responses repeat it."""
    body = f'{{{least}, "metadata": {{"a": {value}}}}}'
    with server.client() as client:
        response = client.post(path, content=body, headers={"Content-Type": "application/json"})
    check_error(response, 400, "metadata", "finite")


def test_content_types(server):
    body = json.dumps({"prompt": "x", "max_tokens": 1})
    with server.client() as client:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            check_error(
                client.post(COMPLETE, content=body, headers={"Content-Type": kind}), 415, said="application/json"
            )
        for kind in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"):
            assert client.post(COMPLETE, content=body, headers={"Content-Type": kind}).status_code == 200


def test_bodies_that_are_compressed(server):
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    kind = {"Content-Type": "application/json"}
    with server.client() as client:
        packed = client.post(COMPLETE, content=gzip.compress(body), headers=kind | {"Content-Encoding": "gzip"})
        check_error(packed, 415, said="without Content-Encoding, got 'gzip'")
        assert client.post(COMPLETE, content=body, headers=kind | {"Content-Encoding": "identity"}).status_code == 200


def test_paths_and_methods(server):
    with server.client() as client:
        check_error(client.get("/v1/nothing"), 404, said="/v1/nothing")
        assert "GET" in check_and_headers(client.post("/"), 405)["allow"]
        for path in (CHAT, COMPLETE, GENERATE):
            assert "POST" in check_and_headers(client.get(path), 405)["allow"]
        assert "GET" in check_and_headers(client.post("/v1/models"), 405)["allow"]
        check_error(client.get("/v1/models/other"), 404, "model")


def check_and_headers(response, status: int):
    check_error(response, status)
    return response.headers


def test_bodies_that_are_too_large(server, monkeypatch):
    monkeypatch.setattr(middleware, "MAX_BODY", 1000)
    body = json.dumps({"prompt": "x" * 2000}).encode()
    with server.client() as client:
        check_error(client.post(COMPLETE, content=body, headers={"Content-Type": "application/json"}), 413, said="1000")
        chunks = (body[i : i + 100] for i in range(0, len(body), 100))  # no Content-Length
        check_error(client.post(COMPLETE, content=chunks, headers={"Content-Type": "application/json"}), 413)


def test_a_huge_body_is_refused_before_it_is_sent(server):
    """413 comes for the announced length alone."""
    host, port = server.base.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=SECONDS) as sock:
        head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {middleware.MAX_BODY + 1}\r\n\r\n"
        sock.sendall(f"POST {CHAT} HTTP/1.1\r\n{head}".encode())
        assert sock.recv(4096).startswith(b"HTTP/1.1 413")


def test_the_clients_exceptions(server):
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="toy", messages=HELLO, temperature=-1)
        assert caught.value.param == "temperature" and "temperature" in str(caught.value)
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="gpt", messages=HELLO)
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="toy", messages=HELLO, stream=True, n=0)


def test_an_api_key():
    settings = ServerSettings(api_key=("other key", "söcret"))
    with running(shared_engine("NONE"), settings) as server, server.client() as client:
        assert client.get("/health").status_code == 200
        bodies = {CHAT: {"messages": HELLO}, COMPLETE: {"prompt": "x"}, GENERATE: {"text": "x"}, "/flush_cache": {}}
        wrong = (
            {},
            {"Authorization": "Bearer other"},
            {"Authorization": "söcret".encode()},
            {"Authorization": "Basic c8O2Y3JldA=="},
        )
        for headers in wrong:
            for path, body in bodies.items():
                assert check_error(client.post(path, json=body, headers=headers), 401)["code"] == "invalid_api_key"
            for path in (
                "/v1/models",
                "/get_model_info",
                "/docs",
                "/openapi.json",
                "/nothing",
                "//health",
                "/health/",
                "//",
            ):
                # The whole address: of a path that begins with two slashes httpx would take the first part as a host.
                check_error(client.get(server.base + path, headers=headers), 401)
            assert client.get("/", headers=headers).status_code == 200, "the page, which has no secrets"
        right = {"Authorization": "Bearer söcret".encode()}
        assert client.get("/v1/models", headers=right).status_code == 200
        assert client.get("/v1/models", headers={"Authorization": "Bearer other key"}).status_code == 200
        assert client.post(COMPLETE, json={"prompt": "x", "max_tokens": 1}, headers=right).status_code == 200


def test_a_full_queue_says_when_to_come_back():
    engine = shared_engine("NONE")  # the other server runs the one with drafts
    with running(engine, ServerSettings(max_queued_requests=2)) as server:
        body = {"prompt": ["hello"] * 6, "max_tokens": 100, "stream": True}
        with (
            braked(engine, after=8),
            server.client() as client,
            client.stream("POST", COMPLETE, json=body) as response,
        ):
            assert response.status_code == 200
            full = server.complete("x", max_tokens=1)
            error = check_error(full, 503, said="queue is full")
            assert int(full.headers["retry-after"]) >= 1 and error["type"] == "server_error"
        wait_until(lambda: not server.runner.unfinished)
        assert server.complete("x", max_tokens=1).status_code == 200
        check_error(server.complete(["hello"] * 7, max_tokens=1), 400, said="7 choices")


def test_flushing_while_a_request_runs(server, monkeypatch):
    slow_down(server.engine, monkeypatch)
    body = {"prompt": "hello", "max_tokens": 100, "stream": True, "ignore_eos": True}
    with server.client() as client, client.stream("POST", COMPLETE, json=body) as response:
        chunks = response.iter_raw()  # kept: a generator that goes closes the response
        next(chunks)
        check_error(server.post("/flush_cache", {}), 400, said="cannot flush")
    server.wait_idle()
    assert server.post("/flush_cache", {}).status_code == 200
