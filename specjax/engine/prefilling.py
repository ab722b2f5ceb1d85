"""Launching the next prefill: whose prompts, how much of them, and in which program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter

from specjax.engine.buckets import Buckets
from specjax.engine.device import Device
from specjax.engine.executables import Executables
from specjax.engine.flight import Flights, InFlight
from specjax.engine.keys import Key
from specjax.engine.pace import Pace
from specjax.engine.packing import prefill_input
from specjax.engine.programs import Unavailable
from specjax.engine.prompt_logprobs import NO_SCORES
from specjax.engine.scheduler import Scheduler
from specjax.engine.sequence import Sequence, Status
from specjax.engine.transfers import Counters


class Prefills:
    """Of an engine.

    Args:
        rows: of the device's state.
        pages: of the pool.
        give_up: ends a request that cannot go on, with a message.
    """

    def __init__(
        self, scheduler: Scheduler, executables: Executables, device: Device, buckets: Buckets, pace: Pace,
        flights: Flights, counters: Counters, *, rows: int, pages: int, give_up: Callable[[Sequence, str], None],
    ) -> None:  # fmt: skip
        self._scheduler, self._executables, self._device, self._buckets = scheduler, executables, device, buckets
        self._pace, self._flights, self._counters = pace, flights, counters
        self._rows, self._pages, self._give_up = rows, pages, give_up

    def launch(self, *, waits: bool, put_off: list[Key]) -> int:
        """Dispatches the next chunk of one prompt or of several. Returns the programs launched.

        Args:
            waits: as `Engine.waits`.
            put_off: gets the programs that are needed, and that another thread compiles.
        """
        kind, prompts = self._next(waits, put_off)
        if not prompts or (not self._running() and any(map(self._is_long, self._flights))):
            return 0
        try:
            key, program = self._executables.first_usable(self._keys(prompts, kind))
        except Unavailable as error:
            if kind != "scoring":
                raise
            # Only this request needs such a program.
            self._give_up(prompts[0], f"{NO_SCORES}: {error}")
            return 0
        lengths = key.lengths(sequence.left for sequence in prompts)
        part = prompts[: len(lengths)]
        sizes = {"rows": self._rows, "pages": self._pages, "lengths": lengths}
        inputs = prefill_input(part, key.rows, key.width, key.table, **sizes)
        at = perf_counter()
        output = self._device.run(key, program, inputs)
        prefilled = []
        for sequence, tokens in zip(part, lengths, strict=True):
            start = sequence.prefilled
            self._counters.prefilled_tokens += tokens
            sequence.prefill(tokens)
            prefilled.append((start, sequence.prefilled))
        self._flights.append(InFlight(key, output, part, prefilled, at))
        return 1

    def _next(self, waits: bool, put_off: list[Key]) -> tuple[str, list[Sequence]]:
        """The kind of the next prefill and its prompts. One whose log-probabilities are wanted goes alone; while the
        program for them compiles, the others go on."""
        prompts = self._scheduler.prefilling()
        plain = [sequence for sequence in prompts if not sequence.scores_within(self._buckets.chunks[-1])]
        if not prompts or prompts[0] in plain:
            return "prefill", plain
        key = next(self._keys(prompts[:1], "scoring"))
        others = len(self._scheduler.active) + len(plain) > len(prompts)
        if (others or not waits) and not self._executables.compile_ahead(key):
            put_off.append(key)
            return "prefill", plain
        return "scoring", prompts[:1]

    def _keys(self, prompts: list[Sequence], kind: str) -> Iterator[Key]:
        left, pages = zip(*((sequence.left, len(sequence.pages)) for sequence in prompts), strict=True)
        running, context = self._running(), prompts[0].prefilled
        waiting = len(self._scheduler.active) - running
        limit = self._pace.room(running, waiting, context) if running else self._pace.while_none_runs(waiting, context)
        return self._buckets.prefill_keys([*left], [*pages], limit, self._executables.compiled(), kind, running=running)

    def _running(self) -> int:
        """Requests that decode."""
        return sum(sequence.status is not Status.PREFILLING for sequence in self._scheduler.active)

    def _is_long(self, flight: InFlight) -> bool:
        if flight.key.kind != "prefill":
            return False
        return not self._pace.is_brief(flight.key, max(start for start, _ in flight.prefilled))
