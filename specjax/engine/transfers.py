"""What a program is given, as small numpy arrays, and its output: packed, copied to the host, added to sequences."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.engine.sequence import RawLogprob, Sequence
from specjax.state import FULL, NO_DRAFT_LIMIT, NO_FORCED_TOKEN, NOT_FINITE, STOPPED, StepOutput, Trace, new_row
from specjax.step import DecodeState, PrefillInput, Row, StepInput
from specjax.verify import Logprobs
from specjax.viz.trees import step_tree

logger = logging.getLogger(__name__)


@dataclass
class Counters:
    """Totals since an engine was made. Reports take differences."""

    prefilled_sequences: int = 0  # a resumed one counts again
    prefilled_tokens: int = 0
    steps: int = 0  # decode steps dispatched
    verifications: int = 0  # of one sequence in one step
    drafted_steps: int = 0  # those of them that could draft
    verified: int = 0  # tokens that these emitted
    generated: int = 0  # all tokens emitted


class Output(NamedTuple):
    """Of a step or a prefill, on the device. One array holds what every step needs, so that it costs one copy."""

    packed: Array  # [B, 2 + J] int32: emitted, finish, tokens
    logprobs: Array  # [B, (1 + 2 * top) * J] int32; copied only where a request wants them
    trace: Trace | None


def packed(
    function: Callable[..., tuple[DecodeState, StepOutput]], *given: Any, **fixed: Any
) -> tuple[DecodeState, Output]:
    """A step or a prefill with its output packed, to be traced."""
    state, output = function(*given, **fixed)
    integers = jnp.concatenate([output.emitted[:, None], output.finish[:, None], output.tokens], axis=1)
    found, rows = output.logprobs, output.emitted.shape[0]
    floats = [found.drawn, found.top.reshape(rows, -1)]
    bits = [jax.lax.bitcast_convert_type(part, jnp.int32) for part in floats]
    return state, Output(integers, jnp.concatenate([*bits, found.top_ids.reshape(rows, -1)], axis=1), output.trace)


class Read(NamedTuple):
    """A step's output on the host."""

    tokens: np.ndarray  # [B, J]
    emitted: np.ndarray  # [B]
    finish: np.ndarray  # [B]
    logprobs: Logprobs | None  # of numpy arrays


def read_output(output: Output, top: int | None) -> Read:
    """Copies a step's output to the host; waits for the step. Log-probabilities hold `top` alternatives of a token, and
    are not copied if it is None."""
    packed = np.asarray(output.packed)
    emitted, finish, tokens = packed[:, 0], packed[:, 1], packed[:, 2:]
    if top is None:
        return Read(tokens, emitted, finish, None)
    width = tokens.shape[1]
    drawn, best, ids = np.split(np.asarray(output.logprobs), np.cumsum([width, width * top]), axis=1)
    shape = (-1, width, top)
    found: Any = (drawn.view(np.float32), best.view(np.float32).reshape(shape), ids.reshape(shape))
    return Read(tokens, emitted, finish, Logprobs(*found))


def take(sequence: Sequence, read: Read, output: Output, row: int, *, verified: bool) -> int:
    """Adds the tokens of a row to its sequence, with their log-probabilities and tree. Returns how many it kept.

    An error in its text ends this sequence; the others go on. `verified`: the tokens come from a verification, not from
    a prefill.
    """
    emitted, finish = int(read.emitted[row]), int(read.finish[row])
    kept = emitted
    try:
        kept = sequence.accept(read.tokens[row, :emitted].tolist(), finish == STOPPED, finish == FULL)
        if sequence.params.logprobs is not None and read.logprobs is not None:
            sequence.logprobs += _raw_logprobs(read.logprobs, row, kept, sequence.params.logprobs)
        if output.trace is not None:
            sequence.trees.append(step_tree(output.trace, row, read.tokens[row, :kept]))
        if finish == NOT_FINITE and sequence.finish_reason is None:
            sequence.abort_not_finite()
    except Exception:
        logger.exception("request %s failed", sequence.id)
        sequence.abort("the request failed while its text was made")
    if verified and emitted:
        sequence.verify_steps += 1
        sequence.histogram[kept - 1] += 1
        sequence.committed += emitted
    return kept


def _raw_logprobs(found: Logprobs, row: int, count: int, top: int) -> list[RawLogprob]:
    """Of the first `count` tokens of a row, each with its `top` likeliest."""
    drawn, ids, best = found.drawn[row, :count], found.top_ids[row, :count, :top], found.top[row, :count, :top]
    tops = (tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), best.tolist(), strict=True))
    return list(map(RawLogprob, drawn.tolist(), tops))


def step_input(sequences: list[Sequence], batch: int, table: int, rows: int, pages: int) -> StepInput:
    """Input of a decode step: a bucket of `batch` entries with `table` pages each.

    Empty entries get slots from R on; holes in the table hold P.
    """
    slots = rows + np.arange(batch, dtype=np.int32)
    page_table = np.full((batch, table), pages, np.int32)
    for i, sequence in enumerate(sequences):
        slots[i] = cast(int, sequence.slot)
        page_table[i, : len(sequence.pages)] = sequence.pages
    return StepInput(*cast(Any, (slots, page_table, np.arange(batch) < len(sequences))))


def prefill_input(sequence: Sequence, width: int, table: int, pages: int) -> PrefillInput:
    """The next chunk of a sequence's context, in `width` tokens and `table` pages. The last one draws, unless the
    sequence is a resumed one."""
    context = sequence.context
    length = min(len(context) - sequence.prefilled, width)
    end = sequence.prefilled + length
    tokens = np.zeros((1, width), np.int32)
    tokens[0, :length] = context[sequence.prefilled : end]
    after = context[end] if end < len(context) else sequence.forced_token
    after = NO_FORCED_TOKEN if after is None else after
    chunk: Any = {"tokens": tokens, "length": np.array([length], np.int32), "next_token": np.array([after], np.int32)}
    return PrefillInput(*step_input([sequence], 1, table, 0, pages), **chunk)


def admission_row(sequence: Sequence, vocab_size: int) -> Row:
    """A sequence's row of the state. The output that a resumed sequence already has counts in its penalties."""
    params = sequence.params
    alike = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
    return new_row(
        vocab_size,
        limit=sequence.limit,
        prompt=sequence.prompt,
        output=sequence.output,
        draft_limit=NO_DRAFT_LIMIT if params.speculate else 0,
        logprobs=params.logprobs is not None,
        salt=sequence.salt,
        top_k=min(params.top_k, vocab_size),
        min_tokens=params.min_new_tokens,
        stop_ids=sequence.device_stops,
        seed=sequence.seed,
        logit_bias=dict(params.logit_bias),
        **{name: getattr(params, name) for name in alike},
    )
