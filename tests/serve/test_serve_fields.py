"""The fields of a request: which pass, which are ignored, which are refused, and what the others ask of the engine."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from body_helpers import CHAT, COMPLETE, GENERATE, HELLO, RULES, STRICT, read_request
from engine_helpers import make_engine, shared_engine, tokenizer, toy
from server_helpers import Running, running

from specjax.cli.flags import ServerSettings
from specjax.engine import Completion, SamplingParams, StreamChunk
from specjax.engine.sampling_params import GENERATED_SEEDS, later_seed
from specjax.engine.sequence import TokenLogprob
from specjax.serve import fields
from specjax.serve.errors import ApiError, shown
from specjax.serve.fields import IGNORED_HEADER, MAX_NAMED, Reading
from specjax.serve.openai_answers import TokenNames
from specjax.serve.openai_requests import ChatRequest, CompletionRequest, Message
from specjax.serve.sglang_generate import GenerateAnswer, GenerateRequest, generate_logprobs
from specjax.serve.tokenising import Rules, Task

LEAST: dict[type, dict[str, Any]] = {
    ChatRequest: {"messages": HELLO},
    CompletionRequest: {"prompt": "x"},
    GenerateRequest: {"text": "x"},
}
KINDS = list(LEAST)


def task(kind: type, *, rules: Rules = RULES, **given: Any) -> Task:
    return read_request(kind, json.dumps(LEAST[kind] | given).encode(), rules)[1]


def params(kind: type, *, rules: Rules = RULES, **given: Any) -> SamplingParams:
    given = {"sampling_params": given} if kind is GenerateRequest else given
    return task(kind, rules=rules, **given).sampling[0]


def refused(kind: type, *, rules: Rules = RULES, **given: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        task(kind, rules=rules, **given)
    assert 400 <= caught.value.status < 500
    return caught.value


@pytest.fixture(scope="module")
def server():
    with running(shared_engine("NGRAM")) as served:
        yield served


# Harmless values.

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


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (ChatRequest, CHAT_DEFAULTS),
        (ChatRequest, VLLM_DEFAULTS),
        (ChatRequest, SGLANG_DEFAULTS),
        (CompletionRequest, COMPLETION_DEFAULTS),
        (CompletionRequest, VLLM_DEFAULTS),
        (GenerateRequest, SGLANG_DEFAULTS | {"logprob_start_len": -1, "modalities": None}),
    ],
)
def test_defaults_pass_even_strictly(kind, given, alone):
    expected = task(kind)
    for one in [{name: value} for name, value in given.items()] if alone else [given]:
        assert task(kind, rules=STRICT, **one) == expected, one


@pytest.mark.parametrize("kind", KINDS)
def test_every_neutral_value_of_an_unsupported_field_passes(kind):
    for name, harmless in kind.unsupported.items():
        for value in (None, *harmless):
            if name == "best_of":
                continue
            assert task(kind, **{name: value}) == task(kind), name


def test_null_members_of_an_object_count_as_absent():
    assert task(ChatRequest, response_format={"type": "text", "json_schema": None}) == task(ChatRequest)


@pytest.mark.parametrize(("value", "expected"), [(0, -1), (-1, -1), (None, -1), (7, 7), (10**30, 10**30)])
@pytest.mark.parametrize("kind", KINDS)
def test_top_k(kind, value, expected):
    assert params(kind, top_k=value).top_k == expected


def test_a_repetition_penalty_is_above_zero():
    assert params(ChatRequest, repetition_penalty=5e-324).repetition_penalty == 5e-324
    assert refused(ChatRequest, repetition_penalty=0).param == "repetition_penalty"


@pytest.mark.parametrize("kind", KINDS)
def test_whole_floats_are_integers(kind):
    assert params(kind, seed=7.0, top_k=3.0, stop_token_ids=[5.0, 6]) == params(
        kind, seed=7, top_k=3, stop_token_ids=[5, 6]
    )
    assert refused(CompletionRequest, n=1.5).param == "n"
    assert (
        task(CompletionRequest, prompt=[5.0, 6]).prompts
        == task(CompletionRequest, prompt=[[5, 6.0]]).prompts
        == [[5, 6]]
    )


# Names of other servers.


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_seed_is_the_seed(kind):
    assert params(kind, sampling_seed=7).seed == params(kind, seed=7, sampling_seed=7).seed == 7
    given = {"seed": 7, "sampling_seed": 8}
    given = {"sampling_params": given} if kind is GenerateRequest else given
    assert refused(kind, **given).param == "sampling_seed"
    given = {"sampling_seed": 2**63}
    given = {"sampling_params": given} if kind is GenerateRequest else given
    error = refused(kind, **given)
    assert error.param == ("sampling_params" if kind is GenerateRequest else "sampling_seed")
    assert "sampling_seed must be from" in str(error)


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_model_default_is_the_model(kind):
    for name in ("default", "toy", None):
        assert task(kind, model=name)
    assert refused(kind, model="gpt").status == 404


@pytest.mark.parametrize("kind", KINDS)
def test_cache_salt(kind):
    assert task(kind, cache_salt="mine").sampling[0].cache_salt == "mine"
    assert task(kind, cache_salt=None).sampling[0].cache_salt is None
    for wrong in ("", "x" * 257, 5, ["a"]):
        assert refused(kind, cache_salt=wrong).param == "cache_salt"
    assert refused(GenerateRequest, sampling_params={"cache_salt": "x"})


def test_max_tokens_is_checked_where_it_has_no_effect():
    assert task(ChatRequest, max_tokens=127, max_completion_tokens=5).sampling[0].max_new_tokens == 5
    for wrong in (0, -1, 128, 10**30):
        assert refused(ChatRequest, max_tokens=wrong, max_completion_tokens=5).param == "max_tokens"


def test_rid_of_a_batch_is_made_from_one_name():
    assert task(GenerateRequest, text=["a", "b"], rid="r").ids == ["r_0", "r_1"]


# Defaults of the model.


@pytest.mark.parametrize("kind", KINDS)
def test_the_models_defaults_stand_below_the_requests_and_above_the_protocols(kind):
    rules = Rules("toy", 516, 128, 127, {"temperature": 0.25, "top_p": 0.9, "top_k": 40})
    found = params(kind, rules=rules, top_p=0.5, temperature=None)
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.25, 0.5, 40, 0.0)
    assert params(kind).temperature == 1.0
    assert params(kind, rules=rules, top_k=0, temperature=0).top_k == -1, "0 is given, and switches it off"


@pytest.mark.parametrize("path", [CHAT, COMPLETE, GENERATE])
def test_the_server_uses_its_engines_defaults(server: Running, monkeypatch, path):
    monkeypatch.setattr(server.engine, "sampling_defaults", {"temperature": 0.0})
    body = {CHAT: {"messages": HELLO}, COMPLETE: {"prompt": "hello"}, GENERATE: {"text": "hello"}}[path]
    few = {"sampling_params": {"max_new_tokens": 8}} if path == GENERATE else {"max_tokens": 8}

    def text() -> str:
        answer = server.post(path, body | few).json()
        return answer["text"] if path == GENERATE else str(answer["choices"][0])

    assert text().partition("seed")[0] == text().partition("seed")[0], "greedy"


# Unknown fields.

UNKNOWN: dict[str, tuple[type, dict[str, Any], str]] = {
    "top": (ChatRequest, {"beam_width": 5}, "beam_width"),
    "null": (CompletionRequest, {"beam_width": None}, "beam_width"),
    "options": (ChatRequest, {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    "message": (ChatRequest, {"messages": [*HELLO, HELLO[0] | {"weight": 1}]}, "messages[].weight"),
    "part": (
        ChatRequest,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}]},
        "messages[].content[].cache_control",
    ),
    "generate": (GenerateRequest, {"routed_dp_rank": 3}, "routed_dp_rank"),
    "sampling": (GenerateRequest, {"sampling_params": {"foo": 1}}, "sampling_params.foo"),
    "sampling list": (
        GenerateRequest,
        {"text": ["a", "b"], "sampling_params": [{}, {"foo": 1}]},
        "sampling_params[].foo",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_unknown_fields_are_named_or_with_strict_fields_refused(case):
    kind, given, name = UNKNOWN[case]
    reading = read_request(kind, json.dumps(LEAST[kind] | given).encode(), RULES)[2]
    assert reading.headers == {IGNORED_HEADER: name}
    error = refused(kind, rules=STRICT, **given)
    assert error.code == "unknown_field" and name.rpartition(".")[2] in str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_fields_set_no_parameter(kind):
    """Not even if `SamplingParams`, or the class of the body, has an attribute of the name."""
    unknown = {"kept_special_tokens": ["x"], "origins": True, "task": 1, "names": {"a": "b"}, "model_extra": 5}
    assert task(kind, **unknown) == task(kind)
    assert task(GenerateRequest, sampling_params=unknown) == task(GenerateRequest)


def test_ignored_fields_make_a_short_and_safe_header():
    names = ["a b", "x\r\nSet-Cookie: y=1", "é😀", "", "," * 500, *(f"f{i}" for i in range(1000))]
    reading = Reading()
    for name in names:
        reading.ignore(name)
    (header,) = reading.headers.values()
    assert header.isascii() and header.isprintable() and len(header) < 4096
    shown_names = header.split(", ")
    assert shown_names[:4] == ["a%20b", "x%0D%0ASet-Cookie%3A%20y%3D1", "%C3%A9%F0%9F%98%80", '""']
    assert len(shown_names) == MAX_NAMED + 1 and shown_names[-1] == "..."
    assert Reading().headers == {}


@pytest.mark.parametrize("path", [CHAT, COMPLETE, GENERATE])
@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_and_the_log_name_ignored_fields(server: Running, path, stream, caplog):
    few = {"sampling_params": {"max_new_tokens": 1, "": 1}} if path == GENERATE else {"max_tokens": 1, "": 1}
    least = {CHAT: {"messages": HELLO}, COMPLETE: {"prompt": "x"}, GENERATE: {"text": "x"}}[path]
    with caplog.at_level("WARNING", logger="specjax.serve"):
        answer = server.post(path, least | few | {"stream": stream, "bogus\n": "secret-value"})
    assert answer.status_code == 200 and "bogus%0A" in answer.headers[IGNORED_HEADER]
    (line,) = [record.getMessage() for record in caplog.records if "ignored fields" in record.getMessage()]
    assert "bogus%0A" in line and "secret-value" not in caplog.text
    few = {"sampling_params": {"max_new_tokens": 1}} if path == GENERATE else {"max_tokens": 1}
    assert IGNORED_HEADER not in server.post(path, least | few).headers


# Fields that would change the text.

CHANGES = {
    "json_schema": "{}", "structural_tag": "{}", "guided_whitespace_pattern": " ", "grammar": "root",
    "lora_path": "x", "bad_words": ["a"], "allowed_token_ids": [5], "truncate_prompt_tokens": 5,
    "use_beam_search": True, "length_penalty": 2, "prompt_embeds": "x", "input_embeds": [[0.5]], "image_data": "x",
    "custom_logit_processor": "x", "return_hidden_states": True,
    "tools": [{"type": "function"}], "tool_choice": "required", "speculate": False, "best_of": 2, "suffix": "x",
    "include_stop_str_in_output": True,
}  # fmt: skip
CHAT_CHANGES = {
    "chat_template": "x", "documents": [{"text": "x"}], "verbosity": "high", "reasoning_effort": "high",
    "modalities": ["audio"], "prompt": "x", "text": "x", "input_ids": [5], "max_new_tokens": 5, "echo": True,
    "sampling_params": {"temperature": 0}, "function_call": {"name": "f"}, "web_search_options": {},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_known_fields_that_would_change_the_text_are_refused(kind):
    more = {
        ChatRequest: CHAT_CHANGES,
        CompletionRequest: {"messages": HELLO, "max_new_tokens": 5, "max_completion_tokens": 5, "top_logprobs": 2},
        GenerateRequest: {"temperature": 0, "max_tokens": 5, "prompt": "x", "messages": HELLO, "n": 2, "stop": "x"},
    }[kind]
    for name, value in (CHANGES | more).items():
        assert refused(kind, **{name: value}).param == name, name


def test_known_fields_inside_sampling_params_are_refused():
    for name, value in {"structural_tag": "a", "max_tokens": 5, "use_beam_search": True}.items():
        error = refused(GenerateRequest, sampling_params={name: value})
        assert name in str(error) and error.param == "sampling_params"
    assert refused(ChatRequest, stream=True, stream_options={"include_obfuscation": True}).param == "stream_options"


def test_parts_of_messages():
    for name, harmless in Message.unsupported.items():
        for value in (None, *harmless):
            assert task(ChatRequest, messages=[HELLO[0] | {name: value}]) == task(ChatRequest)
        assert refused(ChatRequest, messages=[HELLO[0] | {name: "something"}]).param == "messages"
    for calls in ({}, "", 0, False):
        assert refused(ChatRequest, messages=[{"role": "assistant", "content": "x", "tool_calls": calls}])


@pytest.mark.parametrize(
    ("said", "passed"), [('{"x": 1}', {"x": 1}), ({"x": 1}, {"x": 1}), ("", {}), (None, {}), ("{", "{"), ("[1]", "[1]")]
)
def test_arguments_of_a_call(said, passed):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": said}}
    (prompt,) = task(
        ChatRequest, messages=[*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    ).prompts
    assert prompt[1]["tool_calls"][0]["function"]["arguments"] == passed


# Answers.


LOGPROBS = (
    TokenLogprob(70, "a", -0.5, ((70, -0.5), (71, -1.0))),
    TokenLogprob(71, "b", -1.0, ((71, -1.0), (9, -math.inf))),
)


def test_the_texts_of_log_probabilities():
    """Those of single tokens, as SGLang has them; JSON has no infinity."""
    names = TokenNames(tokenizer())
    found = generate_logprobs(LOGPROBS, names)
    a, b, c = (tokenizer().decode([token]) for token in (70, 71, 9))
    assert found["output_token_logprobs"] == [[-0.5, 70, a], [-1.0, 71, b]]
    assert found["output_top_logprobs"] == [[[-0.5, 70, a], [-1.0, 71, b]], [[-1.0, 71, b], [-9999.0, 9, c]]]
    assert generate_logprobs(LOGPROBS, None)["output_token_logprobs"] == [[-0.5, 70, None], [-1.0, 71, None]]
    assert read_request(GenerateRequest, b'{"text": "x", "return_text_in_logprobs": true}', RULES)[
        0
    ].return_text_in_logprobs


def test_incremental_streams_of_generate_are_disjoint():
    body = {"text": ["hello", "other"], "sampling_params": {"max_new_tokens": 12, "temperature": 0}}
    with running(shared_engine("NONE"), ServerSettings(incremental_streaming_output=True)) as server:
        whole = server.post(GENERATE, body).json()
        events = server.events(GENERATE, body)
    for index, expected in enumerate(whole):
        own = [event for event in events if event["index"] == index]
        assert len(own) > 2 and max(len(event["output_ids"]) for event in own) < 12
        assert "".join(event["text"] for event in own) == expected["text"]
        assert [token for event in own for token in event["output_ids"]] == expected["output_ids"]
        counts = [event["meta_info"]["completion_tokens"] for event in own]
        assert counts == sorted(counts) and counts[-1] == 12
        endings = [event["meta_info"]["finish_reason"] for event in own]
        assert endings == [None] * (len(own) - 1) + [expected["meta_info"]["finish_reason"]]


def test_log_probabilities_of_a_stream_are_those_so_far():
    reason = {"type": "length", "length": 2}
    done = Completion("r", "ab", [70, 71], 1, reason, 1, 1.0, [1, 0], 7, logprobs=list(LOGPROBS))
    answer = GenerateAnswer(
        2, False, ["r"], [1], thoughts=lambda index, output: 0, scored=[True], names=TokenNames(tokenizer())
    )
    chunks = [StreamChunk(0, "", [70], None, ()), StreamChunk(0, "a", [], None, LOGPROBS[:1])]
    events = [event for chunk in chunks for event in answer.events(chunk)]
    events += answer.events(StreamChunk(0, "b", [71], done, LOGPROBS[1:]))
    none, first, last = (json.loads(event.removeprefix(b"data: "))["meta_info"] for event in events)
    whole = answer.whole([done])["meta_info"]
    for name in ("output_token_logprobs", "output_top_logprobs"):
        assert none[name] == [] and first[name] == whole[name][:1] and last[name] == whole[name]


def test_incremental_log_probabilities_are_disjoint():
    reason = {"type": "length", "length": 2}
    done = Completion("r", "ab", [70, 71], 1, reason, 1, 1.0, [1, 0], 7, logprobs=list(LOGPROBS))
    answer = GenerateAnswer(
        2, False, ["r"], [1], thoughts=lambda index, output: 0, incremental=True, names=TokenNames(tokenizer())
    )
    events = answer.events(StreamChunk(0, "a", [70], None, LOGPROBS[:1]))
    events += answer.events(StreamChunk(0, "b", [71], done, LOGPROBS[1:]))
    first, last = (json.loads(event.removeprefix(b"data: "))["meta_info"] for event in events)
    whole = answer.whole([done])["meta_info"]
    for name in ("output_token_logprobs", "output_top_logprobs"):
        assert [*first[name], *last[name]] == whole[name] and len(first[name]) == 1


def test_generated_seeds_are_exact_in_json():
    limit = 2**53
    assert 0 < later_seed(GENERATED_SEEDS - 1, 127) < limit
    engine = make_engine(toy(), warm=False, random_seed=3)
    assert isinstance(engine.intake.seeds, random.Random)
    seeds = [engine.intake.sequence("a", SamplingParams(max_new_tokens=1)).request.seed for _ in range(200)]
    assert max(seeds) > 2**50 and all(later_seed(seed, 127) < limit for seed in seeds)
    own = 2**63 - 1
    assert engine.intake.sequence("a", SamplingParams(max_new_tokens=1, seed=own)).request.seed == own


# Messages.


def test_values_in_messages_are_short_whatever_they_are():
    huge = [[{str(i): "x" * 1000 for i in range(1000)}]] * 1000
    for value in (huge, "x" * 10**6, 10**4000, {"a": huge}, [None] * 10**6, float("nan")):
        assert len(shown(value)) <= 60
    assert shown([1, 2]) == "[1, 2]" and shown({"a": None}) == "{'a': null}"
    assert [shown(each) for each in (True, False, math.nan, -math.inf, 0.5)] == [
        "true", "false", "NaN", "-Infinity", "0.5",
    ]  # fmt: skip


def test_one_rule_names_no_field_twice():
    """A field is supported, or not, or elsewhere."""
    for kind in (*KINDS, fields.Body):
        assert not set(kind.model_fields) & set(kind.elsewhere)
        assert not set(kind.unsupported) & set(kind.elsewhere)
