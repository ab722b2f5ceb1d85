"""Random clients: answers equal those of each request alone, and all pages return.

Clients send requests of a list, whole or streamed. They leave and abort some, and send some wrong ones. Half of the
clients belong to another tenant (`cache_salt`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from typing import Any

import httpx
import pytest
from draft_helpers import drafting
from engine_helpers import make_engine, toy
from server_helpers import SECONDS, Running, running

from specjax.engine import Engine

START = [*range(5, 18)]  # fills some pages
BODIES: list[dict[str, Any]] = [
    {"input_ids": [*START, 20], "sampling_params": {"max_new_tokens": 40, "temperature": 0}},
    {"input_ids": [*START, 21, 9], "sampling_params": {"max_new_tokens": 24, "seed": 7}},
    {"input_ids": [8, 3], "sampling_params": {"max_new_tokens": 60, "temperature": 0.7, "top_p": 0.9, "seed": 1}},
    {"input_ids": START, "sampling_params": {"max_new_tokens": 12, "temperature": 0, "frequency_penalty": 0.5}},
    {"input_ids": [4], "sampling_params": {"max_new_tokens": 30, "seed": 5, "stop": ["e"]}, "return_logprob": True},
    {"input_ids": [[*START, 3], [6]], "sampling_params": {"max_new_tokens": 9, "seed": 3}},
]
WRONG: list[dict[str, Any]] = [
    {"text": "", "sampling_params": {}},
    {"text": "a", "sampling_params": {"temperature": -1}},
    {"input_ids": [5] * 4096, "sampling_params": {}},
]
CLIENTS = 12

ENGINES = {
    "NGRAM": lambda: make_engine(toy(), "NGRAM", warm=False, adaptive=True, retract_every=5, max_total_tokens=256),
    "EAGLE3": lambda: make_engine(
        *drafting("eagle3")[:2], draft=drafting("eagle3").params, warm=False, adaptive=True, max_total_tokens=384
    ),
}


def outputs(answer: Any) -> list[tuple[str, list[int], Any]]:
    """The fields that must not depend on other requests."""
    answers = answer if isinstance(answer, list) else [answer]
    return [(one["text"], one["output_ids"], one["meta_info"]["finish_reason"]) for one in answers]


class Client:
    def __init__(self, base: str, number: int, expected: list[Any], until: float) -> None:
        self.rng, self.expected, self.until = random.Random(number), expected, until
        self.tenant, self.number = f"tenant {number % 2}", number
        self.client = httpx.AsyncClient(base_url=base, timeout=SECONDS)
        self.done: Counter[str] = Counter()

    async def run(self) -> None:
        async with self.client:
            for turn in itertools.count():
                if time.monotonic() > self.until and self.done["whole"] and self.done["stream"]:
                    return
                kind = self.rng.choice(["whole", "whole", "stream", "stream", "leave", "abort", "wrong"])
                index = self.rng.randrange(len(BODIES))
                body = BODIES[index] | {"cache_salt": self.tenant}
                await getattr(self, kind)(body, index, f"{self.number}-{turn}")
                self.done[kind] += 1

    async def whole(self, body: Any, index: int, rid: str) -> None:
        response = await self.client.post("/generate", json=body)
        assert response.status_code == 200, response.text
        assert outputs(response.json()) == self.expected[index]

    async def stream(self, body: Any, index: int, rid: str, leave: int = 1 << 20) -> None:
        last: dict[int, Any] = {}
        async with self.client.stream("POST", "/generate", json=body | {"stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            count = 0
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    last[event.get("index", 0)] = event
                    if (count := count + 1) >= leave:
                        return
        assert outputs([last[place] for place in sorted(last)]) == self.expected[index]

    async def leave(self, body: Any, index: int, rid: str) -> None:
        if self.rng.random() < 0.5:
            await self.stream(body, index, rid, leave=self.rng.randint(1, 6))
            return
        pending = asyncio.create_task(self.client.post("/generate", json=body))
        await asyncio.sleep(self.rng.random() * 0.05)
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)

    async def abort(self, body: Any, index: int, rid: str) -> None:
        if isinstance(body["input_ids"][0], list):
            return
        pending = asyncio.create_task(self.client.post("/generate", json=body | {"rid": rid}))
        await asyncio.sleep(self.rng.random() * 0.05)
        response = await self.client.post("/abort_request", json={"rid": rid})
        assert response.status_code == 200, response.text
        response = await pending
        assert response.status_code == 200, response.text
        (answer,) = outputs(response.json())
        if answer[2]["type"] == "abort":
            assert self.expected[index][0][1][: len(answer[1])] == answer[1]
        else:  # it ended before the abort
            assert [answer] == self.expected[index]

    async def wrong(self, body: Any, index: int, rid: str) -> None:
        response = await self.client.post("/generate", json=self.rng.choice(WRONG))
        assert response.status_code == 400 and response.json()["error"]["message"], response.text


async def crowd(served: Running, expected: list[Any], seconds: float) -> Counter[str]:
    until = time.monotonic() + seconds
    clients = [Client(served.base, number, expected, until) for number in range(CLIENTS)]
    await asyncio.gather(*(client.run() for client in clients))
    return sum((client.done for client in clients), Counter())


def soak(engine: Engine, seconds: float) -> None:
    with running(engine) as served:
        alone = [served.post("/generate", body).json() for body in BODIES]
        served.wait_idle()
        served.post("/flush_cache", {})
        done = asyncio.run(crowd(served, [outputs(answer) for answer in alone], seconds))
        print(dict(done))
        assert done["whole"] >= CLIENTS and done["stream"] >= CLIENTS
        served.wait_idle()  # counts every page
        assert served.post("/flush_cache", {}).status_code == 200
        assert len(engine.scheduler.free_pages) == engine.pool.pages, "pages were lost"
        with served.client() as client:
            state = client.get("/get_server_info").json()
        assert not state["internal_states"][0].get("num_running_reqs", 0)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [("EAGLE3", 3.0), *(pytest.param(kind, 120.0, marks=pytest.mark.slow) for kind in ENGINES)],
)
def test_random_clients(kind, seconds):
    soak(ENGINES[kind](), seconds)
