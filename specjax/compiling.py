"""JAX's cache of compiled programs, and XLA's options for steps on NVIDIA GPUs.

A step has about a thousand small kernels and is fast only as one CUDA graph. By default XLA runs loops from the host,
which splits the graph at the loops of user-defined drafters and verifiers; `WHILE` puts them into the graph (compiled
for an H200 with jax 0.10.2, 0.11.2 and 0.12.0; needs the driver of CUDA 12.3). By default a graph runs its nodes one
after another; CONCURRENT lets independent nodes overlap, such as the page writes of different layers. Flags in
XLA_FLAGS take precedence.
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
"""XLA's default list. An option replaces the whole list; only XLA_FLAGS can extend it (`+WHILE`)."""

LOOPS, SCHEDULING = "xla_gpu_enable_command_buffer", "xla_gpu_command_buffer_scheduling_mode"

NVIDIA_OPTIONS = MappingProxyType({LOOPS: f"{IN_GRAPHS},WHILE", SCHEDULING: "CONCURRENT"})


def use_compilation_cache() -> None:
    """Stores compiled programs in `default_cache_dir` for later starts, unless JAX's own setting names a folder."""
    folder = default_cache_dir()
    object_code.keep_in(folder / "kernels")
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(folder / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def compiler_options() -> dict[str, str] | None:
    """Returns ``compiler_options`` for `jax.jit` of a step; None unless JAX's default device is an NVIDIA GPU.

    Options that this XLA rejects are left out.
    """
    if not on_nvidia():
        return None
    in_flags = re.findall(r"--(xla_\w+)", os.environ.get("XLA_FLAGS", ""))
    wanted = NVIDIA_OPTIONS.items()
    return {name: value for name, value in wanted if name not in in_flags and accepts(name, value)} or None


@functools.cache
def accepts(name: str, value: str) -> bool:
    """Returns True if this XLA has the option. An unknown option would fail every compilation."""
    try:
        jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        logger.warning("XLA's option %s=%s is not used, steps may be slower: %s", name, value, error)
        return False
    return True
