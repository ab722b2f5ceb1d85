"""Lines and rows of text files and JSONL, plain or gzipped. Knows no tokenizer.

Readers report each line that they cannot use and continue with the next one.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from specjax.progress import progress_bar

FORMATS = {".txt": "text", ".jsonl": "jsonl"}
SHOWN_LINES = 5
BATCH = 1 << 20  # bytes of lines that are processed together: tokenising many texts in one call uses all cores


class Source(NamedTuple):
    path: str  # as given; - is stdin
    format: str  # text or jsonl


class SkippedLine(NamedTuple):
    path: str  # or stdin
    number: int  # from 1
    reason: str  # one short line


class Line(NamedTuple):
    path: str  # or stdin
    number: int  # from 1, in its file
    place: int  # from 0, among the lines that are not blank
    data: bytes
    position: int  # bytes of the file, as stored, read so far
    problem: str = ""  # why the rest of the file cannot be read

    def text(self) -> str:
        """The decoded line, without a byte order mark. Raises ValueError: the file ended early, or is not UTF-8."""
        if self.problem:
            raise ValueError(self.problem)
        return self.data.decode("utf-8-sig")

    def row(self) -> dict[str, Any]:
        """The JSON object of the line. Raises ValueError or RecursionError: there is none."""
        row = read_json("the line", self.text())
        if not isinstance(row, dict):
            raise ValueError(f"a line must be a JSON object, got {row!r:.60}")
        return row

    def skipped(self, error: Exception) -> SkippedLine:
        """This line in the report, with a reason that can be printed whatever the input or a template put into it."""
        reason = " ".join(str(error).split())
        return SkippedLine(self.path, self.number, f"{reason:.400}".encode(errors="backslashreplace").decode())


def read(source: Source) -> Iterator[Line]:
    """The lines of a source, in JSONL without the blank ones; the last has a `problem` if the file breaks off there."""
    is_stdin = source.path == "-"
    name = "stdin" if is_stdin else source.path
    with nullcontext(sys.stdin.buffer) if is_stdin else Path(source.path).open("rb") as raw:
        # Detected by content: names of compressed files vary, and stdin has none.
        packed = raw.peek(2)[:2] == b"\x1f\x8b"  # pyright: ignore[reportAttributeAccessIssue]
        stream: Iterable[bytes] = gzip.GzipFile(fileobj=raw) if packed else raw
        number = place = position = 0
        try:
            for number, data in enumerate(stream, start=1):
                position = position + len(data) if is_stdin else raw.tell()
                if source.format == "text" or data.strip():
                    yield Line(name, number, place, data, position)
                    place += 1
        except (OSError, EOFError, zlib.error) as error:
            yield Line(name, number + 1, place, b"", position, f"the file cannot be read on from here: {error}")


def read_batches(sources: Sequence[Source], *, label: str, progress: bool) -> Iterator[tuple[Source, list[Line]]]:
    """Consecutive lines of each source, about BATCH bytes at a time, with a progress bar over all sources."""
    piped = any(path == "-" for path, _ in sources)  # a pipe has no length
    total = None if piped else sum(Path(path).stat().st_size for path, _ in sources)
    with progress_bar(label, total, "B", shown=progress) as bar:
        for source in sources:
            before, held = bar.n, 0
            batch: list[Line] = []
            for line in read(source):
                batch.append(line)
                held += len(line.data)
                bar.update(before + line.position - bar.n)
                if held >= BATCH:
                    yield source, batch
                    batch, held = [], 0
            yield source, batch


def report(skipped: Sequence[SkippedLine]) -> None:
    """Print the first skipped lines, and the number of the others, to stderr."""
    for path, number, reason in skipped[:SHOWN_LINES]:
        print(f"{path}, line {number}: {reason}", file=sys.stderr)
    if len(skipped) > SHOWN_LINES:
        print(f"and {len(skipped) - SHOWN_LINES} more bad lines", file=sys.stderr)


def shards(given: Sequence[str], form: str = "jsonl") -> list[str]:
    """The files of the inputs: of a folder those of a format, or with `auto` of all, plain or gzipped, by name.

    Subfolders and hidden files are left out. Raises ValueError: a folder has no such file.
    """
    suffixes = [suffix for suffix, known in FORMATS.items() if form in (known, "auto")]
    found: list[str] = []
    for path in given:
        if path == "-" or not Path(path).is_dir():
            found.append(path)
            continue
        inside = (file for file in Path(path).iterdir() if file.is_file() and not file.name.startswith("."))
        files = sorted(str(file) for file in inside if Path(file.name.removesuffix(".gz")).suffix in suffixes)
        if not files:
            raise ValueError(f"the folder {path} holds no file that ends in {' or '.join(suffixes)}, or with .gz")
        found += files
    return found


def parse_sources(given: Sequence[str], form: str) -> list[Source]:
    """The inputs with their formats, folders by their `shards`; `form` is text, jsonl or auto (by suffix). Raises
    ValueError or OSError."""
    found, given = [], shards(given, form)
    for path in given:
        suffix = Path(path.removesuffix(".gz")).suffix
        known = FORMATS.get(suffix) if form == "auto" else form
        if known is None:
            raise ValueError(f"--input {path}: only .txt and .jsonl (or .gz of them) say what they are; give --format")
        if path != "-":
            Path(path).open("rb").close()  # fails before the work starts
        found.append(Source(path, known))
        if given.count(path) > 1:
            raise ValueError(f"--input {path} is given twice")
    return found


def check_writable(file: Path) -> None:
    """Raises ValueError: `--output FILE` cannot be written."""
    folder = file.resolve().parent
    if file.exists() and not file.is_file():
        raise ValueError(f"--output {file} cannot be written: it is not a file")
    if not os.access(folder, os.W_OK) or (file.exists() and not os.access(file, os.W_OK)):
        raise ValueError(f"--output {file} cannot be written: {folder} is not a folder that may be written to")


def missing_fields(row: Mapping[str, Any], wanted: Iterable[str]) -> ValueError:
    return ValueError(f"the line has none of the fields {', '.join(wanted)}; it has {', '.join(row) or 'none':.80}")


def read_text(name: str, value: Any, *, empty: bool = False) -> str:
    """Raises ValueError: not a text that can be tokenised."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, got {value!r:.60}")
    if not value and not empty:
        raise ValueError(f"{name} is empty")
    check_encodes(name, value)
    return value


def check_encodes(name: str, value: Any) -> None:
    """Raises ValueError: half a surrogate is in the JSON value. It can be neither tokenised nor written."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds {text[error.start]!r}: surrogates must come in pairs") from None


def read_json(where: str, text: str, verb: str = "is") -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} {verb} not JSON: {error.msg} at character {error.pos + 1}") from None


def check_ids(name: str, ids: Sequence[int], vocabulary: int) -> None:
    """Raises ValueError: an id is outside of 0 to vocabulary - 1."""
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < vocabulary:
            raise ValueError(f"{name} holds the id {token!r:.20}; ids of this model are 0 to {vocabulary - 1}")
