"""Tokenising beside the event loop: places in the queue, clients that leave, and who waits for whom."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest
from engine_helpers import shared_engine
from server_helpers import SECONDS, running, wait_until

from specjax.cli.flags import ServerSettings
from specjax.engine.intake import Intake
from specjax.serve import tokenising
from specjax.serve.tokenising import ALLOWANCE, PER_SEQUENCE, SHORT, Tokenising, work

COMPLETE = "/v1/completions"


@pytest.fixture
def blocker():
    """A function for a lane that blocks it until `let_go` is set."""
    let_go, began = threading.Event(), threading.Event()

    def block():
        began.set()
        assert let_go.wait(SECONDS)
        return "done"

    block.let_go, block.began = let_go, began
    yield block
    let_go.set()


def test_short_requests_do_not_wait_for_long_ones(blocker):
    lanes = Tokenising()
    long = lanes.submit(SHORT + 1, blocker)
    assert lanes.submit(SHORT, lambda: "short").result(SECONDS) == "short"
    assert not long.done()
    blocker.let_go.set()
    assert long.result(SECONDS) == "done"


def test_smaller_ones_go_first_but_not_for_ever(blocker, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(tokenising.time, "monotonic", lambda: now[0])
    lanes, order = Tokenising(), []
    lanes.submit(SHORT + 1, blocker)
    assert blocker.began.wait(SECONDS)
    huge = lanes.submit(1_000_000, partial(order.append, "huge"))
    lanes.submit(100_000, partial(order.append, "middle"))
    now[0] += 1_000_000 * ALLOWANCE
    late = lanes.submit(100_000, partial(order.append, "late"))
    blocker.let_go.set()
    huge.result(SECONDS), late.result(SECONDS)
    assert order == ["middle", "huge", "late"]


def test_cancelled_work_is_forgotten(blocker):
    class Prompt:
        pass

    import gc
    import weakref

    lanes, prompt = Tokenising(), Prompt()
    gone = weakref.ref(prompt)
    lanes.submit(SHORT + 1, blocker)
    assert blocker.began.wait(SECONDS)
    waiting = lanes.submit(SHORT + 1, partial(id, prompt))
    del prompt
    assert waiting.cancel()
    gc.collect()
    assert gone() is None, "freed while the lane is still busy"
    blocker.let_go.set()
    assert lanes.submit(SHORT + 1, lambda: 1).result(SECONDS) == 1


def test_errors_reach_who_waits():
    with pytest.raises(ZeroDivisionError):
        Tokenising().submit(0, lambda: 1 / 0).result(SECONDS)


def test_work():
    assert work(["hello"], 1) == 5 + PER_SEQUENCE
    assert work(["hello", "you"], 3) == 8 + 6 * PER_SEQUENCE
    assert work([[5] * 400], 1) == 100 + PER_SEQUENCE
    chat = [{"role": "user", "content": "x" * 1000}, {"role": "tool", "content": "y", "tool_calls": [{}]}]
    assert work([chat], 1) == 4 + 1000 + 4 + 1 + 2 * PER_SEQUENCE


# In the server.


@pytest.fixture
def server(monkeypatch, blocker):
    """Four rows and two places in the queue; prompts that begin with "block" stay with the tokenizer."""
    sequence = Intake.sequence

    def make(self, prompt, sampling, *, id=None):
        if isinstance(prompt, str) and prompt.startswith("block"):
            blocker()
        return sequence(self, prompt, sampling, id=id)

    monkeypatch.setattr(Intake, "sequence", make)
    monkeypatch.setattr(tokenising, "SHORT", 1000)
    with running(shared_engine("NONE"), ServerSettings(max_queued_requests=2)) as served:
        yield served


def ask(server, prompt, **fields) -> socket.socket:
    body = json.dumps({"prompt": prompt, "max_tokens": 1} | fields).encode()
    host, port = server.base.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), timeout=SECONDS)
    sock.sendall(
        f"POST {COMPLETE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return sock


def in_background(function, *args, **options) -> Future:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function, *args, **options)
    pool.shutdown(wait=False)
    return future


LONG = "block " + "x" * 2000
"""Refused once it is tokenised: the context is 128."""


def test_requests_at_the_tokenizer_have_places(server, blocker):
    first = in_background(server.complete, ["block"] * 6, max_tokens=1)
    wait_until(lambda: server.runner.places.taken == 6)
    full = server.complete("x", max_tokens=1)
    assert full.status_code == 503 and "6 requests run or wait; at most 6 may" in full.json()["error"]["message"]
    assert int(full.headers["retry-after"]) > 0
    blocker.let_go.set()
    assert first.result(SECONDS).status_code == 200
    assert server.runner.places.taken == 0


@pytest.mark.parametrize("prompt", ["block", LONG], ids=["at work", "waiting"])
def test_leaving_gives_the_places_back(server, blocker, prompt):
    blocking = ask(server, LONG if prompt == LONG else "block")
    assert blocker.began.wait(SECONDS)
    leaving = ask(server, [prompt] * 5)
    wait_until(lambda: server.runner.places.taken == 6)
    leaving.close()
    wait_until(lambda: server.runner.places.taken == 1)
    blocking.close()
    wait_until(lambda: server.runner.places.taken == 0)
    blocker.let_go.set()
    assert server.complete("x", max_tokens=1).status_code == 200


def test_refused_prompts_give_the_places_back(server):
    for prompt in ("x" * 200, ["ok", "y" * 200], [[5, 99999]]):
        assert server.complete(prompt).status_code == 400
        assert server.runner.places.taken == 0
    twice = {"text": ["a", "b"], "rid": ["r", "r-1"], "sampling_params": {"n": 2, "max_new_tokens": 1}}
    assert server.post("/generate", twice).status_code == 400
    assert server.runner.places.taken == server.runner.places.reserved == 0


def test_draining_while_tokenising(server, blocker):
    answer = in_background(server.complete, "block", max_tokens=1)
    assert blocker.began.wait(SECONDS)
    server.runner.drain()
    blocker.let_go.set()
    assert answer.result(SECONDS).status_code == 503
    assert server.runner.places.taken == 0


def test_huge_prompt_delays_no_short_one(server, blocker):
    huge = in_background(server.complete, LONG)
    assert blocker.began.wait(SECONDS)
    assert server.complete("x", max_tokens=1).status_code == 200
    assert not huge.done()
    blocker.let_go.set()
    assert huge.result(SECONDS).status_code == 400
