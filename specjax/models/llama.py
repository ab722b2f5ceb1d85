"""The Llama family: SmolLM2, Llama 2, 3, 3.1, 3.2. Linen modules, used functionally.

Parameters are nested dicts with one leaf per layer and matrix, laid out [in, out...] so that a tensor-parallel split is
a split of one axis:

    embed [V, M]    final_norm [M]    head [M, V] (untied only)
    layers_i:  attention_norm [M]  qkv [M, K, G + 2, E]  output [K, G, E, M]  mlp_norm [M]  gate_up [M, 2, I]
               down [I, M], and where the checkpoint has them qkv_bias [K, G + 2, E], output_bias [M],
               gate_up_bias [2, I], down_bias [M]

Axis 2 of qkv holds the G query heads of a key/value head, then its key, then its value. Query head h = k * G + g.
"""

from __future__ import annotations

from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from specjax.cache import Cache
from specjax.config import ModelConfig
from specjax.models.blocks import (
    AttentionWeights,
    Backend,
    KeyValue,
    MlpWeights,
    Past,
    attention,
    gated_mlp,
    key_value_spec,
)
from specjax.models.layers import logits, precision_of, rms_norm, rotations, similarities
from specjax.models.protocol import ForwardOutput, Target
from specjax.types import Hidden, PageTable, PerRequest, Positions, Tokens, Weights

LOGICAL_AXES: dict[str, tuple[str | None, ...]] = {
    "embed": ("vocab", None),
    "head": (None, "vocab"),
    "final_norm": (None,),
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
}
"""Leaf name to logical axes: which axis a tensor-parallel mesh splits."""


class Layer(nn.Module):
    """One decoder layer: attention and a gated MLP, each on a normalised copy of the residual stream."""

    config: ModelConfig
    backend: Backend

    @nn.compact
    def __call__(
        self,
        x: Hidden,
        cos: Array,
        sin: Array,
        positions: Positions,
        mask: Any,
        pages: KeyValue,
        page_table: PageTable,
        prefix_length: PerRequest,
    ) -> tuple[Hidden, KeyValue]:
        c = self.config
        width, mlp, heads, group, head = c.hidden_size, c.intermediate_size, c.num_kv_heads, c.group_size, c.head_dim
        dtype, precision = jnp.dtype(c.dtype), precision_of(c.dtype)
        init, ones, zeros = nn.initializers.normal(0.02), nn.initializers.ones, nn.initializers.zeros

        def bias(name: str, there: bool, *shape: int) -> Array | None:
            return self.param(name, zeros, shape, dtype) if there else None

        weights = AttentionWeights(
            qkv=self.param("qkv", init, (width, heads, group + 2, head), dtype),
            qkv_bias=bias("qkv_bias", c.attention_bias, heads, group + 2, head),
            output=self.param("output", init, (heads, group, head, width), dtype),
            output_bias=bias("output_bias", c.attention_bias, width),
        )
        normed = rms_norm(x, self.param("attention_norm", ones, (width,), dtype), c.norm_epsilon)
        past = Past(pages, page_table, prefix_length)
        added, block = attention(
            normed, weights, (cos, sin), positions, mask, past, precision=precision, backend=self.backend
        )
        x = x + added

        mlp_weights = MlpWeights(
            gate_up=self.param("gate_up", init, (width, 2, mlp), dtype),
            gate_up_bias=bias("gate_up_bias", c.mlp_bias, 2, mlp),
            down=self.param("down", init, (mlp, width), dtype),
            down_bias=bias("down_bias", c.mlp_bias, width),
        )
        normed = rms_norm(x, self.param("mlp_norm", ones, (width,), dtype), c.norm_epsilon)
        return x + gated_mlp(normed, mlp_weights, precision=precision), block


def _traced_once(layer: Layer) -> Any:
    """`layer.apply`, jitted: all layers have the same shapes, so the first one's trace serves the others.

    Halves the time from a cold start to the first token. The compiler inlines the calls.
    """
    return jax.jit(layer.apply)


class Llama(nn.Module):
    """`embed`, `forward`, `unembed` over one set of parameters; see `specjax.models.protocol`."""

    config: ModelConfig
    backend: Backend = None

    def setup(self) -> None:
        c = self.config
        dtype = jnp.dtype(c.dtype)
        init = nn.initializers.normal(0.02)
        self.embedding = self.param("embed", init, (c.vocab_size, c.hidden_size), dtype)
        self.layers = [Layer(c, self.backend) for _ in range(c.num_layers)]
        self.final_norm = self.param("final_norm", nn.initializers.ones, (c.hidden_size,), dtype)
        if not c.tied_embeddings:
            self.head = self.param("head", init, (c.hidden_size, c.vocab_size), dtype)

    def embed(self, tokens: Tokens) -> Hidden:
        # A clipped id is a padding token's: its output is never used.
        return self.embedding.at[tokens].get(mode="clip")

    def forward(
        self,
        x: Hidden,
        positions: Positions,
        mask: Any,
        cache: Cache,
        page_table: PageTable,
        prefix_length: PerRequest,
        features: tuple[int, ...] | str | None = None,
    ) -> ForwardOutput:
        c = self.config
        cos, sin = rotations(c.rope, c.head_dim, positions)
        run_layer = _traced_once(Layer(c, self.backend, parent=None))
        aux_layers, blocks = [], []
        for i, layer in enumerate(self.layers):
            context = (cos, sin, positions, mask, cache[i], page_table, prefix_length)
            if self.is_initializing():
                x, kept = layer(x, *context)
            else:
                x, kept = run_layer(layer.variables, x, *context)
            blocks.append(kept)
            if isinstance(features, tuple) and i in features:
                aux_layers.append((i, x))
        hidden = rms_norm(x, self.final_norm, c.norm_epsilon)
        block = tuple(blocks)
        if features is None:
            return ForwardOutput(hidden, None, block)
        if features == "final":
            return ForwardOutput(hidden, hidden, block)
        by_layer = dict(aux_layers)
        return ForwardOutput(hidden, jnp.concatenate([by_layer[i] for i in features], axis=-1), block)

    def unembed(self, hidden: Float[Array, "... M"], ids: Int32[Array, "W"] | None = None) -> Float[Array, "... W"]:
        if self.config.tied_embeddings:
            return similarities(hidden, self.embedding if ids is None else self.embedding[ids])
        head = self.head if ids is None else self.head[:, ids]
        return logits(hidden.reshape(1, -1, hidden.shape[-1]), head).reshape(*hidden.shape[:-1], -1)

    def __call__(self, tokens: Tokens, cache: Cache, page_table: PageTable) -> Array:
        """Touches every parameter once; `init_params` uses it."""
        from specjax_kernels import CAUSAL

        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        start = jnp.zeros(tokens.shape[:1], jnp.int32)
        output = self.forward(self.embed(tokens), positions, CAUSAL, cache, page_table, start)
        return self.unembed(output.hidden)


def llama_target(config: ModelConfig, *, backend: Backend = None) -> Target:
    """The family's three functions for one config. `backend`: see `specjax.models.blocks.Backend`."""
    module = Llama(config, backend)

    def embed(params: Weights, tokens: Tokens) -> Hidden:
        return cast(Array, module.apply({"params": params}, tokens, method="embed"))

    def forward(params: Weights, *arguments: Any, features: Any = None) -> ForwardOutput:
        return cast(ForwardOutput, module.apply({"params": params}, *arguments, features=features, method="forward"))

    def unembed(params: Weights, hidden: Array, ids: Array | None = None) -> Array:
        return cast(Array, module.apply({"params": params}, hidden, ids, method="unembed"))

    return Target(config, embed, forward, unembed, pages=(key_value_spec(config),) * config.num_layers)


def init_params(config: ModelConfig, key: Array) -> Weights:
    """Random parameters (normal, 0.02), for tests and benchmarks."""
    from specjax.cache import PoolShape, init_cache

    cache = init_cache((key_value_spec(config),) * config.num_layers, PoolShape(1, 1))
    tokens, table = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32)
    return jax.jit(Llama(config).init)(key, tokens, cache, table)["params"]
