"""What a user asks for, and one sequence's life on the host. No device values."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, NamedTuple

from specjax.engine.text import TextStream
from specjax.inspection import StepTree
from specjax.sampling import BIAS_ENTRIES
from specjax.verify import TOP_LOGPROBS, Logprobs

MAX_STOP_STRINGS = 16

MAX_STOP_LENGTH = 1024
"""Characters of a stop string."""

MAX_SALT = 256
"""Characters of a `cache_salt`."""

NOT_FINITE_TEXT = "the model's logits are not finite (NaN or infinity) after {count} tokens of output"
"""Why a request ended from whose logits nothing can be drawn."""

GENERATED_SEEDS = 2**53 - 2**10
"""Seeds that are drawn for requests without one lie below this: every language reads them from JSON exactly, and so the
seeds of further choices, `seed + i`."""

FAILED_TEXT = "the request failed while its text was made"
"""Why a request ended whose tokens could not be made into text."""


class ParameterError(ValueError):
    """A request's parameter is wrong: "`name` `problem`"."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}")
        self.name, self.problem = name, problem

    def renamed(self, names: Mapping[str, str]) -> ParameterError:
        """The same in the words of an interface that has other names for these parameters."""
        words = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), self.problem)
        return ParameterError(names.get(self.name, self.name), words)


MAX_TEMPERATURE = 1e4
"""Far beyond uniform sampling; masks stay below every logit up to here."""


@dataclass(frozen=True)
class SamplingParams:
    """How to draw, and when to stop. Greedy by default."""

    max_new_tokens: int | None = 128  # None: the rest of the context
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int | str, float] = field(default_factory=dict)
    seed: int | None = None  # None: a random one, which the result names
    skip_special_tokens: bool = True
    no_stop_trim: bool = False  # keep the stop string in the text
    speculate: bool = True  # False: plain decoding for this request
    logprobs: int | None = None  # log-probabilities of the tokens, and of this many likeliest ones at each
    cache_salt: str | None = None  # requests with different salts share no n-gram memory

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
            value = getattr(self, name)
            # abs() < inf, not isfinite(): an integer may be too large to be a float at all
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
                raise ParameterError(name, f"must be a finite number, got {value!r:.60}")
        for name in ("top_k", "min_new_tokens"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), int):
                raise ParameterError(name, f"must be an integer, got {getattr(self, name)!r:.60}")
        for name in ("ignore_eos", "skip_special_tokens", "no_stop_trim", "speculate"):
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(name, f"must be true or false, got {getattr(self, name)!r:.60}")
        most = self.max_new_tokens
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise ParameterError("max_new_tokens", f"must be an integer of at least 1, got {most!r:.60}")
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise ParameterError(
                "temperature", f"must be from 0 (greedy) to {MAX_TEMPERATURE:g}, got {self.temperature!s:.40}"
            )
        if not 0 < self.top_p <= 1:
            raise ParameterError("top_p", f"must be above 0 and at most 1, got {self.top_p}")
        if self.top_k != -1 and self.top_k < 1:
            raise ParameterError("top_k", f"must be -1 (off) or at least 1, got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ParameterError("min_p", f"must be from 0 to 1, got {self.min_p}")
        for name in ("frequency_penalty", "presence_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ParameterError(name, f"must be from -2 to 2, got {getattr(self, name)}")
        if not 0 < self.repetition_penalty <= 2:
            raise ParameterError("repetition_penalty", f"must be above 0 and at most 2, got {self.repetition_penalty}")
        if self.min_new_tokens < 0 or (most is not None and self.min_new_tokens > most):
            raise ParameterError(
                "min_new_tokens", f"must be from 0 to max_new_tokens ({most}), got {self.min_new_tokens}"
            )
        top = self.logprobs
        if top is not None and (isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= TOP_LOGPROBS):
            raise ParameterError("logprobs", f"must be an integer from 0 to {TOP_LOGPROBS}, got {top!r}")
        salt = self.cache_salt
        if salt is not None and (not isinstance(salt, str) or not 0 < len(salt) <= MAX_SALT):
            raise ParameterError("cache_salt", f"must be a string of 1 to {MAX_SALT} characters, got {salt!r:.60}")
        seed = self.seed
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63):
            raise ParameterError("seed", f"must be an integer of 64 bits, got {seed!r:.60}")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """From JSON-like values.

        Raises:
            ValueError: an unknown name, or a value out of range.
        """
        names = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - names)
        if unknown:
            raise ValueError(
                f"unknown sampling parameters: {', '.join(unknown)}; there are: {', '.join(sorted(names))}"
            )
        return cls(**values)


def _stop_strings(stop: Any) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, tuple | list) or not all(isinstance(s, str) and s for s in stops):
        raise ParameterError("stop", f"must be a string or a list of non-empty strings, got {stop!r:.60}")
    if len(stops) > MAX_STOP_STRINGS:
        raise ParameterError("stop", f"has {len(stops)} strings; at most {MAX_STOP_STRINGS} are supported")
    if (longest := max(map(len, stops), default=0)) > MAX_STOP_LENGTH:
        raise ParameterError("stop", f"has a string of {longest} characters; at most {MAX_STOP_LENGTH} are supported")
    return tuple(stops)


def _stop_ids(ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, tuple | list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ParameterError("stop_token_ids", f"must be a list of token ids, got {ids!r:.60}")
    return tuple(dict.fromkeys(ids))


def _bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise ParameterError("logit_bias", f"must map token ids to numbers, got {bias!r:.60}")
    if len(bias) > BIAS_ENTRIES:
        raise ParameterError("logit_bias", f"has {len(bias)} entries; at most {BIAS_ENTRIES} are supported")
    result = {}
    for key, value in bias.items():
        if isinstance(key, bool) or not re.fullmatch(r"-?[0-9]{1,18}", str(key)):
            raise ParameterError("logit_bias", f"has the key {key!r:.40}, which is not a token id")
        token = int(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise ParameterError("logit_bias", f"of token {token} must be from -100 to 100, got {value!r:.60}")
        result[token] = float(value)
    return result


class Status(Enum):
    WAITING = "waiting"  # no slot, no pages
    PREFILLING = "prefilling"  # has a slot; its prompt is not all dispatched
    RUNNING = "running"  # takes part in decode steps
    FINISHED = "finished"


@dataclass(frozen=True)
class FinishReason:
    type: str  # stop, length or abort
    matched: int | str | None = None  # the stop id or stop string
    message: str | None = None  # why it was aborted, where that is our fault

    def as_dict(self, length: int) -> dict[str, Any]:
        """SGLang's form: ``{"type": "stop", "matched": 2}``, ``{"type": "length", "length": 128}``."""
        if self.type == "stop":
            return {"type": "stop", "matched": self.matched}
        if self.type == "length":
            return {"type": "length", "length": length}
        return {"type": self.type} | ({"message": self.message} if self.message else {})


class RawLogprob(NamedTuple):
    """As it comes from the device."""

    drawn: float
    top: tuple[tuple[int, float], ...]


class TokenLogprob(NamedTuple):
    """Of the raw log-softmax: before temperature, penalties, bias and cut-offs."""

    token: int
    text: str  # what it brought: all of a completion's joined are its text
    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest tokens, the best first


@dataclass(eq=False)
class Sequence:
    """One request on its way through the engine. The scheduler owns `status`, `slot` and `pages`."""

    id: str
    prompt: list[int]
    params: SamplingParams
    limit: int  # most tokens to emit
    seed: int
    device_stops: tuple[int, ...]  # checked in the step
    host_stops: frozenset[int]  # the ones that did not fit there
    stream: TextStream
    arrival: int  # youngest = largest
    output: list[int] = field(default_factory=list)
    logprobs: list[RawLogprob] = field(default_factory=list)  # of the output, if asked for
    trees: list[StepTree] = field(default_factory=list)  # of its steps, if the engine keeps them
    finish_reason: FinishReason | None = None
    status: Status = Status.WAITING
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    salt: int = 0  # sequences with different salts share no n-gram memory; set when it is queued
    prefilled: int = 0  # tokens whose prefill was dispatched
    committed: int = 0  # tokens known to be in pages: the last length read
    verify_steps: int = 0
    histogram: list[int] = field(default_factory=list)  # steps by drafts accepted
    sent: int = 0  # characters of the text handed to a streaming caller
    sent_tokens: int = 0
    sent_logprobs: int = 0

    @property
    def context(self) -> list[int]:
        """Tokens to prefill: the prompt, and for a resumed sequence all output but its last token, the root."""
        return self.prompt + self.output[:-1]

    @property
    def forced_token(self) -> int | None:
        """The token after the context of a resumed sequence: emitted already, so never drawn again."""
        return self.output[-1] if self.output else None

    @property
    def wants_logprobs(self) -> bool:
        return self.params.logprobs is not None

    @property
    def most_tokens(self) -> int:
        """The most tokens that can ever be committed: the last emitted one never is."""
        return len(self.prompt) + self.limit - 1

    def accept(self, tokens: list[int], stopped: bool, full: bool) -> int:
        """Takes the tokens a step emitted; finishes on a stop. Returns how many were kept (a stop string or a stop id
        that only the host knows may end the sequence inside the run; what follows is dropped and not counted)."""
        for kept, token in enumerate(tokens, start=1):
            self.output.append(token)
            is_stop = token in self.host_stops or (stopped and kept == len(tokens))
            if is_stop:  # counted, in `output`, not in the text
                self._finish(FinishReason("stop", token))
                return kept
            if self.stream.push(token):
                self._finish(FinishReason("stop", self.stream.matched))
                return kept
        if full:
            self._finish(FinishReason("length"))
        return len(tokens)

    def abort(self, message: str | None = None) -> None:
        """Ends it as it is. `message`: what went wrong on our side."""
        self.finish_reason = FinishReason("abort", message=message)
        if message is None:  # what failed may be the text itself
            self.stream.finish()

    def break_off(self) -> None:
        """Ends it because the model gives no logits that a token could be drawn from. Keeps its text so far."""
        self._finish(FinishReason("abort", message=NOT_FINITE_TEXT.format(count=len(self.output))))

    def _finish(self, reason: FinishReason) -> None:
        self.stream.finish()
        if self.stream.matched is not None:  # in text that was held back, so before a stop token or the limit
            reason = FinishReason("stop", self.stream.matched)
        self.finish_reason = reason

    def token_logprobs(self, start: int = 0) -> list[TokenLogprob]:
        """Of the output from a token on."""
        return [
            TokenLogprob(self.output[i], self.stream.piece(i), self.logprobs[i].drawn, self.logprobs[i].top)
            for i in range(start, len(self.logprobs))
        ]

    @property
    def drafted_tokens(self) -> int:
        """Emitted by verification steps: all but the one that prefill drew."""
        return sum(count * (drafts + 1) for drafts, count in enumerate(self.histogram))

    @property
    def accept_length(self) -> float:
        """Emitted tokens per verification; 1.0 when none was needed."""
        return self.drafted_tokens / self.verify_steps if self.verify_steps else 1.0


@dataclass(frozen=True)
class Completion:
    """A finished request."""

    id: str
    text: str
    output_ids: list[int]
    prompt_tokens: int
    finish_reason: dict[str, Any]
    spec_verify_ct: int
    spec_accept_length: float
    spec_accept_histogram: list[int]
    seed: int
    logprobs: list[TokenLogprob] | None = None
    trees: list[StepTree] = field(default_factory=list)  # what each step proposed and accepted; `EngineConfig.trace`

    @property
    def completion_tokens(self) -> int:
        return len(self.output_ids)


def completion(sequence: Sequence) -> Completion:
    assert sequence.finish_reason is not None
    return Completion(
        id=sequence.id,
        text=sequence.stream.text,
        output_ids=list(sequence.output),
        prompt_tokens=len(sequence.prompt),
        finish_reason=sequence.finish_reason.as_dict(len(sequence.output)),
        spec_verify_ct=sequence.verify_steps,
        spec_accept_length=sequence.accept_length,
        spec_accept_histogram=list(sequence.histogram),
        seed=sequence.seed,
        logprobs=sequence.token_logprobs() if sequence.wants_logprobs else None,
        trees=list(sequence.trees),
    )


def later_seed(seed: int, count: int) -> int:
    """seed + count, wrapped as 64-bit integers are."""
    return (seed + count + 2**63) % 2**64 - 2**63


def random_seed() -> int:
    return secrets.randbelow(GENERATED_SEEDS)


def raw_logprobs(found: Logprobs, row: int, count: int, top: int) -> list[RawLogprob]:
    """Of the first `count` tokens of a row of a step's output, each with its `top` likeliest."""
    rows = zip(found.drawn[row, :count].tolist(), found.top_ids[row], found.top[row], strict=False)
    return [
        RawLogprob(drawn, tuple(zip(ids[:top].tolist(), best[:top].tolist(), strict=True))) for drawn, ids, best in rows
    ]
