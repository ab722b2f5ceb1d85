"""Data parallelism: the choice of a replica, routes of several replicas, failures."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from unittest.mock import create_autospec

import pytest
from engine_helpers import make_engine, shared_engine, toy
from prometheus_client.parser import text_string_to_metric_families
from server_helpers import SECONDS, Running, braked, in_background, running, wait_until

from specjax.cli import build
from specjax.cli.flags import EngineSettings, ServerSettings, Settings
from specjax.engine import Engine
from specjax.engine.draft_policy import DraftPolicy
from specjax.fleet.replicas import Replicas
from specjax.serve.errors import ENGINE_STUCK, FAILED_STEP, State
from specjax.serve.runner import EngineStuck

QUICK = ServerSettings(watchdog_timeout=0.1)
FIELDS = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.7, "seed": 5}
PROMPTS = [f"{word} there" for word in ("hello", "the", "a", "12", "tell", "hell", "llama", "heart")]


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    return [shared_engine("NGRAM"), make_engine(toy(), shared_engine("NGRAM").drafter)]


def serving(engines: list[Engine], settings: ServerSettings | None = None, **options: Any) -> Any:
    """A server over replicas."""

    def service(settings: ServerSettings) -> Replicas:
        return Replicas(lambda rank: engines[rank], settings, len(engines), warm_up=False)

    return running(engines[0], settings, service=service, **options)


@pytest.fixture(scope="module")
def server(engines) -> Iterator[Running]:
    with serving(engines) as served:
        yield served


def text_of(answer: Any) -> str:
    return answer.json()["choices"][0]["text"]


def test_too_few_devices():
    many = ServerSettings(data_parallel_size=30)
    for settings, text in (
        (Settings(engine=EngineSettings(tensor_parallel_size=2), server=many),
         "--data-parallel-size 30 with --tensor-parallel-size 2 needs 60 devices, an"),
        (Settings(server=many), r"--data-parallel-size 30 needs 30 devices, .*; at most \d+ replicas fit; XLA"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{text}"):
            build.check_devices(settings)


# Requests.


def test_requests_over_both_replicas(server, engines):
    """Texts equal those of one engine, and `/metrics` counts each request once."""
    sampling = {"max_new_tokens": 24} | {name: value for name, value in FIELDS.items() if name != "max_tokens"}
    alone = shared_engine("NONE")
    expected = [alone.generate(prompt, sampling).text for prompt in PROMPTS]
    before, marks = sums(server), [engine.counters.generated for engine in engines]
    with ThreadPoolExecutor(8) as clients:
        texts = list(clients.map(lambda prompt: text_of(server.complete(prompt, **FIELDS)), PROMPTS))
    assert texts == expected
    server.wait_idle()
    drawn = [engine.counters.generated - mark for engine, mark in zip(engines, marks, strict=True)]
    after = sums(server)
    assert all(drawn) and sum(drawn) == 24 * len(PROMPTS)
    assert after["sglang:generation_tokens_total"] - before["sglang:generation_tokens_total"] == sum(drawn)
    assert after["sglang:num_requests_total"] - before["sglang:num_requests_total"] == len(PROMPTS)
    latencies = "specjax:e2e_request_latency_seconds_count"
    assert after[latencies] - before[latencies] == len(PROMPTS)
    assert after["specjax:max_total_num_tokens"] == 2 * engines[0].intake.pool_tokens


def sums(server: Running) -> dict[str, float]:
    """The sum of each metric's series, without buckets of histograms."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            if "le" not in sample.labels:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def test_choices_and_streams_of_one_request(server):
    """The sequences of one request run at both replicas."""
    body = {"prompt": PROMPTS[:3], "n": 2, **FIELDS}
    whole = [choice["text"] for choice in server.post("/v1/completions", body).json()["choices"]]
    singles = [
        text_of(server.complete(prompt, **FIELDS | {"seed": 5 + choice})) for prompt in PROMPTS[:3] for choice in (0, 1)
    ]
    assert whole == singles
    parts = [""] * 6
    for event in server.events("/v1/completions", body):
        for choice in event["choices"]:
            parts[choice["index"]] += choice["text"]
    assert parts == whole


def test_info_and_loads_of_replicas(server, engines, monkeypatch):
    server.wait_idle()
    policy = create_autospec(DraftPolicy, instance=True)
    policy.table.return_value = [{"nodes": 2}]
    monkeypatch.setattr(engines[1].runtime, "policy", policy)
    info, loads, old = (server.get(path).json() for path in ("/server_info", "/v1/loads", "/get_load"))
    assert info["dp_size"] == len(info["internal_states"]) == 2
    for engine, state in zip(engines, info["internal_states"], strict=True):
        assert state["generated_tokens"] == engine.counters.generated
    assert [state["speculative_sizes"] for state in info["internal_states"]] == [[], [{"nodes": 2}]]
    assert info["verify_steps"] == sum(engine.counters.verifications for engine in engines)
    assert loads["dp_rank_count"] == 2 and [load["dp_rank"] for load in loads["loads"]] == [0, 1]
    assert [load["dp_rank"] for load in old] == [0, 1]


def test_loads_and_aborts_at_both_replicas(server):
    server.wait_idle()
    params = {"max_new_tokens": 100, "ignore_eos": True, "n": 2}
    server.post("/pause_generation", {"mode": "in_place"})
    with ThreadPoolExecutor(4) as clients:
        asked = {
            name: clients.submit(server.post, "/generate", {"text": name, "sampling_params": params, "rid": name})
            for name in ("mine", "other")
        }
        wait_until(lambda: server.get("/v1/loads").json()["aggregate"]["total_reqs"] == 4)
        assert [load["num_waiting_reqs"] for load in server.get("/v1/loads").json()["loads"]] == [2, 2]
        again = server.post("/generate", {"text": "x", "sampling_params": params, "rid": "mine"})
        assert again.status_code == 400 and "is running" in again.text
        assert server.post("/abort_request", {"rid": "mine"}).json()["message"] == "2 aborted."
        server.post("/continue_generation", {})
        ends = {
            name: {choice["meta_info"]["finish_reason"]["type"] for choice in job.result(SECONDS).json()}
            for name, job in asked.items()
        }
    assert ends == {"mine": {"abort"}, "other": {"length"}}
    server.wait_idle()


def test_commands_reach_all_replicas(server, engines):
    server.wait_idle()
    marks = [engine.counters.generated for engine in engines]
    assert server.get("/health_generate").json() == {"status": "ok"}
    server.wait_idle()
    assert [engine.counters.generated for engine in engines] == [mark + 1 for mark in marks]
    assert any(engine.scheduler.prefix.evictable for engine in engines)
    assert server.post("/flush_cache", {}).status_code == 200
    assert not any(engine.scheduler.prefix.evictable for engine in engines)
    assert server.post("/pause_generation", {"mode": "in_place"}).status_code == 200
    with ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(server.complete, prompt, max_tokens=3) for prompt in PROMPTS[:4]]
        wait_until(lambda: server.runner.unfinished == 4)
        assert server.get("/health_generate").status_code == 503
        assert server.post("/flush_cache", {}).json()["error"]["code"] == "busy"
        assert all(rank.unfinished for rank in server.runner.ranks)
        assert server.post("/continue_generation", {}).status_code == 200
        assert all(job.result(SECONDS).status_code == 200 for job in asked)


def test_capacity_is_that_of_all_replicas():
    engines = [make_engine(toy(), "NONE") for _ in range(2)]
    with serving(engines, ServerSettings(max_queued_requests=1)) as server:
        assert server.runner.capacity == 10
        assert server.complete(["a"] * 10, max_tokens=1).status_code == 200
        assert server.complete(["a"] * 11, max_tokens=1).status_code == 400
        server.post("/pause_generation", {"mode": "in_place"})
        with ThreadPoolExecutor(1) as clients:
            asked = clients.submit(server.complete, ["a"] * 10, max_tokens=1)
            wait_until(lambda: server.runner.unfinished == 10)
            assert server.complete("a", max_tokens=1).status_code == 503
            server.post("/continue_generation", {})
            assert asked.result(SECONDS).status_code == 200


# Failures.


def test_failed_step_ends_the_requests_of_its_replica(server, engines, monkeypatch):
    def fail() -> Any:
        raise RuntimeError("a step fails, for a test")

    server.post("/pause_generation", {"mode": "in_place"})
    jobs = [in_background(server.complete, prompt, **FIELDS) for prompt in PROMPTS[:4]]
    wait_until(lambda: server.runner.unfinished == 4)
    failing = server.runner.ranks[1].unfinished
    assert 0 < failing < 4
    monkeypatch.setattr(engines[1], "step", fail)
    server.post("/continue_generation", {})
    answers = [job.result(SECONDS) for job in jobs]
    assert sorted(answer.status_code for answer in answers) == [200] * (4 - failing) + [503] * failing
    assert sum(FAILED_STEP in answer.text for answer in answers) == failing
    monkeypatch.undo()
    assert server.get("/health").status_code == 200
    assert server.complete(["a"] * 4, max_tokens=2).status_code == 200


def test_stuck_replica_ends_all():
    """As in a server of one engine, all requests get an error, and the state is FAILED."""
    engines = [make_engine(toy(), "NONE") for _ in range(2)]
    with ExitStack() as stack:
        server = stack.enter_context(serving(engines, QUICK, idle_at_end=False))
        for engine in engines:
            stack.enter_context(braked(engine, after=engine is engines[0]))
        jobs = [in_background(server.complete, prompt, **FIELDS) for prompt in PROMPTS[:4]]
        answers = [job.result(SECONDS) for job in jobs]
        assert {answer.status_code for answer in answers} == {503}
        assert any(answer.json()["error"]["message"] == ENGINE_STUCK for answer in answers)
        wait_until(lambda: all(rank.state is State.FAILED for rank in server.runner.ranks))
        assert isinstance(server.runner.failure, EngineStuck) and server.runner.places.taken == 0
        assert server.get("/health").status_code == 503


@pytest.mark.parametrize("fails", [False, True])
def test_starts_of_replicas(engines, fails):
    """READY is reported once. If an engine cannot be loaded, the others end, and later ones are not loaded."""
    loaded, changes = [], []

    def load(rank: int) -> Engine:
        loaded.append(rank)
        if rank == 1 and fails:
            raise ValueError("no room for this one")
        return make_engine(toy(), "NONE", warm=False)

    service = Replicas(load, ServerSettings(), 3 if fails else 2, warm_up=False)
    service.on_change = lambda: changes.append(service.state)
    service.start()
    wait_until(lambda: all(rank.state is State.FAILED for rank in service.ranks) if fails else changes)
    assert service.stop(SECONDS) and changes == [State.FAILED if fails else State.READY]
    if fails:
        assert str(service.failure) == "no room for this one" and not service.loaded
        assert loaded.count(1) == 1 and service.state is State.FAILED
