"""Requests run while another thread compiles programs that others need; shutting down waits for the compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from engine_helpers import DRAFTS, END, hold, make_engine, toy
from grammar_helpers import SCHEMA
from server_helpers import SECONDS, running, wait_until

from specjax.cli.flags import ServerSettings
from specjax.engine.engine import IDLE_SECONDS
from specjax.engine.plan import Key
from specjax.engine.programs import TURN_SECONDS
from specjax.serve.runner import Runner

WHOLE = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def of_grammars(key: Key) -> bool:
    return key.kind in ("constrained", "propose")


def grammar_steps(engine) -> list[Key]:
    return [Key("constrained", batch, engine.buckets.tables[0]) for batch in engine.buckets.batches]


def counted(engine, monkeypatch) -> list[float]:
    """The times of all steps."""
    step, times = engine.step, list[float]()

    def counting() -> Any:
        times.append(time.perf_counter())
        return step()

    monkeypatch.setattr(engine, "step", counting)
    return times


def test_requests_run_while_a_grammar_program_compiles(monkeypatch):
    engine = make_engine(toy(), DRAFTS["NGRAM"], eos=(END,), context_length=256, max_running_requests=2)
    engine.warm_up(engine.buckets.ready_keys(), progress=False)
    waiting, release = hold(engine, monkeypatch, of_grammars)
    steps = counted(engine, monkeypatch)
    with running(engine) as server, ThreadPoolExecutor(3) as clients:
        try:
            bound = clients.submit(server.chat, response_format=WHOLE, seed=1, max_tokens=90)
            assert waiting.wait(SECONDS)
            assert server.chat(max_tokens=5).status_code == 200
            before = len(steps)
            time.sleep(0.3)
            assert len(steps) <= before + 0.3 / IDLE_SECONDS, "the loop does not sleep between its steps"
            assert server.complete(max_tokens=3).status_code == 200
            assert not bound.done()
        finally:
            release.set()
        choice = bound.result(SECONDS).json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert not engine.unfinished


def test_steps_wait_little_for_the_thread_that_traces(monkeypatch):
    """A step takes the interpreter's lock many times. Two engines may compile at once, and end in either order."""
    usual = sys.getswitchinterval()
    engines = [make_engine(toy(), "NONE", eos=(END,)) for _ in range(2)]
    held = [(engine, *hold(engine, monkeypatch, of_grammars)) for engine in engines]
    try:
        for order in (held, held[::-1]):
            for engine, waiting, release in held:
                waiting.clear()
                release.clear()
                compiled = engine.programs.compiled()
                engine.programs.want([next(key for key in grammar_steps(engine) if key not in compiled)])
                assert waiting.wait(SECONDS)
                assert sys.getswitchinterval() == pytest.approx(TURN_SECONDS, rel=0.01)
            for engine, _, release in order:
                release.set()
                wait_until(lambda programs=engine.programs: not programs.pending)
            wait_until(lambda: sys.getswitchinterval() == usual)
    finally:
        for _, _, release in held:
            release.set()


def test_stop_waits_for_the_compiler(monkeypatch):
    engine = make_engine(toy(), "NONE", eos=(END,))
    waiting, release = hold(engine, monkeypatch, of_grammars)
    with running(engine, idle_at_end=False) as server, ThreadPoolExecutor(1) as clients:
        bound = clients.submit(server.chat, response_format=WHOLE, max_tokens=90)
        assert waiting.wait(SECONDS)
        assert not server.runner.stop(0.1), "the compiler still runs"
        release.set()
        assert server.runner.stop(SECONDS)
        server.runner.end_all("the test ends")
        assert bound.result(SECONDS).status_code >= 500


def test_grammar_tokenizer_is_loaded_at_start(monkeypatch):
    """Loading it with the first request could take seconds."""
    engine = make_engine(toy(), "NONE", eos=(END,))
    monkeypatch.setattr(engine, "warm_up", lambda keys, strict: None)
    monkeypatch.setattr(engine, "warm_up_in_background", lambda then: None)
    runner = Runner(lambda: engine, ServerSettings())
    runner.start()
    try:
        wait_until(lambda: "core" in vars(engine.intake.grammars))
    finally:
        assert runner.stop(SECONDS)


def test_close_drops_queued_programs(monkeypatch):
    engine = make_engine(toy(), "NONE", eos=(END,))
    (waiting, release), (first, second, *_) = hold(engine, monkeypatch, of_grammars), grammar_steps(engine)
    engine.programs.want([first])
    assert waiting.wait(SECONDS)
    engine.programs.compile_later([second])
    assert engine.programs.pending == {first, second}
    assert not engine.programs.close(0.0), "the first program is still being compiled"
    release.set()
    assert engine.programs.close(SECONDS) and not engine.programs.pending
    assert first in engine.programs.compiled() and second not in engine.programs.compiled()
    assert engine.programs.get(second) is engine.programs.get(second), "wanted again"


def test_programs_that_requests_need_are_compiled_first(monkeypatch, capsys):
    engine = make_engine(toy(), "NONE", eos=(END,))
    engine.programs.progress = True
    (waiting, release), (first, second, *_) = hold(engine, monkeypatch, of_grammars), grammar_steps(engine)
    third = Key("scoring", engine.buckets.small, engine.buckets.tables[0])
    engine.programs.compile_later([first, second])
    assert waiting.wait(SECONDS)
    for _ in range(2):  # as each plan does
        engine.programs.want([third])
    release.set()
    assert engine.programs.wait(SECONDS)
    assert list(engine.programs._seconds)[-3:] == [first, third, second]
    assert capsys.readouterr().err.count("Compiling") == 1, "a progress line for the needed program alone"


ENDS = """
import threading, time
from engine_helpers import make_engine, toy
engine = make_engine(toy(), "NONE", warm=False)
begun, compile_ = threading.Event(), engine.programs._compile
def slow(key, *more):
    begun.set()
    time.sleep(0.5)  # the main thread ends meanwhile
    program = compile_(key, *more)
    print("compiled", flush=True)
    return program
engine.programs._compile = slow
engine.warm_up_in_background()
assert begun.wait(60)
print("ends", flush=True)
"""


def test_interpreter_exit_while_a_program_compiles():
    """It waits for the program, because ending a thread inside XLA would crash the process."""
    root = Path(__file__).parents[2]
    paths = [str(root / "tests" / "helpers"), str(root), str(root / "kernels")]
    environment = {**os.environ, "SPECJAX_CPU_KERNELS": "0"}  # which take long to compile
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{ENDS}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, "ends\ncompiled\n"), done.stderr
