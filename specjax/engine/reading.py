"""What a step gave to one sequence."""

from __future__ import annotations

import logging

from specjax.engine.compiled import Output, Read
from specjax.engine.request import FAILED_TEXT, Sequence, raw_logprobs
from specjax.inspection import step_tree
from specjax.step import FULL, NOT_FINITE, STOPPED

logger = logging.getLogger(__name__)


def take(sequence: Sequence, read: Read, output: Output, row: int) -> int:
    """Adds the tokens of a row to its sequence, with their log-probabilities and tree. Returns how many it kept.

    What goes wrong with its text ends this sequence; the others go on.
    """
    emitted, finish = int(read.emitted[row]), int(read.finish[row])
    kept = emitted
    try:
        kept = sequence.accept(read.tokens[row, :emitted].tolist(), finish == STOPPED, finish == FULL)
        if sequence.params.logprobs is not None and read.logprobs is not None:
            sequence.logprobs += raw_logprobs(read.logprobs, row, kept, sequence.params.logprobs)
        if output.trace is not None:
            sequence.trees.append(step_tree(output.trace, row, read.tokens[row, :kept]))
        if finish == NOT_FINITE and sequence.finish_reason is None:
            sequence.break_off()
    except Exception:
        logger.exception("request %s failed", sequence.id)
        sequence.abort(FAILED_TEXT)
    return kept
