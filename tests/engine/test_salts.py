"""What a request's salt keeps apart: the n-gram memory, whose hits another client could feel in its timing."""

from __future__ import annotations

import argparse

import pytest
from engine_helpers import DRAFTS, check_idle, make_engine, shared_engine, toy

from specjax.cli import build, flags
from specjax.drafters import Ngram
from specjax.engine import SamplingParams
from specjax.engine.intake import Salts
from specjax.limits import ParameterError
from specjax.settings import add_flags, read

PROMPT = [80, 81, 82, 80, 83]


def accept_length(engine, salt: str | None) -> float:
    engine.intake.salts._key = bytes(16)  # else which entries of the table of n-grams meet differs from run to run
    done = engine.generate(PROMPT, SamplingParams(max_new_tokens=40, cache_salt=salt))
    check_idle(engine)
    return done.spec_accept_length


def test_requests_with_one_salt_share_and_others_do_not():
    engine = shared_engine("NGRAM")
    assert engine.flush_cache()
    cold = accept_length(engine, "a")
    warm = accept_length(engine, "a")
    assert warm > cold
    assert accept_length(engine, "b") == accept_length(engine, None) == cold
    assert accept_length(engine, None) == warm


def test_isolated_requests_share_only_by_a_salt():
    engine = make_engine(toy(), DRAFTS["NGRAM"], isolate_ngrams=True)
    cold = accept_length(engine, None)
    assert accept_length(engine, None) == cold == accept_length(engine, "a")
    assert accept_length(engine, "a") > cold


def test_words():
    shared, isolated = Salts(isolate=False), Salts(isolate=True)
    assert shared(None) == shared(None) == 0
    assert shared("a") == shared("a") != shared("b")
    assert len({isolated(None) for _ in range(100)} | {isolated("0")}) == 101
    assert all(0 < salts(text) < 2**32 for salts in (shared, isolated) for text in ("", "0", "ä\ud800"))
    assert Salts(isolate=False)("a") != shared("a"), "each engine has a key of its own"


@pytest.mark.parametrize("salt", ["", "x" * 257])
def test_a_salt_has_1_to_256_characters(salt):
    with pytest.raises(ParameterError, match="cache_salt must be a string of 1 to 256 characters"):
        SamplingParams(cache_salt=salt)


def test_the_flag():
    parser = argparse.ArgumentParser()
    add_flags(parser, flags.Settings())
    for given, isolated in (([], False), (["--speculative-ngram-isolate"], True)):
        chosen = read(parser.parse_args(["--speculative-algorithm", "NGRAM", *given]), flags.Settings())
        arguments = build.engine_arguments(chosen)
        assert arguments["config"].isolate_ngrams is isolated
        assert arguments["draft"] == Ngram()
