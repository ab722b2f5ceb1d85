"""Checks of `SamplingParams`, text of several tokens a step, and the bookkeeping of a sequence."""

import importlib.util
import math
import sys

import hypothesis.strategies as st
import pytest
from engine_helpers import END, VOCABULARY, byte_ids, idle_sequence, tokenizer
from hypothesis import example, given, settings

from specjax.engine import FinishReason, SamplingParams, sampling_params
from specjax.engine.sampling_params import MAX_STOP_LENGTH, MAX_STOP_STRINGS
from specjax.engine.sequence import completion
from specjax.engine.text import TextStream
from specjax.sampling import BIAS_ENTRIES

NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
SWITCHES = (
    "ignore_eos", "skip_special_tokens", "no_stop_trim", "speculate", "origins", "require_reasoning",
    "stop_after_reasoning",
)  # fmt: skip
REFUSED = [
    *((name, value) for name in NUMBERS for value in (math.nan, math.inf, -math.inf, True)),
    *(("temperature", value) for value in (-0.1, -1)),
    *(("top_p", value) for value in (0, -0.5, 1.01)),
    *(("top_k", value) for value in (0, -2, True)),
    *(("min_p", value) for value in (-0.1, 1.1)),
    *((name, value) for name in ("frequency_penalty", "presence_penalty") for value in (-2.1, 2.1)),
    *(("repetition_penalty", value) for value in (0, -1, 2.5)),
    *(("max_new_tokens", value) for value in (-1, True)),
    *(("min_new_tokens", value) for value in (-1, 129, True)),
    *(("seed", value) for value in (2**63, -(2**63) - 1, True)),
    *(("draft_limit", value) for value in (-1, 2**20 + 1, True)),
    *(
        ("stop", value)
        for value in ("", [""], ["a", ""], ["a"] * (MAX_STOP_STRINGS + 1), ["b", "a" * (MAX_STOP_LENGTH + 1)])
    ),
    *(("logit_bias", value) for value in ({1: 101}, {1: -101}, {1: math.nan}, {"x": 1}, {1: True})),
    ("logit_bias", dict.fromkeys(range(BIAS_ENTRIES + 1), 1.0)),
    *(("logprob_start_len", value) for value in (-2, 0, True)),
    *(("priority", value) for value in (2**31, -(2**31), True)),
    *(("stop_regex", value) for value in ("", ["(", "a"], ["a"] * (MAX_STOP_STRINGS + 1), "a*")),
]
WRONG_TYPES = [
    *((name, value) for name in NUMBERS for value in ("1", None, [1])),
    *((name, value) for name in ("top_k", "min_new_tokens") for value in (1.5, "1", None)),
    *((name, value) for name in SWITCHES for value in (1, "true", None)),
    *(("max_new_tokens", value) for value in (1.5, "1")),
    *((name, value) for name in ("seed", "draft_limit") for value in (1.5, "1")),
    *((name, value) for name in ("stop", "stop_regex") for value in (None, 1, [1], {"a": 1})),
    *((name, value) for name in ("logprob_start_len", "priority") for value in (1.5, "1", None)),
    *(("stop_token_ids", value) for value in (None, 1, "1", [1.5], ["1"], [True])),
    *(("logit_bias", value) for value in (None, [1], "1", {1: "1"}, {1: None})),
]


@pytest.fixture(scope="module")
def unchecked_params():
    """`SamplingParams` without the import hook, which would refuse wrong types itself."""
    spec = importlib.util.spec_from_file_location("sampling_params_without_hook", sampling_params.__file__)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module.SamplingParams
    del sys.modules[spec.name]


def test_refused_value_names_its_field(unchecked_params):
    for name, value in REFUSED + WRONG_TYPES:
        with pytest.raises(ValueError, match=name):
            unchecked_params.from_mapping({name: value})


def test_limits_of_values(unchecked_params):
    params = unchecked_params(
        max_new_tokens=1, min_new_tokens=1, temperature=0, top_p=1, top_k=1, min_p=1, frequency_penalty=-2,
        presence_penalty=2, repetition_penalty=2, seed=-(2**63), stop="e" * MAX_STOP_LENGTH, logit_bias={"3": -100},
    )  # fmt: skip
    assert params.stop == ("e" * MAX_STOP_LENGTH,)
    assert params.logit_bias == {3: -100.0}
    assert unchecked_params(max_new_tokens=None, min_new_tokens=10**6).max_new_tokens is None
    assert unchecked_params(stop_token_ids=[4, 4, 2]).stop_token_ids == (4, 2)
    assert unchecked_params(seed=2**63 - 1).seed == 2**63 - 1


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown sampling parameters: temprature; there are: .*temperature"):
        SamplingParams.from_mapping({"temprature": 1})


def stream_of(stop=(), *, keep=False):
    return TextStream(tokenizer(), tuple(stop), skip_special_tokens=True, keep_stop=keep)


UNICODE = st.text(st.sampled_from("ab é漢🙂\u200d\u0301\ufffd\n"), max_size=12)


TOKENS = st.one_of(st.lists(st.integers(0, VOCABULARY - 1), max_size=16), UNICODE.map(lambda s: byte_ids(s.encode())))


@settings(max_examples=100)
@given(
    TOKENS,
    st.lists(st.text("ab é漢", min_size=1, max_size=3), max_size=3),
    st.booleans(),
    st.lists(st.integers(0, 5), max_size=8),
)
@example(byte_ids(b"aab"), ["ab", "aa", "a"], False, [3])
@example(byte_ids("xé漢a".encode()), ["漢a", "é漢a"], True, [2, 4])
def test_tokens_of_a_step_equal_single_tokens(ids, stop, keep, sizes):
    single, several = stream_of(stop, keep=keep), stream_of(stop, keep=keep)
    stopped, left = 0, ids
    for size in [*sizes, len(ids)]:
        stopped = several.extend(left[:size])
        assert stopped <= size
        for token in left[: stopped or size]:
            assert not single.matched
            single.extend([token])
        assert (single.text, single.ends, single.matched, single.settled) == (
            several.text, several.ends, several.matched, several.settled
        )  # fmt: skip
        assert bool(stopped) == (several.matched is not None)
        if stopped:
            break
        left = left[size:]
    single.finish()
    several.finish()
    assert (single.text, single.ends, single.matched) == (several.text, several.ends, several.matched)


@settings(max_examples=100)
@given(TOKENS, st.lists(st.tuples(st.integers(0, 5), st.integers(0, 16)), max_size=8))
def test_late_text_equals_the_text_of_the_tokens_read(ids, steps):
    """Each step adds tokens and reads a number of them."""
    late = TextStream(tokenizer(), (), skip_special_tokens=True, keep_stop=False, late=True)
    at_once, added, read = stream_of(), 0, 0
    for size, count in [*steps, (len(ids), 0)]:
        assert late.extend(ids[added : added + size]) == 0
        added = min(added + size, len(ids))
        late.read(count)
        at_once.extend(ids[read : max(read, min(count, added))])
        read = max(read, min(count, added))
        assert (late.text, late.ends, late.settled) == (at_once.text, at_once.ends, at_once.settled)
    late.finish()
    late.read(read)
    assert late.text == at_once.text, "text after the last read was decoded"
    at_once.extend(ids[read:])
    at_once.finish()
    for _ in range(2):
        late.read()
        assert (late.text, late.ends, late.final_tokens) == (at_once.text, at_once.ends, at_once.final_tokens)


def test_how_a_sequence_ends():
    a, b, c = byte_ids(b"abc")
    sequence = idle_sequence(host_stops=frozenset({c}))
    assert sequence.accept([a, b], False, False) == 2
    assert sequence.accept([b, c, a, a], False, True) == 2
    done = completion(sequence)
    assert (done.text, done.output_ids, done.completion_tokens) == ("abb", [a, b, b, c], 4)
    assert done.finish_reason == {"type": "stop", "matched": c}

    for tokens, stopped, text, reason in (
        ([a, END], True, "a", {"type": "stop", "matched": END}),
        ([a, b], False, "ab", {"type": "length", "length": 2}),
        (byte_ids(b"a\xc3"), None, "a\ufffd", {"type": "abort"}),
    ):
        sequence = idle_sequence()
        sequence.accept(tokens, stopped is True, stopped is False)
        if stopped is None:
            sequence.abort()
        done = completion(sequence)
        assert (done.text, done.output_ids, done.finish_reason) == (text, tokens, reason)

    sequence = idle_sequence(SamplingParams(stop=["b"]))
    sequence.accept([a, b], False, True)
    assert sequence.output.finish_reason == FinishReason("stop", "b"), "a stop string precedes the length limit"


@pytest.mark.parametrize("keep", [False, True])
def test_stop_string_inside_an_accepted_run(keep):
    ids = byte_ids(b"xyz, end")
    sequence = idle_sequence(SamplingParams(stop="z,", no_stop_trim=keep))
    assert sequence.accept(ids[:2], False, False) == 2
    assert sequence.accept(ids[2:], True, True) == 2
    done = completion(sequence)
    assert (done.text, done.output_ids) == ("xyz," if keep else "xy", ids[:4])
    assert done.finish_reason == {"type": "stop", "matched": "z,"}


def test_accept_length_of_a_histogram():
    sequence = idle_sequence()
    assert sequence.output.accept_length == 1.0
    sequence.output.histogram, sequence.output.verify_steps = [2, 0, 1, 3, 0, 0], 6
    assert sequence.output.verified_tokens == 2 * 1 + 3 + 3 * 4
    assert sequence.output.accept_length == pytest.approx(1 + (0 * 2 + 2 * 1 + 3 * 3) / 6)


def test_context_of_a_resumed_sequence():
    sequence = idle_sequence()
    assert (sequence.context, sequence.forced_token) == ([5, 6], None)
    sequence.accept(byte_ids(b"ab"), False, False)
    a, b = byte_ids(b"ab")
    assert (sequence.context, sequence.forced_token) == ([5, 6, a], b)
    assert sequence.most_tokens == 2 + 8 - 1
