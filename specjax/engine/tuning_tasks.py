"""What an engine measures on its device: products, attention's blocks, scheduling options, steps. And their use.

A product's implementation is chosen by dtype, shape and rows alone, never by the kind of step, so that plain decoding
and a tree of as many rows compute the same numbers.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import jax
import specjax_kernels
from specjax_kernels import Quantised, choice, launch
from specjax_kernels.chains import enough_layers
from specjax_kernels.linear import matrix_shape
from specjax_kernels.product_tuning import ProductBench, Shape, around
from specjax_kernels.search import Say
from specjax_kernels.specs import Spec
from specjax_kernels.timing import copy_bandwidth, product_speed

import specjax
from specjax.compiling import SCHEDULING, compiler_options
from specjax.costs import PRODUCTS, Machine, Op, op_cost
from specjax.drafters.base import Drafter, Params
from specjax.engine.buckets import Buckets
from specjax.engine.tuning import Task, Trial, Tuning
from specjax.models.target import Target

NORMED = ("qkv", "gate_up")  # leaves whose products have a norm before them
SUMMED = ("output", "down")  # and the residual stream after them
OTHERS = ("shared_gate_up", "shared_down", "queries", "query_down", "latent", "fc")

SCHEDULE = "scheduling"  # the task of how a step's graph runs

CONTEXT = 1024  # committed tokens of attention's specs


# What is measured, and on what.


def identity(params: Params, target: Target, drafter: Drafter, buckets: Buckets, page_size: int) -> dict[str, Any]:
    """All that a measurement is of: the device, versions, settings and shapes, as JSON holds them."""
    device = jax.devices()[0]
    shapes = sorted({f"{leaf.dtype} {tuple(leaf.shape)}" for leaf in jax.tree.leaves(params)})
    config = target.config
    attention = [config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim, config.dtype, page_size]
    return {
        "device": device.device_kind,
        "driver": device.client.platform_version,
        "capability": launch.generation(),
        "devices": jax.device_count(),
        "cpus": os.cpu_count() if device.platform == "cpu" else None,
        "versions": {"specjax": specjax.__version__, "jax": version("jax"), "jaxlib": version("jaxlib")},
        "kernels": _kernels(),
        "settings": [os.environ.get("XLA_FLAGS", ""), choice.forced()],
        "shapes": shapes,
        "attention": attention,
        "drafter": [
            drafter.name,
            drafter.width,
            drafter.depth,
            drafter.topk,
            *(["n-grams"] if drafter.typical else []),
        ],
        "batches": [[batch, *buckets.tree_widths(batch)] for batch in buckets.batches],
    }


@functools.cache
def _kernels() -> str:
    """A hash of the kernels' sources."""
    files = sorted(Path(specjax_kernels.__file__ or "").parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def with_ceilings(tuning: Tuning, dtype: str) -> Tuning:
    """With the device's speeds of a copy and of a large product, measured in a second where they are not known."""
    if tuning.copy_speed is not None:
        return tuning
    megabytes = 256 if jax.default_backend() == "cpu" else 1024
    return replace(tuning, copy_speed=copy_bandwidth(megabytes), product_speed=product_speed(dtype))


def machine(tuning: Tuning) -> Machine:
    """The cost model's constants with the ceilings of a record."""
    assert tuning.copy_speed is not None and tuning.product_speed is not None
    return Machine(str(tuning.of["device"]), tuning.copy_speed, tuning.product_speed)


# Products.


def product_tasks(params: Params, dtype: str, drafter: Drafter, buckets: Buckets, on: Machine) -> Iterator[Task]:
    """One for each matrix of the layers in the model's dtype and each number of rows, rounded up to a power of two,
    that a step has for some batch."""
    for part, given in (("target", params.target), ("draft", params.draft)):
        matrices: dict[Shape, list[Any]] = {}
        for name, leaf in matrices_of(given):
            if name in (*NORMED, *SUMMED, *OTHERS) and leaf.dtype == dtype:
                matrices.setdefault(_shape(name, leaf, dtype), []).append(leaf)
        for rows, rank in _rows(part, drafter, buckets).items():
            for shape, leaves in matrices.items():
                yield _product_task(shape._replace(rows=rows), leaves, on, rank)


def matrices_of(params: Any) -> Iterator[tuple[str, Any]]:
    """Names and arrays, those in few bits left out."""
    paths, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda leaf: isinstance(leaf, Quantised))
    for path, leaf in paths:
        name = getattr(path[-1], "key", None)
        if isinstance(name, str) and not isinstance(leaf, Quantised) and leaf.ndim > 1:
            yield name, leaf


def _shape(name: str, leaf: Any, dtype: str) -> Shape:
    whole = (prod(leaf.shape[:-1]), leaf.shape[-1]) if name == "output" else leaf.shape
    weight = matrix_shape(whole, gated=name.endswith("gate_up"))
    return Shape(dtype, weight, 0, name in NORMED, name in SUMMED)


def _rows(part: str, drafter: Drafter, buckets: Buckets) -> dict[int, int]:
    """Rows of a part's products -> the rank, from 1, of the smallest batch that has them."""
    found: dict[int, int] = {}
    for rank, batch in enumerate(buckets.batches, start=1):
        for width in buckets.tree_widths(batch):
            small = drafter.within(width)
            each = (1, width) if part == "target" else (1, small.topk, small.depth + 1)
            for rows in (launch.power_of_two(batch * number) for number in each):
                if rows <= choice.MOST_ROWS:
                    found.setdefault(rows, rank)
    return found


def _product_task(shape: Shape, leaves: list[Any], on: Machine, rank: int) -> Task:
    op = Op(PRODUCTS, weights=shape.bytes, row_flops=shape.flops / shape.rows)
    # One after another: side by side, products would share what each has alone in a step.
    jit = functools.partial(jax.jit, compiler_options=compiler_options(**{SCHEDULING: "SERIALIZE"}))

    def begin(say: Say) -> Trial:
        bench = ProductBench(shape, leaves, jit=jit, say=say)
        return Trial("xla", functools.partial(around, shape), bench.score, lambda: bench.start_seconds)

    value = len(leaves) * op_cost(op, on, 1, shape.rows, 0).seconds / rank
    return Task("products", shape.key, begin, value, shape.bytes, shape.flops)


# Attention.


def attention_tasks(target: Any, drafter: Drafter, buckets: Buckets, page_size: int, on: Machine) -> Iterator[Task]:
    """One for each entry of the launch table that the target's steps and prefills use."""
    # Imported here, as below: a process without a GPU starts sooner.
    groups = importlib.import_module("specjax_kernels.tuning").groups
    members = groups(_specs(target.config, drafter, buckets, page_size))
    for rank, (name, specs) in enumerate(members.items(), start=1):
        read = _layers(specs[0]) * sum(spec.bytes_read for spec in specs)
        begin = functools.partial(_begin_attention, specs)
        value = target.config.num_layers * (on.attention + read / on.bandwidth) / rank
        yield Task("attention", name, begin, value, bytes=read)


def _layers(spec: Spec) -> int:
    """Calls in one program."""
    return 1 if jax.default_backend() == "cpu" else enough_layers(spec)


def _begin_attention(specs: list[Spec], say: Say) -> Trial:
    kernel, first = importlib.import_module("specjax_kernels.tuning"), specs[0]
    bench = kernel.Bench(specs, _layers(first), runs=5, seconds=0.02, say=say)
    width, rows, capability = max(first.E, first.v_width), first.N * first.H // first.K, launch.generation()
    named = launch.table().get(capability or "", {}).get(launch.key(first.dtype, width, rows))
    thumb = launch.rule_of_thumb(first.dtype, width, rows, capability)
    start = next((blocks for blocks in (named, thumb) if blocks is not None and bench.runs(blocks)), None)
    if start is None:
        raise RuntimeError("the kernel does not run, or is wrong, with the blocks that it would have")
    score = functools.partial(bench.score, start=start)
    return Trial(start, kernel.around, score, lambda: bench.start_seconds)


def _specs(config: Any, drafter: Drafter, buckets: Buckets, page_size: int) -> Iterator[Spec]:
    """Attention of the smallest batch's steps, of the largest that drafts, and of a prompt's chunk."""
    latent = config.latent
    heads = (config.num_heads, config.num_kv_heads, config.head_dim, None)
    if latent is not None:
        heads = (config.num_heads, 1, latent.page_width, latent.rank)
    window = next((each for each in config.windows if each is not None), None) if config.windows else None
    longest = buckets.tables[0] * page_size
    context = max(1, min(CONTEXT, longest))
    shared: dict[str, Any] = dict(zip(("H", "K", "E", "Ev"), heads, strict=True))
    shared |= {"latent": latent is not None, "dtype": config.dtype, "softcap": config.attention_softcap}
    shared |= {"S": page_size, "T": min(buckets.tables[0], -(-2 * context // page_size))}
    if None not in (config.windows or (1,)):
        shared["window"] = window
    for batch in dict.fromkeys((buckets.batches[0], buckets.most_drafting)):
        for width in dict.fromkeys((buckets.tree_widths(batch)[-1], drafter.topk, 1)):
            mask = "causal" if width == 1 or drafter.chains else "tree"
            yield Spec(f"batch {batch}, {width} nodes", (context,) * batch, width, width, mask=mask, **shared)
    chunk = min(buckets.chunks[0], context)
    yield Spec(f"chunk of {chunk}", (context - chunk,), chunk, chunk, mask="causal", **shared)


# Use.


def entries(tuning: Tuning) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attention's and products' entries as `specjax_kernels.launch` and `choice` take them. Raises ValueError for what
    is none."""
    attention = {name: launch.entry(name, each.choice) for name, each in tuning.named("attention").items()}
    products = {name: choice.entry(name, name, each.choice) for name, each in tuning.named("products").items()}
    if schedule := _schedule(tuning):
        products["pages"] = choice.entry("pages", "pages", schedule["pages"])
    return attention, products


def options(tuning: Tuning) -> dict[str, str | None]:
    """XLA's options for steps, in place of those of `specjax.compiling`."""
    schedule = _schedule(tuning)
    return {SCHEDULING: str(schedule["scheduling"])} if schedule else {}


def _schedule(tuning: Tuning) -> dict[str, Any] | None:
    found = tuning.named("steps").get(SCHEDULE)
    return None if found is None else found.choice


def use(tuning: Tuning) -> None:
    """Takes a record's entries from now on, in this process. Before anything is traced. Raises ValueError, having taken
    none, if one is wrong."""
    attention, products = entries(tuning)
    launch.use(launch.in_use() | attention)
    choice.use(choice.in_use() | products)
