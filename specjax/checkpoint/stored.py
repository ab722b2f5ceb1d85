"""A quantised matrix as it comes from a file, and the leaf of parameters that several of them make.

    weight[o, i] = (code[o, i] - zero[o, g]) * scale[o, g] + offset[o, g]        g: the group of column i

Files differ in how they pack and share these numbers. Here each row has its own, and groups are equal runs of columns,
which costs a few hundredths of a weight's bits and makes a leaf of rows of several tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from specjax.checkpoint import four_bits
from specjax.checkpoint.files import CheckpointError
from specjax.models.params import Leaf, Placement, Scope, Sizes, output_major, placements

AT_ONCE = 2**18  # bytes
PACKED = 32  # columns that codes of 4 bits are packed by; see `specjax_kernels.Quantised`
FULL_SCALE = {"int8": (127, np.int8), "fp8": (448, ml_dtypes.float8_e4m3fn)}  # the largest code, and its type


@dataclass(frozen=True)
class Rows:
    """An array [out, n] that is written to its final place, some rows at a time, without a copy of its own."""

    shape: tuple[int, int]
    dtype: np.dtype
    write: Callable[[slice, np.ndarray], None]  # (rows, start and stop given; C-contiguous [rows, n] to fill)

    def whole(self) -> np.ndarray:
        found = np.empty(self.shape, self.dtype)
        self.write(slice(0, len(found)), found)
        return found


@dataclass(frozen=True)
class Stored:
    """A matrix [out, in]. A scale, zero or offset [out, groups]."""

    codes: np.ndarray | Rows
    """[out, in]: int8, uint8 or float8_e4m3fn; [out, in / 2]: uint8, see `four_bits`, if `bits` is 4."""
    scale: np.ndarray  # float, or uint8 or int8 where there is a `super_scale`
    bits: int = 8
    zero: np.ndarray | None = None  # integers
    offset: np.ndarray | None = None  # as `scale`
    super_scale: np.ndarray | None = None  # float16 [out, groups / n]: a factor on n scales
    super_offset: np.ndarray | None = None
    order: np.ndarray | None = None  # int [in]: column i of the codes is column order[i] of the matrix; None: i

    @property
    def inside(self) -> int:
        return self.codes.shape[1] * 8 // self.bits

    def bytewise(self) -> np.ndarray:
        """The codes with a byte for each, [out, in]."""
        codes = self.codes.whole() if isinstance(self.codes, Rows) else self.codes
        return four_bits.unpack(codes) if self.bits == 4 else codes

    def dequantised(self) -> np.ndarray:
        """float32 [out, in], each operation rounded once."""
        values, inside = self.bytewise().astype(np.float32), self.inside
        if self.zero is not None:
            values -= _spread(self.zero, None, inside)
        values *= _spread(self.scale, self.super_scale, inside)
        if self.offset is not None:
            values += _spread(self.offset, self.super_offset, inside)
        if self.order is None:
            return values
        found = np.empty_like(values)
        found[:, self.order] = values
        return found

    def simplified(self) -> Stored:
        """The same weights: zeros as a part of 8-bit codes or as offsets, exactly; 4 bits as 8 where their groups do
        not fit the packing."""
        codes, bits, zero = self.codes, self.bits, self.zero
        groups, inside = self.scale.shape[1], self.inside
        if bits == 4 and inside // groups % PACKED:
            codes, bits = self.bytewise().astype(np.int8), 8
        if zero is None or (bits == 4 and (zero == 8).all()):
            return replace(self, codes=codes, bits=bits)
        if bits == 8 and codes.dtype.kind in "iu":
            codes = codes.whole() if isinstance(codes, Rows) else codes
            moved = codes.astype(np.int32) - zero.astype(np.int32).repeat(inside // groups, axis=1)
            if moved.min() >= -128 and moved.max() <= 127:
                return replace(self, codes=moved.astype(np.int8), bits=8, zero=None)
            if codes.dtype == np.uint8:
                codes, zero = (codes.astype(np.int16) - 128).astype(np.int8), zero.astype(np.int16) - 128
        # A product of two short numbers: exact.
        offset = -zero.astype(np.float32) * self.scale.astype(np.float32)
        return replace(self, codes=codes, bits=bits, zero=None, offset=offset)


def _spread(numbers: np.ndarray, coarse: np.ndarray | None, count: int) -> np.ndarray:
    """Numbers [out, n], times coarser ones [out, m] where there are any, for each of `count` columns or groups;
    float32."""
    wide = numbers.astype(np.float32)
    if coarse is not None:
        wide *= coarse.astype(np.float32).repeat(wide.shape[1] // coarse.shape[1], axis=1)
    return wide.repeat(count // wide.shape[1], axis=1)


def by_rows(count: int, size: int, read: Callable[[slice], Stored]) -> Stored:
    """The matrix of so many rows, of `size` bytes each, that `read` gives a few at a time: its temporary arrays are
    small, and stay in the cache."""
    step = max(1, AT_ONCE // size)
    found: dict[str, Any] = {}
    for start in range(0, count, step):
        part = vars(read(rows := slice(start, start + step)))
        if not found:
            found = part | {n: np.empty((count, a.shape[1]), a.dtype) for n, a in part.items() if np.ndim(a)}
        for name, array in part.items():
            if np.ndim(array):
                found[name][rows] = array
    return Stored(**found)


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array that XLA:CPU takes as it is: one that does not begin at a multiple of 64 bytes would be copied."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    space = np.empty(size + 64, np.uint8)
    start = -space.ctypes.data % 64
    return space[start : start + size].view(dtype).reshape(shape)


def filled(shape: tuple[int, ...], dtype: Any, rules: Iterable[Placement], tensors: Iterable[np.ndarray]) -> np.ndarray:
    """The array of a leaf, `empty` at first, with each of its tensors where its rule says."""
    found = empty(shape, dtype)
    for rule, tensor in zip(rules, tensors, strict=True):
        rule.place(found, tensor)
    return found


def quantised_leaf(parts: Sequence[np.ndarray], scope: Scope, leaf: Leaf, sizes: Sizes, kind: str) -> Any:
    """The leaf of these float tensors, quantised. CheckpointError: its inputs do not divide into groups."""
    from specjax_kernels import quantise

    def made(part: np.ndarray) -> Stored:
        if (found := _quantised(part, kind)) is not None:
            return found

        def rows(some: slice) -> Stored:
            found = quantise(np.asarray(part[some]), kind)
            return Stored(found.codes, found.scale, found.bits, offset=found.offset)

        return by_rows(len(part), 4 * part.shape[1], rows)

    try:
        return make_leaf([made(part) for part in parts], scope, leaf, sizes)
    except ValueError as error:
        raise CheckpointError(f"quantization {kind} of {scope.prefix}{leaf.tensors[0].name}: {error}") from error


def _quantised(matrix: np.ndarray, kind: str) -> Stored | None:
    """`specjax_kernels.quantise` by compiled code, codes straight to their leaf. None: there is none for this kind or
    dtype, or a number is not finite."""
    from specjax_kernels.cpu import repacking

    scale = np.empty(len(matrix), np.float32)
    if kind not in FULL_SCALE or not matrix.flags.c_contiguous or not repacking.magnitudes(matrix, scale):
        return None
    most, dtype = FULL_SCALE[kind]
    scale /= np.float32(most)
    if not np.isfinite(scale).all():
        return None

    def write(rows: slice, found: np.ndarray) -> None:
        repacking.codes(matrix[rows], scale[rows], found)

    return Stored(Rows(matrix.shape, np.dtype(dtype), write), scale[:, None])


def _rules(scope: Scope, leaf: Leaf, sizes: Sizes) -> tuple[Leaf, Sizes, list[Placement]]:
    """A leaf laid out by its outputs, and where the tensors that fill it lie in it: the arguments of `_placed`."""
    declared = output_major(leaf)
    return declared, sizes, list(placements((scope._replace(leaves=(declared,)),), {**sizes, "@": 1}))


def _placed(parts: Sequence[np.ndarray | Rows], declared: Leaf, sizes: Sizes, rules: Sequence[Placement]) -> np.ndarray:
    """Arrays [out, n] of the tensors that fill a leaf as one array, [*out of the leaf, n]. `rules`: of n = 1."""
    width = parts[0].shape[1]
    found = empty(declared.shape({**sizes, "@": width}), parts[0].dtype)
    for rule, part in zip(rules, parts, strict=True):
        rule = replace(rule, split=(*rule.split[:-1], width))
        if isinstance(part, Rows):
            for rows, place in rule.runs(found):
                part.write(rows, place)
        else:
            rule.place(found, part)
    return found


def output_major_leaf(parts: Sequence[np.ndarray], scope: Scope, leaf: Leaf, sizes: Sizes) -> Any:
    """The `specjax_kernels.Quantised` whose codes are the weights themselves: 16-bit tensors [out, in] of one dtype."""
    from specjax_kernels import Quantised

    return Quantised(codes=_placed(parts, *_rules(scope, leaf, sizes)), scale=None)


def make_leaf(parts: Sequence[Stored], scope: Scope, leaf: Leaf, sizes: Sizes) -> Any | None:
    """The `specjax_kernels.Quantised` of the tensors that fill a leaf, in their order; None: no format holds all."""
    from specjax_kernels import Quantised

    alike = _alike([part.simplified() for part in parts])
    if alike is None:
        return None
    first, where = alike[0], _rules(scope, leaf, sizes)

    def whole(name: str) -> np.ndarray | None:
        arrays = [getattr(part, name) for part in alike]
        return None if arrays[0] is None else _placed(arrays, *where)

    codes, zero = whole("codes"), first.zero
    assert codes is not None
    return Quantised(
        codes=codes,
        shift=0 if zero is None else int(zero.flat[0]),
        order=None if first.order is None else first.order.astype(np.int32),
        scale=whole("scale"),
        offset=whole("offset"),
        super_scale=whole("super_scale"),
        super_offset=whole("super_offset"),
    )


def _alike(parts: Sequence[Stored]) -> list[Stored] | None:
    """The parts in one format: their own if they share it, else 8 bits with float32 scales of the smallest group. None:
    their columns are in different orders, or fp8 codes are beside integers."""
    if any(not _equal(part.order, parts[0].order) for part in parts):
        return None

    def form(part: Stored) -> tuple[Any, ...]:
        arrays = (part.scale, part.offset, part.super_scale, part.super_offset)
        return (
            part.codes.dtype,
            part.bits,
            part.zero is None,
            *(None if a is None else (a.dtype, a.shape[1]) for a in arrays),
        )

    if len({form(part) for part in parts}) == 1:
        return list(parts)
    if any(part.codes.dtype.kind not in "iu" for part in parts):
        return None
    groups = math.lcm(*(part.scale.shape[1] for part in parts))
    has_offset = any(part.offset is not None for part in parts)

    def changed(part: Stored) -> Stored:
        codes = part.bytewise().astype(np.int8)
        if part.zero is not None:
            codes -= part.zero.astype(np.int8).repeat(codes.shape[1] // part.zero.shape[1], axis=1)
        offset = None
        if has_offset:
            nothing = np.zeros((len(codes), groups), np.float32)
            offset = nothing if part.offset is None else _spread(part.offset, part.super_offset, groups)
        return Stored(codes, _spread(part.scale, part.super_scale, groups), offset=offset, order=part.order)

    return [changed(part) for part in parts]


def _equal(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))
