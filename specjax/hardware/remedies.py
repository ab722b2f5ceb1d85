"""What to change so that a model fits: flags one by one, then in pairs, each tried with the computation that found that
it does not."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import NamedTuple

from specjax.devices import DEVICES, SHARE_VARIABLES
from specjax.engine.buckets import BATCHES
from specjax.hardware.outline import Outline
from specjax.hardware.plan import Case, Plan, cannot_split, make_plan

LEAST_POOL = 1024  # tokens; a smaller pool may fit and is of little use
HIGH_FRACTION = 0.9  # of a GPU's memory, for weights and pool
MOST_DEVICES = 64
MOST_PAIRS = 3

Outlines = Callable[[str | None, bool], Outline]
"""(dtype, drafts) -> the model in that dtype, None: the one asked for, with its drafter or with none."""


class Remedy(NamedTuple):
    change: str
    case: Case
    plan: Plan


def remedies(case: Case, outlines: Outlines) -> list[Remedy]:
    """Changes after which the case fits: of one setting each; if none is enough, of two; then of the devices."""
    found = [*_fitting(chain(_numbers(case), _switches(case, outlines)))]
    if not found:
        switches = [*_switches(case, outlines)]
        pairs = (
            (f"{first} and {second}", both)
            for index, (first, changed) in enumerate(switches)
            for second, both in chain(_numbers(changed), islice(_switches(changed, outlines), index, None))
        )
        found = [*islice(_fitting(pairs), MOST_PAIRS)]
    return [*found, *islice(_fitting(_more_devices(case)), 1), *islice(_fitting(_larger_devices(case)), 1)]


def _fitting(changes: Iterator[tuple[str, Case]]) -> Iterator[Remedy]:
    for change, case in changes:
        if not (plan := make_plan(case)).problems:
            yield Remedy(change, case, plan)


def _numbers(case: Case) -> Iterator[tuple[str, Case]]:
    """Each setting that is a number, with the largest value that fits, if one does."""
    config, page = case.config, case.config.page_size
    rows, context = config.max_running_requests, config.context_length
    positions = context or case.outline.target.config.max_positions

    def number(flag: str, field: str, values: Sequence[int]) -> Iterator[tuple[str, Case]]:
        """Of ascending `values`, of which the first ones fit, if any does."""

        def changed(index: int) -> Case:
            return case._replace(config=replace(config, **{field: values[index]}))

        def fails(index: int) -> bool:
            return bool(make_plan(changed(index)).problems)

        if values and not fails(0):
            largest = bisect_left(range(1, len(values)), True, key=fails)
            yield f"{flag} {values[largest]}", changed(largest)

    least = -(-(context or min(LEAST_POOL, positions)) // page) * page
    yield from number("--max-total-tokens", "max_total_tokens", range(least, rows * positions + 1, page))
    if context:
        yield from number("--context-length", "context_length", range(page, context, page))
    fewer = tuple(batch for batch in BATCHES[case.platform] if batch < rows)
    yield from number("--max-running-requests", "max_running_requests", fewer)


def _switches(case: Case, outlines: Outlines) -> Iterator[tuple[str, Case]]:
    """Changes of settings to one value each, of those that have another."""
    outline, config = case.outline, case.config
    dtype, drafts = outline.target.config.dtype, outline.drafter.width > 1
    if dtype == "float32":
        yield "--dtype bfloat16", case._replace(outline=outlines("bfloat16", drafts))
    if drafts:
        yield "draft='NONE'", case._replace(outline=outlines(dtype, False))
    if config.mem_fraction < HIGH_FRACTION:
        changed = replace(config, mem_fraction=HIGH_FRACTION)
        yield f"--mem-fraction-static {HIGH_FRACTION}", case._replace(config=changed)
    if case.share is not None:
        yield f"unset {' and '.join(SHARE_VARIABLES)}", case._replace(share=None)


def _more_devices(case: Case) -> Iterator[tuple[str, Case]]:
    for devices in range(case.devices + 1, MOST_DEVICES + 1):
        if not any(cannot_split(case.outline, devices, case.config.expert_parallel)):
            yield f"--assume-devices {devices}", case._replace(devices=devices)


def _larger_devices(case: Case) -> Iterator[tuple[str, Case]]:
    """Of the table, the smallest first."""
    if case.device.name in DEVICES:
        for device in sorted(DEVICES.values(), key=lambda device: device.memory):
            if device.memory > case.device.memory:
                yield f"--assume-device {device.name}", case._replace(device=device)
