"""Qwen3.5, 3.6 and 3.8 through the three routes of chats: a template that opens `<think>`, and calls with tags.

The template renders what the published ones do: thoughts are on by default, `enable_thinking: false` closes them, those
of earlier turns are dropped unless `preserve_thinking` is set, and results of calls are in a user's turn. Qwen3.8's has
efforts, too. A script answers each prompt. It begins inside thoughts if the prompt does.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest
from body_helpers import CHAT, EVERY_LEAST, MESSAGES, RESPONSES, RULES, task
from engine_helpers import LETTERS, byte_level_bpe
from server_helpers import running
from tool_helpers import answering_model, blocks_of, items_of, joined, scripted_engine
from transformers import PreTrainedTokenizerFast

from specjax.checkpoint.prompts import begins_thinking, render_chat
from specjax.engine import Engine
from specjax.engine.chat.calls import QwenCoder
from specjax.engine.chat.message_format import answer_form

CALL = (
    "{% if loop.first %}{{ '\n\n' if content else '' }}{% else %}{{ '\n' }}{% endif %}<tool_call>\n"
    "<function={{ call.function.name }}>\n{% for name, value in call.function.arguments | items %}"
    "<parameter={{ name }}>\n{{ value | tojson if value is mapping or (value is sequence and value is not string)"
    " else value | string }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n# Tools\n\n<tools>"
    "{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{{ '\n</tools>' }}"
    "\n\n<tool_call>\n<function=example>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    "{% if messages[0].role == 'system' %}\n\n{{ messages[0].content | trim }}{% endif %}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content | trim }}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% if ns.last < 0 %}{{ raise_exception('No user query found in messages.') }}{% endif %}"
    "{% for m in messages %}{% set content = m.content | trim %}"
    "{% if m.role == 'system' %}{% if not loop.first %}{{ raise_exception('System message must be first') }}{% endif %}"
    "{% elif m.role == 'user' %}<|im_start|>user\n{{ content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}{% set thoughts = '' %}"
    "{% if m.reasoning_content is string %}{% set thoughts = m.reasoning_content | trim %}"
    "{% elif '</think>' in content %}{% set thoughts = content.split('</think>')[0].split('<think>')[-1] | trim %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last or preserve_thinking %}<think>\n{{ thoughts }}\n</think>\n\n{% endif %}{{ content }}"
    "{% for call in m.tool_calls or [] %}" + CALL + "{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + content }}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}{{ raise_exception('Unexpected message role.') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{{ '<think>\n\n</think>\n\n' if enable_thinking is false else '<think>\n' }}{% endif %}"
)
EFFORTS = (  # before the turns of Qwen3.8's template
    "{% if enable_thinking is not defined or enable_thinking is not false %}"
    "{% if (reasoning_effort or 'xhigh') not in ('low', 'medium', 'xhigh') %}"
    "{{ raise_exception('Unexpected reasoning effort.') }}{% endif %}{% endif %}"
)
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "hours": {"type": "array"}},
    "required": ["city"],
}
TIME: dict[str, Any] = {"type": "object", "properties": {}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in (("get_weather", WEATHER), ("get_time", TIME))
]
FLAT: list[Any] = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
ANTHROPIC: list[Any] = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS
]
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
END = "<|im_end|>"

PARIS = ("get_weather", '{"city": "Paris", "days": 3, "hours": [8, 20]}')
_PARIS = (
    "<tool_call>¦\n¦<function¦=get_weather¦>\n¦<para¦meter=city>\nPar¦is\n</parameter>\n¦<parameter=days>\n¦3\n"
    "</parameter>\n<parameter=hours>\n[8, ¦20]\n</parameter>\n</function>\n¦</tool_call>"
)
_TIME = "<tool_call>¦\n<function=get_time>\n¦</function>\n¦</tool_call>"
# By name: the answer with thoughts, whose `<think>` the prompt has opened, and without. "¦" separates tokens.
_SCRIPTS = {
    "a": ("Two¦ and two.\n¦</think>¦\n\n¦It is ¦four.", "It is ¦four."),
    "c": (f"A city¦, so a call.\n¦</think>¦\n\n¦{_PARIS}", f"Let me ¦look.¦\n\n¦{_PARIS}"),
    "d": (f"Both.\n¦</think>¦\n\n¦{_PARIS}¦\n¦{_TIME}", f"{_PARIS}¦\n¦{_TIME}"),
    "e": (f"I call it here: ¦{_TIME}", f"{_TIME}¦\n"),  # `</think>` is missing
    "r": ("It is¦ there.\n¦</think>¦\n\n¦22 degrees¦ in Paris.", "22 degrees¦ in Paris."),
}
SCRIPTS: dict[str, tuple[list[str], list[str]]] = {
    name: (on.split("¦"), off.split("¦")) for name, (on, off) in _SCRIPTS.items()
}
# By script: thoughts, content, calls; with thoughts and without.
GET_TIME = ("get_time", "{}")
ANSWERS: dict[str, tuple[Any, Any]] = {
    "a": (("Two and two.", "It is four.", []), ("", "It is four.", [])),
    "c": (("A city, so a call.", "", [PARIS]), ("", "Let me look.", [PARIS])),
    "d": (("Both.", "", [PARIS, GET_TIME]), ("", "", [PARIS, GET_TIME])),
    "e": (("I call it here:", "", [GET_TIME]), ("", "", [GET_TIME])),
    "r": (("It is there.", "22 degrees in Paris.", []), ("", "22 degrees in Paris.", [])),
}


@functools.cache
def qwen_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges. As in Qwen's tokenizer, the marks of thoughts and calls are not special."""
    pieces = dict.fromkeys(piece for pair in SCRIPTS.values() for script in pair for piece in script)
    core = byte_level_bpe(
        ["<|endoftext|>", "<|im_start|>", END], words=["<|endoftext|>", "<|im_start|>", END, *LETTERS],
        added=[*MARKS, *(piece for piece in pieces if piece not in MARKS and len(piece) > 1)],
        merges=(), use_regex=False,
    )  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, chat_template=template)


@functools.cache
def qwen_engine(template: str = TEMPLATE) -> Engine:
    tokenizer = qwen_tokenizer(template)

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore[reportReturnType]

    answers = []
    for name, (thinking, plain) in SCRIPTS.items():
        before = f"Say {name}" if name != "r" else "22 r\n</tool_response>"
        for ask, script in (("<think>\n", thinking), ("<think>\n\n</think>\n\n", plain)):
            prompt = f"{before}{END}\n<|im_start|>assistant\n{ask}"
            answers.append((ids(prompt), tokenizer.convert_tokens_to_ids([*map(spelled, script), END])))
    window = min(len(prompt) for prompt, _ in answers)
    stop = [tokenizer.convert_tokens_to_ids(END)]
    model = answering_model(len(tokenizer), answers, stop, window)
    return scripted_engine(model, tokenizer, tuple(stop))


def spelled(piece: str) -> str:
    """The name of a token; only one-letter pieces are in the alphabet of bytes."""
    return "Ċ" if piece == "\n" else piece


@pytest.fixture(scope="module")
def served():
    with running(qwen_engine()) as server:
        yield server


def say(name: str) -> list[Any]:
    return [{"role": "user", "content": f"Say {name}"}]


def read_chat(served: Any, messages: list[Any], thinks: bool, stream: bool) -> tuple[str, str, list[Any]]:
    fields: dict[str, Any] = {"model": "toy", "messages": messages, "temperature": 0, "tools": TOOLS}
    if not thinks:
        fields["chat_template_kwargs"] = {"enable_thinking": False}
    if stream:
        choices = [event["choices"][0] for event in served.events(CHAT, fields)]
        message, finish = joined([choice["delta"] for choice in choices]), choices[-1]["finish_reason"]
    else:
        choice = served.post(CHAT, fields).json()["choices"][0]
        message, finish = choice["message"], choice["finish_reason"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    assert finish == ("tool_calls" if calls else "stop")
    return message.get("reasoning_content") or "", message["content"] or "", calls


def read_response(served: Any, messages: list[Any], thinks: bool, stream: bool) -> tuple[str, str, list[Any]]:
    fields: dict[str, Any] = {"model": "toy", "input": messages, "temperature": 0, "tools": FLAT}
    if not thinks:
        fields["reasoning"] = {"effort": "none"}
    with openai.OpenAI(base_url=f"{served.base}/v1", api_key="none") as client:
        if stream:
            with client.responses.stream(**fields) as events:
                response = events.get_final_response()
        else:
            response = client.responses.create(**fields)
    return of_parts(items_of(response))


def read_message(served: Any, messages: list[Any], thinks: bool, stream: bool) -> tuple[str, str, list[Any]]:
    fields: dict[str, Any] = {"model": "toy", "messages": messages, "tools": ANTHROPIC, "max_tokens": 99}
    fields |= {"extra_body": {"temperature": 0}, "thinking": {"type": "adaptive" if thinks else "disabled"}}
    with anthropic.Anthropic(base_url=served.base, api_key="none", max_retries=0) as client:
        if stream:
            with client.messages.stream(**fields) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**fields)
    assert message.stop_reason == ("tool_use" if message.content[-1].type == "tool_use" else "end_turn")
    return of_parts(blocks_of(message))


def of_parts(parts: list[tuple[str, str]]) -> tuple[str, str, list[Any]]:
    texts = {kind: "".join(text for name, text in parts if name == kind) for kind in ("thoughts", "text")}
    return texts["thoughts"], texts["text"], [part for part in parts if part[0] not in texts]


READERS = {CHAT: read_chat, RESPONSES: read_response, MESSAGES: read_message}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("thinks", [True, False], ids=["thinking", "not thinking"])
@pytest.mark.parametrize("path", READERS)
def test_answers_of_all_routes(served, path, thinks, stream):
    for name in ("a", "c", "d", "e"):
        assert READERS[path](served, say(name), thinks, stream) == ANSWERS[name][not thinks], name


RESULTS: dict[str, list[Any]] = {
    CHAT: [
        {"role": "assistant", "content": None, "reasoning_content": "So.", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": PARIS[0], "arguments": PARIS[1]}},
            {"id": "call_2", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
        {"role": "tool", "tool_call_id": "call_2", "content": "22 r"}],
    RESPONSES: [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "So."}]},
        {"type": "function_call", "name": PARIS[0], "arguments": PARIS[1], "call_id": "call_1"},
        {"type": "function_call", "name": "get_time", "arguments": "{}", "call_id": "call_2"},
        {"type": "function_call_output", "call_id": "call_1", "output": "noon"},
        {"type": "function_call_output", "call_id": "call_2", "output": "22 r"}],
    MESSAGES: [
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "So.", "signature": ""},
            {"type": "tool_use", "id": "toolu_1", "name": PARIS[0], "input": json.loads(PARIS[1])},
            {"type": "tool_use", "id": "toolu_2", "name": "get_time", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "noon"},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": "22 r"}]}],
}  # fmt: skip
WRITTEN = (
    "<|im_start|>user\nSay d<|im_end|>\n<|im_start|>assistant\n<think>\nSo.\n</think>\n\n<tool_call>\n"
    "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "<parameter=hours>\n[8, 20]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n"
    "</function>\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nnoon\n</tool_response>\n<tool_response>\n"
    "22 r\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
)


@pytest.mark.parametrize("path", READERS)
def test_results_of_calls(served, path):
    """Calls, their results and the thoughts before them are in the prompt as the template writes them."""
    for thinks in (True, False):
        messages = [*say("d"), *RESULTS[path]]
        assert READERS[path](served, messages, thinks, False) == ANSWERS["r"][not thinks]
    body = EVERY_LEAST[path] | {"input" if path == RESPONSES else "messages": messages}
    (chat,) = task(path, body, replace(RULES, form=answer_form(qwen_tokenizer()))).prompts
    assert served.engine.tokenizer.decode(served.engine.encode(chat)) == WRITTEN


def test_thoughts_of_earlier_turns():
    """Thoughts are dropped after the next user's message, unless `preserve_thinking` is set."""
    thoughts = "<think>\nSo.\n</think>\n\n"
    answer: dict[str, Any] = {"role": "assistant", "content": "4", "reasoning_content": "So."}
    inline = {"role": "assistant", "content": f"{thoughts}4"}
    for after, variables, kept in (
        (say("a"), {}, False), (say("a"), {"preserve_thinking": True}, True),
        ([{"role": "tool", "content": "1"}], {}, True),
    ):  # fmt: skip
        for turn in (answer, inline):
            text = render_chat([*say("a"), turn, *after], qwen_tokenizer(), variables)
            assert f"assistant\n{thoughts if kept else ''}4{END}" in text and ("So." in text) is kept


def test_form_of_the_template():
    form = answer_form(qwen_tokenizer())
    assert form.parser is QwenCoder and form.takes_tools and form.thinks and not form.special
    assert form.end_think == qwen_tokenizer().convert_tokens_to_ids("</think>")
    assert form.efforts == ("none", "medium")
    assert answer_form(qwen_tokenizer(EFFORTS + TEMPLATE)).efforts == ("none", "low", "medium", "xhigh")


@pytest.mark.parametrize("template", [TEMPLATE, EFFORTS + TEMPLATE], ids=["3.6", "3.8"])
def test_thinking_of_each_route(template):
    """The prompt ends inside thoughts, or after them."""
    tokenizer, rules = qwen_tokenizer(template), replace(RULES, form=answer_form(qwen_tokenizer(template)))
    off = {"enable_thinking": False}
    for path, fields, thinks in (
        (CHAT, {}, True), (CHAT, {"reasoning_effort": "medium"}, True), (CHAT, {"reasoning_effort": "none"}, False),
        (CHAT, {"chat_template_kwargs": off}, False), (RESPONSES, {}, True),
        (RESPONSES, {"reasoning": {"effort": "medium"}}, True), (RESPONSES, {"reasoning": {"effort": "none"}}, False),
        (MESSAGES, {}, True), (MESSAGES, {"thinking": {"type": "adaptive"}}, True),
        (MESSAGES, {"thinking": {"type": "disabled"}}, False),
        (MESSAGES, {"output_config": {"effort": "high"}}, True),
        (MESSAGES, {"output_config": {"effort": "none"}}, False),
    ):  # fmt: skip
        chat: Any = task(path, EVERY_LEAST[path] | fields, rules).prompts[0]
        prompt = tokenizer(render_chat(chat, tokenizer, chat.template), add_special_tokens=False)["input_ids"]
        assert begins_thinking(prompt, tokenizer) is thinks, (path, fields)  # pyright: ignore[reportArgumentType]


def test_structured_answers_after_thoughts(served):
    """A grammar begins after `</think>`, whether the prompt opens thoughts or closes them."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}}}
    for thinks in (True, False):
        fields = {"model": "toy", "messages": say("a"), "temperature": 0, "response_format": form, "max_tokens": 60}
        fields["chat_template_kwargs"] = {"enable_thinking": thinks}
        message = served.post(CHAT, fields).json()["choices"][0]["message"]
        assert message["reasoning_content"] == ("Two and two." if thinks else None)
        assert json.loads(message["content"]).keys() == {"ok"}


def test_budget_of_thoughts_that_the_prompt_opens(served):
    fields = {"model": "toy", "messages": say("a"), "temperature": 0, "thinking_token_budget": 1, "max_tokens": 30}
    assert served.post(CHAT, fields).json()["choices"][0]["message"]["reasoning_content"] == "Two"


def test_forced_calls_are_refused(served):
    """The arguments of a call are not JSON."""
    for path, tools, choice in (
        (CHAT, TOOLS, "required"), (RESPONSES, FLAT, "required"), (MESSAGES, ANTHROPIC, {"type": "any"})
    ):  # fmt: skip
        answer = served.post(path, EVERY_LEAST[path] | {"tools": tools, "tool_choice": choice})
        assert answer.status_code == 400 and "calls are not JSON" in answer.text, path
