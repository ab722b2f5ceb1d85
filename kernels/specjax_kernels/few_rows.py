"""The product of a few rows and a matrix on a CPU, in float32, at the price of reading the matrix once.

A step of decoding multiplies a few rows (the tokens to verify) with every weight of the target. On a CPU that takes as
long as reading the weights from memory; a second row could be free. XLA:CPU takes half as long again for two rows, and
twice as long for four. This kernel reads each weight once, for all rows. Each row's sums are taken in the same order
however many rows there are, so its result is, bit for bit, that of the row alone.

It is compiled by Numba when it is first asked for, and called by XLA through its foreign function interface, whose
structures are those of `xla/ffi/api/c_api.h` in jaxlib's `include`: here, words of 8 bytes at an address.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import inspect
import logging
import math
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32

MOST_ROWS = 8
"""Up to which XLA's own product takes longer (measured: 8 rows, all of SmolLM2-135M's layers)."""

DEEP = 8
"""Rows of the matrix that are read side by side: the sums are loaded and stored once for so many products."""

TOGETHER = 4
"""Rows of x that share one reading from memory into registers; more would not have enough of those. Further rows find
the matrix in the cache."""

PARTS = 8
"""Into which a sum is split where the matrix is narrow: what the threads share out."""

WIDE = 4096
"""Columns of a tile, at most. Narrower ones are slower: memory is read in longer runs."""

_TARGET = "specjax_few_rows"
_FLOAT = 4
_LOG = logging.getLogger(__name__)

# A call's state, in words. It is freed by whoever leaves last, as a helper may come when all is done.
_NEXT, _DONE, _HOLDERS, _ROWS, _DEPTH, _COLUMNS, _X, _MATRIX, _OUT, _PARTS, _TILES, _WIDTH, _ARGUMENTS = range(13)
_STATE_BYTES = 8 * (_ARGUMENTS + 5)


def parts_of(depth: int, columns: int) -> int:
    """Into how many sums the product of a [depth, columns] matrix is split, which are then added; 0: none fits.

    With the tiles of the columns these are what the threads share out.
    """
    wanted = max(1, PARTS // math.ceil(columns / WIDE))
    return next((parts for parts in range(wanted, 0, -1) if depth % (parts * DEEP) == 0), 0)


def takes(rows: int, depth: int, columns: int, dtype: Any) -> bool:
    """Whether `few_rows` is made for such a product, and can be called in this process (`unmet`)."""
    fits = 0 < rows <= MOST_ROWS and columns > 0 and parts_of(depth, columns) > 0
    return fits and dtype == jnp.float32 and unmet() is None


@jax.custom_jvp
def few_rows(x: Float32[Array, "N M"], matrix: Float32[Array, "M O"]) -> Float32[Array, "N O"]:
    """x times matrix, on a CPU.

    Args:
        x: up to `MOST_ROWS` rows.
        matrix: read where it lies, row after row.

    Differentiable (its derivatives are XLA's products); `jax.vmap` calls it for one after the other.

    Raises:
        RuntimeError: it cannot be called in this process, see `unmet`.
        ValueError: more rows, or a depth that is no multiple of `DEEP`.
    """
    if (missing := unmet()) is not None:
        raise RuntimeError(missing)
    (rows, depth), columns = x.shape, matrix.shape[1]
    if not takes(rows, depth, columns, x.dtype):
        raise ValueError(
            f"few_rows takes 1 to {MOST_ROWS} rows of float32, of a multiple of {DEEP} numbers; "
            f"got {rows} rows of {depth}, {x.dtype}"
        )
    result = jax.ShapeDtypeStruct((parts_of(depth, columns), rows, columns), jnp.float32)
    sums = jax.ffi.ffi_call(_TARGET, result, vmap_method="sequential")(x, matrix)
    # Added one by one: that becomes a part of what follows, where a reduction would be an operation of its own.
    return sum(sums[1:], start=sums[0])


@few_rows.defjvp
def _few_rows_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    (x, matrix), (dx, dmatrix) = primals, tangents
    return few_rows(x, matrix), product(dx, matrix) + product(x, dmatrix)


@functools.cache
def unmet() -> str | None:
    """Why the kernel cannot be called in this process; None: it can. The first call compiles it (2 s)."""
    try:
        _register()
    except Exception as error:
        # Numba may be absent or not know this Python or processor; XLA's own product then does the work, slower.
        reason = f"the kernel for a few rows on a CPU cannot be made here: {type(error).__name__}: {error}"
        _LOG.warning("%s. XLA's product is used instead; speculative decoding is slower", reason)
        return reason
    return None


def _register() -> None:
    numba: Any = importlib.import_module("numba")
    handler = _compile(numba)
    function = ctypes.cast(handler.address, ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p))
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(function), platform="cpu")
    _KEPT.append(handler)


_KEPT: list[Any] = []
"""What XLA calls must not be collected."""


def _source_of_sums(rows: int) -> str:
    """Source of a loop over one tile: so many rows of x times `DEEP` rows of the matrix, added to the sums.

    Written out, since Numba has no arrays that live in registers.
    """
    lines = ["def add(x, matrix, out, depth, columns, width):"]
    for row in range(rows):
        lines += [f"    out{row} = carray(floats({_FLOAT} * {row} * columns + out), (width,))"]
        lines += [f"    row{row} = carray(floats({_FLOAT} * {row} * depth + x), ({DEEP},))"]
        lines += [f"    x{row}_{m} = row{row}[{m}]" for m in range(DEEP)]
    lines += [f"    matrix{m} = carray(floats({_FLOAT} * {m} * columns + matrix), (width,))" for m in range(DEEP)]
    lines += ["    for column in range(width):"]
    lines += [f"        weight{m} = matrix{m}[column]" for m in range(DEEP)]
    for row in range(rows):
        products = "".join(f" + x{row}_{m} * weight{m}" for m in range(DEEP))
        lines += [f"        out{row}[column] = out{row}[column]{products}"]
    return "\n".join(lines)


def _instructions(numba: Any) -> tuple[Any, Any, Any, Any, Any]:
    """What Numba lacks: an address as an array of words or floats, atomic addition and loading, a call by address."""
    ir: Any = importlib.import_module("llvmlite.ir")
    word, address_type = ir.IntType(64), numba.types.int64
    pointer = word.as_pointer()

    def instruction(result: Any, count: int, build: Any) -> Any:
        arguments = ", ".join("abc"[:count])
        generate = lambda context, builder, signature, given: build(  # noqa: E731
            builder, context.get_value_type(signature.return_type), *given
        )
        scope: dict[str, Any] = {"signature": result(*[address_type] * count), "generate": generate}
        exec(f"def typed(context, {arguments}):\n    return signature, generate", scope)
        return numba.extending.intrinsic(scope["typed"])

    def added(builder: Any, _: Any, at: Any, amount: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(at, pointer), amount, "seq_cst")

    def loaded(builder: Any, _: Any, at: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(at, pointer), "seq_cst", 8)

    def called(builder: Any, _: Any, function: Any, argument: Any) -> Any:
        return builder.call(builder.inttoptr(function, ir.FunctionType(word, [word]).as_pointer()), [argument])

    def cast(builder: Any, kind: Any, at: Any) -> Any:
        return builder.inttoptr(at, kind)

    return (
        instruction(numba.types.CPointer(numba.types.int64), 1, cast),
        instruction(numba.types.CPointer(numba.types.float32), 1, cast),
        instruction(address_type, 2, added),
        instruction(address_type, 1, loaded),
        instruction(address_type, 2, called),
    )


def _compile(numba: Any) -> Any:
    """The handler that XLA calls: XLA_FFI_Error* (XLA_FFI_CallFrame*)."""
    importlib.import_module("numba.extending")
    words, floats, add, load, call = _instructions(numba)
    carray = numba.carray
    # No reassociation: every row's sums are taken in the order that is written, whatever the number of rows.
    options: dict[str, Any] = {"fastmath": {"contract"}, "error_model": "numpy"}
    inlined = numba.njit(inline="always", **options)

    def compiled(function: Any) -> Any:
        # Unwrapped: the tests wrap every function here to check its arguments.
        signature = numba.types.int64(numba.types.int64)
        return numba.cfunc(signature, **options)(inspect.unwrap(function))

    def sums_of(rows: int) -> Any:
        scope: dict[str, Any] = {"carray": carray, "floats": floats}
        exec(_source_of_sums(rows), scope)
        return inlined(scope["add"])

    add1, add2, add3, add4 = (sums_of(rows) for rows in range(1, TOGETHER + 1))
    libc = ctypes.CDLL(None)
    allocate, free = (ctypes.cast(function, ctypes.c_void_p).value for function in (libc.malloc, libc.free))

    @compiled
    def run(state: int) -> int:
        """Take tiles until there are none left, then leave."""
        s = carray(words(state), (_ARGUMENTS,))
        rows, depth, columns = s[_ROWS], s[_DEPTH], s[_COLUMNS]
        deep = depth // s[_PARTS]
        while True:
            taken = add(state + 8 * _NEXT, 1)
            if taken >= s[_PARTS] * s[_TILES]:
                break
            part, first = taken // s[_TILES], (taken % s[_TILES]) * s[_WIDTH]
            width = min(s[_WIDTH], columns - first)
            out = s[_OUT] + _FLOAT * (part * rows * columns + first)
            for row in range(rows):
                zeroed = carray(floats(out + _FLOAT * row * columns), (width,))
                for column in range(width):
                    zeroed[column] = 0.0
            for m in range(part * deep, part * deep + deep, DEEP):
                matrix = s[_MATRIX] + _FLOAT * (m * columns + first)
                for row in range(0, rows, TOGETHER):
                    x = s[_X] + _FLOAT * (row * depth + m)
                    to = out + _FLOAT * row * columns
                    left = rows - row
                    if left >= 4:
                        add4(x, matrix, to, depth, columns, width)
                    elif left == 3:
                        add3(x, matrix, to, depth, columns, width)
                    elif left == 2:
                        add2(x, matrix, to, depth, columns, width)
                    else:
                        add1(x, matrix, to, depth, columns, width)
            add(state + 8 * _DONE, 1)
        if add(state + 8 * _HOLDERS, -1) == 1:
            call(free, state)
        return 0

    run_address = run.address
    _KEPT.append(run)
    schedule_field, destroy_field, version = _interface()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    @compiled
    def handle(call_frame: int) -> int:
        frame = carray(words(call_frame), (22,))
        if frame[1] != 0:  # an extension that asks for the version of the interface
            extension = carray(words(frame[1]), (4,))
            carray(words(extension[3]), (4,))[3] = version
            return 0
        inputs = carray(words(frame[9]), (2,))
        x, matrix = carray(words(inputs[0]), (6,)), carray(words(inputs[1]), (6,))
        out = carray(words(carray(words(frame[14]), (1,))[0]), (6,))
        x_shape, out_shape = carray(words(x[5]), (2,)), carray(words(out[5]), (3,))
        state = call(allocate, _STATE_BYTES)
        s = carray(words(state), (_ARGUMENTS + 5,))
        s[_X], s[_MATRIX], s[_OUT] = x[3], matrix[3], out[3]
        s[_PARTS], s[_ROWS], s[_COLUMNS], s[_DEPTH] = out_shape[0], out_shape[1], out_shape[2], x_shape[1]
        s[_TILES] = (s[_COLUMNS] + WIDE - 1) // WIDE
        # A multiple of 16: lines of the cache.
        s[_WIDTH] = ((s[_COLUMNS] + s[_TILES] - 1) // s[_TILES] + 15) // 16 * 16
        tiles = s[_PARTS] * s[_TILES]
        helpers = min(cores, tiles) - 1
        s[_NEXT], s[_DONE], s[_HOLDERS] = 0, 0, helpers + 2
        interface = frame[2]
        schedule = carray(words(interface + 8 * schedule_field), (1,))[0]
        for _ in range(helpers):
            s[_ARGUMENTS], s[_ARGUMENTS + 1], s[_ARGUMENTS + 2] = 40, 0, frame[3]
            s[_ARGUMENTS + 3], s[_ARGUMENTS + 4] = run_address, state
            failed = call(schedule, state + 8 * _ARGUMENTS)
            if failed != 0:  # no pool of threads here: this one does it all
                s[_ARGUMENTS], s[_ARGUMENTS + 1], s[_ARGUMENTS + 2] = 24, 0, failed
                call(carray(words(interface + 8 * destroy_field), (1,))[0], state + 8 * _ARGUMENTS)
                add(state + 8 * _HOLDERS, -1)
        call(run_address, state)
        # A helper that took a tile is at work on it; none waits for a thread.
        while load(state + 8 * _DONE) < tiles:
            pass
        if add(state + 8 * _HOLDERS, -1) == 1:
            call(free, state)
        return 0

    return handle


def _interface() -> tuple[int, int, int]:
    """Words into XLA_FFI_Api of the functions that are called, and its version as XLA_FFI_Api_Version has it."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    functions = re.findall(r"_XLA_FFI_API_STRUCT_FIELD\(XLA_FFI_(\w+)\)", header)
    numbers = [re.search(rf"#define XLA_FFI_API_{name} (\d+)", header) for name in ("MAJOR", "MINOR")]
    major, minor = (int(found[1]) for found in numbers if found)
    if major != 0:
        raise RuntimeError(f"jaxlib's foreign function interface has version {major}.{minor}; 0 is known here")
    before = 6  # its size, extensions, version (3) and internal functions
    schedule, destroy = (before + functions.index(name) for name in ("ThreadPool_Schedule", "Error_Destroy"))
    return schedule, destroy, major | minor << 32
