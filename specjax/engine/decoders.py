"""The decoders of the `tokenizers` library as transducers: tokens go in one at a time, what is final comes out.

`decoder_steps` makes the chain for a tokenizer's decoder, `clean_up_steps` what transformers does to its text.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

REPLACEMENT = "\ufffd"
"""What a decoder puts where bytes are no character (yet)."""

# What `clean_up_tokenization` of transformers replaces, in its order.
_CLEAN_UP = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"),
    (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")  # the sign: as Rust reads numbers


class UnknownDecoderError(ValueError):
    """A decoder whose text cannot be made as its tokens come."""


@runtime_checkable
class Step(Protocol):
    """One decoder of the chain. After one that joins all tokens, the pieces of that one token stand for tokens."""

    @property
    def holds(self) -> bool: ...

    def push(self, token: str) -> Iterable[str]: ...

    def end(self, keep_incomplete: bool) -> Iterable[str]: ...


class _Map:
    """A function of each token alone."""

    holds = False

    def __init__(self, function: Callable[[str], str]) -> None:
        self._function = function

    def push(self, token: str) -> Iterable[str]:
        return (self._function(token),)

    def end(self, keep_incomplete: bool) -> Iterable[str]:
        return ()


class _First(_Map):
    """A function for the first token and another for the rest."""

    def __init__(self, first: Callable[[str], str], rest: Callable[[str], str]) -> None:
        super().__init__(first)
        self._rest = rest

    def push(self, token: str) -> Iterable[str]:
        found = super().push(token)
        self._function = self._rest
        return found


class _Last(_Map):
    """A function for the last token and another for those before, so one token is held back."""

    def __init__(self, others: Callable[[str], str], last: Callable[[str], str]) -> None:
        super().__init__(others)
        self._last = last
        self._held: str | None = None

    @property
    def holds(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._held is not None

    def push(self, token: str) -> Iterable[str]:
        held, self._held = self._held, token
        return () if held is None else super().push(held)

    def end(self, keep_incomplete: bool) -> Iterable[str]:
        return () if self._held is None else (self._last(self._held),)


class _ByteLevel:
    """Characters that stand for bytes (GPT-2's table); a token with others stands for its own bytes.

    Held back: an incomplete character, which is left out at the end, and U+FFFD until another character follows, so
    that a client that shows text as it comes shows as few as there can be.
    """

    def __init__(self) -> None:
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._replaced = 0  # U+FFFD that are held back

    @property
    def holds(self) -> bool:
        return self._replaced > 0

    def push(self, token: str) -> Iterable[str]:
        table = byte_of_letter()
        try:
            data = bytes([table[character] for character in token])
        except KeyError:
            data = token.encode()
        text = self._bytes.decode(data)
        shown = text.rstrip(REPLACEMENT)
        before, self._replaced = self._replaced, len(text) - len(shown)
        if not shown:
            self._replaced += before
            return ()
        return (REPLACEMENT * before + shown,)

    def end(self, keep_incomplete: bool) -> Iterable[str]:
        rest = self._bytes.decode(b"", final=True) if keep_incomplete else ""
        return (REPLACEMENT * self._replaced + rest,)


class _ByteFallback:
    """`<0xE2>` is a byte. A run of bytes is decoded as a whole, and one that is no UTF-8 is all U+FFFD."""

    def __init__(self) -> None:
        self._run = bytearray()

    @property
    def holds(self) -> bool:
        return bool(self._run)

    def push(self, token: str) -> Iterable[str]:
        if found := _BYTE_TOKEN.fullmatch(token):
            self._run.append(int(found[1], 16))
            return ()
        return (*self._flush(), token) if self._run else (token,)

    def end(self, keep_incomplete: bool) -> Iterable[str]:
        if not keep_incomplete:
            del self._run[len(self._run) - _incomplete(self._run) :]
        return self._flush()

    def _flush(self) -> Iterable[str]:
        run, self._run = self._run, bytearray()
        try:
            return (run.decode(),) if run else ()
        except UnicodeDecodeError:
            return (REPLACEMENT,) * len(run)


class _Replace:
    """`str.replace` over text that comes in pieces. Held back: what may be the beginning of the pattern."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern, self._content = pattern, content
        self._held = ""

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def push(self, token: str) -> Iterable[str]:
        *done, rest = (self._held + token).split(self._pattern)
        most = min(len(self._pattern) - 1, len(rest))
        kept = next((n for n in range(most, 0, -1) if self._pattern.startswith(rest[-n:])), 0)
        self._held = rest[len(rest) - kept :]
        return (self._content.join((*done, rest[: len(rest) - kept])),)

    def end(self, keep_incomplete: bool) -> Iterable[str]:
        return (self._held,)


class _Strip:
    """Removes characters at both ends of text that comes in pieces. Held back: those that may be at its end."""

    holds = False  # they go if nothing follows

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content, self._start, self._stop = content, start, stop
        self._held = ""

    def push(self, token: str) -> Iterable[str]:
        while self._start and token:
            if not token.startswith(self._content):
                self._start = 0
                break
            token, self._start = token[1:], self._start - 1
        text = self._held + token
        kept = _trailing(text, self._content, self._stop)
        self._held = text[len(text) - kept :]
        return (text[: len(text) - kept],)

    def end(self, keep_incomplete: bool) -> Iterable[str]:
        return ()


def _trailing(text: str, content: str, most: int) -> int:
    count = 0
    while count < min(most, len(text)) and text[-1 - count] == content:
        count += 1
    return count


def _incomplete(data: bytes | bytearray) -> int:
    """Bytes at the end that are the beginning of a character: 2 of `b"a\\xf0\\x9f"`."""
    for count in range(1, min(3, len(data)) + 1):
        if data[-count] >= 0xC0:  # where a character begins
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            return count if not decoder.decode(bytes(data[-count:])) else 0
    return 0


@functools.cache
def byte_of_letter() -> dict[str, int]:
    """GPT-2's alphabet of bytes: printable ones are themselves, the others follow from U+0100."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(others)}


def decoder_steps(decoder: Any) -> list[Callable[[], Step]]:
    """The chain of a decoder of the `tokenizers` library.

    Raises:
        UnknownDecoderError: it has a part that cannot be streamed.
    """
    if decoder is None:  # tokens are joined by spaces
        return [lambda: _First(str, lambda token: " " + token)]
    parts = _flat(json.loads(decoder.__getstate__()))
    found: list[Callable[[], Step]] = []
    joined = False  # by a part before
    for part in parts:
        kind = part["type"]
        if kind == "Fuse":
            joined = True
            continue
        make = (_JOINED if joined else _SEPARATE).get(kind)
        if make is None:
            raise UnknownDecoderError(f"{kind}{' after tokens are joined' if joined else ''}")
        found.append(make(part))
        joined = joined or kind == "ByteLevel"
    return found


def _flat(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if part["type"] != "Sequence":
        return [part]
    return [inner for each in part["decoders"] for inner in _flat(each)]


def _separate_replace(part: Mapping[str, Any]) -> Callable[[], Step]:
    from tokenizers import Regex, decoders

    pattern, content = part["pattern"], part["content"]
    if pattern.get("String"):
        return lambda: _Map(lambda token: token.replace(pattern["String"], content))
    if "Regex" not in pattern:
        raise UnknownDecoderError(f"Replace of {pattern!r:.60}")
    known: Any = decoders.Replace(Regex(pattern["Regex"]), content)
    return lambda: _Map(lambda token: known.decode([token]))


def _joined_replace(part: Mapping[str, Any]) -> Callable[[], Step]:
    if not part["pattern"].get("String"):
        raise UnknownDecoderError(f"Replace of {part['pattern']!r:.60} after tokens are joined")
    return lambda: _Replace(part["pattern"]["String"], part["content"])


def _separate_strip(part: Mapping[str, Any]) -> Callable[[], Step]:
    def strip(token: str) -> str:
        step = _Strip(part["content"], part["start"], part["stop"])
        return "".join(step.push(token))

    return lambda: _Map(strip)


def _metaspace(part: Mapping[str, Any], joined: bool) -> Callable[[], Step]:
    def replaced(by: str) -> Callable[[str], str]:
        return lambda token: token.replace(part["replacement"], by)

    first = replaced(" " if part["prepend_scheme"] == "never" else "")
    return lambda: _First(first, first if joined else replaced(" "))


def _word_piece(part: Mapping[str, Any]) -> Callable[[], Step]:
    from tokenizers import decoders

    known: Any = decoders.WordPiece(part["prefix"], part["cleanup"])
    return lambda: _First(lambda token: known.decode([token]), lambda token: known.decode(["", token]))


def _bpe(part: Mapping[str, Any]) -> Callable[[], Step]:
    suffix = part["suffix"]
    return lambda: _Last(lambda token: token.replace(suffix, " "), lambda token: token.replace(suffix, ""))


_SEPARATE: dict[str, Callable[[Mapping[str, Any]], Callable[[], Step]]] = {
    "ByteLevel": lambda part: _ByteLevel,
    "ByteFallback": lambda part: _ByteFallback,
    "Replace": _separate_replace,
    "Strip": _separate_strip,
    "Metaspace": lambda part: _metaspace(part, joined=False),
    "WordPiece": _word_piece,
    "BPEDecoder": _bpe,
}
_JOINED: dict[str, Callable[[Mapping[str, Any]], Callable[[], Step]]] = {
    "Replace": _joined_replace,
    "Strip": lambda part: lambda: _Strip(part["content"], part["start"], part["stop"]),
    "Metaspace": lambda part: _metaspace(part, joined=True),
}


def cleans(tokenizer: Any) -> bool:
    """Whether transformers removes spaces from the decoded text: where asked for, but not of BPE unless forced."""
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    wanted = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
    return wanted and (not is_bpe or bool(getattr(tokenizer, forced, False)))


def clean_up_steps(tokenizer: Any) -> list[Callable[[], Step]]:
    if not cleans(tokenizer):
        return []
    probe = "".join(f"a{pattern}b {pattern}" for pattern, _ in _CLEAN_UP)
    expected = functools.reduce(lambda text, pair: text.replace(*pair), _CLEAN_UP, probe)
    if tokenizer.clean_up_tokenization(probe) != expected:
        raise UnknownDecoderError("clean_up_tokenization")
    return [functools.partial(_Replace, pattern, content) for pattern, content in _CLEAN_UP]
