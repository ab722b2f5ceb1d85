"""What carries a batch out: `dispatch` launches it, and `specjax.engine.collect` reads it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from itertools import zip_longest
from time import perf_counter
from typing import NamedTuple

import numpy as np

from specjax.engine.device import Device, Output, prefill_input, step_input
from specjax.engine.draft_policy import DraftPolicy
from specjax.engine.grammar_steps import WALK_SECONDS, grammar_input
from specjax.engine.plan import Batch, Buckets
from specjax.engine.programs import Programs
from specjax.engine.scheduler import Scheduler
from specjax.engine.sequence import AbortCode, Sequence, Slot, Status


class InFlight(NamedTuple):
    """A batch that is launched and not yet read."""

    batch: Batch
    sequences: List[Sequence]
    output: Output
    slots: List[Slot]  # of its sequences: a sequence with another slot, or none, has ended or was retracted
    launched: float = 0.0  # seconds of `perf_counter`
    prefilled: List[tuple[int, int]] = ()  # for a prefill: tokens of each sequence in pages before and after it


class Flights(deque[InFlight]):
    """Batches in flight, the oldest first. `programs` returns the number of compiled programs."""

    def __init__(self, programs: Callable[[], int]) -> None:
        super().__init__()
        self._programs, self._compiled, self._last_read = programs, 0, 0.0
        self._untimed = 0  # number of next flights that may have ended while something compiled

    def seconds(self, flight: InFlight) -> float | None:
        """Duration of a program whose output has just been read; None: something compiled meanwhile, or all its
        requests had ended, so that it may have been left unread."""
        begun, self._last_read = max(flight.launched, self._last_read), perf_counter()
        before, self._compiled = self._compiled, self._programs()
        if before != self._compiled:  # later flights may have ended long ago, too, and would seem to take no time
            self._untimed = 1 + len(self)
        if self._untimed:
            self._untimed -= 1
            return None
        if flight.sequences and all(sequence.status is Status.FINISHED for sequence in flight.sequences):
            return None
        return self._last_read - begun


@dataclass
class Counters:
    """Totals of an engine. Reports take differences."""

    prefilled_sequences: int = 0  # a resumed sequence counts again
    prefilled_tokens: int = 0
    cached_tokens: int = 0  # context tokens from the prefix cache
    steps: int = 0  # decode steps dispatched
    verifications: int = 0  # of one sequence in one step
    drafted_steps: int = 0  # verifications that could draft
    verified: int = 0  # tokens emitted by verifications
    generated: int = 0  # all tokens emitted
    own_steps: int = 0  # drafted steps of sequences without a grammar, whose forced tokens count as drafts
    own_accepted: int = 0  # accepted drafts in these
    accepted_at: list[int] = field(default_factory=list)  # accepted drafts, by depth - 1

    def count(self, tokens: int, *, verified: bool, drafted: bool, free: bool) -> None:
        """Counts the tokens of a sequence from a prefill or, `verified`, from a step, which could draft for it if
        `drafted`. `free`: the sequence has no grammar."""
        self.generated += tokens
        if verified:
            self.verifications += 1
            self.drafted_steps += drafted
            self.verified += tokens
            if drafted and free:
                self.own_steps += 1
                self.own_accepted += tokens - 1
            self.accepted_at += [0] * (tokens - 1 - len(self.accepted_at))
            for depth in range(tokens - 1):
                self.accepted_at[depth] += 1

    @classmethod
    def sum(cls, several: Iterable[Counters]) -> Counters:
        """Adds the counters of several engines."""
        total = cls()
        for counters in several:
            for name, value in vars(counters).items():
                if name != "accepted_at":
                    setattr(total, name, getattr(total, name) + value)
            total.accepted_at = [*map(sum, zip_longest(total.accepted_at, counters.accepted_at, fillvalue=0))]
        return total

    @property
    def accept_length(self) -> float:
        """Tokens per verification; 1.0 without any."""
        return self.verified / self.verifications if self.verifications else 1.0

    @property
    def accepted(self) -> int:
        """Number of accepted drafts."""
        return self.verified - self.verifications


@dataclass
class Runtime:
    """The parts of an engine that launch and read batches.

    Attributes:
        rows, pages, vocab_size: R, P and V.
        lossless: the verifier does not change the text.
        policy: chooses the nodes of the trees; None: each step drafts as its batch bucket says.
        sequences: those that wait or run, by id.
        changed: sequences with new tokens, or finished, that no step has returned.
    """

    device: Device
    programs: Programs
    buckets: Buckets
    scheduler: Scheduler
    flights: Flights
    counters: Counters
    rows: int
    pages: int
    vocab_size: int
    lossless: bool = True
    policy: DraftPolicy | None = None

    sequences: dict[str, Sequence] = field(default_factory=dict)
    changed: dict[Sequence, None] = field(default_factory=dict)

    def finish(self, sequence: Sequence) -> None:
        """Frees what a sequence holds."""
        self.scheduler.finish(sequence)
        self.sequences.pop(sequence.id, None)

    def give_up(self, sequence: Sequence, message: str, code: AbortCode) -> None:
        """Ends a request within a step, and reports it. `message`: why it cannot go on."""
        sequence.abort(message, code)
        self.finish(sequence)
        self.changed[sequence] = None


def dispatch(runtime: Runtime, batch: Batch) -> None:
    """Launches a batch and puts it in flight. Raises MemoryError if its program does not fit into memory."""
    key, program = batch.key, runtime.programs.get(batch.key)
    sequences, prefilled = [runtime.sequences[id] for id in batch.rows], list[tuple[int, int]]()
    launched = perf_counter()
    if key.verifies:
        inputs = step_input(sequences, key.width, runtime.programs.new_pages, runtime.rows)
        if key.kind == "constrained":
            seconds = WALK_SECONDS if runtime.lossless else math.inf
            trees = _drafted_trees(runtime, batch, inputs)
            inputs = grammar_input(batch, sequences, inputs, trees, runtime.vocab_size, seconds)
        if runtime.policy is not None and runtime.buckets.drafts(key.width):
            runtime.policy.launched(key.width, key.nodes, trial=batch.trial)
        runtime.counters.steps += 1
    else:
        snapshots = [
            runtime.scheduler.snapshot(sequence, tokens)
            for sequence, tokens in zip(sequences, batch.lengths, strict=True)
        ]
        size = {"rows": runtime.rows, "pages": runtime.pages}
        inputs = prefill_input(
            sequences, key.rows, key.width, key.table, lengths=batch.lengths, snapshots=snapshots, **size
        )
    output = runtime.device.run(key, program, inputs)
    for sequence, tokens in zip(sequences, batch.lengths, strict=False):
        start = sequence.active_slot.length
        runtime.counters.prefilled_tokens += tokens
        sequence.prefill(tokens)
        prefilled.append((start, start + tokens))
    slots = [sequence.active_slot for sequence in sequences]
    runtime.flights.append(InFlight(batch, sequences, output, slots, launched, prefilled))


def _drafted_trees(runtime: Runtime, batch: Batch, step: np.ndarray) -> np.ndarray | None:
    """The drafter's trees for a step with a grammar; None if nothing is drafted, all tokens are forced, or the
    drafter's program does not fit into memory, which is logged."""
    if batch.drafted <= batch.forced.keys():
        return None
    key = batch.key.proposal
    try:
        program = runtime.programs.get(key)
    except MemoryError:
        return None
    return np.array(runtime.device.read(runtime.device.run(key, program, step)))
