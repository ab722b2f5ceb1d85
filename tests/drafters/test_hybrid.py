"""n-grams before a model: whose draft a tree has, and the ranks of its nodes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.cache import PoolShape
from specjax.drafters.base import Context, Drafter, Params, Speculation
from specjax.drafters.factories import Auto
from specjax.drafters.hybrid import with_ngrams
from specjax.drafters.ngram import Ngram
from specjax.engine.draft_policy import DraftPolicy, own_acceptance
from specjax.sampling import sampling_row
from specjax.tree import chain, ranks

FOUND, READ, LOOKUP, WIDTH = 100, 200, 4, 3  # first tokens of each draft; nodes of each


def fake(name: str, first: int, width: int, **facts: Any) -> Drafter:
    """Drafts first, first + 1, ... as a chain. n-grams draft as many tokens as the root's last digit says."""

    def propose(params: Params, state: Any, context: Context) -> Any:
        tokens = jnp.broadcast_to(first + jnp.arange(width - 1, dtype=jnp.int32), (context.root.shape[0], width - 1))
        length = jnp.full_like(context.root, width - 1)
        if name == "NGRAM":
            length = jnp.minimum(context.root % 10, length)
        return chain(context.root, tokens, length, -tokens.astype(jnp.float32)), state

    def init(params: Params, rows: int, pool: PoolShape) -> tuple[()]:
        return ()

    return Drafter(name, facts.pop("features", None), width, width - 1, init, propose, lambda *given: given[1], **facts)


def resizable(name: str, first: int, width: int, **facts: Any) -> Speculation:
    return Speculation(
        fake(name, first, width, **facts), explicit_width=False, resize=lambda n: fake(name, first, n, **facts)
    )


def context(roots: list[int]) -> Context:
    rows = len(roots)
    zeros, root = jnp.zeros(rows, jnp.int32), jnp.array(roots, jnp.int32)
    sampling = jax.tree.map(lambda leaf: jnp.stack([leaf] * rows), sampling_row(300))
    return Context(zeros, zeros, zeros[:, None], root, jnp.ones(rows, bool), zeros.astype(jnp.uint32), sampling)


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_model_drafts_where_nothing_matches(nodes):
    """Trees of N nodes have up to N - 1 drafts of the n-grams, or else of the model. Their first nodes are the tree of
    a smaller N, whose acceptance therefore follows from theirs."""
    speculation = with_ngrams(resizable("EAGLE3", READ, WIDTH, features="final"), resizable("NGRAM", FOUND, LOOKUP))
    assert (speculation.largest_size, speculation.drafter.depth, speculation.lookup) == (LOOKUP, 3, LOOKUP)
    assert speculation.drafter.features == "final" and speculation.drafter.name == "EAGLE3"
    drafter = speculation.within(nodes)
    state = drafter.init(Params(None), 1, PoolShape(1, 1))
    found = [FOUND + i for i in range(nodes - 1)]
    read = [READ + i for i in range(min(nodes, WIDTH) - 1)]
    for root, tokens in [(19, found), (10, read), (11, found[:1])]:
        tree, _ = drafter.propose(Params(None), state, context([root]))
        assert drafter.width == tree.width == nodes
        valid = np.asarray(tree.valid[0])
        assert tree.tokens[0][valid].tolist() == [root, *tokens]
        assert tree.parents[0][valid].tolist() == list(range(-1, len(tokens)))
        assert ranks(tree, given=drafter.ranked)[0][valid].tolist() == list(range(1 + len(tokens)))


@pytest.mark.parametrize(
    ("given", "least"), [({}, 4), ({"min_match": 1}, 4), ({"min_match": 6}, 6), ({"max_match": 3}, 3)]
)
def test_matches_before_a_head_have_four_tokens(given, least):
    ngrams = Auto(**given).ngrams()
    assert ngrams is not None and ngrams.min_match == least
    assert Auto(**given).choose(None)[0] == Ngram(**given), "without a head as before"


def test_n_grams_alone_draft_for_several_requests():
    speculation = with_ngrams(resizable("EAGLE3", READ, WIDTH, features="final"), resizable("NGRAM", FOUND, LOOKUP))
    state = speculation.drafter.init(Params(None), 2, PoolShape(1, 1))
    tree, _ = speculation.drafter.propose(Params(None), state, context([19, 10]))
    tokens = [row[valid].tolist() for row, valid in zip(tree.tokens, np.asarray(tree.valid), strict=True)]
    assert tokens == [[19, FOUND, FOUND + 1, FOUND + 2], [10]]
    assert [speculation.models(batch) for batch in (1, 2)] == [True, False]


def test_acceptance_with_a_model_says_nothing_of_n_grams_alone():
    sizes, cost = (1, 2, 3, 4), {1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3}
    policy = DraftPolicy({1: sizes, 2: sizes}, lambda batch, n: cost[n], models=lambda batch: batch == 1)
    own = own_acceptance()
    before = policy.expected(2, 1, [own])
    for _ in range(400):
        policy.record(1, 4, 1.3, [(own, [1, 2])])
    assert policy.expected(1, 1, [own]) == pytest.approx({1: 1, 2: 2, 3: 3, 4: 3}, abs=0.1)
    assert policy.expected(2, 1, [own]) == before
    for _ in range(400):
        policy.record(2, 4, 1.3, [(own_acceptance(), [])] * 2)
    assert policy.expected(2, 1, [own])[4] < 1.1 and policy.expected(1, 1, [own])[3] > 2.8
