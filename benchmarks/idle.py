"""How long the device has nothing to do in a step, beside the host's work, from a trace of a server's.

    specjax serve --profile FOLDER ...      # then requests: the first 100 steps are traced
    python benchmarks/idle.py FOLDER

A step is the time from the start of one iteration of the engine to that of the next. Medians in milliseconds:

    step      that time                       device    when at least one of its kernels ran
    engine    the engine's own work           idle      when none did; its share of all steps together
    server    what the server's engine thread does after it: metrics, stream deltas
    wait      for the output of the step before

Iterations without a decoding step beside them, those around a prefill and those that waited for a request are left out
where they are told by more than three times the median. A CPU's device is XLA's threads. The last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import json
from bisect import bisect_left
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from timing import Event, Trace

FAR = 3.0  # medians: a longer step is not one of many alike


def joined(events: list[Event]) -> list[tuple[float, float]]:
    """The time in which at least one of these runs, as disjoint intervals in order."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def within(intervals: list[tuple[float, float]], begin: float, end: float) -> float:
    """How much of the time between `begin` and `end` they cover."""
    first = max(bisect_left(intervals, (begin,)) - 1, 0)
    covered = 0.0
    for start, stop in intervals[first:]:
        if start >= end:
            break
        covered += max(0.0, min(stop, end) - max(start, begin))
    return covered


def idle(trace: Trace) -> dict[str, Any]:
    """Medians in milliseconds, and the idle share."""
    steps = sorted((event for event in trace.events if event["name"] == "step"), key=lambda event: event["ts"])
    waits = joined([event for event in trace.events if event["name"] == "wait"])
    busy = joined(trace.device())
    rows = []
    for step, following in pairwise(steps):
        begin, end, after = step["ts"], step["ts"] + step["dur"], following["ts"]
        waited, worked = within(waits, begin, end), within(busy, begin, after)
        rows.append(
            {
                "step": after - begin,
                "device": worked,
                "idle": after - begin - worked,
                "engine": end - begin - waited,
                "server": after - end,
                "wait": waited,
            }
        )
    if not rows:
        raise ValueError(f"{trace.file} has {len(steps)} steps; two are needed")
    most = FAR * median(row["step"] for row in rows)
    kept = [row for row in rows if row["step"] <= most]
    found = {name: round(median(row[name] for row in kept) / 1e3, 4) for name in kept[0]}
    share = sum(row["idle"] for row in kept) / sum(row["step"] for row in kept)
    return {"steps": len(kept), "left_out": len(rows) - len(kept), **found, "idle_share": round(share, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of traces; the newest is read")
    trace = Trace(parser.parse_args().folder)
    found = idle(trace)
    print(f"{trace.file}: {found['steps']} steps, {found['left_out']} left out; a {'GPU' if trace.on_gpu else 'CPU'}")
    for name in ("step", "device", "idle", "engine", "server", "wait"):
        print(f"{name:8} {found[name]:9.3f} ms")
    print(f"idle in {found['idle_share']:.1%} of the time")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
