"""`--dry-run`: what a model would need on a device and at best reach there, and what to change if it does not fit.

Reads configs and tensors' headers. Prints a report whose last line is the verdict, or with `--json` one line of JSON
alone. `specjax.hardware.plan` computes memory and bounds.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import jax

from specjax.checkpoint import CheckpointError, check_tokenizer_paths
from specjax.cli import build, flags
from specjax.devices import DEVICES, SHARE_VARIABLES, Memory, given_share, this_device
from specjax.drafters import NoDraft
from specjax.engine.notes import speculation_table
from specjax.hardware.outline import Outline, outline
from specjax.hardware.plan import CONTEXT, Case, Plan, cannot_split, make_plan
from specjax.hardware.remedies import Outlines, Remedy, remedies
from specjax.limits import Range, check_value
from specjax.settings import Parser, dashed

FITS, DOES_NOT_FIT, WRONG = 0, 1, 2
"""Exit statuses."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Actions, which have no keys in a file."""
    about = "What the model would need, from its configs and tensors' headers alone; status 1 if it does not fit."
    group = parser.add_argument_group("dry run", about)
    group.add_argument("--dry-run", action="store_true", help="print memory, buckets and bounds of the speed, and end")
    group.add_argument("--json", action="store_true", help="print the plan as one line of JSON, and no report")
    names = ", ".join(DEVICES)
    group.add_argument(
        "--assume-device", type=str.upper, metavar="NAME", help=f"compute for one of {names}; default: this machine's"
    )
    group.add_argument("--assume-devices", type=int, metavar="N", help="split over so many of them; default: --tp")


def check_flags(parser: Parser, args: argparse.Namespace) -> None:
    """Ends the command if the flags of a dry run are wrong, or given without one."""
    if args.json and not args.dry_run:
        parser.exit(WRONG, f"{parser.prog}: error: --json is for --dry-run; the server prints no JSON\n")
    limits = {"assume_device": (str, Range(), tuple(DEVICES)), "assume_devices": (int, Range(minimum=1), ())}
    for name, (kind, bounds, choices) in limits.items():
        flag, value = f"--{dashed(name)}", getattr(args, name)
        try:
            check_value(value, kind | None, bounds, choices)
        except ValueError as error:
            parser.exit(WRONG, f"{parser.prog}: error: {flag} must be {error}, got {value!r}\n")
        if value is not None and not args.dry_run:
            advice = "is for --dry-run; the server runs on the device that is here"
            parser.exit(WRONG, f"{parser.prog}: error: {flag} {value} {advice}\n")


def dry_run(settings: flags.Settings, device: str | None, devices: int, *, as_json: bool = False) -> int:
    """Prints the plan; returns the exit status. `device`: a key of `DEVICES`; None: this process's."""
    if device is not None:
        jax.config.update("jax_platforms", "cpu")  # a GPU that is here stays free
    try:
        arguments = build.engine_arguments(settings, trace=settings.server.trace_trees)
        with flags.named_as_flags(settings):
            case, outlines = _case(settings, arguments, device, devices)
            plan = make_plan(case)
            found = remedies(case, outlines) if plan.problems else []
    except (CheckpointError, ValueError, NotImplementedError, OSError) as error:
        print(f"specjax serve: {error}", file=sys.stderr)
        return WRONG
    if as_json:
        print(json.dumps(document(settings, case, plan, found)))
    else:
        print(*_report(settings, case, plan, found), sep="\n")
    return DOES_NOT_FIT if plan.problems else FITS


def _case(
    settings: flags.Settings, arguments: dict[str, Any], device: str | None, devices: int
) -> tuple[Case, Outlines]:
    share = given_share()
    if device is None:
        build.claim_gpu(settings)
    platform = "gpu" if device or jax.default_backend() != "cpu" else "cpu"
    model, revision = arguments["model"], arguments["revision"]

    @functools.cache
    def outlines(dtype: str | None, drafts: bool) -> Outline:
        draft = arguments["draft"] if drafts else NoDraft()
        given = {"dtype": dtype or arguments["dtype"], "quantization": arguments["quantization"]}
        return outline(model, draft=draft, **given, revision=revision, platform=platform)

    asked = outlines(None, True)
    check_tokenizer_paths(arguments["tokenizer_path"], arguments["chat_template"])
    bounds = DEVICES[device] if device else this_device(asked.target.config.dtype)
    replicas = settings.server.data_parallel_size
    return Case(asked, arguments["config"], bounds, platform, devices, share, replicas), outlines


# Text, of at most 80 columns.


def _report(settings: flags.Settings, case: Case, plan: Plan, found: list[Remedy]) -> Iterator[str]:
    device, model = case.device, case.outline.target.config
    source = "its tensors' headers" if case.outline.headers else "config.json alone"
    count = f"{case.devices} devices, figures of each" if case.devices > 1 else "1 device"
    yield from _fact(
        "model",
        f"{settings.model.model}: {model.family}, {model.num_layers} layers, {model.dtype}, "
        f"context {plan.context_length}; from {source}",
    )
    for name, text in speculation_table(case.outline.drafter, plan.buckets).items():
        yield from _fact(name, flags.in_flags(text))
    yield from _fact(
        "device",
        f"{device.name}, {count}: {_gb(device.memory)} GB at {device.bandwidth / 1e9:,.0f} GB/s, "
        f"{device.speed(model.dtype) / 1e12:.3g} TFLOP/s ({device.note})",
    )
    if (count := case.replicas) > 1:
        text = f"--dp {count}: {count} replicas on {count * case.devices} devices; all figures are of one replica"
        yield from _fact("replicas", text)
    yield ""
    yield from _memory(case, plan)
    if plan.undivided:
        whole = sum(size for name, size in plan.undivided.items() if not name.endswith("token"))
        names = ", ".join(plan.undivided)
        yield from _fact("whole", f"not divided, so {_gb(whole)} GB of weights lie on each device: {names}")
    groups = case.config.expert_parallel
    if case.devices > 1 and not any(cannot_split(case.outline, case.devices, groups)):
        spread = f" --ep {groups}" if groups > 1 else ""
        yield from _fact("note", f"--tp {case.devices}{spread} serves it so")
    longest = plan.context_length
    if 0 < plan.tokens < longest:
        yield from _fact("note", f"the pool holds no request of the whole context, {longest} tokens")
    yield ""
    buckets = plan.buckets
    sizes = {"requests a step": buckets.batches, "tokens of a prompt's chunk": buckets.chunks, "pages": buckets.tables}
    yield from _fact("buckets", "; ".join(f"{name} {', '.join(map(str, each))}" for name, each in sizes.items()))
    yield ""
    yield from _speeds(case, plan)
    yield ""
    yield from _verdict(case, plan, found)


def _memory(case: Case, plan: Plan) -> Iterator[str]:
    pages = f"{plan.tokens} tokens in pages of {case.config.page_size}, {plan.token_bytes:,} B each"
    rows = [
        ("weights", plan.weights, ""),
        ("draft's weights", plan.draft_weights, ""),
        ("pool, target", plan.pool, pages if plan.tokens else "no room"),
        ("pool, draft", plan.draft_pool, f"{plan.draft_token_bytes:,} B a token"),
        ("rows of requests", plan.rows, f"{case.config.max_running_requests} rows; the drafter's memory"),
        ("temporaries", plan.temporaries, "an estimate from shapes"),
        ("together", plan.total, f"of {_gb(case.limit)} GB"),
    ]
    yield f"{'memory':18}{'GB':>9}"
    yield from (f"{name:18}{_gb(size):>9}  {note}".rstrip() for name, size, note in rows)
    fraction = case.config.mem_fraction
    if case.platform == "cpu":
        text = f"{fraction:.0%} of the machine's {_gb(case.device.memory)} GB (--mem-fraction-static)"
        text += f", over {case.replicas} replicas" * (case.replicas > 1)
    else:
        memory = Memory(case.device.memory, case.limit, 0)
        share = "" if case.share is None else f" ({' or '.join(SHARE_VARIABLES)} in the environment)"
        text = (
            f"{fraction:.0%} of the device (--mem-fraction-static) is for weights and pool: "
            f"{_gb(memory.budget(fraction))} GB; jax takes {case.limit / case.device.memory:.0%}{share}, "
            f"{_gb(case.limit)} GB"
        )
    yield from _fact("limit", text)


def _speeds(case: Case, plan: Plan) -> Iterator[str]:
    reads, context = plan.reads, min(CONTEXT, plan.context_length)
    text = f"a forward reads {_gb(reads.forward)} GB of weights and the pages of {context} tokens a request"
    if reads.level:
        depth = case.outline.drafter.depth
        text += f"; a draft {depth} levels of {_gb(reads.level)} GB" + (
            f" and {_gb(reads.once)} GB" if reads.once else ""
        )
    yield from _fact("bounds", f"{text}. Launches, attention's products and exchange between devices cost more")
    yield "requests  plain tok/s  plain ms  tree   + draft  + verify  accept to break even"
    for speed in plan.speeds:
        line = f"{speed.batch:8} {speed.batch / speed.plain:12,.1f} {1e3 * speed.plain:9.3f}"
        if speed.nodes > 1:
            more = 1e3 * (speed.verify - speed.plain)
            line += f" {speed.nodes:5} {1e3 * speed.draft:9.3f} {more:9.3f}  {speed.break_even:.2f}"
        yield line
    if (first := plan.speeds[0]).nodes > 1:
        lengths = _accept_lengths(case.outline.drafter.depth)
        rates = ", ".join(f"{length:g}: {first.rate(length):,.1f}" for length in lengths)
        yield from _fact("tree", f"at most tokens/s of {first.batch} request by accept length: {rates}")


def _accept_lengths(depth: int) -> list[float]:
    return [length for length in (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0) if length <= depth + 1]


def _verdict(case: Case, plan: Plan, found: list[Remedy]) -> Iterator[str]:
    if not plan.problems:
        yield f"fits: {_gb(case.limit - plan.total)} GB are left"
        return
    for problem in plan.problems:
        yield from _fact("why", flags.in_flags(problem))
    for remedy in found:
        text = f"{flags.in_flags(remedy.change)}: {_gb(remedy.plan.total)} of {_gb(remedy.case.limit)} GB, "
        text += f"{remedy.plan.tokens} tokens"
        yield from _fact("change", text)
    if not found:
        yield from _fact("change", "no flag and no device of the table is enough; a smaller model is needed")
    yield "does not fit"


def _fact(name: str, text: str) -> Iterator[str]:
    lines = textwrap.wrap(text, 69, break_long_words=False, break_on_hyphens=False)
    yield from (f"{name if index == 0 else '':9}  {line}" for index, line in enumerate(lines))


def _gb(size: float | int) -> str:
    return f"{size / 1e9:.2f}" if size >= 1e7 or not size else f"{size / 1e9:.4f}"


# JSON.


def document(settings: flags.Settings, case: Case, plan: Plan, found: list[Remedy]) -> dict[str, Any]:
    """The plan as JSON: bytes, seconds and tokens a second; memory is of each device."""
    buckets, drafter, model = plan.buckets, case.outline.drafter, case.outline.target.config
    return {
        "model": settings.model.model,
        "dtype": model.dtype,
        "headers": case.outline.headers,
        "device": case.device._asdict(),
        "devices": case.devices,
        "expert_parallel": case.config.expert_parallel,
        "replicas": case.replicas,
        "fits": not plan.problems,
        "problems": [flags.in_flags(problem) for problem in plan.problems],
        "memory": {
            "weights": plan.weights,
            "draft_weights": plan.draft_weights,
            "pool": plan.pool,
            "draft_pool": plan.draft_pool,
            "rows": plan.rows,
            "temporaries": plan.temporaries,
            "total": plan.total,
            "limit": case.limit,
            "undivided": plan.undivided,
        },
        "pool_tokens": plan.tokens,
        "page_size": case.config.page_size,
        "context_length": plan.context_length,
        "buckets": {"batches": buckets.batches, "chunks": buckets.chunks, "tables": buckets.tables},
        "drafter": {"name": drafter.name, "nodes": drafter.width, "levels": drafter.depth},
        "reads": plan.reads._asdict(),
        "speeds": [
            speed._asdict() | {"plain_tokens_per_second": speed.batch / speed.plain, "break_even": speed.break_even}
            for speed in plan.speeds
        ],
        "changes": [flags.in_flags(remedy.change) for remedy in found],
    }
