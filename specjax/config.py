"""Frozen, hashable descriptions of models and steps. Everything static about a jitted function is in here.

Knows nothing of arrays, files or other modules of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. `specjax.models.rope` has the formulas."""

    theta: float = 10000.0
    scaling: Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    original_max_position: int = 8192  # dynamic, llama3, yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()  # longrope: of each pair's frequency
    magnitude: float = 1.0  # yarn, longrope: factor on cos and sin
    partial: float = 1.0  # share of a head's channels that are rotated

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
    """A mixture of experts in the place of some layers' MLP."""

    count: int  # X
    per_token: int
    width: int  # of each expert's MLP
    layers: tuple[int, ...]  # which have experts; the others have an MLP
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True  # the chosen experts' scores are divided by their sum
    scale: float = 1.0  # of the experts' sum
    groups: int = 1  # experts are chosen from the best `top_groups` of so many groups
    top_groups: int = 1
    shared_width: int = 0  # of an MLP beside the experts that every token passes; 0: none


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: keys and values of all heads are made of one latent vector a token."""

    rank: int  # of the latent
    query_rank: int | None  # queries pass through so many channels; None: they are projected at once
    nope_dim: int  # channels of a head's query and key without rotary embedding
    rope_dim: int  # those with it, whose key the heads share
    value_dim: int

    @property
    def page_width(self) -> int:
        """Numbers kept of a token."""
        return self.rank + self.rope_dim


@dataclass(frozen=True)
class ModelConfig(GroupedHeads):
    """A decoder-only transformer, in the dimension letters of ``specjax.types``."""

    family: str
    vocab_size: int  # V, as the embedding has it (padding rows included)
    hidden_size: int  # M
    intermediate_size: int  # I
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # E
    norm_epsilon: float
    rope: RopeConfig
    max_positions: int
    tied_embeddings: bool
    attention_bias: bool = False  # of queries, keys and values
    output_bias: bool = False  # of attention's output
    mlp_bias: bool = False
    windows: tuple[int | None, ...] = ()  # keys that a query of each layer sees, itself included; (): all, everywhere
    window_rope: RopeConfig | None = None  # of layers with a window; None: `rope`
    query_scale: float | None = None  # factor on attention's scores; None: E ** -0.5
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    experts: Experts | None = None
    latent: Latent | None = None
    dtype: str = "float32"  # of parameters, activations and pages

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None


@dataclass(frozen=True)
class HeadConfig(GroupedHeads):
    """A draft head: one decoder layer that reads the target's features and the next token's embedding."""

    kind: str  # a key of `specjax.models.head_spec.HEAD_SPECS`
    hidden_size: int  # M of the head
    feature_size: int  # F, of the features: M of the target, times the number of auxiliary layers if it has any
    intermediate_size: int  # I
    num_heads: int  # H
    num_kv_heads: int  # K, from the shape of k_proj: some configs give the target's
    head_dim: int  # E
    norm_epsilon: float
    rope: RopeConfig
    vocab_size: int  # W: tokens that it can propose
    aux_layers: tuple[int, ...] = ()  # layers of the target, 0-based, whose outputs it reads; none: its hidden state
    own_embedding: bool = False  # False: the target's
    own_head: bool = False  # False: the target's
    mapped: bool = False  # its token ids are not the target's; parameter `ids` [W] leads from one to the other
    fc_bias: bool = False
    attention_bias: bool = False  # of q, k and v
    output_bias: bool = False  # of o
    mlp_bias: bool = False
    norm_before_residual: bool = False  # EAGLE-3: the residual is the normalised feature
    logit_softcap: float | None = None  # of its own output layer's logits, where that was copied from the target's
    max_positions: int | None = None  # of a text, to draft for; None: all that the target has
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
    """Layers for multi-token prediction that lie in a target's own checkpoint; each is a layer as the target's are."""

    style: str  # a key of `specjax.models.mtp_spec.STYLES`
    layer: ModelConfig  # the target's with one layer, as these are
    target_layers: int  # of the target itself; some checkpoints number the heads' on from there
    count: int  # heads: one layer each
    vocab_size: int  # W: tokens that they can propose
    own_head: bool = False  # with a token map: its columns of the target's output matrix
    mapped: bool = False  # as in `HeadConfig`
    logit_softcap: float | None = None  # as in `HeadConfig`

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
