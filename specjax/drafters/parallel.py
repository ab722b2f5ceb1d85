"""Parallel drafts: P-EAGLE heads and PARD draft models predict K tokens in one forward over the root and masks.

n tokens are committed, and the root x_n was drawn last. Slot j predicts x_{n+1+j}. Slots attend causally, as in the
drafts' training, and depend on no drafted token, so a tree has the best prefixes of a block's slots (`independent`):

    draft      slot 0                     slots 1 .. K - 1                  position of slot j
    P-EAGLE    root and feature f_{n-1}   mask token and a learnt feature   n - 1 + j
    PARD       root                       mask token                        n + j

Keys of upper layers need a forward over new tokens. Slot 0 follows them, so one forward runs both:

    observe    runs new tokens, the root and K - 1 masks; commits the new tokens' entries, and the row keeps the outputs
               of the K slots
    propose    predicts from these outputs, without a forward

P-EAGLE heads of one layer need no forward for their keys: `eagle_drafter` observes them as other heads, and runs the
slots to propose. Sources: arXiv 2602.01469, vllm-project/speculators `peagle`; arXiv 2504.18583, AMD-AGI/PARD.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Float32, Int32
from specjax_kernels import CAUSAL

from specjax.cache import Cache, Hidden, PoolShape, Positions, Tokens, commit, init_cache
from specjax.config import HeadConfig, ModelConfig
from specjax.drafters.base import (
    Context,
    Drafter,
    DraftState,
    Features,
    Observation,
    Params,
    Speculation,
    finite,
    put_rows,
    take_rows,
)
from specjax.drafters.block import independent
from specjax.drafters.grow import tree_drafter
from specjax.drafters.options import MAX_STEPS, Coupling, TreeShape
from specjax.models.blocks import Past
from specjax.models.draft_head import DraftHead
from specjax.models.target import Target
from specjax.tree import DraftTree

logger = logging.getLogger(__name__)


class Slots(NamedTuple):
    """The contents of a draft's slots, and its forward.

    Attributes:
        pages: cache entry of a token, a pytree of `PageSpec`s.
        config: of the draft.
        root_kept: whether the root's entry is committed, since it is that of the token before it.
        run: (params, past, tokens [B, X], masked [B, X], positions, observation) -> (outputs [B, X, M], block).
        unembed: (params, outputs [B, D, M]) -> logits [B, D, W].
        target_ids: (params, ids of the draft) -> the target's ids.
    """

    pages: Any
    config: HeadConfig | ModelConfig
    root_kept: bool
    run: Callable[..., tuple[Hidden, Any]]
    unembed: Callable[[Params, Hidden], Float32[Array, "B D W"]]
    target_ids: Callable[[Params, Int32[Array, "..."]], Int32[Array, "..."]]


class ParallelState(NamedTuple):
    cache: Cache  # leaves [P, S, ...] by the target's page table
    outputs: Float[Array, "R K M"]  # of each row's slots


def p_eagle_slots(model: DraftHead) -> Slots:
    """A P-EAGLE head: token i of an observation has the feature i; masks have the learnt feature."""

    def run(
        params: Params, past: Past, tokens: Tokens, masked: Bool[Array, "B N"], positions: Positions, seen: Observation
    ) -> tuple[Hidden, Any]:
        assert seen.features is not None
        features = model.fuse(params.draft, model.with_mask(params.draft, seen.features))
        index = jnp.where(masked, features.shape[1] - 1, jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :])
        features = jnp.take_along_axis(features, index[:, :, None], axis=1)
        embedded = model.embed(params.target, params.draft, tokens)
        return model.forward(params.draft, embedded, features, positions, CAUSAL, past)

    return Slots(
        model.pages, model.config, True, run,
        unembed=lambda params, outputs: model.unembed(params.target, params.draft, outputs),
        target_ids=lambda params, ids: model.target_ids(params.draft, ids),
    )  # fmt: skip


def pard_slots(model: Target, unembed: Any, target_ids: Any) -> Slots:
    """A PARD draft model, whose parameters are `Params.draft.model`."""

    def run(
        params: Params, past: Past, tokens: Tokens, masked: Bool[Array, "B N"], positions: Positions, seen: Observation
    ) -> tuple[Hidden, Any]:
        weights, where = params.draft.model, (past.pages, past.page_table, past.prefix_length)
        output = model.forward(weights, model.embed(weights, tokens), positions, CAUSAL, *where)
        return output.hidden, output.block

    return Slots(model.pages, model.config, False, run, unembed, target_ids)


def parallel_drafter(
    name: str, features: Features, slots: Slots, shape: TreeShape, limit: int | None, count: int | None,
    coupling: Coupling,
) -> Drafter:  # fmt: skip
    """Drafts with the outputs of `count` slots, by default as many as the tree's levels; more if drafters of several
    sizes share the state."""
    config, drafts = slots.config, count or shape.steps
    assert config.mask_token is not None
    mask = jnp.int32(config.mask_token)

    def init(params: Params, rows: int, pool: PoolShape) -> DraftState:
        del params
        outputs = jnp.zeros((rows, drafts, config.hidden_size), jnp.dtype(config.dtype))
        return ParallelState(init_cache(slots.pages, pool), outputs)

    def propose(params: Params, state: ParallelState, context: Context) -> tuple[DraftTree, DraftState]:
        logits = slots.unembed(params, take_rows(state.outputs, context)[:, : shape.steps])
        return independent(context, shape, logits, partial(slots.target_ids, params), coupling), state

    def observe(params: Params, state: ParallelState, context: Context, seen: Observation) -> DraftState:
        tokens, root = seen.next_tokens, jnp.maximum(seen.length - 1, 0)[:, None]
        if not slots.root_kept:  # the first token is read again: after reused pages the row does not hold it
            tokens, root = jnp.concatenate([seen.tokens[:, :1], tokens], axis=1), seen.length[:, None]
        tokens = jnp.pad(tokens, ((0, 0), (0, drafts - 1)))
        index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        masked = index > root  # padding, which no slot sees, is masked, too
        past = Past(state.cache, context.page_table, context.attended)
        positions = context.prefix_length[:, None] + index
        outputs, block = slots.run(params, past, jnp.where(masked, mask, tokens), masked, positions, seen)
        where = context.page_table, context.prefix_length, seen.length
        cache = commit(state.cache, finite(block), *where, after=outputs)
        of_slots = jnp.arange(drafts, dtype=jnp.int32)[None, :, None] + root[:, :, None]
        new = jnp.take_along_axis(outputs, of_slots, axis=1)
        return ParallelState(cache, put_rows(state.outputs, new, context, seen))

    return tree_drafter(name, features, shape, limit, init, propose, observe)


def chain_of(drafts: int) -> TreeShape:
    """The default tree of parallel drafts."""
    drafts = min(drafts, MAX_STEPS)
    return TreeShape(drafts, 1, drafts + 1)


def in_one_forward(speculation: Speculation, *, costly: bool, trained: int | None = None) -> Speculation:
    """The speculation of a parallel drafter. `costly`: `observe` runs the draft; `trained`: slots in training."""
    if trained is not None and speculation.drafter.depth > trained:
        words = "%d drafts in one forward, of a head that was trained on %d: later ones are rarely accepted"
        logger.warning(words, speculation.drafter.depth, trained)
    note = f"{speculation.note}; all in one forward"
    return speculation._replace(passes=1, costly_observe=costly, note=note)
