"""The paged cache: a donated tree of pages that hold what the layers keep of committed tokens.

A cache is any pytree of *page leaves* [P, S, ...]: P pages of S tokens, and of each token an array of any shape and
dtype, such as a key, a latent or a scale. A *block* is a pytree of the same structure with [B, N, ...] leaves: N new
tokens of each of B requests. Which leaves there are is the model's business (`PageSpec`); everything here is a
`jax.tree.map`.

A forward reads pages and returns its block. `commit` alone writes pages, after verification, so a rejected token
never touches a page and there is nothing to roll back. Knows nothing of trees, drafts or requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import specjax_kernels as kernels
from jax import Array
from jaxtyping import Int32
from specjax_kernels import mesh

from specjax.types import PageTable, PerRequest

Cache: TypeAlias = Any  # a pytree of page leaves [P, S, ...]
# A pytree of the cache's structure with leaves [B, N, ...]: what layers keep of new tokens.
Block: TypeAlias = Any


class PoolShape(NamedTuple):
    """The size of a pool. A drafter with a cache of its own gives it the same pages, so one page table serves both.

    Attributes:
        pages: P, number of pages.
        page_size: S, tokens in a page.
    """

    pages: int
    page_size: int


@dataclass(frozen=True)
class PageSpec:
    """One array that a layer keeps of each token. A pytree of these describes a cache.

    Attributes:
        shape: of one token's array; the page leaf has [P, S, *shape].
        dtype: a name that numpy knows, or bfloat16.
        axes: logical axes of `shape`, which a mesh may split; None: never split.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]

    @property
    def page_axes(self) -> tuple[str | None, ...]:
        """Logical axes of the page leaf: pages and slots are never split."""
        return (None, None, *self.axes)


def init_cache(specs: Any, pool: PoolShape) -> Cache:
    """An empty pool of P pages: a zeroed leaf [P, S, *shape] for each `PageSpec` of the pytree `specs`, split over the
    mesh that `jax.set_mesh` has set, if there is one.

    Zeros, not uninitialised memory: a masked slot has weight 0, and 0 times a NaN is NaN.
    """

    def empty(spec: PageSpec) -> Array:
        shape = (*pool, *spec.shape)
        return jnp.zeros(shape, jnp.dtype(spec.dtype), device=mesh.sharding(spec.page_axes, shape))

    return jax.tree.map(empty, specs)


def pool_shape(cache: Cache) -> PoolShape:
    """The pool's size, which all leaves share."""
    return PoolShape(*jax.tree.leaves(cache)[0].shape[:2])


def bytes_per_token(init: Callable[[PoolShape], Any], page_size: int = 1) -> int:
    """Bytes of one token in the tree that ``init(pool)`` allocates: its growth by a page, divided by the page size."""

    def size(pages: int) -> int:
        leaves = jax.tree.leaves(jax.eval_shape(lambda: init(PoolShape(pages, page_size))))
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    return (size(2) - size(1)) // page_size


def take_path(block: Block, path: Int32[Array, "B J"]) -> Block:
    """The block's rows at node indices `path`, in path order: [B, J, ...] leaves."""

    leaves, tree = jax.tree.flatten(block)
    if all(leaf.shape[1] == path.shape[1] == 1 for leaf in leaves):
        return block  # a path through one node; a gather would be a kernel a layer
    return jax.tree.unflatten(tree, kernels.take_rows(leaves, path))


def commit(
    cache: Cache, block: Block, page_table: PageTable, start: PerRequest, length: PerRequest, *, after: Any
) -> Cache:
    """Writes the first `length[b]` rows of request b's block at positions start[b], start[b] + 1, ...

    Args:
        cache: [P, S, ...] leaves.
        block: rows in the order of their positions (see `take_path`), [B, J, ...] leaves.
        page_table: request b's token t lives in page ``page_table[b, t // S]``, slot ``t % S``. A hole holds P.
        length: 0 writes nothing.
        after: arrays with a leading B, computed from everything that reads `cache`, such as a forward's output; their
            values do not matter. The writes depend on them, or XLA:CPU copies the whole pool.

    Worked example: S = 4, start = 6, length = 3, table row [9, 2, 5]: the rows go to (page 2, slot 2), (2, 3), (5, 0).
    """
    count, size = pool_shape(cache)
    batch, width = jax.tree.leaves(block)[0].shape[:2]
    offset = jnp.arange(width, dtype=jnp.int32)[None, :]
    position = start[:, None] + offset
    column = jnp.minimum(position // size, page_table.shape[1] - 1)
    page = jnp.take_along_axis(page_table, column, axis=1)
    write = (offset < length[:, None]) & (position < page_table.shape[1] * size) & (page < count)
    for leaf in jax.tree.leaves(after):
        # Pages are never negative, which no compiler knows, so the write depends on `after`. XLA:CPU ignores an
        # `optimization_barrier` here. One number a request is read, and fused into the index computation.
        write &= (page >= 0) | ~leaf.reshape(batch, -1)[:, :1].astype(bool)
    # A write that must not happen gets an index past the end, a distinct one each (-1 would wrap to the last page).
    nowhere = count + jnp.arange(batch * width, dtype=jnp.int32).reshape(batch, width)
    page, slot = jnp.where(write, page, nowhere), position % size

    pools, tree = jax.tree.flatten(cache)
    rows = jax.tree.leaves(block)
    return jax.tree.unflatten(tree, kernels.commit_all(pools, rows, page, slot))
