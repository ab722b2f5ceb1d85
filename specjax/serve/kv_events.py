"""Events of the prefix cache over ZeroMQ, in the format that vLLM and SGLang publish and that llm-d and Dynamo read.

A message has three frames: topic, sequence number (8 bytes, big-endian), and a batch in MessagePack:

    [time, [event, ...], rank]                                       rank: number of the replica (--dp)
    ["BlockStored", hashes, parent hash, tokens, page size, None, "GPU", None, extra keys]
    ["BlockRemoved", hashes, "GPU"]
    ["AllBlocksCleared"]

The None are a LoRA adapter's number and name. `extra keys` is None, or has an item for each block: `[cache_salt]` for
the first block of a salted text, else None. Each block is a page. `tokens` are those of all blocks of the event, and
`parent hash` is that of the page before the first, None at the start of a text.

The engine's thread only queues what happened; hashes and messages are made in a thread of their own. If that falls
behind by `max_queue_size` events, they are dropped and AllBlocksCleared is sent: readers then know too little of the
cache, never too much.

Source: vllm/distributed/kv_events.py and sglang/srt/disaggregation/kv_events.py.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import Any, Literal

from specjax.engine.pages import Node, Text
from specjax.limits import check, limited, shown

logger = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)  # the sequence number after the last message of a replay
MEDIUM = "GPU"  # vLLM's word for the pool that attention reads, on whichever device
POLL_SECONDS = 0.1  # until a replay is answered
MOST = 4096  # changes in a batch


@dataclass(frozen=True)
class KvEventsConfig:
    """Names, meanings and defaults are those of vLLM's and SGLang's class.

    Attributes:
        publisher: zmq, or null for none.
        endpoint: PUB socket. Bound if it has `*` or `::`, or is ipc or inproc; else connected to.
        replay_endpoint: ROUTER socket, bound. A request of 8 bytes, big-endian, is answered by all batches that are
            kept from that number on.
        buffer_steps: batches that are kept for it.
        hwm: batches that wait for a slow reader; further ones are not sent to it.
        max_queue_size: events that wait to be published.
        topic: first frame of each message; llm-d reads `kv@POD@MODEL`.

    Raises:
        TypeError, ValueError: a value has another type, or is out of range.
    """

    publisher: Literal["null", "zmq"] = "null"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = limited(10_000, 1)
    hwm: int = limited(100_000, 0)
    max_queue_size: int = limited(100_000, 1)
    topic: str = ""

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def from_json(cls, text: str) -> KvEventsConfig:
        """Of a JSON object. `enable_kv_cache_events` is vLLM's switch: true stands for zmq where no publisher is named,
        false for null. Raises ValueError for text that is no such object."""
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ValueError(f"must be a JSON object, got {shown(text)} ({error})") from None
        names = {each.name for each in fields(cls)}
        if not isinstance(given, dict):
            raise ValueError(f"must be a JSON object, got {shown(text)}")
        enabled = given.pop("enable_kv_cache_events", None)
        if enabled is not None and type(enabled) is not bool:
            raise ValueError(f"enable_kv_cache_events must be true or false, got {shown(enabled)}")
        if unknown := sorted(set(given) - names):
            raise ValueError(f"has no {', '.join(unknown)}; there are {', '.join(sorted(names))}")
        if given.get("publisher") is None:
            given["publisher"] = "zmq" if enabled else "null"
        if enabled is False:
            given["publisher"] = "null"
        try:
            return cls(**given)
        except TypeError as error:
            raise ValueError(str(error)) from None


def block_hash(parent: int | None, text: Text, salt: str | None) -> int:
    """63 bits of the SHA-256 of a page and all before it; the same in every process.

    Args:
        parent: of the page before; None at the start of a text.
        text: the page's tokens.
        salt: `cache_salt`, which counts at the start of a text only.
    """
    start = b"" if salt is None else b"salt" + hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()
    before = start if parent is None else parent.to_bytes(8, "big")
    digest = hashlib.sha256(before + struct.pack(f"<{len(text)}i", *text)).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class Lost:
    """Takes the place of changes that were dropped."""


LOST = Lost()


@dataclass(frozen=True, eq=False)
class Stored:
    node: Node
    parent: Node | None  # None: the text starts here
    text: Text
    salt: str | None


Change = Stored | Node | Lost | None  # a page that came, a page that went, dropped changes, or the cache was cleared


class Translator:
    """Turns changes of the cache into events."""

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._hashes: dict[Node, int] = {}  # of the pages that readers know

    def events(self, changes: list[Change]) -> list[list[Any]]:
        """In order; pages of one text that follow one another make one event."""
        found: list[list[Any]] = []
        for change in changes:
            if isinstance(change, Stored):
                self._store(change, found)
            elif isinstance(change, Node):
                self._remove(change, found)
            else:
                if change is LOST:
                    logger.warning("Events of the prefix cache were dropped; readers are told that it was cleared")
                self._hashes.clear()
                found.append(["AllBlocksCleared"])
        return found

    def _store(self, change: Stored, found: list[list[Any]]) -> None:
        parent = None
        if change.parent is not None and (parent := self._hashes.get(change.parent)) is None:
            return  # readers do not know the page before it, since events were dropped
        own = self._hashes[change.node] = block_hash(parent, change.text, change.salt)
        tokens = [int(token) for token in change.text]
        last: list[Any] = found[-1] if found else [""]
        if parent is not None and last[0] == "BlockStored" and last[1][-1] == parent:
            last[1].append(own)
            last[3].extend(tokens)
            if last[8] is not None:
                last[8].append(None)
            return
        salt = change.salt if parent is None else None
        keys = None if salt is None else [[salt.encode("utf-8", "replace").decode()]]
        found.append(["BlockStored", [own], parent, tokens, self._size, None, MEDIUM, None, keys])

    def _remove(self, node: Node, found: list[list[Any]]) -> None:
        if (own := self._hashes.pop(node, None)) is None:
            return
        if found and found[-1][0] == "BlockRemoved":
            found[-1][1].append(own)
        else:
            found.append(["BlockRemoved", [own], MEDIUM])


def libraries() -> tuple[Any, Any]:
    """The module zmq and msgpack's `packb`. Raises ValueError if they are not installed."""
    try:
        return importlib.import_module("zmq"), importlib.import_module("msgpack").packb
    except ImportError as error:
        raise ValueError(f"events need pyzmq and msgpack ({error}): pip install 'specjax[kv-events]'") from None


def binds(endpoint: str) -> bool:
    """Whether a publisher listens on this address; it connects to others."""
    return any(part in endpoint for part in ("*", "::")) or endpoint.startswith(("ipc://", "inproc://"))


def check_endpoints(config: KvEventsConfig, count: int) -> None:
    """Raises ValueError if an address of the publishers of `count` replicas has a wrong form. Opens no socket: whether
    an address is free is seen when the server starts."""
    for name in ("endpoint", "replay_endpoint"):
        if given := getattr(config, name):
            for rank in range(count):
                address = address_of(given, rank)
                if problem := _problem(address, listens=name == "replay_endpoint" or binds(address)):
                    of = f", the address of replica {rank} of {given}" if rank else ""
                    raise ValueError(f"{name} must be {problem}, got {shown(address)}{of}")


def _problem(address: str, *, listens: bool) -> str:
    """What an address should be; empty: it is that."""
    transport, _, rest = address.partition("://")
    if not rest or transport not in ("tcp", "ipc", "inproc"):
        return "tcp://HOST:PORT, ipc://PATH or inproc://NAME"
    if transport != "tcp":
        return ""
    host, _, port = rest.rpartition(":")
    free = listens and port == "*"
    is_right = host and (free or (port.isdecimal() and int(port) < 2**16))
    return "" if is_right else "tcp://HOST:PORT, with a port from 0 to 65535"


def address_of(endpoint: str, rank: int) -> str:
    """The address of a replica's socket, as vLLM and SGLang have it: the port of a tcp address plus the rank, other
    addresses with `_dp` and the rank. That of rank 0 is as it was given."""
    if not rank:
        return endpoint
    base, _, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp://") and port.isdecimal():
        return f"{base}:{int(port) + rank}"
    return f"{endpoint}_dp{rank}"


class Publisher(threading.Thread):
    """Publishes what a prefix cache tells it (`specjax.engine.pages.Observer`).

    Args:
        rank: the number of the replica whose cache it is; `address_of` gives its sockets' addresses.

    Raises:
        ValueError: an address cannot be used, or pyzmq is not installed.
    """

    def __init__(self, config: KvEventsConfig, rank: int = 0) -> None:
        super().__init__(name="specjax-kv-events", daemon=True)
        self._rank = rank
        self._zmq, self._pack = libraries()
        self._topic, self._most = config.topic.encode(), config.max_queue_size
        self._queue: deque[Change] = deque()
        self._ready, self._closing = threading.Event(), False
        self._sequence = 0
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = self._zmq.Context()
        self._replay: Any = None
        try:
            endpoint = address_of(config.endpoint, rank)
            self._events = self._socket(self._zmq.PUB, endpoint, config.hwm, listens=binds(endpoint))
            if config.replay_endpoint:
                replay = address_of(config.replay_endpoint, rank)
                self._replay = self._socket(self._zmq.ROUTER, replay, 0, listens=True)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._translator: Translator | None = None

    def _socket(self, kind: int, endpoint: str, hwm: int, *, listens: bool) -> Any:
        socket = self._context.socket(kind)
        socket.set_hwm(hwm)
        try:
            (socket.bind if listens else socket.connect)(endpoint)
        except self._zmq.ZMQError as error:
            verb = "listen on" if listens else "connect to"
            raise ValueError(f"cannot {verb} {endpoint}: {error}") from None
        return socket

    def begin(self, page_size: int) -> None:
        """Starts the thread."""
        self._translator = Translator(page_size)
        self.start()

    def close(self, timeout: float = 2.0) -> None:
        """Publishes what is queued, and closes the sockets."""
        self._closing = True
        self._ready.set()
        if self.ident is not None:
            self.join(timeout)
        else:
            self._context.destroy(linger=0)

    # In the engine's thread.

    def stored(self, node: Node, parent: Node | None, text: Text, salt: Hashable) -> None:
        assert isinstance(salt, tuple)
        cache_salt, word = salt  # `Sequence.salt_key`
        if cache_salt is None and word:
            return  # `EngineConfig.isolate_ngrams`: no other request can use the page
        self._push(Stored(node, parent, text, cache_salt))

    def removed(self, node: Node) -> None:
        self._push(node)

    def cleared(self) -> None:
        self._push(None)

    def _push(self, change: Change) -> None:
        if len(self._queue) >= self._most:
            self._queue.clear()
            self._queue.append(LOST)
        self._queue.append(change)
        self._ready.set()

    # In this thread.

    def run(self) -> None:
        try:
            while not (self._closing and not self._queue):
                self._ready.wait(POLL_SECONDS if self._replay is not None else None)
                self._ready.clear()
                try:
                    while changes := self._take():
                        self._publish(changes)
                    if self._replay is not None:
                        self._answer()
                except self._zmq.ZMQError:
                    logger.exception("Events of the prefix cache could not be sent")
        finally:
            self._context.destroy(linger=1000)

    def _take(self) -> list[Change]:
        found: list[Change] = []
        while len(found) < MOST:
            try:
                found.append(self._queue.popleft())
            except IndexError:
                break
        return found

    def _publish(self, changes: list[Change]) -> None:
        assert self._translator is not None
        if not (events := self._translator.events(changes)):
            return
        number, batch = self._sequence.to_bytes(8, "big"), self._pack([time.time(), events, self._rank])
        self._sequence += 1
        self._kept.append((number, batch))
        self._events.send_multipart((self._topic, number, batch))

    def _answer(self) -> None:
        """Answers the requests for a replay that have come."""
        while self._replay.poll(0):
            frames = self._replay.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                logger.warning("A request for a replay of events must be 8 bytes, got %s", shown(frames[1:]))
                continue
            client, first = frames[0], frames[2]  # bytes of equal length and big-endian: ordered as numbers are
            for number, batch in self._kept:
                if number >= first:
                    self._replay.send_multipart((client, b"", number, batch))
            self._replay.send_multipart((client, b"", END, b""))
