"""A GGUF file to a folder in the Hugging Face layout, with float32 weights.

Knows the metadata keys and tensor names that llama.cpp writes; after the conversion nothing else in the project
has to. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import pi, prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.checkpoint.errors import CheckpointError, listed
from specjax.checkpoint.gguf_tokenizer import write_tokenizer
from specjax.checkpoint.hf_config import model_config
from specjax.checkpoint.weights import save_shards
from specjax.models import table
from specjax.models.params import dimensions, placements
from specjax.progress import progress_bar

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

# Part of a converted folder's name: a change of what this module writes must change it.
CONVERSION = "v1"

ROPE_FACTORS = "rope_freqs.weight"
# Metadata that changes what a Llama computes, with the values that change nothing.
NEUTRAL = {
    "expert_count": (0,),
    "attention.sliding_window": (0,),
    "attention.scale": (0.0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
}
# general.file_type -> the type to compute in on a GPU; quantised files were made from bfloat16 models.
FILE_DTYPES = {0: "float32", 1: "float16"}


def convert(
    file: Path,
    folder: Path,
    *,
    progress: bool,
    label: str | None = None,
    generation: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write config.json, generation_config.json, the tokenizer and model.safetensors into ``folder``.

    Args:
      file: a single-file GGUF of a supported architecture.
      folder: exists, empty.
      progress: show a bar on stderr.
      label: what error messages call the file; its path if None.
      generation: further keys of generation_config.json: a GGUF does not say how its publisher samples.

    Raises:
      CheckpointError: not a GGUF file, or a model or tokenizer that is not supported.
    """
    label = label or str(file)
    reader = _open(file, label)
    metadata = _Metadata(reader, label)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = hf_config(metadata, tensors, label)
    special = write_tokenizer(metadata, folder, label)
    ids = {
        "bos_token_id": special.get("bos_token_id"),
        "eos_token_id": special.get("eos_token_id"),
        "pad_token_id": special.get("padding_token_id"),
    }
    _write_json(folder / "config.json", config | ids)
    _write_json(folder / "generation_config.json", {"_from_model_config": True} | ids | dict(generation))
    _write_weights(config, tensors, folder, label, progress)


class _Metadata(Mapping[str, Any]):
    """The file's key-value pairs as Python values, decoded when asked for (a vocabulary takes a second)."""

    def __init__(self, reader: GGUFReader, label: str) -> None:
        self._fields = reader.fields
        self._label = label

    def __getitem__(self, key: str) -> Any:
        return self._fields[key].contents()

    def __iter__(self) -> Any:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def require(self, key: str) -> Any:
        """The value of ``key``, or an error that names it."""
        if key not in self:
            raise CheckpointError(f"{self._label} has no metadata key {key}; it is incomplete")
        return self[key]


def hf_config(metadata: _Metadata, tensors: Mapping[str, ReaderTensor], label: str) -> dict[str, Any]:
    """The config.json that the metadata and the tensors' names imply, token ids left out.

    Raises:
      CheckpointError: an architecture, or a feature of it, that is not supported.
    """
    architecture = metadata.require("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{label}: general.architecture is {architecture!r}; supported: llama")
    if metadata.get("split.count", 1) > 1:
        raise CheckpointError(
            f"{label} is one of {metadata['split.count']} parts; join them with llama-gguf-split --merge"
        )
    for key, neutral in NEUTRAL.items():
        if (value := metadata.get(f"llama.{key}", neutral[0])) not in neutral:
            raise CheckpointError(f"{label}: llama.{key} is {value}; supported: {neutral[0]} or absent")
    hidden, heads = (_integer(metadata, f"llama.{key}", label) for key in ("embedding_length", "attention.head_count"))
    kv_key = "llama.attention.head_count_kv"
    kv_heads = _integer(metadata, kv_key, label) if kv_key in metadata else heads
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{label} has no tensor token_embd.weight; it is not a whole model")
    head_dim = metadata.get("llama.attention.key_length", hidden // heads)
    rotary = metadata.get("llama.rope.dimension_count", head_dim)
    if rotary != head_dim or metadata.get("llama.attention.value_length", head_dim) != head_dim:
        raise CheckpointError(
            f"{label}: llama.rope.dimension_count ({rotary}) and llama.attention.value_length must equal the width of "
            f"a head ({head_dim})"
        )
    theta = _as_written(metadata.get("llama.rope.freq_base", 10000.0))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": _integer(metadata, "llama.feed_forward_length", label),
        "num_hidden_layers": _integer(metadata, "llama.block_count", label),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": int(head_dim),
        "hidden_act": "silu",
        "max_position_embeddings": _integer(metadata, "llama.context_length", label),
        "rms_norm_eps": _as_written(metadata.require("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(metadata, tensors, int(head_dim), theta, label),
        "attention_bias": any(re.fullmatch(r"blk\.\d+\.attn_(q|k|v|output)\.bias", name) for name in tensors),
        "mlp_bias": any(re.fullmatch(r"blk\.\d+\.ffn_(gate|up|down)\.bias", name) for name in tensors),
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        # llama.cpp writes the output matrix only where it is not the embedding.
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": FILE_DTYPES.get(metadata.get("general.file_type", -1), "bfloat16"),
    }


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the rows of q and k.

    transformers rotates the pairs ``(i, i + E/2)`` of a head, llama.cpp ``(2i, 2i + 1)``, so its converter
    interleaves the halves of each head. For E = 4 the rows 0 1 2 3 are stored as 0 2 1 3.

    Args:
      rows: weight ``[heads * E, M]`` or bias ``[heads * E]``.
      heads: query heads for q, key/value heads for k.
    """
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _open(file: Path, label: str) -> GGUFReader:
    from gguf import GGUFReader

    try:
        return GGUFReader(str(file))
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise CheckpointError(
            f"{label} is not a readable GGUF file, or a truncated one ({error}); copy or download it again"
        ) from error


def _integer(metadata: _Metadata, key: str, label: str) -> int:
    value = metadata.require(key)
    if not isinstance(value, int):
        raise CheckpointError(f"{label}: {key} is {value}; supported: one number for all layers")
    return value


def _as_written(value: float) -> float:
    """The short decimal that a float32 was made from: 9.99999974e-06 was 1e-05."""
    return float(f"{value:.7g}")


def _rope_scaling(
    metadata: _Metadata, tensors: Mapping[str, ReaderTensor], head_dim: int, theta: float, label: str
) -> dict[str, Any] | None:
    rope_type = metadata.get("llama.rope.scaling.type", "none")
    factor = metadata.get("llama.rope.scaling.factor", metadata.get("llama.rope.scale_linear", 1.0))
    if rope_type not in ("none", "linear"):
        raise CheckpointError(
            f"{label}: llama.rope.scaling.type is {rope_type!r}; supported: none, linear, and llama3's {ROPE_FACTORS}"
        )
    if ROPE_FACTORS in tensors:
        return _llama3_scaling(np.asarray(tensors[ROPE_FACTORS].data, np.float64), head_dim, theta, label)
    if factor not in (0.0, 1.0) and (rope_type == "linear" or "llama.rope.scale_linear" in metadata):
        return {"rope_type": "linear", "type": "linear", "factor": float(factor)}
    return None


def _llama3_scaling(factors: np.ndarray, head_dim: int, theta: float, label: str) -> dict[str, Any] | None:
    """The parameters of llama3 scaling from its effect: the divisor of each of E/2 frequencies.

    The largest divisor is ``factor``. The other parameters are those of every Llama 3.x release; they are
    accepted only if they give back exactly these divisors.
    """
    if np.allclose(factors, 1.0):
        return None
    factor, low, high = _as_written(float(factors.max())), 1.0, 4.0
    wavelengths = 2 * pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    for original in (8192, 4096, 2048, 16384, 32768):
        smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
        if np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise CheckpointError(
        f"{label}: {ROPE_FACTORS} is not the llama3 rope scaling with low_freq_factor 1 and high_freq_factor 4; use "
        "the Hugging Face folder of this model"
    )


def _write_weights(
    config: Mapping[str, Any], tensors: Mapping[str, ReaderTensor], folder: Path, label: str, progress: bool
) -> None:
    from gguf import dequantize

    model = model_config(config, dtype="float32")
    rules = {rule.tensor: rule for rule in placements(table(model), dimensions(model))}
    names = {rule.gguf for rule in rules.values()}
    missing, extra = names - tensors.keys(), tensors.keys() - names - {ROPE_FACTORS}
    if missing or extra:
        raise CheckpointError(
            f"{label} does not fit a Llama of {model.num_layers} layers; missing tensors: {listed(missing) or 'none'}; "
            f"tensors with no place: {listed(extra) or 'none'}"
        )
    shapes = {name: rule.shape for name, rule in rules.items()}

    def read(name: str) -> np.ndarray:
        rule = rules[name]
        source = tensors[rule.gguf]
        try:
            values = dequantize(source.data, source.tensor_type)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{label}: {source.name} has type {source.tensor_type.name}, which gguf cannot decode"
            ) from error
        if values.shape != rule.shape:
            raise CheckpointError(
                f"{label}: {source.name} is {list(values.shape)}, the metadata implies {list(rule.shape)}"
            )
        if rule.interleaved:
            values = unpermute(values, rule.shape[0] // model.head_dim)
        written.update(values.size * 4)
        return values

    total = sum(4 * prod(shape) for shape in shapes.values())
    with progress_bar(f"Converting {label}", total, "B", shown=progress) as written:
        save_shards(folder, shapes, read)


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
