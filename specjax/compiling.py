"""XLA options for steps on NVIDIA GPUs: loops go into the CUDA graph, too.

A step is a thousand small kernels, so it is fast only as a CUDA graph, which the device runs without the host. XLA
makes one of everything but loops: the sampler's (the walk down a tree, the bisections of top-k and top-p) it drives
from the host, waiting for the device before each trip, and breaks the step into eight graphs, in steps that sample
nothing too. With `WHILE` in its list the loops become nodes of the graph, and the step is one (compiled for an H200
with jax 0.10.2, 0.11.2 and 0.12.0). Needs a driver of CUDA 12.3 or newer; with an older one XLA makes other choices.

A flag that the user sets wins. For XLA's own behaviour, the loops on the host:

    XLA_FLAGS=--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL
"""

from __future__ import annotations

import functools
import logging
import os
import re
from types import MappingProxyType

import jax
from specjax_kernels.launch import on_nvidia

logger = logging.getLogger(__name__)

IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL"
"""What XLA puts into CUDA graphs by default. An option replaces the list: `+WHILE`, which adds to it, is for XLA_FLAGS
alone."""

NVIDIA_OPTIONS = MappingProxyType({"xla_gpu_enable_command_buffer": f"{IN_GRAPHS},WHILE"})
"""For NVIDIA GPUs, as `jax.jit` and `Lowered.compile` take them."""


def compiler_options() -> dict[str, str] | None:
    """For ``jax.jit(..., compiler_options=)`` of a step on JAX's default device. None, which means none, elsewhere."""
    if not on_nvidia():
        return None
    given = re.findall(r"--(xla_\w+)", os.environ.get("XLA_FLAGS", ""))
    return {name: value for name, value in NVIDIA_OPTIONS.items() if name not in given and _known(name, value)} or None


@functools.cache
def _known(name: str, value: str) -> bool:
    """Whether this XLA has such an option. Its names come and go, and one that it does not know fails a compilation."""
    try:
        jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        logger.warning("XLA's option %s=%s is not used, steps may be slower: %s", name, value, error)
        return False
    return True
