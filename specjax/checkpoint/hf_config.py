"""A Hugging Face config.json to a ``ModelConfig``, and generation_config.json: the ids that end a text, and how the
publisher samples. Whatever is not implemented is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from specjax.checkpoint.files import CheckpointError, listed
from specjax.checkpoint.weights import ModelFiles, read_json
from specjax.config import ModelConfig, RopeConfig
from specjax.models import ARCHITECTURES

DTYPES = ("float32", "bfloat16", "float16")
ROPE_TYPES = ("default", "linear", "llama3")
# Where transformers 5 and 4 say it.
ROPE_SECTIONS = ("rope_parameters", "rope_scaling")
# Key, the value that is implemented (as is null), and what to do about another.
_ONLY = (
    ("hidden_act", "silu", "silu"),
    ("quantization_config", {}, "none; use the float32, bfloat16 or float16 checkpoint that it was made from"),
    # Mistral 7B v0.1 has a window of 4096, later ones null; Llama configs have no such key.
    ("sliding_window", 0, "null (attention over the whole context)"),
)


def model_config(hf_config: Mapping[str, Any], *, dtype: str = "auto", platform: str | None = None) -> ModelConfig:
    """Describe the model that ``hf_config`` describes.

    Args:
      hf_config: a parsed config.json, as transformers 4 or 5 writes it.
      dtype: float32, bfloat16, float16, or auto: float32 on a CPU, else the type the checkpoint names.
      platform: ``jax.default_backend()`` if None; only auto looks at it.

    Raises:
      CheckpointError: an architecture, activation, rope type, quantisation or dtype that is not implemented, or a
        key that is missing.
    """
    architectures = hf_config.get("architectures") or []
    architecture = next((name for name in architectures if name in ARCHITECTURES), None)
    if architecture is None:
        raise CheckpointError(
            f"config.json: architectures is {architectures or 'absent'}; supported: {listed(ARCHITECTURES)}"
        )
    if code := hf_config.get("auto_map"):
        named = listed(code) if isinstance(code, Mapping) else f"{code!r:.80}"
        raise CheckpointError(
            f"config.json: auto_map ({named}) says that the model is computed by Python code of its own, which is not "
            f"run here and may differ from {architecture}; remove the key if the code is that of transformers"
        )
    hf_config = dict(ARCHITECTURES[architecture].absent) | dict(hf_config)
    refuse_unsupported(hf_config)
    heads = require(hf_config, "num_attention_heads")
    hidden = require(hf_config, "hidden_size")
    kv_heads = require(hf_config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})"
        )
    max_positions = require(hf_config, "max_position_embeddings", 2048)
    return ModelConfig(
        family=ARCHITECTURES[architecture].family,
        vocab_size=require(hf_config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=require(hf_config, "intermediate_size"),
        num_layers=require(hf_config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=require(hf_config, "head_dim", hidden // heads),
        norm_epsilon=number(hf_config, "rms_norm_eps", 1e-6),
        rope=rope(hf_config, max_positions),
        max_positions=max_positions,
        tied_embeddings=flag(hf_config, "tie_word_embeddings"),
        attention_bias=flag(hf_config, "attention_bias"),
        mlp_bias=flag(hf_config, "mlp_bias"),
        dtype=_dtype(hf_config, dtype, platform),
    )


def refuse_unsupported(hf_config: Mapping[str, Any]) -> None:
    """Refuse an activation, quantisation or attention window that no model here has."""
    for key, only, supported in _ONLY:
        if (value := given(hf_config, key, only)) != only:
            raise CheckpointError(f"config.json: {key} is {value!r:.80}; supported: {supported}")


def rope(hf_config: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """The rotary embedding that ``hf_config`` describes; ``max_positions`` is what llama3 scaling starts from.

    transformers 5 keeps everything in ``rope_parameters``; 4 has ``rope_theta`` beside an optional ``rope_scaling``.
    Where several of the three are there, each must be supported, and they must agree.
    """
    sections = {key: hf_config[key] for key in ROPE_SECTIONS if hf_config.get(key) not in (None, {})}
    scalings = {key: _scaling(key, section, max_positions) for key, section in sections.items()}
    thetas = {
        f"{place}rope_theta": number(holder, "rope_theta")
        for place, holder in {"": hf_config, **{f"{key}.": section for key, section in sections.items()}}.items()
        if holder.get("rope_theta") is not None
    }
    for meant, said in ((scalings, sections), (thetas, thetas)):
        if len(set(meant.values())) > 1:
            values = " and ".join(f"{key} is {value!r:.200}" for key, value in said.items())
            raise CheckpointError(f"config.json: {values}; they must mean the same, or only one of them may be there")
    for holder in (hf_config, *sections.values()):
        if (partial := given(holder, "partial_rotary_factor", 1)) != 1:
            raise CheckpointError(f"config.json: partial_rotary_factor is {partial!r:.80}; supported: 1.0")
    scaling = next(iter(scalings.values()), RopeConfig())
    return replace(scaling, theta=next(iter(thetas.values()), 10000.0))


def _scaling(name: str, section: Any, max_positions: int) -> RopeConfig:
    """How the section ``name`` stretches the rotary embedding; its theta is left out."""
    known = ", ".join(ROPE_TYPES)

    def refuse(problem: str) -> CheckpointError:
        return CheckpointError(f"config.json: {name} {problem}")

    if not isinstance(section, Mapping):
        raise refuse(f"is {section!r:.80}; it must be an object or null")
    if by_layer := [key for key, value in section.items() if isinstance(value, Mapping)]:
        raise refuse(f"is given by layer type ({listed(by_layer)}); supported: one for all layers")
    types = [section[key] for key in ("rope_type", "type") if section.get(key) is not None]
    if unknown := [each for each in types if each not in ROPE_TYPES]:
        raise refuse(f"has rope type {unknown[0]!r:.80}; supported: {known}")
    if len(set(types)) > 1:
        raise refuse(f"has rope_type {types[0]!r} and type {types[1]!r}; give one of them")
    if not types and (factor := given(section, "factor", 1)) != 1:
        raise refuse(f"has factor {factor!r:.80} and no rope_type; give one of: {known}")
    if not types or types[0] == "default":
        return RopeConfig()
    keys = ("factor",) if types[0] == "linear" else ("factor", "low_freq_factor", "high_freq_factor")
    try:
        found: dict[str, Any] = {key: number(section, key) for key in keys}
    except KeyError as error:
        raise refuse(f"of type {types[0]} has no {error.args[0]!r}") from error
    if types[0] == "llama3":
        found["original_max_position"] = require(section, "original_max_position_embeddings", max_positions)
    return RopeConfig() if found["factor"] == 1 else RopeConfig(scaling=types[0], **found)


def _dtype(hf_config: Mapping[str, Any], dtype: str, platform: str | None) -> str:
    if dtype in DTYPES:
        return dtype
    if dtype != "auto":
        raise CheckpointError(f"dtype {dtype!r} is not one of: auto, {', '.join(DTYPES)}")
    if platform is None:
        import jax

        platform = jax.default_backend()
    if platform == "cpu":  # bfloat16 products are slower than float32 ones there
        return "float32"
    stored = str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32").removeprefix("torch.")
    if stored not in DTYPES:
        raise CheckpointError(f"config.json: torch_dtype is {stored!r}; set dtype to one of: {', '.join(DTYPES)}")
    return stored


def given(section: Mapping[str, Any], key: str, default: Any) -> Any:
    """``section[key]``, where null means the default, as transformers reads it."""
    value = section.get(key)
    return default if value is None else value


def require(section: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """The positive integer ``section[key]``."""
    value = given(section, key, default)
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"config.json: {key} is {value!r:.80}; a positive integer is needed")
    return value


def number(section: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """The positive number ``section[key]``; a ``KeyError`` if it is absent and has no default."""
    value = given(section, key, default)
    if value is None:
        raise KeyError(key)
    # JSON as Python reads it has Infinity and integers that no float holds.
    if type(value) not in (int, float) or not 0 < value < 1e300:
        raise CheckpointError(f"config.json: {key} is {value!r:.80}; a positive number is needed")
    return float(value)


def flag(section: Mapping[str, Any], key: str) -> bool:
    """``section[key]``; absent is false."""
    value = given(section, key, False)
    if type(value) is not bool:
        raise CheckpointError(f"config.json: {key} is {value!r:.80}; true or false is needed")
    return value


# transformers keeps what a model says about generation here, and in config.json where this file is absent.
GENERATION_NAME = "generation_config.json"
# Keys that change the text and have no counterpart here, with the values that change nothing; null never does.
# Left out: keys that only bound the length (max_length), choose caches or outputs, or speed up (assistant models), and
# those of beam search beside `num_beams`.
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


def stop_token_ids(files: ModelFiles, tokenizer: Any = None, vocab_size: int | None = None) -> tuple[int, ...]:
    """The ids that end a text: ``eos_token_id`` of generation_config.json and of config.json, and the tokenizer's
    end-of-sequence token; each once, in this order; may be empty.

    Args:
      files: from ``resolve``.
      tokenizer: from ``load_tokenizer``; None: only what the files say.
      vocab_size: of the model, which ids of the files must be below; a tokenizer's id that is not can never be drawn,
        and is left out. None: not checked.

    Raises:
      CheckpointError: an ``eos_token_id`` that is neither null, a token id, nor a list of token ids.
    """
    limit = math.inf if vocab_size is None else vocab_size
    found: list[int] = []
    for name, section in ((GENERATION_NAME, _generation(files) or {}), ("config.json", files.config)):
        value = section.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token in ids:
            if type(token) is not int or not 0 <= token < limit:
                known = "at least 0" if vocab_size is None else f"from 0 to {vocab_size - 1}"
                raise CheckpointError(
                    f"{files.folder / name}: eos_token_id is {value!r:.80}; null, a token id {known}, or a list of "
                    "token ids is needed"
                )
        found += ids
    own = getattr(tokenizer, "eos_token_id", None)
    if isinstance(own, int) and 0 <= own < limit:
        found.append(own)
    return tuple(dict.fromkeys(found))


def sampling_defaults(files: ModelFiles) -> dict[str, float | int]:
    """How the model's publisher samples, as generation_config.json says it, by the names of ``SamplingParams``:
    temperature, top_p, top_k, min_p and repetition_penalty, those that are there.

    ``do_sample: false`` means greedy, as transformers reads it (SGLang does not look at it): then the temperature is 0
    and top_p, top_k and min_p, which change nothing, are left out. An absent ``do_sample`` says nothing.

    Raises:
      CheckpointError: a value out of range, or a key that changes the text in a way that is not supported.
    """
    generation = _generation(files)
    section, file = (files.config, "config.json") if generation is None else (generation, GENERATION_NAME)

    def wrong(key: str, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{files.folder / file}: {key} is {section[key]!r:.80}{problem}. Change the file, or leave it unread with "
            "sampling_defaults='openai'"
        )

    for key, neutral in NEUTRAL.items():
        value = section.get(key)
        # False is not 0.
        if value is not None and (isinstance(value, bool), value) not in [(isinstance(n, bool), n) for n in neutral]:
            known = f"{neutral[0]!r} or null" if neutral else "null"
            raise wrong(key, f", which changes the text and is not supported; supported: {known}")
    if generation is None:
        return {}
    found: dict[str, float | int] = {}
    for key, (is_valid, needed) in _RANGES.items():
        if (value := generation.get(key)) is None:
            continue
        # abs() < inf, not isfinite(): an integer may be too large to be a float at all
        if type(value) not in (int, float) or not abs(value) < math.inf or not is_valid(value):
            raise wrong(key, f"; {needed} is needed")
        found[key] = (int(value) or -1) if key == "top_k" else float(value)
    samples = generation.get("do_sample")
    if samples is not None and type(samples) is not bool:
        raise wrong("do_sample", "; true, false or null is needed")
    if samples is False:
        return {"temperature": 0.0} | {key: found[key] for key in ("repetition_penalty",) if key in found}
    return found


_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda value: 0 <= value <= 1e4, "a number from 0 (greedy) to 10000"),
    "top_p": (lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
    "top_k": (lambda value: -1 <= value < 2**31 and value == int(value), "an integer, 0 or -1 for all tokens,"),
    "min_p": (lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "repetition_penalty": (lambda value: 0 < value <= 2, "a number above 0 and at most 2"),
}


def _generation(files: ModelFiles) -> Mapping[str, Any] | None:
    file = files.folder / GENERATION_NAME
    return read_json(file, files.name) if file.is_file() else None
