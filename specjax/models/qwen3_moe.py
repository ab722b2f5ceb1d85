"""Qwen3-MoE: Qwen3 with experts in the place of most layers' MLP."""

from __future__ import annotations

from specjax.config import ModelConfig
from specjax.models.decoder import Family, decoder_table
from specjax.models.experts import expert_leaves
from specjax.models.params import ATTENTION_NORM, HEAD_NORMS, MLP_NORM, Table, attention_leaves, mlp_leaves


def table(config: ModelConfig) -> Table:
    attention = attention_leaves(bias=config.attention_bias, output_bias=config.output_bias)
    own = (*attention, *HEAD_NORMS, ATTENTION_NORM, MLP_NORM)
    experts = config.experts
    if experts is None:
        return decoder_table(config, lambda i: (*own, *mlp_leaves(bias=False)))
    mixed, dense = (*own, *expert_leaves(experts)), (*own, *mlp_leaves(bias=False))
    return decoder_table(config, lambda i: mixed if i in experts.layers else dense)


FAMILY = Family(table)
