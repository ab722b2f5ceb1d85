"""JAX's cache of compiled programs, and XLA's options for steps on NVIDIA GPUs.

In a step's options, loops become part of the CUDA graph, whose independent nodes run side by side.

A step is a thousand small kernels, fast only as a CUDA graph, which runs without the host. By default XLA drives loops
(a verifier's or a drafter's of one's own; ours have none on GPUs that Triton compiles for) from the host, which splits
a step into several graphs. With `WHILE` in its list it is one (compiled for an H200 with jax 0.10.2, 0.11.2 and 0.12.0;
needs CUDA 12.3's driver). By default, too, a graph runs its nodes one after another; of the layers' writes to their
pages none waits for another.

Flags in XLA_FLAGS win. For XLA's own behaviour:

    XLA_FLAGS=--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL
"""

from __future__ import annotations

import functools
import logging
import os
import re
from types import MappingProxyType

import jax
from specjax_kernels.cpu import object_code
from specjax_kernels.platforms import on_nvidia

from specjax.checkpoint.files import default_cache_dir

logger = logging.getLogger(__name__)

IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL"
"""XLA's default. An option replaces the whole list; only XLA_FLAGS can add to it, by `+WHILE`."""

LOOPS, SCHEDULING = "xla_gpu_enable_command_buffer", "xla_gpu_command_buffer_scheduling_mode"

NVIDIA_OPTIONS = MappingProxyType({LOOPS: f"{IN_GRAPHS},WHILE", SCHEDULING: "CONCURRENT"})


def use_compilation_cache() -> None:
    """Keeps compiled programs in `default_cache_dir`, so that a second start compiles nothing. Respects JAX's own
    settings."""
    folder = default_cache_dir()
    object_code.keep_in(folder / "kernels")
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(folder / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def compiler_options() -> dict[str, str] | None:
    """For ``jax.jit(..., compiler_options=)`` of a step on JAX's default device; None where it is no NVIDIA GPU. An
    option that this XLA does not know is left out."""
    if not on_nvidia():
        return None
    given = re.findall(r"--(xla_\w+)", os.environ.get("XLA_FLAGS", ""))
    wanted = NVIDIA_OPTIONS.items()
    return {name: value for name, value in wanted if name not in given and accepts(name, value)} or None


@functools.cache
def accepts(name: str, value: str) -> bool:
    """Whether this XLA has the option; an unknown one fails every compilation."""
    try:
        jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        logger.warning("XLA's option %s=%s is not used, steps may be slower: %s", name, value, error)
        return False
    return True
