"""Which parts of a grammar may be terminals, of which a lexer takes the longest match.

Each character of the grammar is a position, and a `Step` says which positions may come after which; rules are looked at
without regard to who refers to them, so that there may be too many. A part without references may be a terminal if

    where it may end, no character goes on within it that could also come after it:  [a-z]+ before "(", not before "x"
    (where one character may be several positions of the part, it is taken to end anywhere)
    where it may begin, no other part begins with one of its first characters:       not in  [a-z]+ | "if" "("

Then a text is read in one way only, and that of a lexer. A mask of a terminal takes microseconds, one of single
characters looks at each character of all tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from specjax.engine.gbnf.nodes import Characters, Choice, Node, Reference, Repeated, Text, names, parts

ALIKE = 50  # positions of a place that are compared with each other
MOST = 800  # positions of a grammar that is looked at
Ranges: TypeAlias = tuple[tuple[int, int], ...]
Positions: TypeAlias = frozenset[int]
NONE: Positions = frozenset()


class Shape(NamedTuple):
    """Where a part may begin and end; `empty`: it may have no character."""

    empty: bool
    first: Positions
    last: Positions


NOTHING = Shape(True, NONE, NONE)


class Step(NamedTuple):
    """From each of `before` to each of `after`, within the part `owner`."""

    owner: int
    before: Positions
    after: Positions


@dataclass
class _Grammar:
    rules: Mapping[str, Node]
    shapes: dict[str, Shape]  # of rules
    ranges: list[Ranges] = field(default_factory=list)  # of positions
    places: dict[int, list[int]] = field(default_factory=dict)  # of the characters of a part, by id
    steps: list[Step] = field(default_factory=list)

    def number(self, node: Node) -> None:
        for character in _characters(node):
            self.places.setdefault(id(node), []).append(len(self.ranges))
            self.ranges.append(character)
        for part in parts(node):
            self.number(part)

    def shape(self, node: Node) -> Shape:
        """Also notes the steps within a part."""
        if isinstance(node, Reference):
            return self.shapes[node.name]
        if isinstance(node, Text | Characters):
            places = self.places.get(id(node), [])
            for before, after in pairwise(places):
                self.steps.append(Step(id(node), frozenset([before]), frozenset([after])))
            return Shape(False, frozenset(places[:1]), frozenset(places[-1:])) if places else NOTHING
        if isinstance(node, Repeated):
            one = self.shape(node.node)
            if node.most == 0:
                return NOTHING
            if node.most != 1:
                self.steps.append(Step(id(node), one.last, one.first))
            return one._replace(empty=one.empty or node.least == 0)
        shapes = [self.shape(part) for part in node.nodes]
        if isinstance(node, Choice):
            return Shape(any(each.empty for each in shapes), _union(each.first for each in shapes),
                         _union(each.last for each in shapes))  # fmt: skip
        whole = NOTHING
        for each in shapes:
            self.steps.append(Step(id(node), whole.last, each.first))
            whole = Shape(
                whole.empty and each.empty,
                whole.first | each.first if whole.empty else whole.first,
                whole.last | each.last if each.empty else each.last,
            )
        return whole


def terminals(rules: dict[str, Node], root: str) -> set[int]:
    """The ids of parts that may be terminals, the largest of each place. None of a grammar that is very large."""
    found = _Grammar(rules, dict.fromkeys(rules, Shape(False, NONE, NONE)))
    for node in rules.values():
        found.number(node)
    if len(found.ranges) > MOST:
        return set()
    changed = True
    while changed:
        found.steps, changed = [], False
        for name, node in reversed(rules.items()):  # most grammars define a rule after its use
            shape = found.shape(node)
            changed = changed or shape != found.shapes[name]
            found.shapes[name] = shape
    chosen: set[int] = set()

    def visit(node: Node) -> None:
        if not isinstance(node, Characters | Reference) and not names(node) and _may(found, node, root):
            chosen.add(id(node))
            return
        for part in parts(node):
            visit(part)

    for node in rules.values():
        visit(node)
    return chosen


def _may(grammar: _Grammar, node: Node, root: str) -> bool:
    own = {id(each) for each in _all(node)}
    shape = _Grammar({}, {}, grammar.ranges, grammar.places).shape(node)
    if isinstance(node, Repeated) and node.least == 0 and node.most != 0:
        shape = _Grammar({}, {}, grammar.ranges, grammar.places).shape(node.node)  # at least one, if any
    if shape.empty or not shape.first:
        return False
    inside, outside = ([step for step in grammar.steps if (step.owner in own) == within] for within in (True, False))
    inner = [step for step in inside if step.before & shape.last]
    if not _determined(grammar, shape, inside):  # a character may be several positions at once
        inner = inside
    further = _union(step.after for step in inner)
    behind = _union(step.after for step in outside if step.before & shape.last)
    if _meet(grammar, further, behind):
        return False
    begins = grammar.shapes[root].first
    beside = begins if begins & shape.first else NONE
    sources = _union(step.before for step in outside if step.after & shape.first)
    beside |= _union(step.after for step in grammar.steps if step.before & sources and step.owner not in own)
    return not _meet(grammar, shape.first, beside - shape.first)


def _determined(grammar: _Grammar, shape: Shape, inside: Iterable[Step]) -> bool:
    """Whether each character of a text can be only one position of a part."""
    after = dict.fromkeys(_union(step.before for step in inside), NONE)
    for step in inside:
        for position in step.before:
            after[position] |= step.after
    places = {shape.first, *after.values()}
    return all(
        len(place) <= ALIKE and not any(_meet(grammar, {one}, place - {one}) for one in place) for place in places
    )


def _meet(grammar: _Grammar, some: Set[int], others: Set[int]) -> bool:
    """Whether two positions have a character in common."""
    return any(
        first <= other_last and other_first <= last
        for one in some
        for other in others
        for first, last in grammar.ranges[one]
        for other_first, other_last in grammar.ranges[other]
    )


def _characters(node: Node) -> list[Ranges]:
    if isinstance(node, Text):
        return [((ord(character), ord(character)),) for character in node.value]
    return [node.ranges] if isinstance(node, Characters) else []


def _all(node: Node) -> list[Node]:
    return [node, *(each for part in parts(node) for each in _all(part))]


def _union(sets: Iterable[Positions]) -> Positions:
    return NONE.union(*sets)
