"""The tables of configs/README.md, computed from the files of `configs/` by the dry run.

    python tests/helpers/config_tables.py --write

Reads the published config.json of each model and draft in `tests/golden`; no weights and no network.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from specjax.cli import build, flags
from specjax.gpu import DEVICES
from specjax.hardware import dry_run
from specjax.settings import Parser, add_flags, parse

ROOT = Path(__file__).parents[2]
FOLDER, README = ROOT / "configs", ROOT / "configs/README.md"
FOLDERS = ("rtx4090", "t4", "block", "sglang")
FILES = {file.stem: file for folder in FOLDERS for file in sorted((FOLDER / folder).iterdir())}
REAL: dict[str, dict[str, Any]] = json.loads((ROOT / "tests/golden/published_configs.json").read_text())
"""Published config.json files, by hub id."""

CARDS = ("T4", "RTX4090", "H200")  # smallest first
MIN_POOL = 2048  # tokens; a pool that holds fewer is of no use
HEADER = "| file | target | draft | tree | weights | fits one of |\n|---|---|---|---|---|---|"


class Row(NamedTuple):
    text: str
    cards: tuple[str, ...]  # one of which is enough


def card_of(name: str) -> str:
    """The card that a file is for."""
    folder = FILES[name].parent.name.upper()
    return folder if folder in DEVICES else "H200"


def read(name: str, *argv: Any) -> flags.Settings:
    """The settings of `specjax serve --config FILE ...`."""
    parser = Parser(prog="specjax serve")
    add_flags(parser, flags.Settings())
    dry_run.add_flags(parser)
    return parse(parser, ["--config", str(FILES[name]), *map(str, argv)], flags.Settings())[1]


def described(name: str, root: Path) -> Path:
    """A folder with only the published config.json."""
    folder = root / name.replace("/", "-")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(REAL[name]))
    return folder


def row(name: str, root: Path) -> Row:
    """The row of a file; `root`: an empty folder."""
    given = read(name)
    model, chosen = given.model.model, vars(given.speculative)
    argv: list[Any] = ["--model", described(model, root)]
    if path := chosen["speculative_draft_model_path"]:
        argv += ["--speculative-draft-model-path", described(path, root)]
    if token_map := chosen["speculative_token_map"]:
        argv += ["--speculative-token-map", re.sub(r"\D", "", token_map.rpartition("_")[2])]
    arguments, plans, tree = build.engine_arguments(read(name, *argv)), {}, ""
    names = ("model", "quantization", "draft", "dtype")
    for card in CARDS:
        old = DEVICES[card].before_ampere
        outline = dry_run.outline(**{key: arguments[key] for key in names}, platform="gpu", before_ampere=old)
        tree = outline.speculation.note.split(" (")[0]
        plans[card] = dry_run.planned(dry_run.Case(outline, arguments["config"], DEVICES[card], "gpu"))
    devices = arguments["config"].tensor_parallel
    fits = tuple(card for card in CARDS if not plans[card].problems and prod(plans[card].memory.pool) >= MIN_POOL)
    weights = f"{plans['H200'].held.weights * devices / 1e9:.1f} GB"
    if devices > 1:
        label, fits = f"none: the file splits it over {devices} devices", ()
    else:
        label = ", ".join(fits) or "none"
    draft = chosen["speculative_algorithm"] + (f", `{path}`" if path else "")
    link = f"[`{name}`]({FILES[name].parent.name}/{FILES[name].name})"
    return Row(f"| {link} | `{model}` | {draft} | {tree} | {weights} | {label} |", fits)


def with_tables(text: str, rows: dict[str, str]) -> str:
    """The text of README.md with a table of these rows in place of each one between its comments."""

    def table(match: re.Match[str]) -> str:
        lines = [line for name, line in rows.items() if FILES[name].parent.name == match["folder"]]
        return "\n".join([match["start"], "", HEADER, *lines, "", "<!-- end -->"])

    return re.sub(r"(?P<start><!-- table of (?P<folder>\w+) -->)\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def main() -> int:
    flag = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flag.add_argument("--write", action="store_true", help="write the tables to configs/README.md")
    args, text = flag.parse_args(), README.read_text()
    with tempfile.TemporaryDirectory() as root:
        tables = with_tables(text, {name: row(name, Path(root)).text for name in FILES})
    if args.write:
        README.write_text(tables)
    return 0 if args.write or tables == text else 1


if __name__ == "__main__":
    sys.exit(main())
