"""config.json to a ``ModelConfig``, and generation_config.json to stop tokens and sampling parameters.

Unsupported settings are refused by name. In order: the model, its architecture (``READERS``), its rotary embedding,
generation_config.json.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from specjax.checkpoint.files import (
    MAX_INTEGER,
    UNKNOWN,
    CheckpointError,
    CheckpointOptionError,
    Settings,
    invalid,
    listed,
    read_json,
    unsupported,
)
from specjax.checkpoint.quantised import PACKED, formats
from specjax.checkpoint.tokenizer import turn_end
from specjax.checkpoint.weights import ModelFiles
from specjax.config import DeltaNet, Experts, Latent, LayerKinds, ModelConfig, RopeConfig
from specjax.models import ARCHITECTURES, table
from specjax.models.params import EMBEDDINGS, dimensions, input_letters, is_product, leaves_of

Values = Mapping[str, tuple[Any, str]]
"""By key of config.json: the supported value besides null, and its description for messages."""

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("auto", "none", "fp8", "int8", "int4")  # see `load_params`

SILU = {"hidden_act": ("silu", "silu")}
NO_WINDOW = {"sliding_window": (0, "null (attention over the whole context)")}
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
ROPE_SECTIONS = ("rope_parameters", "rope_scaling")  # of transformers 5 and 4
LAYER_TYPES = ("sliding_attention", "full_attention")
LAYER_TENSORS = 6  # the fewest of a layer, Phi-3's


def model_config(
    hf_config: Mapping[str, Any], *, dtype: str = "auto", platform: str | None = None,
    context_length: int | None = None, before_ampere: bool | None = None,
) -> ModelConfig:  # fmt: skip
    """Read the description of a model from a parsed config.json of transformers 4 or 5.

    Args:
      dtype: float32, bfloat16, float16, or auto: float32 on a CPU, else the checkpoint's; float16 for bfloat16 on an
        NVIDIA GPU before Ampere, which does not multiply that.
      platform: for dtype auto; ``jax.default_backend()`` if None.
      context_length: the longest text served, which selects longrope's factors; None: the model's.
      before_ampere: for dtype auto, whether the GPU is one before Ampere; None: as this process's.
    """
    architectures = Settings(hf_config).texts("architectures")
    architecture = next((name for name in architectures if name in ARCHITECTURES), None)
    if architecture is None:
        raise unsupported("architectures", architectures or "absent", listed(ARCHITECTURES, 99))
    reader = READERS[architecture]
    if (code := hf_config.get("auto_map")) and not reader.remote_code:
        raise unsupported("auto_map", code, f"none (code of a model is never run; remove it if it is {architecture}'s)")
    config = Settings({**reader.defaults, **hf_config}, getattr(hf_config, "holds", UNKNOWN))
    if reader.text_config:
        outer = ("architectures", "quantization_config", "tie_word_embeddings")
        config.update({key: value for key, value in config.section("text_config").items() if key not in outer})
    if quantization := config.section("quantization_config"):
        formats(quantization)  # raises errors
    refuse_unsupported(config, reader.only)
    (heads, kv_heads), hidden = read_heads(config), config.integer("hidden_size")
    max_positions = config.integer("max_position_embeddings", 2048)
    layers = config.count("num_hidden_layers", each=LAYER_TENSORS)
    head_dim = config.integer("head_dim", hidden // heads)
    fields: dict[str, Any] = {"windows": reader.windows(config, layers)}
    for part in reader.parts:
        fields |= part(config, layers)
    if "rope" not in fields:
        fields["rope"] = read_rope(
            config, max_positions, head_dim=fields.get("head_dim", head_dim), context_length=context_length,
            partial=reader.partial_rope,
        )  # fmt: skip
    weights_dtype = _dtype(config, dtype, platform, before_ampere)
    positions = scaled_positions(fields["rope"], max_positions)
    if weights_dtype == "float16" and not reader.float16:
        if dtype == "float16":
            problem = f"float16 is too small for the activations of {architecture}; use auto, bfloat16 or float32"
            raise CheckpointOptionError("dtype", problem)
        weights_dtype = "bfloat16"
    # A window as long as the longest text has an effect only if its layers have a rotary embedding of their own.
    longest = math.inf if "window_rope" in fields else positions
    windows = tuple(None if window is None or window >= longest else window for window in fields["windows"])
    fields["windows"] = windows if any(windows) else ()
    fields.setdefault("head_dim", head_dim)
    return ModelConfig(
        family=ARCHITECTURES[architecture],
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        max_positions=positions,
        tied_embeddings=config.boolean("tie_word_embeddings"),
        mask_token=_pard_token(config),
        dtype=weights_dtype,
        **fields,
    )


def _pard_token(config: Settings) -> int | None:
    """The token in the slots that a PARD draft model predicts in one forward."""
    if config.get("spd_type") == "pard2" or config.get("pard2"):
        raise unsupported("spd_type", "pard2", "pard (PARD-2 models read the target's features)")
    return None if config.get("pard_token") is None else config.token("pard_token", config.integer("vocab_size"))


def effective_quantization(name: str, hf_config: Mapping[str, Any], config: ModelConfig, quantization: str) -> str:
    """The ``quantization`` for ``load_params`` of the model ``name``: auto if the files are quantised that way already.
    Raises CheckpointError if the model cannot have it; reads no weights."""
    if quantization not in QUANTIZATIONS:
        problem = f"{quantization:.60} is not one of: {', '.join(QUANTIZATIONS)}"
        raise CheckpointOptionError("quantization", problem)
    if quantization in ("auto", "none"):
        return quantization
    if method := Settings(hf_config).section("quantization_config").get("quant_method"):
        if method == quantization:
            return "auto"
        problem = f"{name} is quantised already ({method}); auto keeps its weights as they are, none dequantises them"
        raise CheckpointOptionError("quantization", f"{quantization} is for float weights, and {problem}")
    sizes = dimensions(config)
    for leaf in filter(is_product, leaves_of(table(config)) if quantization == "int4" else ()):
        inputs = math.prod(sizes[letter] for letter in input_letters(leaf))
        if inputs % PACKED and (leaf.name not in EMBEDDINGS or (leaf.name == "embed" and config.tied_embeddings)):
            problem = f"and {leaf.name} of {name} has {inputs}; int8 and fp8 take any number"
            raise CheckpointOptionError("quantization", f"int4 needs inputs in groups of {PACKED}, {problem}")
    return quantization


def read_heads(config: Settings) -> tuple[int, int]:
    """Numbers of query heads and of key/value heads."""
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise invalid("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    return heads, kv_heads


def refuse_unsupported(config: Settings, only: Values) -> None:
    for key, (supported, description) in only.items():
        if (value := config.optional(key, supported)) != supported:
            raise unsupported(key, value, description)


def _dtype(config: Settings, dtype: str, platform: str | None, before_ampere: bool | None) -> str:
    if dtype in DTYPES:
        return dtype
    if dtype != "auto":
        raise CheckpointError(f"dtype {dtype!r} is not one of: auto, {', '.join(DTYPES)}")
    if platform is None:
        import jax

        platform = jax.default_backend()
    if platform == "cpu":  # where bfloat16 products are slower than float32 ones
        return "float32"
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if stored not in DTYPES:
        raise CheckpointError(f"config.json: torch_dtype is {stored!r}; set dtype to one of: {', '.join(DTYPES)}")
    if before_ampere is None:
        from specjax_kernels import platforms

        before_ampere = platforms.before_ampere()
    return "float16" if stored == "bfloat16" and before_ampere else stored


def windows_of(
    config: Settings, layers: int, has_window: Callable[[int], bool] = lambda layer: False
) -> tuple[int | None, ...]:
    """The window of each layer; ``layer_types`` overrides ``has_window``."""
    has_types = config.get("layer_types") is not None
    sliding = layers_with_window(config, layers) if has_types else [has_window(layer) for layer in range(layers)]
    if not any(sliding) or (not has_types and config.get("sliding_window") is None):
        return (None,) * layers
    window = config.integer("sliding_window")
    return tuple(window if each else None for each in sliding)


def late_windows(config: Settings, layers: int) -> tuple[int | None, ...]:
    """Qwen's windows: of the layers from ``max_window_layers`` on, if ``use_sliding_window``."""
    if not config.boolean("use_sliding_window"):
        return (None,) * layers
    first = config.integer("max_window_layers", 28, least=0)
    return windows_of(config, layers, lambda layer: layer >= first)


_every_window = partial(windows_of, has_window=lambda layer: True)
_even_windows = partial(windows_of, has_window=lambda layer: layer % 2 == 0)


@dataclass(frozen=True)
class Reader:
    """Reads the settings that depend on the architecture."""

    parts: tuple[Callable[[Settings, int], dict[str, Any]], ...]  # (config.json, layers) -> fields of `ModelConfig`
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of absent keys, as in transformers
    only: Values = field(default_factory=lambda: SILU)
    windows: Callable[[Settings, int], tuple[int | None, ...]] = lambda config, layers: ()
    partial_rope: bool = False
    text_config: bool = False  # multimodal: the language model's keys are in that section
    remote_code: bool = False  # published with Python code; tests compare the family with it
    float16: bool = True  # False: activations overflow; vLLM refuses float16 for Gemma, and scales DeepSeek's


def _attention_bias(config: Settings, layers: int) -> dict[str, Any]:
    bias = config.boolean("attention_bias")
    return {"attention_bias": bias, "output_bias": bias}


def _mlp_bias(config: Settings, layers: int) -> dict[str, Any]:
    return {"mlp_bias": config.boolean("mlp_bias")}


def _experts(
    config: Settings, layers: Sequence[int], count: str, per_token: str = "num_experts_per_tok",
    width: str = "moe_intermediate_size", *, each: int | None = None, **fields: Any,
) -> Experts | None:  # fmt: skip
    """The experts of these layers, by the keys of their sizes; None if no layer has experts. ``each``: see `count`."""
    experts, chosen = config.count(count, each=len(layers) if each is None else each), config.integer(per_token)
    at_most(chosen, experts, per_token, count)
    return Experts(experts, chosen, config.integer(width), tuple(layers), **fields) if layers else None


def _qwen3_moe(config: Settings, layers: int) -> dict[str, Any]:
    dense, step = config.optional("mlp_only_layers", []), config.integer("decoder_sparse_step", 1)
    if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < layers for layer in dense):
        raise invalid("mlp_only_layers", dense, "a list of layers")
    key = "num_experts" if "num_experts" in config else "num_local_experts"  # of transformers 5
    sparse = [layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0]
    experts = _experts(config, sparse, key, normalised=config.boolean("norm_topk_prob"))
    windows = _every_window(config, layers) if config.boolean("use_sliding_window") else ()
    return {"windows": windows, "experts": experts}


def _gpt_oss(config: Settings, layers: int) -> dict[str, Any]:
    # All experts of a layer are in one tensor.
    return {"experts": _experts(config, range(layers), "num_local_experts", width="intermediate_size", each=0)}


def _gemma(config: Settings, layers: int) -> dict[str, Any]:
    return {
        "attention_softcap": _positive(config, "attn_logit_softcapping"),
        "logit_softcap": _positive(config, "final_logit_softcapping"),
        "query_scale": config.number("query_pre_attn_scalar", 256.0) ** -0.5,
    }


def _positive(config: Settings, key: str) -> float | None:
    return None if config.get(key) is None else config.number(key)


def _gemma3(config: Settings, layers: int) -> dict[str, Any]:
    pattern, head_dim = config.integer("sliding_window_pattern", 6), config.integer("head_dim", 256)
    windows = windows_of(config, layers, lambda layer: (layer + 1) % pattern != 0)
    return {"windows": windows} | _two_ropes(config, head_dim, head_dim)


def _two_ropes(config: Settings, head_dim: int, full_head_dim: int) -> dict[str, Any]:
    """Rotary embeddings of layers without and with a window."""
    positions, section = config.integer("max_position_embeddings", 131072), config.section("rope_parameters")
    if any(key in section for key in LAYER_TYPES):
        local, full = (Settings({"rope_parameters": section.get(key)}) for key in LAYER_TYPES)
    else:  # transformers 4
        full = Settings({key: config.get(key) for key in (*ROPE_SECTIONS, "rope_theta")})
        local = Settings({"rope_theta": config.get("rope_local_base_freq")})
    return {
        "rope": read_rope(full, positions, head_dim=full_head_dim, theta=1e6),
        "window_rope": read_rope(local, positions, head_dim=head_dim, theta=1e4),
    }


def _gemma4(config: Settings, layers: int) -> dict[str, Any]:
    types = config.optional("layer_types", [LAYER_TYPES[(layer + 1) % 6 == 0] for layer in range(layers)])
    if isinstance(types, list):
        types = [*types[:-1], LAYER_TYPES[1]]  # as in transformers
    config = Settings(config | {"layer_types": types}, config.holds)
    windows, sliding = windows_of(config, layers), layers_with_window(config, layers)
    full, head_dim = _layer_sizes(config, sliding)
    shared = config.integer("num_kv_shared_layers", 0, least=0)
    if not {*sliding[layers - shared :]} <= {*sliding[: max(layers - shared, 0)]}:
        raise invalid("num_kv_shared_layers", shared, "a number that leaves a layer of each kind before those")
    inputs = config.integer("hidden_size_per_layer_input", least=0)
    has_experts = config.boolean("enable_moe_block")
    return {"windows": windows} | _two_ropes(config, head_dim, full[0]) | {
        "kinds": LayerKinds(
            *full, keys_as_values=config.boolean("attention_k_eq_v"), shared=shared, inputs=inputs,
            double_mlp=config.boolean("use_double_wide_mlp"),
            input_vocab=config.integer("vocab_size_per_layer_input", 262144) if inputs else 0,
        ),
        "experts": _experts(config, range(layers), "num_experts", "top_k_experts") if has_experts else None,
        "logit_softcap": _positive(config, "final_logit_softcapping"), "query_scale": 1.0,
    }  # fmt: skip


def _layer_sizes(config: Settings, sliding: list[bool]) -> tuple[tuple[int, int], int]:
    """Channels and key/value heads of layers without a window, and channels of the others. Published files have keys
    for layers without a window, transformers 5.24 writes an object for each."""
    heads, kv_heads = read_heads(config)
    sizes = {"head_dim": config.integer("head_dim"), "num_key_value_heads": kv_heads}
    by_layer = config.section("per_layer_config")
    if config.get("per_layer_config") is None:
        named = {"head_dim": config.integer("global_head_dim", 512)}
        if config.boolean("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
            named["num_key_value_heads"] = config.integer("num_global_key_value_heads")
        by_layer = Settings({str(layer): named for layer, slides in enumerate(sliding) if not slides})
    kinds: dict[bool, Settings] = {True: Settings(sizes)}
    for layer, slides in enumerate(sliding):
        own = by_layer.section(str(layer))
        if kinds.setdefault(slides, Settings(sizes | own)) != sizes | own or own.keys() - sizes.keys():
            problem = "head_dim and num_key_value_heads, equal in all layers without a window, and there only"
            raise unsupported(f"per_layer_config of layer {layer}", dict(own), problem)
    full = kinds[False] | {"num_attention_heads": heads}
    return (Settings(full).integer("head_dim"), read_heads(Settings(full))[1]), sizes["head_dim"]


def _deepseek_v3(config: Settings, layers: int) -> dict[str, Any]:
    latent = Latent(
        rank=config.integer("kv_lora_rank", 512),
        query_rank=None if config.get("q_lora_rank") is None else config.integer("q_lora_rank"),
        nope_dim=config.integer("qk_nope_head_dim", 128),
        rope_dim=config.integer("qk_rope_head_dim", 64),
        value_dim=config.integer("v_head_dim", 128),
    )
    key = "n_routed_experts" if "n_routed_experts" in config else "num_local_experts"
    count, per_token = config.integer(key, 256), config.integer("num_experts_per_tok", 8)
    groups, top_groups = config.integer("n_group", 1), config.integer("topk_group", 1)
    dense = config.integer("first_k_dense_replace", 0, least=0)
    if count % groups:
        raise CheckpointError(f"config.json: n_group ({groups}) must divide {key} ({count})")
    at_most(top_groups, groups, "topk_group", "n_group")
    within = count // groups * top_groups
    at_most(per_token, within, "num_experts_per_tok", "the experts of topk_group groups")
    stated = Settings(config | {key: count, "num_experts_per_tok": per_token}, config.holds)
    experts = _experts(
        stated, range(dense, layers), key, scoring="sigmoid", normalised=config.boolean("norm_topk_prob"),
        scale=config.number("routed_scaling_factor", 1.0), groups=groups, top_groups=top_groups,
        shared_width=config.integer("moe_intermediate_size") * config.integer("n_shared_experts", 1),
    )  # fmt: skip
    rope = read_rope(config, config.integer("max_position_embeddings", 4096), head_dim=latent.rope_dim)
    section, key = rope_section(config), "mscale_all_dim"
    scale = (latent.nope_dim + latent.rope_dim) ** -0.5
    if rope.scaling != "none" and section.get(key):
        scale *= yarn_magnitude(rope.factor, section.number(key)) ** 2
    return {
        "latent": latent, "experts": experts, "rope": rope, "query_scale": scale,
        "head_dim": latent.nope_dim + latent.rope_dim, "attention_bias": config.boolean("attention_bias"),
    }  # fmt: skip


def _qwen3_next(config: Settings, layers: int, *, fused: bool) -> dict[str, Any]:
    kinds, linear, full = config.optional("layer_types", None), "linear_attention", LAYER_TYPES[1]
    if kinds is None:
        interval = config.integer("full_attention_interval", 4)
        kinds = [linear if (layer + 1) % interval else full for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(name in (linear, full) for name in kinds):
        raise invalid("layer_types", kinds, f"{layers} of {linear} and {full}")
    key_heads, value_heads = config.integer("linear_num_key_heads", 16), config.integer("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise invalid("linear_num_value_heads", value_heads, f"a multiple of linear_num_key_heads ({key_heads})")
    delta_layers = tuple(layer for layer, name in enumerate(kinds) if name == linear)
    delta = DeltaNet(
        delta_layers, key_heads, value_heads, config.integer("linear_key_head_dim", 128),
        config.integer("linear_value_head_dim", 128), config.integer("linear_conv_kernel_dim", 4), fused,
    )  # fmt: skip
    fields = _qwen3_moe(config, layers) if "num_experts" in config else {}
    if experts := fields.get("experts"):
        width = config.integer("shared_expert_intermediate_size", 512)
        fields["experts"] = replace(experts, shared_width=width, shared_gate=True)
    return fields | {"delta": delta if delta_layers else None}


def layers_with_window(config: Settings, layers: int) -> list[bool]:
    """Whether each layer has a window, by ``layer_types``."""
    types = config["layer_types"]
    if not isinstance(types, list) or len(types) != layers or any(name not in LAYER_TYPES for name in types):
        raise invalid("layer_types", types, f"for each of {layers} layers one of {listed(LAYER_TYPES)}")
    return [name == LAYER_TYPES[0] for name in types]


def at_most(value: int, limit: int, name: str, bound: str) -> None:
    if value > limit:
        raise CheckpointError(f"config.json: {name} is {value}; at most {limit} ({bound}) is possible")


_QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096}
_QWEN2 = Reader((lambda config, layers: {"attention_bias": True},), _QWEN, windows=late_windows)
_GEMMA = {
    "head_dim": 256, "sliding_window": 4096, "query_pre_attn_scalar": 256, "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "num_key_value_heads": 4,
}  # fmt: skip
_GEMMA_ONLY = {
    "hidden_activation": ("gelu_pytorch_tanh", "gelu_pytorch_tanh"),
    "use_bidirectional_attention": (False, "false (causal attention)"),
}
_GEMMA3 = Reader(
    (_attention_bias, _gemma, _gemma3), _GEMMA | {"max_position_embeddings": 131072}, _GEMMA_ONLY, float16=False
)
_GEMMA4 = Reader(
    (_gemma4,),
    {
        "head_dim": 256, "num_key_value_heads": 4, "sliding_window": 512, "max_position_embeddings": 131072,
        "tie_word_embeddings": True, "hidden_size_per_layer_input": 256,
    },
    _GEMMA_ONLY | {
        "attention_bias": (False, "false"),
        "use_bidirectional_attention": ("vision", "null or vision (causal attention of texts)"),
    },
    float16=False,
)  # fmt: skip
_UNIFIED = {"sliding_window": 1024, "max_position_embeddings": 262144, "hidden_size_per_layer_input": 0}

_DELTA = Reader(
    (partial(_qwen3_next, fused=False),),
    {"head_dim": 256, "partial_rotary_factor": 0.25, "max_position_embeddings": 32768, "norm_topk_prob": True},
    SILU | {"attention_bias": (False, "false"), "use_sliding_window": (False, "false")}, partial_rope=True,
)  # fmt: skip
# All layers of Qwen3_5Moe have experts, so its files lack the width of a dense MLP; this is Qwen3-Next's.
_DELTA_MOE = replace(_DELTA, defaults={**_DELTA.defaults, "intermediate_size": 5632})

READERS: Mapping[str, Reader] = {
    "LlamaForCausalLM": Reader((_attention_bias, _mlp_bias), only=SILU | NO_WINDOW),
    "MistralForCausalLM": Reader(
        (_attention_bias, _mlp_bias),
        {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072}, windows=_every_window,
    ),
    "Qwen2ForCausalLM": _QWEN2,
    "MiMoForCausalLM": replace(_QWEN2, remote_code=True),
    "Qwen3ForCausalLM": Reader((_attention_bias,), _QWEN | {"head_dim": 128}, windows=late_windows),
    "Qwen3MoeForCausalLM": Reader((_attention_bias, _qwen3_moe), _QWEN | {"num_key_value_heads": 4}),
    "GptOssForCausalLM": Reader(
        (_attention_bias, _gpt_oss),
        {
            "head_dim": 64, "num_key_value_heads": 8, "num_experts_per_tok": 4, "sliding_window": 128,
            "attention_bias": True, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096
            },
        },
        SILU | {"swiglu_alpha": (1.702, "1.702"), "swiglu_limit": (7.0, "7.0")}, _even_windows, float16=False,
    ),
    "Gemma2ForCausalLM": Reader(
        (_attention_bias, _gemma), _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        _GEMMA_ONLY, _even_windows, float16=False,
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(
        _GEMMA3, text_config=True, defaults={**_GEMMA3.defaults, "vocab_size": 262208, "num_attention_heads": 8}
    ),
    **{
        f"Gemma4{kind}For{use}": replace(
            _GEMMA4, text_config=use == "ConditionalGeneration", defaults={**_GEMMA4.defaults, **unified}
        )
        for kind, unified in (("", {}), ("Unified", _UNIFIED)) for use in ("CausalLM", "ConditionalGeneration")
    },
    "Phi3ForCausalLM": Reader(
        (), {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}, windows=_every_window, partial_rope=True,
        remote_code=True,
    ),
    "DeepseekV3ForCausalLM": Reader(
        (_deepseek_v3,),
        {
            "max_position_embeddings": 4096, "norm_topk_prob": True, "first_k_dense_replace": 3, "n_group": 8,
            "topk_group": 4, "routed_scaling_factor": 2.5,
        },
        SILU | {
            "rope_interleave": (True, "true"), "scoring_func": ("sigmoid", "sigmoid"),
            "topk_method": ("noaux_tc", "noaux_tc"), "moe_layer_freq": (1, "1"),
        },
        remote_code=True, float16=False,
    ),
    "Qwen3NextForCausalLM": replace(_DELTA, parts=(partial(_qwen3_next, fused=True),)),
    **{
        f"Qwen3_5{kind}For{use}": replace(delta, text_config=use == "ConditionalGeneration")
        for kind, delta in (("", _DELTA), ("Moe", _DELTA_MOE)) for use in ("CausalLM", "ConditionalGeneration")
    },
}  # fmt: skip


def flattened(config: Settings, *sections: str) -> Settings:
    """The settings of a head and of these sections in one object without nulls. speculators and NeMo nest the layer's
    settings in ``transformer_layer_config``, whose rotary embedding replaces the head's as a whole."""
    layer, ropes = config.section("transformer_layer_config"), {"rope_theta", *ROPE_SECTIONS}
    hidden = ropes if any(layer.get(key) is not None for key in ropes) else set()
    outer = {key: value for key, value in config.items() if key not in hidden}
    parts = (outer, layer, *(config.section(name) for name in sections))
    nested = ((key, value) for part in parts for key, value in part.items() if value is not None)
    return Settings(nested, config.holds)


def rope_section(config: Settings) -> Settings:
    """``rope_scaling`` of transformers 4, else ``rope_parameters`` of transformers 5, else empty."""
    return config.section("rope_scaling") or config.section("rope_parameters")


def read_rope(
    config: Settings, max_positions: int, *, head_dim: int, context_length: int | None = None,
    partial: bool = False, theta: float = 10000.0,
) -> RopeConfig:  # fmt: skip
    """Read the rotary embedding. Keys of ``rope_section`` override keys outside, as in transformers.

    Args:
      max_positions: default of a scaling's original length, and of ``context_length``.
      head_dim: channels of a head; longrope has a factor for each pair.
      partial: allow the rotation of a part of each head.
      theta: default of ``rope_theta``.
    """
    section = rope_section(config)
    if by_layer := [key for key, value in section.items() if isinstance(value, Mapping)]:
        raise unsupported("the rotary embedding given by layer type", by_layer, "one for all layers")
    rope_type = section.optional("rope_type", section.optional("type", "default"))
    partial = partial or rope_type == "proportional"
    share = section.optional("partial_rotary_factor", config.optional("partial_rotary_factor", 1))
    if share != 1 and not (partial and type(share) is float and 0 < share < 1):
        raise unsupported("partial_rotary_factor", share, "a number above 0, at most 1" if partial else "1.0")
    if rope_type in ("su", "yarn") and "long_factor" in section:  # the first Phi-3 models
        rope_type = "longrope"
    if rope_type not in ROPE_TYPES:
        raise unsupported("rope_type", rope_type, ", ".join(ROPE_TYPES))
    try:
        rope = _scaling(rope_type, section, config, max_positions, context_length or max_positions)
    except KeyError as error:
        raise CheckpointError(f"config.json: the rope type {rope_type} needs {error.args[0]!r}") from error
    holder = section if section.get("rope_theta") is not None else config
    rope = replace(rope, theta=holder.number("rope_theta", theta), partial=float(share))
    pairs = rope.width(head_dim) // 2
    if rope.theta <= 1:
        raise invalid("rope_theta", rope.theta, "a number above 1")
    if pairs < 2 and rope.scaling == "dynamic":
        raise invalid("head_dim", head_dim, "a head of two pairs or more, for dynamic scaling,")
    if rope.scaling == "longrope" and len(rope.divisors) != pairs:
        raise CheckpointError(f"config.json: longrope has {len(rope.divisors)} factors; {pairs} are needed")
    return rope


def _scaling(
    rope_type: str, section: Settings, config: Settings, max_positions: int, context_length: int
) -> RopeConfig:
    """The scaling without theta. Raises KeyError for an absent key."""
    if rope_type == "default":
        return RopeConfig()
    if rope_type == "proportional":
        return RopeConfig(scaling="proportional", factor=section.number("factor", 1.0))
    key = "original_max_position_embeddings"  # Phi-3 has it outside the section
    original = (config if config.get(key) is not None else section).integer(key, max_positions)
    factor = section.number("factor", max_positions / original if rope_type in ("yarn", "longrope") else None)
    if rope_type == "linear":
        return RopeConfig(scaling="linear", factor=factor) if factor != 1 else RopeConfig()
    scaled = RopeConfig(scaling=cast(Any, rope_type), factor=factor, original_max_position=original)
    if rope_type == "dynamic":
        return replace(scaled, original_max_position=max_positions)
    if rope_type == "llama3":
        low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
        if low >= high:
            raise invalid("low_freq_factor", low, f"a number below high_freq_factor ({high})")
        return replace(scaled, low_freq_factor=low, high_freq_factor=high) if factor != 1 else RopeConfig()
    if rope_type == "longrope":
        if original < 2:
            raise config.invalid(key, original, "a number of at least 2")
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        long, short = section.numbers("long_factor"), section.numbers("short_factor")
        scaled = replace(scaled, divisors=long if context_length > original else short)
    else:
        magnitude = yarn_magnitude(factor)
        if section.get("mscale") and section.get("mscale_all_dim"):
            scale, scale_all = section.number("mscale"), section.number("mscale_all_dim")
            magnitude = yarn_magnitude(factor, scale) / yarn_magnitude(factor, scale_all)
        beta_fast, beta_slow = section.number("beta_fast", 32.0), section.number("beta_slow", 1.0)
        truncate = "truncate" not in section or section.boolean("truncate")
        scaled = replace(scaled, beta_fast=beta_fast, beta_slow=beta_slow, truncate=truncate)
    return replace(scaled, magnitude=section.number("attention_factor", magnitude))


def scaled_positions(rope: RopeConfig, max_positions: int) -> int:
    """The longest text: ``max_position_embeddings``, extended by dynamic and yarn scaling."""
    scaled = rope.original_max_position * rope.factor if rope.scaling in ("dynamic", "yarn") else 0
    if scaled > MAX_INTEGER:
        original = f"original_max_position_embeddings is {rope.original_max_position}"
        raise CheckpointError(f"config.json: factor is {rope.factor}, and {original}; a product below 2**31 is needed")
    return max(max_positions, int(scaled))


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """YaRN's factor on cos and sin. With ``mscale_all_dim``, its square is DeepSeek's factor on attention scores."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def hf_rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """``rope_scaling`` in config.json for ``rope``, the inverse of ``read_rope``."""
    if rope.scaling == "none":
        return None
    section: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling in ("linear", "dynamic"):
        section["type"] = rope.scaling  # SafeAILab/EAGLE `cnets.py` reads this key, and supports these two
    else:
        section["original_max_position_embeddings"] = rope.original_max_position
    if rope.scaling == "llama3":
        section |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.scaling in ("yarn", "longrope"):
        section["attention_factor"] = rope.magnitude
    if rope.scaling == "yarn":
        section |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
    if rope.scaling == "longrope":
        section |= {key: list(rope.divisors) for key in ("long_factor", "short_factor")}
    return section


# generation_config.json.

GENERATION_NAME = "generation_config.json"
# Unsupported keys that change the text, with the values that have no effect besides null. Omitted: keys that limit the
# length (max_length), select caches, outputs or assistant models, or depend on `num_beams`.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    key: neutral
    for keys, neutral in (
        ("dola_layers exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id max_time", ()),
        ("bad_words_ids begin_suppress_tokens constraints force_words_ids forced_decoder_ids suppress_tokens", ([],)),
        ("encoder_no_repeat_ngram_size min_length min_new_tokens no_repeat_ngram_size", (0,)),
        ("epsilon_cutoff eta_cutoff penalty_alpha", (0.0,)),
        ("encoder_repetition_penalty guidance_scale num_beams top_h typical_p", (1,)),
        ("force_bos_token_to_be_generated token_healing", (False,)),
        ("sequence_bias", ({}, [])),
        ("stop_strings", ([], "")),
        ("watermarking_config", ({},)),
    )
    for key in keys.split()
}
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda value: 0 <= value <= 1e4, "a number from 0 (greedy) to 10000"),
    "top_p": (lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
    "top_k": (lambda value: -1 <= value < 2**31 and value == int(value), "an integer, 0 or -1 for all tokens,"),
    "min_p": (lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "repetition_penalty": (lambda value: 0 < value <= 2, "a number above 0 and at most 2"),
}


def stop_token_ids(files: ModelFiles, tokenizer: Any = None, vocab_size: int | None = None) -> tuple[int, ...]:
    """The distinct ids that end a text: ``eos_token_id`` of generation_config.json and of config.json, then the
    tokenizer's end-of-sequence token, the token that the chat template writes after an answer, and the tokens that end
    an answer or a call of gpt-oss, or a call of Gemma 4. The ids in the files must be below ``vocab_size``; a
    tokenizer's id beyond it can never be drawn and is omitted."""
    limit = math.inf if vocab_size is None else vocab_size
    stops: list[int] = []
    for name, section in ((GENERATION_NAME, _generation(files) or {}), ("config.json", files.config)):
        value = section.get("eos_token_id")
        value = [] if value is None else value
        ids = value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token < limit for token in ids):
            needed = "token ids" if vocab_size is None else f"token ids from 0 to {vocab_size - 1}"
            raise CheckpointError(f"{files.folder / name}: eos_token_id is {value!r:.80}; null or {needed} are needed")
        stops += ids
    names = getattr(tokenizer, "get_added_vocab", dict)()
    # Harmony's turns have several messages, whose <|end|> does not end the turn.
    is_harmony = "<|channel|>" in names
    ends = (
        [names.get("<|return|>"), names.get("<|call|>")]
        if is_harmony
        else [turn_end(tokenizer), names.get("<|tool_response>")]
    )
    for token in (getattr(tokenizer, "eos_token_id", None), *ends):
        if isinstance(token, int) and 0 <= token < limit:
            stops.append(token)
    return tuple(dict.fromkeys(stops))


def sampling_defaults(files: ModelFiles) -> dict[str, float | int]:
    """The publisher's sampling parameters in generation_config.json, under the names of ``SamplingParams``.

    ``do_sample: false`` means temperature 0, as in transformers (SGLang ignores the key). Raises CheckpointError if a
    value is out of range, or a key that changes the text is not supported.
    """
    generation = _generation(files)
    section, file = (files.config, "config.json") if generation is None else (generation, GENERATION_NAME)

    def refused(key: str, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{files.folder / file}: {key} is {section[key]!r:.80}{problem}. Change the file, or leave it unread with "
            "sampling_defaults='openai'"
        )

    for key, neutral in NEUTRAL.items():
        value = section.get(key)
        # False differs from 0.
        if value is not None and (isinstance(value, bool), value) not in [(isinstance(n, bool), n) for n in neutral]:
            supported = f"{neutral[0]!r} or null" if neutral else "null"
            raise refused(key, f", which changes the text and is not supported; supported: {supported}")
    if generation is None:
        return {}
    defaults: dict[str, float | int] = {}
    for key, (is_valid, needed) in _RANGES.items():
        if (value := generation.get(key)) is None:
            continue
        # isfinite() fails for integers that are too large for a float.
        if type(value) not in (int, float) or not abs(value) < math.inf or not is_valid(value):
            raise refused(key, f"; {needed} is needed")
        defaults[key] = (int(value) or -1) if key == "top_k" else float(value)
    samples = generation.optional("do_sample", True)
    if type(samples) is not bool:
        raise refused("do_sample", "; true, false or null is needed")
    if samples:
        return defaults
    return {"temperature": 0.0} | {key: defaults[key] for key in ("repetition_penalty",) if key in defaults}


def _generation(files: ModelFiles) -> Settings | None:
    file = files.folder / GENERATION_NAME
    return read_json(file, files.name) if file.is_file() else None
