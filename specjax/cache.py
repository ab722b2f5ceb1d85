"""The paged cache of committed tokens: a donated pytree of page leaves.

A page leaf [P, S, ...] has P pages of S tokens, and one array per token of any shape and dtype, such as a key, a latent
or a scale. A *block* is a pytree of the same structure with leaves [B, N, ...]: N new tokens for each of B requests.
The model declares the leaves (`PageSpec`).

A forward reads pages and returns a block. Only `commit` writes pages, after verification, so a rejected token never
reaches a page and nothing is rolled back. This module depends on no tree, drafter or request.

Dimension letters have one meaning in annotations, einsums, comments and tests:

    R  rows of state (``max_running_requests``)      B  requests in the batch bucket
    N  block width: tree nodes, or new tokens per request in one forward
    C  block keys (C >= N)                           D  draft depth
    V  vocabulary     M  model width                 I  MLP width
    H  query heads    K  key/value heads             G  = H / K      E  head width
    L  layers         P  pages in the pool           S  tokens in a page
    T  pages a request may hold                      F  width of the features a drafter reads

A token is *committed* if its keys and values are in pages, and *emitted* if it is in the output. Emitted is always
committed + 1: the extra token is the *root*, at position ``prefix_length``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Float32, Int32
from specjax_kernels import mesh

Weights: TypeAlias = Mapping[str, Any]  # nested dicts of arrays, one leaf per layer and matrix
Tokens: TypeAlias = Int32[Array, "B N"]
Positions: TypeAlias = Int32[Array, "B N"]
PageTable: TypeAlias = Int32[Array, "B T"]
PerRequest: TypeAlias = Int32[Array, "B"]
Active: TypeAlias = Bool[Array, "B"]
Hidden: TypeAlias = Float[Array, "B N M"]
Logits: TypeAlias = Float32[Array, "B N V"]
Cache: TypeAlias = Any  # a pytree of page leaves [P, S, ...]
# A pytree with the cache's structure and leaves [B, N, ...]: cache entries of new tokens.
Block: TypeAlias = Any


class PoolShape(NamedTuple):
    """Size of a pool. A drafter's own cache has the same size, so that both share one page table.

    Attributes:
        pages: P, number of pages.
        page_size: S, tokens in a page.
    """

    pages: int
    page_size: int


@dataclass(frozen=True)
class PageSpec:
    """Declares one cache array per token. A pytree of `PageSpec`s describes a cache.

    Attributes:
        shape: shape of one token's array; the page leaf has [P, S, *shape].
        dtype: numpy's name of the dtype, or bfloat16.
        axes: logical axes of `shape`, which a mesh may split; None: not split.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]

    @property
    def page_axes(self) -> tuple[str | None, ...]:
        """Logical axes of the page leaf. The first two (pages, slots) are not split."""
        return (None, None, *self.axes)


def init_cache(specs: Any, pool: PoolShape) -> Cache:
    """Allocates an empty pool: a zeroed leaf [P, S, *shape] for each `PageSpec` in `specs`.

    Leaves are split over the mesh of `jax.set_mesh`, if one is set. Memory must be zeroed, because attention multiplies
    masked slots by 0, and 0 times NaN is NaN.
    """

    def empty(spec: PageSpec) -> Array:
        shape = (*pool, *spec.shape)
        return jnp.zeros(shape, jnp.dtype(spec.dtype), device=mesh.sharding(spec.page_axes, shape))

    return jax.tree.map(empty, specs)


def pool_shape(cache: Cache) -> PoolShape:
    """Size of the pool, equal for all leaves."""
    return PoolShape(*jax.tree.leaves(cache)[0].shape[:2])


def bytes_per_token(init: Callable[[PoolShape], Any], page_size: int = 1) -> int:
    """Bytes per token of the pytree that ``init(pool)`` allocates."""

    def size(pages: int) -> int:
        leaves = jax.tree.leaves(jax.eval_shape(lambda: init(PoolShape(pages, page_size))))
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    return (size(2) - size(1)) // page_size


def take_path(block: Block, path: Int32[Array, "B J"]) -> Block:
    """Gathers the block's entries at node indices `path`: leaves [B, J, ...]."""

    if all(leaf.shape[1] == path.shape[1] == 1 for leaf in jax.tree.leaves(block)):
        return block  # avoids one gather kernel per layer

    def take(leaf: Array) -> Array:
        return jnp.take_along_axis(leaf, path.reshape(*path.shape, *[1] * (leaf.ndim - 2)), axis=1)

    return jax.tree.map(take, block)


def commit(
    cache: Cache, block: Block, page_table: PageTable, start: PerRequest, length: PerRequest, *, after: Any
) -> Cache:
    """Writes the first ``length[b]`` entries of request b's block at positions start[b], start[b] + 1, ...

    Args:
        cache: leaves [P, S, ...].
        block: leaves [B, J, ...], in order of position (see `take_path`).
        page_table: int32 [B, T]. Token t of request b is in page ``page_table[b, t // S]``, slot ``t % S``; P marks a
            hole.
        start: int32 [B]. Position of the first entry.
        length: int32 [B]. Number of entries; 0 writes nothing.
        after: arrays with a leading B that depend on all reads of `cache`, such as a forward's output. Their values are
            not used. The writes depend on them; otherwise XLA:CPU copies the whole pool.

    Example:
        With S = 4, start = 6, length = 3 and table row [9, 2, 5], the entries go to (page 2, slot 2), (2, 3), (5, 0).
    """
    count, size = pool_shape(cache)
    batch, width = jax.tree.leaves(block)[0].shape[:2]
    offset = jnp.arange(width, dtype=jnp.int32)[None, :]
    position = start[:, None] + offset
    column = jnp.minimum(position // size, page_table.shape[1] - 1)
    page = jnp.take_along_axis(page_table, column, axis=1)
    write = (offset < length[:, None]) & (position < page_table.shape[1] * size) & (page < count)
    for leaf in jax.tree.leaves(after):
        # `page >= 0` is always true, but the compiler cannot prove it, so the write depends on `after`. XLA:CPU ignores
        # an `optimization_barrier` here. Only one number per request is read.
        write &= (page >= 0) | ~leaf.reshape(batch, -1)[:, :1].astype(bool)
    # Dropped writes get distinct indices past the end; -1 would write to the last page.
    nowhere = count + jnp.arange(batch * width, dtype=jnp.int32).reshape(batch, width)
    page, slot = jnp.where(write, page, nowhere), position % size

    pools, tree = jax.tree.flatten(cache)
    written = [
        pool.at[page, slot].set(rows, mode="drop", unique_indices=True)
        for pool, rows in zip(pools, jax.tree.leaves(block), strict=True)
    ]
    return jax.tree.unflatten(tree, written)
