"""`tree_attention` for NVIDIA GPUs, in Triton itself, called through jax-triton. Algorithm and grid: `pallas_triton`.

Without a GPU it can be lowered, which compiles the kernels to PTX, by `trace(...).lower(lowering_platforms=("cuda",))`
under an abstract mesh that names the GPU (see `refuse`); or, for tests, run by Triton's interpreter in numpy, with
TRITON_INTERPRET=1 in the environment from the start of the process.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax_kernels.call import Call
from specjax_kernels.launch import Blocks, launch_for, padded, refuse_unless_ampere, too_wide
from specjax_kernels.masks import words
from specjax_kernels.triton_kernels import attend, combine
from specjax_kernels.triton_packages import INTERPRETED, UNMET, jax_triton

LOG2_E = math.log2(math.e)  # the GPU's exponent has base 2: scores are kept in units of log 2


def tree_attention(call: Call, *, blocks: Blocks | None = None) -> Array:
    """See `specjax_kernels.tree_attention`. `blocks`: launch parameters in place of the table's.

    Raises as `refuse`, and for too wide heads.
    """
    refuse()
    shape, dtype = call.shape, call.q.dtype
    B, H, N, C, K, G, E, Ev, P, S, T = shape[:11]
    if problem := too_wide(str(dtype), E, Ev):
        raise NotImplementedError(f"implementation 'triton' has {problem}")
    launch = launch_for(str(dtype), max(E, Ev), N * G, B * K, T * S, blocks=blocks)
    rows, heads, splits = launch.rows * launch.tiles, B * K, launch.splits
    # A kernel has a pointer for everything; what a call does not have is never read, and any array stands in for it.
    nothing = call.prefix_length
    inputs: dict[str, Any] = dict(zip(Call._fields[:9], call[:9], strict=True))
    inputs["bits"] = nothing if shape.causal else call.bits
    if shape.latent:
        inputs |= {"v_block": call.k_block, "v_pages": call.k_pages}
    # Triton's interpreter rounds 1.9999 to the bfloat16 1.0 (the carry into an odd exponent is lost).
    out = jax.ShapeDtypeStruct((B, N, H, Ev), jnp.float32 if INTERPRETED else dtype)
    partial = jax.ShapeDtypeStruct((heads, splits, rows), jnp.float32)
    mixed = jax.ShapeDtypeStruct((heads, splits, rows, Ev), jnp.float32)
    shared = {"N": N, "K": K, "G": G, "EV": Ev, "SPLITS": splits, "VP": padded(Ev)}
    sizes = {"C": C, "E": E, "P": P, "S": S, "T": T, "EP": padded(E), "WORDS": words(C)}
    attended = _call(
        attend,
        inputs if splits > 1 else inputs | {"peaks": nothing, "totals": nothing},
        {"peaks": partial, "totals": partial, "mixed": mixed} if splits > 1 else {"mixed": out},
        grid=(heads, launch.tiles, splits),
        warps=launch.warps,
        stages=launch.stages,
        **shared,
        **sizes,
        LATENT=shape.latent,
        CAUSAL=shape.causal,
        SCALE=float(shape.scale * LOG2_E if shape.softcap is None else shape.scale / shape.softcap),
        WINDOW=shape.window or 0,
        SOFTCAP=float((shape.softcap or 0) * LOG2_E),
        ROWS=launch.rows,
        TOKENS=launch.tokens,
        UPCAST=INTERPRETED,
    )
    if splits == 1:
        return attended["mixed"].astype(dtype)
    part = max(1, min(splits, 8192 // padded(Ev)))
    warps = max(1, min(8, part * padded(Ev) // 1024))
    grid = (heads, N * G)
    combined = _call(
        combine, attended, {"out": out}, grid=grid, warps=warps, stages=2, **shared, PADDED_ROWS=rows, PART=part
    )
    return combined["out"].astype(dtype)


def refuse() -> None:
    """Raises NotImplementedError, with what would work, unless the kernels can be run or lowered here."""
    if UNMET is not None:
        raise NotImplementedError(UNMET)
    if INTERPRETED:
        return
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    if platform not in ("gpu", "cuda"):
        raise NotImplementedError(
            f"implementation 'triton' of tree_attention runs on NVIDIA GPUs, and the default backend is {platform!r}. "
            "Without one it can be lowered, under jax.sharding.use_abstract_mesh of a mesh with "
            'abstract_device=AbstractDevice("NVIDIA H200", None, "cuda"), or run in Triton\'s interpreter '
            "(TRITON_INTERPRET=1 in the environment). Implementation 'xla' runs everywhere"
        )
    if device is None:
        refuse_unless_ampere("triton")
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    if not any(importlib.util.find_spec(plugin) for plugin in plugins):
        raise NotImplementedError(
            "implementation 'triton' of tree_attention needs JAX's CUDA plugin, for lowering too: "
            f"pip install 'jax[cuda12]' or, without CUDA's libraries, pip install --no-deps "
            f"jax-cuda12-plugin=={jax.__version__}"
        )


def _call(
    kernel: Any,
    inputs: dict[str, Array],
    outputs: dict[str, jax.ShapeDtypeStruct],
    *,
    grid: tuple[int, ...],
    warps: int,
    stages: int,
    **constants: Any,
) -> dict[str, Array]:
    """Runs a kernel, whose parameters are named by `inputs`, `outputs` and `constants`. Returns the outputs."""
    if INTERPRETED:
        run = functools.partial(_interpret, kernel, grid, tuple(inputs), outputs, constants)
        results = jax.pure_callback(run, tuple(outputs.values()), *inputs.values())
    else:
        capability = jax_triton.triton_lib.make_cuda_target(None, 1).arch
        # By itself Triton writes the newest PTX that the assembler in its wheel reads (9.4 for Triton 3.9), but what
        # assembles it is JAX's: CUDA 12.6 or later, which reads 8.5, and for Blackwell has to be one that reads 8.8.
        ptx_version = 85 if capability < 100 else 88
        results = jax_triton.triton_call(
            kernel=kernel,
            name=kernel.fn.__name__,
            out_type=tuple(outputs.values()),
            grid=grid,
            num_warps=warps,
            num_stages=stages,
            compute_capability=capability,
            # Of fusion Triton's default is about to change, and warns; a fused multiply-add is no less exact.
            backend_options={"enable_fp_fusion": True, "ptx_version": ptx_version},
            **inputs,
            **constants,
        )
    return dict(zip(outputs, results, strict=True))


def _interpret(
    kernel: Any,
    grid: tuple[int, ...],
    names: tuple[str, ...],
    outputs: dict[str, jax.ShapeDtypeStruct],
    constants: dict[str, Any],
    *arrays: Any,
) -> tuple[np.ndarray, ...]:
    """Runs a kernel over numpy arrays in Triton's interpreter. Results begin as NaN, which shows what is unwritten."""
    given = {name: np.ascontiguousarray(array) for name, array in zip(names, arrays, strict=True)}
    results = {name: np.full(out.shape, np.nan, out.dtype) for name, out in outputs.items()}
    kernel[grid](**{name: _Memory(array) for name, array in (given | results).items()}, **constants)
    return tuple(results.values())


class _Memory:
    """As much of a torch.Tensor as Triton's interpreter asks of an argument: it copies tensors to the host and back.
    This one is there already."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        kind, bits = array.dtype.name.rstrip("0123456789"), 8 * array.itemsize
        self.dtype = {"float": "fp", "bfloat": "bf", "int": "i", "uint": "u"}[kind] + str(bits)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def _itself(self, *_: Any, **__: Any) -> _Memory:
        return self

    untyped_storage = cpu = new_empty = set_ = copy_ = _itself

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)
