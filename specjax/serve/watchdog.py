"""Notices an engine that is stuck."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class EngineStuck(RuntimeError):
    """A step or a command did not end within `--watchdog-timeout`."""


class Watchdog(threading.Thread):
    """Notices a thread that is stuck: calls `act` once, with the seconds without progress, when they exceed `timeout`.

    `beat` gives a number that changes with each progress, None while there is no work; `excused` says whether the work
    waits for a compiler, which may take its time. `act` is called from this thread, which ends after it.
    """

    def __init__(
        self,
        *,
        timeout: float,
        beat: Callable[[], int | None],
        excused: Callable[[], bool],
        act: Callable[[float], None],
    ) -> None:
        super().__init__(name="specjax-watchdog", daemon=True)
        self._beat, self._excused, self._act = beat, excused, act
        self._timeout, self._interval = timeout, min(1.0, timeout / 8)
        self._seen: int | None = None
        self._stuck = 0.0
        self._stopped = threading.Event()

    def look(self, elapsed: float) -> float | None:
        """Looks once, `elapsed` seconds after the last time. Returns the seconds without progress if they are too many.

        Only time in which this thread could look counts: a process that was suspended for an hour is not stuck.
        """
        beat = self._beat()
        if beat is None or beat != self._seen or self._excused():
            self._seen, self._stuck = beat, 0.0
            return None
        self._stuck += min(elapsed, 2 * self._interval)
        return self._stuck if self._stuck > self._timeout else None

    def run(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(self._interval):
            now = time.monotonic()
            if (seconds := self.look(now - last)) is not None:
                self._act(seconds)
                return
            last = now

    def stop(self) -> None:
        """From any thread, also before `start`."""
        self._stopped.set()
