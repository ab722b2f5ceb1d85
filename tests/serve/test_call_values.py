"""Markers in arguments, malformed calls, and calls in thoughts: every format, whole and in pieces."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_helpers import CALLS, calls_of, hidden, read, read_in_pieces

from specjax.checkpoint.prompts import END_THINK, THINK
from specjax.engine.chat.calls import CallParser
from specjax.engine.chat.message_format import PARSERS, ReplyOptions

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
SCHEMAS: dict[str, Any] = {
    "write": {
        "type": "object",
        "properties": {"path": STRING, "content": STRING, "mode": INTEGER, "tags": {"type": "array"}},
    },
    "search": {"type": "object", "properties": {"query": STRING, "n": INTEGER}, "required": ["query"]},
    "free": {"type": "object"},
    "open": {"type": "object", "properties": {"a": STRING}, "additionalProperties": True},
    "noop": {},
}  # fmt: skip


def qwen_coder(name: str, arguments: dict[str, Any]) -> str:
    values = "".join(f"<parameter={key}>\n{written(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def glm(name: str, arguments: dict[str, Any]) -> str:
    values = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{written(value)}</arg_value>\n" for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{values}</tool_call>"


def written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def in_json(pattern: str) -> Callable[[str, dict[str, Any]], str]:
    def call(name: str, arguments: dict[str, Any]) -> str:
        return pattern.replace("NAME", name).replace("JSON", json.dumps(arguments, ensure_ascii=False))

    return call


FORMATS: dict[str, Callable[[str, dict[str, Any]], str]] = {
    **{name: in_json(pattern) for name, pattern in CALLS.items()}, "qwen3_coder": qwen_coder, "glm": glm,
}  # fmt: skip
TAGGED = ("qwen3_coder", "glm")
THINKING = [name for name in FORMATS if name != "gpt-oss"]


def options(name: str, **more: Any) -> ReplyOptions:
    name = name.split()[0]
    more = {"reasoning": True} | more
    return ReplyOptions(PARSERS[name], tuple(SCHEMAS), hidden=hidden(name), schemas=SCHEMAS, **more)


def parsed(name: str, text: str, *, thinking: bool = False, **more: Any) -> dict[str, Any]:
    return read(options(name, **more), text, thinking=thinking or name == "gpt-oss")


def shown(name: str, text: str) -> str:
    """The text without special tokens."""
    return functools.reduce(lambda text, mark: text.replace(mark, ""), options(name).hidden, text)


def values_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls_of(message)]


# Markers in values.

MARKERS = [
    *dict.fromkeys(
        mark
        for parser in PARSERS.values()
        for mark in (*parser.markers(), getattr(parser, "value_end", ""), getattr(parser, "opens", ""))
        if mark
    ),
    "<arg_value>", "</arg_key>", THINK, END_THINK, "[TOOL_CALLS]", "<parameter=bogus>", "<parameter=path>",
    "<arg_key>bogus</arg_key>\n<arg_value>", "<arg_key>path</arg_key><arg_value>", "<function=write>", "```json",
]  # fmt: skip
PLACES = ("{0}", "{0}{0}\n{0}\nx{0}y\n {0} \na\n{0}\nb\n{0}\n{0}\nsay('{0}'){0}")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("place", PLACES, ids=["alone", "in text"])
def test_markers_in_values(name, place):
    """`path` is given before, so that no tag in the value names a key that may follow."""
    for mark in MARKERS:
        arguments = {"path": "/a", "content": place.format(mark)}
        for number, members in enumerate((arguments, {**arguments, "mode": 1})):
            text = FORMATS[name]("write", members)
            size = 3 if number else len(text)
            pieces = [text[at : at + size] for at in range(0, len(text), size)]
            message = read_in_pieces(options(name).reply(thinking=name == "gpt-oss"), pieces)
            assert values_of(message) == [("write", members)] and message["has_called"], text
            assert message["content"] is None


VALUES = {
    "qwen3_coder": [
        "x</parameter>\ny", "x\n</parameter>\n\ny", "</parameter>", "</parameter>\n</parameter>",
        "foo\n</parameter>\nx\n<parameter=path>\nbar", "foo\n</parameter>\n<parameter=path>\nbar\n</parameter>\nbaz",
        "foo\n</parameter>\n<parameter=bogus>\n1\n</parameter>\n", "</parameter>\n<parameter=content>\n",
        "</parameter></function>", "</parameter>\n</function>\n</tool_call>", "</function></tool_call>",
        "</parameter></function>\n</tool_call> and more", "</tool_call>\n<tool_call>\n",
        "</function></function>", "<tool_call>\n<function=noop>\n</function>\n</tool_call>",
        qwen_coder("search", {"query": "q", "n": 2}), f"a\n{qwen_coder('search', {'query': 'q'})}\n" * 2,
        f"a {qwen_coder('write', {'path': 'q', 'mode': 2})} b", "<function=search>\n<parameter=query>",
        "<parameter=mode", "<parameter=", "</parameter", "</parameter>\n<parameter=path", "</parameter>\n<", "\n", "",
        " x ", "\n\nx\n\n", "<parameter=mode>", "see <parameter=mode>1</parameter>",
    ],
    "glm": [
        "x</arg_value>\ny", "</arg_value>", "</arg_value></arg_value>",
        "foo</arg_value>\nx\n<arg_key>path</arg_key>\n<arg_value>bar",
        "foo</arg_value>\n<arg_key>path</arg_key>\n<arg_value>bar</arg_value>baz",
        "foo</arg_value>\n<arg_key>bogus</arg_key>\n<arg_value>1",
        "</arg_value></tool_call>", "</arg_value>\n</tool_call>\n</tool_call>", "</arg_value></tool_call> and more",
        "</tool_call>\n<tool_call>", "<tool_call>noop</tool_call>", glm("search", {"query": "q", "n": 2}),
        f"a\n{glm('search', {'query': 'q'})}\n" * 2, f"a {glm('write', {'path': 'q'})} b", "<arg_key>mode",
        "<tool_call>search\n<arg_key>", "</arg_value", "</arg_value>\n<arg_key>path", "</arg_value>\n<", "\n", "",
        " x ", "<arg_key>mode</arg_key>", "<arg_value>",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [pytest.param(name, value, id=f"{name} {value:.60}") for name in VALUES for value in VALUES[name]],
)
def test_tags_in_values(name, value):
    """Also where calls follow, with text between."""
    write = FORMATS[name]
    for arguments in ({"path": "/a", "content": value}, {"path": "/a", "content": value, "mode": 1}):
        text = write("write", arguments)
        message = parsed(name, text)
        assert values_of(message) == [("write", arguments)] and message["content"] is None and message["has_called"]
        message = parsed(name, f"So:\n{text}\n{write('search', {'query': 'q'})}\n{write('noop', {})}\nDone.")
        assert values_of(message) == [("write", arguments), ("search", {"query": "q"}), ("noop", {})]
        assert message["content"] == "So:\nDone."


PIECES = {
    "qwen3_coder": ("<tool_call>", "</tool_call>", "<function=", "search", ">", "</function>", "</parameter>", "\n",
                    "<parameter=path>", "<parameter=bogus>", "<parameter=", "x", " "),
    "glm": ("<tool_call>", "</tool_call>", "search", "<arg_key>", "path", "</arg_key>", "<arg_value>", "</arg_value>",
            "\n", "bogus", "x", " "),
}  # fmt: skip


@settings(max_examples=60)
@given(st.data())
def test_random_tags_in_values(data):
    """The format can express every value that quotes no whole call and no key that has not been given."""
    name = data.draw(st.sampled_from(TAGGED))
    value = "".join(data.draw(st.lists(st.sampled_from(PIECES[name]), max_size=10)))
    if "<function=search>" in value or "<tool_call>search" in value.replace("\n", "").replace(" ", ""):
        return
    arguments = {"path": "/a", "content": value}
    assert values_of(parsed(name, FORMATS[name]("write", arguments))) == [("write", arguments)]


TYPED: list[tuple[str, dict[str, Any]]] = [
    # A key that the schema does not name follows a value that cannot hold tags.
    ("search", {"n": 5, "bogus": "x"}), ("write", {"mode": 5, "bogus": "x", "path": "p"}),
    ("write", {"tags": ["</parameter>", "</arg_value>"], "path": "p"}),
    ("write", {"tags": ["</parameter>", "<parameter=path>"], "bogus": "1", "mode": 2}),
    ("free", {"a": "1", "b": "2"}), ("open", {"a": "1", "b": "</parameter></arg_value>", "c": "x"}),
    ("free", {"a": "</parameter>", "b": "</arg_value>"}),
]  # fmt: skip


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(("function", "arguments"), TYPED)
def test_types_and_schemas_of_values_with_tags(name, function, arguments):
    message = parsed(name, FORMATS[name](function, arguments))
    assert values_of(message) == [(function, arguments)] and message["content"] is None


# Malformed calls.

QUERY = {"query": "cats"}
REPAIRED: dict[str, list[tuple[str, list[tuple[str, Any]]]]] = {  # a text with one possible reading, and its calls
    "qwen3_coder": [
        ("<tool_call>\n<function=search>\n<parameter=query\ncats\n</parameter>\n</function>\n</tool_call>",
         [("search", QUERY)]),
        ("<tool_call>\n<function=search>\n<parameter=n>\n5\n</parameter>\n<parameter=query\ncats\n</parameter>\n"
         "</function>\n</tool_call>", [("search", {"n": 5, **QUERY})]),
        ('<tool_call><function=search><parameter="query">cats</parameter></function></tool_call>', [("search", QUERY)]),
        ("<tool_call><function=search><parameter=query>cats</parameter></tool_call>", [("search", QUERY)]),
        ("<tool_call><function=search><parameter=query>\ncats\n</function></tool_call>", [("search", QUERY)]),
        ("<tool_call><function=search><parameter=query>cats</parameter></function></function></tool_call></tool_call>",
         [("search", QUERY)]),
        ("<tool_call>\n<function=search>\n<parameter=query>\ncats\n</parameter>\n<tool_call>\n<function=noop>\n"
         "</function>\n</tool_call>", [("search", QUERY), ("noop", {})]),
    ],
    "glm": [
        ("<tool_call>search\n<arg_key>query</arg_key>\ncats</arg_value>\n</tool_call>", [("search", QUERY)]),
        ("<tool_call>search<arg_key>query</arg_key>cats</arg_value></tool_call>", [("search", QUERY)]),
        ("<tool_call>search\n<arg_key>query<arg_value>cats</arg_value>\n</tool_call>", [("search", QUERY)]),
        ("<tool_call>search\n<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n<arg_key>query</arg_key>\ncats</arg_value>\n"
         "</tool_call>", [("search", {"n": 5, **QUERY})]),
        ("<tool_call>search<arg_key>query</arg_key><arg_value>cats</tool_call>", [("search", QUERY)]),
        ("<tool_call>search<arg_key>query</arg_key><arg_value>cats</arg_value><tool_call>noop</tool_call>",
         [("search", QUERY), ("noop", {})]),
    ],
    "qwen": [('<tool_call>{"name": "search", "arguments": {"query": "cats"}</tool_call>', [("search", QUERY)])],
    "gpt-oss": [("<|channel|>commentary to=functions.search json{\"query\": \"cats\"}<|call|>", [("search", QUERY)])],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [pytest.param(name, *case, id=f"{name} {case[0]:.70}") for name in REPAIRED for case in REPAIRED[name]],
)
def test_calls_with_one_possible_reading(name, text, calls):
    message = parsed(name, text)
    assert values_of(message) == calls and message["content"] is None and message["has_called"]


FIVE = "<parameter=n>\n5\n</parameter>"
MALFORMED: dict[str, list[str]] = {
    "qwen3_coder": [
        f"<tool_call>\n<function=search>\n{first}{wrong}\n</function>\n</tool_call>"
        for first in ("", f"{FIVE}\n", f"{FIVE}\n<parameter=query>\nq\n</parameter>\n")
        for wrong in ("<parameter=cats\nx", "<parameter=cats\nx\n</parameter>", "<parameter query>\nx\n</parameter>",
                      "<parameter=>\nx\n</parameter>", "<parameter>query</parameter>", "<parameters>\nx",
                      "<parameter=a<b>\nx\n</parameter>", f"<parameter={'x' * 257}>\nx\n</parameter>",
                      "<query>\nx\n</query>", "<parameter=query=x>\n</parameter>", "query: x", "x</parameter>",
                      "<parameter=query\nx")
        if "=query>" not in first or not wrong.endswith("</parameter>")  # else it may be a part of the text before
    ] + [
        f"<tool_call><function=write><parameter=path>a</parameter>\n<parameter={wrong}</parameter></function></tool_call>"
        for wrong in ("content x", "content x\n", "content", "mode=5>", "content</parameter>", " content\nx")
    ] + [
        "<tool_call><function=search</function></tool_call>", "<tool_call><function=>\n</function></tool_call>",
        "<tool_call><function=search>query: cats</function></tool_call>",
        "<tool_call><function=search><parameter=n>\n5\n</parameter><parameter=n>\n6\n</parameter></function></tool_call>",
        "<tool_call><function=search><parameter=query>a</function> b</function></tool_call>",
        "<function=search><parameter=que</function>", '<tool_call>{"name": "search", "arguments": {}}</tool_call>',
    ],
    "glm": [
        f"<tool_call>search\n{first}{wrong}\n</tool_call>"
        for first in ("", "<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n")
        for wrong in ("<arg_key>query</arg_key>\ncats", "<arg_key>query</arg_key>\n<arg>cats</arg>",
                      "<arg_key>query\ncats</arg_value>", "<arg_value>cats</arg_value>",
                      "query</arg_key><arg_value>cats</arg_value>", "<arg_key>bogus</arg_key>\ncats</arg_value>",
                      "<arg_key>query</arg_key>a\n<arg_value>cats</arg_value>", "query: cats",
                      "<arg_key></arg_key>\n<arg_value>cats</arg_value>", "<query>cats</query>", "<arg_keys>",
                      "<arg_key>n</arg_key>2", "<arg_key>n\n")
    ] + [
        f"<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>a</arg_value>\n<arg_key>content{wrong}\n</tool_call>"
        for wrong in ("</arg_key>\nx", " x</arg_value>", "", "</arg_key>\n<arg>x</arg_value>", "</arg_key>")
    ] + [
        "<tool_call>search<arg_key>n</arg_key><arg_value>5</arg_value><arg_key>n</arg_key><arg_value>6</arg_value></tool_call>",
        "<tool_call><arg_key>query</arg_key><arg_value>x</arg_value></tool_call>",
        '<tool_call>{"name": "search", "arguments": {}}</tool_call>',
    ],
    "qwen": [
        f'<tool_call>{{"name": "search", {wrong}}}</tool_call>'
        for wrong in ('"args": {"query": "cats"}', '"query": "cats"', '"arguments": ["cats"]', '"arguments": "cats"',
                      '"arguments": {"query": }', '"arguments": {query: "cats"}', '"arguments": {"query" "cats"}',
                      '"arguments": "{\\"query\\": }"', '"arguments": {"query": cats}')
    ] + ['<tool_call>{"arguments": {"query": "cats"}}</tool_call>', "<tool_call>search</tool_call>"],
    "llama3": ['{"name": "search", "args": {"query": "cats"}}', '{"name": "search", "parameters": {"query": cats}}'],
    "mistral": ['[TOOL_CALLS] [{"name": "search", "query": "cats"}]', "[TOOL_CALLS]search[ARGS]cats",
                "[TOOL_CALLS]search[ARGS]", '[TOOL_CALLS]{"arguments": {"query": "cats"}}'],
    "deepseekv3": ["<｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\nquery\n```<｜tool▁call▁end｜>",
                   '<｜tool▁call▁begin｜>search{"query": "cats"}<｜tool▁call▁end｜>'],
    "deepseekv31": ['<｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": }<｜tool▁call▁end｜>'],
    "kimi_k2": ['<|tool_call_begin|>functions.search:0{"query": "cats"}<|tool_call_end|>',
                "<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>cats<|tool_call_end|>"],
    "gpt-oss": [f"<|channel|>commentary to=functions.search json<|message|>{wrong}<|call|>"
                for wrong in ("cats", '{"query": }', "}", "[1]", '"cats"')]
               + ["<|channel|>commentary to=functions.search cats<|call|>"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text"),
    [pytest.param(name, text, id=f"{name} {text:.90}") for name in MALFORMED for text in MALFORMED[name]],
)
def test_malformed_calls_are_text(name, text):
    """Also beside a call in the right form."""
    message, content = parsed(name, text), shown(name, text)
    assert "tool_calls" not in message and not message["has_called"]
    if name in ("mistral", "gpt-oss"):
        assert "cats" not in text or "cats" in message["content"]
    else:
        assert message["content"].strip() == content.strip()
    if name in ("qwen3_coder", "glm", "qwen", "deepseekv31"):
        message = parsed(name, text + "\n" + FORMATS[name]("noop", {}))
        assert values_of(message) == [("noop", {})] and message["content"].strip() == content.strip()
        longer = read_in_pieces(options(name).reply(thinking=False), [text + "x" * 600])
        assert longer["content"].strip() == f"{content}{'x' * 600}".strip()


INVALID = {
    "qwen": ['{"name": "search", "arguments": {"query": "cats"}, "n": 5}', '{"name": "search", "arguments": {"n": [5}}',
             '{"name": "search", "arguments": {"query": "cats", n: 5}}'],
    "llama3": ['{"name": "search", "parameters": {"query": "cats"}, "n": 5}'],
    "mistral": ['[TOOL_CALLS] [{"name": "search", "arguments": {"query": "cats"}, "n": 5}]'],
}  # fmt: skip


@pytest.mark.parametrize(("name", "text"), [(name, text) for name in INVALID for text in INVALID[name]])
def test_arguments_that_turn_out_to_be_malformed_are_no_json(name, text):
    """They have been streamed, and no client can execute them."""
    text = f"<tool_call>{text}</tool_call>" if name == "qwen" else text
    message = parsed(name, text)
    ((_, arguments),) = calls_of(message)
    with pytest.raises(json.JSONDecodeError):
        json.loads(arguments)
    assert not message["has_called"] or "n: 5" in text
    assert message["content"] is None


# Calls in thoughts.

OPENINGS = [(True, ""), (False, THINK), (False, f"\n{THINK}\n")]  # the prompt begins the thoughts; the answer does


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize(("thinking", "begin"), OPENINGS)
def test_call_in_open_thoughts(name, thinking, begin):
    call = FORMATS[name]("write", {"path": "/a", "content": "x <b>"})
    expected = ("write", {"path": "/a", "content": "x <b>"})
    for before in ("Hm, 1 < 2.\n", "", "First {x}:\n\n"):
        message = parsed(name, f"{begin}{before}{call}", thinking=thinking)
        assert values_of(message) == [expected] and message["has_called"] and message["has_thought"], before
        assert (message["content"], message["reasoning_content"]) == (None, before.strip() or None)
    message = parsed(name, f"{begin}So\n{call}", thinking=thinking, reasoning=False, thinks=True)
    assert values_of(message) == [expected] and message["content"] == f"{begin}So"


@pytest.mark.parametrize("name", THINKING)
def test_calls_and_text_after_a_call_in_open_thoughts(name):
    write, noop = FORMATS[name]("write", {"path": "/a"}), FORMATS[name]("noop", {})
    calls, text = f"{write}\n{noop}", " Done."
    if name == "llama3":
        calls, text = f"{write}; {noop}", ""
    elif name.startswith("mistral"):
        text = ""
        calls = '[TOOL_CALLS] [{"name": "write", "arguments": {"path": "/a"}}, {"name": "noop", "arguments": {}}]'
    message = parsed(name, f"So:\n{calls}{text}", thinking=True)
    assert values_of(message) == [("write", {"path": "/a"}), ("noop", {})]
    assert (message["content"], message["reasoning_content"]) == (text.strip() or None, "So:")


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize("answer", ["It is 4.", "CALL", ""])
def test_quoted_call_in_thoughts_that_close(name, answer):
    quoted = FORMATS[name]("write", {"path": "/a"})
    answer = answer.replace("CALL", FORMATS[name]("noop", {}))
    thoughts = f"I could write\n{quoted}\nbut no."
    message = parsed(name, f"{thoughts}\n{END_THINK}\n\n{answer}", thinking=True)
    assert message["reasoning_content"] == thoughts
    assert values_of(message) == ([("noop", {})] if "noop" in answer else [])
    assert message["content"] == (None if "noop" in answer else answer)
    message = parsed(name, f"{thoughts}\n{END_THINK}\n\n{answer}", thinking=True, reasoning=False, thinks=True)
    assert values_of(message) == ([("noop", {})] if "noop" in answer else []), "also if thoughts are content"
    assert message["content"].startswith(f"{shown(name, thoughts)}\n{END_THINK}")


@pytest.mark.parametrize("name", THINKING)
def test_incomplete_call_in_open_thoughts_is_a_thought(name):
    whole = FORMATS[name]("write", {"path": "/a", "content": "x"})
    end = whole.rindex("x")
    for size in range(1, end + 2):
        text = f"So:\n{whole[:size]}"
        once = read_in_pieces(options(name).reply(thinking=True), [text])
        message = once if size % 8 else parsed(name, text, thinking=True)
        assert "tool_calls" not in message and message["reasoning_content"] == text.rstrip(), size
    unknown = whole.replace("write", "unknown")
    message = parsed(name, f"So:\n{unknown}", thinking=True)
    assert "tool_calls" not in message and message["reasoning_content"] == f"So:\n{unknown}"


@pytest.mark.parametrize("name", THINKING)
def test_whole_call_after_quotes_in_open_thoughts(name):
    """An incomplete quote, a marker and an unknown function come before."""
    call = FORMATS[name]("search", {"query": "q"})
    marks = PARSERS[name.split()[0]].begins
    for quote in (FORMATS[name]("unknown", {"a": 1}), f"the marker {marks[0]} is", call[: call.index("query") - 2]):
        thoughts = f"So:\n{quote}\nis wrong, 1 < 2.\n"
        message = parsed(name, f"{thoughts}{call}", thinking=True)
        assert values_of(message) == [("search", {"query": "q"})], quote
        assert (message["content"], message["reasoning_content"]) == (None, thoughts.strip())


def test_thoughts_are_streamed_up_to_a_marker():
    reply = options("qwen").reply(thinking=True)
    passed = [("So 1 <", "So 1"), (" 2 <tool", " < 2"), ("_box> or ", " <tool_box> or"), ("<tool_call>", "")]
    passed += [(" is a marker. ", " <tool_call> is a marker."), ('<tool_call>{"name": "noop", ', ""), ('"x": 1', "")]
    passed += [("}. ", ' <tool_call>{"name": "noop", "x": 1}.'), ('<tool_call>{"name": "noop"}', ""), ("x", "")]
    for piece, thoughts in passed:
        assert "".join(delta["reasoning_content"] for delta in reply.feed(piece)) == thoughts
    assert reply.feed(END_THINK) == [{"reasoning_content": ' <tool_call>{"name": "noop"}x'}]


@settings(max_examples=60)
@given(st.data())
def test_thoughts_do_not_depend_on_pieces(data):
    """Thoughts, quotes, ends of thoughts and calls in any order."""
    name = data.draw(st.sampled_from(THINKING))
    call, other = FORMATS[name]("write", {"path": "/a", "content": "</parameter> x"}), FORMATS[name]("noop", {})
    quotes = [call, other, call[:-9], call[: len(call) // 2], *PARSERS[name.split()[0]].begins]
    parts = [*quotes, "\n", " So. ", THINK, END_THINK, "{", "<"]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=7)))
    message = parsed(name, text, thinking=True, reasoning=False, thinks=True)
    assert END_THINK in text or call not in text or name == "llama3" or message.get("tool_calls")
    message = parsed(name, text, thinking=True)
    if END_THINK not in text and call in text and name not in ("llama3",):
        assert message.get("tool_calls")


@pytest.mark.parametrize("size", [50, 100_000])
@pytest.mark.parametrize("name", THINKING)
def test_work_for_markers_in_thoughts_is_bounded(name, size, monkeypatch):
    """A trial at a marker reads a short piece of the text, in a stream and of a whole answer."""
    states = 0

    def enter(self: CallParser, state: Callable[[], bool]) -> bool:
        nonlocal states
        states += 1
        return plain(self, state)

    plain = CallParser._enter
    monkeypatch.setattr(CallParser, "_enter", enter)
    begin = PARSERS[name.split()[0]].begins[0]
    text = begin * (10_000 // len(begin))
    reply = options(name).reply(thinking=True)
    for at in range(0, len(text), size):
        reply.feed(text[at : at + size])
    reply.feed("", last=True)
    assert reply.message()["reasoning_content"] == text
    assert states < 25_000, "125,000 if each trial reads the whole text"


@pytest.mark.parametrize("name", FORMATS)
def test_time_of_white_space_after_markers_is_linear(name):
    """Where a name may follow, in a value and outside; some models repeat white space without end."""
    call = FORMATS[name]("write", {"path": "PATH"})
    for begin in PARSERS[name.split()[0]].begins:
        for text in (begin + " " * 20_000, call.replace("PATH", f"a {begin}{' ' * 20_000}")):
            started = time.thread_time()
            options(name).reply(thinking=name == "gpt-oss").feed(text, last=True)
            assert time.thread_time() - started < 5, "hours if it is cubic"
