"""Requests at once, with drafts and without: what drafting costs and gains in a batch.

    python benchmarks/batch.py [--requests 4 16] [--algorithms AUTO NGRAM] [--sets mt_bench gsm8k] [--record]
    python benchmarks/batch.py --nodes 1 16 64 [--algorithms AUTO]

Engines draft where it is measured to be faster (`EngineConfig.adaptive`); with `--nodes` always. These are values of
`BLOCK_TOKENS` and `HEAD_BLOCK_TOKENS` (specjax/engine/buckets.py): the most tree nodes of a step; 1 drafts for nobody.
For each set and number of requests every contender and the engine without drafts complete the same prompts, all
together, one after another and in an order that rotates; between rounds the drafters forget what they have seen. A
first round, in which programs are compiled, does not count. Each request emits exactly `--max-new-tokens` tokens.
Printed: tokens / second end to end (the median of the rounds), the ratio to the engine
without drafts, accept length. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import jax
from records import DATA, finish, machine, read_prompts, spread

from specjax import Engine, EngineConfig, SamplingParams, checkpoint
from specjax.engine import buckets

NONE = "none"


def build(model: str, algorithm: str, nodes: int | None, requests: int, tokens: int) -> Engine:
    if nodes is not None:
        for most in (buckets.BLOCK_TOKENS, buckets.HEAD_BLOCK_TOKENS):
            most["cpu" if jax.default_backend() == "cpu" else "gpu"] = nodes
    config = EngineConfig(
        max_running_requests=requests, max_total_tokens=tokens, prefix_cache=False, adaptive=nodes is None
    )
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
    parser.add_argument("--algorithms", nargs="+", default=["AUTO", "NGRAM"])
    parser.add_argument("--sets", nargs="+", default=["mt_bench"], help="of prompts")
    parser.add_argument("--longest", type=int, default=1200, help="tokens of a prompt; longer ones are left out")
    parser.add_argument("--requests", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--nodes", type=int, nargs="+", help="most nodes of a step; default: as is measured")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of SET.jsonl files")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", nargs="?", const="", metavar="LABEL", help="write it under benchmarks/results/")
    args = parser.parse_args()
    if min(args.requests) < 1 or args.max_new_tokens < 2:
        parser.error("--requests from 1 on, and --max-new-tokens from 2 on")

    document = machine("jaxlib", "flax")
    document |= {"model": args.model, "max_new_tokens": args.max_new_tokens, "runs": []}
    print(f"{'set':>12}{'requests':>9} {'contender':>10}{'tok/s':>8}{'to none':>9}{'accept':>8}{'same':>6}")
    contenders = {NONE: ("NONE", None)}
    for algorithm in args.algorithms:
        many = args.nodes and len(args.algorithms) > 1
        contenders |= {f"{algorithm} {nodes}" if many else str(nodes): (algorithm, nodes) for nodes in args.nodes or ()}
        contenders |= {} if args.nodes else {algorithm: (algorithm, None)}
    for requests, set_name in itertools.product(args.requests, args.sets):
        room = requests * (args.longest + args.max_new_tokens + 64)
        if set_name == args.sets[0]:
            engines = {name: build(args.model, *how, requests, room) for name, how in contenders.items()}
        rows = read_prompts(args.data / f"{set_name}.jsonl", None)
        chat = [[{"role": "user", "content": text}] for _, text in rows]
        known = [tokens for tokens in map(engines[NONE].encode, chat) if len(tokens) <= args.longest]
        if len(known) < requests:
            parser.error(f"{set_name} has {len(known)} prompts of up to {args.longest} tokens, fewer than {requests}")
        prompts = spread(known, requests)
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
            row = {
                "set": set_name,
                "requests": requests,
                "contender": name,
                "tokens_per_second": statistics.median(each),
            }
            row |= {"to_none": round(ratio, 3), "accept_length": round(last[name][0], 4), "same_text": same}
            document["runs"].append(row | {"each": each})
            shown = f"{set_name:>12}{requests:>9} {name:>10}{row['tokens_per_second']:>8.1f}{ratio:>9.2f}"
            print(f"{shown}{last[name][0]:>8.2f}{same:>6}", flush=True)
    finish("batch", document, record=args.record)


if __name__ == "__main__":
    main()
