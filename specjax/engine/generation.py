"""Completions and streams of an engine that other threads may use at the same time."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from specjax.engine.sequence import (
    TEXT_FAILED,
    Completion,
    PromptLogprob,
    PromptLogprobs,
    Sequence,
    Status,
    TokenLogprob,
    TokenOrigin,
    completion,
)

if TYPE_CHECKING:
    from specjax.engine.engine import Engine

logger = logging.getLogger(__name__)

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
    """

    prompt_index: int
    text: str
    output_ids: list[int]
    completion: Completion | None
    logprobs: tuple[TokenLogprob, ...] = ()
    cached_tokens: int = 0
    origins: tuple[TokenOrigin, ...] = ()
    scores: PromptLogprobs | None = None

    @property
    def prompt_logprobs(self) -> list[PromptLogprob] | None:
        """Log-probabilities of the prompt, in the first chunk, if requested. Built at each access."""
        return None if self.scores is None else self.scores.found()


class DeltaReader:
    """Cuts the output of one sequence into stream deltas. Not thread-safe. `index`: of its prompt in the call."""

    def __init__(self, sequence: Sequence, index: int = 0) -> None:
        self.sequence, self._index = sequence, index
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


def complete(engine: Engine, sequences: list[Sequence]) -> list[Completion]:
    """Runs sequences to their end. Raises ValueError if a request with one of their ids is running, and EngineError if
    a step fails, in this thread or another."""
    try:
        for sequence in sequences:
            engine.enqueue(sequence)
        while any(sequence.status is not Status.FINISHED for sequence in sequences):
            advance(engine)
    finally:  # an interrupt must not leave requests behind
        for sequence in sequences:
            engine.end(sequence)
    return [_done(sequence) for sequence in sequences]


def stream(engine: Engine, sequences: list[Sequence]) -> Iterator[StreamChunk]:
    """Yields the text of sequences as it comes. Reads the sequences, not the report of `step`, because other threads
    may step the engine between two chunks."""
    left = [DeltaReader(sequence, index) for index, sequence in enumerate(sequences)]
    try:
        for sequence in sequences:
            engine.enqueue(sequence)
        while left:
            for reader in list(left):
                with engine.lock:
                    try:
                        chunk = reader.take()
                    except Exception:
                        _fail(reader.sequence)
                        engine.end(reader.sequence, TEXT_FAILED)
                        chunk = reader.take()
                if chunk is None:
                    continue
                if chunk.completion:
                    _done(reader.sequence)
                    left.remove(reader)
                yield chunk
            if left:
                advance(engine)
    finally:  # the caller may stop listening
        for reader in left:
            engine.end(reader.sequence)


def advance(engine: Engine) -> None:
    """Runs one step. Raises EngineError if it fails; the engine then starts from an empty state."""
    try:
        engine.step()
    except Exception as error:
        forget_frames(error)
        try:
            engine.reset(ENGINE_FAILED)
        except Exception as second:
            raise EngineError(
                f"the engine failed ({error}), and no new state could be allocated ({second}): make a new engine"
            ) from error
        problem = f"{type(error).__name__}: {error}"
        if engine.programs.is_broken(error):
            raise EngineError(f"a program that these requests need cannot be compiled: {problem}") from error
        raise EngineError(f"the engine failed and was reset; it can be used again: {problem}") from error


def forget_frames(error: BaseException | None) -> None:
    """Drops the local variables of an error's frames, which may hold the old state and so the memory for a new one."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _done(sequence: Sequence) -> Completion:
    reason = sequence.output.finish_reason
    if reason is not None and reason.message == ENGINE_FAILED:
        raise EngineError(ENGINE_FAILED)
    try:
        return completion(sequence)
    except Exception:  # of this text; the other results are kept
        _fail(sequence)
        return completion(sequence)


def _fail(sequence: Sequence) -> None:
    """Aborts a sequence whose detokenisation failed. Called within the handler of the exception."""
    logger.exception("request %s failed", sequence.id)
    sequence.abort(TEXT_FAILED)
