"""The command `specjax tune`: measures what a server's first start on a GPU measures, without serving.

Prints the choices with their times and their shares of the device's ceilings, which are measured too, then one line of
JSON. On a CPU only steps are timed, plain ones and those of trees: kernels and options are chosen on GPUs alone.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from specjax_kernels import choice, launch

from specjax import settings
from specjax.cli import build, flags, run_command
from specjax.engine import autotune, tuning, tuning_tasks
from specjax.engine.tuning import Result, Tuning

TABLES = ("model", "engine", "speculative")
PACKAGE = Path(launch.__file__).parent


def build_parser() -> settings.Parser:
    parser = settings.Parser(
        prog="specjax tune",
        description="Measure which kernels, blocks and options are the fastest for a model on this device, and how "
        "long its steps take; keep that for the server. What an earlier run had no time for is measured next.",
    )
    add = parser.add_argument_group("measurement").add_argument
    add("--again", action="store_true", help="measure anew what is known")
    add("--no-progress", action="store_true", help="no progress bars")
    add(
        "--write-tables",
        nargs="?",
        type=Path,
        const=PACKAGE,
        metavar="FOLDER",
        help="write the entries to launch_table.json and choice_table.json there, which keep their other entries; "
        "without a folder to those of the installed package",
    )
    settings.add_flags(parser, flags.Settings(), TABLES)
    return parser


def main(argv: list[str] | None = None) -> int:
    args, chosen = settings.parse(build_parser(), argv, flags.Settings())
    logging.basicConfig(level="WARNING", format="%(message)s", stream=sys.stderr)

    def work() -> dict[str, Any]:
        seconds = chosen.engine.autotune_seconds
        if not seconds:
            raise ValueError("--autotune-seconds 0 leaves no time to measure")
        build.claim_gpu(chosen)
        if args.write_tables is not None:
            check_folder(args.write_tables)
        engine = build.make_engine(chosen, progress=not args.no_progress, autotune_seconds=0.0)
        found = None if args.again else autotune.known(engine)
        if found is None or not found.complete:
            found = autotune.measure(engine, seconds=seconds, before=found, progress=not args.no_progress)
        for line in report(found):
            print(line)
        if args.write_tables is not None:
            write_tables(found, args.write_tables)
        return summary(found)

    left = "what was measured so far is kept, and the next run goes on"
    return run_command("specjax tune", work, interrupted=left)


def check_folder(folder: Path) -> None:
    """Raises ValueError where tables cannot be written."""
    if launch.generation() is None:
        raise ValueError(f"--write-tables: tables are of NVIDIA GPUs, and JAX's default device is {jax.devices()[0]}")
    if not folder.is_dir():
        raise ValueError(f"--write-tables {folder} is no folder")


def write_tables(found: Tuning, folder: Path) -> None:
    """Adds the entries to the tables in a folder."""
    generation = launch.generation()
    assert generation is not None  # see `check_folder`
    attention, products = tuning_tasks.entries(found)
    launch.write_table(generation, attention, folder / launch.TABLE.name)
    choice.write_table(generation, products, folder / choice.TABLE.name)


def summary(found: Tuning) -> dict[str, Any]:
    return {
        "device": found.of["device"],
        "record": str(tuning.file_for(found.of)),
        "seconds": round(found.seconds, 1),
        "measured": sum(result.finished for result in found.results),
        "choices": found.tasks,
        "copy_gigabytes_per_second": round((found.copy_speed or 0) / 1e9, 2),
        "product_teraflops": round((found.product_speed or 0) / 1e12, 3),
        "results": [asdict(result) for result in found.results],
        "left_out": found.left_out,
    }


def report(found: Tuning) -> Iterator[str]:
    """The choices as text."""
    copy, product = found.copy_speed, found.product_speed
    assert copy is not None and product is not None
    yield f"{found.of['device']}: a copy moves {copy / 1e9:.1f} GB/s, a large product has {product / 1e12:.2f} TFLOP/s"
    if launch.generation() is None:
        yield "No NVIDIA GPU: kernels and options are not chosen here, only steps are timed."
    if not found.tasks:
        yield "Nothing to measure: trees that are given by flags, or none, leave no choice."
        return
    yield f"{'':44} {'us':>10} {'of start':>8} {'of copy':>7} {'of products':>11}  choice"
    for result in found.results:
        for label, candidate, score in _lines(result):
            yield f"{label:44} {_figures(result, score, copy, product)}  {words(candidate)}"
    done = sum(result.finished for result in found.results)
    yield f"{done} of {found.tasks} choices in {found.seconds:.0f} s"
    if done < found.tasks:
        yield "The budget ended before all were measured; another run goes on with the others."
    for candidate, why in found.left_out.items():
        yield f"left out: {candidate}: {why}"


def _lines(result: Result) -> Iterator[tuple[str, Any, float]]:
    """(label, candidate, score): of a choice the best one; of step times all, none being chosen."""
    if not result.name.startswith(autotune.STEP_TIMES):
        yield f"{result.stage} {result.name}", result.choice, result.score
        return
    for tree, score in result.tried:
        if score is not None:
            yield f"{result.name}", "plain" if tree[2] == 1 else f"tree ({tree[0]}, {tree[1]}, {tree[2]})", score


def _figures(result: Result, score: float, copy: float, product: float) -> str:
    if not result.seconds:
        return f"{'':10} {score:8.3f} {'':7} {'':11}"
    seconds = score * result.seconds
    # What a step of a tree reads besides is not counted.
    shares = (result.bytes / seconds / copy, result.flops / seconds / product) if _counted(result, score) else (0, 0)
    read, computed = (f"{share:.1%}" if share else "" for share in shares)
    return f"{1e6 * seconds:10.1f} {score:8.3f} {read:>7} {computed:>11}"


def _counted(result: Result, score: float) -> bool:
    return result.stage != "steps" or score == 1.0


def words(candidate: Any) -> str:
    """A candidate as `specjax.engine.tuning.plain` gives it."""
    if isinstance(candidate, dict):
        return ", ".join(f"{name} {value}" for name, value in candidate.items())
    return str(candidate)
