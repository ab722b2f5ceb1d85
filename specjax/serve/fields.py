"""The rules for the fields of request bodies, and the types that they are declared with.

A field of a `Body` is stated once: its declaration gives the check, the error message and the JSON schema. There are
three kinds of fields:

- supported: declared, with their types and limits;
- known but not supported (`Body.unsupported`): fields of OpenAI, SGLang and vLLM that would change the text or the
  answer. Values that change nothing pass, all others are refused by name;
- unknown: ignored and named in a response header, or refused with `--strict-fields`.

Limits that depend on the model stand in the schemas as names ("$room"), which `specjax.serve.openapi` replaces.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias, TypeVar
from urllib.parse import quote

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from specjax.sampling import BIAS_ENTRIES
from specjax.serve.errors import bad_request, shown
from specjax.serve.json_body import Budget

logger = logging.getLogger("specjax.serve")

IGNORED_HEADER = "X-Specjax-Ignored-Fields"
"""Names the fields of the request that had no effect."""

MAX_NAMED = 16
"""Most ignored fields that the header and the log name."""

MAX_NAME = 64
"""Most characters of a field's name that are repeated."""

Values: TypeAlias = tuple[Any, ...]
Schema: TypeAlias = dict[str, Any]


class Ignored:
    """The fields of one request that have no effect."""

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._names: dict[str, None] = {}
        self._more = False

    def add(self, name: str, where: str = "", param: str | None = None) -> None:
        """Notes a field. `where` is the prefix of its name, for example `stream_options.`.

        Raises:
            ApiError: unknown fields are refused (`--strict-fields`).
        """
        name = name[:MAX_NAME]
        if self._strict:
            message = f"unknown field {where + name!r}; this server refuses those (--strict-fields)"
            raise bad_request(message, param or name, "unknown_field")
        if len(self._names) < MAX_NAMED:
            self._names[where + name] = None
        else:
            self._more = self._more or where + name not in self._names

    @property
    def headers(self) -> dict[str, str]:
        """Percent-encoded, so that no name can break out of the header."""
        if not self._names:
            return {}
        names = [quote(name, safe="[]", errors="replace") or '""' for name in self._names]
        return {IGNORED_HEADER: ", ".join([*names, *(["..."] if self._more else [])])}

    def log(self, id: str) -> None:
        """One line of bounded length. Values are private and not logged."""
        if self._names:
            logger.warning("%s: ignored fields: %s", id, self.headers[IGNORED_HEADER])


class Reading(NamedTuple):
    """State of reading one body: pydantic's validation context."""

    ignored: Ignored
    budget: Budget


def reading(info: Any) -> Reading:
    """The context of a validation. `info` is a `ValidationInfo`, a protocol that allows no `isinstance`."""
    assert isinstance(info.context, Reading)
    return info.context


def whole(value: Any) -> Any:
    """2.0 as 2, since JSON does not tell them apart; other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def at_most(most: int) -> BeforeValidator:
    """Checks the length of a list or object before its members, so that a huge one costs nothing."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > most:
            said = {"count": len(value), "most": most}
            raise PydanticCustomError("too_many", "has {count} items; at most {most} are supported", said)
        return value

    return BeforeValidator(check)


def implies(condition: Schema, consequence: Schema) -> Schema:
    return {"if": condition, "then": consequence}


def has(**properties: Schema) -> Schema:
    return {"required": list(properties), "properties": properties}


Integer = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]  # an integer is a number, too
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
TOKEN: Schema = {"minimum": 0, "maximum": "$last_token"}
Token = Annotated[int, Field(strict=True, json_schema_extra=TOKEN), BeforeValidator(whole)]
TokenIds = Annotated[list[Token], Field(max_length=1024, fail_fast=True)]
TOKEN_KEYS: Schema = {"propertyNames": {"pattern": "$token_key", "maxLength": 18}}
Bias = Annotated[
    dict[str, Annotated[Number, Field(ge=-100, le=100)]],
    Field(max_length=BIAS_ENTRIES, json_schema_extra=TOKEN_KEYS),
    at_most(BIAS_ENTRIES),
]
Metadata = Annotated[dict[str, Any], Field(max_length=1024), at_most(1024)]

# Fields that are known but not supported, with the values that change nothing; null never does.

# The form of the output.
FORMAT: dict[str, Values] = {
    "response_format": ({"type": "text"},), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (),
    "guided_whitespace_pattern": (), "structured_outputs": (), "structural_tag": (), "json_schema": (), "regex": (),
    "ebnf": (), "grammar": (),
}  # fmt: skip
# How tokens are drawn, where the output ends, and how tokens become text.
DRAWING: dict[str, Values] = {
    "allowed_token_ids": (), "bad_words": ([],), "logits_processors": ([],), "custom_logit_processor": (),
    "custom_params": ({},), "stop_regex": ([], ""), "use_beam_search": (False,), "length_penalty": (1,),
    "early_stopping": (False,), "typical_p": (1,), "mirostat": (0,), "no_repeat_ngram_size": (0,),
    "repetition_detection": (), "thinking_token_budget": (-1,), "max_thinking_tokens": (-1,), "watermarking": (False,),
    "include_stop_str_in_output": (False,), "spaces_between_special_tokens": (True,), "lora_path": ("",),
    "lora_id": ("",), "lora_request": (), "best_of": (1,), "speculate": (True,),
}  # fmt: skip
# Parts of the prompt.
INPUT: dict[str, Values] = {
    "truncate_prompt_tokens": (), "prompt_embeds": ([],), "input_embeds": ([],), "image_data": ([],),
    "video_data": ([],), "audio_data": ([],), "session_params": ({},), "suffix": ("",), "echo": (False,),
}  # fmt: skip
# Parts of the answer beside the text.
ANSWER: dict[str, Values] = {
    "prompt_logprobs": (), "logprob_token_ids": (), "token_ids_logprob": ([],), "return_hidden_states": (False,),
    "return_token_ids": (False,), "return_prompt_token_ids": (False,), "return_tokens_as_token_ids": (False,),
    "return_routed_experts": (False,), "return_meta_info": (False,), "return_entropy": (False,),
}  # fmt: skip
UNSUPPORTED = FORMAT | DRAWING | INPUT | ANSWER  # in every body


def changes_nothing(value: Any, harmless: Values) -> bool:
    """Whether a value is null or one of these. Null members of an object count as absent."""
    if isinstance(value, dict):
        value = {name: member for name, member in value.items() if member is not None}
    return value is None or any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in harmless
    )


class Body(BaseModel):
    """An object of a request, read with a `Reading` as context."""

    place: ClassVar[str] = ""
    """Prefix of a field's name in messages, for example `stream_options.`."""

    unsupported: ClassVar[Mapping[str, Values]] = {}
    """Known fields that are not supported, with the values that change nothing; null never does."""

    elsewhere: ClassVar[Mapping[str, tuple[str, Values]]] = {}
    """Fields that would change the text and have another name or place here: the advice, and values that pass."""

    relations: ClassVar[Sequence[Schema]] = ()
    """Rules between fields for the schema."""

    @classmethod
    def read(cls: type[AnyBody], values: Any, reading: Reading) -> AnyBody:
        """Checks parsed JSON.

        Raises:
            ApiError: no object, a wrong type or a field that is not supported; names the first wrong field.
        """
        if not isinstance(values, dict):
            what = cls.place.rstrip(".") or "the body"
            raise bad_request(f"{what} must be a JSON object, got {shown(values)}", _root(cls.place))
        try:
            return cls.model_validate(values, context=reading)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise bad_request(_message(cls, first), _root(cls.place) or str(first["loc"][0])[:MAX_NAME]) from error

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any, info: Any) -> Any:
        if not isinstance(values, dict):
            return values
        root = _root(cls.place)
        for name, value in values.items():
            if name in cls.model_fields:
                continue
            if name in cls.elsewhere:
                advice, harmless = cls.elsewhere[name]
                if not changes_nothing(value, harmless):
                    message = f"{cls.place}{name} is not a field here: {advice}"
                    raise bad_request(message, root or name, "unsupported")
            elif name in cls.unsupported:
                harmless = cls.unsupported[name]
                if not changes_nothing(value, harmless):
                    passes = ", ".join(["null", *(repr(other) for other in harmless)])
                    message = f"{cls.place}{name} is not supported (only {passes}), got {shown(value)}"
                    raise bad_request(message, root or name, "unsupported")
            else:
                reading(info).ignored.add(name, cls.place, root)
        return {name: whole(values[name]) for name in cls.model_fields if name in values}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        """Adds the fields that are not supported, and the rules between fields."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        schema["additionalProperties"] = "$lenient"
        schema |= {"allOf": list(cls.relations)} if cls.relations else {}
        about = "Not supported: only the values that change nothing pass."
        for name, harmless in cls.unsupported.items():
            if name not in cls.model_fields:
                schema["properties"][name] = {"enum": [None, *harmless], "description": about}
        for name, (advice, harmless) in cls.elsewhere.items():
            schema["properties"][name] = {"enum": [None, *harmless], "description": f"Not a field here: {advice}."}
        return schema


AnyBody = TypeVar("AnyBody", bound=Body)


def _root(place: str) -> str | None:
    return re.split(r"[.\[]", place, maxsplit=1)[0] or None


def _message(kind: type[Body], error: ErrorDetails) -> str:
    """Pydantic's error in the form "`field` must be ..., got ..."."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part[:MAX_NAME]}" for part in error["loc"]]
    name = kind.place + "".join(parts).removeprefix(".")
    limits = error.get("ctx", {})
    match error["type"]:
        case "missing":
            return f"{name} is required"
        case "string_too_short" | "too_short":
            said = "must not be empty"
        case "string_too_long":
            said = f"must have at most {limits['max_length']} characters"
        case "too_long":
            said = f"has {limits['actual_length']} items; at most {limits['max_length']} are supported"
        case "greater_than" | "greater_than_equal" | "less_than_equal":
            said = _range(kind.model_json_schema()["properties"][error["loc"][0]])
        case _:
            said = re.sub(" or instance of .*", "", error["msg"].replace("Input should ", "must "))
    return f"{name} {said.replace('dictionary', 'object')}, got {shown(error['input'])}"


def _range(schema: Schema) -> str:
    """The limits of a number, or of an object's numbers, in words."""
    forms = [*schema["anyOf"], *(each.get("additionalProperties") for each in schema["anyOf"])]
    limits = next(each for each in forms if isinstance(each, dict) and {"minimum", "exclusiveMinimum"} & set(each))
    high = whole(limits.get("maximum"))
    if "exclusiveMinimum" in limits:
        return f"must be above {whole(limits['exclusiveMinimum'])} and at most {high}"
    low = whole(limits["minimum"])
    return f"must be at least {low}" if high is None or isinstance(high, str) else f"must be from {low} to {high}"
