"""Requests with grammars in an engine: the text equals plain decoding with a mask for all drafters."""

from __future__ import annotations

import copy
import functools
import json

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
    force_drafts,
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
from specjax.engine import Completion, Engine, SamplingParams
from specjax.engine import grammar as module
from specjax.engine.grammar import GRAMMAR_FAILED, Grammar
from specjax.engine.intake import Intake
from specjax.engine.plan import Key
from specjax.engine.sequence import Status, completion
from specjax.models.draft_head import init_head_params

EOS = (END,)
HELLO = byte_ids(b"hello there: ")


@functools.cache
def llama():
    return tiny_llama(5, vocab_size=VOCABULARY)


@functools.cache
def engine_of(kind: str, **config) -> Engine:
    return warm_grammars(unwarmed_engine(kind, **config))


def unwarmed_engine(kind: str, **config) -> Engine:
    if kind == "eagle3":
        target = llama().target
        config_of_head = HeadConfig("eagle3", 16, 32, 24, 4, 2, 8, 1e-5, RopeConfig(), VOCABULARY, (0, 1))
        params = dict(init_head_params(config_of_head, target, jax.random.key(2)))
        drafter = eagle_drafter(target, config_of_head, TreeShape(3, 3, 6))
        return make_engine(llama(), drafter, draft=params, eos=EOS, warm=False, **config)
    drafts = DRAFTS | {"trees": random_trees(byte_ids(b'{"ok": true, "n": 1, "color": "red"}abcdex(,)12'))}
    return make_engine(toy(), drafts[kind], eos=EOS, warm=False, **config)


def requests(count: int, *, longest: int = 48) -> list[tuple[list[int], SamplingParams]]:
    """Every third without a grammar; greedy and sampled ones."""
    rng, batch = np.random.default_rng(count), []
    for i in range(count):
        prompt = rng.integers(3, VOCABULARY, rng.integers(1, 20)).tolist()
        grammar = None if i % 3 == 2 else list(GRAMMARS.values())[(i // 2) % len(GRAMMARS)]
        sampling = {"temperature": 1.0, "seed": i} if i % 2 else {}
        sampling |= {"repetition_penalty": 1.2, "top_p": 0.9} if i % 5 == 4 else {}
        sampling |= {"speculate": False} if i == 4 else {}
        batch.append((prompt, SamplingParams(max_new_tokens=longest - 2 * i, grammar=grammar, **sampling)))
    return batch


def check(engine: Engine, model, batch) -> list[Completion]:
    """Generate; all texts equal plain decoding with masks, and the engine is idle."""
    completions = engine.generate([prompt for prompt, _ in batch], [params for _, params in batch])
    for (prompt, params), done in zip(batch, completions, strict=True):
        if params.grammar is None:
            check_plain(model, prompt, params, done, EOS)
            continue
        check_masked(model, prompt, params, done)
        assert follows(params.grammar, done.output_ids, whole=done.finish_reason["type"] == "stop")
    check_idle(engine)
    return completions


ADAPTIVE = {"adaptive": True, "retract_every": 9, "max_running_requests": 4}


def test_random_choices_and_retractions(monkeypatch):
    engine = engine_of("eagle3", **ADAPTIVE)
    rng = np.random.default_rng(1)
    monkeypatch.setattr(engine.policy, "choose", None)  # restored at the end
    force_drafts(engine, lambda: rng.random() < 0.5)
    batch = requests(9, longest=40)
    before = engine.scheduler.retractions
    check(engine, llama(), batch)
    assert engine.scheduler.retractions > before


def test_constrained_step_in_parts():
    """Each part has its own masks."""
    engine, batch = unwarmed_engine("NONE", max_batch=1), requests(6)
    check(engine, toy(), batch)


def test_forced_tokens_are_drafted():
    """All tokens but one are forced, and n-grams propose none."""
    engine = engine_of("NGRAM")
    grammar = Grammar("regex", "[xy]abcdefgh ijkl mnop qrst uvwx yz")
    done = engine.generate(HELLO, SamplingParams(max_new_tokens=64, grammar=grammar))
    assert done.finish_reason["type"] == "stop" and len(done.output_ids) > 30
    assert (
        done.spec_accept_length > engine.drafter.depth and len(done.spec_accept_histogram) == engine.drafter.depth + 1
    )
    alone = engine.generate(HELLO, SamplingParams(max_new_tokens=64, grammar=grammar, speculate=False))
    assert alone.output_ids == done.output_ids and alone.spec_accept_length == 1.0
    repeating = SamplingParams(max_new_tokens=60, grammar=Grammar("regex", "[a-d]{200}"))
    assert engine.generate(HELLO, repeating).spec_accept_length > 1.2, "drafts of n-grams under a mask"
    few = engine.generate(HELLO, SamplingParams(max_new_tokens=64, grammar=grammar, draft_limit=1))
    assert few.output_ids == done.output_ids and 1.5 < few.spec_accept_length <= 2.0


@pytest.mark.parametrize("text", [SPECIAL[END], f"x{SPECIAL[0]}y", "a\x7fb"])
def test_text_of_a_special_token(text):
    done = engine_of("NONE").generate(HELLO, SamplingParams(max_new_tokens=30, grammar=Grammar.choice([text])))
    assert (done.text, done.finish_reason["type"]) == (text, "stop")


AB = Grammar("regex", "[ab]+")
LIMITS = {
    "cut": ({"max_new_tokens": 7}, "length"),
    "one token": ({"max_new_tokens": 1}, "length"),
    "a stop string": ({"stop": [": "]}, "stop"),
    "a stop id": ({"stop_token_ids": byte_ids(b":")}, "stop"),
    "ignore_eos": ({"ignore_eos": True}, "stop"),
    "a minimum": ({"min_new_tokens": 60}, "stop"),
    "a minimum of a longer text": ({"min_new_tokens": 20, "grammar": AB, "logit_bias": {END: 50.0}}, "stop"),
    "a bias for the end": ({"logit_bias": {END: 100.0}}, "stop"),
    "a bias for what is not allowed": ({"logit_bias": dict.fromkeys(byte_ids(b"qz"), 100.0)}, "stop"),
    "log-probabilities": ({"logprobs": 2}, "stop"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits_under_a_grammar(name):
    fields, reason = LIMITS[name]
    engine = engine_of("NGRAM")
    params = SamplingParams(**{"max_new_tokens": 90, "grammar": OBJECT, "temperature": 1.0, "seed": 3} | fields)
    done = engine.generate(HELLO, params)
    assert done.finish_reason["type"] == reason
    if name == "a stop string":
        assert done.text == '{"ok"'
    elif name == "a minimum":  # the grammar allows only the end
        assert len(done.output_ids) < 60
        jsonschema.validate(json.loads(done.text), SCHEMA)
    else:
        check_masked(toy(), HELLO, params, done)
        if reason == "stop" and params.grammar is OBJECT and "stop_token_ids" not in fields:
            jsonschema.validate(json.loads(done.text), SCHEMA)
    if name == "a minimum of a longer text":
        assert len(done.output_ids) == 20 + 1 and done.finish_reason["matched"] == END
    if name == "log-probabilities":
        assert done.logprobs is not None and [one.token for one in done.logprobs] == done.output_ids
    check_idle(engine)


def test_grammar_that_cannot_go_on_aborts_one_request():
    engine = engine_of("NGRAM")
    keys = {f"k{i}": {"type": "string"} for i in range(1200)}
    wide = {"type": "object", "properties": {"first": {"enum": ["x", "y"]}} | keys, "required": ["first"]}
    params = [
        SamplingParams(
            max_new_tokens=60, grammar=Grammar("json_schema", json.dumps(wide)), logit_bias={byte_ids(b",")[0]: 90.0}
        ),
        SamplingParams(max_new_tokens=60, grammar=OBJECT),
        SamplingParams(max_new_tokens=30),
    ]
    completions = engine.generate([HELLO] * 3, params)
    reason = completions[0].finish_reason
    assert reason["type"] == "abort" and reason["message"].startswith(GRAMMAR_FAILED)
    check_masked(toy(), HELLO, params[1], completions[1])
    check_plain(toy(), HELLO, params[2], completions[2], EOS)
    check_idle(engine)


def test_slow_grammars_take_turns(monkeypatch):
    """At most one of them is in a step, so that others wait for one mask."""
    monkeypatch.setattr(module, "SLOW_TOKEN", -1.0)  # all grammars are slow
    engine = engine_of("NGRAM")
    params = [SamplingParams(max_new_tokens=24, grammar=grammar) for grammar in (OBJECT, GRAMMARS["ebnf"], OBJECT)]
    slow = [engine.add(HELLO, each) for each in params]
    other = engine.add(HELLO, SamplingParams(max_new_tokens=12, ignore_eos=True))
    while engine.unfinished:
        before = [len(sequence.output.tokens) for sequence in slow]
        running = other.status is not Status.FINISHED
        engine.step()
        grown = [0 < count < len(sequence.output.tokens) for count, sequence in zip(before, slow, strict=True)]
        assert sum(grown) <= 1
        if running and other.status is Status.FINISHED:
            assert max(before) < 12, "the other request waits for no turn"
    for sequence, each in zip(slow, params, strict=True):
        check_masked(toy(), HELLO, each, completion(sequence))
    check_plain(toy(), HELLO, SamplingParams(max_new_tokens=12, ignore_eos=True), completion(other), EOS)
    check_idle(engine)


def test_no_drafter_runs_for_forced_tokens(monkeypatch):
    """Steps without drafts and forced tokens use the plain program."""
    engine, keys = engine_of("NGRAM", adaptive=True), list[Key]()
    monkeypatch.setattr(engine.policy, "choose", None)  # restored at the end
    force_drafts(engine, lambda: False)
    run = engine.device.run
    monkeypatch.setattr(engine.device, "run", lambda key, *arguments: keys.append(key) or run(key, *arguments))
    params = SamplingParams(max_new_tokens=64, grammar=Grammar("regex", "[xy]abcdefgh ijkl[xy]"))
    done = engine.generate(HELLO, params)
    check_masked(toy(), HELLO, params, done)
    assert done.spec_accept_length > 1
    assert {key.nodes for key in keys if key.kind == "constrained"} == {1, 4}
    assert not [key for key in keys if key.kind == "propose"]


@pytest.mark.parametrize(
    ("prompt", "begun"),
    [("<think>\n", True), ("a<think>\n\n</think>\n\n", None), ("hello", False), ("<think>" + 20 * "a ", False),
     ("what is <think>?", False), ("is </think> right", False), ("<think></think>a", False)],
)  # fmt: skip
def test_reasoning_of_a_prompt(prompt, begun):
    thinking = copy.deepcopy(tokenizer())
    thinking.add_tokens(["<think>", "</think>"], special_tokens=True)
    intake = Intake(thinking, VOCABULARY + 2, 128, 1024, EOS, 0)
    sequence = intake.sequence(prompt, SamplingParams(max_new_tokens=9, grammar=OBJECT))
    reasoning = intake._reasoning(sequence.prompt)
    assert (None if reasoning is None else reasoning.begun) == begun
    assert sequence.constraint is not None
    start = thinking.convert_tokens_to_ids("<think>")
    bits = np.unpackbits(sequence.constraint.mask().view(np.uint8), bitorder="little")
    assert bool(bits[start]) == (begun is not None)
    assert bits[END] == 0
    assert Intake(tokenizer(), VOCABULARY, 128, 1024, EOS, 0)._reasoning([5, 6]) is None
