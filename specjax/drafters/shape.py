"""How large a draft tree is: EAGLE's three numbers, and what they become where some are not given.

The names and rules are those of SGLang's flags, except that what it finds out in the middle of a run is refused here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

LARGEST = 64
"""Nodes of a tree that nobody asked for by number."""

FLAGS = {"num_steps": "--speculative-num-steps", "topk": "--speculative-eagle-topk",
         "draft_tokens": "--speculative-num-draft-tokens"}  # fmt: skip
LEAST = {"num_steps": 1, "topk": 1, "draft_tokens": 2}
LIMITS = {"num_steps": 64, "topk": 64, "draft_tokens": 512}
"""Far above what has been found useful anywhere; beyond, a compiler would take minutes over one step."""


class Shape(NamedTuple):
    """What `tree_shape` has decided, and why."""

    shape: TreeShape
    explicit_width: bool  # whether any number was given
    note: str  # for the log: the numbers, and whether they were given
    warning: str  # empty: none


@dataclass(frozen=True)
class TreeShape:
    """steps D, top-k k, draft tokens N (the root included).

    EAGLE-2 grows the tree for D levels, k nodes wide, and keeps the N - 1 best of all candidates.
    """

    steps: int
    topk: int
    draft_tokens: int

    def __post_init__(self) -> None:
        for name, value in (("num_steps", self.steps), ("topk", self.topk), ("draft_tokens", self.draft_tokens)):
            check_number(name, value)
        if self.draft_tokens - 1 > self.pool:
            raise ValueError(
                f"{FLAGS['draft_tokens']} is {self.draft_tokens}, but {self.steps} steps of top-k {self.topk} give "
                f"{self.pool} candidates, so a tree of at most {self.pool + 1} tokens; ask for fewer draft tokens, or "
                f"for more steps ({FLAGS['num_steps']}) or a larger top-k ({FLAGS['topk']})"
            )

    @property
    def pool(self) -> int:
        """Candidates below the root."""
        return pool_size(self.steps, self.topk)

    @property
    def depth(self) -> int:
        """D: the deepest a node can be; a tree of few nodes cannot be deeper than a chain of them."""
        return min(self.steps, self.draft_tokens - 1)


def pool_size(steps: int, topk: int) -> int:
    return topk + (steps - 1) * topk * topk


def check_number(name: str, value: int | None) -> None:
    """Raises ValueError, naming the flag, for a number that no tree can have."""
    if value is not None and (type(value) is not int or not LEAST[name] <= value <= LIMITS[name]):
        raise ValueError(f"{FLAGS[name]} must be an integer from {LEAST[name]} to {LIMITS[name]}, got {value!r:.80}")


def tree_shape(
    steps: int | None, topk: int | None, draft_tokens: int | None, *, automatic: tuple[int, int, int]
) -> Shape:
    """The shape that the given numbers mean.

    All absent: `automatic`. Otherwise a missing top-k is 1. Missing draft tokens are steps + 1 for top-k 1, else
    1 + steps * topk, at most the pool and 64. Missing steps are draft tokens - 1 for top-k 1, else the automatic ones.
    Top-k 1 is a chain, which has steps + 1 tokens whatever was asked for (SGLang warns and overwrites, too).

    Raises:
        ValueError: a number is out of range, or more draft tokens than candidates.
    """
    for name, value in (("num_steps", steps), ("topk", topk), ("draft_tokens", draft_tokens)):
        check_number(name, value)
    if steps is None and topk is None and draft_tokens is None:
        steps, topk, draft_tokens = automatic
        shape = TreeShape(steps, topk, draft_tokens)
        return Shape(shape, False, f"{_words(shape)} (automatic)", "")
    given = steps, topk, draft_tokens
    topk = topk or 1
    if steps is None and topk == 1 and draft_tokens is not None:
        longest = LIMITS["num_steps"] + 1
        if draft_tokens > longest:
            raise ValueError(
                f"{FLAGS['draft_tokens']} must be from 2 to {longest} for a chain ({FLAGS['topk']} 1), "
                f"got {draft_tokens}"
            )
        steps = draft_tokens - 1
    elif steps is None:
        steps = automatic[0]
    wanted = draft_tokens
    if topk == 1:
        draft_tokens = steps + 1
    elif draft_tokens is None:
        draft_tokens = min(1 + steps * topk, pool_size(steps, topk) + 1, LARGEST)
    warning = ""
    if wanted is not None and wanted != draft_tokens:
        warning = (
            f"{FLAGS['draft_tokens']} is {draft_tokens} and not {wanted}: with {FLAGS['topk']} 1 the draft is a chain "
            f"of {FLAGS['num_steps']} + 1 tokens"
        )
    shape = TreeShape(steps, topk, draft_tokens)
    how = "given" if None not in given else "what was not given was chosen"
    return Shape(shape, True, f"{_words(shape)} ({how})", warning)


def _words(shape: TreeShape) -> str:
    return f"{shape.steps} steps, top-k {shape.topk}, {shape.draft_tokens} draft tokens"
