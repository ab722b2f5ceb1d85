"""Tokenisation in threads, so that a huge prompt delays neither streams nor other clients' short prompts.

One thread handles short requests in order of arrival, one handles requests with a grammar to compile, one all others.
The last two sort requests by arrival time plus an allowance for their size: smaller requests overtake larger ones, but
no request waits for ever. `tokenizers` and the compiler of grammars release Python's lock.
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

SHORT = 16_384  # maximum number of characters of a short request: some 10 ms of work
ALLOWANCE = 1e-5  # seconds a character by which larger requests are delayed: ten times the time to tokenise it
PER_SEQUENCE = 100  # cost of making a sequence, in characters

Result = TypeVar("Result")


class _Lane:
    """A thread that runs jobs in the order of their keys."""

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
        """Waits for a job and runs it. A separate function, so that no variable holds the result while waiting."""
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
        """Calls the function in a thread, unless the future is cancelled before.

        Args:
            size: `work` of the function.
            compiles: True if the function compiles a grammar.
        """
        if compiles:
            return self._compiling.put(time.monotonic() + size * ALLOWANCE, function)
        if size <= SHORT:
            return self._short.put(0.0, function)
        return self._long.put(time.monotonic() + size * ALLOWANCE, function)


def work(prompts: Sequence[Any], choices: int) -> int:
    """The approximate cost of tokenising these prompts, with `choices` each, in characters."""
    return sum(_characters(prompt) for prompt in prompts) + len(prompts) * choices * PER_SEQUENCE


def _characters(prompt: Any) -> int:
    """Characters of a text or of all messages. A token id, which is only checked, counts as a quarter."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, Mapping):
        return sum(len(value) if isinstance(value, str) else PER_SEQUENCE for value in prompt.values())
    if prompt and isinstance(prompt[0], Mapping):
        template = getattr(prompt, "template", None)
        return sum(map(_characters, prompt)) + (len(json.dumps(template)) if template else 0)
    return len(prompt) // 4
