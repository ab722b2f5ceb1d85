"""Attention of packed training rows, with a derivative: causal within an example, and along the rounds of a draft.

In training-time test a head reads its own output again and again. Slot t of round j stands at position t + j and sees
what it will see in a tree: the slots up to t of round 0 (made of the target's features) and its own of the rounds after
it, which are its ancestors:

    example of 3 slots, round 2      round 0    round 1    round 2
    slot 0                           x . .      x . .      x . .
    slot 1                           x x .      . x .      . x .
    slot 2                           x x x      . . x      . . x

So a round costs one more key a slot, not N. Is a `specjax.models.blocks.Backend`; reads no pages.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Int32

from specjax.models.blocks import Past

MASKED = -1e30


def packed_mask(segments: Int32[Array, "B N"]) -> Bool[Array, "B N N"]:
    """[b, i, j]: slot i sees slot j, which is not later and of the same example."""
    same = segments[:, :, None] == segments[:, None, :]
    return same & jnp.tril(jnp.ones(same.shape[1:], bool))[None]


def packed_attention(turned: Array, past: Past, positions: Array, mask: Bool[Array, "B N N"]) -> Array:
    """[B, N, K, G + 2, E] queries, keys and values -> [B, N, H, E].

    Args:
        past: `before` holds the keys and values of the rounds before this one, N of each; None in round 0.
        mask: of round 0.
    """
    del positions  # the keys are turned
    rows, length, heads, _, size = turned.shape
    query, key, value = turned[..., :-2, :], turned[..., -2, :], turned[..., -1, :]
    keys, values = [key], [value]
    if past.before is not None:
        rounds = past.before[0].shape[1] // length
        keys = [*jnp.split(past.before[0], rounds, axis=1), key]
        values = [*jnp.split(past.before[1], rounds, axis=1), value]
    options: dict[str, Any] = {"preferred_element_type": jnp.float32}
    if turned.dtype == jnp.float32:
        options["precision"] = lax.Precision.HIGHEST
    scale = jnp.float32(size**-0.5)
    scores = jnp.einsum("bnkge,btke->bkgnt", query, keys[0], **options) * scale
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    own = [jnp.einsum("bnkge,bnke->bkgn", query, each, **options)[..., None] * scale for each in keys[1:]]
    peak = scores.max(axis=-1, keepdims=True)
    for score in own:
        peak = jnp.maximum(peak, score)
    peak = lax.stop_gradient(peak)
    weights = jnp.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    mixed = jnp.einsum("bkgnt,btke->bkgne", weights.astype(turned.dtype), values[0], **options)
    for score, each in zip(own, values[1:], strict=True):
        weight = jnp.exp(score - peak)
        total = total + weight
        mixed = mixed + weight * each.transpose(0, 2, 1, 3)[:, :, None].astype(jnp.float32)
    mixed = (mixed / total).astype(turned.dtype)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(rows, length, heads * query.shape[3], size)
