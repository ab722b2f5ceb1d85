"""Tree shapes by batch: resized drafters draft like drafters configured with the shape, and requests change shapes."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from distil import pair_model, perfect_head
from engine_helpers import NGRAM, check_idle, check_plain, make_engine

from specjax.cache import PoolShape
from specjax.drafters import Eagle, Params, TreeShape, make_speculation
from specjax.drafters.options import candidates
from specjax.engine import SamplingParams, plan
from specjax.engine.plan import BATCHES, Buckets

CHAIN, TREE = TreeShape(4, 1, 5), TreeShape(3, 3, 8)


@functools.cache
def head():
    """A head that is often right, so that paths of all lengths occur."""
    config, params = perfect_head(pair_model())
    moved = np.random.default_rng(0).normal(0, 0.05, params["fc"].shape).astype(np.float32)
    return config, params | {"fc": params["fc"] + moved}


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


def chain_of(shape: TreeShape, *, explicit: bool = True):
    speculation = make_speculation(Eagle("h"), target=pair_model().target, head=head()[0], automatic=shape)
    return speculation._replace(explicit_width=explicit)


def test_trees_of_a_cpu():
    """Large batches draft smaller trees, or none, unless the width is given."""
    given, automatic = chain_of(TREE), chain_of(TREE, explicit=False)

    def sizes(drafter) -> Buckets:
        return Buckets.build("cpu", drafter, rows=16, request_pages=8)

    assert sizes(given).trees == {1: 8, 4: 8, 16: 8}
    assert sizes(automatic).trees == {1: 8, 4: 1, 16: 1}
    assert sizes(make_speculation("NGRAM", platform="cpu")).trees == {1: 4, 4: 4, 16: 4}


def test_shape_of_each_batch_on_a_gpu():
    def shapes(speculation) -> dict[int, tuple[int, int]]:
        buckets = Buckets.build("gpu", speculation, rows=256, request_pages=8)
        assert buckets.batches == BATCHES["gpu"]
        actual = {batch: speculation.within(nodes) for batch, nodes in buckets.trees.items()}
        return {batch: (each.width, each.depth) for batch, each in actual.items()}

    whole = (8, 7)
    automatic = shapes(chain_of(TreeShape(7, 1, 8), explicit=False))
    assert [automatic[batch] for batch in (1, 2, 4, 8, 16, 24, 32)] == [whole] * 7
    assert [automatic[batch] for batch in (48, 64, 128)] == [(5, 4), (4, 3), (2, 1)]
    assert set(shapes(chain_of(TreeShape(7, 1, 8))).values()) == {whole}
    assert shapes(make_speculation("NGRAM", platform="gpu"))[48] == (5, 4)
    buckets = Buckets.build("gpu", chain_of(TreeShape(7, 1, 8), explicit=False), rows=256, request_pages=8)
    assert buckets.trees[256] == 1 and buckets.most_drafting == 128


def test_resized_drafters_share_their_state():
    target = pair_model().target
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
    assert target is pair_model().target


@pytest.fixture
def like_a_gpu(monkeypatch):
    """Gives engines the buckets of a GPU."""
    build = Buckets.build

    def become(block_tokens: int) -> None:
        monkeypatch.setitem(plan.HEAD_BLOCK_TOKENS, "gpu", block_tokens)
        monkeypatch.setattr(Buckets, "build", lambda platform, drafter, **options: build("gpu", drafter, **options))

    return become


PROMPTS = [[1, 2, 3], [7] * 11, [40, 5], [30, 31, 30, 31]]


def finished(engine, prompts, lengths, temperature: float = 0.0) -> list[tuple]:
    params = [SamplingParams(max_new_tokens=n, temperature=temperature, seed=i) for i, n in enumerate(lengths)]
    actual = engine.generate(prompts, params)
    check_idle(engine)
    # Histograms without trailing zeros.
    counts = [done.spec_accept_histogram for done in actual]
    most = max(i for each in counts for i, count in enumerate(each) if count)
    return [(done.output_ids, each[: most + 1]) for done, each in zip(actual, counts, strict=True)]


@pytest.mark.parametrize(
    ("shape", "block_tokens", "expected"),
    [
        pytest.param(CHAIN, 16, (3, 1, 4), id="chain"),
        pytest.param(TREE, 20, (3, 2, 5), id="tree", marks=pytest.mark.slow),
    ],
)
def test_bucket_equals_engine_with_its_shape(shape, block_tokens, expected, like_a_gpu):
    like_a_gpu(block_tokens)
    small = TreeShape(*expected)
    engines = [
        make_engine(pair_model(), drafter, draft=head()[1])
        for drafter in (chain_of(shape, explicit=False), chain_of(small))
    ]
    assert engines[0].buckets.trees[4] == small.nodes
    for temperature in (0.0, 1.0):
        by_bucket, configured = (finished(engine, PROMPTS, [24] * 4, temperature) for engine in engines)
        assert by_bucket == configured
        assert any(sum(accepted[1:]) for _, accepted in by_bucket)


def test_requests_move_between_shapes(like_a_gpu):
    """A perfect head: each step accepts all drafts of its shape, also after steps of other shapes."""
    like_a_gpu(8)
    config, params = perfect_head(pair_model())
    speculation = make_speculation(Eagle("h"), target=pair_model().target, head=config, automatic=CHAIN)
    engine = make_engine(pair_model(), speculation, draft=params)
    engine.warm_up(progress=False)
    assert engine.buckets.trees == {1: 5, 2: 4, 4: 2}
    (text, histogram), *others = finished(engine, PROMPTS, [60, 8, 8, 30])
    for index, (prompt, length) in enumerate(zip(PROMPTS, [60, 8, 8, 30], strict=True)):
        done = engine.generate(prompt, SamplingParams(max_new_tokens=length, seed=index))
        check_plain(pair_model(), prompt, SamplingParams(max_new_tokens=length, seed=index), done)
        assert [text, *(other for other, _ in others)][index] == done.output_ids
    steps = sum(histogram)
    assert histogram[1] >= 2 and histogram[3] >= 2 and histogram[4] >= 3, "all three shapes"
    assert steps - histogram[1] - histogram[3] - histogram[4] <= 2, "last steps may be truncated"
