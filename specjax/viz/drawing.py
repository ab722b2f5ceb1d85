"""Draws draft trees as SVG: proposed tokens, the accepted path, and the token that the target drew at its end.

draw_tree(engine.generate(...).trees[0], tokenizer.decode).save("tree.svg")

    ┌─────┐     ┌─────┐     ╔═════╗     ╭╌╌╌╌╌╮
    │ the ├─────┤ cat ├═════╣ sat ╠╌╌╌╌╌┤ on  │    ═ accepted, ╌ drawn by the target, not proposed
    └─────┘  │  └─────┘     ╚═════╝     ╰╌╌╌╌╌╯
             │  ┌─────┐
             └──┤ dog │                             darker boxes are likelier under the draft
                └─────┘
"""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specjax.state import StepTree
from specjax.tree import NO_TOKEN

Text = Callable[[list[int]], str]

LONGEST = 14  # characters of a label; longer ones are cut

# In pixels. Labels have a font of fixed width, so their size is known without drawing them.
CHARACTER, PADDING, HEIGHT = 7.9, 9.0, 26.0
GAP, LINE, MARGIN, HEADING = 40.0, 54.0, 12.0, 30.0
LEGEND_WIDTH = 560.0
MEANINGS = {"accepted": "accepted", "drawn": "drawn by the target, not proposed", "proposed": "proposed, rejected"}

STYLE = """
svg { --ink: #1f2933; --quiet: #5f6b7a; --edge: #aab2bd; --draft: #4a90d9; --emitted: #d55e00; --root: #dfe3e8; }
@media (prefers-color-scheme: dark) {
svg { --ink: #e8ecf1; --quiet: #9aa5b4; --edge: #5a6472; --draft: #4a90d9; --emitted: #ff8c3a; --root: #39424e; } }
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: var(--ink); text-anchor: middle; }
path { fill: none; stroke: var(--edge); } rect { stroke: var(--edge); fill: var(--draft); }
.root rect { fill: var(--root); stroke: var(--quiet); }
.accepted rect, .accepted path { stroke: var(--emitted); stroke-width: 2.4; }
.drawn rect, .drawn path { fill: none; stroke: var(--emitted); stroke-width: 1.6; stroke-dasharray: 4 3; }
.accepted .token, .drawn .token { font-weight: bold; }
.proposed .token, .note { fill: var(--quiet); } .note { font-size: 10px; }
.heading, .legend { font-family: system-ui, sans-serif; text-anchor: start; } .legend { font-size: 12px; }
"""


class Drawing(str):
    """An SVG document, which notebooks show as a picture."""

    def _repr_svg_(self) -> str:
        return str(self)

    def save(self, file: str | Path) -> None:
        Path(file).write_text(self, encoding="utf-8")


def label(token: int, text: Text | None) -> str:
    """Formats a token for a box: short, with visible white space."""
    if text is None:
        return str(token)
    shown = text([token]).replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")
    shown = "".join(c if c.isprintable() else "�" for c in shown) or "∅"
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"


class Layout(NamedTuple):
    """Boxes in pixels: one for each node, and one for the token drawn at the end of the path."""

    labels: list[str]
    parents: list[int]
    x: list[float]  # of the middle
    y: list[float]  # downwards
    half: list[float]  # half the width of each box
    size: tuple[float, float]  # of all


def layout(tree: StepTree, text: Text | None = None) -> Layout:
    """Places children below one another in draft order, and each parent in the middle of its children."""
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

    y, rows, stack = [0.0] * len(labels), 0, [0]
    while stack:  # no recursion: a chain may be deeper than Python's stack
        node = stack.pop()
        stack += reversed(children[node])
        if not children[node]:
            y[node], rows = rows * LINE, rows + 1
    for node in reversed(range(len(labels))):  # children come after their parent
        if children[node]:
            y[node] = (y[children[node][0]] + y[children[node][-1]]) / 2

    # Wide characters take two columns of a font of fixed width.
    lengths = (sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in shown) for shown in labels)
    half = [length * CHARACTER / 2 + PADDING for length in lengths]
    columns, right = [], 0.0
    for level in range(max(depth) + 1):
        widest = max(half[node] for node in range(len(depth)) if depth[node] == level)
        columns.append(right + widest)
        right += 2 * widest + GAP
    return Layout(labels, parents, [columns[d] for d in depth], y, half, (right - GAP, (rows - 1) * LINE + HEIGHT + 18))


def shades(tree: StepTree) -> tuple[list[float], list[str]]:
    """Computes each node's darkness, from 0 to 1, and its note: a probability, or the rank of a score by n-grams."""
    scores = tree.scores.astype(np.float64)
    if not all(score.is_integer() for score in scores):  # log-probabilities are not whole numbers
        chance = np.exp(np.minimum(scores, 0.0))
        return chance.tolist(), [f"{100 * p:.0f}%" if p >= 0.005 else "<1%" for p in chance]
    order = np.argsort(np.argsort(-scores, kind="stable"))  # the root's score is 0: always the first
    return (1 - order / max(len(scores), 2)).tolist(), [f"#{place}" for place in order]


def draw_tree(tree: StepTree, text: Text | None = None, *, title: str | None = None) -> Drawing:
    """Draws the tree of one step.

    `tree` is from `specjax.step_trees` or `Completion.trees`. `text` decodes token ids; None shows the ids.
    """
    return _document([(tree, title)], text)


def draw_steps(trees: Sequence[StepTree], text: Text | None = None, *, first: int = 1) -> Drawing:
    """Draws consecutive steps below one another. `first`: number of the first step in the titles."""
    titles = [
        f"step {number}: {tree.accepted} of {len(tree.tokens) - 1} drafts accepted, {len(tree.emitted)} emitted"
        for number, tree in enumerate(trees, start=first)
    ]
    return _document(list(zip(trees, titles, strict=True)), text)


def _document(steps: Sequence[tuple[StepTree, str | None]], text: Text | None) -> Drawing:
    wide, top, parts = LEGEND_WIDTH, MARGIN, []
    for tree, title in steps:
        if title:
            parts.append(f'<text class="heading" x="{MARGIN}" y="{top + 12:.0f}">{html.escape(title)}</text>')
            top += HEADING
        place = layout(tree, text)
        parts.append(f'<g transform="translate({MARGIN},{top + HEIGHT / 2:.1f})">')
        parts += _elements(tree, place, *shades(tree))
        parts.append("</g>")
        wide, top = max(wide, place.size[0]), top + place.size[1] + MARGIN
    x = MARGIN
    for kind, meaning in MEANINGS.items():
        parts.append(f'<g class="{kind}"><path d="M{x:.0f} {top + 8:.0f}h24"/></g>')
        parts.append(f'<text class="legend" x="{x + 32:.0f}" y="{top + 12:.0f}">{meaning}</text>')
        x += 32 + 7 * len(meaning) + 24
    top += HEADING
    size = f'width="{wide + 2 * MARGIN:.0f}" height="{top:.0f}" viewBox="0 0 {wide + 2 * MARGIN:.0f} {top:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>'
    title = "<title>Draft trees, verified</title>"
    return Drawing("\n".join([head, title, f"<style>{STYLE}</style>", *parts, "</svg>", ""]))


def _elements(tree: StepTree, place: Layout, dark: list[float], notes: list[str]) -> list[str]:
    """Makes one SVG group per node: the line from its parent, its box, its label and its note."""
    elements: list[str] = []
    kinds = ["root", *("accepted" if node in tree.path else "proposed" for node in range(1, len(dark))), "drawn"]
    boxes = zip(kinds, place.labels, place.x, place.y, place.half, strict=False)  # the drawn token may be missing
    for node, (kind, shown, x, y, half) in enumerate(boxes):
        elements.append(f'<g class="{kind}">')
        if node:
            parent = place.parents[node]
            start, end = place.x[parent] + place.half[parent], x - half
            middle, above = (start + end) / 2, place.y[parent]
            curve = f"C{middle:.1f} {above:.1f} {middle:.1f} {y:.1f} {end:.1f} {y:.1f}"
            elements.append(f'<path d="M{start:.1f} {above:.1f}{curve}"/>')
        is_draft = kind in ("accepted", "proposed")
        strength = f' fill-opacity="{0.06 + 0.44 * dark[node]:.2f}"' if is_draft else ""
        box = f'x="{x - half:.1f}" y="{y - HEIGHT / 2:.1f}" width="{2 * half:.1f}" height="{HEIGHT}" rx="5"'
        elements.append(f"<rect {box}{strength}/>")
        elements.append(f'<text class="token" x="{x:.1f}" y="{y + 4.5:.1f}">{html.escape(shown)}</text>')
        if is_draft:
            below = y + HEIGHT / 2 + 12
            elements.append(f'<text class="note" x="{x:.1f}" y="{below:.1f}">{html.escape(notes[node])}</text>')
        elements.append("</g>")
    return elements
