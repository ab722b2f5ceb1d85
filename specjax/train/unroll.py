"""Training-time test: a head reads its own output for several rounds, as in a draft tree, with a loss each round.

    tokens              x0 x1 x2 x3 x4          slot t of round j: feature g, embedding of x_{t+1+j}, position t + j;
    round 0   slot 1    (f1, x2) -> x3          it predicts x_{t+2+j}, for which the teacher is the target's
    round 1   slot 1    (out, x3) -> x4         distribution at t + 1 + j

Slot t of round j sees the same keys as in a draft tree: the slots up to t of round 0, made from the target's features,
and, of later rounds, only its own, which are its ancestors. So a round costs one more key per slot, not N:

    example of 3 slots, round 2      round 0    round 1    round 2
    slot 0                           x . .      x . .      x . .
    slot 1                           x x .      . x .      . x .
    slot 2                           x x x      . . x      . . x

A slot counts in round j if x_{t+2+j} belongs to the same example and has a loss, and the draft's vocabulary has the
target's likeliest token there. So neither shifts nor masks cross from one example of a packed row to the next. All
kinds of heads share this code; their rounds, losses and weights are in the `Objective`. Sources: EAGLE-3 (arXiv
2503.01840) and SafeAILab/EAGLE `traineagle3`; EAGLE-1's regression is round 0 with noise; FastMTP (arXiv 2509.18362)
has three rounds.
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

from specjax.models.blocks import PLAIN_SCORES, KeyValue, Past, Scores, joined, soft_cap
from specjax.models.draft_head import DraftHead
from specjax.models.target import Target
from specjax.train.data import Rows
from specjax.types import Weights

Logits = Float32[Array, "... W"]
Losses = Float32[Array, "..."]
Labels = Int32[Array, "..."]
NO_ID = -1  # draft id of a token outside of the draft's vocabulary


class Teacher(NamedTuple):
    """Outputs of the frozen target for a batch."""

    features: Float[Array, "B N F"]  # inputs of the head
    hidden: Float[Array, "B N M"]  # after the final norm: gives logits
    top: Int32[Array, "B N"]  # the likeliest next token, over the whole vocabulary


class Objective(NamedTuple):
    """The loss of each round; static. There are `len(weights)` rounds."""

    loss: str  # a key of LOSSES
    weights: tuple[float, ...]  # of the rounds
    regression: float = 0.0  # weight of the distance to the target's next feature
    noise: float = 0.0  # added to features: U(-1/2, 1/2) times this times 512 / row length
    temperature: float = 1.0  # of the teacher's distribution


class Sums(NamedTuple):
    """Sums over the slots that count, by round; divide by `counted` for means."""

    loss: Float32[Array, "J"]
    matched: Float32[Array, "J"]  # the head's likeliest token is the target's
    counted: Float32[Array, "J"]
    slots: Float32[Array, "J"]  # with a loss, also where the draft's vocabulary lacks the answer


Loss: TypeAlias = Callable[[Weights, Weights, Rows, Teacher, Array], tuple[Array, Sums]]
"""(a draft's parameters, the target's, batch, teacher, key of the noise) -> the loss over all slots, and sums."""


class Answers(NamedTuple):
    """What a draft is taught at each token of a batch, in the draft's vocabulary."""

    wanted: Float32[Array, "B N W"]  # the target's distribution of the next token
    labels: Labels  # the text's token as a draft id, or NO_ID
    best: Labels  # the target's likeliest next token, likewise


def answers(
    target: Target, target_params: Weights, batch: Rows, teacher: Teacher, ids: Int32[Array, "W"] | None,
    temperature: float,
) -> Answers:  # fmt: skip
    """`ids`: the target's token of each draft id; None: the same."""
    logits = target.unembed(target_params, teacher.hidden, ids) / temperature
    known = jnp.arange(target.config.vocab_size, dtype=jnp.int32)  # target token -> draft id
    if ids is not None:
        known = jnp.full_like(known, NO_ID).at[ids].set(known[: len(ids)])
    return Answers(lax.stop_gradient(jax.nn.softmax(logits)), known[batch.tokens], known[teacher.top])


class Compared(NamedTuple):
    losses: Losses
    counts: Float32[Array, "B N"]  # 1 where the loss counts
    matched: Float32[Array, ""]  # see `Sums`
    slots: Float32[Array, ""]


def compare(found: Logits, given: Answers, batch: Rows, loss: str, ahead: int) -> Compared:
    """Logits [B, N, W] that predict the token `ahead` slots after each, at least 1, with the answers there."""
    same = (_ahead(batch.segments, ahead) == batch.segments) & (batch.segments > 0)
    in_loss = same & _ahead(batch.loss, ahead)
    answer, label, likeliest = (
        _ahead(given.wanted, ahead - 1),
        _ahead(given.labels, ahead),
        _ahead(given.best, ahead - 1),
    )
    known_answer = (likeliest != NO_ID) & ((label != NO_ID) | (loss != "token"))
    matched = jnp.sum(in_loss & (jnp.argmax(found, axis=-1) == likeliest), dtype=jnp.float32)
    counts = (in_loss & known_answer).astype(jnp.float32)
    return Compared(LOSSES[loss](found, answer, label), counts, matched, in_loss.sum(dtype=jnp.float32))


def unroll(
    head: DraftHead, target: Target, params: Weights, target_params: Weights, batch: Rows, teacher: Teacher,
    objective: Objective, key: Array | None,
) -> tuple[Array, Sums]:  # fmt: skip
    """The weighted sum of the rounds' losses over all slots, and sums by round.

    Args:
        head: made with `packed_attention` as its backend.
        params, target_params: in the dtype to compute in; logits and losses are float32.
        key: of the noise; None: no noise.
    """
    features = teacher.features
    rows, length = batch.tokens.shape
    if objective.noise and key is not None:
        noise = (jax.random.uniform(key, features.shape) - 0.5) * (objective.noise * 512 / length)
        features = features + noise.astype(features.dtype)
    ids = params["ids"] if head.config.mapped else None
    given = answers(target, target_params, batch, teacher, ids, objective.temperature)

    mask = packed_mask(batch.segments)
    empty = jnp.zeros((1, 1, 1, 1), jnp.float32)  # training rows begin at position 0: no pages
    past = Past(KeyValue(empty, empty), jnp.zeros((rows, 1), jnp.int32), jnp.zeros(rows, jnp.int32))
    feature, sums, total = head.fuse(params, features), [], jnp.float32(0)
    for j, weight in enumerate(objective.weights):
        embedded = head.embed(target_params, params, _ahead(batch.tokens, 1 + j))
        feature, block = head.forward(params, embedded, feature, batch.positions + j, mask, past)
        past = past._replace(before=joined(past.before, block))
        found = head.unembed(target_params, params, feature)
        compared = compare(found, given, batch, objective.loss, 2 + j)
        losses, counts = compared.losses, compared.counts
        if objective.regression:
            losses = losses + objective.regression * feature_regression(feature, _ahead(teacher.hidden, 1 + j))
        loss = jnp.sum(counts * losses)
        sums.append((loss, compared.matched, counts.sum(), compared.slots))
        total = total + weight * loss
    return total, Sums(*(jnp.stack(parts) for parts in zip(*sums, strict=True)))


def _ahead(x: Array, by: int) -> Array:
    """[b, t] -> x[b, t + by], zeros (False) past the end."""
    return jnp.pad(x[:, by:], ((0, 0), (0, min(by, x.shape[1])), *((0, 0),) * (x.ndim - 2)))


def packed_mask(segments: Int32[Array, "B N"]) -> Bool[Array, "B N N"]:
    """[b, i, j]: slot i sees slot j, which is not later and of the same example."""
    same = segments[:, :, None] == segments[:, None, :]
    return same & jnp.tril(jnp.ones(same.shape[1:], bool))[None]


def packed_attention(
    turned: Array, past: Past, positions: Array, mask: Bool[Array, "B N N"], scores: Scores = PLAIN_SCORES
) -> Array:
    """A differentiable `specjax.models.blocks.Backend` that reads no pages.

    Args:
        turned: [B, N, K, G + 2, E] rotated queries and keys, and values.
        past: `before` holds the keys and values of the rounds before this one, N of each; None in round 0.
        mask: of round 0.
        scores: a window is one over round 0's slots, which is all that a target has.

    Returns:
        [B, N, H, E].
    """
    del positions  # the keys are rotated
    rows, length, _, _, size = turned.shape
    query, block = turned[..., :-2, :], KeyValue(turned[..., -2, :], turned[..., -1, :])
    rounds = joined(past.before, block)
    keys, values = (jnp.split(each, each.shape[1] // length, axis=1) for each in rounds)
    precision = lax.Precision.HIGHEST if turned.dtype == jnp.float32 else None
    einsum = partial(jnp.einsum, preferred_element_type=jnp.float32, precision=precision)
    scale = size**-0.5 if scores.scale is None else scores.scale
    if scores.window is not None:  # a slot's index in its row and its position grow alike
        slot = jnp.arange(length)
        mask = mask & (slot[:, None] - slot[None] < scores.window)[None]
    products = [einsum("bnkge,btke->bkgnt", query, keys[0])]
    products += [einsum("bnkge,bnke->bkgn", query, each)[..., None] for each in keys[1:]]
    first, *own = (soft_cap(product * jnp.float32(scale), scores.softcap) for product in products)
    weights = jax.nn.softmax(jnp.concatenate([jnp.where(mask[:, None, None], first, -1e30), *own], axis=-1))
    mixed = einsum("bkgnt,btke->bnkge", weights[..., :length].astype(turned.dtype), values[0])
    for j, each in enumerate(values[1:]):
        weight = weights[..., length + j].transpose(0, 3, 1, 2)[..., None]  # [B, N, K, G, 1]
        mixed = mixed + weight * each[:, :, :, None].astype(jnp.float32)
    return mixed.astype(turned.dtype).reshape(rows, length, -1, size)


# Training losses for draft heads, by name; p is the target's distribution, q the draft's, over the draft's vocabulary.
#
#     cross_entropy      -sum p log q                the target's distribution as the label (EAGLE-1/2/3)
#     greedy             -log q(argmax p)            what greedy decoding will ask for
#     token              -log q(the text's token)    an ordinary language model's loss (MTP)
#     total_variation    1 - sum min(p, q)           the share of drafts that sampling would refuse
#     acceptance         -log sum min(p, q)          the likelihood of acceptance (LK loss, alpha form)
#     hybrid             l cross_entropy + (1 - l) total_variation, l = exp(-3 acceptance rate)   (LK loss, lambda form)
#
# sum min(p, q) is the probability that speculative sampling accepts a draft drawn from q. Maximising it is the goal
# itself, but where p and q hardly overlap it has almost no gradient; the hybrid loss handles that case. Sources: EAGLE
# (arXiv 2401.15077, 2503.01840); LK losses (arXiv 2602.23881).


def accepted(logits: Logits, teacher: Logits) -> Losses:
    """sum min(p, q): how often speculative sampling accepts a draft drawn from softmax(logits)."""
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
    "greedy": lambda logits, teacher, _: token(logits, teacher, jnp.argmax(teacher, axis=-1).astype(jnp.int32)),
    "token": token,
    "total_variation": lambda logits, teacher, _: 1 - accepted(logits, teacher),
    "acceptance": lambda logits, teacher, _: -jnp.log(jnp.maximum(accepted(logits, teacher), 1e-9)),
    "hybrid": hybrid,
}
"""Each maps draft logits [..., W], target probabilities [..., W] and the text's tokens as draft ids [...] (negative:
not in the draft's vocabulary, any loss) to float32 losses [...]."""


def feature_regression(predicted: Float[Array, "... M"], wanted: Float[Array, "... M"]) -> Losses:
    """Smooth L1 distance of a head's output to the target's next feature, mean over M (EAGLE-1/2)."""
    return optax.losses.huber_loss(predicted.astype(jnp.float32), wanted.astype(jnp.float32)).mean(axis=-1)
