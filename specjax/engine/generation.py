"""Completions and stream deltas of sequences, and the lock of an engine that several threads use."""

from __future__ import annotations

import threading
import traceback
from dataclasses import replace
from typing import Any, NamedTuple

from specjax.engine.chat.message_format import Reply
from specjax.engine.sequence import (
    Completion,
    PromptLogprob,
    PromptLogprobs,
    Sequence,
    Status,
    TokenLogprob,
    TokenOrigin,
    completion,
)

ENGINE_FAILED = "the engine failed while the request ran"  # in a step of another caller


class FairLock:
    """A reentrant lock that goes to waiting threads first. A thread that works in a loop could take one of Python's
    own locks again at once, and lock out all others."""

    def __init__(self) -> None:
        self._door, self._lock = threading.Lock(), threading.RLock()
        self._owner: int | None = None

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            self._lock.acquire()
            self._depth += 1
            return
        with self._door:  # held by the next thread while it waits for the lock
            self._lock.acquire()
            self._owner, self._depth = threading.get_ident(), 1

    def __exit__(self, *_: object) -> None:
        try:
            self._depth -= 1
            if not self._depth:
                self._owner = None
        finally:
            self._lock.release()


class StreamChunk(NamedTuple):
    """The stream delta of one request: text and tokens since the last chunk.

    Attributes:
        prompt_index: index of the prompt in the call.
        text: new text. Text that a stop string may still cut off is held back.
        output_ids: tokens drawn since the last chunk, also if their text is held back.
        completion: the whole result, in the request's last chunk; None: more chunks follow.
        logprobs: log-probabilities of the tokens whose text is all sent, if requested.
        cached_tokens: prompt tokens from the prefix cache.
        origins: origins of the same tokens, whose texts join to `text`, if requested.
        scores: log-probabilities of the prompt, for `prompt_logprobs`, in the first chunk; None: not requested.
        deltas: with `tools`, the new parts of the message, in the form of OpenAI's deltas: `content`,
            `reasoning_content` and `tool_calls`. `text` is all that the model wrote.
    """

    prompt_index: int
    text: str
    output_ids: list[int]
    completion: Completion | None
    logprobs: tuple[TokenLogprob, ...] = ()
    cached_tokens: int = 0
    origins: tuple[TokenOrigin, ...] = ()
    scores: PromptLogprobs | None = None
    deltas: tuple[dict[str, Any], ...] = ()

    @property
    def prompt_logprobs(self) -> list[PromptLogprob] | None:
        """Log-probabilities of the prompt, in the first chunk, if requested. Built at each access."""
        return None if self.scores is None else self.scores.found()


class DeltaReader:
    """Cuts the output of one sequence into stream deltas. Not thread-safe.

    Args:
        index: of its prompt in the call.
        reply: parses the text into a message; None: the message is not parsed.
    """

    def __init__(self, sequence: Sequence, index: int = 0, reply: Reply | None = None) -> None:
        self.sequence, self._index, self._reply = sequence, index, reply
        self.tokens = 0  # number of tokens sent
        self._characters = 0  # number of characters sent
        self._whole = 0  # number of tokens whose text was all sent, with their log-probabilities and origins
        self._scores_sent = False

    def take(self, count: int | None = None) -> StreamChunk | None:
        """Returns the text that has become final since the last delta, with all tokens since then; None: no new text.

        Args:
            count: read only the first `count` tokens of an unfinished sequence with `late` text, because another thread
                may add more meanwhile.

        Raises:
            Exception: whatever its detokenisation raises.
        """
        sequence, output, stream = self.sequence, self.sequence.output, self.sequence.output.stream
        finished = count is None and sequence.status is Status.FINISHED
        stream.read(count)
        origins, logprobs = sequence.params.origins, sequence.params.logprobs is not None
        if finished:
            settled, whole = len(stream.text), len(output.tokens)
        else:
            settled = stream.settled
            whole = self._whole_tokens(settled) if origins or logprobs else 0
            if origins:  # text comes with its token
                settled = stream.ends[whole - 1] if whole else 0
        if settled <= self._characters and not finished:
            return None
        text, tokens = stream.text[self._characters : settled], output.tokens[self.tokens : count]
        done = completion(sequence) if finished else None
        deltas = () if self._reply is None else tuple(self._reply.feed(text, last=finished))
        if done is not None and self._reply is not None:
            done = replace(done, message=self._reply.message())
        scores = None if self._scores_sent else output.prompt_logprobs
        start, self._scores_sent = self._whole, True
        self._characters, self.tokens, self._whole = settled, self.tokens + len(tokens), max(start, whole)
        return StreamChunk(
            self._index,
            text,
            tokens,
            done,
            logprobs=tuple(output.token_logprobs(start, whole)) if logprobs else (),
            cached_tokens=output.cached or 0,
            origins=tuple(output.token_origins(start, whole)) if origins else (),
            scores=scores,
            deltas=deltas,
        )

    def _whole_tokens(self, settled: int) -> int:
        """Number of tokens whose text is all in the first `settled` characters. A character of several tokens belongs
        to the last one."""
        stream, count = self.sequence.output.stream, self._whole
        while count < stream.final_tokens and stream.ends[count] <= settled:
            count += 1
        return count


class EngineError(RuntimeError):
    """A step failed. Its requests have ended; the engine can be used again unless the message denies it."""


def forget_frames(error: BaseException | None) -> None:
    """Drops the local variables of an error's frames, which may hold the old state and so the memory for a new one."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
