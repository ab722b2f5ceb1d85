"""What a drafter is: a NamedTuple of pure functions. An algorithm is one file that returns one.

The step asks a drafter for a tree (`propose`) and tells it which tokens became certain (`observe`); it never asks
which algorithm runs. Whatever a drafter proposes, the text stays the target's own.
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
"""What `observe` wants of the target: residual streams after these layers, concatenated, or the final hidden state."""

DraftState: TypeAlias = Any
"""A drafter's own pytree. Its shapes depend on the drafter, the rows and the pool, never on a tree."""


class Params(NamedTuple):
    """A drafter may use the target's embedding and head, so it gets both."""

    target: Any
    draft: Any = None


class Context(NamedTuple):
    """What is known of the batch when a drafter is called. An inactive entry must not change the drafter's state."""

    slots: PerRequest  # row of state; >= R for an empty entry
    prefix_length: PerRequest  # n: committed tokens
    page_table: PageTable
    root: PerRequest  # the last emitted token, at position n
    active: Active
    salt: UInt32[Array, "B"]  # requests with different salts share nothing
    sampling: SamplingRows  # [B] rows: a drafter may look at the noise the target will use
    tokens: Int32[Array, "P S"] | None = None  # pages of committed tokens, for drafters with `reads_tokens`

    @property
    def attended(self) -> PerRequest:
        """`prefix_length` for attention, which spends nothing on rows that take no part."""
        return jnp.where(self.active, self.prefix_length, INACTIVE)

    @property
    def room(self) -> int:
        """T * S: the most tokens that a request's pages can hold here. Static, and not the same in every call."""
        return self.page_table.shape[1] * self._pages().shape[1]

    def committed(self, positions: Int32[Array, "#B X"]) -> Int32[Array, "B X"]:
        """The tokens at these positions of each request's text; NO_TOKEN outside 0 .. `prefix_length` - 1.

        Example: ``context.committed(jnp.arange(context.room, dtype=jnp.int32)[None, :])`` is the whole text.

        Raises:
            ValueError: the drafter does not say `reads_tokens`.
        """
        pages = self._pages()
        count, size = pages.shape
        inside = (positions >= 0) & (positions < self.prefix_length[:, None])
        positions = jnp.where(inside, positions, 0)
        page = jnp.take_along_axis(self.page_table, positions // size, axis=1)
        return jnp.where(inside, pages[jnp.minimum(page, count - 1), positions % size], NO_TOKEN)

    def suffix(self, width: int) -> Int32[Array, "B {width}"]:
        """The last `width` tokens of each text, the root last; NO_TOKEN where the text is shorter. For `propose`.

        Raises:
            ValueError: the drafter does not say `reads_tokens`.
        """
        before = self.prefix_length[:, None] + jnp.arange(1 - width, 0, dtype=jnp.int32)[None, :]
        return jnp.concatenate([self.committed(before), self.root[:, None]], axis=1)

    def _pages(self) -> Int32[Array, "P S"]:
        if self.tokens is None:
            raise ValueError("this drafter reads committed tokens: return Drafter(..., reads_tokens=True)")
        return self.tokens


class Observation(NamedTuple):
    """Tokens that have just been committed, at positions ``context.prefix_length + [0, length)``.

    Prefill and verification are the same event.
    """

    tokens: Int32[Array, "B C"]
    next_tokens: Int32[Array, "B C"]  # shifted left by one; the last is the new root, or the next prompt token
    features: Float[Array, "B C F"] | None
    length: PerRequest  # the first `length` of C count; 0 for an inactive entry


class Drafter(NamedTuple):
    """See DESIGN.md, "The drafter interface"."""

    name: str
    features: Features
    width: int  # N: nodes of its trees, the root included
    depth: int  # D: the deepest a node can be
    init: Callable[[Params, int, PoolShape], DraftState]  # (params, rows, pool)
    propose: Callable[[Params, DraftState, Context], tuple[DraftTree, DraftState]]
    observe: Callable[[Params, DraftState, Context, Observation], DraftState]
    widths: tuple[int, ...] = ()  # smaller static widths worth compiling (1 is always there)
    explicit_width: bool = False  # the user chose the width: no batch is too large for it
    reads_tokens: bool = False  # whether it calls `Context.committed` or `Context.suffix`
    note: str = ""  # for the log: what a user may want to know of it
