"""Incremental detokenisation, and the stop strings and patterns that end a text.

The text of an output is `tokenizer.decode` of all its tokens. `Detokenizer` emits it in pieces that no later token can
change, and holds back tokens whose text may still change. It decodes tokens between two copies of a plain token such as
`a`, which makes their text independent of other tokens, and caches it. `DecodeStream` of the tokenizers library cannot
be finished, so it never emits text that it holds back, and it fails where a byte token invalidates earlier ones.

Stop patterns come from clients, so they run on RE2 (Google's package google-re2), in time linear in the text; Python's
`re` needs hours for some patterns of ten characters. After each token the end of the text is searched: the characters
that the token added, and before them as many as a match can have, at most `MAX_MATCH`. So `$` and `\\b` may match at
the end of each token's text, and only the end of a match longer than `MAX_MATCH` is found.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import string
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from specjax.checkpoint.prompts import THINK_MARKS, ThinkMarks
from specjax.packages import need

REPLACEMENT = "\ufffd"  # replaces bytes that are not, or not yet, a character
MAX_TRIES = 8  # decodes of held tokens, before further ones wait until the number of tokens is a power of two
LEAD = re.compile(r"\s{,8}")  # white space before `<think>`; models write one or two line breaks
FINAL = re.compile(r"<\|channel\|>\s{,8}final(?![^\s<])[^<]{,200}(?:<\|constrain\|>[^<]{,200})?<\|message\|>")
_CLEANED = " [n']?['vr]?"  # prefixes of what transformers' `clean_up_tokenization` replaces
MAX_HEADER = 512  # characters of a match of `FINAL`
ANALYSIS = re.compile(r"(?s:.*)<\|channel\|>\s*analysis(?!\w)(?!.*\bto=)[^<]*")  # the text before thoughts in Harmony
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Tokens to text


def token_bytes(name: str) -> bytes | None:
    """Bytes of a token from its name, such as `<0xC3>` or in GPT-2's alphabet; None: the name is text."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    if match := _BYTE.fullmatch(name):
        return bytes.fromhex(match[1])
    table = {letter: byte for byte, letter in bytes_to_unicode().items()}
    return bytes(table[letter] for letter in name) if all(letter in table for letter in name) else None


class _Decoder:
    """Decoder shared by the streams of one tokenizer that skip the same special tokens.

    Attributes:
        skipped: names of the skipped tokens, by id.
        falls_back: names such as `<0xC3>` stand for bytes. One bad byte turns a whole run of them into U+FFFD.
        lag: 1 if the decoder treats the last token differently from others, else 0.
        cache: text by token, of tokens that are not first and hold nothing back.
    """

    def __init__(self, tokenizer: Any, skip: bool, unskipped: frozenset[str]) -> None:
        self.tokenizer = tokenizer
        self.cache: dict[int, str] = {}
        special = {id: token.content for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.skipped = {id: name for id, name in special.items() if skip and name not in unskipped}
        core = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(core, "decoder", None)
        parts: list[dict[str, Any]] = []  # all nested parts of the decoder
        json.loads(decoder.__getstate__() if decoder else "{}", object_hook=lambda part: parts.append(part) or part)
        kinds = {part.get("type") for part in parts}
        self.falls_back, self.lag = "ByteFallback" in kinds, int("BPEDecoder" in kinds)
        stripped = [part["content"] for part in parts if part.get("stop")]  # at the end of the whole text
        replaced = [part["String"][:size] for part in parts for size in range(1, len(part.get("String", "")))]
        changing = "|".join(map(re.escape, [REPLACEMENT, *stripped, *replaced]))  # ends that later tokens may change
        self._options = {"skip_special_tokens": skip and not unskipped}
        self._clean: Callable[[str], str] = str
        forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        is_bpe = type(getattr(core, "model", None)).__name__ == "BPE"
        cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False)
        if cleans and (not is_bpe or getattr(tokenizer, forced, False)):
            changing += f"|{_CLEANED}"
            self._options["clean_up_tokenization_spaces"] = False
            self._clean = tokenizer.clean_up_tokenization
        self._changing = re.compile(rf"(?:{changing})\Z")
        letters = tokenizer.convert_tokens_to_ids([*string.ascii_letters])
        plain = [id for id in letters if id is not None and id != tokenizer.unk_token_id]
        if not plain:  # a vocabulary of words
            words = sorted(name for name in tokenizer.get_vocab() if name.isascii() and name.isalnum())
            plain = tokenizer.convert_tokens_to_ids([name for name in words if name not in special.values()])
        self._plain = plain[:1]
        self._before = len(self._decode(self._plain))
        self._after = len(self._decode(self._plain * 2)) - self._before

    def final(self, tokens: list[int], *, first: bool) -> str | None:
        """Returns the text of these tokens; None: later tokens may change it. `first`: the output begins with them."""
        text = self._between(tokens, first=first, last=False)
        return None if self._changing.search(text) or (first and not text) else self._clean(text)

    def end(self, tokens: list[int], *, first: bool) -> str:
        """Returns the text of the last tokens."""
        return self._clean(self._between(tokens, first=first, last=True))

    def _between(self, tokens: list[int], *, first: bool, last: bool) -> str:
        text = self._decode([*([] if first else self._plain), *tokens, *([] if last else self._plain)])
        return text[0 if first else self._before : len(text) - (0 if last else self._after)]

    def _decode(self, tokens: list[int]) -> str:
        try:
            return self.tokenizer.decode(tokens, **self._options)
        except BaseException as error:  # the library's Strip panics at a text shorter than what it strips
            if type(error).__name__ != "PanicException":
                raise
            return ""


_decoder = functools.lru_cache(maxsize=8)(_Decoder)


class Detokenizer:
    """Text of a sequence of tokens in pieces; joined, they are the `decode` of all tokens. `unskipped`: special tokens
    that are not skipped."""

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool, unskipped: Collection[str] = ()) -> None:
        self._decoder = _decoder(tokenizer, skip_special_tokens, frozenset(unskipped))
        self.skipped = self._decoder.skipped
        self.held: list[int] = []  # tokens whose text may change
        self._first, self._tries = True, 0  # no text yet; decodes of the held tokens

    def push(self, token: int) -> str:
        """Adds a token. Returns the text that becomes final."""
        decoder, held, is_alone = self._decoder, self.held, not (self.held or self._first)
        if is_alone and (text := decoder.cache.get(token)) is not None:
            return text
        name = decoder.tokenizer.convert_ids_to_tokens(token)
        if token in self.skipped or name is None:
            return ""
        held.append(token)
        if decoder.falls_back and _BYTE.fullmatch(name):
            return ""
        self._tries += 1
        ready = held[: len(held) - decoder.lag]
        if self._tries > MAX_TRIES and len(ready) & (len(ready) - 1):  # keeps the total work linear
            return ""
        self.held = []  # tokens whose decoding fails are left out from then on
        text = decoder.final(ready, first=self._first)
        self.held = held if text is None else held[len(ready) :]
        if text is None:
            return ""
        if is_alone and ready:
            decoder.cache[token] = text
        self._tries, self._first = 0, False
        return text

    def finish(self) -> str:
        """Returns the rest."""
        held, self.held = self.held, []
        return self._decoder.end(held, first=self._first) if held else ""


# Stop patterns

MAX_MATCH = 1024
"""Maximum number of characters of a match, also for patterns without an upper bound, such as `a.*b`."""

MAX_PATTERN = 256  # characters of a pattern
MAX_SIZE = 1500
"""Maximum number of RE2 instructions for one request's patterns, somewhat more than a class of every letter needs. A
search in the engine's thread then takes at most 3 ms; nearly all take microseconds."""

_python_parser: Any = importlib.import_module("re._parser")  # of the standard library; type checkers do not know it
_MEMORY = 2**18  # bytes of RE2's caches for a pattern
_READ_DIFFERENTLY = ("{,", "[[", "--", "&&", "~~", "||")  # patterns with these differ between Python and RE2


class _Pattern(NamedTuple):
    text: str
    compiled: Any
    width: int  # maximum number of characters of a match


class StopPatterns:
    """Regular expressions that end a request's text.

    Attributes:
        held: maximum number of characters at the end of a text that may belong to a later match.

    Raises:
        ValueError: RE2 refuses a pattern, it is too large, or it matches the empty text. The message follows the name
            of a parameter.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [_compiled(pattern) for pattern in dict.fromkeys(patterns)]
        self.held = max((pattern.width for pattern in self._patterns), default=0)
        size = sum(pattern.compiled.programsize for pattern in self._patterns)
        if size > MAX_SIZE:
            raise ValueError(f"is too large: {size} instructions for RE2; a request may have {MAX_SIZE}")

    def find(self, text: str, before: int, start: int = 0) -> list[tuple[int, int, str]]:
        """Returns the first match that the characters from `before` on complete, if any: its start, minus its end, and
        the pattern. Text before `start` is not searched."""
        matches = []
        for pattern in self._patterns if len(text) > before else ():
            first = max(before - pattern.width, start)
            offset = first - min(first - start, 1)  # includes the character before, for `^` and `\b`
            if match := pattern.compiled.search(text[offset:], first - offset):
                matches.append((offset + match.start(), -offset - match.end(), pattern.text))
        return sorted(matches, key=lambda match: match[:2])[:1]


def _compiled(pattern: str) -> _Pattern:
    re2 = need("re2", "google-re2", "stop patterns")
    options = re2.Options()
    options.max_mem, options.log_errors = _MEMORY, False
    try:
        compiled = re2.compile(pattern, options=options)
    except (re2.error, UnicodeEncodeError) as error:
        reason = error.args[0] if error.args else error
        reason = reason.decode(errors="replace") if isinstance(reason, bytes) else str(error)
        raise ValueError(f"must be a regular expression in RE2's syntax, got {pattern!r:.60}: {reason:.100}") from None
    if compiled.search("") is not None:
        raise ValueError(f"must not match the empty text, as {pattern!r:.60} does: it would end every text at once")
    return _Pattern(pattern, compiled, _width(pattern))


def _width(pattern: str) -> int:
    """Upper bound of a match's length, from Python's parser where it reads a pattern as RE2 does."""
    if any(part in pattern for part in _READ_DIFFERENTLY):
        return MAX_MATCH
    try:
        _, most = _python_parser.parse(pattern).getwidth()
    except (re.error, OverflowError, RecursionError):  # RE2's syntax has more
        return MAX_MATCH
    return min(int(most), MAX_MATCH)


# The text of a request


def _overlap(text: str, end: str, start: int = 0) -> int:
    """Length of the longest proper prefix of `end` that the text from `start` on ends with."""
    at = text.find(end[0], max(len(text) - len(end) + 1, start))
    while at >= 0 and not end.startswith(text[at:]):
        at = text.find(end[0], at + 1)
    return len(text) - at if at >= 0 else 0


class Thoughts:
    """Splits text that comes in pieces into thoughts and the answer.

    Thoughts begin in the prompt, or with `<think>` at the beginning of the text after at most 8 characters of white
    space, and end with `</think>`. White space between them and the answer belongs to neither. Without thoughts all
    text is the answer.

    Attributes:
        begun: there are thoughts.
        ended: the thoughts have ended, or there are none.
        held: text that may belong to a marker.
        marks: the marks in place of `<think>` and `</think>`. Their title belongs to neither, even if it stands alone.
    """

    def __init__(self, begun: bool, end: re.Pattern[str] | None = None, marks: ThinkMarks = THINK_MARKS) -> None:
        """`begun`: the prompt begins the thoughts. `end`: instead of `</think>`, such as `FINAL`."""
        self.begun, self.ended, self.marks = begun, False, marks
        self._end, self._max_end = end or re.compile(re.escape(marks.end)), MAX_HEADER if end else 0
        self._opening = True  # the text so far is white space, `<think>` or a part of it
        self._trimming = False
        self.held = ""

    def split(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """Adds text. Returns the thoughts and the answer that it completes. `last`: nothing follows."""
        text, self.held = self.held + text, ""
        thoughts = ""
        if self._opening:
            start, title = self.marks.start, self.marks.title or self.marks.start
            while (rest := LEAD.sub("", text, count=1)).startswith((start, title)):  # models may repeat the prompt's
                is_start = rest.startswith(start)
                self.begun, text = self.begun or is_start, rest[len(start if is_start else title) :]
            if (start.startswith(rest) or title.startswith(rest)) and not last:
                self.held = text
                return "", ""
            self._opening, self.ended = False, not self.begun
        if not self.ended:
            end = self._end.search(text)
            if end is None:
                held = 0 if last else self._max_end or _overlap(text, self.marks.end)
                settled = max(len(text) - held, 0)
                self.held = text[settled:]
                return text[:settled], ""
            thoughts, text = text[: end.start()], text[end.end() :]
            self.ended = self._trimming = True
        if self._trimming:
            text = text.lstrip()
            self._trimming = not text
        return thoughts, text


class TextStream:
    """Text of one request's output.

    `text` holds final characters; at the end it is `tokenizer.decode` of the tokens, up to a stop string or a match of
    a pattern. Work is linear in the tokens and the characters.

    Args:
        unskipped: special tokens that are not skipped.
        patterns: regular expressions that end the text as stop strings do.
        thoughts: splits off thoughts, in which stop strings and patterns do not match; None: they match everywhere.
        late: tokens are decoded by `read`, which another thread than that of `extend` and `finish` may call. With stop
            strings or patterns `extend` decodes in any case.

    Attributes:
        ends: length of the text after each token.
        matched: the stop string or pattern that ended the text.
        late: tokens are decoded by `read`.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: tuple[str, ...],
        *,
        skip_special_tokens: bool,
        keep_stop: bool,
        unskipped: Collection[str] = (),
        patterns: Sequence[str] = (),
        thoughts: Thoughts | None = None,
        late: bool = False,
    ) -> None:
        self._tokens = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, unskipped=unskipped)
        self._stops = stop
        self._patterns = StopPatterns(patterns)
        self._can_stop = bool(stop or patterns)
        self._keep_stop = keep_stop
        self._thoughts = thoughts if self._can_stop else None  # None as soon as the answer begins
        self._answer = 0  # start of the answer
        self.late = late and not self._can_stop
        self._waiting: list[int] = []  # all tokens, decoded or not, if late
        self._read = 0  # number of these that are decoded
        self._ended = False
        self.text = ""
        self.ends: list[int] = []
        self.matched: str | None = None

    def extend(self, tokens: Sequence[int]) -> int:
        """Adds tokens, up to the one that completes a stop string. Returns their number; 0: no stop string."""
        if not self.late:
            return self._decode(tokens)
        self._waiting += tokens
        return 0

    def finish(self) -> None:
        """Ends the tokens and adds the text held back."""
        self._ended = True
        if not self.late:
            self._add_rest()

    def read(self, count: int | None = None) -> None:
        """Decodes the first `count` tokens; None: all, and at their end the rest of the text. Tokens whose decoding
        fails are left out from then on."""
        tokens = self._waiting[self._read : count]
        self._read += len(tokens)
        if tokens:
            self._decode(tokens)
        if self._ended and count is None:
            self._add_rest()

    def piece(self, index: int) -> str:
        """The part of `text` that a token added; joined, all pieces are the text.

        A character of several tokens belongs to the last one, text that was held back to the token that settled it, and
        text that a stop string cut off to none.
        """
        return self.text[self.ends[index - 1] if index else 0 : self.ends[index]] if index < len(self.ends) else ""

    @property
    def final_tokens(self) -> int:
        """Number of tokens whose pieces are final. Text held back belongs to the last token if no other follows."""
        return len(self.ends) - (self.matched is None and bool(self._tokens.held))

    @property
    def settled(self) -> int:
        """Number of characters that cannot become part of a stop string or of a match; all after a match."""
        if self.matched is not None:
            return len(self.text)
        if self._thoughts is not None:
            return len(self.text) if self._thoughts.begun else 0
        begun = max((_overlap(self.text, stop, self._answer) for stop in self._stops), default=0)
        return max(len(self.text) - max(begun, self._patterns.held), self._answer)

    def _decode(self, tokens: Sequence[int]) -> int:
        pieces, before = [self._tokens.push(token) for token in tokens], len(self.ends)
        text, self.text = self.text, ""  # the only reference, so that CPython extends the string in place
        for token, piece in zip(tokens, pieces, strict=True):
            text += piece
            if self._can_stop:
                text = self._cut(text, piece, token)
            self.ends.append(len(text))
            if self.matched is not None:
                break
        self.text = text
        return 0 if self.matched is None else len(self.ends) - before

    def _add_rest(self) -> None:
        if self.matched is None:
            rest = self._tokens.finish()
            self.text = self._cut(self.text + rest, rest, last=True)
            if self.ends:
                self.ends[-1] = len(self.text)

    def _cut(self, text: str, piece: str, token: int | None = None, *, last: bool = False) -> str:
        """Cuts the text at a stop that its last piece completes: the stop that begins first, then the longest one.

        `token`: token of the piece. `last`: nothing follows.
        """
        if self._thoughts is not None:
            if (marker := self._tokens.skipped.get(token, "")) in self._thoughts.marks[:2]:
                self._thoughts.split(marker)
            _, piece = self._thoughts.split(piece, last=last)
            if not piece:
                return text
            self._thoughts, self._answer = None, len(text) - len(piece)
        before, matches = len(text) - len(piece), []
        for stop in self._stops:
            at = text.find(stop, max(before - len(stop) + 1, self._answer)) if stop[-1] in piece else -1
            if at >= 0:
                matches.append((at, -at - len(stop), stop))
        if self._patterns.held:
            matches += self._patterns.find(text, before, self._answer)
        if matches:
            start, end, self.matched = min(matches)
            return text[: -end if self._keep_stop else start]
        return text


# The budget of thoughts

MAX_HEADER_TOKENS = 32  # of a message in the Harmony format; more than the white space before `<think>`


class ThinkingBudget:
    """Ends the thoughts of a request after a number of tokens, as `SamplingParams.thinking_token_budget` asks.

    The first token beyond the budget is replaced by the end of the thoughts; the tokens after it are dropped, and drawn
    again. This depends on the emitted tokens alone, so the text is the same with and without drafts.

        budget 2, end 9; emitted: 5 6, then 7 8 -> the output 5 6 9, from which the request goes on

    Args:
        decode: returns the text of tokens, including special ones.
        most: maximum number of tokens between `start` and `end`, which do not count.
        opens: matches the text before `start` where thoughts begin. The prompt itself is not part of the text.
        begun: the prompt begins the thoughts.
        stops: tokens that end the request. They are never replaced.
        forced: tokens that end the thoughts; the first one is `end`.
        again: further tokens, if the model begins thoughts again after the budget.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        most: int,
        start: int,
        end: int,
        opens: re.Pattern[str],
        *,
        begun: bool,
        stops: Collection[int],
        forced: Sequence[int],
        again: Sequence[int] = (),
    ) -> None:
        self._decode, self._left, self._start, self._end, self._opens = decode, most, start, end, opens
        self._thinks, self._forced, self._again, self.stops = begun, forced, again, frozenset(stops)
        self._before = deque[int](maxlen=MAX_HEADER_TOKENS)  # last tokens since the last thoughts
        self._is_empty = True  # no token in these thoughts

    def cut(self, tokens: list[int]) -> int:
        """Reads emitted tokens. Replaces those beyond the budget by the end of the thoughts, and returns the number of
        its tokens; 0: all tokens stay."""
        for i, token in enumerate(tokens):
            if not self._thinks:
                if token == self._start and self._opens.fullmatch(self._decode([*self._before])):
                    self._thinks, self._is_empty = True, True
                self._before.append(token)
            elif token == self._end:
                self._close([token])
            elif self._left:
                self._left, self._is_empty = self._left - 1, False
            elif token not in self.stops:
                end = [*self._forced, *(self._again if self._is_empty else ())]
                end = end if self._end not in self.stops else [self._end]
                self._close(end)
                tokens[i:] = end
                return len(end)
        return 0

    def _close(self, tokens: list[int]) -> None:
        self._thinks = False
        self._before.clear()
        self._before.extend(tokens)
