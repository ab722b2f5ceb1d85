"""Rotary position embedding: the frequencies of each scaling, and the rotation of queries and keys.

A rotation depends on the token's position and the config, not on the length of the text or of a forward pass. Two
scalings depend on the length in Hugging Face's `modeling_rope_utils`, the source of the formulas:

    dynamic    here a token beyond the original length has the base of a text that ends with it
    longrope   here all requests use one set of divisors, selected by the longest context served
"""

from __future__ import annotations

import math
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32
from specjax_kernels.platforms import by_platform

from specjax.cache import Positions
from specjax.config import RopeConfig

Rotation: TypeAlias = tuple[Float32[Array, "B N R2"], Float32[Array, "B N R2"]]
"""cos and sin of each position's angles, [B, N, R / 2], for the R channels of a head that are rotated."""


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Rotations per token of each pair of channels, float32 [R / 2], R = E * `rope.partial`.

    `llama3` (Llama 3.1): wavelengths above original_max / low_freq_factor are multiplied by `factor`, wavelengths below
    original_max / high_freq_factor are unchanged, and wavelengths in between are interpolated. `yarn` interpolates with
    a ramp over the channels. `longrope` has a divisor for each pair. `dynamic` is unscaled here, see `rotations`.
    `proportional` (Gemma 4): the first pairs rotate as without scaling, the others not at all; not the same as rotating
    the first channels only, since a pair's channels are half a head apart.
    """
    width = rope.width(head_dim)
    exponent = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    frequency = (1.0 / np.float32(rope.theta) ** exponent).astype(np.float32)
    match rope.scaling:
        case "none" | "dynamic":
            return frequency
        case "linear":
            return frequency / np.float32(rope.factor)
        case "proportional":
            rotated = np.arange(width // 2) < int(width * rope.partial) // 2
            return np.where(rotated, frequency / np.float32(rope.factor), np.float32(0))
        case "longrope":
            divisors = np.array(rope.divisors, np.float32)
            return (1.0 / (divisors * np.float32(rope.theta) ** exponent)).astype(np.float32)
        case "yarn":
            share = 1 - _yarn_ramp(rope, width)
            return (frequency / np.float32(rope.factor) * (1 - share) + frequency * share).astype(np.float32)
    wavelength = 2 * math.pi / frequency
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - low) / (high - low)
    blended = (1 - smooth) * frequency / rope.factor + smooth * frequency
    scaled = np.where(wavelength > rope.original_max_position / low, frequency / rope.factor, blended)
    return np.where(wavelength < rope.original_max_position / high, frequency, scaled).astype(np.float32)


def _yarn_ramp(rope: RopeConfig, width: int) -> np.ndarray:
    """Weight of the scaled frequency of each pair, 0 to 1, float32 [R / 2]."""

    def channel(rotations: float) -> float:
        """The pair that makes this number of rotations within the original length."""
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return width * math.log(turns) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    return np.clip((np.arange(width // 2, dtype=np.float32) - low) / ((high - low) or 0.001), 0, 1).astype(np.float32)


def rotations(rope: RopeConfig, head_dim: int, positions: Positions) -> Rotation:
    """The rotation at each position, computed once a forward pass."""
    at = positions.astype(jnp.float32)[..., None]
    frequency = jnp.asarray(inverse_frequencies(rope, head_dim))[None, None]
    if rope.scaling == "dynamic":
        width = rope.width(head_dim)
        length = jnp.maximum(at + 1, rope.original_max_position) / rope.original_max_position
        # The base grows by `stretch`; the frequency of pair i is base ** (-2 i / R).
        stretch = (rope.factor * length - (rope.factor - 1)) ** (width / (width - 2))
        exponent = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
        frequency = frequency * stretch ** -exponent[None, None]
    angle = at * frequency

    def turned(angle: Array) -> Rotation:
        return jnp.cos(angle), jnp.sin(angle)

    def on_cpu(angle: Array) -> Rotation:
        # XLA would compute them again in every layer, for each channel of each head, but moves nothing out of a branch.
        # The condition always holds, which XLA cannot know.
        return jax.lax.cond(jnp.any(angle >= 0), turned, lambda angle: (angle, angle), angle)

    cos, sin = by_platform(angle, cpu=on_cpu, default=turned)
    return (cos, sin) if rope.magnitude == 1 else (cos * rope.magnitude, sin * rope.magnitude)


def rotate(x: Float[Array, "B N *heads E"], cos: Float32[Array, "B N R2"], sin: Float32[Array, "B N R2"]) -> Array:
    """Rotary embedding, half-split: channel i is paired with channel i + R / 2, channels from R on are unchanged."""
    between, half = tuple(range(2, x.ndim - 1)), cos.shape[-1]
    cos, sin = jnp.expand_dims(cos, between), jnp.expand_dims(sin, between)
    wide = x.astype(jnp.float32)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    rotated = [first * cos - second * sin, second * cos + first * sin, rest]
    return jnp.concatenate(rotated if rest.shape[-1] else rotated[:2], axis=-1).astype(x.dtype)


def half_split(x: Array) -> Array:
    """Reorder interleaved pairs (0, 1), (2, 3), ... to half-split order 0, 2, ..., 1, 3, ... (DeepSeek)."""
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
