"""Verification: accept drafted tokens that equal the target's own draws.

The walk starts at the root and follows the child whose token the target draws; the last drawn token is the bonus token.
Every emitted token is the target's own draw, so the output is lossless for any tree with distinct siblings, greedy or
sampled. `find_verdict` needs no loop: a node is accepted if it and all its ancestors equal their parents' draws, which
is one AND over the ancestor mask. `specjax.acceptance` has verifiers that accept other drafts, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float32, Int32, UInt32
from specjax_kernels import largest, mesh
from specjax_kernels.platforms import has_kernels

from specjax.cache import Active, Logits, PerRequest
from specjax.sampling import DrawInputs, draw, draw_straight, draw_with_law, is_plain, mask_forbidden
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
    ancestors = ancestor_mask(tree)  # `find_verdict` needs it, too: computed once, outside of the branch

    def walk() -> Array:
        arguments = (tree, logits, inputs, prefix_length, emitted, depth, allowed)
        return _draw_at_all_nodes(ancestors, *arguments) if straight else _draw_on_walk(*arguments)

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


class Node(NamedTuple):
    """A node of each tree that the walk visits.

    Attributes:
        logits, inputs, position, emitted, path, allowed: arguments of `specjax.sampling.draw`.
        children: bool [B, N]. The node's valid children.
    """

    logits: Float32[Array, "B V"]
    inputs: DrawInputs
    position: PerRequest
    emitted: PerRequest
    path: Int32[Array, "B J"]
    allowed: UInt32[Array, "B W"] | None
    children: Bool[Array, "B N"]

    def draw(self) -> Int32[Array, "B"]:
        return draw(self.logits, self.inputs, self.position, self.emitted, self.path, self.allowed)

    def draw_with_law(self) -> tuple[Int32[Array, "B"], Float32[Array, "B V"]]:
        return draw_with_law(self.logits, self.inputs, self.position, self.emitted, self.path, self.allowed)


class _Walk(NamedTuple):
    level: Int32[Array, ""]
    node: PerRequest
    alive: Active
    drawn: Int32[Array, "B N"]
    matches: Bool[Array, "B N"]  # the accepted nodes, the root excluded
    path: Int32[Array, "B J"]  # their tokens


def walk_tree(
    visit: Callable[[Node], tuple[Int32[Array, "B"], Bool[Array, "B N"]]],
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
        visit: node -> the token drawn there, and at most one accepted child.
        tree, logits, inputs, prefix_length, emitted, depth, allowed: see `verify_tree`.

    Returns:
        Draws at the visited nodes, int32 [B, N], NO_TOKEN elsewhere; and the accepted nodes, bool [B, N].
    """
    batch = jnp.arange(tree.tokens.shape[0])

    def descend(walk: _Walk) -> _Walk:
        at_node = mesh.whole(jnp.take_along_axis(logits, walk.node[:, None, None], axis=1)[:, 0])
        token, taken = visit(
            Node(
                logits=at_node,
                inputs=inputs._replace(active=walk.alive, greedy=None),
                position=prefix_length + walk.level + 1,
                emitted=emitted + walk.level,
                path=walk.path,
                allowed=None if allowed is None else allowed[batch, walk.node],
                children=tree.valid & (tree.parents == walk.node[:, None]),
            )
        )
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


def _draw_on_walk(
    tree: DraftTree,
    logits: Logits,
    inputs: DrawInputs,
    prefix_length: PerRequest,
    emitted: PerRequest,
    depth: int,
    allowed: UInt32[Array, "B N W"] | None,
) -> Int32[Array, "B N"]:
    """Draws only at the nodes that the walk visits: processing one node costs more than the argmax of all nodes."""

    def visit(node: Node) -> tuple[Int32[Array, "B"], Bool[Array, "B N"]]:
        token = node.draw()
        return token, node.children & (tree.tokens == token[:, None])

    return walk_tree(visit, tree, logits, inputs, prefix_length, emitted, depth, allowed)[0]
