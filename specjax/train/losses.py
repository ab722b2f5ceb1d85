"""What a draft is punished for, by name: functions of its logits and of what the target says at the same place.

    cross_entropy      -sum p log q                the target's distribution as the label (EAGLE-1/2/3)
    greedy             -log q(argmax p)            what greedy decoding will ask for
    token              -log q(the text's token)    an ordinary language model's loss (MTP)
    total_variation    1 - sum min(p, q)           the share of drafts that sampling would refuse
    acceptance         -log sum min(p, q)          the likelihood of acceptance (LK loss, alpha form)
    hybrid             l cross_entropy + (1 - l) total_variation, l = exp(-3 acceptance rate)   (LK loss, lambda form)

sum min(p, q) is the probability that speculative sampling accepts a draft drawn from q: maximising it is the goal
itself, but where p and q hardly overlap it has hardly a gradient, which is what the hybrid is for. p and q are over
the draft's vocabulary. Sources: EAGLE (arXiv 2401.15077, 2503.01840); LK losses (arXiv 2602.23881).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

Logits = Float32[Array, "... W"]
Losses = Float32[Array, "..."]


def _log_probability(logits: Logits, ids: Int32[Array, "..."]) -> Losses:
    """log softmax(logits)[ids]; ids below 0 give anything."""
    chosen = jnp.take_along_axis(logits, jnp.maximum(ids, 0)[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def accepted(logits: Logits, teacher: Logits) -> Losses:
    """sum min(p, q): how often speculative sampling accepts a draft drawn from softmax(logits)."""
    return jnp.minimum(jax.nn.softmax(logits), teacher).sum(axis=-1)


def cross_entropy(logits: Logits, teacher: Logits, labels: Int32[Array, "..."]) -> Losses:
    del labels
    return jax.nn.logsumexp(logits, axis=-1) - (teacher * logits).sum(axis=-1)


def greedy(logits: Logits, teacher: Logits, labels: Int32[Array, "..."]) -> Losses:
    del labels
    return -_log_probability(logits, jnp.argmax(teacher, axis=-1).astype(jnp.int32))


def token(logits: Logits, teacher: Logits, labels: Int32[Array, "..."]) -> Losses:
    del teacher
    return -_log_probability(logits, labels)


def total_variation(logits: Logits, teacher: Logits, labels: Int32[Array, "..."]) -> Losses:
    del labels
    return 1 - accepted(logits, teacher)


def acceptance(logits: Logits, teacher: Logits, labels: Int32[Array, "..."]) -> Losses:
    del labels
    return -jnp.log(jnp.maximum(accepted(logits, teacher), 1e-9))


def hybrid(logits: Logits, teacher: Logits, labels: Int32[Array, "..."]) -> Losses:
    rate = accepted(logits, teacher)
    share = jax.lax.stop_gradient(jnp.exp(-3 * rate))
    return share * cross_entropy(logits, teacher, labels) + (1 - share) * (1 - rate)


LOSSES: Mapping[str, Callable[..., Losses]] = MappingProxyType(
    {f.__name__: f for f in (cross_entropy, greedy, token, total_variation, acceptance, hybrid)}
)
"""Name to (logits [..., W], the target's probabilities [..., W], the text's tokens as ids of the draft's vocabulary
[...], below 0 where it has none) -> a loss each, float32 [...]."""


def feature_regression(predicted: Float[Array, "... M"], wanted: Float[Array, "... M"]) -> Losses:
    """Smooth L1 between a head's output and the target's next feature, the mean over M (EAGLE-1/2)."""
    distance = jnp.abs(predicted.astype(jnp.float32) - wanted.astype(jnp.float32))
    return jnp.where(distance < 1, 0.5 * distance * distance, distance - 0.5).mean(axis=-1)
