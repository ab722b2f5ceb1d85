"""Bodies made to fill the memory or to stop the server: refused early, at once, and off the event loop."""

from __future__ import annotations

import json
import threading
import tracemalloc
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
from body_helpers import CHAT, COMPLETE, EDGES, GENERATE, HELLO, RULES, read_request, refusal
from engine_helpers import shared_engine
from server_helpers import Running, running

from specjax.serve import fields
from specjax.serve.errors import ApiError
from specjax.serve.fields import INLINE_BYTES, MAX_NODES, MAX_VALUES, Reading, count_values
from specjax.serve.openai_requests import ChatRequest, CompletionRequest
from specjax.serve.sglang_generate import GenerateRequest, SamplingBody

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def members(value: Any) -> tuple[int, int]:
    """(values, lists and objects and members of objects)"""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    own = 1 + (len(value) if isinstance(value, dict) else 0) if isinstance(value, dict | list) else 0
    found = [members(each) for each in inner]
    return 1 + sum(values for values, _ in found), own + sum(nodes for _, nodes in found)


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 2**20])
@hypothesis.given(JSON, st.booleans())
@hypothesis.settings(max_examples=50, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_values_are_counted_without_parsing(monkeypatch, piece, value, ascii):
    """However the text is cut into pieces: between a backslash and what it escapes, or inside a character."""
    monkeypatch.setattr(fields, "_PIECE", piece)
    values, nodes = count_values(json.dumps(value, ensure_ascii=ascii).encode("utf-8", "surrogatepass"))
    expected_values, expected_nodes = members(value)
    assert nodes == expected_nodes and expected_values <= values <= expected_values + expected_nodes


def test_strings_full_of_escapes_count_as_one():
    for text in (b'"' + b"\\\\" * 10**6 + b'"', b'"' + b'\\"[,:{' * 10**6 + b'"', b'"' + b"\\\\" * 3 + b'\\",,,"'):
        assert count_values(text)[1] == 0 and count_values(b"[" + text + b",1]") == (3, 1)


@pytest.mark.parametrize("least", [b"[]", b"{}", b"1", b'""', b'{"a":1}', b"[[]]"])
def test_too_many_values_are_a_413(least):
    many = max(MAX_VALUES, MAX_NODES) + 2
    with pytest.raises(ApiError) as caught:
        Reading().parse(b"[" + b",".join([least] * many) + b"]")
    assert caught.value.status == 413 and str(MAX_VALUES) in str(caught.value)


def test_many_small_texts_are_counted_together():
    call = {"function": {"name": "f", "arguments": '{"a": [' + ",".join(["[]"] * 40_000) + "]}"}}
    messages = [*HELLO, *[{"role": "assistant", "tool_calls": [call]}] * 4]
    with pytest.raises(ApiError) as caught:
        read_request(ChatRequest, json.dumps({"messages": messages}).encode(), RULES)
    assert caught.value.status == 413
    assert read_request(ChatRequest, json.dumps({"messages": messages[:3]}).encode(), RULES)


@pytest.mark.parametrize("depth", [150, 300, 100_000, 10**7])
@pytest.mark.parametrize("form", ["[{}]", '{{"a":{}}}'])
def test_deep_nesting_is_a_400(depth, form):
    left, right = form.split("{}") if form == "[{}]" else ('{"a":', "}")
    body = b'{"prompt": "x", "user_data": ' + left.encode() * depth + b"1" + right.encode() * depth + b"}"
    if depth < 200:
        assert read_request(CompletionRequest, body, RULES)[2].headers
        return
    with pytest.raises(ApiError) as caught:
        read_request(CompletionRequest, body, RULES)
    assert caught.value.status in (400, 413)


HOSTILE: dict[str, tuple[type, dict[str, Any], str]] = {
    "stop ids": (CompletionRequest, {"prompt": "x", "stop_token_ids": ["x"] * 100_000}, "stop_token_ids"),
    "wrong stop ids": (CompletionRequest, {"prompt": "x", "stop_token_ids": ["x"] * 1000}, "stop_token_ids"),
    "stop": (CompletionRequest, {"prompt": "x", "stop": ["x"] * 100_000}, "stop"),
    "stop numbers": (CompletionRequest, {"prompt": "x", "stop": [5] * 10}, "stop"),
    "bias": (CompletionRequest, {"prompt": "x", "logit_bias": {str(i): "x" for i in range(100_000)}}, "logit_bias"),
    "metadata": (CompletionRequest, {"prompt": "x", "metadata": {str(i): 0 for i in range(100_000)}}, "metadata"),
    "prompts": (CompletionRequest, {"prompt": ["x"] * 500_000}, "prompt"),
    "wrong prompts": (CompletionRequest, {"prompt": [None] * 500_000}, "prompt"),
    "ids": (CompletionRequest, {"prompt": [5] * 500_000}, "prompt"),
    "lists of ids": (CompletionRequest, {"prompt": [[5] * 100_000] * 5}, "prompt"),
    "texts": (GenerateRequest, {"text": ["x"] * 500_000}, "text"),
    "choices": (GenerateRequest, {"text": ["x"] * 500, "sampling_params": {"n": 128}}, "n"),
    "sampling": (GenerateRequest, {"text": ["x"] * 9, "sampling_params": [{}] * 100_000}, "sampling_params"),
    "rid": (GenerateRequest, {"text": "x", "rid": [5] * 500_000}, "rid"),
    "messages": (ChatRequest, {"messages": HELLO * 40_000}, "messages"),
    "wrong messages": (ChatRequest, {"messages": [0] * 500_000}, "messages"),
    "parts": (ChatRequest, {"messages": [{"role": "user", "content": [0] * 500_000}]}, "messages"),
    "calls": (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [0] * 500_000}]}, "messages"),
    "tools": (ChatRequest, {"messages": HELLO, "tools": [0] * 500_000}, "tools"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_lengths_are_checked_before_items(case):
    """One error, in time and memory that the body's own parsing takes. The bounds are far above what is needed."""
    kind, given, param = HOSTILE[case]
    data = json.dumps(given).encode()
    tracemalloc.start()
    try:
        Reading().parse(data)
        _, parsed = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        with pytest.raises(ApiError) as caught:
            read_request(kind, data, RULES)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.status == 400 and caught.value.param == param
    assert len(str(caught.value)) < 500
    assert peak < 2 * parsed + 2**20


def test_unknown_fields_by_the_thousand():
    given = {"prompt": "x"} | {f"f{i}" * 20: i for i in range(50_000)}
    assert len(str(read_request(CompletionRequest, json.dumps(given).encode(), RULES)[2].headers)) < 4096


@pytest.fixture(scope="module")
def server():
    with running(shared_engine("NGRAM")) as served:
        yield served


def test_large_bodies_are_read_beside_the_event_loop(server: Running, monkeypatch):
    """While one is read, others are answered."""
    threads: dict[int, str] = {}
    inside, go_on = threading.Event(), threading.Event()

    parse = Reading.parse

    def spy(reading, data):
        threads[len(data)] = threading.current_thread().name
        if len(data) > INLINE_BYTES:
            inside.set()
            assert go_on.wait(60)
        return parse(reading, data)

    monkeypatch.setattr(Reading, "parse", spy)
    answers = []
    large = threading.Thread(target=lambda: answers.append(server.complete(["x"] * 100_000)))
    large.start()
    assert inside.wait(60)
    assert server.complete(max_tokens=1).status_code == 200
    go_on.set()
    large.join()
    assert answers[0].status_code == 400 and "100000 choices" in answers[0].json()["error"]["message"]
    names = [name for size, name in sorted(threads.items())]
    assert not names[0].startswith("specjax-parse") and names[1].startswith("specjax-parse")


def test_bodies_that_end_early(server: Running):
    for size in (INLINE_BYTES, 10**6):
        with server.client() as client:
            body = b'{"prompt": "' + b"x" * size
            response = client.post(COMPLETE, content=body, headers={"Content-Type": "application/json"})
            assert response.status_code == 400
    server.wait_idle()


# Fuzz: valid bodies with a few members replaced. Whatever comes, it is an answer or a refusal.

ODD = (
    st.sampled_from(EDGES)
    | (st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20))
    | st.lists(st.integers(-2, 300) | st.text(max_size=3) | st.none(), max_size=5)
    | st.dictionaries(st.text(max_size=5), st.integers(-200, 200) | st.none(), max_size=3)
)
JSON_TYPE = {"Content-Type": "application/json"}
FEW = {"max_tokens": 2, "temperature": 0.5, "seed": 1}
BODIES: dict[str, tuple[type, dict[str, Any]]] = {
    CHAT: (ChatRequest, {"messages": HELLO, **FEW}),
    COMPLETE: (CompletionRequest, {"prompt": ["a", "b"], **FEW}),
    GENERATE: (GenerateRequest, {"text": "a", "sampling_params": {"max_new_tokens": 2, "seed": 1}}),
}
INNER = {
    "messages": ["role", "content", "name", "tool_calls", "tool_call_id", "refusal", "x"],
    "sampling_params": [*GenerateRequest.elsewhere, "regex", "x"],
}


@st.composite
def bodies(draw, path: str) -> dict[str, Any]:
    kind, body = BODIES[path]
    names = [*kind.model_fields, *kind.elsewhere, *kind.unsupported, "unknown", ""]
    body = body | draw(st.dictionaries(st.sampled_from(names), ODD, max_size=4))
    for name, inner in INNER.items():
        if name in body and draw(st.booleans()):
            changed = draw(st.dictionaries(st.sampled_from(inner), ODD, max_size=3))
            if isinstance(body[name], dict):
                body[name] = body[name] | changed
            elif isinstance(body[name], list) and body[name] and isinstance(body[name][0], dict):
                body[name] = [body[name][0] | changed]
    return body


@pytest.mark.parametrize("path", BODIES)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=100)
def test_every_body_is_a_task_or_a_refusal(path, data):
    """Up to the sequences that the engine would run."""
    error = refusal(path, data.draw(bodies(path)), shared_engine("NGRAM").intake)
    assert error is None or (error.status in (400, 404) and 0 < len(str(error)) < 1000)


@pytest.mark.parametrize(
    ("path", "every"), [(GENERATE, 4), *(pytest.param(path, 1, marks=pytest.mark.slow) for path in BODIES)]
)
def test_what_is_accepted_is_answered(server: Running, path, every):
    """Through the engine. Log-probabilities are left out: they compile other programs."""
    kind, least = BODIES[path]
    changes: list[Any] = [{name: value} for name in kind.model_fields for value in EDGES]
    if path == GENERATE:
        params = least["sampling_params"]
        changes += [{"sampling_params": params | {n: value}} for n in SamplingBody.model_fields for value in EDGES]
    bodies = [least | change for change in changes if not {"logprobs", "return_logprob", "timeout"} & set(change)]
    few = [body for body in bodies if refusal(path, body, server.engine.intake) is None]
    assert len(few) > 100
    few = few[::every]
    with server.client() as client:
        for body in few:
            response = client.post(path, content=json.dumps(body).encode(), headers=JSON_TYPE)
            assert response.status_code == 200, (body, response.text)
    server.wait_idle()
