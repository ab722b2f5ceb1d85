"""The adaptive choice: with which of its trees the next step of a batch drafts, if with any, from measured step times
and running acceptance.

    rate of a choice  =  tokens that the batch's requests emit in such a step / seconds that it takes

The choice with the highest rate is taken (`specjax.engine.choice`); it must be clearly better than the one in use.
Seconds are those of recent steps of the same batch bucket, and those of the choices that are not in use change in
proportion to those of the one that is: a machine is faster or slower for all of them. (Not where what is proposed
changes a step's time, and not while something compiles.) Where there are none, they are what was expected, corrected by
how wrong that was of the bucket's other trees, else of other buckets. Without drafts a request emits one token; with
drafts as many as its own running acceptance says, which begins at what is usual at about its temperature. What was
accepted of one tree says what would be of another: a draft is taken to be accepted with one probability everywhere
(`accept_lengths`), and steps of the tree itself correct that. What the drafter has missed must be caught up first:
tokens that come after it pay for that, `HORIZON` of each request or as many as it has emitted, but no more than it may
still emit.

A choice that is not taken is tried now and then, for `TRIAL` steps: only when `SHARE` of the time so far, and at the
start the time of `FIRST` steps, pays for what the trial is expected to lose. What it did lose is then taken from this
credit (one that loses far more ends early), as is the time of catching up for it; all batch buckets share one credit.
What it cannot pay for it is saved up for, so that a trial comes also where all prompts are long. So a drafter that is
of no use costs that share and no more, and one that has become useful is found. Every emitted token is the target's own
draw, so the choice changes the speed and never the text.

Smaller trees need programs of their own, which nothing waits for: one is chosen when it is `ready`, and is `wanted`, so
that it compiles in the background, where it is expected to be better by `GAIN` than what has been in use for long.

Plain Python and NumPy; knows nothing of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from specjax.costs import PLAIN as PLAIN_TREE
from specjax.costs import Tree
from specjax.engine.choice import PLAIN, best, catch_up_share, expected_tokens, transferred
from specjax.engine.keys import Key
from specjax.engine.sequence import Sequence

TRIAL = 8  # steps
PAUSE = 32  # steps between two trials, at least
SHARE = 0.01  # of the time, for trials
FIRST = 2  # steps whose time the first trial may lose
SAVED = 1000  # steps whose share is kept for trials, at most, unless a trial needed more
ENOUGH = 3  # steps until a time counts as measured
OUTLIER = 2.5  # times the usual: a step that took longer counts as one that took so long
MEMORY = 0.95  # weight of a step's time and acceptance after the next one
STALE = 0.2  # weight of the times that are known of a choice when a trial of it begins
GAIN = 0.05  # by which a tree that is not compiled must be better
SETTLED = 64  # steps of the choice in use before another tree is compiled
CURIOSITY = 1.25  # factor on the rate of what was never measured, when the next trial is chosen
GUESS = 2.0  # tokens a step of a drafter of which nothing is known
PRIOR = 8.0  # steps of a request after which its own acceptance counts as much as the usual one
DOUBT = 16.0  # and of all requests after which theirs counts as much as the guess
HOTTEST = 4  # of `warmth`: temperatures from 1.75 on


def warmth(request: Sequence) -> int:
    """Its temperature in halves; 0 where only the likeliest token is left. Drafts are accepted the less often, the
    hotter a request samples: by what those of another temperature accept, it would draft for too long, or too late."""
    return 0 if request.params.top_k == 1 else min(int(2 * request.params.temperature + 0.5), HOTTEST)


@dataclass
class Accepted:
    """What requests emitted in steps with drafts: weighted sums, in which the last steps count most."""

    requests: float = 0.0
    tokens: float = 0.0

    def after(self, requests: int, tokens: int) -> Accepted:
        """What it is after another step."""
        return Accepted(MEMORY * self.requests + requests, MEMORY * self.tokens + tokens)


@dataclass
class Recent:
    """Steps of one batch bucket and one choice, the last ones counting most. Of the first `ENOUGH` the median time
    counts for each: one long wait among them would end drafting for as long as trials must save for what it cost."""

    steps: int = 0
    weight: float = 0.0
    seconds: float = 0.0  # a weighted sum
    accepted: Accepted = field(default_factory=Accepted)
    of_warmth: dict[int, Accepted] = field(default_factory=dict)
    first: list[float] = field(default_factory=list)
    quiet: int = 0  # steps while nothing compiled

    def add(self, seconds: float, drafted: Mapping[int, list[int]]) -> float:
        """After a step. `drafted`: `warmth` -> tokens that each request emitted. Returns the seconds that count."""
        if self.steps >= ENOUGH:
            seconds = min(seconds, OUTLIER * self.mean_seconds)
        else:
            self.first.append(seconds)
        self.steps += 1
        self.weight = MEMORY * self.weight + 1
        self.seconds = MEMORY * self.seconds + seconds
        if self.steps == ENOUGH:
            self.seconds = self.weight * median(self.first)
        for kind, counts in drafted.items():
            self.of_warmth[kind] = self.of_warmth.get(kind, Accepted()).after(len(counts), sum(counts))
        every = [count for counts in drafted.values() for count in counts]
        self.accepted = self.accepted.after(len(every), sum(every))
        return seconds

    def of(self, kind: int | None, *, others: bool) -> list[Accepted]:
        """Of requests of this `warmth`, None: of all; or of all others."""
        if kind is None:
            return [self.accepted] if self.accepted.requests else []
        return [seen for own, seen in list(self.of_warmth.items()) if (own != kind) == others]

    def restart(self) -> None:
        """Forgets the times."""
        self.steps, self.weight, self.seconds, self.first = 0, 0.0, 0.0, []

    def forget(self) -> None:
        """Lets the next steps' times count for most of the mean."""
        self.weight, self.seconds = STALE * self.weight, STALE * self.seconds

    @property
    def mean_seconds(self) -> float:
        return self.seconds / self.weight


@dataclass
class _Batch:
    """Of a batch bucket."""

    recent: dict[int, Recent]
    expected: dict[int, float]  # seconds of a step of each choice over those of one without drafts
    using: int | None = None
    trying: int | None = None
    left: int = 0  # steps of the trial
    behind: float = 0.0  # seconds that it was to take to catch up for it
    lost: float = 0.0  # seconds that it has lost so far
    most: float = 0.0  # that it may lose before it ends early: clearly more than was expected
    warmths: frozenset[int] = frozenset()  # of its requests: with others it ends, whose steps say nothing of it
    since: int = 0  # steps after the last trial
    settled: int = 0  # steps of the choice in use since it is
    rate: float = 0.0  # tokens a second of the choice in use when the last trial began

    def extra(self, choice: int) -> float | None:
        """What drafting adds to a step, over what was expected to be added; None: it is not measured."""
        found, plain = self.recent[choice], self.recent.get(PLAIN)
        if choice == PLAIN or plain is None or min(found.steps, plain.steps) < ENOUGH or self.expected[choice] <= 1:
            return None
        return max(found.mean_seconds / plain.mean_seconds - 1, 0.0) / (self.expected[choice] - 1)


@dataclass
class Adaptive:
    """What an engine has measured, and chooses from it.

    Args:
        choices: batch bucket -> `Key.nodes` of its steps.
        expected: batch bucket, `Key.nodes` -> seconds of such a step over those of one without drafts, before both are
            measured.
        tree: batch bucket, `Key.nodes` -> the tree of such a step; None: of what is chosen between only one drafts.
        ready: batch bucket, `Key.nodes` of a smaller tree -> whether such a step can run at once.
        guess: accept length of the whole tree, before anything is known.
        steady: whether a choice's steps take the same time whatever is drafted; those of a drafter that looks up what
            was said take less where it proposes nothing. Else only plain steps that have long been in use say how fast
            the machine is, and cheap drafts of one batch bucket say nothing of another, where for one of more requests
            something is proposed.
        wanted: batch bucket -> `Key.nodes` of what should be compiled for it; the reader removes it.
    """

    choices: Callable[[int], tuple[int, ...]]
    expected: Callable[[int, int], float]
    tree: Callable[[int, int], Tree] | None = None
    ready: Callable[[int, int], bool] = lambda batch, nodes: True
    guess: float = GUESS
    steady: bool = True
    wanted: dict[int, int] = field(default_factory=dict)
    catch_up_seconds: float = 0.0  # a token, of the last ones
    credit: float | None = None  # seconds that trials may lose; None before `ENOUGH` steps
    refused: float = 0.0  # the most seconds of a trial that the credit did not pay for
    _batches: dict[int, _Batch] = field(default_factory=dict)
    _seen: set[Key] = field(default_factory=set)

    def choose(self, batch: int, requests: list[Sequence]) -> int:
        """`Key.nodes` of the next step of these requests, in a batch bucket."""
        options = self.choices(batch)
        if len(options) == 1 or not any(request.params.drafts for request in requests):
            return PLAIN if PLAIN in options else options[0]
        own = self._of(batch)
        drafting = [request for request in requests if request.params.drafts]
        if any(request.params.always_draft for request in drafting):
            own.trying, own.left = None, 0  # a forced step is no trial
            return options[0]
        warmths = frozenset(map(warmth, drafting))
        behind = sum(request.unseen for request in drafting) * self.catch_up_seconds
        if own.left and warmths != own.warmths:
            own.left = 0
        if own.left and own.trying != PLAIN and behind > own.behind + max(self.credit or 0.0, 0.0):
            own.left = 0  # of requests that came after it had begun
        if own.left:
            own.left -= 1
            return own.trying if own.trying is not None else PLAIN
        seconds, tokens = self._seconds(batch), self._tokens(batch, requests)
        emitted = [len(request.output) for request in drafting]
        left = [request.limit - count for request, count in zip(drafting, emitted, strict=True)]
        spread = catch_up_share(behind, emitted, left)
        usable = {c: seconds[c] for c in options if c <= PLAIN or self.ready(batch, c)}
        using = best(usable, tokens, options[0] if own.using is None else own.using, spread)
        if using != own.using:
            own.using, own.settled = using, 0
            if not self.steady:  # its times may be from long ago, and another speed of the machine
                own.recent[using].forget()
        if len(usable) < len(options) and own.recent[using].steps >= SETTLED:
            other = best(seconds, tokens, using, spread)
            if tokens[other] / seconds[other] > (1 + GAIN) * tokens[using] / seconds[using]:
                self.wanted[batch] = other
        found = self._trial(own, usable, tokens, behind)
        own.warmths = warmths
        return using if found is None else found

    def _trial(
        self, own: _Batch, seconds: Mapping[int, float], tokens: Mapping[int, float], behind: float
    ) -> int | None:
        """Another choice, where one is due and paid for."""
        using = own.using
        assert using is not None

        def promise(choice: int) -> float:
            known = own.recent[choice].steps >= ENOUGH
            return tokens[choice] / seconds[choice] * (1.0 if known else CURIOSITY)

        other = max((choice for choice in seconds if choice != using), key=promise)
        measured = own.recent[other].steps >= ENOUGH
        count = TRIAL if measured else ENOUGH + 1  # the first run of a program does not count
        needed = seconds[other] * count + (behind if other != PLAIN else 0.0)
        loss = needed - count * tokens[other] * seconds[using] / tokens[using]
        if other == PLAIN and not measured:
            loss = 0.0  # whatever was expected: plain decoding is what the choice must not fall behind
        credit = max(self.credit or 0.0, 0.0)
        if own.recent[using].steps < ENOUGH or own.since < (PAUSE if measured else 0):
            return None
        if credit < loss:
            self.refused = max(self.refused, loss)
            return None
        own.recent[other].forget()
        own.since, own.trying, own.left, own.behind = 0, other, count - 1, behind
        own.rate = tokens[using] / seconds[using]
        own.lost, own.most = 0.0, 2 * max(loss, 0.0) + FIRST * seconds[using]
        return other

    def tries(self, batch: int, nodes: int) -> bool:
        """Whether a step of this batch bucket and choice is a trial."""
        own = self._of(batch)
        return nodes == own.trying != own.using

    def record(
        self,
        key: Key,
        seconds: float,
        drafted: Mapping[Sequence, int],
        *,
        emitted: int | None = None,
        disturbed: bool = False,
    ) -> None:
        """After a step: its time, and what it emitted for the requests that it could draft for.

        Args:
            emitted: for all requests; default: for these, and one token for each request of a step without drafts.
            disturbed: something compiles meanwhile, which makes a CPU's steps slower. Where they were measured without,
                the time does not count.
        """
        own, tokens = self._of(key.width), sum(drafted.values())
        recent = own.recent[key.nodes]
        if disturbed and recent.quiet >= ENOUGH:
            seconds = recent.mean_seconds
        if trial := self.tries(key.width, key.nodes):
            every = emitted if emitted is not None else tokens if drafted else key.width
            lost = min(seconds, OUTLIER * self._seconds(key.width)[key.nodes]) - every / own.rate
            own.lost += lost
            # What a trial gains is no credit for others, whose steps may be of another temperature.
            self._charge(max(own.lost, 0.0) - max(own.lost - lost, 0.0))
        if key not in self._seen:  # a program's first run takes longer
            self._seen.add(key)
            return
        own.since += 1
        own.settled += key.nodes == own.using
        kinds: dict[int, list[int]] = {}
        warm = list(map(warmth, drafted))
        for kind, count in zip(warm, drafted.values(), strict=True):
            kinds.setdefault(kind, []).append(count)
        scales = {kind: self._scale(key.width, key.nodes, kind) for kind in kinds}
        if not disturbed:
            for other in own.recent.values() if not self.steady else ():
                if not other.quiet:  # measured beside the compiler, which does not bear comparison with what comes
                    other.restart()
            recent.quiet += 1
        before = recent.mean_seconds if recent.steps >= ENOUGH else None
        seconds = recent.add(seconds, kinds)
        if key.nodes == own.using and before and (self.steady or (key.nodes == PLAIN and own.settled > PAUSE)):
            # What makes its steps faster or slower does so with the others'.
            for other in own.recent.values():
                other.seconds *= 1.0 if other is recent else recent.mean_seconds / before
        self._earn(seconds, recent)
        if trial and recent.steps >= ENOUGH and own.lost > own.most:
            own.left = 0
        for (request, count), kind in zip(drafted.items(), warm, strict=True):
            request.drafted = MEMORY * request.drafted + 1
            request.gained = MEMORY * request.gained + 1 + scales[kind] * (count - 1)

    def record_catch_up(self, key: Key, seconds: float, *, trial: bool = False) -> None:
        """After a catch-up. `trial`: it was made for one, which is to pay for it."""
        if key in self._seen:
            each, known = seconds / (key.rows * key.width), self.catch_up_seconds
            # One long wait must not end drafting for good: where none is expected to pay, none is measured again.
            self.catch_up_seconds = (known + min(each, OUTLIER * known)) / 2 if known else each
            self._charge(seconds if trial else 0.0)
        self._seen.add(key)

    def charge_catch_up(self, key: Key) -> None:
        """Takes from the credit what a catch-up is expected to take whose time is not measured."""
        self._charge(self.catch_up_seconds * key.rows * key.width)

    def _earn(self, seconds: float, recent: Recent) -> None:
        """A step's share, up to that of `SAVED` such steps or what was refused; at the start what `FIRST` of the usual
        ones take."""
        if self.credit is not None:
            most = max(SHARE * SAVED * seconds, self.refused)
            self.credit = max(self.credit, min(self.credit + SHARE * seconds, most))
        elif recent.steps >= ENOUGH:
            self.credit = FIRST * recent.mean_seconds

    def _charge(self, seconds: float) -> None:
        if self.credit is not None:
            self.credit -= seconds

    def _of(self, batch: int) -> _Batch:
        if batch not in self._batches:
            options = self.choices(batch)
            expected = {c: 1.0 if c == PLAIN or len(options) == 1 else self.expected(batch, c) for c in options}
            self._batches[batch] = _Batch({choice: Recent() for choice in options}, expected)
        return self._batches[batch]

    def _seconds(self, batch: int) -> dict[int, float]:
        """Of a step of each choice, in any unit where none is measured."""
        own = self._of(batch)
        known = {choice: found.mean_seconds for choice, found in own.recent.items() if found.steps >= ENOUGH}
        if len(known) == len(own.recent):
            return known
        near = [extra for choice in own.recent if (extra := own.extra(choice)) is not None]
        every = (one.extra(choice) for one in self._batches.values() for choice in one.recent)
        found = near or [extra if self.steady else max(extra, 1.0) for extra in every if extra is not None]
        wrong = sum(found) / len(found) if found else 1.0
        ratios = {choice: 1 + wrong * (ratio - 1) for choice, ratio in own.expected.items()}
        each = [taken / ratios[choice] for choice, taken in known.items()]
        plain = known.get(PLAIN, sum(each) / len(each) if each else 1.0)
        return {choice: known.get(choice, plain * ratios[choice]) for choice in own.recent}

    def _tokens(self, batch: int, requests: list[Sequence]) -> dict[int, float]:
        """That a step of each choice emits."""
        drafting = [request for request in requests if request.params.drafts]
        others, whole, recent = len(requests) - len(drafting), self._whole(batch), self._of(batch).recent
        kinds = list(map(warmth, drafting))
        usual = {kind: self.usual(batch, kind) for kind in set(kinds)}
        own = [(one.gained, usual[kind], one.drafted) for one, kind in zip(drafting, kinds, strict=True)]
        lengths = np.array([(gained + PRIOR * length) / (drafted + PRIOR) for gained, length, drafted in own])
        trees = {one: self._tree(batch, one) for one in self.choices(batch)}
        factors = {}
        for choice, tree in trees.items():
            if choice == PLAIN or tree == whole:
                continue
            # What was seen of the tree itself corrects what another says of it.
            seen = [(one, kind) for kind in usual if (one := recent[choice].of_warmth.get(kind)) is not None]
            if predicted := sum(one.requests * float(transferred(usual[kind], whole, tree)) for one, kind in seen):
                doubt = DOUBT * predicted / sum(one.requests for one, _ in seen)
                factors[choice] = (sum(one.tokens for one, _ in seen) + doubt) / (predicted + doubt)
        return {choice: others + n for choice, n in expected_tokens(trees, lengths, whole, factors).items()}

    def _tree(self, batch: int, choice: int) -> Tree:
        return PLAIN_TREE if self.tree is None or choice == PLAIN else self.tree(batch, choice)

    def _whole(self, batch: int) -> Tree:
        """The tree in whose accept lengths everything is kept: the batch's own."""
        return self._tree(batch, 0)

    def _scale(self, batch: int, choice: int, kind: int) -> float:
        """Accepted drafts of the batch's own tree for each of the choice's, of requests of this `warmth`."""
        tree, whole = self._tree(batch, choice), self._whole(batch)
        if tree == whole:
            return 1.0
        usual = self.usual(batch, kind)
        fewer = float(transferred(usual, whole, tree)) - 1
        return (usual - 1) / fewer if fewer > 0 else 1.0

    def usual(self, batch: int, kind: int | None = None) -> float:
        """The accept length of the batch's own tree to be expected of requests of this `warmth`: a guess, corrected by
        recent steps with drafts of other requests, this by those of such requests, and this by those of the batch
        bucket. None: of all requests."""
        length, whole, every = self.guess, self._whole(batch), list(self._batches)
        for batches, others in [(every, True), (every, False), ([batch], False)][kind is None :]:
            tokens = requests = 0.0
            for one in batches:
                for choice, recent in self._of(one).recent.items():
                    if choice == PLAIN:
                        continue
                    for seen in recent.of(kind, others=others):
                        mean = transferred(seen.tokens / seen.requests, self._tree(one, choice), whole)
                        tokens, requests = tokens + float(mean) * seen.requests, requests + seen.requests
            length = (tokens + DOUBT * length) / (requests + DOUBT)
        return length

    def report(self) -> dict[str, Any]:
        """For people: by batch bucket, what is in use and what was measured. `draft`: the batch's own tree; `draft N`:
        one of N nodes. Temperatures are rounded to halves."""

        def name(choice: int) -> str:
            return "plain" if choice == PLAIN else f"draft {choice}" if choice else "draft"

        def shown(choice: int, recent: Recent) -> dict[str, Any]:
            found: dict[str, Any] = {"steps": recent.steps}
            if recent.steps:
                found["milliseconds"] = round(1e3 * recent.mean_seconds, 3)
            if choice != PLAIN and (seen := recent.accepted).requests:
                found["accept_length"] = round(seen.tokens / seen.requests, 3)
            return found

        def by_temperature(batch: int, own: _Batch) -> dict[str, float]:
            kinds = sorted({kind for recent in own.recent.values() for kind in list(recent.of_warmth)})
            return {f"{kind / 2:g}": round(self.usual(batch, kind), 3) for kind in kinds}

        return {
            str(batch): {
                "drafts": own.using not in (PLAIN, None),
                "using": None if own.using is None else name(own.using),
                "usual_accept_length": round(self.usual(batch), 3),
                "usual_by_temperature": by_temperature(batch, own),
                **{name(choice): shown(choice, one) for choice, one in own.recent.items()},
            }
            for batch, own in sorted(self._batches.items())
        }
