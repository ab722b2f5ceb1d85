"""Response bodies of chat completions and completions, whole and as events of a stream."""

from __future__ import annotations

import functools
import itertools
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any, ClassVar

from specjax.checkpoint.prompts import Prompt
from specjax.engine import Completion, StreamChunk
from specjax.engine.output import PromptLogprob, TokenLogprob, TokenOrigin
from specjax.engine.text import TextStream, token_bytes
from specjax.serve.errors import ApiError
from specjax.serve.protocol import ChatRequest, CompletionRequest
from specjax.serve.reply import Reply
from specjax.serve.task import Task
from specjax.trace import StepTree
from specjax.tree import NO_TOKEN


class Answer(ABC):
    """The answer to one request, whole or as events.

    Attributes:
        shows_aborted: whether a request that `/abort_request` has ended gets an answer rather than an error.
    """

    shows_aborted: ClassVar[bool] = False

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

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot express; vLLM's number


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event. ASCII, since some clients split lines at every line break of Unicode."""
    return b"data: " + json.dumps(data, allow_nan=False).encode() + b"\n\n"


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
        if "\ufffd" in text and isinstance(written, str) and (found := token_bytes(written)) is not None:
            return list(found)
        return list(text.encode())


@dataclass(frozen=True)
class Echo:
    """The prompt as part of a completion's text (`echo`)."""

    text: str
    pieces: tuple[str, ...] = ()  # text of each prompt token, if requested; joined they equal `text`


def echo_of(prompt: Prompt, tokens: Sequence[int], tokenizer: Any, *, with_pieces: bool) -> Echo:
    """The echo of a prompt, which is a text or token ids.

    A character that spans several tokens is assigned to the last of them. Special tokens that the tokenizer added have
    an empty piece. If the decoded tokens differ from the text, for example after normalisation, the tokenizer's offset
    mapping gives the pieces.
    """
    text = prompt if isinstance(prompt, str) else tokenizer.decode(list(tokens))
    if not with_pieces:
        return Echo(text)
    for skip in (False, True):
        pieces = _decoded(tokens, tokenizer, skip)
        if "".join(pieces) == text:
            return Echo(text, pieces)
    if isinstance(prompt, str) and (ends := _ends(prompt, tokens, tokenizer)) is not None:
        return Echo(text, tuple(prompt[start:end] for start, end in zip([0, *ends], ends, strict=False)))
    pieces = _decoded(tokens, tokenizer, isinstance(prompt, str))
    return Echo("".join(pieces), pieces)


def _decoded(tokens: Sequence[int], tokenizer: Any, skip: bool) -> tuple[str, ...]:
    stream = TextStream(tokenizer, (), skip_special_tokens=skip, keep_stop=False)
    stream.extend(tokens)
    stream.finish()
    return tuple(stream.piece(index) for index in range(len(tokens)))


def _ends(text: str, tokens: Sequence[int], tokenizer: Any) -> list[int] | None:
    """End of each token's characters in the text. None: the tokenizer has no offset mapping."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    encoding = tokenizer(text, return_offsets_mapping=True)
    if list(encoding["input_ids"]) != list(tokens):
        return None
    ends, last = [], 0
    for _, end in encoding["offset_mapping"]:
        last = max(last, end)
        ends.append(last)
    return [*ends[:-1], len(text)]


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def chat_logprobs(found: Iterable[TokenLogprob], names: TokenNames) -> dict[str, Any]:
    """One entry a token; their `token`s joined are the content."""

    def entry(token: int, text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": finite(logprob), "bytes": names.bytes(token)}

    content = []
    for one in found:
        top = [entry(token, names.text(token), logprob) for token, logprob in one.top]
        content.append(entry(one.token, one.text, one.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(found: Sequence[TokenLogprob], names: TokenNames, offset: int) -> dict[str, Any]:
    """`offset`: characters of the choice's text before these tokens. The drawn token is always in the top."""
    tops = [(*one.top, (one.token, one.logprob)) for one in found]
    return {
        "tokens": [one.text for one in found],
        "token_logprobs": [finite(one.logprob) for one in found],
        "top_logprobs": [{names.text(token): finite(logprob) for token, logprob in top} for top in tops],
        "text_offset": list(itertools.accumulate((len(one.text) for one in found), initial=offset))[:-1],
    }


def echo_logprobs(
    found: Sequence[PromptLogprob], names: TokenNames, echo: Echo, count: int | None
) -> dict[str, Any] | None:
    """As `completion_logprobs`, of the prompt; null for its first token. `count`: of the likeliest tokens; None: no
    log-probabilities are wanted."""
    if count is None:
        return None

    def top(one: PromptLogprob) -> dict[str, float] | None:
        if one.logprob is None:
            return None
        return {names.text(token): finite(value) for token, value in (*one.top[:count], (one.token, one.logprob))}

    return {
        "tokens": list(echo.pieces),
        "token_logprobs": [None if one.logprob is None else finite(one.logprob) for one in found],
        "top_logprobs": [top(one) for one in found],
        "text_offset": list(itertools.accumulate(map(len, echo.pieces), initial=0))[:-1],
    }


def vllm_logprobs(found: Sequence[PromptLogprob], names: TokenNames, count: int) -> list[dict[str, Any] | None]:
    """vLLM's form of a prompt's: by the token's id, null for the first. The rank of a token that is not among the
    `count` likeliest is null."""

    def entry(token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": names.text(token)}

    result: list[dict[str, Any] | None] = []
    for one in found:
        if one.logprob is None:
            result.append(None)
            continue
        best = {str(token): entry(token, value, rank) for rank, (token, value) in enumerate(one.top[:count], 1)}
        result.append({str(one.token): entry(one.token, one.logprob, None)} | best)
    return result


def speculative(done: Sequence[Completion], width: int) -> dict[str, Any]:
    """Counts over all choices; names and meanings are SGLang's. `width`: nodes of a draft tree, N. `drafted_steps` and
    `not_drafted` are as in `Completion`."""
    steps = sum(c.spec_verify_ct for c in done)
    histogram = [sum(bins) for bins in zip(*(c.spec_accept_histogram for c in done), strict=True)]
    accepted = sum(count * drafts for drafts, count in enumerate(histogram))
    proposed = steps * (width - 1)
    return {
        "spec_verify_ct": steps,
        "spec_accept_length": round((accepted + steps) / steps, 4) if steps else 1.0,
        "spec_accept_rate": round(accepted / proposed, 4) if proposed else 0.0,
        "spec_accept_histogram": histogram,
        "drafted_steps": sum(c.drafted_steps for c in done),
        "not_drafted": next((c.not_drafted for c in done if c.not_drafted is not None), None),
    }


def token_origins(found: Iterable[TokenOrigin]) -> list[dict[str, Any]]:
    """One entry a token; their texts joined are that of the choice, or of the event's delta."""
    return [{"token": one.token, "text": one.text, "drafted": one.drafted} for one in found]


def drafted_tree(tree: StepTree | None, names: TokenNames) -> dict[str, Any] | None:
    """The nodes of a step's tree, parents first. Index 0 is the root, the last token before the step.

    `score` is the cumulative log-probability under the draft, for n-grams a rank. Nodes on the accepted path name the
    token that the target drew there, the last one that of its own. `emitted`: so many of the tokens drawn along the
    path became output, fewer than there are where a stop or the limit came first.
    """
    if tree is None:
        return None
    path = set(tree.path.tolist())

    def node(index: int, token: int, parent: int, score: float, drawn: int) -> dict[str, Any]:
        found = {
            "token": token,
            "text": names.text(token),
            "parent": parent if index else None,
            "score": finite(score),
            "accepted": index in path,
        }
        on_path = index in path and drawn != NO_TOKEN
        return found | ({"drawn": {"token": drawn, "text": names.text(drawn)}} if on_path else {})

    columns = (column.tolist() for column in (tree.tokens, tree.parents, tree.scores, tree.drawn))
    nodes = [node(index, *each) for index, each in enumerate(zip(*columns, strict=True))]
    return {"nodes": nodes, "emitted": len(tree.emitted)}


def usage(done: Sequence[Completion], n: int) -> dict[str, Any]:
    """A prompt counts once, however many choices share it, and what of it was cached is the first choice's."""
    prompt = sum(c.prompt_tokens for c in done[::n])
    completed = sum(c.completion_tokens for c in done)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completed,
        "total_tokens": prompt + completed,
        "prompt_tokens_details": {"cached_tokens": sum(c.cached_tokens for c in done[::n])},
    }


def reasoning_tokens(done: Sequence[Completion], end_think: int | None) -> int:
    """Tokens of choices that have begun with thoughts, up to the token that ends these."""
    return sum(c.output_ids.index(end_think) + 1 if end_think in c.output_ids else len(c.output_ids) for c in done)


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
    echo: Sequence[Echo] = ()  # of each prompt, before its choices' texts
    thinking: bool = False  # the prompt has begun the model's thoughts
    end_think: int | None = None  # the token that ends them
    created: int = field(default_factory=lambda: int(time.time()))
    _finished: dict[int, Completion] = field(default_factory=dict)
    _offsets: dict[int, int] = field(default_factory=dict)  # of a choice that has begun; see `completion_logprobs`
    _replies: dict[int, Reply] = field(default_factory=dict)  # of choices whose text is more than content

    def __post_init__(self) -> None:
        self._chat = isinstance(self.body, ChatRequest)
        self._usage = bool(self.body.stream_options and self.body.stream_options.include_usage)

    def whole(self, done: list[Completion]) -> dict[str, Any]:
        choices = []
        for index, completion in enumerate(done):
            echo = self.echo[index // self.task.n].text if self.echo else ""
            text = echo + completion.text
            said: dict[str, Any] = {"text": text}
            if (reply := self._reply(index)) is not None:
                reply.feed(text, last=True)
                said = {"message": reply.message()}
            elif self._chat:
                said = {"message": {"role": "assistant", "content": text}}
            of_echo = self._echo_logprobs(index, completion.prompt_logprobs)
            found = self._logprobs(index, completion.logprobs or ())
            if of_echo is not None and found is not None:
                found = {name: of_echo[name] + found[name] for name in found}
            tree = completion.trees[-1] if completion.trees else None
            more = self._drafting(completion.origins or (), tree)
            if self.body.prompt_logprobs is not None and not self._chat:
                more["prompt_logprobs"] = self._prompt_logprobs(completion)
            choices.append({"index": index, **said, "logprobs": found, **ending(completion, reply), **more})
        body = self._body("chat.completion", choices, done) | {"usage": self._counts(done)}
        if self.body.prompt_logprobs is not None and self._chat:  # all choices have the same prompt
            body["prompt_logprobs"] = self._prompt_logprobs(done[0])
        return body

    def events(self, chunk: StreamChunk) -> list[bytes]:
        """The events of one chunk: the role first, then text, at last the reason of the end."""
        index, found = chunk.prompt_index, []
        if index not in self._offsets:
            self._offsets[index] = 0
            if self._chat:
                found.append(self._event(index, {"role": "assistant", "content": ""}))
            elif self.echo:
                logprobs = self._echo_logprobs(index, chunk.prompt_logprobs)
                found.append(self._event(index, self.echo[index // self.task.n].text, logprobs=logprobs))
        more = self._drafting(chunk.origins, chunk.tree)
        said: list[Any] = [chunk.text] if chunk.text or chunk.logprobs or chunk.origins else []
        if (reply := self._reply(index)) is not None:  # what it holds back comes later, what is said of tokens does not
            empty = [{}] if chunk.logprobs or chunk.origins else []
            said = reply.feed(chunk.text, last=chunk.completion is not None) or empty
        elif self._chat:
            said = [{"content": text} for text in said]
        for number, delta in enumerate(said):
            about = {} if number else {"logprobs": self._logprobs(index, chunk.logprobs), "more": more}
            found.append(self._event(index, delta, **about))
        if chunk.completion is not None:
            self._finished[index] = chunk.completion
            found.append(self._event(index, {} if self._chat else "", chunk.completion))
        return found

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
        found = usage(done, self.task.n)
        if self.task.reply is not None and self.task.reply.reasoning:
            thought = [c for index, c in enumerate(done) if index in self._replies and self._replies[index].has_thought]
            count = reasoning_tokens(thought, self.end_think)
            found |= {"completion_tokens_details": {"reasoning_tokens": count}, "reasoning_tokens": count}  # SGLang's
        return found

    def _logprobs(self, index: int, found: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """Of these tokens, which follow those of the last call."""
        if self.task.sampling[0].logprobs is None:
            return None
        if self._chat:
            return chat_logprobs(found, self.names)
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + sum(len(one.text) for one in found)
        return completion_logprobs(found, self.names, offset)

    def _echo_logprobs(self, index: int, found: Sequence[PromptLogprob] | None) -> dict[str, Any] | None:
        """Of the echo; those of the text follow."""
        if found is None or not self.echo:
            return None
        echo = self.echo[index // self.task.n]
        self._offsets[index] = len(echo.text)
        return echo_logprobs(found, self.names, echo, self.task.sampling[0].logprobs)

    def _prompt_logprobs(self, done: Completion) -> list[dict[str, Any] | None]:
        return vllm_logprobs(done.prompt_logprobs or (), self.names, self.body.prompt_logprobs or 0)

    def _drafting(self, origins: Iterable[TokenOrigin], tree: StepTree | None) -> dict[str, Any]:
        """The member of a choice that says how its text was drafted, if the request asks."""
        found: dict[str, Any] = {}
        if self.body.return_speculative_tokens:
            found["tokens"] = token_origins(origins)
        if self.body.return_speculative_tree:
            found["tree"] = drafted_tree(tree, self.names)
        return {"speculative": found} if found else {}

    def _event(
        self,
        index: int,
        said: Any,
        done: Completion | None = None,
        logprobs: Any = None,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> bytes:
        end = ending(done, self._replies.get(index)) if done else {"finish_reason": None}
        choice = {"index": index, ("delta" if self._chat else "text"): said, "logprobs": logprobs, **end, **more}
        body = self._body("chat.completion.chunk", [choice], [done] if done else [])
        return event(body | ({"usage": None} if self._usage else {}))

    def _body(self, kind: str, choices: list[dict[str, Any]], done: Sequence[Completion] = ()) -> dict[str, Any]:
        """All but the usage. `done`: the completions whose metrics are a part of it."""
        body: dict[str, Any] = {
            "id": self.id,
            "object": kind if self._chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": fingerprint(),
            "choices": choices,
        }
        if self.body.return_speculative_metrics and done:
            body["metadata"] = {"speculative": speculative(done, self.width)}
        return body
