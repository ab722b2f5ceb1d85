"""EAGLE-2's tree: a draft model runs level by level, and the best candidates form the tree.

    start       the model's output after the root gives the k likeliest tokens: level 1
    D - 1 times the k best nodes of a level run in one forward, in which they see committed tokens, their ancestors and
                themselves; each adds k candidates
    end         the root and the N - 1 best of all candidates, by cumulative log-probability, form the tree

A drafter supplies the forward as a function. Keys of tree nodes are never written to pages. Source: SafeAILab/EAGLE
`topK_genrate`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float32, Int32, UInt32
from specjax_kernels import largest, pack_bits

from specjax.drafters.base import Context, Drafter, DraftState, Features, Params
from specjax.drafters.coupling import with_noise
from specjax.drafters.options import Coupling, TreeShape
from specjax.tree import NO_PARENT, DraftTree, Pool, best_nodes, chain, log_total, rerank, top_k_children


class Read(NamedTuple):
    """Output of a draft model that has read k tokens of each request."""

    logits: Float32[Array, "B k W"]  # over the draft's vocabulary
    carry: Any  # pytree of [B, k, ...] leaves for the nodes' children, such as the model's outputs
    keys: Any  # pytree of [B, C, ...] leaves: keys of the uncommitted tokens of all levels so far; or None
    # Target ids of the logits' tokens, by request or by node; None: those of the draft's vocabulary.
    ids: Int32[Array, "B #k W"] | None = None


ReadLevel: TypeAlias = Callable[[int, Int32[Array, "B k"], Any, UInt32[Array, "#B k words"], Any], Read]
"""(level from 1, target ids, the parents' carry, packed mask over earlier and new keys, earlier keys) -> Read."""


def tree_drafter(
    name: str, features: Features, shape: TreeShape, limit: int | None, init: Any, propose: Any, observe: Any
) -> Drafter:
    """Makes a drafter of trees of this shape. `limit`: maximum position, beyond which a tree is not proposed."""

    def limited(params: Params, state: DraftState, context: Context) -> tuple[DraftTree, DraftState]:
        tree, state = propose(params, state, context)
        if limit is not None:
            fits = context.prefix_length + shape.steps <= limit
            tree = best_nodes(tree, jnp.where(fits, shape.nodes, 1))
        return tree, state

    return Drafter(name, features, shape.nodes, shape.depth, init, limited, observe, topk=shape.topk)


class _Level(NamedTuple):
    """The k nodes of a level that are expanded, best first."""

    tokens: Int32[Array, "B k"]  # target ids
    scores: Float32[Array, "B k"]
    carry: Any  # of their parents, [B, k, ...] leaves
    visible: Any  # bool [B, k, C]: uncommitted keys that a node sees: its ancestors' and, among the last k, its own; a
    # numpy array if it is known at trace time
    place: Int32[Array, "B k"]  # index in the pool of candidates


def grow(
    context: Context, shape: TreeShape, start: Read, read: ReadLevel,
    target_ids: Callable[[Int32[Array, "..."]], Int32[Array, "..."]] = lambda ids: ids, *, coupling: Coupling = "noise",
) -> DraftTree:  # fmt: skip
    """Expands level by level, then keeps the best candidates; with top-k 1 all of them, as a chain.

    The loop is unrolled: each level attends to one more block of keys, and a GPU needs no decision by its host.

    Args:
        start: [B, 1, ...]: the draft's output after the root. All nodes see its keys, if there are any.
        read: one forward over a level's nodes.
        target_ids: maps the draft's token ids to the target's.
        coupling: "noise": sampling rows draft with the target's noise (`specjax.drafters.coupling`).
    """
    k, batch = shape.topk, start.logits.shape[0]
    is_chain = k == 1
    steps = shape.depth if is_chain else shape.steps
    vocabulary = target_ids(jnp.arange(start.logits.shape[2], dtype=jnp.int32))

    def candidates(
        level: int, output: Read, scores: Float32[Array, "B k"]
    ) -> tuple[Int32[Array, "B Q"], Float32[Array, "B Q"]]:
        """Tokens and scores of this level: k continuations of each node above."""
        logits, ids = output.logits, vocabulary if output.ids is None else output.ids
        if coupling == "noise":
            logits = with_noise(context, level, ids, logits, chain=is_chain)
        if is_chain:  # an argmax costs less than a top-k
            drafts, best = largest(logits)
            scores = scores - log_total(logits, best[:, :, None])[:, :, 0]
        else:
            drafts, scores = top_k_children(scores, logits, k, normalised=False)
        drafts = drafts.reshape(batch, logits.shape[1], -1)
        tokens = target_ids(drafts) if output.ids is None else jnp.take_along_axis(ids, drafts, axis=2)
        return tokens.reshape(batch, -1), scores.reshape(batch, -1)

    def to_children(carry: Any, parent: Int32[Array, "B k"]) -> Any:
        def take(leaf: Array) -> Array:
            return jnp.take_along_axis(leaf, parent.reshape(*parent.shape, *[1] * (leaf.ndim - 2)), axis=1)

        return jax.tree.map(take, carry)

    tokens, scores = candidates(1, start, jnp.zeros((batch, 1), jnp.float32))
    pool = [Pool(tokens, jnp.full_like(tokens, NO_PARENT), jnp.ones_like(tokens), scores)]
    itself = np.broadcast_to(np.eye(k, dtype=bool), (batch, k, k))
    place = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (batch, k))
    carry = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (batch, k, *leaf.shape[2:])), start.carry)
    keys = start.keys
    seen = jax.tree.leaves(keys)[0].shape[1] if keys is not None else 0
    visible = np.concatenate([np.ones((batch, k, seen), bool), itself], axis=2)
    nodes = _Level(tokens, scores, carry, visible, place)
    for level in range(1, steps):
        # A mask that is known at trace time is equal for all rows; XLA:GPU would fill an array of several rows.
        mask = nodes.visible[:1] if isinstance(nodes.visible, np.ndarray) else nodes.visible
        output = read(level, nodes.tokens, nodes.carry, jnp.asarray(pack_bits(mask)), keys)
        tokens, scores = candidates(level + 1, output, nodes.scores)
        carry, keys = output.carry, output.keys
        first = sum(part.tokens.shape[1] for part in pool)
        pool.append(Pool(tokens, jnp.repeat(nodes.place, k, axis=1), jnp.full_like(tokens, level + 1), scores))
        if is_chain:
            nodes = _Level(tokens, scores, carry, np.ones((batch, 1, seen + level + 1), bool), nodes.place)
        elif level + 1 < steps:
            best, index = jax.lax.top_k(scores, k)  # best first, ties to the lower index
            parent = index // k  # candidate i of a level belongs to node i // k
            visible = jnp.take_along_axis(jnp.asarray(nodes.visible), parent[:, :, None], axis=1)
            nodes = _Level(
                tokens=jnp.take_along_axis(tokens, index, axis=1),
                scores=best,
                carry=to_children(carry, parent),
                visible=jnp.concatenate([visible, itself], axis=2),
                place=first + index,
            )
    pooled = Pool(*(jnp.concatenate(parts, axis=1) for parts in zip(*pool, strict=True)))
    if not is_chain:
        return rerank(context.root, pooled, shape.nodes)
    return chain(context.root, pooled.tokens, jnp.full(batch, steps, jnp.int32), pooled.scores)
