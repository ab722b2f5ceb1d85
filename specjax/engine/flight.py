"""Programs in flight: launched, and not yet read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from time import perf_counter
from types import MappingProxyType
from typing import NamedTuple

from specjax.engine.keys import Key
from specjax.engine.sequence import Sequence, Status
from specjax.engine.transfers import Output


class InFlight(NamedTuple):
    key: Key
    output: Output
    sequences: list[Sequence]
    prefilled: List[tuple[int, int]] = ()  # by a prefill: tokens of each sequence in pages before and after it
    launched: float = 0.0  # when, in seconds of `perf_counter`
    drafted: tuple[Sequence, ...] = ()  # those for which a step could draft
    forced: Mapping[Sequence, list[int]] = MappingProxyType({})  # in place of drafts, by a grammar


class Flights(deque[InFlight]):
    """Those of an engine, the oldest first. `programs`: says how many programs have been compiled."""

    def __init__(self, programs: Callable[[], int]) -> None:
        super().__init__()
        self._programs, self._known, self._last_read = programs, 0, 0.0
        self._untimed = 0  # the next flights to be read, which may have ended while something compiled

    def seconds(self, flight: InFlight) -> float | None:
        """That the device took for a program whose output has just been read; None: something compiled meanwhile, or
        nobody waited for it, so that it may have been left unread while the engine had nothing to do."""
        begun, self._last_read = max(flight.launched, self._last_read), perf_counter()
        known, self._known = self._known, self._programs()
        if known != self._known:  # those behind it may have ended long ago, too, and would seem to take no time
            self._untimed = 1 + len(self)
        if self._untimed:
            self._untimed -= 1
            return None
        if flight.sequences and all(sequence.status is Status.FINISHED for sequence in flight.sequences):
            return None
        return self._last_read - begun
