"""Log-probabilities of outputs and prompts equal the raw log-softmax in all batches, chunks and retractions."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import openai
import pytest
from engine_helpers import DRAFTS, check_idle, drain, make_engine, outcome, shared_engine, tokenizer, toy
from oracle import raw_logprobs
from server_helpers import MODEL, running
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from toy_models import tiny_llama
from transformers import PreTrainedTokenizerFast

from specjax.engine import SamplingParams
from specjax.engine.sequence import NO_SCORES, Status
from specjax.serve import tokenising as task_module
from specjax.serve.app import LATER
from specjax.serve.openai_answers import echo_of


def check_entry(entry, expected: np.ndarray, top: int, wanted=()) -> None:
    assert entry.logprob == pytest.approx(expected[entry.token], abs=1e-4)
    assert [value for _, value in entry.top] == pytest.approx(sorted(expected)[::-1][:top], abs=1e-4)
    assert [expected[token] for token, _ in entry.top] == pytest.approx([value for _, value in entry.top], abs=1e-4)
    assert dict(entry.of_ids) == pytest.approx({token: expected[token] for token in wanted}, abs=1e-4)


def check_prompt(ids, entries, start: int, top: int, model=None, wanted=()) -> None:
    """`entries` equal the log-softmax of plain forwards from `start` on."""
    assert [entry.token for entry in entries] == list(ids[start:])
    assert entries[0].logprob is None and entries[0].top == ()
    for place, entry in enumerate(entries[1:], start + 1):
        check_entry(entry, raw_logprobs((model or toy()).logits(list(ids[:place]))), top, wanted)


def check_output(engine, prompt, done, top: int, wanted=()) -> None:
    ids = engine.encode(prompt)
    assert done.logprobs is not None and [entry.token for entry in done.logprobs] == done.output_ids
    assert "".join(entry.text for entry in done.logprobs) == done.text
    for i, entry in enumerate(done.logprobs):
        check_entry(entry, raw_logprobs(toy().logits([*ids, *done.output_ids[:i]])), top, wanted)


CASES = {
    "greedy": {"logprobs": 0},
    "sampled": {"logprobs": 5, "temperature": 1.3, "seed": 3, "top_k": 5},
    "biased": {"logprobs": 20, "logit_bias": {40: 5.0}, "frequency_penalty": 1.0},
    "stop string": {"logprobs": 2, "stop": ["e", "in"], "min_new_tokens": 2},
    "of ids": {"logprobs": 1, "logprob_ids": [264, 0, 40], "temperature": 1.0, "seed": 1},
    "stop string without trim": {"logprobs": 2, "stop": ["e"], "no_stop_trim": True},
}


@pytest.mark.parametrize("case", CASES)
def test_logprobs_equal_the_raw_log_softmax(case):
    engine = shared_engine("NGRAM")
    params = SamplingParams(max_new_tokens=24, **CASES[case])
    done = engine.generate("hello", params)
    check_output(engine, "hello", done, CASES[case]["logprobs"], CASES[case].get("logprob_ids", ()))
    check_idle(engine)


def test_logprobs_of_tokens_without_text():
    """An end token and an unfinished character."""
    engine = make_engine(toy(), "NONE", eos=(2,))
    first = engine.encode("😀")[0]
    done = engine.generate("hello", SamplingParams(max_new_tokens=2, logprobs=1, logit_bias={first: 100.0}))
    check_output(engine, "hello", done, 1)
    assert done.text == "\ufffd\ufffd"
    done = engine.generate("hello", SamplingParams(max_new_tokens=5, logprobs=1, logit_bias={2: 100.0}))
    assert done.finish_reason == {"type": "stop", "matched": 2}
    assert [(entry.token, entry.text) for entry in done.logprobs] == [(2, "")]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(70, 100, length).tolist()


HELLO = [{"role": "user", "content": "hello"}]
PROMPTS = [(1, 0, 0), (2, 0, 3), (8, 0, 20), (9, 3, 1), (17, 16, 2), (40, 0, 0), (41, 23, 5)]
"""Lengths, starts and numbers of alternatives, around chunks of 8 tokens and pages of 4."""


@pytest.mark.parametrize("algorithm", DRAFTS)
def test_logprobs_in_chunks_and_batches(algorithm):
    engine = shared_engine(algorithm)
    prompts = [prompt_of(length, seed) for seed, (length, _, _) in enumerate(PROMPTS)]
    plain = [SamplingParams(max_new_tokens=9, temperature=0.7 * (i % 2), seed=i) for i in range(len(PROMPTS))]
    scored = [
        replace(params, logprobs=top, logprob_start_len=start, logprob_ids=[7, 264][:i])
        for i, (params, (_, start, top)) in enumerate(zip(plain, PROMPTS, strict=True))
    ]
    expected = engine.generate(prompts, plain)
    alone = [engine.generate(*request) for request in zip(prompts, scored, strict=True)]
    for completions in (engine.generate(prompts, scored), alone):
        assert [outcome(done) for done in completions] == [outcome(done) for done in expected], "another text"
        for i, (completion, prompt, (_, start, top)) in enumerate(zip(completions, prompts, PROMPTS, strict=True)):
            check_prompt(prompt, completion.prompt_logprobs, start, top, wanted=[7, 264][:i])
            assert len(completion.logprobs) == len(completion.output_ids)
    assert all(completion.prompt_logprobs is None for completion in expected)
    check_idle(engine)


def test_logprobs_of_a_transformer():
    """Chunks of 64 tokens, which `block_logprobs` cuts into blocks."""
    model = tiny_llama(vocab_size=265)
    engine = make_engine(model, "NONE", chunked_prefill_size=100, context_length=256)
    prompt = np.random.default_rng(1).integers(0, 265, 150).tolist()
    done = engine.generate(prompt, SamplingParams(max_new_tokens=3, logprobs=4, logprob_start_len=0))
    check_prompt(prompt, done.prompt_logprobs, 0, 4, model)


def test_prefix_cache_is_used_up_to_the_start():
    engine = make_engine(toy(), "NONE")
    prompt = prompt_of(40)
    engine.generate(prompt, SamplingParams(max_new_tokens=1))
    for start, cached in ((0, 0), (3, 0), (4, 4), (21, 20), (39, 36), (-1, 36)):
        params = SamplingParams(max_new_tokens=1, logprobs=2, logprob_start_len=start)
        done = engine.generate(prompt, params)
        assert done.cached_tokens == cached
        if start >= 0:
            check_prompt(prompt, done.prompt_logprobs, start, 2)
    check_idle(engine)


@pytest.mark.parametrize(("cache", "overlap"), [(True, True), (False, False)])
def test_retraction_keeps_logprobs(cache, overlap):
    engine = make_engine(toy(), DRAFTS["NGRAM"], retract_every=2, prefix_cache=cache, overlap=overlap)
    midway, retract = set(), engine.scheduler.retract

    def record(sequence) -> None:
        assert sequence.output.prompt_logprobs is not None
        if sequence.status is Status.PREFILLING and len(sequence.output.prompt_logprobs.found()) > 1:
            midway.add(sequence.id)
        retract(sequence)

    engine.scheduler.retract = record
    prompts = [prompt_of(length, length) for length in (60, 50, 55, 45)]
    params = SamplingParams(max_new_tokens=30, logprobs=1, logprob_start_len=2)
    for prompt in prompts:
        engine.add(prompt, params)
    done = drain(engine)
    assert len(done) == 4 and engine.scheduler.retractions
    assert midway, "no request was retracted between two chunks of its prompt"
    for prompt in prompts:
        (scored,) = [scored for scored in done.values() if scored.prompt_tokens == len(prompt)]
        check_prompt(prompt, scored.prompt_logprobs, 2, 1)
        check_output(engine, prompt, scored, 1)
    check_idle(engine)


def test_zero_new_tokens_only_read_the_prompt():
    engine, prompts = shared_engine("NGRAM"), [prompt_of(length, length) for length in (1, 8, 30)]
    before = engine.counters.generated
    for logprobs in (None, 2):
        start = -1 if logprobs is None else 0
        params = SamplingParams(max_new_tokens=0, logprobs=logprobs, logprob_start_len=start, stop="x", temperature=1.0)
        for prompt, done in zip(prompts, engine.generate(prompts, params), strict=True):
            assert outcome(done) == ("", [], {"type": "length", "length": 0})
            if logprobs is not None:
                check_prompt(prompt, done.prompt_logprobs, 0, 2)
    assert engine.counters.generated == before
    check_idle(engine)
    with pytest.raises(ValueError, match="min_new_tokens"):
        SamplingParams(max_new_tokens=0, min_new_tokens=1)
    with pytest.raises(ValueError, match="below the prompt's 5 tokens, got 5"):
        engine.add(prompt_of(5), SamplingParams(max_new_tokens=5, logprobs=1, logprob_start_len=5))


def lower_casing() -> PreTrainedTokenizerFast:
    """A tokenizer whose decoded text differs from its input."""
    core = Tokenizer(models.WordLevel({"hello": 0, "there": 1, "?": 2}, unk_token="?"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?")


@pytest.mark.parametrize("prompt", ["hello", "ö12 😀<|im_end|>x", [1, 70, 71, 2], []])
def test_echo_pieces_join_to_the_text(prompt):
    ids = tokenizer()(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    echo = echo_of(prompt, ids, tokenizer(), with_pieces=True)
    assert echo.text == (prompt if isinstance(prompt, str) else tokenizer().decode(ids))
    assert "".join(echo.pieces) == echo.text and len(echo.pieces) == len(ids)
    assert echo_of(prompt, ids, tokenizer(), with_pieces=False).text == echo.text
    echo = echo_of("Hello  THERE !", lower_casing()("Hello  THERE !")["input_ids"], lower_casing(), with_pieces=True)
    assert echo.text == "".join(echo.pieces) and len(echo.pieces) == 3


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
    fields = {"model": MODEL, "messages": HELLO, "max_tokens": 25, "temperature": 0, "logprobs": True}
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
    fields = {"messages": HELLO, "max_tokens": 60, "temperature": 0, "logprobs": True}
    text = server.post("/v1/chat/completions", fields).json()["choices"][0]["message"]["content"]
    fields["stop"] = [text[20:23], text[5] + "#"]
    whole = server.post("/v1/chat/completions", fields).json()
    choice = whole["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["content"]) == whole["usage"]["completion_tokens"]
    assert "".join(e["token"] for e in choice["logprobs"]["content"]) == choice["message"]["content"]
    chunks = [e["choices"][0] for e in server.events("/v1/chat/completions", fields)]
    check_same([e for c in chunks if c["logprobs"] for e in c["logprobs"]["content"]], choice["logprobs"]["content"])


@pytest.mark.parametrize(("prompt", "limit"), [("hello there ö", 6), ([70, 71, 2, 72], 6), (["hello", "the other"], 0)])
def test_completions_with_echo(server, prompt, limit):
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    fields = {"prompt": prompt, "max_tokens": limit, "echo": True, "logprobs": 2, "temperature": 0.8, "seed": 3, "n": 2}
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client:
        whole = client.completions.create(model="toy", **fields)
        streamed: dict[int, list] = {}
        for chunk in client.completions.create(model="toy", stream=True, **fields):
            streamed.setdefault(chunk.choices[0].index, []).append(chunk.choices[0])
    assert whole.usage.completion_tokens == limit * 2 * len(prompts)
    assert len(whole.choices) == 2 * len(prompts)
    for index, choice in enumerate(whole.choices):
        source = prompts[index // 2]
        ids = server.engine.encode(source)
        text = source if isinstance(source, str) else tokenizer().decode(source)
        lists = choice.logprobs
        assert choice.text.startswith(text) and (limit or choice.text == text) and choice.finish_reason == "length"
        assert "".join(lists.tokens) == choice.text and len(lists.tokens) == len(ids) + limit
        ends = [*lists.text_offset[1:], len(choice.text)]
        assert [choice.text[a:b] for a, b in zip(lists.text_offset, ends, strict=True)] == lists.tokens
        assert lists.token_logprobs[0] is None and lists.top_logprobs[0] is None
        for place in range(1, len(ids)):
            expected = raw_logprobs(toy().logits(ids[:place]))
            assert lists.token_logprobs[place] == pytest.approx(expected[ids[place]], abs=1e-4)
            best = max(lists.top_logprobs[place].values())
            assert best == pytest.approx(expected.max(), abs=1e-4) and 2 <= len(lists.top_logprobs[place]) <= 3
        chunks = streamed[index]
        assert "".join(chunk.text for chunk in chunks) == choice.text
        for name in ("tokens", "token_logprobs", "text_offset"):
            joined = [value for chunk in chunks if chunk.logprobs for value in getattr(chunk.logprobs, name)]
            expected = getattr(lists, name)
            same = pytest.approx(expected[1:], abs=1e-4) if name == "token_logprobs" else expected[1:]
            assert joined[1:] == same and joined[0] == expected[0]


def test_echo_without_logprobs(server):
    done = server.complete("hello", echo=True, max_tokens=0).json()
    assert (done["choices"][0]["text"], done["choices"][0]["logprobs"]) == ("hello", None)
    for fields in ({"max_tokens": 0}, {"max_tokens": 0, "echo": False}):
        answer = server.complete("hello", **fields)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"
    assert server.chat(max_tokens=0).status_code == 400


def test_generate(server):
    ids = [prompt_of(30, 1), prompt_of(12, 2)]
    body = {"input_ids": ids, "return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 4}
    body["sampling_params"] = {"max_new_tokens": 5, "temperature": 0}
    for prompt, done in zip(ids, server.post("/generate", body).json(), strict=True):
        meta = done["meta_info"]
        assert meta["prompt_tokens"] == 4 + len(meta["input_token_logprobs"]) == len(prompt)
        assert meta["input_token_logprobs"][0] == [None, prompt[4], None] and meta["input_top_logprobs"][0] is None
        assert [len(top) for top in meta["input_top_logprobs"][1:]] == [3] * (len(prompt) - 5)
        for place in range(5, len(prompt)):
            expected = raw_logprobs(toy().logits(prompt[:place]))
            value, token, _ = meta["input_token_logprobs"][place - 4]
            assert token == prompt[place] and value == pytest.approx(expected[token], abs=1e-4)
        # The output's, scored as a prompt.
        scored = server.post("/generate", {
            "input_ids": prompt + done["output_ids"], "return_logprob": True, "logprob_start_len": len(prompt) - 1,
            "sampling_params": {"max_new_tokens": 0},
        }).json()  # fmt: skip
        assert scored["output_ids"] == [] and scored["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        scores = scored["meta_info"]["input_token_logprobs"][1:]
        assert [entry[1] for entry in scores] == done["output_ids"]
        expected = [entry[0] for entry in meta["output_token_logprobs"]]
        assert [entry[0] for entry in scores] == pytest.approx(expected, abs=1e-4)
    body |= {"return_logprob": False}
    assert "input_token_logprobs" not in server.post("/generate", body).json()[0]["meta_info"]
    events = server.events("/generate", {**body, "input_ids": ids[0], "return_logprob": True})
    assert len(events[-1]["meta_info"]["input_token_logprobs"]) == 26


def test_logprobs_of_token_ids(server):
    prompts = [prompt_of(5, 1), prompt_of(6, 2)]
    fields = {
        "input_ids": prompts, "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0,
        "token_ids_logprob": [7, 9], "sampling_params": {"max_new_tokens": 2, "n": 2},
    }  # fmt: skip
    first, _, second, _ = [answer["meta_info"] for answer in server.post("/generate", fields).json()]
    for answer, prompt in ((first, prompts[0]), (second, prompts[1])):
        for name in ("token_logprobs", "top_logprobs", "token_ids_logprobs"):
            assert len(answer[f"input_{name}"]) == len(prompt)
        assert [len(place) for place in answer["input_top_logprobs"][1:]] == [2] * (len(prompt) - 1)
        assert answer["input_token_ids_logprobs"][0] is None
        for places in (answer["input_token_ids_logprobs"][1:], answer["output_token_ids_logprobs"]):
            assert [[token for _, token, _ in place] for place in places] == [[7, 9]] * len(places)
        for place, entries in enumerate(answer["input_token_ids_logprobs"][1:], 1):
            scores = raw_logprobs(toy().logits(prompt[:place]))
            assert [value for value, _, _ in entries] == pytest.approx([scores[7], scores[9]], abs=1e-4)
    output = fields | {"logprob_start_len": -1}
    for answer in server.post("/generate", output).json():
        assert [len(place) for place in answer["meta_info"]["output_token_ids_logprobs"]] == [2, 2]
        assert answer["meta_info"]["input_token_logprobs"] == []
    streamed = server.events("/generate", output | {"input_ids": prompts[0]})
    assert "output_token_ids_logprobs" in streamed[-1]["meta_info"]
    for change, name in (
        ({"return_logprob": [True, False]}, "return_logprob"),
        ({"top_logprobs_num": 21}, "top_logprobs_num"),
        ({"token_ids_logprob": [7, 265]}, "token_ids_logprob"),
        ({"token_ids_logprob": [[7], [9]]}, "token_ids_logprob"),
        ({"token_ids_logprob": list(range(129))}, "token_ids_logprob"),
        ({"logprob_start_len": 7}, "logprob_start_len"),
    ):
        refused = server.post("/generate", fields | change)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == name, refused.text


def test_scores_of_an_answer_are_limited(server, monkeypatch):
    monkeypatch.setattr(task_module, "MAX_SCORES", 60)
    for fields, status in (({"logprobs": 1}, 200), ({"logprobs": 3}, 400), ({"logprobs": 1, "n": 2}, 400), ({}, 200)):
        answer = server.complete([prompt_of(20)], echo=True, max_tokens=1, **fields)
        assert answer.status_code == status, answer.text
    assert answer.json()["choices"][0]["text"].startswith(tokenizer().decode(prompt_of(20)))


SCORED = {
    "an echo": ("/v1/completions", {"prompt": "hello", "echo": True, "logprobs": 1}, "no room"),
    "generate": ("/generate", {"text": "hello", "return_logprob": True, "logprob_start_len": 0}, ""),
    "a stream": ("/generate", {"text": "hello", "return_logprob": True, "logprob_start_len": 0, "stream": True}, ""),
}


def test_scoring_program_out_of_memory_is_a_503(monkeypatch):
    """Memory may come back, so it is not a 500. Other requests are served."""
    engine = make_engine(toy(), "NONE", eos=(2,))
    compile_ = engine.programs._compile

    def attempt(key, *more):
        if key.kind == "scoring":
            raise MemoryError("no room")
        return compile_(key, *more)

    monkeypatch.setattr(engine.programs, "_compile", attempt)
    with running(engine) as served:
        for path, body, reason in SCORED.values():
            answer = served.post(path, body)
            if body.get("stream"):
                assert answer.status_code == 200
                error = json.loads(answer.text.strip().rpartition("data: ")[2])["error"]
            else:
                assert answer.status_code == 503 and answer.headers["retry-after"] == str(LATER)
                error = answer.json()["error"]
            assert error["type"] == "server_error" and error["code"] == "unavailable"
            assert error["message"].startswith(NO_SCORES) and reason in error["message"]
            assert served.post(path, {**body, "logprobs": None, "return_logprob": None}).is_success
        served.wait_idle()
