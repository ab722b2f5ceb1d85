"""The products of a few float32 rows and two rows of stored codes, written in LLVM's vectors for `quantised_rows`.

LLVM maps the vectors to any processor's. Left to itself it adds up each group of codes to one number first, which takes
longer than all the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from specjax_kernels.cpu.vectors import LANES, Vectors

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


def emit(layout: Layout, together: int, b: Any, values: Any) -> None:
    """The products of `count` rows of x, out of 1 to `together`, and two rows of codes."""
    count, *values = values
    for rows in range(1, together + 1):
        with b.if_then(b.icmp_signed("==", count, count.type(rows))):
            Dots(layout, rows, b).emit(*values)


def emit_widened(layout: Layout, b: Any, values: Any) -> None:
    """The weights of one row of codes as float32."""
    Dots(layout, 1, b).widened(*values)


class Dots(Vectors):
    """Emits the products of a fixed number of rows of x and two rows of codes, with an LLVM builder."""

    def __init__(self, layout: Layout, rows: int, b: Any) -> None:
        super().__init__(b)
        self.layout, self.rows = layout, rows
        # A group's sum is short; other sums wait less for one another in two vectors.
        self.chains = 1 if layout.scale and layout.whole else LANES // self.width

    def emit(
        self, first: Any, second: Any, codes: Any, scale: Any, offset: Any, super_scale: Any, super_offset: Any, x: Any,
        memory: Any, out: Any, depth: Any, columns: Any, groups: Any, shared: Any,
    ) -> None:  # fmt: skip
        """For two rows of codes, of `columns`. `memory`: sums of the groups of x; `shared`: rows of codes that share
        their scales."""
        b, layout, word = self.b, self.layout, self.word
        indices, row_bytes = (first, second), self.row_bytes(depth)
        matrix = [b.add(codes, b.mul(index, row_bytes)) for index in indices]
        xs = [b.add(x, b.mul(b.mul(depth, word(4)), word(row))) for row in range(self.rows)]
        sums = [[[self.variable(self.zeros()) for _ in range(self.chains)] for _ in xs] for _ in indices]

        def chunk(index: Any) -> None:
            """Adds the products of the index-th chunk to the sums."""
            at = b.mul(index, word(4 * layout.chunk))
            for part, *of_rows in zip(self.parts(), *(self.codes(row, index) for row in matrix), strict=True):
                for row, address in enumerate(xs):
                    number = self.load(self.lanes, b.add(address, b.add(at, word(4 * self.width * part))))
                    for found, of_row in zip(of_rows, sums, strict=True):
                        place = of_row[row][part % self.chains]
                        b.store(self.fused(found, number, b.load(place)), place)

        totals = [[chains[0] for chains in of_row] for of_row in sums]
        added = None
        if layout.scale:
            scales = [b.mul(b.udiv(index, shared), groups) for index in indices]  # the number of each row's first group
            totals = [[self.variable(self.zeros()) for _ in xs] for _ in indices]
            if layout.has_offset:
                added = [[self.variable(self.zeros(LANES)) for _ in xs] for _ in indices]
            of_groups = [b.add(memory, b.mul(b.add(groups, word(LANES)), word(4 * row))) for row in range(self.rows)]
            self.each_group(
                chunk, sums, totals, added, scales, of_groups, depth, groups, scale, offset, super_scale, super_offset
            )
        else:
            with self.control.for_range(b, b.udiv(depth, word(layout.chunk)), intp=word) as loop:
                chunk(loop.index)
            for of_row in sums:
                for chains in of_row:
                    b.store(self.joined(chains), chains[0])
        for i, index in enumerate(indices):
            for row, place in enumerate(totals[i]):
                total = b.load(place)
                if added is not None:
                    total = b.fadd(total, self.folded(b.load(added[i][row]), self.width))
                total = b.extract_element(self.folded(total, 1), self.ir.IntType(32)(0))
                at = b.add(b.mul(columns, word(row)), index)
                b.store(total, b.inttoptr(b.add(out, b.mul(at, word(4))), self.float.as_pointer()))

    def each_group(
        self, chunk: Any, sums: Any, totals: Any, added: Any, scales: list[Any], of_groups: list[Any], depth: Any,
        groups: Any, *numbers: Any,
    ) -> None:  # fmt: skip
        """Adds the products of all groups of two rows of codes to `totals`, and those of offsets and sums of x
        (`of_groups`: their addresses) to `added`. `scales`: numbers of the rows' first groups."""
        b, layout, word = self.b, self.layout, self.word
        rooms = [self.rooms() for _ in scales]
        with self.blocks(groups) as (begin, count, skipped):
            for base, room in zip(scales, rooms, strict=True):
                self.widen(b.add(base, begin), count, skipped, room, groups, *numbers)
            if added is not None:
                self.add_offsets(added, rooms, of_groups, begin, count, skipped)
            with self.control.for_range(b, count, intp=word) as inside:
                index, place = b.add(begin, inside.index), b.add(skipped, inside.index)
                for variable in (chain for of_row in sums for chains in of_row for chain in chains):
                    b.store(self.zeros(), variable)
                if layout.whole:
                    chunk(index)
                else:
                    chunks = b.udiv(b.udiv(depth, word(layout.chunk)), groups)
                    with self.control.for_range(b, chunks, intp=word) as inner:
                        chunk(b.add(b.mul(index, chunks), inner.index))
                for (room, _), of_row, of_total in zip(rooms, sums, totals, strict=True):
                    scale = self.splat(b.load(b.gep(room, [place])))
                    for chains, total in zip(of_row, of_total, strict=True):
                        b.store(self.fused(self.joined(chains), scale, b.load(total)), total)

    def widened(
        self, index: Any, codes: Any, scale: Any, offset: Any, super_scale: Any, super_offset: Any, out: Any,
        depth: Any, groups: Any, shared: Any,
    ) -> None:  # fmt: skip
        """For the index-th row of codes: its weights at the address `out`."""
        b, layout, word = self.b, self.layout, self.word
        row = b.add(codes, b.mul(index, self.row_bytes(depth)))

        def chunk(index: Any, scale: Any = None, offset: Any = None) -> None:
            at = b.mul(index, word(4 * layout.chunk))
            for part, weights in zip(self.parts(), self.codes(row, index), strict=True):
                if layout.shift:  # (code - shift) * scale, rounded once
                    weights = self.fused(weights, scale, offset)
                elif scale is not None:
                    weights = b.fmul(weights, scale)
                    weights = weights if offset is None else b.fadd(weights, offset)
                address = b.add(out, b.add(at, word(4 * self.width * part)))
                self.store(weights, address)

        if not layout.scale:
            with self.control.for_range(b, b.udiv(depth, word(layout.chunk)), intp=word) as loop:
                chunk(loop.index)
            return
        room, numbers = self.rooms(), (scale, offset, super_scale, super_offset)
        base, of_group = b.mul(b.udiv(index, shared), groups), b.udiv(b.udiv(depth, word(layout.chunk)), groups)
        with self.blocks(groups) as (begin, count, skipped):
            self.widen(b.add(base, begin), count, skipped, room, groups, *numbers)
            with self.control.for_range(b, count, intp=word) as inside:
                place = b.add(skipped, inside.index)
                factor, added = (None if at is None else self.splat(b.load(b.gep(at, [place]))) for at in room)
                with self.control.for_range(b, of_group, intp=word) as inner:
                    chunk(b.add(b.mul(b.add(begin, inside.index), of_group), inner.index), factor, added)

    def row_bytes(self, depth: Any) -> Any:
        """Bytes of a row of codes."""
        if self.layout.codes == "uint8":
            return self.b.udiv(depth, self.word(2))
        return self.b.mul(depth, self.word(BYTES[self.layout.codes]))

    @contextlib.contextmanager
    def blocks(self, groups: Any) -> Iterator[tuple[Any, Any, Any]]:
        """A loop over a row's groups, `LANES` at a time: the number of the first, how many, and `skipped` of these."""
        b, word = self.b, self.word
        blocks = b.udiv(b.add(groups, word(LANES - 1)), word(LANES))
        with self.control.for_range(b, blocks, intp=word) as block:
            begin = b.mul(block.index, word(LANES))
            left = b.sub(groups, begin)
            count = b.select(b.icmp_unsigned("<", left, word(LANES)), left, word(LANES))
            yield begin, count, self.skipped(count, groups)

    def add_offsets(self, added: Any, rooms: Any, of_groups: Any, begin: Any, count: Any, skipped: Any) -> None:
        """Adds offset * sum of x for `count` groups from `begin` on, whose offsets lie behind the skipped ones."""
        b, word, kind = self.b, self.word, self.ir.VectorType(self.float, LANES)
        places = self.ir.VectorType(self.ir.IntType(32), LANES)
        lane = self.ir.Constant(places, list(range(LANES)))
        start, end = (self.splat(b.trunc(at, places.element), LANES) for at in (skipped, b.add(skipped, count)))
        there = b.and_(b.icmp_unsigned(">=", lane, start), b.icmp_unsigned("<", lane, end))
        at = b.mul(b.sub(begin, skipped), word(4))
        for row, address in enumerate(of_groups):
            sums = self.load(kind, b.add(address, at))
            for (_, room), of_row in zip(rooms, added, strict=True):
                before = b.load(of_row[row])
                offsets = b.load(b.bitcast(room, kind.as_pointer()), align=4)
                b.store(b.select(there, self.fused(offsets, sums, before), before), of_row[row])

    def rooms(self) -> tuple[Any, Any]:
        """Memory for the scales and offsets (None: there are none) of `LANES` groups as float32."""
        scale, offset = (self.control.alloca_once(self.b, self.float, self.word(LANES)) for _ in range(2))
        return scale, offset if self.layout.has_offset else None

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

    def parts(self) -> list[int]:
        """Which vectors of a chunk are read one after another: those of 4 bits share their bytes."""
        count = self.layout.chunk // self.width
        if self.layout.codes != "uint8":
            return list(range(count))
        return [part + half for part in range(count // 2) for half in (0, count // 2)]

    def codes(self, address: Any, index: Any) -> Iterator[Any]:
        """Codes of the index-th chunk of a row as vectors of float32, by `parts`; those of fp8 are divided by 256."""
        b, layout, width = self.b, self.layout, self.width
        some, words = self.vector(self.byte), self.vector(self.ir.IntType(32))
        if not layout.scale:
            first = b.mul(index, self.word(layout.chunk))
            for at in range(0, layout.chunk, width):
                yield self.numbers(layout.codes, width, address, b.add(first, self.word(at)))
            return
        step = layout.chunk // 2 if layout.codes == "uint8" else layout.chunk
        for at in range(0, step, width):
            found = self.load(some, b.add(address, b.add(b.mul(index, self.word(step)), self.word(at))))
            if layout.codes == "uint8":
                both = b.zext(found, words)
                yield self.low(both)
                yield self.low(b.lshr(both, self.constant(words, 4)))
            elif layout.codes == "int8":
                yield b.sitofp(b.sext(found, words), self.lanes)
            else:
                yield self.from_fp8(found)

    def low(self, words: Any) -> Any:
        """The low 4 bits of each word as float32."""
        b = self.b
        if self.width < LANES:
            return b.sitofp(b.and_(words, self.constant(words.type, 15)), self.lanes)
        # A permutation takes 16 numbers out of one vector, by these bits.
        every = self.ir.Constant(self.lanes, [float(code) for code in range(LANES)])
        return b.call(self.function("llvm.x86.avx512.permvar.sf.512", self.lanes, words.type), [every, words])

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

    def joined(self, chains: list[Any]) -> Any:
        first, *others = map(self.b.load, chains)
        for other in others:
            first = self.b.fadd(first, other)
        return first
