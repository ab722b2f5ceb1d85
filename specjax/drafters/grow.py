"""EAGLE-2's tree: a draft model is run level by level, and the best candidates form a tree.

    start      what the model read last -> the k likeliest tokens: level 1
    D - 1 times: the k best of a level run in one forward (they see what is committed, their ancestors and themselves)
               and bring k candidates each
    of all candidates the N - 1 best by cumulative log-probability are the tree

A drafter gives the forward as a function. The keys of tree nodes never reach a page. Source: SafeAILab/EAGLE
`topK_genrate`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float32, Int32, UInt32
from specjax_kernels import largest, pack_bits

from specjax.drafters.base import Context, Drafter, DraftState, Features, Params
from specjax.drafters.coupling import with_noise
from specjax.drafters.options import Coupling
from specjax.drafters.tree_shape import TreeShape
from specjax.tree import NO_PARENT, DraftTree, Pool, best_nodes, chain, log_total, rerank, top_k_children


class Read(NamedTuple):
    """What a draft model says after it has read k tokens of each request."""

    logits: Float32[Array, "B k W"]  # over the draft's own tokens
    carry: Any  # a pytree of [B, k, ...] leaves that a forward reads of the parents, such as their outputs
    keys: Any  # a pytree of [B, C, ...] leaves: what uncommitted tokens of all levels so far left for later ones; None


ReadLevel: TypeAlias = Callable[[int, Int32[Array, "B k"], Any, UInt32[Array, "#B k words"], Any], Read]
"""(level from 1, the target's ids, the parents' carry, packed mask over keys old and new, old keys) -> Read."""


def growing_drafter(
    name: str, features: Features, shape: TreeShape, *, init: Any, propose: Any, observe: Any, explicit_width: bool,
    note: str, positions: int | None = None, coupling: Coupling = "none", costly_observe: bool = False,
) -> Drafter:  # fmt: skip
    """The drafter of these functions, which runs a model and proposes trees of this shape, or of a smaller one.

    Args:
        propose: takes the shape first.
        positions: where a tree would reach beyond these of a text, nothing is proposed; None: there is no such limit.
    """

    def inside(shape: TreeShape, params: Params, state: DraftState, context: Context) -> tuple[DraftTree, DraftState]:
        tree, state = propose(shape, params, state, context)
        if positions is not None:
            fits = context.prefix_length + shape.steps <= positions
            tree = best_nodes(tree, jnp.where(fits, shape.nodes, 1))
        return tree, state

    limit = "" if positions is None else f"; within the first {positions} tokens of a text"

    def of(shape: TreeShape) -> Drafter:
        return Drafter(
            name,
            features,
            width=shape.nodes,
            depth=shape.depth,
            init=init,
            propose=partial(inside, shape),
            observe=observe,
            explicit_width=explicit_width,
            topk=shape.topk,
            resize=lambda nodes: of(shape.within(nodes)),
            costly_observe=costly_observe,
            coupling=coupling,
            note=note + limit,
        )

    return of(shape)


class _Level(NamedTuple):
    """The nodes of a level that are expanded: k of them, the best first."""

    tokens: Int32[Array, "B k"]  # the target's ids
    scores: Float32[Array, "B k"]
    carry: Any  # the parents', [B, k, ...] leaves
    visible: Any  # bool [B, k, C]: which uncommitted keys each sees, its ancestors' and its own, the last k of C; of
    # numpy where that is known at trace time
    place: Int32[Array, "B k"]  # in the pool


def grow(
    context: Context, shape: TreeShape, start: Read, read: ReadLevel,
    target_ids: Callable[[Int32[Array, "..."]], Int32[Array, "..."]] = lambda ids: ids, *, coupling: Coupling = "noise",
) -> DraftTree:  # fmt: skip
    """Expands level by level, then keeps the best candidates; with top-k 1 all of them, a chain.

    The loop is unrolled: each level has one key block more to attend to, and a GPU runs it without asking the host.

    Args:
        start: [B, 1, ...]: what the draft says after the root. All nodes see its keys, if it has any.
        read: one forward over a level's nodes.
        target_ids: the target's ids of the draft's tokens.
        coupling: whether rows that sample draft with the target's noise; see `specjax.drafters.coupling`.
    """
    k, batch = shape.topk, start.logits.shape[0]
    is_chain = k == 1
    steps = shape.depth if is_chain else shape.steps
    ids = target_ids(jnp.arange(start.logits.shape[2], dtype=jnp.int32))

    def candidates(
        level: int, logits: Float32[Array, "B k W"], scores: Float32[Array, "B k"]
    ) -> tuple[Int32[Array, "B Q"], Float32[Array, "B Q"]]:
        """Tokens and scores of each node's k likeliest continuations, which are at this level."""
        if coupling == "noise":
            logits = with_noise(context, level, ids, logits, chain=is_chain)
        if is_chain:  # an argmax costs less than a top-k
            drafts, best = largest(logits)
            scores = scores - log_total(logits, best[:, :, None])[:, :, 0]
        else:
            drafts, scores = top_k_children(scores, logits, k, normalised=False)
        tokens = target_ids(drafts)
        return tokens.reshape(batch, -1), scores.reshape(batch, -1)

    def to_children(carry: Any, parent: Int32[Array, "B k"]) -> Any:
        def take(leaf: Array) -> Array:
            return jnp.take_along_axis(leaf, parent.reshape(*parent.shape, *[1] * (leaf.ndim - 2)), axis=1)

        return jax.tree.map(take, carry)

    tokens, scores = candidates(1, start.logits, jnp.zeros((batch, 1), jnp.float32))
    pool = [Pool(tokens, jnp.full_like(tokens, NO_PARENT), jnp.ones_like(tokens), scores)]
    own = np.broadcast_to(np.eye(k, dtype=bool), (batch, k, k))
    place = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (batch, k))
    carry = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (batch, k, *leaf.shape[2:])), start.carry)
    keys = start.keys
    seen = jax.tree.leaves(keys)[0].shape[1] if keys is not None else 0
    visible = np.concatenate([np.ones((batch, k, seen), bool), own], axis=2)
    nodes = _Level(tokens, scores, carry, visible, place)
    for level in range(1, steps):
        # A mask known at trace time is that of all rows. For several of them XLA:GPU would fill an array.
        mask = nodes.visible[:1] if isinstance(nodes.visible, np.ndarray) else nodes.visible
        found = read(level, nodes.tokens, nodes.carry, jnp.asarray(pack_bits(mask)), keys)
        tokens, scores = candidates(level + 1, found.logits, nodes.scores)
        carry, keys = found.carry, found.keys
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
                visible=jnp.concatenate([visible, own], axis=2),
                place=first + index,
            )
    whole = Pool(*(jnp.concatenate(parts, axis=1) for parts in zip(*pool, strict=True)))
    if not is_chain:
        return rerank(context.root, whole, shape.nodes)
    return chain(context.root, whole.tokens, jnp.full(batch, steps, jnp.int32), whole.scores)
