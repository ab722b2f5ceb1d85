"""Data parallelism: replicas of the engine in one process, each with its own devices and thread, behind one server.

`Replicas` has what the routes and the server use of a `Runner`. Each sequence of a request goes to one replica
(`Balance`), which never hands it on. If one replica's engine fails, all of them end, as a server of one engine does.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as List
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from specjax.cli.flags import ServerSettings
from specjax.engine import Engine
from specjax.engine.sequence import Sequence
from specjax.serve.delivery import Listener
from specjax.serve.errors import ENGINE_GONE, ENGINE_STUCK, State
from specjax.serve.runner import EngineStuck, Places, Runner, check_ids

KNOWN = 2**16
"""Pages of which `Balance` remembers the replicas."""


class Balance:
    """Chooses the replica of each sequence.

    The load of a replica is the number of its sequences that wait or run. Of the replicas whose load is at most
    ``least + 1 + least // 4`` the one is taken that has been given the longest beginning of the prompt before, in whole
    pages; of several the least loaded, and of these the one with the fewest sequences so far. So a conversation stays
    where its pages are, and no replica gets far ahead of the others.

    Worked example, two replicas, loads 4 and 2: at most 2 + 1 + 0 = 3 are allowed, so it is the second, whatever the
    first has of the prompt. With loads 3 and 2 both may be taken, and the prompt decides.
    """

    def __init__(self, count: int, page_size: int) -> None:
        self._size = page_size
        self._given = [0] * count
        self._known = OrderedDict[int, int]()  # hash of a beginning, in whole pages -> a bit for each replica

    def choose(self, prompt: List[int], salt: Hashable, loads: List[int]) -> int:
        """The replica for a prompt. `salt`: only prompts with equal ones share pages; `loads`: by replica."""
        pages = self._pages(prompt, salt)
        shared = [0] * len(loads)
        for depth, page in enumerate(pages, start=1):
            if not (bits := self._known.get(page, 0)):
                break
            shared = [depth if bits >> rank & 1 else pages for rank, pages in enumerate(shared)]
        least = min(loads)
        near = [rank for rank, load in enumerate(loads) if load <= least + 1 + least // 4]
        chosen = min(near, key=lambda rank: (-shared[rank], loads[rank], self._given[rank]))
        self._given[chosen] += 1
        for page in pages:
            self._known[page] = self._known.pop(page, 0) | 1 << chosen  # the last used comes last
        while len(self._known) > KNOWN:
            self._known.popitem(last=False)
        return chosen

    def _pages(self, prompt: List[int], salt: Hashable) -> list[int]:
        found, last = [], hash(salt)
        for start in range(0, len(prompt) - self._size + 1, self._size):
            found.append(last := hash((last, *prompt[start : start + self._size])))
        return found


class Replicas:
    """Call `start`, and wait for `state` to be READY.

    Args:
        make_engine: makes the engine of a replica, by number. Called in the replica's thread, for one at a time.
        count: of the replicas.
    """

    def __init__(
        self, make_engine: Callable[[int], Engine], settings: ServerSettings, count: int, *, warm_up: bool = True
    ) -> None:
        self._make_engine, self._loading = make_engine, threading.Lock()
        # One trace holds the steps of all, and the first replica's are counted.
        others = replace(settings, profile=None)
        self.ranks = [
            Runner(partial(self._made, rank), settings if rank == 0 else others, warm_up=warm_up)
            for rank in range(count)
        ]
        # Called after changes of `state`, from any thread.
        self.on_change: Callable[[], None] = lambda: None
        for rank, runner in enumerate(self.ranks):
            runner.name, runner.on_change = f"{runner.name}-dp{rank}", self._changed
        self._lock = threading.RLock()
        self._told: tuple[State, Any] = (State.LOADING, None)  # with which `on_change` was called last
        self._places = Places(lambda: self.unfinished, lambda: self.capacity)
        self.reserve = self._places.reserve
        self._balance: Balance | None = None

    def start(self) -> None:
        for rank in self.ranks:
            rank.start()

    def _made(self, rank: int) -> Engine:
        with self._loading:
            if (failure := self.failure) is not None:
                raise failure
            return self._make_engine(rank)

    @property
    def state(self) -> State:
        """READY once all are."""
        states = {rank.state for rank in self.ranks}
        return next((s for s in (State.FAILED, State.DRAINING, State.LOADING) if s in states), State.READY)

    @property
    def failure(self) -> BaseException | None:
        return next((rank.failure for rank in self.ranks if rank.failure is not None), None)

    @property
    def ready_at(self) -> float:
        return max(rank.ready_at for rank in self.ranks)

    @property
    def loaded(self) -> bool:
        return all(rank.loaded for rank in self.ranks)

    @property
    def engine(self) -> Engine:
        """The engine with the smallest pool: what it takes, all take. Read-only, and only once all are loaded."""
        return min((rank.engine for rank in self.ranks), key=lambda engine: engine.intake.pool_tokens)

    @property
    def paused(self) -> bool:
        return any(rank.paused for rank in self.ranks)

    @property
    def unfinished(self) -> int:
        """Sequences that are waiting or running."""
        return sum(rank.unfinished for rank in self.ranks)

    @property
    def pending(self) -> int:
        """Sequences that are being tokenised, waiting or running."""
        return self._places.taken

    @property
    def capacity(self) -> int:
        """Most sequences that may run or wait."""
        return sum(rank.capacity for rank in self.ranks)

    def submit(self, listener: Listener) -> None:
        """Queues a request's sequences, each at a replica. Raises an ApiError, a 400, if an id is in use."""
        with self._lock:
            check_ids(listener.sequences, (id for rank in self.ranks for id in rank.ids))
            chosen = self._chosen(listener.sequences)
            for number, rank in enumerate(self.ranks):
                if indices := [index for index, each in enumerate(chosen) if each == number]:
                    rank.submit(listener, indices)

    def _chosen(self, sequences: List[Sequence]) -> list[int]:
        """The replica of each sequence."""
        if self._balance is None:
            self._balance = Balance(len(self.ranks), self.engine.pool.page_size)
        loads, found = [rank.unfinished for rank in self.ranks], dict[Sequence, int]()
        for sequence in sequences:
            if sequence.leader is not None:  # it takes what that one has computed
                rank = found[sequence.leader]
            else:
                rank = self._balance.choose(sequence.prompt, sequence.salt_key, loads)
            loads[rank] += 1
            found[sequence] = rank
        return [found[sequence] for sequence in sequences]

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """Ends these, if they still run; their pages come back before the next step."""
        sequences = list(sequences)
        for rank in self.ranks:
            rank.abort(sequences)

    def abort_named(self, name: str | None) -> int:
        """As `Runner.abort_named`, at all replicas."""
        return sum(rank.abort_named(name) for rank in self.ranks)

    def drain(self) -> None:
        """No new requests."""
        for rank in self.ranks:
            rank.drain()

    def end_all(self, message: str, failure: BaseException | None = None) -> None:
        """As `Runner.end_all`, for all replicas."""
        for rank in self.ranks:
            rank.end_all(message, failure)

    def stop(self, timeout: float | None = None) -> bool:
        """Ends the threads after the current steps, and background compilation. True: all have ended."""
        for rank in self.ranks:
            rank.stop(0.0)  # all are told before one is waited for
        ended = [rank.stop(timeout) for rank in self.ranks]
        return all(ended)

    def _changed(self) -> None:
        with self._lock:
            now = self.state, self.failure
            if now == self._told:
                return
            self._told = now
        if (failure := now[1]) is not None:
            message = ENGINE_STUCK if isinstance(failure, EngineStuck) else ENGINE_GONE
            for rank in self.ranks:
                if rank.failure is None:
                    rank.end_all(message, failure)
        self.on_change()


Service: TypeAlias = Runner | Replicas
"""What the routes and the server drive: one engine, or several."""
