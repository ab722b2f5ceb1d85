"""Log-probabilities of tokens in the three forms that clients know."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any

from specjax.engine.decoders import byte_of_letter
from specjax.engine.request import TokenLogprob

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has no word for; vLLM's number."""


class TokenNames:
    """A token's text and bytes, for answers that speak of single tokens."""

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
    """`offset`: characters of the choice's text before these tokens. The token that was drawn is always in the top."""
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
    """SGLang's: (log-probability, id, text or null). Texts are those of single tokens; None: without."""

    def entry(token: int, logprob: float) -> list[Any]:
        return [_finite(logprob), token, None if names is None else names.text(token)]

    found = list(found)
    return {
        "output_token_logprobs": [entry(one.token, one.logprob) for one in found],
        "output_top_logprobs": [[entry(token, logprob) for token, logprob in one.top] for one in found],
    }


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
