"""Which block key each block query may see: the causal sentinel, and ancestor masks packed 32 to a word.

Knows nothing of trees: a mask row is a set of block keys, whoever made it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Causal:
    """The type of `CAUSAL`: block key j is visible to block query i when j <= i. Needs C == N.

    Hashable and a pytree without leaves: a static argument of `jax.jit`, or in the place of an array of mask bits.
    """

    def __repr__(self) -> str:
        return "CAUSAL"


CAUSAL = Causal()

# A score that does not count, and the least peak of a row: exp(MASKED - FLOOR) is 0, so a row that sees nothing sums to
# 0. Scores lie above FLOOR.
MASKED, FLOOR = -1e30, -1e20


def words(width: int) -> int:
    """The number of uint32 words that hold `width` bits: ceil(width / 32)."""
    return -(-width // 32)


def pack_bits(visible: Array | np.ndarray) -> Any:
    """Packs a boolean mask, 32 keys to a word: bool [..., C] to uint32 [..., ceil(C / 32)]. A numpy array gives one, so
    that a mask known at trace time is a constant and no kernel.

    Key j is bit ``j % 32`` (from the low end) of word ``j // 32``; unused high bits are 0. A root with two
    children, the first of which has a child of its own (nodes 0; 1, 2; 3), one row a node:

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
    """bool [B, queries, keys] (a causal mask: B = 1), whether each query of a block sees each of its keys."""
    if isinstance(mask, Causal):
        return jnp.tril(jnp.ones((1, queries, keys), jnp.bool_))
    return unpack_bits(mask, keys)


def _bit(ndim: int, xp: Any = jnp) -> Any:
    """0 .. 31 along the last of `ndim` axes."""
    return xp.arange(32, dtype=xp.uint32).reshape((1,) * (ndim - 1) + (32,))
