"""The OpenAPI 3.1 document at `/openapi.json`, made of the types of request and response bodies."""

from __future__ import annotations

import json
from typing import Any

from pydantic.json_schema import models_json_schema

from specjax.serve.anthropic_messages import CountTokensRequest, MessagesRequest
from specjax.serve.fields import IGNORED_HEADER, MAX_NODES, MAX_VALUES, Schema
from specjax.serve.generate_request import GenerateRequest, SamplingBody
from specjax.serve.middleware import HEALTH, OPEN, PAGE
from specjax.serve.openai_responses import ResponsesRequest
from specjax.serve.protocol import (
    DEFAULT_MODEL,
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    ContinueRequest,
    DetokenizeRequest,
    PauseRequest,
    ProfileRequest,
    TokenizeRequest,
)
from specjax.serve.task import MAX_SCORES, Rules
from specjax.serve.tools import MAX_TOOLS

ABOUT = """\
Speculative decoding for JAX, behind OpenAI's interface and SGLang's `/generate`.

**One rule for the fields of a request.** A field that is listed works, or is refused by name with a 400. The same holds
for fields of OpenAI, SGLang and vLLM that would change the text or the answer and are not supported: only the values
that change nothing pass, null always. {unknown}

**Rules that a schema cannot express**, and that give a 400: a prompt and its new tokens must fit the context together;
`min_tokens` is at most `max_tokens`, and works with at most 8 stop ids; prompts times `n` is at most the number of
requests that may run or wait; `always_draft` needs a server that drafts, and a `draft_limit` above 0; an answer holds
at most {scores:,} log-probabilities of prompts; `seed` and `sampling_seed` agree; lists of `sampling_params`, `rid`,
`return_logprob`, `top_logprobs_num`, `logprob_start_len` and `token_ids_logprob` have one item for each prompt, names
differ, and `n` is the same in all; `continue_final_message` needs a last message of the assistant;
no two `tools` have the same name, and `tool_choice` names one of them; a grammar can be made of what an answer must
follow.

**Parameters that a request does not give** are those of the model's `generation_config.json`, where the server uses it,
else OpenAI's.

**Limits.** A body has at most {values:,} JSON values, {nodes:,} of them lists, objects or members of objects.
"""

STATUSES = {
    400: "The request is not valid; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    408: "The body did not arrive in time, or the request was not complete at its deadline.",
    413: "The body is too large, or holds too many values.",
    415: "The body is not sent as `application/json`.",
    500: "The request failed.",
    503: "The server is loading, full or shutting down; try again after `Retry-After` seconds.",
}


# The forms of answers, written with Python's types; see `_form`.
SPECULATIVE = {"spec_verify_ct": int, "spec_accept_length": float, "spec_accept_rate": float,
               "spec_accept_histogram": [int], "drafted_steps": int, "not_drafted": (str, None)}  # fmt: skip
NODE = {"token": int, "text": str, "parent": (int, None), "score": float, "accepted": bool,
        "drawn?": {"token": int, "text": str}}  # fmt: skip
DRAFTING = {
    "tokens?": [{"token": int, "text": str, "drafted": bool}],
    "tree?": ({"nodes": [NODE], "emitted": int}, None),
}
TOKEN_ENTRY = {"token": str, "logprob": float, "bytes": [int]}
CHAT_LOGPROBS = {"content": [TOKEN_ENTRY | {"top_logprobs": [TOKEN_ENTRY]}], "refusal": None}
TEXT_LOGPROBS = {"tokens": [str], "token_logprobs": [(float, None)], "top_logprobs": [(dict, None)],
                 "text_offset": [int]}  # fmt: skip
FINISH = ("stop", "length")
CALL = {"id": str, "type": "function", "function": {"name": str, "arguments": str}}
MESSAGE = {"role": "assistant", "content": (str, None), "reasoning_content?": (str, None), "tool_calls?": [CALL]}
CHOICE = {"index": int, "finish_reason": FINISH, "matched_stop": (str, int, None), "seed": int,
          "speculative?": DRAFTING}  # fmt: skip
CHAT_CHOICE = CHOICE | {"finish_reason": (*FINISH, "tool_calls"), "message": MESSAGE,
                        "logprobs": (CHAT_LOGPROBS, None)}  # fmt: skip
PROMPT_LOGPROBS = [(dict, None)]  # ids to {"logprob", "rank", "decoded_token"}
TEXT_CHOICE = CHOICE | {"text": str, "logprobs": (TEXT_LOGPROBS, None), "prompt_logprobs?": PROMPT_LOGPROBS}
USAGE = {"prompt_tokens": int, "completion_tokens": int, "total_tokens": int,
         "prompt_tokens_details": {"cached_tokens": int},
         "completion_tokens_details?": {"reasoning_tokens": int}, "reasoning_tokens?": int}  # fmt: skip
COMPLETION = {"id": str, "created": int, "model": str, "system_fingerprint": str, "usage": USAGE,
              "metadata?": {"speculative": SPECULATIVE}}  # fmt: skip
MODEL = {"id": str, "object": "model", "created": int, "owned_by": str, "root": str, "max_model_len": int}
# Entries of log-probabilities are lists: the number, the token's id, its text or null.
META = SPECULATIVE | {
    "id": str, "finish_reason": {"type": FINISH}, "prompt_tokens": int, "completion_tokens": int, "cached_tokens": int,
    "reasoning_tokens": int, "e2e_latency": float, "seed": int,
    "output_token_logprobs?": [list], "output_top_logprobs?": [[list]],
    "input_token_logprobs?": [list], "input_top_logprobs?": [([list], None)],
    "output_token_ids_logprobs?": [[list]], "input_token_ids_logprobs?": [([list], None)],
}  # fmt: skip
GENERATED = {"text": str, "output_ids": [int], "meta_info": META}
ITEM = {"id": str, "status": ("completed", "incomplete")}
RESPONSE = {
    "id": str, "object": "response", "created_at": int, "status": ("completed", "incomplete"), "model": str,
    "output": [(
        ITEM | {"type": "message", "role": "assistant",
                "content": [{"type": "output_text", "text": str, "annotations": [dict]}]},
        ITEM | {"type": "function_call", "call_id": str, "name": str, "arguments": str},
        ITEM | {"type": "reasoning", "summary": [dict], "content": [{"type": "reasoning_text", "text": str}]},
    )],
    "usage": {"input_tokens": int, "input_tokens_details": {"cached_tokens": int}, "output_tokens": int,
              "output_tokens_details": {"reasoning_tokens": int}, "total_tokens": int},
    "incomplete_details": ({"reason": "max_output_tokens"}, None), "temperature": float, "top_p": float, "seed": int,
}  # fmt: skip
MESSAGE = {
    "id": str, "type": "message", "role": "assistant", "model": str,
    "content": [(
        {"type": "text", "text": str}, {"type": "tool_use", "id": str, "name": str, "input": dict},
        {"type": "thinking", "thinking": str, "signature": str},
    )],
    "stop_reason": ("end_turn", "max_tokens", "stop_sequence", "tool_use"), "stop_sequence": (str, None),
    "usage": {"input_tokens": int, "cache_creation_input_tokens": int, "cache_read_input_tokens": int,
              "output_tokens": int},
}  # fmt: skip
LOAD = {
    "dp_rank": int, "num_running_reqs": int, "num_waiting_reqs": int, "num_used_tokens": int, "num_total_tokens": int,
    "max_total_num_tokens": int, "token_usage": float, "gen_throughput": float, "cache_hit_rate": float,
    "utilization": float, "max_running_requests": int,
    "speculative": {"accept_length": float, "accept_rate": float},
    "queues": {"waiting": int, "grammar": int, "paused": int, "retracted": int},
}  # fmt: skip
ANSWERS: dict[str, Any] = {
    "Error": {"error": {"message": str, "type": str, "param": (str, None), "code": (str, int, None)}},
    "ChatCompletion": COMPLETION
    | {"object": "chat.completion", "choices": [CHAT_CHOICE], "prompt_logprobs?": PROMPT_LOGPROBS},
    "Completion": COMPLETION | {"object": "text_completion", "choices": [TEXT_CHOICE]},
    "Response": RESPONSE,
    "AnthropicAnswer": MESSAGE,
    "TokenCount": {"input_tokens": int},
    "GenerateAnswer": (GENERATED, [GENERATED]),
    "Model": MODEL,
    "ModelList": {"object": "list", "data": [MODEL]},
    "ModelInfo": {"model_path": str, "served_model_name": str, "tokenizer_path": str, "is_generation": bool},
    "ServerInfo": {
        "model_path": str,
        "served_model_name": str,
        "version": str,
        "dp_size": int,
        "tp_size": int,
        "ep_size": int,
        "internal_states": [{"avg_spec_accept_length": float}],
    },
    "Loads": {
        "timestamp": str,
        "version": str,
        "dp_rank_count": int,
        "loads": [LOAD],
        "aggregate": {
            "total_running_reqs": int,
            "total_waiting_reqs": int,
            "total_reqs": int,
            "avg_token_usage": float,
            "avg_throughput": float,
            "avg_utilization": float,
        },
    },
    "RankLoads": [{"dp_rank": int, "num_reqs": int, "num_waiting_reqs": int, "num_tokens": int}],
    "Tokens": {"tokens": ([int], [[int]]), "count": (int, [int]), "max_model_len": int},
    "Texts": {"text": (str, [str]), "prompt": (str, [str])},
    "Success": {"success": bool, "message": str},
    "Health": {"status": "ok"},
}

# Path, method, id, tag, summary, the schemas of body ("?": may be absent) and answer, statuses that not all have. GET
# includes HEAD.
ROUTES: list[tuple[Any, ...]] = [
    ("/v1/chat/completions", "post", "chat_completions", "OpenAI", "Chat", "ChatRequest", "ChatCompletion", 404),
    ("/v1/completions", "post", "completions", "OpenAI", "Continue prompts", "CompletionRequest", "Completion", 404),
    ("/v1/responses", "post", "responses", "OpenAI", "A response to a chat", "ResponsesRequest", "Response", 404),
    ("/v1/messages", "post", "messages", "Anthropic", "Chat", "MessagesRequest", "AnthropicAnswer", 404),
    (
        "/v1/messages/count_tokens",
        "post",
        "count_tokens",
        "Anthropic",
        "Tokens of a chat",
        "CountTokensRequest",
        "TokenCount",
        404,
    ),
    ("/generate", "post", "generate_post", "SGLang", "Continue prompts", "GenerateRequest", "GenerateAnswer"),
    ("/generate", "put", "generate_put", "SGLang", "Continue prompts", "GenerateRequest", "GenerateAnswer"),
    ("/v1/models", "get", "list_models", "OpenAI", "The model that is served", None, "ModelList"),
    ("/v1/models/{name}", "get", "retrieve_model", "OpenAI", "One model", None, "Model", 404),
    ("/get_model_info", "get", "get_model_info", "SGLang", "The model and its limits", None, "ModelInfo"),
    ("/model_info", "get", "model_info", "SGLang", "The model and its limits", None, "ModelInfo"),
    ("/get_server_info", "get", "get_server_info", "SGLang", "Settings and state", None, "ServerInfo"),
    ("/server_info", "get", "server_info", "SGLang", "Settings and state", None, "ServerInfo"),
    ("/v1/loads", "get", "loads", "SGLang", "Running and waiting requests, tokens", None, "Loads"),
    ("/get_load", "get", "get_load", "SGLang", "The older form of /v1/loads", None, "RankLoads"),
    ("/metrics", "get", "metrics", "server", "Metrics for Prometheus", None, None),
    ("/health_generate", "get", "health_generate", "SGLang", "Whether a token can be drawn", None, "Health"),
    ("/abort_request", "post", "abort_request", "SGLang", "End requests", "AbortRequest", "Success"),
    ("/pause_generation", "post", "pause_generation", "SGLang", "Draw no tokens", "PauseRequest?", "Success", 500),
    ("/continue_generation", "post", "continue_generation", "SGLang", "Draw again", "ContinueRequest?", "Success", 500),
    ("/tokenize", "post", "tokenize", "SGLang", "Tokens of texts", "TokenizeRequest", "Tokens", 404),
    ("/v1/tokenize", "post", "tokenize_v1", "SGLang", "Tokens of texts", "TokenizeRequest", "Tokens", 404),
    ("/detokenize", "post", "detokenize", "SGLang", "Text of tokens", "DetokenizeRequest", "Texts", 404),
    ("/v1/detokenize", "post", "detokenize_v1", "SGLang", "Text of tokens", "DetokenizeRequest", "Texts", 404),
    ("/flush_cache", "get", "flush_cache_get", "SGLang", "Forget cached text", None, "Success", 400, 500),
    ("/flush_cache", "post", "flush_cache_post", "SGLang", "Forget cached text", None, "Success", 400, 500),
    ("/start_profile", "post", "start_profile", "SGLang", "Trace steps (`--profile`)", "ProfileRequest?", "Success"),
    ("/stop_profile", "post", "stop_profile", "SGLang", "End the trace", None, "Success", 500),
    (HEALTH, "get", "health", "server", "Whether requests are taken", None, "Health"),
    (PAGE, "get", "playground", "server", "A page to chat, which shows how the text was drafted", None, None),
]

STREAMED = ("ChatRequest", "CompletionRequest", "GenerateRequest", "ResponsesRequest", "MessagesRequest")
EVENTS = (
    "Server-sent events, if `stream` is true: each one line of JSON after `data: `; the last is `[DONE]`, but for "
    "responses and Anthropic's messages, whose events have names."
)
STRING, INTEGER = {"type": "string"}, {"type": "integer"}
HEADERS: dict[int, Schema] = {  # by status; all answers have X-Request-Id, too
    401: {"WWW-Authenticate": {"required": True, "schema": STRING, "description": "Bearer."}},
    503: {"Retry-After": {"required": True, "schema": INTEGER, "description": "Seconds."}},
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


def reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


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
    """The whole document, with the limits of one model and server."""
    ignored = f"Unknown fields are ignored; the header `{IGNORED_HEADER}` of the answer names them."
    refused = "Unknown fields are refused, too (`--strict-fields`)."
    about = ABOUT.format(
        unknown=refused if rules.strict else ignored, values=MAX_VALUES, nodes=MAX_NODES, scores=MAX_SCORES
    )
    bodies = (
        ChatRequest, CompletionRequest, GenerateRequest, SamplingBody, TokenizeRequest, DetokenizeRequest, AbortRequest,
        PauseRequest, ContinueRequest, ProfileRequest, ResponsesRequest, MessagesRequest, CountTokensRequest,
    )  # fmt: skip
    _, found = models_json_schema([(each, "validation") for each in bodies], ref_template=reference("{model}")["$ref"])
    schemas = json.dumps(found["$defs"])
    limits = {
        "$room": rules.room,
        "$capacity": rules.capacity,
        "$last_token": vocab_size - 1,
        "$token_key": f"^(?:-?0+|0*(?:{numbers_to(vocab_size - 1)}))$",
        "$lenient": not rules.strict,
        "$tools": 0 if rules.form.refusal else MAX_TOOLS,
        "$models": [rules.model, DEFAULT_MODEL, None],
        "$trees": [True, False, None] if rules.trees else [False, None],
        "$thinks": [True, False, None] if rules.form.end_think is not None else [False, None],
    }
    for name, limit in limits.items():
        schemas = schemas.replace(f'"{name}"', json.dumps(limit))
    components: Schema = {"schemas": json.loads(schemas) | {name: _form(form) for name, form in ANSWERS.items()}}
    if has_key:
        components["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer", "description": "`--api-key`; or as `x-api-key`"}
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "specjax", "version": version, "description": about, "license": {"name": "Apache-2.0"}},
        "servers": [{"url": "/"}],
        "tags": [{"name": name} for name in ("OpenAI", "Anthropic", "SGLang", "server")],
        "paths": _paths(has_key),
        "components": components,
        **({"security": [{"key": []}]} if has_key else {}),
    }


def _paths(has_key: bool) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for path, method, id, tag, summary, body, answer, *others in ROUTES:
        statuses = {413, 503, *others, *((400, 408, 415, 500) if body else ())}
        statuses |= {401} if has_key and path not in OPEN else set()
        kind = "text/html" if path == PAGE else "text/plain" if answer is None else "application/json"
        responses = {"200": _response(200, "Done.", answer, kind)}
        responses |= {str(status): _response(status, STATUSES[status], "Error") for status in sorted(statuses)}
        operation: Schema = {"operationId": id, "tags": [tag], "summary": summary, "responses": responses}
        if has_key and path in OPEN:
            operation["security"] = []
        if body:
            form = {"application/json": {"schema": reference(body.removesuffix("?"))}}
            operation["requestBody"] = {"required": not body.endswith("?"), "content": form}
            if body in STREAMED:
                responses["200"]["content"]["text/event-stream"] = {"schema": {"description": EVENTS}}
            ignored = {"required": False, "schema": STRING, "description": "Fields of the request without effect."}
            responses["200"]["headers"][IGNORED_HEADER] = ignored
        item = paths.setdefault(path, {})
        item[method] = operation
        if method == "get":
            bare = {status: {key: each[key] for key in each if key != "content"} for status, each in responses.items()}
            item["head"] = operation | {"operationId": f"{id}_head", "responses": bare}
    name = {"name": "name", "in": "path", "required": True, "schema": STRING | {"minLength": 1}}
    paths["/v1/models/{name}"]["parameters"] = [name]
    return paths


def _response(status: int, about: str, schema: str | None, kind: str = "application/json") -> Schema:
    id = {"required": True, "schema": STRING, "description": "The client's, or a new one."}
    content = {kind: {"schema": STRING if schema is None else reference(schema)}}
    return {"description": about, "headers": {"X-Request-Id": id} | HEADERS.get(status, {}), "content": content}
