"""The definitions of the operations, all in float32. Attention gathers every page and takes one dense softmax.

Slow and large on purpose. The tests compare every other implementation with this one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from specjax_kernels.masks import Causal, unpack_bits


def tree_attention(
    q: Array,
    k_block: Array,
    v_block: Array | None,
    k_pages: Array,
    v_pages: Array | None,
    page_table: Array,
    prefix_length: Array,
    q_positions: Array,
    block_positions: Array,
    mask: Causal | Array,
    *,
    scale: float,
    v_width: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Array:
    """See `specjax_kernels.tree_attention`, which checks the arguments."""
    B, N, H, E = q.shape
    P, S, K, _ = k_pages.shape
    C, T = k_block.shape[1], page_table.shape[1]

    # Keys and values in one row a request: the T * S committed slots, then the C of the block.
    def row(pages: Array, block: Array) -> Array:
        committed = pages[jnp.clip(page_table, 0, P - 1)].reshape(B, T * S, K, -1)
        return jnp.concatenate([committed, block], axis=1).astype(jnp.float32)

    keys = row(k_pages, k_block)
    values = keys[..., :v_width] if v_block is None or v_pages is None else row(v_pages, v_block)

    token = jnp.arange(T * S, dtype=jnp.int32)[None]
    is_page = (page_table >= 0) & (page_table < P)
    committed = (token < prefix_length[:, None]) & jnp.repeat(is_page, S, axis=1)  # [B, T*S]
    committed = jnp.broadcast_to(committed[:, None], (B, N, T * S))
    if isinstance(mask, Causal):
        in_block = jnp.broadcast_to(jnp.tril(jnp.ones((N, C), jnp.bool_)), (B, N, C))
    else:
        in_block = unpack_bits(mask, C)
    visible = jnp.concatenate([committed, in_block], axis=2)  # [B, N, T*S + C]
    visible &= (prefix_length >= 0)[:, None, None]
    if window is not None:
        positions = jnp.concatenate([jnp.broadcast_to(token, (B, T * S)), block_positions], axis=1)
        visible &= positions[:, None] > q_positions[:, :, None] - window

    # A slot that nobody sees may hold anything; 0 * NaN is NaN, so it is cleared rather than weighted by 0.
    values = jnp.where(visible.any(1)[:, :, None, None], values, 0)
    grouped = q.astype(jnp.float32).reshape(B, N, K, H // K, E)
    scores = scale * jnp.einsum("bnkge,btke->bnkgt", grouped, keys, precision="highest")
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    seen = visible[:, :, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
    weights = jnp.where(seen, weights, 0)  # A row that sees nothing: zeros, not the uniform weights of a softmax.
    return jnp.einsum("bnkgt,btkv->bnkgv", weights, values, precision="highest").reshape(B, N, H, -1).astype(q.dtype)


def linear(x: Array, weight: Array, *, transposed: bool = False) -> Array:
    """x [..., M] times weight [M, *out] or, transposed, weight [W, M]: float32 [..., *out]."""
    matrix = (weight.T if transposed else weight).astype(jnp.float32)
    return jnp.tensordot(x.astype(jnp.float32), matrix, axes=1, precision="highest")
