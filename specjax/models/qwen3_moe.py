"""Qwen3-MoE: Qwen3 with experts in the place of most layers' MLP."""

from __future__ import annotations

from specjax.config import ModelConfig
from specjax.models.decoder import Family, mixed_table
from specjax.models.params import ATTENTION_NORM, HEAD_NORMS, MLP_NORM, Table, attention_leaves


def table(config: ModelConfig) -> Table:
    attention = attention_leaves(bias=config.attention_bias, output_bias=config.output_bias)
    return mixed_table(config, (*attention, *HEAD_NORMS, ATTENTION_NORM, MLP_NORM))


FAMILY = Family(table)
