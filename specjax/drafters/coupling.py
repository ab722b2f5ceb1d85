"""Adds the target's noise to the draft's logits, for requests that sample (docs/algorithms.md, Shared noise).

The target's draw at temperature T is the argmax of logits + T g. The noise g of a token depends on seed and position
alone, so level d of a tree uses the noise of position n + d. Drafts are the largest of ``draft logits + T g``, and
scores are its log-softmax. At T = 0 both are greedy.
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
"""Subtracted from logits of tokens that are drafted last; exceeds the range of logits and noise."""


def with_noise(
    context: Context, level: int, ids: Int32[Array, "*nodes W"], logits: Float32[Array, "B k W"], *, chain: bool
) -> Float32[Array, "B k W"]:
    """Adds the target's noise to the logits of a level's candidates `ids`, [W], [B, 1, W] or [B, k, W]; a chain's
    logits are truncated first.

    Rows that do not sample are unchanged. In a tree, rows that truncate are unchanged, too.
    """
    logits = cut(context, logits) if chain else logits
    noise = level_noise(context, level, ids, truncated=chain)
    return logits + (noise if ids.ndim == 3 else noise[:, None])


def truncates(context: Context) -> Bool[Array, "B"]:
    """Rows that sample with top-k, top-p or min-p."""
    rows = context.sampling
    return context.active & (rows.temperature > 0) & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))


def cut(context: Context, logits: Float32[Array, "B k W"]) -> Float32[Array, "B k W"]:
    """Subtracts `OUTSIDE` from tokens that the request's top-k, top-p or min-p would remove from the draft's logits.

    The target never draws what it removes. The two models may remove different tokens, so these are drafted last, not
    excluded. Only on a CPU, and only in steps with such rows: a GPU would need the host to decide the branch.
    """

    def cut_row(logits: Float32[Array, "W"], row: SamplingRows) -> Float32[Array, "W"]:
        scaled = logits / jnp.maximum(row.temperature, MIN_TEMPERATURE)
        inside = cut_min_p(truncate(scaled, row), row, jnp.max(scaled)) > -jnp.inf
        return jnp.where(inside, logits, logits - OUTSIDE)

    def cut_rows(logits: Array, rows: SamplingRows, needed: Array) -> Array:
        logits = mesh.whole(logits)  # gathered once, before hundreds of sums over the vocabulary
        truncated = jax.vmap(jax.vmap(cut_row, in_axes=(0, None)))(logits, rows)
        return jnp.where(needed[:, None, None], truncated, logits)

    def on_cpu(logits: Array, rows: SamplingRows, needed: Array) -> Array:
        return jax.lax.cond(jnp.any(needed), cut_rows, lambda logits, *_: logits, logits, rows, needed)

    arguments = logits, context.sampling, truncates(context)
    return by_platform(*arguments, cpu=on_cpu, default=lambda logits, *_: logits)


def level_noise(
    context: Context, level: int, ids: Int32[Array, "*nodes W"], *, truncated: bool = True
) -> Float32[Array, "B ..."]:
    """T g of the tokens `ids` at a level of the trees (the root's level is 0); [B, W], or of the shape of [B, k, W].

    Zero for rows that do not sample. Zero for rows that truncate, on a GPU or without `truncated`: drafts of a narrow
    distribution are accepted less often with noise than without, unless they are truncated too. On a CPU, steps
    without sampling rows compute no noise; on a GPU it is elementwise work beside reading the logits. Tokens without an
    id (NO_TOKEN) have a logit of -inf, so their noise is irrelevant.
    """

    def drawn(temperature: Array, seed: Array, position: Array) -> Float32[Array, "B ..."]:
        by_node = ids.ndim == 3
        of_request = jax.vmap(token_noise, in_axes=(None, None, 0)) if by_node else token_noise
        axes = (0, 0, 0 if by_node else None)
        noise = jax.vmap(of_request, in_axes=axes)(seed, position, ids.astype(jnp.uint32))
        temperature = temperature.reshape(-1, *[1] * (noise.ndim - 1))
        return jnp.where(temperature > 0, temperature * noise, 0.0)

    def on_cpu(temperature: Array, seed: Array, position: Array, cuts: Array) -> Float32[Array, "B ..."]:
        del cuts

        def zeros(temperature: Array, *_: Array) -> Float32[Array, "B ..."]:
            shape = ids.shape if ids.ndim == 3 else (temperature.shape[0], *ids.shape)
            return jnp.zeros(shape, jnp.float32)

        return jax.lax.cond(jnp.any(temperature > 0), drawn, zeros, temperature, seed, position)

    def on_gpu(temperature: Array, seed: Array, position: Array, cuts: Array) -> Float32[Array, "B ..."]:
        return drawn(jnp.where(cuts, 0.0, temperature), seed, position)

    temperature = jnp.where(context.active, context.sampling.temperature, 0.0)
    if not truncated:
        temperature = jnp.where(truncates(context), 0.0, temperature)
    arguments = temperature, context.sampling.seed, context.prefix_length + level, truncates(context)
    return by_platform(*arguments, cpu=on_cpu, default=on_gpu)
