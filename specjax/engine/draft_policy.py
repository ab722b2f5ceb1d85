"""Whether a step drafts: in each batch bucket the way of decoding with the most tokens a second.

    rate of a mode  =  tokens that the batch's requests emit in a step of it / seconds that it takes

There are two modes, a plain step and a step with the bucket's tree. Seconds are a running mean of recent steps; before
a mode has run they follow from the other's and from `specjax.costs.estimated_ratio`. A plain step emits one token a
request. A step with drafts emits each request's own running acceptance, which starts at that of all requests.

The better mode is used. Another replaces it if its rate is higher by `HYSTERESIS`. Now and then one step runs in the
other mode, to measure it: `TRIAL_SHARE` of the time pays for what such steps are expected to lose. Every emitted token
is the target's own draw, so the choice changes the speed and never the text.

A drafter with `Drafter.costly_observe` is chosen once for each request, at its admission.

Plain Python; knows nothing of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specjax.engine.keys import PLAIN, TREE

if TYPE_CHECKING:
    from specjax.engine.sequence import Sequence

HYSTERESIS = 0.05  # by which the other mode's rate must be higher
TRIAL_SHARE = 0.01  # of the time, for steps of the other mode
TRIAL_PAUSE = 16  # steps between two of them, at least
DECAY = 0.9  # weight of a step's time after the next one
ACCEPTANCE_DECAY = 0.95  # weight of a step's acceptance after the next one
MAX_STEP_RATIO = 2.5  # a step that took longer than so many means counts as so long
OWN_STEPS = 8.0  # steps of a request after which its own acceptance counts as much as that of all
GUESS_STEPS = 16.0  # steps of all requests after which theirs counts as much as the first guess
NAMES = {PLAIN: "plain", TREE: "draft"}
GUESSES = {True: 2.0, False: 1.3}  # accept length of which nothing is known, of a drafter with and without a model


@dataclass
class Mean:
    """A running mean, in which the last values count most."""

    decay: float
    weight: float = 0.0
    total: float = 0.0

    def add(self, value: float, weight: float = 1.0, most: float | None = None) -> None:
        """Adds a value with a weight. `most`: a value above so many means counts as so much."""
        if most is not None and self.weight:
            value = min(value, most * self.value)
        self.weight, self.total = self.decay * self.weight + weight, self.decay * self.total + weight * value

    @property
    def value(self) -> float:
        return self.total / self.weight


@dataclass
class Bucket:
    """What was measured in one batch bucket.

    Attributes:
        ratio: seconds of a step with drafts over those of a plain one, before both have run.
        seconds: of recent steps, by mode.
        ran: number of steps, by mode.
        using: the mode in use.
        savings: seconds that the next step of the other mode may lose.
        since: steps after the last one of the other mode.
    """

    ratio: float
    seconds: dict[int, Mean] = field(default_factory=lambda: {mode: Mean(DECAY) for mode in NAMES})
    ran: dict[int, int] = field(default_factory=dict)
    using: int | None = None
    savings: float = 0.0
    since: int = 0

    def expected(self) -> dict[int, float]:
        """Seconds of a step of each mode; of a unit of one's own before anything has run."""
        plain, tree = self.seconds[PLAIN], self.seconds[TREE]
        if plain.weight and tree.weight:
            return {PLAIN: plain.value, TREE: tree.value}
        if tree.weight:
            return {PLAIN: tree.value / self.ratio, TREE: tree.value}
        known = plain.value if plain.weight else 1.0
        return {PLAIN: known, TREE: known * self.ratio}


class DraftPolicy:
    """Chooses between plain steps and steps with drafts.

    Args:
        ratio: batch bucket -> seconds of a step with drafts over those of a plain one, as an estimate.
        guess: accept length of which nothing is known.
    """

    def __init__(self, ratio: Callable[[int], float], guess: float) -> None:
        self._ratio = ratio
        self._accepted = Mean(ACCEPTANCE_DECAY)
        self._accepted.add(guess, GUESS_STEPS)
        self._buckets: dict[int, Bucket] = {}

    def choose(self, batch: int, requests: list[Sequence]) -> int:
        """The mode of the next step of these requests, PLAIN or TREE, in a batch bucket that may draft."""
        drafting = [request for request in requests if request.drafts]
        if not drafting:
            return PLAIN
        if any(request.params.always_draft for request in drafting):
            return TREE
        accepted = sum(self.accept_length(request) for request in drafting)
        plain = float(len(requests))
        return self._best(batch, {PLAIN: plain, TREE: plain - len(drafting) + accepted})

    def pays(self, batch: int, requests: int, forced: int) -> bool:
        """Whether to emit `forced` tokens in one step with drafts of these requests, by the estimated ratio: measured
        steps with drafts were narrower where the drafter found nothing."""
        return requests + forced > requests * self._bucket(batch).ratio

    def admit(self, batch: int, sequence: Sequence) -> bool:
        """Whether a request drafts from its first step to its end. `batch`: bucket that it will run in."""
        if not sequence.drafts or sequence.params.always_draft:
            return sequence.drafts
        return self._best(batch, {PLAIN: 1.0, TREE: self._accepted.value}, steps=sequence.request.limit) == TREE

    def accept_length(self, request: Sequence) -> float:
        """Tokens that a step with drafts is expected to emit for a request."""
        own, every = request.acceptance, self._accepted.value
        return (own.total + OWN_STEPS * every) / (own.weight + OWN_STEPS)

    def record(self, batch: int, mode: int, seconds: float, drafted: Mapping[Sequence, int]) -> None:
        """After a step: its seconds, and the tokens that it emitted for each request that could draft."""
        own = self._bucket(batch)
        own.since, own.savings = own.since + 1, own.savings + TRIAL_SHARE * seconds
        if mode in own.ran:  # the first run of a program takes longer
            own.seconds[mode].add(seconds, most=MAX_STEP_RATIO)
        own.ran[mode] = own.ran.get(mode, 0) + 1
        if mode == TREE:
            for request, count in drafted.items():
                request.acceptance.add(float(count))
            if drafted:
                self._accepted.add(sum(drafted.values()) / len(drafted), float(len(drafted)))

    def _best(self, batch: int, tokens: Mapping[int, float], steps: int = 1) -> int:
        """The mode with the higher rate, or now and then the other one. `steps`: for which it is chosen."""
        own = self._bucket(batch)
        seconds = own.expected()
        rates = {mode: tokens[mode] / seconds[mode] for mode in NAMES}
        using = max(rates, key=rates.__getitem__) if own.using is None else own.using
        other = TREE if using == PLAIN else PLAIN
        if rates[other] > (1 + HYSTERESIS) * rates[using]:
            using, other = other, using
        own.using = using
        loss = steps * (seconds[other] - tokens[other] / rates[using])
        if own.since < TRIAL_PAUSE * steps or own.savings < loss or not own.seconds[using].weight:
            return using
        own.since, own.savings = 0, 0.0
        return other

    def _bucket(self, batch: int) -> Bucket:
        if batch not in self._buckets:
            self._buckets[batch] = Bucket(self._ratio(batch))
        return self._buckets[batch]

    def report(self) -> dict[str, Any]:
        """For people: the accept length of all requests, and by batch bucket the mode in use and what was measured."""

        def measured(own: Bucket) -> dict[str, Any]:
            return {
                NAMES[mode]: {
                    "steps": own.ran.get(mode, 0),
                    "milliseconds": round(1e3 * mean.value, 3) if mean.weight else None,
                }
                for mode, mean in own.seconds.items()
            }

        return {
            "accept_length": round(self._accepted.value, 3),
            "batches": {
                str(batch): {"using": None if own.using is None else NAMES[own.using], **measured(own)}
                for batch, own in sorted(self._buckets.items())
            },
        }
