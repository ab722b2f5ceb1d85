"""Invariants of pages, slots and the prefix cache."""

from __future__ import annotations

from itertools import chain

from specjax.engine import Engine
from specjax.engine.pages import Node
from specjax.engine.scheduler import Scheduler


def check_integrity(engine: Engine) -> None:
    """No page or slot is lost, held twice, or held by no sequence."""
    with engine.lock:
        check_scheduler(engine.scheduler, engine.pool.pages)
        assert set(engine.runtime.sequences.values()) == {*engine.scheduler.waiting, *engine.scheduler.active}


def check_scheduler(scheduler: Scheduler, pages: int) -> None:
    slots = {sequence.id: sequence.active_slot for sequence in scheduler.active}
    free, cached = scheduler.free_pages, scheduler.prefix.pages
    held = sorted(chain(cached, *(slot.own for slot in slots.values())))
    assert sorted([*free, *held]) == list(range(pages)), "a page is lost, or free or held twice"
    check_locks(scheduler, [slot.node for slot in slots.values() if slot.node is not None])
    for id, slot in slots.items():
        assert len(set(slot.pages)) == len(slot.pages), f"{id} has a page twice"
        assert set(slot.pages) <= {*cached, *slot.own}, f"{id} uses a page that is not held for it"
    rows = [slot.index for slot in slots.values()]
    assert len(set(rows)) == len(scheduler.active), f"two sequences share a slot: {rows}"
    assert not set(rows) & set(scheduler._free_slots), "a slot is free and taken"
    assert all(sequence.slot is None for sequence in scheduler.waiting), "a waiting sequence holds a slot"


def check_locks(scheduler: Scheduler, locked: list[Node]) -> None:
    """Locks and counts match the nodes that sequences hold."""
    expected: dict[Node, int] = {}
    for leaf in locked:
        node: Node | None = leaf
        while node is not None and node.parent is not None:
            expected[node] = expected.get(node, 0) + 1
            node = node.parent
    nodes = list(scheduler.prefix._nodes())
    assert all(node.locks == expected.get(node, 0) for node in nodes), "a page of the prefix cache is locked wrongly"
    assert set(expected) <= set(nodes), "a request uses a page that is no longer in the prefix cache"
    assert scheduler.prefix.evictable == sum(not node.locks for node in nodes), "evictable pages are miscounted"
