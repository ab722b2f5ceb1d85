"""Requests at once, with drafts and without: what drafting costs and gains in a batch.

    python benchmarks/batch.py [--requests 4 16] [--algorithms AUTO NGRAM] [--sets mt_bench gsm8k] [--record]
    python benchmarks/batch.py --nodes 1 16 64 [--algorithms AUTO]

Engines draft where it is measured to be faster (`EngineConfig.adaptive`); with `--nodes` always. These are values of
`BLOCK_TOKENS` and `HEAD_BLOCK_TOKENS` (specjax/engine/buckets.py): the most tree nodes of a step; 1 drafts for nobody.
For each set and number of requests every contender and the engine without drafts complete the same prompts, all
together, one after another and in an order that rotates. The next round takes the next prompts of the set, whose order
is drawn once, and the first ones again after the last; between rounds the drafters forget what they have seen. The
first `--warm-up` rounds do not count: trees that were not expected to pay are compiled in them. What still compiles
in the background after a run is waited for, since it would slow down the next contender. With `--warm-up 0` the first
requests count, too; those of the first set meet engines that do not know yet what drafts are worth. Each request emits
exactly `--max-new-tokens` tokens; above `--temperature 0` it has a seed of its own. Printed: tokens / second end to end
(the median of the rounds), the median ratio to the engine without drafts, accept length. The last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from pathlib import Path

import jax
from records import DATA, finish, machine, read_prompts

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
    engine = Engine.from_pretrained(model, draft=algorithm, config=config)
    engine.warm_up_in_background(progress=False).join()  # as a server does; else a round may wait for the compiler
    return engine


def complete(
    engine: Engine, prompts: list[list[int]], count: int, temperature: float
) -> tuple[float, float, list[list[int]]]:
    """Tokens / second, accept length, and the texts."""
    if not engine.flush_cache():  # a round must not remember the one before
        raise RuntimeError("requests of the round before still run")
    engine.wait_until_allocated()  # a drafter's memory is cleared on the device, which would count as decoding
    started = time.perf_counter()
    sampling = [
        SamplingParams(max_new_tokens=count, ignore_eos=True, temperature=temperature, seed=index)
        for index in range(len(prompts))
    ]
    done = engine.generate(prompts, sampling)
    seconds = time.perf_counter() - started
    forwards = sum(completion.spec_verify_ct for completion in done)
    texts = [completion.output_ids for completion in done]
    return len(prompts) * count / seconds, len(prompts) * (count - 1) / forwards, texts


def prompts_of_round(known: list[list[int]], requests: int, index: int) -> list[list[int]]:
    """The prompts of a round, from 0 on: each round goes on where the one before ended, and after the last prompt with
    the first."""
    return [known[(index * requests + i) % len(known)] for i in range(requests)]


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
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1, help="rounds before them that do not count")
    parser.add_argument("--record", nargs="?", const="", metavar="LABEL", help="write it under benchmarks/results/")
    args = parser.parse_args()
    if min(args.requests) < 1 or args.max_new_tokens < 2 or args.rounds < 1 or args.warm_up < 0:
        parser.error("--requests and --rounds from 1 on, --warm-up from 0 on, and --max-new-tokens from 2 on")
    if not 0 <= args.temperature < float("inf"):
        parser.error(f"--temperature {args.temperature}: from 0 on")

    document = machine("jaxlib", "flax")
    document |= {"model": args.model, "max_new_tokens": args.max_new_tokens, "temperature": args.temperature}
    document |= {"warm_up": args.warm_up, "runs": []}
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
        if not known:
            parser.error(f"{set_name} has no prompts of up to {args.longest} tokens")
        random.Random(0).shuffle(known)  # sets are ordered by category
        rates: dict[str, list[float]] = {name: [] for name in engines}
        forwards, same = dict.fromkeys(engines, 0.0), dict.fromkeys(engines, 0)
        for index in range(args.warm_up + args.rounds):
            prompts, turn = prompts_of_round(known, requests, index), index % len(engines)
            texts: dict[str, list[list[int]]] = {}
            for name in [*engines][turn:] + [*engines][:turn]:
                rate, accepted, texts[name] = complete(engines[name], prompts, args.max_new_tokens, args.temperature)
                while engines[name].programs.pending:
                    time.sleep(0.05)
                if index >= args.warm_up:
                    rates[name].append(round(rate, 2))
                    forwards[name] += 1 / accepted
            if index >= args.warm_up:
                for name, found in texts.items():
                    same[name] += sum(a == b for a, b in zip(found, texts[NONE], strict=True))
        for name, each in rates.items():
            ratio = statistics.median(a / b for a, b in zip(each, rates[NONE], strict=True))
            accepted = args.rounds / forwards[name]
            row = {
                "set": set_name,
                "requests": requests,
                "contender": name,
                "tokens_per_second": statistics.median(each),
            }
            row |= {"to_none": round(ratio, 3), "accept_length": round(accepted, 4)}
            row |= {"same_text": same[name], "texts": args.rounds * requests}
            document["runs"].append(row | {"each": each})
            shown = f"{set_name:>12}{requests:>9} {name:>10}{row['tokens_per_second']:>8.1f}{ratio:>9.2f}"
            print(f"{shown}{accepted:>8.2f}{same[name]:>6}", flush=True)
    finish("batch", document, record=args.record)


if __name__ == "__main__":
    main()
