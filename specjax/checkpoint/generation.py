"""What a model says about generation: the ids that end its texts, and how its publisher samples.

transformers keeps this in generation_config.json, and in config.json where that file is absent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from specjax.checkpoint.errors import CheckpointError
from specjax.checkpoint.folder import ModelFiles, read_json

GENERATION_NAME = "generation_config.json"
OPENAI_FLAG = "--sampling-defaults openai"

# Keys that change the text and have no counterpart here, with the values that change nothing; null never does.
# Keys that only bound the length (max_length), choose caches or outputs, or speed up (assistant models) are left out,
# and so is what only beam search reads, which `num_beams` stands for.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "exponential_decay_length_penalty": (),
    "force_bos_token_to_be_generated": (False,),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_decoder_ids": ([],),
    "forced_eos_token_id": (),
    "guidance_scale": (1.0,),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0.0,),
    "sequence_bias": ({}, []),
    "stop_strings": ([], ""),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "top_h": (1.0,),
    "typical_p": (1.0,),
    "watermarking_config": ({},),
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
    found: list[int] = []
    for name, section in ((GENERATION_NAME, _generation(files) or {}), ("config.json", files.config)):
        value = section.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token in ids:
            if type(token) is not int or token < 0 or (vocab_size is not None and token >= vocab_size):
                known = "at least 0" if vocab_size is None else f"from 0 to {vocab_size - 1}"
                raise CheckpointError(
                    f"{files.folder / name}: eos_token_id is {value!r:.80}; null, a token id {known}, or a list of "
                    "token ids is needed"
                )
        found += ids
    own = getattr(tokenizer, "eos_token_id", None)
    if isinstance(own, int) and own >= 0 and (vocab_size is None or own < vocab_size):
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
    name = "config.json" if generation is None else GENERATION_NAME
    _refuse_unsupported(files.config if generation is None else generation, f"{files.folder / name}")
    if generation is None:
        return {}
    found: dict[str, float | int] = {}
    for key, (is_valid, needed) in _RANGES.items():
        value = generation.get(key)
        if value is None:
            continue
        # abs() < inf, not isfinite(): an integer may be too large to be a float at all
        if type(value) not in (int, float) or not abs(value) < math.inf or not is_valid(value):
            raise CheckpointError(
                f"{files.folder / name}: {key} is {value!r:.80}; {needed} is needed. Mend the file, or leave it unread "
                f"with {OPENAI_FLAG}"
            )
        found[key] = (int(value) or -1) if key == "top_k" else float(value)
    samples = generation.get("do_sample")
    if samples is not None and type(samples) is not bool:
        raise CheckpointError(f"{files.folder / name}: do_sample is {samples!r:.80}; true, false or null is needed")
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


def _refuse_unsupported(section: Mapping[str, Any], where: str) -> None:
    for key, neutral in NEUTRAL.items():
        value = section.get(key)
        if value is not None and not any(value == each and _kind(value) == _kind(each) for each in neutral):
            what = f"supported: {neutral[0]!r} or null" if neutral else "supported: null"
            raise CheckpointError(
                f"{where}: {key} is {value!r:.80}, which changes the text and is not supported; {what}. Change the "
                f"file, or leave such keys unread with {OPENAI_FLAG}"
            )


def _kind(value: Any) -> type:
    """0 and 0.0 are one kind of value, False is another."""
    return float if type(value) is int else type(value)


def _generation(files: ModelFiles) -> Mapping[str, Any] | None:
    file = files.folder / GENERATION_NAME
    return read_json(file, files.name) if file.is_file() else None
