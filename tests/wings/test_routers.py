"""Two replicas behind sglang-router, as processes: `make routers` installs and runs it.

SPECJAX_ROUTER_REQUESTS is the number of requests during which a worker is killed (120; `make routers` sends 500).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
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
import pytest
import yaml
from generate_helpers import saved_model
from server_helpers import free_port
from train_helpers import environment

HERE = Path(__file__).resolve().parents[2]
SECONDS = 600.0  # time limit of every wait; even on a busy machine only a hang takes so long
REQUESTS = int(os.environ.get("SPECJAX_ROUTER_REQUESTS", "120"))
"""Number of requests during which a worker is killed; `make routers` sends 500."""
TOKENS, AT_ONCE = 24, 12  # tokens of each request, and number of concurrent requests
STOPPED = 0.5  # seconds from stopping the worker until it is killed


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
        assert httpx.post(f"{worker.url}/flush_cache", timeout=30).json()["success"]
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


DEPLOY = HERE / "deploy"
ROUTER = Path(os.environ.get("SPECJAX_ROUTERS", HERE / ".routers")) / "sglang-router" / "bin" / "python"
"""The router's environment (`make routers`)."""

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not ROUTER.exists(), reason="sglang-router is not installed (make routers)"),
]


class Router(Program):
    """sglang-router over workers, with frequent health checks."""

    def __init__(self, folder: Path, workers: list[Worker]) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        command = [str(ROUTER), "-m", "sglang_router.launch_router", "--worker-urls", *(w.url for w in workers),
                   "--policy", "cache_aware", "--host", "127.0.0.1", "--port", str(port),
                   "--prometheus-port", str(free_port()), "--health-check-interval-secs", "1",
                   "--health-failure-threshold", "2", "--health-success-threshold", "1",
                   "--worker-startup-check-interval", "1", "--cb-timeout-duration-secs", "2"]  # fmt: skip
        super().__init__(command, folder / "router.log", plain())

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def healthy(self) -> set[str]:
        return {worker["url"] for worker in self.get("/workers").json()["workers"] if worker["is_healthy"]}


@pytest.fixture(scope="module")
def routed(tmp_path_factory):
    """(workers, router), all ready."""
    folder = tmp_path_factory.mktemp("routers")
    with two_workers(folder) as workers:
        router = Router(folder, workers)
        with stopping(router):
            wait_for(lambda: len(router.healthy()) == 2, f"two workers:\n{router.log.read_text()}")
            yield workers, router


def test_flags_and_probes_of_the_deployment(routed):
    """The router's parser accepts the flags in deploy/, and its probes exist."""
    _, router = routed
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["router"]["command"]
    text = (DEPLOY / "kubernetes" / "base" / "router.yaml").read_text()
    deployment = next(manifest for manifest in yaml.safe_load_all(text) if manifest["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    parse = "import sys; from sglang_router.launch_router import parse_router_args as p; print(p(sys.argv[1:]))"
    for command in (compose, container["args"]):
        done = subprocess.run([str(ROUTER), "-c", parse, *command], capture_output=True, text=True, env=plain())
        assert done.returncode == 0 and "port=30000" in done.stdout, done.stderr
    for probe in ("readinessProbe", "livenessProbe"):
        assert router.get(container[probe]["httpGet"]["path"]).status_code == 200


def test_registration_and_merged_metrics(routed):
    workers, router = routed
    registered = router.get("/workers").json()["workers"]
    assert {worker["url"] for worker in registered} == {worker.url for worker in workers}
    for worker in registered:
        assert worker["model_id"] == "tiny" and worker["connection_mode"] == "HTTP"
        assert (worker["metadata"]["dp_size"], worker["metadata"]["served_model_name"]) == ("1", "tiny")
    assert [model["id"] for model in router.get("/v1/models").json()["data"]] == ["tiny"]
    assert router.get("/health_generate").status_code == 200
    loads = [worker["load"] for worker in router.get("/get_loads").json()["workers"]]
    assert loads == [0, 0], "-1: the router could not read the load"
    lines = router.get("/engine_metrics").text.splitlines()
    for name, worker in itertools.product(("token_usage", "num_running_reqs", "num_queue_reqs"), workers):
        address = f'worker_addr="{worker.url}"'
        assert any(line.startswith(f"sglang_{name}{{") and address in line for line in lines), name
    flushed = httpx.post(f"{router.url}/flush_cache", timeout=30).json()
    assert flushed["status"] == "success" and flushed["workers_flushed"] == 2


def test_conversation_stays_with_its_worker(routed):
    """The cache-aware policy sends turns of a conversation to the worker that has its prefix in the cache."""
    workers, router = routed
    before = [(worker.total("num_requests_total"), worker.total("cached_tokens_total")) for worker in workers]

    async def talk() -> None:
        async with httpx.AsyncClient(base_url=router.url, timeout=60, trust_env=False) as client:
            text = "the hell there was a word and then another word of it "
            for turn in range(5):
                seen = await ask(client, text, 4, streams=bool(turn % 2))
                assert seen.done and len(seen.text) > 0
                text += seen.text + " and more "

    asyncio.run(talk())
    requests = [worker.total("num_requests_total") - old for worker, (old, _) in zip(workers, before, strict=True)]
    cached = [worker.total("cached_tokens_total") - old for worker, (_, old) in zip(workers, before, strict=True)]
    assert sorted(requests) == [0, 5]
    assert sum(cached) >= 4 * 40, "each turn except the first reads cached pages"
    check_idle(workers)


def restart(victim: Worker, url: str, prompts: itertools.count) -> None:
    """Starts the killed worker at its address, and waits until it gets requests. `prompts` makes them new: the
    cache-aware policy spreads only prompts that are in no cache."""
    victim.start()
    victim.wait_ready()

    def used() -> bool:
        texts = [f"{chr(ord('a') + i)} {next(prompts)} the hell" for i in range(24)]
        asyncio.run(ask_all(url, texts, tokens=2, at_once=AT_ONCE, at={}))
        return victim.total("num_requests_total") > 0

    wait_for(used, "requests for the restarted worker")


def test_killed_worker_of_the_router(routed):
    workers, router = routed
    victim, other = workers
    prompts, seen, counts = killed_under_load(router.url, workers)
    assert counts["broken"] + counts["refused"] <= AT_ONCE, f"more than were in flight: {counts}"
    assert counts["answered"] >= REQUESTS - AT_ONCE
    wait_for(lambda: router.healthy() == {other.url}, "the router to drop the killed worker")
    seen = asyncio.run(ask_all(router.url, prompts[:20], tokens=TOKENS, at_once=AT_ONCE, at={}))
    assert all(request.done for request in seen)
    check_idle([other])
    restart(victim, router.url, itertools.count())
    assert len(router.healthy()) == 2
    check_idle(workers)
