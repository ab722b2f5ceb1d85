"""The real Ray: two replicas of a tiny model, one of them killed; autoscaling; Ray Data. `make ray` runs it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from generate_helpers import saved_model
from ray_helpers import QUICK

ray = pytest.importorskip("ray", reason="Ray is not installed: make ray")
from ray import serve  # noqa: E402

from specjax.ray_data import Generate  # noqa: E402
from specjax.serve.ray import build_app  # noqa: E402

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("default")]

SECONDS = 240.0


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of Ray Serve."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


def config(model: str, **deployment: Any) -> dict[str, Any]:
    return {
        "model_loading_config": {"model_id": "tiny", "model_source": model},
        "engine_kwargs": QUICK,
        "accelerator_config": {"kind": "cpu"},
        "deployment_config": {"health_check_period_s": 1.0, **deployment},
    }


@pytest.fixture(scope="module", params=["plain"])
def client(request, cluster, model) -> Iterator[httpx.Client]:
    """Two replicas behind `build_app`."""
    app = build_app(config(model, num_replicas=2))
    serve.run(app, name=request.param, route_prefix=f"/{request.param}")
    with httpx.Client(base_url=f"{cluster}/{request.param}", timeout=SECONDS) as client:
        yield client
    serve.delete(request.param)


def replicas() -> set[int]:
    """The processes of the model's replicas, of those that this process has started."""
    found = set()
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if re.match(r"ray::ServeReplica:\w+:SpecjaxServer:", " ".join(each.cmdline())):
                found.add(each.pid)
    return found


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": [10, 11, 12, 10, 11], "max_tokens": 8, "seed": 3, "temperature": 0.7} | fields


def streamed(client: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    with client.stream("POST", "/v1/completions", json=body(stream=True, **fields)) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_answers_streams_and_errors(client, model):
    (row,) = Generate(QUICK | {"model": model}, {"max_new_tokens": 8, "temperature": 0.7}).complete(
        [{"input_ids": body()["prompt"], "seed": 3}]
    )
    answer = client.post("/v1/completions", json=body())
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == row["text"]
    events = streamed(client)
    assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == row["text"]
    assert len(events) > 2
    messages = [{"role": "user", "content": "hi"}]
    answer = client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages, "max_tokens": 4})
    assert answer.json()["usage"]["completion_tokens"] == 4, answer.text
    answer = client.post("/v1/completions", json=body(max_tokens=-1))
    assert answer.status_code == 400 and "max_tokens" in answer.text
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"


def test_a_killed_replica(client):
    """Under load, kill -9 of one of two: every request is answered, but for streams that had begun, which say so."""
    wanted = client.post("/v1/completions", json=body(max_tokens=60)).json()["choices"][0]["text"]
    results: list[str] = []

    def ask(index: int) -> None:
        for _ in range(4):
            if index % 2:
                answer = client.post("/v1/completions", json=body(max_tokens=60))
                text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
            else:
                with client.stream("POST", "/v1/completions", json=body(max_tokens=60, stream=True)) as response:
                    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
                events = [json.loads(line) for line in lines if line != "[DONE]"]
                broken = [event for event in events if "error" in event]
                parts = [event["choices"][0]["text"] for event in events if event.get("choices")]
                assert wanted.startswith("".join(parts))
                text = "broken" if broken and parts else "".join(parts)
            results.append(text)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(6)]
    before = replicas()
    assert len(before) == 2
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    os.kill(min(before), signal.SIGKILL)
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a request hangs"
    assert len(results) == 24
    assert set(results) <= {wanted, "broken"}, results
    deadline = time.monotonic() + SECONDS
    while len(now := replicas()) < 2 or now == before:
        assert time.monotonic() < deadline, "the replica did not come back"
        time.sleep(0.5)


def test_data(cluster, model, tmp_path):
    """Two actors: every row once, with the text of one engine, its own columns and the objects of its fields."""
    rows = [{"id": f"r{i}", "prompt": "abc" * (1 + i % 3), "label": i} for i in range(12)]
    constructor = {"settings": QUICK | {"model": model}, "sampling": {"max_new_tokens": 6}, "keep": ["label"]}
    found = ray.data.from_items(rows).map_batches(
        Generate, fn_constructor_kwargs=constructor, concurrency=2, num_cpus=1, batch_size=3
    )
    found.write_json(str(tmp_path / "answers"))
    lines = [json.loads(line) for file in (tmp_path / "answers").iterdir() for line in file.read_text().splitlines()]
    wanted = {row["id"]: row["text"] for row in Generate(**constructor).complete(rows)}
    assert len(lines) == 12
    assert {line["id"]: line["text"] for line in lines} == wanted
    assert {line["id"]: line["label"] for line in lines} == {row["id"]: row["label"] for row in rows}
