"""Traced trees of steps and of engines. test_step.py compares traces with the oracle."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from engine_helpers import NGRAM, make_engine, toy
from oracle import NO_PARENT
from toy_models import Runner, random_table, table_model

from specjax.drafters import none_drafter
from specjax.engine import SamplingParams
from specjax.state import StepTree, step_trees


def test_step_without_trace():
    runner = Runner(table_model(random_table(0)), none_drafter())
    with pytest.raises(ValueError, match=r"StepConfig\(trace=True\)"):
        step_trees(runner.step([False, False, False]))


def check_tree(tree: StepTree, emitted: list[int]) -> None:
    count = len(tree.tokens)
    assert tree.parents[0] == NO_PARENT and (tree.parents[1:] < np.arange(1, count)).all(), "parents come first"
    assert all(tree.depth[node] == tree.depth[tree.parents[node]] + 1 for node in range(1, count))
    assert tree.path[0] == 0
    for parent, node in zip(tree.path, tree.path[1:], strict=False):
        assert tree.parents[node] == parent and node in tree.children(int(parent))
        assert tree.tokens[node] == tree.drawn[parent], "accepted: the target drew it"
    assert tree.emitted.tolist() == emitted == tree.drawn[tree.path].tolist()[: len(emitted)]
    assert tree.drawn[tree.path[-1]] not in tree.tokens[tree.children(int(tree.path[-1]))], "else it would go on"
    for field in fields(tree):
        array = getattr(tree, field.name)
        assert type(array) is np.ndarray and array.base is None, "a copy, not a view of the batch"
        assert array.dtype == (np.float32 if field.name == "scores" else np.int32), field.name


# The engine.

PARAMS = [
    SamplingParams(max_new_tokens=30, ignore_eos=True),
    SamplingParams(max_new_tokens=21, temperature=1.0, seed=3),
    SamplingParams(max_new_tokens=26, stop=["e"], logit_bias={70: 9.0, 71: 9.5}),
    SamplingParams(max_new_tokens=9, speculate=False),
    SamplingParams(max_new_tokens=1),
]
PROMPTS = [[70, 71, 72] * 4, "the the the", [70, 71] * 5, [40] * 9, [5, 6]]


def test_trees_of_an_engine():
    engine = make_engine(toy(), NGRAM, trace=True)
    for done in engine.generate(PROMPTS, PARAMS):
        assert len(done.trees) == done.spec_verify_ct
        text = done.output_ids[:1]  # prefill draws the first token
        for tree in done.trees:
            assert tree.tokens[0] == text[-1], "the root is the last emitted token"
            check_tree(tree, tree.emitted.tolist())
            text += tree.emitted.tolist()
        assert text == done.output_ids
        histogram = np.bincount([len(tree.emitted) - 1 for tree in done.trees], minlength=1)
        assert done.spec_accept_histogram[: len(histogram)] == histogram.tolist()
    assert all(len(tree.tokens) == 1 for tree in engine.generate(PROMPTS[3], PARAMS[3]).trees), "no speculation"
