"""What a streaming caller gets: the text and tokens of a sequence since the last time."""

from __future__ import annotations

from typing import NamedTuple

from specjax.engine.request import Completion, Sequence, Status, completion


class StreamChunk(NamedTuple):
    """News of one request: text and tokens since the last chunk; `completion` with the last one."""

    prompt_index: int  # which of the prompts
    text: str
    output_ids: list[int]
    completion: Completion | None


def take_news(sequence: Sequence, index: int) -> StreamChunk | None:
    """Text that a streaming caller has not had yet, with all tokens so far; None: nothing to show."""
    finished = sequence.status is Status.FINISHED
    settled = len(sequence.stream.text) if finished else sequence.stream.settled
    if settled <= sequence.sent and not finished:
        return None
    text = sequence.stream.text[sequence.sent : settled]
    tokens = sequence.output[sequence.sent_tokens :]
    sequence.sent, sequence.sent_tokens = settled, len(sequence.output)
    return StreamChunk(index, text, tokens, completion(sequence) if finished else None)
