"""Products of a few rows on this machine, by how the weights are stored: microseconds, and bytes of weights a second.

    python benchmarks/quantised.py [--rows 1 2 4 8] [--formats float32 Q4_1] [--record]

The shapes are SmolLM2-135M's: 30 layers of four products, and the output layer. A program multiplies by the weights of
`TOGETHER` layers, and calls take turns with as many such sets as no cache holds together. First comes the ceiling: sums
over a large array, by all threads. "model" is a forward's products: 30 layers and the output layer, in milliseconds.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from records import finish, machine
from specjax_kernels import Quantised, linear, quantise
from timing import interleaved

LAYERS = 30
SHAPES = {"qkv": (576, 960), "output": (576, 576), "gate_up": (576, 3072), "down": (1536, 576), "head": (576, 49152)}
FORMATS = ("float32", "bfloat16", "float16", "Q8_0", "Q4_0", "Q4_1", "int8", "fp8")
TOGETHER = 8
ONCE = 2**27
"""Bytes that are read before any is read again, at least: several times the last cache."""


def weight_of(name: str, depth: int, outputs: int, seed: int) -> Any:
    matrix = np.random.default_rng(seed).standard_normal((outputs, depth), np.float32)
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
def chain(x: jax.Array, weights: list[Any]) -> jax.Array:
    """Every product's input is made from the result of the one before."""
    for weight in weights:
        x = x + linear(x, weight)[..., :1] * 1e-6
    return x


def read_bandwidth() -> float:
    """Bytes a second that all threads together read of 512 MB, the best of ten times."""
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    array = np.ones((threads, 2**27 // threads), np.float32)
    samples = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(10):
            start = time.perf_counter()
            list(pool.map(np.sum, array))
            samples.append(time.perf_counter() - start)
    return array.nbytes / min(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description="Times products with stored and with quantised weights.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/quantised-<date>.json")
    arguments = parser.parse_args()

    ceiling = read_bandwidth()
    print(f"read ceiling {ceiling / 1e9:.1f} GB/s")
    document = machine("jaxlib", "numba") | {"read_ceiling": ceiling, "results": []}
    model: dict[tuple[str, int], float] = {}
    for shape, (depth, outputs) in SHAPES.items():
        made = {}
        for name in arguments.formats:
            weight = weight_of(name, depth, outputs, 0)
            size = sum(array.nbytes for array in jax.tree.leaves(weight))
            sets = -(-ONCE // (size * TOGETHER))
            made[name] = size, [[jax.tree.map(jnp.copy, weight) for _ in range(TOGETHER)] for _ in range(sets)]
        for rows in arguments.rows:
            x = jnp.asarray(np.random.default_rng(1).standard_normal((1, rows, depth), np.float32))
            turns = {name: itertools.cycle(sets) for name, (_, sets) in made.items()}
            calls = {name: lambda x=x, turn=turn: chain(x, next(turn)) for name, turn in turns.items()}
            for name, regions in interleaved(calls, runs=arguments.runs, region_seconds=0.05).items():
                size = made[name][0]
                samples = [one.total / TOGETHER for one in regions]
                median, best = statistics.median(samples), min(samples)
                key = name, rows
                model[key] = model.get(key, 0.0) + best * (1 if shape == "head" else LAYERS)
                document["results"].append(
                    {"shape": shape, "format": name, "rows": rows, "bytes": size, "seconds": samples}
                )
                print(
                    f"{shape:8} {name:9} {rows:3} rows: {1e6 * median:8.1f} us (best {1e6 * best:8.1f}), "
                    f"{size / best / 1e9:5.1f} GB/s, {size / best / ceiling:4.0%} of the ceiling",
                    flush=True,
                )
    document["model_milliseconds"] = {f"{name}, {rows} rows": round(1e3 * s, 2) for (name, rows), s in model.items()}
    for name, milliseconds in document["model_milliseconds"].items():
        print(f"model, {name}: {milliseconds} ms at best")
    finish("quantised", document, record=arguments.record)


if __name__ == "__main__":
    main()
