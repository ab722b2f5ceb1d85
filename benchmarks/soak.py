"""Sends thousands of requests to one server, or compares a server's throughput with its engine's.

    python benchmarks/soak.py requests [--requests 2000] [--concurrency 64] [--algorithm AUTO] [--record LABEL]
    python benchmarks/soak.py overhead [--batch 16] [--rounds 5] [--algorithm NONE] [--record LABEL]

`requests`: a closed loop of `--concurrency` streams of several lengths, some greedy and some sampled with a seed. Each
distinct request first runs alone with an empty cache; all texts must equal that text. A greedy text may differ at a
near tie: the two largest log-probabilities differ by less than 1e-3. Also recorded: errors, the server's resident
memory after each quarter of the requests, and whether all pages are free at the end. The exit status is 1 if a request
is lost, a text differs, or pages are held.

`overhead`: greedy requests at once by an engine in this process and by a server, in turns; the ratio of their tokens a
second. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from records import DATA, finish, machine
from serving import HERE, Stream, chat, messages_of, percentiles, server

NEAR = 1e-3
POOL = 1024  # tokens of a request in the two pools of `overhead`


def requests_of(rows: list[list[str]], args: Any) -> list[tuple[list[dict[str, str]], int, dict[str, Any]]]:
    """The distinct requests: messages, tokens, further fields."""
    sampled = {"temperature": 0.8, "top_p": 0.95}
    return [
        (messages_of(rows[i % len(rows)]), 2 + i % (args.max_tokens - 1), {} if kind == 0 else sampled | {"seed": i})
        for i in range(args.prompts)
        for kind in (0, 1)
    ]


def resident(pid: int) -> int:
    """Resident memory of a process, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


async def gap_at_parting(client: httpx.AsyncClient, request: Any, other: str) -> float:
    """Difference of the two largest log-probabilities where the text of a greedy request differs from `other`."""
    messages, tokens, fields = request
    body = {"model": "default", "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= fields | {"logprobs": True, "top_logprobs": 2}
    response = (await client.post("/v1/chat/completions", json=body)).json()
    text = ""
    for entry in response["choices"][0]["logprobs"]["content"]:
        text += entry["token"]
        if not other.startswith(text):
            first, second = (top["logprob"] for top in entry["top_logprobs"])
            return first - second
    return float("inf")


async def soak(base: str, pid: int, args: Any, rows: list[list[str]]) -> dict[str, Any]:
    distinct = requests_of(rows, args)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base, timeout=3600, limits=limits) as client:
        alone = []
        for messages, tokens, fields in distinct:
            alone.append(await chat(client, messages, tokens, **fields))
            assert alone[-1].error is None, alone[-1].error
            await client.post("/flush_cache")
        memory, streams, begun = [resident(pid)], dict[int, Stream](), time.perf_counter()
        quarters = [args.requests * part // 4 for part in (1, 2, 3, 4)]
        left: Iterator[int] = iter(range(args.requests))

        async def client_loop() -> None:
            for i in left:  # shared by all loops
                messages, tokens, fields = distinct[i % len(distinct)]
                streams[i] = await chat(client, messages, tokens, **fields)
                if len(streams) in quarters:
                    memory.append(resident(pid))
                    print(f"{len(streams)} requests: {memory[-1] / 1e6:.0f} MB resident", flush=True)

        await asyncio.gather(*(client_loop() for _ in range(args.concurrency)))
        seconds = time.perf_counter() - begun
        good = {i: stream for i, stream in streams.items() if stream.error is None}
        differ = [i for i, stream in sorted(good.items()) if stream.text != alone[i % len(distinct)].text]
        greedy = [i for i in differ if not distinct[i % len(distinct)][2]]
        gaps = [await gap_at_parting(client, distinct[i % len(distinct)], streams[i].text) for i in greedy]
        free = (await client.post("/flush_cache")).status_code == 200  # refused while a request holds a page
    tokens = sum(stream.usage["completion_tokens"] for stream in good.values())
    return {
        "distinct": len(distinct),
        "requests": args.requests,
        "finished": len(good),
        "errors": sorted({stream.error for stream in streams.values() if stream.error}),
        "seconds": round(seconds, 1),
        "output_tokens_per_second": round(tokens / seconds, 2),
        "ttft": percentiles([stream.ttft for stream in good.values()]),
        "e2e": percentiles([stream.done - stream.sent for stream in good.values()]),
        "different_texts": {"greedy": len(gaps), "drawn": len(differ) - len(greedy), "gaps": gaps},
        "resident_megabytes": [round(size / 1e6, 1) for size in memory],
        "grown_after_first_quarter": round(memory[-1] / memory[1] - 1, 4),
        "idle_afterwards": free,
    }


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
    from specjax import Engine, EngineConfig, SamplingParams  # `requests` loads no second model

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
    parser.add_argument("mode", choices=("requests", "overhead"))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=50, help="each once greedy and once with a seed")
    parser.add_argument("--batch", type=int, default=16, help="requests at once, of `overhead`")
    parser.add_argument("--rounds", type=int, default=5, help="of `overhead`")
    parser.add_argument("--max-tokens", type=int, default=None, help="at most; 10, for `overhead` 64")
    parser.add_argument("--algorithm", default="NONE")
    parser.add_argument("--server-flags", default="", help="more flags of the server, in one string")
    parser.add_argument("--record", nargs="?", const="", help="write under benchmarks/results/, with this label")
    args = parser.parse_args()
    args.max_tokens = max(2, args.max_tokens or (10 if args.mode == "requests" else 64))
    lines = (DATA / "mt_bench.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line)["turns"] for line in lines if line.strip()]
    document = machine("httpx", "fastapi", "uvicorn") | {"mode": args.mode, "algorithm": args.algorithm}
    flags, many = args.server_flags.split(), args.mode == "requests"
    if not many:
        flags += ["--max-running-requests", str(args.batch), "--max-total-tokens", str(args.batch * POOL)]
    with server(HERE, args.algorithm, flags) as (base, pid):
        result = asyncio.run(soak(base, pid, args, rows)) if many else overhead(base, args, rows)
    print(result)
    finish("soak", document | result, record=args.record)
    if args.mode == "overhead":
        return 0
    differ = result["different_texts"]
    wrong = differ["drawn"] or any(gap >= NEAR for gap in differ["gaps"])
    return int(result["finished"] < args.requests or bool(wrong) or not result["idle_afterwards"])


if __name__ == "__main__":
    sys.exit(main())
