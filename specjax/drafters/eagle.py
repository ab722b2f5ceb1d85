"""EAGLE: a head of one layer continues the target's features, level by level, and the best candidates form a tree.

Serves EAGLE-1/2, EAGLE-3 and MTP heads alike (`specjax.models.draft_head`); the tree is EAGLE-2's. n tokens are
committed, the root x_n is the last one drawn, and the head's cache holds n slots, slot t made of (f_t, x_{t+1}):

    observe   the tokens that became certain go through the head with the TARGET's features; their slots are kept, and
              so is the output at the last one
    propose   that output -> the k likeliest tokens: level 1
              D - 1 times: the k best of a level run in one forward (feature: the parent's output; position
              n + level - 1; they see the n slots, their ancestors and themselves) and bring k candidates each
              of all candidates the N - 1 best by cumulative log-probability are the tree

An unsure head may propose less, or nothing (`Confidence`): on a CPU each checked node costs time.

The slots of tree nodes never reach a page. Source: SafeAILab/EAGLE `topK_genrate`; docs/algorithms.md derives the
alignment.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Float32, Int32
from specjax_kernels import CAUSAL, CHEAP_ROWS, pack_bits

from specjax.cache import PoolShape, commit, init_cache
from specjax.config import HeadConfig
from specjax.drafters.base import Context, Drafter, DraftState, Observation, Params
from specjax.drafters.options import TreeShape
from specjax.limits import check, limited
from specjax.models.blocks import KeyValue, Past, joined, key_value_spec
from specjax.models.draft_head import DraftHead, draft_head
from specjax.models.head_spec import head_spec
from specjax.models.target import Target
from specjax.tree import NO_PARENT, DraftTree, Pool, chain, log_total, rerank, top_k_children


class EagleState(NamedTuple):
    cache: KeyValue  # [P, S, K, E]: the head's one layer, in the target's pages
    hidden: Float[Array, "R M"]  # the head's output at the row's last slot: predicts what follows the root


@dataclass(frozen=True)
class Confidence:
    """The minimum probability of a draft.

    A candidate becomes a node only if the product of the head's probabilities along its path is at least `least`.
    Scores never grow along a path, so the remaining candidates are a tree. Inactive entries propose nothing.

        least 0.3       the .9 ─┬─ cat .8 (.72) ── sat .4 (.29, left out)
                                └─ dog .1 (.09, left out)
    """

    least: float = limited(0.0, 0, below=1)  # llama.cpp's draft-p-min compares each draft's own probability instead
    skips: bool = False  # levels without parents; a branch costs nothing on a CPU, but a GPU would ask the host

    def __post_init__(self) -> None:
        check(self)

    @property
    def note(self) -> str:
        return f"; only drafts of a probability of at least {self.least:g}" if self.least else ""

    def cut(self, scores: Float32[Array, "B k"], context: Context) -> Float32[Array, "B k"]:
        """The scores, -inf below the minimum."""
        if not self.least:
            return scores
        return jnp.where((scores >= math.log(self.least)) & context.active[:, None], scores, -jnp.inf)

    def expand(self, scores: Float32[Array, "B k"], run: Callable[[], _Expanded]) -> _Expanded:
        """`run()`, the candidates below nodes with these scores; if all are -inf, zeros with scores of -inf."""
        if not (self.least and self.skips):
            return run()

        def nothing() -> _Expanded:
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(run))
            return zeros._replace(scores=jnp.full_like(zeros.scores, -jnp.inf))

        return jax.lax.cond(jnp.any(scores > -jnp.inf), run, nothing)


def eagle_drafter(
    target: Target, head: HeadConfig, shape: TreeShape, *, confidence: Confidence = Confidence(),
    backend: str | None = None, explicit_width: bool = True, note: str = "",
) -> Drafter:  # fmt: skip
    """Drafts with a head whose parameters are `Params.draft`. [B, N] trees; all nodes are valid unless the head's
    vocabulary has fewer tokens than the tree needs, or `confidence` sets a minimum. `backend`: as for the target."""
    model = draft_head(head, target, backend=backend)
    # Narrower trees, for batches with few nodes: a quarter, and the row counts that are cheap on a CPU.
    narrower = sorted({*range(2, CHEAP_ROWS + 1), shape.nodes // 4})

    def init(params: Params, rows: int, pool: PoolShape) -> DraftState:
        del params
        hidden = jnp.zeros((rows, head.hidden_size), jnp.dtype(head.dtype))
        return EagleState(init_cache(key_value_spec(head), pool), hidden)

    def propose(params: Params, state: EagleState, context: Context) -> tuple[DraftTree, DraftState]:
        rows = state.hidden.shape[0]
        hidden = state.hidden[jnp.minimum(context.slots, rows - 1)]
        return _grow(model, params, state.cache, context, hidden, shape, confidence), state

    def observe(params: Params, state: EagleState, context: Context, seen: Observation) -> DraftState:
        assert seen.features is not None
        rows, width = state.hidden.shape[0], seen.tokens.shape[1]
        positions = context.prefix_length[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
        embedded = model.embed(params.target, params.draft, seen.next_tokens)
        feature = model.fuse(params.draft, seen.features)
        past = Past(state.cache, context.page_table, context.attended)
        out, block = model.forward(params.draft, embedded, feature, positions, CAUSAL, past)
        last = jnp.take_along_axis(out, jnp.maximum(seen.length - 1, 0)[:, None, None], axis=1)[:, 0]
        # A NaN in a page would spread to the requests that hold the page later.
        length = jnp.where(jnp.isnan(last[:, 0]), 0, seen.length)
        cache = commit(state.cache, block, context.page_table, context.prefix_length, length, after=last)
        nowhere = rows + jnp.arange(length.shape[0], dtype=jnp.int32)
        row = jnp.where(seen.length > 0, context.slots, nowhere)
        return EagleState(cache, state.hidden.at[row].set(last, mode="drop", unique_indices=True))

    return Drafter(
        head_spec(head.kind).algorithm,
        features=head.features,
        width=shape.nodes,
        depth=shape.depth,
        init=init,
        propose=propose,
        observe=observe,
        # Trees differ in size only where drafts are left out, and a narrow step pays only where one may be chosen.
        widths=tuple(w for w in narrower if 2 <= w < shape.nodes) if confidence.least and confidence.skips else (),
        explicit_width=explicit_width,
        note=note + confidence.note,
    )


class _Level(NamedTuple):
    """The nodes of a level that are expanded: k of them, the best first."""

    tokens: Int32[Array, "B k"]  # the target's ids
    scores: Float32[Array, "B k"]
    features: Float[Array, "B k M"]  # the head's output at the parents
    visible: Bool[Array, "B k C"]  # which block keys each sees: its ancestors' and its own, the last k of C
    place: Int32[Array, "B k"]  # in the pool


class _Expanded(NamedTuple):
    """A level's candidates, Q of them, and what the next level reads."""

    tokens: Int32[Array, "B Q"]  # the target's ids
    scores: Float32[Array, "B Q"]
    out: Float[Array, "B k M"]  # the head's output at the expanded nodes
    keys: KeyValue  # of all levels so far


def _grow(
    model: DraftHead, params: Params, cache: KeyValue, context: Context, hidden: Float[Array, "B M"],
    shape: TreeShape, confidence: Confidence,
) -> DraftTree:  # fmt: skip
    """Expands level by level, then keeps the best candidates; with top-k 1 all of them, a chain.

    The loop is unrolled: each level has one key block more to attend to, and a GPU runs it without asking the host.
    """
    k, batch = shape.topk, hidden.shape[0]
    is_chain = k == 1

    def candidates(
        logits: Float32[Array, "B k W"], scores: Float32[Array, "B k"]
    ) -> tuple[Int32[Array, "B Q"], Float32[Array, "B Q"]]:
        """Tokens and scores of each node's k likeliest continuations."""
        if is_chain:  # an argmax costs less than a top-k
            drafts = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            scores = scores - log_total(logits, jnp.take_along_axis(logits, drafts[:, :, None], axis=2))[:, :, 0]
        else:
            drafts, scores = top_k_children(scores, logits, k, normalised=False)
        tokens = model.target_ids(params.draft, drafts)
        return tokens.reshape(batch, -1), confidence.cut(scores.reshape(batch, -1), context)

    def expand(level: int, nodes: _Level, before: KeyValue | None) -> _Expanded:
        """One forward of the head over a level."""
        embedded = model.embed(params.target, params.draft, nodes.tokens)
        positions = jnp.broadcast_to(context.prefix_length[:, None] + (level - 1), nodes.tokens.shape)
        past = Past(cache, context.page_table, context.attended, before)
        out, block = model.forward(params.draft, embedded, nodes.features, positions, pack_bits(nodes.visible), past)
        logits = model.unembed(params.target, params.draft, out)
        return _Expanded(*candidates(logits, nodes.scores), out, joined(before, block))

    logits = model.unembed(params.target, params.draft, hidden[:, None])
    tokens, scores = candidates(logits, jnp.zeros((batch, 1), jnp.float32))
    pool = [Pool(tokens, jnp.full_like(tokens, NO_PARENT), jnp.ones_like(tokens), scores)]
    own = jnp.broadcast_to(jnp.eye(k, dtype=bool), (batch, k, k))
    place = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (batch, k))
    nodes = _Level(tokens, scores, jnp.broadcast_to(hidden[:, None], (batch, k, hidden.shape[1])), own, place)
    keys = None
    steps = shape.depth if is_chain else shape.steps
    for level in range(1, steps):
        tokens, scores, out, keys = confidence.expand(nodes.scores, partial(expand, level, nodes, keys))
        first = sum(part.tokens.shape[1] for part in pool)
        pool.append(Pool(tokens, jnp.repeat(nodes.place, k, axis=1), jnp.full_like(tokens, level + 1), scores))
        if is_chain:
            nodes = _Level(tokens, scores, out, jnp.ones((batch, 1, level + 1), bool), nodes.place)
        elif level + 1 < steps:
            best, index = jax.lax.top_k(scores, k)  # best first, ties to the lower index
            parent = index // k  # candidate i of a level belongs to node i // k
            visible = jnp.take_along_axis(nodes.visible, parent[:, :, None], axis=1)
            nodes = _Level(
                tokens=jnp.take_along_axis(tokens, index, axis=1),
                scores=best,
                features=jnp.take_along_axis(out, parent[:, :, None], axis=1),
                visible=jnp.concatenate([visible, own], axis=2),
                place=first + index,
            )
    whole = Pool(*(jnp.concatenate(parts, axis=1) for parts in zip(*pool, strict=True)))
    if not is_chain:
        return rerank(context.root, whole, shape.nodes)
    length = jnp.full(batch, steps, jnp.int32)
    if confidence.least:
        length = jnp.sum(whole.scores > -jnp.inf, axis=1, dtype=jnp.int32)
    return chain(context.root, whole.tokens, length, whole.scores)
