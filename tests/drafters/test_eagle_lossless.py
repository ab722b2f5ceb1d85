"""EAGLE changes the speed, never the text; and how much it accepts: exactly what can be computed beforehand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from distil import distil, distilled, pair_model, perfect_head, small_head
from engine_helpers import check_idle, check_plain, make_engine
from oracle import Sampling
from toy_models import Runner

from specjax.drafters import TreeShape, eagle_drafter
from specjax.engine import SamplingParams
from specjax.models.draft_head import init_head_params
from specjax.step import StepConfig

DEEP = (5, 8, 32)


def untrained(kind: str, seed: int = 1):
    config = small_head(kind, pair_model())
    params = dict(init_head_params(config, pair_model().target, jax.random.key(seed)))
    return config, {name: leaf * 5 if leaf.ndim > 1 else leaf for name, leaf in params.items()}


@functools.cache
def drafter_of(config, shape, coupling="noise"):
    return eagle_drafter(pair_model().target, config, TreeShape(*shape), coupling=coupling)


# The text.


REQUESTS = [
    ([1, 2, 3], {}),
    ([7] * 20, {"temperature": 1.0, "seed": 3}),
    ([40, 5], {"temperature": 0.7, "seed": -1, "top_k": 9, "frequency_penalty": 0.5}),
    ([9, 8, 7, 6, 5, 4, 3, 2, 1], {"repetition_penalty": 1.4}),
    ([11], {"temperature": 1.3, "seed": 2**63 - 1, "top_p": 0.8}),
    ([30, 31, 30, 31], {"stop_token_ids": [17, 23]}),
    ([3, 3], {"temperature": 1.0, "seed": 4, "min_new_tokens": 12, "stop_token_ids": [17, 23, 5]}),
    ([2, 47], {"max_new_tokens": 1}),
]


@pytest.mark.parametrize(
    ("kind", "shape", "page_size"),
    [
        ("eagle", (3, 3, 8), 16),
        ("eagle3", (3, 1, 4), 16),
        pytest.param("eagle", (3, 1, 4), 1, marks=pytest.mark.slow),
        pytest.param("eagle3", (3, 3, 8), 1, marks=pytest.mark.slow),
    ],
)
def test_no_text_changes(kind, shape, page_size):
    """Greedy and seeded, one at a time and eight at once."""
    config, params = untrained(kind)
    if kind == "eagle":  # right often enough that paths of all lengths occur
        config, params = perfect_head(pair_model())
        noise = np.random.default_rng(0).normal(0, 0.05, params["fc"].shape).astype(np.float32)
        params = params | {"fc": params["fc"] + noise}
    engine = make_engine(
        pair_model(), drafter_of(config, shape), draft=params, max_running_requests=8, page_size=page_size
    )
    prompts = [prompt for prompt, _ in REQUESTS]
    sampling = [SamplingParams(**{"max_new_tokens": 30} | fields) for _, fields in REQUESTS]
    together = engine.generate(prompts, sampling)
    for prompt, wanted, found in zip(prompts, sampling, together, strict=True):
        check_plain(pair_model(), prompt, wanted, found)
    alone = [engine.generate(*pair) for pair in zip(prompts[:4], sampling[:4], strict=True)]
    assert [done.output_ids for done in alone] == [done.output_ids for done in together[:4]]
    if kind == "eagle":
        histogram = np.sum([done.spec_accept_histogram for done in together], axis=0)
        assert all(histogram > 0), histogram
    check_idle(engine)


# How much is accepted.


def accept_length(drafter, params, *, temperature=0.0, rows=4, tokens=97) -> float:
    config = StepConfig((drafter.width,))  # no other is needed, and each takes long to compile
    runner = Runner(pair_model(), drafter, rows=rows, pages_a_row=32, chunk=8, draft=params, config=config)
    requests = [
        ([row, row + 1, 3], Sampling(max_tokens=tokens, temperature=temperature, seed=row)) for row in range(rows)
    ]
    found = runner.generate(requests)
    for (prompt, request), result in zip(requests, found, strict=True):
        assert result.tokens == oracle.generate_plain(pair_model().logits, prompt, request).tokens
    return float(np.mean([count for result in found for count in result.emitted]))


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_perfect_head_reaches_its_whole_depth(steps):
    """A chain of a head that is its target, over a number of tokens that is a multiple of steps + 1."""
    config, params = perfect_head(pair_model())
    length = accept_length(drafter_of(config, (steps, 1, steps + 1)), params, tokens=1 + 8 * (steps + 1))
    assert length == steps + 1


@pytest.mark.parametrize("kind", [pytest.param("eagle", marks=pytest.mark.slow), "eagle3"])
def test_a_distilled_head_is_often_right_and_a_misaligned_one_is_not(kind):
    config, params = distilled(kind)
    drafter = drafter_of(config, DEEP)
    assert accept_length(drafter, params) > 2.5
    assert accept_length(drafter, params, temperature=1.0) > 2

    def propose_misaligned(all_params, state, context):
        """Reads another token in place of the root."""
        tree, state = drafter.propose(all_params, state, context._replace(root=jnp.zeros_like(context.root)))
        return tree._replace(tokens=tree.tokens.at[:, 0].set(context.root)), state

    assert accept_length(drafter._replace(propose=propose_misaligned), params) < 2
    assert accept_length(drafter, untrained(kind)[1]) < 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_head_that_is_distilled_now_is_as_good_as_the_stored_one(kind):
    config, stored = distilled(kind)
    lengths = [accept_length(drafter_of(config, DEEP), head) for head in (stored, distil(config, pair_model()))]
    assert min(lengths) > 2.5 and max(lengths) - min(lengths) < 0.5, lengths


@pytest.mark.parametrize(
    ("kind", "shape"), [("eagle", (3, 4, 12)), pytest.param("eagle3", (4, 1, 5), marks=pytest.mark.slow)]
)
def test_accepted_drafts_are_as_many_as_the_targets_probabilities_say(kind, shape):
    """Without coupling all seeds have one tree, and the mean over many is the sum over nodes of the product of p along
    the path (ALGORITHMS.md)."""
    toy, rows, prompt, root = pair_model(), 1024, [4, 9], 13
    config, params = distilled(kind)
    drafter = drafter_of(config, shape, "none")
    runner = Runner(
        toy, drafter, rows=rows, page_size=4, pages_a_row=2, chunk=2, draft=params,
        config=StepConfig(widths=(shape[2],), trace=True),
    )  # fmt: skip
    for row in range(rows):
        runner.admit(row, prompt, Sampling(max_tokens=20, temperature=1.0, seed=row))
    runner.prefill([prompt] * rows, forced=root)
    output = runner.step([True] * rows)
    tree = jax.tree.map(lambda leaf: leaf[0], output.trace.tree)
    assert np.array_equal(output.trace.tree.tokens[:rows], np.broadcast_to(tree.tokens, (rows, shape[2])))

    def probability(node: int) -> float:
        """That the target draws all of the path to a node."""
        if node == 0:
            return 1.0
        above, tokens = int(tree.parents[node]), []
        at = above
        while at > 0:
            tokens.insert(0, int(tree.tokens[at]))
            at = int(tree.parents[at])
        logits = toy.logits([*prompt, root, *tokens]).astype(np.float64)
        p = np.exp(logits - logits.max())
        return probability(above) * float(p[tree.tokens[node]] / p.sum())

    expected = sum(probability(node) for node in range(1, shape[2]))
    accepted = output.accepted[:rows]
    error = accepted.std() / rows**0.5
    assert expected > 0.5, "else it says little"
    assert abs(accepted.mean() - expected) < 4 * error, (accepted.mean(), expected, error)
