"""What each step's choice of its trees' size is made from (`specjax.tree_size`): measured times and acceptance.

    milliseconds   of a step of each tree width, by batch bucket and tree: the least of the last `KEPT`, since a
                   disturbance only makes a step longer. Of a width that is not measured, what was expected, corrected
                   by how wrong that was of the measured ones
    correction     accepted drafts over promised ones, of all requests, then of each: a head may be too sure of itself,
                   and of one text more than of another

Each width is tried `TRIES` times at first, and once again whenever `STALE` steps have passed without it, since times
change with the length of the texts. In a trial all other widths take forever. Where trees have fewer nodes, for they
are limited or nothing likely enough was found, a trial checks a narrower one.

Plain Python and NumPy; knows nothing of the device. The inputs go with the step's own array and the results come with
its output, so neither costs a copy or a wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specjax.engine.buckets import Buckets
from specjax.engine.flight import InFlight
from specjax.engine.keys import Key
from specjax.engine.sequence import Sequence
from specjax.engine.transfers import Read

TRIES = 3  # first steps of each width, after which its time counts as measured
STALE = 256  # steps without a width, after which it is tried again
KEPT = 9  # last steps of a width, the fastest of which counts
MEMORY = 0.95  # weight of what a request's trees promised after the next one
LONG_MEMORY = 0.99  # and of all requests'
PRIOR = 8.0  # promised drafts after which a request's own correction counts as much as that of all, and theirs as much
# as none


class Inputs(NamedTuple):
    """Of a step, for `specjax.engine.packing.with_sizing`."""

    milliseconds: list[float]  # of each width
    corrections: list[float]  # of each request


@dataclass
class _Widths:
    """Of one batch bucket and tree."""

    expected: dict[int, float]  # over a step without drafts
    recent: dict[int, deque[float]]  # milliseconds of the last steps
    checked: dict[int, int]  # steps of each
    tried: dict[int, int]
    last: dict[int, int]  # the step in which each was checked or tried last
    steps: int = 0

    def milliseconds(self) -> dict[int, float]:
        """Of each width; in any one unit where none is measured."""
        known = {w: min(one) for w, one in self.recent.items() if len(one) >= TRIES}
        wrong = [math.log(taken / self.expected[w]) for w, taken in known.items()]
        scale = math.exp(sum(wrong) / len(wrong)) if wrong else 1.0
        return {w: known.get(w, scale * ratio) for w, ratio in self.expected.items()}

    def due(self) -> int | None:
        """A width to be tried in the next step."""
        fewest = min(self.tried, key=lambda w: (self.tried[w], -w))  # the widest first
        if self.tried[fewest] < TRIES:
            return fewest
        oldest = min(self.last, key=self.last.__getitem__)
        return oldest if self.steps - self.last[oldest] > STALE else None


@dataclass
class TreeSizes:
    """Of an engine.

    Args:
        expected: a step's key -> seconds of each of its widths over those of a step without drafts, before both are
            measured.
    """

    buckets: Buckets
    expected: Callable[[Key], dict[int, float]]
    promised: float = 0.0  # of all requests, the last trees counting most
    kept: float = 0.0
    _widths: dict[tuple[int, int], _Widths] = field(default_factory=dict)
    _seen: set[Key] = field(default_factory=set)

    def inputs(self, key: Key, part: list[Sequence]) -> Inputs:
        """Of the next step of these requests, which is about to be launched."""
        own = self._of(key)
        own.steps += 1
        milliseconds, forced = own.milliseconds(), own.due()
        if forced is not None:
            own.tried[forced] += 1
            own.last[forced] = own.steps
            milliseconds = {w: taken if w == forced else math.inf for w, taken in milliseconds.items()}
        return Inputs([*milliseconds.values()], [self.correction(sequence) for sequence in part])

    @property
    def usual(self) -> float:
        """Accepted drafts for each that was promised, of all requests."""
        return (self.kept + PRIOR) / (self.promised + PRIOR)

    def correction(self, sequence: Sequence) -> float:
        """Of one request."""
        return (sequence.kept + PRIOR * self.usual) / (sequence.promised + PRIOR)

    def record(self, flight: InFlight, read: Read, seconds: float | None) -> None:
        """After a step: what was checked, how long it took, and how much of what was promised came true."""
        if read.sized is None:
            return
        emitted = {sequence: len(tokens) for sequence, tokens in zip(flight.sequences, read.tokens, strict=False)}
        if not any(emitted.values()):
            return  # dispatched before all its requests were known to have ended
        for sequence, promised in zip(flight.sequences, read.sized.promised.tolist(), strict=False):
            if sequence in flight.drafted and emitted[sequence]:
                kept = emitted[sequence] - 1
                sequence.promised = MEMORY * sequence.promised + promised
                sequence.kept = MEMORY * sequence.kept + kept
                self.promised = LONG_MEMORY * self.promised + promised
                self.kept = LONG_MEMORY * self.kept + kept
        own, nodes = self._of(flight.key), int(read.sized.nodes[0])
        own.last[nodes] = own.steps
        own.checked[nodes] += 1
        if flight.key not in self._seen:  # a program's first run takes longer
            self._seen.add(flight.key)
        elif seconds is not None:
            own.recent[nodes].append(1e3 * seconds)

    def _of(self, key: Key) -> _Widths:
        name = key.width, key.nodes
        if name not in self._widths:
            expected, widths = self.expected(key), self.buckets.sizes(key)
            times = {w: deque[float](maxlen=KEPT) for w in widths}
            zero = dict.fromkeys(widths, 0)
            self._widths[name] = _Widths({w: expected[w] for w in widths}, times, {**zero}, {**zero}, {**zero})
        return self._widths[name]

    def report(self) -> dict[str, Any] | None:
        """For people: by batch bucket, and by the nodes of a smaller tree, how often each width was checked and how
        long that takes; None: sizes are not chosen."""
        if not self.buckets.dynamic:
            return None

        def shown(own: _Widths, width: int) -> dict[str, Any]:
            times = own.recent[width]
            return {"steps": own.checked[width]} | ({"milliseconds": round(min(times), 3)} if times else {})

        found = {
            f"{batch}, draft {nodes}" if nodes else str(batch): {str(w): shown(own, w) for w in own.recent}
            for (batch, nodes), own in sorted(self._widths.items())
        }
        return {"accepted_of_promised": round(self.usual, 3), "batches": found}
