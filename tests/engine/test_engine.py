"""The engine over table models: texts are those of plain decoding, whatever runs beside them, and nothing is lost."""

import itertools
import threading
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from engine_helpers import (
    DRAFTS,
    END,
    TEMPLATE,
    VOCABULARY,
    byte_ids,
    check_idle,
    check_plain,
    decode,
    drain,
    make_engine,
    outcome,
    shared_engine,
    shown,
    tokenizer,
    toy,
    wanted,
)

from specjax import make_drafter
from specjax.engine import Engine, EngineConfig, SamplingParams, StreamChunk
from specjax.engine.buckets import BLOCK_TOKENS, HEAD_BLOCK_TOKENS, LARGE_CHUNK, SMALL_CHUNK, Buckets
from specjax.engine.device import prefill_input, unpack_prefill
from specjax.engine.intake import with_sampling
from specjax.engine.programs import Key, Programs
from specjax.engine.sequence import Slot, completion

ALGORITHMS = ("NONE", "NGRAM")
SAMPLINGS = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 7},
    "truncated": {"temperature": 1.2, "seed": -3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties": {
        "temperature": 0.8, "seed": 2**40 + 7, "repetition_penalty": 1.3, "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
    },
    "bias": {"temperature": 0.7, "seed": 1, "top_p": 0.95, "logit_bias": {70: 5.0, 71: -100.0}},
    "greedy, penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
    "stops": {"temperature": 1.0, "seed": 11, "stop_token_ids": [67, 68, 69], "min_new_tokens": 6},
}  # fmt: skip


def some_prompts(count: int, seed: int = 0, most: int = 20) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCABULARY, rng.integers(1, most + 1)).tolist() for _ in range(count)]


def varied(index: int, **changes) -> SamplingParams:
    fields = list(SAMPLINGS.values())[index % len(SAMPLINGS)] | {"max_new_tokens": 4 + 5 * index % 23} | changes
    if "seed" in fields:
        fields |= {"seed": fields["seed"] + index}
    return SamplingParams(**fields)


# The text.


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_the_text_is_that_of_plain_decoding(algorithm, kind):
    engine = shared_engine(algorithm)
    prompts = some_prompts(4, seed=len(kind))
    params = [SamplingParams(max_new_tokens=n, **SAMPLINGS[kind]) for n in (40, 33, 7, 24)]
    for prompt, one, found in zip(prompts, params, engine.generate(prompts, params), strict=True):
        check_plain(toy(), prompt, one, found)
        assert found.prompt_tokens == len(prompt)
    check_idle(engine)


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_drafts_change_nothing_but_the_number_of_steps(kind):
    prompts = [p * 2 for p in some_prompts(3, seed=1)]
    params = SamplingParams(max_new_tokens=60, **SAMPLINGS[kind])
    plain, drafted = (shared_engine(algorithm).generate(prompts, params) for algorithm in ALGORITHMS)
    assert [outcome(done) for done in plain] == [outcome(done) for done in drafted]
    if kind == "greedy":
        assert min(done.spec_accept_length for done in drafted) > 1.5
        assert sum(done.spec_verify_ct for done in drafted) < sum(done.spec_verify_ct for done in plain) / 1.5


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_counts_agree_with_one_another(algorithm):
    for done in shared_engine(algorithm).generate(some_prompts(8), [varied(i) for i in range(8)]):
        bins = done.spec_accept_histogram
        assert sum(bins) == done.spec_verify_ct
        assert sum(n * (drafts + 1) for drafts, n in enumerate(bins)) == done.completion_tokens - 1
        if done.spec_verify_ct:
            assert done.spec_accept_length == pytest.approx((done.completion_tokens - 1) / done.spec_verify_ct)
        if algorithm == "NONE":
            assert done.spec_accept_length == 1.0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 24, 25])
def test_prompts_in_chunks(algorithm, length):
    """Chunks of 8: less than one, exactly one, one more, several."""
    (prompt,) = np.random.default_rng(length).integers(3, VOCABULARY, (1, length)).tolist()
    params = SamplingParams(max_new_tokens=12, repetition_penalty=1.2)
    check_plain(toy(), prompt, params, shared_engine(algorithm).generate(prompt, params))


@pytest.mark.parametrize(("algorithm", "page_size"), [("NGRAM", 1), pytest.param("NGRAM", 16, marks=pytest.mark.slow)])
def test_page_sizes(algorithm, page_size):
    engine = shared_engine(algorithm, page_size=page_size, max_running_requests=2, context_length=64)
    prompts, params = some_prompts(6, seed=3), [varied(i) for i in range(6)]
    ids = {engine.add(*request).id: request for request in zip(prompts, params, strict=True)}
    for name, done in drain(engine).items():
        check_plain(toy(), *ids[name], done)
    check_idle(engine)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_token_needs_no_verification(algorithm):
    done = shared_engine(algorithm).generate([5, 6, 7], SamplingParams(max_new_tokens=1))
    assert done.completion_tokens == 1
    assert done.finish_reason == {"type": "length", "length": 1}
    assert (done.spec_verify_ct, done.spec_accept_length, sum(done.spec_accept_histogram)) == (0, 1.0, 0)


def test_a_limit_inside_an_accepted_run():
    engine = shared_engine("NGRAM")
    prompt = [70, 71, 72] * 3
    full = engine.generate(prompt, SamplingParams(max_new_tokens=60))
    assert full.spec_accept_histogram[-1] > 5, "runs of full length, or nothing is cut here"
    for limit in range(30, 42):
        done = engine.generate(prompt, SamplingParams(max_new_tokens=limit))
        assert done.output_ids == full.output_ids[:limit]
        assert done.text == shown(full.output_ids[:limit])
        assert done.finish_reason == {"type": "length", "length": limit}


def ending_engine(algorithm: str) -> tuple[Engine, list[list[int]]]:
    """A model that likes to end, and prompts that it ends after a few tokens."""
    model = toy(1, end=16.0)
    engine = make_engine(model, DRAFTS[algorithm], eos=(END,))
    greedy = SamplingParams(max_new_tokens=40)
    prompts = [p for p in some_prompts(60, seed=5) if 3 <= len(plain(model, p, greedy, (END,)).tokens) <= 20]
    return engine, prompts[:4]


def plain(model, prompt, params, eos=()):
    return oracle.generate_plain(model.logits, prompt, wanted(params, eos))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_end_token(algorithm):
    engine, prompts = ending_engine(algorithm)
    model = toy(1, end=16.0)
    assert len(prompts) == 4
    for changes in ({}, {"ignore_eos": True}, {"min_new_tokens": 25}, {"temperature": 1.0, "seed": 4}):
        params = SamplingParams(max_new_tokens=40, **changes)
        for prompt, done in zip(prompts, engine.generate(prompts, params), strict=True):
            check_plain(model, prompt, params, done, (END,))
            if "ignore_eos" in changes:
                assert done.completion_tokens == 40
                assert END in done.output_ids
            if "min_new_tokens" in changes:
                assert END not in done.output_ids[:25]
            if not changes:
                assert done.finish_reason == {"type": "stop", "matched": END}
                assert done.output_ids[-1] == END, "counted and in output_ids"
                assert "im_end" not in done.text
    check_idle(engine)


def a_late_token(tokens: list[int]) -> int:
    """The token whose first appearance is the latest."""
    return max(set(tokens), key=tokens.index)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("place", [0, 7, 8, 11])
def test_more_stop_ids_than_the_device_holds(algorithm, place):
    """The one that is drawn is among the 8 that the device knows, or among the rest."""
    engine, prompt = shared_engine(algorithm), [70, 71, 72] * 3
    free = engine.generate(prompt, SamplingParams(max_new_tokens=30)).output_ids
    stops = [token for token in range(200, 260) if token not in free][:11]
    stops.insert(place, a_late_token(free))
    params = SamplingParams(max_new_tokens=30, stop_token_ids=stops)
    done = engine.generate(prompt, params)
    check_plain(toy(), prompt, params, done)
    assert done.finish_reason == {"type": "stop", "matched": stops[place]}
    check_idle(engine)


def test_stop_ids_of_other_models():
    """They stop nothing, and take no place of those that do."""
    engine, prompt = shared_engine("NONE"), [70, 71, 72] * 3
    free = engine.generate(prompt, SamplingParams(max_new_tokens=30)).output_ids
    foreign, end = [VOCABULARY, *range(119690, 119700), 2**31 - 1], a_late_token(free)
    done = engine.generate(prompt, SamplingParams(max_new_tokens=30, min_new_tokens=1, stop_token_ids=[*foreign, end]))
    assert done.finish_reason == {"type": "stop", "matched": end}
    assert engine.generate(prompt, SamplingParams(max_new_tokens=30, stop_token_ids=foreign)).output_ids == free


@pytest.mark.parametrize("place", [0, 7])
def test_min_new_tokens_with_many_stop_ids(place):
    engine, prompt = shared_engine("NONE"), [70, 71, 72] * 3
    free = engine.generate(prompt, SamplingParams(max_new_tokens=30)).output_ids
    stops = [token for token in range(200, 260) if token not in free][:7]
    stops.insert(place, free[3])
    params = SamplingParams(max_new_tokens=30, min_new_tokens=20, stop_token_ids=stops)
    done = engine.generate(prompt, params)
    assert done.completion_tokens >= 20
    check_plain(toy(), prompt, params, done)
    # The host could not keep a ninth from being drawn: refused rather than wrong.
    with pytest.raises(ValueError, match=r"min_new_tokens works with at most 8 stop ids.* has 9"):
        engine.generate(prompt, SamplingParams(max_new_tokens=30, min_new_tokens=20, stop_token_ids=[*stops, 5]))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_stop_strings(algorithm):
    engine, prompt = shared_engine(algorithm), [70, 71, 72] * 3
    free = engine.generate(prompt, SamplingParams(max_new_tokens=50))
    for at in range(12):
        stop = free.text[at : at + 3]
        done = engine.generate(prompt, SamplingParams(max_new_tokens=50, stop=["never", stop]))
        assert done.text == free.text[: free.text.index(stop)]
        assert done.finish_reason == {"type": "stop", "matched": stop}
        assert done.output_ids == free.output_ids[: done.completion_tokens]
        assert decode(done.output_ids).endswith(stop), "no token after the one that completes it"
        assert sum(n * (i + 1) for i, n in enumerate(done.spec_accept_histogram)) == done.completion_tokens - 1
        kept = engine.generate(prompt, SamplingParams(max_new_tokens=50, stop=[stop], no_stop_trim=True))
        assert kept.text == done.text + stop
    check_idle(engine)


def test_the_same_seed_gives_the_same_text_in_any_batch():
    engine, prompt = shared_engine("NGRAM"), some_prompts(1, seed=9)[0]
    params = SamplingParams(max_new_tokens=30, temperature=1.0, seed=123)
    alone = engine.generate(prompt, params)
    others = [varied(i) for i in range(11)]
    crowd = engine.generate([*some_prompts(11), prompt, prompt], [*others, params, params])
    assert [outcome(done) for done in crowd[-2:]] == [outcome(alone)] * 2
    different = engine.generate(prompt, SamplingParams(max_new_tokens=30, temperature=1.0, seed=124))
    assert different.text != alone.text


def test_a_request_without_a_seed_gets_a_random_one_and_is_told_which():
    engine, prompt = shared_engine("NONE"), [9, 10]
    first, second = engine.generate([prompt] * 2, SamplingParams(max_new_tokens=30, temperature=1.0))
    assert first.seed != second.seed
    assert first.text != second.text
    again = engine.generate(prompt, SamplingParams(max_new_tokens=30, temperature=1.0, seed=first.seed))
    assert outcome(again) == outcome(first)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_dispatching_ahead_changes_nothing(algorithm):
    prompts, params = some_prompts(9, seed=4), [varied(i, stop=["e"] if i % 3 == 0 else ()) for i in range(9)]
    ahead, behind = (shared_engine(algorithm, overlap=on).generate(prompts, params) for on in (True, False))
    assert [outcome(done) for done in ahead] == [outcome(done) for done in behind]
    check_idle(shared_engine(algorithm, overlap=False))


def test_a_request_may_ask_for_no_speculation():
    engine, prompt = shared_engine("NGRAM"), [70, 71, 72] * 3
    fast = engine.generate(prompt, SamplingParams(max_new_tokens=40))
    slow, beside = engine.generate(
        [prompt] * 2, [SamplingParams(max_new_tokens=40, speculate=on) for on in (False, True)]
    )
    assert outcome(slow) == outcome(fast) == outcome(beside)
    assert slow.spec_accept_length == 1.0
    assert slow.spec_accept_histogram[1:] == [0] * (len(slow.spec_accept_histogram) - 1)
    assert fast.spec_accept_length > 2 and beside.spec_accept_length > 2


# Continuous batching.


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_many_requests_through_few_slots(algorithm):
    """Arrivals and aborts between steps; the integrity is checked after each (`drain` and here)."""
    engine = shared_engine(algorithm)
    rng = np.random.default_rng(0)
    prompts, params = some_prompts(24, seed=6, most=30), [varied(i) for i in range(24)]
    waiting, requests, done, aborted = list(range(24)), {}, {}, set()
    while waiting or engine.unfinished:
        for _ in range(min(int(rng.integers(0, 3)), len(waiting))):
            i = waiting.pop(0)
            requests[engine.add(prompts[i], params[i], id=f"{algorithm} {i}").id] = i
        for sequence in engine.step():
            if sequence.output.finish_reason is not None:
                done[requests[sequence.id]] = completion(sequence)
        running = sorted(set(requests) - {f"{algorithm} {i}" for i in {*done, *aborted}})
        if running and rng.random() < 0.05:
            victim = str(rng.choice(running))
            assert engine.abort(victim)
            assert not engine.abort(victim)
            aborted.add(requests[victim])
        engine.check_integrity()
    check_idle(engine)
    assert aborted and not aborted & set(done)
    assert {*aborted, *done} == set(range(24))
    for i, found in done.items():
        assert outcome(found) == outcome(engine.generate(prompts[i], params[i])), params[i]


def test_an_abort_at_any_time_frees_everything():
    engine = shared_engine("NGRAM")
    kept = engine.generate([8] * 20, SamplingParams(max_new_tokens=20))
    for steps in range(8):
        engine.flush_cache()
        ids = [engine.add([8] * 20, SamplingParams(max_new_tokens=20)).id for _ in range(6)]
        for _ in range(steps):
            engine.step()
        assert all(engine.abort(name) for name in (*ids[:3], *ids[4:]))
        engine.check_integrity()
        done = drain(engine)
        assert outcome(done.pop(ids[3])) == outcome(kept)
        assert not done, "an aborted request is not reported"
        check_idle(engine)
    assert not engine.abort("nobody")


def test_an_aborted_id_may_be_used_again_at_once():
    engine = shared_engine("NONE")
    prompt, params = [7, 7], SamplingParams(max_new_tokens=15)
    expected = engine.generate(prompt, params)
    engine.add([9] * 9, SamplingParams(max_new_tokens=15, temperature=1.0), id="mine")
    for _ in range(5):
        engine.step()
    engine.abort("mine")
    engine.add(prompt, params, id="mine")
    with pytest.raises(ValueError, match="a request with id 'mine' is running"):
        engine.add(prompt, params, id="mine")
    assert outcome(drain(engine)["mine"]) == outcome(expected)


def test_admission_is_first_come_first_served():
    engine = shared_engine("NONE")
    ids = [engine.add([5, i + 3], SamplingParams(max_new_tokens=10)).id for i in range(12)]
    assert list(drain(engine)) == ids


# Streams.


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_stream_is_the_text_in_pieces(algorithm):
    engine = shared_engine(algorithm)
    prompts = some_prompts(5, seed=8)
    params = [varied(i, max_new_tokens=30, stop=["ee", "a ", "nk"]) for i in range(5)]
    whole = engine.generate(prompts, params)
    pieces: dict[int, list[StreamChunk]] = {i: [] for i in range(5)}
    for chunk in engine.generate(prompts, params, stream=True):
        pieces[chunk.prompt_index].append(chunk)
    for i, chunks in pieces.items():
        assert "".join(chunk.text for chunk in chunks) == whole[i].text
        assert all(chunk.text for chunk in chunks[:-1]), "an empty chunk is no news"
        ends = [chunk.completion for chunk in chunks if chunk.completion]
        assert ends == [chunks[-1].completion]
        assert outcome(ends[0]) == outcome(whole[i])
    check_idle(engine)


def test_a_streams_tokens_are_all_there():
    """Tokens of a step whose text is not settled yet come with the next chunk."""
    engine, prompt = shared_engine("NONE"), [70, 71, 72] * 3
    text = engine.generate(prompt, SamplingParams(max_new_tokens=20)).text
    chunks = list(engine.generate(prompt, SamplingParams(max_new_tokens=20, stop=text[4:8] + "never"), stream=True))
    assert list(itertools.chain(*(c.output_ids for c in chunks))) == chunks[-1].completion.output_ids


@pytest.mark.parametrize("taken", [1, 3])
def test_a_consumer_who_stops_early_frees_the_pages(taken):
    engine = shared_engine("NGRAM")
    stream = engine.generate(some_prompts(6), SamplingParams(max_new_tokens=50), stream=True)
    for _ in range(taken):
        next(stream)
    assert engine.unfinished
    stream.close()
    check_idle(engine)
    assert engine.generate([5], SamplingParams(max_new_tokens=3)).completion_tokens == 3


def limited(engine: Engine, monkeypatch, most: int = 300) -> None:
    """Makes a loop that waits for ever fail instead."""
    count, step = itertools.count(), engine.step

    def counted():
        assert next(count) < most, "waits for ever"
        return step()

    monkeypatch.setattr(engine, "step", counted)


def test_an_aborted_request_ends_its_stream(monkeypatch):
    engine = shared_engine("NONE")
    limited(engine, monkeypatch)
    stream = engine.generate([5, 6], SamplingParams(max_new_tokens=50), stream=True)
    next(stream)
    (sequence,) = engine.scheduler.active
    engine.abort(sequence.id)
    (last,) = stream
    assert last.completion.finish_reason == {"type": "abort"}


@pytest.mark.parametrize("other", ["generate", "stream"])
def test_a_stream_survives_other_callers(other, monkeypatch):
    """In a notebook: `for chunk in stream: ... engine.generate(...)`, or two streams side by side."""
    engine = shared_engine("NONE")
    params = SamplingParams(max_new_tokens=20)
    expected = engine.generate([5, 6], params)
    limited(engine, monkeypatch)
    stream = engine.generate([5, 6], params, stream=True)
    text = next(stream).text
    if other == "generate":
        engine.generate([7, 8, 9], SamplingParams(max_new_tokens=40))
    else:
        list(engine.generate([7, 8, 9], SamplingParams(max_new_tokens=40), stream=True))
    assert text + "".join(chunk.text for chunk in stream) == expected.text


def test_a_stream_that_is_never_started_leaves_nothing_behind():
    engine = make_engine(toy(), warm=False)
    stream = engine.generate([5, 6], SamplingParams(max_new_tokens=5), stream=True)
    stream.close()
    check_idle(engine)


# The drafter's memory.


def test_flush_cache_refuses_while_a_request_runs():
    engine = shared_engine("NGRAM")
    drain(engine)
    name = engine.add([5, 6], SamplingParams(max_new_tokens=30)).id
    assert not engine.flush_cache()
    for _ in range(3):
        engine.step()
    assert not engine.flush_cache()
    drain(engine)
    assert engine.flush_cache()
    assert not engine.abort(name)


def test_flush_cache_forgets():
    """Sampled text does not repeat itself, so a first run has little to go by; a second run has the first."""
    engine, prompt = shared_engine("NGRAM"), some_prompts(1, seed=12)[0]
    params = SamplingParams(max_new_tokens=60, temperature=1.5, seed=5)

    def accept_length():
        done = engine.generate(prompt, params)
        drain(engine)
        return done.spec_accept_length

    drain(engine)
    assert engine.flush_cache()
    first, second = accept_length(), accept_length()
    assert second > 3 > first
    assert engine.flush_cache()
    assert accept_length() == first


def test_flush_cache_works_after_generate():
    engine = shared_engine("NGRAM")
    drain(engine)
    engine.generate([5, 6], SamplingParams(max_new_tokens=10))
    assert engine.flush_cache()


# Prompts and errors.


def test_messages_are_rendered_with_the_template():
    engine = shared_engine("NONE")
    messages = [{"role": "system", "content": "hell"}, {"role": "user", "content": "the 12 é"}]
    text = "<|im_start|>system\nhell<|im_end|>\n<|im_start|>user\nthe 12 é<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer()(text)["input_ids"]
    assert ids[0] == 1 and decode(ids, skip=False) == text
    params = SamplingParams(max_new_tokens=10)
    found = engine.generate(messages, params)
    assert found.prompt_tokens == len(ids)
    assert outcome(found) == outcome(engine.generate(ids, params)) == outcome(engine.generate(text, params))
    many = engine.generate([messages, text, ids, tuple(ids)], params)
    assert [outcome(done) for done in many] == [outcome(found)] * 4
    assert engine.generate([], params) == []


BAD_PROMPTS = {
    "empty text": ("", {}, "prompt is empty"),
    "empty ids": ([[]], {}, "prompt is empty"),
    "token below": ([5, -1], {}, "token -1"),
    "token above": ([5, VOCABULARY], {}, f"token {VOCABULARY}; ids of this model are 0 to {VOCABULARY - 1}"),
    "flags": ([[True]], {}, "a prompt is a string"),
    "no content": ([{"role": "user"}], {}, "role and a content"),
    "content parts": ([{"role": "user", "content": [{"type": "text"}]}], {}, "role and a content"),
    "context": ([5] * 128, {}, "128 tokens, but the context is 128"),
    "context and limit": ([5] * 100, {"max_new_tokens": 29}, "exceed the context of 128"),
    "stop id": ([5], {"stop_token_ids": [-1]}, "stop_token_ids holds -1"),
    "high stop id": ([5], {"stop_token_ids": [2**31]}, f"stop_token_ids holds {2**31}"),
    "bias": ([5], {"logit_bias": {-1: 1.0}}, "logit_bias holds -1"),
}


@pytest.mark.parametrize("kind", BAD_PROMPTS)
def test_a_bad_request_leaves_the_engine_usable(kind):
    prompt, changes, message = BAD_PROMPTS[kind]
    engine = shared_engine("NONE")
    params = SamplingParams(**{"max_new_tokens": 5} | changes)
    with pytest.raises(ValueError, match=message):
        engine.generate(prompt, params)
    if not isinstance(prompt, str) and not isinstance(prompt[0], list | dict):  # good ones before a bad one
        with pytest.raises(ValueError, match=message):
            engine.generate([[5, 6], [7], prompt], params)
    drain(engine)
    check_idle(engine)
    good = SamplingParams(max_new_tokens=5)
    check_plain(toy(), [5, 6], good, engine.generate([5, 6], good))


def test_the_context_is_used_to_its_end():
    engine = shared_engine("NONE")
    exact = engine.generate([5] * 100, SamplingParams(max_new_tokens=28))
    assert exact.completion_tokens == 28
    rest = engine.generate([5] * 100, SamplingParams(max_new_tokens=None))
    assert rest.output_ids == exact.output_ids
    assert rest.finish_reason == {"type": "length", "length": 28}


def test_as_many_parameters_as_prompts():
    with pytest.raises(ValueError, match="2 prompts, but 3 sampling parameters"):
        shared_engine("NONE").generate([[5], [6]], [SamplingParams()] * 3)


def test_a_model_without_a_template_takes_no_messages():
    engine = shared_engine("NONE")
    engine.tokenizer.chat_template = None
    try:
        with pytest.raises(ValueError, match="no chat template"):
            engine.encode([{"role": "user", "content": "hi"}])
        engine.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
        with pytest.raises(ValueError, match="roles must alternate"):
            engine.encode([{"role": "user", "content": "hi"}])
    finally:
        engine.tokenizer.chat_template = TEMPLATE


@pytest.mark.parametrize(
    "name",
    ["max_running_requests", "page_size", "max_total_tokens", "context_length", "chunked_prefill_size", "mem_fraction"],
)
def test_a_bad_setting_is_named(name):
    for value in (0, -1):
        with pytest.raises(ValueError, match=rf"^EngineConfig\.{name} must be .*, got {value}"):
            EngineConfig(**{name: value if name != "mem_fraction" else float(value)})


# Programs.


def test_one_program_for_a_bucket():
    engine = make_engine(toy(), warm=False, max_running_requests=2)
    seen = set()
    for count in (1, 2, 3, 9, 1):
        engine.generate(some_prompts(count, most=8), SamplingParams(max_new_tokens=20))
        seen |= engine.programs.compiled()
    assert sorted(key.width for key in seen if key.kind == "step") == [1, 2]
    assert sorted(key.width for key in seen if key.kind == "prefill") == [8]
    assert seen == engine.programs.compiled() == {key for key in engine.buckets.all_keys() if key.rows == 1}
    assert [key for key in engine.single_request_keys() if key.kind == "step"] == [Key("step", 1, 32)]


def test_requests_do_not_wait_for_a_compiler_where_a_larger_batch_is_ready():
    engine = shared_engine("NONE")
    engine.generate(some_prompts(3), SamplingParams(max_new_tokens=5))
    assert engine.buckets.batches == (1, 4)
    assert [key.width for key in engine.programs.compiled() if key == Key("step", key.width, key.table)] == [4]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_more_requests_than_the_largest_batch_are_decoded_in_parts(algorithm):
    engine = make_engine(toy(), DRAFTS[algorithm], max_batch=2)
    assert engine.buckets.batches == (1, 2) and engine.buckets.batch(4) == 2
    prompts, params = some_prompts(5), [varied(i) for i in range(5)]
    for prompt, each, done in zip(prompts, params, engine.generate(prompts, params), strict=True):
        check_plain(toy(), prompt, each, done)
    check_idle(engine)
    assert max(key.width for key in engine.programs.compiled() if key.kind == "step") == 2
    sequences = [engine.add([5], varied(0)) for _ in range(4)]
    assert {key.width for key in engine.first_keys(sequences) if key.kind == "step"} <= {1, 2}
    for sequence in sequences:
        engine.abort(sequence.id)


def test_the_largest_batch_is_at_most_all_rows():
    engine = EngineConfig(max_running_requests=4, max_batch=9)
    assert engine.largest_batch == 4 and replace(engine, max_batch=None).largest_batch == 4
    assert replace(engine, max_batch=3).largest_batch == 3
    with pytest.raises(ValueError, match="max_batch must be an integer of at least 1"):
        EngineConfig(max_batch=0)


@pytest.mark.parametrize("rows", [1, 3, 4, 16, 47, 48, 100])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_buckets_hold_whatever_may_come(rows, platform):
    ngrams = make_drafter("NGRAM")
    buckets = replace(Buckets.build(platform, ngrams, rows=rows, request_pages=700), widths=(1, 4, 12, 60))
    assert buckets.batches == tuple(sorted(set(buckets.batches))) and buckets.batches[-1] == rows
    assert len(buckets.batches) + len(buckets.chunks) < 16
    for count in range(1, rows + 1):
        assert buckets.batch(count) >= count
        assert buckets.batch(buckets.batch(count)) == buckets.batch(count)
    for pages in (1, 512, 513, 700):
        assert buckets.tables_for(pages)[0] >= pages
    for batch in buckets.batches:
        fitting = [w for w in (1, 4, 12, 60) if w == 1 or w * batch <= BLOCK_TOKENS[platform]]
        as_many = min(60, BLOCK_TOKENS[platform] // batch)
        assert buckets.tree_widths(batch) == (tuple(fitting) if platform == "cpu" else (as_many,))
    assert replace(buckets, widths=(1, 2000)).tree_widths(1)[-1] == 2000, "one request may use what was asked for"
    if rows == 100:
        assert replace(buckets, widths=(1, 60)).most_drafting == {"cpu": 1, "gpu": 100}[platform]
        assert replace(buckets, widths=(1,)).most_drafting == 1
        assert replace(buckets, widths=(1, 60), block_tokens=32).most_drafting == {"cpu": 1, "gpu": 16}[platform]
    heads = Buckets.build(platform, ngrams._replace(features="final"), rows=rows, request_pages=700)
    heads = replace(heads, widths=(1, 2, 4))
    for batch in heads.batches:
        fitting = [w for w in (1, 2, 4) if 1 in (w, batch) or w * batch <= HEAD_BLOCK_TOKENS[platform]]
        as_many = 4 if batch == 1 else min(4, HEAD_BLOCK_TOKENS[platform] // batch)
        assert heads.tree_widths(batch) == (tuple(fitting) if platform == "cpu" else (as_many,))
    asked = Buckets.build(platform, ngrams._replace(explicit_width=True), rows=rows, request_pages=700)
    asked = replace(asked, widths=(1, 4, 60))
    for batch in asked.batches:
        assert asked.tree_widths(batch)[-1] == 60, "what the user asked for holds at any batch size"
    assert asked.most_drafting == rows
    assert asked.shrinking(rows) == ([*asked.batches[::-1]] if platform == "cpu" else [rows])
    assert replace(asked, widths=(1,)).shrinking(rows) == [rows], "nothing to draft"


@pytest.mark.parametrize("chunk", [None, 8, 64, 100, 512, 10_000])
def test_chunks_cover_a_prompt_once(chunk):
    buckets = Buckets.build("cpu", make_drafter("NONE"), rows=4, request_pages=2000, chunk=chunk)
    assert buckets.chunks[-1] <= LARGE_CHUNK["cpu"] and (chunk is None or buckets.chunks[-1] <= chunk)
    assert buckets.chunks[0] <= SMALL_CHUNK["cpu"]
    engine = shared_engine("NONE")
    rng = np.random.default_rng(0)
    for length in (1, 7, 8, 9, 63, 64, 65, 448, 449, 512, 513, 576, 577, 1025):
        prompt = rng.integers(3, VOCABULARY, length).tolist()
        sequence = engine.add([3], SamplingParams(max_new_tokens=3))
        engine.abort(sequence.id)
        sequence.request, sequence.slot = replace(sequence.request, prompt=prompt), Slot(2, [4, 5], set())
        taken, after = [], []
        while sequence.slot.prefilled < length:
            width = buckets.chunks_for(length - sequence.slot.prefilled)[0]
            table = buckets.tables_for(2)[0]
            sizes = {"rows": 4, "pages": engine.pool.pages, "lengths": [min(sequence.left, width)]}
            packed = prefill_input([sequence], 1, width, table, **sizes)
            tables = np.full((4, table + 3), engine.pool.pages, np.int32)
            inputs, tables = unpack_prefill(jnp.asarray(packed), jnp.asarray(tables), table, engine.pool.pages)
            assert tables[2].tolist() == [4, 5] + [engine.pool.pages] * (table + 1)
            count = int(inputs.length[0])
            assert 1 <= count <= inputs.tokens.shape[1] and inputs.tokens.shape[1] in buckets.chunks
            taken += inputs.tokens[0, :count].tolist()
            after.append(int(inputs.next_token[0]))
            sequence.slot.prefilled += count
            assert after[-1] == (prompt[sequence.slot.prefilled] if sequence.slot.prefilled < length else -1)
        assert taken == prompt


def test_all_programs_can_be_compiled_ahead(capsys):
    engine = make_engine(toy(), warm=False, max_running_requests=2)
    sequences = [engine.add([5] * 9, SamplingParams(max_new_tokens=3)) for _ in range(3)]
    first = engine.first_keys(sequences)
    assert sorted((key.kind, key.width) for key in first) == [("prefill", 8), ("prefill", 8), ("step", 2)]
    assert sorted(key.rows for key in first) == [1, 1, 2]
    for sequence in sequences:
        engine.abort(sequence.id)
    engine.warm_up(progress=True)
    assert engine.programs.compiled() == set(engine.buckets.all_keys())
    assert "Compiling" in capsys.readouterr().err
    engine.warm_up(progress=True)
    assert capsys.readouterr().err == "", "nothing left to compile, so no bar"


@pytest.mark.parametrize("beside", [False, True])
def test_what_fails_while_compiling_ahead_is_told(beside, monkeypatch):
    """Whichever of the two threads has it, while the other one is at work."""
    engine = make_engine(toy(), warm=False, max_running_requests=2)
    compile, both = Programs._compile, threading.Barrier(2)

    def fails(self: Programs, key: Key) -> Any:
        both.wait(60)
        if beside == (threading.current_thread() is not threading.main_thread()):
            raise MemoryError("none left")
        return compile(self, key)

    with monkeypatch.context() as patch:
        patch.setattr(Programs, "_compile", fails)
        with pytest.raises(MemoryError, match="none left"):
            engine.warm_up(progress=False)
    assert len(engine.programs.compiled()) == 1
    engine.warm_up(progress=False)
    assert engine.programs.compiled() == set(engine.buckets.all_keys())


def test_texts_of_bytes_are_whole_characters():
    """A model that writes é byte by byte: no chunk of a stream holds half of it."""
    first, second = byte_ids("é".encode())
    engine, params = shared_engine("NONE"), {"max_new_tokens": 21, "temperature": 1.0, "seed": 3}
    bias = dict.fromkeys((first, second), 100.0)
    chunks = list(engine.generate([5], SamplingParams(logit_bias=bias, **params), stream=True))
    done = chunks[-1].completion
    assert set(done.output_ids) == {first, second}
    assert done.text == shown(done.output_ids) == "".join(c.text for c in chunks)
    assert "é" in done.text


@pytest.mark.slow
def test_the_last_requests_of_a_wide_run_speculate():
    """A batch of 20 is too wide to draft for on a CPU; the one request that is left at its end is not."""
    engine = make_engine(toy(), "NGRAM", warm=False, max_running_requests=20, max_total_tokens=4096)
    assert not engine.drafter.explicit_width
    params = [SamplingParams(max_new_tokens=110 if i == 19 else 70) for i in range(20)]
    done = engine.generate([[70, 71, 72] * 3] * 20, params)
    assert engine.buckets.tree_widths(20) == (1,)
    assert done[19].spec_accept_length > 1
    assert {key.width for key in engine.programs.compiled() if key.kind == "step"} >= {20, 1}


@pytest.mark.parametrize("temperature", [1e-38, 1e-7])
def test_the_smallest_temperatures_are_greedy(temperature):
    engine, prompt = shared_engine("NONE"), [70, 71, 72] * 3
    greedy = engine.generate(prompt, SamplingParams(max_new_tokens=20))
    cold = SamplingParams(max_new_tokens=20, temperature=temperature, top_p=0.9, seed=3)
    assert engine.generate(prompt, cold).output_ids == greedy.output_ids


def test_an_interrupted_generate_leaves_nothing_behind(monkeypatch):
    engine = make_engine(toy(), warm=False)
    monkeypatch.setattr(engine, "step", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.generate([70, 71], SamplingParams(max_new_tokens=4))
    assert not engine.scheduler.unfinished
    engine.check_integrity()


def test_the_models_sampling_is_the_default_of_fields_by_name(monkeypatch):
    """What a request does not name is the model's; a whole `SamplingParams` is taken as it is."""
    engine, prompt = shared_engine("NONE"), [70, 71, 72]
    monkeypatch.setattr(engine, "sampling_defaults", {"temperature": 0.9, "top_k": 20})
    short = {"max_new_tokens": 12, "seed": 3}
    drawn = engine.generate(prompt, SamplingParams(temperature=0.9, top_k=20, **short)).output_ids
    greedy = engine.generate(prompt, SamplingParams(**short)).output_ids
    assert drawn != greedy
    assert engine.generate(prompt, short).output_ids == drawn
    assert engine.generate(prompt, short | {"temperature": 0.0}).output_ids == greedy
    found = engine.generate([prompt] * 3, [short, SamplingParams(**short), short | {"temperature": 0.0}])
    assert [done.output_ids for done in found] == [drawn, greedy, greedy]
    assert with_sampling(prompt, None, engine.sampling_defaults)[1][0][1] == SamplingParams(temperature=0.9, top_k=20)
