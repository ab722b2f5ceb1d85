"""Prompts of chats: the ends of prompts, and variables of the template."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from body_helpers import CHAT, HELLO, task
from engine_helpers import TEMPLATE, shared_engine
from engine_helpers import tokenizer as byte_level
from server_helpers import running

from specjax.engine.intake import Intake

WITH_VARIABLES = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ start }}{% if think is false %}no{% endif %}{% endif %}"
)
BEGUN = [*HELLO, {"role": "assistant", "content": "the hell"}]
START, ASSISTANT = "<|im_start|>user\nhello<|im_end|>\n", "<|im_start|>assistant\n"


def intake(template: str) -> Intake:
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.chat_template = template
    return replace(shared_engine("NGRAM").intake, tokenizer=tokenizer)


def text_of(body: dict[str, Any], template: str = TEMPLATE) -> str:
    (sequence,) = task(CHAT, body).sequences(intake(template), "r")
    return byte_level().decode(sequence.prompt)


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, f"{ASSISTANT}the hell<|im_end|>\n{ASSISTANT}"),
        ({"add_generation_prompt": False}, f"{ASSISTANT}the hell<|im_end|>\n"),
        ({"continue_final_message": True}, f"{ASSISTANT}the hell"),
        ({"continue_final_message": True, "add_generation_prompt": False}, f"{ASSISTANT}the hell"),
    ],
)
def test_end_of_the_prompt(fields, end):
    assert text_of({"messages": BEGUN, **fields}) == START + end


def test_variables_of_the_template():
    body = {"messages": HELLO, "chat_template_kwargs": {"start": "so", "think": False, "other": [1, {"a": None}]}}
    assert text_of(body, WITH_VARIABLES) == START + f"{ASSISTANT}sono"
    body = {"messages": BEGUN, "continue_final_message": True, "chat_template_kwargs": {"start": "so"}}
    assert text_of(body, WITH_VARIABLES) == START + f"{ASSISTANT}the hell", "the template trims"


def test_template_fields_over_http():
    with running(shared_engine("NGRAM")) as server:
        fields = {"messages": BEGUN, "max_tokens": 20, "temperature": 0, "continue_final_message": True}
        text = server.post(CHAT, fields).json()["choices"][0]["message"]["content"]
        expected = shared_engine("NONE").generate(f"{START}{ASSISTANT}the hell", {"max_new_tokens": 20})
        assert text == expected.text
