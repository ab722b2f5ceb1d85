"""`tree_attention` for NVIDIA GPUs, in Triton itself, called through jax-triton: the heir of `pallas_triton`.

The algorithm and the grid are those of `pallas_triton`, and `launch` serves both. This module can be imported anywhere;
where Python or a package is too old or missing, or there is no NVIDIA GPU to run on, a call raises NotImplementedError.

Two ways to use it without a GPU:

- lowering, which compiles the kernels to PTX: `trace(...).lower(lowering_platforms=("cuda",))` under an abstract mesh
  that names the GPU (see `refuse`);
- Triton's interpreter, for tests: with TRITON_INTERPRET=1 in the environment from the start of the process, kernels run
  in numpy on the host, one program after the other. Triton decides this once, so a process does one or the other.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax_kernels.launch import Blocks, has_kernels, launch_for, padded, too_wide
from specjax_kernels.masks import Causal, words
from specjax_kernels.triton_interpreter import interpret
from specjax_kernels.triton_kernels import attend, combine
from specjax_kernels.triton_packages import INTERPRETED, UNMET, jax_triton

LOG2_E = math.log2(math.e)
"""The GPU's exponent has base 2: scores are kept in units of log 2."""


class Shape(NamedTuple):
    """Everything static about a call, as the kernels' constants. 0 for a window or a soft cap that is not there."""

    N: int
    C: int
    K: int
    G: int
    E: int
    EV: int
    P: int
    S: int
    T: int
    LATENT: bool  # values are keys[..., :EV]
    CAUSAL: bool
    SCALE: float  # of the scores; with a soft cap, of the tangent's argument
    WINDOW: int
    SOFTCAP: float  # times log2 e


def tree_attention(
    q: Array,
    k_block: Array,
    v_block: Array | None,
    k_pages: Array,
    v_pages: Array | None,
    page_table: Array,
    prefix_length: Array,
    q_positions: Array,
    block_positions: Array,
    mask: Causal | Array,
    *,
    scale: float,
    v_width: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    blocks: Blocks | None = None,
) -> Array:
    """See `specjax_kernels.tree_attention`, which checks the arguments. `blocks`: for the tuner and the tests.

    Raises:
        NotImplementedError: the versions found do not do, there is no NVIDIA GPU to run on or lower for, or a head is
            too wide.
    """
    refuse()
    B, N, H, E = q.shape
    P, S, K, _ = k_pages.shape
    C, T, G = k_block.shape[1], page_table.shape[1], H // K
    width = v_block.shape[-1] if v_block is not None else v_width
    assert width is not None  # the caller has checked it
    if problem := too_wide(str(q.dtype), E, width):
        raise NotImplementedError(f"implementation 'triton' has {problem}")
    shape = Shape(
        N=N,
        C=C,
        K=K,
        G=G,
        E=E,
        EV=width,
        P=P,
        S=S,
        T=T,
        LATENT=v_block is None,
        CAUSAL=isinstance(mask, Causal),
        SCALE=float(scale * LOG2_E if softcap is None else scale / softcap),
        WINDOW=window or 0,
        SOFTCAP=float((softcap or 0) * LOG2_E),
    )
    launch = launch_for(str(q.dtype), max(E, width), N * G, B * K, T * S, blocks=blocks)
    # A kernel has a pointer for everything; what a call does not have is never read, and any array stands in for it.
    inputs = {
        "prefix_length": prefix_length,
        "page_table": page_table,
        "q_positions": q_positions,
        "block_positions": block_positions,
        "bits": prefix_length if isinstance(mask, Causal) else mask,
        "q": q,
        "k_block": k_block,
        "v_block": k_block if v_block is None else v_block,
        "k_pages": k_pages,
        "v_pages": k_pages if v_pages is None else v_pages,
    }
    rows, heads, splits = launch.rows * launch.tiles, B * K, launch.splits
    # Triton's interpreter rounds 1.9999 to the bfloat16 1.0 (the carry into an odd exponent is lost).
    out = jax.ShapeDtypeStruct((B, N, H, width), jnp.float32 if INTERPRETED else q.dtype)
    partial = jax.ShapeDtypeStruct((heads, splits, rows), jnp.float32)
    mixed = jax.ShapeDtypeStruct((heads, splits, rows, width), jnp.float32)
    attended = _call(
        attend,
        inputs if splits > 1 else inputs | {"peaks": prefix_length, "totals": prefix_length},
        {"peaks": partial, "totals": partial, "mixed": mixed} if splits > 1 else {"mixed": out},
        grid=(heads, launch.tiles, splits),
        warps=launch.warps,
        stages=launch.stages,
        **shape._asdict(),
        WORDS=words(C),
        ROWS=launch.rows,
        TOKENS=launch.tokens,
        SPLITS=splits,
        EP=padded(E),
        VP=padded(width),
        UPCAST=INTERPRETED,
    )
    if splits == 1:
        return attended["mixed"].astype(q.dtype)
    part = max(1, min(splits, 8192 // padded(width)))
    return _call(
        combine,
        attended,
        {"out": out},
        grid=(heads, N * G),
        warps=max(1, min(8, part * padded(width) // 1024)),
        stages=2,
        N=N,
        K=K,
        G=G,
        EV=width,
        PADDED_ROWS=rows,
        SPLITS=splits,
        PART=part,
        VP=padded(width),
    )["out"].astype(q.dtype)


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
    if device is None and not has_kernels():
        raise NotImplementedError(
            "implementation 'triton' of tree_attention runs on NVIDIA GPUs of compute capability 8.0 (Ampere) and up, "
            f"and JAX's default device is {jax.devices()[0]}. Implementation 'xla' runs everywhere"
        )
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
        run = functools.partial(interpret, kernel, grid, tuple(inputs), outputs, constants)
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
