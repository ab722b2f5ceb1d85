"""Verification: accept drafted tokens that equal the target's own draws.

The walk starts at the root and follows the child whose token the target draws; the last drawn token is the bonus token.
Every emitted token is the target's own draw, so the output is lossless for any tree with distinct siblings, greedy or
sampled. `find_verdict` needs no loop: a node is accepted if it and all its ancestors equal their parents' draws, which
is one AND over the ancestor mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float32, Int32, UInt32
from specjax_kernels import largest, mesh
from specjax_kernels.platforms import has_kernels

from specjax.cache import Active, Logits, PerRequest
from specjax.limits import ParameterError, check, documented, setting
from specjax.sampling import DrawInputs, coin, draw, draw_straight, draw_with_law, is_plain, mask_forbidden
from specjax.tree import NO_TOKEN, DraftTree, ancestor_mask


class Verdict(NamedTuple):
    """Accepted nodes of each tree, and the target's draws.

    Attributes:
        path: int32 [B, J], J = D + 1. Accepted node indices, root first; 0 after the last one.
        accepted: int32 [B]. m, number of accepted drafts, from 0 to D.
        tokens: int32 [B, J]. Accepted drafts, then the bonus token; NO_TOKEN after it.
        drawn: int32 [B, N]. The target's draw at each node; NO_TOKEN if not drawn.
    """

    path: Int32[Array, "B J"]
    accepted: PerRequest
    tokens: Int32[Array, "B J"]
    drawn: Int32[Array, "B N"]


Verifier: TypeAlias = Callable[..., Verdict]
"""A function with the arguments of `verify_tree` that decides which drafts are accepted. Traced into the step."""


def is_lossless(verify: Verifier) -> bool:
    """True if the text with this verifier is the target's own: for `verify_tree`, and for a verifier whose attribute
    `lossy` is False. Otherwise the text depends on the drafts."""
    function = verify.func if isinstance(verify, partial) else verify
    return function is verify_tree or getattr(function, "lossy", True) is False


def verify_tree(
    tree: DraftTree,
    logits: Logits,
    inputs: DrawInputs,
    prefix_length: PerRequest,
    emitted: PerRequest,
    *,
    depth: int,
    allowed: UInt32[Array, "B N W"] | None = None,
    straight: bool | None = None,
) -> Verdict:
    """Draws a token at each node and accepts the longest path of drawn tokens.

    Args:
        tree: drafted trees of N nodes.
        logits: float32 [B, N, V]. Raw logits of the target at each node.
        inputs: sampling parameters and history; see `specjax.sampling.draw`.
        prefix_length: int32 [B]. n, the root's position. The token drawn at a node has position n + depth + 1.
        emitted: int32 [B]. Number of emitted tokens, root included.
        depth: D, static upper bound of the nodes' depths.
        allowed: uint32 [B, N, ceil(V / 32)]. A grammar's token bits for each node; None allows all tokens.
        straight: draw at all nodes at once with GPU kernels, instead of on the walk with loops and branches; None
            decides by platform. The draws are equal.

    Returns:
        The `Verdict`. If no row samples or edits its logits, one branch draws the argmax instead.
    """
    straight = has_kernels() and mesh.devices() == 1 if straight is None else straight
    # `find_verdict` needs this ancestor mask, too; outside of the branch it is computed once.
    draws = partial(_draw_at_all_nodes, ancestor_mask(tree)) if straight else _draw_on_walk
    walk = partial(draws, tree, logits, inputs, prefix_length, emitted, depth, allowed)
    if allowed is not None and straight:
        return find_verdict(tree, walk(), depth)
    # `min_tokens` masks stop ids at deeper nodes only if it masks them at the root.
    plain = jnp.all(is_plain(inputs.rows, emitted, logits.shape[-1]) | ~inputs.active)
    if allowed is not None:  # avoids the walk, whose loop and branches copy logits
        masked = jax.vmap(jax.vmap(mask_forbidden))
        return find_verdict(tree, jax.lax.cond(plain, lambda: largest(masked(logits, allowed))[0], walk), depth)
    greedy = largest(logits)[0] if inputs.greedy is None else inputs.greedy
    return find_verdict(tree, jax.lax.cond(plain, lambda: greedy, walk), depth)


def find_verdict(
    tree: DraftTree, drawn: Int32[Array, "B N"], depth: int, matches: Bool[Array, "B N"] | None = None
) -> Verdict:
    """Accepts the path to the deepest node that matches together with all its ancestors.

    Args:
        tree, depth: see `verify_tree`.
        drawn: int32 [B, N]. The target's draw at each node.
        matches: bool [B, N]. True for nodes that may follow their parent (lossy): tokens are the drafts on the path and
            the draw at its end. None: nodes whose token is the parent's draw (lossless).
    """
    width, ancestors = tree.width, ancestor_mask(tree)
    lossless = matches is None
    if matches is None:
        matches = tree.tokens == jnp.take_along_axis(drawn, jnp.maximum(tree.parents, 0), axis=1)
    # A drafter that declares too small a depth may propose deeper nodes, which the path cannot hold.
    matches = (tree.valid & matches & (tree.depth <= depth)).at[:, 0].set(True)
    accepted = tree.valid & jnp.all(matches[:, None, :] | ~ancestors, axis=2)
    last = jnp.argmax(jnp.where(accepted, tree.depth, -1), axis=1)
    count = jnp.take_along_axis(tree.depth, last[:, None], axis=1)[:, 0]
    # path[j] is the one node of depth j among the last node's ancestors (itself included).
    on_path = jnp.take_along_axis(ancestors, last[:, None, None], axis=1)[:, 0]
    level = jnp.arange(depth + 1, dtype=jnp.int32)
    at_level = on_path[:, None, :] & (tree.depth[:, None, :] == level[None, :, None])
    node = jnp.arange(width, dtype=jnp.int32)
    path = jnp.sum(jnp.where(at_level, node, 0), axis=2)
    tokens = jnp.take_along_axis(drawn, path, axis=1)
    if not lossless:
        below = jnp.take_along_axis(tree.tokens, jnp.roll(path, -1, axis=1), axis=1)
        tokens = jnp.where(level[None, :] < count[:, None], below, tokens)
    tokens = jnp.where(level[None, :] <= count[:, None], tokens, NO_TOKEN)
    return Verdict(path, count, tokens, drawn)


def greedy_and_finite(logits: Float32[Array, "B N V"]) -> tuple[Int32[Array, "B N"], Bool[Array, "B N"]]:
    """Computes the argmax of logits (`DrawInputs.greedy`), and a mask of logits from which a token can be drawn.

    Such logits have no NaN and no +inf and are not all -inf. Checking the maximum is enough, because argmax prefers NaN
    to any number.
    """
    place, value = largest(logits)
    return place, jnp.isfinite(value)


def _draw_at_all_nodes(
    ancestors: Bool[Array, "B N N"],
    tree: DraftTree,
    logits: Logits,
    inputs: DrawInputs,
    prefix_length: PerRequest,
    emitted: PerRequest,
    depth: int,
    allowed: UInt32[Array, "B N W"] | None,
) -> Int32[Array, "B N"]:
    """Draws at all nodes as if the walk visited each; on a GPU one level of the walk takes as long as all nodes."""
    level = jnp.arange(1, depth + 1, dtype=jnp.int32)
    on_path = ancestors[:, :, None, :] & (tree.depth[:, None, :] == level[None, :, None])[:, None]
    path = jnp.max(jnp.where(on_path, tree.tokens[:, None, None, :], NO_TOKEN), axis=3)
    position = prefix_length[:, None] + tree.depth + 1
    return draw_straight(logits, inputs._replace(greedy=None), position, emitted[:, None] + tree.depth, path, allowed)


class _Walk(NamedTuple):
    level: Int32[Array, ""]
    node: PerRequest
    alive: Active
    drawn: Int32[Array, "B N"]
    matches: Bool[Array, "B N"]  # the accepted nodes, the root excluded
    path: Int32[Array, "B J"]  # their tokens


def walk_tree(
    visit: Callable[..., tuple[Int32[Array, "B"], Bool[Array, "B N"]]],
    tree: DraftTree,
    logits: Logits,
    inputs: DrawInputs,
    prefix_length: PerRequest,
    emitted: PerRequest,
    depth: int,
    allowed: UInt32[Array, "B N W"] | None,
) -> tuple[Int32[Array, "B N"], Bool[Array, "B N"]]:
    """Walks down from the root, level by level, to children that `visit` accepts.

    Args:
        visit: (arguments of `specjax.sampling.draw`, children [B, N]) -> the token drawn at a node of each tree, and at
            most one accepted child.
        tree, logits, inputs, prefix_length, emitted, depth, allowed: see `verify_tree`.

    Returns:
        Draws at the visited nodes, int32 [B, N], NO_TOKEN elsewhere; and the accepted nodes, bool [B, N].
    """
    batch = jnp.arange(tree.tokens.shape[0])

    def descend(walk: _Walk) -> _Walk:
        at_node = mesh.whole(jnp.take_along_axis(logits, walk.node[:, None, None], axis=1)[:, 0])
        bits = None if allowed is None else allowed[batch, walk.node]
        draws, position = inputs._replace(active=walk.alive, greedy=None), prefix_length + walk.level + 1
        children = tree.valid & (tree.parents == walk.node[:, None])
        token, taken = visit(at_node, draws, position, emitted + walk.level, walk.path, bits, children)
        drawn = walk.drawn.at[batch, walk.node].set(jnp.where(walk.alive, token, walk.drawn[batch, walk.node]))
        alive = walk.alive & jnp.any(taken, axis=1)
        node = jnp.where(alive, jnp.argmax(taken, axis=1).astype(jnp.int32), walk.node)
        matches = walk.matches | (taken & alive[:, None])
        path = walk.path.at[:, walk.level].set(jnp.where(alive, tree.tokens[batch, node], NO_TOKEN), mode="drop")
        return _Walk(walk.level + 1, node, alive, drawn, matches, path)

    start = _Walk(
        level=jnp.int32(0),
        node=jnp.zeros_like(prefix_length),
        alive=inputs.active,
        drawn=jnp.full(tree.tokens.shape, NO_TOKEN, jnp.int32),
        matches=jnp.zeros(tree.tokens.shape, bool),
        path=jnp.full((batch.shape[0], depth + 1), NO_TOKEN, jnp.int32),
    )
    end = jax.lax.while_loop(lambda walk: (walk.level <= depth) & jnp.any(walk.alive), descend, start)
    return end.drawn, end.matches


def _draw_on_walk(tree: DraftTree, *rest: Any) -> Int32[Array, "B N"]:
    """Draws only at the nodes that the walk visits: processing one node costs more than the argmax of all nodes."""

    def visit(*node: Any) -> tuple[Int32[Array, "B"], Bool[Array, "B N"]]:
        *arguments, children = node
        token = draw(*arguments)
        return token, children & (tree.tokens == token[:, None])

    return walk_tree(visit, tree, *rest)[0]


# Lossy verification

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

        def visit(*node: Any) -> tuple[Int32[Array, "B"], Bool[Array, "B N"]]:
            *arguments, bits, children = node
            accepted = children & on_path
            if bits is not None:
                tokens = jnp.maximum(tree.tokens, 0)
                word = jnp.take_along_axis(bits, tokens // 32, axis=1)
                accepted &= (word >> (tokens % 32).astype(jnp.uint32)) & 1 == 1
            return draw(*arguments, bits), accepted

        drawn, matches = walk_tree(visit, tree, logits, inputs, prefix_length, emitted, depth, allowed)
        return find_verdict(tree, drawn, depth, matches)
