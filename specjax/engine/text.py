"""Token ids to text as they come, exactly as a tokenizer makes it of all of them at once, and stop strings in it.

A decoder is a chain of the steps in `specjax.engine.decoders`. No text is taken back and no token decoded twice: text
that a later token can change is held back, such as bytes that are no character yet, a run of byte tokens (one bad byte
turns the whole run into U+FFFD), or a space that a later full stop may remove.
"""

from __future__ import annotations

import functools
import logging
import random
import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from typing import Any, cast

from specjax.engine.decoders import (
    REPLACEMENT,
    MakeStep,
    Step,
    UnknownDecoderError,
    clean_up_steps,
    cleans,
    decoder_steps,
)
from specjax.engine.stop_patterns import StopPatterns

logger = logging.getLogger(__name__)

THINK, END_THINK = "<think>", "</think>"
MAX_LEAD = 8  # characters of white space before `<think>`; models write one or two line breaks
_LEAD = re.compile(rf"\s{{,{MAX_LEAD}}}")
MAX_KNOWN = 8  # sets of skipped tokens whose texts are remembered; a server uses three


class Decoding:
    """The decoder of one tokenizer, shared by its streams.

    A decoder that is not known here, or that behaves in another way than here, is decoded by windows of its last
    tokens: right for decoders whose text depends on the tokens just before, with no promise for others.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special: dict[int, str] = dict.fromkeys(getattr(tokenizer, "all_special_ids", ()), "")
        self._steps: list[MakeStep] | None = None
        self._known: dict[frozenset[str], dict[int, str]] = {}  # see `_Chain`; by the tokens that are skipped
        core = getattr(tokenizer, "backend_tokenizer", None)
        if core is None:
            return
        self._special = {id: token.content for id, token in core.get_added_tokens_decoder().items() if token.special}
        try:
            if not _decodes_as_the_library(tokenizer):
                raise UnknownDecoderError(f"{type(tokenizer).__name__} has a decode() of its own")
            self._steps = decoder_steps(core.decoder) + clean_up_steps(tokenizer)
            self._check(core.get_vocab_size())
        except UnknownDecoderError as error:
            self._steps = None
            logger.warning("the tokenizer's decoder is not known (%s): text is decoded by windows of tokens", error)

    def stream(self, *, skip_special_tokens: bool, kept: Collection[str] = ()) -> _Chain | _Windowed:
        """`kept`: special tokens that are not skipped."""
        special = self.skipped(skip_special_tokens=skip_special_tokens, kept=kept)
        if self._steps is None:
            return _Windowed(self._tokenizer, special.keys(), skip_special_tokens and not kept)
        name = self._tokenizer.backend_tokenizer.id_to_token
        steps = [make() for make in self._steps]
        skipped = frozenset(special.values())
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        return _Chain(name, skipped, steps, self._known.setdefault(skipped, {}))

    def skipped(self, *, skip_special_tokens: bool, kept: Collection[str] = ()) -> dict[int, str]:
        """Names, by id, of the tokens that a stream leaves out."""
        return {id: name for id, name in self._special.items() if name not in kept} if skip_special_tokens else {}

    def _check(self, size: int) -> None:
        """Compares with the tokenizer's own text, so that another version of its library is noticed."""
        draw = random.Random(0)
        for skip in (True, False):
            for length in (1, 2, 3, *[12] * 13):
                ids = [draw.randrange(size) for _ in range(length)] if size else []
                try:
                    expected = self._tokenizer.decode(ids, skip_special_tokens=skip)
                except BaseException as error:  # the library's stripping panics at texts shorter than what it strips
                    if type(error).__name__ != "PanicException":
                        raise
                    continue
                stream = self.stream(skip_special_tokens=skip)
                found = "".join(map(stream.push, ids)) + stream.finish(keep_incomplete=True)
                if found != expected:
                    raise UnknownDecoderError(f"tokens {ids} give {found!r:.60} instead of {expected!r:.60}")


def decoding(tokenizer: Any) -> Decoding:
    """The `Decoding` of a tokenizer, made once for as long as its vocabulary and its decoder stay as they are."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        return Decoding(tokenizer)
    decoder = None if core.decoder is None else core.decoder.__getstate__()
    own = _decodes_as_the_library(tokenizer)
    return _decoding(tokenizer, decoder, core.get_vocab_size(), cleans(tokenizer), own)


def _decodes_as_the_library(tokenizer: Any) -> bool:
    """Whether its text is what its decoder makes: no class or user has put other code in the way."""
    from transformers import PreTrainedTokenizerFast as Plain

    kind, own = type(tokenizer), vars(tokenizer)
    return all(getattr(kind, name) is getattr(Plain, name) and name not in own for name in ("decode", "_decode"))


@functools.lru_cache(maxsize=8)
def _decoding(tokenizer: Any, *_: object) -> Decoding:
    return Decoding(tokenizer)


class _Chain:
    """The text of one sequence of tokens.

    `known`: the text of tokens that came while all steps were settled and left them so, as nearly all do. Their text is
    then the same in every sequence, and each token goes through the steps once.
    """

    def __init__(
        self,
        name: Callable[[int], str | None],
        skipped: Set[str],
        steps: Sequence[Step],
        known: dict[int, str] | None = None,
    ) -> None:
        self._name, self._skipped, self._steps = name, skipped, steps
        self._known = {} if known is None else known
        self._settled = self._are_settled()

    @property
    def holds(self) -> bool:
        """Whether `finish` may add text."""
        return any(step.held for step in self._steps)

    def push(self, token: int) -> str:
        """Adds a token; the text that has become final with it."""
        before = self._settled
        if before and (text := self._known.get(token)) is not None:
            return text
        name = self._name(token)
        if name is None or name in self._skipped:  # an id without a token decodes to nothing, too
            return ""
        text = self._through(0, (name,))
        self._settled = self._are_settled()
        if before and self._settled:
            self._known[token] = text
        return text

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """`push` of each token."""
        found = [self._known.get(token) for token in tokens] if self._settled else [None]
        if None not in found:  # most often
            return cast(list[str], found)
        return [self.push(token) for token in tokens]

    def finish(self, *, keep_incomplete: bool = False) -> str:
        """The rest. An incomplete character at the very end is left out, or, if kept, U+FFFD as in a plain decode."""
        ends = (self._through(i, step.end(keep_incomplete)) for i, step in enumerate(self._steps, start=1))
        return "".join(ends)

    def _are_settled(self) -> bool:
        return all(step.settled for step in self._steps)

    def _through(self, first: int, tokens: Iterable[str]) -> str:
        for step in self._steps[first:]:
            tokens = [piece for token in tokens for piece in step.push(token)]
        return "".join(tokens)


class _Windowed:
    """Decodes the last tokens together with those that were final before them, since decoding depends on these."""

    def __init__(self, tokenizer: Any, skipped: Set[int], skip: bool) -> None:
        self._tokenizer, self._skipped, self._skip = tokenizer, skipped, skip
        self._window: list[int] = []
        self._whole = 0  # tokens of the window whose text is final

    @property
    def holds(self) -> bool:
        return len(self._window) > self._whole

    def push(self, token: int) -> str:
        if token in self._skipped:
            return ""
        self._window.append(token)
        waiting = len(self._window) - self._whole
        if waiting > 8 and waiting & (waiting - 1):  # no text for so long: try at powers of two, so that work is linear
            return ""
        text = self._new()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._window, self._whole = self._window[self._whole :], waiting
        return text

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return [self.push(token) for token in tokens]

    def finish(self, *, keep_incomplete: bool = False) -> str:
        text = self._new()
        self._whole = len(self._window)
        return text if keep_incomplete else text.rstrip(REPLACEMENT)

    def _new(self) -> str:
        """The text after that of the tokens that were final."""
        return self._decode(self._window)[len(self._decode(self._window[: self._whole])) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip) if tokens else ""


class Thoughts:
    """Splits text that comes in pieces into thoughts and the answer.

    Thoughts begin in the prompt, or with `<think>` at the beginning of the text, after at most `MAX_LEAD` characters of
    white space, and end with `</think>`. White space between them and the answer belongs to neither. Without thoughts
    all text is the answer.

    Attributes:
        begun: there are thoughts.
        ended: the text is past its thoughts, or has none.
    """

    def __init__(self, begun: bool) -> None:
        """`begun`: by the prompt."""
        self.begun, self.ended = begun, False
        self._opening = True  # the text so far is white space, `<think>` or a part of it
        self._trimming = False
        self._held = ""
        self._end = _StopString(END_THINK)

    def split(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """Adds text. Returns the thoughts and the answer that it completes. `last`: nothing follows."""
        thoughts = ""
        if self._opening:
            text, self._held = self._held + text, ""
            while (rest := _LEAD.sub("", text, count=1)).startswith(THINK):  # models may repeat the prompt's marker
                self.begun, text = True, rest[len(THINK) :]
            if THINK.startswith(rest) and not last:
                self._held = text
                return "", ""
            self._opening, self.ended = False, not self.begun
        if not self.ended:
            size, before = self._end.feed(text), len(self._held)
            text, self._held = self._held + text, ""
            if not size:
                settled = len(text) - (0 if last else self._end.begun)
                self._held = text[settled:]
                return text[:settled], ""
            self.ended = self._trimming = True
            thoughts, text = text[: before + size - len(END_THINK)], text[before + size :]
        if self._trimming:
            text = text.lstrip()
            self._trimming = not text
        return thoughts, text


class TextStream:
    """The text of one request's output.

    `text` holds final characters; at the end it is `tokenizer.decode` of the tokens, up to a stop string or a match of
    a pattern and without an incomplete character at its very end. Work is linear in the tokens, the characters and the
    number of stop strings, whatever their length.

    Args:
        kept: special tokens that are not skipped.
        patterns: regular expressions that end the text as stop strings do.
        thoughts: splits off thoughts, in which stop strings and patterns do not match; None: they match everywhere.
        late: `read` decodes the tokens, which may be called in another thread than `extend` and `finish`; before it all
            else is as if they had not come. With stop strings and patterns `extend` decodes them nevertheless, to find
            these.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: tuple[str, ...],
        *,
        skip_special_tokens: bool,
        keep_stop: bool,
        kept: Collection[str] = (),
        patterns: Sequence[str] = (),
        thoughts: Thoughts | None = None,
        late: bool = False,
    ) -> None:
        self._patterns = StopPatterns(patterns)
        self._tokens = decoding(tokenizer).stream(skip_special_tokens=skip_special_tokens, kept=kept)
        self._thoughts = thoughts if stop or patterns else None  # None as soon as the answer begins
        self._answer = 0  # start of the answer
        self._skipped = {}
        if self._thoughts is not None:
            self._skipped = decoding(tokenizer).skipped(skip_special_tokens=skip_special_tokens, kept=kept)
        self._stops = [_StopString(each) for each in dict.fromkeys(stop)]
        self._keep_stop = keep_stop
        self._waiting: list[int] | None = [] if late and not (stop or patterns) else None  # all tokens, decoded or not
        self._read = 0  # so many of them are decoded
        self._ended = False
        self.text = ""
        self.ends: list[int] = []  # length of the text after each token
        self.matched: str | None = None

    @property
    def late(self) -> bool:
        """Whether tokens wait for `read`."""
        return self._waiting is not None

    def push(self, token: int) -> bool:
        """Adds a token. True: a stop string is complete, and `text` ends before it (or after, if it is kept)."""
        return self.extend((token,)) > 0

    def extend(self, tokens: Sequence[int]) -> int:
        """Adds tokens, up to the one that completes a stop string. Returns how many these are; 0: none does."""
        if self._waiting is None:
            return self._decode(tokens)
        self._waiting += tokens
        return 0

    def read(self, count: int | None = None) -> None:
        """Decodes the tokens that wait, of the first `count` of all; None: all, and if these have ended, the rest of
        the text. Tokens whose decoding fails are left out from then on."""
        if self._waiting is None:
            return
        tokens = self._waiting[self._read : count]
        self._read += len(tokens)
        self._decode(tokens)
        if self._ended and count is None:
            self._ended = False
            self._add_rest()

    def _decode(self, tokens: Sequence[int]) -> int:
        if self._thoughts is not None and len(tokens) > 1:  # the token that begins the answer may complete a stop
            return next((count for count, token in enumerate(tokens, 1) if self._decode((token,))), 0)
        if self._thoughts is not None and tokens and (name := self._skipped.get(tokens[0], "")) in (THINK, END_THINK):
            self._thoughts.split(name)
        pieces = self._tokens.pieces(tokens)
        size, ends = len(self.text), []
        for piece in pieces:
            size += len(piece)
            ends.append(size)
        stop = self._add("".join(pieces), ends)
        self.ends += ends[: stop or None]
        if stop:
            self.ends[-1] = len(self.text)
        return stop

    def piece(self, index: int) -> str:
        """The part of `text` that a token added; all pieces joined are the text.

        A character of several tokens belongs to the last of them, text that was held back to the token that settled it,
        and text that a stop string cut off to none.
        """
        return self.text[self.ends[index - 1] if index else 0 : self.ends[index]] if index < len(self.ends) else ""

    @property
    def final_tokens(self) -> int:
        """Number of tokens whose pieces are final. Text held back belongs to the last token, if no other follows."""
        return len(self.ends) - (self.matched is None and self._tokens.holds)

    def finish(self) -> None:
        """Ends the tokens and adds the text held back, without bytes that are only the beginning of a character."""
        self._ended = True
        if self._waiting is None:
            self._add_rest()

    def _add_rest(self) -> None:
        if self.matched is None:
            rest = self._tokens.finish()
            self._add(rest, [len(self.text) + len(rest)], last=True)
            if self.ends:
                self.ends[-1] = len(self.text)

    @property
    def settled(self) -> int:
        """Number of characters that no later token can turn into a stop string, or into a part of a pattern's match.
        All, once one has been found."""
        if self.matched is not None:
            return len(self.text)
        if self._thoughts is not None:
            return len(self.text) if self._thoughts.begun else 0
        begun = max((stop.begun for stop in self._stops), default=0)
        return max(len(self.text) - max(begun, self._patterns.held), self._answer)

    def _add(self, piece: str, ends: Sequence[int], *, last: bool = False) -> int:
        """Adds the text of tokens, of which each ends at one of `ends`. Returns the number of tokens up to the first
        that completes a stop string or a pattern's match, after which the text ends; 0: none does. `last`: nothing
        follows."""
        before = len(self.text)
        # The only reference, so that CPython extends the string in place instead of copying it.
        text, self.text = self.text, ""
        text += piece
        self.text = text
        if not self._stops and not self._patterns:
            return 0
        if self._thoughts is not None:
            _, piece = self._thoughts.split(piece, last=last)
            if not piece:
                return 0
            self._thoughts, self._answer = None, len(text) - len(piece)
            before = self._answer
        # Of those that the same token completes the one that begins first, then the longest.
        hits = []
        for stop in self._stops:
            if size := stop.feed(piece):
                end = before + size
                hits.append((bisect_left(ends, end), end - len(stop.text), -len(stop.text), stop.text))
        starts = [before, *ends]
        for token, end in enumerate(ends if self._patterns else ()):
            if match := self._patterns.find(self.text, starts[token], end, self._answer):
                hits.append((token, match.start, match.start - match.end, match.pattern))
                break
        if not hits:
            return 0
        token, start, less, self.matched = min(hits)
        self.text = self.text[: start - less if self._keep_stop else start]
        return token + 1


class _StopString:
    """Finds one string in text that comes in pieces (Knuth, Morris and Pratt), reading no character twice.

    `begun` is the number of its characters that the text ends with. `_shorter[n]` is the next smaller such number if
    the text ends with the first n characters: of "aabaa" it is 0, 0, 1, 0, 1, 2 for n from 0 to 5.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.begun = 0
        self._shorter = array("l", [0, 0])
        length = 0
        for character in text[1:]:
            while length and text[length] != character:
                length = self._shorter[length]
            length += text[length] == character
            self._shorter.append(length)

    def feed(self, piece: str) -> int:
        """Reads on. Returns the characters of `piece` up to the end of the string; 0: it is not complete."""
        text, begun, at = self.text, self.begun, 0
        while at < len(piece):
            if not begun:  # most often
                at = piece.find(text[0], at)
                if at < 0:
                    break
            while begun and text[begun] != piece[at]:
                begun = self._shorter[begun]
            begun += text[begun] == piece[at]
            at += 1
            if begun == len(text):
                return at
        self.begun = begun
        return 0
