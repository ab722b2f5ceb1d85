"""Slots, pages, admission, and retraction when pages run out. Plain Python; knows nothing of the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal, TypeAlias

from specjax.engine.pages import Node, PageAllocator, PrefixCache
from specjax.engine.sequence import Sequence, Slot, Status

Policy: TypeAlias = Literal["fcfs", "lpm"]

PATIENCE = 4
"""Every so many prefills the oldest prompt comes first, the others the shortest rest first: so a long prompt gets at
least a quarter of the prefills, and a short one waits for no more than one chunk of it."""

OVERTAKEN = 64  # a request that so many later ones have overtaken comes first
LONG_QUEUE = 128  # with lpm, longer queues are served in order: each request would be matched at each step


class Scheduler:
    """Admits sequences when a slot and pages for their context are free, and decides whose prompt comes next.

    Those of the highest priority are admitted first. Of one priority, fcfs admits in order of arrival; lpm those first
    of whose prompt the most is in the prefix cache. None is overtaken more than `OVERTAKEN` times. A sequence whose
    next page of the prompt is being computed for another one waits for that page.

    Args:
        lookahead: tokens that steps not yet read may commit, 2 (D + 1) when steps are dispatched ahead.
        reuse: whether there is a prefix cache.
        retract_every: see `EngineConfig.retract_every`.
    """

    def __init__(
        self,
        *,
        rows: int,
        pages: int,
        page_size: int,
        lookahead: int,
        reuse: bool = True,
        policy: Policy = "fcfs",
        retract_every: int | None = None,
    ) -> None:
        self.allocator = PageAllocator(pages)
        self.prefix = PrefixCache(self.allocator, page_size)
        self.page_size = page_size
        self.lookahead = lookahead
        self.waiting: deque[Sequence] = deque()
        self.active: list[Sequence] = []  # with a slot, oldest arrival first
        self._reuse, self._policy, self._every = reuse, policy, retract_every
        self._forced = 0  # the step at which a request was last retracted without need
        self._free_slots = list(range(rows - 1, -1, -1))
        self._turn = 0
        self.retractions = 0

    @property
    def available(self) -> int:
        """Pages that are free, or that the prefix cache would give up."""
        return self.allocator.free + self.prefix.evictable

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.active)

    def add(self, sequence: Sequence) -> None:
        self._read(sequence)
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Gives slots and pages to waiting sequences, until one does not fit."""
        admitted: list[Sequence] = []
        for sequence in self._ordered() if self._free_slots and self.waiting else ():
            if not self._free_slots:
                break
            if sequence.waits_for_scores:
                continue
            if sequence.leader is not None:  # now it may reuse more than when it came
                sequence.leader = None
                self._read(sequence)
            nodes = self.prefix.match(sequence.salt_key, sequence.texts)
            if self._in_the_making(sequence, len(nodes)):
                continue
            if not self._place(sequence, nodes):
                break
            self.waiting.remove(sequence)
            for other in self.waiting:
                other.overtaken += other.request.arrival < sequence.request.arrival
            admitted.append(sequence)
        return admitted

    def running(self) -> list[Sequence]:
        return [s for s in self.active if s.status is Status.RUNNING]

    def prefilling(self) -> list[Sequence]:
        """The sequences whose prompt is not all dispatched, in the order of their turn; see `PATIENCE`."""
        found = [s for s in self.active if s.status is Status.PREFILLING]
        if len(found) > 1:
            self._turn += 1
            if self._turn % PATIENCE:
                found.sort(key=lambda s: (s.left, s.request.arrival))
        return found

    def reserve(self, sequences: Iterable[Sequence]) -> bool:
        """Reserves pages for all that these may commit before the next step is read. False: there are not enough."""
        for sequence in sequences:
            slot = sequence.active_slot
            if len(slot.pages) * self.page_size >= slot.committed + self.lookahead:
                continue
            missing = self._pages_for(sequence, slot.committed) - len(slot.pages)
            if missing <= 0:
                continue
            pages = self._allocate(missing)
            if pages is None:
                return False
            slot.pages.extend(pages)
            slot.own.update(pages)
        return True

    def store(self, sequence: Sequence, *, leaves: bool = False) -> None:
        """Gives the full pages of what is certainly committed to the prefix cache.

        A page whose text is there already stays the sequence's own. The pages after it are given when it `leaves`:
        until then they would keep both.
        """
        if not self._reuse:
            return
        slot, size = sequence.active_slot, self.page_size
        committed = [*sequence.prompt, *sequence.output.tokens][: slot.certain]
        for i in range(slot.stored, len(committed) // size):
            text = tuple(committed[i * size : (i + 1) * size])
            if not leaves and self.prefix.holds(sequence.salt_key, slot.node, text):
                return
            page = slot.pages[i]
            slot.node, taken = self.prefix.insert(sequence.salt_key, slot.node, text, page)
            if taken:
                slot.own.remove(page)
            slot.stored += 1

    def is_due(self, steps: int) -> bool:
        """Whether a request is to be retracted without need, after so many steps of the engine."""
        several = self._every is not None and len(self.active) > 1
        return several and steps > self._forced and steps % (self._every or 1) == 0

    def retract_youngest(self, steps: int = 0) -> None:
        """Sends the youngest of the lowest priority back to the head of the queue. Its output is kept and never drawn
        again.

        Only when no step is in flight: what it emitted must have been read. `steps`: of the engine, for `is_due`.
        """
        self._forced = max(self._forced, steps)
        assert len(self.active) > 1, "one request alone always fits: Engine.add refuses those that do not"
        self.retractions += 1
        self._retract(max(self.active, key=lambda sequence: (-sequence.params.priority, sequence.request.arrival)))

    def start_over(self) -> None:
        """After the pages' contents are lost: sends all back to the queue, in order of arrival, and forgets all
        prefixes. What was not read of their output is drawn again."""
        while self.active:
            self.active[-1].active_slot.certain = 0
            self._retract(self.active[-1])
        self.prefix.clear()

    def finish(self, sequence: Sequence) -> None:
        """Slot and pages back, whatever the sequence was doing. Steps in flight run before any that reuse them."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is not Status.FINISHED:
            self._leave(sequence)
        sequence.status = Status.FINISHED

    def check_integrity(self) -> None:
        """Checks that every page and slot is where it should be. Raises AssertionError if one is not."""
        slots = {sequence.id: sequence.active_slot for sequence in self.active}
        self.allocator.check_integrity([self.prefix.pages, *(slot.own for slot in slots.values())])
        self.prefix.check_integrity(slot.node for slot in slots.values() if slot.node is not None)
        cached = set(self.prefix.pages)
        for id, slot in slots.items():
            assert len(set(slot.pages)) == len(slot.pages), f"{id} has a page twice"
            assert set(slot.pages) <= cached | slot.own, f"{id} uses a page that nobody keeps for it"
        rows = [slot.index for slot in slots.values()]
        assert len(set(rows)) == len(self.active), f"two sequences share a slot: {rows}"
        assert not set(rows) & set(self._free_slots), "a slot is free and taken"
        assert all(sequence.slot is None for sequence in self.waiting), "a waiting sequence holds a slot"

    # Parts

    def _ordered(self) -> list[Sequence]:
        waiting = list(self.waiting)
        by_prefix = self._policy == "lpm" and len(waiting) <= LONG_QUEUE
        if not by_prefix and len({sequence.params.priority for sequence in waiting}) == 1:
            return waiting

        def rank(sequence: Sequence) -> tuple[bool, int, int, int]:
            late = sequence.overtaken >= OVERTAKEN
            known = 0 if late or not by_prefix else len(self.prefix.match(sequence.salt_key, sequence.texts))
            return not late, 0 if late else -sequence.params.priority, -known, sequence.request.arrival

        return sorted(waiting, key=rank)

    def _in_the_making(self, sequence: Sequence, known: int) -> bool:
        """Whether the page after the `known` ones is being computed for another sequence."""
        wanted = sequence.texts[: known + 1]
        if len(wanted) <= known:
            return False
        others = (s for s in self.active if s.status is Status.PREFILLING or s.active_slot.certain < len(s.prompt))
        return any(s.salt_key == sequence.salt_key and s.texts[: known + 1] == wanted for s in others)

    def _place(self, sequence: Sequence, nodes: list[Node]) -> bool:
        """Gives a slot and pages to a sequence that starts with the pages of `nodes`. False: there are too few."""
        need = self._pages_for(sequence, len(sequence.context)) - len(nodes)
        free = self.available - sum(not node.locks for node in nodes)
        # One page for each running sequence stays free, or the newcomer would be retracted again at once.
        if free < need + len(self.active):
            return False
        node = nodes[-1] if nodes else None
        self.prefix.lock(node)
        own = self._allocate(need)
        assert own is not None
        reused, pages = len(nodes) * self.page_size, [*(node.page for node in nodes), *own]
        sequence.slot = Slot(
            self._free_slots.pop(), pages, set(own), node, stored=len(nodes), prefilled=reused, certain=reused
        )
        sequence.status = Status.PREFILLING
        if sequence.output.cached is None:
            sequence.output.cached = reused
        self.active.append(sequence)
        self.active.sort(key=lambda s: s.request.arrival)
        return True

    def _allocate(self, count: int) -> list[int] | None:
        """Pages, for which those of the prefix cache are evicted that no sequence uses."""
        if (missing := count - self.allocator.free) > 0:
            self.prefix.evict(missing)
        return self.allocator.allocate(count)

    def _retract(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.status = Status.WAITING
        self._read(sequence)
        self.waiting.appendleft(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.store(sequence, leaves=True)
        slot, sequence.slot = sequence.active_slot, None
        self.prefix.unlock(slot.node)
        self.allocator.release(slot.own)
        self._free_slots.append(slot.index)
        self.active.remove(sequence)

    def _read(self, sequence: Sequence) -> None:
        """Notes the texts of the pages that another request may have left."""
        sequence.texts = self.prefix.texts(sequence.context, sequence.reusable) if self._reuse else []

    def _pages_for(self, sequence: Sequence, committed: int) -> int:
        """Pages for all that may be committed before the next step is read."""
        return -(-min(committed + self.lookahead, sequence.most_tokens) // self.page_size)
