"""Heads that propose only what they are sure of (`--speculative-draft-p-min`): the text stays, levels are skipped, and
narrow steps check narrow trees. Which nodes are left is held to the oracle in test_eagle.py."""

import functools
from dataclasses import dataclass, field, replace

import jax
import numpy as np
import oracle
import pytest
from distil import pair_model, perfect_head, small_head
from oracle import Sampling
from specjax_kernels import CHEAP_ROWS
from toy_models import Runner

from specjax.drafters import Confidence, Eagle, TreeShape, eagle, eagle_drafter, make_drafter
from specjax.drafters.table import options_of
from specjax.engine.buckets import Buckets
from specjax.step import StepConfig, _gather, tree_widths

CHAIN, TREE = (4, 1, 5), (3, 3, 8)


@functools.cache
def head(noise: float = 0.05):
    """Right often enough that paths of all lengths occur, and sometimes sure of it."""
    config, params = perfect_head(pair_model())
    moved = np.random.default_rng(0).normal(0, noise, params["fc"].shape).astype(np.float32)
    return config, params | {"fc": params["fc"] + moved}


def drafter_of(shape, least, skips=True):
    return eagle_drafter(pair_model().target, head()[0], TreeShape(*shape), confidence=Confidence(least, skips))


# The text.


@pytest.mark.parametrize(
    ("shape", "least"),
    [
        pytest.param(TREE, 0.6, id="tree-0.6"),
        pytest.param(CHAIN, 0.1, id="chain-0.1", marks=pytest.mark.slow),
        pytest.param(CHAIN, 0.6, id="chain-0.6", marks=pytest.mark.slow),
        pytest.param(TREE, 0.1, id="tree-0.1", marks=pytest.mark.slow),
    ],
)
def test_no_text_changes(shape, least):
    """Greedy and drawn, beside each other."""
    toy = pair_model()
    config = StepConfig((2, shape[2]))  # a narrow and the widest; all of them below
    runner = Runner(toy, drafter_of(shape, least), rows=4, draft=head()[1], chunk=12, config=config)
    requests = [
        (prompt, Sampling(max_tokens=30, temperature=0.8 * (row % 2), seed=row))
        for row, prompt in enumerate(([1, 2, 3], [7] * 11, [40, 5], [30, 31, 30, 31]))
    ]
    found = runner.generate(requests)
    for (prompt, request), result in zip(requests, found, strict=True):
        assert result.tokens == oracle.generate_plain(toy.logits, prompt, request).tokens
    counts = [count for result in found for count in result.emitted]
    assert 1 in counts and max(counts) > (2 if least < 0.5 else 1), "drafts were made, but not always"


# What is computed.


@dataclass
class Counted:
    """Forwards that ran, by their width: of the head and of the target."""

    head: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)


def counted(monkeypatch, shape, confidence, *, rows=1, widths=()) -> tuple[Runner, Counted]:
    """A runner whose models tell, in any order, when they run. Without the target's noise, so that what a level needs
    varies with the text alone."""
    seen, toy = Counted(), pair_model()

    def tells(forward, name):
        def run(*arguments, **options):
            x = arguments[1]
            jax.debug.callback(functools.partial(getattr(seen, name).append, x.shape[1]))
            return forward(*arguments, **options)

        return run

    make = eagle.draft_head

    def telling(*arguments, **options):
        model = make(*arguments, **options)
        object.__setattr__(model, "forward", tells(model.forward, "head"))  # it is frozen
        return model

    monkeypatch.setattr(eagle, "draft_head", telling)
    toy = toy._replace(target=toy.target._replace(forward=tells(toy.target.forward, "target")))
    drafter = eagle_drafter(toy.target, head()[0], TreeShape(*shape), confidence=confidence, coupling="none")
    config = StepConfig(widths or tree_widths(drafter), trace=True)
    return Runner(toy, drafter, rows=rows, draft=head()[1], config=config, pages_a_row=32), seen


def observed(output, steps: int) -> int:
    """Rows of the forward that observes a step's paths."""
    return CHEAP_ROWS if output.emitted.max() <= CHEAP_ROWS else steps + 1


@pytest.mark.parametrize(
    "shape", [pytest.param(CHAIN, id="chain", marks=pytest.mark.slow), pytest.param(TREE, id="tree")]
)
def test_levels_that_nobody_needs_are_skipped_and_the_step_is_as_wide_as_its_trees(monkeypatch, shape):
    """A forward of the head below each level that has a node and is not the last, one to observe, narrow where the path
    is short; and of the target's forwards the narrowest that holds the tree."""
    runner, seen = counted(monkeypatch, shape, Confidence(0.15, skips=True))
    steps, topk, width = shape
    runner.admit(0, [1, 2, 3], Sampling(max_tokens=60, temperature=1.0, seed=11))
    runner.prefill([[1, 2, 3]])
    jax.effects_barrier()
    known = tree_widths(drafter_of(shape, 0.15))
    assert known == (1, 2, 3, width)
    deepest, widths = set(), set()
    for _ in range(24):
        seen.head.clear(), seen.target.clear()
        output = runner.step([True])
        jax.effects_barrier()
        tree = jax.tree.map(lambda leaf: leaf[0], output.trace.tree)
        depth, count = int(tree.depth.max()), int(tree.valid.sum())
        # With room in the tree for all that is likely enough, the deepest node is the deepest candidate.
        assert sorted(seen.head) == sorted([*[topk] * min(depth, steps - 1), observed(output, steps)])
        assert seen.target == [next(w for w in known if w >= count)]
        deepest.add(depth)
        widths.add(seen.target[0])
    assert widths == set(known) and {0, 1, 2} <= deepest, (widths, deepest)


def test_a_level_that_one_request_needs_is_computed_and_idle_entries_need_none(monkeypatch):
    runner, seen = counted(monkeypatch, CHAIN, Confidence(0.3, skips=True), rows=4, widths=CHAIN[2:])
    requests = [([row + 1, 2, 3], Sampling(max_tokens=60, temperature=1.0, seed=row)) for row in range(4)]
    for row, (prompt, request) in enumerate(requests):
        runner.admit(row, prompt, request)
    runner.prefill([prompt for prompt, _ in requests])
    for active in ([True] * 4, [False, True, False, False]) * 6:
        jax.effects_barrier()
        seen.head.clear()
        output = runner.step(active)
        jax.effects_barrier()
        depth = int(output.trace.tree.depth.max())
        assert sorted(seen.head) == [*[1] * min(depth, CHAIN[0] - 1), observed(output, CHAIN[0])]
        assert output.trace.tree.valid.sum(axis=1)[[not each for each in (*active, False)]].max() == 1


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_only_where_it_saves_time_is_anything_decided(shape):
    """A conditional for each level but the first; without a threshold, and on a GPU, none."""
    runner = Runner(pair_model(), drafter_of(shape, 0.0), rows=2, draft=head()[1])
    inputs = runner.inputs([True] * 2)
    context, _, _ = _gather(runner.state, inputs)

    def decisions(confidence: Confidence) -> int:
        drafter = eagle_drafter(pair_model().target, head()[0], TreeShape(*shape), confidence=confidence)
        return str(jax.make_jaxpr(drafter.propose)(runner.params, runner.state.draft, context)).count("cond[")

    of_attention = decisions(Confidence())
    assert decisions(Confidence(0.0, skips=True)) == decisions(Confidence(0.3)) == of_attention
    assert decisions(Confidence(0.3, skips=True)) == of_attention + shape[0] - 1


# Tree widths.


@pytest.mark.parametrize(
    ("shape", "widths"),
    [((1, 1, 2), (1, 2)), ((2, 1, 3), (1, 2, 3)), ((3, 1, 4), (1, 2, 3, 4)), ((8, 1, 9), (1, 2, 3, 9)),
     ((5, 4, 8), (1, 2, 3, 8)), ((1, 5, 6), (1, 2, 3, 6)), ((5, 8, 32), (1, 2, 3, 8, 32)),
     ((6, 8, 64), (1, 2, 3, 16, 64))],
)  # fmt: skip
def test_narrow_tree_widths(shape, widths):
    drafter = drafter_of(shape, 0.5)
    assert drafter.explicit_width and tree_widths(drafter) == widths
    assert tree_widths(drafter_of(shape, 0.5, skips=False)) == tree_widths(drafter_of(shape, 0.0)) == (1, shape[2])
    cpu, gpu = (Buckets.build(platform, drafter, rows=4, request_pages=8) for platform in ("cpu", "gpu"))
    assert cpu.tree_widths(1) == widths
    assert gpu.tree_widths(4) == (shape[2],)


# By name.


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_the_platform_decides_whether_levels_are_skipped(monkeypatch, kind, platform):
    toy = pair_model()
    monkeypatch.setattr("jax.default_backend", lambda: platform)
    options = options_of(kind, steps=3, min_probability=0.25)
    drafter = make_drafter(options, target=toy.target, head=small_head(kind, toy))
    assert drafter.note.endswith(" was chosen); only drafts of a probability of at least 0.25")
    assert drafter.widths == ((2, 3) if platform == "cpu" else ())
    plain = make_drafter(replace(options, min_probability=0.0), target=toy.target, head=small_head(kind, toy))
    assert plain.widths == () and plain.note.endswith(" was chosen)")


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan"), float("inf")])
def test_what_is_no_probability(value):
    with pytest.raises(ValueError, match=r"^Eagle.min_probability must be a number from 0 to below 1, got "):
        Eagle(min_probability=value)
    with pytest.raises(ValueError, match=r"^Confidence.least must be a number from 0 to below 1, got "):
        Confidence(value)
