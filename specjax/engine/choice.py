"""The choice between draft trees, as functions of step times and accept lengths.

What is measured, and when another tree is tried, is `specjax.engine.adaptive`'s. Plain Python and NumPy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np

from specjax.costs import Tree, expected_accept

PLAIN = 1  # `Key.nodes` of steps without drafts

MARGIN = 0.02  # by which another choice must be better than the one in use
HORIZON = 64  # tokens of a request within which catching up is to pay; later in its text as many as it has emitted


def best(seconds: Mapping[int, float], tokens: Mapping[int, float], using: int, extra: float = 0.0) -> int:
    """The choice with the most tokens a second.

    Args:
        seconds: of a step of each choice.
        tokens: that the batch emits in it.
        using: the choice in use, which stays unless another is better by `MARGIN`.
        extra: seconds that drafting costs besides, for each token that comes (`catch_up_share`).

    Example: of 8 requests, 0.05 s a step without drafts and 0.11 s with drafts of accept length 2 are 160 and 145
    tokens a second, so nothing is drafted.
    """

    def rate(choice: int) -> float:
        found = 1 / (seconds[choice] / tokens[choice] + (0.0 if choice == PLAIN else extra))
        return found * (1 + MARGIN) if choice == using else found

    return max(seconds, key=rate)


def catch_up_share(seconds: float, emitted: Iterable[int], left: Iterable[int]) -> float:
    """Seconds that catching up costs for each token that is to pay for it. Tokens and not steps: the more each step
    emits, the fewer steps are to come.

    Args:
        seconds: that it takes.
        emitted: tokens of each request so far; a text is expected to go on for as long again, at least `HORIZON`.
        left: tokens that each may still emit.

    Example: 0.05 s for a request that begins and may emit 64 tokens are 0.8 ms for each. Steps of 5.3 ms without drafts
    and of 8 ms for 1.75 tokens save 0.7 ms a token, so nothing is drafted.
    """
    paying = sum(min(max(HORIZON, count), most) for count, most in zip(emitted, left, strict=True))
    return seconds / max(paying, 1)


GRID = np.linspace(0.0, 1.0, 33)  # probabilities that a draft is accepted


@cache
def accept_lengths(tree: Tree) -> np.ndarray:
    """Accept lengths of a tree where a draft is accepted with each of the probabilities of `GRID`, in ascending order.
    Each next best token is right half as often as what those before it leave.

    Example: at 0.5 a chain of one draft has 1.5, a chain of two 1.75, and (2, 2, 4) 1.875.
    """
    found = [expected_accept([p * ((1 - p) / 2) ** rank for rank in range(tree.topk)])(tree) for p in GRID]
    return np.maximum.accumulate(found)


def transferred(length: Any, seen: Tree, tree: Tree) -> Any:
    """The accept length of `tree` where that of `seen` is `length`, a number or an array. Ascends with it."""
    if seen == tree:
        return length
    return np.interp(length, accept_lengths(seen), accept_lengths(tree))


def expected_tokens(
    trees: Mapping[int, Tree], lengths: Any, seen: Tree, factors: Mapping[int, float] = MappingProxyType({})
) -> dict[int, float]:
    """Tokens that requests emit in a step of each choice.

    Args:
        trees: of each choice.
        lengths: accept lengths of the requests in steps of the tree `seen`.
        factors: by which steps of a choice were better than `seen` said; default 1.
    """
    lengths = np.asarray(lengths)

    def each(choice: int, tree: Tree) -> Any:
        if choice == PLAIN:
            return np.ones_like(lengths)
        return np.maximum(factors.get(choice, 1.0) * transferred(lengths, seen, tree), 1.0)

    return {choice: float(np.sum(each(choice, tree))) for choice, tree in trees.items()}
