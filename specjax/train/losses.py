"""Training losses for draft heads, by name; p is the target's distribution, q the draft's, over the draft's vocabulary.

    cross_entropy      -sum p log q                the target's distribution as the label (EAGLE-1/2/3)
    greedy             -log q(argmax p)            what greedy decoding will ask for
    token              -log q(the text's token)    an ordinary language model's loss (MTP)
    total_variation    1 - sum min(p, q)           the share of drafts that sampling would refuse
    acceptance         -log sum min(p, q)          the likelihood of acceptance (LK loss, alpha form)
    hybrid             l cross_entropy + (1 - l) total_variation, l = exp(-3 acceptance rate)   (LK loss, lambda form)

sum min(p, q) is the probability that speculative sampling accepts a draft drawn from q. Maximising it is the goal
itself, but where p and q hardly overlap it has almost no gradient; the hybrid loss handles that case. Sources: EAGLE
(arXiv 2401.15077, 2503.01840); LK losses (arXiv 2602.23881).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float, Float32, Int32

Logits = Float32[Array, "... W"]
Losses = Float32[Array, "..."]
Labels = Int32[Array, "..."]


def accepted(logits: Logits, teacher: Logits) -> Losses:
    """sum min(p, q): how often speculative sampling accepts a draft drawn from softmax(logits)."""
    return jnp.minimum(jax.nn.softmax(logits), teacher).sum(axis=-1)


def cross_entropy(logits: Logits, teacher: Logits, labels: Labels) -> Losses:
    return jax.nn.logsumexp(logits, axis=-1) - (teacher * logits).sum(axis=-1)


def greedy(logits: Logits, teacher: Logits, labels: Labels) -> Losses:
    return token(logits, teacher, jnp.argmax(teacher, axis=-1).astype(jnp.int32))


def token(logits: Logits, teacher: Logits, labels: Labels) -> Losses:
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))


def total_variation(logits: Logits, teacher: Logits, labels: Labels) -> Losses:
    return 1 - accepted(logits, teacher)


def acceptance(logits: Logits, teacher: Logits, labels: Labels) -> Losses:
    return -jnp.log(jnp.maximum(accepted(logits, teacher), 1e-9))


def hybrid(logits: Logits, teacher: Logits, labels: Labels) -> Losses:
    rate = accepted(logits, teacher)
    share = jax.lax.stop_gradient(jnp.exp(-3 * rate))
    return share * cross_entropy(logits, teacher, labels) + (1 - share) * (1 - rate)


_ALL = (cross_entropy, greedy, token, total_variation, acceptance, hybrid)
LOSSES: dict[str, Callable[..., Losses]] = {function.__name__: function for function in _ALL}
"""Each maps draft logits [..., W], target probabilities [..., W] and the text's tokens as draft ids [...] (negative:
not in the draft's vocabulary, any loss) to float32 losses [...]."""


def feature_regression(predicted: Float[Array, "... M"], wanted: Float[Array, "... M"]) -> Losses:
    """Smooth L1 distance of a head's output to the target's next feature, mean over M (EAGLE-1/2)."""
    return optax.losses.huber_loss(predicted.astype(jnp.float32), wanted.astype(jnp.float32)).mean(axis=-1)
