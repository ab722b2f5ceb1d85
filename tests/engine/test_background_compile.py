"""Requests go on while another thread compiles the programs that some of them need, and shutting down is clean."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from engine_helpers import END, check_idle, make_engine, toy
from grammar_helpers import OBJECT, SCHEMA, check_masked
from server_helpers import SECONDS, running, wait_until

from specjax.cli.flags import ServerSettings
from specjax.engine import SamplingParams
from specjax.engine.engine import IDLE_SECONDS
from specjax.engine.sequence import completion
from specjax.serve.runner import Runner

WHOLE = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


class Gate:
    """Holds the compiler back, for keys of these kinds."""

    def __init__(self, engine, monkeypatch, *kinds: str) -> None:
        self.open, self.waiting = threading.Event(), threading.Event()
        compile_ = engine.programs._compile

        def held(key: Any, *more: Any) -> Any:
            if key.kind in kinds:
                self.waiting.set()
                assert self.open.wait(SECONDS)
            return compile_(key, *more)

        monkeypatch.setattr(engine.programs, "_compile", held)


def counted(engine, monkeypatch) -> list[float]:
    """The times of all steps."""
    step, times = engine.step, list[float]()

    def counting() -> Any:
        times.append(time.perf_counter())
        return step()

    monkeypatch.setattr(engine, "step", counting)
    return times


@pytest.mark.parametrize("drafter", ["NONE", "NGRAM"])
def test_newcomers_run_while_all_others_wait_for_a_grammars_program(monkeypatch, drafter):
    engine = make_engine(toy(), drafter, eos=(END,), context_length=256, max_running_requests=2)
    gate, steps = Gate(engine, monkeypatch, "constrained", "propose"), counted(engine, monkeypatch)
    with running(engine) as server, ThreadPoolExecutor(3) as clients:
        try:
            bound = [clients.submit(server.chat, response_format=WHOLE, seed=1, max_tokens=90)]
            assert gate.waiting.wait(SECONDS)
            assert server.chat(max_tokens=5).status_code == 200
            late = server.chat(response_format=WHOLE, max_tokens=90, timeout=0.2)
            assert late.status_code == 408, "it ends while the program compiles"
            wait_until(lambda: len(server.runner._listeners) == 1)
            before = len(steps)
            time.sleep(0.3)
            assert len(steps) <= before + 0.3 / IDLE_SECONDS, "the loop sleeps between its steps"
            assert server.complete(max_tokens=3).status_code == 200
            assert not any(each.done() for each in bound)
        finally:
            gate.open.set()
        for each in bound:
            choice = each.result(SECONDS).json()["choices"][0]
            assert choice["finish_reason"] == "stop"
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert not engine.unfinished


def test_newcomers_run_while_a_prompt_waits_for_the_program_that_scores_it(monkeypatch):
    engine = make_engine(toy(), "NONE", eos=(END,))
    gate = Gate(engine, monkeypatch, "scoring")
    with running(engine) as server, ThreadPoolExecutor(1) as clients:
        try:
            scored = clients.submit(server.complete, "hello", echo=True, logprobs=1, max_tokens=2)
            assert gate.waiting.wait(SECONDS)
            assert server.complete(max_tokens=3).status_code == 200
            assert not scored.done()
        finally:
            gate.open.set()
        found = scored.result(SECONDS).json()["choices"][0]
        assert "".join(found["logprobs"]["tokens"][:2]) == "hello"


def test_a_program_that_cannot_be_compiled_is_no_reason_to_wait_for_ever(monkeypatch):
    engine = make_engine(toy(), "NONE", eos=(END,), max_running_requests=2, context_length=256)
    compile_ = engine.programs._compile

    def failing(key: Any, *more: Any) -> Any:
        if key.kind == "constrained" and key.width == 1:
            raise MemoryError("no room")
        return compile_(key, *more)

    monkeypatch.setattr(engine.programs, "_compile", failing)
    with running(engine) as server:
        answer = server.chat(response_format=WHOLE, max_tokens=90)
        jsonschema.validate(json.loads(answer.json()["choices"][0]["message"]["content"]), SCHEMA)


def test_stopping_waits_for_the_compiler(monkeypatch):
    engine = make_engine(toy(), "NONE", eos=(END,))
    gate = Gate(engine, monkeypatch, "constrained")
    with running(engine, idle_at_end=False) as server, ThreadPoolExecutor(1) as clients:
        bound = clients.submit(server.chat, response_format=WHOLE, max_tokens=90)
        assert gate.waiting.wait(SECONDS)
        assert not server.runner.stop(0.1), "the compiler is at work"
        gate.open.set()
        assert server.runner.stop(SECONDS)
        server.runner.end_all("the test ends")
        assert bound.result(SECONDS).status_code >= 500


def test_what_all_grammars_need_is_loaded_before_one_comes(monkeypatch):
    """The first request would wait for it, and while compilers work that can take seconds."""
    engine = make_engine(toy(), "NONE", eos=(END,))
    compiler = threading.Thread(target=lambda: None)
    compiler.start()
    monkeypatch.setattr(engine, "warm_up", lambda keys, strict: None)
    monkeypatch.setattr(engine, "warm_up_in_background", lambda: compiler)
    runner = Runner(lambda: engine, ServerSettings())
    runner.start()
    try:
        wait_until(lambda: "core" in vars(engine.intake.grammars))
    finally:
        assert runner.stop(SECONDS)


def test_an_engine_whose_server_has_stopped_serves_another_one():
    engine = make_engine(toy(), "NONE", eos=(END,))
    for request in ({}, {"response_format": WHOLE}):
        with running(engine) as server:
            assert server.chat(**request, max_tokens=90).status_code == 200


def test_closing_forgets_what_waits_and_more_may_be_asked_for(monkeypatch):
    engine = make_engine(toy(), "NONE", eos=(END,))
    gate, (first, second, *_) = Gate(engine, monkeypatch, "constrained"), engine.buckets.constrained_keys()
    assert not engine.programs.compile_ahead(first)
    assert gate.waiting.wait(SECONDS)
    engine.programs.compile_later([second])
    assert engine.programs.pending == {first, second}
    assert not engine.programs.close(0.0), "the first is being compiled"
    gate.open.set()
    assert engine.programs.close(SECONDS) and not engine.programs.pending
    assert first in engine.programs.compiled() and second not in engine.programs.compiled()
    assert not engine.programs.compile_ahead(second)
    wait_until(lambda: engine.programs.compile_ahead(second))


def test_the_background_goes_on_after_an_admission_that_cannot_be_compiled(monkeypatch, caplog):
    engine = make_engine(toy(), "NONE", eos=(END,), warm=False)

    def fails(*, resumed: bool) -> Any:
        raise RuntimeError("no admission")

    with monkeypatch.context() as patch:
        patch.setattr(engine.programs, "admit", fails)
        engine.warm_up_in_background(progress=False).join(SECONDS)
    assert "no admission" in caplog.text
    assert engine.programs.compiled() == set(engine.buckets.all_keys()) and not engine.programs.pending
    key = engine.buckets.constrained_keys()[0]
    assert not engine.programs.compile_ahead(key)
    wait_until(lambda: key in engine.programs.compiled())


def test_what_a_request_waits_for_is_compiled_first_and_shown(monkeypatch, capsys):
    engine = make_engine(toy(), "NONE", eos=(END,))
    engine.programs.progress = True
    gate, (first, second, *_) = Gate(engine, monkeypatch, "constrained"), engine.buckets.constrained_keys()
    third = engine.buckets.scoring_keys()[0]
    engine.programs.compile_later([first, second])
    assert gate.waiting.wait(SECONDS)
    assert not engine.programs.compile_ahead(third)
    thread = engine.programs.compile_later([])
    gate.open.set()
    thread.join(SECONDS)
    assert list(engine.programs._programs)[-3:] == [first, third, second]
    assert capsys.readouterr().err.count("Compiling") == 1, "none of the others"


def test_a_library_call_goes_on_when_the_program_is_compiled():
    engine = make_engine(toy(), "NONE", eos=(END,))
    params, prompt = SamplingParams(max_new_tokens=60, grammar=OBJECT), [70, 71]
    sequence = engine.add(prompt, params)
    while engine.unfinished:
        engine.step()
    check_masked(toy(), prompt, params, completion(sequence))
    check_idle(engine)


ENDS = """
import threading, time
from engine_helpers import make_engine, toy
engine = make_engine(toy(), "NONE", warm=False)
begun, compile_ = threading.Event(), engine.programs._compile
def told(key, *more):
    begun.set()
    time.sleep(0.5)  # the main thread ends meanwhile
    program = compile_(key, *more)
    print("compiled", flush=True)
    return program
engine.programs._compile = told
BEGIN
assert begun.wait(60)
print("ends", flush=True)
"""


@pytest.mark.parametrize(
    "begin",
    [
        "engine.programs.compile_later(engine.buckets.all_keys())",
        "engine.warm_up_in_background(progress=False)",
    ],
)
def test_the_interpreter_ends_while_a_program_compiles(begin):
    """With status 0, after the program that is under way: a thread inside of XLA would crash it."""
    root = Path(__file__).parents[2]
    paths = [str(root / "tests" / "helpers"), str(root), str(root / "kernels")]
    environment = {**os.environ, "SPECJAX_CPU_KERNELS": "0"}  # which take long to compile
    code = f"import sys; sys.path[:0] = {paths!r}\n{ENDS.replace('BEGIN', begin)}"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, "ends\ncompiled\n"), done.stderr
