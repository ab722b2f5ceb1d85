"""The GPU kernels in Triton, called through jax-triton.

`bound` compiles the source of `gpu_attention` and the others with Triton's meaning of their names. In it arrays are
pointers to numbers in memory order; pools and batches of long blocks exceed 2**31 numbers, so offsets have 64 bits.

Without a GPU the kernels can be lowered by `trace(...).lower(lowering_platforms=("cuda",))` under an abstract mesh that
names the GPU (see `refuse`), which compiles them to PTX. TRITON_INTERPRET=1 in the environment selects Triton's
interpreter at the start of a process, for tests.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from typing import Any, no_type_check

import jax
from jax import Array
from jax.interpreters import partial_eval

from specjax_kernels.platforms import refuse_unless_ampere

jax_triton: Any = None
triton: Any = None
tl: Any = None
UNMET: str | None = None
"""The reason why this process cannot make kernels."""
INTERPRETED: Any = False
try:
    jax_triton = importlib.import_module("jax_triton")
    triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")
    INTERPRETED = bool(triton.knobs.runtime.interpret)
    INTERPRETER = tl.constexpr(INTERPRETED)  # kernels read no other globals
except (ImportError, AttributeError, OSError) as error:
    UNMET = f"'triton' needs Python 3.12 or later and pip install -e '.[triton]': {type(error).__name__}: {error}"
if UNMET is None and tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12):
    # jax-triton 0.4.1 registers a rule for dead code with the two arguments of jax 0.11; jax 0.12 passes three and
    # every trace ends in a TypeError. JAX's default rule drops a call whose results are unused, which is right here.
    partial_eval.dce_rules.pop(jax_triton.triton_lib.triton_kernel_call_p, None)


def jit(function: Any) -> Any:
    """`triton.jit`, if Triton is installed."""
    return function if UNMET is not None else triton.jit(function)


def refuse() -> None:
    """Raises NotImplementedError unless this process can run or lower the kernels."""
    if UNMET is not None:
        raise NotImplementedError(f"implementation {UNMET}")
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    if platform not in ("gpu", "cuda"):
        raise NotImplementedError(
            f"implementation 'triton' of tree_attention runs on NVIDIA GPUs, and the default backend is {platform!r}. "
            "Without one it can be lowered, under jax.sharding.use_abstract_mesh of a mesh with "
            'abstract_device=AbstractDevice("NVIDIA H200", None, "cuda"). Implementation \'xla\' runs everywhere'
        )
    if device is None:
        refuse_unless_ampere("triton")


def run(
    kernel: Any, inputs: dict[str, Array], outputs: dict[str, Any], *, grid: tuple[int, ...], warps: int, stages: int,
    s: Any,
) -> dict[str, Array]:  # fmt: skip
    """See `gpu_language`."""
    capability = jax_triton.triton_lib.make_cuda_target(None, 1).arch
    # By default Triton writes the newest PTX that the assembler in its wheel reads (9.4 for Triton 3.9), but JAX's
    # assembler reads it: CUDA 12.6 or later takes 8.5, and a CUDA for Blackwell takes 8.8.
    ptx_version = 85 if capability < 100 else 88
    results = jax_triton.triton_call(
        kernel=bound(kernel),
        name=kernel.__name__,
        out_type=tuple(outputs.values()),
        grid=grid,
        num_warps=warps,
        num_stages=stages,
        compute_capability=capability,
        # Triton's default is about to change, and warns; a fused multiply-add is no less exact.
        backend_options={"enable_fp_fusion": True, "ptx_version": ptx_version},
        **inputs,
        s=s,
    )
    return dict(zip(outputs, results, strict=True))


@functools.cache
def bound(kernel: Any) -> Any:
    """A kernel of `gpu_language`, and the functions that it calls, as functions of Triton."""
    module = sys.modules[kernel.__module__]
    scope: dict[str, Any] = {"__name__": module.__name__, "tl": tl, "at": at, "dot": dot, "loop": loop}
    for name, function in vars(module).items():
        if getattr(function, "__device__", False):
            again = types.FunctionType(function.__code__, scope, name)
            again.__annotations__ = function.__annotations__
            scope[name] = jit(again)
    return scope[kernel.__name__]


@jit
@no_type_check
def at(array, sizes, index):
    place = index[0].to(tl.int64)
    for axis in tl.static_range(len(sizes)):
        place = place * sizes[axis] + index[axis + 1]
    return array + place


@jit
@no_type_check
def dot(a, b, transposed: tl.constexpr):
    if INTERPRETER:  # it multiplies the bits of bfloat16 instead of the numbers, and rounds 1.9999 to 1.0
        a, b = a.to(tl.float32), b.to(tl.float32)
    a = a.to(b.dtype)
    if transposed:
        b = tl.trans(b)
    return tl.dot(a, b, input_precision="ieee")


@jit
@no_type_check
def loop(body: tl.constexpr, begin, end, step: tl.constexpr, carry, fixed, s: tl.constexpr, pipelined: tl.constexpr):
    for i in tl.range(begin, end, step, num_stages=None if pipelined else 1):
        carry = body(i, carry, fixed, s)
    return carry
