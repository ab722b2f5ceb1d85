"""Which implementation multiplies a shape of few rows the fastest, and with which blocks: XLA's, or `few_rows`.

What is timed is `linear` as a decoder's layers call it, with the norm before it and the activation or sum after it,
over as many matrices as no cache holds. The start of the search is XLA's, which has a score of 1. Results are compared
with the definition in float32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax_kernels import choice, launch
from specjax_kernels.chains import CACHES, rotating
from specjax_kernels.choice import Name, ProductBlocks
from specjax_kernels.linear import linear_by
from specjax_kernels.norm import Norm
from specjax_kernels.search import Say, neighbours, print_now, tell
from specjax_kernels.timing import interleaved

PRODUCT_CHOICES: dict[str, tuple[int, ...]] = {
    "columns": (16, 32, 64, 128),
    "depth": (16, 32, 64, 128, 256),
    "warps": (2, 4, 8),
    "stages": (1, 2, 3, 4, 5, 6),
}

RELATIVE = {"float32": 2e-5, "bfloat16": 1e-2, "float16": 2e-3}
"""Bounds on |out - definition| / |definition|, as norms. TF32 would give 3e-4 and is caught."""

MATRICES = 8  # in one program


class Shape(NamedTuple):
    """A product of few rows. It has an entry of its own in the table, whatever goes before and after it."""

    dtype: str
    weight: tuple[int, ...]  # [M, W], or [M, 2, W]: a gate and what it multiplies
    rows: int
    norm: bool = False  # an RMS norm before it
    residual: bool = False  # a sum with the residual stream after it

    @property
    def key(self) -> str:
        return choice.key(self.dtype, self.weight, self.rows)

    @property
    def flops(self) -> int:
        return 2 * self.rows * math.prod(self.weight)

    @property
    def bytes(self) -> int:
        """Read and written: the matrix, the input and the output, and a residual."""
        width = self.weight[-1] * (1 + self.residual)
        return (math.prod(self.weight) + self.rows * (self.weight[0] + width)) * jnp.dtype(self.dtype).itemsize


def around(shape: Shape, candidate: ProductBlocks | Name) -> Iterator[ProductBlocks]:
    """Candidates after another one: of XLA's a few beginnings, of blocks those with one field changed."""
    if isinstance(candidate, ProductBlocks):
        yield from neighbours(candidate, PRODUCT_CHOICES)
        return
    first = choice.rule_of_thumb(shape.dtype, shape.weight, shape.rows, launch.generation())
    yield first
    for columns in (first.columns // 2, first.columns * 2):
        if columns in PRODUCT_CHOICES["columns"]:
            yield replace(first, columns=columns)


class ProductBench:
    """A shape on the device.

    Attributes:
        start_seconds: of one product by XLA, when a candidate was last timed.
    """

    def __init__(
        self,
        shape: Shape,
        matrices: Sequence[Array],
        *,
        runs: int = 5,
        seconds: float = 0.02,
        jit: Callable[..., Any] = jax.jit,
        say: Say = print_now,
    ) -> None:
        """`matrices`: of the shape, a model's own; copies are added until no cache holds them. `jit`: with the options
        of a compiler that runs the products one after another."""
        self.shape, self._runs, self._seconds, self._jit, self._say = shape, runs, seconds, jit, say
        self.start_seconds: float | None = None
        least = 1 if jax.default_backend() == "cpu" else -(-CACHES // matrices[0].nbytes)
        given = [matrix.reshape(shape.weight) for matrix in matrices]
        given += [matrix + 0 for matrix in itertools.islice(itertools.cycle(given), max(0, least - len(given)))]
        count = min(MATRICES, len(given))
        rng = np.random.default_rng(0)

        def normal(*sizes: int) -> Array:
            return jnp.asarray(rng.standard_normal(sizes, np.float32), shape.dtype)

        depth, width = shape.weight[0], shape.weight[-1]
        norm = normal(depth) if shape.norm else None
        # Each product has an input of its own: XLA merges those that share one.
        inputs = [(normal(1, shape.rows, depth), normal(1, shape.rows, width)) for _ in range(count)]
        groups = [given[i : i + count] for i in range(0, len(given) - count + 1, count)]
        self._inputs = [(inputs, norm, group) for group in groups]
        self._expected = self._definition(inputs[0], norm, groups[0][0])
        self._start: Callable[[], Any] | None = None

    def _apply(self, candidate: ProductBlocks | Name, pair: Any, norm: Array | None, matrix: Array) -> Array:
        x, residual = pair
        scale = None if norm is None else Norm(norm, 1e-5)
        gated = jax.nn.silu if len(self.shape.weight) == 3 else None
        blocks = candidate if isinstance(candidate, ProductBlocks) else None
        return linear_by(blocks, x, matrix, norm=scale, gated=gated, residual=residual if self.shape.residual else None)

    def _definition(self, pair: Any, norm: Array | None, matrix: Array) -> np.ndarray:
        def wide(leaf: Array) -> Array:
            return jnp.asarray(leaf, jnp.float32)

        norm = None if norm is None else wide(norm)
        with jax.default_matmul_precision("highest"):
            return np.asarray(self._apply("xla", tuple(map(wide, pair)), norm, wide(matrix)))

    def call(self, candidate: ProductBlocks | Name) -> Callable[[], Any] | None:
        """All products with this candidate; None: it does not run, or is wrong."""

        @self._jit
        def run(inputs: Any, norm: Any, matrices: Any) -> Any:
            return [self._apply(candidate, pair, norm, matrix) for pair, matrix in zip(inputs, matrices, strict=True)]

        try:
            out = np.asarray(run(*self._inputs[0])[0].astype(jnp.float32))
            wrong = float(np.linalg.norm(out - self._expected) / max(np.linalg.norm(self._expected), 1e-30))
            if not wrong <= RELATIVE[self.shape.dtype]:
                self._say(f"    {self.shape.key}: {candidate} is wrong by {wrong:.2e}")
                return None
            return rotating(run, self._inputs)
        except Exception as error:  # compilers and drivers raise whatever they like
            tell(self._say, f"    {self.shape.key}: {candidate} does not run", error)
            return None

    def score(self, candidate: ProductBlocks | Name) -> float:
        """The time over that of XLA's product, both measured now, taking turns; infinite: it cannot be used. Raises
        RuntimeError if XLA's does not run or is wrong."""
        self._start = self._start or self.call("xla")
        if self._start is None:
            raise RuntimeError(f"{self.shape.key}: there is nothing to measure against")
        if (call := self.call(candidate)) is None:
            return math.inf
        calls = {"start": self._start, "candidate": call}
        try:
            found = interleaved(calls, runs=self._runs, region_seconds=self._seconds)
        except Exception as error:
            tell(self._say, f"    {self.shape.key}: {candidate} cannot be timed", error)
            return math.inf
        start, taken = (float(np.median([one.total for one in found[name]])) for name in calls)
        self.start_seconds = start / len(self._inputs[0][0])
        return taken / start
