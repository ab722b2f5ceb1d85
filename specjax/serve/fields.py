"""Reading request bodies: their JSON, the rules for their fields, and the types that fields are declared with.

The declaration of a `Body`'s field gives the check, the error message and the OpenAPI document. Unsupported fields of
OpenAI, SGLang and vLLM return a 400 that names the field, unless their value changes nothing. Unknown fields are
ignored and named in a response header.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar, get_args
from urllib.parse import quote

import pydantic_core
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specjax.engine.sampling_params import MAX_SALT, MAX_STOP_LENGTH, MAX_STOP_STRINGS
from specjax.engine.text import MAX_PATTERN
from specjax.logprobs import LOGPROB_IDS
from specjax.sampling import BIAS_ENTRIES
from specjax.serve.errors import ApiError, bad_request, shown

IGNORED_HEADER = "X-Specjax-Ignored-Fields"  # names the fields of the request that had no effect
MAX_NAMED = 16  # maximum number of ignored fields in the header
MAX_NAME = 64  # maximum number of characters of a field's name in headers and messages

# Web pages can send these content types to any server without a CORS preflight.
SIMPLE = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")

MAX_MARKS = 2**20  # maximum number of commas, colons and opening brackets in a body: room for batches of token ids
INLINE_BYTES = 2**14  # maximum size of a body that is read on the event loop; a thread would take longer

# One thread: parsing holds Python's global lock, and two large bodies at once would take twice the memory.
_PARSING = ThreadPoolExecutor(1, thread_name_prefix="specjax-parse")

Values: TypeAlias = tuple[Any, ...]
Result = TypeVar("Result")


class Reading:
    """Limits the JSON values of one body of `size` bytes, and collects its ignored fields. The context of pydantic's
    validation."""

    def __init__(self, size: int = 0) -> None:
        self.size = size
        self._marks = 0
        self._ignored: dict[str, None] = {}  # names in order, at most MAX_NAMED + 1

    async def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Calls a function whose run time grows with the body, in a thread if the body is large."""
        if self.size <= INLINE_BYTES:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(_PARSING, function, *arguments)

    def parse(self, data: bytes | bytearray) -> object:
        """Parses a JSON text. Infinity and NaN pass: the fields refuse them by name.

        The parser holds Python's global lock, and a value of two bytes (`[]`) becomes an object of 64 bytes. Counting
        before parsing prevents one body from filling the memory or stopping other requests.

        Raises an ApiError: 413 for too many values in the whole body, 400 for invalid JSON or nesting that is too deep.
        """
        self._marks += sum(map(data.count, b",:[{"))
        if self._marks > MAX_MARKS:
            problem = f"{self._marks} commas, colons and opening brackets; at most {MAX_MARKS} are read"
            raise ApiError(413, f"the body holds {problem}", code="body_too_large")
        try:
            return pydantic_core.from_json(data, cache_strings="keys")
        except ValueError as error:
            raise bad_request(f"the body is not valid JSON: {error}") from error

    def ignore(self, name: str) -> None:
        """Records an unknown field."""
        if len(self._ignored) <= MAX_NAMED:
            self._ignored[name] = None

    @property
    def headers(self) -> dict[str, str]:
        """The header with the names of ignored fields, percent-encoded so that no name can add another header."""
        names = [quote(name, safe="[]", errors="replace") or '""' for name in self._ignored]
        names[MAX_NAMED:] = ["..."] * (len(names) > MAX_NAMED)
        return {IGNORED_HEADER: ", ".join(names)} if names else {}


def whole(value: Any) -> Any:
    """Converts 2.0 to 2, because JSON does not distinguish them. Other values are unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def at_most(most: int) -> BeforeValidator:
    """Checks the length of a list or object before its members."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > most:
            numbers = {"count": len(value), "most": most}
            raise PydanticCustomError("too_many", "has {count} items; at most {most} are supported", numbers)
        return value

    return BeforeValidator(check)


def finite(value: dict[str, Any]) -> dict[str, Any]:
    """Refuses infinity and NaN at any depth: an answer that repeats them would be invalid JSON."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise PydanticCustomError("finite", "must hold only finite numbers, as JSON does") from None
    return value


def texts(items: str, wrap: Callable[[str], Any] = str, **more: Any) -> BeforeValidator:
    """Accepts a text instead of a list, as its only item, which `wrap` makes. `items` names the items in messages."""

    def check(value: Any) -> Any:
        if not isinstance(value, str | list):
            raise PydanticCustomError("texts", "must be a string or a list of {items}", {"items": items})
        return [wrap(value)] if isinstance(value, str) else value

    return BeforeValidator(check, **more)


Integer = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]  # integers are numbers
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
Token = Annotated[int, Field(strict=True), BeforeValidator(whole)]  # the engine checks the range
StopIds = Annotated[list[Token], Field(max_length=1024, fail_fast=True)]
LogprobIds = Annotated[list[Token], Field(max_length=LOGPROB_IDS, fail_fast=True)]
Bias = Annotated[
    dict[str, Annotated[Number, Field(ge=-100, le=100)]],
    Field(max_length=BIAS_ENTRIES),
    at_most(BIAS_ENTRIES),
]
Metadata = Annotated[dict[str, Any], Field(max_length=1024), at_most(1024), AfterValidator(finite)]
Salt = Annotated[Text, Field(min_length=1, max_length=MAX_SALT)]
StopString = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
Stop = Annotated[StopStrings, texts("non-empty strings", json_schema_input_type=StopString | StopStrings)]
StopPattern = Annotated[Text, Field(min_length=1, max_length=MAX_PATTERN)]
PatternList = Annotated[list[StopPattern], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
Patterns = Annotated[PatternList, texts("non-empty strings", json_schema_input_type=StopPattern | PatternList)]

# Fields of other routes, and unsupported fields, with the accepted values, which change nothing. Null is always
# accepted. A body's own fields take precedence.
UNSUPPORTED: dict[str, Values] = {
    # Form of the output.
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "json_schema": (), "structured_outputs": (), "guided_json": (),
    "guided_regex": (), "guided_choice": (), "guided_grammar": (),
    "guided_whitespace_pattern": (), "structural_tag": (), "grammar": (),
    # Sampling, stop conditions and detokenisation.
    "allowed_token_ids": (), "bad_words": ([],), "logits_processors": ([],), "custom_logit_processor": (),
    "use_beam_search": (False,), "length_penalty": (1,),
    "early_stopping": (False,), "typical_p": (1,), "mirostat": (0,), "no_repeat_ngram_size": (0,),
    "repetition_detection": (), "max_thinking_tokens": (-1,), "watermarking": (False,),
    "include_stop_str_in_output": (False,), "spaces_between_special_tokens": (True,), "lora_path": ("",),
    "lora_id": ("",), "lora_request": (), "best_of": (1,), "speculate": (True,), "timeout": (),
    "sampling_params": ({},), "max_tokens": (), "max_completion_tokens": (), "max_new_tokens": (), "min_tokens": (0,),
    "min_new_tokens": (0,),
    # Prompt.
    "messages": (), "prompt": (), "text": (), "input_ids": ([],),
    "truncate_prompt_tokens": (), "prompt_embeds": ([],), "input_embeds": ([],), "image_data": ([],),
    "video_data": ([],), "audio_data": ([],), "session_params": ({},), "suffix": ("",), "echo": (False,),
    # Additional results.
    "logprobs": (False,), "top_logprobs": (0,),
    "prompt_logprobs": (), "logprob_token_ids": (), "token_ids_logprob": ([],), "return_hidden_states": (False,),
    "return_sampling_mask": (False,), "sampling_logprobs_mode": (),
    "return_token_ids": (False,), "return_prompt_token_ids": (False,), "return_tokens_as_token_ids": (False,),
    "return_routed_experts": (False,), "return_meta_info": (False,), "return_entropy": (False,),
}  # fmt: skip


def changes_nothing(value: Any, harmless: Values) -> bool:
    """True if a value is null or in `harmless`. Null members of an object count as absent."""
    if isinstance(value, dict):
        value = {name: member for name, member in value.items() if member is not None}
    return value is None or any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in harmless
    )


class Body(BaseModel):
    """An object of a request, read with a `Reading` as context."""

    model_config = ConfigDict(extra="allow")  # until `drop_unknown`

    unsupported: ClassVar[Mapping[str, Values]] = {}  # as `UNSUPPORTED`

    @classmethod
    def read(cls: type[AnyBody], values: Any, reading: Reading) -> AnyBody:
        """Checks a whole body, and removes its unknown fields. Raises an ApiError."""
        body = cls.check(values, reading)
        for name in body.drop_unknown():
            reading.ignore(name)
        return body

    @classmethod
    def check(cls: type[AnyBody], values: Any, reading: Reading | None = None, place: str = "") -> AnyBody:
        """Checks parsed JSON. Raises an ApiError that names the first wrong field. `place`: prefix of fields in
        messages, for example `sampling_params.`."""
        try:
            return cls.model_validate(values, context=reading)
        except ValidationError as error:
            raise _refusal(cls, error.errors(include_url=False)[0], place) from error

    def drop_unknown(self, place: str = "") -> Iterator[str]:
        """Removes unknown fields and yields their names, also in nested bodies: `messages[].content[].name`."""
        unknown = self.model_extra or {}
        yield from (place + name[:MAX_NAME] for name in unknown)
        unknown.clear()
        for name, value in self.__dict__.items():
            if isinstance(value, Body):
                yield from value.drop_unknown(f"{place}{name}.")
            elif isinstance(value, list) and value and isinstance(value[0], Body):
                for item in value:
                    yield from item.drop_unknown(f"{place}{name}[].")

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        accepted: dict[str, Any] = {}
        for name, value in values.items():
            if name in cls.model_fields:
                accepted[name] = whole(value)
                continue
            if name not in cls.unsupported:
                accepted[name] = value
            elif not changes_nothing(value, harmless := cls.unsupported[name]):
                only = ", ".join(["null", *map(shown, harmless)])
                details = {"field": name, "only": only, "value": shown(value)}
                raise PydanticCustomError("unsupported", "is not supported (only {only}), got {value}", details)
        return accepted


AnyBody = TypeVar("AnyBody", bound=Body)


def _root(name: str) -> str | None:
    """The field of the body in a name such as `messages[0].role`."""
    return re.split(r"[.\[]", name, maxsplit=1)[0] or None


def _refusal(kind: type[Body], error: ErrorDetails, place: str) -> ApiError:
    """Pydantic's error in the form "`field` must be ..., got ..."."""
    location, limits, code = [*error["loc"]], error.get("ctx", {}), None
    got = f", got {shown(error['input'])}"
    match error["type"]:
        case "missing":
            problem, got = "is required", ""
        case "unsupported":
            problem, got, code = error["msg"], "", "unsupported"
            location.append(limits["field"])
        case "union_tag_invalid":
            problem = f"has a type that is not one of {limits['expected_tags']}"
        case "union_tag_not_found":
            problem = "must be an object with a type"
        case "string_too_short" | "too_short":
            problem = "must not be empty"
        case "string_too_long":
            problem = f"must have at most {limits['max_length']} characters"
        case "too_long":
            problem = f"has {limits['actual_length']} items; at most {limits['max_length']} are supported"
        case "string_pattern_mismatch":
            problem = f"must match the pattern {limits['pattern']}"
        case "greater_than" | "greater_than_equal" | "less_than_equal" if limits := _range(kind, location[0]):
            problem = limits
        case _:
            problem = re.sub(" or instance of .*", "", error["msg"].replace("Input should ", "must "))
            problem = problem.replace("dictionary", "object")
    parts = [f"[{part}]" if isinstance(part, int) else f".{part[:MAX_NAME]}" for part in location]
    name = (place + "".join(parts).removeprefix(".")).removesuffix(".")
    return bad_request(f"{name or 'the body'} {problem}{got}", _root(name), code)


@functools.cache
def _range(kind: type[Body], field: Any) -> str | None:
    """The limits of a number, or of an object's numbers, in words; None: the field is another object."""
    schema = kind.model_json_schema()["properties"][field]
    choices = schema.get("anyOf", [schema])  # a required field has no `anyOf`
    forms = [*choices, *(choice.get("additionalProperties") for choice in choices)]
    ranges = (form for form in forms if isinstance(form, dict) and {"minimum", "exclusiveMinimum"} & set(form))
    if (limits := next(ranges, None)) is None:
        return None
    high = whole(limits.get("maximum"))
    if "exclusiveMinimum" in limits:
        return f"must be above {whole(limits['exclusiveMinimum'])} and at most {high}"
    low = whole(limits["minimum"])
    return f"must be at least {low}" if high is None else f"must be from {low} to {high}"


class BodyRoute(APIRoute):
    """Reads an endpoint's parameter `body` with `request.state.reading`, a `Reading`. The answer's headers name the
    ignored fields.

    FastAPI would parse and check a body on the event loop, which answers no other request meanwhile: seconds for a body
    of many small objects.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        if self.body_field is None:
            return super().get_route_handler()
        annotation: Any = self.body_field.field_info.annotation
        kind, *optional = get_args(annotation) or (annotation,)

        async def handle(request: Request) -> Response:
            data = await receive_body(request, optional=bool(optional))
            reading = request.state.reading = Reading(len(data))
            absent = bool(optional) and not data
            body = None if absent else await reading.run(lambda: kind.read(reading.parse(data), reading))
            del data  # the answer may take long
            more = {"request": request} if self.dependant.request_param_name else {}
            answer = await self.endpoint(body=body, **more)
            response = answer if isinstance(answer, Response) else JSONResponse(answer)
            response.headers.update(reading.headers)
            return response

        return handle


async def receive_body(request: Request, *, optional: bool) -> bytearray:
    """The bytes of a body. Raises an ApiError, a 415, if it is not sent as JSON, or is compressed. An absent body has
    any type, except `SIMPLE` ones."""
    sent_as = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    empty = request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers
    if optional and empty and sent_as not in SIMPLE:
        return bytearray()
    if sent_as != "application/json" and not (sent_as.startswith("application/") and sent_as.endswith("+json")):
        raise ApiError(415, f"the body must be sent as Content-Type: application/json, got {sent_as or 'none'!r:.80}")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(415, f"the body must be sent without Content-Encoding, got {coding!r:.80}")
    data = bytearray()
    async for piece in request.stream():
        data += piece
    return data
