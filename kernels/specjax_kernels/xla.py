"""`tree_attention` in XLA's operations, on any device. A CPU uses `cpu/attention.py` for a few float32 tokens.

Online softmax over the block, then over chunks of pages. On a CPU chunks are small and the number of trips follows the
committed tokens, not the T * S of the page table. On a GPU, where the host would drive the loop, one chunk holds the
whole table if it fits. Pools are only read by gathers, so XLA:CPU never copies one into the loop. Values that depend on
the page table alone are computed outside the loop, so that all layers of a model share them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax_kernels.call import FLOOR, MASKED, Call, block_visibility
from specjax_kernels.cpu import attention as cpu_attention
from specjax_kernels.platforms import after, by_platform

# Committed tokens of one trip. On 2 CPU cores 64 is a little faster below 200 tokens, 256 above 1000.
CHUNK_TOKENS = 128
# Tokens of one trip on a GPU, over the whole batch: the gathered pages are a temporary (0.8 GB for Llama 3.1 8B).
GPU_TOKENS = 65536
BLOCK_TOKENS = 1024  # block keys of one part, which bounds the scores of a wide prefill


class Partial(NamedTuple):
    """An unfinished softmax over the keys seen so far. Rows R = N * G: query n, head g of its group."""

    peak: Array  # f32 [B, K, R, 1], the largest score, FLOOR at least
    total: Array  # f32 [B, K, R, 1], sum of exp(score - peak)
    mixed: Array  # f32 [B, K, R, Ev], sum of exp(score - peak) * value


def tree_attention(call: Call) -> Array:
    """See `specjax_kernels.tree_attention`."""
    if not cpu_attention.takes(call):
        return _in_chunks(call)
    elsewhere = functools.partial(_in_chunks, call, on_cpu=False)
    return by_platform(cpu=lambda: cpu_attention.attend(call), default=elsewhere)


def _in_chunks(call: Call, *, on_cpu: bool = True) -> Array:
    """The operation in XLA's own operations. `on_cpu`: a CPU may run it, too."""
    B, H, N, C, K, G, E, Ev, P, S, T = call.shape[:11]
    window, softcap = call.window, call.softcap
    prefix_length, page_table = call.prefix_length, call.page_table
    precision = jax.lax.Precision.HIGHEST if call.q.dtype == jnp.float32 else None
    rows = (call.q.astype(jnp.float32) * call.scale).reshape(B, N, K, G, E).swapaxes(1, 2).reshape(B, K, N * G, E)
    oldest = None if window is None else call.q_positions[:, :, None] - window + 1  # [B, N, 1]

    def attend(before: Partial | None, keys: Array, values: Array | None, visible: Array) -> Partial:
        """Adds c keys [B, c, K, E], visible [B or 1, N or 1, c], to the softmax."""
        values = keys[..., :Ev] if values is None else values
        # A slot that no query sees may hold NaN, and 0 * NaN is NaN: it is cleared.
        values = jnp.where(visible.any(1)[:, :, None, None], values, 0).astype(jnp.float32)
        scores = jnp.einsum("bkre,btke->bkrt", rows, keys.astype(jnp.float32), precision=precision)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        if visible.shape[1] > 1:
            visible = jnp.repeat(visible, G, axis=1)
        scores = jnp.where(visible[:, None], scores, MASKED)
        peak = jnp.maximum(scores.max(-1, keepdims=True), FLOOR if before is None else before.peak)
        weights = jnp.exp(scores - peak)
        total = weights.sum(-1, keepdims=True)
        mixed = jnp.einsum("bkrt,btkv->bkrv", weights, values, precision=precision)
        if before is None:
            return Partial(peak, total, mixed)
        decay = jnp.exp(before.peak - peak)
        return Partial(peak, before.total * decay + total, before.mixed * decay + mixed)

    # The block.
    in_block = block_visibility(call.mask, N, C)
    if oldest is not None:
        in_block = in_block & (call.block_positions[:, None] >= oldest)
    partial = None
    if call.sinks is not None:  # a key that every query sees, with the value 0
        sinks = jnp.tile(call.sinks.astype(jnp.float32).reshape(1, K, 1, G), (B, 1, N, 1)).reshape(B, K, N * G, 1)
        partial = Partial(sinks, jnp.ones_like(sinks), jnp.zeros((B, K, N * G, Ev), jnp.float32))
    for start in range(0, C, BLOCK_TOKENS):
        part = slice(start, start + BLOCK_TOKENS)
        values = None if call.v_block is None else call.v_block[:, part]
        partial = attend(partial, call.k_block[:, part], values, in_block[:, :, part])

    # The committed pages.
    def add_pages(partial: Partial, tokens: int, *, always_loop: bool) -> Partial:
        """Adds the committed tokens of each request, `tokens` at a time."""
        pages = min(T, max(1, tokens // S))  # of one trip
        table = jnp.pad(page_table, ((0, 0), (0, -T % pages)), constant_values=P)
        begins = S * jnp.arange(table.shape[1], dtype=jnp.int32)[None]
        filled = jnp.where((table >= 0) & (table < P), (prefix_length[:, None] - begins).clip(0, S), 0)
        table = table.clip(0, P - 1)

        def trip(index: Array | int, before: Partial) -> Partial:
            def chunk(of: Array) -> Array:
                return jax.lax.dynamic_slice_in_dim(of, index * pages, pages, axis=1)

            def gather(pool: Array) -> Array:
                return pool.at[chunk(table)].get(mode="promise_in_bounds").reshape(B, pages * S, K, -1)

            slot = jnp.arange(S, dtype=jnp.int32)[None, None]
            visible = (slot < chunk(filled)[:, :, None]).reshape(B, 1, pages * S)
            if oldest is not None:
                visible = visible & ((chunk(begins)[:, :, None] + slot).reshape(1, 1, pages * S) >= oldest)
            values = None if call.v_pages is None else gather(call.v_pages)
            return attend(before, gather(call.k_pages), values, visible)

        if pages == T and not always_loop:
            table = after(table, rows)
            return trip(0, partial)
        first, last = trip_range(prefix_length, oldest, pages * S, -(-T // pages))
        return jax.lax.fori_loop(first, last, trip, partial)

    assert partial is not None
    elsewhere = functools.partial(add_pages, tokens=GPU_TOKENS // B, always_loop=False)
    if on_cpu:  # a loop, without trips if nothing is committed
        cpu = functools.partial(add_pages, tokens=CHUNK_TOKENS, always_loop=True)
        partial = jax.lax.platform_dependent(partial, cpu=cpu, default=elsewhere)
    else:
        partial = elsewhere(partial)

    out = partial.mixed / jnp.where(partial.total > 0, partial.total, 1)
    there = (prefix_length >= 0)[:, None, None, None]
    if call.queries is not None:
        there = there & (jnp.arange(N * G)[None, :] < G * call.queries[:, None])[:, None, :, None]
    out = jnp.where(there, out, 0)
    return out.reshape(B, K, N, G, Ev).swapaxes(1, 2).reshape(B, N, H, Ev).astype(call.q.dtype)


def trip_range(prefix_length: Array, oldest: Array | None, chunk: int, most: int) -> tuple[Array, Array]:
    """The trips [first, last) whose tokens some query may see, of `most` chunks of `chunk` tokens.

    `oldest` [B, N, 1]: the first position inside each query's window.
    """
    last = jnp.minimum((prefix_length.max() + chunk - 1) // chunk, most)
    if oldest is None:
        return jnp.zeros_like(last), last
    return oldest.min().clip(0) // chunk, last
