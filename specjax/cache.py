"""The paged key/value cache: a donated pytree of pages that hold committed tokens only.

A forward *reads* pages and returns its block's keys and values; `commit` alone writes them, after verification has
said which tokens survive. So a rejected token never touches a page, there is nothing to roll back or compact, and a
page shared by several requests cannot be dirtied. Knows nothing of trees, drafts or requests.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from specjax.config import HeadConfig, ModelConfig
from specjax.types import PageTable, PerRequest


class PoolShape(NamedTuple):
    """The size of a pool. A drafter with a cache of its own gives it the same pages, so one page table serves both."""

    pages: int  # P
    page_size: int  # S


class PagedCache(NamedTuple):
    """Keys and values of committed tokens: separate leaves per layer, since indexing a stacked array copies it."""

    keys: tuple[Float[Array, "P S K E"], ...]
    values: tuple[Float[Array, "P S K E"], ...]

    @property
    def page_size(self) -> int:
        return self.keys[0].shape[1]

    @property
    def pages(self) -> int:
        return self.keys[0].shape[0]


class BlockKV(NamedTuple):
    """Keys and values of the block that a forward read, not committed yet. One leaf per layer."""

    keys: tuple[Float[Array, "B N K E"], ...]
    values: tuple[Float[Array, "B N K E"], ...]


def init_cache(config: ModelConfig | HeadConfig, pool: PoolShape, *, layers: int | None = None) -> PagedCache:
    """An empty pool of `pool.pages` pages for `layers` layers (default: all of the model's), in the model's dtype.

    Zeros, not uninitialised memory: a masked slot has weight 0, and 0 times a NaN is NaN.
    """
    shape = (pool.pages, pool.page_size, config.num_kv_heads, config.head_dim)
    count = config.num_layers if layers is None else layers
    dtype = jnp.dtype(config.dtype)
    return PagedCache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in range(count)),
        values=tuple(jnp.zeros(shape, dtype) for _ in range(count)),
    )


def take_path(block: BlockKV, path: Int32[Array, "B J"]) -> BlockKV:
    """The block's rows at node indices `path`, in path order: [B, J, K, E] leaves."""
    if block.keys[0].shape[1] == path.shape[1] == 1:
        return block  # a path through one node; a gather would be a kernel a layer

    def take(leaf: Array) -> Array:
        return jnp.take_along_axis(leaf, path[:, :, None, None], axis=1)

    return BlockKV(tuple(map(take, block.keys)), tuple(map(take, block.values)))


def commit(
    cache: PagedCache, block: BlockKV, page_table: PageTable, start: PerRequest, length: PerRequest
) -> PagedCache:
    """Writes the first `length[b]` rows of request b's block at positions start[b], start[b] + 1, ...

    Args:
        block: rows in the order of their positions (see `take_path`), [B, J, K, E] leaves.
        page_table: request b's token t lives in page ``page_table[b, t // S]``, slot ``t % S``. A hole holds P.
        length: 0 writes nothing. **Must depend on what the forward computed** from this cache (a verdict, a drawn
            token): XLA:CPU copies the whole pool when a write might be scheduled before a read.

    Worked example: S = 4, start = 6, length = 3, table row [9, 2, 5]: the rows go to (page 2, slot 2), (2, 3), (5, 0).
    """
    size, count = cache.page_size, cache.pages
    batch, width = block.keys[0].shape[:2]
    offset = jnp.arange(width, dtype=jnp.int32)[None, :]
    position = start[:, None] + offset
    column = jnp.minimum(position // size, page_table.shape[1] - 1)
    page = jnp.take_along_axis(page_table, column, axis=1)
    write = (offset < length[:, None]) & (position < page_table.shape[1] * size) & (page < count)
    # A write that must not happen gets an index past the end, a distinct one each (-1 would wrap to the last page).
    nowhere = count + jnp.arange(batch * width, dtype=jnp.int32).reshape(batch, width)
    page, slot = jnp.where(write, page, nowhere), position % size

    def put(pages: Array, rows: Array) -> Array:
        return pages.at[page, slot].set(rows, mode="drop", unique_indices=True)

    return PagedCache(
        tuple(put(pages, rows) for pages, rows in zip(cache.keys, block.keys, strict=True)),
        tuple(put(pages, rows) for pages, rows in zip(cache.values, block.values, strict=True)),
    )
