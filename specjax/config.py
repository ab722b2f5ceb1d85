"""Frozen, hashable descriptions of models and steps. Everything static about a jitted function is in here.

Knows nothing of arrays, files or other modules of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. `specjax.models.rope` has the formulas.

    Attributes:
        theta: base of the frequencies.
        scaling: how frequencies are changed for long texts; "none" = not at all.
        factor: of the context's length beyond the original one (linear, dynamic, llama3, yarn).
        low_freq_factor: llama3: wavelengths above `original_max_position` over this are stretched.
        high_freq_factor: llama3: those below `original_max_position` over this are kept.
        original_max_position: tokens of the context before it was extended (dynamic, llama3, yarn).
        beta_fast: yarn: channels with more rotations in the original length are kept.
        beta_slow: yarn: channels with fewer rotations in the original length are stretched.
        truncate: yarn: round the bounds of the ramp between the two to whole channels.
        divisors: longrope: of each pair's frequency.
        magnitude: factor on cos and sin (yarn, longrope).
        partial: share of a head's channels that are rotated, the first ones.
    """

    theta: float = 10000.0
    scaling: Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    magnitude: float = 1.0
    partial: float = 1.0

    def width(self, head_dim: int) -> int:
        """R: channels of a head that are rotated, the first ones."""
        return int(head_dim * self.partial)


class GroupedHeads:
    """Query heads in groups, one for each key/value head."""

    num_heads: int
    num_kv_heads: int

    @property
    def group_size(self) -> int:
        """G: query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            must = f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})"
            raise ValueError(f"{type(self).__name__}: {must}")


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in the place of some layers' MLP.

    Attributes:
        count: X, experts of a layer.
        per_token: experts that each token passes.
        width: of each expert's MLP.
        layers: indices of the layers with experts; the others have an MLP.
        scoring: function of the router's logits by which experts are chosen.
        normalised: whether the chosen experts' scores are divided by their sum.
        scale: factor on the experts' sum.
        groups: experts are chosen from the best `top_groups` of so many groups.
        top_groups: groups that a token may choose from.
        shared_width: of an MLP beside the experts that every token passes; 0: none.
    """

    count: int
    per_token: int
    width: int
    layers: tuple[int, ...]
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    shared_width: int = 0


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: keys and values of all heads are made of one latent vector a token.

    Attributes:
        rank: channels of the latent vector.
        query_rank: channels that queries pass through; None: they are projected at once.
        nope_dim: channels of a head's query and key without rotary embedding.
        rope_dim: channels with it, whose key the heads share.
        value_dim: channels of a head's value.
    """

    rank: int
    query_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def page_width(self) -> int:
        """Numbers kept of a token."""
        return self.rank + self.rope_dim


@dataclass(frozen=True)
class ModelConfig(GroupedHeads):
    """A decoder-only transformer, in the dimension letters of ``specjax.types``.

    Attributes:
        family: name of its file in `specjax.models`.
        vocab_size: V, rows of the embedding, padding included.
        hidden_size: M, channels between layers.
        intermediate_size: I, channels within an MLP.
        num_layers: L, decoder layers.
        num_heads: H, query heads.
        num_kv_heads: K, key/value heads.
        head_dim: E, channels of a head.
        norm_epsilon: added to the mean square within norms.
        rope: rotary position embedding.
        max_positions: most tokens of a text.
        tied_embeddings: whether the output layer is the embedding.
        attention_bias: whether queries, keys and values have a bias.
        output_bias: whether attention's output has a bias.
        mlp_bias: whether the MLP has biases.
        windows: keys that a query of each layer sees, itself included; None: all; (): all, in every layer.
        window_rope: rotary embedding of layers with a window; None: `rope`.
        query_scale: factor on attention's scores; None: E ** -0.5.
        attention_softcap: bound c of attention's scores, c * tanh(score / c); None: none.
        logit_softcap: the same of the logits.
        experts: the mixture of experts; None: every layer has an MLP.
        latent: latent attention; None: grouped-query attention.
        dtype: name of the type of parameters, activations and pages.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    rope: RopeConfig
    max_positions: int
    tied_embeddings: bool
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int | None, ...] = ()
    window_rope: RopeConfig | None = None
    query_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    experts: Experts | None = None
    latent: Latent | None = None
    dtype: str = "float32"

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None


@dataclass(frozen=True)
class HeadConfig(GroupedHeads):
    """A draft head: one decoder layer that reads the target's features and the next token's embedding.

    Attributes:
        kind: a key of `specjax.models.head_spec.HEAD_SPECS`.
        hidden_size: M of the head.
        feature_size: F, of the features: M of the target, times the number of auxiliary layers if it has any.
        intermediate_size: I, channels within its MLP.
        num_heads: H, query heads.
        num_kv_heads: K, from the shape of k_proj: some configs give the target's.
        head_dim: E, channels of an attention head.
        norm_epsilon: added to the mean square within norms.
        rope: rotary position embedding.
        vocab_size: W, tokens that it can propose.
        aux_layers: layers of the target, 0-based, whose outputs it reads; (): the final hidden state.
        own_embedding: whether it has an embedding; False: it uses the target's.
        own_head: whether it has an output layer; False: it uses the target's.
        mapped: whether its token ids are not the target's; parameter `ids` [W] leads from one to the other.
        fc_bias: whether the layer that joins its inputs has a bias.
        attention_bias: whether queries, keys and values have a bias.
        output_bias: whether attention's output has a bias.
        mlp_bias: whether the MLP has biases.
        norm_before_residual: EAGLE-3: whether the residual is the normalised feature.
        logit_softcap: of its own output layer's logits, where that was copied from the target's; None: none.
        max_positions: most tokens of a text, to draft for; None: all that the target has.
        dtype: name of the type of parameters, activations and pages.
    """

    kind: str
    hidden_size: int
    feature_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    rope: RopeConfig
    vocab_size: int
    aux_layers: tuple[int, ...] = ()
    own_embedding: bool = False
    own_head: bool = False
    mapped: bool = False
    fc_bias: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norm_before_residual: bool = False
    logit_softcap: float | None = None
    max_positions: int | None = None
    dtype: str = "float32"

    @property
    def features(self) -> tuple[int, ...] | Literal["final"]:
        """Which outputs of the target it reads; see `specjax.drafters.base.Drafter`."""
        return self.aux_layers or "final"

    @property
    def num_layers(self) -> int:
        return 1


@dataclass(frozen=True)
class MtpConfig:
    """Layers for multi-token prediction that lie in a target's own checkpoint; each is a layer as the target's are.

    Attributes:
        style: a key of `specjax.models.mtp_spec.STYLES`.
        layer: the target's config with one layer, as these are.
        target_layers: layers of the target itself; some checkpoints number the heads' on from there.
        count: number of heads, one layer each.
        vocab_size: W, tokens that they can propose.
        own_head: with a token map: whether they have columns of the target's output matrix.
        mapped: as in `HeadConfig`.
        logit_softcap: as in `HeadConfig`.
    """

    style: str
    layer: ModelConfig
    target_layers: int
    count: int
    vocab_size: int
    own_head: bool = False
    mapped: bool = False
    logit_softcap: float | None = None

    kind: ClassVar[str] = "mtp"
    features: ClassVar[Literal["final"]] = "final"

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size

    @property
    def feature_size(self) -> int:
        return self.layer.hidden_size

    @property
    def dtype(self) -> str:
        return self.layer.dtype
