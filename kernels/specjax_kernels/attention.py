"""The attention operation: a block of new tokens attends to committed pages and to itself under a mask.

Read `tree_attention` and `attention` first, then `Call`, the argument of an implementation, and the masks. Each
implementation is a file with a function `tree_attention(call)`; `reference` defines the result. This file has no trees:
a mask row is a set of block keys.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax_kernels.gpu_language import DIALECTS, dialect
from specjax_kernels.platforms import by_platform, has_kernels

IMPLEMENTATIONS = MappingProxyType(
    {
        "reference": "specjax_kernels.reference",
        "xla": "specjax_kernels.xla",
        **DIALECTS,
    }
)
"""Name -> module with a function `tree_attention(call)`. `refuse()`, if present, raises NotImplementedError if the
implementation cannot run; `tree_attention_packed(qkv, call)`, if present, reads packed arrays."""

INACTIVE = -1  # the prefix length of an inactive row


def default_implementation() -> str:
    """For JAX's default device: `gpu_language.dialect` ("pallas" while JAX has it) on an NVIDIA GPU of compute
    capability 8.0 (Ampere) and up, else "xla"."""
    return dialect() if has_kernels() else "xla"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Causal:
    """The type of `CAUSAL`: block key j is visible to block query i if j <= i. Needs C == N. It is hashable and has no
    leaves: a static argument of `jax.jit`, or a mask instead of an array of bits."""

    def __repr__(self) -> str:
        return "CAUSAL"


CAUSAL = Causal()

# The score of an invisible key, and the smallest peak of a row: exp(MASKED - FLOOR) is 0, so a row that sees nothing
# sums to 0. Scores lie above FLOOR.
MASKED, FLOOR = -1e30, -1e20


def words(width: int) -> int:
    """The number of uint32 words that hold `width` bits: ceil(width / 32)."""
    return -(-width // 32)


def pack_bits(visible: Array | np.ndarray) -> Any:
    """Packs a boolean mask: bool [..., C] to uint32 [..., ceil(C / 32)]. The bits of a numpy mask are a numpy
    array: a constant of a program.

    Key j is bit ``j % 32`` (from the low end) of word ``j // 32``; unused high bits are 0. A root with children 1 and
    2, and node 3, a child of node 1:

        node 0 sees 0           1 0 0 0  ->  0b0001 =  1
        node 1 sees 0, 1        1 1 0 0  ->  0b0011 =  3
        node 2 sees 0, 2        1 0 1 0  ->  0b0101 =  5
        node 3 sees 0, 1, 3     1 1 0 1  ->  0b1011 = 11
    """
    if visible.dtype != jnp.bool_ or visible.ndim < 1:
        raise ValueError(f"pack_bits takes bool [..., C], got {visible.dtype} {visible.shape}")
    xp: Any = np if isinstance(visible, np.ndarray) else jnp
    width = visible.shape[-1]
    padding = [(0, 0)] * (visible.ndim - 1) + [(0, 32 * words(width) - width)]
    grouped = xp.pad(visible, padding).reshape(*visible.shape[:-1], words(width), 32)
    return (grouped.astype(xp.uint32) << _bit(grouped.ndim, xp)).sum(-1, dtype=xp.uint32)


def unpack_bits(bits: Array, width: int) -> Array:
    """The inverse of `pack_bits`: uint32 [..., ceil(width / 32)] to bool [..., width]."""
    if bits.dtype != jnp.uint32:
        raise ValueError(f"packed bits are uint32, got {bits.dtype}")
    if bits.shape[-1] != words(width):
        raise ValueError(f"{width} bits take {words(width)} words, got {bits.shape[-1]}")
    spread = (bits[..., None] >> _bit(bits.ndim + 1)) & jnp.uint32(1)
    return spread.reshape(*bits.shape[:-1], 32 * words(width))[..., :width].astype(jnp.bool_)


def block_visibility(mask: Causal | Array, queries: int, keys: int) -> Array:
    """Visibility of a block's keys: bool [B, queries, keys]; B is 1 for a causal mask."""
    if isinstance(mask, Causal):
        return jnp.tril(jnp.ones((1, queries, keys), jnp.bool_))
    return unpack_bits(mask, keys)


def _bit(ndim: int, xp: Any = jnp) -> Any:
    """0 .. 31 along the last of `ndim` axes."""
    return xp.arange(32, dtype=xp.uint32).reshape((1,) * (ndim - 1) + (32,))


DTYPES = ("float32", "bfloat16", "float16")

FLOATS = {"q": "B N H E", "k_block": "B C K E", "k_pages": "P S K E", "v_block": "B C K Ev", "v_pages": "P S K Ev"}
INTEGERS = {"page_table": "B T", "prefix_length": "B", "queries": "B", "q_positions": "B N", "block_positions": "B C"}
"""The axes of each array."""


class Shape(NamedTuple):
    """The static properties of a call. G = H / K."""

    B: int
    H: int
    N: int
    C: int
    K: int
    G: int
    E: int
    Ev: int
    P: int
    S: int
    T: int
    latent: bool  # values are keys[..., :Ev]
    causal: bool
    scale: float
    window: int | None
    softcap: float | None


class Call(NamedTuple):
    """The arguments of `specjax_kernels.tree_attention`, which describes them."""

    q: Array
    k_block: Array
    v_block: Array | None
    k_pages: Array
    v_pages: Array | None
    page_table: Array
    prefix_length: Array
    q_positions: Array
    block_positions: Array
    mask: Causal | Array
    scale: float
    v_width: int | None = None
    window: int | None = None
    softcap: float | None = None
    queries: Array | None = None  # int32 [B]: the number of valid queries of each row; None: N
    sinks: Array | None = None

    @property
    def shape(self) -> Shape:
        B, N, H, E = self.q.shape
        P, S, K, _ = self.k_pages.shape
        C, T = self.k_block.shape[1], self.page_table.shape[1]
        Ev = self.v_width if self.v_block is None else self.v_block.shape[-1]
        assert Ev is not None  # see `check`
        latent, causal = self.v_block is None, isinstance(self.mask, Causal)
        return Shape(B, H, N, C, K, H // K, E, Ev, P, S, T, latent, causal, self.scale, self.window, self.softcap)


def check(call: Call) -> None:
    """Raises ValueError, with the values, for arguments that do not fit together."""
    if (call.v_block is None) != (call.v_pages is None):
        present, missing = ("v_block", "v_pages") if call.v_pages is None else ("v_pages", "v_block")
        raise ValueError(f"block and pages both have values, or neither has: got {present}, but {missing} is None")
    sizes: dict[str, tuple[int, str]] = {}
    for name, letters in (FLOATS | INTEGERS).items():
        array: Array | None = getattr(call, name)
        if array is None:
            continue
        if name in INTEGERS and array.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, got {array.dtype}")
        if name in FLOATS and (array.dtype != call.q.dtype or str(array.dtype) not in DTYPES):
            raise ValueError(
                f"q, keys and values share a dtype out of {', '.join(DTYPES)}: "
                f"q is {call.q.dtype}, {name} is {array.dtype}"
            )
        axes = letters.split()
        if array.ndim != len(axes):
            raise ValueError(f"{name} must be [{', '.join(axes)}], got shape {array.shape}")
        for axis, size in zip(axes, array.shape, strict=True):
            expected, source = sizes.setdefault(axis, (size, name))
            if size != expected:
                raise ValueError(f"{axis} is {expected} in {source} but {size} in {name} {array.shape}")
            if size < 1:
                raise ValueError(f"{axis} must be at least 1, got {size} in {name} {array.shape}")
    B, N, C, H, K, E = (sizes[axis][0] for axis in "BNCHKE")
    if H % K:
        raise ValueError(f"H must be a multiple of K, got H = {H} query heads and K = {K} key/value heads")
    if call.v_block is None and (call.v_width is None or not 1 <= call.v_width <= E):
        raise ValueError(f"without values v_width must lie in 1 .. E = {E}, got {call.v_width}")
    if call.v_block is not None and call.v_width not in (None, call.v_block.shape[-1]):
        raise ValueError(
            f"v_width is {call.v_width}, but v_block {call.v_block.shape} has width {call.v_block.shape[-1]}"
        )
    if call.window is not None and not 1 <= call.window < 2**31:
        raise ValueError(f"window is the number of keys a query sees, from 1 to 2**31 - 1 (or None), got {call.window}")
    if call.softcap is not None and not call.softcap > 0:
        raise ValueError(f"softcap must be positive (or None), got {call.softcap}")
    if call.sinks is not None and (call.sinks.shape != (H,) or str(call.sinks.dtype) not in DTYPES):
        problem = f"got {call.sinks.dtype} {call.sinks.shape}"
        raise ValueError(f"sinks must be a float [H] = [{H}] out of {', '.join(DTYPES)}, {problem}")
    if isinstance(call.mask, Causal):
        if C != N:
            raise ValueError(f"a CAUSAL mask needs C == N, got C = {C} block keys and N = {N} queries")
    elif getattr(call.mask, "dtype", None) != jnp.uint32:
        raise ValueError(f"mask must be CAUSAL or uint32 bits, got {getattr(call.mask, 'dtype', call.mask)}")
    elif call.mask.shape not in ((B, N, words(C)), (1, N, words(C))):
        raise ValueError(f"mask must be [B, N, ceil(C / 32)] = {(B, N, words(C))} for C = {C}, got {call.mask.shape}")


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
    return _first_that_can(lambda name: implementation_named(name).tree_attention(call), implementation)


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

    An implementation with a `tree_attention_packed` reads the array in place; others receive copies of its parts.

    Args:
        qkv: [B, N, K, G + 2, E], rotated: the G query heads of a key/value head, its key, its value.
        positions: int32 [B, N], of queries and block keys; read only with a window.
        queries: int32 [B], the number of valid queries of each row; results of other queries are undefined. None: N.
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
        module = implementation_named(name)
        if hasattr(module, "tree_attention_packed"):
            return module.tree_attention_packed(qkv if before is None else _packed(before, qkv), call)
        q, *block = unpack(qkv)
        keys, values = block if before is None else _joined(before, block)
        return module.tree_attention(call._replace(q=q, k_block=keys, v_block=values))

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


def implementation_named(name: str) -> Any:
    """The module of an implementation. Raises ValueError for an unknown name, and NotImplementedError if the device or
    a package is missing."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"unknown implementation {name!r} of tree_attention; known: {', '.join(IMPLEMENTATIONS)}")
    module = importlib.import_module(IMPLEMENTATIONS[name])
    if hasattr(module, "refuse"):
        module.refuse()
    return module
