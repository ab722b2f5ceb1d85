"""Drafts for requests that sample: the target's own noise is added to the draft's logits.

The target's draw at temperature T is the argmax of ``logits / T + g``, or of ``logits + T g``. The noise g of each
token depends on the seed and the position alone (`specjax.sampling`), so it is known before the target has run: a
tree's level d is drawn at position n + d, whatever the path. The draft adds it to its own logits and goes on as for
greedy text:

    drafts    the largest of ``draft logits + T g``: the target's draw, where both models say the same
    scores    log softmax(draft logits + T g)

At T = 0 this is what greedy text is drafted with. Whether a draft is accepted depends on how far its *noisy* logit is
ahead of the others', for the target's noisy logits differ from the draft's by the models' disagreement alone; how
likely the token is by itself tells less. The draws stay the target's, so the text does not change.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32, Int32

from specjax.drafters.base import Context
from specjax.sampling import token_noise


def level_noise(context: Context, level: int, ids: Int32[Array, "W"]) -> Float32[Array, "B W"]:
    """T times the noise with which the target draws the tokens `ids` at a level of the trees; the root's is 0.

    Zeros for rows that do not sample. On a CPU a step in which no row samples computes no noise. A GPU's host would
    have to decide such a branch; there the noise is elementwise work beside reading the logits. A token of no id
    (NO_TOKEN) gets some noise, too; its logit is -inf.
    """

    def drawn(temperature: Array, seed: Array, position: Array) -> Float32[Array, "B W"]:
        noise = jax.vmap(token_noise, in_axes=(0, 0, None))(seed, position, ids.astype(jnp.uint32))
        return jnp.where(temperature[:, None] > 0, temperature[:, None] * noise, 0.0)

    def where_needed(temperature: Array, *others: Array) -> Float32[Array, "B W"]:
        def nothing(temperature: Array, *_: Array) -> Float32[Array, "B W"]:
            return jnp.zeros((temperature.shape[0], ids.shape[0]), jnp.float32)

        return jax.lax.cond(jnp.any(temperature > 0), drawn, nothing, temperature, *others)

    temperature = jnp.where(context.active, context.sampling.temperature, 0.0)
    given = temperature, context.sampling.seed, context.prefix_length + level
    return jax.lax.platform_dependent(*given, cpu=where_needed, default=drawn)
