"""A request in the engine: its parameters, its output so far, the pages that it holds, and its result.

Plain Python without device values.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, NamedTuple

import numpy as np

from specjax.engine.draft_policy import Own, own_acceptance
from specjax.engine.grammar import Constraint
from specjax.engine.pages import Node, Text
from specjax.engine.sampling_params import SamplingParams
from specjax.engine.text import TextStream, ThinkingBudget
from specjax.state import FULL, RUNS, STOPPED, StepTree

TEXT_FAILED = "the request failed while its text was made"
NO_SCORES = "the log-probabilities of the prompt cannot be computed"
"""Start of the abort message if no program can compute them."""

# Output


class AbortCode(StrEnum):
    """Causes of an abort that callers treat in ways of their own."""

    REQUESTED = "aborted"  # by `/abort_request` of the server
    ENGINE = "engine_failed"  # the request can be sent again
    GRAMMAR = "invalid_grammar"  # the request's grammar allows no next token
    MEMORY = "out_of_memory"  # no memory for a program that only this request needs; it may be free later


@dataclass(frozen=True)
class FinishReason:
    type: str  # stop, length or abort
    matched: int | str | None = None  # the stop id or stop string
    message: str | None = None  # why the server aborted
    code: AbortCode | None = None

    def as_dict(self, length: int) -> dict[str, Any]:
        """SGLang's form: ``{"type": "stop", "matched": 2}``, ``{"type": "length", "length": 128}``."""
        details = {
            "stop": {"matched": self.matched},
            "length": {"length": length},
            "abort": {"message": self.message, "code": self.code},
        }
        return {"type": self.type} | {name: value for name, value in details[self.type].items() if value is not None}


class RawLogprob(NamedTuple):
    """Log-probabilities of one token, from the device."""

    drawn: float
    top: tuple[tuple[int, float], ...]
    of_ids: tuple[tuple[int, float], ...] = ()


class TokenLogprob(NamedTuple):
    """Log-probabilities at one drawn token, from the raw log-softmax: before temperature, penalties, bias and cut-offs.
    A token of a forced end of thoughts is not drawn: its log-probability is 0, and `top` holds it alone.

    Attributes:
        token: id of the drawn token.
        text: text that this token added; joined, these are the completion's text.
        logprob: natural logarithm of its probability.
        top: ids and log-probabilities of the likeliest tokens at its position, best first.
        of_ids: ids and log-probabilities of the tokens of `SamplingParams.logprob_ids`.
    """

    token: int
    text: str
    logprob: float
    top: tuple[tuple[int, float], ...]
    of_ids: tuple[tuple[int, float], ...] = ()


class TokenOrigin(NamedTuple):
    """Origin of a token.

    A step emits accepted drafts and one token of the target. The last token of a step, and the token that prefill
    draws, count as the target's, also if a stop or the limit cuts the step short.

    Attributes:
        token: id of the drawn token.
        text: text that this token added, as in `TokenLogprob`.
        drafted: the token is an accepted draft.
    """

    token: int
    text: str
    drafted: bool


class PromptLogprob(NamedTuple):
    """Log-probabilities at one token of the prompt: the raw log-softmax after the tokens before it.

    Attributes:
        token: id of the prompt's token.
        logprob: natural logarithm of its probability; None for the first requested token.
        top: ids and log-probabilities of the likeliest tokens at its position, best first.
        of_ids: ids and log-probabilities of the tokens of `SamplingParams.logprob_ids`.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    of_ids: tuple[tuple[int, float], ...] = ()


class PromptLogprobs:
    """Log-probabilities of a prompt's tokens from `start` on, collected from the prefills of its chunks.

    A prefill of tokens `start` to `end` computes the values of tokens `start` + 1 to `end` + 1, since each is predicted
    at the token before it. So the first requested token has none, and the prefix cache may serve only the tokens before
    the first missing one (`reusable`). A retracted sequence keeps what it has and computes the rest.

        prompt [a b c d e], start 1: c, d and e are requested; the chunk [b c] gives c and d; `reusable` is then 3

    Args:
        top: number of likeliest tokens at each position.
        ids: further tokens at each position.
    """

    def __init__(self, prompt: list[int], start: int, top: int, ids: List[int] = ()) -> None:
        self._prompt, self._top, self._ids = prompt, top, tuple(ids)
        self.start = start
        self._next = start + 1  # the first missing token
        self._parts: list[tuple[np.ndarray, ...]] = []

    @property
    def complete(self) -> bool:
        return self._next >= len(self._prompt)

    @property
    def reusable(self) -> int | None:
        """Number of tokens whose prefill may be skipped; None: any number."""
        return None if self.complete else self._next - 1

    @property
    def each(self) -> int:
        """Log-probabilities per token."""
        return 1 + self._top + len(self._ids)

    def add(
        self, start: int, end: int, drawn: np.ndarray, top: np.ndarray, top_ids: np.ndarray, of_ids: np.ndarray
    ) -> None:
        """Adds the missing ones from a prefill of tokens `start` to `end`: float32 [C] of the next tokens, float32 and
        int32 [C, 20] of the likeliest tokens, float32 [C, 128] of the tokens `ids`."""
        first, last = self._next - 1 - start, min(end, len(self._prompt) - 1) - start
        assert first >= 0, f"log-probabilities of tokens before {start + 1} are missing"
        if last > first:
            best, ids = top[first:last, : self._top], top_ids[first:last, : self._top]
            whole = drawn[first:last], best, ids, of_ids[first:last, : len(self._ids)]
            self._parts.append(tuple(part.copy() for part in whole))
            self._next += last - first

    def found(self) -> list[PromptLogprob]:
        result = [PromptLogprob(self._prompt[self.start], None, ())]
        for part in self._parts:
            for logprob, values, tokens, of_ids in zip(*(leaf.tolist() for leaf in part), strict=True):
                token, best = self._prompt[self.start + len(result)], tuple(zip(tokens, values, strict=True))
                result.append(PromptLogprob(token, logprob, best, tuple(zip(self._ids, of_ids, strict=True))))
        return result


@dataclass(eq=False)
class SequenceOutput:
    """Output of a request so far."""

    stream: TextStream  # turns the tokens into text
    histogram: list[int]  # verify steps by the number of accepted drafts, [D + 1]
    tokens: list[int] = field(default_factory=list)  # all drawn tokens, a stop token included
    logprobs: list[RawLogprob] = field(default_factory=list)  # one per token, if requested
    drafted: list[bool] = field(default_factory=list)  # per token: is an accepted draft; if requested
    prompt_logprobs: PromptLogprobs | None = None
    trees: list[StepTree] = field(default_factory=list)  # of its steps, if the engine keeps them
    finish_reason: FinishReason | None = None  # None until it has finished
    cached: int | None = None  # prompt tokens from the prefix cache; None before the first admission
    verify_steps: int = 0  # decode steps
    drafted_steps: int = 0  # decode steps that could draft

    def finish(self, reason: FinishReason) -> None:
        """Ends the text. A stop string in text that was held back came first and replaces `reason`."""
        self.stream.finish()
        self.finish_reason = reason if self.stream.matched is None else FinishReason("stop", self.stream.matched)

    def token_logprobs(self, start: int = 0, stop: int | None = None) -> list[TokenLogprob]:
        """The text of these tokens must have been read."""
        raw = enumerate(self.logprobs[start:stop], start)
        return [TokenLogprob(self.tokens[i], self.stream.piece(i), *values) for i, values in raw]

    def token_origins(self, start: int = 0, stop: int | None = None) -> list[TokenOrigin]:
        """The text of these tokens must have been read."""
        flags = enumerate(self.drafted[start:stop], start)
        return [TokenOrigin(self.tokens[i], self.stream.piece(i), drafted) for i, drafted in flags]

    @property
    def verified_tokens(self) -> int:
        """Tokens that verify steps emitted: all but the one drawn by prefill."""
        return sum(count * (drafts + 1) for drafts, count in enumerate(self.histogram))

    @property
    def accept_length(self) -> float:
        """Emitted tokens per verify step; 1.0 without such a step."""
        return self.verified_tokens / self.verify_steps if self.verify_steps else 1.0


# Request


class Status(Enum):
    WAITING = "waiting"  # no slot, no pages
    PREFILLING = "prefilling"  # has a slot; its prompt is not all dispatched
    RUNNING = "running"  # takes part in decode steps
    FINISHED = "finished"


@dataclass(eq=False)
class Slot:
    """A row of the device's state and the pages that a request holds, from its admission to its end."""

    index: int  # row
    pages: list[int]  # of the context, in order
    own: set[int]  # pages that do not belong to the prefix cache
    node: Node | None = None  # last page in the prefix cache that is locked for this request
    placed: int = 0  # number of pages that were sent to the device's page table
    length: int = 0  # tokens in pages after all prefills that were dispatched and all steps that were read
    certain: int = 0  # tokens in pages after the programs that were read, which have succeeded
    # Of a recurrent model: the row that the next prefill reads, a prefix that another text shared and whose state is
    # worth a snapshot, and rows of snapshots by the number of pages before them.
    source: int = -1
    branch: int = 0
    snapshots: dict[int, int] = field(default_factory=dict)


@dataclass(eq=False)
class Sequence:
    """One request in the engine. The scheduler sets `status` and `slot`."""

    id: str
    prompt: list[int]
    params: SamplingParams
    limit: int  # maximum number of tokens to emit
    seed: int
    device_stops: tuple[int, ...]  # stop ids that the step checks
    host_stops: frozenset[int]  # further stop ids
    arrival: int  # the youngest request has the largest
    output: SequenceOutput
    salt: int = 0  # requests with different salts share no n-grams
    constraint: Constraint | None = None  # the grammar of its text
    budget: ThinkingBudget | None = None  # of its thoughts; None: no limit
    status: Status = Status.WAITING
    slot: Slot | None = None  # None while it waits and after it has finished
    drafts: bool = True  # may draft; see `Speculation.costly_observe`
    acceptance: Own = field(default_factory=own_acceptance)  # of its first drafts; see `DraftPolicy`
    texts: list[Text] = field(default_factory=list)  # tokens of the context's full pages, while it waits

    @property
    def active_slot(self) -> Slot:
        assert self.slot is not None, f"{self.id} has no slot"
        return self.slot

    @property
    def context(self) -> list[int]:
        """Tokens to prefill: the prompt, and for a resumed sequence all output but its last token, the root.

        With a grammar the first root is the prompt's last token: a step can mask what is drawn, a prefill cannot.
        """
        if self.constraint is not None and not self.output.tokens:
            return self.prompt[:-1]
        return self.prompt + self.output.tokens[:-1]

    @property
    def left(self) -> int:
        """Number of context tokens whose prefill is not dispatched."""
        emitted = len(self.output.tokens)
        roots = 1 if emitted or self.constraint is not None else 0
        return len(self.prompt) + emitted - roots - self.active_slot.length

    @property
    def next_left(self) -> int:
        """`left`, or the tokens to `Slot.branch`, where a chunk ends."""
        to_branch = self.active_slot.branch - self.active_slot.length
        return to_branch if 0 < to_branch < self.left else self.left

    @property
    def reusable(self) -> int:
        """Number of context tokens that the prefix cache may serve. The last token is always computed, because the next
        one is drawn from it, and so is each that predicts a missing log-probability."""
        most, scores = len(self.context) - 1, self.output.prompt_logprobs
        return most if scores is None or scores.reusable is None else min(most, scores.reusable)

    def scores_within(self, tokens: int) -> bool:
        """True if a prefill of the next `tokens` gives missing log-probabilities of the prompt."""
        reusable = None if (scores := self.output.prompt_logprobs) is None else scores.reusable
        return reusable is not None and reusable < self.active_slot.length + tokens

    @property
    def forced_token(self) -> int | None:
        """The token after the context if it is known, which is never drawn again."""
        if self.constraint is not None and not self.output.tokens:
            return self.prompt[-1]
        return self.output.tokens[-1] if self.output.tokens else None

    def forced_tokens(self, most: int) -> tuple[int, ...]:
        """At most `most` next tokens that the grammar forces, which a step emits together in place of drafts."""
        if self.constraint is None or not self.drafts:
            return ()
        limit = self.params.draft_limit
        most = most if limit is None else min(most, limit)
        return tuple(self.constraint.forced(most)) if most else ()

    @property
    def salt_key(self) -> Hashable:
        """Sequences share pages only if these are equal. The 32-bit salt alone may belong to several `cache_salt`."""
        return self.params.cache_salt, self.salt

    @property
    def most_tokens(self) -> int:
        """Maximum number of committed tokens. The last emitted token is never committed."""
        return len(self.prompt) + max(self.limit, 1) - 1

    def prefill(self, tokens: int) -> None:
        """Counts tokens of the context as dispatched. After the last one the device has the first token of the output,
        which the host may read later."""
        self.active_slot.length += tokens
        self.active_slot.source = self.active_slot.index
        if not self.left:
            self.status = Status.RUNNING

    def end_thoughts(self, tokens: list[int], finish: int) -> tuple[int, int]:
        """Replaces emitted tokens beyond the budget of thoughts by their end, as far as the limit of tokens allows.
        Returns the number of tokens of this end, 0 if all emitted tokens stay, and the new `finish`."""
        if self.budget is None or not (forced := self.budget.cut(tokens)):
            return 0, finish
        beyond = len(self.output.tokens) + len(tokens) - self.limit
        if beyond > 0:
            del tokens[-beyond:]
        finish = STOPPED if tokens[-1] in self.budget.stops else FULL if beyond >= 0 else RUNS
        return forced - max(beyond, 0), finish

    def accept(self, tokens: list[int], stopped: bool, full: bool) -> int:
        """Adds the tokens that a step emitted, and finishes on a stop. Returns the number of tokens kept: a stop string
        or a stop id of the host ends the sequence, and later tokens are dropped."""
        output, stops = self.output, self.host_stops
        if not self.limit:  # prefill alone was requested
            output.finish(FinishReason("length"))
            return 0
        last = len(tokens) - 1 if stopped else None  # the stop token: in `output`, not in the text
        if stops:
            last = next((i for i, token in enumerate(tokens) if token in stops), last)
        kept = output.stream.extend(tokens if last is None else tokens[:last])
        if not kept and last is not None:
            kept = last + 1
        if kept:
            output.tokens += tokens[:kept]
            output.finish(FinishReason("stop", output.tokens[-1]))
            return kept
        output.tokens += tokens
        if full:
            output.finish(FinishReason("length"))
        return len(tokens)

    def abort(self, message: str | None = None, code: AbortCode | None = None) -> None:
        """Ends the sequence. `message`: why the server aborts it."""
        self.output.finish_reason = FinishReason("abort", message=message, code=code)
        if message is None:  # otherwise the text itself may have failed
            self.output.stream.finish()


# Result


@dataclass(frozen=True)
class Completion:
    """A finished request.

    Attributes:
        id: id of the request, made by the engine unless the caller set one.
        text: the output as text, without its stop string unless `SamplingParams.no_stop_trim`.
        output_ids: drawn tokens, a stop token included.
        prompt_tokens: number of prompt tokens.
        finish_reason: in SGLang's form: ``{"type": "stop", "matched": token id or string}``,
            ``{"type": "length", "length": tokens}``, or ``{"type": "abort"}`` with a ``message``, and for some
            causes a ``code`` (`AbortCode`), if the engine failed.
        spec_verify_ct: decode steps, each with one verified tree; the first token is drawn by prefill.
        spec_accept_length: tokens per decode step, the target's own included; 1.0 if no draft was accepted.
        spec_accept_histogram: decode steps by the number of accepted drafts, from 0 on.
        seed: seed of the sampling noise, also if it was random.
        logprobs: log-probabilities of each drawn token; None: not requested.
        trees: proposed and accepted nodes of each step; empty unless `EngineConfig.trace`.
        cached_tokens: prompt tokens from the prefix cache.
        origins: origin of each drawn token; None: not requested.
        scores: log-probabilities of the prompt, for `prompt_logprobs`; None: not requested.
        drafted_steps: decode steps that drafted; the others were plain. AUTO drafts only where that is faster.
        message: with `tools`, `text` as the assistant's message in OpenAI's form, to append to the messages; None: no
            tools were given.
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
    message: dict[str, Any] | None = None

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls of `message` in OpenAI's form: `{"id", "type", "function": {"name", "arguments"}}`, with arguments
        as JSON text. The text of an answer that was cut off may end inside of them."""
        return list((self.message or {}).get("tool_calls", ()))

    @property
    def prompt_logprobs(self) -> list[PromptLogprob] | None:
        """Log-probabilities of the prompt from token `logprob_start_len` on, if requested. Built at each access, since
        there may be very many."""
        return None if self.scores is None else self.scores.found()

    @property
    def completion_tokens(self) -> int:
        return len(self.output_ids)


def completion(sequence: Sequence) -> Completion:
    """The result of a finished sequence. Raises whatever its detokenisation raises."""
    output, params = sequence.output, sequence.params
    assert output.finish_reason is not None
    output.stream.read()
    return Completion(
        id=sequence.id,
        text=output.stream.text,
        output_ids=list(output.tokens),
        prompt_tokens=len(sequence.prompt),
        cached_tokens=output.cached or 0,
        finish_reason=output.finish_reason.as_dict(len(output.tokens)),
        spec_verify_ct=output.verify_steps,
        spec_accept_length=output.accept_length,
        spec_accept_histogram=list(output.histogram),
        seed=sequence.seed,
        logprobs=output.token_logprobs() if params.logprobs is not None else None,
        trees=list(output.trees),
        origins=output.token_origins() if params.origins else None,
        scores=output.prompt_logprobs,
        drafted_steps=output.drafted_steps,
    )


def accept_histogram(done: Iterable[Completion]) -> list[int]:
    """Sum of the completions' `spec_accept_histogram`."""
    return [sum(bins) for bins in zip(*(one.spec_accept_histogram for one in done), strict=True)]
