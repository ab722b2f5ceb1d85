"""Draft trees of fixed shape: chains, top-k expansion, rerank, and the ancestor mask.

A tree of N nodes: node 0 is the root (the last emitted token, whose keys and values are not committed yet), parents
come before children, siblings differ, valid nodes come before invalid ones. Knows nothing of models or drafters.

    tokens   the  | cat  dog | sat          the ─┬─ cat ── sat
    parents   -1  |  0    0  |  1                └─ dog
    depth      0  |  1    1  |  2
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float32, Int32
from specjax_kernels import top_k

from specjax.types import PerRequest

# Sentinels to compare with, never indices to write at.
NO_PARENT = -1  # the root's parent, and every invalid node's
NO_TOKEN = -1  # an invalid node's token, and a draw that was not needed; equal to no token id


class DraftTree(NamedTuple):
    """Trees of N nodes for B requests, node 0 the root.

    Attributes:
        tokens: int32 [B, N]. NO_TOKEN where invalid.
        parents: int32 [B, N]. Node indices; NO_PARENT for the root and where invalid.
        depth: int32 [B, N]. 0 for the root and where invalid.
        valid: bool [B, N]. The first nodes of each tree, the root always.
        scores: float32 [B, N]. Cumulative log-probability under the draft, 0 for the root; must not grow along a path.
    """

    tokens: Int32[Array, "B N"]
    parents: Int32[Array, "B N"]
    depth: Int32[Array, "B N"]
    valid: Bool[Array, "B N"]
    scores: Float32[Array, "B N"]

    @property
    def width(self) -> int:
        return self.tokens.shape[1]


class Pool(NamedTuple):
    """Q candidates for a tree's nodes below the root, parents before children.

    Attributes:
        tokens: int32 [B, Q]. The candidates' token ids.
        parents: int32 [B, Q]. Indices into the pool; NO_PARENT: a child of the root.
        depth: int32 [B, Q]. 1 for a child of the root.
        scores: float32 [B, Q]. Cumulative log-probability; -inf: not a candidate.
    """

    tokens: Int32[Array, "B Q"]
    parents: Int32[Array, "B Q"]
    depth: Int32[Array, "B Q"]
    scores: Float32[Array, "B Q"]


def root_only(root: PerRequest) -> DraftTree:
    """A tree of one node: plain decoding."""
    zeros = jnp.zeros_like(root)[:, None]
    return DraftTree(root[:, None], zeros + NO_PARENT, zeros, zeros == 0, zeros.astype(jnp.float32))


def roots(root: PerRequest, width: int) -> DraftTree:
    """Trees of `width` nodes of which the root alone is valid."""
    tree = root_only(root)
    return _masked(DraftTree(*(jnp.pad(field, ((0, 0), (0, width - 1))) for field in tree)))


def _masked(nodes: DraftTree) -> DraftTree:
    """Sentinels in the fields of invalid nodes."""
    nothing = NO_TOKEN, NO_PARENT, 0, False, -jnp.inf
    return DraftTree(*(jnp.where(nodes.valid, *pair) for pair in zip(nodes, nothing, strict=True)))


def _below(root: PerRequest, nodes: DraftTree) -> DraftTree:
    """The root, then these nodes."""
    return DraftTree(*(jnp.concatenate(pair, axis=1) for pair in zip(root_only(root), _masked(nodes), strict=True)))


def chain(
    root: PerRequest, tokens: Int32[Array, "B D"], length: PerRequest, scores: Float32[Array, "B D"]
) -> DraftTree:
    """One child per node: root -> tokens[:, 0] -> tokens[:, 1] ... of which the first `length[b]` are valid.

    `scores` are cumulative log-probabilities. Result: [B, D + 1] nodes.
    """
    index = jnp.arange(1, tokens.shape[1] + 1, dtype=jnp.int32)[None, :]
    return _below(root, DraftTree(tokens, index - 1, index, index <= length[:, None], scores))


def top_k_children(
    scores: Float32[Array, "B k"], log_probs: Float32[Array, "B k W"], count: int, *, normalised: bool = True
) -> tuple[Int32[Array, "B k {count}"], Float32[Array, "B k {count}"]]:
    """EAGLE-2's expansion: each beam node's `count` likeliest continuations and their cumulative scores.

    Ties go to the lower token id (`jax.lax.top_k`). Where the vocabulary has fewer than `count` tokens the rest score
    -inf and must not become nodes. If not `normalised`, `log_probs` are logits, and only the best are made
    log-probabilities. Source: SafeAILab/EAGLE `topK_genrate`.
    """
    available = min(count, log_probs.shape[-1])
    best, tokens = top_k(log_probs, available)
    if not normalised:
        # Not `best[:, :, :1]`: XLA:CPU would no longer see a top-k in a slice of it, and sort the vocabulary.
        largest = jnp.max(best, axis=-1, keepdims=True)
        best = best - largest - log_total(log_probs, largest)
    pad = ((0, 0), (0, 0), (0, count - available))
    best = jnp.pad(best, pad, constant_values=-jnp.inf)
    return jnp.pad(tokens, pad), scores[:, :, None] + best


def log_total(logits: Float32[Array, "B k W"], largest: Float32[Array, "B k 1"]) -> Float32[Array, "B k 1"]:
    """log(sum(exp(logits - largest))): a logit minus `largest` minus this is its log-probability.

    `jax.nn.log_softmax` would write all W, and find the largest again.
    """
    return jnp.log(jnp.sum(jnp.exp(logits - largest), axis=-1, keepdims=True))


def rerank(root: PerRequest, pool: Pool, width: int) -> DraftTree:
    """The tree of the `width - 1` best candidates, put back in pool order (parents first), the root prepended.

    Scores never grow along a path, and at a tie the lower index (the parent) wins, so the best are closed under
    parents. With fewer candidates than places the last nodes are invalid.
    """
    places = width - 1
    if places > pool.tokens.shape[1]:
        raise ValueError(
            f"a tree of {width} nodes needs {places} candidates, but the pool has {pool.tokens.shape[1]}: "
            "ask for fewer draft tokens, or for more steps or a larger top-k"
        )
    if places == 0:
        return root_only(root)
    best, index = jax.lax.top_k(pool.scores, places)
    valid = best > -jnp.inf
    # Invalid places sort behind every valid one, so valid nodes are a prefix.
    order = jnp.argsort(jnp.where(valid, index, pool.tokens.shape[1] + index), axis=1)
    index, valid = jnp.take_along_axis(index, order, axis=1), jnp.take_along_axis(valid, order, axis=1)
    tokens, parent, depth, scores = (jnp.take_along_axis(values, index, axis=1) for values in pool)
    # A candidate's place in the tree is the place that holds its pool index, plus one for the root.
    is_parent = valid[:, None, :] & (index[:, None, :] == parent[:, :, None])
    place = jnp.where(parent == NO_PARENT, 0, jnp.argmax(is_parent, axis=2).astype(jnp.int32) + 1)
    return _below(root, DraftTree(tokens, place, depth, valid, scores))


def ranks(tree: DraftTree) -> Int32[Array, "B N"]:
    """The place of each node in its tree by score, from 0: the root, then the best first, invalid nodes last. Of equal
    scores the lower index (the parent) is first."""
    index = jnp.arange(tree.width, dtype=jnp.int32)
    scores = jnp.where(tree.valid, tree.scores, -jnp.inf).at[:, 0].set(jnp.inf)
    mine, other = scores[:, :, None], scores[:, None, :]
    # Counted, not sorted: [B, N, N] comparisons are one small kernel.
    before = (other > mine) | ((other == mine) & (index[None, :] < index[:, None])[None])
    return jnp.sum(before, axis=2, dtype=jnp.int32)


def best_nodes(tree: DraftTree, count: PerRequest, width: int | None = None) -> DraftTree:
    """The root and the best of the other nodes, ``count[b]`` in all (at least 1, at most `width`), in their order.

    The best are closed under parents, as in `rerank`. If a drafter's scores grow along a path, the result can still be
    verified but need not be the best; a node whose parent is missing becomes invalid. The result has `width` nodes,
    None: as many as `tree`.

    Example: nodes root, a (-2.0), b (-0.1), c (-0.2, child of b), count 3 -> root, b, c.
    """
    width = tree.width if width is None else min(width, tree.width)
    index = jnp.arange(tree.width, dtype=jnp.int32)
    kept = tree.valid & (ranks(tree) < jnp.clip(count, 1, width)[:, None])
    parent = jnp.maximum(tree.parents, 0)
    kept &= jnp.take_along_axis(kept, parent, axis=1)
    place = (jnp.cumsum(kept, axis=1) - 1).astype(jnp.int32)
    parents = jnp.where(tree.parents == NO_PARENT, NO_PARENT, jnp.take_along_axis(place, parent, axis=1))
    # goes[b, w, i]: node i goes to place w.
    goes = kept[:, None, :] & (place[:, None, :] == index[None, :width, None])
    there = jnp.any(goes, axis=2)

    def move(values: Array) -> Array:
        return jnp.sum(jnp.where(goes, values[:, None, :], 0), axis=2, dtype=values.dtype)

    depth, parents = move(tree.depth), jnp.where(there, move(parents), NO_PARENT)
    above = jnp.take_along_axis(depth, jnp.maximum(parents, 0), axis=1)
    valid = there & ((parents == NO_PARENT) | (depth == above + 1))
    return _masked(DraftTree(move(tree.tokens), parents, depth, valid, move(tree.scores)))


def first_nodes(tree: DraftTree, count: PerRequest) -> DraftTree:
    """The first ``count[b]`` nodes, at least the root. Of a chain they are its `best_nodes`, found without scores."""
    index = jnp.arange(tree.width, dtype=jnp.int32)[None, :]
    return _masked(tree._replace(valid=tree.valid & (index < jnp.maximum(count, 1)[:, None])))


def narrow(tree: DraftTree, width: int) -> DraftTree:
    """The first `width` nodes. Only right where no later node is valid."""
    return DraftTree(*(field[:, :width] for field in tree))


def ancestor_mask(tree: DraftTree) -> Bool[Array, "B N N"]:
    """[b, i, j]: node j is node i or one of its ancestors. An invalid node sees only itself.

    Reachability by doubling: after r rounds, all ancestors within 2^r steps. For the tree at the top of this file,
    row "sat" is [1, 1, 0, 1]: the, cat, itself, not dog.
    """
    width = tree.width
    node = jnp.arange(width, dtype=jnp.int32)
    is_parent = (tree.parents[:, :, None] == node[None, None, :]) & tree.valid[:, :, None]
    reach = is_parent | (node[:, None] == node[None, :])[None]
    for _ in range(max(width - 1, 0).bit_length()):
        step = reach.astype(jnp.float32)
        reach = jnp.einsum("bij,bjk->bik", step, step) > 0
    return reach
