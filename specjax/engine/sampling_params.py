"""Sampling and stop parameters of a request, checked before anything is queued."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeGuard

from specjax.engine.grammar import Grammar, GrammarError
from specjax.engine.text import MAX_PATTERN, StopPatterns
from specjax.limits import ParameterError, documented, setting
from specjax.sampling import BIAS_ENTRIES
from specjax.state import NO_DRAFT_LIMIT
from specjax.verify import LOGPROB_IDS, TOP_LOGPROBS

MAX_STOP_STRINGS = 16
MOST_STOP_ID = 2**31 - 1  # ids outside the vocabulary stop nothing
MAX_STOP_LENGTH = 1024  # characters
MAX_SALT = 256  # characters
MAX_PRIORITY = 2**31 - 1  # absolute value
MAX_TEMPERATURE = 1e4  # far beyond uniform sampling; masks stay below every logit
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
        128, "most tokens to draw, at least 0; 0 = prefill alone; None: the rest of the context"
    )
    temperature: float = setting(0.0, "the logits are divided by it; from 0 (greedy) to 10000")
    top_p: float = setting(
        1.0, "draw from the likeliest tokens whose probabilities add up to this; above 0 and at most 1 (off)"
    )
    top_k: int = setting(-1, "draw from the k likeliest tokens, at least 1; -1 = off")
    min_p: float = setting(
        0.0, "draw from tokens with at least this share of the likeliest one's probability; from 0 (off) to 1"
    )
    frequency_penalty: float = setting(
        0.0, "subtracted from a token's logit for each time that it was drawn; from -2 to 2, 0 = off"
    )
    presence_penalty: float = setting(0.0, "subtracted from the logit of a token that was drawn; from -2 to 2, 0 = off")
    repetition_penalty: float = setting(
        1.0,
        "divides positive logits and multiplies negative logits of tokens in the prompt or output; above 0 and at most "
        "2, 1 = off",
    )
    min_new_tokens: int = setting(0, "tokens before which stop tokens cannot be drawn; from 0 to `max_new_tokens`")
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
        None, "most drafts that a step may check, from 0 (as `speculate=False`) to 1048576; None: the whole tree"
    )
    always_draft: bool = setting(False, "draft in each step, whatever was measured (`EngineConfig.adaptive`)")
    logprobs: int | None = setting(
        None,
        "return the log-probability of each drawn token and of this many likeliest tokens at its position, from 0 to "
        "20; None: none",
    )
    logprob_start_len: int = setting(
        -1, "with `logprobs`, also return those of the prompt's tokens after this position, at least 0; -1 = none"
    )
    logprob_ids: tuple[int, ...] | list[int] = setting(
        (), "with `logprobs`, also return those of these tokens at each position; at most 128"
    )
    prompt_logprobs: int | None = setting(
        None,
        "return the log-probabilities of the prompt's tokens and of this many likeliest tokens at each position, from "
        "0 to 20; None: none",
    )
    priority: int = setting(0, "waiting requests with a higher priority run first; from -2147483647 to 2147483647")
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
    stop_after_reasoning: bool = setting(False, "stop strings and patterns match in the answer alone, after `</think>`")

    def __post_init__(self) -> None:
        def check(name: str, good: bool, must: str, shown: str = "{!r:.60}") -> None:
            if not good:
                raise ParameterError(name, f"must be {must}, got {shown.format(getattr(self, name))}")

        def check_count(name: str, most: int) -> None:
            value = getattr(self, name)
            check(name, value is None or (_is_integer(value) and 0 <= value <= most), f"an integer from 0 to {most}")

        for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
            value = getattr(self, name)
            # abs() < inf, not isfinite(): an integer may be too large to be a float at all
            number = isinstance(value, int | float) and not isinstance(value, bool)
            check(name, number and abs(value) < math.inf, "a finite number")
        for name in ("top_k", "min_new_tokens", "logprob_start_len"):
            check(name, _is_integer(getattr(self, name)), "an integer")
        switches = ("ignore_eos", "skip_special_tokens", "no_stop_trim", "speculate", "always_draft", "origins")
        for name in (*switches, "require_reasoning", "stop_after_reasoning"):
            check(name, isinstance(getattr(self, name), bool), "true or false")
        most, salt, seed = self.max_new_tokens, self.cache_salt, self.seed
        check("max_new_tokens", most is None or (_is_integer(most) and most >= 0), "an integer of at least 0")
        greedy_to_limit = f"from 0 (greedy) to {MAX_TEMPERATURE:g}"
        check("temperature", 0 <= self.temperature <= MAX_TEMPERATURE, greedy_to_limit, "{!s:.40}")
        check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1", "{}")
        check("top_k", self.top_k == -1 or self.top_k >= 1, "-1 (off) or at least 1", "{}")
        check("min_p", 0 <= self.min_p <= 1, "from 0 to 1", "{}")
        check("frequency_penalty", -2 <= self.frequency_penalty <= 2, "from -2 to 2", "{}")
        check("presence_penalty", -2 <= self.presence_penalty <= 2, "from -2 to 2", "{}")
        check("repetition_penalty", 0 < self.repetition_penalty <= 2, "above 0 and at most 2", "{}")
        fits = self.min_new_tokens >= 0 and (most is None or self.min_new_tokens <= most)
        check("min_new_tokens", fits, f"from 0 to the limit of new tokens ({most})", "{}")
        check_count("logprobs", TOP_LOGPROBS)
        check_count("prompt_logprobs", TOP_LOGPROBS)
        check_count("draft_limit", NO_DRAFT_LIMIT)
        if self.always_draft and not self.drafts:
            raise ParameterError("always_draft", "contradicts draft_limit=0 or speculate=False: leave one of them out")
        small = _is_integer(self.priority) and abs(self.priority) <= MAX_PRIORITY
        check("priority", small, f"an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}")
        check("logprob_start_len", self.logprob_start_len >= -1, "-1 (off) or at least 0", "{}")
        object.__setattr__(self, "logprob_ids", _token_ids(self.logprob_ids, "logprob_ids"))
        if len(self.logprob_ids) > LOGPROB_IDS:
            problem = f"has {len(self.logprob_ids)} ids; at most {LOGPROB_IDS} are supported"
            raise ParameterError("logprob_ids", problem)
        for name, used in (("logprob_start_len", self.logprob_start_len >= 0), ("logprob_ids", self.logprob_ids)):
            if used and self.logprobs is None:
                raise ParameterError(name, "needs logprobs")
        short = salt is None or (isinstance(salt, str) and 0 < len(salt) <= MAX_SALT)
        check("cache_salt", short, f"a string of 1 to {MAX_SALT} characters")
        check("grammar", self.grammar is None or isinstance(self.grammar, Grammar), "a Grammar")
        check("seed", seed is None or (_is_integer(seed) and -(2**63) <= seed < 2**63), "an integer of 64 bits")
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
