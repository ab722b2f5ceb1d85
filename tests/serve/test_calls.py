"""Function calls and thoughts in a model's text, read whole, by character and in random pieces."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_helpers import calls_of, hidden, read

from specjax.engine.chat.calls import Arguments, Call, Text, typed_value
from specjax.engine.chat.message_format import PARSERS, ReplyOptions

NAMES = ("add", "get_weather", "noop")
STRING: dict[str, Any] = {"type": "string"}
SCHEMAS: dict[str, Any] = {
    "add": {"type": "object", "properties": {"a": {"type": ["boolean", "number", "array", "object"]}, "s": STRING}},
    "get_weather": {"type": "object", "properties": {"city": STRING}},
    "noop": {},
}
NESTED = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}]"}]}}'
SECTION, BEGIN, SEP, END = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
ONE, NOOP = (("add", '{"a": 1}'),), (("noop", "{}"),)
TWO = (*ONE, *NOOP)
BRACKETS = (("add", '{"a": 1, "b": [2, {"c": "}]"}]}'),)
TEXTS = {  # by parser: texts without calls and thoughts
    "qwen": [
        '<tool_call>{"name": "ad', "a <tool_call> b </tool_call> c", "a <tool_cal", '{"name": "add", "arguments": {}}',
        '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>', "No. <think>x</think>", " <thi", " \n a \n",
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
    ],
    "llama3": ['{"city": "Paris", "parameters": {}}', ' {"name": "Bob", "parameters": {}} x',
               'See {"name": "add", "parameters": {}}'],
    "qwen3_coder": ["<tool_call>\n<function=rm>\n</function>\n</tool_call>", "<tool_call>\n<function=add>\n",
                    "a <tool_call> b </tool_call> <function=add> c"],
    "glm": ["<tool_call>rm\n<arg_key>a</arg_key></tool_call>", "<tool_call> add it </tool_call>"],
}  # fmt: skip


class Case(NamedTuple):
    parser: str
    text: str
    content: str | None
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str | None = None


CASES: list[Case] = [
    *(Case(parser, text, text) for parser, texts in TEXTS.items() for text in texts),
    # Qwen2.5, Qwen3, MiMo, Hermes.
    Case("qwen25", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}]"}]}}\n</tool_call>', None,
         BRACKETS),
    # text, two calls, text
    Case("hermes", 'Let me see.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
         '\n<tool_call>{"name": "noop", "arguments": {}}</tool_call>\nDone.', "Let me see.\n\nDone.",
         (("get_weather", '{"city": "Köln"}'), ("noop", "{}"))),
    # members in another order
    Case("qwen", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', None, ONE),
    Case("qwen", '<tool_call>{"name": "noop"}</tool_call>', None, NOOP),  # no arguments
    # arguments as text
    Case("qwen", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', None, ONE),
    # OpenAI's form
    Case("qwen", '<tool_call>{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}</tool_call>',
         None, ONE),
    Case("qwen", '<tool_call>{"name": "noop", "arguments": {}, "id": "}"}</tool_call>!', "!", NOOP),  # more members
    # the marker in a string
    Case("qwen", '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>\\"}"}}</tool_call>', None,
         (("add", '{"a": "</tool_call>\\"}"}'),)),
    # a line break in a string
    Case("qwen", '<tool_call>{"name": "add", "arguments": {"a": "x\n\ty"}}</tool_call>', None,
         (("add", '{"a": "x\\n\\ty"}'),)),
    # the last bracket is missing
    Case("qwen", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', None, ONE),
    # cut off in the arguments
    Case("qwen", '<tool_call>{"name": "add", "arguments": {"a": "x', None, (("add", '{"a": "x'),)),
    # wrong after the first value
    Case("qwen", '<tool_call>{"name": "add", "arguments": {"a": 1, b}}</tool_call>', None, (("add", '{"a": 1, b}'),)),
    # two markers
    Case("qwen", '<tool_call><tool_call>{"name": "noop", "arguments": {}}</tool_call>', "<tool_call>", NOOP),
    # Llama 3.
    Case("llama3", '{"name": "add", "parameters": {"a": 1}}', None, ONE),
    # a type, a tag
    Case("llama3", '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1}}', None, ONE),
    # two
    Case("llama3", '\n{"name": "add", "parameters": {"a": 1}}; {"name": "noop", "parameters": {}}\n'
         '{"name": "noop", "parameters": {"b": 2}}', None,
         (("add", '{"a": 1}'), ("noop", "{}"), ("noop", '{"b": 2}'))),
    Case("llama3", '{"name": "noop", "parameters": {}}, and so on', ", and so on", NOOP),  # text after it
    Case("llama3", 'So: <|python_tag|>{"name": "noop", "parameters": {}}', "So:", NOOP),  # text before the tag
    Case("llama3", '<|python_tag|>print("hi")', 'print("hi")'),  # code
    # Mistral.
    Case("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": [1]}, "id": "abcdef123"}, {"name": "noop", "arg'
         'uments": {}}]', None, (("add", '{"a": [1]}'), ("noop", "{}"))),
    Case("mistral", 'Hm. [TOOL_CALLS][{"name": "noop", "arguments": {}}]', "Hm.", NOOP),  # text before
    Case("mistral", '[TOOL_CALLS]add[CALL_ID]abcdef123[ARGS]{"a": 1}[TOOL_CALLS]noop{}', None, TWO),  # newer
    Case("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}', None, ONE),  # the list is not closed
    Case("mistral", "[TOOL_CALLS] maybe not", " maybe not"),  # no call
    Case("mistral", "[TOOL_CALLS] []", " []"),  # an empty list
    # DeepSeek.
    Case("deepseekv3", 'Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": '
         '"```"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>noop\n```json\n{}\n```'
         "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "Ok.", (("add", '{"a": "```"}'), ("noop", "{}"))),
    # V3.1
    Case("deepseekv31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
         "<｜tool▁call▁begin｜>noop<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", None, TWO),
    # no call
    Case("deepseekv3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁call▁end｜><｜tool▁calls▁end｜> x",
         "add x"),
    Case("deepseekv3", "a<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>b", "ab"),  # a section of nothing
    # Kimi K2.
    Case("kimi_k2", "Ok.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
         '{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.noop:1<|tool_call_argument_begin|>{}<|tool_call_end|>'
         "<|tool_calls_section_end|>", "Ok.", TWO),
    # an unknown function
    Case("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.rm:0<|tool_call_argument_begin|>"
         "{}<|tool_call_end|><|tool_calls_section_end|>x", "functions.rm:0{}x"),
    Case("kimi_k2", "<|tool_call_begin|>functions.noop:0<|tool_call_end|>y", "functions.noop:0y"),  # no arguments
    # cut off
    Case("kimi_k2", '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": "x', None,
         (("add", '{"a": "x'),)),
    # Qwen3-Coder.
    Case("qwen3_coder", 'Hm.\n<tool_call>\n<function=add>\n<parameter=a>\n[1, {"c": null}]\n</parameter>\n'
         "<parameter=s>\n12\n</parameter>\n</function>\n</tool_call>", "Hm.",
         (("add", '{"a": [1, {"c": null}], "s": "12"}'),)),
    # two
    Case("qwen3_coder", "<tool_call>\n<function=noop>\n</function>\n</tool_call>\n<tool_call>\n<function=get_weather>"
         "\n<parameter=city>\nKöln\n</parameter>\n</function>\n</tool_call>\nDone", "Done",
         (("noop", "{}"), ("get_weather", '{"city": "Köln"}'))),
    # without the outer tag
    Case("qwen3_coder", "<function=add>\n<parameter=a>\nTrue\n</parameter>\n</function>", None,
         (("add", '{"a": true}'),)),
    # a text of several lines
    Case("qwen3_coder", '<tool_call><function=add><parameter=s>\n\n if a < b:\n\treturn "</tool_call>"\n\n'
         "</parameter></function></tool_call>", None,
         (("add", '{"s": "\\n if a < b:\\n\\treturn \\"</tool_call>\\"\\n"}'),)),
    # cut off in a text
    Case("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=s>\nPar", None, (("add", '{"s": "Par'),)),
    # cut off after an argument
    Case("qwen3_coder", "<function=add>\n<parameter=a>\n1\n</parameter>\n<par", None, (("add", '{"a": 1'),)),
    # all ends are missing
    Case("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=s>\n1\n<parameter=a>\n2\n</tool_call>\nDone",
         "Done", (("add", '{"s": "1", "a": 2}'),)),
    # tags in a text
    Case("qwen3_coder", "<function=add><parameter=s>\nx = '<parameter=a>'\n<parameter=b>\n  <parameter=s>\nprint(1)\n"
         "</parameter>\n</function>", None,
         (("add", '{"s": "x = \'<parameter=a>\'\\n<parameter=b>\\n  <parameter=s>\\nprint(1)"}'),)),
    # tags in a text, without a schema
    Case("qwen3_coder", "<function=noop><parameter=s>\nx = '<parameter=b>'\n</parameter><parameter=t>\n1\n"
         "\t<parameter=u>2</function>", None, (("noop", '{"s": "x = \'<parameter=b>\'", "t": "1", "u": "2"}'),)),
    # GLM.
    Case("glm45", "Hm.<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>[1, 2]</arg_value>\n<arg_key>s</arg_key>\n"
         "<arg_value>1\n</arg_value>\n</tool_call>\n<tool_call>noop\n</tool_call>", "Hm.",
         (("add", '{"a": [1, 2], "s": "1\\n"}'), ("noop", "{}"))),
    Case("glm", '<tool_call>add\n<arg_key>s</arg_key>\n<arg_value>a"b', None, (("add", '{"s": "a\\"b'),)),  # cut off
    Case("glm", "<tool_call>add\n<arg_key>s</arg_k", None, (("add", ""),)),  # cut off in a key
    # Thoughts.
    Case("qwen", "<think>\n2 + 2?\n</think>\n\nIt is 4.\n", "It is 4.\n", (), "2 + 2?"),
    # then a call
    Case("qwen", "<think>\nHm <tool_call> hm\n</think>\n\n<tool_call>"
         '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}]"}]}}</tool_call>', None, BRACKETS,
         "Hm <tool_call> hm"),
    Case("qwen", "<think>\nWell, </thin", "", (), "Well, </thin"),  # without an end
]  # fmt: skip


def options(parser: str, **more: Any) -> ReplyOptions:
    return ReplyOptions(PARSERS[parser], NAMES, hidden=hidden(parser), schemas=SCHEMAS, **{"reasoning": True} | more)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parser} {case.text:.40}")
def test_formats_whole_and_in_pieces(case):
    message = read(options(case.parser), case.text)
    expected = (case.content, case.calls, case.reasoning)
    assert (message["content"], calls_of(message), message["reasoning_content"]) == expected


PIECES = (
    *(marker for parser in {*PARSERS.values()} for marker in parser.markers()), "<think>", "</think>", "[", "]", "{",
    '"', "\\", ",", ":", ";", " ", "\n", "<", "function", "add", "noop", "nope", '{"name": "add", "', "}",
    "arguments", '": {', '"parameters": ', '"a": 1', "```json\n",
)  # fmt: skip


@settings(max_examples=150)
@given(st.sampled_from(sorted(PARSERS)), st.lists(st.sampled_from(PIECES), max_size=24), st.booleans())
def test_message_does_not_depend_on_pieces(parser, parts, thinking):
    """Nothing raises, nothing is lost except white space and end markers, and special tokens never become content."""
    text = "".join(parts)
    message = read(options(parser), text, thinking=thinking)
    content = message["content"] or ""
    assert not any(marker in content for marker in hidden(parser))
    if not message.get("tool_calls") and not hidden(parser) and message["reasoning_content"] is None:
        closers = "|".join(map(re.escape, PARSERS[parser].closers))
        lost = rf"\s+|{closers}" if closers else r"\s+"
        assert re.sub(lost, "", content) in re.sub(lost, "", text)


def test_parts_come_at_once():
    """Only what may begin a marker is held back."""
    parser = PARSERS["qwen"](NAMES)
    parts = [parser.feed(piece) for piece in ("A <tool", '_call>{"name": "add", "argu', 'ments": {"a": "x', "y", '"}}')]
    assert parts == [[Text("A ")], [], [Call("add"), Arguments('{"a": "x')], [Arguments("y")], [Arguments('"}')]]
    parser = PARSERS["qwen"](NAMES)
    assert [parser.feed(text) for text in ("a", " < b", " <", "tool")] == [[Text("a")], [Text(" < b")], [Text(" ")], []]
    assert parser.feed("box") == [Text("<toolbox")]
    llama = PARSERS["llama3"](NAMES)
    assert [llama.feed(text) for text in ('{"na', 'tion": ', "1")] == [[], [Text('{"nation": ')], [Text("1")]]


@pytest.mark.parametrize(
    ("name", "first", "rest", "called"),
    [
        *(("hermes", f"<tool_call>{NESTED}</tool_call>", rest, called) for rest, called in (
            ('\n<tool_call>{"name": "get_weather", "argu', False), ("<tool_ca", False), ("<tool_call>", False),
            (" So 1 <", True), ("<tool_call> no JSON </tool_call>", True))),
        ("hermes", "<tool_call>" + NESTED, "</tool_c", True),
        ("llama3", '{"name": "noop", "parameters": {}}', '; {"name": "no', False),
        ("llama3", '{"name": "noop", "parameters": {}}', "; ", True),
        ("mistral", '[TOOL_CALLS] [{"name": "noop", "arguments": {}}', ', {"name"', False),
        ("mistral", '[TOOL_CALLS] [{"name": "noop", "arguments": {}}', "]", True),
        ("deepseekv31", f"{SECTION}{BEGIN}noop{SEP}{{}}{END}", f"{BEGIN}noo", False),
        ("kimi_k2", "<|tool_call_begin|>noop<|tool_call_argument_begin|>{}<|tool_call_end|>", "<|tool_call_begin|>",
         False),
        ("qwen3_coder", "<tool_call><function=noop></function></tool_call>", "<tool_call><function=no", False),
        ("qwen3_coder", "<function=noop></function>", "<funct", False),
        ("glm", "<tool_call>noop</tool_call>", "<tool_call>no", False),
    ],
)  # fmt: skip
def test_text_that_ends_in_a_second_call_has_not_called(name, first, rest, called):
    message = read(options(name, reasoning=False), first + rest)
    assert len(message["tool_calls"]) == 1 and message["has_called"] == called


def test_maximum_number_of_calls():
    text = '<tool_call>{"name": "noop", "arguments": {}}</tool_call>' * 2
    assert [len(read(options("qwen", most=most), text)["tool_calls"]) for most in (1, None)] == [1, 2]


@pytest.mark.parametrize("text", ["2 + 2?\n</think>\n\n4", "\n<think>\n2 + 2?</think>4", "2 + 2?</think>4"])
def test_thoughts_begun_by_the_prompt(text):
    message = read(options("qwen"), text, thinking=True)
    assert (message["reasoning_content"], message["content"]) == ("2 + 2?", "4")


def test_long_texts_without_a_call():
    """All of the text is returned, except markers that are special tokens."""
    for name, parser in PARSERS.items():
        for text in ("<" * 2000, "[" * 2000, '{"name": "' * 300, parser.begins[0] * 100):
            reader = parser(NAMES, hidden=hidden(name))
            parts = [part for start in range(0, len(text), 7) for part in reader.feed(text[start : start + 7])]
            parts += reader.feed("", last=True)
            content = "".join(part.text for part in parts if isinstance(part, Text))
            assert content == ("" if text.startswith(tuple(hidden(name))) else text)


def test_text_without_a_format():
    reply = ReplyOptions(hidden=frozenset({"<|x|>"})).reply(thinking=False)
    assert reply.feed("a <|x|>b <tool_call>", last=True) == [{"content": "a b <tool_call>"}]
    assert reply.message() == {"role": "assistant", "content": "a b <tool_call>"}


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("qwen3_coder", "<function=add><parameter=s>\n", "\n</parameter></function>"),
        ("glm", "<tool_call>add<arg_key>s</arg_key><arg_value>", "</arg_value></tool_call>"),
    ],
)
def test_time_of_long_values_is_linear(name, begin, end):
    value = "x</para</arg_ " * 10_000
    parser = PARSERS[name](NAMES, schemas=SCHEMAS)  # type: ignore[call-arg]
    text = begin + value + end
    parts = [part for start in range(0, len(text), 5) for part in parser.feed(text[start : start + 5])]
    parts += parser.feed("", last=True)
    assert parts[0] == Call("add")
    assert json.loads("".join(part.text for part in parts[1:] if isinstance(part, Arguments))) == {"s": value}


# Types of values between tags.

OPTIONAL = {"anyOf": [STRING, {"type": "null"}]}
INTEGER = {"type": "integer"}
LIST = {"type": "array", "items": STRING}
DEFINED = {
    "Name": STRING, "Ids": {"type": "array", "items": INTEGER}, "Loop": {"$ref": "#/$defs/Loop"}, "a/b": INTEGER,
}  # fmt: skip
TYPED: list[tuple[Any, str, Any]] = [  # a schema, a text, its value
    # A string, if the schema allows strings.
    *((schema, text, text)
      for schema in (STRING, {"type": ["string"]}, OPTIONAL, {"type": ["string", "null"]},
                     {"type": ["integer", "string"]}, {"oneOf": [INTEGER, STRING]}, {"$ref": "#/$defs/Name"},
                     {"allOf": [STRING, {"minLength": 1}]}, {"anyOf": [{"$ref": "#/$defs/Name"}, {"type": "null"}]},
                     {"type": "string", "nullable": True}, {}, True, {"description": "any"}, {"type": "text"},
                     {"$ref": "https://x.org/schema"}, {"$ref": "#/$defs/None"})
      for text in ("12", "1e5", "true", "None", "[1]", '{"a": 1}', '"x"', " x ", "", "NaN", "1e999", r'"\ud83d"')),
    (STRING, "null", "null"), (OPTIONAL, "null", None), ({"type": "string", "nullable": True}, "null", None),
    ({}, "null", None),
    # Enumerations.
    ({"enum": ["1", "2"]}, "1", "1"), ({"enum": ["1", "2"]}, "3", "3"), ({"enum": ["1", 2]}, "1", "1"),
    ({"enum": [1, 2]}, "2", 2), ({"enum": [1, None]}, "None", None), ({"const": "1"}, "1", "1"),
    ({"const": 1}, "1", 1), ({"const": None}, "null", None),
    ({"anyOf": [{"enum": ["all"]}, INTEGER]}, "all", "all"),
    # Other types.
    (INTEGER, "12", 12), (INTEGER, " 12\n", 12), (INTEGER, "1_000", 1000), (INTEGER, "twelve", "twelve"),
    *(({"type": "object", "properties": {"x": STRING, "n": INTEGER}}, text, value)
      for text, value in (("{'x': 1, 'n': 1.5}", {"x": 1, "n": 1.5}), ("{'x': None}", {"x": None}), ("[1]", [1]),
                          ('{"x": 1, "n": 1.5}', {"x": 1, "n": 1.5}), ("['x']", "['x']"),
                          ("{'x': f()}", "{'x': f()}"))),
    ({"anyOf": [LIST, {"type": "null"}]}, "['a', (1,)]", ["a", [1]]),
    (INTEGER, "1.5", 1.5), (INTEGER, "1,5", "1,5"), (INTEGER, "9" * 5000, "9" * 5000), (INTEGER, "null", None),
    ({"type": "number"}, "1e999", "1e999"), ({"type": "number"}, "NaN", "NaN"), ({"type": "number"}, "1.50", 1.5),
    ({"type": "boolean"}, "TRUE", True), ({"type": "boolean"}, "False", False), ({"type": "boolean"}, "true", True),
    ({"type": ["boolean", "null"]}, "None", None), ({"type": "null"}, "NULL", None),
    (LIST, '["a", "b"]', ["a", "b"]), (LIST, "['a','b']", ["a", "b"]), (LIST, "('a', None)", ["a", None]),
    (LIST, "[1e999]", "[1e999]"), (LIST, r'["\ud83d"]', r'["\ud83d"]'), (LIST, r"['\ud83d']", r"['\ud83d']"),
    (LIST, "['\\d']", ["\\d"]), (LIST, "[" * 300 + "]" * 300, "[" * 300 + "]" * 300), (LIST, "{1, 2}", "{1, 2}"),
    (LIST, "-" * 9999, "-" * 9999), (LIST, "[f()]", "[f()]"), ({"items": STRING}, "[1]", [1]),
    ({"type": "object"}, "{'a': True, 'b': (1, None)}", {"a": True, "b": [1, None]}),
    ({"type": "object"}, "\x00", "\x00"), ({"type": "object"}, "[" * 300, "[" * 300),
    ({"type": "object", "properties": {"x": STRING}}, '{"x": 1}', {"x": 1}), ({"properties": {}}, '{"x": 1}', {"x": 1}),
    ({"$ref": "#/$defs/Ids"}, "[1, 2]", [1, 2]), ({"$ref": "#/$defs/Loop"}, "5", "5"),
    ({"$ref": "#/$defs/a~1b"}, "5", 5), ({"type": "int", "enum": "x"}, "5", "5"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "text", "value"), TYPED)
def test_values_between_tags_have_the_schemas_types(schema, text, value):
    root = {"type": "object", "properties": {"p": schema}, "$defs": DEFINED}
    result = typed_value(text, "p", root)
    assert (result, type(result)) == (value, type(value))


def test_values_between_tags_of_unusual_schemas():
    for schema in ({}, {"properties": {"q": {}}}, {"properties": {}, "additionalProperties": False}):
        assert [typed_value(text, "p", schema) for text in ("1", "true", "[1]")] == ["1", "true", "[1]"]
    for schema in ({"properties": True}, {"properties": ["a"]}, {"properties": None}, {}):
        parser = PARSERS["qwen3_coder"](NAMES, schemas={"noop": schema})  # type: ignore[call-arg]
        parts = parser.feed("<function=noop><parameter=a>1\n<parameter=b>2</parameter></function>", last=True)
        assert "".join(part.text for part in parts if isinstance(part, Arguments)) == '{"a": "1", "b": "2"}'


def test_references_are_followed_once():
    """Without that, 500 references to themselves would take 500^4 steps."""
    options = [{"$ref": "#/$defs/x"}] * 500 + [{"type": "integer"}]
    schema = {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"anyOf": options}}}
    assert typed_value("5", "a", schema) == "5", "a schema that allows itself allows any type"
    schema["$defs"]["x"] = {"anyOf": [{"$ref": "#/$defs/y"}] * 500}
    schema["$defs"]["y"] = {"type": "integer"}
    assert typed_value("5", "a", schema) == 5
