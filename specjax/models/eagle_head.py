"""Draft heads, EAGLE's and MTP: one decoder layer that continues the target's features. Linen, used functionally.

Slot t of a head reads the target's feature f_t and the embedding of token x_{t+1}, stands at RoPE position t, and
predicts x_{t+2}; deeper in a tree the feature is the head's own output at the parent. The three kinds:

    eagle    x = fc(e, f)          out = x + attention(x)            + mlp(norm(.))    logits = target's head(out)
    eagle3   g = fc(f), or out  out = g + attention(norm(e), norm(g)) + mlp(norm(.))    logits = head(norm(out))
    mtp      x = fc(norm(f), norm(e))  out = norm(x + attention(norm(x)) + mlp(norm(.)))   logits = target's head(out)

(EAGLE-1 and EAGLE-2 are one head; they differ in their trees.) `out` is the next feature: un-normed in the first two,
after the final norm in mtp. Eagle and mtp heads read the target's hidden state after its final norm, eagle3 the
outputs of some of its layers (auxiliary layers).

Parameters are a flat dict, laid out [in, out...]:

    fc [2 M or F, M]  fc_bias [M]  embedding_norm, feature_norm [M] (eagle3, mtp)  attention_norm [M] (mtp)
    qkv [M or 2 M, K, G + 2, E]  qkv_bias [K, G + 2, E]  output [K, G, E, M]  output_bias [M]  mlp_norm [M]
    gate_up [M, 2, I]  gate_up_bias [2, I]  down [I, M]  down_bias [M]  final_norm [M] (eagle3, mtp)
    embed [V, M], head [M, W]: its own, if it has them
    ids int32 [W]: the target's token ids of its vocabulary, if that is another one

Where two things are concatenated the embedding comes first, but in mtp the feature. Source: SafeAILab/EAGLE
`cnets1.py`, `cnets.py`; for mtp sgl-project/sglang and vllm-project/vllm `mimo_mtp.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Int32

from specjax.config import HeadConfig
from specjax.models.blocks import AttentionWeights, Backend, KeyValue, MlpWeights, Past, attention, gated_mlp
from specjax.models.layers import logits, precision_of, project, rms_norm, rotations
from specjax.models.protocol import Target
from specjax.types import Hidden, Positions, Tokens, Weights

LOGICAL_AXES: dict[str, tuple[str | None, ...]] = {
    "fc": (None, None),
    "fc_bias": (None,),
    "embedding_norm": (None,),
    "feature_norm": (None,),
    "attention_norm": (None,),
    "qkv": (None, "kv_heads", None, None),
    "qkv_bias": ("kv_heads", None, None),
    "output": ("kv_heads", None, None, None),
    "output_bias": (None,),
    "mlp_norm": (None,),
    "gate_up": (None, None, "mlp"),
    "gate_up_bias": (None, "mlp"),
    "down": ("mlp", None),
    "down_bias": (None,),
    "final_norm": (None,),
    "embed": ("vocab", None),
    "head": (None, "vocab"),
    "ids": (None,),
}
"""Leaf name to logical axes: which axis a tensor-parallel mesh splits."""


class _Head(nn.Module):
    config: HeadConfig
    vocabulary: int  # V, of the target
    backend: Backend = None

    def setup(self) -> None:
        c = self.config
        width, mlp, heads, group, head = c.hidden_size, c.intermediate_size, c.num_kv_heads, c.group_size, c.head_dim
        dtype, third, normed = jnp.dtype(c.dtype), c.kind == "eagle3", c.kind != "eagle"
        init, ones, zeros = nn.initializers.normal(0.02), nn.initializers.ones, nn.initializers.zeros

        def norm(name: str, there: bool = True) -> Array | None:
            return self.param(name, ones, (width,), dtype) if there else None

        def bias(name: str, there: bool, *shape: int) -> Array | None:
            return self.param(name, zeros, shape, dtype) if there else None

        self.fc = self.param("fc", init, (c.feature_size if third else 2 * width, width), dtype)
        self.fc_bias = bias("fc_bias", c.fc_bias, width)
        self.embedding_norm, self.feature_norm = norm("embedding_norm", normed), norm("feature_norm", normed)
        self.attention_norm = norm("attention_norm", c.kind == "mtp")
        self.attention_weights = AttentionWeights(
            qkv=self.param("qkv", init, (2 * width if third else width, heads, group + 2, head), dtype),
            qkv_bias=bias("qkv_bias", c.attention_bias, heads, group + 2, head),
            output=self.param("output", init, (heads, group, head, width), dtype),
            output_bias=bias("output_bias", c.output_bias, width),
        )
        self.mlp_norm = norm("mlp_norm")
        self.mlp_weights = MlpWeights(
            gate_up=self.param("gate_up", init, (width, 2, mlp), dtype),
            gate_up_bias=bias("gate_up_bias", c.mlp_bias, 2, mlp),
            down=self.param("down", init, (mlp, width), dtype),
            down_bias=bias("down_bias", c.mlp_bias, width),
        )
        self.final_norm = norm("final_norm", normed)
        if c.own_embedding:
            self.embedding = self.param("embed", init, (self.vocabulary, width), dtype)
        if c.own_head:
            self.head = self.param("head", init, (width, c.vocab_size), dtype)
        if c.mapped:
            self.ids = self.param("ids", lambda _: jnp.arange(c.vocab_size, dtype=jnp.int32))

    def embed(self, tokens: Tokens) -> Hidden:
        return self.embedding.at[tokens].get(mode="clip")

    def fuse(self, features: Float[Array, "B N F"]) -> Hidden:
        return self._through_fc(features) if self.config.kind == "eagle3" else features

    def _through_fc(self, x: Array) -> Hidden:
        out = project(x, self.fc, precision=precision_of(self.config.dtype))
        return out if self.fc_bias is None else out + self.fc_bias[None, None]

    def forward(
        self, embedded: Hidden, feature: Hidden, positions: Positions, mask: Any, past: Past
    ) -> tuple[Hidden, KeyValue]:
        c = self.config
        precision = precision_of(c.dtype)
        x, residual = self._inputs(embedded, feature, positions)
        turn = rotations(c.rope, c.head_dim, positions)
        added, block = attention(
            x, self.attention_weights, turn, positions, mask, past, precision=precision, backend=self.backend
        )
        x = residual + added
        out = x + gated_mlp(self._norm(x, self.mlp_norm), self.mlp_weights, precision=precision)
        return self._norm(out, self.final_norm) if c.kind == "mtp" else out, block

    def _inputs(self, embedded: Hidden, feature: Hidden, positions: Positions) -> tuple[Array, Hidden]:
        """What q, k and v read, [B, N, M or 2 M], and the residual."""
        if self.config.kind == "eagle":
            x = self._through_fc(jnp.concatenate([embedded, feature], axis=-1))
            return x, x
        normed = self._norm(feature, self.feature_norm)
        if self.config.kind == "eagle3":
            x = jnp.concatenate([self._norm(embedded, self.embedding_norm), normed], axis=-1)
            return x, normed if self.config.norm_before_residual else feature
        # As SGLang and vLLM serve such layers: their positions are the slots', too, so slot 0 is made of f_0 alone. It
        # matters beyond that slot, since every later one attends to its key and value.
        embedded = jnp.where((positions == 0)[..., None], jnp.zeros_like(embedded), embedded)
        x = self._through_fc(jnp.concatenate([normed, self._norm(embedded, self.embedding_norm)], axis=-1))
        return self._norm(x, self.attention_norm), x

    def _norm(self, x: Hidden, weight: Array | None) -> Hidden:
        return rms_norm(x, cast(Array, weight), self.config.norm_epsilon)

    def normed(self, out: Hidden) -> Hidden:
        return self._norm(out, self.final_norm) if self.config.kind == "eagle3" else out

    def unembed(self, normed: Hidden) -> Float32[Array, "B N W"]:
        return logits(normed, self.head)


class EagleHead(NamedTuple):
    """A head beside its target: functions of both models' parameters, since it may use the target's ends.

    embed(target_params, params, tokens [B, N]) -> [B, N, M]
    fuse(params, features [B, N, F]) -> [B, N, M]                       # eagle3's fc; only for the target's features
    forward(params, embedded, feature, positions, mask, past) -> out [B, N, M], keys and values
    unembed(target_params, params, out) -> float32 logits [B, N, W]
    target_ids(params, draft ids) -> the target's ids
    """

    config: HeadConfig
    embed: Callable[[Weights, Weights, Tokens], Hidden]
    fuse: Callable[[Weights, Array], Hidden]
    forward: Callable[..., tuple[Hidden, KeyValue]]
    unembed: Callable[[Weights, Weights, Hidden], Array]
    target_ids: Callable[[Weights, Array], Array]


def eagle_head(config: HeadConfig, target: Target, *, backend: Backend = None) -> EagleHead:
    """The functions of a head for one target. `backend`: see `specjax.models.blocks.Backend`.

    Raises:
        ValueError: they do not fit together.
    """
    check_fit(config, target)
    module = _Head(config, target.config.vocab_size, backend)

    def apply(params: Weights, method: str, *arguments: Any) -> Any:
        return module.apply({"params": params}, *arguments, method=method)

    def embed(target_params: Weights, params: Weights, tokens: Tokens) -> Hidden:
        return apply(params, "embed", tokens) if config.own_embedding else target.embed(target_params, tokens)

    def fuse(params: Weights, features: Array) -> Hidden:
        return apply(params, "fuse", features)

    def forward(
        params: Weights, embedded: Hidden, feature: Hidden, positions: Positions, mask: Any, past: Past
    ) -> tuple[Hidden, KeyValue]:
        return apply(params, "forward", embedded, feature, positions, mask, past)

    def unembed(target_params: Weights, params: Weights, out: Hidden) -> Array:
        normed = apply(params, "normed", out)
        return apply(params, "unembed", normed) if config.own_head else target.unembed(target_params, normed)

    def target_ids(params: Weights, ids: Int32[Array, "..."]) -> Int32[Array, "..."]:
        return params["ids"][ids] if config.mapped else ids

    return EagleHead(config, embed, fuse, forward, unembed, target_ids)


def check_fit(config: HeadConfig, target: Target) -> None:
    """What a checkpoint's reader has checked already, for heads that are made by hand.

    Raises:
        ValueError: names both values.
    """
    model = target.config
    wanted = model.hidden_size * (len(config.aux_layers) if config.kind == "eagle3" else 1)
    if config.feature_size != wanted:
        raise ValueError(f"the head reads features of width {config.feature_size}, the target gives {wanted}")
    deep = [layer for layer in config.aux_layers if not 0 <= layer < model.num_layers]
    if deep:
        raise ValueError(f"the head reads the output of layer {deep[0]}, the target has {model.num_layers} layers")
    shares = config.kind != "eagle3" or not (config.own_embedding and config.own_head)
    if shares and config.hidden_size != model.hidden_size:
        raise ValueError(
            f"the head's hidden size is {config.hidden_size}, the target's, whose embedding or head it uses, is "
            f"{model.hidden_size}"
        )
    if not (config.own_head or config.mapped) and config.vocab_size != model.vocab_size:
        raise ValueError(f"the head's vocabulary has {config.vocab_size} tokens, the target's {model.vocab_size}")
    if config.mapped and not config.own_head:
        raise ValueError("a head with a vocabulary of its own needs its own rows of the language model head")


def init_head_params(config: HeadConfig, target: Target, key: Array) -> Weights:
    """Random parameters (normal, 0.02; the map, if there is one, leads to the first W tokens)."""
    check_fit(config, target)
    module = _Head(config, target.config.vocab_size)

    def touch(module: _Head) -> Array:
        return module.fc

    return cast(Weights, module.init(key, method=touch)["params"])


def with_token_map(
    config: HeadConfig, params: Weights, target: Target, target_params: Weights, ids: np.ndarray
) -> tuple[HeadConfig, Weights]:
    """FR-Spec: the head proposes the tokens `ids` only, so that its largest matrix has W columns instead of V.

    The columns are copied once: gathering them in each call would read and write them all. Lossless, as any draft is.
    Source: thunlp/FR-Spec.

    Args:
        ids: int32 [W], distinct token ids of the target.
    """
    if config.own_head:
        columns = params["head"][:, ids]
    else:
        # The logits of the basis vectors are the head's columns, whatever the target calls and lays out its own.
        basis = jnp.eye(config.hidden_size, dtype=jnp.dtype(config.dtype))[None]
        columns = target.unembed(target_params, basis, jnp.asarray(ids))[0].astype(config.dtype)
    mapped = replace(config, own_head=True, mapped=True, vocab_size=len(ids))
    return mapped, {**params, "head": columns, "ids": jnp.asarray(ids, jnp.int32)}
