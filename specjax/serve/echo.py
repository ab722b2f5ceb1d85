"""The prompt as a part of a completion's text (`echo`), and which part of it each of its tokens stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specjax.checkpoint.prompts import Prompt
from specjax.engine.text import TextStream


@dataclass(frozen=True)
class Echo:
    text: str
    pieces: tuple[str, ...] = ()  # of the prompt's tokens, if asked for; joined they are the text


def echo_of(prompt: Prompt, tokens: Sequence[int], tokenizer: Any, *, with_pieces: bool) -> Echo:
    """The echo of a prompt that is a text or token ids.

    A character of several tokens belongs to the last of them; special tokens that the tokenizer has added to a text
    have none. Where the decoded tokens are not the text, as where it was normalised, the tokenizer says which
    characters a token was made of.
    """
    given = prompt if isinstance(prompt, str) else None
    text = tokenizer.decode(list(tokens)) if given is None else given
    if not with_pieces:
        return Echo(text)
    for skip in (False, True):
        pieces = _decoded(tokens, tokenizer, skip)
        if "".join(pieces) == text:
            return Echo(text, pieces)
    if given is not None and (ends := _ends(given, tokens, tokenizer)) is not None:
        return Echo(text, tuple(given[start:end] for start, end in zip([0, *ends], ends, strict=False)))
    pieces = _decoded(tokens, tokenizer, given is not None)
    return Echo("".join(pieces), pieces)


def _decoded(tokens: Sequence[int], tokenizer: Any, skip: bool) -> tuple[str, ...]:
    stream = TextStream(tokenizer, (), skip_special_tokens=skip, keep_stop=False)
    stream.extend(tokens)
    stream.finish()
    return tuple(stream.piece(index) for index in range(len(tokens)))


def _ends(text: str, tokens: Sequence[int], tokenizer: Any) -> list[int] | None:
    """Where each token's part of the text ends, the last one's at its end. None: the tokenizer does not say."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    found = tokenizer(text, return_offsets_mapping=True)
    if list(found["input_ids"]) != list(tokens):
        return None
    ends, last = [], 0
    for _, end in found["offset_mapping"]:
        last = max(last, end)
        ends.append(last)
    return [*ends[:-1], len(text)]
