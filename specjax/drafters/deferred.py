"""Deferred observation: tokens that a drafter sees later, in chunks, if drafting becomes worth it.

A drafter with a model takes time in each step, also where nobody drafts. `defer` splits it into two that share a state:

    lazy      proposes nothing and observes nothing: it notes what `observe` would be told, in the target's pages
    eager     drafts for the requests of which the drafter has seen every token, and observes theirs; for the others it
              is the lazy one
    catch_up  tells the drafter what was noted, the oldest tokens of each request first

How much it has seen is kept for each page, so requests that share pages share that too, and a page that is used again
needs no care: what is noted at its start makes it unseen.

    page table [7, 2, 9], S = 4, prefix length 10      seen [.. 7: 4, 2: 1, 9: 0 ..]: 5 tokens, so it lags by 5
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from specjax.cache import PoolShape, commit
from specjax.drafters.base import Context, Drafter, DraftState, Observation, Params
from specjax.drafters.check import feature_size
from specjax.models.target import Target
from specjax.tree import DraftTree, first_nodes, root_only
from specjax.types import PerRequest


class DeferredState(NamedTuple):
    draft: DraftState  # the drafter's own
    features: Float[Array, "P S F"] | None  # of each token, what the drafter will read; None: it reads none
    seen: Int32[Array, "P"]  # the first so many tokens of each page have been observed


class Deferred(NamedTuple):
    """What `defer` makes of a drafter."""

    inner: Drafter
    lazy: Drafter
    eager: Drafter


def defer(drafter: Drafter, target: Target) -> Deferred:
    """The lazy and the eager form of a drafter. Both read committed tokens, whether or not the drafter does."""
    size, whole = feature_size(drafter.features, target), drafter
    drafter = drafter._replace(resize=None, typical=None)  # what is traced below does not depend on them

    def init(params: Params, rows: int, pool: PoolShape) -> DraftState:
        features = None if size is None else jnp.zeros((*pool, size), jnp.dtype(target.config.dtype))
        return DeferredState(drafter.init(params, rows, pool), features, jnp.zeros(pool.pages, jnp.int32))

    def note(state: DeferredState, context: Context, seen: Observation) -> DeferredState:
        """`state` with the features of what was committed."""
        if state.features is None or seen.features is None:
            return state
        where = context.page_table, context.prefix_length, seen.length
        return state._replace(features=commit(state.features, seen.features, *where, after=()))

    def propose(inner: Drafter, params: Params, state: DeferredState, context: Context) -> tuple[DraftTree, DraftState]:
        ready = context.active & (lag(state, context) == 0)
        tree, draft = inner.propose(params, state.draft, _inner(drafter, context._replace(active=ready)))
        return first_nodes(tree, jnp.where(ready, tree.width, 1)), state._replace(draft=draft)

    def observe(params: Params, state: DeferredState, context: Context, seen: Observation) -> DraftState:
        state, ready = note(state, context, seen), lag(state, context) == 0
        own = seen._replace(length=jnp.where(ready, seen.length, 0))
        inner = _inner(drafter, context._replace(active=context.active & ready))
        draft = drafter.observe(params, state.draft, inner, own)
        return state._replace(draft=draft, seen=_counted(state.seen, context, seen, ready))

    def observe_nothing(params: Params, state: DeferredState, context: Context, seen: Observation) -> DraftState:
        del params
        state = note(state, context, seen)
        return state._replace(seen=_counted(state.seen, context, seen, jnp.zeros_like(context.active)))

    def eager(inner: Drafter) -> Drafter:
        resize, typical, inner = inner.resize, inner.typical, inner._replace(resize=None, typical=None)
        return inner._replace(
            init=init,
            propose=lambda params, state, context: propose(inner, params, state, context),
            observe=observe,
            reads_tokens=True,
            resize=resize and (lambda nodes: eager(resize(nodes))),
            typical=typical,
        )

    def propose_nothing(params: Params, state: DeferredState, context: Context) -> tuple[DraftTree, DraftState]:
        del params
        return root_only(context.root), state

    alone = {"width": 1, "depth": 0, "widths": (), "resize": None, "chains": False}
    lazy = eager(drafter)._replace(propose=propose_nothing, observe=observe_nothing, **alone)
    return Deferred(drafter, lazy, eager(whole))


def catch_up(
    drafter: Drafter, params: Params, state: DeferredState, context: Context, width: int
) -> tuple[DeferredState, PerRequest]:
    """Tells `Deferred.inner` up to `width` tokens of each active request, and returns by how many tokens each still
    lags.

    `context.prefix_length` tokens are committed, and ``context.root`` follows them.
    """
    length, behind = context.prefix_length, lag(state, context)
    start = length - behind
    offset = jnp.arange(width, dtype=jnp.int32)[None, :]
    position = start[:, None] + offset
    tokens, after = context.committed(position), context.committed(position + 1)
    after = jnp.where(position + 1 == length[:, None], context.root[:, None], after)
    count = jnp.where(context.active, jnp.minimum(behind, width), 0)
    features = None
    if state.features is not None:
        pages, size = state.features.shape[:2]
        column = jnp.minimum(position // size, context.page_table.shape[1] - 1)
        page = jnp.take_along_axis(context.page_table, column, axis=1)
        features = state.features[jnp.minimum(page, pages - 1), position % size]
    told = Observation(tokens, after, features, count)
    then = context._replace(prefix_length=start, root=tokens[:, 0], active=count > 0)
    draft = drafter.observe(params, state.draft, _inner(drafter, then), told)
    seen = _counted(state.seen, then, told, then.active)
    return state._replace(draft=draft, seen=seen), jnp.where(context.active, behind - count, 0)


def lag(state: DeferredState, context: Context) -> PerRequest:
    """How many of each request's committed tokens the drafter has not seen."""
    pages, size = state.seen.shape[0], _page_size(context)
    table = context.page_table
    counts = jnp.where(table < pages, state.seen[jnp.minimum(table, pages - 1)], 0)
    partial = counts < size
    column = jnp.argmax(partial, axis=1).astype(jnp.int32)
    rest = jnp.take_along_axis(counts, column[:, None], axis=1)[:, 0]
    seen = jnp.where(jnp.any(partial, axis=1), column * size + rest, table.shape[1] * size)
    return jnp.maximum(context.prefix_length - seen, 0)


def _counted(counts: Int32[Array, "P"], context: Context, seen: Observation, told: Any) -> Int32[Array, "P"]:
    """`seen` of the pages in which tokens were committed at ``context.prefix_length + [0, length)``: with these where
    the drafter was `told` of them, bool [B], else without them and all after them."""
    size, width = _page_size(context), seen.tokens.shape[1]
    start, length = context.prefix_length[:, None], seen.length[:, None]
    column = start // size + jnp.arange((width + size - 2) // size + 1, dtype=jnp.int32)[None, :]
    first = column * size
    touched = (first < start + length) & (length > 0) & (column < context.page_table.shape[1])
    page = jnp.take_along_axis(context.page_table, jnp.minimum(column, context.page_table.shape[1] - 1), axis=1)
    known = counts[jnp.minimum(page, counts.shape[0] - 1)]
    without = jnp.minimum(known, jnp.maximum(start - first, 0))
    new = jnp.where(told[:, None], jnp.clip(start + length - first, 0, size), without)
    return counts.at[jnp.where(touched, page, counts.shape[0])].set(new, mode="drop")


def _inner(drafter: Drafter, context: Context) -> Context:
    """The context as the drafter expects it: committed tokens only if it reads them."""
    return context if drafter.reads_tokens else context._replace(tokens=None)


def _page_size(context: Context) -> int:
    assert context.tokens is not None
    return context.tokens.shape[1]
