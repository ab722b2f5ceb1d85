"""Token ids to text as they come: whole characters only, stop strings found across tokens and steps."""

from __future__ import annotations

from typing import Any

REPLACEMENT = "\ufffd"
"""What a decoder puts where bytes are no character (yet)."""


class TextStream:
    """The text of one request's output.

    `text` holds finished characters. `push` takes one token and says whether a stop string is now complete; `settled`
    is how much of the text can no longer become part of one, so it may be sent.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], *, skip_special_tokens: bool, keep_stop: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stop = stop
        self._keep_stop = keep_stop
        self._longest = max(map(len, stop), default=0)
        # Decoding depends on what stands before (a leading space, bytes of one character), so tokens are decoded
        # together with the last ones that were whole: `_window[: _whole]`.
        self._window: list[int] = []
        self._whole = 0
        self.text = ""
        self.ends: list[int] = []  # characters found when each token had been pushed
        self.matched: str | None = None

    def push(self, token: int) -> bool:
        """Adds a token. True: a stop string is complete, and `text` ends before it (or after, if it is kept)."""
        found = self._push(token)
        self.ends.append(len(self.text))
        return found

    def piece(self, index: int) -> str:
        """The part of `text` that a token brought: all pieces joined are the text. A character of several tokens comes
        with its last one, and what a stop string has cut off is nobody's."""
        if index >= len(self.ends):
            return ""
        return self.text[self.ends[index - 1] if index else 0 : self.ends[index]]

    def _push(self, token: int) -> bool:
        self._window.append(token)
        before, now = self._decode(self._window[: self._whole]), self._decode(self._window)
        if now == before:  # a special token that is skipped: no reason to decode it again and again
            self._window.pop()
            return False
        if now.endswith(REPLACEMENT) or len(now) <= len(before):
            return False
        self._window, self._whole = self._window[self._whole :], len(self._window) - self._whole
        return self._add(now[len(before) :])

    def finish(self) -> None:
        """No more tokens: what is left of an unfinished character becomes U+FFFD, as a plain decode has it."""
        if self._whole < len(self._window) and self.matched is None:
            before = self._decode(self._window[: self._whole])
            self._add(self._decode(self._window)[len(before) :])
            self._whole = len(self._window)
            if self.ends:
                self.ends[-1] = len(self.text)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip) if tokens else ""

    @property
    def settled(self) -> int:
        """Characters of `text` that no later token can turn into a stop string. All, once one has been found."""
        if self.matched is not None or not self._stop:
            return len(self.text)
        for held in range(min(self._longest - 1, len(self.text)), 0, -1):
            tail = self.text[-held:]
            if any(stop.startswith(tail) for stop in self._stop):
                return len(self.text) - held
        return len(self.text)

    def _add(self, piece: str) -> bool:
        searched = max(len(self.text) - self._longest + 1, 0)
        self.text += piece
        hits = [(self.text.find(stop, searched), stop) for stop in self._stop]
        hits = [(at, stop) for at, stop in hits if at >= 0]
        if not hits:
            return False
        at, self.matched = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
        self.text = self.text[: at + len(self.matched) if self._keep_stop else at]
        return True
