"""Functions, thoughts and structured output on `/v1/responses` and `/v1/messages`, through their makers' clients: what
chat completions say in their form. A client can send back all that it gets."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest
from body_helpers import RULES, read_request
from server_helpers import running
from tool_helpers import TOOLS, WEATHER, ask, tool_engine

from specjax.checkpoint.prompts import END_THINK
from specjax.serve.calls import Hermes
from specjax.serve.dialects.answer_items import Begin, End, Parts, assistant_turns
from specjax.serve.dialects.anthropic import CountTokensRequest, MessagesRequest
from specjax.serve.dialects.responses import ResponsesRequest
from specjax.serve.errors import ApiError
from specjax.serve.message_format import AnswerForm, Reply, ReplyOptions
from specjax.serve.openai_requests import ChatRequest

FLAT: list[Any] = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]
THEIRS: list[Any] = [
    {"name": each["name"], "input_schema": each.get("parameters", {"type": "object"})}
    for each in (tool["function"] for tool in TOOLS)
]
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
INFINITE = {"type": "object", "properties": {"a": {"maximum": math.inf}}}
ANSWERS: dict[str, list[tuple[str, str]]] = {  # kinds of parts, and their text
    "a": [("text", "Let me look."), ("get_weather", '{"city": "Paris"}')],
    "b": [("text", "It is 22 degrees in Paris.")],
    "c": [("noop", "{}"), ("get_weather", '{"city": "Rome"}')],
    "g": [("thoughts", "A city, so a call."), ("noop", "{}")],
    "i": [("thoughts", "Nothing to do."), ("text", "Fine.")],
    "k": [("get_weather", r'{"city": "\\ud83d", "days": ["NaN", "1e999"]}')],
}


@pytest.fixture(scope="module")
def server():
    with running(tool_engine()) as served:
        yield served


@pytest.fixture(scope="module")
def ours(server):
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def theirs(server):
    with anthropic.Anthropic(base_url=server.base, api_key="none", max_retries=0) as client:
        yield client


def say(script: str) -> list[Any]:
    return ask(script)["messages"]


def items(response: Any) -> list[tuple[str, str]]:
    found = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.name, item.arguments))
        else:
            found.append(("text" if item.type == "message" else "thoughts", item.content[0].text))
    return found


def blocks(message: Any) -> list[tuple[str, str]]:
    found = []
    for block in message.content:
        match block.type:
            case "text":
                found.append(("text", block.text))
            case "thinking":
                found.append(("thoughts", block.thinking))
            case _:
                found.append((block.name, json.dumps(block.input)))
    return found


@pytest.mark.parametrize("script", ANSWERS)
def test_responses(ours, script):
    fields: dict[str, Any] = {"model": "toy", "input": say(script), "temperature": 0, "tools": FLAT}
    whole = ours.responses.create(**fields)
    assert items(whole) == ANSWERS[script] and whole.status == "completed"
    assert [tool.name for tool in whole.tools] == ["get_weather", "noop"] and whole.tool_choice == "auto"
    assert bool(whole.usage.output_tokens_details.reasoning_tokens) == (ANSWERS[script][0][0] == "thoughts")
    with ours.responses.stream(**fields) as stream:  # gathers the events, and so checks their order
        events = list(stream)
        final = stream.get_final_response()
    assert items(final) == ANSWERS[script] and final.usage.output_tokens == whole.usage.output_tokens
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == sorted(
        event.sequence_number for event in events if hasattr(event, "sequence_number")
    )
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == "".join(text for kind, text in ANSWERS[script] if kind not in ("text", "thoughts"))
    ids = [item.id for item in final.output]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("script", ANSWERS)
def test_messages(theirs, script):
    fields: dict[str, Any] = {
        "model": "toy", "messages": say(script), "max_tokens": 99, "tools": THEIRS, "extra_body": {"temperature": 0}
    }  # fmt: skip
    whole = theirs.messages.create(**fields)
    calls = any(kind not in ("text", "thoughts") for kind, _ in ANSWERS[script])
    assert blocks(whole) == ANSWERS[script] and whole.stop_reason == ("tool_use" if calls else "end_turn")
    with theirs.messages.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert blocks(final) == ANSWERS[script] and final.stop_reason == whole.stop_reason
    assert kinds.count("content_block_stop") == len(ANSWERS[script])
    count = theirs.messages.count_tokens(model="toy", messages=say(script), tools=THEIRS)
    usage = whole.usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "noop"}, "none"])
def test_the_choice_between_functions(ours, theirs, choice):
    """Also where the model would not call."""
    found = ours.responses.create(
        model="toy", input=say("b"), temperature=0, tools=FLAT, tool_choice=choice, max_output_tokens=200,
        parallel_tool_calls=False,
    )  # fmt: skip
    kinds = {"required": "any", "none": "none"}
    their_choice: Any = {"type": kinds[choice]} if isinstance(choice, str) else {"type": "tool", "name": "noop"}
    message = theirs.messages.create(
        model="toy", messages=say("b"), max_tokens=200, tools=THEIRS, extra_body={"temperature": 0},
        tool_choice=their_choice | ({"disable_parallel_tool_use": True} if choice != "none" else {}),
    )  # fmt: skip
    assert blocks(message) == [(name, text) for name, text in items(found)]
    if choice == "none":
        assert items(found) == ANSWERS["b"]
    else:
        ((name, arguments),) = items(found)
        assert name in ("noop", "get_weather") if choice == "required" else name == "noop"
        assert isinstance(json.loads(arguments), dict)


def test_a_conversation_with_a_function(ours, theirs, server):
    """What a client got goes back, and the template writes it as the same conversation of a chat."""
    response = ours.responses.create(model="toy", input=say("g"), temperature=0, tools=FLAT)
    call = response.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "22 b"}
    given: list[Any] = [*say("g"), *response.output, result]
    answer = ours.responses.create(model="toy", input=given, temperature=0, tools=FLAT)
    assert answer.output_text == "It is 22 degrees in Paris."

    message = theirs.messages.create(
        model="toy", messages=say("g"), max_tokens=99, tools=THEIRS, extra_body={"temperature": 0}
    )
    found = {
        "type": "tool_result",
        "tool_use_id": message.content[-1].id,
        "content": [{"type": "text", "text": "22 b"}],
    }
    history: list[Any] = [
        *say("g"),
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [found]},
    ]
    fields: dict[str, Any] = {"max_tokens": 99, "tools": THEIRS, "extra_body": {"temperature": 0}}
    later = theirs.messages.create(model="toy", messages=history, **fields)
    assert blocks(later) == ANSWERS["b"]

    chat = openai.OpenAI(base_url=f"{server.base}/v1", api_key="none").chat.completions
    first = chat.create(**ask("g"), tools=TOOLS).choices[0].message
    assert first.tool_calls
    messages = [*say("g"), first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "22 b"}]
    usage = chat.create(model="toy", messages=messages, temperature=0, tools=TOOLS).usage
    assert usage is not None and usage.prompt_tokens == answer.usage.input_tokens
    assert usage.prompt_tokens - later.usage.input_tokens - later.usage.cache_read_input_tokens in range(-99, 99)


@pytest.mark.parametrize("script", ["b", "i"])
def test_text_in_a_form(ours, theirs, script):
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    found = ours.responses.create(model="toy", input=say(script), temperature=0, text=text, max_output_tokens=80)
    said = dict(items(found))
    assert set(json.loads(said["text"])) >= {"ok"} and found.text.format.name == "x"
    assert ("thoughts" in said) == (script == "i")
    for fields in ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
                   {"output_format": {"type": "json_schema", "schema": SCHEMA}}):  # fmt: skip
        message = theirs.messages.create(
            model="toy", messages=say(script), max_tokens=80, extra_body={"temperature": 0, **fields}
        )
        assert dict(blocks(message)) == said
    free = ours.responses.create(
        model="toy", input=say("b"), temperature=0, text={"format": {"type": "json_object"}}, max_output_tokens=80
    )
    assert isinstance(json.loads(free.output_text), dict)


def test_arguments_that_are_cut_off(ours, theirs):
    found = ours.responses.create(model="toy", input=say("a"), temperature=0, tools=FLAT, max_output_tokens=8)
    assert items(found)[1] == ("get_weather", '{"city": "Par') and found.status == "incomplete"
    assert [item.status for item in found.output] == ["completed", "incomplete"]
    message = theirs.messages.create(
        model="toy", messages=say("a"), max_tokens=8, tools=THEIRS, extra_body={"temperature": 0}
    )
    assert blocks(message)[1] == ("get_weather", "{}") and message.stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("kind", "change", "param"),
    [
        (ResponsesRequest, {"tools": [WEATHER]}, "tools"),
        (ResponsesRequest, {"tools": FLAT * 2}, "tools"),
        (ResponsesRequest, {"tools": [FLAT[0] | {"parameters": INFINITE}]}, "tools"),
        (ResponsesRequest, {"tools": FLAT, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        (ResponsesRequest, {"tools": FLAT, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        (ResponsesRequest, {"tool_choice": "required"}, "tool_choice"),
        (ResponsesRequest, {"text": {"format": {"type": "json_schema"}}}, "text"),
        (ResponsesRequest, {"text": {"format": {"type": "grammar"}}}, "text"),
        (ResponsesRequest, {"text": {"verbosity": "low"}}, "text"),
        (ResponsesRequest, {"text": {"format": {"type": "json_object"}}, "regex": "a"}, "regex"),
        (ResponsesRequest, {"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        (ResponsesRequest, {"input": [{"type": "function_call", "name": "f"}]}, "input"),
        (MessagesRequest, {"tools": [THEIRS[0] | {"type": "bash_20250124"}]}, "tools"),
        (MessagesRequest, {"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools"),
        (MessagesRequest, {"tools": [THEIRS[0] | {"input_schema": INFINITE}]}, "tools"),
        (MessagesRequest, {"tools": THEIRS, "tool_choice": {"type": "tool"}}, "tool_choice"),
        (MessagesRequest, {"tools": THEIRS, "tool_choice": {"type": "auto", "name": "noop"}}, "tool_choice"),
        (MessagesRequest, {"tool_choice": {"type": "any"}}, "tool_choice"),
        (MessagesRequest, {"thinking": {"type": "adaptive", "budget_tokens": 5}}, "thinking"),
        (MessagesRequest, {"output_config": {"format": {"type": "json_object"}}}, "output_config"),
        (MessagesRequest, {"output_config": {"effort": "low"}}, "output_config"),
        *(
            (MessagesRequest, {"messages": [{"role": role, "content": [block]}]}, "messages")
            for role, block in (
                ("user", {"type": "tool_use", "id": "c", "name": "f", "input": {}}),
                ("user", {"type": "thinking", "thinking": "x"}),
                ("assistant", {"type": "tool_result", "tool_use_id": "c"}),
                ("assistant", {"type": "tool_use", "id": "c", "name": "f", "input": "{}"}),
            )
        ),
    ],
)  # fmt: skip
def test_what_is_refused(kind, change, param):
    least = {"input": "hello"} if kind is ResponsesRequest else {"messages": say("a"), "max_tokens": 9}
    rules = replace(RULES, form=AnswerForm(Hermes, takes_tools=True))
    read_request(kind, json.dumps(least).encode(), rules)
    with pytest.raises(ApiError) as caught:
        read_request(kind, json.dumps(least | change).encode(), rules)
    assert caught.value.param == param and caught.value.status == 400
    if "tools" in change:  # nor where the model cannot be told of functions
        with pytest.raises(ApiError):
            read_request(kind, json.dumps(least | {"tools": change["tools"]}).encode(), RULES)


def test_parts_of_an_assistants_turn_are_one_message():
    call = {"role": "assistant", "content": "", "tool_calls": [1]}
    thought = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    said = {"role": "assistant", "content": "so"}
    user = {"role": "user", "content": "x"}
    given = [user, thought, said, call, call, user, user, said]
    kept = json.dumps(given)
    whole = {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [1, 1]}
    assert assistant_turns(given) == [user, whole, user, user, said] and json.dumps(given) == kept


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_parts_do_not_depend_on_the_pieces(size):
    text = '<think>hm</think>So.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\nDone'
    parts = Parts(ReplyOptions(Hermes, ("f",), reasoning=True).reply(thinking=False))
    changes = [change for at in range(0, len(text), size) for change in parts.feed(text[at : at + size])]
    changes += parts.feed("", last=True)
    found = [(part.kind, part.name, part.text) for part in parts.items]
    assert found == [("thoughts", "", "hm"), ("text", "", "So."), ("call", "f", '{"a": 1}'), ("text", "", "Done")]
    order = [(type(each), each.number) for each in changes if isinstance(each, Begin | End)]
    assert order == [(kind, number) for number in range(4) for kind in (Begin, End)]
    assert [part.kind for part in _empty(None)] == [part.kind for part in _empty(parts._reply)] == ["text"]


def _empty(reply: Reply | None) -> list[Any]:
    parts = Parts(None if reply is None else ReplyOptions(Hermes, ("f",)).reply(thinking=False))
    assert [type(each) for each in parts.feed("", last=True)] == [Begin, End]
    return parts.items


def test_thinking_sets_the_templates_variable():
    for kind, expected in (("adaptive", True), ("disabled", False)):
        body = {"messages": say("a"), "thinking": {"type": kind}, "max_tokens": 9}
        _, task, _ = read_request(MessagesRequest, json.dumps(body).encode(), RULES)
        assert task.prompts[0].template["enable_thinking"] is expected  # pyright: ignore
    assert "thinking" in CountTokensRequest.model_fields


def test_a_form_without_tokens_for_thoughts():
    """A grammar waits for the end of thoughts where that is a token; elsewhere the answer begins with it, so that none
    of it counts as thoughts, also where a template has begun them."""
    form, chat = {"response_format": {"type": "json_object"}}, {"messages": say("a")}
    for tokens, fields, thinks in (({}, form, False), ({}, {}, True), ({END_THINK: 5}, form, True)):
        rules = replace(RULES, form=AnswerForm(thinks=True, tokens=tokens))
        _, task, _ = read_request(ChatRequest, json.dumps(chat | fields).encode(), rules)
        assert (task.reply is not None and task.reply.reasoning) == thinks
