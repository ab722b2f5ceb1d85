"""The argument of an implementation of attention, its checks, and masks. `specjax_kernels.attention` describes them.

No trees are here: a mask row is a set of block keys.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

INACTIVE = -1  # the prefix length of an inactive row


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


def mask_words(width: int) -> int:
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
    padding = [(0, 0)] * (visible.ndim - 1) + [(0, 32 * mask_words(width) - width)]
    grouped = xp.pad(visible, padding).reshape(*visible.shape[:-1], mask_words(width), 32)
    return (grouped.astype(xp.uint32) << _bit(grouped.ndim, xp)).sum(-1, dtype=xp.uint32)


def unpack_bits(bits: Array, width: int) -> Array:
    """The inverse of `pack_bits`: uint32 [..., ceil(width / 32)] to bool [..., width]."""
    if bits.dtype != jnp.uint32:
        raise ValueError(f"packed bits are uint32, got {bits.dtype}")
    if bits.shape[-1] != mask_words(width):
        raise ValueError(f"{width} bits take {mask_words(width)} words, got {bits.shape[-1]}")
    spread = (bits[..., None] >> _bit(bits.ndim + 1)) & jnp.uint32(1)
    return spread.reshape(*bits.shape[:-1], 32 * mask_words(width))[..., :width].astype(jnp.bool_)


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
    elif call.mask.shape not in ((B, N, mask_words(C)), (1, N, mask_words(C))):
        raise ValueError(
            f"mask must be [B, N, ceil(C / 32)] = {(B, N, mask_words(C))} for C = {C}, got {call.mask.shape}"
        )
