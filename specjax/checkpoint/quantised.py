"""Quantised weights: fp8, fp4, GPTQ, AWQ and compressed-tensors in safetensors, and GGUF's blocks, read as one class.

    weight[o, i] = (code[o, i] - zero[o, g]) * scale[o, g] + offset[o, g]        g: the group of column i

Formats pack these numbers and share them between rows in different ways. A `specjax_kernels.Quantised` of numpy arrays
has scales and offsets for each row, and its groups are equal runs of columns; zeros become a shift or offsets, and no
weight changes. Activations are not quantised, so a model gives the text of the dequantised weights.

    fp8                 weight float8_e4m3 [out, in], weight_scale_inv [out / 128, in / 128] (DeepSeek, Qwen3)
    gptq                qweight int32 [in / 8, out], qzeros [groups, out / 8], scales [groups, out], g_idx [in]
    awq                 qweight int32 [in, out / 8], qzeros [groups, out / 8], scales [groups, out]
    compressed-tensors  weight_packed int32 [out, in / 8], weight_scale [out, groups], weight_zero_point; or weight in
                        int8 or float8_e4m3 with weight_scale
    nvfp4               weight or weight_packed uint8 [out, in / 2], weight_scale float8_e4m3 [out, in / 16], and
                        weight_scale_2 (modelopt) or its inverse weight_global_scale (compressed-tensors)
    mxfp4               experts of gpt-oss: ..._blocks uint8 [experts, out, in / 32, 16], ..._scales uint8
    gguf                uint8 [out, blocks * bytes of a block], under the name of the block type (see `gguf`)

In order: matrices of a model, quantization_config, formats in safetensors, packed codes, blocks.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specjax.checkpoint.files import CheckpointError, Settings, damaged, invalid, listed, unsupported
from specjax.checkpoint.weights import INDEX_NAME, ModelFiles, TensorEntry, save_shards
from specjax.models.params import Bits

if TYPE_CHECKING:
    from specjax_kernels import Quantised

BLOCK_BYTES = 2**18  # rows are converted in batches of this size, so that temporary arrays fit the cache
FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the value of each code of 4 bits (e2m1)."""
NVFP4_GROUP = 16  # columns of a scale
NVFP4_LAYOUT = "nvfp4-pack-quantized"  # in compressed-tensors
MODELOPT = ("modelopt", "modelopt_fp4")
PACKED = 32  # columns that codes of 4 bits are packed by; see `specjax_kernels.Quantised`
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds this column of the eight
# Tensors for quantised activations and caches.
_UNUSED = re.compile(
    r".*\.((input|output)_(scale|zero_point|global_scale)|(q|k|v|kv|prob|prob_output)_(scale|zero_point))"
)


@dataclass(frozen=True)
class QuantisedEntry:
    """A quantised matrix of a checkpoint, with the members of a `TensorEntry` that loading needs."""

    stem: str  # its name
    parts: Mapping[str, TensorEntry]  # its tensors, by their names after the stem
    stored: Format

    @cached_property
    def shape(self) -> tuple[int, ...]:
        codes = self.parts[self.stored.parts[0]]
        with damaged(self.source):
            if len(codes.shape) != 1 + self.stored.axes.count(","):
                raise CheckpointError(f"{codes.name} has the shape {list(codes.shape)}; {self.stored.axes} is needed")
            return self.stored.shape(self, *codes.shape)

    @property
    def size(self) -> int:
        """Bytes in the files."""
        return sum(tensor.size for tensor in self.parts.values())

    @property
    def source(self) -> str:
        return f"the quantised matrix {self.stem} in {next(iter(self.parts.values())).file}"

    def part(self, name: str) -> np.ndarray:
        if name not in self.parts:
            raise CheckpointError(f"{self.source} has no tensor {self.stem}.{name}")
        return self.parts[name].read(integers=True)

    def load(self) -> Quantised:
        with damaged(self.source):
            matrix, columns = self.stored.read(self), self.shape[1]
            rows = math.prod(self.shape) // columns
            numbers = (matrix.scale, matrix.offset, matrix.super_scale, matrix.super_offset)
            scales = [np.asarray(array) for array in numbers if array is not None]
            if len(matrix.codes) != rows or any(len(array) != rows or columns % array.shape[1] for array in scales):
                sizes = listed(array.shape for array in (matrix.codes, *scales))
                problem = f"is {list(self.shape)}, and its codes and scales are {sizes}"
                advice = "use the config.json that was saved with these weights"
                raise CheckpointError(f"{self.source} {problem}; {advice}")
            return matrix

    def read(self) -> np.ndarray:
        """float32 [out, in]; of stacked experts [experts, in, out]."""
        from specjax_kernels import dequantise

        with np.errstate(invalid="ignore"):  # of NaN, which loading refuses
            matrix = np.asarray(dequantise(self.load()))
        if len(self.shape) == 2:
            return matrix.reshape(self.shape)
        return matrix.reshape(self.shape[0], -1, self.shape[1]).swapaxes(1, 2)


Entries = dict[str, TensorEntry | QuantisedEntry]


class Format(NamedTuple):
    """How a quantised matrix is stored."""

    parts: tuple[str, ...]  # names of its tensors after the stem, of the codes first
    shape: Callable[..., tuple[int, ...]]  # (entry, each size of the codes) -> shape of the matrix
    read: Callable[[QuantisedEntry], Quantised]
    dtypes: tuple[str, ...] = ()  # of the codes; empty: any
    axes: str = "[out, in]"  # of the codes
    name: str = "weight"  # after the stem, of the matrix that the tensors are


def matrices(files: ModelFiles) -> Entries:
    """The tensors of a model. The tensors of a quantised matrix are replaced by one entry, such as ``x.weight``."""
    section = Settings(files.config).section("quantization_config")
    if not section:
        return dict(files.headers)
    by_part = formats(section)
    tensors = {name: entry for name, entry in files.headers.items() if not _UNUSED.fullmatch(name)}
    entries, used = Entries(), set[str]()
    for name, codes in tensors.items():
        stem, _, part = name.rpartition(".")
        stored = by_part.get(part)
        if stored is None or (stored.dtypes and codes.dtype not in stored.dtypes):
            continue
        names = {part: f"{stem}.{part}" for part in stored.parts if f"{stem}.{part}" in tensors}
        parts = {part: tensors[name] for part, name in names.items()}
        entries[f"{stem}.{stored.name}"] = QuantisedEntry(stem, parts, stored)
        used |= set(names.values())
    if not entries:
        method = section.get("quant_method")
        raise CheckpointError(f"config.json: quant_method is {method}, and no tensor is quantised that way")
    return {name: entry for name, entry in tensors.items() if name not in used} | entries


def bits_per_weight(config: Mapping[str, Any], quantization: str = "auto", *, keeps_half: bool = False) -> Bits | None:
    """Estimated size of a model's matrices, from its config.json. None: they have the model's dtype. ``keeps_half``:
    16-bit matrices keep their type beside float32 activations."""
    section = Settings(config).section("quantization_config")
    if quantization != "auto":
        sizes = {"fp8": Bits(8.0, True, channel=4), "int8": Bits(8.0, True, channel=4), "int4": Bits(5.0, True)}
        return sizes.get(quantization)
    method = section.get("quant_method")
    if method == "gguf":
        return Bits(section.number("bits_per_weight", 5.0), True)
    if method == "fp8":
        return Bits(8.0, False)
    if method == "mxfp4":
        return Bits(4.25, False, experts=True)
    if method in ("gptq", "awq"):
        # A group has a scale of 16 bits and an offset of 32.
        return Bits(_bits(section, "bits") + 48 / max(_group_size(section, 128), 32), False)
    if _is_nvfp4(section):  # codes of 8 bits, and a float32 for each group
        return Bits(8 + 32 / NVFP4_GROUP, False)
    if method in ("compressed-tensors", *MODELOPT):
        bits = max((settings.integer("num_bits") for settings in _weight_groups(section)), default=8)
        return Bits(bits + 0.25, False)
    stored = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return Bits(16.0, True) if keeps_half and stored in ("bfloat16", "float16") else None


def save_dequantised(files: ModelFiles, folder: Path) -> None:
    """Write a model with float32 weights to an empty folder, for programs that cannot read its format."""
    tensors = matrices(files)
    for file in files.folder.iterdir():
        if file.suffix in (".json", ".jinja", ".model", ".txt") and file.name != INDEX_NAME:
            shutil.copy(file, folder)
    config = {key: value for key, value in files.config.items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    sizes = {name: 4 * math.prod(entry.shape) for name, entry in tensors.items()}
    save_shards(folder, sizes, lambda name: np.asarray(tensors[name].read(), np.float32))


def quantised(codes: np.ndarray, scale: np.ndarray | None, **others: Any) -> Quantised:
    """A `specjax_kernels.Quantised` of numpy arrays. Imported late: jax takes a second."""
    from specjax_kernels import Quantised

    return Quantised(codes, scale, **others)


def by_rows(count: int, size: int, read: Callable[[slice], Quantised]) -> Quantised:
    """The matrix [count, in] whose rows take `size` bytes each, which `read` converts in batches."""
    step = max(1, BLOCK_BYTES // size)
    fields: dict[str, Any] = {}
    for start in range(0, count, step):
        part = vars(read(rows := slice(start, start + step)))
        if not fields:
            fields = part | {n: np.empty((count, a.shape[1]), a.dtype) for n, a in part.items() if np.ndim(a)}
        for name, array in part.items():
            if np.ndim(array):
                fields[name][rows] = array
    return quantised(**fields)


def formats(section: Settings) -> dict[str, Format]:
    """The formats of matrices, by the name of their codes after the stem. `section`: quantization_config."""
    method = section.get("quant_method")
    if method == "fp8":
        return {"weight": _scaled_format(_block_shape(section, "weight_block_size"))}
    if method == "gptq":
        bits, version = _bits(section, "bits"), section.optional("checkpoint_format", "gptq")
        if version not in ("gptq", "gptq_v2"):
            raise unsupported("checkpoint_format", version, "gptq, gptq_v2")
        names = ("qweight", "qzeros", "scales", "g_idx")
        # Version 1 stores each zero point minus one.
        read = partial(_gptq, bits=bits, zero_shift=int(version == "gptq"), act_order=section.boolean("desc_act"))
        return {"qweight": Format(names, lambda entry, words, rows: (rows, words * (32 // bits)), read)}
    if method == "awq":
        bits = _bits(section, "bits", (4,))
        if (version := str(section.optional("version", "gemm")).lower()) != "gemm":
            raise unsupported("version of awq", version, "gemm")
        names = ("qweight", "qzeros", "scales")
        read = partial(_awq, bits=bits)
        return {"qweight": Format(names, lambda entry, columns, words: (words * (32 // bits), columns), read)}
    if method == "compressed-tensors":
        return _compressed_tensors(section)
    if method in MODELOPT:
        if _is_nvfp4(section):
            return {"weight": _nvfp4_format("weight", "weight_scale_2")}
        if (algorithm := section.get("quant_algo")) != "FP8":
            raise unsupported("quant_algo", algorithm, "NVFP4, FP8")
        return {"weight": _scaled_format((1, 1))}
    if method == "mxfp4":
        return {f"{name}_blocks": _mxfp4_format(name) for name in ("gate_up_proj", "down_proj")}
    if method == "gguf":
        return {name.lower(): _block_format(name) for name in BLOCK_TYPES}
    raise unsupported(
        "quant_method of quantization_config", method, "fp8, gptq, awq, compressed-tensors, modelopt, mxfp4, gguf, none"
    )


def _compressed_tensors(section: Settings) -> dict[str, Format]:
    weights = _weight_groups(section)
    if not weights or not all(weights):
        raise CheckpointError("config.json: quantization_config has no config_groups with weights")
    layouts = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", NVFP4_LAYOUT)
    if (layout := section.optional("format", "")) not in layouts:
        raise unsupported("format of compressed-tensors", layout, listed(layouts))
    if len({settings.integer("num_bits") for settings in weights}) > 1:
        raise CheckpointError("config.json: config_groups have several num_bits; supported: one")
    settings = weights[0]
    if layout == NVFP4_LAYOUT:
        return {"weight_packed": _nvfp4_format("weight_packed", "weight_global_scale")}
    if layout == "pack-quantized":
        names = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
        symmetric = settings.optional("symmetric", True) is not False
        read = partial(_packed, bits=_bits(settings, "num_bits"), symmetric=symmetric)
        return {"weight_packed": Format(names, lambda entry, *packed: _stored_shape(entry), read)}
    _bits(settings, "num_bits", (8,))
    if (kind := settings.get("type")) not in ("int", "float"):
        raise unsupported("type", kind, "int, float")
    columns, block = _group_size(settings, 1), _block_shape(settings, "block_structure")
    return {"weight": _scaled_format(block if block != (1, 1) else (1, max(columns, 1)))}


def _group_size(section: Settings, default: int) -> int:
    """Columns of a group; -1: all."""
    return section.integer("group_size", default, least=-1)


def _weight_groups(section: Settings) -> list[Settings]:
    groups = section.section("config_groups")
    return [groups.section(name).section("weights") for name in groups]


def _bits(section: Settings, key: str, supported: tuple[int, ...] = (4, 8)) -> int:
    if (bits := section.integer(key)) not in supported:
        raise unsupported(key, bits, listed(supported))
    return bits


def _block_shape(section: Settings, key: str) -> tuple[int, int]:
    block = section.optional(key, [1, 1])
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise invalid(key, block, "a list of two positive integers")
    return block[0], block[1]


def _scaled_format(block: tuple[int, int]) -> Format:
    """fp8 and int8: a code for each weight, and a scale for the matrix or for each row or block."""
    names = ("weight", "weight_scale_inv", "weight_scale")

    def read(entry: QuantisedEntry) -> Quantised:
        codes = entry.part("weight")
        scale = entry.part("weight_scale_inv" if "weight_scale_inv" in entry.parts else "weight_scale")
        return quantised(codes, _by_row(scale, codes.shape, block))

    return Format(names, lambda entry, *shape: shape, read, ("F8_E4M3", "I8"))


def _is_nvfp4(section: Settings) -> bool:
    return section.get("quant_algo") == "NVFP4" or section.get("format") == NVFP4_LAYOUT


def _nvfp4_format(codes: str, factor: str) -> Format:
    """A byte holds two codes of a row, the first in its low half. `factor`: a number for the matrix, which scales are
    multiplied with, or divided by if it is a global scale."""

    def read(entry: QuantisedEntry) -> Quantised:
        halves, scale, number = entry.part(codes), entry.part("weight_scale"), entry.part(factor)
        if number.size != 1 or 2 * halves.shape[1] != NVFP4_GROUP * scale.shape[-1]:
            sizes = f"{list(halves.shape)}, {list(scale.shape)} and {list(number.shape)}"
            raise CheckpointError(f"{entry.source} has codes, scales and a factor of {sizes}; a scale is of 16 columns")
        by = np.float32(0.5) * number.astype(np.float32).reshape(())
        if factor == "weight_global_scale":
            by = np.float32(0.5) / number.astype(np.float32).reshape(())
        numbers = FP4[np.stack([halves & 15, halves >> 4], axis=-1)].reshape(len(halves), -1)
        return quantised(numbers, scale.astype(np.float32) * by)

    names = (codes, "weight_scale", factor)
    return Format(names, lambda entry, rows, halves: (rows, 2 * halves), read, ("U8",), "[out, in / 2]")


def _mxfp4_format(name: str) -> Format:
    """A block is 32 codes of a row, and each byte two of them in order, the first in its low half."""
    parts = f"{name}_blocks", f"{name}_scales"

    def shape(entry: QuantisedEntry, experts: int, rows: int, blocks: int, size: int) -> tuple[int, ...]:
        return experts, blocks * size * 2, rows

    def read(entry: QuantisedEntry) -> Quantised:
        blocks, scale = (entry.part(part) for part in parts)
        words = blocks.reshape(-1, PACKED // 2 * blocks.shape[2]).view(np.int32)
        return quantised(pack_rows(words), scale.reshape(len(words), -1))

    return Format(parts, shape, read, ("U8",), "[experts, out, in / 32, 16]", name)


def _stored_shape(entry: QuantisedEntry) -> tuple[int, int]:
    rows, columns = (int(size) for size in entry.part("weight_shape"))
    return rows, columns


def _gptq(entry: QuantisedEntry, bits: int, zero_shift: int, act_order: bool) -> Quantised:
    """With `act_order` the columns of a group may not be adjacent."""
    words = entry.part("qweight")
    # Stored zeros wrap around: the zero of a symmetric 8-bit weight, 128, is stored as 127, and 0 as all ones.
    zero = unpack_words(entry.part("qzeros"), bits).astype(np.int16) + zero_shift
    zero &= 2**bits - 1 if zero_shift else -1
    group = entry.part("g_idx") if act_order or "g_idx" in entry.parts else None
    codes = _codes(words.T, bits, len(words) * (32 // bits))
    return _sorted_by_group(entry.stem, codes, entry.part("scales").T, zero.T, group)


def _awq(entry: QuantisedEntry, bits: int) -> Quantised:
    words, zero = entry.part("qweight"), unpack_words(entry.part("qzeros"), bits, AWQ_ORDER)
    is_packed = len(words) % PACKED == 0 and words.dtype.itemsize == 4
    codes = (pack_awq(words), 4) if is_packed else (unpack_words(words, bits, AWQ_ORDER).T, 8)
    return _sorted_by_group(entry.stem, codes, entry.part("scales").T, zero.T, None)


def _packed(entry: QuantisedEntry, bits: int, symmetric: bool) -> Quantised:
    """compressed-tensors with several codes in a word."""
    (rows, columns), scale = _stored_shape(entry), entry.part("weight_scale")
    zero = np.full(scale.shape, 2 ** (bits - 1), np.int16)  # codes are stored as unsigned numbers
    if not symmetric:  # packed along the rows
        zero = unpack_words(entry.part("weight_zero_point").T, bits)[:, :rows].T
    group = entry.part("weight_g_idx") if "weight_g_idx" in entry.parts else None
    return _sorted_by_group(entry.stem, _codes(entry.part("weight_packed"), bits, columns), scale, zero, group)


def _block_format(name: str) -> Format:
    part, (weights, size, *_) = name.lower(), BLOCK_TYPES[name]

    def shape(entry: QuantisedEntry, rows: int, row_bytes: int) -> tuple[int, int]:
        return rows, row_bytes // size * weights

    return Format((part,), shape, lambda entry: read_blocks(name, entry.part(part)))


def _codes(words: np.ndarray, bits: int, columns: int) -> tuple[np.ndarray, int]:
    """Codes of the first `columns` of int32 words [out, words], and their bits: 8 if the packing does not fit."""
    if bits == 4 and columns % PACKED == 0 and words.dtype.itemsize == 4:
        return pack_rows(words[:, : columns // 8]), 4
    return unpack_words(words, bits)[:, :columns], 8


def _sorted_by_group(
    stem: str, codes: tuple[np.ndarray, int], scale: np.ndarray, zero: np.ndarray, group: np.ndarray | None
) -> Quantised:
    """The matrix with its columns sorted by `group`, the group of each column (act-order). None or a negative group:
    the columns are sorted already."""
    from specjax_kernels.quantised import pack, unpack

    numbers, bits = codes
    columns, groups = numbers.shape[1] * 8 // bits, scale.shape[1]
    if columns % groups:
        raise CheckpointError(f"{stem} has {groups} groups for {columns} columns; equal groups are needed")
    if bits == 4 and columns // groups % PACKED:
        numbers, bits = unpack(numbers), 8
    if group is None or (group < 0).any():
        return _without_zeros(numbers, bits, scale, zero)
    counts = np.bincount(np.minimum(group, groups), minlength=groups)
    if len(counts) > groups or (counts != counts[0]).any():
        raise CheckpointError(f"{stem}.g_idx has groups of {listed({*counts})} columns; equal groups are needed")
    if (np.diff(group) >= 0).all():
        return _without_zeros(numbers, bits, scale, zero)
    order = np.argsort(group, kind="stable").astype(np.int32)
    numbers = pack(unpack(numbers)[:, order]) if bits == 4 else numbers[:, order]
    return _without_zeros(numbers, bits, scale, zero, order=order)


def _without_zeros(codes: np.ndarray, bits: int, scale: np.ndarray, zero: np.ndarray, **order: Any) -> Quantised:
    """Subtracts zeros from 8-bit codes, or turns them into a shift or offsets."""
    if bits == 4 and (zero == 8).all():
        return quantised(codes, scale, shift=8, **order)
    if bits == 8:
        shifted = codes.astype(np.int32) - zero.astype(np.int32).repeat(codes.shape[1] // zero.shape[1], axis=1)
        if shifted.min() >= -128 and shifted.max() <= 127:
            return quantised(shifted.astype(np.int8), scale, **order)
        codes, zero = (codes.astype(np.int16) - 128).astype(np.int8), zero.astype(np.int16) - 128
    # The product of two short numbers is exact.
    return quantised(codes, scale, offset=-zero.astype(np.float32) * scale.astype(np.float32), **order)


def _by_row(numbers: np.ndarray, shape: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
    """Numbers for each row and equal groups [out, groups], from a number for the matrix or for each row or block."""
    wide = np.asarray(numbers)
    wide = wide.reshape(-1, 1) if wide.ndim < 2 else wide
    rows, columns = shape
    if len(wide) == 1:
        wide = wide.repeat(rows, axis=0)
    elif len(wide) == -(-rows // block[0]):
        wide = wide.repeat(block[0], axis=0)[:rows]
    if wide.shape[1] == -(-columns // block[1]) > 1 and columns % block[1]:
        group = math.gcd(block[1], columns)  # the last block is shorter
        wide = wide.repeat(block[1] // group, axis=1)[:, : columns // group]
    return wide


def unpack_words(words: np.ndarray, bits: int, order: tuple[int, ...] = ()) -> np.ndarray:
    """Numbers in int32 words [rows, words], from the low end: uint8 [rows, words * 32 / bits]."""
    if words.dtype.itemsize != 4:
        raise CheckpointError(f"packed weights of {words.dtype}; words of 32 bits are needed")
    shifts = np.arange(32 // bits, dtype=np.uint32) * bits
    wide = np.ascontiguousarray(words).view(np.uint32)[:, :, None]
    numbers = (wide >> shifts & np.uint32(2**bits - 1)).astype(np.uint8)
    if order:
        numbers = numbers[:, :, np.argsort(order)]
    return numbers.reshape(len(words), -1)


def pack_rows(words: np.ndarray) -> np.ndarray:
    """Codes of 4 bits in int32 words [out, in / 8] of any strides, as ``Quantised.codes``."""
    from specjax_kernels.cpu import repacking
    from specjax_kernels.quantised import pack

    codes = np.empty((len(words), 4 * words.shape[1]), np.uint8)
    if not repacking.from_rows(words, codes):
        for start in range(0, len(words), 64):
            codes[start : start + 64] = pack(unpack_words(words[start : start + 64], 4))
    return codes


def pack_awq(words: np.ndarray) -> np.ndarray:
    """`pack_rows` of AWQ's int32 words [in, out / 8], each with codes of eight rows."""
    from specjax_kernels.cpu import repacking
    from specjax_kernels.quantised import pack

    codes = np.empty((8 * words.shape[1], len(words) // 2), np.uint8)
    if not repacking.from_awq(words, codes):
        for start in range(0, words.shape[1], 8):
            unpacked = unpack_words(words[:, start : start + 8], 4, AWQ_ORDER)
            codes[8 * start : 8 * start + 64] = pack(np.ascontiguousarray(unpacked.T))
    return codes


# GGUF's block types. A block holds 32 or 256 weights of a row; byte j of 16 or 32 holds a 4-bit code in each half.
# Scales and minimums are the file's numbers, in two levels for the K types, without rounding. Source: ggml's
# `ggml-common.h` and `ggml-quants.c`.


class BlockType(NamedTuple):
    weights: int  # of a block
    size: int  # bytes of a block
    read: Callable[[np.ndarray], Quantised]  # [rows, blocks, size] -> the matrix
    computes: bool = True  # False: `read` returns views


def read_blocks(block_type: str, rows: Any) -> Quantised:
    """The matrix of rows of blocks, uint8 [rows, bytes]; or views of the file, [rows, blocks, codes of a block]."""
    _, size, read, computes = BLOCK_TYPES[block_type]
    blocks = np.asarray(rows).reshape(len(rows), -1, size)
    return by_rows(len(rows), blocks[0].nbytes, lambda part: read(blocks[part])) if computes else read(blocks)


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of each block, a view [rows, blocks]."""
    return blocks[..., at : at + 2].view(np.dtype("<f2"))[..., 0]


def one_element_a_block(blocks: np.ndarray) -> np.ndarray:
    """Blocks [rows, blocks, n] as elements [rows, blocks] of n numbers, which numpy copies at once."""
    return blocks.view(np.dtype((np.void, blocks.shape[2] * blocks.itemsize)))[..., 0]


def _from(blocks: np.ndarray, at: int) -> np.ndarray:
    """The bytes of each block from byte `at` on, uint8 [rows, bytes]."""
    return one_element_a_block(blocks[..., at:]).copy().view(np.uint8)


def _nibbles(blocks: np.ndarray) -> np.ndarray:
    """The codes of 256 weights in the last 128 bytes: 32 in the low halves of each 32 bytes, 32 in the high halves."""
    runs = _from(blocks, blocks.shape[-1] - 128).view("V16")
    first, second = (runs[:, i::2].copy().view(np.uint8) for i in (0, 1))
    runs[:, ::2], runs[:, 1::2] = (first & 15 | second << 4).view("V16"), (first >> 4 | second & 0xF0).view("V16")
    return runs.view(np.uint8)


def _unpacked(codes: np.ndarray, run: int = 16) -> np.ndarray:
    from specjax_kernels.quantised import unpack

    return unpack(codes, run)


def _fifth_bit(blocks: np.ndarray, at: int) -> np.ndarray:
    """The fifth bit of 32 weights, from 4 bytes; uint8 [rows, weights], 0 or 16."""
    bits = np.unpackbits(np.ascontiguousarray(blocks[..., at : at + 4]), axis=-1, bitorder="little")
    return (bits << 4).reshape(len(blocks), -1)


def _six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight minimums of 6 bits in 12 bytes; uint8 [rows, 8 * blocks] each."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    minimum = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    return scale.reshape(len(packed), -1), minimum.reshape(len(packed), -1)


def _views(blocks: np.ndarray, start: int, kind: Any = np.uint8, shift: int = 0) -> Quantised:
    """Codes from byte `start` on, after a scale and, if that is 4, an offset."""
    offset = _half(blocks, 2)[..., None] if start == 4 else None
    return quantised(blocks[..., start:].view(kind), _half(blocks, 0)[..., None], offset=offset, shift=shift)


def _q5(blocks: np.ndarray, start: int, zero: int) -> Quantised:
    codes = (_unpacked(_from(blocks, start + 4)) | _fifth_bit(blocks, start)).astype(np.int8)
    return quantised(codes - np.int8(zero), _half(blocks, 0), offset=_half(blocks, 2) if start == 4 else None)


def _of_two_levels(blocks: np.ndarray, codes: np.ndarray) -> Quantised:
    """Of Q4_K and Q5_K: scales and minimums of 6 bits, with a factor of each for a block."""
    scale, minimum = _six_bits(blocks[..., 4:16])
    return quantised(codes, scale, offset=minimum, super_scale=_half(blocks, 0), super_offset=-_half(blocks, 2))


def _q5_k(blocks: np.ndarray) -> Quantised:
    # Bit i of byte j belongs to weight j of the i-th run of 32.
    fifth = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _unpacked(_from(blocks, 48), 32) | (fifth << 4).reshape(len(blocks), -1)
    return _of_two_levels(blocks, codes.astype(np.int8))


def _q6_k(blocks: np.ndarray) -> Quantised:
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 2, 32)  # halves of 128 weights, each two runs of 32 bytes
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    four = np.concatenate([low & 15, low >> 4], axis=3)
    two = high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    codes = (four | two << 4).reshape(len(blocks), -1)
    scale = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).reshape(len(blocks), -1)
    return quantised((codes.astype(np.int8) - 32).astype(np.int8), scale, super_scale=_half(blocks, 208))


BLOCK_TYPES: dict[str, BlockType] = {
    "Q4_0": BlockType(32, 18, partial(_views, start=2, shift=8), computes=False),
    "Q4_1": BlockType(32, 20, partial(_views, start=4), computes=False),
    "Q5_0": BlockType(32, 22, partial(_q5, start=2, zero=16)),
    "Q5_1": BlockType(32, 24, partial(_q5, start=4, zero=0)),
    "Q8_0": BlockType(32, 34, partial(_views, start=2, kind=np.int8), computes=False),
    "Q4_K": BlockType(256, 144, lambda blocks: _of_two_levels(blocks, _nibbles(blocks))),
    "Q5_K": BlockType(256, 176, _q5_k),
    "Q6_K": BlockType(256, 210, _q6_k),
}
