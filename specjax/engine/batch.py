"""A batch: who runs next in which program, its launch, and the batches in flight, which are not read yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from specjax.engine.arrays import Output, prefill_input, step_input
from specjax.engine.device import Program
from specjax.engine.grammar_steps import grammar_input
from specjax.engine.keys import Key
from specjax.engine.sequence import Sequence, Status

if TYPE_CHECKING:
    from specjax.engine.runtime import Runtime


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


def dispatch(run: Runtime, batch: Batch) -> None:
    """Launches a batch, which is in flight from then on."""
    key, sequences, prefilled = batch.key, batch.sequences, []
    launched = perf_counter()
    if key.verifies:
        inputs = step_input(sequences, key.width, run.new_pages, run.rows)
        if key.kind == "constrained":
            inputs = grammar_input(run, batch, inputs)
        run.counters.steps += 1
    else:
        inputs = prefill_input(
            sequences, key.rows, key.width, key.table, rows=run.rows, pages=run.pages, lengths=batch.lengths
        )
    output = run.device.run(key, batch.program, inputs)
    for sequence, tokens in zip(sequences, batch.lengths, strict=False):
        start = sequence.active_slot.prefilled
        run.counters.prefilled_tokens += tokens
        sequence.prefill(tokens)
        prefilled.append((start, start + tokens))
    run.flights.append(InFlight(batch, output, launched, prefilled))
