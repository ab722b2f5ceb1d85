"""Names of an engine's programs: what each does, and for how many requests, tokens and pages."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

TREE, PLAIN = 0, 1
"""`Key.nodes` of a step that drafts the trees of its batch bucket, and of one that drafts nothing."""


class Key(NamedTuple):
    """Name of a program. `width` is the batch bucket of a step, the chunk width of a prefill. `nodes`: TREE or PLAIN.

    Kinds: "step", "prefill"; "scoring" is a prefill with its tokens' log-probabilities; where a request
    follows a grammar, "propose" and "constrained" are the two halves of a step (`specjax.engine.grammar_steps`).
    """

    kind: str
    width: int
    table: int
    rows: int = 1  # prompts of a prefill
    nodes: int = TREE
    tokens: int = 0  # most tokens of all prompts of a prefill together; 0: `rows` times `width`

    def __str__(self) -> str:
        plain = " without drafts" if self.nodes == PLAIN else ""
        names = {"step": "step", "propose": "draft", "constrained": "step with a grammar"}
        kind = names.get(self.kind, self.kind)
        size = f"{kind} of {self.width} requests{plain}" if self.kind in names else f"{kind} of {self.width} tokens"
        each = f" of each of {self.rows} requests" if self.rows > 1 else ""
        each += f", {self.tokens} together," if self.tokens else ""
        return f"a {size}{each} with {self.table} pages each"

    @property
    def size(self) -> int:
        """Tokens of a prefill, those of all requests together."""
        return self.tokens or self.rows * self.width

    def lengths(self, left: Iterable[int]) -> list[int]:
        """How many tokens of each of some prompts a prefill takes, the first ones first, of which so many are left.

        Example: at most 10 tokens, 8 of each of 3 prompts, of [4, 20, 3, 5] are [4, 6].
        """
        found, room = list[int](), self.size
        for count in islice(left, self.rows):
            if not room:
                break
            found.append(min(count, self.width, room))
            room -= found[-1]
        return found

    @property
    def verifies(self) -> bool:
        """Whether it is a step, or the half of one that emits tokens."""
        return self.kind in ("step", "constrained")

    @property
    def drafts(self) -> bool:
        """Whether it is a step that may draft."""
        return self.verifies and self.nodes != PLAIN

    def needs_no_less(self, other: Key) -> bool:
        """Whether it holds at least as much in each respect."""
        mine, its = (key._replace(nodes=key.nodes != PLAIN, tokens=key.size) for key in (self, other))
        return self.kind == other.kind and all(a >= b for a, b in zip(mine[1:], its[1:], strict=True))
