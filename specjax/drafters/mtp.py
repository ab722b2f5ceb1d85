"""MTP with several heads of the target's checkpoint: head l drafts level l + 1, the last head all further levels.

Slot t of head i reads (output of head i - 1 at slot t, or the target's feature f_t for head 0; x_{t+1+i}), see
`specjax.models.mtp_spec`. n committed tokens and the root x_n give head i n - i slots:

    observe   runs head by head over new tokens. New slots of head i begin i slots before those of head 0, so it first
              reads the last output of head i - 1 of the previous call, which the state keeps
    propose   predicts level 1 from the last output of head 0. A path c_1 .. c_i gives head i its slots n - i .. n - 1;
              it reads all of them at once, and the last predicts level i + 1

The last head, applied again, reads its own output at slot n and following. Each node carries the keys of its own path,
so nodes share no keys. With one head this is `eagle`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32, UInt32
from specjax_kernels import CAUSAL, pack_bits

from specjax.cache import PoolShape, commit, init_cache
from specjax.config import MtpConfig
from specjax.drafters.base import (
    Context,
    Drafter,
    DraftState,
    Observation,
    Params,
    keep_at_page_ends,
    kept_at_page_end,
    put_rows,
    take_rows,
)
from specjax.drafters.eagle import Eagle, eagle_drafter
from specjax.drafters.grow import Read, grow, tree_drafter
from specjax.drafters.options import Coupling, TreeShape, position_limit
from specjax.limits import documented
from specjax.models.blocks import Past
from specjax.models.head_spec import ALGORITHMS
from specjax.models.mtp import MtpHead
from specjax.models.target import Target
from specjax.tree import DraftTree


class MtpState(NamedTuple):
    caches: tuple[Any, ...]  # one for each head: [P, S, ...] leaves by the target's page table
    last: Float[Array, "R heads M"]  # each head's output at its last slot
    ends: Float[Array, "P heads M"]  # outputs at the end of each page, for requests that start after it


class _Path(NamedTuple):
    """Data of a node for its children."""

    tokens: Int32[Array, "B k l"]  # the path from below the root to the node
    outs: Float[Array, "B k m M"]  # outputs of its head at the slots of these tokens
    keys: Any  # [B, k, c, ...]: keys of the last head at these slots; (): another head read the node


def mtp_drafter(
    target: Target, config: MtpConfig, shape: TreeShape, *, levels: int | None = None, backend: str | None = None,
    positions: int | None = None, coupling: Coupling = "noise",
) -> Drafter:  # fmt: skip
    """Drafts with the heads of `Params.draft`; those beyond `levels`, by default the tree's steps, are not run. See
    `eagle_drafter`."""
    heads = [MtpHead(config, target, backend, i) for i in range(min(config.count, levels or shape.steps))]
    if len(heads) == 1:
        return eagle_drafter(target, config, shape, backend=backend, positions=positions, coupling=coupling)
    final = len(heads) - 1

    def init(params: Params, rows: int, pool: PoolShape) -> DraftState:
        del params
        last, ends = (
            jnp.zeros((count, len(heads), config.hidden_size), jnp.dtype(config.dtype)) for count in (rows, pool.pages)
        )
        return MtpState(tuple(init_cache(head.pages, pool) for head in heads), last, ends)

    def committed(state: MtpState, context: Context, head: int, before: Any = None) -> Past:
        """A head's committed slots."""
        slots = context._replace(prefix_length=jnp.maximum(context.prefix_length - head, 0))
        return Past(state.caches[head], context.page_table, slots.attended, before)

    def propose(params: Params, state: MtpState, context: Context) -> tuple[DraftTree, DraftState]:
        last = take_rows(state.last, context)

        def read(
            level: int, tokens: Int32[Array, "B k"], above: _Path, mask: UInt32[Array, "#B k words"], before: Any
        ) -> Read:
            del mask, before
            head = min(level, final)
            batch, k = tokens.shape
            path = jnp.concatenate([above.tokens, tokens[:, :, None]], axis=2)
            if level > final:  # the last head again
                cached, feature = level - 1, above.outs[:, :, -1:]
            else:
                first = jnp.broadcast_to(last[:, None, None, head - 1], (batch, k, 1, last.shape[2]))
                cached, feature = 0, jnp.concatenate([first, above.outs], axis=2)
            new = level - cached
            slots = context.prefix_length[:, None] - head + jnp.arange(level, dtype=jnp.int32)[None, :]
            sees = _seen(slots >= 0, cached)
            # Slots before the text's start are masked, but 0 times a NaN of an earlier request would be NaN.
            feature = jnp.where((slots >= 0)[:, None, cached:, None], feature, jnp.zeros_like(feature))
            embedded = heads[head].embed(params.target, params.draft, _flat(path[:, :, cached:]))
            positions = jnp.broadcast_to(jnp.maximum(slots, 0)[:, None, cached:], (batch, k, new))
            visible = jnp.concatenate([_apart(sees[:, :, :cached], k), _apart(sees[:, :, cached:], k)], axis=2)
            past = committed(state, context, head, jax.tree.map(_flat, above.keys) if cached else None)
            out, block = heads[head].forward(
                params.draft, embedded, _flat(feature), _flat(positions), pack_bits(visible), past
            )
            outs, keys = jax.tree.map(lambda leaf: leaf.reshape(batch, k, new, *leaf.shape[2:]), (out, block))
            if cached:
                keys = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=2), above.keys, keys)
            logits = heads[head].unembed(params.target, params.draft, outs[:, :, -1])
            return Read(logits, _Path(path, outs, keys if head == final else ()), None)

        batch = last.shape[0]
        empty = _Path(jnp.zeros((batch, 1, 0), jnp.int32), jnp.zeros((batch, 1, 0, last.shape[2]), last.dtype), ())
        start = Read(heads[0].unembed(params.target, params.draft, last[:, :1]), empty, None)
        ids = partial(heads[0].target_ids, params.draft)
        return grow(context, shape, start, read, ids, coupling=coupling), state

    def observe(params: Params, state: MtpState, context: Context, seen: Observation) -> DraftState:
        assert seen.features is not None
        width = seen.tokens.shape[1]
        end, there = kept_at_page_end(state.ends, context)
        previous = jnp.where(there[:, None, None], end, take_rows(state.last, context))
        index = jnp.arange(width, dtype=jnp.int32)[None, :]
        caches, last, outs, out = [], [], [], seen.features
        for i, head in enumerate(heads):
            start = jnp.maximum(context.prefix_length - i, 0)
            absent = jnp.maximum(i - context.prefix_length, 0)  # tokens with slots before the text's start
            length = jnp.maximum(seen.length - absent, 0)
            at = jnp.minimum(index + absent[:, None], width - 1)
            embedded = head.embed(params.target, params.draft, jnp.take_along_axis(seen.next_tokens, at, axis=1))
            if i:
                shifted = jnp.concatenate([previous[:, i - 1, None], out[:, :-1]], axis=1)
                out = jnp.where((absent > 0)[:, None, None], out, shifted)
            out, block = head.forward(
                params.draft, embedded, out, start[:, None] + index, CAUSAL, committed(state, context, i)
            )
            newest = jnp.take_along_axis(out, jnp.maximum(length - 1, 0)[:, None, None], axis=1)[:, 0]
            # A NaN would spread to later requests with this page.
            finite = jnp.where(jnp.isnan(newest[:, 0]), 0, length)
            caches.append(commit(state.caches[i], block, context.page_table, start, finite, after=newest))
            last.append(newest)  # not read before the head has a slot
            of_token = jnp.maximum(index - absent[:, None], 0)[:, :, None]
            outs.append(jnp.take_along_axis(out, of_token, axis=1))
        ends = keep_at_page_ends(state.ends, jnp.stack(outs, axis=2), context, seen)
        return MtpState(tuple(caches), put_rows(state.last, jnp.stack(last, axis=1), context, seen), ends)

    limit = position_limit(target, config, positions)
    return tree_drafter(Mtp.algorithm, config.features, shape, limit, init, propose, observe)


@documented
@dataclass(frozen=True)
class Mtp(Eagle):
    """Multi-token prediction layers of the model's own checkpoint, or a head such as MiMo's in a folder."""

    algorithm: ClassVar[str] = "MTP"
    needs: ClassVar[str | None] = "MTP layers in the model, or a draft head"
    kind: ClassVar[str | None] = ALGORITHMS[algorithm].kind
    trees: ClassVar[Mapping[str, TreeShape]] = {}

    def drafter(self, target: Target, draft: Any, shape: TreeShape, largest: TreeShape, **shared: Any) -> Drafter:
        if not isinstance(draft, MtpConfig):
            return eagle_drafter(target, draft, shape, **shared)
        return mtp_drafter(target, draft, shape, levels=largest.steps, **shared)


def _flat(leaf: Array) -> Array:
    """[B, k, m, ...] -> [B, k m, ...]"""
    return leaf.reshape(leaf.shape[0], -1, *leaf.shape[3:])


def _seen(valid: Bool[Array, "B l"], cached: int) -> Bool[Array, "B m l"]:
    """Slots of a path that each slot after `cached` attends to: valid slots up to itself."""
    slot = jnp.arange(valid.shape[1], dtype=jnp.int32)
    query = slot[cached:, None]
    return ((slot[None, :] <= query)[None] & valid[:, None]) | (slot[None, :] == query)[None]


def _apart(sees: Bool[Array, "B m c"], k: int) -> Bool[Array, "B km kc"]:
    """The mask of k paths in one block, which do not see each other."""
    same_path = jnp.eye(k, dtype=bool)[None, :, None, :, None]
    return (same_path & sees[:, None, :, None, :]).reshape(sees.shape[0], k * sees.shape[1], -1)
