"""Chains, expansion, reranking and ancestors against the oracle."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from eagle_oracle import check_tree, grow_tree
from hypothesis import given, settings
from oracle import NO_PARENT, Tree
from specjax_kernels import pack_bits
from toy_models import as_arrays, as_tree, random_tree

from specjax import tree as trees

VOCABULARY = 6
WIDTH = 9

#      the ─┬─ cat ── sat     in `specjax.tree`'s docstring
#           └─ dog
EXAMPLE = Tree((5, 1, 2, 3), (-1, 0, 0, 1))


@st.composite
def batches(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return [random_tree(int(rng.integers(VOCABULARY)), int(rng.integers(1, WIDTH + 1)), VOCABULARY, rng) for _ in "abc"]


def check_padding(tree):
    """Invalid nodes come last and hold sentinels."""
    valid = np.asarray(tree.valid)
    assert (np.sort(valid, axis=1)[:, ::-1] == valid).all()
    assert valid[:, 0].all()
    for leaf, fill in ((tree.tokens, trees.NO_TOKEN), (tree.parents, NO_PARENT), (tree.depth, 0)):
        assert (np.asarray(leaf)[~valid] == fill).all()


def check_derived(tree):
    """Depths are right, and the nodes form a valid tree."""
    for row in range(tree.tokens.shape[0]):
        actual = as_tree(tree, row)
        assert oracle.problems(actual) == []
        assert np.asarray(tree.depth)[row, : len(actual.tokens)].tolist() == oracle.depths(actual)
    check_padding(tree)


def test_ancestor_mask_of_the_example():
    mask = trees.ancestor_mask(as_arrays([EXAMPLE], 6))[0]
    expected = np.eye(6, dtype=bool)
    expected[1:4, 0] = expected[3, 1] = True
    np.testing.assert_array_equal(mask, expected)
    assert np.asarray(pack_bits(mask))[:, 0].tolist() == [1, 3, 5, 11, 16, 32]


@given(batches())
def test_ancestor_mask(batch):
    mask = np.asarray(trees.ancestor_mask(as_arrays(batch, WIDTH)))
    for row, tree in enumerate(batch):
        expected = np.eye(WIDTH, dtype=bool)
        expected[: len(tree.tokens), : len(tree.tokens)] = oracle.ancestor_matrix(tree)
        np.testing.assert_array_equal(mask[row], expected)
        np.testing.assert_array_equal(pack_bits(jnp.asarray(mask[row])), oracle.pack_bits(expected))


@pytest.mark.parametrize("width", [2, 3, 32, 33, 65])
def test_ancestor_mask_of_chains(width):
    tree = oracle.chain_tree(0, [1] * (width - 1))
    mask = trees.ancestor_mask(as_arrays([tree], width))
    np.testing.assert_array_equal(mask[0], np.tri(width, dtype=bool))
    np.testing.assert_array_equal(pack_bits(mask[0]), oracle.pack_bits(np.tri(width, dtype=bool)))


def test_root_only():
    tree = trees.root_only(jnp.array([4, 2], jnp.int32))
    check_derived(tree)
    assert [as_tree(tree, row) for row in (0, 1)] == [Tree((t,), (NO_PARENT,), (0.0,)) for t in (4, 2)]


def test_chain_of_any_valid_length():
    tokens, scores = jnp.array([[1, 2, 3]] * 4, jnp.int32), jnp.array([[-1.0, -2.0, -4.0]] * 4)
    tree = trees.chain(jnp.array([9, 8, 7, 6], jnp.int32), tokens, jnp.array([0, 1, 2, 3], jnp.int32), scores)
    check_derived(tree)
    for row, root in enumerate((9, 8, 7, 6)):
        expected = oracle.chain_tree(root, [1, 2, 3][:row])
        assert as_tree(tree, row) == Tree(expected.tokens, expected.parents, (0.0, -1.0, -2.0, -4.0)[: row + 1])
        assert (np.asarray(tree.scores)[row, row + 1 :] == -np.inf).all()


def with_falling_scores(tree, rng):
    """Adds cumulative scores, some tied."""
    scores = [0.0]
    for parent in tree.parents[1:]:
        scores.append(scores[parent] - float(rng.choice([0.0, 0.25, 0.5, 2.0])))
    return Tree(tree.tokens, tree.parents, tuple(scores))


def best_by_sorting(tree, count):
    """The root and the first nodes by (score descending, index), in tree order."""
    order = sorted(range(1, len(tree.tokens)), key=lambda i: (-tree.scores[i], i))
    kept = [0, *sorted(order[: max(count, 1) - 1])]
    parents = [NO_PARENT, *(kept.index(tree.parents[i]) for i in kept[1:])]
    return Tree(tuple(tree.tokens[i] for i in kept), tuple(parents), tuple(tree.scores[i] for i in kept))


@given(batches(), st.integers(0, 2**32), st.integers(0, WIDTH + 1), st.integers(1, WIDTH + 1))
def test_best_nodes(batch, seed, count, width):
    batch = [with_falling_scores(tree, np.random.default_rng(seed + i)) for i, tree in enumerate(batch)]
    counts = [count, max(count - 1, 0), WIDTH]
    tree = best_nodes(as_arrays(batch, WIDTH, scored=True), jnp.asarray(counts, jnp.int32), width)
    assert tree.width == min(width, WIDTH)
    check_derived(tree)
    for row, before in enumerate(batch):
        assert as_tree(tree, row) == best_by_sorting(before, min(counts[row], width))


best_nodes = jax.jit(trees.best_nodes, static_argnums=2)


@pytest.mark.parametrize("count", [0, 2, 9])
def test_first_nodes_of_chains(count):
    """Scores that do not grow, with ties and invalid nodes."""
    scores = np.array([[-0.5, -0.5, -2.0, -2.0], [-1.0, -np.inf, -np.inf, -np.inf], [0.0, 0.0, 0.0, -1.0]], np.float32)
    tokens = jnp.arange(12, dtype=jnp.int32).reshape(3, 4)
    tree = trees.chain(jnp.array([7, 8, 9], jnp.int32), tokens, jnp.array([4, 1, 3], jnp.int32), jnp.asarray(scores))
    counts = jnp.array([count, 5, max(count - 1, 0)], jnp.int32)
    for kept, best in zip(trees.first_nodes(tree, counts), trees.best_nodes(tree, counts), strict=True):
        np.testing.assert_array_equal(kept, best)


def test_best_path_over_shallow_nodes():
    """A cut to four nodes keeps a likely path of four rather than shallow nodes."""
    tree = Tree((9, 1, 2, 3, 4, 5), (-1, 0, 0, 0, 2, 4), (0.0, -5.0, -0.1, -4.0, -0.2, -0.3))
    cut = best_nodes(as_arrays([tree], 6, scored=True), jnp.array([6], jnp.int32), 4)
    assert as_tree(cut, 0) == Tree((9, 2, 4, 5), (-1, 0, 1, 2), tuple(np.float32([0, -0.1, -0.2, -0.3]).tolist()))


def test_nodes_without_parent_are_dropped():
    """Scores that grow along a path (a drafter's error) must not give a node another parent."""
    tree = Tree((9, 1, 2, 3), (-1, 0, 1, 0), (0.0, -5.0, -0.1, -0.2))
    cut = best_nodes(as_arrays([tree], 4, scored=True), jnp.array([3], jnp.int32), 4)
    assert np.asarray(cut.valid)[0].sum() == 2
    assert sorted(np.asarray(cut.tokens)[0].tolist()) == [-1, -1, 3, 9]


# EAGLE-2 expansion with random log-probabilities.


def log_prob_table(seed, tied):
    """Log-probabilities [depth, V, V] after a token at a depth."""
    rng = np.random.default_rng(seed)
    table = rng.choice([0.0, -0.5, -1.0], (4, VOCABULARY, VOCABULARY)) if tied else -rng.exponential(1, (4, 6, 6))
    return table.astype(np.float32)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def expand(root, table, k, depth, width):
    batch = root.shape[0]
    scores, last = jnp.zeros((batch, 1)), root[:, None]
    parents, levels = jnp.full((batch, 1), NO_PARENT, jnp.int32), []
    for level in range(depth):
        log_probs = table[jnp.arange(batch)[:, None], level, last]
        tokens, reached = trees.top_k_children(scores, log_probs, k)
        flat = tokens.reshape(batch, -1), jnp.repeat(parents, k, axis=1), reached.reshape(batch, -1)
        first = sum(part[0].shape[1] for part in levels)
        levels.append((flat[0], flat[1], jnp.full_like(flat[0], level + 1), flat[2]))
        scores, index = jax.lax.top_k(flat[2], k)
        last, parents = jnp.take_along_axis(flat[0], index, axis=1), index + jnp.int32(first)
    pool = trees.Pool(*(jnp.concatenate(leaves, axis=1) for leaves in zip(*levels, strict=True)))
    return trees.rerank(root, pool, width)


def expected_tree(root, table, k, depth, width):
    return grow_tree(lambda path: table[len(path), path[-1] if path else root], root, depth, k, width)


SHAPES = [(1, 3, 4), (3, 4, 28), (4, 1, 5), (2, 3, 11), (2, 2, 1)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("k", "depth", "width"), SHAPES)
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32))
def test_top_k_expansion(seed, k, depth, width, tied):
    tables = [log_prob_table(seed + row, tied) for row in range(2)]
    tree = expand(jnp.array([0, 3], jnp.int32), jnp.asarray(np.stack(tables)), k, depth, width)
    check_derived(tree)
    for row, root in enumerate((0, 3)):
        check_tree(tree, row, expected_tree(root, tables[row], k, depth, width))


def test_vocabulary_smaller_than_k():
    tokens, scores = trees.top_k_children(jnp.zeros((1, 1)), jnp.array([[[-1.0, -3.0, -2.0]]]), 5)
    assert np.asarray(tokens)[0, 0, :3].tolist() == [0, 2, 1]
    assert np.asarray(scores)[0, 0].tolist() == [-1.0, -2.0, -3.0, -np.inf, -np.inf]
    pool = trees.Pool(tokens[:, 0], jnp.full((1, 5), NO_PARENT, jnp.int32), jnp.ones((1, 5), jnp.int32), scores[:, 0])
    tree = trees.rerank(jnp.array([7], jnp.int32), pool, 6)
    check_derived(tree)
    assert as_tree(tree, 0) == Tree((7, 0, 2, 1), (NO_PARENT, 0, 0, 0), (0.0, -1.0, -2.0, -3.0))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="checks XLA:CPU")
@pytest.mark.parametrize("normalised", [True, False])
def test_no_sort_of_the_vocabulary_on_cpus(normalised):
    children = jax.jit(functools.partial(trees.top_k_children, count=2, normalised=normalised))
    program = children.lower(jnp.zeros((1, 2)), jnp.zeros((1, 2, 8192))).compile().as_text()
    assert "TopK" in program and " sort(" not in program


def test_invalid_candidates_end_up_last():
    """Candidates 0 and 3 are invalid; 4 is a child of 2."""
    pool = trees.Pool(
        tokens=jnp.array([[9, 1, 2, 9, 4]], jnp.int32),
        parents=jnp.array([[-1, -1, -1, 1, 2]], jnp.int32),
        depth=jnp.array([[1, 1, 1, 2, 2]], jnp.int32),
        scores=jnp.array([[-jnp.inf, -3.0, -1.0, -jnp.inf, -2.0]]),
    )
    tree = trees.rerank(jnp.array([0], jnp.int32), pool, 5)
    check_derived(tree)
    assert as_tree(tree, 0) == Tree((0, 1, 2, 4), (-1, 0, 0, 2), (0.0, -3.0, -1.0, -2.0))
    pool = trees.Pool(*(jnp.zeros((1, 4), dtype) for dtype in (jnp.int32, jnp.int32, jnp.int32, jnp.float32)))
    with pytest.raises(ValueError, match=r"6 nodes needs 5 .* has 4"):
        trees.rerank(jnp.zeros(1, jnp.int32), pool, 6)
