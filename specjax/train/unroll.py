"""Training-time test: a head reads its own output for several rounds, as in a draft tree, with a loss each round.

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
target's most likely token there. So shifts and masks never cross examples of a packed row. All kinds of heads share
this code; an `Objective` has their rounds, losses and weights. Sources: EAGLE-3 (arXiv 2503.01840) and
SafeAILab/EAGLE `traineagle3`; EAGLE-1's regression is round 0 with noise; FastMTP (arXiv 2509.18362) has three rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jaxtyping import Bool, Float, Float32, Int32

from specjax.cache import Weights
from specjax.models.blocks import PLAIN_SCORES, KeyValue, Past, Scores, joined, soft_cap
from specjax.models.draft_head import DraftHead
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
    regression: float = 0.0  # weight of the distance to the target's next feature
    noise: float = 0.0  # added to features: U(-1/2, 1/2) times this times 512 / row length


class Sums(NamedTuple):
    """Sums over the slots that count, by round; divide by `counted` for means."""

    loss: Float32[Array, "J"]
    matched: Float32[Array, "J"]  # the head's most likely token is the target's
    counted: Float32[Array, "J"]
    slots: Float32[Array, "J"]  # with a loss, also where the draft vocabulary lacks the target's token


Loss: TypeAlias = Callable[[Weights, Weights, Rows, Teacher, Array], tuple[Array, Sums]]
"""(head parameters, target parameters, batch, teacher, key of the noise) -> the loss over all slots, and sums."""


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
            losses = losses + objective.regression * feature_regression(feature, ahead(teacher.hidden, 1 + j))
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


def accepted(logits: Logits, teacher: Logits) -> Losses:
    """sum min(p, q): the probability that speculative sampling accepts a draft drawn from softmax(logits)."""
    return jnp.minimum(jax.nn.softmax(logits), teacher).sum(axis=-1)


def cross_entropy(logits: Logits, teacher: Logits, labels: Labels) -> Losses:
    return jax.nn.logsumexp(logits, axis=-1) - (teacher * logits).sum(axis=-1)


def token(logits: Logits, teacher: Logits, labels: Labels) -> Losses:
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))


def hybrid(logits: Logits, teacher: Logits, labels: Labels) -> Losses:
    rate = accepted(logits, teacher)
    share = jax.lax.stop_gradient(jnp.exp(-3 * rate))
    return share * cross_entropy(logits, teacher, labels) + (1 - share) * (1 - rate)


LOSSES: dict[str, Callable[[Logits, Logits, Labels], Losses]] = {
    "cross_entropy": cross_entropy,
    "token": token,
    "hybrid": hybrid,
}
"""Each maps draft logits [..., W], target probabilities [..., W] and the text's tokens as draft ids [...] to float32
losses [...]. A negative id is not in the draft vocabulary; its loss is arbitrary."""


def feature_regression(predicted: Float[Array, "... M"], wanted: Float[Array, "... M"]) -> Losses:
    """Smooth L1 distance of a head's output to the target's next feature, mean over M (EAGLE-1/2)."""
    return optax.losses.huber_loss(predicted.astype(jnp.float32), wanted.astype(jnp.float32)).mean(axis=-1)
