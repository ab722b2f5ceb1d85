"""`/v1/responses` and `/v1/messages`, through the clients of OpenAI and Anthropic: texts equal those of chats."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest
from body_helpers import CHAT, EVERY_LEAST, KINDS, MESSAGES, RESPONSES, RULES, read_request
from engine_helpers import END, shared_engine
from harmony_helpers import harmony_engine
from server_helpers import running
from test_tools import ANSWERS as CHATS
from tool_helpers import ANTHROPIC, FLAT, TOOLS, WEATHER, ask, blocks_of, items_of, tool_engine

from specjax.checkpoint.prompts import END_THINK
from specjax.cli.flags import ServerSettings
from specjax.engine import Engine
from specjax.engine.chat.calls import Hermes
from specjax.engine.chat.message_format import AnswerForm
from specjax.serve.dialects.anthropic import MessagesRequest
from specjax.serve.errors import ApiError
from specjax.serve.openai_requests import ChatRequest

USER, ASSISTANT = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "the hell"}
SYSTEM = {"role": "system", "content": "be"}
LEAST = {path: EVERY_LEAST[path] for path in (RESPONSES, MESSAGES)}


@pytest.fixture(scope="module")
def server():
    with running(shared_engine("NGRAM"), ServerSettings(api_key=("key",))) as served:
        yield served


@pytest.fixture(scope="module")
def responses(server):
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key="key", max_retries=0) as client:
        yield client.responses


@pytest.fixture(scope="module")
def messages(server):
    with anthropic.Anthropic(base_url=server.base, api_key="key", max_retries=0) as client:
        yield client.messages


# Texts.

SAMPLING = {"temperature": 0.8, "top_p": 0.9}


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        ({"input": "hello"}, [USER]),
        ({"input": [USER, ASSISTANT, USER]}, [USER, ASSISTANT, USER]),
        ({"input": "hello", "instructions": "be"}, [SYSTEM, USER]),
        (
            {"input": [{"role": "developer", "content": [{"type": "input_text", "text": "b"}] * 2, "type": "message"}]},
            [{"role": "system", "content": "bb"}],
        ),
    ],
)
def test_response_equals_the_engine(server, responses, fields, chat):
    answer = responses.create(model="toy", max_output_tokens=12, extra_body={"seed": 3}, **SAMPLING, **fields)
    expected = shared_engine("NONE").generate(chat, {"max_new_tokens": 12, "seed": 3, **SAMPLING})
    assert answer.output_text == expected.text
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.input_tokens == len(server.engine.encode(chat)) and answer.usage.output_tokens == 12
    assert answer.usage.total_tokens == answer.usage.input_tokens + 12
    assert answer.id.startswith("resp_") and answer.output[0].id.startswith("msg_") and answer.model == "toy"
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.8, 0.9, 12)
    earlier = fields["input"] if isinstance(fields["input"], list) else [USER]
    longer = responses.create(model="toy", input=[*earlier, *answer.output, USER], max_output_tokens=2)
    assert longer.usage.input_tokens > answer.usage.input_tokens, "a client can send the output back"


@pytest.mark.parametrize(
    ("fields", "chat", "variables"),
    [
        ({"messages": [USER]}, [USER], {}),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in ("hel", "lo")]}],
             "system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}]},
            [SYSTEM, USER],
            {},
        ),
        ({"messages": [USER, SYSTEM], "system": "be"}, [SYSTEM, USER, SYSTEM], {}),
        ({"messages": [USER, ASSISTANT]}, [USER, ASSISTANT], {"continue_final_message": True}),
    ],
)  # fmt: skip
def test_message_equals_a_chat(server, messages, fields, chat, variables):
    sampling = {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "seed": 3}  # newer clients have no names for them
    message = messages.create(model="toy", max_tokens=12, **fields, extra_body=sampling)
    with server.client(headers={"Authorization": "Bearer key"}) as client:
        answer = client.post(CHAT, json={"messages": chat, "max_tokens": 12, **variables, **sampling}).json()
    assert message.content[0].text == answer["choices"][0]["message"]["content"]
    assert (message.stop_reason, message.stop_sequence, message.role) == ("max_tokens", None, "assistant")
    usage, prompt = message.usage, answer["usage"]["prompt_tokens"]
    assert usage.input_tokens + usage.cache_read_input_tokens == prompt
    assert usage.output_tokens == 12 and message.id.startswith("msg_")
    assert messages.count_tokens(model="toy", **fields).input_tokens == prompt


def test_events_of_a_response(responses):
    fields = {"model": "toy", "input": "hello", "max_output_tokens": 15, "temperature": 0}
    answer = responses.create(**fields)
    events = list(responses.create(stream=True, **fields))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert [event.type.removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * len(deltas),
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(deltas) == answer.output_text == events[-1].response.output_text and len(deltas) > 1
    assert events[-1].response.usage == answer.usage and events[0].response.status == "in_progress"


def test_events_of_a_message(messages):
    fields = {"model": "toy", "max_tokens": 15, "messages": [USER], "extra_body": {"temperature": 0}}
    message = messages.create(**fields)
    events = list(messages.create(stream=True, **fields))
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert [event.type for event in events] == [
        "message_start", "content_block_start", *["content_block_delta"] * len(deltas), "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert "".join(deltas) == message.content[0].text and len(deltas) > 1
    assert events[-2].usage.output_tokens == 15 and events[-2].delta.stop_reason == "max_tokens"


def test_ends_of_answers(responses, messages):
    end = {"stop_token_ids": [END], "logit_bias": {END: 100}}
    answer = responses.create(model="toy", input="hello", max_output_tokens=20, extra_body=end)
    assert (answer.status, answer.incomplete_details, answer.output_text) == ("completed", None, "")
    fields = {"model": "toy", "input": "hello", "extra_body": {"stop": ["e", "a"], "seed": 1}}
    answer = responses.create(**fields)
    with responses.stream(**fields) as stream:  # checks the order of events
        assert stream.get_final_response().output_text == answer.output_text != ""

    fields = {"model": "toy", "max_tokens": 40, "messages": [USER]}
    message = messages.create(**fields, extra_body=end)
    assert (message.stop_reason, message.stop_sequence, message.content[0].text) == ("end_turn", None, "")
    text = messages.create(**fields, extra_body={"temperature": 0}).content[0].text
    message = messages.create(**fields, extra_body={"temperature": 0}, stop_sequences=["~~", text[9:11]])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", text[9:11])
    assert message.content[0].text == text[: text.find(text[9:11])]


# Errors.

INFINITE = {"type": "object", "properties": {"a": {"maximum": math.inf}}}
REFUSED: dict[str, list[tuple[str, list[Any]]]] = {  # by route: a field, its wrong values
    RESPONSES: [
        ("input", [
            [], None, [{"type": "function_call_output", "call_id": "c"}], [{"type": "item_reference", "id": "x"}],
            [{"role": "user", "content": [{"type": "input_image"}]}], [{"type": "function_call", "name": "f"}],
        ]),
        ("max_output_tokens", [0]), ("max_tokens", [5]), ("previous_response_id", ["resp_1"]), ("background", [True]),
        ("tools", [[{"type": "web_search"}], [WEATHER], FLAT * 2, [FLAT[0] | {"parameters": INFINITE}]]),
        ("text", [{"format": {"type": "json_schema"}}, {"format": {"type": "grammar"}}, {"verbosity": "low"}]),
        ("tool_choice", ["required", {"type": "allowed_tools"}]), ("reasoning", [{"effort": "high"}]), ("n", [2]),
        ("include", [["message.output_text.logprobs"], ["reasoning"]]),
        ("messages", [[USER]]), ("model", ["other"]), ("response_format", [{"type": "json_object"}]),
        ("guided_choice", [["a"]]), ("json_schema", [{}]),
    ],
    MESSAGES: [
        ("max_tokens", [0]), ("stop", [["a"]]), ("stop_sequences", [["a"] * 17]), ("system", [5]),
        ("temperature", [-1]), ("n", [2, True]), ("response_format", [{"type": "json_object"}]),
        ("guided_choice", [["a"]]), ("json_schema", [{}]), ("tool_choice", [{"type": "any"}]),
        ("messages", [
            [], [{"role": "tool", "content": "x"}], [{"role": "user", "content": [{"type": "image"}]}],
            *([{"role": role, "content": [block]}] for role, block in (
                ("user", {"type": "tool_use", "id": "c", "name": "f", "input": {}}),
                ("user", {"type": "thinking", "thinking": "x"}),
                ("assistant", {"type": "tool_result", "tool_use_id": "c"}),
                ("assistant", {"type": "tool_use", "id": "c", "name": "f", "input": "{}"}))),
        ]),
        ("tools", [[{"name": "f"}], [{"name": "a b", "input_schema": {}}], [ANTHROPIC[0] | {"type": "bash_20250124"}],
                   [{"name": "f", "input_schema": {"type": "array"}}], [ANTHROPIC[0] | {"input_schema": INFINITE}]]),
        ("thinking", [*({"type": kind, "budget_tokens": 5} for kind in ("adaptive", "disabled")), {"type": "on"},
                      {"type": "enabled", "budget_tokens": 0}, {"type": "adaptive", "display": "all"}]),
        ("output_config", [{"format": {"type": "json_object"}}, {"effort": "low"}]),
    ],
}  # fmt: skip
SEVERAL: list[tuple[str, dict[str, Any], str]] = [  # other fields, and the field of the error
    *((RESPONSES, {"tools": FLAT, "tool_choice": choice}, "tool_choice")
      for choice in ({"type": "function", "name": "other"}, {"type": "allowed_tools"})),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}, "regex": "a"}, "regex"),
    *((MESSAGES, {"tools": ANTHROPIC, "tool_choice": choice}, "tool_choice")
      for choice in ({"type": "tool"}, {"type": "auto", "name": "noop"})),
    *((path, {name: value}, name) for path, rows in REFUSED.items() for name, values in rows for value in values),
]  # fmt: skip


@pytest.mark.parametrize(("path", "change", "param"), SEVERAL)
def test_refusals_name_the_field(path, change, param):
    rules = replace(RULES, form=AnswerForm(Hermes, takes_tools=True))
    read_request(KINDS[path], json.dumps(LEAST[path]).encode(), rules)
    with pytest.raises(ApiError) as caught:
        read_request(KINDS[path], json.dumps(LEAST[path] | change).encode(), rules)
    assert caught.value.param == param and caught.value.status in (400, 404)
    if param == "stop":
        assert "stop must be None, got ['a']" in str(caught.value)
    if "tools" in change:  # also refused if the model has no functions
        with pytest.raises(ApiError):
            read_request(KINDS[path], json.dumps(LEAST[path] | {"tools": change["tools"]}).encode(), RULES)


def test_errors_in_the_form_of_anthropic(server, messages):
    for call in (
        lambda: messages.create(model="toy", max_tokens=0, messages=[USER]),
        lambda: messages.create(model="toy", max_tokens=5, messages=[{"role": "user", "content": "x" * 10_000}]),
        lambda: messages.count_tokens(model="toy", messages=[]),
    ):
        with pytest.raises(anthropic.BadRequestError) as caught:
            call()
        assert caught.value.body["type"] == "error" and caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError) as missing:
        messages.create(model="other", max_tokens=5, messages=[USER])
    assert missing.value.body["error"]["type"] == "not_found_error"
    with server.client(headers={"x-api-key": "key"}) as client:
        for method, path in (("GET", MESSAGES), ("POST", MESSAGES), ("POST", f"{MESSAGES}/no")):
            answer = client.request(method, path)
            assert answer.status_code in (404, 405, 415) and answer.json()["type"] == "error", answer.text
        assert "type" not in client.get(RESPONSES).json()
    stranger = anthropic.Anthropic(base_url=server.base, api_key="wrong", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model="toy", max_tokens=5, messages=[USER])
    with anthropic.Anthropic(base_url=server.base, auth_token="key", max_retries=0) as client:
        assert client.messages.create(model="toy", max_tokens=2, messages=[USER]).usage.output_tokens == 2


@pytest.mark.parametrize("path", LEAST)
def test_error_in_a_stream_is_an_event(server, monkeypatch, path):
    with monkeypatch.context() as patch:
        patch.setattr(server.engine, "step", lambda: 1 / 0)
        text = server.post(path, LEAST[path] | {"stream": True}, headers={"x-api-key": "key"}).text
    first, second = text.strip().split("\n")
    event = json.loads(second.removeprefix("data: "))
    assert first == "event: error" and event["type"] == "error"
    assert (event if path == RESPONSES else event["error"])["code"] == "unavailable"
    server.wait_idle()


# Functions, thoughts and structured output. By script: kinds of parts, and their text.

ANSWERS: dict[tuple[str, str], list[tuple[str, str]]] = {
    ("gpt-oss" if parser == "gpt-oss" else "qwen", name[-1]): [
        *([("thoughts", reasoning)] if reasoning else []),
        *([("text", content)] if content else []),
        *((called, arguments) for called, arguments in calls),
    ]
    for name, (parser, content, calls, reasoning) in CHATS.items()
    if parser in ("auto", "qwen25", "gpt-oss")
}
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


@pytest.fixture(scope="module")
def families():
    """The clients of OpenAI and Anthropic, for servers with scripted answers in each format."""
    with contextlib.ExitStack() as stack:

        def clients(engine: Engine) -> tuple[openai.OpenAI, anthropic.Anthropic]:
            base = stack.enter_context(running(engine)).base
            ours = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
            theirs = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0)
            return stack.enter_context(ours), stack.enter_context(theirs)

        yield {"qwen": clients(tool_engine()), "gpt-oss": clients(harmony_engine())}


@pytest.fixture
def clients(families):
    return families["qwen"]


def respond(clients: Any, script: str, **fields: Any) -> Any:
    return clients[0].responses.create(**{"model": "toy", "input": say(script), "temperature": 0} | fields)


def message_of(clients: Any, script: str, **fields: Any) -> Any:
    extra = {"temperature": 0} | fields.pop("extra_body", {})
    least = {"model": "toy", "messages": say(script), "max_tokens": 99}
    return clients[1].messages.create(**least | fields, extra_body=extra)


def say(script: str) -> list[Any]:
    return ask(script)["messages"]


@pytest.mark.parametrize(("family", "script"), ANSWERS)
def test_responses_with_functions(families, family, script):
    clients, answer = families[family], ANSWERS[family, script]
    fields: dict[str, Any] = {"model": "toy", "input": say(script), "temperature": 0, "tools": FLAT}
    whole = clients[0].responses.create(**fields)
    assert items_of(whole) == answer and whole.status == "completed"
    assert [tool.name for tool in whole.tools] == ["get_weather", "noop"] and whole.tool_choice == "auto"
    thought = whole.usage.output_tokens_details.reasoning_tokens
    assert bool(thought) == (answer[0][0] == "thoughts") and (script != "k" or thought == 2)
    with clients[0].responses.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert items_of(final) == answer and final.usage.output_tokens == whole.usage.output_tokens
    numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    assert numbers == sorted(numbers)
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == "".join(text for kind, text in answer if kind not in ("text", "thoughts"))
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "".join(text for kind, text in answer if kind == "thoughts")
    assert len({item.id for item in final.output}) == len(final.output)


@pytest.mark.parametrize(("family", "script"), ANSWERS)
def test_messages_with_functions(families, family, script):
    clients, answer = families[family], ANSWERS[family, script]
    fields: dict[str, Any] = {
        "model": "toy", "messages": say(script), "max_tokens": 99, "tools": ANTHROPIC, "extra_body": {"temperature": 0}
    }  # fmt: skip
    whole = clients[1].messages.create(**fields)
    calls = any(kind not in ("text", "thoughts") for kind, _ in answer)
    assert blocks_of(whole) == answer and whole.stop_reason == ("tool_use" if calls else "end_turn")
    with clients[1].messages.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert blocks_of(final) == answer and final.stop_reason == whole.stop_reason
    assert kinds.count("content_block_stop") == len(answer)
    count = clients[1].messages.count_tokens(model="toy", messages=say(script), tools=ANTHROPIC)
    assert count.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "noop"}, "none"])
def test_tool_choice(clients, choice):
    """For a script without calls."""
    fields = {"max_output_tokens": 60, "parallel_tool_calls": False}
    response = respond(clients, "b", tools=FLAT, tool_choice=choice, **fields)
    kinds = {"required": "any", "none": "none"}
    their_choice: Any = {"type": kinds[choice]} if isinstance(choice, str) else {"type": "tool", "name": "noop"}
    their_choice |= {"disable_parallel_tool_use": True} if choice != "none" else {}
    message = message_of(clients, "b", tools=ANTHROPIC, tool_choice=their_choice, max_tokens=60)
    assert blocks_of(message) == items_of(response)
    if choice == "none":
        assert items_of(response) == ANSWERS["qwen", "b"]
    else:
        ((name, arguments),) = items_of(response)
        assert name in ("noop", "get_weather") if choice == "required" else name == "noop"
        assert isinstance(json.loads(arguments), dict)


def test_conversation_with_a_function(clients):
    """Clients send back what they get; the prompt equals the prompt of the same conversation as a chat."""
    response = respond(clients, "g", tools=FLAT)
    result = {"type": "function_call_output", "call_id": response.output[-1].call_id, "output": "22 b"}
    answer = respond(clients, "g", tools=FLAT, input=[*say("g"), *response.output, result])
    assert answer.output_text == ANSWERS["qwen", "b"][0][1]

    message = message_of(clients, "g", tools=ANTHROPIC)
    content = [{"type": "text", "text": "22 b"}]
    result = {"type": "tool_result", "tool_use_id": message.content[-1].id, "content": content}
    turns = [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    later = message_of(clients, "g", tools=ANTHROPIC, messages=[*say("g"), *turns])
    assert blocks_of(later) == ANSWERS["qwen", "b"]

    chat = clients[0].chat.completions
    first = chat.create(**ask("g"), tools=TOOLS).choices[0].message
    history = [*say("g"), first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "22 b"}]
    usage = chat.create(model="toy", messages=history, temperature=0, tools=TOOLS).usage
    assert usage.prompt_tokens == answer.usage.input_tokens
    assert usage.prompt_tokens - later.usage.input_tokens - later.usage.cache_read_input_tokens in range(-99, 99)


@pytest.mark.parametrize(("family", "script"), [("qwen", "b"), ("qwen", "i"), ("gpt-oss", "b"), ("gpt-oss", "d")])
def test_structured_output(families, family, script):
    clients = families[family]
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    response = respond(clients, script, text=text, max_output_tokens=80)
    parts = dict(items_of(response))
    assert set(json.loads(parts["text"])) >= {"ok"} and response.text.format.name == "x"
    assert ("thoughts" in parts) == (ANSWERS[family, script][0][0] == "thoughts")
    form = {"type": "json_schema", "schema": SCHEMA}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        assert dict(blocks_of(message_of(clients, script, max_tokens=80, extra_body=fields))) == parts
    free = respond(clients, script, text={"format": {"type": "json_object"}}, max_output_tokens=80)
    assert isinstance(json.loads(free.output_text), dict)


def test_cut_off_arguments(clients):
    response = respond(clients, "a", tools=FLAT, max_output_tokens=8)
    assert items_of(response)[1] == ("get_weather", '{"city": "Par') and response.status == "incomplete"
    assert [item.status for item in response.output] == ["completed", "incomplete"]
    message = message_of(clients, "a", tools=ANTHROPIC, max_tokens=8)
    assert blocks_of(message)[1] == ("get_weather", "{}") and message.stop_reason == "max_tokens"


def test_thinking_sets_the_templates_variable():
    for kind, expected in (("adaptive", True), ("enabled", True), ("disabled", False)):
        body = {"messages": say("a"), "thinking": {"type": kind}, "max_tokens": 9}
        _, task, _ = read_request(MessagesRequest, json.dumps(body).encode(), RULES)
        assert task.prompts[0].template["enable_thinking"] is expected  # pyright: ignore


def test_structured_output_without_tokens_for_thoughts():
    """A grammar applies after the token that ends thoughts. Without such a token, no text counts as thoughts."""
    form, chat = {"response_format": {"type": "json_object"}}, {"messages": say("a")}
    for tokens, fields, thinks in (({}, form, False), ({}, {}, True), ({END_THINK: 5}, form, True)):
        rules = replace(RULES, form=AnswerForm(thinks=True, tokens=tokens))
        _, task, _ = read_request(ChatRequest, json.dumps(chat | fields).encode(), rules)
        assert (task.reply is not None and task.reply.reasoning) == thinks
