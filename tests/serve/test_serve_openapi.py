"""FastAPI's `/openapi.json`: every route, with the fields of its body; and HEAD beside every GET."""

from __future__ import annotations

import functools
from typing import Any

import jsonschema
import pytest
from body_helpers import CHAT, COMPLETE, GENERATE, HELLO, LEAST
from engine_helpers import shared_engine
from server_helpers import running

from specjax.cli.flags import ServerSettings
from specjax.cli.serve import make_app
from specjax.serve.control import PauseRequest, TokenizeRequest
from specjax.serve.dialects.anthropic import CountTokensRequest, MessagesRequest
from specjax.serve.dialects.responses import ResponsesRequest
from specjax.serve.openai_requests import ChatRequest, CompletionRequest
from specjax.serve.runner import Runner
from specjax.serve.sglang_generate import GenerateRequest, SamplingBody
from specjax.serve.tools import FunctionTool

BODIES: dict[str, tuple[type, dict[str, Any]]] = {
    CHAT: (ChatRequest, {"messages": HELLO}),
    COMPLETE: (CompletionRequest, {"prompt": ["a", "b"], "logprobs": 5}),
    GENERATE: (GenerateRequest, {"input_ids": [[5], [6]], "sampling_params": [{"top_k": 5}, {}]}),
    "/v1/responses": (ResponsesRequest, {"input": "hello", "text": {"format": {"type": "text"}}}),
    "/v1/messages": (MessagesRequest, {"messages": HELLO, "max_tokens": 5, "thinking": {"type": "disabled"}}),
    "/v1/messages/count_tokens": (CountTokensRequest, {"messages": HELLO}),
    "/tokenize": (TokenizeRequest, {"prompt": "a"}),
    "/pause_generation": (PauseRequest, {"mode": "retract"}),
}


@functools.cache
def document(**settings: Any) -> dict[str, Any]:
    server = ServerSettings(**settings)
    return make_app(Runner(lambda: shared_engine("NONE"), server), server, model="toy").openapi()


def validator(found: dict[str, Any], name: str) -> Any:
    return jsonschema.Draft202012Validator(found | {"$ref": f"#/components/schemas/{name}"})


def test_all_operations_have_the_errors_and_an_id():
    found = document()
    operations = [operation for item in found["paths"].values() for operation in item.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(ids) == len(set(ids)) > 25
    for operation in operations:
        assert {"200", "4XX", "5XX"} == set(operation["responses"])
    for schema in found["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    assert set(found["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}
    assert set(found["paths"]["/"]["get"]["responses"]["200"]["content"]) == {"text/html"}


@pytest.mark.parametrize("path", BODIES)
def test_bodies_are_described(path):
    kind, body = BODIES[path]
    found = document()
    operation = found["paths"][path]["post"]
    assert kind.__name__ in str(operation["requestBody"])
    assert operation["requestBody"].get("required", False) == (kind is not PauseRequest)
    streams = "stream" in kind.model_fields
    assert ("text/event-stream" in operation["responses"]["200"]["content"]) == streams
    assert set(found["components"]["schemas"][kind.__name__]["properties"]) == set(kind.model_fields)
    valid = validator(found, kind.__name__)
    assert valid.is_valid(body) and not valid.is_valid(5)
    assert "model" not in kind.model_fields or not valid.is_valid(body | {"model": 5})


def test_parts_of_bodies_are_described():
    schemas = document()["components"]["schemas"]
    for kind in (SamplingBody, FunctionTool):
        assert set(schemas[kind.__name__]["properties"]) == set(kind.model_fields)


def test_the_key_is_described():
    found = document(api_key=("key",))
    assert found["security"] and found["components"]["securitySchemes"]
    assert found["paths"]["/health"]["get"]["security"] == found["paths"]["/"]["get"]["security"] == []
    assert "security" not in document() and "securitySchemes" not in document()["components"]


def test_errors_have_the_form_that_is_documented():
    with running(shared_engine("NGRAM")) as server, server.client() as client:
        found = client.get("/openapi.json").json()
        assert found["openapi"].startswith("3.1")
        for refused in (client.post(CHAT, json={}), client.get("/nothing"), client.put(CHAT, json={})):
            validator(found, "ErrorAnswer").validate(refused.json())
        assert client.post(CHAT, json=LEAST[CHAT] | {"max_tokens": 2}).status_code == 200


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
        server.runner._state = type(server.runner.state).READY
