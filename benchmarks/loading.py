"""Compares loading weights with reading their files: seconds, GB/s, and share of the reading speed.

    python benchmarks/loading.py [--cases float32 bfloat16 fp8 gptq awq int8 q4_1] [--runs 5] [--record]

Random checkpoints of Llama's layout, 0.4 to 0.9 GB in a file or several, are written to a temporary folder; q4_1 is the
built-in model. Every measurement is a fresh process:

    read    all bytes of the weights' files, one after another, into one buffer of 8 MiB
    load    `checkpoint.resolve`, `model_config` and `load_params`, until the weights are on the device

They take turns, cold (`posix_fadvise(DONTNEED)` on the files first; a virtual machine's host may still cache them) and
warm. A share is the median seconds of read divided by those of load; the aim is 0.7 for cold files. New memory is slow
on virtual machines whose host provides pages at their first use.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ONCE = 2**23  # bytes of one read


class Case(NamedTuple):
    layers: int
    dtype: str = "bfloat16"  # of what is not quantised
    method: str = ""
    options: tuple[str, str] = ("auto", "auto")  # dtype of the model, quantization of `load_params`


CASES = {
    "float32": Case(2, "float32"),
    "bfloat16": Case(6, options=("bfloat16", "auto")),
    "widened": Case(6, options=("float32", "none")),
    "fp8": Case(12, method="fp8"),
    "gptq": Case(12, method="gptq"),
    "awq": Case(12, method="awq"),
    "int8": Case(6, options=("auto", "int8")),
}
BUILT_IN = "q4_1"
SIZES = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32,
    "num_key_value_heads": 4, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
}


def written(folder: Path, case: Case) -> Path:
    """A random checkpoint. Codes of quantised matrices are random bits."""
    import ml_dtypes
    import numpy as np

    from specjax.checkpoint.weights import save_shards

    rng = np.random.default_rng(0)
    bits, normal = rng.integers(-(2**31), 2**31, 2**20).astype(np.int32), rng.standard_normal(2**20, np.float32) / 50
    width, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    narrow = width * SIZES["num_key_value_heads"] // SIZES["num_attention_heads"]
    attention = {"q": (width, width), "k": (narrow, width), "v": (narrow, width), "o": (width, width)}
    shapes = {f"self_attn.{name}_proj": shape for name, shape in attention.items()}
    shapes |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    floats, codes = np.dtype(case.dtype), {"fp8": np.dtype(ml_dtypes.float8_e4m3fn)}
    tensors: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
    for layer in range(case.layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = (width,), floats
        for name, (out, inside) in shapes.items():
            stem, half = prefix + name, np.dtype(np.float16)
            if case.method == "fp8":
                tensors[f"{stem}.weight"] = (out, inside), codes["fp8"]
                tensors[f"{stem}.weight_scale_inv"] = (-(-out // 128), inside // 128), np.dtype(np.float32)
            elif case.method:
                words = (inside // 8, out) if case.method == "gptq" else (inside, out // 8)
                tensors[f"{stem}.qweight"] = words, np.dtype(np.int32)
                tensors[f"{stem}.qzeros"] = (inside // 128, out // 8), np.dtype(np.int32)
                tensors[f"{stem}.scales"] = (inside // 128, out), half
            else:
                tensors[f"{stem}.weight"] = (out, inside), floats
    for name, shape in (("model.embed_tokens", (32000, width)), ("model.norm", (width,)), ("lm_head", (32000, width))):
        tensors[f"{name}.weight"] = shape, floats

    def values(name: str) -> np.ndarray:
        shape, dtype = tensors[name]
        if dtype.kind == "i":
            return np.resize(bits, shape)
        return np.resize(normal.astype(dtype), shape)

    sizes = {name: int(np.prod(shape)) * dtype.itemsize for name, (shape, dtype) in tensors.items()}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": case.layers, **SIZES}
    config |= {"torch_dtype": case.dtype, "tie_word_embeddings": False}
    if case.method:
        config["quantization_config"] = METHODS[case.method]
    (folder / "config.json").write_text(json.dumps(config))
    save_shards(folder, sizes, values)
    return folder


def read(files: list[str]) -> dict[str, Any]:
    total, started = 0, time.perf_counter()
    buffer = bytearray(ONCE)
    for file in files:
        with open(file, "rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                total += count
    return {"seconds": time.perf_counter() - started, "bytes": total}


def load(model: str, dtype: str, quantization: str) -> dict[str, Any]:
    import jax
    import specjax_kernels  # noqa: F401 (the engine imports it before it loads)

    import specjax.models.families  # noqa: F401 (the engine imports it with its target)
    from specjax import checkpoint
    from specjax.load import use_compilation_cache

    use_compilation_cache()
    jax.block_until_ready(jax.device_put(0))
    begun = time.perf_counter()
    files = checkpoint.resolve(model, progress=False)
    config = checkpoint.model_config(files.config, dtype=dtype)
    params = checkpoint.load_params(files, config, quantization=quantization, progress=False)
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params))}


def child(*arguments: str) -> dict[str, Any]:
    """Result of `read` or `load` in a fresh process."""
    command = [sys.executable, __file__, "--child", *arguments]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def cool(files: list[str]) -> None:
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measured(model: str, files: list[str], options: tuple[str, str], runs: int) -> dict[str, Any]:
    calls: dict[str, Callable[[], dict[str, Any]]] = {
        "read": lambda: child("read", *files),
        "load": lambda: child("load", model, *options),
    }
    result: dict[str, Any] = {}
    calls["load"]()  # fills caches of jax and Python
    for state in ("cold", "warm"):
        samples: dict[str, list[dict[str, Any]]] = {name: [] for name in calls}
        for _ in range(runs):
            for name, call in calls.items():
                if state == "cold":
                    cool(files)
                samples[name].append(call())
        medians = {name: statistics.median(row["seconds"] for row in rows) for name, rows in samples.items()}
        result[state] = {
            "share_of_read": medians["read"] / medians["load"],
            **{f"{name}_seconds": median for name, median in medians.items()},
            **{f"{name}_gb_per_second": samples["read"][0]["bytes"] / 1e9 / medians[name] for name in medians},
            "samples": samples,
        }
    return result | {"file_bytes": samples["read"][0]["bytes"], "leaf_bytes": samples["load"][0]["bytes"]}


def models(names: list[str]) -> Iterator[tuple[str, str, tuple[str, str]]]:
    """Name, model and options of each case. A checkpoint is removed before the next case."""
    for name in names:
        if name == BUILT_IN:
            yield name, "smollm2-135m-instruct", ("auto", "auto")
            continue
        with tempfile.TemporaryDirectory() as folder:
            yield name, str(written(Path(folder), CASES[name])), CASES[name].options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = (*CASES, BUILT_IN)
    parser.add_argument("--cases", nargs="+", default=every, choices=every)
    parser.add_argument("--runs", type=int, default=5, help="of each, cold and warm")
    parser.add_argument("--record", nargs="?", const=True, help="write benchmarks/results/loading-<date>.json")
    args = parser.parse_args()
    from records import finish, machine
    from specjax_kernels.cpu import repacking

    from specjax import checkpoint
    from specjax.load import use_compilation_cache

    use_compilation_cache()
    repacking.prepare(every=True)  # as a first start does in the background
    document: dict[str, Any] = machine("jaxlib", "numpy") | {"cases": {}}
    columns = ("read GB/s", "load GB/s", "of read")
    print(f"{'':10}{'MB':>6}{'cold:':>7}{''.join(f'{c:>11}' for c in columns)}{'warm:':>7}", end="")
    print(f"{''.join(f'{c:>11}' for c in columns)}")
    for name, model, options in models(args.cases):
        files = [str(file.resolve()) for file in checkpoint.resolve(model, progress=False).weights]
        row = document["cases"][name] = measured(model, files, options, args.runs)
        shown = ("read_gb_per_second", "load_gb_per_second", "share_of_read")
        cold, warm = ("".join(f"{row[state][key]:>11.2f}" for key in shown) for state in ("cold", "warm"))
        print(f"{name:10}{row['file_bytes'] / 1e6:>6.0f}{'':7}{cold}{'':7}{warm}", flush=True)
    finish("loading", document, record=args.record)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        kind, *rest = sys.argv[2:]
        print(json.dumps(load(*rest) if kind == "load" else read(rest)))
    else:
        main()
