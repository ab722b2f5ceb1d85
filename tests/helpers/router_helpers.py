"""Two workers behind a router, as processes, and requests of clients through the router."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from generate_helpers import saved_model
from server_helpers import free_port
from train_helpers import environment

HERE = Path(__file__).resolve().parents[2]
SECONDS = 600.0  # time limit of every wait; even on a busy machine only a hang takes so long
REQUESTS = int(os.environ.get("SPECJAX_ROUTER_REQUESTS", "120"))
"""Number of requests during which a worker is killed; `make routers` sends 500."""
TOKENS, AT_ONCE = 24, 12  # tokens of each request, and number of concurrent requests
STOPPED = 0.5  # seconds from stopping the worker until it is killed


def router_python(name: str) -> Path | None:
    """The Python of a router's environment (`make routers`); None if it is not installed. $SPECJAX_ROUTERS is the
    folder of environments, default .routers."""
    python = Path(os.environ.get("SPECJAX_ROUTERS", HERE / ".routers")) / name / "bin" / "python"
    return python if python.exists() else None


def plain() -> dict[str, str]:
    """The environment of programs of other projects."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def wait_for(condition: Callable[[], Any], what: str) -> None:
    """Waits until `condition` is true. An HTTP error counts as false."""
    deadline = time.monotonic() + SECONDS
    while True:
        with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
            if condition():
                return
        assert time.monotonic() < deadline, f"not within {SECONDS:g} s: {what}"
        time.sleep(0.1)


class Program:
    """A process with its output in a file."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str] | None) -> None:
        self.log = log
        with log.open("ab") as file:
            self.popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env)

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        try:
            self.popen.wait(10)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


class Worker:
    """A specjax server at a fixed port."""

    def __init__(self, folder: Path, name: str, model: str) -> None:
        self._folder, self._name, self._model, self.port = folder, name, model, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "specjax.serve", "--model", self._model, "--port", str(self.port),
                   "--served-model-name", "tiny", "--max-running-requests", "4", "--chunked-prefill-size", "16",
                   "--max-total-tokens", "1024", "--page-size", "8", "--speculative-algorithm", "ngram",
                   "--speculative-num-draft-tokens", "4", "--no-speculative-adaptive"]  # fmt: skip
        self.program = Program(command, self._folder / f"{self._name}.log", environment())

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=SECONDS)

    def wait_ready(self) -> None:
        wait_for(lambda: self.get("/health").status_code == 200, f"a ready worker:\n{self.program.log.read_text()}")

    def load(self) -> dict[str, Any]:
        (load,) = self.get("/v1/loads").json()["loads"]
        return load

    def total(self, name: str) -> float:
        """A metric of the worker, by SGLang's name without the prefix."""
        sample = re.search(rf"^sglang:{name}{{[^}}]*}} (\S+)$", self.get("/metrics").text, re.MULTILINE)
        assert sample, name
        return float(sample[1])


@dataclass
class Seen:
    """A request and its answer, as seen by the client."""

    prompt: str
    streams: bool
    sent: float  # time
    ended: float = 0.0
    status: int | None = None  # None: the connection broke before an answer
    text: str = ""
    begun: bool = False  # a part of the answer has come
    done: bool = False  # the answer is whole: all of the body, or [DONE] of a stream
    error: str = ""  # the body of a refusal, or why the connection broke


async def _lines(answer: httpx.Response) -> AsyncIterator[str]:
    """Lines of server-sent events. `aiter_lines` would also end lines at U+0085 and U+2028."""
    rest = ""
    async for text in answer.aiter_text():
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            yield line.removesuffix("\r")


async def ask(client: httpx.AsyncClient, prompt: str, tokens: int, streams: bool) -> Seen:
    """One greedy completion."""
    seen = Seen(prompt, streams, time.monotonic())
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    try:
        async with client.stream("POST", "/v1/completions", json=body | {"stream": streams}) as answer:
            seen.status = answer.status_code
            if answer.status_code != 200 or not streams:
                text = (await answer.aread()).decode()
                if answer.status_code == 200:
                    seen.text, seen.done = json.loads(text)["choices"][0]["text"], True
                else:
                    seen.error = text
                return seen
            async for line in _lines(answer):
                if line == "data: [DONE]":
                    seen.done = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        seen.error = json.dumps(event["error"])
                        continue
                    seen.text += event["choices"][0]["text"]
                    seen.begun = True
    except httpx.TransportError as error:
        seen.error = f"{type(error).__name__}: {error}"
    return seen


async def ask_all(
    base: str, prompts: list[str], *, tokens: int, at_once: int, at: dict[int, Callable[[], None]]
) -> list[Seen]:
    """Completions of all prompts, half of them streamed. `at`: functions, by the number of ended requests before."""
    gate, ended = asyncio.Semaphore(at_once), 0

    async def ask_one(index: int, prompt: str) -> Seen:
        nonlocal ended
        async with gate:
            seen = await asyncio.wait_for(ask(client, prompt, tokens, index % 2 == 0), SECONDS)
            seen.ended = time.monotonic()
            ended += 1
            if ended in at:
                at[ended]()
            return seen

    # A new connection for each request: the router may close a kept connection while a request is sent on it.
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=base, timeout=SECONDS, limits=limits, trust_env=False) as client:
        return await asyncio.gather(*(ask_one(index, prompt) for index, prompt in enumerate(prompts)))


@contextlib.contextmanager
def stopping(*running: Any) -> Iterator[None]:
    """Kills programs and workers at the end."""
    try:
        yield
    finally:
        for process in running:
            (process.program if isinstance(process, Worker) else process).stop(signal.SIGKILL)


def check_idle(workers: list[Worker]) -> None:
    """Checks that no request runs or waits, and that only the prefix cache holds pages, until it is flushed."""
    for worker in workers:
        wait_for(lambda worker=worker: worker.load()["num_used_tokens"] == 0, f"free pages: {worker.load()}")
        load = worker.load()
        assert (load["num_running_reqs"], load["num_waiting_reqs"], load["token_usage"]) == (0, 0, 0.0)
        assert worker.get("/flush_cache").json()["success"]
        pages = worker.get("/server_info").json()["internal_states"][0]["pages"]
        assert pages["free"] == pages["total"] and pages["cached"] == 0


def check(seen: list[Seen], expected: dict[str, str], killed_at: float) -> dict[str, int]:
    """Checks that each request has the text of an undisturbed worker, or has failed with an error before its first
    token, or is a stream that had begun before the kill. Returns the number of requests of each kind."""
    answered = [request for request in seen if request.done]
    for request in answered:
        assert (request.status, request.text) == (200, expected[request.prompt])
    broken = [request for request in seen if not request.done and request.begun]
    for request in broken:
        assert request.streams and request.sent < killed_at
        assert expected[request.prompt].startswith(request.text)
    refused = [request for request in seen if not request.done and not request.begun]
    for request in refused:
        assert request.error and request.status is not None and request.status >= 500, request
    return {"answered": len(answered), "broken": len(broken), "refused": len(refused)}


@contextlib.contextmanager
def two_workers(folder: Path) -> Iterator[list[Worker]]:
    """Two workers with the same tiny model, both ready."""
    (folder / "model").mkdir()
    model = saved_model(folder / "model", max_position_embeddings=256)
    workers = [Worker(folder, name, model) for name in ("one", "two")]
    with stopping(*workers):
        for worker in workers:
            worker.wait_ready()
        yield workers


def killed_under_load(base: str, workers: list[Worker]) -> tuple[list[str], list[Seen], dict[str, int]]:
    """Sends `REQUESTS` requests, and kills the first worker after a third of them. Returns the prompts, the requests,
    and the counts of `check`."""
    victim, other = workers
    prompts = [f"{i} the hell {i % 7}" for i in range(REQUESTS)]
    state: dict[str, Any] = {}

    def stop() -> None:
        """Stops the worker before the kill, so that requests are under way even on a fast machine."""
        victim.program.popen.send_signal(signal.SIGSTOP)
        state["stopped"] = time.monotonic()
        asyncio.get_running_loop().call_later(STOPPED, kill)

    def kill() -> None:
        victim.program.popen.send_signal(signal.SIGKILL)
        victim.program.popen.wait()
        state["killed"] = time.monotonic()

    seen = asyncio.run(ask_all(base, prompts, tokens=TOKENS, at_once=AT_ONCE, at={REQUESTS // 3: stop}))
    alone = asyncio.run(ask_all(other.url, prompts, tokens=TOKENS, at_once=AT_ONCE, at={}))
    assert all(request.done for request in alone)
    caught = [request for request in seen if request.sent < state["stopped"] and request.ended > state["killed"]]
    assert caught, "no request was under way at the killed worker"
    counts = check(seen, {request.prompt: request.text for request in alone}, state["killed"])
    print(counts, f"{len(caught)} of them under way at the killed worker")
    return prompts, seen, counts
