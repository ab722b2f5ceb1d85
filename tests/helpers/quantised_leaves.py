"""Random leaves of quantised weights, in the formats that checkpoints have."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from specjax_kernels import Quantised


class Format(NamedTuple):
    """Dtypes of the arrays, and the inputs that share each number (0: all)."""

    codes: str
    scale: tuple[str, int] | None = None
    offset: tuple[str, int] | None = None
    super_scale: tuple[str, int] | None = None
    super_offset: tuple[str, int] | None = None
    shift: int = 0
    rows: int | None = 1  # outputs that share scales; None: all


FORMATS = {
    "Q4_0": Format("uint8", ("float16", 32), shift=8),
    "Q4_1": Format("uint8", ("float16", 32), ("float16", 32)),
    "Q4_K": Format("uint8", ("uint8", 32), ("uint8", 32), ("float16", 256), ("float16", 256)),
    "Q6_K": Format("int8", ("int8", 16), super_scale=("float16", 256)),
    "Q8_0": Format("int8", ("float16", 32)),
    "GPTQ": Format("uint8", ("float16", 128), ("float32", 128)),
    "AWQ": Format("uint8", ("bfloat16", 64), ("bfloat16", 64)),
    "MXFP4": Format("uint8", ("uint8", 32)),
    "int4 per output": Format("uint8", ("float32", 0), shift=8),
    "int8 per output": Format("int8", ("float32", 0), ("float32", 0)),
    "fp8 per output": Format("float8_e4m3fn", ("float32", 0)),
    "fp8 per tensor": Format("float8_e4m3fn", ("bfloat16", 0), rows=None),
    "fp8 blocks": Format("float8_e4m3fn", ("float32", 128), rows=6),
    "float16": Format("float16"),
    "bfloat16": Format("bfloat16"),
}
IN_FEW_BITS = tuple(name for name, kind in FORMATS.items() if kind.scale is not None)


def shapes_of(name: str, out: tuple[int, ...], depth: int, rows: int | None = None) -> Quantised:
    """A leaf [*out, depth] of `jax.ShapeDtypeStruct`. `rows`: outputs that share scales, for formats where some do."""
    kind, total = FORMATS[name], math.prod(out)
    shared = 1 if kind.rows == 1 else rows or kind.rows or total
    lead = out if shared == 1 else (total // shared,)

    def struct(numbers: tuple[str, int] | None) -> jax.ShapeDtypeStruct | None:
        return numbers and jax.ShapeDtypeStruct((*lead, depth // (numbers[1] or depth)), numbers[0])

    codes = jax.ShapeDtypeStruct((*out, depth // 2 if kind.codes == "uint8" else depth), kind.codes)
    return Quantised(codes, *map(struct, kind[1:5]), shift=kind.shift, rows=shared)


def leaf_of(name: str, out: tuple[int, ...], depth: int, seed: int = 0, rows: int | None = None) -> Quantised:
    """A leaf of random numbers. GPTQ has an order of inputs."""
    rng = np.random.default_rng(seed)

    def numbers(path: tuple, like: jax.ShapeDtypeStruct) -> np.ndarray:
        if path[0].name == "codes" and like.dtype == jnp.float8_e4m3fn:
            codes = rng.integers(0, 256, like.shape, np.uint8)
            return np.where(codes & 127 == 127, 0, codes).astype(np.uint8).view(like.dtype)  # no NaN
        if path[0].name == "codes" and like.dtype.itemsize == 1:
            return rng.integers(*((0, 256) if like.dtype == np.uint8 else (-128, 128)), like.shape, like.dtype)
        if name == "MXFP4":
            return rng.integers(110, 125, like.shape, like.dtype)
        if like.dtype.itemsize == 1:
            return rng.integers(0 if like.dtype == np.uint8 else -32, 64, like.shape, like.dtype)
        return rng.normal(0, 0.1 if path[0].name == "codes" else 0.01, like.shape).astype(like.dtype)

    leaf = jax.tree_util.tree_map_with_path(numbers, shapes_of(name, out, depth, rows))
    return leaf if name != "GPTQ" else replace(leaf, order=rng.permutation(depth).astype(np.int32))


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def decoded(leaf: Quantised) -> np.ndarray:
    """The weights [*out, M] in float64."""
    stored = np.asarray(leaf.codes).reshape(-1, leaf.codes.shape[-1])
    outputs = np.arange(len(stored))
    if stored.dtype == np.uint8:  # byte j of 32 codes holds code j and, in its high half, code j + 16
        parts = stored.reshape(len(stored), -1, 16)
        stored = np.concatenate([parts & 15, parts >> 4], axis=2).reshape(len(stored), -1)

    def of_each_weight(array: np.ndarray, coarse: np.ndarray | None = None) -> np.ndarray:
        numbers = np.asarray(array).reshape(-1, array.shape[-1]).astype(np.float64)[outputs // leaf.rows]
        numbers = np.repeat(numbers, leaf.depth // array.shape[-1], axis=1)
        return numbers if coarse is None else numbers * of_each_weight(coarse)

    if leaf.is_mxfp4:
        return (np.array(E2M1)[stored] * 2.0 ** (of_each_weight(leaf.scale) - 127)).reshape(leaf.shape)
    weights = stored.astype(np.float64) - leaf.shift
    if leaf.scale is not None:
        weights *= of_each_weight(leaf.scale, leaf.super_scale)
    if leaf.offset is not None:
        weights += of_each_weight(leaf.offset, leaf.super_offset)
    if leaf.order is not None:
        weights = weights[:, np.argsort(leaf.order)]
    return weights.reshape(leaf.shape)
