"""Parts `kernels` and `attention` of `gpu_check.py`: tree_attention against its definition, and its times.

The definition runs on the CPU, in float32, on the very inputs (rounded to their dtype, then widened): no TF32, and none
of the GPU's compilers, can hide in it. Whatever must not be read holds NaN.
"""

from __future__ import annotations

import dataclasses
import statistics
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention import chain, copies
from gpu_check_report import Report, say
from specjax_kernels import tree_attention
from specjax_kernels.masks import Causal, unpack_bits
from specjax_kernels.specs import SPECS, Spec, named, tagged
from timing import copy_bandwidth, interleaved

DTYPES = ("bfloat16", "float32", "float16")

RELATIVE = {"float32": 2e-5, "bfloat16": 1e-2, "float16": 2e-3}
"""Bounds on |out - reference| / |reference|, as norms. TF32 would give 3e-4 and is caught."""

ABSOLUTE = {"float32": 1e-4, "bfloat16": 2**-6, "float16": 2**-9}
"""Bounds on the largest difference: outputs are below 4, so two roundings, as in tests/test_kernels.py."""

CACHES = 2**28
"""Bytes of keys and values that are gone through before any is read again: several times a GPU's largest cache."""


def kernels(report: Report) -> None:
    """Every spec, each dtype, each implementation."""
    plan = report.plan
    specs = tagged("test")[::16] if plan.tiny else SPECS
    checked = dict.fromkeys(plan.implementations, 0)
    say(f"{'spec':28} {'dtype':9} {'implementation':14} {'relative':>9} {'largest':>9}  (bounds: {RELATIVE})")
    for spec in specs:
        with report.attempt(spec.name, check=True):
            # Drawn once: the large ones take seconds.
            with jax.default_device(_cpu()):
                args, options = dataclasses.replace(spec, dtype="float32").arguments(plan.seed)
            drawn = tuple(map(_on_host, args))
            reference = jax.jit(partial(tree_attention, **options, implementation="reference"))
            for dtype in DTYPES:
                if report.in_time(f"{spec.name} {dtype}"):
                    for name in _check(report, spec.name, dtype, _cast(drawn, dtype), options, reference):
                        checked[name] += 1
    for name, count in checked.items():
        say(f"{name}: {count} of {len(specs) * len(DTYPES)} checked")
        report.check(count > 0, f"{name} took none of the specs")


def _check(
    report: Report, spec: str, dtype: str, args: tuple[Any, ...], options: dict[str, Any], reference: Any
) -> list[str]:
    """Checks one spec in one dtype; the names of the implementations that took it."""
    with jax.default_device(_cpu()):
        expected = np.asarray(reference(*_cast(args, "float32")))
    here, took = jax.device_put(args, jax.devices()[0]), []
    for name in report.plan.implementations:
        with report.attempt(f"{spec} {dtype} {name}", check=True):
            run = jax.jit(partial(tree_attention, **options, implementation=name))
            try:
                first, second = np.asarray(run(*here)), np.asarray(run(*here))
            except NotImplementedError as error:
                report.note(f"{spec:28} {dtype:9} {name:14} refused: {error}")
                continue
            took.append(name)
            same = bool((first == second).all())
            _judge(report, (spec, dtype, name), first.astype(np.float32), expected, same)
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

    def cast(x: Any) -> Any:
        floats = isinstance(x, np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(jnp.dtype(dtype)) if floats else x

    return tuple(map(cast, args))


# Times.


def attention(report: Report) -> None:
    """Microseconds of a layer's attention, as a share of what a copy moves; beside it dense attention over keys that
    lie in order, which needs no page table."""
    plan = report.plan
    if plan.tiny:
        specs, region_seconds, runs, bandwidth = (named("smollm2-tree-8"),), 0.01, 2, copy_bandwidth(16)
    else:
        specs, region_seconds, runs, bandwidth = tagged("bench"), 0.02, 9, copy_bandwidth(4096, 10)
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
    # More where a layer is short, so that the host is not what is timed.
    layers = 2 if report.plan.tiny else 4 if spec.bytes_read > 2**24 else 16
    bytes_of_call = layers * spec.bytes_read
    sets = 1 if report.plan.tiny else max(1, min(16, -(-CACHES // bytes_of_call)))
    (q, k_block, v_block, k_pages, v_pages, *rest), options = spec.arguments(report.plan.seed)
    pools = [copies(k_pages, v_pages, layers) for _ in range(sets)]
    calls: dict[str, Any] = {}

    def add(name: str, run: Any, inputs: list[Any]) -> None:
        """Goes round the sets of inputs, so that no cache holds the next one."""
        turn = iter(range(10**9))

        def call() -> jax.Array:
            return run(*inputs[next(turn) % len(inputs)])

        with report.attempt(f"{spec.name} {name}"):
            try:
                jax.block_until_ready(call())
                calls[name] = call
            except NotImplementedError as error:
                report.note(f"{spec.name:28} {name:14} refused: {error}")

    for name in report.plan.implementations:
        add(name, chain(name, options), [(q, k_block, v_block, pool, rest) for pool in pools])
    plain = v_block is not None and spec.window is None and spec.softcap is None and spec.v_width == spec.E
    if plain and min(spec.prefix) >= 0:  # all rows take part
        dense = _dense_inputs(spec, rest[-1], layers, sets)
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
