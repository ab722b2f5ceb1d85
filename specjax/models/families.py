"""The families of targets: which leaves a layer has, and Gemma's layer. DeepSeek-V3 is in `deepseek`, Qwen3.5 and
Qwen3-Next in `delta`, Gemma 4 in `gemma4`.

    llama       Llama 2, 3, 3.1, 3.2, SmolLM2; Mistral with and without a sliding window
    qwen2       Qwen2 and Qwen2.5: biases of queries, keys and values; MiMo-7B
    qwen3       norms of each query and key head; qwen3_moe: with experts instead of most layers' MLP
    phi3        Phi-3, Phi-3.5, Phi-4: fused tensors in the checkpoint
    gpt_oss     sinks, a window in every other layer, experts with biases and a clamped activation
    gemma2      norms before and after attention and MLP, soft caps, a sliding window in every other layer
    gemma3      norms of each query and key head instead of soft caps; a window and its own RoPE in five of six layers
    gemma4      layers of two kinds, see `gemma4`

Biases, windows, caps and rotary embeddings follow from the config.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from specjax.cache import Hidden, Positions
from specjax.config import ModelConfig
from specjax.models import deepseek, delta, gemma4
from specjax.models.blocks import Activation, Past
from specjax.models.decoder import Family, Layer, decoder_table, mixed_table
from specjax.models.experts import stacked_leaves
from specjax.models.params import (
    ATTENTION_NORM,
    GEMMA_MLP_NORM,
    HEAD_NORMS,
    MLP_NORM,
    MLP_OUTPUT_NORM,
    OUTPUT_NORM,
    Leaf,
    Table,
    Tensor,
    attention_leaves,
    mlp_leaves,
)
from specjax.models.rope import Rotation


def _attention(config: ModelConfig, *, fused: bool = False) -> tuple[Leaf, ...]:
    return attention_leaves(bias=config.attention_bias, output_bias=config.output_bias, fused=fused)


def _llama(config: ModelConfig, *, head_norms: tuple[Leaf, ...] = (), fused: bool = False) -> Table:
    mlp = mlp_leaves(bias=config.mlp_bias, fused=fused)
    layer = (*_attention(config, fused=fused), *head_norms, ATTENTION_NORM, *mlp, MLP_NORM)
    return decoder_table(config, lambda i: layer)


def _qwen3_moe(config: ModelConfig) -> Table:
    return mixed_table(config, (*_attention(config), *HEAD_NORMS, ATTENTION_NORM, MLP_NORM))


def _gpt_oss(config: ModelConfig) -> Table:
    sinks = Leaf("sinks", "K G", (Tensor("self_attn.sinks", "KG"),))
    layer = (*_attention(config), sinks, ATTENTION_NORM, *stacked_leaves(), MLP_NORM)
    return decoder_table(config, lambda i: layer)


class GptOssLayer(Layer):
    """A layer whose experts have gates of at most 7, and up projections from -7 to 7."""

    @staticmethod
    def activation(gate: Array, up: Array) -> Array:
        gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)
        return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)


def _gemma(config: ModelConfig, *, head_norms: tuple[Leaf, ...] = ()) -> Table:
    layer = (
        *_attention(config),
        *head_norms,
        ATTENTION_NORM,
        OUTPUT_NORM,
        *mlp_leaves(bias=False),
        GEMMA_MLP_NORM,
        MLP_OUTPUT_NORM,
    )
    return decoder_table(config, lambda i: layer)


class GemmaLayer(Layer):
    """A layer with norms of the outputs of attention and MLP. Norms multiply by 1 + weight."""

    activation: ClassVar[Activation] = staticmethod(gemma4.gelu_gated)
    norm_offset: ClassVar[float] = 1.0

    def __call__(
        self, x: Hidden, rotation: Rotation, positions: Positions, mask: Any, past: Past
    ) -> tuple[Hidden, Any]:
        attended, block = self.attend(x, rotation, positions, mask, past)
        x = x + self.norm("attention_output_norm", attended)
        return x + self.norm("mlp_output_norm", self.feed(x)), block


_GEMMA: Any = {"layer": GemmaLayer, "input_scale": lambda config: math.sqrt(config.hidden_size)}
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(_llama),
        "qwen2": Family(_llama),
        "qwen3": Family(partial(_llama, head_norms=HEAD_NORMS)),
        "qwen3_moe": Family(_qwen3_moe),
        "phi3": Family(partial(_llama, fused=True)),
        "gpt_oss": Family(_gpt_oss, GptOssLayer),
        "gemma2": Family(_gemma, **_GEMMA),
        "gemma3": Family(partial(_gemma, head_norms=HEAD_NORMS), **_GEMMA),
        "gemma4": gemma4.FAMILY,
        "deepseek_v3": deepseek.FAMILY,
        "qwen3_next": delta.FAMILY,
    }
)
