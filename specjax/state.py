"""Pytrees of a step (`specjax.step`): the state on the device, the inputs and the output; and its trees on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int32, UInt32

from specjax.cache import Active, Cache, PageTable, PerRequest, PoolShape, init_cache
from specjax.drafters.base import Drafter, DraftState, Params
from specjax.logprobs import LOGPROB_IDS, Logprobs
from specjax.models.target import Target
from specjax.sampling import History, SamplingRows, sampling_row
from specjax.tree import NO_PARENT, DraftTree

RUNS, STOPPED, FULL, NOT_FINITE = 0, 1, 2, 3
"""Values of `StepOutput.finish`: the request continues, drew a stop id, reached its token limit, or has logits with NaN
or infinity."""

NO_FORCED_TOKEN = -1  # value of `PrefillInput.next_token`: draw the next token
NO_DRAFT_LIMIT = 1 << 20  # value of `Row.draft_limit`: no limit


class Row(NamedTuple):
    """Parameters and progress of requests. Fields have a leading R in the state, and none as an argument of `admit`.

    Attributes:
        prefix_length: int32 [R]. n, the number of tokens in pages; at admission, of reused tokens.
        generated: int32 [R]. Number of emitted tokens; above 0 at admission of a resumed request.
        limit: int32 [R]. Maximum number of emitted tokens.
        draft_limit: int32 [R]. Maximum number of draft nodes per step; 0 disables speculation.
        salt: uint32 [R]. Requests with different salts share no drafter state.
        logprobs: bool [R]. True to return log-probabilities.
        logprob_ids: int32 [R, 128]. Further token ids whose log-probabilities are returned, padded with 0.
        sampling: parameters of the draws, one row per request.
        history: tokens that penalties count.
    """

    prefix_length: Int32[Array, "R"]
    generated: Int32[Array, "R"]
    limit: Int32[Array, "R"]
    draft_limit: Int32[Array, "R"]
    salt: UInt32[Array, "R"]
    logprobs: Bool[Array, "R"]
    logprob_ids: Int32[Array, "R 128"]
    sampling: SamplingRows
    history: History


class DecodeState(NamedTuple):
    """State on the device, one donated pytree.

    Attributes:
        cache: the target's cache of committed tokens (`Target.pages`): page leaves [P, S, ...], and row leaves of
            recurrent layers.
        tokens: int32 [P, S]. Committed tokens in the same pages; None unless `Drafter.reads_tokens`.
        draft: state of the drafter.
        rows: parameters and progress of R requests.
        root: int32 [R]. Last emitted token, at position `prefix_length`.
        finished: bool [R]. True from the finishing step until the next admission to the row.
    """

    cache: Cache
    tokens: Int32[Array, "P S"] | None
    draft: DraftState
    rows: Row
    root: Int32[Array, "R"]
    finished: Bool[Array, "R"]


class StepInput(NamedTuple):
    """Host input of a step of B requests.

    Attributes:
        slots: int32 [B]. Rows of the state; empty entries have distinct values >= R.
        page_table: int32 [B, T]. Pages of each request, with room for the D + 1 tokens that the step may commit; P
            marks a hole.
        active: bool [B]. True for entries that take part in the step.
    """

    slots: PerRequest
    page_table: PageTable
    active: Active


class PrefillInput(NamedTuple):
    """A chunk of the prompts of B requests.

    Attributes:
        slots, page_table, active: as in `StepInput`.
        tokens: int32 [B, C].
        length: int32 [B]. Number of valid `tokens`; at least 1 for an active entry that draws.
        next_token: int32 [B]. NO_FORCED_TOKEN, the next prompt token, or the last token of a resumed request.
        source: int32 [B]. The row whose state of recurrent layers the chunk continues, such as a snapshot; None: the
            request's.
        snapshot, snapshot_length: as in `specjax.cache.RowMoves`.
    """

    slots: PerRequest
    page_table: PageTable
    active: Active
    tokens: Int32[Array, "B C"]
    length: PerRequest
    next_token: PerRequest
    source: PerRequest | None = None
    snapshot: PerRequest | None = None
    snapshot_length: PerRequest | None = None


class Trace(NamedTuple):
    """Drafted and accepted nodes of a step.

    Attributes:
        tree: trees of N nodes.
        drawn: int32 [B, N]. The target's draw at each node; NO_TOKEN if not drawn.
        path: int32 [B, J]. Accepted nodes, as in `Verdict`.
        accepted: int32 [B]. Number of accepted drafts.
    """

    tree: DraftTree
    drawn: Int32[Array, "B N"]
    path: Int32[Array, "B J"]
    accepted: PerRequest


class StepOutput(NamedTuple):
    """Tokens that a step emits.

    Attributes:
        tokens: int32 [B, J], J <= D + 1 (`specjax.step.Checked`). The first `emitted` of each row are valid.
        emitted: int32 [B]. Number of emitted tokens; 0 for an inactive entry.
        accepted: int32 [B]. Number of drafts among the emitted tokens.
        ranks: int32 [B, J]. Ranks of the path's nodes in their tree (`specjax.tree.ranks`); the first `emitted` are
            valid.
        finish: int32 [B]. RUNS, STOPPED, FULL or NOT_FINITE.
        logprobs: log-probabilities of the emitted tokens; zeros if no row requests them.
        trace: drafted and accepted nodes; None unless `StepConfig.trace`.
        prompt: log-probabilities of the tokens after each of a prefill's C tokens; None unless
            `StepConfig.prompt_logprobs`.
    """

    tokens: Int32[Array, "B J"]
    emitted: PerRequest
    accepted: PerRequest
    ranks: Int32[Array, "B J"]
    finish: PerRequest
    logprobs: Logprobs
    trace: Trace | None
    prompt: Logprobs | None = None


@dataclass(frozen=True, eq=False)
class StepTree:
    """The n valid nodes of one request's tree in one step, node 0 the root, parents before children.

    Attributes:
        tokens: int32 [n]. Token ids of the nodes.
        parents: int32 [n]. Index of the parent; -1 for the root.
        depth: int32 [n]. 0 for the root.
        scores: float32 [n]. Cumulative log-probability under the draft (n-grams: a rank), 0 for the root.
        drawn: int32 [n]. The target's draw at each node; -1 if not drawn.
        path: int32 [m + 1]. The root and the m accepted nodes.
        emitted: int32 [e]. Emitted tokens; e is m + 1, or less at the end of a text.
    """

    tokens: np.ndarray
    parents: np.ndarray
    depth: np.ndarray
    scores: np.ndarray
    drawn: np.ndarray
    path: np.ndarray
    emitted: np.ndarray

    @property
    def accepted(self) -> int:
        return len(self.path) - 1

    def children(self, node: int) -> list[int]:
        return np.flatnonzero(self.parents == node).tolist()


def step_tree(trace: Trace, row: int, emitted: np.ndarray) -> StepTree:
    """Extracts the tree of batch entry `row`, which emitted the tokens `emitted`. A node whose parent is invalid, as in
    the trees of a faulty drafter, is left out."""
    host = jax.tree.map(np.asarray, trace)  # copied once: an array caches its host copy
    parents, places = host.tree.parents[row].tolist(), {0: 0}  # index in the tree -> index in the result
    for node in np.flatnonzero(host.tree.valid[row]).tolist():
        if node and parents[node] in places:
            places[node] = len(places)
    nodes = list(places)
    fields = {name: getattr(host.tree, name)[row, nodes] for name in ("tokens", "depth", "scores")}
    fields["parents"] = np.array([places.get(parents[node], NO_PARENT) for node in nodes], np.int32)
    path = host.path[row, : int(host.accepted[row]) + 1].tolist()
    return StepTree(
        **fields,
        drawn=host.drawn[row, nodes],
        path=np.array([places[node] for node in path], np.int32),
        emitted=np.array(emitted),
    )


def step_trees(output: StepOutput) -> list[StepTree | None]:
    """Extracts the tree of each batch entry; None for inactive entries. Raises ValueError without a trace."""
    if output.trace is None:
        raise ValueError("the step's output has no trace: compile it with StepConfig(trace=True)")
    tokens = np.asarray(output.tokens)
    counts = enumerate(np.asarray(output.emitted))
    return [step_tree(output.trace, row, tokens[row, :count]) if count else None for row, count in counts]


def init_state(
    params: Params, target: Target, drafter: Drafter, *, rows: int, pool: PoolShape, snapshots: int = 0
) -> DecodeState:  # fmt: skip
    """Creates a state with R = `rows` finished rows and a pool of zeroed pages. Recurrent layers have `snapshots` rows
    after those of the requests."""
    empty = new_row(target.config.vocab_size, limit=0, draft_limit=0)
    # One copy from the host: each jnp operation would compile a program and delay the start.
    host = (
        jax.tree.map(lambda leaf: np.broadcast_to(leaf, (rows, *leaf.shape)), empty),
        np.zeros(rows, np.int32),
        np.ones(rows, bool),
    )
    small, root, finished = jax.device_put(host, may_alias=False)
    return DecodeState(
        cache=init_cache(target.pages, pool, rows + snapshots),
        tokens=jnp.zeros(pool, jnp.int32) if drafter.reads_tokens else None,
        draft=drafter.init(params, rows, pool),
        rows=small,
        root=root,
        finished=finished,
    )


def new_row(
    vocab_size: int,
    *,
    limit: int,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    draft_limit: int = NO_DRAFT_LIMIT,
    salt: int = 0,
    prefix_length: int = 0,
    logprobs: bool = False,
    logprob_ids: Sequence[int] = (),
    **sampling: Any,
) -> Row:
    """Creates a request's row for `admit`, numpy arrays without a leading axis.

    Args:
        limit, draft_limit, salt, prefix_length, logprobs, logprob_ids: fields of `Row`.
        prompt: prompt tokens, for penalties.
        output: tokens that a resumed request has already emitted; they count towards `limit`.
        **sampling: arguments of `sampling_row`; greedy by default.
    """
    in_prompt = np.zeros(vocab_size, bool)
    in_prompt[list(prompt)] = True
    counts = np.zeros(vocab_size, np.int32)
    np.add.at(counts, np.asarray(output, np.int64), 1)
    ids = np.zeros(LOGPROB_IDS, np.int32)
    ids[: len(logprob_ids)] = logprob_ids
    fields: dict[str, Any] = {
        "prefix_length": np.int32(prefix_length),
        "generated": np.int32(len(output)),
        "limit": np.int32(limit),
        "draft_limit": np.int32(draft_limit),
        "salt": np.uint32(salt),
        "logprobs": np.bool_(logprobs),
        "logprob_ids": ids,
        "sampling": sampling_row(vocab_size, **sampling),
        "history": History(*cast(Any, (in_prompt, counts))),
    }
    return Row(**fields)


def admit(state: DecodeState, slot: Int32[Array, ""], row: Row) -> DecodeState:
    """Writes a request's row (no leading axis) to `slot`. `prefill_step` then commits the prompt."""
    rows, finished = admit_row(state.rows, state.finished, slot, row)
    return state._replace(rows=rows, finished=finished)


def admit_row(rows: Row, finished: Bool[Array, "R"], slot: Int32[Array, ""], row: Row) -> tuple[Row, Bool[Array, "R"]]:
    """`admit` on the two fields of the state that it changes."""

    def put(rows: Array, value: Any) -> Array:
        return rows.at[slot].set(jnp.asarray(value, rows.dtype), mode="drop")

    return jax.tree.map(put, rows, row), put(finished, False)
