"""Models: target families, one file each, and draft heads.

A family's module has `table(config)`, its parameters (`specjax.models.params`), `make_target(config, backend=)` and
`init_params(config, key)`. It is imported when a model of the family is first used, so importing this package is cheap.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from specjax.models import params

if TYPE_CHECKING:
    from jax import Array

    from specjax.config import ModelConfig
    from specjax.models.blocks import Backend
    from specjax.models.params import Table
    from specjax.models.target import Target
    from specjax.types import Weights


class Architecture(NamedTuple):
    """A Hugging Face architecture: its family, and what absent keys of its config.json mean."""

    family: str
    absent: Mapping[str, Any] = MappingProxyType({})


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture("llama"),
    # Without a sliding window Mistral is Llama, tensor for tensor.
    "MistralForCausalLM": Architecture(
        "llama", {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072}
    ),
}


def table(config: ModelConfig) -> Table:
    """The declarations of a target's parameters."""
    return _family(config).table(config)


def describe(config: ModelConfig) -> str:
    """The parameters of a target as text: letters, shape, logical axes and tensors of each leaf."""
    return params.describe(table(config), params.dimensions(config))


def make_target(config: ModelConfig, *, backend: Backend = None) -> Target:
    """The target of a config's family. `backend`: see `specjax.models.blocks.Backend`."""
    return _family(config).make_target(config, backend=backend)


def init_params(config: ModelConfig, key: Array) -> Weights:
    """Random parameters of a target, for tests and benchmarks."""
    return _family(config).init_params(config, key)


def _family(config: ModelConfig) -> Any:
    families = {architecture.family for architecture in ARCHITECTURES.values()}
    if config.family not in families:
        raise ValueError(f"no model family {config.family!r}; there are: {', '.join(sorted(families))}")
    return importlib.import_module(f"specjax.models.{config.family}")
