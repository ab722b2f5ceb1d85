"""Conversion of a GGUF file to a folder in the Hugging Face layout. Quantised matrices keep their blocks (`quantised`).

In order: config.json, weights, tokenizer. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

A GGUF file holds a vocabulary and merges, but only the *name* of the rule that splits a text into words before merging.
The rules here are from the models' own tokenizer.json files. Unknown names are refused, because a wrong rule gives
wrong tokens without an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from specjax.checkpoint.files import CheckpointError, listed, prefixed
from specjax.checkpoint.hf_config import model_config
from specjax.checkpoint.parameters import misfits
from specjax.checkpoint.quantised import BLOCK_TYPES
from specjax.checkpoint.weights import save_shards
from specjax.models import table
from specjax.models.params import Placement, dimensions, placements
from specjax.packages import need
from specjax.progress import progress_bar

if TYPE_CHECKING:
    from gguf import ReaderTensor
    from tokenizers import Tokenizer

# Part of a converted folder's name. Change it when the files written by this module change.
CONVERSION = "v3"

KEPT_TYPES = (*BLOCK_TYPES, "F32", "F16", "BF16")  # other types are dequantised
ROPE_FACTORS = "rope_freqs.weight"
# Metadata that changes the computation of a Llama, with the values that have no effect.
NEUTRAL = {
    **dict.fromkeys(("expert_count", "attention.sliding_window", "attention.scale"), (0,)),
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), (0, 1)),
}
# Metadata with one positive integer, by its key in config.json.
INTEGERS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
}
# general.file_type -> the dtype on a GPU. Quantised files are converted from bfloat16 models.
FILE_DTYPES = {0: "float32", 1: "float16"}


def convert(
    file: Path, folder: Path, *, progress: bool, label: str = "", generation: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Write config.json, generation_config.json, the tokenizer and model.safetensors to an empty folder. ``label`` is
    the file's name in messages. ``generation`` has keys of generation_config.json, which a GGUF file does not have."""
    with prefixed(label := label or str(file)):
        metadata, tensors = _read(file)
        config = hf_config(metadata, tensors)
        special = write_tokenizer(metadata, folder)
        ids = {name: special.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        described = {"_from_model_config": True} | ids | dict(generation)
        for name, value in (("config.json", config | ids), ("generation_config.json", described)):
            (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        _write_weights(config, tensors, folder, f"Converting {label}" if progress else None)


def read_config(file: Path) -> dict[str, Any]:
    """The config.json that `convert` writes, without token ids."""
    with prefixed(str(file)):
        return hf_config(*_read(file))


def _read(file: Path) -> tuple[dict[str, Any], dict[str, ReaderTensor]]:
    reader_of = need("gguf", "gguf", "GGUF files").GGUFReader
    try:
        reader = reader_of(str(file))
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"not a readable GGUF file, or a truncated one ({error})") from error
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def hf_config(metadata: Mapping[str, Any], tensors: Mapping[str, ReaderTensor]) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"general.architecture is {architecture!r}; supported: llama")
    if (parts := metadata.get("split.count", 1)) > 1:
        raise CheckpointError(f"it is one of {parts} parts; join them with llama-gguf-split --merge")
    if "token_embd.weight" not in tensors:
        raise CheckpointError("it has no tensor token_embd.weight, so it is not a whole model")
    llama: dict[str, Any] = {
        key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")
    }
    for key, neutral in NEUTRAL.items():
        if (value := llama.get(key, 0)) not in neutral:
            raise CheckpointError(f"llama.{key} is {value}; supported: {neutral[0]} or absent")
    llama.setdefault("attention.head_count_kv", llama.get("attention.head_count"))
    for key in INTEGERS.values():
        if type(value := llama.get(key)) is not int:
            raise CheckpointError(f"llama.{key} is {value}; one number for all layers is needed")
    head_dim = int(llama.get("attention.key_length", llama["embedding_length"] // llama["attention.head_count"]))
    for key in ("rope.dimension_count", "attention.value_length"):
        if (value := llama.get(key, head_dim)) != head_dim:
            raise CheckpointError(f"llama.{key} ({value}) must equal the width of a head ({head_dim})")
    if (epsilon := llama.get("attention.layer_norm_rms_epsilon")) is None:
        raise CheckpointError("it has no metadata key llama.attention.layer_norm_rms_epsilon, so it is incomplete")
    is_quantised = any(tensor.tensor_type.name in BLOCK_TYPES for tensor in tensors.values())
    matrices = [tensor for tensor in tensors.values() if len(tensor.shape) == 2]
    bits = round(8 * sum(int(m.n_bytes) for m in matrices) / sum(int(m.n_elements) for m in matrices), 3)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        **{name: llama[key] for name, key in INTEGERS.items()},
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _decimal(epsilon),
        "rope_theta": _decimal(llama.get("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(llama, tensors),
        "attention_bias": any(re.fullmatch(r"blk\.\d+\.attn_(q|k|v|output)\.bias", name) for name in tensors),
        "mlp_bias": any(re.fullmatch(r"blk\.\d+\.ffn_(gate|up|down)\.bias", name) for name in tensors),
        # llama.cpp writes the output matrix only if it is not the embedding.
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": FILE_DTYPES.get(metadata.get("general.file_type", -1), "bfloat16"),
        **({"quantization_config": {"quant_method": "gguf", "bits_per_weight": bits}} if is_quantised else {}),
    }


def _decimal(value: float) -> float:
    return float(f"{value:.7g}")  # 1e-05 for the float32 9.99999974e-06


def _rope_scaling(llama: Mapping[str, Any], tensors: Mapping[str, ReaderTensor]) -> dict[str, Any] | None:
    """Linear scaling, or llama3 scaling: llama.cpp writes divisors of frequencies, which are read as longrope's."""
    rope_type = llama.get("rope.scaling.type", "none")
    if rope_type not in ("none", "linear"):
        raise CheckpointError(f"llama.rope.scaling.type is {rope_type!r}; supported: none, linear, {ROPE_FACTORS}")
    if ROPE_FACTORS in tensors:
        divisors = [_decimal(float(divisor)) for divisor in tensors[ROPE_FACTORS].data]
        factors = {"long_factor": divisors, "short_factor": divisors, "factor": 1.0, "attention_factor": 1.0}
        return {"rope_type": "longrope", "original_max_position_embeddings": llama["context_length"], **factors}
    factor = llama.get("rope.scaling.factor", llama.get("rope.scale_linear", 1.0))
    is_linear = factor not in (0.0, 1.0) and (rope_type == "linear" or "rope.scale_linear" in llama)
    return {"rope_type": "linear", "factor": float(factor)} if is_linear else None


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the rows of a weight ``[heads * E, M]`` or a bias ``[heads * E]`` of q or k.

    transformers rotates the pairs ``(i, i + E/2)`` of a head, llama.cpp ``(2i, 2i + 1)``, so its converter interleaves
    the halves of each head. For E = 4 the rows 0 1 2 3 are stored as 0 2 1 3.
    """
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _write_weights(
    config: Mapping[str, Any], tensors: Mapping[str, ReaderTensor], folder: Path, title: str | None
) -> None:
    model = model_config(config, dtype="float32")
    rules = list(placements(table(model), dimensions(model)))
    shapes = {name: tuple(map(int, tensor.shape[::-1])) for name, tensor in tensors.items()}
    expected = [replace(rule, tensor=rule.gguf) for rule in rules]
    if problems := misfits(shapes, expected, f"a Llama of {model.num_layers} layers", optional={ROPE_FACTORS}):
        raise CheckpointError(f"its tensors do not fit its metadata; {problems}")
    stored: dict[str, Placement] = {}
    sizes: dict[str, int] = {}
    for rule in rules:
        source = tensors[rule.gguf]
        block_type = source.tensor_type.name
        is_block = block_type in BLOCK_TYPES
        name = f"{rule.tensor.removesuffix('.weight')}.{block_type.lower()}" if is_block else rule.tensor
        stored[name] = rule
        sizes[name] = int(source.n_bytes if block_type in KEPT_TYPES else 4 * source.n_elements)

    def read(name: str) -> np.ndarray:
        rule = stored[name]
        values = _values(tensors[rule.gguf])
        if rule.interleaved:
            values = unpermute(values, rule.shape[0] // model.head_dim)
        written.update(values.nbytes)
        return values

    with progress_bar(title or "", sum(sizes.values()), "B", shown=title is not None) as written:
        save_shards(folder, sizes, read)
        written.set_postfix_str("bytes written")


def _values(source: ReaderTensor) -> np.ndarray:
    """Rows of blocks or floats as in the file; other types as float32."""
    from gguf import dequantize

    if source.tensor_type.name in KEPT_TYPES:
        values = np.asarray(source.data)
        return values.view(ml_dtypes.bfloat16) if source.tensor_type.name == "BF16" else values
    try:
        return dequantize(source.data, source.tensor_type)
    except NotImplementedError as error:
        raise CheckpointError(f"{source.name} has type {source.tensor_type.name}, which gguf cannot decode") from error


# The tokenizer.

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class WordRule:
    """How a byte-level BPE tokenizer splits a text into words."""

    pattern: str | None = None  # regular expression of a word; None: GPT-2's, built into the byte-level step
    single_digits: bool = False  # split off each digit first
    whole_words: bool = False  # a word of the vocabulary is one token, regardless of merges
    add_bos: bool = False  # default of tokenizer.ggml.add_bos_token


WORD_RULES: dict[str, WordRule] = {  # by tokenizer.ggml.pre
    "gpt-2": WordRule(),
    "smollm": WordRule(single_digits=True),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe"), WordRule(_LLAMA3, whole_words=True, add_bos=True)),
}

# Name in the files of transformers -> tokenizer.ggml.*_token_id
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_ADVICE = "Use the Hugging Face folder of this model, which has a tokenizer.json"


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write the tokenizer. Returns ids of special tokens by their names in config.json; ``eos_token_id`` is a list if
    there is a second stop token."""
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    declared = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL.items()}
    special = {name: int(i) for name, i in declared.items() if i is not None and i < len(tokens)}
    names = {name: tokens[i] for name, i in special.items()}
    config: dict[str, Any] = {
        # This class reads tokenizer.json unchanged. A model's own class would rebuild parts of it.
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
    declared_ends = special.get("eos_token"), metadata.get("tokenizer.ggml.eot_token_id")
    ends = list(dict.fromkeys(int(i) for i in declared_ends if i is not None and i < len(tokens)))
    return ids | ({"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {})


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    if not (tokens := metadata.get("tokenizer.ggml.tokens")):
        raise CheckpointError(f"it has no tokenizer.ggml.tokens. {_ADVICE}")
    if (model := metadata.get("tokenizer.ggml.model")) != "gpt2":
        raise CheckpointError(f"tokenizer.ggml.model is {model!r}; supported: gpt2 (byte-level BPE). {_ADVICE}")
    if (name := metadata.get("tokenizer.ggml.pre")) not in WORD_RULES:
        raise CheckpointError(f"tokenizer.ggml.pre is {name!r}; supported: {listed(WORD_RULES, 99)}. {_ADVICE}")
    rule = WORD_RULES[name]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or []]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule.whole_words))
    before: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if rule.single_digits else []
    if rule.pattern:
        before.append(pre_tokenizers.Split(Regex(rule.pattern), behavior="isolated"))
    before.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(before)
    tokenizer.decoder = decoders.ByteLevel()
    after: list[Any] = [processors.ByteLevel(trim_offsets=True)]

    def added(key: str, default: bool) -> list[tuple[str, int]]:
        i = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return [(tokens[i], i)] if i is not None and metadata.get(f"tokenizer.ggml.add_{key}_token", default) else []

    bos, eos = added("bos", rule.add_bos), added("eos", False)
    if bos or eos:
        first, second = ([*dict(bos), text, *dict(eos)] for text in ("$A", "$B"))
        after.append(processors.TemplateProcessing(single=first, pair=first + second, special_tokens=bos + eos))
    tokenizer.post_processor = processors.Sequence(after)
    types = list(zip(tokens, metadata.get("tokenizer.ggml.token_type") or [], strict=False))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t, i in types if i in (UNKNOWN, CONTROL)])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, i in types if i == USER_DEFINED])
    return tokenizer
