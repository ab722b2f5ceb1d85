"""Estimated tokens/s and cost of models on 1 to 16 GPUs, split (tp) or as replicas, with and without drafts.

    python benchmarks/scale.py [--devices H200 H100] [--models 8b 70b deepseek-v3] [--context 2048] [--record]
    python benchmarks/scale.py --page benchmarks/results/scale-DATE.json     (writes the tables of docs/scale.md)

Nothing is compiled or run; no GPU was measured. Counts and times are `specjax.costs`, `specjax.fabric` and
`specjax.shares`; `--price`, `--link`, `--network` and `--direct` replace constants. Decoding alone: every request
stands behind `--context` tokens. What does not fit a device is said and not computed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from records import finish, machine
from scale_models import Model, models
from scale_tables import write_page

from specjax.costs import EXCHANGE, Decoding, Machine, StepCost, cheapest_tree, distinct_experts, step_cost
from specjax.costs import machine as constants
from specjax.devices import DEVICES, Device
from specjax.engine.config import EngineConfig
from specjax.fabric import DIRECT_START, HGX, Fabric
from specjax.models import table
from specjax.models.params import dimensions, leaves_of
from specjax.outline import head_parameters
from specjax.shares import held_bytes as leaves_held
from specjax.shares import page_bytes

DEGREES = (1, 2, 4, 8, 16)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PRICES = {"H200": 3.59, "H100": 2.69}
"""US dollars of a GPU and hour on demand: RunPod's of March 2026, by deploybase.ai/articles/h200-vs-h100."""

MEASURED = (
    ("NVIDIA/nccl issue 1259: 2 H100, CUDA graph, NVLS", 2, 128, 6.0e-6),
    ("ByteDance-Seed/Triton-distributed issue 57: 8 H100, NCCL", 8, 128, 19.19e-6),
    ("the same", 8, 64 * 1024, 23.05e-6),
    ("the same", 8, 1024 * 1024, 32.42e-6),
    ("the same", 8, 16 * 1024 * 1024, 135.68e-6),
    ("NVIDIA/nccl issue 1244: 2 hosts of 8 H20 (NVLink 4), NCCL", 16, 1024 * 1024, 121.8e-6),
    ("the same", 16, 16 * 1024 * 1024, 203.0e-6),
    ("the same", 16, 512 * 1024 * 1024, 3218.6e-6),
)
"""Published times of all-reduces: source, devices, bytes, seconds."""


def held_bytes(model: Model, devices: int) -> int:
    """Weights of the target and of its draft on each device."""
    outline, config = model.outline, model.outline.target.config
    found = leaves_held(leaves_of(table(config)), dimensions(config), config.dtype, devices, outline.bits)
    if outline.head is not None:
        declared, sizes = head_parameters(outline.head, outline.target)
        found += leaves_held(leaves_of(declared), sizes, outline.head.dtype, devices, outline.draft_bits)
    return found


def token_bytes(model: Model, devices: int) -> float:
    """Of a token in the pages of target and draft, on each device."""
    outline = model.outline
    return page_bytes(outline.target.pages, devices) + page_bytes(outline.draft_pages, devices)


def requests_that_fit(model: Model, device: Device, devices: int, context: int) -> int:
    """Requests whose pages fit beside the weights in what the engine gives to both; below 0: the weights do not."""
    budget = device.memory * EngineConfig().mem_fraction - held_bytes(model, devices)
    return int(budget // (token_bytes(model, devices) * context)) if budget >= 0 else -1


def exchange_share(step: StepCost) -> float:
    return sum(part.seconds for key, part in step.parts.items() if key.endswith(EXCHANGE)) / step.seconds


def best_steps(model: Model, decoding: Decoding, on: Machine, batch: int, context: int) -> tuple[StepCost, StepCost]:
    """Without drafts, and that with the most tokens/s of all chains and none."""
    plain = step_cost(decoding, on, batch=batch, context=context)
    return plain, cheapest_tree(decoding, on, batch, model.chains, model.accept, context=context)


def cells(model: Model, device: Device, on: Machine, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each number of devices and batch; of what does not fit only what it lacks."""
    price = args.price or PRICES[device.name]
    for devices in args.tp:
        decoding, fit = Decoding.of(model.outline, devices), requests_that_fit(model, device, devices, args.context)
        about = {"model": model.name, "device": device.name, "tp": devices, "fits": fit,
                 "weights_gb": round(held_bytes(model, devices) / 1e9, 2),
                 "page_bytes": round(token_bytes(model, devices))}  # fmt: skip
        for batch in args.batches:
            row = about | {"batch": batch}
            if batch <= fit:
                plain, drafted = best_steps(model, decoding, on, batch, args.context)
                accept = model.accept(drafted.tree)
                for name, step, rate in (("plain", plain, plain.rate()), ("drafted", drafted, drafted.rate(accept))):
                    row[name] = {
                        "drafts": step.tree.steps,
                        "accept_length": round(model.accept(step.tree), 3),
                        "milliseconds": round(1e3 * step.seconds, 3),
                        "exchange_share": round(exchange_share(step), 3),
                        "tokens_per_second": round(rate, 1),
                        "dollars_per_million": round(1e6 * devices * price / 3600 / rate, 3),
                    }
            yield row


def divided(batch: int, replicas: int) -> list[int]:
    """Requests of each replica: as even as can be."""
    return [batch // replicas + (i < batch % replicas) for i in range(replicas)]


def arrangements(
    model: Model, device: Device, on: Machine, args: argparse.Namespace, gpus: int
) -> Iterator[dict[str, Any]]:
    """For each batch over all `gpus`: the tokens/s of replicas of every size that fits, with the best drafts."""
    parts = [tp for tp in args.tp if gpus % tp == 0 and tp <= gpus]
    decodings = {tp: Decoding.of(model.outline, tp) for tp in parts}
    for batch in args.batches:
        rates: dict[str, float | None] = {}
        for tp in parts:
            each = divided(batch, gpus // tp)
            if max(each) > requests_that_fit(model, device, tp, args.context):
                rates[str(tp)] = None
                continue
            rates[str(tp)] = sum(
                (step := best_steps(model, decodings[tp], on, size, args.context)[1]).rate(model.accept(step.tree))
                for size in each
                if size
            )
        yield {"model": model.name, "device": device.name, "gpus": gpus, "batch": batch,
               "tokens_per_second": {tp: rate and round(rate, 1) for tp, rate in rates.items()}}  # fmt: skip


def experts_read(model: Model, batches: list[int], devices: int = 8) -> Iterator[dict[str, Any]]:
    """Of a model with experts: how many of a layer's a plain step reads, and its bytes of weights on each device."""
    experts = model.outline.target.config.experts
    if experts is None:
        return
    ops = [*(decoding := Decoding.of(model.outline, devices)).forward, *decoding.output]
    for batch in batches:
        found = distinct_experts(experts, batch)
        read = sum(op.weights * count * (found / experts.count if op.experts else 1) for op, count in ops)
        yield {"model": model.name, "batch": batch, "tp": devices, "experts": round(found, 1),
               "of": experts.count, "weights_gb": round(read / 1e9, 2)}  # fmt: skip


def exchanges(model: Model, devices: int) -> int:
    """Of a plain step."""
    decoding = Decoding.of(model.outline, devices)
    return sum(count for op, count in (*decoding.forward, *decoding.output) if op.kind == EXCHANGE)


def all_reduces(fabric: Fabric) -> list[dict[str, Any]]:
    """Published times beside this model's."""
    return [
        {"source": source, "devices": devices, "bytes": size, "measured_us": round(1e6 * seconds, 2),
         "estimated_us": round(1e6 * fabric.all_reduce(size, devices), 2)}
        for source, devices, size, seconds in MEASURED
    ]  # fmt: skip


def estimate(args: argparse.Namespace) -> dict[str, Any]:
    fabric = replace(
        HGX, **{key: value for key in ("link", "network") if (value := getattr(args, key)) is not None},
        direct=DIRECT_START if args.direct else None,
    )  # fmt: skip
    known, chosen = models(), [DEVICES[name] for name in args.devices]
    found: dict[str, Any] = {
        "context": args.context,
        "mem_fraction": EngineConfig().mem_fraction,
        "prices": {device.name: args.price or PRICES[device.name] for device in chosen},
        "devices": [device._asdict() for device in chosen],
        "fabric": asdict(fabric),
        "all_reduce": all_reduces(fabric),
        "models": [], "rows": [], "arrangements": [], "experts": [],
    }  # fmt: skip
    for key in args.models:
        model = known[key]
        found["models"].append(
            {"name": model.name, "weights": model.weights, "draft": model.draft, **asdict(model.acceptance),
             "exchanges_tp8": exchanges(model, 8), "layers": model.outline.target.config.num_layers}
        )  # fmt: skip
        found["experts"] += experts_read(model, args.batches)
        for device in chosen:
            on = replace(constants(device, "bfloat16", "gpu"), fabric=fabric)
            found["rows"] += cells(model, device, on, args)
            for gpus in args.gpus:
                found["arrangements"] += arrangements(model, device, on, args, gpus)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", choices=tuple(PRICES), default=list(PRICES))
    parser.add_argument("--models", nargs="+", choices=tuple(models()), default=list(models()))
    parser.add_argument("--tp", type=int, nargs="+", default=list(DEGREES), help="devices that a model is split over")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 16], help="GPUs to arrange as replicas")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--context", type=int, default=2048, help="committed tokens of each request")
    parser.add_argument("--price", type=float, help="US dollars of a GPU and hour; default: a list by device")
    parser.add_argument("--link", type=float, help="bytes/s each way between devices of a host")
    parser.add_argument("--network", type=float, help="bytes/s each way of a device's network adapter")
    parser.add_argument("--direct", action="store_true", help="exchanges in one kernel within a host, beside NCCL's")
    parser.add_argument("--record", nargs="?", const=True, default=False, metavar="LABEL", help="write under results/")
    parser.add_argument(
        "--page", type=Path, metavar="RECORD", help="write docs/scale.md's tables from a record; no more"
    )
    args = parser.parse_args()
    if args.page is not None:
        write_page(args.page.name, json.loads(args.page.read_text(encoding="utf-8")))
        return
    document = machine() | estimate(args)
    for row in document["rows"]:
        print(shown(row))
    finish("scale", document, record=args.record)


def shown(row: dict[str, Any]) -> str:
    head = f"{row['model']:14} {row['device']} tp {row['tp']:2} batch {row['batch']:3}"
    if "plain" not in row:
        lacks = "the weights" if row["fits"] < 0 else f"more than {row['fits']} requests"
        return f"{head}  does not fit: {lacks} ({row['weights_gb']} GB of weights on a GPU)"
    plain, drafted = row["plain"], row["drafted"]
    return (
        f"{head} {plain['milliseconds']:8.2f} ms {plain['tokens_per_second']:9,.0f} tok/s "
        f"${plain['dollars_per_million']:7.3f}/M, {drafted['drafts']} drafts {drafted['tokens_per_second']:9,.0f} "
        f"${drafted['dollars_per_million']:7.3f}/M, exchanges {plain['exchange_share']:.0%}"
    )


if __name__ == "__main__":
    main()
