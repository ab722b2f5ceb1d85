"""n-grams before a model: a head drafts only where the text does not repeat itself. What AUTO runs on a CPU.

    ... the cat sat|    has occurred, and "on the mat" followed     n-grams: on the mat
    ... a dog ran|      nothing matches                             the head: away

On a CPU the passes of a head cost more than the nodes that they draft, and the text of a match costs nothing. N says
what a step may use: up to the N of n-grams these alone, beyond it the first nodes of the head's chain, too. So the
parts of `specjax.engine.draft_policy` are the n-grams and then the levels of the head, and it chooses what pays. A tree
has nodes of one of the two, so its arrays are those of the wider one.

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
    """Drafts with n-grams of W nodes where they draft no less, else with the model's tree of V nodes.

    N up to W has trees of the n-grams alone; N = W + v has the model's of v + 1 nodes, too, so the largest N is
    W + V - 1.
    """
    lookup, largest = ngrams.drafter.width, ngrams.drafter.width + model.drafter.width - 1

    def resize(nodes: int) -> Drafter:
        with_model = model.within(nodes - lookup + 1) if nodes > lookup else None
        return hybrid_drafter(model.drafter, ngrams.within(nodes), with_model, max(nodes - lookup + 1, 1))

    return model._replace(
        drafter=resize(largest),
        resize=resize,
        largest=largest,
        lookup=lookup,
        note=f"{model.note}; n-grams first, which need no head" + (f"; {ngrams.note}" if ngrams.note else ""),
    )


def hybrid_drafter(whole: Drafter, ngrams: Drafter, model: Drafter | None, most: int) -> Drafter:
    """Proposes the trees of `ngrams` where they have at least `most` nodes, else those of `model` of at most as many.
    None: only n-grams draft. Neither may change its state when it proposes. `whole`: the model's drafter of the largest
    tree, which observes."""
    width = max(ngrams.width, most)

    def init(params: Params, rows: int, pool: PoolShape) -> DraftState:
        return HybridState(ngrams.init(params, rows, pool), whole.init(params, rows, pool))

    def propose(params: Params, state: HybridState, context: Context) -> tuple[DraftTree, DraftState]:
        tree, _ = ngrams.propose(params, state.ngrams, context)
        tree = tree._replace(scores=-ranks(tree).astype(jnp.float32))
        tree = _padded(tree, context, width)
        if model is None:
            return tree, state
        found, propose_model, is_chain = tree.valid[:, min(most, ngrams.width) - 1], model.propose, model.topk == 1
        rest = context._replace(active=context.active & ~found)

        def drafted(*_: jax.Array) -> DraftTree:
            own, _ = propose_model(params, state.model, rest)
            own = own if own.width <= most else best_nodes(own, jnp.full_like(context.root, most), most)
            order = jnp.arange(own.width, dtype=jnp.int32)[None, :] if is_chain else ranks(own)
            after = jnp.where(order > 0, order + (ngrams.width - 1), 0)
            scores = jnp.where(own.valid, -after.astype(jnp.float32), -jnp.inf)
            return _padded(own._replace(scores=scores), context, width)

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
        depth=max(ngrams.depth, model.depth if model else 0),
        init=init,
        propose=propose,
        observe=observe,
        reads_tokens=whole.reads_tokens or ngrams.reads_tokens,
        topk=None,
        ranked=True,
    )


def _padded(tree: DraftTree, context: Context, width: int) -> DraftTree:
    """The tree in arrays of `width` nodes."""
    if tree.width == width:
        return tree
    empty = roots(context.root, width - tree.width + 1)
    return DraftTree(*(jnp.concatenate([own, none[:, 1:]], axis=1) for own, none in zip(tree, empty, strict=True)))
