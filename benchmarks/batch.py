"""Requests at once, with drafts and without: how many tree nodes a step should check over its whole batch.

    python benchmarks/batch.py [--requests 4 16] [--nodes 1 16 64] [--algorithm AUTO] [--rounds 3] [--record]

`--nodes` are values of `BLOCK_TOKENS` and `HEAD_BLOCK_TOKENS` (specjax/engine/buckets.py): the most tree nodes of
a step; 1 drafts for nobody. For each number of requests every contender and the engine without drafts complete the same
prompts of MT-bench, all together, one after another and in an order that rotates; between rounds the drafters forget
what they have seen. A first round, in which programs are compiled, does not count. Each request emits exactly
`--max-new-tokens` tokens. Printed: tokens / second end to end (the median of the rounds), the ratio to the engine
without drafts, accept length. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import jax
from accept_length import read_prompts, spread
from records import DATA, finish, machine

from specjax import Engine, EngineConfig, SamplingParams, checkpoint
from specjax.engine import buckets

NONE = "none"


def build(model: str, algorithm: str, nodes: int | None, requests: int) -> Engine:
    if nodes is not None:
        for most in (buckets.BLOCK_TOKENS, buckets.HEAD_BLOCK_TOKENS):
            most["cpu" if jax.default_backend() == "cpu" else "gpu"] = nodes
    config = EngineConfig(max_running_requests=requests, max_total_tokens=1024 * requests, prefix_cache=False)
    return Engine.from_pretrained(model, draft=algorithm, config=config)


def complete(engine: Engine, prompts: list[list[int]], count: int) -> tuple[float, float, list[list[int]]]:
    """Tokens / second, accept length, and the texts."""
    if not engine.flush_cache():  # a round must not remember the one before
        raise RuntimeError("requests of the round before still run")
    started = time.perf_counter()
    done = engine.generate(prompts, SamplingParams(max_new_tokens=count, ignore_eos=True))
    seconds = time.perf_counter() - started
    forwards = sum(completion.spec_verify_ct for completion in done)
    texts = [completion.output_ids for completion in done]
    return len(prompts) * count / seconds, len(prompts) * (count - 1) / forwards, texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=checkpoint.BUILT_IN_MODEL, help="alias, local folder or hub id")
    parser.add_argument("--algorithm", default="AUTO")
    parser.add_argument("--requests", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of SET.jsonl files")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/batch-<date>.json")
    args = parser.parse_args()
    rows = read_prompts(args.data / "mt_bench.jsonl", None)
    if not 1 <= min(args.requests) <= max(args.requests) <= len(rows) or args.max_new_tokens < 2:
        parser.error(f"--requests from 1 to {len(rows)}, the prompts there are, and --max-new-tokens from 2 on")

    document = machine("jaxlib", "flax")
    document |= {"model": args.model, "algorithm": args.algorithm, "max_new_tokens": args.max_new_tokens, "runs": []}
    print(f"{'requests':>8} {'nodes':>6}{'tok/s':>8}{'to none':>9}{'accept':>8}{'same':>6}")
    for requests in args.requests:
        wanted = {NONE: ("NONE", None)} | {str(nodes): (args.algorithm, nodes) for nodes in args.nodes}
        engines = {name: build(args.model, *how, requests) for name, how in wanted.items()}
        chat = [[{"role": "user", "content": text}] for _, text in spread(rows, requests)]
        prompts = [engines[NONE].encode(messages) for messages in chat]
        rates: dict[str, list[float]] = {name: [] for name in engines}
        last: dict[str, Any] = {}
        for index in range(args.rounds + 1):
            turn = index % len(engines)
            for name in [*engines][turn:] + [*engines][:turn]:
                rate, accepted, texts = complete(engines[name], prompts, args.max_new_tokens)
                if index:
                    rates[name].append(round(rate, 2))
                last[name] = accepted, texts
        for name, each in rates.items():
            ratio = statistics.median(a / b for a, b in zip(each, rates[NONE], strict=True))
            same = sum(a == b for a, b in zip(last[name][1], last[NONE][1], strict=True))
            row = {"requests": requests, "nodes": name, "tokens_per_second": statistics.median(each)}
            row |= {"to_none": round(ratio, 3), "accept_length": round(last[name][0], 4), "same_text": same}
            document["runs"].append(row | {"each": each})
            print(f"{requests:>8} {name:>6}{row['tokens_per_second']:>8.1f}{ratio:>9.2f}{last[name][0]:>8.2f}{same:>6}")
    finish("batch", document, record=args.record)


if __name__ == "__main__":
    main()
