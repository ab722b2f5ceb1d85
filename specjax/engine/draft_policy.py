"""Chooses whether a step drafts: in each batch bucket, the mode with more tokens per second.

    rate of a mode  =  tokens that the batch's requests emit in a step of it / seconds that it takes

There are two modes, a plain step and a step with the bucket's tree. Seconds are a running mean of recent steps; before
a mode has run they follow from the other mode and from `specjax.costs.estimated_ratio`. A plain step emits one token
per request. A step with drafts emits each request's running acceptance, which starts at that of all requests.

The mode in use changes if the other one's rate is higher by `HYSTERESIS`. Now and then one step runs in the other mode,
to measure it; the expected loss of such steps is at most `TRIAL_SHARE` of the time. Every emitted token is the target's
own draw, so the choice changes the speed and never the text.

With `Speculation.costly_observe` the mode is chosen once for each request, at its admission.

The rest of the file describes drafting for the log. Plain Python, independent of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specjax.drafters.base import Speculation
from specjax.engine.buckets import PLAIN, TREE, Buckets

if TYPE_CHECKING:
    from specjax.engine.sequence import Sequence

HYSTERESIS = 0.05  # minimum relative gain in rate for a change of mode
TRIAL_SHARE = 0.01  # share of the time that trials may lose
TRIAL_PAUSE = 16  # minimum number of steps between two trials
DECAY = 0.9  # weight of a step's time after the next step
ACCEPTANCE_DECAY = 0.95  # weight of a step's acceptance after the next step
MAX_STEP_RATIO = 2.5  # longer steps count as this multiple of the mean
OWN_STEPS = 8.0  # steps of a request after which its acceptance counts as much as that of all requests
GUESS_STEPS = 16.0  # steps of all requests after which their acceptance counts as much as the first guess
NAMES = {PLAIN: "plain", TREE: "draft"}
GUESSES = {True: 2.0, False: 1.3}  # first guess of the accept length, for a drafter with and without a model


@dataclass
class Mean:
    """A running mean, in which recent values count most."""

    decay: float
    weight: float = 0.0
    total: float = 0.0

    def add(self, value: float, weight: float = 1.0, most: float | None = None) -> None:
        """Adds a value, which is clipped to `most` times the mean."""
        if most is not None and self.weight:
            value = min(value, most * self.value)
        self.weight, self.total = self.decay * self.weight + weight, self.decay * self.total + weight * value

    @property
    def value(self) -> float:
        return self.total / self.weight


@dataclass
class Bucket:
    """Measurements of one batch bucket."""

    ratio: float  # estimated duration of a step with drafts relative to a plain step
    seconds: dict[int, Mean] = field(default_factory=lambda: {mode: Mean(DECAY) for mode in NAMES})  # by mode
    ran: dict[int, int] = field(default_factory=dict)  # number of steps, by mode
    using: int | None = None  # mode in use
    savings: float = 0.0  # seconds that the next trial may lose
    since: int = 0  # steps since the last trial

    def expected(self) -> dict[int, float]:
        """Seconds of a step, by mode; in an arbitrary unit before any step has run."""
        plain, tree = self.seconds[PLAIN], self.seconds[TREE]
        if plain.weight and tree.weight:
            return {PLAIN: plain.value, TREE: tree.value}
        if tree.weight:
            return {PLAIN: tree.value / self.ratio, TREE: tree.value}
        seconds = plain.value if plain.weight else 1.0
        return {PLAIN: seconds, TREE: seconds * self.ratio}


class DraftPolicy:
    """Chooses between plain steps and steps with drafts.

    Args:
        ratio: batch bucket -> estimated duration of a step with drafts relative to a plain step.
        guess: accept length before any measurement.
    """

    def __init__(self, ratio: Callable[[int], float], guess: float) -> None:
        self._ratio = ratio
        self._accepted = Mean(ACCEPTANCE_DECAY)
        self._accepted.add(guess, GUESS_STEPS)
        self._buckets: dict[int, Bucket] = {}

    def choose(self, batch: int, requests: list[Sequence]) -> int:
        """Returns PLAIN or TREE for the next step of these requests, in a batch bucket that may draft."""
        drafting = [request for request in requests if request.drafts]
        if not drafting:
            return PLAIN
        accepted = sum(self.accept_length(request) for request in drafting)
        plain = float(len(requests))
        return self._best(batch, {PLAIN: plain, TREE: plain - len(drafting) + accepted})

    def pays(self, batch: int, requests: int, forced: int) -> bool:
        """True if emitting `forced` tokens in one step with drafts is faster. Uses the estimated ratio, since measured
        steps were narrower where the drafter had no match."""
        return requests + forced > requests * self._bucket(batch).ratio

    def admit(self, batch: int, sequence: Sequence) -> bool:
        """Chooses whether a request drafts from its first step to its end. `batch`: bucket that it will run in."""
        if not sequence.drafts:
            return False
        return self._best(batch, {PLAIN: 1.0, TREE: self._accepted.value}, steps=sequence.request.limit) == TREE

    def accept_length(self, request: Sequence) -> float:
        """Expected number of tokens that a step with drafts emits for a request."""
        acceptance, prior = request.acceptance, self._accepted.value
        return (acceptance.total + OWN_STEPS * prior) / (acceptance.weight + OWN_STEPS)

    def record(self, batch: int, mode: int, seconds: float, drafted: Mapping[Sequence, int]) -> None:
        """Records a step. `drafted`: number of emitted tokens of each request that could draft."""
        bucket = self._bucket(batch)
        bucket.since, bucket.savings = bucket.since + 1, bucket.savings + TRIAL_SHARE * seconds
        if mode in bucket.ran:  # the first run of a program takes longer
            bucket.seconds[mode].add(seconds, most=MAX_STEP_RATIO)
        bucket.ran[mode] = bucket.ran.get(mode, 0) + 1
        if mode == TREE:
            for request, count in drafted.items():
                request.acceptance.add(float(count))
            if drafted:
                self._accepted.add(sum(drafted.values()) / len(drafted), float(len(drafted)))

    def _best(self, batch: int, tokens: Mapping[int, float], steps: int = 1) -> int:
        """Returns the mode with the higher rate, or the other one as a trial. `steps`: duration of the choice."""
        bucket = self._bucket(batch)
        seconds = bucket.expected()
        rates = {mode: tokens[mode] / seconds[mode] for mode in NAMES}
        using = max(rates, key=rates.__getitem__) if bucket.using is None else bucket.using
        other = TREE if using == PLAIN else PLAIN
        if rates[other] > (1 + HYSTERESIS) * rates[using]:
            using, other = other, using
        bucket.using = using
        loss = steps * (seconds[other] - tokens[other] / rates[using])
        if bucket.since < TRIAL_PAUSE * steps or bucket.savings < loss or not bucket.seconds[using].weight:
            return using
        bucket.since, bucket.savings = 0, 0.0
        return other

    def _bucket(self, batch: int) -> Bucket:
        if batch not in self._buckets:
            self._buckets[batch] = Bucket(self._ratio(batch))
        return self._buckets[batch]


# For the log


def speculation_table(speculation: Speculation, buckets: Buckets) -> dict[str, str]:
    """Describes drafting for the log: algorithm, tree, head, and the steps that draft."""
    drafter = speculation.drafter
    if drafter.width == 1:
        return {"algorithm": drafter.name}
    tree = f"up to {drafter.width} tokens" + (f"; {speculation.note}" if speculation.note else "")
    drafts, more = "in steps" if buckets.adaptive else "in every step", ""
    if (most := buckets.most_drafting) < buckets.batches[-1]:
        drafts = "in steps of one request" if most == 1 else f"in steps of up to {most} requests"
        more = "; larger batches are faster without drafts here, and draft only if the number of draft tokens is set"
    drafts += " where that is measured to be faster" * buckets.adaptive + more
    head = {"head": speculation.source} if speculation.source else {}
    return {"algorithm": drafter.name, "tree": tree, **head, "drafts": drafts}


def as_lines(table: Mapping[str, str]) -> str:
    """Formats `speculation_table` as indented lines below a heading."""
    return "".join(f"\n  {name:9}  {text}" for name, text in table.items())
