"""One request on its way through the engine: what was asked, what it has emitted, and what it holds meanwhile.

Host side; no device values.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum

from specjax.engine.draft_policy import ACCEPTANCE_DECAY, Mean
from specjax.engine.grammar import Constraint
from specjax.engine.output import Completion, FinishReason, Output
from specjax.engine.pages import Node, Text
from specjax.engine.sampling_params import SamplingParams

TEXT_FAILED = "the request failed while its text was made"


class Status(Enum):
    WAITING = "waiting"  # no slot, no pages
    PREFILLING = "prefilling"  # has a slot; its prompt is not all dispatched
    RUNNING = "running"  # takes part in decode steps
    FINISHED = "finished"


@dataclass(frozen=True)
class Request:
    """What was asked.

    Attributes:
        limit: most tokens to emit.
        device_stops: stop ids that the step checks.
        host_stops: the stop ids that did not fit there.
        arrival: the youngest request has the largest.
        salt: requests with different salts share no n-gram memory.
        most_trees: of its steps' trees the last ones that are kept; None: all.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    limit: int
    seed: int
    device_stops: tuple[int, ...]
    host_stops: frozenset[int]
    arrival: int
    salt: int = 0
    most_trees: int | None = None


@dataclass(eq=False)
class Slot:
    """A row of the device's state and the pages that a request holds, from its admission to its end.

    Attributes:
        index: of the row.
        pages: of the context, in order.
        own: the pages that do not belong to the prefix cache.
        node: of the prefix cache: the last of the pages that it keeps for this request.
        stored: number of pages, from the first on, that are in the prefix cache.
        placed: number of pages that the device's page table holds.
        prefilled: tokens whose prefill was dispatched.
        committed: tokens in pages if the last prefill goes well: the last length read.
        certain: tokens known to be in pages.
    """

    index: int
    pages: list[int]
    own: set[int]
    node: Node | None = None
    stored: int = 0
    placed: int = 0
    prefilled: int = 0
    committed: int = 0
    certain: int = 0


@dataclass(eq=False)
class Sequence:
    """One request in the engine. The scheduler owns `status` and `slot`.

    Attributes:
        constraint: of its text, by a grammar.
        slot: None while it waits and after it has finished.
        drafts: whether it may draft; see `Drafter.costly_observe`.
        acceptance: tokens of its steps with drafts.
        leader: computes the log-probabilities of the prompt that both have.
        texts: of the context's full pages, while it waits.
        overtaken: later arrivals that were admitted first.
    """

    request: Request
    output: Output
    constraint: Constraint | None = None
    status: Status = Status.WAITING
    slot: Slot | None = None
    drafts: bool = True
    acceptance: Mean = field(default_factory=lambda: Mean(ACCEPTANCE_DECAY))
    leader: Sequence | None = None
    texts: list[Text] = field(default_factory=list)
    overtaken: int = 0

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def prompt(self) -> list[int]:
        return self.request.prompt

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def active_slot(self) -> Slot:
        """Its slot, while it has one."""
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
        """Tokens of the context whose prefill is not dispatched."""
        emitted = len(self.output.tokens)
        roots = 1 if emitted or self.constraint is not None else 0
        return len(self.prompt) + emitted - roots - self.active_slot.prefilled

    @property
    def reusable(self) -> int:
        """Tokens of the context that the prefix cache may hold. The last token is always computed, since what follows
        is drawn from it, and so is each from which a missing log-probability follows."""
        most, scores = len(self.context) - 1, self.output.prompt_logprobs
        return most if scores is None or scores.reusable is None else min(most, scores.reusable)

    def scores_within(self, tokens: int) -> bool:
        """Whether a prefill of the next `tokens` gives log-probabilities that are missing."""
        scores = self.output.prompt_logprobs
        return (
            scores is not None and scores.reusable is not None and scores.reusable < self.active_slot.prefilled + tokens
        )

    @property
    def waits_for_scores(self) -> bool:
        """Whether another sequence is about to compute the log-probabilities of this prompt."""
        scores, leader = self.output.prompt_logprobs, self.leader
        return scores is not None and leader is not None and not scores.complete and leader.status != Status.FINISHED

    @property
    def forced_token(self) -> int | None:
        """The token after the context, where it is known: it is never drawn again."""
        if self.constraint is not None and not self.output.tokens:
            return self.prompt[-1]
        return self.output.tokens[-1] if self.output.tokens else None

    @property
    def salt_key(self) -> Hashable:
        """Sequences share pages only where these are equal. The salt alone may be that of another `cache_salt`."""
        return self.params.cache_salt, self.request.salt

    @property
    def most_tokens(self) -> int:
        """The most tokens that can ever be committed: the last emitted one never is."""
        return len(self.prompt) + max(self.request.limit, 1) - 1

    def prefill(self, tokens: int) -> None:
        """Counts more tokens of the context as dispatched. After the last the device knows the first token of the
        output; the host may learn it later."""
        self.active_slot.prefilled += tokens
        if not self.left:
            self.status, self.active_slot.committed = Status.RUNNING, self.active_slot.prefilled

    def accept(self, tokens: list[int], stopped: bool, full: bool) -> int:
        """Adds the tokens that a step emitted, and finishes on a stop. Returns how many were kept: a stop string, or a
        stop id that only the host knows, may end the sequence inside the run; what follows is dropped."""
        output, stops = self.output, self.request.host_stops
        if not self.request.limit:  # the prompt has been read, which is all that was asked for
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

    def abort(self, message: str | None = None) -> None:
        """Ends it as it is. `message`: what went wrong on the server's side."""
        self.output.finish_reason = FinishReason("abort", message=message)
        if message is None:  # what failed may be the text itself
            self.output.stream.finish()

    def abort_not_finite(self) -> None:
        """Ends it because no token can be drawn from the model's logits. Keeps its text so far."""
        problem = "the model's logits are not finite (NaN or infinity)"
        message = f"{problem} after {len(self.output.tokens)} tokens of output"
        self.output.finish(FinishReason("abort", message=message))


def completion(sequence: Sequence) -> Completion:
    """The result of a sequence that has finished. Raises what fails when its text is made."""
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
        seed=sequence.request.seed,
        logprobs=output.token_logprobs() if params.logprobs is not None else None,
        trees=list(output.trees),
        origins=output.token_origins() if params.origins else None,
        scores=output.prompt_logprobs,
        drafted_steps=output.drafted_steps,
        not_drafted=output.not_drafted,
    )
