"""Gemma 2: norms before and after attention and MLP, soft caps, a sliding window in every other layer.

Norms multiply by 1 + weight. The layers read embeddings times sqrt(M).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar

import jax

from specjax.config import ModelConfig
from specjax.models.blocks import Activation, Past
from specjax.models.decoder import Family, Layer, decoder_table
from specjax.models.params import ATTENTION_NORM, Leaf, Table, attention_leaves, mlp_leaves, norm
from specjax.models.rope import Rotation
from specjax.types import Hidden, Positions


def table(config: ModelConfig, *further: Leaf) -> Table:
    """`further`: leaves of attention."""
    layer = (
        *attention_leaves(bias=config.attention_bias, output_bias=config.output_bias),
        *further,
        ATTENTION_NORM,
        norm("attention_output_norm", "post_attention_layernorm.weight", "post_attention_norm.weight"),
        *mlp_leaves(bias=False),
        norm("mlp_norm", "pre_feedforward_layernorm.weight", "ffn_norm.weight"),
        norm("mlp_output_norm", "post_feedforward_layernorm.weight", "post_ffw_norm.weight"),
    )
    return decoder_table(config, lambda i: layer)


class GemmaLayer(Layer):
    activation: ClassVar[Activation] = staticmethod(partial(jax.nn.gelu, approximate=True))
    norm_offset: ClassVar[float] = 1.0

    def __call__(
        self, x: Hidden, rotation: Rotation, positions: Positions, mask: Any, past: Past
    ) -> tuple[Hidden, Any]:
        added, block = self.attend(x, rotation, positions, mask, past)
        x = x + self.norm("attention_output_norm", added)
        return x + self.norm("mlp_output_norm", self.feed(x)), block


def input_scale(config: ModelConfig) -> float:
    return math.sqrt(config.hidden_size)


FAMILY = Family(table, GemmaLayer, input_scale)
