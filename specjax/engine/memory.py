"""Memory of the device: what programs hold beside their arguments, and the tokens that the KV pool may have.

On a GPU the pool is made at start and stays. So room for the temporaries of the largest program is kept free of it:
no step runs out of memory in the middle of traffic because the first large batch came late.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache, lru_cache
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from specjax.cache import PoolShape, bytes_per_token
from specjax.devices import Memory, this_memory
from specjax.drafters.base import Drafter, Features, Params
from specjax.engine.buckets import Buckets
from specjax.engine.config import EngineConfig, Layout
from specjax.limits import ParameterError
from specjax.models import table
from specjax.models.params import dimensions, leaves_of
from specjax.models.target import Target
from specjax.parallel.sharding import described, empty_state, first_device, local_bytes
from specjax.parallel.shares import leaf_share, page_bytes, splits_input
from specjax.state import DecodeState, init_state

DEFAULT_POOL_TOKENS = 32_768  # on a CPU, where memory is shared with everything else
STEP_COPIES = 2.5  # float32 arrays of [nodes, vocabulary] that a step holds at once: 2.1 to 2.3 in XLA's analysis
CPU_STEP_COPIES = 4.2  # the same on a CPU: 4.1 for a Llama of 4 layers, 32,000 tokens, 8 to 128 nodes


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
KEPT = 512 << 20  # bytes that may lie free at the end of the heap
FROM_HEAP = 256 << 20  # bytes of an allocation, at most, that are taken from it


@cache
def keep_freed_memory() -> bool:
    """On a CPU, once in a process: memory that is freed stays in the process, for the next program. XLA allocates a
    program's temporaries at each launch; by default glibc returns more than 32 MB to the system each time, and the
    next step waits for 10,000 page faults. Returns whether it was set: not where the environment sets it, or with
    another C library."""
    ours = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
    if any(name in os.environ for name in ours) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    # Older versions of glibc take 32 MB from the heap at most; then all stays as it is.
    return mallopt is not None and bool(mallopt(M_MMAP_THRESHOLD, FROM_HEAP) and mallopt(M_TRIM_THRESHOLD, KEPT))


def pool_tokens(
    target: Target, config: EngineConfig, context_length: int, platform: str, drafter: Drafter, params: Params,
    mesh: Mesh | None = None,
) -> int:  # fmt: skip
    """`fitting_tokens` for this process's device, or each of those of a mesh, on which the weights lie."""
    memory = None if platform == "cpu" else this_memory(first_device(mesh))
    if memory is None:
        return fitting_tokens(target, config, context_length, drafter)

    def init(pool: PoolShape) -> DecodeState:
        return init_state(params, target, drafter, rows=1, pool=pool)

    if mesh is None:
        each = bytes_per_token(init, config.page_size)
        return fitting_tokens(target, config, context_length, drafter, memory, each)
    placed = empty_state(mesh, lambda: init(PoolShape(1, config.page_size)))
    one, two = (described(jax.eval_shape(lambda n=n: init(PoolShape(n, config.page_size))), placed) for n in (1, 2))
    each = (local_bytes(two) - local_bytes(one)) // config.page_size
    return fitting_tokens(target, config, context_length, drafter, memory, each, mesh.size)


def fitting_tokens(
    target: Target,
    config: EngineConfig,
    context_length: int,
    drafter: Drafter,
    memory: Memory | None = None,
    each: int = 0,
    devices: int = 1,
) -> int:
    """Tokens that the pool should hold: `max_total_tokens`, else as many as all rows can use or as fit beside the
    weights and the temporaries of the largest program. Raises ValueError if they do not fit the device.

    Args:
        memory: of the device, the weights among what is used; None: shared with everything else, as on a CPU.
        each: bytes of a token in the pool.
        devices: over which the model is split.
    """
    given, rows = config.max_total_tokens, config.max_running_requests
    wanted = rows * context_length
    if memory is None:
        return given or min(wanted, DEFAULT_POOL_TOKENS)
    buckets = Layout.of(config, context_length, wanted, "gpu", drafter).buckets
    reserved = temporary_bytes(target, drafter.features, buckets, "gpu", devices)
    total, limit, used = memory
    batch = f"max_batch ({config.largest_batch})" if config.largest_batch < rows else f"max_running_requests ({rows})"
    tree = f" or draft tokens ({drafter.width})" if drafter.explicit_width else ""
    fewer = f"{batch}{tree}"
    room = limit - used - reserved
    if given is not None:
        if given * each > room:
            problem = (
                f"{given} takes {given * each / 1e9:.2f} GB and the temporaries of the largest program "
                f"{reserved / 1e9:.2f} GB, but {(limit - used) / 1e9:.2f} GB are free; give fewer tokens, or fewer "
                f"{fewer}"
            )
            raise ParameterError("max_total_tokens", problem, "EngineConfig")
        return given
    free = min(memory.budget(config.mem_fraction) - used, room)
    if free < each * config.page_size:
        raise ValueError(
            f"no memory is left for the KV pool: {used / 1e9:.2f} of {total / 1e9:.2f} GB are taken, "
            f"{memory.budget(config.mem_fraction) / 1e9:.2f} GB are for weights and pool (mem_fraction "
            f"{config.mem_fraction:g}; jax has {limit / 1e9:.2f} GB), and the temporaries of the largest program take "
            f"{reserved / 1e9:.2f} GB; give a higher fraction, or fewer {fewer}"
        )
    return min(wanted, free // each)


def room_beside(state: Any, mesh: Mesh | None = None) -> int | None:
    """Bytes of this process's device, or of each of a mesh, that will be free beside the weights, which lie there, and
    a state of these shapes, which does not yet; None: the memory is shared with everything else, as on a CPU."""
    if (memory := this_memory(first_device(mesh))) is None:
        return None
    return memory.limit - memory.used - local_bytes(state)


def temporary_bytes(target: Target, features: Features, buckets: Buckets, platform: str, devices: int = 1) -> int:
    """An estimate of what the largest program holds beside its arguments:

        logits of the nodes     `logits_bytes`; a prompt's chunk has them of one token
        of all layers           keys and values, which are committed together at the end; the features
        of one layer            two of its widest output, six of the residual stream; on a CPU, if that is more, the
                                scores of attention within the chunk, twice [H, tokens, tokens] in float32

    XLA holds 33 MB for one tree of 32 nodes of Llama-3.1-8B with an EAGLE-3 head on an H200, and the estimate is 51 MB
    (benchmarks/results/gpu-compile-2026-11-21.json). A test compares others on a CPU.
    """
    model = target.config
    lasting, passing = _activation_bytes(target, features, devices)

    def held(tokens: int, rows: int) -> int:
        scores = 8 * model.num_heads * tokens if platform == "cpu" else 0
        return tokens * (lasting + max(passing, scores)) + logits_bytes(rows, model.vocab_size, platform)

    steps = [batch * buckets.tree_widths(batch)[-1] for batch in buckets.batches]
    prefills = [(rows * width, rows) for rows, width, _ in buckets.prefill_shapes()]
    return max(*(held(nodes, nodes) for nodes in steps), *(held(*prefill) for prefill in prefills))


def logits_bytes(nodes: int, vocab_size: int, platform: str = "gpu") -> int:
    """What a step holds at once of arrays of [nodes, vocabulary], which are most of its temporaries."""
    return int((CPU_STEP_COPIES if platform == "cpu" else STEP_COPIES) * nodes * vocab_size * 4)


@lru_cache(16)
def _activation_bytes(target: Target, features: Features, devices: int) -> tuple[int, int]:
    """Of a token: of all layers, and of one; see `temporary_bytes`."""
    model, sizes = target.config, dimensions(target.config)
    widest = 0
    for leaf in leaves_of(table(model)):
        if leaf.matrix and "vocab" not in leaf.axes:
            shape, share = leaf.shape(sizes), leaf_share(leaf, sizes, devices)
            outputs = prod(shape[axis] for axis in leaf.matrix[1])
            widest = max(widest, outputs if splits_input(leaf, sizes, devices) else round(outputs * share))
    size, streams = (
        np.dtype(model.dtype).itemsize,
        len(features) if isinstance(features, tuple) else features is not None,
    )
    lasting = page_bytes(target.pages, devices) + size * model.hidden_size * (2 + streams)
    return lasting, size * (2 * widest + 4 * model.hidden_size)
