"""Attention of packed training rows, differentiable: causal within an example and along the rounds of a draft.

In training-time test a head reads its own output round after round. Slot t of round j has position t + j and sees the
same keys as in a draft tree: the slots up to t of round 0 (made from the target's features) and, of later rounds, only
its own, which are its ancestors:

    example of 3 slots, round 2      round 0    round 1    round 2
    slot 0                           x . .      x . .      x . .
    slot 1                           x x .      . x .      . x .
    slot 2                           x x x      . . x      . . x

So a round costs one more key per slot, not N. Implements `specjax.models.blocks.Backend`; reads no pages.
"""

from __future__ import annotations

from functools import partial

import jax
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
    """[B, N, K, G + 2, E] rotated queries and keys, and values -> [B, N, H, E].

    Args:
        past: `before` holds the keys and values of the rounds before this one, N of each; None in round 0.
        mask: of round 0.
    """
    del positions  # the keys are rotated
    rows, length, _, _, size = turned.shape
    query, key, value = turned[..., :-2, :], turned[..., -2, :], turned[..., -1, :]
    if past.before is None:
        keys, values = [key], [value]
    else:
        rounds = past.before[0].shape[1] // length
        keys, values = (
            [*jnp.split(old, rounds, axis=1), new] for old, new in zip(past.before, (key, value), strict=True)
        )
    precision = lax.Precision.HIGHEST if turned.dtype == jnp.float32 else None
    einsum = partial(jnp.einsum, preferred_element_type=jnp.float32, precision=precision)
    scores = jnp.where(mask[:, None, None], einsum("bnkge,btke->bkgnt", query, keys[0]), MASKED)
    own = [einsum("bnkge,bnke->bkgn", query, each)[..., None] for each in keys[1:]]
    weights = jax.nn.softmax(jnp.concatenate([scores, *own], axis=-1) * jnp.float32(size**-0.5))
    mixed = einsum("bkgnt,btke->bnkge", weights[..., :length].astype(turned.dtype), values[0])
    for j, each in enumerate(values[1:]):
        weight = weights[..., length + j].transpose(0, 3, 1, 2)[..., None]  # [B, N, K, G, 1]
        mixed = mixed + weight * each[:, :, :, None].astype(jnp.float32)
    return mixed.astype(turned.dtype).reshape(rows, length, -1, size)
