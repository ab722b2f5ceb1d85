"""The interface of a drafter: a NamedTuple of pure functions, returned by one file an algorithm.

The step asks it for a tree (`propose`) and reports which tokens were committed (`observe`). Whatever tokens a drafter
proposes, the text stays the target's own. Shapes and dtypes of its trees are checked (`specjax.drafters.check`); their
values are not: node 0 must be the root, and parents must come before children. docs/drafters.md is a guide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32, UInt32
from specjax_kernels import INACTIVE

from specjax.cache import PoolShape
from specjax.sampling import SamplingRows
from specjax.tree import NO_TOKEN, DraftTree, root_only
from specjax.types import Active, PageTable, PerRequest

Features: TypeAlias = tuple[int, ...] | Literal["final"] | None
"""What `observe` reads of the target: the residual streams after these layers, concatenated, or the final hidden state
(after the norm), or nothing."""

DraftState: TypeAlias = Any
"""A drafter's own pytree of arrays. Its shapes depend on the drafter, the rows and the pool, never on a tree."""


class Params(NamedTuple):
    """Parameters of both models. A drafter may use the target's embedding and head.

    Attributes:
        target: nested dicts of arrays, as `specjax.load.load` returns them.
        draft: the drafter's pytree of arrays; None: it has none.
    """

    target: Any
    draft: Any = None


@jax.tree_util.register_static
class PageSize(int):
    """A number of tokens that stays static where a `Context` is an argument of a jitted function."""


class Context(NamedTuple):
    """The B requests of a step. An inactive entry must not change the drafter's state.

    Attributes:
        slots: int32 [B]. Row of the drafter's state; >= R for an empty entry.
        prefix_length: int32 [B]. n, the number of committed tokens.
        page_table: int32 [B, T]. Pages of each request, in order; holes are P.
        root: int32 [B]. The last emitted token, at position n. Undefined in `observe` after a prompt's chunk.
        active: bool [B]. Whether the entry takes part.
        salt: uint32 [B]. Requests with different salts must share nothing.
        sampling: [B] rows. A drafter may look at the noise that the target will use.
        tokens: int32 [P, S]. Pages of committed tokens; None, and refused, unless the drafter says `reads_tokens`.
        page_size: S; 0: unknown, so nothing is kept by `keep_at_page_ends`.
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

    @property
    def attended(self) -> PerRequest:
        """`prefix_length` for attention, which spends nothing on inactive rows."""
        return jnp.where(self.active, self.prefix_length, INACTIVE)

    @property
    def room(self) -> int:
        """T * S: the most tokens that a request's pages hold. Static; differs between the engine's programs."""
        return self.page_table.shape[1] * self._pages().shape[1]

    def committed(self, positions: Int32[Array, "#B X"]) -> Int32[Array, "B X"]:
        """The tokens at these positions of each request's text; NO_TOKEN outside 0 .. `prefix_length` - 1.

        Example: ``context.committed(jnp.arange(context.room, dtype=jnp.int32)[None, :])`` is the whole text.
        """
        pages = self._pages()
        count, size = pages.shape
        inside = (positions >= 0) & (positions < self.prefix_length[:, None])
        positions = jnp.where(inside, positions, 0)
        page = jnp.take_along_axis(self.page_table, positions // size, axis=1)
        return jnp.where(inside, pages[jnp.minimum(page, count - 1), positions % size], NO_TOKEN)

    def suffix(self, width: int) -> Int32[Array, "B {width}"]:
        """The last `width` tokens of each text, the root last; NO_TOKEN before the text's start. For `propose`."""
        before = self.prefix_length[:, None] + jnp.arange(1 - width, 0, dtype=jnp.int32)[None, :]
        return jnp.concatenate([self.committed(before), self.root[:, None]], axis=1)

    def _pages(self) -> Int32[Array, "P S"]:
        if self.tokens is None:
            raise ValueError("this drafter reads committed tokens: return Drafter(..., reads_tokens=True)")
        return self.tokens


class Observation(NamedTuple):
    """Tokens just committed, of a prompt's chunk or a verified path, at ``context.prefix_length + [0, length)``.

    Attributes:
        tokens: int32 [B, C]. The first `length` of each row count.
        next_tokens: int32 [B, C]. The same shifted left by one; the last that counts is the new root or, within a
            prompt, the next prompt token.
        features: [B, C, F], what `Drafter.features` selects of the target's output at these tokens; None: nothing.
        length: int32 [B], 0 for an inactive entry.
    """

    tokens: Int32[Array, "B C"]
    next_tokens: Int32[Array, "B C"]
    features: Float[Array, "B C F"] | None
    length: PerRequest


def take_rows(leaves: Any, context: Context) -> Any:
    """[B, ...] of a state's [R, ...] leaves: the requests' rows. An empty entry has another's."""
    return jax.tree.map(lambda leaf: leaf[jnp.minimum(context.slots, leaf.shape[0] - 1)], leaves)


def put_rows(leaves: Any, new: Any, context: Context, seen: Observation) -> Any:
    """A state's [R, ...] leaves with `new` [B, ...] in the rows of the requests of which tokens were seen."""

    def put(leaf: Array, own: Array) -> Array:
        nowhere = leaf.shape[0] + jnp.arange(seen.length.shape[0], dtype=jnp.int32)
        row = jnp.where(seen.length > 0, context.slots, nowhere)
        return leaf.at[row].set(own, mode="drop", unique_indices=True)

    return jax.tree.map(put, leaves, new)


def keep_at_page_ends(leaf: Array, values: Array, context: Context, seen: Observation) -> Array:
    """A state's [P, ...] leaf with those of `values` [B, C, ...] whose token is the last of a page.

    What a drafter keeps of a request's last token stays with the request's row, but a request may start with the full
    pages of another (see `Context.prefix_length`). For it the same is kept here.
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
    """[B, ...]: what `keep_at_page_ends` kept of the last committed token of each request, and whether it did: that
    token is the last of a page."""
    batch = context.prefix_length.shape[0]
    if not context.page_size:
        return jnp.zeros((batch, *leaf.shape[1:]), leaf.dtype), jnp.zeros(batch, bool)
    column = jnp.maximum(context.prefix_length // context.page_size - 1, 0)[:, None]
    page = jnp.take_along_axis(context.page_table, column, axis=1)[:, 0]
    there = (context.prefix_length > 0) & (context.prefix_length % context.page_size == 0)
    return leaf[jnp.minimum(page, leaf.shape[0] - 1)], there


class Drafter(NamedTuple):
    """An algorithm: static facts, and three pure functions that are traced into the step.

    Attributes:
        name: for logs and summaries.
        features: what `observe` reads of the target: layer indices, "final" or None.
        width: N, nodes of its trees, the root included.
        depth: D, the greatest depth of a node; the root has depth 0.
        init: (params, rows R, pool) -> state. Called once, to allocate.
        propose: (params, state, context) -> (`DraftTree` [B, N], state). Node 0 is ``context.root``, parents come
            before children, siblings differ, valid nodes come first.
        observe: (params, state, context, observation) -> state. Called after each commit, of prompts too, and also
            in steps that draft nothing (but see `costly_observe`).
        widths: smaller tree widths of its steps, for a drafter that often proposes less: 1 is then one of them, and
            each step checks the narrowest that holds its trees. (): all steps check `width` nodes.
        explicit_width: whether the user set the width; then every batch drafts trees of it, however large.
        reads_tokens: whether it calls `Context.committed` or `Context.suffix`.
        runs_model: whether it runs a model of its own, which takes time in every step.
        topk: nodes of a level that its model is run over.
        chains: whether each tree is one path (`specjax.tree.chain`). Its best nodes are its first ones, so that scores
            are computed only where a trace shows them.
        resize: a number of nodes, at least 2 -> the drafter of smaller trees, with the same `init` and `observe`, so
            that steps of several shapes may share a state. None: it has one shape, of which the best nodes are taken.
        costly_observe: True if `observe` runs a model, as a draft model must to read tokens. A request then drafts
            from its first step to its end or not at all, and steps in which none drafts do not observe.
        coupling: "noise": drafts of requests that sample are chosen with the target's noise; "none": without.
        note: description of the tree, for the log.
        source: name of the head, layers or model that drafts, for the log.
    """

    name: str
    features: Features
    width: int
    depth: int
    init: Callable[[Params, int, PoolShape], DraftState]
    propose: Callable[[Params, DraftState, Context], tuple[DraftTree, DraftState]]
    observe: Callable[[Params, DraftState, Context, Observation], DraftState]
    widths: tuple[int, ...] = ()
    explicit_width: bool = False
    reads_tokens: bool = False
    runs_model: bool = False
    topk: int = 1
    chains: bool = False
    resize: Callable[[int], Drafter] | None = None
    costly_observe: bool = False
    coupling: str = "none"
    note: str = ""
    source: str = ""

    def within(self, nodes: int) -> Drafter:
        """The drafter for steps whose trees have at most `nodes` nodes."""
        if self.resize is None or not 1 < nodes < self.width:
            return self
        return self.resize(nodes)


def none_drafter() -> Drafter:
    """A drafter without state, whose trees are one node: plain decoding. Accept length is exactly 1."""
    return Drafter(
        "NONE",
        features=None,
        width=1,
        depth=0,
        init=lambda params, rows, pool: (),
        propose=lambda params, state, context: (root_only(context.root), state),
        observe=lambda params, state, context, observation: state,
    )
