"""Rows of `specjax train generate` under each family's chat template: training reads the ids that the target read."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from chat_templates import FAMILIES, VOCABULARY, family_tokenizer, ids
from toy_models import Toy, tiny_llama

from specjax.checkpoint.prompts import Chat, encode
from specjax.cli.lines import Line
from specjax.drafters import Params, none_drafter
from specjax.engine import Completion, Engine, EngineConfig
from specjax.train import generate
from specjax.train.data import Example, load_examples

LONGEST = 256
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]
CHAT = [
    {"role": "user", "content": " hello "},
    {"role": "assistant", "content": "<think>\nno\n</think>\n\n the 12 \n"},
    {"role": "user", "content": "And 12?"},
]
CALLED = [
    CHAT[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "user", "content": "hell"},
]


class Answer(NamedTuple):
    text: str
    finish: str | None = None  # None: the end token; length; or a stop string


PLAIN = {"ended": Answer("It is 4."), "white space": Answer("  It is\n\n4 \n"), "cut": Answer("It is ", "length"),
         "stop string": Answer("It is 4. ", "Ask:")}  # fmt: skip
ANSWERS = {
    "no": PLAIN,
    "writes": {
        "ended": Answer("<think>\nhm\n</think>\n\nIt is 4."), "white space": Answer("<think>hm </think> It is 4. \n"),
        "cut inside thoughts": Answer("<think>\nhm ", "length"),
        "stop string": Answer("<think>\nhm\n</think>\n\nIt is ", "Ask:"),
    },
    "opened": {
        "ended": Answer("hm\n</think>\n\nIt is 4."), "white space": Answer(" hm</think>\n\n It is 4. \n"),
        "cut inside thoughts": Answer("hm ", "length"), "stop string": Answer("hm\n</think>\n\nIt is ", "Ask:"),
    },
}  # fmt: skip
"""By `Family.thinks`."""


def input_rows(name: str) -> Iterator[dict[str, Any]]:
    family = FAMILIES[name]
    extra = {"chat_template_kwargs": dict(family.variables)} if family.variables else {}
    yield {"prompt": "hello 12"} | extra
    yield {"messages": CHAT} | extra
    if family.tools:
        yield {"messages": CHAT[:1], "tools": TOOLS} | extra
        yield {"messages": CALLED, "tools": TOOLS} | extra


def completion(name: str, answer: Answer) -> Completion:
    """The engine's result for a target that writes this answer."""
    family = FAMILIES[name]
    text = family.lead + answer.text
    end, finish = ids(family.end or "<|endoftext|>"), {"type": "stop", "matched": 2}
    if answer.finish == "length":
        end, finish = [], {"type": "length", "length": 3}
    elif answer.finish:
        end, finish = ids(answer.finish), {"type": "stop", "matched": answer.finish}
    shown = family_tokenizer(name).decode(ids(text), skip_special_tokens=True)
    return Completion("", shown, [*ids(text), *end], 0, finish, 0, 1.0, [], 0)


@functools.cache
def toy() -> Toy:
    return tiny_llama(3, num_layers=3, vocab_size=VOCABULARY, max_positions=LONGEST)


@functools.cache
def engine(name: str) -> Engine:
    config = EngineConfig(max_running_requests=1, page_size=16, context_length=LONGEST, chunked_prefill_size=64)
    return Engine(toy().target, Params(toy().params), family_tokenizer(name), none_drafter(), config=config)


def written(name: str, row: dict[str, Any], done: Completion) -> dict[str, Any]:
    """The output row of `specjax train generate`."""
    args = argparse.Namespace(input="in.jsonl", seed=0, max_prompt_tokens=LONGEST, max_new_tokens=12)
    line = Line("in.jsonl", 1, 0, json.dumps(row).encode(), 0)
    (request,) = generate.requests(engine(name), [line], [0.8], args, [])
    assert isinstance(request, generate.Line), request
    output = generate.answer(request, done)
    assert output is not None
    return json.loads(json.dumps(output))


def served(name: str, row: dict[str, Any]) -> list[int]:
    messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
    for message in (messages := json.loads(json.dumps(messages))):
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    variables = dict(FAMILIES[name].variables) | ({"tools": row["tools"]} if "tools" in row else {})
    return encode(Chat(messages, variables), family_tokenizer(name), VOCABULARY)


@pytest.fixture
def read(tmp_path):
    """read(name, rows) -> examples."""

    def call(name: str, rows: list[dict[str, Any]]) -> list[Example]:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        loaded = load_examples([str(file)], family_tokenizer(name), VOCABULARY, max_length=LONGEST)
        assert not loaded.skipped and not loaded.truncated, loaded.skipped
        return loaded.examples

    return call


CASES = [(name, answer) for name, family in FAMILIES.items() for answer in ANSWERS[family.thinks]]


@pytest.mark.parametrize(("name", "answer"), CASES)
def test_generated_rows_are_read_as_served(read, name, answer):
    """Without ids, special tokens in the answer and a stop string are lost, since texts do not contain them."""
    family, chosen = FAMILIES[name], ANSWERS[FAMILIES[name].thinks][answer]
    done = completion(name, chosen)
    inputs = list(input_rows(name))
    rows = [written(name, row, done) for row in inputs]
    texts = [{key: value for key, value in row.items() if key not in ("prompt_ids", "response_ids")} for row in rows]
    shown = ids(family.lead + chosen.text) + ids("" if chosen.finish else family.end)
    forms = [(rows, done.output_ids), *([] if family.skips else [(texts, shown)])]
    for form, answer_ids in forms:
        for row, example in zip(inputs, read(name, form), strict=True):
            prompt = served(name, row)
            assert example.tokens.tolist() == [*prompt, *answer_ids]
            assert example.loss.tolist() == [False] * len(prompt) + [True] * len(answer_ids)


@pytest.mark.parametrize("name", ["deepseek-r1", "deepseek-v3.1, thinking"])
def test_an_answer_without_thoughts_is_refused_after_think(read, name):
    row = {"messages": [CHAT[0], {"role": "assistant", "content": "It is 4."}]}
    with pytest.raises(AssertionError, match="the prompt ends with <think>, and messages"):
        read(name, [row | {"chat_template_kwargs": dict(FAMILIES[name].variables)}])


HM = {"content": "", "reasoning_content": "hm"}
CALL_TEXT = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
FIELDS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    # The family, fields other than content "It is 4. ", the end of the prompt, and the answer.
    "mistral": ("mistral", {}, "[/INST]", " It is 4. </s>"),
    "gemma": ("gemma", {}, "model\n", "It is 4. <end_of_turn>"),
    "gpt-oss": ("gpt-oss", {}, "assistant", "<|channel|>final<|message|>It is 4. <|return|>"),
    "no thoughts, opened": ("qwen3-thinking", {}, "<think>\n\n</think>\n\n", "It is 4. <|im_end|>"),
    "no calls": ("qwen3", {"tool_calls": []}, "<think>\n\n</think>\n\n", "It is 4. <|im_end|>"),
    "a call": ("qwen3", {"content": None, "tool_calls": [CALL]}, "<think>\n\n</think>\n\n", CALL_TEXT),
    "a call, opened": ("qwen3-thinking", {"content": None, "tool_calls": [CALL]}, "</think>\n\n", CALL_TEXT),
    "a call, never thinking": ("qwen2.5", {"content": None, "tool_calls": [CALL]}, "assistant\n", CALL_TEXT),
    "a call after content": ("qwen3", {"tool_calls": [CALL]}, "</think>\n\n", "It is 4. " + CALL_TEXT),
    "a call after thoughts": (
        "qwen3", HM | {"tool_calls": [CALL]}, "assistant\n", "<think>\nhm\n</think>\n\n" + CALL_TEXT,
    ),
    "thoughts the template does not read": (
        "llama 3", {"thinking": "hm"}, "<|end_header_id|>\n\n", "It is 4. <|eot_id|>",
    ),
    "thoughts": ("qwen3", {"reasoning_content": "hm"}, "assistant\n", "<think>\nhm\n</think>\n\nIt is 4. <|im_end|>"),
    "cut inside thoughts": ("qwen3", HM, "assistant\n", "<think>\nhm"),
    "cut inside thoughts, opened": ("qwen3-thinking", HM, "assistant\n<think>\n", "hm"),
    "cut inside thoughts that the template drops": ("deepseek-r1", HM, "<｜Assistant｜><think>\n", "hm"),
    "cut after thoughts": (
        "qwen3", {"reasoning_content": "hm"}, "assistant\n", "<think>\nhm\n</think>\n\nIt is 4. ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FIELDS)
def test_fields_that_need_the_template(read, case):
    """Empty blocks of thoughts are part of the prompt; nothing follows an answer that was cut inside its thoughts."""
    name, fields, prompt, answer = FIELDS[case]
    row: dict[str, Any] = {"messages": [CHAT[0], {"role": "assistant", "content": "It is 4. "} | fields]}
    (example,) = read(name, [row | ({"finish_reason": "length"} if case.startswith("cut") else {})])
    shown = functools.partial(family_tokenizer(name).decode, skip_special_tokens=False)
    assert shown(example.tokens[example.loss]) == answer
    assert shown(example.tokens[~example.loss]).endswith(prompt) and not example.loss[: -len(ids(answer))].any()
