"""SGLang's `/generate`: the body and the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator, SkipValidation
from pydantic_core import PydanticCustomError

from specjax.engine import Completion, StreamChunk
from specjax.engine.sampling_params import SamplingParams
from specjax.engine.sequence import PromptLogprob, Sequence, TokenLogprob
from specjax.serve.errors import bad_request
from specjax.serve.fields import UNSUPPORTED, Flag, Integer, LogprobIds, at_most
from specjax.serve.openai_answers import DONE, Answer, TokenNames, event, finite, speculative
from specjax.serve.openai_requests import (
    Ids,
    JsonSchema,
    SamplingFields,
    TaskBody,
    Texts,
    parameter,
)
from specjax.serve.tokenising import Rules, Task, read_prompts

GENERATE_TOKENS = 128  # SGLang's default of `max_new_tokens`
MAX_ID = 256  # characters of a request's name (`rid`)
MAX_SAMPLING = 2**14  # objects in a list of `sampling_params`
NAMES = {"logprob_ids": "token_ids_logprob"}  # names of `SamplingParams` to names of the body


class SamplingBody(SamplingFields):
    """`sampling_params` of `/generate`."""

    place = "sampling_params."
    unsupported = UNSUPPORTED | {"cache_salt": ()}

    json_schema: JsonSchema = Field(None, description="An object, or its text. JSON is written on one line.")
    max_new_tokens: Integer | None = parameter(
        "max_new_tokens", f"0: read the prompt, draw no token. Default: {GENERATE_TOKENS}, or as many as fit."
    )
    min_new_tokens: Integer | None = parameter("min_new_tokens")


def _sampling(value: Any, info: Any) -> SamplingBody | list[SamplingBody]:
    if not isinstance(value, list):
        return SamplingBody.check(value, info.context, "sampling_params.")
    if not value:
        raise PydanticCustomError("sampling", "must be an object, or a list with one for each prompt")
    return [SamplingBody.check(item, info.context, f"sampling_params[{i}].") for i, item in enumerate(value)]


Sampling = Annotated[
    SamplingBody | list[SamplingBody],
    PlainValidator(_sampling, json_schema_input_type=SamplingBody | list[SamplingBody]),
    at_most(MAX_SAMPLING),
]


class GenerateRequest(TaskBody):
    """SGLang's own endpoint."""

    unsupported = UNSUPPORTED | dict.fromkeys(SamplingBody.model_fields, ()) | {"n": (1,), "modalities": (["text"], [])}

    text: SkipValidation[Texts | None] = None
    input_ids: SkipValidation[Ids | None] = None
    sampling_params: Sampling | None = Field(None, description="An object, or a list with one for each prompt.")
    rid: SkipValidation[str | list[str] | None] = Field(
        None, description="The request's name, or a list with one name for each prompt. Prompt i of a name is rid_i."
    )
    return_logprob: Flag | None = Field(None, description="Without it the next three fields have no effect.")
    top_logprobs_num: Integer | None = parameter(
        "logprobs", "Number of most likely tokens whose log-probabilities are returned at each position."
    )
    logprob_start_len: Integer | None = parameter(
        "logprob_start_len",
        "Return log-probabilities of the prompt from this token on; the first one is null. Default: -1, none of the "
        "prompt.",
    )
    token_ids_logprob: LogprobIds | None = Field(
        None, description="Token ids whose log-probabilities are returned at each position."
    )
    return_text_in_logprobs: Flag | None = None
    require_reasoning: Flag | None = Field(
        None,
        description="The text begins inside of reasoning, whatever the prompt ends with: a grammar, stop strings and "
        "patterns apply after `</think>`. For models whose vocabulary has that token.",
    )

    @property
    def is_batch(self) -> bool:
        prompt = self.input_ids if self.text is None else self.text
        return isinstance(prompt, list) and (self.text is not None or (bool(prompt) and isinstance(prompt[0], list)))

    def task(self, rules: Rules) -> Task:
        if (self.text is None) == (self.input_ids is None):
            raise bad_request("give either text or input_ids", "text")
        if self.require_reasoning and rules.form.end_think is None:
            problem = "require_reasoning needs a model that thinks; this one has no token </think>"
            raise bad_request(problem, "require_reasoning")
        bodies = self.sampling_params or SamplingBody.check({})
        several = isinstance(bodies, list)
        bodies = bodies if isinstance(bodies, list) else [bodies]
        first = bodies[0]
        field, prompt = ("input_ids", self.input_ids) if self.text is None else ("text", self.text)
        choices = first.n or 1
        prompts = read_prompts(prompt, field, choices, rules)
        if isinstance(prompts[0], str) != (field == "text"):
            raise bad_request(f"{field} has the wrong type: text is for strings, input_ids for token ids", field)
        if several and len(bodies) != len(prompts):
            raise bad_request(f"{len(prompts)} prompts, but {len(bodies)} sampling_params", "sampling_params")
        if any((body.n or 1) != choices for body in bodies):
            raise bad_request("n must be the same for all prompts", "sampling_params")
        sampling, names = [self._params(body, rules) for body in bodies], [body.names | NAMES for body in bodies]
        if not several:
            sampling, names = sampling * len(prompts), names * len(prompts)
        ids = self._ids(len(prompts))
        return Task(prompts, sampling, names, choices, prompt_field=field, ids=ids, most=GENERATE_TOKENS)

    def _params(self, body: SamplingBody, rules: Rules) -> SamplingParams:
        more: dict[str, Any] = {"cache_salt": self.cache_salt, "priority": self.priority, "logprobs": None}
        more["require_reasoning"] = more["stop_after_reasoning"] = bool(self.require_reasoning)
        if self.return_logprob:
            more |= {"logprobs": self.top_logprobs_num or 0, "logprob_start_len": self.logprob_start_len}
            more |= {"logprob_ids": tuple(self.token_ids_logprob or ())}
        return body.params(rules, **more)

    def _ids(self, count: int) -> list[str] | None:
        """The names of `count` prompts. None: the request has none."""
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


@dataclass
class _Sent:
    """The content of a choice's events so far."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)  # in the answer's form


@dataclass
class GenerateAnswer(Answer):
    """Each event has all text and tokens so far, as in SGLang: n tokens take n^2 / 2 ids. With `incremental` (SGLang's
    `--incremental-streaming-output`) events have only new text and tokens."""

    sequences: List[Sequence]  # by choice
    width: int  # N of the draft trees
    several: bool  # a batch, or n > 1: a list of results, and events with an index
    thoughts: Callable[[Sequence, list[int]], int]  # (choice, its output so far) -> number of reasoning tokens
    incremental: bool = False
    names: TokenNames | None = None  # adds the texts of tokens to log-probabilities
    started: float = field(default_factory=time.perf_counter)
    shows_aborted: ClassVar[bool] = True  # as SGLang does
    _sent: dict[int, _Sent] = field(default_factory=dict)  # by choice

    def whole(self, done: list[Completion]) -> Any:
        results = [self._result(index, completion) for index, completion in enumerate(done)]
        return results if self.several else results[0]

    def events(self, chunk: StreamChunk) -> list[bytes]:
        index = chunk.prompt_index
        if chunk.completion is not None:
            body = self._result(index, chunk.completion)
        else:
            sent = self._sent.setdefault(index, _Sent())
            sent.text, sent.tokens = sent.text + chunk.text, [*sent.tokens, *chunk.output_ids]
            body = self._body(index, None, sent.text, sent.tokens, chunk.cached_tokens)
            if self.sequences[index].params.logprobs is not None and not self.incremental:
                new = self._logprobs(index, chunk.logprobs, chunk.prompt_logprobs or ())
                for name, entries in new.items():
                    sent.logprobs.setdefault(name, []).extend(entries)
                body["meta_info"] |= sent.logprobs
        if self.incremental:
            body |= {"text": chunk.text, "output_ids": chunk.output_ids}
            if chunk.logprobs or "output_token_logprobs" in body["meta_info"]:
                body["meta_info"] |= self._logprobs(index, chunk.logprobs, chunk.prompt_logprobs)
        return [event(body | ({"index": index} if self.several else {}))]

    def last_events(self) -> list[bytes]:
        return [DONE]

    def _result(self, index: int, done: Completion) -> dict[str, Any]:
        body = self._body(index, done.finish_reason, done.text, done.output_ids, done.cached_tokens)
        seconds = round(time.perf_counter() - self.started, 6)
        body["meta_info"] |= {"e2e_latency": seconds, "seed": done.seed, **speculative([done], self.width)}
        if done.logprobs is not None:
            body["meta_info"] |= self._logprobs(index, done.logprobs, done.prompt_logprobs or ())
        return body

    def _body(self, index: int, reason: Any, text: str, tokens: list[int], cached_tokens: int) -> dict[str, Any]:
        meta = {
            "id": self.sequences[index].id,
            "finish_reason": reason,
            "prompt_tokens": len(self.sequences[index].prompt),
            "completion_tokens": len(tokens),
            "cached_tokens": cached_tokens,
            "reasoning_tokens": self.thoughts(self.sequences[index], tokens),
        }
        return {"text": text, "output_ids": tokens, "meta_info": meta}

    def _logprobs(self, index: int, logprobs: List[TokenLogprob], prompt: List[PromptLogprob] | None) -> dict[str, Any]:
        with_ids = bool(self.sequences[index].params.logprob_ids)
        return generate_logprobs(logprobs, self.names, prompt, with_ids=with_ids)


def generate_logprobs(
    logprobs: List[TokenLogprob],
    names: TokenNames | None,
    prompt: List[PromptLogprob] | None = None,
    *,
    with_ids: bool = False,
) -> dict[str, Any]:
    """SGLang's form of log-probabilities: (log-probability, id, text of the token or null without `names`).

    Args:
        prompt: the log-probabilities of the prompt; None: the result has none.
        with_ids: include the token ids that the request chose.
    """

    def entry(token: int, logprob: float | None) -> list[Any]:
        return [finite(logprob), token, None if names is None else names.text(token)]

    def entries(item: PromptLogprob | TokenLogprob, pairs: Iterable[tuple[int, float]]) -> list[list[Any]] | None:
        return None if item.logprob is None else [entry(*pair) for pair in pairs]

    result = {}
    for place, items in (("input", prompt), ("output", logprobs)):
        if items is not None:
            result[f"{place}_token_logprobs"] = [entry(item.token, item.logprob) for item in items]
            result[f"{place}_top_logprobs"] = [entries(item, item.top) for item in items]
            if with_ids:
                result[f"{place}_token_ids_logprobs"] = [entries(item, item.of_ids) for item in items]
    return result
