"""A quantised matrix of a file, and the leaf of the parameter tree that one or several of them fill.

    weight[o, i] = (code[o, i] - zero[o, g]) * scale[o, g] + offset[o, g]        g: the group of column i

Formats differ in how they pack these numbers and share them between rows. Here every row has its own, and groups are
equal runs of columns: a few hundredths of a bit per weight more, and rows of several tensors can form one leaf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from specjax.checkpoint.files import CheckpointError
from specjax.models.params import Leaf, Placement, Scope, Sizes, output_major, placements

BLOCK_BYTES = 2**18  # of rows that are converted together, so that temporary arrays stay in the cache
PACKED = 32  # columns that codes of 4 bits are packed by; see `specjax_kernels.Quantised`
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds this column of the eight
LARGEST_CODE = {"int8": (127, np.int8), "fp8": (448, ml_dtypes.float8_e4m3fn)}


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix [out, in]. Scales, zeros and offsets are [out, groups]."""

    codes: np.ndarray
    """[out, in]: int8, uint8 or float8_e4m3fn. With 4 bits uint8 [out, in / 2]: byte j of each 16 holds code j of 32 in
    its low half and code j + 16 in its high half."""
    scale: np.ndarray  # float; uint8 or int8 with a `super_scale`
    bits: int = 8
    zero: np.ndarray | None = None  # integers
    offset: np.ndarray | None = None  # as `scale`
    super_scale: np.ndarray | None = None  # float16 [out, groups / n]: a factor on n scales
    super_offset: np.ndarray | None = None
    order: np.ndarray | None = None  # int [in]: column i of the codes is column order[i] of the matrix; None: i

    @property
    def inputs(self) -> int:
        return self.codes.shape[1] * 8 // self.bits

    def code_bytes(self) -> np.ndarray:
        """The codes with one byte each, [out, in]."""
        return unpack_nibbles(self.codes) if self.bits == 4 else self.codes

    def dequantised(self) -> np.ndarray:
        """float32 [out, in]; each operation is rounded once."""
        values = self.code_bytes().astype(np.float32)
        if self.zero is not None:
            values -= _expand(self.zero, None, self.inputs)
        values *= _expand(self.scale, self.super_scale, self.inputs)
        if self.offset is not None:
            values += _expand(self.offset, self.super_offset, self.inputs)
        if self.order is None:
            return values
        ordered = np.empty_like(values)
        ordered[:, self.order] = values
        return ordered

    def without_zeros(self) -> QuantisedMatrix:
        """The same weights, with zeros subtracted from 8-bit codes or turned into offsets, which is exact. 4-bit codes
        become 8-bit ones where the groups do not fit the packing."""
        codes, bits, zero = self.codes, self.bits, self.zero
        if bits == 4 and self.inputs // self.scale.shape[1] % PACKED:
            codes, bits = self.code_bytes().astype(np.int8), 8
        if zero is None or (bits == 4 and (zero == 8).all()):
            return replace(self, codes=codes, bits=bits)
        if bits == 8 and np.issubdtype(codes.dtype, np.integer):
            shifted = codes.astype(np.int32) - zero.astype(np.int32).repeat(self.inputs // zero.shape[1], axis=1)
            if shifted.min() >= -128 and shifted.max() <= 127:
                return replace(self, codes=shifted.astype(np.int8), bits=8, zero=None)
            if codes.dtype == np.uint8:
                codes, zero = (codes.astype(np.int16) - 128).astype(np.int8), zero.astype(np.int16) - 128
        # The product of two short numbers is exact.
        offset = -zero.astype(np.float32) * self.scale.astype(np.float32)
        return replace(self, codes=codes, bits=bits, zero=None, offset=offset)


def _expand(numbers: np.ndarray, factors: np.ndarray | None, count: int) -> np.ndarray:
    """Numbers [out, n], times factors [out, m] if given, repeated for each of `count` columns or groups; float32."""
    wide = numbers.astype(np.float32)
    if factors is not None:
        wide *= factors.astype(np.float32).repeat(wide.shape[1] // factors.shape[1], axis=1)
    return wide.repeat(count // wide.shape[1], axis=1)


def by_rows(count: int, size: int, read: Callable[[slice], QuantisedMatrix]) -> QuantisedMatrix:
    """The matrix of `count` rows of `size` bytes each, which `read` converts a few at a time."""
    step = max(1, BLOCK_BYTES // size)
    fields: dict[str, Any] = {}
    for start in range(0, count, step):
        part = vars(read(rows := slice(start, start + step)))
        if not fields:
            fields = part | {n: np.empty((count, a.shape[1]), a.dtype) for n, a in part.items() if np.ndim(a)}
        for name, array in part.items():
            if np.ndim(array):
                fields[name][rows] = array
    return QuantisedMatrix(**fields)


# Codes in words of 32 bits, and of 4 bits in bytes.


def unpack_words(words: np.ndarray, bits: int, order: tuple[int, ...] = ()) -> np.ndarray:
    """The numbers in int32 words [rows, words], from the low end: uint8 [rows, words * 32 / bits]."""
    if words.dtype.itemsize != 4:
        raise CheckpointError(f"packed weights of {words.dtype}; words of 32 bits are needed")
    shifts = np.arange(32 // bits, dtype=np.uint32) * bits
    wide = np.ascontiguousarray(words).view(np.uint32)[:, :, None]
    numbers = (wide >> shifts & np.uint32(2**bits - 1)).astype(np.uint8)
    if order:
        numbers = numbers[:, :, np.argsort(order)]
    return numbers.reshape(len(words), -1)


def unpack_nibbles(codes: np.ndarray, run: int = 16) -> np.ndarray:
    """The low halves of each run of bytes, then the high halves: uint8 [out, in / 2] to [out, in]. With runs of 16 the
    inverse of `specjax_kernels`' `pack`."""
    halves = codes.reshape(len(codes), -1, 1, run)
    return np.concatenate([halves & 15, halves >> 4], axis=2).reshape(len(codes), -1)


def pack_rows(words: np.ndarray) -> np.ndarray:
    """Codes of 4 bits in int32 words [out, in / 8] of any strides, as ``QuantisedMatrix.codes``."""
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


# Leaves.


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array that XLA:CPU uses without a copy, because it begins at a multiple of 64 bytes."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    space = np.empty(size + 64, np.uint8)
    start = -space.ctypes.data % 64
    return space[start : start + size].view(dtype).reshape(shape)


def fill_leaf(
    shape: tuple[int, ...], dtype: Any, rules: Iterable[Placement], tensors: Iterable[np.ndarray]
) -> np.ndarray:
    """The array of a leaf, each tensor placed by its rule."""
    array = aligned_empty(shape, dtype)
    for rule, tensor in zip(rules, tensors, strict=True):
        rule.place(array, tensor)
    return array


def quantise_leaf(tensors: Sequence[np.ndarray], scope: Scope, leaf: Leaf, sizes: Sizes, kind: str) -> Any:
    """The leaf of float tensors [out, in], quantised to `kind`. CheckpointError: the inputs do not divide into
    groups."""
    from specjax_kernels import quantise

    def quantised(tensor: np.ndarray) -> QuantisedMatrix:
        if (matrix := _quantise_compiled(tensor, kind)) is not None:
            return matrix

        def read(rows: slice) -> QuantisedMatrix:
            part = quantise(np.asarray(tensor[rows]), kind)
            return QuantisedMatrix(part.codes, part.scale, part.bits, offset=part.offset)

        return by_rows(len(tensor), 4 * tensor.shape[1], read)

    try:
        return make_leaf([quantised(tensor) for tensor in tensors], scope, leaf, sizes)
    except ValueError as error:
        raise CheckpointError(f"quantization {kind} of {scope.prefix}{leaf.tensors[0].name}: {error}") from error


def _quantise_compiled(tensor: np.ndarray, kind: str) -> QuantisedMatrix | None:
    """`specjax_kernels.quantise` in compiled code. None: not available for this kind or dtype, or a number is not
    finite."""
    from specjax_kernels.cpu import repacking

    scale = np.empty(len(tensor), np.float32)
    if kind not in LARGEST_CODE or not tensor.flags.c_contiguous or not repacking.magnitudes(tensor, scale):
        return None
    largest, dtype = LARGEST_CODE[kind]
    scale /= np.float32(largest)
    if not np.isfinite(scale).all():
        return None

    codes = np.empty(tensor.shape, dtype)
    repacking.codes(tensor, scale, codes)
    return QuantisedMatrix(codes, scale[:, None])


def output_major_leaf(tensors: Sequence[np.ndarray], scope: Scope, leaf: Leaf, sizes: Sizes) -> np.ndarray:
    """Arrays [out, n] of the tensors that fill a leaf as one array [*outputs of the leaf, n]."""
    declared, width = output_major(leaf), tensors[0].shape[1]
    sizes = {**sizes, "@": width}
    rules = placements((scope._replace(leaves=(declared,)),), sizes)
    return fill_leaf(declared.shape(sizes), tensors[0].dtype, rules, tensors)


def make_leaf(parts: Sequence[QuantisedMatrix], scope: Scope, leaf: Leaf, sizes: Sizes) -> Any | None:
    """The `specjax_kernels.Quantised` that the matrices of a leaf's tensors fill; None if no format holds all."""
    from specjax_kernels import Quantised

    matrices = _in_one_format([part.without_zeros() for part in parts])
    if matrices is None:
        return None
    first = matrices[0]

    def joined(name: str) -> np.ndarray | None:
        arrays = [getattr(matrix, name) for matrix in matrices]
        return None if arrays[0] is None else output_major_leaf(arrays, scope, leaf, sizes)

    arrays: dict[str, Any] = {
        name: joined(name) for name in ("codes", "scale", "offset", "super_scale", "super_offset")
    }
    return Quantised(
        **arrays,
        shift=0 if first.zero is None else int(first.zero.flat[0]),
        order=None if first.order is None else first.order.astype(np.int32),
    )


def _in_one_format(matrices: Sequence[QuantisedMatrix]) -> Sequence[QuantisedMatrix] | None:
    """The matrices in their own format if they share it, else in 8 bits with float32 scales of the smallest groups.
    None: their columns are in different orders, or fp8 codes stand beside integers."""
    orders: list[Any] = [matrix.order for matrix in matrices]
    if any(order is not orders[0] and not np.array_equal(order, orders[0]) for order in orders):
        return None

    def format_of(matrix: QuantisedMatrix) -> tuple[Any, ...]:
        arrays = (matrix.scale, matrix.offset, matrix.super_scale, matrix.super_offset)
        shapes = [None if array is None else (array.dtype, array.shape[1]) for array in arrays]
        return matrix.codes.dtype, matrix.bits, matrix.zero is None, *shapes

    if len({format_of(matrix) for matrix in matrices}) == 1:
        return matrices
    if not all(np.issubdtype(matrix.codes.dtype, np.integer) for matrix in matrices):
        return None
    groups = math.lcm(*(matrix.scale.shape[1] for matrix in matrices))
    has_offset = any(matrix.offset is not None for matrix in matrices)

    def in_eight_bits(matrix: QuantisedMatrix) -> QuantisedMatrix:
        codes = matrix.code_bytes().astype(np.int8)
        if matrix.zero is not None:
            codes -= matrix.zero.astype(np.int8).repeat(matrix.inputs // matrix.zero.shape[1], axis=1)
        offset = np.zeros((len(codes), groups), np.float32) if has_offset else None
        if matrix.offset is not None:
            offset = _expand(matrix.offset, matrix.super_offset, groups)
        return QuantisedMatrix(
            codes, _expand(matrix.scale, matrix.super_scale, groups), offset=offset, order=matrix.order
        )

    return [in_eight_bits(matrix) for matrix in matrices]
