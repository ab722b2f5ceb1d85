"""`specjax bench`: runs methods on sets of prompts and writes a table; the same command resumes a stopped run."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax import settings
from specjax.bench import results
from specjax.bench.methods import Source, check_available, parse_methods
from specjax.bench.provenance import code_digest, commit, file_stamps, machine, processor
from specjax.bench.run import Experiment, Log, Plan
from specjax.bench.sets import DATA, read_sets, set_names
from specjax.checkpoint.files import write_text
from specjax.cli import build, flags, run_command
from specjax.settings import setting


@dataclass(frozen=True)
class BenchSettings:
    """Methods, prompts and runs."""

    methods: tuple[str, ...] = setting(
        ("none", "NGRAM", "AUTO"),
        "ALGORITHM[:option=value,...], module:function; name=... is the name in tables, "
        "adaptive=off drafts alike in every step",
        metavar="METHOD",
    )  # fmt: skip
    sets: tuple[str, ...] = setting(
        ("mt_bench", "gsm8k", "humaneval"),
        f"sets of prompts: {', '.join(set_names())}; spec_bench is its six categories, spec_bench/rag one; "
        "JSONL files; with --data, SPEED-Bench's splits by category: qualitative, throughput_1k, qualitative/coding",
        metavar="SET",
    )
    data: str | None = setting(
        None, "folder of SET.jsonl files, such as SPEED-Bench's; default: the sets that ship with specjax",
        metavar="FOLDER",
    )  # fmt: skip
    limit: int = setting(0, "conversations of each set, evenly spaced; 0 = all", minimum=0)
    turns: int = setting(0, "turns of each conversation; answers are part of the next prompt; 0 = all", minimum=0)
    temperatures: tuple[str, ...] = setting(("0",), "0 = greedy", metavar="T", digits=True)
    batch_sizes: tuple[str, ...] = setting(("1",), "conversations at once", metavar="N", digits=True)
    max_new_tokens: int = setting(128, "maximum tokens of an answer", minimum=2)
    ignore_eos: bool = setting(False, "continue after the model's end token: all answers have the same length")
    repeats: int = setting(1, "runs of everything; more runs narrow the intervals", minimum=1)
    seed: int = setting(0, "seed of requests that sample", minimum=0)
    baseline: str | None = setting(None, "method that the others are compared with; default: the first")
    output: str = setting("runs/bench", "folder of the log, tables and pictures", metavar="FOLDER")
    trees: bool = setting(
        False, "keep the draft trees in trees/*.jsonl for `specjax viz --trees`; takes a few percent of the speed"
    )
    latex: bool = setting(False, "also write table.tex, a table for papers with booktabs; needs pandas")
    plots: str = setting(
        "auto", "pictures: auto = svg if matplotlib is installed, none", choices=("auto", "none", *results.PICTURES)
    )


@dataclass(frozen=True)
class Settings(flags.Settings):
    """The server's tables and [bench]."""

    bench: BenchSettings = BenchSettings()


QUICK = BenchSettings(("none", "NGRAM", "EAGLE3"), limit=2, max_new_tokens=64, repeats=2,
                      output="runs/bench-quick")  # fmt: skip
"""Defaults of `--quick`: a table within three minutes on 2 cores."""


def build_parser(defaults: Settings) -> settings.Parser:
    parser = settings.Parser(prog="specjax bench", description="Compare ways of decoding on sets of prompts.")
    add = parser.add_argument_group("run").add_argument
    add("--quick", action="store_true", help="a small comparison: other defaults of the flags below")
    add("--no-progress", action="store_true", help="no progress bars")
    settings.add_flags(parser, defaults, ("bench", "model"))
    return parser


def numbers(name: str, texts: tuple[str, ...], kind: type, minimum: int) -> Any:
    """The numbers of a list. Raises ValueError, which names the flag."""
    try:
        values = tuple(map(kind, texts))
    except ValueError:
        raise ValueError(f"--{name} must be numbers, got {' '.join(texts)!r}") from None
    if wrong := [value for value in values if not minimum <= value < float("inf")]:
        raise ValueError(f"--{name} must be at least {minimum}, got {wrong[0]}")
    if not values or len(set(values)) < len(values):
        raise ValueError(f"--{name} must be different numbers, at least one, got {' '.join(texts) or 'none'}")
    return values


def make_plan(bench: BenchSettings) -> Plan:
    """The plan of the settings. Raises ValueError for errors that need no model."""
    if not bench.methods or not bench.sets:
        raise ValueError("--methods and --sets: both need at least one name")
    methods = parse_methods(bench.methods)
    check_available(methods)
    by_name = {method.name: method for method in methods}
    baseline = bench.baseline or methods[0].name
    baseline = {method.text: method.name for method in methods}.get(baseline, baseline)
    if baseline not in by_name:
        raise ValueError(f"--baseline {baseline} is none of the methods: {', '.join(by_name)}")
    temperatures = numbers("temperatures", bench.temperatures, float, 0)
    batches = numbers("batch-sizes", bench.batch_sizes, int, 1)
    data = DATA if bench.data is None else Path(bench.data)
    sets = read_sets(bench.sets, data=data, limit=bench.limit, turns=bench.turns)
    return Plan(
        tuple(methods), tuple(sets), temperatures, batches, baseline, bench.max_new_tokens, bench.repeats, bench.seed,
        bench.ignore_eos, bench.trees,
    )  # fmt: skip


def surroundings(models: Iterable[str | None], modules: Iterable[str] = ()) -> dict[str, Any]:
    """Commit, code, processor and files of local models, on which measurements depend besides the settings."""
    files = {name: stamps for name in filter(None, models) if (stamps := file_stamps(name))}
    return {"commit": commit(), "code": code_digest(modules), "processor": processor(), "files": files}


def identity(plan: Plan, chosen: Settings) -> dict[str, Any]:
    """Properties that all measurements of a folder share. The number of repeats may grow."""
    modules = [name.partition(":")[0] for method in plan.methods for name in (method.drafter, method.verifier) if name]
    shared = {name: value for name, value in vars(plan).items() if name != "repeats"}
    shared["methods"] = [method.text for method in plan.methods]
    shared["sets"] = {prompts.name: prompts.digest for prompts in plan.sets}
    models = [chosen.model.model, *(method.draft_path for method in plan.methods)]
    return {**surroundings(models, modules), "model": dict(vars(chosen.model)), **shared}


def compare(
    chosen: Settings, *, progress: bool, plan: Plan | None = None, source: Source | None = None
) -> dict[str, Any]:
    """Measures, prints and writes. Returns the command's summary. `plan`, `source`: by default those of the settings;
    others may have methods that are not ours."""
    started = time.perf_counter()
    if chosen.bench.latex and importlib.util.find_spec("pandas") is None:
        raise ValueError(f"--latex needs pandas, which is not installed: {results.INSTALL}")
    plan, picture = plan or make_plan(chosen.bench), results.picture_format(chosen.bench.plots)
    build.claim_gpu(chosen)
    folder = Path(chosen.bench.output)
    log = Log(folder, identity(plan, chosen))
    head = machine("jaxlib", "flax")
    source = source or Source(dict(vars(chosen.model)), progress=progress)
    experiment = Experiment(plan, source, log, folder / "trees", progress=progress)
    for name, ids in experiment.left_out.items():
        print(f"{name}: {len(ids)} conversations are left out, which exceed the model's context", file=sys.stderr)
    experiment.run()
    rows = experiment.rows()
    document = head | identity(plan, chosen) | {
        "repeats": plan.repeats, "left_out": experiment.left_out,
        "intervals": f"bootstrap, {results.LEVEL:.0%}, {results.RESAMPLES} resamples of groups of conversations",
        "results": rows,
    }  # fmt: skip
    write_text(folder / "results.json", json.dumps(document, indent=1) + "\n")
    write_text(folder / "table.md", results.as_markdown(rows))
    if chosen.bench.latex:
        write_text(folder / "table.tex", results.as_latex(rows))
    print(results.as_text(rows), end="")
    print(f"Intervals: 95%, bootstrap over conversations. Speed-ups are over {plan.baseline}.")
    print(f"All columns: {folder / 'table.md'}")
    pictures = [file.name for file in results.draw(folder, picture, rows)] if picture else []
    seconds = round(time.perf_counter() - started, 1)
    return {"output": str(folder), "rows": len(rows), "pictures": pictures, "seconds": seconds}


def run(name: str, chosen: flags.Settings, work: Callable[[], dict[str, Any]]) -> int:
    """Runs a command of this folder. Returns the exit status."""
    logging.basicConfig(level="WARNING", format="%(message)s", stream=sys.stderr)

    def named() -> dict[str, Any]:
        with flags.named_as_flags(chosen):
            return work()

    return run_command(name, named, interrupted="measurements are kept; the same command resumes")


def main(argv: list[str] | None = None, work: Callable[..., dict[str, Any]] = compare) -> int:
    argv = sys.argv[1:] if argv is None else argv
    defaults = Settings(bench=QUICK if "--quick" in argv else BenchSettings())
    args, chosen = settings.parse(build_parser(defaults), argv, defaults)
    return run("specjax bench", chosen, lambda: work(chosen, progress=not args.no_progress))
