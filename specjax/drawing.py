"""A step's tree as a picture: what the draft proposed and how sure it was, what was accepted, what the target drew.

Needs matplotlib (the extra `notebooks`), which is imported only when something is drawn. notebooks/01_draft_trees uses
this.

    the ── cat ━━ sat ┅┅ on        boxes from left to right, a column for each depth
       └── dog                     bold: accepted; dashed: drawn by the target, but not proposed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from specjax.inspection import StepTree
from specjax.tree import NO_TOKEN

Shade = Literal["probability", "order"]
Text = Callable[[list[int]], str]

EMITTED = "#d55e00"  # Okabe and Ito's vermilion: told from the blues by every kind of colour vision
EDGE, QUIET, INK = "#b8bec6", "#6b7280", "#1f2933"
LONGEST = 14
"""Characters of a label; longer ones are cut."""

# A layout's unit is one character of the labels' font, which is of fixed width, so that a label's size is known without
# drawing it. A character is 0.6 font sizes wide.
UNIT = 0.6
GAP, PADDING, LINE = 3.4, 1.5, 5.8
FONT = 10.0
INCH = 72 / (FONT * UNIT)
"""Units in an inch."""
LEGEND_INCHES = 7.0


def label(token: int, text: Text | None) -> str:
    """A token for a box: spaces and line breaks visible, and short."""
    if text is None:
        return str(token)
    shown = text([token]).replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")
    shown = "".join(c if c.isprintable() else "�" for c in shown) or "∅"
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"


class Layout(NamedTuple):
    """Where the boxes go, in characters. One entry more than nodes: the token that ended the walk, if there is one."""

    labels: list[str]
    parents: list[int]
    x: list[float]
    y: list[float]  # downwards
    half: list[float]  # half the width of each box
    size: tuple[float, float]  # of all


def layout(tree: StepTree, text: Text | None = None) -> Layout:
    """Children below one another in the draft's order, a parent in the middle of them; columns as wide as needed."""
    labels = [label(int(token), text) for token in tree.tokens]
    parents, depth = tree.parents.tolist(), tree.depth.tolist()
    last = int(tree.path[-1])
    if tree.drawn[last] != NO_TOKEN:
        labels.append(label(int(tree.drawn[last]), text))
        parents.append(last)
        depth.append(depth[last] + 1)
    children: list[list[int]] = [[] for _ in labels]
    for node in range(1, len(labels)):
        children[parents[node]].append(node)

    y, rows = [0.0] * len(labels), 0
    stack = [(0, False)]
    while stack:  # not by recursion: a chain may be deeper than Python's stack
        node, seen = stack.pop()
        if seen:
            y[node] = (y[children[node][0]] + y[children[node][-1]]) / 2
        elif children[node]:
            stack.append((node, True))
            stack += [(child, False) for child in reversed(children[node])]
        else:
            y[node] = rows * LINE
            rows += 1

    half = [(len(shown) + PADDING) / 2 for shown in labels]
    widest = [max(half[n] for n in range(len(labels)) if depth[n] == level) for level in range(max(depth) + 1)]
    columns, right = [], 0.0
    for width in widest:
        columns.append(right + width)
        right += 2 * width + GAP
    return Layout(labels, parents, [columns[d] for d in depth], y, half, (right - GAP, rows * LINE))


def shades(tree: StepTree, shade: Shade) -> tuple[list[float], list[str]]:
    """Of each node, how dark it is (0 to 1) and what is written below it."""
    scores = tree.scores.astype(np.float64)
    if shade == "probability":
        chance = np.exp(np.minimum(scores, 0.0))
        return chance.tolist(), [f"{100 * p:.0f}%" if p >= 0.005 else "<1%" for p in chance]
    order = np.empty(len(scores), int)
    order[np.argsort(-scores, kind="stable")] = np.arange(len(scores))  # the root's score is 0: always the first
    return (1 - order / max(len(scores), 2)).tolist(), [f"#{place}" for place in order]


def draw_tree(
    tree: StepTree,
    text: Text | None = None,
    ax: Any = None,
    *,
    shade: Shade = "probability",
    title: str | None = None,
    legend: bool = True,
) -> Any:
    """Draws one step.

    Args:
        tree: from `specjax.inspection.step_trees`, or of `Completion.trees`.
        text: token ids to text, such as a tokenizer's `decode`; None: the ids themselves.
        ax: matplotlib axes; None: a new figure, as large as the tree needs.
        shade: what a box's colour and the number below it say. "probability": exp(score), for drafts whose scores are
            cumulative log-probabilities; "order": the place of the score among all, for n-grams, whose scores are
            ranks.

    Returns:
        The axes.
    """
    import matplotlib.pyplot as plt
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    place = layout(tree, text)
    if ax is None:
        _, (ax,) = _figure([place.size], title is not None)
    wide, high, font = _fit(place.size, ax)

    on_path, thin = set(tree.path.tolist()), font / FONT
    dark, below = shades(tree, shade)
    blues = plt.get_cmap("Blues")
    for node in range(1, len(place.labels)):
        parent = place.parents[node]
        start = (place.x[parent] + place.half[parent], place.y[parent])
        end = (place.x[node] - place.half[node], place.y[node])
        middle = (start[0] + end[0]) / 2
        curve = Path(
            [start, (middle, start[1]), (middle, end[1]), end], [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]
        )
        drawn, accepted = node == len(tree.tokens), node in on_path
        ax.add_patch(
            PathPatch(
                curve,
                facecolor="none",
                edgecolor=EMITTED if drawn or accepted else EDGE,
                linewidth=thin * (2.4 if accepted else 1.6 if drawn else 1.0),
                linestyle=(0, (2, 1.5)) if drawn else "solid",
                zorder=2 if drawn or accepted else 1,
                gid=_kind(tree, node),
            )
        )
    for node, shown in enumerate(place.labels):
        drawn, accepted = node == len(tree.tokens), node in on_path
        strength = 0.0 if drawn else dark[node]
        box = {
            "boxstyle": f"round,pad={PADDING / 2 * UNIT},rounding_size=0.35",
            "facecolor": "white" if drawn else "#e5e7eb" if node == 0 else blues(0.08 + 0.72 * strength),
            "edgecolor": EMITTED if drawn or (accepted and node) else QUIET if node == 0 else EDGE,
            "linewidth": thin * (2.2 if accepted and node else 1.6 if drawn else 1.0),
            "linestyle": (0, (2, 1.5)) if drawn else "solid",
        }
        ax.text(
            place.x[node],
            place.y[node],
            shown,
            ha="center",
            va="center",
            family="monospace",
            fontsize=font,
            color="white" if node and strength > 0.62 else INK,
            fontweight="bold" if drawn or (accepted and node) else "normal",
            bbox=box,
            parse_math=False,
            zorder=3,
            gid=_kind(tree, node),
        )
        if node and not drawn:
            ax.text(
                place.x[node],
                place.y[node] + 0.49 * LINE,
                below[node],
                ha="center",
                va="center",
                fontsize=0.7 * font,
                color=QUIET,
                zorder=3,
            )
    ax.set_xlim(-1, wide - 1)
    ax.set_ylim(high - 0.4 * LINE, -0.5 * LINE)
    ax.set_axis_off()
    if title:
        ax.set_title(title, loc="left", fontsize=FONT, color=INK)
    if legend:
        add_legend(ax)
    return ax


def _kind(tree: StepTree, node: int) -> str:
    """A tag on each box and line, by which others can find and restyle them."""
    if node == len(tree.tokens):
        return "drawn"
    return "root" if node == 0 else "accepted" if node in tree.path else "proposed"


def add_legend(ax: Any) -> None:
    """What the outlines mean, below the axes."""
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], color=EMITTED, linewidth=2.4, label="accepted: the target drew it"),
        Line2D(
            [], [], color=EMITTED, linewidth=1.6, linestyle=(0, (2, 1.5)), label="drawn by the target, not proposed"
        ),
        Line2D([], [], color=EDGE, linewidth=1.6, label="proposed, not accepted"),
    ]
    ax.legend(
        handles=lines,
        loc="upper left",
        bbox_to_anchor=(0, 0),
        ncols=3,
        frameon=False,
        fontsize=8,
        labelcolor=QUIET,
        borderaxespad=0.2,
    )


def draw_steps(
    trees: Sequence[StepTree], text: Text | None = None, *, shade: Shade = "probability", first: int = 1
) -> Any:
    """Consecutive steps below one another, at one scale. Returns the figure.

    Args:
        first: the number of the first of these steps, for the titles.
    """

    figure, axes = _figure([layout(tree, text).size for tree in trees], True)
    for number, (tree, ax) in enumerate(zip(trees, axes, strict=True), start=first):
        title = f"step {number}: {tree.accepted} of {len(tree.tokens) - 1} drafts accepted, {len(tree.emitted)} emitted"
        draw_tree(tree, text, ax, shade=shade, title=title, legend=number == first + len(trees) - 1)
    return figure


def _figure(sizes: Sequence[tuple[float, float]], titles: bool) -> tuple[Any, list[Any]]:
    """A figure with room for trees of these sizes below one another, and for the legend."""
    import matplotlib.pyplot as plt

    above, below, side = 0.4 if titles else 0.1, 0.35, 0.1
    heights = [(size[1] + 0.1 * LINE) / INCH for size in sizes]
    inner = max(LEGEND_INCHES, *((size[0] + 2) / INCH for size in sizes))
    wide, high = inner + 2 * side, sum(heights) + above * len(sizes) + below
    figure, axes, top = plt.figure(figsize=(wide, high)), [], high
    for height in heights:
        top -= above + height
        axes.append(figure.add_axes((side / wide, top / high, inner / wide, height / high)))
    return figure, axes


def _fit(size: tuple[float, float], ax: Any) -> tuple[float, float, float]:
    """How many units wide and high the axes are to be, and the font size that goes with it: smaller where the tree
    would not fit; a larger room stays empty."""
    box = ax.get_window_extent()
    points = 72 / ax.figure.dpi
    wide, high = size[0] + 2, size[1] + 0.1 * LINE
    font = min(FONT, box.width * points / (wide * UNIT), box.height * points / (high * UNIT))
    return max(wide, box.width * points / (font * UNIT)), max(high, box.height * points / (font * UNIT)), font
