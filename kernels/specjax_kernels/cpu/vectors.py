"""LLVM vectors for kernels. LLVM maps them to the vectors of any processor."""

from __future__ import annotations

import importlib
from typing import Any

from specjax_kernels.cpu import object_code

LANES = 16  # float32 numbers of an AVX-512 vector, or of two AVX2 vectors


def lanes() -> int:
    """Numbers in a vector of this processor."""
    return LANES if object_code.has("avx512f") else LANES // 2


class Vectors:
    """An LLVM builder with float32 vectors of this processor's width, loads from addresses, and variables."""

    def __init__(self, b: Any) -> None:
        self.b = b
        self.ir: Any = importlib.import_module("llvmlite.ir")
        self.control: Any = importlib.import_module("numba.core.cgutils")
        self.word, self.byte, self.float = self.ir.IntType(64), self.ir.IntType(8), self.ir.FloatType()
        self.width = lanes()
        self.lanes = self.vector(self.float)

    def vector(self, kind: Any) -> Any:
        return self.ir.VectorType(kind, self.width)

    def constant(self, kind: Any, number: Any) -> Any:
        return self.ir.Constant(kind, [number] * kind.count)

    def zeros(self) -> Any:
        return self.constant(self.lanes, 0.0)

    def variable(self, value: Any) -> Any:
        place = self.control.alloca_once(self.b, value.type)
        self.b.store(value, place)
        return place

    def load(self, kind: Any, address: Any) -> Any:
        return self.b.load(self.b.inttoptr(address, kind.as_pointer()), align=1)

    def store(self, value: Any, address: Any) -> None:
        """Stores a float or a vector of floats at an address of a float."""
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer()), align=4)

    def fused(self, factor: Any, other: Any, added: Any) -> Any:
        function = self.function(f"llvm.fmuladd.v{factor.type.count}f32", *[factor.type] * 3)
        return self.b.call(function, [factor, other, added])

    def function(self, name: str, *arguments: Any) -> Any:
        """An LLVM function whose result has the type of its first argument."""
        kind = self.ir.FunctionType(arguments[0], arguments)
        return self.control.get_or_insert_function(self.b.module, kind, name)

    def splat(self, number: Any) -> Any:
        kind, places = self.vector(number.type), self.vector(self.ir.IntType(32))
        nothing = self.ir.Constant(kind, self.ir.Undefined)
        first = self.b.insert_element(nothing, number, self.ir.IntType(32)(0))
        return self.b.shuffle_vector(first, nothing, self.constant(places, 0))

    def total(self, lanes: Any) -> Any:
        """The sum of a vector, by adding halves."""
        count = lanes.type.count
        while count > 1:
            count //= 2
            low, high = (self.shuffled(lanes, lanes, list(range(at, at + count))) for at in (0, count))
            lanes = self.b.fadd(low, high)
        return self.b.extract_element(lanes, self.ir.IntType(32)(0))

    def totals(self, vectors: list[Any]) -> Any:
        """The sums of `width` vectors as one vector; each is added in the order of `total`."""
        segment = self.width
        while len(vectors) > 1:
            segment //= 2
            first = [i + other for other in (0, self.width) for i in range(self.width) if not i & segment]
            second = [i + segment for i in first]
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [self.b.fadd(self.shuffled(*pair, first), self.shuffled(*pair, second)) for pair in pairs]
        return vectors[0]

    def shuffled(self, first: Any, second: Any, places: list[int]) -> Any:
        """The numbers at these places of two concatenated vectors."""
        kind = self.ir.VectorType(self.ir.IntType(32), len(places))
        return self.b.shuffle_vector(first, second, self.ir.Constant(kind, places))

    def prefetch(self, address: Any) -> None:
        """Prefetches the cache line at an address."""
        kind, pointer = self.ir.IntType(32), self.byte.as_pointer()
        function = self.ir.FunctionType(self.ir.VoidType(), [pointer, kind, kind, kind])
        prefetch = self.control.get_or_insert_function(self.b.module, function, "llvm.prefetch.p0")
        self.b.call(prefetch, [self.b.inttoptr(address, pointer), kind(0), kind(3), kind(1)])
