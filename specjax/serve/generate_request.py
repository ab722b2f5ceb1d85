"""The body of `/generate`, SGLang's own endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator

from specjax.engine.sampling_params import SamplingParams
from specjax.serve import structured
from specjax.serve.errors import bad_request
from specjax.serve.fields import UNSUPPORTED, Body, Flag, Integer, LogprobIds, Reading, Salt, Schema, Values, has
from specjax.serve.protocol import (
    GIVEN,
    IDS_OR_LISTS,
    NULL,
    SALT,
    TEXTS,
    LeastTokens,
    NewTokensOrNone,
    SamplingFields,
    TaskBody,
    TopLogprobs,
    checked_later,
)
from specjax.serve.structured import JsonSchema
from specjax.serve.task import Rules, Task, read_prompts

GENERATE_TOKENS = 128  # SGLang's default of `max_new_tokens`
MAX_ID = 256  # characters of a request's name (`rid`)
NAMES = {"logprob_ids": "token_ids_logprob"}  # of `SamplingParams` to those of the body


class SamplingBody(SamplingFields):
    """`sampling_params` of `/generate`."""

    place = "sampling_params."
    unsupported = UNSUPPORTED | structured.UNSUPPORTED
    elsewhere: ClassVar[Mapping[str, tuple[str, Values]]] = {
        "max_tokens": ("it is called max_new_tokens", ()),
        "max_completion_tokens": ("it is called max_new_tokens", ()),
        "min_tokens": ("it is called min_new_tokens", (0,)),
        "logprobs": ("the body has return_logprob", (False,)),
        "cache_salt": ("it belongs to the body", ()),
    }

    json_schema: JsonSchema = Field(None, description="As an object, or its text. JSON is written on one line.")
    max_new_tokens: NewTokensOrNone | None = Field(
        None, description=f"0: the prompt is read, and nothing drawn. Default: {GENERATE_TOKENS}, or what fits."
    )
    min_new_tokens: LeastTokens | None = None


class LogprobFields(Body):
    """Which log-probabilities of one prompt and its text are wanted."""

    return_logprob: Flag | None = None
    top_logprobs_num: TopLogprobs | None = None
    logprob_start_len: Annotated[Integer, Field(ge=-1)] | None = None
    token_ids_logprob: LogprobIds | None = None


NAME: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_ID}
LIST = Field(min_length=1, json_schema_extra={"maxItems": "$capacity"})
Flags = Annotated[list[Flag | None], LIST]
Counts = Annotated[list[TopLogprobs | None], LIST]
Start = Annotated[Integer, Field(ge=-1)]
Starts = Annotated[list[Start | None], LIST]
ListsOfIds = Annotated[list[LogprobIds | None], LIST]


def _unchanged(given: Any) -> Any:
    """Of fields that `task` checks, for one prompt at a time."""
    return given


class GenerateRequest(TaskBody):
    """SGLang's own endpoint."""

    unsupported = UNSUPPORTED | structured.UNSUPPORTED | {"modalities": (["text"], [])}
    elsewhere: ClassVar[Mapping[str, tuple[str, Values]]] = {
        "messages": ("/generate takes text or input_ids", ()),
        "prompt": ("/generate takes text or input_ids", ()),
        **{name: ("it belongs to sampling_params", (1,) if name == "n" else ()) for name in SamplingBody.model_fields},
        "max_tokens": ("sampling_params has max_new_tokens", ()),
        "max_completion_tokens": ("sampling_params has max_new_tokens", ()),
        "min_tokens": ("sampling_params has min_new_tokens", (0,)),
        "logprobs": ("it is called return_logprob", (False,)),
        "top_logprobs": ("it is called top_logprobs_num", (0,)),
    }
    relations = (
        {"anyOf": [has(text=GIVEN, input_ids=NULL) | {"required": ["text"]},
                   has(input_ids=GIVEN, text=NULL) | {"required": ["input_ids"]}]},
    )  # fmt: skip

    text: Annotated[Any, checked_later(*TEXTS, NULL)] = None
    input_ids: Annotated[Any, checked_later(*IDS_OR_LISTS, NULL)] = None
    # A schema cannot tie the length of one list to that of another.
    sampling_params: Annotated[Any, PlainValidator(_unchanged, json_schema_input_type=SamplingBody | None)] = Field(
        None, description="With a list of prompts also a list, one for each."
    )
    rid: Annotated[Any, checked_later(NAME, NULL)] = Field(
        None, description="Names prompt i of a list rid_i. With a list also a list of names."
    )
    stream: Flag | None = None
    return_logprob: Annotated[Any, PlainValidator(_unchanged, json_schema_input_type=Flag | Flags | None)] = Field(
        None,
        description="This and the next three may be lists, with one item for each prompt. Without it these have no "
        "effect.",
    )
    top_logprobs_num: Annotated[Any, PlainValidator(_unchanged, json_schema_input_type=TopLogprobs | Counts | None)] = (
        Field(None, description="Log-probabilities of so many of the likeliest tokens at each place.")
    )
    logprob_start_len: Annotated[Any, PlainValidator(_unchanged, json_schema_input_type=Start | Starts | None)] = Field(
        None,
        description="Log-probabilities of the prompt from this token on, whose own is null. Default: -1, of the output "
        "alone.",
    )
    token_ids_logprob: Annotated[
        Any, PlainValidator(_unchanged, json_schema_input_type=LogprobIds | ListsOfIds | None)
    ] = Field(None, description="Log-probabilities of these tokens at each place.")
    return_text_in_logprobs: Flag | None = None
    cache_salt: Salt | None = Field(None, description=SALT)
    require_reasoning: Flag | None = Field(
        None,
        description="The text begins inside of thoughts, whatever the prompt ends with: a grammar begins after "
        "`</think>`, and stop strings and patterns match there. For models whose vocabulary has that token.",
        json_schema_extra={"enum": "$thinks"},
    )

    @property
    def is_batch(self) -> bool:
        given = self.input_ids if self.text is None else self.text
        return isinstance(given, list) and (self.text is not None or (bool(given) and isinstance(given[0], list)))

    def task(self, rules: Rules, reading: Reading) -> Task:
        if (self.text is None) == (self.input_ids is None):
            raise bad_request("give either text or input_ids", "text")
        if self.require_reasoning and rules.form.end_think is None:
            problem = "require_reasoning needs a model that thinks; this one has no token </think>"
            raise bad_request(problem, "require_reasoning")
        # The first is checked alone: it may be wrong, and there may be thousands.
        given = {} if self.sampling_params is None else self.sampling_params
        many = isinstance(given, list)
        if given == []:
            raise bad_request(
                "sampling_params must be an object, or a list with one for each prompt, got []", "sampling_params"
            )
        first = SamplingBody.read((given[0] if given else None) if many else given, reading)
        field, prompt = ("input_ids", self.input_ids) if self.text is None else ("text", self.text)
        choices = first.n or 1
        prompts = read_prompts(prompt, field, choices, rules)
        if isinstance(prompts[0], str) != (field == "text"):
            raise bad_request(f"{field} holds the other's kind: text is for strings, input_ids for token ids", field)
        if many and len(given) != len(prompts):
            raise bad_request(f"{len(prompts)} prompts, but {len(given)} sampling_params", "sampling_params")
        bodies = [SamplingBody.read(each, reading) for each in given] if many else [first]
        if any((body.n or 1) != choices for body in bodies):
            raise bad_request("n must be the same for all prompts", "sampling_params")
        wanted = self._logprobs(len(prompts), reading)
        if len(bodies) == len(wanted) == 1:  # one object for all prompts
            sampling = [self._params(first, wanted[0], rules)] * len(prompts)
        else:
            pairs = zip(bodies * (len(prompts) // len(bodies)), wanted * (len(prompts) // len(wanted)), strict=True)
            sampling = [self._params(*pair, rules) for pair in pairs]
        ids = self._ids(len(prompts))
        names = [body.names | NAMES for body in bodies] * (len(prompts) // len(bodies))
        return Task(prompts, sampling, choices, names_of=names, prompt_field=field, ids=ids, most=GENERATE_TOKENS)

    def _params(self, body: SamplingBody, wanted: LogprobFields, rules: Rules) -> SamplingParams:
        more: dict[str, Any] = {"cache_salt": self.cache_salt, "priority": self.priority, "logprobs": None}
        more["require_reasoning"] = more["stop_after_reasoning"] = bool(self.require_reasoning)
        if wanted.return_logprob:
            more |= {"logprobs": wanted.top_logprobs_num or 0, "logprob_start_len": wanted.logprob_start_len}
            more |= {"logprob_ids": tuple(wanted.token_ids_logprob or ())}
        return body.params(rules, **more)

    def _logprobs(self, count: int, reading: Reading) -> list[LogprobFields]:
        """One for each of `count` prompts, or a single one for all. Raises an ApiError for a wrong value or length."""
        given = {name: getattr(self, name) for name in LogprobFields.model_fields}
        each = {
            name: value
            for name, value in given.items()
            if isinstance(value, list)
            and (name != "token_ids_logprob" or (value and all(isinstance(ids, list | None) for ids in value)))
        }
        for name, value in each.items():
            if len(value) != count:
                raise bad_request(f"{name} needs one item for each of the {count} prompts, got {len(value)}", name)
        own = range(count) if each else range(1)
        return [
            LogprobFields.read(given | {name: value[index] for name, value in each.items()}, reading) for index in own
        ]

    def _ids(self, count: int) -> list[str] | None:
        """The names of `count` prompts."""
        if self.rid is None:
            return None
        ids = self.rid if isinstance(self.rid, list) else [self.rid]
        if not all(isinstance(id, str) and 0 < len(id) <= MAX_ID for id in ids):
            raise bad_request(f"rid must be a string of 1 to {MAX_ID} characters, or a list of them", "rid")
        if isinstance(self.rid, str) and count > 1:
            return [f"{self.rid}_{index}" for index in range(count)]  # as SGLang makes them
        if not len(ids) == len(set(ids)) == count:
            raise bad_request(f"rid needs one name of its own for each of the {count} prompts", "rid")
        return ids
