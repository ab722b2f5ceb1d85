"""Data parallelism: replicas of the engine in one process, each with its own devices and thread, behind one queue.

Each sequence of a request runs on one replica, which `Balance` chooses, until it ends. If the engine of one replica
fails, all replicas end, and the server with them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from collections.abc import Sequence as List
from dataclasses import replace
from functools import partial

from specjax.engine import Engine
from specjax.engine.sequence import Sequence
from specjax.serve.delivery import Listener
from specjax.serve.errors import ENGINE_GONE, ENGINE_STUCK, State
from specjax.serve.runner import EngineStuck, Places, Runner, Service, check_ids
from specjax.serve.server_settings import ServerSettings

MAX_PAGES = 2**16
"""Number of pages whose replicas `Balance` remembers."""


class Balance:
    """Chooses the replica of each sequence.

    The load of a replica is the number of its sequences that wait or run. Replicas with a load of at most
    ``lowest + 1 + lowest // 4`` are candidates. The candidate that has received the longest prefix of the prompt, in
    whole pages, is chosen; among equals the least loaded, then the one with the fewest sequences so far.

    Worked example with two replicas: loads 4 and 2 allow at most 2 + 1 + 0 = 3, so the second replica is chosen for any
    prompt. With loads 3 and 2 both are candidates, and the prompt decides.
    """

    def __init__(self, count: int, page_size: int) -> None:
        self._size = page_size
        self._chosen = [0] * count  # sequences so far, by replica
        self._ranks = OrderedDict[int, int]()  # hash of a prefix, in whole pages -> a bit for each replica

    def choose(self, prompt: List[int], salt: Hashable, loads: List[int]) -> int:
        """The replica for a prompt. Only prompts with equal `salt` share pages. `loads`: by replica."""
        pages = self._pages(prompt, salt)
        shared = [0] * len(loads)
        for depth, page in enumerate(pages, start=1):
            if not (bits := self._ranks.get(page, 0)):
                break
            shared = [depth if bits >> rank & 1 else pages for rank, pages in enumerate(shared)]
        lowest = min(loads)
        candidates = [rank for rank, load in enumerate(loads) if load <= lowest + 1 + lowest // 4]
        chosen = min(candidates, key=lambda rank: (-shared[rank], loads[rank], self._chosen[rank]))
        self._chosen[chosen] += 1
        for page in pages:
            self._ranks[page] = self._ranks.pop(page, 0) | 1 << chosen  # the most recently used page is last
        while len(self._ranks) > MAX_PAGES:
            self._ranks.popitem(last=False)
        return chosen

    def _pages(self, prompt: List[int], salt: Hashable) -> list[int]:
        hashes, last = [], hash(salt)
        for start in range(0, len(prompt) - self._size + 1, self._size):
            hashes.append(last := hash((last, *prompt[start : start + self._size])))
        return hashes


class Replicas(Service):
    """The service of several engines.

    Args:
        make_engine: makes the engine of a replica, by number. Called in the replica's thread, one replica at a time.
        count: number of replicas.
    """

    def __init__(
        self, make_engine: Callable[[int], Engine], settings: ServerSettings, count: int, *, warm_up: bool = True
    ) -> None:
        self._make_engine, self._loading = make_engine, threading.Lock()
        # One trace holds the steps of all replicas; the first replica counts them.
        others = replace(settings, profile=None)
        self._runners = [
            Runner(partial(self._load, rank), settings if rank == 0 else others, warm_up=warm_up)
            for rank in range(count)
        ]
        self.on_change = lambda: None
        for rank, runner in enumerate(self._runners):
            runner.name, runner.on_change = f"{runner.name}-dp{rank}", self._changed
        self._lock = threading.RLock()
        self._last: tuple[State, BaseException | None] = (State.LOADING, None)  # at the last call of `on_change`
        self.places = Places(self)
        self._balance: Balance | None = None

    def _load(self, rank: int) -> Engine:
        with self._loading:
            if (failure := self.failure) is not None:
                raise failure
            return self._make_engine(rank)

    @property
    def ranks(self) -> list[Runner]:
        return self._runners

    def submit(self, listener: Listener) -> None:
        with self._lock:
            check_ids(listener.sequences, (id for rank in self.ranks for id in rank.ids))
            chosen = self._choose(listener.sequences)
            for number, rank in enumerate(self.ranks):
                if indices := [index for index, choice in enumerate(chosen) if choice == number]:
                    rank.submit(listener, indices)

    def _choose(self, sequences: List[Sequence]) -> list[int]:
        """The replica of each sequence."""
        if self._balance is None:
            self._balance = Balance(len(self.ranks), self.engine.pool.page_size)
        loads, chosen = [rank.unfinished for rank in self.ranks], dict[Sequence, int]()
        for sequence in sequences:
            if sequence.leader is not None:  # it reuses the leader's results
                rank = chosen[sequence.leader]
            else:
                rank = self._balance.choose(sequence.prompt, sequence.salt_key, loads)
            loads[rank] += 1
            chosen[sequence] = rank
        return [chosen[sequence] for sequence in sequences]

    def _changed(self) -> None:
        with self._lock:
            now = self.state, self.failure
            if now == self._last:
                return
            self._last = now
        if (failure := now[1]) is not None:
            message = ENGINE_STUCK if isinstance(failure, EngineStuck) else ENGINE_GONE
            for rank in self.ranks:
                if rank.failure is None:
                    rank.end_all(message, failure)
        self.on_change()
