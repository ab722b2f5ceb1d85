"""Times attention over named shapes.

    python benchmarks/kernels.py [--spec NAME ...] [--implementation xla reference] [--record]

A call of one layer takes microseconds, so a program of `--layers` calls is timed. Each call has its own pool, and its
queries depend on the previous output, as in a decoder. On a GPU many programs are dispatched together and rotate
through sets of pools that exceed every cache. The ceiling is the bandwidth of a copy.

Implementations alternate. The figure is the median. The last line is one JSON document with all samples.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from records import finish, machine
from specjax_kernels import IMPLEMENTATIONS, default_implementation, tree_attention
from specjax_kernels.specs import SPECS, Spec, named, tagged
from timing import CACHE_BYTES, WARMUP, copy_bandwidth, interleaved, rotating, seconds

REGION_SECONDS = 0.02


def enough_layers(spec: Spec) -> int:
    """Calls in one program on a GPU; more short calls, so that the host is not the bottleneck."""
    return 4 if spec.bytes_read > 2**24 else 16


def enough_sets(spec: Spec, layers: int) -> int:
    """Sets of pools that together exceed every cache of a GPU; one set on a CPU."""
    return 1 if jax.default_backend() == "cpu" else max(1, -(-CACHE_BYTES // (layers * spec.bytes_read)))


def chain(implementation: str, options: dict[str, Any]) -> Any:
    """jitted (q, k_block, v_block, pools, rest) -> q, with one call of `tree_attention` for each pool."""
    # Jitted, so that it is lowered once instead of once a layer.
    attend = jax.jit(functools.partial(tree_attention, **options, implementation=implementation))

    @jax.jit
    def run(q, k_block, v_block, pools, rest):
        for k_pages, v_pages in pools:
            out = attend(q, k_block, v_block, k_pages, v_pages, *rest)
            q = q + jnp.pad(out, ((0, 0), (0, 0), (0, 0), (0, q.shape[-1] - out.shape[-1])))
        return q

    return run


def copied_inputs(args: Sequence[Any], layers: int, sets: int) -> list[tuple[Any, ...]]:
    """Inputs of a chain from the arguments of one call: `sets` times, each with its own pools."""
    q, k_block, v_block, k_pages, v_pages, *rest = args

    def pools() -> list[tuple[Any, Any]]:
        return [(k_pages + 0, None if v_pages is None else v_pages + 0) for _ in range(layers)]

    return [(q, k_block, v_block, pools(), rest) for _ in range(sets)]


def measure(spec: Spec, implementations: list[str], layers: int, runs: int, bandwidth: float) -> list[dict[str, Any]]:
    sets = enough_sets(spec, layers)
    args, options = spec.arguments()
    programs = {n: rotating(chain(n, options), copied_inputs(args, layers, sets)) for n in implementations}
    samples: dict[str, list[float]] = {name: [] for name in implementations}
    if jax.default_backend() == "cpu":
        for index in range(WARMUP + runs):
            for name, call in programs.items():
                elapsed = 1e6 * seconds(call) / layers
                if index >= WARMUP:
                    samples[name].append(elapsed)
    else:
        for name, regions in interleaved(programs, runs=runs, region_seconds=REGION_SECONDS).items():
            samples[name] = [1e6 * region.total / layers for region in regions]
    rows = []
    for name in implementations:
        median = statistics.median(samples[name])
        rate = spec.bytes_read / (median * 1e-6)
        row = {"spec": spec.name, "implementation": name, "layers": layers, "sets": sets, "bytes_read": spec.bytes_read}
        row |= {"microseconds_per_layer": round(median, 2), "share_of_copy_bandwidth": round(rate / bandwidth, 4)}
        rows.append(row | {"samples": [round(sample, 2) for sample in samples[name]]})
        print(
            f"{spec.name:28} {name:10} {median:10.1f} us/layer   {spec.bytes_read / 1e6:8.3f} MB of KV"
            f"   {rate / 1e9:8.2f} GB/s   {100 * rate / bandwidth:5.1f} % of copy",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", nargs="+", metavar="NAME", help=f"out of: {', '.join(spec.name for spec in SPECS)}")
    chosen = [default_implementation()]
    parser.add_argument("--implementation", nargs="+", choices=list(IMPLEMENTATIONS), default=chosen)
    parser.add_argument("--layers", type=int, help="calls in one program (default: 30 or 4; on a GPU 16 or 4)")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--record", action="store_true", help="write a record to benchmarks/results/")
    arguments = parser.parse_args()
    on_cpu = jax.default_backend() == "cpu"
    bench = [spec for spec in tagged("bench") if not (on_cpu and "large" in spec.tags)]
    specs = [named(name) for name in arguments.spec] if arguments.spec else bench
    kind = "cpu" if on_cpu else jax.devices()[0].device_kind.lower().replace(" ", "-")
    bandwidth = copy_bandwidth()
    print(f"{jax.devices()[0].device_kind}: a copy moves {bandwidth / 1e9:.1f} GB/s")
    results: list[dict[str, Any]] = []
    for spec in specs:
        layers = arguments.layers or ((4 if "large" in spec.tags else 30) if on_cpu else enough_layers(spec))
        results += measure(spec, arguments.implementation, layers, arguments.runs, bandwidth)
    document = machine("jaxlib") | {"copy_gigabytes_per_second": round(bandwidth / 1e9, 2), "results": results}
    finish(f"kernels-{kind}", document, record=arguments.record)


if __name__ == "__main__":
    main()
