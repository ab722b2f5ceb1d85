"""The two halves of a decoder layer as functions of arrays, shared by targets and draft heads: grouped-query attention
to pages and block, and a gated MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import specjax_kernels as kernels
from jax import Array
from jaxtyping import Float, Float32

from specjax.cache import PageSpec
from specjax.config import HeadConfig, ModelConfig
from specjax.models.layers import rotate
from specjax.types import Hidden, PageTable, PerRequest, Positions, Weights


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
    if before is None:
        return block
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), before, block)


class Past(NamedTuple):
    """Keys and values that a block may attend to besides its own."""

    pages: KeyValue  # [P, S, K, E]: committed tokens
    page_table: PageTable
    prefix_length: PerRequest
    before: KeyValue | None = None  # [B, C - N, K, E]: a draft's upper levels, not committed


def attention(
    x: Hidden,
    weights: Weights,
    rotation: tuple[Float32[Array, "B N E2"], Float32[Array, "B N E2"]],
    positions: Positions,
    mask: Any,
    past: Past,
    *,
    backend: Backend,
) -> tuple[Float[Array, "B N M2"], KeyValue]:
    """The addition to the residual stream, and the block's own keys and values.

    Args:
        x: normalised.
        weights: as `specjax.models.params.attention_leaves` declares them.
        rotation: `rotations` of the positions.
        mask: over the C block keys, those of `past.before` first.
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
            rotated,
            *past.pages,
            past.page_table,
            past.prefix_length,
            positions,
            mask,
            before=past.before,
            scale=head**-0.5,
            implementation=backend,
        )
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
