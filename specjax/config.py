"""Frozen, hashable descriptions of models and steps. Everything static about a jitted function is in here.

Independent of arrays, files and other modules of specjax.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. `specjax.models.rope` has the formulas.

    Attributes:
        theta: base of the frequencies.
        scaling: method that extends the context; "none": not extended.
        factor: ratio of the extended context length to the original one (linear, dynamic, llama3, yarn, proportional).
        low_freq_factor: llama3: wavelengths above `original_max_position` / `low_freq_factor` are stretched.
        high_freq_factor: llama3: wavelengths below `original_max_position` / `high_freq_factor` are kept.
        original_max_position: tokens of the context before it was extended (dynamic, llama3, yarn).
        beta_fast: yarn: channels with more rotations in the original length are kept.
        beta_slow: yarn: channels with fewer rotations in the original length are stretched.
        truncate: yarn: round the bounds of the ramp between the two to whole channels.
        divisors: longrope: divisor of each pair's frequency.
        magnitude: factor on cos and sin (yarn, longrope).
        partial: share of a head's channels that are rotated, from the first channel on; with proportional scaling, of
            its pairs.
    """

    theta: float = 10000.0
    scaling: Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"] = "none"
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
        return head_dim if self.scaling == "proportional" else int(head_dim * self.partial)


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
        per_token: experts chosen for each token.
        width: channels within an expert's MLP.
        layers: indices of the layers with experts; the others have an MLP.
        scoring: function of the router's logits by which experts are chosen.
        normalised: whether the chosen experts' scores are divided by their sum.
        scale: factor on the experts' sum.
        groups: number of groups of experts.
        top_groups: best groups of a token, from which its experts are chosen.
        shared_width: channels within the MLP of the shared expert, which processes every token; 0: none.
        shared_gate: whether the shared expert's output is multiplied by the sigmoid of a number for each token.
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
    shared_gate: bool = False


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: keys and values of all heads are made of one latent vector a token.

    Attributes:
        rank: channels of the latent vector.
        query_rank: rank of the query projection; None: full rank.
        nope_dim: channels of a head's query and key without rotary embedding.
        rope_dim: channels of a head's query and key with rotary embedding; the heads share this part of the key.
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
class DeltaNet:
    """Gated delta nets in the place of some layers' attention; `specjax.models.delta` has the formulas.

    Attributes:
        layers: indices of these layers.
        key_heads: heads of queries and keys.
        value_heads: heads of values, a multiple of `key_heads`.
        key_dim: channels of a query or key head.
        value_dim: channels of a value head.
        taps: tokens that the convolution reads, the token itself included.
        fused: whether a checkpoint stacks the projections by key head, as Qwen3-Next's.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4
    fused: bool = False


@dataclass(frozen=True)
class LayerKinds:
    """How Gemma 4's layers without a window, and its last layers, differ from the others; see `models.gemma4`.

    Attributes:
        head_dim: channels of a head in layers without a window.
        kv_heads: key/value heads of layers without a window.
        keys_as_values: whether values of layers without a window are their key projections.
        shared: number of last layers without keys and values. Each reads those of the last layer before them with the
            same kind of window.
        double_mlp: whether the MLPs of these layers are twice as wide.
        inputs: P, channels of each layer's own embedding of a token; 0: none.
        input_vocab: number of tokens with such embeddings; others have those of token 0.
    """

    head_dim: int
    kv_heads: int
    keys_as_values: bool = False
    shared: int = 0
    double_mlp: bool = False
    inputs: int = 0
    input_vocab: int = 0


@dataclass(frozen=True)
class ModelConfig(GroupedHeads):
    """A decoder-only transformer, in the dimension letters of ``specjax.cache``.

    Attributes:
        family: key of `specjax.models.families.FAMILIES`.
        vocab_size: V, rows of the embedding, padding included.
        hidden_size: M, channels between layers.
        intermediate_size: I, channels within an MLP.
        num_layers: L, decoder layers.
        num_heads: H, query heads.
        num_kv_heads: K, key/value heads.
        head_dim: E, channels of a head.
        norm_epsilon: added to the mean square within norms.
        rope: rotary position embedding.
        max_positions: maximum number of tokens of a text.
        tied_embeddings: whether the output layer is the embedding.
        attention_bias: whether queries, keys and values have a bias.
        output_bias: whether attention's output has a bias.
        mlp_bias: whether the MLP has biases.
        windows: sliding window of each layer, in keys, the query's own included; None: no window; (): no layer has one.
        window_rope: rotary embedding of layers with a window; None: `rope`.
        query_scale: factor on attention's scores; None: E ** -0.5.
        attention_softcap: soft cap c of attention's scores, c * tanh(score / c); None: none.
        logit_softcap: soft cap of the logits; None: none.
        experts: the mixture of experts; None: every layer has an MLP.
        latent: latent attention; None: grouped-query attention.
        delta: gated delta nets; None: every layer has attention.
        kinds: what differs between kinds of layers; None: heads and MLPs of all layers have the same sizes.
        mask_token: PARD: id of the token in the slots that the model predicts as a draft; None: it drafts by levels.
        dtype: dtype of parameters, activations and pages.
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
    delta: DeltaNet | None = None
    kinds: LayerKinds | None = None
    mask_token: int | None = None
    dtype: str = "float32"

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def owner(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: itself, unless it shares those of another. -1: a layer of
        another model (`AssistantConfig`)."""
        own = self.num_layers - (self.kinds.shared if self.kinds else 0)
        return layer if layer < own else self.last_owner(windowed=self.window(layer) is not None)

    def last_owner(self, *, windowed: bool) -> int:
        """The last layer with keys and values of its own, of those with a window or without; -1: there is none."""
        own = range(self.num_layers - (self.kinds.shared if self.kinds else 0))
        return max((layer for layer in own if (self.window(layer) is not None) == windowed), default=-1)


@dataclass(frozen=True)
class HeadConfig(GroupedHeads):
    """A draft head: one decoder layer that reads the target's features and the next token's embedding.

    Attributes:
        kind: a key of `specjax.models.head_spec.HEAD_SPECS`.
        hidden_size: M of the head.
        feature_size: F, channels of the features: M of the target, times the number of auxiliary layers if any.
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
        mapped: whether its token ids differ from the target's; parameter `ids` [W] maps them to the target's.
        fc_bias: whether the layer that joins its inputs has a bias.
        attention_bias: whether queries, keys and values have a bias.
        output_bias: whether attention's output has a bias.
        mlp_bias: whether the MLP has biases.
        norm_before_residual: EAGLE-3: whether the residual is the normalised feature.
        norm_before_fc: EAGLE-3: whether a norm over all F channels precedes the layer that joins the features.
        fc_norm: EAGLE-3.1: whether a norm of each auxiliary layer's output precedes that layer.
        norm_output: EAGLE-3.1: whether the next feature is the normalised output.
        head_norms: whether queries and keys are normalised in each head, as in Qwen3.
        windows: sliding window of each layer, in keys, the query's own included; None: no window.
        logit_softcap: soft cap of the logits of an output layer that was copied from the target's; None: none.
        max_positions: number of tokens of a text beyond which it drafts nothing; None: the target's.
        dtype: dtype of parameters, activations and pages.
        layers: decoder layers; several only in a `BlockConfig` and in P-EAGLE.
        mask_token: P-EAGLE: id of the token in the slots after the root; None: the head drafts level by level.
        slots: P-EAGLE: tokens drafted in one forward of training; None: unknown.
        gemma_layers: whether layers are Gemma 4's: scores are not scaled, values are normalised, norms follow attention
            and MLP, and a number scales each layer's output.
        keys_as_values: whether values are the key projections.
        input_scale: factor on the embeddings.
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
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    head_norms: bool = False
    windows: tuple[int | None, ...] = (None,)
    logit_softcap: float | None = None
    max_positions: int | None = None
    dtype: str = "float32"
    layers: int = 1
    mask_token: int | None = None
    slots: int | None = None
    gemma_layers: bool = False
    keys_as_values: bool = False
    input_scale: float = 1.0

    @property
    def features(self) -> tuple[int, ...] | Literal["final"]:
        """Which outputs of the target it reads; see `specjax.drafters.base.Drafter`."""
        return self.aux_layers or "final"


Walk: TypeAlias = Literal["none", "vanilla", "gated", "rnn", "selector"]


@dataclass(frozen=True, kw_only=True)
class BlockConfig(HeadConfig):
    """A head that drafts a block in one forward (DFlash, DSpark, DFlash2, JetSpec); see `specjax.models.block_head`.

    Attributes:
        block: tokens of a block in training, the anchor included.
        mask_token: id of the token in the places of a block after the anchor.
        from_anchor: True: slot j, from 0 on, predicts the token after its own. False: slot j, from 1 on, predicts its
            own token, and slot 0, the anchor, predicts none.
        causal: whether a layer's slots see only earlier slots of their block, besides themselves.
        walk: how a slot's logits depend on the token before it. none: not at all. vanilla, gated, rnn: DSpark's Markov
            head. selector: DFlash2's choice among a slot's `candidates` best tokens.
        rank: r, channels of the walk's token vectors; 0 without a walk.
        candidates: tokens of a slot that the selector chooses from.
        conv_taps: slots that a convolution around attention and MLP mixes, the slot itself included; 0: no convolution.
        conv_groups: groups of channels with the same data-dependent part of the convolution's kernel.
        output_scale: factor on the logits, before the soft cap.
    """

    kind: str = "block"
    block: int
    mask_token: int = field()
    from_anchor: bool
    windows: tuple[int | None, ...] = field()
    causal: tuple[bool, ...]
    walk: Walk = "none"
    rank: int = 0
    candidates: int = 16
    conv_taps: int = 0
    conv_groups: int = 1
    output_scale: float = 1.0

    def drafts_of(self, slots: int) -> int:
        """Tokens that a block of this many slots drafts."""
        return slots if self.from_anchor else slots - 1


@dataclass(frozen=True)
class MtpConfig:
    """Layers for multi-token prediction that lie in a target's own checkpoint; each is a layer as the target's are.

    Attributes:
        style: a key of `specjax.models.mtp_spec.STYLES`.
        layer: config of an MTP layer: the target's, with one layer.
        target_layers: number of the target's own layers; some checkpoints continue to count from it.
        count: number of heads, one layer each.
        vocab_size: W, tokens that they can propose.
        own_head: whether they have an output matrix: with a token map, columns of the target's.
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
    def max_positions(self) -> int | None:
        return None  # the target's

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size

    @property
    def feature_size(self) -> int:
        return self.layer.hidden_size

    @property
    def dtype(self) -> str:
        return self.layer.dtype


@dataclass(frozen=True, kw_only=True)
class AssistantConfig(MtpConfig):
    """Gemma 4's assistant, in a folder of its own; see `specjax.models.assistant`.

    Attributes:
        layer: config of its layers, which share keys and values with two layers of the target.
        backbone_size: M of the target.
        centroids: number of clusters of the vocabulary; 0: it computes the logits of all tokens.
        best: number of clusters with the highest scores, of whose tokens it computes the logits.
        position: position of all nodes of a tree relative to the root's, n. 0 as in LiteRT-LM and transformers, where a
            window of W shows W - 1 keys; -1 as in SGLang and vLLM, where it shows W.
    """

    style: str = "assistant"
    backbone_size: int
    centroids: int = 0
    best: int = 0
    position: int = 0

    kind: ClassVar[str] = "assistant"

    @property
    def feature_size(self) -> int:
        return self.backbone_size

    @property
    def max_positions(self) -> int:
        return self.layer.max_positions
