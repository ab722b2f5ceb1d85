"""Sharing one run among processes: each claims shards of the input, until none is free.

The lines of a run are cut into shards, and each finished shard is a file of its own:

    OUTPUT/
        run.json                     settings that the answers depend on; a process with others is refused
        part-00000-of-00020.jsonl    a finished shard, put here by a rename and never changed again
        .claims/00001.lock           locked by the process that has claimed shard 1
        .claims/00001.partial        its lines so far

A claim is a lock of the kernel (flock), so it ends with the process, however that ends. The next process to claim the
shard continues after the last whole line. A line of a partial file is the line's place in the input, a space and the
result (nothing if the line has none, because it was bad): `PLACE {...}`. Places are consecutive, so a file that was cut
anywhere says where to go on, and whatever does not continue the sequence is dropped.

Between machines this needs a file system that locks between them: NFSv4, NFSv3 with lockd, Lustre mounted with `flock`
(not `localflock`), CephFS, GPFS. Object storage mounted as files has no such locks.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import jax
from filelock import AcquireReturnProxy, FileLock

from specjax.checkpoint.files import sha256, try_lock, write_text
from specjax.cli.flags import Settings
from specjax.train import corpus, differences

SHARD_LINES = 500
SCAN_SECONDS = 2.0  # between two looks at what other processes have done
TAIL = 1 << 16  # bytes; the first read of a partial file's end

Row = Mapping[str, Any]


def as_json(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False)


def whole_lines(data: bytes, start: int, stop: int) -> tuple[int, int]:
    """Bytes of a partial file that hold its whole lines, and the place after the last of them.

    Worked example: ``7 {"a": 1}``, ``8 `` and, cut off, ``9 {"a"`` with start 7 are two whole lines: (14, 9).

    Args:
        data: what is left of the file.
        start: the place of the shard's first line.
        stop: the place after its last line.
    """
    size, place = 0, start
    for line in data.split(b"\n")[:-1]:
        number, space, row = line.partition(b" ")
        whole = not row or (row.startswith(b"{") and row.endswith(b"}"))
        if place == stop or number != b"%d" % place or not space or not whole:
            break
        size, place = size + len(line) + 1, place + 1
    return size, place


def last_place(file: Path) -> int | None:
    """The place of the last whole line of a partial file, read from its end; None: it has none, or is gone."""
    try:
        with file.open("rb") as stream:
            size, length = file.stat().st_size, TAIL
            while True:
                stream.seek(max(size - length, 0))
                # The first item begins within a line, unless the whole file was read; the last one is not ended.
                lines = stream.read(min(size, length)).split(b"\n")[:-1]
                if len(lines) > 1 or (lines and length >= size):
                    return int(lines[-1].partition(b" ")[0])
                if length >= size:
                    return None
                length *= 8
    except (OSError, ValueError):
        return None


class Shard:
    """A claimed shard: lines `start` to `stop` of the input, of which those before `next` are settled.

    Written by one process at a time, the one that holds `lock`.
    """

    def __init__(self, run: ClaimedRun, index: int, lock: AcquireReturnProxy) -> None:
        self.run, self.index, self._lock = run, index, lock
        self.start, self.stop = run.bounds(index)
        self._partial = run.partial(index)
        self._file: BinaryIO = self._partial.open("a+b")
        self._file.seek(0)
        size, self.next = whole_lines(self._file.read(), self.start, self.stop)
        self._file.truncate(size)

    def write(self, row: Row | None) -> None:
        """Settle the next line; None: it has no result. The last line publishes the shard and frees the claim. Raises
        OSError, as on a full disk: what is whole stays."""
        text = f"{self.next} {'' if row is None else as_json(row)}\n"
        try:
            self._file.write(text.encode())
            self._file.flush()
            self.next += 1
            if self.next == self.stop:
                self.publish()
        except OSError as error:
            raise OSError(
                f"--claim {self.run.folder} cannot be written: {error}; all whole lines are kept, and the same command "
                "goes on when it can"
            ) from error

    def publish(self) -> None:
        """Make the partial file a finished one. May be killed anywhere: it is done again by the next claim."""
        self._file.seek(0)
        draft = self._partial.with_suffix(".whole")
        with draft.open("wb") as whole:
            for line in self._file:
                if row := line.partition(b" ")[2].strip(b"\n"):
                    whole.write(row + b"\n")
            whole.flush()
            os.fsync(whole.fileno())
        draft.replace(self.run.finished(self.index))
        self._file.close()
        self._partial.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Free the claim; the lines so far stay, for whoever claims the shard next."""
        with suppress(OSError):  # the rest of a line for which `write` has raised it
            self._file.close()
        self._lock.lock.release()


class ClaimedRun:
    """The shards of a run in a folder that other processes share.

    Args:
        folder: is made if need be.
        lines: number of lines of the whole input.
        shard_lines: lines of a shard; the last shard may have fewer.
        settings: what the answers depend on, as JSON holds it.

    Raises:
        ValueError: the folder holds a run with other settings, or other files.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, lines: int, shard_lines: int, settings: Mapping[str, Any]) -> None:
        if shard_lines < 1:
            raise ValueError(f"--shard-lines must be at least 1, got {shard_lines}")
        self.folder, self.lines, self.shard_lines = folder, lines, shard_lines
        self.shards = -(-lines // shard_lines)
        self._claims = folder / ".claims"
        self._waiting: deque[Shard] = deque()  # of each line that was read and is not settled
        self._open: set[Shard] = set()  # claimed, with lines to settle
        self._next: Shard | None = None  # claimed, with lines to read
        self._finished: set[int] = set()
        self._first = 0  # all shards before it are finished
        self._scan_time, self._scanned, self._written = -SCAN_SECONDS, 0, 0  # `_written`: since that scan, here
        self._begin({**settings, "shard_lines": shard_lines})

    def _begin(self, settings: Mapping[str, Any]) -> None:
        note, advice = self.folder / "run.json", "give the same settings, or --claim another folder"
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"--claim {self.folder} is a file, and must be a folder, which is made if need be")
        self.folder.mkdir(parents=True, exist_ok=True)
        # Listed first: what another process of the run makes between these looks, it makes after `.claims`.
        filled = any(self.folder.iterdir())
        if filled and not note.exists() and not self._claims.exists():
            raise ValueError(
                f"--claim {self.folder} holds other files; name an empty folder, or one that does not exist"
            )
        self._claims.mkdir(exist_ok=True)
        with FileLock(self._claims / "run.lock"):
            if not note.exists():
                write_text(note, json.dumps(settings, indent=1) + "\n")
            try:
                known = json.loads(note.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ValueError(f"--claim {self.folder}: run.json is not JSON ({error}); {advice}") from None
        if changed := differences(known, json.loads(json.dumps(settings))):
            raise ValueError(f"--claim {self.folder} was begun with other settings: {changed}; {advice}")

    def bounds(self, index: int) -> tuple[int, int]:
        """Places of a shard's first line, and of that after its last."""
        return index * self.shard_lines, min((index + 1) * self.shard_lines, self.lines)

    def finished(self, index: int) -> Path:
        return self.folder / f"part-{index:05d}-of-{self.shards:05d}.jsonl"

    def partial(self, index: int) -> Path:
        return self._claims / f"{index:05d}.partial"

    def is_finished(self, index: int) -> bool:
        if index not in self._finished and self.finished(index).exists():
            self._finished.add(index)
        return index in self._finished

    def claim(self) -> Shard | None:
        """The first shard that is neither finished nor claimed, with a line left to do; None: there is none."""
        while self._first < self.shards and self.is_finished(self._first):
            self._first += 1
        for index in range(self._first, self.shards):
            if self.is_finished(index) or (lock := try_lock(self._claims / f"{index:05d}.lock")) is None:
                continue
            if self.is_finished(index):  # between the look and the lock
                lock.lock.release()
                continue
            shard = Shard(self, index, lock)
            if shard.next < shard.stop:
                self._open.add(shard)
                return shard
            shard.publish()  # its process was killed before it could
        return None

    def begin(self) -> bool:
        """Claim the first shard; False: none is free, or all are finished."""
        self._next = self.claim()
        return self._next is not None

    def places(self) -> Iterator[int]:
        """Places of the lines to do, after `begin`; the next shard is claimed when the one before has been read. Each
        line is to be settled by `write`, in this order."""
        while (shard := self._next or self.claim()) is not None:
            self._next = None
            for place in range(shard.next, shard.stop):
                self._waiting.append(shard)
                yield place

    def write(self, row: Row | None) -> None:
        """Settle the first line that `places` gave and that is not settled; None: it has no result."""
        shard = self._waiting.popleft()
        shard.write(row)
        self._written += 1
        if shard.next == shard.stop:
            self._open.remove(shard)

    def release(self) -> None:
        """Free the claims of this process, which lives on after an error; their lines so far stay."""
        for shard in self._open:
            shard.release()
        self._open.clear()
        self._waiting.clear()
        self._next = None

    def __enter__(self) -> ClaimedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def summary(self) -> dict[str, int]:
        """Of all processes: the shards of the run, and how many are finished."""
        return {"shards": self.shards, "finished_shards": sum(map(self.is_finished, range(self.shards)))}

    def settled(self) -> int:
        """Lines of the whole run that are settled: here, and by other processes up to `SCAN_SECONDS` ago."""
        if (now := time.monotonic()) - self._scan_time >= SCAN_SECONDS:
            self._scan_time, self._written = now, 0
            self._scanned = sum(map(self._settled_of, range(self.shards)))
        return self._scanned + self._written

    def _settled_of(self, index: int) -> int:
        start, stop = self.bounds(index)
        if self.is_finished(index):
            return stop - start
        place = last_place(self.partial(index))
        return 0 if place is None else min(max(place + 1 - start, 0), stop - start)


def answers_depend_on(chosen: Settings, given: str) -> dict[str, Any]:
    """What the answers of a run depend on, of the model and the input. Batch and algorithm may change: they change no
    text. JAX must have its device (`specjax.cli.build.claim_gpu`). `given`: --input."""
    model, defaults = chosen.model, Settings()
    places = {
        "quantization": "model", "context_length": "engine", "plain_content": "engine",
        "speculative_accept_threshold_single": "speculative", "speculative_accept_threshold_acc": "speculative",
    }  # fmt: skip
    changed = {
        name: value
        for name, table in places.items()
        if (value := getattr(getattr(chosen, table), name)) != getattr(getattr(defaults, table), name)
    }
    return {
        **{name: getattr(model, name) for name in ("model", "revision", "tokenizer_path", "chat_template")},
        "dtype": f"auto on {jax.default_backend()}" if model.dtype == "auto" else model.dtype,
        "content of the input": " ".join(sha256(Path(file)) for file in corpus.shards([given])),
        **changed,
    }


def add_flags(parser: argparse.ArgumentParser | argparse._ArgumentGroup, folder: Any) -> None:
    """--claim in `folder`, a group of flags that exclude each other, and --shard-lines in `parser`."""
    folder.add_argument(
        "--claim", metavar="DIR",
        help="share the run: every process started with this DIR takes shards that no other has; a finished shard is a "
        "file DIR/part-I-of-N.jsonl; may be killed at any time, and the same command goes on",
    )  # fmt: skip
    parser.add_argument(
        "--shard-lines", type=int, default=SHARD_LINES, metavar="N",
        help="input lines of a shard of --claim",
    )  # fmt: skip
