"""Errors, JSON files with checked values, atomic writing of files and folders, locks, and the cache folder.

Files and folders are written under another name and then renamed, because a process may be killed at any time. A folder
in the cache is used only while its files have the sizes recorded when it was built.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from filelock import AcquireReturnProxy, FileLock, Timeout

from specjax.limits import ParameterError

logger = logging.getLogger(__name__)

MARKER = ".specjax-complete.json"


class CheckpointError(ValueError):
    """A model cannot be found, read or run. The message names the value, where it was set, and which values work."""


class CheckpointOptionError(ParameterError, CheckpointError):
    """An option does not fit the checkpoint, or its value is the path of a checkpoint with an error."""


@contextmanager
def prefixed(label: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{label}: {error}") from error


def listed(names: Iterable[object], limit: int = 12) -> str:
    """``names`` sorted and joined for a message, shortened after ``limit``."""
    ordered = sorted(map(str, names))
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more


@contextmanager
def damaged(what: str | Callable[[], str]) -> Iterator[None]:
    """Convert an error of code that reads ``what``. Rust's panics are a ``BaseException``."""
    try:
        yield
    except (CheckpointError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        name = what if isinstance(what, str) else what()
        raise CheckpointError(f"{name} is damaged or not supported ({error!r:.300})") from error


def invalid(key: str, value: object, needed: str, file: str = "config.json") -> CheckpointError:
    return CheckpointError(f"{file}: {key} is {value!r:.80}; {needed} is needed")


def unsupported(key: str, value: object, supported: str) -> CheckpointError:
    return CheckpointError(f"config.json: {key} is {value!r:.80}; supported: {supported}")


MAX_INTEGER = 2**31 - 1  # positions and sizes are int32
MAX_NUMBER = 1e38  # about the largest float32


class Holds(NamedTuple):
    """What a config's numbers are compared with before anything is built from them.

    Attributes:
        tensors: number of tensors of the model; without weights, above that of every published model.
        file: name of the config in messages.
    """

    tensors: int = 2**18
    file: str = "config.json"


UNKNOWN = Holds()


class Settings(dict[str, Any]):
    """A JSON object whose values are checked when they are read: positive numbers and integers, and booleans, false by
    default. Null means absent, as in transformers."""

    def __init__(self, values: Any = (), holds: Holds = UNKNOWN) -> None:
        super().__init__(values)
        self.holds = holds

    def optional(self, key: str, default: Any) -> Any:
        value = self.get(key)
        return default if value is None else value

    def section(self, key: str) -> Settings:
        if not isinstance(value := self.get(key) or {}, Mapping):
            raise self.invalid(key, value, "an object")
        return Settings(value, self.holds)

    def invalid(self, key: str, value: object, needed: str) -> CheckpointError:
        return invalid(key, value, needed, self.holds.file)

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.optional(key, default)
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not least <= value <= MAX_INTEGER:
            needed = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise self.invalid(key, value, needed + " below 2**31" * (type(value) is int and value > MAX_INTEGER))
        return value

    def count(self, key: str, default: int | None = None, *, each: int = 1) -> int:
        """An integer. There are ``each`` times as many tensors or more."""
        value = self.integer(key, default)
        if value * each > self.holds.tensors:
            raise self.invalid(key, value, f"at most {self.holds.tensors // each}, for {self.holds.tensors} tensors,")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Raises KeyError if it is absent and has no default."""
        value = self.optional(key, default)
        if value is None:
            raise KeyError(key)
        # Python's JSON allows Infinity and integers beyond the range of floats.
        if type(value) not in (int, float) or not 0 < value < MAX_NUMBER:
            raise self.invalid(key, value, "a positive number")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Raises KeyError if it is absent."""
        if not isinstance(value := self[key], list) or not value:
            raise self.invalid(key, value, "a list of positive numbers")
        return tuple(Settings({key: element}, self.holds).number(key) for element in value)

    def token(self, key: str, vocab_size: int) -> int:
        """An id of one of ``vocab_size`` tokens. Raises CheckpointError if it is absent."""
        if type(value := self.get(key)) is not int or not 0 <= value < vocab_size:
            raise self.invalid(key, value, f"a token id from 0 to {vocab_size - 1}")
        return value

    def boolean(self, key: str, default: bool = False) -> bool:
        if type(value := self.optional(key, default)) is not bool:
            raise self.invalid(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        if type(value := self.optional(key, default)) is not str:
            raise self.invalid(key, value, "a text")
        return value

    def texts(self, key: str) -> list[str]:
        value = self.optional(key, [])
        if type(value) is not list or not all(type(item) is str for item in value):
            raise self.invalid(key, value, "a list of texts")
        return value


def read_json(file: Path, name: str) -> Settings:
    """The JSON object in ``file``. ``name``: the model's name, for messages."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file.parent} (given as {name!r}) has no {file.name}, which is needed") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON ({error}); copy or download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__}, not a JSON object; copy or download it again")
    return Settings(value)


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a path to write. It becomes ``file``, or the target of that link, when the block ends without an error."""
    target = file.resolve()
    draft = target.with_name(f".{target.name}.{os.getpid()}{file.suffix}")  # writers look at the suffix
    try:
        yield draft
        _sync(draft)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _sync(file: Path) -> None:
    """Flush ``file`` to disk. Some file systems report only here that they are full."""
    if file.is_file():
        with file.open("r+b") as stream:
            os.fsync(stream.fileno())


def write_text(file: Path, text: str) -> None:
    with replacing(file) as draft:
        draft.write_text(text, encoding="utf-8")


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to fill. It becomes ``folder`` when the block ends without an error.

    For one process at a time. If the process is killed between the two renames, when ``folder`` is absent, the next
    call restores the old folder.
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
    """Take the lock ``file``; None if another process has it. Leaving the result's context frees the lock."""
    try:
        return FileLock(file).acquire(timeout=0)
    except Timeout:
        return None


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the lock ``file``. An ``OSError`` becomes a ``CheckpointError``."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if (lock := try_lock(file)) is None:
            logger.warning("waiting for another process that is preparing the same model (lock: %s)", file)
            lock = FileLock(file).acquire()
        with lock:
            yield
    except OSError as error:
        advice = "free some space, or set SPECJAX_CACHE to another folder"
        raise CheckpointError(f"cannot write {file.parent} ({error}); {advice}") from error


def default_cache_dir() -> Path:
    """``$SPECJAX_CACHE``, else ``$XDG_CACHE_HOME/specjax``, else ``~/.cache/specjax``."""
    if folder := os.environ.get("SPECJAX_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specjax"


def is_complete(folder: Path) -> bool:
    """True if ``folder`` holds every file it was built with, at its full size."""
    try:
        sizes = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return ``folder``. If it is absent or damaged, ``build`` first fills an empty folder."""
    if is_complete(folder):
        return folder
    with locked(folder.with_name(folder.name + ".lock")):
        if is_complete(folder):  # built by another process in the meantime
            return folder
        if folder.exists():
            logger.warning("%s is incomplete or damaged; building it again", folder)
        with replacing_folder(folder) as draft:
            build(draft)
            sizes = {file.name: file.stat().st_size for file in sorted(draft.iterdir())}
            (draft / MARKER).write_text(json.dumps(sizes, indent=1), encoding="utf-8")
    return folder


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
