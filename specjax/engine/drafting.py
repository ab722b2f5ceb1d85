"""Which steps draft, and what the drafter is told: the choice before each step, and catching up with what the drafter
has missed while nobody drafted (`specjax.drafters.deferred`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from time import perf_counter
from typing import Any, cast

import jax

from specjax.costs import PLAIN as PLAIN_TREE
from specjax.costs import Tree
from specjax.drafters.base import Drafter, Params
from specjax.engine.adaptive import Adaptive
from specjax.engine.buckets import Buckets
from specjax.engine.choice import PLAIN
from specjax.engine.device import Device, memory_checked
from specjax.engine.executables import Executables
from specjax.engine.flight import Flights, InFlight
from specjax.engine.packing import catch_up_input
from specjax.engine.sequence import Sequence
from specjax.engine.step_times import StepTimes, stored_bits, tree_of
from specjax.engine.transfers import Read, read_lag

FEW_BIT_TOKENS = 5
"""`FREE_TOKENS` of a CPU where matrices are held in few bits: SmolLM2-135M in Q4_1 takes 5.5 ms for one token, 9.5 for
four, 13.9 for eight and 21.1 for sixteen (2 cores with AVX-512;
benchmarks/results/before-after-2026-11-25-few-rows.json)."""

FEW_BIT_BYTES = 2
"""A byte of such matrices takes as long as so many of others: that model's 98 MB 6.0 ms, a level of its head's 37 MB
1.1 ms."""

FOUND = 0.3
"""In so many steps is something proposed for a request by a drafter that looks it up. Otherwise a step that may choose
among several tree widths checks one token."""

GUESSES = {True: 2.0, False: 1.3}
"""Accept length of which nothing is known, of a drafter that runs a model, and of one that looks up what was said: in a
text that repeats nothing it proposes nothing."""


def tree_within(drafter: Drafter, nodes: int) -> Tree:
    """The tree of a step of at most `nodes` nodes."""
    depth, topk, width = tree_of(drafter.within(nodes))
    return Tree(min(depth, nodes - 1), topk, min(width, nodes))


def expected_ratio(
    batch: int, nodes: int, buckets: Buckets, drafter: Drafter, params: Params, times: Callable[[Drafter], StepTimes]
) -> float:
    """Seconds of a batch bucket's step with trees of `nodes` nodes (0: its own) over those of one without drafts,
    before both were measured in use: what was measured on this device, else what the cost model predicts for a GPU that
    it knows, else from the number of tokens in the forward and the bytes of a draft model. `times`: what is known of
    the steps of a drafter."""
    widest = nodes or buckets.tree_widths(batch)[-1]
    drafter = drafter.within(widest)
    drafter = drafter.typical or drafter
    widest = min(widest, drafter.width)
    known = times(drafter)
    drafted, plain = (known.milliseconds(batch, tree) for tree in (tree_of(drafter), PLAIN_TREE))
    if drafted and plain:
        return drafted / plain
    drafting = 1 - (1 - FOUND) ** batch if buckets.several_widths and not drafter.runs_model else 1.0
    return 1 + drafting * (_forward(batch, widest, buckets, params) - 1) + _draft(drafter, params)


def free_tokens(buckets: Buckets, params: Params) -> int:
    """`FREE_TOKENS` of this target's weights: a forward of so many costs about twice what one token's does."""
    free = buckets.free_tokens
    if buckets.several_widths and stored_bits(params.target) is not None:
        free = min(free, FEW_BIT_TOKENS)
    return free


def _forward(batch: int, nodes: int, buckets: Buckets, params: Params) -> float:
    """Of `nodes` tokens of each request over one of each, from their number."""
    free = free_tokens(buckets, params)
    return (batch * nodes + free) / (batch + free)


def _draft(drafter: Drafter, params: Params) -> float:
    """Of a draft over a forward of the target, from the bytes that both read."""
    if not drafter.runs_model:
        return 0.0
    size, whole = (
        sum(leaf.nbytes for leaf in jax.tree.leaves(part)) * (1 if stored_bits(part) is None else FEW_BIT_BYTES)
        for part in (params.draft, params.target)
    )
    return drafter.depth * size / whole


class Drafting:
    """Of an engine.

    Args:
        drafter: the eager one.
        chooses: whether steps with and without drafts are chosen between; else each drafts as its batch bucket says,
            and nothing is ever missed.
        expected: see `Adaptive`.
        rows: of the device's state.

    Attributes:
        adaptive: the measurements, by the kind of step; None: nothing is chosen.
    """

    def __init__(
        self, executables: Executables, device: Device, buckets: Buckets, flights: Flights, drafter: Drafter, *,
        chooses: bool, expected: Callable[[int, int], float], rows: int,
    ) -> None:  # fmt: skip
        self._executables, self._device, self._buckets, self._flights = executables, device, buckets, flights
        self._rows = rows
        self.adaptive: dict[str, Adaptive | None] = dict.fromkeys(("step", "constrained"))
        if not chooses:
            return

        @cache
        def tree(batch: int, nodes: int) -> Tree:
            return tree_within(drafter, nodes or buckets.tree_widths(batch)[-1])

        def two(batch: int) -> tuple[int, ...]:
            return tuple(nodes for nodes in buckets.choices(batch) if nodes <= PLAIN)

        known: dict[str, Any] = {"tree": tree, "ready": self._ready, "guess": GUESSES[drafter.runs_model]}
        known["steady"] = drafter.runs_model or not buckets.several_widths
        self.adaptive["step"] = Adaptive(buckets.choices, expected, **known)
        self.adaptive["constrained"] = Adaptive(two, expected, **known)

    @property
    def chooses(self) -> bool:
        return self.adaptive["step"] is not None

    def choose(self, sequences: list[Sequence], kind: str) -> tuple[int, int]:
        """`Key.nodes` of the next step of these, and the catch-ups launched for it."""
        if (adaptive := self.adaptive[kind]) is None:
            return 0, 0
        batch = self._buckets.batch(len(sequences))
        nodes = adaptive.choose(batch, sequences)
        if (wanted := adaptive.wanted.pop(batch, None)) is not None:
            self._executables.compile_later(self._buckets.choice_keys(batch, wanted))
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
        drafting.sort(key=lambda sequence: not sequence.params.always_draft)  # the first ones catch up first
        launched = self.catch_up(drafting, whole=len(sequences) == 1, trial=adaptive.tries(batch, nodes))
        return nodes if any(not sequence.unseen for sequence in drafting) else PLAIN, launched

    def _ready(self, batch: int, nodes: int) -> bool:
        """Whether each program of the smaller tree can run, for requests of any length."""
        return self._executables.compiled().issuperset(self._buckets.choice_keys(batch, nodes))

    def catch_up(
        self, sequences: list[Sequence], *, whole: bool = False, ended: bool = False, trial: bool = False
    ) -> int:
        """Dispatches a program that tells the drafter what it has missed of some of these. Returns the programs
        launched.

        Args:
            whole: as many programs as all of it takes. Else other requests go on after one of them.
            ended: so, too, and nothing is read of it: these requests have ended.
            trial: it is for one; see `Adaptive`.
        """
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
                self._flights.append(InFlight(key, output, part, launched=at, trial=trial))
                if not whole:
                    break
                continue
            for adaptive in filter(None, self.adaptive.values()):
                adaptive.charge_catch_up(key)
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
            drafted = {one: n for one in flight.drafted if (n := emitted[one])}
            busy = bool(self._executables.pending)
            adaptive.record(flight.key, seconds, drafted, emitted=sum(emitted.values()), disturbed=busy)

    def collect(self, flight: InFlight) -> None:
        """Reads a catch-up."""
        with memory_checked(flight.key):
            self._device.check(flight.output)
            lags = read_lag(flight.output)
        if (seconds := self._flights.seconds(flight)) is not None:
            for adaptive in filter(None, self.adaptive.values()):
                adaptive.record_catch_up(flight.key, seconds, trial=flight.trial)
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
