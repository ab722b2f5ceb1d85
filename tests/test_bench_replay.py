"""Replayed accept lengths equal those of running each tree."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from distil import distilled, pair_model
from engine_helpers import make_engine

from specjax.bench.replay import Candidacy, Recorder, Recording, replay
from specjax.drafters import Ngram, TreeShape, eagle_drafter
from specjax.drafters.base import Params
from specjax.drafters.ngram import ngram_drafter
from specjax.drafters.tree_shape import candidates
from specjax.engine import SamplingParams

STEPS, TOPK = 4, (1, 2, 3)
PROMPT, COUNT = [4, 9, 13], 49


def drafter(kind, steps, topk, nodes):
    config, _ = distilled(kind)
    return eagle_drafter(pair_model().target, config, TreeShape(steps, topk, nodes))


@functools.cache
def recorded(temperature: float):
    whole = [drafter("eagle3", STEPS, topk, candidates(STEPS, topk) + 1) for topk in TOPK]
    recorder = Recorder(pair_model().target, Params(pair_model().params, distilled("eagle3")[1]), whole, chunk=8)
    return recorder(PROMPT, COUNT, temperature=temperature, seed=3)


@pytest.mark.parametrize(
    ("steps", "topk", "nodes", "temperature"),
    [
        pytest.param(4, 3, 31, 0.0, marks=pytest.mark.slow),
        pytest.param(4, 3, 8, 0.0, marks=pytest.mark.slow),
        (2, 3, 6, 0.0),
        (3, 2, 5, 1.0),
        (3, 1, 4, 0.0),
    ],
)
def test_a_smaller_tree_accepts_what_its_replay_does(steps, topk, nodes, temperature):
    found = recorded(temperature)
    made = drafter("eagle3", steps, topk, nodes)
    engine = make_engine(pair_model(), made, draft=distilled("eagle3")[1], max_running_requests=1)
    done = engine.generate(PROMPT, SamplingParams(max_new_tokens=COUNT, temperature=temperature, seed=3))
    assert done.output_ids == found.tokens
    histogram = replay(found, TOPK.index(topk), steps, nodes)
    assert histogram == done.spec_accept_histogram[: len(histogram)]
    assert sum(histogram) == done.spec_verify_ct
    assert 1.2 < done.spec_accept_length < steps + 1, "something is accepted, and something is not"


def slow_outcome(found, text, steps, nodes):
    """Drafts accepted and nodes of a tree at one position, candidate by candidate."""
    able = [i for i in range(1, len(found.tokens)) if found.depth[i] <= steps]
    best = sorted(able, key=lambda i: (-found.scores[i], i))[: nodes - 1]
    at = accepted = 0
    for token in text:
        child = [i for i in best if found.parents[i] == at and found.tokens[i] == token]
        if not child:
            break
        at, accepted = child[0], accepted + 1
    return accepted, 1 + len(best)


@pytest.mark.parametrize("shape", [(4, 31), (4, 8), (2, 5), (3, 4), (1, 2), (1, 3)])
def test_outcomes_equal_those_of_a_slow_replay(shape):
    found, which = recorded(0.0), TOPK.index(3)
    outcomes = Candidacy(found, which).outcomes(*shape)
    expected = [slow_outcome(tree, found.tokens[i + 1 :], *shape) for i, tree in enumerate(found.candidates[which])]
    assert np.stack(outcomes, axis=1).tolist() == [list(one) for one in expected]


def test_a_recording_survives_its_log():
    found = recorded(1.0)
    again = Recording.unpacked(found.packed())
    assert again.tokens == found.tokens and [len(each) for each in again.candidates] == [48] * len(TOPK)
    jax.tree.map(np.testing.assert_array_equal, again.candidates, found.candidates)
    assert again.candidates[0][0].scores.dtype == np.float32


def test_a_wider_beam_does_not_hold_a_narrower_one():
    """Why each top-k is recorded: a path of the narrow beam may be missing from the wide one's candidates."""
    found = recorded(0.0)

    def paths(one):
        made = [()]
        for parent, token in zip(one.parents[1:].tolist(), one.tokens[1:].tolist(), strict=True):
            made.append((*made[parent], token))
        return set(made)

    narrow, wide = (found.candidates[TOPK.index(topk)] for topk in (1, 3))
    missing = [one for one, other in zip(narrow, wide, strict=True) if not paths(one) <= paths(other)]
    assert missing


@pytest.mark.slow
def test_ngrams_of_fewer_nodes():
    """Their scores are ranks, and the memory is told the same."""
    shared = {"max_match": 4, "capacity": 4096}
    recorder = Recorder(
        pair_model().target, Params(pair_model().params, None), [ngram_drafter(Ngram(nodes=16, **shared))], chunk=8
    )
    found = recorder(PROMPT, 97)
    for nodes in (4, 8):
        engine = make_engine(pair_model(), ngram_drafter(Ngram(nodes=nodes, **shared)), max_running_requests=1)
        done = engine.generate(PROMPT, SamplingParams(max_new_tokens=97))
        assert done.output_ids == found.tokens
        histogram = replay(found, 0, nodes - 1, nodes)
        assert sum(histogram) == done.spec_verify_ct


def test_a_text_that_does_not_fit():
    recorder = Recorder(pair_model().target, Params(pair_model().params, None), [ngram_drafter(Ngram())], pages=2)
    with pytest.raises(ValueError, match="do not fit 2 pages"):
        recorder([1] * 30, 8)
