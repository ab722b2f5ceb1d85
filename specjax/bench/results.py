"""From runs to figures: one row for each method, set, temperature and batch size, with confidence intervals.

Intervals are bootstrap percentiles (95%, `RESAMPLES` resamples with a fixed seed). What is drawn with replacement are
groups of conversations that ran together (single ones at batch size 1), each with all its repeats: runs of one prompt
are not independent of each other. A speed-up is resampled in pairs, a method's runs with the baseline's of the same
groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95
ALL = "all"  # a row over all sets


@dataclass(frozen=True)
class Sample:
    """One method's run of a group of conversations, all turns: as a line of the log holds it."""

    method: str
    group: str  # ids of the conversations
    repeat: int
    seconds: float  # end to end, the prompts' forwards included
    tokens: int
    decode_seconds: float  # of each request after its first tokens came, summed
    decode_tokens: int
    histogram: list[int]  # forwards by drafts accepted
    drafted_steps: int | None  # None: not known, as of transformers
    texts: dict[str, int]  # turns by verdict: equal, near tie, different, other prompt
    full_seconds: float = 0.0  # while all requests of the group decode
    full_tokens: int = 0
    conversations: int = 1  # of the group
    curve: list[list[float | int]] = field(default_factory=list)  # [tokens, seconds] of each turn, for the plot


@dataclass(frozen=True)
class Interval:
    value: float
    low: float | None  # None: there is one group
    high: float | None

    def as_dict(self) -> dict[str, float | None]:
        return {"value": round(self.value, 4), "low": _rounded(self.low), "high": _rounded(self.high)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def bootstrap(statistic: Any, count: int) -> Interval:
    """`statistic` of indices [n, count] of groups -> [n] values."""
    everything = float(statistic(np.arange(count)[None, :])[0])
    if count < 2:
        return Interval(everything, None, None)
    drawn = np.random.default_rng(0).integers(0, count, (RESAMPLES, count))
    low, high = np.quantile(statistic(drawn), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(everything, float(low), float(high))


def _totals(samples: Sequence[Sample], groups: Sequence[str], *names: str) -> list[np.ndarray]:
    """Sums over the repeats, [groups] each."""
    place = {group: index for index, group in enumerate(groups)}
    sums = [np.zeros(len(groups)) for _ in names]
    for sample in samples:
        for total, name in zip(sums, names, strict=True):
            total[place[sample.group]] += getattr(sample, name)
    return sums


def rate(samples: Sequence[Sample], tokens: str = "tokens", seconds: str = "seconds") -> Interval:
    """Tokens a second."""
    groups = list(dict.fromkeys(sample.group for sample in samples))
    count, time = _totals(samples, groups, tokens, seconds)
    return bootstrap(lambda drawn: count[drawn].sum(axis=1) / np.maximum(time[drawn].sum(axis=1), 1e-9), len(groups))


def speed_up(ours: Sequence[Sample], theirs: Sequence[Sample]) -> Interval:
    """Tokens a second over the baseline's, by pairs of groups."""
    groups = list(dict.fromkeys(sample.group for sample in ours))
    (count, time), (other, other_time) = (_totals(each, groups, "tokens", "seconds") for each in (ours, theirs))

    def ratio(drawn: np.ndarray) -> np.ndarray:
        mine = count[drawn].sum(axis=1) / time[drawn].sum(axis=1)
        return mine / (other[drawn].sum(axis=1) / other_time[drawn].sum(axis=1))

    return bootstrap(ratio, len(groups))


def total(counts: Sequence[int | None]) -> int | None:
    """The sum; None if one of them is not known."""
    return None if None in counts else sum(filter(None, counts))


def add_histograms(histograms: Iterable[Sequence[int]]) -> list[int]:
    total: list[int] = []
    for histogram in histograms:
        total += [0] * (len(histogram) - len(total))
        for depth, count in enumerate(histogram):
            total[depth] += count
    while len(total) > 1 and not total[-1]:
        total.pop()
    return total


def accept_length(histogram: Sequence[int]) -> float:
    """Emitted tokens a verification, the bonus token included; 1 where none was needed."""
    forwards = sum(histogram)
    return sum(count * (drafts + 1) for drafts, count in enumerate(histogram)) / forwards if forwards else 1.0


def by_depth(histogram: Sequence[int]) -> list[float]:
    """At depth d (from 1) the share of steps that accepted d drafts, of those that accepted d - 1."""
    reached = [sum(histogram[depth:]) for depth in range(len(histogram))]
    return [round(deeper / before, 4) for before, deeper in pairwise(reached) if before]


def row(
    samples: Sequence[Sample], baseline: Sequence[Sample], *, where: dict[str, Any], phases: dict[str, float] | None
) -> dict[str, Any]:
    """One row of the table. `where`: its set, temperature, batch size and method. `baseline`: the baseline's runs of
    the same groups. `phases`: milliseconds of drafting, verifying and committing in a step."""
    histogram = add_histograms(sample.histogram for sample in samples)
    steps, drafted = sum(histogram), total([sample.drafted_steps for sample in samples])
    texts = {"equal": 0, "near tie": 0, "different": 0, "other prompt": 0}
    for sample in samples:
        for verdict, count in sample.texts.items():
            texts[verdict] += count
    return where | {
        "conversations": sum({sample.group: sample.conversations for sample in samples}.values()),
        "repeats": len({sample.repeat for sample in samples}),
        "tokens": sum(sample.tokens for sample in samples),
        "seconds": round(sum(sample.seconds for sample in samples), 3),
        "tokens_per_second": rate(samples).as_dict(),
        "decode_tokens_per_second": rate(samples, "decode_tokens", "decode_seconds").as_dict(),
        "speed_up": speed_up(samples, baseline).as_dict(),
        "accept_length": round(accept_length(histogram), 4),
        "acceptance_by_depth": by_depth(histogram),
        "histogram": histogram,
        "verify_steps": steps,
        "drafted_steps": drafted,
        "phase_ms": phases,
        "texts": texts,
    }


def curve(samples: Sequence[Sample], points: Sequence[int]) -> list[tuple[int, float]]:
    """(tokens, mean seconds until so many were there) over turns; a point that fewer than half of the turns reach ends
    it."""
    turns = [one for sample in samples for one in _turns(sample.curve)]
    found: list[tuple[int, float]] = []
    for count in points:
        times = [time for turn in turns if (time := _time_of(turn, count)) is not None]
        if 2 * len(times) < len(turns) or not times:
            break
        found.append((count, float(np.mean(times))))
    return found


def _turns(flat: list[list[float | int]]) -> list[list[list[float | int]]]:
    """A curve's turns: tokens grow within each."""
    turns: list[list[list[float | int]]] = []
    for point in flat:
        if not turns or point[0] <= turns[-1][-1][0]:
            turns.append([])
        turns[-1].append(point)
    return turns


def _time_of(turn: list[list[float | int]], count: int) -> float | None:
    return next((seconds for tokens, seconds in turn if tokens >= count), None)


def undrafted(reasons: Mapping[tuple[str, int], str], rows: Iterable[dict[str, Any]]) -> list[str]:
    """Sentences on methods that did not draft in each of their steps. `reasons`: by method and batch size."""
    partly = {
        (row["method"], row["batch"])
        for row in rows
        if row["drafted_steps"] is not None and row["drafted_steps"] < row["verify_steps"]
    }
    return [
        f"{method}, batch size {batch}: {reason}"
        for (method, batch), reason in reasons.items()
        if reason and (method, batch) in partly
    ]
