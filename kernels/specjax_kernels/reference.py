"""The definitions of the operations, all in float32. Attention gathers every page and computes one dense softmax.

It is slow and needs much memory, but it is short: the tests compare every other implementation with it.
`kernels/README.md` has an example.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax_kernels.call import Call, block_visibility


def tree_attention(call: Call) -> Array:
    """See `specjax_kernels.tree_attention`."""
    B, H, N, C, K, G, E, Ev, P, S, T = call.shape[:11]
    scale, window, softcap = call.scale, call.window, call.softcap
    page_table, prefix_length = call.page_table, call.prefix_length

    # Keys and values in one row a request: the T * S committed slots, then the C of the block.
    def row(pages: Any, block: Any) -> Array:
        committed = pages[jnp.clip(page_table, 0, P - 1)].reshape(B, T * S, K, -1)
        return jnp.concatenate([committed, block], axis=1).astype(jnp.float32)

    keys = row(call.k_pages, call.k_block)
    values = keys[..., :Ev] if call.v_block is None else row(call.v_pages, call.v_block)

    token = jnp.arange(T * S, dtype=jnp.int32)[None]
    is_page = (page_table >= 0) & (page_table < P)
    committed = (token < prefix_length[:, None]) & jnp.repeat(is_page, S, axis=1)  # [B, T*S]
    committed = jnp.broadcast_to(committed[:, None], (B, N, T * S))
    in_block = jnp.broadcast_to(block_visibility(call.mask, N, C), (B, N, C))
    visible = jnp.concatenate([committed, in_block], axis=2)  # [B, N, T*S + C]
    visible &= (prefix_length >= 0)[:, None, None]
    if window is not None:
        positions = jnp.concatenate([jnp.broadcast_to(token, (B, T * S)), call.block_positions], axis=1)
        visible &= positions[:, None] > call.q_positions[:, :, None] - window

    # A slot that no query sees may hold NaN, and 0 * NaN is NaN: it is cleared.
    values = jnp.where(visible.any(1)[:, :, None, None], values, 0)
    grouped = call.q.astype(jnp.float32).reshape(B, N, K, G, E)
    scores = scale * jnp.einsum("bnkge,btke->bnkgt", grouped, keys, precision="highest")
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    seen = visible[:, :, None, None]
    scores = jnp.where(seen, scores, -1e30)
    if call.sinks is not None:
        sinks = jnp.broadcast_to(call.sinks.astype(jnp.float32).reshape(1, 1, K, G, 1), (B, N, K, G, 1))
        scores = jnp.concatenate([scores, sinks], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : T * S + C]
    weights = jnp.where(seen, weights, 0)  # a softmax over no visible key would have uniform weights
    mixed = jnp.einsum("bnkgt,btkv->bnkgv", weights, values, precision="highest")
    return mixed.reshape(B, N, H, Ev).astype(call.q.dtype)


def linear(x: Array, weight: Array, *, transposed: bool = False) -> Array:
    """x [..., M] times weight [M, *out] or, transposed, weight [W, M]: float32 [..., *out]."""
    matrix = (weight.T if transposed else weight).astype(jnp.float32)
    return jnp.tensordot(x.astype(jnp.float32), matrix, axes=1, precision="highest")
