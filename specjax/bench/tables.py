"""The table of a comparison as CSV, Markdown and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]

COLUMNS = (
    "set", "temperature", "batch", "method", "conversations", "repeats", "tokens", "seconds", "tokens_per_second",
    "decode_tokens_per_second", "speed_up", "accept_length", "acceptance_by_depth", "verify_steps", "drafted_steps",
    "phase_ms", "texts",
)  # fmt: skip


def as_csv(rows: Sequence[Row]) -> str:
    """One line a row; intervals and phases take a column for each of their numbers."""
    return csv_text([_flat(row) for row in rows])


def csv_text(flat: Sequence[Row]) -> str:
    """Rows of plain values, each column that one of them has."""
    names = list(dict.fromkeys(name for row in flat for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def _flat(row: Row) -> Row:
    found: Row = {}
    for name in COLUMNS:
        value = row[name]
        if isinstance(value, dict):
            found |= {name if key == "value" else f"{name}_{key}".replace(" ", "_"): one for key, one in value.items()}
        elif isinstance(value, list):
            found[name] = " ".join(map(str, value))
        elif value is not None:
            found[name] = value
    return found


def interval(value: dict[str, float | None], digits: int) -> str:
    """`41.2 (39.8 to 42.5)`"""
    text = f"{value['value']:.{digits}f}"
    return text if value["low"] is None else f"{text} ({value['low']:.{digits}f} to {value['high']:.{digits}f})"


HEADER = (
    "set", "T", "batch", "method", "tokens/s", "speed-up", "accept length", "acceptance by depth, %", "drafted steps",
    "draft ms", "verify ms", "equal texts",
)  # fmt: skip


def cells(row: Row) -> list[str]:
    """A row as text, in the order of `HEADER`."""
    steps, phases, texts = row["verify_steps"], row["phase_ms"] or {}, row["texts"]
    compared = sum(count for verdict, count in texts.items() if verdict != "other prompt")
    near = f" + {texts['near tie']} near ties" if texts["near tie"] else ""
    other = f", {texts['other prompt']} with another prompt" if texts["other prompt"] else ""
    return [
        row["set"],
        f"{row['temperature']:g}",
        str(row["batch"]),
        row["method"],
        interval(row["tokens_per_second"], 1),
        interval(row["speed_up"], 2),
        f"{row['accept_length']:.2f}",
        " ".join(f"{100 * share:.0f}" for share in row["acceptance_by_depth"]),
        f"{row['drafted_steps'] / steps:.0%}" if steps and row["drafted_steps"] is not None else "",
        f"{phases['draft']:.1f}" if "draft" in phases else "",
        f"{phases['verify']:.1f}" if "verify" in phases else "",
        f"{texts['equal']} of {compared}{near}{other}" if compared + texts["other prompt"] else "",
    ]


def as_markdown(rows: Sequence[Row]) -> str:
    """The whole table in Markdown, aligned to be readable as text."""
    table = [list(HEADER), *(cells(row) for row in rows)]
    used = [i for i in range(len(HEADER)) if any(line[i] for line in table[1:])]
    return aligned([[line[i] for i in used] for line in table])


def aligned(table: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, its columns padded. The first line is the header."""
    table = [[cell.replace("|", "\\|") for cell in line] for line in table]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in table
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"


def as_text(rows: Sequence[Row]) -> str:
    """The table for a terminal: without the interval of tokens/s, acceptance by depth and phases."""
    table = [["set", "T", "batch", "method", "tokens/s", "speed-up", "accept", "drafted", "equal"]]
    for row in rows:
        named, texts = dict(zip(HEADER, cells(row), strict=True)), row["texts"]
        equal = f"{texts['equal']}/{total}" if (total := sum(texts.values())) else ""
        rate = f"{row['tokens_per_second']['value']:.1f}"
        table.append(
            [*(named[name] for name in HEADER[:4]), rate, named["speed-up"], named["accept length"],
             named["drafted steps"], equal]
        )  # fmt: skip
    return columns(table, shrinking=(3, 0))


TERMINAL = 100  # columns


def columns(table: Sequence[Sequence[str]], *, shrinking: Sequence[int] = ()) -> str:
    """Formats a table, the header first, as text of at most `TERMINAL` columns. Cells of the columns `shrinking` lose
    their middle if it would be wider."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > TERMINAL and any(widths[place] > 8 for place in shrinking):
        widths[max(shrinking, key=widths.__getitem__)] -= 1

    def padded(text: str, width: int) -> str:
        end = (width - 1) // 2
        return text.ljust(width) if len(text) <= width else f"{text[: width - end - 1]}…{text[-end:]}"

    lines = ("  ".join(map(padded, line, widths)).rstrip() for line in table)
    return "".join(f"{line}\n" for line in lines)


SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
}  # fmt: skip


def escaped(text: str) -> str:
    return "".join(SPECIAL.get(character, character) for character in text)


def titles(sets: Sequence[str]) -> list[str]:
    """Short names of sets: of `spec_bench/math_reasoning` the part, if no other set of these is called so."""
    short = [name.rpartition("/")[2] for name in sets]
    return [(one if short.count(one) == 1 else name).replace("_", " ") for one, name in zip(short, sets, strict=True)]


def as_latex(rows: Sequence[Row]) -> str:
    r"""A table for papers, with booktabs: a row for each method and temperature, two columns for each set, the speed-up
    and the accept length \tau. The best speed-up of a set and temperature is bold."""
    sets = list(dict.fromkeys(row["set"] for row in rows))
    keys = list(dict.fromkeys((row["temperature"], row["batch"]) for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    several = len({batch for _, batch in keys}) > 1
    by_cell = {(row["set"], row["temperature"], row["batch"], row["method"]): row for row in rows}
    lines = [
        r"% \usepackage{booktabs}",
        r"\begin{tabular}{ll" + "rr" * len(sets) + "}",
        r"\toprule",
        " & ".join(["", "", *(rf"\multicolumn{{2}}{{c}}{{{escaped(name)}}}" for name in titles(sets))]) + r" \\",
        " ".join(rf"\cmidrule(lr){{{3 + 2 * i}-{4 + 2 * i}}}" for i in range(len(sets))),
        " & ".join(["", "Method", *[r"Speed-up & $\tau$"] * len(sets)]) + r" \\",
    ]
    for temperature, batch in keys:
        lines.append(r"\midrule")
        label = f"$T={temperature:g}$" + (f", batch {batch}" if several else "")
        shown = lambda name, t=temperature, b=batch: by_cell.get((name[0], t, b, name[1]))  # noqa: E731
        best = {
            name: max((cell["speed_up"]["value"] for method in methods if (cell := shown((name, method)))), default=0)
            for name in sets
        }
        for method in methods:
            found = {name: shown((name, method)) for name in sets}
            if not any(found.values()):
                continue
            parts = [label, escaped(method)]
            for name, cell in found.items():
                if cell is None:
                    parts += ["--", "--"]
                    continue
                value = cell["speed_up"]["value"]
                text = f"{value:.2f}$\\times$"
                bold = value == best[name] and len(methods) > 1
                parts += [rf"\textbf{{{text}}}" if bold else text, f"{cell['accept_length']:.2f}"]
            lines.append(" & ".join(parts) + r" \\")
            label = ""
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"
