"""One request on its way through the engine, and what its caller gets. Host side; no device values."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from specjax.engine.draft_policy import ACCEPTANCE_DECAY, Mean
from specjax.engine.grammar import Constraint
from specjax.engine.pages import Node, Text
from specjax.engine.prompt_logprobs import PromptLogprob, PromptLogprobs
from specjax.engine.sampling_params import SamplingParams
from specjax.engine.text import TextStream
from specjax.viz.trees import StepTree

TEXT_FAILED = "the request failed while its text was made"


class Status(Enum):
    WAITING = "waiting"  # no slot, no pages
    PREFILLING = "prefilling"  # has a slot; its prompt is not all dispatched
    RUNNING = "running"  # takes part in decode steps
    FINISHED = "finished"


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


@dataclass(eq=False)
class Sequence:
    """One request. The scheduler owns `status`, `slot` and `pages`."""

    id: str
    prompt: list[int]
    params: SamplingParams
    limit: int  # most tokens to emit
    seed: int
    device_stops: tuple[int, ...]  # checked in the step
    host_stops: frozenset[int]  # the ones that did not fit there
    stream: TextStream
    arrival: int  # youngest = largest
    constraint: Constraint | None = None  # of its text, by a grammar
    output: list[int] = field(default_factory=list)
    logprobs: list[RawLogprob] = field(default_factory=list)  # of the output, if requested
    drafted_flags: list[bool] = field(default_factory=list)  # of the output: accepted drafts, if requested
    prompt_logprobs: PromptLogprobs | None = None  # of the prompt, if requested
    leader: Sequence | None = None  # computes the log-probabilities of the prompt that both have
    trees: list[StepTree] = field(default_factory=list)  # of its steps, if the engine keeps them
    most_trees: int | None = None  # to keep, the last ones; None: all
    finish_reason: FinishReason | None = None
    status: Status = Status.WAITING
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    own: set[int] = field(default_factory=set)  # those of `pages` that do not belong to the prefix cache
    node: Node | None = None  # of the prefix cache: the last of the pages that it keeps for this sequence
    stored: int = 0  # the first so many pages are in the prefix cache
    texts: list[Text] = field(default_factory=list)  # of the context's full pages, while it waits
    overtaken: int = 0  # later arrivals that were admitted first
    cached: int | None = None  # tokens of the prompt that were taken from the prefix cache, once it was admitted
    placed: int = 0  # pages that the device's page table holds
    salt: int = 0  # sequences with different salts share no n-gram memory
    prefilled: int = 0  # tokens whose prefill was dispatched
    committed: int = 0  # tokens in pages if the last prefill goes well: the last length read
    certain: int = 0  # tokens known to be in pages
    drafts: bool = True  # whether it may draft; see `Drafter.costly_observe`
    acceptance: Mean = field(default_factory=lambda: Mean(ACCEPTANCE_DECAY))  # tokens of its steps with drafts
    verify_steps: int = 0
    drafted_steps: int = 0  # verify steps that could draft
    not_drafted: str | None = None  # why the last other verify step did not draft
    histogram: list[int] = field(default_factory=list)  # steps by drafts accepted
    sent: int = 0  # characters of the text handed to a streaming caller
    sent_tokens: int = 0
    sent_whole: int = 0  # tokens whose text was all sent, and so what is known of them
    sent_prompt: bool = False  # the log-probabilities of the prompt were sent

    @property
    def context(self) -> list[int]:
        """Tokens to prefill: the prompt, and for a resumed sequence all output but its last token, the root.

        With a grammar the first root is the prompt's last token: a step can mask what is drawn, a prefill cannot.
        """
        if self.constraint is not None and not self.output:
            return self.prompt[:-1]
        return self.prompt + self.output[:-1]

    @property
    def left(self) -> int:
        """Tokens of the context whose prefill is not dispatched."""
        roots = 1 if self.output or self.constraint is not None else 0
        return len(self.prompt) + len(self.output) - roots - self.prefilled

    @property
    def reusable(self) -> int:
        """Tokens of the context that the prefix cache may hold. The last token is always computed, since what follows
        is drawn from it, and so is each from which a missing log-probability follows."""
        most = len(self.context) - 1
        found = None if self.prompt_logprobs is None else self.prompt_logprobs.reusable
        return most if found is None else min(most, found)

    def scores_within(self, tokens: int) -> bool:
        """Whether a prefill of the next `tokens` gives log-probabilities that are missing."""
        found = None if self.prompt_logprobs is None else self.prompt_logprobs.reusable
        return found is not None and found < self.prefilled + tokens

    @property
    def waits_for_scores(self) -> bool:
        """Whether another sequence is about to compute the log-probabilities of this prompt."""
        scores, leader = self.prompt_logprobs, self.leader
        return scores is not None and leader is not None and not scores.complete and leader.status != Status.FINISHED

    @property
    def forced_token(self) -> int | None:
        """The token after the context, where it is known: it is never drawn again."""
        if self.constraint is not None and not self.output:
            return self.prompt[-1]
        return self.output[-1] if self.output else None

    @property
    def salt_key(self) -> Hashable:
        """Sequences share pages only where these are equal. The salt alone may be that of another `cache_salt`."""
        return self.params.cache_salt, self.salt

    @property
    def wants_logprobs(self) -> bool:
        return self.params.logprobs is not None

    @property
    def most_tokens(self) -> int:
        """The most tokens that can ever be committed: the last emitted one never is."""
        return len(self.prompt) + max(self.limit, 1) - 1

    def prefill(self, tokens: int) -> None:
        """Notes that so many more tokens of the context are dispatched. After the last the device knows the first token
        of the output; the host may learn it later."""
        self.prefilled += tokens
        if not self.left:
            self.status, self.committed = Status.RUNNING, self.prefilled

    def accept(self, tokens: list[int], stopped: bool, full: bool) -> int:
        """Adds the tokens that a step emitted, and finishes on a stop. Returns how many were kept: a stop string, or a
        stop id that only the host knows, may end the sequence inside the run; what follows is dropped."""
        if not self.limit:  # the prompt has been read, which is all that was asked for
            self._finish(FinishReason("length"))
            return 0
        last = len(tokens) - 1 if stopped else None  # the stop token: in `output`, not in the text
        if self.host_stops:
            last = next((i for i, token in enumerate(tokens) if token in self.host_stops), last)
        kept = self.stream.extend(tokens if last is None else tokens[:last])
        if not kept and last is not None:
            kept = last + 1
        if kept:
            self.output += tokens[:kept]
            self._finish(FinishReason("stop", self.output[-1]))
            return kept
        self.output += tokens
        if full:
            self._finish(FinishReason("length"))
        return len(tokens)

    def abort(self, message: str | None = None) -> None:
        """Ends it as it is. `message`: what went wrong on the server's side."""
        self.finish_reason = FinishReason("abort", message=message)
        if message is None:  # what failed may be the text itself
            self.stream.finish()

    def abort_not_finite(self) -> None:
        """Ends it because no token can be drawn from the model's logits. Keeps its text so far."""
        problem = "the model's logits are not finite (NaN or infinity)"
        self._finish(FinishReason("abort", message=f"{problem} after {len(self.output)} tokens of output"))

    def _finish(self, reason: FinishReason) -> None:
        self.stream.finish()
        if self.stream.matched is not None:  # also in text that was held back, so before a stop token or the limit
            reason = FinishReason("stop", self.stream.matched)
        self.finish_reason = reason

    def token_logprobs(self, start: int = 0, stop: int | None = None) -> list[TokenLogprob]:
        """Log-probabilities of the output from token `start` on, up to `stop`. Their text must have been read."""
        found = enumerate(self.logprobs[start:stop], start)
        return [TokenLogprob(self.output[i], self.stream.piece(i), *raw) for i, raw in found]

    def token_origins(self, start: int = 0) -> list[TokenOrigin]:
        """Origins of the output from token `start` on."""
        found = enumerate(self.drafted_flags[start:], start)
        return [TokenOrigin(self.output[i], self.stream.piece(i), drafted) for i, drafted in found]

    def whole_tokens(self, settled: int) -> int:
        """How many tokens have all their text in the first `settled` characters, for sure. Text that is held back holds
        back its tokens; a character of several tokens comes with the last."""
        ends, final, count = self.stream.ends, self.stream.final_tokens, self.sent_whole
        while count < final and ends[count] <= settled:
            count += 1
        return count

    @property
    def drafted_tokens(self) -> int:
        """Emitted by verification steps: all but the one that prefill drew."""
        return sum(count * (drafts + 1) for drafts, count in enumerate(self.histogram))

    @property
    def accept_length(self) -> float:
        """Emitted tokens per verification; 1.0 when none was needed."""
        return self.drafted_tokens / self.verify_steps if self.verify_steps else 1.0


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


def completion(sequence: Sequence) -> Completion:
    """The result of a sequence that has finished. Raises what fails when its text is made."""
    assert sequence.finish_reason is not None
    sequence.stream.read()
    return Completion(
        id=sequence.id,
        text=sequence.stream.text,
        output_ids=list(sequence.output),
        prompt_tokens=len(sequence.prompt),
        cached_tokens=sequence.cached or 0,
        finish_reason=sequence.finish_reason.as_dict(len(sequence.output)),
        spec_verify_ct=sequence.verify_steps,
        spec_accept_length=sequence.accept_length,
        spec_accept_histogram=list(sequence.histogram),
        seed=sequence.seed,
        logprobs=sequence.token_logprobs() if sequence.wants_logprobs else None,
        trees=list(sequence.trees),
        origins=sequence.token_origins() if sequence.params.origins else None,
        scores=sequence.prompt_logprobs,
        drafted_steps=sequence.drafted_steps,
        not_drafted=sequence.not_drafted,
    )
