"""Arguments of the chat template: `add_generation_prompt`, `continue_final_message`, `chat_template_kwargs`."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import openai
import pytest
from body_helpers import CHAT, HELLO, RULES, refusal, task
from engine_helpers import TEMPLATE, shared_engine, tokenizer
from server_helpers import running

from specjax.checkpoint.prompts import Chat
from specjax.engine.intake import Intake
from specjax.serve.openai_requests import MAX_NAMES, MAX_VARIABLES

WITH_VARIABLES = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ start }}{% if think is false %}no{% endif %}{% endif %}"
)
BEGUN = [*HELLO, {"role": "assistant", "content": "the hell"}]


def intake(template: str = TEMPLATE, **changes: Any) -> Intake:
    words = copy.deepcopy(tokenizer())
    words.chat_template = template
    return replace(shared_engine("NGRAM").intake, tokenizer=words, **changes)


def text_of(body: dict[str, Any], template: str = TEMPLATE, **changes: Any) -> str:
    (sequence,) = task(CHAT, body).sequences(intake(template, **changes), "r")
    return tokenizer().decode(sequence.prompt)


START = "<|im_start|>user\nhello<|im_end|>\n"


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "<|im_start|>assistant\nthe hell<|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, "<|im_start|>assistant\nthe hell<|im_end|>\n"),
        ({"add_generation_prompt": True}, "<|im_start|>assistant\nthe hell<|im_end|>\n<|im_start|>assistant\n"),
        ({"continue_final_message": True}, "<|im_start|>assistant\nthe hell"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "<|im_start|>assistant\nthe hell"),
        ({"continue_final_message": False}, "<|im_start|>assistant\nthe hell<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_how_a_prompt_ends(fields, end, plain):
    assert text_of({"messages": BEGUN, **fields}, plain_content=plain) == START + end


def test_variables_reach_the_template():
    body = {"messages": HELLO, "chat_template_kwargs": {"start": "so", "think": False, "other": [1, {"a": None}]}}
    assert text_of(body, WITH_VARIABLES) == START + "<|im_start|>assistant\nsono"
    go_on = {"messages": BEGUN, "continue_final_message": True, "chat_template_kwargs": {"start": "so"}}
    assert text_of(go_on, WITH_VARIABLES) == START + "<|im_start|>assistant\nthe hell", "the template trims"


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"continue_final_message": True}, "continue_final_message", "assistant"),
        ({"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message", "add_generation_prompt"),
        ({"continue_final_message": 1}, "continue_final_message", "boolean"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "object"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "'tokenize'"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "'chat_template'"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "'messages'"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "'self'"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs", "'bos_token'"),
        ({"chat_template_kwargs": {"kwargs": 1, "conversation": 1}}, "chat_template_kwargs", "'conversation'"),
        ({"chat_template_kwargs": {"add_generation_prompt": "x"}}, "chat_template_kwargs", "a field of the body"),
        ({"chat_template_kwargs": {str(i): i for i in range(MAX_NAMES + 1)}}, "chat_template_kwargs", "at most"),
        ({"chat_template_kwargs": {"a": "x" * MAX_VARIABLES}}, "chat_template_kwargs", "characters of JSON"),
    ],
)  # fmt: skip
def test_what_is_refused(fields, param, named):
    error = refusal(CHAT, {"messages": HELLO, **fields}, intake(), RULES)
    assert error is not None and error.param == param and named in str(error), str(error)


def test_variables_make_no_special_tokens_of_plain_content():
    held = intake(WITH_VARIABLES, plain_content=True)
    for variables in ({"start": "<|im_end|>"}, {"start": [{"a": "x"}]}):
        error = refusal(CHAT, {"messages": HELLO, "chat_template_kwargs": variables}, held)
        assert error is not None and error.param == "chat_template_kwargs" and "--plain-content" in str(error)
    assert refusal(CHAT, {"messages": HELLO, "chat_template_kwargs": {"think": False, "start": 5}}, held) is None


def test_over_http():
    engine = shared_engine("NGRAM")
    with running(engine) as server:
        with openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client:
            fields = {"model": "toy", "messages": BEGUN, "max_tokens": 20, "temperature": 0}
            found = client.chat.completions.create(**fields, extra_body={"continue_final_message": True})
        prompt = START + "<|im_start|>assistant\nthe hell"
        assert found.choices[0].message.content == shared_engine("NONE").generate(prompt, {"max_new_tokens": 20}).text
        for more in ({}, {"continue_final_message": True}, {"add_generation_prompt": False}):
            tokens = server.post("/tokenize", {"messages": BEGUN, **more}).json()["tokens"]
            assert tokens == engine.encode(Chat(BEGUN, more))
        refused = server.post("/tokenize", {"messages": HELLO, "chat_template_kwargs": {"tokenize": 1}})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template_kwargs"
