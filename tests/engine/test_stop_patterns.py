"""`stop_regex`: beside stop strings, the text that is held back, and errors. test_text.py has matches of any text."""

from __future__ import annotations

import re
import time

import openai
import pytest
from engine_helpers import byte_ids, shared_engine, tokenizer
from server_helpers import running

from specjax.engine import SamplingParams
from specjax.engine.text import MAX_MATCH, MAX_SIZE, StopPatterns, TextStream


def stream_of(patterns: list[str], stop: tuple[str, ...] = ()) -> TextStream:
    return TextStream(tokenizer(), stop, skip_special_tokens=True, keep_stop=False, patterns=patterns)


def test_strings_with_patterns():
    stream = stream_of(["cd+"], ("d",))
    assert stream.extend(byte_ids(b"abcdd")) == 4
    assert (stream.text, stream.matched) == ("ab", "cd+"), "the earliest match that a token completes"
    stream = stream_of(["cd+"], ("bc",))
    assert stream.extend(byte_ids(b"abcdd")) == 3 and stream.matched == "bc"


def test_length_of_held_back_text():
    assert StopPatterns(["ab{2,4}c", "xy"]).held == 6
    assert StopPatterns([]).held == 0
    for pattern in ("a.*b", r"\pN+", "a{,5}", "[[:alpha:]]+x", r"a\z"):
        assert StopPatterns([pattern]).held == MAX_MATCH, pattern
    stream = stream_of(["x+y"])
    assert stream.extend(byte_ids(b"a" + b"x" * 3000 + b"y")) == 3002
    assert stream.text == "a" + "x" * (3000 - MAX_MATCH), "a longer match loses its beginning"


def test_slow_patterns_are_linear():
    """A search that backtracks would take years."""
    text = byte_ids(b"a" * 2000)
    for pattern in ("(a+)+b", "(a|a)*b", "(a*)*b", "(.|a){30}b", ".*a.{60}b", "a{200}b"):
        stream, begun = stream_of([pattern]), time.thread_time()
        assert stream.extend(text) == 0
        assert time.thread_time() - begun < 60, "other processes do not count"


@pytest.mark.parametrize(
    ("patterns", "named"),
    [
        ("(", "missing"),
        (r"(a)\1", "RE2's syntax"),
        ("(?<=a)b", "RE2's syntax"),
        ("a*", "empty text"),
        ("$", "empty text"),
        (".{1,999}z", f"a request may have {MAX_SIZE}"),
        ([f"{letter}.{{90}}b" for letter in "abcdefghijkl"], f"a request may have {MAX_SIZE}"),
        (["a"] * 17, "at most 16"),
        ("a" * 257, "at most 256"),
        ("", "non-empty"),
        ("\ud800", "RE2's syntax"),
    ],
)
def test_refused_patterns(patterns, named):
    with pytest.raises(ValueError, match="stop_regex .*" + re.escape(named)):
        SamplingParams(stop_regex=patterns)


@pytest.fixture(scope="module")
def server():
    with running(shared_engine("NGRAM")) as served:
        yield served


def test_over_http(server):
    text = server.complete("hello", max_tokens=50, temperature=0).json()["choices"][0]["text"]
    pattern = re.escape(text[30:32]) + "|~"
    fields = {"max_tokens": 50, "temperature": 0, "extra_body": {"stop_regex": ["~~", pattern]}}
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client:
        choice = client.completions.create(model="toy", prompt="hello", **fields).choices[0]
        assert choice.text == text[: re.search(pattern, text).start()] and choice.finish_reason == "stop"
        assert choice.matched_stop == pattern
        chunks = client.completions.create(model="toy", prompt="hello", stream=True, **fields)
        assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model="toy", messages=[{"role": "user", "content": "x"}], extra_body={"stop_regex": "("}
            )
    assert caught.value.param == "stop_regex"
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 50, "temperature": 0, "stop_regex": pattern}}
    done = server.post("/generate", body).json()
    assert done["text"] == choice.text and done["meta_info"]["finish_reason"] == {"type": "stop", "matched": pattern}
