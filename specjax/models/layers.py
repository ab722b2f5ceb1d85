"""Building blocks that the families share: RMS norm and rotary embeddings."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32

from specjax.config import RopeConfig
from specjax.types import Positions


def rms_norm(x: Float[Array, "... M"], weight: Float[Array, "M"], epsilon: float) -> Float[Array, "... M"]:
    """x / rms(x) * weight; the statistics in float32, the product in x's dtype (as Hugging Face's Llama does)."""
    wide = x.astype(jnp.float32)
    if x.size == x.shape[-1]:
        # The same mean, with nothing between the sum and the root: only so does XLA:GPU fuse the norm of a single row
        # into one kernel. Several rows are fused either way, and this way is slower on a CPU.
        mean = jnp.sum((wide * wide + epsilon) * (1 / x.shape[-1]), axis=-1, keepdims=True)
    else:
        mean = jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon
    scale = jax.lax.rsqrt(mean)
    return jnp.expand_dims(weight, tuple(range(x.ndim - 1))) * (wide * scale).astype(x.dtype)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Rotations per token of each pair of channels, float32 [E / 2].

    `llama3` (Llama 3.1): wavelengths above original_max / low_freq_factor are stretched by `factor`, those below
    original_max / high_freq_factor kept, the ones between interpolated. Source: Hugging Face `modeling_rope_utils`.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequency = (1.0 / np.float32(rope.theta) ** exponent).astype(np.float32)
    if rope.scaling == "none":
        return frequency
    if rope.scaling == "linear":
        return frequency / np.float32(rope.factor)
    wavelength = 2 * math.pi / frequency
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - low) / (high - low)
    blended = (1 - smooth) * frequency / rope.factor + smooth * frequency
    scaled = np.where(wavelength > rope.original_max_position / low, frequency / rope.factor, blended)
    return np.where(wavelength < rope.original_max_position / high, frequency, scaled).astype(np.float32)


def rotations(
    rope: RopeConfig, head_dim: int, positions: Positions
) -> tuple[Float32[Array, "B N E2"], Float32[Array, "B N E2"]]:
    """cos and sin of each position's angles, [B, N, E / 2]. Computed once a forward."""
    angle = positions.astype(jnp.float32)[..., None] * inverse_frequencies(rope, head_dim)[None, None]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Float[Array, "B N *heads E"], cos: Float32[Array, "B N E2"], sin: Float32[Array, "B N E2"]) -> Array:
    """Rotary embedding in the half-split layout: channel i is paired with channel i + E / 2."""
    between = tuple(range(2, x.ndim - 1))
    cos, sin = jnp.expand_dims(cos, between), jnp.expand_dims(sin, between)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
