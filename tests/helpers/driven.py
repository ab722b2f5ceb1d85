"""Drives a draft head without a target: random texts and features, observed in pieces of any length."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from eagle_oracle import check_tree
from toy_models import Toy

from specjax.cache import PoolShape
from specjax.drafters import Context, Drafter, Observation, Params, TreeShape
from specjax.models.target import Target
from specjax.sampling import sampling_row
from specjax.tree import DraftTree


@functools.cache
def compiled(make: Callable[..., Drafter], target: Target, config: Any, shape: TreeShape, **options: Any):
    """A drafter, and its `propose` compiled once for all heads of one configuration."""
    drafter = make(target, config, shape, **options)
    return drafter, jax.jit(drafter.propose)


@functools.cache
def compiled_observe(make: Callable[..., Drafter], target: Target, config: Any):
    """`observe` does not depend on the tree."""
    return jax.jit(make(target, config, TreeShape(1, 1, 2)).observe)


class Driven:
    """Rows of text in an order other than their slots', and an empty entry. `make`: `eagle_drafter` and the like."""

    def __init__(
        self, make: Callable[..., Drafter], toy: Toy, config: Any, draft: Any, *, rows: int = 3, page_size: int = 4,
        pages: int = 8, seed: int = 0,
    ):  # fmt: skip
        self.made_by, self.rows, self.rng = (make, toy.target, config), rows, np.random.default_rng(seed)
        self.toy, self.params = toy, Params(toy.params, draft)
        pool = PoolShape(rows * pages + 2, page_size)
        self.state = compiled(*self.made_by, TreeShape(1, 1, 2))[0].init(self.params, rows + 1, pool)
        table = self.rng.permutation(pool.pages)[: rows * pages].reshape(rows, pages)
        self.table = np.concatenate([table, np.full((1, pages), pool.pages)]).astype(np.int32)
        length = page_size * pages
        self.tokens = self.rng.integers(0, toy.vocab, (rows, length + 1))
        self.features = self.rng.normal(0, 1, (rows, length, config.feature_size)).astype(np.float32)
        self.done = np.zeros(rows, int)  # observed tokens of each row

    def context(self, active: Sequence[bool] | np.ndarray | None = None) -> Context:
        active = np.ones(self.rows, bool) if active is None else np.asarray(active)
        row = sampling_row(self.toy.vocab)
        sampling = jax.tree.map(lambda leaf: jnp.broadcast_to(jnp.asarray(leaf), (self.rows + 1, *leaf.shape)), row)
        return Context(
            slots=jnp.asarray([*range(self.rows)[::-1], self.rows + 5], jnp.int32),
            prefix_length=jnp.asarray([*np.where(active, self.done, 0), 0], jnp.int32),
            page_table=jnp.asarray(self.table),
            root=jnp.asarray([*self.tokens[np.arange(self.rows), self.done], 0], jnp.int32),
            active=jnp.asarray([*active, False]),
            salt=jnp.zeros(self.rows + 1, jnp.uint32),
            sampling=sampling,
        )

    def feed(self, lengths: Sequence[int], width: int | None = None) -> None:
        """Observes `lengths[r]` more tokens of each row. The rest of the block is random, some of it not finite."""
        counts = np.asarray(lengths)
        width = width or max(1, int(counts.max()))
        tokens, following = self.rng.integers(-1, self.toy.vocab, (2, self.rows + 1, width))
        features = self.rng.normal(0, 9, (self.rows + 1, width, self.features.shape[2])).astype(np.float32)
        features[:, -1] = np.where(np.arange(self.rows + 1)[:, None] % 2, np.nan, features[:, -1])
        for row, count in enumerate(counts):
            new = slice(self.done[row], self.done[row] + count)
            tokens[row, :count] = self.tokens[row, new]
            following[row, :count] = self.tokens[row, new.start + 1 : new.stop + 1]
            features[row, :count] = self.features[row, new]
        seen = Observation(*map(jnp.asarray, (np.int32(tokens), np.int32(following), features, np.int32([*counts, 0]))))
        self.state = compiled_observe(*self.made_by)(self.params, self.state, self.context(counts > 0), seen)
        self.done += counts

    def trees(self, shape: TreeShape, context: Context | None = None, **options: Any) -> DraftTree:
        propose = compiled(*self.made_by, shape, **options)[1]
        tree, state = propose(self.params, self.state, self.context() if context is None else context)
        assert jax.tree.all(jax.tree.map(lambda old, new: bool(jnp.all(old == new)), self.state, state))
        return jax.tree.map(lambda leaf: np.asarray(leaf)[: self.rows], tree)

    def compare(self, shape: TreeShape, expected: Callable[[int], Any], **options: Any) -> int:
        """Compares the trees with the oracle's, `expected(row)`. Returns how many are not near a tie."""
        trees = self.trees(shape, **options)
        return sum(check_tree(trees, row, expected(row)) for row in range(self.rows))
