"""Request bodies: their types, and what they ask of the engine. Every field works or is refused by name.

One rule for what a body may hold: a field that is not listed here is refused. Fields of OpenAI's interface that are not
supported are listed with the values that ask for nothing; any other value is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specjax.engine.intake import Intake
from specjax.engine.prompt import Prompt
from specjax.engine.request import ParameterError, SamplingParams, Sequence, later_seed
from specjax.serve.errors import ApiError, bad_request
from specjax.serve.messages import read_messages
from specjax.state import TOP_LOGPROBS

MAX_CHOICES = 128
"""Most choices of a prompt (`n`)."""

COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""

COMPLETION_LOGPROBS = 5
"""OpenAI's most of `logprobs` for completions."""

GENERATE_TOKENS = 128
"""SGLang's default of `max_new_tokens`."""


@dataclass(frozen=True)
class Task:
    """What a request asks of the engine: n sequences for each prompt."""

    prompts: list[Prompt]
    sampling: list[SamplingParams]  # one for each prompt
    n: int = 1
    names: tuple[tuple[str, str], ...] = ()  # our parameter names to the request's
    prompt_field: str = "prompt"
    ids: list[str] | None = None  # one for each prompt
    most: int | None = None  # new tokens where the request does not say; fewer if there is no room

    def sequences(self, intake: Intake, id: str) -> list[Sequence]:
        """Tokenises, and makes the choices in order: prompt * n + i. Choice i of a prompt has the seed + i.

        Raises:
            ApiError: a prompt or parameter that the model or the engine cannot take.
        """
        made = []
        try:
            for index, (prompt, sampling) in enumerate(zip(self.prompts, self.sampling, strict=True)):
                name = self.ids[index] if self.ids else f"{id}-{index}"
                first = intake.sequence(prompt, sampling, id=name)
                made.append(first)
                for i in range(1, self.n):
                    choice = replace(sampling, seed=later_seed(first.seed, i))
                    made.append(intake.sequence(first.prompt, choice, id=f"{name}-{i}"))
                if self.most is not None and sampling.max_new_tokens is None:
                    for sequence in made[-self.n :]:
                        sequence.limit = min(sequence.limit, self.most)
                    if sampling.min_new_tokens > first.limit:
                        raise ParameterError(
                            "min_new_tokens",
                            f"must be at most max_new_tokens (here {first.limit}), got {sampling.min_new_tokens}",
                        )
        except ParameterError as error:
            raise refusal(error, dict(self.names)) from error
        except ValueError as error:
            code = "context_length_exceeded" if "context" in str(error) else None
            raise bad_request(str(error), self.prompt_field, code) from error
        return made


def refusal(error: ParameterError, names: Mapping[str, str] = {}) -> ApiError:
    error = error.renamed(names)
    return bad_request(str(error), error.name, "context_length_exceeded" if "the context" in error.problem else None)


Integer = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]  # an integer is one, too
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    # OpenAI's fields that are not built, with the values that ask for nothing (null always does).
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}


class StreamOptions(Body):
    include_usage: Flag | None = None
    include_obfuscation: Any = None

    unsupported = {"include_obfuscation": (False,)}


class SamplingFields(Body):
    """What all interfaces call by the same names, our own included."""

    n: Integer | None = None
    stop: Any = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Integer | None = None
    min_p: Number | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    repetition_penalty: Number | None = None
    seed: Integer | None = None
    logit_bias: dict[str, Number] | None = None
    ignore_eos: Flag | None = None
    stop_token_ids: list[Integer] | None = None
    skip_special_tokens: Flag | None = None
    no_stop_trim: Flag | None = None


class OpenAIBody(SamplingFields):
    """What chat completions and completions share."""

    model: Text | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    return_speculative_metrics: Flag | None = None
    # Accepted, and used for nothing.
    user: Text | None = None
    metadata: dict[str, Any] | None = None
    store: Flag | None = None
    service_tier: Text | None = None
    # Not built.
    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None

    unsupported = {"response_format": ({"type": "text"},), "tools": ([],), "tool_choice": ("none",)}

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        """What types cannot say.

        Raises:
            ApiError: a value that is refused.
        """
        check_unsupported(self)
        if not 1 <= self.choices <= MAX_CHOICES:
            raise bad_request(f"n must be from 1 to {MAX_CHOICES}, got {self.n}", "n")
        if self.stream_options is not None:
            if not self.stream:
                raise bad_request("stream_options needs stream: true", "stream_options")
            check_unsupported(self.stream_options)

    def sampling(self, most: int | None, logprobs: int | None) -> SamplingParams:
        """Absent parameters are OpenAI's defaults. `most` new tokens; None: the rest of the context."""
        given = {name: getattr(self, name) for name in SamplingFields.model_fields if name != "n"}
        given["min_new_tokens"] = self.min_tokens
        given = {"temperature": 1.0} | {name: value for name, value in given.items() if value is not None}
        return _sampling(given | {"max_new_tokens": most, "logprobs": logprobs}, self.names)

    @property
    def names(self) -> dict[str, str]:
        return {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


class ChatBody(OpenAIBody):
    messages: Any = None
    max_completion_tokens: Integer | None = None
    logprobs: Flag | None = None
    top_logprobs: Integer | None = None
    functions: Any = None
    function_call: Any = None
    parallel_tool_calls: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None

    unsupported = OpenAIBody.unsupported | {
        "functions": ([],),
        "function_call": ("none",),
        "parallel_tool_calls": (),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "verbosity": (),
        "web_search_options": (),
    }

    @property
    def names(self) -> dict[str, str]:
        most = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return super().names | {"max_new_tokens": most}

    def task(self) -> Task:
        self.check()
        messages = read_messages(self.messages)
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        if not 0 <= (top := self.top_logprobs or 0) <= TOP_LOGPROBS:
            raise bad_request(f"top_logprobs must be from 0 to {TOP_LOGPROBS}, got {top}", "top_logprobs")
        sampling = self.sampling(most, top if self.logprobs else None)
        return Task([messages], [sampling], self.choices, tuple(self.names.items()), "messages")


class CompletionBody(OpenAIBody):
    prompt: Any = None
    best_of: Integer | None = None
    echo: Flag | None = None
    logprobs: Integer | None = None
    suffix: Any = None

    unsupported = OpenAIBody.unsupported | {"suffix": ()}

    def task(self) -> Task:
        self.check()
        if self.best_of is not None and self.best_of != self.choices:
            raise bad_request(
                f"best_of is not supported beyond n: it must equal n ({self.choices}), got {self.best_of}", "best_of"
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= COMPLETION_LOGPROBS:
            raise bad_request(f"logprobs must be from 0 to {COMPLETION_LOGPROBS}, got {self.logprobs}", "logprobs")
        if self.echo and self.logprobs is not None:
            raise bad_request("echo with logprobs is not supported: those of the prompt are not computed", "echo")
        prompts = read_prompts(self.prompt, "prompt")
        each = [self.sampling(self.max_tokens, self.logprobs)] * len(prompts)
        return Task(prompts, each, self.choices, tuple(self.names.items()), most=COMPLETION_TOKENS)


class SamplingBody(SamplingFields):
    """`sampling_params` of `/generate`."""

    max_new_tokens: Integer | None = None
    min_new_tokens: Integer | None = None


class GenerateBody(Body):
    """SGLang's own endpoint."""

    text: Any = None
    input_ids: Any = None
    sampling_params: Any = None
    rid: Any = None
    stream: Flag | None = None
    return_logprob: Flag | None = None
    logprob_start_len: Any = None
    top_logprobs_num: Integer | None = None

    unsupported = {"logprob_start_len": (-1,)}  # those of the prompt are not computed

    @property
    def is_batch(self) -> bool:
        given = self.input_ids if self.text is None else self.text
        return isinstance(given, list) and (self.text is not None or (bool(given) and isinstance(given[0], list)))

    def task(self) -> Task:
        check_unsupported(self)
        if (self.text is None) == (self.input_ids is None):
            raise bad_request("give either text or input_ids", "text")
        field = "input_ids" if self.text is None else "text"
        prompts = read_prompts(self.input_ids if self.text is None else self.text, field)
        if any(isinstance(prompt, str) != (field == "text") for prompt in prompts):
            raise bad_request(f"{field} holds the other's kind: text is for strings, input_ids for token ids", field)
        given = self.sampling_params
        each = given if isinstance(given, list) else [given] * len(prompts)
        if len(each) != len(prompts):
            raise bad_request(f"{len(prompts)} prompts, but {len(each)} sampling_params", "sampling_params")
        if not all(params is None or isinstance(params, dict) for params in each):
            raise bad_request("sampling_params must be an object, or a list of them", "sampling_params")
        top = self.top_logprobs_num or 0
        if not 0 <= top <= TOP_LOGPROBS:
            raise bad_request(f"top_logprobs_num must be from 0 to {TOP_LOGPROBS}, got {top}", "top_logprobs_num")
        if top and not self.return_logprob:
            raise bad_request("top_logprobs_num needs return_logprob: true", "top_logprobs_num")
        wanted = {"temperature": 1.0, "max_new_tokens": None, "logprobs": top if self.return_logprob else None}
        sampling, counts = [], set()
        for params in each:
            values = _checked(SamplingBody.model_validate, {} if params is None else params).model_dump(
                exclude_none=True
            )
            counts.add(values.pop("n", 1))
            sampling.append(_sampling(wanted | values))
        n = counts.pop()
        if counts or not 1 <= n <= MAX_CHOICES:
            raise bad_request(f"n must be an integer from 1 to {MAX_CHOICES}, the same for all", "sampling_params")
        return Task(prompts, sampling, n, (), field, self._ids(len(prompts)), GENERATE_TOKENS)

    def _ids(self, count: int) -> list[str] | None:
        if self.rid is None:
            return None
        ids = [self.rid] if isinstance(self.rid, str) else self.rid
        if not isinstance(ids, list) or not all(isinstance(id, str) and 0 < len(id) <= 256 for id in ids):
            raise bad_request("rid must be a string of at most 256 characters, or a list of them", "rid")
        if len(ids) != count or len(set(ids)) != count:
            raise bad_request(f"rid needs one name of its own for each of the {count} prompts", "rid")
        return ids


def _sampling(values: Mapping[str, Any], names: Mapping[str, str] = {}) -> SamplingParams:
    stop = values.get("stop", ())
    if not isinstance(stop, str | list | tuple) or not all(isinstance(text, str) for text in stop):
        raise bad_request(f"stop must be a string or a list of strings, got {stop!r:.60}", "stop")
    try:
        return SamplingParams.from_mapping(values)
    except ParameterError as error:
        raise refusal(error, names) from error
    except ValueError as error:
        raise bad_request(str(error), "sampling_params") from error


def check_unsupported(body: Body) -> None:
    """Refuses what is listed as not supported, unless its value asks for nothing."""
    for name, harmless in type(body).unsupported.items():
        value = getattr(body, name)
        if value is not None and not any(value == other and type(value) is type(other) for other in harmless):
            passes = ", ".join(["null", *(repr(other) for other in harmless)])
            raise bad_request(f"{name} is not supported (only {passes}), got {value!r:.60}", name, "unsupported")


def read_prompts(prompt: Any, field: str) -> list[Prompt]:
    """A string, a list of strings, token ids, or a list of lists of token ids.

    Raises:
        ApiError: anything else, or nothing.
    """

    def ids(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in value)

    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif ids(prompt) and prompt:
        prompts = [prompt]
    elif isinstance(prompt, list) and (all(isinstance(p, str) for p in prompt) or all(ids(p) for p in prompt)):
        prompts = prompt
    else:
        raise bad_request(
            f"{field} must be a string, a list of strings, a list of token ids or a list of such lists, "
            f"got {prompt!r:.60}",
            field,
        )
    if not prompts or not all(prompts):
        raise bad_request(f"{field} is empty: there is nothing to continue", field)
    return prompts


AnyBody = TypeVar("AnyBody", bound=Body)


def read_body(kind: type[AnyBody], data: bytes) -> AnyBody:
    """A body of JSON.

    Raises:
        ApiError: no JSON, unknown fields, wrong types; names the first field that is wrong.
    """
    return _checked(kind.model_validate_json, data)


def _checked(validate: Callable[[Any], AnyBody], data: Any) -> AnyBody:
    try:
        return validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        param = str(first["loc"][0]) if first["loc"] else None
        if first["type"] == "json_invalid":
            raise bad_request(f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}") from error
        if not first["loc"]:
            raise bad_request(f"the body must be a JSON object, got {first['input']!r:.60}") from error
        if first["type"] == "extra_forbidden":
            raise bad_request(f"unknown field {where!r}; it is not supported", param, "unknown_field") from error
        said = first["msg"][0].lower() + first["msg"][1:]
        raise bad_request(f"{where}: {said}, got {first['input']!r:.60}", param) from error
