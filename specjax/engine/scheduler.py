"""Slots, pages, admission, and retraction when pages run out. Plain Python; knows nothing of the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import chain

from specjax.engine.sequence import Sequence, Status


class PageAllocator:
    """Pages 0 .. P-1 of the pool, each free or held once."""

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise ValueError(f"a pool needs at least one page, got {pages}")
        self._free = list(range(pages - 1, -1, -1))
        self._held = set[int]()

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None (and no change) if there are not that many."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._held.update(taken)
        return taken

    def release(self, pages: Iterable[int]) -> None:
        """Frees these pages. Raises ValueError for one that is free."""
        for page in pages:
            if page not in self._held:
                raise ValueError(f"page {page} is released twice")
            self._held.remove(page)
            self._free.append(page)

    def check_integrity(self, held: Iterable[Iterable[int]]) -> None:
        """Checks that exactly the pages in these lists are held. Raises AssertionError if a page leaked, or is free and
        held, or held or free twice."""
        pages = sorted(chain.from_iterable(held))
        assert pages == sorted(self._held), f"held: {pages}, known: {sorted(self._held)}"
        assert sorted([*self._free, *pages]) == list(range(len(self._free) + len(pages))), (
            "a page is lost or free twice"
        )


class Scheduler:
    """First come, first served. A sequence is admitted when a slot and pages for its context are free.

    `lookahead` is the number of tokens that steps not yet read may commit, 2 (D + 1) when steps are dispatched ahead.
    """

    def __init__(self, *, rows: int, pages: int, page_size: int, lookahead: int) -> None:
        self.allocator = PageAllocator(pages)
        self.page_size = page_size
        self.lookahead = lookahead
        self.waiting: deque[Sequence] = deque()
        self.active: list[Sequence] = []  # with a slot, oldest arrival first
        self._slots = list(range(rows - 1, -1, -1))
        self.retractions = 0

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.active)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Gives slots and pages to waiting sequences, in order, until one does not fit."""
        admitted = []
        while self.waiting and self._slots:
            sequence = self.waiting[0]
            need = self._pages_for(sequence, len(sequence.context))
            # One page for each running sequence stays free, or the newcomer would be retracted again at once.
            if self.allocator.free < need + len(self.active):
                break
            pages = self.allocator.allocate(need)
            assert pages is not None
            self.waiting.popleft()
            sequence.slot, sequence.pages = self._slots.pop(), pages
            sequence.status, sequence.prefilled, sequence.committed = Status.PREFILLING, 0, 0
            self.active.append(sequence)
            self.active.sort(key=lambda s: s.arrival)
            admitted.append(sequence)
        return admitted

    def running(self) -> list[Sequence]:
        return [s for s in self.active if s.status is Status.RUNNING]

    def reserve(self, sequences: Iterable[Sequence]) -> bool:
        """Reserves pages for all that these may commit before the next step is read. False: there are not enough."""
        for sequence in sequences:
            if len(sequence.pages) * self.page_size >= sequence.committed + self.lookahead:
                continue
            missing = self._pages_for(sequence, sequence.committed) - len(sequence.pages)
            if missing <= 0:
                continue
            pages = self.allocator.allocate(missing)
            if pages is None:
                return False
            sequence.pages.extend(pages)
        return True

    def retract_youngest(self) -> None:
        """Sends the youngest back to the head of the queue. Its output is kept and never drawn again.

        Only when no step is in flight: what it emitted must have been read.
        """
        assert len(self.active) > 1, "one request alone always fits: Engine.add refuses those that do not"
        self.retractions += 1
        self._retract()

    def retract_all(self) -> None:
        """Sends all back to the queue, in order of arrival. What was not read of their output is drawn again."""
        while self.active:
            self._retract()

    def finish(self, sequence: Sequence) -> None:
        """Slot and pages back, whatever the sequence was doing. Steps in flight run before any that reuse them."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is not Status.FINISHED:
            self._leave(sequence)
        sequence.status = Status.FINISHED

    def check_integrity(self) -> None:
        """Checks that every page and slot is where it should be. Raises AssertionError if one is not."""
        self.allocator.check_integrity(sequence.pages for sequence in self.active)
        slots = [sequence.slot for sequence in self.active]
        assert len(set(slots)) == len(slots), f"two sequences share a slot: {slots}"
        assert not set(slots) & set(self._slots), "a slot is free and taken"
        assert all(s.slot is None and not s.pages for s in self.waiting), "a waiting sequence holds a slot or pages"

    def _retract(self) -> None:
        sequence = self.active[-1]
        self._leave(sequence)
        sequence.status = Status.WAITING
        self.waiting.appendleft(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.allocator.release(sequence.pages)
        assert sequence.slot is not None
        self._slots.append(sequence.slot)
        sequence.slot, sequence.pages = None, []
        self.active.remove(sequence)

    def _pages_for(self, sequence: Sequence, committed: int) -> int:
        """Pages for all that may be committed before the next step is read."""
        return -(-min(committed + self.lookahead, sequence.most_tokens) // self.page_size)
