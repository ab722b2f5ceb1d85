"""The oracle of `specjax.checkpoint.quantised`: a writer for each published layout, which packs bit by bit and computes
the values of the weights in float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

GROUP = 32


class Written(NamedTuple):
    tensors: dict[str, np.ndarray]  # by their names after the module's
    value: np.ndarray  # float32 [out, in]: the weights


class Format(NamedTuple):
    config: Mapping[str, Any]  # quantization_config
    write: Callable[[np.ndarray, np.random.Generator], Written]


def packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned numbers [rows, n] in int32 words [rows, n * bits / 32], the first in the lowest bits."""
    count = 32 // bits
    words = np.zeros((len(numbers), numbers.shape[1] // count), np.uint64)
    for i in range(numbers.shape[1]):
        words[:, i // count] |= numbers[:, i].astype(np.uint64) << np.uint64(bits * (i % count))
    return words.astype(np.uint32).view(np.int32)


def grouped(matrix: np.ndarray, bits: int, group: int, rng: np.random.Generator, index=None):
    """Codes, scales and zero points [out, groups] of a matrix [out, in], and the value."""
    out, inside = matrix.shape
    index = np.arange(inside) // group if index is None else index
    groups = int(index.max()) + 1
    zero = rng.integers(0 if bits == 4 else 100, 2**bits if bits == 4 else 150, (out, groups))
    scale = (np.abs(matrix).max() * 3 / 2**bits * rng.uniform(0.5, 1, (out, groups))).astype(np.float16)
    spread = scale.astype(np.float64)[:, index]
    codes = np.clip(np.round(matrix / spread) + zero[:, index], 0, 2**bits - 1).astype(np.int64)
    return codes, scale, zero, ((codes - zero[:, index]) * spread).astype(np.float32)


def gptq(bits: int, *, ordered: bool = False, version: int = 1) -> Format:
    def write(matrix: np.ndarray, rng: np.random.Generator) -> Written:
        inside = matrix.shape[1]
        index = np.arange(inside) // GROUP
        if ordered:
            index = np.random.default_rng(inside).permutation(index)  # matrices with equal inputs share the order
        codes, scale, zero, value = grouped(matrix, bits, GROUP, rng, index)
        if version == 1:
            zero = (zero - 1) % 2**bits
        tensors = {
            "qweight": packed(codes, bits).T, "qzeros": packed(zero.T, bits), "scales": scale.T,
            "g_idx": index.astype(np.int32),
        }  # fmt: skip
        return Written(tensors, value)

    name = "gptq" if version == 1 else "gptq_v2"
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": ordered, "sym": False}
    return Format(config | {"checkpoint_format": name}, write)


def awq() -> Format:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(numbers: np.ndarray) -> np.ndarray:
        """AutoAWQ: nibble i of a word is column order[i] of its eight."""
        shuffled = numbers.reshape(len(numbers), -1, 8)[:, :, order].reshape(len(numbers), -1)
        return packed(shuffled, 4)

    def write(matrix: np.ndarray, rng: np.random.Generator) -> Written:
        codes, scale, zero, value = grouped(matrix, 4, GROUP, rng)
        return Written({"qweight": words(codes.T), "qzeros": words(zero.T), "scales": scale.T}, value)

    return Format({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, write)


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


def compressed_packed(bits: int, *, symmetric: bool) -> Format:
    def write(matrix: np.ndarray, rng: np.random.Generator) -> Written:
        codes, scale, zero, value = grouped(matrix, bits, GROUP, rng)
        if symmetric:
            zero = np.full_like(zero, 2 ** (bits - 1))
            value = ((codes - zero.repeat(GROUP, axis=1)) * scale.astype(np.float64).repeat(GROUP, axis=1)).astype("f4")
        tensors = {
            "weight_packed": packed(codes, bits), "weight_scale": scale.astype(ml_dtypes.bfloat16),
            "weight_shape": np.array(matrix.shape, np.int64),
        }  # fmt: skip
        rounded = scale.astype(ml_dtypes.bfloat16).astype(np.float64).repeat(GROUP, axis=1)
        value = ((codes - zero.repeat(GROUP, axis=1)) * rounded).astype(np.float32)
        if not symmetric:
            padded = np.pad(zero, ((0, -len(zero) % (32 // bits)), (0, 0)))
            tensors["weight_zero_point"] = packed(padded.T, bits).T
        return Written(tensors, value)

    return Format(compressed("pack-quantized", num_bits=bits, type="int", symmetric=symmetric, group_size=GROUP), write)


def scaled(dtype: Any, config: Mapping[str, Any], scales: str, suffix: str = "weight_scale") -> Format:
    """fp8 or int8 with a scale for the matrix, for each row, or for blocks of 128 x 128."""

    def write(matrix: np.ndarray, rng: np.random.Generator) -> Written:
        del rng
        out, inside = matrix.shape
        rows, columns = {"tensor": (out, inside), "channel": (1, inside), "block": (128, 128)}[scales]
        largest = 127.0 if dtype == np.int8 else 448.0
        scale = np.zeros((-(-out // rows), -(-inside // columns)), np.float32)
        codes, value = np.zeros(matrix.shape, dtype), np.zeros(matrix.shape, np.float32)
        for r in range(scale.shape[0]):
            for c in range(scale.shape[1]):
                part = slice(r * rows, (r + 1) * rows), slice(c * columns, (c + 1) * columns)
                scale[r, c] = np.abs(matrix[part]).max() / largest
                exact = matrix[part] / scale[r, c]
                codes[part] = (np.round(exact) if dtype == np.int8 else exact).astype(dtype)
                value[part] = (codes[part].astype(np.float64) * scale[r, c]).astype(np.float32)
        stored = scale.reshape(()) if scales == "tensor" else scale
        return Written({"weight": codes, suffix: stored}, value)

    return Format(config, write)


def nvfp4(config: Mapping[str, Any], codes_name: str, factor_name: str) -> Format:
    """Codes of 4 bits with a scale in float8_e4m3 for 16 columns and a number for the matrix."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def write(matrix: np.ndarray, rng: np.random.Generator) -> Written:
        del rng
        out, inside = matrix.shape
        number = np.float32(np.abs(matrix).max() / (6 * 448))
        value, codes = np.zeros(matrix.shape, np.float32), np.zeros(matrix.shape, np.uint8)
        scale = np.zeros((out, inside // 16), FP8)
        for r in range(out):
            for g in range(inside // 16):
                part = matrix[r, 16 * g : 16 * g + 16]
                scale[r, g] = max(np.abs(part).max() / 6 / number, 2**-6)
                step = float(scale[r, g]) * float(number)
                nearest = np.abs(np.abs(part)[:, None] / step - values).argmin(axis=1)
                codes[r, 16 * g : 16 * g + 16] = nearest + 8 * (part < 0)
                value[r, 16 * g : 16 * g + 16] = np.sign(part) * values[nearest] * step
        stored = 1 / number if factor_name == "weight_global_scale" else number
        tensors = {
            codes_name: codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scale,
            factor_name: np.array(stored, np.float32).reshape((1,) if factor_name == "weight_global_scale" else ()),
            "input_scale": np.array(0.5, np.float32),
        }  # fmt: skip
        return Written(tensors, value)

    return Format(config, write)


FP8 = ml_dtypes.float8_e4m3fn
FORMATS: dict[str, Format] = {
    "fp8 blocks": scaled(FP8, {"quant_method": "fp8", "weight_block_size": [128, 128]}, "block", "weight_scale_inv"),
    "fp8 channels": scaled(FP8, compressed("float-quantized", num_bits=8, type="float", strategy="channel"), "channel"),
    "fp8 tensor": scaled(FP8, {"quant_method": "fp8", "activation_scheme": "static"}, "tensor"),
    "int8 channels": scaled(
        np.int8, compressed("int-quantized", num_bits=8, type="int", strategy="channel"), "channel"
    ),
    "int4 groups": compressed_packed(4, symmetric=True),
    "int4 zero points": compressed_packed(4, symmetric=False),
    "gptq 4": gptq(4),
    "gptq 8": gptq(8),
    "gptq act order": gptq(4, ordered=True),
    "gptq v2": gptq(4, version=2),
    "awq": awq(),
    "nvfp4": nvfp4({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "weight", "weight_scale_2"),
    "nvfp4 compressed": nvfp4(
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        "weight_packed",
        "weight_global_scale",
    ),
    "fp8 modelopt": scaled(FP8, {"quant_method": "modelopt", "quant_algo": "FP8"}, "tensor"),
}


def in_mxfp4(folder: Path) -> dict[str, np.ndarray]:
    """Replace the experts of a saved gpt-oss by random blocks. Returns the tensors with the values of these."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    file, rng = folder / "model.safetensors", np.random.default_rng(0)
    values, stored = load_file(file), {}
    for key, tensor in values.items():
        if not (key.endswith("proj") and "experts" in key):
            stored[key] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(122, 126, blocks.shape[:3], np.uint8)
        stored |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        values[key] = convert_moe_packed_tensors(*map(torch.tensor, (blocks, scales)), dtype=torch.float32).numpy()
    save_file(stored, file, metadata={"format": "pt"})
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantised}
    (folder / "config.json").write_text(json.dumps(config))
    return values
