"""The server as its users meet it: starts, streams, and many clients at once, on the built-in model.

    python benchmarks/serve.py [--cold] [--record]

Starts: seconds from `python -m specjax.serve` to ready, and to the first token of a request sent then. With --cold the
first start has an empty cache folder: it downloads, converts and compiles. Streams: tokens/s of one streamed request
against `python -m specjax.generate` on the same request, taking turns. Clients: 16 streams at once, each text against
the one the same request gets alone; where they part, the gap between the two likeliest tokens there. At the end every
page must be free again. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
from records import DATA, finish, machine

from specjax import checkpoint

MODEL = checkpoint.BUILT_IN_MODEL
NEAR = 1e-3
"""A gap between the two likeliest tokens (of log-probabilities) below which either may come first."""

URL = re.compile(rb"Listening on (http://\S+);")


@contextmanager
def server(cache: Path | None, *flags: str) -> Iterator[tuple[str, float]]:
    """The address of a server that is ready, and the seconds it took. Its log goes to stderr's file."""
    environment = os.environ | ({} if cache is None else {"SPECJAX_CACHE": str(cache)})
    started = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "specjax.serve", "--port", "0", *flags]
        process = subprocess.Popen(command, stderr=log, env=environment)
        try:
            base = wait_ready(process, log)
            yield base, time.perf_counter() - started
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait(60)
            assert status == 0, status


def wait_ready(process: subprocess.Popen, log: Any) -> str:
    base = None
    while True:
        assert process.poll() is None, "the server ended"
        if base is None:
            found = URL.search(os.pread(log.fileno(), 1 << 16, 0))
            base = found and found[1].decode()
        else:
            try:
                if httpx.get(f"{base}/health", timeout=5).status_code == 200:
                    return base
            except httpx.TransportError:
                pass
        time.sleep(0.05)


def stream(client: openai.OpenAI, messages: list[dict[str, str]], tokens: int) -> dict[str, Any]:
    """One streamed chat, greedy: its text, tokens, seconds to the first token and to the end."""
    started, first, text, usage = time.perf_counter(), None, "", None
    chunks: Any = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=tokens, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    for chunk in chunks:
        usage = chunk.usage or usage
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter() - started
            text += chunk.choices[0].delta.content
    seconds = time.perf_counter() - started
    count = usage.completion_tokens
    return {"text": text, "tokens": count, "first": first, "seconds": seconds, "tokens_per_second": count / seconds}


def generate(messages: list[dict[str, str]], tokens: int, folder: Path, algorithm: str) -> float:
    """Tokens/s that `python -m specjax.generate` tells of this request."""
    source = folder / "in.jsonl"
    source.write_text(json.dumps({"messages": messages}) + "\n")
    command = [sys.executable, "-m", "specjax.generate", "--input", source, "--output", folder / "out.jsonl"]
    command += ["--max-new-tokens", str(tokens), "--no-progress", "--speculative-algorithm", algorithm]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["tokens_per_second"]


async def at_once(base: str, prompts: list[list[dict[str, str]]], tokens: int) -> list[dict[str, Any]]:
    async def one(client: openai.AsyncOpenAI, messages: Any) -> dict[str, Any]:
        text, reason = "", None
        chunks = await client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=tokens, temperature=0, stream=True
        )
        async for chunk in chunks:
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
        return {"text": text, "reason": reason}

    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", timeout=600) as client:
        return await asyncio.gather(*(one(client, messages) for messages in prompts))


def gap_at_parting(client: openai.OpenAI, messages: Any, tokens: int, other: str) -> float:
    """Between the two likeliest tokens where the text alone parts from `other`."""
    done: Any = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=tokens, temperature=0, logprobs=True, top_logprobs=2
    )
    text = ""
    for entry in done.choices[0].logprobs.content:
        text += entry.token
        if not other.startswith(text):
            best = [top.logprob for top in entry.top_logprobs]
            return best[0] - best[1]
    return float("inf")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=DATA / "mt_bench.jsonl")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5, help="of server against generate")
    parser.add_argument("--cold", action="store_true", help="also a first start with an empty cache folder")
    parser.add_argument("--record", action="store_true", help="write under benchmarks/results/")
    args = parser.parse_args()
    document = machine("openai", "fastapi", "uvicorn") | {"model": MODEL, "starts": []}
    rows = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    prompts = [[{"role": "user", "content": row["turns"][0]}] for row in rows[: args.clients]]

    def start(kind: str, cache: Path | None) -> None:
        with server(cache) as (base, ready), openai.OpenAI(base_url=f"{base}/v1", api_key="none") as client:
            first = ready + stream(client, prompts[0], 8)["first"]
        document["starts"].append({"kind": kind, "ready": round(ready, 2), "first_token": round(first, 2)})
        print(f"{kind} start: ready after {ready:.1f} s, first token after {first:.1f} s", flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if args.cold:
            start("cold", folder / "cache")
        start("warm", folder / "cache" if args.cold else None)
        start("warm", folder / "cache" if args.cold else None)

        document["streams"] = []
        for algorithm in ("NONE", "NGRAM"):
            with (
                server(None, "--speculative-algorithm", algorithm) as (base, _),
                openai.OpenAI(base_url=f"{base}/v1", api_key="none", timeout=600) as client,
            ):
                wait_quiet(base)
                stream(client, prompts[0], 16)
                pairs = []
                for i in range(args.rounds):
                    httpx.post(f"{base}/flush_cache")  # generate starts with an empty memory, too
                    ours = stream(client, prompts[i % len(prompts)], args.max_tokens)["tokens_per_second"]
                    theirs = generate(prompts[i % len(prompts)], args.max_tokens, folder, algorithm)
                    pairs.append((round(ours, 2), round(theirs, 2)))
                ratio = statistics.median(ours / theirs for ours, theirs in pairs)
                document["streams"].append({"algorithm": algorithm, "ratio": round(ratio, 4), "samples": pairs})
                print(f"{algorithm}: streamed / generate, tokens/s: {pairs}; median ratio {ratio:.3f}", flush=True)

    with server(None) as (base, _), openai.OpenAI(base_url=f"{base}/v1", api_key="none", timeout=600) as client:
        wait_quiet(base)
        alone = [stream(client, messages, args.max_tokens) for messages in prompts]
        started = time.perf_counter()
        together = asyncio.run(at_once(base, prompts, args.max_tokens))
        seconds = time.perf_counter() - started
        gaps = [
            gap_at_parting(client, messages, args.max_tokens, many["text"])
            for messages, one, many in zip(prompts, alone, together, strict=True)
            if one["text"] != many["text"]
        ]
        flushed = httpx.post(f"{base}/flush_cache").status_code == 200  # refused while a page is held
        tokens = sum(one["tokens"] for one in alone)
        clients = {"clients": len(prompts), "finished": sum(many["reason"] is not None for many in together)}
        clients |= {"equal": len(prompts) - len(gaps), "gaps": gaps, "idle_afterwards": flushed}
        clients |= {"seconds_together": round(seconds, 2), "seconds_alone": round(sum(o["seconds"] for o in alone), 2)}
        clients |= {"tokens_per_second_together": round(tokens / seconds, 2)}
    document["clients"] = clients
    print(clients)
    finish("serve", document, record=args.record)
    return 0 if clients["finished"] == len(prompts) and flushed and all(gap < NEAR for gap in gaps) else 1


def wait_quiet(base: str) -> None:
    """Until nothing compiles behind."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        info = httpx.get(f"{base}/get_model_info").json()
        if not info["compiling"]:
            return
        time.sleep(0.2)
    raise TimeoutError("still compiling")


if __name__ == "__main__":
    sys.exit(main())
