"""Machine code of a CPU kernel: linked from Numba's output, stored as an object file, loaded by llvmlite alone.

Numba takes seconds to compile a kernel and two to import. Its own cache does not hold functions made by functions.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.metadata
import logging
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

# Symbol of an array of words, which `load` fills with this process's addresses.
TABLE = "specjax_table"
_IN_THE_C_LIBRARY = {"memcpy", "memmove", "memset"}  # other functions that machine code may call
_folder: Path | None = None
_loaded: list[Any] = []  # engines whose code XLA calls


def keep_in(folder: Path | None) -> None:
    """Sets the folder of compiled kernels; None: every process compiles them."""
    global _folder
    _folder = folder


def read(name: str) -> bytes | None:
    """The stored object file of a kernel, or None."""
    if (file := _file(name)) is None:
        return None
    try:
        content = file.read_bytes()
        if hashlib.sha256(content[32:]).digest() == content[:32]:
            return content[32:]
        logger.warning("%s is damaged; the kernel is compiled again", file)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        logger.warning("%s cannot be read (%s); the kernel is compiled again", file, error)
    return None


def _file(name: str) -> Path | None:
    """The path of a kernel's object file; None without a folder, Numba, LLVM or source files."""
    try:
        return None if _folder is None else _folder / f"{name}-{_version()}.o"
    except (ImportError, OSError):
        return None


def read_or_compile(name: str, compile: Callable[[], bytes]) -> bytes:
    """The object file of a kernel, from the folder, or compiled and written there."""
    if (code := read(name)) is not None:
        return code
    if (file := _file(name)) is None:
        return compile()
    code = compile()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix="new-") as folder:
            partial = Path(folder, file.name)
            partial.write_bytes(hashlib.sha256(code).digest() + code)
            os.replace(partial, file)  # atomic, because several processes may write it
    except OSError as error:
        logger.warning("%s cannot be written (%s); the next start compiles the CPU kernels again", file, error)
        keep_in(None)
    return code


def _version() -> str:
    """A digest of everything that machine code depends on, except `.numba_config.yaml`, which only Numba reads."""
    llvm = importlib.import_module("llvmlite.binding")
    parts = [source.read_bytes() for source in sorted(Path(__file__).parent.glob("*.py"))]
    parts += [importlib.metadata.version(package).encode() for package in ("numba", "llvmlite")]
    parts += [f"{name}={os.environ[name]}".encode() for name in sorted(os.environ) if name.startswith("NUMBA_")]
    parts += [text.encode() for text in (llvm.get_process_triple(), *_processor(llvm))]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


class Module(NamedTuple):
    """A function in LLVM."""

    text: str
    symbol: str  # of the function


def link(functions: Mapping[str, Module]) -> bytes:
    """An object file of functions, by their symbol in the file.

    Raises RuntimeError if they call other functions, as code does that may raise.
    """
    llvm = importlib.import_module("llvmlite.binding")
    machine = _machine(llvm)
    if not _converts_float16(llvm) and any(re.search(r"\bhalf\b", text) for text, _ in functions.values()):
        raise RuntimeError("it reads float16, which this processor does not convert")
    whole = llvm.parse_assembly("")
    for symbol, (text, before) in functions.items():
        module = llvm.parse_assembly(text)
        module.get_function(before).name = symbol
        whole.link_in(module)
    # LLVM removes Numba's error handling only from internal functions.
    for value in (*whole.functions, *whole.global_variables):
        if not value.is_declaration and value.name not in (*functions, TABLE):
            value.linkage = "internal"
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(whole, passes)
    needed = {value.name for value in (*whole.functions, *whole.global_variables) if value.is_declaration}
    if unknown := sorted(name for name in needed - _IN_THE_C_LIBRARY if not name.startswith("llvm.")):
        raise RuntimeError(f"compiled, it needs {', '.join(unknown)}, as code does that may raise or allocates")
    return machine.emit_object(whole)


def load(code: bytes, symbols: Sequence[str], outside: Sequence[int]) -> int:
    """Loads an object file for the rest of the process. Returns the address of the first function. `TABLE` receives
    the addresses of the others, then `outside`."""
    llvm = importlib.import_module("llvmlite.binding")
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine(llvm))
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _loaded.append(engine)
    first, *others = map(engine.get_function_address, symbols)
    if words := [*others, *outside]:
        (ctypes.c_int64 * len(words)).from_address(engine.get_global_value_address(TABLE))[:] = words
    return first


def _machine(llvm: Any) -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = _processor(llvm)
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(cpu=cpu, features=features, opt=3, jit=True)


def has(feature: str) -> bool:
    """True if kernels may use a processor feature (LLVM's name): both `link` and Numba, whose settings may exclude
    features, include it."""
    registry = importlib.import_module("numba.core.registry")
    numba = registry.cpu_target.target_context.codegen()._tm_features
    here = _processor(importlib.import_module("llvmlite.binding"))[1]
    return all(f"+{feature}" in features.split(",") for features in (numba, here))


def _converts_float16(llvm: Any) -> bool:
    return not llvm.get_process_triple().startswith(("x86", "i")) or "+f16c" in _processor(llvm)[1]


def _processor(llvm: Any) -> tuple[str, str]:
    """Name and features, as Numba chooses them: its settings take precedence over the processor's."""
    try:
        features = llvm.get_host_cpu_features().flatten()
    except RuntimeError:  # unknown to LLVM for this kind of processor
        features = ""
    name = os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()
    return name, os.environ.get("NUMBA_CPU_FEATURES") or features
