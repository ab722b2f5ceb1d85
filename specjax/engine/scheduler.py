"""Gives slots and pages to sequences, and takes them away when pages run out. `specjax.engine.plan` decides what runs
next, from the `View` of the sequences."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from specjax.engine.config import Policy
from specjax.engine.pages import Node, PrefixCache, Snapshots
from specjax.engine.plan import Prompt, Running, View
from specjax.engine.sequence import Sequence, Slot, Status

PATIENCE = 4
"""One of this many prefills takes the oldest prompt first, the others take the shortest rest first. So a long prompt
gets at least a quarter of the prefills, and a short prompt waits for at most one chunk of it."""

LONG_QUEUE = 128  # longer queues are served in order, also with lpm, which matches each request at each step


class Scheduler:
    """Admits sequences when a slot and pages for their context are free, and orders prompts.

    Higher priorities are admitted first. Within a priority, fcfs admits in order of arrival, and lpm by the number of
    prompt tokens in the prefix cache. If another sequence is computing the next page of a prompt, the sequence waits
    for that page.

    Args:
        lookahead: tokens that unread steps may commit, 2 (D + 1) when steps are dispatched ahead.
        reuse: use a prefix cache.
        snapshots: number of snapshots for a recurrent model; None: the model is not recurrent.
        recomputed: number of tokens at the end of a cached prefix that are computed again, because what a drafter keeps
            of them depends on the tokens after them.
    """

    def __init__(
        self, *, rows: int, pages: int, page_size: int, lookahead: int, reuse: bool = True, policy: Policy = "fcfs",
        snapshots: int | None = None, recomputed: int = 0,
    ) -> None:  # fmt: skip
        self.free_pages = list(range(pages - 1, -1, -1))
        kept = None if snapshots is None else Snapshots(rows, snapshots)
        self.prefix = PrefixCache(self.free_pages, page_size, kept)
        self.page_size = page_size
        self.lookahead = lookahead
        self.waiting: deque[Sequence] = deque()
        self.active: list[Sequence] = []  # with a slot, oldest arrival first
        self._reuse, self._policy, self._recomputed = reuse, policy, -(-recomputed // page_size)
        self._free_slots = list(range(rows - 1, -1, -1))
        self._turn = 0
        self.retractions = 0

    @property
    def available(self) -> int:
        """Number of pages that are free or can be evicted from the prefix cache."""
        return len(self.free_pages) + self.prefix.evictable

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.active)

    def add(self, sequence: Sequence) -> None:
        self._set_texts(sequence)
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Gives slots and pages to waiting sequences, until one does not fit."""
        admitted: list[Sequence] = []
        for sequence in self._ordered() if self._free_slots and self.waiting else ():
            if not self._free_slots:
                break
            matched = self.prefix.match(sequence.salt_key, sequence.texts)
            if self._in_progress(sequence, len(matched)):
                continue
            if not self._place(sequence, self._resumable(matched)):
                break
            if self.prefix.snapshots is not None and len(matched) * self.page_size > sequence.active_slot.length:
                sequence.active_slot.branch = len(matched) * self.page_size
            self.waiting.remove(sequence)
            admitted.append(sequence)
        return admitted

    def running(self) -> list[Sequence]:
        return [s for s in self.active if s.status is Status.RUNNING]

    def prefilling(self) -> list[Sequence]:
        """Sequences whose prompt is not all dispatched, in the order of their prefills; see `PATIENCE`."""
        prompts = [s for s in self.active if s.status is Status.PREFILLING]
        if len(prompts) > 1:
            self._turn += 1
            if self._turn % PATIENCE:
                prompts.sort(key=lambda s: (s.left, s.arrival))
        return prompts

    def view(self, unread: Collection[Sequence], *, chunk: int, depth: int, prefilling: int) -> View:
        """What `plan` reads.

        Args:
            unread: sequences with a step in flight.
            chunk: tokens of the largest chunk.
            depth: of the deepest trees, which a path of forced tokens fills.
            prefilling: tokens of the largest prefill in flight.
        """
        prompts = [
            Prompt(s.id, s.next_left, len(s.active_slot.pages), s.scores_within(chunk)) for s in self.prefilling()
        ]
        running = [
            Running(
                s.id, len(s.active_slot.pages), s.drafts, s.acceptance, grammar=s.constraint is not None,
                unread=s in unread, forced=() if s in unread else s.forced_tokens(depth),
            )
            for s in self.running()
        ]  # fmt: skip
        return View(prompts, running, prefilling)

    def reserve(self, sequences: Iterable[Sequence]) -> bool:
        """Reserves pages for all tokens that may be committed before the next step is read. False: too few pages."""
        for sequence in sequences:
            slot = sequence.active_slot
            if len(slot.pages) * self.page_size >= slot.length + self.lookahead:
                continue
            missing = self._pages_for(sequence, slot.length) - len(slot.pages)
            if missing <= 0:
                continue
            pages = self._allocate(missing)
            if pages is None:
                return False
            slot.pages.extend(pages)
            slot.own.update(pages)
        return True

    def store(self, sequence: Sequence, *, leaves: bool = False) -> None:
        """Gives full pages of certainly committed tokens to the prefix cache.

        If the cache has a page with the same text, the sequence keeps its page, and gives later pages only when it
        `leaves`: until then both would be held.
        """
        if not self._reuse:
            return
        slot, size = sequence.active_slot, self.page_size
        committed = [*sequence.prompt, *sequence.output.tokens][: slot.certain]
        for i in range(len(slot.pages) - len(slot.own), len(committed) // size):
            text = tuple(committed[i * size : (i + 1) * size])
            if not leaves and self.prefix.holds(sequence.salt_key, slot.node, text):
                self._give_snapshots(sequence, committed)
                return
            page = slot.pages[i]
            slot.node, taken = self.prefix.insert(sequence.salt_key, slot.node, text, page)
            if taken:
                slot.own.remove(page)
            if (row := slot.snapshots.pop(i + 1, None)) is not None and self.prefix.snapshots is not None:
                self.prefix.snapshots.give(row, slot.node)

    def _give_snapshots(self, sequence: Sequence, committed: list[int]) -> None:
        """Gives snapshots of certainly committed tokens to pages with the same text that the cache has."""
        kept, slot = self.prefix.snapshots, sequence.active_slot
        for pages in [count for count in slot.snapshots if count * self.page_size <= len(committed)]:
            nodes = self.prefix.match(sequence.salt_key, self.prefix.texts(committed, pages * self.page_size))
            if kept is not None and len(nodes) == pages:
                kept.give(slot.snapshots.pop(pages), nodes[-1])

    def _resumable(self, nodes: list[Node]) -> list[Node]:
        """Cuts a cached prefix before the pages that are computed again, and to its last snapshot, if the model is
        recurrent."""
        nodes = nodes[: max(len(nodes) - self._recomputed, 0)]
        if self.prefix.snapshots is not None:
            while nodes and nodes[-1].snapshot is None:
                nodes = nodes[:-1]
        return nodes

    def snapshot(self, sequence: Sequence, tokens: int) -> tuple[int, int, int]:
        """For the prefill of the next `tokens` tokens of a recurrent model: the row that it reads, the row of a new
        snapshot (-1: none), and the number of tokens before the snapshot, up to the last full page."""
        slot, kept = sequence.active_slot, self.prefix.snapshots
        pages = (slot.length + tokens) // self.page_size
        length = pages * self.page_size - slot.length
        if kept is None or not self._reuse or length <= 0:
            return slot.source, -1, 0
        row = kept.reserve({other.active_slot.source for other in self.active})
        if row is None and slot.snapshots:  # a longer prefix of the same text is worth more
            row = slot.snapshots.pop(min(slot.snapshots))
        if row is None:
            return slot.source, -1, 0
        slot.snapshots[pages] = row
        return slot.source, row, length

    def retract_youngest(self) -> None:
        """Sends the youngest sequence of the lowest priority back to the head of the queue. It keeps its output, which
        must have been read: no step may be in flight."""
        assert len(self.active) > 1, "one request alone always fits: Engine.add refuses those that do not"
        self.retractions += 1
        self.retract(max(self.active, key=lambda sequence: (-sequence.params.priority, sequence.arrival)))

    def start_over(self) -> None:
        """After the contents of pages are lost: sends all sequences back to the queue, in order of arrival, and clears
        the prefix cache. Unread output is drawn again."""
        while self.active:
            self.active[-1].active_slot.certain = 0
            self.retract(self.active[-1])
        self.prefix.clear()

    def finish(self, sequence: Sequence) -> None:
        """Frees slot and pages in any state of the sequence. Steps in flight run before steps that reuse them."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is not Status.FINISHED:
            self._leave(sequence)
        sequence.status = Status.FINISHED

    def _ordered(self) -> list[Sequence]:
        waiting = list(self.waiting)
        by_prefix = self._policy == "lpm" and len(waiting) <= LONG_QUEUE
        if not by_prefix and len({sequence.params.priority for sequence in waiting}) == 1:
            return waiting

        def rank(sequence: Sequence) -> tuple[int, int, int]:
            cached = len(self.prefix.match(sequence.salt_key, sequence.texts)) if by_prefix else 0
            return -sequence.params.priority, -cached, sequence.arrival

        return sorted(waiting, key=rank)

    def _in_progress(self, sequence: Sequence, cached: int) -> bool:
        """True if another sequence is computing the page after the `cached` ones."""
        wanted = sequence.texts[: cached + 1]
        if len(wanted) <= cached:
            return False
        others = (s for s in self.active if s.status is Status.PREFILLING or s.active_slot.certain < len(s.prompt))
        return any(s.salt_key == sequence.salt_key and s.texts[: cached + 1] == wanted for s in others)

    def _place(self, sequence: Sequence, nodes: list[Node]) -> bool:
        """Gives a slot and pages to a sequence, the pages of `nodes` first. False: too few pages."""
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
        sequence.slot = slot = Slot(self._free_slots.pop(), pages, set(own), node, length=reused, certain=reused)
        kept = self.prefix.snapshots
        slot.source = slot.index if node is None or kept is None else kept.use(node)
        sequence.status = Status.PREFILLING
        if sequence.output.cached is None:
            sequence.output.cached = reused
        self.active.append(sequence)
        self.active.sort(key=lambda s: s.arrival)
        return True

    def _allocate(self, count: int) -> list[int] | None:
        if (missing := count - len(self.free_pages)) > 0:
            self.prefix.evict(missing)
        return None if count > len(self.free_pages) else [self.free_pages.pop() for _ in range(count)]

    def retract(self, sequence: Sequence) -> None:
        """Sends a sequence back to the head of the queue. Its tokens in flight are dropped, and drawn again."""
        self._leave(sequence)
        sequence.status = Status.WAITING
        self._set_texts(sequence)
        self.waiting.appendleft(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.store(sequence, leaves=True)
        slot, sequence.slot = sequence.active_slot, None
        if self.prefix.snapshots is not None:
            for row in slot.snapshots.values():
                self.prefix.snapshots.give(row, None)
        self.prefix.unlock(slot.node)
        self.free_pages += slot.own
        self._free_slots.append(slot.index)
        self.active.remove(sequence)

    def _set_texts(self, sequence: Sequence) -> None:
        sequence.texts = self.prefix.texts(sequence.context, sequence.reusable) if self._reuse else []

    def _pages_for(self, sequence: Sequence, committed: int) -> int:
        """Number of pages for all tokens that may be committed before the next step is read."""
        return -(-min(committed + self.lookahead, sequence.most_tokens) // self.page_size)
