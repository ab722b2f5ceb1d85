"""The product of float32 rows and a quantised matrix on a CPU, in little more than the time of reading its codes.

Codes become float32 weights in registers, once for several rows of x: w = code * scale + offset, fused where the
processor can; codes in 16 bits are the weights themselves. A row's sums are taken in one order however many rows there
are, so its result is bit for bit that of the row alone. The loop over a row of codes is written in LLVM's vectors,
which it maps to any processor's: left to itself LLVM adds up each group of codes to one number first, which takes
longer than all the rest.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32

from specjax_kernels.cpu import object_code
from specjax_kernels.cpu.runtime import Tools, callable_here, register

# Largest number of rows, with and without scales: up to there dequantising for XLA's product takes longer on 2 cores.
MOST_ROWS = {True: 256, False: 512}
TOGETHER = {True: 8, False: 3}  # rows of x that share a weight: with 32 registers of 16 lanes, or 16 of 8
LANES = 16  # numbers of a vector
TILE = 512  # rows of codes in one tile, at most
TILES = 16  # of a matrix of so many times `LANES` rows or more, at least: the threads share them
BYTES = {"uint8": 1, "int8": 1, "float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4}  # of a number


class Layout(NamedTuple):
    """What a kernel is compiled for."""

    codes: str  # dtype: uint8 (two codes of 4 bits in a byte), int8, float8_e4m3fn; float16 or bfloat16, the weights
    scale: str  # dtype, "": the codes are the weights
    offset: str  # dtype, "": none
    shift: int
    chunk: int  # codes that are read together, 16 or 32: a group or a part of one
    whole: bool  # whether a chunk is a group
    coarse: int  # groups of a super-scale, 0: scales have one level

    @property
    def name(self) -> str:
        shown = (
            self.codes,
            self.scale or "none",
            self.offset or "none",
            self.shift,
            self.chunk,
            int(self.whole),
            self.coarse,
        )
        return "specjax_quantised_" + "_".join(map(str, shown))


def takes(rows: int, layout: Layout | None) -> bool:
    """Whether `multiply` can be called here. The first call loads the kernel or compiles it, which takes seconds."""
    if layout is None or not 0 < rows <= MOST_ROWS[bool(layout.scale)]:
        return False
    return callable_here() and unmet(layout) is None


def unmet(layout: Layout) -> str | None:
    """Why the kernel cannot be called in this process; None: it can."""
    return register(layout.name, partial(_kernel, layout=layout))


def multiply(x: Float32[Array, "N M"], layout: Layout, codes: Array, *scales: Array) -> Float32[Array, "N W"]:
    """x times the transpose of the matrix [W, M] of these codes [W, ...]. `scales`: the scales and, where the layout
    has them, offsets, super-scales and super-offsets, each [W / n, ...] for n rows that share theirs. Vmapped, one by
    one."""
    shape = jax.ShapeDtypeStruct((x.shape[0], codes.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(layout.name, shape, vmap_method="sequential")(x, codes, *scales)


def _kernel(tools: Tools, layout: Layout) -> tuple[Any, Any]:
    """(x [N, M], codes, scales) -> [N, W]. A tile is some rows of codes."""
    argument, size, result = tools.argument, tools.argument_size, tools.result
    products = products_of(tools, layout)
    has_scale, has_offset, coarse = bool(layout.scale), bool(layout.offset), layout.coarse
    super_at = 4 if has_offset else 3

    @tools.inlined
    def tile_rows(columns: int) -> int:
        return max(LANES, min(TILE, (columns // TILES + LANES - 1) // LANES * LANES))

    def tiles(call: int) -> int:
        columns = size(call, 1, 0)
        return (columns + tile_rows(columns) - 1) // tile_rows(columns)

    def tile(call: int, index: int) -> int:
        rows, depth, columns = size(call, 0, 0), size(call, 0, 1), size(call, 1, 0)
        xs, codes, outs, most = argument(call, 0), argument(call, 1), result(call, 0), tile_rows(columns)
        scale = offset = super_scale = super_offset = 0
        groups = shared = 1
        if has_scale:
            scale, groups, shared = argument(call, 2), size(call, 2, 1), columns // size(call, 2, 0)
        if has_offset:
            offset = argument(call, 3)
        if coarse > 0:
            super_scale = argument(call, super_at)
            if has_offset:
                super_offset = argument(call, super_at + 1)
        start, end = index * most, min(index * most + most, columns)
        products(
            rows, start, end, codes, scale, offset, super_scale, super_offset, xs, outs, depth, columns, groups, shared
        )
        return 0

    return tiles, tile


def products_of(tools: Tools, layout: Layout) -> Any:
    """For kernels: the products of all rows of x and rows `start` to `end` of the codes. Arguments are addresses and
    sizes; `shared`: rows of codes that share their scales."""
    together = TOGETHER[object_code.has("avx512f")]
    dots = tools.emitted(14, partial(_emit, layout, together))

    @tools.inlined
    def products(
        rows: int, start: int, end: int, codes: int, scale: int, offset: int, super_scale: int, super_offset: int,
        xs: int, outs: int, depth: int, columns: int, groups: int, shared: int,
    ) -> None:  # fmt: skip
        # Two long runs of memory, which the processor reads ahead; neighbouring rows would spoil that.
        apart = (end - start + 1) // 2
        for row in range(0, rows, together):
            count, x, out = min(together, rows - row), xs + 4 * row * depth, outs + 4 * row * columns
            for first in range(start, start + apart):
                second = min(first + apart, end - 1)
                dots(
                    count, first, second, codes, scale, offset, super_scale, super_offset, x, out, depth, columns,
                    groups, shared,
                )  # fmt: skip

    return products


def _emit(layout: Layout, together: int, b: Any, values: Any) -> None:
    """The products of `count` rows of x, out of 1 to `together`, and two rows of codes."""
    count, *values = values
    for rows in range(1, together + 1):
        with b.if_then(b.icmp_signed("==", count, count.type(rows))):
            _Dots(layout, rows, b).emit(*values)


class _Dots:
    """Emits the products of a fixed number of rows of x and two rows of codes, with an LLVM builder."""

    def __init__(self, layout: Layout, rows: int, b: Any) -> None:
        self.layout, self.rows, self.b = layout, rows, b
        self.ir: Any = importlib.import_module("llvmlite.ir")
        self.control: Any = importlib.import_module("numba.core.cgutils")
        self.word, self.byte, self.float = self.ir.IntType(64), self.ir.IntType(8), self.ir.FloatType()
        self.lanes = self.vector(self.float)

    def emit(
        self, first: Any, second: Any, codes: Any, scale: Any, offset: Any, super_scale: Any, super_offset: Any, x: Any,
        out: Any, depth: Any, columns: Any, groups: Any, shared: Any,
    ) -> None:  # fmt: skip
        """For two rows of codes, of `columns`; `shared`: rows that share their scales."""
        b, layout, word = self.b, self.layout, self.word
        row_bytes = b.udiv(depth, word(2)) if layout.codes == "uint8" else b.mul(depth, word(BYTES[layout.codes]))
        indices = first, second
        matrix = [b.add(codes, b.mul(index, row_bytes)) for index in indices]
        scales = [b.mul(b.udiv(index, shared), groups) for index in indices]  # the number of each row's first group
        xs = [b.add(x, b.mul(b.mul(depth, word(4)), word(row))) for row in range(self.rows)]
        parts = range(layout.chunk // LANES)
        zero = self.constant(self.lanes, 0.0)
        sums = [[self.variable(zero) for _ in xs] for _ in indices]

        def chunk(index: Any, of_group: list[tuple[Any, Any]]) -> None:
            weights = [self.weights(address, index, *of_row) for address, of_row in zip(matrix, of_group, strict=True)]
            at = b.mul(index, word(4 * layout.chunk))
            for row, address in enumerate(xs):
                for part in parts:
                    number = self.load(self.lanes, b.add(address, b.add(at, word(4 * LANES * part))))
                    for of_row, of_code_row in zip(weights, sums, strict=True):
                        place = of_code_row[row]
                        b.store(self.fused(of_row[part], number, b.load(place)), place)

        if layout.scale:
            self.each_group(chunk, scales, depth, groups, scale, offset, super_scale, super_offset)
        else:
            with self.control.for_range(b, b.udiv(depth, word(layout.chunk)), intp=word) as loop:
                chunk(loop.index, [(None, None)] * 2)
        for index, of_code_row in zip(indices, sums, strict=True):
            for row, place in enumerate(of_code_row):
                total = self.total(b.load(place))
                at = b.add(b.mul(columns, word(row)), index)
                b.store(total, b.inttoptr(b.add(out, b.mul(at, word(4))), self.float.as_pointer()))

    def each_group(self, chunk: Any, scales: list[Any], depth: Any, groups: Any, *numbers: Any) -> None:
        """Calls `chunk` for all chunks of two rows of codes, with their scales. `scales`: numbers of the rows' first
        groups."""
        b, layout, word = self.b, self.layout, self.word
        rooms = [self.rooms() for _ in scales]
        blocks = b.udiv(b.add(groups, word(LANES - 1)), word(LANES))
        with self.control.for_range(b, blocks, intp=word) as block:
            begin = b.mul(block.index, word(LANES))
            left = b.sub(groups, begin)
            count = b.select(b.icmp_unsigned("<", left, word(LANES)), left, word(LANES))
            skipped = self.skipped(count, groups)
            for base, room in zip(scales, rooms, strict=True):
                self.widen(b.add(base, begin), count, skipped, room, groups, *numbers)
            with self.control.for_range(b, count, intp=word) as inside:
                index, place = b.add(begin, inside.index), b.add(skipped, inside.index)
                of_group = [tuple(room and self.splat(b.load(b.gep(room, [place]))) for room in pair) for pair in rooms]
                if layout.whole:
                    chunk(index, of_group)
                else:
                    chunks = b.udiv(b.udiv(depth, word(layout.chunk)), groups)
                    with self.control.for_range(b, chunks, intp=word) as inner:
                        chunk(b.add(b.mul(index, chunks), inner.index), of_group)

    def rooms(self) -> tuple[Any, Any]:
        """Memory for the scales and offsets (None: there are none) of `LANES` groups as float32."""
        has_offset = self.layout.offset or self.layout.shift
        scale, offset = (self.control.alloca_once(self.b, self.float, self.word(LANES)) for _ in range(2))
        return scale, offset if has_offset else None

    def skipped(self, count: Any, groups: Any) -> Any:
        """Where in its memory the first of `count` groups lies: behind others that were read with it, since vectors are
        read whole, and never beyond a row."""
        if self.layout.coarse:
            return self.word(0)
        b, word = self.b, self.word
        return b.select(b.icmp_unsigned(">=", groups, word(LANES)), b.sub(word(LANES), count), word(0))

    def widen(
        self, first: Any, count: Any, skipped: Any, room: tuple[Any, Any], groups: Any, *numbers: Any
    ) -> None:  # fmt: skip
        """Writes the scales and offsets of `count` groups, up to `LANES`, as float32, behind the skipped ones."""
        b, word = self.b, self.word

        def write(group: Any, place: Any, width: int) -> None:
            for memory, values in zip(room, self.scales(width, group, *numbers), strict=True):
                if memory is not None:
                    b.store(values, b.bitcast(b.gep(memory, [place]), values.type.as_pointer()), align=4)

        def one_by_one() -> None:
            with self.control.for_range(b, count, intp=word) as group:
                write(b.add(first, group.index), group.index, 1)

        if self.layout.coarse:
            one_by_one()
            return
        with b.if_else(b.icmp_unsigned(">=", groups, word(LANES))) as (whole, few):
            with whole:
                write(b.sub(first, skipped), word(0), LANES)
            with few:
                one_by_one()

    def vector(self, kind: Any) -> Any:
        return self.ir.VectorType(kind, LANES)

    def constant(self, kind: Any, number: Any) -> Any:
        return self.ir.Constant(kind, [number] * kind.count)

    def variable(self, value: Any) -> Any:
        place = self.control.alloca_once(self.b, value.type)
        self.b.store(value, place)
        return place

    def load(self, kind: Any, address: Any) -> Any:
        return self.b.load(self.b.inttoptr(address, kind.as_pointer()), align=1)

    def fused(self, one: Any, other: Any, added: Any) -> Any:
        function = self.function(f"llvm.fmuladd.v{one.type.count}f32", *[one.type] * 3)
        return self.b.call(function, [one, other, added])

    def function(self, name: str, *arguments: Any) -> Any:
        """A function of LLVM's, whose result has its first argument's type."""
        kind = self.ir.FunctionType(arguments[0], arguments)
        return self.control.get_or_insert_function(self.b.module, kind, name)

    def weights(self, address: Any, index: Any, scale: Any, offset: Any) -> list[Any]:
        """The index-th chunk of a row, as vectors of float32."""
        if self.layout.codes != "uint8" or not object_code.has("avx512f"):
            return [self.scaled(codes, scale, offset) for codes in self.codes(address, index)]
        # The weights of all 16 codes in one vector, from which a permutation takes those of 16 codes at once.
        b, words = self.b, self.vector(self.ir.IntType(32))
        every = self.scaled(self.ir.Constant(self.lanes, [float(code) for code in range(LANES)]), scale, offset)
        function = self.function("llvm.x86.avx512.permvar.sf.512", self.lanes, words)
        both = self.bytes_of(address, index)
        return [b.call(function, [every, codes]) for codes in (both, b.lshr(both, self.constant(words, 4)))]

    def scaled(self, codes: Any, scale: Any, offset: Any) -> Any:
        if scale is None:
            return codes
        return self.b.fmul(codes, scale) if offset is None else self.fused(codes, scale, offset)

    def bytes_of(self, address: Any, index: Any) -> Any:
        """The bytes of the index-th chunk of a row, each of two codes of 4 bits."""
        some, words = self.vector(self.byte), self.vector(self.ir.IntType(32))
        return self.b.zext(self.load(some, self.b.add(address, self.b.mul(index, self.word(LANES)))), words)

    def codes(self, address: Any, index: Any) -> list[Any]:
        """Codes of the index-th chunk of a row as vectors of float32; those of fp8 are divided by 256."""
        b, layout = self.b, self.layout
        some, words = self.vector(self.byte), self.vector(self.ir.IntType(32))
        if layout.codes == "uint8":
            both = self.bytes_of(address, index)
            low, high = b.and_(both, self.constant(words, 15)), b.lshr(both, self.constant(words, 4))
            return [b.sitofp(low, self.lanes), b.sitofp(high, self.lanes)]
        if not layout.scale:
            first = b.mul(index, self.word(layout.chunk))
            places = [b.add(first, self.word(at)) for at in range(0, layout.chunk, LANES)]
            return [self.numbers(layout.codes, LANES, address, place) for place in places]
        first = b.add(address, b.mul(index, self.word(layout.chunk)))
        parts = [self.load(some, b.add(first, self.word(at))) for at in range(0, layout.chunk, LANES)]
        if layout.codes == "int8":
            return [b.sitofp(b.sext(part, words), self.lanes) for part in parts]
        return [self.from_fp8(part) for part in parts]

    def from_fp8(self, codes: Any) -> Any:
        """float8_e4m3fn by way of float16, which has 7 bits more of mantissa and an exponent that is 8 larger."""
        b, kind = self.b, self.vector(self.ir.IntType(16))
        bits = b.and_(b.shl(b.sext(codes, kind), self.constant(kind, 7)), self.constant(kind, 0xBFFF))
        largest = self.constant(codes.type, 127)
        nan = b.icmp_unsigned("==", b.and_(codes, largest), largest)
        bits = b.select(nan, self.constant(kind, 0x7E00), bits)
        return b.fpext(b.bitcast(bits, self.vector(self.ir.HalfType())), self.lanes)

    def scales(
        self, width: int, first: Any, scale: Any, offset: Any, super_scale: Any, super_offset: Any
    ) -> tuple[Any, Any]:
        """Scales and offsets (None: there are none) of some groups, or of one where there are super-scales."""
        b, layout = self.b, self.layout
        found = self.numbers(layout.scale, width, scale, first)
        added = self.numbers(layout.offset, width, offset, first) if layout.offset else None
        if layout.coarse:
            coarse = b.udiv(first, self.word(layout.coarse))
            found = b.fmul(found, self.numbers("float16", width, super_scale, coarse))
            added = None if added is None else b.fmul(added, self.numbers("float16", width, super_offset, coarse))
        if layout.shift:  # code * scale + this is exact until it is rounded, where the processor fuses the two
            added = b.fmul(found, self.constant(found.type, -float(layout.shift)))
        if layout.codes == "float8_e4m3fn":
            found = b.fmul(found, self.constant(found.type, 256.0))
        return found, added

    def numbers(self, dtype: str, width: int, base: Any, index: Any) -> Any:
        """Some numbers of an array, from the index-th on, as float32."""
        b, ir = self.b, self.ir
        address = b.add(base, b.mul(index, self.word(BYTES[dtype])))

        def load(kind: Any) -> Any:
            return self.load(ir.VectorType(kind, width), address)

        floats, words = ir.VectorType(self.float, width), ir.VectorType(ir.IntType(32), width)
        if dtype == "float16":
            return b.fpext(load(ir.HalfType()), floats)
        if dtype == "bfloat16":
            return b.bitcast(b.shl(b.zext(load(ir.IntType(16)), words), self.constant(words, 16)), floats)
        if dtype == "float32":
            return load(self.float)
        return (b.uitofp if dtype == "uint8" else b.sitofp)(load(self.byte), floats)

    def splat(self, number: Any) -> Any:
        kind, places = self.lanes, self.vector(self.ir.IntType(32))
        nothing = self.ir.Constant(kind, self.ir.Undefined)
        one = self.b.insert_element(nothing, number, self.ir.IntType(32)(0))
        return self.b.shuffle_vector(one, nothing, self.constant(places, 0))

    def total(self, lanes: Any) -> Any:
        """The sum of all lanes, halves added to halves."""
        b, ir, width = self.b, self.ir, LANES
        while width > 1:
            width //= 2
            places = [list(range(at, at + width)) for at in (0, width)]
            halves = [ir.Constant(ir.VectorType(ir.IntType(32), width), place) for place in places]
            lanes = b.fadd(*(b.shuffle_vector(lanes, lanes, half) for half in halves))
        return b.extract_element(lanes, ir.IntType(32)(0))
