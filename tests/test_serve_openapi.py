"""`/openapi.json` says what the server does: no more, no less."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import jsonschema
import pytest
from body_helpers import CHAT, COMPLETE, EDGES, GENERATE, HELLO, KINDS, LEAST, RULES, STRICT, refusal
from engine_helpers import VOCABULARY, shared_engine
from server_helpers import running

from specjax.cli.flags import ServerSettings
from specjax.serve.anthropic_messages import CountTokensRequest, MessagesRequest
from specjax.serve.calls import Hermes
from specjax.serve.errors import ApiError
from specjax.serve.forms import PLAIN, AnswerForm
from specjax.serve.generate_request import LogprobFields, SamplingBody
from specjax.serve.openai_responses import ResponsesRequest
from specjax.serve.openapi import document, numbers_to
from specjax.serve.protocol import StreamOptions, read_request
from specjax.serve.structured import INVALID, JsonSchemaFormat, ResponseFormat, StructuredOutputs
from specjax.serve.task import Rules

NAMES = {CHAT: "ChatRequest", COMPLETE: "CompletionRequest", GENERATE: "GenerateRequest"}
LAYERS = {"/v1/responses": ResponsesRequest, "/v1/messages": MessagesRequest}


def described(rules: Rules = RULES, has_key: bool = False) -> dict[str, Any]:
    return document(rules, vocab_size=VOCABULARY, has_key=has_key, version="1")


def validator(name: str, rules: Rules = RULES) -> Any:
    """Of a component, in the dialect of OpenAPI 3.1."""
    schemas = described(rules)["components"]["schemas"]
    text = json.dumps(schemas | {"$ref": f"#/components/schemas/{name}"}).replace("#/components/schemas/", "#/$defs/")
    found = json.loads(text)
    return jsonschema.Draft202012Validator({"$ref": found.pop("$ref"), "$defs": found})


def every(value: Any, name: str) -> list[Any]:
    """The values of all members of that name."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = [value[name]] if isinstance(value, dict) and name in value else []
    return own + [found for each in inner for found in every(each, name)]


@pytest.mark.parametrize("rules", [RULES, STRICT], ids=["lenient", "strict"])
def test_every_reference_leads_somewhere(rules):
    found = described(rules)
    schemas = found["components"]["schemas"]
    references = [each for each in every(found, "$ref") if isinstance(each, str)]
    assert references and {each.removeprefix("#/components/schemas/") for each in references} == set(schemas)
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    assert not every(found, "$defs")


def test_operations_are_complete():
    found = described(has_key=True)
    operations = [(path, method, each) for path, item in found["paths"].items() for method, each in item.items()]
    operations = [each for each in operations if each[1] != "parameters"]
    ids = [operation["operationId"] for _, _, operation in operations]
    assert len(ids) == len(set(ids)) == 43
    for path, method, operation in operations:
        responses = operation["responses"]
        assert {"200", "413", "503"} <= set(responses) and ("401" in responses) == (path not in ("/health", "/"))
        assert "Retry-After" in responses["503"]["headers"]
        assert (method == "head") != ("content" in responses["200"])
        if "requestBody" in operation:
            assert {"400", "401", "413", "415", "500", "503"} <= set(responses)
            streams = {"text/event-stream"} if path in (*KINDS, *LAYERS) else set()
            assert set(responses["200"]["content"]) == {"application/json"} | streams
    assert found["security"]
    assert found["paths"]["/health"]["get"]["security"] == found["paths"]["/"]["get"]["security"] == []
    assert set(found["paths"]["/"]["get"]["responses"]["200"]["content"]) == {"text/html"}
    assert "security" not in described() and "securitySchemes" not in described()["components"]


@pytest.mark.parametrize("path", KINDS)
def test_the_schema_has_the_fields_that_the_server_knows(path):
    schemas = described()["components"]["schemas"]
    inner = (SamplingBody, StreamOptions, ResponseFormat, JsonSchemaFormat, StructuredOutputs)
    for name, kind in ({NAMES[path]: KINDS[path]} | {kind.__name__: kind for kind in inner}).items():
        assert set(schemas[name]["properties"]) == {*kind.model_fields, *kind.unsupported, *kind.elsewhere}


def agree(valid: bool, error: ApiError | None) -> bool:
    """The document names what a schema cannot say: what fits the context, least against most new tokens, whose message
    is the last, and whether a grammar is right."""
    between = error is not None and (
        error.code in ("context_length_exceeded", INVALID)
        or error.param in ("min_tokens", "min_new_tokens", "continue_final_message")
    )
    return valid == (error is None) or (valid and between)


@pytest.mark.parametrize("path", KINDS)
def test_the_schema_allows_what_the_server_takes(path):
    """Each field at its edges, up to the sequences that the engine would run."""
    intake, valid = shared_engine("NGRAM").intake, validator(NAMES[path])
    names = [*KINDS[path].model_fields, *KINDS[path].unsupported, *KINDS[path].elsewhere, "unknown"]
    changes = [{name: value} for name in names for value in EDGES]
    changes += [{"stream": True, "stream_options": value} for value in EDGES]
    if path == GENERATE:
        changes = [change for change in changes if "text" not in change] + [
            {"sampling_params": {name: value}} for name in SamplingBody.model_fields for value in EDGES
        ]
    both = checked = 0
    for change in changes:
        body = LEAST[path] | change
        error = refusal(path, body, intake)
        if any(isinstance(change.get(name), list) for name in ("sampling_params", "rid", *LogprobFields.model_fields)):
            continue  # a schema cannot tie the length of one list to that of another
        assert agree(valid.is_valid(body), error), (change, str(error))
        checked += 1
        both += error is None
    assert checked > both > 200


@pytest.mark.parametrize(
    ("path", "least"),
    [
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}),
    ],
)
def test_the_schemas_of_the_layers_allow_what_the_server_takes(path, least):
    kind, intake = LAYERS[path], shared_engine("NGRAM").intake
    valid, both = validator(kind.__name__), 0
    for name in [*kind.model_fields, *kind.unsupported, *kind.elsewhere, "unknown"]:
        for value in EDGES:
            body, error = least | {name: value}, None
            try:
                read_request(kind, json.dumps(body).encode(), RULES)[1].sequences(intake, "r")
            except ApiError as found:
                error = found
            assert agree(valid.is_valid(body), error), (name, value, str(error))
            both += error is None
    assert both > 200
    count = validator("CountTokensRequest")
    assert set(CountTokensRequest.model_fields) and count.is_valid({"messages": [{"role": "user", "content": "x"}]})


def function(**changes: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f"} | changes}]


TOOL_EDGES: list[dict[str, Any]] = [
    *({"tools": tools} for tools in (
        None, [], {}, "", [1], [{}], [{"type": "function"}], [{"type": "custom", "custom": {}}], function(),
        function(name=""), function(name="x" * 64), function(name="x" * 65), function(name="a b"),
        function(name="a-_9"), function(name=None), function(name="ä"), function(description=None),
        function(description=1), function(parameters=None), function(parameters={}),
        function(parameters={"type": "object"}),
        function(parameters={"type": "array"}), function(parameters={"type": None}), function(parameters=[]),
        function(parameters={"properties": []}), function(parameters={"properties": {"a": 1}}),
        function(parameters={"required": ["a"]}), function(parameters={"required": [1]}), function(strict=False),
        function(strict="no"), function(more=1), [{**function()[0], "more": 1}],
        [function(name=f"f{i}")[0] for i in range(128)], [function(name=f"f{i}")[0] for i in range(129)],
    )),
    *(fields | {"tool_choice": choice} for fields in ({}, {"tools": []}, {"tools": function()}) for choice in (
        None, "none", "auto", "required", "any", 1, {}, {"type": "function"}, {"type": "function", "function": {}},
        {"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": ""}},
        {"type": "auto"}, {"type": "allowed_tools", "function": {"name": "f"}},
    )),
    *({"parallel_tool_calls": value} for value in (None, True, False, 1)),
    *({"messages": [{"role": role, "content": "x", "reasoning_content": said}]}
      for role in ("user", "assistant") for said in (None, "", "x", 1)),
]  # fmt: skip


@pytest.mark.parametrize("form", [PLAIN, AnswerForm(Hermes, takes_tools=True)], ids=["no functions", "functions"])
def test_the_schema_allows_the_functions_that_the_server_takes(form):
    rules = dataclasses.replace(RULES, form=form)
    valid, both = validator("ChatRequest", rules), 0
    for change in TOOL_EDGES:
        body = LEAST[CHAT] | change
        error = refusal(CHAT, body, rules=rules)
        assert valid.is_valid(body) == (error is None), (change, str(error))
        both += error is None
    assert len(TOOL_EDGES) > both > 15


def test_either_text_or_input_ids():
    valid = validator("GenerateRequest")
    for value in EDGES:
        for body in ({"text": value}, {"input_ids": value}, {"text": "x", "input_ids": value}):
            error = refusal(GENERATE, body, shared_engine("NGRAM").intake)
            assert agree(valid.is_valid(body), error), (body, str(error))


@pytest.mark.parametrize("path", KINDS)
def test_strict_fields_are_in_the_schema(path):
    for body in (LEAST[path] | {"unknown": 1}, LEAST[path] | {"stream_options": {"x": 1}, "stream": True}):
        assert validator(NAMES[path]).is_valid(body) == (refusal(path, body) is None)
        assert not validator(NAMES[path], STRICT).is_valid(body) and refusal(path, body, rules=STRICT)
    assert validator(NAMES[path], STRICT).is_valid(LEAST[path])


@pytest.mark.parametrize("last", [0, 5, 9, 10, 11, 99, 100, 264, 1000, 49151])
def test_a_pattern_for_the_numbers_up_to_one(last):
    pattern = re.compile(numbers_to(last))
    for number in [*range(min(last, 2000) + 1), *range(max(last - 1200, 0), last + 1200)]:
        assert bool(pattern.fullmatch(str(number))) == (number <= last)
    assert not any(map(pattern.fullmatch, ("00", "01", "", "-0", "1x")))


def test_answers_have_the_form_that_is_documented():
    with running(shared_engine("NGRAM"), ServerSettings(api_key=("key",))) as server:
        headers = {"Authorization": "Bearer key"}
        with server.client(headers=headers) as client:
            found = client.get("/openapi.json").json()
            assert found["openapi"].startswith("3.1") and found["components"]["securitySchemes"]
            answers = {
                "ChatCompletion": client.post(
                    CHAT, json=LEAST[CHAT] | {"max_tokens": 2, "n": 2, "return_speculative_tokens": True}
                ),
                "Completion": client.post(
                    COMPLETE,
                    json=LEAST[COMPLETE]
                    | {"max_tokens": 2, "return_speculative_metrics": True, "echo": True, "logprobs": 1},
                ),
                "GenerateAnswer": client.post(
                    GENERATE, json=LEAST[GENERATE] | {"return_logprob": True, "logprob_start_len": 0}
                ),
                "Response": client.post("/v1/responses", json={"input": "x", "max_output_tokens": 2}),
                "AnthropicAnswer": client.post("/v1/messages", json={"messages": HELLO, "max_tokens": 2}),
                "TokenCount": client.post("/v1/messages/count_tokens", json={"messages": HELLO}),
                "ModelList": client.get("/v1/models"),
                "Model": client.get("/v1/models/toy"),
                "ModelInfo": client.get("/model_info"),
                "Health": client.get("/health"),
                "Success": client.post("/flush_cache"),
                "ServerInfo": client.get("/server_info"),
                "Loads": client.get("/v1/loads"),
                "RankLoads": client.get("/get_load"),
                "Tokens": client.post("/tokenize", json={"prompt": ["a", "b"]}),
                "Texts": client.post("/detokenize", json={"tokens": [5, 6]}),
            }
            for name, answer in answers.items():
                assert answer.status_code == 200, (name, answer.text)
                validator(name).validate(answer.json())
            for refused in (client.post(CHAT, json={}), client.get("/nothing"), client.put(CHAT, json={})):
                validator("Error").validate(refused.json())


def test_head_is_get_without_a_body():
    with running(shared_engine("NGRAM")) as server, server.client() as client:
        paths = (
            "/",
            "/health",
            "/v1/models",
            "/v1/models/toy",
            "/get_model_info",
            "/model_info",
            "/openapi.json",
            "/docs",
        )
        for path in paths:
            got, head = client.get(path), client.head(path)
            assert (head.status_code, head.content) == (200, b""), path
            assert head.headers["content-length"] == got.headers["content-length"]
            assert head.headers["content-type"] == got.headers["content-type"] and head.headers["x-request-id"]
        assert client.head("/v1/models/other").status_code == 404 and client.head("/nothing").content == b""
        refused = client.head(CHAT)
        assert refused.status_code == 405 and refused.headers["allow"] == "POST" and refused.content == b""
        server.runner.drain()
        assert client.head("/health").status_code == 503
        server.runner.state = type(server.runner.state).READY
