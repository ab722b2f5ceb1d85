"""STANDALONE: an ordinary model drafts for a larger one that writes the same tokens, or most of them.

n tokens are committed, the root x_n is the last one drawn. The draft's pages are the target's (one page table), and
slot t holds what the draft keeps of x_t; of the root it is kept beside the pages, since it may not have a page yet:

    observe   the tokens that became certain and the new root go through the draft in one forward; all but the root are
              committed, and what is kept of the root, with the draft's output there, waits in the state
    propose   that output predicts level 1; a level's nodes, at position n + level, see the n slots, the root, their
              ancestors and themselves (`grow`)

So a tree of D levels costs D - 1 forwards of k tokens, beside the one of D + 2. The draft reads tokens alone: a slot
depends on the text before it and on nothing else, and reused pages are exact.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32, UInt32
from specjax_kernels import CAUSAL

from specjax.cache import Block, Cache, PoolShape, commit, init_cache, take_path
from specjax.drafters.base import Context, Drafter, DraftState, Observation, Params, put_rows, take_rows
from specjax.drafters.grow import Read, grow, growing_drafter
from specjax.drafters.options import Coupling, Standalone, TreeShape
from specjax.models.target import Before, Target
from specjax.tree import DraftTree
from specjax.types import Hidden, Tokens, Weights


class StandaloneParams(NamedTuple):
    """`Params.draft`: the model's parameters, and how the two vocabularies belong together (`checkpoint.tokenizer`).

    Attributes:
        model: as the draft's family has them.
        ids: int32 [W], the target's id of each row of the draft's output layer; NO_TOKEN: never proposed, such as
            padding. None: the same ids.
        reads: int32 [V], the token that the draft reads for each of the target's. None: the same ids.
    """

    model: Weights
    ids: Int32[Array, "W"] | None = None
    reads: Int32[Array, "V"] | None = None


class StandaloneState(NamedTuple):
    cache: Cache  # the draft's page leaves, in the target's pages
    root: Block  # [R, 1, ...] leaves: what the draft keeps of the row's root
    hidden: Float[Array, "R M"]  # its output at the root: predicts level 1


def standalone_drafter(
    target: Target, draft: Target, shape: TreeShape, *, explicit_width: bool = True, note: str = "",
    positions: int | None = None, coupling: Coupling = "noise",
) -> Drafter:  # fmt: skip
    """Drafts with a model whose `StandaloneParams` are `Params.draft`. [B, N] trees; all nodes are valid unless fewer
    tokens may be proposed than the tree needs, or the text is longer than the draft's
    positions, where nothing is proposed."""

    limit = positions or draft.config.max_positions

    def embed(given: StandaloneParams, tokens: Tokens) -> Hidden:
        return draft.embed(given.model, tokens if given.reads is None else given.reads[tokens])

    def unembed(given: StandaloneParams, hidden: Hidden) -> Float32[Array, "B k W"]:
        logits = draft.unembed(given.model, hidden)
        if given.ids is None:
            return logits[..., : target.config.vocab_size]
        return jnp.where((given.ids >= 0)[None, None], logits, -jnp.inf)

    def init(params: Params, rows: int, pool: PoolShape) -> DraftState:
        del params
        root = init_cache(draft.pages, PoolShape(rows, 1))
        hidden = jnp.zeros((rows, draft.config.hidden_size), jnp.dtype(draft.config.dtype))
        return StandaloneState(init_cache(draft.pages, pool), root, hidden)

    def propose(
        shape: TreeShape, params: Params, state: StandaloneState, context: Context
    ) -> tuple[DraftTree, DraftState]:
        given, start = params.draft, context.prefix_length[:, None]

        def read(
            level: int, tokens: Int32[Array, "B k"], carry: tuple[()], mask: UInt32[Array, "#B k words"], before: Before
        ) -> Read:
            positions = jnp.broadcast_to(start + level, tokens.shape)
            past = state.cache, context.page_table, context.attended
            output = draft.forward(given.model, embed(given, tokens), positions, mask, *past, before=before)
            own = Before(output.block, positions)
            keys = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), before, own)
            return Read(unembed(given, output.hidden), carry, keys)

        root, hidden = take_rows((state.root, state.hidden), context)
        first = Read(unembed(given, hidden[:, None]), (), Before(root, start))

        def target_ids(ids: Int32[Array, "..."]) -> Int32[Array, "..."]:
            return ids if given.ids is None else given.ids[ids]

        return grow(context, shape, first, read, target_ids, coupling=coupling), state

    def observe(params: Params, state: StandaloneState, context: Context, seen: Observation) -> DraftState:
        given = params.draft
        # The first token again, which was the root: another request's chunk may have ended before it.
        tokens = jnp.concatenate([seen.tokens[:, :1], seen.next_tokens], axis=1)
        index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        positions = context.prefix_length[:, None] + index
        past = state.cache, context.page_table, context.attended
        output = draft.forward(given.model, embed(given, tokens), positions, CAUSAL, *past)
        # A NaN in a page would spread to the requests that hold the page later.
        broken = jnp.any(jnp.isnan(output.hidden[:, :, 0]) & (index <= seen.length[:, None]), axis=1)
        length = jnp.where(broken, 0, seen.length)
        where = context.page_table, context.prefix_length, length
        cache = commit(state.cache, output.block, *where, after=output.hidden)
        last = seen.length[:, None]  # the root's index
        root = take_path(output.block, last)
        hidden = jnp.take_along_axis(output.hidden, last[:, :, None], axis=1)[:, 0]
        return StandaloneState(cache, *put_rows((state.root, state.hidden), (root, hidden), context, seen))

    return growing_drafter(
        Standalone.algorithm, None, shape, init=init, propose=propose, observe=observe,
        explicit_width=explicit_width, note=note, coupling=coupling, costly_observe=True,
        positions=limit if limit < target.config.max_positions else None,
    )  # fmt: skip
