"""The grid of draft trees that `specjax bench tune-tree` looks at.

A point is a tree with all its numbers. Points that propose the same drafts at a higher cost are left out: a tree of N
nodes is at most N - 1 deep, so more steps than that never change it, and top-k 1 is a chain of steps + 1 nodes.
Points whose drafts can be read off the same recorded candidates share a variant (see `specjax.bench.replay`): all that
have one top-k, or for NGRAM all that differ in the number of nodes alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from specjax.drafters import DraftOptions, Ngram
from specjax.drafters.options import ModelOptions
from specjax.drafters.tree_shape import TreeShape, candidates
from specjax.limits import range_of

MOST_NODES = int(range_of(TreeShape, "nodes").maximum or 0)


class Variant(NamedTuple):
    """A drafter that is recorded, with the largest tree that its points need."""

    name: str
    draft: DraftOptions


@dataclass(frozen=True)
class Point:
    """One tree.

    Attributes:
        draft: options that give every number.
        variant: name of the one in whose candidates its drafts are.
        depth: the deepest that a node can be.
        nodes: N, the root included.
    """

    draft: DraftOptions
    variant: str
    depth: int
    nodes: int

    @property
    def levels(self) -> int:
        """Levels that the drafter expands; without a model, those that its candidates have."""
        return self.draft.steps or self.depth if isinstance(self.draft, ModelOptions) else self.depth

    @property
    def numbers(self) -> dict[str, Any]:
        """What tables show: the options that differ between points."""
        draft = self.draft
        if isinstance(draft, Ngram):
            matched = {"strong match": draft.strong, "match type": draft.match_type, "max match": draft.max_match}
            weak = self.nodes if draft.weak_nodes is None else min(draft.weak_nodes, self.nodes)
            return {"draft tokens": self.nodes, "weak draft tokens": weak, **matched}
        assert isinstance(draft, ModelOptions)
        return {"steps": draft.steps, "top-k": draft.topk, "draft tokens": self.nodes}

    @property
    def name(self) -> str:
        shown = ", ".join(f"{name} {value}" for name, value in self.numbers.items())
        return f"{self.draft.algorithm} {shown}"


class Grid(NamedTuple):
    """All points, the current tree among them."""

    variants: tuple[Variant, ...]
    points: tuple[Point, ...]
    current: Point

    @property
    def widths(self) -> tuple[int, ...]:
        """Node counts of all trees, and 1."""
        return tuple(sorted({1, *(point.nodes for point in self.points)}))

    def variant(self, name: str) -> Variant:
        return next(each for each in self.variants if each.name == name)


@dataclass(frozen=True)
class Axes:
    """Values that are combined; the last three are NGRAM's."""

    steps: tuple[int, ...]
    topks: tuple[int, ...]
    nodes: tuple[int, ...]
    strong: tuple[int, ...]
    match_types: tuple[str, ...]
    max_matches: tuple[int, ...]


def make_grid(current: DraftOptions, axes: Axes) -> Grid:
    """The grid around the current options, which give every number of their tree.

    Raises:
        ValueError: an algorithm without a tree, or so many candidates that they cannot be recorded.
    """
    if isinstance(current, Ngram):
        return _ngram_grid(current, axes)
    if isinstance(current, ModelOptions):
        return _model_grid(current, axes)
    raise ValueError(f"algorithm {current.algorithm} has no tree to tune; take one that drafts")


def _model_grid(current: ModelOptions, axes: Axes) -> Grid:
    own = _point(current, current.shape())
    topks = sorted({*axes.topks, current.shape().topk})
    deepest = max(*axes.steps, current.shape().steps)
    variants = []
    for topk in topks:
        most = candidates(deepest, topk) + 1
        if most > MOST_NODES:
            raise ValueError(
                f"--topks {topk} with {deepest} steps has {most} candidates to record, more than {MOST_NODES}; "
                "give fewer --steps or smaller --topks"
            )
        whole = replace(current, steps=deepest, topk=topk, nodes=most)
        variants.append(Variant(f"top-k {topk}", whole))
    shapes = dict.fromkeys(_shapes(axes))
    points = [_point(current, shape) for shape in shapes]
    return Grid(tuple(variants), tuple(dict.fromkeys([*points, own])), own)


def _shapes(axes: Axes) -> Iterator[TreeShape]:
    for topk in sorted(axes.topks):
        for steps in sorted(axes.steps):
            if topk == 1:
                yield TreeShape(steps, 1, steps + 1)
                continue
            most = candidates(steps, topk) + 1
            yield from (TreeShape(steps, topk, nodes) for nodes in sorted(axes.nodes) if steps < nodes <= most)


def _point(current: ModelOptions, shape: TreeShape) -> Point:
    draft = replace(current, steps=shape.steps, topk=shape.topk, nodes=shape.nodes)
    return Point(draft, f"top-k {shape.topk}", shape.depth, shape.nodes)


def _ngram_grid(current: Ngram, axes: Axes) -> Grid:
    current = replace(current, nodes=current.width)
    weak = 1 if current.weak_nodes is None else current.weak_nodes
    widest = max(*axes.nodes, current.width)
    kinds = {
        replace(current, weak_nodes=weak, strong_match=given, match_type=match_type, max_match=longest)
        for strong in axes.strong
        for given in [current.strong_match if strong == current.strong else strong]
        for match_type in axes.match_types
        for longest in axes.max_matches
        if current.min_match <= longest and strong <= longest
    }
    ordered = sorted(kinds, key=lambda one: (one.max_match, one.match_type, one.strong))
    variants, points = {}, []
    for kind in dict.fromkeys([*ordered, current]):
        whole = replace(kind, nodes=widest)
        name = variants.setdefault(whole, f"matches of {kind.strong} {kind.match_type} {kind.max_match}"
                                   + ("" if kind.weak_nodes == weak else ", weak ones too"))  # fmt: skip
        sizes = axes.nodes if kind in kinds else ()
        chosen = {n for n in sizes if n >= weak} | ({current.width} if kind == current else set[int]())
        for nodes in sorted(chosen):
            one = replace(kind, nodes=nodes)
            points.append(Point(one, name, one.depth, nodes))
    own = Point(current, variants[replace(current, nodes=widest)], current.depth, current.width)
    return Grid(
        tuple(Variant(name, whole) for whole, name in variants.items()), tuple(dict.fromkeys([*points, own])), own
    )
