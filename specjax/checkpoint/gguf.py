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
from itertools import product
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from specjax.checkpoint.files import CheckpointError, Holds, Settings, damaged, listed, prefixed
from specjax.checkpoint.hf_config import LAYER_TYPES, model_config
from specjax.checkpoint.parameters import misfits, shared_tensors
from specjax.checkpoint.quantised import BLOCK_TYPES
from specjax.checkpoint.weights import save_shards
from specjax.models import table
from specjax.models.params import Placement, dimensions, placements
from specjax.packages import need
from specjax.progress import progress_bar

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Part of a converted folder's name. Change it when the files written by this module change.
CONVERSION = "v4"

FLOATS = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
KEPT_TYPES = (*BLOCK_TYPES, *FLOATS)  # other types are dequantised
ROPE_FACTORS = "rope_freqs.weight"
# By type of a value.
NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
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
MOSTLY_BF16 = 32


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


def read_config(file: Path) -> Settings:
    """The config.json that `convert` writes, without token ids."""
    with prefixed(str(file)):
        return hf_config(*_read(file))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a GGUF file."""

    kind: str  # ggml's type
    shape: tuple[int, ...]  # rows first
    data: np.ndarray  # a view of the file: numbers, or rows of blocks


class _Reader:
    """Reads a GGUF file from the start. Every length is compared with the bytes that are left."""

    TEXT, ARRAY = 8, 9

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.at, self.field = data, 0, "its header"

    def numbers(self, dtype: Any, count: int) -> np.ndarray:
        start, size = self.at, np.dtype(dtype).itemsize
        self.at += count * size
        if self.at > len(self.data):
            place = f"{count} x {size} bytes from byte {start} of {len(self.data)} on"
            raise CheckpointError(f"{self.field} has {place}: a damaged or truncated GGUF file")
        return self.data[start : self.at].view(dtype)

    def number(self, dtype: str) -> Any:
        return self.numbers(dtype, 1)[0].item()

    def text(self) -> str:
        return self.numbers("u1", self.number("<u8")).tobytes().decode()

    def named(self, kind: str) -> str:
        """The name of the next field."""
        self.field = f"the name of a {kind} at byte {self.at}"
        name = self.text()
        self.field = f"{kind} {name[:80]!r}"
        return name

    def value(self) -> Any:
        if (kind := self.number("<u4")) == self.TEXT:
            return self.text()
        if kind != self.ARRAY:
            return self.number(NUMBERS[kind])
        kind, count = self.number("<u4"), self.number("<u8")
        if kind != self.TEXT:  # an array in an array is refused, too
            return self.numbers(NUMBERS[kind], count).tolist()
        return [self.text() for _ in range(count)]  # ends at the file's end, whatever the count


def _read(file: Path) -> tuple[Settings, dict[str, StoredTensor]]:
    try:
        read = _Reader(np.memmap(file, np.uint8, "r").view(np.ndarray))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"not a readable GGUF file ({error})") from error
    with damaged(lambda: read.field):  # such as an unknown type, and a text that is not UTF-8
        return _contents(read)


def _contents(read: _Reader) -> tuple[Settings, dict[str, StoredTensor]]:
    gguf = need("gguf", "gguf", "GGUF files")
    if (start := read.numbers("u1", 4).tobytes()) != b"GGUF":
        raise CheckpointError(f"not a GGUF file: it starts with {start!r}")
    if (version := read.number("<u4")) not in (2, 3):
        raise CheckpointError(f"GGUF version {version}; supported: 2, 3 (little-endian)")
    tensors, keys = read.number("<u8"), read.number("<u8")
    metadata = Settings(holds=Holds(file="metadata"))
    for _ in range(keys):
        if (key := read.named("key")) in metadata:
            raise CheckpointError(f"{read.field} is there twice")
        metadata[key] = read.value()
    placed: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for _ in range(tensors):
        if (name := read.named("tensor")) in placed:
            raise CheckpointError(f"{read.field} is there twice")
        shape = tuple(read.numbers("<u8", read.number("<u4")).tolist()[::-1])
        placed[name] = gguf.GGMLQuantizationType(read.number("<u4")).name, shape, read.number("<u8")
    if (alignment := metadata.integer("general.alignment", 32)) & (alignment - 1):
        raise metadata.invalid("general.alignment", alignment, "a power of two")
    start, found = -(-read.at // alignment) * alignment, dict[str, StoredTensor]()
    for name, (kind, shape, offset) in placed.items():
        weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        columns = shape[-1] if shape else 1
        if columns % weights or 0 in shape:
            raise CheckpointError(f"tensor {name!r:.80} has {columns} columns in blocks of {weights}, of shape {shape}")
        read.at, read.field = start + offset, f"tensor {name!r:.80}"
        dtype, width = (FLOATS[kind], columns) if kind in FLOATS else (np.uint8, columns // weights * size)
        count = prod(shape[:-1]) * width
        found[name] = StoredTensor(kind, shape, read.numbers(dtype, count).reshape(*shape[:-1], width))
    return metadata, found


def hf_config(metadata: Settings, tensors: Mapping[str, StoredTensor]) -> Settings:
    if (architecture := metadata.get("general.architecture")) not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"general.architecture is {architecture!r:.80}; supported: {known}")
    if (parts := metadata.integer("split.count", 1, least=0)) > 1:
        raise CheckpointError(f"it is one of {parts} parts; join them with llama-gguf-split --merge")
    embed = tensors.get("token_embd.weight")
    if embed is None or len(embed.shape) != 2:
        raise CheckpointError("it has no matrix token_embd.weight, so it is not a whole model")
    if (epsilon := f"{architecture}.attention.layer_norm_rms_epsilon") not in metadata:
        raise CheckpointError(f"it has no metadata key {epsilon}, so it is incomplete")
    is_quantised = any(tensor.kind in BLOCK_TYPES for tensor in tensors.values())
    matrices = [tensor for tensor in tensors.values() if len(tensor.shape) >= 2]
    bits = round(8 * sum(m.data.nbytes for m in matrices) / sum(prod(m.shape) for m in matrices), 3)
    config = ARCHITECTURES[architecture](metadata, tensors) | {
        "vocab_size": embed.shape[0],
        "rms_norm_eps": _decimal(metadata.number(epsilon)),
        # llama.cpp writes the output matrix only if it is not the embedding.
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": FILE_DTYPES.get(metadata.integer("general.file_type", MOSTLY_BF16, least=0), "bfloat16"),
        **({"quantization_config": {"quant_method": "gguf", "bits_per_weight": bits}} if is_quantised else {}),
    }
    return Settings(config, Holds(len(_one_by_one(tensors))))


def _llama(metadata: Settings, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    for key, neutral in NEUTRAL.items():
        if (value := metadata.get(f"llama.{key}", 0)) not in neutral:
            raise CheckpointError(f"llama.{key} is {value!r:.80}; supported: {neutral[0]} or absent")
    metadata.setdefault("llama.attention.head_count_kv", metadata.get("llama.attention.head_count"))
    sizes = {name: metadata.integer(f"llama.{key}") for name, key in INTEGERS.items()}
    head_dim = metadata.integer("llama.attention.key_length", sizes["hidden_size"] // sizes["num_attention_heads"])
    for key in ("rope.dimension_count", "attention.value_length"):
        if (value := metadata.get(f"llama.{key}", head_dim)) != head_dim:
            raise CheckpointError(f"llama.{key} ({value!r:.80}) must equal the width of a head ({head_dim})")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rope_theta": _decimal(metadata.number("llama.rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(metadata, tensors),
        "attention_bias": any(re.fullmatch(r"blk\.\d+\.attn_(q|k|v|output)\.bias", name) for name in tensors),
        "mlp_bias": any(re.fullmatch(r"blk\.\d+\.ffn_(gate|up|down)\.bias", name) for name in tensors),
    }


def _gemma4(metadata: Settings, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """llama.cpp writes one number for all layers, or a list with a number for each."""

    def integer(key: str, default: int | None = None, *, least: int = 0) -> int:
        return metadata.integer(f"gemma4.{key}", default, least=least)

    def by_layer(key: str) -> list[int]:
        values = metadata.get(name := f"gemma4.{key}")
        values = values if isinstance(values, list) else [values] * layers
        if len(values) != layers:
            raise metadata.invalid(name, values, f"a number, or one for each of {layers} layers,")
        return [Settings({name: value}, metadata.holds).integer(name) for value in values]

    layers = metadata.count("gemma4.block_count", each=1)
    pattern = metadata.get("gemma4.attention.sliding_window_pattern")
    if not isinstance(pattern, list) or len(pattern) != layers or not {*pattern} <= {0, 1}:
        raise metadata.invalid("gemma4.attention.sliding_window_pattern", pattern, f"true or false for {layers} layers")
    heads, widths, full = by_layer("attention.head_count_kv"), by_layer("feed_forward_length"), pattern.index(0)
    sizes = {"head_dim": integer("attention.key_length", least=1), "num_key_value_heads": heads[full]}
    table = tensors.get("per_layer_token_embd.weight")
    factors = tensors.get(ROPE_FACTORS)
    if factors is None or factors.kind != "F32" or {*factors.data.tolist()} - {1.0, np.float32(1e30).item()}:
        raise CheckpointError(f"{ROPE_FACTORS} must be a list of F32, 1 for pairs that are rotated and 1e30 for others")
    experts = integer("expert_count", 0)
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        **{name: integer(INTEGERS[name], least=1) for name in ("hidden_size", "max_position_embeddings")},
        "num_hidden_layers": layers,
        "num_attention_heads": integer("attention.head_count", least=1),
        "num_key_value_heads": heads[pattern.index(1)] if 1 in pattern else heads[full],
        "head_dim": integer("attention.key_length_swa", least=1),
        "per_layer_config": {str(layer): sizes for layer, slides in enumerate(pattern) if not slides},
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "layer_types": [LAYER_TYPES[not slides] for slides in pattern],
        "sliding_window": integer("attention.sliding_window", least=1),
        "num_kv_shared_layers": integer("attention.shared_kv_layers", 0),
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in tensors,
        "hidden_size_per_layer_input": integer("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": None if table is None else table.shape[0],
        "enable_moe_block": experts > 0,
        "num_experts": experts or None,
        "top_k_experts": integer("expert_used_count", 0) or None,
        "moe_intermediate_size": integer("expert_feed_forward_length", 0) or None,
        "final_logit_softcapping": metadata.get("gemma4.final_logit_softcapping"),
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            LAYER_TYPES[0]: {
                "rope_type": "default", "rope_theta": _decimal(metadata.number("gemma4.rope.freq_base_swa", 1e4))
            },
            LAYER_TYPES[1]: {
                "rope_type": "proportional", "rope_theta": _decimal(metadata.number("gemma4.rope.freq_base", 1e6)),
                "partial_rotary_factor": float(np.mean(factors.data == 1)),
            },
        },
    }  # fmt: skip


ARCHITECTURES = {"llama": _llama, "gemma4": _gemma4}
"""By `general.architecture`: functions that return keys of config.json."""


def _one_by_one(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors, stacked experts one by one: ffn_up_exps.weight [X, I, M] as ffn_up_exps.0.weight, ..."""
    split: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        stacked = re.fullmatch(r"(.*ffn_)(\w+)_exps\.weight", name)
        if stacked is None or len(tensor.shape) != 3:
            split[name] = tensor
            continue
        stem, part = stacked.groups()
        parts = ("gate", "up") if part == "gate_up" else (part,)
        experts, rows = tensor.shape[0], tensor.shape[1] // len(parts)
        for expert, (i, part) in product(range(experts), enumerate(parts)):
            data = tensor.data[expert, i * rows : (i + 1) * rows]
            split[f"{stem}{part}_exps.{expert}.weight"] = replace(tensor, shape=(rows, tensor.shape[2]), data=data)
    return split


def _decimal(value: float) -> float:
    return float(f"{value:.7g}")  # 1e-05 for the float32 9.99999974e-06


def _rope_scaling(metadata: Settings, tensors: Mapping[str, StoredTensor]) -> dict[str, Any] | None:
    """Linear scaling, or llama3 scaling: llama.cpp writes divisors of frequencies, which are read as longrope's."""
    rope_type = metadata.get("llama.rope.scaling.type", "none")
    if rope_type not in ("none", "linear"):
        raise CheckpointError(f"llama.rope.scaling.type is {rope_type!r:.80}; supported: none, linear, {ROPE_FACTORS}")
    if factors := tensors.get(ROPE_FACTORS):
        if factors.kind != "F32" or len(factors.shape) != 1:
            raise CheckpointError(f"{ROPE_FACTORS} is {factors.kind} {list(factors.shape)}; a list of F32 is needed")
        divisors = [_decimal(divisor) for divisor in factors.data.tolist()]
        scaling = {"long_factor": divisors, "short_factor": divisors, "factor": 1.0, "attention_factor": 1.0}
        scaling["original_max_position_embeddings"] = metadata["llama.context_length"]
        return {"rope_type": "longrope", **scaling}
    key = "llama.rope.scaling.factor" if "llama.rope.scaling.factor" in metadata else "llama.rope.scale_linear"
    if metadata.get(key) in (None, 0, 1) or (rope_type == "none" and "llama.rope.scale_linear" not in metadata):
        return None
    return {"rope_type": "linear", "factor": metadata.number(key)}


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the rows of a weight ``[heads * E, M]`` or a bias ``[heads * E]`` of q or k.

    transformers rotates the pairs ``(i, i + E/2)`` of a head, llama.cpp ``(2i, 2i + 1)``, so its converter interleaves
    the halves of each head. For E = 4 the rows 0 1 2 3 are stored as 0 2 1 3.
    """
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _write_weights(config: Settings, tensors: Mapping[str, StoredTensor], folder: Path, title: str | None) -> None:
    model, tensors = model_config(config, dtype="float32"), _one_by_one(tensors)
    rules = list(placements(table(model), dimensions(model)))
    expected = [replace(rule, tensor=rule.gguf) for rule in rules]
    optional = {ROPE_FACTORS} | shared_tensors(model, "blk.{}.{}.weight", ("attn_k", "attn_v", "attn_k_norm"))
    kind = f"a {model.family.capitalize()} of {model.num_layers} layers"
    if problems := misfits(tensors, expected, kind, optional=optional):
        raise CheckpointError(f"its tensors do not fit its metadata; {problems}")
    stored: dict[str, Placement] = {}
    sizes: dict[str, int] = {}
    for rule in rules:
        source = tensors[rule.gguf]
        is_block = source.kind in BLOCK_TYPES
        name = f"{rule.tensor.removesuffix('.weight')}.{source.kind.lower()}" if is_block else rule.tensor
        stored[name] = rule
        sizes[name] = source.data.nbytes if source.kind in KEPT_TYPES else 4 * prod(source.shape)

    def read(name: str) -> np.ndarray:
        rule = stored[name]
        values = _values(rule.gguf, tensors[rule.gguf])
        if rule.interleaved:
            values = unpermute(values, rule.shape[0] // model.head_dim)
        written.update(values.nbytes)
        return values

    with progress_bar(title or "", sum(sizes.values()), "B", shown=title is not None) as written:
        save_shards(folder, sizes, read)
        written.set_postfix_str("bytes written")


def _values(name: str, source: StoredTensor) -> np.ndarray:
    """Rows of blocks or floats as in the file; other types as float32."""
    from gguf import GGMLQuantizationType, dequantize

    if source.kind in KEPT_TYPES:
        return source.data
    with damaged(f"{name}, of the type {source.kind},"):
        return dequantize(source.data, GGMLQuantizationType[source.kind])


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
    spaces: str = ""  # no words: the whole text is merged, with this in place of spaces, and bytes are tokens


WORD_RULES: dict[str, WordRule] = {  # by tokenizer.ggml.pre
    "gpt-2": WordRule(),
    "smollm": WordRule(single_digits=True),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe"), WordRule(_LLAMA3, whole_words=True, add_bos=True)),
}
GEMMA_RULE = WordRule(add_bos=True, spaces="\u2581")

# Name in the files of transformers -> tokenizer.ggml.*_token_id
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_ADVICE = "Use the Hugging Face folder of this model, which has a tokenizer.json"


def write_tokenizer(metadata: Settings, folder: Path) -> dict[str, Any]:
    """Write the tokenizer. Returns ids of special tokens by their names in config.json; ``eos_token_id`` is a list if
    there is a second stop token."""
    with damaged("the tokenizer, of the keys tokenizer.ggml.*,"):
        build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    tokens = metadata.texts("tokenizer.ggml.tokens")
    special = {name: i for name, key in _SPECIAL.items() if (i := _token_id(metadata, key)) is not None}
    names = {name: tokens[i] for name, i in special.items()}
    config: dict[str, Any] = {
        # This class reads tokenizer.json unchanged. A model's own class would rebuild parts of it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.integer(f"{metadata.get('general.architecture')}.context_length", 10**9),
        **names,
    }
    if template := metadata.text("tokenizer.chat_template", ""):
        config["chat_template"] = template
    for file, value in (("tokenizer_config.json", config), ("special_tokens_map.json", names)):
        (folder / file).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    ids: dict[str, Any] = {f"{name}_id": i for name, i in special.items()}
    declared_ends = special.get("eos_token"), _token_id(metadata, "eot")
    ends = list(dict.fromkeys(i for i in declared_ends if i is not None))
    return ids | ({"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {})


def _token_id(metadata: Settings, name: str) -> int | None:
    """The id of a special token; None if it is absent, or no token, which some converters write for none."""
    if metadata.get(key := f"tokenizer.ggml.{name}_token_id") in (None, -1):
        return None
    i = metadata.integer(key, least=0)
    return i if i < len(metadata["tokenizer.ggml.tokens"]) else None


def build_tokenizer(metadata: Settings) -> Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    if not (tokens := metadata.texts("tokenizer.ggml.tokens")):
        raise CheckpointError(f"it has no tokenizer.ggml.tokens. {_ADVICE}")
    if (model := metadata.get("tokenizer.ggml.model")) not in ("gpt2", "gemma4"):
        supported = "gpt2 (byte-level BPE), gemma4"
        raise CheckpointError(f"tokenizer.ggml.model is {model!r:.80}; supported: {supported}. {_ADVICE}")
    if (name := metadata.get("tokenizer.ggml.pre")) not in list(WORD_RULES) and model == "gpt2":
        raise CheckpointError(f"tokenizer.ggml.pre is {name!r:.80}; supported: {listed(WORD_RULES, 99)}. {_ADVICE}")
    rule = WORD_RULES[str(name)] if model == "gpt2" else GEMMA_RULE
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges: list[Any] = [merge.partition(" ")[::2] for merge in metadata.texts("tokenizer.ggml.merges")]
    options: dict[str, Any] = {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"} if rule.spaces else {}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule.whole_words, **options))
    before: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if rule.single_digits else []
    if rule.pattern:
        before.append(pre_tokenizers.Split(Regex(rule.pattern), behavior="isolated"))
    after: list[Any] = []
    if rule.spaces:
        tokenizer.normalizer = normalizers.Replace(" ", rule.spaces)
        decoded = decoders.Replace(rule.spaces, " "), decoders.ByteFallback(), decoders.Fuse()
        tokenizer.decoder = decoders.Sequence([*decoded])
    else:
        before.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.pattern is None))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(before)
        tokenizer.decoder = decoders.ByteLevel()
        after.append(processors.ByteLevel(trim_offsets=True))

    def added(key: str, default: bool) -> list[tuple[str, int]]:
        i, is_added = _token_id(metadata, key), metadata.boolean(f"tokenizer.ggml.add_{key}_token", default)
        return [] if i is None or not is_added else [(tokens[i], i)]

    bos, eos = added("bos", rule.add_bos), added("eos", False)
    if bos or eos:
        first, second = ([*dict(bos), text, *dict(eos)] for text in ("$A", "$B"))
        after.append(processors.TemplateProcessing(single=first, pair=first + second, special_tokens=bos + eos))
    tokenizer.post_processor = processors.Sequence(after)
    if not isinstance(kinds := metadata.optional("tokenizer.ggml.token_type", []), list):
        raise metadata.invalid("tokenizer.ggml.token_type", kinds, "a list of numbers")
    types = list(zip(tokens, kinds, strict=False))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t, i in types if i in (UNKNOWN, CONTROL)])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, i in types if i == USER_DEFINED])
    return tokenizer
