"""`--speculative-tree dynamic` in an engine: no text changes, what is measured reaches the step, and reports say so."""

from __future__ import annotations

import itertools
import json
import logging
import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from distil import distilled, pair_model, perfect_head
from engine_helpers import VOCABULARY, idle_sequence, make_engine
from test_coupling import right_often
from test_packing import NEW, PAGES, ROWS, TABLE

from specjax.bench.methods import parse_method
from specjax.cli import build, flags
from specjax.drafters import Auto, Eagle3, Ngram, TreeShape, eagle_drafter, make_drafter
from specjax.engine import SamplingParams
from specjax.engine.adaptive import Adaptive
from specjax.engine.buckets import Buckets
from specjax.engine.choice import PLAIN
from specjax.engine.flight import InFlight
from specjax.engine.grammar import Grammar
from specjax.engine.keys import Key
from specjax.engine.packing import step_input, unpack_step, with_sizing
from specjax.engine.sizing import PRIOR, STALE, TRIES, TreeSizes
from specjax.engine.transfers import Output, Read
from specjax.serve.report import describe
from specjax.state import Sized

KEY = Key("step", 4, 8)
NOT_READ: Any = Output(jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 0), jnp.int32), None)
WIDTHS = (1, 2, 4, 8)

# What an engine says.

PROMPTS = [[1, 2, 3], [7] * 9, [40, 5]]
SAMPLING = [
    SamplingParams(max_new_tokens=60, ignore_eos=True, temperature=temperature, seed=seed, logprobs=logprobs)
    for temperature, seed, logprobs in ((0.0, 1, None), (0.9, 3, 2), (0.4, 8, None))
]


def drafting(kind: str, sizing: str):
    toy, params, make = right_often(kind)
    shape = TreeShape(4, 1, 5) if kind == "standalone" else TreeShape(3, 3, 8)
    return toy, make(shape)._replace(sizing=sizing), params


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        pytest.param("eagle3", {}, id="eagle3"),
        pytest.param("standalone", {}, id="standalone"),
        pytest.param("eagle3", {"adaptive": True}, id="eagle3-adaptive"),
        pytest.param("eagle", {"trace": True}, id="eagle-trace", marks=pytest.mark.slow),
        pytest.param("eagle3", {"time_phases": True}, id="eagle3-phases", marks=pytest.mark.slow),
    ],
)
def test_the_texts_are_those_without_drafts(kind, config, monkeypatch):
    """Greedy and sampled with a seed, one of them with log-probabilities, static and dynamic. With the adaptive
    choice steps with the batch's tree, with a smaller one and without drafts follow each other."""
    turns = itertools.cycle([0, 0, 4, 0, PLAIN])
    monkeypatch.setattr(Adaptive, "choose", lambda self, batch, requests: next(turns))
    toy, _, params = drafting(kind, "static")
    found = {}
    for sizing in ("none", "static", "dynamic"):
        drafter = make_drafter("NONE") if sizing == "none" else drafting(kind, sizing)[1]
        given = config if sizing == "dynamic" else {}
        engine = make_engine(toy, drafter, draft=params, max_running_requests=3, context_length=96, **given)
        found[sizing] = engine.generate([[t % toy.vocab for t in p] for p in PROMPTS], SAMPLING)
        if sizing == "dynamic":
            check_report(engine)
            assert ("3, draft 4" in engine.tree_sizes.report()["batches"]) == bool(config.get("adaptive"))
        else:
            assert engine.tree_sizes.report() is None
    texts = {sizing: [done.output_ids for done in each] for sizing, each in found.items()}
    assert texts["static"] == texts["dynamic"] == texts["none"]
    plain, sized = (found[sizing][1].logprobs for sizing in ("none", "dynamic"))
    np.testing.assert_allclose([p.logprob for p in plain], [s.logprob for s in sized], atol=1e-3)


def check_report(engine) -> None:
    report = engine.tree_sizes.report()
    assert report["accepted_of_promised"] > 0
    steps = [width["steps"] for widths in report["batches"].values() for width in widths.values()]
    assert sum(steps) > TRIES and sum(step > 0 for step in steps) > 1, report
    times = [width.get("milliseconds") for widths in report["batches"].values() for width in widths.values()]
    assert any(time and time > 0 for time in times)
    assert describe(engine, "m")["speculative_tree"] == "dynamic" and json.loads(json.dumps(report)) == report


def test_a_grammar_is_followed_beside_a_request_without_one():
    toy = pair_model(vocab=VOCABULARY)
    config, params = perfect_head(toy)
    drafter = eagle_drafter(toy.target, config, TreeShape(3, 3, 8))._replace(sizing="dynamic")
    engine = make_engine(toy, drafter, draft=params, max_running_requests=2, context_length=96, warm=False)
    plain = make_engine(toy, "NONE", max_running_requests=2, context_length=96, warm=False)
    wanted = [
        SamplingParams(max_new_tokens=12, grammar=Grammar("regex", "[a-d]{1,9}")),
        SamplingParams(max_new_tokens=20),
    ]
    texts = [[done.output_ids for done in each.generate(PROMPTS[:2], wanted)] for each in (engine, plain)]
    assert texts[0] == texts[1]


# What is sent.


def test_a_sizing_goes_with_a_steps_input():
    sequences = [idle_sequence(slot=slot, pages=[slot]) for slot in (2, 0)]
    packed = step_input(sequences, 3, NEW, ROWS)
    sent = with_sizing(packed, [1.5, math.inf, 7.25], [0.5, 2.0])
    tables = jnp.full((ROWS, TABLE), PAGES, jnp.int32)
    found, _ = unpack_step(jnp.asarray(sent), tables, TABLE, PAGES, sizes=3)
    wanted, _ = unpack_step(jnp.asarray(packed), tables, TABLE, PAGES)
    assert found.sizing.milliseconds.tolist() == [1.5, math.inf, 7.25]
    assert found.sizing.correction.tolist() == [0.5, 2.0, 1.0]
    for mine, other in zip(found[:3], wanted[:3], strict=True):
        np.testing.assert_array_equal(mine, other)


# What is measured.


def sizes(expected=(1.0, 1.1, 1.3, 2.0)) -> TreeSizes:
    _, drafter, _ = drafting("eagle3", "dynamic")
    buckets = Buckets.build("cpu", drafter, rows=4, request_pages=8)
    assert buckets.sizes(KEY) == WIDTHS
    return TreeSizes(buckets, lambda key: dict(zip(WIDTHS, expected, strict=True)))


def took(made: TreeSizes, nodes: int, seconds: float | None, sequences=(), promised=(), kept=()) -> None:
    """A step that checked `nodes` nodes."""
    sequences = list(sequences) or [idle_sequence()]
    count = len(sequences)
    tokens = [[5] * (1 + n) for n in kept] or [[5]] * count
    sized = Sized(np.full(count, nodes, np.int32), np.asarray(promised or [0.0] * count, np.float32))
    flight = InFlight(KEY, NOT_READ, sequences, drafted=tuple(sequences))
    made.record(flight, Read(tokens, [0] * count, None, sized), seconds)


def test_each_width_is_tried_then_the_measured_times_are_sent():
    made, times = sizes(), {1: 0.02, 2: 0.022, 4: 0.025, 8: 0.07}
    took(made, 8, 9.0)  # a program's first run
    order = []
    for _ in range(TRIES * len(WIDTHS)):
        sent = made.inputs(KEY, []).milliseconds
        (allowed,) = [w for w, each in zip(WIDTHS, sent, strict=True) if each < math.inf]
        took(made, allowed, times[allowed])
        order.append(allowed)
    assert sorted(order) == sorted([*WIDTHS] * TRIES) and order[0] == 8
    assert made.inputs(KEY, []).milliseconds == pytest.approx([20, 22, 25, 70])
    took(made, 4, 5.0)  # a pause of the machine
    assert made.inputs(KEY, []).milliseconds == pytest.approx([20, 22, 25, 70])


def test_a_width_that_was_not_measured_is_as_wrong_as_the_others():
    made = sizes()
    for _ in range(TRIES + 1):
        took(made, 1, 0.02)
    for _ in range(TRIES * len(WIDTHS)):
        made.inputs(KEY, [])
    assert made.inputs(KEY, []).milliseconds == pytest.approx([20, 22, 26, 40])


def test_a_width_that_was_long_not_used_is_tried_again():
    made, tried = sizes(), []
    for turn in range(2 * STALE):
        sent = made.inputs(KEY, []).milliseconds
        if turn >= TRIES * len(WIDTHS) and math.inf in sent:
            tried += [w for w, each in zip(WIDTHS, sent, strict=True) if each < math.inf]
        took(made, 4, 0.03)
    assert sorted(tried) == [1, 2, 8], "and 4, which was used, is not"


def test_corrections_are_what_came_true_of_what_was_promised():
    made, sure, unsure, new = sizes(), *(idle_sequence() for _ in range(3))
    assert made.usual == made.correction(sure) == 1.0
    for _ in range(400):
        took(made, 8, None, (sure, unsure), promised=(2.0, 2.0), kept=(2, 0))
    assert made.usual == pytest.approx(0.5, abs=0.05)
    assert made.correction(new) == pytest.approx(made.usual)
    weight = sure.promised / (sure.promised + PRIOR)
    assert made.correction(sure) == pytest.approx(weight * 1.0 + (1 - weight) * made.usual)
    assert made.correction(unsure) < 0.3 < 0.8 < made.correction(sure)


def test_a_step_of_requests_that_have_ended_says_nothing():
    made, ended = sizes(), idle_sequence()
    flight = InFlight(KEY, NOT_READ, [ended], drafted=(ended,))
    made.record(flight, Read([[]], [0], None, Sized(np.array([1], np.int32), np.array([0.0], np.float32))), 0.01)
    assert made.report()["batches"] == {} and ended.promised == 0


# How it is asked for.


def test_the_option_and_its_names():
    toy, (config, _) = pair_model(), distilled("eagle3")
    for given in (Eagle3(steps=2), Eagle3(steps=2, tree="dynamic")):
        drafter = make_drafter(given, target=toy.target, head=config)
        assert drafter.sizing == drafter.within(2).sizing == given.tree
    method = parse_method("EAGLE3:tree=dynamic,steps=5,topk=8,nodes=32")
    assert method.draft == Eagle3(steps=5, topk=8, nodes=32, tree="dynamic")
    assert method.name == "EAGLE3 5/8/32 tree=dynamic"
    with pytest.raises(ValueError, match="tree must be one of static, dynamic, got 'wide'"):
        parse_method("EAGLE3:tree=wide")
    with pytest.raises(ValueError, match="NGRAM has no option tree"):
        parse_method("NGRAM:tree=dynamic")
    assert Auto(tree="dynamic").choose("eagle3")[0] == Eagle3(tree="dynamic")
    assert Auto(tree="dynamic").choose(None) == (Ngram(), ["tree"])


def test_the_flag(caplog):
    settings = replace(flags.Settings(), speculative=flags.SpeculativeSettings("EAGLE3", speculative_tree="dynamic"))
    assert build.draft_options(settings) == Eagle3(tree="dynamic")
    settings = replace(settings, speculative=replace(settings.speculative, speculative_algorithm="NGRAM"))
    with caplog.at_level(logging.WARNING):
        assert build.draft_options(settings) == Ngram()
    assert "no effect with --speculative-algorithm NGRAM: --speculative-tree" in caplog.text
