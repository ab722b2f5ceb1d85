"""The answer to `/generate`, in SGLang's form."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from specjax.engine import Completion, StreamChunk
from specjax.engine.output import PromptLogprob, TokenLogprob
from specjax.serve.answers import DONE, Answer, TokenNames, event, finite, speculative


@dataclass
class _Sent:
    """What the events of a choice have said so far."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)  # in the answer's form


@dataclass
class GenerateAnswer(Answer):
    """The answer to `/generate`. Events carry all text and tokens so far, as SGLang's do.

    With `incremental` (SGLang's `--incremental-streaming-output`) each event carries only new text and tokens. Without
    it n tokens cost n^2 / 2 ids.
    """

    width: int
    many: bool  # a batch, or n > 1: a list of results, and events with an index
    ids: list[str]
    prompt_tokens: list[int]
    thoughts: Callable[[int, list[int]], int]  # of a choice and its output so far, the tokens that are thoughts
    incremental: bool = False
    names: TokenNames | None = None  # puts the texts of tokens into their log-probabilities
    scored: Sequence[bool] = ()  # by choice, whether it has log-probabilities
    with_ids: Sequence[bool] = ()  # by choice, whether it has those of given tokens
    started: float = field(default_factory=time.perf_counter)
    shows_aborted: ClassVar[bool] = True  # as SGLang does
    _sent: dict[int, _Sent] = field(default_factory=dict)  # by choice

    def whole(self, done: list[Completion]) -> Any:
        results = [self._result(index, completion) for index, completion in enumerate(done)]
        return results if self.many else results[0]

    def events(self, chunk: StreamChunk) -> list[bytes]:
        index = chunk.prompt_index
        if chunk.completion is not None:
            body = self._result(index, chunk.completion)
        else:
            sent = self._sent.setdefault(index, _Sent())
            sent.text, sent.tokens = sent.text + chunk.text, [*sent.tokens, *chunk.output_ids]
            body = _generated(
                self.ids[index], None, self.prompt_tokens[index], sent.text, sent.tokens,
                cached_tokens=chunk.cached_tokens, reasoning_tokens=self.thoughts(index, sent.tokens),
            )  # fmt: skip
            if self.scored[index : index + 1] == [True] and not self.incremental:
                new = self._logprobs(index, chunk.logprobs, chunk.prompt_logprobs or ())
                for name, entries in new.items():
                    sent.logprobs.setdefault(name, []).extend(entries)
                body["meta_info"] |= sent.logprobs
        if self.incremental:
            body |= {"text": chunk.text, "output_ids": chunk.output_ids}
            if chunk.logprobs or "output_token_logprobs" in body["meta_info"]:
                body["meta_info"] |= self._logprobs(index, chunk.logprobs, chunk.prompt_logprobs)
        return [event(body | ({"index": index} if self.many else {}))]

    def last_events(self) -> list[bytes]:
        return [DONE]

    def _result(self, index: int, done: Completion) -> dict[str, Any]:
        body = _generated(
            done.id, done.finish_reason, done.prompt_tokens, done.text, done.output_ids,
            cached_tokens=done.cached_tokens, reasoning_tokens=self.thoughts(index, done.output_ids),
        )  # fmt: skip
        seconds = round(time.perf_counter() - self.started, 6)
        body["meta_info"] |= {"e2e_latency": seconds, "seed": done.seed, **speculative([done], self.width)}
        if done.logprobs is not None:
            body["meta_info"] |= self._logprobs(index, done.logprobs, done.prompt_logprobs or ())
        return body

    def _logprobs(
        self, index: int, found: Sequence[TokenLogprob], prompt: Sequence[PromptLogprob] | None
    ) -> dict[str, Any]:
        return generate_logprobs(found, self.names, prompt, with_ids=any(self.with_ids[index : index + 1]))


def _generated(
    id: str, reason: Any, prompt_tokens: int, text: str, tokens: list[int], *, cached_tokens: int,
    reasoning_tokens: int,
) -> dict[str, Any]:  # fmt: skip
    meta = {
        "id": id,
        "finish_reason": reason,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(tokens),
        "cached_tokens": cached_tokens,
        "reasoning_tokens": reasoning_tokens,
    }
    return {"text": text, "output_ids": tokens, "meta_info": meta}


def generate_logprobs(
    found: Sequence[TokenLogprob],
    names: TokenNames | None,
    prompt: Sequence[PromptLogprob] | None = None,
    *,
    with_ids: bool = False,
) -> dict[str, Any]:
    """SGLang's form: (log-probability, id, text of the single token; null without `names`). `prompt`: those of the
    prompt; None: they are left out. `with_ids`: and those of the tokens that the request names."""

    def entry(token: int, logprob: float | None) -> list[Any]:
        return [None if logprob is None else finite(logprob), token, None if names is None else names.text(token)]

    def entries(pairs: Iterable[tuple[int, float]]) -> list[list[Any]]:
        return [entry(*pair) for pair in pairs]

    of_prompt = {}
    if prompt is not None:
        of_prompt["input_token_logprobs"] = [entry(one.token, one.logprob) for one in prompt]
        of_prompt["input_top_logprobs"] = [None if one.logprob is None else entries(one.top) for one in prompt]
        if with_ids:
            of_ids = [None if one.logprob is None else entries(one.of_ids) for one in prompt]
            of_prompt["input_token_ids_logprobs"] = of_ids
    of_ids = {"output_token_ids_logprobs": [entries(one.of_ids) for one in found]} if with_ids else {}
    return of_prompt | {
        "output_token_logprobs": [entry(one.token, one.logprob) for one in found],
        "output_top_logprobs": [entries(one.top) for one in found],
        **of_ids,
    }
