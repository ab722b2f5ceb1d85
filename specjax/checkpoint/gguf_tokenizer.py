"""A tokenizer from the metadata of a GGUF file, written as tokenizer.json and tokenizer_config.json.

A GGUF holds a vocabulary and merges, but only the *name* of the rule that cuts a text into words before merging.
The rules here are those of the models' own tokenizer.json files; an unknown name is refused, since a wrong
rule gives other tokens and no error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specjax.checkpoint.errors import CheckpointError, listed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# tokenizer.ggml.token_type
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class WordRule:
    """How a byte-level BPE tokenizer cuts a text into words.

    Attributes:
      pattern: a regular expression for a word; None is GPT-2's, which is built into the byte-level step.
      single_digits: digits are cut off one by one first.
      whole_words: a word that is in the vocabulary is one token, whatever the merges say.
      add_bos: whether texts start with the bos token where the file does not say.
      nfc: texts are normalised to NFC.
    """

    pattern: str | None = None
    single_digits: bool = False
    whole_words: bool = False
    add_bos: bool = False
    nfc: bool = False


# tokenizer.ggml.pre
WORD_RULES: dict[str, WordRule] = {
    **dict.fromkeys(("gpt-2", "olmo", "phi-2"), WordRule()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), WordRule(single_digits=True)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe"), WordRule(_LLAMA3, whole_words=True, add_bos=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), WordRule(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), WordRule(_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"), nfc=True)),
}

_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def write_tokenizer(metadata: Mapping[str, Any], folder: Path, label: str) -> dict[str, Any]:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json into ``folder``.

    Args:
      metadata: key -> value of the GGUF file.
      folder: exists.
      label: what error messages call the file.

    Returns:
      ``bos_token_id``, ``eos_token_id`` (a list where the file names a second stop token), ``pad_token_id``,
      ``unknown_token_id``, those that the file has.

    Raises:
      CheckpointError: a tokenizer model or word rule that is not in the tables.
    """
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens") or []
    found = {key: metadata.get(f"tokenizer.ggml.{key}") for key in _SPECIAL_KEYS.values()}
    special: dict[str, Any] = {key: int(i) for key, i in found.items() if i is not None and i < len(tokens)}
    build_tokenizer(metadata, label).save(str(folder / "tokenizer.json"))
    names = {name: tokens[special[key]] for name, key in _SPECIAL_KEYS.items() if key in special}
    config: dict[str, Any] = {
        # The class that takes tokenizer.json as it is; a model's own class would rebuild parts of it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(metadata.get(f"{metadata.get('general.architecture')}.context_length", 10**9)),
        **names,
    }
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    for file, value in (("tokenizer_config.json", config), ("special_tokens_map.json", names)):
        (folder / file).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    turn_end = metadata.get("tokenizer.ggml.eot_token_id")
    if turn_end is not None and "eos_token_id" in special and turn_end != special["eos_token_id"]:
        special["eos_token_id"] = [special["eos_token_id"], int(turn_end)]
    return special


def build_tokenizer(metadata: Mapping[str, Any], label: str) -> Tokenizer:
    """The tokenizer that the metadata describes.

    Raises:
      CheckpointError: as ``write_tokenizer``.
    """
    from tokenizers import AddedToken

    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentence_piece}
    if kind not in builders:
        raise CheckpointError(
            f"{label}: tokenizer.ggml.model is {kind!r}; supported: {listed(builders)}. Use the Hugging Face folder of "
            "this model, which has a tokenizer.json"
        )
    tokenizer, add_bos = builders[kind](metadata, label)
    _add_template(tokenizer, metadata, add_bos)
    types = metadata.get("tokenizer.ggml.token_type") or []
    kinds = list(zip(metadata["tokenizer.ggml.tokens"], types, strict=False))
    # The unknown token of a SentencePiece vocabulary is special there too.
    control = [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind in (UNKNOWN, CONTROL)]
    plain = [AddedToken(token, special=False, normalized=False) for token, kind in kinds if kind == USER_DEFINED]
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(plain)
    return tokenizer


def _byte_level(metadata: Mapping[str, Any], label: str) -> tuple[Tokenizer, bool]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = metadata.get("tokenizer.ggml.pre")
    if name not in WORD_RULES:
        raise CheckpointError(
            f"{label}: tokenizer.ggml.pre is {name!r}; supported: {listed(WORD_RULES, 99)}. Use the Hugging Face "
            "folder of this model, which has a tokenizer.json"
        )
    rule = WORD_RULES[name]
    vocabulary = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or []]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule.whole_words))
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if rule.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rule.pattern:
        steps.append(pre_tokenizers.Split(Regex(rule.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.add_bos


def _sentence_piece(metadata: Mapping[str, Any], label: str) -> tuple[Tokenizer, bool]:
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise CheckpointError(
            f"{label}: tokenizer.ggml.scores must hold one score per token, and it is "
            f"{'absent' if scores is None else f'{len(scores)} long'}. Use the Hugging Face folder of this model"
        )
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(tokens, scores),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = "\u2581"
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    before = [normalizers.Prepend(space)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", space)])
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return tokenizer, True


def _merges(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that a SentencePiece vocabulary implies.

    SentencePiece joins, of all neighbours that are a token together, those with the best score. That is BPE with
    every way to split a token into two tokens as a merge, best score first.
    """
    ids = {token: i for i, token in enumerate(tokens)}
    splits = (
        (-score, ids[token], ids[left], left, right)
        for token, score in zip(tokens, scores, strict=True)
        for left, right in ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        if left in ids and right in ids
    )
    return [(left, right) for *_, left, right in sorted(splits)]


def _add_template(tokenizer: Tokenizer, metadata: Mapping[str, Any], add_bos: bool) -> None:
    """Add bos and eos around a text if the file, or else its kind of tokenizer, says so."""
    from tokenizers import processors

    def added(key: str, default: bool) -> list[int]:
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return [token] if token is not None and metadata.get(f"tokenizer.ggml.add_{key}_token", default) else []

    tokens = metadata["tokenizer.ggml.tokens"]
    bos, eos = added("bos", add_bos), added("eos", False)
    before, after = [tokens[i] for i in bos], [tokens[i] for i in eos]
    steps: list[Any] = [processors.ByteLevel(trim_offsets=True)] if metadata["tokenizer.ggml.model"] == "gpt2" else []
    if bos or eos:
        template = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B", *after],
            special_tokens=[(tokens[i], i) for i in bos + eos],
        )
        steps.append(template)
    if steps:
        tokenizer.post_processor = steps[0] if len(steps) == 1 else processors.Sequence(steps)
