"""The vocabularies of a target and of a model that drafts for it, compared token by token.

What counts is the tokenizers' content, token to id. Rows of an embedding beyond it are padding, whose number differs
even within a family (Qwen2.5: 151936 rows, 152064 from 7B on), and are never proposed. Knows nothing of drafting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from specjax.checkpoint.files import CheckpointError

NO_ID = -1
SHOWN = 3  # differing ids that a message names

_PADDING = re.compile(r"\[PAD(\d+)\]")  # what GGUF files call a row of padding, with its id


class VocabularyMismatch(CheckpointError):
    """Two tokenizers differ that should be the same."""


class VocabularyMap(NamedTuple):
    """Attributes:
    ids: int32 [W], the target's id of each row of the draft's output layer, NO_ID where the target has no such token;
        None: all rows are tokens, and have the target's ids.
    reads: int32 [V], the draft's token that stands for each of the target's; None: the same ids.
    common: tokens that both have.
    """

    ids: np.ndarray | None
    reads: np.ndarray | None
    common: int


def match_vocabularies(
    target: Any, draft: Any, target_size: int, draft_size: int, *, intersection: bool = False
) -> VocabularyMap:
    """How the ids of two tokenizers (fast ones of transformers) belong together.

    Args:
      target_size, draft_size: rows of the models' output layers, padding included.
      intersection: tokenizers may differ. A token that only the target has is read as the last of the draft's own
        tokens for it, on which the next token depends most.

    Raises:
      VocabularyMismatch: without `intersection`, the tokenizers differ: names the first ids and both tokens.
      CheckpointError: with it, no token is known to be in both.
    """
    ours, theirs = _tokens(target), _tokens(draft)
    if ours == theirs:
        real = np.array(sorted(i for i in ours.values() if i < min(target_size, draft_size)), np.int32)
        if len(real) == draft_size:
            return VocabularyMap(None, None, draft_size)
        ids = np.full(draft_size, NO_ID, np.int32)
        ids[real] = real
        return VocabularyMap(ids, None, len(real))
    if not intersection:
        raise VocabularyMismatch(_differences(ours, theirs))
    kinds = _kind(draft), _kind(target)
    if kinds[0] is None or kinds[0] != kinds[1]:
        names = [kind or "of an unknown kind" for kind in kinds]
        raise CheckpointError(
            f"its tokenizer is {names[0]}, the target's {names[1]}; only tokens of one known kind (byte-level, "
            "SentencePiece or WordPiece) can be compared"
        )
    ids, reads = np.full(draft_size, NO_ID, np.int32), np.full(target_size, draft.unk_token_id or 0, np.int32)
    for token, i in theirs.items():
        if i < draft_size and ours.get(token, target_size) < target_size:
            ids[i] = ours[token]
    for token, i in ours.items():
        if i < target_size:
            found = [theirs[token]] if token in theirs else _pieces(draft, token)
            reads[i] = next((piece for piece in reversed(found) if piece < draft_size), reads[i])
    added = {*draft.get_added_vocab(), *target.get_added_vocab()}
    if not (ours.keys() & theirs.keys()) - added:
        raise CheckpointError("its tokenizer has no token of the target's, special ones aside")
    return VocabularyMap(ids, reads, int(np.sum(ids >= 0)))


def _tokens(tokenizer: Any) -> dict[str, int]:
    """Token to id, added ones included, padding left out."""

    def is_padding(token: str, i: int) -> bool:
        found = _PADDING.fullmatch(token)
        return found is not None and int(found[1]) == i

    return {token: i for token, i in tokenizer.get_vocab().items() if not is_padding(token, i)}


def _differences(ours: Mapping[str, int], theirs: Mapping[str, int]) -> str:
    names = [{i: token for token, i in each.items()} for each in (ours, theirs)]
    ids = sorted({i for _, i in ours.items() ^ theirs.items()})

    def shown(i: int) -> str:
        mine, other = (repr(each[i]) if i in each else "no token" for each in names)
        return f"id {i} is {mine} in the target's and {other} in the draft's"

    more = f" ({len(ids)} ids differ)" if len(ids) > SHOWN else ""
    return f"its tokenizer is not the target's: {', '.join(map(shown, ids[:SHOWN]))}{more}"


def _kind(tokenizer: Any) -> str | None:
    """How the tokens of a tokenizer are spelled, which its decoder tells."""
    decoder = tokenizer.backend_tokenizer.decoder
    steps = [] if decoder is None else list(_steps(json.loads(decoder.__getstate__())))
    types = {step.get("type") for step in steps}
    if "ByteLevel" in types:
        return "byte-level"
    if "Metaspace" in types or any("▁" in str(step.get("pattern")) for step in steps):
        return "SentencePiece"
    return "WordPiece" if "WordPiece" in types else None


def _steps(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for step in decoder.get("decoders", [decoder]):
        yield from _steps(step) if "decoders" in step else (step,)


def _pieces(tokenizer: Any, token: str) -> list[int]:
    """The tokens that a tokenizer makes of the spelling of another one's."""
    try:
        return [piece.id for piece in tokenizer.backend_tokenizer.model.tokenize(token)]
    except Exception:  # the library raises bare ones, such as for a missing unknown token
        return []
