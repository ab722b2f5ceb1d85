"""The page allocator against a plain model: a list of owners with their pages."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from specjax.engine.pages import PageAllocator

PAGES = 7


class Allocator(RuleBasedStateMachine):
    """`owners` lists all allocated pages."""

    lists = Bundle("lists")

    def __init__(self):
        super().__init__()
        self.allocator = PageAllocator(PAGES)
        self.owners: list[list[int]] = []

    def allocated(self) -> set[int]:
        return {page for pages in self.owners for page in pages}

    @rule(target=lists, count=st.integers(0, PAGES + 2))
    def allocate(self, count):
        free = PAGES - len(self.allocated())
        pages = self.allocator.allocate(count)
        if count > free:
            assert pages is None
            return multiple()
        assert len(set(pages)) == len(pages) == count
        assert not set(pages) & self.allocated(), "an allocated page"
        assert set(pages) <= set(range(PAGES))
        self.owners.append(pages)
        return pages

    @rule(pages=consumes(lists))
    def release(self, pages):
        self.allocator.release(pages)
        self.owners.remove(pages)

    @precondition(lambda self: len(self.allocated()) < PAGES)
    @rule(data=st.data())
    def a_free_page_is_refused(self, data):
        free = data.draw(st.sampled_from(sorted(set(range(PAGES)) - self.allocated())))
        with pytest.raises(ValueError, match=f"page {free} is"):
            self.allocator.release([free])

    @invariant()
    def every_page_is_counted(self):
        assert self.allocator.free == PAGES - len(self.allocated())
        self.allocator.check_integrity(self.owners)

    @invariant()
    def a_wrong_count_is_noticed(self):
        """A leak, and pages that were not allocated."""
        if self.allocated():
            leak = next(i for i, pages in enumerate(self.owners) if pages)
            with pytest.raises(AssertionError):
                self.allocator.check_integrity([p for i, p in enumerate(self.owners) if i != leak])
        for page in range(PAGES):
            with pytest.raises(AssertionError):
                self.allocator.check_integrity([*self.owners, [page]])


Allocator.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
test_allocator = Allocator.TestCase


def test_errors():
    allocator = PageAllocator(2)
    (page,) = allocator.allocate(1)
    assert allocator.free == 1
    allocator.release([page])
    assert allocator.free == 2
    with pytest.raises(ValueError, match="released twice"):
        allocator.release([page])
    allocator.check_integrity([])
