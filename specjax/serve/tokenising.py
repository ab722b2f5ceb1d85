"""Tokenising beside the event loop, so that a huge prompt delays neither streams nor other clients' short prompts.

There are two threads: one for short requests, in the order of arrival, and one for all others. Of these the smallest
goes first, within limits: each is queued under its time of arrival plus an allowance for its size, so that none waits
for ever.

`tokenizers` releases Python's lock while it encodes (measured: held 12 ms at a stretch for 1 MB, which takes 0.7 s), so
both threads and the event loop run side by side.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

SHORT = 16_384
"""Characters of a request that counts as short: some 10 ms of work."""

ALLOWANCE = 1e-5
"""Seconds a character by which larger requests stand back: ten times what it takes to tokenise."""

PER_SEQUENCE = 100
"""The cost of making a sequence, as characters."""

Result = TypeVar("Result")


class _Lane:
    """A thread and its jobs, the smallest key first. The thread starts with the first job."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.PriorityQueue[tuple[float, int, Future[Any], list[Callable[[], Any]]]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._starting = threading.Lock()

    def put(self, key: float, function: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        work: list[Callable[[], Any]] = [function]
        # A cancelled job stays in the queue, but the prompt that its function holds is freed at once.
        future.add_done_callback(lambda _: work.clear())
        self._jobs.put((key, next(self._numbers), future, work))
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()
        return future

    def _run(self) -> None:
        while True:
            self._next()

    def _next(self) -> None:
        """Waits for a job and runs it. A function of its own, so that its variables hold no result meanwhile."""
        _, _, future, work = self._jobs.get()
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work[0]()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)


class Tokenising:
    """Call `submit` from any thread."""

    def __init__(self) -> None:
        self._short = _Lane("specjax-tokenise-short")
        self._long = _Lane("specjax-tokenise-long")

    def submit(self, size: int, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Calls the function in a thread. Cancelling the future frees the arguments if the call has not begun.

        Args:
            size: characters of work, by `work`.
        """
        if size <= SHORT:
            return self._short.put(0.0, lambda: function(*arguments))
        return self._long.put(time.monotonic() + size * ALLOWANCE, lambda: function(*arguments))


def work(prompts: Sequence[Any], choices: int) -> int:
    """The approximate work of tokenising these prompts with so many choices each, in characters."""
    return sum(_characters(prompt) for prompt in prompts) + len(prompts) * choices * PER_SEQUENCE


def _characters(prompt: Any) -> int:
    """Of a text or of all messages; a token id, which is only checked, counts as a quarter of a character."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, Mapping):
        return sum(len(value) if isinstance(value, str) else PER_SEQUENCE for value in prompt.values())
    if prompt and isinstance(prompt[0], Mapping):
        return sum(map(_characters, prompt))
    return len(prompt) // 4
