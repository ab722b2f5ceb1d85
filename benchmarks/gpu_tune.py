"""Measures on an NVIDIA GPU what the tables of `specjax_kernels` and the estimates of `specjax.costs` should hold.

    export PYTHONPATH=.:kernels
    python benchmarks/gpu_tune.py [products blocks graphs steps] [--minutes 30] [--save DIR] [--write]

| section | measures |
|---|---|
| products | each product of Llama-3.1-8B and Qwen3-8B for 1 to 24 rows, as a share of a copy's speed |
| blocks   | block sizes of the attention kernel, by head width and query rows |
| graphs   | a plain step and a chain with graph nodes side by side (CONCURRENT) and in series (SERIALIZE) |
| steps    | plain steps and steps with drafts by batch bucket, beside the ratio that `specjax.costs` estimates |

Writes one JSON file to `--save`, after each measurement. `--write` puts the block sizes that are faster than the rule
of thumb into `kernels/specjax_kernels/launch_table.json`, which ships. `--tiny` runs everything with small shapes on
any device; its times are meaningless, and it writes no table.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
from gpu_check import OPTIONS, Report, needs_gpu, options, products, say, steps
from gpu_steps import CHAIN, WIDE_TREE, Model
from model_shapes import llama_8b, qwen3_8b
from records import command, machine
from specjax_kernels import launch
from specjax_kernels.launch import Blocks
from specjax_kernels.platforms import generation
from specjax_kernels.specs import Spec
from timing import copy_bandwidth, interleaved, rotating

from kernels import chain, copied_inputs, enough_layers, enough_sets
from specjax import gpu
from specjax.costs import estimated_ratio

ROWS = range(1, 25)
MIN_GAIN = 0.02  # share of the rule of thumb's time that other blocks must save to get into the table
COSTLY = 1.03  # a product whose time exceeds that of more rows by this factor should be padded to these


# Products.


def product_rows(report: Report) -> None:
    """Products of few rows, and numbers of rows that cost more than a larger number, such as 5 more than 8."""
    for shape in (llama_8b, qwen3_8b):
        say(f"\n{shape.__name__}")
        first = len(report.rows)
        products(report, shape, ROWS)
        times: dict[str, dict[int, float]] = {}
        for row in report.rows[first:]:
            row["model"] = shape.__name__
            times.setdefault(row["shape"], {})[row["rows"]] = row["microseconds"]
        for name, taken in times.items():
            report.add("padding", model=shape.__name__, shape=name, rows=better_padded(taken))


def better_padded(microseconds: dict[int, float]) -> dict[int, int]:
    """Numbers of rows that take longer than a larger number -> the fastest larger number."""
    padded = {}
    for rows, taken in microseconds.items():
        more = {other: time for other, time in microseconds.items() if other > rows}
        best = min(more, key=more.__getitem__, default=rows)
        if best != rows and taken > COSTLY * more[best]:
            padded[rows] = best
    return padded


# Block sizes of attention.

HEADS = {"llama-3.1-8b": (32, 8, 128)}  # H, K, E
QUERIES = (1, 4, 8, 16, 32, 64)  # new tokens of a request
CONTEXT = 4096  # committed tokens
CHANGES: tuple[tuple[dict[str, int], ...], ...] = (
    tuple({"rows": rows, "warps": warps} for rows in (16, 32, 64) for warps in (4, 8)),
    tuple({"tokens": tokens, "stages": stages} for tokens in (32, 64, 128) for stages in (2, 3, 4)),
    tuple({"programs": programs} for programs in (2, 4, 8)),
)
"""Each is tried alone: these fields depend on each other only within a line."""


def candidates(usual: Blocks, rows: int) -> list[Blocks]:
    """The rule of thumb's blocks, and others for `rows` query rows."""
    most = max(16, launch.power_of_two(rows))
    changed = [dataclasses.replace(usual, **change) for change in itertools.chain(*CHANGES)]
    return list(dict.fromkeys([usual, *(blocks for blocks in changed if blocks.rows <= most)]))


def blocks(report: Report) -> None:
    """Times the attention kernel with other block sizes."""
    device, bandwidth = generation() or "", copy_bandwidth(16 if report.tiny else None)
    for (name, (H, K, E)), new in itertools.product(HEADS.items(), QUERIES[:1] if report.tiny else QUERIES):
        prefix, rows = 40 if report.tiny else CONTEXT, new * H // K
        spec = Spec(f"{name}-{new}", (prefix,), N=new, C=new, H=H, K=K, E=E, T=-(-prefix // 16), dtype="bfloat16")
        usual = launch.rule_of_thumb(spec.dtype, E, rows, device)
        key = launch.key(spec.dtype, E, rows)
        times: dict[Blocks, float] = {}
        for tried in candidates(usual, rows)[: 2 if report.tiny else None]:
            if not report.in_time(f"{key}, {tried}"):
                return
            try:
                times[tried] = attention_seconds(spec, tried, device, tiny=report.tiny)
            except Exception as error:  # too much shared memory, or too many registers: any type of the compiler
                report.add("refused", key=key, blocks=vars(tried), error=str(error).partition("\n")[0][:200])
        best = min(times, key=times.__getitem__, default=usual)
        if usual not in times:
            report.check(False, f"{key}: the rule of thumb's {usual} did not run")
            continue
        gain = 1 - times[best] / times[usual]
        share = spec.bytes_read / times[best] / bandwidth
        say(f"{key:36} {1e6 * times[best]:8.2f} us, {share:6.1%} of a copy, {gain:5.1%} faster: {best}")
        report.add("blocks", key=key, generation=device, blocks=vars(best), gain=round(gain, 4),
                   usual=vars(usual), microseconds={str([*vars(b).values()]): 1e6 * t for b, t in times.items()},
                   share_of_copy=round(share, 4))  # fmt: skip


def attention_seconds(spec: Spec, tried: Blocks, device: str, *, tiny: bool) -> float:
    """Median seconds of one call with these blocks."""
    layers = 1 if tiny else enough_layers(spec)
    arguments, keywords = spec.arguments()
    entry = {device: {launch.key(spec.dtype, spec.E, spec.N * spec.H // spec.K): tried}}
    saved, launch.table = launch.table, lambda: entry  # read when the program is traced
    try:
        inputs = copied_inputs(arguments, layers, 1 if tiny else enough_sets(spec, layers))
        call = rotating(chain("pallas", keywords), inputs)
        (taken,) = interleaved({"": call}, runs=1 if tiny else 5, region_seconds=0.01).values()
    finally:
        launch.table = saved
    return statistics.median(sample.total for sample in taken) / layers


def write_table(rows: Iterable[dict[str, Any]], file: Path) -> int:
    """Puts the faster block sizes into the table. Returns their number."""
    entries, count = json.loads(file.read_text()), 0
    for row in rows:
        if row["kind"] == "blocks" and row["gain"] >= MIN_GAIN and row["generation"]:
            entries.setdefault(row["generation"], {})[row["key"]] = row["blocks"]
            count += 1
    file.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
    return count


# Steps.


def bucket_steps(report: Report) -> None:
    """(plain, tree) steps by batch bucket, and the ratios that `specjax.costs` estimates for them."""
    steps(report, llama_8b, (1, 8, 32, 64, 4, 16, 48, 2, 24), [CHAIN, WIDE_TREE])  # time may run out
    gc.collect()  # frees its weights
    model, device = Model(llama_8b, tiny=report.tiny), gpu.named(jax.devices()[0].device_kind)
    for case in (CHAIN, WIDE_TREE):
        params = model.params._replace(draft=model.head(case.algorithm)[1])
        for row in report.rows:
            if row["kind"] == "step" and row["tree"] == case.tree:
                ratio = estimated_ratio(row["batch"], model.target, model.speculation(case), params, device)
                row["estimated_ratio"] = round(ratio, 4)
                say(f"batch {row['batch']:2} {case!s:10} {row['ratio_to_plain']:.3f} of plain, estimated {ratio:.3f}")
    report.write()


SERIES = {name: OPTIONS[name] for name in ("default", "serial graph nodes")}
SECTIONS: dict[str, Callable[[Report], None]] = {
    "products": product_rows, "blocks": blocks, "graphs": partial(options, changes=SERIES), "steps": bucket_steps,
}  # fmt: skip


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("sections", nargs="*", metavar="SECTION", help=f"out of {', '.join(SECTIONS)}; default: all")
    flags.add_argument("--minutes", type=float, default=30.0, help="time limit of all sections (default: %(default)s)")
    flags.add_argument("--tiny", action="store_true", help="small shapes, on any device")
    flags.add_argument("--save", type=Path, default=Path(), metavar="DIR", help="folder of the results (default: .)")
    flags.add_argument("--write", action="store_true", help="write the launch table that ships")
    arguments = flags.parse_args()
    if unknown := set(arguments.sections) - set(SECTIONS):
        flags.error(f"unknown section {', '.join(sorted(unknown))}: out of {', '.join(SECTIONS)}")
    if arguments.write and arguments.tiny:
        flags.error("--write with --tiny: its times are meaningless")
    if not arguments.tiny:
        needs_gpu()
    head = machine("jaxlib") | {"command": command(), "tiny": arguments.tiny}
    file = arguments.save / f"gpu-tune-{'-'.join(head['device'].lower().split())}-{head['date'][:10]}.json"
    arguments.save.mkdir(parents=True, exist_ok=True)
    settings = argparse.Namespace(tiny=arguments.tiny, model=None, output=file, seconds=60 * arguments.minutes)
    report = Report("tune", settings)
    report.machine = head
    for section in arguments.sections or SECTIONS:
        say(f"\n{section}")
        with report.attempt(section):
            SECTIONS[section](report)
    report.done = True
    report.write()
    say(f"\nwrote {file}")
    if arguments.write:
        say(f"{write_table(report.rows, launch.TABLE)} entries of {launch.TABLE}")
    return 1 if report.errors else 0


if __name__ == "__main__":
    sys.exit(main())
