"""Products of float32 rows and a quantised matrix on a CPU, in little more than the time of reading its codes.

Two kernels: for up to `MOST_ROWS` rows of x, codes become float32 weights in registers, once for several rows. Codes of
4 bits have sixteen values in a group: with AVX-512 these fill a register, and a permutation looks them up. For more
rows, a panel of the matrix at a time is widened into the cache and multiplied with all rows. (Dequantising the whole
matrix to memory takes longer than the products of some hundred rows.)

The order of a row's sums does not depend on the number of rows, so its result has the bits of the row alone. Last rows
of x that are all zeros, such as padding, take no time. The inner loops are written in LLVM's vectors, because LLVM
would first add up each group of codes to one number, which is slow.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32

from specjax_kernels.cpu.runtime import Tools, callable_here, register
from specjax_kernels.cpu.vectors import LANES, Vectors, lanes
from specjax_kernels.quantised import Quantised

MOST_ROWS = 16  # more rows take less time in panels
TOGETHER = 8  # rows of x that share a weight, at most
TILE = 512  # rows of codes in one tile, at most
TILES = 2
"""Tiles of a matrix for each thread, at least. Of shorter tiles a greater part is read before its prefetches arrive."""

BLOCKS = {16: (14, 8), 8: (6, 3)}
"""Lanes of the processor -> rows of x that are multiplied with a panel together: the most whose sums fit in registers
(32 of 16 lanes, or 16 of 8), and fewer for the rest. The last block may repeat rows of the block before it."""
PANEL_TILES = 32  # of a matrix, at most; a tile has whole panels
UNROLLED = 4  # inputs of one turn of the panels' inner loop; a multiple of it divides every layout's depth

E8M0 = "e8m0"
"""The scales of MXFP4, whose codes of 4 bits are these numbers."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
BYTES = {E8M0: 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4}  # of a number
LINE = 64  # bytes of a cache line
GROUPS = 64  # groups of a row of codes whose scales are widened together, at most
AHEAD = 64
"""Chunks of each row of codes that are prefetched ahead of the product. Hardware prefetchers stop at the end of a page
and fetch too few scales, which a row reads in short runs. 128 chunks are no faster, 32 are slower."""


class Layout(NamedTuple):
    """The formats that a kernel is compiled for."""

    codes: str  # dtype: uint8 (two codes of 4 bits in a byte), int8, float8_e4m3fn; or a float: codes are weights
    scale: str  # dtype; E8M0; "" if the codes are weights
    offset: str  # dtype; "" without offsets
    shift: int
    chunk: int  # codes that are read together, 16 or 32: a group or a part of one
    whole: bool  # a chunk is a group
    coarse: int  # groups of a super-scale; 0: scales have one level

    @staticmethod
    def of_weights(dtype: str) -> Layout:
        """A float matrix [W, M]; M is a multiple of `LANES`."""
        return Layout(dtype, "", "", 0, LANES, False, 0)

    @property
    def has_offset(self) -> bool:
        return bool(self.offset or self.shift)

    @property
    def name(self) -> str:
        scale, offset = self.scale or "none", self.offset or "none"
        parts = (self.codes, scale, offset, self.shift, self.chunk, int(self.whole), self.coarse)
        return "specjax_quantised_" + "_".join(map(str, parts))


def layout_of(leaf: Quantised) -> Layout | None:
    """The formats of the CPU kernel for a leaf; None: there is no kernel."""
    group = leaf.group
    chunk = next((chunk for chunk in (32, 16) if group % chunk == 0), 0)
    if not chunk or not math.prod(leaf.out):
        return None
    codes = str(leaf.codes.dtype)
    if leaf.scale is None:
        return Layout(codes, "", "", 0, chunk, False, 0)
    coarse = 0 if leaf.super_scale is None else leaf.scale.shape[-1] // leaf.super_scale.shape[-1]
    offset = "" if leaf.offset is None else str(leaf.offset.dtype)
    scale = E8M0 if leaf.is_mxfp4 else str(leaf.scale.dtype)
    return Layout(codes, scale, offset, leaf.shift, chunk, group == chunk, coarse)


def takes(rows: int, layout: Layout | None) -> bool:
    """True if `multiply` supports them. The first call loads the kernel or compiles it, which takes seconds."""
    return layout is not None and rows > 0 and callable_here() and unmet(rows, layout) is None


def unmet(rows: int, layout: Layout) -> str | None:
    """The reason why this process cannot call the kernel for this number of rows, or None."""
    return register(_name(rows, layout), partial(_few_rows if rows <= MOST_ROWS else _panels, layout=layout))


def _name(rows: int, layout: Layout) -> str:
    return layout.name if rows <= MOST_ROWS else f"{layout.name}_blocks"


def multiply(x: Float32[Array, "N M"], layout: Layout, codes: Array, *scales: Array) -> Float32[Array, "N W"]:
    """x times the transpose of the matrix [W, M] of these codes [W, ...]. `scales`: scales and, if the layout has them,
    offsets, super-scales and super-offsets, each [W / n, ...] for n rows of codes that share scales."""
    rows, columns = x.shape[0], codes.shape[0]
    shapes = [jax.ShapeDtypeStruct((rows, columns), jnp.float32)]
    if rows > MOST_ROWS:
        panel = 2 * lanes()
        tiles = -(-columns // (panels_of_tile(columns, panel) * panel))
        # A panel, widened rows of codes, the sums of an incomplete panel, and the number of filled rows.
        room = (panel + panel // 2) * x.shape[1] + BLOCKS[panel // 2][0] * panel + 1
        shapes.append(jax.ShapeDtypeStruct((tiles, room), jnp.float32))
    return jax.ffi.ffi_call(_name(rows, layout), shapes, vmap_method="sequential")(x, codes, *scales)[0]


def tile_rows(columns: int, threads: int) -> int:
    """Rows of codes in a tile."""
    tiles = TILES * threads
    return max(LANES, min(TILE, (columns + tiles * LANES - 1) // (tiles * LANES) * LANES))


def _few_rows(tools: Tools, layout: Layout) -> tuple[Any, Any]:
    """(x [N, M], codes, scales) -> [N, W]. A tile is some rows of codes."""
    argument, size, result = tools.argument, tools.argument_size, tools.result
    scales_of, rows_of_tile, threads = scales_reader(tools, layout), tools.inlined(tile_rows), tools.threads
    width = lanes()
    of_codes, filled, floats = tools.inlined(code_rows), filled_rows(tools), tools.floats
    dots = tools.emitted(14, partial(emit, layout))

    def tiles(call: int) -> int:
        columns = size(call, 1, 0)
        most = rows_of_tile(columns, threads())
        return (columns + most - 1) // most

    def tile(call: int, index: int) -> int:
        rows, depth, columns = size(call, 0, 0), size(call, 0, 1), size(call, 1, 0)
        most = rows_of_tile(columns, threads())
        start, end = index * most, min(index * most + most, columns)
        x, codes, out = argument(call, 0), argument(call, 1), result(call, 0)
        some = filled(x, rows, depth)
        for row in range(some, rows):
            target = floats(out + 4 * row * columns)
            for column in range(start, end):
                target[column] = 0
        for row in range(0, some, TOGETHER):
            count, at, to = min(TOGETHER, some - row), x + 4 * row * depth, out + 4 * row * columns
            for first in range(start, end, of_codes(count, width)):
                dots(count, first, end - 1, at, to, codes, columns, depth, *scales_of(call))
        return 0

    return tiles, tile


def scales_reader(tools: Tools, layout: Layout) -> Any:
    """Makes a function of a call with the arguments (x, codes, scales). Its results are the addresses of scales,
    offsets, super-scales and super-offsets (0: none), the groups of a row, and the rows of codes that share scales."""
    argument, size = tools.argument, tools.argument_size
    has_scale, has_offset, coarse = bool(layout.scale), bool(layout.offset), layout.coarse
    super_at = 4 if has_offset else 3

    @tools.inlined
    def scales_of(call: int) -> Any:
        scale = offset = super_scale = super_offset = 0
        groups = shared = 1
        if has_scale:
            scale, groups, shared = argument(call, 2), size(call, 2, 1), size(call, 1, 0) // size(call, 2, 0)
        if has_offset:
            offset = argument(call, 3)
        if coarse > 0:
            super_scale = argument(call, super_at)
            if has_offset:
                super_offset = argument(call, super_at + 1)
        return scale, offset, super_scale, super_offset, groups, shared

    return scales_of


def filled_rows(tools: Tools) -> Any:
    """Makes a function (x, rows, depth) -> number of rows without the last ones that are all zeros."""
    words, integers = tools.longs, tools.integers

    @tools.inlined
    def filled(x: int, rows: int, depth: int) -> int:
        while rows > 0:
            at = x + 4 * (rows - 1) * depth
            if integers(at)[0] & 0x7FFFFFFF != 0:  # nearly always
                return rows
            numbers, bits = words(at), 0
            for i in range(depth // 2):
                bits |= numbers[i]
            if bits & 0x7FFFFFFF7FFFFFFF != 0:  # -0.0 is zero
                return rows
            rows -= 1
        return rows

    return filled


def panels_of_tile(columns: int, panel: int) -> int:
    panels = (columns + panel - 1) // panel
    return (panels + PANEL_TILES - 1) // PANEL_TILES


def _panels(tools: Tools, layout: Layout) -> tuple[Any, Any]:
    """(x [N, M], codes, scales) -> [N, W] and memory for each tile. A tile is some panels."""
    argument, size, result, result_size = tools.argument, tools.argument_size, tools.result, tools.result_size
    width = lanes()
    panel, (most, few) = 2 * width, BLOCKS[width]
    scales_of, per_tile, floats = scales_reader(tools, layout), tools.inlined(panels_of_tile), tools.floats
    filled, integers = filled_rows(tools), tools.integers

    @tools.inlined
    def count_of(call: int) -> Any:
        """Where the number of filled rows is kept, which is counted once."""
        return integers(result(call, 1) + 4 * (result_size(call, 1, 1) - 1))

    widen = tools.emitted(10, partial(emit_widened, layout))
    turn, block = tools.emitted(3, _turn), tools.emitted(6, partial(_block, (most, few)))

    def tiles(call: int) -> int:
        columns = size(call, 1, 0)
        count_of(call)[0] = filled(argument(call, 0), size(call, 0, 0), size(call, 0, 1))
        rows_of_tile = per_tile(columns, panel) * panel
        return (columns + rows_of_tile - 1) // rows_of_tile

    def tile(call: int, index: int) -> int:
        rows, depth, columns = size(call, 0, 0), size(call, 0, 1), size(call, 1, 0)
        xs, codes, outs = argument(call, 0), argument(call, 1), result(call, 0)
        scales = scales_of(call)
        across = per_tile(columns, panel) * panel
        packed = result(call, 1) + 4 * index * result_size(call, 1, 1)
        wide = packed + 4 * panel * depth
        spare = wide + 4 * width * depth
        some = count_of(call)[0]
        for first in range(index * across, min(index * across + across, columns), panel):
            count = min(panel, columns - first)
            for half in range(0, panel, width):
                start = min(first + half, columns)
                end = min(first + half + width, columns)
                for n in range(start, end):
                    widen(n, wide + 4 * (n - start) * depth, codes, depth, *scales)
                turn(wide, packed + 4 * half, depth)
            for n in range(some, rows):
                target = floats(outs + 4 * (n * columns + first))
                for column in range(count):
                    target[column] = 0
            row = 0
            while row < some:
                these = most if some - row > few else few
                row = max(min(row, some - these), 0)  # a block of few rows may have rows of zeros
                x, out = xs + 4 * row * depth, outs + 4 * (row * columns + first)
                if count == panel:
                    block(these, x, packed, depth, out, columns)
                else:
                    block(these, x, packed, depth, spare, panel)
                    for n in range(these):
                        source, target = floats(spare + 4 * n * panel), floats(out + 4 * n * columns)
                        for column in range(count):
                            target[column] = source[column]
                row += these
        return 0

    return tiles, tile


def _turn(b: Any, values: Any) -> None:
    """Writes rows [lanes, depth] as columns of a panel [depth, 2 lanes], transposing squares in registers."""
    v = Vectors(b)
    rows, panel, depth = values
    word, width = v.word, v.width
    with v.control.for_range(b, b.udiv(depth, word(width)), intp=word) as loop:
        at = b.mul(loop.index, word(width))
        square = [
            v.load(v.lanes, b.add(rows, b.mul(word(4), b.add(at, b.mul(depth, word(row)))))) for row in range(width)
        ]
        step = 1
        while step < width:  # swaps the off-diagonal squares of `step` in squares of twice the size
            keep = [i + (i & step > 0) * (width - step) for i in range(width)]
            swap = [i + step if not i & step else i + width for i in range(width)]
            square = [
                v.shuffled(square[row], square[row + step], keep)
                if not row & step
                else v.shuffled(square[row - step], square[row], swap)
                for row in range(width)
            ]
            step *= 2
        for k, column in enumerate(square):
            place = b.add(panel, b.mul(word(8 * width), b.add(at, word(k))))
            v.store(column, place)


def _block(sizes: tuple[int, ...], b: Any, values: Any) -> None:
    """The products of `count` rows of x (one of `sizes`) and a panel, with sums in registers over all inputs."""
    count, x, panel, depth, out, apart = values
    for rows in sizes:
        with b.if_then(b.icmp_signed("==", count, count.type(rows))):
            v = Vectors(b)
            word, width = v.word, v.width
            xs = [b.add(x, b.mul(b.mul(depth, word(4)), word(row))) for row in range(rows)]
            sums = [[v.variable(v.zeros()) for _ in range(2)] for _ in xs]
            with v.control.for_range(b, b.udiv(depth, word(UNROLLED)), intp=word) as loop:
                for k in range(UNROLLED):
                    at = b.add(b.mul(loop.index, word(UNROLLED)), word(k))
                    line = b.add(panel, b.mul(at, word(8 * width)))
                    weights = [v.load(v.lanes, b.add(line, word(4 * width * half))) for half in range(2)]
                    for address, of_row in zip(xs, sums, strict=True):
                        place = b.add(address, b.mul(at, word(4)))
                        number = v.splat(b.load(b.inttoptr(place, v.float.as_pointer()), align=4))
                        for weight, total in zip(weights, of_row, strict=True):
                            b.store(v.fused(number, weight, b.load(total)), total)
            for row, of_row in enumerate(sums):
                for half, total in enumerate(of_row):
                    place = b.add(out, b.mul(word(4), b.add(b.mul(apart, word(row)), word(width * half))))
                    v.store(b.load(total), place)


def code_rows(rows: int, width: int) -> int:
    """Rows of codes that are multiplied with `rows` rows of x together, with vectors of `width` lanes. Their sums fill
    the registers, because the latency of additions limits fewer sums: 32 of 16 lanes with AVX-512, 16 of 8 with AVX2,
    where 8 rows at once take 0.8 of the time of 3, 3 and 2."""
    if width == LANES:
        return 4 if rows <= 4 else 2
    return 4 if rows <= 2 else 2 if rows <= 5 else 1


def emit(layout: Layout, b: Any, values: Any) -> None:
    """Emits the products of `count` (1 to `TOGETHER`) rows of x and `code_rows` rows of codes."""
    count, *values = values
    for rows in range(1, TOGETHER + 1):
        with b.if_then(b.icmp_signed("==", count, count.type(rows))):
            Dots(layout, b).emit(rows, *values)


def emit_widened(layout: Layout, b: Any, values: Any) -> None:
    """Emits the weights of one row of codes as float32."""
    Dots(layout, b).widened(*values)


class Dots(Vectors):
    """Emits the products of rows of x and of codes, with an LLVM builder."""

    def __init__(self, layout: Layout, b: Any) -> None:
        super().__init__(b)
        self.layout = layout

    def emit(
        self, count: int, first: Any, last: Any, x: Any, out: Any, codes: Any, columns: Any, depth: Any, *scales: Any
    ) -> None:
        """The products of `count` rows of x and rows of codes, from the `first` and at most to the `last` of `columns`.
        `scales`: see `each_chunk`."""
        b, word = self.b, self.word
        indices = [first]
        for _ in range(code_rows(count, self.width) - 1):
            index = b.add(indices[-1], word(1))
            indices.append(b.select(b.icmp_unsigned("<", index, last), index, last))
        xs = [b.add(x, b.mul(b.mul(depth, word(4)), word(row))) for row in range(count)]
        sums = [[self.variable(self.zeros()) for _ in indices] for _ in xs]
        with self.each_chunk(indices, codes, depth, *scales) as (chunk, weights):
            at = b.mul(chunk, word(4 * self.layout.chunk))
            for part, *of_rows in zip(self.parts(), *weights, strict=True):
                for address, of_row in zip(xs, sums, strict=True):
                    number = self.load(self.lanes, b.add(address, b.add(at, word(4 * self.width * part))))
                    for weight, total in zip(of_rows, of_row, strict=True):
                        b.store(self.fused(weight, number, b.load(total)), total)
        places = [
            b.add(out, b.mul(word(4), b.add(b.mul(columns, word(row)), index)))
            for row in range(count)
            for index in indices
        ]
        self.store_totals([b.load(place) for of_row in sums for place in of_row], places)

    def store_totals(self, vectors: list[Any], places: list[Any]) -> None:
        """Stores the sum of each vector at its place."""
        b, number = self.b, self.ir.IntType(32)
        for at in range(0, len(vectors), self.width):
            some, here = vectors[at : at + self.width], places[at : at + self.width]
            totals = self.totals(some + some[-1:] * (self.width - len(some)))
            for i, place in enumerate(here):
                self.store(b.extract_element(totals, number(i)), place)

    def widened(self, index: Any, out: Any, codes: Any, depth: Any, *scales: Any) -> None:
        """Writes the weights of the index-th row of codes to the address `out`."""
        b, word = self.b, self.word
        with self.each_chunk([index], codes, depth, *scales) as (chunk, (weights,)):
            at = b.mul(chunk, word(4 * self.layout.chunk))
            for part, vector in zip(self.parts(), weights, strict=True):
                self.store(vector, b.add(out, b.add(at, word(4 * self.width * part))))

    @contextlib.contextmanager
    def each_chunk(
        self, indices: list[Any], codes: Any, depth: Any, scale: Any, offset: Any, super_scale: Any, super_offset: Any,
        groups: Any, shared: Any,
    ) -> Iterator[tuple[Any, list[Iterator[Any]]]]:  # fmt: skip
        """A loop over the chunks of rows of codes. Yields the chunk's number and the weights of each row as vectors of
        float32, in the order of `parts`. `shared`: the number of rows of codes that share scales."""
        b, layout, word = self.b, self.layout, self.word
        matrix = [b.add(codes, b.mul(index, self.row_bytes(depth))) for index in indices]
        if not layout.scale:
            with self.control.for_range(b, b.udiv(depth, word(layout.chunk)), intp=word) as loop:
                self.fetch_codes(matrix[0], loop.index, len(matrix))
                yield loop.index, [self.codes(row, loop.index) for row in matrix]
            return
        rooms, numbers = [self.rooms() for _ in indices], (scale, offset, super_scale, super_offset)
        bases = [b.mul(b.udiv(index, shared), groups) for index in indices]  # the number of each row's first group
        of_group = word(1) if layout.whole else b.udiv(b.udiv(depth, word(layout.chunk)), groups)
        with self.blocks(groups) as (begin, count):
            for base, room in zip(bases, rooms, strict=True):
                self.widen(b.add(base, begin), count, room, *numbers)
            self.fetch_scales(b.add(bases[0], begin), count, of_group, len(indices), scale, offset)
            with self.control.for_range(b, count, intp=word) as inside:
                group, place = b.add(begin, inside.index), self.place(inside.index, count)
                weights = [self.weights(*(at and b.load(b.gep(at, [place])) for at in room)) for room in rooms]
                with self.control.for_range(b, of_group, intp=word) as inner:
                    chunk = b.add(b.mul(group, of_group), inner.index)
                    self.fetch_codes(matrix[0], chunk, len(matrix))
                    yield chunk, [self.codes(row, chunk, of_row) for row, of_row in zip(matrix, weights, strict=True)]

    def chunk_bytes(self) -> int:
        """The bytes of a chunk's codes."""
        return self.layout.chunk // 2 if self.layout.codes == "uint8" else self.layout.chunk * BYTES[self.layout.codes]

    def fetch_codes(self, address: Any, chunk: Any, rows: int) -> None:
        """Prefetches codes for a chunk of `rows` consecutive rows that begin at `address`. The rows are one run of
        memory: each chunk prefetches an equal part of it, in order."""
        b, word = self.b, self.word
        size = self.chunk_bytes() * rows
        ahead = b.add(address, b.mul(b.add(chunk, word(AHEAD)), word(size)))
        for line in range(0, max(size, LINE), LINE):
            self.prefetch(b.add(ahead, word(line)))

    def fetch_scales(self, first: Any, count: Any, of_group: Any, rows: int, *arrays: Any) -> None:
        """Prefetches scales and offsets for `count` groups of each row."""
        b, word = self.b, self.word
        ahead = b.add(first, b.mul(b.add(b.udiv(word(AHEAD), of_group), word(1)), word(rows)))
        for array, dtype in zip(arrays, (self.layout.scale, self.layout.offset), strict=True):
            if not dtype:
                continue
            address = b.add(array, b.mul(ahead, word(BYTES[dtype])))
            size = b.mul(count, word(BYTES[dtype] * rows))
            with self.control.for_range(b, b.udiv(b.add(size, word(LINE - 1)), word(LINE)), intp=word) as line:
                self.prefetch(b.add(address, b.mul(line.index, word(LINE))))

    def weights(self, scale: Any, offset: Any) -> Callable[[Any], Any]:
        """A function from the codes of a group, as `codes` reads them, to their weights."""
        b, layout = self.b, self.layout
        factor, added = self.splat(scale), None if offset is None else self.splat(offset)

        def scaled(numbers: Any) -> Any:
            if layout.shift:  # (code - shift) * scale, rounded once
                return self.fused(numbers, factor, added)
            numbers = b.fmul(numbers, factor)
            return numbers if added is None else b.fadd(numbers, added)

        if layout.codes != "uint8":
            return scaled
        if self.width < LANES:
            number = self.e2m1 if layout.scale == E8M0 else self.low_bits
            return lambda words: scaled(number(words))
        # A permutation looks up the group's sixteen weights by the low 4 bits of each word.
        codes = E2M1 if layout.scale == E8M0 else map(float, range(LANES))
        every = scaled(self.ir.Constant(self.lanes, [*codes]))

        def look_up(words: Any) -> Any:
            return b.call(self.function("llvm.x86.avx512.permvar.sf.512", self.lanes, words.type), [every, words])

        return look_up

    def low_bits(self, words: Any) -> Any:
        return self.b.sitofp(self.b.and_(words, self.constant(words.type, 15)), self.lanes)

    def e2m1(self, words: Any) -> Any:
        """Numbers of `E2M1` by the low 4 bits of words: twice a size n is the largest of n, 2 n - 4 and 4 n - 16."""
        b, low = self.b, self.b.and_(words, self.constant(words.type, 7))
        size = low
        for factor, less in ((2, 4), (4, 16)):
            other = b.sub(b.mul(low, self.constant(words.type, factor)), self.constant(words.type, less))
            size = b.select(b.icmp_signed(">", other, size), other, size)
        negative = b.icmp_signed("!=", b.and_(words, self.constant(words.type, 8)), self.constant(words.type, 0))
        return b.fmul(b.sitofp(b.select(negative, b.neg(size), size), self.lanes), self.constant(self.lanes, 0.5))

    def row_bytes(self, depth: Any) -> Any:
        """Bytes of a row of codes."""
        if self.layout.codes == "uint8":
            return self.b.udiv(depth, self.word(2))
        return self.b.mul(depth, self.word(BYTES[self.layout.codes]))

    @contextlib.contextmanager
    def blocks(self, groups: Any) -> Iterator[tuple[Any, Any]]:
        """A loop over the groups of a row in blocks of at most `GROUPS`, whose sizes differ by one at most. Yields the
        first group of a block, and its size: at least `LANES` in a row of `LANES` groups or more."""
        b, word = self.b, self.word
        blocks = b.udiv(b.add(groups, word(GROUPS - 1)), word(GROUPS))
        with self.control.for_range(b, blocks, intp=word) as block:
            begin, end = (b.udiv(b.mul(groups, at), blocks) for at in (block.index, b.add(block.index, word(1))))
            yield begin, b.sub(end, begin)

    def rooms(self) -> tuple[Any, Any]:
        """Memory for the scales and offsets (None: no offsets) of `GROUPS` groups as float32."""
        scale, offset = (self.control.alloca_once(self.b, self.float, self.word(GROUPS)) for _ in range(2))
        scale.align = offset.align = 4 * LANES  # stores across two cache lines are not forwarded to loads
        return scale, offset if self.layout.has_offset else None

    def place(self, group: Any, count: Any) -> Any:
        """The index where `widen` writes the numbers of a group, out of `count` groups."""
        b, word = self.b, self.word
        if self.layout.coarse:
            return group
        whole, moved = b.and_(count, word(-LANES)), b.and_(b.neg(count), word(LANES - 1))
        alone = b.icmp_unsigned("<", count, word(LANES))
        return b.select(b.or_(alone, b.icmp_unsigned("<", group, whole)), group, b.add(group, moved))

    def widen(self, first: Any, count: Any, room: tuple[Any, Any], *numbers: Any) -> None:
        """Writes the scales and offsets of `count` groups as float32, in vectors. The last vector repeats groups to
        read nothing beyond the row: for 18 groups, 0 to 15 and 2 to 17. See `place`."""
        b, word = self.b, self.word

        def write(group: Any, place: Any, width: int) -> None:
            for memory, values in zip(room, self.scales(width, b.add(first, group), *numbers), strict=True):
                if memory is not None:
                    b.store(values, b.bitcast(b.gep(memory, [place]), values.type.as_pointer()), align=4 * width)

        def one_by_one() -> None:
            with self.control.for_range(b, count, intp=word) as group:
                write(group.index, group.index, 1)

        if self.layout.coarse:
            one_by_one()
            return
        with b.if_else(b.icmp_unsigned(">=", count, word(LANES))) as (whole, few):
            with whole:
                last = b.sub(count, word(LANES))
                vectors = b.udiv(b.add(count, word(LANES - 1)), word(LANES))
                with self.control.for_range(b, vectors, intp=word) as loop:
                    place = b.mul(loop.index, word(LANES))
                    write(b.select(b.icmp_unsigned("<", place, last), place, last), place, LANES)
            with few:
                one_by_one()

    def parts(self) -> list[int]:
        """The order in which the vectors of a chunk are read: two vectors of 4 bits share their bytes."""
        count = self.layout.chunk // self.width
        if self.layout.codes != "uint8":
            return list(range(count))
        return [part + half for part in range(count // 2) for half in (0, count // 2)]

    def codes(self, address: Any, index: Any, weights: Callable[[Any], Any] | None = None) -> Iterator[Any]:
        """The index-th chunk of a row as vectors of float32, in the order of `parts`. `weights`: the function of its
        group, which receives fp8 codes divided by 256."""
        b, layout, width = self.b, self.layout, self.width
        some, words = self.vector(self.byte), self.vector(self.ir.IntType(32))
        if weights is None:
            first = b.mul(index, self.word(layout.chunk))
            for at in range(0, layout.chunk, width):
                yield self.numbers(layout.codes, width, address, b.add(first, self.word(at)))
            return
        step = layout.chunk // 2 if layout.codes == "uint8" else layout.chunk
        for at in range(0, step, width):
            loaded = self.load(some, b.add(address, b.add(b.mul(index, self.word(step)), self.word(at))))
            if layout.codes == "uint8":
                both = b.zext(loaded, words)
                yield weights(both)
                yield weights(b.lshr(both, self.constant(words, 4)))
            elif layout.codes == "int8":
                yield weights(b.sitofp(b.sext(loaded, words), self.lanes))
            else:
                yield weights(self.from_fp8(loaded))

    def from_fp8(self, codes: Any) -> Any:
        """float8_e4m3fn as float32, divided by 256, through float16: 7 more bits of mantissa, a bias larger by 8."""
        b, kind = self.b, self.vector(self.ir.IntType(16))
        bits = b.and_(b.shl(b.sext(codes, kind), self.constant(kind, 7)), self.constant(kind, 0xBFFF))
        largest = self.constant(codes.type, 127)
        nan = b.icmp_unsigned("==", b.and_(codes, largest), largest)
        bits = b.select(nan, self.constant(kind, 0x7E00), bits)
        return b.fpext(b.bitcast(bits, self.vector(self.ir.HalfType())), self.lanes)

    def scales(
        self, width: int, first: Any, scale: Any, offset: Any, super_scale: Any, super_offset: Any
    ) -> tuple[Any, Any]:
        """Scales and offsets (None: no offsets) of `width` groups; of one group if there are super-scales."""
        b, layout = self.b, self.layout
        factor = self.numbers(layout.scale, width, scale, first)
        added = self.numbers(layout.offset, width, offset, first) if layout.offset else None
        if layout.coarse:
            coarse = b.udiv(first, self.word(layout.coarse))
            factor = b.fmul(factor, self.numbers("float16", width, super_scale, coarse))
            added = None if added is None else b.fmul(added, self.numbers("float16", width, super_offset, coarse))
        if layout.shift:  # the processor rounds code * scale + this once
            added = b.fmul(factor, self.constant(factor.type, -float(layout.shift)))
        if layout.codes == "float8_e4m3fn":
            factor = b.fmul(factor, self.constant(factor.type, 256.0))
        return factor, added

    def numbers(self, dtype: str, width: int, base: Any, index: Any) -> Any:
        """`width` numbers of an array, from the index-th, as float32."""
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
        if dtype == E8M0:
            return b.bitcast(b.shl(b.zext(load(self.byte), words), self.constant(words, 23)), floats)
        return (b.uitofp if dtype == "uint8" else b.sitofp)(load(self.byte), floats)
