"""Models: target families, one file each, and draft heads.

A family's module has `FAMILY`, a `specjax.models.decoder.Family`. It is imported when a model of the family is first
used, so importing this package is cheap.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from specjax.models import params

if TYPE_CHECKING:
    from jax import Array

    from specjax.config import ModelConfig
    from specjax.models.blocks import Backend
    from specjax.models.decoder import Family
    from specjax.models.params import Table
    from specjax.models.target import Target
    from specjax.types import Weights


ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "LlamaForCausalLM": "llama",
        "MistralForCausalLM": "llama",
        "Qwen2ForCausalLM": "qwen2",
        "MiMoForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
        "Qwen3MoeForCausalLM": "qwen3_moe",
        "Gemma2ForCausalLM": "gemma2",
        "Gemma3ForCausalLM": "gemma3",
        "Gemma3ForConditionalGeneration": "gemma3",
        "Phi3ForCausalLM": "phi3",
        "DeepseekV3ForCausalLM": "deepseek_v3",
    }
)
"""The family of each Hugging Face architecture. `specjax.checkpoint.hf_config` reads their config.json."""


def table(config: ModelConfig) -> Table:
    """The declarations of a target's parameters."""
    return family(config).table(config)


def describe(config: ModelConfig) -> str:
    """The parameters of a target as text: letters, shape, logical axes and tensors of each leaf."""
    return params.describe(table(config), params.dimensions(config))


def make_target(config: ModelConfig, *, backend: Backend = None) -> Target:
    """The target of a config's family. `backend`: see `specjax.models.blocks.Backend`."""
    return family(config).make_target(config, backend=backend)


def init_params(config: ModelConfig, key: Array) -> Weights:
    """Random parameters of a target, for tests and benchmarks."""
    return family(config).init_params(config, key)


def family(config: ModelConfig) -> Family:
    """What the file of a config's family declares. ValueError: there is no such family."""
    families = set(ARCHITECTURES.values())
    if config.family not in families:
        raise ValueError(f"no model family {config.family!r}; there are: {', '.join(sorted(families))}")
    return importlib.import_module(f"specjax.models.{config.family}").FAMILY
