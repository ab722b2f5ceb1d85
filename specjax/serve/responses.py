"""Response bodies: chat completions, completions and `/generate`, whole and as events of a stream.

`specjax.serve.openapi` states their form.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeAlias

from specjax.engine import Completion, StreamChunk
from specjax.engine.decoders import byte_of_letter
from specjax.engine.sequence import TokenLogprob

DONE = b"data: [DONE]\n\n"

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express; vLLM's number."""


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event. ASCII, since some clients split lines at every line break of Unicode."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"


@functools.cache  # every event has it, and finding the version reads files
def fingerprint() -> str:
    try:
        return f"specjax-{version('specjax')}"
    except PackageNotFoundError:  # run from the tree
        return "specjax-source"


class TokenNames:
    """The text and bytes of single tokens, for log-probabilities."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.text = functools.lru_cache(maxsize=100_000)(self._text)
        self.bytes = functools.lru_cache(maxsize=100_000)(self._bytes)

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def _bytes(self, token: int) -> list[int]:
        """Also of a token that is only a part of a character, where the vocabulary is one of bytes."""
        written = self._tokenizer.convert_ids_to_tokens(token)
        text = self._text(token)
        if "\ufffd" in text and isinstance(written, str):
            if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", written):
                return [int(match[1], 16)]
            if all(letter in byte_of_letter() for letter in written):
                return [byte_of_letter()[letter] for letter in written]
        return list(text.encode())


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def chat_logprobs(found: Iterable[TokenLogprob], names: TokenNames) -> dict[str, Any]:
    """One entry a token; their `token`s joined are the content."""

    def entry(token: int, text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": _finite(logprob), "bytes": names.bytes(token)}

    content = []
    for one in found:
        top = [entry(token, names.text(token), logprob) for token, logprob in one.top]
        content.append(entry(one.token, one.text, one.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(found: Iterable[TokenLogprob], names: TokenNames, offset: int) -> dict[str, Any]:
    """`offset`: characters of the choice's text before these tokens. The drawn token is always in the top."""
    lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for one in found:
        top = {names.text(token): _finite(logprob) for token, logprob in one.top}
        lists["tokens"].append(one.text)
        lists["token_logprobs"].append(_finite(one.logprob))
        lists["top_logprobs"].append(top | {names.text(one.token): _finite(one.logprob)})
        lists["text_offset"].append(offset)
        offset += len(one.text)
    return lists


def generate_logprobs(found: Iterable[TokenLogprob], names: TokenNames | None) -> dict[str, Any]:
    """SGLang's form: (log-probability, id, text of the single token; null without `names`)."""

    def entry(token: int, logprob: float) -> list[Any]:
        return [_finite(logprob), token, None if names is None else names.text(token)]

    found = list(found)
    return {
        "output_token_logprobs": [entry(one.token, one.logprob) for one in found],
        "output_top_logprobs": [[entry(token, logprob) for token, logprob in one.top] for one in found],
    }


def speculative(done: Iterable[Completion], width: int) -> dict[str, Any]:
    """Counts over all choices; names and meanings are SGLang's. `width`: nodes of a draft tree, N."""
    done = list(done)
    steps = sum(c.spec_verify_ct for c in done)
    histogram = [sum(bins) for bins in zip(*(c.spec_accept_histogram for c in done), strict=True)]
    accepted = sum(count * drafts for drafts, count in enumerate(histogram))
    proposed = steps * (width - 1)
    return {
        "spec_verify_ct": steps,
        "spec_accept_length": round((accepted + steps) / steps, 4) if steps else 1.0,
        "spec_accept_rate": round(accepted / proposed, 4) if proposed else 0.0,
        "spec_accept_histogram": histogram,
    }


def usage(done: Iterable[Completion], n: int) -> dict[str, Any]:
    """A prompt counts once, however many choices share it."""
    done = list(done)
    prompt = sum(c.prompt_tokens for c in done[::n])
    completed = sum(c.completion_tokens for c in done)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completed,
        "total_tokens": prompt + completed,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def ending(done: Completion) -> dict[str, Any]:
    reason = done.finish_reason
    return {"finish_reason": reason["type"], "matched_stop": reason.get("matched"), "seed": done.seed}


@dataclass
class OpenAIAnswer:
    """The answer to a chat or completions request, as choices finish."""

    id: str
    model: str
    chat: bool
    n: int
    width: int  # N of the draft trees
    names: TokenNames
    logprobs: bool = False
    metrics: bool = False
    include_usage: bool = False
    echo: list[str] = field(default_factory=list)  # each prompt, to be repeated before its choices' texts
    created: int = field(default_factory=lambda: int(time.time()))
    finished: dict[int, Completion] = field(default_factory=dict)
    _begun: set[int] = field(default_factory=set)
    _offsets: dict[int, int] = field(default_factory=dict)

    def whole(self, done: list[Completion]) -> dict[str, Any]:
        choices = []
        for index, completion in enumerate(done):
            text = self._echoed(index) + completion.text
            said = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            found = self._logprobs(index, completion.logprobs or ())
            choices.append({"index": index, **said, "logprobs": found, **ending(completion)})
        return self._head("chat.completion") | {"choices": choices, "usage": usage(done, self.n)} | self._metadata(done)

    def events(self, chunk: StreamChunk) -> list[bytes]:
        """The events of one chunk: the role first, then text, at last the reason of the end."""
        index, found = chunk.prompt_index, []
        if index not in self._begun:
            self._begun.add(index)
            if self.chat:
                found.append(self._event(index, {"role": "assistant", "content": ""}))
            elif self._echoed(index):
                found.append(self._event(index, self._echoed(index)))
        if chunk.text or chunk.logprobs:
            said = {"content": chunk.text} if self.chat else chunk.text
            found.append(self._event(index, said, logprobs=self._logprobs(index, chunk.logprobs)))
        if chunk.completion is not None:
            self.finished[index] = chunk.completion
            found.append(self._event(index, {} if self.chat else "", chunk.completion))
        return found

    def last_events(self) -> list[bytes]:
        if not self.include_usage:
            return [DONE]
        done = [self.finished[index] for index in sorted(self.finished)]
        last = {"choices": [], "usage": usage(done, self.n)}
        return [event(self._head("chat.completion.chunk") | last), DONE]

    def _logprobs(self, index: int, found: Iterable[TokenLogprob]) -> dict[str, Any] | None:
        """Of these tokens, which follow those of the last call."""
        if not self.logprobs:
            return None
        if self.chat:
            return chat_logprobs(found, self.names)
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + sum(len(one.text) for one in found)
        return completion_logprobs(found, self.names, offset)

    def _event(self, index: int, said: Any, done: Completion | None = None, logprobs: Any = None) -> bytes:
        end = ending(done) if done else {"finish_reason": None}
        choice = {"index": index, ("delta" if self.chat else "text"): said, "logprobs": logprobs, **end}
        body = self._head("chat.completion.chunk") | {"choices": [choice]}
        if self.include_usage:
            body["usage"] = None
        if done is not None:
            body |= self._metadata([done])
        return event(body)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": fingerprint(),
        }

    def _echoed(self, index: int) -> str:
        return self.echo[index // self.n] if self.echo else ""

    def _metadata(self, done: list[Completion]) -> dict[str, Any]:
        return {"metadata": {"speculative": speculative(done, self.width)}} if self.metrics else {}


@dataclass
class GenerateAnswer:
    """The answer to `/generate`. Events carry all text and tokens so far, as SGLang's do.

    With `incremental` (SGLang's `--incremental-streaming-output`) each event carries only new text and tokens. Without
    it n tokens cost n^2 / 2 ids.
    """

    width: int
    many: bool  # a batch, or n > 1: a list of results, and events with an index
    ids: list[str]
    prompt_tokens: list[int]
    incremental: bool = False
    names: TokenNames | None = None  # puts the texts of tokens into their log-probabilities
    started: float = field(default_factory=time.perf_counter)
    _texts: dict[int, str] = field(default_factory=dict)
    _tokens: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def whole(self, done: list[Completion]) -> Any:
        results = [self._result(completion) for completion in done]
        return results if self.many else results[0]

    def events(self, chunk: StreamChunk) -> list[bytes]:
        index = chunk.prompt_index
        if chunk.completion is not None:
            body = self._result(chunk.completion)
        else:
            text = self._texts[index] = self._texts.get(index, "") + chunk.text
            tokens = self._tokens[index]
            tokens += chunk.output_ids
            meta = {"id": self.ids[index], "finish_reason": None, "prompt_tokens": self.prompt_tokens[index]}
            meta |= {"completion_tokens": len(tokens), "cached_tokens": 0}
            body = {"text": text, "output_ids": tokens, "meta_info": meta}
        if self.incremental:
            body |= {"text": chunk.text, "output_ids": chunk.output_ids}
            if chunk.logprobs or "output_token_logprobs" in body["meta_info"]:
                body["meta_info"] |= generate_logprobs(chunk.logprobs, self.names)
        return [event(body | ({"index": index} if self.many else {}))]

    def last_events(self) -> list[bytes]:
        return [DONE]

    def _result(self, done: Completion) -> dict[str, Any]:
        meta = {
            "id": done.id,
            "finish_reason": done.finish_reason,
            "prompt_tokens": done.prompt_tokens,
            "completion_tokens": done.completion_tokens,
            "cached_tokens": 0,
            "e2e_latency": round(time.perf_counter() - self.started, 6),
            "seed": done.seed,
            **speculative([done], self.width),
        }
        if done.logprobs is not None:
            meta |= generate_logprobs(done.logprobs, self.names)
        return {"text": done.text, "output_ids": done.output_ids, "meta_info": meta}


Answer: TypeAlias = OpenAIAnswer | GenerateAnswer
