"""Places in the queue, which requests keep while they are tokenised."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from specjax.serve.errors import unavailable


class Places:
    """Counts places of requests that are not queued yet.

    Args:
        unfinished: gives the sequences that wait or run.
        capacity: gives the most sequences that may wait or run.
    """

    def __init__(self, unfinished: Callable[[], int], capacity: Callable[[], int]) -> None:
        self._unfinished, self._capacity, self._lock = unfinished, capacity, threading.Lock()
        self.reserved = 0

    @property
    def taken(self) -> int:
        """Sequences that are being tokenised, waiting or running."""
        return self._unfinished() + self.reserved

    @contextlib.contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Keeps places for `count` sequences while they are tokenised; queue them before the end. Raises an ApiError, a
        503, if too many requests wait already."""
        with self._lock:
            if self.taken + count > (most := self._capacity()):
                problem = f"{self.taken} requests run or wait; at most {most} may"
                raise unavailable(f"the queue is full: {problem}", retry_after=1)
            self.reserved += count
        try:
            yield
        finally:
            with self._lock:
                self.reserved -= count
