"""LiteLLM's proxy before two workers, as processes: `make routers` installs and runs it.

The proxy picks a worker at random, sends a request that failed to the other one, and leaves a worker that failed alone
for a while.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
import yaml
from router_helpers import (
    AT_ONCE,
    REQUESTS,
    Program,
    Worker,
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

PYTHON = router_python("litellm")
SETTINGS = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # nothing is downloaded
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
}

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(PYTHON is None, reason="LiteLLM's proxy is not installed (make routers)"),
]


class Proxy(Program):
    """LiteLLM's proxy, as docs/serving.md configures it, with times that are short enough for a test."""

    def __init__(self, folder: Path, workers: list[Worker]) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        models = [
            {
                "model_name": "tiny",
                "litellm_params": {
                    "model": "text-completion-openai/tiny",
                    "api_base": f"{worker.url}/v1",
                    "api_key": "none",
                },
            }
            for worker in workers
        ]
        settings = {"num_retries": 3, "allowed_fails": 0, "cooldown_time": 2}
        (folder / "litellm.yaml").write_text(yaml.safe_dump({"model_list": models, "router_settings": settings}))
        command = [str(PYTHON), str(Path(str(PYTHON)).with_name("litellm")), "--config", str(folder / "litellm.yaml"),
                   "--host", "127.0.0.1", "--port", str(port)]  # fmt: skip
        super().__init__(command, folder / "litellm.log", plain() | SETTINGS)

    def ready(self) -> bool:
        return httpx.get(f"{self.url}/health/readiness", timeout=30).status_code == 200


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """(workers, proxy), all ready."""
    folder = tmp_path_factory.mktemp("litellm")
    with two_workers(folder) as workers:
        proxy = Proxy(folder, workers)
        with stopping(proxy):
            wait_for(proxy.ready, f"the proxy, whose log is {proxy.log}")
            yield workers, proxy


def test_a_worker_is_killed_under_load_and_comes_back(replicas):
    workers, proxy = replicas
    victim, other = workers
    prompts, seen, counts = killed_under_load(proxy.url, workers)
    assert sum(counts.values()) == REQUESTS
    # A stream is not sent again where the connection fails, as it does at each try of the dead worker.
    assert all(each.done or each.streams for each in seen)
    assert counts["answered"] >= REQUESTS - 4 * AT_ONCE
    nothing_is_held([other])
    victim.start()
    victim.wait_ready()

    def taken_up() -> bool:
        asyncio.run(ask_all(proxy.url, prompts[:8], tokens=2, at_once=AT_ONCE, at={}))
        return victim.total("num_requests_total") > 0

    wait_for(taken_up, "requests for the worker that came back")
    nothing_is_held(workers)
