"""Writing files: each is replaced as a whole or left as it was, and locks keep processes apart.

A process may be killed at any time, so a file or folder is filled under another name and then renamed. A file can also
be cut short later (a full disk, a copy that stopped), so a folder in the cache counts only while its files have the
sizes that were noted when it was built.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout

from specjax.limits import ParameterError

logger = logging.getLogger(__name__)

MARKER = ".specjax-complete.json"


class CheckpointError(ValueError):
    """A model that cannot be found, read or understood. The message names the value that was met, what would work, and
    where the value was set."""


class CheckpointOptionError(ParameterError, CheckpointError):
    """An option does not suit the checkpoint, or its value is the path of a checkpoint with an error."""


def listed(names: Iterable[object], limit: int = 12) -> str:
    """``names`` sorted and joined for a message, shortened after ``limit``."""
    ordered = sorted(map(str, names))
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a path to write; it becomes ``file``, or what that links to, when the block ends without an error."""
    target = file.resolve()
    draft = target.with_name(f".{target.name}.{os.getpid()}{file.suffix}")  # writers look at the suffix
    try:
        yield draft
        _sync(draft)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _sync(file: Path) -> None:
    """Some file systems report only here that they are full."""
    if file.is_file():
        with file.open("r+b") as stream:
            os.fsync(stream.fileno())


def write_text(file: Path, text: str) -> None:
    """Replace ``file`` by ``text`` in UTF-8."""
    with replacing(file) as draft:
        draft.write_text(text, encoding="utf-8")


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; it becomes ``folder`` when the block ends without an error.

    One process at a time. ``folder`` is absent for an instant between two renames; if the process is killed there, the
    next call restores the old folder first.
    """
    target = folder.resolve()
    draft, old = (target.with_name(f".{target.name}.{state}") for state in ("partial", "before"))

    def tidy() -> None:
        if old.exists() and not target.exists():
            old.rename(target)
        for left in (draft, old):
            shutil.rmtree(left, ignore_errors=True)

    tidy()
    draft.mkdir(parents=True)
    try:
        yield draft
        for file in draft.rglob("*"):
            _sync(file)
        if target.exists():
            target.rename(old)
        draft.rename(target)
    finally:
        tidy()


def try_lock(file: Path) -> AcquireReturnProxy | None:
    """Take the lock ``file``; None if another process has it.

    Leaving the result's context, or the end of the process, frees the lock; the file stays.
    """
    try:
        return FileLock(file).acquire(timeout=0)
    except Timeout:
        return None


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the lock ``file`` while its neighbours are written; an ``OSError`` becomes a ``CheckpointError``."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if (lock := try_lock(file)) is None:
            logger.warning("waiting for another process that is preparing the same model (lock: %s)", file)
            lock = FileLock(file).acquire()
        with lock:
            yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {file.parent} ({error}); free some space or name another folder with the environment "
            "variable SPECJAX_CACHE or the argument cache_dir"
        ) from error


def default_cache_dir() -> Path:
    """``$SPECJAX_CACHE``, else ``$XDG_CACHE_HOME/specjax``, else ``~/.cache/specjax``."""
    if own := os.environ.get("SPECJAX_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specjax"


def is_complete(folder: Path) -> bool:
    """Whether ``folder`` holds every file it was built with, at its full size."""
    try:
        sizes = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return ``folder``; if it is absent or damaged, ``build`` first fills an empty folder that it is given."""
    if is_complete(folder):
        return folder
    with locked(folder.with_name(folder.name + ".lock")):
        if is_complete(folder):  # another process built it while this one waited
            return folder
        if folder.exists():
            logger.warning("%s is incomplete or damaged; building it again", folder)
        with replacing_folder(folder) as draft:
            build(draft)
            sizes = {file.name: file.stat().st_size for file in sorted(draft.iterdir())}
            (draft / MARKER).write_text(json.dumps(sizes, indent=1), encoding="utf-8")
    return folder


def sha256(file: Path) -> str:
    """Hex digest of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def cached_sha256(file: Path, cache_dir: Path) -> str:
    """``sha256(file)``, remembered by path, size and modification time: hashing 5 GB takes many seconds."""
    stat = file.stat()
    stamp = f"{file} {stat.st_size} {stat.st_mtime_ns}"
    note = cache_dir / "hashes" / hashlib.sha256(stamp.encode()).hexdigest()
    with suppress(OSError, ValueError):
        return note.read_text(encoding="ascii")
    digest = sha256(file)
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        write_text(note, digest)
    return digest
