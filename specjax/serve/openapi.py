"""The OpenAPI 3.1 document at `/openapi.json`: paths, statuses and security. `specjax.serve.schemas` has the bodies."""

from __future__ import annotations

from typing import Any

from specjax.serve import schemas
from specjax.serve.fields import IGNORED_HEADER
from specjax.serve.schemas import Schema, reference
from specjax.serve.task import Rules

ABOUT = """\
Speculative decoding for JAX, behind OpenAI's interface and SGLang's `/generate`.

**One rule for the fields of a request.** A field that is listed works, or is refused by name with a 400. The same holds
for fields of OpenAI, SGLang and vLLM that would change the text or the answer and are not supported: only the values
that ask for nothing pass, null always. {unknown}

**What a schema cannot say**, and gets a 400: a prompt and its new tokens must fit the context together; `min_tokens` is
at most `max_tokens`, and works with at most 8 stop ids; prompts times `n` is at most the number of requests that may
run or wait; `seed` and `sampling_seed` agree; lists of `sampling_params` and `rid` have one item for each prompt, names
differ, and `n` is the same in all.

**Parameters that a request does not give** are those of the model's `generation_config.json`, where the server uses it,
else OpenAI's.

**Limits.** A body has at most {values} JSON values, {nodes} of them lists, objects or members of objects.
"""

IGNORED = f"Unknown fields are ignored; the header `{IGNORED_HEADER}` of the answer names them."
REFUSED = "Unknown fields are refused, too (`--strict-fields`)."

STATUSES = {
    400: "The request is not valid; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large, or holds too many values.",
    415: "The body is not sent as `application/json`.",
    500: "The request failed.",
    503: "The server is loading, full or shutting down; try again after `Retry-After` seconds.",
}

REQUEST_ID: dict[str, Schema] = {
    "X-Request-Id": {"required": True, "schema": {"type": "string"}, "description": "The client's, or a new one."}
}
FURTHER_HEADERS: dict[int, dict[str, Schema]] = {
    401: {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}},
    503: {"Retry-After": {"required": True, "schema": {"type": "integer", "minimum": 0}, "description": "Seconds."}},
}


def document(rules: Rules, *, vocab_size: int, has_key: bool, version: str) -> dict[str, Any]:
    """The whole document for one model, whose vocabulary and context are limits of it."""
    about = ABOUT.format(
        unknown=REFUSED if rules.strict else IGNORED, values=f"{schemas.MAX_VALUES:,}", nodes=f"{schemas.MAX_NODES:,}"
    )
    paths = _Paths(has_key)
    components: dict[str, Any] = {"schemas": schemas.components(rules, vocab_size)}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "specjax", "version": version, "description": about, "license": {"name": "Apache-2.0"}},
        "servers": [{"url": "/"}],
        "tags": [{"name": name} for name in ("OpenAI", "SGLang", "server")],
        "paths": paths.all(),
        "components": components,
    }
    if has_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": "`--api-key`"}}
        found["security"] = [{"key": []}]
    return found


class _Paths:
    def __init__(self, has_key: bool) -> None:
        self._has_key = has_key

    def all(self) -> dict[str, Any]:
        def generate(method: str) -> Schema:
            return self._post(f"generate_{method}", "SGLang", "Continue prompts", "GenerateRequest", "GenerateAnswer")

        def flush(method: str) -> Schema:
            return self._operation(f"flush_cache_{method}", "SGLang", "Forget cached text", "Success", 400, 500)

        def info(name: str) -> Schema:
            return self._operation(name, "SGLang", "What is served, and how", "ModelInfo")

        models = self._operation("list_models", "OpenAI", "The model that is served", "ModelList")
        model = self._operation("retrieve_model", "OpenAI", "One model", "Model", 404)
        name: Schema = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        health = self._operation("health", "server", "Whether requests are taken", "Health")
        if self._has_key:
            health["security"] = []
            health["responses"].pop("401")
        chat = self._post("chat_completions", "OpenAI", "Answer a chat", "ChatRequest", "ChatCompletion", 404)
        text = self._post("completions", "OpenAI", "Continue prompts", "CompletionRequest", "Completion", 404)
        return {
            "/v1/chat/completions": {"post": chat},
            "/v1/completions": {"post": text},
            "/generate": {"post": generate("post"), "put": generate("put")},
            "/v1/models": _with_head({"get": models}),
            "/v1/models/{name}": _with_head({"get": model}) | {"parameters": [name]},
            "/get_model_info": _with_head({"get": info("get_model_info")}),
            "/model_info": _with_head({"get": info("model_info")}),
            "/flush_cache": _with_head({"get": flush("get"), "post": flush("post")}),
            "/health": _with_head({"get": health}),
        }

    def _post(self, id: str, tag: str, summary: str, body: str, answer: str, *statuses: int) -> Schema:
        found = self._operation(id, tag, summary, answer, 400, 408, 415, 500, *statuses)
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference(body)}}}
        done = found["responses"]["200"]
        events = "Server-sent events, if `stream` is true: each one line of JSON after `data: `; the last is `[DONE]`."
        done["content"]["text/event-stream"] = {"schema": {"description": events}}
        done["headers"] = done["headers"] | {
            IGNORED_HEADER: {"schema": {"type": "string"}, "description": "Fields of the request without effect."}
        }
        return found

    def _operation(self, id: str, tag: str, summary: str, answer: str, *statuses: int) -> Schema:
        always = (413, 503, *((401,) if self._has_key else ()))
        responses: dict[str, Any] = {"200": _response("Done.", answer, 200)}
        for status in sorted({*statuses, *always}):
            responses[str(status)] = _response(STATUSES[status], "Error", status)
        return {"operationId": id, "tags": [tag], "summary": summary, "responses": responses}


def _response(about: str, schema: str, status: int) -> Schema:
    return {
        "description": about,
        "headers": REQUEST_ID | FURTHER_HEADERS.get(status, {}),
        "content": {"application/json": {"schema": reference(schema)}},
    }


def _with_head(methods: dict[str, Schema]) -> dict[str, Schema]:
    """HEAD beside GET: the same without bodies."""
    get = methods["get"]
    responses = {
        status: {"description": r["description"], "headers": r["headers"]} for status, r in get["responses"].items()
    }
    head = {key: value for key, value in get.items() if key != "responses"}
    return methods | {"head": head | {"operationId": f"{get['operationId']}_head", "responses": responses}}
