"""Log-probabilities of a prompt's tokens, collected on the host as chunks of the prompt are read.

A prefill of tokens `start` to `end` gives those of tokens `start` + 1 to `end` + 1: each is drawn from the one before.
So the first token that is asked for has none, and the prefix cache may hold only the tokens before the first that is
still missing (`reusable`). A sequence that goes back to the queue keeps what it has and computes the rest.

    prompt [a b c d e], start 1: wanted are those of c, d and e; [b c] in one chunk gives c, d; `reusable` is then 3
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

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
    """Of the tokens of a prompt from `start` on, each with its `top` likeliest, and with the tokens `ids`."""

    def __init__(self, prompt: list[int], start: int, top: int, ids: Sequence[int] = ()) -> None:
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
