"""Times `tree_attention` over the named shapes of `specjax_kernels.specs`.

    python benchmarks/kernels.py [--spec NAME ...] [--implementation xla reference] [--record]

A call of one layer lasts microseconds, so what is timed is one program of `--layers` calls, each with its own pool,
the queries of one made from the output of the one before: as in a decoder. Runs of all implementations alternate, the
first ones are discarded, and the figure is the median. The ceiling is printed first: the bandwidth of a plain copy on
this machine. The last line is one JSON document with every sample.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from records import finish, machine
from specjax_kernels import IMPLEMENTATIONS, default_implementation, tree_attention
from specjax_kernels.specs import SPECS, Spec, named, tagged

WARMUP = 3


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def copy_bandwidth(megabytes: int = 256) -> float:
    """Bytes moved per second (read and written, each counted) by ``x + 1`` in place on an array larger than caches."""
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = jnp.zeros(megabytes * 2**18, jnp.float32)
    samples = []
    for _ in range(WARMUP + 7):
        start = time.perf_counter()
        array = increment(array).block_until_ready()
        samples.append(time.perf_counter() - start)
    return 2 * array.nbytes / statistics.median(samples[WARMUP:])


def program(spec: Spec, implementation: str, layers: int) -> Callable[[], jax.Array]:
    """One jitted call of `layers` chained attentions, with its inputs bound."""
    args, options = spec.arguments()
    q, k_block, v_block, k_pages, v_pages, *rest = args
    pools = [(k_pages + 0, None if v_pages is None else v_pages + 0) for _ in range(layers)]
    attend = functools.partial(tree_attention, **options, implementation=implementation)

    @jax.jit
    def run(q, k_block, v_block, pools, rest):
        for k_pages, v_pages in pools:
            out = attend(q, k_block, v_block, k_pages, v_pages, *rest)
            q = q + jnp.pad(out, ((0, 0), (0, 0), (0, 0), (0, q.shape[-1] - out.shape[-1])))
        return q

    return lambda: run(q, k_block, v_block, pools, rest)


def measure(spec: Spec, implementations: list[str], layers: int, runs: int, bandwidth: float) -> list[dict[str, Any]]:
    programs = {name: program(spec, name, layers) for name in implementations}
    samples: dict[str, list[float]] = {name: [] for name in implementations}
    for index in range(WARMUP + runs):
        for name, call in programs.items():
            elapsed = seconds(call) / layers
            if index >= WARMUP:
                samples[name].append(elapsed * 1e6)
    records = []
    for name in implementations:
        median = statistics.median(samples[name])
        rate = spec.bytes_read / median * 1e6
        records.append(
            {
                "spec": spec.name,
                "implementation": name,
                "layers": layers,
                "microseconds_per_layer": round(median, 2),
                "samples": [round(sample, 2) for sample in samples[name]],
                "bytes_read": spec.bytes_read,
                "share_of_copy_bandwidth": round(rate / bandwidth, 4),
            }
        )
        print(
            f"{spec.name:28} {name:10} {median:10.1f} us/layer   {spec.bytes_read / 1e6:8.3f} MB of KV"
            f"   {rate / 1e9:8.2f} GB/s   {100 * rate / bandwidth:5.1f} % of copy",
            flush=True,
        )
    return records


def main() -> None:
    written = [name for name, module in IMPLEMENTATIONS.items() if module]
    parser = argparse.ArgumentParser(description="Times tree_attention over named shapes.")
    parser.add_argument("--spec", nargs="+", metavar="NAME", help=f"out of: {', '.join(spec.name for spec in SPECS)}")
    parser.add_argument("--implementation", nargs="+", choices=written, default=[default_implementation()])
    parser.add_argument("--layers", type=int, help="calls in one program (default: 30, or 4 for the large specs)")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/kernels-<device>-<date>.json")
    arguments = parser.parse_args()

    on_cpu = jax.default_backend() == "cpu"
    bench = [spec for spec in tagged("bench") if not (on_cpu and "large" in spec.tags)]
    specs = [named(name) for name in arguments.spec] if arguments.spec else bench
    bandwidth = copy_bandwidth()
    document: dict[str, Any] = machine() | {"copy_gigabytes_per_second": round(bandwidth / 1e9, 2), "results": []}
    print(
        f"{document['device']}, {document['cpus']} CPUs, jax {jax.__version__}; a copy moves {bandwidth / 1e9:.1f} GB/s"
    )
    for spec in specs:
        layers = arguments.layers or (4 if "large" in spec.tags else 30)
        document["results"] += measure(spec, arguments.implementation, layers, arguments.runs, bandwidth)
    kind = "cpu" if on_cpu else document["device"].lower().replace(" ", "-")
    finish(f"kernels-{kind}", document, record=arguments.record)


if __name__ == "__main__":
    main()
