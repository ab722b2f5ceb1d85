"""Reads the device's idle time and the host's work in a step from a trace of a server.

    specjax serve --profiler-port 9999 ...
    python -m jax.collect_profile --log_dir FOLDER --no_perfetto_link --python_tracer_level=0 9999 1000
    python benchmarks/idle.py FOLDER

A step lasts from the start of one iteration of the engine to the start of the next. Medians in milliseconds:

    step      duration of the step            device    time in which at least one kernel ran
    engine    the engine's own work           idle      time in which no kernel ran, and its share of all steps
    server    work of the server's engine thread after the iteration: metrics, stream deltas
    wait      wait for the output of the step before

Steps longer than three medians, such as prefills, are left out. On a CPU the device is XLA's threads. The last line is
one JSON document.
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

MAX_STEP_RATIO = 3.0  # longest step that counts, in medians


def joined(events: list[Event]) -> list[tuple[float, float]]:
    """The union of the events' times, as disjoint intervals in order."""
    intervals: list[tuple[float, float]] = []
    for begin, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        if intervals and begin <= intervals[-1][1]:
            intervals[-1] = intervals[-1][0], max(intervals[-1][1], end)
        else:
            intervals.append((begin, end))
    return intervals


def within(intervals: list[tuple[float, float]], begin: float, end: float) -> float:
    """Length of the intervals' part between `begin` and `end`."""
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
        row = {"step": after - begin, "device": worked, "idle": after - begin - worked}
        rows.append(row | {"engine": end - begin - waited, "server": after - end, "wait": waited})
    if not rows:
        raise ValueError(f"{trace.file} has {len(steps)} steps; two are needed")
    most = MAX_STEP_RATIO * median(row["step"] for row in rows)
    typical = [row for row in rows if row["step"] <= most]
    medians = {name: round(median(row[name] for row in typical) / 1e3, 4) for name in typical[0]}
    share = sum(row["idle"] for row in typical) / sum(row["step"] for row in typical)
    return {"steps": len(typical), "left_out": len(rows) - len(typical), **medians, "idle_share": round(share, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of traces; the newest is read")
    trace = Trace(parser.parse_args().folder)
    summary = idle(trace)
    device = "GPU" if trace.on_gpu else "CPU"
    print(f"{trace.file}: {summary['steps']} steps, {summary['left_out']} left out; a {device}")
    for name in ("step", "device", "idle", "engine", "server", "wait"):
        print(f"{name:8} {summary[name]:9.3f} ms")
    print(f"idle in {summary['idle_share']:.1%} of the time")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
