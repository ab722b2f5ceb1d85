"""Reading the results of programs in flight, and what follows from them for sequences, counters and measurements."""

from __future__ import annotations

from collections.abc import Callable

from jax.profiler import TraceAnnotation

from specjax.engine.buckets import Buckets
from specjax.engine.device import memory_checked
from specjax.engine.draft_policy import DraftPolicy
from specjax.engine.flight import Flights, InFlight
from specjax.engine.notes import not_drafted
from specjax.engine.pace import Pace
from specjax.engine.scheduler import Scheduler
from specjax.engine.sequence import Sequence, Status
from specjax.engine.transfers import Counters, Output, Read, read_output, take, take_prompt
from specjax.state import NOT_FINITE, RUNS
from specjax.verify import TOP_LOGPROBS


class Collector:
    """Of an engine.

    Args:
        policy: learns from each step; None: nothing is chosen.
        check: called with an output before that is read; see `Device.check`.
        report: notes a sequence that has new tokens or has finished.
        finish: frees what a sequence holds.
    """

    def __init__(
        self, scheduler: Scheduler, buckets: Buckets, pace: Pace, policy: DraftPolicy | None,
        flights: Flights, counters: Counters, *, vocab_size: int,
        check: Callable[[Output], None], report: Callable[[Sequence], object], finish: Callable[[Sequence], object],
    ) -> None:  # fmt: skip
        self._scheduler, self._buckets, self._pace, self._policy = scheduler, buckets, pace, policy
        self._flights, self._counters = flights, counters
        self._top = min(TOP_LOGPROBS, vocab_size)
        self._check, self._report, self._finish = check, report, finish

    def collect(self, flight: InFlight) -> None:
        """Reads one program's result, and what follows from it; waits for it."""
        wanted = any(sequence.wants_logprobs for sequence in flight.sequences)
        with memory_checked(flight.key), TraceAnnotation("wait"):
            self._check(flight.output)
            read = read_output(flight.output, self._top if wanted else None)
        seconds = self._flights.seconds(flight)
        verified = flight.key.verifies
        drafts = flight.key.drafts and self._buckets.drafts(flight.key.width)
        if seconds is not None:
            self._pace.record(flight.key, seconds, max((start for start, _ in flight.prefilled), default=0))
        self._record(flight, read, seconds)
        ended = list[Sequence]()
        drafting = set(flight.drafted if drafts else ())
        for i, (sequence, tokens, finish) in enumerate(zip(flight.sequences, read.tokens, read.finish, strict=False)):
            if sequence.status is Status.FINISHED:
                continue
            if verified:
                sequence.committed += len(tokens)
            if tokens and sequence.constraint is not None:
                sequence.constraint.consume(tokens)
            if flight.prefilled and finish != NOT_FINITE:
                start, sequence.certain = flight.prefilled[i]
                self._scheduler.store(sequence)
                take_prompt(sequence, flight.output, i, start, sequence.certain, self._top)
            if not tokens and finish == RUNS:
                continue
            kept = take(sequence, read, flight.output, i, verified=verified)
            stepped = verified and bool(tokens)
            drafted, free = sequence in drafting, sequence.params.grammar is None
            self._counters.count(kept, verified=stepped, drafted=drafted, free=free)
            sequence.drafted_steps += stepped and drafted
            if stepped and not drafted:
                sequence.not_drafted = not_drafted(self._buckets, flight.key, sequence)
            if sequence.finish_reason is not None:
                ended.append(sequence)
            self._report(sequence)
        for sequence in ended:
            self._finish(sequence)

    def _record(self, flight: InFlight, read: Read, seconds: float | None) -> None:
        """Reports a step without forced tokens to the policy."""
        if self._policy is None or seconds is None or flight.key.kind != "step" or any(flight.forced.values()):
            return
        if self._buckets.drafts(flight.key.width):
            emitted = dict(zip(flight.sequences, map(len, read.tokens), strict=False))
            drafted = {sequence: emitted[sequence] for sequence in flight.drafted if emitted[sequence]}
            self._policy.record(flight.key.width, flight.key.nodes, seconds, drafted)
