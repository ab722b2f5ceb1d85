"""STANDALONE: an ordinary model drafts for a larger one with the same tokenizer.

n tokens are committed, and the root x_n was drawn last. The draft shares the target's page table; slot t holds its keys
and values of x_t. The root's are kept in the row's state, because it may not have a page yet:

    observe   runs the draft over the new tokens and the new root in one forward, commits all but the root, and keeps
              the root's keys, values and output
    propose   predicts level 1 from that output; nodes of a level, at position n + level, see the n slots, the root,
              their ancestors and themselves (`grow`)

A tree of D levels costs D - 1 forwards of k tokens beside the forward of D + 2. A slot depends on the text before it
alone, so reused pages are exact. A PARD model predicts all levels of a tree in the forward of `observe`
(`specjax.drafters.parallel`).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32, UInt32
from specjax_kernels import CAUSAL

from specjax.cache import Block, Cache, Hidden, PoolShape, Weights, commit, init_cache, row_states, take_path
from specjax.drafters.base import Context, Drafter, DraftState, Observation, Params, Speculation, put_rows, take_rows
from specjax.drafters.grow import Read, grow, tree_drafter
from specjax.drafters.options import Coupling, Loaded, ModelOptions, TreeShape, position_limit
from specjax.drafters.parallel import chain_of, in_one_forward, parallel_drafter, pard_slots
from specjax.limits import documented, setting
from specjax.models.blocks import joined
from specjax.models.target import Before, Target
from specjax.tree import DraftTree

PARD_DRAFTS = 12
"""Default of drafts of PARD models: that of their makers, who trained on 8."""


class StandaloneParams(NamedTuple):
    """`Params.draft`: the model's parameters and the target's ids of its tokens (`match_vocabularies`).

    Attributes:
        model: parameters of the draft's family.
        ids: int32 [W], target id of each row of the draft's output layer; NO_TOKEN: never proposed, such as padding.
            None: equal ids.
    """

    model: Weights
    ids: Int32[Array, "W"] | None = None


class StandaloneState(NamedTuple):
    cache: Cache  # leaves [P, S, ...] by the target's page table
    root: Block  # [R, 1, ...] leaves: keys and values of each row's root
    hidden: Float[Array, "R M"]  # the output at the root, which predicts level 1


def standalone_drafter(
    target: Target, draft: Target, shape: TreeShape, *, positions: int | None = None, coupling: Coupling = "noise",
    slots: int | None = None,
) -> Drafter:  # fmt: skip
    """Drafts with a model whose `StandaloneParams` are `Params.draft`. All nodes of a tree are valid, unless the draft
    has too few tokens for it, or the tree would reach beyond the draft's maximum position (see `eagle_drafter`).
    `slots`: of a PARD model, see `parallel_drafter`."""
    if row_states(draft.pages):
        raise ValueError(
            f"STANDALONE cannot draft with a model of the family {draft.config.family}: its layers keep one state for "
            "each request, and the levels of a tree need one for each node; draft with a model whose layers all have "
            "attention, a draft head, the target's MTP layers or n-grams"
        )

    def unembed(params: Params, hidden: Hidden) -> Float32[Array, "B k W"]:
        logits, ids = draft.unembed(params.draft.model, hidden), params.draft.ids
        if ids is None:
            return logits[..., : target.config.vocab_size]
        return jnp.where((ids >= 0)[None, None], logits, -jnp.inf)

    def target_ids(params: Params, ids: Int32[Array, "..."]) -> Int32[Array, "..."]:
        return ids if params.draft.ids is None else params.draft.ids[ids]

    limit = position_limit(target, draft.config, positions)
    if draft.config.mask_token is not None:
        contents = pard_slots(draft, unembed, target_ids)
        return parallel_drafter(Standalone.algorithm, None, contents, shape, limit, slots, coupling)

    def init(params: Params, rows: int, pool: PoolShape) -> DraftState:
        del params
        root = init_cache(draft.pages, PoolShape(rows, 1))
        hidden = jnp.zeros((rows, draft.config.hidden_size), jnp.dtype(draft.config.dtype))
        return StandaloneState(init_cache(draft.pages, pool), root, hidden)

    def propose(params: Params, state: StandaloneState, context: Context) -> tuple[DraftTree, DraftState]:
        draft_params, start = params.draft, context.prefix_length[:, None]

        def read(
            level: int, tokens: Int32[Array, "B k"], carry: tuple[()], mask: UInt32[Array, "#B k words"], before: Before
        ) -> Read:
            positions = jnp.broadcast_to(start + level, tokens.shape)
            past = state.cache, context.page_table, context.attended
            output = draft.forward(
                draft_params.model, draft.embed(draft_params.model, tokens), positions, mask, *past, before=before
            )
            keys = joined(before, Before(output.block, positions))
            return Read(unembed(params, output.hidden), carry, keys)

        root, hidden = take_rows((state.root, state.hidden), context)
        first = Read(unembed(params, hidden[:, None]), (), Before(root, start))
        return grow(context, shape, first, read, partial(target_ids, params), coupling=coupling), state

    def observe(params: Params, state: StandaloneState, context: Context, seen: Observation) -> DraftState:
        draft_params = params.draft
        # Reads the first token again, which was the root: after reused pages the row does not hold it.
        tokens = jnp.concatenate([seen.tokens[:, :1], seen.next_tokens], axis=1)
        index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        positions = context.prefix_length[:, None] + index
        past = state.cache, context.page_table, context.attended
        output = draft.forward(draft_params.model, draft.embed(draft_params.model, tokens), positions, CAUSAL, *past)
        # A NaN would spread to later requests with this page.
        broken = jnp.any(jnp.isnan(output.hidden[:, :, 0]) & (index <= seen.length[:, None]), axis=1)
        length = jnp.where(broken, 0, seen.length)
        where = context.page_table, context.prefix_length, length
        cache = commit(state.cache, output.block, *where, after=output.hidden)
        last = seen.length[:, None]  # the root's index
        root = take_path(output.block, last)
        hidden = jnp.take_along_axis(output.hidden, last[:, :, None], axis=1)[:, 0]
        return StandaloneState(cache, *put_rows((state.root, state.hidden), (root, hidden), context, seen))

    return tree_drafter(Standalone.algorithm, None, shape, limit, init, propose, observe)


@documented
@dataclass(frozen=True)
class Standalone(ModelOptions):
    """A smaller model drafts. By default the draft of a PARD model is a chain of 12 tokens."""

    algorithm: ClassVar[str] = "STANDALONE"
    needs: ClassVar[str | None] = "a draft model"
    costly_observe: ClassVar[bool] = True

    _: KW_ONLY
    parallel: bool = setting(
        True, "whether a PARD model, whose config.json has pard_token, drafts in one forward; else token by token",
        flag="speculative_parallel_drafting",
    )  # fmt: skip

    def automatic(self, family: str = "llama", head: Any = None) -> TreeShape:
        is_pard = head is not None and head.mask_token is not None
        return chain_of(PARD_DRAFTS) if is_pard else super().automatic(family, head)

    def speculation(self, loaded: Loaded) -> Speculation:
        model = loaded.model
        if model is not None and not self.parallel:
            model = model._replace(config=replace(model.config, mask_token=None))
        speculation = super().speculation(loaded._replace(model=model))
        is_pard = cast(Target, model).config.mask_token is not None
        return in_one_forward(speculation, costly=True) if is_pard else speculation

    def drafter(self, target: Target, draft: Any, shape: TreeShape, largest: TreeShape, **shared: Any) -> Drafter:
        return standalone_drafter(target, draft, shape, slots=largest.steps, **shared)
