"""Traced trees of steps and of engines. test_step.py compares traces with the oracle."""

from __future__ import annotations

from dataclasses import fields

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from engine_helpers import NGRAM, make_engine, outcome, shared_engine, toy
from oracle import NO_PARENT, Tree
from toy_models import Runner, as_arrays, random_table, table_model

from specjax.drafters import none_drafter
from specjax.engine import SamplingParams
from specjax.state import StepOutput, StepTree, Trace, step_trees
from specjax.tree import NO_TOKEN


def step_of(tree: Tree, drawn: list[int], *, width: int, emitted: int | None = None) -> StepOutput:
    """A step of two requests, the first inactive. `drawn`: the target's draws; `emitted`: number of emitted tokens."""
    nodes = oracle.walk(tree, drawn)
    depth = width - 1

    def pad(values, length, fill):
        return [*values, *[fill] * (length - len(values))]

    other = Tree((0,), (NO_PARENT,))
    trace = Trace(
        tree=as_arrays([other, tree], width),
        drawn=jnp.array([[NO_TOKEN] * width, pad(drawn, width, NO_TOKEN)], jnp.int32),
        path=jnp.array([[0] * (depth + 1), pad(nodes, depth + 1, 0)], jnp.int32),
        accepted=jnp.array([0, len(nodes) - 1], jnp.int32),
    )
    tokens = pad([drawn[node] for node in nodes], depth + 1, NO_TOKEN)
    count = len(nodes) if emitted is None else emitted
    return StepOutput(
        tokens=jnp.array([[NO_TOKEN] * (depth + 1), tokens], jnp.int32),
        emitted=jnp.array([0, count], jnp.int32),
        accepted=jnp.array([0, count - 1], jnp.int32),
        ranks=jnp.zeros((2, depth + 1), jnp.int32),
        finish=jnp.array([0, 0], jnp.int32),
        logprobs=None,
        trace=trace,
    )


def only(output: StepOutput) -> StepTree:
    trees = step_trees(output)
    assert trees[0] is None
    assert len(trees) == 2 and trees[1] is not None
    return trees[1]


# cat -> sat -> {on, by}, cat -> is; the target draws sat, on, a.
SMALL = Tree((0, 1, 2, 3, 4), (NO_PARENT, 0, 0, 1, 1), (0.0, -0.48, -2.21, -0.89, -2.41))


def test_step_tree():
    tree = only(step_of(SMALL, [1, 3, NO_TOKEN, 5, NO_TOKEN], width=7))
    assert tree.tokens.tolist() == [0, 1, 2, 3, 4], "the two invalid nodes are left out"
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1]
    assert tree.depth.tolist() == [0, 1, 1, 2, 2]
    assert tree.scores.tolist() == [0.0, -1.0, -1.0, -2.0, -2.0]
    assert tree.drawn.tolist() == [1, 3, -1, 5, -1]
    assert tree.path.tolist() == [0, 1, 3]
    assert tree.emitted.tolist() == [1, 3, 5]
    assert tree.accepted == 2
    assert [tree.children(node) for node in range(5)] == [[1, 2], [3, 4], [], [], []]
    for field in fields(tree):
        array = getattr(tree, field.name)
        assert type(array) is np.ndarray and array.base is None, "a copy, not a view of the batch"
        assert array.dtype == (np.float32 if field.name == "scores" else np.int32), field.name


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
    plain = shared_engine("NGRAM")
    for done, expected in zip(engine.generate(PROMPTS, PARAMS), plain.generate(PROMPTS, PARAMS), strict=True):
        assert outcome(done) == outcome(expected)
        assert expected.trees == []
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
