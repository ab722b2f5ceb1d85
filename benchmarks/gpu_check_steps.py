"""Parts `steps-B` and `memory` of `gpu_check.py`: what a step costs at Llama 3.1 8B's size, with random weights.

A plain step (a tree of one node) and speculative steps of several trees, each row at a context of its own pages in
shuffled order, keys and values random. How long a step takes does not depend on what is accepted, and an untrained head
has next to nothing accepted. The variants share one pool, which is most of the memory, and take turns. Many steps are
dispatched, each with the state that the one before has given back, and waited for together; then all rows go back to
where they began.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_check_report import Plan, Report, say
from llama_shapes import eagle3_head, kv_bytes, least_bytes, llama_8b, nbytes, normal, random_head, random_target
from thunks import counts, dump_options, read_dump
from timing import WARMUP, Region, copy_bandwidth, region

from specjax import (
    Eagle3,
    ModelConfig,
    Params,
    PoolShape,
    RopeConfig,
    StepInput,
    init_state,
    make_drafter,
    make_steps,
    make_target,
    new_row,
)
from specjax.config import HeadConfig
from specjax.step import DecodeState, StepConfig

Tree = tuple[int, int, int]
"""Steps, top-k, draft tokens (the root included)."""

GOAL_TREE: Tree = (7, 1, 8)
GOALS = {"share": 0.85, "ratio": 1.35}
"""Issue 5: a plain step at batch 1, as a share of its ceiling; a (7,1,8) step, as a multiple of a plain one."""

HEAD_WEIGHTS = Eagle3().weights("the head", "bfloat16", "gpu", otherwise="none")
"""How the server stores them on a GPU."""

NEVER = 10**9
"""Tokens that a row may still emit."""


def model_of(plan: Plan) -> ModelConfig:
    if not plan.tiny:
        return llama_8b(plan.layers)
    return ModelConfig(
        "llama", 128, 64, 128, plan.layers, 4, 2, 16, 1e-5, RopeConfig(), 4096, tied_embeddings=False, dtype="bfloat16"
    )


class Bench:
    """One model, one batch, one context: a state that all variants share."""

    def __init__(self, plan: Plan, config: ModelConfig, head: HeadConfig, params: Params, batch: int, context: int):
        self.plan, self.config, self.head, self.params = plan, config, head, params
        self.batch, self.context = batch, context
        self.times = 2 if plan.tiny else 16  # steps in a region
        longest = max([1, *(drafter.depth + 1 for drafter in map(self.drafter, plan.trees))])
        width = -(-(context + (self.times + WARMUP) * longest) // plan.page_size)
        self.pool = PoolShape(batch * width, plan.page_size)
        order = np.random.default_rng(plan.seed).permutation(self.pool.pages).astype(np.int32)
        arrays = (np.arange(batch, dtype=np.int32), order.reshape(batch, width), np.ones(batch, bool))
        self.inputs = jax.block_until_ready(StepInput(*map(jnp.asarray, arrays)))
        self.state: DecodeState | None = None

    def drafter(self, tree: Tree | None, backend: str | None = None) -> Any:
        if tree is None:
            return make_drafter("NONE")
        names = ("steps", "topk", "nodes")
        target = make_target(self.config, backend=backend)
        return make_drafter(
            Eagle3(**dict(zip(names, tree, strict=True))), target=target, head=self.head, backend=backend
        )

    def fill(self) -> DecodeState:
        """A state of rows at the context, and of random pages. A pool of zeros is never made, beside which there would
        be no room for this one."""
        if self.state is not None:
            return self.state
        drafter = self.drafter(self.plan.trees[0]) if self.plan.trees else self.drafter(None)
        target = make_target(self.config)
        begin = partial(init_state, self.params, target, drafter, rows=self.batch)
        small, shapes = begin(pool=PoolShape(1, self.plan.page_size)), jax.eval_shape(partial(begin, pool=self.pool))
        steps = make_steps(target, drafter)
        row = new_row(self.config.vocab_size, limit=NEVER, prefix_length=self.context)
        for slot in range(self.batch):
            small = steps.admit(small, np.int32(slot), row)
        keys = iter(jax.random.split(jax.random.key(self.plan.seed), len(jax.tree.leaves(shapes))))

        def leaf(made: jax.Array, wanted: Any) -> jax.Array:
            key = next(keys)
            return made if made.shape == wanted.shape else normal(wanted, key)

        self.state = jax.block_until_ready(jax.tree.map(leaf, small, shapes))
        return self.state

    def reset(self) -> None:
        """All rows back to the context."""
        state = self.fill()
        begin = jnp.full(self.batch, self.context, jnp.int32)
        rows = state.rows._replace(prefix_length=begin, generated=jnp.zeros(self.batch, jnp.int32))
        self.state = jax.block_until_ready(state._replace(rows=rows))

    def compile(
        self, tree: Tree | None, backend: str, options: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[Any, dict[str, Any]]:
        """A step as `make_steps` jits it, with these of XLA's options changed, and what the compiler says of it."""
        drafter = self.drafter(tree, backend)
        config = StepConfig() if self.plan.several_widths else StepConfig((drafter.width,))
        jitted = make_steps(make_target(self.config, backend=backend), drafter, config=config).speculate
        state = self.fill()
        state = state if tree is not None else state._replace(draft=())
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (self.params, state, self.inputs))
        with tempfile.TemporaryDirectory(prefix="specjax-gpu-") as folder:
            start = time.perf_counter()
            executable = jitted.lower(*shapes).compile(compiler_options=dump_options(folder) | dict(options))
            seconds = time.perf_counter() - start
            dump = read_dump(folder)
        try:
            memory = executable.memory_analysis()
        except jax.errors.JaxRuntimeError:  # not every device tells
            memory = None
        found: dict[str, Any] = {"seconds_to_compile": round(seconds, 1), "state_bytes": nbytes(state)}
        if dump is not None:
            found |= counts(*dump)
        if memory is not None:
            found |= {"alias_bytes": memory.alias_size_in_bytes, "temp_bytes": memory.temp_size_in_bytes}
        return executable, found

    def call(self, executable: Any, tree: Tree | None) -> Any:
        """One step, dispatched; the state that it gives back is the next one's."""
        state = self.fill()
        self.state = None  # donated: if the call fails, there is none
        given = state if tree is not None else state._replace(draft=())
        after, output = executable(self.params, given, self.inputs)
        self.state = after if tree is not None else after._replace(draft=state.draft)
        return output.emitted

    def least(self, tree: Tree | None) -> float:
        """Bytes that a step must read: weights once a forward, and the rows' keys and values once a forward."""
        tokens = self.batch * self.context
        steps = 0 if tree is None else self.drafter(tree).depth
        head = None if tree is None else self.head
        weights = least_bytes(self.config, head, steps, quantization=HEAD_WEIGHTS)
        return sum(weights.values()) + tokens * (kv_bytes(self.config) + steps * kv_bytes(self.head))


def models(plan: Plan) -> tuple[ModelConfig, HeadConfig, Params]:
    config = model_of(plan)
    head = eagle3_head(config)
    drafts = random_head(head, config, plan.seed + 1, quantization=HEAD_WEIGHTS)
    return config, head, Params(random_target(config, plan.seed), drafts)


def steps(report: Report, batch: int) -> None:
    """Plain and speculative steps of one batch, at each context."""
    plan = report.plan
    batch = min(batch, 2) if plan.tiny else batch
    bandwidth = copy_bandwidth(16 if plan.tiny else None)
    report.add("ceiling", copy_gigabytes_per_second=round(bandwidth / 1e9, 1))
    config, head, params = models(plan)
    params = jax.block_until_ready(params)
    for index, implementation in enumerate(plan.implementations):
        # All trees with the first one. The others are there to be compared with.
        trees = [None, *(tree for tree in plan.trees if index == 0 or tree == GOAL_TREE)]
        for context in plan.contexts:
            name = f"batch {batch}, context {context}, {implementation}"
            if report.in_time(name):
                with report.attempt(name):
                    bench = Bench(plan, config, head, params, batch, context)
                    _time(report, bench, name, implementation, trees, bandwidth)
                bench = None  # its pool, before the next one is made


def _time(
    report: Report, bench: Bench, name: str, implementation: str, trees: list[Tree | None], bandwidth: float
) -> None:
    ceiling = bench.least(None) / bandwidth
    weights = least_bytes(bench.config)["target_bytes"]
    say(
        f"{name}: weights {weights / 1e9:.2f} GB + keys and values {(bench.least(None) - weights) / 1e9:.2f} GB at the"
        f" {bandwidth / 1e9:.0f} GB/s of a copy take {1e3 * ceiling:.2f} ms, so {bench.batch / ceiling:.0f} tokens/s at"
        " most without speculation"
    )
    compiled: dict[Tree | None, tuple[Any, dict[str, Any]]] = {}
    slowest = 0.0
    for tree in trees:
        label = f"{name}, {_words(tree)}"
        if report.in_time(label, needs=2 * slowest):
            with report.attempt(label):
                start = time.monotonic()
                compiled[tree] = bench.compile(tree, implementation)
                bench.reset()
                for _ in range(WARMUP):
                    jax.block_until_ready(bench.call(compiled[tree][0], tree))
                slowest = max(slowest, time.monotonic() - start)
    samples: dict[Tree | None, list[Region]] = {tree: [] for tree in compiled}
    for turn in range(3 if report.plan.tiny else 8):
        for tree, (executable, _) in compiled.items():
            if len(samples[tree]) < turn - 1:
                continue  # it has failed
            with report.attempt(f"{name}, {_words(tree)}"):
                bench.reset()
                taken = region(partial(bench.call, executable, tree), bench.times)
                if turn:
                    samples[tree].append(taken)
    plain = statistics.median(s.total for s in samples[None]) if samples.get(None) else None
    say(
        f"  {'step':10} {'ms':>8} {'spread':>7} {'host ms':>8} {'plain x':>8} {'ceiling ms':>10} {'% of it':>8}"
        f" {'tokens/s':>9} {'kernels':>8} {'always':>7} {'graphs':>7} {'one':>4} {'temp MB':>8} {'compile s':>9}"
    )
    for tree, taken in samples.items():
        if taken:
            _tell(report, bench, implementation, tree, taken, plain, bandwidth, compiled[tree][1])


def _tell(
    report: Report,
    bench: Bench,
    implementation: str,
    tree: Tree | None,
    taken: list[Region],
    plain: float | None,
    bandwidth: float,
    found: dict[str, Any],
) -> None:
    each = [sample.total for sample in taken]
    median, host = statistics.median(each), statistics.median(sample.dispatch for sample in taken)
    least = bench.least(tree)
    share, ratio = least / bandwidth / median, None if plain is None else median / plain
    row = {
        "batch": bench.batch,
        "context": bench.context,
        "implementation": implementation,
        "tree": tree,
        "several_widths": bench.plan.several_widths,
        "milliseconds": round(1e3 * median, 4),
        "host_milliseconds": round(1e3 * host, 4),
        "ratio_to_plain": None if ratio is None else round(ratio, 4),
        "least_bytes": int(least),
        "share_of_ceiling": round(share, 4),
        "tokens_per_second": round(bench.batch / median, 1) if tree is None else None,
        "samples_ms": [round(1e3 * x, 4) for x in each],
        **found,
    }
    report.add("step", **row)
    mark = ""
    if tree is None and bench.batch == 1:
        mark = f"  aim: {GOALS['share']:.0%}, {'reached' if share >= GOALS['share'] else 'missed'}"
    elif tree == GOAL_TREE and ratio is not None:
        mark = f"  aim: {GOALS['ratio']}x, {'reached' if ratio <= GOALS['ratio'] else 'missed'}"
    say(
        f"  {_words(tree):10} {1e3 * median:8.3f} {(max(each) - min(each)) / median:6.1%} {1e3 * host:8.3f}"
        f" {'' if ratio is None else f'{ratio:.3f}':>8} {1e3 * least / bandwidth:10.3f} {share:7.1%}"
        f" {'' if tree else f'{bench.batch / median:.1f}':>9} {found.get('kernels', '?'):>8}"
        f" {found.get('kernels_every_call', '?'):>7} {found.get('graphs', '?'):>7}"
        f" {'yes' if found.get('one_graph') else 'no' if 'graphs' in found else '?':>4}"
        f" {found.get('temp_bytes', 0) / 1e6:8.1f} {found['seconds_to_compile']:9.1f}{'' if bench.plan.tiny else mark}"
    )


def _words(tree: Tree | None) -> str:
    return "plain" if tree is None else ",".join(map(str, tree))


# Memory.


def memory(report: Report) -> None:
    """What is in use after each thing that is made, beside what its sizes say; and that no step copies the pool."""
    plan = report.plan
    batch, context = 8 if not plan.tiny else 2, plan.contexts[-1]
    device = jax.devices()[0]
    before = (device.memory_stats() or {}).get("bytes_in_use", 0)
    expected = 0.0

    def tell(what: str, more: float) -> None:
        nonlocal expected
        expected += more
        stats = device.memory_stats() or {}
        used, peak = stats.get("bytes_in_use"), stats.get("peak_bytes_in_use")
        used = None if used is None else used - before
        report.add("memory", what=what, expected_bytes=int(expected), in_use_bytes=used, peak_bytes=peak,
                   limit_bytes=stats.get("bytes_limit"))  # fmt: skip
        told = ["not told by this device" if x is None else f"{x / 1e6:12.1f}" for x in (used, peak)]
        say(f"{what:44} {expected / 1e6:12.1f} {told[0]:>12} {told[1]:>12}")

    say(
        f"{'batch ' + str(batch) + ', context ' + str(context) + ', MB':44} {'by size':>12} {'in use':>12} {'peak':>12}"
    )
    config, head, params = models(plan)
    tell("the target's weights and the head's", nbytes(jax.block_until_ready(params)))
    bench = Bench(plan, config, head, params, batch, context)
    tell("+ the pools and the rows", nbytes(bench.fill()))
    for index, implementation in enumerate(plan.implementations):
        for tree in (None, *plan.trees[-1:]):
            name = f"{implementation}, {_words(tree)}"
            if not report.in_time(name, needs=0 if plan.tiny else 30, check=index == 0):
                continue
            with report.attempt(name, check=index == 0):
                executable, found = bench.compile(tree, implementation)
                bench.reset()
                for _ in range(WARMUP):
                    jax.block_until_ready(bench.call(executable, tree))
                aliased, temporary = found.get("alias_bytes", 0), found.get("temp_bytes", 0)
                layer = nbytes(bench.fill().cache) / config.num_layers
                tell(f"after {WARMUP} steps of {name}", 0)
                say(f"  aliased {aliased / 1e6:.1f} MB of the state's {found['state_bytes'] / 1e6:.1f}, temporary "
                    f"{temporary / 1e6:.1f} MB; one layer's pages are {layer / 1e6:.1f} MB")  # fmt: skip
                report.add("step memory", implementation=implementation, tree=tree, batch=batch, context=context,
                           layer_bytes=layer, **found)  # fmt: skip
                report.check(aliased >= found["state_bytes"], f"{name}: {aliased} bytes of the state's "
                             f"{found['state_bytes']} are aliased, so the step copies a pool")  # fmt: skip
                del executable
