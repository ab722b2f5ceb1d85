"""A lock that one thread cannot keep from another by asking again and again."""

from __future__ import annotations

import threading
from types import TracebackType


class FairLock:
    """Reentrant, and given to a thread that waits before the one that has just released it.

    Python's own locks may be taken again at once by that thread, so that one that works in a loop keeps all others out.
    """

    def __init__(self) -> None:
        self._door, self._lock = threading.Lock(), threading.RLock()
        self._owner: int | None = None

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            self._lock.acquire()
            self._depth += 1
            return
        with self._door:  # whoever waits for the lock stands in the door
            self._lock.acquire()
            self._owner, self._depth = threading.get_ident(), 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        try:
            self._depth -= 1
            if not self._depth:
                self._owner = None
        finally:
            self._lock.release()
