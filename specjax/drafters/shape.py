"""How large a draft tree is: EAGLE's three numbers."""

from __future__ import annotations

from dataclasses import MISSING, dataclass

from specjax.limits import check, limited

MAX_STEPS = 64
"""Far above what has been found useful anywhere, as the other limits are; beyond, one step takes minutes to compile."""


@dataclass(frozen=True)
class TreeShape:
    """Steps D, top-k k, nodes N (the root included).

    EAGLE-2 grows the tree for D levels, k nodes wide, and keeps the N - 1 best of all candidates.

    Raises:
        ValueError: a number is out of range, or there are more nodes than candidates.
    """

    steps: int = limited(MISSING, 1, MAX_STEPS)
    topk: int = limited(MISSING, 1, 64)
    nodes: int = limited(MISSING, 2, 512)

    def __post_init__(self) -> None:
        check(self)
        check_candidates(type(self).__name__, self.steps, self.topk, self.nodes)

    @property
    def depth(self) -> int:
        """D: the deepest a node can be; a tree of few nodes cannot be deeper than a chain of them."""
        return min(self.steps, self.nodes - 1)

    def __str__(self) -> str:
        return f"{self.steps} steps, top-k {self.topk}, {self.nodes} draft tokens"


def candidates(steps: int, topk: int) -> int:
    """Candidates below the root: k of the first level, k for each of k nodes of every further level."""
    return topk + (steps - 1) * topk * topk


def check_candidates(owner: str, steps: int, topk: int, nodes: int) -> None:
    """Raises ValueError, naming the options of `owner`, for more nodes than candidates and the root."""
    most = candidates(steps, topk)
    if nodes - 1 > most:
        raise ValueError(
            f"{owner}.nodes is {nodes}, but {steps} steps of top-k {topk} give {most} candidates, so a tree of at most "
            f"{most + 1} tokens; ask for fewer draft tokens, or for more steps ({owner}.steps) or a larger top-k "
            f"({owner}.topk)"
        )
