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
from specjax_kernels.slices import Slice

warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)

LEAVES = 128  # of one kernel, at most: its arguments are three pointers each, and CUDA takes 4 KB of them


def copy_rows(
    sources: Sequence[Array | Slice],
    start: Array | None,
    to: Array | None,
    targets: Sequence[Array] | int,
    *,
    parts: int = 1,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """`targets` with row ``start[i]`` of each source in row ``to[i]``, unless that lies outside the target.

    Args:
        sources: [X, ...] arrays, or slices [X, K, E] of [X, K, Q, E], K at most `parts`.
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
    sources: Sequence[Array | Slice],
    rows: dict[str, Array | None],
    targets: Sequence[Array] | int,
    parts: int,
    interpret: bool,
) -> list[Array]:
    def flat(leaf: Array) -> Array:
        return leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:]))

    given = {name: index for name, index in rows.items() if index is not None}
    slices = tuple(source.index if isinstance(source, Slice) else None for source in sources)
    arrays = [source.whole if isinstance(source, Slice) else flat(source) for source in sources]
    # Without the first axis, and for a slice without the fourth.
    shapes = [(one.shape[1], *one.shape[3:]) if at is not None else source.shape[1:]
              for one, at, source in zip(arrays, slices, sources, strict=True)]  # fmt: skip
    pools = [] if isinstance(targets, int) else [*map(flat, targets)]
    height = targets if isinstance(targets, int) else pools[0].shape[0]
    count = next((index.shape[0] for index in given.values()), arrays[0].shape[0])
    widest = max(math.prod(shape) * one.dtype.itemsize for shape, one in zip(shapes, arrays, strict=True)) // parts
    copied = pl.pallas_call(
        functools.partial(_kernel, given=tuple(given), slices=slices, parts=parts),
        grid=(count, parts),
        out_shape=[
            jax.ShapeDtypeStruct((height, math.prod(shape)), one.dtype)
            for shape, one in zip(shapes, arrays, strict=True)
        ],
        # After the indices and the sources come the pools.
        input_output_aliases={len(given) + len(arrays) + i: i for i in range(len(pools))},
        compiler_params=plgpu.CompilerParams(num_warps=max(1, min(4, widest // 512)), num_stages=1),
        interpret=interpret,
        name="copy_rows",
    )(*given.values(), *arrays, *pools)
    return [leaf.reshape(height, *shape) for leaf, shape in zip(copied, shapes, strict=True)]


def _kernel(*refs: Any, given: tuple[str, ...], slices: tuple[int | None, ...], parts: int) -> None:
    """One program: a part of one row of each leaf; of a slice, a head."""
    row, part = pl.program_id(0), pl.program_id(1)
    index = {name: plgpu.load(ref.at[row]) for name, ref in zip(given, refs, strict=False)}
    start, to = index.get("start", row), index.get("to", row)
    sources, targets = refs[len(given) :][: len(slices)], refs[-len(slices) :]
    for source, target, at in zip(sources, targets, slices, strict=True):
        if at is None:
            width = source.shape[1]
            chunk = power_of_two(pl.cdiv(width, parts))
            column = part * chunk + jnp.arange(chunk, dtype=jnp.int32)
            inside, place = column < width, (start, column)
        else:
            heads, _, width = source.shape[1:]
            channel = jnp.arange(power_of_two(width), dtype=jnp.int32)
            column = part * width + channel
            inside, place = (channel < width) & (part < heads), (start, part, at, channel)
        there = inside & (to >= 0) & (to < target.shape[0])
        plgpu.store(target.at[to, column], plgpu.load(source.at[place], mask=inside, other=0), mask=there)
