"""GBNF: what a grammar allows, against the texts that its rules derive."""

from __future__ import annotations

import itertools
import random
import time
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from engine_helpers import tokenizer
from grammar_helpers import follows

from specjax.engine.gbnf import MOST, translate
from specjax.engine.grammar import Grammar, GrammarError, library_source

LETTERS = "ab"
LONGEST = 4


def allows(source: str, text: str) -> bool:
    return follows(Grammar("ebnf", source), tokenizer()(text, add_special_tokens=False)["input_ids"])


# The oracle: where a derivation of a rule, begun somewhere in a text, may end.


def texts_of(rules: Mapping[str, Any]) -> set[str]:
    """All texts of at most `LONGEST` letters that the rule `root` derives."""
    words = ["".join(word) for n in range(LONGEST + 1) for word in itertools.product(LETTERS, repeat=n)]
    return {word for word in words if len(word) in ends(rules, word)["root", 0]}


def ends(rules: Mapping[str, Any], word: str) -> dict[tuple[str, int], set[int]]:
    """By rule and place; grown until nothing more is found."""
    found: dict[tuple[str, int], set[int]] = {(name, at): set() for name in rules for at in range(len(word) + 1)}

    def of(node: Any, at: int) -> set[int]:
        kind, *parts = node
        if kind == "text":
            return {at + len(parts[0])} if word.startswith(parts[0], at) else set()
        if kind == "set":
            return {at + 1} if at < len(word) and word[at] in parts[0] else set()
        if kind == "rule":
            return found[parts[0], at]
        if kind == "or":
            return set[int]().union(*(of(part, at) for part in parts))
        if kind == "then":
            places = {at}
            for part in parts:
                places = set[int]().union(*(of(part, place) for place in places))
            return places
        part, least, most = parts
        places, every = {at}, {at} if least == 0 else set[int]()
        for count in range(1, (LONGEST + least if most is None else most) + 1):
            places = set[int]().union(*(of(part, place) for place in places))
            every |= places if count >= least else set()
        return every

    while True:
        grown = {(name, at): of(rules[name], at) for name, at in found}
        if grown == found:
            return found
        found = grown


def written(node: Any) -> str:
    kind, *parts = node
    if kind == "text":
        return f'"{parts[0]}"'
    if kind == "set":
        return f"[{parts[0]}]"
    if kind == "rule":
        return parts[0]
    if kind == "or":
        return f"({' | '.join(map(written, parts))})"
    if kind == "then":
        return f"({' '.join(map(written, parts))})"
    part, least, most = parts
    return f"{written(part)}{{{least},{'' if most is None else most}}}"


def drawn(draw: random.Random, names: list[str], depth: int) -> Any:
    kinds: list[Callable[[], Any]] = [
        lambda: ("text", "".join(draw.choices(LETTERS, k=draw.randint(1, 2)))),
        lambda: ("set", draw.choice(("a", "ab"))),
    ]
    if names:
        kinds.append(lambda: ("rule", draw.choice(names)))
    if depth:
        kinds += [
            lambda: ("or", *(drawn(draw, names, depth - 1) for _ in range(2))),
            lambda: ("then", *(drawn(draw, names, depth - 1) for _ in range(2))),
            lambda: ("times", drawn(draw, names, depth - 1), draw.randint(0, 1), draw.choice((1, 2, None))),
        ]
    return draw.choice(kinds[-4:] if depth else kinds)()


@pytest.mark.parametrize("recursive", [False, True])
def test_a_grammar_allows_what_its_rules_derive(recursive):
    tried = 0
    for seed in range(60):
        draw = random.Random(seed)
        names = ["root", "x", "y"]
        rules = {name: drawn(draw, names if recursive else names[place + 1 :], 2) for place, name in enumerate(names)}
        if recursive:  # so that there is a text at all
            rules["root"] = ("or", ("text", "a"), ("then", ("text", "b"), ("rule", "root"), ("rule", "x")))
            rules["x"] = ("or", ("text", "b"), rules["x"])
        source = "\n".join(f"{name} ::= {written(node)}" for name, node in rules.items())
        assert (translate(source)[0] == "lark") == recursive, source
        try:
            library_source(Grammar("ebnf", source))
            possible = texts_of(rules)
        except RecursionError:
            continue
        for n in range(LONGEST + 1):
            for word in map("".join, itertools.product(LETTERS, repeat=n)):
                assert allows(source, word) == (word in possible), (source, word)
                tried += 1
    assert tried > 1000


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('root ::= "Answer: " text "END"\ntext ::= [A-Za-z ]+', "Answer: foo END"),
        ('root ::= word "x"\nword ::= [a-z]+', "fox"),
        ('root ::= key ":" val\nkey ::= [a-z:]+\nval ::= [0-9]+', "a:5"),
        ('root ::= x "bc"\nx ::= "a" | "ab"', "abc"),
        ('root ::= "(" root ")" | x "bc"\nx ::= "a" | "ab"', "((abc))"),
        ('root ::= "a"  # a comment\n     | "b"\n     | more\nmore ::= "c"', "c"),
        ('root ::= start a-b a_b\nstart ::= "s"\na-b ::= "x"\na_b ::= "y"', "sxy"),
        ('root ::= "\\x41\\u00e9\\U0001F600"', "Aé😀"),
        ("root ::= [\\u00e0-\\u00ff]", "é"),
        ('root ::= "a\tb" "\\t\\n\\\\\\""', 'a\tb\t\n\\"'),
        ("root ::= [^\\]a-c]{2,3}", "]d"[::-1].replace("]", "e")),
        ("root ::= [a\\-c]+ [-x] [y-]", "a-c-y"),
        ('root ::= ("a" | ) "b"? . [/]', "\n/"),
        ('root ::= "a"{2} ( "b" | "c" )*', "aacb"),
    ],
)
def test_what_is_allowed(source, text):
    assert allows(source, text)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('root ::= word "x"\nword ::= [a-z]+', "fo"),
        ("root ::= [a\\-c]", "b"),
        ("root ::= [^a-c]", "b"),
        ('root ::= "a"{2}', "aaa"),
        ('root ::= "(" root ")" | "a"', "((a)"),
    ],
)
def test_what_is_not(source, text):
    assert not allows(source, text)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ('root ::= "a" foo', "no rule called foo"),
        ('x ::= "a"', "no rule called root"),
        ('root ::= "a"\n"b" ::= "c"', "in line 2, at '::="),
        ('root ::= "a"\nroot ::= "b"', "in line 2, at 'root ::= \"b\"': there are two rules called root"),
        ('root ::= "a', "in line 1, at '\"a'"),
        ('root ::= ("a" | "b"', "the group does not end"),
        ('root ::= "a" )', "expected a name and ::="),
        ("root ::= *", "there is nothing to repeat"),
        ('root ::= "a"{3,2}', "the second number is smaller"),
        ("root ::= [z-a]", "the range z-a is empty"),
        ("root ::= []", "no character is in the set"),
        ('root ::= "\\q"', "no escape sequence"),
        ('root ::= "\\ud800"', "is no character"),
    ],
)
def test_what_is_wrong(source, problem):
    with pytest.raises(GrammarError) as caught:
        library_source(Grammar("ebnf", source))
    assert problem in str(caught.value)


def test_comments_are_read_once():
    """Not as rules, and in linear time: `re` holds Python's lock."""
    rule = 'root ::= foo # was: foo ::= "b"\n# bar ::= "x"\n' + "#" * 3000 + "\n" + "# c \n" * 500
    started = time.process_time()
    assert translate(rule + 'foo # name\n ::= "a"') == ("regex", "a")
    with pytest.raises(ValueError, match="no rule called foo"):
        translate(rule)
    assert time.process_time() - started < 1


@pytest.mark.parametrize("recursive", [False, True])
def test_thousands_of_alternatives(recursive):
    words = [f"item number {i}" for i in range(2500)]
    source = "s ::= " + " | ".join(f'"{word}"' for word in words) + '\nroot ::= s (", " s)*'
    source += ' | "[" root "]"' if recursive else ""
    for text in ("item number 7", "item number 77, item number 2499"):
        assert allows(source, text)
    assert allows(source, "[item number 7]") == recursive and not allows(source, "item number 2500")


def test_nothing_at_all():
    for more in ("", ' | "(" root ")"'):
        assert allows('root ::= "a"{0} "b"{0,0} "c"' + more, "c") and not allows('root ::= "a"{0} "c"' + more, "ac")


def test_rules_that_would_be_too_long_in_one_expression_stay_rules():
    rules = [*(f"x{i} ::= x{i + 1} x{i + 1}" for i in range(20)), 'x20 ::= "a"']
    kind, text = translate("\n".join([*rules, "root ::= x0 | x19 x20"]))
    assert kind == "lark" and len(text) < MOST and allows("\n".join([*rules, "root ::= x0 | x19 x20"]), "aaa")
    tracemalloc.start()
    assert translate("\n".join([*rules, "root ::=" + " x4" * 9000]))[0] == "lark"
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()


def test_parts_that_are_terminals():
    """Those of JSON: a mask would look at each character of all tokens else."""
    source = r"""root ::= value
value ::= "{" (string ":" value ("," string ":" value)*)? "}" | string | number | "true" | "false"
string ::= "\"" ([^"\\\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
    rules = translate(source)[1].split("\n")
    assert rules[2].count("/") == rules[3].count("/") == 6  # a slash before and after each terminal
    for text in ('{"a":-1.5,"b\\u00e9" :true}', '"x" ', "10"):
        assert allows(source, text)
    # One that another part goes on from, or begins as, is not.
    assert translate('root ::= "(" root ")" | word "x"\nword ::= [a-z]+')[1].endswith("rule1: (/[a-z]/){1,}")
    assert "/(?:[a-z]){1,}/" in translate('root ::= "(" root ")" | word "!"\nword ::= [a-z]+')[1]
    assert "/(?:[a-z]){1,}/" not in translate('root ::= "(" root ")" | word "!" | "if" "?"\nword ::= [a-z]+')[1]
