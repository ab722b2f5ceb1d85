"""config.json of block heads to a `BlockConfig`: z-lab's DFlash and DFlash2, DeepSpec's, speculators', SpecForge's and
JetSpec's.

The slot convention (`BlockConfig.from_anchor`) is read, follows from the architecture, or is required as an option:
with the wrong one nearly all drafts are rejected, without an error. Fields that are not supported are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

from specjax.checkpoint.files import CheckpointError, Settings, invalid, listed, unsupported
from specjax.checkpoint.hf_config import (
    LAYER_TYPES,
    SILU,
    at_most,
    flattened,
    late_windows,
    read_heads,
    read_rope,
    refuse_unsupported,
    scaled_positions,
    windows_of,
)
from specjax.config import BlockConfig, ModelConfig, Walk
from specjax.limits import ParameterError
from specjax.models import family
from specjax.models.head_spec import EMBED, HEAD, MASK, OFFSETS

FROM_ANCHOR: Mapping[str, bool] = {
    "DFlashDraftModel": False, "DFlash2DraftModel": False, "DSparkDraftModel": False, "Qwen3DSparkModel": True,
    "Gemma4DSparkModel": True,
    "dflash": False, "dflash2": False,
}  # fmt: skip
"""`from_anchor` of files without `sample_from_anchor`, by architecture or `speculators_model_type`. dspark is absent:
its default in speculators has changed."""
DFLASH2 = ("DFlash2DraftModel", "dflash2")
GEMMA = ("Gemma4DSparkModel", "Gemma4Eagle3Model")
DEEPSPEC = ("Qwen3DSparkModel", "Qwen3Eagle3Model", *GEMMA)
MAX_CANDIDATES = 1024  # of a slot
MARKOV_HEADS = ("vanilla", "gated", "rnn")

_GEMMA_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}  # transformers' default
_GEMMA_ONLY = {
    "enable_moe_block": (False, "false (layers without experts)"),
    "hidden_activation": ("gelu_pytorch_tanh", "gelu_pytorch_tanh"),
    "hidden_size_per_layer_input": (0, "0 (layers without embeddings of their own)"),
}
_ONLY = SILU | {
    "attention_sink_bias": (False, "absent (no attention sinks)"),
    "attention_value_scale": (1, "1"),
    "draft_ffn_type": ("dense", "dense (no mixture of experts)"),
    "is_neox_style": (True, "true (rotary embedding of half-split channels)"),
    "quantization_config": ({}, "none (float weights, which loading may quantise)"),
    "shift_label": (False, "false (sample_from_anchor is the key for slots that predict the next token)"),
    "use_aux_hidden_state": (True, "true (a block head reads the outputs of layers)"),
}


def block_settings(config: Settings) -> Settings:
    """The settings of a head, which z-lab and SpecForge nest in ``dflash_config``."""
    settings = layer_names(flattened(config, "dflash_config"))
    refuse_unsupported(settings, _ONLY)
    return settings


def layer_names(settings: Settings) -> Settings:
    """The settings with those of DeepSpec's Gemma 4 layers, which are layers without a window, under other layers'
    names."""
    if architecture_of(settings) not in GEMMA:
        return settings
    refuse_unsupported(settings, _GEMMA_ONLY)
    same, ropes = settings.boolean("attention_k_eq_v"), settings.section("rope_parameters")
    changes: dict[str, Any] = {"head_dim": settings.integer("global_head_dim", 512)}
    changes["rope_parameters"] = _GEMMA_ROPE | ropes.section(LAYER_TYPES[1])
    if same:
        changes["num_key_value_heads"] = settings.integer("num_global_key_value_heads")
    return Settings(settings | changes, settings.holds)


def layer_fields(settings: Settings, target: ModelConfig, head_dim: int, positions: int) -> dict[str, Any]:
    """Fields of `HeadConfig` that all heads read alike. ``positions``: default of ``max_position_embeddings``."""
    gemma, key = architecture_of(settings) in GEMMA, "max_position_embeddings"
    positions = settings.integer(key, positions)
    # An absent theta is 10000, independent of the target's.
    rope = read_rope(settings, positions, head_dim=head_dim, partial=True)
    longest = scaled_positions(rope, positions)
    return {
        "head_dim": head_dim,
        "norm_epsilon": settings.number("rms_norm_eps", 1e-6),
        "rope": rope,
        "max_positions": longest if key in settings and longest < target.max_positions else None,
        "dtype": target.dtype,
        "gemma_layers": gemma,
        "keys_as_values": gemma and settings.boolean("attention_k_eq_v"),
    }


def embedding_scale(settings: Settings, target: ModelConfig) -> float:
    """The factor on embeddings: the file's, else that of the target's embedding."""
    return settings.number("input_embedding_scale", family(target).input_scale(target))


def block_config(
    config: Settings, target: ModelConfig, tensors: Collection[str] = (), *, sample_from_anchor: bool | None = None
) -> BlockConfig:
    """The description of a block head with these tensors. Raises CheckpointError for a field that is absent,
    unsupported or for another target, and ParameterError if neither config.json nor the option `sample_from_anchor`
    decides the slot convention."""
    settings = block_settings(config)
    architecture = _architecture(settings)
    layers, (heads, kv_heads) = settings.count("num_hidden_layers"), read_heads(settings)
    hidden = settings.integer("hidden_size", target.hidden_size)
    head_dim = settings.integer("head_dim", hidden // heads)
    windows, causal = _attention(settings, layers, architecture)
    from_anchor = _from_anchor(settings, architecture, sample_from_anchor)
    features = _features(settings, target, layers)
    own = set(tensors) - not_read(settings)
    vocab_size = settings.integer("draft_vocab_size", target.vocab_size)
    mapped, attention_bias = vocab_size != target.vocab_size, settings.boolean("attention_bias")
    cap = settings.number("final_logit_softcapping") if settings.get("final_logit_softcapping") else None
    result = BlockConfig(
        hidden_size=hidden, feature_size=len(features) * target.hidden_size, num_heads=heads, num_kv_heads=kv_heads,
        vocab_size=vocab_size, intermediate_size=settings.integer("intermediate_size"), aux_layers=features,
        own_embedding=EMBED in own, own_head=HEAD in own or mapped, mapped=mapped, attention_bias=attention_bias,
        output_bias=attention_bias, mlp_bias=settings.boolean("mlp_bias"), logit_softcap=cap, layers=layers,
        block=settings.integer("block_size", least=2 - from_anchor), from_anchor=from_anchor,
        mask_token=settings.token("mask_token_id", target.vocab_size), windows=windows, causal=causal,
        input_scale=embedding_scale(settings, target), output_scale=settings.number("output_multiplier", 1.0),
        **layer_fields(settings, target, head_dim, target.max_positions), **_walk(settings, architecture, hidden),
    )  # fmt: skip
    _check_target(settings, result, target)
    return result


def not_read(settings: Settings) -> set[str]:
    """Tensors that a head may have and that are not read. DSpark's confidence chooses how many drafts are checked;
    `specjax.engine.draft_policy` does so here."""
    return {MASK, OFFSETS, "confidence_head.proj.weight", "confidence_head.proj.bias"} | copies(settings)


def copies(settings: Settings) -> set[str]:
    """Tensors that DeepSpec copies from the target."""
    return {EMBED, HEAD} if architecture_of(settings) in DEEPSPEC else set()


def architecture_of(settings: Settings) -> str:
    """`speculators_model_type`, else the architecture; empty if there is neither."""
    named = settings.get("architectures")
    return str(settings.get("speculators_model_type") or (named[0] if isinstance(named, list) and named else ""))


def _architecture(settings: Settings) -> str:
    if not isinstance(architectures := settings.optional("architectures", []), list):
        raise invalid("architectures", architectures, "a list of names")
    architecture = architecture_of(settings)
    if architecture.startswith("Gemma4") and architecture not in FROM_ANCHOR:
        raise unsupported("architectures", architecture, listed((*FROM_ANCHOR, "dspark")))
    if (projector := settings.optional("projector_type", "dflash")) not in ("dflash", "dflash2", "dspark"):
        raise unsupported("projector_type", projector, "dflash, dflash2, dspark")
    return "dflash2" if projector == "dflash2" else architecture


def _from_anchor(settings: Settings, architecture: str, given: bool | None) -> bool:
    stated = (
        settings.boolean("sample_from_anchor") if "sample_from_anchor" in settings else FROM_ANCHOR.get(architecture)
    )
    if given is None and stated is None:
        name = repr(architecture) if architecture else "no architectures"
        problem = f"is needed: config.json has no sample_from_anchor, and {name} does not imply it"
        meaning = "false: the block's first slot, the root, drafts nothing; true: it drafts the next token"
        raise ParameterError("sample_from_anchor", f"{problem}; {meaning}", "Block")
    return bool(stated) if given is None else given


def _attention(settings: Settings, layers: int, architecture: str) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """The window of each layer, and whether its block is causal. Without ``layer_types`` windows are Qwen3's.

    As in vLLM, a layer with a window is causal unless the file says otherwise; DFlash2 and files with ``use_swa`` are
    not causal. speculators' ``sliding_window_non_causal`` is for layers with a window, other keys are for all layers.
    """
    by_swa = settings.boolean("use_swa") and "layer_types" not in settings
    if by_swa:
        windows: tuple[int | None, ...] = (settings.integer("swa_window_size"),) * layers
    else:
        windows = typed_windows(settings, layers) if "layer_types" in settings else late_windows(settings, layers)
    said = next((key for key in ("is_causal", "causal", "causal_head") if key in settings), None)
    non_causal = by_swa or architecture in DFLASH2
    if "sliding_window_non_causal" in settings:
        non_causal = settings.boolean("sliding_window_non_causal")
    causal = (settings.boolean(said) if said else window is not None and not non_causal for window in windows)
    return windows, tuple(causal)


def typed_windows(settings: Settings, layers: int) -> tuple[int | None, ...]:
    """Windows by ``layer_types``, which ``use_sliding_window`` must not contradict."""
    windows = windows_of(settings, layers)
    if any(windows) and not settings.boolean("use_sliding_window", True):
        raise unsupported("use_sliding_window", False, f"true where layer_types has {LAYER_TYPES[0]}")
    return windows


def read_layers(written: Mapping[str, Any], shift: Callable[[str, Sequence[int]], int]) -> dict[str, tuple[int, ...]]:
    """By key, the target's layers of a list of ids; ``shift`` is subtracted."""
    for key, ids in written.items():
        if not isinstance(ids, list | tuple) or not ids or not all(type(value) is int for value in ids):
            raise invalid(key, ids, "a list of integers")
    return {key: tuple(value - shift(key, ids) for value in ids) for key, ids in written.items()}


def are_layers(layers: Sequence[int], count: int) -> bool:
    return 0 < len(set(layers)) == len(layers) and all(0 <= layer < count for layer in layers)


def _features(settings: Settings, target: ModelConfig, layers: int) -> tuple[int, ...]:
    """The target's layers whose outputs the head reads. speculators' ids are of layers' inputs; z-lab's default depends
    on the number of draft layers."""
    outputs, inputs, last = "target_layer_ids", "aux_hidden_state_layer_ids", target.num_layers - 1
    written = {key: settings[key] for key in (outputs, inputs) if key in settings}
    written = written or {outputs: default_block_features(target.num_layers, layers)}
    read = read_layers(written, lambda key, ids: key == inputs)
    for key in read:
        if not are_layers(read[key], last):
            needed = f"the outputs of different layers from 0 to {last - 1} of the target"
            raise invalid(key, list(written[key]), f"{needed} (not its embedding or last layer)")
    if len(set(read.values())) > 1:
        needed = f"the inputs of the layers after {outputs} {written[outputs]}, or absent"
        raise invalid(inputs, written[inputs], needed)
    return next(iter(read.values()))


def default_block_features(target_layers: int, layers: int) -> tuple[int, ...]:
    """z-lab's choice of layers for a head of `layers` layers. 36, 5 -> 1, 9, 17, 25, 33."""
    if layers == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers))


def _walk(settings: Settings, architecture: str, hidden: int) -> dict[str, Any]:
    """Fields of `BlockConfig` for DSpark's and DFlash2's walks."""
    if architecture in DFLASH2 or "selector_rank" in settings:
        taps, size = settings.integer("conv_kernel_size", 2), settings.integer("conv_group_size", 16)
        if hidden % size:
            raise invalid("conv_group_size", size, f"a divisor of hidden_size ({hidden})")
        rank, candidates = settings.integer("selector_rank", 256), settings.integer("selector_top_k", 16)
        at_most(candidates, MAX_CANDIDATES, "selector_top_k", "published heads have 16")
        fields = {"rank": rank, "candidates": candidates}
        return fields | {"walk": "selector", "conv_taps": taps, "conv_groups": hidden // size}
    if not settings.get("markov_rank"):
        return {}
    walk = settings.optional("markov_head_type", "vanilla")
    if walk not in MARKOV_HEADS:
        raise unsupported("markov_head_type", walk, ", ".join(MARKOV_HEADS))
    return {"walk": cast(Walk, walk), "rank": settings.integer("markov_rank")}


def _check_target(settings: Settings, head: BlockConfig, target: ModelConfig) -> None:
    sizes = {"target_hidden_size": target.hidden_size, "num_target_layers": target.num_layers}
    for key, value in {**sizes, "vocab_size": target.vocab_size}.items():
        agree(settings, key, value, f"the target's is {value}; it has another target")
    if head.hidden_size != target.hidden_size and not (head.own_embedding and head.own_head):
        wide = f"{head.hidden_size}; without an embedding and an output layer of its own the target's width is needed"
        raise CheckpointError(f"config.json: hidden_size is {wide}: {target.hidden_size}")


def agree(settings: Settings, key: str, value: int, reason: str) -> None:
    """Raises CheckpointError if the file states another value than the one needed for a reason."""
    if (stated := settings.optional(key, value)) != value:
        raise CheckpointError(f"config.json: {key} is {stated!r:.80}, and {reason}")
