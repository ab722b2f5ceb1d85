"""Log-probabilities of prompts: the raw log-softmax at each token, whatever the chunks, the batch, the prefix cache and
retractions; and `max_tokens: 0`, which reads a prompt and draws nothing."""

from __future__ import annotations

import json
import math

import numpy as np
import openai
import pytest
from engine_helpers import DRAFTS, check_idle, drain, make_engine, outcome, shared_engine, tokenizer, toy
from server_helpers import running
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from toy_models import tiny_llama
from transformers import PreTrainedTokenizerFast

from specjax.engine import SamplingParams
from specjax.engine.output import NO_SCORES, PromptLogprobs
from specjax.engine.sequence import Status
from specjax.serve import task as task_module
from specjax.serve.answers import echo_of
from specjax.serve.app import LATER


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max()
    return shifted - math.log(np.exp(shifted).sum())


def check(ids, found, start: int, top: int, model=None, wanted=()) -> None:
    """`found` is what a forward of each token alone says, from `start` on."""
    model = model or toy()
    assert [one.token for one in found] == list(ids[start:])
    assert found[0].logprob is None and found[0].top == ()
    for place, one in enumerate(found[1:], start + 1):
        expected = log_softmax(model.logits(list(ids[:place])))
        assert one.logprob == pytest.approx(expected[one.token], abs=1e-4), place
        assert [value for _, value in one.top] == pytest.approx(sorted(expected)[::-1][:top], abs=1e-4)
        assert [expected[token] for token, _ in one.top] == pytest.approx([value for _, value in one.top], abs=1e-4)
        assert dict(one.of_ids) == pytest.approx({token: expected[token] for token in wanted}, abs=1e-4)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(70, 100, length).tolist()


PROMPTS = [(1, 0, 0), (2, 0, 3), (8, 0, 20), (9, 3, 1), (17, 16, 2), (40, 0, 0), (41, 23, 5)]
"""Lengths, starts and numbers of alternatives, around chunks of 8 tokens and pages of 4."""


@pytest.mark.parametrize("algorithm", DRAFTS)
def test_in_chunks_and_batches(algorithm):
    engine = shared_engine(algorithm)
    prompts = [prompt_of(length, seed) for seed, (length, _, _) in enumerate(PROMPTS)]
    each = [
        SamplingParams(
            max_new_tokens=9,
            logprobs=top,
            logprob_start_len=start,
            logprob_ids=[7, 264][:i],
            temperature=0.7 * (i % 2),
            seed=i,
        )
        for i, (_, start, top) in enumerate(PROMPTS)
    ]
    plain = [SamplingParams(max_new_tokens=9, temperature=0.7 * (i % 2), seed=i) for i in range(len(PROMPTS))]
    expected = engine.generate(prompts, plain)
    for done in (engine.generate(prompts, each), [engine.generate(*pair) for pair in zip(prompts, each, strict=True)]):
        assert [outcome(one) for one in done] == [outcome(one) for one in expected], "asking changes no text"
        for i, (one, prompt, (_, start, top)) in enumerate(zip(done, prompts, PROMPTS, strict=True)):
            check(prompt, one.prompt_logprobs, start, top, wanted=[7, 264][:i])
            assert len(one.logprobs) == len(one.output_ids)
    assert all(done.prompt_logprobs is None for done in expected)
    check_idle(engine)


def test_of_a_transformer():
    """Chunks of 64 through a real forward: what the blocks of `block_logprobs` are cut from."""
    model = tiny_llama(vocab_size=265)
    engine = make_engine(model, "NONE", chunked_prefill_size=100, context_length=256)
    prompt = np.random.default_rng(1).integers(0, 265, 150).tolist()
    done = engine.generate(prompt, SamplingParams(max_new_tokens=3, logprobs=4, logprob_start_len=0))
    check(prompt, done.prompt_logprobs, 0, 4, model)


@pytest.mark.parametrize("given", [{}, {"logprobs": 4}, {"logprobs": 4, "logprob_start_len": 5}])
def test_of_the_prompt_without_those_of_the_output(given):
    engine = shared_engine("NGRAM")
    prompt = prompt_of(19)
    done = engine.generate(prompt, SamplingParams(max_new_tokens=3, prompt_logprobs=2, **given))
    check(prompt, done.prompt_logprobs, 0, 4 if len(given) == 2 else 2)
    assert (done.logprobs is None) == (not given)


def test_the_prefix_cache_is_used_up_to_the_start():
    engine = make_engine(toy(), "NONE")
    prompt = prompt_of(40)
    engine.generate(prompt, SamplingParams(max_new_tokens=1))
    for start, cached in ((0, 0), (3, 0), (4, 4), (21, 20), (39, 36), (-1, 36)):
        params = SamplingParams(max_new_tokens=1, logprobs=2, logprob_start_len=start)
        done = engine.generate(prompt, params)
        assert done.cached_tokens == cached
        if start >= 0:
            check(prompt, done.prompt_logprobs, start, 2)
    check_idle(engine)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_retraction_loses_and_repeats_nothing(cache, overlap):
    engine = make_engine(toy(), DRAFTS["NGRAM"], retract_every=2, prefix_cache=cache, overlap=overlap)
    midway, retract = set(), engine.scheduler._retract

    def note(sequence) -> None:
        assert sequence.output.prompt_logprobs is not None
        if sequence.status is Status.PREFILLING and len(sequence.output.prompt_logprobs.found()) > 1:
            midway.add(sequence.id)
        retract(sequence)

    engine.scheduler._retract = note
    prompts = [prompt_of(length, length) for length in (60, 50, 55, 45)]
    params = SamplingParams(max_new_tokens=30, logprobs=1, logprob_start_len=2)
    for prompt in prompts:
        engine.add(prompt, params)
    done = drain(engine)
    assert len(done) == 4 and engine.scheduler.retractions
    assert midway, "one was sent back between two chunks of its prompt"
    for prompt in prompts:
        (one,) = [one for one in done.values() if one.prompt_tokens == len(prompt)]
        check(prompt, one.prompt_logprobs, 2, 1)
    check_idle(engine)


def test_a_lost_state_loses_none():
    engine = make_engine(toy(), "NONE")
    prompt = prompt_of(60)
    sequence = engine.add(prompt, SamplingParams(max_new_tokens=4, logprobs=0, logprob_start_len=0))
    for _ in range(4):
        engine.step()
    assert sequence.status is Status.PREFILLING
    engine._inconsistent = True  # as after a step that failed: what is in flight is not read
    (done,) = drain(engine).values()
    check(prompt, done.prompt_logprobs, 0, 0)


def test_others_go_on_while_the_program_compiles(monkeypatch):
    engine = make_engine(toy(), "NONE")
    other = engine.add(prompt_of(5), SamplingParams(max_new_tokens=100))
    while not other.output.tokens:
        engine.step()
    begun = []
    monkeypatch.setattr(engine.programs, "compile_ahead", lambda key: bool(begun.append(key)))  # it never ends
    scored = engine.add(prompt_of(12), SamplingParams(max_new_tokens=2, logprobs=0, logprob_start_len=0))
    plain = engine.add(prompt_of(7), SamplingParams(max_new_tokens=2))
    while plain.status is not Status.FINISHED:
        engine.step()
    assert begun and begun[0].kind == "scoring" and scored.active_slot.prefilled == 0
    monkeypatch.undo()
    drain(engine)
    assert scored.output.prompt_logprobs.complete
    check_idle(engine)


@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_prompt_that_is_only_read(logprobs):
    engine = shared_engine("NGRAM")
    start = -1 if logprobs is None else 0
    prompts = [prompt_of(length, length) for length in (1, 8, 30)]
    params = SamplingParams(max_new_tokens=0, logprobs=logprobs, logprob_start_len=start, stop="x", temperature=1.0)
    before = engine.counters.generated
    for prompt, done in zip(prompts, engine.generate(prompts, params), strict=True):
        assert outcome(done) == ("", [], {"type": "length", "length": 0})
        if logprobs is not None:
            check(prompt, done.prompt_logprobs, 0, 2)
    assert engine.counters.generated == before
    check_idle(engine)


def test_what_is_refused():
    for fields, named in (
        ({"logprob_start_len": 0}, "needs logprobs"),
        ({"logprob_start_len": -2, "logprobs": 1}, "-1"),
        ({"max_new_tokens": 0, "min_new_tokens": 1}, "min_new_tokens"),
    ):
        with pytest.raises(ValueError, match=named):
            SamplingParams(**fields)
    with pytest.raises(ValueError, match="below the prompt's 5 tokens, got 5"):
        shared_engine("NONE").add(prompt_of(5), SamplingParams(max_new_tokens=5, logprobs=1, logprob_start_len=5))


def test_where_no_program_can_score(monkeypatch):
    """Only the request that needs one ends; it is told why."""
    engine = make_engine(toy(), "NONE")
    compile_ = engine.programs._compile

    def attempt(key, *more):
        if key.kind == "scoring":
            raise MemoryError("no room")
        return compile_(key, *more)

    monkeypatch.setattr(engine.programs, "_compile", attempt)
    plain = engine.add(prompt_of(5), SamplingParams(max_new_tokens=9))
    scored = engine.add(prompt_of(6), SamplingParams(max_new_tokens=9, logprobs=1, logprob_start_len=0))
    done = drain(engine)
    assert done[plain.id].finish_reason["type"] == "length"
    assert done[scored.id].finish_reason["type"] == "abort" and "no room" in done[scored.id].finish_reason["message"]
    check_idle(engine)


def test_chunks_that_overlap_what_is_known():
    """A chunk may begin before what is missing, and end after the prompt."""
    found = PromptLogprobs([10, 11, 12, 13, 14], 1, 2, [3, 9])
    assert found.reusable == 1

    def chunk(start: int, width: int) -> tuple[np.ndarray, ...]:
        """The log-probability of token i + 1 is -i."""
        drawn = -np.arange(start, start + width).astype(np.float32)
        three = np.stack([drawn] * 3, 1)
        return drawn, three, np.full((width, 3), 7, np.int32), three - 1

    found.add(0, 3, *chunk(0, 4))
    assert found.reusable == 3 and not found.complete
    found.add(2, 3, *chunk(2, 4))  # again, of a sequence that was sent back
    found.add(2, 5, *chunk(2, 4))
    found.add(2, 5, *chunk(2, 4))
    assert found.complete and found.reusable is None
    assert [one.logprob for one in found.found()] == [None, -1, -2, -3]
    assert found.found()[1].top == ((7, -1.0), (7, -1.0))
    assert found.found()[1].of_ids == ((3, -2.0), (9, -2.0)) and found.found()[0].of_ids == () and found.each == 5
    assert [one.token for one in found.found()] == [11, 12, 13, 14]


def test_choices_share_those_of_their_prompt():
    """One computes them; they wait for its pages, and find all that is missing there."""
    engine = make_engine(toy(), "NONE")
    prompt = prompt_of(33)
    with running(engine) as server:
        before = engine.counters.prefilled_tokens
        fields = {"prompt": prompt, "n": 4, "echo": True, "logprobs": 1, "max_tokens": 3, "seed": 1}
        alone = server.post("/v1/completions", fields | {"n": 1, "prompt": [*prompt[1:], 70]}).json()["choices"]
        one = engine.counters.prefilled_tokens - before
        choices = server.post("/v1/completions", fields).json()["choices"]
        tokens = engine.counters.prefilled_tokens - before - one
        assert one == 33 and tokens <= 33 + 3 * 4, "what is left of a page is read for each"
        scores = [choice["logprobs"]["token_logprobs"][:33] for choice in choices]
        assert scores == [scores[0]] * 4 and scores[0][0] is None and None not in scores[0][1:]
        assert len(alone[0]["logprobs"]["tokens"]) == 36
        events = server.events("/v1/completions", fields)
        echoes = [event["choices"][0] for event in events if (event["choices"][0]["logprobs"] or {}).get("tokens")]
        heads = {each["index"]: each["logprobs"]["token_logprobs"] for each in reversed(echoes)}
        assert [heads[index] for index in range(4)] == scores


def test_vllms_form():
    engine, prompt = make_engine(toy(), "NONE"), prompt_of(9)
    expected = engine.generate(prompt, SamplingParams(max_new_tokens=1, prompt_logprobs=2)).prompt_logprobs
    with running(engine) as server:
        fields = {"prompt": [prompt, prompt_of(4)], "n": 2, "max_tokens": 2, "prompt_logprobs": 2}
        choices = server.post("/v1/completions", fields).json()["choices"]
        assert [len(choice["prompt_logprobs"]) for choice in choices] == [9, 9, 4, 4]
        assert all(choice["logprobs"] is None for choice in choices)
        found = choices[1]["prompt_logprobs"]
        assert found[0] is None
        for one, entries in zip(expected[1:], found[1:], strict=True):
            assert entries[str(one.token)]["logprob"] == pytest.approx(one.logprob, abs=1e-5)
            for rank, (token, value) in enumerate(one.top, 1):
                entry = entries[str(token)]
                assert (entry["rank"], entry["decoded_token"]) == (rank, engine.tokenizer.decode([token]))
                assert entry["logprob"] == pytest.approx(value, abs=1e-5)
            assert len(entries) == 2 + (one.token not in dict(one.top))
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "prompt_logprobs": 0}
        answer = server.post("/v1/chat/completions", chat).json()
        assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
        assert all(len(entries) == 1 for entries in answer["prompt_logprobs"][1:])
        both = fields | {"prompt": prompt, "n": 1, "echo": True, "logprobs": 1}
        (choice,) = server.post("/v1/completions", both).json()["choices"]
        assert all(len(top) <= 2 for top in choice["logprobs"]["top_logprobs"][1:9])
        assert choice["prompt_logprobs"] == found
        refused = server.post("/v1/completions", fields | {"stream": True})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"


def test_lists_with_one_item_for_each_prompt():
    """SGLang's: which log-probabilities are wanted, for each of a batch."""
    engine = make_engine(toy(), "NONE")
    prompts = [prompt_of(5, 1), prompt_of(6, 2), prompt_of(7, 3)]
    fields = {
        "input_ids": prompts, "return_logprob": [True, False, True], "top_logprobs_num": [2, 5, 0],
        "logprob_start_len": [0, -1, 4], "token_ids_logprob": [[7, 9], None, []],
        "sampling_params": {"max_new_tokens": 2, "n": 2},
    }  # fmt: skip
    with running(engine) as server:
        first, _, second, third, last, _ = [each["meta_info"] for each in server.post("/generate", fields).json()]
        assert "output_token_logprobs" not in second and "output_token_logprobs" not in third
        assert [len(first[f"input_{name}"]) for name in ("token_logprobs", "top_logprobs", "token_ids_logprobs")] == [
            5
        ] * 3
        assert [len(each) for each in first["input_top_logprobs"][1:]] == [2] * 4
        assert first["input_token_ids_logprobs"][0] is None
        for places in (first["input_token_ids_logprobs"][1:], first["output_token_ids_logprobs"]):
            assert [[token for _, token, _ in place] for place in places] == [[7, 9]] * len(places)
        for place, found in enumerate(first["input_token_ids_logprobs"][1:], 1):
            scores = log_softmax(toy().logits(prompts[0][:place]))
            assert [value for value, _, _ in found] == pytest.approx([scores[7], scores[9]], abs=1e-4)
        assert len(last["input_token_logprobs"]) == 3 and "output_token_ids_logprobs" not in last
        same = fields | {
            "return_logprob": True,
            "token_ids_logprob": [7],
            "top_logprobs_num": 1,
            "logprob_start_len": -1,
        }
        for each in server.post("/generate", same).json():
            assert [len(place) for place in each["meta_info"]["output_token_ids_logprobs"]] == [1, 1]
        streamed = server.events("/generate", same | {"input_ids": prompts[0]})
        assert "output_token_ids_logprobs" in streamed[-1]["meta_info"]
        for change, name in (
            ({"return_logprob": [True]}, "return_logprob"),
            ({"top_logprobs_num": [1, 2, 21]}, "top_logprobs_num"),
            ({"token_ids_logprob": [[7], [9], [265]]}, "token_ids_logprob"),
            ({"token_ids_logprob": [[7]]}, "token_ids_logprob"),
            ({"token_ids_logprob": list(range(129))}, "token_ids_logprob"),
            ({"logprob_start_len": [0, 0, 7]}, "logprob_start_len"),
        ):
            refused = server.post("/generate", fields | {"return_logprob": True} | change)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == name, refused.text


# The echo


def normalising() -> PreTrainedTokenizerFast:
    """Lower-cases, so that its text is not what it was given."""
    core = Tokenizer(models.WordLevel({"hello": 0, "there": 1, "?": 2}, unk_token="?"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?")


@pytest.mark.parametrize(
    ("prompt", "text", "pieces"),
    [
        ("hello", None, None),
        ("ö12 😀<|im_end|>x", None, None),
        ([1, 70, 71, 2], None, None),
        ([], "", ()),
    ],
)
def test_pieces_join_to_the_text(prompt, text, pieces):
    ids = tokenizer()(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    found = echo_of(prompt, ids, tokenizer(), with_pieces=True)
    assert found.text == (text if text is not None else prompt if isinstance(prompt, str) else tokenizer().decode(ids))
    assert "".join(found.pieces) == found.text and len(found.pieces) == len(ids)
    assert pieces is None or found.pieces == pieces
    assert echo_of(prompt, ids, tokenizer(), with_pieces=False).text == found.text


def test_pieces_of_a_text_that_was_normalised():
    words = normalising()
    found = echo_of("Hello  THERE !", words("Hello  THERE !")["input_ids"], words, with_pieces=True)
    assert found.text == "Hello  THERE !" and found.pieces == ("Hello", "  THERE", " !")


# Over HTTP


@pytest.fixture(scope="module")
def server():
    with running(shared_engine("NGRAM")) as served:
        yield served


@pytest.mark.parametrize("most", [0, 6])
@pytest.mark.parametrize("prompt", ["hello there ö", [70, 71, 2, 72], ["hello", "the other"]])
def test_completions_with_an_echo(server, prompt, most):
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    fields = {"prompt": prompt, "max_tokens": most, "echo": True, "logprobs": 2, "temperature": 0.8, "seed": 3, "n": 2}
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client:
        whole = client.completions.create(model="toy", **fields)
        streamed: dict[int, list] = {}
        for chunk in client.completions.create(model="toy", stream=True, **fields):
            streamed.setdefault(chunk.choices[0].index, []).append(chunk.choices[0])
    assert whole.usage.completion_tokens == most * 2 * len(prompts)
    assert len(whole.choices) == 2 * len(prompts)
    for index, choice in enumerate(whole.choices):
        given = prompts[index // 2]
        ids = server.engine.encode(given)
        text = given if isinstance(given, str) else tokenizer().decode(given)
        lists = choice.logprobs
        assert choice.text.startswith(text) and (most or choice.text == text) and choice.finish_reason == "length"
        assert "".join(lists.tokens) == choice.text and len(lists.tokens) == len(ids) + most
        ends = [*lists.text_offset[1:], len(choice.text)]
        assert [choice.text[a:b] for a, b in zip(lists.text_offset, ends, strict=True)] == lists.tokens
        assert lists.token_logprobs[0] is None and lists.top_logprobs[0] is None
        for place in range(1, len(ids)):
            expected = log_softmax(toy().logits(ids[:place]))
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


def test_an_echo_alone_computes_none(server):
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
            expected = log_softmax(toy().logits(prompt[:place]))
            value, token, _ = meta["input_token_logprobs"][place - 4]
            assert token == prompt[place] and value == pytest.approx(expected[token], abs=1e-4)
        # The output's, scored as a prompt.
        scored = server.post("/generate", {
            "input_ids": prompt + done["output_ids"], "return_logprob": True, "logprob_start_len": len(prompt) - 1,
            "sampling_params": {"max_new_tokens": 0},
        }).json()  # fmt: skip
        assert scored["output_ids"] == [] and scored["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        again = scored["meta_info"]["input_token_logprobs"][1:]
        assert [one[1] for one in again] == done["output_ids"]
        assert [one[0] for one in again] == pytest.approx(
            [one[0] for one in meta["output_token_logprobs"]], abs=1e-4
        )  # fmt: skip
    body |= {"return_logprob": False}
    assert "input_token_logprobs" not in server.post("/generate", body).json()[0]["meta_info"]
    events = server.events("/generate", {**body, "input_ids": ids[0], "return_logprob": True})
    assert len(events[-1]["meta_info"]["input_token_logprobs"]) == 26


def test_an_answer_holds_only_so_many(server, monkeypatch):
    monkeypatch.setattr(task_module, "MAX_SCORES", 60)
    for fields, status in (({"logprobs": 1}, 200), ({"logprobs": 3}, 400), ({"logprobs": 1, "n": 2}, 400), ({}, 200)):
        answer = server.complete([prompt_of(20)], echo=True, max_tokens=1, **fields)
        assert answer.status_code == status, answer.text
    assert answer.json()["choices"][0]["text"].startswith(tokenizer().decode(prompt_of(20)))


SCORED = {
    "an echo": ("/v1/completions", {"prompt": "hello", "echo": True, "logprobs": 1}, "no room"),
    "a chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 1}, ""),
    "generate": ("/generate", {"text": "hello", "return_logprob": True, "logprob_start_len": 0}, ""),
    "a stream": ("/generate", {"text": "hello", "return_logprob": True, "logprob_start_len": 0, "stream": True}, ""),
}


def test_a_prompt_that_no_program_can_score_is_a_503(monkeypatch):
    """The fault is the server's, and memory may come back: not a 500. Other requests go on."""
    engine = make_engine(toy(), "NONE", eos=(2,))
    compile_ = engine.programs._compile

    def attempt(key, *more):
        if key.kind == "scoring":
            raise MemoryError("no room")
        return compile_(key, *more)

    monkeypatch.setattr(engine.programs, "_compile", attempt)
    with running(engine) as served:
        for path, body, said in SCORED.values():
            answer = served.post(path, body)
            if body.get("stream"):
                assert answer.status_code == 200
                error = json.loads(answer.text.strip().rpartition("data: ")[2])["error"]
            else:
                assert answer.status_code == 503 and answer.headers["retry-after"] == str(LATER)
                error = answer.json()["error"]
            assert error["type"] == "server_error" and error["code"] == "unavailable"
            assert error["message"].startswith(NO_SCORES) and said in error["message"]
            assert served.post(
                path, {**body, "logprobs": None, "return_logprob": None, "prompt_logprobs": None}
            ).is_success
        served.wait_idle()
