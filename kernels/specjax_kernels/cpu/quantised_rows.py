"""The product of a few float32 rows and a quantised matrix on a CPU, in the time of reading its codes once.

Codes become float32 weights in registers, for up to four rows of x at a time: w = code * scale + offset, fused where
the processor can. A row's sums are taken in one order however many rows there are, so its result is bit for bit that of
the row alone. The loop over a row of codes is written in LLVM's vectors, which every processor has an equivalent of:
left to itself LLVM adds up each group of codes to one number first, which takes longer than all the rest.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32

from specjax_kernels.cpu.runtime import Tools, callable_here, register

MOST_ROWS = 8  # more rows go through XLA's product of the dequantised matrix
TOGETHER = 4  # rows of x that share one dequantised weight
LANES = 16  # numbers of a vector
TILE = 512  # rows of the matrix in one tile, at most
LEAST_TILES = 8  # of a matrix that has so many blocks of `LANES` rows: threads share the work
BYTES = {"uint8": 1, "int8": 1, "bfloat16": 2, "float16": 2, "float32": 4}


class Layout(NamedTuple):
    """What a kernel is compiled for."""

    codes: str  # dtype: uint8 (two codes of 4 bits a byte), int8, float8_e4m3fn
    scale: str  # dtype
    offset: str  # dtype; "": none
    shift: int
    chunk: int  # codes that are read together, 16 or 32: a part of a group
    whole: bool  # whether a chunk is a group
    coarse: int  # groups of one super-scale; 0: scales have one level

    @property
    def name(self) -> str:
        shown = (self.codes, self.scale, self.offset or "none", self.shift, self.chunk, int(self.whole), self.coarse)
        return "specjax_quantised_" + "_".join(map(str, shown))


def takes(rows: int, layout: Layout | None) -> bool:
    """Whether `multiply` can be called here. The first call loads the kernel or compiles it, which takes seconds."""
    return layout is not None and 0 < rows <= MOST_ROWS and callable_here() and unmet(layout) is None


def unmet(layout: Layout) -> str | None:
    """Why the kernel cannot be called in this process; None: it can."""
    return register(layout.name, partial(_kernel, layout=layout))


def multiply(x: Float32[Array, "N M"], layout: Layout, codes: Array, *scales: Array) -> Float32[Array, "N W"]:
    """x times the transpose of the matrix [W, M] of these codes [W, ...]. `scales`: scale and, where the layout has
    them, offset, super-scale and super-offset, each [W / n, ...], n rows sharing theirs. Vmapped, one by one."""
    shape = jax.ShapeDtypeStruct((x.shape[0], codes.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(layout.name, shape, vmap_method="sequential")(x, codes, *scales)


def _kernel(tools: Tools, layout: Layout) -> tuple[Any, Any]:
    """(x [N, M], codes, scales) -> [N, W]. A tile is some rows of the matrix."""
    argument, size, result = tools.argument, tools.argument_size, tools.result
    dots1, dots2, dots3, dots4 = (tools.emitted(14, _Dots(layout, rows).emit) for rows in range(1, TOGETHER + 1))
    half_bytes = layout.codes == "uint8"
    scale_bytes, offset_bytes, chunk = BYTES[layout.scale], BYTES.get(layout.offset, 0), layout.chunk
    has_offset, coarse, super_at = bool(layout.offset), layout.coarse, 4 if layout.offset else 3

    @tools.inlined
    def tile_rows(columns: int) -> int:
        return max(16, min(TILE, (columns + LEAST_TILES - 1) // LEAST_TILES // 16 * 16))

    def tiles(call: int) -> int:
        columns = size(call, 1, 0)
        return (columns + tile_rows(columns) - 1) // tile_rows(columns)

    def tile(call: int, index: int) -> int:
        rows, depth, columns = size(call, 0, 0), size(call, 0, 1), size(call, 1, 0)
        groups, apart, most = size(call, 2, 1), columns // size(call, 2, 0), tile_rows(columns)
        row_bytes, chunks = depth // 2 if half_bytes else depth, depth // groups // chunk
        offset = super_scale = super_offset = 0
        for column in range(index * most, min(index * most + most, columns)):
            at = column // apart * groups
            codes, scale = argument(call, 1) + column * row_bytes, argument(call, 2) + scale_bytes * at
            if has_offset:
                offset = argument(call, 3) + offset_bytes * at
            if coarse > 0:
                super_scale = argument(call, super_at) + 2 * (at // coarse)
            if coarse > 0 and has_offset:
                super_offset = argument(call, super_at + 1) + 2 * (at // coarse)
            for row in range(0, rows, 4):
                x, left = argument(call, 0) + 4 * row * depth, rows - row
                out = result(call, 0) + 4 * (row * columns + column)
                if left >= 4:
                    dots4(codes, scale, offset, super_scale, super_offset, x, out, depth, columns, groups, chunks, 0,0,0)
                elif left == 3:
                    dots3(codes, scale, offset, super_scale, super_offset, x, out, depth, columns, groups, chunks, 0,0,0)
                elif left == 2:
                    dots2(codes, scale, offset, super_scale, super_offset, x, out, depth, columns, groups, chunks, 0,0,0)
                else:
                    dots1(codes, scale, offset, super_scale, super_offset, x, out, depth, columns, groups, chunks, 0,0,0)
        return 0

    return tiles, tile


class _Dots:
    """Emits the products of some rows of x and one row of codes."""

    def __init__(self, layout: Layout, rows: int) -> None:
        self.layout, self.rows = layout, rows
        self.ir: Any = importlib.import_module("llvmlite.ir")
        self.control: Any = importlib.import_module("numba.core.cgutils")
        ir = self.ir
        self.word, self.byte, self.float = ir.IntType(64), ir.IntType(8), ir.FloatType()
        self.lanes = ir.VectorType(self.float, LANES)

    def emit(self, b: Any, values: Any) -> None:
        codes, scale, offset, super_scale, super_offset, x, out, depth, columns, groups, chunks, *_ = values
        layout, word, halves = self.layout, self.word, self.layout.chunk // LANES
        zero = self.lanes(None) if False else self.ir.Constant(self.lanes, [0.0] * LANES)
        sums = [[self.control.alloca_once(b, self.lanes) for _ in range(halves)] for _ in range(self.rows)]
        for row in sums:
            for place in row:
                b.store(zero, place)
        row_bytes = b.shl(depth, word(2))
        xs = [b.add(x, b.mul(row_bytes, word(row))) for row in range(self.rows)]

        def chunk(index: Any, scales: Any) -> None:
            weights = self.weights(b, codes, index)
            weights = [self.scaled(b, weight, *scales) for weight in weights]
            at = b.mul(index, word(4 * layout.chunk))
            for row, places in zip(xs, sums, strict=True):
                for half, (weight, place) in enumerate(zip(weights, places, strict=True)):
                    number = self.load(b, self.lanes, b.add(row, b.add(at, word(4 * LANES * half))))
                    b.store(self.fused(b, weight, number, b.load(place)), place)

        with self.control.for_range(b, groups, intp=word) as group:
            scales = self.scales(b, group.index, scale, offset, super_scale, super_offset)
            if layout.whole:
                chunk(group.index, scales)
            else:
                first = b.mul(group.index, chunks)
                with self.control.for_range(b, chunks, intp=word) as inner:
                    chunk(b.add(first, inner.index), scales)
        for row, places in enumerate(sums):
            total = b.load(places[0])
            for place in places[1:]:
                total = b.fadd(total, b.load(place))
            at = b.add(out, b.shl(b.mul(columns, word(row)), word(2)))
            b.store(self.total(b, total), b.inttoptr(at, self.float.as_pointer()))

    def load(self, b: Any, kind: Any, address: Any) -> Any:
        return b.load(b.inttoptr(address, kind.as_pointer()), align=1)

    def fused(self, b: Any, one: Any, other: Any, added: Any) -> Any:
        kind = self.ir.FunctionType(self.lanes, [self.lanes] * 3)
        function = self.control.get_or_insert_function(b.module, kind, f"llvm.fmuladd.v{LANES}f32")
        return b.call(function, [one, other, added])

    def weights(self, b: Any, codes: Any, index: Any) -> list[Any]:
        """Codes of a chunk as vectors of float32; codes of fp8 divided by 256."""
        ir, layout = self.ir, self.layout
        bytes_of, words = ir.VectorType(self.byte, LANES), ir.VectorType(ir.IntType(32), LANES)
        if layout.codes == "uint8":
            both = b.zext(self.load(b, bytes_of, b.add(codes, b.mul(index, self.word(16)))), words)
            low = b.and_(both, ir.Constant(words, [15] * LANES))
            high = b.lshr(both, ir.Constant(words, [4] * LANES))
            return [b.sitofp(low, self.lanes), b.sitofp(high, self.lanes)]
        first = b.add(codes, b.mul(index, self.word(layout.chunk)))
        parts = [self.load(b, bytes_of, b.add(first, self.word(at))) for at in range(0, layout.chunk, LANES)]
        if layout.codes == "int8":
            return [b.sitofp(b.sext(part, words), self.lanes) for part in parts]
        return [self.from_fp8(b, part) for part in parts]

    def from_fp8(self, b: Any, codes: Any) -> Any:
        """e4m3fn by way of float16, whose exponent has the same place one bit further and another bias."""
        ir = self.ir
        kind = ir.VectorType(ir.IntType(16), LANES)
        bits = b.and_(b.shl(b.sext(codes, kind), ir.Constant(kind, [7] * LANES)), ir.Constant(kind, [0xBFFF] * LANES))
        rest = b.and_(codes, ir.Constant(codes.type, [127] * LANES))
        nan = b.icmp_unsigned("==", rest, ir.Constant(codes.type, [127] * LANES))
        bits = b.select(nan, ir.Constant(kind, [0x7E00] * LANES), bits)
        return b.fpext(b.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), self.lanes)

    def number(self, b: Any, dtype: str, base: Any, index: Any) -> Any:
        """The index-th number at an address, in every lane of a vector."""
        ir = self.ir
        address = b.add(base, b.mul(index, self.word(BYTES[dtype])))
        if dtype == "float32":
            return self.splat(b, self.load(b, self.float, address))
        if dtype == "float16":
            return b.fpext(self.splat(b, self.load(b, ir.HalfType(), address)), self.lanes)
        if dtype == "bfloat16":
            wide = b.zext(self.load(b, ir.IntType(16), address), ir.IntType(32))
            return self.splat(b, b.bitcast(b.shl(wide, ir.IntType(32)(16)), self.float))
        code = self.load(b, self.byte, address)
        return self.splat(b, (b.uitofp if dtype == "uint8" else b.sitofp)(code, self.float))

    def splat(self, b: Any, number: Any) -> Any:
        ir = self.ir
        kind = ir.VectorType(number.type, LANES)
        one = b.insert_element(ir.Constant(kind, ir.Undefined), number, ir.IntType(32)(0))
        return b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))

    def scales(self, b: Any, group: Any, scale: Any, offset: Any, super_scale: Any, super_offset: Any) -> Any:
        """(scale, offset or None) of a group, in every lane."""
        layout = self.layout
        found = self.number(b, layout.scale, scale, group)
        added = self.number(b, layout.offset, offset, group) if layout.offset else None
        if layout.coarse:
            coarse = b.udiv(group, self.word(layout.coarse))
            found = b.fmul(found, self.number(b, "float16", super_scale, coarse))
            if added is not None:
                added = b.fmul(added, self.number(b, "float16", super_offset, coarse))
        if layout.shift:  # exact, as the fused sum of code * scale and this is
            added = b.fmul(found, self.ir.Constant(self.lanes, [-float(layout.shift)] * LANES))
        if layout.codes.startswith("float8"):
            found = b.fmul(found, self.ir.Constant(self.lanes, [256.0] * LANES))
        return found, added

    def scaled(self, b: Any, code: Any, scale: Any, offset: Any) -> Any:
        return b.fmul(code, scale) if offset is None else self.fused(b, code, scale, offset)

    def total(self, b: Any, lanes: Any) -> Any:
        """The sum of a vector's lanes, halves added to halves."""
        ir, width = self.ir, LANES
        while width > 1:
            width //= 2
            kind = ir.VectorType(ir.IntType(32), width)
            low, high = (b.shuffle_vector(lanes, lanes, ir.Constant(kind, list(range(at, at + width)))) for at in (0, width))
            lanes = b.fadd(low, high)
        return b.extract_element(lanes, ir.IntType(32)(0))
