"""Qwen3: Llama with norms of each query and key head."""

from __future__ import annotations

from specjax.config import ModelConfig
from specjax.models.decoder import Family, decoder_table
from specjax.models.params import ATTENTION_NORM, HEAD_NORMS, MLP_NORM, Table, attention_leaves, mlp_leaves


def table(config: ModelConfig) -> Table:
    attention = attention_leaves(bias=config.attention_bias, output_bias=config.output_bias)
    layer = (*attention, *HEAD_NORMS, ATTENTION_NORM, *mlp_leaves(bias=False), MLP_NORM)
    return decoder_table(config, lambda i: layer)


FAMILY = Family(table)
