"""Steps in which some request follows a grammar: the two halves of a step, with the host between them.

    propose       the drafter's trees, to the host         not needed where nothing is drafted, or all tokens are forced
    host          forced tokens in place of a tree; nodes that no grammar excludes; a bit for each token at each node
    constrained   these trees and bits, to the device: one forward, the walk, the commit

Requests without a grammar share the batch, with all bits set. A tree is only a proposal, so the text does not depend on
what the host makes of it. What is sent, packed in one int32 array:

    [B, 2 + K + 5 N + N W]      a step's input, the tree's five fields, the bits: W = ceil(V / 32) words for each node

Where nothing is drafted, the bits of the roots are not needed before the logits are there. On a CPU such a step can be
launched before the last one is read, and gets them while it runs (`specjax_kernels.cpu.mailbox`):

    [B, 2 + K + 4]              a step's input, the ticket with which it reads the bits
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int32, UInt32
from specjax_kernels.cpu.mailbox import TICKET, posted

from specjax.drafters.base import Drafter, Params
from specjax.engine.constraint import ALL, WORD
from specjax.engine.packing import unpack_step
from specjax.engine.sequence import Sequence
from specjax.engine.transfers import Output
from specjax.models.target import Target
from specjax.state import DecodeState, StepInput, StepOutput
from specjax.step import StepConfig, draft_phase, verify_phase
from specjax.tree import NO_PARENT, NO_TOKEN, DraftTree, roots
from specjax.verify import Verdict, Verifier

FIELDS = len(DraftTree._fields)
WALK_SECONDS = 0.05  # after which no more nodes below the roots of a step's trees are looked at


class Fields(NamedTuple):
    """A `DraftTree` on the host: views of int32 [5, N], or of [5, B, N]. Scores are the bits of floats."""

    tokens: np.ndarray
    parents: np.ndarray
    depth: np.ndarray
    valid: np.ndarray
    scores: np.ndarray


class ConstrainedInput(NamedTuple):
    """What `constrained_step` gets from the host."""

    step: StepInput
    tree: DraftTree  # of N nodes
    allowed: UInt32[Array, "B N W"]  # bits of a grammar; all ones where there is none


def words(vocab_size: int) -> int:
    return -(-vocab_size // WORD)


def constrained_size(new_pages: int, nodes: int, vocab_size: int) -> int:
    """Entries of a row of the packed input."""
    return 2 + new_pages + FIELDS * nodes + nodes * words(vocab_size)


def late_size(new_pages: int) -> int:
    """The same where the bits come late."""
    return 2 + new_pages + TICKET


# On the device


def propose_step(
    params: Params, state: DecodeState, inputs: StepInput, *, drafter: Drafter, config: StepConfig
) -> tuple[DecodeState, Output]:
    """`draft_phase` with the trees packed, int32 [B, 5 N]."""
    tree, state = draft_phase(params, state, inputs, drafter=drafter, config=config)
    scores = jax.lax.bitcast_convert_type(tree.scores, jnp.int32)
    fields = [field.astype(jnp.int32) for field in tree._replace(scores=scores)]
    return state, Output(jnp.concatenate(fields, axis=1), jnp.zeros((fields[0].shape[0], 0), jnp.int32), None)


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
    """`verify_phase` of the host's trees. Their roots' tokens, which the host may not have read, are the state's."""
    step, tree, allowed = inputs
    root = state.root[jnp.minimum(step.slots, state.root.shape[0] - 1)]
    tree = tree._replace(tokens=tree.tokens.at[:, 0].set(root))
    return verify_phase(
        params, state, step, tree, target=target, drafter=drafter, verify=verify, config=config, allowed=allowed
    )


def late_step(
    params: Params, state: DecodeState, inputs: ConstrainedInput, *, verify: Verifier, **fixed: Any
) -> tuple[DecodeState, StepOutput]:
    """`constrained_step` of roots alone, that waits for their bits where it needs them. `allowed` holds the ticket,
    uint32 [B, 1, TICKET], the same in each row."""

    def with_bits(tree: DraftTree, logits: Array, *given: Any, allowed: Array, **options: Any) -> Verdict:
        ticket = jax.lax.bitcast_convert_type(allowed[0, 0], jnp.int32)
        bits = posted(ticket, logits, (logits.shape[0], 1, words(logits.shape[-1])))
        return verify(tree, logits, *given, allowed=bits, **options)

    return constrained_step(params, state, inputs, verify=with_bits, **fixed)


def unpack_late(
    packed: Int32[Array, "B X"], tables: Int32[Array, "R T"], *, width: int, pages: int, new_pages: int
) -> Any:
    """As `unpack_constrained`, for `late_step`."""
    at = 2 + new_pages
    step, tables = unpack_step(packed[:, :at], tables, width, pages)
    ticket = jax.lax.bitcast_convert_type(packed[:, None, at:], jnp.uint32)
    return ConstrainedInput(step, roots(jnp.zeros(packed.shape[0], jnp.int32), 1), ticket), tables


def unpack_constrained(
    packed: Int32[Array, "B X"], tables: Int32[Array, "R T"], *, width: int, pages: int, new_pages: int, nodes: int
) -> Any:
    """The `ConstrainedInput` with page tables of `width`, and the tables of all rows with the new pages."""
    at, size = 2 + new_pages, FIELDS * nodes
    step, tables = unpack_step(packed[:, :at], tables, width, pages)
    tokens, parents, depth, valid, scores = packed[:, at : at + size].reshape(-1, FIELDS, nodes).transpose(1, 0, 2)
    tree = DraftTree(tokens, parents, depth, valid != 0, jax.lax.bitcast_convert_type(scores, jnp.float32))
    allowed = jax.lax.bitcast_convert_type(packed[:, at + size :], jnp.uint32)
    return ConstrainedInput(step, tree, allowed.reshape(packed.shape[0], nodes, -1)), tables


# On the host


def root_trees(batch: int, nodes: int) -> np.ndarray:
    """Trees of a root alone, int32 [batch, 5, nodes]."""
    trees = np.zeros((batch, FIELDS, nodes), np.int32)
    tree = Fields(*trees.transpose(1, 0, 2))
    tree.tokens[:], tree.parents[:] = NO_TOKEN, NO_PARENT
    tree.tokens[:, 0], tree.valid[:, 0] = 0, 1
    tree.scores[:, 1:] = np.float32(-np.inf).view(np.int32)
    return trees


def read_trees(output: Output, nodes: int) -> np.ndarray:
    """The trees of a `propose_step`, int32 [B, 5, nodes]. Waits for it."""
    return np.array(output.packed).reshape(-1, FIELDS, nodes)


def constrained_input(
    step: np.ndarray, sequences: list[Sequence], trees: np.ndarray, forced: list[list[int]], vocab_size: int
) -> np.ndarray:
    """Input of a `constrained_step`, packed, for a bucket of B entries.

    Args:
        step: the packed input of a step, without the grammar.
        sequences: those of the batch, no more than B.
        trees: int32 [B, 5, N], as drafted.
        forced: for each sequence, tokens that must come next: they take the place of its tree if there are any.
    """
    batch, _, nodes = trees.shape
    allowed = np.full((batch, nodes, words(vocab_size)), ALL, np.uint32)
    deadline = time.perf_counter() + WALK_SECONDS
    for i, sequence in enumerate(sequences):
        if sequence.constraint is None:
            continue
        if chain := forced[i][: nodes - 1]:
            trees[i] = _chain(chain, nodes)
        tree = Fields(*trees[i])
        kept = sequence.constraint.masks(tree.tokens, tree.parents, tree.valid != 0, allowed[i], deadline)
        if not np.array_equal(kept, tree.valid != 0):
            order = np.concatenate([np.flatnonzero(kept), np.flatnonzero(~kept)])
            trees[i], allowed[i] = _ordered(trees[i], kept, order), allowed[i][order]
    return np.concatenate([step, trees.reshape(batch, -1), allowed.view(np.int32).reshape(batch, -1)], axis=1)


def _chain(tokens: list[int], nodes: int) -> np.ndarray:
    """A tree of one path, int32 [5, nodes]."""
    found = root_trees(1, nodes)[0]
    tree, places = Fields(*found), slice(1, len(tokens) + 1)
    tree.tokens[places] = tokens
    tree.parents[places], tree.depth[places] = range(len(tokens)), range(1, len(tokens) + 1)
    tree.valid[places], tree.scores[places] = 1, 0
    return found


def _ordered(fields: np.ndarray, kept: np.ndarray, order: np.ndarray) -> np.ndarray:
    """A tree, int32 [5, N], with its nodes in another order, in which those that are kept are the first and the only
    valid ones."""
    place = np.argsort(order)
    found = fields[:, order]
    tree, count = Fields(*found), int(kept.sum())
    tree.parents[1:count] = place[tree.parents[1:count]]
    tree.tokens[count:], tree.parents[count:], tree.depth[count:], tree.valid[count:] = NO_TOKEN, NO_PARENT, 0, 0
    return found
