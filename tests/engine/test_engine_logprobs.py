"""Log-probabilities of the output: the raw log-softmax, one entry a token, in any batch."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import openai
import pytest
from engine_helpers import check_idle, make_engine, outcome, shared_engine, toy
from server_helpers import MODEL, running

from specjax.engine import SamplingParams

MESSAGES = [{"role": "user", "content": "hello"}]


def log_softmax(prompt: list[int], output: list[int]) -> np.ndarray:
    logits = np.asarray(toy().logits([*prompt, *output]), np.float64)
    shifted = logits - logits.max()
    return shifted - math.log(np.exp(shifted).sum())


def check(engine, prompt, done, top: int, ids_wanted=()) -> None:
    ids = engine.encode(prompt)
    assert done.logprobs is not None and len(done.logprobs) == len(done.output_ids)
    assert "".join(one.text for one in done.logprobs) == done.text
    for i, one in enumerate(done.logprobs):
        expected = log_softmax(ids, done.output_ids[:i])
        assert one.token == done.output_ids[i]
        assert one.logprob == pytest.approx(expected[one.token], abs=1e-4)
        assert len(one.top) == top
        assert dict(one.of_ids) == pytest.approx({token: expected[token] for token in ids_wanted}, abs=1e-4)
        assert [logprob for _, logprob in one.top] == pytest.approx(sorted(expected)[::-1][:top], abs=1e-4)
        assert [expected[token] for token, _ in one.top] == pytest.approx([logprob for _, logprob in one.top], abs=1e-4)


CASES = {
    "greedy": {"logprobs": 0},
    "sampled": {"logprobs": 5, "temperature": 1.3, "seed": 3, "top_k": 5},
    "biased": {"logprobs": 20, "logit_bias": {40: 5.0}, "frequency_penalty": 1.0},
    "stop string": {"logprobs": 2, "stop": ["e", "in"], "min_new_tokens": 2},
    "of ids": {"logprobs": 1, "logprob_ids": [264, 0, 40], "temperature": 1.0, "seed": 1},
    "kept": {"logprobs": 2, "stop": ["e"], "no_stop_trim": True},
}


@pytest.mark.parametrize("case", CASES)
def test_logprobs_equal_the_raw_log_softmax(case):
    engine = shared_engine("NGRAM")
    params = SamplingParams(max_new_tokens=24, **CASES[case])
    done = engine.generate("hello", params)
    check(engine, "hello", done, CASES[case]["logprobs"], CASES[case].get("logprob_ids", ()))
    check_idle(engine)


def test_logprobs_of_some_requests_of_a_batch():
    engine, prompts = shared_engine("NGRAM"), ["hello", "other", "hello there"]
    params = [SamplingParams(max_new_tokens=20), SamplingParams(max_new_tokens=30), SamplingParams(max_new_tokens=9)]
    params[2] = replace(params[2], temperature=0.7, seed=1)
    plain = engine.generate(prompts, params)
    scored = engine.generate(prompts, [params[0], replace(params[1], logprobs=3), params[2]])
    assert [outcome(done) for done in scored] == [outcome(done) for done in plain]
    assert scored[0].logprobs is None and scored[2].logprobs is None
    check(engine, "other", scored[1], 3)


def test_logprobs_after_a_retraction():
    engine = make_engine(toy(), "NONE", max_total_tokens=80)
    prompts = ["hello", "other"]
    params = SamplingParams(max_new_tokens=60, logprobs=1)
    for prompt, done in zip(prompts, engine.generate(prompts, params), strict=True):
        check(engine, prompt, done, 1)
    assert engine.scheduler.retractions


def test_logprobs_of_tokens_without_text():
    """An end token and an unfinished character."""
    engine = make_engine(toy(), "NONE", eos=(2,))
    first = engine.encode("😀")[0]
    done = engine.generate("hello", SamplingParams(max_new_tokens=2, logprobs=1, logit_bias={first: 100.0}))
    check(engine, "hello", done, 1)
    assert done.text == "\ufffd"
    done = engine.generate("hello", SamplingParams(max_new_tokens=5, logprobs=1, logit_bias={2: 100.0}))
    assert done.finish_reason == {"type": "stop", "matched": 2}
    assert [(one.token, one.text) for one in done.logprobs] == [(2, "")]


@pytest.fixture(scope="module")
def server():
    with running(shared_engine("NGRAM")) as served:
        yield served


def check_same(actual, expected) -> None:
    """Equal but for the last bits of floats: the drafts decide how wide a forward is."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        actual, expected = list(actual.values()), [expected[key] for key in actual]
    if isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for pair in zip(actual, expected, strict=True):
            check_same(*pair)
    else:
        assert actual == (pytest.approx(expected, abs=1e-4) if isinstance(expected, float) else expected)


def test_chat_completions(server):
    fields = {"model": MODEL, "messages": MESSAGES, "max_tokens": 25, "temperature": 0, "logprobs": True}
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client:
        choice = client.chat.completions.create(**fields, top_logprobs=4).choices[0]
        entries = choice.logprobs.content
        assert len(entries) == 25 and "".join(entry.token for entry in entries) == choice.message.content
        assert b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace") == choice.message.content
        for entry in entries:
            assert len(entry.top_logprobs) == 4 and entry.top_logprobs[0].logprob == entry.logprob
        plain = client.chat.completions.create(**fields).choices[0].logprobs.content
        check_same([(e.token, e.logprob, e.top_logprobs) for e in plain], [(e.token, e.logprob, []) for e in entries])
        streamed = []
        for chunk in client.chat.completions.create(**fields, top_logprobs=4, stream=True, stop="zzq"):
            if chunk.choices[0].logprobs is not None:
                streamed += chunk.choices[0].logprobs.content
        check_same([e.model_dump() for e in streamed], [e.model_dump() for e in entries])
        assert client.chat.completions.create(**fields | {"logprobs": False}).choices[0].logprobs is None


def test_streamed_logprobs_with_stop_strings(server):
    fields = {"messages": MESSAGES, "max_tokens": 60, "temperature": 0, "logprobs": True}
    text = server.post("/v1/chat/completions", fields).json()["choices"][0]["message"]["content"]
    fields["stop"] = [text[20:23], text[5] + "#"]
    whole = server.post("/v1/chat/completions", fields).json()
    choice = whole["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["content"]) == whole["usage"]["completion_tokens"]
    assert "".join(e["token"] for e in choice["logprobs"]["content"]) == choice["message"]["content"]
    found = [e["choices"][0] for e in server.events("/v1/chat/completions", fields)]
    check_same([e for c in found if c["logprobs"] for e in c["logprobs"]["content"]], choice["logprobs"]["content"])


def test_completions(server):
    fields = {"prompt": "hello", "max_tokens": 12, "temperature": 0.9, "seed": 4, "logprobs": 2, "n": 2}
    whole = server.post("/v1/completions", fields).json()
    for choice in whole["choices"]:
        lists = choice["logprobs"]
        assert "".join(lists["tokens"]) == choice["text"] and len(lists["tokens"]) == 12
        for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
            assert choice["text"][offset:].startswith(token)
        for logprob, top in zip(lists["token_logprobs"], lists["top_logprobs"], strict=True):
            assert logprob in top.values() and 2 <= len(top) <= 3
    merged: dict[int, dict[str, list]] = {0: {}, 1: {}}
    for event in server.events("/v1/completions", fields):
        choice = event["choices"][0]
        for name, values in (choice["logprobs"] or {}).items():
            merged[choice["index"]].setdefault(name, []).extend(values)
    check_same([merged[0], merged[1]], [choice["logprobs"] for choice in whole["choices"]])
    assert server.post("/v1/completions", fields | {"logprobs": 0}).json()["choices"][0]["logprobs"]["tokens"]


def test_generate(server):
    body = {"text": "hello", "return_logprob": True, "top_logprobs_num": 2}
    body["sampling_params"] = {"max_new_tokens": 6, "temperature": 0}
    done = server.post("/generate", body).json()
    meta = done["meta_info"]
    assert [one[1] for one in meta["output_token_logprobs"]] == done["output_ids"]
    assert [top[0] for top in meta["output_top_logprobs"]] == meta["output_token_logprobs"]
    assert all(len(top) == 2 for top in meta["output_top_logprobs"])
