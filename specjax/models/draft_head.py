"""Draft heads: a decoder layer, of P-EAGLE several, that predicts further features of the target. `head_spec` declares
the kinds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import specjax_kernels as kernels
from jax import Array
from jaxtyping import Float, Float32, Int32
from specjax_kernels import Norm, mesh, rms_norm
from specjax_kernels.quantised import KINDS

from specjax.cache import Hidden, Positions, Tokens, Weights
from specjax.config import BlockConfig, HeadConfig, MtpConfig
from specjax.models.blocks import (
    Backend,
    KeyValue,
    Past,
    Scores,
    attention,
    gated_mlp,
    key_value_spec,
    keys_values,
    linear,
    soft_cap,
)
from specjax.models.decoder import embedding_rows, head_columns
from specjax.models.gemma4 import gelu_gated
from specjax.models.head_spec import HeadSpec, head_sizes, head_spec, head_table
from specjax.models.params import create, map_leaves
from specjax.models.rope import rotations
from specjax.models.target import Target

AnyHead = TypeVar("AnyHead", bound=HeadConfig | MtpConfig)


class _Parameters(nn.Module):
    config: HeadConfig
    vocabulary: int  # V, of the target

    @nn.compact
    def __call__(self) -> dict[str, Array]:
        leaves = [leaf for scope in head_table(self.config) for leaf in scope.leaves]
        return create(self, leaves, head_sizes(self.config, self.vocabulary), self.config.dtype)


@dataclass(frozen=True, eq=False)
class DraftHead:
    """A head and its target. Methods take both models' parameters, since a head may use the target's embedding and
    output matrix."""

    config: HeadConfig
    target: Target
    backend: Backend = None

    @property
    def spec(self) -> HeadSpec:
        return head_spec(self.config.kind)

    @property
    def _next_feature_normed(self) -> bool:
        return self.spec.next_feature_normed or self.config.norm_output

    @property
    def _head_norm(self) -> Any:
        return partial(rms_norm, epsilon=self.config.norm_epsilon) if self.config.head_norms else None

    @property
    def pages(self) -> Any:
        """The cache entry of a token: a pytree of `PageSpec`s, here a `KeyValue`, or one for each of several layers."""
        spec, count = key_value_spec(self.config), self.config.layers
        return spec if count == 1 else (spec,) * count

    def embed(self, target_params: Weights, params: Weights, tokens: Tokens) -> Hidden:
        if self.config.own_embedding:
            rows = embedding_rows(params["embed"], tokens, self.config.dtype)
        else:
            rows = self.target.embed(target_params, tokens)[..., : self.target.config.hidden_size]
        scale = self.config.input_scale
        return rows if scale == 1 else rows * jnp.asarray(scale, rows.dtype)

    def fuse(self, params: Weights, features: Float[Array, "B N F"]) -> Hidden:
        """The target's features as input of the head. Outputs of the head are used without this step."""
        if not self.spec.reads_layers:
            return features
        normed = self._norm(params, "joint_norm", features)
        if (weights := params.get("fc_norm")) is not None:  # [A, f], a norm of each layer's channels
            apart = normed.reshape(*normed.shape[:2], *weights.shape)
            each = jax.vmap(partial(rms_norm, epsilon=self.config.norm_epsilon), in_axes=(2, 0), out_axes=2)
            normed = each(apart, weights).reshape(normed.shape)
        return linear(normed, params, "fc")

    def with_mask(self, params: Weights, features: Float[Array, "B N F"]) -> Float[Array, "B X F"]:
        """P-EAGLE: the features, and last those of slots whose tokens the target has not read."""
        if (mask := params.get("mask_feature")) is None:
            return features
        last = jnp.broadcast_to(mask.astype(features.dtype), (features.shape[0], 1, mask.shape[0]))
        return jnp.concatenate([features, last], axis=1)

    def forward(
        self, params: Weights, embedded: Hidden, feature: Hidden, positions: Positions, mask: Any, past: Past
    ) -> tuple[Hidden, Any]:
        """The next features, and the block's cache entries."""
        x, residual = self._inputs(params, embedded, feature, positions)
        rotation = rotations(self.config.rope, self.config.head_dim, positions)
        pages = past.pages if self.config.layers > 1 else (past.pages,)
        run = partial(self._decoded, rotation=rotation, positions=positions, mask=mask)
        out, block = run(params, x, residual, past=past._replace(pages=pages[0]), window=self.config.windows[0])
        blocks = [block]
        for i in range(1, self.config.layers):
            weights, norm = params[f"layers_{i}"], self._norm_of(params[f"layers_{i}"], "attention_norm")
            layer_past, window = past._replace(pages=pages[i]), self.config.windows[i]
            out, block = run(weights, out, out, norm=norm, past=layer_past, window=window)
            blocks.append(block)
        out = self._norm(params, "final_norm", out) if self._next_feature_normed else out
        return out, block if self.config.layers == 1 else tuple(blocks)

    def _decoded(
        self, weights: Weights, x: Float[Array, "B N J"], residual: Hidden, *, rotation: Any, positions: Positions,
        mask: Any, past: Past, window: int | None, norm: Norm | None = None,
    ) -> tuple[Hidden, KeyValue]:  # fmt: skip
        """A layer whose attention reads x, normalised by `norm`, and its block's keys and values."""
        gemma = self.config.gemma_layers
        x, block = attention(
            x, weights, rotation, positions, mask, past, backend=self.backend, residual=None if gemma else residual,
            scores=Scores(1.0 if gemma else None, window), head_norm=self._head_norm, norm=norm,
            norm_values=gemma,
        )  # fmt: skip
        mlp = partial(gated_mlp, weights=weights, norm=self._norm_of(weights, "mlp_norm"))
        if not gemma:
            return mlp(x, residual=x), block
        x = residual + self._norm(weights, "attention_output_norm", x)
        x = x + self._norm(weights, "mlp_output_norm", mlp(x, activation=gelu_gated))
        return x * weights["layer_scale"].astype(x.dtype)[None, None], block

    def keep(self, params: Weights, embedded: Hidden, feature: Hidden, positions: Positions) -> KeyValue:
        """The keys and values of a block, [B, N, K, E], as `forward` returns them."""
        x, _ = self._inputs(params, embedded, feature, positions)
        rotation = rotations(self.config.rope, self.config.head_dim, positions)
        return keys_values(x, params, rotation, head_norm=self._head_norm, norm_values=self.config.gemma_layers)

    def unembed(self, target_params: Weights, params: Weights, out: Hidden) -> Float32[Array, "B N W"]:
        """Logits of features that `forward` returned."""
        normed = out if self._next_feature_normed else self._norm(params, "final_norm", out)
        if self.config.own_head:
            return soft_cap(mesh.split(kernels.unembed(normed, params["head"]), 2), self.config.logit_softcap)
        return self.target.unembed(target_params, normed)

    def target_ids(self, params: Weights, ids: Int32[Array, "..."]) -> Int32[Array, "..."]:
        """The target's ids of tokens of the head."""
        return params["ids"][ids] if self.config.mapped else ids

    def _inputs(self, params: Weights, embedded: Hidden, feature: Hidden, positions: Positions) -> tuple[Array, Hidden]:
        """The input of q, k and v, [B, N, M or 2 M], and the residual."""
        if self.spec.first_embedding_zero:
            embedded = jnp.where((positions == 0)[..., None], jnp.zeros_like(embedded), embedded)
        normed = self._norm(params, "feature_norm", feature)
        pair = [self._norm(params, "embedding_norm", embedded), normed]
        both = jnp.concatenate(pair[::-1] if self.spec.feature_first else pair, axis=-1)
        if self.spec.reads_layers:
            return both, normed if self.config.norm_before_residual else feature
        x = linear(both, params, "fc")
        return self._norm(params, "attention_norm", x), x

    def _norm(self, params: Weights, name: str, x: Hidden) -> Hidden:
        """x, normalised if the head has that norm."""
        norm = self._norm_of(params, name)
        return x if norm is None else rms_norm(x, *norm[:2])

    def _norm_of(self, params: Weights, name: str) -> Norm | None:
        return Norm(params[name], self.config.norm_epsilon) if name in params else None


def draft_head(config: HeadConfig, target: Target, *, backend: Backend = None) -> DraftHead:
    """A head for a target. Raises ValueError as `check_fit`. `backend`: see `specjax.models.blocks.Backend`."""
    check_fit(config, target)
    return DraftHead(config, target, backend)


def check_fit(config: HeadConfig, target: Target) -> None:
    """Raises ValueError, with both values, if a head does not fit its target. `load_head` checks the files itself."""
    model = target.config
    width = model.hidden_size * (len(config.aux_layers) or 1)
    absent = [layer for layer in config.aux_layers if not 0 <= layer < model.num_layers]
    shares = not (config.aux_layers and config.own_embedding and config.own_head)
    if config.feature_size != width:
        raise ValueError(f"the head reads features of width {config.feature_size}, the target gives {width}")
    if absent:
        raise ValueError(f"the head reads the output of layer {absent[0]}, the target has {model.num_layers} layers")
    if shares and config.hidden_size != model.hidden_size:
        raise ValueError(
            f"the head's hidden size is {config.hidden_size}, the target's, whose embedding or head it uses, is "
            f"{model.hidden_size}"
        )
    if not (config.own_head or config.mapped) and config.vocab_size != model.vocab_size:
        raise ValueError(f"the head's vocabulary has {config.vocab_size} tokens, the target's {model.vocab_size}")
    if config.mapped and not config.own_head:
        raise ValueError("a head with a vocabulary of its own needs an output matrix of its own")


def init_head_params(config: HeadConfig, target: Target, key: Array) -> Weights:
    """Random parameters (normal, 0.02), of a head of several layers a dict for each layer. A vocabulary map
    selects the first W tokens."""
    check_fit(config, target)
    if isinstance(config, BlockConfig) or config.layers > 1:
        declared, sizes = head_table(config), head_sizes(config, target.config.vocab_size)
        keys = iter(jax.random.split(key, sum(len(scope.leaves) for scope in declared)))
        dtype = jnp.dtype(config.dtype)
        return map_leaves(declared, lambda leaf: leaf.initial(next(keys), leaf.shape(sizes), leaf.dtype or dtype))
    return cast(Weights, _Parameters(config, target.config.vocab_size).init(key)["params"])


def with_vocabulary(config: AnyHead, size: int) -> AnyHead:
    """The description of a head after `with_token_map`."""
    return replace(config, own_head=True, mapped=True, vocab_size=size)


def output_columns(
    target: Target, target_params: Weights, ids: Int32[Array, "W"] | None = None
) -> Float32[Array, "M W"]:
    """The target's output matrix, or its columns `ids`: the logits of the basis vectors, for any layout."""
    basis = jnp.eye(target.config.hidden_size, dtype=jnp.dtype(target.config.dtype))[None]
    return target.unembed(target_params, basis, ids, capped=False)[0]


def with_token_map(
    config: AnyHead, params: Weights, target: Target, target_params: Weights, ids: np.ndarray,
    quantization: str = "none",
) -> tuple[AnyHead, Weights]:  # fmt: skip
    """FR-Spec: restrict the head to the tokens `ids`, so that its output matrix has W columns instead of V.

    `ids` int32 [W] are distinct token ids of the target. The columns are copied once; gathering them in each call would
    read and write all of them. `quantization`: int8, fp8 or int4 quantises columns copied from the target. Source:
    thunlp/FR-Spec.
    """
    if config.own_head:
        columns, cap = head_columns(params["head"], jnp.asarray(ids)), config.logit_softcap
    else:
        columns = output_columns(target, target_params, jnp.asarray(ids)).astype(config.dtype)
        if quantization in KINDS:
            columns = jax.device_put(kernels.quantise(np.asarray(columns).T, quantization))
        cap = target.config.logit_softcap
    mapped = replace(with_vocabulary(config, len(ids)), logit_softcap=cap)
    return mapped, {**params, "head": columns, "ids": jnp.asarray(ids, jnp.int32)}
