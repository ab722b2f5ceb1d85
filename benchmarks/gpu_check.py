"""Checks and times specjax on an NVIDIA GPU: three commands, each below ten minutes.

    export PYTHONPATH=.:kernels
    python benchmarks/gpu_check.py --part a --save DIR
    python benchmarks/gpu_check.py --part b --save DIR
    python benchmarks/gpu_check.py --part c --save DIR

| part | section | measures |
|---|---|---|
| a | draws    | tokens of greedy and sampled requests against a CPU's: NONE, NGRAM, EAGLE-3 |
|   | llama    | steps of Llama-3.1-8B's shape, batch 1: ms, ms of kernels, their number, share of the roofline |
|   | qwen     | the same for Qwen3-8B's shape |
| b | tokens   | tokens without overlap, without the prefix cache, and with retraction, against a CPU's |
|   | cold     | an engine of Llama-3.1-8B's shape: seconds to READY, gaps of streams during compilation, peak memory |
|   | warm     | the same engine with the compiled programs of `cold` |
|   | server   | `specjax serve`, cold and warm: seconds to READY |
|   | products | matrix products of an 8B model by shape and number of rows |
| c | kernels  | attention kernels against their definition |
|   | batch    | steps of Llama-3.1-8B's shape, batch 64 |
|   | options  | a step with one of XLA's options changed |
|   | sizes    | an adaptive engine of Llama-3.1-8B's shape: steps by N, estimated and measured, and its choices |

Each section runs in a process of its own within its share of `--minutes`; unused time goes to later sections. Each part
writes one JSON file to `--save`, with the command, commit, versions and device, also after errors. The exit status is 1
if a result was wrong, a measurement failed, or a correctness check did not fit into the time.

Models have random weights and prompts are token ids, so nothing is downloaded; `server` serves `--model`, or four
layers of Llama-3.1-8B's shape, and is skipped without FastAPI. Reference tokens come from this machine's CPU. `--tiny`
runs everything with small shapes on any device; its times are meaningless.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib.util
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_steps import BLOCK, CHAIN, PLAIN, WIDE_TREE, Case, Model, TokenIds, model_of
from model_shapes import eagle3_head, llama_8b, nbytes, qwen3_8b, write_checkpoint
from records import command, machine
from specjax_kernels import default_implementation, linear, tree_attention
from specjax_kernels.specs import SPECS, Spec, tagged
from timing import CACHE_BYTES, copy_bandwidth, interleaved, rotating

from specjax import Eagle3, Engine, EngineConfig, ModelConfig, Params, RopeConfig, SamplingParams, gpu
from specjax.drafters import make_speculation, options_of
from specjax.engine.draft_policy import Choice
from specjax.engine.sequence import completion
from specjax.gpu import IN_GRAPHS, LOOPS, SCHEDULING
from specjax.load import use_compilation_cache
from specjax.models import init_params, make_target
from specjax.models.draft_head import init_head_params

PARTS: dict[str, dict[str, float]] = {
    "a": {"draws": 2.0, "llama": 3.5, "qwen": 3.5},
    "b": {"tokens": 2.0, "cold": 2.5, "warm": 1.0, "server": 2.0, "products": 1.5},
    "c": {"kernels": 3.0, "batch": 2.0, "options": 2.0, "sizes": 2.0},
}
"""Part -> section -> minutes."""

CACHED = {"draws": "tokens", "tokens": "tokens", "cold": "engine", "warm": "engine", "server": "server"}
"""Section -> folder of its compiled programs. The other sections keep XLA's autotuning results."""

SCRATCH = Path(tempfile.gettempdir(), "specjax-gpu-check")


class Report:
    """Results of one section, shared by threads. Each entry rewrites the file."""

    def __init__(self, section: str, arguments: argparse.Namespace) -> None:
        self.section, self.tiny, self.model = section, arguments.tiny, arguments.model
        self.file = arguments.output
        self.machine: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.errors, self.skipped = list[str](), list[str]()
        self.done = False
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._seconds = arguments.seconds
        self.write()

    @property
    def seconds_left(self) -> float:
        return self._seconds - (time.monotonic() - self._start)

    def add(self, kind: str, **row: Any) -> None:
        self.rows.append({"kind": kind, **row})
        self.write()

    def skip(self, text: str) -> None:
        say(f"skipped: {text}")
        self.skipped.append(text)
        self.write()

    def check(self, passed: bool, message: str) -> None:
        """Records an error if `passed` is false."""
        if not passed:
            say(f"ERROR {message}")
            self.errors.append(message)
            self.write()

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Records an exception as an error; the section continues."""
        try:
            yield
        except Exception as error:  # compilers and drivers raise any type
            text = " ".join(str(error).split())[:300]
            frame = traceback.extract_tb(error.__traceback__)[-1]
            self.check(False, f"{name}: {type(error).__name__}: {text} ({Path(frame.filename).name}:{frame.lineno})")

    def in_time(self, name: str, seconds: float = 0, *, required: bool = False) -> bool:
        """True if `seconds` are left. Otherwise skips `name`, which is an error if it is `required`."""
        left = self.seconds_left >= (0 if self.tiny else seconds)
        if not left and required:
            self.check(False, f"{name}: not checked, no time left")
        elif not left:
            self.skip(f"{name}: no time left")
        return left

    def write(self) -> None:
        with self._lock:
            document = {name: getattr(self, name) for name in ("machine", "rows", "errors", "skipped", "done")}
            document["seconds"] = round(time.monotonic() - self._start, 1)
            temporary = self.file.with_suffix(".part")
            temporary.write_text(json.dumps(document) + "\n")
            temporary.replace(self.file)


say = partial(print, flush=True)


# Tokens of an engine on a GPU and on a CPU.

SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    {"presence_penalty": 0.5},
)
DRAFTS = {"NONE": {}, "NGRAM": {"capacity": 4096, "nodes": 8}, "EAGLE3": {"steps": 3, "topk": 4, "nodes": 8}}
MODES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("EAGLE3", {"overlap": False}),
    ("EAGLE3", {"prefix_cache": False}),
    ("EAGLE3", {"overlap": False, "retract_every": 3}),
    ("NGRAM", {"overlap": False, "retract_every": 3}),
)
DRAFT_VOCABULARY = 32
MAX_DIFFERENT_ROWS = 1  # another order of summation can decide a near tie


def engine_tokens(algorithm: str, *, retract_every: int | None = None, **config: Any) -> list[list[int]]:
    """Tokens of one request for each entry of `SAMPLING`, in float32. The requests run twice, then with a filled prefix
    cache. numpy draws the weights, so they are equal on every device. `retract_every`: steps between retractions of the
    youngest request; needs an engine without overlap."""
    jax.config.update("jax_default_matmul_precision", "highest")
    shape = (4096, 128, 256, 4, 4, 2, 32)
    model = ModelConfig("llama", *shape, 1e-5, RopeConfig(), 512, tied_embeddings=False, dtype="float32")
    target = make_target(model)
    head = dataclasses.replace(eagle3_head(model, DRAFT_VOCABULARY), dtype="float32")
    rng = np.random.default_rng(0)

    def random(leaf: Any) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):  # token ids of the draft vocabulary
            return jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape)
        scale = 1.0 if len(leaf.shape) < 2 else 2.0 / np.sqrt(model.hidden_size)
        return jnp.asarray(rng.normal(size=leaf.shape) * scale, leaf.dtype)

    key = jax.random.key(0)
    weights = jax.tree.map(random, jax.eval_shape(partial(init_params, model), key))
    # Texts consist of the draft vocabulary: some drafts are accepted.
    weights |= {"head": weights["head"].at[:, DRAFT_VOCABULARY:].multiply(0.2)}
    draft = jax.tree.map(random, jax.eval_shape(partial(init_head_params, head, target), key))
    prompts = [rng.integers(0, model.vocab_size, 5).tolist() * (row + 1) for row in range(len(SAMPLING))]
    speculation = make_speculation(options_of(algorithm, **DRAFTS[algorithm]), target=target, head=head)
    params = Params(weights, draft if algorithm == "EAGLE3" else ())
    sizes = {"max_total_tokens": 2048, "context_length": 256}
    options = EngineConfig(len(SAMPLING), random_seed=0, **sizes | config)
    engine = Engine(target, params, TokenIds(), speculation, config=options)
    engine.warm_up([engine.buckets.step(engine.buckets.batches[-1])], progress=False)
    requests = [SamplingParams(max_new_tokens=24, ignore_eos=True, seed=i, **way) for i, way in enumerate(SAMPLING)]
    texts = []
    for _ in range(2):
        sequences = [engine.add(prompt, params) for prompt, params in zip(prompts, requests, strict=True)]
        while engine.unfinished:
            engine.step()
            if retract_every and len(engine.scheduler.active) > 1 and engine.counters.steps % retract_every == 0:
                engine.scheduler.retract_youngest()
        texts += [completion(sequence).output_ids for sequence in sequences]
    return texts


def cpu_tokens(report: Report) -> list[list[int]]:
    """Reference tokens from a process on this machine's CPU."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        file = Path(folder, "tokens.json")
        environment = dict(os.environ, JAX_PLATFORMS="cpu")
        command = [sys.executable, __file__, "--export", str(file)]
        subprocess.run(command, env=environment, check=True, timeout=report.seconds_left)
        return json.loads(file.read_text())


def tokens(report: Report, cases: tuple[tuple[str, dict[str, Any]], ...]) -> None:
    expected = cpu_tokens(report)
    for algorithm, config in cases:
        name = " ".join([algorithm, *(f"{key}={value}" for key, value in config.items())])
        if report.in_time(name, 15, required=True):
            with report.attempt(name):
                outputs = engine_tokens(algorithm, **config)
                different = [row for row, (a, b) in enumerate(zip(outputs, expected, strict=True)) if a != b]
                say(f"{name:28} {len(outputs) - len(different)} of {len(outputs)} rows equal to the CPU's")
                report.add("tokens", algorithm=algorithm, config=config, rows=len(outputs), different=different)
                report.check(len(different) <= MAX_DIFFERENT_ROWS, f"{name}: rows {different} differ from the CPU's")


# Steps of 8B models, by an engine.


def steps(report: Report, shape: Callable[[int], ModelConfig], batches: tuple[int, ...], cases: list[Case]) -> None:
    """Steps with and without drafts, by batch. `milliseconds`: by wall clock; the host's share is not waiting."""
    bandwidth = copy_bandwidth(16 if report.tiny else None)
    model = Model(shape, tiny=report.tiny)
    say(f"a copy moves {bandwidth / 1e9:.0f} GB/s\n{'batch':>5} {'step':10} {'ms':>9} {'host ms':>8} "
        f"{'kernels ms':>10} {'kernels':>8} {'to plain':>8} {'roofline':>8}")  # fmt: skip
    for batch in sorted({min(batch, 2) for batch in batches}) if report.tiny else batches:
        plain = None
        for case in (PLAIN, *cases):
            name = f"{case}, batch {batch}"
            if not report.in_time(name, 30):
                continue
            with report.attempt(name):
                gc.collect()  # frees the pool of the engine before
                row = model.measure_steps(case, batch)
                plain = plain or row["milliseconds"]
                ratio = round(row["milliseconds"] / plain, 4)
                least = model.roofline_bytes(case, batch * row["context"]) / bandwidth
                share = round(1e3 * least / row["milliseconds"], 4)
                report.add("step", ratio_to_plain=ratio, roofline_ms=round(1e3 * least, 4), share=share, **row)
                say(f"{batch:5} {case!s:10} {row['milliseconds']:9.3f} {row['host_milliseconds']:8.3f} "
                    f"{row['kernel_milliseconds']:10.3f} {row['kernels']:8.1f} {ratio:8.3f} {share:8.1%}")  # fmt: skip


# XLA's options and products.

UPDATE_MODE = "xla_gpu_command_buffer_update_mode"
OPTIONS: dict[str, dict[str, str]] = {
    "default": {},
    "serial graph nodes": {SCHEDULING: "SERIALIZE"},
    "no control flow in graphs": {LOOPS: IN_GRAPHS.removesuffix(",CONDITIONAL")},
    "no graphs": {LOOPS: ""},
    "graph updates skip temporaries": {UPDATE_MODE: "SKIP_TEMP"},  # jax 0.12 and later
    "graphs are never updated": {UPDATE_MODE: "NEVER_UPDATE"},  # jax 0.10
    "exhaustive tiling": {"xla_gpu_exhaustive_tiling_search": "True"},
    "cuBLAS only": {"xla_gpu_enable_triton_gemm": "False"},
    "Triton only": {"xla_gpu_cublas_fallback": "False"},
    "latency hiding": {"xla_gpu_enable_latency_hiding_scheduler": "True"},
}
"""Changes to `gpu.NVIDIA_OPTIONS`. XLA accepts True and False as written, not in lower case."""


def options(report: Report, changes: Mapping[str, dict[str, str]] = OPTIONS) -> None:
    """Steps with one option changed. Options that this XLA lacks are skipped."""
    model, ours = Model(llama_8b, tiny=report.tiny), gpu.NVIDIA_OPTIONS
    changes = dict(list(changes.items())[:2]) if report.tiny else changes
    for case in (PLAIN, CHAIN):
        default = None
        for change, values in changes.items():
            name = f"{case}, {change}"
            if not all(gpu.accepts(*option) for option in values.items()):
                report.skip(f"{name}: XLA of jax {jax.__version__} does not accept {values}")
            elif report.in_time(name, 25):
                with report.attempt(name):
                    gpu.NVIDIA_OPTIONS = MappingProxyType(ours | values)
                    row = model.measure_steps(case, 1)
                    default = default or row["milliseconds"]
                    ratio = round(row["milliseconds"] / default, 4)
                    report.add("option", change=change, options=values, ratio=ratio, **row)
                    say(f"{name:44} {row['milliseconds']:8.3f} ms  {ratio:6.3f} of the default")
    gpu.NVIDIA_OPTIONS = ours


PRODUCT_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64, 128, 256, 512)


def products(report: Report, shape: Callable[[int], ModelConfig] = llama_8b, row_counts: Any = PRODUCT_ROWS) -> None:
    """XLA's products with each matrix of a layer and of the output, over weights that exceed every cache."""
    config = model_of(shape, tiny=report.tiny)
    m, inner = config.hidden_size, config.intermediate_size
    heads = config.num_heads + 2 * config.num_kv_heads
    shapes = {"down": (inner, m), "gate-up": (m, 2 * inner), "qkv": (m, heads * config.head_dim)}
    shapes |= {"o": (config.num_heads * config.head_dim, m), "output": (m, config.vocab_size)}
    bandwidth = copy_bandwidth(16 if report.tiny else None)
    multiply = jax.jit(lambda x, weight: linear(x[None], weight)[0], compiler_options=gpu.compiler_options())
    dtype = jnp.dtype(config.dtype)
    draw = partial(jax.random.normal, dtype=dtype)
    say(f"a copy moves {bandwidth / 1e9:.0f} GB/s\n{'product':10} {'rows':>5} {'us':>9} {'of a copy':>9}")
    for label, shape in shapes.items():
        count = 1 if report.tiny else max(1, -(-CACHE_BYTES // (math.prod(shape) * dtype.itemsize)))
        weights = [draw(jax.random.key(index), shape) for index in range(count)]
        for rows in row_counts[:2] if report.tiny else row_counts:
            name = f"{label}, {rows} rows"
            if not report.in_time(name):
                return
            with report.attempt(name):
                x = draw(jax.random.key(0), (rows, shape[0]))
                call = rotating(multiply, [(x, weight) for weight in weights])
                (taken,) = interleaved({"": call}, runs=1 if report.tiny else 3, region_seconds=0.01).values()
                seconds = statistics.median(sample.total for sample in taken)
                share = (math.prod(shape) + rows * sum(shape)) * dtype.itemsize / bandwidth / seconds
                say(f"{label:10} {rows:5} {1e6 * seconds:9.2f} {share:8.1%}")
                report.add("product", shape=label, rows=rows, microseconds=round(1e6 * seconds, 3),
                           share_of_copy=round(share, 4))  # fmt: skip
        del weights


# Kernels against their definitions.

MAX_ERRORS = {"bfloat16": (1e-2, 2**-6), "float32": (2e-5, 1e-4), "float16": (2e-3, 2**-9)}
"""Bounds on |output - expected| / |expected| as norms (TF32: 3e-4), and on the largest difference (outputs are < 4)."""
COMPILE_THREADS = max(1, min(8, (os.cpu_count() or 2) // 2))


def kernels(report: Report) -> None:
    """Every spec of `tree_attention` in three dtypes against its definition in float32 on the CPU. Inputs that must not
    be read are NaN. A CPU interprets the kernels."""
    implementation = "pallas" if report.tiny else default_implementation()
    with ThreadPoolExecutor(COMPILE_THREADS) as pool:
        list(pool.map(partial(check_spec, report, implementation), tagged("test")[::24] if report.tiny else SPECS))


def check_spec(report: Report, implementation: str, spec: Spec) -> None:
    if not report.in_time(f"{spec.name} {implementation}", required=True):
        return
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        arguments, keywords = dataclasses.replace(spec, dtype="float32").arguments()
        reference = jax.jit(partial(tree_attention, **keywords, implementation="reference"))
    run = jax.jit(partial(tree_attention, **keywords, implementation=implementation))
    for dtype, (max_relative, max_difference) in MAX_ERRORS.items():
        name = f"{spec.name} {dtype} {implementation}"
        with report.attempt(name):
            rounded = in_dtype(arguments, dtype)
            with jax.default_device(cpu):
                expected = np.asarray(reference(*in_dtype(rounded, "float32")))
            here = jax.device_put(rounded, jax.devices()[0])
            try:
                output, again = (np.asarray(run(*here)) for _ in range(2))
            except NotImplementedError as error:
                if not str(error).startswith("implementation"):
                    raise  # JAX's own
                report.skip(f"{name}: {error}")
                continue
            difference = output.astype(np.float32) - expected
            relative = float(np.linalg.norm(difference) / max(np.linalg.norm(expected), 1e-30))
            largest = float(np.abs(difference).max())
            report.add("kernel", name=name, relative=relative, largest=largest)
            within = relative <= max_relative and largest <= max_difference
            report.check(within, f"{name}: relative error {relative:.1e}, largest difference {largest:.1e}")
            report.check(bool((output == again).all()), f"{name}: two runs differ")
            nothing_visible = (expected == 0).all(-1)
            report.check(bool((output[nothing_visible] == 0).all()), f"{name}: not zero where nothing is visible")


def in_dtype(arguments: tuple[Any, ...], dtype: str) -> tuple[Any, ...]:
    """Floating-point arrays in another dtype."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, arguments)


def engine(report: Report) -> None:
    """An engine of Llama-3.1-8B's shape: READY, two streams during background compilation, peak memory."""
    cached = len([*Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).glob("jit_step-*")])
    model = Model(llama_8b, tiny=report.tiny)
    head, drafts = model.head("EAGLE3")
    begun = time.perf_counter()
    speculation = make_speculation(Eagle3(), target=model.target, head=head)
    sizes = {"max_running_requests": 4, "max_total_tokens": 1024} if report.tiny else {}
    options = EngineConfig(context_length=256 if report.tiny else 8192, adaptive=True, **sizes)
    params = Params(model.params.target, drafts)
    running = Engine(model.target, params, TokenIds(), speculation, config=options)
    running.warm_up(running.buckets.ready_keys(), progress=False)
    ready = round(time.perf_counter() - begun, 2)
    say(f"READY after {ready} s, with {len(running.programs.compiled())} programs")
    programs = len(running.programs.compiled())
    report.add("ready", start=report.section, seconds=ready, programs=programs, cached=cached)

    def gaps() -> list[float]:
        """Milliseconds between the chunks of two streams."""
        prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 20)).tolist()
        arrivals: list[list[float]] = [[], []]
        sampling = SamplingParams(max_new_tokens=32 if report.tiny else 128, ignore_eos=True)
        for chunk in running.generate(prompts, sampling, stream=True):
            arrivals[chunk.prompt_index].append(1e3 * time.perf_counter())
        return [b - a for times in arrivals for a, b in pairwise(times)]

    def add_gaps(kind: str, gaps: list[float]) -> None:
        p50, p99 = np.percentile(gaps, (50, 99)).round(3).tolist()
        programs = len(running.programs.compiled())
        say(f"{kind}: gaps of {p50} ms (p50) and {p99} ms (p99), {programs} programs compiled")
        report.add(kind, p50_ms=p50, p99_ms=p99, max_ms=round(max(gaps), 3), programs=programs)

    # The first half of the programs compile as in a server, which launches nothing meanwhile. XLA has locks of its own
    # while it times candidates, so the second half show whether that is enough.
    half, held = len(running.buckets.all_keys()) // 2, running.programs._exclusive
    running.warm_up_in_background()
    during = {"streams during compilation": gaps()}
    while running.programs.pending and report.in_time("streams during compilation", 15):
        running.programs._exclusive = held and len(running.programs.compiled()) < half
        kind = "streams during compilation" if running.programs._exclusive == held else "the same, launches not held"
        during[kind] = during.get(kind, []) + gaps()
    for kind, milliseconds in during.items():
        add_gaps(kind, milliseconds)
    if not running.programs.pending:
        add_gaps("streams after compilation", gaps())
    running.programs.close(5)
    stats = jax.devices()[0].memory_stats() or {}
    temporary = running.memory_plan.temporaries
    estimate = nbytes(params) + nbytes(running.state) + temporary
    report.add("memory", estimated_bytes=estimate, estimated_temporary_bytes=temporary,
               peak_bytes=stats.get("peak_bytes_in_use"), limit_bytes=stats.get("bytes_limit"))  # fmt: skip
    say(f"memory: {estimate / 1e9:.2f} GB estimated, peak {stats.get('peak_bytes_in_use', 0) / 1e9:.2f} GB")


def sizes(report: Report, loads: tuple[int, ...] = (1, 16, 64)) -> None:
    """Sizes of an adaptive engine's trees: duration of a step relative to a plain one, estimated and measured, and the
    share of steps for which the policy chooses each. With random weights hardly any draft is accepted."""
    model = Model(llama_8b, tiny=report.tiny)
    head, drafts = model.head("EAGLE3")
    speculation = make_speculation(Eagle3(), target=model.target, head=head)
    loads, forced, free = ((1,), 4, 8) if report.tiny else (loads, 24, 64)
    options = EngineConfig(loads[-1], context_length=512, max_total_tokens=512 * loads[-1], adaptive=True)
    running = Engine(model.target, Params(model.params.target, drafts), TokenIds(), speculation, config=options)
    policy, buckets = running.policy, running.buckets
    assert policy is not None
    say(f"{'requests':>8} {'N':>3} {'estimated':>9} {'measured':>8} {'ms':>8} {'tokens':>7} {'chosen':>7}")
    for load in loads:
        name, batch = f"sizes, batch {load}", buckets.batch(load)
        if not report.in_time(name, 30):
            continue
        with report.attempt(name):
            estimates = {n: running._estimated_ratio(batch, n) for n in buckets.sizes(batch)}
            steps = [buckets.step(batch, n) for n in estimates]
            running.warm_up([*buckets.first_keys(load, 16), *steps], progress=False)
            prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (load, 16)).tolist()
            for prompt in prompts:
                running.add(prompt, SamplingParams(max_new_tokens=450, ignore_eos=True))
            for n in (max(estimates), *estimates):  # first while the prompts are read
                policy.choose = lambda *_, n=n: Choice(n)
                for _ in range(forced):
                    running.step()
            del policy.choose
            before = {row["nodes"]: row["steps"] for row in policy.table() if row["batch"] == batch}
            for _ in range(free):
                running.step()
            rows = [row for row in policy.table() if row["batch"] == batch]
            running.reset("measured")
            for row in rows:
                n, ratio = row["nodes"], row["seconds"] / rows[0]["seconds"]
                share = (row["steps"] - before[n]) / free
                report.add("size", estimated_ratio=estimates[n], ratio=ratio, share=share, **row)
                say(f"{load:8} {n:3} {estimates[n]:9.3f} {ratio:8.3f} {1e3 * row['seconds']:8.3f} {row['tokens']:7.2f} "
                    f"{share:7.0%}")  # fmt: skip


def server(report: Report) -> None:
    """`specjax serve`, cold and warm: seconds to READY, and after a cold start until all programs are compiled."""
    if missing := [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]:
        report.skip(f"server: {', '.join(missing)} is not installed")
        return
    from starts import COMPILED, READY, measured

    serve = [sys.executable, "-m", "specjax.serve", "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_PYTHON_CLIENT_PREALLOCATE"}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        if report.model is None:
            write_checkpoint(Path(folder), model_of(llama_8b, tiny=report.tiny, layers=4))
            serve += ["--speculative-algorithm", "NGRAM", "--context-length", "1024", "--max-running-requests", "4"]
        serve += ["--model", report.model or folder]
        for start, lines in (("cold", (READY, COMPILED)), ("warm", (READY,))):
            times = measured(serve, environment, lines)
            seconds = {line: round(wall, 2) for line, (wall, _) in times.items()}
            say(f"{start} server: {seconds}")
            report.add("server", start=start, seconds=seconds)


SECTIONS: dict[str, Callable[[Report], None]] = {
    "draws": partial(tokens, cases=tuple((algorithm, {}) for algorithm in DRAFTS)),
    "llama": partial(steps, shape=llama_8b, batches=(1,), cases=[CHAIN, WIDE_TREE, BLOCK]),
    "qwen": partial(steps, shape=qwen3_8b, batches=(1,), cases=[CHAIN, WIDE_TREE, BLOCK]),
    "tokens": partial(tokens, cases=MODES),
    "cold": engine,
    "warm": engine,
    "server": server,
    "products": products,
    "kernels": kernels,
    "batch": partial(steps, shape=llama_8b, batches=(64,), cases=[Case("EAGLE3", (3, 1, 4)), CHAIN]),
    "options": options,
    "sizes": sizes,
}


def needs_gpu() -> None:
    """Ends the process unless JAX uses a GPU."""
    if jax.default_backend() != "gpu":
        sys.exit(
            f"{Path(sys.argv[0]).name} needs an NVIDIA GPU, but JAX uses {jax.default_backend()!r} "
            f"({jax.devices()[0].device_kind}). Install the driver and JAX with CUDA (pip install -e '.[cuda13]' or "
            "'.[cuda12]'). --tiny runs on any device."
        )


def run_section(arguments: argparse.Namespace) -> None:
    """Runs one section in this process."""
    if not arguments.tiny:
        needs_gpu()
    report = Report(arguments.section, arguments)
    report.machine = machine("jaxlib", "flax") | {"backend": jax.default_backend(), "nvidia_smi": nvidia_smi()}
    if arguments.tiny or arguments.section in CACHED:
        use_compilation_cache()
    with report.attempt(arguments.section):
        SECTIONS[arguments.section](report)
    report.done = True
    report.write()


def nvidia_smi() -> str | None:
    """Driver version, memory, clocks and power of the GPU."""
    fields = "name,driver_version,memory.total,clocks.sm,clocks.mem,temperature.gpu,power.draw"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip() if shutil.which(query[0]) else None


def environment_of(section: str, *, tiny: bool) -> dict[str, str]:
    """Environment of a section's process, with the folder of its programs or of XLA's autotuning results."""
    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    if not tiny:
        environment.pop("JAX_PLATFORMS", None)  # the CPU computes references
    if section in CACHED:
        environment["JAX_COMPILATION_CACHE_DIR"] = str(SCRATCH / CACHED[section])
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    elif not tiny:
        flag = f"--xla_gpu_per_fusion_autotune_cache_dir={SCRATCH / 'autotune'}"
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flag}".strip()
    if section == "server":  # the server needs the memory
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    elif not tiny:
        environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    return environment


def run_process(section: str, seconds: float, output: Path, *, tiny: bool) -> dict[str, Any]:
    """Runs a section in its own process. Returns its report."""
    output.unlink(missing_ok=True)
    child = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--section", section]
    child += ["--seconds", str(seconds), "--output", str(output)]
    process = subprocess.Popen(child, env=environment_of(section, tiny=tiny), start_new_session=True)
    try:
        status = process.wait(seconds + 8)
    except subprocess.TimeoutExpired:
        status = 124
        os.killpg(process.pid, signal.SIGKILL)  # with a server that it started
        process.wait()
    empty = {"machine": {}, "rows": [], "errors": [], "skipped": [], "done": False}
    report = json.loads(output.read_text()) if output.is_file() else empty
    if not report["done"]:
        reason = "exceeded its time and was killed" if status == 124 else f"ended with status {status}"
        report["errors"].append(f"{section}: the process {reason}")
        say(f"ERROR {report['errors'][-1]}")
    return report


def run_part(arguments: argparse.Namespace) -> int:
    sections = PARTS[arguments.part]
    scale = 60 * arguments.minutes / sum(sections.values())
    for folder in {CACHED[name] for name in sections if name in CACHED}:
        shutil.rmtree(SCRATCH / folder, ignore_errors=True)
    (SCRATCH / "autotune").mkdir(parents=True, exist_ok=True)
    arguments.save.mkdir(parents=True, exist_ok=True)
    start, deadline, reports = time.monotonic(), 0.0, {}
    for section, minutes in sections.items():
        say(f"\n{section}")
        deadline += scale * minutes
        left = deadline - (time.monotonic() - start)
        reports[section] = run_process(section, left, SCRATCH / f"{section}.json", tiny=arguments.tiny)
        if not reports[section]["machine"]:
            return 1  # JAX found no GPU; the process has printed the reason
    document = {**reports[section]["machine"], "command": command(), "part": arguments.part, "tiny": arguments.tiny}
    document["minutes"] = round((time.monotonic() - start) / 60, 1)
    document["right"] = not any(report["errors"] for report in reports.values())
    document["sections"] = {name: {**report, "machine": None} for name, report in reports.items()}
    device = "-".join(document["device"].lower().split())
    file = arguments.save / f"gpu-check-{arguments.part}-{device}-{document['date'][:10]}.json"
    file.write_text(json.dumps(document, indent=1) + "\n")
    say(f"\n| section | rows | errors | skipped | seconds |\n{'|---' * 5}|")
    for name, report in reports.items():
        numbers = (len(report[key]) for key in ("rows", "errors", "skipped"))
        say(f"| {name} | {' | '.join(map(str, numbers))} | {report.get('seconds', 0):.0f} |")
    say(f"wrote {file}")
    return 0 if document["right"] else 1


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--part", choices=PARTS, help="a: tokens and steps; b: engine and server; c: kernels, options")
    flags.add_argument("--minutes", type=float, default=9.0, help="time limit of the part (default: %(default)s)")
    flags.add_argument("--tiny", action="store_true", help="small shapes, on any device")
    flags.add_argument("--model", help="model of the server (default: random weights)")
    flags.add_argument("--save", type=Path, default=Path(), metavar="DIR", help="folder of the results (default: .)")
    flags.add_argument("--export", type=Path, help=argparse.SUPPRESS)  # write reference tokens
    flags.add_argument("--section", help=argparse.SUPPRESS)  # run one section in this process
    flags.add_argument("--seconds", type=float, help=argparse.SUPPRESS)  # time limit of that section
    flags.add_argument("--output", type=Path, help=argparse.SUPPRESS)  # result file of that section
    arguments = flags.parse_args()
    if arguments.section:
        run_section(arguments)
        return 0
    if arguments.export:  # without drafts, which must not change tokens
        use_compilation_cache()
        arguments.export.write_text(json.dumps(engine_tokens("NONE")) + "\n")
        return 0
    if arguments.part is None:
        flags.error("--part must be a, b or c")
    return run_part(arguments)


if __name__ == "__main__":
    sys.exit(main())
