"""Steps in which some request follows a grammar: the two halves of a step, with the host between them.

    propose       the drafter's trees, to the host         left out where nothing is drafted, or all tokens are forced
    host          forced tokens in place of a tree; nodes that no grammar excludes; a bit for each token at each node
    constrained   these trees and bits, to the device: one forward, the walk, the commit

The masks follow from the tokens of the last step, so that step is read before the next one is launched. Requests
without a grammar share the batch, with all bits set. A tree is only a proposal, so the text does not depend on the
trees that the host sends. The host packs them in one int32 array:

    [B, 2 + K + 5 N + N W]      a step's input, the tree's five fields, the bits: W = ceil(V / 32) words for each node
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int32, UInt32

from specjax.drafters.base import Drafter, Params
from specjax.engine.arrays import Output, unpack_step
from specjax.engine.device import Unavailable, memory_checked
from specjax.engine.grammar import ALL, WORD
from specjax.engine.keys import PLAIN, Key
from specjax.engine.sequence import Sequence
from specjax.models.target import Target
from specjax.state import DecodeState, StepInput, StepOutput
from specjax.step import StepConfig, draft_phase, verify_phase
from specjax.tree import NO_PARENT, NO_TOKEN, DraftTree
from specjax.verify import Verifier

if TYPE_CHECKING:
    from specjax.engine.batch import Batch
    from specjax.engine.runtime import Runtime

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
    """Input of `constrained_step`."""

    step: StepInput
    tree: DraftTree  # of N nodes
    allowed: UInt32[Array, "B N W"]  # bits of a grammar; all ones where there is none


def constrained_size(new_pages: int, nodes: int, vocab_size: int) -> int:
    """Entries of a row of the packed input."""
    return 2 + new_pages + FIELDS * nodes + nodes * _words(vocab_size)


def _words(vocab_size: int) -> int:
    return -(-vocab_size // WORD)


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
    """`verify_phase` of the host's trees. Their roots' tokens are the state's."""
    step, tree, allowed = inputs
    root = state.root[jnp.minimum(step.slots, state.root.shape[0] - 1)]
    tree = tree._replace(tokens=tree.tokens.at[:, 0].set(root))
    return verify_phase(
        params, state, step, tree, target=target, drafter=drafter, verify=verify, config=config, allowed=allowed
    )


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


def step_keys(run: Runtime, count: int, pages: int, nodes: int) -> list[Key]:
    """Programs for a step of `count` requests of up to `pages` pages, the best first. Compiled ones come first, whether
    or not they draft; the others are compiled meanwhile, since a start compiles none of them. `nodes`: as `Key.nodes`.
    """

    def found(nodes: int) -> list[Key]:
        ready = run.programs.compiled(), run.programs.pending
        return list(run.buckets.step_keys(count, pages, *ready, nodes, "constrained"))

    choices = run.buckets.constrained_choices(run.buckets.batch(count))
    nodes = nodes if nodes in choices else PLAIN
    if run.drafter.costly_observe:  # the other kind of step would leave a hole
        return found(nodes)
    for choice in sorted(choices, key=lambda choice: choice != nodes):
        # The first look puts a missing program into `pending`, for which the second finds a smaller compiled one.
        if _compiled(run, found(choice)[0]) or _compiled(run, found(choice)[0]):
            return found(choice)
    return found(nodes)


def is_ready(run: Runtime, keys: list[Key]) -> bool:
    """False while another thread compiles the best of these programs."""
    return _compiled(run, next((key for key in keys if not run.programs.has_failed(key)), keys[0]))


def _compiled(run: Runtime, key: Key) -> bool:
    """Whether both halves of a step can run at once, or never will; else they are compiled meanwhile."""
    ready = [run.programs.compile_ahead(half) for half in ([key, _draft_key(key)] if key.drafts else [key])]
    return all(ready)  # begins with all of them


def _draft_key(key: Key) -> Key:
    return key._replace(kind="propose")


def forced_tokens(run: Runtime, sequences: list[Sequence]) -> dict[Sequence, list[int]]:
    """The tokens that must come next, for the sequences that have some: no more than the drafts of their batch's trees
    on one path."""
    nodes = run.buckets.tree_widths(run.buckets.batch(len(sequences)))[-1]
    most, found = min(nodes - 1, run.drafter.within(nodes).depth), dict[Sequence, list[int]]()
    for one in sequences:
        if most and one.constraint is not None and one.drafts:
            limit = one.params.draft_limit
            if tokens := one.constraint.forced(most if limit is None else min(most, limit)):
                found[one] = tokens
    return found


def grammar_input(run: Runtime, batch: Batch, step: np.ndarray) -> np.ndarray:
    """The packed input of a step with grammars, from `step`, that of a step without. Drafts, unless all that may be
    drafted is forced, and waits for the trees."""
    key, sequences = batch.key, batch.sequences
    trees = root_trees(key.width, run.buckets.step_widths(key)[-1])
    if any(sequence not in batch.forced for sequence in batch.drafted):
        trees = _drafted_trees(run, _draft_key(key), step, trees)
    chains = [batch.forced.get(one, []) for one in sequences]
    return constrained_input(step, sequences, trees, chains, run.vocab_size)


def _drafted_trees(run: Runtime, key: Key, step: np.ndarray, roots: np.ndarray) -> np.ndarray:
    """The drafter's trees as arrays like `roots`, or these if its program runs out of memory, which is logged."""
    try:
        program = run.programs.get(key)
    except Unavailable:
        return roots
    output = run.device.run(key, program, step)
    with memory_checked(key):
        run.device.check(output)
        return np.array(output.packed).reshape(roots.shape)


def root_trees(batch: int, nodes: int) -> np.ndarray:
    """Trees of a root alone, int32 [batch, 5, nodes]."""
    trees = np.zeros((batch, FIELDS, nodes), np.int32)
    tree = Fields(*trees.transpose(1, 0, 2))
    tree.tokens[:], tree.parents[:] = NO_TOKEN, NO_PARENT
    tree.tokens[:, 0], tree.valid[:, 0] = 0, 1
    tree.scores[:, 1:] = np.float32(-np.inf).view(np.int32)
    return trees


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
    allowed = np.full((batch, nodes, _words(vocab_size)), ALL, np.uint32)
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
