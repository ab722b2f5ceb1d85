"""Owners of the pool's pages: a free list and reference counts, on the host. Knows nothing of devices or requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain


class PageAllocator:
    """Pages 0 .. P-1. A page is free, or held by one or more owners; it returns when the last lets go."""

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise ValueError(f"a pool needs at least one page, got {pages}")
        self._pages = pages
        self._free = list(range(pages - 1, -1, -1))
        self._owners = Counter[int]()

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one owner each, or None (and no change) if there are not that many."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._owners.update(taken)
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Adds an owner to pages. Raises ValueError, and changes nothing, if one of them is free."""
        pages = list(pages)
        if free := [page for page in pages if not self._owners[page]]:
            raise ValueError(f"page {free[0]} is free: it cannot be shared")
        self._owners.update(pages)

    def release(self, pages: Iterable[int]) -> None:
        """Removes an owner from each of these pages. Raises ValueError for one that is free."""
        for page in pages:
            if not self._owners[page]:
                raise ValueError(f"page {page} is released twice")
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)

    def check_integrity(self, held: Iterable[Iterable[int]]) -> None:
        """Checks that every page is free or held by exactly the owners in `held` (one list of pages each). Raises
        AssertionError if a page leaked, is free and held, or is free twice."""
        counts = Counter(chain.from_iterable(held))
        assert counts == self._owners, f"held: {counts}, known: {self._owners}"
        assert sorted([*self._free, *counts]) == list(range(self._pages)), "a page is free and held, or free twice"
