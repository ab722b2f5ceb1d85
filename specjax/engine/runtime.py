"""What the parts of an engine share, and the values that pass between them.

schedule     which requests run next, in which program: a `Batch`
dispatch     launches a batch: an `InFlight`
collect      reads what is in flight, the oldest first
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from itertools import zip_longest
from time import perf_counter
from types import MappingProxyType
from typing import NamedTuple

from specjax.drafters.base import Drafter
from specjax.engine.arrays import Output
from specjax.engine.buckets import Buckets
from specjax.engine.device import Device, Program
from specjax.engine.draft_policy import DraftPolicy
from specjax.engine.keys import Key
from specjax.engine.pace import Pace
from specjax.engine.programs import Programs
from specjax.engine.scheduler import Scheduler
from specjax.engine.sequence import Sequence, Status


class Batch(NamedTuple):
    """Requests that run next, and the program that they run in.

    Attributes:
        key: name of the program: what it does, and its widths.
        program: compiled.
        sequences: no more than the program has rows.
        lengths: of a prefill, tokens of each sequence.
        drafted: of a step, sequences for which it may draft.
        forced: of a step, tokens that a grammar forces, which take the place of drafts.
    """

    key: Key
    program: Program
    sequences: list[Sequence]
    lengths: List[int] = ()
    drafted: tuple[Sequence, ...] = ()
    forced: Mapping[Sequence, list[int]] = MappingProxyType({})


class InFlight(NamedTuple):
    """A batch that was launched and is not read yet.

    Attributes:
        output: on the device.
        launched: when, in seconds of `perf_counter`.
        prefilled: of a prefill, tokens of each sequence in pages before and after it.
    """

    batch: Batch
    output: Output
    launched: float = 0.0
    prefilled: List[tuple[int, int]] = ()


class Flights(deque[InFlight]):
    """Those of an engine, the oldest first. `programs` returns the number of compiled programs."""

    def __init__(self, programs: Callable[[], int]) -> None:
        super().__init__()
        self._programs, self._known, self._last_read = programs, 0, 0.0
        self._untimed = 0  # the next flights to be read, which may have ended while something compiled

    def seconds(self, flight: InFlight) -> float | None:
        """Seconds that the device took for a program whose output has just been read; None: something compiled
        meanwhile, or nobody waited for it, so that it may have been left unread while the engine had nothing to do."""
        begun, self._last_read = max(flight.launched, self._last_read), perf_counter()
        known, self._known = self._known, self._programs()
        if known != self._known:  # those behind it may have ended long ago, too, and would seem to take no time
            self._untimed = 1 + len(self)
        if self._untimed:
            self._untimed -= 1
            return None
        sequences = flight.batch.sequences
        if sequences and all(sequence.status is Status.FINISHED for sequence in sequences):
            return None
        return self._last_read - begun


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
    pace: Pace = field(init=False)
    flights: Flights = field(init=False)
    counters: Counters = field(default_factory=Counters)
    changed: dict[Sequence, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pace = Pace(self.buckets)
        self.flights = Flights(lambda: len(self.programs.compiled()))

    def give_up(self, sequence: Sequence, message: str) -> None:
        """Ends a request that cannot go on; the others do. `message`: its reason."""
        sequence.abort(message)
        self.finish(sequence)
        self.changed[sequence] = None
