"""The attention operation: a block of new tokens attends to committed pages and to itself under a mask.

Read `tree_attention` and `attention` first. `IMPLEMENTATIONS` are functions of a `Call`; `reference` defines the
result. An implementation asked for by name never falls back to another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax_kernels import gpu_attention, gpu_language, reference, xla
from specjax_kernels.call import Call, Causal, check
from specjax_kernels.platforms import by_platform, has_kernels


class Implementation(NamedTuple):
    """Functions of an implementation of attention. All but the first are optional."""

    attend: Callable[[Call], Array]
    attend_packed: Callable[[Array, Call], Array] | None = None  # reads queries, keys and values in one array
    refuse: Callable[[], None] = lambda: None  # raises NotImplementedError if the implementation cannot run


def _on_gpu(name: str) -> Implementation:
    """`gpu_attention`, compiled by a dialect of `gpu_language`."""
    attend = partial(gpu_attention.attend, dialect=name)
    return Implementation(attend, lambda qkv, call: attend(call, qkv=qkv), lambda: gpu_language.compiler(name).refuse())


IMPLEMENTATIONS = MappingProxyType(
    {
        "reference": Implementation(reference.tree_attention),
        "xla": Implementation(xla.tree_attention),
        **{name: _on_gpu(name) for name in gpu_language.DIALECTS},
    }
)
"""By name."""


def default_implementation() -> str:
    """For JAX's default device: `gpu_language.dialect` ("pallas" while JAX has it) on an NVIDIA GPU of compute
    capability 8.0 (Ampere) and up, else "xla"."""
    return gpu_language.dialect() if has_kernels() else "xla"


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
    sinks: Array | None = None,
    implementation: str | None = None,
) -> Array:
    """Attention of N new tokens to the committed pages, and to C block keys under a mask, in one softmax.

    Query head h reads key/value head ``h // G``. A query sees

    - committed token t, for 0 <= t < prefix_length[b], at slot ``t % S`` of page ``page_table[b, t // S]``, unless that
      entry is a hole (outside 0 .. P-1; holes hold P);
    - block key j, if its bit in `mask` is set;
    - with a window w, only keys at positions > its own position - w (committed token t has position t).

    Softmax and accumulation are float32 for every dtype, float32 products use `jax.lax.Precision.HIGHEST`. Scores must
    be above -1e20. Slots that no query of the row sees may hold anything, NaN included. The result of an inactive row,
    or of a query that sees no key, is 0. Only "reference" has a derivative. Under `jax.shard_map`, "pallas" needs
    ``check_vma=False``.

    Args:
        q: [B, N, H, E], already rotated. float32, bfloat16 or float16; all arrays of keys and values have its dtype.
        k_block: [B, C, K, E], the block's keys. H is a multiple of K.
        v_block: [B, C, K, Ev]; or None, like `v_pages`: values are ``keys[..., :v_width]`` (latent attention).
        k_pages: [P, S, K, E].
        v_pages: [P, S, K, Ev], or None.
        page_table: int32 [B, T].
        prefix_length: int32 [B], at most T * S; below 0 (`INACTIVE`) for an inactive row.
        q_positions: int32 [B, N]; read only with a window.
        block_positions: int32 [B, C]; read only with a window.
        mask: `CAUSAL` (C == N), or uint32 [B, N, ceil(C / 32)] made by `pack_bits`; [1, N, ceil(C / 32)] for all rows.
        scale: factor on the scores, usually ``E ** -0.5``.
        v_width: Ev when values are None; otherwise None, or Ev.
        window: keys seen by one query, itself included, or None for all.
        softcap: scores become ``softcap * tanh(scores / softcap)`` before the mask (Gemma 2), or None.
        sinks: float [H], above -1e20: one more score in the softmax of each query head, whose weight is dropped
            (gpt-oss); not scaled, capped or masked. None: no sinks.
        implementation: a key of `IMPLEMENTATIONS`, which never falls back to another. None: `default_implementation`,
            or "xla" for combinations that it lacks.

    Returns:
        [B, N, H, Ev] in q's dtype.

    Raises:
        ValueError: arguments do not fit together; at trace time, with both values.
        NotImplementedError: the implementation cannot run here, or lacks this combination.
    """
    call = Call(
        q, k_block, v_block, k_pages, v_pages, page_table, prefix_length, q_positions, block_positions, mask,
        scale=scale, v_width=v_width, window=window, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    check(call)
    return _first_that_can(lambda name: implementation_named(name).attend(call), implementation)


def attention(
    qkv: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    prefix_length: Array,
    positions: Array,
    mask: Causal | Array,
    *,
    queries: Array | None = None,
    before: tuple[Array, Array] | None = None,
    before_positions: Array | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    implementation: str | None = None,
) -> Array:
    """`tree_attention` of a block whose queries, keys and values are one array, the result of a projection.

    An implementation with `attend_packed` reads the array in place; others receive copies of its parts.

    Args:
        qkv: [B, N, K, G + 2, E], rotated: the G query heads of a key/value head, its key, its value.
        positions: int32 [B, N], of queries and block keys; read only with a window.
        queries: int32 [B], the number of valid queries of each row; results of other queries are 0 on a CPU, else
            undefined. None: N.
        before: keys and values [B, C - N, K, E] of the block's earlier tokens, the first C - N bits of the mask. None:
            C == N.
        before_positions: int32 [B, C - N], their positions; required with a window, and read only then.

    Returns:
        [B, N, K * G, E] in qkv's dtype. Raises as `tree_attention`.
    """
    if qkv.ndim != 5 or qkv.shape[3] < 3:
        raise ValueError(f"qkv must be [B, N, K, G + 2, E] with G at least 1, got shape {qkv.shape}")
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    if before is not None and window is not None and before_positions is None:
        raise ValueError("with a window, earlier block keys need their positions: before_positions")
    q, *block = jax.eval_shape(unpack, qkv)
    keys, values = block if before is None else jax.eval_shape(_joined, before, block)
    where = positions
    if before is not None:
        where = jnp.zeros(keys.shape[:2], jnp.int32)
        if before_positions is not None:
            where = jnp.concatenate([before_positions, positions], axis=1)
    call = Call(
        q, keys, values, k_pages, v_pages, page_table, prefix_length, positions, where, mask, **options, queries=queries
    )
    check(call)

    def attend(name: str) -> Array:
        chosen = implementation_named(name)
        if chosen.attend_packed is not None:
            return chosen.attend_packed(qkv if before is None else _packed(before, qkv), call)
        q, *block = unpack(qkv)
        keys, values = block if before is None else _joined(before, block)
        return chosen.attend(call._replace(q=q, k_block=keys, v_block=values))

    return _first_that_can(attend, implementation)


def _joined(before: Any, block: Any) -> list[Array]:
    """The block's keys and values: earlier tokens, then its own."""
    return [jnp.concatenate(pair, axis=1) for pair in zip(before, block, strict=True)]


def _packed(before: tuple[Array, Array], qkv: Array) -> Array:
    """[B, C, K, G + 2, E]: earlier keys and values with queries of 0, then the block's own tokens. XLA:GPU fuses this
    with the operations that compute `qkv`."""
    key, value = before
    nothing = jnp.zeros((*key.shape[:3], qkv.shape[3] - 2, key.shape[3]), key.dtype)
    earlier = jnp.concatenate([nothing, key[:, :, :, None], value[:, :, :, None]], axis=3)
    return jnp.concatenate([earlier, qkv], axis=1)


def unpack(qkv: Array) -> tuple[Array, Array, Array]:
    """[B, N, K, G + 2, E] -> queries [B, N, K * G, E], keys [B, N, K, E], values [B, N, K, E]."""
    B, N, K, Q, E = qkv.shape
    return qkv[:, :, :, : Q - 2].reshape(B, N, K * (Q - 2), E), qkv[:, :, :, Q - 2], qkv[:, :, :, Q - 1]


def _first_that_can(attend: Callable[[str], Array], implementation: str | None) -> Array:
    """Calls the implementation of this name. None: the device's default, or "xla" for combinations that it lacks."""
    if implementation is not None:
        return attend(implementation)
    name = default_implementation()
    if name == "xla":
        return attend(name)
    try:
        # A program for the CPU of a machine with a GPU uses "xla".
        return by_platform(cpu=lambda: attend("xla"), default=lambda: attend(name))
    except NotImplementedError:
        return attend("xla")


def implementation_named(name: str) -> Implementation:
    """Raises ValueError for an unknown name, and NotImplementedError if the device or a package is missing."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"unknown implementation {name!r} of tree_attention; known: {', '.join(IMPLEMENTATIONS)}")
    IMPLEMENTATIONS[name].refuse()
    return IMPLEMENTATIONS[name]
