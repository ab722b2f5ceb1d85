"""What follows the grammar of calls is read as calls: random texts of each format."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import jsonschema
import pytest
from engine_helpers import END
from engine_helpers import tokenizer as plain_tokenizer
from grammar_helpers import follows
from tool_helpers import WEATHER, tool_tokenizer

from specjax.engine.grammar import WORD, Constraint, Grammar, GrammarError, Grammars
from specjax.serve.calls import CallParser, DeepSeek, DeepSeek31, Hermes, KimiK2, Llama3, Mistral, MistralNamed
from specjax.serve.message_format import ReplyOptions, answer_form
from specjax.serve.tools import any_arguments, call_grammar

FORMATS = (Hermes, Llama3, Mistral, MistralNamed, DeepSeek, DeepSeek31, KimiK2)
PLAN = {
    "$defs": {"day": {"enum": ["mon", "tue"]}},
    "type": "object",
    "properties": {
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 3},
        "n": {"type": "integer"},
    },
    "required": ["days"],
}
TOOLS: list[dict[str, Any]] = [
    WEATHER,
    {"type": "function", "function": {"name": "plan", "parameters": PLAN}},
    {"type": "function", "function": {"name": "noop", "parameters": {"type": "object", "properties": {}}}},
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
ANSWER = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False}


@functools.cache
def grammars() -> Grammars:
    return Grammars(tool_tokenizer(), len(tool_tokenizer()), (END,))


def tokens_of(parser: type[CallParser]) -> dict[str, int]:
    vocabulary = tool_tokenizer().get_added_vocab()
    return {marker: vocabulary[marker] for marker in parser.markers() if marker in vocabulary}


def written(source: str, draw: random.Random, *, tokenizer: Any = None, most: int = 400) -> str | None:
    """A random text of a grammar; None: it had no end. It ends a string or an object half of the times it can."""
    known = grammars() if tokenizer is None else Grammars(tokenizer, len(tokenizer), (END,))
    tokenizer = tokenizer or tool_tokenizer()
    constraint = Constraint(known, Grammar("lark", source))
    soon = [END, *(token for text in ('"', "}", "]") for token in [tokenizer.convert_tokens_to_ids(text)])]
    found: list[int] = []
    while len(found) < most:
        mask = constraint.mask()
        assert constraint.failure is None
        allowed = [token for token in range(len(tokenizer)) if mask[token // WORD] >> (token % WORD) & 1]
        preferred = [token for token in soon if token in allowed]
        token = draw.choice(preferred if preferred and draw.random() < 0.5 else allowed)
        if token == END:
            return tokenizer.decode(found, skip_special_tokens=False)
        found.append(token)
        constraint.consume([token])
    return None


def message(parser: type[CallParser], text: str) -> dict[str, Any]:
    options = ReplyOptions(
        parser, tuple(SCHEMAS), hidden=frozenset(tokens_of(parser)) - {"<tool_call>", "</tool_call>"}
    )
    reply = options.reply(thinking=False)
    reply.feed(text, last=True)
    return reply.message()


@pytest.mark.parametrize("parser", FORMATS)
def test_texts_that_must_be_calls_are_read_as_calls(parser):
    draw = random.Random(1)
    for most in (None, 1):
        source = call_grammar(parser, TOOLS, tokens_of(parser), most=most)
        texts = [text for _ in range(6) if (text := written(source, draw)) is not None]
        assert len(texts) > 2
        for text in texts:
            found = message(parser, text)
            assert found["content"] is None and found["tool_calls"], text
            assert most is None or len(found["tool_calls"]) == most
            for call in found["tool_calls"]:
                jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])


@pytest.mark.parametrize("parser", FORMATS)
def test_calls_beside_text_follow_their_schemas(parser):
    """Text that is not a call is free, but a marker begins a call."""
    source = call_grammar(parser, TOOLS[:1], tokens_of(parser), text=True)
    constraint = Constraint(grammars(), Grammar("lark", source))
    tokenizer = tool_tokenizer()

    def allows(text: str) -> bool:
        fresh = Constraint(grammars(), Grammar("lark", source))
        for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
            mask = fresh.mask()
            if not mask[token // WORD] >> (token % WORD) & 1:
                return False
            fresh.consume([token])
        return bool(fresh.mask()[END // WORD] >> END & 1)

    assert allows("Hello, {world}") and allows("") and constraint.failure is None
    text = next(
        text
        for seed in range(9)
        if (text := written(call_grammar(parser, TOOLS[:1], tokens_of(parser)), random.Random(seed)))
    )
    call = text.strip("\n")
    assert allows(call)
    wrong = call.replace("city", "town")
    assert wrong != call and not allows(wrong)
    if parser is not Llama3:
        assert allows(f"So: {call}")


def test_the_form_of_the_content_may_stand_instead():
    source = call_grammar(Hermes, TOOLS, tokens_of(Hermes), answer=ANSWER)
    texts = [text for seed in range(12) if (text := written(source, random.Random(seed))) is not None]
    found = [message(Hermes, text) for text in texts]
    answers = [json.loads(each["content"]) for each in found if not each.get("tool_calls")]
    assert 0 < len(answers) < len(found) and all(set(each) == {"x"} for each in answers)


PERSON = {
    "type": "object",
    "properties": {"name": {"$ref": "#/definitions/text"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "definitions": {"text": {"type": "string"}},
}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (ANSWER, '{"x": true}'),
        (PERSON, '{"name": "plan", "age": 5}'),
        ({"type": "object"}, '{"name": 1}'),
        (PERSON, '{"name": "plan", "parameters": {"days": ["mon"]}}'),
        (PERSON, '{"name": "noop", "parameters": {}}'),
        ({"$id": "https://example.com/p.json", **PERSON}, '{"name": "plan", "age": 5}'),
        ({"x-guidance": {"item_separator": ",", "key_separator": ":"}, **PERSON}, '{"name":"x","age":5}'),
    ],
)
def test_an_answer_that_begins_as_a_call_does(answer, text):
    """Llama 3 writes calls without a marker."""
    source = call_grammar(Llama3, TOOLS, {}, answer=answer)
    assert follows(Grammar("lark", source), plain_tokenizer()(text, add_special_tokens=False)["input_ids"])
    for wrong in ('{"name": "plan", "parameters": {"days": ["sun"]}}', '{"name": "other", "parameters": {}}'):
        ids = plain_tokenizer()(wrong, add_special_tokens=False)["input_ids"]
        assert follows(Grammar("lark", source), ids) == (answer == {"type": "object"})


def test_markers_that_are_no_tokens():
    source = call_grammar(Hermes, TOOLS, {})
    assert '"<tool_call>"' in source
    draws = map(random.Random, range(9))
    text = next(text for draw in draws if (text := written(source, draw, tokenizer=plain_tokenizer())))
    assert message(Hermes, text)["tool_calls"]
    with pytest.raises(ValueError, match="not a token"):
        call_grammar(Hermes, TOOLS, {}, text=True)


def test_what_the_library_does_not_know_of_functions_that_are_not_strict():
    days = {"type": "array", "items": {"enum": ["mon"]}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"days": days}, "required": ["days"]}
    tool = {"type": "function", "function": {"name": "plan", "parameters": schema}}
    with pytest.raises(GrammarError, match="uniqueItems"):
        Constraint(grammars(), Grammar("lark", call_grammar(Hermes, [tool], {}, strict=["plan"])))
    source = call_grammar(Hermes, [tool], {}, strict=[])
    texts = [text for seed in range(9) if (text := written(source, random.Random(seed), tokenizer=plain_tokenizer()))]
    calls = [call for text in texts for call in message(Hermes, text)["tool_calls"]]
    assert calls and all(set(json.loads(call["function"]["arguments"])["days"]) <= {"mon"} for call in calls)


def test_any_arguments_of_functions_that_are_not_strict():
    loose = any_arguments(WEATHER)
    assert loose["function"]["name"] == "get_weather" and WEATHER["function"]["parameters"]["properties"]
    source = call_grammar(Hermes, [loose], tokens_of(Hermes))
    assert '"additionalProperties": true' in source and "city" not in source


def test_the_form_of_a_model_names_the_tokens():
    for name, parser in {"qwen": Hermes, "mistral": Mistral, "deepseekv3": DeepSeek}.items():
        form = answer_form(tool_tokenizer(), tool_call_parser=name)
        assert tokens_of(parser).items() <= form.tokens.items()
