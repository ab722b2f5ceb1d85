"""The language of the GPU kernels, and the choice of its compiler: Pallas or Triton.

A kernel is a function with the decorator `device`, in the subset that Triton and Pallas share. Its names are those of
`triton.language` (`tl`), and three more: `at` (an address), `dot` (a product) and `loop`. Here they are operations of
JAX on Pallas's references, so that Pallas takes a kernel as it stands. `triton.py` compiles the same source with
Triton's `tl`, and an `at`, `dot` and `loop` of its own. Arguments annotated `tl.constexpr` are Python values.

Both compilers are modules with a function `run`:

    run(kernel, inputs, outputs, grid=, warps=, stages=, s=) -> outputs

`inputs` are arrays and `outputs` shapes, by the names of the kernel's parameters; `s` are its `Constants`. Pallas's
Triton backend is deprecated (jax 0.11) and the default while JAX has it.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

DIALECTS = {"pallas": "specjax_kernels.pallas_triton", "triton": "specjax_kernels.triton"}
"""Name -> module with `run`; `UNMET`, the reason why this process cannot make its kernels, or None; and `refuse()`,
which raises NotImplementedError if the device is missing, too."""


class Constants(types.SimpleNamespace):
    """Constants of a kernel, by name."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride, reportIncompatibleMethodOverride]
        return hash(tuple(self.__dict__.items()))


def device(function: Any) -> Any:
    """Marks a kernel, or a function that kernels call."""
    function.__device__ = True
    return function


def dialect() -> str:
    """ "pallas" if this jax has Pallas's Triton backend, else "triton".

    Raises:
        NotImplementedError: neither is installed; names what to install.
    """
    problems = []
    for name in DIALECTS:
        if (problem := compiler(name).UNMET) is None:
            return name
        problems.append(problem)
    raise NotImplementedError(f"no compiler of GPU kernels is installed. {'. '.join(problems)}")


def compiler(name: str) -> Any:
    """The module of a dialect. Imported late: a process without a GPU starts sooner."""
    return importlib.import_module(DIALECTS[name])


def lowers() -> bool:
    """True if kernels can be made for the target of this trace. Without a GPU, Pallas lowers for any, and Triton for
    the device of an abstract mesh."""
    try:
        compiler(dialect()).refuse()
    except NotImplementedError:
        return False
    return True


def run(*arguments: Any, **options: Any) -> dict[str, jax.Array]:
    """`run` of the installed compiler."""
    return compiler(dialect()).run(*arguments, **options)


def at(array: Any, sizes: tuple[int, ...], index: tuple[Any, ...]) -> Any:
    """The addresses of elements of an array: `index` for each axis, `sizes` of all axes but the first."""
    return array.at[index]


def dot(a: jax.Array, b: jax.Array, transposed: bool) -> jax.Array:
    """a, rounded to b's dtype, times b or the transpose of b. Sums are float32, products of float32 exact."""
    precision = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    return jax.lax.dot_general(a.astype(b.dtype), b, dims, precision=precision, preferred_element_type=jnp.float32)


def loop(
    body: Callable[..., Any], begin: Any, end: Any, step: int, carry: Any, fixed: Any, s: Any, pipelined: bool
) -> Any:
    """carry = body(i, carry, fixed, s) for i in range(begin, end, step). `pipelined`: loads may precede their use."""
    trips = (jnp.asarray(end, jnp.int32) - begin + (step - 1)) // step
    return jax.lax.fori_loop(jnp.int32(0), trips, lambda n, carry: body(begin + n * step, carry, fixed, s), carry)


def _cast(x: jax.Array, dtype: Any, bitcast: bool = False) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, dtype) if bitcast else x.astype(dtype)


def _pallas() -> Any:
    """Imported late: a process without a GPU starts sooner."""
    return importlib.import_module("jax.experimental.pallas")


def _memory() -> Any:
    return importlib.import_module("jax.experimental.pallas.triton")


_SAME = (
    "full", "zeros", "where", "abs", "exp", "exp2", "maximum", "minimum", "max", "min", "sum",
    "float16", "float32", "int16", "int32", "uint32",
)  # fmt: skip
"""Names with one meaning in `triton.language` and `jax.numpy`."""

tl: Any = types.SimpleNamespace(
    program_id=lambda axis: _pallas().program_id(axis),
    load=lambda pointer, **options: _memory().load(pointer, **options),
    store=lambda pointer, value, **options: _memory().store(pointer, value.astype(pointer.dtype), **options),
    arange=lambda start, stop: jnp.arange(start, stop, dtype=jnp.int32),
    cast=_cast,
    static_range=range,
    constexpr=int,
    cdiv=lambda number, by: (number + (by - 1)) // by,
    **{name: getattr(jnp, name) for name in _SAME},
)
