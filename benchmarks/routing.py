"""Workers with the engine's own prefix cache behind a router's policies, simulated over a log of requests.

A worker fills one prompt after the other at a fixed rate, without the tokens that its cache holds, and then decodes it
beside all others at a fixed pace. Pages are taken, kept and evicted by `specjax.engine.pages`, in the order of the
engine's scheduler.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import mean, quantiles
from typing import Any, NamedTuple

from specjax.engine.pages import Node, PageAllocator, PrefixCache, Text


class Request(NamedTuple):
    arrival: float  # seconds
    symbols: Sequence[Hashable]  # of the prompt, as the router compares them: characters, or blocks of a trace
    prompt: int  # tokens
    output: int  # tokens
    texts: list[Text]  # of the full pages of prompt and, where it is known, output
    page_size: int

    @property
    def reusable(self) -> int:
        """Pages of the prompt that a cache may give. The last token is always computed."""
        return min(len(self.texts), (self.prompt - 1) // self.page_size)

    @property
    def pages(self) -> int:
        return -(-(self.prompt + self.output) // self.page_size)


Policy = Callable[[Request, Sequence[int], float], int]
"""(request, requests in flight at each worker, time) -> index of a worker."""


def round_robin(workers: int) -> Policy:
    turn = count()
    return lambda request, loads, now: next(turn) % workers


def at_random(workers: int, seed: int = 0) -> Policy:
    draw = random.Random(seed)
    return lambda request, loads, now: draw.randrange(workers)


class _Place:
    """A node of the router's tree: one symbol."""

    __slots__ = ("children", "parent", "symbol", "tenants")

    def __init__(self, parent: _Place | None, symbol: Hashable) -> None:
        self.parent, self.symbol = parent, symbol
        self.children: dict[Hashable, _Place] = {}
        self.tenants: OrderedDict[int, None] = OrderedDict()  # the one that used it last at the end


class Tree:
    """Which worker was sent which beginnings: the tree of sglang-router's cache_aware policy, one node a symbol.

    Of several workers that were sent the longest known beginning it names the last one (theirs: any of them).
    """

    def __init__(self, workers: int) -> None:
        self._root = _Place(None, None)
        self._used: list[OrderedDict[_Place, None]] = [OrderedDict() for _ in range(workers)]  # least recently first

    def size(self, worker: int) -> int:
        """Symbols kept of a worker."""
        return len(self._used[worker])

    def match(self, symbols: Sequence[Hashable]) -> tuple[int, int | None]:
        """Symbols of the longest known beginning, and a worker that was sent it; None: there is no such."""
        place, length = self._root, 0
        for symbol in symbols:
            if (child := place.children.get(symbol)) is None:
                break
            place, length = child, length + 1
        if not place.tenants:
            return length, None
        worker = next(reversed(place.tenants))
        self._touch(place, worker)
        return length, worker

    def insert(self, symbols: Sequence[Hashable], worker: int) -> None:
        place = self._root
        for symbol in symbols:
            if (child := place.children.get(symbol)) is None:
                child = place.children[symbol] = _Place(place, symbol)
            place = child
        self._touch(place, worker)

    def evict(self, most: int) -> None:
        """Leaves `most` symbols of each worker, least recently used out first."""
        for worker, used in enumerate(self._used):
            while len(used) > most:
                place, _ = used.popitem(last=False)
                del place.tenants[worker]
                if not place.tenants and place.parent is not None:
                    del place.parent.children[place.symbol]

    def _touch(self, place: _Place | None, worker: int) -> None:
        used = self._used[worker]
        while place is not None and place.parent is not None:  # leaves before what is above, so that they go first
            place.tenants[worker] = None
            place.tenants.move_to_end(worker)
            used[place] = None
            used.move_to_end(place)
            place = place.parent


@dataclass
class CacheAware:
    """sglang-router's cache_aware policy, with the defaults of its 0.3.2 (`router_args.py`; the rules are those of
    sgl-project/sglang sgl-model-gateway/src/policies/cache_aware.rs at b93974f):

    - imbalanced, that is most - least > `balance_abs` and most > `balance_rel` * least: to the shortest queue;
    - else, if more than `threshold` of the prompt's symbols are a known beginning: to a worker that was sent it;
    - else to the shortest queue, the first of equal ones.

    Whatever is chosen, the tree notes it. Every `evict_every` seconds it keeps the last `most` symbols of each worker.
    """

    workers: int
    threshold: float = 0.3
    balance_abs: int = 64
    balance_rel: float = 1.5
    evict_every: float = 60.0
    most: int = 2**26
    imbalanced: int = 0  # times that the load decided
    tree: Tree = field(init=False)
    _evicted: float = 0.0

    def __post_init__(self) -> None:
        self.tree = Tree(self.workers)

    def __call__(self, request: Request, loads: Sequence[int], now: float) -> int:
        if now >= self._evicted + self.evict_every:
            self.tree.evict(self.most)
            self._evicted = now
        shortest = min(range(self.workers), key=lambda worker: loads[worker])
        chosen = shortest
        if max(loads) - min(loads) > self.balance_abs and max(loads) > self.balance_rel * min(loads):
            self.imbalanced += 1
        else:
            length, known = self.tree.match(request.symbols)
            if known is not None and length > self.threshold * len(request.symbols):
                chosen = known
        self.tree.insert(request.symbols, chosen)
        return chosen


@dataclass
class Job:
    request: Request
    arrival: float
    nodes: int = 0  # pages that the cache gave
    node: Node | None = None
    stored: int = 0  # the first so many pages are in the cache
    pages: list[int] = field(default_factory=list)  # those that the cache did not give
    own: set[int] = field(default_factory=set)  # of these, those that it has not got
    started: float = 0.0
    first_token: float = 0.0

    @property
    def cached(self) -> int:
        """Tokens of the prompt."""
        return self.nodes * self.request.page_size


@dataclass
class Worker:
    pages: int
    page_size: int
    prefill: float  # tokens/s
    step: float  # seconds of a token of the output

    def __post_init__(self) -> None:
        self.allocator = PageAllocator(self.pages)
        self.cache = PrefixCache(self.allocator, self.page_size)
        self.queue: deque[Job] = deque()
        self.filling: Job | None = None
        self.load = 0  # requests in flight
        self.computed = 0  # tokens of prompts

    def begin(self, now: float) -> Job | None:
        """The next prompt, if none is being filled and its pages are there; it is filled at its `first_token`."""
        if self.filling is not None or not self.queue:
            return None
        job = self.queue[0]
        request = job.request
        nodes = self.cache.match(None, request.texts[: request.reusable])
        need = request.pages - len(nodes)
        if self.allocator.free + self.cache.evictable - sum(not node.locks for node in nodes) < need:
            return None
        self.queue.popleft()
        job.nodes = job.stored = len(nodes)
        job.node = nodes[-1] if nodes else None
        self.cache.lock(job.node)
        if (missing := need - self.allocator.free) > 0:
            self.cache.evict(missing)
        pages = self.allocator.allocate(need)
        assert pages is not None
        computed = request.prompt - job.cached
        job.pages, job.own = pages, set(pages)
        job.started, job.first_token = now, now + computed / self.prefill
        self.computed += computed
        self.filling = job
        return job

    def filled(self, job: Job) -> None:
        self.filling = None
        self._store(job, job.request.prompt // self.page_size)

    def finish(self, job: Job) -> None:
        self._store(job, len(job.request.texts), leaves=True)
        self.cache.unlock(job.node)
        self.allocator.release(job.own)
        self.load -= 1

    def _store(self, job: Job, most: int, leaves: bool = False) -> None:
        """Gives the full pages up to `most` to the cache. A page whose text it holds stays the request's own; those
        after it are given when the request leaves, as in `specjax.engine.scheduler.Scheduler.store`."""
        for i in range(job.stored, most):
            text = job.request.texts[i]
            if not leaves and self.cache.holds(None, job.node, text):
                return
            page = job.pages[i - job.nodes]
            job.node, taken = self.cache.insert(None, job.node, text, page)
            if taken:
                job.own.remove(page)
            job.stored += 1


class Result(NamedTuple):
    jobs: list[Job]
    workers: list[Worker]

    def summary(self) -> dict[str, Any]:
        """Shares of the prompts' tokens, and seconds to the first token."""
        prompt, cached = (
            sum(values) for values in zip(*((j.request.prompt, j.cached) for j in self.jobs), strict=True)
        )
        waits = [job.first_token - job.arrival for job in self.jobs]
        computed = [worker.computed for worker in self.workers]
        tenths = quantiles(waits, n=10) if len(waits) > 1 else waits * 9
        return {
            "cached_share": round(cached / prompt, 4),
            "computed_tokens": prompt - cached,
            "busiest_over_mean": round(max(computed) / mean(computed), 3),
            "first_token_p50": round(tenths[4], 3),
            "first_token_p90": round(tenths[8], 3),
        }


def simulate(requests: Sequence[Request], workers: Sequence[Worker], policy: Policy, speed: float = 1.0) -> Result:
    """All requests, at `speed` times the log's pace. Raises ValueError if one needs more pages than a worker has."""
    most = max(request.pages for request in requests)
    if most > (least := min(worker.pages for worker in workers)):
        raise ValueError(f"a request needs {most} pages, but a worker has {least}")
    serial, jobs = count(), []
    events: list[tuple[float, int, str, Worker | None, Job]] = []

    def push(at: float, what: str, worker: Worker | None, job: Job) -> None:
        heapq.heappush(events, (at, next(serial), what, worker, job))

    for request in requests:
        jobs.append(Job(request, request.arrival / speed))
        push(jobs[-1].arrival, "arrival", None, jobs[-1])
    while events:
        now, _, what, worker, job = heapq.heappop(events)
        if worker is None:
            worker = workers[policy(job.request, [each.load for each in workers], now)]
            worker.queue.append(job)
            worker.load += 1
        elif what == "filled":
            worker.filled(job)
            push(now + job.request.output * worker.step, "finished", worker, job)
        else:
            worker.finish(job)
        if (begun := worker.begin(now)) is not None:
            push(begun.first_token, "filled", worker, begun)
    return Result(jobs, list(workers))


def most_reuse(requests: Sequence[Request]) -> float:
    """The share of the prompts' tokens that an endless cache holds, if each request ends before the next begins."""
    reused = total = 0
    identity: dict[tuple[int, Text], int] = {}  # (number of the beginning, next page) -> number of the longer one
    for request in requests:
        at, pages, going = 0, 0, True
        for i, text in enumerate(request.texts):
            key = at, text
            going = going and key in identity and i < request.reusable
            pages += going
            at = identity.setdefault(key, len(identity) + 1)
        reused += pages * request.page_size
        total += request.prompt
    return reused / total
