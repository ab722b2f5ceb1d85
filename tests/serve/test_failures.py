"""Engines that fail, hang or cannot be allocated: their requests get an error, and other requests continue."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import httpx
import jax.numpy as jnp
import numpy as np
import pytest
from body_helpers import COMPLETE
from engine_helpers import make_engine, toy
from server_helpers import SECONDS, check_error, in_background, running, wait_until
from toy_models import random_table, table_model

import specjax
from specjax.cli.flags import ServerSettings
from specjax.engine.generation import DeltaReader
from specjax.serve.errors import ENGINE_GONE, ENGINE_STUCK, State
from specjax.serve.runner import EngineStuck, Watchdog

QUICK = ServerSettings(watchdog_timeout=0.1)
BODY = {"prompt": "hello", "max_tokens": 5}
LONG = {"prompt": "hello", "max_tokens": 110, "temperature": 0}


# Failures of one step, command or text.


@pytest.mark.parametrize("stream", [False, True])
def test_failed_step_ends_its_requests(server, monkeypatch, stream, caplog):
    before = server.complete(**LONG).json()["choices"][0]["text"]
    schedule, left = server.engine._plan, iter(range(5))

    def fail():
        if next(left, None) == 4:
            raise RuntimeError("the device is on fire")
        return schedule()

    with monkeypatch.context() as patch:
        patch.setattr(server.engine, "_plan", fail)
        body = LONG | {"prompt": ["hello", "other"]}
        response = server.post(COMPLETE, body | {"stream": stream})
    if stream:
        assert '"error"' in response.text.strip().split("\n\n")[-1]
    else:
        check_error(response, 503)
    assert "engine failed" in response.text and "fire" not in response.text, "no internals"
    assert "fire" in caplog.text
    server.wait_idle()
    assert server.complete(**LONG).json()["choices"][0]["text"] == before
    assert server.get("/health").status_code == 200


def test_request_that_ended_in_a_failed_step_is_answered(server, monkeypatch):
    runtime, left = server.engine.runtime, iter([True])
    finish = runtime.finish

    def fail(sequence):
        finish(sequence)
        if next(left, False):
            raise RuntimeError

    monkeypatch.setattr(runtime, "finish", fail)
    assert server.complete(max_tokens=3, temperature=0).json()["choices"][0]["finish_reason"] == "length"
    server.wait_idle()


def test_failed_command_ends_no_request(server):
    def fail(engine):
        raise RuntimeError("no such command")

    with pytest.raises(RuntimeError, match="no such command"):
        server.runner.call(fail).result(SECONDS)
    with server.runner._wake:
        server.runner._command(lambda: fail(None))
    assert server.complete(max_tokens=1).status_code == 200


def test_failed_text_ends_its_request_alone(server, monkeypatch, caplog):
    take = DeltaReader.take

    def fail(reader, *others):
        if len(reader.sequence.prompt) == 3:
            raise RuntimeError("no such text")
        return take(reader, *others)

    monkeypatch.setattr(DeltaReader, "take", fail)
    good = in_background(server.complete, **LONG)
    for stream, stop in product((False, True), ([], ["never"])):  # stop strings: the engine's thread makes the text
        fields = {"prompt": [70, 71, 72], "stream": stream, "max_tokens": 50, "stop": stop}
        broken = server.post(COMPLETE, BODY | fields)
        assert broken.status_code == 500 or ('"error"' in broken.text and stream)
        assert "no such text" in caplog.text and "no such text" not in broken.text
    assert good.result(SECONDS).json()["usage"]["completion_tokens"] == 110


def test_logits_that_are_not_finite_fail_their_request_alone():
    """The row of logits after token 11 holds a NaN."""
    table = np.asarray(random_table(3, rows=265, vocab=265))
    table[11] = np.nan
    engine = make_engine(table_model(jnp.asarray(table), window=1), "NONE", max_running_requests=2)
    with running(engine) as server:
        others = [in_background(server.complete, [5, 6], max_tokens=60) for _ in range(2)]
        refused = server.complete([7, 11], max_tokens=5)
        check_error(refused, 500, text="logits are not finite (NaN or infinity) after 0 tokens")
        body = {"prompt": [5, 6], "max_tokens": 5, "stream": True, "temperature": 0, "logit_bias": {"11": 100}}
        assert "after 1 tokens" in server.post(COMPLETE, body).text.strip().split("\n\n")[-1]
        done = server.complete([5, 6], max_tokens=5, temperature=0, logit_bias={"11": -100})
        assert done.status_code == 200 and done.json()["usage"]["completion_tokens"] == 5
        for other in others:
            other.result(SECONDS)


# The watchdog.


class Watched:
    def __init__(self) -> None:
        self.beat: int | None = 1
        self.excused = False
        self.dog = Watchdog(
            timeout=10.0, beat=lambda: self.beat, excused=lambda: self.excused, act=lambda seconds: None
        )

    def look(self, times: int) -> float | None:
        """Looks this number of times, one second apart. Returns the last result."""
        *early, last = [self.dog.look(1.0) for _ in range(times)]
        assert not any(early)
        return last


def test_watchdog_counts_time_without_progress():
    watched = Watched()
    assert watched.look(11) is None
    assert watched.look(1) == 11
    watched.beat = 2
    assert watched.look(11) is None, "progress"
    watched.beat = None
    assert watched.look(100) is None, "idle"
    watched.beat = 3
    assert watched.look(8) is None
    watched.excused = True
    assert watched.look(100) is None, "compiling"
    watched.excused = False
    assert watched.look(10) is None
    suspended = Watched()
    suspended.look(1)
    assert suspended.dog.look(3600.0) is None and suspended.look(8) is None, "the watchdog itself did not run"


def test_stuck_step_ends_running_and_waiting_requests(hang, monkeypatch, caplog):
    monkeypatch.setattr(engine := make_engine(toy(), "NONE"), "step", hang)
    with running(engine, QUICK, idle_at_end=False) as server:
        whole = in_background(server.complete, ["a"] * 6, max_tokens=5)  # four rows: two wait
        wait_until(lambda: whole.done() or server.runner.unfinished == 6)
        streams = in_background(server.post, COMPLETE, BODY | {"stream": True})
        answer = whole.result(SECONDS)
        assert check_error(answer, 503)["message"] == ENGINE_STUCK and int(answer.headers["retry-after"]) > 0
        streamed = streams.result(SECONDS)
        assert streamed.status_code == 503 or ENGINE_STUCK in streamed.text
        assert server.runner.state is State.FAILED and isinstance(server.runner.failure, EngineStuck)
        assert server.runner.places.taken == 0
        assert server.get("/health").status_code == server.complete(**BODY).status_code == 503
        with pytest.raises(RuntimeError, match="stuck"):
            server.runner.call(lambda engine: None).result(SECONDS)
        assert "--watchdog-timeout 0.1" in caplog.text and "in __call__" in caplog.text, "the log shows where"
        hang.let_go.set()


def test_stuck_stream_gets_an_error_event(hang, monkeypatch):
    engine, left = make_engine(toy(), "NONE"), iter(range(4))
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: step() if next(left, None) is not None else hang())
    with running(engine, QUICK, idle_at_end=False) as server:
        answer = server.post(COMPLETE, BODY | {"stream": True, "max_tokens": 100, "ignore_eos": True})
        assert answer.status_code == 200
        last = answer.text.strip().split("\n\n")[-1]
        assert ENGINE_STUCK in last and '"error"' in last
        hang.let_go.set()


def test_stuck_command(hang):
    with running(make_engine(toy(), "NONE"), QUICK, idle_at_end=False) as server:
        with pytest.raises(RuntimeError, match="stuck"):
            server.runner.call(hang).result(SECONDS)
        wait_until(lambda: server.runner.state is State.FAILED)
        assert server.post("/flush_cache", {}).status_code == 503
        hang.let_go.set()


def test_waiting_for_the_compiler_is_not_stuck(hang, monkeypatch):
    """The steps go on while a program compiles. On a GPU they wait for its end, which is excused."""
    engine = make_engine(toy(), warm=False, max_running_requests=1)
    compile_ = engine.programs._compile
    monkeypatch.setattr(engine.programs, "_compile", lambda key: hang() or compile_(key))
    _ = engine.programs.admit
    with running(engine) as server:
        answer = in_background(server.complete, **BODY)
        assert hang.began.wait(SECONDS)
        beat = server.runner._beat
        wait_until(lambda: server.runner._beat > beat + 10)
        monkeypatch.setattr(engine.programs, "compiling", True)
        assert not any(server.runner._watchdog.look(1000.0) for _ in range(1000))
        hang.let_go.set()
        assert answer.result(SECONDS).status_code == 200


# Engines that cannot be reset, and processes that end.


def test_failed_reset_ends_requests_and_commands(hang, monkeypatch):
    engine = make_engine(toy(), warm=False)

    def fail(*_):
        hang()
        raise RuntimeError("out of memory")

    with running(engine, idle_at_end=False) as server:
        monkeypatch.setattr(engine, "step", fail)
        monkeypatch.setattr(engine, "reset", fail)
        answers = [in_background(server.complete, ["hello"] * 4, max_tokens=5) for _ in range(2)]
        assert hang.began.wait(SECONDS)
        wait_until(lambda: server.runner.unfinished == 8)
        command = server.runner.call(lambda engine: None)
        hang.let_go.set()
        for answer in answers:
            assert check_error(answer.result(SECONDS), 503)["message"] == ENGINE_GONE
        with pytest.raises(RuntimeError, match="engine failed"):
            command.result(SECONDS)
        assert server.runner.state is State.FAILED and not server.runner.places.taken
        assert server.get("/health").status_code == server.get("/v1/models").status_code == 503


NOT_ALLOCATED = (
    "the KV pool of 1024 tokens (--max-total-tokens) and the state of 4 requests (--max-running-requests) could not be "
    "allocated: no memory"
)
PROGRAM = """
import sys, threading
from engine_helpers import make_engine, toy
from specjax.cli import serve as command

engine = make_engine(toy(), warm=False)
engine.warm_up = lambda *args, **options: None
engine.warm_up_in_background = lambda **options: threading.current_thread()
def hang(*args):
    threading.Event().wait()
def fail():
    raise MemoryError("no memory")
exec(sys.argv[1])
command.load = lambda *_: engine
sys.exit(command.main(["--port", "0", "--watchdog-timeout", "0.5", "--shutdown-timeout", "60"]))
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("patch", "text"),
    [("engine.step = hang", "EngineStuck: a step or command"), ("engine.wait_until_allocated = fail", NOT_ALLOCATED)],
    ids=["stuck", "allocation"],
)
def test_process_ends_with_status_1(tmp_path, patch, text):
    code = Path(specjax.__file__).parents[1]
    paths = [str(code), str(code / "kernels"), str(Path(__file__).parents[1] / "helpers")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "SPECJAX_CACHE": str(tmp_path)}
    with (tmp_path / "err").open("wb") as err:
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, patch], stderr=err, env=environment)

    def log() -> str:
        return (tmp_path / "err").read_text()

    try:
        if "step" in patch:
            wait_until(lambda: "ready to roll" in log() or process.poll() is not None)
            base = re.search(r"Listening on (http://[\w.:]+);", log())
            assert base, log()
            answer = httpx.post(f"{base[1]}{COMPLETE}", json=BODY, timeout=SECONDS, trust_env=False)
            assert check_error(answer, 503)["message"] == ENGINE_STUCK
        assert process.wait(SECONDS) == 1, log()
    finally:
        process.kill()
    assert text in log()
