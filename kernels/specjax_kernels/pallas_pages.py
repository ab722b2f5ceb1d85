"""Copies of rows between a block and the pages, of all layers in one kernel, for NVIDIA GPUs, in Pallas.

XLA has a scatter for each page leaf, two in a layer. Here one program copies one part of one row, in every leaf:

    grid (rows, parts)      parts: key/value heads, so that a program copies whole heads of a few hundred bytes
    leaf l:  target[l][to[row], part] = source[l][start[row], part]         nothing where `to` is outside the target

Pallas's Triton backend is deprecated (jax 0.11), see `pallas_triton.py`. On a CPU Pallas interprets the kernel, for
tests.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax_kernels.launch import power_of_two

warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)

LEAVES = 128  # of one kernel, at most: its arguments are three pointers each, and CUDA takes 4 KB of them


def copy_rows(
    sources: Sequence[Array],
    start: Array | None,
    to: Array | None,
    targets: Sequence[Array] | int,
    *,
    parts: int = 1,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """`targets` with row ``start[i]`` of each source in row ``to[i]``, unless that lies outside the target.

    Args:
        sources: [X, ...] arrays.
        start: int32 [I], each in 0 .. X-1; None: i.
        to: int32 [I], distinct where they count; None: i.
        targets: [Y, ...] arrays of the sources' other axes and dtypes, updated where they lie if they are donated; or
            I, for new arrays of so many rows, which need ``to=None``.
        parts: programs of a row.
    """
    copied: list[Array] = []
    for first in range(0, len(sources), LEAVES):
        some = slice(first, first + LEAVES)
        own = targets if isinstance(targets, int) else targets[some]
        copied += _call(sources[some], {"start": start, "to": to}, own, parts, interpret)
    return tuple(copied)


def _call(
    sources: Sequence[Array], rows: dict[str, Array | None], targets: Sequence[Array] | int, parts: int, interpret: bool
) -> list[Array]:
    def flat(leaf: Array) -> Array:
        return leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:]))

    given = {name: index for name, index in rows.items() if index is not None}
    shapes = [source.shape[1:] for source in sources]
    sources = [*map(flat, sources)]
    pools = [] if isinstance(targets, int) else [*map(flat, targets)]
    height = targets if isinstance(targets, int) else pools[0].shape[0]
    count = next((index.shape[0] for index in given.values()), sources[0].shape[0])
    widest = max(source.shape[1] * source.dtype.itemsize for source in sources) // parts
    copied = pl.pallas_call(
        functools.partial(_kernel, given=tuple(given), count=len(sources), parts=parts),
        grid=(count, parts),
        out_shape=[jax.ShapeDtypeStruct((height, source.shape[1]), source.dtype) for source in sources],
        # After the indices and the sources come the pools.
        input_output_aliases={len(given) + len(sources) + i: i for i in range(len(pools))},
        compiler_params=plgpu.CompilerParams(num_warps=max(1, min(4, widest // 512)), num_stages=1),
        interpret=interpret,
        name="copy_rows",
    )(*given.values(), *sources, *pools)
    return [leaf.reshape(height, *shape) for leaf, shape in zip(copied, shapes, strict=True)]


def _kernel(*refs: Any, given: tuple[str, ...], count: int, parts: int) -> None:
    """One program: a part of one row of each leaf."""
    row, part = pl.program_id(0), pl.program_id(1)
    index = {name: plgpu.load(ref.at[row]) for name, ref in zip(given, refs, strict=False)}
    start, to = index.get("start", row), index.get("to", row)
    for source, target in zip(refs[len(given) :][:count], refs[-count:], strict=True):
        width = source.shape[1]
        chunk = power_of_two(pl.cdiv(width, parts))
        column = part * chunk + jnp.arange(chunk, dtype=jnp.int32)
        inside = column < width
        there = inside & (to >= 0) & (to < target.shape[0])
        plgpu.store(target.at[to, column], plgpu.load(source.at[start, column], mask=inside, other=0), mask=there)
