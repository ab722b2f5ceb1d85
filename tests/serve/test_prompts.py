"""Prompts of chats: ends of prompts, variables of the template, and instructions.

No system or developer message is lost, whatever the chat template does with those that it does not know. The templates
treat instructions as the published ones of their family do; the rest is short.
"""

from __future__ import annotations

import copy
import functools
import re
from dataclasses import replace
from typing import Any

import pytest
from body_helpers import CHAT, HELLO, MESSAGES, RESPONSES, RULES, refusal, task
from engine_helpers import TEMPLATE as CHATML
from engine_helpers import shared_engine, tokenizer
from harmony_helpers import TEMPLATE as GPT_OSS

from specjax.checkpoint.prompts import Chat, render_chat
from specjax.engine.intake import Intake

_FIRST = "{% set turns = messages[1:] if messages[0].role == 'system' else messages %}"
_ASK = "{% if add_generation_prompt %}<assistant>{% endif %}"
_TURNS = (
    "{% for m in turns %}{% if m.role == 'user' or m.role == 'assistant' %}<{{ m.role }}>{{ m.content }}</s>"
    "{% else %}{{ raise_exception('Unexpected role ' + m.role) }}{% endif %}{% endfor %}" + _ASK
)
_ALTERNATING = (
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
)
_BY_ROLE = "{% for m in messages %}{% if m.role in KNOWN %}<{{ m.role }}>{{ m.content }}</s>{% endif %}{% endfor %}"
TEMPLATES = {
    "gpt-oss": GPT_OSS,
    "chatml": CHATML,
    # System messages anywhere; other roles are left out.
    "qwen 3": _BY_ROLE.replace("KNOWN", "('system', 'user', 'assistant')") + _ASK,
    "qwen 3.5": (
        "{% if messages[0].role == 'system' %}<system>{{ messages[0].content | trim }}</s>{% endif %}"
        "{% for m in messages %}{% if m.role == 'system' %}{% if not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
        "{% elif m.role == 'user' or m.role == 'assistant' %}<{{ m.role }}>{{ m.content | trim }}</s>"
        "{% else %}{{ raise_exception('Unexpected message role.') }}{% endif %}{% endfor %}" + _ASK
    ),
    "llama 3": (
        _FIRST + "<system>{{ messages[0].content | trim if messages[0].role == 'system' }}</s>"
        "{% for m in turns %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}" + _ASK
    ),
    # The first system message is part of the last user's message.
    "mistral 0.3": (
        _FIRST + "{% for m in turns %}{% if m.role == 'user' %}[INST] "
        "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
        "{{ m.content }}[/INST]{% elif m.role == 'assistant' %} {{ m.content | trim }}</s>"
        "{% else %}{{ raise_exception('Only user and assistant roles') }}{% endif %}{% endfor %}"
    ),
    "mistral small": (
        _FIRST + "[SYSTEM_PROMPT]{{ messages[0].content if messages[0].role == 'system' else 'Be helpful.' }}"
        "[/SYSTEM_PROMPT]" + _TURNS
    ),
    "gemma 2": "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% set turns = messages %}" + _ALTERNATING + "<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}" + _ASK,
    # The first system message is part of the first user's message.
    "gemma 3": _FIRST + _ALTERNATING + "<{{ m.role }}>{% if loop.first and messages[0].role == 'system' %}"
    "{{ messages[0].content }}\n\n{% endif %}{{ m.content | trim }}</s>{% endfor %}" + _ASK,
    "gemma 4": (
        "{% set turns = messages[1:] if messages[0].role in ['system', 'developer'] else messages %}"
        "{% if messages[0].role in ['system', 'developer'] %}<system>{{ messages[0].content | trim }}</s>{% endif %}"
        "{% for m in turns %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}" + _ASK
    ),
    # All system messages come first.
    "deepseek 3": "{% set ns = namespace(text='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.text = ns.text + ('\n\n' if ns.text else '') + m.content %}{% endif %}{% endfor %}{{ ns.text }}"
    + _BY_ROLE.replace("KNOWN", "('user', 'assistant')") + _ASK,
    # The last system message wins.
    "deepseek r1": "{% set ns = namespace(text='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.text = m.content %}{% endif %}{% endfor %}{{ ns.text }}"
    + _BY_ROLE.replace("KNOWN", "('user', 'assistant')") + _ASK,
    "phi 3, first version": _BY_ROLE.replace("KNOWN", "('user', 'assistant')") + _ASK,
    "kimi k2": (
        "{% for m in messages %}{{ '<' + m.role + '>' if m.role in ('system', 'user', 'assistant') }}"
        "{{ m.content }}</s>{% endfor %}" + _ASK
    ),
    "developer only": _BY_ROLE.replace("KNOWN", "('developer', 'user', 'assistant')") + _ASK,
}  # fmt: skip
WITHOUT_PLACE = ("gemma 2", "phi 3, first version")

# Roles of messages by their letters. The text of message i is the letter and i.
ROLES = {"S": "system", "D": "developer", "u": "user", "a": "assistant"}
INPUTS = (
    "u", "uau", "Su", "Du", "Suau", "SDu", "DSu", "SSu", "DDu", "SSSDu", "SDuau", "SuaSu", "SuaDu", "DuaDu", "SDuaSDu",
    "uaSu", "uaDu", "uaSSu", "SuSau", "SuDaSuau", "SuS", "SuD", "uS", "uaDuaSu",
)  # fmt: skip


def chat_of(letters: str) -> list[dict[str, Any]]:
    return [{"role": ROLES[letter], "content": f"{letter}{i}."} for i, letter in enumerate(letters)]


@functools.cache
def intake(name: str) -> Intake:
    own = copy.deepcopy(tokenizer())
    own.chat_template = TEMPLATES.get(name, name)
    return replace(shared_engine("NONE").intake, tokenizer=own, context_length=4096, pool_tokens=4096)


def prompt(name: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    return render_chat(messages, intake(name).tokenizer, variables)


def directly(name: str, messages: list[dict[str, Any]], **variables: Any) -> str | None:
    """The template's own rendering; None if it refuses the messages."""
    try:
        return intake(name).tokenizer.apply_chat_template(
            messages, tokenize=False, **{"add_generation_prompt": True, **variables}
        )
    except Exception:
        return None


@pytest.mark.parametrize("letters", INPUTS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_instruction_is_rendered_once_or_refused_by_name(name, letters):
    messages = chat_of(letters)
    instructions = [i for i, letter in enumerate(letters) if letter.isupper()]
    before = directly(name, messages)
    if before is not None and all(message["content"] in before for message in messages):
        assert prompt(name, messages) == before, "what the template renders is left alone"
        return
    if name in WITHOUT_PLACE:
        with pytest.raises(ValueError, match=rf"messages\[{instructions[0]}\] \({messages[instructions[0]]['role']}: "):
            prompt(name, messages)
        return
    text = prompt(name, messages)
    assert [text.count(message["content"]) for message in messages] == [1] * len(messages)
    assert tokenizer().decode(intake(name).encode(Chat(messages))) == text, "Engine.generate"


JOINED = [
    ("gpt-oss", "SDu", "# Instructions\n\nS0.\n\nD1.\n\n<|end|><|start|>user<|message|>u2."),
    ("gpt-oss", "SuaDu", "# Instructions\n\nS0.\n\nD3.\n\n<|end|><|start|>user<|message|>u1."),
    ("gpt-oss", "uaSu", "# Instructions\n\nS2.\n\n<|end|><|start|>user<|message|>u0."),
    ("qwen 3", "SDu", "<system>S0.</s><system>D1.</s><user>u2.</s><assistant>"),
    ("qwen 3", "SuaDu", "<system>S0.</s><user>u1.</s><assistant>a2.</s><system>D3.</s><user>u4.</s><assistant>"),
    ("qwen 3.5", "SDu", "<system>S0.\n\nD1.</s><user>u2.</s><assistant>"),
    ("qwen 3.5", "uaSSu", "<system>S2.\n\nS3.</s><user>u0.</s><assistant>a1.</s><user>u4.</s><assistant>"),
    ("mistral 0.3", "SDuau", "[INST] u2.[/INST] a3.</s>[INST] S0.\n\nD1.\n\nu4.[/INST]"),
    ("mistral 0.3", "SuaSu", "[INST] u1.[/INST] a2.</s>[INST] S0.\n\nS3.\n\nu4.[/INST]"),
    ("gemma 3", "SSu", "<user>S0.\n\nS1.\n\nu2.</s><assistant>"),
    ("deepseek 3", "SDu", "S0.\n\nD1.<user>u2.</s><assistant>"),
    ("deepseek r1", "SuaSu", "S0.\n\nS3.<user>u1.</s><assistant>a2.</s><user>u4.</s><assistant>"),
    ("developer only", "SuSau", "<developer>S0.</s><user>u1.</s><developer>S2.</s><assistant>a3.</s><user>u4."),
]


@pytest.mark.parametrize(("name", "letters", "expected"), JOINED)
def test_places_of_joined_instructions(name, letters, expected):
    assert expected in prompt(name, chat_of(letters))


def system(text: str, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": text}


FUNCTION = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "Say: Be brief. Thanks."}
SWITCH = (  # a switch in the system message is not part of the prompt
    "<system>{{ messages[0].content.replace('/no_think', '').rstrip() }}</s>"
    "{% for m in messages[1:] %}{% if m.role == 'user' %}<user>{{ m.content }}</s>{% endif %}{% endfor %}"
)
CASES = {
    "in a user's message": (GPT_OSS, [system("A."), system("Be brief."), USER], "A.\n\nBe brief.\n\n"),
    "the same text twice": (GPT_OSS, [system("A."), system("A."), USER], "A.\n\nA.\n\n"),
    "part of another": (GPT_OSS, [system("Be brief. A."), system("A."), USER], "Be brief. A.\n\nA.\n\n"),
    "in the template": (GPT_OSS, [system("A."), system("# Instructions"), USER], "A.\n\n# Instructions\n\n"),
    "in a function": (GPT_OSS, [system("A."), system("look"), USER], "A.\n\nlook\n\n"),
    "first is empty": (GPT_OSS, [system(""), system("A.", "developer"), USER], "# Instructions\n\nA.\n\n<|"),
    "first is blank": (TEMPLATES["qwen 3.5"], [system(" \n"), system("A."), USER], "<system>A.</s><user>"),
    "only blank": (TEMPLATES["gemma 2"], [system(" "), USER], "<user>Say: Be brief. Thanks.</s>"),
    "last is blank": (GPT_OSS, [system("A."), USER, system("")], "# Instructions\n\nA.\n\n<|"),
    "ends in lines": (GPT_OSS, [system("A.\n\n"), system("\n B.\n"), USER], "# Instructions\n\nA.\n\n B.\n\n<|"),
    "trimmed": (TEMPLATES["qwen 3.5"], [system(" A. \n"), USER], "<system>A.</s><user>"),
    "switch": (SWITCH, [system("A. /no_think"), USER], "<system>A.</s><user>"),
    "only a switch": (SWITCH, [system("/no_think"), USER], "<system></s><user>"),
    "switch, late": (SWITCH, [system("/no_think"), USER, system("A.")], "<system>\n\nA.</s><user>"),
}


@pytest.mark.parametrize("case", CASES)
def test_texts_that_a_search_would_mistake(case):
    template, messages, expected = CASES[case]
    for variables in ({}, {"tools": [FUNCTION]}):
        text = prompt(template, messages, **variables)
        assert (expected if not variables else expected.removesuffix("<|")) in text and USER["content"] in text


def test_prompts_that_continue_a_message():
    continued = {"continue_final_message": True}
    text = prompt("gpt-oss", chat_of("SDua"), **continued)
    assert text.endswith("a3.") and "S0.\n\nD1.\n\n" in text
    # A continued instruction stays the last message.
    assert prompt("chatml", chat_of("SuS"), **continued).endswith("S2.")
    with pytest.raises(ValueError, match="no place for messages"):
        prompt("gpt-oss", chat_of("SuS"), **continued)


def test_messages_are_not_changed():
    messages = chat_of("SDuaDu")
    prompt("gpt-oss", messages)
    assert messages == chat_of("SDuaDu")


def test_number_of_renderings(monkeypatch):
    """One, and one more to check instructions."""
    own = copy.deepcopy(intake("qwen 3").tokenizer)
    calls: list[Any] = []
    render = own.apply_chat_template
    monkeypatch.setattr(own, "apply_chat_template", lambda *args, **more: calls.append(1) or render(*args, **more))
    for letters, count in (("uau", 1), ("Suau", 2), ("SuaSuaSu", 2)):
        calls.clear()
        render_chat(chat_of(letters), own, {})
        assert len(calls) == count


@pytest.mark.parametrize(
    ("name", "letters", "problem"),
    [
        ("gemma 2", "Su", "messages[0] (system: 'S0.'): System role not supported; put its text"),
        ("gemma 2", "uaDu", "messages[2] (developer: 'D2.'): Roles must alternate; put its text"),
        ("gemma 2", "S", "messages[0] (system: 'S0.')"),
        ("gemma 2", "Suu", "refused these messages: Roles must alternate"),
        ("gemma 3", "uu", "refused these messages: Roles must alternate"),
        ("gemma 3", "SDuu", "refused these messages: Roles must alternate"),
        ("phi 3, first version", "uaDu", "messages[2] (developer: 'D2.'); put its text into a user's message"),
        ("mistral 0.3", "Sua", "messages[0] (system: 'S0.'); put its text into a user's message"),
    ],
)  # fmt: skip
def test_refusals(name, letters, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        prompt(name, chat_of(letters))


# Fields about the end of the prompt and the template's variables

WITH_VARIABLES = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ start }}{% if think is false %}no{% endif %}{% endif %}"
)
BEGUN = [*HELLO, {"role": "assistant", "content": "the hell"}]
START, ASSISTANT = "<|im_start|>user\nhello<|im_end|>\n", "<|im_start|>assistant\n"


def text_of(path: str, body: dict[str, Any], name: str) -> str:
    (sequence,) = task(path, body).sequences(intake(name), "r")
    return tokenizer().decode(sequence.prompt)


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, f"{ASSISTANT}the hell<|im_end|>\n{ASSISTANT}"),
        ({"add_generation_prompt": False}, f"{ASSISTANT}the hell<|im_end|>\n"),
        ({"continue_final_message": True}, f"{ASSISTANT}the hell"),
        ({"continue_final_message": True, "add_generation_prompt": False}, f"{ASSISTANT}the hell"),
    ],
)
def test_end_of_the_prompt(fields, end):
    assert text_of(CHAT, {"messages": BEGUN, **fields}, "chatml") == START + end


def test_variables_of_the_template():
    body = {"messages": HELLO, "chat_template_kwargs": {"start": "so", "think": False, "other": [1, {"a": None}]}}
    assert text_of(CHAT, body, WITH_VARIABLES) == START + f"{ASSISTANT}sono"
    body = {"messages": BEGUN, "continue_final_message": True, "chat_template_kwargs": {"start": "so"}}
    assert text_of(CHAT, body, WITH_VARIABLES) == START + f"{ASSISTANT}the hell", "the template trims"


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(("server", "request_", "sanitizes"), [
    (False, None, False), (True, None, True), (False, True, True), (True, False, False),
])  # fmt: skip
def test_server_and_request_choose_to_sanitize_control_tokens(path, server, request_, sanitizes):
    body: dict[str, Any] = {"input": "a<|im_end|>"} if path == RESPONSES else {"messages": said("a<|im_end|>")}
    body |= {"max_tokens": 9} if path == MESSAGES else {}
    body |= {} if request_ is None else {"sanitize_control_tokens": request_}
    (chat,) = task(path, body, replace(RULES, sanitize_control_tokens=server)).prompts
    end = tokenizer().convert_tokens_to_ids("<|im_end|>")
    assert intake("chatml").encode(chat).count(end) == 2 - sanitizes


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_template_fields_over_http(server):
    fields = {"messages": BEGUN, "max_tokens": 20, "temperature": 0, "continue_final_message": True}
    text = server.post(CHAT, fields).json()["choices"][0]["message"]["content"]
    expected = shared_engine("NONE").generate(f"{START}{ASSISTANT}the hell", {"max_new_tokens": 20})
    assert text == expected.text


# Interfaces


def bodies(letters: str) -> dict[str, dict[str, Any]]:
    """The same conversation in each interface. Messages has no role developer."""
    messages = chat_of(letters)
    rest = [{**turn, "role": "system" if turn["role"] == "developer" else turn["role"]} for turn in messages[1:]]
    first = messages[0]["content"]
    assert letters[0] == "S"
    return {
        CHAT: {"messages": messages},
        RESPONSES: {"instructions": first, "input": messages[1:]},
        MESSAGES: {"system": first, "messages": rest, "max_tokens": 9},
    }


@pytest.mark.parametrize("letters", ["Su", "SDu", "SSu", "SuaSu", "SuaDu", "SDuaDuaSu"])
@pytest.mark.parametrize("name", ["gpt-oss", "qwen 3", "qwen 3.5", "llama 3", "mistral 0.3", "gemma 3", "deepseek r1"])
def test_interfaces_agree(name, letters):
    texts = [text_of(path, body, name) for path, body in bodies(letters).items()]
    assert len(set(texts)) == 1
    assert all(texts[0].count(message["content"]) == 1 for message in chat_of(letters))


@pytest.mark.parametrize(("path", "field"), [(CHAT, "messages"), (RESPONSES, "input"), (MESSAGES, "messages")])
def test_interfaces_name_what_has_no_place(path, field):
    rules = replace(RULES, context_length=4096)
    error = refusal(path, bodies("Su")[path], intake("gemma 2"), rules)
    assert error is not None and error.status == 400 and error.param == field
    assert "no place for messages[0] (system: 'S0.')" in str(error)
