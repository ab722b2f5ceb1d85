"""Times the kernels' operations: attention over named shapes, and products by how weights are stored.

    python benchmarks/kernels.py attention [--spec NAME ...] [--implementation xla reference] [--record]
    python benchmarks/kernels.py products [--rows 1 2 4 8] [--formats float32 Q4_1] [--record]

`attention`: a call of one layer takes microseconds, so a program of `--layers` calls is timed. Each call has its own
pool, and its queries depend on the previous output, as in a decoder. On a GPU many programs are dispatched together and
rotate through sets of pools that exceed every cache. The ceiling is the bandwidth of a copy.

`products`: products of few rows on a CPU, with SmolLM2-135M's shapes: 30 layers of four products, and the output layer.
A program multiplies by the weights of `PRODUCT_LAYERS` layers and rotates through sets that exceed every cache.
The ceiling is the bandwidth of sums over a large array by all threads. "model" is all products of a forward.

Implementations and formats alternate. The figure is the median. The last line is one JSON document with all samples.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from records import finish, machine
from specjax_kernels import IMPLEMENTATIONS, Quantised, default_implementation, linear, quantise, tree_attention
from specjax_kernels.specs import SPECS, Spec, named, tagged
from timing import CACHE_BYTES, WARMUP, copy_bandwidth, interleaved, read_bandwidth, rotating, seconds

REGION_SECONDS = 0.02

# Attention.


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


def attention(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
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
    return f"kernels-{kind}", {"copy_gigabytes_per_second": round(bandwidth / 1e9, 2), "results": results}


# Products.

LAYERS, PRODUCT_LAYERS = 30, 8
SHAPES = {"qkv": (576, 960), "output": (576, 576), "gate_up": (576, 3072), "down": (1536, 576), "head": (576, 49152)}
FORMATS = ("float32", "bfloat16", "float16", "Q8_0", "Q4_0", "Q4_1", "int8", "fp8")


def weight_of(name: str, depth: int, outputs: int) -> Any:
    matrix = np.random.default_rng(0).standard_normal((outputs, depth), np.float32)
    if name in ("int8", "fp8"):
        return jax.tree.map(jnp.asarray, quantise(matrix, name))
    if name[0] != "Q":
        return jnp.asarray(matrix.T, name)
    leaf = quantise(matrix, "int4")
    if name == "Q4_0":
        leaf = Quantised(leaf.codes, leaf.scale, shift=8)
    if name == "Q8_0":
        grouped = matrix.reshape(outputs, -1, 32)
        scale = (np.abs(grouped).max(-1) / 127).astype(np.float16)
        codes = np.rint(grouped / scale[..., None].astype(np.float32)).clip(-127, 127).astype(np.int8)
        leaf = Quantised(codes.reshape(outputs, depth), scale)
    return jax.tree.map(jnp.asarray, leaf)


@jax.jit
def multiply(x: jax.Array, weights: list[Any]) -> jax.Array:
    """Products in sequence: each depends on the result before it."""
    for weight in weights:
        x = x + linear(x, weight)[..., :1] * 1e-6
    return x


def products(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    ceiling = read_bandwidth()
    print(f"read ceiling {ceiling / 1e9:.1f} GB/s")
    results: list[dict[str, Any]] = []
    model: dict[str, float] = {}
    for shape, (depth, outputs) in SHAPES.items():
        sizes, copies = {}, {}
        for name in arguments.formats:
            weight = weight_of(name, depth, outputs)
            sizes[name] = size = sum(array.nbytes for array in jax.tree.leaves(weight))
            sets = -(-CACHE_BYTES // (size * PRODUCT_LAYERS))
            copies[name] = [[jax.tree.map(jnp.copy, weight) for _ in range(PRODUCT_LAYERS)] for _ in range(sets)]
        for rows in arguments.rows:
            x = jnp.asarray(np.random.default_rng(1).standard_normal((1, rows, depth), np.float32))
            calls = {name: rotating(multiply, [(x, weights) for weights in sets]) for name, sets in copies.items()}
            for name, regions in interleaved(calls, runs=arguments.runs, region_seconds=0.05).items():
                size = sizes[name]
                samples = [region.total / PRODUCT_LAYERS for region in regions]
                median, best = statistics.median(samples), min(samples)
                key = f"{name}, {rows} rows"
                model[key] = model.get(key, 0.0) + best * (1 if shape == "head" else LAYERS)
                results.append({"shape": shape, "format": name, "rows": rows, "bytes": size, "seconds": samples})
                print(
                    f"{shape:8} {name:9} {rows:3} rows: {1e6 * median:8.1f} us (best {1e6 * best:8.1f}), "
                    f"{size / best / 1e9:5.1f} GB/s, {size / best / ceiling:4.0%} of the ceiling",
                    flush=True,
                )
    milliseconds = {key: round(1e3 * total, 2) for key, total in model.items()}
    for key, total in milliseconds.items():
        print(f"model, {key}: {total} ms at best")
    return "products", {"read_ceiling": ceiling, "results": results, "model_milliseconds": milliseconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operation", choices=("attention", "products"))
    parser.add_argument("--spec", nargs="+", metavar="NAME", help=f"out of: {', '.join(spec.name for spec in SPECS)}")
    chosen = [default_implementation()]
    parser.add_argument("--implementation", nargs="+", choices=list(IMPLEMENTATIONS), default=chosen)
    parser.add_argument("--layers", type=int, help="calls in one program (default: 30 or 4; on a GPU 16 or 4)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--record", action="store_true", help="write a record to benchmarks/results/")
    arguments = parser.parse_args()
    name, document = (attention if arguments.operation == "attention" else products)(arguments)
    finish(name, machine("jaxlib", "numba") | document, record=arguments.record)


if __name__ == "__main__":
    main()
