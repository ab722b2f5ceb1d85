"""Requests that follow a grammar, in an engine: the text is that of plain decoding with a mask, whatever is drafted."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import replace

import jax
import jsonschema
import numpy as np
import pytest
from engine_helpers import (
    DRAFTS,
    END,
    SPECIAL,
    VOCABULARY,
    byte_ids,
    check_idle,
    check_plain,
    make_engine,
    tokenizer,
    toy,
    warm_grammars,
)
from grammar_helpers import GRAMMARS, OBJECT, SCHEMA, check_masked, follows
from test_toy_drafter import random_trees
from toy_models import tiny_llama

from specjax.config import HeadConfig, RopeConfig
from specjax.drafters import TreeShape, eagle_drafter
from specjax.engine import Engine, SamplingParams
from specjax.engine.buckets import PLAIN, TREE, Key
from specjax.engine.grammar import GRAMMAR_FAILED, Grammar
from specjax.engine.intake import Intake
from specjax.engine.sequence import Status, completion
from specjax.limits import ParameterError
from specjax.models.draft_head import init_head_params

EOS = (END,)
HELLO = byte_ids(b"hello there: ")


@functools.cache
def llama():
    return tiny_llama(5, vocab_size=VOCABULARY)


@functools.cache
def engine_of(kind: str, **config) -> Engine:
    return warm_grammars(_made(kind, **config))


def _made(kind: str, **config) -> Engine:
    if kind == "eagle3":
        target = llama().target
        config_of_head = HeadConfig("eagle3", 16, 32, 24, 4, 2, 8, 1e-5, RopeConfig(), VOCABULARY, (0, 1))
        params = dict(init_head_params(config_of_head, target, jax.random.key(2)))
        drafter = eagle_drafter(target, config_of_head, TreeShape(3, 3, 6))
        return make_engine(llama(), drafter, draft=params, eos=EOS, warm=False, **config)
    drafts = DRAFTS | {"trees": random_trees(byte_ids(b'{"ok": true, "n": 1, "color": "red"}abcdex(,)12'))}
    return make_engine(toy(), drafts[kind], eos=EOS, warm=False, **config)


def requests(count: int, *, longest: int = 48) -> list[tuple[list[int], SamplingParams]]:
    """Every third without a grammar, greedy and sampled ones."""
    rng, made = np.random.default_rng(count), []
    for i in range(count):
        prompt = rng.integers(3, VOCABULARY, rng.integers(1, 20)).tolist()
        grammar = None if i % 3 == 2 else list(GRAMMARS.values())[(i // 2) % len(GRAMMARS)]
        sampling = {"temperature": 1.0, "seed": i} if i % 2 else {}
        sampling |= {"repetition_penalty": 1.2, "top_p": 0.9} if i % 5 == 4 else {}
        sampling |= {"speculate": False} if i == 4 else {}
        made.append((prompt, SamplingParams(max_new_tokens=longest - 2 * i, grammar=grammar, **sampling)))
    return made


def check(model, made, found) -> None:
    for (prompt, params), done in zip(made, found, strict=True):
        if params.grammar is None:
            check_plain(model, prompt, params, done, EOS)
            continue
        check_masked(model, prompt, params, done)
        assert follows(params.grammar, done.output_ids, whole=done.finish_reason["type"] == "stop")


ADAPTIVE = {"adaptive": True, "retract_every": 9, "max_running_requests": 4}


@pytest.mark.parametrize("kind", [pytest.param("NGRAM", marks=pytest.mark.slow), "eagle3"])
def test_whatever_is_chosen_and_retracted(kind, monkeypatch):
    engine = engine_of(kind, **ADAPTIVE)
    rng = np.random.default_rng(1)
    monkeypatch.setattr(engine.policy, "choose", lambda batch, requests: TREE if rng.random() < 0.5 else PLAIN)
    made = requests(9, longest=40)
    before = engine.scheduler.retractions
    found = engine.generate([prompt for prompt, _ in made], [params for _, params in made])
    check(llama() if kind == "eagle3" else toy(), made, found)
    assert engine.scheduler.retractions > before
    check_idle(engine)


def test_json_fits_its_schema():
    engine = engine_of("NGRAM")
    params = [SamplingParams(max_new_tokens=80, temperature=1.0, seed=i, grammar=OBJECT) for i in range(8)]
    for done in engine.generate([HELLO] * 8, params):
        assert done.finish_reason == {"type": "stop", "matched": END}
        jsonschema.validate(json.loads(done.text), SCHEMA)


def test_forced_tokens_are_drafted():
    """Of a text that is forced but for one token, where n-grams find nothing."""
    engine = engine_of("NGRAM")
    grammar = Grammar("regex", "[xy]abcdefgh ijkl mnop qrst uvwx yz")
    done = engine.generate(HELLO, SamplingParams(max_new_tokens=64, grammar=grammar))
    assert done.finish_reason["type"] == "stop" and len(done.output_ids) > 30
    assert (
        done.spec_accept_length > engine.drafter.depth and len(done.spec_accept_histogram) == engine.drafter.depth + 1
    )
    alone = engine.generate(HELLO, SamplingParams(max_new_tokens=64, grammar=grammar, speculate=False))
    assert alone.output_ids == done.output_ids and alone.spec_accept_length == 1.0
    few = engine.generate(HELLO, SamplingParams(max_new_tokens=64, grammar=grammar, draft_limit=1))
    assert few.output_ids == done.output_ids and 1.5 < few.spec_accept_length <= 2.0


@pytest.mark.parametrize("adaptive", [False, True])
def test_drafts_under_a_mask(adaptive):
    """Of a text that repeats itself, none of which is forced."""
    engine = engine_of("NGRAM", adaptive=True) if adaptive else engine_of("NGRAM")
    params = SamplingParams(max_new_tokens=60, grammar=Grammar("regex", "[a-d]{200}"))
    assert engine.generate(HELLO, params).spec_accept_length > 1.2


def test_text_that_reads_as_a_special_token():
    for text in (SPECIAL[END], f"x{SPECIAL[0]}y"):
        done = engine_of("NONE").generate(HELLO, SamplingParams(max_new_tokens=30, grammar=Grammar.choice([text])))
        assert (done.text, done.finish_reason["type"]) == (text, "stop")
    done = engine_of("NONE").generate(HELLO, SamplingParams(max_new_tokens=9, grammar=Grammar.choice(["a\x7fb"])))
    assert done.text == "a\x7fb"


LIMITS = {
    "cut": ({"max_new_tokens": 7}, "length"),
    "one token": ({"max_new_tokens": 1}, "length"),
    "a stop string": ({"stop": [": "]}, "stop"),
    "a stop id": ({"stop_token_ids": byte_ids(b":")}, "stop"),
    "ignore_eos": ({"ignore_eos": True}, "stop"),
    "a minimum": ({"min_new_tokens": 60}, "stop"),
    "a bias for the end": ({"logit_bias": {END: 100.0}}, "stop"),
    "a bias for what is not allowed": ({"logit_bias": dict.fromkeys(byte_ids(b"qz"), 100.0)}, "stop"),
    "log-probabilities": ({"logprobs": 2}, "stop"),
}


@pytest.mark.parametrize("kind", ["NONE", "NGRAM"])
@pytest.mark.parametrize("name", LIMITS)
def test_how_it_ends(name, kind):
    fields, reason = LIMITS[name]
    engine = engine_of(kind)
    params = SamplingParams(**{"max_new_tokens": 90, "grammar": OBJECT, "temperature": 1.0, "seed": 3} | fields)
    done = engine.generate(HELLO, params)
    assert done.finish_reason["type"] == reason
    if name == "a stop string":
        assert done.text == '{"ok"'
    elif name == "a minimum":  # the end is all that is allowed, and comes before it
        assert len(done.output_ids) < 60
        jsonschema.validate(json.loads(done.text), SCHEMA)
    else:
        check_masked(toy(), HELLO, params, done)
    if name == "log-probabilities":
        assert done.logprobs is not None and [one.token for one in done.logprobs] == done.output_ids
    check_idle(engine)


def test_a_minimum_where_the_text_may_go_on():
    engine = engine_of("NGRAM")
    params = SamplingParams(
        max_new_tokens=40, min_new_tokens=20, grammar=Grammar("regex", "[ab]+"), logit_bias={END: 50.0}
    )
    done = engine.generate(HELLO, params)
    assert len(done.output_ids) == 20 + 1 and done.finish_reason["matched"] == END


@pytest.mark.parametrize("kind", ["NONE", "eagle3"])
def test_a_prompt_of_one_token(kind):
    engine, model = engine_of(kind), llama() if kind == "eagle3" else toy()
    for token in (0, 77):
        params = SamplingParams(max_new_tokens=60, grammar=OBJECT)
        check_masked(model, [token], params, engine.generate([token], params))


def test_a_prompt_that_is_cached():
    engine, prompt = engine_of("NGRAM"), list(range(70, 88))
    engine.flush_cache()
    params = SamplingParams(max_new_tokens=50, grammar=OBJECT)
    first = engine.generate(prompt, params)
    again = engine.generate([prompt, [*prompt, 5]], [params, replace(params, temperature=1.0, seed=2)])
    assert first.cached_tokens == 0 and [done.cached_tokens for done in again] == [16, 16]
    assert again[0].output_ids == first.output_ids
    check_masked(toy(), [*prompt, 5], replace(params, temperature=1.0, seed=2), again[1])
    check_idle(engine)


def test_a_grammar_that_cannot_go_on_ends_one_request():
    engine = engine_of("NGRAM")
    wide = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(1200)}}
    params = [
        SamplingParams(
            max_new_tokens=60, grammar=Grammar("json_schema", json.dumps(wide)), logit_bias={byte_ids(b"k")[0]: 90.0}
        ),
        SamplingParams(max_new_tokens=60, grammar=OBJECT),
        SamplingParams(max_new_tokens=30),
    ]
    found = engine.generate([HELLO] * 3, params)
    reason = found[0].finish_reason
    assert reason["type"] == "abort" and reason["message"].startswith(GRAMMAR_FAILED)
    check_masked(toy(), HELLO, params[1], found[1])
    check_plain(toy(), HELLO, params[2], found[2], EOS)
    check_idle(engine)


def test_a_step_is_read_before_the_next_is_launched(monkeypatch):
    """Masks follow from its tokens. Steps without a grammar are dispatched ahead."""
    engine, unread = engine_of("NONE"), dict[str, list[int]](step=[], constrained=[])
    run = engine.device.run

    def noted(key, *given):
        if key.kind in unread:
            unread[key.kind].append(len(engine.flights))
        return run(key, *given)

    monkeypatch.setattr(engine.device, "run", noted)
    params = SamplingParams(max_new_tokens=20, grammar=Grammar("regex", "[a-d]{60}"))
    check_masked(toy(), HELLO, params, engine.generate(HELLO, params))
    assert set(unread["constrained"][1:]) == {0}
    engine.generate(HELLO, SamplingParams(max_new_tokens=20))
    assert min(unread["step"][1:]) == 1
    while engine.unfinished:
        engine.step()
    check_idle(engine)


def test_forced_tokens_are_not_drafted_twice(monkeypatch):
    """No drafter runs where all requests have forced tokens, and a step without either has the plain program."""
    engine, keys = engine_of("NGRAM", adaptive=True), list[Key]()
    monkeypatch.setattr(engine.policy, "choose", lambda batch, requests: PLAIN)
    run = engine.device.run
    monkeypatch.setattr(engine.device, "run", lambda key, *given: keys.append(key) or run(key, *given))
    params = SamplingParams(max_new_tokens=64, grammar=Grammar("regex", "[xy]abcdefgh ijkl[xy]"))
    done = engine.generate(HELLO, params)
    check_masked(toy(), HELLO, params, done)
    assert done.spec_accept_length > 1
    assert {key.nodes for key in keys if key.kind == "constrained"} == {0, PLAIN}
    assert not [key for key in keys if key.kind == "propose"]


WORDS = Grammar("regex", "([a-d]{1,5} )+")


def some_words(count: int) -> list[tuple[list[int], SamplingParams]]:
    """One of four without a grammar, two sampled."""
    grammars = [WORDS, OBJECT, None, WORDS]
    sampling = [{}, {"temperature": 1.0, "seed": 3}]
    return [
        (byte_ids(b"say %d: " % i), SamplingParams(max_new_tokens=30 + i, grammar=grammars[i % 4], **sampling[i % 2]))
        for i in range(count)
    ]


def test_a_step_in_many_parts():
    """Each has its own masks."""
    engine, made = _made("NONE", max_running_requests=8, max_batch=1), some_words(10)
    check(toy(), made, engine.generate([prompt for prompt, _ in made], [params for _, params in made]))
    check_idle(engine)


def test_aborts_in_between():
    engine, rng = engine_of("NGRAM"), np.random.default_rng(0)
    made = requests(12)
    ids = [engine.add(*request).id for request in made]
    known = dict(zip(ids, made, strict=True))
    done = {}
    while engine.unfinished:
        for sequence in engine.step():
            if sequence.status is Status.FINISHED:
                done[sequence.id] = completion(sequence)
        if rng.random() < 0.1:
            engine.abort(str(rng.choice(ids)))
        engine.check_integrity()
    assert 4 < len(done) < 12
    check(toy(), [known[id] for id in done], done.values())
    check_idle(engine)


def test_others_do_not_wait_for_the_compiler(monkeypatch):
    engine, asked = make_engine(toy(), "NONE", eos=EOS, max_running_requests=2), []
    engine.generate([HELLO] * 2, SamplingParams(max_new_tokens=4))
    with monkeypatch.context() as patch:
        patch.setattr(engine.programs, "compile_later", lambda keys, wanted: asked.extend(keys))
        plain = engine.add(HELLO, SamplingParams(max_new_tokens=40))
        bound = engine.add(HELLO, SamplingParams(max_new_tokens=60, grammar=OBJECT))
        while len(plain.output.tokens) < 20:
            engine.step()
        assert not bound.output.tokens
        assert set(asked) == {Key("constrained", 2, engine.buckets.tables[-1], nodes=1)}
    while engine.unfinished:
        engine.step()
    check_plain(toy(), HELLO, plain.params, completion(plain), EOS)
    check_masked(toy(), HELLO, bound.params, completion(bound))


def test_programs_of_grammars_are_compiled_when_there_is_one():
    buckets = engine_of("NGRAM").buckets
    kinds = {"constrained", "propose"}
    assert not kinds & {key.kind for key in buckets.all_keys()}
    assert {key.kind for key in buckets.constrained_keys()} == kinds
    plain = engine_of("NONE").buckets
    assert {key.kind for key in plain.constrained_keys()} == {"constrained"}
    assert str(Key("constrained", 4, 32)) == "a step with a grammar of 4 requests with 32 pages each"


def test_a_wrong_grammar_is_refused_before_anything_starts():
    engine = engine_of("NONE")
    for wrong in (Grammar("regex", "(a"), Grammar("json_schema", '{"type": "foo"}')):
        with pytest.raises(ParameterError, match="grammar"):
            engine.generate(HELLO, SamplingParams(max_new_tokens=9, grammar=wrong))
    assert not engine.unfinished


@pytest.mark.parametrize(
    ("prompt", "begun"),
    [("<think>\n", True), ("a<think>\n\n</think>\n\n", None), ("hello", False), ("<think>" + 20 * "a ", False),
     ("what is <think>?", False), ("is </think> right", False), ("<think></think>a", False)],
)  # fmt: skip
def test_where_a_model_thinks(prompt, begun):
    thinking = copy.deepcopy(tokenizer())
    thinking.add_tokens(["<think>", "</think>"], special_tokens=True)
    intake = Intake(thinking, VOCABULARY + 2, 128, 1024, EOS, 0)
    found = intake.sequence(prompt, SamplingParams(max_new_tokens=9, grammar=OBJECT))
    reasoning = intake._reasoning(found.prompt)
    assert (None if reasoning is None else reasoning.begun) == begun
    assert found.constraint is not None
    start = thinking.convert_tokens_to_ids("<think>")
    bits = np.unpackbits(found.constraint.mask().view(np.uint8), bitorder="little")
    assert bool(bits[start]) == (begun is not None)
    assert bits[END] == 0
    assert Intake(tokenizer(), VOCABULARY, 128, 1024, EOS, 0)._reasoning([5, 6]) is None
