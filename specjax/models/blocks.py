"""The parts of a decoder layer as functions of arrays, shared by targets and draft heads: RMS norm, rotary embeddings,
grouped-query attention to pages and block, and a gated MLP."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import specjax_kernels as kernels
from jax import Array
from jaxtyping import Float, Float32

from specjax.cache import PageSpec
from specjax.config import HeadConfig, ModelConfig, RopeConfig
from specjax.types import Hidden, PageTable, PerRequest, Positions, Weights


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


Rotation: TypeAlias = tuple[Float32[Array, "B N E2"], Float32[Array, "B N E2"]]
"""cos and sin of each position's angles, [B, N, E / 2]."""


def rotations(rope: RopeConfig, head_dim: int, positions: Positions) -> Rotation:
    """The rotation at each position. Computed once a forward."""
    angle = positions.astype(jnp.float32)[..., None] * inverse_frequencies(rope, head_dim)[None, None]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Float[Array, "B N *heads E"], cos: Float32[Array, "B N E2"], sin: Float32[Array, "B N E2"]) -> Array:
    """Rotary embedding in the half-split layout: channel i is paired with channel i + E / 2."""
    between = tuple(range(2, x.ndim - 1))
    cos, sin = jnp.expand_dims(cos, between), jnp.expand_dims(sin, between)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


class KeyValue(NamedTuple):
    """What attention keeps of tokens: two page leaves [P, S, K, E], or two block leaves [B, N, K, E]."""

    key: Array
    value: Array


def key_value_spec(config: ModelConfig | HeadConfig) -> KeyValue:
    """What one layer of this model or head keeps of a token: two `PageSpec`s."""
    spec = PageSpec((config.num_kv_heads, config.head_dim), config.dtype, ("kv_heads", None))
    return KeyValue(*cast(Any, (spec, spec)))


Backend: TypeAlias = str | Callable[..., Array] | None
"""Attention of a block: the name of a `specjax_kernels` implementation, None for the default, or a function
(rotated qkv [B, N, K, G + 2, E], past, positions, mask) -> [B, N, H, E], as training has."""


def joined(before: KeyValue | None, block: KeyValue) -> KeyValue:
    """Block keys and values one after another, [B, C, K, E]; None: nothing comes before."""
    return block if before is None else jax.tree.map(lambda *keys: jnp.concatenate(keys, axis=1), before, block)


class Past(NamedTuple):
    """Keys and values that a block may attend to besides its own."""

    pages: KeyValue  # [P, S, K, E]: committed tokens
    page_table: PageTable
    prefix_length: PerRequest
    before: KeyValue | None = None  # [B, C - N, K, E]: a draft's upper levels, not committed
    before_positions: Positions | None = None  # [B, C - N], theirs; read with a window only


def attention(
    x: Hidden, weights: Weights, rotation: Rotation, positions: Positions, mask: Any, past: Past, *, backend: Backend
) -> tuple[Float[Array, "B N M2"], KeyValue]:
    """The addition to the residual stream for a normalised x, and the block's own keys and values.

    The weights are those of `specjax.models.params.attention_leaves`, `rotation` is `rotations` of the positions, and
    the mask is over the C block keys, those of `past.before` first.
    """
    _, heads, group, head = weights["qkv"].shape
    group -= 2
    mixed = linear(x, weights, "qkv")
    # Values are rotated too, then put back: XLA:GPU fuses this into one kernel, which writes what attention reads.
    is_value = (jnp.arange(group + 2) == group + 1)[None, None, None, :, None]
    rotated = jnp.where(is_value, mixed, rotate(mixed, *rotation))
    if callable(backend):
        attended = backend(rotated, past, positions, mask)
    else:
        attended = kernels.attention(
            rotated, *past.pages, past.page_table, past.prefix_length, positions, mask,
            before=past.before, before_positions=past.before_positions, scale=head**-0.5, implementation=backend,
        )  # fmt: skip
    # Reshaped by hand: XLA:CPU transposes the weight of a product over three axes in every call.
    flat = {**weights, "output": weights["output"].reshape(heads * group * head, -1)}
    added = linear(attended.reshape(*x.shape[:2], -1), flat, "output")
    return added, KeyValue(rotated[..., group, :], rotated[..., group + 1, :])


def gated_mlp(x: Hidden, weights: Weights) -> Hidden:
    """down(silu(gate(x)) * up(x)); weights as `specjax.models.params.mlp_leaves` declares them."""
    wide = linear(x, weights, "gate_up")
    return linear(jax.nn.silu(wide[:, :, 0]) * wide[:, :, 1], weights, "down")


def linear(x: Hidden, weights: Weights, name: str) -> Array:
    """The product with a matrix, plus its bias if there is one."""
    out = kernels.linear(x, weights[name])
    bias = weights.get(f"{name}_bias")
    return out if bias is None else out + bias[None, None]
