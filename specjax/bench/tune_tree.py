"""`specjax bench tune-tree`: which draft tree decodes fastest here.

One process loads the weights once, records a run of each top-k (or of each way to match n-grams), times the parts of a
step for each shape, predicts the speed of every point of a grid (`specjax.bench.prediction` says how), and runs the
best ones. It prints them, the flags to use, and writes these as a file for `--config`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import jax

from specjax import settings
from specjax.bench import plots, tables
from specjax.bench.command import BenchSettings, numbers, surroundings
from specjax.bench.contenders import Source
from specjax.bench.experiment import Plan
from specjax.bench.grid import Axes, make_grid
from specjax.bench.log import Log
from specjax.bench.provenance import machine, processor
from specjax.bench.search import NONE, Search, current_options
from specjax.bench.sets import DATA, read_sets
from specjax.checkpoint.files import write_text
from specjax.cli import build, flags, run_command
from specjax.drafters import DraftOptions, Ngram
from specjax.settings import setting

TABLES = ("tune", "model", "speculative")
MOST = 64  # of what an algorithm's options are limited to
NOT_RECORDED = ("best", "output", "plots", "repeats")  # settings on which recordings and costs do not depend
SHOWN = 10  # predicted points that are printed for each batch size


def _as_bench(name: str, default: Any) -> Any:
    """A setting of the comparison's, with another default."""
    return field(default=default, metadata=BenchSettings.__dataclass_fields__[name].metadata)


def _values(default: tuple[str, ...], help: str) -> Any:
    return setting(default, help, metavar="N", digits=True)


@dataclass(frozen=True)
class TuneSettings:
    """The grid, and the prompts that it is measured on. The algorithm and its draft are given by the server's flags."""

    batch_sizes: tuple[str, ...] = _as_bench("batch_sizes", ("1",))
    steps: tuple[str, ...] = _values(("1", "2", "3", "4", "5"), "levels of the tree; not of NGRAM")
    topks: tuple[str, ...] = _values(("1", "2", "4", "8"), "nodes of a level that are expanded; not of NGRAM")
    draft_tokens: tuple[str, ...] = _values(
        ("2", "3", "4", "5", "6", "8", "12", "16", "32"), "nodes of the tree, the root included"
    )
    strong_matches: tuple[str, ...] = _values(
        ("1", "2", "3", "4", "6", "8"), "NGRAM: fewest tokens of a match that is drafted from"
    )
    match_types: tuple[str, ...] = setting(("BFS", "PROB"), "NGRAM: BFS, PROB or both", metavar="TYPE")
    max_matches: tuple[str, ...] = _values(("12",), "NGRAM: most tokens of a match")
    best: int = setting(
        3,
        "predicted best points to run, of different steps and draft tokens; the current tree and no drafts run, too",
        minimum=1,
    )
    sets: tuple[str, ...] = _as_bench("sets", ("mt_bench",))
    data: str | None = _as_bench("data", None)
    limit: int = _as_bench("limit", 8)
    turns: int = _as_bench("turns", 1)
    temperature: float = setting(0.0, "temperature of the requests; 0 = greedy", minimum=0, maximum=2)
    max_new_tokens: int = _as_bench("max_new_tokens", 128)
    ignore_eos: bool = _as_bench("ignore_eos", False)
    repeats: int = setting(1, "times that the best points are run", minimum=1)
    seed: int = _as_bench("seed", 0)
    output: str = _as_bench("output", "runs/tune-tree")
    plots: str = _as_bench("plots", "auto")


@dataclass(frozen=True)
class Settings(flags.Settings):
    """The tables of a file: those of the server's, and [tune]."""

    tune: TuneSettings = TuneSettings()


def build_parser() -> settings.Parser:
    parser = settings.Parser(
        prog="specjax bench tune-tree",
        description="Find the draft tree that decodes fastest on this machine: predict a grid of them from one "
        "recorded run and the measured costs of a step's parts, and run the best.",
    )
    parser.add_argument_group("run").add_argument("--no-progress", action="store_true", help="no progress bars")
    settings.add_flags(parser, Settings(), TABLES)
    return parser


def axes_of(tune: TuneSettings) -> Axes:
    """The values that are combined. Raises ValueError, which names the flag, for wrong ones."""
    kinds = tuple(kind.upper() for kind in tune.match_types)
    if not kinds or set(kinds) - {"BFS", "PROB"}:
        raise ValueError(f"--match-types must be BFS, PROB or both, got {' '.join(tune.match_types) or 'none'}")
    found = Axes(
        steps=numbers("steps", tune.steps, int, 1),
        topks=numbers("topks", tune.topks, int, 1),
        nodes=numbers("draft-tokens", tune.draft_tokens, int, 2),
        strong=numbers("strong-matches", tune.strong_matches, int, 1),
        match_types=tuple(dict.fromkeys(kinds)),
        max_matches=numbers("max-matches", tune.max_matches, int, 1),
    )
    limits = {"steps": found.steps, "topks": found.topks, "strong-matches": found.strong,
              "max-matches": found.max_matches}  # fmt: skip
    for name, values in limits.items():
        if max(values) > MOST:
            raise ValueError(f"--{name} must be at most {MOST}, got {max(values)}")
    return found


def make_plan(tune: TuneSettings) -> Plan:
    """The prompts and how they are completed; the methods come later. Raises ValueError for wrong settings."""
    data = DATA if tune.data is None else Path(tune.data)
    if not tune.sets:
        raise ValueError("--sets needs at least one name")
    sets = read_sets(tune.sets, data=data, limit=tune.limit, turns=tune.turns)
    batches = numbers("batch-sizes", tune.batch_sizes, int, 1)
    fewest = min(len(each.conversations) for each in sets)
    if max(batches) > fewest:
        raise ValueError(f"--batch-sizes {max(batches)}: a set has {fewest} conversations; raise --limit")
    return Plan(
        (), tuple(sets), (tune.temperature,), batches, NONE.name, tune.max_new_tokens, tune.repeats, tune.seed,
        tune.ignore_eos, 0,
    )  # fmt: skip


def tune_tree(chosen: Settings, *, progress: bool) -> dict[str, Any]:
    """Searches, prints and writes. Returns the command's summary."""
    started = time.perf_counter()
    axes, plan, picture = axes_of(chosen.tune), make_plan(chosen.tune), plots.kind_to_draw(chosen.tune.plots)
    build.claim_gpu(chosen)
    given = build.draft_options(chosen)
    grid = make_grid(current_options(vars(chosen.model), given), axes)
    asked = {name: value for name, value in vars(chosen.tune).items() if name not in NOT_RECORDED}
    identity = {
        **surroundings([chosen.model.model, getattr(given, "path", None)]),
        "model": dict(vars(chosen.model)), "tune": asked,
        "current": build.speculative_settings(grid.current.draft),
        "digests": {each.name: each.digest for each in plan.sets},
    }  # fmt: skip
    folder = Path(chosen.tune.output)
    log = Log(folder, identity)
    head = machine("jaxlib", "flax")
    points = len(grid.points) * len(plan.batch_sizes)
    print(f"{points} points, current: {grid.current.name}", file=sys.stderr)
    source = Source(dict(vars(chosen.model)), progress=progress, full_batches=True)
    search = Search(grid, plan, source, log, progress=progress)
    search.run(chosen.tune.best)
    draft, speeds = search.recommended()
    seconds = round(time.perf_counter() - started, 1)
    text = "".join(f"Batch size {batch}\n\n{tables.aligned(table(search, batch))}\n" for batch in plan.batch_sizes)
    found = build.speculative_settings(draft)
    flags_to_use = " ".join(f"--{name} {value}" for name, value in found.items())
    document = head | identity | {
        "points": points, "seconds": seconds,
        "seconds_by_part": {part: round(taken, 1) for part, taken in search.seconds.items()},
        "left_out": search.experiment.left_out,
        "context": search.recorded.context, "costs": {batch: costs.as_dict() for batch, costs in search.costs.items()},
        "plain_tokens_per_second": search.plain,
        "verified": [one.as_dict() for runs in search.verified.values() for one in runs],
        "speed_ups": speeds, "flags": flags_to_use, "predictions": rows(search),
    }  # fmt: skip
    write_text(folder / "results.json", json.dumps(document, indent=1) + "\n")
    write_text(folder / "grid.csv", tables.csv_text(rows(search)))
    write_text(folder / "table.md", text)
    write_toml(folder / "best.toml", chosen, draft)
    if len(plan.batch_sizes) > 1:
        for batch in plan.batch_sizes:
            write_toml(folder / f"best-batch-{batch}.toml", chosen, search.fastest(batch))
    for batch in plan.batch_sizes:
        print(f"Batch size {batch}\n\n{tables.columns(table(search, batch, BRIEF))}")
    print(f"All columns: {folder / 'table.md'}")
    print(f"{points} points in {seconds:g} s ({', '.join(f'{part} {t:.0f}' for part, t in search.seconds.items())}).")
    print(f"The fastest that was run: {flags_to_use}")
    print(f"As a file: specjax serve --config {folder / 'best.toml'}")
    pictures = []
    if picture is not None:
        heat_map(search).savefig(file := folder / f"heat-map.{picture}", dpi=150)
        pictures.append(file.name)
    return {"output": str(folder), "points": points, "flags": flags_to_use, "pictures": pictures, "seconds": seconds}


def rows(search: Search) -> list[dict[str, Any]]:
    """A row for each point and batch size, the best first: what was predicted, and what was measured."""
    found = []
    for batch, predictions in search.predictions.items():
        runs = {one.name: one for one in search.verified.get(batch, ())}
        for one in predictions:
            row = one.as_dict() | {"speed_up": round(one.tokens_per_second / search.plain[batch], 4)}
            if (run := runs.get(one.point.name)) is not None:
                measured = run.tokens_per_second / runs[NONE.name].tokens_per_second
                row |= {
                    "measured_tokens_per_second": round(run.tokens_per_second, 3),
                    "measured_accept_length": run.accept_length,
                    "deviation": round(one.tokens_per_second / run.tokens_per_second - 1, 4),
                    "measured_speed_up": round(measured, 4),
                    "speed_up_deviation": round(row["speed_up"] / measured - 1, 4),
                    "texts": " ".join(f"{count} {verdict}" for verdict, count in run.texts.items() if count),
                }
            found.append(row)
    return found


COLUMNS = {
    "tokens_per_second": ("predicted tok/s", "{:.1f}"), "speed_up": ("speed-up", "{:.2f}"),
    "accept_length": ("accept length", "{:.3f}"), "step_ms": ("step ms", "{:.1f}"),
    "measured_tokens_per_second": ("measured tok/s", "{:.1f}"), "measured_speed_up": ("speed-up", "{:.2f}"),
    "measured_accept_length": ("accept length", "{:.3f}"), "deviation": ("tok/s are off by", "{:+.1%}"),
    "speed_up_deviation": ("speed-up is off by", "{:+.1%}"),
    "texts": ("texts", "{}"),
}  # fmt: skip


BRIEF = {
    "tokens_per_second": ("predicted", "{:.1f}"), "measured_tokens_per_second": ("tok/s", "{:.1f}"),
    "deviation": ("off by", "{:+.0%}"), "measured_speed_up": ("speed-up", "{:.2f}"),
    "measured_accept_length": ("accept", "{:.2f}"),
}  # fmt: skip
"""Columns that fit a terminal."""


def table(search: Search, batch: int, columns: Mapping[str, tuple[str, str]] = COLUMNS) -> list[list[str]]:
    """Rows of the best points of a batch size and of all points that were run, after a header."""
    own = [row for row in rows(search) if row["batch"] == batch]
    chosen = [row for i, row in enumerate(own) if i < SHOWN or "deviation" in row]
    names = [*search.grid.current.numbers]
    headers = names if columns is COLUMNS else [name.split()[0] for name in names]
    lines = [[*headers, *(title for title, _ in columns.values()), ""]]
    current = search.grid.current.numbers
    for row in chosen:
        cells = [str(row[name]) for name in names]
        cells += [form.format(row[key]) if key in row else "" for key, (_, form) in columns.items()]
        lines.append([*cells, "current" if all(row[name] == current[name] for name in names) else ""])
    plain = next(one for one in search.verified[batch] if one.name == NONE.name)
    cells = {"measured_tokens_per_second": f"{plain.tokens_per_second:.1f}", "measured_speed_up": "1.00",
             "measured_accept_length": f"{plain.accept_length:.3f}"}  # fmt: skip
    lines.append([*([""] * len(names)), *(cells.get(key, "") for key in columns), "no drafts"])
    return lines


# The file


def write_toml(file: Path, chosen: Settings, draft: DraftOptions) -> None:
    """The model's settings that were given and these options, for `--config`."""
    model = {each.name.replace("_", "-"): value for each in fields(chosen.model)
             if (value := getattr(chosen.model, each.name)) != each.default}  # fmt: skip
    write_text(file, as_toml({"model": model, "speculative": build.speculative_settings(draft)}, _comment()))


def _comment() -> str:
    device = jax.devices()[0].device_kind
    return f"The fastest draft tree that `specjax bench tune-tree` has run, on {device} ({processor()})."


def as_toml(found: Mapping[str, Mapping[str, Any]], comment: str) -> str:
    """Tables of strings, numbers and truth values."""
    lines = [f"# {comment}"]
    for name, entries in found.items():
        if entries:
            # JSON's strings, numbers and truth values are TOML's, too, but for DEL.
            lines += [
                "",
                f"[{name}]",
                *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in entries.items()),
            ]
    return "\n".join(lines) + "\n"


# The heat map


def heat_map(search: Search) -> Any:
    """A figure of predicted speed-ups: a panel for each batch size and top-k (or match type), a cell for each number of
    steps (or strong match) and of draft tokens, which shows the best of the other numbers."""
    ngram = isinstance(search.grid.current.draft, Ngram)
    panel, row, column = ("match type", "strong match", "draft tokens") if ngram else ("top-k", "steps", "draft tokens")
    best: dict[str, dict[tuple[Any, Any], float]] = {}
    marked: dict[str, list[tuple[str, str]]] = {}
    several = len(search.predictions) > 1
    for batch, predictions in search.predictions.items():
        runs = {one.name for one in search.verified[batch]}
        for one in sorted(predictions, key=lambda one: str(one.point.numbers[panel]).zfill(9)):
            numbers_of = one.point.numbers
            title = f"{panel} {numbers_of[panel]}" + (f", batch {batch}" if several else "")
            cell, speed = (numbers_of[row], numbers_of[column]), one.tokens_per_second / search.plain[batch]
            cells = best.setdefault(title, {})
            cells[cell] = max(cells.get(cell, 0.0), speed)
            if one.point.name in runs:
                marked.setdefault(title, []).append((str(cell[0]), str(cell[1])))
    panels = {}
    for title, cells in best.items():
        columns = sorted({cell[1] for cell in cells})
        lines = sorted({cell[0] for cell in cells})
        ordered = [(a, b) for a in lines for b in columns if (a, b) in cells]
        ordered.sort(key=lambda cell: (lines.index(cell[0]), columns.index(cell[1])))
        panels[title] = [(str(a), str(b), cells[a, b]) for a, b in ordered]
    return plots.heat_map(panels, marked, (row, column))


def main(argv: list[str]) -> int:
    args, chosen = settings.parse(build_parser(), argv, Settings())
    logging.basicConfig(level="WARNING", format="%(message)s", stream=sys.stderr)

    def work() -> dict[str, Any]:
        with flags.named_as_flags(chosen):
            return tune_tree(chosen, progress=not args.no_progress)

    left = "what was measured is kept; the same command goes on"
    return run_command("specjax bench tune-tree", work, interrupted=left)
