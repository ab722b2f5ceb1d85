"""The adaptive choice: whether the next step of a batch drafts, from measured step times and running acceptance.

    rate of a choice  =  tokens that the batch's requests emit in such a step / seconds that it takes

The choice with the highest rate is taken; it must be better than the one in use by `MARGIN`. Seconds are those of
recent steps of the same batch bucket; where there are none, those of the other choice times an expected ratio. Without
drafts a request emits one token; with drafts as many as its own running acceptance says, which begins at what is
usual. What the drafter has missed must be caught up first, which is spread over `HORIZON` steps, or as many as are
left.

The choice that is not taken is tried now and then, for `TRIAL` steps: only when `SHARE` of the time so far pays for
what the trial is expected to lose, and at the start the time of `FIRST` steps. So a drafter that is of no use costs a
batch that share and no more, and one that has become useful is found. Every emitted token is the target's own draw, so
the choice changes the speed and never the text.

Plain Python; knows nothing of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specjax.engine.buckets import Key
from specjax.engine.sequence import Sequence

PLAIN = 1  # `Key.nodes` of steps without drafts

MARGIN = 0.02  # by which another choice must be better than the one in use
HORIZON = 64  # steps over which catching up is to pay
TRIAL = 8  # steps
PAUSE = 32  # steps between two trials, at least
SHARE = 0.01  # of the time, for trials
FIRST = 8  # steps whose time the first trial may lose
SAVED = 1000  # steps whose share is kept for trials, at most
ENOUGH = 3  # steps until a time counts as measured
OUTLIER = 2.5  # times the usual: a step that took longer counts as one that took so long
MEMORY = 0.95  # weight of a step's time and acceptance after the next one
GUESS = 2.0  # tokens a step of a drafter of which nothing is known
PRIOR = 8.0  # steps of a request after which its own acceptance counts as much as the usual one
DOUBT = 16.0  # and of all requests after which theirs counts as much as the guess


@dataclass
class Recent:
    """Steps of one batch bucket and one choice, the last ones counting most."""

    steps: int = 0
    weight: float = 0.0
    seconds: float = 0.0  # weighted sums
    requests: float = 0.0
    tokens: float = 0.0

    def add(self, seconds: float, requests: int, tokens: int) -> None:
        if self.steps >= ENOUGH:
            seconds = min(seconds, OUTLIER * self.mean_seconds)
        self.steps += 1
        self.weight = MEMORY * self.weight + 1
        self.seconds = MEMORY * self.seconds + seconds
        self.requests = MEMORY * self.requests + requests
        self.tokens = MEMORY * self.tokens + tokens

    @property
    def mean_seconds(self) -> float:
        return self.seconds / self.weight

    @property
    def accept_length(self) -> float:
        return self.tokens / self.requests


def best(seconds: Mapping[int, float], tokens: Mapping[int, float], using: int, extra: float = 0.0) -> int:
    """The choice with the most tokens a second.

    Args:
        seconds: of a step of each choice.
        tokens: that the batch emits in it.
        using: the choice in use, which stays unless another is better by `MARGIN`.
        extra: seconds a step that drafting costs besides.

    Example: of 8 requests, 0.05 s a step without drafts and 0.11 s with drafts of accept length 2 are 160 and 145
    tokens a second, so nothing is drafted.
    """

    def rate(choice: int) -> float:
        found = tokens[choice] / (seconds[choice] + (0.0 if choice == PLAIN else extra))
        return found * (1 + MARGIN) if choice == using else found

    return max(seconds, key=rate)


@dataclass
class _Batch:
    """Of a batch bucket."""

    recent: dict[int, Recent]
    ratio: float | None = None  # as expected, before both choices are measured
    using: int | None = None
    trying: int | None = None
    left: int = 0  # steps of the trial
    since: int = 0  # steps after the last trial
    credit: float = 0.0  # seconds that trials may lose


@dataclass
class Adaptive:
    """What an engine has measured, and chooses from it.

    Args:
        choices: batch bucket -> `Key.nodes` of its steps.
        expected: batch bucket -> seconds of a step with drafts over those of one without, before both are measured.
    """

    choices: Callable[[int], tuple[int, ...]]
    expected: Callable[[int], float]
    catch_up_seconds: float = 0.0  # a token, as measured last
    _batches: dict[int, _Batch] = field(default_factory=dict)
    _seen: set[Key] = field(default_factory=set)

    def choose(self, batch: int, requests: list[Sequence]) -> int:
        """`Key.nodes` of the next step of these requests, in a batch bucket."""
        options = self.choices(batch)
        if len(options) == 1 or not any(request.params.drafts for request in requests):
            return PLAIN if PLAIN in options else options[0]
        own = self._of(batch)
        if own.left:
            own.left -= 1
            return own.trying if own.trying is not None else PLAIN
        seconds, tokens = self._seconds(batch), self._tokens(batch, requests)
        behind = sum(request.unseen for request in requests if request.params.drafts) * self.catch_up_seconds
        left = max(request.limit - len(request.output) for request in requests)
        using = options[0] if own.using is None else own.using
        own.using = best(seconds, tokens, using, behind / max(1, min(HORIZON, left)))
        return self._trial(own, seconds, tokens, behind) or own.using

    def _trial(self, own: _Batch, seconds: Mapping[int, float], tokens: Mapping[int, float], behind: float) -> int:
        """The other choice, where it is due and paid for. 0: it is not."""
        using = own.using
        other = next(choice for choice in seconds if choice != using)
        assert using is not None
        measured = own.recent[other].steps >= ENOUGH
        count = TRIAL if measured else ENOUGH + 1  # the first run of a program does not count
        needed = seconds[other] * count + (behind if other != PLAIN else 0.0)
        loss = needed - count * tokens[other] * seconds[using] / tokens[using]
        if own.recent[using].steps < ENOUGH or own.since < (PAUSE if measured else 0) or own.credit < loss:
            return 0
        own.credit -= max(loss, 0.0)
        own.since, own.trying, own.left = 0, other, count - 1
        return other

    def record(self, key: Key, seconds: float, drafted: Mapping[Sequence, int]) -> None:
        """After a step: its time, and what it emitted for the requests that it could draft for."""
        if key not in self._seen:  # a program's first run takes longer
            self._seen.add(key)
            return
        own = self._of(key.width)
        if not any(recent.steps for recent in own.recent.values()):
            own.credit = FIRST * seconds
        own.since += 1
        own.credit = min(own.credit + SHARE * seconds, SHARE * SAVED * seconds)
        tokens = sum(drafted.values())
        own.recent[key.nodes].add(seconds, len(drafted), tokens)
        for request, count in drafted.items():
            request.drafted = MEMORY * request.drafted + 1
            request.gained = MEMORY * request.gained + count

    def record_catch_up(self, key: Key, seconds: float) -> None:
        """After a catch-up."""
        if key in self._seen:
            self.catch_up_seconds = seconds / (key.rows * key.width)
        self._seen.add(key)

    def _of(self, batch: int) -> _Batch:
        if batch not in self._batches:
            self._batches[batch] = _Batch({choice: Recent() for choice in self.choices(batch)})
        return self._batches[batch]

    def _seconds(self, batch: int) -> dict[int, float]:
        """Of a step of each choice, in any unit where none is measured."""
        own = self._of(batch)
        known = {choice: found.mean_seconds for choice, found in own.recent.items() if found.steps >= ENOUGH}
        if len(known) == len(own.recent):
            return known
        if own.ratio is None:
            own.ratio = self.expected(batch)
        plain = known[PLAIN] if PLAIN in known else max(known.values(), default=own.ratio) / own.ratio
        return {choice: known.get(choice, plain if choice == PLAIN else plain * own.ratio) for choice in own.recent}

    def _tokens(self, batch: int, requests: list[Sequence]) -> dict[int, float]:
        """That a step of each choice emits."""
        usual = self.usual(batch)
        lengths = (
            (request.gained + PRIOR * usual) / (request.drafted + PRIOR) if request.params.drafts else 1.0
            for request in requests
        )
        return {choice: float(len(requests)) for choice in self.choices(batch)} | {
            choice: sum(lengths) for choice in self.choices(batch) if choice != PLAIN
        }

    def usual(self, batch: int) -> float:
        """The accept length to be expected: a guess, corrected by recent steps of all batches with drafts, and this by
        those of the batch bucket."""
        length = GUESS
        for batches in (self._batches.values(), [self._of(batch)]):
            found = [recent for own in batches for choice, recent in own.recent.items() if choice != PLAIN]
            tokens, requests = (sum(getattr(one, name) for one in found) for name in ("tokens", "requests"))
            length = (tokens + DOUBT * length) / (requests + DOUBT)
        return length

    def report(self) -> dict[str, Any]:
        """For people: by batch bucket, what is in use and what was measured."""

        def shown(choice: int, recent: Recent) -> dict[str, Any]:
            found: dict[str, Any] = {"steps": recent.steps}
            if recent.steps:
                found["milliseconds"] = round(1e3 * recent.mean_seconds, 3)
            if choice != PLAIN and recent.requests:
                found["accept_length"] = round(recent.accept_length, 3)
            return found

        return {
            str(batch): {
                "drafts": own.using not in (PLAIN, None),
                **{"plain" if choice == PLAIN else "draft": shown(choice, one) for choice, one in own.recent.items()},
            }
            for batch, own in sorted(self._batches.items())
        }
