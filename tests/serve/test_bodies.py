"""Request bodies: fields that pass, are ignored or are refused; sizes; random bodies; the OpenAPI document."""

from __future__ import annotations

import itertools
import json
import threading
import tracemalloc
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jsonschema
import pytest
from body_helpers import (
    CHAT,
    COMPLETE,
    EDGES,
    EVERY_LEAST,
    GENERATE,
    HELLO,
    KINDS,
    LEAST,
    RULES,
    read_request,
    refusal,
    task,
)
from engine_helpers import shared_engine
from server_helpers import SECONDS, Running, check_error, in_background

from specjax.cli.flags import ServerSettings
from specjax.cli.serve import make_app
from specjax.engine import SamplingParams
from specjax.engine.grammar import MAX_SOURCE
from specjax.engine.sampling_params import MAX_PRIORITY
from specjax.serve.errors import ApiError
from specjax.serve.fields import IGNORED_HEADER, INLINE_BYTES, MAX_MARKS, MAX_NAMED, Reading
from specjax.serve.openai_requests import MAX_NAMES, CompletionRequest, Message
from specjax.serve.runner import Runner
from specjax.serve.sglang_generate import GenerateRequest, SamplingBody
from specjax.serve.tokenising import Rules
from specjax.serve.tools import FunctionTool
from specjax.state import NO_DRAFT_LIMIT

OPENAI, ALL = (CHAT, COMPLETE), tuple(LEAST)


def params(path: str, rules: Rules = RULES, **sampling: Any) -> SamplingParams:
    """The sampling parameters of a request whose body has these fields."""
    members = {"sampling_params": sampling} if path == GENERATE else sampling
    return task(path, LEAST[path] | members, rules).sampling[0]


# Values that change nothing.

OPENAI_DEFAULTS: dict[str, Any] = {
    "frequency_penalty": 0, "logit_bias": None, "max_tokens": None, "n": 1, "presence_penalty": 0,
    "response_format": {"type": "text"}, "seed": None, "stop": None, "stream": False, "stream_options": None,
    "temperature": 1, "top_p": 1, "tools": [], "tool_choice": "auto", "user": "me", "store": False,
    "metadata": {}, "service_tier": "auto", "top_k": 0, "prompt_cache_key": "k", "safety_identifier": "s",
}  # fmt: skip
CHAT_DEFAULTS = OPENAI_DEFAULTS | {
    "verbosity": "medium", "parallel_tool_calls": True, "logprobs": False, "top_logprobs": 0, "modalities": ["text"],
    "reasoning_effort": "medium", "functions": [], "function_call": "none", "audio": None, "prediction": None,
    "web_search_options": None, "max_completion_tokens": None, "continue_final_message": False,
    "add_generation_prompt": True, "chat_template": None, "chat_template_kwargs": {}, "documents": [],
    "add_special_tokens": False, "echo": False, "best_of": 1,
}  # fmt: skip
COMPLETION_DEFAULTS = OPENAI_DEFAULTS | {"suffix": "", "best_of": 1, "echo": False, "logprobs": None}
VLLM_DEFAULTS = {
    "guided_json": None, "use_beam_search": False, "length_penalty": 1.0, "bad_words": [], "allowed_token_ids": None,
    "truncate_prompt_tokens": None, "include_stop_str_in_output": False, "spaces_between_special_tokens": True,
    "prompt_logprobs": None, "structured_outputs": None, "return_token_ids": None, "min_p": 0, "top_k": -1,
    "repetition_penalty": 1, "ignore_eos": False, "min_tokens": 0, "skip_special_tokens": True, "stop_token_ids": [],
}  # fmt: skip
SGLANG_DEFAULTS = {
    "regex": None, "ebnf": None, "json_schema": None, "stop_regex": None, "lora_path": None, "custom_params": None,
    "custom_logit_processor": None, "return_hidden_states": False, "image_data": None, "input_embeds": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "defaults"),
    [
        *((path, defaults) for path in OPENAI for defaults in (VLLM_DEFAULTS, SGLANG_DEFAULTS)),
        (CHAT, CHAT_DEFAULTS),
        (COMPLETE, COMPLETION_DEFAULTS),
        (GENERATE, SGLANG_DEFAULTS | {"logprob_start_len": -1, "modalities": None}),
    ],
)
def test_default_values_pass(path, defaults):
    for members in (defaults, *({name: value} for name, value in defaults.items())):
        assert task(path, LEAST[path] | members) == task(path, LEAST[path]), members


@pytest.mark.parametrize("path", KINDS)
def test_neutral_values_of_unsupported_fields_pass(path):
    least = EVERY_LEAST[path]
    for name, harmless in KINDS[path].unsupported.items():
        for value in (None, *harmless):
            assert name in KINDS[path].model_fields or task(path, least | {name: value}) == task(path, least), name


def test_neutral_values_of_messages_pass():
    least = task(CHAT, {"messages": HELLO})
    for name, harmless in Message.unsupported.items():
        for value in (None, *harmless):
            assert task(CHAT, {"messages": [HELLO[0] | {name: value}]}) == least
        error = refusal(CHAT, {"messages": [HELLO[0] | {name: "something"}]})
        assert error is not None and error.param == "messages"
    assert task(CHAT, LEAST[CHAT] | {"response_format": {"type": "text", "json_schema": None}}) == least


# Values that set something.


@pytest.mark.parametrize("path", ALL)
def test_sampling_fields(path):
    for value, expected in ((0, -1), (-1, -1), (None, -1), (7, 7), (2**62, 2**62)):
        assert params(path, top_k=value).top_k == expected
    assert params(path, seed=7.0, top_k=3.0, stop_token_ids=[5.0, 6]) == params(
        path, seed=7, top_k=3, stop_token_ids=[5, 6]
    )
    assert params(path, sampling_seed=7).seed == params(path, seed=7, sampling_seed=7).seed == 7
    assert params(path, repetition_penalty=5e-324).repetition_penalty == 5e-324
    for value, expected in ((None, 0), (5, 5), (-3, -3), (2.0, 2), (MAX_PRIORITY, MAX_PRIORITY)):
        assert task(path, LEAST[path] | {"priority": value}).sampling[0].priority == expected
    for salt in ("mine", None):
        assert task(path, LEAST[path] | {"cache_salt": salt}).sampling[0].cache_salt == salt


def test_other_fields():
    for prompt in ([5.0, 6], [[5, 6.0]]):
        assert task(COMPLETE, {"prompt": prompt}).prompts == [[5, 6]]
    for model in ("default", "toy", None):
        assert all(task(path, LEAST[path] | {"model": model}) for path in OPENAI)
    assert task(GENERATE, {"text": ["a", "b"], "rid": "r"}).ids == ["r_0", "r_1"]
    assert params(CHAT, draft_limit=3.0).draft_limit == 3
    both = LEAST[CHAT] | {"max_tokens": 127, "max_completion_tokens": 5}
    assert task(CHAT, both).sampling[0].max_new_tokens == 5


@pytest.mark.parametrize("path", ALL)
def test_defaults_of_the_model(path):
    """A request's value takes precedence over the model's, and the model's over the protocol's."""
    rules = Rules("toy", 516, 128, 127, {"temperature": 0.25, "top_p": 0.9, "top_k": 40})
    sampling = params(path, rules, top_p=0.5, temperature=None)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.25, 0.5, 40, 0.0)
    assert params(path).temperature == 1.0
    assert params(path, rules, top_k=0, temperature=0).top_k == -1, "0 switches the model's top_k off"


@pytest.mark.parametrize(
    ("text", "expected"),
    [('{"x": 1}', {"x": 1}), ({"x": 1}, {"x": 1}), ("", {}), (None, {}), ("{", "{"), ("[1]", "[1]")],
)
def test_arguments_of_an_earlier_call(text, expected):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    (prompt,) = task(CHAT, {"messages": messages}).prompts
    assert prompt[1]["tool_calls"][0]["function"]["arguments"] == expected


# Unknown fields.

UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"beam_width": 5}, "beam_width"),
    (COMPLETE, {"beam_width": None}, "beam_width"),
    (CHAT, {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    (CHAT, {"messages": [*HELLO, HELLO[0] | {"weight": 1}]}, "messages[].weight"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}]},
     "messages[].content[].cache_control"),
    (GENERATE, {"routed_dp_rank": 3}, "routed_dp_rank"),
    (GENERATE, {"sampling_params": {"foo": 1}}, "sampling_params.foo"),
    (GENERATE, {"text": ["a", "b"], "sampling_params": [{}, {"foo": 1}]}, "sampling_params[].foo"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "members", "name"), UNKNOWN)
def test_unknown_field_is_named(path, members, name):
    reading = read_request(KINDS[path], json.dumps(LEAST[path] | members).encode(), RULES)[2]
    assert reading.headers == {IGNORED_HEADER: name}


@pytest.mark.parametrize("path", ALL)
def test_unknown_field_sets_no_attribute(path):
    """Not even if `SamplingParams`, or the class of the body, has an attribute of that name."""
    unknown = {"kept_special_tokens": ["x"], "origins": True, "task": 1, "names": {"a": "b"}, "model_extra": 5}
    assert task(path, LEAST[path] | unknown) == task(path, LEAST[path])
    assert task(GENERATE, {"text": "x", "sampling_params": unknown}) == task(GENERATE, {"text": "x"})


def test_header_of_ignored_fields_is_short_and_safe():
    reading = Reading()
    for name in ["a b", "x\r\nSet-Cookie: y=1", "é😀", "", "," * 500, *(f"f{i}" for i in range(1000))]:
        reading.ignore(name)
    (header,) = reading.headers.values()
    assert header.isascii() and header.isprintable() and len(header) < 4096
    names = header.split(", ")
    assert names[:4] == ["a%20b", "x%0D%0ASet-Cookie%3A%20y%3D1", "%C3%A9%F0%9F%98%80", '""']
    assert len(names) == MAX_NAMED + 1 and names[-1] == "..."
    assert Reading().headers == {}
    body = {"prompt": "x"} | {f"f{i}" * 20: i for i in range(50_000)}
    assert len(str(read_request(CompletionRequest, json.dumps(body).encode(), RULES)[2].headers)) < 4096


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize("stream", [False, True])
def test_answer_names_ignored_fields(server: Running, path, stream):
    few = {"sampling_params": {"max_new_tokens": 1, "": 1}} if path == GENERATE else {"max_tokens": 1, "": 1}
    answer = server.post(path, LEAST[path] | few | {"stream": stream, "bogus\n": "secret-value"})
    assert answer.status_code == 200 and "bogus%0A" in answer.headers[IGNORED_HEADER]


# Refusals. A row: paths, wrong values with a part of the message.


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


WRONG_VALUES: list[tuple[tuple[str, ...], dict[str, list[tuple[Any, str]]]]] = [
    (OPENAI, {
        "n": [(0, "from 1 to 128"), (-1, "-1"), (129, "128"), (1.5, "integer"), (True, "integer")],
        "max_tokens": [(0, "at least 1, got 0"), (-5, "-5"), ("5", "integer"), (1000, "context of 128"),
                       (10**300, "integer of 64 bits")],
        "stop": [(["a"] * 17, "at most 16"), ("", "must not be empty"), (["a", ""], "stop[1] must not be empty"),
                 (5, "string"), ([5], "string")],
        "temperature": [(-0.1, "-0.1"), ("hot", "number"), (True, "number")],
        "top_p": [(0, "above 0"), (1.01, "1.01")],
        "top_k": [(-2, "at least -1, got -2")],
        "min_p": [(1.5, "1.5")],
        "frequency_penalty": [(2.5, "-2 to 2")],
        "presence_penalty": [(-2.5, "-2 to 2")],
        "repetition_penalty": [(0, "above 0"), (2.1, "2.1")],
        "seed": [(2**63, "to 9223372036854775807"), (-(10**30), "from -9223372036854775808"), (1.5, "integer")],
        "sampling_seed": [(2**63, "sampling_seed must be from")],
        "logit_bias": [({"a": 1}, "not a token id"), ({"1.5": 1}, "not a token id"), ({"1_0": 1}, "not a token id"),
                       ({"99999": 1}, "99999"), ({"-1": 1}, "-1"), ({"5": 101}, "-100 to 100"), ({"5": "1"}, "number"),
                       ({str(i): 1 for i in range(1025)}, "1024"), ([5], "object")],
        "stream": [("yes", "boolean")],
        "stream_options": [({"include_usage": True}, "stream")],
        "response_format": [
            ({"type": "structural_tag"}, "json_schema"), ({"type": "xml"}, "json_object"), ({}, "type is required"),
            ("json_object", "json_object"), ({"type": "json_schema"}, "json_schema is required"),
            ({"type": "json_object", "schema": {}}, "not supported"), (json_schema([]), "JSON schema"),
            (json_schema({"type": "foo"}), "foo"), (json_schema({"not": {}}), "not"),
        ],
        "regex": [("(a", "unclosed"), ("", "empty"), (5, "string"), ("a" * (MAX_SOURCE + 1), "at most")],
        "ebnf": [("root ::= foo", "foo")],
        "draft_limit": [(value, "draft_limit must be") for value in (-1, 1.5, True, "2", NO_DRAFT_LIMIT + 1)],
        "min_tokens": [(-1, "-1")],
        "stop_token_ids": [([5, -7], "-7"), (["a"], "integer")],
        "ignore_eos": [(1, "boolean")],
        "user": [(5, "string")],
        "model": [(5, "string")],
    }),
    (ALL, {
        "cache_salt": [("", "empty"), ("x" * 257, "256"), (5, "string"), (["a"], "string")],
        "priority": [(MAX_PRIORITY + 1, "priority"), (1.5, "integer"), ("1", "integer"), (True, "integer")],
        # Known fields that would change the text.
        "structural_tag": [("{}", "not supported")], "guided_whitespace_pattern": [(" ", "not supported")],
        "grammar": [("root", "not supported")], "lora_path": [("x", "not supported")], "json_schema": [("{}", "")],
        "bad_words": [(["a"], "not supported")], "allowed_token_ids": [([5], "not supported")],
        "truncate_prompt_tokens": [(5, "not supported")], "use_beam_search": [(True, "not supported")],
        "length_penalty": [(2, "not supported")], "prompt_embeds": [("x", "not supported")],
        "input_embeds": [([[0.5]], "not supported")], "image_data": [("x", "not supported")],
        "custom_logit_processor": [("x", "not supported")], "return_hidden_states": [(True, "not supported")],
        "tools": [([{"type": "function"}], ""), ([{"type": "function", "function": {"name": "f"}}], "")],
        "tool_choice": [("required", "tool_choice")], "speculate": [(False, "")], "best_of": [(2, "not supported")],
        "suffix": [("x", "not supported")], "include_stop_str_in_output": [(True, "not supported")],
    }),
    ((CHAT,), {
        "messages": [(value, "") for value in (
            None, [], "hello", {"role": "user", "content": "x"}, [123], [{}], [{"role": "user"}],
            [{"role": "user", "content": None}], [{"role": "robot", "content": "x"}], [{"role": 5, "content": "x"}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            [{"role": "user", "content": []}], [{"role": "user", "content": ["x"]}], [{"role": "user", "content": 5}],
            [*HELLO, {"role": "assistant", "content": None, "refusal": "no"}],
            [*HELLO, {"role": "assistant", "content": None}],
            *([{"role": role, "content": "x", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": [1]}}]}]
              for role in ("assistant", "user")),
            *([{"role": "assistant", "content": "x", "tool_calls": calls}] for calls in ({"a": 1}, {}, "", 0, False)),
        )] + [([{"role": "user", "content": "x" * 200}], "context")],
        "logprobs": [(5, "boolean")], "top_logprobs": [(5, "logprobs"), (1, "")], "echo": [(True, "not supported")],
        "functions": [([{"name": "f"}], "not supported")], "function_call": [({"name": "f"}, "not supported")],
        "parallel_tool_calls": [(1, "boolean")], "modalities": [(["audio"], "")], "audio": [({"voice": "x"}, "")],
        "prediction": [({"type": "content"}, "")], "reasoning_effort": [("high", "")], "verbosity": [("high", "")],
        "max_completion_tokens": [(0, "")], "chat_template": [("x", "")], "documents": [([{"text": "x"}], "")],
        "web_search_options": [({}, "")], "prompt": [("x", "")], "text": [("x", "")], "input_ids": [([5], "")],
        "max_new_tokens": [(5, "")], "sampling_params": [({"temperature": 0}, "")],
        "continue_final_message": [(True, "assistant"), (1, "boolean")],
        "chat_template_kwargs": [
            ([], "object"), ({"tokenize": True}, "'tokenize'"), ({"chat_template": "x"}, "'chat_template'"),
            ({"messages": []}, "'messages'"), ({"self": 1}, "'self'"), ({"bos_token": "x"}, "'bos_token'"),
            ({"kwargs": 1, "conversation": 1}, "'conversation'"),
            ({"add_generation_prompt": "x"}, "a field of the body"),
            ({str(i): i for i in range(MAX_NAMES + 1)}, "at most"),
        ],
    }),
    ((COMPLETE,), {
        "prompt": [(value, "") for value in (
            "", [], [""], ["a", ""], [[]], [5, "a"], ["a", 5], [[5], "a"], 5, None, {"a": 1}, [True], [1.5],
            [99999], [-1], [[5], [99999]], [10**30],
        )] + [("x" * 200, "context is 128"), ("x" * 5000, "5000 characters")],
        "logprobs": [(6, "0 to 5"), (-1, "0 to 5"), (True, "integer")], "min_tokens": [(17, "16")],
        "messages": [(HELLO, "")], "max_new_tokens": [(5, "")], "max_completion_tokens": [(5, "")],
        "top_logprobs": [(2, "")],
    }),
    ((GENERATE,), {
        "temperature": [(0, "")], "max_tokens": [(5, "")], "prompt": [("x", "")], "messages": [(HELLO, "")],
        "n": [(2, "")], "stop": [("x", "")],
        "text": [("", "empty"), ([], ""), ([5], "string")],
        "rid": [(5, ""), ("x" * 300, "")],
    }),
]  # fmt: skip

# Several fields. A row: path, the body, the field of the error, a part of the message.
WRONG_BODIES: list[tuple[str, dict[str, Any], str | None, str]] = [
    *((path, LEAST[path] | members, param, text) for path in OPENAI for members, param, text in (
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, None, "obfuscation"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens", "(10), got 20"),
        ({"seed": 7, "sampling_seed": 8}, "sampling_seed", ""),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format", "regex"))),
    (CHAT, {"model": "toy"}, "messages", "required"),
    (COMPLETE, {}, "prompt", "required"),
    (CHAT, LEAST[CHAT] | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
    (CHAT, LEAST[CHAT] | {"logprobs": False, "top_logprobs": 1}, "top_logprobs", ""),
    (CHAT, LEAST[CHAT] | {"logprobs": True, "top_logprobs": -1}, "top_logprobs", ""),
    (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": "x"}], "continue_final_message": True,
            "add_generation_prompt": True}, "continue_final_message", "add_generation_prompt"),
    *((CHAT, LEAST[CHAT] | {"max_tokens": value, "max_completion_tokens": 5}, "max_tokens", "") for value in (0, -1)),
    (COMPLETE, {"prompt": "x", "n": 2, "best_of": 3}, "best_of", ""),
    (COMPLETE, {"prompt": "x" * 100, "max_tokens": 29}, "max_tokens", "128"),
    *((GENERATE, {"text": "x", "sampling_params": sampling}, "sampling_params", text) for sampling, text in (
        ({"temperature": -1}, "temperature"), ({"temperature": "x"}, "number"), ({"n": 0}, "n"),
        ({"speculate": False}, "speculate"), ({"max_new_tokens": -1}, "max_new_tokens"), ({"top_k": True}, "top_k"),
        ({"stop": 5}, "stop"), ({"cache_salt": "x"}, "cache_salt"), ({"structural_tag": "a"}, "structural_tag"),
        ({"max_tokens": 5}, "max_tokens"), ({"use_beam_search": True}, "use_beam_search"), ("x", ""), ([5], ""),
        ([], ""), ({"sampling_seed": 2**63}, "sampling_seed must be from"),
        ({"draft_limit": -1}, "sampling_params.draft_limit must be"))),
    (GENERATE, {"text": "x", "sampling_params": {"max_new_tokens": 999}}, None, "context"),
    (GENERATE, {"text": "x", "sampling_params": {"seed": 7, "sampling_seed": 8}}, None, "sampling_seed"),
    *((GENERATE, body, None, "") for body in (
        {}, {"text": "x", "input_ids": [5]}, {"input_ids": "x"}, {"input_ids": [99999]},
        {"text": ["a", "b"], "sampling_params": [{}]}, {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]},
        {"text": ["a", "b"], "rid": ["same", "same"]}, {"text": "x", "return_logprob": True, "logprob_start_len": 1},
        {"text": "x", "return_logprob": True, "top_logprobs_num": 21}, {"messages": HELLO},
    )),
]  # fmt: skip
REFUSED = WRONG_BODIES + [
    (path, LEAST[path] | {name: value}, name, text)
    for paths, values in WRONG_VALUES
    for path in paths
    for name, wrong in values.items()
    for value, text in wrong
]


@pytest.mark.parametrize(("path", "body", "param", "text"), REFUSED)
def test_refusals_name_the_field(path, body, param, text):
    error = refusal(path, body, shared_engine("NGRAM").intake)
    assert error is not None and error.status == 400
    assert param is None or error.param == param, str(error)
    assert text in str(error) and len(str(error)) < 500


# Texts that json.dumps does not write. A row: path, the text, the field of the error.
RAW: list[tuple[str, bytes, str | None]] = [
    *((path, data, None) for path in ALL for data in (
        b"", b"{", b"[1]", b"null", b'"x"', b"\xff\xfe", b'{"a": NaN', b"[" * 100_000, b"{} {}",
        b'{"prompt": "\\ud800"}', b'{"text": "\xc3"}')),
    (COMPLETE, b'{"prompt": "x", "n": 1, "n": 0}', "n"),  # the last of two equal names counts
    *((COMPLETE, f'{{"prompt": "x", "{name}": {value}}}'.encode(), name.partition('"')[0])
      for name, value in itertools.product(("temperature", "top_p", "frequency_penalty"),
                                           ("NaN", "Infinity", "-Infinity", "1e999"))),
    *((COMPLETE, f'{{"prompt": "x", "logit_bias": {{"5": {value}}}}}'.encode(), "logit_bias")
      for value in ("NaN", "1e999")),
    *((path, f'{{{least}, "metadata": {{"a": {value}}}}}'.encode(), "metadata")
      for path, least in ((CHAT, f'"messages": {json.dumps(HELLO)}'), ("/v1/responses", '"input": "x"'))
      for value in ("NaN", "-Infinity", "1e999", '[{"b": [NaN]}]')),
]  # fmt: skip


@pytest.mark.parametrize(("path", "data", "param"), RAW)
def test_invalid_json_and_numbers_that_are_not_finite(path, data, param):
    with pytest.raises(ApiError) as caught:
        read_request(KINDS[path], data, RULES)
    assert caught.value.status == 400 and (param is None or caught.value.param == param)


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_over_http(server: Running, path, stream):
    """By the body's declaration and by the engine's intake, before the first byte of a stream."""
    wrong = {"timeout": 1}, {"sampling_params": {"max_new_tokens": 999}} if path == GENERATE else {"max_tokens": 999}
    for members in wrong:
        answer = server.post(path, LEAST[path] | {"stream": stream} | members)
        check_error(answer, 400, next(iter(members)) if path != GENERATE else None)
    error = check_error(server.complete("x" * 200), 400, "prompt", "200 tokens")
    assert error["code"] == "context_length_exceeded"
    if path != GENERATE:
        wrong_model = check_error(server.post(path, LEAST[path] | {"model": "gpt"}), 404, "model", "'toy'")
        assert wrong_model["code"] == "model_not_found"


# Sizes.


@pytest.mark.parametrize("least", [b"[]", b"{}", b"1", b'""', b'{"a":1}', b"[[]]"])
def test_too_many_values_are_a_413(least):
    with pytest.raises(ApiError) as caught:
        Reading().parse(b"[" + b",".join([least] * (MAX_MARKS + 2)) + b"]")
    assert caught.value.status == 413 and str(MAX_MARKS) in str(caught.value)


def test_values_in_arguments_of_calls_are_counted():
    call = {"function": {"name": "f", "arguments": '{"a": [' + ",".join(["[]"] * 70_000) + "]}"}}
    messages = [*HELLO, *[{"role": "assistant", "tool_calls": [call]}] * 4]
    error = refusal(CHAT, {"messages": messages})
    assert error is not None and error.status == 413
    assert refusal(CHAT, {"messages": messages[:3]}) is None


@pytest.mark.parametrize(("left", "right"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_deep_nesting_is_refused(left, right):
    for depth in (150, 300, 100_000, 10**7):
        body = b'{"prompt": "x", "user_data": ' + left * depth + b"1" + right * depth + b"}"
        if depth < 200:
            assert read_request(CompletionRequest, body, RULES)[2].headers
            continue
        with pytest.raises(ApiError) as caught:
            read_request(CompletionRequest, body, RULES)
        assert caught.value.status in (400, 413)


LONG: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETE, {"prompt": "x", "stop_token_ids": ["x"] * 100_000}, "stop_token_ids"),
    (COMPLETE, {"prompt": "x", "stop_token_ids": ["x"] * 1000}, "stop_token_ids"),
    (COMPLETE, {"prompt": "x", "stop": ["x"] * 100_000}, "stop"),
    (COMPLETE, {"prompt": "x", "stop": [5] * 10}, "stop"),
    (COMPLETE, {"prompt": "x", "logit_bias": {str(i): "x" for i in range(100_000)}}, "logit_bias"),
    (COMPLETE, {"prompt": "x", "metadata": {str(i): 0 for i in range(100_000)}}, "metadata"),
    *((COMPLETE, {"prompt": prompt}, "prompt")
      for prompt in (["x"] * 100_000, [None] * 100_000, [5] * 100_000, [[5] * 20_000] * 5)),
    (GENERATE, {"text": ["x"] * 100_000}, "text"),
    (GENERATE, {"text": ["x"] * 500, "sampling_params": {"n": 128}}, "n"),
    (GENERATE, {"text": ["x"] * 9, "sampling_params": [{}] * 100_000}, "sampling_params"),
    (GENERATE, {"text": "x", "rid": [5] * 100_000}, "rid"),
    *((CHAT, {"messages": messages}, "messages") for messages in (
        HELLO * 40_000, [0] * 100_000, [{"role": "user", "content": [0] * 100_000}],
        [{"role": "assistant", "tool_calls": [0] * 100_000}])),
    (CHAT, {"messages": HELLO, "tools": [0] * 100_000}, "tools"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(LONG)))
def test_lengths_are_checked_before_items(case):
    """One error, with little more memory than parsing needs."""
    path, body, param = LONG[case]
    data = json.dumps(body).encode()
    tracemalloc.start()
    try:
        Reading().parse(data)
        _, parsed = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        with pytest.raises(ApiError) as caught:
            read_request(KINDS[path], data, RULES)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.status == 400 and caught.value.param == param
    assert len(str(caught.value)) < 500
    assert peak < 2 * parsed + 2**20


def test_large_bodies_are_read_in_a_thread(server: Running, hang, monkeypatch):
    """Other requests are answered meanwhile."""
    threads: dict[int, str] = {}
    parse = Reading.parse

    def spy(reading, data):
        threads[len(data)] = threading.current_thread().name
        if len(data) > INLINE_BYTES:
            hang()
        return parse(reading, data)

    monkeypatch.setattr(Reading, "parse", spy)
    large = in_background(server.complete, ["x"] * 100_000)
    assert hang.began.wait(SECONDS)
    assert server.complete(max_tokens=1).status_code == 200
    hang.let_go.set()
    check_error(large.result(SECONDS), 400, "prompt", "100000 choices")
    small, big = (name for _, name in sorted(threads.items()))
    assert not small.startswith("specjax-parse") and big.startswith("specjax-parse")


# Random bodies: valid ones with a few members replaced.

ODD = (
    st.sampled_from(EDGES)
    | (st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20))
    | st.lists(st.integers(-2, 300) | st.text(max_size=3) | st.none(), max_size=5)
    | st.dictionaries(st.text(max_size=5), st.integers(-200, 200) | st.none(), max_size=3)
)
FEW = {"max_tokens": 2, "temperature": 0.5, "seed": 1}
VALID: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, **FEW},
    COMPLETE: {"prompt": ["a", "b"], **FEW},
    GENERATE: {"text": "a", "sampling_params": {"max_new_tokens": 2, "seed": 1}},
}
INNER = {
    "messages": ["role", "content", "name", "tool_calls", "tool_call_id", "refusal", "x"],
    "sampling_params": [*GenerateRequest.unsupported, "regex", "x"],
}


@st.composite
def bodies(draw, path: str) -> dict[str, Any]:
    kind = KINDS[path]
    names = [*kind.model_fields, *kind.unsupported, "unknown", ""]
    body = VALID[path] | draw(st.dictionaries(st.sampled_from(names), ODD, max_size=4))
    for name, inner in INNER.items():
        if name in body and draw(st.booleans()):
            changed = draw(st.dictionaries(st.sampled_from(inner), ODD, max_size=3))
            if isinstance(body[name], dict):
                body[name] = body[name] | changed
            elif isinstance(body[name], list) and body[name] and isinstance(body[name][0], dict):
                body[name] = [body[name][0] | changed]
    return body


@pytest.mark.parametrize("path", ALL)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=100)
def test_random_body_is_accepted_or_refused(path, data):
    """Up to the sequences that the engine would run."""
    error = refusal(path, data.draw(bodies(path)), shared_engine("NGRAM").intake)
    assert error is None or (error.status in (400, 404) and 0 < len(str(error)) < 1000)


@pytest.mark.parametrize(
    ("path", "every"), [(GENERATE, 20), *(pytest.param(path, 1, marks=pytest.mark.slow) for path in ALL)]
)
def test_accepted_bodies_are_answered(server: Running, path, every):
    """By the engine. Log-probabilities are left out, because they compile other programs."""
    changes: list[Any] = [{name: value} for name in KINDS[path].model_fields for value in EDGES]
    if path == GENERATE:
        sampling = VALID[path]["sampling_params"]
        changes += [{"sampling_params": sampling | {n: value}} for n in SamplingBody.model_fields for value in EDGES]
    candidates = [VALID[path] | change for change in changes if not {"logprobs", "return_logprob"} & {*change}]
    accepted = [body for body in candidates if refusal(path, body, server.engine.intake) is None]
    assert len(accepted) > 100
    with server.client() as client:
        for body in accepted[::every]:
            data = json.dumps(body).encode()
            response = client.post(path, content=data, headers={"Content-Type": "application/json"})
            assert response.status_code == 200, (body, response.text)
    server.wait_idle()


# FastAPI's `/openapi.json`.


def test_document_has_all_operations_and_errors():
    server = ServerSettings()
    openapi = make_app(Runner(lambda: shared_engine("NONE"), server), server, model="toy").openapi()
    operations = [operation for item in openapi["paths"].values() for operation in item.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(ids) == len(set(ids)) > 25
    assert all({"200", "4XX", "5XX"} == set(operation["responses"]) for operation in operations)
    schemas = openapi["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for path, kind in (("/metrics", "text/plain"), ("/", "text/html")):
        assert set(openapi["paths"][path]["get"]["responses"]["200"]["content"]) == {kind}
    for kind in (SamplingBody, FunctionTool):
        assert set(schemas[kind.__name__]["properties"]) == set(kind.model_fields)
