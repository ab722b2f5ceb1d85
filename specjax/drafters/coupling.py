"""Drafts for requests that sample: the target's own noise is added to the draft's logits.

The target's draw at temperature T is the argmax of ``logits / T + g``, or of ``logits + T g``. The noise g of each
token depends on the seed and the position alone (`specjax.sampling`), so it is known before the target has run: a
tree's level d is drawn at position n + d, whatever the path. The draft adds it to its own logits and goes on as for
greedy text:

    drafts    the largest of ``draft logits + T g``: the target's draw, where both models say the same
    scores    log softmax(draft logits + T g)

The target never draws what a request's top-k, top-p and min-p cut off, however large its noise. A chain's logits are
cut in the same way first; where the two models would cut differently, a token may be missing, so such tokens are
drafted last, not excluded. A tree has room for the likeliest tokens beside the one that the noise prefers; of a narrow
distribution they are right more often, so a request that truncates has its trees without noise.

At T = 0 this is what greedy text is drafted with. Whether a draft is accepted depends on how far its *noisy* logit is
ahead of the others', for the target's noisy logits differ from the draft's by the models' disagreement alone; how
likely the token is by itself tells less. The draws stay the target's, so the text does not change.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float32, Int32
from specjax_kernels import mesh
from specjax_kernels.platforms import by_platform

from specjax.drafters.base import Context
from specjax.sampling import MIN_TEMPERATURE, SamplingRows, cut_min_p, token_noise, truncate

OUTSIDE = 1000.0
"""Taken off the logits of tokens that are drafted last: more than the noise and the logits of the others span."""


def with_noise(
    context: Context, level: int, ids: Int32[Array, "W"], logits: Float32[Array, "B k W"], *, chain: bool
) -> Float32[Array, "B k W"]:
    """Logits of a level's candidates for `ids`, as the target will look at them: with its noise, and cut in a chain.

    Rows that do not sample are left as they are, and so are those that truncate, in a tree.
    """
    logits = cut(context, logits) if chain else logits
    return logits + level_noise(context, level, ids, truncated=chain)[:, None]


def truncates(context: Context) -> Bool[Array, "B"]:
    """Rows that sample from a part of the distribution."""
    rows = context.sampling
    return context.active & (rows.temperature > 0) & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))


def cut(context: Context, logits: Float32[Array, "B k W"]) -> Float32[Array, "B k W"]:
    """Logits less `OUTSIDE` where the request's top-k, top-p or min-p, applied to the draft, would cut the token off.

    On a CPU only in steps in which a row truncates. A GPU's host would have to decide such a branch, and without one
    each level of every step would pay for the sums: logits are left as they are there (see `level_noise`).
    """

    def one(logits: Float32[Array, "W"], row: SamplingRows) -> Float32[Array, "W"]:
        scaled = logits / jnp.maximum(row.temperature, MIN_TEMPERATURE)
        return jnp.where(cut_min_p(truncate(scaled, row), row) > -jnp.inf, logits, logits - OUTSIDE)

    def cut_rows(logits: Array, rows: SamplingRows, needed: Array) -> Array:
        logits = mesh.whole(logits)  # hundreds of sums over all of them follow
        return jnp.where(needed[:, None, None], jax.vmap(jax.vmap(one, in_axes=(0, None)))(logits, rows), logits)

    def where_needed(logits: Array, rows: SamplingRows, needed: Array) -> Array:
        return jax.lax.cond(jnp.any(needed), cut_rows, lambda logits, *_: logits, logits, rows, needed)

    given = logits, context.sampling, truncates(context)
    return by_platform(*given, cpu=where_needed, default=lambda logits, *_: logits)


def level_noise(
    context: Context, level: int, ids: Int32[Array, "W"], *, truncated: bool = True
) -> Float32[Array, "B W"]:
    """T times the noise with which the target draws the tokens `ids` at a level of the trees; the root's is 0.

    Zeros for rows that do not sample, and for those that truncate, on a GPU or without `truncated`: with noise, but not
    cut, a draft of a narrow distribution is accepted less often than without either. On a CPU a step in which no row
    samples computes no noise. A GPU's host would have to decide such a branch; there the noise is elementwise work
    beside reading the logits. A token of no id (NO_TOKEN) gets some noise, too; its logit is -inf.
    """

    def drawn(temperature: Array, seed: Array, position: Array) -> Float32[Array, "B W"]:
        noise = jax.vmap(token_noise, in_axes=(0, 0, None))(seed, position, ids.astype(jnp.uint32))
        return jnp.where(temperature[:, None] > 0, temperature[:, None] * noise, 0.0)

    def where_needed(temperature: Array, seed: Array, position: Array, cuts: Array) -> Float32[Array, "B W"]:
        del cuts

        def nothing(temperature: Array, *_: Array) -> Float32[Array, "B W"]:
            return jnp.zeros((temperature.shape[0], ids.shape[0]), jnp.float32)

        return jax.lax.cond(jnp.any(temperature > 0), drawn, nothing, temperature, seed, position)

    def where_whole(temperature: Array, seed: Array, position: Array, cuts: Array) -> Float32[Array, "B W"]:
        return drawn(jnp.where(cuts, 0.0, temperature), seed, position)

    temperature = jnp.where(context.active, context.sampling.temperature, 0.0)
    if not truncated:
        temperature = jnp.where(truncates(context), 0.0, temperature)
    given = temperature, context.sampling.seed, context.prefix_length + level, truncates(context)
    return by_platform(*given, cpu=where_needed, default=where_whole)
