"""Makes a sequence from a prompt and parameters, or refuses them. Touches neither device nor queue.

Thread-safe, so that a server can tokenise while the engine works.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
import re
import reprlib
import secrets
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias, cast

import numpy as np

from specjax.checkpoint.control_tokens import ControlTokens
from specjax.checkpoint.prompts import (
    HARMONY,
    Chat,
    Prompt,
    ThinkMarks,
    begins_thinking,
    encode,
    prompt_tail,
    think_marks,
)
from specjax.engine.grammar import HARMONY_MARKS, Constraint, GrammarError, Grammars, Reasoning, harmony_turn
from specjax.engine.sampling_params import GENERATED_SEEDS, MOST_STOP_ID, SamplingParams
from specjax.engine.sequence import PromptLogprobs, Sequence, SequenceOutput
from specjax.engine.text import ANALYSIS, FINAL, LEAD, TextStream, ThinkingBudget, Thoughts
from specjax.limits import ParameterError
from specjax.sampling import STOP_IDS

Sampling: TypeAlias = SamplingParams | Mapping[str, Any]
"""Parameters of a request, or fields of `SamplingParams` by name."""

DENSE = 8  # characters per token above which a text is tokenised in growing prefixes
MARGIN = 64  # tokens by which a prefix, cut anywhere, may exceed its share of the whole text's
SHRINKS = 4
"""Maximum number of characters that normalisation (NFC, NFKC) turns into one. Normalisers that remove spaces or accents
have no limit: a text that is too long by this count is refused, even if the rest would fit."""


class Salts:
    """Turns a request's `cache_salt` into the 32 bits that isolate its n-grams.

    Equal texts give equal words in one engine; a secret key keeps clients from choosing texts that collide. With
    `isolate` a request without a `cache_salt` gets a unique word instead of the common 0, and with `unique` each
    request does.
    """

    def __init__(self, *, isolate: bool, unique: bool = False) -> None:
        self._key = secrets.token_bytes(16)
        self._numbers = itertools.count() if isolate or unique else None
        self._unique = unique

    def __call__(self, cache_salt: str | None) -> int:
        if cache_salt is not None and not self._unique:
            text = b"salt" + cache_salt.encode("utf-8", "surrogatepass")
        elif self._numbers is not None:
            text = b"request" + str(next(self._numbers)).encode()
        else:
            return 0
        return int.from_bytes(hashlib.blake2b(text, key=self._key, digest_size=4).digest(), "little") or 1


@dataclass(frozen=True)
class Intake:
    """Checks requests against an engine's tokenizer and limits."""

    tokenizer: Any
    vocab_size: int
    context_length: int
    pool_tokens: int  # in all pages
    eos_ids: tuple[int, ...]
    depth: int  # D
    salts: Salts = field(default_factory=lambda: Salts(isolate=False))
    seeds: random.Random = field(default_factory=random.SystemRandom)  # draws the seeds of requests without one
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    grammars: Grammars = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "grammars", Grammars(self.tokenizer, self.vocab_size, self.eos_ids))

    # Prompts

    def encode(self, prompt: Prompt) -> list[int]:
        """`specjax.checkpoint.prompts.encode`, with little work for a prompt that is far too long."""
        if isinstance(prompt, list | tuple) and prompt:
            messages = isinstance(prompt[0], Mapping)
            if messages:
                values = itertools.chain(*(message.values() for message in prompt if isinstance(message, Mapping)))
                count = sum(len(value) for value in values if isinstance(value, str))
                self._check_characters(count, SHRINKS)  # a template may leave some out
            if len(prompt) > self.context_length:
                what = "messages" if messages else "tokens"
                raise ValueError(f"the prompt has {len(prompt)} {what}, but the context is {self.context_length}")
        return encode(
            prompt,
            self.tokenizer,
            self.vocab_size,
            check=self.check_text,
            control_tokens=lambda: self.control_tokens,
        )

    @functools.cached_property
    def control_tokens(self) -> ControlTokens:
        return ControlTokens(self.tokenizer)

    def check_text(self, text: str) -> None:
        """Raises ValueError for a text that cannot fit the context, before all of it is tokenised.

        A text with many characters per token of the context is tokenised in prefixes, each four times as long as the
        one before: a text of many megabytes costs no more than a few times what fits.
        """
        self._check_characters(len(text))
        size = DENSE * self.context_length
        while size < len(text):
            count = len(self.tokenizer(text[:size], add_special_tokens=False)["input_ids"])
            if count > self.context_length + MARGIN:
                raise ValueError(
                    f"the prompt has {len(text)} characters; the first {size} alone make {count} tokens, but the "
                    f"context is {self.context_length}"
                )
            size *= 4

    def _check_characters(self, count: int, factor: int = 1) -> None:
        if count > (most := self.most_characters * factor):
            raise ValueError(f"the prompt has {count} characters; the context can hold no more than {most}")

    @functools.cached_property
    def most_characters(self) -> int:
        """Maximum number of characters of a text that may fit the context. Without normalisation (else see `SHRINKS`) a
        token stands for at most as many characters as its name has."""
        core = getattr(self.tokenizer, "backend_tokenizer", None)
        shrinks = SHRINKS if core is None or core.normalizer is not None else 1
        return self.context_length * max(map(len, self.tokenizer.get_vocab())) * shrinks

    # Requests

    def sequence(self, prompt: Prompt, sampling: SamplingParams, *, id: str | None = None) -> Sequence:
        """Makes a sequence that fits. Raises ValueError for an empty prompt, a token outside the vocabulary, or more
        tokens than fit."""
        tokens = self.encode(prompt)
        number = next(self._numbers)
        limit = self._limit(len(tokens), sampling.max_new_tokens)
        self._check_token_ids(sampling)
        if sampling.require_reasoning and self.thinking is None:
            problem = "needs a model that thinks: this one's tokenizer has no tokens <think> and </think>"
            raise ParameterError("require_reasoning", problem)
        constraint = self._constraint(sampling, tokens)
        ends = () if sampling.ignore_eos else self.eos_ids
        if constraint is not None:  # its end tokens come only where the grammar may end
            ends = constraint.eos_ids
        requested = (token for token in sampling.stop_token_ids if token < self.vocab_size)
        stops = tuple(dict.fromkeys((*requested, *ends)))
        minimum = sampling.min_new_tokens
        if minimum > limit:
            raise ParameterError("min_new_tokens", f"{minimum} exceeds the {limit} tokens there is room for")
        if minimum and len(stops) > STOP_IDS:
            problem = f"works with at most {STOP_IDS} stop ids (the device's); this request has {len(stops)}"
            raise ParameterError("min_new_tokens", problem)
        stream = TextStream(
            self.tokenizer,
            cast(tuple[str, ...], sampling.stop),
            skip_special_tokens=sampling.skip_special_tokens,
            keep_stop=sampling.no_stop_trim,
            late=True,
            unskipped=sampling.kept_special_tokens,
            patterns=sampling.stop_regex,
            thoughts=self._thoughts(sampling, tokens),
        )
        scores = self._prompt_logprobs(sampling, tokens)
        return Sequence(
            id=id if id is not None else f"request-{number}",
            prompt=tokens,
            params=sampling,
            limit=limit,
            seed=self.seeds.randrange(GENERATED_SEEDS) if sampling.seed is None else sampling.seed,
            device_stops=stops[:STOP_IDS],
            host_stops=frozenset(stops[STOP_IDS:]),
            arrival=number,
            output=SequenceOutput(stream, histogram=[0] * (self.depth + 1), prompt_logprobs=scores),
            salt=self.salts(sampling.cache_salt),
            constraint=constraint,
            budget=self._budget(sampling, tokens, stops) if limit else None,
            drafts=sampling.drafts,
        )

    def _check_token_ids(self, sampling: SamplingParams) -> None:
        last, whose = self.vocab_size - 1, " of this model"
        for name, most, of in (
            # Clients of SGLang name the stop ids of several models; ids outside the vocabulary are never drawn.
            ("stop_token_ids", MOST_STOP_ID, ""),
            ("logit_bias", last, whose),
            ("logprob_ids", last, whose),
        ):
            if outside := [token for token in getattr(sampling, name) if not 0 <= int(token) <= most]:
                raise ParameterError(name, f"holds {outside[0]!s:.40}; token ids{of} are 0 to {most}")

    def _prompt_logprobs(self, sampling: SamplingParams, prompt: list[int]) -> PromptLogprobs | None:
        start = sampling.logprob_start_len
        if start >= len(prompt):
            raise ParameterError("logprob_start_len", f"must be below the prompt's {len(prompt)} tokens, got {start}")
        top = max(sampling.prompt_logprobs or 0, (sampling.logprobs or 0) * (start >= 0))
        start = start if sampling.prompt_logprobs is None else 0
        return PromptLogprobs(prompt, start, top, sampling.logprob_ids) if start >= 0 else None

    def _constraint(self, sampling: SamplingParams, prompt: List[int]) -> Constraint | None:
        """Compiles the request's grammar unless it is cached."""
        if sampling.grammar is None:
            return None
        grammar, reasoning = sampling.grammar, self._reasoning(prompt, sampling.require_reasoning)
        try:
            if grammar.turn is None and self._has_header(prompt):
                grammar = replace(grammar, turn=self.harmony)
            elif grammar.turn is None and reasoning is not None:
                grammar = replace(grammar, turn=reasoning.turn(self.grammars.core.eos_tokens))
            return Constraint(self.grammars, grammar)
        except GrammarError as error:
            raise ParameterError("grammar", str(error)) from error

    def _limit(self, prompt: int, wanted: int | None) -> int:
        """Maximum number of tokens to emit after a prompt of `prompt` tokens."""
        if prompt >= self.context_length:
            raise ValueError(f"the prompt has {prompt} tokens, but the context is {self.context_length}")
        room, fitting, least = self.context_length - prompt, self.pool_tokens - prompt + 1, wanted or 1
        if least > room:
            problem = (
                f"{reprlib.repr(least)} and the prompt's {prompt} tokens exceed the context of {self.context_length}"
            )
            raise ParameterError("max_new_tokens", problem)
        if least > fitting:
            problem = (
                f"{least} and the prompt's {prompt} tokens do not fit the KV pool of {self.pool_tokens} tokens "
                "(--max-total-tokens)"
            )
            raise ParameterError("max_new_tokens", problem)
        return min(room, fitting) if wanted is None else wanted

    # Thoughts

    @functools.cached_property
    def harmony(self) -> str | None:
        """The grammar of an output in the Harmony format, around its text; None: the tokenizer lacks the markers."""
        names = getattr(self.tokenizer, "get_added_vocab", dict)()
        return harmony_turn(names) if names.keys() >= {*HARMONY_MARKS} else None

    def _has_header(self, prompt: List[int]) -> bool:
        """True if the output begins inside of a header in the Harmony format."""
        return self.harmony is not None and prompt_tail(prompt, self.tokenizer).endswith(HARMONY)

    @functools.cached_property
    def marks(self) -> ThinkMarks:
        return think_marks(self.tokenizer)

    @functools.cached_property
    def thinking(self) -> tuple[int, int] | None:
        """The tokens `<think>` and `</think>`, or in their place; None: the tokenizer lacks them."""
        names = getattr(self.tokenizer, "get_added_vocab", dict)()
        ids = [names.get(name) for name in self.marks[:2]]
        return None if None in ids else cast(Any, tuple(ids))

    def _reasoning(self, prompt: List[int], required: bool = False) -> Reasoning | None:
        """The tokens around the thoughts before an answer to this prompt; None: there are none.

        The thoughts have begun if they are `required`, or if the prompt ends with the beginning of a block and white
        space, as a chat template writes it. Otherwise the model may begin them, unless the prompt ends a block.
        """
        if self.thinking is None:
            return None
        begun = required or begins_thinking(prompt, self.tokenizer)
        return None if begun is False else Reasoning(*self.thinking, begun=bool(begun))

    def _thoughts(self, sampling: SamplingParams, prompt: List[int]) -> Thoughts | None:
        """Splits off the thoughts, in which stops do not match; None: stops match everywhere."""
        if not sampling.stop_after_reasoning:
            return None
        if self._has_header(prompt):
            return Thoughts(True, FINAL)
        begun = sampling.require_reasoning or begins_thinking(prompt, self.tokenizer)
        return None if begun is False else Thoughts(bool(begun), marks=self.marks)

    def _budget(self, sampling: SamplingParams, prompt: List[int], stops: List[int]) -> ThinkingBudget | None:
        """The limit of the thoughts; None: there is none, or the format has no token that ends thoughts."""
        if (most := sampling.thinking_token_budget) is None:
            return None
        decode = functools.partial(self.tokenizer.decode, skip_special_tokens=False)
        if self._has_header(prompt):
            names = self.tokenizer.get_added_vocab()
            role, final = (self.tokenizer.encode(word, add_special_tokens=False) for word in ("assistant", "final"))
            header, channel, message, end, _ = (names[mark] for mark in HARMONY_MARKS)
            again = [channel, *final, message] if sampling.grammar is None else []  # a grammar has its own last message
            marks: dict[str, Any] = {"forced": [end, header, *role], "again": again}
            return ThinkingBudget(decode, most, message, end, ANALYSIS, begun=False, stops=stops, **marks)
        reasoning = self._reasoning(prompt, sampling.require_reasoning)
        if reasoning is None:
            return None
        start, end, begun = reasoning
        lead = LEAD if sampling.grammar is None else re.compile("")  # a grammar begins with the output's first token
        return ThinkingBudget(decode, most, start, end, lead, begun=begun, stops=stops, forced=[end])

    def thoughts(self, sequence: Sequence, output: List[int]) -> int:
        """Number of tokens at the start of an output that are thoughts, including the markers around them."""
        if self.thinking is None or not output:
            return 0
        reasoning = self._reasoning(sequence.prompt, sequence.params.require_reasoning)
        if reasoning is None or not (reasoning.begun or output[0] == reasoning.start):
            return 0
        return output.index(reasoning.end) + 1 if reasoning.end in output else len(output)


def with_sampling(
    prompts: Any,
    sampling: Sampling | List[Sampling | None] | None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[bool, list[tuple[Prompt, SamplingParams]]]:
    """Resolves the arguments of `Engine.generate`.

    Returns:
        True for a single prompt, and each prompt with its parameters.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a parameter or the number of parameters is wrong.
    """
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        forms = "a string, a list of token ids, a list of messages, or a list of these"
        raise TypeError(f"prompts must be {forms}, got {prompts!r:.60}")
    items: Any = prompts if isinstance(prompts, str | Chat) else list(prompts)
    single = isinstance(items, str) or (bool(items) and isinstance(items[0], int | np.integer | Mapping))
    batch = cast(list[Any], [items] if single else items)

    def filled(fields: Any) -> SamplingParams:
        if isinstance(fields, SamplingParams):
            return fields
        if fields is None or isinstance(fields, Mapping):
            return SamplingParams.from_mapping({**defaults, **(fields or {})})
        forms = "a SamplingParams, a dict of its fields, or a list with one for each"
        raise TypeError(f"sampling must be {forms}, got {fields!r:.60}")

    several = isinstance(sampling, list | tuple)
    params = [filled(fields) for fields in sampling] if several else [filled(sampling)] * len(batch)
    if len(params) != len(batch):
        raise ValueError(f"{len(batch)} prompts, but {len(params)} sampling parameters")
    return single, list(zip(batch, params, strict=True))
