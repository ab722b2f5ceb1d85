"""What a grammar in GBNF is made of."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

LAST = 0x10FFFF


class Text(NamedTuple):
    value: str


class Characters(NamedTuple):
    """One character.

    Attributes:
        source: of a regular expression.
        ranges: the first and the last number of each, in order.
    """

    source: str
    ranges: tuple[tuple[int, int], ...]


ANY = Characters(r"(?s:.)", ((0, LAST),))


class Reference(NamedTuple):
    name: str


class Repeated(NamedTuple):
    node: Node
    least: int
    most: int | None


class Sequence(NamedTuple):
    nodes: tuple[Node, ...]


class Choice(NamedTuple):
    nodes: tuple[Node, ...]


Node: TypeAlias = Text | Characters | Reference | Repeated | Sequence | Choice


def parts(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Sequence | Choice):
        return node.nodes
    return (node.node,) if isinstance(node, Repeated) else ()


def names(node: Node) -> list[str]:
    """Of the rules that a node refers to."""
    if isinstance(node, Reference):
        return [node.name]
    return [name for part in parts(node) for name in names(part)]


def code(character: str) -> str:
    """In a regular expression."""
    plain = character.isalnum() or (not character.isascii() and character.isprintable())
    return character if plain else f"\\x{{{ord(character):X}}}"
