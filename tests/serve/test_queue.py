"""Requests that wait: tokenising, places in the queue, priorities, pauses."""

from __future__ import annotations

import time

import pytest
from body_helpers import COMPLETE, GENERATE
from engine_helpers import check_idle, idle_sequence, make_engine, shared_engine, toy
from integrity import check_integrity
from server_helpers import (
    SECONDS,
    Running,
    braked,
    check_error,
    in_background,
    request,
    running,
    slow_down,
    wait_until,
)

from specjax.cli.flags import ServerSettings
from specjax.engine import SamplingParams
from specjax.engine.intake import Intake
from specjax.engine.scheduler import Scheduler
from specjax.serve import tokenising
from specjax.serve.tokenising import Tokenising


@pytest.fixture(scope="module")
def server():
    """Four rows and two places in the queue."""
    with running(shared_engine("NONE"), ServerSettings(max_queued_requests=2)) as served:
        yield served


# Lanes of the tokenizer.


def test_grammars_have_a_lane(hang):
    lanes = Tokenising()
    slow = [lanes.submit(100, hang, compiles=True) for _ in range(3)]
    assert lanes.submit(100, lambda: 5).result(SECONDS) == 5 and not any(job.done() for job in slow)
    hang.let_go.set()
    assert [job.result(SECONDS) for job in slow] == [[]] * 3


# Places.

LONG = "block " + "x" * 2000
"""Refused after it is tokenised, because the context is 128."""


@pytest.fixture
def blocked(server, monkeypatch, hang):
    """Tokenising a prompt that begins with "block" blocks its lane."""
    sequence = Intake.sequence

    def make(self, prompt, sampling, *, id=None):
        if isinstance(prompt, str) and prompt.startswith("block"):
            hang()
        return sequence(self, prompt, sampling, id=id)

    monkeypatch.setattr(Intake, "sequence", make)
    monkeypatch.setattr(tokenising, "SHORT", 1000)
    return server


def test_requests_at_the_tokenizer_have_places(blocked, hang):
    first = in_background(blocked.complete, ["block"] * 6, max_tokens=1)
    wait_until(lambda: blocked.runner.places.taken == 6)
    full = blocked.complete("x", max_tokens=1)
    check_error(full, 503, text="6 requests run or wait; at most 6 may")
    assert int(full.headers["retry-after"]) > 0
    hang.let_go.set()
    assert first.result(SECONDS).status_code == 200
    assert blocked.runner.places.taken == 0


@pytest.mark.parametrize("prompt", ["block", LONG], ids=["tokenised", "waiting"])
def test_leaving_frees_the_places(blocked, hang, prompt):
    with blocked.connected(request(COMPLETE, {"prompt": LONG if prompt == LONG else "block", "max_tokens": 1})):
        assert hang.began.wait(SECONDS)
        with blocked.connected(request(COMPLETE, {"prompt": [prompt] * 5, "max_tokens": 1})):
            wait_until(lambda: blocked.runner.places.taken == 6)
        wait_until(lambda: blocked.runner.places.taken == 1)
    wait_until(lambda: blocked.runner.places.taken == 0)
    hang.let_go.set()
    assert blocked.complete("x", max_tokens=1).status_code == 200


def test_refused_prompts_free_the_places(server):
    for prompt in ("x" * 200, ["ok", "y" * 200], [[5, 99999]]):
        assert server.complete(prompt).status_code == 400
        assert server.runner.places.taken == 0
    # Choice 1 of `r` would be named `r-1`.
    twice = {"text": ["a", "b"], "rid": ["r", "r-1"], "sampling_params": {"n": 2, "max_new_tokens": 1}}
    check_error(server.post(GENERATE, twice), 400, "rid")
    assert server.runner.places.taken == server.runner.places.reserved == 0


def test_huge_prompt_delays_no_short_one(blocked, hang):
    huge = in_background(blocked.complete, LONG)
    assert hang.began.wait(SECONDS)
    assert blocked.complete("x", max_tokens=1).status_code == 200
    assert not huge.done()
    hang.let_go.set()
    assert huge.result(SECONDS).status_code == 400


def test_drain_while_tokenising(hang, monkeypatch):
    engine, sequence = make_engine(toy(), "NONE"), Intake.sequence
    monkeypatch.setattr(Intake, "sequence", lambda *a, **options: (hang(), sequence(*a, **options))[1])
    with running(engine) as server:
        answer = in_background(server.complete, "block", max_tokens=1)
        assert hang.began.wait(SECONDS)
        server.runner.drain()
        hang.let_go.set()
        assert answer.result(SECONDS).status_code == 503
        assert server.runner.places.taken == 0


def test_full_queue_and_used_id(server):
    """A full queue says when to try again; the id of a running request is refused."""
    body = {"text": ["hello"] * 6, "rid": "twice", "sampling_params": {"max_new_tokens": 100}, "stream": True}
    with braked(server.engine, after=8), server.client() as client, client.stream("POST", GENERATE, json=body) as first:
        assert first.status_code == 200
        full = server.complete("x", max_tokens=1)
        assert check_error(full, 503, text="queue is full")["type"] == "server_error"
        assert int(full.headers["retry-after"]) >= 1
    server.wait_idle()
    check_error(server.complete(["hello"] * 7, max_tokens=1), 400, text="7 choices")
    again = {"text": "hello", "rid": "twice", "sampling_params": {"max_new_tokens": 2}}
    with (
        braked(server.engine, after=4),
        server.client() as client,
        client.stream("POST", GENERATE, json=again | {"stream": True, "sampling_params": {"max_new_tokens": 100}}),
    ):
        check_error(server.post(GENERATE, again), 400, "rid", "'twice' is running")
    server.wait_idle()
    assert server.post(GENERATE, again).status_code == 200


# Priorities.


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_highest_priority_is_first_within_limits(policy):
    scheduler = Scheduler(rows=1, pages=8, page_size=2, lookahead=3, policy=policy)

    def add(number: int, priority: int):
        sequence = idle_sequence(SamplingParams(priority=priority), id=str(number), arrival=number, limit=3)
        scheduler.add(sequence)
        return sequence

    def next_id() -> str:
        (sequence,) = scheduler.admit()
        scheduler.finish(sequence)
        return sequence.id

    for number, priority in enumerate((0, -1, 3, 0, 3)):
        add(number, priority)
    assert [next_id() for _ in range(5)] == ["2", "4", "0", "3", "1"]


def test_lowest_priority_is_retracted_first():
    engine = make_engine(toy(), "NONE", max_total_tokens=96)
    prompts = ["hello", "other", "third"]
    params = [SamplingParams(max_new_tokens=40, priority=priority, seed=1) for priority in (-1, 2, 0)]
    retracted, retract = [], engine.scheduler.retract
    engine.scheduler.retract = lambda sequence: (retracted.append(sequence.params.priority), retract(sequence))
    completions = engine.generate(prompts, params)
    assert retracted and 2 not in retracted and retracted[0] == -1
    plain = make_engine(toy(), "NONE")
    for prompt, done in zip(prompts, completions, strict=True):
        assert done.text == plain.generate(prompt, SamplingParams(max_new_tokens=40)).text
    check_idle(engine)


# SGLang's `/pause_generation` and `/continue_generation`.


def tokens_so_far(server: Running) -> list[int]:
    def count(engine):
        return [len(sequence.output.tokens) for sequence in engine.scheduler.active]

    return server.runner.call(count).result(SECONDS)


@pytest.fixture(scope="module")
def drafting():
    with running(shared_engine("NGRAM")) as served:
        yield served


@pytest.mark.parametrize(("name", "mode"), [("server", "retract"), ("drafting", "retract"), ("drafting", "in_place")])
def test_pause_changes_no_text(request, name, mode):
    server: Running = request.getfixturevalue(name)
    fields = {"max_tokens": 60, "ignore_eos": True, "seed": 3}
    expected = [server.complete("hello " * n, **fields).json()["choices"][0]["text"] for n in range(1, 5)]
    with braked(server.engine, after=12) as brake:
        with server.blocked():
            jobs = [in_background(server.complete, "hello " * n, **fields) for n in range(1, 4)]
            wait_until(lambda: server.runner.unfinished == 3)
        brake.wait()
        pause = in_background(server.post, "/pause_generation", {"mode": mode})
        server.wait_for_command()
    assert pause.result(SECONDS).json()["success"]
    jobs.append(in_background(server.complete, "hello " * 4, **fields))
    wait_until(lambda: server.runner.unfinished == 4)
    before = tokens_so_far(server)
    assert not before if mode == "retract" else max(before) > 2
    assert server.runner.call(check_integrity).result(SECONDS) is None
    time.sleep(0.2)
    assert tokens_so_far(server) == before and not any(job.done() for job in jobs)
    (load,) = server.get("/v1/loads").json()["loads"]
    retracted = load["queues"]["retracted"]
    assert load["queues"]["paused"] == load["num_running_reqs"] == len(before) == 4 - load["num_waiting_reqs"]
    assert 0 < retracted <= 3 if mode == "retract" else retracted == 0
    assert server.get("/health").status_code == 200
    assert server.get("/health_generate").status_code == 503
    assert server.post("/continue_generation", {}).json()["success"]
    assert [job.result(SECONDS).json()["choices"][0]["text"] for job in jobs] == expected


def test_pause_aborts_requests_by_default(server, monkeypatch):
    error = check_error(server.post("/pause_generation", {"mode": "softly"}), 400, "mode", "in_place")
    assert "softly" in error["message"] and not server.runner.paused
    slow_down(server.engine, monkeypatch, 0.02)
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}
    job = in_background(server.post, GENERATE, body)
    wait_until(lambda: any(tokens_so_far(server)))
    with server.client() as client:
        assert client.post("/pause_generation").status_code == 200
        assert job.result(SECONDS).json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert client.post("/continue_generation").status_code == 200
    assert server.complete(max_tokens=2).status_code == 200


def test_retraction_that_reads_the_last_token():
    """No later step would return that request."""
    engine = make_engine(toy(), "NONE")
    sequence = engine.add("hello", SamplingParams(max_new_tokens=3, ignore_eos=True))
    while len(sequence.output.tokens) < 2:  # the step that draws the last token is dispatched ahead
        engine.step()
    engine.retract_all()
    assert sequence.output.finish_reason is not None and not engine.unfinished and engine.changed
    assert sequence in engine.step() and not engine.changed


def test_pause_can_end_during_a_drain():
    with running(make_engine(toy(), "NONE"), idle_at_end=False) as server:
        assert server.post("/pause_generation", {"mode": "in_place"}).json()["success"]
        job = in_background(server.complete, "hello", max_tokens=3)
        wait_until(lambda: server.runner.unfinished == 1)
        server.runner.drain()
        assert server.post("/continue_generation", {}).status_code == 200
        assert job.result(SECONDS).status_code == 200
