"""The interface of a drafter: `Drafter`, what its writer fills in, and `Speculation`, which holds the facts around it.

Guide: docs/drafters.md.

The step calls `propose` for a tree and `observe` with the committed tokens. The text does not depend on the proposed
trees: the step writes node 0 and leaves out nodes that cannot be verified. `specjax.drafters.check` finds such nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32, UInt32
from specjax_kernels import INACTIVE

from specjax.cache import Active, PageTable, PerRequest, PoolShape
from specjax.sampling import SamplingRows
from specjax.tree import NO_TOKEN, DraftTree, root_only
from specjax.verify import Verifier, verify_tree

Features: TypeAlias = tuple[int, ...] | Literal["final"] | None
"""Target features for `observe`: the concatenated residual streams after these layers (auxiliary hidden states),
"final" for the hidden state after the final norm, or None."""

DraftState: TypeAlias = Any
"""State of a drafter, a pytree of arrays. Shapes depend on the drafter, the rows and the pool, never on a tree."""


class Params(NamedTuple):
    """Parameters of both models. A drafter may use the target's embedding and head.

    Attributes:
        target: nested dicts of arrays, as `specjax.load.load` returns them.
        draft: the drafter's pytree of arrays; None if it has none.
    """

    target: Any
    draft: Any = None


@jax.tree_util.register_static
class PageSize(int):
    """Tokens per page, static in a jitted function that takes a `Context`."""


@jax.tree_util.register_static
class Flag(int):
    """A truth value, static in a jitted function that takes a `Context`."""


class Context(NamedTuple):
    """The B requests of a step. Inactive entries must not change the drafter's state.

    Attributes:
        slots: int32 [B]. Rows of the drafter's state; >= R for an empty entry.
        prefix_length: int32 [B]. n, the number of committed tokens.
        page_table: int32 [B, T]. Pages of each request, in order; P marks a hole.
        root: int32 [B]. Last emitted token, at position n. Undefined in `observe` after a chunk of a prompt.
        active: bool [B]. Whether the entry takes part in the step.
        salt: uint32 [B]. Requests with different salts must not share state.
        sampling: sampling parameters [B], which determine the target's noise.
        tokens: int32 [P, S]. Pages of committed tokens; None unless `Drafter.reads_tokens`.
        page_size: S; 0 if unknown, which disables `keep_at_page_ends`.
        in_prompt: whether `observe` receives a chunk of a prompt, not a step. Static.
        layers: cache entries of committed tokens in each layer of `Drafter.reads_layers`, such as a `KeyValue` of
            [P, S, K, E]. Token t of a request is in page ``page_table[b, t // S]``, slot ``t % S``.
    """

    slots: PerRequest
    prefix_length: PerRequest
    page_table: PageTable
    root: PerRequest
    active: Active
    salt: UInt32[Array, "B"]
    sampling: SamplingRows
    tokens: Int32[Array, "P S"] | None = None
    page_size: PageSize = PageSize(0)
    in_prompt: Flag = Flag(False)
    layers: tuple[Any, ...] = ()

    @property
    def attended(self) -> PerRequest:
        """`prefix_length` for attention; INACTIVE rows are skipped."""
        return jnp.where(self.active, self.prefix_length, INACTIVE)

    @property
    def room(self) -> int:
        """T * S, the maximum number of tokens in a request's pages. Static; differs between the engine's programs."""
        return self.page_table.shape[1] * self._pages().shape[1]

    def committed(self, positions: Int32[Array, "#B X"]) -> Int32[Array, "B X"]:
        """Reads committed tokens at `positions` of each text; NO_TOKEN outside of 0 .. `prefix_length` - 1.

        Example:
            ``context.committed(jnp.arange(context.room, dtype=jnp.int32)[None, :])`` reads the whole text.
        """
        pages = self._pages()
        count, size = pages.shape
        inside = (positions >= 0) & (positions < self.prefix_length[:, None])
        positions = jnp.where(inside, positions, 0)
        page = jnp.take_along_axis(self.page_table, positions // size, axis=1)
        return jnp.where(inside, pages[jnp.minimum(page, count - 1), positions % size], NO_TOKEN)

    def suffix(self, width: int) -> Int32[Array, "B {width}"]:
        """Reads the last `width` tokens of each text, root included; NO_TOKEN before its start. Only for `propose`."""
        before = self.prefix_length[:, None] + jnp.arange(1 - width, 0, dtype=jnp.int32)[None, :]
        return jnp.concatenate([self.committed(before), self.root[:, None]], axis=1)

    def _pages(self) -> Int32[Array, "P S"]:
        if self.tokens is None:
            raise ValueError("this drafter reads committed tokens: return Drafter(..., reads_tokens=True)")
        return self.tokens


class Observation(NamedTuple):
    """Newly committed tokens (a chunk of a prompt or a verified path), from position ``context.prefix_length`` on.

    Attributes:
        tokens: int32 [B, C]. The first `length` of each row are valid.
        next_tokens: int32 [B, C]. `tokens` shifted left by one; the last valid entry is the new root or, within a
            prompt, the next prompt token.
        features: [B, C, F]. The target's features at `tokens` (`Drafter.features`); None if it names none.
        length: int32 [B]. Number of valid tokens; 0 for an inactive entry.
    """

    tokens: Int32[Array, "B C"]
    next_tokens: Int32[Array, "B C"]
    features: Float[Array, "B C F"] | None
    length: PerRequest


def have_rows(drafter: Drafter, params: Params, pool: PoolShape) -> list[bool]:
    """Whether each leaf of the drafter's state has a row for each request: R of `init` is the length of its first axis.
    `params`: arrays or their shapes."""
    few, more = (jax.tree.leaves(jax.eval_shape(partial(_init, drafter, rows, pool), params)) for rows in (3, 4))
    return [(a.shape[:1], b.shape[:1]) == ((3,), (4,)) for a, b in zip(few, more, strict=True)]


def _init(drafter: Drafter, rows: int, pool: PoolShape, params: Params) -> DraftState:
    return drafter.init(params, rows, pool)


def take_rows(leaves: Any, context: Context) -> Any:
    """Gathers the requests' rows [B, ...] from state leaves [R, ...]. Empty entries read an arbitrary row."""
    return jax.tree.map(lambda leaf: leaf[jnp.minimum(context.slots, leaf.shape[0] - 1)], leaves)


def put_rows(leaves: Any, new: Any, context: Context, seen: Observation) -> Any:
    """Writes `new` [B, ...] to the rows of state leaves [R, ...], for requests with observed tokens."""

    def put(leaf: Array, values: Array) -> Array:
        nowhere = leaf.shape[0] + jnp.arange(seen.length.shape[0], dtype=jnp.int32)
        row = jnp.where(seen.length > 0, context.slots, nowhere)
        return leaf.at[row].set(values, mode="drop", unique_indices=True)

    return jax.tree.map(put, leaves, new)


def finite(entries: Any) -> Any:
    """Cache entries with 0 in place of values that are not finite, which would spread to later requests with the same
    page."""
    return jax.tree.map(lambda leaf: jnp.where(jnp.isfinite(leaf), leaf, jnp.zeros_like(leaf)), entries)


def keep_at_page_ends(leaf: Array, values: Array, context: Context, seen: Observation) -> Array:
    """Writes values of the observed tokens [B, C, ...] that end a page to a state leaf [P, ...].

    A request can start with full pages of another request, but without its row. Data of a request's last token is
    therefore stored for each page, too (see `kept_at_page_end`).
    """
    if not context.page_size:
        return leaf
    size, count = context.page_size, seen.tokens.shape[1]
    offset = jnp.arange(count, dtype=jnp.int32)[None, :]
    position = context.prefix_length[:, None] + offset
    column = jnp.minimum(position // size, context.page_table.shape[1] - 1)
    page = jnp.take_along_axis(context.page_table, column, axis=1)
    ends = (offset < seen.length[:, None]) & ((position + 1) % size == 0)
    nowhere = leaf.shape[0] + jnp.arange(page.size, dtype=jnp.int32).reshape(page.shape)
    return leaf.at[jnp.where(ends, page, nowhere)].set(values.astype(leaf.dtype), mode="drop")


def kept_at_page_end(leaf: Array, context: Context) -> tuple[Array, Bool[Array, "B"]]:
    """Reads the data that `keep_at_page_ends` stored for each request's last committed token.

    Returns:
        Data [B, ...], and bool [B]: True if the token ends a page, so that the data is valid.
    """
    batch = context.prefix_length.shape[0]
    if not context.page_size:
        return jnp.zeros((batch, *leaf.shape[1:]), leaf.dtype), jnp.zeros(batch, bool)
    column = jnp.maximum(context.prefix_length // context.page_size - 1, 0)[:, None]
    page = jnp.take_along_axis(context.page_table, column, axis=1)[:, 0]
    there = (context.prefix_length > 0) & (context.prefix_length % context.page_size == 0)
    return leaf[jnp.minimum(page, leaf.shape[0] - 1)], there


class Drafter(NamedTuple):
    """A drafting algorithm: static facts and three pure functions, which are traced into the step.

    Attributes:
        name: name for logs and summaries.
        features: target features for `observe`: layer indices, "final" or None.
        width: N, number of tree nodes, root included.
        depth: D, maximum depth of a node; the root has depth 0.
        init: (params, rows R, pool) -> state. Allocates the state. Leaves [R, ...] have a row for each request, which
            the engine sets to what `init` made when a request gets the row.
        propose: (params, state, context) -> (`DraftTree` [B, N], state). Node 0 is ``context.root``, parents come
            before children, siblings differ, valid nodes come first.
        observe: (params, state, context, observation) -> state. Called after each commit, including prompts and steps
            without drafts (except with `Speculation.costly_observe`).
        reads_tokens: whether the drafter calls `Context.committed` or `Context.suffix`.
        topk: nodes per level, where scores order the tree. 1: each tree is one path (`specjax.tree.chain`), whose
            first nodes are the best, so scores are computed only for traces. None: trees of any form.
        ranked: whether scores are minus the ranks in a larger tree, of which a tree may lack some. Else each node's
            rank is the number of better nodes.
        reads_layers: layers of the target whose cache entries the drafter reads, counted from 0 (`Context.layers`).
    """

    name: str
    features: Features
    width: int
    depth: int
    init: Callable[[Params, int, PoolShape], DraftState]
    propose: Callable[[Params, DraftState, Context], tuple[DraftTree, DraftState]]
    observe: Callable[[Params, DraftState, Context, Observation], DraftState]
    reads_tokens: bool = False
    topk: int | None = None
    ranked: bool = False
    reads_layers: tuple[int, ...] = ()


class Speculation(NamedTuple):
    """A drafter with its parameters, a verifier, and what an engine, a cost model or a log reads beside it.

    Attributes:
        drafter: proposes draft trees.
        params: `Params.draft` of its functions; None: it has no parameters.
        verify: decides which drafts are accepted; the default is lossless.
        explicit_width: the width was set by a user or by the writer of a drafter. Large batches do not reduce it.
        every_step: by default every step drafts; else only steps where that is measured to be faster
            (`EngineConfig.adaptive`).
        resize: number of nodes (at least 2) -> drafter of smaller trees with the same state, so that steps of several
            shapes share it. None: larger trees are cut to their best nodes.
        largest: largest number that `resize` takes. None: the drafter's width.
        costly_observe: whether `observe` runs a model, as for a draft model. A request then drafts in all of its steps
            or in none, and steps in which no request drafts skip `observe`.
        lookup: nodes of trees that need no model, root included: of an algorithm without one, or of n-grams before a
            model, which then drafts for single requests only. 1: all trees need it.
        passes: forwards of the draft that a proposal runs, for estimates of its time. None: one for each level.
        coupling: "noise" if drafts of sampled requests use the target's noise, else "none".
        note: description of the tree for the log.
        source: name of the head, layers or model for the log.
    """

    drafter: Drafter
    params: Any = None
    verify: Verifier = verify_tree
    explicit_width: bool = True
    every_step: bool = True
    resize: Callable[[int], Drafter] | None = None
    largest: int | None = None
    costly_observe: bool = False
    lookup: int = 1
    passes: int | None = None
    coupling: str = "none"
    note: str = ""
    source: str = ""

    @property
    def runs_model(self) -> bool:
        """True if drafts need a model: `observe` reads features or runs a model itself."""
        return self.drafter.features is not None or self.costly_observe

    def models(self, batch: int) -> bool:
        """True if more than n-grams draft in steps of this batch bucket."""
        return self.lookup == 1 or (self.runs_model and batch == 1)

    @property
    def largest_size(self) -> int:
        """Largest N of a step."""
        return self.largest or self.drafter.width

    def within(self, nodes: int) -> Drafter:
        """Returns the drafter for steps of N = `nodes`: its trees have at most this many."""
        if self.resize is None or not 1 < nodes < self.largest_size:
            return self.drafter
        return self.resize(nodes)


def none_drafter() -> Drafter:
    """Drafter without state whose trees are the root alone (plain decoding); the accept length is exactly 1."""
    return Drafter(
        "NONE",
        features=None,
        width=1,
        depth=0,
        init=lambda params, rows, pool: (),
        propose=lambda params, state, context: (root_only(context.root), state),
        observe=lambda params, state, context, observation: state,
    )
