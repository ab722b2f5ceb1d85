"""What the fields of a request body may be, and what becomes of the ones that are not supported.

Three kinds of fields:

- supported: each has a type, checked here, and a range, checked by `SamplingParams`;
- known but not supported (`Body.unsupported`): OpenAI's, SGLang's and vLLM's fields that would change the text or the
  answer. The values that ask for nothing pass, any other is refused by name;
- unknown: ignored and named in a response header, or refused with `--strict-fields`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from specjax.sampling import BIAS_ENTRIES
from specjax.serve.errors import bad_request, shown

logger = logging.getLogger("specjax.serve")

IGNORED_HEADER = "X-Specjax-Ignored-Fields"
"""Names the fields of the request that had no effect."""

MAX_NAMED = 16
"""Most ignored fields that the header and the log name."""

MAX_NAME = 64
"""Most characters of a field's name that are repeated."""

MAX_STOP_IDS = 1024
MAX_METADATA = 1024

Values = tuple[Any, ...]


class Ignored:
    """The fields of one request that have no effect."""

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._names: dict[str, None] = {}
        self._more = False

    def add(self, name: str, where: str = "", param: str | None = None) -> None:
        """Notes a field. `where`: what stands before its name, as in `stream_options.`.

        Raises:
            ApiError: unknown fields are refused (`--strict-fields`).
        """
        name = name[:MAX_NAME]
        if self._strict:
            raise bad_request(
                f"unknown field {where + name!r}; this server refuses those (--strict-fields)",
                param or name,
                "unknown_field",
            )
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
        """One line of bounded length. Values are private: they are not logged."""
        if self._names:
            logger.warning("%s: ignored fields: %s", id, self.headers[IGNORED_HEADER])


def _at_most(most: int, what: str) -> BeforeValidator:
    """Checks the length before any item."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > most:
            said = f"it has {len(value)} {what}; at most {most} are supported"
            raise PydanticCustomError("too_long", "{said}", {"said": said})
        return value

    return BeforeValidator(check)


def whole_numbers(values: list[Any]) -> list[Any]:
    """The same with 2.0 as 2: JSON does not tell them apart. What is no whole number stays."""
    if float in set(map(type, values)):
        return [_whole(value) for value in values]
    return values


def _token_ids(value: Any) -> Any:
    """One error for the first wrong item."""
    if not isinstance(value, list):
        return value
    value = whole_numbers(value)
    for index, token in enumerate(value):
        if type(token) is not int:
            said = f"item {index} should be a valid integer, got {shown(token)}"
            raise PydanticCustomError("int_type", "{said}", {"said": said})
    return value


def _whole(value: Any) -> Any:
    """JSON does not tell 2.0 from 2."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, Field(strict=True), BeforeValidator(_whole)]
Number = Annotated[float, Field(strict=True)]  # an integer is one, too
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
TokenIds = Annotated[list[Any], _at_most(MAX_STOP_IDS, "token ids"), BeforeValidator(_token_ids)]
Bias = Annotated[dict[str, Number], _at_most(BIAS_ENTRIES, "entries")]
Metadata = Annotated[dict[str, Any], _at_most(MAX_METADATA, "entries")]

FORMAT: dict[str, Values] = {
    "response_format": ({"type": "text"},), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (),
    "guided_whitespace_pattern": (), "structured_outputs": (), "structural_tag": (), "json_schema": (), "regex": (),
    "ebnf": (), "grammar": (),
}  # fmt: skip
"""What the output must look like."""

DRAWING: dict[str, Values] = {
    "allowed_token_ids": (), "bad_words": ([],), "logits_processors": ([],), "custom_logit_processor": (),
    "custom_params": ({},), "stop_regex": ([], ""), "use_beam_search": (False,), "length_penalty": (1,),
    "early_stopping": (False,), "typical_p": (1,), "mirostat": (0,), "no_repeat_ngram_size": (0,),
    "repetition_detection": (), "thinking_token_budget": (-1,), "max_thinking_tokens": (-1,), "watermarking": (False,),
    "include_stop_str_in_output": (False,), "spaces_between_special_tokens": (True,), "lora_path": ("",),
    "lora_id": ("",), "lora_request": (), "best_of": (1,), "speculate": (True,),
}  # fmt: skip
"""How tokens are drawn, where it ends, and how they become text."""

INPUT: dict[str, Values] = {
    "truncate_prompt_tokens": (), "prompt_embeds": ([],), "input_embeds": ([],), "image_data": ([],),
    "video_data": ([],), "audio_data": ([],), "session_params": ({},), "suffix": ("",), "echo": (False,),
}  # fmt: skip
"""What the prompt is made of."""

ANSWER: dict[str, Values] = {
    "prompt_logprobs": (), "logprob_token_ids": (), "token_ids_logprob": ([],), "return_hidden_states": (False,),
    "return_token_ids": (False,), "return_prompt_token_ids": (False,), "return_tokens_as_token_ids": (False,),
    "return_routed_experts": (False,), "return_meta_info": (False,), "return_entropy": (False,),
}  # fmt: skip
"""What the answer should hold beside the text."""

CHAT: dict[str, Values] = {
    "parallel_tool_calls": (True, False), "modalities": (["text"],), "audio": (), "prediction": (),
    "reasoning_effort": ("none", "medium"), "verbosity": ("medium",), "web_search_options": (), "moderation": (),
    "add_generation_prompt": (True,), "continue_final_message": (False,), "add_special_tokens": (False,),
    "chat_template": (), "chat_template_kwargs": ({},), "documents": ([],), "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}  # fmt: skip
"""Fields of chats: OpenAI's defaults, and how messages become a prompt."""

UNSUPPORTED = FORMAT | DRAWING | INPUT | ANSWER
"""In every body."""


def asks_for_nothing(value: Any, harmless: Values) -> bool:
    """Whether a value is null or one of these. Null members of an object count as absent."""
    if isinstance(value, dict):
        value = {name: member for name, member in value.items() if member is not None}
    return value is None or any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in harmless
    )


class Body(BaseModel):
    """An object of a request. Fields are read by `read`, which sees the ones that pydantic does not know."""

    model_config = ConfigDict(extra="ignore", strict=True)

    unsupported: ClassVar[Mapping[str, Values]] = {}
    """Known fields that are not supported, with the values that ask for nothing; null always does."""

    elsewhere: ClassVar[Mapping[str, tuple[str, Values]]] = {}
    """Fields that would change the text and have another name or place here: the advice, and values that pass."""

    @classmethod
    def read(cls: type[AnyBody], values: Any, ignored: Ignored, where: str = "") -> AnyBody:
        """From parsed JSON. `where`: what stands before a field's name in messages.

        Raises:
            ApiError: no object, a wrong type or a field that is not supported; names the first field that is wrong.
        """
        if not isinstance(values, dict):
            what = where.rstrip(".") or "the body"
            raise bad_request(f"{what} must be a JSON object, got {shown(values)}", where.partition(".")[0] or None)
        root = where.partition(".")[0].partition("[")[0]
        for name, value in values.items():
            if name in cls.model_fields:
                continue
            if name in cls.elsewhere:
                advice, harmless = cls.elsewhere[name]
                if not asks_for_nothing(value, harmless):
                    raise bad_request(f"{where}{name} is not a field here: {advice}", root or name, "unsupported")
            elif name in cls.unsupported:
                harmless = cls.unsupported[name]
                if not asks_for_nothing(value, harmless):
                    passes = ", ".join(["null", *(repr(other) for other in harmless)])
                    raise bad_request(
                        f"{where}{name} is not supported (only {passes}), got {shown(value)}",
                        root or name,
                        "unsupported",
                    )
            else:
                ignored.add(name, where, root or None)
        return _checked(cls.model_validate, values, where)


AnyBody = TypeVar("AnyBody", bound=Body)


def _checked(validate: Callable[[Any], AnyBody], values: Any, where: str) -> AnyBody:
    try:
        return validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = where + ".".join(str(part)[:MAX_NAME] for part in first["loc"])
        root = name.partition(".")[0].partition("[")[0]
        said = (first["msg"][0].lower() + first["msg"][1:]).replace("dictionary", "object")
        raise bad_request(f"{name}: {said}, got {shown(first['input'])}", root or None) from error
