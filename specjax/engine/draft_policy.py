"""Chooses how many nodes the trees of a step have: in each batch bucket, the size with the most tokens per second.

    rate of N  =  tokens that the batch's requests emit in a step of N nodes / seconds that it takes

A bucket has a few sizes; N = 1 is a step without drafts. Trees are nested: a tree of N nodes has the N best nodes of a
larger one. Every emitted token is the target's own draw, so of the accepted nodes of the larger tree, the smaller one
accepts those whose rank is below N. A step of some size therefore tells the acceptance of all smaller ones:

    part        the ranks from one size to the next
    survival    accepted nodes of a part in a step, a decayed mean
    tokens      of N: 1 + the survivals of the parts below N

A part that was not drafted lately follows the part before it by their last measured ratio, which fades into that of a
geometric sequence. So rising acceptance shows in the smallest trees. A request's own acceptance of the first part
scales all its parts. Seconds are a mean of recent steps; those of other sizes follow `specjax.costs`.

The size in use changes if another rate is higher by `HYSTERESIS`. Now and then one step runs with another size, to
measure it; the expected loss of such steps is at most `TRIAL_SHARE` of the time. Both are sizes whose programs are
compiled; one that is not, but might be faster, is named beside the choice.

With `costly_observe` a request drafts in all its steps or in none, as `admit` chooses. Plain Python, independent of
the device. All but `launched` and `record` only read.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

HYSTERESIS = 0.05  # minimum relative gain in rate for a change of N
TRIAL_SHARE = 0.01  # share of the time that trials may lose
TRIAL_PAUSE = 16  # minimum number of steps between two trials
DECAY = 0.9  # weight of a step's time after the next step
ACCEPTANCE_DECAY = 0.98  # weight of a step's acceptance after the next step
RATIO_DECAY = 0.99  # the same in the ratio of two parts
STEADY = 0.9 / (1 - DECAY)  # weight of a size that has run in 22 steps
MAX_STEP_RATIO = 2.5  # longer steps count as this multiple of the mean
OWN_STEPS = 8.0  # steps of a request after which its acceptance counts as much as that of all requests
GUESS_STEPS = 4.0  # steps that a guess of a part's acceptance counts for
GUESSES = {True: 0.5, False: 0.25}  # first guess of a draft's acceptance, for a drafter with and without a model


@dataclass
class Mean:
    """A running mean, in which recent values count most."""

    decay: float
    weight: float = 0.0
    total: float = 0.0

    def add(self, value: float, weight: float = 1.0, most: float | None = None) -> None:
        """Adds a value, which is clipped to `most` times the mean. Without weight, earlier values fade."""
        if most is not None and self.weight:
            value = min(value, most * self.value)
        self.weight, self.total = self.decay * self.weight + weight, self.decay * self.total + weight * value

    def towards(self, guess: float, weight: float) -> float:
        """The mean, with a guess of this weight."""
        return (self.total + weight * guess) / (self.weight + weight)

    @property
    def value(self) -> float:
        return self.total / self.weight


class Acceptance:
    """Accepted nodes of a drafter's trees, by part. `sizes`: N of all programs, from 1 on; `guess`: first guess of the
    acceptance of a draft."""

    def __init__(self, sizes: List[int], guess: float) -> None:
        self.sizes, self._guess = tuple(sizes), guess
        self._parts = [Mean(ACCEPTANCE_DECAY) for _ in sizes[1:]]
        if self._parts:
            self._parts[0].add(sum(guess**rank for rank in range(1, sizes[1])), GUESS_STEPS)
        self._ratios = [Mean(RATIO_DECAY) for _ in sizes[1:]]  # of the part to the part before it
        self.survivals = self._survivals()  # expected number of accepted nodes of each part

    def counts(self, ranks: Iterable[int]) -> list[int]:
        """Number of these ranks in each part."""
        counts = [0] * len(self._parts)
        for rank in ranks:
            counts[bisect_right(self.sizes, rank) - 1] += 1
        return counts

    def add(self, nodes: int, counts: List[float], weight: float) -> None:
        """Adds the mean counts of `weight` requests in a step of this many nodes. Parts that were not drafted fade."""
        for k, (part, ratio) in enumerate(zip(self._parts, self._ratios, strict=True)):
            drafted = weight if self.sizes[k + 1] <= nodes else 0.0
            part.add(counts[k], drafted)
            before = counts[k - 1] if k else 1.0
            ratio.add(counts[k] / before if before else 0.0, drafted * before)
        self.survivals = self._survivals()

    @property
    def drafts(self) -> dict[int, float]:
        """Expected number of accepted nodes below the root, by N."""
        return dict(zip(self.sizes, accumulate(self.survivals, initial=0.0), strict=True))

    def _survivals(self) -> list[float]:
        survivals = [part.value for part in self._parts[:1]]
        for part, ratio in zip(self._parts[1:], self._ratios[1:], strict=True):
            falling = survivals[0] if self.sizes[1] == 2 else self._guess
            survivals.append(part.towards(survivals[-1] * ratio.towards(falling, GUESS_STEPS), GUESS_STEPS))
        return survivals


@dataclass
class Bucket:
    """Measurements of one batch bucket."""

    seconds: dict[int, Mean] = field(default_factory=dict)  # of a step, by N
    steps: Counter[int] = field(default_factory=Counter)  # number of steps, by N
    latest: dict[int, int] = field(default_factory=dict)  # N -> the last step that it ran
    using: int | None = None  # the choice in use
    savings: float = 0.0  # seconds that the next trial may lose
    since: int = 0  # steps since the last trial


class Choice(NamedTuple):
    nodes: int  # N of the next step
    trial: bool = False  # it measures a size that is not the best known one
    better: int | None = None  # an N without a program that might be faster


class DraftPolicy:
    """Chooses the nodes of the trees of each step.

    Args:
        sizes: batch bucket -> N of its programs, ascending.
        cost: (batch bucket, N) -> estimated duration of a step, in any unit.
        guess: acceptance of a draft before any measurement.
    """

    def __init__(self, sizes: Mapping[int, List[int]], cost: Callable[[int, int], float], guess: float) -> None:
        self._sizes, self._cost = sizes, functools.cache(cost)
        self.acceptance = Acceptance(sorted({1, *chain(*sizes.values())}), guess)
        self._buckets = defaultdict[int, Bucket](Bucket)

    def choose(self, batch: int, compiled: Collection[int], requests: int, own: List[Mean], steps: int = 1) -> Choice:
        """Chooses N for the next `steps` steps of a number of requests. `batch`, `compiled`: their bucket, and N of its
        programs that can run; `own`: the `Mean` of each of them that drafts."""
        seconds, bucket = self.seconds(batch), self._buckets[batch]
        rates = {n: tokens / seconds[n] for n, tokens in self.tokens(batch, requests, own).items()}
        ready = {n: rate for n, rate in rates.items() if n in compiled}
        best = max(ready, key=ready.__getitem__)
        using = best if bucket.using not in ready else bucket.using
        if ready[best] > (1 + HYSTERESIS) * ready[using]:
            using = best
        # A size without a program may cost half of what is expected beyond the next smaller one with a program.
        least = {n: max((seconds[m] for m in ready if m < n), default=seconds[n]) for n in rates.keys() - ready.keys()}
        hopes = {n: rates[n] * seconds[n] / ((least[n] + seconds[n]) / 2) for n in least}
        better = max(hopes, key=hopes.__getitem__, default=None)
        if better is not None and hopes[better] <= (1 + HYSTERESIS) * rates[using]:
            better = None
        others = [n for n in ready if n != using]
        if not others or bucket.since < TRIAL_PAUSE * steps or not bucket.seconds.get(using, Mean(1.0)).weight:
            return Choice(using, better=better)
        tried = min(others, key=lambda n: bucket.latest.get(n, 0))
        loss = steps * seconds[tried] * (1 - ready[tried] / ready[using])
        return Choice(tried, trial=True) if bucket.savings >= loss else Choice(using, better=better)

    def admit(self, batch: int, steps: int) -> bool:
        """Chooses whether a request drafts from its first step to its end, at most `steps` steps later. `batch`: bucket
        that it will run in."""
        choice = self.choose(batch, self._sizes[batch], 1, [Mean(1.0)], steps)
        self.launched(batch, choice.nodes, trial=choice.trial)
        return choice.nodes > 1

    def pays(self, batch: int, nodes: int, requests: int, forced: int) -> bool:
        """True if emitting `forced` tokens in one step of N nodes is faster."""
        return (requests + forced) / self.seconds(batch)[nodes] > requests / self.seconds(batch)[1]

    def seconds(self, batch: int) -> dict[int, float]:
        """Expected seconds of a step by N; in the unit of `cost` before any step has run."""
        means = {n: mean.value for n, mean in sorted(self._buckets[batch].seconds.items()) if mean.weight}
        # Other load only adds time, so a smaller tree takes no more than a larger one did.
        measured = {n: min(seconds for m, seconds in means.items() if m >= n) for n in means}
        if len(measured) == len(self._sizes[batch]):
            return measured
        factors = {n: seconds / self._cost(batch, n) for n, seconds in measured.items()} or {1: 1.0}
        expected = dict[int, float]()
        for n in self._sizes[batch]:
            estimated = float(np.interp(n, [*factors], [*factors.values()])) * self._cost(batch, n)
            least = max((seconds for smaller, seconds in measured.items() if smaller < n), default=0.0)
            expected[n] = measured.get(n, max(estimated, least))
        return expected

    def tokens(self, batch: int, requests: int, own: List[Mean]) -> dict[int, float]:
        """Expected tokens of a step by N."""
        first = max(next(iter(self.acceptance.survivals), 1.0), 1e-6)
        scale = sum(mean.towards(first, OWN_STEPS) for mean in own) / first
        drafts = self.acceptance.drafts
        return {n: requests + scale * drafts[n] for n in self._sizes[batch]}

    def launched(self, batch: int, nodes: int, *, trial: bool) -> None:
        """Notes a choice that is carried out."""
        bucket = self._buckets[batch]
        bucket.steps[nodes] += 1
        bucket.latest[nodes] = bucket.steps.total()
        if trial:
            bucket.since, bucket.savings = 0, 0.0
        else:
            bucket.using = nodes

    def record(
        self, batch: int, nodes: int, seconds: float | None, drafted: Iterable[tuple[Mean, Iterable[int]]]
    ) -> None:
        """Records a step of N nodes.

        Args:
            seconds: its duration; None: unknown, or something compiled beside it.
            drafted: the `Mean` of each request that it drafted for and whose text no limit or stop token cut, with the
                ranks of its accepted nodes.
        """
        bucket = self._buckets[batch]
        bucket.since, bucket.savings = bucket.since + 1, bucket.savings + TRIAL_SHARE * (seconds or 0.0)
        if seconds is not None:
            self._time(bucket, nodes, seconds)
        counts = list[list[int]]()
        for own, ranks in drafted:
            counts.append(self.acceptance.counts(ranks))
            own.add(float(counts[-1][0]))
        if counts:
            means = [sum(part) / len(counts) for part in zip(*counts, strict=True)]
            self.acceptance.add(nodes, means, float(len(counts)))

    def _time(self, bucket: Bucket, nodes: int, seconds: float) -> None:
        if nodes not in bucket.seconds:  # the first run of a program takes longer
            bucket.seconds[nodes] = Mean(DECAY)
            return
        mean = bucket.seconds[nodes]
        steady = nodes == bucket.using and mean.weight > STEADY
        before = mean.value if steady else 1.0
        mean.add(seconds, most=MAX_STEP_RATIO)
        if steady:  # the other sizes follow the machine's speed
            for n, other in bucket.seconds.items():
                other.total *= mean.value / before if n != nodes else 1.0

    def table(self) -> list[dict[str, int | float]]:
        """Measurements of every bucket that has run: expected seconds and tokens of a request, and steps, by N."""
        drafts = self.acceptance.drafts
        return [
            {"batch": batch, "nodes": n, "seconds": seconds, "tokens": 1 + drafts[n], "steps": bucket.steps[n]}
            for batch, bucket in sorted(self._buckets.items()) if bucket.steps
            for n, seconds in self.seconds(batch).items()
        ]  # fmt: skip
