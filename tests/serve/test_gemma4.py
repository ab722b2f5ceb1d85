"""Gemma 4's answers: thoughts in a channel, calls in a syntax of their own, in pieces of any size."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from specjax.checkpoint.hf_config import stop_token_ids
from specjax.checkpoint.prompts import CHANNELS, begins_thinking, think_marks
from specjax.checkpoint.weights import ModelFiles
from specjax.engine.chat.gemma_calls import Gemma4
from specjax.engine.chat.message_format import PARSERS, ReplyOptions, answer_form
from specjax.engine.chat.tools import call_grammar
from specjax.engine.text import Thoughts

TEMPLATE = (
    "{{ '<bos>' }}{% if tools or enable_thinking %}<|turn>system\n{% if enable_thinking %}<|think|>\n{% endif %}"
    "{% for tool in tools or [] %}<|tool>declaration:{{ tool.function.name }}{}<tool|>{% endfor %}<turn|>\n{% endif %}"
    "{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{}<tool_call|><|tool_response>{% endfor %}"
    "<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n"
    "{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}{% endif %}"
)
NAMES = (
    "<pad>", "<eos>", "<bos>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
    "<tool_response|>", '<|"|>', "<|think|>", "<|channel>", "<channel|>", "<|turn>", "<turn|>",
)  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"zip": {"type": "string"}, "n": {"type": "integer"}, "fast": {"type": "boolean"}},
}
HIDDEN = frozenset(NAMES)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate([*NAMES, *letters])}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens([*NAMES])
    whole = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>")
    whole.chat_template = TEMPLATE
    return whole


def pieces(text: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    if not seed:
        return list(text)
    ends = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def message(text: str, *, thinking: bool = False, seed: int | None = None, **changes: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"parser": Gemma4, "names": ("f", "cat"), "hidden": HIDDEN, "reasoning": True}
    options |= {"thinks": True, "marks": CHANNELS, "schemas": {"f": SCHEMA}} | changes
    reply = ReplyOptions(**options).reply(thinking=thinking)
    for piece in [text] if seed is None else pieces(text, seed):
        reply.feed(piece)
    reply.feed("", last=True)
    whole = reply.message()
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in whole.get("tool_calls", ())]
    return {"content": whole["content"], "thoughts": whole.get("reasoning_content"), "calls": calls}


CALL = '<|tool_call>call:f{zip:123,n:42,fast:true,note:<|"|>a, {b} "q"\n<|"|>,l:[1,<|"|>x<|"|>],o:{k:null}}<tool_call|>'
JSON = '{"zip": "123", "n": 42, "fast": true, "note": "a, {b} \\"q\\"\\n", "l": [1, "x"], "o": {"k": null}}'
CUT = '<|tool_call>call:f{n:1,zip:<|"|>12'


def answer(content: str | None, thoughts: str | None = None, *calls: tuple[str, str]) -> dict[str, Any]:
    return {"content": content, "thoughts": thoughts, "calls": [*calls]}


ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("It is 4.", answer("It is 4.")),
    "thoughts": ("<|channel>thought\nTwo and two.\n<channel|>It is 4.", answer("It is 4.", "Two and two.")),
    "empty channel": ("<|channel>thought\n<channel|>4", answer("4")),
    "bare title": ("thought\nIt is 4.", answer("It is 4.")),
    "a word like the title": ("thoughtful", answer("thoughtful")),
    "call": (CALL, answer(None, None, ("f", JSON))),
    "two calls": ("<|tool_call>call:cat{}<tool_call|>" + CALL, answer(None, None, ("cat", "{}"), ("f", JSON))),
    "after thoughts": ("<|channel>thought\nCall.\n<channel|>" + CALL, answer(None, "Call.", ("f", JSON))),
    "in open thoughts": ("<|channel>thought\nCall.\n" + CALL, answer(None, "Call.", ("f", JSON))),
    "without its word": ("<|tool_call>f(n:1)<tool_call|>", answer(None, None, ("f", '{"n": 1}'))),
    "key in marks": (
        '<|tool_call>call:f{o:{<|"|>a b<|"|>:1.5}}<tool_call|>', answer(None, None, ("f", '{"o": {"a b": 1.5}}'))
    ),
    "bare text": (
        "<|tool_call>call:f{where:New York}<tool_call|>", answer(None, None, ("f", '{"where": "New York"}'))
    ),
    "cut off": (CUT, answer(None, None, ("f", '{"n": 1, "zip": "12'))),
    "unknown function": ("<|tool_call>call:g{n:1}<tool_call|>", answer("call:g{n:1}")),
    "no colon": ("<|tool_call>call:f{n 1}<tool_call|>", answer("call:f{n 1}")),
    "wrong bracket": ("<|tool_call>call:f{n:1]}<tool_call|>", answer("call:f{n:1]}")),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name):
    text, expected = ANSWERS[name]
    assert message(text) == expected
    for seed in range(20):
        assert message(text, seed=seed) == expected


def test_thoughts_that_the_prompt_begins():
    for text in ("thought\nHm.\n<channel|>Yes.", "Hm.\n<channel|>Yes."):
        for seed in range(10):
            assert message(text, thinking=True, seed=seed) == {"content": "Yes.", "thoughts": "Hm.", "calls": []}
    split = Thoughts(True, marks=CHANNELS)
    assert split.split("thought\na <chan") == ("a ", "") and split.split("nel|> b", last=True) == ("", "b")


def test_reasoning_as_content():
    got = message("<|channel>thought\nHm.<channel|>Yes.", reasoning=False)
    assert got["thoughts"] is None and got["content"].endswith("Hm.Yes.")


def test_form_of_a_template(tokenizer):
    form = answer_form(tokenizer)
    assert form.parser is Gemma4 is PARSERS["gemma4"] and form.takes_tools and form.thinks and not form.harmony
    assert form.marks == think_marks(tokenizer) == CHANNELS
    assert form.special >= {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'}
    assert form.end_think == tokenizer.convert_tokens_to_ids("<channel|>")


def test_prompts(tokenizer):
    """The templates of large models close an empty channel if thinking is off."""
    messages = [{"role": "user", "content": "x"}]

    def prompt(**options: Any) -> list[int]:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    assert begins_thinking(prompt(enable_thinking=True), tokenizer) is None
    assert begins_thinking(prompt(enable_thinking=False), tokenizer) is False
    opened = tokenizer("<|turn>model\n<|channel>", add_special_tokens=False)["input_ids"]
    assert begins_thinking(opened, tokenizer) is True


def test_stop_tokens(tmp_path, tokenizer):
    config = {"eos_token_id": [1, tokenizer.convert_tokens_to_ids("<turn|>")]}
    files = ModelFiles("gemma", tmp_path, config, ())
    names = ("<eos>", "<turn|>", "<|tool_response>")
    assert {*stop_token_ids(files, tokenizer)} == {*tokenizer.convert_tokens_to_ids([*names])}


FUNCTION = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "A city."},
                "n": {"type": ["integer", "null"]},
                "unit": {"enum": ["C", "F", 1]},
                "list": {"type": "array", "items": {"type": "number"}},
                "more": {"type": "object", "properties": {"a b": {"type": "boolean"}}, "required": ["a b"]},
                "other": {"anyOf": [{"type": "string"}]},
            },
            "required": ["city", "list"],
        },
    },
}
CALLS = [
    ('city:<|"|>New {York<|"|>,n:-4,unit:<|"|>C<|"|>,list:[1,2.5],more:{<|"|>a b<|"|>:true},other:{q:[null]}', True),
    ('city:<|"|><|"|>,n:null,unit:1,list:[]', True),
    ('city:<|"|>a<|"|>,list:[],other:<|"|>x<|"|>', True),
    ('city:<|"|>a<|"|>', False),
    ("city:3,list:[]", False),
    ('city:<|"|>a<|"|>,unit:<|"|>K<|"|>,list:[]', False),
    ('list:[],city:<|"|>a<|"|>', False),
    ('city:<|"|>a<|"|>,list:[],', False),
    ('city:<|"|>a<|"|>,list:[true]', False),
]


@pytest.fixture(scope="module")
def follows(tokenizer) -> Any:
    import llguidance.hf

    library = llguidance.hf.from_tokenizer(tokenizer)

    def call(grammar: str, text: str) -> bool:
        matcher = llguidance.LLMatcher(library, llguidance.LLMatcher.grammar_from_lark(grammar))
        assert not matcher.is_error(), matcher.get_error()
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return call


@pytest.mark.parametrize(("arguments", "is_valid"), CALLS)
def test_forced_calls(tokenizer, follows, arguments, is_valid):
    """`tool_choice: "required"`: the grammar has the model's own syntax. What it allows, the parser reads."""
    tokens = answer_form(tokenizer).tokens
    grammar = call_grammar(Gemma4, [FUNCTION], tokens, strict=[])
    text = f"<|tool_call>call:f{{{arguments}}}<tool_call|>"
    assert follows(grammar, text) == is_valid
    one = call_grammar(Gemma4, [FUNCTION], tokens, most=1, strict=[])
    assert follows(grammar, text * 2) == follows(one, text) == is_valid and not follows(one, text * 2)
    assert not follows(grammar, "Hello")
    if is_valid:
        got = message(text, schemas={"f": FUNCTION["function"]["parameters"]})
        assert set(json.loads(got["calls"][0][1])) >= {"city", "list"} and got["content"] is None


def test_calls_beside_text_and_answers(tokenizer, follows):
    tokens, text = answer_form(tokenizer).tokens, '<|tool_call>call:f{city:<|"|>a<|"|>,list:[]}<tool_call|>'
    free = call_grammar(Gemma4, [FUNCTION], tokens, strict=[], text=True)
    assert follows(free, f"See: {text}") and follows(free, "Hello") and not follows(free, "<|tool_call>call:g{}")
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    either = call_grammar(Gemma4, [FUNCTION], tokens, strict=[], answer=schema)
    assert follows(either, text) and follows(either, '{"ok": true}') and not follows(either, "Hello")


def test_refused_grammars(tokenizer):
    with pytest.raises(ValueError, match=r"strict arguments .* cannot follow \['anyOf'\]"):
        call_grammar(Gemma4, [FUNCTION], answer_form(tokenizer).tokens)
    with pytest.raises(ValueError, match=r"the mark of strings, .* is not a token"):
        call_grammar(Gemma4, [FUNCTION], {}, strict=[])
