"""Where the benchmarks read prompts and write records; a record's head is `specjax.bench.provenance`'s."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specjax.bench.provenance import command, machine
from specjax.bench.sets import DATA, read_prompts, spread

__all__ = ["DATA", "RESULTS", "command", "finish", "machine", "read_prompts", "spread"]

RESULTS = Path(__file__).parent / "results"


def finish(name: str, document: dict[str, Any], *, record: bool | str | None) -> None:
    """Prints a document as one JSON line, the last of the output; with `record` also writes it under results/: a day's
    one of this name or, where `record` is a label, of this name and label."""
    if record is not None and record is not False:
        RESULTS.mkdir(exist_ok=True)
        label = f"-{record}" if isinstance(record, str) and record else ""
        file = RESULTS / f"{name}-{document['date'][:10]}{label}.json"
        file.write_text(json.dumps(document, indent=1) + "\n")
        print(f"wrote {file}")
    print(json.dumps(document))
