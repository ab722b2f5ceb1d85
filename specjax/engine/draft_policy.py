"""Chooses how many nodes the trees of a step have: in each batch bucket, the size with the most tokens per second.

    rate of N  =  tokens that the batch's requests emit in a step of N nodes / seconds that it takes

A bucket has a few sizes; N = 1 is a step without drafts. Trees are nested: a tree of N nodes has the N best nodes of a
larger one. Every emitted token is the target's own draw, so of the accepted nodes of the larger tree, the smaller one
accepts those whose rank is below N. A step of some size therefore tells the acceptance of all smaller ones:

    part        the ranks from one size to the next
    survival    accepted nodes of a part in a step, a decayed mean
    tokens      of N: 1 + the survivals of the parts below N

A part that was not drafted lately follows the part before it as a geometric sequence, so rising acceptance shows in
the smallest trees. A request's own acceptance of the first part scales all parts. Batches in which only n-grams draft
(`Speculation.models`) have an acceptance of their own. Seconds of N are the machine's speed, which the size in use
shows, times a ratio: that of `specjax.costs`, then of trials.

The size in use changes if another rate is higher by `SWITCH_GAIN`. Now and then a step is a trial of the size that ran
longest ago; their expected losses are at most `TRIAL_SHARE` of the time. The choice names a size without a program that
might be faster.

With `costly_observe` a request drafts in all its steps or in none, as `admit` chooses. Plain Python, independent of
the device. All but `launched` and `record` only read.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeAlias

SWITCH_GAIN = 0.02  # minimum relative gain in rate for a change of N, which takes no time
COMPILE_GAIN = 0.05  # the same for compiling a program
TRIAL_SHARE = 0.005  # share of the time that trials may lose
TRIAL_PAUSE = 8  # minimum number of steps between two trials
HEAD_START = 100  # steps that a size counts as waiting for a trial at first
DECAY = 0.95  # weight of a step's time after the next step
ACCEPTANCE_DECAY = 0.995  # weight of a step's acceptance after the next step
OWN_DECAY = 0.98  # the same in a request's own acceptance
ESTIMATE_WEIGHT = 2.0  # trials that an estimated ratio counts for
KNOWN_WEIGHT = 6.0  # trials, the estimate included, after which steps of the size in use show the machine's speed
MAX_STEP_RATIO = 1.3  # longer steps count as this multiple of the mean
OWN_STEPS = 8.0  # steps of a request after which its acceptance counts as much as that of all requests
GUESS_STEPS = 12.0  # steps that a guess of a part's acceptance counts for
GUESSES = 0.25, 0.5  # first guess of a draft's acceptance, of n-grams and of others


@dataclass
class Mean:
    """A running mean, in which recent values count most."""

    decay: float
    weight: float = 0.0
    total: float = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        """Adds a value. Without weight, earlier values fade."""
        self.weight, self.total = self.decay * self.weight + weight, self.decay * self.total + weight * value

    def towards(self, guess: float, weight: float) -> float:
        """The mean, with a guess of this weight."""
        return (self.total + weight * guess) / (self.weight + weight)

    @property
    def value(self) -> float:
        return self.total / self.weight


Own: TypeAlias = tuple[Mean, Mean]
"""A request's own acceptance of the first part, of n-grams and of others."""
NO_ACCEPTANCE: Own = Mean(1.0), Mean(1.0)


def own_acceptance() -> Own:
    """The acceptance of a new request."""
    return Mean(OWN_DECAY), Mean(OWN_DECAY)


class Acceptance:
    """Accepted nodes of a drafter's trees, by part. `sizes`: N of all programs, from 1 on; `guess`: first guess of a
    draft's acceptance."""

    def __init__(self, sizes: List[int], guess: float) -> None:
        self._parts, self._guess = list(pairwise(sizes)), guess
        self._means = [Mean(ACCEPTANCE_DECAY) for _ in self._parts]
        self._update()

    def add(self, nodes: int, drafted: List[tuple[Mean, Collection[int]]]) -> None:
        """Adds requests' accepted ranks in a step of this many nodes. Parts that were not drafted fade."""
        for i, (start, end) in enumerate(self._parts):
            counts = [sum(start <= rank < end for rank in ranks) for _, ranks in drafted]
            self._means[i].add(sum(counts) / len(counts), float(len(counts) if start < nodes else 0))
            if i == 0 and nodes > 1:
                for (own, _), count in zip(drafted, counts, strict=True):
                    own.add(float(count))
        self._update()

    def _update(self) -> None:
        self.survivals, chance = list[float](), self._guess  # accepted nodes of each part
        for i, (part, mean) in enumerate(zip(self._parts, self._means, strict=True)):
            # Of a geometric sequence: this part, after the part before it.
            *before, guess = [sum(chance**rank for rank in range(*each)) for each in self._parts[max(i - 1, 0) : i + 1]]
            if before:
                guess *= self.survivals[-1] / before[0]
            self.survivals.append(mean.towards(guess, GUESS_STEPS))
            if part == (1, 2):
                chance = min(self.survivals[0], 0.98)

    def expected(self, requests: int, own: List[Mean]) -> dict[int, float]:
        """Tokens of a step by N, for requests of which those of `own` draft."""
        tokens, scale = {1: float(requests)}, 0.0
        for i, ((n, end), mean) in enumerate(zip(self._parts, self.survivals, strict=True)):
            if i == 0:
                scale = sum(each.towards(mean, OWN_STEPS) for each in own) / max(mean, 1e-6)
            tokens[end] = tokens[n] + scale * mean
        return tokens


@dataclass
class Bucket:
    """Measurements of one batch bucket."""

    speed: Mean = field(default_factory=partial(Mean, DECAY))  # seconds of a step whose ratio is 1
    ratios: dict[int, Mean] = field(default_factory=dict)  # of the seconds of a step, by N that has run
    steps: Counter[int] = field(default_factory=Counter)  # number of steps, by N
    latest: dict[int, int] = field(default_factory=dict)  # N -> the last step that it ran
    using: int | None = None  # the choice in use
    since: int = 0  # steps since the last trial

    def measured(self, nodes: int) -> bool:
        return nodes in self.ratios and self.ratios[nodes].weight > ESTIMATE_WEIGHT


class Choice(NamedTuple):
    nodes: int  # N of the next step
    trial: bool = False  # whether it measures another size than that in use
    better: int | None = None  # an N without a program that might be faster


class DraftPolicy:
    """Chooses the nodes of the trees of each step.

    Args:
        sizes: batch bucket -> N of its programs, ascending.
        cost: (batch bucket, N) -> estimated duration of a step, in any unit.
        models: whether more than n-grams draft in a batch bucket.
        by_request: `admit` chooses, not each step.
        guesses: of a draft's acceptance, of n-grams and of others.
    """

    def __init__(
        self, sizes: Mapping[int, List[int]], cost: Callable[[int, int], float], *,
        models: Callable[[int], bool] = lambda batch: True, by_request: bool = False,
        guesses: tuple[float, float] = GUESSES,
    ) -> None:  # fmt: skip
        self._sizes, self._cost, self._models, self._by_request = sizes, cache(cost), models, by_request
        every = sorted({1, *chain(*sizes.values())})
        self._acceptances = [Acceptance(every, guess) for guess in guesses]
        self._buckets = defaultdict[int, Bucket](Bucket)

    def choose(self, batch: int, compiled: Collection[int], requests: int, own: List[Own], steps: int = 1) -> Choice:
        """Chooses N for the next `steps` steps of a number of requests. `batch`, `compiled`: their bucket, and N of its
        programs that can run; `own`: acceptance of each of them that drafts."""
        seconds, bucket = self.seconds(batch), self._buckets[batch]
        expected = self.expected(batch, requests, own)
        rates = {n: expected[n] / seconds[n] for n in seconds}
        ready = [n for n in rates if n in compiled]
        using = best = max(ready, key=rates.__getitem__)
        if bucket.using in ready and rates[best] <= (1 + SWITCH_GAIN) * rates[bucket.using]:
            using = bucket.using
        # Each other size may lose its part of the share in the time since it last ran.
        ages = {n: bucket.steps.total() - bucket.latest.get(n, -HEAD_START) for n in ready if n != using}
        allowed = {n: age * TRIAL_SHARE * seconds[using] / len(ages) for n, age in ages.items()}
        due = [n for n in ages if steps * seconds[n] * (1 - rates[n] / rates[using]) <= allowed[n]]
        if due and bucket.since >= TRIAL_PAUSE * steps:
            return Choice(max(due, key=ages.__getitem__), trial=True)
        # A size without a program may cost half of what is expected beyond the next smaller one with a program.
        least = {n: max((seconds[m] for m in ready if m < n), default=seconds[n]) for n in rates.keys() - ready}
        faster = {n: expected[n] / ((least[n] + seconds[n]) / 2) for n in least}
        better = max(faster, key=faster.__getitem__, default=None)
        if better is not None and faster[better] <= (1 + COMPILE_GAIN) * rates[using]:
            better = None
        return Choice(using, better=better)

    def expected(self, batch: int, requests: int, own: List[Own]) -> dict[int, float]:
        """Tokens of a step by N, for requests of which those of `own` draft."""
        models = self._models(batch)
        return self._acceptances[models].expected(requests, [each[models] for each in own])

    def admit(self, batch: int, steps: int) -> bool:
        """Chooses whether a request drafts from its first step to its end, at most `steps` steps later. `batch`: bucket
        that it will run in."""
        choice = self.choose(batch, self._sizes[batch], 1, [NO_ACCEPTANCE], steps)
        self._use(self._buckets[batch], choice.nodes, choice.trial)
        return choice.nodes > 1

    def pays(self, batch: int, nodes: int, requests: int, forced: int) -> bool:
        """True if emitting `forced` tokens in one step of N nodes is faster."""
        return (requests + forced) / self.seconds(batch)[nodes] > requests / self.seconds(batch)[1]

    def seconds(self, batch: int) -> dict[int, float]:
        """Expected seconds of a step by N; in the unit of `cost` before any step was measured."""
        bucket, expected = self._buckets[batch], dict[int, float]()
        speed, ratio, factor = bucket.speed.value if bucket.speed.weight else 1.0, 0.0, 1.0
        for n in self._sizes[batch]:
            if bucket.measured(n):
                ratio = bucket.ratios[n].value
                factor = ratio / self._cost(batch, n)
            else:  # as wrong as the estimate of the next smaller size, and not below what that takes
                ratio = max(factor * self._cost(batch, n), ratio)
            expected[n] = speed * ratio
        return expected

    def launched(self, batch: int, nodes: int, *, trial: bool) -> None:
        """Notes a choice that is carried out."""
        bucket = self._buckets[batch]
        bucket.steps[nodes] += 1
        bucket.latest[nodes] = bucket.steps.total()
        if not self._by_request:
            self._use(bucket, nodes, trial)

    @staticmethod
    def _use(bucket: Bucket, nodes: int, trial: bool) -> None:
        if trial:
            bucket.since = 0
        else:
            bucket.using = nodes

    def record(
        self, batch: int, nodes: int, seconds: float | None, drafted: Iterable[tuple[Own, Collection[int]]]
    ) -> None:
        """Records a step of N nodes. `seconds`: None if unknown, or something compiled beside it; `drafted`: own
        acceptance and accepted ranks of each request that it drafted for and whose text no limit or stop token cut."""
        bucket = self._buckets[batch]
        bucket.since += 1
        if nodes not in bucket.ratios:  # the first run of a program takes longer
            estimate = self._cost(batch, nodes)
            bucket.ratios[nodes] = Mean(DECAY, ESTIMATE_WEIGHT, ESTIMATE_WEIGHT * estimate)
        elif seconds is not None:
            ratio, speed = bucket.ratios[nodes], bucket.speed
            seconds = min(seconds, MAX_STEP_RATIO * ratio.value * (speed.value if speed.weight else math.inf))
            known = nodes == bucket.using and ratio.weight > KNOWN_WEIGHT
            if known or not speed.weight:
                speed.add(seconds / ratio.value)
            if not known:
                ratio.add(seconds / speed.value)
        models = self._models(batch)
        if accepted := [(own[models], ranks) for own, ranks in drafted]:
            self._acceptances[models].add(nodes, accepted)

    def table(self) -> list[dict[str, Any]]:
        """What is known of each size of the buckets that have run: seconds of a step (None: nothing is measured in this
        bucket), expected tokens of a request, and steps."""
        rows = list[dict[str, Any]]()
        for batch, bucket in sorted(self._buckets.items()):
            tokens = self.expected(batch, 1, [NO_ACCEPTANCE])
            for n, seconds in self.seconds(batch).items() if bucket.steps else ():
                row = {"batch": batch, "nodes": n, "seconds": seconds if bucket.speed.weight else None}
                row["measured"] = bucket.measured(n)
                row |= {
                    "tokens": tokens[n],
                    "steps": bucket.steps[n],
                    "using": n == bucket.using,
                }
                rows.append(row)
        return rows
