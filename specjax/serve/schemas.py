"""JSON schemas of the bodies of requests and answers.

Those of requests are what is enforced, no more and no less: `tests/test_serve_openapi.py` compares the two.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from specjax.engine.request import MAX_SALT, MAX_STOP_LENGTH, MAX_STOP_STRINGS, MAX_TEMPERATURE
from specjax.sampling import BIAS_ENTRIES
from specjax.serve.fields import MAX_METADATA, MAX_STOP_IDS, Body, Values
from specjax.serve.json_body import MAX_NODES, MAX_VALUES
from specjax.serve.messages import MAX_CALLS, MAX_MESSAGES, ROLES
from specjax.serve.messages import UNSUPPORTED as NOT_IN_MESSAGES
from specjax.serve.protocol import (
    COMPLETION_LOGPROBS,
    COMPLETION_TOKENS,
    DEFAULT_MODEL,
    GENERATE_TOKENS,
    MAX_CHOICES,
    MAX_ID,
    ChatBody,
    CompletionBody,
    GenerateBody,
    SamplingBody,
    StreamOptions,
)
from specjax.serve.task import Rules
from specjax.verify import TOP_LOGPROBS

__all__ = ["MAX_NODES", "MAX_VALUES", "Schema", "components", "reference"]

Schema: TypeAlias = dict[str, Any]

NULL: Schema = {"type": "null"}
FLAG: Schema = {"type": ["boolean", "null"]}
TEXT: Schema = {"type": ["string", "null"]}


def reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def components(rules: Rules, vocab_size: int) -> dict[str, Schema]:
    """All schemas by name."""
    return _Requests(rules, vocab_size).all() | ANSWERS


def integer(minimum: int, maximum: int | None = None, about: str = "") -> Schema:
    return _described({"type": ["integer", "null"], "minimum": minimum} | _limit("maximum", maximum), about)


def number(about: str = "", **limits: float | int) -> Schema:
    return _described({"type": ["number", "null"], **limits}, about)


def text(least: int = 0, most: int | None = None, about: str = "") -> Schema:
    return _described({"type": "string"} | _limit("minLength", least or None) | _limit("maxLength", most), about)


def list_of(items: Schema, least: int = 0, most: int | None = None) -> Schema:
    return {"type": "array", "items": items} | _limit("minItems", least or None) | _limit("maxItems", most)


def any_of(*choices: Schema, about: str = "") -> Schema:
    return _described({"anyOf": list(choices)}, about)


def _limit(name: str, value: int | None) -> Schema:
    return {} if value is None else {name: value}


def _described(schema: Schema, about: str) -> Schema:
    return schema | ({"description": about} if about else {})


def implies(condition: Schema, consequence: Schema) -> Schema:
    return {"if": condition, "then": consequence}


def has(**properties: Schema) -> Schema:
    return {"required": list(properties), "properties": properties}


class _Requests:
    def __init__(self, rules: Rules, vocab_size: int) -> None:
        self._rules = rules
        self._token: Schema = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
        self._token_key = f"^(?:-?0+|0*(?:{numbers_to(vocab_size - 1)}))$"
        self._room = rules.room

    def all(self) -> dict[str, Schema]:
        return {
            "ChatRequest": self._object(ChatBody, self._chat(), "messages"),
            "CompletionRequest": self._object(CompletionBody, self._completion(), "prompt"),
            "GenerateRequest": self._object(GenerateBody, self._generate()),
            "SamplingParams": self._object(SamplingBody, self._sampling_params()),
            "StreamOptions": self._object(StreamOptions, {"include_usage": FLAG}),
            "Message": any_of(
                *(reference(name) for name in ("Instruction", "UserMessage", "AssistantMessage", "ToolMessage"))
            ),
            **self._messages(),
        }

    def _object(self, kind: type[Body], schema: Schema, *required: str) -> Schema:
        """With the fields that pass only if they ask for nothing."""
        if "properties" not in schema:
            schema = {"properties": schema}
        known = schema["properties"]
        about = "Not supported: only the values that ask for nothing pass."
        for name, harmless in kind.unsupported.items():
            if name not in known:
                known[name] = _nothing(harmless, about)
        for name, (advice, harmless) in kind.elsewhere.items():
            known[name] = _nothing(harmless, f"Not a field here: {advice}.")
        found: Schema = {"type": "object", **schema}
        if required:
            found["required"] = list(required)
        if self._rules.strict:
            found["additionalProperties"] = False
        return found

    def _sampling(self) -> dict[str, Schema]:
        stop = text(1, MAX_STOP_LENGTH)
        seed = integer(-(2**63), 2**63 - 1, "The answer names the one that was used; generated ones are below 2^53.")
        return {
            "n": integer(1, MAX_CHOICES, "Choices of each prompt; choice i has the seed + i."),
            "stop": any_of(stop, list_of(stop, 0, MAX_STOP_STRINGS), NULL, about="Never in the text."),
            "temperature": number("0 = greedy.", minimum=0, maximum=MAX_TEMPERATURE),
            "top_p": number(exclusiveMinimum=0, maximum=1),
            "top_k": integer(-1, None, "-1 and 0 = off."),
            "min_p": number(minimum=0, maximum=1),
            "frequency_penalty": number(minimum=-2, maximum=2),
            "presence_penalty": number(minimum=-2, maximum=2),
            "repetition_penalty": number(exclusiveMinimum=0, maximum=2),
            "seed": seed,
            "sampling_seed": integer(-(2**63), 2**63 - 1, "SGLang's name for the seed."),
            "logit_bias": {
                "type": ["object", "null"],
                "propertyNames": {"pattern": self._token_key, "maxLength": 18},
                "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                "maxProperties": BIAS_ENTRIES,
                "description": "Token ids to what is added to their logits.",
            },
            "ignore_eos": FLAG,
            "stop_token_ids": any_of(list_of(self._token, 0, MAX_STOP_IDS), NULL),
            "skip_special_tokens": FLAG,
            "no_stop_trim": _described(FLAG, "Keep the stop string in the text."),
        }

    def _openai(self, default: str) -> dict[str, Schema]:
        return self._sampling() | {
            "model": {"enum": [self._rules.model, DEFAULT_MODEL, None]},
            "max_tokens": integer(1, self._room, f"New tokens; default: {default}."),
            "min_tokens": integer(0, self._room, "Stop ids cannot come before."),
            "stream": FLAG,
            "stream_options": any_of(reference("StreamOptions"), NULL, about="Needs `stream`."),
            "return_speculative_metrics": _described(FLAG, "`metadata.speculative` in the answer."),
            "cache_salt": SALT,
            "user": TEXT,
            "metadata": {"type": ["object", "null"], "maxProperties": MAX_METADATA},
            "store": FLAG,
            "service_tier": TEXT,
            "safety_identifier": TEXT,
            "prompt_cache_key": TEXT,
        }

    def _chat(self) -> Schema:
        properties = self._openai("the rest of the context") | {
            "messages": list_of(reference("Message"), 1, MAX_MESSAGES),
            "max_completion_tokens": integer(1, self._room, "Wins over `max_tokens`."),
            "logprobs": FLAG,
            "top_logprobs": integer(0, TOP_LOGPROBS, "Needs `logprobs`."),
        }
        wanted = implies(has(top_logprobs={"type": "integer", "minimum": 1}), has(logprobs={"const": True}))
        return {"properties": properties, "allOf": [OPTIONS_NEED_STREAM, wanted]}

    def _completion(self) -> Schema:
        properties = self._openai(f"{COMPLETION_TOKENS}, or what there is room for") | {
            "prompt": any_of(*self._texts(), *self._ids()),
            "best_of": {"enum": [1, None], "description": "Not supported beyond n; n itself passes, too."},
            "echo": _described(FLAG, "The prompt before the text; not with `logprobs`."),
            "logprobs": integer(0, COMPLETION_LOGPROBS),
        }
        echo = implies(has(echo={"const": True}), {"properties": {"logprobs": NULL}})
        return {"properties": properties, "allOf": [OPTIONS_NEED_STREAM, echo]}

    def _texts(self) -> list[Schema]:
        return [text(1), list_of(text(1), 1, self._rules.capacity)]

    def _ids(self) -> list[Schema]:
        ids = list_of(self._token, 1, self._room)
        return [ids, list_of(ids, 1, self._rules.capacity)]

    def _sampling_params(self) -> Schema:
        return self._sampling() | {
            "max_new_tokens": integer(1, self._room, f"Default: {GENERATE_TOKENS}, or what there is room for."),
            "min_new_tokens": integer(0, self._room),
        }

    def _generate(self) -> Schema:
        name = text(1, MAX_ID)
        params = reference("SamplingParams")
        properties: dict[str, Schema] = {
            "text": any_of(*self._texts(), NULL),
            "input_ids": any_of(*self._ids(), NULL),
            # A schema cannot tie the length of one list to that of another.
            "sampling_params": any_of(params, NULL, about="With a list of prompts also a list, one for each."),
            "rid": any_of(name, NULL, about="Names prompt i of a list rid_i. With a list also a list of names."),
            "stream": FLAG,
            "return_logprob": FLAG,
            "top_logprobs_num": integer(0, TOP_LOGPROBS, "Needs `return_logprob`."),
            "return_text_in_logprobs": FLAG,
            "cache_salt": SALT,
        }
        wanted = implies(has(top_logprobs_num={"type": "integer", "minimum": 1}), has(return_logprob={"const": True}))
        given = {"type": ["string", "array"]}
        either = [
            has(text=given) | {"properties": {"text": given, "input_ids": NULL}},
            has(input_ids={"type": "array"}) | {"properties": {"input_ids": {"type": "array"}, "text": NULL}},
        ]
        return {"properties": properties, "allOf": [wanted, {"anyOf": either}]}

    def _messages(self) -> dict[str, Schema]:
        part: Schema = {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}
        part["required"] = ["type", "text"]
        content = any_of({"type": "string"}, list_of(reference("TextPart"), 1, MAX_MESSAGES))
        common = {"name": TEXT, "tool_call_id": TEXT} | {
            name: _nothing(harmless) for name, harmless in NOT_IN_MESSAGES.items()
        }
        no_calls: Schema = {"type": ["array", "null"], "maxItems": 0}
        calls = list_of(reference("ToolCall"), 0, MAX_CALLS)

        def message(*roles: str) -> Schema:
            properties = {"role": {"enum": list(roles)}, "content": content, "tool_calls": no_calls} | common
            return {"type": "object", "properties": properties, "required": ["role", "content"]}

        assistant: Schema = {
            "type": "object",
            "properties": {"role": {"const": "assistant"}, "content": any_of(*content["anyOf"], NULL)} | common
            | {"tool_calls": any_of(calls, NULL)},
            "required": ["role"],
            "anyOf": [has(content={"type": ["string", "array"]}), has(tool_calls={"type": "array", "minItems": 1})],
        }  # fmt: skip
        arguments: Schema = {"type": ["string", "object", "null"], "description": "An object, or its JSON text."}
        function: Schema = {
            "type": "object", "properties": {"name": {"type": "string"}, "arguments": arguments}, "required": ["name"],
        }  # fmt: skip
        call: Schema = {"type": "object", "properties": {"function": function}, "required": ["function"]}
        found = {
            "TextPart": part,
            "Instruction": message(*(role for role, called in ROLES.items() if called == "system")),
            "UserMessage": message("user"),
            "AssistantMessage": assistant,
            "ToolMessage": message("tool"),
        }
        if self._rules.strict:
            for schema in found.values():
                schema["additionalProperties"] = False
            for name in ("Instruction", "UserMessage", "AssistantMessage", "ToolMessage"):
                found[name]["properties"]["annotations"] = {}
        return found | {"ToolCall": call}


def _nothing(harmless: Values, about: str = "") -> Schema:
    return _described({"enum": [None, *harmless]}, about)


SALT: Schema = {
    "type": ["string", "null"],
    "minLength": 1,
    "maxLength": MAX_SALT,
    "description": "Requests with different ones share no memory of text.",
}

OPTIONS_NEED_STREAM = implies(has(stream_options={"type": "object"}), has(stream={"const": True}))


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


# Answers.


def _whole(required: dict[str, Schema], **optional: Schema) -> Schema:
    return {"type": "object", "properties": required | optional, "required": list(required)}


STRING: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
REAL: Schema = {"type": "number"}
IDS = list_of(COUNT)

SPECULATIVE = _whole(
    {"spec_verify_ct": COUNT, "spec_accept_length": REAL, "spec_accept_rate": REAL, "spec_accept_histogram": IDS}
)
USAGE = _whole(
    {
        "prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT,
        "prompt_tokens_details": _whole({"cached_tokens": COUNT}),
    }
)  # fmt: skip
TOKEN = _whole({"token": STRING, "logprob": REAL, "bytes": IDS})
CHAT_LOGPROBS = _whole(
    {"content": list_of({"allOf": [TOKEN, _whole({"top_logprobs": list_of(TOKEN)})]}), "refusal": NULL}
)
TEXT_LOGPROBS = _whole(
    {
        "tokens": list_of(STRING), "token_logprobs": list_of(REAL), "text_offset": IDS,
        "top_logprobs": list_of({"type": "object", "additionalProperties": REAL}),
    }
)  # fmt: skip
ENDING: dict[str, Schema] = {
    "finish_reason": {"enum": ["stop", "length"]},
    "matched_stop": {"type": ["string", "integer", "null"]},
    "seed": {"type": "integer"},
}
GENERATED = _whole(
    {
        "text": STRING,
        "output_ids": IDS,
        "meta_info": _whole(
            {
                "id": STRING,
                "finish_reason": _whole({"type": {"enum": ["stop", "length"]}}),
                "prompt_tokens": COUNT,
                "completion_tokens": COUNT,
                "cached_tokens": COUNT,
                "e2e_latency": REAL,
                "seed": {"type": "integer"},
                **SPECULATIVE["properties"],
            },
            output_token_logprobs=list_of({"type": "array", "description": "log-probability, id, text or null"}),
            output_top_logprobs=list_of(list_of({"type": "array"})),
        ),
    }
)


def _completion_of(kind: str, said: dict[str, Schema], logprobs: Schema) -> Schema:
    choice = _whole({"index": COUNT, **said, "logprobs": any_of(logprobs, NULL), **ENDING})
    return _whole(
        {
            "id": STRING,
            "object": {"const": kind},
            "created": COUNT,
            "model": STRING,
            "system_fingerprint": STRING,
            "choices": list_of(choice, 1),
            "usage": reference("Usage"),
        },
        metadata=_whole({"speculative": reference("Speculative")}),
    )


ANSWERS: dict[str, Schema] = {
    "Error": _whole(
        {
            "error": _whole(
                {"message": STRING, "type": STRING, "param": TEXT, "code": {"type": ["string", "integer", "null"]}}
            )
        }
    ),
    "Speculative": SPECULATIVE,
    "Usage": USAGE,
    "ChatCompletion": _completion_of(
        "chat.completion", {"message": _whole({"role": {"const": "assistant"}, "content": STRING})}, CHAT_LOGPROBS
    ),
    "Completion": _completion_of("text_completion", {"text": STRING}, TEXT_LOGPROBS),
    "Generated": GENERATED,
    "GenerateAnswer": any_of(reference("Generated"), list_of(reference("Generated"), 1)),
    "Model": _whole(
        {
            "id": STRING, "object": {"const": "model"}, "created": COUNT, "owned_by": STRING, "root": STRING,
            "max_model_len": COUNT,
        }
    ),
    "ModelList": _whole({"object": {"const": "list"}, "data": list_of(reference("Model"), 1)}),
    "ModelInfo": _whole({"model_path": STRING, "is_generation": {"const": True}}),
    "Success": _whole({"success": {"const": True}, "message": STRING}),
    "Health": _whole({"status": {"const": "ok"}}),
}  # fmt: skip
