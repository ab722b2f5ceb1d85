"""NGRAM: drafts the continuations of earlier occurrences of the last few tokens. No model; state on the device.

A ring of committed tokens is shared by all requests; each token links to the next and the previous token of its
request. A hash table leads from a window (the last w tokens) to ring positions where such a window ended. A proposal
looks up the current suffix for every w, follows the links back to measure each match and forward to read its
continuation, and merges the continuations into one tree:

    context ... the cat sat|        ring  the cat sat on the mat . the cat sat by the door
    matches of "the cat sat"        on the mat .   and   by the door
    tree                            sat ─┬─ by ── the ── door         most recent first
                                         └─ on ── the ── mat

Options and breadths follow SGLang's NGRAM (sgl-project/sglang `cpp_ngram`). Stale or colliding entries can only cost
acceptance: every match is checked against the ring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int32, UInt32
from specjax_kernels.platforms import by_platform

from specjax.cache import PoolShape
from specjax.drafters.base import (
    Context,
    Drafter,
    DraftState,
    Observation,
    Params,
    Speculation,
    keep_at_page_ends,
    kept_at_page_end,
    take_rows,
)
from specjax.drafters.options import DraftOptions, Loaded
from specjax.limits import ParameterError, documented, setting
from specjax.tree import NO_PARENT, NO_TOKEN, DraftTree, Pool, best_nodes, rerank, roots

NOWHERE = -1  # no ring position: an empty table entry or the end of a text; never an index to write at
WAYS = 8  # positions in a bucket of the table
CPU_NODES = 4  # default N on a CPU
MATCH_BEFORE_HEAD = 4
"""Fewest tokens of a match before a head on a CPU. After shorter ones the head's drafts are accepted more often: steps
of 3 nodes have 1.87 tokens, with matches of 2 tokens 1.81; at T = 1, 1.43 and 1.38."""
CPU_MATCH = 6  # there, longer matches than this drafted no better on the evaluation sets, and looking takes time


@documented
@dataclass(frozen=True)
class Ngram(DraftOptions):
    """Drafts from n-grams of earlier text; needs no draft head. Defaults are SGLang's."""

    algorithm: ClassVar[str] = "NGRAM"

    nodes: int | None = setting(
        None,
        f"nodes N of a tree, including the root; default: 12; on a CPU {CPU_NODES}, "
        "and no more than the matched tokens",
        minimum=2,
        maximum=64,
        flag="speculative_num_draft_tokens",
    )
    min_match: int = setting(
        1,
        "fewest tokens of a match; at most `max_match`; on a CPU without `nodes` at least 2, and at least "
        f"{MATCH_BEFORE_HEAD} before a head",
        minimum=1,
        maximum=64,
        flag="speculative_ngram_min_match_window_size",
    )
    max_match: int = setting(
        12,
        f"most tokens of a match; on a CPU without `nodes` at most {CPU_MATCH}",
        minimum=1,
        maximum=64,
        flag="speculative_ngram_max_match_window_size",
    )
    min_breadth: int = setting(
        1,
        "fewest children of a node; at most `max_breadth`",
        minimum=1,
        maximum=64,
        flag="speculative_ngram_min_bfs_breadth",
    )
    max_breadth: int = setting(
        10,
        "most children of a node; fewer for longer matches and deeper nodes",
        minimum=1,
        maximum=64,
        flag="speculative_ngram_max_bfs_breadth",
    )
    branch_length: int = setting(18, "tokens of the longest continuation", minimum=1, maximum=64)
    capacity: int = setting(1_000_000, "tokens to remember, of all requests", minimum=1024, maximum=2**24)
    match_type: Literal["BFS", "PROB"] = setting(
        "BFS",
        "order of continuations: the most recent first (BFS), or the most frequent first (PROB)",
        parse=str.upper,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for low, high in (("min_match", "max_match"), ("min_breadth", "max_breadth")):
            least, most = getattr(self, low), getattr(self, high)
            if least > most:
                raise ParameterError(low, f"must be from 1 to {high}, got {least} and {most}", "Ngram")

    @property
    def width(self) -> int:
        """N; on a CPU `speculation` has another default."""
        return self.nodes or 12

    @property
    def depth(self) -> int:
        """D: the depth of a chain of all nodes, or of a whole branch."""
        return min(self.width - 1, self.branch_length)

    @property
    def branches(self) -> int:
        """Number of continuations that a proposal merges."""
        return max(16, self.max_breadth)

    def speculation(self, loaded: Loaded) -> Speculation:
        # On a CPU each node costs time, and longer matches are continued further. A GPU verifies twelve tokens in the
        # time of one.
        cautious = self.nodes is None and loaded.platform == "cpu"
        least = max(self.min_match, min(2, self.max_match))
        most = max(least, min(self.max_match, CPU_MATCH))
        options = self if not cautious else replace(self, nodes=CPU_NODES, min_match=least, max_match=most)
        return Speculation(
            ngram_drafter(options, cautious=cautious),
            explicit_width=self.nodes is not None,
            every_step=False,  # where nothing matches, nodes are computed for nothing
            resize=lambda nodes: ngram_drafter(replace(options, nodes=nodes), cautious=cautious),
            lookup=options.width,
            note=f"remembers the last {self.capacity:,} tokens of all requests",
        )


class NgramState(NamedTuple):
    """A ring of Q tokens, a table of Y buckets, and the end of each row's text in the ring."""

    tokens: Int32[Array, "Q"]
    next: Int32[Array, "Q"]  # ring position of the request's next token
    previous: Int32[Array, "Q"]
    salt: UInt32[Array, "Q"]
    table: Int32[Array, "Y 8"]  # ring positions where windows with this hash ended
    cursor: Int32[Array, ""]  # next ring position to write: the oldest token
    tail: Int32[Array, "R"]  # ring position of the row's last committed token
    recent: Int32[Array, "R W1"]  # the row's last W - 1 committed tokens, NO_TOKEN before its start
    length: Int32[Array, "R"]  # tokens observed of the row; differs from `prefix_length` for a new request
    ends: Int32[Array, "P W"]  # `tail` and `recent` at the last token of each page, for requests that start after it


def ngram_drafter(config: Ngram, *, cautious: bool = False) -> Drafter:
    """Drafts by matching. [B, N] trees; where nothing matches only the root is valid.

    Args:
        cautious: a tree has at most as many nodes as its longest match has tokens, or two.
    """
    window = config.max_match
    # Each token has an entry for each window size. Four places a token keep most entries until it is overwritten.
    sizes = window - config.min_match + 1
    buckets = 1 << max(config.capacity * min(sizes, 4) // WAYS - 1, 1).bit_length()

    def init(params: Params, rows: int, pool: PoolShape) -> DraftState:
        del params
        return NgramState(
            tokens=jnp.full(config.capacity, NO_TOKEN, jnp.int32),
            next=jnp.full(config.capacity, NOWHERE, jnp.int32),
            previous=jnp.full(config.capacity, NOWHERE, jnp.int32),
            salt=jnp.zeros(config.capacity, jnp.uint32),
            table=jnp.full((buckets, WAYS), NOWHERE, jnp.int32),
            cursor=jnp.int32(0),
            tail=jnp.full(rows, NOWHERE, jnp.int32),
            recent=jnp.full((rows, window - 1), NO_TOKEN, jnp.int32),
            length=jnp.zeros(rows, jnp.int32),
            ends=jnp.full((pool.pages, window), NOWHERE, jnp.int32),
        )

    places = config.width - 1

    def propose(params: Params, state: NgramState, context: Context) -> tuple[DraftTree, NgramState]:
        del params
        recent, _ = _row_tail(state, context)
        suffix = jnp.concatenate([recent, context.root[:, None]], axis=1)
        positions, agreeing = _matches(state, suffix, context.salt, config)

        def merged(*_: Array) -> DraftTree:
            continues = _follow(state.next, state.previous, positions) != NOWHERE
            matched = jnp.where((agreeing >= config.min_match) & continues, agreeing, 0)
            pool = jax.vmap(partial(_candidates, state, config))(positions, matched, context.salt)
            pad = ((0, 0), (0, max(places - pool.tokens.shape[1], 0)))  # `rerank` needs a candidate for each place
            scores = jnp.pad(pool.scores, pad, constant_values=-jnp.inf)
            pool = Pool(*(jnp.pad(field, pad) for field in pool[:3]), scores=scores)
            scores = jnp.where(context.active[:, None], scores, -jnp.inf)
            tree = rerank(context.root, pool._replace(scores=scores), config.width)
            return best_nodes(tree, jnp.maximum(jnp.max(matched, axis=1), 2)) if cautious else tree

        def on_cpu(some: Array) -> DraftTree:  # elsewhere a branch may cost more than it saves
            return jax.lax.cond(some, merged, lambda: roots(context.root, config.width))

        some = jnp.any(context.active[:, None] & (agreeing >= config.min_match))
        return by_platform(some, cpu=on_cpu, default=merged), state

    return Drafter(
        "NGRAM",
        features=None,
        width=config.width,
        depth=config.depth,
        init=init,
        propose=propose,
        observe=lambda params, state, context, seen: _append(state, context, seen, config),
    )


def _row_tail(state: NgramState, context: Context) -> tuple[Int32[Array, "B W1"], Int32[Array, "B"]]:
    """The rows' last committed tokens, and the ring position of the last one; NO_TOKEN and NOWHERE for a new request.
    A request that starts with another's pages continues that text, unless the ring has been overwritten."""
    length, recent, tail = take_rows((state.length, state.recent, state.tail), context)
    continued = (length == context.prefix_length) & (context.prefix_length > 0)
    end, there = kept_at_page_end(state.ends, context)
    recent = jnp.where(continued[:, None], recent, jnp.where(there[:, None], end[:, 1:], NO_TOKEN))

    def with_new_requests(*_: Array) -> Int32[Array, "B"]:
        at = jnp.maximum(end[:, 0], 0)
        same = (state.salt[at] == context.salt) & (end[:, 0] != NOWHERE)
        if recent.shape[1]:
            same &= state.tokens[at] == end[:, -1]
        return jnp.where(continued, tail, jnp.where(there & same, end[:, 0], NOWHERE))

    def on_cpu(continues: Array) -> Int32[Array, "B"]:
        return jax.lax.cond(continues, lambda: tail, with_new_requests)

    return recent, by_platform(jnp.all(continued), cpu=on_cpu, default=with_new_requests)


def _window_hashes(backwards: Int32[Array, "W *X"], salt: UInt32[Array, ""]) -> UInt32[Array, "W *X"]:
    """Hashes of windows of 1, 2, .. W tokens; ``backwards[i]`` is the token i before a window's last."""
    # Odd multipliers that differ by place, so that the order of tokens counts. Arithmetic is modulo 2**32.
    place = 2 * np.arange(backwards.shape[0], dtype=np.uint32).reshape(-1, *[1] * (backwards.ndim - 1)) + 1
    value = _mixed(backwards.astype(jnp.uint32) + place * np.uint32(0x9E3779B9)) * (place * np.uint32(0x85EBCA6B))
    return _mixed(jnp.cumsum(value, axis=0, dtype=jnp.uint32) + (salt + place) * np.uint32(0xC2B2AE35))


def _mixed(value: UInt32[Array, "*X"]) -> UInt32[Array, "*X"]:
    """Each bit depends on all bits of `value` (Prospecting for Hash Functions, nullprogram.com: lowbias32)."""
    value = (value ^ (value >> 16)) * np.uint32(0x7FEB352D)
    value = (value ^ (value >> 15)) * np.uint32(0x846CA68B)
    return value ^ (value >> 16)


def _scan(
    step: Callable[..., tuple[Any, Any]], start: Any, xs: Any = None, length: int | None = None
) -> tuple[Any, Any]:
    """A loop on a CPU, which XLA compiles faster than its unrolled iterations. Unrolled on a GPU, where the host or a
    graph node would launch a loop."""
    unrolled = partial(jax.lax.scan, step, length=length, unroll=True)
    return by_platform(start, xs, cpu=partial(jax.lax.scan, step, length=length), default=unrolled)


def _shifted(text: Int32[Array, "X"], window: int) -> Int32[Array, "W Y"]:
    """The tokens 0, 1, .. window - 1 back from each of the last Y = X - window + 1 places."""
    return text[np.arange(window - 1, text.shape[0]) - np.arange(window)[:, None]]


def _follow(links: Int32[Array, "Q"], back_links: Int32[Array, "Q"], at: Int32[Array, "*Z"]) -> Int32[Array, "*Z"]:
    """The next position, or NOWHERE. A link without its back link has been overwritten."""
    to = links[jnp.maximum(at, 0)]
    agrees = back_links[jnp.maximum(to, 0)] == at
    return jnp.where((at != NOWHERE) & (to != NOWHERE) & agrees, to, NOWHERE)


def _matches(
    state: NgramState, suffix: Int32[Array, "B W"], salt: UInt32[Array, "B"], config: Ngram
) -> tuple[Int32[Array, "B F"], Int32[Array, "B F"]]:
    """Ring positions in the table for each request's suffix, possibly repeated, and the number of tokens up to each
    that agree with the suffix."""
    buckets, window = state.table.shape[0], config.max_match
    hashes = jax.vmap(_window_hashes)(suffix[:, ::-1], salt)[:, config.min_match - 1 :]
    positions = state.table[(hashes & jnp.uint32(buckets - 1)).astype(jnp.int32)].reshape(suffix.shape[0], -1)

    def further(i: Any, walk: tuple[Array, Array]) -> tuple[Array, Array]:
        at, matched = walk
        same = (state.tokens[jnp.maximum(at, 0)] == suffix[:, window - 1 - i, None]) & (at != NOWHERE)
        same &= state.salt[jnp.maximum(at, 0)] == salt[:, None]
        at = _follow(state.previous, state.next, jnp.where(same, at, NOWHERE))
        return at, matched + same.astype(jnp.int32)

    def on_cpu(at: Array, matched: Array) -> Array:  # each iteration costs time, and most suffixes are new
        def any_left(walk: tuple[Array, tuple[Array, Array]]) -> Array:
            i, (at, _) = walk
            return (i < window) & jnp.any(at != NOWHERE)

        start = jnp.int32(0), (at, matched)
        return jax.lax.while_loop(any_left, lambda walk: (walk[0] + 1, further(*walk)), start)[1][1]

    def unrolled(at: Array, matched: Array) -> Array:
        for i in range(window):
            at, matched = further(i, (at, matched))
        return matched

    return positions, by_platform(positions, jnp.zeros_like(positions), cpu=on_cpu, default=unrolled)


def _candidates(
    state: NgramState, config: Ngram, positions: Int32[Array, "F"], matched: Int32[Array, "F"], salt: UInt32[Array, ""]
) -> Pool:
    """Merges the continuations of one request's matches. Pool index = (depth - 1) * A + branch."""
    capacity = config.capacity
    # Several window sizes may give one position. Longest match first, then most recent.
    place = jnp.arange(positions.shape[0])
    repeated = jnp.any((positions[:, None] == positions[None, :]) & (place[None, :] < place[:, None]), axis=1)
    usable = (matched > 0) & ~repeated
    age = jnp.mod(state.cursor - 1 - positions, capacity)
    # At most 64 * 2**24 + 2**24: fits int32.
    order = jnp.where(usable, matched * capacity + (capacity - 1 - age), -1)
    count = min(config.branches, positions.shape[0])
    best, index = jax.lax.top_k(order, count)
    matched = jnp.where(best >= 0, matched[index], 0)
    at = jnp.where(best >= 0, positions[index], NOWHERE)

    def onward(at: Array, _: None) -> tuple[Array, Array]:
        at = _follow(state.next, state.previous, at)
        at = jnp.where(state.salt[jnp.maximum(at, 0)] == salt, at, NOWHERE)
        return at, jnp.where(at != NOWHERE, state.tokens[jnp.maximum(at, 0)], NO_TOKEN)

    _, tokens = _scan(onward, at, length=config.depth)
    return _merge(tokens.T, matched, config)


def _merge(tokens: Int32[Array, "A D"], matched: Int32[Array, "A"], config: Ngram) -> Pool:
    """Merges branches into one tree. A node is a distinct prefix and belongs to the first branch with it.

    Example: branches [by the], [on the], [by a] -> nodes by, on (depth 1), the<by, the<on, a<by (depth 2).
    """
    count, depth = tokens.shape
    there = tokens != NO_TOKEN
    equal = (tokens[:, None, :] == tokens[None, :, :]) & there[:, None, :]
    same: Bool[Array, "A A D"] = jnp.cumprod(equal, axis=2).astype(bool)  # equal up to and including depth d
    owner = jnp.argmax(same, axis=1).astype(jnp.int32)  # [A, D]: the first branch with this prefix
    branch = jnp.arange(count, dtype=jnp.int32)[:, None]
    level = jnp.arange(1, depth + 1, dtype=jnp.int32)[None, :]
    is_node = there & (owner == branch)

    # Fewer children for longer matches and deeper nodes; the earliest siblings are kept.
    slope = (config.max_breadth - config.min_breadth) / (config.max_match - config.min_match + 1)
    narrowing = (config.max_match - matched[:, None] - level + 1).astype(jnp.float32)
    breadth = jnp.maximum(jnp.floor(config.min_breadth + slope * narrowing), 1).astype(jnp.int32)
    above = jnp.concatenate([jnp.ones((count, count, 1), bool), same[:, :, :-1]], axis=2)
    sibling = above & is_node[None, :, :] & (branch[None, :, :] < branch[:, None, :])
    included = is_node & (jnp.sum(sibling, axis=1) < breadth)

    def deeper(above: Array, here: tuple[Array, Array]) -> tuple[Array, Array]:
        node, parent = here
        above = node & above[parent]
        return above, above

    # A node needs its parent.
    _, included = _scan(deeper, jnp.ones(count, bool), (included.T, jnp.roll(owner, 1, axis=1).T))
    included = included.T

    # Longest match first, then by level (BFS) or by the number of equal branches (PROB), then most recent.
    votes = jnp.sum(same, axis=1)
    rank = config.max_match - matched[:, None]
    if config.match_type == "PROB":
        rank = rank * (count + 1) + (count - votes)
    rank = (rank * (depth + 1) + level) * count + branch
    parents = jnp.concatenate([jnp.full((count, 1), NO_PARENT), (level[:, :-1] - 1) * count + owner[:, :-1]], axis=1)
    return Pool(
        tokens=tokens.T.reshape(-1),
        parents=parents.astype(jnp.int32).T.reshape(-1),
        depth=jnp.broadcast_to(level, tokens.shape).T.reshape(-1),
        scores=jnp.where(included, -rank.astype(jnp.float32), -jnp.inf).T.reshape(-1),
    )


def _append(state: NgramState, context: Context, seen: Observation, config: Ngram) -> NgramState:
    """Writes committed tokens to the ring, and a table entry for each window that ends with one."""
    tokens, length = seen.tokens, seen.length
    batch, width = tokens.shape
    capacity, window = config.capacity, config.max_match
    buckets, rows = state.table.shape[0], state.length.shape[0]
    recent, tail = _row_tail(state, context)
    offset = jnp.arange(width, dtype=jnp.int32)[None, :]
    new = offset < length[:, None]

    start = state.cursor + jnp.cumsum(length) - length
    at = jnp.mod(start[:, None] + offset, capacity)
    nowhere = capacity + jnp.arange(batch * width, dtype=jnp.int32).reshape(batch, width)
    # Always true, but unknown to the compiler: the write must depend on the reads for the tails, or XLA:CPU copies the
    # ring.
    write = jnp.where(new & (tail[:, None] >= NOWHERE), at, nowhere)
    is_last = offset == length[:, None] - 1
    follows = jnp.where(is_last, NOWHERE, jnp.mod(at + 1, capacity))
    leads = jnp.where(offset == 0, tail[:, None], jnp.mod(at - 1, capacity))
    joins = (length > 0) & (tail != NOWHERE)
    link = jnp.where(joins, tail, capacity + jnp.arange(batch, dtype=jnp.int32))

    text = jnp.concatenate([recent, tokens], axis=1)
    backwards = jax.vmap(_shifted, in_axes=(0, None))(text, window)
    hashes = jax.vmap(_window_hashes)(backwards, context.salt)
    # A window of w tokens exists if the token w - 1 back exists.
    sized = slice(config.min_match - 1, window)
    store = (backwards[:, sized] != NO_TOKEN) & new[:, None, :]
    bucket = (hashes[:, sized] & jnp.uint32(buckets - 1)).astype(jnp.int32)
    # Entries of a salted request, and so its drafts, do not depend on other requests, which move the ring's positions.
    place = jnp.where(context.salt[:, None] == 0, at, context.prefix_length[:, None] + offset)
    way = ((place.astype(jnp.uint32) * jnp.uint32(2654435761)) >> 29).astype(jnp.int32)  # 0..7, well mixed

    row = jnp.where(length > 0, context.slots, rows + jnp.arange(batch, dtype=jnp.int32))
    last = jnp.take_along_axis(at, jnp.maximum(length - 1, 0)[:, None], axis=1)[:, 0]
    before = text[:, np.arange(1, width + 1)[:, None] + np.arange(window - 1)]  # [B, C, W - 1], up to each token
    ends = jnp.concatenate([at[:, :, None], before], axis=2)
    last_tokens = jnp.take_along_axis(text, length[:, None] + jnp.arange(window - 1, dtype=jnp.int32)[None, :], axis=1)
    return NgramState(
        tokens=state.tokens.at[write].set(tokens, mode="drop"),
        next=state.next.at[link].set(at[:, 0], mode="drop").at[write].set(follows, mode="drop"),
        previous=state.previous.at[write].set(leads, mode="drop"),
        salt=state.salt.at[write].set(jnp.broadcast_to(context.salt[:, None], at.shape), mode="drop"),
        table=state.table.at[jnp.where(store, bucket, buckets), way[:, None, :]].set(
            jnp.broadcast_to(at[:, None, :], store.shape), mode="drop"
        ),
        cursor=jnp.mod(state.cursor + jnp.sum(length), capacity),
        tail=state.tail.at[row].set(last, mode="drop"),
        recent=state.recent.at[row].set(last_tokens, mode="drop"),
        length=state.length.at[row].set(context.prefix_length + length, mode="drop"),
        ends=keep_at_page_ends(state.ends, ends, context, seen),
    )
