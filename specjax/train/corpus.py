"""Text and ids out of text files and JSONL, plain or gzipped, for whatever counts or trains on them.

Says of every line that cannot be used why, and goes on with the next. Knows no tokenizer.
"""

from __future__ import annotations

import gzip
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

FIELD_GROUPS = (
    ("text",),
    ("messages",),
    ("prompt", "response"),
    ("prompt_ids", "response_ids"),
    ("input_ids", "output_ids"),
)
FORMATS = {".txt": "text", ".jsonl": "jsonl"}
MOST_WEIGHT = 10**6

BLOCK = 1 << 14
"""Characters that are tokenised as one text: a file of one line must not become one encoding in memory."""


class Source(NamedTuple):
    path: str  # as it was given; - is stdin
    format: str  # text or jsonl

    @property
    def size(self) -> int:
        return 0 if self.path == "-" else Path(self.path).stat().st_size


class Line(NamedTuple):
    number: int  # 1-based, in its file
    data: bytes | None  # None: there are no more
    reason: str  # why not
    position: int  # bytes of the file, as it lies on disk, that are read


def read(source: Source) -> Iterator[Line]:
    """The lines of a source. One that breaks off, as half a gzip file does, says so with its last line."""
    is_stdin = source.path == "-"
    with _bytes(source.path) as raw:
        # By content: names of compressed files vary, and stdin has none.
        packed = raw.peek(2)[:2] == b"\x1f\x8b"
        stream: Iterable[bytes] = gzip.GzipFile(fileobj=raw) if packed else raw
        number = position = 0
        try:
            for number, data in enumerate(stream, start=1):
                position = position + len(data) if is_stdin else raw.tell()
                yield Line(number, data, "", position)
        except (OSError, EOFError, zlib.error) as error:
            yield Line(number + 1, None, f"the file cannot be read on from here: {error}", position)


@contextmanager
def _bytes(path: str) -> Iterator[Any]:
    if path == "-":
        yield sys.stdin.buffer
    else:
        with Path(path).open("rb") as file:
            yield file


def pieces(text: str) -> Iterator[str]:
    """The text in parts of at most BLOCK characters, cut before spaces where it has any."""
    start = 0
    while len(text) - start > BLOCK:
        cut = text.rfind(" ", start + 1, start + BLOCK)
        cut = start + BLOCK if cut < 0 else cut
        yield text[start:cut]
        start = cut
    yield text[start:]


def contents(row: Any, fields: Mapping[str, int], vocabulary: int) -> list[tuple[int, str | list[int]]]:
    """What to count in a row of JSONL: (weight, a text or ids).

    Raises:
      ValueError: the row has none of the fields, or one that is neither text nor ids nor messages.
    """
    if not isinstance(row, dict):
        raise ValueError(f"a line must be a JSON object, got {row!r:.60}")
    there = {name for name, value in row.items() if value is not None}
    chosen = next((group for group in FIELD_GROUPS if there.intersection(group)), ())
    weights = fields or dict.fromkeys(chosen, 1)
    used = [name for name in weights if name in there]
    if not used:
        wanted = fields or list(chain.from_iterable(FIELD_GROUPS))
        raise ValueError(f"the line has none of the fields {', '.join(wanted)}; it has {', '.join(row) or 'none'}")
    return [(weights[name], part) for name in used for part in _parts(name, row[name], vocabulary)]


def _parts(name: str, value: Any, vocabulary: int) -> list[str | list[int]]:
    if isinstance(value, str):
        return [_encodable(value)]
    if isinstance(value, list):
        kinds = {type(item) for item in value}
        if kinds == {int}:
            if wrong := [token for token in value if not 0 <= token < vocabulary]:
                raise ValueError(f"{name} holds the id {wrong[0]!r:.20}, the tokenizer has 0 to {vocabulary - 1}")
            return [value]
        if kinds <= {str}:
            return [_encodable(text) for text in value]
        if kinds == {dict} and all("content" in message for message in value):
            return [text for message in value for text in _message_texts(name, message["content"])]
    raise ValueError(f"{name} must be a text, a list of ids, of texts or of messages, got {value!r:.60}")


def _message_texts(name: str, content: Any) -> list[str | list[int]]:
    """A message's content is a text, parts of which only those of text count, or null (a tool call)."""
    if content is None or isinstance(content, str):
        return [_encodable(content)] if content else []
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return [_encodable(part["text"]) for part in content if isinstance(part.get("text"), str)]
    raise ValueError(f"{name} holds a message whose content is {content!r:.60}")


def _encodable(text: str) -> str:
    text.encode()  # JSON can hold half a surrogate, which cannot be tokenised
    return text


def parse_fields(given: Iterable[str]) -> dict[str, int]:
    """NAME or NAME=WEIGHT to weights by name."""
    found: dict[str, int] = {}
    for text in given:
        name, _, weight = text.partition("=")
        if not name or not re.fullmatch(r"|=[0-9]{1,7}", text[len(name) :]) or not 1 <= int(weight or 1) <= MOST_WEIGHT:
            raise ValueError(f"--field must be NAME or NAME=WEIGHT, weight from 1 to {MOST_WEIGHT}, got {text!r}")
        if name in found:
            raise ValueError(f"--field {name} is given twice")
        found[name] = int(weight or 1)
    return found


def parse_sources(given: list[str], form: str) -> list[Source]:
    """The inputs, each there and of a known format."""
    found = []
    for path in given:
        suffixes = [suffix for suffix in Path(path).suffixes if suffix != ".gz"]
        known = FORMATS.get(suffixes[-1] if suffixes else "") if form == "auto" else form
        if known is None:
            raise ValueError(f"--input {path}: only .txt and .jsonl (or .gz of them) say what they are; give --format")
        if path != "-":
            with Path(path).open("rb"):  # fails now for what would fail later
                pass
        if path in [source.path for source in found]:
            raise ValueError(f"--input {path} is given twice")
        found.append(Source(path, known))
    return found
