"""A model's folder in the Hugging Face layout, and tensors of safetensors files.

The safetensors library checks and writes files. Tensors are read here, as views of memory-mapped files, because the
library copies them and has no numpy type for FP8. bfloat16 is ``ml_dtypes.bfloat16``.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specjax.checkpoint.files import CheckpointError, Holds, listed, read_json
from specjax.models.params import EMBED_TENSOR, HEAD_TENSOR

T = TypeVar("T")

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
LAYOUTS = [(SINGLE_NAME, INDEX_NAME), ("pytorch_model.bin", "pytorch_model.bin.index.json")]

MAX_EXPERTS = 2**13  # in one tensor; a layer of a published model has at most 512

OTHER_MODALITIES = tuple(
    f"{model}{part}."
    for model in ("", "model.")
    for part in ("vision_tower", "multi_modal_projector", "visual", "audio_tower", "embed_vision", "embed_audio")
)

DTYPES = {"F32": np.dtype("f4"), "F16": np.dtype("f2"), "BF16": np.dtype(ml_dtypes.bfloat16), "F64": np.dtype("f8")}
# Token ids, masks, and codes of quantised matrices.
INTEGERS = {f"{kind}{8 * size}": np.dtype(f"{kind.lower()}{size}") for kind in "IU" for size in (8, 4, 2, 1)}
INTEGERS |= {"BOOL": np.dtype("?"), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn)}


@dataclass(frozen=True)
class TensorEntry:
    name: str
    file: Path
    dtype: str  # in safetensors' notation
    shape: tuple[int, ...]
    start: int  # its first byte in the file

    @property
    def source(self) -> str:
        return f"tensor {self.name} in {self.file}"

    @property
    def size(self) -> int:
        """Bytes, or the number of elements of an unsupported type."""
        dtype = (DTYPES | INTEGERS).get(self.dtype)
        return prod(self.shape) * (1 if dtype is None else dtype.itemsize)

    def read(self, *, integers: bool = False) -> np.ndarray:
        """A read-only view of the file. The type must be in ``DTYPES``, or with ``integers`` in ``INTEGERS``."""
        dtypes = DTYPES | INTEGERS if integers else DTYPES
        if self.dtype not in dtypes:
            raise CheckpointError(f"{self.source} has type {self.dtype}; supported: {listed(dtypes)}")
        try:
            if 0 in self.shape:  # mmap refuses an empty range
                return np.empty(self.shape, dtypes[self.dtype])
            # One mapping a tensor, whose pages can be reclaimed after copying. `np.memmap` is several times slower.
            before, count = self.start % mmap.ALLOCATIONGRANULARITY, prod(self.shape)
            with self.file.open("rb") as stream:
                length = before + count * dtypes[self.dtype].itemsize
                mapped = mmap.mmap(stream.fileno(), length, access=mmap.ACCESS_READ, offset=self.start - before)
            return np.frombuffer(mapped, dtypes[self.dtype], count, before).reshape(self.shape)
        except (OSError, ValueError) as error:
            problem = f"of shape {self.shape!r:.80}, cannot be read ({error})"
            raise CheckpointError(f"{self.source}, {problem}") from error


FLOATS = (*DTYPES.values(), INTEGERS["F8_E4M3"])
FINITE_BLOCK = 2**19  # bytes; later reductions read them from a core's cache


def is_finite(array: np.ndarray) -> bool:
    """False if a float array has NaN or infinity.

    Numbers below 2 lack a bit of infinity, so that one reduction is enough for most weights. Else positive numbers are
    compared as signed integers, negative ones as unsigned: those that are not finite have the largest bits."""
    if array.dtype not in FLOATS:
        return True
    size = array.dtype.itemsize
    # The bits of infinity, or of FP8's NaN. No finite number has all of them.
    limit = int(np.array(np.inf).astype(array.dtype).view(f"u{size}"))
    flat, step = array.reshape(-1), FINITE_BLOCK // size
    for start in range(0, len(flat), step):
        block = flat[start : start + step].view(f"u{size}")
        if int(np.bitwise_or.reduce(block)) & limit < limit:
            continue
        if block.view(f"i{size}").max() >= limit or block.max() >= limit + (1 << 8 * size - 1):
            return False
    return True


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file. The library checks its header against the file's size."""
    try:
        with safe_open(file, framework="numpy"), file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length).decode(), object_pairs_hook=_unique)
    except (SafetensorError, OSError, ValueError) as error:
        problem = f"{file} is not a readable safetensors file, or a truncated one"
        raise CheckpointError(f"{problem} ({error!s:.300})") from error
    header.pop("__metadata__", None)
    return {
        name: TensorEntry(name, file, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A dict of pairs with distinct names. The library would take the last of two equal names."""
    if len(header := dict(pairs)) < len(pairs):
        raise ValueError("its header has a name twice")
    return header


def read_shards(files: Iterable[Path], read: Callable[[Path], Mapping[str, T]]) -> dict[str, T]:
    """The tensors of all shards; no tensor may be in two."""
    tensors: dict[str, T] = {}
    for file in files:
        shard = read(file)
        if twice := shard.keys() & tensors.keys():
            raise CheckpointError(f"tensors {listed(twice)} are in {file} and in another shard; keep one of the two")
        tensors |= shard
    return tensors


def read_headers(files: Iterable[Path]) -> dict[str, TensorEntry]:
    """The tensors of all shards, stacked experts one by one. In a multimodal model: of the language model, under the
    names of a text model."""
    shards = read_shards(files, read_header)
    tensors = {name: entry for whole in shards.values() for name, entry in _experts(whole, shards)}
    if not any(name.startswith(OTHER_MODALITIES) for name in tensors):
        return tensors
    text: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        if not name.startswith(OTHER_MODALITIES):
            # language_model.model.layers (as published), model.language_model.layers (transformers 5)
            name = name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)
            text[name] = replace(entry, name=name)
    return text


def _experts(entry: TensorEntry, names: Container[str]) -> Iterable[tuple[str, TensorEntry]]:
    """The matrices of experts in one tensor, [X, 2 I, M] or [X, M, I], named as if each had its own (Qwen3.5, Gemma 4).
    Those of gpt-oss, which have biases, are transposed and stay in one tensor."""
    projections = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    stem, _, name = entry.name.rpartition(".")
    is_stacked = stem.endswith(".experts") and len(entry.shape) == 3 and f"{entry.name}_bias" not in names
    if name not in projections or not is_stacked or 0 in entry.shape or entry.shape[0] > MAX_EXPERTS:
        return [(entry.name, entry)]
    count, rows, columns = entry.shape
    parts = projections[name]
    each = [f"{stem}.{expert}.{part}.weight" for expert in range(count) for part in parts]
    shape, size = (rows // len(parts), columns), entry.size // len(each)
    starts = (entry.start + i * size for i in range(len(each)))
    return [(name, replace(entry, name=name, shape=shape, start=at)) for name, at in zip(each, starts, strict=True)]


def same_content(first: np.ndarray, second: np.ndarray, rtol: float = 0, atol: float = 0) -> bool:
    """True if two float matrices are equal within ``np.allclose``'s tolerances. Compares a few rows at a time."""
    blocks = (slice(start, start + 4096) for start in range(0, len(first), 4096))
    return first.shape == second.shape and all(
        np.allclose(np.float32(first[rows]), np.float32(second[rows]), rtol, atol) for rows in blocks
    )


def save_tensors(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a safetensors file that transformers accepts. Raises OSError."""
    whole = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    try:
        save_file(whole, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{file}: {error}") from error
    file.chmod(0o644)  # the library sets 0o600


def save_shards(folder: Path, sizes: Mapping[str, int], read: Callable[[str], np.ndarray]) -> None:
    """Write tensors of known byte sizes as model.safetensors, or as several files of about 1 GiB and their index.
    ``read`` returns a tensor by name. Memory holds the tensors of one file."""
    from huggingface_hub import split_state_dict_into_shards_factory

    plan = split_state_dict_into_shards_factory(
        dict(sizes), get_storage_size=lambda size: size, filename_pattern="model{suffix}.safetensors",
        max_shard_size=1 << 30,
    )  # fmt: skip
    for file, names in plan.filename_to_tensors.items():
        save_tensors(folder / file, {name: read(name) for name in names})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class ModelFiles:
    name: str  # as the user wrote it
    folder: Path  # of config.json, tokenizer files and weights
    config: Mapping[str, Any] = field(compare=False)  # config.json; see `read_folder` for `tie_word_embeddings`
    weights: tuple[Path, ...]  # the safetensors shards
    chat_template: Path | None = None  # replaces the tokenizer's own; None: the tokenizer's own

    @cached_property
    def headers(self) -> dict[str, TensorEntry]:
        return read_headers(self.weights)


def read_folder(name: str, path: Path, *, outline: bool = False) -> ModelFiles:
    """The model in a folder: config.json and safetensors, single or sharded. With ``outline`` the weights may be
    absent, and ``path`` may be a config.json.

    ``tie_word_embeddings`` is set according to the tensors: true if absent without an ``lm_head.weight``, where
    transformers' default, false, would leave no output matrix; false if ``lm_head.weight`` differs from the embedding.
    """
    folder = path if path.is_dir() else path.parent
    config = read_json(folder / "config.json" if path.is_dir() else path, name)
    if outline and not (path.is_dir() and any((folder / file).is_file() for file in LAYOUTS[0])):
        return ModelFiles(name, folder, config, ())
    files = ModelFiles(name, folder, config, find_weights(name, folder))
    tensors, tied = files.headers, config.get("tie_word_embeddings")
    config.holds = Holds(len(tensors))
    head, embed = tensors.get(HEAD_TENSOR), tensors.get(EMBED_TENSOR)
    has_head = any(tensor.startswith(HEAD_TENSOR.removesuffix("weight")) for tensor in tensors)
    if has_head and (head is None or head.dtype not in DTYPES):  # a quantised output matrix
        config["tie_word_embeddings"] = False
    elif head is None and embed is not None:
        if tied is not None and tied is not True:
            problem = f"tie_word_embeddings is {tied!r:.80}, and there is no {HEAD_TENSOR}; a shard may be missing"
            raise CheckpointError(f"{folder / 'config.json'}: {problem}")
        config["tie_word_embeddings"] = True
    elif head is not None and embed is not None and tied:
        config["tie_word_embeddings"] = same_content(head.read(), embed.read())
    return files


def find_weights(name: str, folder: Path, *, torch_too: bool = False) -> tuple[Path, ...]:
    """The weights in ``folder``: safetensors, else with ``torch_too`` torch's files."""
    layouts = LAYOUTS[: 1 + torch_too]
    for single, index in layouts:
        if (folder / index).is_file():
            return _shards(folder / index, name)
        if (folder / single).is_file():
            return (folder / single,)
    present = listed(file.name for file in folder.iterdir() if file.is_file()) or "no files"
    supported = ", ".join(file for layout in layouts for file in layout)
    advice = "" if torch_too else ". Give a .gguf file itself; convert torch's files with save_pretrained"
    raise CheckpointError(f"{folder} (given as {name!r}) has none of: {supported}; it has {present}{advice}")


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
