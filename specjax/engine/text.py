"""The text of a request's output as it comes: whole characters only, stop strings found across tokens and steps."""

from __future__ import annotations

from array import array
from typing import Any

from specjax.engine.decoding import decoding


class TextStream:
    """The text of one request's output.

    `text` holds final characters; at the end it is `tokenizer.decode` of the tokens, up to a stop string and without an
    incomplete character at its very end. Work is linear in the tokens, the characters and the number of stop strings,
    whatever their length.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], *, skip_special_tokens: bool, keep_stop: bool) -> None:
        self._tokens = decoding(tokenizer).stream(skip_special_tokens=skip_special_tokens)
        self._stops = [_StopString(each) for each in dict.fromkeys(stop)]
        self._keep_stop = keep_stop
        self.text = ""
        self.ends: list[int] = []  # length of the text after each token
        self.matched: str | None = None

    def push(self, token: int) -> bool:
        """Adds a token. True: a stop string is complete, and `text` ends before it (or after, if it is kept)."""
        found = self._add(self._tokens.push(token))
        self.ends.append(len(self.text))
        return found

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
        if self.matched is None:
            self._add(self._tokens.finish())
            if self.ends:
                self.ends[-1] = len(self.text)

    @property
    def settled(self) -> int:
        """Number of characters that no later token can turn into a stop string. All, once one has been found."""
        if self.matched is not None:
            return len(self.text)
        return len(self.text) - max((stop.begun for stop in self._stops), default=0)

    def _add(self, piece: str) -> bool:
        before = len(self.text)
        # The only reference, so that CPython extends the string in place instead of copying it.
        text, self.text = self.text, ""
        text += piece
        self.text = text
        hits = [(before + end - len(stop.text), stop.text) for stop in self._stops if (end := stop.feed(piece))]
        if not hits:
            return False
        at, self.matched = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
        self.text = self.text[: at + len(self.matched) if self._keep_stop else at]
        return True


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
