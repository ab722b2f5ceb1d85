"""Generation over HTTP as clients of OpenAI and SGLang see it: texts equal those of the engine."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random

import openai
import pytest
from body_helpers import CHAT, COMPLETE, GENERATE, HELLO, LEAST
from engine_helpers import idle_sequence, make_engine, outcome, shared_engine, tokenizer, toy
from server_helpers import MODEL, Running, parse_events

from specjax.acceptance import SyntheticAcceptance
from specjax.engine import Completion, SamplingParams, StreamChunk
from specjax.engine.sampling_params import GENERATED_SEEDS, later_seed
from specjax.engine.sequence import TokenLogprob
from specjax.serve.middleware import SYNTHETIC
from specjax.serve.openai_answers import TokenNames
from specjax.serve.sglang_generate import GenerateAnswer, generate_logprobs


@pytest.fixture
def client(server: Running):
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client:
        yield client
    server.wait_idle()


def alone(prompt, **params) -> tuple:
    """Text, tokens and finish reason of an engine without a server and without drafts."""
    return outcome(shared_engine("NONE").generate(prompt, SamplingParams(**params)))


# OpenAI's chat and completions.

CASES = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "seed": 7},
    "hot": {"temperature": 1.5, "seed": -3, "top_p": 0.9},
    "penalties": {"temperature": 0.0, "frequency_penalty": 0.5, "presence_penalty": -0.3},
}


@pytest.mark.parametrize("case", CASES)
def test_chat_equals_the_engine(server, client, case):
    server.post("/flush_cache", {})
    fields = {"model": MODEL, "messages": HELLO, "max_completion_tokens": 30, **CASES[case]}
    answer = client.chat.completions.create(**fields)
    text, ids, reason = alone(HELLO, max_new_tokens=30, **CASES[case])
    choice = answer.choices[0]
    assert choice.message.content == text and choice.message.role == "assistant" and len(ids) == 30
    assert choice.finish_reason == reason["type"] == "length"
    prompt = len(server.engine.encode(HELLO))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, 30)
    assert answer.usage.total_tokens == prompt + 30 and answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == MODEL
    assert answer.system_fingerprint

    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    *deltas, usage = chunks
    assert len(deltas) > 5
    assert {(c.id, c.created, c.model, c.object) for c in chunks} == {
        (chunks[0].id, chunks[0].created, MODEL, "chat.completion.chunk")
    }
    assert deltas[0].choices[0].delta.role == "assistant" and deltas[0].choices[0].delta.content == ""
    assert all(c.choices[0].delta.role is None for c in deltas[1:])
    assert "".join(c.choices[0].delta.content or "" for c in deltas) == text
    assert [c.choices[0].finish_reason for c in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert deltas[-1].choices[0].delta.content is None
    assert usage.choices == [] and usage.usage.completion_tokens == 30 and usage.usage.prompt_tokens == prompt
    assert all(c.usage is None for c in deltas)
    chunks = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4, stream=True)
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks), "without include_usage"


def test_forms_of_prompts(server, client):
    ids = server.engine.encode("hello")
    expected = alone("hello", max_new_tokens=8)[0]
    for prompt in ("hello", ["hello"], ids, [ids]):
        answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=8)
        assert [choice.text for choice in answer.choices] == [expected]
        assert answer.object == "text_completion" and answer.usage.prompt_tokens == len(ids)


def test_choices_have_consecutive_seeds(server, client):
    fields = {"model": MODEL, "prompt": ["hello", "other"], "n": 3, "max_tokens": 10, "seed": 5}
    answer = client.completions.create(**fields)
    assert [choice.index for choice in answer.choices] == list(range(6))
    expected = [
        alone(prompt, max_new_tokens=10, temperature=1.0, seed=seed)[0]
        for prompt, seed in itertools.product(("hello", "other"), (5, 6, 7))
    ]
    assert [choice.text for choice in answer.choices] == expected and len(set(expected)) == 6
    assert [choice.seed for choice in answer.choices] == [5, 6, 7, 5, 6, 7]
    assert answer.usage.completion_tokens == 60
    assert answer.usage.prompt_tokens == sum(len(server.engine.encode(p)) for p in ("hello", "other")), (
        "each prompt counts once"
    )

    texts, endings = [""] * 6, [0] * 6
    for chunk in client.completions.create(**fields, stream=True):
        (choice,) = chunk.choices
        assert not endings[choice.index], "nothing comes after the reason"
        texts[choice.index] += choice.text
        endings[choice.index] += choice.finish_reason is not None
    assert texts == expected and endings == [1] * 6


def test_answer_names_the_seed_that_was_drawn(client):
    fields = {"model": MODEL, "messages": HELLO, "max_tokens": 20, "temperature": 2.0}
    first, second = (client.chat.completions.create(**fields).choices[0] for _ in range(2))
    assert first.message.content != second.message.content
    again = client.chat.completions.create(**fields, seed=first.seed).choices[0]
    assert again.message.content == first.message.content


def test_drawn_seeds_are_exact_in_json():
    limit = 2**53
    assert 0 < later_seed(GENERATED_SEEDS - 1, 127) < limit
    engine = make_engine(toy(), warm=False, random_seed=3)
    assert isinstance(engine.intake.seeds, random.Random)
    seeds = [engine.intake.sequence("a", SamplingParams(max_new_tokens=1)).seed for _ in range(200)]
    assert max(seeds) > 2**50 and all(later_seed(seed, 127) < limit for seed in seeds)
    params = SamplingParams(max_new_tokens=1, seed=2**63 - 1)
    assert engine.intake.sequence("a", params).seed == 2**63 - 1


def test_stop_strings(client, server):
    fields = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 60}
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
    trimmed = server.complete(temperature=0, max_tokens=50, stop="e", no_stop_trim=True).json()["choices"][0]
    assert trimmed["text"].endswith("e") and trimmed["finish_reason"] == "stop"
    token = alone("hello", max_new_tokens=6)[1][5]
    body = server.complete(temperature=0, max_tokens=50, stop_token_ids=[token]).json()
    assert body["choices"][0]["finish_reason"] == "stop" and body["choices"][0]["matched_stop"] == token
    longer = server.complete(temperature=0, max_tokens=50, stop_token_ids=[token], min_tokens=20).json()
    assert longer["usage"]["completion_tokens"] >= 20


def test_echo(server):
    plain = server.complete("hello", temperature=0).json()["choices"][0]["text"]
    assert server.complete("hello", temperature=0, echo=True).json()["choices"][0]["text"] == "hello" + plain
    ids = server.engine.encode("hello")
    events = server.events(COMPLETE, {"prompt": [ids], "temperature": 0, "echo": True, "n": 2})
    for index in (0, 1):
        parts = [event["choices"][0]["text"] for event in events if event["choices"][0]["index"] == index]
        assert "".join(parts) == "hello" + plain
    body = {"prompt": "é\u2028", "echo": True, "max_tokens": 2, "stream": True}
    data = server.post(COMPLETE, body).content
    assert data.isascii() and parse_events(data)[0]["choices"][0]["text"] == "é\u2028"


def test_speculative_metrics(server):
    fields = {"messages": HELLO, "temperature": 0, "max_tokens": 30, "return_speculative_metrics": True}
    metrics = server.post(CHAT, fields).json()["speculative"]
    steps, histogram = metrics["spec_verify_ct"], metrics["spec_accept_histogram"]
    assert sum(histogram) == steps and sum(i * count for i, count in enumerate(histogram)) + steps == 29
    assert metrics["spec_accept_length"] == pytest.approx(29 / steps, abs=1e-4)
    width = server.engine.drafter.width
    assert metrics["spec_accept_rate"] == pytest.approx((29 - steps) / (steps * (width - 1)), abs=1e-4)
    assert 0 < metrics["drafted_steps"] <= steps
    last = server.events(CHAT, fields)[-1]
    assert sum(last["speculative"]["spec_accept_histogram"]) > 0
    assert "speculative" not in server.chat(max_tokens=2).json()


def test_synthetic_acceptance_marks_answers(server, monkeypatch):
    assert SYNTHETIC not in server.complete(max_tokens=2).headers
    monkeypatch.setattr(server.engine, "verify", SyntheticAcceptance((0.5,)))
    assert "not the model's" in server.complete(max_tokens=2).headers[SYNTHETIC]
    assert server.get("/get_server_info").json()["speculative_synthetic_acceptance"] == [0.5]


def test_forms_of_messages(server, client):
    def prompt_tokens(messages) -> int:
        answer = server.post(CHAT, {"messages": messages, "temperature": 0, "max_tokens": 5})
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens"]

    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert prompt_tokens([{"role": "user", "content": parts}]) == prompt_tokens(HELLO)
    system, user = {"role": "system", "content": "be"}, HELLO[0]
    assert prompt_tokens([{"role": "developer", "content": "be"}, user]) == prompt_tokens([system, user])
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []}
    assert prompt_tokens([user, answer, {"role": "tool", "content": "2", "tool_call_id": "c1"}]) > prompt_tokens([user])
    # OpenAI's client can send its own message back.
    message = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5).choices[0].message
    client.chat.completions.create(model=MODEL, messages=[*HELLO, message, *HELLO], max_tokens=5)


def test_default_max_tokens(server):
    assert server.complete("hello").json()["usage"]["completion_tokens"] == 16
    assert server.complete("x" * 120).json()["usage"]["completion_tokens"] == 8, "the default fits the context"
    assert server.chat(temperature=0).json()["usage"]["total_tokens"] == server.engine.context_length
    assert server.chat(temperature=0, max_tokens=3, max_completion_tokens=5).json()["usage"]["completion_tokens"] == 5
    assert len(server.post(GENERATE, {"text": "hello"}).json()["output_ids"]) > 16, "128, or what fits"


@pytest.mark.parametrize("path", LEAST)
def test_sampling_defaults_of_the_model(server, monkeypatch, path):
    monkeypatch.setattr(server.engine, "sampling_defaults", {"temperature": 0.0})
    body = LEAST[path] | ({"sampling_params": {"max_new_tokens": 8}} if path == GENERATE else {"max_tokens": 8})

    def text() -> str:
        answer = server.post(path, body).json()
        return answer["text"] if path == GENERATE else str(answer["choices"][0]).partition("seed")[0]

    assert text() == text(), "greedy"


def test_concurrent_streams_share_steps(server):
    """16 streams over 4 rows have the texts that each request has alone."""
    prompts = [f"prompt {i}" for i in range(16)]
    params = [{"temperature": 0.0 if i % 2 else 0.9, "seed": i} for i in range(16)]

    async def ask(client, prompt, fields):
        stream = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=25, stream=True, **fields)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{server.base}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, p, f) for p, f in zip(prompts, params, strict=True)))

    before = server.engine.counters.steps
    texts = asyncio.run(ask_all())
    assert texts == [alone(p, max_new_tokens=25, **f)[0] for p, f in zip(prompts, params, strict=True)]
    assert server.engine.counters.steps - before < 16 * 24
    server.wait_idle()


def test_models_and_exceptions_of_the_client(client, server):
    (card,) = client.models.list().data
    assert card.id == MODEL and card.max_model_len == server.engine.context_length
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=-1)
    assert caught.value.param == "temperature" and "temperature" in str(caught.value)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, n=0)
    assert server.complete(model=None, max_tokens=1).json()["model"] == MODEL


# SGLang's `/generate`.


def test_generate(server):
    server.post("/flush_cache", {})
    params = {"max_new_tokens": 12, "temperature": 0}

    def generate(**body):
        return server.post(GENERATE, {"sampling_params": params} | body).json()

    body = generate(text="hello", rid="mine")
    text, ids, reason = alone("hello", max_new_tokens=12)
    assert (body["text"], body["output_ids"]) == (text, ids)
    meta, prompt = body["meta_info"], server.engine.encode("hello")
    assert meta["id"] == "mine" and meta["finish_reason"] == reason == {"type": "length", "length": 12}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (len(prompt), 12, 0)
    assert sum(meta["spec_accept_histogram"]) == meta["spec_verify_ct"] and meta["e2e_latency"] > 0
    long = "hello " * 9
    cached = [generate(text=long)["meta_info"]["cached_tokens"] for _ in range(2)]
    assert cached == [0, (len(server.engine.encode(long)) - 1) // 4 * 4]
    events = server.events(GENERATE, {"text": long, "sampling_params": params})
    assert {event["meta_info"]["cached_tokens"] for event in events} == {cached[1]} and len(events) > 1
    assert [answer["text"] for answer in generate(text=["hello", "other"])] == [
        text,
        alone("other", max_new_tokens=12)[0],
    ]
    assert generate(input_ids=prompt)["text"] == generate(input_ids=[prompt])[0]["text"] == text
    mixed = generate(text=["hello", "other"], sampling_params=[params, {"max_new_tokens": 1}])
    assert [len(answer["output_ids"]) for answer in mixed] == [12, 1]
    first, second = generate(text="hello", sampling_params=params | {"n": 2, "temperature": 1.0})
    assert first["text"] != second["text"]


def test_generate_streams_all_text_so_far(server):
    params = {"max_new_tokens": 12, "temperature": 0, "stop": "q"}
    events = server.events(GENERATE, {"text": "hello", "sampling_params": params})
    whole = server.post(GENERATE, {"text": "hello", "sampling_params": params}).json()
    texts = [event["text"] for event in events]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts)) and len(texts) > 2
    assert texts[-1] == whole["text"] and events[-1]["output_ids"] == whole["output_ids"]
    assert [event["meta_info"]["finish_reason"] is None for event in events] == [True] * (len(events) - 1) + [False]
    batch = server.events(GENERATE, {"text": ["hello", "other"], "sampling_params": params})
    assert {event["index"] for event in batch} == {0, 1}


LOGPROBS = (
    TokenLogprob(70, "a", -0.5, ((70, -0.5), (71, -1.0))),
    TokenLogprob(71, "b", -1.0, ((71, -1.0), (9, -math.inf))),
)


def test_texts_of_log_probabilities():
    """JSON has no infinity: -9999, as SGLang."""
    fields = generate_logprobs(LOGPROBS, TokenNames(tokenizer()))
    a, b, c = (tokenizer().decode([token]) for token in (70, 71, 9))
    assert fields["output_token_logprobs"] == [[-0.5, 70, a], [-1.0, 71, b]]
    assert fields["output_top_logprobs"] == [[[-0.5, 70, a], [-1.0, 71, b]], [[-1.0, 71, b], [-9999.0, 9, c]]]
    assert generate_logprobs(LOGPROBS, None)["output_token_logprobs"] == [[-0.5, 70, None], [-1.0, 71, None]]


@pytest.mark.parametrize("incremental", [False, True])
def test_log_probabilities_of_events(incremental):
    """All tokens so far, or with incremental output only the new ones."""
    reason = {"type": "length", "length": 2}
    done = Completion("r", "ab", [70, 71], 1, reason, 1, 1.0, [1, 0], 7, logprobs=list(LOGPROBS))
    sequence = idle_sequence(SamplingParams(logprobs=2))
    names, thoughts = TokenNames(tokenizer()), shared_engine("NONE").intake.thoughts
    answer = GenerateAnswer([sequence], 2, False, thoughts, incremental, names)
    chunks = [StreamChunk(0, "", [70], None, ()), StreamChunk(0, "a", [], None, LOGPROBS[:1])]
    chunks.append(StreamChunk(0, "b", [71], done, LOGPROBS[1:]))
    events = [event for chunk in chunks for event in answer.events(chunk)]
    empty, first, last = (json.loads(event.removeprefix(b"data: "))["meta_info"] for event in events)
    whole = answer.whole([done])["meta_info"]
    for name in ("output_token_logprobs", "output_top_logprobs"):
        assert empty.get(name, []) == [] and first[name] == whole[name][:1]
        assert last[name] == (whole[name][1:] if incremental else whole[name])
