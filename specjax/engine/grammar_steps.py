"""What an engine decides of steps in which some request follows a grammar: their programs, forced tokens and inputs.

The steps themselves are `specjax.engine.constrained`'s.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from specjax.drafters import Drafter
from specjax.engine.buckets import Buckets, Key
from specjax.engine.constrained import constrained_input, read_trees, root_trees
from specjax.engine.device import Device, memory_checked
from specjax.engine.executables import Executables
from specjax.engine.grammar import Constraint
from specjax.engine.sequence import Sequence


class GrammarSteps:
    def __init__(
        self, executables: Executables, device: Device, buckets: Buckets, drafter: Drafter, vocab_size: int
    ) -> None:
        self._executables, self._device, self._buckets = executables, device, buckets
        self._drafter, self._vocab_size = drafter, vocab_size

    def keys(self, count: int, pages: int, nodes: int) -> list[Key]:
        """Programs for a step of so many requests, the best first. Those that are compiled come first, whether or not
        they draft, and what is missing is compiled meanwhile: nothing of it was at the start."""

        def found(nodes: int) -> list[Key]:
            ready = self._executables.compiled(), self._executables.pending
            return list(self._buckets.step_keys(count, pages, *ready, nodes, "constrained"))

        for choice in sorted(self._buckets.choices(self._buckets.batch(count)), key=lambda choice: choice != nodes):
            # What waits for the compiler after the first look has smaller programs in its place at the second.
            if self.is_ready(found(choice)[0]) or self.is_ready(found(choice)[0]):
                return found(choice)
        return found(nodes)

    def is_ready(self, key: Key) -> bool:
        """Whether a step can run at once, or never will; else compiles it meanwhile."""
        halves = [key] if self._buckets.step_widths(key) == (1,) else [key, key._replace(kind="propose")]
        self._executables.compile_later(halves)
        return all(half in self._executables.compiled() or self._executables.has_failed(half) for half in halves)

    def forced(self, sequences: list[Sequence]) -> dict[Sequence, list[int]]:
        """Tokens that must come next in some of these: no more than may be drafted."""
        found: dict[Sequence, list[int]] = {}
        for one in sequences:
            if one.constraint is not None and one.params.drafts:
                limit, depth = one.params.draft_limit, self._drafter.depth
                if tokens := one.constraint.forced(depth if limit is None else min(depth, limit)):
                    found[one] = tokens
        return found

    def jumps(self, sequences: list[Sequence], forced: dict[Sequence, list[int]]) -> bool:
        """Whether a step that checks forced tokens is worth while where drafting is not."""
        counts = [len(forced.get(sequence, ())) for sequence in sequences]
        return any(counts) and self._buckets.jump_pays(self._buckets.batch(len(sequences)), counts)

    def inputs(
        self,
        key: Key,
        part: list[Sequence],
        inputs: np.ndarray,
        forced: dict[Sequence, list[int]],
        drafting: list[Sequence],
    ) -> np.ndarray:
        """The packed input of a step of `part`, from that of a step without a grammar. Drafts, if only for `drafting`,
        and waits for that."""
        nodes, half = self._buckets.step_widths(key)[-1], key._replace(kind="propose")
        trees = root_trees(key.width, nodes)
        if drafting and nodes > 1 and not self._executables.has_failed(half):
            output = self._device.run(half, self._executables.get(half), inputs)
            with memory_checked(half):
                trees = read_trees(output, nodes)
        depth = min(self._drafter.within(nodes).depth, nodes - 1)
        chains = [forced.get(sequence, [])[:depth] for sequence in part]
        return constrained_input(inputs, part, trees, chains, self._vocab_size)
