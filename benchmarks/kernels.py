"""Times `tree_attention` over the named shapes of `specjax_kernels.specs`.

    python benchmarks/kernels.py [--spec NAME ...] [--implementation xla reference] [--record]

A call of one layer lasts microseconds, so what is timed is one program of `--layers` calls, each with its own pool,
the queries of one made from the output of the one before: as in a decoder. Runs of all implementations alternate, the
first ones are discarded, and the figure is the median. On a GPU a run is many such programs waited for together, which
go round sets of pools that no cache holds. The ceiling is printed first: the bandwidth of a plain copy on this machine.
The last line is one JSON document with every sample.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import jax
from attention_chains import enough_layers, enough_sets, program
from records import finish, machine
from specjax_kernels import IMPLEMENTATIONS, default_implementation
from specjax_kernels.specs import SPECS, Spec, named, tagged
from timing import WARMUP, copy_bandwidth, interleaved, seconds

REGION = 0.02
"""Seconds of calls that are waited for together on a GPU."""


def measure(spec: Spec, implementations: list[str], layers: int, runs: int, bandwidth: float) -> list[dict[str, Any]]:
    sets = enough_sets(spec, layers)
    programs = {name: program(spec, name, layers, sets) for name in implementations}
    samples: dict[str, list[float]] = {name: [] for name in implementations}
    if jax.default_backend() == "cpu":
        for index in range(WARMUP + runs):
            for name, call in programs.items():
                elapsed = seconds(call) / layers
                if index >= WARMUP:
                    samples[name].append(elapsed * 1e6)
    else:
        for name, regions in interleaved(programs, runs=runs, region_seconds=REGION).items():
            samples[name] = [each.total / layers * 1e6 for each in regions]
    records = []
    for name in implementations:
        median = statistics.median(samples[name])
        rate = spec.bytes_read / median * 1e6
        records.append(
            {
                "spec": spec.name,
                "implementation": name,
                "layers": layers,
                "sets": sets,
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
    parser = argparse.ArgumentParser(description="Times tree_attention over named shapes.")
    parser.add_argument("--spec", nargs="+", metavar="NAME", help=f"out of: {', '.join(spec.name for spec in SPECS)}")
    parser.add_argument(
        "--implementation", nargs="+", choices=list(IMPLEMENTATIONS), default=[default_implementation()]
    )
    parser.add_argument("--layers", type=int, help="calls in one program (default: 30, or 4 for the large specs; on "
                        "a GPU 16, or 4 for those that read much)")  # fmt: skip
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/kernels-<device>-<date>.json")
    arguments = parser.parse_args()

    on_cpu = jax.default_backend() == "cpu"
    bench = [spec for spec in tagged("bench") if not (on_cpu and "large" in spec.tags)]
    specs = [named(name) for name in arguments.spec] if arguments.spec else bench
    document: dict[str, Any]
    kind = "cpu" if on_cpu else jax.devices()[0].device_kind.lower().replace(" ", "-")
    bandwidth = copy_bandwidth()
    document = machine() | {"copy_gigabytes_per_second": round(bandwidth / 1e9, 2), "results": []}
    print(
        f"{document['device']}, {document['cpus']} CPUs, jax {jax.__version__}; a copy moves {bandwidth / 1e9:.1f} GB/s"
    )
    for spec in specs:
        layers = arguments.layers or ((4 if "large" in spec.tags else 30) if on_cpu else enough_layers(spec))
        document["results"] += measure(spec, arguments.implementation, layers, arguments.runs, bandwidth)
    finish(f"kernels-{kind}", document, record=arguments.record)


if __name__ == "__main__":
    main()
