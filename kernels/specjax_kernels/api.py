"""The one attention operation: a block of new tokens attends to committed pages and to itself under a mask.

This module holds the signature, the checks and the table of implementations. What the result *is* stands in
`reference`; how it is computed fast stands in one file an implementation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax_kernels.launch import has_kernels
from specjax_kernels.masks import Causal, words

IMPLEMENTATIONS = MappingProxyType(
    {
        "reference": "specjax_kernels.reference",
        "xla": "specjax_kernels.xla",
        "pallas": "specjax_kernels.pallas_triton",
        "triton": "specjax_kernels.triton",
    }
)
"""Name -> module with a `tree_attention` of the signature below, without `implementation`, and, if it does not run on
every device, a `refuse()` that raises NotImplementedError where it cannot."""

DTYPES = ("float32", "bfloat16", "float16")

INACTIVE = -1
"""The prefix length of a row that takes no part."""


def default_implementation() -> str:
    """What `implementation=None` tries first on JAX's default device: "pallas" on an NVIDIA GPU from Ampere (compute
    capability 8.0) on, "xla" elsewhere."""
    return "pallas" if has_kernels() else "xla"


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
    implementation: str | None = None,
) -> Array:
    """Attention of N new tokens to the committed pages, and to C block keys under a mask, in one softmax.

    Query head h reads key/value head ``h // G``. A query sees

    - committed token t, for 0 <= t < prefix_length[b], stored at slot ``t % S`` of page ``page_table[b, t // S]``,
      unless that entry is a hole (outside 0 .. P-1; holes hold P);
    - block key j, if `mask` lets it;
    - with a window w, of these only keys at positions > its own position - w (committed token t has position t).

    Softmax and accumulation are float32 for every dtype, float32 products use `jax.lax.Precision.HIGHEST`. Scores are
    taken to lie above -1e20. Only "reference" has a derivative. Under `jax.shard_map`, "pallas" needs
    ``check_vma=False``. What lies in a slot that no query of the row sees (NaN included) has no influence. A query that
    sees nothing gets 0. A row with ``prefix_length[b] < 0`` (`INACTIVE`) takes no part: all its queries get 0, whatever
    the mask says.

    Args:
        q: [B, N, H, E], already rotated. float32, bfloat16 or float16; all arrays of keys and values have its dtype.
        k_block: [B, C, K, E], the block's keys. H is a multiple of K.
        v_block: [B, C, K, Ev], or None, with `v_pages` None too: values are ``keys[..., :v_width]`` (latent attention).
        k_pages: [P, S, K, E].
        v_pages: [P, S, K, Ev], or None.
        page_table: int32 [B, T].
        prefix_length: int32 [B], at most T * S; `INACTIVE` for a row that takes no part.
        q_positions: int32 [B, N]; read only with a window.
        block_positions: int32 [B, C]; read only with a window.
        mask: `CAUSAL` (key j visible to query j and later ones; C == N), or uint32 [B, N, ceil(C / 32)] as made by
            `pack_bits`.
        scale: factor on the scores, usually ``E ** -0.5``.
        v_width: Ev when values are None; otherwise None, or Ev.
        window: keys seen by one query, itself included, or None for all.
        softcap: scores become ``softcap * tanh(scores / softcap)`` before the mask (Gemma 2), or None.
        implementation: a key of `IMPLEMENTATIONS`, which never falls back. None: `default_implementation`, or "xla" for
            what that one lacks.

    Returns:
        [B, N, H, Ev] in q's dtype.

    Raises:
        ValueError: arguments that do not fit together, at trace time, naming both values.
        NotImplementedError: the implementation asked for is not there, or lacks this combination.
    """
    _check(
        q, k_block, v_block, k_pages, v_pages, page_table, prefix_length, q_positions, block_positions, mask, v_width
    )
    _check_options(window, softcap)

    def attend(name: str) -> Array:
        return implementation_named(name)(
            q,
            k_block,
            v_block,
            k_pages,
            v_pages,
            page_table,
            prefix_length,
            q_positions,
            block_positions,
            mask,
            scale=scale,
            v_width=v_width if v_block is None else None,
            window=window,
            softcap=softcap,
        )

    return _first_that_can(attend, implementation)


def attention(
    qkv: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    prefix_length: Array,
    positions: Array,
    mask: Causal | Array,
    *,
    before: tuple[Array, Array] | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> Array:
    """`tree_attention` of a block whose queries, keys and values are one array, as a projection gives them.

    An implementation with a `tree_attention_packed` reads the array in place; the others get copies of its parts.

    Args:
        qkv: [B, N, K, G + 2, E], rotated: the G query heads of a key/value head, its key, its value.
        positions: int32 [B, N], of queries and block keys; read only with a window.
        before: keys and values [B, C - N, K, E] of the block's earlier tokens, which queries see by the first C - N
            bits of the mask; None: C == N. Their positions are not known, so a window is not possible.

    Returns:
        [B, N, K * G, E] in qkv's dtype.

    Raises:
        ValueError: as `tree_attention`.
        NotImplementedError: as `tree_attention`.
    """
    if qkv.ndim != 5 or qkv.shape[3] < 3:
        raise ValueError(f"qkv must be [B, N, K, G + 2, E] with G at least 1, got shape {qkv.shape}")
    pages = (k_pages, v_pages, page_table, prefix_length)
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    if before is not None:
        if window is not None:
            raise ValueError("earlier block keys have no positions, so they cannot be attended to with a window")
        q, *own = unpack(qkv)
        keys, values = (jnp.concatenate(pair, axis=1) for pair in zip(before, own, strict=True))
        nowhere = jnp.zeros(keys.shape[:2], jnp.int32)
        return tree_attention(
            q, keys, values, *pages, positions, nowhere, mask, **options, implementation=implementation
        )
    q, key, value = jax.eval_shape(unpack, qkv)
    _check(q, key, value, *pages, positions, positions, mask, None)
    _check_options(window, softcap)

    def attend(name: str) -> Array:
        module = _module(name)
        if hasattr(module, "tree_attention_packed"):
            return module.tree_attention_packed(qkv, *pages, positions, mask, **options)
        return module.tree_attention(*unpack(qkv), *pages, positions, positions, mask, **options)

    return _first_that_can(attend, implementation)


def unpack(qkv: Array) -> tuple[Array, Array, Array]:
    """[B, N, K, G + 2, E] -> queries [B, N, K * G, E], keys [B, N, K, E], values [B, N, K, E]."""
    B, N, K, Q, E = qkv.shape
    return qkv[:, :, :, : Q - 2].reshape(B, N, K * (Q - 2), E), qkv[:, :, :, Q - 2], qkv[:, :, :, Q - 1]


def _first_that_can(attend: Callable[[str], Array], implementation: str | None) -> Array:
    """What is asked for by name, or what suits the device, and what that one lacks, from XLA."""
    if implementation is not None:
        return attend(implementation)
    name = default_implementation()
    if name == "xla":
        return attend(name)
    try:
        # A program for the host of such a device gets what suits a host.
        return jax.lax.platform_dependent(cpu=lambda: attend("xla"), default=lambda: attend(name))
    except NotImplementedError:
        return attend("xla")


def implementation_named(name: str) -> Callable[..., Array]:
    """The implementation of a name.

    Raises:
        ValueError: there is no such name.
        NotImplementedError: it cannot run here: another device, or a package that is missing or too old.
    """
    return _module(name).tree_attention


def _module(name: str) -> Any:
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"unknown implementation {name!r} of tree_attention; known: {', '.join(IMPLEMENTATIONS)}")
    module = importlib.import_module(IMPLEMENTATIONS[name])
    if hasattr(module, "refuse"):
        module.refuse()
    return module


def _check_options(window: int | None, softcap: float | None) -> None:
    if window is not None and not 1 <= window < 2**31:
        raise ValueError(f"window is the number of keys a query sees, from 1 to 2**31 - 1 (or None), got {window}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive (or None), got {softcap}")


def _check(
    q, k_block, v_block, k_pages, v_pages, page_table, prefix_length, q_positions, block_positions, mask, v_width
):
    arrays = {"q": (q, "B N H E"), "k_block": (k_block, "B C K E"), "k_pages": (k_pages, "P S K E")}
    if (v_block is None) != (v_pages is None):
        given, missing = ("v_block", "v_pages") if v_pages is None else ("v_pages", "v_block")
        raise ValueError(
            f"values are given for both block and pages, or for neither: got {given}, but {missing} is None"
        )
    if v_block is not None:
        arrays |= {"v_block": (v_block, "B C K Ev"), "v_pages": (v_pages, "P S K Ev")}
    for name, (array, _) in arrays.items():
        if array.dtype != q.dtype or str(array.dtype) not in DTYPES:
            raise ValueError(
                f"q, keys and values share a dtype out of {', '.join(DTYPES)}: q is {q.dtype}, {name} is {array.dtype}"
            )
    integers = {
        "page_table": (page_table, "B T"),
        "prefix_length": (prefix_length, "B"),
        "q_positions": (q_positions, "B N"),
        "block_positions": (block_positions, "B C"),
    }
    for name, (array, _) in integers.items():
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, got {array.dtype}")
    sizes: dict[str, tuple[int, str]] = {}
    for name, (array, letters) in (arrays | integers).items():
        if array.ndim != len(letters.split()):
            raise ValueError(f"{name} must be [{', '.join(letters.split())}], got shape {array.shape}")
        for letter, size in zip(letters.split(), array.shape, strict=True):
            known, source = sizes.setdefault(letter, (size, name))
            if size != known:
                raise ValueError(f"{letter} is {known} in {source} but {size} in {name} {array.shape}")
            if size < 1:
                raise ValueError(f"{letter} must be at least 1, got {size} in {name} {array.shape}")
    B, N, C, H, K, E = (sizes[letter][0] for letter in "BNCHKE")
    if H % K:
        raise ValueError(f"H must be a multiple of K, got H = {H} query heads and K = {K} key/value heads")
    if v_block is None:
        if v_width is None or not 1 <= v_width <= E:
            raise ValueError(f"without values v_width must lie in 1 .. E = {E}, got {v_width}")
    elif v_width is not None and v_width != v_block.shape[-1]:
        raise ValueError(f"v_width is {v_width}, but v_block {v_block.shape} has width {v_block.shape[-1]}")
    if isinstance(mask, Causal):
        if C != N:
            raise ValueError(f"a CAUSAL mask needs C == N, got C = {C} block keys and N = {N} queries")
        return
    if not hasattr(mask, "dtype") or mask.dtype != jnp.uint32:
        raise ValueError(f"mask must be CAUSAL or uint32 bits, got {getattr(mask, 'dtype', mask)}")
    if mask.shape != (B, N, words(C)):
        raise ValueError(f"mask must be [B, N, ceil(C / 32)] = {(B, N, words(C))} for C = {C}, got {mask.shape}")
