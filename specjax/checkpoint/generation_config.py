"""generation_config.json: the ids that end a text, and how the publisher samples. What cannot be done is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from specjax.checkpoint.files import CheckpointError
from specjax.checkpoint.weights import ModelFiles, read_json

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
