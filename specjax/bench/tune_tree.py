"""`specjax bench tune-tree`: finds the fastest draft tree on this machine by successive halving.

Each round measures the remaining trees as `specjax bench` does, keeps the faster half and doubles the conversations. A
tree's score is its speed-up over no drafts in the same process and part, the geometric mean over batch sizes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import jax

from specjax import checkpoint, settings
from specjax.bench import results
from specjax.bench.command import BenchSettings, make_plan, numbers, run, surroundings
from specjax.bench.methods import Method, Source
from specjax.bench.provenance import machine, processor
from specjax.bench.results import Row
from specjax.bench.run import Experiment, Log, Plan
from specjax.bench.sets import ALL, PromptSet, spread
from specjax.checkpoint.files import write_text
from specjax.cli import build, flags
from specjax.drafters import DraftOptions, Ngram, NoDraft
from specjax.drafters.options import ModelOptions, candidates
from specjax.load import choose, requested
from specjax.settings import dashed, setting

NONE = Method("none", "NONE", draft=NoDraft())
MATCH_TYPES = ("BFS", "PROB")
METHODS_AT_ONCE = 8  # engines in memory, besides the baseline's


def _bench(name: str, default: Any) -> Any:
    """A setting of `specjax bench`."""
    return field(default=default, metadata=BenchSettings.__dataclass_fields__[name].metadata)


def _values(default: tuple[str, ...], help: str) -> Any:
    return setting(default, help, metavar="N", digits=True)


@dataclass(frozen=True)
class TuneSettings:
    """The grid of trees and the prompts. The server's flags set the algorithm and its draft."""

    steps: tuple[str, ...] = _values(("1", "2", "3", "5"), "levels of the tree; not for NGRAM")
    topks: tuple[str, ...] = _values(("1", "2", "4", "8"), "expanded nodes of a level; not for NGRAM")
    draft_tokens: tuple[str, ...] = _values(("4", "8", "16", "32"), "nodes of the tree, the root included")
    match_types: tuple[str, ...] = setting(MATCH_TYPES, "NGRAM: orders of continuations", choices=MATCH_TYPES)
    max_matches: tuple[str, ...] = _values(("12",), "NGRAM: most tokens of a match")
    best: int = setting(3, "trees of the last round, besides the current one", minimum=1)
    batch_sizes: tuple[str, ...] = _bench("batch_sizes", ("1",))
    sets: tuple[str, ...] = _bench("sets", ("mt_bench",))
    data: str | None = _bench("data", None)
    limit: int = _bench("limit", 8)
    turns: int = _bench("turns", 1)
    temperature: float = setting(0.0, "temperature of the requests; 0 = greedy", minimum=0, maximum=2)
    max_new_tokens: int = _bench("max_new_tokens", 128)
    ignore_eos: bool = _bench("ignore_eos", False)
    repeats: int = setting(1, "runs of the last round", minimum=1)
    seed: int = _bench("seed", 0)
    output: str = _bench("output", "runs/tune-tree")


@dataclass(frozen=True)
class Settings(flags.Settings):
    """The server's tables and [tune]."""

    tune: TuneSettings = TuneSettings()


def build_parser() -> settings.Parser:
    parser = settings.Parser(
        prog="specjax bench tune-tree",
        description="Find the fastest draft tree on this machine: measure a grid of trees by successive halving.",
    )
    parser.add_argument_group("run").add_argument("--no-progress", action="store_true", help="no progress bars")
    settings.add_flags(parser, Settings(), ("tune", "model", "speculative"))
    return parser


def current_options(model: Mapping[str, Any], draft: DraftOptions | str) -> DraftOptions:
    """The options of the server, with every number of their tree; AUTO is resolved. `model`: arguments of
    `specjax.load.load` except the draft's. Raises ValueError for a custom drafter."""
    if isinstance(draft, str):
        raise ValueError(f"algorithm {draft}: the tree of a custom drafter cannot be tuned")
    options, _ = requested(model["model"], draft)
    files = checkpoint.resolve(model["model"], revision=model["revision"])
    config = checkpoint.model_config(files.config, dtype=model["dtype"])
    chosen = choose(options, files, config)
    options = chosen.options
    if isinstance(options, Ngram):
        return options
    if not isinstance(options, ModelOptions):
        return options
    shape = options.shape(chosen.tree or options.automatic(config.family))
    if chosen.head is not None:  # a shipped head has another path on another machine
        options = replace(options, path=None)
    return replace(options, steps=shape.steps, topk=shape.topk, nodes=shape.nodes)


def make_grid(current: DraftOptions, tune: TuneSettings) -> list[Method]:
    """A method for each tree, the current one first. Only the smallest of trees that propose the same drafts is in the
    grid: a tree of N nodes has at most N - 1 levels, and top-k 1 is a chain of steps + 1 nodes.

    Raises:
        ValueError: a wrong value, with its flag, or an algorithm without a tree.
    """
    if not isinstance(current, Ngram | ModelOptions):
        raise ValueError(f"algorithm {current.algorithm} has no tree to tune; take one that drafts")
    minima = {"steps": 1, "topks": 1, "draft_tokens": 2, "max_matches": 1}
    values = (numbers(dashed(name), getattr(tune, name), int, minimum) for name, minimum in minima.items())
    steps, topks, nodes, longest = values
    if isinstance(current, Ngram):
        trees = [
            {"nodes": n, "match_type": kind, "max_match": m}
            for n, kind, m in product(nodes, tune.match_types, longest)
            if current.min_match <= m
        ]
    else:
        trees = [{"steps": s, "topk": 1, "nodes": s + 1} for s in steps if 1 in topks]
        trees += [
            {"steps": s, "topk": k, "nodes": n}
            for s, k, n in product(steps, topks, nodes)
            if k > 1 and s < n <= candidates(s, k) + 1
        ]
    methods = {
        tree_name(current): Method(text="current", name=f"{tree_name(current)} current", draft=current, adaptive=False)
    }
    for draft in (replace(current, **tree) for tree in trees):
        methods.setdefault(name := tree_name(draft), Method(name, name, draft=draft, adaptive=False))
    return list(methods.values())


def tree_name(draft: Ngram | ModelOptions) -> str:
    """Name of a tree in tables, by the options that differ between trees."""
    if isinstance(draft, ModelOptions):
        return f"{draft.algorithm} {draft.steps}/{draft.topk}/{draft.nodes}"
    nodes = "default" if draft.nodes is None else draft.nodes
    return f"{draft.algorithm} nodes={nodes} match_type={draft.match_type} max_match={draft.max_match}"


class Round(NamedTuple):
    """Rows of `specjax bench` over all sets, the fastest first at each batch size."""

    conversations: int  # of each set
    rows: list[Row]

    def scores(self, batch: int | None = None) -> dict[str, float]:
        """Speed-ups over no drafts by method, at one batch size, or the geometric mean over all of them."""
        rows = [row for row in self.rows if batch in (None, row["batch"])]
        speeds: dict[str, list[float]] = {row["method"]: [] for row in rows}
        for row in rows:
            speeds[row["method"]].append(row["speed_up"]["value"])
        return {name: geometric_mean(values) for name, values in speeds.items()}


def schedule(trees: int, best: int, conversations: int, minimum: int = 1) -> list[tuple[int, int]]:
    """(trees, conversations) of each round. Trees halve down to `best`; conversations double, up to all of them.

    schedule(33, 3, 8) -> (33, 1), (17, 1), (9, 2), (5, 4), (3, 8)
    """
    sizes = [trees]
    while sizes[-1] > best:
        sizes.append(max(best, -(-sizes[-1] // 2)))
    doubled = (conversations >> (len(sizes) - 1 - i) for i in range(len(sizes)))
    return [(size, max(minimum, count)) for size, count in zip(sizes, doubled, strict=True)]


def search(
    grid: Sequence[Method], experiment: Experiment, log: Log, *, best: int, repeats: int, progress: bool = True
) -> list[Round]:  # fmt: skip
    """Measures the grid. Its first method, the current tree, takes part in every round. All rounds have the plan and
    the conversations of `experiment`, which measures the baseline."""
    remaining, rounds = list(grid), list[Round]()
    most = max(map(len, experiment.sets.values()))
    for trees, count in schedule(len(grid), best, most, max(experiment.plan.batch_sizes)):
        if rounds:
            scores = rounds[-1].scores()
            remaining = sorted(remaining, key=lambda method: -scores[method.name])[:trees]
            remaining += [grid[0]] * (grid[0] not in remaining)
        sets = [PromptSet(name, tuple(spread(whole, count))) for name, whole in experiment.sets.items()]
        plan = replace(experiment.plan, sets=tuple(sets), repeats=repeats if trees <= best else 1)
        print(f"Round {len(rounds) + 1}: {len(remaining)} trees, {count} conversations of each set", file=sys.stderr)
        rows: dict[tuple[int, str], Row] = {}
        for start in range(0, len(remaining), METHODS_AT_ONCE):
            methods = (NONE, *remaining[start : start + METHODS_AT_ONCE])
            for row in _measure(replace(plan, methods=methods), experiment.source, log, grid[0], progress):
                rows.setdefault((row["batch"], row["method"]), row)
        ordered = sorted(rows.values(), key=lambda row: (row["batch"], -row["speed_up"]["value"]))
        rounds.append(Round(count, ordered))
    return rounds


def _measure(plan: Plan, source: Source, log: Log, current: Method, progress: bool) -> list[Row]:
    """Rows over all sets, from the log if possible."""
    sizes = [len(prompts.conversations) for prompts in plan.sets]
    key = ("rows", sizes, plan.repeats, [method.name for method in plan.methods])
    if key not in log:
        for method in plan.methods:
            source.derive(method, current)
        experiment = Experiment(plan, source, {}, progress=progress)
        experiment.run()
        whole = ALL if len(plan.sets) > 1 else next(iter(experiment.sets))
        log[key] = [row for row in experiment.rows() if row["set"] == whole]
    return log[key]


def as_toml(tables: Mapping[str, Mapping[str, Any]], comment: str) -> str:
    """TOML of tables of strings, numbers and booleans, which have the syntax of JSON."""
    text = f"# {comment}\n"
    for name, entries in tables.items():
        pairs = [f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in entries.items()]
        text += "".join([f"\n[{name}]\n", *pairs]) if pairs else ""
    return text


def tune_tree(chosen: Settings, *, progress: bool) -> dict[str, Any]:
    """Searches, prints and writes. Returns the command's summary."""
    started, tune, folder = time.perf_counter(), chosen.tune, Path(chosen.tune.output)
    names = [flag.name for flag in fields(BenchSettings) if flag.name in vars(tune)]
    shared: dict[str, Any] = {name: getattr(tune, name) for name in names}
    shared |= {"methods": (NONE.text,), "temperatures": (str(tune.temperature),)}
    bench = BenchSettings(**shared)
    plan = make_plan(bench)
    build.claim_gpu(chosen)
    draft = build.draft_options(chosen)
    grid = make_grid(current_options(vars(chosen.model), draft), tune)
    unrelated = ("best", "output", "repeats")  # these do not affect measurements
    identity = {
        **surroundings([chosen.model.model, getattr(draft, "path", None)]),
        "model": dict(vars(chosen.model)),
        "tune": {name: value for name, value in vars(tune).items() if name not in unrelated},
        "current": build.speculative_settings(grid[0].draft or NoDraft()),
        "digests": {prompts.name: prompts.digest for prompts in plan.sets},
    }
    log, head = Log(folder, identity), machine("jaxlib", "flax")
    source = Source(dict(vars(chosen.model)), progress=progress, full_batches=True)
    source.load(grid[0])
    source.derive(NONE, grid[0])
    experiment = Experiment(plan, source, {}, progress=progress)
    rounds = search(grid, experiment, log, best=tune.best, repeats=tune.repeats, progress=progress)
    speed_ups = rounds[-1].scores()
    options = {method.name: method.draft or NoDraft() for method in (NONE, *grid)}

    model = {dashed(flag.name): value for flag in fields(chosen.model)
             if (value := getattr(chosen.model, flag.name)) != flag.default}  # fmt: skip
    comment = f"The fastest draft tree by `specjax bench tune-tree` on {jax.devices()[0].device_kind} ({processor()})."

    def write_fastest(file: str, scores: Mapping[str, float]) -> dict[str, Any]:
        """Writes the options of the fastest method for `--config`, and returns them."""
        fastest = build.speculative_settings(options[max(scores, key=scores.__getitem__)])
        write_text(folder / file, as_toml({"model": model, "speculative": fastest}, comment))
        return fastest

    fastest = write_fastest("best.toml", speed_ups)
    for batch in plan.batch_sizes if len(plan.batch_sizes) > 1 else ():
        write_fastest(f"best-batch-{batch}.toml", rounds[-1].scores(batch))
    texts = {name: " ".join(map(str, value)) if isinstance(value, tuple) else value for name, value in fastest.items()}
    to_use = " ".join(f"--{name} {value}" for name, value in texts.items())
    seconds = round(time.perf_counter() - started, 1)
    document = head | identity | {
        "trees": len(grid), "seconds": seconds, "left_out": experiment.left_out, "speed_ups": speed_ups,
        "flags": to_use, "rounds": [result._asdict() for result in rounds],
    }  # fmt: skip
    write_text(folder / "results.json", json.dumps(document, indent=1) + "\n")
    tables = [
        f"Round {number}, {result.conversations} conversations of each set\n\n{results.as_markdown(result.rows)}"
        for number, result in enumerate(rounds, start=1)
    ]
    write_text(folder / "table.md", "\n".join(reversed(tables)))
    print(results.as_text(rounds[-1].rows), end="")
    print(f"All rounds: {folder / 'table.md'}")
    print(f"The fastest of {len(grid)} trees: {to_use}")
    print(f"As a file: specjax serve --config {folder / 'best.toml'}")
    return {"output": str(folder), "trees": len(grid), "flags": to_use, "seconds": seconds}


def main(argv: list[str]) -> int:
    args, chosen = settings.parse(build_parser(), argv, Settings())
    return run("specjax bench tune-tree", chosen, lambda: tune_tree(chosen, progress=not args.no_progress))
