"""Measures latency and throughput of streams of a server under load, from the client's side.

    python benchmarks/serving.py turns [--conversations 8]
    python benchmarks/serving.py beside [--prompt-tokens 5500]
    python benchmarks/serving.py burst [--requests 64]

`turns`: conversations of several turns, each with all earlier messages, `--concurrency` at once; also the number of
tokens that a perfect cache would compute. `beside`: a long prompt arrives while a stream runs, then a short request;
for comparison the stream and the short request alone. `burst`: all requests at once.

`--algorithms` compares several in one run, `--before FOLDER` a checkout of another commit; their servers take turns,
`--rounds` times, each with an empty cache. Times in seconds: to the first token (ttft), between two events of a stream
(gap), of a whole request (e2e), as p50, p90 and p99; output tokens a second of the whole run; accept length; the share
of prompt tokens from the cache; errors. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from records import DATA, finish, machine

HERE = Path(__file__).resolve().parents[1]
URL = re.compile(rb"Listening on (http://\S+);")
START = 600  # seconds for a server to start and compile all programs


@dataclass
class Stream:
    """One request, from its client's side."""

    sent: float
    events: list[float] = field(default_factory=list)  # arrival times of text
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    speculation: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    done: float = 0.0

    @property
    def ttft(self) -> float:
        return self.events[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.events, self.events[1:], strict=False)]


@contextmanager
def server(
    tree: Path, algorithm: str, flags: list[str], *, program: Sequence[str] = ("-m", "specjax.serve"),
    compiled: bool = True,
) -> Iterator[tuple[str, int]]:  # fmt: skip
    """Address and process id of a ready server of a source tree.

    Args:
        program: arguments of Python before the server's flags.
        compiled: wait until all programs are compiled.
    """
    environment = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{tree / 'kernels'}"}
    command = [sys.executable, *program, "--port", "0", "--speculative-algorithm", algorithm, *flags]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stderr=log, env=environment, cwd=tree)
        try:
            deadline, base = time.monotonic() + START, None
            while time.monotonic() < deadline:
                assert process.poll() is None, os.pread(log.fileno(), 1 << 20, 0).decode()[-2000:]
                if base is None:
                    address = URL.search(os.pread(log.fileno(), 1 << 20, 0))
                    base = address and address[1].decode()
                else:
                    try:
                        compiling = httpx.get(f"{base}/get_model_info", timeout=5).json().get("compiling")
                        if compiling is not None and not (compiled and compiling):
                            break
                    except (httpx.TransportError, ValueError):
                        pass
                time.sleep(0.1)
            assert base is not None and time.monotonic() < deadline, "the server was not ready in time"
            yield base, process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


async def chat(client: httpx.AsyncClient, messages: list[dict[str, str]], tokens: int, **fields: Any) -> Stream:
    """One streamed chat of exactly `tokens` tokens, greedy unless `fields` replace fields of the body."""
    body = {
        "model": "default", "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, "return_speculative_metrics": True,
    } | fields  # fmt: skip
    stream = Stream(time.perf_counter())
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code}: {(await response.aread())[:300]!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                stream.usage = event.get("usage") or stream.usage
                stream.speculation = event.get("speculative") or stream.speculation
                if event["choices"] and (text := event["choices"][0]["delta"].get("content")):
                    stream.events.append(time.perf_counter())
                    stream.text += text
        if not stream.events:
            raise RuntimeError("no text arrived")
    except (httpx.HTTPError, RuntimeError) as error:
        stream.error = str(error) or type(error).__name__
    stream.done = time.perf_counter()
    return stream


def messages_of(turns: list[str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": turns[0]}]


async def turns(client: httpx.AsyncClient, args: Any, rows: list[list[str]]) -> list[Stream]:
    """Conversations, `--concurrency` at once."""
    free = asyncio.Semaphore(args.concurrency)

    async def converse(questions: list[str]) -> list[Stream]:
        messages, streams = [], []
        async with free:
            for question in questions:
                messages.append({"role": "user", "content": question})
                streams.append(await chat(client, messages, args.max_tokens))
                messages.append({"role": "assistant", "content": streams[-1].text})
        return streams

    several = [row for row in rows if len(row) > 1][: args.conversations]
    return [stream for streams in await asyncio.gather(*map(converse, several)) for stream in streams]


async def burst(client: httpx.AsyncClient, args: Any, rows: list[list[str]]) -> list[Stream]:
    """`--requests` prompts at the same moment."""
    prompts = [messages_of(rows[i % len(rows)]) for i in range(args.requests)]
    return list(await asyncio.gather(*(chat(client, prompt, args.max_tokens) for prompt in prompts)))


async def beside(client: httpx.AsyncClient, args: Any, rows: list[list[str]]) -> dict[str, Any]:
    """Effect of a long prompt on a stream and a short request."""
    words = " ".join(text for row in rows for text in row).split()
    long = [{"role": "user", "content": " ".join((words * 9)[: int(args.prompt_tokens / 1.35)])}]
    short, other = messages_of(["What is the capital of Portugal?"]), messages_of(["Tell me about the sea."])
    alone = await chat(client, short, 16)
    quiet = await chat(client, other, args.max_tokens)
    await client.post("/flush_cache")
    running = asyncio.create_task(chat(client, other, 4 * args.max_tokens))
    await asyncio.sleep(1.0)
    pending = asyncio.create_task(chat(client, long, 8))
    await asyncio.sleep(0.5)
    behind = await chat(client, short, 16)
    crowded, long_done = await running, await pending
    for stream in (alone, quiet, behind, crowded, long_done):
        assert stream.error is None, stream.error
    first = long_done.events[0]
    during = [gap for gap, at in zip(crowded.gaps, crowded.events[1:], strict=True) if long_done.sent < at <= first]
    return {
        "long_prompt_tokens": long_done.usage["prompt_tokens"],
        "short_ttft": {"alone": alone.ttft, "behind": behind.ttft, "ratio": behind.ttft / alone.ttft},
        "stream_gap_p99": {
            "alone": float(np.percentile(quiet.gaps, 99)),
            "beside": float(np.percentile(during or crowded.gaps, 99)),
        },
        "stream_gap_p50": {"alone": float(np.median(quiet.gaps)), "beside": float(np.median(during or crowded.gaps))},
        "long_ttft": long_done.ttft,
    }


def percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{p}": round(float(np.percentile(values, p)), 4) for p in (50, 90, 99)} if values else {}


def summary(streams: list[Stream], seconds: float) -> dict[str, Any]:
    good = [stream for stream in streams if stream.error is None]
    prompt = sum(stream.usage["prompt_tokens"] for stream in good)
    cached = sum(stream.usage["prompt_tokens_details"]["cached_tokens"] for stream in good)
    generated = sum(stream.usage["completion_tokens"] for stream in good)
    steps = sum(stream.speculation.get("spec_verify_ct", 0) for stream in good)
    return {
        "requests": len(streams),
        "errors": sorted({stream.error for stream in streams if stream.error}),
        "seconds": round(seconds, 2),
        "output_tokens_per_second": round(generated / seconds, 2),
        "ttft": percentiles([stream.ttft for stream in good]),
        "gap": percentiles([gap for stream in good for gap in stream.gaps]),
        "e2e": percentiles([stream.done - stream.sent for stream in good]),
        "accept_length": round((generated - len(good)) / steps, 3) if steps else None,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "texts": [stream.text for stream in streams],
    }


def perfect(streams: list[Stream]) -> int:
    """Prompt tokens that a perfect cache computes: in each turn those after the previous turn and its answer."""
    total, cached = 0, 0
    for stream in streams:
        prompt = stream.usage["prompt_tokens"]
        total += prompt - cached if prompt > cached else prompt
        cached = prompt + stream.usage["completion_tokens"]
    return total


async def run(base: str, args: Any, rows: list[list[str]]) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base, timeout=3600, limits=limits) as client:
        await chat(client, messages_of(["Hello"]), 4)
        await client.post("/flush_cache")
        if args.mode == "beside":
            return await beside(client, args, rows)
        before = time.perf_counter()
        streams = await {"turns": turns, "burst": burst}[args.mode](client, args, rows)
        result = summary(streams, time.perf_counter() - before)
        if args.mode == "turns" and not result["errors"]:
            computed = result["prompt_tokens"] - result["cached_tokens"]
            result |= {"computed_tokens": computed, "perfect_tokens": perfect(streams)}
        return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("turns", "beside", "burst"))
    parser.add_argument("--sets", nargs="+", default=["mt_bench"], help="sets of prompts")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=5500, help="approximate tokens of the long prompt")
    parser.add_argument("--algorithms", nargs="+", default=["AUTO"])
    parser.add_argument("--before", type=Path, help="a checkout of another commit, compared in the same run")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--server-flags", default="", help="more flags of the servers, in one string")
    parser.add_argument("--record", nargs="?", const="", help="write under benchmarks/results/, with this label")
    args = parser.parse_args()
    rows = []
    for name in args.sets:
        lines = (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        rows += [json.loads(line)["turns"] for line in lines if line.strip()]
    trees = {"now": HERE} | ({"before": args.before.resolve()} if args.before else {})
    contenders = [(name, algorithm) for algorithm in args.algorithms for name in trees]
    document = machine("httpx", "fastapi", "uvicorn") | {"mode": args.mode, "runs": []}
    for turn in range(args.rounds):
        for name, algorithm in contenders[turn % len(contenders) :] + contenders[: turn % len(contenders)]:
            with server(trees[name], algorithm, args.server_flags.split()) as (base, _):
                result = asyncio.run(run(base, args, rows))
            document["runs"].append({"tree": name, "algorithm": algorithm, "round": turn, **result})
            shown = {key: value for key, value in result.items() if key != "texts"}
            print(f"{name} {algorithm}: {json.dumps(shown)}", flush=True)
    if args.mode != "beside":
        texts = [tuple(result.pop("texts")) for result in document["runs"]]
        document["different_texts"] = [sum(a != b for a, b in zip(texts[0], other, strict=True)) for other in texts[1:]]
        print("texts that differ from the first run's:", document["different_texts"])
    finish("serving", document, record=args.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
