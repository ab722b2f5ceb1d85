"""Training losses of draft heads, and their backends of attention over packed rows.

`unroll` is for heads that draft a token in each forward (training-time test): a head reads its own output for several
rounds, as in a draft tree, with a loss each round.

    tokens              x0 x1 x2 x3 x4          slot t of round j: feature g, embedding of x_{t+1+j}, position t + j;
    round 0   slot 1    (f1, x2) -> x3          it predicts x_{t+2+j}; the teacher is the target's distribution
    round 1   slot 1    (out, x3) -> x4         at t + 1 + j

Slot t of round j sees the same keys as in a draft tree: slots up to t of round 0, computed from the target's features,
and slot t of later rounds, its ancestors. So a round adds one key per slot, not N:

    example of 3 slots, round 2      round 0    round 1    round 2
    slot 0                           x . .      x . .      x . .
    slot 1                           x x .      . x .      . x .
    slot 2                           x x x      . . x      . . x

A slot counts in round j if x_{t+2+j} belongs to the same example and has a loss, and the draft vocabulary contains the
target's most likely token there. So shifts and masks never cross examples of a packed row. An `Objective` has rounds,
losses and weights of a kind of head. Sources: EAGLE-3 (arXiv 2503.01840) and
SafeAILab/EAGLE `traineagle3`; EAGLE-1's regression is round 0 with noise; FastMTP (arXiv 2509.18362) has three rounds.

`block_loss` is for block heads (DFlash, DSpark, DFlash2): blocks at random anchors of packed rows. An anchor x_t has a
loss and is followed by another token with one. As in the engine, whose code runs here, too
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

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jaxtyping import Bool, Float, Float32, Int32
from optax.losses import softmax_cross_entropy_with_integer_labels as label_entropy
from specjax_kernels import Causal

from specjax.cache import Weights
from specjax.config import BlockConfig, HeadConfig, Walk
from specjax.models.block_head import BlockHead, Candidates, Slots
from specjax.models.blocks import PLAIN_SCORES, KeyValue, Past, Scores, joined, soft_cap
from specjax.models.draft_head import DraftHead, draft_head
from specjax.models.target import Target
from specjax.train.data import Rows

Logits = Float32[Array, "... W"]
Losses = Float32[Array, "..."]
Labels = Int32[Array, "..."]
NO_ID = -1  # draft id of a token outside of the draft vocabulary


class Teacher(NamedTuple):
    """Outputs of the frozen target for a batch."""

    features: Float[Array, "B N F"]  # inputs of the head
    hidden: Float[Array, "B N M"]  # after the final norm, before the output layer
    top: Int32[Array, "B N"]  # most likely next token, over the whole vocabulary


class Objective(NamedTuple):
    """The loss of each round; static. There are `len(weights)` rounds."""

    loss: str  # a key of LOSSES
    weights: tuple[float, ...]  # of the rounds
    regression: float = 0.0  # weight of the smooth L1 distance to the target's next feature
    noise: float = 0.0  # added to features: U(-1/2, 1/2) times this times 512 / row length


class Sums(NamedTuple):
    """Sums over the slots that count, by round; divide by `counted` for means."""

    loss: Float32[Array, "J"]
    matched: Float32[Array, "J"]  # the head's most likely token is the target's
    counted: Float32[Array, "J"]
    slots: Float32[Array, "J"]  # with a loss, also where the draft vocabulary lacks the target's token


Teach: TypeAlias = Callable[[Weights, Rows], Teacher]
"""(target parameters, batch) -> the target's outputs."""
Loss: TypeAlias = Callable[[Weights, Weights, Rows, Teacher | None, Array], tuple[Array, Sums]]
"""(float32 weights, target parameters, batch, teacher, key of noise or anchors) -> the loss of all slots, and sums."""


def unroll(
    head: DraftHead, target: Target, params: Weights, target_params: Weights, batch: Rows, teacher: Teacher,
    objective: Objective, key: Array | None,
) -> tuple[Array, Sums]:  # fmt: skip
    """The weighted sum of the rounds' losses over all slots, and sums by round.

    Args:
        head: uses `packed_attention` as its backend.
        params, target_params: in the dtype of the computation; logits and losses are float32.
        key: of the noise; None: no noise.
    """
    features = teacher.features
    rows, length = batch.tokens.shape
    if objective.noise and key is not None:
        noise = (jax.random.uniform(key, features.shape) - 0.5) * (objective.noise * 512 / length)
        features = features + noise.astype(features.dtype)

    ids, draft_ids = draft_vocabulary(head, params)
    probabilities = lax.stop_gradient(jax.nn.softmax(target.unembed(target_params, teacher.hidden, ids)))
    labels, top = draft_ids[batch.tokens], draft_ids[teacher.top]

    mask = packed_mask(batch.segments)
    empty = jnp.zeros((1, 1, 1, 1), jnp.float32)  # training rows begin at position 0: no pages
    past = Past(KeyValue(empty, empty), jnp.zeros((rows, 1), jnp.int32), jnp.zeros(rows, jnp.int32))
    feature, sums, total = head.fuse(params, features), [], jnp.float32(0)
    for j, weight in enumerate(objective.weights):
        embedded = head.embed(target_params, params, ahead(batch.tokens, 1 + j))
        feature, block = head.forward(params, embedded, feature, batch.positions + j, mask, past)
        past = past._replace(before=joined(past.before, block))
        logits = head.unembed(target_params, params, feature)  # of the token 2 + j slots after each
        same = (ahead(batch.segments, 2 + j) == batch.segments) & (batch.segments > 0)
        learnt = same & ahead(batch.loss, 2 + j)
        label, best = ahead(labels, 2 + j), ahead(top, 1 + j)
        in_vocabulary = (best != NO_ID) & ((label != NO_ID) | (objective.loss != "token"))
        counted = (learnt & in_vocabulary).astype(jnp.float32)
        matched = jnp.sum(learnt & (jnp.argmax(logits, axis=-1) == best), dtype=jnp.float32)
        losses = LOSSES[objective.loss](logits, ahead(probabilities, 1 + j), label)
        if objective.regression:
            wanted = ahead(teacher.hidden, 1 + j).astype(jnp.float32)
            distance = optax.losses.huber_loss(feature.astype(jnp.float32), wanted)
            losses = losses + objective.regression * distance.mean(axis=-1)
        loss = jnp.sum(counted * losses)
        sums.append((loss, matched, counted.sum(), learnt.sum(dtype=jnp.float32)))
        total = total + weight * loss
    return total, Sums(*(jnp.stack(parts) for parts in zip(*sums, strict=True)))


def draft_vocabulary(head: DraftHead, params: Weights) -> tuple[Int32[Array, "W"] | None, Int32[Array, "V"]]:
    """The target's ids of the head's tokens (None: the same), and the head's id or `NO_ID` of each of the target's."""
    ids = params["ids"] if head.config.mapped else None
    draft_ids = jnp.arange(head.target.config.vocab_size, dtype=jnp.int32)
    if ids is not None:
        draft_ids = jnp.full_like(draft_ids, NO_ID).at[ids].set(draft_ids[: len(ids)])
    return ids, draft_ids


def ahead(x: Array, by: int) -> Array:
    """[b, t] -> x[b, t + by], zeros (False) past the end."""
    return jnp.pad(x[:, by:], ((0, 0), (0, min(by, x.shape[1])), *((0, 0),) * (x.ndim - 2)))


def packed_mask(segments: Int32[Array, "B N"]) -> Bool[Array, "B N N"]:
    """[b, i, j]: slot i sees slot j, which is in the same example and not later."""
    same = segments[:, :, None] == segments[:, None, :]
    return same & jnp.tril(jnp.ones(same.shape[1:], bool))[None]


def packed_attention(
    rotated: Array, past: Past, positions: Array, mask: Bool[Array, "B N N"], scores: Scores = PLAIN_SCORES
) -> Array:
    """A differentiable `specjax.models.blocks.Backend` that reads no pages.

    Args:
        rotated: [B, N, K, G + 2, E] rotated queries and keys, and values.
        past: `before` holds the keys and values of earlier rounds, N each; None in round 0.
        mask: of round 0.
        scores: a window covers slots of round 0, the only round of a target.

    Returns:
        [B, N, H, E].
    """
    del positions  # the keys are rotated
    rows, length, _, _, size = rotated.shape
    query, block = rotated[..., :-2, :], KeyValue(rotated[..., -2, :], rotated[..., -1, :])
    rounds = joined(past.before, block)
    keys, values = (jnp.split(part, part.shape[1] // length, axis=1) for part in rounds)
    precision = lax.Precision.HIGHEST if rotated.dtype == jnp.float32 else None
    einsum = partial(jnp.einsum, preferred_element_type=jnp.float32, precision=precision)
    scale = size**-0.5 if scores.scale is None else scores.scale
    if scores.window is not None:  # within an example, slots and positions differ by a constant
        slot = jnp.arange(length)
        mask = mask & (slot[:, None] - slot[None] < scores.window)[None]
    products = [einsum("bnkge,btke->bkgnt", query, keys[0])]
    products += [einsum("bnkge,bnke->bkgn", query, key)[..., None] for key in keys[1:]]
    first, *later = (soft_cap(product * jnp.float32(scale), scores.softcap) for product in products)
    if scores.sinks is not None:
        later.append(jnp.broadcast_to(scores.sinks.astype(jnp.float32)[None, :, :, None, None], (*first.shape[:4], 1)))
    weights = jax.nn.softmax(jnp.concatenate([jnp.where(mask[:, None, None], first, -1e30), *later], axis=-1))
    mixed = einsum("bkgnt,btke->bnkge", weights[..., :length].astype(rotated.dtype), values[0])
    for j, value in enumerate(values[1:]):
        weight = weights[..., length + j].transpose(0, 3, 1, 2)[..., None]  # [B, N, K, G, 1]
        mixed = mixed + weight * value[:, :, :, None].astype(jnp.float32)
    return mixed.astype(rotated.dtype).reshape(rows, length, -1, size)


# Training losses for draft heads, by name; p is the target's distribution, q the draft's, over the draft's vocabulary.
#
#     cross_entropy      -sum p log q                the target's distribution as the label (EAGLE-1/2/3)
#     token              -log q(the text's token)    an ordinary language model's loss (MTP)
#     hybrid             l cross_entropy + (1 - l) (1 - a), l = exp(-3 a), a = sum min(p, q)   (LK loss, lambda form)
#
# Where p and q hardly overlap, sum min(p, q) has almost no gradient; the hybrid loss handles that case. Sources: EAGLE
# (arXiv 2401.15077, 2503.01840); LK losses (arXiv 2602.23881).


def cross_entropy(logits: Logits, teacher: Logits, labels: Labels) -> Losses:
    return jax.nn.logsumexp(logits, axis=-1) - (teacher * logits).sum(axis=-1)


def token(logits: Logits, teacher: Logits, labels: Labels) -> Losses:
    return label_entropy(logits, jnp.maximum(labels, 0))


def hybrid(logits: Logits, teacher: Logits, labels: Labels) -> Losses:
    rate = jnp.minimum(jax.nn.softmax(logits), teacher).sum(axis=-1)  # at which speculative sampling accepts
    share = jax.lax.stop_gradient(jnp.exp(-3 * rate))
    return share * cross_entropy(logits, teacher, labels) + (1 - share) * (1 - rate)


LOSSES: dict[str, Callable[[Logits, Logits, Labels], Losses]] = {
    "cross_entropy": cross_entropy,
    "token": token,
    "hybrid": hybrid,
}
"""Each maps draft logits [..., W], target probabilities [..., W] and the text's tokens as draft ids [...] to float32
losses [...]. A negative id is not in the draft vocabulary; its loss is arbitrary."""


# Block heads

D_PACE = 0.5  # alpha: the smallest rate at which a slot is taken to be accepted


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
    logits = walked if found.candidates is None else found.logits
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

    entropy = label_entropy(logits, jnp.maximum(label, 0))
    losses = objective.cross_entropy * entropy
    if objective.distance:
        taught = lax.stop_gradient(jax.nn.softmax(target.unembed(target_params, teacher.hidden, ids)))
        losses += objective.distance * jnp.abs(jax.nn.softmax(logits) - at(taught, before)).sum(axis=-1)
    total, draft = weighted(losses, entropy), jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if found.candidates is not None:
        choice, draft = choose(walked, found.candidates.ids, label)
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
    if found.candidates is not None:
        own = jnp.maximum(label, 0)[:, :, None]
        further = jnp.take_along_axis(found.logits, own, axis=2), own, params["next"][own]
        both = (jnp.concatenate(parts, axis=2) for parts in zip(found.candidates, further, strict=True))
        found = found._replace(candidates=Candidates(*both))
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
    return label_entropy(learnt, place), jnp.take_along_axis(candidates, draft, axis=2)[:, :, 0]


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


def d_pace(entropy: Losses, counted: Losses) -> Losses:
    """Weights [n, D] of slots: how much the expected accept length gains from a slot's log-probability.

    With q' = (1 - `D_PACE`) q + `D_PACE`, the rate at which a slot is accepted, slot j weighs the sum over counted
    m >= j of q'_0 ... q'_m. A slot that does not count has q = 0: its label is not in the draft vocabulary.
    """
    rates = (1 - D_PACE) * jnp.exp(-entropy) * counted + D_PACE
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


def head_loss(
    config: HeadConfig, target: Target, objective: Objective | BlockObjective, *, frozen: Weights,
    scale: Float32[Array, "F"] | None = None, teach: Teach | None = None,
) -> Loss:  # fmt: skip
    """The loss of a head, computed in `config.dtype`, for a target that uses `packed_attention`.

    Args:
        frozen: the leaves that are not trained.
        scale: factors of the features that the head reads.
        teach: the target's forward, in the same step; None: the caller passes a teacher.
    """
    compute: Any = unroll
    if isinstance(config, BlockConfig):
        head, compute = BlockHead(config, target, block_attention), block_loss
    else:
        head = draft_head(config, target, backend=packed_attention)

    def loss(weights: Weights, target_params: Weights, batch: Rows, teacher: Teacher | None, key: Array) -> Any:
        if teacher is None:
            assert teach is not None
            teacher = lax.stop_gradient(teach(target_params, batch))
        if scale is not None:
            teacher = teacher._replace(features=teacher.features * scale.astype(jnp.dtype(config.dtype))[None, None])
        params = with_dtype(weights, config.dtype) | dict(frozen)
        return compute(head, target, params, target_params, batch, teacher, objective, key)

    return loss


def with_dtype(params: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The parameters with trained leaves in this dtype."""

    def cast(leaf: Array) -> Array:
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, dict(params))
