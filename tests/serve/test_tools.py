"""Function calls, thoughts and stops through the server: scripted answers in the formats of several families."""

from __future__ import annotations

import contextlib
import copy
import json
from dataclasses import replace
from typing import Any

import openai
import pytest
from body_helpers import CHAT, COMPLETE, GENERATE, HELLO, MESSAGES, RESPONSES, RULES, refusal, task
from engine_helpers import END, TEMPLATE, byte_ids, shared_engine, toy
from engine_helpers import tokenizer as plain_tokenizer
from harmony_helpers import SCRIPTS as HARMONY_SCRIPTS
from harmony_helpers import harmony_engine
from server_helpers import Running, check_error, running
from tool_helpers import ANTHROPIC, FLAT, NOOP, SCRIPTS, TOOLS, WEATHER, ask, joined, tool_engine, tool_tokenizer

from specjax.cli.flags import ServerSettings
from specjax.drafters import make_speculation
from specjax.drafters.base import Params
from specjax.engine import Engine, EngineConfig, SamplingParams
from specjax.engine.chat.message_format import answer_form
from specjax.engine.grammar import GRAMMAR_FAILED
from specjax.limits import ParameterError
from specjax.serve.errors import INVALID

PROMPT = "user:Say {}<|im_end|><|im_start|>"


@pytest.fixture(scope="module")
def servers():
    """servers(parser) -> a server with this `--tool-call-parser`; one server at a time runs the engine."""
    current: dict[str, Running] = {}
    with contextlib.ExitStack() as stack:

        def server(parser: str = "auto") -> Running:
            if parser not in current:
                stack.close()
                current.clear()
                engine = harmony_engine() if parser == "gpt-oss" else tool_engine()
                current[parser] = stack.enter_context(running(engine, ServerSettings(tool_call_parser=parser)))
            return current[parser]

        yield server


def by_server(cases: dict[str, Any], place: int) -> list[str]:
    """Names of cases, sorted by the parser at this place, so that few servers start."""
    return sorted(cases, key=lambda name: cases[name][place])


def summary(choice: dict[str, Any], message: dict[str, Any], entries: list[Any]) -> dict[str, Any]:
    """`entries`: log-probabilities of the choice."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content") or "",
        "calls": calls,
        "finish": choice["finish_reason"],
        "stop": choice["matched_stop"],
        "tokens": [entry["token"] for entry in entries],
    }


def both(server: Running, **fields: Any) -> list[dict[str, Any]]:
    """Summaries of the choices of a stream, which equal those of a whole answer, and its usage."""
    *events, last = server.events(CHAT, fields | {"stream_options": {"include_usage": True}})
    answer = server.post(CHAT, fields).json()
    usages = [{name: value for name, value in body["usage"].items() if name != "prompt_tokens_details"}
              for body in (last, answer)]  # fmt: skip
    assert usages[0] == usages[1], "except cached tokens"
    summaries = []
    for choice in answer["choices"]:
        parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert not any(part["finish_reason"] for part in parts[:-1]), "nothing follows the finish reason"
        entries = [entry for part in parts if part.get("logprobs") for entry in part["logprobs"]["content"]]
        streamed = summary(parts[-1], joined([part["delta"] for part in parts]), entries)
        assert streamed == summary(choice, choice["message"], (choice.get("logprobs") or {"content": []})["content"])
        pieces = sum(len(part["delta"].get("tool_calls", ())) for part in parts)
        thoughts = sum("reasoning_content" in part["delta"] for part in parts)
        summaries.append(streamed | {"usage": usages[0], "pieces": pieces, "thoughts": thoughts})
    return summaries


# Calls and thoughts. By script: parser, content, calls, thoughts.

ANSWERS: dict[str, tuple[str, str, list[list[str]], str]] = {
    "a": ("auto", "Let me look.", [["get_weather", '{"city": "Paris"}']], ""),
    "b": ("auto", "It is 22 degrees in Paris.", [], ""),
    "c": ("qwen25", "", [["noop", "{}"], ["get_weather", '{"city": "Rome"}']], ""),
    "d": ("mistral", "", [["get_weather", '{"city": "Bern"}']], ""),
    "e": ("deepseekv3", "Hm.", [["get_weather", '{"city": "Oslo"}']], ""),
    "f": ("llama3", "", [["get_weather", '{"city": "Lima"}']], ""),
    "g": ("auto", "", [["noop", "{}"]], "A city, so a call."),
    "h": ("mistral", " none  needed", [], ""),
    "i": ("auto", "Fine.", [], "Nothing to do."),
    "k": ("auto", "", [["get_weather", '{"city": "Kyoto"}']], "A city:"),
    "l": ("auto", "No.", [], 'Maybe <tool_call>{"name": "noop", "arguments": {}}</tool_call>?'),
    "j": ("auto", '<tool_call>{"name": "unknown", "arguments": {}}!</tool_call>', [], ""),
    "gpt-oss a": ("gpt-oss", "", [["get_weather", '{"city": "Paris"}']], "A city, so a call."),
    "gpt-oss b": ("gpt-oss", "It is 22 degrees.", [], "Easy."),
    "gpt-oss c": ("gpt-oss", "Let me look.", [["noop", "{}"]], ""),
    "gpt-oss d": ("gpt-oss", "No thoughts.", [], ""),
    "gpt-oss e": ("gpt-oss", "??\nCut short", [], ""),
    "gpt-oss g": ("gpt-oss", "", [["noop", "{}"]], ""),
    "gpt-oss h": ("gpt-oss", 'to=functions.unknown json\n{"x": 1}', [], ""),
}


@pytest.mark.parametrize("name", by_server(ANSWERS, 0))
def test_answers_of_each_format(servers, name):
    parser, content, calls, reasoning = ANSWERS[name]
    script, end, fields = [*SCRIPTS.get(name, ()), "<|im_end|>"], "</think>", ask(name[-1])
    if parser == "gpt-oss":
        script, end, fields = HARMONY_SCRIPTS[name[-1]], "<|end|>", fields | {"draft_limit": 0}
    elif name == "k":
        end = "<tool_call>"
    (choice,) = both(servers(parser), **fields, tools=TOOLS, logprobs=True, seed=1)
    assert (choice["content"], choice["calls"], choice["reasoning"]) == (content, calls, reasoning)
    assert choice["finish"] == ("tool_calls" if calls else "stop")
    assert choice["stop"] == servers(parser).engine.tokenizer.convert_tokens_to_ids(script[-1])
    assert choice["usage"]["completion_tokens"] == len(script) == len(choice["tokens"])
    assert "".join(choice["tokens"]) == "".join(script[:-1])
    assert choice["pieces"] >= 2 * len(calls)
    assert not reasoning or choice["thoughts"] > (name == "gpt-oss a"), "thoughts are streamed"
    thought = script.index(end) + (name != "k") if reasoning else 0
    assert choice["usage"]["completion_tokens_details"]["reasoning_tokens"] == thought


def test_tool_choice_excludes_calls_of_other_functions_in_open_reasoning(servers):
    named = {"type": "function", "function": {"name": "noop"}}
    (choice,) = both(servers(), **ask("k", max_tokens=20), tools=TOOLS, tool_choice=named, seed=1)
    assert choice["calls"] == [] and choice["reasoning"].startswith("A city: <tool_call>")
    named["function"]["name"] = "get_weather"
    (choice,) = both(servers(), **ask("k", max_tokens=20), tools=TOOLS, tool_choice=named, seed=1)
    assert choice["calls"] == [["get_weather", '{"city": "Kyoto"}']]


def test_forms_of_messages(servers):
    answer = servers().post(CHAT, ask("a", tools=TOOLS)).json()["choices"][0]
    (call,) = answer["message"].pop("tool_calls")
    assert answer["message"] == {"role": "assistant", "content": "Let me look.", "reasoning_content": None}
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    answer = servers().post(CHAT, ask("c", tools=TOOLS)).json()["choices"][0]
    assert answer["message"]["content"] is None and answer["matched_stop"] == 2
    assert len({call["id"] for call in answer["message"]["tool_calls"]}) == 2
    # Events without text carry log-probabilities, too.
    events = servers().events(CHAT, ask("a", tools=TOOLS, logprobs=True))
    choices = [choice for event in events for choice in event["choices"]]
    tokens = [entry["token"] for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    assert "".join(tokens) == "".join(SCRIPTS["a"]) and len(tokens) == len(SCRIPTS["a"]) + 1
    assert json.dumps(events).count('"call_') == 1


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("script", ["i", "b"])
def test_require_reasoning(servers, script, required):
    """Thoughts begin by the model's own token, or by `require_reasoning`; a grammar applies after them."""
    body = {"text": PROMPT.format(script), "sampling_params": {"temperature": 0, "max_new_tokens": 20}}
    body |= {"require_reasoning": required}
    meta = servers().post(GENERATE, body).json()["meta_info"]
    thought = SCRIPTS[script].index("</think>") + 1 if script == "i" else 0
    assert meta["reasoning_tokens"] == (meta["completion_tokens"] if required and not thought else thought)
    assert servers().events(GENERATE, body)[-1]["meta_info"]["reasoning_tokens"] == meta["reasoning_tokens"]
    body |= {"text": "x", "sampling_params": body["sampling_params"] | {"regex": "[0-9]{2}"}}
    answer = servers().post(GENERATE, body).json()
    assert answer["text"].isdigit() != required
    assert answer["meta_info"]["reasoning_tokens"] == (20 if required else 0)


def test_require_reasoning_of_a_model_that_does_not_think():
    with pytest.raises(ParameterError, match="require_reasoning needs a model that thinks"):
        shared_engine("NONE").intake.sequence("x", SamplingParams(max_new_tokens=5, require_reasoning=True))


def test_calls_are_text_without_functions(servers):
    prompts = set()
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": [], "tool_choice": "auto"}):
        (choice,) = both(servers(), **ask("c"), **fields)
        assert (choice["content"], choice["calls"], choice["finish"]) == ("".join(SCRIPTS["c"]), [], "stop")
        prompts.add(choice["usage"]["prompt_tokens"])
    (choice,) = both(servers(), **ask("c"), tools=TOOLS)
    assert len(prompts) == 1 and choice["usage"]["prompt_tokens"] > min(prompts) + 100
    (choice,) = both(servers(), **ask("a"), tools=[NOOP])
    assert not choice["calls"] and "get_weather" in choice["content"], "not a function of this request"


def test_conversation_with_a_function(servers):
    """The client's message goes back, and the template writes its call and thoughts."""
    fields: dict[str, Any] = {"model": "toy", "tools": TOOLS, "temperature": 0}
    messages: list[Any] = ask("g")["messages"]
    completions = openai.OpenAI(base_url=f"{servers().base}/v1", api_key="none").chat.completions
    message = completions.create(**fields, messages=messages).choices[0].message
    assert message.tool_calls
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "22 b"}]
    assert completions.create(**fields, messages=messages).choices[0].message.content == ANSWERS["b"][1]
    body = {"messages": [messages[0], message.model_dump(), messages[2]]}
    (chat,) = task(CHAT, body, replace(RULES, form=answer_form(tool_tokenizer()))).prompts
    call = '<tool_call>{"name": "noop", "arguments": {}}</tool_call>'
    prompt = servers().engine.tokenizer.decode(servers().engine.encode(chat))
    assert f"assistant:<think>A city, so a call.</think>{call}<|im_end|>tool:22 b" in prompt


def test_other_fields_with_functions(servers):
    server = servers()
    choices = both(server, **ask("a"), tools=TOOLS, n=3, return_speculative_metrics=True)
    assert [choice["calls"] for choice in choices] == [ANSWERS["a"][2]] * 3
    answer = server.post(CHAT, ask("a", tools=TOOLS, return_speculative_metrics=True)).json()
    assert answer["speculative"]["spec_verify_ct"] > 0
    (choice,) = both(server, **ask("a"), tools=TOOLS, stop=" look")
    assert (choice["calls"], choice["content"], choice["finish"]) == ([], "Let me", "stop")
    (choice,) = both(server, **ask("a"), tools=TOOLS, max_tokens=8)
    assert (choice["calls"], choice["finish"]) == ([["get_weather", '{"city": "Par']], "length")
    (choice,) = both(server, **ask("c"), tools=TOOLS, parallel_tool_calls=False)
    assert choice["calls"] == [["noop", "{}"]]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {}}}}
    fields: dict[str, Any] = {"tools": TOOLS, "response_format": form, "max_tokens": 60}
    (choice,) = both(server, **ask("c"), **fields)
    assert [name for name, _ in choice["calls"]] == ["noop", "get_weather"] and not choice["content"]
    (choice,) = both(server, **ask("b"), **fields)
    assert not choice["calls"] and isinstance(json.loads(choice["content"]), dict)


NAMED = {"type": "function", "function": {"name": "get_weather"}}
CHOICES: dict[str, tuple[str, str, Any, set[str], str]] = {
    "required": ("b", "auto", "required", {"get_weather", "noop"}, ""),
    "named": ("b", "auto", NAMED, {"get_weather"}, ""),
    "another is named": ("c", "auto", NAMED, {"get_weather"}, ""),
    "named after thoughts": ("g", "auto", NAMED, {"get_weather"}, "A city, so a call."),
    "mistral": ("b", "mistral", "required", {"get_weather", "noop"}, ""),
    "deepseek": ("b", "deepseekv3", "required", {"get_weather", "noop"}, ""),
    "deepseek V3.1": ("b", "deepseekv31", {"type": "function", "function": {"name": "noop"}}, {"noop"}, ""),
    "llama": ("b", "llama3", "required", {"get_weather", "noop"}, ""),
    "gpt-oss": ("d", "gpt-oss", "required", {"get_weather", "noop"}, ""),
    "gpt-oss, named after thoughts": ("b", "gpt-oss", NAMED, {"get_weather"}, "Easy."),
}


@pytest.mark.parametrize("name", by_server(CHOICES, 1))
def test_tool_choice(servers, name):
    """Calls in the model's format, with arguments that follow the functions' schemas."""
    script, parser, choice, names, reasoning = CHOICES[name]
    (answer,) = both(servers(parser), **ask(script), tools=TOOLS, tool_choice=choice, max_tokens=200)
    assert answer["finish"] == "tool_calls" and answer["content"] == "" and answer["reasoning"] == reasoning
    assert {name for name, _ in answer["calls"]} <= names and answer["calls"]
    for called, text in answer["calls"]:
        arguments = json.loads(text)
        assert set(arguments) == ({"city"} if called == "get_weather" else set())
        assert all(isinstance(value, str) for value in arguments.values())
    assert len(answer["calls"]) == 1 or isinstance(choice, str)


def test_strict_functions(servers):
    """Arguments follow the schemas, but the model decides whether to call."""
    days = {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]}
    weather = {"type": "function", "function": WEATHER["function"] | {"parameters": days, "strict": True}}
    loose = {**weather, "function": weather["function"] | {"strict": False}}
    (choice,) = both(servers(), **ask("a"), tools=[loose])
    assert choice["calls"] == ANSWERS["a"][2]
    (choice,) = both(servers(), **ask("a"), tools=[weather, NOOP], max_tokens=60)
    ((name, arguments),) = choice["calls"]
    assert (choice["content"], name) == ("Let me look.", "get_weather") and arguments.startswith('{"days": ')
    noop = NOOP | {"function": NOOP["function"] | {"strict": True}}
    for script in ("b", "i", "c"):
        (choice,) = both(servers(), **ask(script), tools=[noop, WEATHER])
        assert [choice["content"], choice["reasoning"], choice["calls"]] == [ANSWERS[script][i] for i in (1, 3, 2)]


def test_special_tokens_in_content(servers):
    (choice,) = both(servers("mistral"), **ask("h"), tools=TOOLS, skip_special_tokens=False)
    assert choice["content"] == "[TOOL_CALLS] none [ARGS] needed"
    (choice,) = both(servers("mistral"), **ask("d"), tools=TOOLS, skip_special_tokens=False)
    assert choice["calls"] == ANSWERS["d"][2]
    (choice,) = both(servers("mistral"), **ask("h"))
    assert choice["content"] == " none  needed"


def function(**changes: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **changes}}]}


def form(schema: Any) -> dict[str, Any]:
    return {"tools": TOOLS, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


WRONG_SCHEMA = {"properties": {"a": {"type": "x"}}}
REFUSALS: dict[str, list[tuple[dict[str, Any], str]]] = {  # by field: other fields of the body, a part of the message
    "tools": [
        ({"tools": {}}, "list"), ({"tools": [1]}, "object"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "'function'"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type is required"),
        ({"tools": [{"type": "function"}]}, "tools[0].function is required"),
        ({"tools": [{"type": "function", "function": {}}]}, "name is required"),
        *((function(name=name), "pattern") for name in ("", "x" * 65, "a\n")),
        (function(name="a b"), "name"), (function(name=5), "string"), (function(description=[]), "string"),
        (function(parameters=[]), "object"), (function(parameters={"type": "array"}), "schema of an object"),
        (function(parameters={"type": "object", "properties": []}), "properties"),
        (function(parameters={"type": "object", "required": [1]}), "required"), (function(strict="yes"), "boolean"),
        ({"tools": [NOOP, WEATHER, NOOP]}, "'noop'"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "128"),
        (function(parameters=WRONG_SCHEMA) | {"tool_choice": "required"}, "tools"),
        (function(parameters=WRONG_SCHEMA, strict=True), "tools"),
    ],
    "tool_choice": [
        ({"tools": TOOLS, "tool_choice": "any"}, "none, auto, required"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "none, auto, required"),
        ({"tools": TOOLS, "tool_choice": {"type": "x", "function": {}}}, '{"name": ...}}'),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "'f'"),
        ({"tool_choice": "required"}, "needs tools"),
    ],
    "regex": [({"tools": TOOLS, "tool_choice": choice, "regex": "a+"}, "excludes tools")
              for choice in ("auto", "required")],
    "response_format": [(form("true"), "object"), (form("{"), "response_format")],
    "parallel_tool_calls": [({"tools": TOOLS, "parallel_tool_calls": "no"}, "boolean")],
    "separate_reasoning": [({"separate_reasoning": 1}, "boolean")],
    "stream_reasoning": [({"stream_reasoning": False}, "not supported")],
    "functions": [({"functions": [{"name": "f"}]}, "not supported")],
    "messages": [({"messages": [HELLO[0] | {"reasoning_content": "x"}]}, "assistant"),
                 (function(description="x" * 20_000), "context")],
}  # fmt: skip


@pytest.mark.parametrize("param", REFUSALS)
def test_refusals_name_the_field(param):
    rules = replace(RULES, form=answer_form(tool_tokenizer()))
    for fields, text in REFUSALS[param]:
        error = refusal(CHAT, ask("a") | fields, tool_engine().intake, rules)
        assert error is not None and (error.status, error.param) == (400, param) and text in str(error), error


@pytest.mark.parametrize("parser", ["qwen3_coder", "glm45"])
def test_calls_without_a_grammar_cannot_be_required(parser):
    rules = replace(RULES, form=answer_form(tool_tokenizer(), tool_call_parser=parser))
    error = refusal(CHAT, ask("a", tools=TOOLS, tool_choice="required"), tool_engine().intake, rules)
    assert error is not None and error.param == "tools" and "calls are not JSON" in str(error)


def test_models_without_functions(servers, monkeypatch):
    server = servers("none")
    check_error(server.post(CHAT, ask("a", tools=TOOLS)), 400, "tools", "--tool-call-parser")
    assert server.post(CHAT, ask("a", tools=[])).status_code == 200
    tokenizer = copy.deepcopy(tool_tokenizer())
    tokenizer.chat_template = TEMPLATE
    error = refusal(CHAT, ask("a", tools=TOOLS), rules=replace(RULES, form=answer_form(tokenizer)))
    assert error is not None and error.param == "tools" and "--chat-template" in str(error)


def test_failed_grammar_of_calls_is_named_tools():
    """The server has made the grammar from the functions of the request."""
    wide = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(1200)}}
    tool = {"type": "function", "function": {"name": "f", "parameters": wide}}
    tokenizer, model = copy.deepcopy(plain_tokenizer()), toy()
    # Only names: the schema would exceed the context.
    tokenizer.chat_template = '<tool_call>"arguments"{% for tool in tools %}{{ tool.function.name }}{% endfor %}'
    config = EngineConfig(max_running_requests=2, page_size=16, max_total_tokens=1024, context_length=512)
    engine = Engine(
        model.target, Params(model.params, None), tokenizer, make_speculation("NONE"), config=config, eos_ids=(END,)
    )
    with running(engine) as server:
        bias = {str(byte_ids(b"k")[0]): 90}
        answer = server.chat(tools=[tool], tool_choice="required", max_tokens=120, logit_bias=bias)
        error = check_error(answer, 400, "tools")
        assert error["code"] == INVALID and error["message"].startswith(f"tools: {GRAMMAR_FAILED} after ")


# Stops.

THOUGHTS = "The Ask: goes easy."
ANSWER = "It is four. Ask: me again."


def token(piece: str) -> int:
    return tool_tokenizer().convert_tokens_to_ids([piece])[0]


def answered(server: Running, path: str, body: dict[str, Any], *, stream: bool) -> Any:
    """The body of an answer, or the parsed events of a stream."""
    answer = server.post(path, body | {"stream": stream})
    assert answer.status_code == 200, answer.text
    if not stream:
        return answer.json()
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def ended(server: Running, mode: str, stream: bool, **fields: Any) -> tuple[str, str, Any]:
    """Thoughts, content, and the stop or reason that ended the answer to script s.

    `mode`: thoughts are begun by the model ("own") or by the prompt ("template").
    """
    body = ask("s") | fields | {"chat_template_kwargs": {"enable_thinking": mode == "template"}}
    events = answered(server, CHAT, body, stream=stream)
    choices = [event["choices"][0] for event in (events if stream else [events])]
    messages = [choice["delta" if stream else "message"] for choice in choices]
    thoughts, content = ("".join(m.get(key) or "" for m in messages) for key in ("reasoning_content", "content"))
    return thoughts, content, choices[-1]["matched_stop"] or choices[-1]["finish_reason"]


# By name: fields, thoughts, content, what ended the answer.
STOPS: dict[str, tuple[dict[str, Any], str, str, Any]] = {
    "in both": ({"stop": ["Ask:"]}, THOUGHTS, "It is four. ", "Ask:"),
    "across the end of the thoughts": ({"stop": [">\n\nIt", "</think>", "\nIt"]}, THOUGHTS, ANSWER, 2),
    "the answer's beginning": ({"stop": ["It"]}, THOUGHTS, "", "It"),
    "pattern": ({"stop_regex": ["A[a-z]k:"]}, THOUGHTS, "It is four. ", "A[a-z]k:"),
    "pattern at the beginning": ({"stop_regex": ["^(It|The)"]}, THOUGHTS, "", "^(It|The)"),
    "not trimmed": ({"stop": ["Ask:"], "no_stop_trim": True}, THOUGHTS, "It is four. Ask:", "Ask:"),
    "token": ({"stop_token_ids": [token("goes easy.\n\n")]}, "The Ask:", "", token("goes easy.\n\n")),
    "thoughts without an end": ({"stop": ["Ask:"], "max_tokens": 2}, "The Ask:", "", "length"),
    "after a grammar": ({"stop": [": ", "s"], "regex": "four: [0-9]{3}"}, THOUGHTS, "four", ": "),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("mode", ["own", "template"])
@pytest.mark.parametrize("name", STOPS)
def test_stops_match_after_the_thoughts(servers, name, mode, stream):
    fields, thoughts, content, end = STOPS[name]
    if name == "thoughts without an end" and mode == "template":  # neither of the two tokens is <think>
        thoughts = THOUGHTS
    assert ended(servers(), mode, stream, **fields) == (thoughts, content, end)


def text_of(events: Any) -> str:
    """The text of a completion, of a chat, or of `/generate`, whose events hold all text so far."""
    events = events if isinstance(events, list) else [events]
    if "text" in events[-1]:
        return events[-1]["text"]
    choices = [event["choices"][0] for event in events]
    return "".join(c["text"] if "text" in c else (c.get("message") or c["delta"]).get("content") or "" for c in choices)


def test_stops_match_in_raw_text(servers):
    """Raw completions, thoughts within the content, and a server without a parser of thoughts."""
    for stream in (False, True):
        for path, body in (
            (COMPLETE, {"prompt": PROMPT.format("s"), "temperature": 0, "stop": "Ask:"}),
            (GENERATE, {"text": PROMPT.format("s"), "sampling_params": {"temperature": 0, "stop": "Ask:"}}),
            (CHAT, ask("s", stop="Ask:", separate_reasoning=False)),
        ):
            assert text_of(answered(servers(), path, body, stream=stream)) == "<think>The ", path
    (choice,) = both(servers(), **ask("i"), separate_reasoning=False)
    assert (choice["content"], choice["reasoning"]) == ("<think>Nothing to do.</think>Fine.", "")
    assert "completion_tokens_details" not in choice["usage"]


def test_choices_and_log_probabilities_end_at_the_stop(servers):
    raw = "<think>The Ask: goes easy.\n\n</think>\n\nIt is four. "
    body = ask("s", stop=["Ask:"], n=2, logprobs=True)
    answer, events = (answered(servers(), CHAT, body, stream=stream) for stream in (False, True))
    for index, choice in enumerate(answer["choices"]):
        entries = choice["logprobs"]["content"]
        parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        sent = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert [entry["token"] for entry in sent] == [entry["token"] for entry in entries]
        assert "".join(entry["token"] for entry in entries) == raw
        assert choice["message"]["content"] == "It is four. "
    assert answer["usage"]["completion_tokens"] == 2 * (SCRIPTS["s"].index(" Ask: ") + 1)


# By name: fields, arguments, whether the call is complete.
CUTS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "inside a value": ({"stop": ["Par"]}, '{"city": "', False),
    "before the last bracket": ({"stop": ["}}"]}, '{"city": "Paris"', False),
    "inside a value, by a pattern": ({"stop_regex": ["P[a-z]r"]}, '{"city": "', False),
    "inside a value, by a token": ({"stop_token_ids": [token('is"')]}, '{"city": "Par', False),
    "after the arguments": ({"stop": ["</tool_call>"]}, '{"city": "Paris"}', True),
    "by the end": ({}, '{"city": "Paris"}', True),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", CUTS)
def test_call_that_a_stop_cuts_off_is_incomplete(servers, name, stream):
    fields, arguments, complete = CUTS[name]
    chat = answered(servers(), CHAT, ask("a", tools=TOOLS, **fields), stream=stream)
    choice = (chat[-1] if stream else chat)["choices"][0]
    assert choice["finish_reason"] == ("tool_calls" if complete else "stop")
    deltas = [event["choices"][0]["delta"] for event in chat] if stream else [choice["message"]]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(call["arguments"] for call in calls) == arguments

    body = {"input": ask("a")["messages"], "temperature": 0, "tools": FLAT, **fields}
    response = answered(servers(), RESPONSES, body, stream=stream)
    if stream:
        (done,) = [e for e in response if e["type"] == "response.output_item.done" and "arguments" in e["item"]]
        assert done["item"]["status"] == ("completed" if complete else "incomplete")
        response = response[-1]["response"]
    (call,) = [item for item in response["output"] if item["type"] == "function_call"]
    assert (call["arguments"], call["status"]) == (arguments, "completed" if complete else "incomplete")
    assert response["status"] == "completed"

    renamed = {("stop_sequences" if key == "stop" else key): value for key, value in fields.items()}
    body = {"messages": ask("a")["messages"], "temperature": 0, "tools": ANTHROPIC, "max_tokens": 50, **renamed}
    message = answered(servers(), MESSAGES, body, stream=stream)
    end = next(event["delta"] for event in message if event["type"] == "message_delta") if stream else message
    matches = "stop" in fields or "stop_regex" in fields
    assert end["stop_reason"] == ("stop_sequence" if matches else "tool_use" if complete else "end_turn")
