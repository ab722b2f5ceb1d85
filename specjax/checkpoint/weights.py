"""A model in the Hugging Face layout: its folder, checked before anything large is read, and tensors in safetensors.

The safetensors library checks and writes the files. It copies what it reads and has no numpy type for FP8, so tensors
are handed out as views of the memory-mapped file here: what is resident is what the caller copies out of them.
bfloat16 comes as ``ml_dtypes.bfloat16``.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specjax.checkpoint.files import CheckpointError, listed
from specjax.models.params import EMBED_TENSOR, HEAD_TENSOR

T = TypeVar("T")

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
LAYOUTS = [(SINGLE_NAME, INDEX_NAME), ("pytorch_model.bin", "pytorch_model.bin.index.json")]  # ours, and torch's

OTHER_MODALITIES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
QUANTISED_HEAD = HEAD_TENSOR.removesuffix("weight")  # prefix of the tensors of a quantised output matrix

DTYPES = {"F32": np.dtype("f4"), "F16": np.dtype("f2"), "BF16": np.dtype(ml_dtypes.bfloat16), "F64": np.dtype("f8")}
# Never parameters: token ids and masks beside the weights of a draft head.
INTEGERS = {f"{kind}{8 * size}": np.dtype(f"{kind.lower()}{size}") for kind in "IU" for size in (8, 4, 2, 1)}
INTEGERS["BOOL"] = np.dtype("?")
INTEGERS["F8_E4M3"] = np.dtype(ml_dtypes.float8_e4m3fn)  # codes of a quantised matrix


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: in ``file`` from byte ``start`` on."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Bytes; of a type that is not supported the number of elements."""
        known = (DTYPES | INTEGERS).get(self.dtype)
        return prod(self.shape) * (1 if known is None else known.itemsize)

    def read(self, *, integers: bool = False) -> np.ndarray:
        """The tensor as a read-only view of the file, of a type in ``DTYPES`` (or ``INTEGERS``, if ``integers``)."""
        dtypes = DTYPES | INTEGERS if integers else DTYPES
        if self.dtype not in dtypes:
            quantised = "" if integers else " (quantised checkpoints are not supported)"
            raise CheckpointError(
                f"tensor {self.name} in {self.file} has type {self.dtype}; supported: {listed(dtypes)}{quantised}"
            )
        try:
            if 0 in self.shape:  # which cannot be mapped
                return np.empty(self.shape, dtypes[self.dtype])
            # One mapping per tensor: its pages can be reclaimed as soon as the caller has copied them. `np.memmap` does
            # the same in several times the time.
            before, size = self.start % mmap.ALLOCATIONGRANULARITY, prod(self.shape)
            with self.file.open("rb") as stream:
                whole = before + size * dtypes[self.dtype].itemsize
                mapped = mmap.mmap(stream.fileno(), whole, access=mmap.ACCESS_READ, offset=self.start - before)
            return np.frombuffer(mapped, dtypes[self.dtype], size, before).reshape(self.shape)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"tensor {self.name} in {self.file}, of shape {self.shape!r:.80}, cannot be read ({error})"
            ) from error


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file, whose header the library has checked against the file's size."""
    try:
        with safe_open(file, framework="numpy"), file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length).decode(), object_pairs_hook=_unique)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} is not a readable safetensors file, or a truncated one ({error}); download or copy it again"
        ) from error
    header.pop("__metadata__", None)
    return {
        name: TensorEntry(name, file, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The library takes the last of two equal names."""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("its header has a name twice")
    return found


def read_shards(files: Iterable[Path], read: Callable[[Path], Mapping[str, T]]) -> dict[str, T]:
    """What ``read`` finds in all shards of a checkpoint, by tensor; none may be in two of them."""
    tensors: dict[str, T] = {}
    for file in files:
        found = read(file)
        if twice := found.keys() & tensors.keys():
            raise CheckpointError(f"tensors {listed(twice)} are in {file} and in another shard; keep one of the two")
        tensors |= found
    return tensors


def read_headers(files: Iterable[Path]) -> dict[str, TensorEntry]:
    """The tensors of all shards of a model; of one for several modalities those of its language model, by the names
    that it has alone."""
    tensors = read_shards(files, read_header)
    if not any(name.startswith(OTHER_MODALITIES) for name in tensors):
        return tensors
    found: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        if not name.startswith(OTHER_MODALITIES):
            # language_model.model.layers (as published), model.language_model.layers (as transformers 5 saves)
            name = name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)
            found[name] = replace(entry, name=name)
    return found


def same_content(first: np.ndarray, second: np.ndarray, rtol: float = 0, atol: float = 0) -> bool:
    """Whether two matrices of floats are equal within ``np.allclose``'s tolerances, compared a few rows at a time."""
    blocks = (slice(start, start + 4096) for start in range(0, len(first), 4096))
    return first.shape == second.shape and all(
        np.allclose(np.float32(first[rows]), np.float32(second[rows]), rtol, atol) for rows in blocks
    )


def save_tensors(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a safetensors file that transformers accepts; ``OSError`` if that fails."""
    whole = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    try:
        save_file(whole, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{file}: {error}") from error
    file.chmod(0o644)  # the library gives no one else access


def save_shards(folder: Path, sizes: Mapping[str, int], read: Callable[[str], np.ndarray]) -> None:
    """Write tensors of so many bytes as model.safetensors, or as several files of about 1 GiB and their index.

    ``read`` gives a tensor by its name; those of one file are held in memory at once.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    plan = split_state_dict_into_shards_factory(
        dict(sizes),
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=1 << 30,
    )
    for file, names in plan.filename_to_tensors.items():
        save_tensors(folder / file, {name: read(name) for name in names})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk."""

    name: str  # as the user gave it
    folder: Path  # config.json, tokenizer files and weights
    config: Mapping[str, Any] = field(compare=False)  # config.json, with `tie_word_embeddings` as `read_folder` has it
    weights: tuple[Path, ...]  # the safetensors shards

    @cached_property
    def headers(self) -> dict[str, TensorEntry]:
        """`read_headers` of the weights, read once."""
        return read_headers(self.weights)


def read_outline(name: str, path: Path) -> ModelFiles:
    """As `read_folder` for what is described by config.json, or the headers of weights beside it; reads no weights.
    ``path`` is the folder or its config.json, which then stands alone."""
    folder = path if path.is_dir() else path.parent
    config = _read_config(folder / "config.json" if path.is_dir() else path, name)
    has_weights = path.is_dir() and any((folder / file).is_file() for file in LAYOUTS[0])
    weights = find_weights(name, folder) if has_weights else ()
    files = ModelFiles(name, folder, config, weights)
    if config.get("tie_word_embeddings") is None and weights and HEAD_TENSOR not in files.headers:
        config["tie_word_embeddings"] = True
    return files


def read_folder(name: str, folder: Path) -> ModelFiles:
    """The model in ``folder``: config.json and safetensors, single or sharded.

    ``tie_word_embeddings`` is settled here. An absent key and no ``lm_head.weight`` mean tied: with transformers'
    default, false, the model would have no output matrix. Tied, but with an ``lm_head.weight`` that differs from the
    embedding, means untied, as in transformers.
    """
    config = _read_config(folder / "config.json", name)
    files = ModelFiles(name, folder, config, find_weights(name, folder))
    tensors = files.headers
    head, embed = tensors.get(HEAD_TENSOR), tensors.get(EMBED_TENSOR)
    if any(name.startswith(QUANTISED_HEAD) for name in tensors) and (head is None or head.dtype not in DTYPES):
        config["tie_word_embeddings"] = False
    elif head is None and embed is not None:
        if (tied := config.get("tie_word_embeddings")) is not None and tied is not True:
            raise CheckpointError(
                f"{folder / 'config.json'}: tie_word_embeddings is {tied!r:.80}, and there is no {HEAD_TENSOR}; write "
                "true if the output matrix is the embedding, or copy the weights again: a shard may be missing"
            )
        config["tie_word_embeddings"] = True
    elif head is not None and embed is not None and config.get("tie_word_embeddings"):
        config["tie_word_embeddings"] = same_content(head.read(), embed.read())
    return files


def _read_config(file: Path, name: str) -> dict[str, Any]:
    """config.json, with `quantization_config` from where older checkpoints have it."""
    config = dict(read_json(file, name))
    beside = file.with_name("quantize_config.json")  # GPTQ before 2023-08
    if config.get("quantization_config") is None:
        if config.get("compression_config") is not None:
            config["quantization_config"] = config["compression_config"]
        elif beside.is_file():
            config["quantization_config"] = {"quant_method": "gptq", **read_json(beside, name)}
    return config


def read_json(file: Path, name: str) -> Mapping[str, Any]:
    """A JSON object from ``file``, of the model ``name``."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{file.parent} (given as {name!r}) has no {file.name}; a folder of a model or a draft head needs it, as "
            "transformers' save_pretrained writes it"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON ({error}); copy or download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__}, not a JSON object; copy or download it again")
    return value


def find_weights(name: str, folder: Path, *, torch_too: bool = False) -> tuple[Path, ...]:
    """The files that hold the weights in ``folder``: safetensors if there are any, else torch's if ``torch_too``."""
    layouts = LAYOUTS[: 1 + torch_too]
    for single, index in layouts:
        if (folder / index).is_file():
            return _shards(folder / index, name)
        if (folder / single).is_file():
            return (folder / single,)
    present = {file.name for file in folder.iterdir() if file.is_file()}
    suffixes = {Path(file).suffix for file in present}
    wanted = ", ".join(file for layout in layouts for file in layout)
    hint = ""
    if ".gguf" in suffixes:
        hint = ". Give the path of the .gguf file itself"
    elif suffixes & {".bin", ".pt", ".pth"} and not torch_too:
        hint = (
            ". Convert once, where torch is installed: AutoModelForCausalLM.from_pretrained(folder)"
            ".save_pretrained(new_folder), and the same for AutoTokenizer"
        )
    raise CheckpointError(
        f"{folder} (given as {name!r}) has none of: {wanted}; it has {listed(present) or 'no files'}{hint}"
    )


def _shards(index: Path, name: str) -> tuple[Path, ...]:
    folder = index.parent
    weight_map = read_json(index, name).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map is {weight_map!r:.80}; an object of file names is needed")
    shards = set(weight_map.values())
    outside = {shard for shard in shards if Path(shard).name != shard}
    if outside or not shards:
        names = listed(outside) or "none"
        raise CheckpointError(f"{index}: weight_map must name files of its own folder, got: {names}")
    if missing := {shard for shard in shards if not (folder / shard).is_file()}:
        raise CheckpointError(f"{folder} lacks shards that {index.name} lists: {listed(missing)}; copy them there")
    return tuple(folder / shard for shard in sorted(shards))
