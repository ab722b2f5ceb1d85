"""Regular expressions that end a request's text. Patterns come from clients, so they run on RE2 (the package
google-re2, Google's own), in time linear in the text; Python's `re` needs hours for some patterns of ten characters.

After each token the end of the text is searched: the characters that the token has added, and as many before them as a
match can have, at most `MAX_MATCH`. So `$` and `\\b` may match at the end of each token's text, and of a match that is
longer than `MAX_MATCH` only the end is found. A stream holds back as many characters as a match can have.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import re2

MAX_MATCH = 1024
"""Most characters of a match. Patterns without an upper bound, such as `a.*b`, count as having as many."""

MAX_PATTERN = 256  # characters of a pattern
MAX_SIZE = 1500
"""Most instructions of RE2's programs for one request's patterns, some more than those of every letter have: a search
then takes 3 ms at the very most, in the thread that steps the engine; nearly all take microseconds."""

_python_parser: Any = importlib.import_module("re._parser")  # of the standard library; type checkers do not know it
_MEMORY = 2**18  # bytes of RE2's caches for a pattern
_READ_OTHERWISE = ("{,", "[[", "--", "&&", "~~", "||")  # in these, Python reads another pattern than RE2


class _Pattern(NamedTuple):
    text: str
    compiled: Any
    width: int  # most characters of a match


class StopPatterns:
    """The patterns of one request. Raises ValueError, which says what `must be` different, for one that RE2 does not
    know, that is too large, or that matches the empty text.

    Attributes:
        held: most characters at the end of a text that may belong to a later match.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [_compiled(pattern) for pattern in dict.fromkeys(patterns)]
        self.held = max((pattern.width for pattern in self._patterns), default=0)
        size = sum(pattern.compiled.programsize for pattern in self._patterns)
        if size > MAX_SIZE:
            raise ValueError(f"is too large: {size} instructions for RE2, of which a request may have {MAX_SIZE}")

    def find(self, text: str, before: int, start: int = 0) -> list[tuple[int, int, str]]:
        """The matches, one of each pattern, that the characters from `before` on complete: start, minus the end, and
        the pattern. Text before `start` is not searched."""
        found = []
        for pattern in self._patterns if len(text) > before else ():
            first = max(before - pattern.width, start)
            offset = first - min(first - start, 1)  # includes the character before, for `^` and `\b`
            if match := pattern.compiled.search(text[offset:], first - offset):
                found.append((offset + match.start(), -offset - match.end(), pattern.text))
        return sorted(found, key=lambda match: match[:2])[:1]


def _compiled(pattern: str) -> _Pattern:
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
    """Most characters of a match, or more. Python's parser knows them, where it reads a pattern as RE2 does."""
    if any(part in pattern for part in _READ_OTHERWISE):
        return MAX_MATCH
    try:
        _, most = _python_parser.parse(pattern).getwidth()
    except (re.error, OverflowError, RecursionError):  # RE2 knows more
        return MAX_MATCH
    return min(int(most), MAX_MATCH)
