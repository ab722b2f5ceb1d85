"""Launching the next decode steps, and reading what is in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import islice
from time import perf_counter

import numpy as np

from specjax.engine.buckets import Buckets
from specjax.engine.choice import PLAIN
from specjax.engine.collecting import Collector, Known
from specjax.engine.device import Device
from specjax.engine.drafting import Drafting
from specjax.engine.executables import Executables
from specjax.engine.flight import Flights, InFlight
from specjax.engine.grammar import GRAMMAR_FAILED
from specjax.engine.grammar_steps import GrammarSteps
from specjax.engine.keys import Key
from specjax.engine.packing import step_input
from specjax.engine.scheduler import Scheduler
from specjax.engine.sequence import Sequence, Status
from specjax.engine.transfers import Counters


class Steps:
    """Of an engine.

    Args:
        overlap: a step is launched before the last one is read.
        rows: of the device's state.
        new_pages: that a row may get between two steps, at most.
        give_up: ends a request that cannot go on, with a message.
    """

    def __init__(
        self, scheduler: Scheduler, executables: Executables, device: Device, buckets: Buckets, flights: Flights,
        counters: Counters, drafting: Drafting, grammar: GrammarSteps, collector: Collector, *,
        overlap: bool, rows: int, new_pages: int, give_up: Callable[[Sequence, str], None],
    ) -> None:  # fmt: skip
        self._scheduler, self._executables, self._device, self._buckets = scheduler, executables, device, buckets
        self._flights, self._counters, self._drafting = flights, counters, drafting
        self._grammar, self._collector = grammar, collector
        self._overlap, self._rows, self._new_pages, self._give_up = overlap, rows, new_pages, give_up
        self._known = list[Known]()  # results that were read and not yet collected; empty between two iterations

    def launch(self, *, waits: bool, put_off: list[Key], masks: list[Future[None]]) -> int:
        """Dispatches one step for each running request: in one batch, or in several where no program serves them all.
        Returns the programs launched.

        Args:
            waits: as `Engine.waits`.
            put_off: gets the programs that are needed, and that another thread compiles.
            masks: gets the masks that other threads compute.
        """
        ahead, self._grammar.ahead = self._grammar.ahead, None
        launched, choice = 0, dict[int, int]()  # of nodes, by batch bucket
        if self._overlap and self._grammar.goes_on(self._flights, self._scheduler.running()):
            running = self._reserved()
            if self._flights:  # else pages had run out, and it was read
                nodes, launched = self._drafting.choose(running, "constrained")
                if (key := self._grammar.key_ahead(running, nodes)) is not None:
                    self._launch_unread(key, running)
                    return 1 + launched
                choice[self._buckets.batch(len(running))] = nodes
        self._read_constrained()
        left = self._able(self._reserved(), waits, masks)
        while left:
            pages = max(len(sequence.pages) for sequence in left)
            kind = "constrained" if any(sequence.constraint for sequence in left) else "step"
            made = choice.pop(self._buckets.batch(len(left)), None) if kind == "constrained" else None
            nodes, more = self._drafting.choose(left, kind) if made is None else (made, 0)
            forced, jumps = dict[Sequence, list[int]](), False
            if kind == "step":
                ready = self._executables.compiled(), self._executables.pending
                keys = self._buckets.step_keys(len(left), pages, *ready, nodes)
            else:
                forced, jumps = self._grammar.forced(left, nodes)
                keys = self._grammar.keys(len(left), pages, 0 if forced else PLAIN if jumps else nodes)
                others = [sequence for sequence in left if not sequence.constraint]
                if (others or not waits) and (missing := self._grammar.missing(keys)):
                    put_off += missing
                    left, launched = others, launched + more  # they need not wait for the compiler
                    continue
            key, program = self._executables.first_usable(keys)
            part, left = left[: key.width], left[key.width :]
            inputs, at = self._step_input(key, part), perf_counter()
            told = self._drafting.told(part, forced, drafts=key.drafts)
            drafted = tuple(sequence for sequence in told if sequence.params.drafts)
            drafting = list[Sequence]()
            if kind == "constrained":
                drafting = [] if jumps else [sequence for sequence in drafted if not forced.get(sequence)]
                inputs = self._grammar.inputs(key, part, inputs, forced, drafting, ahead)
            output = self._device.run(key, program, inputs)
            self._flights.append(InFlight(key, output, part, launched=at, drafted=drafted, forced=forced))
            if drafting and not forced and self._overlap:
                # Runs while the host reads this step. There are pages for both, if what was forced was no more.
                self._grammar.ahead = self._grammar.draft(key, part, self._step_input(key, part))
            self._counters.steps += 1
            launched += 1 + more
        return launched

    def _launch_unread(self, key: Key, part: list[Sequence]) -> None:
        """Dispatches a step of requests whose last one is in flight, and then reads that, from which the masks of this
        one follow."""
        inputs, at = self._step_input(key, part), perf_counter()
        self._drafting.told(part, {}, drafts=False)
        posting, inputs = self._grammar.ticket(key, inputs)
        try:
            output = self._device.run(key, self._executables.get(key), inputs)
            self._flights.append(InFlight(key, output, part, launched=at))
            self._read_constrained(1)
        finally:
            self._grammar.post(posting, key, part)
        self._counters.steps += 1

    def collect_all_but(self, count: int) -> None:
        """Reads the steps in flight, the oldest first, until `count` are left. Reports the sequences that have new
        tokens or have finished."""
        self.settle()
        while len(self._flights) > count:
            self._collector.collect(self._flights.popleft())

    def settle(self) -> None:
        """Collects what was read."""
        while self._known:
            self._collector.take(self._known.pop(0))

    def forget(self) -> None:
        """What is in flight, a draft launched ahead too, and what was read and not collected."""
        self._flights.clear()
        self._known.clear()
        self._grammar.ahead = None

    def _step_input(self, key: Key, part: list[Sequence]) -> np.ndarray:
        return step_input(part, key.width, self._new_pages, self._rows)

    def _read_constrained(self, behind: int = 0) -> None:
        """Reads the steps whose tokens a grammar waits for: what it allows next depends on what came last. Where all
        goes on, the rest of what follows from them is left until the next step is launched. `behind`: programs that
        wait for this themselves."""

        def waited_for() -> Iterator[InFlight]:
            return islice(self._flights, len(self._flights) - behind)

        while any(each.key.verifies and any(one.constraint for one in each.sequences) for each in waited_for()):
            known = self._collector.read(self._flights.popleft())
            self._known += [] if known is None else [known]
        if not self._overlap or not all(known.runs_on for known in self._known):
            self.settle()

    def _able(self, running: list[Sequence], waits: bool, masks: list[Future[None]]) -> list[Sequence]:
        """Ends the requests whose grammar cannot be followed any more. Returns the others, but for those whose mask
        another thread computes: they sit this step out."""
        asked = {one: None if one.constraint is None else one.constraint.ask() for one in running}
        masks += [mask for mask in asked.values() if mask is not None]
        if waits and len(masks) == len(running):
            wait(masks, return_when=FIRST_COMPLETED)
        running = [one for one, mask in asked.items() if mask is None or mask.done()]
        for mask in masks:
            mask.add_done_callback(lambda _: self._executables.on_change())
        for sequence in running:
            if sequence.constraint is not None and (problem := sequence.constraint.problem()) is not None:
                self.settle()
                if sequence.status is not Status.RUNNING:  # it has come to its end besides
                    continue
                self._give_up(sequence, f"{GRAMMAR_FAILED} after {len(sequence.output)} tokens: {problem}")
        return [sequence for sequence in running if sequence.status is Status.RUNNING]

    def _reserved(self) -> list[Sequence]:
        """The running requests, with pages for all that they may commit; retracts some where pages run out."""
        while True:
            running = self._scheduler.running()
            due = self._scheduler.is_due(self._counters.steps)
            if not running or (not due and self._scheduler.reserve(running)):
                return running
            # Retract only what has been read: its output must be complete, and reading may free pages.
            if self._flights or self._known:
                self.collect_all_but(0)
            else:
                self._scheduler.retract_youngest(self._counters.steps)
