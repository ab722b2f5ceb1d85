"""Blocks whose rows hold different numbers of tokens, computed without their padding.

Products and norms do not care which request a token is of. So the layers compute the U tokens of all rows side by side,
[1, U, ...], and only attention and what is kept in pages have the block's own shape, [B, N, ...].
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

from specjax.types import PerRequest


class Ragged(NamedTuple):
    """Where the tokens of a block [B, N] lie among U places.

    With N = 3, U = 5 and lengths [2, 0, 3]: a b . | . . . | c d e  <->  a b c d e. Padding and places that no token
    needs hold some token's values, which are never read.
    """

    source: Int32[Array, "U"]  # index of each place's token in the flattened block, [B * N]
    place: Int32[Array, "B N"]  # of each token
    length: PerRequest

    @classmethod
    def of(cls, length: PerRequest, width: int, tokens: int) -> Ragged:
        """Of rows of `length` tokens each, at most `width`, together at most `tokens`."""
        ends = jnp.cumsum(length)
        begins = ends - length
        place = begins[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
        index = jnp.arange(tokens, dtype=jnp.int32)
        row = jnp.minimum(jnp.sum(index[:, None] >= ends[None, :], axis=1, dtype=jnp.int32), length.shape[0] - 1)
        source = row * width + jnp.clip(index - begins[row], 0, width - 1)
        return cls(source, jnp.minimum(place, tokens - 1), length)

    def joined(self, x: Array) -> Array:
        """[B, N, ...] -> [1, U, ...]."""
        return x.reshape(-1, *x.shape[2:]).at[self.source].get(mode="promise_in_bounds")[None]

    def parted(self, x: Array) -> Array:
        """[1, U, ...] -> [B, N, ...]."""
        return x[0].at[self.place].get(mode="promise_in_bounds")
