"""What a router's cache-aware policy brings over round robin and random: our prefix cache, simulated over a log.

    python benchmarks/router_cache.py --trace conversation_trace.jsonl [--record]
    python benchmarks/router_cache.py                                  (the turns of MT-bench that come with specjax)
    python benchmarks/router_cache.py --page benchmarks/results/router-cache-DATE.json      (docs/scale.md's table)

`--trace` is a file as Mooncake's FAST'25 release has them (kvcache-ai/Mooncake, FAST25-release/traces): times, lengths
and the identities of blocks of 512 tokens of an hour of a chat service. Without it: MT-bench's turns, words and marks
as tokens, with answers that SmolLM2-135M-Instruct wrote to other prompts (data/selfgen.jsonl.gz). Workers and policies
are `routing.py`. The log's pace is multiplied by `--speed` and the number of workers, so that each has the same to do.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import random
import re
from collections import defaultdict
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from records import DATA, finish, machine
from routing import CacheAware, Policy, Request, Worker, at_random, most_reuse, round_robin, simulate
from scale_tables import write_page

BLOCK = 512  # tokens of a block of the trace
CHARACTERS = 4  # of a token, by which the router's tree is measured
ANSWERS = Path(__file__).parents[1] / "data" / "selfgen.jsonl.gz"


def traced(file: Path, most: int | None = None) -> list[Request]:
    """The first `most` requests of a trace. A block stands for one page; what was written is not known."""
    found = []
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            blocks, prompt = row["hash_ids"], row["input_length"]
            texts = [(block,) for block in blocks[: prompt // BLOCK]]
            found.append(Request(row["timestamp"] / 1000, blocks, prompt, row["output_length"], texts, BLOCK))
            if len(found) == most:
                break
    return found


def turns(page_size: int = 16, apart: float = 0.5, between: float = 20.0, seed: int = 0) -> list[Request]:
    """MT-bench's conversations: they begin `apart` seconds apart on average, and a turn follows the one before after
    `between` seconds and as many more on average. A prompt has all turns and answers before it; the router compares
    their characters, without the template."""
    draw, found, start = random.Random(seed), [], 0.0
    with gzip.open(ANSWERS, "rt", encoding="utf-8") as lines:
        answers = [json.loads(line)["response"] for line in lines]
    ids: defaultdict[str, int] = defaultdict(count().__next__)
    rows = [json.loads(line)["turns"] for line in (DATA / "mt_bench.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in rows:
        text, said, at = "", "", start
        for turn in row:
            text += f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n"
            said, answer = said + turn, draw.choice(answers)
            prompt, whole = ([ids[word] for word in re.findall(r"\w+|\W", part)] for part in (text, text + answer))
            texts = [tuple(whole[i : i + page_size]) for i in range(0, len(whole) // page_size * page_size, page_size)]
            found.append(Request(at, said, len(prompt), len(whole) - len(prompt), texts, page_size))
            text, said = text + f"{answer}<|im_end|>\n", f"{said} {answer} "
            at += between + draw.expovariate(1 / between)
        start += draw.expovariate(1 / apart)
    return sorted(found, key=lambda request: request.arrival)


def policies(workers: int, args: argparse.Namespace, block: bool) -> dict[str, Callable[[], Policy]]:
    most = args.max_tree_size // (BLOCK * CHARACTERS) if block else args.max_tree_size

    def aware(threshold: float) -> Policy:
        return CacheAware(workers, threshold, args.balance_abs_threshold, args.balance_rel_threshold, most=most)

    return {
        "round_robin": lambda: round_robin(workers),
        "random": lambda: at_random(workers, args.seed),
        "cache_aware": lambda: aware(args.cache_threshold),
        f"cache_aware, threshold {args.low_threshold:g}": lambda: aware(args.low_threshold),
    }


def compare(requests: list[Request], args: argparse.Namespace) -> list[dict[str, Any]]:
    rows, page_size = [], requests[0].page_size
    for workers in args.workers:
        for tokens in args.cache_tokens:
            for name, make in policies(workers, args, args.trace is not None).items():
                policy = make()
                group = [Worker(tokens // page_size, page_size, args.prefill, args.step) for _ in range(workers)]
                result = simulate(requests, group, policy, speed=args.speed * workers)
                rows.append({"workers": workers, "cache_tokens": tokens, "policy": name} | result.summary())
                if isinstance(policy, CacheAware):
                    rows[-1]["imbalanced"] = policy.imbalanced
                print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="JSONL with timestamp, input_length, output_length and hash_ids")
    parser.add_argument("--requests", type=int, help="the first so many of the trace; default: all")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--cache-tokens", type=int, nargs="+", help="of each worker's pool; default: by the log")
    parser.add_argument("--prefill", type=float, default=35_000, help="tokens/s of a worker's prompts")
    parser.add_argument("--step", type=float, default=0.012, help="seconds of a token of an answer")
    parser.add_argument("--speed", type=float, help="of the log's pace, a worker; default: 0.5 of a trace, else 1")
    parser.add_argument("--cache-threshold", type=float, default=0.3)
    parser.add_argument("--low-threshold", type=float, default=0.1, help="of a second cache_aware policy beside it")
    parser.add_argument("--balance-abs-threshold", type=int, default=64)
    parser.add_argument("--balance-rel-threshold", type=float, default=1.5)
    parser.add_argument("--max-tree-size", type=int, default=2**26, help="characters of the router's tree, a worker")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", nargs="?", const=True, default=False, metavar="LABEL", help="write under results/")
    parser.add_argument("--page", type=Path, metavar="RECORD", help="write the page's table from a record; no more")
    args = parser.parse_args()
    if args.page is not None:
        write_page(args.page.name, json.loads(args.page.read_text(encoding="utf-8")))
        return
    if args.speed is None:
        args.speed = 0.5 if args.trace else 1.0
    if args.cache_tokens is None:
        args.cache_tokens = [750_000, 3_000_000, 12_000_000] if args.trace else [6_000, 12_000, 48_000]
    requests = traced(args.trace, args.requests) if args.trace else turns()
    log: dict[str, Any] = {"name": "mt_bench"}
    if args.trace:
        log = {"name": args.trace.name, "sha256": hashlib.sha256(args.trace.read_bytes()).hexdigest()}
    given = ("prefill", "step", "speed", "cache_threshold", "low_threshold", "balance_abs_threshold",
             "balance_rel_threshold", "max_tree_size", "seed")  # fmt: skip
    document = machine() | {
        "log": log | {"requests": len(requests), "prompt_tokens": sum(request.prompt for request in requests)},
        "settings": {name: getattr(args, name) for name in given},
        "most_reuse": round(most_reuse(requests), 4),
        "rows": compare(requests, args),
    }
    finish("router-cache", document, record=args.record)


if __name__ == "__main__":
    main()
