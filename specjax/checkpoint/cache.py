"""The folder where converted models are kept, and how a folder comes to be there in one piece.

Several processes may want the same model at once, any of them may be killed at any time, and a file may be cut
short later (a full disk, a copy that stopped). So: one builds, under a lock, in a folder of another name; the last
thing written is a list of the files' sizes; then the folder is renamed. A folder counts only if its list agrees.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from specjax.checkpoint.errors import CheckpointError

logger = logging.getLogger(__name__)

MARKER = ".specjax-complete.json"


def default_cache_dir() -> Path:
    """``$SPECJAX_CACHE``, else ``$XDG_CACHE_HOME/specjax``, else ``~/.cache/specjax``."""
    if own := os.environ.get("SPECJAX_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(shared).expanduser() / "specjax"


def is_complete(folder: Path) -> bool:
    """Whether ``folder`` holds every file it was built with, at its full size."""
    try:
        sizes = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return ``folder``, first building it if it is absent, unfinished or damaged.

    Args:
      folder: final place; its parent is created.
      build: fills an empty folder given to it. If it raises, nothing is kept.

    Raises:
      CheckpointError: the cache cannot be written, or whatever ``build`` raises.
    """
    if is_complete(folder):
        return folder
    partial = folder.with_name(folder.name + ".partial")
    with writing(folder), locked(folder.with_name(folder.name + ".lock")):
        if is_complete(folder):  # another process built it while this one waited
            return folder
        if folder.exists():
            logger.warning("%s is incomplete or damaged; building it again", folder)
            shutil.rmtree(folder)
        # Left by a process that was killed: the lock is ours, so nobody is at work in it.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            build(partial)
            sizes = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
            (partial / MARKER).write_text(json.dumps(sizes, indent=1), encoding="utf-8")
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return folder


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the lock ``file``; other processes wait, and say so."""
    from filelock import FileLock, Timeout

    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.warning("waiting for another process that is preparing the same model (lock: %s)", file)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Turn a failure of the file system into an error that says which folder to change, and how."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {target} ({error}); free some space or name another folder with the environment variable "
            "SPECJAX_CACHE or the argument cache_dir"
        ) from error


def sha256(file: Path) -> str:
    """Hex digest of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def cached_sha256(file: Path, cache_dir: Path) -> str:
    """``sha256(file)``, remembered by path, size and modification time: hashing 5 GB takes many seconds."""
    stat = file.stat()
    stamp = [str(file), stat.st_size, stat.st_mtime_ns]
    note = cache_dir / "hashes" / (hashlib.sha256(str(file).encode()).hexdigest()[:24] + ".json")
    try:
        known = json.loads(note.read_text(encoding="utf-8"))
        if known["file"] == stamp:
            return known["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    digest = sha256(file)
    with writing(note):
        note.parent.mkdir(parents=True, exist_ok=True)
        draft = note.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps({"file": stamp, "sha256": digest}), encoding="utf-8")
        draft.replace(note)
    return digest
