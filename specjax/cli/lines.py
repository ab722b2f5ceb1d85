"""Lines of JSONL files, plain or gzipped, of folders of such files, or of stdin.

Readers report each line that they cannot use and continue with the next one.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from specjax.progress import progress_bar

SHOWN_LINES = 5  # skipped lines that are printed
BATCH_BYTES = 1 << 20  # lines that are processed together: tokenising many texts in one call uses all cores


class SkippedLine(NamedTuple):
    path: str  # or stdin
    number: int  # from 1
    reason: str  # one short line


class Line(NamedTuple):
    path: str  # or stdin
    number: int  # from 1, in its file
    place: int  # from 0, without blank lines
    data: bytes
    position: int  # bytes of the file, as stored, read so far
    problem: str = ""  # why the rest of the file cannot be read

    def row(self) -> dict[str, Any]:
        """Parses the line; see `parse_object`. Raises ValueError also if the file broke off."""
        if self.problem:
            raise ValueError(self.problem)
        return parse_object(self.data)

    def skipped(self, error: Exception) -> SkippedLine:
        """Returns the line's entry in the report, with a printable reason."""
        reason = " ".join(str(error).split())
        return SkippedLine(self.path, self.number, f"{reason:.400}".encode(errors="backslashreplace").decode())


def parse_object(line: str | bytes) -> dict[str, Any]:
    """Parses a line of JSONL. Raises ValueError or RecursionError unless it is a JSON object of encodable strings."""
    text = line.decode("utf-8-sig") if isinstance(line, bytes) else line
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the line is not JSON: {error.msg} at character {error.pos + 1}") from None
    if not isinstance(row, dict):
        raise ValueError(f"a line must be a JSON object, got {row!r:.60}")
    if "\\ud" in text.lower():  # valid UTF-8 has surrogates only as escapes
        for name, value in row.items():
            check_encodes(repr(name)[1:-1], {name: value})
    return row


def line_files(paths: Sequence[str], flag: str = "--input") -> list[str]:
    """Lists input files in order. Folders give their .jsonl and .jsonl.gz files by name, without hidden files. Raises
    ValueError for a folder without such files and for a file that occurs twice, OSError for an unreadable file."""
    files: list[str] = []
    for path in paths:
        if path != "-" and Path(path).is_dir():
            inside = (file for file in Path(path).iterdir() if file.is_file() and not file.name.startswith("."))
            names = sorted(str(file) for file in inside if file.name.endswith((".jsonl", ".jsonl.gz")))
            if not names:
                raise ValueError(f"the folder {path} has no file that ends in .jsonl or .jsonl.gz")
            files += names
        else:
            files.append(path)
    for file in files:
        if files.count(file) > 1:
            raise ValueError(f"{flag} {file} is given twice")
        if file != "-":
            Path(file).open("rb").close()  # fails before the work starts
    return files


def read_lines(path: str) -> Iterator[Line]:
    """Yields lines that are not blank. If the file breaks off, the last line has a `problem`."""
    is_stdin = path == "-"
    name = "stdin" if is_stdin else path
    with nullcontext(sys.stdin.buffer) if is_stdin else Path(path).open("rb") as raw:
        # Detected by content: names of compressed files vary, and stdin has no name.
        packed = raw.peek(2)[:2] == b"\x1f\x8b"  # pyright: ignore[reportAttributeAccessIssue]
        stream: Iterable[bytes] = gzip.GzipFile(fileobj=raw) if packed else raw
        number = place = position = 0
        try:
            for number, data in enumerate(stream, start=1):
                position = position + len(data) if is_stdin else raw.tell()
                if data.strip():
                    yield Line(name, number, place, data, position)
                    place += 1
        except (OSError, EOFError, zlib.error) as error:
            yield Line(name, number + 1, place, b"", position, f"the file cannot be read on from here: {error}")


def read_batches(paths: Sequence[str], *, label: str, progress: bool) -> Iterator[list[Line]]:
    """Yields batches of consecutive lines of one file, about BATCH_BYTES each, with a progress bar over all files."""
    total = None if "-" in paths else sum(Path(path).stat().st_size for path in paths)
    with progress_bar(label, total, "B", shown=progress) as bar:
        for path in paths:
            before, size = bar.n, 0
            batch: list[Line] = []
            for line in read_lines(path):
                batch.append(line)
                size += len(line.data)
                bar.update(before + line.position - bar.n)
                if size >= BATCH_BYTES:
                    yield batch
                    batch, size = [], 0
            yield batch


def report(skipped: Sequence[SkippedLine]) -> None:
    """Prints the first skipped lines and the number of further ones to stderr."""
    for path, number, reason in skipped[:SHOWN_LINES]:
        print(f"{path}, line {number}: {reason}", file=sys.stderr)
    if len(skipped) > SHOWN_LINES:
        print(f"and {len(skipped) - SHOWN_LINES} more bad lines", file=sys.stderr)


def check_encodes(name: str, value: Any) -> None:
    """Raises ValueError if a JSON value holds an unpaired surrogate, which cannot be tokenised or written."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds {text[error.start]!r}: surrogates must come in pairs") from None


def check_writable(file: Path, inputs: Sequence[str] = (), *, in_place: bool = False) -> None:
    """Raises ValueError if `--output FILE` is a file of `inputs`, or cannot be written. `in_place`: an existing file or
    device is opened and not replaced."""
    if file.exists() and any(file.samefile(path) for path in line_files(inputs) if path != "-"):
        raise ValueError(f"--output {file} is also an input")
    if in_place and file.exists() and not file.is_dir() and os.access(file, os.W_OK):
        return
    folder = file.resolve().parent
    if file.exists() and not file.is_file():
        raise ValueError(f"--output {file} cannot be written: it is not a file")
    if not os.access(folder, os.W_OK) or (file.exists() and not os.access(file, os.W_OK)):
        raise ValueError(f"--output {file} cannot be written: {folder} is not a writable folder")
