"""Chooses how many nodes the trees of a step have: in each batch bucket, the number with more tokens per second.

    rate of N  =  tokens that the batch's requests emit in a step of N nodes / seconds that it takes

There are two numbers, the bucket's trees and N = 1, a step without drafts. Seconds are a running mean of recent steps;
before N has run they follow from the other number and from `specjax.costs.estimated_ratio`. A step of one node emits
one token per request. A step with drafts emits each request's running acceptance, which starts at that of all requests.

The number in use changes if the other one's rate is higher by `HYSTERESIS`. Now and then one step runs with the other
one, to measure it; the expected loss of such steps is at most `TRIAL_SHARE` of the time. Every emitted token is the
target's own draw, so the choice changes the speed and never the text.

With `costly_observe` the choice is made once for each request, at its admission. Plain Python, independent of the
device. `choose` only reads: `launched` and `record` tell the policy what happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, field

HYSTERESIS = 0.05  # minimum relative gain in rate for a change of N
TRIAL_SHARE = 0.01  # share of the time that trials may lose
TRIAL_PAUSE = 16  # minimum number of steps between two trials
DECAY = 0.9  # weight of a step's time after the next step
ACCEPTANCE_DECAY = 0.95  # weight of a step's acceptance after the next step
MAX_STEP_RATIO = 2.5  # longer steps count as this multiple of the mean
OWN_STEPS = 8.0  # steps of a request after which its acceptance counts as much as that of all requests
GUESS_STEPS = 16.0  # steps of all requests after which their acceptance counts as much as the first guess
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

    ratio: float  # estimated duration of a step with drafts relative to a step of one node
    seconds: dict[bool, Mean] = field(default_factory=lambda: {False: Mean(DECAY), True: Mean(DECAY)})  # drafts or not
    ran: set[bool] = field(default_factory=set)
    using: bool | None = None  # the choice in use
    savings: float = 0.0  # seconds that the next trial may lose
    since: int = 0  # steps since the last trial

    def expected(self) -> dict[bool, float]:
        """Seconds of a step without and with drafts; in an arbitrary unit before any step has run."""
        plain, tree = self.seconds[False], self.seconds[True]
        if plain.weight and tree.weight:
            return {False: plain.value, True: tree.value}
        if tree.weight:
            return {False: tree.value / self.ratio, True: tree.value}
        seconds = plain.value if plain.weight else 1.0
        return {False: seconds, True: seconds * self.ratio}


class DraftPolicy:
    """Chooses between steps of one node and steps with drafts.

    Args:
        ratio: batch bucket -> estimated duration of a step with drafts relative to a step of one node.
        guess: accept length before any measurement.
    """

    def __init__(self, ratio: Callable[[int], float], guess: float) -> None:
        self._ratio = ratio
        self._accepted = Mean(ACCEPTANCE_DECAY)
        self._accepted.add(guess, GUESS_STEPS)
        self._buckets: dict[int, Bucket] = {}

    def choose(self, batch: int, trees: int, requests: int, acceptance: List[Mean]) -> tuple[int, bool]:
        """Returns N for the next step of these requests, and whether it is a trial.

        Args:
            batch, trees: the batch bucket and the nodes of its trees.
            acceptance: of those of the `requests` that draft.
        """
        if not acceptance:
            return 1, False
        accepted = sum(map(self.accept_length, acceptance))
        drafts, trial = self._best(batch, (float(requests), requests - len(acceptance) + accepted))
        return trees if drafts else 1, trial

    def pays(self, batch: int, requests: int, forced: int) -> bool:
        """True if emitting `forced` tokens in one step with drafts is faster."""
        return requests + forced > requests * self._bucket(batch).ratio

    def admit(self, batch: int, steps: int) -> bool:
        """Chooses whether a request drafts from its first step to its end, at most `steps` steps later. `batch`: bucket
        that it will run in."""
        drafts, trial = self._best(batch, (1.0, self._accepted.value), steps=steps)
        self.launched(batch, drafts=drafts, trial=trial)
        return drafts

    def accept_length(self, acceptance: Mean) -> float:
        """Expected number of tokens that a step with drafts emits for a request, given those that it emitted."""
        prior = self._accepted.value
        return (acceptance.total + OWN_STEPS * prior) / (acceptance.weight + OWN_STEPS)

    def launched(self, batch: int, *, drafts: bool, trial: bool) -> None:
        """Notes a choice that is carried out."""
        bucket = self._bucket(batch)
        if trial:
            bucket.since, bucket.savings = 0, 0.0
        else:
            bucket.using = drafts

    def record(self, batch: int, seconds: float, drafted: Iterable[tuple[Mean, int]] | None) -> None:
        """Records a step. `drafted`: acceptance of each request that could draft, and the number of tokens that the
        step emitted for it; None: the step had one node."""
        bucket, drafts = self._bucket(batch), drafted is not None
        bucket.since, bucket.savings = bucket.since + 1, bucket.savings + TRIAL_SHARE * seconds
        if drafts in bucket.ran:  # the first run of a program takes longer
            bucket.seconds[drafts].add(seconds, most=MAX_STEP_RATIO)
        bucket.ran.add(drafts)
        counts = list(drafted or ())
        for acceptance, count in counts:
            acceptance.add(float(count))
        if counts:
            self._accepted.add(sum(count for _, count in counts) / len(counts), float(len(counts)))

    def _best(self, batch: int, tokens: tuple[float, float], steps: int = 1) -> tuple[bool, bool]:
        """Chooses whether to draft, and says if the choice is a trial. `tokens`: emitted in a step without and with
        drafts; `steps`: duration of the choice."""
        bucket = self._bucket(batch)
        seconds = bucket.expected()
        rates = {drafts: tokens[drafts] / seconds[drafts] for drafts in (False, True)}
        using = rates[True] > rates[False] if bucket.using is None else bucket.using
        if rates[not using] > (1 + HYSTERESIS) * rates[using]:
            using = not using
        loss = steps * (seconds[not using] - tokens[not using] / rates[using])
        if bucket.since < TRIAL_PAUSE * steps or bucket.savings < loss or not bucket.seconds[using].weight:
            return using, False
        return not using, True

    def _bucket(self, batch: int) -> Bucket:
        if batch not in self._buckets:
            self._buckets[batch] = Bucket(self._ratio(batch))
        return self._buckets[batch]
