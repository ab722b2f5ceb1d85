"""Rows of a block on their way to the pages: `take_rows` of a path, `commit_all` to pages.

`specjax_kernels.choice` says whether each layer has operations of XLA's, or all layers one kernel. A leaf of a block is
an array or a `Slice` of one.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax_kernels import choice
from specjax_kernels.slices import Slice, arrays


def take_rows(blocks: Sequence[Array | Slice], path: Array) -> tuple[Array, ...]:
    """Rows `path`, int32 [B, J], of [B, N, ...] leaves: [B, J, ...]."""
    blocks = tuple(blocks)
    if not choice.pages_in_one_kernel() or not _fit(blocks):
        return _taken(blocks, path)
    return jax.lax.platform_dependent(
        blocks, path, cpu=functools.partial(_take, interpret=True), cuda=_take, default=_taken
    )


def _taken(blocks: tuple[Array | Slice, ...], path: Array) -> tuple[Array, ...]:
    """The definition of `take_rows`."""
    return tuple(
        jnp.take_along_axis(leaf, path.reshape(*path.shape, *[1] * (leaf.ndim - 2)), axis=1) for leaf in arrays(blocks)
    )


def _take(blocks: tuple[Array | Slice, ...], path: Array, *, interpret: bool = False) -> tuple[Array, ...]:
    B, N = blocks[0].shape[:2]
    start = path + N * jnp.arange(B, dtype=jnp.int32)[:, None]
    taken = _kernel()(
        [*map(_rows, blocks)], start.reshape(-1), None, path.size, parts=_parts(blocks), interpret=interpret
    )
    return tuple(rows.reshape(*path.shape, *leaf.shape[2:]) for rows, leaf in zip(taken, blocks, strict=True))


def commit_all(pools: Sequence[Array], blocks: Sequence[Array | Slice], page: Array, slot: Array) -> tuple[Array, ...]:
    """Page leaves with the rows of a block at slot `slot` of page `page`.

    Args:
        pools: [P, S, ...] leaves, updated where they lie if they are donated.
        blocks: [B, J, ...] leaves with the pools' other axes.
        page: int32 [B, J]; P or more: nothing is written. (page, slot) are distinct, also of what is not written.
        slot: int32 [B, J], 0 .. S-1.
    """
    pools, blocks = tuple(pools), tuple(blocks)
    alike = all(pool.dtype == rows.dtype for pool, rows in zip(pools, blocks, strict=True))
    if not (choice.pages_in_one_kernel() and alike and _fit(pools)):
        return _committed(pools, blocks, page, slot)
    return jax.lax.platform_dependent(
        pools, blocks, page, slot, cpu=functools.partial(_commit, interpret=True), cuda=_commit, default=_committed
    )


def _committed(
    pools: tuple[Array, ...], blocks: tuple[Array | Slice, ...], page: Array, slot: Array
) -> tuple[Array, ...]:
    """The definition of `commit_all`."""
    return tuple(
        pool.at[page, slot].set(rows, mode="drop", unique_indices=True)
        for pool, rows in zip(pools, arrays(blocks), strict=True)
    )


def _commit(
    pools: tuple[Array, ...], blocks: tuple[Array | Slice, ...], page: Array, slot: Array, *, interpret: bool = False
) -> tuple[Array, ...]:
    P, S = pools[0].shape[:2]
    to = jnp.where((page >= 0) & (page < P), page * S + slot, P * S)
    rows, targets = [*map(_rows, blocks)], [*map(_rows, pools)]
    written = _kernel()(rows, None, to.reshape(-1), targets, parts=_parts(pools), interpret=interpret)
    return tuple(leaf.reshape(pool.shape) for leaf, pool in zip(written, pools, strict=True))


def _kernel() -> Any:
    # Imported here: a process without a GPU starts sooner.
    return importlib.import_module("specjax_kernels.pallas_pages").copy_rows


def _rows(leaf: Array | Slice) -> Any:
    """[X, Y, ...] as [X * Y, ...]; of a slice, the whole."""
    if isinstance(leaf, Slice):
        return Slice(_rows(leaf.whole), leaf.index)
    return leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])


def _parts(leaves: Sequence[Array | Slice]) -> int:
    """Programs of a row: the most heads that a leaf [., ., K, E] has."""
    return max(leaf.shape[2] if len(leaf.shape) > 3 else 1 for leaf in leaves)


def _fit(leaves: Sequence[Array | Slice]) -> bool:
    """Whether indices within the leaves fit 32 bits, and there is something to copy."""
    wholes = jax.tree.leaves(leaves)
    return bool(wholes) and all(0 < math.prod(leaf.shape) < 2**31 for leaf in wholes)
