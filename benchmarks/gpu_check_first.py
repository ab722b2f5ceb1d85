"""Parts of `gpu_check.py --plan first` that no other run has: what a first half hour on a GPU should tell.

`sampled` compares tokens with those of this machine's CPU, which another process draws from the same weights; `profile`
sums a step's time by kernel; `products` times the 8B's products by rows; `options` times steps with one of XLA's
options changed.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention_chains import CACHES, rotating
from gpu_check_report import Report, say
from gpu_check_steps import GOAL_TREE, Bench, model_of, models
from llama_shapes import eagle3_head
from specjax_kernels import linear
from timing import WARMUP, copy_bandwidth, interleaved
from traces import Trace

from specjax import (
    ModelConfig,
    Params,
    PoolShape,
    RopeConfig,
    StepConfig,
    StepInput,
    init_state,
    make_drafter,
    make_steps,
    make_target,
    new_row,
)
from specjax.compiling import IN_GRAPHS, LOOPS, SCHEDULING, compiler_options
from specjax.drafters.table import options_of
from specjax.models import init_params
from specjax.models.draft_head import init_head_params

WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    {"presence_penalty": 0.5},
)
"""How the rows of `sampled` draw, one row each."""

DRAFTS: dict[str, tuple[str, dict[str, int]]] = {
    "NONE": ("NONE", {}),
    "NGRAM": ("NGRAM", {"capacity": 4096, "nodes": 8}),
    "EAGLE3": ("EAGLE3", {"steps": 3, "topk": 4, "nodes": 8}),
}
SAMPLED_STEPS = 8
"""A fault of a loop in a graph showed at its second execution."""

PARTING_ROWS = 1
"""Rows of an algorithm that may part from the CPU's: a sum in another order may turn a draw at a near tie."""


# Tokens.


def sampled(report: Report) -> None:
    """Rows that sample, on this device and on this machine's CPU, step by step with inputs that are new each time."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        file = Path(folder, "cpu.json")
        environment = dict(os.environ, JAX_PLATFORMS="cpu")
        command = [sys.executable, str(Path(__file__).resolve()), str(file), str(report.plan.seed)]
        other = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            mine = drawn(report.plan.seed)
            _, said = other.communicate(timeout=60 * report.plan.minutes)
        finally:
            other.kill()
        if other.returncode:
            raise RuntimeError(f"the CPU's process ended with status {other.returncode}: {said.strip()[-300:]}")
        theirs = json.loads(file.read_text())
    for name, rows in mine.items():
        parted = [row for row, (one, two) in enumerate(zip(rows, theirs[name], strict=True)) if one != two]
        tokens = sum(map(len, rows))
        say(
            f"{name:8} {len(rows) - len(parted)}/{len(rows)} rows equal to the CPU's, {tokens} tokens, parted: {parted}"
        )
        report.add("sampled", algorithm=name, rows=len(rows), parted=parted, tokens=tokens)
        report.check(len(parted) <= PARTING_ROWS, f"sampled {name}: rows {parted} draw other tokens than the CPU")


def drawn(seed: int) -> dict[str, list[list[int]]]:
    """Per algorithm, the tokens of each row of `WAYS` after `SAMPLED_STEPS` steps, in float32. Weights are numpy's, the
    same on every device."""
    config = ModelConfig(
        "llama", 512, 128, 256, 4, 4, 2, 32, 1e-5, RopeConfig(), 512, tied_embeddings=False, dtype="float32"
    )
    rows, pages = len(WAYS), 8
    found: dict[str, list[list[int]]] = {}
    with jax.default_matmul_precision("highest"):
        target = make_target(config)
        head = replace(eagle3_head(config, 256), dtype="float32")
        rng = np.random.default_rng(seed)

        def filled(shapes: Any) -> Any:
            def leaf(path: Any, shape: Any) -> jax.Array:
                if not jnp.issubdtype(shape.dtype, jnp.floating):
                    return jnp.arange(shape.size, dtype=shape.dtype).reshape(shape.shape)  # the draft vocabulary's ids
                scale = 1.0 if len(shape.shape) < 2 else 2.0 / np.sqrt(config.hidden_size)
                return jnp.asarray(rng.normal(size=shape.shape) * scale, shape.dtype)

            return jax.tree_util.tree_map_with_path(leaf, shapes)

        key = jax.random.key(0)
        weights = filled(jax.eval_shape(partial(init_params, config), key))
        draft = filled(jax.eval_shape(partial(init_head_params, head, target), key))
        for name, (algorithm, options) in DRAFTS.items():
            drafter = make_drafter(options_of(algorithm, **options), target=target, head=head)
            params = Params(weights, draft if name == "EAGLE3" else ())
            steps = make_steps(target, drafter, config=StepConfig((drafter.width,)))
            state = init_state(params, target, drafter, rows=rows, pool=PoolShape(pages * rows, 16))
            for slot, way in enumerate(WAYS):
                row = new_row(config.vocab_size, limit=1000, prompt=[5, 7, 5, 7], prefix_length=4, seed=slot, **way)
                state = steps.admit(state, np.int32(slot), row)
            texts: list[list[int]] = [[] for _ in WAYS]
            for _ in range(SAMPLED_STEPS):
                table = np.arange(pages * rows, dtype=np.int32).reshape(rows, pages)
                inputs = StepInput(*map(jnp.asarray, (np.arange(rows, dtype=np.int32), table, np.ones(rows, bool))))
                state, output = steps.speculate(params, state, inputs)
                for text, new, emitted in zip(
                    texts, np.asarray(output.tokens), np.asarray(output.emitted), strict=True
                ):
                    text.extend(new[:emitted].tolist())
            found[name] = texts
    return found


# Where a step's time goes.


def profile(report: Report) -> None:
    """A plain step and one of the aim's tree, by kernel: milliseconds a step, calls a step, share."""
    plan = report.plan
    config, head, params = models(plan)
    bench = Bench(plan, config, head, jax.block_until_ready(params), 1, plan.contexts[0])
    for tree in (None, plan.trees[0] if plan.tiny else GOAL_TREE):
        name = "plain" if tree is None else ",".join(map(str, tree))
        if not report.in_time(name):
            continue
        with report.attempt(name):
            executable, _ = bench.compile(tree, plan.implementations[0])
            bench.reset()
            for _ in range(WARMUP):
                jax.block_until_ready(bench.call(executable, tree))
            with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
                with jax.profiler.trace(folder):
                    jax.block_until_ready([bench.call(executable, tree) for _ in range(bench.times)])
                events = Trace(Path(folder)).device()
            rows = by_kernel(events, bench.times)
            report.check(bool(rows), f"{name}: the trace has no event of a device")
            whole = sum(row["milliseconds"] for row in rows)
            say(f"{name}: {whole:.3f} ms of kernels a step, {sum(row['calls'] for row in rows):.0f} of them")
            for row in rows[:20]:
                say(f"  {row['milliseconds']:8.4f} ms {row['calls']:7.1f} calls  {row['kernel']}")
            report.add("profile", tree=tree, milliseconds=round(whole, 4), kernels=rows[:80])


def by_kernel(events: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Time and calls a step of each kernel, the longest first."""
    time, calls = Counter[str](), Counter[str]()
    for event in events:
        time[event["name"]] += event["dur"]
        calls[event["name"]] += 1
    return [
        {"kernel": name, "milliseconds": round(spent / 1e3 / steps, 5), "calls": round(calls[name] / steps, 2)}
        for name, spent in time.most_common()
    ]


# Products.

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def products_of(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The weights [M, W] of a layer and of the output."""
    m, inner = config.hidden_size, config.intermediate_size
    heads = config.num_heads + 2 * config.num_kv_heads
    return {
        "qkv": (m, heads * config.head_dim),
        "o": (config.num_heads * config.head_dim, m),
        "gate-up": (m, 2 * inner),
        "down": (inner, m),
        "output": (m, config.vocab_size),
    }


def products(report: Report) -> None:
    """XLA's product with each weight by rows, over matrices that no cache holds: microseconds, and the share of a
    copy's speed at which the weight is read."""
    plan, config = report.plan, model_of(report.plan)
    bandwidth = copy_bandwidth(16 if plan.tiny else None)
    report.add("ceiling", copy_gigabytes_per_second=round(bandwidth / 1e9, 1))
    multiply = jax.jit(lambda x, weight: linear(x[None], weight)[0], compiler_options=compiler_options())
    say(f"{'':10} {'rows':>5} {'us':>9} {'of a copy':>9}")
    for label, shape in products_of(config).items():
        draw, size = partial(jax.random.normal, dtype=jnp.dtype(config.dtype)), jnp.dtype(config.dtype).itemsize
        count = 1 if plan.tiny else max(1, -(-CACHES // (math.prod(shape) * size)))
        weights = [draw(jax.random.key(plan.seed + index), shape) for index in range(count)]
        for rows in ROWS[:1] if plan.tiny else ROWS:
            name = f"{label} {rows}"
            if not report.in_time(name):
                return
            with report.attempt(name):
                x = draw(jax.random.key(plan.seed), (rows, shape[0]))
                call = rotating(multiply, [(x, weight) for weight in weights])
                (taken,) = interleaved({"": call}, runs=1 if plan.tiny else 5, region_seconds=0.02).values()
                seconds = float(np.median([one.total for one in taken]))
                moved = (math.prod(shape) + rows * sum(shape)) * size
                share = moved / bandwidth / seconds
                say(f"{label:10} {rows:5} {1e6 * seconds:9.2f} {share:8.1%}")
                found = {"microseconds": round(1e6 * seconds, 3), "share_of_copy": round(share, 4)}
                report.add("product", shape=label, rows=rows, **found)
        del weights


# Options.

OPTIONS: dict[str, dict[str, str]] = {
    "as it is": {},
    "concurrent graphs": {SCHEDULING: "CONCURRENT"},
    "serial graphs": {SCHEDULING: "SERIALIZE"},
    "no loops in graphs": {LOOPS: IN_GRAPHS.removesuffix(",CONDITIONAL")},
    "no graphs": {LOOPS: ""},
    "exhaustive tiling": {"xla_gpu_exhaustive_tiling_search": "true"},
    "cuBLAS alone": {"xla_gpu_enable_triton_gemm": "false"},
    "Triton alone": {"xla_gpu_cublas_fallback": "false"},
    "latency hiding": {"xla_gpu_enable_latency_hiding_scheduler": "true"},
}


def options(report: Report) -> None:
    """Plain steps, then those of the aim's tree, with one option changed each; all of one kind take turns."""
    plan = report.plan
    config, head, params = models(plan)
    bench = Bench(plan, config, head, jax.block_until_ready(params), 1, plan.contexts[0])
    changes = dict(list(OPTIONS.items())[:2]) if plan.tiny else OPTIONS
    for tree in (None, plan.trees[0] if plan.tiny else GOAL_TREE):
        name = "plain" if tree is None else ",".join(map(str, tree))
        calls: dict[str, Any] = {}
        for change, values in changes.items():
            label = f"{name}, {change}"
            if report.in_time(label, needs=0 if plan.tiny else 20):
                with report.attempt(label):
                    executable, found = bench.compile(tree, plan.implementations[0], values)
                    bench.reset()
                    jax.block_until_ready(bench.call(executable, tree))
                    calls[change] = (partial(bench.call, executable, tree), found)
        times: dict[str, list[float]] = {change: [] for change in calls}
        for turn in range(2 if plan.tiny else 6):
            for change, (call, _) in calls.items():
                with report.attempt(f"{name}, {change}"):
                    bench.reset()
                    (taken,) = interleaved({change: call}, runs=1, region_seconds=0.0).values()
                    if turn:
                        times[change] += [one.total for one in taken]
        first = next(iter(times.values()), [])
        for change, all_times in times.items():
            if all_times and first:
                milliseconds, ratio = 1e3 * float(np.median(all_times)), np.median(all_times) / np.median(first)
                say(f"{name:8} {change:20} {milliseconds:8.3f} ms  {ratio:6.3f} of '{next(iter(times))}'")
                report.add("option", tree=tree, change=change, options=changes[change],
                           milliseconds=round(milliseconds, 4), ratio=round(float(ratio), 4),
                           temp_bytes=calls[change][1].get("temp_bytes"))  # fmt: skip


# The table for people.


def table(document: dict[str, Any]) -> str:
    """Markdown of what the parts found, for README and docs/performance.md."""
    parts = document["parts"]

    def rows(kind: str) -> list[dict[str, Any]]:
        return [row for part in parts.values() for row in part["rows"] if row["kind"] == kind]

    lines = [f"# First half hour on {document['device']}", "", f"{document['date']}, commit {document['commit']}", ""]
    lines += ["| part | right | seconds | failed, skipped |", "|---|---|---|---|"]
    for name, part in parts.items():
        right = "yes" if part["done"] and not part["wrong"] else "**no**"
        told = "; ".join([*part["wrong"], *part["failed"], *part.get("skipped", ())])[:300]
        lines.append(f"| {name} | {right} | {part.get('seconds', 0):.0f} | {told} |")

    def section(titles: str, cells: list[str]) -> None:
        if cells:
            lines.extend(
                ["", f"| {titles} |", "|---" * (titles.count("|") + 1) + "|", *(f"| {row} |" for row in cells)]
            )

    section(
        "batch | context | tree | ms a step | of plain | of the ceiling",
        [
            f"{row['batch']} | {row['context']} | {_tree(row['tree'])} | {row['milliseconds']:.3f} | "
            f"{row['ratio_to_plain'] or 1:.3f} | {row['share_of_ceiling']:.1%}"
            for row in rows("step")
        ],
    )
    section(
        "tree | kernel | ms a step | calls",
        [
            f"{_tree(row['tree'])} | {kernel['kernel'][:60]} | {kernel['milliseconds']:.4f} | {kernel['calls']:g}"
            for row in rows("profile")
            for kernel in row["kernels"][:8]
        ],
    )
    section(
        "product | rows | us | of a copy",
        [
            f"{row['shape']} | {row['rows']} | {row['microseconds']:.1f} | {row['share_of_copy']:.1%}"
            for row in rows("product")
        ],
    )
    section(
        "tree | changed | ms a step | ratio",
        [
            f"{_tree(row['tree'])} | {row['change']} | {row['milliseconds']:.3f} | {row['ratio']:.3f}"
            for row in rows("option")
        ],
    )
    return "\n".join(lines) + "\n"


def _tree(tree: Any) -> str:
    return "plain" if tree is None else ",".join(map(str, tree))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(drawn(int(sys.argv[2]))))
