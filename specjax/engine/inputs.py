"""The small numpy arrays that the host builds for a step, a prefill chunk and an admission."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from specjax.engine.sequence import Sequence
from specjax.state import NO_DRAFT_LIMIT, NO_FORCED_TOKEN, PrefillInput, Row, StepInput, new_row

_AS_THEY_ARE = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")


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
        **{name: getattr(params, name) for name in _AS_THEY_ARE},
    )
