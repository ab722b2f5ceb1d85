"""The cache of committed tokens: a donated pytree of page leaves, and of row leaves for recurrent layers.

A page leaf [P, S, ...] has P pages of S tokens, and one array per token of any shape and dtype, such as a key, a latent
or a scale. A row leaf [R, ...] has one array per request: the state after its committed tokens (`RowState`). A *block*
describes N new tokens for each of B requests, leaves [B, N, ...]: what a page leaf stores of each token, and what
advances a row's state by each token. The model declares the leaves (`PageSpec`, `RowSpec`).

A forward reads the cache and returns a block. Only `commit` writes, after verification, so a rejected token never
reaches the cache and nothing is rolled back. This module depends on no tree, drafter or request.

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
from dataclasses import dataclass, replace
from functools import partial
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
Cache: TypeAlias = Any  # a pytree of page leaves [P, S, ...] and of `RowState`s
# A pytree with the cache's structure, except below a `RowState`, and leaves [B, N, ...]: cache entries of new tokens.
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


@dataclass(frozen=True)
class RowSpec:
    """Declares one cache array per request: a row leaf [R, *shape]. Attributes are those of `PageSpec`."""

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]


@partial(jax.tree_util.register_dataclass, data_fields=["leaves"], meta_fields=["advance", "entry_bytes"])
@dataclass(frozen=True)
class RowState:
    """The state of a recurrent layer after each request's committed tokens; a part of a cache.

    Attributes:
        leaves: pytree of row leaves [R, ...], or of their `RowSpec`s. Zeros are the state before the first token.
        advance: (leaves [B, ...], block, length int32 [B]) -> leaves after the first ``length`` tokens of the block,
            whose leaves [B, J, ...] are a path in order of position (see `take_path`). Other tokens have no effect.
        entry_bytes: bytes of a token in a block.
    """

    leaves: Any
    advance: Callable[..., Any]
    entry_bytes: int = 0


class RowMoves(NamedTuple):
    """Rows of B requests in row leaves; indices outside of a leaf are not written.

    Attributes:
        source: int32 [B]. The row whose state a forward reads.
        slots: int32 [B]. The row that `commit` writes.
        snapshot: int32 [B]. A second row that `commit` writes, with the state after ``snapshot_length`` tokens; None:
            none. Such a copy is the start of later requests with the same prefix.
        snapshot_length: int32 [B]. At most the number of committed tokens.
    """

    source: PerRequest
    slots: PerRequest
    snapshot: PerRequest | None = None
    snapshot_length: PerRequest | None = None


def is_row_state(node: Any) -> bool:
    return isinstance(node, RowState)


def row_states(cache: Any) -> list[RowState]:
    """The row states of a cache, or of its specs; a model that has some is recurrent."""
    return [node for node in jax.tree.leaves(cache, is_leaf=is_row_state) if is_row_state(node)]


def init_cache(specs: Any, pool: PoolShape, rows: int = 0) -> Cache:
    """Allocates an empty cache: a zeroed leaf [P, S, *shape] for each `PageSpec`, [rows, *shape] for each `RowSpec`.

    Leaves are split over the mesh of `jax.set_mesh`, if one is set. Memory must be zeroed, because attention multiplies
    masked slots by 0, and 0 times NaN is NaN.
    """

    def empty(spec: PageSpec | RowSpec) -> Array:
        first, axes = (pool, spec.page_axes) if isinstance(spec, PageSpec) else ((rows,), (None, *spec.axes))
        shape = (*first, *spec.shape)
        return jnp.zeros(shape, jnp.dtype(spec.dtype), device=mesh.sharding(axes, shape))

    return jax.tree.map(empty, specs)


def read_rows(cache: Cache, rows: RowMoves, start: PerRequest) -> Cache:
    """The cache as a forward of B requests reads it: row leaves [B, ...], zero where ``start`` [B] is 0."""

    def read(leaf: Array) -> Array:
        taken = leaf.at[rows.source].get(mode="clip")
        return jnp.where((start > 0).reshape(-1, *[1] * (leaf.ndim - 1)), taken, jnp.zeros_like(taken))

    def of(node: Any) -> Any:
        return jax.tree.map(read, node) if is_row_state(node) else node

    return jax.tree.map(of, cache, is_leaf=is_row_state)


def pool_shape(cache: Cache) -> PoolShape:
    """Size of the pool, equal for all page leaves."""
    leaves = (leaf for leaf in jax.tree.leaves(cache, is_leaf=is_row_state) if not is_row_state(leaf))
    return PoolShape(*next(leaves).shape[:2])


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
    cache: Cache, block: Block, page_table: PageTable, start: PerRequest, length: PerRequest, *, after: Any,
    rows: RowMoves | None = None,
) -> Cache:  # fmt: skip
    """Writes the first ``length[b]`` entries of request b's block at positions start[b], start[b] + 1, ...

    Row states advance by as many tokens.

    Args:
        cache: leaves [P, S, ...].
        block: leaves [B, J, ...], in order of position (see `take_path`).
        page_table: int32 [B, T]. Token t of request b is in page ``page_table[b, t // S]``, slot ``t % S``; P marks a
            hole.
        start: int32 [B]. Position of the first entry.
        length: int32 [B]. Number of entries; 0 writes nothing.
        after: arrays with a leading B that depend on all reads of `cache`, such as a forward's output. Their values are
            not used. The writes depend on them; otherwise XLA:CPU copies the whole pool.
        rows: where the requests' row states lie; needed if `cache` has some.

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
    always = jnp.ones((batch, 1), bool)
    for leaf in jax.tree.leaves(after):
        # `page >= 0` is always true, but the compiler cannot prove it, so the write depends on `after`. XLA:CPU ignores
        # an `optimization_barrier` here. Only one number per request is read.
        always &= (page[:, :1] >= 0) | ~leaf.reshape(batch, -1)[:, :1].astype(bool)
    write &= always
    # Dropped writes get distinct indices past the end; -1 would write to the last page.
    nowhere = count + jnp.arange(batch * width, dtype=jnp.int32).reshape(batch, width)
    page, slot = jnp.where(write, page, nowhere), position % size

    def written(node: Any, entries: Any) -> Any:
        if not is_row_state(node):
            return node.at[page, slot].set(entries, mode="drop", unique_indices=True)
        assert rows is not None, "row states need `rows`"
        return _advanced(node, entries, rows, start, length, always[:, 0])

    pools, tree = jax.tree.flatten(cache, is_leaf=is_row_state)
    return tree.unflatten(map(written, pools, tree.flatten_up_to(block)))


def _advanced(
    state: RowState, block: Any, rows: RowMoves, start: PerRequest, length: PerRequest, always: Active
) -> RowState:
    """Returns a row state after `commit`. `always` is true and depends on the forward's reads; see `commit`."""
    before = read_rows(state, rows, start).leaves
    batch = jnp.arange(start.shape[0], dtype=jnp.int32)

    def put(leaves: Any, row: PerRequest, length: PerRequest) -> Any:
        def write(leaf: Array, new: Array) -> Array:
            # Rows that are not written get distinct indices past the end.
            place = jnp.where(always & (row >= 0) & (row < leaf.shape[0]), row, leaf.shape[0] + batch)
            return leaf.at[place].set(new, mode="drop", unique_indices=True)

        return jax.tree.map(write, leaves, state.advance(before, block, length))

    leaves = put(state.leaves, rows.slots, length)
    if rows.snapshot is not None and rows.snapshot_length is not None:
        leaves = put(leaves, rows.snapshot, jnp.minimum(rows.snapshot_length, length))
    return replace(state, leaves=leaves)
