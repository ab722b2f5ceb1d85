"""GBNF, as llama.cpp and XGrammar take it, in the forms that llguidance takes.

llguidance's own translation makes terminals of rules, and of a terminal the longest match is taken: with
``root ::= word "x"`` and ``word ::= [a-z]+`` a text never ends. Here a grammar means what its rules derive:

    no rule refers to itself     one regular expression, in which rules are written out
    others, and long ones        Lark, whose terminals are single characters

A rule ends where the next one begins, so that an alternative may stand on a line of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import NamedTuple, TypeAlias

MOST = 2**18  # characters of a regular expression
ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
ROOT = "root"

_TOKEN = re.compile(
    # Possessive repeats: a comment is nothing else, and is read once.
    r"""(?P<space>(?:\s|\#[^\r\n]*+)++)
    | (?P<name>[A-Za-z0-9_-]++)(?P<defines>(?:\s|\#[^\r\n]*+)*+::=)?
    | "(?P<text>(?:[^"\\]|\\(?s:.))*)"
    | \[(?P<set>\^?(?:[^\]\\]|\\(?s:.))*)\]
    | \{\s*(?P<least>\d+)\s*(?P<comma>,\s*(?P<most>\d+)?\s*)?\}
    | (?P<mark>[.|()*+?])""",
    re.VERBOSE,
)
_CHARACTER = re.compile(
    r"\\x(?P<x>[0-9a-fA-F]{2})|\\u(?P<u>[0-9a-fA-F]{4})|\\U(?P<U>[0-9a-fA-F]{8})|\\(?P<other>(?s:.))|(?P<plain>(?s:.))"
)


class Text(NamedTuple):
    value: str


class Characters(NamedTuple):
    """One character; `source`: of a regular expression."""

    source: str


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


def translate(source: str) -> tuple[str, str]:
    """The kind, regex or lark, and the text of an equal grammar. Raises ValueError: it is wrong; RecursionError."""
    rules = _Parser(source).rules()
    if ROOT not in rules:
        raise ValueError("there is no rule called root")
    used = _order(rules)
    if used is not None and (found := _regex(rules, used)) is not None:
        return "regex", found
    return "lark", _lark(rules)


# Reading


@dataclass
class _Token:
    kind: str
    match: re.Match[str]

    @property
    def place(self) -> str:
        text, start = self.match.string, self.match.start()
        return f"in line {text.count(chr(10), 0, start) + 1}, at {text[start : start + 20]!r}"


class _Parser:
    def __init__(self, source: str) -> None:
        self._tokens, at = list[_Token](), 0
        while at < len(source):
            match = _TOKEN.match(source, at)
            if match is None:
                line = source.count("\n", 0, at) + 1
                raise ValueError(
                    f"in line {line}, at {source[at : at + 20]!r}: neither ::=, a name, a text nor an operator"
                )
            if match["space"] is None:
                kind = "rule" if match["defines"] is not None else "repeat" if match["least"] is not None else None
                kind = kind or next(name for name in ("name", "text", "set", "mark") if match[name] is not None)
                self._tokens.append(_Token(kind, match))
            at = match.end()
        self._next = 0

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        while (token := self._peek()) is not None:
            if token.kind != "rule":
                raise ValueError(f"{token.place}: expected a name and ::=")
            name = token.match["name"]
            if name in found:
                raise ValueError(f"{token.place}: there are two rules called {name}")
            self._next += 1
            found[name] = self._choice()
        for node in list(found.values()):
            for name in _names(node):
                if name not in found:
                    raise ValueError(f"there is no rule called {name}")
        return found

    def _peek(self) -> _Token | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def _take(self, *marks: str) -> str | None:
        token = self._peek()
        if token is None or token.kind != "mark" or token.match["mark"] not in marks:
            return None
        self._next += 1
        return token.match["mark"]

    def _choice(self) -> Node:
        nodes = [self._sequence()]
        while self._take("|"):
            nodes.append(self._sequence())
        return nodes[0] if len(nodes) == 1 else Choice(tuple(nodes))

    def _sequence(self) -> Node:
        nodes: list[Node] = []
        while (node := self._atom()) is not None:
            while (times := self._times()) is not None:
                node = Repeated(node, *times)
            nodes.append(node)
        return nodes[0] if len(nodes) == 1 else Sequence(tuple(nodes))

    def _atom(self) -> Node | None:
        token = self._peek()
        if token is None or token.kind == "rule":
            return None
        match = token.match
        if token.kind == "mark" and match["mark"] in "|)":
            return None
        self._next += 1
        if token.kind == "name":
            return Reference(match["name"])
        if token.kind == "text":
            return Text("".join(_characters(match["text"], token)))
        if token.kind == "set":
            return Characters(_set(match["set"], token))
        if match["mark"] == ".":
            return Characters(r"(?s:.)")
        if match["mark"] == "(":
            node = self._choice()
            if not self._take(")"):
                raise ValueError(f"{token.place}: the group does not end")
            return node
        raise ValueError(f"{token.place}: there is nothing to repeat")

    def _times(self) -> tuple[int, int | None] | None:
        token = self._peek()
        if token is not None and token.kind == "repeat":
            self._next += 1
            least, most = int(token.match["least"]), token.match["most"]
            last = least if token.match["comma"] is None else None if most is None else int(most)
            if last is not None and last < least:
                raise ValueError(f"{token.place}: the second number is smaller")
            return least, last
        mark = self._take("*", "+", "?")
        return None if mark is None else {"*": (0, None), "+": (1, None), "?": (0, 1)}[mark]


def _characters(text: str, token: _Token) -> list[str]:
    found = []
    for match in _CHARACTER.finditer(text):
        if (number := match["x"] or match["u"] or match["U"]) is not None:
            code = int(number, 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise ValueError(f"{token.place}: {match[0]} is no character")
            found.append(chr(code))
        elif (other := match["other"]) is not None:
            if other.isalnum() and other not in ESCAPES:
                raise ValueError(f"{token.place}: there is no escape sequence \\{other}")
            found.append(ESCAPES.get(other, other))
        else:
            found.append(match["plain"])
    return found


def _set(text: str, token: _Token) -> str:
    """A set of characters, [^a-z0-9-], as a regular expression."""
    without = text.startswith("^")
    bare = [match["plain"] == "-" for match in _CHARACTER.finditer(text[without:])]
    characters = _characters(text[without:], token)
    ranges, at = [], 0
    while at < len(characters):
        first, ranged = characters[at], at + 2 < len(characters) and bare[at + 1]
        last = characters[at + 2] if ranged else first
        if last < first:
            raise ValueError(f"{token.place}: the range {first}-{last} is empty")
        ranges.append(_code(first) if last == first else f"{_code(first)}-{_code(last)}")
        at += 3 if ranged else 1
    if not ranges:
        if without:
            return r"(?s:.)"
        raise ValueError(f"{token.place}: no character is in the set")
    return f"[{'^' if without else ''}{''.join(ranges)}]"


def _code(character: str) -> str:
    plain = character.isalnum() or (not character.isascii() and character.isprintable())
    return character if plain else f"\\x{{{ord(character):X}}}"


# Writing


def _parts(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Sequence | Choice):
        return node.nodes
    return (node.node,) if isinstance(node, Repeated) else ()


def _names(node: Node) -> list[str]:
    if isinstance(node, Reference):
        return [node.name]
    return [name for part in _parts(node) for name in _names(part)]


def _order(rules: Mapping[str, Node]) -> list[str] | None:
    """Rules that the root needs, each behind those that it refers to; None: one refers to itself."""
    found: list[str] = []
    open_rules: set[str] = set()

    def visit(name: str) -> bool:
        if name in found:
            return True
        if name in open_rules:
            return False
        open_rules.add(name)
        if not all(visit(other) for other in _names(rules[name])):
            return False
        found.append(name)
        return True

    return found if visit(ROOT) else None


def _regex(rules: Mapping[str, Node], order: list[str]) -> str | None:
    """None: it would be too long."""
    written: dict[str, str] = {}

    def write(node: Node) -> str:
        if isinstance(node, Text):
            return "".join(map(_code, node.value))
        if isinstance(node, Characters):
            return node.source
        if isinstance(node, Reference):
            return written[node.name]
        if isinstance(node, Repeated):
            return f"(?:{write(node.node)}){_count(node)}"
        parts, length = list[str](), 0
        for part in node.nodes:
            parts.append(write(part))
            length += len(parts[-1])
            if length > MOST:
                raise _TooLong
        return "".join(parts) if isinstance(node, Sequence) else f"(?:{'|'.join(parts)})"

    try:
        for name in order:
            written[name] = write(rules[name])
    except _TooLong:
        return None
    return written[ROOT] if len(written[ROOT]) <= MOST else None


class _TooLong(Exception):
    pass


def _count(node: Repeated) -> str:
    return f"{{{node.least},{'' if node.most is None else node.most}}}"


def _each(text: str) -> str:
    return " ".join(f"/{_code(character)}/" for character in text) or '""'


def _tree(texts: list[str]) -> str:
    """One of these texts, in order and different: what they begin with together is written once, since llguidance looks
    at up to 2,000 alternatives at one place."""
    groups = [list(group) for _, group in groupby(texts, key=lambda text: text[:1])]
    found = []
    for group in groups:
        pairs = zip(group[0], group[-1], strict=False)  # in order, so that the others lie between them
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        prefix, rest = group[0][:common], [text[common:] for text in group]
        found.append(_each(prefix) if rest == [""] else f"{_each(prefix)} {_tree(rest)}")
    return found[0] if len(found) == 1 else f"({' | '.join(found)})"


def _lark(rules: Mapping[str, Node]) -> str:
    names = {name: "start" if name == ROOT else f"rule{i}" for i, name in enumerate(rules)}

    def write(node: Node) -> str:
        if isinstance(node, Text):
            return _each(node.value)
        if isinstance(node, Characters):
            return f"/{node.source}/"
        if isinstance(node, Reference):
            return names[node.name]
        if isinstance(node, Repeated):
            return f"({write(node.node)}){_count(node)}" if node.most != 0 else '""'
        if isinstance(node, Choice) and all(isinstance(each, Text) for each in node.nodes):
            return _tree(sorted({each.value for each in node.nodes if isinstance(each, Text)}))
        if isinstance(node, Sequence):
            return " ".join(map(write, node.nodes)) or '""'
        return f"({' | '.join(map(write, node.nodes))})"

    return "\n".join(f"{names[name]}: {write(node)}" for name, node in rules.items())
