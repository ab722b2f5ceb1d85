"""Gemma 4: layers of two kinds, with and without a window, that differ in heads and rotation.

Layers without a window have wider and fewer key/value heads, and in large models values that are the unnormalised key
projections. Values are normalised without a weight; scores are not scaled. Norms multiply by their weight, unlike Gemma
2's and 3's. In small models the last layers have no keys, values and pages, and read those of an earlier layer of their
kind; each layer reads an embedding of its own of each token. In 26B-A4B, experts stand beside the MLP.

Source: transformers' `gemma4`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float
from specjax_kernels import mesh, rms_norm

from specjax.cache import Hidden, PageSpec, Positions, Tokens
from specjax.config import ModelConfig
from specjax.models.blocks import Activation, KeyValue, Past, Scores, attended, gated_mlp, linear
from specjax.models.decoder import Decoder, Family, Layer, decoder_table, embedding_rows
from specjax.models.experts import expert_leaves, mixture
from specjax.models.params import (
    ATTENTION_NORM,
    GEMMA_MLP_NORM,
    HEAD_NORMS,
    KEY,
    LAYER_EMBEDDINGS,
    MLP_OUTPUT_NORM,
    OUTPUT_NORM,
    QUERIES,
    VALUE,
    Leaf,
    Table,
    Tensor,
    mlp_leaves,
    norm,
    renamed,
)
from specjax.models.params import linear as linear_leaves
from specjax.models.rope import Rotation, rotate

EVERYWHERE = {"K": "f", "G": "g", "E": "l", "Q": "o"}
"""Dimension letters of layers without a window."""


def _attention_leaves(config: ModelConfig, layer: int) -> tuple[Leaf, ...]:
    assert config.kinds is not None
    a, everywhere = "self_attn.", config.window(layer) is None
    queries = Tensor(f"{a}q_proj", "KGE M", (QUERIES,), "attn_q")
    keys, values = (Tensor(f"{a}{n}_proj", "KE M", (part,), f"attn_{n}") for n, part in (("k", KEY), ("v", VALUE)))
    output = linear_leaves("output", "K G E -> M", Tensor(f"{a}o_proj", "M KGE", gguf="attn_output"), bias=False)
    if config.owner(layer) != layer:
        own = Tensor(queries.name, queries.axes, gguf=queries.gguf)
        leaves = (*linear_leaves("queries", "M -> K G E", own, bias=False), *output, HEAD_NORMS[0])
    else:
        parts = (queries, keys) if everywhere and config.kinds.keys_as_values else (queries, keys, values)
        leaves = (*linear_leaves("qkv", "M -> K Q E", *parts, bias=False), *output, *HEAD_NORMS)
    return renamed(leaves, EVERYWHERE) if everywhere else leaves


def _expert_leaves(config: ModelConfig) -> tuple[Leaf, ...]:
    assert config.experts is not None
    scale = Tensor("router.scale", "M", gguf="ffn_gate_inp.scale")
    each = Tensor("router.per_expert_scale", "X", gguf="ffn_down_exps.scale")
    return (
        *expert_leaves(config.experts, "experts.", "router.proj.weight"),
        Leaf("router_norm", "M", (scale,), init="ones"),
        Leaf("router_scale", "X", (each,), init="ones", replicated=True),
        norm("experts_norm", "pre_feedforward_layernorm_2.weight", "pre_ffw_norm_2.weight"),
        norm("dense_output_norm", "post_feedforward_layernorm_1.weight", "post_ffw_norm_1.weight"),
        norm("experts_output_norm", "post_feedforward_layernorm_2.weight", "post_ffw_norm_2.weight"),
    )


def table(config: ModelConfig) -> Table:
    kinds = config.kinds
    assert kinds is not None
    ends: tuple[Leaf, ...] = ()
    input_leaves: tuple[Leaf, ...] = ()
    if kinds.inputs:
        projection = Tensor("model.per_layer_model_projection", "Y M", gguf="per_layer_model_proj")
        rows = Tensor("model.embed_tokens_per_layer.weight", "U Y", gguf="per_layer_token_embd.weight")
        ends = (
            Leaf(LAYER_EMBEDDINGS, "U Y", (rows,)),
            *linear_leaves("inputs", "M -> Y", projection, bias=False),
            norm("inputs_norm", "model.per_layer_projection_norm.weight", "per_layer_proj_norm.weight", letters="P"),
        )
        input_leaves = (
            *linear_leaves("input_gate", "M -> P", Tensor("per_layer_input_gate", "P M", gguf="inp_gate"), bias=False),
            *linear_leaves("input", "P -> M", Tensor("per_layer_projection", "M P", gguf="proj"), bias=False),
            norm("input_norm", "post_per_layer_input_norm.weight", "post_norm.weight"),
        )

    def layer(i: int) -> tuple[Leaf, ...]:
        mlp = mlp_leaves(bias=False)
        return (
            *_attention_leaves(config, i),
            *(ATTENTION_NORM, OUTPUT_NORM, GEMMA_MLP_NORM, MLP_OUTPUT_NORM),
            *(renamed(mlp, {"I": "D"}) if kinds.double_mlp and config.owner(i) != i else mlp),
            *(_expert_leaves(config) if config.experts else ()),
            *input_leaves,
            Leaf("scale", "1", (Tensor("layer_scalar", "1", gguf="layer_output_scale.weight"),), init="ones"),
        )

    return decoder_table(config, layer, ends)


def gelu_gated(gate: Array, up: Array) -> Array:
    return jax.nn.gelu(gate, approximate=True) * up


class Gemma4Layer(Layer):
    activation: ClassVar[Activation] = staticmethod(gelu_gated)

    def __call__(
        self, x: Hidden, rotation: Rotation, positions: Positions, mask: Any, past: Past, own: Array | None = None
    ) -> tuple[Hidden, Any]:
        """`own` [B, N, P]: the layer's own embeddings."""
        w = self.weights
        out, block = self.attend(x, rotation, positions, mask, past)
        x = x + self.norm("attention_output_norm", out)
        x = x + self.norm("mlp_output_norm", self.feed(x))
        if own is not None:
            x = x + self.norm("input_norm", linear(gelu_gated(linear(x, w, "input_gate"), own), w, "input"))
        return x * w["scale"].astype(x.dtype)[None, None], block

    def feed(self, x: Hidden, *, residual: Hidden | None = None) -> Hidden:
        """The MLP, and the experts beside it, whose router reads the stream itself."""
        w, experts = self.weights, self.config.experts
        dense = gated_mlp(x, w, activation=self.activation, norm=self.norm_of("mlp_norm"))
        if experts is None:
            return dense
        scale = w["router_norm"] * jnp.asarray(self.config.hidden_size**-0.5, w["router_norm"].dtype)
        routed = rms_norm(x, scale, self.config.norm_epsilon)
        mixed = mixture(self.norm("experts_norm", x), w, experts, activation=self.activation, routed=routed)
        return self.norm("dense_output_norm", dense) + self.norm("experts_output_norm", mixed)

    def attend(
        self, x: Hidden, rotation: Rotation, positions: Positions, mask: Any, past: Past, *,
        residual: Hidden | None = None,
    ) -> tuple[Hidden, Any]:  # fmt: skip
        c, w, shares = self.config, self.weights, "queries" in self.weights
        assert c.kinds is not None
        mixed = mesh.split(linear(x, w, "queries" if shares else "qkv", norm=self.norm_of("attention_norm")), 2)
        keys = () if shares else (w["key_norm"], jnp.ones_like(w["key_norm"]))
        group = c.num_heads // (c.kinds.kv_heads if self.window is None else c.num_kv_heads)
        if mixed.shape[3] == group + 1:  # values are keys
            mixed = jnp.concatenate([mixed, mixed[:, :, :, group:]], axis=3)
        # All are normalised at once, values with weights of 1, and rotated; values are put back.
        weights = jnp.stack([*[w["query_norm"]] * group, *keys])[None, None, None]
        normed = rms_norm(mixed, jnp.ones_like(w["query_norm"]), c.norm_epsilon) * weights
        place = jnp.arange(mixed.shape[3])[None, None, None, :, None]
        rotated = jnp.where(place == group + 1, normed, rotate(normed, *rotation))
        out, block = attended(
            rotated, x.shape, w, positions, mask, past, backend=self.backend, scores=Scores(1.0, self.window),
            residual=residual,
        )  # fmt: skip
        return out, () if shares else block

    @staticmethod
    def page_spec(config: ModelConfig, layer: int = 0) -> Any:
        assert config.kinds is not None
        if config.owner(layer) != layer:
            return ()
        shape = config.num_kv_heads, config.head_dim
        if config.window(layer) is None:
            shape = config.kinds.kv_heads, config.kinds.head_dim
        return KeyValue(*cast(Any, [PageSpec(shape, config.dtype, ("kv_heads", None))] * 2))


class Gemma4Decoder(Decoder):
    """With own embeddings of the layers, `embed` returns [B, N, M + L P]: a token's embedding, then the layers'."""

    def embed(self, tokens: Tokens) -> Float[Array, "B N X"]:
        rows, kinds = super().embed(tokens), self.config.kinds
        assert kinds is not None
        if not kinds.inputs:
            return rows
        known = jnp.where((tokens >= 0) & (tokens < kinds.input_vocab), tokens, 0)
        own = embedding_rows(self.weights[LAYER_EMBEDDINGS], known, self.config.dtype)
        return jnp.concatenate([rows, own], axis=-1)

    def inputs(self, x: Float[Array, "B N X"]) -> tuple[Hidden, Sequence[tuple[Array, ...]]]:
        c, kinds = self.config, self.config.kinds
        assert kinds is not None
        if not kinds.inputs:
            return super().inputs(x)
        if x.shape[-1] == c.hidden_size:
            raise ValueError(
                f"`forward` of a {c.family} model needs all of what `embed` returns, got {x.shape[-1]} channels"
            )
        (x, _), own = super().inputs(x[..., : c.hidden_size]), x[..., c.hidden_size :]
        shape = *x.shape[:2], c.num_layers, kinds.inputs
        context = (linear(x, self.weights, "inputs") * jnp.asarray(c.hidden_size**-0.5, x.dtype)).reshape(shape)
        context = rms_norm(context, self.weights["inputs_norm"], c.norm_epsilon)
        scale = jnp.asarray(math.sqrt(kinds.inputs), x.dtype)
        mixed = (context + own.reshape(shape) * scale) * jnp.asarray(2**-0.5, x.dtype)
        return x, [(mixed[:, :, i],) for i in range(c.num_layers)]


FAMILY = Family(table, Gemma4Layer, lambda config: math.sqrt(config.hidden_size), Gemma4Decoder)
