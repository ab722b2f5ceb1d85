"""Memory of an engine's devices: a plan of what each holds.

`plan_memory` computes a `MemoryPlan` once. It adds up a table of terms:

    term            bytes                                                               when
    weights         parameters of the target                                            always
    draft_weights   parameters of the draft                                             always
    other           what else is allocated when the engine starts                       always
    pool            pages of the target                                                 always
    draft_pool      pages of the draft, and of committed tokens                         always
    rows            the state without pages                                             always
    page_tables     int32 [R, pages of a request]                                       always
    logits          float32 [L, V], `STEP_COPIES` times                                 in a program
    layers          of each token: what all layers keep until the end                   in a program
    layer           of each token: the largest temporaries of one layer                 in a program
    row_states      states of recurrent layers of each request, `ROW_COPIES` times      in a program
    widened         before Ampere: one layer's gathered pages in float32, parts of a    in a program
                    weight (`WIDENED`)

A program is a step or a prefill of T tokens and R requests; L is T in a step, R in a prefill. Of all programs of a kind
the plan holds the terms of the largest. On a GPU the pool leaves room for it, so that no step runs out of memory when
the first large batch comes; `Programs` later compares XLA's own figure with that room.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import ceil, prod
from typing import Literal, NamedTuple

import numpy as np
from jax.sharding import Mesh
from specjax_kernels.linear import WIDENED
from specjax_kernels.xla import GPU_TOKENS

from specjax.cache import PoolShape, row_states
from specjax.config import ModelConfig
from specjax.drafters.base import Features, Params, Speculation
from specjax.engine.config import EngineConfig
from specjax.engine.plan import Buckets
from specjax.gpu import Memory, this_memory
from specjax.limits import ParameterError
from specjax.models import table
from specjax.models.params import dimensions, leaves_of
from specjax.models.target import Target
from specjax.parallel.sharding import first_device, held_outputs, local_bytes, page_bytes, row_bytes
from specjax.state import DecodeState

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


# Sizes


def context_length(target: Target, config: EngineConfig) -> int:
    """Maximum number of tokens of a request. Raises ValueError if the model has fewer positions."""
    length, most = config.context_length or target.config.max_positions, target.config.max_positions
    if length > most:
        raise ParameterError("context_length", f"{length} exceeds the model's {most} positions", "EngineConfig")
    return length


def layout(
    config: EngineConfig,
    context_length: int,
    tokens: int,
    platform: str,
    speculation: Speculation,
    *,
    ragged: bool = False,
) -> tuple[PoolShape, Buckets]:
    """Sizes of the compiled programs. Rounds a pool of `tokens` tokens down to pages, at least one. Tracing
    needs drafts in every step."""
    size = config.page_size
    pool = PoolShape(max(tokens // size, 1), size)
    request_pages = min(-(-context_length // size), pool.pages)
    rows, chunk = config.largest_batch, config.chunked_prefill_size
    sizes = {"request_pages": request_pages, "chunk": chunk, "prefill": config.max_prefill_tokens}
    # `attention` splits a block over devices by heads, which ragged rows do not support.
    sizes["ragged"] = ragged and config.tensor_parallel == 1
    adaptive = not speculation.every_step if config.adaptive is None else config.adaptive
    sizes["adaptive"] = adaptive and speculation.drafter.width > 1 and not config.trace
    return pool, Buckets.build(platform, speculation, rows=rows, **sizes)


# The plan

When = Literal["always", "step", "prefill"]


class Term(NamedTuple):
    name: str
    bytes: int  # on each device
    when: When


@dataclass(frozen=True)
class Devices:
    """The devices of an engine.

    Attributes:
        platform: "cpu", or "gpu" for all others.
        count: number of devices over which the models are split.
        memory: memory of each device; None: shared with other processes, as on a CPU.
    """

    platform: str
    count: int = 1
    memory: Memory | None = None

    @classmethod
    def of(cls, platform: str, mesh: Mesh | None) -> Devices:
        """Describes this process's device, or the devices of a mesh."""
        memory = None if platform == "cpu" else this_memory(first_device(mesh))
        return cls(platform, 1 if mesh is None else mesh.size, memory)


class Held(NamedTuple):
    """Bytes on each device that do not depend on the size of the pool."""

    weights: int  # of the target
    draft_weights: int
    token: int  # of a token in the target's pages
    draft_token: int  # of a token in all other pages
    rows: int  # the state without pages


def held_by(params: Params, state: Callable[[PoolShape], DecodeState], page_size: int) -> Held:
    """Computes `Held` from arrays, or from shapes with shardings. `state`: shapes of the state with such a pool."""
    one, two = (state(PoolShape(pages, page_size)) for pages in (1, 2))
    token, own = (
        (local_bytes(more) - local_bytes(less)) // page_size for less, more in ((one, two), (one.cache, two.cache))
    )
    weights, draft_weights = local_bytes(params.target), local_bytes(params.draft)
    return Held(weights, draft_weights, own, token - own, local_bytes(one) - token * page_size)


@dataclass(frozen=True)
class MemoryPlan:
    """What each device of an engine holds, and the sizes that follow.

    Attributes:
        terms: the table of this module. Of the programs, those of the largest step and of the largest prefill; none
            where the memory is shared with other processes.
        pool: size of the KV pool; no pages if the engine does not fit.
        buckets: sizes of the programs.
        context_length: maximum number of tokens of a request.
        limit: bytes that may be used; None: the memory is shared with other processes.
        problem: why the engine does not fit, and what would; None: it fits.
    """

    terms: tuple[Term, ...]
    pool: PoolShape
    buckets: Buckets
    context_length: int
    limit: int | None
    problem: ValueError | None

    @property
    def always(self) -> dict[str, int]:
        return {term.name: term.bytes for term in self.terms if term.when == "always"}

    @property
    def temporaries(self) -> int:
        """Bytes that the largest program holds beside its arguments."""
        return temporary_bytes(self.terms)

    @property
    def total(self) -> int:
        return sum(self.always.values()) + self.temporaries

    @property
    def room(self) -> int | None:
        """Bytes that a program may hold beside its arguments; None: unknown."""
        return None if self.limit is None else self.limit - sum(self.always.values())

    def checked(self) -> MemoryPlan:
        """Raises `problem` if there is one."""
        if self.problem is not None:
            raise self.problem
        return self


def plan_memory(
    config: EngineConfig, target: Target, speculation: Speculation, devices: Devices, held: Held
) -> MemoryPlan:  # fmt: skip
    """Plans the memory of an engine. The pool has `EngineConfig.max_total_tokens`, else as many tokens as all rows can
    use or as fit beside the weights and the temporaries of the largest program.

    Raises ParameterError if the context exceeds the model's positions.
    """
    context, memory = context_length(target, config), devices.memory
    wanted = config.max_running_requests * context

    def sizes(tokens: int) -> tuple[PoolShape, Buckets]:
        return layout(config, context, tokens, devices.platform, speculation, ragged=target.ragged)

    largest = sizes(wanted)[1]
    programs = () if memory is None else temporary_terms(target, speculation.drafter.features, largest, devices)
    weights = held.weights + held.draft_weights
    fixed = {
        "weights": held.weights,
        "draft_weights": held.draft_weights,
        "other": max(memory.used - weights, 0) if memory is not None else 0,
        "pool": 0,
        "draft_pool": 0,
        "rows": held.rows,
        "page_tables": 4 * config.max_running_requests * -(-context // config.page_size),
    }
    tokens, problem = config.max_total_tokens or min(wanted, DEFAULT_POOL_TOKENS), None
    if devices.platform != "cpu" and memory is not None:
        try:
            advice = _advice(config, target, speculation, largest, programs)
            tokens = _fitting_tokens(config, memory, wanted, held, fixed, temporary_bytes(programs), advice)
        except ValueError as error:
            tokens, problem = 0, error
    pool, buckets = sizes(tokens or wanted)
    pool = pool if tokens else pool._replace(pages=0)
    fixed |= {"pool": prod(pool) * held.token, "draft_pool": prod(pool) * held.draft_token}
    terms = (*(Term(name, size, "always") for name, size in fixed.items()), *programs)
    plan = MemoryPlan(terms, pool, buckets, context, memory and memory.limit, problem)
    if problem is None and plan.limit is not None and plan.total > plan.limit:
        text = f"{plan.total / 1e9:.2f} GB are needed and there are {plan.limit / 1e9:.2f} GB"
        return replace(plan, problem=ValueError(text))
    return plan


DEFAULT_POOL_TOKENS = 32_768  # on a CPU, which shares its memory with other processes


def _advice(
    config: EngineConfig, target: Target, speculation: Speculation, buckets: Buckets, programs: Iterable[Term]
) -> str:  # fmt: skip
    """What to reduce so that the pool has room, of what can be reduced."""
    requests, rows = config.largest_batch, config.max_running_requests
    prefill = max(buckets.chunks[-1], buckets.several[2] if buckets.several else 0)
    totals = [sum(term.bytes for term in programs if term.when == when) for when in ("step", "prefill")]
    sizes = {
        f"max_batch ({requests})": 1 < requests < rows,
        f"max_running_requests ({rows})": 1 < requests == rows,
        f"draft tokens ({speculation.drafter.width})": speculation.explicit_width,
        f"max_prefill_tokens ({prefill})": totals[0] < totals[1] and prefill > buckets.chunks[0],
        f"state_snapshots ({config.snapshot_rows})": config.snapshot_rows > 0 and bool(row_states(target.pages)),
    }
    fewer = [name for name, reducible in sizes.items() if reducible]
    return f"fewer {' or '.join(fewer)}" if fewer else "smaller weights"


def _fitting_tokens(
    config: EngineConfig, memory: Memory, wanted: int, held: Held, fixed: dict[str, int], temporaries: int, advice: str
) -> int:  # fmt: skip
    """Returns the number of tokens in the pool. Raises ValueError if they do not fit the device."""
    used, token = fixed["weights"] + fixed["draft_weights"] + fixed["other"], held.token + held.draft_token
    room = memory.limit - sum(fixed.values()) - temporaries
    if (requested := config.max_total_tokens) is not None:
        if requested * token > room:
            problem = (
                f"{requested} takes {requested * token / 1e9:.2f} GB and the temporaries of the largest program "
                f"{temporaries / 1e9:.2f} GB, but {(memory.limit - used) / 1e9:.2f} GB are free; give fewer tokens, or "
                f"{advice}"
            )
            raise ParameterError("max_total_tokens", problem, "EngineConfig")
        return requested
    budget = memory.budget(config.mem_fraction)
    free = min(budget - used, room)
    if free < token * config.page_size:
        raise ValueError(
            f"no memory is left for the KV pool: {used / 1e9:.2f} of {memory.total / 1e9:.2f} GB are taken, "
            f"{budget / 1e9:.2f} GB are for weights and pool (mem_fraction {config.mem_fraction:g}; jax has "
            f"{memory.limit / 1e9:.2f} GB), and the temporaries of the largest program take {temporaries / 1e9:.2f} "
            f"GB; give a higher fraction, or {advice}"
        )
    return min(wanted, free // token)


# Temporaries of programs

STEP_COPIES = {"cpu": 4.2, "gpu": 2.9}
"""float32 arrays of [nodes, vocabulary] that a step holds at once, in XLA's analysis: on a CPU 4.1 for a Llama of 4
layers and 32,000 tokens with 8 to 128 nodes, on a GPU 2.8 to 2.9 for Llama-3.1-8B and Qwen3-8B."""
STATE_COPIES = 6  # block entries of a delta net that its systems of equations hold at once (Qwen3.5-27B on a GPU)
ROW_COPIES = 1.6  # of the state of each request of a batch, over all layers
ROUNDING = 1.03  # of what a GPU's program holds; XLA aligns arrays and adds small ones


def temporary_bytes(terms: Iterable[Term]) -> int:
    """Bytes that the largest program holds beside its arguments."""
    terms = list(terms)
    return max(sum(term.bytes for term in terms if term.when == when) for when in ("step", "prefill"))


def temporary_terms(
    target: Target, features: Features, buckets: Buckets, devices: Devices
) -> tuple[Term, ...]:  # fmt: skip
    """Estimates the terms of the largest step and of the largest prefill.

    At most 10% more than XLA holds on an H200, and never less (`tests/kernels/test_gpu_compile.py`). Another test
    compares programs of a CPU.
    """
    model, kind = target.config, "cpu" if devices.platform == "cpu" else "gpu"
    layers, layer = _activation_bytes(target, features, devices.count, on_cpu=kind == "cpu")
    old = devices.memory is not None and devices.memory.before_ampere
    pages = page_bytes(target.pages, devices.count) // (model.num_layers * np.dtype(model.dtype).itemsize)

    def program(when: When, tokens: int, rows: int, requests: int) -> list[Term]:
        # Scores of attention within a block, twice [H, tokens, tokens] in float32, which a GPU's kernels do not hold.
        scores = 8 * model.num_heads * tokens if kind == "cpu" else 0
        sizes = {
            "logits": STEP_COPIES[kind] * rows * model.vocab_size * 4,
            "layers": tokens * layers,
            "layer": tokens * max(layer, scores),
            "row_states": ROW_COPIES * requests * row_bytes(target.pages, devices.count),
        }
        terms = [Term(name, ceil(size * (1 if kind == "cpu" else ROUNDING)), when) for name, size in sizes.items()]
        return [*terms, Term("widened", GPU_TOKENS * 4 * pages + 6 * WIDENED if old else 0, when)]

    steps = [program("step", batch * nodes, batch * nodes, batch) for batch, nodes in buckets.trees.items()]
    several = [] if buckets.several is None else [buckets.several[:2]]
    prefills = [program("prefill", rows * chunk, rows, rows) for rows, chunk in [(1, buckets.chunks[-1]), *several]]
    return (*max(steps, key=temporary_bytes), *max(prefills, key=temporary_bytes))


def _activation_bytes(target: Target, features: Features, devices: int, *, on_cpu: bool) -> tuple[int, int]:
    """Estimates the bytes of a token that all layers keep until the end of a program, and of one layer's temporaries.

    layers      the features, and the residual streams of which they are made
                block entries of delta nets
                keys and values, which are committed together at the end; on a GPU in the product with the queries,
                which kernels read in place; or, if more, two arrays for the rows of the chosen experts in all layers
    layer       the widest outputs of a matrix: on a CPU two and four residual streams, on a GPU one and a half
                or, if more, two arrays for the rows of the chosen experts
                or, if more, the systems of equations of a delta net (`STATE_COPIES`)
    """
    model, (widest, packed) = target.config, _outputs(target.config, devices)
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


@lru_cache(16)  # a search plans many engines of one model
def _outputs(model: ModelConfig, devices: int) -> tuple[int, int]:
    """Outputs on each device of the layers' widest matrix, and of all layers' projections for attention."""
    sizes = dimensions(model)
    matrices = [leaf for leaf in leaves_of(table(model)) if leaf.matrix and "vocab" not in leaf.axes]
    outputs = [(leaf.name, held_outputs(leaf, sizes, devices)) for leaf in matrices]
    return max((size for _, size in outputs), default=0), sum(size for name, size in outputs if name == "qkv")
