"""Which steps draft, and what the drafter is told: the choice before each step, and catching up with what the drafter
has missed while nobody drafted (`specjax.drafters.deferred`)."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, cast

from specjax.costs import PLAIN as PLAIN_TREE
from specjax.drafters.base import Drafter
from specjax.engine.adaptive import PLAIN, Adaptive
from specjax.engine.buckets import Buckets
from specjax.engine.device import Device, memory_checked
from specjax.engine.executables import Executables
from specjax.engine.flight import Flights, InFlight
from specjax.engine.packing import catch_up_input
from specjax.engine.sequence import Sequence
from specjax.engine.step_times import StepTimes, tree_of
from specjax.engine.transfers import Read, read_lag


def expected_ratio(batch: int, buckets: Buckets, drafter: Drafter, times: Callable[[Drafter], StepTimes]) -> float:
    """Seconds of a batch bucket's step with drafts over those of one without, before both were measured in use: what
    was measured on this device, else what the cost model predicts for a GPU that it knows, else from the number of
    tokens in the forward. `times`: what is known of the steps of a drafter."""
    widest = buckets.tree_widths(batch)[-1]
    drafter = drafter.within(widest)
    known = times(drafter)
    drafted, plain = (known.milliseconds(batch, tree) for tree in (tree_of(drafter), PLAIN_TREE))
    if drafted and plain:
        return drafted / plain
    free = buckets.free_tokens
    return (batch * widest + free) / (batch + free)


class Drafting:
    """Of an engine.

    Args:
        chooses: whether steps with and without drafts are chosen between; else each drafts as its batch bucket says,
            and nothing is ever missed.
        expected: see `Adaptive`.
        rows: of the device's state.

    Attributes:
        adaptive: the measurements, by the kind of step; None: nothing is chosen.
    """

    def __init__(
        self, executables: Executables, device: Device, buckets: Buckets, flights: Flights, *, chooses: bool,
        expected: Callable[[int], float], rows: int,
    ) -> None:  # fmt: skip
        self._executables, self._device, self._buckets, self._flights = executables, device, buckets, flights
        self._rows = rows
        self.adaptive: dict[str, Adaptive | None] = {
            kind: Adaptive(buckets.choices, expected) if chooses else None for kind in ("step", "constrained")
        }

    @property
    def chooses(self) -> bool:
        return self.adaptive["step"] is not None

    def choose(self, sequences: list[Sequence], kind: str) -> tuple[int, int]:
        """`Key.nodes` of the next step of these, and the catch-ups launched for it."""
        if (adaptive := self.adaptive[kind]) is None:
            return 0, 0
        batch = self._buckets.batch(len(sequences))
        nodes = adaptive.choose(batch, sequences)
        if nodes == PLAIN:
            return PLAIN, 0
        if waiting := self._executables.pending:
            ready, pending = (
                {key.nodes for key in keys if key.kind == kind and key.width == batch}
                for keys in (self._executables.compiled(), waiting)
            )
            if nodes in pending - ready and PLAIN in ready:
                return PLAIN, 0
        drafting = [sequence for sequence in sequences if sequence.params.drafts]
        launched = self.catch_up(drafting)
        return nodes if any(not sequence.unseen for sequence in drafting) else PLAIN, launched

    def catch_up(self, sequences: list[Sequence], *, ended: bool = False) -> int:
        """Dispatches a program that tells the drafter what it has missed of some of these. Returns the programs
        launched. `ended`: all of what these have said, and nothing is read of it."""
        launched = 0
        while behind := [sequence for sequence in sequences if sequence.unseen]:
            left, pages = zip(*((sequence.unseen, len(sequence.pages)) for sequence in behind), strict=True)
            keys = self._buckets.prefill_keys([*left], [*pages], None, self._executables.compiled(), "catch-up")
            key, program = self._executables.first_usable(keys)
            part, at = behind[: key.rows], perf_counter()
            slots = [cast(int, sequence.slot) for sequence in part]
            output = self._device.run(key, program, catch_up_input(slots, key.rows, self._rows))
            for sequence in part:
                sequence.unseen = max(sequence.unseen - key.width, 0)
            launched += 1
            if not ended:
                self._flights.append(InFlight(key, output, part, launched=at))
                break
        return launched

    def told(self, part: list[Sequence], forced: dict[Sequence, list[int]], *, drafts: bool) -> list[Sequence]:
        """Those of a step's requests of which the drafter sees what the step emits. Of the others it misses that.
        `drafts`: whether the step may draft."""
        told = [one for one in part if drafts and not (self.chooses and one.unseen)]
        for sequence in part if len(told) < len(part) else ():
            sequence.unseen += 0 if sequence in told else 1 + len(forced.get(sequence, ()))
        return told

    def record(self, flight: InFlight, read: Read, seconds: float | None) -> None:
        """After a step or a prefill, which took so long: what it says of the choice."""
        adaptive = self.adaptive.get(flight.key.kind)
        if seconds is None or adaptive is None or flight.key.nodes not in adaptive.choices(flight.key.width):
            return
        if not any(map(flight.forced.get, flight.sequences)):
            emitted = {sequence: len(tokens) for sequence, tokens in zip(flight.sequences, read.tokens, strict=False)}
            adaptive.record(flight.key, seconds, {one: n for one in flight.drafted if (n := emitted[one])})

    def collect(self, flight: InFlight) -> None:
        """Reads a catch-up."""
        with memory_checked(flight.key):
            lags = read_lag(flight.output)
        if (seconds := self._flights.seconds(flight)) is not None:
            for adaptive in filter(None, self.adaptive.values()):
                adaptive.record_catch_up(flight.key, seconds)
        for sequence, lag in zip(flight.sequences, lags, strict=False):
            for later in (other for other in self._flights if sequence in other.sequences):
                if later.key.kind == "catch-up":
                    lag = max(lag - later.key.width, 0)
                else:
                    lag += 0 if sequence in later.drafted else 1 + len(later.forced.get(sequence, ()))
            sequence.unseen = lag

    def report(self) -> dict[str, Any] | None:
        """For people; see `Adaptive.report`. None: nothing is chosen."""
        adaptive = self.adaptive["step"]
        return None if adaptive is None else adaptive.report()
