"""Times of calls and of regions of many calls, ceilings of memory bandwidth, and traces of `jax.profiler`."""

from __future__ import annotations

import gzip
import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

WARMUP = 3
"""Calls before the measurement: a GPU records its graphs in the first calls."""

CACHE_BYTES = 2**28
"""Bytes between two reads of one byte: several times the largest cache of a CPU or GPU."""


def seconds(call: Callable[[], Any]) -> float:
    """Seconds of one call and its result."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


class Region(NamedTuple):
    """Mean seconds of one of many calls that were dispatched in sequence."""

    total: float
    dispatch: float  # of the host; if it is close to `total`, the host is the bottleneck


def region(call: Callable[[], Any], times: int) -> Region:
    """Dispatches calls and waits once, because calls of microseconds on a GPU cannot be timed alone."""
    start, out = time.perf_counter(), None
    for _ in range(times):
        out = call()
    dispatched = time.perf_counter() - start
    jax.block_until_ready(out)
    return Region((time.perf_counter() - start) / times, dispatched / times)


def interleaved(calls: Mapping[str, Callable[[], Any]], *, runs: int, region_seconds: float) -> dict[str, list[Region]]:
    """Measures `runs` regions of each call, in turns, after `WARMUP` calls and one region."""
    times = {}
    for name, call in calls.items():
        for _ in range(WARMUP):
            jax.block_until_ready(call())
        times[name] = max(1, min(200, round(region_seconds / region(call, 3).total)))
    regions: dict[str, list[Region]] = {name: [] for name in calls}
    for turn in range(runs + 1):
        for name, call in calls.items():
            sample = region(call, times[name])
            if turn:
                regions[name].append(sample)
    return regions


def rotating(run: Callable[..., jax.Array], inputs: Sequence[tuple[Any, ...]]) -> Callable[[], jax.Array]:
    """A call of `run` that takes the next inputs each time."""
    turn = itertools.cycle(inputs)
    return lambda: run(*next(turn))


def copy_bandwidth(megabytes: int | None = None) -> float:
    """Bytes read and written per second by ``x + 1`` in place, on an array larger than caches (default: 256 MB, on a
    GPU 4096 MB). On a GPU ten copies are dispatched together, because one takes microseconds."""
    on_cpu = jax.default_backend() == "cpu"
    megabytes, steps = megabytes or (256 if on_cpu else 4096), 1 if on_cpu else 10
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = jax.random.uniform(jax.random.key(0), (megabytes * 2**18,))
    samples = []
    for _ in range(WARMUP + 7):
        start = time.perf_counter()
        for _ in range(steps):
            array = increment(array)
        array.block_until_ready()
        samples.append(time.perf_counter() - start)
    return 2 * array.nbytes * steps / statistics.median(samples[WARMUP:])


Event = dict[str, Any]


class Trace:
    """The newest trace of `jax.profiler` in a folder: its complete events, in microseconds."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.rglob("*.trace.json.gz"), key=lambda file: file.stat().st_mtime)
        if not files:
            raise FileNotFoundError(f"there is no *.trace.json.gz in {folder}")
        self.file = files[-1]
        events = json.loads(gzip.decompress(self.file.read_bytes()))["traceEvents"]
        self._processes = {
            event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"
        }
        threads = [event for event in events if event.get("name") == "thread_name"]
        self._threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in threads}
        self.on_gpu = any("GPU" in name for name in self._processes.values())
        self.events: list[Event] = [event for event in events if event.get("ph") == "X"]

    def device(self) -> list[Event]:
        """Events of the device's streams; on a CPU, of XLA's threads."""

        def of_device(event: Event) -> bool:
            process = self._processes.get(event["pid"], "")
            thread = self._threads.get((event["pid"], event["tid"]), "")
            return ("GPU" in process and "Stream" in thread) if self.on_gpu else ("XLA" in thread or "tf_" in thread)

        return [event for event in self.events if of_device(event)]
