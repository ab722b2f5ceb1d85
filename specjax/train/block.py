"""Training of block heads (DFlash, DSpark, DFlash2): blocks at random anchors of packed rows.

An anchor x_t has a loss and is followed by another token with one. As in the engine, whose code runs here, too
(`specjax.models.block_head`), its block reads x_t and masks, and the features of the same example before t:

    tokens     a b c d e f | g h i j     loss of c..f and i, j; the anchor d, blocks of 4 slots
    context    x x x                     features of a, b, c
    block            d . . .             drafts of e, f; the third draft has no label

Blocks do not see each other. Drafts count until the first label that is in another example or has no loss. Losses and
metrics are by slot: slot j of D predicts x_{t+1+j}. `matched` simulates greedy decoding: of the drafts whose earlier
drafts in the block equal the text, those that are the target's most likely token. Sources: z-lab/dflash, SpecForge and
speculators (anchors, D-PACE, DFlash2), deepseek-ai/DeepSpec (DSpark).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Float32, Int32
from optax.losses import softmax_cross_entropy_with_integer_labels as cross_entropy
from specjax_kernels import Causal

from specjax.cache import Weights
from specjax.config import Walk
from specjax.models.block_head import BlockHead, Slots
from specjax.models.blocks import PLAIN_SCORES, KeyValue, Past, Scores, soft_cap
from specjax.models.target import Target
from specjax.train.data import Rows
from specjax.train.unroll import Losses, Sums, Teacher, ahead, draft_vocabulary

D_PACE = 0.5  # alpha: the least rate at which later slots are taken to be reached


class BlockObjective(NamedTuple):
    """The loss of a slot is `cross_entropy` times -log q(label) plus `distance` times the L1 distance of the head's and
    the target's distributions over the draft vocabulary. A selector adds -log q(label) over its candidates, with the
    label in the last one's place if it is not among them."""

    walk: Walk = "none"  # of a new head
    cross_entropy: float = 1.0
    distance: float = 0.0
    decay: float | None = None  # slot j weighs exp(-j / decay); None: D-PACE
    anchors: int = 0  # in each row


BLOCKS: dict[str, BlockObjective] = {
    "DFLASH": BlockObjective(),
    "DSPARK": BlockObjective("vanilla", cross_entropy=0.1, distance=0.9, decay=4.0),
    "DFLASH2": BlockObjective("selector"),
}
"""By algorithm."""


def block_loss(
    head: BlockHead, target: Target, params: Weights, target_params: Weights, batch: Rows, teacher: Teacher,
    objective: BlockObjective, key: Array,
) -> tuple[Array, Sums]:  # fmt: skip
    """The weighted loss over all slots, and sums by slot. `head` uses `block_attention`; `key` draws the anchors."""
    depth, length = head.config.drafts_of(head.config.block), batch.tokens.shape[1]
    slots, used = draw_anchors(batch, objective.anchors, key)
    ids, draft_ids = draft_vocabulary(head, params)
    # Slots of the tokens before the labels, [B, A, D].
    before = slots[:, :, None] + jnp.arange(depth, dtype=jnp.int32)[None, None]

    def at(x: Array, places: Array) -> Array:
        """x [B, N, ...] at [B, A, D] -> [B * A, D, ...]."""
        places = jnp.minimum(places, length - 1)
        return jax.vmap(lambda row, place: row[place])(x, places).reshape(-1, depth, *x.shape[2:])

    label, best = at(draft_ids[batch.tokens], before + 1), at(draft_ids[teacher.top], before)
    found, walked = block_logits(head, params, target_params, batch, teacher.features, slots, label)
    logits = walked if found.ids is None else found.logits
    learnt = at(batch.loss, before + 1) & (at(batch.segments, before + 1) == at(batch.segments, before))
    learnt &= (before + 1 < length).reshape(learnt.shape) & used.reshape(-1, 1)
    learnt = jnp.cumprod(learnt, axis=1).astype(bool)
    counted = (learnt & (label >= 0)).astype(jnp.float32)

    def weighted(losses: Losses, entropy: Losses) -> Array:
        if objective.decay is None:
            weights = d_pace(lax.stop_gradient(entropy), counted)
        else:
            weights = counted * jnp.exp(-jnp.arange(depth, dtype=jnp.float32) / objective.decay)[None]
        return jnp.sum(weights * losses)

    entropy = cross_entropy(logits, jnp.maximum(label, 0))
    losses = objective.cross_entropy * entropy
    if objective.distance:
        taught = lax.stop_gradient(jax.nn.softmax(target.unembed(target_params, teacher.hidden, ids)))
        losses += objective.distance * jnp.abs(jax.nn.softmax(logits) - at(taught, before)).sum(axis=-1)
    total, draft = weighted(losses, entropy), jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if found.ids is not None:
        choice, draft = choose(walked, found.ids, label)
        total, losses = total + weighted(choice, choice), losses + choice

    agreed = jnp.cumprod(draft == label, axis=1).astype(bool)
    reached = learnt & jnp.pad(agreed[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    parts = counted * losses, reached & (draft == best), counted, reached
    return total, Sums(*(part.sum(axis=0, dtype=jnp.float32) for part in parts))


def block_logits(
    head: BlockHead, params: Weights, target_params: Weights, batch: Rows, features: Float[Array, "B N F"],
    slots: Int32[Array, "B A"], label: Int32[Array, "_ D"],
) -> tuple[Slots, Float32[Array, "_ D W"]]:  # fmt: skip
    """Predictions of the blocks at these slots, B * A, and their logits after the text's tokens. With a selector, the
    candidates are followed by `label`, ids of the head, and the second logits are of these tokens."""
    width, depth = head.config.block, head.config.drafts_of(head.config.block)
    anchor, start = (jnp.take_along_axis(x, slots, axis=1).reshape(-1) for x in (batch.tokens, batch.positions))
    first = slots.reshape(-1, 1) - start[:, None]  # of the example
    context = head.context(params, features, batch.positions)
    outputs = head.block(target_params, params, anchor, width, context, first, start, start)
    found = head.slots(target_params, params, outputs, depth)
    if head.config.walk == "none":
        return found, found.logits
    if found.ids is not None:
        own = jnp.maximum(label, 0)[:, :, None]
        further = jnp.take_along_axis(found.logits, own, axis=2), own, params["next"][own]
        joined = (jnp.concatenate(parts, axis=2) for parts in zip(found[2:], further, strict=True))
        found = Slots(*found[:2], *joined)
    state, walked = head.start(len(anchor)), []
    for slot in range(depth):
        previous = jnp.take_along_axis(ahead(batch.tokens, slot), slots, axis=1).reshape(-1, 1)
        logits, state = head.walk(params, found, slot, previous, state)
        walked.append(logits)
    return found, jnp.concatenate(walked, axis=1)


def choose(
    logits: Float32[Array, "n D Q"], ids: Int32[Array, "n D Q"], label: Int32[Array, "n D"]
) -> tuple[Losses, Int32[Array, "n D"]]:
    """A selector's losses and drafts. The Q tokens `ids` are its candidates and the label."""
    candidates = ids[:, :, :-1]
    is_label = candidates == label[:, :, None]
    missing, last = ~is_label.any(axis=-1), candidates.shape[2] - 1
    learnt = logits[:, :, :-1].at[:, :, -1].set(jnp.where(missing, logits[:, :, -1], logits[:, :, last]))
    place = jnp.where(missing, last, jnp.argmax(is_label, axis=-1).astype(jnp.int32))
    draft = jnp.argmax(logits[:, :, :-1], axis=-1, keepdims=True)
    return cross_entropy(learnt, place), jnp.take_along_axis(candidates, draft, axis=2)[:, :, 0]


def draw_anchors(batch: Rows, count: int, key: Array) -> tuple[Int32[Array, "B A"], Bool[Array, "B A"]]:
    """Slots of `count` different anchors in each row, and whether they exist: a row may have fewer.

    Each example has its share of a row's anchors, rounded up or down, and all its anchors are equally likely.
    """
    usable = batch.loss & ahead(batch.loss, 1) & (ahead(batch.segments, 1) == batch.segments)
    order_key, offset_key = jax.random.split(key)
    # Examples one after another, each in random order, and then the other slots.
    rank = batch.segments.astype(jnp.float32) + jax.random.uniform(order_key, usable.shape, jnp.float32)
    order = jnp.argsort(jnp.where(usable, rank, jnp.inf), axis=1)
    total = usable.sum(axis=1, dtype=jnp.int32)[:, None]
    number = jnp.arange(count, dtype=jnp.int32)[None]
    offset = jax.random.randint(offset_key, total.shape, 0, jnp.maximum(total, 1))
    spaced = jnp.where(total > count, (number * total + offset) // count, number)
    places = jnp.take_along_axis(order, jnp.minimum(spaced, order.shape[1] - 1), axis=1)
    return places.astype(jnp.int32), spaced < total


def d_pace(entropy: Losses, counted: Losses, alpha: float = D_PACE) -> Losses:
    """Weights [n, D] of slots: how much the expected accept length gains from a slot's log-probability.

    With q' = (1 - alpha) q + alpha, the rate at which a slot is accepted, slot j weighs the sum over counted m >= j of
    q'_0 ... q'_m. A slot that does not count has q = 0: its label is not in the draft vocabulary.
    """
    rates = (1 - alpha) * jnp.exp(-entropy) * counted + alpha
    reached = jnp.cumprod(rates, axis=1) * counted
    return jnp.cumsum(reached[:, ::-1], axis=1)[:, ::-1] * counted


def block_attention(
    rotated: Float[Array, "n C K Q E"], past: Past, positions: Array, mask: object, scores: Scores = PLAIN_SCORES
) -> Array:
    """A differentiable `specjax.models.blocks.Backend` of blocks in packed rows.

    Args:
        rotated: queries, keys and values of blocks of C slots, n / B in each row.
        past: `pages` are the context of the B rows, [B, N, K, E]; `page_table` [n, 1] is the slot of a block's first
            context token, `prefix_length` [n] the number of these tokens.
        mask: `CAUSAL`, or anything else if slots see the whole block.
    """
    count, width, _, _, size = rotated.shape
    rows, length = past.pages.key.shape[:2]
    parted = rotated.reshape(rows, -1, *rotated.shape[1:])  # [B, A, C, K, G + 2, E]
    query, own = parted[..., :-2, :], KeyValue(parted[..., -2, :], parted[..., -1, :])
    precision = lax.Precision.HIGHEST if rotated.dtype == jnp.float32 else None
    einsum = partial(jnp.einsum, preferred_element_type=jnp.float32, precision=precision)
    # Positions of keys relative to the block of their query, [n, N + C].
    slot, prefix = jnp.arange(width, dtype=jnp.int32), past.prefix_length[:, None]
    context = jnp.arange(length, dtype=jnp.int32)[None] - past.page_table - prefix
    context = jnp.where((context < 0) & (context >= -prefix), context, width)  # out of reach
    places = jnp.concatenate([context, jnp.broadcast_to(slot[None], (count, width))], axis=1)[:, None]
    nearest = slot if isinstance(mask, Causal) else jnp.full_like(slot, width - 1)
    farthest = slot - (length + width if scores.window is None else scores.window)
    seen = (places <= nearest[None, :, None]) & (places > farthest[None, :, None])
    products = einsum("rackge,rtke->rackgt", query, past.pages.key), einsum("rackge,radke->rackgd", query, own.key)
    scale = jnp.float32(size**-0.5 if scores.scale is None else scores.scale)
    capped = soft_cap(jnp.concatenate(products, axis=-1) * scale, scores.softcap)
    masked = jnp.where(seen.reshape(rows, -1, width, 1, 1, length + width), capped, -1e30)
    weights = jax.nn.softmax(masked).astype(rotated.dtype)
    mixed = einsum("rackgt,rtke->rackge", weights[..., :length], past.pages.value)
    mixed += einsum("rackgd,radke->rackge", weights[..., length:], own.value)
    return mixed.astype(rotated.dtype).reshape(count, width, -1, size)
