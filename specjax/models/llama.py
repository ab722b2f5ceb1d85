"""The Llama family: SmolLM2, Llama 2, 3, 3.1, 3.2, and Mistral without a sliding window.

Linen modules, used functionally. `table` declares the parameters.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import specjax_kernels as kernels
from jax import Array
from jaxtyping import Float, Int32

from specjax.cache import Cache
from specjax.config import ModelConfig
from specjax.models.blocks import Backend, KeyValue, Past, attention, gated_mlp, key_value_spec, rms_norm, rotations
from specjax.models.params import Leaf, Scope, Table, attention_leaves, create, dimensions, end_leaves, mlp_leaves, norm
from specjax.models.target import Before, ForwardOutput, Target
from specjax.types import Hidden, PageTable, PerRequest, Positions, Tokens, Weights


def table(config: ModelConfig) -> Table:
    """All parameters: `embed`, `final_norm`, `head` (unless tied), and a dict `layers_i` for each layer."""
    layer = (
        *attention_leaves(bias=config.attention_bias, output_bias=config.attention_bias),
        norm("attention_norm", "input_layernorm.weight", "attn_norm.weight"),
        *mlp_leaves(bias=config.mlp_bias),
        norm("mlp_norm", "post_attention_layernorm.weight", "ffn_norm.weight"),
    )
    layers = (Scope(layer, f"layers_{i}", f"model.layers.{i}.", f"blk.{i}.") for i in range(config.num_layers))
    return (Scope(end_leaves(tied=config.tied_embeddings)), *layers)


class Layer(nn.Module):
    """A decoder layer: attention and a gated MLP, each on a normalised copy of the residual stream."""

    config: ModelConfig
    leaves: tuple[Leaf, ...]
    backend: Backend = None

    def setup(self) -> None:
        self.weights = create(self, self.leaves, dimensions(self.config), self.config.dtype)

    def __call__(
        self, x: Hidden, rotation: tuple[Array, Array], positions: Positions, mask: Any, past: Past
    ) -> tuple[Hidden, KeyValue]:
        c, w = self.config, self.weights
        normed = rms_norm(x, w["attention_norm"], c.norm_epsilon)
        added, block = attention(normed, w, rotation, positions, mask, past, backend=self.backend)
        x = x + added
        return x + gated_mlp(rms_norm(x, w["mlp_norm"], c.norm_epsilon), w), block


class Llama(nn.Module):
    """`embed`, `forward`, `unembed` over one set of parameters; see `specjax.models.target`."""

    config: ModelConfig
    backend: Backend = None

    def setup(self) -> None:
        c = self.config
        ends, *layers = table(c)
        self.weights = create(self, ends.leaves, dimensions(c), c.dtype)
        self.layers = [Layer(c, layer.leaves, self.backend) for layer in layers]

    def parameters(self) -> Any:
        """Touches every parameter once, which creates it."""
        return self.weights, [layer.weights for layer in self.layers]

    def embed(self, tokens: Tokens) -> Hidden:
        # A clipped id is a padding token's: its output is never used.
        return self.weights["embed"].at[tokens].get(mode="clip")

    def forward(
        self, x: Hidden, positions: Positions, mask: Any, cache: Cache, page_table: PageTable,
        prefix_length: PerRequest, features: tuple[int, ...] | str | None = None, before: Before | None = None,
    ) -> ForwardOutput:  # fmt: skip
        c = self.config
        rotation = rotations(c.rope, c.head_dim, positions)
        # Layers of the same shapes share one trace: half the time to the first token.
        kinds = {layer.leaves for layer in self.layers}
        traced = {leaves: jax.jit(Layer(c, leaves, self.backend, parent=None).apply) for leaves in kinds}
        outputs, kept = [], []
        for i, layer in enumerate(self.layers):
            past = Past(cache[i], page_table, prefix_length)
            if before is not None:
                past = past._replace(before=before.block[i], before_positions=before.positions)
            x, block = cast(Any, traced[layer.leaves])(layer.variables, x, rotation, positions, mask, past)
            kept.append(block)
            outputs.append(x)
        hidden = rms_norm(x, self.weights["final_norm"], c.norm_epsilon)
        wanted = hidden if features == "final" else None
        if isinstance(features, tuple):
            wanted = jnp.concatenate([outputs[i] for i in features], axis=-1)
        return ForwardOutput(hidden, wanted, tuple(kept))

    def unembed(self, hidden: Float[Array, "... M"], ids: Int32[Array, "W"] | None = None) -> Float[Array, "... W"]:
        if self.config.tied_embeddings:
            rows = self.weights["embed"]
            return kernels.unembed(hidden, rows if ids is None else rows[ids], transposed=True)
        head = self.weights["head"]
        return kernels.unembed(hidden, head if ids is None else head[:, ids])


def make_target(config: ModelConfig, *, backend: Backend = None) -> Target:
    """The family's three functions for one config. `backend`: see `specjax.models.blocks.Backend`."""
    module = Llama(config, backend)

    def call(params: Weights, *arguments: Any, method: str, **options: Any) -> Any:
        return module.apply({"params": params}, *arguments, method=method, **options)

    functions = {name: partial(call, method=name) for name in ("embed", "forward", "unembed")}
    return Target(config, **functions, pages=(key_value_spec(config),) * config.num_layers)


def init_params(config: ModelConfig, key: Array) -> Weights:
    """Random parameters (normal, 0.02), for tests and benchmarks."""
    return jax.jit(partial(Llama(config).init, method=Llama.parameters))(key)["params"]
