"""A tokenizer from the metadata of a GGUF file, written as tokenizer.json and tokenizer_config.json.

A GGUF holds a vocabulary and merges, but only the *name* of the rule that cuts a text into words before merging.
The rules here are those of the models' own tokenizer.json files; an unknown name is refused, since a wrong
rule gives other tokens and no error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
    """How a byte-level BPE tokenizer cuts a text into words."""

    pattern: str | None = None  # a regular expression for a word; None: GPT-2's, built into the byte-level step
    single_digits: bool = False  # digits are cut off one by one first
    whole_words: bool = False  # a word that is in the vocabulary is one token, whatever the merges say
    add_bos: bool = False  # texts start with the bos token where the file does not say
    nfc: bool = False  # texts are normalised to NFC


# tokenizer.ggml.pre
WORD_RULES: dict[str, WordRule] = {
    **dict.fromkeys(("gpt-2", "olmo", "phi-2"), WordRule()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), WordRule(single_digits=True)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe"), WordRule(_LLAMA3, whole_words=True, add_bos=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), WordRule(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), WordRule(_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"), nfc=True)),
}

# Name in the files of transformers -> tokenizer.ggml.*_token_id
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_ADVICE = "Use the Hugging Face folder of this model, which has a tokenizer.json"


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json into ``folder``.

    Returns:
      ``bos_token_id``, ``eos_token_id`` (a list where the file names a second stop token), ``pad_token_id``,
      ``unk_token_id``, those that the file has.
    """
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    found = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL.items()}
    special = {name: int(i) for name, i in found.items() if i is not None and i < len(tokens)}
    names = {name: tokens[i] for name, i in special.items()}
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

    ids: dict[str, Any] = {f"{name}_id": i for name, i in special.items()}
    turn_end = metadata.get("tokenizer.ggml.eot_token_id")
    if turn_end is not None and turn_end != ids.get("eos_token_id", turn_end):
        ids["eos_token_id"] = [ids["eos_token_id"], int(turn_end)]
    return ids


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that the metadata of a GGUF file describes."""
    from tokenizers import AddedToken, processors

    if not (tokens := metadata.get("tokenizer.ggml.tokens")):
        raise CheckpointError(f"it has no tokenizer.ggml.tokens. {_ADVICE}")
    model = metadata.get("tokenizer.ggml.model")
    steps: list[Any] = []
    if model == "gpt2":
        tokenizer, add_bos = _byte_level(metadata, tokens)
        steps.append(processors.ByteLevel(trim_offsets=True))
    elif model == "llama":
        tokenizer, add_bos = _sentence_piece(metadata, tokens), True
    else:
        raise CheckpointError(f"tokenizer.ggml.model is {model!r}; supported: gpt2, llama. {_ADVICE}")

    def added(key: str, default: bool) -> list[tuple[str, int]]:
        """The special token if texts have it at that end, and its id."""
        i = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return [(tokens[i], i)] if i is not None and metadata.get(f"tokenizer.ggml.add_{key}_token", default) else []

    bos, eos = added("bos", add_bos), added("eos", False)
    if bos or eos:
        first, second = ([*dict(bos), text, *dict(eos)] for text in ("$A", "$B"))
        steps.append(processors.TemplateProcessing(single=first, pair=first + second, special_tokens=bos + eos))
    if steps:
        tokenizer.post_processor = processors.Sequence(steps)
    kinds = list(zip(tokens, metadata.get("tokenizer.ggml.token_type") or [], strict=False))
    # The unknown token of a SentencePiece vocabulary is special there too.
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t, kind in kinds if kind in (UNKNOWN, CONTROL)])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, kind in kinds if kind == USER_DEFINED])
    return tokenizer


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether texts start with bos where the file does not say."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = metadata.get("tokenizer.ggml.pre")
    if name not in WORD_RULES:
        raise CheckpointError(f"tokenizer.ggml.pre is {name!r}; supported: {listed(WORD_RULES, 99)}. {_ADVICE}")
    rule = WORD_RULES[name]
    vocabulary = {token: i for i, token in enumerate(tokens)}
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


def _sentence_piece(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = metadata.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.scores has {len(scores)} scores for {len(tokens)} tokens. {_ADVICE}")
    ids = {token: i for i, token in enumerate(tokens)}
    # SentencePiece joins, of all neighbours that are a token together, those with the best score. That is BPE with
    # every way to split a token into two tokens as a merge, best score first.
    splits = (
        (-score, ids[token], ids[left], left, right)
        for token, score in zip(tokens, scores, strict=True)
        for left, right in ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        if left in ids and right in ids
    )
    merges = [(left, right) for *_, left, right in sorted(splits)]
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    space = "\u2581"
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    before = [normalizers.Prepend(space)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", space)])
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return tokenizer
