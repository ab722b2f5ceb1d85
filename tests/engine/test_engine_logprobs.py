"""Log-probabilities of the output: the raw log-softmax, one entry a token, whatever else is in the batch."""

from __future__ import annotations

import asyncio
import math

import httpx
import numpy as np
import openai
import pytest
from engine_helpers import GREEDY, check_idle, make_engine, outcome, shared_engine, toy
from server_helpers import MODEL, SECONDS, running

from specjax.engine import SamplingParams
from specjax.serve.answers import TokenNames

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
@pytest.mark.parametrize("algorithm", ["NONE", "NGRAM"])
def test_they_are_the_raw_log_softmax(algorithm, case):
    engine = shared_engine(algorithm)
    params = SamplingParams(max_new_tokens=24, **CASES[case])
    done = engine.generate("hello", params)
    check(engine, "hello", done, CASES[case]["logprobs"], CASES[case].get("logprob_ids", ()))
    check_idle(engine)


def test_asking_changes_no_text_and_only_who_asks_gets_them():
    engine = shared_engine("NGRAM")
    prompts = ["hello", "other", "hello there"]
    each = [SamplingParams(max_new_tokens=20), SamplingParams(max_new_tokens=30, logprobs=3), GREEDY]
    each[2] = SamplingParams(max_new_tokens=9, temperature=0.7, seed=1)
    found = engine.generate(prompts, each)
    plain = engine.generate(prompts, [each[0], SamplingParams(max_new_tokens=30), each[2]])
    assert [outcome(done) for done in found] == [outcome(done) for done in plain]
    assert found[0].logprobs is None and found[2].logprobs is None
    check(engine, "other", found[1], 3)


def test_they_survive_a_retraction():
    engine = make_engine(toy(), "NONE", max_total_tokens=80)
    prompts = ["hello", "other"]
    params = SamplingParams(max_new_tokens=60, logprobs=1)
    for prompt, done in zip(prompts, engine.generate(prompts, params), strict=True):
        check(engine, prompt, done, 1)
    assert engine.scheduler.retractions


def test_an_end_token_and_an_unfinished_character():
    """Both have an entry, and neither has text."""
    engine = make_engine(toy(), "NONE", eos=(2,))
    first = engine.encode("😀")[0]
    done = engine.generate("hello", SamplingParams(max_new_tokens=2, logprobs=1, logit_bias={first: 100.0}))
    check(engine, "hello", done, 1)
    assert done.text == "\ufffd", "the second lead byte shows that the first is no character, and is left out itself"
    done = engine.generate("hello", SamplingParams(max_new_tokens=5, logprobs=1, logit_bias={2: 100.0}))
    assert done.finish_reason == {"type": "stop", "matched": 2}
    assert [(one.token, one.text) for one in done.logprobs] == [(2, "")]


def test_the_bytes_of_tokens():
    tokenizer = shared_engine("NONE").tokenizer
    names = TokenNames(tokenizer)
    for text in ("é", "😀", "hello the"):
        assert bytes(b for token in tokenizer(text)["input_ids"] for b in names.bytes(token)) == text.encode()
    assert names.text(2) == "<|im_end|>"


@pytest.fixture(scope="module")
def server():
    with running(shared_engine("NGRAM")) as served:
        yield served


def check_same(found, expected) -> None:
    """Up to the last bits of a float: what was drafted decides how wide a forward is."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), [expected[key] for key in found]
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            check_same(one, other)
    else:
        assert found == (pytest.approx(expected, abs=1e-4) if isinstance(expected, float) else expected)


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


def test_a_stream_with_a_stop_string_sends_every_token_once(server):
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


def test_requests_with_and_without_share_a_batch(server):
    async def both():
        async with httpx.AsyncClient(base_url=server.base, timeout=SECONDS) as client:
            body = {"prompt": "hello", "max_tokens": 30, "temperature": 0}
            calls = [client.post("/v1/completions", json=body | extra) for extra in ({}, {"logprobs": 1}) * 3]
            return [answer.json()["choices"][0] for answer in await asyncio.gather(*calls)]

    choices = asyncio.run(both())
    assert len({choice["text"] for choice in choices}) == 1
    assert [choice["logprobs"] is None for choice in choices] == [True, False] * 3
