"""Function calls in `Engine.generate`: scripted answers, and grammars of calls that must come."""

from __future__ import annotations

import json

import pytest
from tool_helpers import NOOP, WEATHER, tool_engine

from specjax.checkpoint.prompts import Chat
from specjax.engine import SamplingParams
from specjax.limits import ParameterError

GREEDY = SamplingParams(max_new_tokens=200)


@pytest.fixture(scope="module")
def engine():
    return tool_engine()


def ask(script: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Say {script}"}]


def called(completion) -> list[tuple[str, dict]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in completion.tool_calls]


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    raise AssertionError(f"the engine called get_weather({city!r}), which only the caller may")


@pytest.mark.parametrize("tools", [[WEATHER, NOOP], [get_weather, NOOP]], ids=["OpenAI's form", "Python"])
def test_calls_of_a_completion(engine, tools):
    one, none, two = engine.generate([ask("a"), ask("b"), ask("c")], GREEDY, tools=tools)
    assert called(one) == [("get_weather", {"city": "Paris"})] and one.message["content"] == "Let me look."
    assert "<tool_call>" in one.text and engine.generate(ask("a"), GREEDY).message is None
    assert called(none) == [] and none.message["content"] == none.text
    assert called(two) == [("noop", {}), ("get_weather", {"city": "Rome"})]


def test_stream_of_calls(engine):
    *chunks, last = engine.generate(ask("a"), GREEDY, tools=[WEATHER], stream=True)
    deltas = [delta for chunk in (*chunks, last) for delta in chunk.deltas]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    (call,) = last.completion.tool_calls
    assert "".join(delta.get("content", "") for delta in deltas) == last.completion.message["content"]
    assert calls[0]["id"] == call["id"] and calls[0]["function"]["name"] == "get_weather"
    assert "".join(part["function"]["arguments"] for part in calls) == call["function"]["arguments"]
    assert len(calls) > 2, "arguments come in pieces"


def test_forced_calls(engine):
    for choice, names in (("required", {"get_weather", "noop"}), ("noop", {"noop"})):
        done = engine.generate(ask("x"), GREEDY, tools=[WEATHER, NOOP], tool_choice=choice)
        assert {name for name, _ in called(done)} <= names and done.tool_calls
    hidden = engine.generate(ask("a"), GREEDY, tools=[WEATHER], tool_choice="none")
    assert not hidden.tool_calls and hidden.prompt_tokens == engine.generate(ask("a"), GREEDY).prompt_tokens


def test_template_variables_of_a_single_chat(engine):
    chat = Chat(ask("a"), {"tools": [WEATHER]})
    counts = [done.prompt_tokens for done in (engine.generate(chat, GREEDY), *engine.generate([chat], GREEDY))]
    assert counts == [engine.generate(ask("a"), GREEDY, tools=[WEATHER]).prompt_tokens] * 2


def test_result_of_a_call_in_the_next_prompt(engine):
    """The message of a completion goes back as it is: its content is None, its arguments are JSON text."""
    first = engine.generate(ask("c"), GREEDY, tools=[WEATHER, NOOP])
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "22 b"} for call in first.tool_calls]
    second = engine.generate([*ask("c"), first.message, *results], GREEDY, tools=[WEATHER, NOOP])
    assert second.message["content"] == "It is 22 degrees in Paris."


@pytest.mark.parametrize(
    ("prompt", "tools", "choice", "problem"),
    [
        ("text", [WEATHER], "auto", "tools need a list of messages as prompt, got 'text'"),
        (ask("a"), [WEATHER], "other", "tool_choice names 'other', which is not one of tools"),
        (ask("a"), [], "required", "tool_choice required needs tools"),
        (ask("a"), [WEATHER, WEATHER], "auto", "tools has two functions with the name 'get_weather'"),
        (ask("a"), [WEATHER["function"]], "auto", r'tools\[0\] must be {"type": "function", "function"'),
        (ask("a"), [NOOP, lambda x: x], "auto", r"tools\[1\] has no schema: .*docstring"),
    ],
)
def test_wrong_tools(engine, prompt, tools, choice, problem):
    with pytest.raises(ParameterError, match=problem):
        engine.generate(prompt, GREEDY, tools=tools, tool_choice=choice)
