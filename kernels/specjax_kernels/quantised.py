"""A linear map whose weights are stored in 4 or 8 bits, output-major. `linear` and `unembed` accept it as a weight.

    weight[o, i] = code[o, i] * scale[o, i // group] + offset[o, i // group]

float32, each operation rounded once. In MXFP4 codes are floats of 4 bits (e2m1: sign, exponent, mantissa) and scales
powers of two: byte b is 2 ** (b - 127) (e8m0), and 0 counts as 0. `dequantise` is the definition; `linear` computes
products. The formats of GGUF, GPTQ, AWQ, compressed-tensors, block-wise fp8 and gpt-oss are cases of it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax_kernels import mesh

PACKED = 32
"""32 codes of 4 bits are stored in 16 bytes, as in GGUF's Q4_0 and Q4_1: byte j holds code j in its low half and code
j + 16 in its high half. So 16 bytes become two vectors of 16 codes without a shuffle."""

KINDS = ("fp8", "int8", "int4")
"""The formats of `quantise`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantised:
    """A linear map [*out, M]: `len(out)` axes of outputs, then the inputs. Arrays are JAX's or numpy's. See `check`."""

    # uint8 [*out, M / 2]: 4 bits, see PACKED; int8 or float8_e4m3fn [*out, M]; or float16 or bfloat16 [*out, M]: the
    # weights themselves, without scales
    codes: Any
    # [*out, M / group] or, with `rows`, [prod(out) / rows, M / group]: float32, bfloat16 or float16; uint8 in MXFP4
    scale: Any
    offset: Any = None  # as `scale`, with its own dtype; None: no offset
    super_scale: Any = None  # float16 [*out, M / (group * n)]: a factor of n scales, which are then uint8 or int8
    super_offset: Any = None  # as `super_scale`, for offsets
    order: Any = None  # int32 [M]: code column i belongs to input order[i] (GPTQ's act-order); None: i
    shift: int = dataclasses.field(default=0, metadata={"static": True})
    """Subtracted from each code: 8 for symmetric 4 bits (Q4_0). A leaf has a shift or an offset."""
    rows: int = dataclasses.field(default=1, metadata={"static": True})
    """The number of outputs, over all axes of `out`, that share a row of scales: 128 for blocks of 128 x 128, all for
    one scale a tensor."""
    split: int | None = dataclasses.field(default=None, metadata={"static": True})
    """The axis of `codes` that is split over the devices of a mesh (`shared`), counted from the end: -1 is the inputs,
    -2 the last outputs. None: each device has the whole leaf."""

    @property
    def bits(self) -> int:
        return 4 if self.codes.dtype == jnp.uint8 else 8 * self.codes.dtype.itemsize

    @property
    def is_mxfp4(self) -> bool:
        return self.scale is not None and self.scale.dtype == jnp.uint8 and self.super_scale is None

    @property
    def depth(self) -> int:
        """M, the number of inputs."""
        return self.codes.shape[-1] * (2 if self.bits == 4 else 1)

    @property
    def out(self) -> tuple[int, ...]:
        return tuple(self.codes.shape[:-1])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights, [*out, M]."""
        return (*self.out, self.depth)

    @property
    def group(self) -> int:
        """The number of inputs that share a scale; all inputs without scales."""
        return self.depth if self.scale is None else self.depth // self.scale.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, as of one array."""
        return sum(math.prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(self))

    def __getitem__(self, ids: Any) -> Quantised:
        """The leaf with these outputs of the first axis (an int array of any shape)."""
        if self.rows == 1:
            chosen = {name: getattr(self, name)[ids] for name in BY_OUTPUT if getattr(self, name) is not None}
            split = None if self.split == -self.codes.ndim else self.split
            return dataclasses.replace(self, split=split, **chosen)
        if len(self.out) > 1:
            raise ValueError(f"rows of a leaf of shape {self.shape} that share scales by {self.rows} cannot be chosen")
        shared = {n: getattr(self, n)[ids // self.rows] for n in ("scale", "offset") if getattr(self, n) is not None}
        return dataclasses.replace(self, codes=self.codes[ids], rows=1, **shared)


SCALES = ("scale", "offset", "super_scale", "super_offset")
BY_OUTPUT = ("codes", *SCALES)


def check(leaf: Quantised) -> Quantised:
    """Returns the leaf. Raises ValueError if its arrays do not fit together."""

    def refuse(problem: str) -> NoReturn:
        raise ValueError(f"quantised weight of codes {leaf.codes.dtype}{list(leaf.codes.shape)}: {problem}")

    depth, total, kind = leaf.depth, math.prod(leaf.out), str(leaf.codes.dtype)
    if kind in ("float16", "bfloat16"):
        others = (leaf.scale, leaf.offset, leaf.super_scale, leaf.super_offset)
        if leaf.shift or leaf.rows != 1 or any(array is not None for array in others):
            refuse("weights in 16 bits have no scales, offsets or shift")
        return leaf
    if kind not in ("uint8", "int8", "float8_e4m3fn"):
        refuse("codes are uint8 (two of 4 bits), int8, float8_e4m3fn, float16 or bfloat16")
    if leaf.scale is None:
        refuse("its scales are missing")
    if leaf.bits == 4 and depth % PACKED:
        refuse(f"4 bits need a multiple of {PACKED} inputs, got {depth}")
    if total % leaf.rows:
        refuse(f"{leaf.rows} outputs share scales, and {total} is no multiple of that")
    if leaf.is_mxfp4 and (leaf.bits != 4 or leaf.shift or leaf.offset is not None):
        refuse("scales of uint8 belong to codes of 4 bits without shift or offset (MXFP4)")
    groups = leaf.scale.shape[-1]
    if groups == 0 or depth % groups or (leaf.bits == 4 and leaf.group % PACKED):
        refuse(f"{groups} scales for {depth} inputs; groups are equal" + f", multiples of {PACKED}" * (leaf.bits == 4))
    lead = leaf.out if leaf.rows == 1 else (total // leaf.rows,)
    for name in ("scale", "offset"):
        array = getattr(leaf, name)
        if array is not None and tuple(array.shape) != (*lead, groups):
            refuse(f"{name} must be {[*lead, groups]}, got {list(array.shape)}")
        integers = leaf.super_scale is not None or leaf.is_mxfp4
        dtypes = ("uint8", "int8") if integers else ("float32", "bfloat16", "float16")
        if array is not None and str(array.dtype) not in dtypes:
            refuse(f"{name} must be {' or '.join(dtypes)}, got {array.dtype}")
    if leaf.shift and leaf.offset is not None:
        refuse("it has a shift or an offset, not both")
    if (leaf.super_scale is None or leaf.offset is None) != (leaf.super_offset is None):
        refuse("super_offset is there where super_scale and offset are")
    for name in ("super_scale", "super_offset"):
        array = getattr(leaf, name)
        if array is not None and (array.dtype != jnp.float16 or groups % array.shape[-1] or leaf.rows != 1):
            refuse(f"{name} must be float16 for equal parts of {groups} groups and rows = 1, got {array}")
    return leaf


def dequantise(leaf: Quantised, dtype: Any = jnp.float32) -> Any:
    """The weights [*out, M], an array of numpy if the codes are: computed in float32, rounded to dtype once. This
    defines every product."""
    xp = np if isinstance(leaf.codes, np.ndarray) else jnp
    if leaf.scale is None:
        weights = leaf.codes
    else:
        scale, offset = scales(leaf)
        weights = _codes(leaf).reshape(-1, scale.shape[-1], leaf.group)
        if leaf.shift:
            weights -= np.float32(leaf.shift)
        weights *= _spread(scale, leaf)
        if offset is not None:
            weights += _spread(offset, leaf)
    weights = weights.reshape(leaf.shape)
    weights = weights if weights.dtype == dtype else weights.astype(dtype)
    return weights if leaf.order is None else weights[..., xp.argsort(leaf.order)]


def scales(leaf: Quantised) -> tuple[Any, Any]:
    """Scale and offset (None: none) in float32, super-scales included: [outputs / rows, groups]. Arrays of numpy if the
    codes are."""
    xp = np if isinstance(leaf.codes, np.ndarray) else jnp

    def whole(array: Any, coarse: Any) -> Any:
        if array is None:
            return None
        array = xp.asarray(array).astype(np.float32)
        if coarse is not None:
            array = array * xp.repeat(xp.asarray(coarse).astype(np.float32), array.shape[-1] // coarse.shape[-1], -1)
        return array.reshape(-1, array.shape[-1])

    scale = whole(leaf.scale, leaf.super_scale)
    if leaf.is_mxfp4:
        scale = _bitcast(scale.astype(np.int32) << 23, np.float32)
    return scale, whole(leaf.offset, leaf.super_offset)


def _codes(leaf: Quantised) -> Any:
    """float32 [outputs, M], in the stored order of columns."""
    codes = leaf.codes
    if leaf.bits == 4:
        codes = unpack(codes)
    if leaf.is_mxfp4:  # sign, exponent and mantissa in a float16, whose exponent has a bias larger by 14
        wide = codes.astype(np.uint16)
        bits = (wide & np.uint16(7)) << np.uint16(9) | (wide & np.uint16(8)) << np.uint16(12)
        codes = _bitcast(bits, np.float16).astype(np.float32) * np.float32(2**14)
    return codes.astype(np.float32).reshape(-1, leaf.depth)


def _bitcast(array: Any, dtype: Any) -> Any:
    return array.view(dtype) if isinstance(array, np.ndarray) else jax.lax.bitcast_convert_type(array, dtype)


def _spread(scale: Any, leaf: Quantised) -> Any:
    return (scale if leaf.rows == 1 else scale.repeat(leaf.rows, axis=0))[:, :, None]


def embed(leaf: Quantised, ids: Array, dtype: Any = jnp.float32) -> Array:
    """Rows `ids` [...] of an embedding table [V, M] as weights [..., M]. Only these rows are dequantised."""

    def take(leaf: Quantised, ids: Array) -> Array:
        return dequantise(leaf[ids], dtype)

    if mesh.devices() == 1 or leaf.split is None:
        return take(leaf, ids)
    return mesh.rows(take, leaf, split_axes(leaf), ids)


def shared(leaf: Quantised, axis: int, count: int) -> Quantised | None:
    """A leaf with equal weights that can be split over `count` devices along an axis of the codes (`Quantised.split`).
    None if inputs are permuted, or if their codes of 4 bits do not divide into blocks of `PACKED`.

    Groups on two devices become smaller groups with equal scales. Worked example, 6 groups of 64 inputs, 4 devices:
    each has 96 inputs, 3 groups of 32. Changed arrays are numpy's.
    """
    if leaf.codes.shape[axis] % count:
        return None
    changed: dict[str, Any] = {"split": axis}
    arrays = {name: array for name in SCALES if (array := getattr(leaf, name)) is not None}
    if leaf.rows != 1:
        arrays = {n: np.repeat(np.asarray(a), leaf.rows, axis=0).reshape(*leaf.out, -1) for n, a in arrays.items()}
        changed |= arrays | {"rows": 1}
    if axis != -1:
        return dataclasses.replace(leaf, **changed)
    inputs = leaf.depth // count
    if leaf.order is not None or (leaf.bits == 4 and inputs % PACKED):
        return None
    for name, array in arrays.items():
        columns = array.shape[-1]
        if columns == 1:
            continue  # each device has the whole array
        group = leaf.depth // columns
        smaller = math.gcd(group, inputs)
        if leaf.bits == 4 and smaller % PACKED:
            return None
        if smaller < group:
            changed[name] = np.repeat(np.asarray(array), group // smaller, axis=-1)
    return dataclasses.replace(leaf, **changed)


def split_axes(leaf: Quantised) -> Quantised:
    """A leaf with the split axis (-1: none) instead of each array, for `mesh.apart`."""

    def axis(name: str, array: Any) -> int:
        whole = leaf.split is None or (leaf.split == -1 and name != "codes" and array.shape[-1] == 1)
        return -1 if whole else array.ndim + leaf.split

    axes = {n: axis(n, array) for n in BY_OUTPUT if (array := getattr(leaf, n)) is not None}
    return dataclasses.replace(leaf, order=None if leaf.order is None else -1, **axes)


def expert_specs(leaf: Quantised) -> Quantised:
    """A leaf of stacked experts with `mesh.of_experts` instead of each array. The devices of a group split the axis
    `split`."""
    axes = split_axes(leaf)
    specs = {name: mesh.of_experts(axis) for name in BY_OUTPUT if (axis := getattr(axes, name)) is not None}
    return dataclasses.replace(axes, order=None if leaf.order is None else mesh.on_axis(-1), **specs)


def quantise(matrix: Any, kind: str) -> Quantised:
    """A float matrix [*out, M] in 8 or 4 bits, by numpy on the host. Rounds to the nearest code.

    "fp8" and "int8" have a float32 scale for each output: the largest magnitude becomes 448 or 127. "int4" has a
    float16 scale and minimum for each group of 32 inputs, so 5 bits a weight.

    Raises:
        ValueError: an unknown kind, or inputs that do not divide into groups of 32.
    """
    matrix = np.asarray(matrix).astype(np.float32)
    depth = matrix.shape[-1]
    if kind not in KINDS:
        raise ValueError(f"quantisation {kind!r} is none of {', '.join(KINDS)}")
    if kind != "int4":
        most = 127 if kind == "int8" else 448
        scale = np.abs(matrix).max(axis=-1, keepdims=True) / np.float32(most)
        codes = matrix / np.where(scale == 0, np.float32(1), scale)
        codes = np.rint(codes).astype(np.int8) if kind == "int8" else codes.astype(jnp.float8_e4m3fn)
        return Quantised(codes, scale)
    if depth % PACKED:
        raise ValueError(
            f"int4 needs a multiple of {PACKED} inputs, got a matrix {list(matrix.shape)}; "
            "'int8' and 'fp8' take any number of inputs"
        )
    grouped = matrix.reshape(*matrix.shape[:-1], -1, PACKED)
    offset = grouped.min(-1).astype(np.float16)
    scale = ((grouped.max(-1) - offset.astype(np.float32)) / np.float32(15)).astype(np.float16)
    over = scale.astype(np.float32)[..., None]
    codes = np.rint((grouped - offset.astype(np.float32)[..., None]) / np.where(over == 0, np.float32(1), over))
    return Quantised(pack(np.clip(codes, 0, 15).astype(np.uint8).reshape(matrix.shape)), scale, offset)


def pack(codes: np.ndarray) -> np.ndarray:
    """Packs codes of 4 bits, uint8 [..., M] below 16, to uint8 [..., M / 2]. See `PACKED`."""
    halves = codes.reshape(*codes.shape[:-1], -1, 2, PACKED // 2)
    return (halves[..., 0, :] | halves[..., 1, :] << 4).reshape(*codes.shape[:-1], -1)


def unpack(codes: Any, run: int = PACKED // 2) -> Any:
    """Codes of 4 bits, uint8 [..., n] to [..., 2 n]: the low halves of each `run` bytes, then their high halves. By
    default the inverse of `pack`."""
    xp = np if isinstance(codes, np.ndarray) else jnp
    halves = codes.reshape(*codes.shape[:-1], -1, 1, run)
    return xp.concatenate([halves & np.uint8(15), halves >> np.uint8(4)], axis=-2).reshape(*codes.shape[:-1], -1)
