"""Puts a comparison of `specjax bench` into docs/performance.md, and its record beside the others.

    python benchmarks/full_table.py runs/full/results.json

The lines between `<!-- full table -->` and `<!-- end -->` become a row for each method: speed-up over the baseline and
accept length over all sets, by temperature, and a second table of speed-ups by set. The record is copied to
benchmarks/results/bench-full-DATE.json. Only the first batch size is shown. No figure is computed here.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from records import RESULTS

from specjax.bench.results import interval_text, titles
from specjax.bench.sets import ALL

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- full table -->", "<!-- end -->"


def table(rows: list[list[str]]) -> str:
    """In Markdown. The first row is the header."""
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def section(document: dict[str, Any], record: str) -> str:
    """The text between the marks. `record`: the file's name. Raises ValueError without rows over all sets."""
    batch = document["batch_sizes"][0]
    cells = {(r["set"], r["temperature"], r["method"]): r for r in document["results"] if r["batch"] == batch}
    sets, temperatures, methods = (list(dict.fromkeys(key[i] for key in cells)) for i in range(3))
    if ALL not in sets:
        raise ValueError("a comparison of one set has no row over all sets; compare more sets")
    sets.remove(ALL)

    def shown(row: dict[str, Any] | None) -> list[str]:
        if row is None:
            return ["", "", ""]
        speed = f"{row['tokens_per_second']['value']:.1f}"
        return [speed, interval_text(row["speed_up"], 2), f"{row['accept_length']:.2f}"]

    columns = [f"T = {t:g}: {name}" for t in temperatures for name in ("tokens/s", "speed-up", "accept length")]
    whole = [
        [method, *(cell for t in temperatures for cell in shown(cells.get((ALL, t, method))))] for method in methods
    ]
    parts = [table([["over all sets", *columns], *whole])]
    for t in temperatures:
        rows = [[method, *(cells.get((name, t, method)) for name in sets)] for method in methods]
        speeds = [
            [method, *("" if row is None else f"{row['speed_up']['value']:.2f}" for row in cells_of_sets)]
            for method, *cells_of_sets in rows
            if any(cells_of_sets)
        ]
        parts.append(table([[f"speed-up, T = {t:g}", *titles(sets)], *speeds]))
    texts = dict.fromkeys(("equal", "near tie", "different"), 0)
    for (name, *_), row in cells.items():
        for verdict in texts:
            texts[verdict] += row["texts"][verdict] if name != ALL else 0
    head = (
        f"{document['processor']}, {document['cpus']} cores, commit {document['commit'][:7]}, speed-ups over "
        f"{document['baseline']}, in brackets 95% intervals\n([record](../benchmarks/results/{record})):\n\n"
        f"```sh\n{document['command']}\n```\n"
    )
    tail = ", ".join(f"{count} {verdict}" for verdict, count in texts.items())
    return "\n".join([head, *parts, f"Turns by how their text compares with {document['baseline']}'s: {tail}.\n"])


def put(page: str, text: str, begin: str = BEGIN) -> str:
    """The page with this text between the marks. Raises ValueError if they are missing."""
    before, start, rest = page.partition(begin)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the page has no {begin} followed by {END}")
    return f"{before}{begin}\n\n{text}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Put a comparison of specjax bench into docs/performance.md")
    parser.add_argument("results", type=Path, help="results.json of specjax bench")
    parser.add_argument("--page", type=Path, default=PAGE, help="default: docs/performance.md")
    parser.add_argument("--records", type=Path, default=RESULTS, help="folder of the copy")
    args = parser.parse_args()
    document = json.loads(args.results.read_text(encoding="utf-8"))
    record = args.records / f"bench-full-{document['date'][:10]}.json"
    changed = put(args.page.read_text(encoding="utf-8"), section(document, record.name))
    shutil.copyfile(args.results, record)
    args.page.write_text(changed, encoding="utf-8")
    print(f"wrote {record} and {args.page}")


if __name__ == "__main__":
    main()
