"""Log-probabilities and the trace of steps against direct forwards of a tiny Llama."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import Sampling
from specjax_kernels import CAUSAL
from toy_models import Runner, as_tree, listed_drafter, random_tree, tiny_llama

from specjax import PoolShape, StepConfig, init_cache
from specjax.drafters import Ngram, ngram_drafter, none_drafter
from specjax.tree import NO_TOKEN
from specjax.verify import TOP_LOGPROBS

WIDTH, DEPTH = 6, 4
SMALL = Ngram(nodes=WIDTH, max_match=3, branch_length=DEPTH, capacity=1024)
LISTED = [random_tree(0, WIDTH, 31, np.random.default_rng(seed), DEPTH) for seed in range(11)]
DRAFTERS = {
    "none": functools.cache(none_drafter),
    "listed": functools.cache(lambda: listed_drafter(LISTED, WIDTH, DEPTH)),
    "ngram": functools.cache(lambda: ngram_drafter(SMALL)),
}
WIDTHS = {"none": (1,), "listed": (WIDTH,), "ngram": (1, WIDTH)}  # each is a forward to compile
# The second request's parameters change what is drawn, never the logprobs. Both repeat themselves, so drafts are taken.
REQUESTS = [
    ([3, 1, 4, 3, 1, 4, 3], Sampling(max_tokens=30)),
    ([5, 6, 5, 6], Sampling(max_tokens=30, temperature=0.7, seed=3, top_k=9, bias={7: 9.0, 8: 9.0, 9: 9.0})),
]


@functools.cache
def toy():
    return tiny_llama()


def raw_logprobs(tokens: list[int]) -> np.ndarray:
    """[X, V]: log-softmax after each token, from one forward over the whole text, without pages."""
    target, params = toy().target, toy().params
    padded = np.zeros((1, 64), np.int32)
    padded[0, : len(tokens)] = tokens
    logits = _forward(target, params, jnp.asarray(padded))
    return np.asarray(jax.nn.log_softmax(logits, axis=-1))[0, : len(tokens)]


@functools.partial(jax.jit, static_argnums=0)
def _forward(target, params, tokens):
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    cache, zero = init_cache(target.pages, PoolShape(1, 1)), jnp.zeros(1, jnp.int32)
    output = target.forward(params, target.embed(params, tokens), positions, CAUSAL, cache, zero[None], zero)
    return target.unembed(params, output.hidden)


def check_logprobs(found, row: int, index: int, token: int, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found.drawn[row, index], expected[token], atol=1e-4)
    top, ids = found.top[row, index], found.top_ids[row, index]
    assert len(top) == TOP_LOGPROBS == 20
    assert (np.diff(top) <= 0).all()
    assert len(set(ids.tolist())) == TOP_LOGPROBS
    np.testing.assert_allclose(top, np.sort(expected)[::-1][:TOP_LOGPROBS], atol=1e-4)
    np.testing.assert_allclose(top, expected[ids], atol=1e-4)


def new_runner(drafter: str, trace: bool) -> Runner:
    return Runner(toy(), DRAFTERS[drafter](), config=StepConfig(WIDTHS[drafter], trace=trace))


@pytest.mark.parametrize("drafter", ["listed", "ngram"])
def test_logprobs_and_trace_of_every_step(drafter):
    runner = new_runner(drafter, trace=True)
    for slot, (prompt, request) in enumerate(REQUESTS):
        runner.admit(slot, prompt, request, logprobs=True)
    prompts = [prompt for prompt, _ in REQUESTS]
    first = runner.prefill(prompts)
    assert first.trace is None
    texts = []
    for row, prompt in enumerate(prompts):
        token = int(first.tokens[row, 0])
        check_logprobs(first.logprobs, row, 0, token, raw_logprobs(prompt)[-1])
        texts.append([*prompt, token])

    running, accepted, widths = [True, True], [], set()
    while any(running):
        output = runner.step([*running, False])
        trace, active = output.trace, running
        widths.add(max(int(trace.tree.valid[row].sum()) for row in range(3)))
        for row in (row for row in range(2) if active[row]):
            count, text = int(output.emitted[row]), texts[row]
            tree, drawn = as_tree(trace.tree, row), trace.drawn[row].tolist()
            assert tree.tokens[0] == text[-1]  # the root is the last emitted token
            assert (trace.tree.tokens[row, len(tree.tokens) :] == NO_TOKEN).all()

            # The walk that the draws describe is the path, and its draws are the tokens.
            nodes = oracle.walk(tree, drawn)
            assert trace.accepted[row] == len(nodes) - 1
            assert trace.path[row].tolist() == nodes + [0] * (trace.path.shape[1] - len(nodes))
            assert [drawn[node] for node in nodes[:count]] == output.tokens[row, :count].tolist()
            assert count == len(nodes) or output.finish[row] != 0
            assert output.accepted[row] == count - 1

            expected = raw_logprobs([*text, *output.tokens[row, :count].tolist()])
            for index in range(count):
                token = int(output.tokens[row, index])
                check_logprobs(output.logprobs, row, index, token, expected[len(text) - 1 + index])
            text.extend(output.tokens[row, :count].tolist())
            accepted.append(count - 1)
        running = [alive and output.finish[row] == 0 for row, alive in enumerate(running)]
    assert [len(text) - len(prompt) for text, prompt in zip(texts, prompts, strict=True)] == [30, 30]
    assert max(accepted) > 0
    if drafter == "ngram":
        assert 1 in widths and max(widths) > 1  # the narrow step reports too


def test_reports_change_no_token():
    plain, reporting = (new_runner("listed", trace=asked).generate(REQUESTS, logprobs=asked) for asked in (False, True))
    assert plain == reporting


def test_logprobs_are_computed_for_batches_that_ask():
    runner = new_runner("none", trace=False)
    for slot, (prompt, request) in enumerate(REQUESTS):
        runner.admit(slot, prompt, request, logprobs=slot == 1)
    prompts = [prompt for prompt, _ in REQUESTS]
    first = runner.prefill(prompts)
    assert (first.logprobs.drawn[1] < 0).all()
    assert (runner.step([True, True, False]).logprobs.drawn[1] < 0).all()
    without = runner.step([True, False, False])
    assert without.emitted[0] == 1 and without.trace is None
    assert not any(np.any(leaf) for leaf in without.logprobs)
