"""Token counts of a corpus: which parts of a row count, how often, and the counts by id."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from specjax.train.corpus import (
    FIELD_NAMES,
    ROW_FIELDS,
    SkippedLine,
    Source,
    check_ids,
    missing_fields,
    present_fields,
    read_batches,
    read_text,
)

MAX_WEIGHT = 10**6

BLOCK = 1 << 14
"""Characters tokenised as one text: a file of one line must not become one encoding in memory."""

Counts = Int64[np.ndarray, "V"]


class Tally(NamedTuple):
    counts: Counts  # by weight
    tokens: int  # without weights
    lines: int  # skipped ones included
    skipped: list[SkippedLine]


def count(
    sources: Sequence[Source], weights: Mapping[str, int], tokenizer: Any, vocabulary: int, *, progress: bool
) -> Tally:
    """Count the ids of all sources.

    Args:
        weights: fields of JSONL rows and how often each counts; empty: the first of ROW_FIELDS, once.
        tokenizer: a fast one of transformers.
        vocabulary: ids are 0 to vocabulary - 1.
    """
    core = tokenizer.backend_tokenizer
    # A tokenizer.json may hold the lengths that its model was trained with.
    core.no_truncation()
    core.no_padding()
    counts: Counts = np.zeros(vocabulary, np.int64)
    tokens = lines = 0
    skipped: list[SkippedLine] = []
    for source, batch in read_batches(sources, label="Counting", progress=progress):
        lines += len(batch)
        parts: dict[int, list[str | list[int]]] = {}  # by weight
        for line in batch:
            try:
                is_text = source.format == "text"
                found = [(1, line.text())] if is_text else weighted_parts(line.row(), weights, vocabulary)
            except (ValueError, RecursionError) as error:
                skipped.append(line.skipped(error))
                continue
            for weight, part in found:
                parts.setdefault(weight, []).append(part)
        for weight, mine in parts.items():
            texts = [part for part in mine if isinstance(part, str)]
            if source.format == "text":
                texts = ["".join(texts)]  # running text: tokens may cross line ends
            ids = [part for part in mine if isinstance(part, list)]
            cut = [piece for text in texts for piece in pieces(text)]
            ids += [encoding.ids for encoding in core.encode_batch_fast(cut, add_special_tokens=False)]
            flat = np.fromiter(chain.from_iterable(ids), np.int64)
            counts += weight * np.bincount(flat, minlength=vocabulary)
            tokens += len(flat)
    return Tally(counts, tokens, lines, skipped)


def pieces(text: str) -> Iterator[str]:
    """The text in parts of at most BLOCK characters, cut before spaces where it has any."""
    start = 0
    while len(text) - start > BLOCK:
        cut = text.rfind(" ", start + 1, start + BLOCK)
        cut = start + BLOCK if cut < 0 else cut
        yield text[start:cut]
        start = cut
    yield text[start:]


def weighted_parts(row: dict[str, Any], weights: Mapping[str, int], vocabulary: int) -> list[tuple[int, Any]]:
    """What counts in a row of JSONL: (weight, a text or ids).

    Raises:
        ValueError: the row has none of the fields, or one that is neither text nor ids nor messages.
    """
    if weights:
        used = [name for name in weights if row.get(name) is not None]
    else:  # a row without a whole group counts by the first field that it has
        there = (name for name in chain.from_iterable(ROW_FIELDS) if row.get(name) is not None)
        used = list(present_fields(row) or [*there][:1])
    if not used:
        raise missing_fields(row, weights or FIELD_NAMES)
    return [(weights.get(name, 1), part) for name in used for part in _parts(name, row[name], vocabulary)]


def _parts(name: str, value: Any, vocabulary: int) -> list[Any]:
    if isinstance(value, str):
        return [read_text(name, value, empty=True)]
    kinds = {type(item) for item in value} if isinstance(value, list) else {None}
    if kinds == {int}:
        check_ids(name, value, vocabulary)
        return [value]
    if kinds <= {str}:
        return [read_text(name, text, empty=True) for text in value]
    if kinds == {dict} and all("content" in message for message in value):
        return [text for message in value for text in _message_texts(name, message["content"])]
    raise ValueError(f"{name} must be a text, a list of ids, of texts or of messages, got {value!r:.60}")


def _message_texts(name: str, content: Any) -> list[str]:
    """A message's content is a text, a list of parts (only text counts), or null (a tool call)."""
    if content is None or isinstance(content, str):
        return [read_text(name, content)] if content else []
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        texts = [part["text"] for part in content if isinstance(part.get("text"), str)]
        return [read_text(name, text, empty=True) for text in texts]
    raise ValueError(f"{name} holds a message whose content is {content!r:.60}")


def parse_weights(given: Iterable[str]) -> dict[str, int]:
    """NAME or NAME=WEIGHT of `--field` to weights by name.

    Raises:
        ValueError: a wrong form, or a name that is given twice.
    """
    found: dict[str, int] = {}
    for text in given:
        match = re.fullmatch(r"([^=]+)(?:=([0-9]{1,7}))?", text)
        weight = int(match[2] or 1) if match else 0
        if not match or not 1 <= weight <= MAX_WEIGHT:
            raise ValueError(f"--field must be NAME or NAME=WEIGHT, weight from 1 to {MAX_WEIGHT}, got {text!r}")
        if match[1] in found:
            raise ValueError(f"--field {match[1]} is given twice")
        found[match[1]] = weight
    return found
