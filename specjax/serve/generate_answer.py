"""The answer to `/generate`, in SGLang's form."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from specjax.engine import Completion, StreamChunk
from specjax.engine.sequence import PromptLogprob, TokenLogprob
from specjax.serve.answers import DONE, Answer, TokenNames, event, finite, speculative


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

    width: int
    several: bool  # a batch, or n > 1: a list of results, and events with an index
    ids: list[str]
    prompt_tokens: list[int]
    thoughts: Callable[[int, list[int]], int]  # (choice, its output so far) -> number of reasoning tokens
    incremental: bool = False
    names: TokenNames | None = None  # adds the texts of tokens to log-probabilities
    scored: Sequence[bool] = ()  # by choice: log-probabilities were requested
    with_ids: Sequence[bool] = ()  # by choice: log-probabilities of chosen token ids were requested
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
        return [event(body | ({"index": index} if self.several else {}))]

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
        self, index: int, logprobs: Sequence[TokenLogprob], prompt: Sequence[PromptLogprob] | None
    ) -> dict[str, Any]:
        return generate_logprobs(logprobs, self.names, prompt, with_ids=any(self.with_ids[index : index + 1]))


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
    logprobs: Sequence[TokenLogprob],
    names: TokenNames | None,
    prompt: Sequence[PromptLogprob] | None = None,
    *,
    with_ids: bool = False,
) -> dict[str, Any]:
    """SGLang's form of log-probabilities: (log-probability, id, text of the token or null without `names`).

    Args:
        prompt: the log-probabilities of the prompt; None: the result has none.
        with_ids: include the token ids that the request chose.
    """

    def entry(token: int, logprob: float | None) -> list[Any]:
        return [None if logprob is None else finite(logprob), token, None if names is None else names.text(token)]

    def entries(pairs: Iterable[tuple[int, float]]) -> list[list[Any]]:
        return [entry(*pair) for pair in pairs]

    result = {}
    if prompt is not None:
        result["input_token_logprobs"] = [entry(item.token, item.logprob) for item in prompt]
        result["input_top_logprobs"] = [None if item.logprob is None else entries(item.top) for item in prompt]
        if with_ids:
            ids = [None if item.logprob is None else entries(item.of_ids) for item in prompt]
            result["input_token_ids_logprobs"] = ids
    result["output_token_logprobs"] = [entry(item.token, item.logprob) for item in logprobs]
    result["output_top_logprobs"] = [entries(item.top) for item in logprobs]
    if with_ids:
        result["output_token_ids_logprobs"] = [entries(item.of_ids) for item in logprobs]
    return result
