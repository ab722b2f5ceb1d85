"""Tiny random models of every family on disk, with transformers as the oracle."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tiny_checkpoints import SIZES, save_model, save_mtp
from toy_models import Toy

from specjax.checkpoint import load_params, model_config, resolve
from specjax.config import ModelConfig
from specjax.models import make_target

WINDOW = 4
"""Shorter than a path of a tree, so that deep nodes see neither the prefix nor their first ancestors."""

YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
DEEPSEEK = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
    "num_key_value_heads": 4, "n_group": 4, "topk_group": 2, "n_routed_experts": 16, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "head_dim": 8,
    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
}  # fmt: skip
DELTA = {
    "head_dim": 16, "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12,
}  # fmt: skip
GPT_OSS = {
    "head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 24,
    "rope_parameters": YARN | {"truncate": False},
}  # fmt: skip
PARTIAL_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 500.0, "original_max_position_embeddings": 32, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 3.0, 9.0],
}  # fmt: skip
GEMMA = {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}
# Logits of random Gemma 2 models reach 20, so caps of 2 and 8 have an effect.
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 8.0}

GEMMA_4 = {
    "head_dim": 16, "global_head_dim": 32, "sliding_window": WINDOW, "final_logit_softcapping": 8.0,
    "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True,
}  # fmt: skip
GEMMA_4_SHARED = {
    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8, "num_key_value_heads": 1,
}  # fmt: skip
GEMMA_4_EXPERTS = {
    "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24,
    "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
}  # fmt: skip

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_attention_heads": 8}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "mimo": ("MiMo", {"head_dim": 8}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", GEMMA | CAPS),
    "gemma3": ("Gemma3", GEMMA | {"sliding_window_pattern": 2}),
    "phi3": ("Phi3", {"rope_parameters": PARTIAL_LONGROPE, "sliding_window": WINDOW}),
}
FAMILIES = DENSE | {
    "qwen3_moe": ("Qwen3Moe", EXPERTS | {"head_dim": 16, "mlp_only_layers": [0]}),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),
    "qwen3_5": ("Qwen3_5", DELTA),
    "qwen3_next": ("Qwen3Next", EXPERTS | DELTA | {"shared_expert_intermediate_size": 20}),
    "gpt_oss": ("GptOss", GPT_OSS),
    "gemma4": ("Gemma4Unified", GEMMA_4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4_shared": ("Gemma4", GEMMA_4 | GEMMA_4_SHARED),
    "gemma4_experts": ("Gemma4", GEMMA_4 | GEMMA_4_EXPERTS),
}
RECURRENT = ("qwen3_5", "qwen3_next")
"""Families with states of rows, which a STANDALONE draft cannot have."""

MTP_STYLES = {"mimo": "mimo", "deepseek_v3": "deepseek", "qwen3": "qwen3_next", "qwen3_5": "qwen3_next"}
"""Families with MTP layers, and the style of these."""


def save_family(folder: Path, family: str, *, mtp_layers: int = 0, **changes: Any) -> Path:
    """Saves a random model of two layers, or of four with shared keys and values; of both kinds, if a family has two.
    The weights are large enough for text that varies."""
    architecture, sizes = FAMILIES[family]
    common = {"initializer_range": 0.2, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 0}
    fields = common | sizes | changes | {"seed": list(FAMILIES).index(family)}
    if fields.get("hidden_size_per_layer_input"):
        fields["vocab_size_per_layer_input"] = fields.get("vocab_size", SIZES["vocab_size"])
    if mtp_layers:
        save_mtp(folder, f"{architecture}ForCausalLM", MTP_STYLES[family], count=mtp_layers, **fields)
    else:
        save_model(folder, f"{architecture}ForCausalLM", **fields)
    return folder


def load_oracle(folder: Path, family: str) -> Any:
    """transformers' model."""
    import torch
    import transformers

    torch.set_num_threads(1)  # threads that share cores with other processes wait for each other
    name = FAMILIES[family][0]
    kind = getattr(transformers, f"{'Qwen2' if name == 'MiMo' else name}ForCausalLM")
    return kind.from_pretrained(folder, attn_implementation="eager").eval()


class Family(NamedTuple):
    folder: Path
    config: ModelConfig
    toy: Toy  # with transformers' logits
    oracle: Any


def load_family(folder: Path, family: str) -> Family:
    import torch

    files = resolve(str(folder), progress=False)
    config = model_config(files.config, dtype="float32")
    oracle = load_oracle(folder, family)

    @functools.cache
    def last(tokens: tuple[int, ...]) -> np.ndarray:
        with torch.inference_mode():
            return oracle(torch.tensor([tokens])).logits[0, -1].double().numpy()

    def logits(tokens: Sequence[int]) -> np.ndarray:
        return last(tuple(map(int, tokens)))

    params = load_params(files, config, progress=False)
    return Family(folder, config, Toy(make_target(config), params, logits), oracle)
