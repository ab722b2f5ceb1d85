"""The place of a row's largest number."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32


def argmax(x: Float[Array, "... V"]) -> Int32[Array, "..."]:
    """`jnp.argmax` of the last axis: of equal numbers the first, and NaN before any number.

    XLA:CPU reduces numbers and places together one by one. A maximum, and the least place where it stands, are vectors
    for it: a quarter of the time for eight rows of 49,152 numbers.
    """

    def together(x: Array) -> Array:
        return jnp.argmax(x, axis=-1).astype(jnp.int32)

    def apart(x: Array) -> Array:
        size, places = x.shape[-1], jnp.arange(x.shape[-1], dtype=jnp.int32)
        found = jnp.where(x == jnp.max(x, axis=-1, keepdims=True), places, jnp.int32(size - 1))
        first = jnp.min(jnp.where(jnp.isnan(x), places - jnp.int32(size), found), axis=-1)  # NaN: below all others
        return jnp.where(first < 0, first + jnp.int32(size), first)

    return jax.lax.platform_dependent(x, cpu=apart, default=together)
