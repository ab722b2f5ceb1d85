"""Frozen, hashable descriptions of models and steps. Everything static about a jitted function is in here.

Knows nothing of arrays, files or other modules of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
