"""Two replicas behind sglang-router, as processes: `make routers` installs and runs it.

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
    check_idle,
    free_port,
    killed_under_load,
    plain,
    router_python,
    stopping,
    two_workers,
    wait_for,
)

ROUTER = router_python("sglang-router")
DEPLOY = Path(__file__).resolve().parents[2] / "deploy"

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(ROUTER is None, reason="sglang-router is not installed (make routers)"),
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
