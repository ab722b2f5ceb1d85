"""Request bodies: their fields, and what they ask of the engine.

`specjax.serve.fields` has the rule for fields that are unknown or not supported, `specjax.serve.schemas` the same
limits as JSON schemas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from specjax.engine.request import MAX_STOP_STRINGS, ParameterError, SamplingParams
from specjax.serve.errors import ApiError, bad_request, shown
from specjax.serve.fields import (
    CHAT,
    UNSUPPORTED,
    Bias,
    Body,
    Flag,
    Ignored,
    Integer,
    Metadata,
    Number,
    Text,
    TokenIds,
    Values,
)
from specjax.serve.json_body import Budget, parse_json
from specjax.serve.messages import read_messages
from specjax.serve.task import Rules, Task, check_capacity, read_prompts, refusal
from specjax.verify import TOP_LOGPROBS

MAX_CHOICES = 128
"""Most choices of a prompt (`n`)."""

COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""

COMPLETION_LOGPROBS = 5
"""OpenAI's most of `logprobs` for completions."""

GENERATE_TOKENS = 128
"""SGLang's default of `max_new_tokens`."""

MAX_ID = 256
"""Characters of a request's name (`rid`)."""

DEFAULT_MODEL = "default"
"""SGLang's clients call whatever model there is by this name."""


class StreamOptions(Body):
    include_usage: Flag | None = None

    unsupported: ClassVar[Mapping[str, Values]] = {"include_obfuscation": (False,)}


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
    sampling_seed: Integer | None = None  # SGLang's name for the seed
    logit_bias: Bias | None = None
    ignore_eos: Flag | None = None
    stop_token_ids: TokenIds | None = None
    skip_special_tokens: Flag | None = None
    no_stop_trim: Flag | None = None

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    def params(self, rules: Rules, names: Mapping[str, str] = {}, **more: Any) -> SamplingParams:
        """Of this request: what it gives, else what the model brings, else temperature 1.

        Args:
            names: our names of parameters to the request's.
            more: further parameters; None: not given, except for `max_new_tokens` and `logprobs`.

        Raises:
            ApiError: a parameter is out of range.
        """
        own = {name: getattr(self, name) for name in SamplingFields.model_fields if name not in ("n", "sampling_seed")}
        if self.sampling_seed is not None:
            if self.seed not in (None, self.sampling_seed):
                problem = f"sampling_seed and seed are the same parameter, got {self.sampling_seed} and {self.seed}"
                raise bad_request(problem[:200], "sampling_seed")
            own["seed"] = self.sampling_seed
            names = {**names, "seed": "sampling_seed"}
        if self.top_k == 0:
            own["top_k"] = -1
        stop = self.stop
        if isinstance(stop, list) and len(stop) > MAX_STOP_STRINGS:
            raise bad_request(f"stop has {len(stop)} strings; at most {MAX_STOP_STRINGS} are supported", "stop")
        if not (stop is None or isinstance(stop, str) or (isinstance(stop, list) and set(map(type, stop)) <= {str})):
            raise bad_request(f"stop must be a string or a list of strings, got {shown(stop)}", "stop")
        given = {name: value for name, value in (own | more).items() if value is not None}
        always = {name: more.get(name) for name in ("max_new_tokens", "logprobs")}
        try:
            return SamplingParams.from_mapping({"temperature": 1.0} | dict(rules.defaults) | given | always)
        except ParameterError as error:
            raise refusal(error, names) from error


def check_choices(n: int, param: str = "n") -> None:
    if not 1 <= n <= MAX_CHOICES:
        raise bad_request(f"n must be from 1 to {MAX_CHOICES}, got {shown(n)}", param)


MISPLACED: dict[str, tuple[str, Values]] = {
    "max_new_tokens": ("it is called max_tokens", ()),
    "min_new_tokens": ("it is called min_tokens", (0,)),
    "sampling_params": ("its members are fields of the body", ({},)),
    "text": ("the prompt has another name", ()),
    "input_ids": ("completions take token ids as prompt", ([],)),
}
"""Fields of `/generate` that would change the text of a chat or completion."""


class OpenAIBody(SamplingFields):
    """What chat completions and completions share."""

    model: Text | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    stream: Flag | None = None
    stream_options: Any = None
    return_speculative_metrics: Flag | None = None
    cache_salt: Text | None = None
    # Accepted, and used for nothing.
    user: Text | None = None
    metadata: Metadata | None = None
    store: Flag | None = None
    service_tier: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None

    unsupported = UNSUPPORTED
    elsewhere = MISPLACED

    def wants_usage(self) -> bool:
        """`task` has checked it."""
        return bool(self.stream_options and self.stream_options.get("include_usage"))

    def check(self, rules: Rules, ignored: Ignored) -> None:
        """What types cannot say.

        Raises:
            ApiError: a value that is refused.
        """
        if self.model not in (None, DEFAULT_MODEL, rules.model):
            problem = f"no model {shown(self.model)} here; this server has {rules.model!r}"
            raise ApiError(404, problem, param="model", code="model_not_found")
        check_choices(self.choices)
        if self.stream_options is not None:
            StreamOptions.read(self.stream_options, ignored, "stream_options.")
            if not self.stream:
                raise bad_request("stream_options needs stream: true", "stream_options")

    def sampling(self, rules: Rules, most: int | None, logprobs: int | None) -> SamplingParams:
        """`most` new tokens; None: the rest of the context."""
        more = {"max_new_tokens": most, "min_new_tokens": self.min_tokens, "cache_salt": self.cache_salt}
        return self.params(rules, self.names, logprobs=logprobs, **more)

    @property
    def names(self) -> dict[str, str]:
        return {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


class ChatBody(OpenAIBody):
    messages: Any = None
    max_completion_tokens: Integer | None = None
    logprobs: Flag | None = None
    top_logprobs: Integer | None = None

    unsupported = UNSUPPORTED | CHAT
    elsewhere = MISPLACED | {"prompt": ("a chat has messages", ())}

    @property
    def names(self) -> dict[str, str]:
        most = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return super().names | {"max_new_tokens": most}

    def task(self, rules: Rules, ignored: Ignored) -> Task:
        """
        Raises:
            ApiError: a value that is refused.
        """
        self.check(rules, ignored)
        check_capacity(self.choices, 1, rules, "messages")
        messages = read_messages(self.messages, ignored)
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        other = self.max_tokens
        if self.max_completion_tokens is not None and other is not None and not 1 <= other <= rules.room:
            # It has no effect, but is no less wrong.
            problem = f"max_tokens must be from 1 to {rules.room} in a context of {rules.context_length}"
            raise bad_request(f"{problem}, got {shown(other)}", "max_tokens")
        if not 0 <= (top := self.top_logprobs or 0) <= TOP_LOGPROBS:
            raise bad_request(f"top_logprobs must be from 0 to {TOP_LOGPROBS}, got {shown(top)}", "top_logprobs")
        if top and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        sampling = self.sampling(rules, most, top if self.logprobs else None)
        return Task([messages], [sampling], self.choices, tuple(self.names.items()), "messages")


class CompletionBody(OpenAIBody):
    prompt: Any = None
    best_of: Integer | None = None
    echo: Flag | None = None
    logprobs: Integer | None = None

    elsewhere = MISPLACED | {
        "messages": ("completions have a prompt", ()),
        "max_completion_tokens": ("it is called max_tokens", ()),
        "top_logprobs": ("completions have logprobs, a number", (0,)),
    }

    def task(self, rules: Rules, ignored: Ignored) -> Task:
        """
        Raises:
            ApiError: a value that is refused.
        """
        self.check(rules, ignored)
        if self.best_of not in (None, 1, self.choices):
            problem = f"must be 1 or n ({self.choices}), got {shown(self.best_of)}"
            raise bad_request(f"best_of is not supported beyond n: it {problem}", "best_of")
        if self.logprobs is not None and not 0 <= self.logprobs <= COMPLETION_LOGPROBS:
            raise bad_request(
                f"logprobs must be from 0 to {COMPLETION_LOGPROBS}, got {shown(self.logprobs)}", "logprobs"
            )
        if self.echo and self.logprobs is not None:
            raise bad_request("echo with logprobs is not supported: those of the prompt are not computed", "echo")
        prompts = read_prompts(self.prompt, "prompt", self.choices, rules)
        each = [self.sampling(rules, self.max_tokens, self.logprobs)] * len(prompts)
        return Task(prompts, each, self.choices, tuple(self.names.items()), most=COMPLETION_TOKENS)


class SamplingBody(SamplingFields):
    """`sampling_params` of `/generate`."""

    max_new_tokens: Integer | None = None
    min_new_tokens: Integer | None = None

    unsupported = UNSUPPORTED
    elsewhere: ClassVar[Mapping[str, tuple[str, Values]]] = {
        "max_tokens": ("it is called max_new_tokens", ()),
        "max_completion_tokens": ("it is called max_new_tokens", ()),
        "min_tokens": ("it is called min_new_tokens", (0,)),
        "logprobs": ("the body has return_logprob", (False,)),
        "cache_salt": ("it belongs to the body", ()),
    }


class GenerateBody(Body):
    """SGLang's own endpoint."""

    text: Any = None
    input_ids: Any = None
    sampling_params: Any = None
    rid: Any = None
    stream: Flag | None = None
    return_logprob: Flag | None = None
    top_logprobs_num: Integer | None = None
    return_text_in_logprobs: Flag | None = None
    cache_salt: Text | None = None

    # Log-probabilities of the prompt are not computed.
    unsupported = UNSUPPORTED | {"logprob_start_len": (-1,), "modalities": (["text"], [])}
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

    @property
    def is_batch(self) -> bool:
        given = self.input_ids if self.text is None else self.text
        return isinstance(given, list) and (self.text is not None or (bool(given) and isinstance(given[0], list)))

    def task(self, rules: Rules, ignored: Ignored) -> Task:
        """
        Raises:
            ApiError: a value that is refused.
        """
        if (self.text is None) == (self.input_ids is None):
            raise bad_request("give either text or input_ids", "text")
        field = "input_ids" if self.text is None else "text"
        top = self.top_logprobs_num or 0
        if not 0 <= top <= TOP_LOGPROBS:
            raise bad_request(
                f"top_logprobs_num must be from 0 to {TOP_LOGPROBS}, got {shown(top)}", "top_logprobs_num"
            )
        if top and not self.return_logprob:
            raise bad_request("top_logprobs_num needs return_logprob: true", "top_logprobs_num")
        given = self.sampling_params
        # What can be said of the first is said before there are thousands.
        first = SamplingBody.read(
            (given[0] if given else None) if isinstance(given, list) else {} if given is None else given,
            ignored,
            "sampling_params.",
        )
        check_choices(first.choices, "sampling_params")
        prompts = read_prompts(self.input_ids if self.text is None else self.text, field, first.choices, rules)
        if isinstance(prompts[0], str) != (field == "text"):
            raise bad_request(f"{field} holds the other's kind: text is for strings, input_ids for token ids", field)
        if isinstance(given, list) and len(given) != len(prompts):
            raise bad_request(f"{len(prompts)} prompts, but {len(given)} sampling_params", "sampling_params")
        more = {"logprobs": top if self.return_logprob else None, "cache_salt": self.cache_salt}
        if isinstance(given, list):
            bodies = [SamplingBody.read(each, ignored, "sampling_params.") for each in given]
            if {body.choices for body in bodies} != {first.choices}:
                raise bad_request("n must be the same for all prompts", "sampling_params")
        else:
            bodies = [first]
        sampling = [
            body.params(rules, max_new_tokens=body.max_new_tokens, min_new_tokens=body.min_new_tokens, **more)
            for body in bodies
        ] * (len(prompts) // len(bodies))
        return Task(prompts, sampling, first.choices, (), field, self._ids(len(prompts)), GENERATE_TOKENS)

    def _ids(self, count: int) -> list[str] | None:
        if self.rid is None:
            return None
        ids = self.rid if isinstance(self.rid, list) else [self.rid]
        if isinstance(self.rid, list) and len(ids) != count:
            raise bad_request(f"rid needs one name of its own for each of the {count} prompts", "rid")
        if not all(isinstance(id, str) and 0 < len(id) <= MAX_ID for id in ids):
            raise bad_request(f"rid must be a string of 1 to {MAX_ID} characters, or a list of them", "rid")
        if len(ids) < count:
            return [f"{self.rid}_{index}" for index in range(count)]  # as SGLang makes them
        if len(set(ids)) != count:
            raise bad_request(f"rid needs one name of its own for each of the {count} prompts", "rid")
        return ids


AnyRequest = TypeVar("AnyRequest", bound="ChatBody | CompletionBody | GenerateBody")


def read_request(kind: type[AnyRequest], data: bytes | bytearray, rules: Rules) -> tuple[AnyRequest, Task, Ignored]:
    """A body of JSON, all of it checked: what remains is to tokenise its prompts. Safe in any thread.

    Raises:
        ApiError: no JSON, wrong types or values; names the first field that is wrong.
    """
    ignored = Ignored(strict=rules.strict)
    body = kind.read(parse_json(data, Budget()), ignored)
    return body, body.task(rules, ignored), ignored
