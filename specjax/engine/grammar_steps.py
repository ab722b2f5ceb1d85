"""Steps with grammars: the two halves of a step, with the host between them.

    propose       the drafter's trees, to the host         skipped if nothing is drafted, or all tokens are forced
    host          forced tokens replace a tree; excluded nodes are removed; a bit for each token at each node
    constrained   these trees and bits, to the device: one forward, the walk, the commit

The masks depend on the tokens of the last step, so that step is read before the next one is launched. Requests without
a grammar share the batch, with all bits set. A tree is only a proposal, so the text does not depend on the trees that
the host sends. The host packs them in one int32 array:

    [B, 2 + K + 5 N + N W]      a step's input, the tree's five fields, the bits: W = ceil(V / 32) words per node
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int32, UInt32
from specjax_kernels import mask_words

from specjax.drafters.base import Drafter, Params
from specjax.engine.device import Output, unpack_step
from specjax.engine.grammar import ALL
from specjax.engine.sequence import Sequence
from specjax.models.target import Target
from specjax.state import DecodeState, StepInput, StepOutput
from specjax.step import StepConfig, draft_phase, verify_phase
from specjax.tree import NO_PARENT, NO_TOKEN, DraftTree
from specjax.verify import Verifier

FIELDS = len(DraftTree._fields)
WALK_SECONDS = 0.05  # time limit of a step for masks below the roots of its trees


class ConstrainedInput(NamedTuple):
    """Input of `constrained_step`."""

    step: StepInput
    tree: DraftTree  # N nodes
    allowed: UInt32[Array, "B N W"]  # bits of a grammar; all ones without one


def constrained_size(new_pages: int, nodes: int, vocab_size: int) -> int:
    return 2 + new_pages + FIELDS * nodes + nodes * mask_words(vocab_size)


# On the device


def propose_step(
    params: Params, state: DecodeState, inputs: StepInput, *, drafter: Drafter, config: StepConfig
) -> tuple[DecodeState, Output]:
    """`draft_phase` with packed trees, int32 [B, 5 N]."""
    tree, state = draft_phase(params, state, inputs, drafter=drafter, config=config)
    scores = jax.lax.bitcast_convert_type(tree.scores, jnp.int32)
    fields = [field.astype(jnp.int32) for field in tree._replace(scores=scores)]
    return state, Output(jnp.concatenate(fields, axis=1))


def constrained_step(
    params: Params,
    state: DecodeState,
    inputs: ConstrainedInput,
    *,
    target: Target,
    drafter: Drafter,
    verify: Verifier,
    config: StepConfig,
) -> tuple[DecodeState, StepOutput]:
    """`verify_phase` of the host's trees, whose roots get their tokens from the state."""
    step, tree, allowed = inputs
    root = state.root[jnp.minimum(step.slots, state.root.shape[0] - 1)]
    tree = tree._replace(tokens=tree.tokens.at[:, 0].set(root))
    return verify_phase(
        params, state, step, tree, target=target, drafter=drafter, verify=verify, config=config, allowed=allowed
    )


def unpack_constrained(
    packed: Int32[Array, "B X"], tables: Int32[Array, "R T"], *, width: int, pages: int, new_pages: int, nodes: int
) -> Any:
    """Returns the `ConstrainedInput` with page tables of `width`, and the tables of all rows with the new pages."""
    at, size = 2 + new_pages, FIELDS * nodes
    step, tables = unpack_step(packed[:, :at], tables, width, pages)
    tokens, parents, depth, valid, scores = packed[:, at : at + size].reshape(-1, FIELDS, nodes).transpose(1, 0, 2)
    tree = DraftTree(tokens, parents, depth, valid != 0, jax.lax.bitcast_convert_type(scores, jnp.float32))
    allowed = jax.lax.bitcast_convert_type(packed[:, at + size :], jnp.uint32)
    return ConstrainedInput(step, tree, allowed.reshape(packed.shape[0], nodes, -1)), tables


# On the host


def host_tree(fields: np.ndarray) -> Any:
    """A `DraftTree` of views of int32 [5, N] or [5, B, N]. Scores are bit patterns of floats."""
    return DraftTree(*cast(Any, fields))


def root_trees(batch: int, nodes: int) -> np.ndarray:
    """Trees with only a root, int32 [batch, 5, nodes]."""
    trees = np.zeros((batch, FIELDS, nodes), np.int32)
    tree = host_tree(trees.transpose(1, 0, 2))
    tree.tokens[:], tree.parents[:] = NO_TOKEN, NO_PARENT
    tree.tokens[:, 0], tree.valid[:, 0] = 0, 1
    tree.scores[:, 1:] = np.float32(-np.inf).view(np.int32)
    return trees


def constrained_input(
    step: np.ndarray, sequences: list[Sequence], trees: np.ndarray, forced: Mapping[str, tuple[int, ...]],
    vocab_size: int, seconds: float = WALK_SECONDS,
) -> np.ndarray:  # fmt: skip
    """Packs the input of a `constrained_step`: the packed input of a step, trees int32 [B, 5, N], and masks. `forced`:
    tokens that must come next, by request, which replace its tree. `seconds`: time for masks below the roots."""
    batch, _, nodes = trees.shape
    allowed = np.full((batch, nodes, mask_words(vocab_size)), ALL, np.uint32)
    deadline = time.perf_counter() + seconds
    for i, sequence in enumerate(sequences):
        if sequence.constraint is None:
            continue
        if chain := forced.get(sequence.id, ())[: nodes - 1]:
            trees[i] = _chain(chain, nodes)
        tree = host_tree(trees[i])
        kept = sequence.constraint.masks(tree.tokens, tree.parents, tree.valid != 0, allowed[i], deadline)
        if not np.array_equal(kept, tree.valid != 0):
            order = np.concatenate([np.flatnonzero(kept), np.flatnonzero(~kept)])
            trees[i], allowed[i] = _ordered(trees[i], kept, order), allowed[i][order]
    return np.concatenate([step, trees.reshape(batch, -1), allowed.view(np.int32).reshape(batch, -1)], axis=1)


def _chain(tokens: tuple[int, ...], nodes: int) -> np.ndarray:
    """A tree with one path, int32 [5, nodes]."""
    fields = root_trees(1, nodes)[0]
    tree, places = host_tree(fields), slice(1, len(tokens) + 1)
    tree.tokens[places] = tokens
    tree.parents[places], tree.depth[places] = range(len(tokens)), range(1, len(tokens) + 1)
    tree.valid[places], tree.scores[places] = 1, 0
    return fields


def _ordered(fields: np.ndarray, kept: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Reorders the nodes of a tree, int32 [5, N]: those that are kept come first, and others become invalid."""
    place, fields = np.argsort(order), fields[:, order]
    tree, count = host_tree(fields), int(kept.sum())
    tree.parents[1:count] = place[tree.parents[1:count]]
    tree.tokens[count:], tree.parents[count:], tree.depth[count:], tree.valid[count:] = NO_TOKEN, NO_PARENT, 0, 0
    return fields
