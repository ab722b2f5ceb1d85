"""Memory of the devices: placement of parameters, temporaries of programs, and tokens of the KV pool.

On a GPU the pool is allocated at the start. It leaves room for the temporaries of the largest program, so that no step
runs out of memory when the first large batch comes.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from functools import cache, lru_cache, partial
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from specjax_kernels import Quantised
from specjax_kernels.linear import WIDENED
from specjax_kernels.xla import GPU_TOKENS

from specjax.cache import PoolShape, row_states
from specjax.config import HeadConfig, ModelConfig, MtpConfig
from specjax.drafters.base import Drafter, Features, Params
from specjax.drafters.standalone import StandaloneParams
from specjax.engine.buckets import Buckets
from specjax.engine.config import EngineConfig, layout, snapshot_rows
from specjax.gpu import Memory, this_memory
from specjax.limits import ParameterError
from specjax.models import table
from specjax.models.head_spec import head_sizes, head_table
from specjax.models.mtp_spec import mtp_sizes, mtp_table
from specjax.models.params import Leaf, Scope, Sizes, Table, dimensions, leaves_of, map_leaves
from specjax.models.target import Target
from specjax.parallel import sharding
from specjax.parallel.sharding import leaf_share, page_bytes, row_bytes, splits_input
from specjax.state import DecodeState, init_state

# Parameters

AnyModel = HeadConfig | MtpConfig | Target | None
"""Config or model of `Params.draft`; None: the drafter has neither."""

MAPPED = Scope((Leaf("head", "M -> W"),))
"""Leaves that a token map adds to MTP layers beside `ids`."""


def check_models(target: Target, draft: AnyModel, count: int, groups: int = 1) -> None:
    """Raises ValueError if the heads of a model or of its draft cannot be split over `count` devices, or their experts
    over `groups` of these."""
    sharding.check_experts(target.config, groups)
    for model, what in ((target, "the model"), (draft, "the draft")):
        config = model.config if isinstance(model, Target) else model
        if config is None or sharding.fitted(config, count, what, groups) == config:
            continue
        problem = (
            f"{count}: {what} has fewer key/value heads; load it by Engine.from_pretrained, which makes "
            f"{sharding.copies_of(config, count)} copies of each"
        )
        raise ParameterError("tensor_parallel", problem, "EngineConfig")


def place_params(mesh: Mesh, params: Params, target: Target, draft: AnyModel) -> Params:
    """Places the parameters of both models on the mesh by their tables. Undeclared leaves are on every device."""
    if mesh.size == 1:
        return _everywhere(mesh, params)
    return Params(_model(mesh, params.target, target.config), _draft(mesh, params.draft, draft, target))


def _model(mesh: Mesh, weights: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    return _placed(mesh, weights, table(config), dimensions(config), config.dtype, "the model")


def _draft(mesh: Mesh, params: Any, draft: AnyModel, target: Target) -> Any:
    if isinstance(draft, Target) and isinstance(params, StandaloneParams):
        return StandaloneParams(_model(mesh, params.model, draft.config), _everywhere(mesh, params.ids))
    if isinstance(draft, HeadConfig):
        sizes = head_sizes(draft, target.config.vocab_size)
        return _placed(mesh, params, head_table(draft), sizes, draft.dtype, "the draft")
    if isinstance(draft, MtpConfig):
        declared = (*mtp_table(draft), MAPPED)
        return _placed(mesh, params, declared, mtp_sizes(draft), draft.dtype, "the draft")
    return _everywhere(mesh, params)


def _everywhere(mesh: Mesh, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: sharding.placed(leaf, sharding.everywhere(mesh)), tree)


def _placed(
    mesh: Mesh, weights: Mapping[str, Any], declared: Table, sizes: Sizes, dtype: str, what: str
) -> dict[str, Any]:
    widened = sharding.Widened()

    def place(value: Any, leaf: Any) -> Any:
        if isinstance(value, Mapping):
            inner = leaf if isinstance(leaf, dict) else {}
            return {name: place(part, inner.get(name)) for name, part in value.items()}
        if isinstance(value, Quantised) and leaf is not None:
            shape = leaf.shape(sizes)
            return sharding.put_quantised(mesh, value, leaf, lambda floats: floats.reshape(shape), dtype, widened)
        return sharding.put(mesh, value, leaf)

    placed = place(weights, map_leaves(declared, lambda leaf: leaf))
    widened.tell(what)
    return placed


# Heap

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
MAX_FREE_HEAP = 512 << 20  # bytes that may lie free at the end of the heap
MAX_FROM_HEAP = 256 << 20  # largest allocation from the heap, in bytes


@cache
def keep_freed_memory() -> bool:
    """On a CPU, keeps freed memory in the process for the next program. Returns True if it was set, which needs glibc
    and an environment that does not set it.

    XLA allocates a program's temporaries at each launch. By default glibc returns more than 32 MB to the system each
    time, and the next step has 10,000 page faults.
    """
    ours = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
    if any(name in os.environ for name in ours) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    # Older versions of glibc refuse more than 32 MB from the heap; then nothing changes.
    return mallopt is not None and bool(
        mallopt(M_MMAP_THRESHOLD, MAX_FROM_HEAP) and mallopt(M_TRIM_THRESHOLD, MAX_FREE_HEAP)
    )


# KV pool

DEFAULT_POOL_TOKENS = 32_768  # on a CPU, which shares its memory with other processes
STEP_COPIES = {"cpu": 4.2, "gpu": 2.9}
"""float32 arrays of [nodes, vocabulary] that a step holds at once, in XLA's analysis: on a CPU 4.1 for a Llama of 4
layers and 32,000 tokens with 8 to 128 nodes, on a GPU 2.8 to 2.9 for Llama-3.1-8B and Qwen3-8B."""
STATE_COPIES = 6  # block entries of a delta net that its systems of equations hold at once (Qwen3.5-27B on a GPU)
ROW_COPIES = 1.6  # of the state of each request of a batch, over all layers
ROUNDING = 1.03  # of what a GPU's program holds; XLA aligns arrays and adds small ones


def pool_tokens(
    target: Target, config: EngineConfig, context_length: int, platform: str, drafter: Drafter, params: Params,
    mesh: Mesh | None = None,
) -> int:  # fmt: skip
    """`fitting_tokens` for this process's device, or for each device of a mesh. The weights are already there."""
    memory = None if platform == "cpu" else this_memory(sharding.first_device(mesh))
    if memory is None:
        return fitting_tokens(target, config, context_length, drafter)

    rows, kept = config.max_running_requests, snapshot_rows(target, config) or 0

    def init(pages: int, rows: int = rows, snapshots: int = kept) -> DecodeState:
        pool = PoolShape(pages, config.page_size)
        return init_state(params, target, drafter, rows=rows, pool=pool, snapshots=snapshots)

    one, two = (jax.eval_shape(partial(init, pages)) for pages in (1, 2))
    if mesh is not None:
        placed = sharding.empty_state(mesh, lambda: init(1, rows=1, snapshots=0))
        one, two = (sharding.described(shapes, placed) for shapes in (one, two))
    sizes = sharding.local_bytes(one), sharding.local_bytes(two)
    token_bytes = (sizes[1] - sizes[0]) // config.page_size
    rest = sizes[0] - token_bytes * config.page_size
    devices = 1 if mesh is None else mesh.size
    return fitting_tokens(target, config, context_length, drafter, memory, token_bytes, devices, rest)


def fitting_tokens(
    target: Target,
    config: EngineConfig,
    context_length: int,
    drafter: Drafter,
    memory: Memory | None = None,
    token_bytes: int = 0,
    devices: int = 1,
    rest: int = 0,
) -> int:
    """Tokens of the pool: `max_total_tokens`, else as many as all rows can use or as fit beside the weights and the
    temporaries of the largest program.

    Args:
        memory: memory of the device, in use by the weights; None: shared with other processes, as on a CPU.
        token_bytes: bytes of a token in the pool.
        devices: number of devices over which the model is split.
        rest: bytes of the state without the pool.

    Raises:
        ValueError: the tokens do not fit the device.
    """
    requested, rows = config.max_total_tokens, config.max_running_requests
    wanted = rows * context_length
    if memory is None:
        return requested or min(wanted, DEFAULT_POOL_TOKENS)
    _, buckets = layout(config, context_length, wanted, "gpu", drafter)
    reserved = temporary_bytes(target, drafter.features, buckets, "gpu", devices, memory.before_ampere)
    total, limit, used, _ = memory
    batch = f"max_batch ({config.largest_batch})" if config.largest_batch < rows else f"max_running_requests ({rows})"
    tree = f" or draft tokens ({drafter.width})" if drafter.explicit_width else ""
    fewer = f"{batch}{tree}"
    room = limit - used - reserved - rest
    if requested is not None:
        if requested * token_bytes > room:
            problem = (
                f"{requested} takes {requested * token_bytes / 1e9:.2f} GB and the temporaries of the largest program "
                f"{reserved / 1e9:.2f} GB, but {(limit - used) / 1e9:.2f} GB are free; give fewer tokens, or fewer "
                f"{fewer}"
            )
            raise ParameterError("max_total_tokens", problem, "EngineConfig")
        return requested
    free = min(memory.budget(config.mem_fraction) - used, room)
    if free < token_bytes * config.page_size:
        raise ValueError(
            f"no memory is left for the KV pool: {used / 1e9:.2f} of {total / 1e9:.2f} GB are taken, "
            f"{memory.budget(config.mem_fraction) / 1e9:.2f} GB are for weights and pool (mem_fraction "
            f"{config.mem_fraction:g}; jax has {limit / 1e9:.2f} GB), and the temporaries of the largest program take "
            f"{reserved / 1e9:.2f} GB; give a higher fraction, or fewer {fewer}"
        )
    return min(wanted, free // token_bytes)


def room_beside(state: Any, mesh: Mesh | None = None) -> int | None:
    """Bytes of each device that are free beside the weights, which are there, and a state of these shapes, which is
    not; None: the memory is shared with other processes, as on a CPU."""
    if (memory := this_memory(sharding.first_device(mesh))) is None:
        return None
    return memory.limit - memory.used - sharding.local_bytes(state)


def temporary_bytes(
    target: Target, features: Features, buckets: Buckets, platform: str, devices: int = 1, before_ampere: bool = False
) -> int:
    """Estimates the bytes that the largest program holds beside its arguments, which the pool's size must leave free
    before the programs of that size are compiled:

        logits of the nodes     `STEP_COPIES`; a prompt's chunk has one token's logits
        all layers              keys and values, which are committed together at the end: on a GPU in the product with
                                the queries, which kernels read in place; or, if more, two arrays of zeros for the rows
                                of the chosen experts; the features
        one layer               two of its widest output, six of the residual stream; on a CPU, if that is more, the
                                scores of attention within the chunk, twice [H, tokens, tokens] in float32; on a GPU one
                                and a half and three, or, if more, the rows of the chosen experts twice; or those of
                                a delta net (`STATE_COPIES`), whose entries last, too, as do states (`ROW_COPIES`)
        a GPU before Ampere     the gathered pages of a layer in float32, and a part of a weight twice (`WIDENED`)

    At most 10% more than XLA holds on an H200, and never less (`tests/kernels/test_gpu_compile.py`). Another test
    compares programs of a CPU.
    """
    model, on_cpu = target.config, platform == "cpu"
    lasting, passing = _activation_bytes(target, features, devices, on_cpu=on_cpu)

    def size(tokens: int, rows: int, requests: int) -> int:
        logits = STEP_COPIES["cpu" if on_cpu else "gpu"] * rows * model.vocab_size * 4
        scores = 8 * model.num_heads * tokens if on_cpu else 0
        states = ROW_COPIES * requests * row_bytes(target.pages, devices)
        return int((tokens * (lasting + max(passing, scores)) + logits + states) * (1 if on_cpu else ROUNDING))

    nodes = {batch: batch * buckets.tree_widths(batch)[-1] for batch in buckets.batches}
    steps = [(count, count, batch) for batch, count in nodes.items()]
    prefills = [(rows * width, rows, rows) for rows, width, _ in buckets.prefill_shapes()]
    most = max(size(*program) for program in (*steps, *prefills))
    if not before_ampere:
        return most
    wide = 4 * page_bytes(target.pages, devices) // (model.num_layers * np.dtype(model.dtype).itemsize)
    return most + GPU_TOKENS * wide + 6 * WIDENED


@lru_cache(16)
def _activation_bytes(target: Target, features: Features, devices: int, *, on_cpu: bool) -> tuple[int, int]:
    """Bytes per token of all layers, and of one layer; see `temporary_bytes`."""
    model, sizes = target.config, dimensions(target.config)
    widest = packed = 0
    for leaf in leaves_of(table(model)):
        if leaf.matrix and "vocab" not in leaf.axes:
            shape, share = leaf.shape(sizes), leaf_share(leaf, sizes, devices)
            outputs = prod(shape[axis] for axis in leaf.matrix[1])
            outputs = outputs if splits_input(leaf, sizes, devices) else round(outputs * share)
            widest, packed = max(widest, outputs), packed + outputs * (leaf.name == "qkv")
    size = np.dtype(model.dtype).itemsize
    stream, pages = size * model.hidden_size, page_bytes(target.pages, devices)
    streams = len(features) if isinstance(features, tuple) else features is not None
    # Entries are split as the states are.
    share = row_bytes(target.pages, devices) / max(row_bytes(target.pages), 1)
    states = [round(state.entry_bytes * share) for state in row_states(target.pages)]
    entries, system = sum(states), STATE_COPIES * max(states, default=0)
    if on_cpu:
        return pages + entries + stream * (2 + streams), max(2 * size * widest + 4 * stream, system)
    chosen = 2 * stream * model.experts.per_token if model.experts else 0
    lasting = max(pages, size * packed, chosen * model.num_layers) + 6 * entries // 5
    return lasting + stream * (3 + streams + 2 * (streams > 0)), max(3 * size * widest // 2, chosen, system)
