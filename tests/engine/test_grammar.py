"""Grammars on the host: errors, the cache of compiled grammars, and the masks of a tree's nodes."""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from engine_helpers import END, VOCABULARY, idle_sequence, tokenizer
from grammar_helpers import GRAMMARS, OBJECT, follows, mask, matcher

from specjax import grammar_check
from specjax.engine import grammar as module
from specjax.engine.grammar import ALL, MAX_SOURCE, Constraint, Grammar, GrammarError, Grammars, Reasoning
from specjax.engine.grammar_steps import constrained_input, host_tree, root_trees
from specjax.grammar_check import GrammarCheck

WORDS = -(-VOCABULARY // 32)
START, STOP = 100, 101  # any two tokens, as the marks of reasoning


def grammars() -> Grammars:
    return Grammars(tokenizer(), VOCABULARY, (END,))


def ids(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def as_bools(words: np.ndarray) -> np.ndarray:
    return np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")[..., :VOCABULARY].astype(bool)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


PATTERNS = [{"type": "string", "pattern": f".*{chr(97 + i % 26)}.{{10}}"} for i in range(40)]
CHAIN = "root ::= x0\n" + "".join(f"x{i} ::= x{i + 1}\n" for i in range(4000)) + 'x4000 ::= "a"'
DOUBLE = "root::=a\n" + "".join(f"{x}::={y} {y}\n" for x, y in pairwise("abcdefghijklmnopq")) + "q::=[a-z]*"
TOO_SLOW = r"to compile: (give fewer patterns|.* or fewer rules)"
BAD = {
    "no JSON": (("json_schema", "{"), "not valid JSON"),
    "a list": (("json_schema", "[]"), "a JSON schema, an object"),
    "a type": (("json_schema", '{"type": "foo"}'), "foo"),
    "not supported": (("json_schema", '{"type": "object", "unevaluatedProperties": false}'), "unevaluatedProperties"),
    "a remote reference": (("json_schema", '{"$ref": "http://example.com/x"}'), "example.com"),
    "a reference to itself": (("json_schema", '{"$ref": "#"}'), "cannot be followed: no text"),
    "nothing fits": (("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}'), "minimum"),
    "too deep": (("json_schema", json.dumps(nested(400))), "refused"),
    "deep lists": (("json_schema", "[" * 30000), "not valid JSON"),
    "too wide": (
        ("json_schema", json.dumps({"allOf": [{"anyOf": [
            {"type": "object", "properties": {f"p{i}{j}": {"type": "string"}}} for i in range(10)
        ]} for j in range(8)]})), "too large",
    ),
    "regex": (("regex", "(a"), "unclosed"),
    "look-ahead": (("regex", "(?=a)b"), "look-around"),
    "an impossible regex": (("regex", r"[^\s\S]"), "cannot be followed"),
    "a deep regex": (("regex", "(" * 5000 + "a" + ")" * 5000), "refused"),
    "no rule": (("ebnf", "x = y"), "::="),
    "an open string": (("ebnf", 'root ::= "a\\'), "refused"),
    "a deep rule": (("ebnf", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000), "recursion"),
    "endless": (("lark", "start: start"), "cannot be followed"),
    "unknown rule": (("ebnf", 'root ::= "a" foo'), "Rule 'foo' not found"),
    "no root": (("ebnf", 'x ::= "a"'), "No 'root' rule found"),
    "open string in a line": (("ebnf", 'root ::= "a'), "Unexpected end of input at line 1"),
    "open bracket": (("ebnf", 'root ::= ("a" | "b"'), r"Expected '\)' at line 1"),
    "range of counts": (("ebnf", 'root ::= "a"{3,2}'), "range end must be >= start"),
    "range of letters": (("ebnf", "root ::= [z-a]"), "invalid regex"),
    "escape": (("ebnf", "root ::= [a\\-c]"), "Invalid escape sequence"),
    "code point": (
        ("ebnf", 'root ::= "\\u00e9"'), r"\\u0... is not supported in GBNF: write the character itself"
    ),
    "unknown name in lark": (("ebnf", 'start: "a" foo'), "unknown name"),
    # The library would take years for these.
    "patterns": (("json_schema", json.dumps({"allOf": PATTERNS})), TOO_SLOW),
    "references": (
        ("json_schema", json.dumps({
            "$defs": {f"p{i}": {**pattern, "$ref": f"#/$defs/p{i + 1}"} for i, pattern in enumerate(PATTERNS)}
            | {f"p{len(PATTERNS)}": {"type": "string"}},
            "$ref": "#/$defs/p0",
        })), TOO_SLOW,
    ),
    "a chain of rules": (("ebnf", CHAIN), TOO_SLOW),
    "doubled terminals": (("ebnf", DOUBLE), "too big"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_grammar_is_refused_quickly(name):
    (kind, source), message = BAD[name]
    cache = grammars()
    cache.prepare()
    started = time.thread_time()  # other processes do not count
    with pytest.raises(GrammarError, match=message):
        Constraint(cache, Grammar(kind, source))
    assert time.thread_time() - started < 10
    assert not cache.holds(Grammar(kind, source))


VALUES = """root ::= value
value ::= "{" (string ":" value ("," string ":" value)*)? "}" | string | number | "true" | "false"
string ::= "\\"" ([^"\\\\\\x00-\\x1F] | "\\\\" (["\\\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\\""
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)?  # no exponent
"""
EBNF = [
    ('root ::= "Answer: " word "."\nword ::= [A-Za-z ]+', ["Answer: foo."], ["Answer: foo", "Answer: .", "foo."]),
    ('root ::= "a" |  # a comment\n     "b" |\n     more\nmore ::= "c"', ["a", "b", "c"], ["ab", ""]),
    ('root ::= a-b cD\na-b ::= "x"\ncD ::= "y"', ["xy"], ["x", "yx"]),
    ('root ::= "\\x41" "\\t\\n\\\\\\""', ['A\t\n\\"'], ["A", "\\x41"]),
    ('root ::= "\\\\u0041"', ["\\u0041"], ["A"]),
    ("root ::= [\\u4e00-\\u9fff] [^\\]a-c]{2,3}", ["中de", "中def"], ["中", "中d", "中da", "ade", "中d]"]),
    ("root ::= [-x] [y-] [/]", ["-y/", "x-/"], ["y-/", "-y"]),
    ('root ::= ("a" | ) "b"? .', ["x", "ab!", "b"], ["", "abb!"]),
    ('root ::= "a"{2} ( "b" | "c" )*', ["aa", "aacb"], ["aaa", "a"]),
    ('root ::= "(" root ")" | "a"', ["a", "((a))"], ["((a)", "()"]),
    (VALUES, ['{"a":-1.5,"b\\u00e9":true}', '"x"', "10"], ['{"a":}', '"x', "1."]),
    ('start: "a" | NUMBER ("," NUMBER)*\nNUMBER: /[0-9]+/', ["a", "1,22"], ["1,", "a,1"]),
    ('%llguidance {}\nstart: "<" value ">"\nvalue: %json {"type": "boolean"}', ["<true>"], ["<1>", "true"]),
]
"""GBNF and Lark, texts that match, and some that do not."""


@pytest.mark.parametrize(("source", "texts", "others"), EBNF)
def test_texts_of_ebnf(source, texts, others):
    grammar = Grammar("ebnf", source)
    assert [follows(grammar, ids(text)) for text in texts] == [True] * len(texts)
    assert [follows(grammar, ids(text)) for text in others] == [False] * len(others)


def test_long_grammar_is_compiled():
    cache, enum = grammars(), Grammar.json({"enum": [f"value {i}" for i in range(1000)]})
    Constraint(cache, enum)
    assert cache.holds(enum)


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/false"])
def test_grammar_is_refused_without_a_process(python, monkeypatch):
    monkeypatch.setattr(module, "grammar_check", GrammarCheck)
    monkeypatch.setattr(sys, "executable", python)
    with pytest.raises(GrammarError, match=f"no process can be started for it: .*{python}"):
        Constraint(grammars(), Grammar("regex", "a"))


def test_memory_of_a_grammar_is_limited(monkeypatch):
    """Also in a process that had much memory when it started the check."""
    monkeypatch.setattr(grammar_check, "MAX_BYTES", 2**22)
    held = bytearray(2**28)
    held[::4096] = bytes(len(held[::4096])).replace(b"\0", b"x")
    check = GrammarCheck(VOCABULARY)
    _, problem = check("lark", "start: " + '("a" | "b"){1,900} ' * 500)
    assert problem.startswith("takes more than 4 MB to compile"), problem
    assert check("regex", "ab")[1] == ""


def test_killed_process_starts_again():
    check = GrammarCheck(VOCABULARY)
    answer = check("regex", "ab")
    process = check._process
    assert process is not None and os.getpgid(process.pid) == process.pid, "Ctrl-C would end it"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert check("regex", "ab") == answer
    assert check._process is not process and process.poll() == -signal.SIGKILL


def test_process_that_does_not_answer(monkeypatch):
    check = GrammarCheck(VOCABULARY)
    answer = check("regex", "ab")
    process = check._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(grammar_check, "TIMEOUT", 0.2)
        assert check("regex", "ab")[1].startswith("takes more than 0.2 s to compile")
    assert check("regex", "ab") == answer and process.poll() == -signal.SIGKILL


def test_answer_after_an_interrupt_is_not_read(monkeypatch):
    """Ctrl-C while a grammar is checked."""
    check = GrammarCheck(VOCABULARY)
    check("regex", "ab")
    assert check._process is not None and check._process.stdout is not None
    with check._process.stdout:
        monkeypatch.setattr(check._process, "stdout", Mock(readline=Mock(side_effect=KeyboardInterrupt)))
        with pytest.raises(KeyboardInterrupt):
            check("regex", "[late")
    checked, problem = check("regex", "cd")
    assert "cd" in checked and problem == ""


def test_process_ends_with_its_check():
    check = GrammarCheck(VOCABULARY)
    check("regex", "ab")
    process = check._process
    assert process is not None and process.poll() is None
    del check
    assert process.poll() == -signal.SIGKILL


def test_other_texts_go_on_while_a_grammar_is_checked():
    """The masks of other texts, and another grammar after the time limit of a slow one."""
    cache, names = grammars(), ("patterns", "references", "a chain of rules")
    Constraint(cache, OBJECT)

    def refused(name: str) -> bool:
        with pytest.raises(GrammarError, match=TOO_SLOW):
            Constraint(cache, Grammar(*BAD[name][0]))
        return True

    with ThreadPoolExecutor(4) as threads:
        slow = [threads.submit(refused, name) for name in names]
        other = threads.submit(Constraint, cache, Grammar("regex", "other"))
        steps = 0
        while not all(future.done() for future in slow):
            constraint = Constraint(cache, OBJECT)
            constraint.consume(ids('{"ok": tr'))
            assert constraint.mask().any()
            steps += 1
        assert all(future.result() for future in slow) and other.result().mask().any()
    assert steps > 100


@pytest.mark.parametrize(("kind", "source", "message"), [
    ("xml", "a", "kind 'xml'"), ("regex", "", "empty"), ("ebnf", " \n", "empty"),
    ("regex", "a" * (MAX_SOURCE + 1), "at most"),
])  # fmt: skip
def test_kinds_and_sizes_of_grammars(kind, source, message):
    with pytest.raises(GrammarError, match=message):
        Grammar(kind, source)


def test_boolean_schema_is_quoted_as_json():
    for schema, text in ((True, "got true"), ([False], r"got \[false\]"), (3, "got 3")):
        with pytest.raises(GrammarError, match=text):
            Grammar.json(schema)


def test_variants_of_an_expression_leave_no_memory():
    """Each would take over 100 MB."""
    cache = grammars()
    cache.prepare()
    before = resident_bytes()
    for i in range(50):
        with pytest.raises(GrammarError, match="too many expressions"):
            Constraint(cache, Grammar("regex", f"a{{100}}{{100}}{{{100 + i}}}"))
    assert resident_bytes() - before < 2**24


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_choice_grammars():
    for odd in ('q"uo\\te', "a\nb\t\x01", "é→😀", "/x/", "a | b"):
        grammar = Grammar.choice(["zz", odd])
        assert follows(grammar, ids(odd)) and follows(grammar, ids("zz")) and not follows(grammar, ids("z"))
    for wrong in ([], ["a", ""]):
        with pytest.raises(GrammarError, match="list of texts"):
            Grammar.choice(wrong)


def test_unsupported_tokenizers():
    other = SimpleNamespace(backend_tokenizer=SimpleNamespace(to_str=lambda: "{}"))
    for tokens, size, message in (
        (SimpleNamespace(), VOCABULARY, "not one of the tokenizers library"),
        (other, VOCABULARY, "not available for this model"),
        (tokenizer(), 100, "vocab size too small"),
    ):
        with pytest.raises(GrammarError, match=message):
            Constraint(Grammars(tokens, size, (END,)), OBJECT)


def test_cache_of_compiled_grammars(monkeypatch):
    cache, compiled = grammars(), []
    compile = cache._compile
    monkeypatch.setattr(cache, "_compile", lambda grammar: compiled.append(grammar) or compile(grammar))
    regexes = [Grammar("regex", f"a{{{i + 1}}}") for i in range(5)]
    monkeypatch.setattr(module, "MAX_COMPILED", 3)
    for grammar in (*regexes, regexes[2]):
        Constraint(cache, grammar)
    assert compiled == regexes
    assert [cache.holds(grammar) for grammar in regexes] == [False, False, True, True, True]
    Constraint(cache, regexes[0])
    assert [cache.holds(grammar) for grammar in regexes] == [True, False, True, False, True], "most recently used"
    monkeypatch.setattr(module, "MAX_COMPILED_SOURCE", 2 * len(regexes[0].source))
    Constraint(cache, regexes[1])
    assert [cache.holds(grammar) for grammar in regexes] == [True, True, False, False, False]


def test_threads_share_compiled_grammars():
    cache = grammars()

    def work(seed: int) -> None:
        for i in range(20):
            constraint = Constraint(cache, Grammar("regex", f"a{{{(i + seed) % 7 + 1}}}"))
            assert as_bools(constraint.mask())[ids("a")[0]]

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))


def test_cache_is_searched_while_grammars_come_and_go():
    """The server's event loop asks `holds` while a thread compiles."""
    cache, ended = grammars(), threading.Event()
    compiled = cache.compiled(Grammar("regex", "a"))

    def change() -> None:
        for i in itertools.count():
            if ended.is_set():
                return
            cache._store(Grammar("regex", f"{i}"), compiled)
            cache.forget(Grammar("regex", f"{i - 40}"))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            changing = pool.submit(change)
            try:
                assert not any(cache.holds(Grammar("regex", "never")) for _ in range(3000))
            finally:
                ended.set()
            changing.result()
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("name", GRAMMARS)
def test_masks_along_a_text(name):
    """They equal the library's, with lookups of forced tokens and trees in between."""
    rng = np.random.default_rng(0)
    for _ in range(5):
        constraint, other = Constraint(grammars(), GRAMMARS[name]), matcher(GRAMMARS[name])
        for _ in range(40):
            expected = mask(other)
            if rng.random() < 0.5:
                forced = constraint.forced(4)
                assert len(forced) <= 4 and (not forced or list(np.flatnonzero(expected)) == forced[:1])
            if rng.random() < 0.5:
                tokens = rng.choice(np.flatnonzero(expected), 4)
                tree = np.array([0, *tokens]), np.array([-1, 0, 1, 2, 3]), np.ones(5, bool)
                constraint.masks(*tree, np.full((5, WORDS), ALL, np.uint32))
            np.testing.assert_array_equal(as_bools(constraint.mask()), expected)
            token = int(rng.choice(np.flatnonzero(expected)))
            constraint.consume([token])
            if token == END:
                break
            assert other.consume_token(token)


def random_tree(rng: np.random.Generator, grammar: Grammar, start: list[int], nodes: int) -> tuple[np.ndarray, ...]:
    """Half of its tokens are ones that the grammar allows there."""
    tokens, parents, paths = [0], [-1], [start]
    valid = np.ones(nodes, bool)
    for node in range(1, nodes):
        parent = int(rng.integers(max(0, node - 3), node))
        allowed = np.flatnonzero(mask_after(grammar, paths[parent]))
        likely = len(allowed) > 0 and rng.random() < 0.7
        token = int(rng.choice(allowed)) if likely else int(rng.integers(VOCABULARY))
        if any(parents[i] == parent and tokens[i] == token for i in range(1, node)):
            valid[node] = False  # siblings differ
        tokens.append(token)
        parents.append(parent)
        paths.append([*paths[parent], token])
    return np.array(tokens, np.int32), np.array(parents, np.int32), valid


def mask_after(grammar: Grammar, tokens: list[int]) -> np.ndarray:
    """bool [V]; none where the tokens are not allowed, or have ended the text."""
    state = matcher(grammar)
    if END in tokens or state.try_consume_tokens(tokens) < len(tokens):
        return np.zeros(VOCABULARY, bool)
    return mask(state)


@pytest.mark.parametrize("name", GRAMMARS)
def test_masks_of_a_tree(name):
    rng, grammar = np.random.default_rng(1), GRAMMARS[name]
    kept_nodes = dropped = 0
    for trial in range(8):
        start: list[int] = []
        constraint = Constraint(grammars(), grammar)
        for _ in range(trial):
            choices = [t for t in np.flatnonzero(mask_after(grammar, start)) if t != END]
            if not choices:
                break
            start.append(int(rng.choice(choices)))
        constraint.consume(start)
        tokens, parents, valid = random_tree(rng, grammar, start, 10)
        out = np.full((10, WORDS), ALL, np.uint32)
        kept = constraint.masks(tokens, parents, valid, out)
        paths = [start]
        for node in range(1, 10):
            paths.append([*paths[parents[node]], int(tokens[node])])
            above, token = paths[parents[node]], tokens[node]
            expected = valid[node] and kept[parents[node]] and bool(mask_after(grammar, above)[token])
            assert kept[node] == expected, (node, tokens, parents)
            if kept[node] and token != END:
                np.testing.assert_array_equal(as_bools(out[node]), mask_after(grammar, paths[node]))
        np.testing.assert_array_equal(as_bools(out[0]), mask_after(grammar, start))
        np.testing.assert_array_equal(as_bools(constraint.mask()), mask_after(grammar, start), "it is where it was")
        kept_nodes, dropped = kept_nodes + kept.sum(), dropped + (valid & ~kept).sum()
    assert kept_nodes > 15 and dropped > 15


def test_walk_ends_at_its_deadline():
    constraint, tokens = Constraint(grammars(), Grammar("regex", "[ab]+")), np.array([0, *ids("ababa")])
    tree = tokens, np.arange(-1, 5), np.ones(6, bool)
    for deadline, expected in ((time.perf_counter() + 60, 6), (time.perf_counter() - 1, 1)):
        out = np.full((6, WORDS), ALL, np.uint32)
        kept = constraint.masks(*tree, out, deadline)
        assert kept.sum() == expected and kept[0] and (as_bools(out[0]) == as_bools(constraint.mask())).all()


def test_excluded_nodes_leave_the_tree():
    """Nodes after an excluded one move up. Forced tokens are a chain."""
    a, b, c, x = (ids(letter)[0] for letter in "abcx")
    trees = root_trees(2, 5)
    tree = host_tree(trees[0])
    tree.tokens[:], tree.parents[:], tree.depth[:] = (9, x, a, b, c), (-1, 0, 0, 2, 2), (0, 1, 1, 2, 2)
    tree.valid[:] = 1
    trees[1] = trees[0]
    sequences = [idle_sequence(constraint=Constraint(grammars(), Grammar("regex", "a[bc]"))), idle_sequence()]
    step = np.zeros((2, 3), np.int32)
    packed = constrained_input(step, sequences, trees.copy(), {}, VOCABULARY)
    fields = host_tree(packed[0, 3:28].reshape(5, 5))
    assert fields.tokens.tolist() == [9, a, b, c, -1] and fields.parents.tolist() == [-1, 0, 1, 1, -1]
    assert fields.depth.tolist() == [0, 1, 2, 2, 0] and fields.valid.tolist() == [1, 1, 1, 1, 0]
    bits = as_bools(np.ascontiguousarray(packed[0, 28:]).reshape(5, WORDS))
    assert [np.flatnonzero(each).tolist() for each in bits[:3]] == [[a], sorted([b, c]), [END]]
    np.testing.assert_array_equal(packed[1, 3:28].reshape(5, 5), trees[1])
    assert (packed[1, 28:] == -1).all()

    sequences = [idle_sequence(constraint=Constraint(grammars(), Grammar("regex", "bcdef|bcdeg")))]
    forced = ids("bcde")
    packed = constrained_input(
        np.zeros((1, 2), np.int32), sequences, root_trees(1, 4), {"one": tuple(forced)}, VOCABULARY
    )
    fields = host_tree(packed[0, 2:22].reshape(5, 4))
    assert fields.tokens[1:].tolist() == forced[:3] and fields.parents.tolist() == [-1, 0, 1, 2]
    assert fields.depth.tolist() == [0, 1, 2, 3] and fields.valid.tolist() == [1, 1, 1, 1]


def test_forced_tokens():
    constraint = Constraint(grammars(), Grammar("regex", "[ab]hello"))
    assert constraint.forced(9) == []
    constraint.consume(ids("a"))
    assert constraint.forced(9) == [*ids("hello"), END] and constraint.forced(1) == ids("hello")[:1]
    constraint.consume(ids("hello"))
    assert constraint.forced(3) == [END] and constraint.forced(0) == []
    constraint.consume([END, END])  # tokens after the end are ignored


def test_waiting_for_a_program_uses_no_processor_time_of_a_text():
    """The engine plans again and again while a program compiles."""
    constraint = Constraint(grammars(), Grammar("regex", "[ab]hello"))
    constraint.consume(ids("a"))
    problem, tokens, left = constraint.problem(), constraint.forced(9), constraint._allowance
    for _ in range(9):
        assert (constraint.problem(), constraint.forced(9)) == (problem, tokens) and tokens
    assert constraint._allowance == left


def test_grammar_begins_after_reasoning():
    a, b = (ids(letter)[0] for letter in "ab")
    everything = set(range(VOCABULARY))

    def after_thoughts(begun: bool) -> Constraint:
        return Constraint(grammars(), Grammar("regex", "ab", Reasoning(START, STOP, begun).turn((END,))))

    open_block, may_open = after_thoughts(True), after_thoughts(False)

    def allowed(constraint: Any) -> set[int]:
        return set(np.flatnonzero(as_bools(constraint.mask())).tolist())

    assert allowed(open_block) == everything - {END} and open_block.forced(3) == []
    assert allowed(may_open) == {a, START}
    may_open.consume([START])
    for constraint in (open_block, may_open):
        constraint.consume([5, 6])
        assert allowed(constraint) == everything - {END}
        tokens, parents = np.array([0, 7, STOP, a, b, a]), np.array([-1, 0, 0, 2, 3, 1])
        out = np.full((6, WORDS), ALL, np.uint32)
        kept = constraint.masks(tokens, parents, np.ones(6, bool), out)
        assert kept.all() and as_bools(out[2]).nonzero()[0].tolist() == [a]
        assert as_bools(out[4]).nonzero()[0].tolist() == [END]
        constraint.consume([STOP])
        assert allowed(constraint) == {a} and constraint.forced(9) == [a, b, END]
    at_once = after_thoughts(False)
    at_once.consume([a])
    assert allowed(at_once) == {b}


def test_lexer_is_replaced_at_its_limit(monkeypatch):
    """Sequences with one compiled grammar share its lexer, whose states count toward the library's limit."""
    monkeypatch.setattr(module, "LEXER_STATES", 750)
    shared = grammars()
    grammar = Grammar.json({"type": "string", "maxLength": 120})

    def write(text: str) -> str | None:
        constraint = Constraint(shared, grammar)
        for token in ids(json.dumps(text)):
            assert constraint.mask()[token // 32] >> (token % 32) & 1 or constraint.failure
            if constraint.failure is not None:
                return constraint.failure
            constraint.consume([token])
        return constraint.problem()

    first = shared.compiled(grammar)
    draws = [np.random.default_rng(seed).integers(0, 26, 100) for seed in range(8)]
    assert [write("".join(chr(97 + letter) for letter in draw)) for draw in draws] == [None] * 8
    assert shared.compiled(grammar) is not first, "the limit was not reached"


def test_text_that_exceeds_the_lexer_limit(monkeypatch):
    monkeypatch.setattr(module, "LEXER_STATES", 60)
    constraint = Constraint(grammars(), Grammar.json({"type": "string", "maxLength": 2000}))
    for token in ids(json.dumps("abcdefgh" * 200)):
        if constraint.problem() is not None:
            break
        constraint.consume([token])
    assert "too many states" in (constraint.problem() or "")
