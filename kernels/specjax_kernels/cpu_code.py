"""A CPU kernel's machine code: linked from what Numba compiled, kept in a file, loaded without Numba.

Numba takes seconds for a kernel, and two to be imported. Its own cache does not serve functions made by functions. So
the code becomes an object file here, as a compiler would write one; LLVM, by way of llvmlite, loads it in milliseconds.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.metadata
import inspect
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_LOG = logging.getLogger(__name__)

TABLE = "specjax_table"
"""Symbol of the words that compiled code reads and `load` fills in: what is known in each process only."""

_IN_THE_C_LIBRARY = ("expf", "memcpy", "memmove", "memset")
"""What machine code may call besides itself: in every process, whatever it has imported."""

_folder: Path | None = None
_loaded: list[Any] = []  # what XLA calls must not be collected


def keep_in(place: Path | None) -> None:
    """From now on machine code is kept in this folder, by processor, versions and settings of all that made it, and
    found there by later processes. None: nowhere."""
    global _folder
    _folder = place


def folder() -> Path | None:
    """Where machine code is kept."""
    return _folder


def kept(name: str, build: Callable[..., Any], compile: Callable[[], bytes]) -> bytes:
    """The kernel's object file: out of the folder, else compiled and put there.

    Args:
        build: what the kernel is made by; the file that holds its source is a part of what the code is kept under.
    """
    file = file_of(name, build)
    if file is None:
        return compile()
    try:
        content = file.read_bytes()
        digest, code = content[:32], content[32:]
        if hashlib.sha256(code).digest() == digest:
            return code
        _LOG.warning("%s is damaged; the kernel is compiled again", file)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        _LOG.warning("%s cannot be read (%s); the kernel is compiled again", file, error)
    code = compile()
    try:
        with _new_file(file.parent) as partial:
            partial.write(hashlib.sha256(code).digest() + code)
            partial.close()
            os.chmod(partial.name, 0o644)
            os.replace(partial.name, file)  # whole or not at all, whoever else writes it
    except OSError as error:
        _LOG.warning("%s cannot be written (%s); the next start compiles the CPU's kernels again", file, error)
        keep_in(None)
    return code


def can_keep() -> bool:
    """Whether files can be written into the folder."""
    try:
        with _new_file(_folder):
            return True
    except OSError:
        return False


@contextmanager
def _new_file(folder: Path | None) -> Iterator[Any]:
    """An open file of another name than all others, which is gone afterwards unless it was renamed."""
    if folder is None:
        raise FileNotFoundError("machine code is kept nowhere")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="new-", delete=False) as file:
        try:
            yield file
        finally:
            Path(file.name).unlink(missing_ok=True)


def file_of(name: str, build: Callable[..., Any]) -> Path | None:
    """Where a kernel is kept, or will be. None: nowhere, also if it cannot be told what it is made of."""
    if _folder is None:
        return None
    try:
        return _folder / f"{name}-{_version(build)}.o"
    except (ImportError, OSError, TypeError):  # no Numba or LLVM; sources that are no files
        return None


def _version(build: Callable[..., Any]) -> str:
    """Of all that the machine code depends on, but for a `.numba_config.yaml`, which only Numba knows how to find."""
    llvm = importlib.import_module("llvmlite.binding")
    sources = {*Path(__file__).parent.glob("cpu*.py"), Path(inspect.getfile(inspect.unwrap(build)))}
    parts = [source.read_bytes() for source in sorted(sources)]
    parts += [importlib.metadata.version(package).encode() for package in ("numba", "llvmlite")]
    parts += [f"{name}={os.environ[name]}".encode() for name in sorted(os.environ) if name.startswith("NUMBA_")]
    parts += [text.encode() for text in (llvm.get_process_triple(), llvm.get_host_cpu_name(), _features(llvm))]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


def link(functions: Mapping[str, tuple[str, str]]) -> bytes:
    """An object file of functions that call nothing but each other and some of the C library's.

    Args:
        functions: by the symbol that each gets: its module as LLVM's text, and its symbol there.

    Raises:
        RuntimeError: they do: one may raise, say, or allocates an array.
    """
    llvm = importlib.import_module("llvmlite.binding")
    machine = _machine(llvm)
    whole = llvm.parse_assembly("")
    for symbol, (text, before) in functions.items():
        module = llvm.parse_assembly(text)
        module.get_function(before).name = symbol
        whole.link_in(module)
    # Hidden from outside, functions are known to be called from here alone: LLVM sees that none of them fails, and
    # leaves out what Numba does then.
    for value in (*whole.functions, *whole.global_variables):
        if not value.is_declaration and value.name not in (*functions, TABLE):
            value.linkage = "internal"
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(whole, passes)
    needed = [value.name for value in (*whole.functions, *whole.global_variables) if value.is_declaration]
    unknown = sorted({name for name in needed if not name.startswith("llvm.")} - {*_IN_THE_C_LIBRARY})
    if unknown:
        raise RuntimeError(f"compiled, it needs {', '.join(unknown)}, as code does that may raise or allocates")
    return machine.emit_object(whole)


def load(code: bytes, symbols: Sequence[str], table: Callable[[Mapping[str, int]], Sequence[int]]) -> dict[str, int]:
    """The addresses of its functions, for as long as the process lives.

    Args:
        table: what the words at `TABLE` shall be, by those addresses.
    """
    llvm = importlib.import_module("llvmlite.binding")
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine(llvm))
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _loaded.append(engine)
    addresses = {symbol: engine.get_function_address(symbol) for symbol in symbols}
    words = table(addresses)
    (ctypes.c_int64 * len(words)).from_address(engine.get_global_value_address(TABLE))[:] = words
    return addresses


def _machine(llvm: Any) -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=_features(llvm), opt=3, jit=True)


def _features(llvm: Any) -> str:
    try:
        return llvm.get_host_cpu_features().flatten()
    except RuntimeError:  # not known for this kind of processor
        return ""
