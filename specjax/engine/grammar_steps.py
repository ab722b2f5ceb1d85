"""What an engine decides of steps in which some request follows a grammar: their programs, forced tokens and inputs.

The steps themselves are `specjax.engine.constrained`'s.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import NamedTuple

import numpy as np
from specjax_kernels.cpu.mailbox import Mailbox, Posting

from specjax.engine.buckets import JUMP, Buckets
from specjax.engine.choice import PLAIN
from specjax.engine.constrained import constrained_input, read_trees, root_trees, words
from specjax.engine.constraint import ALL
from specjax.engine.device import Device, memory_checked
from specjax.engine.executables import Executables
from specjax.engine.flight import InFlight
from specjax.engine.keys import Key
from specjax.engine.programs import Program, is_out_of_memory
from specjax.engine.sequence import Sequence, Status
from specjax.engine.transfers import Output


class Draft(NamedTuple):
    """The trees of a step that were launched before it."""

    key: Key  # of the program
    sequences: list[Sequence]
    output: Output


class GrammarSteps:
    """`free`: see `specjax.engine.drafting.free_tokens`.

    Attributes:
        ahead: launched behind the last step, for the next one of the same requests; None: nothing was.
    """

    def __init__(self, executables: Executables, device: Device, buckets: Buckets, vocab_size: int, free: int) -> None:
        self._executables, self._device, self._buckets = executables, device, buckets
        self._vocab_size, self._free = vocab_size, free
        self.ahead: Draft | None = None
        self._mailbox = Mailbox()

    def keys(self, count: int, pages: int, nodes: int) -> list[Key]:
        """Programs for a step of so many requests, the best first. Those that are compiled come first, whether or not
        they draft, and what is missing is compiled meanwhile: nothing of it was at the start."""

        def found(nodes: int) -> list[Key]:
            ready = self._executables.compiled(), self._executables.pending
            return list(self._buckets.step_keys(count, pages, *ready, nodes, "constrained"))

        choices = self._buckets.constrained_choices(self._buckets.batch(count))
        for choice in sorted(choices, key=lambda choice: choice != nodes):
            # What waits for the compiler after the first look has smaller programs in its place at the second.
            if self.is_ready(found(choice)[0]) or self.is_ready(found(choice)[0]):
                return found(choice)
        return found(nodes)

    def is_ready(self, key: Key) -> bool:
        """Whether a step can run at once, or never will; else compiles it meanwhile."""
        ready = [self._executables.compile_ahead(half) for half in self._halves(key)]  # begins with all of them
        return all(ready)

    def missing(self, keys: list[Key]) -> list[Key]:
        """What the best of these that can be compiled still waits for; another thread compiles it. None: it can run."""
        best = next((key for key in keys if not self._executables.has_failed(key)), keys[0])
        if self.is_ready(best):
            return []
        return [half for half in self._halves(best) if not self._executables.is_settled(half)]

    def _halves(self, key: Key) -> list[Key]:
        drafts = key.nodes == 0 and self._buckets.drafts(key.width)
        return [key, key._replace(kind="propose")] if drafts else [key]

    def forced(self, sequences: list[Sequence], nodes: int) -> tuple[dict[Sequence, list[int]], bool]:
        """Tokens that must come next in some of these: as many as are worth a wider step. And whether nothing is
        drafted beside them. `nodes`: of the step that is wanted."""
        batch, found = self._buckets.batch(len(sequences)), dict[Sequence, list[int]]()
        for one in sequences:
            if one.constraint is not None and one.params.drafts:
                found[one] = self._forced(one)
        drafting = nodes != PLAIN and self._buckets.drafts(batch)
        least = self._buckets.tree_widths(batch)[-1] if drafting else 1
        width = self._buckets.jump_width(batch, [len(found.get(one, ())) for one in sequences], least, self._free)
        cut = {one: tokens[: width - 1] for one, tokens in found.items()}
        return {one: tokens for one, tokens in cut.items() if tokens}, not drafting

    def _forced(self, sequence: Sequence) -> list[int]:
        """The tokens that must come next and may be drafted."""
        if sequence.constraint is None or not sequence.params.drafts:
            return []
        limit = sequence.params.draft_limit
        return sequence.constraint.forced(JUMP - 1 if limit is None else min(JUMP - 1, limit))

    def _proposing(self, half: Key) -> Program | None:
        """The program; None: out of memory, which `Executables` has logged, and the step does not draft."""
        try:
            return self._executables.get(half)
        except Exception as error:
            if is_out_of_memory(error):
                return None
            raise

    def draft(self, key: Key, part: list[Sequence], inputs: np.ndarray) -> Draft | None:
        """Launches the draft for a step of `part`, with the input of a step without a grammar. None: such steps do not
        draft."""
        half = key._replace(kind="propose")
        if key.nodes == PLAIN or not self._buckets.drafts(key.width) or (program := self._proposing(half)) is None:
            return None
        return Draft(half, part, self._device.run(half, program, inputs))

    def goes_on(self, flights: List[InFlight], running: list[Sequence]) -> bool:
        """Whether the next step of these requests may be launched before the last one is read: that is all that is in
        flight and emits one token of each, no mask takes long, and forced tokens would not be worth a wider step, be it
        those that are known to follow or as many as one of them alone can have."""
        if len(flights) != 1 or flights[0].sequences != running:
            return False
        key, bound = flights[0].key, [one.constraint for one in running if one.constraint is not None]
        if not bound or not self._executables.masks_come_late(key):
            return False
        if any(constraint.slow or constraint.failure is not None for constraint in bound):
            return False
        batch = self._buckets.batch(len(running))
        first = [JUMP - 1] + [0] * (len(running) - 1)
        if self._buckets.jump_width(batch, first, 1, self._free) > 1:
            return False
        known = [len(self._forced(one)) for one in running]  # the first is what the step in flight emits
        return self._buckets.jump_width(batch, [max(count - 1, 0) for count in known], 1, self._free) == 1

    def key_ahead(self, running: list[Sequence], nodes: int) -> Key | None:
        """The program of that step. None: it is not compiled, or is to draft. `nodes`: of the step that is wanted."""
        count, pages = len(running), max(len(one.pages) for one in running)
        if nodes != PLAIN and self._buckets.drafts(self._buckets.batch(count)):
            return None
        ready = self._executables.compiled()
        key = next(iter(self._buckets.step_keys(count, pages, ready, set(), PLAIN, "constrained")))
        if key not in ready or key.width < count or self._executables.has_failed(key):
            return None
        return key if self._executables.masks_come_late(key) else None

    def ticket(self, key: Key, inputs: np.ndarray) -> tuple[Posting, np.ndarray]:
        """For a step whose masks come late: what `post` gives it these with, and its packed input, from that of a step
        without a grammar."""
        posting = self._mailbox.open(key.width * words(self._vocab_size))
        ticket = np.broadcast_to(posting.ticket, (len(inputs), len(posting.ticket)))
        return posting, np.concatenate([inputs, ticket], axis=1)

    def post(self, posting: Posting, key: Key, part: list[Sequence]) -> None:
        """Gives a step of `part` its masks, which follow from what was read. A request that has ended needs none."""
        bits = np.zeros(0, np.uint32)
        try:
            bits = np.full((key.width, words(self._vocab_size)), ALL, np.uint32)
            for i, one in enumerate(part):
                if one.constraint is not None and one.status is Status.RUNNING:
                    bits[i] = one.constraint.mask()
        finally:  # the program waits for it
            self._mailbox.post(posting, bits)

    def inputs(
        self,
        key: Key,
        part: list[Sequence],
        inputs: np.ndarray,
        forced: dict[Sequence, list[int]],
        drafting: list[Sequence],
        ahead: Draft | None = None,
    ) -> np.ndarray:
        """The packed input of a step of `part`, from that of a step without a grammar. Drafts, if only for `drafting`,
        and waits for that. `ahead`: as the attribute was after the last step."""
        if self._executables.masks_come_late(key):
            posting, packed = self.ticket(key, inputs)
            self.post(posting, key, part)
            return packed
        nodes = self._buckets.step_widths(key)[-1]
        trees = root_trees(key.width, nodes)
        if drafting:
            if ahead is None or ahead.key != key._replace(kind="propose") or ahead.sequences != part:
                ahead = self.draft(key, part, inputs)
            if ahead is not None:
                with memory_checked(ahead.key):
                    self._device.check(ahead.output)
                    drafts = read_trees(ahead.output, self._buckets.step_widths(ahead.key)[-1])
                trees[:, :, : drafts.shape[2]] = drafts
        chains = [forced.get(sequence, [])[: nodes - 1] for sequence in part]
        return constrained_input(inputs, part, trees, chains, self._vocab_size)
