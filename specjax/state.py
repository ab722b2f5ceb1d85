"""The state on the device, the inputs of a step and its output, as pytrees. Computes nothing: see `specjax.step`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int32, UInt32

from specjax.cache import Cache, PoolShape, init_cache
from specjax.drafters.base import Drafter, DraftState, Params
from specjax.models.target import Target
from specjax.sampling import History, SamplingRows, sampling_row
from specjax.tree import DraftTree
from specjax.types import Active, PageTable, PerRequest
from specjax.verify import LOGPROB_IDS, Logprobs

RUNS, STOPPED, FULL, NOT_FINITE = 0, 1, 2, 3
"""`StepOutput.finish`: the request goes on, drew a stop id, reached its limit of tokens, or has logits with NaN or
infinity, from which nothing can be drawn."""

NO_FORCED_TOKEN = -1  # `PrefillInput.next_token`: draw it
NO_DRAFT_LIMIT = 1 << 20  # `Row.draft_limit` without a limit


class Row(NamedTuple):
    """One request's parameters and progress. As state each field has a leading R; for `admit` it has none.

    Attributes:
        prefix_length: int32 [R]. n, the tokens in pages; at admission the reused ones.
        generated: int32 [R]. Tokens emitted so far; not 0 at admission of a resumed request.
        limit: int32 [R]. Most tokens to emit.
        draft_limit: int32 [R]. Most draft nodes a step; 0: no speculation.
        salt: uint32 [R]. Requests with different salts share no drafter's memory.
        logprobs: bool [R]. Whether log-probabilities are wanted.
        logprob_ids: int32 [R, 128]. Tokens whose log-probabilities are wanted beside the likeliest, padded with 0.
        sampling: parameters of the draws.
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
    """Everything on the device, one donated pytree.

    Attributes:
        cache: the target's cache entries of committed tokens: `Target.pages` as page leaves [P, S, ...].
        tokens: int32 [P, S]. The committed tokens in the same pages; None: the drafter does not read them.
        draft: the drafter's own state.
        rows: the requests' parameters and progress, R of them.
        root: int32 [R]. The last emitted token, at position `prefix_length`.
        finished: bool [R]. True from the finishing step until the row is admitted anew.
    """

    cache: Cache
    tokens: Int32[Array, "P S"] | None
    draft: DraftState
    rows: Row
    root: Int32[Array, "R"]
    finished: Bool[Array, "R"]


class StepInput(NamedTuple):
    """The small argument that the host builds for a step of B requests.

    Attributes:
        slots: int32 [B]. Rows of the state; for empty entries >= R, each different.
        page_table: int32 [B, T]. Must cover the D + 1 tokens that a step may commit; holes are P.
        active: bool [B]. Whether the entry takes part.
    """

    slots: PerRequest
    page_table: PageTable
    active: Active


class PrefillInput(NamedTuple):
    """A chunk of the prompts of B requests.

    Attributes:
        slots, page_table, active: as in `StepInput`.
        tokens: int32 [B, C].
        length: int32 [B]. How many of `tokens` count, at least 1 where active and drawn after.
        next_token: int32 [B]. NO_FORCED_TOKEN, the next prompt token, or a resumed request's last token.
    """

    slots: PerRequest
    page_table: PageTable
    active: Active
    tokens: Int32[Array, "B C"]
    length: PerRequest
    next_token: PerRequest


class Trace(NamedTuple):
    """Drafted and accepted nodes of a step.

    Attributes:
        tree: the trees, N nodes each.
        drawn: int32 [B, N]. The target's draw at each node; NO_TOKEN where none was needed.
        path: int32 [B, J]. The accepted nodes, as in `Verdict`.
        accepted: int32 [B]. How many nodes of `path` below the root were accepted.
    """

    tree: DraftTree
    drawn: Int32[Array, "B N"]
    path: Int32[Array, "B J"]
    accepted: PerRequest


class StepOutput(NamedTuple):
    """What a step emits.

    Attributes:
        tokens: int32 [B, J], J = D + 1 or less (`specjax.step.Checked`); the first `emitted` of each row count.
        emitted: int32 [B]. How many of `tokens` count: 0 for an inactive entry.
        accepted: int32 [B]. Drafts among the emitted.
        finish: int32 [B]. RUNS, STOPPED, FULL or NOT_FINITE.
        logprobs: zeros where no row wants them.
        trace: None unless `StepConfig.trace`.
        prompt: of a prefill's C tokens, at each index those of the token after it; None unless
            `StepConfig.prompt_logprobs`.
    """

    tokens: Int32[Array, "B J"]
    emitted: PerRequest
    accepted: PerRequest
    finish: PerRequest
    logprobs: Logprobs
    trace: Trace | None
    prompt: Logprobs | None = None


def init_state(params: Params, target: Target, drafter: Drafter, *, rows: int, pool: PoolShape) -> DecodeState:
    """An empty state: R = `rows` rows, all finished, and a pool of zeroed pages."""
    empty = new_row(target.config.vocab_size, limit=0, draft_limit=0)
    # Copied from the host in one go: each operation here would be a program of its own, and make a start longer.
    host = (
        jax.tree.map(lambda leaf: np.broadcast_to(leaf, (rows, *leaf.shape)), empty),
        np.zeros(rows, np.int32),
        np.ones(rows, bool),
    )
    small, root, finished = jax.device_put(host, may_alias=False)
    return DecodeState(
        cache=init_cache(target.pages, pool),
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
    """A request's row for `admit`, as numpy arrays without a leading axis.

    `limit` includes `output`, the tokens that a resumed request has emitted; penalties count those and `prompt`.
    `sampling`: as in `sampling_row`; greedy by default.
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
    """Puts a request's row (no leading axis) at `slot`. Its pages and its prompt come with `prefill_step`."""
    rows, finished = admit_row(state.rows, state.finished, slot, row)
    return state._replace(rows=rows, finished=finished)


def admit_row(rows: Row, finished: Bool[Array, "R"], slot: Int32[Array, ""], row: Row) -> tuple[Row, Bool[Array, "R"]]:
    """`admit` for the two parts of the state that it changes."""

    def put(rows: Array, value: Any) -> Array:
        return rows.at[slot].set(jnp.asarray(value, rows.dtype), mode="drop")

    return jax.tree.map(put, rows, row), put(finished, False)
