"""Rows of a block on their way to the pages: `take_rows` of a path, `commit_all` to pages."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array


def take_rows(blocks: Sequence[Array], path: Array) -> tuple[Array, ...]:
    """Rows `path`, int32 [B, J], of [B, N, ...] leaves: [B, J, ...]."""
    return tuple(
        jnp.take_along_axis(leaf, path.reshape(*path.shape, *[1] * (leaf.ndim - 2)), axis=1) for leaf in blocks
    )


def commit_all(pools: Sequence[Array], blocks: Sequence[Array], page: Array, slot: Array) -> tuple[Array, ...]:
    """Page leaves with the rows of a block at slot `slot` of page `page`.

    Args:
        pools: [P, S, ...] leaves, updated where they lie if they are donated.
        blocks: [B, J, ...] leaves with the pools' other axes.
        page: int32 [B, J]; P or more: nothing is written. (page, slot) are distinct, also of what is not written.
        slot: int32 [B, J], 0 .. S-1.
    """
    return tuple(
        pool.at[page, slot].set(rows, mode="drop", unique_indices=True)
        for pool, rows in zip(pools, blocks, strict=True)
    )
