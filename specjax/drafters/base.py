"""The interface of a drafter: a NamedTuple of pure functions, returned by one file an algorithm.

The step asks it for a tree (`propose`) and reports which tokens were committed (`observe`). Whatever a drafter
proposes, the text stays the target's own. docs/drafters.md is a guide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32, UInt32
from specjax_kernels import INACTIVE

from specjax.cache import PoolShape
from specjax.sampling import SamplingRows
from specjax.tree import NO_TOKEN, DraftTree
from specjax.types import Active, PageTable, PerRequest

Features: TypeAlias = tuple[int, ...] | Literal["final"] | None
"""What `observe` reads of the target: the residual streams after these layers, concatenated, or the final hidden state
(after the norm), or nothing."""

DraftState: TypeAlias = Any
"""A drafter's own pytree of arrays. Its shapes depend on the drafter, the rows and the pool, never on a tree."""


class Params(NamedTuple):
    """Parameters of both models. A drafter may use the target's embedding and head."""

    target: Any  # nested dicts of arrays
    draft: Any = None  # the drafter's pytree; None: it has none


class Context(NamedTuple):
    """The B requests of a step. An inactive entry must not change the drafter's state."""

    slots: PerRequest  # row of the drafter's state; >= R for an empty entry
    prefix_length: PerRequest  # n, the number of committed tokens
    page_table: PageTable  # pages of each request, in order; holes are P
    root: PerRequest  # the last emitted token, at position n; undefined in `observe` after a prompt's chunk
    active: Active  # whether the entry takes part
    salt: UInt32[Array, "B"]  # requests with different salts must share nothing
    sampling: SamplingRows  # [B]; a drafter may look at the noise that the target will use
    tokens: Int32[Array, "P S"] | None = None  # pages of committed tokens; None unless `Drafter.reads_tokens`

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

    `next_tokens` are `tokens` shifted left by one; the last that counts is the new root or, within a prompt, the next
    prompt token.
    """

    tokens: Int32[Array, "B C"]  # the first `length` of each row count
    next_tokens: Int32[Array, "B C"]
    features: Float[Array, "B C F"] | None  # what `Drafter.features` selects of the target's output at these tokens
    length: PerRequest  # 0 for an inactive entry


class Drafter(NamedTuple):
    """An algorithm: static facts, and three pure functions that are traced into the step.

    init(params, rows R, pool) -> state. Called once, to allocate.

    propose(params, state, context) -> (`DraftTree` [B, N], state). Node 0 is ``context.root``, parents come before
        children, siblings differ, valid nodes come first.

    observe(params, state, context, observation) -> state. Called after each commit, of prompts too, and also where
        speculation is off.
    """

    name: str  # for logs and summaries
    features: Features
    width: int  # N, nodes of its trees, the root included
    depth: int  # D, the greatest depth of a node; the root has depth 0
    init: Callable[[Params, int, PoolShape], DraftState]
    propose: Callable[[Params, DraftState, Context], tuple[DraftTree, DraftState]]
    observe: Callable[[Params, DraftState, Context, Observation], DraftState]
    widths: tuple[int, ...] = ()  # smaller tree widths worth a program of their own; 1 and `width` are always there
    explicit_width: bool = False  # whether the user set the width; then every batch drafts, however large
    reads_tokens: bool = False  # whether it calls `Context.committed` or `Context.suffix`
    note: str = ""  # for the log
