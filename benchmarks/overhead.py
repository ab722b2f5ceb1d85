"""Compares a server's throughput with that of its engine.

    python benchmarks/overhead.py [--batch 16] [--rounds 5] [--algorithm NONE] [--record LABEL]

Greedy requests at once by an engine in this process and by a server, in turns; the ratio of their tokens a second. The
last line is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from typing import Any

import httpx
from records import DATA, finish, machine
from serving import HERE, chat, messages_of, server

from specjax import Engine, EngineConfig, SamplingParams

POOL = 1024  # tokens of a request in both pools


async def together(base: str, prompts: list[list[dict[str, str]]], tokens: int) -> float:
    """Tokens a second of concurrent requests."""
    async with httpx.AsyncClient(base_url=base, timeout=3600, limits=httpx.Limits(max_connections=None)) as client:
        await client.post("/flush_cache")
        begun = time.perf_counter()
        streams = await asyncio.gather(*(chat(client, messages, tokens) for messages in prompts))
        seconds = time.perf_counter() - begun
    assert not any(stream.error for stream in streams), [stream.error for stream in streams]
    return sum(stream.usage["completion_tokens"] for stream in streams) / seconds


def overhead(base: str, args: Any, rows: list[list[str]]) -> dict[str, Any]:
    prompts = [messages_of(rows[i % len(rows)]) for i in range(args.batch)]
    params = SamplingParams(max_new_tokens=args.max_tokens, temperature=0, ignore_eos=True)
    sizes = {"max_running_requests": args.batch, "max_total_tokens": args.batch * POOL}
    config = EngineConfig(adaptive=True, **sizes)
    engine = Engine.from_pretrained(draft=args.algorithm, config=config, progress=False)
    engine.warm_up(progress=False)
    pairs = []

    def of_engine() -> float:
        engine.flush_cache()
        begun = time.perf_counter()
        completions = engine.generate(prompts, params)
        return sum(done.completion_tokens for done in completions) / (time.perf_counter() - begun)

    def of_server() -> float:
        return asyncio.run(together(base, prompts, args.max_tokens))

    for turn in range(args.rounds + 1):
        rates = {}
        for measure in (of_engine, of_server) if turn % 2 else (of_server, of_engine):
            rates[measure] = round(measure(), 2)
        if turn:  # the first round warms up
            pairs.append((rates[of_engine], rates[of_server]))
            print(f"engine {pairs[-1][0]}, server {pairs[-1][1]} tokens/s", flush=True)
    ratio = statistics.median(ours / bare for bare, ours in pairs)
    return {"batch": args.batch, "tokens_per_second": pairs, "server_over_engine": round(ratio, 4)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16, help="requests at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--algorithm", default="NONE")
    parser.add_argument("--server-flags", default="", help="more flags of the server, in one string")
    parser.add_argument("--record", nargs="?", const="", help="write under benchmarks/results/, with this label")
    args = parser.parse_args()
    lines = (DATA / "mt_bench.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line)["turns"] for line in lines if line.strip()]
    document = machine("httpx", "fastapi", "uvicorn") | {"algorithm": args.algorithm}
    flags = [*args.server_flags.split(), "--max-running-requests", str(args.batch)]
    flags += ["--max-total-tokens", str(args.batch * POOL)]
    with server(HERE, args.algorithm, flags) as (base, _):
        result = overhead(base, args, rows)
    print(result)
    finish("overhead", document | result, record=args.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
