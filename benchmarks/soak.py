"""Sends many mixed requests to servers of several algorithms, and checks that nothing is lost.

    python benchmarks/soak.py [--requests 100000] [--algorithms NONE NGRAM ...] [--record LABEL]
    python benchmarks/soak.py --model smollm2-135m-instruct --requests 5000 --algorithms AUTO [--record LABEL]

Each algorithm has its own server and an equal share of the requests (`mixed_requests.py`), `--concurrency` at once.
Some are aborted, some are left by their client, some are wrong, and every `--fail-every` requests a step of the engine
raises. Without --model the target is a random model with an MTP layer and small drafts, and the pool is too small for
the running requests, which forces retractions. With --model the requests start while programs compile. Checks:

    ended    each request has an answer, an error of the expected kind, or was left; no 5xx but of steps that raised
    texts    `--sample` requests have the text that NONE gives to each of them alone
    state    pages, slots, sequences and places in the queue: at the end as at the start
    memory   resident memory grows by less than 1 MB in 10,000 requests (least squares), after 5% of the requests and
             the end of compilation. Neither garbage collection nor malloc_trim is forced before the end
    forced   steps raised, and requests were retracted (without --model)

The exit status is 1 if a check fails. A check is null if the requests were too few for it. The last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from mixed_requests import GENERATE, WRONG, Reply, Request, ask, make_request
from records import DATA, finish, machine
from serving import HERE, server

SECONDS = 1800.0  # time limit of an answer; only a lost request takes as long
MAX_SLOPE = 1.0  # megabytes in 10,000 requests
MIN_REQUESTS = {"memory": 3_000, "forced": 1_000}  # of a server, from which a check is made
MODES = {"answer": 70, "abort": 8, "leave": 16, "wrong": 6}
PROGRAM = HERE / "tests" / "helpers" / "soak_program.py"
FAST_COMPILATION = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
SMALL = [
    "--context-length", "640", "--max-running-requests", "8", "--max-total-tokens", "640",
    "--chunked-prefill-size", "64", "--speculative-ngram-capacity", "65536",
]  # fmt: skip
TREE = ["--speculative-num-steps", "2", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "5"]
ALGORITHMS: dict[str, tuple[str | None, list[str]]] = {
    "NONE": (None, []),
    "NGRAM": (None, []),
    "AUTO": (None, []),  # n-grams and the MTP layer
    "EAGLE3": ("eagle3", TREE),
    "MTP": (None, TREE),
    "STANDALONE": ("model", TREE),
    "DFLASH": ("block", ["--speculative-num-draft-tokens", "4"]),
}
"""Draft and flags of the servers of the random model."""


def resident(pid: int) -> float:
    """Resident memory of a process in megabytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmRSS"))


def growth(samples: list[tuple[int, float]]) -> float:
    """Least-squares slope of (requests, megabytes), in megabytes for 10,000 requests."""
    requests, sizes = np.array(samples).reshape(-1, 2).T
    return float(np.polyfit(requests, sizes, 1)[0]) * 10_000 if len(samples) > 2 else 0.0


def sample_request(place: int, corpus: str) -> Request:
    return make_request(random.Random(f"sample {place}"), corpus)


@dataclass
class Soak:
    """`count` requests to one server. `expected`: texts of the sample, whose requests are spread over all."""

    client: httpx.AsyncClient
    pid: int
    corpus: str
    count: int
    expected: list[str]
    concurrency: int = 24
    fail_every: int = 0
    retracts: bool = True  # the pool is too small for the requests
    done: int = 0
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    different: list[dict[str, Any]] = field(default_factory=list)
    memory: list[tuple[int, float, int]] = field(default_factory=list)  # requests, megabytes, programs that compile

    async def run(self) -> dict[str, Any]:
        before, begun = await self.state(collect=True), time.perf_counter()
        left = iter(range(self.count))

        async def loop() -> None:
            for number in left:  # shared by all loops
                await self.one(number)

        await asyncio.gather(*(loop() for _ in range(self.concurrency)))
        seconds = time.perf_counter() - begun
        while (await self.state())["places"]:  # of requests that were left
            await asyncio.sleep(0.1)
        at_end = resident(self.pid)
        after, info = await self.state(collect=True), (await self.client.get("/get_server_info")).json()
        steady = max([self.count // 20, *(done for done, _, compiling in self.memory if compiling)])
        slope = growth([(done, size) for done, size, _ in self.memory if done > steady])
        failed, retracted = self.total("failed step"), info["internal_states"][0]["retractions"]
        checks = {
            "ended": not self.problems and self.done == self.count,
            "texts": not self.different and self.total(mode="sample") >= len(self.expected),
            "state": before == after and after["problem"] is None,
            "memory": slope < MAX_SLOPE,
            "forced": (retracted > 0 or not self.retracts) and (failed > 0 or not self.fail_every),
        }
        modes = dict.fromkeys(mode for mode, _ in sorted(self.ends))
        return {
            "requests": self.done,
            "seconds": round(seconds, 1),
            "ends": {mode: {end: n for (m, end), n in self.ends.most_common() if m == mode} for mode in modes},
            "problems": self.problems[:20],
            "different": self.different[:20],
            "state": {"before": before, "after": after},
            "failed_steps_ended": failed,
            "retractions": retracted,
            "accept_length": info["internal_states"][0]["avg_spec_accept_length"],
            "steady_from": steady,
            "megabytes_in_10000_requests": round(slope, 3),
            "resident_megabytes": [(done, round(size, 2)) for done, size, _ in self.memory],
            "resident_at_end": round(at_end, 1),
            "resident_after_gc_and_trim": round(resident(self.pid), 1),
            "checks": {
                name: passed if self.count - steady >= MIN_REQUESTS.get(name, 0) else None
                for name, passed in checks.items()
            },
        }

    async def state(self, *, collect: bool = False) -> dict[str, Any]:
        response = await self.client.post("/soak/state", params={"collect": collect})
        return response.raise_for_status().json()

    def total(self, end: str | None = None, mode: str | None = None) -> int:
        return sum(n for (m, e), n in self.ends.items() if end in (None, e) and mode in (None, m))

    async def one(self, number: int) -> None:
        if self.fail_every and number % self.fail_every == self.fail_every - 1:
            (await self.client.post("/soak/fail")).raise_for_status()
        place, other = divmod(number, self.count // max(1, len(self.expected)))
        if not other and place < len(self.expected):
            await self.compare(place)
        else:
            rng = random.Random(f"request {number}")
            (mode,) = rng.choices([*MODES], [*MODES.values()])
            self.note(mode, await getattr(self, mode)(rng, number))
        self.done += 1
        if self.done % max(1, self.count // 200) == 0:
            info = (await self.client.get("/get_model_info")).json()
            self.memory.append((self.done, resident(self.pid), info["compiling"]))

    def note(self, mode: str, reply: Reply) -> None:
        self.ends[mode, "failed step" if reply.failed_step else reply.end] += 1
        refused, wrong = reply.end == "400", mode == "wrong"
        if refused != wrong or (reply.problem and not refused and not reply.failed_step):
            self.problems.append(f"{mode}: {reply}")

    async def compare(self, place: int) -> None:
        request = sample_request(place, self.corpus)
        while (reply := await ask(self.client, request)).failed_step:
            self.note("sample", reply)
        self.note("sample", reply)
        if reply.text != self.expected[place]:
            self.different.append({"request": request, "text": reply.text, "expected": self.expected[place]})

    async def answer(self, rng: random.Random, number: int) -> Reply:
        return await ask(self.client, make_request(rng, self.corpus))

    async def abort(self, rng: random.Random, number: int) -> Reply:
        name = f"request-{number}"
        pending = asyncio.create_task(
            ask(self.client, make_request(rng, self.corpus, paths=(GENERATE,), rid=name)),
        )
        await asyncio.sleep(rng.random() * 0.2)
        (await self.client.post("/abort_request", json={"rid": name})).raise_for_status()
        return await pending

    async def leave(self, rng: random.Random, number: int) -> Reply:
        request = make_request(rng, self.corpus)
        if request.body["stream"] and rng.random() < 0.5:
            return await ask(self.client, request, events=rng.randint(1, 9))
        try:
            async with asyncio.timeout(rng.random() * 0.2):
                return await ask(self.client, request)
        except TimeoutError:
            return Reply("left")

    async def wrong(self, rng: random.Random, number: int) -> Reply:
        return await ask(self.client, make_request(rng, self.corpus, paths=(GENERATE,), **rng.choice(WRONG)))


def connect(base: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=base, timeout=SECONDS, limits=httpx.Limits(max_connections=None))


async def texts_alone(base: str, count: int, corpus: str) -> list[str]:
    """The texts of the sample, each request sent alone."""
    async with connect(base) as client:
        replies = [await ask(client, sample_request(place, corpus)) for place in range(count)]
    assert not any(reply.problem for reply in replies), [reply for reply in replies if reply.problem][:3]
    return [reply.text for reply in replies]


async def soak(base: str, *arguments: Any, **options: Any) -> dict[str, Any]:
    async with connect(base) as client:
        return await Soak(client, *arguments, **options).run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000, help="of all servers")
    parser.add_argument("--algorithms", nargs="+", default=[*ALGORITHMS], choices=ALGORITHMS)
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--sample", type=int, default=1000, help="requests of each server whose text is compared")
    parser.add_argument("--fail-every", type=int, default=500, help="requests between steps that raise; 0 = none do")
    parser.add_argument("--model", help="default: a small random one")
    parser.add_argument("--record", nargs="?", const="", help="write under benchmarks/results/, with this label")
    args = parser.parse_args()
    rows = map(json.loads, (DATA / "mt_bench.jsonl").read_text(encoding="utf-8").splitlines())
    corpus = "\n".join(turn for row in rows for turn in row["turns"])
    count = args.requests // len(args.algorithms)
    sample = min(args.sample, count // 2)
    document = machine("httpx", "fastapi", "uvicorn") | {"model": args.model or "random", "servers": {}}
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            from soak_program import save_models

            save_models(Path(folder))
            os.environ.setdefault("XLA_FLAGS", FAST_COMPILATION)

        def serve(algorithm: str) -> Any:
            draft, flags = ALGORITHMS[algorithm] if args.model is None else (None, [])
            flags = [*flags, *(SMALL if args.model is None else [])]
            flags += ["--speculative-draft-model-path", f"{folder}/{draft}"] if draft else []
            command = ["--model", args.model or folder, *flags]
            return server(HERE, algorithm, command, program=[str(PROGRAM)], compiled=args.model is None)

        with serve("NONE") as (base, _):
            expected = asyncio.run(texts_alone(base, sample, corpus))
        for algorithm in args.algorithms:
            with serve(algorithm) as (base, pid):
                options = {"concurrency": args.concurrency, "fail_every": args.fail_every}
                options |= {"retracts": args.model is None}
                result = asyncio.run(soak(base, pid, corpus, count, expected, **options))
            document["servers"][algorithm] = result
            print(f"{algorithm}: {json.dumps(result | {'resident_megabytes': '...'})}", flush=True)
    finish("soak", document, record=args.record)
    return int(any(False in result["checks"].values() for result in document["servers"].values()))


if __name__ == "__main__":
    sys.exit(main())
