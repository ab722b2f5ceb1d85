"""How long requests wait and run: priorities, deadlines, and the end of the server."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from body_helpers import CHAT, COMPLETE, GENERATE, LEAST, refusal, task
from engine_helpers import check_idle, idle_sequence, make_engine, shared_engine, toy
from server_helpers import SECONDS, begun, braked, running, wait_until

from specjax.cli.flags import ServerSettings
from specjax.engine import SamplingParams
from specjax.engine.sampling_params import MAX_PRIORITY
from specjax.engine.scheduler import OVERTAKEN, Scheduler

# Priorities


@pytest.mark.parametrize("path", LEAST)
def test_where_it_is_given(path):
    for given, expected in ((None, 0), (5, 5), (-3, -3), (2.0, 2), (MAX_PRIORITY, MAX_PRIORITY)):
        assert task(path, LEAST[path] | {"priority": given}).sampling[0].priority == expected
    for wrong in (MAX_PRIORITY + 1, 1.5, "1", True):
        error = refusal(path, LEAST[path] | {"priority": wrong})
        assert error is not None and error.param == "priority"


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_the_highest_comes_first_and_nobody_starves(policy):
    scheduler = Scheduler(rows=1, pages=8, page_size=2, lookahead=3, policy=policy)

    def add(number: int, priority: int):
        sequence = idle_sequence(SamplingParams(priority=priority), id=str(number), arrival=number, limit=3)
        scheduler.add(sequence)
        return sequence

    def next_one() -> str:
        (sequence,) = scheduler.admit()
        scheduler.finish(sequence)
        return sequence.id

    for number, priority in enumerate((0, -1, 3, 0, 3)):
        add(number, priority)
    assert [next_one() for _ in range(5)] == ["2", "4", "0", "3", "1"]
    low = add(100, -5)
    order = []
    while low in scheduler.waiting:
        add(101 + len(order), 1)
        order.append(next_one())
    assert len(order) == OVERTAKEN + 1 and order[-1] == "100"


def test_the_lowest_is_retracted_first():
    engine = make_engine(toy(), "NONE", max_total_tokens=96)
    prompts = ["hello", "other", "third"]
    each = [SamplingParams(max_new_tokens=40, priority=priority, seed=1) for priority in (-1, 2, 0)]
    retracted, retract = [], engine.scheduler._retract
    engine.scheduler._retract = lambda sequence: (retracted.append(sequence.params.priority), retract(sequence))
    found = engine.generate(prompts, each)
    assert retracted and 2 not in retracted and retracted[0] == -1
    plain = shared_engine("NONE")
    for prompt, done in zip(prompts, found, strict=True):
        assert done.text == plain.generate(prompt, SamplingParams(max_new_tokens=40)).text
    check_idle(engine)


def test_over_http_the_one_with_the_highest_runs_first():
    engine = make_engine(toy(), "NONE", max_running_requests=1)
    ended, finish = [], engine.scheduler.finish
    engine.scheduler.finish = lambda sequence: (ended.append(sequence.params.priority), finish(sequence))[1]
    with running(engine) as server:
        stop, codes = threading.Event(), []
        server.runner.call(lambda engine: stop.wait(SECONDS))

        def send(priority: int) -> None:
            codes.append(server.complete("hello", max_tokens=2, priority=priority).status_code)

        threads = []
        try:
            for count, priority in enumerate((0, 1, 2), start=1):
                threads.append(threading.Thread(target=send, args=(priority,)))
                threads[-1].start()
                wait_until(lambda count=count: server.runner.unfinished == count)
        finally:
            stop.set()
        for thread in threads:
            thread.join(SECONDS)
        assert codes == [200, 200, 200]
        assert ended == [2, 1, 0], "in the engine: the answers of two may overtake each other on the way"


# Deadlines


@pytest.fixture(scope="module")
def server():
    with running(shared_engine("NGRAM")) as served:
        yield served


@pytest.mark.parametrize("path", [CHAT, COMPLETE, GENERATE])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_ends_at_its_deadline(server, path, stream):
    stop = threading.Event()
    server.runner.call(lambda engine: stop.wait(SECONDS))
    try:
        body = LEAST[path] | {"timeout": 0.2, "stream": stream}
        answer = begun(lambda: server.post(path, body)) if stream else server.post(path, body)
    finally:
        stop.set()
    if stream:
        assert answer.status_code == 200
        assert answer.text.count("data: ") == 1 and '"code": "timeout"' in answer.text
    else:
        assert answer.status_code == 408 and answer.headers["x-should-retry"] == "false"
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("timeout", "timeout") and "0.2 s" in error["message"]
    server.wait_idle()


def test_the_servers_own_limit_and_a_shorter_one():
    with running(shared_engine("NONE"), ServerSettings(request_timeout=0.4)) as server:
        for field, said in (({}, "0.4 s"), ({"timeout": 100}, "0.4 s"), ({"timeout": 0.1}, "0.1 s")):
            stop = threading.Event()
            server.runner.call(lambda engine, stop=stop: stop.wait(SECONDS))
            try:
                answer = server.complete("hello", **field)
            finally:
                stop.set()
            assert answer.status_code == 408 and said in answer.json()["error"]["message"]
            server.wait_idle()
        wait_until(lambda: server.complete("hello", max_tokens=1).status_code == 200)  # a busy machine may miss it


def test_a_stream_that_has_begun_ends_there():
    engine = shared_engine("NONE")
    body = {"prompt": "hello", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with running(engine) as server:
        server.complete("hello", max_tokens=2)  # compiled
        for seconds in (0.3, 3.0, 30.0):  # a busy machine may need more for a few steps
            with braked(engine, after=6):
                lines = server.post("/v1/completions", body | {"timeout": seconds}).text.split("\n\n")
            server.wait_idle()
            if len(lines) > 3:
                break
        assert len(lines) > 3 and '"code": "timeout"' in lines[-2] and lines[-1] == ""


def test_openais_client_does_not_send_it_again(server):
    stop, before = threading.Event(), server.runner.traffic.requests
    server.runner.call(lambda engine: stop.wait(SECONDS))
    try:
        with (
            openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=2) as client,
            pytest.raises(openai.APIStatusError) as caught,
        ):
            client.completions.create(model="toy", prompt="hello", extra_body={"timeout": 0.1})
    finally:
        stop.set()
    assert caught.value.status_code == 408 and server.runner.traffic.requests == before + 1
    server.wait_idle()


@pytest.mark.parametrize("wrong", [0, -1, "1", True, 1e7])
def test_timeouts_that_are_refused(wrong):
    for path in LEAST:
        error = refusal(path, LEAST[path] | {"timeout": wrong})
        assert error is not None and error.param == "timeout"


# Draining and names of requests


def test_draining_answers_health_with_a_503_and_ends_what_runs():
    engine = shared_engine("NONE")
    with running(engine, idle_at_end=False) as server, ThreadPoolExecutor(1) as clients:
        server.server._timeout = SECONDS
        body = {"prompt": "hello", "max_tokens": 30, "ignore_eos": True}
        with braked(engine, after=3) as brake:
            answer = clients.submit(server.post, "/v1/completions", body)
            brake.wait()
            server.server.signal(signal.SIGTERM)
            wait_until(lambda: server.runner.state.value == "draining")
            with server.client() as client:
                found = [client.get("/health").status_code, client.post("/v1/completions", json=body).status_code]
            assert found == [503, 503]
        assert answer.result(SECONDS).status_code == 200
        assert len(answer.result().json()["choices"][0]["text"]) > 0


@pytest.mark.parametrize(
    ("given", "kept"), [("abc-1", True), ("x" * 128, True), ("x" * 129, False), ("a\tb", False), ("", False)]
)
def test_request_ids(server, given, kept, caplog):
    with caplog.at_level("INFO", logger="specjax.serve"), server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": given})
    assert answer.status_code == 200
    assert (answer.headers["X-Request-Id"] == given) == kept and answer.headers["X-Request-Id"]
    assert any(answer.headers["X-Request-Id"] in record.getMessage() for record in caplog.records)
