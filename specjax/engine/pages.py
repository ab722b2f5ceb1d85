"""The pages of the pool, and the prefix cache: full pages of earlier texts that later requests with the same start use.

A page belongs to one holder: a sequence, or the cache. A sequence gives its full pages to the cache once their tokens
are known to be committed, and reads them like its own from then on; a later sequence takes the longest chain of pages
that holds its start. Full pages are never written again, so they are shared without copies. A tree of nodes leads from
page to page, one child for each text of the next page:

    root ── the cat sat on ──┬── the mat . <eos>       a sequence locks the nodes of its pages and so all above them;
                             └── the dog . <eos>       a node that none locks may be evicted, the leaf used least first

Plain Python; knows nothing of the device.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Iterator
from itertools import chain, count


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


Text = tuple[int, ...]  # the tokens of one page


class Node:
    """A page of the cache. The roots, one for each salt, have none, and the salt as their text."""

    __slots__ = ("children", "locks", "page", "parent", "text", "used")

    def __init__(self, parent: Node | None, text: Hashable, page: int) -> None:
        self.parent, self.text, self.page = parent, text, page
        self.children: dict[Hashable, Node] = {}
        self.locks = 0  # sequences that hold this node or one below
        self.used = 0  # when it was last in use, as a count


class PrefixCache:
    """Pages by the texts that they end, least recently used out first. Texts with different salts share nothing.

    Attributes:
        evictable: pages that no sequence uses.
    """

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self._allocator, self._size = allocator, page_size
        self._roots: dict[Hashable, Node] = {}
        self._clock = count(1)
        self._leaves: list[tuple[int, int, Node]] = []  # a heap of (used, serial, node), some of them out of date
        self._serial = count()
        self.evictable = 0

    def texts(self, tokens: list[int], most: int | None = None) -> list[Text]:
        """The texts of the full pages of the first `most` tokens."""
        size = self._size
        end = (len(tokens) if most is None else min(most, len(tokens))) // size * size
        return [tuple(tokens[at : at + size]) for at in range(0, end, size)]

    def match(self, salt: Hashable, texts: Iterable[Text]) -> list[Node]:
        """The nodes that hold the longest known start of these texts, in order. They are not locked."""
        found: list[Node] = []
        node = self._roots.get(salt)
        for text in texts:
            if node is None or (node := node.children.get(text)) is None:
                break
            found.append(node)
        return found

    def lock(self, node: Node | None) -> None:
        """Keeps a node and all above it until it is unlocked as often. None: nothing."""
        while node is not None and node.parent is not None:
            self.evictable -= node.locks == 0
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node | None) -> None:
        now = next(self._clock)
        while node is not None and node.parent is not None:
            node.locks -= 1
            if node.locks == 0:
                self.evictable += 1
                node.used = now
                self._offer(node)
            node = node.parent

    def holds(self, salt: Hashable, node: Node | None, text: Text) -> bool:
        """Whether `node` (None: the salt's root) has a child for the next page's text."""
        parent = self._roots.get(salt) if node is None else node
        return parent is not None and text in parent.children

    def insert(self, salt: Hashable, node: Node | None, text: Text, page: int) -> tuple[Node, bool]:
        """The child of a locked `node` (None: of the salt's root) for the next page's text, and whether it took `page`
        over, which then belongs to the cache; a text that is known already keeps the page that it has. The lock goes
        down to the child."""
        parent = node
        if parent is None:
            parent = self._roots.setdefault(salt, Node(None, salt, -1))
        child = parent.children.get(text)
        taken = child is None
        if child is None:
            child = parent.children[text] = Node(parent, text, page)
            self.evictable += 1
        self.evictable -= child.locks == 0
        child.locks += 1  # those above are locked by this sequence already
        return child, taken

    def evict(self, count: int) -> int:
        """Frees up to `count` pages that no sequence uses; returns how many."""
        freed = 0
        while freed < count and self._leaves:
            entry = heapq.heappop(self._leaves)
            if self._is_idle(*entry):
                self._remove(entry[2])
                freed += 1
        return freed

    def clear(self) -> None:
        """Frees all pages. No sequence may use one."""
        nodes = list(self._nodes())
        assert not any(node.locks for node in nodes), "the prefix cache is cleared while a request uses it"
        self._allocator.release(node.page for node in nodes)
        self._roots.clear()
        self._leaves.clear()
        self.evictable = 0

    @property
    def pages(self) -> list[int]:
        """All pages that the cache holds."""
        return [node.page for node in self._nodes()]

    def _offer(self, node: Node) -> None:
        """Puts a node on the heap, if it may be evicted now."""
        if node.locks or node.children or node.parent is None:
            return
        heapq.heappush(self._leaves, (node.used, next(self._serial), node))
        if len(self._leaves) > 2 * self.evictable + 64:  # most of them are out of date
            self._leaves = [entry for entry in self._leaves if self._is_idle(*entry)]
            heapq.heapify(self._leaves)

    def _is_idle(self, used: int, _: int, node: Node) -> bool:
        """Whether an entry of the heap stands for a node that may be evicted."""
        return node.used == used and not node.locks and not node.children and node.parent is not None

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.text]
        node.parent = None
        self._allocator.release([node.page])
        self.evictable -= 1
        self._offer(parent)
        if self._roots.get(parent.text) is parent and not parent.children:
            del self._roots[parent.text]

    def _nodes(self) -> Iterator[Node]:
        left = [node for root in self._roots.values() for node in root.children.values()]
        while left:
            node = left.pop()
            yield node
            left += node.children.values()

    def check_integrity(self, locked: Iterable[Node]) -> None:
        """Checks counts against `locked`, the nodes that sequences hold. Raises AssertionError."""
        expected: dict[Node, int] = {}
        for held in locked:
            node: Node | None = held
            while node is not None and node.parent is not None:
                expected[node] = expected.get(node, 0) + 1
                node = node.parent
        nodes = list(self._nodes())
        assert all(node.locks == expected.get(node, 0) for node in nodes), (
            "a page of the prefix cache is locked wrongly"
        )
        assert set(expected) <= set(nodes), "a request uses a page that is no longer in the prefix cache"
        assert self.evictable == sum(not node.locks for node in nodes), "evictable pages are miscounted"
