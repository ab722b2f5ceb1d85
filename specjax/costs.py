"""The cost model: what a decoding step reads, multiplies and launches, and from that how long it takes. An estimate.

Counts follow from declarations (parameter tables, page specs), so every family, quantised weights and draft heads are
counted by the same code. Seconds follow from the counts and a `Machine`:

    a kernel       max(bytes / bandwidth, flops / speed) + its launch; on a CPU the sum of the two instead of the larger
    a step         the sum over its kernels: the draft's levels, the target's forward, writes to pages, observation
    an exchange    `specjax.fabric`; of several devices each has its share of weights and pages (`specjax.shares`)

Nothing is measured, compiled or run here. Left out: processed logits (sampling other than greedy), the host. Where a
measurement exists, it decides.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from specjax_kernels import Quantised
from specjax_kernels.launch import LEAST_SPLIT, MOST_SPLITS, UNKNOWN

from specjax.cache import PageSpec
from specjax.config import Experts, HeadConfig, ModelConfig, MtpConfig
from specjax.devices import Device
from specjax.drafters.base import Drafter, Params
from specjax.drafters.tree_shape import TreeShape
from specjax.fabric import HGX, Fabric
from specjax.models import table
from specjax.models.params import Bits, Leaf, Sizes, dimensions, leaf_bytes, read_leaves
from specjax.models.target import Target
from specjax.outline import Outline, head_parameters, level_reads
from specjax.shares import head_share, leaf_share, page_bytes, splits_input


@dataclass(frozen=True)
class Machine:
    """Constants of a device. The defaults are an NVIDIA GPU's, in steps that run as one CUDA graph.

    Sources of the defaults, of which none was measured with this code: estimates for an H200 have a copy at 4.3 of the
    data sheet's 4.8 TB/s (`COPY_SHARE`), small kernels inside a graph at 1.6 to 2.6 us (`KERNEL_RANGE`), an attention
    call at 4.5 us, and products at 80 to 93% of the copy's speed, which is what `products` and the launch come to.
    Assumed: large products reach 0.7 of the data sheet (`FLOPS_SHARE`), and `pages`.
    """

    name: str
    bandwidth: float  # bytes/s that a plain copy reaches, read and written together
    flops: float  # a second, that products of many rows reach
    products: float = 0.94  # share of the bandwidth at which a product reads its weights
    pages: float = 0.75  # share of it at which attention reads pages
    kernel: float = 2.1e-6  # seconds that a small kernel takes, whatever it does
    attention: float = 4.5e-6  # seconds of an attention call over few tokens
    overlapped: bool = True  # whether reading and multiplying overlap; False: one adds to the other
    fabric: Fabric = HGX  # between several of these devices


COPY_SHARE, FLOPS_SHARE = 0.9, 0.7
KERNEL_RANGE = (1.6e-6, 2.6e-6)  # of `Machine.kernel` on an NVIDIA GPU


def machine(device: Device, dtype: str, platform: str) -> Machine:
    """The constants of a device; `platform` "cpu" or "gpu". Speeds that were measured on it are taken as they are.

    Those of a CPU are fitted to benchmarks/results/bare_loop-2026-11-21.json, 2 cores: 20.4 ms behind 50 tokens and
    27.5 ms behind 800, of which reading the weights takes 17.5 ms.
    """
    copy, products = (1.0, 1.0) if device.measured else (COPY_SHARE, FLOPS_SHARE)
    found = Machine(device.name, device.bandwidth * copy, device.speed(dtype) * products)
    if platform == "cpu":
        return replace(found, products=1.0, pages=0.16, kernel=6e-6, attention=6e-6, overlapped=False)
    return found


class Tree(NamedTuple):
    """What is drafted and checked of a request in a step."""

    steps: int  # levels of the draft
    topk: int  # nodes of a level
    nodes: int  # N, the root included

    @classmethod
    def of(cls, shape: TreeShape) -> Tree:
        return cls(shape.steps, shape.topk, shape.nodes)

    @property
    def depth(self) -> int:
        return min(self.steps, self.nodes - 1)


PLAIN = Tree(0, 1, 1)


class Cost(NamedTuple):
    """Of a step or of a part of it."""

    bytes: float = 0.0  # read and written
    flops: float = 0.0
    kernels: float = 0.0
    seconds: float = 0.0

    def plus(self, other: Cost, times: int = 1) -> Cost:
        return Cost(*(mine + times * more for mine, more in zip(self, other, strict=True)))


@dataclass(frozen=True)
class StepCost:
    """Of one step of a batch. `parts` are keyed by phase and kind, such as "verify, products"."""

    batch: int
    tree: Tree
    context: int  # committed tokens of each request
    parts: Mapping[str, Cost]

    @property
    def total(self) -> Cost:
        found = Cost()
        for part in self.parts.values():
            found = found.plus(part)
        return found

    @property
    def seconds(self) -> float:
        return self.total.seconds

    def phase(self, name: str) -> Cost:
        """`name`: draft, verify or commit."""
        found = Cost()
        for key, part in self.parts.items():
            found = found.plus(part) if key.startswith(f"{name},") else found
        return found

    def rate(self, accept_length: float = 1.0) -> float:
        """Tokens a second."""
        return self.batch * accept_length / self.seconds


class Op(NamedTuple):
    """A kernel, or a few that do one thing. Rows are tokens of all requests in one forward."""

    kind: str  # a key of `KINDS`
    kernels: int = 1
    weights: float = 0.0  # bytes, read once for all rows
    row_bytes: float = 0.0
    row_flops: float = 0.0
    token_bytes: int = 0  # of each committed token that a request attends to
    token_flops: float = 0.0  # of each such token and row
    partial: float = 0.0  # bytes of a row's partial result, of each split of the committed tokens
    heads: tuple[int, int] = (1, 1)  # key/value heads, and query heads of each
    window: int | None = None
    experts: Experts | None = None  # the weights are theirs: only chosen ones are read
    devices: int = 1  # of an exchange: `row_bytes` are summed over these, or gathered
    gathered: bool = False


TABLE = 8192  # tokens that a page table holds: 512 pages of 16
PRODUCTS, ATTENTION, SMALL, EXCHANGE = KINDS = ("products", "attention", "small kernels", "exchanges")


def op_cost(op: Op, on: Machine, batch: int, rows: int, context: int, table: int = TABLE) -> Cost:
    """`rows` of the whole batch, each behind `context` committed tokens, of `table` that its page table holds. Of an
    exchange the bytes are those that pass between devices; nothing else runs meanwhile."""
    if op.kind == EXCHANGE:
        exchange = on.fabric.all_gather if op.gathered else on.fabric.all_reduce
        return Cost(rows * op.row_bytes, 0.0, op.kernels, exchange(rows * op.row_bytes, op.devices))
    seen = context if op.window is None else min(context, op.window)
    weights = op.weights * (distinct_experts(op.experts, rows) / op.experts.count if op.experts else 1)
    pages, moved = batch * seen * op.token_bytes, rows * op.row_bytes
    between = 0.0
    if op.partial and on.overlapped:  # written by the attention kernel, read by the one that combines them
        between = 2 * rows * op.partial * splits(batch * op.heads[0], rows // batch * op.heads[1], table)
    flops = rows * (op.row_flops + seen * op.token_flops)
    reading = weights / (on.bandwidth * on.products) + pages / (on.bandwidth * on.pages) + moved / on.bandwidth
    reading += between / (2 * on.bandwidth)  # what was just written is read from the cache
    multiplying = flops / on.flops
    seconds = max(reading, multiplying) if on.overlapped else reading + multiplying
    launch = on.attention + (op.kernels - 1) * on.kernel if op.kind == ATTENTION else op.kernels * on.kernel
    return Cost(weights + pages + moved + between, flops, op.kernels, seconds + launch)


def splits(heads: int, rows: int, table: int) -> int:
    """Parts of the committed tokens that a GPU attends to side by side, as `specjax_kernels.launch` chooses them
    without a measurement: for `heads` of the batch, and `rows` of each."""
    tiles = -(-rows // 64)
    most = min(MOST_SPLITS, -(-table // LEAST_SPLIT), max(1, 4 * UNKNOWN.multiprocessors // (heads * tiles)))
    return 1 << most.bit_length() - 1


def distinct_experts(experts: Experts, rows: int) -> float:
    """The expected number of experts that are chosen by any of `rows` tokens, each choosing uniformly.

    Example: of 128 experts and 8 a token, 16 tokens choose 128 (1 - (120/128)^16) = 82.4.
    """
    return experts.count * (1 - (1 - experts.per_token / experts.count) ** rows)


# What a layer does, from its declaration.


def layer_ops(
    leaves: Iterable[Leaf], sizes: Sizes, config: ModelConfig | HeadConfig, pages: Any, *, window: int | None = None,
    bits: Bits | None = None, devices: int = 1,
) -> Iterator[Op]:  # fmt: skip
    """The kernels of one decoder layer without its writes to pages, on each of `devices` that hold their shares, and
    the exchanges between them. `pages`: its pytree of `PageSpec`s.

    A layer of Llama's is 12: norm, qkv, rotation, attention, combination of its parts, output, addition, norm, gate
    and up, their product, down, addition. So many were counted in programs compiled for an H200.
    """
    leaves, each = [*leaves], np.dtype(config.dtype).itemsize
    experts = config.experts if isinstance(config, ModelConfig) else None
    latent = config.latent if isinstance(config, ModelConfig) else None
    hidden = config.hidden_size
    attends = False
    for leaf in leaves:
        if len(leaf.dims) == 1:
            if leaf.name.endswith("norm") and leaf.name not in ("query_norm", "key_norm"):
                yield Op(SMALL, row_bytes=2 * sizes[leaf.dims[0]] * each)
            continue
        yield product_op(leaf, sizes, config, bits, devices=devices)
        share = leaf_share(leaf, sizes, devices)
        outputs = leaf.letters.partition("->")[2].split()
        width = prod(sizes[letter] for letter in outputs)
        times = experts.per_token if experts and leaf.dims[0] == "X" else 1
        if "2" in outputs:  # activation(gate) * up
            yield Op(SMALL, row_bytes=1.5 * width * each * times * share)
        if leaf.name in ("qkv", "queries"):  # rotation
            yield Op(SMALL, row_bytes=2 * width * each * share)
        attends |= leaf.name == "output"
        if leaf.name in ("output", "down", "experts_down"):  # addition to the residual stream
            if splits_input(leaf, sizes, devices):  # a shared MLP's part is added before
                yield Op(EXCHANGE, row_bytes=hidden * each, devices=devices)
            yield Op(SMALL, row_bytes=3 * hidden * each)
        if leaf.name == "router":  # scores, choice, weights of the sum
            yield Op(SMALL, kernels=4, row_bytes=8 * sizes["X"] * 4)
    if attends:
        kept, heads = page_bytes(pages, devices), round(config.num_heads * head_share(config, devices))
        kv_heads = max(1, round(config.num_kv_heads * head_share(config, devices)))
        keys, values, groups = config.head_dim, config.head_dim, (kv_heads, heads // kv_heads)
        if latent:
            keys, values, groups = latent.page_width, latent.rank, (1, heads)
        yield Op(
            ATTENTION, 2, row_bytes=heads * (keys + values) * each + kept, token_bytes=kept,
            token_flops=2 * heads * (keys + values), window=window, partial=4 * heads * (values + 2), heads=groups,
        )  # fmt: skip


def product_op(
    leaf: Leaf, sizes: Sizes, config: ModelConfig | HeadConfig, bits: Bits | None, out: int = 0, devices: int = 1
) -> Op:
    """A product with a leaf of two axes and more, of which each of `devices` has its share. `out`: bytes of an output's
    number; 0: those of the dtype."""
    each, shape = np.dtype(leaf.dtype or config.dtype).itemsize, leaf.shape(sizes)
    found = config.experts if isinstance(config, ModelConfig) and leaf.dims[0] == "X" else None
    stacked, times = (found.count, found.per_token) if found else (1, 1)
    elements = prod(shape) // stacked
    first, outputs = leaf.matrix or ((1,), (0,))  # a tied embedding [V, M] is the output matrix
    inputs = prod(shape[axis] for axis in first) // stacked
    share, within = leaf_share(leaf, sizes, devices), splits_input(leaf, sizes, devices)
    row = inputs * each * (share if within else 1) + prod(shape[axis] for axis in outputs) * (out or each) * (
        1 if within else share
    )
    weights = leaf_bytes(leaf, sizes, config.dtype, bits=bits) * share
    return Op(PRODUCTS, 1, weights, times * row, 2 * elements * times * share, experts=found)


# A model and its draft.

STEP, LEVEL, TREE_LEVEL, OBSERVE, WALK, LOOK_UP = 21, 8, 15, 5, 10, 30
"""Small kernels besides those of layers: of a step; of a level of a chain and of a tree (candidates, masks, positions);
of an observation; of a tree's walk; of a draft without a model, a guess. Counted in programs compiled for an H200: a
plain step of 32 layers has 471, a level of a tree 30 and of a chain 23
(benchmarks/results/gpu-compile-2026-11-21.json)."""

Ops = tuple[tuple[Op, int], ...]
"""Kernels and how often each is launched."""


@dataclass(frozen=True)
class Decoding:
    """The kernels of a model and of its draft on each device, and how often each is launched."""

    forward: Ops  # of the target, over all nodes
    output: Ops  # its logits
    written: tuple[int, ...]  # bytes of a token in each leaf of pages
    level: Ops = ()  # a forward of the draft
    level_output: Ops = ()
    observed: Ops = ()  # over the observed tokens
    observes_always: bool = False  # in plain steps, too; then drafting begins with a forward over the last token
    draft_written: tuple[int, ...] = ()

    @classmethod
    def of(cls, outline: Outline, devices: int = 1) -> Decoding:
        """Split over `devices`. A drafter of the user's is taken to read all its parameters in every level, on each."""
        target, head, drafts, draft_bits = outline.target, outline.head, outline.model, outline.draft_bits
        forward, output = _model_ops(target.config, target.pages, outline.bits, devices)
        found = cls(forward, output, _written(target.pages, devices))
        if head is not None:
            pages = outline.draft_pages
            of = head if isinstance(head, HeadConfig) else head.layer
            sizes = head_parameters(head, target)[1]
            level, once = level_reads(head)
            ends = [leaf for leaf in level if leaf.matrix and leaf.dims[-1] in ("V", "W")]
            inner = [leaf for leaf in level if leaf not in ends]
            layer = layer_ops(inner, sizes, of, pages[0] if pages and head is not of else pages, bits=draft_bits,
                              devices=devices)  # fmt: skip
            reads = [leaf for leaf in once if len(leaf.dims) > 1]
            reads += [leaf for leaf in inner if leaf.name in ("qkv", "latent", "fc") and leaf not in reads]
            return replace(
                found,
                level=_counted([*layer, *_embedded(target.config, devices)]),
                level_output=_counted(op for leaf in ends for op in _output(leaf, sizes, of, draft_bits, devices))
                or output,
                observed=_counted(product_op(leaf, sizes, of, draft_bits, devices=devices) for leaf in reads),
                observes_always=True,
                draft_written=_written(pages[0] if head is not of else pages, devices),
            )
        if drafts is not None:
            level, out = _model_ops(drafts.config, drafts.pages, draft_bits, devices)
            return replace(
                found, level=level, level_output=out, observed=level, draft_written=_written(drafts.pages, devices)
            )
        read = sum(prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(outline.params.draft))
        own = ((Op(PRODUCTS, weights=read), 1),)
        return replace(found, level=own, observed=own) if read else found

    @property
    def drafts_with_model(self) -> bool:
        return bool(self.level)


def _model_ops(config: ModelConfig, pages: Sequence[Any], bits: Bits | None, devices: int) -> tuple[Ops, Ops]:
    """Of a forward through all layers, and of its logits."""
    sizes, each = dimensions(config), np.dtype(config.dtype).itemsize
    ends, *layers = table(config)
    kinds = Counter((scope.leaves, config.window(i)) for i, scope in enumerate(layers))
    counts: Counter[Op] = Counter([Op(SMALL, row_bytes=2 * config.hidden_size * each)] * 2)  # embedding, final norm
    counts.update(_embedded(config, devices))
    for (leaves, window), times in kinds.items():
        for op in layer_ops(leaves, sizes, config, pages[0], window=window, bits=bits, devices=devices):
            counts[op] += times
    last = [leaf for leaf in read_leaves((ends,)) if len(leaf.dims) > 1]
    return tuple(counts.items()), _counted(op for leaf in last for op in _output(leaf, sizes, config, bits, devices))


def _embedded(config: ModelConfig, devices: int) -> list[Op]:
    """Of an embedding that is split by tokens, each device has the rows of its own: the sum is what was looked up."""
    row = config.hidden_size * np.dtype(config.dtype).itemsize
    return [Op(EXCHANGE, row_bytes=row, devices=devices)] if config.vocab_size % devices == 0 and devices > 1 else []


def _output(
    leaf: Leaf, sizes: Sizes, config: ModelConfig | HeadConfig, bits: Bits | None, devices: int
) -> Iterator[Op]:
    """Logits in float32: written, and read once, for their maximum and for whether all are finite. Devices that have
    those of a part of the vocabulary exchange their best tokens."""
    op = product_op(leaf, sizes, config, bits, out=4, devices=devices)
    vocabulary = (op.row_flops / 2) / config.hidden_size
    yield op._replace(row_bytes=op.row_bytes + 4 * vocabulary)
    if leaf_share(leaf, sizes, devices) < 1:
        yield Op(EXCHANGE, row_bytes=8, devices=devices, gathered=True)


def _counted(ops: Iterable[Op]) -> Ops:
    return tuple(Counter(ops).items())


def _written(specs: Any, devices: int) -> tuple[int, ...]:
    leaves = jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, PageSpec))
    return tuple(page_bytes(leaf, devices) for leaf in leaves)


# A step.


def step_cost(
    model: Decoding, on: Machine, *, batch: int = 1, tree: Tree = PLAIN, context: int = 1024, concurrent: bool = False,
    table: int = TABLE,
) -> StepCost:  # fmt: skip
    """The cost of a step of `batch` requests, each behind `context` tokens of `table` that a page table holds.
    `concurrent`: a graph's kernels that do not depend on one another, such as the layers' writes to pages, run side by
    side."""
    parts: dict[str, Cost] = {}

    def add(phase: str, ops: Ops, rows: int, times: int = 1) -> None:
        for op, count in ops:
            key = f"{phase}, {op.kind}"
            parts[key] = parts.get(key, Cost()).plus(op_cost(op, on, batch, rows, context, table), count * times)

    def small(phase: str, kernels: int, bytes: float = 0) -> None:
        add(phase, ((Op(SMALL, kernels, row_bytes=bytes), 1),), 1)

    drafted, path = tree != PLAIN, tree.depth + 1
    if drafted and model.drafts_with_model:
        add("draft", (*(model.level if model.observes_always else ()), *model.level_output), batch)
        add("draft", (*model.level, *model.level_output), batch * tree.topk, tree.steps - 1)
        small("draft", (LEVEL if tree.topk == 1 else TREE_LEVEL) * tree.steps)
    elif drafted:
        small("draft", LOOK_UP)
    observes = model.drafts_with_model and (drafted or model.observes_always)
    if observes:
        add("commit", model.observed, batch * path)
        small("commit", OBSERVE)
    rows = batch * tree.nodes
    add("verify", (*model.forward, *model.output), rows)
    small("verify", STEP + (WALK if drafted else 0))
    written = (*model.written, *(model.draft_written if observes else ()))
    launches = min(1, len(written)) if concurrent and on.overlapped else len(written)
    small("commit", launches, 2.0 * batch * path * sum(written))
    return StepCost(batch, tree, context, parts)


# What to choose.

AcceptLength = Callable[[Tree], float]
"""Tokens that a request emits in a step, the target's own included."""


def expected_accept(by_rank: Sequence[float]) -> AcceptLength:
    """Accept lengths from the probability that a draft's first, second, ... choice is the target's token, the same
    everywhere. Of a tree those nodes count that are likeliest to be accepted; the expectation is the sum of their
    probabilities, and 1 for the target's own token.

    Example: (0.8, 0.1) gives a chain of two drafts 1 + 0.8 + 0.64, and (2, 2, 4) 1 + 0.8 + 0.64 + 0.1.
    """

    def length(tree: Tree) -> float:
        ranks, found = by_rank[: tree.topk], 1.0
        heap = [(-p, 1) for p in ranks]
        heapq.heapify(heap)
        for _ in range(tree.nodes - 1):
            if not heap:
                break
            p, level = heapq.heappop(heap)
            found -= p
            if level < tree.depth:
                for rank in ranks:
                    heapq.heappush(heap, (p * rank, level + 1))
        return found

    return length


def cheapest_tree(
    model: Decoding, on: Machine, batch: int, trees: Iterable[Tree], accept: AcceptLength, *, context: int = 1024,
    concurrent: bool = False,
) -> StepCost:  # fmt: skip
    """The step with the most tokens a second for this batch, of `trees` and of none at all (`PLAIN`); of equal ones
    the earliest, and `PLAIN` before all."""
    steps = [
        step_cost(model, on, batch=batch, tree=tree, context=context, concurrent=concurrent) for tree in (PLAIN, *trees)
    ]
    return max(steps, key=lambda step: step.rate(1.0 if step.tree == PLAIN else accept(step.tree)))


CPU_STEP = {1: 1.0, 2: 1.16, 4: 1.52, 8: 2.42, 16: 3.8, 64: 13.0}
"""Seconds of a forward of so many tokens over those of one: SmolLM2-135M in Q4_1 on 2 cores with AVX-512 took 8.1, 9.4,
12.3 and 19.6 ms of processor time for 1, 2, 4 and 8 tokens, the median of 100 (2026-11-27). 16 is from
benchmarks/results/before-after-2026-11-25-few-rows.json, 64 is extrapolated."""
CPU_LEVEL = 0.5  # seconds of a byte that a draft reads over those of one that the target reads
FOUND = 0.3  # share of steps in which a drafter without a model proposes something for a request


def estimated_ratio(
    batch: int, drafter: Drafter, params: Params, predicted: Decoding | None, on: Machine | None
) -> float:
    """Seconds of a batch's step with drafts over those of a plain one, before either has run.

    Args:
        drafter: of the batch bucket.
        predicted, on: the model's kernels and the machine, for the cost model of a GPU; None: `CPU_STEP` and the bytes
            that a draft model reads.
    """
    if predicted is not None and on is not None:
        trees = Tree(drafter.depth, drafter.topk, drafter.width), PLAIN
        drafted, plain = (step_cost(predicted, on, batch=batch, tree=tree).seconds for tree in trees)
        return drafted / plain
    tokens, seconds = list(CPU_STEP), list(CPU_STEP.values())
    plain, checked = np.interp([batch, batch * drafter.width], tokens, seconds)
    if not drafter.runs_model:
        return 1 + (1 - (1 - FOUND) ** batch) * (checked / plain - 1)
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(part)) for part in (params.draft, params.target)]
    return checked / plain + CPU_LEVEL * drafter.depth * sizes[0] / sizes[1]


def running_model(
    target: Target, params: Params, drafter: Drafter, draft_model: HeadConfig | MtpConfig | Target | None
) -> Decoding | None:
    """The kernels of models that are loaded; None: the target is of no known family. `draft_model`: the head, layers or
    model that drafts."""
    model = draft_model if isinstance(draft_model, Target) else None
    head = None if isinstance(draft_model, Target) else draft_model
    bits = _stored_bits(params.target), _stored_bits(params.draft)
    try:
        return Decoding.of(Outline(target, params, drafter, head, model, *bits, headers=True))
    except ValueError:  # a target of the user's own declares no layers
        return None


def _stored_bits(params: Any) -> Bits | None:
    """How a model's matrices are quantised, on average; None: they have its dtype."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda leaf: isinstance(leaf, Quantised))
    few = [(getattr(path[-1], "key", None), leaf) for path, leaf in leaves if isinstance(leaf, Quantised)]
    if not few:
        return None
    names, stored = {name for name, _ in few}, jax.tree.leaves([leaf for _, leaf in few])
    weights = sum(prod(leaf.shape) for _, leaf in few)
    bits = 8 * sum(leaf.size * leaf.dtype.itemsize for leaf in stored)
    return Bits(bits / weights, bool(names & {"embed", "head"}), "embed" in names)
