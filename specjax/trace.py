"""The draft tree of a step as numpy arrays and as text.

Steps return traces with `StepConfig(trace=True)`; engines collect them with `EngineConfig(trace=True)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import numpy as np

from specjax.state import StepOutput, Trace
from specjax.tree import NO_TOKEN


@dataclass(frozen=True, eq=False)
class StepTree:
    """The n valid nodes of one request's tree in one step, node 0 the root, parents before children.

    Attributes:
        tokens: int32 [n]. Token ids of the nodes.
        parents: int32 [n]. Index of the parent; -1 for the root.
        depth: int32 [n]. 0 for the root.
        scores: float32 [n]. Cumulative log-probability under the draft (n-grams: a rank), 0 for the root.
        drawn: int32 [n]. The target's draw at each node; -1 if not drawn.
        path: int32 [m + 1]. The root and the m accepted nodes.
        emitted: int32 [e]. Emitted tokens; e is m + 1, or less at the end of a text.
    """

    tokens: np.ndarray
    parents: np.ndarray
    depth: np.ndarray
    scores: np.ndarray
    drawn: np.ndarray
    path: np.ndarray
    emitted: np.ndarray

    @property
    def accepted(self) -> int:
        return len(self.path) - 1

    def children(self, node: int) -> list[int]:
        return np.flatnonzero(self.parents == node).tolist()


def step_tree(trace: Trace, row: int, emitted: np.ndarray) -> StepTree:
    """Extracts the tree of batch entry `row`, which emitted the tokens `emitted`."""
    host = jax.tree.map(np.asarray, trace)  # copied once: an array caches its host copy
    count = int(host.tree.valid[row].sum())
    nodes = {name: getattr(host.tree, name)[row, :count].copy() for name in ("tokens", "parents", "depth", "scores")}
    path = host.path[row, : int(host.accepted[row]) + 1].copy()
    return StepTree(**nodes, drawn=host.drawn[row, :count].copy(), path=path, emitted=np.array(emitted))


def step_trees(output: StepOutput) -> list[StepTree | None]:
    """Extracts the tree of each batch entry; None for inactive entries. Raises ValueError without a trace."""
    if output.trace is None:
        raise ValueError("the step's output has no trace: compile it with StepConfig(trace=True)")
    tokens = np.asarray(output.tokens)
    counts = enumerate(np.asarray(output.emitted))
    return [step_tree(output.trace, row, tokens[row, :count]) if count else None for row, count in counts]


def render(tree: StepTree, text: Callable[[list[int]], str] | None = None) -> str:
    """Renders a tree as text: each node's token and score, ✓ for accepted nodes, and the target's draw on the path.

    `text` decodes token ids; None shows the ids.

        ' cat' drew ' sat'
        ├── ' sat' -0.48 ✓ drew ' on'
        │   ├── ' on' -0.89 ✓ drew ' a'
        │   └── ' by' -2.41
        └── ' is' -2.21
        2 of 4 drafts accepted; emitted ' sat on a'
    """
    on_path = set(tree.path.tolist())

    def shown(ids: list[int]) -> str:
        return repr(text(ids)) if text else " ".join(map(str, ids))

    def label(node: int) -> str:
        parts = [shown([int(tree.tokens[node])])]
        if node:
            score = float(tree.scores[node])
            parts.append(f"{score:.0f}" if score.is_integer() else f"{score:.2f}")  # ranks are whole numbers
        if node and node in on_path:
            parts.append("✓")
        if node in on_path and tree.drawn[node] != NO_TOKEN:
            parts.append(f"drew {shown([int(tree.drawn[node])])}")
        return " ".join(parts)

    def below(node: int, indent: str) -> Iterator[str]:
        children = tree.children(node)
        for child in children:
            last = child == children[-1]
            yield f"{indent}{'└── ' if last else '├── '}{label(child)}"
            yield from below(child, indent + ("    " if last else "│   "))

    end = f"{tree.accepted} of {len(tree.tokens) - 1} drafts accepted; emitted {shown(tree.emitted.tolist())}"
    return "\n".join([label(0), *below(0, ""), end])
