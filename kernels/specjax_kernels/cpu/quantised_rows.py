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
CACHED = 8192  # numbers of x that share one dequantised weight, at most: more do not stay in the nearest cache
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
    dots = tools.emitted(11, partial(_emit, layout))
    half_bytes = layout.codes == "uint8"
    scale_bytes, offset_bytes = BYTES[layout.scale], BYTES.get(layout.offset, 0)
    has_offset, coarse = bool(layout.offset), layout.coarse
    super_at = 4 if has_offset else 3

    @tools.inlined
    def tile_rows(columns: int) -> int:
        return max(LANES, min(TILE, (columns // LEAST_TILES + LANES - 1) // LANES * LANES))

    def tiles(call: int) -> int:
        columns = size(call, 1, 0)
        return (columns + tile_rows(columns) - 1) // tile_rows(columns)

    def tile(call: int, index: int) -> int:
        rows, depth, columns = size(call, 0, 0), size(call, 0, 1), size(call, 1, 0)
        groups, shared, most = size(call, 2, 1), columns // size(call, 2, 0), tile_rows(columns)
        row_bytes = depth // 2 if half_bytes else depth
        together = MOST_ROWS if depth <= CACHED // MOST_ROWS else MOST_ROWS // 2
        offset = super_scale = super_offset = 0
        for column in range(index * most, min(index * most + most, columns)):
            at = column // shared * groups
            codes, scale = argument(call, 1) + column * row_bytes, argument(call, 2) + scale_bytes * at
            if has_offset:
                offset = argument(call, 3) + offset_bytes * at
            if coarse > 0:
                super_scale = argument(call, super_at) + 2 * (at // coarse)
                if has_offset:
                    super_offset = argument(call, super_at + 1) + 2 * (at // coarse)
            for row in range(0, rows, together):
                x, out = argument(call, 0) + 4 * row * depth, result(call, 0) + 4 * (row * columns + column)
                count = min(together, rows - row)
                dots(count, codes, scale, offset, super_scale, super_offset, x, out, depth, columns, groups)
        return 0

    return tiles, tile


def _emit(layout: Layout, b: Any, values: Any) -> None:
    """The products of `count` rows of x, out of 1 to MOST_ROWS, and one row of codes."""
    count, *values = values
    for rows in range(1, MOST_ROWS + 1):
        with b.if_then(b.icmp_signed("==", count, count.type(rows))):
            _Dots(layout, rows).emit(b, *values)


class _Dots:
    """Emits the products of a fixed number of rows of x and one row of codes."""

    def __init__(self, layout: Layout, rows: int) -> None:
        self.layout, self.rows = layout, rows
        self.ir: Any = importlib.import_module("llvmlite.ir")
        self.control: Any = importlib.import_module("numba.core.cgutils")
        self.word, self.byte, self.float = self.ir.IntType(64), self.ir.IntType(8), self.ir.FloatType()
        self.lanes = self.vector(self.float)

    def emit(
        self, b: Any, codes: Any, scale: Any, offset: Any, super_scale: Any, super_offset: Any, x: Any, out: Any,
        depth: Any, columns: Any, groups: Any,
    ) -> None:  # fmt: skip
        """Arguments are addresses and, from `depth` on, the numbers of a row of x, rows of codes, groups of a row."""
        layout, word = self.layout, self.word
        parts = range(layout.chunk // LANES)
        sums = [[self.variable(b, self.lanes) for _ in parts] for _ in range(self.rows)]
        for place in sum(sums, []):
            b.store(self.constant(self.lanes, 0.0), place)
        xs = [b.add(x, b.mul(b.mul(depth, word(4)), word(row))) for row in range(self.rows)]

        def chunk(index: Any, scale: Any, offset: Any) -> None:
            at = b.mul(index, word(4 * layout.chunk))
            for part, code in zip(parts, self.codes(b, codes, index), strict=True):
                weight = b.fmul(code, scale) if offset is None else self.fused(b, code, scale, offset)
                for row, places in zip(xs, sums, strict=True):
                    number = self.load(b, self.lanes, b.add(row, b.add(at, word(4 * LANES * part))))
                    b.store(self.fused(b, weight, number, b.load(places[part])), places[part])

        def group(index: Any, scale: Any, offset: Any) -> None:
            if layout.whole:
                chunk(index, scale, offset)
                return
            chunks = b.udiv(b.udiv(depth, word(layout.chunk)), groups)
            with self.control.for_range(b, chunks, intp=word) as inner:
                chunk(b.add(b.mul(index, chunks), inner.index), scale, offset)

        # Scales are made float32 many at a time: one at a time takes longer than a chunk's weights.
        many = layout.coarse or LANES
        kind = self.vector(self.float, many)
        staged = [self.variable(b, kind) for _ in range(2)]
        blocks = b.udiv(groups, word(many))
        with self.control.for_range(b, blocks, intp=word) as block:
            first = b.mul(block.index, word(many))
            made = self.scales(b, many, first, block.index, scale, offset, super_scale, super_offset)
            for vector, place in zip(made, staged, strict=True):
                if vector is not None:
                    b.store(vector, place)
            with self.control.for_range(b, word(many), intp=word) as inner:
                ready = [
                    None if vector is None else self.splat(b, self.load(b, self.float, b.add(b.ptrtoint(place, word), b.mul(inner.index, word(4)))))
                    for vector, place in zip(made, staged, strict=True)
                ]
                group(b.add(first, inner.index), *ready)
        if not layout.coarse:
            done = b.mul(blocks, word(many))
            with self.control.for_range(b, b.sub(groups, done), intp=word) as inner:
                index = b.add(done, inner.index)
                made = self.scales(b, 1, index, None, scale, offset, super_scale, super_offset)
                ready = [None if one is None else self.splat(b, b.extract_element(one, self.ir.IntType(32)(0))) for one in made]
                group(index, *ready)

        for row, places in enumerate(sums):
            total = b.load(places[0])
            for place in places[1:]:
                total = b.fadd(total, b.load(place))
            at = b.add(out, b.mul(b.mul(columns, word(4)), word(row)))
            b.store(self.total(b, total), b.inttoptr(at, self.float.as_pointer()))

    def vector(self, kind: Any, width: int = LANES) -> Any:
        return self.ir.VectorType(kind, width)

    def constant(self, kind: Any, number: Any) -> Any:
        return self.ir.Constant(kind, [number] * kind.count)

    def variable(self, b: Any, kind: Any) -> Any:
        return self.control.alloca_once(b, kind)

    def load(self, b: Any, kind: Any, address: Any) -> Any:
        return b.load(b.inttoptr(address, kind.as_pointer()), align=1)

    def fused(self, b: Any, one: Any, other: Any, added: Any) -> Any:
        kind = self.ir.FunctionType(self.lanes, [self.lanes] * 3)
        function = self.control.get_or_insert_function(b.module, kind, f"llvm.fmuladd.v{LANES}f32")
        return b.call(function, [one, other, added])

    def codes(self, b: Any, codes: Any, index: Any) -> list[Any]:
        """Codes of a chunk as vectors of float32; codes of fp8 divided by 256."""
        layout = self.layout
        some, words = self.vector(self.byte), self.vector(self.ir.IntType(32))
        if layout.codes == "uint8":
            both = b.zext(self.load(b, some, b.add(codes, b.mul(index, self.word(LANES)))), words)
            low, high = b.and_(both, self.constant(words, 15)), b.lshr(both, self.constant(words, 4))
            return [b.sitofp(low, self.lanes), b.sitofp(high, self.lanes)]
        first = b.add(codes, b.mul(index, self.word(layout.chunk)))
        parts = [self.load(b, some, b.add(first, self.word(at))) for at in range(0, layout.chunk, LANES)]
        if layout.codes == "int8":
            return [b.sitofp(b.sext(part, words), self.lanes) for part in parts]
        return [self.from_fp8(b, part) for part in parts]

    def from_fp8(self, b: Any, codes: Any) -> Any:
        """float8_e4m3fn by way of float16, which has 7 bits more of mantissa and an exponent that is 8 larger."""
        kind = self.vector(self.ir.IntType(16))
        bits = b.and_(b.shl(b.sext(codes, kind), self.constant(kind, 7)), self.constant(kind, 0xBFFF))
        largest = self.constant(codes.type, 127)
        nan = b.icmp_unsigned("==", b.and_(codes, largest), largest)
        bits = b.select(nan, self.constant(kind, 0x7E00), bits)
        return b.fpext(b.bitcast(bits, self.vector(self.ir.HalfType())), self.lanes)

    def numbers(self, b: Any, dtype: str, base: Any, first: Any, many: int) -> Any:
        """A vector of float32: the numbers at an address, from the first-th on."""
        ir, floats = self.ir, self.vector(self.float, many)
        address = b.add(base, b.mul(first, self.word(BYTES[dtype])))
        if dtype in ("float32", "float16"):
            found = self.load(b, self.vector(self.float if dtype == "float32" else ir.HalfType(), many), address)
            return found if dtype == "float32" else b.fpext(found, floats)
        if dtype == "bfloat16":
            words = self.vector(ir.IntType(32), many)
            wide = b.zext(self.load(b, self.vector(ir.IntType(16), many), address), words)
            return b.bitcast(b.shl(wide, self.constant(words, 16)), floats)
        code = self.load(b, self.vector(self.byte, many), address)
        return (b.uitofp if dtype == "uint8" else b.sitofp)(code, floats)

    def splat(self, b: Any, number: Any, many: int = LANES) -> Any:
        kind, places = self.vector(number.type, many), self.vector(self.ir.IntType(32), many)
        nothing = self.ir.Constant(kind, self.ir.Undefined)
        one = b.insert_element(nothing, number, places.element(0))
        return b.shuffle_vector(one, nothing, self.constant(places, 0))

    def scales(
        self, b: Any, many: int, first: Any, block: Any, scale: Any, offset: Any, super_scale: Any, super_offset: Any
    ) -> tuple[Any, Any]:
        """Scales and offsets (None: there are none) of some groups: vectors of float32."""
        layout = self.layout
        found = self.numbers(b, layout.scale, scale, first, many)
        added = self.numbers(b, layout.offset, offset, first, many) if layout.offset else None
        if layout.coarse:
            found = b.fmul(found, self.coarse(b, super_scale, block))
            added = None if added is None else b.fmul(added, self.coarse(b, super_offset, block))
        if layout.shift:  # code * scale + this is exact until it is rounded, where the processor fuses the two
            added = b.fmul(found, self.constant(found.type, -float(layout.shift)))
        if layout.codes.startswith("float8"):
            found = b.fmul(found, self.constant(found.type, 256.0))
        return found, added

    def coarse(self, b: Any, address: Any, block: Any) -> Any:
        one = self.numbers(b, "float16", address, block, 1)
        return self.splat(b, b.extract_element(one, self.ir.IntType(32)(0)), self.layout.coarse)

    def total(self, b: Any, lanes: Any) -> Any:
        """The sum of a vector's lanes, halves added to halves."""
        ir, width = self.ir, LANES
        while width > 1:
            width //= 2
            kind = ir.VectorType(ir.IntType(32), width)
            low, high = (b.shuffle_vector(lanes, lanes, ir.Constant(kind, list(range(at, at + width)))) for at in (0, width))
            lanes = b.fadd(low, high)
        return b.extract_element(lanes, ir.IntType(32)(0))
