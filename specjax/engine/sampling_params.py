"""Sampling and stop parameters of a request, checked before anything is queued."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, TypeGuard, get_args, get_type_hints

from specjax.engine.grammar import Grammar, GrammarError
from specjax.engine.text import MAX_PATTERN, StopPatterns
from specjax.limits import ParameterError, check_value, documented, setting, setting_of, shown
from specjax.logprobs import LOGPROB_IDS, TOP_LOGPROBS
from specjax.sampling import BIAS_ENTRIES
from specjax.state import NO_DRAFT_LIMIT

MAX_STOP_STRINGS = 16
MOST_STOP_ID = 2**31 - 1  # ids outside the vocabulary stop nothing
MAX_STOP_LENGTH = 1024  # characters
MAX_SALT = 256  # characters
MAX_PRIORITY = 2**31 - 1  # absolute value
MAX_TEMPERATURE = 10_000  # far beyond uniform sampling; masks stay below every logit
GENERATED_SEEDS = 2**53 - 2**10
"""Upper bound of generated seeds: every language reads them, and `seed + i` of further choices, from JSON exactly."""

GRAMMARS: dict[str, Callable[[Any], Grammar | None]] = {
    "json_schema": Grammar.json,
    "regex": lambda text: Grammar("regex", text),
    "ebnf": lambda text: Grammar("ebnf", text),
    "response_format": Grammar.response_format,
}
"""Names of grammars in JSON-like parameters, as in requests to the server."""


@documented
@dataclass(frozen=True)
class SamplingParams:
    """How to draw, and when to stop. Greedy by default.

    Raises:
        ParameterError: a value is of the wrong type or out of range.
    """

    max_new_tokens: int | None = setting(
        128, "most tokens to draw; 0 = prefill alone; None: the rest of the context", minimum=0
    )
    temperature: float = setting(0.0, "the logits are divided by it; 0 = greedy", minimum=0, maximum=MAX_TEMPERATURE)
    top_p: float = setting(
        1.0, "draw from the likeliest tokens whose probabilities add up to this; 1 = off", above=0, maximum=1
    )
    top_k: int = setting(-1, "draw from the k likeliest tokens; -1 = off, not 0", minimum=-1)
    min_p: float = setting(
        0.0,
        "draw from tokens with at least this share of the likeliest one's probability; 0 = off",
        minimum=0,
        maximum=1,
    )
    frequency_penalty: float = setting(
        0.0, "subtracted from a token's logit for each time that it was drawn; 0 = off", minimum=-2, maximum=2
    )
    presence_penalty: float = setting(
        0.0, "subtracted from the logit of a token that was drawn; 0 = off", minimum=-2, maximum=2
    )
    repetition_penalty: float = setting(
        1.0,
        "divides positive logits and multiplies negative logits of tokens in the prompt or output; 1 = off",
        above=0,
        maximum=2,
    )
    min_new_tokens: int = setting(
        0, "tokens before which stop tokens cannot be drawn; at most `max_new_tokens`", minimum=0
    )
    stop: str | tuple[str, ...] | list[str] = setting(
        (), "a string, or up to 16 strings of up to 1024 characters; the text ends at the first that occurs"
    )
    stop_regex: str | tuple[str, ...] | list[str] = setting(
        (),
        "a pattern, or up to 16 patterns of up to 256 characters (RE2); the text ends before the first match; see "
        "`specjax.engine.text`",
    )
    stop_token_ids: tuple[int, ...] | list[int] = setting(
        (), "further tokens that end the text; ids that the model does not have stop nothing"
    )
    ignore_eos: bool = setting(False, "go on after the model's end tokens")
    logit_bias: Mapping[int | str, float] = setting(
        dict,
        "token ids, as numbers or text, to numbers from -100 to 100, which are added to the tokens' logits; at most "
        "1024 entries",
    )
    seed: int | None = setting(
        None, "seed of the sampling noise, an integer of 64 bits; None: random, returned in `Completion.seed`"
    )
    skip_special_tokens: bool = setting(True, "leave special tokens out of the text")
    kept_special_tokens: tuple[str, ...] = setting((), "texts of special tokens that are not skipped")
    no_stop_trim: bool = setting(False, "keep the stop string in the text")
    speculate: bool = setting(True, "False: plain decoding for this request")
    draft_limit: int | None = setting(
        None,
        "most drafts that a step may check; 0 = as `speculate=False`; None: the whole tree",
        minimum=0,
        maximum=NO_DRAFT_LIMIT,
    )
    logprobs: int | None = setting(
        None,
        "return the log-probability of each drawn token and of this many likeliest tokens at its position; None: none",
        minimum=0,
        maximum=TOP_LOGPROBS,
    )
    logprob_start_len: int = setting(
        -1, "with `logprobs`, also return those of the prompt's tokens after this position; -1 = none", minimum=-1
    )
    logprob_ids: tuple[int, ...] | list[int] = setting(
        (), "with `logprobs`, also return those of these tokens at each position; at most 128"
    )
    prompt_logprobs: int | None = setting(
        None,
        "return the log-probabilities of the prompt's tokens and of this many likeliest tokens at each position; "
        "None: none",
        minimum=0,
        maximum=TOP_LOGPROBS,
    )
    priority: int = setting(
        0, "waiting requests with a higher priority run first", minimum=-MAX_PRIORITY, maximum=MAX_PRIORITY
    )
    cache_salt: str | None = setting(
        None,
        "1 to 256 characters. Requests with different salts share neither pages of the prefix cache nor n-grams; None: "
        "shared with all others that have none",
    )
    origins: bool = setting(False, "return which tokens were accepted drafts, in `Completion.origins`")
    grammar: Grammar | None = setting(None, "grammar that the text must match; None: any text")
    require_reasoning: bool = setting(
        False, "the text begins inside of thoughts, and the grammar applies after their end"
    )
    thinking_token_budget: int | None = setting(
        None,
        "most tokens of thoughts, after which their end is forced; None: no limit; changes nothing for a model without "
        "tokens around its thoughts",
        minimum=0,
    )
    stop_after_reasoning: bool = setting(False, "stop strings and patterns match in the answer alone, after `</think>`")

    def __post_init__(self) -> None:
        for name, annotation in _scalars().items():
            value = getattr(self, name)
            try:
                check_value(value, annotation, setting_of(self, name))
            except (TypeError, ValueError) as error:
                raise ParameterError(name, f"must be {error}, got {shown(value)}") from None
        if self.top_k == 0:
            raise ParameterError("top_k", "must be -1 (off) or at least 1, got 0")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            problem = f"must be from 0 to the limit of new tokens ({self.max_new_tokens}), got {self.min_new_tokens}"
            raise ParameterError("min_new_tokens", problem)
        if self.cache_salt is not None and not 0 < len(self.cache_salt) <= MAX_SALT:
            raise ParameterError("cache_salt", f"must be a string of 1 to {MAX_SALT} characters")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise ParameterError("grammar", f"must be a Grammar, got {self.grammar!r:.60}")
        object.__setattr__(self, "logprob_ids", _token_ids(self.logprob_ids, "logprob_ids"))
        if len(self.logprob_ids) > LOGPROB_IDS:
            problem = f"has {len(self.logprob_ids)} ids; at most {LOGPROB_IDS} are supported"
            raise ParameterError("logprob_ids", problem)
        for name, used in (("logprob_start_len", self.logprob_start_len >= 0), ("logprob_ids", self.logprob_ids)):
            if used and self.logprobs is None:
                raise ParameterError(name, "needs logprobs")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_regex", _stop_patterns(self.stop_regex))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids, "stop_token_ids"))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))

    @property
    def drafts(self) -> bool:
        """True if steps may draft for this request."""
        return self.speculate and self.draft_limit != 0

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Makes parameters from JSON-like values, a grammar by the names of `GRAMMARS`. Raises ValueError for an
        unknown name or a value out of range."""
        names = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - names - set(GRAMMARS)):
            known = ", ".join(sorted({*names, *GRAMMARS}))
            raise ValueError(f"unknown sampling parameters: {', '.join(unknown)}; there are: {known}")
        grammars = [name for name in ("grammar", *GRAMMARS) if values.get(name) is not None]
        if len(grammars) > 1:
            raise ParameterError(grammars[0], f"and {grammars[1]} ask for different forms of text: give one")
        params = {name: value for name, value in values.items() if name not in GRAMMARS}
        for name in set(grammars) - {"grammar"}:
            try:
                params["grammar"] = GRAMMARS[name](values[name])
            except GrammarError as error:
                raise ParameterError(name, str(error)) from error
        return cls(**params)


@functools.cache
def _scalars() -> dict[str, Any]:
    """Annotations of the fields that `check_value` checks."""
    scalars = {int, float, str, bool, NoneType}
    hints = get_type_hints(SamplingParams)
    return {name: hint for name, hint in hints.items() if set(get_args(hint) or [hint]) <= scalars}


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _stop_strings(stop: Any, name: str = "stop", most: int = MAX_STOP_LENGTH) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, tuple | list) or not all(isinstance(s, str) and s for s in stops):
        raise ParameterError(name, f"must be a string or a list of non-empty strings, got {stop!r:.60}")
    if len(stops) > MAX_STOP_STRINGS:
        raise ParameterError(name, f"has {len(stops)} strings; at most {MAX_STOP_STRINGS} are supported")
    if (longest := max(map(len, stops), default=0)) > most:
        raise ParameterError(name, f"has a string of {longest} characters; at most {most} are supported")
    return tuple(stops)


def _stop_patterns(patterns: Any) -> tuple[str, ...]:
    patterns = _stop_strings(patterns, "stop_regex", MAX_PATTERN)
    try:
        StopPatterns(patterns)
    except ValueError as error:
        raise ParameterError("stop_regex", str(error)) from None
    return patterns


def _token_ids(ids: Any, name: str) -> tuple[int, ...]:
    if not isinstance(ids, tuple | list) or not all(map(_is_integer, ids)):
        raise ParameterError(name, f"must be a list of token ids, got {ids!r:.60}")
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


def later_seed(seed: int, count: int) -> int:
    """seed + count, wrapped to 64 bits."""
    return (seed + count + 2**63) % 2**64 - 2**63
