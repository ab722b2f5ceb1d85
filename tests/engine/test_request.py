"""What a user may ask for, text as it comes, and one sequence's bookkeeping."""

import importlib.util
import math
import sys

import hypothesis.strategies as st
import pytest
from engine_helpers import END, VOCABULARY, byte_ids, decode, idle_sequence, tokenizer
from hypothesis import example, given, settings

from specjax.engine import FinishReason, SamplingParams, sampling_params
from specjax.engine.sampling_params import MAX_STOP_LENGTH, MAX_STOP_STRINGS
from specjax.engine.sequence import completion
from specjax.engine.text import TextStream
from specjax.sampling import BIAS_ENTRIES

# Parameters.

NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
SWITCHES = (
    "ignore_eos", "skip_special_tokens", "no_stop_trim", "speculate", "always_draft", "origins", "require_reasoning",
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
def as_users_have_it():
    """`SamplingParams` without the import hook, which would refuse JSON's wrong types (and ints) in its own words."""
    spec = importlib.util.spec_from_file_location("sampling_params_without_hook", sampling_params.__file__)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module.SamplingParams
    del sys.modules[spec.name]


@pytest.mark.parametrize(("name", "value"), REFUSED + WRONG_TYPES)
def test_a_refused_value_names_its_field(name, value, as_users_have_it):
    with pytest.raises(ValueError, match=name):
        as_users_have_it.from_mapping({name: value})


def test_values_at_the_edges_are_taken(as_users_have_it):
    params = as_users_have_it(
        max_new_tokens=1, min_new_tokens=1, temperature=0, top_p=1, top_k=1, min_p=1, frequency_penalty=-2,
        presence_penalty=2, repetition_penalty=2, seed=-(2**63), stop="e" * MAX_STOP_LENGTH, logit_bias={"3": -100},
    )  # fmt: skip
    assert params.stop == ("e" * MAX_STOP_LENGTH,)
    assert params.logit_bias == {3: -100.0}
    assert as_users_have_it(max_new_tokens=None, min_new_tokens=10**6).max_new_tokens is None
    assert as_users_have_it(stop_token_ids=[4, 4, 2]).stop_token_ids == (4, 2)
    assert as_users_have_it(seed=2**63 - 1).seed == 2**63 - 1


def test_an_unknown_name_is_refused_and_the_known_ones_are_listed():
    with pytest.raises(ValueError, match=r"unknown sampling parameters: temprature; there are: .*temperature"):
        SamplingParams.from_mapping({"temprature": 1})


# Text as it comes.


def stream_of(stop=(), *, skip=True, keep=False):
    return TextStream(tokenizer(), tuple(stop), skip_special_tokens=skip, keep_stop=keep)


def push_all(stream, ids):
    """Pushes until a stop string is complete; the texts and settled counts after each token."""
    seen = []
    for token in ids:
        found = stream.extend([token])
        seen.append((stream.text, stream.settled))
        if found:
            break
    return seen


UNICODE = st.text(st.sampled_from("ab é漢🙂\u200d\u0301\ufffd\n"), max_size=12)


@settings(max_examples=200)
@given(st.one_of(st.lists(st.integers(0, VOCABULARY - 1), max_size=16), UNICODE.map(lambda s: byte_ids(s.encode()))))
@example([END, *byte_ids("é".encode())[:1]])
@example(byte_ids("é🙂".encode())[:-1])
@example(byte_ids(b"\xff\xff\xc3a\xe6\xbc"))
@example(byte_ids(b"\xed\xa1"))  # half of a surrogate
def test_a_stream_ends_as_a_plain_decode(ids):
    for skip in (True, False):
        stream = stream_of(skip=skip)
        for token in ids:
            assert not stream.extend([token])
        stream.finish()
        whole = decode(ids, skip=skip)
        assert stream.text in (whole, whole.removesuffix("\ufffd"))


@settings(max_examples=200)
@given(
    st.one_of(st.lists(st.integers(0, VOCABULARY - 1), max_size=16), UNICODE.map(lambda s: byte_ids(s.encode()))),
    st.lists(st.text("ab é漢", min_size=1, max_size=3), max_size=3),
    st.booleans(),
    st.lists(st.integers(0, 5), max_size=8),
)
@example(byte_ids(b"aab"), ["ab", "aa", "a"], False, [3])
@example(byte_ids("xé漢a".encode()), ["漢a", "é漢a"], True, [2, 4])
def test_tokens_of_a_step_give_the_text_of_single_tokens(ids, stop, keep, sizes):
    single, several = stream_of(stop, keep=keep), stream_of(stop, keep=keep)
    found, left = 0, ids
    for size in [*sizes, len(ids)]:
        found = several.extend(left[:size])
        assert found <= size
        for token in left[: found or size]:
            assert not single.matched
            single.extend([token])
        assert (single.text, single.ends, single.matched, single.settled) == (
            several.text, several.ends, several.matched, several.settled
        )  # fmt: skip
        assert bool(found) == (several.matched is not None)
        if found:
            break
        left = left[size:]
    single.finish()
    several.finish()
    assert (single.text, single.ends, single.matched) == (several.text, several.ends, several.matched)


@settings(max_examples=200)
@given(
    st.one_of(st.lists(st.integers(0, VOCABULARY - 1), max_size=16), UNICODE.map(lambda s: byte_ids(s.encode()))),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 16)), max_size=8),
)
def test_late_text_is_the_text_of_the_tokens_that_were_read(ids, steps):
    """Each step adds tokens, and reads up to some number of all."""
    late = TextStream(tokenizer(), (), skip_special_tokens=True, keep_stop=False, late=True)
    at_once, given, read = stream_of(), 0, 0
    for size, count in [*steps, (len(ids), 0)]:
        assert late.extend(ids[given : given + size]) == 0
        given = min(given + size, len(ids))
        late.read(count)
        at_once.extend(ids[read : max(read, min(count, given))])
        read = max(read, min(count, given))
        assert (late.text, late.ends, late.settled) == (at_once.text, at_once.ends, at_once.settled)
    late.finish()
    late.read(read)
    assert late.text == at_once.text, "the end was not asked for"
    at_once.extend(ids[read:])
    at_once.finish()
    for _ in range(2):
        late.read()
        assert (late.text, late.ends, late.final_tokens) == (at_once.text, at_once.ends, at_once.final_tokens)


def test_stop_strings_are_found_at_once_also_in_late_text():
    stream = TextStream(tokenizer(), ("é",), skip_special_tokens=True, keep_stop=False, late=True)
    assert not stream.late and stream.extend(byte_ids("aéb".encode())) == 3 and stream.text == "a"


@given(UNICODE.filter(lambda s: "\ufffd" not in s))
def test_no_half_character_is_ever_shown(text):
    stream = stream_of()
    for shown, settled in push_all(stream, byte_ids(text.encode())):
        assert text.startswith(shown)
        assert settled == len(shown)
    assert stream.text == text


def test_a_character_cut_off_by_the_limit_is_left_out():
    stream = stream_of()
    push_all(stream, byte_ids(b"a\xf0\x9f"))
    assert stream.text == "a"
    stream.finish()
    assert stream.text == "a"
    assert decode(byte_ids(b"a\xf0\x9f")) == "a\ufffd"


def first_stop(text: str, stop) -> tuple[int, str] | None:
    """The oracle, one character a token: the shortest prefix that ends in a stop string; the earliest start in it."""
    for end in range(len(text) + 1):
        hits = [(end - len(s), s) for s in stop if text[:end].endswith(s)]
        if hits:
            return min(hits)
    return None


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3, unique=True)


@settings(max_examples=300)
@given(text=st.text("abc", max_size=14), stop=STOPS, keep=st.booleans())
@example(text="aab", stop=["ab"], keep=False)  # across tokens
@example(text="ab", stop=["ab"], keep=False)  # at the start
@example(text="aabaab", stop=["aabaab", "abab"], keep=False)  # overlapping beginnings
@example(text="abb", stop=["abb", "b"], keep=False)  # one inside another
def test_stop_strings_across_tokens(text, stop, keep):
    stream = stream_of(stop, keep=keep)
    seen = push_all(stream, byte_ids(text.encode()))
    stream.finish()
    expected = first_stop(text, stop)
    if expected is None:
        assert stream.matched is None
        assert stream.text == text
    else:
        at, matched = expected
        assert stream.matched == matched
        assert stream.text == text[: at + len(matched) * keep]
        assert len(seen) == at + len(matched), "found one token late"


@settings(max_examples=300)
@given(text=st.text("abc", max_size=14), stop=STOPS)
@example(text="ab", stop=["abc", "bca"])
def test_what_may_become_a_stop_string_is_not_settled_and_the_rest_is(text, stop):
    stream = stream_of(stop)
    sent = 0
    for shown, settled in push_all(stream, byte_ids(text.encode())):
        assert settled >= sent, "text was taken back"
        sent = settled
        if shown == text[: len(shown)] and first_stop(shown, stop) is None and shown != stream.text:
            may_start = [i for i in range(len(shown)) if any(s.startswith(shown[i:]) for s in stop)]
            assert settled == min(may_start, default=len(shown))
    assert sent <= len(stream.text), "part of a stop string was sent"


def test_a_stop_string_inside_a_token_and_several_in_one():
    hell = tokenizer().convert_tokens_to_ids("hell")
    stream = stream_of(["ell"])
    assert stream.extend([hell])
    assert (stream.text, stream.matched) == ("h", "ell")
    stream = stream_of(["ell", "el", "hel"], keep=True)
    assert stream.extend([hell])
    assert (stream.text, stream.matched) == ("hel", "hel")
    stream = stream_of(["ell", "el"])
    assert stream.extend([hell])
    assert (stream.text, stream.matched) == ("h", "ell")


def test_a_stop_string_of_many_bytes():
    stream = stream_of(["🙂é"])
    push_all(stream, byte_ids("a🙂🙂é".encode()))
    assert (stream.text, stream.matched) == ("a🙂", "🙂é")


def test_skipped_special_tokens_do_not_break_a_stop_string():
    stream = stream_of(["ab"])
    push_all(stream, [*byte_ids(b"a"), 0, *byte_ids(b"b")])
    assert stream.matched == "ab"


# A sequence.


def test_a_stop_id_that_only_the_host_knows_ends_the_run():
    a, b, c = byte_ids(b"abc")
    sequence = idle_sequence(host_stops=frozenset({c}))
    assert sequence.accept([a, b], False, False) == 2
    assert sequence.accept([b, c, a, a], False, True) == 2
    done = completion(sequence)
    assert (done.text, done.output_ids, done.completion_tokens) == ("abb", [a, b, b, c], 4)
    assert done.finish_reason == {"type": "stop", "matched": c}


def test_a_stop_id_of_the_device_is_the_last_token_of_its_run():
    a, _, _ = byte_ids(b"abc")
    sequence = idle_sequence()
    assert sequence.accept([a, END], True, False) == 2
    assert sequence.output.stream.text == "a"
    assert sequence.output.tokens == [a, END]
    assert sequence.output.finish_reason == FinishReason("stop", END)


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_string_inside_an_accepted_run(keep):
    ids = byte_ids(b"xyz, end")
    sequence = idle_sequence(SamplingParams(stop="z,", no_stop_trim=keep))
    assert sequence.accept(ids[:2], False, False) == 2
    assert sequence.accept(ids[2:], True, True) == 2
    done = completion(sequence)
    assert done.text == ("xyz," if keep else "xy")
    assert done.output_ids == ids[:4], "tokens after the stop string are dropped, those of it are counted"
    assert done.finish_reason == {"type": "stop", "matched": "z,"}


def test_a_stop_string_that_the_last_token_completes_comes_before_the_limit():
    sequence = idle_sequence(SamplingParams(stop=["b"]))
    sequence.accept(byte_ids(b"ab"), False, True)
    assert sequence.output.finish_reason == FinishReason("stop", "b")


def test_the_limit():
    sequence = idle_sequence()
    sequence.accept(byte_ids(b"ab"), False, True)
    done = completion(sequence)
    assert (done.text, done.finish_reason) == ("ab", {"type": "length", "length": 2})


def test_an_aborted_sequence_keeps_what_it_has():
    sequence = idle_sequence()
    sequence.accept(byte_ids(b"a\xc3"), False, False)
    sequence.abort()
    done = completion(sequence)
    assert (done.text, done.finish_reason) == ("a", {"type": "abort"})


def test_accept_length_is_the_histograms_mean_plus_one():
    sequence = idle_sequence()
    assert sequence.output.accept_length == 1.0
    sequence.output.histogram, sequence.output.verify_steps = [2, 0, 1, 3, 0, 0], 6
    assert sequence.output.verified_tokens == 2 * 1 + 3 + 3 * 4
    assert sequence.output.accept_length == pytest.approx(1 + (0 * 2 + 2 * 1 + 3 * 3) / 6)


def test_the_context_of_a_resumed_sequence_ends_before_its_root():
    sequence = idle_sequence()
    assert (sequence.context, sequence.forced_token) == ([5, 6], None)
    sequence.accept(byte_ids(b"ab"), False, False)
    a, b = byte_ids(b"ab")
    assert (sequence.context, sequence.forced_token) == ([5, 6, a], b)
    assert sequence.most_tokens == 2 + 8 - 1
