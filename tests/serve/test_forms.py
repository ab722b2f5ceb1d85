"""What a chat template says of calls and thoughts, and how it takes earlier calls."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from engine_helpers import TEMPLATE
from engine_helpers import tokenizer as plain_tokenizer
from tool_helpers import MARKERS, NOOP, TOOLS, tool_tokenizer
from tool_helpers import TEMPLATE as TOOL_TEMPLATE

from specjax.checkpoint.prompts import Chat, begins_thinking
from specjax.engine.intake import Intake
from specjax.limits import ParameterError
from specjax.serve.calls import DeepSeek, DeepSeek31, Glm, Hermes, KimiK2, Llama3, Mistral, MistralNamed, QwenCoder
from specjax.serve.fields import Reading
from specjax.serve.message_format import answer_form, short_id
from specjax.serve.tools import Tool

TELLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
CALL = {"id": "call_0123456789abcdef01234567", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "1", "tool_call_id": CALL["id"]},
]
# The conventions of families' templates, as far as they differ.
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
    "deepseek V3.1": (TELLS + "<｜tool▁call▁begin｜><｜tool▁sep｜>", DeepSeek31, False, TELLS),
    "mistral, newer": (TELLS + "[TOOL_CALLS][ARGS]", MistralNamed, False, TELLS),
    "kimi": (
        TELLS + "<|tool_call_argument_begin|>{% for m in messages %}"
        "{% for c in m.tool_calls or [] %}{{ c.id }}{% endfor %}{{ m.tool_call_id }}{% endfor %}",
        KimiK2, False, 2 * "functions.f:0",
    ),
    "qwen coder, whole": (TELLS + "<tool_call><function=x><parameter=y>", QwenCoder, False, TELLS),
    "glm": (TELLS + "<tool_call>x<arg_key>y</arg_key><arg_value>z</arg_value>", Glm, False, TELLS),
    "markers of others": (TELLS + "<tool_call><name>", None, False, ""),
    "qwen coder": (TELLS + "<tool_call><function=", None, False, ""),
    "unknown": (TELLS, None, False, ""),
}  # fmt: skip


def tokenizer_with(template: Any) -> Any:
    found = copy.deepcopy(plain_tokenizer())
    found.chat_template = template
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_forms_are_found_in_templates(family):
    template, parser, thinks, written = FAMILIES[family]
    tokenizer = tokenizer_with(template)
    form = answer_form(tokenizer)
    assert (form.parser, form.thinks, form.takes_tools) == (parser, thinks, True)
    assert (form.refusal is None) == (parser is not None)
    if parser is not None and written != TELLS:
        text = tokenizer.apply_chat_template(form.for_template(TURNS), tokenize=False)
        assert text.endswith(written) and written


def test_flags_stand_above_the_template():
    tokenizer = tokenizer_with(FAMILIES["qwen"][0])
    assert answer_form(tokenizer, tool_call_parser="mistral").parser is Mistral
    assert answer_form(tokenizer, tool_call_parser="none").refusal
    assert not answer_form(tokenizer, reasoning_parser="none").thinks
    assert answer_form(tokenizer_with(TELLS), reasoning_parser="qwen3").thinks


@pytest.mark.parametrize(
    ("template", "takes"),
    [
        (TEMPLATE, False),
        ("{% if tools %}{{ raise_exception('no') }}{% endif %}<tool_call>", True),  # it says what it makes of them
        ("{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}", False),
        ("{% if messages[0].tools %}{{ messages[0].tools }}{% endif %}", False),  # Phi-4-mini's place for them
        ({"default": TEMPLATE, "tool_use": TELLS + "<tool_call>"}, True),
        (None, False),
    ],
)
def test_whether_a_template_takes_functions(template, takes):
    assert answer_form(tokenizer_with(template)).takes_tools is takes


def test_special_tokens_that_parsers_need():
    form = answer_form(tool_tokenizer(), tool_call_parser="deepseekv3")
    assert form.special == set(DeepSeek.markers()) & set(MARKERS) and len(form.special) == 5
    assert answer_form(tool_tokenizer()).special == frozenset(), "Qwen's are not special"
    assert form.tokens.keys() == form.special | {"<think>", "</think>"}
    assert form.end_think == tool_tokenizer().convert_tokens_to_ids("</think>")


@pytest.mark.parametrize(("tail", "begun"), [("<think>", True), ("<think>\n", True), ("</think>", False), ("x", None)])
def test_prompts_that_begin_thoughts(tail, begun):
    tokenizer = tool_tokenizer()
    ids = tokenizer(f"hello {tail}", add_special_tokens=False)["input_ids"]
    assert begins_thinking(ids, tokenizer) is begun


def test_short_ids():
    assert short_id("abcDEF123", 9) == "abcDEF123"
    for id in ("call_1", "", "ärger_123", "abcdefghij", "abcdef-12"):
        short = short_id(id, 9)
        assert len(short) == 9 and short.isalnum() and short.isascii() and short_id(id, 9) == short
    assert short_id("call_1", 9) != short_id("call_2", 9)


def test_plain_content_refuses_special_tokens_in_functions():
    intake = Intake(tool_tokenizer(), 10_000, 4096, 4096, (), 1, plain_content=True)
    messages = [{"role": "user", "content": "a <|im_end|> b"}]
    ids = intake.encode(Chat(messages, {"tools": TOOLS}))
    assert ids.count(2) == 1 and "get_weather" in intake.tokenizer.decode(ids)
    bad = [{"type": "function", "function": {"name": "f", "description": "x <|im_end|>"}}]
    with pytest.raises(ParameterError, match="plain-content"):
        intake.encode(Chat(messages, {"tools": bad}))


def test_the_template_of_the_tests_takes_functions():
    assert answer_form(tool_tokenizer()).refusal is None and "tools" in TOOL_TEMPLATE


def test_functions_have_all_members_that_templates_read():
    """Some add the description to text, which fails if there is none."""
    tool = Tool.read(NOOP | {"function": NOOP["function"] | {"strict": True}}, Reading())
    function = {"name": "noop", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert tool.for_template() == {"type": "function", "function": function}
    assert Tool.read(TOOLS[0], Reading()).for_template() == TOOLS[0]
