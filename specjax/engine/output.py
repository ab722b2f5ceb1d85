"""What a request has emitted, and what its caller gets. Host side; no device values."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from specjax.engine.text import TextStream
from specjax.trace import StepTree


@dataclass(frozen=True)
class FinishReason:
    type: str  # stop, length or abort
    matched: int | str | None = None  # the stop id or stop string
    message: str | None = None  # of an abort that is the server's fault

    def as_dict(self, length: int) -> dict[str, Any]:
        """SGLang's form: ``{"type": "stop", "matched": 2}``, ``{"type": "length", "length": 128}``."""
        details = {"stop": {"matched": self.matched}, "length": {"length": length}}
        return {"type": self.type} | details.get(self.type, {"message": self.message} if self.message else {})


class RawLogprob(NamedTuple):
    """Log-probabilities of one token, as the device computes them."""

    drawn: float
    top: tuple[tuple[int, float], ...]
    of_ids: tuple[tuple[int, float], ...] = ()


class TokenLogprob(NamedTuple):
    """Log-probabilities at one drawn token, from the raw log-softmax: before temperature, penalties, bias and cut-offs.

    Attributes:
        token: id of the drawn token.
        text: the text that this token added; joined, these are the completion's text.
        logprob: natural logarithm of its probability.
        top: ids and log-probabilities of the likeliest tokens at its position, the best first.
        of_ids: ids and log-probabilities of the tokens of `SamplingParams.logprob_ids`.
    """

    token: int
    text: str
    logprob: float
    top: tuple[tuple[int, float], ...]
    of_ids: tuple[tuple[int, float], ...] = ()


class TokenOrigin(NamedTuple):
    """Where a token came from.

    A step emits accepted drafts, then one token of the target's own. The last token of a step counts as the latter also
    where a stop or the limit cut the step short, as in the accept length; the token that prefill draws does, too.

    Attributes:
        token: id of the drawn token.
        text: the text that this token added, as in `TokenLogprob`.
        drafted: whether it was an accepted draft.
    """

    token: int
    text: str
    drafted: bool


NO_SCORES = "the log-probabilities of the prompt cannot be computed"
"""What a request ends with whose prompt no program can score."""


class PromptLogprob(NamedTuple):
    """Log-probabilities at one token of the prompt: the raw log-softmax after the tokens before it.

    Attributes:
        token: id of the prompt's token.
        logprob: natural logarithm of its probability; None for the first requested token.
        top: ids and log-probabilities of the likeliest tokens at its position, the best first.
        of_ids: ids and log-probabilities of the tokens of `SamplingParams.logprob_ids`.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    of_ids: tuple[tuple[int, float], ...] = ()


class PromptLogprobs:
    """Log-probabilities of a prompt's tokens from `start` on, each with its `top` likeliest and with the tokens `ids`.
    They are collected as chunks of the prompt are read.

    A prefill of tokens `start` to `end` gives those of tokens `start` + 1 to `end` + 1: each is drawn from the one
    before. So the first token that is asked for has none, and the prefix cache may hold only the tokens before the
    first that is still missing (`reusable`). A sequence that goes back to the queue keeps what it has and computes the
    rest.

        prompt [a b c d e], start 1: wanted are those of c, d and e; [b c] in one chunk gives c, d; `reusable` is then 3
    """

    def __init__(self, prompt: list[int], start: int, top: int, ids: List[int] = ()) -> None:
        self._prompt, self._top, self._ids = prompt, top, tuple(ids)
        self.start = start
        self._next = start + 1  # the first token that is missing
        self._parts: list[tuple[np.ndarray, ...]] = []

    @property
    def complete(self) -> bool:
        return self._next >= len(self._prompt)

    @property
    def reusable(self) -> int | None:
        """Tokens that need not be computed for what is missing; None: any number."""
        return None if self.complete else self._next - 1

    @property
    def each(self) -> int:
        """Log-probabilities of one token's place."""
        return 1 + self._top + len(self._ids)

    def add(
        self, start: int, end: int, drawn: np.ndarray, top: np.ndarray, top_ids: np.ndarray, of_ids: np.ndarray
    ) -> None:
        """What a chunk of tokens `start` to `end` gives, by its index: of its next tokens, float32 [C], of the
        likeliest, float32 and int32 [C, 20], and of the given ids, float32 [C, 128]. Keeps what is missing."""
        first, last = self._next - 1 - start, min(end, len(self._prompt) - 1) - start
        assert first >= 0, f"log-probabilities of tokens before {start + 1} are missing"
        if last > first:
            best, ids = top[first:last, : self._top], top_ids[first:last, : self._top]
            whole = drawn[first:last], best, ids, of_ids[first:last, : len(self._ids)]
            self._parts.append(tuple(part.copy() for part in whole))
            self._next += last - first

    def found(self) -> list[PromptLogprob]:
        """Of each token from `start` on that is known."""
        result = [PromptLogprob(self._prompt[self.start], None, ())]
        for part in self._parts:
            for logprob, values, tokens, of_ids in zip(*(leaf.tolist() for leaf in part), strict=True):
                token, best = self._prompt[self.start + len(result)], tuple(zip(tokens, values, strict=True))
                result.append(PromptLogprob(token, logprob, best, tuple(zip(self._ids, of_ids, strict=True))))
        return result


@dataclass(eq=False)
class Output:
    """What a request has emitted so far.

    Attributes:
        stream: turns the tokens into text.
        histogram: verify steps by the number of drafts accepted, [D + 1].
        tokens: all that were drawn, a stop token included.
        logprobs: one for each token, if requested.
        drafted: whether each token is an accepted draft, if requested.
        prompt_logprobs: of the prompt, if requested.
        trees: of its steps, if the engine keeps them.
        finish_reason: None until it has finished.
        cached: tokens of the prompt taken from the prefix cache; None until it was first admitted.
        verify_steps: decode steps.
        drafted_steps: decode steps that could draft.
        not_drafted: why the last other decode step did not draft.
    """

    stream: TextStream
    histogram: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[RawLogprob] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    trees: list[StepTree] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached: int | None = None
    verify_steps: int = 0
    drafted_steps: int = 0
    not_drafted: str | None = None

    def finish(self, reason: FinishReason) -> None:
        """Ends the text. A stop string in text that was held back replaces `reason`: it came before it."""
        self.stream.finish()
        self.finish_reason = reason if self.stream.matched is None else FinishReason("stop", self.stream.matched)

    def token_logprobs(self, start: int = 0, stop: int | None = None) -> list[TokenLogprob]:
        """Log-probabilities of the tokens from `start` on, up to `stop`. Their text must have been read."""
        raw = enumerate(self.logprobs[start:stop], start)
        return [TokenLogprob(self.tokens[i], self.stream.piece(i), *values) for i, values in raw]

    def token_origins(self, start: int = 0, stop: int | None = None) -> list[TokenOrigin]:
        """Origins of the tokens from `start` on, up to `stop`."""
        flags = enumerate(self.drafted[start:stop], start)
        return [TokenOrigin(self.tokens[i], self.stream.piece(i), drafted) for i, drafted in flags]

    @property
    def verified_tokens(self) -> int:
        """Tokens that verify steps emitted: all but the one that prefill drew."""
        return sum(count * (drafts + 1) for drafts, count in enumerate(self.histogram))

    @property
    def accept_length(self) -> float:
        """Emitted tokens per verify step; 1.0 when none was needed."""
        return self.verified_tokens / self.verify_steps if self.verify_steps else 1.0


@dataclass(frozen=True)
class Completion:
    """A finished request.

    Attributes:
        id: id of the request, made by the engine unless the caller gave one.
        text: the output as text, without its stop string unless `SamplingParams.no_stop_trim`.
        output_ids: the drawn tokens, a stop token included.
        prompt_tokens: number of the prompt's tokens.
        finish_reason: in SGLang's form: ``{"type": "stop", "matched": token id or string}``,
            ``{"type": "length", "length": tokens}``, or ``{"type": "abort"}`` with a ``message`` if the engine failed.
        spec_verify_ct: decode steps, each with one verified tree; the first token is drawn by prefill.
        spec_accept_length: tokens per decode step, the target's own included; 1.0 if no draft was accepted.
        spec_accept_histogram: decode steps by the number of drafts that were accepted, from 0 on.
        seed: seed of the sampling noise, also if it was random.
        logprobs: log-probabilities of each drawn token; None: not requested.
        trees: proposed and accepted nodes of each step; empty unless `EngineConfig.trace`.
        cached_tokens: tokens of the prompt that were taken from the prefix cache.
        origins: where each drawn token came from; None: not requested.
        scores: log-probabilities of the prompt, for `prompt_logprobs`; None: not requested.
        drafted_steps: number of decode steps that could draft.
        not_drafted: why the last other decode step did not draft; None: all could.
    """

    id: str
    text: str
    output_ids: list[int]
    prompt_tokens: int
    finish_reason: dict[str, Any]
    spec_verify_ct: int
    spec_accept_length: float
    spec_accept_histogram: list[int]
    seed: int
    logprobs: list[TokenLogprob] | None = None
    trees: list[StepTree] = field(default_factory=list)
    cached_tokens: int = 0
    origins: list[TokenOrigin] | None = None
    scores: PromptLogprobs | None = None
    drafted_steps: int = 0
    not_drafted: str | None = None

    @property
    def prompt_logprobs(self) -> list[PromptLogprob] | None:
        """Of the prompt from token `logprob_start_len` on, if requested. Made anew each time: there may be very
        many."""
        return None if self.scores is None else self.scores.found()

    @property
    def completion_tokens(self) -> int:
        return len(self.output_ids)
