"""The two halves of a decoder layer as functions of arrays: grouped-query attention to pages and block, a gated MLP.

Targets and draft heads are made of them; they differ in what they normalise, add and feed in. Knows no parameters'
names and no modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32
from specjax_kernels import tree_attention, tree_attention_packed

from specjax.cache import PageSpec
from specjax.config import HeadConfig, ModelConfig
from specjax.models.layers import project, rotate
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
"""How a block attends: a `tree_attention` implementation, None = the default, or a function of one's own,
(turned queries, keys and values [B, N, K, G + 2, E], past, positions, mask) -> [B, N, H, E]; training has one."""


def joined(before: KeyValue | None, block: KeyValue) -> KeyValue:
    """Block keys and values one after another, [B, C, K, E]; None: nothing comes before."""
    if before is None:
        return block
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), before, block)


class Past(NamedTuple):
    """What a block may attend to besides itself."""

    pages: KeyValue  # [P, S, K, E]: committed tokens
    page_table: PageTable
    prefix_length: PerRequest
    before: KeyValue | None = None  # [B, C - N, K, E]: a draft's upper levels, not committed


def attention(
    x: Hidden,
    weights: Weights,
    turn: tuple[Float32[Array, "B N E2"], Float32[Array, "B N E2"]],
    positions: Positions,
    mask: Any,
    past: Past,
    *,
    precision: jax.lax.Precision,
    backend: Backend,
) -> tuple[Float[Array, "B N M2"], KeyValue]:
    """What attention adds to the residual stream, and the block's own keys and values.

    Args:
        x: normalised.
        weights: as `specjax.models.params.attention_leaves` declares them.
        turn: `rotations` of the positions.
        mask: over the C block keys, those of `past.before` first.
    """
    _, heads, group, head = weights["qkv"].shape
    group -= 2
    mixed = _linear(x, weights, "qkv", precision)
    # All are turned and the values put back: XLA:GPU makes one kernel of it, which writes what attention reads.
    is_value = (jnp.arange(group + 2) == group + 1)[None, None, None, :, None]
    turned = jnp.where(is_value, mixed, rotate(mixed, *turn))
    key, value = turned[..., group, :], turned[..., group + 1, :]
    key_pages, value_pages = past.pages
    pages = (key_pages, value_pages, past.page_table, past.prefix_length)
    options: dict[str, Any] = {"scale": head**-0.5, "implementation": backend}
    if callable(backend):
        attended = backend(turned, past, positions, mask)
    elif past.before is None:
        attended = tree_attention_packed(turned, *pages, positions, mask, **options)
    else:
        query = turned[..., :group, :].reshape(*x.shape[:2], heads * group, head)
        keys, values = joined(past.before, KeyValue(key, value))
        block_positions = jnp.zeros(keys.shape[:2], jnp.int32)  # read with a window only, which no such model has
        attended = tree_attention(query, keys, values, *pages, positions, block_positions, mask, **options)
    attended = attended.reshape(*x.shape[:2], -1)
    # Reshaped by hand: a product over three axes makes XLA:CPU transpose the weight in every call.
    flat = {**weights, "output": weights["output"].reshape(heads * group * head, -1)}
    return _linear(attended, flat, "output", precision), KeyValue(key, value)


def gated_mlp(x: Hidden, weights: Weights, *, precision: jax.lax.Precision) -> Hidden:
    """down(silu(gate(x)) * up(x)); weights as `specjax.models.params.mlp_leaves` declares them."""
    wide = _linear(x, weights, "gate_up", precision)
    return _linear(jax.nn.silu(wide[:, :, 0]) * wide[:, :, 1], weights, "down", precision)


def _linear(x: Hidden, weights: Weights, name: str, precision: jax.lax.Precision) -> Array:
    """The product with a matrix, plus its bias if there is one."""
    out = project(x, weights[name], precision=precision)
    bias = weights.get(f"{name}_bias")
    return out if bias is None else out + bias[None, None]
