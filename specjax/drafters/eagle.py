"""EAGLE: a head of one layer continues the target's features, level by level.

Serves EAGLE-1/2, EAGLE-3 and MTP heads alike (`specjax.models.draft_head`; `specjax.models.mtp`, if there is one);
`grow` makes the tree, EAGLE-2's. n tokens are committed, the root x_n is the last one drawn, and the head's cache holds
n slots, slot t made of (f_t, x_{t+1}):

    observe   the tokens that became certain go through the head with the TARGET's features; their slots are kept, and
              so is the output at the last one
    propose   that output predicts level 1; a node of a level reads its parent's output as the feature, at position
              n + level - 1

An unsure head may propose less, or nothing (`Confidence`): on a CPU each checked node costs time. docs/algorithms.md
derives the alignment.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32, UInt32
from specjax_kernels import CAUSAL, CHEAP_ROWS
from specjax_kernels.platforms import by_platform

from specjax.cache import PoolShape, commit, init_cache
from specjax.config import HeadConfig, MtpConfig
from specjax.drafters.base import Context, Drafter, DraftState, Observation, Params, put_rows, take_rows
from specjax.drafters.grow import ANY_DRAFT, Confidence, Read, grow, growing_drafter
from specjax.drafters.options import Coupling
from specjax.drafters.tree_shape import TreeShape
from specjax.models.blocks import Past, joined
from specjax.models.draft_head import draft_head
from specjax.models.head_spec import head_spec
from specjax.models.mtp import MtpHead
from specjax.models.target import Target
from specjax.tree import DraftTree

LONG_PATH = 16
"""Tokens of the longest path that a step may commit, beyond which `observe` is for a prompt's chunk."""


class EagleState(NamedTuple):
    cache: Any  # [P, S, ...] leaves, such as a `KeyValue`: the head's one layer, in the target's pages
    hidden: Float[Array, "R M"]  # the head's output at the row's last slot: predicts what follows the root


def eagle_drafter(
    target: Target, head: HeadConfig | MtpConfig, shape: TreeShape, *, confidence: Confidence = ANY_DRAFT,
    backend: str | None = None, explicit_width: bool = True, note: str = "", positions: int | None = None,
    coupling: Coupling = "noise",
) -> Drafter:  # fmt: skip
    """Drafts with a head whose parameters are `Params.draft`. [B, N] trees; all nodes are valid unless the head's
    vocabulary has fewer tokens than the tree needs, or `confidence` sets a minimum. `backend`: as for the target."""
    of_target = isinstance(head, MtpConfig)
    limit = positions or (None if isinstance(head, MtpConfig) else head.max_positions)
    model = MtpHead(head, target, backend) if of_target else draft_head(head, target, backend=backend)

    def init(params: Params, rows: int, pool: PoolShape) -> DraftState:
        del params
        hidden = jnp.zeros((rows, head.hidden_size), jnp.dtype(head.dtype))
        return EagleState(init_cache(model.pages, pool), hidden)

    def propose(shape: TreeShape, params: Params, state: EagleState, context: Context) -> tuple[DraftTree, DraftState]:
        hidden = take_rows(state.hidden, context)[:, None]

        def read(
            level: int, tokens: Int32[Array, "B k"], feature: Float[Array, "B k M"], mask: UInt32[Array, "#B k words"],
            before: Any,
        ) -> Read:  # fmt: skip
            embedded = model.embed(params.target, params.draft, tokens)
            positions = jnp.broadcast_to(context.prefix_length[:, None] + (level - 1), tokens.shape)
            past = Past(state.cache, context.page_table, context.attended, before)
            out, block = model.forward(params.draft, embedded, feature, positions, mask, past)
            return Read(model.unembed(params.target, params.draft, out), out, joined(before, block))

        start = Read(model.unembed(params.target, params.draft, hidden), hidden, None)
        ids = partial(model.target_ids, params.draft)
        return grow(context, shape, confidence, start, read, ids, coupling=coupling), state

    def observe(params: Params, state: EagleState, context: Context, seen: Observation) -> DraftState:
        assert seen.features is not None
        features, count = seen.features, seen.tokens.shape[1]
        past = Past(state.cache, context.page_table, context.attended)

        def read(width: int) -> tuple[Float[Array, "B M"], Any]:
            """The output at the last token, and what to keep of all `count`, of which the first `width` are read."""
            positions = context.prefix_length[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
            embedded = model.embed(params.target, params.draft, seen.next_tokens[:, :width])
            feature = model.fuse(params.draft, features[:, :width])
            out, block = model.forward(params.draft, embedded, feature, positions, CAUSAL, past)
            last = jnp.take_along_axis(out, jnp.maximum(seen.length - 1, 0)[:, None, None], axis=1)[:, 0]
            rest = count - width
            return last, jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, rest), *((0, 0),) * (x.ndim - 2))), block)

        def read_few() -> tuple[Float[Array, "B M"], Any]:
            return jax.lax.cond(jnp.max(seen.length) <= CHEAP_ROWS, lambda: read(CHEAP_ROWS), lambda: read(count))

        # Most paths are short, and on a CPU each row costs; on a GPU a branch would ask the host.
        if CHEAP_ROWS < count <= LONG_PATH:
            last, block = by_platform(cpu=read_few, default=partial(read, count))
        else:
            last, block = read(count)
        # A NaN in a page would spread to the requests that hold the page later.
        length = jnp.where(jnp.isnan(last[:, 0]), 0, seen.length)
        cache = commit(state.cache, block, context.page_table, context.prefix_length, length, after=last)
        return EagleState(cache, put_rows(state.hidden, last, context, seen))

    return growing_drafter(
        head_spec(head.kind).algorithm, head.features, shape, confidence, init=init, propose=propose, observe=observe,
        explicit_width=explicit_width, note=note, coupling=coupling,
        positions=limit if limit and limit < target.config.max_positions else None,
    )  # fmt: skip
