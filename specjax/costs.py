"""Estimates the duration of a step with drafts relative to a plain step; measured times replace the estimate.

On a CPU a table gives the duration of a forward by its number of tokens. On a GPU a step takes the longer of reading
and multiplying, and launches kernels:

    a forward of n rows     max(bytes of the weights / bandwidth, 2 n multiplications a weight / speed) + kernels
    a step with drafts      a forward of the trees' nodes, and for each level the draft's bytes and kernels
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import jax
import numpy as np
from specjax_kernels import Quantised

from specjax.drafters.base import Params, Speculation
from specjax.gpu import Device
from specjax.models.params import CLUSTERED, LAYER_EMBEDDINGS
from specjax.models.target import Target

CPU_STEP = {1: 1.0, 2: 1.12, 3: 1.18, 4: 1.34, 8: 2.12, 16: 3.8, 64: 13.0}
"""Number of tokens in a forward -> its duration relative to one token, of SmolLM2-135M in Q4_1 on 2 cores: the mean of
two machines. With AVX-512 products of 1, 2, 3, 4 and 8 tokens took 3.1, 3.3, 3.6, 4.2 and 6.9 ms, and the rest of a
step 0.45 ms (2026-11-28); with AVX2 7.2, 9.2, 9.7, 11.3 and 20.4 ms, and 4 ms (2026-11-30). 16 is from
benchmarks/results/before-after-2026-11-25-few-rows.json, 64 is extrapolated."""
CPU_LEVEL = 0.5  # duration of reading a byte of the draft relative to a byte of the target
PROPOSED = 0.3  # share of steps in which n-grams before a model have a draft

KERNEL = 2.1e-6  # seconds of a small kernel in a CUDA graph, assumed: 1.6 to 2.6 us
LAYER_KERNELS, STEP_KERNELS, LEVEL_KERNELS = 14, 23, 30
"""Kernels of a layer with its page writes, of the rest of a step, and of a level of the draft. A plain step of 32
layers, compiled for an H200, has 471, a level of a tree 30 (benchmarks/results/gpu-compile-2026-11-21.json)."""


def estimated_ratio(
    batch: int, target: Target, speculation: Speculation, params: Params, device: Device | None
) -> float:
    """Estimates the duration of a step of `batch` requests with drafts relative to a plain step.

    `device`: GPU of the table; None: `CPU_STEP` and the bytes that a draft model reads.
    """
    if device is not None:
        drafted, plain = estimated_seconds(batch, target, speculation, params, device)
        return drafted / plain
    tokens, durations = list(CPU_STEP), list(CPU_STEP.values())
    nodes = [batch, batch * speculation.drafter.width]
    plain, drafted = np.interp(nodes, tokens, durations).tolist()
    if not speculation.models(batch):
        return drafted / plain
    forwards, read, _ = _draft_forwards(speculation, params)
    share = 1.0 if speculation.lookup == 1 else 1 - PROPOSED  # of steps in which the model drafts
    return drafted / plain + share * CPU_LEVEL * forwards * read / _size(params.target)[0]


def estimated_seconds(
    batch: int, target: Target, speculation: Speculation, params: Params, device: Device
) -> tuple[float, float]:
    """Estimates the seconds of a step of `batch` requests on a GPU of the table, with drafts and without."""
    read, weights = _size(params.target)
    kernels = (LAYER_KERNELS * target.config.num_layers + STEP_KERNELS) * KERNEL

    def seconds(rows: int) -> float:
        multiplying = 2 * rows * weights / device.speed(target.config.dtype)
        return max(read / device.bandwidth, multiplying) + kernels

    forwards, draft_read, draft_kernels = _draft_forwards(speculation, params)
    draft = forwards * (draft_read / device.bandwidth + draft_kernels * KERNEL)
    return seconds(batch * speculation.drafter.width) + draft, seconds(batch)


def _draft_forwards(speculation: Speculation, params: Params) -> tuple[int, int, int]:
    """The draft's forwards in a step, the bytes that each reads, and its kernels; zeros without a model."""
    if not speculation.runs_model:
        return 0, 0, 0
    read = _size(params.draft)[0]
    if speculation.passes is None:
        drafter = speculation.drafter
        return min(drafter.depth, drafter.width - 1), read, LEVEL_KERNELS
    # Drafts in one forward have several layers. A head may use the target's output layer; a draft model has its own.
    own = getattr(params.draft, "model", params.draft)
    if own is params.draft and "head" not in own:
        read += _size(params.target.get("head", params.target["embed"]))[0]
    layers = sum(name.startswith("layers_") for name in own)
    return speculation.passes, read, LEVEL_KERNELS + LAYER_KERNELS * (layers - 1)


def _size(params: Any) -> tuple[int, int]:
    """Bytes of parameters, and the number of weights. All experts of a mixture count, as in a large batch."""
    if isinstance(params, Mapping):  # without leaves of which a token reads some rows
        params = {name: leaf for name, leaf in params.items() if name not in (LAYER_EMBEDDINGS, CLUSTERED)}
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Quantised))
    size = sum(prod(part.shape) * np.dtype(part.dtype).itemsize for part in jax.tree.leaves(params))
    return size, sum(prod(leaf.shape) for leaf in leaves)
