"""A decoder: layers between an embedding and an output layer. Linen modules, used functionally.

A family (`specjax.models.families`) declares its parameters (`table`) and may derive its layer from `Layer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import specjax_kernels as kernels
from jax import Array
from jaxtyping import Float, Int32
from specjax_kernels import Norm, mesh, rms_norm

from specjax.cache import Cache, Hidden, PageTable, PerRequest, Positions, Tokens, Weights
from specjax.config import ModelConfig
from specjax.models.blocks import (
    Activation,
    Backend,
    Past,
    Ragged,
    Scores,
    attention,
    gated_mlp,
    key_value_spec,
    keys_values,
    soft_cap,
    swiglu,
)
from specjax.models.experts import expert_leaves, mixture
from specjax.models.params import Leaf, Scope, Table, create, dimensions, end_leaves, mlp_leaves
from specjax.models.rope import Rotation, rotations
from specjax.models.target import Before, ForwardOutput, Target


def decoder_table(config: ModelConfig, layer: Callable[[int], tuple[Leaf, ...]], ends: tuple[Leaf, ...] = ()) -> Table:
    """All parameters: `embed`, `final_norm`, `head` (unless tied), `ends`, and a dict `layers_i` of `layer(i)` for each
    i."""
    every = (Scope(layer(i), f"layers_{i}", f"model.layers.{i}.", f"blk.{i}.") for i in range(config.num_layers))
    return (Scope((*end_leaves(tied=config.tied_embeddings), *ends)), *every)


def mixed_table(config: ModelConfig, leaves: tuple[Leaf, ...]) -> Table:
    """`decoder_table` of layers that have `leaves`, and experts or, where the config has none, an MLP."""
    return decoder_table(config, lambda i: (*leaves, *feed_leaves(config, i)))


def feed_leaves(config: ModelConfig, layer: int) -> tuple[Leaf, ...]:
    """The experts of a layer, or its MLP."""
    experts = config.experts
    return expert_leaves(experts) if experts is not None and layer in experts.layers else mlp_leaves(bias=False)


class Layer(nn.Module):
    """A decoder layer: attention and a gated MLP, each on a normalised copy of the residual stream.

    Optional parts follow from the leaves: norms of queries and keys (`query_norm`, `key_norm`), `sinks`, experts
    (`router`).
    """

    config: ModelConfig
    leaves: tuple[Leaf, ...]
    window: int | None = None
    backend: Backend = None

    activation: ClassVar[Activation] = staticmethod(swiglu)
    norm_offset: ClassVar[float] = 0.0  # see `rms_norm`

    def setup(self) -> None:
        self.weights = create(self, self.leaves, dimensions(self.config), self.config.dtype)

    def __call__(
        self, x: Hidden, rotation: Rotation, positions: Positions, mask: Any, past: Past
    ) -> tuple[Hidden, Any]:
        x, block = self.attend(x, rotation, positions, mask, past, residual=x)
        return self.feed(x, residual=x), block

    def attend(
        self, x: Hidden, rotation: Rotation, positions: Positions, mask: Any, past: Past, *,
        residual: Hidden | None = None,
    ) -> tuple[Hidden, Any]:  # fmt: skip
        """Attention of the normalised x, plus `residual`, and the cache entries of the block."""
        c = self.config
        return attention(
            x, self.weights, rotation, positions, mask, past, backend=self.backend,
            scores=Scores(c.query_scale, self.window, c.attention_softcap, self.weights.get("sinks")),
            head_norm=self._head_norm, norm=self.norm_of("attention_norm"), residual=residual,
        )  # fmt: skip

    def keep(self, x: Hidden, rotation: Rotation) -> Any:
        """The cache entries of a block, without its attention."""
        norm = self.norm_of("attention_norm")
        return keys_values(x, self.weights, rotation, head_norm=self._head_norm, norm=norm)

    @property
    def _head_norm(self) -> Callable[[Array, Array], Array] | None:
        if "query_norm" not in self.weights:
            return None
        return partial(rms_norm, epsilon=self.config.norm_epsilon, offset=self.norm_offset)

    @staticmethod
    def page_spec(config: ModelConfig, layer: int = 0) -> Any:
        """The cache of a layer: a pytree of `PageSpec`s, or a `RowState` of `RowSpec`s."""
        return key_value_spec(config)

    def feed(self, x: Hidden, *, residual: Hidden | None = None) -> Hidden:
        """MLP or experts of the normalised x, plus `residual`."""
        experts = self.config.experts
        if experts is None or "router" not in self.weights:
            norm = self.norm_of("mlp_norm")
            return gated_mlp(x, self.weights, activation=self.activation, norm=norm, residual=residual)
        out = mixture(self.norm("mlp_norm", x), self.weights, experts, activation=self.activation)
        return out if residual is None else residual + out

    def norm(self, name: str, x: Hidden) -> Hidden:
        return rms_norm(x, self.weights[name], self.config.norm_epsilon, offset=self.norm_offset)

    def norm_of(self, name: str) -> Norm:
        return Norm(self.weights[name], self.config.norm_epsilon, self.norm_offset)


class Decoder(nn.Module):
    """`embed`, `forward`, `unembed` over one set of parameters; see `specjax.models.target`."""

    config: ModelConfig
    table: Table
    layer: type[Layer]
    input_scale: float = 1.0  # of the embeddings that the layers read; draft heads read them unscaled
    backend: Backend = None

    def setup(self) -> None:
        c = self.config
        ends, *scopes = self.table
        self.weights = create(self, ends.leaves, dimensions(c), c.dtype)
        self.layers = [self.layer(c, scope.leaves, c.window(i), self.backend) for i, scope in enumerate(scopes)]

    def parameters(self) -> Any:
        """Touches every parameter once, which creates it."""
        return self.weights, [layer.weights for layer in self.layers]

    def embed(self, tokens: Tokens) -> Hidden:
        return embedding_rows(self.weights["embed"], tokens, self.config.dtype)

    def forward(
        self, x: Hidden, positions: Positions, mask: Any, cache: Cache, page_table: PageTable,
        prefix_length: PerRequest, features: tuple[int, ...] | str | None = None, before: Before | None = None,
        ragged: Ragged | None = None,
    ) -> ForwardOutput:  # fmt: skip
        c = self.config
        if ragged is not None:
            x, positions = ragged.joined(ragged.cleared(x)), ragged.joined(positions)
        x, others = self.inputs(x)
        width = c.latent.rope_dim if c.latent else c.kinds.head_dim if c.kinds else c.head_dim
        everywhere = rotations(c.rope, width, positions)
        in_windows = everywhere if c.window_rope is None else rotations(c.window_rope, c.head_dim, positions)
        # Layers of the same shapes share one trace: half the time to the first token.
        kinds = {(layer.leaves, layer.window) for layer in self.layers}
        traced = {kind: jax.jit(self.layer(c, *kind, self.backend, parent=None).apply) for kind in kinds}
        outputs, entries = [], []
        for i, layer in enumerate(self.layers):
            owner = c.owner(i)
            past = Past(cache[owner], page_table, prefix_length, ragged=ragged)
            if before is not None:
                past = past._replace(before=before.block[owner], before_positions=before.positions)
            if owner != i:
                past = past._replace(shared=entries[owner])
            rotation = everywhere if layer.window is None else in_windows
            run = cast(Any, traced[layer.leaves, layer.window])
            x, block = run(layer.variables, x, rotation, positions, mask, past, *others[i])
            entries.append(block)
            outputs.append(x)
        hidden = rms_norm(x, self.weights["final_norm"], c.norm_epsilon, offset=self.layer.norm_offset)
        selected = hidden if features == "final" else None
        if isinstance(features, tuple):
            selected = jnp.concatenate([outputs[i] for i in features], axis=-1)
        if ragged is not None:
            hidden, selected = ragged.parted(hidden), None if selected is None else ragged.parted(selected)
        return ForwardOutput(hidden, selected, tuple(entries))

    def inputs(self, x: Float[Array, "B N X"]) -> tuple[Hidden, Sequence[tuple[Array, ...]]]:
        """The first layer's input from embeddings, and for each layer further arguments."""
        if self.input_scale != 1:
            x = x * jnp.asarray(self.input_scale, x.dtype)  # rounded, as in Hugging Face's models
        return x, [()] * self.config.num_layers

    def unembed(
        self, hidden: Float[Array, "... M"], ids: Int32[Array, "W"] | None = None, *, capped: bool = True
    ) -> Float[Array, "... W"]:
        if self.config.tied_embeddings:
            rows = self.weights["embed"]
            logits = kernels.unembed(hidden, rows if ids is None else rows[ids], transposed=True)
        else:
            head = self.weights["head"]
            logits = kernels.unembed(hidden, head if ids is None else head_columns(head, ids))
        logits = mesh.split(logits, logits.ndim - 1)
        return soft_cap(logits, self.config.logit_softcap if capped else None)


def embedding_rows(table: Any, tokens: Tokens, dtype: str) -> Hidden:
    """Rows of an embedding [V, M], cast to `dtype`. Ids of padding may be out of range, so ids are clipped."""

    def take(table: Array, tokens: Array) -> Array:
        return table.at[tokens].get(mode="clip").astype(jnp.dtype(dtype))

    clipped = jnp.clip(tokens, 0, table.shape[0] - 1)
    if isinstance(table, kernels.Quantised):
        return mesh.whole(kernels.embed(table, clipped, jnp.dtype(dtype)))
    if mesh.parts(table.shape[0]) > 1:
        return mesh.rows(take, table, 0, clipped)
    return mesh.whole(take(table, tokens))


def head_columns(head: Any, ids: Int32[Array, "W"]) -> Any:
    """The columns `ids` of an output matrix [M, V], or of a quantised one [V, M]."""
    return head[ids] if isinstance(head, kernels.Quantised) else head[:, ids]


class Family(NamedTuple):
    """A family of models: its declared parameters and its layer."""

    table: Callable[[ModelConfig], Table]
    layer: type[Layer] = Layer
    input_scale: Callable[[ModelConfig], float] = lambda config: 1.0  # see `Decoder`
    decoder: type[Decoder] = Decoder

    def module(self, config: ModelConfig, backend: Backend = None) -> Decoder:
        return self.decoder(config, self.table(config), self.layer, self.input_scale(config), backend)

    def make_target(self, config: ModelConfig, *, backend: Backend = None) -> Target:
        """The three functions for one config. `backend`: see `specjax.models.blocks.Backend`."""
        module = self.module(config, backend)

        def call(params: Weights, *arguments: Any, method: str, **options: Any) -> Any:
            return module.apply({"params": params}, *arguments, method=method, **options)

        functions = {name: partial(call, method=name) for name in ("embed", "forward", "unembed")}
        return Target(
            config,
            **functions,
            pages=tuple(self.layer.page_spec(config, i) for i in range(config.num_layers)),
            norm_offset=self.layer.norm_offset,
            ragged=True,
        )

    def init_params(self, config: ModelConfig, key: Array) -> Weights:
        """Random parameters (normal, 0.02), for tests and benchmarks."""
        return jax.jit(partial(self.module(config).init, method="parameters"))(key)["params"]
