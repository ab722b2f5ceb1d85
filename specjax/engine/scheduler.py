"""Decides what runs next.

`Scheduler` gives slots and pages to sequences, and takes them away when pages run out. `next_prefill` and `next_steps`
choose batches and programs: at most one prefill, then a step for each running request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from typing import TYPE_CHECKING

from specjax.engine.batch import Batch, InFlight, collect, collect_all_but
from specjax.engine.buckets import PLAIN, TREE, Key
from specjax.engine.config import Policy
from specjax.engine.grammar import GRAMMAR_FAILED
from specjax.engine.grammar_steps import forced_tokens, is_ready, step_keys
from specjax.engine.pages import Node, PageAllocator, PrefixCache, Snapshots
from specjax.engine.sequence import NO_SCORES, AbortCode, Sequence, Slot, Status

if TYPE_CHECKING:
    from specjax.engine.engine import Engine

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
        self.allocator = PageAllocator(pages)
        kept = None if snapshots is None else Snapshots(rows, snapshots)
        self.prefix = PrefixCache(self.allocator, page_size, kept)
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
        return self.allocator.free + self.prefix.evictable

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
            if self.prefix.snapshots is not None and len(matched) * self.page_size > sequence.active_slot.prefilled:
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
                prompts.sort(key=lambda s: (s.left, s.request.arrival))
        return prompts

    def reserve(self, sequences: Iterable[Sequence]) -> bool:
        """Reserves pages for all tokens that may be committed before the next step is read. False: too few pages."""
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
        """Gives full pages of certainly committed tokens to the prefix cache.

        If the cache has a page with the same text, the sequence keeps its page, and gives later pages only when it
        `leaves`: until then both would be held.
        """
        if not self._reuse:
            return
        slot, size = sequence.active_slot, self.page_size
        committed = [*sequence.prompt, *sequence.output.tokens][: slot.certain]
        for i in range(slot.stored, len(committed) // size):
            text = tuple(committed[i * size : (i + 1) * size])
            if not leaves and self.prefix.holds(sequence.salt_key, slot.node, text):
                self._give_snapshots(sequence, committed)
                return
            page = slot.pages[i]
            slot.node, taken = self.prefix.insert(sequence.salt_key, slot.node, text, page)
            if taken:
                slot.own.remove(page)
            slot.stored += 1
            if (row := slot.snapshots.pop(slot.stored, None)) is not None and self.prefix.snapshots is not None:
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
        pages = (slot.prefilled + tokens) // self.page_size
        length = pages * self.page_size - slot.prefilled
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
        self.retract(max(self.active, key=lambda sequence: (-sequence.params.priority, sequence.request.arrival)))

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

    def check_integrity(self) -> None:
        """Raises AssertionError if a page or slot is lost, held twice, or held by no sequence."""
        slots = {sequence.id: sequence.active_slot for sequence in self.active}
        self.allocator.check_integrity([self.prefix.pages, *(slot.own for slot in slots.values())])
        self.prefix.check_integrity(slot.node for slot in slots.values() if slot.node is not None)
        cached = set(self.prefix.pages)
        for id, slot in slots.items():
            assert len(set(slot.pages)) == len(slot.pages), f"{id} has a page twice"
            assert set(slot.pages) <= cached | slot.own, f"{id} uses a page that is not held for it"
        rows = [slot.index for slot in slots.values()]
        assert len(set(rows)) == len(self.active), f"two sequences share a slot: {rows}"
        assert not set(rows) & set(self._free_slots), "a slot is free and taken"
        assert all(sequence.slot is None for sequence in self.waiting), "a waiting sequence holds a slot"

    def _ordered(self) -> list[Sequence]:
        waiting = list(self.waiting)
        by_prefix = self._policy == "lpm" and len(waiting) <= LONG_QUEUE
        if not by_prefix and len({sequence.params.priority for sequence in waiting}) == 1:
            return waiting

        def rank(sequence: Sequence) -> tuple[int, int, int]:
            cached = len(self.prefix.match(sequence.salt_key, sequence.texts)) if by_prefix else 0
            return -sequence.params.priority, -cached, sequence.request.arrival

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
        sequence.slot = slot = Slot(
            self._free_slots.pop(), pages, set(own), node, stored=len(nodes), prefilled=reused, certain=reused
        )
        kept = self.prefix.snapshots
        slot.source = slot.index if node is None or kept is None else kept.use(node)
        sequence.status = Status.PREFILLING
        if sequence.output.cached is None:
            sequence.output.cached = reused
        self.active.append(sequence)
        self.active.sort(key=lambda s: s.request.arrival)
        return True

    def _allocate(self, count: int) -> list[int] | None:
        if (missing := count - self.allocator.free) > 0:
            self.prefix.evict(missing)
        return self.allocator.allocate(count)

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
        self.allocator.release(slot.own)
        self._free_slots.append(slot.index)
        self.active.remove(sequence)

    def _set_texts(self, sequence: Sequence) -> None:
        sequence.texts = self.prefix.texts(sequence.context, sequence.reusable) if self._reuse else []

    def _pages_for(self, sequence: Sequence, committed: int) -> int:
        """Number of pages for all tokens that may be committed before the next step is read."""
        return -(-min(committed + self.lookahead, sequence.most_tokens) // self.page_size)


# Prefill


def next_prefill(engine: Engine) -> Batch | None:
    """The next chunk of one or several prompts; None: there is none, or a long prefill is in flight while no request
    runs, which would delay a request that comes now."""
    kind, prompts = _prompts(engine)
    sizes = [flight.batch.key.size for flight in engine.flights if not flight.batch.key.verifies]
    if not prompts or (not _running(engine) and max(sizes, default=0) > engine.buckets.small):
        return None
    try:
        key, program = engine.programs.first_usable(_prefill_keys(engine, prompts, kind))
    except MemoryError as error:
        if kind != "scoring":
            raise
        engine.give_up(prompts[0], f"{NO_SCORES}: {error}", AbortCode.MEMORY)  # only this request needs it
        return None
    lengths = key.lengths(sequence.next_left for sequence in prompts)
    return Batch(key, program, prompts[: len(lengths)], lengths)


def _prompts(engine: Engine) -> tuple[str, list[Sequence]]:
    """The kind of the next prefill and its prompts. A prompt with log-probabilities or a wide page table runs alone;
    while its program compiles, other prompts run."""
    prompts, longest = engine.scheduler.prefilling(), engine.buckets.chunks[-1]
    plain = [sequence for sequence in prompts if not sequence.scores_within(longest) and not _is_wide(engine, sequence)]
    if not prompts or prompts[0] in plain:
        return "prefill", plain
    kind = "scoring" if prompts[0].scores_within(longest) else "prefill"
    if not engine.programs.compile_ahead(next(_prefill_keys(engine, prompts[:1], kind))):
        return "prefill", plain
    return kind, prompts[:1]


def _is_wide(engine: Engine, sequence: Sequence) -> bool:
    """True if a sequence needs a wide page table, whose programs no start compiles."""
    return len(sequence.active_slot.pages) > engine.buckets.tables[0]


def _prefill_keys(engine: Engine, prompts: list[Sequence], kind: str) -> Iterator[Key]:
    left, pages = zip(*((sequence.next_left, len(sequence.active_slot.pages)) for sequence in prompts), strict=True)
    running = _running(engine)
    most = engine.buckets.most_prefilled(running, len(engine.scheduler.active) - running)
    ready, pending = engine.programs.compiled(), engine.programs.pending
    return engine.buckets.prefill_keys([*left], [*pages], most, ready, kind, pending=pending)


def _running(engine: Engine) -> int:
    return sum(sequence.status is not Status.PREFILLING for sequence in engine.scheduler.active)


# Steps


def next_steps(engine: Engine) -> Iterator[Batch]:
    """One step for each running request: in one batch, or in several if no program fits all. Requests with a grammar
    or a wide page table are left out while their program compiles."""
    _collect_grammars(engine)
    left = _able(engine, _reserved(engine))
    while left:
        count, pages = len(left), max(len(sequence.active_slot.pages) for sequence in left)
        forced = dict[Sequence, list[int]]()
        if any(sequence.constraint for sequence in left):
            forced = forced_tokens(engine, left)
            nodes = _nodes(engine, left, forced)
            keys = step_keys(engine, count, pages, nodes)
            if not is_ready(engine, keys):
                left = [sequence for sequence in left if not sequence.constraint]
                continue
        else:
            wide, first = pages > engine.buckets.tables[0], engine.buckets.choices(engine.buckets.batch(count))[0]
            if wide and not all(map(engine.programs.compile_ahead, _step_keys(engine, count, pages, first)[:1])):
                left = [sequence for sequence in left if not _is_wide(engine, sequence)]
                continue
            nodes = _ready_nodes(engine, count, pages, _nodes(engine, left, forced))
            keys = _step_keys(engine, count, pages, nodes)
        key, program = engine.programs.first_usable(keys)
        part, left = left[: key.width], left[key.width :]
        forced = {sequence: forced[sequence] for sequence in part if sequence in forced and key.drafts}
        drafts = key.drafts and nodes == TREE
        drafted = tuple(sequence for sequence in part if sequence in forced or (sequence.drafts and drafts))
        yield Batch(key, program, part, drafted=drafted, forced=forced)


def _step_keys(engine: Engine, count: int, pages: int, nodes: int) -> list[Key]:
    """Programs for a step without grammars, best first."""
    return [*engine.buckets.step_keys(count, pages, engine.programs.compiled(), engine.programs.pending, nodes)]


def _ready_nodes(engine: Engine, count: int, pages: int, nodes: int) -> int:
    """Returns `nodes`, or the other choice while the program for `nodes` compiles in the background."""
    programs, other = engine.programs, PLAIN if nodes == TREE else TREE
    if engine.policy is None or (nodes == TREE and engine.drafter.costly_observe):  # a plain step would leave a hole
        return nodes

    def fit(nodes: int) -> int:
        """2: a compiled program fits all requests; 1: it fits some of them; 0: there is none."""
        ready = [key for key in _step_keys(engine, count, pages, nodes)[:1] if key in programs.compiled()]
        return sum(1 + (key.width >= min(count, engine.buckets.batches[-1])) for key in ready)

    if pages > engine.buckets.tables[0]:
        programs.compile_ahead(_step_keys(engine, count, pages, nodes)[0])
    if all(key.kind != "step" or key.nodes != nodes for key in programs.pending):
        return nodes
    return max(nodes, other, key=fit)


def _nodes(engine: Engine, sequences: list[Sequence], forced: Mapping[Sequence, List[int]]) -> int:
    """TREE or PLAIN for the next step of these sequences. `forced`: tokens that a step with drafts emits together."""
    batch = engine.buckets.batch(len(sequences))
    if engine.policy is None:
        return TREE
    if not engine.buckets.drafts(batch):
        return PLAIN
    if engine.drafter.costly_observe:  # chosen at the admission
        return TREE if any(sequence.drafts for sequence in sequences) else PLAIN
    pays = forced and engine.policy.pays(batch, len(sequences), sum(map(len, forced.values())))
    return TREE if pays else engine.policy.choose(batch, sequences)


def _collect_grammars(engine: Engine) -> None:
    """Reads the steps in flight of sequences with a grammar, whose next masks need the tokens."""

    def needed(flight: InFlight) -> bool:
        batch = flight.batch
        return batch.key.verifies and any(sequence.constraint for sequence in batch.sequences)

    while any(map(needed, engine.flights)):
        collect(engine, engine.flights.popleft())


def _able(engine: Engine, running: list[Sequence]) -> list[Sequence]:
    """Ends requests whose grammar allows no next token. Returns the others."""
    for sequence in running:
        if sequence.constraint is not None and (problem := sequence.constraint.problem()) is not None:
            message = f"{GRAMMAR_FAILED} after {len(sequence.output.tokens)} tokens: {problem}"
            engine.give_up(sequence, message, AbortCode.GRAMMAR)
    return [sequence for sequence in running if sequence.status is Status.RUNNING]


def _reserved(engine: Engine) -> list[Sequence]:
    """The running requests, with pages for all that they may commit; retracts some if pages run out."""
    while True:
        running = engine.scheduler.running()
        if not running or engine.scheduler.reserve(running):
            return running
        # Read all steps before a retraction: the output must be complete, and reading may free pages.
        if engine.flights:
            collect_all_but(engine, 0)
        else:
            engine.scheduler.retract_youngest()
