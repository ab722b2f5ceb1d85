"""Who holds which page: a free list and reference counts, on the host. Knows nothing of devices or requests."""

from __future__ import annotations

from collections.abc import Iterable


class PageAllocator:
    """Pages 0 .. P-1. A page is free, or held by one or more owners; it returns when the last lets go."""

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise ValueError(f"a pool needs at least one page, got {pages}")
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))
        self._owners = [0] * pages

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
        for page in taken:
            self._owners[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more owner for pages that are held.

        Raises:
            ValueError: a page is free.
        """
        pages = list(pages)
        for page in pages:
            if self._owners[page] == 0:
                raise ValueError(f"page {page} is free: it cannot be shared")
        for page in pages:
            self._owners[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One owner fewer for each of these pages.

        Raises:
            ValueError: a page is free already.
        """
        for page in pages:
            if self._owners[page] == 0:
                raise ValueError(f"page {page} is released twice")
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)

    def check_integrity(self, held: Iterable[Iterable[int]]) -> None:
        """Every page is free or held by exactly the owners in `held` (one list of pages each).

        Raises:
            AssertionError: a page leaked, is free and held, or is free twice.
        """
        counts = [0] * self.pages
        for pages in held:
            for page in pages:
                counts[page] += 1
        assert counts == self._owners, {
            page: (mine, counted) for page, (mine, counted) in enumerate(zip(self._owners, counts, strict=True))
            if mine != counted
        }  # fmt: skip
        assert len(set(self._free)) == len(self._free), "a page is twice in the free list"
        assert sorted(self._free) == [page for page, owners in enumerate(counts) if owners == 0]
