"""`specjax bench`: methods x sets -> one table.

Each method completes each set of prompts, all in turns; printed and written for each: tokens/s, the speed-up over the
baseline of the same run, accept length, acceptance by depth, steps that drafted, time of drafting and verifying, and
whether the texts equal the baseline's. A run that was stopped goes on where it was when the same command is given.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax import settings
from specjax.bench import plots, tables
from specjax.bench.contenders import Source
from specjax.bench.experiment import Experiment, Plan, applies
from specjax.bench.log import Log
from specjax.bench.methods import Method, check_here, parse_methods
from specjax.bench.provenance import code_digest, commit, file_stamps, machine, processor
from specjax.bench.results import LEVEL, RESAMPLES
from specjax.bench.sets import DATA, known, read_sets
from specjax.checkpoint.files import write_text
from specjax.cli import build, flags, run_command
from specjax.settings import setting

TABLES = ("bench", "model")


@dataclass(frozen=True)
class BenchSettings:
    """Methods, prompts and runs."""

    methods: tuple[str, ...] = setting(
        ("none", "NGRAM", "AUTO"),
        "ALGORITHM[:option=value,...], drafter=module:function, transformers[:prompt-lookup=10 or :assisted=MODEL]; "
        "name=... is the name in tables, adaptive=on drafts only where that is measured to be faster",
        metavar="METHOD",
    )  # fmt: skip
    sets: tuple[str, ...] = setting(
        ("mt_bench", "gsm8k", "humaneval"),
        f"sets of prompts: {', '.join(known())}; spec_bench is its six categories, spec_bench/rag one; or JSONL files",
        metavar="SET",
    )
    data: str | None = setting(
        None, "folder of SET.jsonl files; default: those that come with specjax", metavar="FOLDER"
    )
    limit: int = setting(0, "conversations of each set, spread over it; 0 = all", minimum=0)
    turns: int = setting(0, "turns of each conversation; 0 = all, each answer being part of the next prompt", minimum=0)
    temperatures: tuple[str, ...] = setting(("0",), "0 = greedy", metavar="T", digits=True)
    batch_sizes: tuple[str, ...] = setting(("1",), "conversations at once", metavar="N", digits=True)
    max_new_tokens: int = setting(128, "most tokens of an answer", minimum=2)
    ignore_eos: bool = setting(False, "continue after the model's end token, so that all answers have the same length")
    repeats: int = setting(1, "times that everything is run; more runs narrow the intervals", minimum=1)
    seed: int = setting(0, "seed of requests that sample", minimum=0)
    baseline: str | None = setting(None, "name of the method that others are compared to; default: the first")
    timed: int = setting(
        1,
        "conversations of each set and method whose steps are timed part by part, in a run of their own; 0 = none",
        minimum=0,
    )
    output: str = setting("runs/bench", "folder of the log, tables and pictures", metavar="FOLDER")
    plots: str = setting(
        "auto", "pictures: auto = svg if matplotlib is there, none", choices=("auto", "none", *plots.KINDS)
    )


@dataclass(frozen=True)
class Settings(flags.Settings):
    """The tables of a file: those of the server's, and [bench]."""

    bench: BenchSettings = BenchSettings()


QUICK = BenchSettings(
    methods=("none", "NGRAM", "EAGLE3"),
    sets=("mt_bench", "gsm8k", "humaneval"),
    limit=2,
    max_new_tokens=64,
    repeats=2,
    timed=0,
    output="runs/bench-quick",
)
"""A table within three minutes on 2 cores: defaults of `--quick`."""


def build_parser(defaults: Settings) -> settings.Parser:
    parser = settings.Parser(
        prog="specjax bench",
        description="Compare ways of drafting on sets of prompts.",
    )
    add = parser.add_argument_group("run").add_argument
    add("--quick", action="store_true", help="a small comparison: other defaults of the flags below")
    add("--no-progress", action="store_true", help="no progress bars")
    settings.add_flags(parser, defaults, TABLES)
    return parser


def numbers(name: str, texts: tuple[str, ...], kind: type, least: int) -> tuple[Any, ...]:
    """The numbers of a list. Raises ValueError, which names the flag."""
    found = []
    for text in texts:
        try:
            value = kind(text)
        except ValueError:
            raise ValueError(f"--{name} must be numbers, got {text!r}") from None
        if not least <= value < float("inf"):
            raise ValueError(f"--{name} must be at least {least}, got {text}")
        found.append(value)
    if not found or len(set(found)) < len(found):
        raise ValueError(f"--{name} must be different numbers, at least one, got {' '.join(texts) or 'none'}")
    return tuple(found)


def make_plan(bench: BenchSettings) -> Plan:
    """What the settings ask for. Raises ValueError for all that is known to be wrong before a model is loaded."""
    if not bench.methods or not bench.sets:
        raise ValueError("--methods and --sets: both need at least one name")
    methods = parse_methods(bench.methods)
    check_here(methods)
    names = [method.name for method in methods]
    baseline = bench.baseline or names[0]
    by_text = {method.text: method.name for method in methods}
    baseline = by_text.get(baseline, baseline)
    if baseline not in names:
        raise ValueError(f"--baseline {baseline} is none of the methods: {', '.join(names)}")
    temperatures = numbers("temperatures", bench.temperatures, float, 0)
    batches = numbers("batch-sizes", bench.batch_sizes, int, 1)
    if all(method.outside is not None for method in methods):
        raise ValueError("--methods: one must be the engine's, such as none; transformers stand beside it")
    base = methods[names.index(baseline)]
    if not all(applies(base, temperature, batch) for temperature in temperatures for batch in batches):
        raise ValueError(
            f"--baseline {baseline} runs at temperature 0 and batch size 1 alone; take one of the engine's"
        )
    sets = read_sets(
        bench.sets, data=DATA if bench.data is None else Path(bench.data), limit=bench.limit, turns=bench.turns
    )
    return Plan(
        tuple(methods), tuple(sets), temperatures, batches, baseline, bench.max_new_tokens, bench.repeats, bench.seed,
        bench.ignore_eos, bench.timed,
    )  # fmt: skip


def surroundings(models: Iterable[str | None], modules: Iterable[str] = ()) -> dict[str, Any]:
    """What figures depend on beside the settings: code, processor, and the files of local models."""
    files = {name: stamps for name in filter(None, models) if (stamps := file_stamps(name))}
    return {"commit": commit(), "code": code_digest(modules), "processor": processor(), "files": files}


def _models(methods: Sequence[Method]) -> list[str | None]:
    """Those that methods name: heads, draft models, those of transformers' assisted decoding."""
    return [one.outside.assisted if one.outside else getattr(one.draft, "path", None) for one in methods]


def _modules(methods: Sequence[Method]) -> list[str]:
    """Of drafters and verifiers from outside."""
    return [given.partition(":")[0] for one in methods for given in (one.drafter, one.verifier) if given]


def identity(plan: Plan, chosen: Settings) -> dict[str, Any]:
    """All that figures of one folder have in common; the number of repeats may grow."""
    return {
        **surroundings([chosen.model.model, *_models(plan.methods)], _modules(plan.methods)),
        "model": dict(vars(chosen.model)),
        "methods": [method.text for method in plan.methods],
        "sets": {each.name: each.digest for each in plan.sets},
        "temperatures": plan.temperatures,
        "batch_sizes": plan.batch_sizes,
        "baseline": plan.baseline,
        "max_new_tokens": plan.max_new_tokens,
        "ignore_eos": plan.ignore_eos,
        "seed": plan.seed,
        "timed": plan.timed,
    }


def write_results(folder: Path, document: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """results.json, table.csv, table.md and table.tex."""
    write_text(folder / "results.json", json.dumps(document, indent=1) + "\n")
    write_text(folder / "table.csv", tables.as_csv(rows))
    write_text(folder / "table.md", tables.as_markdown(rows))
    write_text(folder / "table.tex", tables.as_latex(rows))


def compare(chosen: Settings, *, progress: bool) -> dict[str, Any]:
    """Measures, prints and writes. Returns the command's summary."""
    started = time.perf_counter()
    plan, pictures = make_plan(chosen.bench), plots.kind_to_draw(chosen.bench.plots)
    build.claim_gpu(chosen)
    folder = Path(chosen.bench.output)
    log = Log(folder, identity(plan, chosen))
    head = machine("jaxlib", "flax", "torch", "transformers")
    source = Source(dict(vars(chosen.model)), progress=progress)
    experiment = Experiment(plan, source, log, progress=progress)
    for name, left in experiment.left_out.items():
        print(f"{name}: {len(left)} conversations are longer than the model's context, and left out", file=sys.stderr)
    experiment.run()
    rows, samples = experiment.rows()
    document = head | identity(plan, chosen) | {"repeats": plan.repeats, "left_out": experiment.left_out}
    document |= {"intervals": f"bootstrap, {LEVEL:.0%}, {RESAMPLES} resamples of groups of conversations"}
    notes = experiment.notes(rows)
    write_results(folder, document | {"notes": notes, "results": rows}, rows)
    print(tables.as_text(rows), end="")
    print("".join(f"{note}\n" for note in notes), end="")
    print(f"Intervals: 95%, bootstrap over conversations. Speed-ups are over {plan.baseline}.")
    print(f"All columns: {folder / 'table.md'}")
    drawn = plots.draw(folder, pictures, rows, samples) if pictures else []
    return {
        "output": str(folder),
        "rows": len(rows),
        "pictures": [file.name for file in drawn],
        "seconds": round(time.perf_counter() - started, 1),
    }


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    defaults = Settings(bench=QUICK if "--quick" in argv else BenchSettings())
    args, chosen = settings.parse(build_parser(defaults), argv, defaults)
    logging.basicConfig(level="WARNING", format="%(message)s", stream=sys.stderr)

    def work() -> dict[str, Any]:
        with flags.named_as_flags(chosen):
            return compare(chosen, progress=not args.no_progress)

    left = "what was measured is kept; the same command goes on"
    return run_command("specjax bench", work, interrupted=left)
