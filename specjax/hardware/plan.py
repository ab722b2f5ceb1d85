"""What an engine would need and at best reach on a device, computed from shapes: nothing is loaded, compiled or run.

Memory is what the engine allocates, by the functions that it allocates with, plus an estimate of the temporaries. A
speed is a bound: what a step must read over the memory's speed, or its products over theirs, whichever takes longer.
Launches of kernels, attention's products and, with several devices, the exchange between them are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.cache import PoolShape, bytes_per_token
from specjax.config import ModelConfig
from specjax.devices import Device, Memory, share_of
from specjax.engine.buckets import Buckets
from specjax.engine.config import EngineConfig, Layout, context_length
from specjax.engine.memory import fitting_tokens, temporary_bytes
from specjax.hardware.outline import Outline, head_parameters, level_reads
from specjax.models import table
from specjax.models.params import (
    Bits,
    Leaf,
    Sizes,
    Table,
    dimensions,
    leaves_of,
    read_leaves,
)
from specjax.parallel.sharding import check_experts, fitted
from specjax.parallel.shares import held_bytes, leaf_share, page_bytes
from specjax.state import init_state

CONTEXT = 1024  # tokens before those of a step, in the bounds of its speed


class Case(NamedTuple):
    """What is asked about."""

    outline: Outline
    config: EngineConfig
    device: Device
    platform: str  # "cpu" or "gpu"
    devices: int = 1  # over which weights and pages are split
    share: float | None = None  # of a GPU's memory that jax takes; None: as the commands set it
    replicas: int = 1  # engines of one process, each on devices of its own

    @property
    def limit(self) -> int:
        """Bytes of a device that weights, pool and everything else share. Replicas on CPU devices share one memory."""
        if self.platform == "cpu":
            return int(self.device.memory * self.config.mem_fraction) // self.replicas
        return int(self.device.memory * (self.share or share_of(self.config.mem_fraction, self.device.memory)))


class Speed(NamedTuple):
    """Bounds for a batch of requests: seconds a step."""

    batch: int
    nodes: int  # of each tree; 1: this batch does not draft
    plain: float
    draft: float
    verify: float

    @property
    def break_even(self) -> float:
        """The accept length from which on drafting is faster than plain decoding."""
        return (self.draft + self.verify) / self.plain

    def rate(self, accept_length: float) -> float:
        """Tokens a second."""
        return self.batch * accept_length / (self.draft + self.verify)


class Plan(NamedTuple):
    """Bytes are of each device."""

    context_length: int
    weights: int
    draft_weights: int
    token_bytes: int  # of a token in the target's pages
    draft_token_bytes: int  # in the drafter's, and 4 for the token itself if it reads those
    rows: int  # of the requests' rows, and of what the drafter keeps beside pages
    temporaries: int  # see `temporary_bytes`
    tokens: int  # in the pool; 0: there is no room for one
    buckets: Buckets
    reads: Reads
    speeds: tuple[Speed, ...]  # by batch bucket
    undivided: dict[str, int]  # what several devices hold whole: bytes by name
    problems: tuple[str, ...]  # none: it fits

    @property
    def pool(self) -> int:
        return self.tokens * self.token_bytes

    @property
    def draft_pool(self) -> int:
        return self.tokens * self.draft_token_bytes

    @property
    def total(self) -> int:
        return self.weights + self.draft_weights + self.pool + self.draft_pool + self.rows + self.temporaries


def make_plan(case: Case) -> Plan:
    """Raises ValueError for a context that the model does not have."""
    target, drafter = case.outline.target, case.outline.drafter
    config, n = case.config, case.devices
    rows = config.max_running_requests
    context = context_length(target, config)
    whole, beside = _state_bytes(case.outline, config.page_size, rows)
    pages = page_bytes(target.pages, n)
    draft_pages = whole - page_bytes(target.pages)
    own = case.outline.draft_pages
    if own is not None:
        draft_pages += page_bytes(own, n) - page_bytes(own)
    reads = _reads(case.outline, n, config.expert_parallel)
    weights, draft_weights = reads.weights, reads.draft_weights

    def layout(tokens: int) -> Layout:
        return Layout.of(config, context, tokens, case.platform, drafter, ragged=target.ragged)

    problems = [*cannot_split(case.outline, n, config.expert_parallel)]
    memory = None if case.platform == "cpu" else Memory(case.device.memory, case.limit, weights + draft_weights)
    try:
        tokens = fitting_tokens(target, config, context, drafter, memory, pages + draft_pages, n)
        pool, buckets = layout(tokens)
        tokens = prod(pool)
    except ValueError as error:
        problems.append(str(error))
        tokens, room = 0, rows * context
        buckets = layout(room).buckets
    plan = Plan(
        context_length=context,
        weights=weights,
        draft_weights=draft_weights,
        token_bytes=pages,
        draft_token_bytes=draft_pages,
        rows=beside,
        temporaries=temporary_bytes(target, drafter.features, buckets, case.platform, n),
        tokens=tokens,
        buckets=buckets,
        reads=reads,
        speeds=tuple(
            _speed(case, reads, batch, buckets.tree_widths(batch)[-1], min(CONTEXT, context), pages, draft_pages)
            for batch in buckets.batches
        ),
        undivided=_undivided(case.outline, n, config.expert_parallel),
        problems=(),
    )
    if not problems and plan.total > case.limit:
        problems.append(f"{plan.total / 1e9:.2f} GB are needed and there are {case.limit / 1e9:.2f} GB")
    if not problems and config.context_length and tokens < config.context_length:
        problems.append(
            f"the KV pool holds {tokens} tokens, so no request of EngineConfig.context_length {context} tokens can run"
        )
    return plan._replace(problems=tuple(problems))


def cannot_split(outline: Outline, devices: int, groups: int = 1) -> Iterator[str]:
    """Why so many devices, in so many groups, cannot share the heads or the experts of the model or of its draft;
    nothing: they can."""
    drafts = None if outline.model is None else outline.model.config
    try:
        check_experts(outline.target.config, groups)
    except ValueError as error:
        yield str(error)
    for config, what in ((outline.target.config, "the model"), (outline.head or drafts, "the draft")):
        try:
            if config is not None:
                fitted(config, devices, what, groups)
        except ValueError as error:
            yield str(error)


class Reads(NamedTuple):
    """Parameters, and what of them a step reads. Of each device."""

    weights: int  # bytes
    draft_weights: int
    forward: int  # bytes that a forward of the target reads
    products: int  # elements of that, each of which a token is multiplied with
    level: int  # bytes that a level of the draft reads, the target's output matrix among them if it is the head's
    once: int  # bytes that the draft reads once a step


@lru_cache(16)
def _reads(outline: Outline, devices: int, groups: int) -> Reads:
    target, head = outline.target, outline.head
    model, declared, sizes = target.config, table(target.config), dimensions(target.config)
    read = [*read_leaves(declared)]

    def size(
        leaves: Iterable[Leaf], sizes: Sizes = sizes, of: ModelConfig = model, bits: Bits | None = outline.bits
    ) -> int:
        return sum(
            int(held_bytes([leaf], sizes, of.dtype, devices, bits, groups) * _active(leaf, of)) for leaf in leaves
        )

    draft, level, once = (_nbytes(outline.params.draft),) * 2 + (0,)  # of a drafter of the user's: all, each level
    if head is not None:
        head_table, head_sizes = head_parameters(head, target)
        few_bits = outline.draft_bits
        draft = held_bytes(leaves_of(head_table), head_sizes, head.dtype, devices, few_bits, groups)
        level, once = (size(leaves, head_sizes, bits=few_bits) for leaves in level_reads(head))
        level += 0 if head.own_head else size(leaf for leaf in read if "vocab" in leaf.axes)
    if (drafts := outline.model) is not None:
        own, own_sizes = table(drafts.config), dimensions(drafts.config)
        few_bits = outline.draft_bits
        draft = held_bytes(leaves_of(own), own_sizes, drafts.config.dtype, devices, few_bits, groups)
        level = once = size(read_leaves(own), own_sizes, drafts.config, few_bits)
    return Reads(
        weights=held_bytes(leaves_of(declared), sizes, model.dtype, devices, outline.bits, groups),
        draft_weights=draft,
        forward=size(read),
        products=sum(
            int(prod(leaf.shape(sizes)) * leaf_share(leaf, sizes, devices, groups) * _active(leaf, model))
            for leaf in read
        ),
        level=level,
        once=once,
    )


def _active(leaf: Leaf, model: ModelConfig) -> float:
    """The share of a leaf that one token needs: of stacked experts those that it is routed to."""
    stacked = model.experts is not None and leaf.dims[0] == "X" and len(leaf.dims) > 1
    return model.experts.per_token / model.experts.count if model.experts and stacked else 1.0


def _speed(case: Case, reads: Reads, batch: int, nodes: int, context: int, pages: int, draft_pages: int) -> Speed:
    device, drafter, model = case.device, case.outline.drafter, case.outline.target.config
    speed = device.speed(model.dtype)

    def forward(tokens: int) -> float:
        read = reads.forward + batch * context * pages
        return max(read / device.bandwidth, 2 * reads.products * tokens / speed)

    read = 0
    if nodes > 1 and reads.draft_weights:
        read = drafter.within(nodes).depth * (reads.level + batch * context * draft_pages) + reads.once
    return Speed(batch, nodes, forward(batch), read / device.bandwidth, forward(batch * nodes))


@lru_cache(16)
def _undivided(outline: Outline, devices: int, groups: int) -> dict[str, int]:
    """Bytes by name, of what several devices hold whole each."""
    found: dict[str, int] = {}
    if devices == 1:
        return found
    model, head = outline.target.config, outline.head
    parts: list[tuple[str, Table, Sizes, Any, Bits | None]]
    parts = [("", table(model), dimensions(model), outline.target.pages, outline.bits)]
    if head is not None:
        parts.append(("draft ", *head_parameters(head, outline.target), outline.draft_pages, outline.draft_bits))
    for name, declared, sizes, specs, bits in parts:
        for leaf in leaves_of(declared):
            if leaf_share(leaf, sizes, devices, groups) == 1:
                key = name + leaf.name
                found[key] = found.get(key, 0) + held_bytes([leaf], sizes, model.dtype, bits=bits)
        if (whole := page_bytes(specs)) == page_bytes(specs, devices):
            found[f"{name}pages of a token"] = whole
    return found


@lru_cache(16)
def _state_bytes(outline: Outline, page_size: int, rows: int) -> tuple[int, int]:
    """Of a token in all pools, and of everything else in the state; on one device."""

    def state(pool: PoolShape) -> Any:
        return init_state(outline.params, outline.target, outline.drafter, rows=rows, pool=pool)

    each = bytes_per_token(state, page_size)
    return each, _nbytes(jax.eval_shape(lambda: state(PoolShape(1, page_size)))) - each * page_size


def _nbytes(tree: Any) -> int:
    return sum(prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))
