"""Makes a sequence of a user's prompt and parameters, or refuses them. Touches neither device nor queue.

Safe to call from any thread, so that a server can tokenise while the engine works.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
import reprlib
import secrets
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias, cast

import numpy as np

from specjax.checkpoint.prompts import END_THINK, THINK, PlainText, Prompt, begins_thinking, encode
from specjax.engine.grammar import Constraint, GrammarError, Grammars, Reasoning
from specjax.engine.output import Output, PromptLogprobs
from specjax.engine.sampling_params import GENERATED_SEEDS, MOST_STOP_ID, SamplingParams
from specjax.engine.sequence import Request, Sequence
from specjax.engine.text import TextStream, Thoughts
from specjax.limits import ParameterError
from specjax.sampling import STOP_IDS

Sampling: TypeAlias = SamplingParams | Mapping[str, Any]
"""Parameters of a request, or fields of `SamplingParams` by name."""


SHRINKS = 4
"""Most characters that become one when a text is normalised, as with NFC and NFKC. Normalisers that remove characters
(spaces, accents) know no limit: a text that is too long by this count is refused, even if the rest would fit."""

DENSE = 8  # characters a token from which on a text is tokenised piece by piece, to find early that it does not fit
MARGIN = 64  # tokens by which the start of a text, cut anywhere, may exceed its share of the whole text's


class Salts:
    """Turns a request's `cache_salt` into the 32 bits that keep its n-gram memory apart. Equal texts give equal words
    in one engine; a secret key keeps clients from choosing texts that collide. With `isolate` a request without a
    `cache_salt` gets a word that no other has, instead of the common 0."""

    def __init__(self, *, isolate: bool) -> None:
        self._key = secrets.token_bytes(16)
        self._numbers = itertools.count() if isolate else None

    def __call__(self, cache_salt: str | None) -> int:
        """A 32-bit word, not 0 where the request is to be kept apart."""
        if cache_salt is not None:
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
    late: bool = True  # whether texts are decoded where they are read
    plain_content: bool = False  # users' text makes no special tokens
    seeds: random.Random = field(default_factory=random.SystemRandom)  # draws the seeds of requests without one
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    plain: PlainText | None = field(init=False)  # None: `plain_content` is off
    grammars: Grammars = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "plain", PlainText(self.tokenizer) if self.plain_content else None)
        object.__setattr__(self, "grammars", Grammars(self.tokenizer, self.vocab_size, self.eos_ids))

    def encode(self, prompt: Prompt) -> list[int]:
        """As `encode`; little is done for a prompt that is far too long."""
        if isinstance(prompt, list | tuple) and prompt:
            messages = isinstance(prompt[0], Mapping)
            if messages:
                values = itertools.chain(*(each.values() for each in prompt if isinstance(each, Mapping)))
                count = sum(len(value) for value in values if isinstance(value, str))
                self._check_characters(count, SHRINKS)  # a template may leave some out
            if len(prompt) > self.context_length:
                what = "messages" if messages else "tokens"
                raise ValueError(f"the prompt has {len(prompt)} {what}, but the context is {self.context_length}")
        return encode(prompt, self.tokenizer, self.vocab_size, check=self.check_text, plain=self.plain)

    def check_text(self, text: str) -> None:
        """Raises ValueError for a text that cannot fit the context, before all of it is tokenised.

        A text with few characters a token is tokenised as a whole at once. Otherwise its start is, then a start four
        times as long: a text of many megabytes costs no more than a few times what fits.
        """
        self._check_characters(len(text))
        size = DENSE * self.context_length
        while size < len(text):
            count = len(self.tokenizer(text[:size], add_special_tokens=False)["input_ids"])
            if count > self.context_length + MARGIN:
                raise ValueError(
                    f"the prompt has {len(text)} characters, of which the first {size} alone make {count} tokens, "
                    f"but the context is {self.context_length}"
                )
            size *= 4

    def _check_characters(self, count: int, factor: int = 1) -> None:
        if count > (most := self.most_characters * factor):
            raise ValueError(f"the prompt has {count} characters; the context can hold no more than {most}")

    @functools.cached_property
    def most_characters(self) -> int:
        """Most characters of a text that may fit the context. Where text is not normalised (else see `SHRINKS`), a
        token stands for no more characters than it is written with."""
        core = getattr(self.tokenizer, "backend_tokenizer", None)
        shrinks = SHRINKS if core is None or core.normalizer is not None else 1
        return self.context_length * max(map(len, self.tokenizer.get_vocab())) * shrinks

    def sequence(self, prompt: Prompt, sampling: SamplingParams, *, id: str | None = None) -> Sequence:
        """A sequence that will fit. Raises ValueError for an empty prompt, a token outside the vocabulary, or more
        tokens than fit."""
        tokens = self.encode(prompt)
        number = next(self._numbers)
        limit = self._limit(len(tokens), sampling.max_new_tokens)
        last, whose = self.vocab_size - 1, " of this model"
        for what, most, of in (
            # One that this model does not have is never drawn: SGLang's clients name those of several models.
            ("stop_token_ids", MOST_STOP_ID, ""),
            ("logit_bias", last, whose),
            ("logprob_ids", last, whose),
        ):
            if outside := [token for token in getattr(sampling, what) if not 0 <= int(token) <= most]:
                raise ParameterError(what, f"holds {outside[0]!s:.40}; token ids{of} are 0 to {most}")
        if sampling.require_reasoning and self.thinking is None:
            problem = "needs a model that thinks: this one's tokenizer has no tokens <think> and </think>"
            raise ParameterError("require_reasoning", problem)
        if sampling.always_draft and not self.depth:
            raise ParameterError("always_draft", "needs a drafter; the speculative algorithm of this engine is NONE")
        constraint = self._constraint(sampling, tokens)
        ends = () if sampling.ignore_eos else self.eos_ids
        if constraint is not None:  # they come only where the grammar may end
            ends = constraint.eos_ids
        own = (token for token in sampling.stop_token_ids if token < self.vocab_size)
        stops = tuple(dict.fromkeys((*own, *ends)))
        minimum = sampling.min_new_tokens
        if minimum > limit:
            raise ParameterError("min_new_tokens", f"{minimum} exceeds the {limit} tokens there is room for")
        if minimum and len(stops) > STOP_IDS:
            problem = f"works with at most {STOP_IDS} stop ids (the device's); this request has {len(stops)}"
            raise ParameterError("min_new_tokens", problem)
        start, scores = sampling.logprob_start_len, None
        if start >= len(tokens):
            raise ParameterError("logprob_start_len", f"must be below the prompt's {len(tokens)} tokens, got {start}")
        top = max(sampling.prompt_logprobs or 0, (sampling.logprobs or 0) * (start >= 0))
        start = start if sampling.prompt_logprobs is None else 0
        if start >= 0:
            scores = PromptLogprobs(tokens, start, top, sampling.logprob_ids)
        stream = TextStream(
            self.tokenizer,
            cast(tuple[str, ...], sampling.stop),
            skip_special_tokens=sampling.skip_special_tokens,
            keep_stop=sampling.no_stop_trim,
            late=self.late,
            kept=sampling.kept_special_tokens,
            patterns=sampling.stop_regex,
            thoughts=self._thoughts(sampling, tokens),
        )
        request = Request(
            id=id if id is not None else f"request-{number}",
            prompt=tokens,
            params=sampling,
            limit=limit,
            seed=self.seeds.randrange(GENERATED_SEEDS) if sampling.seed is None else sampling.seed,
            device_stops=stops[:STOP_IDS],
            host_stops=frozenset(stops[STOP_IDS:]),
            arrival=number,
            salt=self.salts(sampling.cache_salt),
        )
        output = Output(stream, histogram=[0] * (self.depth + 1), prompt_logprobs=scores)
        return Sequence(request, output, constraint, drafts=sampling.drafts)

    def _constraint(self, sampling: SamplingParams, prompt: List[int]) -> Constraint | None:
        """What the text must follow; compiles its grammar, if no request has had it before."""
        if sampling.grammar is None:
            return None
        try:
            return self.grammars.constraint(sampling.grammar, self._reasoning(prompt, sampling.require_reasoning))
        except GrammarError as error:
            raise ParameterError("grammar", str(error)) from error

    def _reasoning(self, prompt: List[int], required: bool = False) -> Reasoning | None:
        """The tokens around what the model thinks before it answers this prompt; None: it does not think.

        It thinks if that is `required`, or the prompt ends with the beginning of a block and white space, as a chat
        template writes it. It may think if it could, and the prompt does not end with a block's end.
        """
        if self.thinking is None:
            return None
        begun = required or begins_thinking(prompt, self.tokenizer)
        return None if begun is False else Reasoning(*self.thinking, begun=bool(begun))

    def _thoughts(self, sampling: SamplingParams, prompt: List[int]) -> Thoughts | None:
        """Splits off the thoughts, in which stops do not match. None: there are none, also because the prompt has ended
        them, and stops match everywhere."""
        if not sampling.stop_after_reasoning:
            return None
        begun = sampling.require_reasoning or begins_thinking(prompt, self.tokenizer)
        return None if begun is False else Thoughts(bool(begun))

    @functools.cached_property
    def thinking(self) -> tuple[int, int] | None:
        """The tokens `<think>` and `</think>`; None: the tokenizer has no such tokens."""
        names = getattr(self.tokenizer, "get_added_vocab", dict)()
        found = [names.get(name) for name in (THINK, END_THINK)]
        return None if None in found else cast(Any, tuple(found))

    def thoughts(self, sequence: Sequence, output: List[int]) -> int:
        """Tokens at the beginning of an output of this sequence that are thoughts, with the markers around them."""
        if self.thinking is None or not output:
            return 0
        reasoning = self._reasoning(sequence.prompt, sequence.params.require_reasoning)
        if reasoning is None or not (reasoning.begun or output[0] == reasoning.start):
            return 0
        return output.index(reasoning.end) + 1 if reasoning.end in output else len(output)

    def _limit(self, prompt: int, wanted: int | None) -> int:
        """Tokens to emit after a prompt of so many."""
        if prompt >= self.context_length:
            raise ValueError(f"the prompt has {prompt} tokens, but the context is {self.context_length}")
        room, fitting, least = self.context_length - prompt, self.pool_tokens - prompt + 1, wanted or 1
        if least > room:
            problem = (
                f"{reprlib.repr(least)} and the prompt's {prompt} tokens exceed the context of {self.context_length}"
            )
            raise ParameterError("max_new_tokens", problem)
        if least > fitting:
            raise ParameterError(
                "max_new_tokens",
                f"{least} and the prompt's {prompt} tokens do not fit the KV pool of {self.pool_tokens} tokens "
                "(--max-total-tokens)",
            )
        return min(room, fitting) if wanted is None else wanted


def with_sampling(
    prompts: Any,
    sampling: Sampling | List[Sampling | None] | None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[bool, list[tuple[Prompt, SamplingParams]]]:
    """Resolves the arguments of `Engine.generate`: whether `prompts` is a single prompt, and each prompt with its
    parameters. Raises TypeError for what is no prompt or no parameters, and ValueError for a wrong parameter or count.
    """
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        forms = "a string, a list of token ids, a list of messages, or a list of these"
        raise TypeError(f"prompts must be {forms}, got {prompts!r:.60}")
    items: Any = prompts if isinstance(prompts, str) else list(prompts)
    single = isinstance(items, str) or (bool(items) and isinstance(items[0], int | np.integer | Mapping))
    batch = cast(list[Any], [items] if single else items)

    def filled(given: Any) -> SamplingParams:
        if isinstance(given, SamplingParams):
            return given
        if given is None or isinstance(given, Mapping):
            return SamplingParams.from_mapping({**defaults, **(given or {})})
        forms = "a SamplingParams, a dict of its fields, or a list with one for each"
        raise TypeError(f"sampling must be {forms}, got {given!r:.60}")

    several = isinstance(sampling, list | tuple)
    each = [filled(given) for given in sampling] if several else [filled(sampling)] * len(batch)
    if len(each) != len(batch):
        raise ValueError(f"{len(batch)} prompts, but {len(each)} sampling parameters")
    return single, list(zip(batch, each, strict=True))
