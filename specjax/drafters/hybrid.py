"""n-grams before a model: a head drafts only where the text does not repeat itself. What AUTO runs on a CPU.

    ... the cat sat|    has occurred, and "on the mat" followed     n-grams: on the mat
    ... a dog ran|      nothing matches                             the head: away

On a CPU the passes of a head cost time, and the text of a match costs nothing. A tree has nodes of one of the two, and
at most N, so that its first nodes are the tree of a smaller N (`specjax.engine.draft_policy`).

Arctic Inference combines a model with lookup in a similar way (SuffixDecoding, arXiv 2411.04975).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from specjax_kernels.platforms import by_platform

from specjax.cache import PoolShape
from specjax.drafters.base import Context, Drafter, DraftState, Observation, Params, Speculation
from specjax.tree import DraftTree, best_nodes, ranks, roots


class HybridState(NamedTuple):
    ngrams: DraftState
    model: DraftState


def with_ngrams(model: Speculation, ngrams: Speculation) -> Speculation:
    """Drafts with n-grams where they match, else with the model's tree; for several requests with n-grams alone."""

    def resize(nodes: int) -> Drafter:
        return hybrid_drafter(model.drafter, ngrams.within(nodes), model.within(nodes), nodes)

    return model._replace(
        drafter=resize(max(ngrams.drafter.width, model.largest_size)),
        resize=resize,
        largest=None,
        lookup=ngrams.drafter.width,
        note=f"{model.note}; n-grams first, which need no head" + (f"; {ngrams.note}" if ngrams.note else ""),
    )


def hybrid_drafter(whole: Drafter, ngrams: Drafter, model: Drafter, width: int) -> Drafter:
    """Proposes the trees of `ngrams` where they have a draft, else those of `model`, cut to `width` nodes. Neither may
    change its state when it proposes. `whole`: the model's drafter of the largest tree, which observes."""

    def init(params: Params, rows: int, pool: PoolShape) -> DraftState:
        return HybridState(ngrams.init(params, rows, pool), whole.init(params, rows, pool))

    def propose(params: Params, state: HybridState, context: Context) -> tuple[DraftTree, DraftState]:
        tree, _ = ngrams.propose(params, state.ngrams, context)
        tree = _ranked(tree, ranks(tree), context, width)
        if context.root.shape[0] > 1:  # of several requests some need the model in most steps
            return tree, state
        found = tree.valid[:, 1]
        rest = context._replace(active=context.active & ~found)

        def drafted(*_: jax.Array) -> DraftTree:
            own, _ = model.propose(params, state.model, rest)
            own = own if own.width <= width else best_nodes(own, jnp.full_like(context.root, width), width)
            order = jnp.arange(own.width, dtype=jnp.int32)[None, :] if model.topk == 1 else ranks(own)
            return _ranked(own, order, context, width)

        def on_cpu(some: jax.Array) -> DraftTree:  # elsewhere a branch may cost more than it saves
            return jax.lax.cond(some, drafted, lambda: roots(context.root, width))

        other = by_platform(jnp.any(rest.active), cpu=on_cpu, default=drafted)
        return DraftTree(*(jnp.where(found[:, None], *pair) for pair in zip(tree, other, strict=True))), state

    def observe(params: Params, state: HybridState, context: Context, seen: Observation) -> DraftState:
        return HybridState(
            ngrams.observe(params, state.ngrams, context, seen), whole.observe(params, state.model, context, seen)
        )

    return whole._replace(
        width=width,
        depth=max(ngrams.depth, min(model.depth, width - 1)),
        init=init,
        propose=propose,
        observe=observe,
        reads_tokens=whole.reads_tokens or ngrams.reads_tokens,
        topk=None,
        ranked=True,
    )


def _ranked(tree: DraftTree, order: jax.Array, context: Context, width: int) -> DraftTree:
    """The tree in arrays of `width` nodes, with scores that fall with the ranks of `order`."""
    tree = tree._replace(scores=jnp.where(tree.valid, -order.astype(jnp.float32), -jnp.inf))
    if tree.width == width:
        return tree
    empty = roots(context.root, width - tree.width + 1)
    return DraftTree(*(jnp.concatenate([own, none[:, 1:]], axis=1) for own, none in zip(tree, empty, strict=True)))
