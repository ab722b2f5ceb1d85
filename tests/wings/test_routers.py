"""Replicas behind routers of other projects, unchanged, as processes: `make routers` installs and runs them.

SPECJAX_ROUTER_REQUESTS is the number of requests during which a worker is killed (120; `make routers` sends 500).
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
from pathlib import Path

import httpx
import pytest
import yaml
from router_helpers import (
    AT_ONCE,
    REQUESTS,
    TOKENS,
    Program,
    Worker,
    ask,
    ask_all,
    free_port,
    killed_under_load,
    nothing_is_held,
    plain,
    router_python,
    stopping,
    two_workers,
    wait_for,
)

PYTHON = router_python("sglang-router")
DEPLOY = Path(__file__).resolve().parents[2] / "deploy"

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(PYTHON is None, reason="sglang-router is not installed (make routers)"),
]


class Router(Program):
    """sglang-router over workers, with health checks that are quick enough for a test."""

    def __init__(self, folder: Path, workers: list[Worker]) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        command = [str(PYTHON), "-m", "sglang_router.launch_router", "--worker-urls", *(w.url for w in workers),
                   "--policy", "cache_aware", "--host", "127.0.0.1", "--port", str(port),
                   "--prometheus-port", str(free_port()), "--health-check-interval-secs", "1",
                   "--health-failure-threshold", "2", "--health-success-threshold", "1",
                   "--worker-startup-check-interval", "1", "--cb-timeout-duration-secs", "2"]  # fmt: skip
        super().__init__(command, folder / "router.log", plain())

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def healthy(self) -> set[str]:
        return {each["url"] for each in self.get("/workers").json()["workers"] if each["is_healthy"]}


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """(workers, router), all ready."""
    folder = tmp_path_factory.mktemp("routers")
    with two_workers(folder) as workers:
        router = Router(folder, workers)
        with stopping(router):
            wait_for(lambda: len(router.healthy()) == 2, f"two workers:\n{router.log.read_text()}")
            yield workers, router


def test_what_the_deployment_files_use(replicas):
    """Flags of the router in deploy/, by the router's own parser, and the paths of its probes."""
    _, router = replicas
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["router"]["command"]
    text = (DEPLOY / "kubernetes" / "base" / "router.yaml").read_text()
    deployment = next(each for each in yaml.safe_load_all(text) if each["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    parse = "import sys; from sglang_router.launch_router import parse_router_args as p; print(p(sys.argv[1:]))"
    for command in (compose, container["args"]):
        done = subprocess.run([str(PYTHON), "-c", parse, *command], capture_output=True, text=True, env=plain())
        assert done.returncode == 0 and "port=30000" in done.stdout, done.stderr
    for probe in ("readinessProbe", "livenessProbe"):
        assert router.get(container[probe]["httpGet"]["path"]).status_code == 200


def test_a_worker_is_registered_as_itself(replicas):
    """The router knows the worker's model by the answers of the worker, and merges the metrics of both."""
    workers, router = replicas
    found = router.get("/workers").json()["workers"]
    assert {each["url"] for each in found} == {worker.url for worker in workers}
    for each in found:
        assert each["model_id"] == "tiny" and each["connection_mode"] == "HTTP"
        assert (each["metadata"]["dp_size"], each["metadata"]["served_model_name"]) == ("1", "tiny")
    assert [model["id"] for model in router.get("/v1/models").json()["data"]] == ["tiny"]
    assert router.get("/health_generate").status_code == 200
    loads = router.get("/get_loads").json()["workers"]
    assert sorted(each["load"] for each in loads) == [0, 0], "-1: the router could not read the load"
    metrics = router.get("/engine_metrics").text
    for name in ("token_usage", "num_running_reqs", "num_queue_reqs"):
        for worker in workers:
            assert any(
                line.startswith(f"sglang_{name}{{") and f'worker_addr="{worker.url}"' in line
                for line in metrics.splitlines()
            ), name
    flushed = httpx.post(f"{router.url}/flush_cache", timeout=30).json()
    assert flushed["status"] == "success" and flushed["workers_flushed"] == 2


def test_a_conversation_stays_with_its_worker(replicas):
    """The cache-aware policy: turns of one conversation go where its prefix is, and take it from the cache there."""
    workers, router = replicas
    before = [(worker.total("num_requests_total"), worker.total("cached_tokens_total")) for worker in workers]

    async def talk() -> None:
        async with httpx.AsyncClient(base_url=router.url, timeout=60, trust_env=False) as client:
            text = "the hell there was a word and then another word of it "
            for turn in range(5):
                seen = await ask(client, text, 4, streams=bool(turn % 2))
                assert seen.done and len(seen.text) > 0
                text += seen.text + " and more "

    asyncio.run(talk())
    asked = [worker.total("num_requests_total") - old for worker, (old, _) in zip(workers, before, strict=True)]
    cached = [worker.total("cached_tokens_total") - old for worker, (_, old) in zip(workers, before, strict=True)]
    assert sorted(asked) == [0, 5]
    assert sum(cached) >= 4 * 40, "each turn but the first finds the pages of the one before"
    nothing_is_held(workers)


def test_a_worker_is_killed_under_load_and_comes_back(replicas):
    workers, router = replicas
    victim, other = workers
    prompts, seen, counts = killed_under_load(router.url, workers)
    assert counts["broken"] + counts["refused"] <= AT_ONCE, f"more than were in flight: {counts}"
    assert counts["answered"] >= REQUESTS - AT_ONCE
    # It leaves: what comes now goes to the other alone.
    wait_for(lambda: router.healthy() == {other.url}, "the router to drop the killed worker")
    seen = asyncio.run(ask_all(router.url, prompts[:20], tokens=TOKENS, at_once=AT_ONCE, at={}))
    assert all(each.done for each in seen)
    nothing_is_held([other])
    # It comes back at its address, and gets requests.
    victim.start()
    victim.wait_ready()
    wait_for(lambda: len(router.healthy()) == 2, "the router to take the worker back")

    rounds = itertools.count()

    def taken_up() -> bool:
        """Prompts that no worker has in its cache: the policy spreads those."""
        new = [f"{chr(ord('a') + i)} {next(rounds)} the hell" for i in range(24)]
        asyncio.run(ask_all(router.url, new, tokens=TOKENS, at_once=AT_ONCE, at={}))
        return victim.total("num_requests_total") > 0

    wait_for(taken_up, "requests for the worker that came back")
    nothing_is_held(workers)
