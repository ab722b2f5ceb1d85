"""Kernels for a CPU: functions compiled by Numba, called by XLA, their work shared among XLA's threads.

A kernel is two functions of the addresses that XLA hands over: how many tiles a call has, and the work of one tile.
Whoever is free takes the next tile: the thread that XLA calls takes part, so that nothing waits for a thread that does
not come, and a helper that comes when all is done just leaves. XLA's foreign function interface is that of
`xla/ffi/api/c_api.h` in jaxlib's `include`; its structures are read here as words of 8 bytes at an address.

The machine code knows no address of this process: what it needs of one stands in a table. So it can be kept
(`cpu_code`).
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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax

from specjax_kernels import cpu_code

_LOG = logging.getLogger(__name__)

# A call's state, in words. Whoever leaves last frees it.
_NEXT, _DONE, _HOLDERS, _TILES, _TILE, _CALL, _ARGUMENTS = range(7)
_WORDS = _ARGUMENTS + 5

# The table: addresses of functions, how many threads may share a call, and XLA's interface (`_interface`).
_WORK, _OF_TILE, _ALLOCATE, _FREE, _CORES, _SCHEDULE, _DESTROY, _VERSION = range(8)
_SYMBOLS = "specjax_handle", "specjax_work", "specjax_tile"


class Tools(NamedTuple):
    """What kernels are written with, beyond Numba's own."""

    inlined: Callable[[Any], Any]  # of a function: compiled as a part of its callers
    reordered: Callable[[Any], Any]  # of a function whose sums may be taken in any order: for loops over one sum
    carray: Any  # `numba.carray`: (pointer, shape) -> array
    words: Any  # address -> int64 pointer
    floats: Any  # address -> float32 pointer
    integers: Any  # address -> int32 pointer
    bits: Any  # float32 -> the int32 of the same bits
    float_of: Any  # and back
    argument: Any  # (call, i) -> address of the i-th argument's data
    argument_size: Any  # (call, i, axis) -> its size there
    result: Any  # (call, i) -> address of the i-th result's data
    result_size: Any  # (call, i, axis) -> its size there


def callable_here() -> bool:
    """Whether this process computes on one CPU device. On an accelerator's host nobody is to wait for a CPU's kernel to
    be compiled; and of several devices' arrays XLA would gather the whole for a call, which it cannot split."""
    return jax.default_backend() == "cpu" and jax.local_device_count() == 1


Build: TypeAlias = Callable[[Tools], tuple[Any, Any]]
"""Gives the two functions of a kernel, such that Numba can compile them: tiles(call) -> int, tile(call, index) -> 0."""

_LOCK = threading.Lock()
_REGISTERED: dict[str, Future[str | None]] = {}


def register(name: str, build: Build) -> str | None:
    """Compiles a kernel, or loads what was kept, and tells XLA of it, once in a process: programs are traced in several
    threads.

    Args:
        name: for `jax.ffi.ffi_call`.

    Returns:
        Why that cannot be done here, once also as a warning; None: it is done.
    """
    (future,) = register_in_turn([(name, build)])
    return future.result()


def register_in_turn(
    kernels: Sequence[tuple[str, Build]], wait: Callable[[str], None] | None = None
) -> list[Future[str | None]]:
    """`register` for each that nobody has asked for yet; who asks for one from now on waits for it, and not for those
    that come after it.

    Args:
        wait: called with the name of each before it is compiled.

    Returns:
        What `register` returns for each, or will: others may be at it.
    """
    with _LOCK:
        mine = [kernel for kernel in kernels if kernel[0] not in _REGISTERED]
        _REGISTERED.update((name, Future()) for name, _ in mine)
        futures = [_REGISTERED[name] for name, _ in kernels]
    try:
        for name, build in mine:
            if wait is not None:
                wait(name)
            _REGISTERED[name].set_result(_register(name, build))
    except BaseException as error:  # Ctrl-C: nobody else waits for ever, and a later call tries again
        with _LOCK:
            left = [_REGISTERED.pop(name) for name, _ in mine if not _REGISTERED[name].done()]
        for future in left:
            future.set_exception(error)
        raise
    return futures


def _register(name: str, build: Build) -> str | None:
    try:
        outside = known_outside()  # before seconds are spent on compiling
        code = cpu_code.kept(name, build, lambda: _compile(build))

        def table(addresses: Mapping[str, int]) -> list[int]:
            return [addresses["specjax_work"], addresses["specjax_tile"], *outside]

        address = cpu_code.load(code, _SYMBOLS, table)["specjax_handle"]
        function = ctypes.cast(address, ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p))
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu")
    except Exception as error:
        # Numba may be absent, or not know this Python or processor: XLA does the work then, slower.
        reason = f"the CPU kernel {name} cannot be made here: {type(error).__name__}: {error}"
        _LOG.warning("%s. XLA's own operations are used instead; decoding is slower", reason)
        return reason
    return None


def known_outside() -> list[int]:
    """The table from `_ALLOCATE` on.

    Raises:
        Exception: of several kinds; kernels cannot be called here.
    """
    libc = ctypes.CDLL(None)
    allocate, free = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in (libc.malloc, libc.free))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return [allocate, free, cores, *_interface()]


def _compile(build: Build) -> bytes:
    tools, compiled = _workshop()
    functions = zip(_SYMBOLS, compiled(*build(tools)), strict=True)
    return cpu_code.link({symbol: (function.inspect_llvm(), function.native_name) for symbol, function in functions})


@functools.cache
def _workshop() -> tuple[Tools, Callable[[Any, Any], tuple[Any, ...]]]:
    """The tools, and what makes of a kernel's two functions the three of `_SYMBOLS`. The first is a handler:
    XLA_FFI_Error* (XLA_FFI_CallFrame*)."""
    numba: Any = importlib.import_module("numba")
    importlib.import_module("numba.extending")
    carray, types = numba.carray, numba.types
    words, floats, integers, bits, float_of, add, load, call, entry_of = _instructions(numba)

    # Products and sums may be fused, but are taken in the order in which they are written.
    options: dict[str, Any] = {"fastmath": {"contract"}, "error_model": "numpy"}

    # Unwrapped: the tests wrap every function of the package to check its arguments.
    def inlined(function: Any) -> Any:
        return numba.njit(inline="always", **options)(inspect.unwrap(function))

    def reordered(function: Any) -> Any:
        flags = options["fastmath"] | {"reassoc"}
        return numba.njit(**options | {"fastmath": flags})(inspect.unwrap(function))

    def entry(signature: Any) -> Any:
        return lambda function: numba.cfunc(signature, **options)(inspect.unwrap(function))

    def buffers_at(field: int) -> tuple[Any, Any]:
        """Of the arguments or results: the words of the i-th XLA_FFI_Buffer, as its data and a size."""

        @inlined
        def buffer(frame: int, index: int) -> Any:
            buffers = carray(words(carray(words(frame), (field + 1,))[field]), (index + 1,))
            return carray(words(buffers[index]), (6,))

        @inlined
        def data(frame: int, index: int) -> int:
            return buffer(frame, index)[3]

        @inlined
        def size(frame: int, index: int, axis: int) -> int:
            return carray(words(buffer(frame, index)[5]), (axis + 1,))[axis]

        return data, size

    one, two = types.int64(types.int64), types.int64(types.int64, types.int64)

    @entry(one)
    def work(state: int) -> int:
        """Take tiles until there are none left, then leave."""
        s = carray(words(state), (_WORDS,))
        while True:
            taken = add(state + 8 * _NEXT, 1)
            if taken >= s[_TILES]:
                break
            call(s[_TILE], s[_CALL], taken)
            add(state + 8 * _DONE, 1)
        if add(state + 8 * _HOLDERS, -1) == 1:
            call(entry_of(_FREE), state, 0)
        return 0

    def compiled(tiles: Any, tile: Any) -> tuple[Any, ...]:
        tiles = inlined(tiles)

        @entry(one)
        def handle(frame: int) -> int:
            f = carray(words(frame), (22,))
            extension = f[1]
            if extension != 0 and carray(words(extension), (4,))[1] & 0xFFFFFFFF == 1:
                # Asks for the interface's version.
                carray(words(carray(words(extension), (4,))[3]), (4,))[3] = entry_of(_VERSION)
                return 0
            count = tiles(frame)
            state = call(entry_of(_ALLOCATE), 8 * _WORDS, 0)
            s = carray(words(state), (_WORDS,))
            helpers = max(0, min(entry_of(_CORES), count) - 1)
            s[_NEXT], s[_DONE], s[_HOLDERS], s[_TILES] = 0, 0, helpers + 2, count
            s[_TILE], s[_CALL] = entry_of(_OF_TILE), frame
            for scheduled in range(helpers):
                s[_ARGUMENTS], s[_ARGUMENTS + 1], s[_ARGUMENTS + 2] = 40, 0, f[3]
                s[_ARGUMENTS + 3], s[_ARGUMENTS + 4] = entry_of(_WORK), state
                failed = call(carray(words(f[2] + 8 * entry_of(_SCHEDULE)), (1,))[0], state + 8 * _ARGUMENTS, 0)
                if failed != 0:  # there is no pool of threads: this one does it all
                    s[_ARGUMENTS], s[_ARGUMENTS + 1], s[_ARGUMENTS + 2] = 24, 0, failed
                    call(carray(words(f[2] + 8 * entry_of(_DESTROY)), (1,))[0], state + 8 * _ARGUMENTS, 0)
                    add(state + 8 * _HOLDERS, scheduled - helpers)
                    break
            call(entry_of(_WORK), state, 0)
            while load(state + 8 * _DONE) < count:  # a helper that took a tile is at work on it
                pass
            if add(state + 8 * _HOLDERS, -1) == 1:
                call(entry_of(_FREE), state, 0)
            return 0

        return handle, work, entry(two)(tile)

    tools = Tools(inlined, reordered, carray, words, floats, integers, bits, float_of, *buffers_at(9), *buffers_at(14))
    return tools, compiled


def _instructions(numba: Any) -> tuple[Any, ...]:
    """What Numba lacks: an address as a pointer, a float's bits, atomic addition and loading, a call by address, a word
    of the table."""
    ir: Any = importlib.import_module("llvmlite.ir")
    word, types = ir.IntType(64), numba.types
    pointer = word.as_pointer()

    def cast(name: str, given: Any, kind: Any) -> Any:
        def typed(context, value):
            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                return getattr(builder, name)(values[0], context.get_value_type(signature.return_type))

            return kind(given), generate

        return numba.extending.intrinsic(inspect.unwrap(typed))

    def added(context, at, amount):
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.atomic_rmw("add", builder.inttoptr(values[0], pointer), values[1], "seq_cst")

        return types.int64(types.int64, types.int64), generate

    def loaded(context, at):
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.load_atomic(builder.inttoptr(values[0], pointer), "seq_cst", 8)

        return types.int64(types.int64), generate

    def called(context, function, first, second):
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            kind = ir.FunctionType(word, [word, word]).as_pointer()
            return builder.call(builder.inttoptr(values[0], kind), values[1:])

        return types.int64(types.int64, types.int64, types.int64), generate

    def entry(context, index):
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            table = builder.module.globals.get(cpu_code.TABLE)
            if table is None:
                table = ir.GlobalVariable(builder.module, ir.ArrayType(word, _VERSION + 1), cpu_code.TABLE)
                table.linkage, table.initializer = "weak", table.value_type(None)  # weak: it may come to hold more
            return builder.load(builder.gep(table, [word(0), values[0]]))

        return types.int64(types.int64), generate

    return (
        cast("inttoptr", types.int64, types.CPointer(types.int64)),
        cast("inttoptr", types.int64, types.CPointer(types.float32)),
        cast("inttoptr", types.int64, types.CPointer(types.int32)),
        cast("bitcast", types.float32, types.int32),
        cast("bitcast", types.int32, types.float32),
        *(numba.extending.intrinsic(inspect.unwrap(typed)) for typed in (added, loaded, called, entry)),
    )


def _interface() -> tuple[int, int, int]:
    """The last words of the table: where in XLA_FFI_Api the functions stand that are called, in words, and its version
    as XLA_FFI_Api_Version has it."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    functions = re.findall(r"_XLA_FFI_API_STRUCT_FIELD\(XLA_FFI_(\w+)\)", header)
    numbers = [re.search(rf"#define XLA_FFI_API_{name} (\d+)", header) for name in ("MAJOR", "MINOR")]
    major, minor = (int(found[1]) for found in numbers if found)
    if major != 0:
        raise RuntimeError(f"jaxlib's foreign function interface has version {major}.{minor}; 0 is known here")
    before = 6  # its size, extensions, version (3) and internal functions
    schedule, destroy = (before + functions.index(name) for name in ("ThreadPool_Schedule", "Error_Destroy"))
    return schedule, destroy, major | minor << 32
