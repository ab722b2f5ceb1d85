"""Drafts with the target's noise, and how many are accepted. test_standalone_draft.py compares their trees with an
oracle's."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from distil import distilled, pair_model, perfect_head
from draft_helpers import MAP, right_often
from engine_helpers import make_engine
from oracle import Sampling
from test_gpu_lowering import decisions
from toy_models import Runner, as_tree, sampling_rows

from specjax.drafters import Context, TreeShape, eagle_drafter, options_of
from specjax.drafters.coupling import OUTSIDE, cut, level_noise, with_noise
from specjax.drafters.factories import make_speculation
from specjax.models.draft_head import with_token_map
from specjax.serve.control import describe
from specjax.step import StepConfig

CHAIN, TREE = TreeShape(4, 1, 5), TreeShape(3, 3, 8)
REQUESTS = [
    ([1, 2, 3], Sampling(max_tokens=41)),
    ([7] * 9, Sampling(max_tokens=41, temperature=0.3, seed=3)),
    ([40, 5], Sampling(max_tokens=41, temperature=1.0, seed=2**40 + 1)),
    ([11], Sampling(max_tokens=41, temperature=1.7, seed=4)),
    ([40, 5], Sampling(max_tokens=31, temperature=0.9, seed=6, top_p=0.8, frequency_penalty=0.4, bias={3: 2.0})),
    ([9, 8], Sampling(max_tokens=31, temperature=1.2, seed=7, top_k=5, min_p=0.05, repetition_penalty=1.3)),
]

TRUNCATED = [
    ([40, 5], Sampling(max_tokens=41, temperature=0.9, seed=6, top_p=0.8)),
    ([9, 8], Sampling(max_tokens=41, temperature=1.2, seed=7, top_k=5)),
    ([11], Sampling(max_tokens=41, temperature=1.5, seed=8, min_p=0.2)),
    ([1, 2, 3], Sampling(max_tokens=41, temperature=0.7, seed=9, top_k=20, top_p=0.9, min_p=0.05)),
]


def context(requests, starts, vocab: int, active=None) -> Context:
    count = len(requests)
    return Context(
        slots=jnp.arange(count, dtype=jnp.int32),
        prefix_length=jnp.asarray(starts, jnp.int32),
        page_table=jnp.zeros((count, 1), jnp.int32),
        root=jnp.zeros(count, jnp.int32),
        active=jnp.asarray([True] * count if active is None else active),
        salt=jnp.zeros(count, jnp.uint32),
        sampling=sampling_rows(requests, vocab),
    )


def test_level_noise_equals_the_targets():
    """By the target's token ids, at the position of the level, times the temperature."""
    requests, starts = [request for _, request in REQUESTS[:4]], [5, 0, 17, 30]
    arguments, compiled = context(requests, starts, 48), jax.jit(level_noise, static_argnums=1)
    result = np.stack([compiled(arguments, level, jnp.asarray(MAP)) for level in (1, 2, 3)])
    for row, (request, start) in enumerate(zip(requests, starts, strict=True)):
        for level in (1, 2, 3):
            wanted = request.temperature * oracle.noise(request.seed, start + level, 48)[MAP]
            np.testing.assert_allclose(result[level - 1, row], wanted, rtol=1e-4, atol=1e-5)
    assert not np.any(result[:, 0]) and np.all(result[:, 1:] != 0), "the first is greedy"


def test_no_noise_without_active_sampling_rows():
    requests = [request for _, request in REQUESTS[:2]]
    silent = level_noise(context(requests, [3, 3], 48, active=[True, False]), 2, jnp.arange(48, dtype=jnp.int32))
    assert not np.any(np.asarray(silent))
    arguments = context(requests, [3, 3], 48), 2, jnp.arange(48, dtype=jnp.int32)
    lowered = jax.jit(level_noise, static_argnums=1).trace(*arguments)
    main = {at: lowered.lower(lowering_platforms=(at,)).as_text() for at in ("cpu", "cuda")}
    assert decisions(main["cpu"]), "the branch of the noise"
    assert not decisions(main["cuda"]), "a GPU's host has nothing to decide"


def test_truncated_tokens_are_drafted_last():
    """By the draft's distribution. Rows that do not truncate, and inactive rows, are unchanged."""
    requests = [request for _, request in TRUNCATED + REQUESTS[:3]] + [TRUNCATED[1][1]]
    arguments = context(requests, [4] * len(requests), 48, active=[True] * 7 + [False])
    logits = np.random.default_rng(2).normal(0, 2, (len(requests), 2, 48)).astype(np.float32)
    result = np.asarray(jax.jit(cut)(arguments, jnp.asarray(logits)))
    for row, request in enumerate(requests):
        for node in range(2):
            wanted = logits[row, node]
            if row < len(TRUNCATED):
                inside = np.isfinite(oracle.truncated_logits(wanted, request)[0])
                assert 0 < inside.sum() < 48
                wanted = np.where(inside, wanted, wanted - np.float32(OUTSIDE))
            np.testing.assert_array_equal(result[row, node], wanted)


def test_truncation_without_branches_on_a_gpu():
    arguments = context([request for _, request in TRUNCATED], [4] * 4, 48), 2, jnp.arange(48, dtype=jnp.int32)
    logits = jnp.zeros((4, 3, 48), jnp.float32)
    for chain in (True, False):
        traced = jax.jit(functools.partial(with_noise, chain=chain), static_argnums=1).trace(*arguments, logits)
        lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert not decisions(lowered) and "while" not in lowered


def test_trees_of_truncating_rows_have_no_noise():
    requests = [request for _, request in TRUNCATED + REQUESTS[1:3]]
    arguments, ids = context(requests, [4] * 6, 48), jnp.arange(48, dtype=jnp.int32)
    logits = jnp.asarray(np.random.default_rng(3).normal(0, 2, (6, 3, 48)), jnp.float32)
    result = jax.jit(functools.partial(with_noise, chain=False), static_argnums=1)(arguments, 2, ids, logits)
    np.testing.assert_array_equal(result[:4], logits[:4])
    noise = level_noise(arguments, 2, ids)
    np.testing.assert_allclose(result[4:], logits[4:] + noise[4:, None], rtol=1e-6, atol=1e-6)


def accepted_within(text: list[int], steps: int, proposed: set[int]) -> list[int]:
    """Tokens that each step emits if the draft is perfect, but proposes `known` tokens only."""
    emitted, at = [], 1  # the prefill draws the first token
    while at < len(text):
        right = 0
        while right < steps and at + right < len(text) and text[at + right] in proposed:
            right += 1
        emitted.append(min(right + 1, len(text) - at))
        at += emitted[-1]
    return emitted


@pytest.mark.parametrize(("mapped", "truncated"), [(False, False), (True, False), (False, True)])
def test_perfect_draft_is_accepted_at_any_temperature(mapped, truncated):
    """Greedy and sampling rows in one batch, or rows with top-k, top-p and min-p. With a token map, up to the first
    token outside of it."""
    toy = pair_model()
    config, params = perfect_head(toy)
    if mapped:
        config, params = with_token_map(config, params, toy.target, toy.params, MAP)
    drafter = eagle_drafter(toy.target, config, CHAIN)
    runner = Runner(toy, drafter, rows=4, pages_a_row=16, draft=params, config=StepConfig(drafter.width))
    requests = TRUNCATED if truncated else REQUESTS[:4]
    for (prompt, request), result in zip(requests, runner.generate(requests), strict=True):
        assert result.tokens == oracle.generate_plain(toy.logits, prompt, request).tokens
        proposed = set(MAP.tolist()) if mapped else set(range(toy.vocab))
        assert list(result.emitted) == accepted_within(result.tokens, CHAIN.steps, proposed)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("eagle3", CHAIN),
        *(pytest.param(kind, TREE, marks=pytest.mark.slow) for kind in ("eagle map", "eagle3", "standalone")),
    ],
)
def test_noise_takes_fewer_steps(kind, shape):
    """Texts equal plain decoding."""
    toy, params, make = right_often(kind)
    requests = [([token % toy.vocab for token in prompt], request) for prompt, request in REQUESTS]
    plain = [oracle.generate_plain(toy.logits, *request).tokens for request in requests]
    steps = {}
    for coupling in ("noise", "none"):
        drafter = make(shape, coupling=coupling)
        config = StepConfig(drafter.width)
        runner = Runner(toy, drafter, rows=len(requests), pages_a_row=16, draft=params, config=config)
        finished = runner.generate(requests)
        assert [result.tokens for result in finished] == plain
        steps[coupling] = [len(result.emitted) for result in finished]
    assert steps["noise"][0] == steps["none"][0], "greedy"
    assert sum(steps["noise"]) < sum(steps["none"]), steps


def test_accepted_drafts_equal_their_expectation():
    """Without coupling all seeds have one tree; the mean over many is the sum over nodes of the product of p along the
    path (docs/algorithms.md)."""
    rows, prompt, root, shape = 1024, [4, 9], 13, (3, 4, 12)
    toy, params, make = right_often("eagle")
    drafter = make(TreeShape(*shape), coupling="none")
    runner = Runner(
        toy, drafter, rows=rows, page_size=4, pages_a_row=2, chunk=2, draft=params,
        config=StepConfig(nodes=shape[2], trace=True),
    )  # fmt: skip
    for row in range(rows):
        runner.admit(row, prompt, Sampling(max_tokens=20, temperature=1.0, seed=row))
    runner.prefill([prompt] * rows, forced=root)
    output = runner.step([True] * rows)
    tree = jax.tree.map(lambda leaf: leaf[0], output.trace.tree)
    assert np.array_equal(output.trace.tree.tokens[:rows], np.broadcast_to(tree.tokens, (rows, shape[2])))
    plain = as_tree(output.trace.tree, 0)

    def probabilities(path: tuple[int, ...]) -> np.ndarray:
        p = np.exp(toy.logits([*prompt, root, *path]).astype(np.float64))
        return p / p.sum()

    expected = oracle.expected_accepted(plain, probabilities)
    accepted = output.accepted[:rows]
    error = accepted.std() / rows**0.5
    assert expected > 0.5
    assert abs(accepted.mean() - expected) < 4 * error, (accepted.mean(), expected, error)


@pytest.mark.parametrize("coupling", ["noise", "none"])
def test_option_reaches_drafter_and_report(coupling):
    toy, (config, params) = pair_model(), distilled("eagle3")
    chosen = options_of("eagle3", steps=2, coupling=coupling)
    speculation = make_speculation(chosen, target=toy.target, head=config)
    assert speculation.coupling == coupling
    engine = make_engine(toy, speculation, draft=params, warm=False)
    assert describe([engine], "m")["speculative_coupling"] == coupling
    assert make_speculation("NGRAM").coupling == "none"
