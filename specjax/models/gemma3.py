"""Gemma 3 (text): Gemma 2 with norms of each query and key head in the place of soft caps.

Five layers of six have a sliding window, and a rotary embedding of their own.
"""

from __future__ import annotations

from specjax.config import ModelConfig
from specjax.models import gemma2
from specjax.models.decoder import Family
from specjax.models.params import HEAD_NORMS, Table


def table(config: ModelConfig) -> Table:
    return gemma2.table(config, *HEAD_NORMS)


FAMILY = Family(table, gemma2.GemmaLayer, gemma2.input_scale)
