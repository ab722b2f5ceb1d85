"""Tree shapes by batch: shapes of fewer nodes, states of resized drafters, and requests that change shapes."""

from __future__ import annotations

import jax
import pytest
from distil import pair_model, perfect_head
from engine_helpers import NGRAM, check_texts, make_engine

from specjax.cache import PoolShape
from specjax.drafters import Eagle, Params, TreeShape, make_speculation
from specjax.drafters.options import candidates
from specjax.engine import SamplingParams, plan
from specjax.engine.plan import Buckets

CHAIN, TREE = TreeShape(4, 1, 5), TreeShape(3, 3, 8)


SHAPES = [
    ((7, 1, 8), 8, (7, 1, 8)),
    ((7, 1, 8), 2, (1, 1, 2)),
    ((5, 8, 32), 10, (5, 2, 10)),
    ((5, 8, 32), 4, (3, 1, 4)),
    ((5, 4, 8), 5, (4, 2, 5)),
]


@pytest.mark.parametrize(("whole", "nodes", "expected"), SHAPES)
def test_shape_within_a_number_of_nodes(whole, nodes, expected):
    assert TreeShape(*whole).within(nodes) == TreeShape(*expected)


@pytest.mark.parametrize("whole", [(7, 1, 8), (5, 8, 32), (2, 10, 64), (1, 64, 65)])
def test_every_number_of_nodes_has_a_shape(whole):
    whole = TreeShape(*whole)
    for nodes in range(2, whole.nodes + 3):
        shape = whole.within(nodes)
        assert shape.nodes == min(nodes, whole.nodes) and shape.depth <= whole.depth
        assert shape.steps <= whole.steps and shape.topk <= whole.topk
        assert candidates(shape.steps, shape.topk) >= shape.nodes - 1


def chain_of(shape: TreeShape):
    config, _ = perfect_head(pair_model())
    return make_speculation(Eagle("h"), target=pair_model().target, head=config, automatic=shape)


def test_resized_drafters_share_their_state():
    for speculation in (chain_of(CHAIN), chain_of(TREE), make_speculation(NGRAM)):
        drafter, small = speculation.drafter, speculation.within(3)
        assert (small.width, small.depth) == (3, 2) and speculation.within(drafter.width) is drafter
        assert speculation.within(1) is drafter
        states = [
            jax.eval_shape(lambda each=each: each.init(Params(None), 2, PoolShape(4, 4))) for each in (drafter, small)
        ]
        assert jax.tree.all(jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), *states))
    one_shape = chain_of(CHAIN)._replace(resize=None)
    assert one_shape.within(3) is one_shape.drafter


def test_requests_move_between_shapes(monkeypatch):
    """With the buckets of a GPU and a perfect head: each step accepts all drafts of its shape, also after steps of
    other shapes."""
    build = Buckets.build
    monkeypatch.setitem(plan.HEAD_BLOCK_TOKENS, "gpu", 8)
    monkeypatch.setattr(Buckets, "build", lambda platform, drafter, **options: build("gpu", drafter, **options))
    engine = make_engine(pair_model(), chain_of(CHAIN), draft=perfect_head(pair_model())[1])
    engine.warm_up(progress=False)
    assert engine.buckets.trees == {1: 5, 2: 4, 4: 2}
    prompts = [[1, 2, 3], [7] * 11, [40, 5], [30, 31, 30, 31]]
    params = [SamplingParams(max_new_tokens=count, seed=i) for i, count in enumerate((60, 8, 8, 30))]
    histogram = check_texts(engine, pair_model(), prompts, params)[0].spec_accept_histogram
    assert histogram[1] >= 2 and histogram[3] >= 2 and histogram[4] >= 3, "all three shapes"
    assert sum(histogram) - histogram[1] - histogram[3] - histogram[4] <= 2, "last steps may be truncated"
