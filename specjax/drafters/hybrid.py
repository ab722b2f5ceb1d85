"""A drafter with a model, and n-grams where the text repeats itself.

Where the last tokens of a request have occurred before, what followed them is proposed in place of the model's drafts.
On a CPU the model then proposes nothing, unless another request of the batch needs it:

    ... the cat sat|    "the cat sat" has occurred, "on the mat" followed     proposed: on the mat
    ... a dog ran|      nothing matches                                       proposed: what the model says

Both observe the same tokens. Arctic Inference combines a model with lookup in a similar way (SuffixDecoding, arXiv
2411.04975).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from specjax_kernels.platforms import by_platform

from specjax.cache import PoolShape
from specjax.drafters.base import Context, Drafter, DraftState, Observation, Params
from specjax.tree import DraftTree, roots, widen


class HybridState(NamedTuple):
    model: DraftState
    ngrams: DraftState


def hybrid_drafter(model: Drafter, ngrams: Drafter) -> Drafter:
    """Proposes the trees of `ngrams` where it has any, else those of `model`, as wide as the wider of both.

    Facts of the result, such as its name, are the model's. Neither drafter may change its state when it proposes.
    """
    width = max(model.width, ngrams.width)
    # Their functions alone: the functions below are a part of a program's name, with all that they refer to.
    init_model, propose_model, observe_model = model.init, model.propose, model.observe
    init_ngrams, propose_ngrams, observe_ngrams = ngrams.init, ngrams.propose, ngrams.observe

    def init(params: Params, rows: int, pool: PoolShape) -> DraftState:
        return HybridState(init_model(params, rows, pool), init_ngrams(params, rows, pool))

    def propose(params: Params, state: HybridState, context: Context) -> tuple[DraftTree, DraftState]:
        found, _ = propose_ngrams(params, state.ngrams, context)
        there = jnp.sum(found.valid, axis=1) > 1
        rest = context._replace(active=context.active & ~there)

        def drafted() -> DraftTree:
            return widen(propose_model(params, state.model, rest)[0], width)

        def where_needed() -> DraftTree:
            return jax.lax.cond(jnp.any(rest.active), drafted, lambda: roots(context.root, width))

        # Elsewhere a branch may cost more than it leaves out.
        own = by_platform(cpu=where_needed, default=drafted)
        tree = jax.tree.map(lambda one, other: jnp.where(there[:, None], one, other), widen(found, width), own)
        return tree, state

    def observe(params: Params, state: HybridState, context: Context, seen: Observation) -> DraftState:
        return HybridState(
            observe_model(params, state.model, context, seen), observe_ngrams(params, state.ngrams, context, seen)
        )

    def resize(nodes: int) -> Drafter:
        return hybrid_drafter(model.within(nodes), ngrams.within(nodes))

    narrower = {*model.widths, model.width, *ngrams.widths, ngrams.width}
    facts: dict[str, Any] = {"width": width, "depth": max(model.depth, ngrams.depth), "chains": False}
    return model._replace(
        **facts,
        init=init,
        propose=propose,
        observe=observe,
        widths=tuple(sorted(each for each in narrower if 1 < each < width)),
        reads_tokens=model.reads_tokens or ngrams.reads_tokens,
        resize=resize,
    )
