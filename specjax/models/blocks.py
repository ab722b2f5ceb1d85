"""The parts of a decoder layer as functions of arrays, shared by targets and draft heads: grouped-query attention to
pages and block, a gated MLP, and blocks whose rows have different lengths (`Ragged`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import specjax_kernels as kernels
from jax import Array
from jaxtyping import Float, Int32
from specjax_kernels import Norm, mesh

from specjax.cache import Hidden, PageSpec, PageTable, PerRequest, Positions, Weights
from specjax.config import HeadConfig, ModelConfig
from specjax.models.rope import Rotation, rotate

T = TypeVar("T")


class KeyValue(NamedTuple):
    """Cache entries of attention: two page leaves [P, S, K, E], or two block leaves [B, N, K, E]."""

    key: Array
    value: Array


def key_value_spec(config: ModelConfig | HeadConfig) -> KeyValue:
    """The cache entry of a token in one layer of a model or head: two `PageSpec`s."""
    spec = PageSpec((config.num_kv_heads, config.head_dim), config.dtype, ("kv_heads", None))
    return KeyValue(*cast(Any, (spec, spec)))


Backend: TypeAlias = str | Callable[..., Array] | None
"""Attention of a block: the name of a `specjax_kernels` implementation, None for the default, or a function
(rotated qkv [B, N, K, G + 2, E], past, positions, mask, `Scores`) -> [B, N, H, E], as training has."""


class Ragged(NamedTuple):
    """The numbers of tokens in the rows of a block [B, N], and where they lie among U places without padding.

    The layers compute the U tokens of all rows side by side, [1, U, ...]. Only attention and cache entries have the
    block's shape, [B, N, ...]. With N = 3, U = 5 and lengths [2, 0, 3]: a b . | . . . | c d e  <->  a b c d e. Unused
    places and padding are zeros.

    Without `source` the layers compute the block in its own shape.
    """

    length: PerRequest
    source: Int32[Array, "U"] | None = None  # index of each place's token in the flattened block, [B * N]; or B * N
    place: Int32[Array, "B N"] | None = None  # of each token

    @classmethod
    def of(cls, length: PerRequest, width: int, tokens: int = 0) -> Ragged:
        """For rows of `length` tokens, each at most `width`, together at most `tokens` (0: any number)."""
        if length.shape[0] == 1 or width == 1:  # all padding is at the end, or no row has any
            return cls(length)
        tokens = tokens or length.shape[0] * width
        ends = jnp.cumsum(length)
        begins = ends - length
        place = begins[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
        index = jnp.arange(tokens, dtype=jnp.int32)
        row = jnp.minimum(jnp.sum(index[:, None] >= ends[None, :], axis=1, dtype=jnp.int32), length.shape[0] - 1)
        source = row * width + jnp.clip(index - begins[row], 0, width - 1)
        source = jnp.where(index < ends[-1], source, length.shape[0] * width)
        return cls(length, source, jnp.minimum(place, tokens - 1))

    def cleared(self, x: Array) -> Array:
        """x [B, N, ...] with padding of zeros."""
        there = jnp.arange(x.shape[1])[None, :] < self.length[:, None]
        return jnp.where(there.reshape(*there.shape, *[1] * (x.ndim - 2)), x, 0)

    def joined(self, x: Array) -> Array:
        """[B, N, ...] -> [1, U, ...]."""
        if self.source is None:
            return x
        return x.reshape(-1, *x.shape[2:]).at[self.source].get(mode="fill", fill_value=0)[None]

    def parted(self, x: Array) -> Array:
        """[1, U, ...] -> [B, N, ...]."""
        return x if self.place is None else self.cleared(x[0].at[self.place].get(mode="promise_in_bounds"))


def joined(before: T | None, block: T) -> T:
    """Blocks one after another, such as keys and values [B, C, K, E]. None: nothing comes before."""
    return block if before is None else jax.tree.map(lambda *keys: jnp.concatenate(keys, axis=1), before, block)


class Past(NamedTuple):
    """Keys and values that a block may attend to besides its own."""

    pages: Any  # [P, S, ...]: cache entries of committed tokens, such as a `KeyValue` of [P, S, K, E]
    page_table: PageTable
    prefix_length: PerRequest
    before: Any = None  # cache entries of a draft's upper levels, which are not committed: [B, C - N, ...]
    before_positions: Positions | None = None  # [B, C - N]; read with a window only
    ragged: Ragged | None = None  # x, rotation, positions and residual are [1, U, ...] for a block [B, N, ...]
    shared: Any = None  # cache entries of the block, of a layer that shares them; `pages` and `before` are its, too


@dataclass(frozen=True)
class Scores:
    """Scale, window, soft cap and sinks of attention scores."""

    scale: float | None = None  # None: E ** -0.5
    window: int | None = None  # keys that a query sees, itself included; None: all
    softcap: float | None = None
    sinks: Array | None = None  # [K, G]: one more score of each query head, whose weight is dropped


PLAIN_SCORES = Scores()


def attention(
    x: Hidden, weights: Weights, rotation: Rotation, positions: Positions, mask: Any, past: Past, *, backend: Backend,
    scores: Scores = PLAIN_SCORES, head_norm: Callable[[Array, Array], Array] | None = None,
    norm: Norm | None = None, norm_values: bool = False, residual: Float[Array, "B N M2"] | None = None,
    gate: Array | None = None,
) -> tuple[Float[Array, "B N M2"], KeyValue]:  # fmt: skip
    """Attention of x, normalised by `norm`, plus `residual`; and the keys and values of the block. `gate` [B, N, H E]
    multiplies each head's output by its sigmoid.

    `specjax.models.params.attention_leaves` declares the weights. `rotation` is `rotations` of the positions. The mask
    covers the C block keys, beginning with `past.before`. `head_norm` (x, weight [E]) normalises queries and keys with
    the weights `query_norm` and `key_norm`; with `norm_values` also values, without weights.
    """
    rotated = _rotated(x, weights, rotation, head_norm, norm, norm_values)
    return attended(
        rotated, x.shape, weights, positions, mask, past, backend=backend, scores=scores, residual=residual, gate=gate
    )


def attended(
    rotated: Array, shape: tuple[int, ...], weights: Weights, positions: Positions, mask: Any, past: Past, *,
    backend: Backend, scores: Scores, residual: Float[Array, "B N M2"] | None = None, gate: Array | None = None,
) -> tuple[Float[Array, "B N M2"], KeyValue]:  # fmt: skip
    """`attention` of rotated queries, keys and values [B, N, K, G + 2, E], for an x of this shape."""
    ragged = past.ragged
    if ragged is not None:
        rotated, positions = ragged.parted(rotated), ragged.parted(positions)
    if past.shared is not None:
        rotated = jnp.concatenate([rotated, *(entry[:, :, :, None] for entry in past.shared)], axis=3)
    if callable(backend):
        out = backend(rotated, past, positions, mask, scores)
    else:
        scale = rotated.shape[4] ** -0.5 if scores.scale is None else scores.scale
        # Only a CPU without a mesh has ragged blocks.
        queries = None if ragged is None else ragged.length
        options = {"scale": scale, "window": scores.window, "softcap": scores.softcap, "implementation": backend}
        options["queries"] = queries
        out = _by_heads(rotated, past, positions, mask, scores.sinks, options)
    if ragged is not None:
        out = ragged.joined(out)
    out = out.reshape(*shape[:2], -1)
    if gate is not None:
        out = out * jax.nn.sigmoid(gate.reshape(out.shape))
    return mesh.whole(linear(out, weights, "output", residual=residual)), _key_value(rotated)


def keys_values(
    x: Hidden, weights: Weights, rotation: Rotation, *, head_norm: Callable[[Array, Array], Array] | None = None,
    norm: Norm | None = None, norm_values: bool = False,
) -> KeyValue:  # fmt: skip
    """The keys and values that `attention` returns, without attention."""
    return _key_value(_rotated(x, weights, rotation, head_norm, norm, norm_values))


def _rotated(
    x: Hidden, weights: Weights, rotation: Rotation, head_norm: Callable[[Array, Array], Array] | None,
    norm: Norm | None, norm_values: bool,
) -> Array:  # fmt: skip
    """Queries, keys and values of x, [B, N, K, G + 2, E], after norms and rotary embedding."""
    mixed = mesh.split(linear(x, weights, "qkv", norm=norm), 2)
    group = mixed.shape[3] - 2
    # Values are normalised and rotated too, then put back: XLA:GPU fuses this into one kernel, which writes what
    # attention reads.
    place = jnp.arange(group + 2)[None, None, None, :, None]
    rotated = mixed
    if head_norm is not None:
        queries, keys = (head_norm(mixed, weights[name]) for name in ("query_norm", "key_norm"))
        rotated = jnp.where(place < group, queries, keys)
        if norm_values:
            mixed = head_norm(mixed, jnp.ones_like(weights["key_norm"]))
    return jnp.where(place == group + 1, mixed, rotate(rotated, *rotation))


def _key_value(rotated: Array) -> KeyValue:
    group = rotated.shape[3] - 2
    return KeyValue(rotated[:, :, :, group], rotated[:, :, :, group + 1])


def _by_heads(
    rotated: Array, past: Past, positions: Positions, mask: Any, sinks: Array | None, options: dict[str, Any]
) -> Array:
    """`kernels.attention`; under a mesh each device has some key/value heads with their queries and pages."""

    def attend(
        rotated: Array, pages: KeyValue, before: Any, sinks: Array | None, where: tuple[Any, ...],
        masks: tuple[Array, ...],
    ) -> Array:  # fmt: skip
        table, length, positions, before_positions = where
        return kernels.attention(
            rotated, pages.key, pages.value, table, length, positions, masks[0] if masks else mask,
            before=before, before_positions=before_positions, sinks=None if sinks is None else sinks.reshape(-1),
            **options,
        )  # fmt: skip

    where = past.page_table, past.prefix_length, positions, past.before_positions
    masks = () if isinstance(mask, kernels.Causal) else (mask,)
    return mesh.apart(attend, (2, 2, 2, 0, -1, -1), 2, rotated, past.pages, past.before, sinks, where, masks)


def soft_cap(x: Array, cap: float | None) -> Array:
    """x mapped to the range from -cap to cap (Gemma 2). None: unchanged."""
    return x if cap is None else cap * jnp.tanh(x / cap)


Activation: TypeAlias = Callable[[Array, Array], Array]
"""(gate, up) -> the input of a gated MLP's last product, of one shape."""


def swiglu(gate: Array, up: Array) -> Array:
    return jax.nn.silu(gate) * up


def gated_mlp(
    x: Hidden, weights: Weights, *, activation: Activation = swiglu, prefix: str = "", norm: Norm | None = None,
    residual: Hidden | None = None,
) -> Hidden:  # fmt: skip
    """down(activation(gate(x), up(x))) of x, normalised by `norm`, plus `residual`.
    `specjax.models.params.mlp_leaves` declares the weights."""
    wide = mesh.split(linear(x, weights, f"{prefix}gate_up", norm=norm, gated=activation), x.ndim - 1)
    return mesh.whole(linear(wide, weights, f"{prefix}down", residual=residual))


def linear(
    x: Hidden, weights: Weights, name: str, *, norm: Norm | None = None, gated: Activation | None = None,
    residual: Array | None = None,
) -> Array:  # fmt: skip
    """The product with the matrix `name`, plus `name_bias` if present; see `specjax_kernels.linear`. A map from several
    axes takes them as one."""
    weight = weights[name]
    if not isinstance(weight, kernels.Quantised) and weight.shape[0] != x.shape[-1]:
        # Reshaped by hand: XLA:CPU transposes the weight of a product over several axes in every call.
        weight = weight.reshape(x.shape[-1], -1)
    bias = weights.get(f"{name}_bias")
    return kernels.linear(x, weight, norm=norm, bias=bias, gated=gated, residual=residual)
