"""Structured output: what a sequence's grammar allows after each token.

A `Constraint` consumes the tokens that were emitted and gives a bit for each token that may come next: at the root of a
draft tree, and at all its nodes. What it allows depends on the tokens so far and on nothing else, so that the text is
the same with and without drafts. Host side; knows nothing of the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher

WORD = 32  # bits
ALL = np.uint32(2**32 - 1)
LEXER = "lexer error"  # in the library's messages
SLOW_SECONDS = 0.005  # of the processor for a mask, from which on a sequence's masks are computed by other threads


class Reasoning(NamedTuple):
    """Tokens around what a model thinks before it answers. The grammar begins after `end`."""

    start: int
    end: int
    begun: bool  # by the prompt; else the model may begin


class Phase(Enum):
    START = "start"  # the next token may begin the reasoning
    REASONING = "reasoning"  # any token but an end may come
    ANSWER = "answer"  # follows the grammar


class Constraint:
    """What one sequence may say next.

    Attributes:
        failure: why the sequence cannot go on, found when its next mask was computed; None: it can.
        eos_ids: tokens that end the text where the grammar may end.
        slow: a mask took more than `SLOW_SECONDS`. From then on `submit` runs what computes them, in another thread, so
            that other requests go on meanwhile; no tokens are forced, and none drafted.
    """

    def __init__(
        self,
        compiled: LLMatcher,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        reasoning: Reasoning | None = None,
        *,
        submit: Callable[[Callable[[], None]], Future[None]],
        renew: Callable[[LLMatcher], tuple[LLMatcher, bool]] | None = None,
        slow: bool = False,
    ) -> None:
        self.slow, self._submit = slow, submit
        self._renew, self._renewed_at = renew, -1  # tokens that were consumed when a new one was compiled
        self._pending: Future[None] | None = None  # computes `_mask`
        self._compiled, self._words = compiled, -(-vocab_size // WORD)
        self._matcher: LLMatcher | None = None  # made at the first use: many sequences may wait
        self.eos_ids, self._reasoning = eos_ids, reasoning
        self._consumed: list[int] = []  # by the matcher
        self._ahead: list[int] = []  # and besides, while a tree is walked
        self._phase = Phase.ANSWER if reasoning is None else Phase.REASONING if reasoning.begun else Phase.START
        self._mask: np.ndarray | None = None  # of the next token, once it is asked for
        self.failure: str | None = None
        self._ended = False  # by one of `eos_ids`

    @property
    def over(self) -> bool:
        """Whether nothing may follow but the end."""
        return self._matcher is not None and self._matcher.is_stopped()

    def consume(self, tokens: Sequence[int]) -> None:
        """After these tokens were emitted. A limit of the library that they exceed is a `failure`."""
        self._mask = None
        for token in tokens:
            if self._ended or self._step_phase(token):
                continue
            while not self._matching.consume_token(token):
                if not self._recover():
                    self._fail()
                    return
            self._consumed.append(token)
            self._ended = token in self.eos_ids

    def mask(self) -> np.ndarray:
        """uint32 [ceil(V / 32)]: bit ``v % 32`` of word ``v // 32`` says whether token v may come next. All bits, and
        `failure`, where none may. Waits for the thread that computes it, if one does."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None
        if self._mask is None:
            self._compute()
        assert self._mask is not None
        return self._mask

    def ask(self) -> Future[None] | None:
        """What the next token's mask waits for, begun if it was not; None: `mask` answers soon.

        Until it is done nothing else may be asked of this constraint.
        """
        if self.slow and self._mask is None and self._pending is None:
            self._pending = self._submit(self._compute)
        return None if self._pending is None or self._pending.done() else self._pending

    def _compute(self) -> None:
        started, found = time.thread_time(), np.zeros(self._words, np.uint32)
        self._fill(found)
        while not found.any() and self._recover():
            self._fill(found)
        if not found.any():
            self._fail()
            found[:] = ALL
        self._mask = found
        self.slow = self.slow or time.thread_time() - started > SLOW_SECONDS

    def _recover(self) -> bool:
        """After a limit of the lexer was met, which counts what all sequences with this compiled grammar have needed:
        goes on with another compiled form. False: a new one has met it, too, or the reason is another one."""
        if self._renew is None or LEXER not in self._matching.get_error():
            return False
        while self._renewed_at != len(self._consumed):
            self._compiled, new = self._renew(self._compiled)
            if new:
                self._renewed_at = len(self._consumed)
            self._restore()
            if not self._matching.is_error():
                return True
        return False

    def _fail(self) -> None:
        self.failure = f"its grammar cannot be followed: {said(self._matching) or 'no token may come next'}"

    def problem(self) -> str | None:
        """`failure`, once the next token's mask is known."""
        self.mask()
        return self.failure

    def forced(self, most: int) -> list[int]:
        """The tokens that must come next, as far as they are known, at most so many."""
        if self._phase is not Phase.ANSWER or self.failure is not None or self.slow:
            return []
        tokens = self._matching.compute_ff_tokens()[:most]
        count = self._matching.try_consume_tokens(tokens)
        if count == len(tokens) < most and len(self.eos_ids) == 1 and self.over:
            tokens.append(self.eos_ids[0])
        if count and not self._matching.rollback(count):
            self._restore()
        return tokens

    def masks(
        self, tokens: np.ndarray, parents: np.ndarray, valid: np.ndarray, out: np.ndarray, deadline: float = math.inf
    ) -> np.ndarray:
        """Walks a draft tree.

        Args:
            tokens, parents, valid: [N], of its nodes, parents before children; node 0 is the root, the last emitted
                token.
            out: uint32 [N, ceil(V / 32)], of ones: gets the bits of each node that is kept.
            deadline: of `perf_counter`, after which no more nodes are looked at.

        Returns:
            bool [N]: nodes that are kept: the root, and valid ones that the grammar allows below such.
        """
        out[0] = self.mask()
        kept = np.zeros(len(tokens), bool)
        kept[0] = True
        children: dict[int, list[int]] = {}
        for node in range(1, len(tokens)):
            if valid[node]:
                children.setdefault(int(parents[node]), []).append(node)

        def visit(node: int) -> None:
            """The children of a node whose bits are in `out`."""
            for child in children.get(node, ()):
                token = int(tokens[child])
                if not out[node, token // WORD] >> np.uint32(token % WORD) & 1 or time.perf_counter() > deadline:
                    continue
                if token in self.eos_ids:  # nothing is emitted after it
                    kept[child] = True
                    continue
                phase = self._phase
                consumed = not self._step_phase(token)
                if not consumed or self._consume_ahead(token):
                    bits = np.zeros_like(out[child])
                    self._fill(bits)
                    if bits.any():
                        out[child], kept[child] = bits, True
                        visit(child)
                if consumed:
                    self._take_back()
                self._phase = phase

        if children and self.failure is None and not self.slow:
            visit(0)
        return kept

    @property
    def _matching(self) -> LLMatcher:
        if self._matcher is None:
            self._matcher = self._compiled.deep_copy()
        return self._matcher

    def _consume_ahead(self, token: int) -> bool:
        self._ahead.append(token)
        return self._matching.consume_token(token)

    def _take_back(self) -> None:
        """Undoes the last `_consume_ahead`."""
        self._ahead.pop()
        if self._matching.is_error() or not self._matching.rollback(1):
            self._restore()

    def _restore(self) -> None:
        """After an error, from which the library knows no way back: a new matcher in the state of this one."""
        self._matcher = self._compiled.deep_copy()
        self._matcher.try_consume_tokens([*self._consumed, *self._ahead])

    def _step_phase(self, token: int) -> bool:
        """Before the grammar begins: whether the token belongs to the reasoning."""
        if self._reasoning is None or self._phase is Phase.ANSWER:
            return False
        if self._phase is Phase.START and token != self._reasoning.start:
            self._phase = Phase.ANSWER
            return False
        self._phase = Phase.ANSWER if token == self._reasoning.end else Phase.REASONING
        return True

    def _fill(self, words: np.ndarray) -> None:
        """Puts the bits of the next token into uint32 [ceil(V / 32)] of zeros; none where the library has an error."""
        if self._phase is Phase.REASONING:
            words[:] = ALL
            for token in self.eos_ids:
                words[token // WORD] &= ~np.uint32(1 << token % WORD)
            return
        if not self._matching.is_error():
            self._matching.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matching.is_error():
            words[:] = 0
        if self._phase is Phase.START and self._reasoning is not None and words.any():
            words[self._reasoning.start // WORD] |= np.uint32(1 << self._reasoning.start % WORD)


def said(matcher: LLMatcher) -> str:
    """The library's message."""
    said = matcher.get_error().replace("<non-verbose/>", "").strip()[:400]
    return "no text, of any length, follows it" if said == "NoExtensionBias" else said
