"""The requests that clients send, written by hand after their sources and tests: accepted, whole and streamed.

docs/serving.md lists the clients. A field that asks for nothing here must not refuse a request.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import pytest
from body_helpers import CHAT, COMPLETE, GENERATE, LEAST, MESSAGES, RESPONSES, RULES, refusal, task
from harmony_helpers import harmony_engine
from server_helpers import Running, check_error, running
from tool_helpers import ANTHROPIC, FLAT, TOOLS, ask, joined, tool_engine

from specjax.engine.chat.calls import Hermes
from specjax.engine.chat.message_format import AnswerForm
from specjax.serve.fields import IGNORED_HEADER

CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
CHAT_HISTORY = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "22 degrees"}, {"role": "user", "content": "Say b"},
]  # fmt: skip
CLAUDE_HISTORY = [
    {"role": "user", "content": [{"type": "text", "text": "<system-reminder>x</system-reminder>"},
                                 {"type": "text", "text": "Weather?", **CACHED}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "A city.", "signature": ""}, {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": False,
         "content": [{"type": "text", "text": "22 degrees"}], **CACHED},
        {"type": "text", "text": "Say b", **CACHED}]},
]  # fmt: skip
CLAUDE_TOOLS = [
    {
        **tool,
        "description": "A function.",
        "input_schema": {"$schema": "http://json-schema.org/draft-07/schema#", **schema},
    }
    for tool, schema in ((tool, tool["input_schema"]) for tool in ANTHROPIC)
]
CLAUDE = {
    "model": "toy", "max_tokens": 30, "messages": CLAUDE_HISTORY, "temperature": 1,
    "system": [{"type": "text", "text": "You are Claude Code.", **CACHED}, {"type": "text", "text": "Be brief."}],
    "tools": CLAUDE_TOOLS, "metadata": {"user_id": '{"session_id": "s"}'},
}  # fmt: skip
ENABLED = {"type": "enabled", "budget_tokens": 31_999}
KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
RESPONSES_HISTORY = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Permissions."}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
    {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
    {"type": "function_call", "name": "get_weather", "arguments": '{"city": "Paris"}', "call_id": "call_1"},
    {"type": "function_call_output", "call_id": "call_1", "output": "22 degrees"},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "x"}],
     "content": [{"type": "reasoning_text", "text": "So."}], "encrypted_content": "gAAAA"},
    {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "phase": "final_answer",
     "content": [{"type": "output_text", "text": "It is warm.", "annotations": []}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Say b"}]},
]  # fmt: skip
CODEX = {
    "model": "toy", "instructions": "You are Codex.", "input": RESPONSES_HISTORY, "tools": FLAT, "tool_choice": "auto",
    "parallel_tool_calls": False, "reasoning": None, "store": False, "include": [], "prompt_cache_key": "019a",
}  # fmt: skip
NAMESPACE = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Sub-agents.",
    "tools": [
        {
            "type": "function",
            "name": "spawn_agent",
            "description": "Spawn.",
            "strict": False,
            "defer_loading": True,
            "parameters": {"type": "object", "properties": {"message": {"type": "string"}}, "required": ["message"]},
        },
        {
            "type": "function",
            "name": "close_agent",
            "strict": False,
            "parameters": {"type": "object", "properties": {}},
        },
    ],
}
CUSTOM = {"type": "custom", "name": "apply_patch", "description": "Edit files.",
          "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}  # fmt: skip
OPEN_WEBUI = {
    "model": "toy", "messages": [{"role": "user", "content": "Say b"}], "stream_options": {"include_usage": True},
    "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.0, "repeat_penalty": 1.1, "max_tokens": 30, "seed": 3,
    "frequency_penalty": 0, "presence_penalty": 0, "stop": ["\n\nUser:"], "logit_bias": {"5": 1},
    "metadata": {"chat_id": "c"}, "session_id": "s", "features": {"web_search": False}, "variables": {},
    "background_tasks": {"title_generation": True}, "tool_ids": [], "files": [],
}  # fmt: skip
LANGCHAIN = {"model": "toy", "messages": CHAT_HISTORY, "n": 1, "temperature": 0.7, "max_completion_tokens": 30}
LITELLM_MESSAGE = {
    "role": "assistant", "content": "It is warm.", "reasoning_content": "So.", "reasoning": "So.", "tool_calls": None,
    "function_call": None, "refusal": None, "annotations": [], "audio": None, "images": [],
    "thinking_blocks": [{"type": "thinking", "thinking": "So.", "signature": ""}],
    "provider_specific_fields": {"refusal": None},
}  # fmt: skip

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Claude Code, thinking enabled": (MESSAGES, CLAUDE | {"thinking": ENABLED, "context_management": KEEP_ALL}),
    "Claude Code, adaptive": (MESSAGES, CLAUDE | {
        "thinking": {"type": "adaptive"}, "context_management": KEEP_ALL, "output_config": {"effort": "high"}}),
    "Claude Code, title": (MESSAGES, {
        "model": "toy", "max_tokens": 20, "messages": [{"role": "user", "content": "Say b"}], "temperature": 1,
        "system": [{"type": "text", "text": "Name this."}], "thinking": {"type": "disabled"}, "tools": [],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "metadata": {"user_id": "u"}}),
    "Claude Code, late system message": (MESSAGES, CLAUDE | {
        "messages": [*CLAUDE_HISTORY, {"role": "system", "content": "The plan mode ended."}], "thinking": ENABLED}),
    "Claude Code, streamed arguments": (MESSAGES, CLAUDE | {
        "tools": [tool | {"eager_input_streaming": True, "type": "custom"} for tool in CLAUDE_TOOLS]}),
    "LangChain, ChatAnthropic": (MESSAGES, {
        "model": "toy", "max_tokens": 30, "thinking": {"type": "enabled", "budget_tokens": 2000},
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "A city.", "signature": "", "index": 0},
                {"type": "text", "text": "Let me look.", "citations": None, "index": 1}]},
            {"role": "user", "content": "Say b"}],
        "tools": ANTHROPIC, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "stop_sequences": ["Human:"], "top_k": 5, "top_p": 0.9, "mcp_servers": [], "betas": [], "service_tier": "auto",
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}, "container": None}),
    "anthropic SDK, all context edits": (MESSAGES, CLAUDE | {
        "thinking": ENABLED, "speed": "standard", "inference_geo": None, "context_management": {"edits": [
            {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}},
            {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 1},
             "clear_tool_inputs": True, "clear_at_least": {"type": "input_tokens", "value": 1}, "exclude_tools": ["f"],
             "keep": {"type": "tool_uses", "value": 0}},
            {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 150_000},
             "pause_after_compaction": False, "instructions": None}]}}),
    "Codex, reasoning": (RESPONSES, CODEX | {
        "tools": [*FLAT, CUSTOM, NAMESPACE], "reasoning": {"effort": "medium", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "text": {"verbosity": "medium"}, "service_tier": "auto", "client_metadata": {"session_id": "s"},
        "stream_options": {"reasoning_summary_delivery": "sequential_cutoff"}}),
    "Codex, output schema": (RESPONSES, CODEX | {"tools": [], "text": {
        "format": {"type": "json_schema", "strict": True, "schema": SCHEMA, "name": "codex_output_schema"}}}),
    "LangChain, Responses": (RESPONSES, {
        "model": "toy", "input": [{"type": "message", **message} if "content" in message else message
                                  for message in RESPONSES_HISTORY],
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources", "code_interpreter_call.outputs"],
        "temperature": 0.5, "max_output_tokens": 30, "tools": [tool | {"strict": None} for tool in FLAT],
        "store": False, "truncation": "disabled", "top_p": 1.0, "user": "u", "metadata": {}}),
    "Open WebUI": (CHAT, OPEN_WEBUI),
    "Cline, OpenAI": (CHAT, {
        "model": "toy", "temperature": 0, "stream_options": {"include_usage": True}, "tools": TOOLS,
        "tool_choice": "auto", "parallel_tool_calls": False, "max_tokens": 30,
        "messages": [CHAT_HISTORY[0], {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
                     {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_details": []},
                     {"role": "tool", "tool_call_id": "call_1", "content": "22"}, CHAT_HISTORY[-1]]}),
    "LangChain, tools": (CHAT, LANGCHAIN | {
        "tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False, "stream_options": {"include_usage": True},
        "seed": 1, "user": "u", "logprobs": None, "stop": None, "reasoning_effort": "medium"}),
    "LiteLLM, history": (CHAT, {
        "model": "toy", "max_tokens": 30,
        "messages": [{"role": "user", "content": "Weather?"}, LITELLM_MESSAGE, {"role": "user", "content": "Say b"}]}),
    "vLLM, reasoning and its budget": (CHAT, {
        "model": "toy", "max_tokens": 30, "thinking_token_budget": 5, "chat_template_kwargs": {"enable_thinking": True},
        "include_reasoning": True, "messages": [
            {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "Warm.", "reasoning": "So."},
            {"role": "user", "content": "Say b"}]}),
    "openai SDK, all fields": (CHAT, {
        "model": "toy", "max_tokens": 30, "messages": [{"role": "developer", "content": "x", "name": "n"},
                                                       {"role": "user", "content": "Say b"}],
        "audio": None, "functions": [], "function_call": "none", "logit_bias": {}, "logprobs": False, "top_logprobs": 0,
        "metadata": {"a": "b"}, "modalities": ["text"], "n": 1, "prediction": None, "prompt_cache_key": "k",
        "reasoning_effort": "none", "response_format": {"type": "text"}, "safety_identifier": "s", "seed": -5,
        "service_tier": "auto", "stop": "\n", "store": True, "verbosity": "medium", "web_search_options": None,
        "prompt_cache_retention": "in_memory"}),
    "openai SDK, completions": (COMPLETE, {
        "model": "toy", "prompt": "Say b", "best_of": 1, "echo": False, "logprobs": 0, "max_tokens": 16, "n": 1,
        "suffix": "", "user": "u"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with running(tool_engine()) as served:
        yield served


@pytest.fixture(scope="module")
def harmony():
    with running(harmony_engine()) as served:
        yield served


HEADERS = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,context-management-2025-06-27"}


def send(server: Running, path: str, body: dict[str, Any]) -> httpx.Response:
    return server.post(f"{path}?beta=true", body, headers=HEADERS)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("client", REQUESTS)
def test_requests_of_clients_are_answered(server, client, stream):
    path, body = REQUESTS[client]
    body = body | ({"stream": True} if stream else {})
    body = body if stream or "stream_options" not in body else {k: v for k, v in body.items() if k != "stream_options"}
    answer = send(server, path, body)
    assert answer.status_code == 200, answer.text
    if stream:
        assert '"error": {' not in answer.text and "event: error" not in answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.text.rstrip().endswith(("[DONE]", "}"))
    else:
        assert "error" not in answer.json() or answer.json()["error"] is None
    if path == MESSAGES:
        assert send(server, f"{MESSAGES}/count_tokens", body).json()["input_tokens"] > 0


# The budget of thoughts.


def test_budget_of_thoughts_on_all_routes(server):
    """The script's thoughts are `Nothing`, ` to do.`: with one token the second one is the end of the thoughts."""
    for budget, thoughts in ((1, "Nothing"), (2, "Nothing to do."), (-1, "Nothing to do.")):
        for fields in ({}, {"logprobs": True, "top_logprobs": 2, "return_speculative_tokens": True}):
            body = ask("i", thinking_token_budget=budget, max_tokens=30, **fields)
            choice = server.post(CHAT, body).json()["choices"][0]
            assert choice["message"]["reasoning_content"] == thoughts, (budget, fields)
            events = server.events(CHAT, body)
            message = joined([c["delta"] for e in events for c in e["choices"] if c.get("delta")])
            assert message["reasoning_content"] == thoughts
            assert message["content"] == choice["message"]["content"] and (budget == 1 or message["content"] == "Fine.")
            if fields:
                tokens = choice["logprobs"]["content"]
                assert "".join(t["token"] for t in tokens).startswith(f"<think>{thoughts}</think>")
                assert tokens[2]["logprob"] == 0 or budget != 1
    body = {"model": "toy", "max_tokens": 30, "messages": ask("i")["messages"], "temperature": 0}
    for budget, thoughts in ((1, "Nothing"), (2, "Nothing to do."), (1024, "Nothing to do.")):
        fields = {"thinking": {"type": "enabled", "budget_tokens": budget}}
        first, *_ = server.post(MESSAGES, body | fields).json()["content"]
        assert (first["type"], first["thinking"]) == ("thinking", thoughts), budget
    answer = server.post(RESPONSES, {"input": ask("i")["messages"], "temperature": 0, "thinking_token_budget": 1})
    assert answer.json()["output"][0]["content"][0]["text"] == "Nothing"
    sampling = {"max_new_tokens": 12, "temperature": 0, "thinking_token_budget": 3, "ignore_eos": True}
    text = server.post(GENERATE, {"text": "x<think>", "sampling_params": sampling}).json()["text"]
    assert "</think>" in text
    check_error(server.chat("x", thinking_token_budget=-2), 400, "thinking_token_budget")
    check_error(server.chat("x", custom_params={"thinking_budget": -2}), 400, "custom_params")
    different = {"thinking_token_budget": 4, "custom_params": {"thinking_budget": 5}}
    check_error(server.chat("x", **different), 400, "thinking_token_budget")
    same = task(CHAT, LEAST[CHAT] | {"custom_params": {"thinking_budget": 7, "other": 1}})
    assert same.sampling == task(CHAT, LEAST[CHAT] | {"thinking_token_budget": 7}).sampling
    assert same.sampling[0].thinking_token_budget == 7
    server.wait_idle()


def test_budget_of_thoughts_in_harmony(harmony):
    for budget, thoughts in ((1, "Stop"), (2, "Stop there.")):
        answer = harmony.post(CHAT, ask("f", thinking_token_budget=budget, max_tokens=40)).json()["choices"][0]
        assert answer["message"]["reasoning_content"] == thoughts
        fields = {"thinking": {"type": "enabled", "budget_tokens": budget}, "max_tokens": 40}
        with anthropic.Anthropic(base_url=harmony.base, api_key="none", max_retries=0) as client:
            message = client.messages.create(
                model="toy", messages=ask("f")["messages"], extra_body={"temperature": 0}, **fields
            )
        assert message.content[0].thinking == thoughts


@pytest.mark.parametrize("budget", [0, 1])
def test_required_call_after_a_forced_end(server, harmony, budget):
    for running_server, script in ((server, "i"), (harmony, "f")):
        fields = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 80, "thinking_token_budget": budget}
        choice = running_server.post(CHAT, ask(script, **fields)).json()["choices"][0]
        assert choice["message"]["tool_calls"][0]["function"]["name"] in ("get_weather", "noop"), choice
        assert len((choice["message"]["reasoning_content"] or "").split()) <= budget


def test_omitted_thoughts_are_empty_blocks(server):
    body = {"model": "toy", "max_tokens": 30, "messages": ask("i")["messages"], "temperature": 0}
    shown, hidden = (
        server.post(MESSAGES, body | {"thinking": {"type": "adaptive", "display": display}}).json()["content"]
        for display in ("summarized", "omitted")
    )
    assert shown[0]["thinking"] == "Nothing to do." and shown[1]["text"] == "Fine."
    assert hidden == [{"type": "thinking", "thinking": "", "signature": ""}, shown[1]]
    fields: Any = body | {"thinking": {"type": "adaptive", "display": "omitted"}}
    fields["extra_body"] = {"temperature": fields.pop("temperature")}
    with (
        anthropic.Anthropic(base_url=server.base, api_key="none", max_retries=0) as client,
        client.messages.stream(**fields) as stream,
    ):
        blocks: Any = stream.get_final_message().content
    assert (blocks[0].thinking, blocks[1].text) == ("", "Fine.")


# Context editing.


def user(text: str = "Next.") -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_context_edits_are_ignored(server):
    """Clients send edits that change nothing before their chat has 100,000 tokens."""
    edited = CLAUDE | {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}
    answers = [send(server, MESSAGES, body | {"temperature": 0}) for body in (CLAUDE, edited)]
    assert answers[0].json()["content"] == answers[1].json()["content"]
    assert answers[1].headers[IGNORED_HEADER] == "context_management"


# Tools of Codex.


@pytest.mark.parametrize(
    ("tool", "item"),
    [
        (NAMESPACE, {"type": "function_call", "namespace": "multi_agent_v1"}),
        (NAMESPACE | {"name": "mcp__files__"}, {"type": "function_call", "namespace": "mcp__files__"}),
        (CUSTOM, {"type": "custom_tool_call", "name": "apply_patch"}),
    ],
)
def test_calls_name_the_tool_as_the_request_does(server, tool, item):
    body = CODEX | {"tools": [tool], "tool_choice": "required", "temperature": 0, "max_output_tokens": 60}
    (call,) = [item for item in server.post(RESPONSES, body).json()["output"] if "call" in item["type"]]
    assert item.items() <= call.items() and call["name"] in ("spawn_agent", "close_agent", "apply_patch")
    text = server.post(RESPONSES, body | {"stream": True}).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    (done,) = [e["item"] for e in events if e["type"] == "response.output_item.done" and "call" in e["item"]["type"]]
    assert {name: done[name] for name in call if "id" not in name} == {n: v for n, v in call.items() if "id" not in n}
    kind = "custom_tool_call_input" if tool is CUSTOM else "function_call_arguments"
    assert [e for e in events if e["type"] == f"response.{kind}.done"]
    output = {"type": f"{'custom_tool' if tool is CUSTOM else 'function'}_call_output", "call_id": call["call_id"]}
    history = [*RESPONSES_HISTORY, call, output | {"output": "done"}]
    assert server.post(RESPONSES, body | {"input": history, "tool_choice": "auto"}).status_code == 200


def test_tools_of_codex_in_the_prompt():
    rules = replace(RULES, form=AnswerForm(Hermes, takes_tools=True))
    (chat,) = task(RESPONSES, {"input": "x", "tools": [CUSTOM, NAMESPACE]}, rules).prompts
    custom, spawn, close = (tool["function"] for tool in chat.template["tools"])
    assert (custom["name"], custom["description"]) == (
        "apply_patch",
        "Edit files.\n\nGrammar of the input:\nstart: /.+/",
    )
    assert custom["parameters"]["properties"] == {"input": {"type": "string"}}
    assert (spawn["name"], spawn["description"]) == ("multi_agent_v1__spawn_agent", "Sub-agents.\n\nSpawn.")
    assert (close["name"], close["description"]) == ("multi_agent_v1__close_agent", "")
    items = [
        {"type": "function_call", "name": "f", "namespace": "mcp__a__", "call_id": "c", "arguments": "{}"},
        {"type": "custom_tool_call", "name": "apply_patch", "call_id": "d", "input": "*** Begin"},
    ]
    (chat,) = task(RESPONSES, {"input": items}, rules).prompts
    calls = [call["function"] for call in chat[0]["tool_calls"]]
    assert calls == [
        {"name": "mcp__a__f", "arguments": {}}, {"name": "apply_patch", "arguments": {"input": "*** Begin"}}
    ]  # fmt: skip
    both = [NAMESPACE, {"type": "function", "name": "multi_agent_v1__spawn_agent"}]
    for tools in (both, [NAMESPACE | {"tools": [CUSTOM]}], [{"type": "local_shell"}], [{"type": "tool_search"}]):
        error = refusal(RESPONSES, {"input": "x", "tools": tools}, rules=rules)
        assert error is not None and error.param == "tools"


# Earlier thoughts.


@pytest.mark.parametrize("fields", [{"reasoning": "So."}, {"reasoning": "So.", "reasoning_content": "So."}])
def test_reasoning_is_another_name_of_reasoning_content(fields):
    def chat(**more: str) -> dict[str, Any]:
        return {"messages": [*LEAST[CHAT]["messages"], {"role": "assistant", "content": "x", **more}, user()]}

    assert task(CHAT, chat(**fields)) == task(CHAT, chat(reasoning_content="So."))
    assert task(CHAT, chat(reasoning="")) == task(CHAT, chat())
    error = refusal(CHAT, chat(reasoning="a", reasoning_content="b"))
    assert error is not None and error.param == "messages"
    assert refusal(CHAT, {"messages": [user() | {"reasoning": "a"}]}) is not None
