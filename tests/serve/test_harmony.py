"""The Harmony format of gpt-oss: its parser, its templates, its grammars, and answers through all routes."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from body_helpers import CHAT, EVERY_LEAST, GENERATE, MESSAGES, RESPONSES, RULES, refusal, task
from harmony_helpers import ENDS, SCRIPTS, harmony_engine, harmony_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from server_helpers import SECONDS, Running, check_error, running
from tool_helpers import TOOLS, ask, calls_of, joined, read, read_in_pieces

from specjax.checkpoint.prompts import Chat, render_chat
from specjax.engine import Completion, SamplingParams
from specjax.engine.chat.calls import LIMIT, Arguments, Call, Harmony, Message, Text, Thought
from specjax.engine.chat.message_format import ReplyOptions, answer_form
from specjax.engine.grammar import Grammar
from specjax.engine.text import FINAL, Thoughts
from specjax.serve.tokenising import Rules

START, CHANNEL, MESSAGE, END = "<|start|>assistant", "<|channel|>", "<|message|>", "<|end|>"
NAMES = ("get_weather", "noop")
FORM = answer_form(harmony_tokenizer())
OURS = Rules("toy", 516, 2048, 2047, {}, form=FORM)
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
PARIS = '{"city": "Paris"}'


def header(channel: str, more: str = "") -> str:
    return f"{CHANNEL}{channel}{more}{MESSAGE}"


def thought(text: str) -> str:
    return f"{header('analysis')}{text}{END}{START}"


def options(**more: Any) -> ReplyOptions:
    return ReplyOptions(Harmony, NAMES, hidden=FORM.special, **{"reasoning": True} | more)


def parsed(text: str, *, opened: bool = True, **more: Any) -> dict[str, Any]:
    return read(options(**more), text, thinking=opened)


def pieced(*pieces: str) -> dict[str, Any]:
    """As `parsed`, in these pieces only."""
    return read_in_pieces(options().reply(thinking=True), [*pieces])


# The parser. Text, content, thoughts, calls.

CALL = header("commentary", " to=functions.get_weather <|constrain|>json") + PARIS
CASES: list[tuple[str, str | None, str | None, tuple[tuple[str, str], ...]]] = [
    (thought("Hm.") + header("final") + "Hi\n there.", "Hi\n there.", "Hm.", ()),
    (thought("a\n") + thought("\nb") + header("final") + "x<|return|>", "x", "a\nb", ()),
    (header("final") + "x", "x", None, ()),
    (header("final", " <|constrain|>json") + "{}", "{}", None, ()),
    (thought("Hm.") + CALL + "<|call|>", None, "Hm.", (("get_weather", PARIS),)),
    (CALL, None, None, (("get_weather", PARIS),)),
    (header("commentary") + "Look:" + END + START + CALL, "Look:", None, (("get_weather", PARIS),)),
    (header("commentary") + "One." + END + START + header("final") + "Two.", "One.\nTwo.", None, ()),
    (f" to=functions.noop{header('commentary', ' json')}{{}}<|call|>", None, None, (("noop", "{}"),)),
    (header("analysis", " to=noop code") + "{}", None, None, (("noop", "{}"),)),
    (header("commentary", " to=functions.noop<|constrain|>json") + "<|call|>", None, None, (("noop", "{}"),)),
    (CALL + END + START + header("commentary", " to=functions.noop") + "{}", None, None,
     (("get_weather", PARIS), ("noop", "{}"))),
    # Cut off.
    (header("analysis") + "Hm", "", "Hm", ()), (header("final") + "x <|en", "x <|en", None, ()),
    ("<|channel|>ana", "", None, ()), ("<|channel|>commentary to=functions.get_w", "", None, ()),
    (thought("a") + "<|channel|>", "", "a", ()), ("<|channel|>commentary to=functions.noop", "", None, ()),
    (header("commentary", " to=functions.noop") + '{"a": "\\', None, None, (("noop", '{"a": "\\'),)),
    # Headers and messages that the format does not have.
    ("plain text", "plain text", None, ()), ("a", "a", None, ()), ("", "", None, ()),
    ("x" * 2000, "x" * 2000, None, ()), (f"{MESSAGE}x", "x", None, ()),
    ("<|channel|>final Hello <|return|>", "Hello ", None, ()),
    ("<|channel|>analysis So<|end|>" + START + header("final") + "x", "x", "So", ()),
    (header("commentary?") + "x", "x", None, ()),
    (header("commentary", " to=assistant<|channel|>commentary?") + "x", "x", None, ()),
    (f"<|channel|>??{END}{START}{header('final')}x", "??\nx", None, ()),
    (f"<|channel|>final Hm{START}{header('final')}x", "Hm\nx", None, ()),
    (header("analysis") + "a" + header("final") + "x", "x", "a", ()),
    (header("analysis") + f"a{END}" + header("final") + "x", "x", "a", ()),
    (header("final") + f"x{MESSAGE}y<|constrain|>z", "xyz", None, ()),
    (header("commentary", " to=functions.other json") + "{}", "to=functions.other json\n{}", None, ()),
    (header("analysis", " to=python code") + "1", "", "to=python code\n1", ()),
    (header("commentary", " to=functions.noop") + "{} tail", "tail", None, (("noop", "{}"),)),
    (header("commentary", " to=functions.noop") + "}", "to=functions.noop\n}", None, ()),
    (header("commentary", " to=functions.noop json") + "no JSON" + END, "to=functions.noop json\nno JSON", None, ()),
    (header("commentary", " to=functions.noop") + '{"a": }', 'to=functions.noop\n{"a": }', None, ()),
    (header("commentary", " to=functions.noop") + "{", None, None, (("noop", "{"),)),
    (header("commentary", " to=functions.noop") + '{"a": "<|end|>\\"<|start|>"}<|call|>', None, None,
     (("noop", '{"a": "<|end|>\\"<|start|>"}'),)),
    ("<|channel|>commentary to=functions.noop <|constrain|>JSON{}", None, None, (("noop", "{}"),)),
    ("<|channel|>commentary to=functions.noop not so<|call|>", "to=functions.noop not so", None, ()),
    ("<|channel|>commentary to=functions.noop {}<|call|>", None, None, (("noop", "{}"),)),
]  # fmt: skip


TYPES = ("", "json", "JSON", "code", "json_schema", "application/xml", "a b")
OTHER = ("", "to=user", "to=assistant")


def headers(channel: str, recipient: str = "") -> list[str]:
    """Headers in every order, with words of every kind before `<|message|>`."""
    ends = [
        f"{mark}{word}" for word in TYPES for mark in (" ", " <|constrain|>", "<|constrain|> ") if word or mark == " "
    ]
    ends += [f" {word} <|constrain|>json" for word in TYPES]
    starts = [f"{CHANNEL}{channel} {recipient}"]
    if recipient:
        starts += [f" {recipient}{CHANNEL}{channel}", f" {recipient} {CHANNEL}{channel}"]
        starts += [f"{CHANNEL}{channel} {word} {recipient}" for word in TYPES[1:]]
    both = enumerate(itertools.product(starts, ends))
    return [f"{start.rstrip(' ')}{end}{' ' * (number % 2)}" for number, (start, end) in both]


CHANNELS = ("final", "commentary", "analysis")
HEADERS: dict[str, list[str]] = {
    **{f"{channel} {other}".strip(): headers(channel, other) for channel in CHANNELS for other in OTHER},
    **{f"{channel} with a function": headers(channel, "to=functions.noop") + headers(channel, "to=noop")
       for channel in CHANNELS},
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_words_of_headers_are_no_content(name):
    for start in HEADERS[name]:
        text = start + MESSAGE + '{"a":1}'
        message = pieced(text)
        if "function" in name:
            expected = (None, None, (("noop", '{"a":1}'),))
        else:
            expected = ("", '{"a":1}', ()) if "analysis" in name else ('{"a":1}', None, ())
        assert (message["content"], message["reasoning_content"], calls_of(message)) == expected, text
        assert pieced(text[:20], text[20:]) == message
        after = pieced(header("final") + "Hi." + END + START + text)
        assert after["content"] == (f"Hi.\n{expected[0]}" if expected[0] else "Hi."), "also of a later message"
        assert after["reasoning_content"] == expected[1]
        channels = Thoughts(True, FINAL)
        assert (channels.split(text, last=True)[1] == '{"a":1}') == name.startswith("final"), "for stop strings"


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_the_text_cuts_off(name):
    for start in HEADERS[name][::5]:
        if " a b" in start or not (name.endswith("function") or "constrain" in start):
            continue  # without a recipient and a type, words may be the text of a message without `<|message|>`
        text = start + MESSAGE
        known = "noop" if name.endswith("function") else "<|constrain|>"  # words before it may be text
        for size in range(text.index(known) + len(known), len(text)):
            message = pieced(text[:size])
            assert (message["content"], message["reasoning_content"]) == ("", None), text[:size]
            assert "tool_calls" not in message


@pytest.mark.parametrize(("text", "content", "thoughts", "calls"), CASES)
def test_messages(text, content, thoughts, calls):
    message = parsed(text)
    assert (message["content"], message["reasoning_content"], calls_of(message)) == (content, thoughts, calls)


def test_message_that_the_prompt_begins():
    """After `continue_final_message` the text is a part of the final message."""
    assert parsed("analysis<|return|>", opened=False)["content"] == "analysis"
    assert parsed(f"x{END}{START}{header('analysis')}y", opened=False)["reasoning_content"] == "y"


def test_thoughts_in_the_content():
    text = thought("Hm.") + header("commentary") + "Look." + END + START + thought("So.") + CALL
    assert parsed(text, reasoning=False)["content"] == "Hm.\nLook.\nSo."
    reply = ReplyOptions(Harmony, NAMES, reasoning=True).reply(thinking=True)
    message = joined([delta for character in text for delta in reply.feed(character)] + reply.feed("", last=True))
    assert (message["reasoning_content"], message["content"]) == ("Hm.\nSo.", "Look.") and reply.has_called


WORDS = (
    *Harmony.markers(), "assistant", "analysis", "commentary", "final", " to=functions.noop",
    " to=functions.get_weather", " to=python", "functions.noop", "json", " ", "\n",
    "{", "}", '"', "\\", "<", "<|", "|>", "x" * LIMIT, "a b", "😀",
)  # fmt: skip


@settings(max_examples=100)
@given(st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=24).map("".join), st.booleans())
@example(f"<|channel|>final {'x' * (LIMIT - 20)}{MESSAGE}y", True)
def test_message_does_not_depend_on_pieces(text, opened):
    """Nothing raises, and nothing is lost but words of headers, markers and white space around messages."""
    message = parsed(text, opened=opened)
    shown = (message["content"] or "") + (message["reasoning_content"] or "")
    shown += "".join(arguments for _, arguments in calls_of(message))
    assert not any(mark in (message["content"] or "") for mark in FORM.special)
    begin = r"(?:<\|start\|>|\A)" if opened else r"<\|start\|>"
    text = re.sub(begin + r"[^<]*?(?=to=|<\|c(?:hannel|onstrain)\|>)", "", text)  # a role
    text = re.sub(r"(?s)(?:<\|c(?:hannel|onstrain)\|>|to=)(?:(?!<\|(?:end|call|return|start|message)\|>).)*", "", text)
    for word in ("a b", "😀", "x" * LIMIT):
        assert shown.count(word) >= text.count(word), "only words of headers are lost"


def test_text_comes_at_once():
    """Only headers and what may begin a marker are held back."""
    parser = Harmony(NAMES)
    parts = [parser.feed(text) for text in (CHANNEL, "analysis", MESSAGE, "a", "b <", "c", END, START, CALL)]
    assert parts[:7] == [[], [], [Message()], [Thought("a")], [Thought("b ")], [Thought("<c")], []]
    assert parts[7:] == [[], [Message(), Call("get_weather"), Arguments(PARIS)]]
    parser = Harmony(NAMES)
    assert not parser.feed("x" * (LIMIT - 1)) and parser.feed("x") == [Message(), Text("x" * LIMIT)]


# Prompts


def rendered(messages: list[dict[str, Any]], **variables: Any) -> str:
    chat = Chat(FORM.for_template(messages), variables)
    return render_chat(chat, harmony_tokenizer(), chat.template).partition(END)[2]


def call_of(name: str, id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_template_reveals_the_format():
    assert (
        FORM.parser is Harmony
        and FORM.harmony
        and FORM.thinks
        and FORM.efforts == ("low", "medium", "high")
        and FORM.refusal is None
    )
    assert FORM.special == {*Harmony.markers()} == FORM.tokens.keys()
    plain = answer_form(harmony_tokenizer(), tool_call_parser="none", reasoning_parser="none")
    assert plain.harmony and not plain.thinks and plain.refusal and plain.special == FORM.special
    other = answer_form(harmony_tokenizer(), tool_call_parser="qwen25")
    assert not other.harmony
    for flags in ({"tool_call_parser": "gpt-oss"}, {"reasoning_parser": "gpt-oss"}):
        tokenizer = harmony_tokenizer()
        forced = answer_form(type("T", (), {
            "chat_template": "x", "get_chat_template": lambda self, tools: "x",
            "get_added_vocab": lambda self: {}, "added_tokens_decoder": tokenizer.added_tokens_decoder,
            "apply_chat_template": lambda self, *_, **more: "x",
        })(), **flags)  # fmt: skip
        assert forced.harmony and forced.parser is Harmony and forced.thinks and forced.efforts == ("none", "medium")


def test_thoughts_of_earlier_turns():
    """Thoughts before a call stay, those before an answer go."""
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "4", "reasoning_content": "Hm."}
    asks = {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call_of("noop", "c")]}
    result = {"role": "tool", "tool_call_id": "c", "content": "r"}
    question = "<|start|>user<|message|>q<|end|>"
    calls = f"{START} to=functions.noop{header('commentary', ' json')}{{}}<|call|>"
    calls += f"<|start|>functions.noop to=assistant{header('commentary')}r{END}"
    assert rendered([user, answer, user]) == f"{question}{START}{header('final')}4{END}{question}{START}"
    assert rendered([user, asks, result]) == f"{question}{START}{header('analysis')}Hm.{END}{calls}{START}"
    # A message for the user before a call, which the template refuses beside thoughts.
    said = rendered([user, asks | {"content": "Look."}, result])
    assert said == f"{question}{START}{header('analysis')}Hm.\nLook.{END}{calls}{START}"
    assert asks["reasoning_content"] == "Hm." and len(asks) == 4, "messages are not changed"


def test_several_calls_of_a_message():
    calls = [call_of("noop", "1"), call_of("get_weather", "2", city="Bern"), call_of("noop", "3")]
    results = [{"role": "tool", "tool_call_id": id, "content": f"r{id}"} for id in ("3", "1", "2", "x")]
    turns = FORM.for_template([{"role": "assistant", "content": "a", "tool_calls": calls}, *results])
    assert [turn.get("tool_call_id") or turn["tool_calls"][0]["id"] for turn in turns] == [*"112233x"]
    assert [turn["content"] for turn in turns] == ["a", "r1", "", "r2", "", "r3", "rx"]
    assert all(len(turn["tool_calls"]) == 1 for turn in turns if turn["role"] == "assistant")


EFFORTS: dict[str, Any] = {
    CHAT: lambda effort: {"reasoning_effort": effort},
    RESPONSES: lambda effort: {"reasoning": {"effort": effort, "summary": "auto"}},
    MESSAGES: lambda effort: {"output_config": {"effort": effort}},
}


@pytest.mark.parametrize("path", EFFORTS)
def test_reasoning_effort(path):
    field = next(iter(EFFORTS[path]("low")))
    for effort in ("low", "medium", "high"):
        prompt = task(path, EVERY_LEAST[path] | EFFORTS[path](effort), OURS).prompts[0]
        assert f"Reasoning: {effort}\n" in render_chat(prompt, harmony_tokenizer(), prompt.template)  # type: ignore
    for effort in ("none", "max", "much", 5):
        error = refusal(path, EVERY_LEAST[path] | EFFORTS[path](effort), rules=OURS)
        assert error is not None and error.status == 400 and (error.param or "").startswith(field)
    # Models without an effort.
    allowed = {"none", "medium", "high"} if path == MESSAGES else {"none", "medium"}
    for effort in ("none", "low", "medium", "high"):
        assert (refusal(path, EVERY_LEAST[path] | EFFORTS[path](effort), rules=RULES) is None) == (effort in allowed)


# Answers.


@pytest.fixture(scope="module")
def served():
    with running(harmony_engine()) as server:
        yield server


def test_forms_of_answers(served):
    def content(**fields: Any) -> dict[str, Any]:
        return served.post(CHAT, ask("b") | fields).json()["choices"][0]["message"]

    assert content() == {"role": "assistant", "content": "It is 22 degrees.", "reasoning_content": "Easy."}
    assert content(skip_special_tokens=False) == content()
    assert content(separate_reasoning=False) == {"role": "assistant", "content": "Easy.\nIt is 22 degrees."}
    assert content(max_tokens=4)["reasoning_content"] == "Easy." and content(max_tokens=2)["content"] == ""
    for stop in ({"stop": ["Stop"]}, {"stop_regex": "[S]top"}):  # in the final channel only
        answer = served.post(CHAT, ask("f", **stop)).json()["choices"][0]["message"]
        assert (answer["content"], answer["reasoning_content"]) == ("Go. ", "Stop there.")
    # A text for a message that the client began.
    messages = [*ask("b")["messages"], {"role": "assistant", "content": "It is"}]
    fields = {"messages": messages, "continue_final_message": True, "max_tokens": 1, "logit_bias": {"0": 100}}
    answer = served.post(CHAT, {"model": "toy", "temperature": 0, **fields}).json()["choices"][0]["message"]
    assert answer["content"] == harmony_tokenizer().decode([0]) and answer["reasoning_content"] is None


@given(st.lists(st.integers(0, 120), max_size=9))
def test_search_for_the_final_channel(cuts):
    text = thought("final a") + header("final", " <|constrain|>json ") + "<|channel|>final<|message|>x"
    ends, channels = sorted(min(cut, len(text)) for cut in cuts), Thoughts(True, FINAL)
    pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    assert "".join(channels.split(piece)[1] for piece in pieces) == "<|channel|>final<|message|>x" and channels.ended


# Grammars


def generate(served: Running, prompt: Any, params: SamplingParams) -> Completion:
    """In the thread of the server's engine."""
    return served.runner.call(lambda engine: engine.generate(prompt, params)).result(SECONDS)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.json(SCHEMA), Grammar("json_schema"), Grammar("regex", "[0-9]{2}/a"),
        Grammar("ebnf", 'root ::= "x" | "y"'),
        Grammar("lark", "start: WORD\nWORD: /[a-c]{3}/"), Grammar.choice(["left", "right"]),
    ],
)  # fmt: skip
def test_grammars_of_each_kind(served, grammar):
    """In the engine, for messages and for a prompt that ends where the final message begins."""
    engine, chat = served.engine, ask("b")["messages"]
    params = SamplingParams(grammar=grammar, temperature=0.0, max_new_tokens=80, min_new_tokens=1)
    done = generate(served, chat, params)
    text = engine.tokenizer.decode(done.output_ids)
    assert done.finish_reason["type"] == "stop" and text.startswith(thought("Easy.") + header("final"))
    answer = text.removeprefix(thought("Easy.") + header("final")).removesuffix(text[text.rindex("<|") :])
    prompt = render_chat(chat, engine.tokenizer, {}) + header("final")
    inside = generate(served, prompt, params)
    assert inside.finish_reason["type"] == "stop" and not inside.text.startswith("<|")
    if grammar.kind == "json_schema":
        assert isinstance(json.loads(answer), dict) and isinstance(json.loads(inside.text), dict)
    else:
        allowed = {"regex": "0123456789/a", "ebnf": "xy", "lark": "abcleftrigh"}[grammar.kind]
        assert answer and not {*answer} - {*allowed} and not {*inside.text} - {*allowed}


def test_strict_functions_and_structured_content(served):
    strict = [tool | {"function": tool["function"] | {"strict": True}} for tool in TOOLS]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for fields in ({"tools": strict}, {"tools": TOOLS, "response_format": form}):
        message = served.post(CHAT, ask("a", max_tokens=80, **fields)).json()["choices"][0]["message"]
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]).keys() == {"city"}
        assert message["reasoning_content"] == "A city, so a call."
        message = served.post(CHAT, ask("b", max_tokens=80, **fields)).json()["choices"][0]["message"]
        assert message["content"] == "It is 22 degrees." if "response_format" not in fields else (
            set(json.loads(message["content"])) == {"ok"})  # fmt: skip
        assert not message.get("tool_calls")


def test_refusals(served):
    check_error(served.post(CHAT, ask("a", reasoning_effort="max")), 400, "reasoning_effort", "low, medium, high")
    body = {"text": "x", "require_reasoning": True}
    check_error(served.post(GENERATE, body), 400, "require_reasoning")
    without = replace(OURS, form=answer_form(harmony_tokenizer(), tool_call_parser="none"))
    error, reply = refusal(CHAT, ask("a", tools=TOOLS), rules=without), task(CHAT, ask("a"), without).reply
    assert error is not None and error.param == "tools"
    assert reply is not None and reply.parser is Harmony and reply.reasoning


def test_grammar_whose_markers_are_no_tokens():
    tokens = {mark: id for mark, id in FORM.tokens.items() if mark != "<|constrain|>"}
    rules = replace(OURS, form=replace(FORM, tokens=tokens))
    error = refusal(CHAT, ask("a", tools=TOOLS, tool_choice="required"), rules=rules)
    assert error is not None and error.param == "tools" and "<|constrain|> is not a token" in str(error)


def test_end_of_a_message_does_not_stop(served):
    assert ENDS == ("<|return|>", "<|call|>")
    for script in SCRIPTS:
        done = generate(served, ask(script)["messages"], SamplingParams(temperature=0.0, max_new_tokens=60))
        assert harmony_tokenizer().convert_ids_to_tokens(done.output_ids) == SCRIPTS[script]


def test_compiled_grammars_are_known():
    """Requests whose grammar is compiled do not wait for other grammars."""
    grammars, grammar = harmony_engine().intake.grammars, Grammar("regex", "known")
    assert not grammars.holds(grammar)
    grammars.compiled(replace(grammar, turn=harmony_engine().intake.harmony))
    assert grammars.holds(grammar) and not grammars.holds(Grammar("regex", "other"))
