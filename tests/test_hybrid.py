"""Drafts of a model with n-grams where the text repeats itself: who proposes, what is run, and that no text changes."""

import itertools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from engine_helpers import make_engine
from test_coupling import right_often
from test_ngram import NONE, Memory
from toy_models import as_tree

from specjax.bench.methods import parse_method
from specjax.cache import PoolShape
from specjax.cli import build, flags
from specjax.drafters import Auto, Drafter, Eagle3, Ngram, Standalone, TreeShape, make_drafter, ngram_drafter
from specjax.drafters.hybrid import hybrid_drafter
from specjax.engine import SamplingParams
from specjax.engine.draft_policy import DraftPolicy
from specjax.engine.keys import PLAIN, TREE
from specjax.tree import chain

SAMPLING = [
    SamplingParams(max_new_tokens=60, ignore_eos=True, temperature=temperature, seed=seed, logprobs=logprobs)
    for temperature, seed, logprobs in ((0.0, 1, None), (0.9, 3, 2), (0.4, 8, None))
]

NGRAMS = Ngram(nodes=4, min_match=2, max_match=4, max_breadth=1, capacity=4096)


def counting(runs: list[int], width: int = 3, **facts) -> Drafter:
    """A model whose drafts are the root's successors, and that notes how many requests it drafts for."""

    def propose(params, state, context):
        jax.debug.callback(lambda active: runs.append(int(active.sum())), context.active)
        tokens = context.root[:, None] + jnp.arange(1, width, dtype=jnp.int32)[None]
        length = jnp.where(context.active, width - 1, 0)
        return chain(context.root, tokens, length, jnp.zeros(tokens.shape)), state

    def seen(params, state, context, observation):
        return state.at[0].add(jnp.sum(observation.length))

    def init(params, rows, pool):
        return jnp.zeros(1, jnp.int32)

    facts = {"width": width, "depth": width - 1, "runs_model": True, "chains": True} | facts
    return Drafter("MODEL", None, init=init, propose=propose, observe=seen, **facts)


class Both(Memory):
    """`Memory` of a hybrid drafter."""

    def __init__(self, width: int = 3):
        super().__init__(NGRAMS)
        self.runs: list[int] = []
        self.drafter = hybrid_drafter(counting(self.runs, width), ngram_drafter(NGRAMS))
        self._propose, self._observe = jax.jit(self.drafter.propose), jax.jit(self.drafter.observe)
        self.state = self.drafter.init(NONE, 3, PoolShape(4, 4))

    def proposed(self, roots: dict[int, int]) -> dict[int, oracle.Tree]:
        context = self.context(roots)
        tree, _ = self._propose(NONE, self.state, context)
        jax.effects_barrier()
        order = [int(slot) for slot in context.slots]
        return {row: as_tree(tree, order.index(row)) for row in roots}

    def tokens(self, roots: dict[int, int]) -> dict[int, list[int]]:
        return {row: list(tree.tokens) for row, tree in self.proposed(roots).items()}


TEXT = [11, 12, 13, 14, 15, 16]


@pytest.mark.parametrize("width", [3, 6])
def test_each_request_has_its_own_proposer(width):
    """What followed the last two tokens, where they have occurred; else the model's, run for the others alone."""
    both = Both(width)
    both.observe({0: [*TEXT, 30, 11], 1: [40, 41, 42], 2: [50, 13]})
    trees = both.proposed({0: 12, 1: 60, 2: 14})
    assert all(oracle.problems(tree) == [] for tree in trees.values())
    tokens = {row: list(tree.tokens) for row, tree in trees.items()}
    assert tokens == {0: [12, 13, 14, 15], 1: [*range(60, 60 + width)], 2: [14, 15, 16, 30]}
    assert both.runs == [1]


def test_the_model_is_not_run_where_all_requests_have_matches():
    both = Both()
    both.observe({0: [*TEXT, 30, 11], 1: [50, 13]})
    both.proposed({0: 12, 1: 14})
    assert both.runs == []
    both.proposed({0: 99, 1: 14})
    assert both.runs == [1]


def test_one_token_in_common_is_no_match():
    both = Both()
    both.observe({0: [*TEXT, 30, 31]})
    assert both.tokens({0: 12}) == {0: [12, 13, 14]}
    assert both.runs == [1], "12 has occurred, but after 11"


def test_both_see_every_token():
    both = Both()
    both.observe({0: TEXT, 1: TEXT[:2]})
    assert int(both.state.model[0]) == len(TEXT) + 2
    alone = Memory(NGRAMS)
    alone.observe({0: TEXT, 1: TEXT[:2]})
    for own, other in zip(both.state.ngrams, alone.state, strict=True):
        np.testing.assert_array_equal(own, other)


def test_without_a_cpu_both_propose_and_each_request_has_one(monkeypatch):
    """As on a GPU, where a branch would ask the host."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    both = Both()
    both.observe({0: [*TEXT, 30, 11], 1: [40, 41, 42]})
    assert both.tokens({0: 12, 1: 60}) == {0: [12, 13, 14, 15], 1: [60, 61, 62]}


def test_a_smaller_tree_is_smaller_in_both():
    drafter = hybrid_drafter(counting([], 6, resize=lambda nodes: counting([], nodes)), ngram_drafter(NGRAMS))
    assert (drafter.width, drafter.depth, drafter.widths) == (6, 5, (4,))
    assert (drafter.within(3).width, drafter.within(3).depth) == (3, 2)


# In an engine.

PROMPTS = [[5, 6, 7, 8, 9] * 4, [1, 2, 3], [7] * 9]


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        pytest.param("eagle3", {}, id="eagle3"),
        pytest.param("eagle3", {"adaptive": True}, id="eagle3-adaptive"),
        pytest.param("standalone", {"retract_every": 3}, id="standalone-retracted"),
    ],
)
def test_the_texts_are_those_without_drafts(kind, config, monkeypatch):
    """Greedy and sampled with a seed, several at once."""
    turns = itertools.cycle([TREE, TREE, PLAIN, PLAIN, TREE])
    monkeypatch.setattr(DraftPolicy, "choose", lambda self, batch, requests: next(turns))
    toy, params, make = right_often(kind)
    prompts = [[token % toy.vocab for token in prompt] for prompt in PROMPTS]
    model = make(TreeShape(2, 2, 4), explicit_width=True)
    ngrams = ngram_drafter(Ngram(nodes=4, min_match=2, max_match=4, max_breadth=1, capacity=4096))

    def done(drafter, draft=params, **config):
        engine = make_engine(toy, drafter, draft=draft, max_running_requests=3, context_length=96, **config)
        return engine.generate(prompts, SAMPLING)

    found = done(hybrid_drafter(model, ngrams), **config)
    for each, plain in zip(found, done(make_drafter("NONE"), None), strict=True):
        assert each.output_ids == plain.output_ids
    if not config:
        steps, alone = (sum(each.spec_verify_ct for each in part) for part in (found, done(model)))
        assert steps < alone, (steps, alone)


# The option.


def test_the_option_makes_the_drafter():
    toy, _, _ = right_often("standalone")
    given = {"target": toy.target, "model": toy.target}
    plain, off, on = (make_drafter(Standalone(hybrid_match=match), **given) for match in (None, 0, 3))
    assert plain.note == off.note and not plain.reads_tokens
    assert on.note.endswith("; n-grams after matches of 3 or more tokens (Standalone.hybrid_match)")
    assert (on.name, on.runs_model, on.depth) == (plain.name, True, 7)
    assert (on.width, on.widths) == (8, (4,)), "NGRAM's trees on a CPU"
    explicit = make_drafter(Standalone(steps=2, hybrid_match=3), **given)
    assert (explicit.width, explicit.widths) == (3, ())
    assert make_drafter(Standalone(hybrid_match=3), platform="gpu", **given).width == plain.width
    large = make_drafter(Standalone(steps=8, topk=8, nodes=100, hybrid_match=3), **given)
    assert (large.width, large.depth) == (100, 18), "n-grams have trees of at most 64 nodes"


def test_what_is_refused():
    with pytest.raises(ValueError, match=re.escape("Eagle3.hybrid_match must be an integer from 0 to 64, got 65")):
        Eagle3(hybrid_match=65)


def test_the_flag_and_the_method_of_a_benchmark():
    given = flags.SpeculativeSettings(speculative_hybrid_match_window_size=4)
    settings = replace(flags.Settings(), speculative=given)
    assert build.draft_options(settings) == Auto(hybrid_match=4)
    assert parse_method("EAGLE3:hybrid_match=2").draft == Eagle3(hybrid_match=2)
