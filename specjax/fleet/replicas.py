"""Data parallelism: replicas of the engine in one process, each with its own devices and thread, behind one queue.

Each sequence of a request runs on one replica until it ends. If the engine of one replica fails, all replicas end, and
the server with them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from specjax.engine import Engine
from specjax.serve.delivery import Listener
from specjax.serve.errors import ENGINE_GONE, ENGINE_STUCK, State
from specjax.serve.runner import EngineStuck, Places, Runner, Service, check_ids
from specjax.serve.server_settings import ServerSettings


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
        self.ranks = [Runner(partial(self._load, rank), settings, warm_up=warm_up) for rank in range(count)]
        self.on_change = lambda: None
        for rank, runner in enumerate(self.ranks):
            runner.name, runner.on_change = f"{runner.name}-dp{rank}", self._changed
        self._lock = threading.RLock()
        self._last: tuple[State, BaseException | None] = (State.LOADING, None)  # at the last call of `on_change`
        self.places = Places(self)

    def _load(self, rank: int) -> Engine:
        with self._loading:
            if (failure := self.failure) is not None:
                raise failure
            return self._make_engine(rank)

    def submit(self, listener: Listener) -> None:
        """Queues each sequence at the replica with the fewest unfinished sequences."""
        with self._lock:
            check_ids(listener.sequences, (id for rank in self.ranks for id in rank.ids))
            loads, indices = [rank.unfinished for rank in self.ranks], [list[int]() for _ in self.ranks]
            for index in range(len(listener.sequences)):
                number = loads.index(min(loads))
                loads[number] += 1
                indices[number].append(index)
            for rank, some in zip(self.ranks, indices, strict=True):
                if some:
                    rank.submit(listener, some)

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
