"""EAGLE: a head of one layer continues the target's features, level by level.

For EAGLE-1/2, EAGLE-3 and MTP heads (`specjax.models.draft_head`, `specjax.models.mtp`). `grow` builds EAGLE-2's tree.
n tokens are committed, and the root x_n was drawn last. The head's cache holds n slots; slot t reads (f_t, x_{t+1}):

    observe   writes keys and values of new slots, from the target's features, without attention and MLP; the row keeps
              the fused feature of the last token, f_{n-1}
    propose   runs the head over the last slot, (f_{n-1}, x_n), whose output predicts level 1; a node of level l stands
              at position n + l - 1 and reads its parent's output as the feature

docs/algorithms.md has the alignment.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32, UInt32
from specjax_kernels import CAUSAL

from specjax.cache import PoolShape, commit, init_cache
from specjax.config import HeadConfig, MtpConfig
from specjax.drafters.base import Context, Drafter, DraftState, Observation, Params, finite, put_rows, take_rows
from specjax.drafters.grow import Read, grow, growing_drafter
from specjax.drafters.options import Coupling, TreeShape
from specjax.models.blocks import Past, joined
from specjax.models.draft_head import draft_head
from specjax.models.head_spec import head_spec
from specjax.models.mtp import MtpHead
from specjax.models.target import Target
from specjax.tree import DraftTree


class EagleState(NamedTuple):
    cache: Any  # [P, S, ...] leaves, such as a `KeyValue`: the head's layer, by the target's page table
    feature: Float[Array, "R M"]  # fused feature of each row's last committed token


def eagle_drafter(
    target: Target, head: HeadConfig | MtpConfig, shape: TreeShape, *, backend: str | None = None,
    explicit_width: bool = True, note: str = "", positions: int | None = None, coupling: Coupling = "noise",
) -> Drafter:  # fmt: skip
    """Drafts with a head whose parameters are `Params.draft`. All nodes of a tree are valid, unless the head's
    vocabulary has too few tokens for it.

    Args:
        backend: attention implementation, as for the target.
        explicit_width, note: fields of `Drafter`.
        positions: maximum position, default the head's.
    """
    if isinstance(head, MtpConfig):
        model, limit = MtpHead(head, target, backend), positions
    else:
        model, limit = draft_head(head, target, backend=backend), positions or head.max_positions

    def init(params: Params, rows: int, pool: PoolShape) -> DraftState:
        del params
        feature = jnp.zeros((rows, head.hidden_size), jnp.dtype(head.dtype))
        return EagleState(init_cache(model.pages, pool), feature)

    def propose(shape: TreeShape, params: Params, state: EagleState, context: Context) -> tuple[DraftTree, DraftState]:
        def run(tokens: Array, feature: Array, positions: Array, mask: Any, attended: Array, before: Any) -> Read:
            embedded = model.embed(params.target, params.draft, tokens)
            past = Past(state.cache, context.page_table, attended, before)
            out, block = model.forward(params.draft, embedded, feature, positions, mask, past)
            return Read(model.unembed(params.target, params.draft, out), out, block)

        def read(
            level: int, tokens: Int32[Array, "B k"], feature: Float[Array, "B k M"], mask: UInt32[Array, "#B k words"],
            before: Any,
        ) -> Read:  # fmt: skip
            positions = jnp.broadcast_to(context.prefix_length[:, None] + (level - 1), tokens.shape)
            output = run(tokens, feature, positions, mask, context.attended, before)
            return output._replace(keys=joined(before, output.keys))

        # Levels read the last slot's keys from the pages. An empty text has no slot.
        last = context._replace(prefix_length=jnp.maximum(context.prefix_length - 1, 0))
        feature = take_rows(state.feature, context)[:, None]
        start = run(context.root[:, None], feature, last.prefix_length[:, None], CAUSAL, last.attended, None)
        start = start._replace(keys=None)
        ids = partial(model.target_ids, params.draft)
        return grow(context, shape, start, read, ids, coupling=coupling), state

    def observe(params: Params, state: EagleState, context: Context, seen: Observation) -> DraftState:
        assert seen.features is not None
        offset = jnp.arange(seen.tokens.shape[1], dtype=jnp.int32)[None, :]
        embedded = model.embed(params.target, params.draft, seen.next_tokens)
        feature = model.fuse(params.draft, seen.features)
        block = finite(model.keep(params.draft, embedded, feature, context.prefix_length[:, None] + offset))
        cache = commit(state.cache, block, context.page_table, context.prefix_length, seen.length, after=())
        last = jnp.take_along_axis(feature, jnp.maximum(seen.length - 1, 0)[:, None, None], axis=1)[:, 0]
        return EagleState(cache, put_rows(state.feature, last, context, seen))

    return growing_drafter(
        head_spec(head.kind).algorithm, head.features, shape, init=init, propose=propose, observe=observe,
        explicit_width=explicit_width, note=note, coupling=coupling,
        positions=limit if limit and limit < target.config.max_positions else None,
    )  # fmt: skip
