"""Ray itself (`make ray`): replicas of a tiny model, a killed replica, autoscaling, Ray Data."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from generate_helpers import saved_model
from ray_helpers import QUICK, quick_engine
from server_helpers import SECONDS, free_port, parse_events, wait_until

# Ray Serve gives up a proxy that takes longer than 5 s to start. Ray reads these variables at its import.
os.environ |= {f"RAY_SERVE_PROXY_{check}_CHECK_TIMEOUT_S": "120" for check in ("READY", "HEALTH")}
ray = pytest.importorskip("ray", reason="Ray is not installed: make ray")
from ray import serve  # noqa: E402

from specjax.fleet.ray import SpecjaxServer, build_app  # noqa: E402

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of Ray Serve."""
    port = free_port()
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


def plain_app(model: str) -> Any:
    """Two replicas behind `build_app`."""
    return build_app(config(model, num_replicas=2))


def llm_app(model: str) -> Any:
    """One replica, or two under load, in the application of Ray's builder in ray.serve.llm."""
    llm = pytest.importorskip("ray.serve.llm", reason="neither vLLM nor SGLang is installed", exc_type=ImportError)
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1, "metrics_interval_s": 0.5,
               "look_back_period_s": 1.0, "upscale_delay_s": 0.5, "downscale_delay_s": 2.0}  # fmt: skip
    llm_config = llm.LLMConfig(server_cls=SpecjaxServer, **config(model, autoscaling_config=scaling))
    ingress = {"autoscaling_config": {"min_replicas": 1, "initial_replicas": 1, "max_replicas": 1}}
    return llm.build_openai_app({"llm_configs": [llm_config], "ingress_deployment_config": ingress})


APPS = {"plain": plain_app, "llm": llm_app}


@pytest.fixture(scope="module")
def client(request, cluster, model) -> Iterator[httpx.Client]:
    """A client of an application, which ends before the next one starts."""
    name = request.param
    serve.run(APPS[name](model), name=name, route_prefix=f"/{name}")
    with httpx.Client(base_url=f"{cluster}/{name}", timeout=SECONDS) as client:
        yield client
    serve.delete(name)


def behind(*apps: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("client", apps, indirect=True)


def replicas(app: str) -> set[int]:
    """The processes of the model's replicas."""
    pids = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if re.match(rf"ray::ServeReplica:{app}:SpecjaxServer:", " ".join(process.cmdline())):
                pids.add(process.pid)
    return pids


def ready(app: str) -> int:
    """Number of replicas that are running, according to Ray Serve."""
    deployments = serve.status().applications[app].deployments
    return deployments["SpecjaxServer:tiny"].replica_states.get("RUNNING", 0)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": [10, 11, 12, 10, 11], "max_tokens": 8, "seed": 3, "temperature": 0.7} | fields


def expected_text(model: str) -> str:
    """The text of `body()` by an engine."""
    return quick_engine(model).generate(body()["prompt"], {"max_new_tokens": 8, "temperature": 0.7, "seed": 3}).text


@behind("plain", "llm")
def test_answers_streams_and_errors(client, model):
    expected = expected_text(model)
    answer = client.post("/v1/completions", json=body())
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == expected
    with client.stream("POST", "/v1/completions", json=body(stream=True)) as response:
        events = parse_events(response.read())
    assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == expected
    assert len(events) > 2
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 1}
    answer = client.post("/v1/chat/completions", json=chat)
    assert answer.json()["usage"]["completion_tokens"] == 4, answer.text
    for stream in (False, True):
        answer = client.post("/v1/completions", json=body(max_tokens=-1, stream=stream))
        assert answer.status_code == 400 and "max_tokens" in answer.text
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"


@behind("llm")
def test_autoscaling(client):
    """More requests than `target_ongoing_requests` start a second replica, which ends when they end."""
    before = replicas("llm")
    assert len(before) == ready("llm") == 1
    texts, done = [], threading.Event()

    def ask() -> None:
        while not done.is_set():
            answer = client.post("/v1/completions", json=body(max_tokens=60))
            texts.append(answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: ready("llm") == 2)
        assert len(replicas("llm") - before) == 1
    finally:
        done.set()
        for thread in threads:
            thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a request hangs"
    assert len(set(texts)) == 1, "both replicas give the same text, and no request fails"
    wait_until(lambda: len(replicas("llm")) == 1)
    assert client.post("/v1/completions", json=body()).status_code == 200


@behind("plain")
def test_killed_replica(client):
    """After kill -9 of one of two replicas under load, only streams that had begun get an error."""
    expected = client.post("/v1/completions", json=body(max_tokens=60)).json()["choices"][0]["text"]
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
                assert expected.startswith("".join(parts))
                text = "broken" if broken and parts else "".join(parts)
            results.append(text)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(6)]
    before = replicas("plain")
    assert len(before) == 2
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    os.kill(min(before), signal.SIGKILL)
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a request hangs"
    assert len(results) == 24
    assert set(results) <= {expected, "broken"}, results
    wait_until(lambda: len(now := replicas("plain")) == 2 and now != before)


def test_data(cluster, model, tmp_path):
    """Two actors with an engine each, as in docs/serving.md, return each row once with the text of one engine."""
    sampling = {"max_new_tokens": 6, "temperature": 0.9, "seed": 0}

    class Complete:
        def __init__(self) -> None:
            self.engine = quick_engine(model)

        def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
            done = self.engine.generate(list(rows["prompt"]), sampling)
            return rows | {"text": [completion.text for completion in done]}

    rows = [{"prompt": "abc" * (1 + i % 3), "label": i} for i in range(12)]
    answers = ray.data.from_items(rows).map_batches(Complete, concurrency=2, num_cpus=1, batch_size=3)
    answers.write_json(str(tmp_path / "answers"))
    lines = [json.loads(line) for file in (tmp_path / "answers").iterdir() for line in file.read_text().splitlines()]
    expected = quick_engine(model).generate([row["prompt"] for row in rows], sampling)
    assert len(lines) == 12
    assert {line["label"]: line["text"] for line in lines} == {i: done.text for i, done in enumerate(expected)}
