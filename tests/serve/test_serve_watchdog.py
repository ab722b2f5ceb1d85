"""An engine that hangs, cannot be allocated or cannot start anew: everyone is told, and the process ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from pathlib import Path

import httpx
import pytest
from engine_helpers import make_engine, shared_engine, toy
from server_helpers import SECONDS, running, wait_until

import specjax
from specjax.cli.flags import ServerSettings
from specjax.engine.generation import DeltaReader
from specjax.serve.errors import ENGINE_GONE, ENGINE_STUCK, State
from specjax.serve.runner import EngineStuck, Watchdog

QUICK = ServerSettings(watchdog_timeout=0.1)
BODY = {"prompt": "hello", "max_tokens": 5}


class Watched:
    def __init__(self) -> None:
        self.beat: int | None = 1
        self.excused = False
        self.dog = Watchdog(
            timeout=10.0, beat=lambda: self.beat, excused=lambda: self.excused, act=lambda seconds: None
        )

    def look(self, times: int) -> float | None:
        """So many looks a second apart."""
        found = [self.dog.look(1.0) for _ in range(times)]
        assert not any(found[:-1])
        return found[-1]


def test_watchdog_counts_time_without_progress():
    watched = Watched()
    assert watched.look(11) is None
    assert watched.look(1) == 11
    watched.beat = 2
    assert watched.look(11) is None, "progress"


@pytest.mark.parametrize("why", ["idle", "compiling", "suspended"])
def test_watchdog_excuses(why):
    watched = Watched()
    assert watched.look(11) is None
    if why == "idle":
        watched.beat = None
        assert watched.look(100) is None
        watched.beat = 1
    elif why == "compiling":
        watched.excused = True
        assert watched.look(100) is None
        watched.excused = False
    else:
        watched = Watched()
        watched.look(1)
        assert watched.dog.look(3600.0) is None, "the watchdog itself did not run"
    assert watched.look(10 if why == "compiling" else 8) is None


@pytest.fixture
def hang(monkeypatch):
    """A function that hangs until the test ends, and an engine for it that is left clean."""
    let_go = threading.Event()
    engine = shared_engine("NONE")

    def wait(*_):
        assert let_go.wait(SECONDS)
        return []

    wait.engine, wait.let_go = engine, let_go
    yield wait
    let_go.set()
    monkeypatch.undo()
    engine.reset("the test has ended")


def in_background(function, *args, **options) -> Future:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function, *args, **options)
    pool.shutdown(wait=False)
    return future


def test_stuck_step_ends_running_and_waiting_requests(hang, monkeypatch, caplog):
    monkeypatch.setattr(hang.engine, "step", hang)
    with running(hang.engine, QUICK, idle_at_end=False) as server:
        whole = in_background(server.complete, ["a"] * 6, max_tokens=5)  # four rows: two wait
        # Only who is there is told of the watchdog.
        wait_until(lambda: whole.done() or server.runner.unfinished == 6)
        streams = in_background(server.post, "/v1/completions", BODY | {"stream": True})
        answer = whole.result(SECONDS)
        assert answer.status_code == 503 and answer.json()["error"]["message"] == ENGINE_STUCK
        assert int(answer.headers["retry-after"]) > 0
        streamed = streams.result(SECONDS)
        assert streamed.status_code == 503 or ENGINE_STUCK in streamed.text
        assert server.runner.state is State.FAILED and isinstance(server.runner.failure, EngineStuck)
        assert server.runner.places.taken == 0
        with server.client() as client:
            assert client.get("/health").status_code == 503
        assert server.complete(**BODY).status_code == 503
        with pytest.raises(RuntimeError, match="stuck"):
            server.runner.call(lambda engine: None).result(SECONDS)
        assert "--watchdog-timeout 0.1" in caplog.text and "in wait" in caplog.text, "the log shows where"
        hang.let_go.set()


def test_stuck_stream_gets_an_error_event(hang, monkeypatch):
    step, left = hang.engine.step, iter(range(4))
    monkeypatch.setattr(hang.engine, "step", lambda: step() if next(left, None) is not None else hang())
    with running(hang.engine, QUICK, idle_at_end=False) as server:
        body = BODY | {"stream": True, "max_tokens": 100, "ignore_eos": True}
        answer = server.post("/v1/completions", body)
        assert answer.status_code == 200
        last = answer.text.strip().split("\n\n")[-1]
        assert ENGINE_STUCK in last and '"error"' in last
        hang.let_go.set()


def test_stuck_command(hang, monkeypatch):
    with running(hang.engine, QUICK, idle_at_end=False) as server:
        monkeypatch.setattr(hang.engine, "flush_cache", hang)
        stuck = server.runner.call(hang)
        with pytest.raises(RuntimeError, match="stuck"):
            stuck.result(SECONDS)
        wait_until(lambda: server.runner.state is State.FAILED)
        assert server.post("/flush_cache", {}).status_code == 503
        hang.let_go.set()


def test_waiting_for_the_compiler_is_not_stuck(monkeypatch):
    engine = make_engine(toy(), warm=False, max_running_requests=1)
    compile_, let_go = engine.programs._compile, threading.Event()

    def slow(key):
        assert let_go.wait(SECONDS)
        return compile_(key)

    monkeypatch.setattr(engine.programs, "_compile", slow)
    engine.programs.admit(resumed=False)
    with running(engine) as server:
        answer = in_background(server.complete, **BODY)
        wait_until(lambda: engine.programs.is_waiting(server.runner.ident))
        assert not any(server.runner._watchdog.look(1000.0) for _ in range(1000))
        let_go.set()
        assert answer.result(SECONDS).status_code == 200


def test_ready_means_allocated(monkeypatch):
    engine, let_go = shared_engine("NONE"), threading.Event()
    asked = threading.Event()

    def allocate():
        asked.set()
        assert let_go.wait(SECONDS)

    monkeypatch.setattr(engine, "wait_until_allocated", allocate)
    with running(engine, load=lambda: engine) as server, server.client() as client:
        assert asked.wait(SECONDS)
        assert client.get("/health").status_code == 503 and server.runner.state is State.LOADING
        let_go.set()
        wait_until(lambda: client.get("/health").status_code == 200)


def test_allocation_that_fails(monkeypatch):
    engine = shared_engine("NONE")

    def allocate():
        raise MemoryError("out of memory while trying to allocate")

    monkeypatch.setattr(engine, "wait_until_allocated", allocate)
    with running(engine, load=lambda: engine, idle_at_end=False) as server, server.client() as client:
        wait_until(lambda: server.runner.state is State.FAILED)
        assert client.get("/health").status_code == 503
        said = str(server.runner.failure)
    assert "1024 tokens (--max-total-tokens)" in said and "out of memory" in said


def test_reset_that_fails_ends_requests_and_commands(monkeypatch):
    engine = make_engine(toy(), warm=False)
    at_step, let_go = threading.Event(), threading.Event()

    def fail(*_):
        at_step.set()
        assert let_go.wait(SECONDS)
        raise RuntimeError("out of memory")

    with running(engine, idle_at_end=False) as server:
        monkeypatch.setattr(engine, "step", fail)
        monkeypatch.setattr(engine, "reset", fail)
        answers = [in_background(server.complete, ["hello"] * 4, max_tokens=5) for _ in range(2)]
        assert at_step.wait(SECONDS)
        wait_until(lambda: server.runner.unfinished == 8)
        command = server.runner.call(lambda engine: None)
        let_go.set()
        for answer in answers:
            assert answer.result(SECONDS).status_code == 503
            assert answer.result().json()["error"]["message"] == ENGINE_GONE
        with pytest.raises(RuntimeError, match="engine failed"):
            command.result(SECONDS)
        assert server.runner.state is State.FAILED and not server.runner.places.taken


def test_text_that_fails_ends_its_request_alone(monkeypatch):
    take = DeltaReader.take

    def fail(reader, *others):
        if len(reader.sequence.prompt) == 3:
            raise RuntimeError("no such text")
        return take(reader, *others)

    monkeypatch.setattr(DeltaReader, "take", fail)
    with running(shared_engine("NONE")) as server:
        for stream, stop in product((False, True), ([], ["never"])):  # its text is made in either thread
            fields = {"prompt": [70, 71, 72], "stream": stream, "max_tokens": 50, "stop": stop}
            broken = server.post("/v1/completions", BODY | fields)
            assert broken.status_code == 500 or ('"error"' in broken.text and stream)
        assert server.complete(**BODY).status_code == 200


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
    ("patch", "said"),
    [("engine.step = hang", "EngineStuck: a step or command"), ("engine.wait_until_allocated = fail", "no memory")],
    ids=["stuck", "allocation"],
)
def test_process_ends_with_status_1(tmp_path, patch, said):
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
            answer = httpx.post(f"{base[1]}/v1/completions", json=BODY, timeout=SECONDS, trust_env=False)
            assert answer.status_code == 503 and answer.json()["error"]["message"] == ENGINE_STUCK
        assert process.wait(SECONDS) == 1, log()
    finally:
        process.kill()
    assert said in log()
