"""Tokenising beside the event loop, so that a huge prompt delays neither streams nor other clients' short prompts.

One thread takes short requests, in the order of arrival, one those whose grammar is to be compiled, and one all others.
Of these the smallest goes first, but none waits for ever: each is queued under its time of arrival plus an allowance
for its size. `tokenizers` releases Python's lock while it encodes, and so does the compiler of grammars.
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

SHORT = 16_384  # characters of a request that counts as short: some 10 ms of work
ALLOWANCE = 1e-5  # seconds a character by which larger requests stand back: ten times what it takes to tokenise
PER_SEQUENCE = 100  # the cost of making a sequence, as characters

Result = TypeVar("Result")


class _Lane:
    """A thread and its jobs, the smallest key first."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.PriorityQueue[tuple[float, int, Future[Any], list[Callable[[], Any]]]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, key: float, function: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        work: list[Callable[[], Any]] = [function]
        # A cancelled job stays in the queue, but the prompt that its function holds is freed at once.
        future.add_done_callback(lambda _: work.clear())
        self._jobs.put((key, next(self._numbers), future, work))
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
        self._compiling = _Lane("specjax-tokenise-compile")

    def submit(self, size: int, function: Callable[[], Result], *, compiles: bool = False) -> Future[Result]:
        """Calls the function, `size` characters of `work`, in a thread. Cancelling the future before frees it.
        `compiles`: whether it compiles a grammar, too."""
        if compiles:
            return self._compiling.put(time.monotonic() + size * ALLOWANCE, function)
        if size <= SHORT:
            return self._short.put(0.0, function)
        return self._long.put(time.monotonic() + size * ALLOWANCE, function)


def work(prompts: Sequence[Any], choices: int) -> int:
    """The approximate cost of tokenising these prompts, with `choices` each, in characters."""
    return sum(_characters(prompt) for prompt in prompts) + len(prompts) * choices * PER_SEQUENCE


def _characters(prompt: Any) -> int:
    """Of a text or of all messages; a token id, which is only checked, counts as a quarter of a character."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, Mapping):
        return sum(len(value) if isinstance(value, str) else PER_SEQUENCE for value in prompt.values())
    if prompt and isinstance(prompt[0], Mapping):
        template = getattr(prompt, "template", None)
        return sum(map(_characters, prompt)) + (len(json.dumps(template)) if template else 0)
    return len(prompt) // 4
