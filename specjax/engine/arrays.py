"""What host and device exchange, packed: one int32 array for a step, a prefill or an admission, and one back.

Each array that is sent costs a copy of its own, and page tables hardly change between steps. So the device keeps all
page tables, [R, T], and a step's input has only the pages that are new:

    step        [B, 2 + K]           slot, the number of pages that the device knows, K new pages (NO_PAGE: none)
    prefill     [B, 3 + C + T']      slot, length, next token, C tokens, all T' <= T pages of the row
    admission   [1 + W + V/32]       slot, the fields of a `Row` bit for bit, whether each token is in the prompt
                [... + V]            and, for a resumed request, how often each token has been emitted
    output      [B, 2 + J]           of a step or a prefill: emitted, finish, J tokens
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int32

from specjax.engine.sampling_params import SamplingParams
from specjax.engine.sequence import Sequence
from specjax.sampling import History
from specjax.state import (
    NO_DRAFT_LIMIT,
    NO_FORCED_TOKEN,
    DecodeState,
    PrefillInput,
    Row,
    StepInput,
    StepOutput,
    Trace,
    admit_row,
    new_row,
)
from specjax.verify import LOGPROB_IDS, Logprobs

NO_PAGE = -1
_WORD = 32  # bits


class Resident(NamedTuple):
    """What stays on the device between programs."""

    decode: DecodeState
    tables: Int32[Array, "R T"]  # page tables of the rows; holes are P


def step_input(sequences: list[Sequence], batch: int, new_pages: int, rows: int) -> np.ndarray:
    """Input of a decode step, int32 [batch, 2 + new_pages], for a bucket of `batch` entries.

    Empty entries get slots from R = `rows` on. The pages count as known to the device from then on.
    """
    packed = np.full((batch, 2 + new_pages), NO_PAGE, np.int32)
    packed[:, 0] = range(rows, rows + batch)
    for i, slot in enumerate(sequence.active_slot for sequence in sequences):
        packed[i, 0] = slot.index
        if new := slot.pages[slot.placed :]:
            packed[i, 1] = slot.placed
            packed[i, 2 : 2 + len(new)] = new
            slot.placed = len(slot.pages)
    return packed


def unpack_step(packed: Int32[Array, "B X"], tables: Int32[Array, "R T"], width: int, pages: int) -> Any:
    """The `StepInput` with page tables of `width`, and the tables of all rows with the new pages."""
    slots, known, new = packed[:, 0], packed[:, 1], packed[:, 2:]
    rows, size = tables.shape
    ahead = jnp.arange(new.shape[1], dtype=jnp.int32)
    columns = jnp.where(new == NO_PAGE, size, known[:, None]) + ahead[None]  # from T on: distinct, and dropped
    tables = tables.at[slots[:, None], columns].set(new, mode="drop", unique_indices=True)
    active = slots < rows
    page_table = jnp.where(active[:, None], tables[jnp.minimum(slots, rows - 1), :width], pages)
    return StepInput(slots, page_table, active), tables


def prefill_input(
    sequences: list[Sequence],
    batch: int,
    width: int,
    table: int,
    *,
    rows: int,
    pages: int,
    lengths: Iterable[int],
) -> np.ndarray:
    """Input for the next chunk of each sequence's context, in `width` tokens and `table` pages, for a bucket of `batch`
    entries: int32 [batch, 3 + width + table]. `lengths`: tokens of each chunk.

    The last chunk of a context draws, unless the token after it is known. Empty entries get slots from R = `rows` on.
    `pages` is P.
    """
    packed = np.zeros((batch, 3 + width + table), np.int32)
    packed[:, 0] = range(rows, rows + batch)
    packed[:, 3 + width :] = pages
    for i, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        context, slot = sequence.context, sequence.active_slot
        end = slot.prefilled + length
        after = context[end] if end < len(context) else sequence.forced_token
        packed[i, :3] = slot.index, length, NO_FORCED_TOKEN if after is None else after
        packed[i, 3 : 3 + length] = context[slot.prefilled : end]
        packed[i, 3 + width : 3 + width + len(slot.pages)] = slot.pages
        slot.placed = len(slot.pages)
    return packed


def unpack_prefill(packed: Int32[Array, "B X"], tables: Int32[Array, "R T"], width: int, pages: int) -> Any:
    """The `PrefillInput` with page tables of `width`, and the tables of all rows with these."""
    slots, length, after = packed[:, 0], packed[:, 1], packed[:, 2]
    tokens, own = packed[:, 3:-width], packed[:, -width:]
    whole = jnp.pad(own, ((0, 0), (0, tables.shape[1] - width)), constant_values=pages)
    active = slots < tables.shape[0]
    tables = tables.at[slots].set(whole, mode="drop", unique_indices=True)
    return PrefillInput(slots, own, active, tokens, length, after), tables


def admission(sequence: Sequence, vocab_size: int) -> np.ndarray:
    """A sequence's row of the state and its slot, as int32. The output that a resumed sequence already has counts in
    its penalties."""
    request, slot, params = sequence.request, sequence.active_slot, sequence.params
    alike = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
    row = new_row(
        vocab_size,
        limit=request.limit,
        prompt=request.prompt,
        output=sequence.output.tokens,
        draft_limit=_draft_limit(params) if sequence.drafts else 0,
        logprobs=params.logprobs is not None,
        logprob_ids=params.logprob_ids,
        salt=request.salt,
        prefix_length=slot.prefilled,
        top_k=min(params.top_k, vocab_size),
        min_tokens=params.min_new_tokens,
        stop_ids=request.device_stops,
        seed=request.seed,
        logit_bias=dict(params.logit_bias),
        **{name: getattr(params, name) for name in alike},
    )
    in_prompt, counts = cast(Any, row.history)
    small = [_words(leaf) for leaf in jax.tree.leaves(row._replace(history=cast(Any, None)))]
    bits, seen = np.packbits(in_prompt, bitorder="little"), np.zeros(-(-vocab_size // _WORD), "<i4")
    seen.view(np.uint8)[: bits.size] = bits
    return np.concatenate([[np.int32(slot.index)], *small, seen, *([counts] if sequence.output.tokens else [])])


def _draft_limit(params: SamplingParams) -> int:
    if not params.speculate:
        return 0
    return NO_DRAFT_LIMIT if params.draft_limit is None else params.draft_limit


def _words(value: Any) -> np.ndarray:
    value = np.atleast_1d(value)
    return value.astype(np.int32) if value.dtype == np.bool_ else value.view(np.int32)


def admission_size(row: Row, *, resumed: bool) -> int:
    """Length of an `admission` to a state with rows like `row`, whose leaves have no leading axis."""
    small = sum(leaf.size for leaf in jax.tree.leaves(row._replace(history=cast(Any, None))))
    vocab_size = row.history.counts.size
    return 1 + small + -(-vocab_size // _WORD) + vocab_size * resumed


def admit_packed(rows: Row, finished: Bool[Array, "R"], packed: Int32[Array, "X"]) -> tuple[Row, Bool[Array, "R"]]:
    """`specjax.state.admit_row` of an `admission`."""
    at = 1
    small, tree = jax.tree.flatten(rows._replace(history=cast(Any, None)))
    fields = []
    for leaf in small:
        words = packed[at : (at := at + prod(leaf.shape[1:]))].reshape(leaf.shape[1:])
        plain = leaf.dtype == np.bool_
        fields.append(words.astype(bool) if plain else jax.lax.bitcast_convert_type(words, leaf.dtype))
    vocab_size = rows.history.counts.shape[1]
    seen = packed[at : (at := at + -(-vocab_size // _WORD))]
    bits = seen[:, None] >> jnp.arange(_WORD, dtype=jnp.int32)[None] & 1
    counts = packed[at:] if packed.shape[0] > at else jnp.zeros(vocab_size, jnp.int32)
    history = History(bits.reshape(-1)[:vocab_size].astype(bool), counts)
    row = jax.tree.unflatten(tree, fields)._replace(history=history)
    return admit_row(rows, finished, packed[0], row)


class Output(NamedTuple):
    """Of a step or a prefill, on the device. One array holds what every step needs, so that it costs one copy."""

    packed: Array  # [B, 2 + J] int32: emitted, finish, tokens
    logprobs: Array  # [B, (1 + 2 * top + 128) * J] int32; copied only where a request wants them
    trace: Trace | None
    prompt: Array | None = None  # the same of a prefill's C tokens, if its program computes them


def packed(
    function: Callable[..., tuple[DecodeState, StepOutput]], *given: Any, **fixed: Any
) -> tuple[DecodeState, Output]:
    """A step or a prefill with its output packed, to be traced."""
    state, output = function(*given, **fixed)
    integers = jnp.concatenate([output.emitted[:, None], output.finish[:, None], output.tokens], axis=1)
    prompt = None if output.prompt is None else _bits(output.prompt)
    return state, Output(integers, _bits(output.logprobs), output.trace, prompt)


def _bits(found: Logprobs) -> Array:
    rows = found.drawn.shape[0]
    floats = [found.drawn, found.top.reshape(rows, -1), found.of_ids.reshape(rows, -1)]
    bits = [jax.lax.bitcast_convert_type(part, jnp.int32) for part in floats]
    return jnp.concatenate([*bits, found.top_ids.reshape(rows, -1)], axis=1)


class Read(NamedTuple):
    """A step's output on the host."""

    tokens: list[list[int]]  # [B][emitted]
    finish: list[int]  # [B]
    logprobs: Logprobs | None  # of numpy arrays


def read_output(output: Output, top: int | None) -> Read:
    """Copies a step's output to the host; waits for the step. Log-probabilities hold `top` alternatives of a token, and
    are not copied if it is None."""
    packed = np.asarray(output.packed)
    tokens = [row[2 : 2 + row[0]] for row in packed.tolist()]
    finish = packed[:, 1].tolist()
    if top is None:
        return Read(tokens, finish, None)
    return Read(tokens, finish, logprobs_from_bits(output.logprobs, packed.shape[1] - 2, top))


def logprobs_from_bits(bits: Array, width: int, top: int) -> Logprobs:
    ends = np.cumsum([width, width * top, width * LOGPROB_IDS])
    drawn, best, of_ids, ids = np.split(np.asarray(bits), ends, axis=1)
    shape = (-1, width, top)
    found: Any = (
        drawn.view(np.float32),
        best.view(np.float32).reshape(shape),
        ids.reshape(shape),
        of_ids.view(np.float32).reshape(-1, width, LOGPROB_IDS),
    )
    return Logprobs(*found)
