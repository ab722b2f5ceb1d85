"""Calls kernels from XLA:CPU: a kernel is compiled by Numba, and XLA's threads share its tiles.

A kernel is two functions of a call: the number of its tiles, and the work of one tile. Every thread runs the next free
tile, including the thread that XLA calls, so the call never blocks on a helper that has not started.

XLA starts a program in a thread outside of its pool, which has a thread for each core: with that one, more threads than
cores would compute, and a step of one token would take a sixth longer. A call from outside therefore leaves all tiles
to the pool and returns a future. The thread that ends the last tile continues the program.

The call's structures are defined in `xla/ffi/api/c_api.h` of jaxlib's `include`, and read as words of 8 bytes. Compiled
code reads this process's addresses from a table, so other processes can use it (`object_code`).

`register` makes a kernel callable from a program, `host_function` a function callable without XLA. Kernels are written
with `Tools`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import inspect
import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax

from specjax_kernels.cpu import object_code

logger = logging.getLogger(__name__)

# Words of XLA_FFI_CallFrame. Before the pointers to arguments or to results there are their types and their number.
_EXTENSION, _API, _CONTEXT, _OF_ARGUMENTS, _OF_RESULTS, _FUTURE, _FRAME_WORDS = 1, 2, 3, 9, 14, 21, 22
# Words of XLA_FFI_Buffer.
_DATA, _RANK, _DIMENSIONS, _BUFFER_WORDS = 3, 4, 5, 6

# Words of a call's state. The last thread to leave frees it.
_NEXT, _DONE, _HOLDERS, _TILES, _TILE, _CALL = range(6)
_AVAILABLE = _CALL + 1  # arguments of Future_Create and Future_SetAvailable: size, extension, future
_ARGUMENTS = _AVAILABLE + 3  # arguments of other functions of XLA
_WORDS = _ARGUMENTS + 5

# Words of the table: addresses of functions, the key of `_in_pool`, the largest number of threads of a call, and XLA's
# interface: places of functions in XLA_FFI_Api, and its version.
_WORK, _OF_TILES, _OF_TILE, _ALLOCATE, _FREE, _GET, _SET, _IN_POOL, _CORES, *_PLACES, _VERSION = range(14)
_SCHEDULE, _DESTROY, _CREATE, _SET_AVAILABLE = _PLACES
_SYMBOLS = "specjax_handle", "specjax_work", "specjax_tiles", "specjax_tile"
_ALONE = "specjax_host"


class Tools(NamedTuple):
    """Functions for kernels that Numba lacks."""

    inlined: Callable[[Any], Any]  # decorator: compiled into its callers
    floats: Any  # address -> pointer to float32
    halves: Any  # address -> pointer to uint16
    integers: Any  # address -> pointer to int32
    octets: Any  # address -> pointer to uint8
    longs: Any  # address -> pointer to int64
    widened: Any  # bits of a bfloat16, uint16 -> float32
    half: Any  # bits of a float16, uint16 -> float32
    bits: Any  # float32 -> int32 of the same bits
    float_of: Any  # the inverse of `bits`
    argument: Any  # (call, i) -> address of argument i's data
    argument_size: Any  # (call, i, axis) -> size of argument i
    result: Any  # (call, i) -> address of result i's data
    result_size: Any  # (call, i, axis) -> size of result i
    threads: Any  # () -> the largest number of threads of a call; not for `host_function`
    emitted: Any  # (count, generate) -> a function of `count` int64 that returns 0; generate(builder, values) emits it


def callable_here() -> bool:
    """True if this process computes on one CPU device, and SPECJAX_CPU_KERNELS is not 0. With several devices XLA would
    gather a kernel's arrays."""
    wanted = os.environ.get("SPECJAX_CPU_KERNELS") != "0"
    return wanted and jax.default_backend() == "cpu" and jax.local_device_count() == 1


Build: TypeAlias = Callable[[Tools], tuple[Any, Any]]
"""Makes the two functions of a kernel: tiles(call) -> int, tile(call, index) -> 0."""

_LOCK = threading.Lock()  # programs are traced in several threads
_REGISTERED: dict[str, str | None] = {}


def register(name: str, build: Build) -> str | None:
    """Loads or compiles a kernel for `jax.ffi.ffi_call`, once in a process. If that fails, logs a warning with the
    reason and returns it."""
    with _LOCK:
        if name in _REGISTERED:
            return _REGISTERED[name]
        try:
            outside = _outside()  # may fail, before the compilation
            address = object_code.load(object_code.read_or_compile(name, lambda: _compile(build)), _SYMBOLS, outside)
            function = ctypes.cast(address, ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p))
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu")
            reason = None
        except Exception as error:
            # Numba may be absent, or may not support this Python or processor.
            reason = f"the CPU kernel {name} cannot be compiled here: {type(error).__name__}: {error}"
            logger.warning("%s. XLA's own operations are used instead; decoding is slower", reason)
        _REGISTERED[name] = reason
        return reason


_HOST_LOCK = threading.Lock()  # not `_LOCK`: loading a model must not block on a compiler
_HOST: dict[str, Any] = {}


def host_function(name: str, build: Callable[[Tools], Any], *, compile: bool = False) -> Any | None:
    """A compiled function of integers that ctypes calls without Python's lock and without XLA, on any device. `build`
    returns the function that Numba compiles, (int64, ...) -> 0. None if it is not on disk and `compile` is false, if it
    cannot be compiled, or if SPECJAX_CPU_KERNELS is 0."""
    if os.environ.get("SPECJAX_CPU_KERNELS") == "0":
        return None
    if not compile:
        with _HOST_LOCK:
            if name not in _HOST:
                _HOST.setdefault(name, _host_function(name, _not_now))  # another thread may have compiled it
            return _HOST[name]
    if (function := _HOST.get(name)) is None:
        with _LOCK:
            function = _host_function(name, lambda: _compile_alone(build))
        _HOST[name] = function
    return function


def is_missed(name: str) -> bool:
    """True if `host_function` returned None for this function."""
    return name in _HOST and _HOST[name] is None


def _host_function(name: str, compile: Callable[[], bytes]) -> Any | None:
    try:
        address = object_code.load(object_code.read_or_compile(name, compile), [_ALONE], [])
    except Exception as error:
        level = logging.DEBUG if isinstance(error, LookupError) else logging.WARNING
        logger.log(level, "numpy loads weights without %s: %s: %s", name, type(error).__name__, error)
        return None
    return ctypes.CFUNCTYPE(ctypes.c_int64)(address)


def _not_now() -> bytes:
    raise LookupError("it is not compiled yet")


def _compile_alone(build: Callable[[Tools], Any]) -> bytes:
    tools, _, alone = _workshop()
    return object_code.link({_ALONE: alone(build(tools))})


def _outside() -> list[int]:
    """The words of the table from `_ALLOCATE` on."""
    libc = ctypes.CDLL(None)
    functions = libc.malloc, libc.free, libc.pthread_getspecific, libc.pthread_setspecific
    addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return [*addresses, _in_pool(), cores, *_interface()]


@functools.cache
def _in_pool() -> int:
    """The key of a value of each thread, which is not 0 in threads of XLA's pool that have computed tiles."""
    key = ctypes.c_ulong()
    if error := ctypes.CDLL(None).pthread_key_create(ctypes.byref(key), None):
        raise OSError(error, f"pthread_key_create: {os.strerror(error)}")
    return key.value


def _interface() -> tuple[int, ...]:
    """Offsets of four functions in XLA_FFI_Api, in words, and its version as XLA_FFI_Api_Version stores it."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    functions = re.findall(r"_XLA_FFI_API_STRUCT_FIELD\(XLA_FFI_(\w+)\)", header)
    numbers = [re.search(rf"#define XLA_FFI_API_{name} (\d+)", header) for name in ("MAJOR", "MINOR")]
    major, minor = (int(match[1]) for match in numbers if match)
    if major != 0:
        raise RuntimeError(f"jaxlib's foreign function interface has version {major}.{minor}; only 0.x is supported")
    before = 6  # its size, extensions, version (3) and internal functions
    names = "ThreadPool_Schedule", "Error_Destroy", "Future_Create", "Future_SetAvailable"
    return *(before + functions.index(name) for name in names), major | minor << 32


def _compile(build: Build) -> bytes:
    tools, compiled, _ = _workshop()
    return object_code.link(dict(zip(_SYMBOLS, compiled(*build(tools)), strict=True)))


@functools.cache
def _workshop() -> tuple[Tools, Callable[[Any, Any], tuple[object_code.Module, ...]], Callable[[Any], Any]]:
    """The tools; a function that compiles a kernel's two functions to the four of `_SYMBOLS` (the first is the handler,
    XLA_FFI_Error* (XLA_FFI_CallFrame*)); and a function that compiles a function of int64 for `host_function`."""
    numba: Any = importlib.import_module("numba")
    importlib.import_module("numba.extending")
    types = numba.types
    pointer_to, converters, add, load, call, entry_of, emitted = _instructions(numba)

    # Products and sums may be fused, but not reordered.
    options: dict[str, Any] = {"fastmath": {"contract"}, "error_model": "numpy"}

    # Unwrapped, because the tests wrap every function to check its arguments.
    def inlined(function: Any) -> Any:
        return numba.njit(inline="always", **options)(inspect.unwrap(function))

    # Compiled once for all kernels, and inlined by LLVM. Numba's inlining takes a fifth of a kernel's compilation.
    def shared(function: Any) -> Any:
        return numba.njit(**options)(inspect.unwrap(function))

    def entry(signature: Any) -> Any:
        return lambda function: _module(numba, inspect.unwrap(function), signature, options)

    # Not arrays: their reference counts would remain without Numba's own passes.
    kinds = (types.float32, types.uint16, types.int32, types.uint8, types.int64)
    *_, words = pointers = tuple(map(pointer_to, kinds))

    def buffers_at(field: int) -> tuple[Any, Any]:
        """Data and size of the i-th XLA_FFI_Buffer among the arguments or the results. `field`: a word of the frame."""

        @inlined
        def buffer(frame: int, index: int) -> Any:
            return words(words(words(frame)[field])[index])

        @shared
        def data(frame: int, index: int) -> int:
            return buffer(frame, index)[_DATA]

        @shared
        def size(frame: int, index: int, axis: int) -> int:
            return words(buffer(frame, index)[_DIMENSIONS])[axis]

        return data, size

    one, two = types.int64(types.int64), types.int64(types.int64, types.int64)

    @shared
    def size_of_frame(frame: int) -> int:
        """Number of words of a `copy_frame`."""
        size = _FRAME_WORDS
        for field in (_OF_ARGUMENTS, _OF_RESULTS):
            for i in range(words(frame)[field - 2]):
                size += 1 + _BUFFER_WORDS + words(words(words(frame)[field])[i])[_RANK]
        return size

    @shared
    def copy_frame(frame: int, to: int) -> int:
        """Copies a call frame and its buffers' descriptions, since XLA uses their memory again when the handler has
        returned, before the future is available. Returns `to`."""
        for i in range(_FRAME_WORDS):
            words(to)[i] = words(frame)[i]
        end = to + 8 * _FRAME_WORDS
        for field in (_OF_ARGUMENTS, _OF_RESULTS):
            count, buffers = words(frame)[field - 2], words(frame)[field]
            pointers, words(to)[field] = end, end
            end += 8 * count
            for i in range(count):
                buffer = words(words(buffers)[i])
                copy, dimensions = end, end + 8 * _BUFFER_WORDS
                words(pointers)[i] = copy
                for j in range(_BUFFER_WORDS):
                    words(copy)[j] = buffer[j]
                words(copy)[_DIMENSIONS] = dimensions
                for j in range(buffer[_RANK]):
                    words(dimensions)[j] = words(buffer[_DIMENSIONS])[j]
                end = dimensions + 8 * buffer[_RANK]
        return to

    @inlined
    def call_xla(state: int, function: int, arguments: int) -> int:
        api = words(words(state)[_CALL])[_API]
        return call(words(api + 8 * entry_of(function))[0], state + 8 * arguments, 0)

    @shared
    def run_tiles(state: int) -> int:
        """Runs tiles while any are free."""
        s, last = words(state), False
        while True:
            taken = add(state + 8 * _NEXT, 1)
            if taken >= s[_TILES]:
                break
            call(s[_TILE], s[_CALL], taken)
            last = add(state + 8 * _DONE, 1) == s[_TILES] - 1
        if last and s[_AVAILABLE + 2] != 0:
            call_xla(state, _SET_AVAILABLE, _AVAILABLE)  # returns after what this thread runs of the program
        if add(state + 8 * _HOLDERS, -1) == 1:
            call(entry_of(_FREE), state, 0)
        return 0

    @entry(one)
    def work(state: int) -> int:
        call(entry_of(_SET), entry_of(_IN_POOL), 1)
        return run_tiles(state)

    @entry(one)
    def handle(frame: int) -> int:
        f = words(frame)
        extension = f[_EXTENSION]
        if extension != 0 and words(extension)[1] & 0xFFFFFFFF == 1:
            # XLA queries the version of the interface.
            words(words(extension)[3])[3] = entry_of(_VERSION)
            return 0
        count = call(entry_of(_OF_TILES), frame, 0)
        if count == 0:
            return 0
        helpers = min(entry_of(_CORES), count) - 1
        works = helpers == 0 or call(entry_of(_GET), entry_of(_IN_POOL), 0) != 0  # this thread, too
        size = _WORDS if works else _WORDS + size_of_frame(frame)
        state = call(entry_of(_ALLOCATE), 8 * size, 0)
        s = words(state)
        s[_NEXT], s[_DONE], s[_HOLDERS], s[_TILES] = 0, 0, helpers + 2, count
        s[_TILE], s[_CALL] = entry_of(_OF_TILE), frame
        s[_AVAILABLE], s[_AVAILABLE + 1], s[_AVAILABLE + 2] = 24, 0, 0
        scheduled = helpers
        if not works:
            failed = call_xla(state, _CREATE, _AVAILABLE)
            if failed != 0:
                call(entry_of(_FREE), state, 0)
                return failed
            f[_FUTURE] = s[_AVAILABLE + 2]
            s[_CALL], scheduled = copy_frame(frame, state + 8 * _WORDS), helpers + 1
        for i in range(scheduled):
            s[_ARGUMENTS], s[_ARGUMENTS + 1], s[_ARGUMENTS + 2] = 40, 0, f[_CONTEXT]
            s[_ARGUMENTS + 3], s[_ARGUMENTS + 4] = entry_of(_WORK), state
            failed = call_xla(state, _SCHEDULE, _ARGUMENTS)
            if failed != 0:  # no thread pool: this thread runs all tiles
                s[_ARGUMENTS], s[_ARGUMENTS + 1], s[_ARGUMENTS + 2] = 24, 0, failed
                call_xla(state, _DESTROY, _ARGUMENTS)
                add(state + 8 * _HOLDERS, i - helpers)
                works = True
                break
        if works:
            run_tiles(state)
            while load(state + 8 * _DONE) < count:  # helpers still run the last tiles
                pass
        if add(state + 8 * _HOLDERS, -1) == 1:
            call(entry_of(_FREE), state, 0)
        return 0

    def compiled(tiles: Any, tile: Any) -> tuple[object_code.Module, ...]:
        return handle, work, entry(one)(tiles), entry(two)(tile)

    @inlined
    def threads() -> int:
        return entry_of(_CORES)

    sizes = *buffers_at(_OF_ARGUMENTS), *buffers_at(_OF_RESULTS)
    tools = Tools._make((inlined, *pointers, *converters, *sizes, threads, emitted))

    def alone(function: Any) -> Any:
        return entry(types.int64(*[types.int64] * len(inspect.signature(function).parameters)))(function)

    return tools, compiled, alone


def _module(numba: Any, function: Any, signature: Any, options: dict[str, Any]) -> object_code.Module:
    """The LLVM module of a function that C can call, and the function's symbol in it.

    Numba's passes and its machine code would take as long as all else: `object_code.link` optimises whole kernels.
    """
    ccallback: Any = importlib.import_module("numba.core.ccallback")
    callback = ccallback.CFunc(function, (signature.args, signature.return_type), locals={}, options=options)
    with importlib.import_module("numba.core.compiler_lock").global_compiler_lock:
        result = callback._compile_uncached()
        library = result.library
        library._optimize_final_module = library._finalize_final_module = lambda: None
        library.finalize()  # links what the function calls
    return object_code.Module(library.get_llvm_str(), result.fndesc.llvm_cfunc_wrapper_name)


def _instructions(numba: Any) -> tuple[Any, ...]:
    """Instructions that Numba lacks: from an address to a pointer; the four conversions of `Tools`; atomic addition and
    loading; a call by address; a word of the table; functions in LLVM IR."""
    ir: Any = importlib.import_module("llvmlite.ir")
    word, types = ir.IntType(64), numba.types
    pointer = word.as_pointer()

    def intrinsic(signature: Any, generate: Callable[[Any, Any, Any], Any]) -> Any:
        """`generate(builder, values, return type)` emits the instruction."""

        def code(context: Any, builder: Any, typed: Any, values: Any) -> Any:
            return generate(builder, values, context.get_value_type(typed.return_type))

        # Numba reads the number of arguments from the signature.
        names = ", ".join(f"a{i}" for i in range(len(signature.args)))
        typed = eval(f"lambda context, {names}: (signature, code)", {"signature": signature, "code": code})
        return numba.extending.intrinsic(typed)

    def pointer_to(kind: Any) -> Any:
        return intrinsic(types.CPointer(kind)(types.int64), lambda b, values, kind: b.inttoptr(values[0], kind))

    def entry(builder: Any, values: Any, _: Any) -> Any:
        table = builder.module.globals.get(object_code.TABLE)
        if table is None:
            table = ir.GlobalVariable(builder.module, ir.ArrayType(word, _VERSION + 1), object_code.TABLE)
            table.linkage, table.initializer = "weak", table.value_type(None)  # weak: not a constant
        return builder.load(builder.gep(table, [word(0), values[0]]))

    def widened(builder: Any, values: Any, kind: Any) -> Any:
        bits = builder.shl(builder.zext(values[0], ir.IntType(32)), ir.IntType(32)(16))
        return builder.bitcast(bits, kind)

    def half(builder: Any, values: Any, kind: Any) -> Any:
        return builder.fpext(builder.bitcast(values[0], ir.HalfType()), kind)

    def emitted(count: int, generate: Callable[[Any, Any], None]) -> Any:
        def code(builder: Any, values: Any, kind: Any) -> Any:
            generate(builder, values)
            return kind(0)

        return intrinsic(types.int64(*[types.int64] * count), code)

    def added(builder: Any, values: Any, _: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(values[0], pointer), values[1], "seq_cst")

    def called(builder: Any, values: Any, _: Any) -> Any:
        kind = ir.FunctionType(word, [word, word]).as_pointer()
        return builder.call(builder.inttoptr(values[0], kind), values[1:])

    one, two = types.int64(types.int64), types.int64(types.int64, types.int64)
    return (
        pointer_to,
        (
            intrinsic(types.float32(types.uint16), widened),
            intrinsic(types.float32(types.uint16), half),
            intrinsic(types.int32(types.float32), lambda b, values, kind: b.bitcast(values[0], kind)),
            intrinsic(types.float32(types.int32), lambda b, values, kind: b.bitcast(values[0], kind)),
        ),
        intrinsic(two, added),
        intrinsic(one, lambda b, values, _: b.load_atomic(b.inttoptr(values[0], pointer), "seq_cst", 8)),
        intrinsic(types.int64(types.int64, types.int64, types.int64), called),
        intrinsic(one, entry),
        emitted,
    )
