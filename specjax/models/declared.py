"""Declarations of any model: a target or draft model, a draft head, or MTP layers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.config import HeadConfig, ModelConfig, MtpConfig
from specjax.models import family, make_target, table
from specjax.models.blocks import key_value_spec
from specjax.models.head_spec import head_sizes, head_table
from specjax.models.mtp_spec import mtp_sizes, mtp_table
from specjax.models.params import Sizes, Table, dimensions, map_leaves

AnyConfig = ModelConfig | HeadConfig | MtpConfig


class Declared(NamedTuple):
    """Declarations of a model.

    Attributes:
        config: config of the model.
        table: leaves of the parameters.
        sizes: sizes of the dimension letters.
        pages: pytree of `specjax.cache.PageSpec`s and `RowState`s.
    """

    config: AnyConfig
    table: Table
    sizes: Sizes
    pages: Any

    def params(self) -> dict[str, Any]:
        """Shapes and dtypes of the parameters without quantisation."""
        dtype = self.config.dtype
        return map_leaves(
            self.table, lambda leaf: jax.ShapeDtypeStruct(leaf.shape(self.sizes), np.dtype(leaf.dtype or dtype))
        )


def declared(config: AnyConfig, vocab_size: int) -> Declared:
    """Returns the declarations of a config. `vocab_size`: the target's."""
    if isinstance(config, MtpConfig):
        pages = (family(config.layer).layer.page_spec(config.layer),) * config.count
        return Declared(config, mtp_table(config), mtp_sizes(config), pages)
    if isinstance(config, HeadConfig):
        pages = (key_value_spec(config),) * config.layers
        return Declared(config, head_table(config), head_sizes(config, vocab_size), pages)
    return Declared(config, table(config), dimensions(config), make_target(config).pages)
