"""Quantised weights in safetensors, as published: fp8, GPTQ, AWQ and compressed-tensors.

All are brought to one form, `Stored`. Activations are never quantised here, whatever the config says of them, so the
text is that of the dequantised weights. Layouts: the config's `quant_method`, and the projects' documents and code.

    fp8                 weight float8_e4m3 [out, in], weight_scale_inv [out / 128, in / 128] (DeepSeek, Qwen3)
    gptq                qweight int32 [in / 8, out], qzeros [groups, out / 8], scales [groups, out], g_idx [in]
    awq                 qweight int32 [in, out / 8], qzeros [groups, out / 8], scales [groups, out]
    compressed-tensors  weight_packed int32 [out, in / 8], weight_scale [out, groups], weight_zero_point; or weight in
                        int8 or float8_e4m3 with weight_scale
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from specjax.checkpoint import four_bits, gguf_blocks
from specjax.checkpoint.files import CheckpointError, listed
from specjax.checkpoint.four_bits import AWQ_ORDER
from specjax.checkpoint.gguf_blocks import KINDS
from specjax.checkpoint.stored import PACKED, Rows, Stored
from specjax.checkpoint.values import flag, given, require
from specjax.checkpoint.weights import INDEX_NAME, ModelFiles, TensorEntry, save_shards
from specjax.models.params import Bits

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
METHODS = ("fp8", "gptq", "awq", "compressed-tensors", "gguf")
# Of activations and caches, which are not quantised here.
_UNUSED = re.compile(
    r".*\.((input|output)_(scale|zero_point|global_scale)|(q|k|v|kv|prob|prob_output)_(scale|zero_point))"
)


@dataclass(frozen=True)
class QuantisedEntry:
    """A quantised matrix among a checkpoint's tensors; reads like a `TensorEntry`."""

    name: str
    shape: tuple[int, int]
    load: Callable[[], Stored]
    size: int  # bytes in the files

    def read(self) -> np.ndarray:
        """float32 [out, in]."""
        return self.load().dequantised()


Entries = dict[str, "TensorEntry | QuantisedEntry"]


def refuse_unknown(config: Mapping[str, Any]) -> None:
    """Refuse the `quantization_config` of a config.json that `matrices` cannot read, before any weight is."""
    section = config.get("quantization_config")
    if section in (None, {}):
        return
    if not isinstance(section, Mapping):
        raise CheckpointError(f"config.json: quantization_config is {section!r:.80}; an object is needed")
    _reader(section)


def matrices(files: ModelFiles) -> Entries:
    """The tensors of a model, with one entry `x.weight` in the place of those that hold a quantised matrix.

    Raises:
      CheckpointError: a method, a number of bits or a layout that is not supported.
    """
    section = files.config.get("quantization_config")
    if section in (None, {}):
        return dict(files.headers)
    found = _reader(section)({name: entry for name, entry in files.headers.items() if not _UNUSED.fullmatch(name)})
    if not any(isinstance(entry, QuantisedEntry) for entry in found.values()):
        raise CheckpointError(
            f"config.json: quantization_config says {section.get('quant_method')}, and no tensor is quantised that way"
        )
    return found


def bits_per_weight(config: Mapping[str, Any], quantization: str = "auto", *, keeps_half: bool = False) -> Bits | None:
    """An estimate of what a model's matrices take, from its config.json; None: they have the model's dtype.

    ``quantization``: as in ``load_params``; ``keeps_half``: whether matrices in 16 bits stay so beside float32.
    """
    section = given(config, "quantization_config", {})
    if quantization != "auto":
        known = {"fp8": Bits(8.0, True, channel=4), "int8": Bits(8.0, True, channel=4), "int4": Bits(5.0, True)}
        return known.get(quantization)
    method = section.get("quant_method")
    if method == "gguf":
        return Bits(float(given(section, "bits_per_weight", 5.0)), True)
    if method == "fp8":
        return Bits(8.0, False)
    if method in ("gptq", "awq"):
        # Of each group a scale in 16 bits and an offset in 32.
        return Bits(require(section, "bits") + 48 / max(int(given(section, "group_size", 128)), 32), False)
    if method == "compressed-tensors":
        groups = [given(group, "weights", {}) for group in given(section, "config_groups", {}).values()]
        return Bits(max((require(each, "num_bits") for each in groups), default=8) + 0.25, False)
    stored = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return Bits(16.0, True) if keeps_half and stored in ("bfloat16", "float16") else None


def save_dequantised(files: ModelFiles, folder: Path) -> None:
    """Write a model to an empty folder with float32 weights, for programs that do not read its format."""
    tensors = matrices(files)
    for file in files.folder.iterdir():
        if file.suffix in (".json", ".jinja", ".model", ".txt") and file.name != INDEX_NAME:
            shutil.copy(file, folder)
    config = {key: value for key, value in files.config.items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    sizes = {name: 4 * math.prod(entry.shape) for name, entry in tensors.items()}
    save_shards(folder, sizes, lambda name: np.asarray(tensors[name].read(), np.float32))


def _reader(section: Mapping[str, Any]) -> Callable[[dict[str, TensorEntry]], Entries]:
    method = section.get("quant_method")
    if method == "fp8":
        block = _block(section, "weight_block_size")
        return lambda tensors: _scaled(tensors, block)
    if method == "gptq":
        bits, back = _bits(section, "bits"), given(section, "checkpoint_format", "gptq") == "gptq"
        if (kind := given(section, "checkpoint_format", "gptq")) not in ("gptq", "gptq_v2"):
            raise CheckpointError(f"config.json: checkpoint_format is {kind!r:.80}; supported: gptq, gptq_v2")
        ordered = "desc_act" in section and flag(section, "desc_act")
        return lambda tensors: _packed_by_input(tensors, bits, int(back), ordered)
    if method == "awq":
        bits = _bits(section, "bits", (4,))
        if (version := str(given(section, "version", "gemm")).lower()) != "gemm":
            raise CheckpointError(f"config.json: version of awq is {version!r:.80}; supported: gemm")
        return lambda tensors: _awq(tensors, bits)
    if method == "compressed-tensors":
        return _compressed(section)
    if method == "gguf":
        return _blocks
    raise CheckpointError(
        f"config.json: quantization_config has quant_method {method!r:.80}; supported: {', '.join(METHODS)}, none"
    )


def _bits(section: Mapping[str, Any], key: str, known: tuple[int, ...] = (4, 8)) -> int:
    if (bits := require(section, key)) not in known:
        raise CheckpointError(f"config.json: {key} is {bits}; supported: {listed(known)}")
    return bits


def _block(section: Mapping[str, Any], key: str) -> tuple[int, int]:
    """Rows and columns of a block."""
    block = given(section, key, [1, 1])
    if not isinstance(block, list) or len(block) != 2 or not all(type(each) is int and each > 0 for each in block):
        raise CheckpointError(f"config.json: {key} is {block!r:.80}; two positive integers are needed")
    return block[0], block[1]


def _scaled(tensors: dict[str, TensorEntry], block: tuple[int, int]) -> Entries:
    """Matrices whose codes are numbers of their own, with a scale beside them for all, for each row, or by blocks."""
    entries: Entries = {}
    taken: set[str] = set()
    for name, entry in tensors.items():
        if not name.endswith(".weight") or entry.dtype not in ("F8_E4M3", "I8"):
            continue
        scales = [f"{name}{suffix}" for suffix in ("_scale_inv", "_scale") if f"{name}{suffix}" in tensors]
        if not scales:
            raise CheckpointError(f"tensor {name} in {entry.file} is {entry.dtype} and has no {name}_scale")
        scale, zero = tensors[scales[0]], tensors.get(f"{name}_zero_point")
        used = {name, scales[0], f"{name}_zero_point"}
        taken |= used

        def load(entry: TensorEntry = entry, scale: TensorEntry = scale, zero: TensorEntry | None = zero) -> Stored:
            codes = entry.read(integers=True)
            zeros = None if zero is None else _rows(zero.read(integers=True), codes.shape, block)
            return Stored(codes, _rows(scale.read(integers=True), codes.shape, block), zero=zeros)

        entries[name] = QuantisedEntry(name, _two(entry), load, _bytes(tensors, used))
    return {name: entry for name, entry in tensors.items() if name not in taken} | entries


def _packed_by_input(tensors: dict[str, TensorEntry], bits: int, back: int, ordered: bool) -> Entries:
    """GPTQ. Version 1 stores each zero point less one (`back`); `ordered`: columns may lie in any order of groups."""

    def make(stem: str, words: TensorEntry) -> tuple[tuple[int, int], set[str], Callable[[], Stored]]:
        zeros, scales = (_need(tensors, f"{stem}.{part}") for part in ("qzeros", "scales"))
        index = _need(tensors, f"{stem}.g_idx") if ordered else tensors.get(f"{stem}.g_idx")

        shape = words.shape[1], words.shape[0] * (32 // bits)

        def load() -> Stored:
            codes = _codes(words.read(integers=True).T, bits, shape[1])
            # Zeros wrap: that of a symmetric 8-bit weight, 128, is stored as 127, and 0 as all ones.
            zero = (unpacked(zeros.read(integers=True), bits).astype(np.int16) + back) & (2**bits - 1 if back else -1)
            groups = None if index is None else index.read(integers=True)
            return _ordered(stem, codes, np.asarray(scales.read()).T, zero.T, groups)

        return shape, {f"{stem}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}, load

    return _by_stem(tensors, ".qweight", make)


def _awq(tensors: dict[str, TensorEntry], bits: int) -> Entries:
    def make(stem: str, words: TensorEntry) -> tuple[tuple[int, int], set[str], Callable[[], Stored]]:
        zeros, scales = (_need(tensors, f"{stem}.{part}") for part in ("qzeros", "scales"))

        def load() -> Stored:
            codes, zero = words.read(integers=True), unpacked(zeros.read(integers=True), bits, order=AWQ_ORDER)
            if len(codes) % PACKED == 0 and codes.dtype.itemsize == 4:

                def write(rows: slice, found: np.ndarray) -> None:
                    four_bits.rows_from_awq(codes, rows, found)

                stored = Rows((8 * codes.shape[1], len(codes) // 2), np.dtype(np.uint8), write), bits
            else:
                stored = unpacked(codes, bits, order=AWQ_ORDER).T, 8
            return _ordered(stem, stored, np.asarray(scales.read()).T, zero.T, None)

        shape = words.shape[1] * (32 // bits), words.shape[0]
        return shape, {f"{stem}.{part}" for part in ("qweight", "qzeros", "scales")}, load

    return _by_stem(tensors, ".qweight", make)


def _compressed(section: Mapping[str, Any]) -> Callable[[dict[str, TensorEntry]], Entries]:
    groups = given(section, "config_groups", {})
    weights = [given(group, "weights", {}) for group in groups.values()] if isinstance(groups, Mapping) else []
    if not weights or not all(isinstance(each, Mapping) for each in weights):
        raise CheckpointError("config.json: quantization_config has no config_groups with weights")
    layout = given(section, "format", "")
    known = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
    if layout not in known:
        raise CheckpointError(
            f"config.json: format of compressed-tensors is {layout!r:.80}; supported: {listed(known)}"
        )
    if len({require(each, "num_bits") for each in weights}) > 1:
        raise CheckpointError("config.json: config_groups have several num_bits; supported: one")
    if layout != "pack-quantized":
        _bits(weights[0], "num_bits", (8,))
        if (kind := weights[0].get("type")) not in ("int", "float"):
            raise CheckpointError(f"config.json: type is {kind!r:.80}; supported: int, float")
        columns = given(weights[0], "group_size", 1)
        if type(columns) is not int:
            raise CheckpointError(f"config.json: group_size is {columns!r:.80}; an integer is needed")
        block = _block(weights[0], "block_structure")
        block = block if block != (1, 1) else (1, max(columns, 1))
        return lambda tensors: _scaled(tensors, block)
    bits = _bits(weights[0], "num_bits")
    symmetric = "symmetric" not in weights[0] or flag(weights[0], "symmetric")
    return lambda tensors: _packed_by_output(tensors, bits, symmetric)


def _packed_by_output(tensors: dict[str, TensorEntry], bits: int, symmetric: bool) -> Entries:
    def make(stem: str, words: TensorEntry) -> tuple[tuple[int, int], set[str], Callable[[], Stored]]:
        scales, shape = _need(tensors, f"{stem}.weight_scale"), _need(tensors, f"{stem}.weight_shape")
        zeros = None if symmetric else _need(tensors, f"{stem}.weight_zero_point")
        index = tensors.get(f"{stem}.weight_g_idx")
        out, inside = (int(each) for each in np.asarray(shape.read(integers=True)))

        def load() -> Stored:
            codes = _codes(words.read(integers=True), bits, inside)
            scale = np.asarray(scales.read())
            zero = np.full(scale.shape, 2 ** (bits - 1), np.int16)  # codes are stored as unsigned numbers
            if zeros is not None:  # packed along the rows; before 2025 signed numbers, one a byte
                stored = zeros.read(integers=True)
                is_packed = stored.dtype.itemsize == 4
                zero = unpacked(stored.T, bits)[:, :out].T if is_packed else stored.astype(np.int16) + 2 ** (bits - 1)
            return _ordered(stem, codes, scale, zero, None if index is None else index.read(integers=True))

        names = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
        return (out, inside), {f"{stem}.{name}" for name in names}, load

    return _by_stem(tensors, ".weight_packed", make)


def _blocks(tensors: dict[str, TensorEntry]) -> Entries:
    """Matrices of a GGUF file, as `gguf_model` keeps them: rows of blocks under the name of their type."""
    found: Entries = {}
    for name, rows in tensors.items():
        stem, _, suffix = name.rpartition(".")
        if (kind := suffix.upper()) not in KINDS:
            found[name] = rows
            continue
        shape = rows.shape[0], rows.shape[1] // KINDS[kind].size * KINDS[kind].weights

        def load(rows: TensorEntry = rows, kind: str = kind) -> Stored:
            return gguf_blocks.read(kind, rows.read(integers=True))

        found[f"{stem}.weight"] = QuantisedEntry(f"{stem}.weight", shape, load, rows.size)
    return found


def _by_stem(tensors: dict[str, TensorEntry], suffix: str, make: Callable[[str, TensorEntry], Any]) -> Entries:
    """The tensors, with `stem.weight` in the place of those that `make` takes for each `stem` + `suffix`."""
    entries: Entries = {}
    taken: set[str] = set()
    for name, words in tensors.items():
        if name.endswith(suffix):
            stem = name.removesuffix(suffix)
            shape, used, load = make(stem, words)
            taken |= used
            entries[f"{stem}.weight"] = QuantisedEntry(f"{stem}.weight", shape, load, _bytes(tensors, used))
    return {name: entry for name, entry in tensors.items() if name not in taken} | entries


def _bytes(tensors: Mapping[str, TensorEntry], used: set[str]) -> int:
    return sum(tensors[name].size for name in used if name in tensors)


def _codes(words: np.ndarray, bits: int, inside: int) -> tuple[np.ndarray | Rows, int]:
    """The codes in int32 words [out, words], the first `inside` of each row, as `Stored` has them; and their bits: 8
    instead of 4 where they do not fit the packing."""
    if bits == 4 and inside % PACKED == 0 and words.dtype.itemsize == 4:
        words = words[:, : inside // 8]

        def write(rows: slice, found: np.ndarray) -> None:
            four_bits.from_rows(words[rows], found)

        return Rows((len(words), inside // 2), np.dtype(np.uint8), write), 4
    return unpacked(words, bits)[:, :inside], 8


def unpacked(words: np.ndarray, bits: int, order: tuple[int, ...] = ()) -> np.ndarray:
    """The numbers in int32 words [rows, words], from the low end: uint8 [rows, words * 32 / bits]."""
    if words.dtype.itemsize != 4:
        raise CheckpointError(f"packed weights of {words.dtype}; words of 32 bits are needed")
    count = 32 // bits
    shifts = (np.arange(count, dtype=np.uint32) * bits)[None, None]
    wide = np.ascontiguousarray(words).view(np.uint32)[:, :, None]
    numbers = (wide >> shifts & np.uint32(2**bits - 1)).astype(np.uint8)
    if order:
        numbers = numbers[:, :, np.argsort(order)]
    return numbers.reshape(len(words), -1)


def _ordered(
    stem: str, codes: tuple[np.ndarray | Rows, int], scale: np.ndarray, zero: np.ndarray, index: np.ndarray | None
) -> Stored:
    """Of codes and their bits. Columns are sorted by their groups (act-order), which `index` [in] gives; negative or
    None: as they are."""
    stored = Stored(codes[0], scale, codes[1], zero)
    inside, groups = stored.inside, scale.shape[1]
    if inside % groups:
        raise CheckpointError(f"{stem} has {groups} groups of scales for {inside} columns; equal groups are needed")
    if index is None or (np.asarray(index) < 0).any():
        return stored
    order = np.argsort(index, kind="stable")
    if np.array_equal(order, np.arange(len(order))):
        return stored
    counts = np.bincount(index, minlength=scale.shape[1])
    if (counts != counts[0]).any():
        raise CheckpointError(
            f"{stem}.g_idx has groups of {listed(set(counts.tolist()))} columns; equal groups are needed"
        )
    from specjax_kernels.quantised import pack

    found = stored.bytewise()[:, order]
    return replace(stored, codes=pack(found) if stored.bits == 4 else found, order=order)


def _rows(numbers: np.ndarray, shape: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
    """A number of all, of each row or of each block as numbers of each row and of equal groups, [out, groups]."""
    wide = np.asarray(numbers)
    wide = wide.reshape(-1, 1) if wide.ndim < 2 else wide
    out, inside = shape
    if len(wide) == 1:
        wide = wide.repeat(out, axis=0)
    elif len(wide) != out:
        wide = wide.repeat(block[0], axis=0)[:out]
    if wide.shape[1] > 1 and block[1] > 1 and wide.shape[1] * block[1] != inside:
        group = math.gcd(block[1], inside)  # the last block is shorter
        wide = wide.repeat(block[1] // group, axis=1)[:, : inside // group]
    return wide


def _two(entry: TensorEntry) -> tuple[int, int]:
    if len(entry.shape) != 2:
        raise CheckpointError(f"tensor {entry.name} in {entry.file} is {list(entry.shape)}; a matrix is needed")
    return entry.shape[0], entry.shape[1]


def _need(tensors: Mapping[str, TensorEntry], name: str) -> TensorEntry:
    if name not in tensors:
        raise CheckpointError(f"the quantised checkpoint has no tensor {name}")
    return tensors[name]
