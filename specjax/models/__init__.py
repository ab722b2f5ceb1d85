"""Target models and draft heads: declared parameters, and functions of parameters and arrays.

Read in this order: `params` (a parameter is declared once), `rope`, `blocks` (attention, MLP) and `experts`, `target`
(three functions), `decoder` (layers between embedding and output layer), `families` and `deepseek`. Draft heads:
`head_spec` and `draft_head` for heads in folders of their own, `mtp_spec` and `mtp` for layers in a target's shards.

Importing this package is cheap: `families`, which imports flax, is imported when a model is first used.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax import Array

    from specjax.cache import Weights
    from specjax.config import ModelConfig
    from specjax.models.blocks import Backend
    from specjax.models.decoder import Family
    from specjax.models.params import Table
    from specjax.models.target import Target


ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "LlamaForCausalLM": "llama",
        "MistralForCausalLM": "llama",
        "Qwen2ForCausalLM": "qwen2",
        "MiMoForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
        "Qwen3MoeForCausalLM": "qwen3_moe",
        "GptOssForCausalLM": "gpt_oss",
        "Gemma2ForCausalLM": "gemma2",
        "Gemma3ForCausalLM": "gemma3",
        "Gemma3ForConditionalGeneration": "gemma3",
        **dict.fromkeys(
            (f"Gemma4{kind}For{use}" for kind in ("", "Unified") for use in ("CausalLM", "ConditionalGeneration")),
            "gemma4",
        ),
        "Phi3ForCausalLM": "phi3",
        "DeepseekV3ForCausalLM": "deepseek_v3",
        **dict.fromkeys(
            (
                "Qwen3NextForCausalLM",
                *(f"Qwen3_5{kind}For{use}" for kind in ("", "Moe") for use in ("CausalLM", "ConditionalGeneration")),
            ),
            "qwen3_next",
        ),
    }
)
"""The family of each Hugging Face architecture. `specjax.checkpoint.hf_config` reads their config.json."""


def table(config: ModelConfig) -> Table:
    """The declarations of a target's parameters."""
    return family(config).table(config)


def make_target(config: ModelConfig, *, backend: Backend = None) -> Target:
    """The target that a config describes. `backend`: see `specjax.models.blocks.Backend`."""
    return family(config).make_target(config, backend=backend)


def init_params(config: ModelConfig, key: Array) -> Weights:
    """Random parameters of a target, for tests and benchmarks."""
    return family(config).init_params(config, key)


def family(config: ModelConfig) -> Family:
    """The family of a config. Raises ValueError if there is no such family."""
    from specjax.models.families import FAMILIES

    if config.family not in FAMILIES:
        raise ValueError(f"no model family {config.family!r}; supported: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[config.family]
