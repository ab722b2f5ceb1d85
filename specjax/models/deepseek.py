"""DeepSeek-V3 and R1: multi-head latent attention, and experts with groups and a shared MLP.

Attention runs on the latents: each query head is projected into the latent space and attends to the latent and the
rotated key of each token, which all heads share. The result is projected to the head's values. Pages hold
rank + rope_dim numbers per token and layer.

    keys [T, H, n] = latent [T, c] @ key_up [H, n, c]      q . (key_up latent) = (q key_up) . latent
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import specjax_kernels as kernels
from jax import Array
from specjax_kernels import Norm, mesh, rms_norm

from specjax.cache import Hidden, PageSpec, Positions
from specjax.config import Latent, ModelConfig
from specjax.models.blocks import Past, Scores, joined, linear
from specjax.models.decoder import Family, Layer, mixed_table
from specjax.models.params import ATTENTION_NORM, MLP_NORM, Leaf, Table, Tensor, norm
from specjax.models.params import linear as linear_leaves
from specjax.models.rope import Rotation, half_split, rotate


def latent_leaves(latent: Latent, *, bias: bool) -> tuple[Leaf, ...]:
    a = "self_attn."
    if latent.query_rank is None:
        queries = linear_leaves("queries", "M -> H q", Tensor(f"{a}q_proj", "Hq M"), bias=False)
    else:
        queries = (
            *linear_leaves("query_down", "M -> a", Tensor(f"{a}q_a_proj", "a M"), bias=bias),
            norm("query_down_norm", f"{a}q_a_layernorm.weight", letters="a"),
            *linear_leaves("queries", "a -> H q", Tensor(f"{a}q_b_proj", "Hq a"), bias=False),
        )
    up = f"{a}kv_b_proj.weight"  # rows of a head: its keys' n, then its values' v
    return (
        *queries,
        *linear_leaves("latent", "M -> p", Tensor(f"{a}kv_a_proj_with_mqa", "p M"), bias=bias),
        norm("latent_norm", f"{a}kv_a_layernorm.weight", letters="c"),
        Leaf("key_up", "H n c", (Tensor(up, "Hw c", cut=("w", "n", "")),)),
        Leaf("value_up", "H c v", (Tensor(up, "Hw c", cut=("w", "v", "n")),)),
        *linear_leaves("output", "H v -> M", Tensor(f"{a}o_proj", "M Hv"), bias=bias),
    )


def table(config: ModelConfig) -> Table:
    assert config.latent is not None
    return mixed_table(config, (*latent_leaves(config.latent, bias=config.attention_bias), ATTENTION_NORM, MLP_NORM))


NORM_EPSILON = 1e-6
"""Epsilon of the norms of latents, independent of rms_norm_eps as in transformers and DeepSeek's code."""


class Latents(NamedTuple):
    """Cache entries of a layer: latent and rotated key side by side, [..., 1, rank + rope_dim]."""

    latent: Array


class LatentLayer(Layer):
    @staticmethod
    def page_spec(config: ModelConfig, layer: int = 0) -> Any:
        assert config.latent is not None
        return Latents(cast(Any, PageSpec((1, config.latent.page_width), config.dtype, (None, None))))

    def attend(
        self, x: Hidden, rotation: Rotation, positions: Positions, mask: Any, past: Past, *,
        residual: Hidden | None = None,
    ) -> tuple[Hidden, Latents]:  # fmt: skip
        c, w, scale = self.config.latent, self.weights, self.config.query_scale
        assert c is not None and scale is not None
        x = self.norm("attention_norm", x)
        narrow, query_norm = x, None
        if c.query_rank is not None:
            narrow, query_norm = linear(x, w, "query_down"), Norm(w["query_down_norm"], NORM_EPSILON)
        queries = mesh.split(linear(narrow, w, "queries", norm=query_norm), 2)  # [B, N, H, n + r]
        block = self._latents(x, rotation)
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        inward = jnp.einsum("bnhd,hdc->bnhc", queries[..., : c.nope_dim], w["key_up"], precision=precision)
        rotated = rotate(half_split(queries[..., c.nope_dim :]), *rotation)
        query = jnp.concatenate([inward, rotated], axis=-1)
        ragged = past.ragged
        if ragged is not None:
            query, block, positions = jax.tree.map(ragged.parted, (query, block, positions))
        if callable(self.backend):
            # One key for all heads. Without its rotated channels it is also the value.
            shared = jnp.concatenate([query, block.latent, block.latent], axis=2)[:, :, None]
            attended = self.backend(shared, past, positions, mask, Scores(scale))[..., : c.rank]
        else:
            keys: Latents = joined(past.before, block)
            options = {"scale": scale, "v_width": c.rank, "implementation": self.backend}
            attended = _by_heads(mesh.split(query, 2), keys.latent, past, positions, mask, options)
        if ragged is not None:
            attended = ragged.joined(ragged.cleared(attended))
        values = jnp.einsum("bnhc,hcv->bnhv", attended, w["value_up"], precision=precision)
        return mesh.whole(linear(values.reshape(*x.shape[:2], -1), w, "output", residual=residual)), block

    def keep(self, x: Hidden, rotation: Rotation) -> Latents:
        return self._latents(self.norm("attention_norm", x), rotation)

    def _latents(self, x: Hidden, rotation: Rotation) -> Latents:
        """The latents and rotated keys of the normalised x."""
        c, w = self.config.latent, self.weights
        assert c is not None
        both = linear(x, w, "latent")
        latent = rms_norm(both[..., : c.rank], w["latent_norm"], NORM_EPSILON)
        key = rotate(half_split(both[..., c.rank :]), *rotation)
        return Latents(jnp.concatenate([latent, key], axis=-1)[:, :, None])


def _by_heads(query: Any, latent: Any, past: Past, positions: Positions, mask: Any, options: dict[str, Any]) -> Any:
    """`kernels.tree_attention`; under a mesh each device has some query heads and all latents."""

    def attend(query: Any, latent: Any, pages: Any, where: tuple[Any, ...], masks: tuple[Any, ...]) -> Any:
        table, length, positions = where
        unused = jnp.zeros(latent.shape[:2], jnp.int32)  # positions of keys, which only windows read
        return kernels.tree_attention(
            query, latent, None, pages, None, table, length, positions, unused, masks[0] if masks else mask, **options
        )

    where = past.page_table, past.prefix_length, positions
    masks = () if isinstance(mask, kernels.Causal) else (mask,)
    return mesh.apart(attend, (2, -1, -1, -1, -1), 2, query, latent, past.pages.latent, where, masks)


FAMILY = Family(table, LatentLayer)
