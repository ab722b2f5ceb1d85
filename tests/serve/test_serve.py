"""The server as an OpenAI client sees it: what works, and that it is the engine's own text."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import replace

import httpx
import openai
import pytest
from engine_helpers import outcome, shared_engine
from server_helpers import MODEL, Running, running

from specjax.engine import SamplingParams
from specjax.engine.batch import Counters
from specjax.engine.draft_policy import MIN_DOUBTED_STEPS, doubt, drafting_summary
from specjax.serve.metrics import Report

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server():
    with running(shared_engine("NGRAM")) as served:
        yield served


@pytest.fixture
def client(server: Running):
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as made:
        yield made
    server.wait_idle()


def alone(prompt, **params) -> tuple:
    """What the engine writes without a server and without drafts."""
    return outcome(shared_engine("NONE").generate(prompt, SamplingParams(**params)))


CASES = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "seed": 7},
    "hot": {"temperature": 1.5, "seed": -3, "top_p": 0.9},
    "penalties": {"temperature": 0.0, "frequency_penalty": 0.5, "presence_penalty": -0.3},
}


@pytest.mark.parametrize("case", CASES)
def test_chat_is_the_engines_text(server, client, case):
    fields = CASES[case]
    httpx.post(f"{server.base}/flush_cache")
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=30, **fields)
    text, ids, reason = alone(MESSAGES, max_new_tokens=30, **fields)
    choice = answer.choices[0]
    assert choice.message.content == text and choice.message.role == "assistant" and len(ids) == 30
    assert choice.finish_reason == reason["type"] == "length"
    prompt = len(server.engine.encode(MESSAGES))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, 30)
    assert answer.usage.total_tokens == prompt + 30 and answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == MODEL
    assert answer.system_fingerprint


@pytest.mark.parametrize("case", CASES)
def test_a_stream_is_the_whole_in_pieces(client, case):
    fields = {"model": MODEL, "messages": MESSAGES, "max_tokens": 30} | CASES[case]
    client.chat.completions.create(**fields)  # then as much of the prompt is cached for the next two
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    *said, usage = chunks
    assert len(said) > 5, "piece by piece"
    assert {(c.id, c.created, c.model, c.object) for c in chunks} == {
        (chunks[0].id, chunks[0].created, MODEL, "chat.completion.chunk")
    }
    assert said[0].choices[0].delta.role == "assistant" and said[0].choices[0].delta.content == ""
    assert all(c.choices[0].delta.role is None for c in said[1:])
    assert "".join(c.choices[0].delta.content or "" for c in said) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in said] == [None] * (len(said) - 1) + ["length"]
    assert said[-1].choices[0].delta.content is None
    assert usage.choices == [] and usage.usage == whole.usage
    assert all(c.usage is None for c in said)


def test_without_include_usage_there_is_no_usage(client):
    chunks = list(client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4, stream=True))
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)


def test_the_prompts_of_completions(server, client):
    ids = server.engine.encode("hello")
    greedy = {"model": MODEL, "temperature": 0, "max_tokens": 8}
    expected = alone("hello", max_new_tokens=8)[0]
    for prompt in ("hello", ["hello"], ids, [ids]):
        answer = client.completions.create(prompt=prompt, **greedy)
        assert [choice.text for choice in answer.choices] == [expected]
        assert answer.object == "text_completion" and answer.usage.prompt_tokens == len(ids)
    assert client.completions.create(model=MODEL, prompt="hello").usage.completion_tokens == 16, "the default"


def test_choices_are_prompt_by_prompt_each_with_its_seed(server, client):
    fields = {"model": MODEL, "prompt": ["hello", "other"], "n": 3, "max_tokens": 10, "seed": 5, "best_of": 3}
    answer = client.completions.create(**fields)
    assert [choice.index for choice in answer.choices] == list(range(6))
    expected = [
        alone(prompt, max_new_tokens=10, temperature=1.0, seed=5 + i)[0]
        for prompt in ("hello", "other")
        for i in range(3)
    ]
    assert [choice.text for choice in answer.choices] == expected and len(set(expected)) == 6
    assert [choice.seed for choice in answer.choices] == [5, 6, 7, 5, 6, 7]
    assert answer.usage.completion_tokens == 60
    assert answer.usage.prompt_tokens == sum(len(server.engine.encode(p)) for p in ("hello", "other")), (
        "each counts once"
    )

    texts = dict.fromkeys(range(6), "")
    endings = dict.fromkeys(range(6), 0)
    for chunk in client.completions.create(**fields, stream=True):
        (choice,) = chunk.choices
        assert not endings[choice.index], "nothing comes after the reason"
        texts[choice.index] += choice.text
        endings[choice.index] += choice.finish_reason is not None
    assert list(texts.values()) == expected and set(endings.values()) == {1}


def test_no_seed_means_another_text_and_the_answer_tells_which(client):
    fields = {"model": MODEL, "messages": MESSAGES, "max_tokens": 20, "temperature": 2.0}
    first, second = (client.chat.completions.create(**fields).choices[0] for _ in range(2))
    assert first.message.content != second.message.content
    again = client.chat.completions.create(**fields, seed=first.seed).choices[0]
    assert again.message.content == first.message.content


def test_a_stop_string_is_never_shown(client):
    fields = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 60}
    text = client.chat.completions.create(**fields).choices[0].message.content
    stop = text[11:15]
    at = text.find(stop)
    answer = client.chat.completions.create(**fields, stop=["never in it", stop])
    assert answer.choices[0].message.content == text[:at]
    assert (answer.choices[0].finish_reason, answer.choices[0].matched_stop) == ("stop", stop)
    assert answer.usage.completion_tokens < 60
    pieces = [c.choices[0] for c in client.chat.completions.create(**fields, stop=stop, stream=True)]
    assert "".join(piece.delta.content or "" for piece in pieces) == text[:at]
    assert pieces[-1].finish_reason == "stop" and pieces[-1].matched_stop == stop


def test_text_that_may_become_a_stop_string_is_held_back(server):
    fields = {"prompt": "hello", "temperature": 0, "max_tokens": 40}
    text = server.complete(**fields).json()["choices"][0]["text"]
    begins = text[9] + "\u0001\u0002"  # its first letter comes, the rest never does
    held = server.events("/v1/completions", fields | {"stop": begins})
    assert "".join(e["choices"][0]["text"] for e in held) == text
    for event in held[:-1]:
        if event["choices"][0]["finish_reason"] is None and event is not held[-2]:
            assert not event["choices"][0]["text"].endswith(begins[0])


def test_half_a_character_is_never_sent(server):
    """Emoji of four bytes, one token a byte: forced by a bias too large to lose."""
    ids = server.engine.encode("😀")
    assert len(ids) == 4
    # Each byte may come once in turn: the penalty takes away what has been said.
    bias = {str(token): 60 - i for i, token in enumerate(ids)}
    fields = {"prompt": "x", "temperature": 0, "max_tokens": 7, "logit_bias": bias, "frequency_penalty": 2.0}
    events = server.events("/v1/completions", fields)
    assert all("\ufffd" not in e["choices"][0]["text"] for e in events[:-2])
    assert "".join(e["choices"][0]["text"] for e in events) == server.complete(**fields).json()["choices"][0]["text"]


def test_extensions(server):
    end = shared_engine("NONE").generate("hello", SamplingParams(max_new_tokens=6)).output_ids[5]
    body = server.complete(temperature=0, max_tokens=50, stop_token_ids=[end]).json()
    assert body["choices"][0]["finish_reason"] == "stop" and body["choices"][0]["matched_stop"] == end
    more = server.complete(temperature=0, max_tokens=50, stop_token_ids=[end], min_tokens=20).json()
    assert more["usage"]["completion_tokens"] >= 20
    kept = server.complete(temperature=0, max_tokens=50, stop="e", no_stop_trim=True).json()["choices"][0]
    assert kept["text"].endswith("e") and kept["finish_reason"] == "stop"


def test_echo(server):
    plain = server.complete("hello", temperature=0).json()["choices"][0]["text"]
    assert server.complete("hello", temperature=0, echo=True).json()["choices"][0]["text"] == "hello" + plain
    ids = server.engine.encode("hello")
    events = server.events("/v1/completions", {"prompt": [ids, "x"][:1], "temperature": 0, "echo": True, "n": 2})
    texts = {i: "".join(e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == i) for i in (0, 1)}
    assert texts == {0: "hello" + plain, 1: "hello" + plain}


def test_what_speculation_did(server):
    body = server.chat(temperature=0, max_tokens=30, return_speculative_metrics=True).json()
    metrics = body["metadata"]["speculative"]
    steps, histogram = metrics["spec_verify_ct"], metrics["spec_accept_histogram"]
    assert sum(histogram) == steps and sum(i * count for i, count in enumerate(histogram)) + steps == 29
    assert metrics["spec_accept_length"] == pytest.approx(29 / steps, abs=1e-4)
    width = server.engine.drafter.width
    assert metrics["spec_accept_rate"] == pytest.approx((29 - steps) / (steps * (width - 1)), abs=1e-4)
    last = server.events(
        "/v1/chat/completions",
        {"messages": MESSAGES, "temperature": 0, "max_tokens": 30, "return_speculative_metrics": True},
    )[-1]
    assert sum(last["metadata"]["speculative"]["spec_accept_histogram"]) > 0
    assert "metadata" not in server.chat(max_tokens=2).json()


def test_messages_of_every_kind(server):
    def text(messages, **fields):
        body = server.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 5} | fields)
        assert body.status_code == 200, body.text
        return body.json()["usage"]["prompt_tokens"]

    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert text([{"role": "user", "content": parts}]) == text(MESSAGES)
    system, user = {"role": "system", "content": "be"}, MESSAGES[0]
    assert text([{"role": "developer", "content": "be"}, user]) == text([system, user])
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []}
    assert text([user, answer, {"role": "tool", "content": "2", "tool_call_id": "c1"}]) > text([user])
    # What our own client library makes of an answer goes back as it is.
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key="none") as client:
        said = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5).choices[0].message
        client.chat.completions.create(model=MODEL, messages=[*MESSAGES, said, *MESSAGES], max_tokens=5)


def test_fields_that_ask_for_nothing_pass(server):
    nothing = {
        "response_format": {"type": "text"}, "tools": None, "tool_choice": "none", "user": "me", "metadata": {"a": "b"},
        "store": False, "service_tier": "auto", "logprobs": False, "top_logprobs": None, "stop": None, "n": None,
        "logit_bias": {}, "max_tokens": 2, "stream": False, "stream_options": None, "seed": None, "temperature": None,
    }  # fmt: skip
    assert server.chat(**nothing).status_code == 200
    nothing = {"suffix": None, "logprobs": None, "best_of": 1, "echo": False, "max_tokens": None}
    assert server.complete(**nothing).json()["usage"]["completion_tokens"] == 16


def test_max_tokens_absent_is_the_rest_of_the_context(server):
    body = server.chat(temperature=0).json()
    assert body["usage"]["total_tokens"] == server.engine.context_length
    assert server.chat(temperature=0, max_tokens=3, max_completion_tokens=5).json()["usage"]["completion_tokens"] == 5


def test_async_clients_share_the_batch_and_get_their_own_texts(server):
    """16 streams at once over 4 rows: every text is the one that the request alone gets."""
    prompts = [f"prompt {i}" for i in range(16)]
    params = [{"temperature": 0.0 if i % 2 else 0.9, "seed": i} for i in range(16)]

    async def one(client, prompt, fields):
        pieces = []
        stream = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=25, stream=True, **fields)
        async for chunk in stream:
            pieces.append(chunk.choices[0].text)
        return "".join(pieces)

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{server.base}/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client, p, f) for p, f in zip(prompts, params, strict=True)))

    before = server.engine.counters.steps
    texts = asyncio.run(all_of_them())
    assert texts == [alone(p, max_new_tokens=25, **f)[0] for p, f in zip(prompts, params, strict=True)]
    assert server.engine.counters.steps - before < 16 * 24, "they shared steps"
    server.wait_idle()


def test_generate(server):
    params = {"max_new_tokens": 12, "temperature": 0}
    body = server.post("/generate", {"text": "hello", "sampling_params": params, "rid": "mine"}).json()
    text, ids, reason = alone("hello", max_new_tokens=12)
    assert (body["text"], body["output_ids"]) == (text, ids)
    meta = body["meta_info"]
    assert meta["id"] == "mine" and meta["finish_reason"] == reason == {"type": "length", "length": 12}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (
        len(server.engine.encode("hello")),
        12,
        0,
    )
    long = {"text": "hello " * 9, "sampling_params": params}
    cached = [server.post("/generate", long).json()["meta_info"]["cached_tokens"] for _ in range(2)]
    assert cached == [0, (len(server.engine.encode("hello " * 9)) - 1) // 4 * 4]
    events = server.events("/generate", long)
    counts = [event["meta_info"]["cached_tokens"] for event in events]
    assert set(counts) == {cached[1]} and len(counts) > 1
    assert sum(meta["spec_accept_histogram"]) == meta["spec_verify_ct"] and meta["e2e_latency"] > 0
    both = server.post("/generate", {"text": ["hello", "other"], "sampling_params": params}).json()
    assert [b["text"] for b in both] == [text, alone("other", max_new_tokens=12)[0]]
    prompt_ids = server.engine.encode("hello")
    assert server.post("/generate", {"input_ids": prompt_ids, "sampling_params": params}).json()["text"] == text
    assert server.post("/generate", {"input_ids": [prompt_ids], "sampling_params": params}).json()[0]["text"] == text
    mixed = server.post("/generate", {"text": ["hello", "other"], "sampling_params": [params, {"max_new_tokens": 1}]})
    assert [len(b["output_ids"]) for b in mixed.json()] == [12, 1]
    assert len(server.post("/generate", {"text": "hello"}).json()["output_ids"]) > 16, "128, or what fits"
    two = server.post("/generate", {"text": "hello", "sampling_params": params | {"n": 2, "temperature": 1.0}}).json()
    assert len(two) == 2 and two[0]["text"] != two[1]["text"]


def test_generate_streams_the_text_so_far(server):
    params = {"max_new_tokens": 12, "temperature": 0, "stop": "q"}
    events = server.events("/generate", {"text": "hello", "sampling_params": params})
    whole = server.post("/generate", {"text": "hello", "sampling_params": params}).json()
    texts = [event["text"] for event in events]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts)) and len(texts) > 2
    assert texts[-1] == whole["text"] and events[-1]["output_ids"] == whole["output_ids"]
    assert [event["meta_info"]["finish_reason"] is None for event in events] == [True] * (len(events) - 1) + [False]
    batch = server.events("/generate", {"text": ["hello", "other"], "sampling_params": params})
    assert {event["index"] for event in batch} == {0, 1}


def test_models_health_and_info(server, client):
    (card,) = client.models.list().data
    assert card.id == MODEL and card.max_model_len == server.engine.context_length
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert server.complete(max_tokens=8).status_code == 200
    with server.client() as http:
        assert http.get("/health").status_code == 200
        info = http.get("/get_model_info").json()
        assert info == http.get("/model_info").json()
        assert info["context_length"] == 128 and info["speculative_algorithm"] == "NGRAM"
        assert http.get("/openapi.json").status_code == 200 and http.get("/docs").status_code == 200
        assert info["verify_steps"] >= info["drafted_steps"] > 0
        assert (info["not_drafted"] is None) == (info["verify_steps"] == info["drafted_steps"])
        for method in ("GET", "POST"):
            flushed = http.request(method, "/flush_cache")
            assert flushed.status_code == 200 and flushed.json()["success"] is True


def test_reports_say_why_steps_did_not_draft():
    engine = shared_engine("NGRAM")
    limited = replace(engine.buckets, block_tokens=1)
    found = drafting_summary(engine.drafter, limited, 10, 4)
    assert found["drafted_steps"] == 4 and "batches of more than 1 requests" in found["not_drafted"]
    assert "number of draft tokens" in found["not_drafted"]
    assert "speculate: false" in drafting_summary(engine.drafter, engine.buckets, 10, 4)["not_drafted"]
    assert drafting_summary(engine.drafter, engine.buckets, 10, 10)["not_drafted"] is None
    plain = shared_engine("NONE")
    assert drafting_summary(plain.drafter, plain.buckets, 10, 0) == {"drafted_steps": 0, "not_drafted": None}


def test_a_draft_model_of_which_nothing_is_accepted_is_reported_once(caplog, monkeypatch):
    """N-grams may find nothing; a model that never agrees was made for another target."""
    engine = shared_engine("NONE")
    model = engine.drafter._replace(name="EAGLE3", features="final")
    assert doubt(model, MIN_DOUBTED_STEPS - 1, 0) is None and doubt(model, 10 * MIN_DOUBTED_STEPS, 1) is None
    assert doubt(engine.drafter, 10 * MIN_DOUBTED_STEPS, 0) is None
    problem = doubt(model, MIN_DOUBTED_STEPS, 0)
    assert problem is not None and "EAGLE3" in problem and "another model" in problem
    monkeypatch.setattr(engine, "drafter", model)
    monkeypatch.setattr(engine, "counters", Counters(verifications=300, drafted_steps=300, verified=300, own_steps=300))
    report = Report(engine, interval=40)
    with caplog.at_level("WARNING"):
        for _ in range(3):
            report.after_step()
    assert [record.getMessage() for record in caplog.records] == [doubt(model, 300, 0)]


def test_tokens_that_a_grammar_forces_say_nothing_of_the_draft_model():
    counters = Counters()
    counters.count(3, verified=True, drafted=True, free=False)
    counters.count(1, verified=True, drafted=True, free=True)
    counters.count(2, verified=True, drafted=False, free=True)
    assert (counters.drafted_steps, counters.accepted) == (2, 3)
    assert (counters.own_steps, counters.own_accepted) == (1, 0)


def test_request_ids_are_echoed_if_they_are_sane(server):
    with server.client() as http:
        assert http.get("/health", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
        other = http.get("/health", headers={"X-Request-Id": "x" * 500}).headers["x-request-id"]
        assert len(other) == 24 and http.get("/nothing").headers["x-request-id"] != other


def test_streams_are_one_line_of_ascii_each(server):
    with server.client() as http, http.stream("POST", "/v1/completions", json={
        "prompt": "é\u2028", "echo": True, "max_tokens": 2, "stream": True,
    }) as response:  # fmt: skip
        data = response.read()
    assert data.isascii() and json.loads(data.split(b"\n\n")[0][6:])["choices"][0]["text"] == "é\u2028"
