"""The rotary embedding that a config.json describes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specjax.checkpoint.files import CheckpointError, listed
from specjax.checkpoint.values import flag, given, number, numbers, require
from specjax.config import RopeConfig

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
# Where transformers 5 and 4 say it.
ROPE_SECTIONS = ("rope_parameters", "rope_scaling")
BY_LAYER = ("sliding_attention", "full_attention")


def rope(
    hf_config: Mapping[str, Any], max_positions: int, *, head_dim: int, context_length: int | None = None,
    partial: bool = False, theta: float = 10000.0,
) -> RopeConfig:  # fmt: skip
    """The rotary embedding that ``hf_config`` describes.

    transformers 5 keeps everything in ``rope_parameters``; 4 has ``rope_theta`` beside an optional ``rope_scaling``.
    Where several of the three are there, each must be supported, and they must agree.

    Args:
      max_positions: the length that scaling starts from where the config does not say.
      head_dim: channels of a head, which longrope has a divisor for each two of.
      context_length: the longest text; longrope's long divisors serve one beyond the original length. None:
        ``max_positions``.
      partial: whether models of this kind may rotate a part of each head.
      theta: what an absent ``rope_theta`` means.
    """
    sections = {key: hf_config[key] for key in ROPE_SECTIONS if hf_config.get(key) not in (None, {})}
    share = _partial(hf_config, sections, allowed=partial)
    lengths = {"max": max_positions, "served": context_length or max_positions}
    scalings = {key: _scaling(key, section, hf_config, lengths) for key, section in sections.items()}
    thetas = {
        f"{place}rope_theta": number(holder, "rope_theta")
        for place, holder in {"": hf_config, **{f"{key}.": section for key, section in sections.items()}}.items()
        if holder.get("rope_theta") is not None
    }
    for meant, said in ((scalings, sections), (thetas, thetas)):
        if len(set(meant.values())) > 1:
            values = " and ".join(f"{key} is {value!r:.200}" for key, value in said.items())
            raise CheckpointError(f"config.json: {values}; they must mean the same, or only one of them may be there")
    found = replace(
        next(iter(scalings.values()), RopeConfig()), theta=next(iter(thetas.values()), theta), partial=share
    )
    pairs = found.width(head_dim) // 2
    if found.scaling == "longrope" and len(found.divisors) != pairs:
        raise CheckpointError(f"config.json: longrope has {len(found.divisors)} factors; {pairs} are needed")
    return found


def longest(rope: RopeConfig, max_positions: int) -> int:
    """The longest text, where ``max_position_embeddings`` says ``max_positions``: dynamic and yarn scaling reach
    further than the length that they start from."""
    if rope.scaling in ("dynamic", "yarn"):
        return max(max_positions, int(rope.original_max_position * rope.factor))
    return max_positions


def _partial(hf_config: Mapping[str, Any], sections: Mapping[str, Any], *, allowed: bool) -> float:
    share = 1.0
    for holder in (hf_config, *(section for section in sections.values() if isinstance(section, Mapping))):
        value = given(holder, "partial_rotary_factor", 1)
        if value != 1 and not (allowed and type(value) in (int, float) and 0 < value < 1):
            supported = "a number above 0, at most 1" if allowed else "1.0"
            raise CheckpointError(f"config.json: partial_rotary_factor is {value!r:.80}; supported: {supported}")
        share = min(share, float(value))
    return share


def _scaling(name: str, section: Any, hf_config: Mapping[str, Any], lengths: Mapping[str, int]) -> RopeConfig:
    """How the section ``name`` stretches the rotary embedding; its theta is left out."""
    known = ", ".join(ROPE_TYPES)

    def refuse(problem: str) -> CheckpointError:
        return CheckpointError(f"config.json: {name} {problem}")

    if not isinstance(section, Mapping):
        raise refuse(f"is {section!r:.80}; it must be an object or null")
    if by_layer := [key for key, value in section.items() if isinstance(value, Mapping)]:
        raise refuse(f"is given by layer type ({listed(by_layer)}); supported: one for all layers")
    types = [section[key] for key in ("rope_type", "type") if section.get(key) is not None]
    if unknown := [each for each in types if each not in (*ROPE_TYPES, "su")]:
        raise refuse(f"has rope type {unknown[0]!r:.80}; supported: {known}")
    if len(set(types)) > 1:
        raise refuse(f"has rope_type {types[0]!r} and type {types[1]!r}; give one of them")
    if not types and (factor := given(section, "factor", 1)) != 1:
        raise refuse(f"has factor {factor!r:.80} and no rope_type; give one of: {known}")
    kind = types[0] if types else "default"
    if kind in ("su", "yarn") and "long_factor" in section:  # as the first Phi-3 models called it
        kind = "longrope"
    try:
        return _PARSERS[kind](section, hf_config, lengths)
    except KeyError as error:
        raise refuse(f"of type {kind} has no {error.args[0]!r}") from error


def _default(section: Mapping[str, Any], hf_config: Mapping[str, Any], lengths: Mapping[str, int]) -> RopeConfig:
    return RopeConfig()


def _linear(section: Mapping[str, Any], hf_config: Mapping[str, Any], lengths: Mapping[str, int]) -> RopeConfig:
    factor = number(section, "factor")
    return RopeConfig() if factor == 1 else RopeConfig(scaling="linear", factor=factor)


def _dynamic(section: Mapping[str, Any], hf_config: Mapping[str, Any], lengths: Mapping[str, int]) -> RopeConfig:
    factor = number(section, "factor")
    return RopeConfig(scaling="dynamic", factor=factor, original_max_position=lengths["max"])


def _llama3(section: Mapping[str, Any], hf_config: Mapping[str, Any], lengths: Mapping[str, int]) -> RopeConfig:
    factor, low, high = (number(section, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = require(section, "original_max_position_embeddings", lengths["max"])
    if factor == 1:
        return RopeConfig()
    return RopeConfig(
        scaling="llama3", factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_position=original
    )


def _yarn(section: Mapping[str, Any], hf_config: Mapping[str, Any], lengths: Mapping[str, int]) -> RopeConfig:
    original = _original(section, hf_config, lengths)
    factor = number(section, "factor", lengths["max"] / original)
    scale, scale_all = (section.get(key) for key in ("mscale", "mscale_all_dim"))
    magnitude = yarn_magnitude(factor)
    if section.get("attention_factor") is not None:
        magnitude = number(section, "attention_factor")
    elif scale and scale_all:
        scale, scale_all = number(section, "mscale"), number(section, "mscale_all_dim")
        magnitude = yarn_magnitude(factor, scale) / yarn_magnitude(factor, scale_all)
    return RopeConfig(
        scaling="yarn", factor=factor, original_max_position=original, magnitude=magnitude,
        beta_fast=number(section, "beta_fast", 32.0), beta_slow=number(section, "beta_slow", 1.0),
        truncate="truncate" not in section or flag(section, "truncate"),
    )  # fmt: skip


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """YaRN's factor on cos and sin, or with ``mscale_all_dim`` the root of DeepSeek's factor on scores."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(section: Mapping[str, Any], hf_config: Mapping[str, Any], lengths: Mapping[str, int]) -> RopeConfig:
    original = _original(section, hf_config, lengths)
    factor = number(section, "factor", lengths["max"] / original)
    magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    if section.get("attention_factor") is not None:
        magnitude = number(section, "attention_factor")
    divisors = {length: numbers(section, f"{length}_factor") for length in ("long", "short")}
    return RopeConfig(
        scaling="longrope", factor=factor, original_max_position=original, magnitude=magnitude,
        divisors=divisors["long" if lengths["served"] > original else "short"],
    )  # fmt: skip


def _original(section: Mapping[str, Any], hf_config: Mapping[str, Any], lengths: Mapping[str, int]) -> int:
    """Phi-3 keeps the original length beside the section."""
    key = "original_max_position_embeddings"
    return require(hf_config if hf_config.get(key) is not None else section, key, lengths["max"])


_PARSERS = {
    "su": _longrope, "default": _default, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn,
    "longrope": _longrope,
}  # fmt: skip


def hf_rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """``rope_scaling`` of a config.json for ``rope``: the inverse of reading."""
    if rope.scaling == "none":
        return None
    found: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling in ("linear", "dynamic"):
        found["type"] = rope.scaling  # SafeAILab/EAGLE `cnets.py` reads this name, and knows these two kinds
    else:
        found["original_max_position_embeddings"] = rope.original_max_position
    if rope.scaling == "llama3":
        found |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.scaling in ("yarn", "longrope"):
        found["attention_factor"] = rope.magnitude
    if rope.scaling == "yarn":
        found |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
    if rope.scaling == "longrope":
        found |= {key: list(rope.divisors) for key in ("long_factor", "short_factor")}
    return found
