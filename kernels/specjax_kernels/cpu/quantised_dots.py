"""The products of a few float32 rows and some rows of stored codes, written in LLVM's vectors for `quantised_rows`.

LLVM maps the vectors to any processor's. Left to itself it adds up each group of codes to one number first, which takes
longer than all the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from specjax_kernels.cpu.vectors import LANES, Vectors

BYTES = {"uint8": 1, "int8": 1, "float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4}  # of a number
LINE = 64  # bytes of a cache line
GROUPS = 64  # groups of a row of codes whose scales are widened together, at most
AHEAD = 64
"""Chunks of each row of codes that are prefetched ahead of the product. Hardware prefetchers stop at the end of a page
and fetch too little of the scales, which a row reads in short runs. 128 chunks are no faster, 32 are slower."""


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
    def has_offset(self) -> bool:
        return bool(self.offset or self.shift)

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


def code_rows(rows: int, width: int) -> int:
    """Rows of codes whose products with so many rows of x are taken together, with vectors of `width` lanes: as many as
    there are registers for, since sums in few registers wait for one another."""
    return 4 if 4 * rows <= width else 2


def emit(layout: Layout, together: int, b: Any, values: Any) -> None:
    """The products of `count` rows of x, out of 1 to `together`, and `code_rows` of the codes."""
    count, *values = values
    for rows in range(1, together + 1):
        with b.if_then(b.icmp_signed("==", count, count.type(rows))):
            Dots(layout, b).emit(rows, *values)


def emit_widened(layout: Layout, b: Any, values: Any) -> None:
    """The weights of one row of codes as float32."""
    Dots(layout, b).widened(*values)


class Dots(Vectors):
    """Emits the products of rows of x and of codes, with an LLVM builder."""

    def __init__(self, layout: Layout, b: Any) -> None:
        super().__init__(b)
        self.layout = layout

    def emit(
        self, count: int, first: Any, last: Any, x: Any, out: Any, codes: Any, columns: Any, depth: Any, *scales: Any
    ) -> None:
        """For `count` rows of x and the rows of codes from the `first` on, at most to the `last`, of `columns`.
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
                    for found, place in zip(of_rows, of_row, strict=True):
                        b.store(self.fused(found, number, b.load(place)), place)
        places = [
            b.add(out, b.mul(word(4), b.add(b.mul(columns, word(row)), index)))
            for row in range(count)
            for index in indices
        ]
        self.store_totals([b.load(place) for of_row in sums for place in of_row], places)

    def store_totals(self, vectors: list[Any], places: list[Any]) -> None:
        """The sum of each of some vectors at its place, all taken in the same order."""
        b, number = self.b, self.ir.IntType(32)
        for at in range(0, len(vectors), self.width):
            some, here = vectors[at : at + self.width], places[at : at + self.width]
            totals = self.totals(some + some[-1:] * (self.width - len(some)))
            for i, place in enumerate(here):
                self.store(b.extract_element(totals, number(i)), place)

    def widened(self, index: Any, out: Any, codes: Any, depth: Any, *scales: Any) -> None:
        """For the index-th row of codes: its weights at the address `out`."""
        b, word = self.b, self.word
        with self.each_chunk([index], codes, depth, *scales) as (chunk, (weights,)):
            at = b.mul(chunk, word(4 * self.layout.chunk))
            for part, found in zip(self.parts(), weights, strict=True):
                self.store(found, b.add(out, b.add(at, word(4 * self.width * part))))

    @contextlib.contextmanager
    def each_chunk(
        self, indices: list[Any], codes: Any, depth: Any, scale: Any, offset: Any, super_scale: Any, super_offset: Any,
        groups: Any, shared: Any,
    ) -> Iterator[tuple[Any, list[Iterator[Any]]]]:  # fmt: skip
        """A loop over the chunks of some rows of codes: the chunk's number, and its weights in each of the rows as
        vectors of float32, by `parts`. `shared`: rows of codes that share their scales."""
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
                    yield chunk, [self.codes(row, chunk, each) for row, each in zip(matrix, weights, strict=True)]

    def chunk_bytes(self) -> int:
        """Bytes of a chunk's codes."""
        return self.layout.chunk // 2 if self.layout.codes == "uint8" else self.layout.chunk * BYTES[self.layout.codes]

    def fetch_codes(self, address: Any, chunk: Any, rows: int) -> None:
        """Prefetches codes for later, once per chunk of `rows` consecutive rows of codes, the first of which is at
        `address`. The rows are one run of memory: each chunk prefetches an equal part of it, in order."""
        b, word = self.b, self.word
        size = self.chunk_bytes() * rows
        ahead = b.add(address, b.mul(b.add(chunk, word(AHEAD)), word(size)))
        for line in range(0, max(size, LINE), LINE):
            self.prefetch(b.add(ahead, word(line)))

    def fetch_scales(self, first: Any, count: Any, of_group: Any, rows: int, *arrays: Any) -> None:
        """Prefetches scales and offsets for later, once per `count` groups of each row, as `fetch_codes` does."""
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
        """For a group: a function from what `codes` reads of some codes to their weights."""
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
            return lambda words: scaled(b.sitofp(b.and_(words, self.constant(words.type, 15)), self.lanes))
        # The group's sixteen weights: a permutation takes numbers out of one vector, by the low 4 bits of each word.
        every = scaled(self.ir.Constant(self.lanes, [float(code) for code in range(LANES)]))

        def found(words: Any) -> Any:
            return b.call(self.function("llvm.x86.avx512.permvar.sf.512", self.lanes, words.type), [every, words])

        return found

    def row_bytes(self, depth: Any) -> Any:
        """Bytes of a row of codes."""
        if self.layout.codes == "uint8":
            return self.b.udiv(depth, self.word(2))
        return self.b.mul(depth, self.word(BYTES[self.layout.codes]))

    @contextlib.contextmanager
    def blocks(self, groups: Any) -> Iterator[tuple[Any, Any]]:
        """A loop over the groups of a row in blocks of at most `GROUPS`, whose sizes differ by one at most: the number
        of the first group, and the size. Blocks of a row of at least `LANES` groups have as many, too."""
        b, word = self.b, self.word
        blocks = b.udiv(b.add(groups, word(GROUPS - 1)), word(GROUPS))
        with self.control.for_range(b, blocks, intp=word) as block:
            begin, end = (b.udiv(b.mul(groups, at), blocks) for at in (block.index, b.add(block.index, word(1))))
            yield begin, b.sub(end, begin)

    def rooms(self) -> tuple[Any, Any]:
        """Memory for the scales and offsets (None: there are none) of `GROUPS` groups as float32."""
        scale, offset = (self.control.alloca_once(self.b, self.float, self.word(GROUPS)) for _ in range(2))
        scale.align = offset.align = 4 * LANES  # stores across two cache lines are not forwarded to loads
        return scale, offset if self.layout.has_offset else None

    def place(self, group: Any, count: Any) -> Any:
        """Where `widen` writes the numbers of a group, out of `count` groups."""
        b, word = self.b, self.word
        if self.layout.coarse:
            return group
        whole, moved = b.and_(count, word(-LANES)), b.and_(b.neg(count), word(LANES - 1))
        alone = b.icmp_unsigned("<", count, word(LANES))
        return b.select(b.or_(alone, b.icmp_unsigned("<", group, whole)), group, b.add(group, moved))

    def widen(self, first: Any, count: Any, room: tuple[Any, Any], *numbers: Any) -> None:
        """Writes the scales and offsets of `count` groups as float32, in vectors. The last vector holds the last
        `LANES` groups, some of them a second time, so that nothing beyond the row is read: of 18 groups, 0 to 15 and
        then 2 to 17. `place` finds them."""
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
        """Which vectors of a chunk are read one after another: those of 4 bits share their bytes."""
        count = self.layout.chunk // self.width
        if self.layout.codes != "uint8":
            return list(range(count))
        return [part + half for part in range(count // 2) for half in (0, count // 2)]

    def codes(self, address: Any, index: Any, weights: Callable[[Any], Any] | None = None) -> Iterator[Any]:
        """The index-th chunk of a row as vectors of float32, by `parts`. `weights`: those of its group's codes; of fp8
        the codes are divided by 256."""
        b, layout, width = self.b, self.layout, self.width
        some, words = self.vector(self.byte), self.vector(self.ir.IntType(32))
        if weights is None:
            first = b.mul(index, self.word(layout.chunk))
            for at in range(0, layout.chunk, width):
                yield self.numbers(layout.codes, width, address, b.add(first, self.word(at)))
            return
        step = layout.chunk // 2 if layout.codes == "uint8" else layout.chunk
        for at in range(0, step, width):
            found = self.load(some, b.add(address, b.add(b.mul(index, self.word(step)), self.word(at))))
            if layout.codes == "uint8":
                both = b.zext(found, words)
                yield weights(both)
                yield weights(b.lshr(both, self.constant(words, 4)))
            elif layout.codes == "int8":
                yield weights(b.sitofp(b.sext(found, words), self.lanes))
            else:
                yield weights(self.from_fp8(found))

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
