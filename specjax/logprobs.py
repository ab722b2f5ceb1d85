"""Log-probabilities of emitted tokens and of prompts, from the log-softmax of the target's raw logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float32, Int32
from specjax_kernels import mesh
from specjax_kernels.platforms import by_platform

from specjax.cache import Hidden

TOP_LOGPROBS = 20  # number of likeliest tokens with log-probabilities
LOGPROB_IDS = 128  # maximum number of further token ids with log-probabilities
BLOCK = 64  # prompt tokens whose logits exist at once
KERNEL_TOP_K = 16  # largest `top_k` that XLA:GPU computes in one kernel; it sorts for larger ones


class Logprobs(NamedTuple):
    """Log-probabilities along the path, from the log-softmax of the raw logits; zeros if no row requests them.

    Attributes:
        drawn: float32 [B, J]. Log-probabilities of the emitted tokens.
        top: float32 [B, J, 20]. Log-probabilities of the likeliest tokens; fewer for a smaller vocabulary.
        top_ids: int32 [B, J, 20]. Ids of the likeliest tokens.
        of_ids: float32 [B, J, 128]. Log-probabilities of the row's `logprob_ids`; other entries are undefined.
    """

    drawn: Float32[Array, "B J"]
    top: Float32[Array, "B J 20"]
    top_ids: Int32[Array, "B J 20"]
    of_ids: Float32[Array, "B J 128"]


def path_logprobs(
    logits: Float32[Array, "B N V"],
    path: Int32[Array, "B J"],
    tokens: Int32[Array, "B J"],
    wanted: Bool[Array, ""],
    ids: Int32[Array, "B 128"],
) -> Logprobs:
    """Computes log-probabilities along the path if `wanted`, else returns zeros.

    Args:
        logits: float32 [B, N, V]. Raw logits of the target at each node.
        path, tokens: int32 [B, J]. Nodes, and the token drawn at each.
        wanted: bool []. True if a row requests log-probabilities.
        ids: int32 [B, 128]. `Row.logprob_ids`.
    """

    def compute() -> Logprobs:
        raw = mesh.whole(jnp.take_along_axis(logits, path[:, :, None], axis=1))
        return _logprobs(raw, jnp.maximum(tokens, 0), jnp.broadcast_to(ids[:, None], (*path.shape, ids.shape[1])))

    return jax.lax.cond(wanted, compute, partial(_zeros, compute))


def block_logprobs(
    hidden: Hidden,
    tokens: Int32[Array, "B C"],
    counted: Bool[Array, "B C"],
    ids: Int32[Array, "B 128"],
    unembed: Callable[[Array], Array],
) -> Logprobs:
    """Computes log-probabilities of the tokens after each hidden state of a prompt's chunk, `BLOCK` tokens at once.

    Args:
        hidden: [B, C, M]. Hidden states after the final norm.
        tokens: int32 [B, C]. The token after each hidden state.
        counted: bool [B, C]. False entries are padding; their results are undefined.
        ids: int32 [B, 128]. `Row.logprob_ids`.
        unembed: hidden states [X, M] -> raw logits [X, V].
    """
    count, width = tokens.size, hidden.shape[-1]
    blocks = -(-count // BLOCK)

    def parts(values: Array) -> Array:
        flat = values.reshape(count, -1)
        return jnp.pad(flat, ((0, blocks * BLOCK - count), (0, 0))).reshape(blocks, BLOCK, -1)

    def part(block: tuple[Array, Array, Array, Array]) -> Logprobs:
        states, after, counts, rows = block

        def compute() -> Logprobs:
            return _logprobs(mesh.whole(unembed(states))[None], after[None, :, 0], ids[rows[:, 0]][None])

        return jax.lax.cond(jnp.any(counts), compute, partial(_zeros, compute))

    rows = jnp.broadcast_to(jnp.arange(len(tokens), dtype=jnp.int32)[:, None], tokens.shape)
    logprobs = jax.lax.map(part, (parts(hidden.reshape(count, width)), parts(tokens), parts(counted), parts(rows)))
    shape = blocks * BLOCK, -1
    drawn, top, top_ids, of_ids = (leaf.reshape(shape)[:count].reshape(*tokens.shape, -1) for leaf in logprobs)
    return Logprobs(drawn[:, :, 0], top, top_ids, of_ids)


def _zeros(like: Callable[[], Logprobs]) -> Logprobs:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(like))


def _logprobs(raw: Float32[Array, "B J V"], tokens: Int32[Array, "B J"], ids: Int32[Array, "B J 128"]) -> Logprobs:
    """Computes log-probabilities of `tokens`, of the likeliest tokens and of `ids` from raw logits."""
    total = jax.nn.logsumexp(raw, axis=-1, keepdims=True)
    count = min(TOP_LOGPROBS, raw.shape[-1])
    best, best_ids = by_platform(
        raw, cpu=lambda x: tuple(jax.lax.top_k(x, count)), default=partial(top_in_parts, count=count)
    )
    drawn = jnp.take_along_axis(raw, tokens[:, :, None], axis=2) - total
    of_ids = jnp.take_along_axis(raw, ids, axis=2) - total
    return Logprobs(drawn[:, :, 0], best - total, best_ids.astype(jnp.int32), of_ids)


def top_in_parts(values: Float32[Array, "*b V"], count: int) -> tuple[Float32[Array, "*b k"], Int32[Array, "*b k"]]:
    """Computes `jax.lax.top_k` in parts of at most `KERNEL_TOP_K` values, each after the last value of the part before.

    After the first part, -inf and the most negative finite number count as equal.
    """
    ids = jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    rest = jnp.where(values == 0, 0.0, values)  # -0 = +0, which not every `top_k` treats alike
    floor, parts = jnp.finfo(jnp.float32).min, list[Array]()
    for start in range(0, count, KERNEL_TOP_K):
        best, index = jax.lax.top_k(rest, min(KERNEL_TOP_K, count - start))
        parts.append(index)
        value, last = best[..., -1:], index[..., -1:]
        later = (rest < value) | ((rest == value) & (ids > last))
        rest = jnp.where(later, jnp.maximum(rest, floor), -jnp.inf)
    index = jnp.concatenate(parts, axis=-1)
    return jnp.take_along_axis(values, index, axis=-1), index
