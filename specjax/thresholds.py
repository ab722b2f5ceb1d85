"""Lossy verification by thresholds: accepts drafts that the target did not draw but finds likely enough.

The rule is SGLang's, with its two accept thresholds. At each node that the walk visits, u is uniform in (0, 1). p_j is
the target's probability of child j, after all sampling parameters, and c_j = p_1 + ... + p_j. The first child with

    u <= c_j / cumulative    or    p_j >= single

is accepted. Otherwise the next token is drawn from the probabilities of the tokens that are not children.

u is computed from the target's own draw y: uniform in (c_{i-1}, c_i) if y is child i, else in (c_k, 1). So u is uniform
over all draws, the token after the last accepted one is y, and with both thresholds at 1 the verdict equals the verdict
of `verify_tree` bit by bit. Greedy rows put all probability on one token, so the thresholds do not change them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float32, Int32, UInt32

from specjax.cache import Logits, PerRequest
from specjax.limits import check, documented, setting
from specjax.sampling import DrawInputs, coin, draw_with_law
from specjax.tree import DraftTree
from specjax.verify import Verdict, find_verdict, walk_tree

_TINY = 1e-38  # minimum probability of the tokens that are not children, against rounding


@documented
@dataclass(frozen=True)
class AcceptAbove:
    """A `Verifier` that changes the text of requests that sample, unless both thresholds are 1.

    Raises:
        ParameterError: a threshold is out of range.
    """

    single: float = setting(1.0, "accept a draft of at least this probability; 1 = off", above=0, maximum=1)
    cumulative: float = setting(
        1.0,
        "accept a draft where a uniform random number is at most the summed probability of the draft and its earlier "
        "siblings, divided by this; 1 = as the target draws",
        above=0,
        maximum=1,
    )

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
        """Verifies trees, level by level, since a draw depends on earlier tokens. Arguments: see `verify_tree`."""

        def visit(*node: Any) -> tuple[Int32[Array, "B"], Bool[Array, "B N"]]:
            *draw, children = node
            token, law = draw_with_law(*draw)
            uniform = jax.vmap(coin)(inputs.rows.seed, draw[2])
            samples = inputs.rows.temperature > 0
            return token, jax.vmap(self._accepted)(tree.tokens, children, token, law, uniform, samples)

        drawn, matches = walk_tree(visit, tree, logits, inputs, prefix_length, emitted, depth, allowed)
        return find_verdict(tree, drawn, depth, matches)

    def _accepted(
        self,
        tokens: Int32[Array, "N"],
        children: Bool[Array, "N"],
        drawn: Int32[Array, ""],
        law: Float32[Array, "V"],
        uniform: Float32[Array, ""],
        samples: Bool[Array, ""],
    ) -> Bool[Array, "N"]:
        """Selects the accepted child of one node, at most one.

        Example: children of probabilities 0.2 and 0.5, `cumulative` 0.5, the second is drawn and `uniform` is 0.5:
        u = 0.2 + 0.5 * 0.5 = 0.45 > 0.2 / 0.5, so the second child is accepted and the first is not.
        """
        probability = jnp.where(children, law[jnp.maximum(tokens, 0)], 0.0)
        total = jnp.cumsum(probability)
        hit = children & (tokens == drawn)
        any_hit = jnp.any(hit)
        before = jnp.where(any_hit, jnp.sum(jnp.where(hit, total - probability, 0.0)), total[-1])
        size = jnp.where(any_hit, jnp.sum(jnp.where(hit, probability, 0.0)), jnp.maximum(1 - total[-1], _TINY))
        likely = jnp.zeros_like(children)
        if self.cumulative < 1:
            # u = before + uniform * size; the difference is exact where a threshold near 1 would be lost to rounding.
            likely |= uniform * size <= total / self.cumulative - before
        if self.single < 1:
            likely |= probability >= self.single
        # A token that is cut off or forbidden has probability 0 and is never accepted.
        accepted = hit | (likely & (probability > 0) & samples)
        return accepted & (jnp.cumsum(accepted) == 1)
