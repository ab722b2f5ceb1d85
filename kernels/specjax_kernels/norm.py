"""RMS norm: an operation of its own, and the prologue of a product (`specjax_kernels.linear`)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


class Norm(NamedTuple):
    """The arguments of `rms_norm` besides its input."""

    weight: Float[Array, "M"]
    epsilon: float
    offset: float = 0.0


def rms_norm(
    x: Float[Array, "... M"], weight: Float[Array, "M"], epsilon: float, *, offset: float = 0.0
) -> Float[Array, "... M"]:
    """x / rms(x) * weight; the statistics in float32, the product in x's dtype (as Hugging Face's Llama does). With an
    offset the factor is offset + weight and the product float32 (Gemma)."""
    wide = x.astype(jnp.float32)
    if x.size == x.shape[-1]:
        # The same mean, with nothing between the sum and the root: only so does XLA:GPU fuse the norm of a single row
        # into one kernel. Several rows are fused either way, and this way is slower on a CPU.
        mean = jnp.sum((wide * wide + epsilon) * (1 / x.shape[-1]), axis=-1, keepdims=True)
    else:
        mean = jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon
    scale = jax.lax.rsqrt(mean)
    weight = jnp.expand_dims(weight, tuple(range(x.ndim - 1)))
    if offset:
        return (wide * scale * (offset + weight.astype(jnp.float32))).astype(x.dtype)
    return weight * (wide * scale).astype(x.dtype)
