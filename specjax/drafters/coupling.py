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


def level_noise(context: Context, levels: int, ids: Int32[Array, "W"]) -> Float32[Array, "D B W"]:
    """T times the noise with which the target draws the tokens `ids` at each of the tree's levels, D = `levels`.

    Zeros for rows that do not sample. One branch: a step in which no row samples computes no noise. A token of no id
    (NO_TOKEN) gets some noise, too; its logit is -inf.
    """
    temperature = jnp.where(context.active, context.sampling.temperature, 0.0)
    shape = levels, temperature.shape[0], ids.shape[0]

    def drawn() -> Float32[Array, "D B W"]:
        tokens = ids.astype(jnp.uint32)
        level = jnp.arange(1, levels + 1, dtype=jnp.int32)

        def of_row(seed: Array, start: Array, scale: Array) -> Float32[Array, "D W"]:
            noise = jax.vmap(token_noise, in_axes=(None, 0, None))(seed, start + level, tokens)
            return jnp.where(scale > 0, scale * noise, 0.0)

        return jax.vmap(of_row, out_axes=1)(context.sampling.seed, context.prefix_length, temperature)

    return jax.lax.cond(jnp.any(temperature > 0), drawn, lambda: jnp.zeros(shape, jnp.float32))
