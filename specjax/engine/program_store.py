"""Compiled programs on disk, so that a warm start neither traces nor lowers, as it must for JAX's compilation cache.

A program is found by a hash of all that it is made from: our sources, the versions below, the device and the processor,
the settings, the functions and options that are traced, and the shapes of the arguments. What cannot be told apart (a
function of a plug-in, say) is not stored. A file that is damaged, or does not fit, is compiled again. Loading a program
runs what is in the file, so the folder must belong to the user alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import inspect
import itertools
import logging
import os
import pickle
import platform
import secrets
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
import specjax_kernels
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from specjax_kernels.cpu.runtime import register_kept, registered

import specjax
from specjax.checkpoint.files import replacing

logger = logging.getLogger(__name__)

MAX_BYTES = 2 << 30  # of all stored programs. Those that were used longest ago are removed beyond it

_OURS = tuple(Path(package.__file__ or "").parent for package in (specjax, specjax_kernels))
_KNOWN_CODE = {"specjax", "specjax_kernels", "jax", "flax", "functools"}
_PACKAGES = ("jax", "jaxlib", "flax", "numpy")
_VARIABLES = ("XLA_", "TF_", "CUDA_", "TRITON_", "NUMBA_", "SPECJAX_", "NPROC")
_STARTED = time.time()

Compile: TypeAlias = Callable[[Callable[..., Any]], jax.stages.Compiled]

AHEAD = 5  # most programs that `read_ahead` loads

_folder: Path | None = None
_start: Path | None = None  # names the first programs that this process uses, for the next one like it
_used: list[str] = []
_ahead: dict[Path, Future[Any]] = {}


def keep_in(folder: Path | None) -> None:
    """Sets the folder of stored programs. None: nothing is stored or loaded."""
    global _folder
    _folder = folder


def read_ahead(start: Any) -> None:
    """Loads in a thread what the last process with this `start` used first. Without effect where a plug-in is in it,
    and for None: a further engine of this process."""
    global _start
    if start is None:
        return
    _used.clear()
    _ahead.clear()
    _start = None
    if _folder is not None and _usable(_folder):
        with contextlib.suppress(OSError, Unknown):
            _start = _folder.with_name("starts") / _key(start)
            _used.extend(name for name in _start.read_text().split() if (_folder / name).is_file())
            loader = ThreadPoolExecutor(1, thread_name_prefix="specjax-programs")
            for file in sorted(map(_folder.joinpath, _used[:AHEAD]), key=lambda file: -file.stat().st_size):
                _ahead[file] = loader.submit(_load, file)
            loader.shutdown(wait=False)


class Unknown(Exception):
    """A value that a hash cannot stand for."""


def stored(function: Callable[..., Any], arguments: tuple[Any, ...], compile: Compile, options: Any = None) -> Any:
    """A compiled program: out of the folder, else from `compile` and put there.

    Args:
        function: what is traced.
        arguments: their shapes.
        compile: traces, lowers and compiles the function that it is given.
        options: what else the program depends on.
    """
    folder = _folder
    if folder is None or not _usable(folder):
        return compile(function)
    try:
        file = folder / _key((function, arguments, options))
    except (Unknown, RecursionError) as unknown:
        logger.debug("a program is not stored: %s", unknown)
        return compile(function)
    if _start is not None and file.name not in _used and len(_used) < AHEAD:
        _used.append(file.name)
        with contextlib.suppress(OSError):
            _start.parent.mkdir(parents=True, exist_ok=True)
            with replacing(_start) as draft:
                draft.write_text("\n".join(_used))
    ahead = _ahead.pop(file, None)
    if (program := _load(file) if ahead is None or ahead.cancel() else ahead.result()) is not None:
        return program

    # A name that no program had before, so that JAX's cache does not have it: what XLA:CPU has loaded from there cannot
    # be stored again. It would load, and lack its machine code when it runs.
    def renamed(*arguments: Any) -> Any:
        return function(*arguments)

    renamed.__name__ = renamed.__qualname__ = name = f"stored_{secrets.token_hex(8)}"
    program = compile(renamed)
    _save(file, program)
    for copy in Path(jax.config.values["jax_compilation_cache_dir"] or folder).glob(f"jit_{name}-*"):
        copy.unlink(missing_ok=True)
    return program


def _load(file: Path) -> Any:
    """None: there is no such file, or it is of no use."""
    try:
        content = file.read_bytes()
        digest, body = content[:32], content[32:]
        if digest != _digest(file, body):
            raise ValueError("it is damaged")
        kernels, saved = pickle.loads(zlib.decompress(body))
        for name in kernels:  # XLA refuses a program that names one it does not know
            register_kept(name)
        *saved, ids = saved
        there = {device.id: device for device in jax.local_devices()}
        program = deserialize_and_load(*saved, execution_devices=[there[id] for id in ids])
        os.utime(file)
        return program
    except FileNotFoundError:
        return None
    except Exception as error:  # of many kinds, from XLA as well
        logger.warning("the stored program %s is not used, but compiled again: %s", file, str(error)[:300])
        return None


def _save(file: Path, program: Any) -> None:
    """Writes the whole file or nothing. A failure costs time at the next start, no more."""
    try:
        ids = [device.id for device in program.runtime_executable().local_devices()]
        body = zlib.compress(pickle.dumps((registered(), (*serialize(program), ids))), 1)
        with replacing(file) as draft:
            draft.touch(mode=0o600)
            draft.write_bytes(_digest(file, body) + body)
        _prune(file.parent)
    except Exception as error:
        logger.warning("a compiled program could not be stored in %s: %s", file.parent, str(error)[:300])


def _digest(file: Path, body: bytes) -> bytes:
    """Also of the name, so that a file under another key's name does not count."""
    return hashlib.sha256(file.name.encode() + body).digest()


def _prune(folder: Path) -> None:
    """Removes the files used longest ago, but never the newest."""
    with contextlib.suppress(FileNotFoundError):  # another process removes some, too
        files = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
        sizes = itertools.accumulate(file.stat().st_size for file in files)
        for old in [file for file, size in zip(files, sizes, strict=True) if size > MAX_BYTES and file != files[0]]:
            old.unlink()


@functools.cache
def _usable(folder: Path) -> bool:
    """Whether the folder exists, or can be made, and nobody else can write into it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        logger.warning("compiled programs are not stored: %s", error)
        return False
    mode = stat.S_IMODE(found.st_mode)
    if not hasattr(os, "geteuid") or not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or mode & 0o077:
        logger.warning(
            "compiled programs are not stored in %s: it must be a folder of your own with mode 700, and has owner %d, "
            "mode %o. Loading a program runs it. Remove the folder, or `chmod 700` it if all in it is yours",
            *(folder, found.st_uid, mode),
        )
        return False
    return True


def _key(value: Any) -> str:
    """The name of a file that depends on a value and the environment. Raises Unknown."""
    return hashlib.sha256("\n".join([*environment(), *describe(value)]).encode()).hexdigest()


def environment() -> Iterator[str]:
    """All that every program depends on. Raises Unknown if the running code may not be that of the files."""
    yield sources()
    yield from (f"{package} {importlib.metadata.version(package)}" for package in _PACKAGES)
    device = jax.devices()[0]
    yield f"{device.platform} {device.device_kind} {device.client.platform_version} {jax.device_count()}"
    yield _processor()
    # XLA:CPU divides loops by the number of threads when it compiles.
    yield str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    variables = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    settings = {**variables, **jax.config.values}.items()
    yield from sorted(f"{name}={value!r}" for name, value in settings if "cache" not in name.lower())


@functools.cache
def sources() -> str:
    """A hash of the source files of both packages. Raises Unknown if one has changed since this process started."""
    if not (files := source_files()):
        raise Unknown("the sources are no files")
    for file in files:
        if file.stat().st_mtime > _STARTED:
            raise Unknown(f"{file} has changed since this process started")
    return hash_of(files)


def source_files() -> list[Path]:
    """Of both packages."""
    return sorted(file for folder in _OURS for kind in ("*.py", "*.json") for file in folder.rglob(kind))


def hash_of(files: Iterable[Path]) -> str:
    whole = hashlib.sha256()
    for file in files:
        whole.update(hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()


@functools.cache
def _processor() -> str:
    parts = [platform.machine(), platform.processor(), platform.system()]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        parts += sorted({line for line in lines if line.split("\t")[0].strip() in ("flags", "Features", "model name")})
    return " ".join(parts)


def describe(value: Any) -> Iterator[str]:
    """Text that stands for a value: equal for values that are traced alike, in any process. Raises Unknown if it holds
    something for which there is no such text."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    text, parts = name, ()
    if value is None or isinstance(value, bool | int | float | str | bytes | enum.Enum | np.dtype):
        text += f" {value!r}"
    elif isinstance(value, jax.ShapeDtypeStruct):
        # A program runs on the devices that it was compiled for, and a sharding's text does not name them.
        ids = [] if value.sharding is None else sorted(device.id for device in value.sharding.device_set)
        text = f"{value.shape} {value.dtype} {value.sharding} {ids}"
    elif isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        text = f"{array.shape} {array.dtype} {hashlib.sha256(array.tobytes()).hexdigest()}"
    elif isinstance(value, Mapping):
        parts = [(key, value[key]) for key in sorted(value, key=repr)]
    elif isinstance(value, Set):
        parts = sorted(value, key=repr)
    elif isinstance(value, tuple | list):
        parts = value
    elif isinstance(value, functools.partial):
        parts = [value.func, value.args, value.keywords]
    elif inspect.ismethod(value):
        parts = [value.__self__, value.__func__]
    elif isinstance(value, type):
        text = f"class {_known(value)}"
    elif inspect.isfunction(function := inspect.unwrap(value) if callable(value) else value):
        text = f"function {_known(function)}"
        parts = [function.__defaults__, function.__kwdefaults__]
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a variable that is not set yet
                found = cell.cell_contents
                itself = callable(found) and inspect.unwrap(found) is function
                parts.append((variable, None if itself else found))
    elif dataclasses.is_dataclass(value):
        text = f"dataclass {_known(kind)}"
        parts = [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    else:
        raise Unknown(f"a value of type {name}")
    yield f"{text} {len(parts)}"
    for part in parts:
        yield from describe(part)


def _known(code: Any) -> str:
    """The name of a function or class whose source is a part of `environment`."""
    name = f"{code.__module__}.{code.__qualname__}"
    if name.partition(".")[0] not in _KNOWN_CODE:
        raise Unknown(f"{name} is not part of specjax")
    return name
