"""n-grams before a model: whose draft a tree has, and the ranks of its nodes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.cache import PoolShape
from specjax.drafters.base import Context, Drafter, Params, Speculation
from specjax.drafters.hybrid import with_ngrams
from specjax.engine.draft_policy import Acceptance, own_acceptance
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


@pytest.mark.parametrize("nodes", [2, 4, 5, 6])
def test_model_drafts_where_nothing_matches(nodes):
    """Trees of N nodes have up to LOOKUP nodes of n-grams, or N - LOOKUP drafts of the model if these are more."""
    speculation = with_ngrams(resizable("EAGLE3", READ, WIDTH, features="final"), resizable("NGRAM", FOUND, LOOKUP))
    assert (speculation.largest_size, speculation.drafter.depth, speculation.lookup) == (6, 3, LOOKUP)
    assert speculation.drafter.features == "final" and speculation.drafter.name == "EAGLE3"
    drafter = speculation.within(nodes)
    state = drafter.init(Params(None), 3, PoolShape(1, 1))
    tree, _ = drafter.propose(Params(None), state, context([19, 10, 11]))
    assert drafter.width == tree.width == min(nodes, LOOKUP)  # arrays of the wider part
    found = [FOUND + i for i in range(min(nodes, LOOKUP) - 1)]
    read = [READ + i for i in range(max(nodes - LOOKUP, 0))]
    short = (11, found[:1], 1) if len(read) < 2 else (11, read, LOOKUP)
    for row, (root, tokens, first) in enumerate([(19, found, 1), (10, read, LOOKUP), short]):
        valid = np.asarray(tree.valid[row])
        assert tree.tokens[row][valid].tolist() == [root, *tokens]
        assert tree.parents[row][valid].tolist() == list(range(-1, len(tokens)))
        order = ranks(tree, given=drafter.ranked)[row][valid].tolist()
        assert order == [0, *range(first, first + len(tokens))] and max(order) < nodes


def test_parts_of_a_model_do_not_follow_those_of_n_grams():
    acceptance = Acceptance((1, LOOKUP, 5, 6), LOOKUP)
    copied, new = own_acceptance(), own_acceptance()
    for _ in range(400):
        acceptance.add(6, [(copied, [1, 2, 3]), (new, [4])])
    assert acceptance.survivals == pytest.approx([1.5, 0.5, 0.0], abs=0.1)
    expected = [acceptance.expected(1, [own]) for own in (copied, new, own_acceptance())]
    assert expected[0] == pytest.approx({1: 1, LOOKUP: 4, 5: 4, 6: 4}, abs=0.5)
    assert expected[1] == pytest.approx({1: 1, LOOKUP: 1, 5: 2, 6: 2}, abs=0.5)
    assert expected[2] == pytest.approx({1: 1, LOOKUP: 2.5, 5: 3, 6: 3}, abs=0.2)
    for _ in range(1600):
        acceptance.add(LOOKUP, [(new, [])])
    assert acceptance.survivals[0] < 0.1 < acceptance.survivals[1], "what the head accepts is as before"
