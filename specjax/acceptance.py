"""Verifiers that accept other drafts than the target's own draws: accept thresholds, and given acceptance rates.

Both walk the tree level by level (`specjax.verify.walk_tree`), since a draw depends on the tokens accepted before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float32, Int32, UInt32

from specjax.cache import Logits, PerRequest
from specjax.limits import ParameterError, check, documented, setting
from specjax.sampling import DrawInputs, coin
from specjax.tree import DraftTree, ancestor_mask
from specjax.verify import Node, Verdict, find_verdict, walk_tree

_TINY = 1e-38  # minimum probability of the tokens that are not children, against rounding


@documented
@dataclass(frozen=True)
class AcceptAbove:
    """A `Verifier` that accepts drafts that the target did not draw but finds likely enough. It changes the text of
    requests that sample, unless both thresholds are 1.

    The rule is SGLang's, with its two accept thresholds. At each node that the walk visits, u is uniform in (0, 1). p_j
    is the target's probability of child j, after all sampling parameters, and c_j = p_1 + ... + p_j. The first child
    with

        u <= c_j / cumulative    or    p_j >= single

    is accepted. Otherwise the next token is drawn from the probabilities of the tokens that are not children.

    u is computed from the target's own draw y: uniform in (c_{i-1}, c_i) if y is child i, else in (c_k, 1). So u is
    uniform over all draws, the token after the last accepted one is y, and with both thresholds at 1 the verdict equals
    that of `verify_tree` bit by bit. Greedy rows put all probability on one token: the thresholds do not change them.

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

        def visit(node: Node) -> tuple[Int32[Array, "B"], Bool[Array, "B N"]]:
            token, law = node.draw_with_law()
            uniform = jax.vmap(coin)(inputs.rows.seed, node.position)
            samples = inputs.rows.temperature > 0
            law = jax.nn.softmax(law, axis=-1)
            return token, jax.vmap(self._accepted)(tree.tokens, node.children, token, law, uniform, samples)

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


@dataclass(frozen=True)
class SyntheticAcceptance:
    """A `Verifier` that accepts drafts at given rates, to measure how fast a draft with these rates would be. The text
    is not the model's.

    Each step follows one path to a node of greatest depth and accepts its first m drafts, where m is drawn from the
    request's seed with P(m >= d) = ``rates[d - 1]``. The token after them is the target's draw. The mean accept length
    is 1 + sum(rates), if every tree is at least ``len(rates)`` deep. A draft that a grammar forbids is not accepted.

    Source: vLLM's `synthetic_acceptance_rates`.

    Args:
        rates: one for each depth, from 0 to 1, none larger than the one before.

    Raises:
        ParameterError: no rates, or rates out of range or order.
    """

    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        bounded = (1.0, *self.rates)
        if not self.rates or not all(0 <= rate <= before for before, rate in pairwise(bounded)):
            given = " ".join(map(str, self.rates)) or "none"
            problem = f"must be numbers from 1 to 0, none larger than the one before, got {given}"
            raise ParameterError("rates", problem, type(self).__name__)

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
        """Arguments: see `verify_tree`."""
        uniform = jax.vmap(coin)(inputs.rows.seed, prefix_length)
        count = jnp.sum(uniform[:, None] < jnp.asarray(self.rates, jnp.float32)[None], axis=1)
        reached = tree.valid & (tree.depth <= jnp.minimum(count, depth)[:, None])
        last = jnp.argmax(jnp.where(reached, tree.depth, -1), axis=1)
        on_path = jnp.take_along_axis(ancestor_mask(tree), last[:, None, None], axis=1)[:, 0]

        def visit(node: Node) -> tuple[Int32[Array, "B"], Bool[Array, "B N"]]:
            accepted = node.children & on_path
            if node.allowed is not None:
                tokens = jnp.maximum(tree.tokens, 0)
                word = jnp.take_along_axis(node.allowed, tokens // 32, axis=1)
                accepted &= (word >> (tokens % 32).astype(jnp.uint32)) & 1 == 1
            return node.draw(), accepted

        drawn, matches = walk_tree(visit, tree, logits, inputs, prefix_length, emitted, depth, allowed)
        return find_verdict(tree, drawn, depth, matches)
