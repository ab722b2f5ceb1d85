"""The engine over table models: where texts end, batches, streams, prompts, and programs.

That texts equal plain decoding is in tests/drafters/test_lossless.py.
"""

import itertools
from dataclasses import replace

import numpy as np
import oracle
import pytest
from engine_helpers import (
    DRAFTS,
    END,
    TEMPLATE,
    VOCABULARY,
    check_counts,
    check_idle,
    check_plain,
    check_texts,
    decode,
    drain,
    make_engine,
    outcome,
    shared_engine,
    tokenizer,
    toy,
    wanted,
)
from integrity import check_integrity

from specjax.engine import Engine, EngineConfig, SamplingParams, StreamChunk
from specjax.engine.intake import with_sampling
from specjax.engine.plan import Key

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


def some_prompts(count: int, seed: int = 0, longest: int = 20) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCABULARY, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


def varied(index: int, **changes) -> SamplingParams:
    fields = list(SAMPLINGS.values())[index % len(SAMPLINGS)] | {"max_new_tokens": 4 + 5 * index % 23} | changes
    if "seed" in fields:
        fields |= {"seed": fields["seed"] + index}
    return SamplingParams(**fields)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_prompts_around_multiples_of_a_chunk(algorithm):
    params = SamplingParams(max_new_tokens=12, repetition_penalty=1.2)
    for length in (1, 7, 8, 9, 16, 17, 25):
        prompt = np.random.default_rng(length).integers(3, VOCABULARY, length).tolist()
        check_plain(toy(), prompt, params, shared_engine(algorithm).generate(prompt, params))


def test_length_limit_cuts_an_accepted_run():
    engine = shared_engine("NGRAM")
    prompt = [70, 71, 72] * 3
    full = engine.generate(prompt, SamplingParams(max_new_tokens=60))
    assert full.spec_accept_histogram[-1] > 5, "no run of full length that a limit could cut"
    for limit in (1, *range(30, 42)):
        done = engine.generate(prompt, SamplingParams(max_new_tokens=limit))
        assert (done.output_ids, done.text) == (full.output_ids[:limit], decode(full.output_ids[:limit]))
        assert done.finish_reason == {"type": "length", "length": limit}
        check_counts(done)
        if limit == 1:
            assert (done.spec_verify_ct, done.spec_accept_length) == (0, 1.0)


def ending_engine(algorithm: str) -> tuple[Engine, list[list[int]]]:
    """An engine whose model often draws the end token, and four prompts that it ends after 3 to 20 tokens."""
    model = toy(1, end=16.0)
    engine = make_engine(model, DRAFTS[algorithm], eos=(END,))
    greedy = wanted(SamplingParams(max_new_tokens=40), (END,))
    prompts = some_prompts(60, seed=5)
    return engine, [p for p in prompts if 3 <= len(oracle.generate_plain(model.logits, p, greedy).tokens) <= 20][:4]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_end_token(algorithm):
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
                assert done.output_ids[-1] == END, "the end token is in output_ids"
                assert "im_end" not in done.text
    check_idle(engine)


def late_token(tokens: list[int]) -> int:
    """The token whose first appearance comes last."""
    return max(set(tokens), key=tokens.index)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("place", [7, 8])
def test_stop_ids_on_device_and_host(algorithm, place):
    """The device checks the first 8 stop ids, the host the others. Ids outside the vocabulary use no place."""
    engine, prompt = shared_engine(algorithm), [70, 71, 72] * 3
    free = engine.generate(prompt, SamplingParams(max_new_tokens=30)).output_ids
    stops = [token for token in range(200, 260) if token not in free][:11]
    stops.insert(place, late_token(free))
    foreign = [VOCABULARY, *range(119690, 119700), 2**31 - 1]
    params = SamplingParams(max_new_tokens=30, stop_token_ids=[*foreign, *stops])
    done = engine.generate(prompt, params)
    check_plain(toy(), prompt, params, done)
    assert done.finish_reason == {"type": "stop", "matched": stops[place]}
    assert engine.generate(prompt, SamplingParams(max_new_tokens=30, stop_token_ids=foreign)).output_ids == free
    check_idle(engine)


def test_min_new_tokens_with_eight_stop_ids():
    engine, prompt = shared_engine("NONE"), [70, 71, 72] * 3
    free = engine.generate(prompt, SamplingParams(max_new_tokens=30)).output_ids
    stops = [*[token for token in range(200, 260) if token not in free][:7], free[3]]
    params = SamplingParams(max_new_tokens=30, min_new_tokens=20, stop_token_ids=stops)
    done = engine.generate(prompt, params)
    assert done.completion_tokens >= 20
    check_plain(toy(), prompt, params, done)
    with pytest.raises(ValueError, match=r"min_new_tokens works with at most 8 stop ids.* has 9"):
        engine.generate(prompt, SamplingParams(max_new_tokens=30, min_new_tokens=20, stop_token_ids=[*stops, 5]))


@pytest.mark.parametrize("overlap", [True, False])
def test_stop_strings_inside_accepted_runs(overlap):
    engine, prompt = shared_engine("NGRAM", overlap=overlap), [70, 71, 72] * 3
    free = engine.generate(prompt, SamplingParams(max_new_tokens=50))
    for start in range(0, 12, 2):
        stop = free.text[start : start + 3]
        done = engine.generate(prompt, SamplingParams(max_new_tokens=50, stop=["never", stop]))
        assert done.text == free.text[: free.text.index(stop)]
        assert done.finish_reason == {"type": "stop", "matched": stop}
        assert done.output_ids == free.output_ids[: done.completion_tokens]
        assert decode(done.output_ids).endswith(stop), "a token after the stop string was kept"
        check_counts(done)
        untrimmed = engine.generate(prompt, SamplingParams(max_new_tokens=50, stop=[stop], no_stop_trim=True))
        assert untrimmed.text == done.text + stop
    check_idle(engine)


def test_seed_decides_the_text_in_any_batch():
    engine, prompt = shared_engine("NGRAM"), some_prompts(1, seed=9)[0]
    params = SamplingParams(max_new_tokens=30, temperature=1.0, seed=123)
    alone = engine.generate(prompt, params)
    others = [varied(i) for i in range(11)]
    batch = engine.generate([*some_prompts(11), prompt, prompt], [*others, params, params])
    assert [outcome(done) for done in batch[-2:]] == [outcome(alone)] * 2
    assert engine.generate(prompt, replace(params, seed=124)).text != alone.text
    first, second = engine.generate([prompt] * 2, replace(params, seed=None))  # random seeds, which are reported
    assert first.seed != second.seed and first.text != second.text
    assert outcome(engine.generate(prompt, replace(params, seed=first.seed))) == outcome(first)


# Continuous batching.


def test_abort_at_any_step_frees_all_pages():
    engine = shared_engine("NGRAM")
    expected = engine.generate([8] * 20, SamplingParams(max_new_tokens=20))
    for steps in range(8):
        engine.flush_cache()
        ids = [engine.add([8] * 20, SamplingParams(max_new_tokens=20)).id for _ in range(6)]
        for _ in range(steps):
            engine.step()
        assert all(engine.abort(name) for name in (*ids[:3], *ids[4:]))
        check_integrity(engine)
        done = drain(engine)
        assert outcome(done.pop(ids[3])) == outcome(expected)
        assert not done, "an aborted request is not reported"
        check_idle(engine)
    assert not engine.abort("nobody")


def test_id_of_an_aborted_request_can_be_reused():
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


def test_stream_chunks_join_to_the_text():
    engine = shared_engine("NGRAM")
    prompts = some_prompts(5, seed=8)
    params = [varied(i, max_new_tokens=30, stop=["ee", "a ", "nk"]) for i in range(5)]
    whole = engine.generate(prompts, params)
    chunks: dict[int, list[StreamChunk]] = {i: [] for i in range(5)}
    for chunk in engine.generate(prompts, params, stream=True):
        chunks[chunk.prompt_index].append(chunk)
    for i, (*earlier, last) in chunks.items():
        assert "".join(chunk.text for chunk in chunks[i]) == whole[i].text
        assert all(chunk.text and chunk.completion is None for chunk in earlier), "an empty chunk before the last"
        assert outcome(last.completion) == outcome(whole[i])
        # Tokens whose text is held back come with the next chunk.
        assert list(itertools.chain(*(chunk.output_ids for chunk in chunks[i]))) == last.completion.output_ids
    check_idle(engine)


@pytest.mark.parametrize("chunks", [0, 3])
def test_closing_a_stream_frees_its_pages(chunks):
    engine = shared_engine("NGRAM")
    stream = engine.generate(some_prompts(6), SamplingParams(max_new_tokens=50), stream=True)
    for _ in range(chunks):
        next(stream)
    stream.close()
    check_idle(engine)
    assert engine.generate([5], SamplingParams(max_new_tokens=3)).completion_tokens == 3


def limited(engine: Engine, monkeypatch, steps: int = 300) -> None:
    """Fail instead of looping forever."""
    count, step = itertools.count(), engine.step

    def counted():
        assert next(count) < steps, "the loop does not end"
        return step()

    monkeypatch.setattr(engine, "step", counted)


def test_abort_ends_a_stream(monkeypatch):
    engine = shared_engine("NONE")
    limited(engine, monkeypatch)
    stream = engine.generate([5, 6], SamplingParams(max_new_tokens=50), stream=True)
    next(stream)
    (sequence,) = engine.scheduler.active
    engine.abort(sequence.id)
    (last,) = stream
    assert last.completion.finish_reason == {"type": "abort"}


@pytest.mark.parametrize("stream", [False, True])
def test_interleaved_callers(stream, monkeypatch):
    """Another `generate` or stream while a stream is being read, as in a notebook."""
    engine = shared_engine("NONE")
    params = SamplingParams(max_new_tokens=20)
    expected = engine.generate([5, 6], params)
    limited(engine, monkeypatch)
    first = engine.generate([5, 6], params, stream=True)
    text = next(first).text
    assert len(list(engine.generate([[7, 8, 9]], SamplingParams(max_new_tokens=40), stream=stream))) > 0
    assert text + "".join(chunk.text for chunk in first) == expected.text


def test_flush_cache():
    """It refuses while a request runs, also between steps, and forgets the n-grams of earlier texts."""
    engine, prompt = shared_engine("NGRAM"), some_prompts(1, seed=12)[0]
    drain(engine)
    engine.add([5, 6], SamplingParams(max_new_tokens=30))
    assert not engine.flush_cache()
    for _ in range(3):
        engine.step()
    assert not engine.flush_cache()
    drain(engine)
    assert engine.flush_cache()
    # Sampled text rarely repeats itself, but the second run finds the n-grams of the first.
    params = SamplingParams(max_new_tokens=60, temperature=1.5, seed=5)
    first, second = (engine.generate(prompt, params).spec_accept_length for _ in range(2))
    assert second > 3 > first
    assert engine.flush_cache()
    assert engine.generate(prompt, params).spec_accept_length == first


# Prompts and errors.


def test_messages_use_the_chat_template():
    engine = shared_engine("NONE")
    messages = [{"role": "system", "content": "hell"}, {"role": "user", "content": "the 12 é"}]
    text = "<|im_start|>system\nhell<|im_end|>\n<|im_start|>user\nthe 12 é<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer()(text)["input_ids"]
    assert ids[0] == 1 and decode(ids, skip=False) == text
    params = SamplingParams(max_new_tokens=10)
    done = engine.generate(messages, params)
    assert done.prompt_tokens == len(ids)
    assert outcome(done) == outcome(engine.generate(ids, params)) == outcome(engine.generate(text, params))
    many = engine.generate([messages, text, ids, tuple(ids)], params)
    assert [outcome(other) for other in many] == [outcome(done)] * 4
    assert engine.generate([], params) == []
    with pytest.raises(ValueError, match="2 prompts, but 3 sampling parameters"):
        engine.generate([[5], [6]], [params] * 3)


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
def test_bad_request_leaves_the_engine_usable(kind):
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


def test_context_is_used_to_its_end():
    engine = shared_engine("NONE")
    exact = engine.generate([5] * 100, SamplingParams(max_new_tokens=28))
    assert exact.completion_tokens == 28
    rest = engine.generate([5] * 100, SamplingParams(max_new_tokens=None))
    assert rest.output_ids == exact.output_ids
    assert rest.finish_reason == {"type": "length", "length": 28}


def test_messages_need_a_chat_template():
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
    [
        "max_running_requests",
        "page_size",
        "max_total_tokens",
        "context_length",
        "chunked_prefill_size",
        "max_batch",
        "mem_fraction",
    ],
)
def test_bad_setting_is_named(name):
    for value in (0, -1):
        with pytest.raises(ValueError, match=rf"^EngineConfig\.{name} must be .*, got {value}"):
            EngineConfig(**{name: value if name != "mem_fraction" else float(value)})


# Programs.


def test_one_program_a_bucket():
    """Programs compile in the background when requests first need them; two requests first run one by one."""
    engine = make_engine(toy(), warm=False, max_running_requests=2)
    for count in (1, 2, 3, 9, 1):
        engine.generate(some_prompts(count, longest=8), SamplingParams(max_new_tokens=20))
        assert engine.programs.wait(60)
    assert sorted(key.width for key in engine.programs.compiled() if key.kind == "step") == [1, 2]
    assert sorted(key.width for key in engine.programs.compiled() if key.kind == "prefill") == [8]
    assert engine.programs.compiled() == {key for key in engine.buckets.all_keys() if key.rows == 1}
    assert [key for key in engine.buckets.first_keys() if key.kind == "step"] == [Key("step", 1, 32)]


def test_requests_above_max_batch_are_decoded_in_parts():
    engine = make_engine(toy(), DRAFTS["NGRAM"], max_batch=2)
    assert engine.buckets.batches == (1, 2) and engine.buckets.batch(4) == 2
    prompts, params = some_prompts(5), [varied(i) for i in range(5)]
    check_texts(engine, toy(), prompts, params)
    assert max(key.width for key in engine.programs.compiled() if key.kind == "step") == 2
    assert {key.width for key in engine.buckets.first_keys(4) if key.kind == "step"} == {2}
    for max_batch, largest in ((9, 4), (None, 4), (3, 3)):
        assert EngineConfig(max_running_requests=4, max_batch=max_batch).largest_batch == largest


def test_warm_up_compiles_all_programs(capsys):
    engine = make_engine(toy(), warm=False, max_running_requests=2)
    first = engine.buckets.first_keys(3, 9)
    assert sorted((key.kind, key.width) for key in first) == [("prefill", 8), ("prefill", 8), ("step", 2)]
    assert sorted(key.rows for key in first) == [1, 1, 2]
    engine.warm_up(progress=True)
    assert engine.programs.compiled() == set(engine.buckets.all_keys())
    assert "Compiling" in capsys.readouterr().err
    engine.warm_up(progress=True)
    assert capsys.readouterr().err == "", "a bar without programs to compile"


def test_tiny_temperatures_are_greedy():
    engine, prompt = shared_engine("NONE"), [70, 71, 72] * 3
    greedy = engine.generate(prompt, SamplingParams(max_new_tokens=20))
    for temperature in (1e-38, 1e-7):
        params = SamplingParams(max_new_tokens=20, temperature=temperature, top_p=0.9, seed=3)
        assert engine.generate(prompt, params).output_ids == greedy.output_ids


def test_sampling_defaults_of_the_model(monkeypatch):
    """The defaults fill a dict of fields, not a `SamplingParams`."""
    engine, prompt = shared_engine("NONE"), [70, 71, 72]
    monkeypatch.setattr(engine, "sampling_defaults", {"temperature": 0.9, "top_k": 20})
    short = {"max_new_tokens": 12, "seed": 3}
    drawn = engine.generate(prompt, SamplingParams(temperature=0.9, top_k=20, **short)).output_ids
    greedy = engine.generate(prompt, SamplingParams(**short)).output_ids
    assert drawn != greedy
    assert engine.generate(prompt, short).output_ids == drawn
    assert engine.generate(prompt, short | {"temperature": 0.0}).output_ids == greedy
    completions = engine.generate([prompt] * 3, [short, SamplingParams(**short), short | {"temperature": 0.0}])
    assert [done.output_ids for done in completions] == [drawn, greedy, greedy]
    assert with_sampling(prompt, None, engine.sampling_defaults)[1][0][1] == SamplingParams(temperature=0.9, top_k=20)


def test_last_request_of_a_large_batch_drafts():
    """On a CPU a batch of 20 is too large to draft; its last request drafts."""
    engine = make_engine(toy(), "NGRAM", warm=False, max_running_requests=20, max_total_tokens=4096)
    params = [SamplingParams(max_new_tokens=40 if i == 19 else 8) for i in range(20)]
    completions = engine.generate([[70, 71, 72] * 3] * 20, params)
    assert engine.buckets.trees[20] == 3 and engine.buckets.trees[16] == 4
    assert completions[19].spec_accept_length > 1
