"""Estimated milliseconds and tokens/s of steps, by batch and tree, and beside them what was measured on the device.

    python benchmarks/cost_model.py [--device H200] [--context 1024] [--batches 1 8 64] [--concurrent] [--record]

Shapes are Llama-3.1-8B's in bfloat16 with an EAGLE-3 head's; nothing is compiled or run. The model is
`specjax.costs`; `--bandwidth`, `--flops` and `--kernel` replace its constants, with what a device was measured to
reach, say. Records of `gpu_check.py` for the same device (results/gpu-check-*.json) are compared step by step: the
ratio is measured over estimated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llama_shapes import eagle3_head, llama_8b
from records import RESULTS, finish, machine
from scale_models import described

from specjax.costs import KERNEL_RANGE, PLAIN, Decoding, Machine, Tree, expected_accept, step_cost
from specjax.costs import machine as constants
from specjax.devices import DEVICES
from specjax.models.params import Bits

TREES = (PLAIN, Tree(3, 1, 4), Tree(7, 1, 8), Tree(5, 8, 32))
BY_RANK = (0.78, 0.07, 0.03, 0.02, 0.01)
"""Assumed probability that a draft's first, second, ... choice is right: 3.91 tokens a step of (7,1,8)."""


def decoding(layers: int, draft_bits: Bits | None) -> Decoding:
    config = llama_8b(layers)
    return Decoding.of(described(config, eagle3_head(config), draft_bits=draft_bits))


def name(tree: Tree) -> str:
    return "plain" if tree == PLAIN else f"({tree.steps},{tree.topk},{tree.nodes})"


def measured(device: str, results: Path = RESULTS) -> Iterator[dict[str, Any]]:
    """Steps in the records of `gpu_check.py` whose device has this name in its own."""
    for file in sorted(results.glob("gpu-check*.json")):
        for part in json.loads(file.read_text())["parts"].values():
            for row in part["rows"]:
                if row.get("kind") == "step" and device.lower() in file.stem.lower():
                    yield {"file": file.name, **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(DEVICES), default="H200")
    parser.add_argument("--context", type=int, default=1024, help="committed tokens of each request")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 24, 32, 48, 64])
    parser.add_argument("--concurrent", action="store_true", help="independent kernels of a graph run side by side")
    parser.add_argument("--bandwidth", type=float, help="bytes/s of a copy")
    parser.add_argument("--flops", type=float, help="a second, of large products")
    parser.add_argument("--kernel", type=float, help="seconds of a small kernel")
    parser.add_argument("--record", nargs="?", const=True, default=False, metavar="LABEL", help="write under results/")
    args = parser.parse_args()
    given = {key: value for key in ("bandwidth", "flops", "kernel") if (value := getattr(args, key)) is not None}
    on = replace(constants(DEVICES[args.device], "bfloat16", "gpu"), **given)
    accept = expected_accept(BY_RANK)
    models = {"bf16": decoding(32, None), "int8": decoding(32, Bits(8.0, ends=True))}
    document = machine() | {"estimates_for": asdict(on), "context": args.context, "by_rank": BY_RANK,
                            "concurrent": args.concurrent, "rows": []}  # fmt: skip
    print(f"{on}, {args.context} tokens of context")
    print(f"estimates; in brackets with kernels of {KERNEL_RANGE[0]:g} and {KERNEL_RANGE[1]:g} s")
    for batch in args.batches:
        for draft, model in models.items():
            for tree in TREES if draft == "bf16" else TREES[1:]:
                row = estimate(model, on, batch, tree, args.context, args.concurrent, accept(tree))
                document["rows"].append({"draft": draft, **row})
                least, most = row["milliseconds_range"]
                print(
                    f"batch {batch:3} {name(tree):9} {draft if tree != PLAIN else '':5} {row['milliseconds']:8.3f} ms "
                    f"({least:.3f} to {most:.3f})  x{row['to_plain']:.2f}  accept {row['accept_length']:.2f}  "
                    f"{row['tokens_per_second']:10,.0f} tok/s  {row['kernels']:4.0f} kernels"
                    f"  {row['bytes'] / 1e9:.1f} GB"
                )  # fmt: skip
    document["measured"] = [compared(models["bf16"], on, row) for row in measured(args.device)]
    for row in document["measured"]:
        print(f"measured: {row['batch']} x {row['tree']} behind {row['context']}: {row['ratio']:.2f} of the estimate")
    finish("cost-model", document, record=args.record)


def estimate(
    model: Decoding, on: Machine, batch: int, tree: Tree, context: int, concurrent: bool, accept: float
) -> dict[str, Any]:
    def step(on: Machine, tree: Tree) -> Any:
        return step_cost(model, on, batch=batch, tree=tree, context=context, concurrent=concurrent)

    cost, plain = step(on, tree), step(on, PLAIN)
    span = [1e3 * step(replace(on, kernel=each), tree).seconds for each in KERNEL_RANGE]
    return {
        "batch": batch,
        "tree": tree._asdict(),
        "milliseconds": round(1e3 * cost.seconds, 3),
        "milliseconds_range": [round(each, 3) for each in span],
        "to_plain": round(cost.seconds / plain.seconds, 3),
        "accept_length": round(accept, 3),
        "tokens_per_second": round(cost.rate(accept), 1),
        "bytes": round(cost.total.bytes),
        "kernels": cost.total.kernels,
        "parts_ms": {key: round(1e3 * part.seconds, 4) for key, part in cost.parts.items()},
    }


def compared(model: Decoding, on: Machine, row: dict[str, Any]) -> dict[str, Any]:
    tree = Tree(*row["tree"]) if row["tree"] else PLAIN
    cost = step_cost(model, on, batch=row["batch"], tree=tree, context=row["context"])
    kept = {key: row[key] for key in ("file", "batch", "context", "implementation", "tree", "milliseconds")}
    return {**kept, "estimated_milliseconds": 1e3 * cost.seconds, "ratio": row["milliseconds"] / 1e3 / cost.seconds}


if __name__ == "__main__":
    main()
