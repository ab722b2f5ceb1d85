"""Verdicts against the oracle's walk. test_thresholds.py tests their distribution."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from oracle import Sampling, Tree
from toy_models import as_arrays, history, random_tree, sampling_rows, some_sampling

from specjax.sampling import DrawInputs
from specjax.tree import NO_TOKEN
from specjax.verify import find_verdict, verify_tree

BATCH, WIDTH, DEPTH, VOCABULARY = 4, 9, 5, 6
NEAR = 1e-4

rngs = st.integers(0, 2**32).map(np.random.default_rng)
verify = jax.jit(verify_tree, static_argnames="depth")


@functools.partial(jax.jit, static_argnums=2)
def judge(tree, drawn, depth):
    return find_verdict(tree, drawn, depth)


def some_trees(rng, count=BATCH):
    sizes = rng.integers(1, WIDTH + 1, count)
    return [random_tree(int(rng.integers(VOCABULARY)), int(size), VOCABULARY, rng, DEPTH) for size in sizes]


def check_verdict(verdict, row, nodes, drawn):
    """``nodes`` is the oracle's walk, ``drawn`` maps a node to its draw."""
    count = len(nodes)
    assert int(verdict.accepted[row]) == count - 1
    assert verdict.path[row].tolist() == nodes + [0] * (DEPTH + 1 - count)
    assert verdict.tokens[row].tolist() == [drawn[node] for node in nodes] + [NO_TOKEN] * (DEPTH + 1 - count)


@settings(max_examples=200)
@given(rngs)
def test_any_draws(rng):
    """Half of the draws follow a child."""
    batch = some_trees(rng)
    drawn = rng.integers(0, VOCABULARY, (BATCH, WIDTH)).astype(np.int32)
    for row, tree in enumerate(batch):
        for child in range(1, len(tree.tokens)):
            if rng.random() < 0.5:
                drawn[row, tree.parents[child]] = tree.tokens[child]
    verdict = judge(as_arrays(batch, WIDTH), jnp.asarray(drawn), DEPTH)
    for row, tree in enumerate(batch):
        check_verdict(verdict, row, oracle.walk(tree, drawn[row]), drawn[row])


def test_invalid_nodes():
    """Node 1 was not drawn: NO_TOKEN, which is also the token of the invalid node 2."""
    tree = as_arrays([Tree((0, 3), (-1, 0))], 3)
    tree = tree._replace(parents=tree.parents.at[0, 2].set(1), depth=tree.depth.at[0, 2].set(2))
    verdict = judge(tree, jnp.array([[3, NO_TOKEN, 5]], jnp.int32), 2)
    assert verdict.accepted.tolist() == [1]
    assert verdict.path.tolist() == [[0, 1, 0]]


def requests_for(rng, **fixed):
    requests = [some_sampling(rng, VOCABULARY, **fixed) for _ in range(BATCH)]
    prompts = rng.integers(0, VOCABULARY, (BATCH, 4)).tolist()
    generated = [rng.integers(0, VOCABULARY, int(rng.integers(1, 5))).tolist() for _ in range(BATCH)]
    return requests, prompts, generated


def run_verify(batch, logits, requests, prompts, generated, allowed=None, active=None):
    active = jnp.ones(len(batch), bool) if active is None else jnp.asarray(active)
    past = history(prompts, generated, VOCABULARY)
    slots = jnp.arange(len(batch), dtype=jnp.int32)
    inputs = DrawInputs(sampling_rows(requests, VOCABULARY), past, slots, active)
    emitted = jnp.asarray([len(g) for g in generated], jnp.int32)
    prefix = jnp.asarray([len(p) + len(g) - 1 for p, g in zip(prompts, generated, strict=True)], jnp.int32)
    if allowed is not None:
        allowed = jnp.asarray(np.stack([oracle.pack_bits(rows) for rows in allowed]))
    return verify(as_arrays(batch, WIDTH), jnp.asarray(logits), inputs, prefix, emitted, depth=DEPTH, allowed=allowed)


def expected_walk(tree, logits, request, prompt, generated, allowed=None):
    """The oracle's nodes, the draws at all nodes, and the smallest gap on the path."""
    draws = []
    for node in range(len(tree.tokens)):
        text, mask = generated + oracle.path_tokens(tree, node), None if allowed is None else allowed[node]
        draws.append(oracle.draw(logits[node], request, prompt, text, mask))
    drawn = [d.token for d in draws]
    nodes = oracle.walk(tree, drawn)
    return nodes, drawn, min(draws[node].gap for node in nodes)


def check_against_oracle(rng, with_grammar, **fixed):
    batch, (requests, prompts, generated) = some_trees(rng), requests_for(rng, **fixed)
    logits = rng.normal(0, 1, (BATCH, WIDTH, VOCABULARY)).astype(np.float32)
    for row, tree in enumerate(batch):  # drafted tokens are likelier
        for child in range(1, len(tree.tokens)):
            logits[row, tree.parents[child], tree.tokens[child]] += 1.5
    allowed = None
    if with_grammar:
        allowed = rng.random((BATCH, WIDTH, VOCABULARY)) < 0.7
        allowed[..., 2] = True
        requests = [r if 2 not in r.stop_ids else Sampling(seed=5, temperature=1.0) for r in requests]
    verdict = run_verify(batch, logits, requests, prompts, generated, allowed)
    lengths = []
    for row, tree in enumerate(batch):
        grammar = None if allowed is None else allowed[row]
        nodes, drawn, gap = expected_walk(tree, logits[row], requests[row], prompts[row], generated[row], grammar)
        if gap >= NEAR:
            check_verdict(verdict, row, nodes, drawn)
            lengths.append(len(nodes))
    return lengths


@pytest.mark.parametrize("with_grammar", [False, True])
@settings(max_examples=100)
@given(rng=rngs)
def test_any_parameters(rng, with_grammar):
    check_against_oracle(rng, with_grammar)


def test_walks_are_long():
    lengths = [n for seed in range(20) for n in check_against_oracle(np.random.default_rng(seed), False)]
    assert np.mean(lengths) > 1.8
    assert max(lengths) >= 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_on_the_path(temperature):
    """The root is emitted and min_tokens is 3: the stop id 0 may be drawn from depth 2 on."""
    tree = oracle.chain_tree(1, [2, 3, 4])
    logits = np.full((1, WIDTH, VOCABULARY), -50, np.float32)
    logits[..., 0] = 50
    for node, token in enumerate([2, 3, 4]):
        logits[0, node, token] = 20
    request = Sampling(temperature=temperature, stop_ids=(0,), min_tokens=3)
    verdict = run_verify([tree], logits, [request], [[1, 1]], [[1]])
    assert verdict.tokens[0].tolist() == [2, 3, 0, NO_TOKEN, NO_TOKEN, NO_TOKEN]
    assert verdict.path[0].tolist()[:3] == [0, 1, 2]


@settings(max_examples=25)
@given(rngs)
def test_batch_independence(rng):
    batch, (requests, prompts, generated) = some_trees(rng), requests_for(rng)
    logits = rng.normal(0, 1, (BATCH, WIDTH, VOCABULARY)).astype(np.float32)
    together = run_verify(batch, logits, requests, prompts, generated)
    alone = run_verify(batch, logits, requests, prompts, generated, active=[True, False, False, False])
    copies = run_verify([batch[0]] * 4, logits[[0] * 4], [requests[0]] * 4, [prompts[0]] * 4, [generated[0]] * 4)
    for leaf in ("path", "accepted", "tokens"):
        expected = getattr(together, leaf)[0].tolist()
        assert getattr(alone, leaf)[0].tolist() == expected
        assert getattr(copies, leaf).tolist() == [expected] * 4
