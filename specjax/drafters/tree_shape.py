"""The shape of a draft model's tree: steps, top-k, nodes."""

from __future__ import annotations

from dataclasses import MISSING, dataclass

from specjax.limits import ParameterError, check, documented, setting

MAX_STEPS = 64
"""Far above what has been found useful anywhere, as the other limits are; beyond, one step takes minutes to compile."""


@documented
@dataclass(frozen=True)
class TreeShape:
    """EAGLE-2 grows the tree for D levels, k nodes wide, and keeps the N - 1 best of all candidates.

    Raises:
        ParameterError: a number is out of range, or there are more nodes than candidates.
    """

    steps: int = setting(MISSING, "D, levels of the tree", minimum=1, maximum=MAX_STEPS)
    topk: int = setting(MISSING, "k, nodes of a level that are expanded, and children of each", minimum=1, maximum=64)
    nodes: int = setting(MISSING, "N, nodes that are kept, the root included", minimum=2, maximum=512)

    def __post_init__(self) -> None:
        check(self)
        most = candidates(self.steps, self.topk)
        if self.nodes - 1 > most:
            problem = (
                f"is {self.nodes}, but {self.steps} steps of top-k {self.topk} give {most} candidates, so a tree of at "
                f"most {most + 1} tokens; set fewer draft tokens, more steps or a larger top-k"
            )
            raise ParameterError("nodes", problem, "TreeShape")

    @property
    def depth(self) -> int:
        """D: the deepest a node can be; a tree of few nodes cannot be deeper than a chain of them."""
        return min(self.steps, self.nodes - 1)

    def within(self, nodes: int) -> TreeShape:
        """The same tree cut down to `nodes` nodes, at least 2: no more steps than a chain of them has, top-k in
        proportion, or more where there would be too few candidates.

            7, 1, 8 within 4 -> 3, 1, 4        5, 8, 32 within 10 -> 5, 2, 10        3, 8, 32 within 7 -> 3, 2, 7
        """
        if nodes >= self.nodes:
            return self
        steps, topk = min(self.steps, nodes - 1), max(self.topk * nodes // self.nodes, 1)
        enough = (k for k in range(topk, self.topk + 1) if candidates(steps, k) >= nodes - 1)
        return TreeShape(steps, next(enough), nodes)

    def __str__(self) -> str:
        return f"{self.steps} steps, top-k {self.topk}, {self.nodes} draft tokens"


def candidates(steps: int, topk: int) -> int:
    """Candidates below the root: k of the first level, k for each of k nodes of every further level."""
    return topk + (steps - 1) * topk * topk
