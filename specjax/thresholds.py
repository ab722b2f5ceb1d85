"""Lossy verification by thresholds: accepts drafts that the target did not draw, if it finds them likely enough.

The rule is SGLang's, with its two accept thresholds. A coin u, uniform in (0, 1), is thrown at each node that the walk
comes to. Its children are looked at in order; p_j is the target's probability of child j, after all sampling
parameters, and c_j = p_1 + ... + p_j. The first child with

    u <= c_j / cumulative    or    p_j >= single

is accepted. Without one, the next token is drawn from the probabilities of the tokens that are no child.

The coin is made of the target's own draw y: where y is child i, u is uniform in (c_{i-1}, c_i), else in (c_k, 1). So u
is uniform over all draws, the token after the last accepted one is y, and with both thresholds at 1 the verdict is
that of `verify_tree`, bit by bit. Greedy rows put all probability on one token: for them the thresholds change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float32, Int32, UInt32

from specjax.limits import check, limited
from specjax.sampling import DrawInputs, coin, draw_with_law
from specjax.tree import DraftTree
from specjax.types import Logits, PerRequest
from specjax.verify import Verdict, find_verdict, walk_tree

_TINY = 1e-38  # so that rounding leaves some probability to the tokens that are no child


@dataclass(frozen=True)
class AcceptAbove:
    """A `Verifier` that changes the text of requests that sample, unless both thresholds are 1.

    Attributes:
        single: a draft is accepted if its probability is at least this; above 0 and at most 1 (off).
        cumulative: the coin is compared with the siblings' cumulative probability divided by this; above 0 and at most
            1 (as the target draws).

    Raises:
        ValueError: a threshold is not above 0 and at most 1.
    """

    single: float = limited(1.0, above=0, maximum=1)
    cumulative: float = limited(1.0, above=0, maximum=1)

    def __post_init__(self) -> None:
        check(self)

    @property
    def lossy(self) -> bool:
        return min(self.single, self.cumulative) < 1

    def __call__(
        self,
        tree: DraftTree,
        logits: Logits,
        inputs: DrawInputs,
        prefix_length: PerRequest,
        emitted: PerRequest,
        *,
        depth: int,
        allowed: UInt32[Array, "B N W"] | None = None,
    ) -> Verdict:
        """The verdict; arguments as those of `verify_tree`. Walks level by level, since a draw needs the tokens before
        it."""

        def visit(*of_node: Any) -> tuple[Int32[Array, "B"], Bool[Array, "B N"]]:
            *given, children = of_node
            token, law = draw_with_law(*given)
            thrown = jax.vmap(coin)(inputs.rows.seed, given[2])
            hot = inputs.rows.temperature > 0
            return token, jax.vmap(self._taken)(tree.tokens, children, token, law, thrown, hot)

        drawn, matches = walk_tree(visit, tree, logits, inputs, prefix_length, emitted, depth, allowed)
        return find_verdict(tree, drawn, depth, matches)

    def _taken(
        self,
        tokens: Int32[Array, "N"],
        children: Bool[Array, "N"],
        drawn: Int32[Array, ""],
        law: Float32[Array, "V"],
        thrown: Float32[Array, ""],
        samples: Bool[Array, ""],
    ) -> Bool[Array, "N"]:
        """The child of one node that is accepted, at most one.

        Example: children of probabilities 0.2 and 0.5, `cumulative` 0.5, and the second is drawn with a coin of 0.5:
        u = 0.2 + 0.5 * 0.5 = 0.45 > 0.2 / 0.5, so not the first; the second.
        """
        each = jnp.where(children, law[jnp.maximum(tokens, 0)], 0.0)
        total = jnp.cumsum(each)
        hit = children & (tokens == drawn)
        found = jnp.any(hit)
        before = jnp.where(found, jnp.sum(jnp.where(hit, total - each, 0.0)), total[-1])
        size = jnp.where(found, jnp.sum(jnp.where(hit, each, 0.0)), jnp.maximum(1 - total[-1], _TINY))
        likely = jnp.zeros_like(children)
        if self.cumulative < 1:
            # u = before + thrown * size; the difference is exact where a threshold near 1 would be lost to rounding.
            likely |= thrown * size <= total / self.cumulative - before
        if self.single < 1:
            likely |= each >= self.single
        # A token that is cut off or forbidden has a probability of 0, and is never accepted.
        accepted = hit | (likely & (each > 0) & samples)
        return accepted & (jnp.cumsum(accepted) == 1)
