"""Grammars whose masks take long: other threads compute them, and other requests go on meanwhile."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from engine_helpers import check_idle, check_plain, toy
from grammar_helpers import OBJECT, check_masked
from test_structured import EOS, HELLO, check, engine_of, requests

from specjax.engine import SamplingParams, grammar
from specjax.engine.sequence import Status, completion


@pytest.mark.parametrize("kind", ["NONE", "trees"])
def test_text_where_all_masks_take_long(kind, monkeypatch):
    monkeypatch.setattr(grammar, "SLOW_SECONDS", -1.0)
    engine, made, threads = engine_of(kind), requests(6), set[str]()
    bits = grammar.Constraint._bits

    def noted(self: grammar.Constraint) -> np.ndarray:
        threads.add(threading.current_thread().name)
        return bits(self)

    monkeypatch.setattr(grammar.Constraint, "_bits", noted)
    monkeypatch.setattr(engine.intake.grammars, "_cache", type(engine.intake.grammars._cache)())
    found = engine.generate([prompt for prompt, _ in made], [params for _, params in made])
    check(toy(), made, found)
    assert threads and all(name.startswith("specjax-mask") for name in threads)
    check_idle(engine)


def test_others_go_on_while_a_mask_is_computed(monkeypatch):
    engine, released = engine_of("NGRAM"), threading.Event()
    bound = engine.add(HELLO, SamplingParams(max_new_tokens=60, grammar=OBJECT))
    assert bound.constraint is not None
    bits = bound.constraint._bits

    def held() -> np.ndarray:
        assert released.wait(60)
        return bits()

    bound.constraint.slow = True
    monkeypatch.setattr(bound.constraint, "_bits", held)
    plain = engine.add(HELLO, SamplingParams(max_new_tokens=40))
    steps = 0
    while plain.status is not Status.FINISHED:
        engine.step()
        steps += 1
        assert steps < 60 and not bound.output.tokens
    engine.step()
    assert bound.status is Status.RUNNING and not bound.output.tokens
    released.set()
    while engine.unfinished:
        engine.step()
    check_plain(toy(), HELLO, plain.params, completion(plain), EOS)
    check_masked(toy(), HELLO, bound.params, completion(bound))
    check_idle(engine)


def test_an_abort_while_a_mask_is_computed(monkeypatch):
    engine, released = engine_of("NGRAM"), threading.Event()
    bound = engine.add(HELLO, SamplingParams(max_new_tokens=60, grammar=OBJECT))
    assert bound.constraint is not None
    bits = bound.constraint._bits
    bound.constraint.slow = True
    monkeypatch.setattr(bound.constraint, "_bits", lambda: bits() if released.wait(60) else None)
    while bound.status is not Status.RUNNING or engine.flights:
        engine.step()
    assert engine.abort(bound.id) and not engine.unfinished
    engine.step()
    released.set()
    check_idle(engine)
