"""Answers of OpenAI's routes, whole and as events of a stream; `Answer` is the interface of all answers."""

from __future__ import annotations

import functools
import itertools
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from specjax import __version__
from specjax.checkpoint.prompts import Prompt
from specjax.engine import Completion, StreamChunk
from specjax.engine.chat.message_format import PLAIN, AnswerForm, Reply
from specjax.engine.sequence import PromptLogprob, TokenLogprob, TokenOrigin, accept_histogram
from specjax.engine.text import TextStream, token_bytes
from specjax.serve.errors import ApiError
from specjax.serve.openai_requests import ChatRequest, CompletionRequest
from specjax.serve.tokenising import Task


class Answer(ABC):
    """The answer to one request, whole or as events."""

    shows_aborted: ClassVar[bool] = False  # True: a request that `/abort_request` ended gets an answer, not an error

    @abstractmethod
    def whole(self, done: list[Completion]) -> Any:
        """The body, as JSON-like values."""

    @abstractmethod
    def events(self, chunk: StreamChunk) -> list[bytes]:
        """The events of one chunk."""

    def last_events(self) -> list[bytes]:
        return []

    def error(self, error: ApiError) -> bytes:
        """The event of an error after the first byte."""
        return event(error.body())


DONE = b"data: [DONE]\n\n"

MIN_LOGPROB = -9999.0  # replaces minus infinity, which JSON cannot express; vLLM's number


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event. ASCII, because some clients split lines at every line break of Unicode."""
    return b"data: " + json.dumps(data, allow_nan=False).encode() + b"\n\n"


FINGERPRINT = f"specjax-{__version__}"


class TokenNames:
    """The text and bytes of single tokens, for log-probabilities."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.text = functools.lru_cache(maxsize=100_000)(self._text)
        self.bytes = functools.lru_cache(maxsize=100_000)(self._bytes)

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def _bytes(self, token: int) -> list[int]:
        """The bytes of a token, which may be a part of a character if the vocabulary consists of bytes."""
        name, text = self._tokenizer.convert_ids_to_tokens(token), self._text(token)
        if "\ufffd" in text and isinstance(name, str) and (data := token_bytes(name)) is not None:
            return list(data)
        return list(text.encode())


@dataclass(frozen=True)
class Echo:
    """The prompt as part of a completion's text (`echo`)."""

    text: str
    pieces: tuple[str, ...] = ()  # text of each prompt token, if requested; joined, the pieces equal `text`


def echo_of(prompt: Prompt, tokens: Sequence[int], tokenizer: Any, *, with_pieces: bool) -> Echo:
    """The echo of a prompt, which is a text or token ids.

    A character that spans several tokens belongs to the last of them. Special tokens that the tokenizer added have an
    empty piece. If the decoded tokens differ from the text, for example after normalisation, they are the echo.
    """
    text = prompt if isinstance(prompt, str) else tokenizer.decode(list(tokens))
    if not with_pieces:
        return Echo(text)
    for skip in (False, True):
        pieces = _decoded(tokens, tokenizer, skip)
        if "".join(pieces) == text:
            return Echo(text, pieces)
    pieces = _decoded(tokens, tokenizer, isinstance(prompt, str))
    return Echo("".join(pieces), pieces)


def _decoded(tokens: Sequence[int], tokenizer: Any, skip: bool) -> tuple[str, ...]:
    stream = TextStream(tokenizer, (), skip_special_tokens=skip, keep_stop=False)
    stream.extend(tokens)
    stream.finish()
    return tuple(stream.piece(index) for index in range(len(tokens)))


def finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, MIN_LOGPROB)


def chat_logprobs(logprobs: Iterable[TokenLogprob], names: TokenNames) -> dict[str, Any]:
    """One entry a token; their `token`s joined are the content."""

    def entry(token: int, text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": finite(logprob), "bytes": names.bytes(token)}

    content = []
    for drawn in logprobs:
        top = [entry(token, names.text(token), logprob) for token, logprob in drawn.top]
        content.append(entry(drawn.token, drawn.text, drawn.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(
    logprobs: Sequence[TokenLogprob | PromptLogprob], texts: Sequence[str], names: TokenNames, offset: int = 0
) -> dict[str, Any]:
    """OpenAI's lists over tokens with these texts; null for the first token of a prompt. `top_logprobs` include the
    token itself. `offset`: characters of the choice's text before these tokens."""

    def top(item: TokenLogprob | PromptLogprob) -> dict[str, Any] | None:
        pairs = (*item.top, (item.token, item.logprob))
        return None if item.logprob is None else {names.text(token): finite(value) for token, value in pairs}

    return {
        "tokens": list(texts),
        "token_logprobs": [finite(item.logprob) for item in logprobs],
        "top_logprobs": [top(item) for item in logprobs],
        "text_offset": list(itertools.accumulate(map(len, texts), initial=offset))[:-1],
    }


def speculative(done: Sequence[Completion], width: int) -> dict[str, Any]:
    """Counts over all choices, with SGLang's names and meanings. `width`: nodes of a draft tree, N."""
    steps = sum(c.spec_verify_ct for c in done)
    histogram = accept_histogram(done)
    accepted = sum(count * drafts for drafts, count in enumerate(histogram))
    proposed = steps * (width - 1)
    return {
        "spec_verify_ct": steps,
        "spec_accept_length": round((accepted + steps) / steps, 4) if steps else 1.0,
        "spec_accept_rate": round(accepted / proposed, 4) if proposed else 0.0,
        "spec_accept_histogram": histogram,
        "drafted_steps": sum(c.drafted_steps for c in done),
    }


def usage(done: Sequence[Completion], n: int) -> dict[str, Any]:
    """The usage in OpenAI's form. A prompt counts once for all its choices, cached tokens as in the first choice."""
    prompt = sum(c.prompt_tokens for c in done[::n])
    completed = sum(c.completion_tokens for c in done)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completed,
        "total_tokens": prompt + completed,
        "prompt_tokens_details": {"cached_tokens": sum(c.cached_tokens for c in done[::n])},
    }


def ending(done: Completion, reply: Reply | None = None) -> dict[str, Any]:
    reason = done.finish_reason
    called = reply is not None and reply.has_called and reason["type"] == "stop"
    finish = "tool_calls" if called else reason["type"]
    return {"finish_reason": finish, "matched_stop": reason.get("matched"), "seed": done.seed}


@dataclass
class OpenAIAnswer(Answer):
    """The answer to a chat or completions request, as choices finish."""

    id: str
    model: str
    body: ChatRequest | CompletionRequest
    task: Task
    width: int  # N of the draft trees
    names: TokenNames
    echo: Sequence[Echo] = ()  # prompts to repeat before their choices' texts
    thinking: bool = False  # the prompt ends inside reasoning
    form: AnswerForm = PLAIN
    created: int = field(default_factory=lambda: int(time.time()))
    # By choice:
    _finished: dict[int, Completion] = field(default_factory=dict)
    _offsets: dict[int, int] = field(default_factory=dict)  # see `completion_logprobs`; absent before the first event
    _replies: dict[int, Reply] = field(default_factory=dict)  # parsers of texts with reasoning or calls

    def __post_init__(self) -> None:
        self._chat = isinstance(self.body, ChatRequest)
        self._usage = bool(self.body.stream_options and self.body.stream_options.include_usage)

    def whole(self, done: list[Completion]) -> dict[str, Any]:
        choices = []
        for index, completion in enumerate(done):
            echo = self.echo[index // self.task.n].text if self.echo else ""
            text = echo + completion.text
            content: dict[str, Any] = {"text": text}
            if (reply := self._reply(index)) is not None:
                reply.feed(text, last=True)
                content = {"message": reply.message()}
            elif self._chat:
                content = {"message": {"role": "assistant", "content": text}}
            prompt = self._echo_logprobs(index, completion.prompt_logprobs)
            logprobs = self._logprobs(index, completion.logprobs or ())
            if prompt is not None and logprobs is not None:
                logprobs = {name: prompt[name] + logprobs[name] for name in logprobs}
            more = self._drafting(completion.origins or ())
            choices.append({"index": index, **content, "logprobs": logprobs, **ending(completion, reply), **more})
        return self._body("chat.completion", choices, done) | {"usage": self._counts(done)}

    def events(self, chunk: StreamChunk) -> list[bytes]:
        """The events of one chunk: the role, then text, then the finish reason."""
        index, events = chunk.prompt_index, []
        if index not in self._offsets:
            self._offsets[index] = 0
            if self._chat:
                events.append(self._event(index, {"role": "assistant", "content": ""}))
            elif self.echo:
                logprobs = self._echo_logprobs(index, chunk.prompt_logprobs)
                events.append(self._event(index, self.echo[index // self.task.n].text, logprobs=logprobs))
        more = self._drafting(chunk.origins)
        deltas: list[Any] = [chunk.text] if chunk.text or chunk.logprobs or chunk.origins else []
        if (reply := self._reply(index)) is not None:  # it may delay text, but not log-probabilities and origins
            empty = [{}] if chunk.logprobs or chunk.origins else []
            deltas = reply.feed(chunk.text, last=chunk.completion is not None) or empty
        elif self._chat:
            deltas = [{"content": text} for text in deltas]
        for number, delta in enumerate(deltas):
            members = {} if number else {"logprobs": self._logprobs(index, chunk.logprobs), "more": more}
            events.append(self._event(index, delta, **members))
        if chunk.completion is not None:
            self._finished[index] = chunk.completion
            events.append(self._event(index, {} if self._chat else "", chunk.completion))
        return events

    def last_events(self) -> list[bytes]:
        if not self._usage:
            return [DONE]
        done = [self._finished[index] for index in sorted(self._finished)]
        return [event(self._body("chat.completion.chunk", []) | {"usage": self._counts(done)}), DONE]

    def _reply(self, index: int) -> Reply | None:
        if self.task.reply is None:
            return None
        if index not in self._replies:
            self._replies[index] = self.task.reply.reply(thinking=self.thinking)
        return self._replies[index]

    def _counts(self, done: Sequence[Completion]) -> dict[str, Any]:
        """The usage. `done`: all choices, in order."""
        counts = usage(done, self.task.n)
        if self.task.reply is not None and self.task.reply.reasoning:
            replies = [(self._replies[index], c) for index, c in enumerate(done) if index in self._replies]
            thought = [(reply.called, c.output_ids) for reply, c in replies if reply.has_thought]
            count = sum(self.form.reasoning_tokens(tokens, called) for called, tokens in thought)
            counts |= {"completion_tokens_details": {"reasoning_tokens": count}, "reasoning_tokens": count}  # SGLang's
        return counts

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """The next part of the choice's log-probabilities in the answer's form."""
        if self.task.sampling[0].logprobs is None:
            return None
        if self._chat:
            return chat_logprobs(logprobs, self.names)
        offset, texts = self._offsets.get(index, 0), [drawn.text for drawn in logprobs]
        self._offsets[index] = offset + sum(map(len, texts))
        return completion_logprobs(logprobs, texts, self.names, offset)

    def _echo_logprobs(self, index: int, logprobs: Sequence[PromptLogprob] | None) -> dict[str, Any] | None:
        if logprobs is None or not self.echo:
            return None
        echo = self.echo[index // self.task.n]
        self._offsets[index] = len(echo.text)
        return completion_logprobs(logprobs, echo.pieces, self.names)

    def _drafting(self, origins: Iterable[TokenOrigin]) -> dict[str, Any]:
        """The member of a choice about its tokens, if requested. Their texts join to the text or the delta."""
        tokens = [{"token": one.token, "text": one.text, "drafted": one.drafted} for one in origins]
        return {"speculative": {"tokens": tokens}} if self.body.return_speculative_tokens else {}

    def _event(
        self,
        index: int,
        delta: Any,
        done: Completion | None = None,
        logprobs: Any = None,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> bytes:
        end = ending(done, self._replies.get(index)) if done else {"finish_reason": None}
        choice = {"index": index, ("delta" if self._chat else "text"): delta, "logprobs": logprobs, **end, **more}
        body = self._body("chat.completion.chunk", [choice], [done] if done else [])
        return event(body | ({"usage": None} if self._usage else {}))

    def _body(self, kind: str, choices: list[dict[str, Any]], done: Sequence[Completion] = ()) -> dict[str, Any]:
        """The body without the usage. `done`: completions whose metrics it includes."""
        body: dict[str, Any] = {
            "id": self.id,
            "object": kind if self._chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }
        if self.body.return_speculative_metrics and done:
            # Not in `metadata`, whose values are strings in OpenAI's types: its SDK warns about others.
            body["speculative"] = speculative(done, self.width)
        return body
