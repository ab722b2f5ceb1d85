"""Stream deltas: the text and tokens of a sequence since a streaming caller's last chunk."""

from __future__ import annotations

from typing import NamedTuple

from specjax.engine.sequence import Completion, Sequence, Status, TokenLogprob, completion


class StreamChunk(NamedTuple):
    """The delta of one request: text and tokens since the last chunk, and with the last chunk its `completion`."""

    prompt_index: int  # which of the prompts
    text: str
    output_ids: list[int]
    completion: Completion | None
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens whose text is all sent, if requested


def take_delta(sequence: Sequence, index: int) -> StreamChunk | None:
    """The text that has become final since the last delta, with all tokens since then. None: no new text."""
    finished = sequence.status is Status.FINISHED
    settled = len(sequence.stream.text) if finished else sequence.stream.settled
    if settled <= sequence.sent and not finished:
        return None
    text = sequence.stream.text[sequence.sent : settled]
    tokens = sequence.output[sequence.sent_tokens :]
    sequence.sent, sequence.sent_tokens = settled, len(sequence.output)
    ends, final = sequence.stream.ends, sequence.stream.final_tokens
    # Text that is held back holds back its tokens; a character of several tokens comes with the last.
    logprobs = tuple(
        found
        for i, found in enumerate(sequence.token_logprobs(sequence.sent_logprobs), start=sequence.sent_logprobs)
        if finished or (i < final and ends[i] <= settled)
    )
    sequence.sent_logprobs += len(logprobs)
    return StreamChunk(index, text, tokens, completion(sequence) if finished else None, logprobs)
