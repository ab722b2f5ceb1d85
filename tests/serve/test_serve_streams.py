"""Clients that leave, at every stage; steps that fail; a server that stops. Pages always come back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import jax.numpy as jnp
import numpy as np
import openai
import pytest
from engine_helpers import make_engine, outcome, shared_engine, toy
from server_helpers import MODEL, SECONDS, Brake, Running, braked, running, slow_down, wait_until
from toy_models import random_table, table_model

from specjax.cli.flags import ServerSettings
from specjax.engine import SamplingParams
from specjax.serve.delivery import Listener
from specjax.serve.errors import SHUT_DOWN, State
from specjax.serve.middleware import IN_DRAIN

CHAT, COMPLETE, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
LONG = {"prompt": "hello", "max_tokens": 110, "temperature": 0}
HEADERS = "Host: x\r\nContent-Type: application/json\r\n"


@pytest.fixture
def server():
    with running(shared_engine("NGRAM")) as served:
        yield served


def request(path: str, body: dict, length: int | None = None) -> bytes:
    data = json.dumps(body).encode()
    length = len(data) if length is None else length
    return f"POST {path} HTTP/1.1\r\n{HEADERS}Content-Length: {length}\r\n\r\n".encode() + data


@contextlib.contextmanager
def connection(server: Running):
    host, port = server.base.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=SECONDS) as sock:
        yield sock


def steps_for_nobody(server: Running, brake: Brake) -> int:
    """Steps that run until the engine is idle, of requests whose clients have left while it stood still."""
    server.wait_for_command()
    before = server.engine.counters.steps
    brake.release()
    server.wait_idle()
    return server.engine.counters.steps - before


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETE, GENERATE])
def test_leaving_while_it_runs(server, path, stream):
    body = {"stream": stream} | {
        CHAT: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 80},
        COMPLETE: LONG,
        GENERATE: {"text": "hello", "sampling_params": {"max_new_tokens": 110}},
    }[path]
    with braked(server.engine, after=8) as brake:
        with connection(server) as sock:
            sock.sendall(request(path, body))
            brake.wait()
            assert server.engine.scheduler.running()
        assert steps_for_nobody(server, brake) <= 4, "aborted before the next step, beside those in flight"


def test_leaving_after_some_of_the_stream(server):
    with braked(server.engine, after=20) as brake:
        with connection(server) as sock:
            sock.sendall(request(COMPLETE, LONG | {"stream": True, "n": 3}))
            seen = b""
            while seen.count(b"data: ") < 4:
                seen += sock.recv(4096)
            brake.wait()
        assert steps_for_nobody(server, brake) <= 4


def test_leaving_before_the_body_is_there(server):
    before = server.engine.counters.prefilled_tokens
    for sent in (
        b"POST /v1/completions HTTP/1.1\r\nHo",
        request(COMPLETE, LONG, length=10_000),
        request(COMPLETE, LONG)[:-5],
    ):
        with connection(server) as sock:
            sock.sendall(sent)
    assert server.complete(max_tokens=1).status_code == 200
    assert server.engine.counters.prefilled_tokens - before <= len("hello"), "nothing else ran"


def test_leaving_while_it_waits(server):
    """Four rows: the fifth has no slot yet."""
    body = LONG | {"prompt": ["hello"] * 4, "stream": True}
    with (
        braked(server.engine, after=8) as brake,
        server.client() as client,
        client.stream("POST", COMPLETE, json=body),
    ):
        brake.wait()
        assert len(server.engine.scheduler.active) == 4
        with connection(server) as sock:
            sock.sendall(request(COMPLETE, LONG))
            server.wait_for_command()
            brake.allow(1)
            brake.wait()
            assert len(server.engine.scheduler.waiting) == 1
        server.wait_for_command()
        brake.allow(1)
        brake.wait()
        assert not server.engine.scheduler.waiting and server.runner.unfinished == 4


def test_leaving_during_a_long_prompt(server):
    prompt = server.engine.encode("x" * 100)  # thirteen chunks
    with braked(server.engine, after=4) as brake:
        with connection(server) as sock:
            sock.sendall(request(COMPLETE, {"prompt": prompt, "max_tokens": 5}))
            brake.wait()
            assert any(0 < s.active_slot.prefilled < 100 for s in server.engine.scheduler.active)
        assert steps_for_nobody(server, brake) <= 4


def test_leaving_just_before_the_end(server):
    for _ in range(3):
        with connection(server) as sock:
            sock.sendall(request(COMPLETE, {"prompt": "hello", "max_tokens": 2, "stream": True}))
            seen = b""
            while b'"finish_reason": "length"' not in seen:
                seen += sock.recv(4096)
    server.wait_idle()


def test_the_async_client_cancels(server):
    async def leave(brake: Brake):
        async with openai.AsyncOpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client:
            call = asyncio.ensure_future(client.completions.create(model=MODEL, prompt="hello", max_tokens=110))
            await asyncio.to_thread(brake.wait)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call
            await asyncio.to_thread(server.wait_for_command)
            brake.allow(8)
            stream = await client.completions.create(model=MODEL, prompt="hello", max_tokens=110, stream=True)
            async for _ in stream:
                break
            await asyncio.to_thread(brake.wait)
            await stream.close()

    with braked(server.engine, after=2) as brake:
        asyncio.run(leave(brake))
        assert steps_for_nobody(server, brake) <= 4


def test_others_go_on_when_one_leaves(server):
    expected = outcome(shared_engine("NONE").generate("hello", SamplingParams(max_new_tokens=40)))[0]
    body = {"prompt": "hello", "max_tokens": 40, "temperature": 0}
    with ThreadPoolExecutor(1) as clients, braked(server.engine, after=3) as brake:
        with connection(server) as sock:
            sock.sendall(request(COMPLETE, LONG | {"prompt": "another", "stream": True}))
            brake.wait()
            stays = clients.submit(server.events, COMPLETE, body)
            wait_until(lambda: server.runner.unfinished == 2)
            brake.allow(5)
            brake.wait()
            assert len(server.engine.scheduler.running()) == 2
        server.wait_for_command()
        brake.release()
        assert "".join(event["choices"][0]["text"] for event in stays.result(SECONDS)) == expected


def test_each_step_is_sent_at_once(server):
    """Not collected: the first tokens are here long before the last."""
    with (
        braked(server.engine, after=8) as brake,
        server.client() as client,
        client.stream("POST", COMPLETE, json=LONG | {"stream": True}) as response,
    ):
        chunks = response.iter_raw()
        while b'"text": ""' in next(chunks):
            pass
        brake.wait()
        assert server.runner.unfinished == 1, "text came while it runs"


@pytest.mark.parametrize("path", [CHAT, COMPLETE, GENERATE])
def test_a_stream_begins_with_its_first_event(server, path):
    """Nothing is sent before: until then a router can give the request to another worker."""
    body = {CHAT: {"messages": [{"role": "user", "content": "x"}]}, COMPLETE: {"prompt": "x"}, GENERATE: {"text": "x"}}
    stop = threading.Event()
    server.runner.call(lambda engine: stop.wait(SECONDS))
    with connection(server) as sock:
        sock.sendall(request(path, body[path] | {"stream": True}))
        try:
            wait_until(lambda: server.runner.unfinished)
            sock.settimeout(0.3)
            with pytest.raises(TimeoutError):
                sock.recv(1)
        finally:
            stop.set()
        sock.settimeout(SECONDS)
        assert sock.recv(4096).startswith(b"HTTP/1.1 200")
    server.wait_idle()


def test_stream_interval(monkeypatch):
    body = {"prompt": "hello", "max_tokens": 40, "temperature": 0}
    with running(shared_engine("NONE"), ServerSettings(stream_interval=10)) as server:
        few = server.events(COMPLETE, body)
        whole = server.complete(**body).json()["choices"][0]["text"]
    with running(shared_engine("NONE")) as server:
        many = server.events(COMPLETE, body)
    assert len(few) <= 6 < 30 < len(many)
    assert "".join(e["choices"][0]["text"] for e in few) == "".join(e["choices"][0]["text"] for e in many) == whole


class Boom(RuntimeError):
    pass


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_fails_ends_its_requests_and_nothing_else(monkeypatch, stream, caplog):
    engine = shared_engine("NGRAM")
    with running(engine) as server:
        before = server.complete(**LONG).json()["choices"][0]["text"]
        schedule = engine._schedule
        left = iter(range(5))

        def fail():
            if next(left, None) == 4:
                raise Boom("the device is on fire")
            return schedule()

        monkeypatch.setattr(engine, "_schedule", fail)
        body = LONG | {"prompt": ["hello", "other"]}
        if stream:
            with server.client() as client, client.stream("POST", COMPLETE, json=body | {"stream": True}) as response:
                events = response.read().decode().strip().split("\n\n")
            error = json.loads(events[-1].removeprefix("data: "))
        else:
            response = server.post(COMPLETE, body)
            assert response.status_code == 503
            error = response.json()
        assert "engine failed" in error["error"]["message"] and "fire" not in str(error), "no internals"
        assert "fire" in caplog.text
        server.wait_idle()
        assert server.complete(**LONG).json()["choices"][0]["text"] == before
        with server.client() as client:
            assert client.get("/health").status_code == 200


def test_one_request_that_cannot_be_handled_takes_no_other_down(monkeypatch, caplog):
    with running(shared_engine("NGRAM")) as server:
        good = server.complete(**LONG).json()["choices"][0]["text"]
        slow_down(server.engine, monkeypatch, 0.03)
        decode = server.engine.tokenizer.decode
        bad_token = 99

        def fail(ids, **options):
            if bad_token in ids:
                raise Boom("no such character")
            return decode(ids, **options)

        monkeypatch.setattr(server.engine.tokenizer, "decode", fail)

        async def both():
            async with httpx.AsyncClient(base_url=server.base, timeout=SECONDS) as client:
                bias = {str(bad_token): 100}
                first = client.post(COMPLETE, json=LONG)
                second = client.post(COMPLETE, json=LONG | {"prompt": "other", "logit_bias": bias})
                return await asyncio.gather(first, second)

        fine, broken = asyncio.run(both())
        assert fine.json()["choices"][0]["text"] == good
        assert broken.status_code == 500 and "Boom" in caplog.text and "Boom" not in broken.text


def test_an_engine_that_cannot_start_anew_is_unhealthy(monkeypatch):
    engine = make_engine(toy())

    def fail(*_):
        raise Boom

    with running(engine, idle_at_end=False) as server, server.client() as client:
        monkeypatch.setattr(engine, "step", fail)
        monkeypatch.setattr(engine, "reset", fail)
        assert server.complete(**LONG).status_code == 503
        wait_until(lambda: server.runner.state is State.FAILED)
        for path in ("/health", "/v1/models"):
            assert client.get(path).status_code == 503


def test_a_draining_server():
    engine = shared_engine("NGRAM")
    with (
        running(engine, idle_at_end=False) as server,
        braked(engine, after=4),
        server.client() as client,
        client.stream("POST", COMPLETE, json=LONG | {"stream": True}) as response,
    ):
        chunks = response.iter_raw()
        seen = next(chunks)
        server.runner.drain()
        for answer in (server.complete("x"), *map(client.get, ("/health", "/health_generate", "/flush_cache"))):
            assert answer.status_code == 503 and answer.headers["retry-after"]
            assert "shutting down" in answer.json()["error"]["message"]
        for path in IN_DRAIN - {"/abort_request", "/continue_generation"} | {"/v1/loads", "/get_load"}:
            assert client.get(path).status_code == client.head(path).status_code == 200, path
        assert client.get("/get_load").json()[0]["num_reqs"] == 1
        assert client.post("/abort_request", json={"rid": "unknown"}).status_code == 200
        assert "\nsglang:num_running_reqs{" in client.get("/metrics").text
        server.runner.end_all(SHUT_DOWN)
        seen += b"".join(chunks)
    last = json.loads(seen.decode().strip().split("\n\n")[-1].removeprefix("data: "))
    assert SHUT_DOWN in last["error"]["message"]
    engine.reset("the test has ended")


def test_while_loading():
    """The port is open, and says so."""
    engine, gate = shared_engine("NONE"), threading.Event()

    def load():
        assert gate.wait(SECONDS)
        return engine

    with running(engine, load=load) as server, server.client() as client:
        for answer in (client.get("/health"), client.get("/v1/models"), client.post(COMPLETE, json=LONG)):
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
            assert "loading" in answer.json()["error"]["message"]
        server.runner.drain()
        assert client.get("/metrics").status_code == 503, "there is nothing to tell of"
        server.runner._state = State.LOADING
        gate.set()
        wait_until(lambda: client.get("/health").status_code == 200)
        assert client.post(COMPLETE, json=LONG).status_code == 200


def test_ids_that_would_collide_are_refused(server):
    """Choice 1 of `a` is named `a-1`."""
    body = {"text": ["hi", "ho"], "rid": ["a", "a-1"], "sampling_params": {"max_new_tokens": 1, "n": 2}}
    answer = server.post(GENERATE, body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "rid"
    assert server.complete(max_tokens=1).status_code == 200


def test_leaving_late_does_not_end_who_has_the_id_now(server):
    """The first request is done in the engine, but its client still listens when the id is used again."""
    intake, params = server.engine.intake, SamplingParams(max_new_tokens=8)

    async def both():
        first = Listener([intake.sequence("hello", params, id="x")])
        server.runner.submit(first)
        assert [chunk async for chunk in first.chunks()][-1].completion is not None
        second = Listener([intake.sequence("other", params, id="x")])
        server.runner.submit(second)
        server.runner.abort(first.sequences)
        return [chunk async for chunk in second.chunks()][-1].completion

    done = asyncio.run(asyncio.wait_for(both(), SECONDS))
    assert done.finish_reason["type"] == "length" and len(done.output_ids) == 8


def test_who_had_finished_in_a_step_that_fails_is_told(monkeypatch):
    with running(shared_engine("NONE")) as server:
        engine, left = server.engine, iter([True])
        finish = engine.finish

        def fail(sequence):
            finish(sequence)
            if next(left, False):
                raise Boom

        monkeypatch.setattr(engine, "finish", fail)
        assert server.complete(max_tokens=3, temperature=0).json()["choices"][0]["finish_reason"] == "length"
        server.wait_idle()


def test_a_command_that_fails_ends_nothing(server):
    def fail(engine):
        raise Boom

    with pytest.raises(Boom):
        server.runner.call(fail).result(SECONDS)
    with server.runner._wake:
        server.runner._command(lambda: fail(None))
    assert server.complete(max_tokens=1).status_code == 200


def test_the_first_request_for_log_probabilities_compiles_nothing():
    """They are a part of every step, so that who asks for them first does not wait for a compiler."""
    engine = make_engine(toy(), max_running_requests=2)
    with running(engine) as server:
        plain = server.complete("hello", max_tokens=5, temperature=0).json()["choices"][0]
        compiled = engine.programs.compiled()
        asked = server.complete("hello", max_tokens=5, temperature=0, logprobs=1).json()["choices"][0]
        assert engine.programs.compiled() == compiled
        assert asked["text"] == plain["text"] and len(asked["logprobs"]["tokens"]) == 5


def test_logits_that_are_not_finite_are_a_500_of_their_request_alone():
    """The row of logits after an 11 holds a NaN. Whole, as a stream, and with others beside it."""
    table = np.asarray(random_table(3, rows=265, vocab=265))
    table[11] = np.nan
    engine = make_engine(table_model(jnp.asarray(table), window=1), "NONE", max_running_requests=2)
    with running(engine) as server:
        others = [threading.Thread(target=server.complete, args=([5, 6],), kwargs={"max_tokens": 60}) for _ in range(2)]
        for thread in others:
            thread.start()
        refused = server.complete([7, 11], max_tokens=5)
        assert refused.status_code == 500
        assert "logits are not finite (NaN or infinity) after 0 tokens" in refused.json()["error"]["message"]
        body = {"prompt": [5, 6], "max_tokens": 5, "stream": True, "temperature": 0, "logit_bias": {"11": 100}}
        with server.client() as client:
            lines = client.post(COMPLETE, json=body).text.split("\n\n")
        assert (
            "after 1 tokens"
            in json.loads([line for line in lines if line][-1].removeprefix("data: "))["error"]["message"]
        )
        done = server.complete([5, 6], max_tokens=5, temperature=0, logit_bias={"11": -100})
        assert done.status_code == 200 and done.json()["usage"]["completion_tokens"] == 5
        for thread in others:
            thread.join(SECONDS)


def test_a_text_far_too_long_is_not_tokenised(server):
    answer = server.complete("x" * 5000)
    assert answer.status_code == 400 and "5000 characters" in answer.json()["error"]["message"]
    answer = server.complete(["x"] * 100_000)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt"


def test_request_ids_are_logged(server, caplog):
    with caplog.at_level("INFO", logger="specjax.serve"), server.client() as client:
        client.get("/health", headers={"X-Request-Id": "find-me"})
    assert '"GET /health HTTP/1.1" 200, request find-me' in caplog.text


def test_methods_and_slashes(server):
    with server.client() as client:
        assert set(client.get(GENERATE).headers["allow"].split(", ")) == {"POST", "PUT"}
        assert set(client.delete("/flush_cache").headers["allow"].split(", ")) == {"GET", "HEAD", "POST"}
        answer = client.post(f"{COMPLETE}/", json=LONG, headers={"Host": "evil.example"})
        assert answer.status_code == 404 and "location" not in answer.headers and answer.json()["error"]
        assert client.put(GENERATE, json={"text": "x", "sampling_params": {"max_new_tokens": 1}}).status_code == 200
