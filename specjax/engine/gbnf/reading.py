"""Reads GBNF. A rule ends where the next one begins, so that an alternative may stand on a line of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass

from specjax.engine.gbnf.nodes import (
    ANY,
    LAST,
    Characters,
    Choice,
    Node,
    Reference,
    Repeated,
    Sequence,
    Text,
    code,
    names,
)

WRITTEN_OUT = 8  # characters, as of [0-9a-f]{4}: `longest` does not count
ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}

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


@dataclass
class _Token:
    kind: str
    match: re.Match[str]

    @property
    def place(self) -> str:
        text, start = self.match.string, self.match.start()
        return f"in line {text.count(chr(10), 0, start) + 1}, at {text[start : start + 20]!r}"


class Parser:
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
            for name in names(node):
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
                least, most = times
                if isinstance(node, Characters) and least == most and 0 < least <= WRITTEN_OUT:
                    node = Sequence(tuple(Characters(*node) for _ in range(least)))
                else:
                    node = Repeated(node, least, most)
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
            return _set(match["set"], token)
        if match["mark"] == ".":
            return Characters(*ANY)  # a part of its own
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


def _set(text: str, token: _Token) -> Characters:
    """A set of characters, [^a-z0-9-]."""
    without = text.startswith("^")
    bare = [match["plain"] == "-" for match in _CHARACTER.finditer(text[without:])]
    characters = _characters(text[without:], token)
    found, at = list[tuple[str, str]](), 0
    while at < len(characters):
        first, ranged = characters[at], at + 2 < len(characters) and bare[at + 1]
        last = characters[at + 2] if ranged else first
        if last < first:
            raise ValueError(f"{token.place}: the range {first}-{last} is empty")
        found.append((first, last))
        at += 3 if ranged else 1
    if not found:
        if without:
            return Characters(*ANY)  # a part of its own
        raise ValueError(f"{token.place}: no character is in the set")
    written = "".join(code(first) if last == first else f"{code(first)}-{code(last)}" for first, last in found)
    ranges = tuple(sorted((ord(first), ord(last)) for first, last in found))
    return Characters(f"[{'^' if without else ''}{written}]", _others(ranges) if without else ranges)


def _others(ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    found, after = list[tuple[int, int]](), 0
    for first, last in ranges:
        if first > after:
            found.append((after, first - 1))
        after = max(after, last + 1)
    return (*found, (after, LAST)) if after <= LAST else tuple(found)
