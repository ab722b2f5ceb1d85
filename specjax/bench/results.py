"""Figures of runs: one row for each method, set, temperature and batch size; tables and pictures of the rows.

Intervals are percentiles of a bootstrap with a fixed seed. It resamples groups of conversations that ran together
(single conversations at batch size 1) with all their repeats, because runs of one prompt are not independent. Speed-ups
are resampled in pairs with the baseline's runs of the same groups.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from specjax.bench.sets import ALL

RESAMPLES = 2000
LEVEL = 0.95
VERDICTS = ("equal", "near tie", "different", "other prompt")
"""Results of comparing a turn's text with the baseline's. Texts after another prompt are not compared."""

Row = dict[str, Any]
Interval = dict[str, float | None]
"""`value`, `low` and `high`; one group has no bounds (None)."""


@dataclass(frozen=True)
class Sample:
    """One method's run of a group of conversations with all turns."""

    method: str
    group: str  # ids of the conversations
    repeat: int
    seconds: float  # end to end, prompts included
    tokens: int
    decode_seconds: float  # after the first tokens
    decoded: int  # tokens in these
    histogram: list[int]  # forwards by number of accepted drafts
    drafted_steps: int
    nodes: dict[str, int]  # number of steps of the batch, by N
    texts: dict[str, int]  # turns by verdict
    conversations: int = 1


def bootstrap(statistic: Callable[[np.ndarray], np.ndarray], count: int) -> Interval:
    """`statistic` maps indices of groups [n, count] to values [n]."""
    value = round(float(statistic(np.arange(count)[None, :])[0]), 4)
    if count < 2:
        return {"value": value, "low": None, "high": None}
    drawn = np.random.default_rng(0).integers(0, count, (RESAMPLES, count))
    low, high = np.quantile(statistic(drawn), [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).round(4).tolist()
    return {"value": value, "low": low, "high": high}


def _rate(samples: Sequence[Sample], groups: Sequence[str], *, decode: bool = False) -> Any:
    """Tokens per second, as a statistic; with `decode` after the first tokens."""
    place = {group: index for index, group in enumerate(groups)}
    sums = np.zeros((2, len(groups)))
    for sample in samples:
        counted = (sample.decoded, sample.decode_seconds) if decode else (sample.tokens, sample.seconds)
        sums[:, place[sample.group]] += counted
    return lambda drawn: sums[0][drawn].sum(axis=1) / np.maximum(sums[1][drawn].sum(axis=1), 1e-9)


def rate(samples: Sequence[Sample], *, decode: bool = False) -> Interval:
    """Tokens per second; with `decode` after the first tokens."""
    groups = list(dict.fromkeys(sample.group for sample in samples))
    return bootstrap(_rate(samples, groups, decode=decode), len(groups))


def speed_up(samples: Sequence[Sample], baseline: Sequence[Sample], *, decode: bool = False) -> Interval:
    """Tokens per second relative to the baseline's runs of the same groups."""
    groups = list(dict.fromkeys(sample.group for sample in samples))
    ours, theirs = (_rate(runs, groups, decode=decode) for runs in (samples, baseline))
    return bootstrap(lambda drawn: ours(drawn) / np.maximum(theirs(drawn), 1e-9), len(groups))


def add_histograms(histograms: Iterable[Sequence[int]]) -> list[int]:
    sums = [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)]
    while len(sums) > 1 and not sums[-1]:
        sums.pop()
    return sums


def accept_length(histogram: Sequence[int]) -> float:
    """Emitted tokens per verification, the bonus token included; 1 without verifications."""
    forwards = sum(histogram)
    return sum(count * (drafts + 1) for drafts, count in enumerate(histogram)) / forwards if forwards else 1.0


def by_depth(histogram: Sequence[int]) -> list[float]:
    """Share of the steps that accepted d drafts among those with at least d - 1, for each depth d from 1."""
    reached = [sum(histogram[depth:]) for depth in range(len(histogram))]
    return [round(deeper / before, 4) for before, deeper in pairwise(reached) if before]


def by_size(samples: Sequence[Sample]) -> list[str]:
    """The N of the samples' steps, ascending."""
    return sorted({n for sample in samples for n in sample.nodes}, key=int)


def row(samples: Sequence[Sample], baseline: Sequence[Sample], *, where: Row) -> Row:
    """One row of the table. `where`: set, temperature, batch size and method."""
    histogram = add_histograms(sample.histogram for sample in samples)
    return where | {
        "conversations": sum({sample.group: sample.conversations for sample in samples}.values()),
        "repeats": len({sample.repeat for sample in samples}),
        "tokens": sum(sample.tokens for sample in samples),
        "seconds": round(sum(sample.seconds for sample in samples), 3),
        "tokens_per_second": rate(samples),
        "speed_up": speed_up(samples, baseline),
        "decode_tokens_per_second": rate(samples, decode=True),
        "decode_speed_up": speed_up(samples, baseline, decode=True),
        "accept_length": round(accept_length(histogram), 4),
        "acceptance_by_depth": by_depth(histogram),
        "histogram": histogram,
        "verify_steps": sum(histogram),
        "drafted_steps": sum(sample.drafted_steps for sample in samples),
        "nodes": {n: sum(sample.nodes.get(n, 0) for sample in samples) for n in by_size(samples)},
        "texts": {verdict: sum(sample.texts.get(verdict, 0) for sample in samples) for verdict in VERDICTS},
    }


HEADER = (
    "set", "T", "batch", "method", "tokens/s", "speed-up", "decode tokens/s", "decode speed-up", "accept length",
    "acceptance by depth, %", "nodes", "equal texts",
)  # fmt: skip
TERMINAL_COLUMNS = 100


def interval_text(interval: Interval, digits: int) -> str:
    """`41.2 (39.8 to 42.5)`"""
    value, low, high = ("" if number is None else f"{number:.{digits}f}" for number in interval.values())
    return f"{value} ({low} to {high})" if low else value


def cells(row: Row) -> list[str]:
    """A row as text, in the order of `HEADER`."""
    steps, texts = sum(row["nodes"].values()), row["texts"]
    compared = sum(count for verdict, count in texts.items() if verdict != "other prompt")
    near = f" + {texts['near tie']} near ties" if texts["near tie"] else ""
    other = f", {texts['other prompt']} with another prompt" if texts["other prompt"] else ""
    return [
        row["set"],
        f"{row['temperature']:g}",
        str(row["batch"]),
        row["method"],
        interval_text(row["tokens_per_second"], 1),
        interval_text(row["speed_up"], 2),
        interval_text(row["decode_tokens_per_second"], 1),
        interval_text(row["decode_speed_up"], 2),
        f"{row['accept_length']:.2f}",
        " ".join(f"{100 * share:.0f}" for share in row["acceptance_by_depth"]),
        ", ".join(f"{n} {count / steps:.0%}" for n, count in row["nodes"].items()),
        f"{texts['equal']} of {compared}{near}{other}" if compared + texts["other prompt"] else "",
    ]


def as_markdown(rows: Sequence[Row]) -> str:
    """All columns that are not empty."""
    columns = [column for column in zip(HEADER, *map(cells, rows), strict=True) if any(column[1:])]
    return markdown_table(list(zip(*columns, strict=True)))


def markdown_table(table: Sequence[Sequence[str]]) -> str:
    """A table with padded columns. The first line is the header."""
    table = [[cell.replace("|", "\\|") for cell in line] for line in table]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [f"| {' | '.join(map(str.ljust, line, widths))} |\n" for line in table]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "".join([lines[0], f"|{rule}|\n", *lines[1:]])


def as_latex(rows: Sequence[Row]) -> str:
    """Speed-up and accept length of each method, in columns by set. The packages booktabs and multirow show it."""
    import pandas

    values, index = ["speed-up", "accept length"], ["T", "batch", "method"]
    sets = list(dict.fromkeys(row["set"] for row in rows))
    short = dict(zip(sets, titles(sets), strict=True))
    lines = [
        {"T": f"{row['temperature']:g}", "batch": row["batch"], "method": row["method"], "set": short[row["set"]]}
        | {"speed-up": row["speed_up"]["value"], "accept length": row["accept_length"]}
        for row in rows
    ]
    frame = pandas.DataFrame(lines)
    orders = {name: list(dict.fromkeys(frame[name])) for name in (*index, "set")}
    table = frame.pivot(index=index, columns="set", values=values).swaplevel(axis=1)
    table = table.reindex(columns=[(name, value) for name in orders["set"] for value in values])
    table = table.reindex([key for key in product(*(orders[name] for name in index)) if key in table.index])
    table.columns.names = [None, None]
    return table.to_latex(escape=True, float_format="%.2f", multicolumn_format="c")


def as_text(rows: Sequence[Row]) -> str:
    """The table for a terminal, without most intervals and acceptance by depth, and with the mean of N. Cells of sets
    and methods lose their middle if lines exceed `TERMINAL_COLUMNS`."""
    table = [["set", "T", "batch", "method", "tokens/s", "decode", "speed-up", "accept", "nodes", "equal"]]
    for row in rows:
        cell, compared = dict(zip(HEADER, cells(row), strict=True)), sum(row["texts"].values())
        rates = [f"{row[name]['value']:.1f}" for name in ("tokens_per_second", "decode_tokens_per_second")]
        steps = max(sum(row["nodes"].values()), 1)
        nodes = f"{sum(int(n) * count for n, count in row['nodes'].items()) / steps:.1f}"
        equal = f"{row['texts']['equal']}/{compared}" if compared else ""
        table.append(
            [*(cell[name] for name in HEADER[:4]), *rates, cell["speed-up"], cell["accept length"], nodes, equal]
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > TERMINAL_COLUMNS and max(widths[0], widths[3]) > 8:
        widths[max((0, 3), key=widths.__getitem__)] -= 1

    def padded(text: str, width: int) -> str:
        end = (width - 1) // 2
        return text.ljust(width) if len(text) <= width else f"{text[: width - end - 1]}…{text[-end:]}"

    return "".join(f"{'  '.join(map(padded, line, widths)).rstrip()}\n" for line in table)


def titles(sets: Sequence[str]) -> list[str]:
    """Short titles of sets: the category of `spec_bench/math_reasoning`, unless another set has the same title."""
    short = [name.rpartition("/")[2] for name in sets]
    pairs = zip(short, sets, strict=True)
    return [(title if short.count(title) == 1 else name).replace("_", " ") for title, name in pairs]


PICTURES = ("svg", "png", "pdf")
INSTALL = "pip install -e '.[bench]'"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
"""By Okabe and Ito: colour-blind people can distinguish them."""
HATCHES, LINES = ("", "////", "....", "xxxx"), ("-", "--", ":", "-.")  # for methods that share a colour


def picture_format(option: str) -> str | None:
    """The format for a value of `--plots`; None: no pictures. Without matplotlib it prints a note for `auto` and raises
    ValueError for a named format."""
    if option == "none" or importlib.util.find_spec("matplotlib") is not None:
        return {"none": None, "auto": "svg"}.get(option, option)
    if option != "auto":
        raise ValueError(f"--plots {option} needs matplotlib, which is not installed: {INSTALL}")
    print(f"There will be no pictures: matplotlib is not installed ({INSTALL})", file=sys.stderr)
    return None


def draw(folder: Path, kind: str, rows: Sequence[Row]) -> list[Path]:
    """Writes a picture for each temperature and batch size: speed-ups by set, and acceptance by depth over all sets."""
    from matplotlib.figure import Figure

    files: list[Path] = []
    for case in dict.fromkeys((row["temperature"], row["batch"]) for row in rows):
        part = [row for row in rows if (row["temperature"], row["batch"]) == case]
        sets, methods = (list(dict.fromkeys(row[name] for row in part)) for name in ("set", "method"))
        height = 1.2 + 0.2 * len(methods) + 0.16 * len(sets) * (len(methods) + 1)
        figure = Figure(figsize=(9.0, max(3.5, height)), layout="constrained")
        bars, depths = figure.subplots(1, 2)
        for index, method in enumerate(methods):
            by_set = {row["set"]: row for row in part if row["method"] == method}
            color, turn = COLORS[index % len(COLORS)], index // len(COLORS) % len(LINES)
            places = [sets.index(name) + 0.8 * (index + 0.5) / len(methods) - 0.4 for name in by_set]
            ends = [[row["speed_up"][key] for row in by_set.values()] for key in ("low", "value", "high")]
            low, values, high = np.array(ends, float)
            bars.barh(
                places, values, 0.75 / len(methods), xerr=np.maximum([values - low, high - values], 0),
                label=f" {method}".replace("$", r"\$"), color=color, hatch=HATCHES[turn], edgecolor="white",
                linewidth=0,
            )  # fmt: skip
            shares = by_set.get(ALL, next(iter(by_set.values())))["acceptance_by_depth"]
            depths.plot(range(1, len(shares) + 1), shares, color=color, linestyle=LINES[turn], marker="o")
        bars.axvline(1, color="0.4", linewidth=0.8, linestyle="--")
        bars.set(xlabel="speed-up", yticks=range(len(sets)), yticklabels=titles(sets))
        bars.invert_yaxis()
        depths.set(xlabel="depth of the draft", ylabel="accepted, if the parent was", ylim=(0, 1.03))
        depths.xaxis.get_major_locator().set_params(integer=True)
        figure.suptitle("temperature {:g}, batch size {}".format(*case), fontsize=10)
        figure.legend(loc="outside lower center", fontsize=8, frameon=False)
        files.append(folder / "picture-T{:g}-batch{}.{}".format(*case, kind))
        figure.savefig(files[-1], dpi=150)
    return files
