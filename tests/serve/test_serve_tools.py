"""Function calls and thoughts through the server: scripted answers in the formats of several families."""

from __future__ import annotations

import copy
import json
from typing import Any

import openai
import pytest
from body_helpers import CHAT, HELLO
from engine_helpers import END, TEMPLATE, byte_ids, shared_engine, toy
from engine_helpers import tokenizer as plain_tokenizer
from server_helpers import Running, running
from tool_helpers import NOOP, SCRIPTS, TOOLS, WEATHER, ask, tool_engine

from specjax.cli.flags import ServerSettings
from specjax.drafters import make_drafter
from specjax.drafters.base import Params
from specjax.engine import Engine, EngineConfig, SamplingParams
from specjax.engine.grammar import GRAMMAR_FAILED
from specjax.limits import ParameterError
from specjax.serve.errors import INVALID


@pytest.fixture(scope="module")
def servers():
    """A server for each format, over the same engine, one at a time."""
    found: dict[str, Any] = {}

    def server(parser: str = "auto") -> Running:
        if parser not in found:
            for context in found.values():
                context[0].__exit__(None, None, None)
            found.clear()
            context = running(tool_engine(), ServerSettings(tool_call_parser=parser))
            found[parser] = context, context.__enter__()
        return found[parser][1]

    yield server
    for context in found.values():
        context[0].__exit__(None, None, None)


def by_server(cases: dict[str, Any], place: int) -> list[str]:
    """Names of cases, those for the same server one after another."""
    return sorted(cases, key=lambda name: cases[name][place])


def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0)


def streamed(server: Running, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a stream put together: message, finish_reason, log-probabilities."""
    options: Any = {"include_usage": True}
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in client(server).chat.completions.create(**fields, stream=True, stream_options=options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            found = choices.setdefault(
                choice.index,
                {"content": "", "reasoning": "", "calls": [], "finish": None, "tokens": [], "pieces": 0},
            )
            assert found["finish"] is None, "nothing follows the reason of the end"
            found["finish"] = choice.finish_reason
            found["content"] += choice.delta.content or ""
            found["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            if choice.logprobs is not None:
                found["tokens"] += [entry.token for entry in choice.logprobs.content or ()]
            for piece in choice.delta.tool_calls or ():
                assert piece.function is not None
                if piece.index == len(found["calls"]):
                    assert piece.id and piece.id.startswith("call_") and piece.type == "function"
                    found["calls"].append([piece.function.name, ""])
                found["calls"][piece.index][1] += piece.function.arguments or ""
                found["pieces"] += 1
    assert usage is not None
    return [found | {"usage": usage.model_dump()} for _, found in sorted(choices.items())]


def whole(server: Running, **fields: Any) -> list[dict[str, Any]]:
    """The same of an answer that is no stream."""
    answer = client(server).chat.completions.create(**fields)
    assert answer.usage is not None
    return [
        {
            "content": choice.message.content or "",
            "reasoning": getattr(choice.message, "reasoning_content", None) or "",
            "calls": [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()],
            "finish": choice.finish_reason,
            "tokens": [entry.token for entry in choice.logprobs.content or ()] if choice.logprobs else [],
            "usage": answer.usage.model_dump(),
        }
        for choice in answer.choices
    ]


def both(server: Running, **fields: Any) -> list[dict[str, Any]]:
    """Of a stream and of a whole answer, which agree."""
    stream, answer = streamed(server, **fields), whole(server, **fields)
    for one in (*stream, *answer):
        one["usage"].pop("prompt_tokens_details")  # the second finds the prompt in the cache
    assert [{key: one[key] for key in one if key != "pieces"} for one in stream] == answer
    return stream


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
    "k": ("auto", "", [["get_weather", r'{"city": "\\ud83d", "days": ["NaN", "1e999"]}']], ""),
    "j": ("auto", '<tool_call>{"name": "unknown", "arguments": {}}!</tool_call>', [], ""),
}


@pytest.mark.parametrize("name", by_server(ANSWERS, 0))
def test_answers_of_each_format(servers, name):
    parser, content, calls, reasoning = ANSWERS[name]
    (found,) = both(servers(parser), **ask(name), tools=TOOLS, logprobs=True, seed=1)
    assert (found["content"], found["calls"], found["reasoning"]) == (content, calls, reasoning)
    assert found["finish"] == ("tool_calls" if calls else "stop")
    assert found["usage"]["completion_tokens"] == len(SCRIPTS[name]) + 1 == len(found["tokens"])
    assert found["pieces"] >= 2 * len(calls)
    thought = SCRIPTS[name].index("</think>") + 1 if reasoning else 0
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == thought


@pytest.mark.parametrize("name", ["g", "i"])
def test_thoughts_in_one_piece(servers, name):
    """`stream_reasoning: false`: the same message, and its thoughts are one delta before the content."""
    fields, pieces = ask(name, tools=TOOLS, draft_limit=0), []  # a token an event
    whole = servers().post(CHAT, fields).json()["choices"][0]["message"]["reasoning_content"]
    for stream_reasoning in (True, False):
        events = servers().events(CHAT, fields | {"stream_reasoning": stream_reasoning})
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        thoughts = [delta["reasoning_content"] for delta in deltas if delta.get("reasoning_content")]
        assert "".join(thoughts) == whole
        assert "".join(delta.get("content") or "" for delta in deltas) == ANSWERS[name][1]
        pieces.append(len(thoughts))
    assert pieces[0] > 1 and pieces[1] == 1
    cut = servers().events(CHAT, fields | {"stream_reasoning": False, "max_tokens": 2})
    thoughts = [choice["delta"].get("reasoning_content") for event in cut for choice in event["choices"]]
    assert [each for each in thoughts if each] == [SCRIPTS[name][1].strip()]


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("script", ["i", "b"])
def test_reasoning_tokens_of_generate(servers, script, required):
    """Thoughts begun by the text itself, by `require_reasoning`, or by nobody."""
    sampling = {"temperature": 0, "max_new_tokens": 20}
    body = {"text": f"user:Say {script}<|im_end|><|im_start|>", "sampling_params": sampling}
    body |= {"require_reasoning": required}
    found = servers().post("/generate", body).json()["meta_info"]
    thought = SCRIPTS[script].index("</think>") + 1 if script == "i" else 0
    expected = found["completion_tokens"] if required and not thought else thought
    assert found["reasoning_tokens"] == expected
    assert servers().events("/generate", body)[-1]["meta_info"]["reasoning_tokens"] == expected


def test_a_grammar_after_required_thoughts(servers):
    body = {"text": "x", "sampling_params": {"regex": "[0-9]{2}", "temperature": 0, "max_new_tokens": 20}}
    plain = servers().post("/generate", body).json()
    assert plain["text"].isdigit() and plain["meta_info"]["reasoning_tokens"] == 0
    found = servers().post("/generate", body | {"require_reasoning": True}).json()
    assert found["meta_info"]["reasoning_tokens"] == 20, "the grammar waits for the end of the thoughts"


def test_thoughts_of_a_model_that_does_not_think():
    with pytest.raises(ParameterError, match="require_reasoning needs a model that thinks"):
        shared_engine("NONE").intake.sequence("x", SamplingParams(max_new_tokens=5, require_reasoning=True))


@pytest.mark.parametrize("parser", ["qwen3_coder", "glm45"])
def test_calls_without_a_grammar_cannot_be_required(servers, parser):
    answer = servers(parser).post(CHAT, ask("a", tools=TOOLS, tool_choice="required"))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tools") and "no JSON" in error["message"]


def test_a_message_as_it_is_sent(servers):
    answer = servers().post(CHAT, ask("a", tools=TOOLS)).json()["choices"][0]
    (call,) = answer["message"].pop("tool_calls")
    assert answer["message"] == {"role": "assistant", "content": "Let me look.", "reasoning_content": None}
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    answer = servers().post(CHAT, ask("c", tools=TOOLS)).json()["choices"][0]
    assert answer["message"]["content"] is None and answer["matched_stop"] == 2
    assert len({call["id"] for call in answer["message"]["tool_calls"]}) == 2


def test_without_functions_calls_are_text(servers):
    text = "".join(SCRIPTS["c"])
    prompts = set()
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": [], "tool_choice": "auto"}):
        (found,) = both(servers(), **ask("c"), extra_body=fields)
        assert (found["content"], found["calls"], found["finish"]) == (text, [], "stop")
        prompts.add(found["usage"]["prompt_tokens"])
    assert len(prompts) == 1, "the model is not told of functions"
    (told,) = both(servers(), **ask("c"), tools=TOOLS)
    assert told["usage"]["prompt_tokens"] > min(prompts) + 100


def test_a_conversation_with_a_function(servers):
    """The answer goes back as the client's library has it, and the model's template writes the call as it was."""
    ends = client(servers())
    fields: dict[str, Any] = {"model": "toy", "tools": TOOLS, "temperature": 0}
    messages: list[Any] = [{"role": "user", "content": "Say g"}]
    message = ends.chat.completions.create(**fields, messages=messages).choices[0].message
    assert message.tool_calls
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "22 b"}]
    answer = ends.chat.completions.create(**fields, messages=messages)
    assert answer.choices[0].message.content == "It is 22 degrees in Paris."
    sent = [messages[0], message.model_dump(), messages[2]]
    engine = servers().engine
    with servers().client() as http:
        tokens = http.post("/tokenize", json={"messages": sent}).json()["tokens"]
    prompt = engine.tokenizer.decode(tokens)
    call = '<tool_call>{"name": "noop", "arguments": {}}</tool_call>'
    assert f"assistant:<think>A city, so a call.</think>{call}<|im_end|>tool:22 b" in prompt


def test_other_fields_beside_functions(servers):
    server = servers()
    found = both(server, **ask("a"), tools=TOOLS, n=3, extra_body={"return_speculative_metrics": True})
    assert [one["calls"] for one in found] == [ANSWERS["a"][2]] * 3
    answer = server.post(CHAT, ask("a", tools=TOOLS, return_speculative_metrics=True)).json()
    assert answer["metadata"]["speculative"]["spec_verify_ct"] > 0
    (found,) = both(server, **ask("a"), tools=TOOLS, stop="Par", logprobs=True, top_logprobs=2)
    assert (found["calls"], found["content"]) == ([["get_weather", '{"city": "']], "Let me look.")
    (found,) = both(server, **ask("a"), tools=TOOLS, stop=" look")
    assert (found["calls"], found["content"], found["finish"]) == ([], "Let me", "stop")
    (found,) = both(server, **ask("a"), tools=TOOLS, max_tokens=8)
    assert (found["calls"], found["finish"]) == ([["get_weather", '{"city": "Par']], "length")
    (found,) = both(server, **ask("c"), tools=TOOLS, parallel_tool_calls=False)
    assert found["calls"] == [["noop", "{}"]]
    (found,) = both(server, **ask("a"), tools=[NOOP])
    assert not found["calls"] and "get_weather" in found["content"], "not a function of this request"


CHOICES: dict[str, tuple[str, str, Any, set[str], str]] = {
    "required": ("b", "auto", "required", {"get_weather", "noop"}, ""),
    "required, as it would": ("c", "auto", "required", {"get_weather", "noop"}, ""),
    "named": ("b", "auto", {"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}, ""),
    "another is named": ("c", "auto", {"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}, ""),
    "named after thoughts": ("g", "auto", {"type": "function", "function": {"name": "get_weather"}}, {"get_weather"},
                             "A city, so a call."),
    "mistral": ("b", "mistral", "required", {"get_weather", "noop"}, ""),
    "deepseek": ("b", "deepseekv3", "required", {"get_weather", "noop"}, ""),
    "deepseek V3.1": ("b", "deepseekv31", {"type": "function", "function": {"name": "noop"}}, {"noop"}, ""),
    "llama": ("b", "llama3", "required", {"get_weather", "noop"}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", by_server(CHOICES, 1))
def test_answers_that_must_be_calls(servers, name):
    """In the model's own format, with arguments that follow the functions' schemas."""
    script, parser, choice, names, reasoning = CHOICES[name]
    (found,) = both(servers(parser), **ask(script), tools=TOOLS, tool_choice=choice, max_tokens=200)
    assert found["finish"] == "tool_calls" and found["content"] == "" and found["reasoning"] == reasoning
    assert {name for name, _ in found["calls"]} <= names and found["calls"]
    for called, arguments in found["calls"]:
        given = json.loads(arguments)
        assert set(given) == ({"city"} if called == "get_weather" else set()) and all(
            isinstance(each, str) for each in given.values()
        )
    assert len(found["calls"]) == 1 or isinstance(choice, str)


def test_strict_functions(servers):
    """Their arguments follow their schemas; whether they are called, the model decides."""
    days = {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]}
    weather = {"type": "function", "function": WEATHER["function"] | {"parameters": days, "strict": True}}
    (loose,) = both(servers(), **ask("a"), tools=[{**weather, "function": weather["function"] | {"strict": False}}])
    assert loose["calls"] == ANSWERS["a"][2], "as the model would have it"
    (found,) = both(servers(), **ask("a"), tools=[weather, NOOP], max_tokens=60)
    ((name, arguments),) = found["calls"]
    assert (found["content"], name) == ("Let me look.", "get_weather") and arguments.startswith('{"days": ')
    for script in ("b", "i", "c"):
        (found,) = both(
            servers(), **ask(script), tools=[NOOP | {"function": NOOP["function"] | {"strict": True}}, WEATHER]
        )
        assert [found["content"], found["reasoning"], found["calls"]] == [ANSWERS[script][i] for i in (1, 3, 2)]


def test_functions_beside_a_form_of_the_content(servers):
    """The model calls, or answers in the form."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {}}}}
    fields: dict[str, Any] = {"tools": TOOLS, "response_format": form, "max_tokens": 60}
    (called,) = both(servers(), **ask("c"), **fields)
    assert [name for name, _ in called["calls"]] == ["noop", "get_weather"] and not called["content"]
    (found,) = both(servers(), **ask("b"), **fields)
    assert not found["calls"] and isinstance(json.loads(found["content"]), dict)
    (found,) = both(servers(), **ask("b"), **fields, tool_choice="required")
    assert found["calls"] and not found["content"]


def test_thoughts_may_stay_in_the_content(servers):
    (found,) = both(servers(), **ask("i"), extra_body={"separate_reasoning": False})
    assert (found["content"], found["reasoning"]) == ("<think>Nothing to do.</think>Fine.", "")
    assert found["usage"]["completion_tokens_details"] is None
    (found,) = both(servers(), **ask("i"))
    assert (found["content"], found["reasoning"]) == ("Fine.", "Nothing to do.")
    with running(tool_engine(), ServerSettings(reasoning_parser="none")) as server:
        (found,) = both(server, **ask("i"))
        assert found["content"] == "<think>Nothing to do.</think>Fine."


def test_special_tokens_are_shown_where_a_client_asks(servers):
    (found,) = both(servers("mistral"), **ask("h"), tools=TOOLS, extra_body={"skip_special_tokens": False})
    assert found["content"] == "[TOOL_CALLS] none [ARGS] needed"
    (found,) = both(servers("mistral"), **ask("d"), tools=TOOLS, extra_body={"skip_special_tokens": False})
    assert found["calls"] == ANSWERS["d"][2]
    (found,) = both(servers("mistral"), **ask("h"))
    assert found["content"] == " none  needed"


def function(**changes: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **changes}}]


REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no list": ({"tools": {}}, "tools", "list"),
    "no object": ({"tools": [1]}, "tools", "object"),
    "no type": ({"tools": [{"function": {"name": "f"}}]}, "tools", "tools[0].type is required"),
    "another type": ({"tools": [{"type": "custom", "custom": {}}]}, "tools", "'function'"),
    "no function": ({"tools": [{"type": "function"}]}, "tools", "tools[0].function is required"),
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "tools", "name is required"),
    "empty name": ({"tools": function(name="")}, "tools", "1 to 64"),
    "long name": ({"tools": function(name="x" * 65)}, "tools", "1 to 64"),
    "spaced name": ({"tools": function(name="a b")}, "tools", "name"),
    "line in name": ({"tools": function(name="a\n")}, "tools", "1 to 64"),
    "name no text": ({"tools": function(name=5)}, "tools", "string"),
    "description": ({"tools": function(description=[])}, "tools", "string"),
    "parameters no object": ({"tools": function(parameters=[])}, "tools", "object"),
    "parameters of an array": ({"tools": function(parameters={"type": "array"})}, "tools", "schema of an object"),
    "properties": ({"tools": function(parameters={"type": "object", "properties": []})}, "tools", "properties"),
    "required": ({"tools": function(parameters={"type": "object", "required": [1]})}, "tools", "required"),
    "strict": ({"tools": function(strict="yes")}, "tools", "boolean"),
    "two of a name": ({"tools": [NOOP, WEATHER, NOOP]}, "tools", "'noop'"),
    "too many": ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools", "128"),
    "choice": ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "none, auto, required"),
    "choice null name": ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "none, auto, required"),
    "choice of a kind": (
        {"tools": TOOLS, "tool_choice": {"type": "x", "function": {}}},
        "tool_choice",
        '{"name": ...}}',
    ),
    "required of nothing": ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    "required of others": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
        "'f'",
    ),
    "regex": ({"tools": TOOLS, "regex": "a+"}, "regex", "excludes tools"),
    "required and regex": ({"tools": TOOLS, "tool_choice": "required", "regex": "a+"}, "regex", "excludes tools"),
    "wrong schema": (
        {"tools": function(parameters={"properties": {"a": {"type": "x"}}}), "tool_choice": "required"},
        "tools",
        "tools",
    ),
    "wrong strict schema": (
        {"tools": function(parameters={"properties": {"a": {"type": "x"}}}, strict=True)},
        "tools",
        "tools",
    ),
    "form no object": (
        {"tools": TOOLS, "response_format": {"type": "json_schema", "json_schema": {"schema": "true"}}},
        "response_format",
        "object",
    ),
    "form no JSON": (
        {"tools": TOOLS, "response_format": {"type": "json_schema", "json_schema": {"schema": "{"}}},
        "response_format",
        "response_format",
    ),
    "parallel": ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
    "reasoning": ({"separate_reasoning": 1}, "separate_reasoning", "boolean"),
    "thoughts in pieces": ({"stream_reasoning": 1}, "stream_reasoning", "boolean"),
    "thoughts of a user": ({"messages": [HELLO[0] | {"reasoning_content": "x"}]}, "messages", "assistant"),
    "old functions": ({"functions": [{"name": "f"}]}, "functions", "not supported"),
    "too long": ({"tools": function(description="x" * 20_000)}, "messages", "context"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(servers, name):
    fields, param, said = REFUSALS[name]
    answer = servers().post(CHAT, ask("a") | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and said in error["message"], error


def test_models_without_functions(monkeypatch):
    engine = tool_engine()
    with running(engine, ServerSettings(tool_call_parser="none")) as server:
        error = server.post(CHAT, ask("a", tools=TOOLS)).json()["error"]
        assert error["param"] == "tools" and "--tool-call-parser" in error["message"]
        assert server.post(CHAT, ask("a", tools=[])).status_code == 200
    monkeypatch.setattr(engine.tokenizer, "chat_template", TEMPLATE)
    with running(engine) as server:
        error = server.post(CHAT, ask("a", tools=TOOLS)).json()["error"]
        assert error["param"] == "tools" and "--chat-template" in error["message"]


def test_events_that_hold_no_text_carry_log_probabilities(servers):
    """One entry a token, also of those whose text is held back."""
    events = servers().events(CHAT, ask("a", tools=TOOLS, logprobs=True))
    choices = [choice for event in events for choice in event["choices"]]
    tokens = [entry["token"] for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    assert "".join(tokens) == "".join(SCRIPTS["a"]) and len(tokens) == len(SCRIPTS["a"]) + 1
    assert json.dumps(events).count('"call_') == 1


def test_a_grammar_of_calls_that_dies_is_named_tools():
    """The request gave functions, from which the server made the grammar."""
    wide = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(1200)}}
    tool = {"type": "function", "function": {"name": "f", "parameters": wide}}
    tokenizer, model = copy.deepcopy(plain_tokenizer()), toy()
    # Names alone: the schema would not fit the context.
    tokenizer.chat_template = '<tool_call>"arguments"{% for tool in tools %}{{ tool.function.name }}{% endfor %}'
    config = EngineConfig(max_running_requests=2, page_size=16, max_total_tokens=1024, context_length=512)
    engine = Engine(
        model.target, Params(model.params, None), tokenizer, make_drafter("NONE"), config=config, eos_ids=(END,)
    )
    with running(engine) as served:
        bias = {str(byte_ids(b"k")[0]): 90}
        answer = served.chat(tools=[tool], tool_choice="required", max_tokens=120, logit_bias=bias)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("tools", INVALID)
        assert error["message"].startswith(f"tools: {GRAMMAR_FAILED} after ")
        served.wait_idle()
