"""Draft trees of fixed shape: chains, top-k expansion, reranking and the ancestor mask.

Node 0 of a tree is the root: the last emitted token, whose keys and values are not committed yet. Parents come before
children, siblings differ, and valid nodes come before invalid ones. This module depends on no model or drafter.

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

from specjax.cache import PerRequest

# Sentinels for comparisons; never write at these indices.
NO_PARENT = -1  # parent of the root and of invalid nodes
NO_TOKEN = -1  # token of an invalid node, or a draw that was not needed; equals no token id


class DraftTree(NamedTuple):
    """Trees of N nodes for B requests; node 0 is the root.

    Attributes:
        tokens: int32 [B, N]. Token ids; NO_TOKEN for invalid nodes.
        parents: int32 [B, N]. Node indices; NO_PARENT for the root and for invalid nodes.
        depth: int32 [B, N]. Distance from the root; 0 for the root and for invalid nodes.
        valid: bool [B, N]. True for a prefix of the nodes, which includes the root.
        scores: float32 [B, N]. Cumulative log-probability under the draft; 0 for the root; must not grow along a path.
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
    """Q candidates for the nodes below the root; parents come before children.

    Attributes:
        tokens: int32 [B, Q]. Token ids.
        parents: int32 [B, Q]. Indices into the pool; NO_PARENT for a child of the root.
        depth: int32 [B, Q]. Distance from the root; 1 for a child of the root.
        scores: float32 [B, Q]. Cumulative log-probability; -inf excludes a candidate.
    """

    tokens: Int32[Array, "B Q"]
    parents: Int32[Array, "B Q"]
    depth: Int32[Array, "B Q"]
    scores: Float32[Array, "B Q"]


def root_only(root: PerRequest) -> DraftTree:
    """Trees that consist of the root (plain decoding)."""
    zeros = jnp.zeros_like(root)[:, None]
    return DraftTree(root[:, None], zeros + NO_PARENT, zeros, zeros == 0, zeros.astype(jnp.float32))


def roots(root: PerRequest, width: int) -> DraftTree:
    """Trees of `width` nodes with only the root valid."""
    tree = root_only(root)
    return _masked(DraftTree(*(jnp.pad(field, ((0, 0), (0, width - 1))) for field in tree)))


def _masked(nodes: DraftTree) -> DraftTree:
    nothing = NO_TOKEN, NO_PARENT, 0, False, -jnp.inf
    return DraftTree(*(jnp.where(nodes.valid, *pair) for pair in zip(nodes, nothing, strict=True)))


def _below(root: PerRequest, nodes: DraftTree) -> DraftTree:
    """Prepends the root to `nodes`."""
    return DraftTree(*(jnp.concatenate(pair, axis=1) for pair in zip(root_only(root), _masked(nodes), strict=True)))


def chain(
    root: PerRequest, tokens: Int32[Array, "B D"], length: PerRequest, scores: Float32[Array, "B D"]
) -> DraftTree:
    """Trees of D + 1 nodes: the chains root -> tokens[:, 0] -> tokens[:, 1] -> ...

    Args:
        root: int32 [B]. Last emitted tokens.
        tokens: int32 [B, D]. Drafted tokens.
        length: int32 [B]. Number of valid drafts.
        scores: float32 [B, D]. Cumulative log-probabilities.
    """
    index = jnp.arange(1, tokens.shape[1] + 1, dtype=jnp.int32)[None, :]
    return _below(root, DraftTree(tokens, index - 1, index, index <= length[:, None], scores))


def top_k_children(
    scores: Float32[Array, "B k"], log_probs: Float32[Array, "B k W"], count: int, *, normalised: bool = True
) -> tuple[Int32[Array, "B k {count}"], Float32[Array, "B k {count}"]]:
    """Expands each of k beam nodes by its `count` likeliest tokens, as EAGLE-2 does.

    Ties go to the lower token id. If the vocabulary has fewer than `count` tokens, the remaining candidates score -inf.
    Source: `topK_genrate` of SafeAILab/EAGLE.

    Args:
        scores: float32 [B, k]. Cumulative log-probabilities of the beam nodes.
        log_probs: float32 [B, k, W]. Log-probabilities of the next token.
        count: number of children per node.
        normalised: False if `log_probs` are logits.

    Returns:
        Token ids and cumulative log-probabilities, [B, k, count] each.
    """
    available = min(count, log_probs.shape[-1])
    best, tokens = top_k(log_probs, available)
    if not normalised:
        # With `best[:, :, :1]` XLA:CPU would not recognise the top-k and would sort the vocabulary.
        largest = jnp.max(best, axis=-1, keepdims=True)
        best = best - largest - log_total(log_probs, largest)
    pad = ((0, 0), (0, 0), (0, count - available))
    best = jnp.pad(best, pad, constant_values=-jnp.inf)
    return jnp.pad(tokens, pad), scores[:, :, None] + best


def log_total(logits: Float32[Array, "B k W"], largest: Float32[Array, "B k 1"]) -> Float32[Array, "B k 1"]:
    """Computes log(sum(exp(logits - largest))) without an array of W entries, which `jax.nn.log_softmax` writes."""
    return jnp.log(jnp.sum(jnp.exp(logits - largest), axis=-1, keepdims=True))


def rerank(root: PerRequest, pool: Pool, width: int) -> DraftTree:
    """Builds the tree of the root and the `width - 1` best candidates, in pool order (parents first).

    Scores do not grow along a path, and ties go to the lower index (the parent), so the result contains the parent of
    each node. With fewer candidates than nodes, the last nodes are invalid.

    Raises:
        ValueError: the pool has fewer than `width - 1` entries.
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
    # Invalid entries sort after all valid ones, so valid nodes are a prefix.
    order = jnp.argsort(jnp.where(valid, index, pool.tokens.shape[1] + index), axis=1)
    index, valid = jnp.take_along_axis(index, order, axis=1), jnp.take_along_axis(valid, order, axis=1)
    tokens, parent, depth, scores = (jnp.take_along_axis(values, index, axis=1) for values in pool)
    # The parent's node index is the position of its pool index in `index`, plus one for the root.
    is_parent = valid[:, None, :] & (index[:, None, :] == parent[:, :, None])
    place = jnp.where(parent == NO_PARENT, 0, jnp.argmax(is_parent, axis=2).astype(jnp.int32) + 1)
    return _below(root, DraftTree(tokens, place, depth, valid, scores))


def ranks(tree: DraftTree, *, given: bool = False) -> Int32[Array, "B N"]:
    """Number of nodes that are better than each node: 0 for the root, and less for a parent than for its children. A
    tree of n nodes has those of a larger one whose ranks are below n. `given`: scores are minus the ranks."""
    if given:
        return jnp.where(tree.valid, -tree.scores, 0.0).astype(jnp.int32)
    # `fmax` takes NaN for the smallest score.
    scores = jnp.where(tree.valid, jnp.fmax(tree.scores, -jnp.inf), -jnp.inf).at[:, 0].set(jnp.inf)
    node, other = scores[:, :, None], scores[:, None, :]
    index = jnp.arange(tree.width, dtype=jnp.int32)
    # By counting, not sorting: [B, N, N] comparisons are one small kernel. Ties go to the parent.
    before = (other > node) | ((other == node) & (index[None, :] < index[:, None])[None])
    return jnp.sum(before, axis=2, dtype=jnp.int32)


def best_nodes(tree: DraftTree, count: PerRequest, width: int | None = None) -> DraftTree:
    """Keeps the ``count[b]`` best nodes of each tree, root included, in their order.

    As in `rerank`, the best nodes contain their parents. A node becomes invalid if it cannot be verified: its parent is
    not kept or does not come before it, or its depth is not its parent's plus one.

    Args:
        tree: trees of N nodes.
        count: int32 [B]. Number of nodes to keep; clipped to 1 .. `width`.
        width: number of nodes of the result; None: N.

    Example:
        nodes root, a (-2.0), b (-0.1), c (-0.2, child of b) with count 3 give root, b, c.
    """
    width = tree.width if width is None else min(width, tree.width)
    index = jnp.arange(tree.width, dtype=jnp.int32)
    node_index, place_index = index[None, :], index[None, :width]
    keep = tree.valid & (ranks(tree) < jnp.clip(count, 1, width)[:, None])
    parent = jnp.clip(tree.parents, 0, tree.width - 1)
    has_parent = (tree.parents >= 0) & (tree.parents < node_index) & jnp.take_along_axis(keep, parent, axis=1)
    place = (jnp.cumsum(keep, axis=1) - 1).astype(jnp.int32)
    parents = jnp.where(has_parent, jnp.take_along_axis(place, parent, axis=1), NO_PARENT)
    # goes[b, w, i]: node i moves to index w.
    goes = keep[:, None, :] & (place[:, None, :] == place_index[:, :, None])
    there = jnp.any(goes, axis=2)

    def move(values: Array) -> Array:
        return jnp.sum(jnp.where(goes, values[:, None, :], 0), axis=2, dtype=values.dtype)

    depth, parents = move(tree.depth), jnp.where(there, move(parents), NO_PARENT)
    above = jnp.take_along_axis(depth, jnp.maximum(parents, 0), axis=1)
    is_child = (parents != NO_PARENT) & (depth > 0) & (depth <= place_index) & (depth == above + 1)
    valid = there & (is_child | (place_index == 0))
    return _masked(DraftTree(move(tree.tokens), parents, depth, valid, move(tree.scores)))


def first_nodes(tree: DraftTree, count: PerRequest) -> DraftTree:
    """Keeps the first ``count[b]`` nodes of each chain, at least the root. Equals `best_nodes`, without scores.

    Each node becomes the child of the node before it, whatever its parent was.
    """
    index = jnp.broadcast_to(jnp.arange(tree.width, dtype=jnp.int32), tree.tokens.shape)
    valid = tree.valid & (index < jnp.maximum(count, 1)[:, None])
    return _masked(tree._replace(parents=index - 1, depth=index, valid=valid))


def with_root(tree: DraftTree, root: PerRequest, vocab_size: int) -> DraftTree:
    """Trees whose node 0 is `root`. Nodes whose tokens are outside of the vocabulary become invalid."""
    index = jnp.arange(tree.width, dtype=jnp.int32)
    is_root, is_token = index[None, :] == 0, (tree.tokens >= 0) & (tree.tokens < vocab_size)
    nodes = _masked(tree._replace(valid=tree.valid & is_token))
    return DraftTree(*(jnp.where(is_root, *pair) for pair in zip(root_only(root), nodes, strict=True)))


def narrow(tree: DraftTree, width: int) -> DraftTree:
    """Truncates the arrays to `width` nodes. Later nodes must be invalid."""
    return DraftTree(*(field[:, :width] for field in tree))


def ancestor_mask(tree: DraftTree) -> Bool[Array, "B N N"]:
    """Mask [b, i, j]: node j is node i or an ancestor of node i. An invalid node sees only itself.

    Computed by doubling: round r adds all ancestors within 2^r steps. In the tree at the top of this file, row "sat"
    is [1, 1, 0, 1]: the, cat and sat, but not dog.
    """
    width = tree.width
    node = jnp.arange(width, dtype=jnp.int32)
    is_parent = (tree.parents[:, :, None] == node[None, None, :]) & tree.valid[:, :, None]
    reach = is_parent | (node[:, None] == node[None, :])[None]
    for _ in range(max(width - 1, 0).bit_length()):
        step = reach.astype(jnp.float32)
        reach = jnp.einsum("bij,bjk->bik", step, step) > 0
    return reach
