"""EAGLE: a head of one layer continues the target's features, level by level, and the best candidates form a tree.

Serves EAGLE-1/2, EAGLE-3 and MTP heads alike (`specjax.models.draft_head`); the tree is EAGLE-2's. n tokens are
committed, the root x_n is the last one drawn, and the head's cache holds n slots, slot t made of (f_t, x_{t+1}):

    observe   the tokens that became certain go through the head with the TARGET's features; their slots are kept, and
              so is the output at the last one
    propose   that output -> the k likeliest tokens: level 1
              D - 1 times: the k best of a level run in one forward (feature: the parent's output; position
              n + level - 1; they see the n slots, their ancestors and themselves) and bring k candidates each
              of all candidates the N - 1 best by cumulative log-probability are the tree

A head that is unsure may propose less, or nothing (`Confidence`): where checking a node costs the target's time, as on
a CPU, drafts that are seldom right cost more than they bring.

The slots of tree nodes are scratch and never reach a page. Source: SafeAILab/EAGLE `topK_genrate`; the alignment is
derived in docs/algorithms.md.
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
from specjax_kernels import CAUSAL, cheap_rows, pack_bits

from specjax.cache import PoolShape, commit, init_cache
from specjax.config import HeadConfig
from specjax.drafters.base import Context, Drafter, DraftState, Observation, Params
from specjax.drafters.shape import TreeShape
from specjax.limits import check, limited
from specjax.models.blocks import KeyValue, Past, joined, key_value_spec
from specjax.models.draft_head import DraftHead, draft_head
from specjax.models.head_spec import head_spec
from specjax.models.target import Target
from specjax.tree import NO_PARENT, DraftTree, Pool, chain, log_total, next_beam, rerank, top_k_children


class EagleState(NamedTuple):
    cache: KeyValue  # [P, S, K, E]: the head's one layer, in the target's pages
    hidden: Float[Array, "R M"]  # the head's output at the row's last slot: predicts what follows the root


@dataclass(frozen=True)
class Confidence:
    """How sure the head must be of a draft to propose it.

    A candidate may become a node only if the product of the head's probabilities along its path, its own included, is
    at least `least`: float32, score >= log(least). Scores never grow along a path, so what is left is a tree. Of these
    candidates the N - 1 best are the tree, as ever; further places are invalid. Inactive entries propose nothing.
    `least` 0: every candidate is good enough, and nothing is compared.

        least 0.3       the .9 ─┬─ cat .8 (.72) ── sat .4 (.29, left out)
                                └─ dog .1 (.09, left out)

    Attributes:
        least: from 0 to below 1. llama.cpp's draft-p-min, which looks at each draft alone.
        skips: whether a level is not computed where no entry of the batch has a node above it. A branch costs nothing
            on a CPU; a GPU would ask the host, so there all levels are computed.
    """

    least: float = limited(0.0, 0, below=1)
    skips: bool = False

    def __post_init__(self) -> None:
        check(self)

    @property
    def note(self) -> str:
        return f"; only drafts of a probability of at least {self.least:g}" if self.least else ""

    def cut(self, scores: Float32[Array, "B k"], context: Context) -> Float32[Array, "B k"]:
        """The scores, -inf where a candidate is not good enough."""
        if not self.least:
            return scores
        return jnp.where((scores >= math.log(self.least)) & context.active[:, None], scores, -jnp.inf)

    def expand(self, scores: Float32[Array, "B k"], run: Callable[[], _Expanded]) -> _Expanded:
        """`run()`, the candidates below nodes with these scores; if none of them can be one, zeros and -inf."""
        if not (self.least and self.skips):
            return run()

        def nothing() -> _Expanded:
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(run))
            return zeros._replace(scores=jnp.full_like(zeros.scores, -jnp.inf))

        return jax.lax.cond(jnp.any(scores > -jnp.inf), run, nothing)


def eagle_drafter(
    target: Target,
    head: HeadConfig,
    shape: TreeShape,
    *,
    confidence: Confidence = Confidence(),
    backend: str | None = None,
    explicit_width: bool = True,
    note: str = "",
) -> Drafter:
    """Drafts with a head whose parameters are `Params.draft`. [B, N] trees, all of whose nodes are valid unless the
    head's vocabulary is smaller than the tree is wide, or the head must be sure of what it proposes.

    Args:
        confidence: how sure.
        backend: the attention implementation, as for the target; None = the default.
        explicit_width: the user chose the tree: every batch drafts, also where that is slower.

    Raises:
        ValueError: the head does not fit the target.
    """
    model = draft_head(head, target, backend=backend)

    def init(params: Params, rows: int, pool: PoolShape) -> DraftState:
        del params
        hidden = jnp.zeros((rows, head.hidden_size), jnp.dtype(head.dtype))
        return EagleState(init_cache(key_value_spec(head), pool), hidden)

    def propose(params: Params, state: EagleState, context: Context) -> tuple[DraftTree, DraftState]:
        rows = state.hidden.shape[0]
        hidden = state.hidden[jnp.minimum(context.slots, rows - 1)]
        if shape.topk == 1:
            return _grow_chain(model, params, state.cache, context, hidden, shape, confidence), state
        return _grow_tree(model, params, state.cache, context, hidden, shape, confidence), state

    def observe(params: Params, state: EagleState, context: Context, seen: Observation) -> DraftState:
        assert seen.features is not None
        rows, width = state.hidden.shape[0], seen.tokens.shape[1]
        positions = context.prefix_length[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
        embedded = model.embed(params.target, params.draft, seen.next_tokens)
        feature = model.fuse(params.draft, seen.features)
        out, block = model.forward(params.draft, embedded, feature, positions, CAUSAL, _past(state.cache, context))
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
        widths=_between(shape.nodes) if confidence.least and confidence.skips else (),
        explicit_width=explicit_width,
        note=note + confidence.note,
    )


def _between(width: int) -> tuple[int, ...]:
    """Narrower tree widths, for batches whose trees have few nodes: a quarter of the width, and the numbers of rows
    whose products cost a CPU clearly less than those of many."""
    return tuple(w for w in sorted({*range(2, cheap_rows() + 1), width // 4}) if 2 <= w < width)


def _past(cache: KeyValue, context: Context, before: KeyValue | None = None) -> Past:
    return Past(cache, context.page_table, context.attended, before)


class _Level(NamedTuple):
    """The nodes of a level that are expanded: k of them, the best first."""

    tokens: Int32[Array, "B k"]  # the target's ids
    scores: Float32[Array, "B k"]
    features: Float[Array, "B k M"]  # the head's output at the parents
    visible: Bool[Array, "B k C"]  # which block keys each sees: its ancestors' and its own, the last k of C
    place: Int32[Array, "B k"]  # in the pool


def _run(
    model: DraftHead,
    params: Params,
    cache: KeyValue,
    context: Context,
    level: int,
    nodes: _Level,
    before: KeyValue | None,
) -> tuple[Float[Array, "B k M"], Float32[Array, "B k W"], KeyValue]:
    """One forward of the head over a level: outputs, logits, and all block keys so far."""
    embedded = model.embed(params.target, params.draft, nodes.tokens)
    position = context.prefix_length[:, None] + (level - 1)
    positions = jnp.broadcast_to(position, nodes.tokens.shape)
    past = _past(cache, context, before)
    out, block = model.forward(params.draft, embedded, nodes.features, positions, pack_bits(nodes.visible), past)
    return out, model.unembed(params.target, params.draft, out), joined(before, block)


class _Expanded(NamedTuple):
    """A level's candidates, Q of them, and what the next level reads."""

    tokens: Int32[Array, "B Q"]  # the target's ids
    scores: Float32[Array, "B Q"]
    out: Float[Array, "B k M"]  # the head's output at the expanded nodes
    keys: KeyValue  # of all levels so far


def _grow_tree(
    model: DraftHead,
    params: Params,
    cache: KeyValue,
    context: Context,
    hidden: Float[Array, "B M"],
    shape: TreeShape,
    confidence: Confidence,
) -> DraftTree:
    """Expand, then rerank. The loop is unrolled: each level has one key block more to look at, and a GPU runs it all
    without asking the host."""
    k, batch = shape.topk, hidden.shape[0]

    def expand(level: int, nodes: _Level, before: KeyValue | None) -> _Expanded:
        out, logits, keys = _run(model, params, cache, context, level, nodes, before)
        drafts, scores = top_k_children(nodes.scores, logits, k, normalised=False)
        tokens, scores = model.target_ids(params.draft, drafts).reshape(batch, -1), scores.reshape(batch, -1)
        return _Expanded(tokens, confidence.cut(scores, context), out, keys)

    root_score = jnp.zeros((batch, 1), jnp.float32)
    logits = model.unembed(params.target, params.draft, hidden[:, None])
    drafts, scores = top_k_children(root_score, logits, k, normalised=False)
    tokens, scores = model.target_ids(params.draft, drafts[:, 0]), confidence.cut(scores[:, 0], context)
    pool = [Pool(tokens, jnp.full_like(tokens, NO_PARENT), jnp.ones_like(tokens), scores)]
    own = jnp.broadcast_to(jnp.eye(k, dtype=bool), (batch, k, k))
    place = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (batch, k))
    features = jnp.broadcast_to(hidden[:, None], (batch, k, hidden.shape[1]))
    nodes = _Level(tokens, scores, features, own, place)
    keys = None
    for level in range(1, shape.steps):
        tokens, scores, out, keys = confidence.expand(nodes.scores, partial(expand, level, nodes, keys))
        parents = jnp.repeat(nodes.place, k, axis=1)
        first = sum(part.tokens.shape[1] for part in pool)
        pool.append(Pool(tokens, parents, jnp.full_like(tokens, level + 1), scores))
        if level + 1 < shape.steps:
            best, index = next_beam(scores, k)
            parent = index // k  # candidate i of a level belongs to node i // k
            visible = jnp.take_along_axis(nodes.visible, parent[:, :, None], axis=1)
            nodes = _Level(
                tokens=jnp.take_along_axis(tokens, index, axis=1),
                scores=best,
                features=jnp.take_along_axis(out, parent[:, :, None], axis=1),
                visible=jnp.concatenate([visible, own], axis=2),
                place=first + index,
            )
    return rerank(
        context.root, Pool(*(jnp.concatenate(parts, axis=1) for parts in zip(*pool, strict=True))), shape.nodes
    )


def _grow_chain(
    model: DraftHead,
    params: Params,
    cache: KeyValue,
    context: Context,
    hidden: Float[Array, "B M"],
    shape: TreeShape,
    confidence: Confidence,
) -> DraftTree:
    """The same for top-k 1, where there is nothing to choose from: the likeliest token, again and again."""
    batch = hidden.shape[0]

    def likeliest(
        logits: Float32[Array, "B 1 W"], score: Float32[Array, "B 1"]
    ) -> tuple[Int32[Array, "B 1"], Float32[Array, "B 1"]]:
        draft = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        score = score - log_total(logits, jnp.take_along_axis(logits, draft[:, :, None], axis=2))[:, :, 0]
        return model.target_ids(params.draft, draft), confidence.cut(score, context)

    def expand(level: int, nodes: _Level, before: KeyValue | None) -> _Expanded:
        out, logits, keys = _run(model, params, cache, context, level, nodes, before)
        return _Expanded(*likeliest(logits, nodes.scores), out, keys)

    score = jnp.zeros((batch, 1), jnp.float32)
    out, logits = hidden[:, None], model.unembed(params.target, params.draft, hidden[:, None])
    token, score = likeliest(logits, score)
    keys, tokens, scores = None, [token], [score]
    for level in range(1, shape.depth):
        nodes = _Level(token, score, out, jnp.ones((batch, 1, level), bool), jnp.zeros_like(token))
        token, score, out, keys = confidence.expand(score, partial(expand, level, nodes, keys))
        tokens.append(token)
        scores.append(score)
    length = jnp.full(batch, shape.depth, jnp.int32)
    scores = jnp.concatenate(scores, axis=1)
    if confidence.least:
        length = jnp.sum(scores > -jnp.inf, axis=1, dtype=jnp.int32)
    return chain(context.root, jnp.concatenate(tokens, axis=1), length, scores)
