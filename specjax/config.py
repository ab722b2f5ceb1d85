"""Frozen, hashable descriptions of models and steps. Everything static about a jitted function is in here.

Knows nothing of arrays, files or other modules of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HeadKind = Literal["eagle", "eagle3", "mtp"]
HEAD_ALGORITHMS: dict[HeadKind, str] = {"eagle3": "EAGLE3", "eagle": "EAGLE", "mtp": "MTP"}
"""What a head of each kind is served and trained by."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. ``llama3`` scaling is Llama 3.1's: long wavelengths are stretched by ``factor``."""

    theta: float = 10000.0
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class ModelConfig:
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
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: str = "float32"  # of parameters, activations and pages

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )

    @property
    def group_size(self) -> int:
        """G: query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class HeadConfig:
    """A draft head: one decoder layer that reads the target's features and the next token's embedding.

    `eagle` is EAGLE-1 and EAGLE-2 (the same weights serve both), `mtp` a MiMo multi-token prediction layer. What a
    checkpoint holds decides, not its name.
    """

    kind: HeadKind
    hidden_size: int  # M of the head
    feature_size: (
        int  # F: width of the features it reads; M of the target, for eagle3 times the number of auxiliary layers
    )
    intermediate_size: int  # I
    num_heads: int  # H
    num_kv_heads: int  # K, from the shape of k_proj: some configs give the target's
    head_dim: int  # E
    norm_epsilon: float
    rope: RopeConfig
    vocab_size: int  # W: tokens that it can propose
    aux_layers: tuple[int, ...] = ()  # eagle3: the target's layers, 0-based, whose outputs are its features
    own_embedding: bool = False  # False: the target's
    own_head: bool = False  # False: the target's
    mapped: bool = False  # its token ids are not the target's; parameter `ids` [W] leads from one to the other
    fc_bias: bool = False
    attention_bias: bool = False  # of q, k and v
    output_bias: bool = False  # of o
    mlp_bias: bool = False
    norm_before_residual: bool = False  # eagle3: the residual is the normalised feature
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads of the draft head ({self.num_heads}) must be a multiple of its key/value heads "
                f"({self.num_kv_heads})"
            )

    @property
    def group_size(self) -> int:
        """G: query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_layers(self) -> int:
        return 1
