"""The OpenAPI 3.1 document at `/openapi.json`, made of the types of request and response bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import models_json_schema

from specjax.serve.fields import IGNORED_HEADER, Schema
from specjax.serve.json_body import MAX_NODES, MAX_VALUES
from specjax.serve.protocol import DEFAULT_MODEL, ChatRequest, CompletionRequest, GenerateRequest, SamplingBody
from specjax.serve.task import Rules

ABOUT = """\
Speculative decoding for JAX, behind OpenAI's interface and SGLang's `/generate`.

**One rule for the fields of a request.** A field that is listed works, or is refused by name with a 400. The same holds
for fields of OpenAI, SGLang and vLLM that would change the text or the answer and are not supported: only the values
that change nothing pass, null always. {unknown}

**Rules that a schema cannot express**, and that give a 400: a prompt and its new tokens must fit the context together;
`min_tokens` is at most `max_tokens`, and works with at most 8 stop ids; prompts times `n` is at most the number of
requests that may run or wait; `seed` and `sampling_seed` agree; lists of `sampling_params` and `rid` have one item for
each prompt, names differ, and `n` is the same in all.

**Parameters that a request does not give** are those of the model's `generation_config.json`, where the server uses it,
else OpenAI's.

**Limits.** A body has at most {values:,} JSON values, {nodes:,} of them lists, objects or members of objects.
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


# The forms of answers, written with Python's types; see `_form`.
SPECULATIVE = {"spec_verify_ct": int, "spec_accept_length": float, "spec_accept_rate": float,
               "spec_accept_histogram": [int]}  # fmt: skip
TOKEN_ENTRY = {"token": str, "logprob": float, "bytes": [int]}
CHAT_LOGPROBS = {"content": [TOKEN_ENTRY | {"top_logprobs": [TOKEN_ENTRY]}], "refusal": None}
TEXT_LOGPROBS = {"tokens": [str], "token_logprobs": [float], "top_logprobs": [dict], "text_offset": [int]}
FINISH = ("stop", "length")
CHOICE = {"index": int, "finish_reason": FINISH, "matched_stop": (str, int, None), "seed": int}
COMPLETION = {
    "id": str,
    "created": int,
    "model": str,
    "system_fingerprint": str,
    "usage": {
        "prompt_tokens": int,
        "completion_tokens": int,
        "total_tokens": int,
        "prompt_tokens_details": {"cached_tokens": int},
    },
    "metadata?": {"speculative": SPECULATIVE},
}
MESSAGE = {"role": "assistant", "content": str}
MODEL = {"id": str, "object": "model", "created": int, "owned_by": str, "root": str, "max_model_len": int}
GENERATED = {
    "text": str,
    "output_ids": [int],
    "meta_info": SPECULATIVE
    | {
        "id": str,
        "finish_reason": {"type": FINISH},
        "prompt_tokens": int,
        "completion_tokens": int,
        "cached_tokens": int,
        "e2e_latency": float,
        "seed": int,
        "output_token_logprobs?": [list],  # log-probability, id, text or null
        "output_top_logprobs?": [[list]],
    },
}
ANSWERS: dict[str, Any] = {
    "Error": {"error": {"message": str, "type": str, "param": (str, None), "code": (str, int, None)}},
    "ChatCompletion": COMPLETION
    | {"object": "chat.completion", "choices": [CHOICE | {"message": MESSAGE, "logprobs": (CHAT_LOGPROBS, None)}]},
    "Completion": COMPLETION
    | {"object": "text_completion", "choices": [CHOICE | {"text": str, "logprobs": (TEXT_LOGPROBS, None)}]},
    "GenerateAnswer": (GENERATED, [GENERATED]),
    "Model": MODEL,
    "ModelList": {"object": "list", "data": [MODEL]},
    "ModelInfo": {"model_path": str, "is_generation": bool},
    "Success": {"success": bool, "message": str},
    "Health": {"status": "ok"},
}
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object", None: "null"}


def _form(of: Any) -> Schema:
    """The schema of a form: a type, a constant, a list of items, a tuple of choices, or an object's members. A member
    whose name ends with "?" may be absent."""
    if isinstance(of, dict):
        members = {name.removesuffix("?"): _form(member) for name, member in of.items()}
        return {"type": "object", "properties": members, "required": [name for name in of if not name.endswith("?")]}
    if isinstance(of, list):
        return {"type": "array", "items": _form(of[0])}
    if isinstance(of, tuple):
        return {"anyOf": [_form(choice) for choice in of]}
    return {"const": of} if isinstance(of, str) else {"type": TYPES[of]}


def _header(kind: str, about: str, *, required: bool = True) -> Schema:
    return {"required": required, "schema": {"type": kind}, "description": about}


REQUEST_ID = {"X-Request-Id": _header("string", "The client's, or a new one.")}
HEADERS = {
    401: {"WWW-Authenticate": _header("string", "Bearer.")},
    503: {"Retry-After": _header("integer", "Seconds.")},
}


EVENTS = "Server-sent events, if `stream` is true: each one line of JSON after `data: `; the last is `[DONE]`."


def reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def components(rules: Rules, vocab_size: int) -> dict[str, Schema]:
    """The schemas of all bodies by name, with the limits of one model and server."""
    bodies = (ChatRequest, CompletionRequest, GenerateRequest, SamplingBody)
    _, found = models_json_schema([(each, "validation") for each in bodies], ref_template=reference("{model}")["$ref"])
    limits = {
        "$room": rules.room,
        "$capacity": rules.capacity,
        "$last_token": vocab_size - 1,
        "$token_key": f"^(?:-?0+|0*(?:{numbers_to(vocab_size - 1)}))$",
        "$models": [rules.model, DEFAULT_MODEL, None],
        "$lenient": not rules.strict,
    }
    return _filled(found["$defs"], limits) | {name: _form(form) for name, form in ANSWERS.items()}


def _filled(value: Any, limits: Mapping[str, Any]) -> Any:
    """The value with names of limits replaced."""
    if isinstance(value, dict):
        return {key: _filled(each, limits) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, limits) for each in value]
    return limits.get(value, value) if isinstance(value, str) else value


def numbers_to(last: int) -> str:
    """A regular expression for the decimal numbers 0 to `last`, without leading zeros."""
    digits = str(last)
    found = [digits]
    for place, digit in enumerate(digits):
        low = 1 if place == 0 and len(digits) > 1 else 0
        if int(digit) > low:
            found.append(f"{digits[:place]}[{low}-{int(digit) - 1}][0-9]{{{len(digits) - place - 1}}}")
    if len(digits) > 1:
        found.append(f"[0-9]|[1-9][0-9]{{1,{len(digits) - 2}}}" if len(digits) > 2 else "[0-9]")
    return "|".join(found)


def document(rules: Rules, *, vocab_size: int, has_key: bool, version: str) -> dict[str, Any]:
    """The whole document for one model."""
    about = ABOUT.format(unknown=REFUSED if rules.strict else IGNORED, values=MAX_VALUES, nodes=MAX_NODES)
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "specjax", "version": version, "description": about, "license": {"name": "Apache-2.0"}},
        "servers": [{"url": "/"}],
        "tags": [{"name": name} for name in ("OpenAI", "SGLang", "server")],
        "paths": _paths(has_key),
        "components": {"schemas": components(rules, vocab_size)},
    }
    if has_key:
        scheme = {"type": "http", "scheme": "bearer", "description": "`--api-key`"}
        found |= {"security": [{"key": []}]}
        found["components"]["securitySchemes"] = {"key": scheme}
    return found


def _paths(has_key: bool) -> dict[str, Any]:
    def operation(id: str, tag: str, summary: str, answer: str, *statuses: int) -> Schema:
        every = sorted({*statuses, 413, 503, *((401,) if has_key else ())})
        responses = {"200": _response("Done.", answer, 200)}
        responses |= {str(status): _response(STATUSES[status], "Error", status) for status in every}
        return {"operationId": id, "tags": [tag], "summary": summary, "responses": responses}

    def post(id: str, tag: str, summary: str, body: str, answer: str, *statuses: int) -> Schema:
        found = operation(id, tag, summary, answer, 400, 408, 415, 500, *statuses)
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference(body)}}}
        done = found["responses"]["200"]
        done["content"]["text/event-stream"] = {"schema": {"description": EVENTS}}
        ignored = _header("string", "Fields of the request without effect.", required=False)
        done["headers"] = done["headers"] | {IGNORED_HEADER: ignored}
        return found

    def generate(method: str) -> Schema:
        return post(f"generate_{method}", "SGLang", "Continue prompts", "GenerateRequest", "GenerateAnswer")

    def flush(method: str) -> Schema:
        return operation(f"flush_cache_{method}", "SGLang", "Forget cached text", "Success", 400, 500)

    def info(name: str) -> Schema:
        return _with_head(operation(name, "SGLang", "The model and its limits", "ModelInfo"))

    name: Schema = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    health = operation("health", "server", "Whether requests are taken", "Health")
    if has_key:
        health["security"] = []
        health["responses"].pop("401")
    chat = post("chat_completions", "OpenAI", "Answer a chat", "ChatRequest", "ChatCompletion", 404)
    text = post("completions", "OpenAI", "Continue prompts", "CompletionRequest", "Completion", 404)
    return {
        "/v1/chat/completions": {"post": chat},
        "/v1/completions": {"post": text},
        "/generate": {method: generate(method) for method in ("post", "put")},
        "/v1/models": _with_head(operation("list_models", "OpenAI", "The model that is served", "ModelList")),
        "/v1/models/{name}": _with_head(operation("retrieve_model", "OpenAI", "One model", "Model", 404))
        | {"parameters": [name]},
        "/get_model_info": info("get_model_info"),
        "/model_info": info("model_info"),
        "/flush_cache": _with_head(flush("get")) | {"post": flush("post")},
        "/health": _with_head(health),
    }


def _response(about: str, schema: str, status: int) -> Schema:
    headers = REQUEST_ID | HEADERS.get(status, {})
    return {"description": about, "headers": headers, "content": {"application/json": {"schema": reference(schema)}}}


def _with_head(get: Schema) -> dict[str, Schema]:
    """GET and HEAD, which has the same headers and no bodies."""
    responses = {
        status: {key: value for key, value in each.items() if key != "content"}
        for status, each in get["responses"].items()
    }
    return {"get": get, "head": get | {"operationId": f"{get['operationId']}_head", "responses": responses}}
