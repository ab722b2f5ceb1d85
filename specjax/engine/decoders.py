"""The decoders of the `tokenizers` library as transducers: tokens go in one at a time, final text comes out.

The library's own `DecodeStream` is not used: it has no end, so it never gives out text that it holds back, it fails
where a byte turns a run of byte tokens into U+FFFD, and it is slower than remembering tokens (`benchmarks/host.py`).
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

REPLACEMENT = "\ufffd"  # stands for bytes that are not, or not yet, a character

# What `clean_up_tokenization` of transformers replaces, in its order.
_CLEAN_UP = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"),
    (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")  # the sign: as Rust reads numbers


class UnknownDecoderError(ValueError):
    """A decoder that cannot be streamed."""


class Step:
    """One decoder of the chain. After one that joins all tokens, the pieces of that one token stand for tokens."""

    held: Any = None  # for `end`; false if that is nothing

    @property
    def settled(self) -> bool:
        """Whether nothing of the tokens so far matters for later ones, so that these give the text that they would give
        after any other tokens that leave the step settled."""
        return not self.held

    def push(self, token: str) -> Iterable[str]:
        """Adds a token; returns the tokens that no later one can change."""
        return (token,)

    def end(self, keep_incomplete: bool) -> Iterable[str]:
        """The tokens that were held back. An incomplete character is left out unless it is to be kept, as U+FFFD."""
        return ()


class _Each(Step):
    """A function of each token alone, with another one for the first."""

    def __init__(self, first: Callable[[str], str], rest: Callable[[str], str] | None = None) -> None:
        self._function, self._rest = first, rest or first

    @property
    def settled(self) -> bool:
        return self._function is self._rest

    def push(self, token: str) -> Iterable[str]:
        found = self._function(token)
        self._function = self._rest
        return (found,)


class _Suffix(Step):
    """BPEDecoder: a suffix of a token becomes a space, and nothing in the last token, so one token is held back."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix

    @property
    def settled(self) -> bool:
        return False

    def push(self, token: str) -> Iterable[str]:
        held, self.held = self.held, token
        return () if held is None else (held.replace(self._suffix, " "),)

    def end(self, keep_incomplete: bool) -> Iterable[str]:
        return () if self.held is None else (self.held.replace(self._suffix, ""),)


def _is_incomplete(held: bytes) -> bool:
    """Whether what Python's decoder holds back may begin a character. It holds surrogates back too, which are none."""
    return bool(held) and not (held[0] == 0xED and len(held) > 1 and held[1] >= 0xA0)


class _ByteLevel(Step):
    """Characters that stand for bytes (GPT-2's table); a token with others stands for its own bytes.

    Held back: an incomplete character, and U+FFFD (`held` of them) until another character follows, so that a client
    that shows text as it comes shows as few as possible.
    """

    def __init__(self) -> None:
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self.held = 0

    @property
    def settled(self) -> bool:
        return not self.held and not self._bytes.getstate()[0]

    def push(self, token: str) -> Iterable[str]:
        table = byte_of_letter()
        try:
            data = bytes([table[character] for character in token])
        except KeyError:
            data = token.encode()
        text = self._bytes.decode(data)
        if not (shown := text.rstrip(REPLACEMENT)):
            self.held += len(text)
            return ()
        held, self.held = self.held, len(text) - len(shown)
        return (REPLACEMENT * held + shown,)

    def end(self, keep_incomplete: bool) -> Iterable[str]:
        keep_incomplete = keep_incomplete or not _is_incomplete(self._bytes.getstate()[0])
        rest = self._bytes.decode(b"", final=True) if keep_incomplete else ""
        return (REPLACEMENT * self.held + rest,)


class _ByteFallback(Step):
    """`<0xE2>` is a byte. A run of bytes is decoded as a whole; if it is no UTF-8, all of it is U+FFFD."""

    def __init__(self) -> None:
        self.held = bytearray()

    def push(self, token: str) -> Iterable[str]:
        if found := _BYTE_TOKEN.fullmatch(token):
            self.held.append(int(found[1], 16))
            return ()
        return (*self._flush(), token) if self.held else (token,)

    def end(self, keep_incomplete: bool) -> Iterable[str]:
        if not keep_incomplete:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            decoder.decode(bytes(self.held))
            incomplete, _ = decoder.getstate()
            if _is_incomplete(incomplete):
                del self.held[len(self.held) - len(incomplete) :]
        return self._flush()

    def _flush(self) -> Iterable[str]:
        run, self.held = self.held, bytearray()
        try:
            return (run.decode(),) if run else ()
        except UnicodeDecodeError:
            return (REPLACEMENT,) * len(run)


class _Replace(Step):
    """`str.replace` over text that comes in pieces. Held back: a possible beginning of the pattern."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern, self._content, self.held = pattern, content, ""

    def push(self, token: str) -> Iterable[str]:
        *done, rest = (self.held + token).split(self._pattern)
        most = min(len(self._pattern) - 1, len(rest))
        end = len(rest) - next((n for n in range(most, 0, -1) if self._pattern.startswith(rest[-n:])), 0)
        self.held = rest[end:]
        return (self._content.join((*done, rest[:end])),)

    def end(self, keep_incomplete: bool) -> Iterable[str]:
        return (self.held,)


class _Strip(Step):
    """Removes a character, up to `start` and `stop` times, at both ends of text that comes in pieces. Those that may be
    at its end are kept back, and dropped if no text follows."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content, self._start, self._stop = content, start, stop
        self._end = ""

    @property
    def settled(self) -> bool:
        return not self._start and not self._end

    def push(self, token: str) -> Iterable[str]:
        while self._start and token.startswith(self._content):
            token, self._start = token[1:], self._start - 1
        if token:
            self._start = 0
        text = self._end + token
        end = max(len(text.rstrip(self._content)), len(text) - self._stop)
        self._end = text[end:]
        return (text[:end],)


@functools.cache
def byte_of_letter() -> dict[str, int]:
    """GPT-2's alphabet of bytes: printable ones are themselves, the others follow from U+0100."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(others)}


MakeStep: TypeAlias = Callable[[], Step]


def decoder_steps(decoder: Any) -> list[MakeStep]:
    """The chain of a decoder of the `tokenizers` library. Raises UnknownDecoderError for one that cannot stream."""
    if decoder is None:  # tokens are joined by spaces
        return [lambda: _Each(str, lambda token: " " + token)]
    found: list[MakeStep] = []
    make = _separate
    for part in _flat(json.loads(decoder.__getstate__())):
        if part["type"] != "Fuse":
            found.append(make(part))
        if part["type"] in ("Fuse", "ByteLevel"):
            make = _joined
    return found


def _flat(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if part["type"] != "Sequence":
        return [part]
    return [inner for each in part["decoders"] for inner in _flat(each)]


def _separate(part: Mapping[str, Any]) -> MakeStep:
    """A part that sees single tokens. Of tokens of which nothing is held back the library's own code makes the text."""
    from tokenizers import decoders

    match part:
        case {"type": "ByteLevel"}:
            return _ByteLevel
        case {"type": "ByteFallback"}:
            return _ByteFallback
        case {"type": "BPEDecoder", "suffix": suffix}:
            return lambda: _Suffix(suffix)
        case {"type": "Strip", "content": content, "start": start, "stop": stop}:
            # Not the library's, which panics at tokens shorter than what it strips.
            return lambda: _Each(lambda token: "".join(_Strip(content, start, stop).push(token)))
        case {"type": "Replace" | "Metaspace" | "WordPiece"}:
            known = decoders.Fuse()
            known.__setstate__(json.dumps(part).encode())  # now it is this part, as when it is unpickled
            return lambda: _Each(lambda token: known.decode([token]), lambda token: known.decode(["", token]))
    raise UnknownDecoderError(part["type"])


def _joined(part: Mapping[str, Any]) -> MakeStep:
    """A part that sees all text as one token."""
    match part:
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": content} if pattern:
            return lambda: _Replace(pattern, content)
        case {"type": "Strip", "content": content, "start": start, "stop": stop}:
            return lambda: _Strip(content, start, stop)
        case {"type": "Metaspace", "replacement": replacement, "prepend_scheme": scheme}:
            return lambda: _Each(lambda token: token.replace(replacement, " " if scheme == "never" else ""))
    raise UnknownDecoderError(f"{part['type']} after tokens are joined")


def cleans(tokenizer: Any) -> bool:
    """Whether transformers removes spaces from the decoded text: if the tokenizer asks for it, but not of BPE unless
    forced."""
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    wanted = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
    return wanted and (not is_bpe or bool(getattr(tokenizer, forced, False)))


def clean_up_steps(tokenizer: Any) -> list[MakeStep]:
    """Transformers' clean-up of decoded text. Raises UnknownDecoderError if this version replaces something else."""
    if not cleans(tokenizer):
        return []
    probe = "".join(f"a{pattern}b {pattern}" for pattern, _ in _CLEAN_UP)
    expected = functools.reduce(lambda text, pair: text.replace(*pair), _CLEAN_UP, probe)
    if tokenizer.clean_up_tokenization(probe) != expected:
        raise UnknownDecoderError("clean_up_tokenization")
    return [functools.partial(_Replace, pattern, content) for pattern, content in _CLEAN_UP]
