"""How much of a prompt goes between two steps of running requests, from measured times.

    a prefill beside R running requests, while W prompts wait, takes at most
        PACE * max(1, W / R) * seconds of one of their steps                  (`Buckets.steps_beside`)

so a stream's gap is at most 1 + `PACE` steps where no more prompts wait than run. What a program takes is predicted:

    seconds = scale * (tokens * (1 + context / CONTEXT) + free tokens)

A token that attends to `CONTEXT` committed ones costs twice what the first of a prompt costs. `scale` is that of recent
runs of the program, so a chunk gets narrower as the prompt's context grows, and an error of the formula is made up for.
Where a program was not measured its kind's largest scale is used, then the other kind's; before the first measurement
prefills and steps have the same.

Where no request runs, nothing has to keep its pace, but one may come that needs little: a program that is expected
to take longer than `WAIT` is not used for a chunk if there is a smaller one (`while_none_runs`), and none is launched
behind one that takes longer than `BRIEF`.

Plain Python; knows nothing of the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from specjax.engine.buckets import Buckets
from specjax.engine.draft_policy import DECAY, MAX_STEP_RATIO, Mean
from specjax.engine.keys import Key

WAIT = 0.2  # seconds that a request which comes now may wait for the prefill under way
BRIEF = 0.02  # seconds beside which the host's time between two programs, about 1 ms, counts


Shape = tuple[int, int, int]
"""Of a prefill program, as `Buckets.prefill_shapes` has it."""


def _shape(key: Key) -> Shape:
    return key.rows, key.width, key.tokens


def _tokens(shape: Shape) -> int:
    rows, width, tokens = shape
    return tokens or rows * width


@dataclass
class Pace:
    """What an engine has measured of prefills and steps, and the bound that follows for the next prefill."""

    buckets: Buckets
    _prefills: dict[Shape, Mean] = field(default_factory=dict)  # scales
    _steps: dict[int, Mean] = field(default_factory=dict)  # batch bucket -> scale
    _seen: set[Key] = field(default_factory=set)

    def record(self, key: Key, seconds: float, context: int = 0) -> None:
        """After a step or a prefill. `context`: committed tokens before the prefill's, the most of its prompts."""
        if key not in self._seen:  # a program's first run takes longer
            self._seen.add(key)
        elif key.kind == "step":
            self._steps.setdefault(key.width, Mean(DECAY)).add(
                seconds / self.buckets.step_cost(key.width), most=MAX_STEP_RATIO
            )
        elif key.kind == "prefill":
            cost = self.buckets.prefill_cost(key.size, context)
            self._prefills.setdefault(_shape(key), Mean(DECAY)).add(seconds / cost, most=MAX_STEP_RATIO)

    def room(self, running: int, waiting: int, context: int = 0) -> int | None:
        """The most tokens of a program that prefills beside `running` requests while `waiting` prompts wait; None: no
        limit. 0: even the smallest takes too long, and is taken all the same, since the prompt must go on. `context`:
        committed tokens of the first of them."""
        steps = self.buckets.steps_beside(running, waiting)
        if steps is None:
            return None
        batch = self.buckets.batch(min(running, self.buckets.batches[-1]))
        allowed = steps * self._scale(self._steps, batch, self._prefills.values()) * self.buckets.step_cost(batch)
        sizes = self._sizes()
        return max((n for shape, n in sizes.items() if self._seconds(shape, context) <= allowed), default=0)

    def while_none_runs(self, waiting: int, context: int = 0) -> int | None:
        """The most tokens of a program that prefills while no request runs; None: no limit. Never fewer than the
        smaller chunk has, or, for several prompts, than they can share. `waiting`, `context`: as `room`."""
        sizes = self._sizes()
        if not self._prefills or not (
            slow := [n for shape, n in sizes.items() if self._seconds(shape, context) > WAIT]
        ):
            return None
        least = max((n for shape, n in sizes.items() if shape[0] > 1 and waiting > 1), default=0)
        return max(self.buckets.chunks[0], least, *(n for n in sizes.values() if n < min(slow)))

    def is_brief(self, key: Key, context: int = 0) -> bool:
        """Whether a prefill is not expected to take longer than `BRIEF`."""
        return not self._prefills or self._seconds(_shape(key), context) <= BRIEF

    def _sizes(self) -> dict[Shape, int]:
        """The tokens of each prefill program."""
        return {shape: _tokens(shape) for shape in self.buckets.prefill_shapes()}

    def _seconds(self, shape: Shape, context: int) -> float:
        """That a prefill is expected to take."""
        scale = self._scale(self._prefills, shape, self._steps.values())
        return scale * self.buckets.prefill_cost(_tokens(shape), context)

    @staticmethod
    def _scale(own: dict, name: object, others: Iterable[Mean]) -> float:
        if name in own:
            return own[name].value
        means = [each.value for each in own.values() or others]
        return max(means, default=1.0)
