"""Tokenising beside the event loop, so that a huge prompt delays neither streams nor other clients' short prompts.

Two threads: one for short requests, in the order they came, and one for all others. Among the others the smaller goes
first, but only for a while: each is queued under the time at which it came plus an allowance for its size. Whatever
comes later than that goes behind it, so none waits for ever.

`tokenizers` gives up Python's lock while it encodes (measured: 12 ms at a stretch for 1 MB, which takes 0.7 s), so the
two run beside each other and beside the event loop.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

SHORT = 16_384
"""Characters of a request that counts as short: some 10 ms of work."""

ALLOWANCE = 1e-5
"""Seconds a character by which larger requests stand back behind smaller ones: ten times what it takes to tokenise."""

PER_SEQUENCE = 100
"""What making a sequence costs, as characters."""

Result = TypeVar("Result")


class _Job:
    """A function to be called once, unless it is forgotten before."""

    def __init__(self, function: Callable[[], Any], future: Future[Any]) -> None:
        self._function: Callable[[], Any] | None = function
        self._future: Future[Any] | None = future

    def forget(self, future: Future[Any]) -> None:
        """And with the function the prompt that it holds."""
        self._function = self._future = None

    def run(self) -> None:
        function, future = self._function, self._future
        if function is None or future is None or not future.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)


class _Lane:
    """A thread and what it has to do, the smallest key first. The thread starts with the first job."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: list[tuple[float, int, _Job]] = []
        self._numbers = itertools.count()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, key: float, job: _Job) -> None:
        with self._wake:
            heapq.heappush(self._jobs, (key, next(self._numbers), job))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._jobs:
                    self._wake.wait()
                job = heapq.heappop(self._jobs)[2]
            job.run()
            del job  # and with it the result, while this thread waits


class Tokenising:
    """Call `submit` from any thread."""

    def __init__(self) -> None:
        self._short = _Lane("specjax-tokenise-short")
        self._long = _Lane("specjax-tokenise-long")

    def submit(self, size: int, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Calls the function in a thread. To cancel the future frees what it would have worked on, if it still waits.

        Args:
            size: of the work, in characters; see `work`.
        """
        future: Future[Result] = Future()
        job = _Job(lambda: function(*arguments), future)
        future.add_done_callback(job.forget)
        if size <= SHORT:
            self._short.put(0.0, job)
        else:
            self._long.put(time.monotonic() + size * ALLOWANCE, job)
        return future


def work(prompts: Sequence[Any], choices: int) -> int:
    """About how much there is to do for these prompts with so many choices each, in characters."""
    return sum(_characters(prompt) for prompt in prompts) + len(prompts) * choices * PER_SEQUENCE


def _characters(prompt: Any) -> int:
    """Of a text or of all messages; a token id counts as a quarter of a character, for it need only be checked."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, Mapping):
        return sum(len(value) if isinstance(value, str) else PER_SEQUENCE for value in prompt.values())
    if prompt and isinstance(prompt[0], Mapping):
        return sum(map(_characters, prompt))
    return len(prompt) // 4
