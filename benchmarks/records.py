"""Prompts and records of the benchmarks. The head of a record is `specjax.bench.provenance.machine`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specjax.bench.provenance import command, machine
from specjax.bench.sets import DATA, spread

__all__ = ["DATA", "RESULTS", "command", "finish", "machine", "read_prompts", "spread"]

RESULTS = Path(__file__).parent / "results"


def read_prompts(file: Path, count: int | None) -> list[tuple[str, str]]:
    """(id, first turn) of the first `count` lines."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [(row["id"], row["turns"][0]) for row in rows[:count]]


def finish(name: str, document: dict[str, Any], *, record: bool | str | None) -> None:
    """Prints a document as one JSON line, the last of the output. With `record` also writes results/NAME-DATE.json, or
    results/NAME-DATE-LABEL.json if it is a label."""
    if record is not None and record is not False:
        RESULTS.mkdir(exist_ok=True)
        label = f"-{record}" if isinstance(record, str) and record else ""
        file = RESULTS / f"{name}-{document['date'][:10]}{label}.json"
        file.write_text(json.dumps(document, indent=1) + "\n")
        print(f"wrote {file}")
    print(json.dumps(document))
