"""Programs that block readiness, the order of the others, and requests that run while these compile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from distil import pair_model, perfect_head
from engine_helpers import NGRAM, check_idle, check_plain, check_texts, make_engine, toy
from server_helpers import SECONDS, wait_until

from specjax.drafters import Eagle, TreeShape, make_speculation
from specjax.engine import EngineConfig, SamplingParams, plan
from specjax.engine.memory import layout
from specjax.engine.plan import Key
from specjax.engine.sequence import completion

POSITIONS, POOL_TOKENS = 131072, 400_000  # of Llama-3.1-8B, and of its pool on an H100


def drafter_of(name: str) -> Any:
    if name == "EAGLE3":
        head, _ = perfect_head(pair_model())
        return make_speculation(Eagle("h"), target=pair_model().target, head=head, automatic=TreeShape(7, 1, 8))
    return make_speculation(name, platform="gpu")


@pytest.mark.parametrize(("name", "programs"), [("NONE", 11), ("NGRAM", 19), ("EAGLE3", 19)])
def test_programs_of_an_8b_model_on_a_gpu(name, programs):
    """With the admission of requests, three programs block readiness."""
    _, sizes = layout(EngineConfig(), POSITIONS, POOL_TOKENS, "gpu", drafter_of(name))
    keys, table = sizes.all_keys(), plan.TABLE
    assert sizes.tables == (table, POSITIONS // EngineConfig().page_size)
    assert sizes.ready_keys() == keys[:2] == [Key("prefill", 256, table), sizes.step(1)]
    assert len(keys) == len(set(keys)) == programs
    assert {key.table for key in keys} == {table}, "the wide table waits for a request that needs it"
    steps = [(key.width, key.nodes) for key in keys if key.kind == "step"]
    batches = [48, 2, 4, 8, 16, 24, 32]
    second = [] if name == "NONE" else [(1, 1), *((batch, 1) for batch in batches)]
    trees = [(batch, sizes.trees[batch]) for batch in batches]
    assert steps == [(1, sizes.trees[1]), *second[:1], *trees, *second[1:]]
    at = keys.index(sizes.step(48))
    assert [(key.kind, key.rows, key.width) for key in keys[at + 1 : at + 3]] == [
        ("prefill", 1, 2048),
        ("prefill", 8, 256),
    ]


def hold(engine: Any, monkeypatch: Any, held: Callable[[Key], bool]) -> tuple[threading.Event, threading.Event]:
    """Blocks the compilation of these keys. Returns an event that is set while one waits, and one that releases it."""
    waiting, release, compile_ = threading.Event(), threading.Event(), engine.programs._compile

    def compiled(key: Key) -> Any:
        if held(key):
            waiting.set()
            assert release.wait(SECONDS)
        return compile_(key)

    monkeypatch.setattr(engine.programs, "_compile", compiled)
    return waiting, release


@pytest.mark.parametrize("costly", [False, True])
def test_requests_run_on_the_programs_of_readiness(monkeypatch, costly):
    """While the others compile, no request waits for one of them."""
    drafter = make_speculation(NGRAM)._replace(costly_observe=costly)
    engine = make_engine(toy(), drafter, adaptive=True, warm=False, chunked_prefill_size=64)
    engine.warm_up(engine.buckets.ready_keys(), progress=False)
    assert len(engine.programs.compiled()) == 2
    waiting, release = hold(engine, monkeypatch, lambda key: True)
    engine.warm_up_in_background()
    try:
        assert waiting.wait(SECONDS)
        plain = SamplingParams(max_new_tokens=12, speculate=False)
        params = [SamplingParams(max_new_tokens=12), plain, SamplingParams(max_new_tokens=20, temperature=0.8, seed=3)]
        check_texts(engine, toy(), [[7] * 70, [5, 6], [9] * 11], params)
        check_texts(engine, toy(), [[8, 7]], [plain])
        assert len(engine.programs.compiled()) == 2
    finally:
        release.set()
    assert engine.programs.wait(SECONDS)
    assert engine.programs.compiled() == {*engine.buckets.all_keys()}


def test_phases_of_a_start_are_logged(caplog):
    engine = make_engine(toy(), "NONE", warm=False)
    with caplog.at_level("INFO", logger="specjax"):
        engine.warm_up(engine.buckets.ready_keys(), progress=False)
        engine.warm_up_in_background()
        wait_until(lambda: len(caplog.messages) == 2)
    first, last = caplog.messages
    assert first.startswith("Compiled in ") and all(f"{key} (" in first for key in engine.buckets.ready_keys())
    assert last.startswith(f"Compiled {len(engine.buckets.all_keys()) - 2} programs in the background in ")


# Pauses.


@pytest.mark.parametrize("ends", ["idle", "wanted", "closed"])
def test_pause_between_compilations_on_a_gpu(monkeypatch, ends):
    """An hour long, unless no request runs, or one waits for a program."""
    engine = make_engine(toy(), "NONE", warm=False)
    programs, (first, second, third, *_) = engine.programs, engine.buckets.all_keys()
    pause, busy, paused = programs._pause, threading.Event(), threading.Event()
    busy.set()
    monkeypatch.setattr(programs, "_exclusive", True)
    monkeypatch.setattr(programs, "busy", busy.is_set)

    def long_pause(seconds: float) -> None:
        paused.set()
        pause(3600.0)

    monkeypatch.setattr(programs, "_pause", long_pause)
    programs.compile_later([first, second])
    assert paused.wait(SECONDS) and programs.compiled() == {first} and programs.pending == {second}
    if ends == "idle":
        busy.clear()
    elif ends == "wanted":
        programs.want([third])
        wait_until(lambda: third in programs.compiled())
        assert programs.pending == {second}, "the pause goes on"
    assert programs.wait(SECONDS) if ends == "idle" else programs.close(SECONDS)
    assert (second in programs.compiled()) == (ends == "idle")


def test_no_pause_on_a_cpu_or_without_requests(monkeypatch):
    engine = make_engine(toy(), "NONE", warm=False)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("pauses"))
    engine.add([5], SamplingParams(max_new_tokens=3))
    assert engine.programs.busy()
    engine.programs._pause(3600.0)
    engine.reset("the test ends")
    monkeypatch.setattr(engine.programs, "_exclusive", True)
    engine.programs._pause(3600.0)


# The wide page table.


def is_wide(key: Key) -> bool:
    return key.table > plan.TABLE


@pytest.mark.parametrize("name", ["NONE", "NGRAM"])
def test_wide_table_compiles_when_a_request_needs_it(monkeypatch, name):
    """Long requests wait for it, others go on. One grows from the narrow table into the wide one."""
    monkeypatch.setattr(plan, "TABLE", 8)
    engine = make_engine(toy(), {"NONE": "NONE", "NGRAM": NGRAM}[name], adaptive=True, warm=False)
    assert engine.buckets.tables == (8, 32)
    engine.warm_up(progress=False)
    assert not any(map(is_wide, engine.programs.compiled()))
    waiting, release = hold(engine, monkeypatch, is_wide)
    long, grows, short = [9] * 60, [11] * 20, [5, 6]
    lengths = {"long": (long, 30), "grows": (grows, 40), "short": (short, 12)}
    params = {id: SamplingParams(max_new_tokens=count, seed=1) for id, (_, count) in lengths.items()}
    sequences = {id: engine.add(prompt, params[id], id=id) for id, (prompt, _) in lengths.items()}

    def step_until(done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not done():
            assert time.monotonic() < deadline
            engine.step()

    try:
        step_until(lambda: sequences["short"].output.finish_reason is not None and waiting.is_set())
        step_until(lambda: len(sequences["grows"].active_slot.pages) > plan.TABLE)
        assert not sequences["long"].output.tokens
    finally:
        release.set()
    step_until(lambda: not engine.unfinished)
    for id, (prompt, _) in lengths.items():
        check_plain(toy(), prompt, params[id], completion(sequences[id]))
    check_idle(engine)
    wide = {key for key in engine.programs.compiled() if is_wide(key)}
    assert {key.kind for key in wide} == {"prefill", "step"} and len(wide) <= 6
