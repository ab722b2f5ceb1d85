"""Launching the next decode steps, and reading what is in flight."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from time import perf_counter

from specjax.engine.buckets import Buckets
from specjax.engine.collecting import Collector
from specjax.engine.device import Device
from specjax.engine.draft_policy import DraftPolicy
from specjax.engine.executables import Executables
from specjax.engine.flight import Flights, InFlight
from specjax.engine.grammar import GRAMMAR_FAILED
from specjax.engine.grammar_steps import GrammarSteps
from specjax.engine.keys import PLAIN, TREE, Key
from specjax.engine.packing import step_input
from specjax.engine.scheduler import Scheduler
from specjax.engine.sequence import Sequence, Status
from specjax.engine.transfers import Counters


class Steps:
    """Of an engine.

    Args:
        rows: of the device's state.
        new_pages: that a row may get between two steps, at most.
        policy: chooses whether a step drafts; None: each drafts as its batch bucket says.
        to_end: requests draft from their first step to their end or not at all (`Drafter.costly_observe`).
        give_up: ends a request that cannot go on, with a message.
    """

    def __init__(
        self, scheduler: Scheduler, executables: Executables, device: Device, buckets: Buckets, flights: Flights,
        counters: Counters, policy: DraftPolicy | None, grammar: GrammarSteps, collector: Collector, *,
        to_end: bool, rows: int, new_pages: int, give_up: Callable[[Sequence, str], None],
    ) -> None:  # fmt: skip
        self._scheduler, self._executables, self._device, self._buckets = scheduler, executables, device, buckets
        self._flights, self._counters, self._policy, self._to_end = flights, counters, policy, to_end
        self._grammar, self._collector = grammar, collector
        self._rows, self._new_pages, self._give_up = rows, new_pages, give_up

    def launch(self, *, waits: bool, put_off: list[Key], masks: list[Future[None]]) -> int:
        """Dispatches one step for each running request: in one batch, or in several where no program serves them all.
        Returns the programs launched.

        Args:
            waits: as `Engine.waits`.
            put_off: gets the programs that are needed, and that another thread compiles.
            masks: gets the masks that other threads compute.
        """
        self._collect_constrained()
        launched, left = 0, self._able(self._reserved(), waits, masks)
        while left:
            pages = max(len(sequence.pages) for sequence in left)
            kind = "constrained" if any(sequence.constraint for sequence in left) else "step"
            nodes = self._choose(left, kind)
            forced = dict[Sequence, list[int]]()
            if kind == "step":
                ready = self._executables.compiled(), self._executables.pending
                keys = self._buckets.step_keys(len(left), pages, *ready, nodes)
            else:
                forced = self._grammar.forced(left)
                keys = self._grammar.keys(len(left), pages, TREE if forced else nodes)
                others = [sequence for sequence in left if not sequence.constraint]
                if (others or not waits) and (missing := self._grammar.missing(keys)):
                    put_off += missing
                    left = others  # they need not wait for the compiler
                    continue
            key, program = self._executables.first_usable(keys)
            part, left = left[: key.width], left[key.width :]
            inputs, at = step_input(part, key.width, self._new_pages, self._rows), perf_counter()
            drafted = tuple(sequence for sequence in part if sequence.drafts and key.drafts)
            if kind == "constrained":
                drafting = [one for one in drafted if one not in forced] if nodes != PLAIN else []
                inputs = self._grammar.inputs(key, part, inputs, forced, drafting)
            output = self._device.run(key, program, inputs)
            self._flights.append(InFlight(key, output, part, launched=at, drafted=drafted, forced=forced))
            self._counters.steps += 1
            launched += 1
        return launched

    def _choose(self, sequences: list[Sequence], kind: str) -> int:
        """TREE or PLAIN for the next step of these, of a kind of `Key`."""
        batch = self._buckets.batch(len(sequences))
        if self._policy is None:
            return TREE
        if not self._buckets.drafts(batch):
            return PLAIN
        if self._to_end:
            return TREE if any(sequence.drafts for sequence in sequences) else PLAIN
        nodes = self._policy.choose(batch, sequences)
        if nodes == TREE and (waiting := self._executables.pending):
            ready, pending = (
                {key.nodes for key in keys if key.kind == kind and key.width == batch}
                for keys in (self._executables.compiled(), waiting)
            )
            if TREE in pending - ready and PLAIN in ready:
                return PLAIN
        return nodes

    def collect_all_but(self, count: int) -> None:
        """Reads the steps in flight, the oldest first, until `count` are left. Reports the sequences that have new
        tokens or have finished."""
        while len(self._flights) > count:
            self._collector.collect(self._flights.popleft())

    def _collect_constrained(self) -> None:
        """Collects the steps in flight whose tokens a grammar needs: its next masks follow from them."""
        while any(each.key.verifies and any(one.constraint for one in each.sequences) for each in self._flights):
            self._collector.collect(self._flights.popleft())

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
            if self._flights:
                self.collect_all_but(0)
            else:
                self._scheduler.retract_youngest(self._counters.steps)
