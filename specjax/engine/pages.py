"""The pages of the pool, and the prefix cache: full pages of earlier texts for later requests with the same start.

A page belongs to one sequence or to the cache. A sequence gives its full pages to the cache when their tokens are
committed, and goes on reading them; a later sequence uses the longest chain of pages that matches its start. Full pages
are never written again, so they are shared without copies. Nodes form a tree, one child for each text of the next page:

    root ── the cat sat on ──┬── the mat . <eos>       a sequence locks the nodes of its pages and all above them;
                             └── the dog . <eos>       unlocked leaves may be evicted, least recently used first

A recurrent model (`specjax.cache.RowState`) can go on only from the end of a page whose state was kept: its node has a
*snapshot*, one of a few rows of the state beyond those of the requests.

Plain Python, independent of the device.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from itertools import islice

Text = tuple[int, ...]  # the tokens of one page


class Node:
    """A page of the cache. A root, one per salt, has no page, and the salt as its text."""

    __slots__ = ("children", "locks", "page", "parent", "snapshot", "text")

    def __init__(self, parent: Node | None, text: Hashable, page: int) -> None:
        self.parent, self.text, self.page = parent, text, page
        self.children: dict[Hashable, Node] = {}
        self.locks = 0  # sequences that hold this node or one below
        self.snapshot: int | None = None  # row of the state after this page


class Snapshots:
    """Rows `first` to `first` + `count` - 1 of the state, each free, reserved for a prefill, or held by a node."""

    def __init__(self, first: int, count: int) -> None:
        self._free = list(range(first + count - 1, first - 1, -1))
        self._nodes: dict[int, Node] = {}  # by row, least recently used first
        self.count = count

    @property
    def held(self) -> int:
        return len(self._nodes)

    def reserve(self, read: set[int]) -> int | None:
        """Returns a free row, or else takes the least recently used one except rows that will still be `read`."""
        if self._free:
            return self._free.pop()
        row = next((row for row in self._nodes if row not in read), None)
        if row is not None:
            self._nodes.pop(row).snapshot = None
        return row

    def give(self, row: int, node: Node | None) -> None:
        """Gives a reserved row to a node; if there is none, or it has one, the row is free."""
        if node is None or node.snapshot is not None:
            self._free.append(row)
        else:
            node.snapshot, self._nodes[row] = row, node

    def use(self, node: Node) -> int:
        """Returns the row of a node that has one, now the most recently used."""
        assert node.snapshot is not None
        self._nodes[node.snapshot] = self._nodes.pop(node.snapshot)
        return node.snapshot

    def drop(self, node: Node) -> None:
        """Frees the row of a node that is no longer in the cache."""
        if node.snapshot is not None:
            del self._nodes[node.snapshot]
            self._free.append(node.snapshot)
            node.snapshot = None


class PrefixCache:
    """Pages by the texts that they end. Texts with different salts share nothing.

    Args:
        free: gets the pages that are evicted.

    Attributes:
        snapshots: of a recurrent model; None: every page's end will do.
    """

    def __init__(self, free: list[int], page_size: int, snapshots: Snapshots | None = None) -> None:
        self._free, self._size, self.snapshots = free, page_size, snapshots
        self._roots: dict[Hashable, Node] = {}
        self._unlocked: dict[Node, None] = {}  # least recently used first; a node comes after those below it

    @property
    def evictable(self) -> int:
        """Number of unlocked pages."""
        return len(self._unlocked)

    def texts(self, tokens: list[int], most: int | None = None) -> list[Text]:
        """Splits the first `most` tokens into the texts of full pages."""
        size = self._size
        end = (len(tokens) if most is None else min(most, len(tokens))) // size * size
        return [tuple(tokens[at : at + size]) for at in range(0, end, size)]

    def match(self, salt: Hashable, texts: Iterable[Text]) -> list[Node]:
        """Returns the nodes of the longest cached prefix of these texts, in order, without locking them."""
        nodes: list[Node] = []
        node = self._roots.get(salt)
        for text in texts:
            if node is None or (node := node.children.get(text)) is None:
                break
            nodes.append(node)
        return nodes

    def lock(self, node: Node | None) -> None:
        """Locks a node and all above it until as many calls of `unlock`."""
        while node is not None and node.parent is not None:
            self._unlocked.pop(node, None)
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node | None) -> None:
        while node is not None and node.parent is not None:
            node.locks -= 1
            if node.locks == 0:
                self._unlocked[node] = None
            node = node.parent

    def holds(self, salt: Hashable, node: Node | None, text: Text) -> bool:
        """True if `node` (None: the salt's root) has a child with this text."""
        parent = self._roots.get(salt) if node is None else node
        return parent is not None and text in parent.children

    def insert(self, salt: Hashable, node: Node | None, text: Text, page: int) -> tuple[Node, bool]:
        """Moves a sequence's lock from `node` (None: the salt's root) to its child with this text.

        Returns:
            The child, and True if the cache took `page` for it; an existing child keeps its page.
        """
        parent = node
        if parent is None:
            parent = self._roots.setdefault(salt, Node(None, salt, -1))
        child = parent.children.get(text)
        taken = child is None
        if child is None:
            child = parent.children[text] = Node(parent, text, page)
        self._unlocked.pop(child, None)
        child.locks += 1  # the sequence holds locks of the nodes above already
        return child, taken

    def evict(self, count: int) -> int:
        """Frees up to `count` unlocked pages; returns their number."""
        nodes = list(islice(self._unlocked, count))
        for node in nodes:
            self._remove(node)
        return len(nodes)

    def clear(self) -> None:
        """Frees all pages, which must be unlocked."""
        nodes = list(self._nodes())
        assert not any(node.locks for node in nodes), "the prefix cache is cleared while a request uses it"
        self._free += [node.page for node in nodes]
        if self.snapshots is not None:
            for node in nodes:
                self.snapshots.drop(node)
        self._roots.clear()
        self._unlocked.clear()

    @property
    def pages(self) -> list[int]:
        """All pages of the cache."""
        return [node.page for node in self._nodes()]

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.text]
        node.parent = None
        self._free.append(node.page)
        if self.snapshots is not None:
            self.snapshots.drop(node)
        del self._unlocked[node]
        if self._roots.get(parent.text) is parent and not parent.children:
            del self._roots[parent.text]

    def _nodes(self) -> Iterator[Node]:
        left = [node for root in self._roots.values() for node in root.children.values()]
        while left:
            node = left.pop()
            yield node
            left += node.children.values()
