"""What the config.json of each architecture says beyond what all have in common, and what its absent keys mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specjax.checkpoint.files import CheckpointError, listed
from specjax.checkpoint.rope_config import BY_LAYER, ROPE_SECTIONS, rope, yarn_magnitude
from specjax.checkpoint.values import flag, given, number, require
from specjax.config import Experts, Latent

Section = Mapping[str, Any]

NO_WINDOW = {"sliding_window": (0, "null (attention over the whole context)")}


@dataclass(frozen=True)
class Reader:
    """Reads one architecture's config.json."""

    read: Callable[[Section, int], dict[str, Any]]  # (config.json, layers) -> fields of `ModelConfig`
    absent: Mapping[str, Any] = field(default_factory=dict)  # what absent keys mean
    activation: tuple[str, str] = ("hidden_act", "silu")
    only: Mapping[str, tuple[Any, str]] = field(default_factory=dict)  # see `refuse_unsupported`
    partial_rope: bool = False
    text: bool = False  # of several modalities, the keys of the language model lie in `text_config`
    remote_code: bool = False  # published with Python code, which the family was compared with
    float16: bool = True  # whether activations fit it; vLLM refuses it for Gemma, and scales DeepSeek's


def _llama(config: Section, layers: int) -> dict[str, Any]:
    bias = flag(config, "attention_bias")
    return {"attention_bias": bias, "output_bias": bias, "mlp_bias": flag(config, "mlp_bias")}


def _mistral(config: Section, layers: int) -> dict[str, Any]:
    return _llama(config, layers) | _windows(config, layers, lambda layer: True)


def _qwen2(config: Section, layers: int) -> dict[str, Any]:
    return {"attention_bias": True} | _qwen_windows(config, layers)


def _qwen3(config: Section, layers: int) -> dict[str, Any]:
    bias = flag(config, "attention_bias")
    return {"attention_bias": bias, "output_bias": bias} | _qwen_windows(config, layers)


def _qwen3_moe(config: Section, layers: int) -> dict[str, Any]:
    dense, step = given(config, "mlp_only_layers", []), require(config, "decoder_sparse_step", 1)
    if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < layers for layer in dense):
        raise CheckpointError(f"config.json: mlp_only_layers is {dense!r:.80}; a list of layers is needed")
    # transformers 5 writes the other name.
    key = "num_experts" if "num_experts" in config else "num_local_experts"
    count, chosen = require(config, key), require(config, "num_experts_per_tok")
    _at_most(chosen, count, "num_experts_per_tok", key)
    mixed = tuple(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)
    experts = Experts(
        count, chosen, require(config, "moe_intermediate_size"), mixed, normalised=flag(config, "norm_topk_prob")
    )
    bias, windowed = flag(config, "attention_bias"), flag(config, "use_sliding_window")
    windows = _windows(config, layers, lambda layer: True) if windowed else {}
    return {"attention_bias": bias, "output_bias": bias, "experts": experts if mixed else None} | windows


def _phi3(config: Section, layers: int) -> dict[str, Any]:
    return _windows(config, layers, lambda layer: True)


def _gemma2(config: Section, layers: int) -> dict[str, Any]:
    caps = {
        name: None if config.get(key) is None else number(config, key)
        for name, key in (("attention_softcap", "attn_logit_softcapping"), ("logit_softcap", "final_logit_softcapping"))
    }
    bias = flag(config, "attention_bias")
    scale = number(config, "query_pre_attn_scalar", 256.0) ** -0.5
    own = {"query_scale": scale, "attention_bias": bias, "output_bias": bias}
    return own | caps | _windows(config, layers, lambda layer: layer % 2 == 0)


def _gemma3(config: Section, layers: int) -> dict[str, Any]:
    pattern = require(config, "sliding_window_pattern", 6)
    windows = _windows(config, layers, lambda layer: (layer + 1) % pattern != 0)
    head_dim, positions = require(config, "head_dim", 256), require(config, "max_position_embeddings", 131072)
    section = config.get(ROPE_SECTIONS[0])
    if isinstance(section, Mapping) and any(key in section for key in BY_LAYER):
        local, full = ({ROPE_SECTIONS[0]: given(section, key, {})} for key in BY_LAYER)
    else:  # as transformers 4 writes it
        full = {key: config.get(key) for key in (*ROPE_SECTIONS, "rope_theta")}
        local = {"rope_theta": config.get("rope_local_base_freq")}
    ropes = {
        "rope": rope(full, positions, head_dim=head_dim, theta=1e6),
        "window_rope": rope(local, positions, head_dim=head_dim, theta=1e4),
    }
    return _gemma2(config, layers) | windows | ropes


def _deepseek_v3(config: Section, layers: int) -> dict[str, Any]:
    latent = Latent(
        rank=require(config, "kv_lora_rank", 512),
        query_rank=None if config.get("q_lora_rank") is None else require(config, "q_lora_rank"),
        nope_dim=require(config, "qk_nope_head_dim", 128),
        rope_dim=require(config, "qk_rope_head_dim", 64),
        value_dim=require(config, "v_head_dim", 128),
    )
    key = "n_routed_experts" if "n_routed_experts" in config else "num_local_experts"
    count, chosen = require(config, key, 256), require(config, "num_experts_per_tok", 8)
    groups, top_groups = require(config, "n_group", 1), require(config, "topk_group", 1)
    if count % groups:
        raise CheckpointError(f"config.json: n_group ({groups}) must divide {key} ({count})")
    _at_most(top_groups, groups, "topk_group", "n_group")
    _at_most(chosen, count // groups * top_groups, "num_experts_per_tok", "the experts of topk_group groups")
    dense, width = given(config, "first_k_dense_replace", 0), require(config, "moe_intermediate_size")
    if type(dense) is not int or dense < 0:
        raise CheckpointError(f"config.json: first_k_dense_replace is {dense!r:.80}; a number of layers is needed")
    experts = Experts(
        count, chosen, width, tuple(range(dense, layers)), scoring="sigmoid",
        normalised=flag(config, "norm_topk_prob"), scale=number(config, "routed_scaling_factor", 1.0), groups=groups,
        top_groups=top_groups, shared_width=width * require(config, "n_shared_experts", 1),
    )  # fmt: skip
    positions = require(config, "max_position_embeddings", 4096)
    turned = rope(config, positions, head_dim=latent.rope_dim)
    sections = (config[key] for key in ROPE_SECTIONS if config.get(key))
    scale_all = next((given(section, "mscale_all_dim", 0) for section in sections), 0)
    scale = (latent.nope_dim + latent.rope_dim) ** -0.5
    if turned.scaling != "none" and scale_all:
        scale *= yarn_magnitude(turned.factor, scale_all) ** 2
    return {
        "latent": latent, "experts": experts if experts.layers else None, "rope": turned, "query_scale": scale,
        "head_dim": latent.nope_dim + latent.rope_dim, "attention_bias": flag(config, "attention_bias"),
    }  # fmt: skip


def _qwen_windows(config: Section, layers: int) -> dict[str, Any]:
    if not flag(config, "use_sliding_window"):
        return {}
    first = config.get("max_window_layers", 28)
    if type(first) is not int or first < 0:
        raise CheckpointError(f"config.json: max_window_layers is {first!r:.80}; a number of layers is needed")
    return _windows(config, layers, lambda layer: layer >= first)


def _windows(config: Section, layers: int, has_window: Callable[[int], bool]) -> dict[str, Any]:
    """The window of each layer. Which layers have one: ``layer_types``, else ``has_window``."""
    types = config.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers or not set(types) <= set(BY_LAYER):
            raise CheckpointError(
                f"config.json: layer_types is {types!r:.80}; for each of {layers} layers one of {listed(BY_LAYER)} is "
                "needed"
            )
        has_window = lambda layer: types[layer] == BY_LAYER[0]  # noqa: E731
    if config.get("sliding_window") is None:
        if types is not None and BY_LAYER[0] in types:
            raise CheckpointError(f"config.json: layer_types has {BY_LAYER[0]}, and sliding_window is null")
        return {}
    window = require(config, "sliding_window")
    windows = tuple(window if has_window(layer) else None for layer in range(layers))
    return {"windows": windows} if any(windows) else {}


def _at_most(value: int, most: int, name: str, of: str) -> None:
    if value > most:
        raise CheckpointError(f"config.json: {name} is {value}; at most {most} ({of}) is possible")


_QWEN = {"max_position_embeddings": 32768}
_GEMMA = {
    "head_dim": 256, "sliding_window": 4096, "query_pre_attn_scalar": 256, "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "num_key_value_heads": 4,
}  # fmt: skip
_ONE_WAY = {"use_bidirectional_attention": (False, "false (causal attention)")}

READERS: Mapping[str, Reader] = {
    "LlamaForCausalLM": Reader(_llama, only=NO_WINDOW),
    "MistralForCausalLM": Reader(
        _mistral, {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072}
    ),
    "Qwen2ForCausalLM": Reader(_qwen2, _QWEN | {"sliding_window": 4096}),
    "MiMoForCausalLM": Reader(_qwen2, _QWEN | {"sliding_window": 4096}, remote_code=True),
    "Qwen3ForCausalLM": Reader(_qwen3, _QWEN | {"sliding_window": 4096, "head_dim": 128}),
    "Qwen3MoeForCausalLM": Reader(_qwen3_moe, _QWEN | {"sliding_window": 4096, "num_key_value_heads": 4}),
    "Gemma2ForCausalLM": Reader(
        _gemma2, _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        ("hidden_activation", "gelu_pytorch_tanh"), _ONE_WAY, float16=False,
    ),
    "Gemma3ForCausalLM": Reader(
        _gemma3, _GEMMA | {"max_position_embeddings": 131072}, ("hidden_activation", "gelu_pytorch_tanh"), _ONE_WAY,
        float16=False,
    ),
    "Gemma3ForConditionalGeneration": Reader(
        _gemma3, _GEMMA | {"max_position_embeddings": 131072, "vocab_size": 262208, "num_attention_heads": 8},
        ("hidden_activation", "gelu_pytorch_tanh"), _ONE_WAY, text=True, float16=False,
    ),
    "Phi3ForCausalLM": Reader(
        _phi3, {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}, partial_rope=True, remote_code=True
    ),
    "DeepseekV3ForCausalLM": Reader(
        _deepseek_v3,
        {
            "max_position_embeddings": 4096, "norm_topk_prob": True, "first_k_dense_replace": 3, "n_group": 8,
            "topk_group": 4, "routed_scaling_factor": 2.5,
        },
        only={
            "rope_interleave": (True, "true"), "scoring_func": ("sigmoid", "sigmoid"),
            "topk_method": ("noaux_tc", "noaux_tc"), "moe_layer_freq": (1, "1"),
        },
        remote_code=True, float16=False,
    ),
}  # fmt: skip
