"""Pictures of a comparison, and the heat map of a grid of trees. They need matplotlib, an extra."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.bench.results import ALL, Sample, curve
from specjax.bench.tables import titles

INSTALL = "pip install 'specjax[bench]'"
KINDS = ("svg", "png", "pdf")
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
"""Of methods, in their order: those of Okabe and Ito, which colour-blind people can tell apart."""
LINES, HATCHES = ("-", "--", ":", "-."), ("", "////", "....", "xxxx")
"""Of the first eight methods, of the next eight, and so on, which have the same colours."""


class Style(NamedTuple):
    """How a method is drawn in all pictures."""

    color: str
    line: str
    hatch: str


def styles(methods: Sequence[str]) -> dict[str, Style]:
    """A style of its own for each of up to 32 methods."""
    found = {}
    for index, method in enumerate(methods):
        turn = index // len(COLORS) % len(LINES)
        found[method] = Style(COLORS[index % len(COLORS)], LINES[turn], HATCHES[turn])
    return found


def label(name: str) -> str:
    """As matplotlib shows it: no formula, and no label that a legend leaves out."""
    shown = name.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def kind_to_draw(asked: str) -> str | None:
    """The format of the pictures that `--plots` selects; None: no pictures. If matplotlib is missing, prints a warning
    before anything is measured, or raises ValueError if the format was named."""
    if asked == "none":
        return None
    if available():
        return "svg" if asked == "auto" else asked
    if asked != "auto":
        raise ValueError(f"--plots {asked} needs matplotlib, which is not installed: {INSTALL}")
    print(f"There will be no pictures: matplotlib is not installed ({INSTALL})", file=sys.stderr)
    return None


def heat_map(
    panels: Mapping[str, Sequence[tuple[str, str, float]]], marked: Mapping[str, Sequence[tuple[str, str]]],
    labels: tuple[str, str],
) -> Any:  # fmt: skip
    """A figure of speed-ups over no drafts, one panel a title.

    Args:
        panels: title -> (row, column, speed-up); rows and columns stand in the order in which they come.
        marked: title -> (row, column) of the points that were run, which get a frame.
        labels: of rows and columns.
    """
    from matplotlib.figure import Figure

    values = [value for cells in panels.values() for *_, value in cells]
    span = max(0.05, *(abs(value - 1) for value in values))
    across = min(len(panels), 4)
    down = -(-len(panels) // across)
    sizes = [[len({cell[i] for cell in cells}) for cells in panels.values()] for i in (0, 1)]
    size = across * (1.2 + 0.5 * max(sizes[1])) + 0.8, down * (1.1 + 0.42 * max(sizes[0]))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    image: Any = None
    for axes, (title, cells) in zip(grid.flat, panels.items(), strict=False):
        rows, columns = (list(dict.fromkeys(cell[i] for cell in cells)) for i in (0, 1))
        shown = np.full((len(rows), len(columns)), np.nan)
        for row, column, value in cells:
            shown[rows.index(row), columns.index(column)] = value
            axes.text(columns.index(column), rows.index(row), f"{value:.2f}", ha="center", va="center", fontsize=7)
        image = axes.imshow(shown, cmap="RdYlGn", vmin=1 - span, vmax=1 + span, aspect="auto")
        for row, column in marked.get(title, ()):
            corner = columns.index(column) - 0.5, rows.index(row) - 0.5
            axes.add_patch(_rectangle(corner))
        axes.set_xticks(range(len(columns)), columns, fontsize=8)
        axes.set_yticks(range(len(rows)), rows, fontsize=8)
        axes.set_ylabel(labels[0], fontsize=8)
        axes.set_xlabel(labels[1], fontsize=8)
        axes.set_title(title, fontsize=9)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    figure.colorbar(image, ax=grid, label="predicted speed-up; framed: run", shrink=0.8)
    return figure


def _rectangle(corner: tuple[float, float]) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, 1, 1, fill=False, edgecolor="black", linewidth=1.6)


WIDEST = 11.0  # inches of a figure; more sets than fit stand in further rows of axes


def _figure(width: float, height: float, rows: int = 1) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height * rows), layout="constrained")
    found = [*figure.subplots(rows, squeeze=False, sharey=True).flat]
    for axes in found:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, found


def _legend(figure: Any) -> None:
    """Above the axes, where it hides nothing, in as many columns as the longest name allows. The figure grows by it."""
    handles, names = figure.axes[0].get_legend_handles_labels()  # the other axes have the same
    inches = 0.5 + 0.07 * max(map(len, names))  # of a column, at this size
    columns = max(1, min(len(names), int(figure.get_figwidth() / inches)))
    figure.legend(handles, names, fontsize=8, frameon=False, ncols=columns, loc="outside upper center")
    figure.set_figheight(figure.get_figheight() + 0.18 * -(-len(names) // columns))


def draw(
    folder: Path, kind: str, rows: Sequence[dict[str, Any]], samples: Mapping[str, Sequence[Sample]]
) -> list[Path]:
    """Writes speed-ups, acceptance by depth and time against tokens, one of each for a temperature and batch size."""
    found: list[Path] = []
    methods = list(dict.fromkeys(row["method"] for row in rows))
    looks = styles(methods)
    for temperature, batch in dict.fromkeys((row["temperature"], row["batch"]) for row in rows):
        own = [row for row in rows if (row["temperature"], row["batch"]) == (temperature, batch)]
        several = len(own) < len(rows)
        suffix = f"-T{temperature:g}-batch{batch}" if several else ""
        where = f"temperature {temperature:g}, batch size {batch}"
        whole = [row for row in own if row["set"] == ALL] or own
        whole = [row for row in whole if row["set"] == whole[0]["set"]]
        for name, figure in (
            ("speed-up", _speed_ups(own, where, looks)),
            ("acceptance-by-depth", _acceptance(whole, where, looks)),
            ("time-against-tokens", _times(whole, samples, where, looks)),
        ):
            if figure is not None:
                file = folder / f"{name}{suffix}.{kind}"
                figure.savefig(file, dpi=150)
                found.append(file)
    return found


def _speed_ups(rows: Sequence[dict[str, Any]], where: str, looks: Mapping[str, Style]) -> Any:
    """Bars, grouped by set, with the confidence intervals."""
    sets, methods = (list(dict.fromkeys(row[name] for row in rows)) for name in ("set", "method"))
    inches = min(0.35, max(0.16, (WIDEST - 1) / len(sets) / (len(methods) + 1.5))) * (len(methods) + 1.5)  # of a set
    lines = -(-len(sets) // max(1, int((WIDEST - 1) / inches)))
    across = -(-len(sets) // lines)
    figure, panels = _figure(min(max(6.0, across * inches + 1), WIDEST), 3.2, lines)
    width = 0.8 / len(methods)
    shown = dict(zip(sets, titles(sets), strict=True))
    for line, axes in enumerate(panels):
        part = sets[line * across : (line + 1) * across]
        for index, method in enumerate(methods):
            own = {row["set"]: row["speed_up"] for row in rows if row["method"] == method and row["set"] in part}
            places = [i + (index - (len(methods) - 1) / 2) * width for i, name in enumerate(part) if name in own]
            found = [own[name] for name in part if name in own]
            values = np.array([one["value"] for one in found])
            # Of one conversation there is no interval, and none is drawn.
            ends = np.array([[one[end] for one in found] for end in ("low", "high")], float)
            color, _, hatch = looks[method]
            axes.bar(
                places,
                values,
                width * 0.92,
                label=label(method),
                color=color,
                hatch=hatch,
                edgecolor="white",
                linewidth=0,
            )
            errors = np.maximum([values - ends[0], ends[1] - values], 0)
            axes.errorbar(places, values, errors, fmt="none", ecolor="black", elinewidth=0.8, capsize=2)
        axes.axhline(1, color="0.4", linewidth=0.8, linestyle="--")
        tilted = {"rotation": 20, "ha": "right"} if inches < 1.2 else {}
        axes.set_xticks(range(len(part)), [label(shown[name]) for name in part], **tilted)
        axes.set_xlim(-0.55, across - 0.45)
        axes.set_ylabel("speed-up")
    panels[0].set_title(where, fontsize=10)
    _legend(figure)
    return figure


def _acceptance(rows: Sequence[dict[str, Any]], where: str, looks: Mapping[str, Style]) -> Any:
    figure, (axes,) = _figure(5.0, 3.3)
    deepest = 0
    for row in rows:
        shares = row["acceptance_by_depth"]
        if any(shares):
            deepest = max(deepest, len(shares))
            name = f"{label(row['method'])} (accept length {row['accept_length']:.2f})"
            color, line, _ = looks[row["method"]]
            depths = range(1, len(shares) + 1)
            axes.plot(depths, shares, color=color, linestyle=line, marker="o", markersize=3, label=name)
    if not deepest:
        return None
    axes.set_xticks(range(1, deepest + 1))
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("depth of the draft")
    axes.set_ylabel("accepted, where its parent was")
    axes.set_title(where, fontsize=10)
    _legend(figure)
    return figure


def _times(
    rows: Sequence[dict[str, Any]], samples: Mapping[str, Sequence[Sample]], where: str, looks: Mapping[str, Style]
) -> Any:
    figure, (axes,) = _figure(5.0, 3.3)
    drawn = False
    for row in rows:
        title = " ".join(str(row[name]) for name in ("set", "temperature", "batch", "method"))
        own = samples[title]
        most = max((int(tokens) for sample in own for tokens, _ in sample.curve), default=0)
        points = curve(own, range(1, most + 1, max(most // 32, 1)))
        if points:
            times, counts = [time for _, time in points], [count for count, _ in points]
            color, line, _ = looks[row["method"]]
            axes.plot(times, counts, color=color, linestyle=line, label=label(row["method"]))
            drawn = True
    if not drawn:
        return None
    axes.set_xlabel("seconds since the request")
    axes.set_ylabel("tokens")
    axes.set_title(f"mean over turns; {where}", fontsize=10)
    _legend(figure)
    return figure
