"""What the parts of an engine share: its state, its collaborators and its counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import zip_longest

from specjax.drafters.base import Drafter
from specjax.engine.batch import Flights
from specjax.engine.buckets import Buckets
from specjax.engine.device import Device
from specjax.engine.draft_policy import DraftPolicy
from specjax.engine.programs import Programs
from specjax.engine.scheduler import Scheduler
from specjax.engine.sequence import Sequence


@dataclass
class Counters:
    """Totals since an engine was made. Reports take differences."""

    prefilled_sequences: int = 0  # a resumed one counts again
    prefilled_tokens: int = 0
    cached_tokens: int = 0  # of their contexts, taken from the prefix cache instead
    steps: int = 0  # decode steps dispatched
    verifications: int = 0  # of one sequence in one step
    drafted_steps: int = 0  # those of them that could draft
    verified: int = 0  # tokens that these emitted
    generated: int = 0  # all tokens emitted
    own_steps: int = 0  # drafted steps of sequences without a grammar, which forces tokens that count as drafts
    own_accepted: int = 0  # drafts that became text in these
    accepted_at: list[int] = field(default_factory=list)  # drafts that became text, by depth - 1

    def count(self, kept: int, *, verified: bool, drafted: bool, free: bool) -> None:
        """A sequence, `free` of a grammar, kept so many tokens of a prefill or, `verified`, of a step, that could draft
        for it."""
        self.generated += kept
        if verified:
            self.verifications += 1
            self.drafted_steps += drafted
            self.verified += kept
            if drafted and free:
                self.own_steps += 1
                self.own_accepted += kept - 1
            self.accepted_at += [0] * (kept - 1 - len(self.accepted_at))
            for depth in range(kept - 1):
                self.accepted_at[depth] += 1

    @classmethod
    def sum(cls, several: Iterable[Counters]) -> Counters:
        """Those of several engines together."""
        found = cls()
        for each in several:
            for name, value in vars(each).items():
                if name != "accepted_at":
                    setattr(found, name, getattr(found, name) + value)
            found.accepted_at = [*map(sum, zip_longest(found.accepted_at, each.accepted_at, fillvalue=0))]
        return found

    @property
    def accept_length(self) -> float:
        """Tokens a verification; 1.0 when there was none."""
        return self.verified / self.verifications if self.verifications else 1.0

    @property
    def accepted(self) -> int:
        """Drafts that became text."""
        return self.verified - self.verifications


@dataclass
class Runtime:
    """State and collaborators of a running engine.

    Attributes:
        policy: chooses whether a step drafts; None: each drafts as its batch bucket says.
        rows: R, of the device's state.
        pages: P, of the pool.
        new_pages: most pages that a row may get between two steps.
        finish: frees what a sequence holds.
        changed: sequences with new tokens, or that have finished, since they were last reported.
    """

    scheduler: Scheduler
    programs: Programs
    device: Device
    buckets: Buckets
    drafter: Drafter
    policy: DraftPolicy | None
    rows: int
    pages: int
    new_pages: int
    vocab_size: int
    finish: Callable[[Sequence], None]
    flights: Flights = field(init=False)
    counters: Counters = field(default_factory=Counters)
    changed: dict[Sequence, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.flights = Flights(lambda: len(self.programs.compiled()))

    def give_up(self, sequence: Sequence, message: str) -> None:
        """Ends a request that cannot go on; the others do. `message`: its reason."""
        sequence.abort(message)
        self.finish(sequence)
        self.changed[sequence] = None
