"""How times are taken: whole calls, many calls in one region, and a plain copy as the ceiling."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

WARMUP = 3
"""Calls whose time does not count: a GPU records its graphs in the first ones."""


def seconds(call: Callable[[], Any]) -> float:
    """Of one call, waited for."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


class Region(NamedTuple):
    """Seconds of one of many calls that are waited for together."""

    total: float
    dispatch: float  # until the host was free again; near `total`: the host is what is slow


def region(call: Callable[[], Any], times: int) -> Region:
    """Calls one after the other, waiting once: a GPU's calls of microseconds cannot be timed one at a time."""
    start, out = time.perf_counter(), None
    for _ in range(times):
        out = call()
    dispatched = time.perf_counter() - start
    jax.block_until_ready(out)
    return Region((time.perf_counter() - start) / times, dispatched / times)


def interleaved(calls: Mapping[str, Callable[[], Any]], *, runs: int, region_seconds: float) -> dict[str, list[Region]]:
    """`runs` regions of each, taking turns, after `WARMUP` calls and a region that do not count."""
    times = {}
    for name, call in calls.items():
        for _ in range(WARMUP):
            jax.block_until_ready(call())
        times[name] = max(1, min(200, round(region_seconds / region(call, 3).total)))
    found: dict[str, list[Region]] = {name: [] for name in calls}
    for turn in range(runs + 1):
        for name, call in calls.items():
            taken = region(call, times[name])
            if turn:
                found[name].append(taken)
    return found


def copy_bandwidth(megabytes: int | None = None) -> float:
    """Bytes moved per second (read and written, each counted) by ``x + 1`` in place on an array larger than caches
    (None: of 256 MB, and on a GPU of 4096). On a GPU, where a copy takes microseconds, ten are waited for together.
    """
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
