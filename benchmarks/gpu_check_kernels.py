"""Parts `kernels` and `attention` of `gpu_check.py`: tree_attention against its definition, and its times.

The definition runs on the CPU, in float32, on the very inputs (rounded to their dtype, then widened): no TF32, and none
of the GPU's compilers, can hide in it. Whatever must not be read holds NaN.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from attention_chains import chain, enough_layers, enough_sets, inputs_of, rotating
from gpu_check_report import Report, say
from specjax_kernels import Causal, tree_attention, unpack_bits
from specjax_kernels.sampling import in_prefix
from specjax_kernels.specs import SPECS, Spec, named, tagged
from timing import copy_bandwidth, interleaved

from specjax.verify import top_in_parts

DTYPES = ("bfloat16", "float32", "float16")

RELATIVE = {"float32": 2e-5, "bfloat16": 1e-2, "float16": 2e-3}
"""Bounds on |out - reference| / |reference|, as norms. TF32 would give 3e-4 and is caught."""

ABSOLUTE = {"float32": 1e-4, "bfloat16": 2**-6, "float16": 2**-9}
"""Bounds on the largest difference: outputs are below 4, so two roundings, as in tests/test_kernels.py."""

WORKERS = max(1, min(8, (os.cpu_count() or 2) // 2))
"""Threads that compile, XLA taking several for one program too. Bounded: a container may be told of all its host's."""

AHEAD = 2 * WORKERS
"""Programs begun before their turn. Until it comes the inputs of their specs stay on the host, 2 GB of the largest."""


class Job(NamedTuple):
    """One spec in one dtype by one implementation, begun."""

    spec: str
    dtype: str
    args: tuple[Any, ...]  # on the host, in float32
    program: Future[Any]
    expected: Future[dict[str, np.ndarray]]  # of each dtype


def kernels(report: Report) -> None:
    """Every spec and dtype by the first implementation, then by the others. Threads compile what comes next while one
    is run and compared: hundreds of programs, one after the other, would take too long."""
    plan = report.plan
    _sampled(report)
    specs = tagged("test")[::16] if plan.tiny else SPECS
    total = len(specs) * len(DTYPES)
    known: dict[str, Future[dict[str, np.ndarray]]] = {}  # spec -> what is expected, of every implementation
    say(f"{'spec':28} {'dtype':9} {'implementation':14} {'relative':>9} {'largest':>9}  (bounds: {RELATIVE})")
    pool = ThreadPoolExecutor(WORKERS)
    try:
        for index, name in enumerate(plan.implementations):
            in_time = partial(report.in_time, check=index == 0)
            tried = took = 0
            for job in _ahead(_jobs(report, specs, name, in_time, pool, known), AHEAD):
                if in_time(f"{job.spec} {job.dtype} {name}"):
                    tried, took = tried + 1, took + _check(report, job, name)
                else:
                    job.program.cancel()
            say(f"{name}: {took} of {total} checked")
            report.check(took > 0 or tried < total, f"{name} took none of the specs")
    finally:
        pool.shutdown(cancel_futures=True)


def _ahead(jobs: Iterator[Job], number: int) -> Iterator[Job]:
    """The same jobs, each when `number` more have begun."""
    begun: deque[Job] = deque()
    for job in jobs:
        begun.append(job)
        if len(begun) > number:
            yield begun.popleft()
    while begun:
        yield begun.popleft()


def _jobs(
    report: Report,
    specs: Sequence[Spec],
    name: str,
    in_time: Callable[[str], bool],
    pool: ThreadPoolExecutor,
    known: dict[str, Future[dict[str, np.ndarray]]],
) -> Iterator[Job]:
    """Begins an implementation's jobs, in order, while there is time. Tracing and lowering hold Python's lock, so they
    are done here; XLA does not hold it."""
    for spec in specs:
        dtypes = [dtype for dtype in DTYPES if in_time(f"{spec.name} {dtype} {name}")]
        drawn = None
        with report.attempt(f"{spec.name} {name}", check=True):
            drawn = _draw(spec, report.plan.seed) if dtypes else None  # once: the large ones take seconds
        if drawn is None:
            continue
        args, options = drawn
        if spec.name not in known:
            known[spec.name] = pool.submit(_expected, args, options, dtypes)
        run = jax.jit(partial(tree_attention, **options, implementation=name))
        for dtype in dtypes:
            yield Job(spec.name, dtype, args, _begin(run, _shapes(args, dtype), pool), known[spec.name])


def _draw(spec: Spec, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    with jax.default_device(_cpu()):
        args, options = dataclasses.replace(spec, dtype="float32").arguments(seed)
    return tuple(map(_on_host, args)), options


def _begin(run: Any, shapes: tuple[Any, ...], pool: ThreadPoolExecutor) -> Future[Any]:
    """The program, when it is compiled. What is raised here is raised again when its turn comes."""
    try:
        return pool.submit(run.lower(*shapes).compile)
    except Exception as error:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed


def _expected(args: tuple[Any, ...], options: dict[str, Any], dtypes: list[str]) -> dict[str, np.ndarray]:
    """The definition's results, of inputs that are rounded to each dtype: small, and the same for every
    implementation."""
    reference = jax.jit(partial(tree_attention, **options, implementation="reference"))
    with jax.default_device(_cpu()):
        return {dtype: np.asarray(reference(*_cast(_cast(args, dtype), "float32"))) for dtype in dtypes}


def _check(report: Report, job: Job, name: str) -> bool:
    """Compares a job's result with what is expected. Whether the implementation took it."""
    took = False
    with report.attempt(f"{job.spec} {job.dtype} {name}", check=True):
        try:
            run = job.program.result()
        except NotImplementedError as error:
            if not str(error).startswith("implementation"):
                raise  # JAX's own: something is missing that should be there
            report.note(f"{job.spec:28} {job.dtype:9} {name:14} refused: {error}")
            return False
        here = jax.device_put(_cast(job.args, job.dtype), jax.devices()[0])
        first, second = np.asarray(run(*here)), np.asarray(run(*here))
        took, same = True, bool((first == second).all())
        _judge(report, (job.spec, job.dtype, name), first.astype(np.float32), job.expected.result()[job.dtype], same)
    return took


def _judge(report: Report, case: tuple[str, str, str], out: np.ndarray, expected: np.ndarray, same: bool) -> None:
    spec, dtype, name = case
    assert out.shape == expected.shape, f"shape {out.shape} instead of {expected.shape}"
    difference = out - expected
    relative = float(np.linalg.norm(difference) / max(np.linalg.norm(expected), 1e-30))
    largest = float(np.abs(difference).max())
    nothing_seen = (expected == 0).all(-1)
    verdicts = {
        "not equal to the reference": relative <= RELATIVE[dtype] and largest <= ABSOLUTE[dtype],
        "two runs differ": same,
        "not zero where nothing is seen": bool((out[nothing_seen] == 0).all()),
    }
    told = ", ".join(what for what, good in verdicts.items() if not good)
    say(f"{spec:28} {dtype:9} {name:14} {relative:9.1e} {largest:9.1e}  {'WRONG: ' + told if told else ''}")
    report.check(not told, f"{spec} {dtype} {name}: {told} (relative {relative:.1e}, largest {largest:.1e})")
    report.add("error", spec=spec, dtype=dtype, implementation=name, relative=relative, largest=largest,
               right=not told)  # fmt: skip


def _cpu() -> Any:
    """The host's own device, or the default one where JAX_PLATFORMS leaves it out."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        return jax.devices()[0]


def _on_host(x: Any) -> Any:
    return np.asarray(x) if isinstance(x, jax.Array) else x


def _cast(args: tuple[Any, ...], dtype: str) -> tuple[Any, ...]:
    """Floating-point arrays in another type, the others as they are."""
    return tuple(x.astype(jnp.dtype(dtype), copy=False) if _is_float(x) else x for x in args)


def _shapes(args: tuple[Any, ...], dtype: str) -> tuple[Any, ...]:
    """Of `_cast`."""

    def shape(x: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype) if _is_float(x) else x.dtype)

    return jax.tree.map(shape, args)


def _is_float(x: Any) -> bool:
    return isinstance(x, np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating)


def _sampled(report: Report) -> None:
    """What sampled rows need, against numpy: which tokens top-k and top-p leave, and the 20 likeliest tokens."""
    vocab = 1000 if report.plan.tiny else 128_256
    rng = np.random.default_rng(report.plan.seed)
    cases = [(0, 0.9), (40, 1.0), (40, 0.9), (1, 0.5), (0, 1e-6), (vocab, 0.999), (0, 1.0), (20, 0.3)]
    drawn = rng.normal(0, 3, (len(cases), vocab))
    logits = np.where(rng.random((len(cases), 1)) < 0.5, np.round(drawn, 1), drawn).astype(np.float32)  # with ties
    top_k = np.array([k for k, _ in cases], np.int32)
    top_p = np.array([p for _, p in cases], np.float32)
    with report.attempt("top-k and top-p", check=True):
        found = np.asarray(jax.jit(in_prefix)(logits, top_k, top_p))
        wrong = sum(_wrong_prefix(*each) for each in zip(found, logits, cases, strict=True))
        say(f"top-k and top-p of {len(cases)} rows of {vocab} tokens: {wrong} rows are wrong")
        report.check(wrong == 0, f"top-k and top-p: {wrong} of {len(cases)} rows leave other tokens than numpy's")
    with report.attempt("likeliest tokens", check=True):
        values, ids = map(np.asarray, jax.jit(partial(top_in_parts, count=20))(logits))
        order = np.lexsort((np.broadcast_to(np.arange(vocab), logits.shape), -logits), axis=1)[:, :20]
        same = bool((ids == order).all() and (values == np.take_along_axis(logits, order, axis=1)).all())
        say(f"the 20 likeliest tokens of {len(cases)} rows: {'equal to' if same else 'NOT'} a sort's")
        report.check(same, "the 20 likeliest tokens are not those of a sort")


def _wrong_prefix(found: np.ndarray, logits: np.ndarray, case: tuple[int, float]) -> bool:
    """Whether other tokens were left than a sort leaves. The sums of top-p may differ in their last bits, so the token
    at its bound may be in or out."""
    top_k, top_p = case
    order = np.lexsort((np.arange(logits.size), -logits))[: top_k if top_k > 0 else logits.size]
    weights = np.exp(logits[order].astype(np.float64) - logits.max())
    before = (np.cumsum(weights) - weights) / weights.sum()
    surely, perhaps = before < top_p - 1e-5, before < top_p + 1e-5
    if top_p >= 1:
        surely = perhaps = np.ones(order.size, bool)
    surely[0] = perhaps[0] = True
    left = found[order]
    return bool((surely & ~left).any() or (left & ~perhaps).any() or found.sum() != left.sum())


# Times.


def attention(report: Report) -> None:
    """Microseconds of a layer's attention, as a share of what a copy moves; beside it dense attention over keys that
    lie in order, which needs no page table."""
    plan = report.plan
    if plan.tiny:
        specs, region_seconds, runs, bandwidth = (named("smollm2-tree-8"),), 0.01, 2, copy_bandwidth(16)
    else:
        specs, region_seconds, runs, bandwidth = tagged("bench"), 0.02, 9, copy_bandwidth()
        # As they are served. Two specs that differ in nothing else are one; those that matter most come first.
        half = (dataclasses.replace(spec, dtype="bfloat16") for spec in specs)
        specs = {dataclasses.replace(spec, name="", tags=()): spec for spec in half}.values()
        specs = sorted(specs, key=lambda spec: -spec.bytes_read)
    report.add("ceiling", copy_gigabytes_per_second=round(bandwidth / 1e9, 1))
    say(f"a copy moves {bandwidth / 1e9:.0f} GB/s, bytes read and written both counted")
    say(f"{'spec':28} {'implementation':14} {'us/layer':>9} {'spread':>7} {'host us':>8} {'MB read':>9} {'GB/s':>7}"
        f" {'% of copy':>9}")  # fmt: skip
    for spec in specs:
        if report.in_time(spec.name, needs=15):
            with report.attempt(spec.name):
                _time(report, spec, bandwidth, region_seconds, runs)


def _time(report: Report, spec: Spec, bandwidth: float, region_seconds: float, runs: int) -> None:
    layers = 2 if report.plan.tiny else enough_layers(spec)
    sets = 1 if report.plan.tiny else enough_sets(spec, layers)
    args, options = spec.arguments(report.plan.seed)
    q, v_block, mask = args[0], args[2], args[-1]
    calls: dict[str, Any] = {}

    def add(name: str, run: Any, inputs: list[Any]) -> None:
        call = rotating(run, inputs)
        with report.attempt(f"{spec.name} {name}"):
            try:
                jax.block_until_ready(call())
                calls[name] = call
            except NotImplementedError as error:
                report.note(f"{spec.name:28} {name:14} refused: {error}")

    inputs = inputs_of(args, layers, sets)
    for name in report.plan.implementations:
        add(name, chain(name, options), inputs)
    plain = v_block is not None and spec.window is None and spec.softcap is None and spec.v_width == spec.E
    if plain and min(spec.prefix) >= 0:  # all rows take part
        dense = _dense_inputs(spec, mask, layers, sets)
        for name in ("xla",) if report.plan.tiny else ("xla", "cudnn"):
            add(f"dense {name}", _dense_chain(name, options["scale"]), [(q, *one) for one in dense])

    for name, samples in interleaved(calls, runs=runs, region_seconds=region_seconds).items():
        each = [1e6 * sample.total / layers for sample in samples]
        median, host = statistics.median(each), 1e6 * statistics.median(s.dispatch for s in samples) / layers
        rate = spec.bytes_read / median * 1e6
        say(
            f"{spec.name:28} {name:14} {median:9.1f} {(max(each) - min(each)) / median:6.0%} {host:8.1f}"
            f" {spec.bytes_read / 1e6:9.2f} {rate / 1e9:7.0f} {100 * rate / bandwidth:8.1f}%"
            f"{'  (the host is the limit)' if host > 0.9 * median and not report.plan.tiny else ''}"
        )
        report.add(
            "attention", spec=spec.name, dtype=spec.dtype, implementation=name, layers=layers, sets=sets,
            microseconds_per_layer=round(median, 2), host_microseconds=round(host, 2), bytes_read=spec.bytes_read,
            share_of_copy_bandwidth=round(rate / bandwidth, 4), samples=[round(x, 2) for x in each],
        )  # fmt: skip


def _dense_inputs(spec: Spec, mask: Any, layers: int, sets: int) -> list[tuple[Any, Any]]:
    """Keys and values in order [B, longest prefix + C, K, E], and which of them each query sees [B, 1, N, .]."""
    longest = max(spec.prefix)
    if isinstance(mask, Causal):
        block = jnp.broadcast_to(jnp.tril(jnp.ones((spec.N, spec.C), bool)), (spec.B, spec.N, spec.C))
    else:
        block = unpack_bits(mask, spec.C)
    committed = jnp.arange(longest)[None, None] < jnp.asarray(spec.prefix)[:, None, None]
    committed = jnp.broadcast_to(committed, (spec.B, spec.N, longest))
    visible = jnp.concatenate([committed, block], axis=2)[:, None]
    shape = (spec.B, longest + spec.C, spec.K, spec.E)
    draw = jax.jit(lambda key: jax.random.normal(key, shape, jnp.dtype(spec.dtype)))
    keys = iter(jax.random.split(jax.random.key(0), 2 * layers * sets))
    return [(visible, [(draw(next(keys)), draw(next(keys))) for _ in range(layers)]) for _ in range(sets)]


def _dense_chain(implementation: Any, scale: float) -> Any:
    @jax.jit
    def run(q, visible, layers):
        for key, value in layers:
            q = q + jax.nn.dot_product_attention(
                q, key, value, mask=visible, scale=scale, implementation=implementation
            )
        return q

    return run
