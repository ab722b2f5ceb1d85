"""Llama 2, 3, 3.1, 3.2, SmolLM2; Mistral with and without a sliding window."""

from __future__ import annotations

from specjax.config import ModelConfig
from specjax.models.decoder import Family, decoder_table
from specjax.models.params import ATTENTION_NORM, MLP_NORM, Table, attention_leaves, mlp_leaves


def table(config: ModelConfig) -> Table:
    attention = attention_leaves(bias=config.attention_bias, output_bias=config.output_bias)
    layer = (*attention, ATTENTION_NORM, *mlp_leaves(bias=config.mlp_bias), MLP_NORM)
    return decoder_table(config, lambda i: layer)


FAMILY = Family(table)
