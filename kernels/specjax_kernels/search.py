"""A search among candidates that are measured: for block sizes, implementations, options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

Say = Callable[[str], None]
print_now: Say = functools.partial(print, flush=True)

WORTH = 0.98
"""A change must take less than this share of the time: less is noise."""


class Found(NamedTuple):
    blocks: Any  # the best candidate
    score: float  # of the start's time
    tried: dict[Any, float]  # infinite: it does not run, or is wrong


def neighbours(blocks: Any, choices_of: Mapping[str, tuple[int, ...]]) -> Iterator[Any]:
    """Candidates, which are dataclasses, with one field one choice up or down."""
    for name, choices in choices_of.items():
        at = min(range(len(choices)), key=lambda i: abs(choices[i] - getattr(blocks, name)))
        for other in (at - 1, at + 1):
            if 0 <= other < len(choices):
                yield replace(blocks, **{name: choices[other]})


def search(
    start: Any,
    score: Callable[[Any], float],
    report: Callable[[Any, float], None],
    *,
    around: Callable[[Any], Iterable[Any]],
    going: Callable[[], bool] = lambda: True,
) -> Found:
    """Descends from `start`, whose score is 1; each candidate is scored once. An infinite score: it cannot run.

    Args:
        around: candidates one change away from another.
        going: asked before each candidate; False ends the search with the best so far.
    """
    best, tried = start, {start: 1.0}
    while True:
        before = best
        for candidate in around(best):
            if candidate not in tried and going():
                tried[candidate] = score(candidate)
                report(candidate, tried[candidate])
        fastest = min(tried, key=tried.__getitem__)
        if tried[fastest] < WORTH * tried[best]:
            best = fastest
        if best == before or not going():
            return Found(best, tried[best], tried)


def tell(say: Say, what: str, error: Exception) -> None:
    """On one line, of which a compiler's message can have thousands."""
    say(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:120]}")
