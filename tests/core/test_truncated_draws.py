"""GPU forms of draws: `argmax`, top-k and top-p by kernels, draws at all nodes at once, top-k in parts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import NO_PARENT, Tree
from specjax_kernels.sampling import argmax, in_prefix
from toy_models import as_arrays, history, random_tree, sampling_rows, some_sampling

from specjax.logprobs import top_in_parts
from specjax.sampling import DrawInputs
from specjax.verify import verify_tree

ROWS = 4
NEAR = 1e-5  # sums closer than this to what is needed may fall on either side in float32
truncated = jax.jit(in_prefix)


def by_sorting(logits: np.ndarray, top_k: int, top_p: float) -> tuple[np.ndarray, float]:
    """The remaining tokens, and the distance of the sum from another result."""
    order, near = np.argsort(-logits, kind="stable"), np.inf
    kept = order[: top_k if top_k > 0 else len(order)]
    if top_p < 1:
        sums = np.cumsum(np.exp(logits.astype(np.float64) - logits.max())[kept])
        need = float(top_p) * sums[-1]
        kept = kept[: int(np.sum(sums < need)) + 1]
        near = float(np.min(np.abs(sums - need)) / need)
    inside = np.zeros(len(logits), bool)
    inside[kept] = True
    return inside, near


def check_prefix(logits: np.ndarray, top_k: np.ndarray, top_p: np.ndarray) -> None:
    actual = np.asarray(truncated(logits, top_k, top_p))
    for row in range(len(logits)):
        expected, near = by_sorting(logits[row], int(top_k[row]), float(top_p[row]))
        if near > NEAR:
            np.testing.assert_array_equal(actual[row], expected, err_msg=f"top_k={top_k[row]}, top_p={top_p[row]}")


KINDS = {
    "normal": lambda rng, shape: rng.normal(0, 3, shape),
    "ties": lambda rng, shape: np.round(rng.normal(0, 2, shape)),
    "equal": lambda rng, shape: np.full(shape, rng.normal()),
    "masked": lambda rng, shape: np.where(rng.random(shape) < 0.6, -np.inf, rng.normal(0, 3, shape)),
    "floor": lambda rng, shape: np.where(rng.random(shape) < 0.9, -1e30, np.round(rng.normal(0, 3, shape))),
    "zeros": lambda rng, shape: rng.choice([-0.0, 0.0, -1e-30, 1e-30, 1.0], shape),
}


@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_equal_sorting(kind: str) -> None:
    """240 rows, in chunks that the vocabulary does not fill."""
    vocab, rng = 1100, np.random.default_rng(len(kind))
    for _ in range(10):
        logits = KINDS[kind](rng, (ROWS, vocab)).astype(np.float32)
        logits[:, rng.integers(vocab)] = 2.0  # a row has a token to draw
        top_k = rng.choice([-1, 0, 1, 2, 20, vocab // 2, vocab], ROWS).astype(np.int32)
        top_p = rng.choice([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0], ROWS).astype(np.float32)
        check_prefix(logits, top_k, top_p)


@functools.partial(jax.jit, static_argnames=("depth", "straight"))
def verdict(tree, logits, inputs, length, emitted, *, depth, straight, allowed=None):
    return verify_tree(tree, logits, inputs, length, emitted, depth=depth, straight=straight, allowed=allowed)


def follow(tree: Tree, drawn: np.ndarray) -> Tree:
    """The tree, with the draw of each visited node as a child."""
    tokens = list(tree.tokens)
    for node, parent in enumerate(tree.parents):
        siblings = [tokens[i] for i, other in enumerate(tree.parents) if other == parent]
        if parent != NO_PARENT and drawn[parent] >= 0 and drawn[parent] not in siblings:
            tokens[node] = int(drawn[parent])
    return Tree(tuple(tokens), tree.parents)


@pytest.mark.parametrize("grammar", [False, True])
def test_draws_at_all_nodes_equal_the_walk(grammar: bool) -> None:
    """Rows with any parameters, some greedy, some inactive."""
    vocab, width, depth, batch = 31, 6, 4, 4
    accepted = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        requests = [some_sampling(rng, vocab) for _ in range(batch)]
        prompts, texts = rng.integers(0, vocab, (2, batch, 5)).tolist()
        logits = rng.normal(0, 2, (batch, width, vocab)).astype(np.float32)
        if seed % 2:
            logits = np.round(logits)
        past = history(prompts, texts, vocab)
        active = jnp.asarray(rng.random(batch) < 0.8)
        inputs = DrawInputs(sampling_rows(requests, vocab), past, jnp.arange(batch, dtype=jnp.int32), active)
        length, emitted = jnp.full(batch, 9, jnp.int32), jnp.full(batch, 5, jnp.int32)
        allowed = rng.random((batch, width, vocab)) < 0.5
        allowed[:, :, 3] = True
        bits = jnp.asarray(np.stack([oracle.pack_bits(each) for each in allowed])) if grammar else None
        trees = [random_tree(0, width, vocab, rng, depth) for _ in range(batch)]

        run = functools.partial(verdict, depth=depth, allowed=bits)
        arguments = logits, inputs, length, emitted
        for _ in range(2):  # adds draws of the target as nodes: longer paths
            drawn = np.asarray(run(as_arrays(trees, width), *arguments, straight=False).drawn)
            trees = [follow(tree, drawn[row]) for row, tree in enumerate(trees)]
        walk, straight = (run(as_arrays(trees, width), *arguments, straight=straight) for straight in (False, True))
        rows = np.flatnonzero(active)
        for name in ("path", "accepted", "tokens"):
            np.testing.assert_array_equal(getattr(straight, name)[rows], getattr(walk, name)[rows], err_msg=name)
        visited = (np.asarray(walk.drawn) >= 0) & np.asarray(active)[:, None]
        np.testing.assert_array_equal(np.asarray(straight.drawn)[visited], np.asarray(walk.drawn)[visited])
        accepted += int(np.asarray(walk.accepted)[rows].sum())
    assert accepted > 12


@pytest.mark.parametrize("count", [3, 16, 20, 35])
def test_top_k_in_parts(count: int) -> None:
    find = jax.jit(functools.partial(top_in_parts, count=count))
    for kind, make in KINDS.items():
        values = make(np.random.default_rng(count), (2, 3, 120)).astype(np.float32)
        best, ids = find(values)
        order = np.argsort(-values, axis=-1, kind="stable")[..., :count]
        np.testing.assert_array_equal(ids, order, err_msg=kind)
        np.testing.assert_array_equal(best, np.take_along_axis(values, order, axis=-1), err_msg=kind)


def rows(kind: str) -> np.ndarray:
    rng = np.random.default_rng(7)
    x = rng.normal(size=(3, 5, 301)).astype(np.float32)
    match kind:
        case "equal":
            return rng.integers(0, 4, x.shape).astype(np.float32)
        case "nan":
            x[rng.random(x.shape) < 0.01] = np.nan
        case "infinite":
            x[0, 0], x[0, 1], x[1, 2, 17], x[2, 3, 5:9] = -np.inf, np.inf, np.inf, -np.inf
        case "zeros":
            x = np.where(rng.random(x.shape) < 0.5, np.float32(0), np.float32(-0.0))
    return x


@pytest.mark.parametrize("kind", ["any", "equal", "nan", "infinite", "zeros"])
def test_argmax(kind):
    x = rows(kind)
    actual = np.asarray(jax.jit(argmax)(jnp.asarray(x)))
    assert actual.dtype == np.int32
    np.testing.assert_array_equal(actual, np.argmax(x, axis=-1))
    np.testing.assert_array_equal(np.asarray(argmax(jnp.asarray(x[0, 0]))), np.argmax(x[0, 0]))


def test_one_reduction_on_gpus():
    text = jax.jit(argmax).trace(jnp.asarray(rows("any"))).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.reduce") == 1
