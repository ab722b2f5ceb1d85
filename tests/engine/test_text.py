"""Streamed text equals a plain decode for all decoders of fast tokenizers; stop strings, deltas and thoughts."""

from __future__ import annotations

import copy
import functools
import itertools
import re

import pytest
from engine_helpers import END, VOCABULARY, byte_ids, idle_sequence, tokenizer
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from specjax.checkpoint.prompts import END_THINK, THINK
from specjax.engine import FinishReason, SamplingParams
from specjax.engine.chat.message_format import ReplyOptions
from specjax.engine.generation import DeltaReader
from specjax.engine.intake import Intake
from specjax.engine.sequence import RawLogprob, Status
from specjax.engine.text import Detokenizer, TextStream, Thoughts

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = [
    "<unk>", "<s>", "</s>", "▁", "▁▁", "▁Sure", "Sure", "!", "▁!", ".", "▁.", "'", "▁'", "s", "▁'s", "n't", "▁n't",
    "▁a", "a", "é", "漢", "##b", "b</w>", "</w>", "\ufffd", "\u200d", "▁a▁", " ", "  x ", "Ġa", "x</w>y</w>",
]  # fmt: skip
NAMES = [*WORDS, *BYTES, "<extra>"]
SPECIALS = [AddedToken(name, special=True, normalized=False) for name in WORDS[:3]]

REPLACE, STRIP = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
LLAMA = decoders.Sequence([REPLACE, decoders.ByteFallback(), decoders.Fuse(), STRIP])
DECODERS = {
    "byte level": decoders.ByteLevel(),
    "always": decoders.Metaspace(prepend_scheme="always"),
    "first": decoders.Metaspace(prepend_scheme="first"),
    "never": decoders.Metaspace(prepend_scheme="never"),
    "llama": LLAMA,
    "gemma": decoders.Sequence([REPLACE, decoders.ByteFallback(), decoders.Fuse()]),
    "bytes last": decoders.Sequence([REPLACE, decoders.Fuse(), decoders.ByteFallback()]),
    "bytes first": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "bytes alone": decoders.ByteFallback(),
    "joined": decoders.Sequence(
        [decoders.Fuse(), decoders.Metaspace(), decoders.Replace("Sure!", "?"), decoders.Strip(" ", 2, 2)]
    ),
    "nested": decoders.Sequence([decoders.Sequence([REPLACE, decoders.Fuse()]), decoders.Strip("!", 0, 3)]),
    "separate": decoders.Sequence([decoders.Replace(Regex("[▁']"), " "), decoders.Strip(" ", 1, 0)]),
    "stripped bytes": decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 1)]),
    "wordpiece": decoders.WordPiece(),
    "suffix": decoders.BPEDecoder(),
    "none": None,
}


@functools.cache
def tokenizer_of(decoder: str, model: str = "bpe", clean: bool = False) -> PreTrainedTokenizerFast:
    if model == "bpe":
        ids = {name: i for i, name in enumerate(NAMES[:-1])}
        core = Tokenizer(models.BPE(ids, [], byte_fallback=True, unk_token="<unk>"))
    else:
        scores = [(name, -float(i)) for i, name in enumerate(NAMES[:-1])]
        core = Tokenizer(models.Unigram(scores, 0, byte_fallback=True))
    core.add_special_tokens(SPECIALS)
    core.add_tokens([AddedToken("<extra>", special=False, normalized=False)])
    if DECODERS[decoder] is not None:
        core.decoder = DECODERS[decoder]
    fast = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=clean)
    fast.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = clean
    return fast


KINDS = [*((name, "bpe", False) for name in DECODERS), *((name, "unigram", False) for name in ("first", "bytes first"))]
KINDS += [("llama", "bpe", True), ("first", "unigram", True), ("none", "unigram", True)]


def ids_of(*names: str) -> list[int]:
    return [NAMES.index(name) for name in names]


IDS = st.lists(st.one_of(st.integers(0, len(NAMES)), st.integers(0, len(WORDS) - 1)), max_size=14)
BYTE_IDS = st.text(st.sampled_from("aé漢🙂\n"), max_size=4).map(lambda s: [len(WORDS) + byte for byte in s.encode()])
MIXED = st.lists(st.one_of(IDS, BYTE_IDS), max_size=4).map(lambda parts: [token for part in parts for token in part])


@pytest.mark.parametrize(("decoder", "model", "clean"), KINDS)
@settings(max_examples=40)
@given(ids=MIXED, skip=st.booleans())
@example(ids_of("▁", "▁Sure", "!"), True)
@example(ids_of("<s>", "▁", "</s>", "▁Sure", "<0x20>", "!"), True)
@example(ids_of("<0x0A>", "<0xF0>", "a"), True)  # half an emoji turns the newline into U+FFFD
@example(ids_of("<0xE6>", "</s>", "<0xBC>", "<0xA2>", "<0xA2>"), True)
@example(ids_of("a", "▁", "!", "▁", "▁"), False)
@example(ids_of("Sure", "!", "a", "!", "!"), False)
@example(ids_of("Sure", "!", "a", "Ġa", "▁", " ", "▁", "▁"), False)
@example([len(NAMES), *ids_of("▁Sure")], False)  # an id without a token
@example([*ids_of("a", "<0x0A>"), len(NAMES), *ids_of("<0xF0>", "a")], False)  # in a run of byte tokens
def test_stream_equals_plain_decode(decoder, model, clean, ids, skip):
    fast = tokenizer_of(decoder, model, clean)
    stream = Detokenizer(fast, skip_special_tokens=skip)
    text = "".join(map(stream.push, ids)) + stream.finish()
    try:
        expected = fast.decode(ids, skip_special_tokens=skip)
    except BaseException as error:  # the library's stripping panics at texts shorter than what it strips
        assume(type(error).__name__ != "PanicException")
        raise
    assert text == expected


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("end", ["stop", "length"])
def test_streamed_logprobs_hold_all_text(end, late):
    """Pieces that were sent do not change when the end adds text that was held back."""
    stream = TextStream(tokenizer_of("llama"), (), skip_special_tokens=True, keep_stop=False, late=late)
    sequence = idle_sequence(SamplingParams(logprobs=0), stream=stream)
    steps = [ids_of("▁Sure", "<0xC3>", "<0xA9>"), ids_of("</s>", "<0xC3>"), ids_of("<0xA9>"), ids_of("</s>")]
    steps = steps if end == "stop" else steps[:-1]
    chunks, reader = [], DeltaReader(sequence)
    for i, tokens in enumerate(steps):
        last = i == len(steps) - 1
        kept = sequence.accept(tokens, end == "stop" and last, end == "length" and last)
        sequence.output.logprobs += [RawLogprob(-1.0, ())] * kept
        sequence.status = Status.FINISHED if last else Status.RUNNING
        chunks.append(reader.take())
    assert "".join(chunk.text for chunk in chunks if chunk) == sequence.output.stream.text == "Sureéé"
    entries = [entry for chunk in chunks if chunk for entry in chunk.logprobs]
    assert "".join(entry.text for entry in entries) == "Sureéé"
    assert [entry.token for entry in entries] == sequence.output.tokens


def test_deltas_while_more_tokens_arrive():
    stream = TextStream(tokenizer(), (), skip_special_tokens=True, keep_stop=False, late=True)
    sequence = idle_sequence(SamplingParams(logprobs=0), stream=stream, status=Status.RUNNING)
    ids = byte_ids("aébcd".encode())
    sequence.accept(ids, False, False)
    sequence.output.logprobs += [RawLogprob(-1.0, ())] * len(ids)
    reader = DeltaReader(sequence)
    chunks = [reader.take(count) for count in (1, 2, 3, 5)]
    assert [chunk and chunk.text for chunk in chunks] == ["a", None, "é", "bc"]
    assert [token for chunk in chunks if chunk for token in chunk.output_ids] == ids[:5]
    assert [entry.text for chunk in chunks if chunk for entry in chunk.logprobs] == ["a", "", "é", "b", "c"]
    sequence.accept(byte_ids(b"!\xc3"), False, True)
    sequence.status = Status.FINISHED
    last = reader.take()
    assert (last.text, last.completion.text) == ("d!\ufffd", "aébcd!\ufffd")


def test_stop_string_in_text_that_was_held_back():
    """The stop string precedes the stop token that ends the sequence."""
    stream = TextStream(tokenizer_of("llama"), ("é",), skip_special_tokens=True, keep_stop=False)
    sequence = idle_sequence(stream=stream)
    sequence.accept(ids_of("a", "<0xC3>", "<0xA9>", "</s>"), True, False)
    assert (sequence.output.stream.text, sequence.output.finish_reason) == ("a", FinishReason("stop", "é"))


class Counted:
    """A slow tokenizer that counts decoded tokens."""

    def __init__(self) -> None:
        self.inner, self.decoded = tokenizer(), 0
        self.added_tokens_decoder, self.unk_token_id = self.inner.added_tokens_decoder, None
        self.convert_tokens_to_ids = self.inner.convert_tokens_to_ids
        self.convert_ids_to_tokens = self.inner.convert_ids_to_tokens

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        self.decoded += len(ids)
        return self.inner.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("ids", [byte_ids("漢🙂a".encode()) * 100, [END] * 2000, byte_ids(b"\x80") * 2000])
def test_decoding_is_linear_work(ids):
    fast = Counted()
    stream = Detokenizer(fast, skip_special_tokens=True)
    text = "".join(map(stream.push, ids)) + stream.finish()
    assert text == tokenizer().decode(ids, skip_special_tokens=True)
    assert fast.decoded < 20 * len(ids)


@pytest.mark.parametrize(("decoder", "model", "clean"), KINDS)
@settings(max_examples=20)
@given(ids=MIXED.filter(lambda ids: len(ids) < 8))
def test_text_is_held_back_no_longer_than_needed(decoder, model, clean, ids):
    fast = tokenizer_of(decoder, model, clean)
    stream = Detokenizer(fast, skip_special_tokens=False)
    tokens = [*ids, *ids_of("a", "a")]
    text = "".join(map(stream.push, tokens))
    assert text == fast.decode(tokens)[: len(text)] and len(fast.decode(tokens)) - len(text) <= 1


def test_custom_decode_is_used(monkeypatch):
    core = Tokenizer(models.BPE({name: i for i, name in enumerate(NAMES)}, []))
    core.decoder = decoders.Metaspace()
    fast = PreTrainedTokenizerFast(tokenizer_object=core)
    plain = fast.decode
    monkeypatch.setattr(fast, "decode", lambda ids, **options: plain(ids, **options).upper())
    stream = Detokenizer(fast, skip_special_tokens=True)
    ids = ids_of("▁Sure", "!", "▁a")
    assert "".join(map(stream.push, ids)) + stream.finish() == "SURE! A"


@functools.cache
def syllables() -> PreTrainedTokenizerFast:
    """Tokens are all texts of one to three of the letters a and b."""
    names = ["".join(letters) for size in (1, 2, 3) for letters in itertools.product("ab", repeat=size)]
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(["[UNK]", *names])}, unk_token="[UNK]"))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]")


@settings(max_examples=200)
@given(
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=12),
)
def test_stop_strings(stop, pieces):
    """The first token that completes one ends it: the earliest start wins, then the longest."""
    stream, text = TextStream(syllables(), tuple(stop), skip_special_tokens=True, keep_stop=False), ""
    for piece in pieces:
        text += piece
        stopped = stream.extend([syllables().convert_tokens_to_ids(piece)])
        if found := [(text.find(each), -len(each), each) for each in stop if each in text]:
            start, _, matched = min(found)
            assert (stopped, stream.text, stream.matched) == (1, text[:start], matched)
            return
        assert (stopped, stream.text) == (0, text)
        held = max(n for each in stop for n in range(len(each)) if text.endswith(each[:n]))
        assert stream.settled == len(text) - held


def answer_start(text: str, begun: bool, last: bool) -> int | None:
    """Where the answer begins in a text so far; None: not yet, or that depends on what follows."""
    opened = re.match(r"\s{,8}(?:<think>\s{,8})*", text)[0]
    if not begun and THINK not in opened:
        return None if THINK.startswith(text[len(opened) :]) and not last else 0
    if (at := text.find(END_THINK)) < 0:
        return None
    start = at + len(END_THINK)
    start += len(text[start:]) - len(text[start:].lstrip())
    return start if start < len(text) else None


def first_match(text: str, begun: bool, stop: list[str], patterns: list[str]) -> tuple[int, int, int, str] | None:
    """Number of characters, one a token, that complete a stop in the answer; its start, its end, and what it is."""
    for count in [*range(1, len(text) + 1), len(text) + 1]:
        start = answer_start(text[:count], begun, count > len(text))
        if start is None:
            continue
        part = text[start:count]
        found = [(part.find(each), -part.find(each) - len(each), each) for each in stop if each in part]
        matches = [(match.start(), -match.end(), each) for each in patterns if (match := re.search(each, part))]
        found += sorted(matches, key=lambda match: match[:2])[:1]
        if found:
            first, end, each = min(found)
            return min(count, len(text)), start + first, start - end, each
    return None


THOUGHTS = st.lists(
    st.sampled_from([THINK, END_THINK, "<th", "ink>", "</", "think>", *"abcxA1", "ab", " ", "\n", "\n\n"]), max_size=12
).map("".join)
PATTERNS = [
    "^a", r"\bb", "a\\s?b", "[^a]b", ">", "a+", "ab+", "b|ca", "a[bc]a", r"\bab", "(?m)^c", "a{2,3}", r"\d+", "c$",
    "a.*c", "(?i)AB", "x+ab",
]  # fmt: skip


@settings(max_examples=300)
@given(
    text=THOUGHTS,
    begun=st.booleans(),
    stop=st.lists(st.sampled_from(["a", "ab", "\n", "\n\n", "k>a", "<t", "</", " a", "b ", END_THINK]), max_size=3),
    patterns=st.lists(st.sampled_from(PATTERNS), max_size=3),
    keep=st.booleans(),
    sizes=st.lists(st.integers(1, 12), max_size=8),
)
@example("a</think>a", True, ["k>a"], [], False, [3])  # across the end of the thoughts
@example("<think>ab</think>\n\nab", False, ["\n\n", "ab"], [], False, [])  # the white space is no answer
@example("<think>a</think>ab", False, [], ["^a"], True, [9, 9])  # the answer's first characters
@example("<t", False, ["<t"], [], False, [1])  # decided by the end
@example(" <th a", False, ["h "], [" "], False, [1, 1, 1, 1, 1, 1])  # decided by a later token
@example("<think>a", False, ["a"], [], False, [])  # never ends
@example("\n" * 30, False, ["\n"], [], False, [1] * 30)  # no thoughts begin after so much white space
@example(" " * 9 + "<think>a</think>", False, ["a"], [], False, [1] * 30)
def test_stops_match_only_in_the_answer(text, begun, stop, patterns, keep, sizes):
    stream = TextStream(
        tokenizer(), tuple(stop), skip_special_tokens=True, keep_stop=keep, patterns=patterns, thoughts=Thoughts(begun)
    )
    ids, taken, shown = byte_ids(text.encode()), 0, []
    for size in [*sizes, len(ids)]:
        stopped = stream.extend(ids[taken : taken + size])
        taken = min(taken + (stopped or size), len(ids))
        shown.append(stream.text[: stream.settled])
        if begun and answer_start(text[:taken], True, False) is None:
            assert shown[-1] == text[:taken], "thoughts are not held back"
        if stopped:
            break
    assert shown == sorted(shown, key=len), "more is held back than before"
    stream.finish()
    expected = first_match(text, begun, stop, patterns)
    count, start, end, matched = expected or (len(text), len(text), len(text), None)
    assert (taken, stream.text, stream.matched) == (count, text[: end if keep else start], matched)
    assert all(stream.text.startswith(each) for each in shown), "text was taken back"
    assert "".join(stream.piece(i) for i in range(taken)) == stream.text
    whole, cut = (ReplyOptions(reasoning=True).reply(thinking=begun) for _ in range(2))
    whole.feed(text, last=True)
    cut.feed(stream.text, last=True)
    assert cut.message()["reasoning_content"] == whole.message()["reasoning_content"], "the thoughts are whole"


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("prompt", "fields", "expected"),
    [
        ("hi", {}, "<think>a s"),
        ("hi", {"stop_after_reasoning": True}, "<think>a stop</think> "),
        ("<think>\n", {"stop_after_reasoning": True}, "<think>a stop</think> "),
        ("hi", {"stop_after_reasoning": True, "require_reasoning": True}, "<think>a stop</think> "),
        ("<think></think>\n\n", {"stop_after_reasoning": True}, "<think>a s"),
        ("<think></think>", {"stop_after_reasoning": True, "require_reasoning": True}, "<think>a stop</think> "),
    ],
)
def test_stops_after_thoughts_with_marker_tokens(special, prompt, fields, expected):
    """Special tokens are left out of the text."""
    thinking = copy.deepcopy(tokenizer())
    thinking.add_tokens([THINK, END_THINK], special_tokens=special)
    params = SamplingParams(stop="top", max_new_tokens=60, **fields)
    sequence = Intake(thinking, VOCABULARY + 2, 128, 1024, (END,), 0).sequence(prompt, params)
    sequence.accept(thinking("<think>a stop</think> top", add_special_tokens=False)["input_ids"], False, False)
    if special:
        expected = expected.replace(THINK, "").replace(END_THINK, "")
    assert (sequence.output.stream.text, sequence.output.stream.matched) == (expected, "top")
