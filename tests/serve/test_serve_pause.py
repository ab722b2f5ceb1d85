"""SGLang's `/pause_generation` and `/continue_generation`: what waits, what is kept, and that no text changes."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_helpers import shared_engine
from server_helpers import SECONDS, Running, running, slow_down, wait_until

from specjax.engine import SamplingParams


@pytest.fixture(scope="module")
def server():
    with running(shared_engine("NGRAM")) as found:
        yield found


def tokens_so_far(server: Running) -> list[int]:
    return server.runner.call(lambda engine: [len(one.output.tokens) for one in engine.scheduler.active]).result(
        SECONDS
    )


@pytest.mark.parametrize("algorithm", ["NONE", "NGRAM"])
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_changes_no_text(mode, algorithm, monkeypatch):
    engine = shared_engine(algorithm)
    with running(engine) as server, ThreadPoolExecutor(4) as clients:
        fields = {"max_tokens": 60, "ignore_eos": True, "seed": 3}
        expected = [server.complete("hello " * n, **fields).json()["choices"][0]["text"] for n in range(1, 5)]
        slow_down(engine, monkeypatch, 0.02)
        asked = [clients.submit(server.complete, "hello " * n, **fields) for n in range(1, 4)]
        wait_until(lambda: any(count > 2 for count in tokens_so_far(server)))
        assert server.post("/pause_generation", {"mode": mode}).json()["success"]
        asked.append(clients.submit(server.complete, "hello " * 4, **fields))
        wait_until(lambda: server.runner.unfinished == 4)
        before = tokens_so_far(server)
        assert not before if mode == "retract" else before
        assert server.runner.call(lambda engine: engine.check_integrity()).result(SECONDS) is None
        time.sleep(0.2)
        assert tokens_so_far(server) == before and not any(each.done() for each in asked)
        with server.client() as client:
            (load,) = client.get("/v1/loads").json()["loads"]
            retracted = load["queues"]["retracted"]
            assert load["queues"]["paused"] == load["num_running_reqs"] == len(before) == 4 - load["num_waiting_reqs"]
            assert 0 < retracted <= 3 if mode == "retract" else retracted == 0
            assert client.get("/health").status_code == 200
            assert client.get("/health_generate").status_code == 503
        assert server.post("/continue_generation", {}).json()["success"]
        assert [each.result(SECONDS).json()["choices"][0]["text"] for each in asked] == expected


def test_a_pause_ends_requests_by_default(monkeypatch):
    engine = shared_engine("NONE")
    with running(engine) as server, ThreadPoolExecutor(1) as clients:
        slow_down(engine, monkeypatch, 0.02)
        body = {"text": "hello", "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}
        asked = clients.submit(server.post, "/generate", body)
        wait_until(lambda: any(tokens_so_far(server)))
        with server.client() as client:
            assert client.post("/pause_generation").status_code == 200
            assert asked.result(SECONDS).json()["meta_info"]["finish_reason"]["type"] == "abort"
            assert client.post("/continue_generation").status_code == 200
        assert server.complete(max_tokens=2).status_code == 200


def test_a_pause_of_an_unknown_kind(server):
    error = server.post("/pause_generation", {"mode": "softly"}).json()["error"]
    assert error["param"] == "mode" and "in_place" in error["message"] and "softly" in error["message"]
    assert not server.runner.paused


def test_a_request_whose_last_step_a_retraction_reads():
    """No step is left that could return it."""
    engine = shared_engine("NONE")
    sequence = engine.add("hello", SamplingParams(max_new_tokens=3, ignore_eos=True))
    while len(sequence.output.tokens) < 2:  # the step that draws the last token is dispatched ahead
        engine.step()
    engine.retract_all()
    assert sequence.output.finish_reason is not None and not engine.unfinished and engine.changed
    assert sequence in engine.step() and not engine.changed


def test_a_pause_of_a_server_that_drains_can_end():
    engine = shared_engine("NGRAM")
    with running(engine, idle_at_end=False) as server, ThreadPoolExecutor(1) as clients:
        assert server.post("/pause_generation", {"mode": "in_place"}).json()["success"]
        asked = clients.submit(server.complete, "hello", max_tokens=3)
        wait_until(lambda: server.runner.unfinished == 1)
        server.runner.drain()
        assert server.post("/continue_generation", {}).status_code == 200
        assert asked.result(SECONDS).status_code == 200
