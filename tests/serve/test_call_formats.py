"""Formats of calls: how a chat template reveals them, how it takes earlier calls, and grammars of calls."""

from __future__ import annotations

import copy
import functools
import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from body_helpers import CHAT, EVERY_LEAST, MESSAGES, RESPONSES, refusal, task
from engine_helpers import END, TEMPLATE
from engine_helpers import tokenizer as plain_tokenizer
from grammar_helpers import follows
from tool_helpers import MARKERS, NOOP, WEATHER, tool_tokenizer

from specjax.checkpoint.prompts import begins_thinking, render_chat
from specjax.engine.chat.calls import CallParser, DeepSeek, DeepSeek31, Hermes, KimiK2, Llama3, Mistral, MistralNamed
from specjax.engine.chat.message_format import PARSERS, ReplyOptions, answer_form, short_id
from specjax.engine.chat.tools import Tools, any_arguments, call_grammar
from specjax.engine.grammar import WORD, Constraint, Grammar, GrammarError, Grammars
from specjax.serve.fields import Reading
from specjax.serve.tokenising import Rules
from specjax.serve.tools import ToolFields

# Templates. By family: template, parser, whether it thinks, how it ends the prompt of `TURNS`.

TELLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
CALL = {"id": "call_0123456789abcdef01234567", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "1", "tool_call_id": CALL["id"]},
]
FAMILIES: dict[str, tuple[str, type | None, bool, str]] = {
    "qwen": (
        TELLS + "<tool_call></tool_call></think>{% for m in messages %}{% for c in m.tool_calls or [] %}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}{% endfor %}',
        Hermes, True, '{"name": "f", "arguments": {"a": 1}}',
    ),
    "llama": (
        TELLS + "Environment: ipython{% for m in messages %}{% if 'tool_calls' in m %}"
        "{% if m.tool_calls | length != 1 %}{{ raise_exception('one') }}{% endif %}"
        "{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}{% endfor %}",
        Llama3, False, '{"a": 1}',
    ),
    "mistral": (
        TELLS + "[TOOL_CALLS]{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% if c.id is not defined or c.id | length != 9 %}{{ raise_exception('9') }}{% endif %}"
        "{{ c.function | tojson }}{{ c.id }}{% endfor %}"
        "{% if m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('9') }}{% endif %}"
        "{{ m.tool_call_id }}{% endif %}{% endfor %}",
        Mistral, False, '{"name": "f", "arguments": {"a": 1}}' + 2 * short_id(CALL["id"], 9),
    ),
    "deepseek": (
        TELLS + "<｜tool▁call▁begin｜><｜tool▁sep｜>```json{% for m in messages %}"
        "{% for c in m.tool_calls or [] %}{{ m.content + c.function.name + '\n' + c.function.arguments }}{% endfor %}"
        "{% endfor %}",
        DeepSeek, False, 'f\n{"a": 1}',
    ),
    "deepseek V3.1": (TELLS + "<｜tool▁call▁begin｜><｜tool▁sep｜>", DeepSeek31, False, ""),
    "mistral, newer": (TELLS + "[TOOL_CALLS][ARGS]", MistralNamed, False, ""),
    "kimi": (
        TELLS + "<|tool_call_argument_begin|>{% for m in messages %}"
        "{% for c in m.tool_calls or [] %}{{ c.id }}{% endfor %}{{ m.tool_call_id }}{% endfor %}",
        KimiK2, False, 2 * "functions.f:0",
    ),
    "qwen coder, whole": (TELLS + "<tool_call><function=x><parameter=y>", PARSERS["qwen3_coder"], False, ""),
    "qwen 3.8": (
        TELLS + "<tool_call><function=x><parameter=y></think>{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% for name, value in c.function.arguments | items %}<parameter={{ name }}>\n"
        "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}{% endfor %}{% endfor %}",
        PARSERS["qwen3_coder"], True, "<parameter=a>\n1\n</parameter>\n",
    ),
    "glm": (TELLS + "<tool_call>x<arg_key>y</arg_key><arg_value>z</arg_value>", PARSERS["glm45"], False, ""),
    "unknown marker": (TELLS + "<tool_call><name>", None, False, ""),
    "qwen coder": (TELLS + "<tool_call><function=", None, False, ""),
    "no marker": (TELLS, None, False, ""),
}  # fmt: skip


def tokenizer_with(template: Any) -> Any:
    tokenizer = copy.deepcopy(plain_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_template_reveals_the_format(family):
    template, parser, thinks, ending = FAMILIES[family]
    tokenizer = tokenizer_with(template)
    form = answer_form(tokenizer)
    assert (form.parser, form.thinks, form.takes_tools) == (parser, thinks, True)
    assert (form.refusal is None) == (parser is not None)
    if ending:
        assert tokenizer.apply_chat_template(form.for_template(TURNS), tokenize=False).endswith(ending)


def test_flags_take_precedence_over_the_template():
    tokenizer = tokenizer_with(FAMILIES["qwen"][0])
    assert answer_form(tokenizer, tool_call_parser="mistral").parser is Mistral
    assert answer_form(tokenizer, tool_call_parser="none").refusal
    assert not answer_form(tokenizer, reasoning_parser="none").thinks
    assert answer_form(tokenizer_with(TELLS), reasoning_parser="qwen3").thinks


@pytest.mark.parametrize(
    ("template", "takes"),
    [
        (TEMPLATE, False),
        ("{% if tools %}{{ raise_exception('no') }}{% endif %}<tool_call>", True),  # a request gets its error
        ("{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}", False),
        ("{% if messages[0].tools %}{{ messages[0].tools }}{% endif %}", False),  # Phi-4-mini
        ({"default": TEMPLATE, "tool_use": TELLS + "<tool_call>"}, True),
        (None, False),
    ],
)
def test_template_takes_functions(template, takes):
    assert answer_form(tokenizer_with(template)).takes_tools is takes


GUARDED = (  # as in Qwen3.8's template
    "{% if enable_thinking is undefined or enable_thinking %}{% set effort = reasoning_effort | default('xhigh') %}"
    "{% if effort not in ('xhigh', 'medium', 'low') %}{{ raise_exception('Unexpected reasoning effort ' ~ effort) }}"
    "{% endif %}{{ effort }}: {% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@pytest.mark.parametrize(
    ("template", "efforts"),
    [
        (GUARDED, ("none", "low", "medium", "xhigh")),
        ("{{ reasoning_effort }}" + TEMPLATE, EFFORTS),
        ("{{ reasoning_effort }}{{ raise_exception('no') }}", None),  # a request gets its error
        (TEMPLATE, ("none", "medium")),
    ],
)
def test_efforts_of_a_template(template, efforts):
    """`high` is the default of /v1/messages, and has no effect if the template refuses it."""
    tokenizer = tokenizer_with(template)
    form = answer_form(tokenizer)
    assert form.efforts == efforts
    rules = Rules("toy", 516, 128, 127, {}, form=form)
    for effort in EFFORTS:
        accepted = efforts is None or effort in efforts
        for path, fields in (
            (CHAT, {"reasoning_effort": effort}), (RESPONSES, {"reasoning": {"effort": effort}}),
            (MESSAGES, {"output_config": {"effort": effort}}),
        ):  # fmt: skip
            error = refusal(path, EVERY_LEAST[path] | fields, rules=rules)
            assert (error is None) == (accepted or (path == MESSAGES and effort == "high"))
            assert error is None or f"it supports {', '.join(efforts or ())}" in str(error)
    if template == GUARDED:
        for effort, begins in (("high", "xhigh: "), ("low", "low: "), ("none", "hello")):
            chat: Any = task(MESSAGES, EVERY_LEAST[MESSAGES] | {"output_config": {"effort": effort}}, rules).prompts[0]
            assert render_chat(chat, tokenizer, chat.template).startswith(begins)


def test_special_tokens_of_formats():
    form = answer_form(tool_tokenizer(), tool_call_parser="deepseekv3")
    assert form.special == set(DeepSeek.markers()) & set(MARKERS) and len(form.special) == 5
    assert answer_form(tool_tokenizer()).special == frozenset(), "Qwen's are not special"
    assert form.tokens.keys() == form.special | {"<think>", "</think>"}
    assert form.end_think == tool_tokenizer().convert_tokens_to_ids("</think>")
    for name, parser in {"qwen": Hermes, "mistral": Mistral, "deepseekv3": DeepSeek}.items():
        assert tokens_of(parser).items() <= answer_form(tool_tokenizer(), tool_call_parser=name).tokens.items()


@pytest.mark.parametrize(("tail", "begun"), [("<think>", True), ("<think>\n", True), ("</think>", False), ("x", None)])
def test_prompt_begins_thoughts(tail, begun):
    tokenizer = tool_tokenizer()
    ids = tokenizer(f"hello {tail}", add_special_tokens=False)["input_ids"]
    assert begins_thinking(ids, tokenizer) is begun


def test_functions_for_the_template_have_all_members():
    """Some templates concatenate the description to text, which fails without one."""
    tools = [NOOP | {"function": NOOP["function"] | {"strict": True}}, WEATHER]
    function = {"name": "noop", "description": "", "parameters": {"type": "object", "properties": {}}}
    form = answer_form(tool_tokenizer())
    for read in (ToolFields.read({"tools": tools}, Reading()).chosen(form), Tools.read(tools, "auto").checked(form)):
        assert read.offered == [{"type": "function", "function": function}, WEATHER] and read.strict == {"noop"}


# Grammars: random texts of a grammar are read as calls.

FORMATS = (Hermes, Llama3, Mistral, MistralNamed, DeepSeek, DeepSeek31, KimiK2)
PLAN = {
    "$defs": {"day": {"enum": ["mon", "tue"]}},
    "type": "object",
    "properties": {
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 3},
        "n": {"type": "integer"},
    },
    "required": ["days"],
}
TOOLS: list[dict[str, Any]] = [
    WEATHER,
    {"type": "function", "function": {"name": "plan", "parameters": PLAN}},
    {"type": "function", "function": {"name": "noop", "parameters": {"type": "object", "properties": {}}}},
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
ANSWER = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False}


@functools.cache
def grammars(plain: bool = False) -> Grammars:
    tokenizer = plain_tokenizer() if plain else tool_tokenizer()
    return Grammars(tokenizer, len(tokenizer), (END,))


def tokens_of(parser: type[CallParser]) -> dict[str, int]:
    vocabulary = tool_tokenizer().get_added_vocab()
    return {marker: vocabulary[marker] for marker in parser.markers() if marker in vocabulary}


def allowed(mask: Any, token: int) -> bool:
    return bool(mask[token // WORD] >> (token % WORD) & 1)


def random_text(source: str, seed: int, *, plain: bool = False, most: int = 400) -> str | None:
    """A random text of a grammar; None if it had no end. Strings and objects end half of the times they can."""
    draw, tokenizer = random.Random(seed), plain_tokenizer() if plain else tool_tokenizer()
    constraint = Constraint(grammars(plain), Grammar("lark", source))
    ends = [END, *(tokenizer.convert_tokens_to_ids(text) for text in ('"', "}", "]"))]
    ids: list[int] = []
    while len(ids) < most:
        mask = constraint.mask()
        assert constraint.failure is None
        choices = [token for token in range(len(tokenizer)) if allowed(mask, token)]
        preferred = [token for token in ends if token in choices]
        token = draw.choice(preferred if preferred and draw.random() < 0.5 else choices)
        if token == END:
            return tokenizer.decode(ids, skip_special_tokens=False)
        ids.append(token)
        constraint.consume([token])
    return None


def random_texts(source: str, count: int, *, plain: bool = False) -> Iterator[str]:
    return filter(None, (random_text(source, seed, plain=plain) for seed in range(count)))


def message(parser: type[CallParser], text: str) -> dict[str, Any]:
    hidden = frozenset(tokens_of(parser)) - {"<tool_call>", "</tool_call>"}
    reply = ReplyOptions(parser, tuple(SCHEMAS), hidden=hidden).reply(thinking=False)
    reply.feed(text, last=True)
    return reply.message()


@pytest.mark.parametrize("parser", FORMATS)
def test_grammar_of_required_calls(parser):
    for most in (None, 1):
        texts = list(random_texts(call_grammar(parser, TOOLS, tokens_of(parser), most=most), 5))
        assert len(texts) > 2
        for text in texts:
            answer = message(parser, text)
            assert answer["content"] is None and answer["tool_calls"], text
            assert most is None or len(answer["tool_calls"]) == most
            for call in answer["tool_calls"]:
                jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])


@pytest.mark.parametrize("parser", FORMATS)
def test_grammar_of_text_with_calls(parser):
    """Text is free, but a marker begins a call."""
    source = call_grammar(parser, TOOLS[:1], tokens_of(parser), text=True)

    def allows(text: str) -> bool:
        constraint = Constraint(grammars(), Grammar("lark", source))
        for token in tool_tokenizer()(text, add_special_tokens=False)["input_ids"]:
            if not allowed(constraint.mask(), token):
                return False
            constraint.consume([token])
        return allowed(constraint.mask(), END)

    assert allows("Hello, {world}") and allows("")
    call = next(random_texts(call_grammar(parser, TOOLS[:1], tokens_of(parser)), 9)).strip("\n")
    assert allows(call)
    wrong = call.replace("city", "town")
    assert wrong != call and not allows(wrong)
    assert parser is Llama3 or allows(f"So: {call}")


def test_grammar_of_calls_or_structured_content():
    texts = random_texts(call_grammar(Hermes, TOOLS, tokens_of(Hermes), answer=ANSWER), 12)
    messages = [message(Hermes, text) for text in texts]
    answers = [json.loads(answer["content"]) for answer in messages if not answer.get("tool_calls")]
    assert 0 < len(answers) < len(messages) and all(set(answer) == {"x"} for answer in answers)


PERSON = {
    "type": "object",
    "properties": {"name": {"$ref": "#/definitions/text"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "definitions": {"text": {"type": "string"}},
}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (ANSWER, '{"x": true}'),
        (PERSON, '{"name": "plan", "age": 5}'),
        ({"type": "object"}, '{"name": 1}'),
        (PERSON, '{"name": "plan", "parameters": {"days": ["mon"]}}'),
        (PERSON, '{"name": "noop", "parameters": {}}'),
        ({"$id": "https://example.com/p.json", **PERSON}, '{"name": "plan", "age": 5}'),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "$ref": "#/definitions/person",
                "definitions": {"person": PERSON, **PERSON["definitions"]},
            },
            '{"name": "plan", "age": 5}',
        ),
        ({"x-guidance": {"item_separator": ",", "key_separator": ":"}, **PERSON}, '{"name":"x","age":5}'),
    ],
)
def test_structured_content_that_begins_like_a_call(answer, text):
    """Llama 3 writes calls without a marker."""
    source = call_grammar(Llama3, TOOLS, {}, answer=answer)
    assert follows(Grammar("lark", source), plain_tokenizer()(text, add_special_tokens=False)["input_ids"])
    for wrong in ('{"name": "plan", "parameters": {"days": ["sun"]}}', '{"name": "other", "parameters": {}}'):
        ids = plain_tokenizer()(wrong, add_special_tokens=False)["input_ids"]
        assert follows(Grammar("lark", source), ids) == (answer == {"type": "object"})


def test_markers_that_are_no_tokens():
    source = call_grammar(Hermes, TOOLS, {})
    assert '"<tool_call>"' in source
    assert message(Hermes, next(random_texts(source, 9, plain=True)))["tool_calls"]
    with pytest.raises(ValueError, match="is not a token of this model"):
        call_grammar(Hermes, TOOLS, {}, text=True)


def test_functions_that_are_not_strict():
    """Keywords that the grammar library does not support are dropped; `any_arguments` drops the whole schema."""
    days = {"type": "array", "items": {"enum": ["mon"]}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"days": days}, "required": ["days"]}
    tool = {"type": "function", "function": {"name": "plan", "parameters": schema}}
    with pytest.raises(GrammarError, match="uniqueItems"):
        Constraint(grammars(), Grammar("lark", call_grammar(Hermes, [tool], {}, strict=["plan"])))
    texts = random_texts(call_grammar(Hermes, [tool], {}, strict=[]), 5, plain=True)
    calls = [call for text in texts for call in message(Hermes, text)["tool_calls"]]
    assert calls and all(set(json.loads(call["function"]["arguments"])["days"]) <= {"mon"} for call in calls)
    loose = any_arguments(WEATHER)
    assert loose["function"]["name"] == "get_weather" and WEATHER["function"]["parameters"]["properties"]
    source = call_grammar(Hermes, [loose], tokens_of(Hermes))
    assert '"additionalProperties": true' in source and "city" not in source
