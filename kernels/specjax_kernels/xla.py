"""`tree_attention` in plain XLA: the CPU's path, and the fallback anywhere else.

Flash-style online softmax over chunks of pages. The loop's trip count is computed from `prefix_length` (and the
window), so that the cost follows the tokens that are there and not the T * S that a row may hold.

The pools are only ever read by gathers, inside or outside the loop, and XLA:CPU then never copies one.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax_kernels.masks import Causal, unpack_bits

CHUNK_TOKENS = 128
BLOCK_CHUNK = 1024
MASKED = -1e30


class Partial(NamedTuple):
    """An unfinished softmax over the keys seen so far, rows r = (n, g): query n, head g of the group."""

    peak: Array  # f32 [B, K, NG, 1], the largest score; MASKED while nothing was seen
    total: Array  # f32 [B, K, NG, 1], sum of exp(score - peak)
    mixed: Array  # f32 [B, K, NG, Ev], sum of exp(score - peak) * value


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
    G = H // K
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    rows = (q.astype(jnp.float32) * scale).reshape(B, N, K, G, E).transpose(0, 2, 1, 3, 4).reshape(B, K, N * G, E)
    width = v_width if v_block is None else v_block.shape[-1]

    def attend(partial: Partial, keys: Array, values: Array | None, visible: Array, present: Array) -> Partial:
        """Adds keys [B, c, K, E], of which query n sees visible [B, N or 1, c] and someone sees present [B, c]."""
        values = keys[..., :width] if values is None else values
        values = jnp.where(present[:, :, None, None], values, 0).astype(jnp.float32)
        scores = jnp.einsum("bkre,btke->bkrt", rows, keys.astype(jnp.float32), precision=precision)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        if visible.shape[1] > 1:
            visible = jnp.repeat(visible, G, axis=1)
        seen = visible[:, None]
        scores = jnp.where(seen, scores, MASKED)
        peak = jnp.maximum(partial.peak, scores.max(-1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - peak), 0)
        decay = jnp.exp(partial.peak - peak)
        mixed = jnp.einsum("bkrt,btkv->bkrv", weights, values, precision=precision)
        return Partial(peak, partial.total * decay + weights.sum(-1, keepdims=True), partial.mixed * decay + mixed)

    partial = Partial(
        jnp.full((B, K, N * G, 1), MASKED, jnp.float32),
        jnp.zeros((B, K, N * G, 1), jnp.float32),
        jnp.zeros((B, K, N * G, width), jnp.float32),
    )

    pages = min(T, max(1, CHUNK_TOKENS // S))
    chunk = pages * S
    table = jnp.pad(page_table, ((0, 0), (0, -T % pages)), constant_values=P)
    oldest = None if window is None else q_positions - window + 1  # [B, N]

    def body(index: Array, partial: Partial) -> Partial:
        entries = jax.lax.dynamic_slice_in_dim(table, index * pages, pages, axis=1)
        at = entries.clip(0, P - 1)
        keys = k_pages.at[at].get(mode="promise_in_bounds").reshape(B, chunk, K, E)
        values = None
        if v_pages is not None:
            values = v_pages.at[at].get(mode="promise_in_bounds").reshape(B, chunk, K, width)
        token = index * chunk + jnp.arange(chunk, dtype=jnp.int32)[None]
        present = (token < prefix_length[:, None]) & jnp.repeat((entries >= 0) & (entries < P), S, axis=1)
        visible = present[:, None]
        if oldest is not None:
            visible = visible & (token[:, None] >= oldest[:, :, None])
            present = visible.any(1)
        return attend(partial, keys, values, visible, present)

    first, last = chunk_range(prefix_length, oldest, chunk, -(-T // pages))
    partial = jax.lax.fori_loop(first, last, body, partial)

    in_block = jnp.tril(jnp.ones((1, N, C), jnp.bool_)) if isinstance(mask, Causal) else unpack_bits(mask, C)
    if oldest is not None:
        in_block = in_block & (block_positions[:, None] >= oldest[:, :, None])
    for start in range(0, C, BLOCK_CHUNK):
        part = slice(start, start + BLOCK_CHUNK)
        values = None if v_block is None else v_block[:, part]
        seen = in_block[:, :, part]
        partial = attend(partial, k_block[:, part], values, seen, seen.any(1))

    out = partial.mixed / jnp.where(partial.total > 0, partial.total, 1)
    return out.reshape(B, K, N, G, width).transpose(0, 2, 1, 3, 4).reshape(B, N, H, width).astype(q.dtype)


def chunk_range(prefix_length: Array, oldest: Array | None, chunk: int, chunks: int) -> tuple[Array, Array]:
    """The chunks [first, last) that hold a token which some query of the batch may see."""
    last = jnp.minimum((prefix_length.max() + chunk - 1) // chunk, chunks)
    if oldest is None:
        return jnp.zeros_like(last), last
    return jnp.maximum(oldest.min(), 0) // chunk, last
