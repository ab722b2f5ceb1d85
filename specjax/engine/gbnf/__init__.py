"""GBNF, as llama.cpp and XGrammar take it, in the forms that llguidance takes.

llguidance's own translation makes terminals of rules, and of a terminal the longest match is taken: with
``root ::= word "x"`` and ``word ::= [a-z]+`` a text never ends. Here a grammar means what its rules derive:

    no rule refers to itself     one regular expression, in which rules are written out
    others, and long ones        Lark, whose terminals are single characters, and what may be read as its longest match
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby, takewhile

from specjax.engine.gbnf.longest import terminals
from specjax.engine.gbnf.nodes import Characters, Choice, Node, Reference, Repeated, Sequence, Text, code, names
from specjax.engine.gbnf.reading import Parser

MOST = 2**18  # characters of a regular expression
ROOT = "root"


def translate(source: str) -> tuple[str, str]:
    """The kind, regex or lark, and the text of an equal grammar. Raises ValueError: it is wrong; RecursionError."""
    rules = Parser(source).rules()
    if ROOT not in rules:
        raise ValueError("there is no rule called root")
    used = _order(rules)
    if used is not None and (found := _regex(rules, used)) is not None:
        return "regex", found
    return "lark", _lark(rules)


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
        if not all(visit(other) for other in names(rules[name])):
            return False
        found.append(name)
        return True

    return found if visit(ROOT) else None


def _regex(rules: Mapping[str, Node], order: list[str]) -> str | None:
    """None: it would be too long."""
    written: dict[str, str] = {}
    try:
        for name in order:
            written[name] = _expression(rules[name], written)
    except _TooLong:
        return None
    return written[ROOT] if len(written[ROOT]) <= MOST else None


class _TooLong(Exception):
    pass


def _expression(node: Node, written: Mapping[str, str]) -> str:
    """`written`: the rules that it refers to."""

    def write(node: Node) -> str:
        if isinstance(node, Text):
            return "".join(map(code, node.value))
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

    return write(node)


def _count(node: Repeated) -> str:
    return f"{{{node.least},{'' if node.most is None else node.most}}}"


def _each(text: str) -> str:
    return " ".join(f"/{code(character)}/" for character in text) or '""'


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


def _lark(rules: dict[str, Node]) -> str:
    titles = {name: "start" if name == ROOT else f"rule{i}" for i, name in enumerate(rules)}
    whole = terminals(rules, ROOT)

    def write(node: Node) -> str:
        if id(node) in whole:
            if isinstance(node, Repeated) and not node.least:
                return f"(/{_expression(node._replace(least=1), {})}/)?"
            return f"/{_expression(node, {})}/"
        if isinstance(node, Text):
            return _each(node.value)
        if isinstance(node, Characters):
            return f"/{node.source}/"
        if isinstance(node, Reference):
            return titles[node.name]
        if isinstance(node, Repeated):
            return f"({write(node.node)}){_count(node)}" if node.most != 0 else '""'
        if isinstance(node, Choice) and all(isinstance(each, Text) for each in node.nodes):
            return _tree(sorted({each.value for each in node.nodes if isinstance(each, Text)}))
        if isinstance(node, Sequence):
            return " ".join(map(write, node.nodes)) or '""'
        return f"({' | '.join(map(write, node.nodes))})"

    return "\n".join(f"{titles[name]}: {write(node)}" for name, node in rules.items())
