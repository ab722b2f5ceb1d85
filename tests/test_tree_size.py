"""How many nodes of a drafted tree are checked: the choice against plain Python, and the step that makes it."""

from __future__ import annotations

import functools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from distil import distilled, pair_model
from oracle import Sampling
from test_gpu_lowering import ASKS_THE_HOST, TREES, decisions, for_gpu, tiny
from toy_models import Runner

from specjax.drafters import TreeShape, eagle_drafter
from specjax.engine.buckets import Buckets
from specjax.engine.keys import Key
from specjax.step import StepConfig, draft_phase, speculate_step
from specjax.tree import NO_PARENT, NO_TOKEN, DraftTree
from specjax.tree_size import Sizing, best_width, expected_tokens, path_probabilities

WIDTHS = (1, 2, 4, 8)

# The choice.


def some_trees(rng: np.random.Generator, batch: int, width: int) -> DraftTree:
    """Random trees whose scores never grow along a path, some of them equal, with invalid nodes at the end."""
    shape = (batch, width)
    tokens, parents = rng.integers(0, 9, shape), np.full(shape, NO_PARENT)
    depth, scores = np.zeros(shape, int), np.full(shape, -np.inf)
    valid = np.arange(width)[None, :] < rng.integers(1, width + 1, batch)[:, None]
    scores[:, 0] = 0.0
    for b in range(batch):
        for i in range(1, width):
            if valid[b, i]:
                parents[b, i] = rng.integers(0, i)
                depth[b, i] = depth[b, parents[b, i]] + 1
                scores[b, i] = scores[b, parents[b, i]] + math.log(rng.choice([0.25, 0.5, 0.9, 1.0]))
    tokens[~valid] = NO_TOKEN
    fields = (tokens.astype(np.int32), parents.astype(np.int32), depth.astype(np.int32), valid, scores)
    return DraftTree(*map(jnp.asarray, (*fields[:4], fields[4].astype(np.float32))))


def expected_by_hand(tree: DraftTree, row: int, count: int, width: int, correction: float) -> float:
    """Multiplies down each path, sorts, and adds."""
    likely = []
    for node in range(1, tree.width):
        if tree.valid[row, node]:
            probability, at = 1.0, node
            while at != 0:
                above = int(tree.parents[row, at])
                probability *= math.exp(float(tree.scores[row, at] - tree.scores[row, above]))
                at = above
            likely.append(probability)
    drafts = min(width, count) - 1
    return 1 + min(correction * sum(sorted(likely, reverse=True)[:drafts]), drafts)


def test_expected_tokens_are_those_of_plain_python():
    rng = np.random.default_rng(0)
    for _ in range(20):
        tree, count = some_trees(rng, 3, 8), rng.integers(1, 12, 3)
        correction = rng.choice([0.5, 1.0, 1.5], 3)
        given = jnp.asarray(count, jnp.int32), WIDTHS, jnp.asarray(correction, jnp.float32)
        found = expected_tokens(tree, *given)
        wanted = [
            [expected_by_hand(tree, row, int(count[row]), w, correction[row]) for w in WIDTHS] for row in range(3)
        ]
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def best_by_hand(tokens: list[float], milliseconds: list[float]) -> int:
    rates = [t / ms for t, ms in zip(tokens, milliseconds, strict=True)]
    return rates.index(max(rates))


CPU = (20.0, 22.0, 25.0, 40.0, 70.0)
GPU = (20.0, 20.0, 20.0, 20.0, 20.2)
SURE, UNSURE, NOTHING = (1.0, 1.9, 3.4, 4.6, 5.2), (1.0, 1.15, 1.25, 1.35, 1.4), (1.0,) * 5


@pytest.mark.parametrize(
    ("milliseconds", "tokens", "wanted"),
    [
        pytest.param(CPU, SURE, 2, id="cpu-sure"), pytest.param(CPU, UNSURE, 1, id="cpu-unsure"),
        pytest.param(CPU, NOTHING, 0, id="cpu-nothing"), pytest.param(GPU, SURE, 4, id="gpu-sure"),
        pytest.param(GPU, UNSURE, 4, id="gpu-unsure"), pytest.param((20.0,) * 5, NOTHING, 0, id="ties-are-narrow"),
        pytest.param((math.inf, math.inf, 9.0, math.inf, math.inf), SURE, 2, id="forced"),
    ],
)  # fmt: skip
def test_the_width_with_the_most_tokens_a_millisecond(milliseconds, tokens, wanted):
    given = (jnp.asarray(each, jnp.float32) for each in (tokens, milliseconds))
    assert int(best_width(*given)) == wanted == best_by_hand(list(tokens), list(milliseconds))


def test_random_tables_as_in_plain_python():
    rng = np.random.default_rng(1)
    for _ in range(50):
        tokens = np.cumsum(rng.uniform(0.1, 1, 5)).astype(np.float32)
        milliseconds = np.cumsum(rng.uniform(0.1, 9, 5)).astype(np.float32)
        assert int(best_width(jnp.asarray(tokens), jnp.asarray(milliseconds))) == best_by_hand(
            tokens.tolist(), milliseconds.tolist()
        )


# The step.


@functools.cache
def setting():
    """Three rows, of which the second may have two drafts."""
    toy, (config, params) = pair_model(), distilled("eagle3")
    drafter = eagle_drafter(toy.target, config, TreeShape(3, 3, 8))
    given = StepConfig(WIDTHS, trace=True, dynamic=True)
    runner = Runner(toy, drafter, rows=3, draft=params, config=given, pages_a_row=24)
    return runner, drafter, given


REQUESTS = [
    ([1, 2, 3], Sampling(max_tokens=40)),
    ([7] * 9, Sampling(max_tokens=40, temperature=0.9, seed=3)),
    ([40, 5], Sampling(max_tokens=40, temperature=0.4, seed=8)),
]


def begin(runner: Runner, **changes) -> None:
    for row, (prompt, request) in enumerate(REQUESTS):
        runner.admit(row, prompt, request, **(changes if row == 1 else {}))
    runner.prefill([prompt for prompt, _ in REQUESTS])


def sizing(milliseconds, corrections=(1.0, 1.0, 1.0, 1.0)) -> Sizing:
    return Sizing(jnp.asarray(milliseconds, jnp.float32), jnp.asarray(corrections, jnp.float32))


def test_a_step_checks_the_width_that_the_batch_is_best_served_by():
    """By the whole trees of the same state, in plain Python: summed over active rows, each with its limit and its
    correction. The best nodes of each tree are checked, and the output says how many and what they promised."""
    runner, drafter, config = setting()
    begin(runner, draft_limit=2)
    rng, chosen = np.random.default_rng(5), set()
    whole = jax.jit(partial(draft_phase, drafter=drafter, config=StepConfig((8,))))
    step = jax.jit(partial(speculate_step, target=runner.toy.target, drafter=drafter, config=config))
    for turn in range(30):
        active = [True, turn % 3 != 0, True]
        milliseconds = np.cumsum(rng.uniform(1, 6, 4)) + 10 * (turn % 2)
        corrections = rng.uniform(0.4, 1.6, 4)
        inputs = runner.inputs(active)
        active = np.asarray(active) & ~np.asarray(runner.state.finished)
        trees, _ = whole(runner.params, runner.state, inputs)
        runner.state, output = step(
            runner.params, runner.state, inputs._replace(sizing=sizing(milliseconds, corrections))
        )
        counts = [8, 3, 8]
        tokens = [
            sum(expected_by_hand(trees, r, counts[r], w, corrections[r]) for r in range(3) if active[r]) for w in WIDTHS
        ]
        width = WIDTHS[best_by_hand(tokens, milliseconds.tolist())]
        checked = output.trace.tree
        for row in range(3):
            size = min(width, counts[row], int(trees.valid[row].sum())) if active[row] else 1
            best = sorted(np.asarray(trees.scores[row])[np.asarray(trees.valid[row])], reverse=True)[:size]
            kept = np.asarray(checked.scores[row])[np.asarray(checked.valid[row])]
            np.testing.assert_allclose(sorted(kept, reverse=True), best, rtol=1e-6)
            promised = sum(math.exp(score) for score in best[1:])
            assert float(output.sized.promised[row]) == pytest.approx(promised, rel=1e-5, abs=1e-6)
        needed = int(checked.valid.sum(axis=1).max())
        assert output.sized.nodes.tolist() == [next(w for w in WIDTHS if w >= needed)] * 4
        chosen.add(width)
    assert len(chosen) > 2, chosen


@pytest.mark.parametrize("width", [*WIDTHS, 0], ids=lambda width: f"{width}-nodes" if width else "changing")
def test_no_width_changes_a_text(width):
    """Greedy and sampled, beside each other; 0: another width in each step."""
    runner, _, _ = setting()
    begin(runner)
    texts, turn = [[], [], []], 0
    first = [oracle.generate_plain(runner.toy.logits, *request).tokens for request in REQUESTS]
    while min(map(len, texts)) < 39:
        wanted = width or WIDTHS[turn % 4]
        turn += 1
        given = runner.inputs([True] * 3)
        given = given._replace(sizing=sizing([1.0 if w == wanted else math.inf for w in WIDTHS]))
        runner.state, output = runner.steps.speculate(runner.params, runner.state, given)
        for row, text in enumerate(texts):
            text += output.tokens[row, : output.emitted[row]].tolist()
        if width:
            assert output.trace.tree.valid.sum(axis=1).max() <= width
    assert [text[:39] for text in texts] == [tokens[1:40] for tokens in first], "the prefill drew the first"


def test_a_dynamic_step_needs_its_costs():
    runner, drafter, config = setting()
    with pytest.raises(ValueError, match=r"StepInput\.sizing, which is None"):
        draft_phase(runner.params, runner.state, runner.inputs([True] * 3), drafter=drafter, config=config)


def test_the_root_and_what_is_invalid_promise_nothing():
    tree = some_trees(np.random.default_rng(3), 4, 8)
    found = np.asarray(path_probabilities(tree))
    assert not found[:, 0].any() and not found[~np.asarray(tree.valid)].any()


# On a GPU.


@pytest.mark.parametrize("shape", TREES)
def test_the_choice_is_one_branch_on_the_device(shape):
    """Beside the branches that a static step has; drafting still has none."""
    function, (params, state, inputs) = tiny("eagle3", shape)["step"]
    fixed = {name: function.keywords[name] for name in ("target", "drafter")}
    width = TREES[shape][2]
    dynamic = StepConfig((2, width), dynamic=True)
    inputs = inputs._replace(
        sizing=Sizing(jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.float32))
    )
    text = for_gpu(partial(speculate_step, **fixed, config=dynamic), (params, state, inputs))
    assert not ASKS_THE_HOST.findall(text)
    draft = for_gpu(partial(draft_phase, drafter=fixed["drafter"], config=dynamic), (params, state, inputs))
    assert not decisions(draft)
    switch = for_gpu(partial(speculate_step, **fixed, config=StepConfig((2, width))), (params, state, inputs))
    assert decisions(text).count("stablehlo.case") == decisions(switch).count("stablehlo.case") > 0


def widths_of(platform: str, batch: int, nodes: int = 32, **changes) -> tuple[int, ...]:
    toy, (config, _) = pair_model(), distilled("eagle3")
    drafter = eagle_drafter(toy.target, config, TreeShape(5, 8, nodes), **changes)
    built = Buckets.build(platform, drafter._replace(sizing="dynamic"), rows=64, request_pages=8)
    assert (
        Buckets.build(platform, drafter, rows=64, request_pages=8).tree_widths(batch)[-1]
        == (built.tree_widths(batch)[-1])
    ), "the largest tree is that of static ones"
    found = built.tree_widths(batch)
    assert built.sizes(Key("step", batch, 8)) == (found if len(found) > 1 else ())
    assert built.sizes(Key("constrained", batch, 8)) == ()
    assert built.step_widths(Key("step", batch, 8, nodes=4))[-1] == 4
    return found


def test_the_widths_that_are_compiled():
    assert widths_of("cpu", 1) == widths_of("cpu", 16) == (1, 2, 4, 8, 16, 32)
    assert widths_of("cpu", 1, nodes=6) == (1, 2, 4, 6)
    assert widths_of("gpu", 1) == (8, 16, 32)
    assert widths_of("gpu", 4) == (2, 4, 8, 16, 32)
    assert widths_of("gpu", 64) == (1, 2, 4, 8, 16, 32)
    assert widths_of("gpu", 64, explicit_width=False) == (1, 2, 4), "as many as a batch of 256 has room for"
