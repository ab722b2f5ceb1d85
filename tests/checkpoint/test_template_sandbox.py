"""Chat templates that come with a model: bounded memory, and the same text as in transformers' own sandbox."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import TEMPLATE as CHATML
from engine_helpers import tokenizer
from harmony_helpers import TEMPLATE as GPT_OSS
from jinja2.sandbox import ImmutableSandboxedEnvironment
from test_prompts import TEMPLATES
from transformers.utils import chat_template_utils

from specjax.checkpoint.prompts import Chat, encode, render_chat
from specjax.checkpoint.template_sandbox import TemplateLimit, bound_templates

CHAT = [
    {"role": "user", "content": "hello\nyou"},
    {"role": "assistant", "content": "a b"},
    {"role": "user", "content": "x"},
]


def loop(body: str, count: str = "10**5") -> str:
    return f"{{% for i in range({count}) %}}{body}{{% endfor %}}"


def with_template(template: str) -> Any:
    own = copy.deepcopy(tokenizer())
    own.chat_template = template
    return own


_SPACE = "{% set ns = namespace(s='ab', x=[], i=10) %}"
_DOUBLED = _SPACE + loop("{% set ns.s = DOUBLE %}", "60") + "{{ ns.s }}"
_BIG = "{% set b = 'a' * 10**6 %}"
ATTACKS = {
    "str * int": "{{ 'a' * 10**10 }}",
    "int * str": "{{ 10**10 * 'a' }}",
    "str * int in steps": "{{ 'a' * 10**5 * 10**5 }}",
    "list * int": "{% set x = [0] * 10**10 %}",
    "list * int, many": loop("{% set x = [0] * 10**5 %}"),
    "kept lists": _SPACE + loop("{% set ns.x = ns.x + [[0] * 10**6] %}"),
    "kept slices": _BIG + _SPACE + loop("{% set ns.x = ns.x + [b[1:]] %}"),
    "power": "{{ 10**(10**8) }}",
    "product": _SPACE + loop("{% set ns.i = ns.i * ns.i %}", "60"),
    "%d": "{{ '%1000000000d' % 1 }}",
    "precision": "{{ '%.1000000000f' % 1 }}",
    "%*d": "{{ '%*d' % (10**10, 1) }}",
    "%(name)s": _BIG + "{{ '%(b)s' * 10**4 % {'b': b} }}",
    "filter format": "{{ '%1000000000d'|format(1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format, nested": "{{ '{:{}}'.format(1, 10**10) }}",
    "format, repeated": _BIG + "{{ ('{0}' * 10**4).format(b) }}",
    "format_map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "format of Markup": "{{ ('{:1000000000}'|safe).format(1) }}",
    "center": "{{ 'a'|center(10**9) }}",
    "constant center": "{{ 'a'|center(1000000000) }}",
    "str.center": "{{ 'a'.center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "to_bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "expandtabs": "{{ '\\t'.expandtabs(10**9) }}",
    "indent": "{{ 'a\\nb'|indent(10**9) }}",
    "indent with text": _BIG + "{{ ('\\n' * 10**5)|indent(b) }}",
    "wordwrap": _BIG + "{{ ('a ' * 10**5)|wordwrap(2, wrapstring=b) }}",
    "replace": _BIG + "{{ b.replace('a', b) }}",
    "filter replace": _BIG + "{{ b|replace('a', b) }}",
    "translate": _BIG + "{{ b.translate({97: b}) }}",
    "join": _BIG + "{{ b.join(['x'] * 10**5) }}",
    "filter join": _BIG + "{{ range(10**5)|join(b) }}",
    "map join": _BIG + "{{ (['aaa'] * 10**4)|map('join', b)|list }}",
    "map center": "{{ ['a']|map('center', 10**9)|list }}",
    "batch": "{{ [1]|batch(10**9, 0)|list }}",
    "slice": "{{ [1]|slice(10**9)|list }}",
    "tojson": "{{ [[1]]|tojson(indent=10**9) }}",
    "+": _DOUBLED.replace("DOUBLE", "ns.s + ns.s"),
    "~": _DOUBLED.replace("DOUBLE", "ns.s ~ ns.s"),
    "join, doubled": _DOUBLED.replace("DOUBLE", "[ns.s, ns.s]|join"),
    "format, doubled": _DOUBLED.replace("DOUBLE", "'{0}{0}'.format(ns.s)"),
    "block, doubled": _SPACE + loop("{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}", "60"),
    "lists, doubled": _DOUBLED.replace("DOUBLE", "[ns.s, ns.s]"),
    "lists, doubled, as JSON": _DOUBLED.replace("DOUBLE", "[ns.s, ns.s]").replace("ns.s }}", "ns.s|tojson }}"),
    "loops": loop(loop("abcdefgh")),
    "loops without text": loop(loop("")),
    "loops in a macro": "{% macro f() %}" + loop(loop("a")) + "{% endmacro %}{{ f() }}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}a{% endmacro %}{{ f(60) }}",
    "blocks": "{% block a %}" + loop(loop("a")) + "{% endblock %}{{ self.a() }}",
    "the message": "{{ messages[0].content * 10**9 }}",
    "namespace": _SPACE + loop("{% set ns.x = [ns.x, ns.x] %}", "60") + "{{ ns }}",
    "replace of bytes": _BIG + "{{ b.encode().replace('a'.encode(), b.encode()) }}",
    "replace by name": _BIG + "{{ b|replace(new=b, old='a') }}",
    "sum": "{{ ([[0] * 10**6] * 1000)|sum(start=[]) }}",
    "urlize": _BIG + "{{ ('http://a.co ' * 10**4)|urlize(target=b) }}",
    "round": "{{ 5|round(-10**8) }}",
    "split": "{{ ('aa,' * 10**7).split(',') }}",
    "list": "{{ ('a' * 10**8)|list }}",
    "digits of another script": "{{ '{:\u0661\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660}'.format(1) }}",
    "format of an attribute": _BIG + "{% for x in [b, 1] %}{{ ('{0.previtem}' * 10**4).format(loop) }}{% endfor %}",
    "wide text": "{{ 'a' * 2 * 10**8 ~ '\u2713' }}",
    "text of a macro": "{% macro f() %}" + loop(loop("{{ i }}" * 100)) + "{% endmacro %}{{ f() }}",
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_template_is_stopped_within_bounded_memory(name):
    own = with_template(ATTACKS[name])
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the memory now
    before = memory("VmRSS")
    with pytest.raises(TemplateLimit, match=r"makes more than 256 MB of values: .* needs \d+ bytes more"):
        render_chat(CHAT[:1], own, {})
    assert memory("VmHWM") - before < 2**29


def memory(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


NAMED = {
    "str * int": r"str \* 10000000000 needs", "power": r"int \*\* 100000000", "%d": "str % 1",
    "format": "str.format needs", "center": "the filter center", "ljust": "str.ljust",
    "~": "the filter ~", "loops": "a loop|its text", "indent": "the filter indent", "lists, doubled": "its text",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_error_names_what_the_template_did(name):
    with pytest.raises(TemplateLimit, match=NAMED[name]):
        encode(Chat(CHAT[:1]), with_template(ATTACKS[name]), 512)


ORDINARY = {
    **TEMPLATES,
    "operators": "{{ 'ab' * 3 + 'c' ~ 1 ~ none ~ [1, 'x'] }}{{ '%5s|%.2f%%' % ('x', 2) }}{{ '%(a)s' % {'a': 1} }}"
    "{{ 7 % 4 }}{{ 2**10 }}{{ 10**10**8 }}{{ [1] + [2] }}{{ (1, 2) * 2 }}{{ 1.5 * 2 }}",
    "formats": "{{ '{:>5}|{a!r}|{0:{1}}'.format('x', 4, a='y') }}{{ '%s-%s'|format('a', 2) }}"
    "{{ '{b}'.format_map({'b': 3}) }}",
    "filters": "{{ messages[0].content|center(20)|indent(2)|replace('l', 'L')|upper }}{{ [3, 1, 2]|sort|join(', ') }}"
    "{{ messages|map(attribute='role')|list|tojson(indent=2) }}{{ 'a b c'|wordwrap(3) }}{{ [1, 2, 3]|batch(2)|list }}"
    "{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|join('/') }}{{ [1, 2]|sum }}"
    "{{ {'b': 1, 'a': 2}|dictsort|first }}{{ '<a>'|escape }}{{ undefined_thing|default('d') }}{{ 'x'|string }}"
    "{{ [1, 2, 3]|slice(2)|list }}",
    "methods": "{{ ' a '.strip().ljust(4, '.') }}{{ 'a,b'.split(',')[-1] }}{{ '-'.join(['a', 'b']) }}{{ 'abc'[::-1] }}"
    "{{ messages[1:][0].content.replace('a', 'bb').title() }}{{ {'a': 1}.items()|list }}{{ 'a\tb'.expandtabs(4) }}",
    "loops": "{% for m in messages %}{{ loop.index }}/{{ loop.length }}/{{ loop.last }}/"
    "{{ loop.previtem.role if loop.previtem }}{{ loop.cycle('a', 'b') }}{% else %}none{% endfor %}"
    "{% for k, v in {'a': 1}.items() if v %}{{ k }}{% endfor %}"
    "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}"
    "{% for x in missing %}x{% else %}no{% endfor %}"
    "{% for i in range(5) %}{% if i == 3 %}{% break %}{% endif %}{% continue %}{% endfor %}",
    "blocks": "{% macro m(a, b=2) %}[{{ a }}{{ b }}{{ caller() if caller }}]{% endmacro %}{{ m(1) }}"
    "{% call m(3) %}c{% endcall %}{% set x %}{{ messages[0].content }}!{% endset %}{{ x }}"
    "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% set ns.n = ns.n + m.content|length %}{% endfor %}{{ ns.n }}{% filter upper %}up{% endfilter %}"
    "{% generation %}g{% endgeneration %}",
}  # fmt: skip


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_template_renders_as_in_jinja(name, monkeypatch):
    own, theirs = with_template(ORDINARY[name]), ImmutableSandboxedEnvironment

    def texts() -> list[str]:
        chats, outputs = [CHAT, CHAT[:1], [{"role": "system", "content": "s" * 100}, *CHAT]], list[str]()
        for chat in chats:
            for more in ({}, {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}):
                try:
                    outputs.append(own.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **more))
                except Exception as error:
                    outputs.append(repr(error))
        return outputs

    bound_templates()
    bounded = texts()
    with monkeypatch.context() as patch:
        patch.setattr(chat_template_utils, "ImmutableSandboxedEnvironment", theirs)
        chat_template_utils._compile_jinja_template.cache_clear()
        assert texts() == bounded
    chat_template_utils._compile_jinja_template.cache_clear()


def test_long_chat_stays_below_the_limit():
    """A million tokens: 4 MB in 10,000 messages."""
    chat = [{"role": role, "content": "word " * 80} for role in ("user", "assistant") * 5000]
    for template in (CHATML, GPT_OSS, ORDINARY["deepseek 3"], ORDINARY["llama 3"]):
        assert len(render_chat(chat, with_template(template), {})) > 4_000_000
