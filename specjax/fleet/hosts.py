"""Processes, on one or several hosts, that share one model: how they find each other, and end together.

Rank 0 leads: it alone serves requests, and sends the others the programs to launch (`specjax.fleet.following`). JAX
connects the devices (`jax.distributed`, at HOST:PORT). Messages go over a separate TCP connection to each follower (at
HOST:PORT + 1): a program with collectives cannot be interrupted, so a process that waits in one needs another way to
detect that a peer has died. A frame is two big-endian lengths, a JSON object and the bytes of an array; no frame can
make the receiver run code.

A process that loses its peer, or receives no bytes for `SILENCE` seconds, ends with status 1: JAX cannot continue
without the peer, and JAX's own heartbeat takes minutes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import select
import signal
import socket
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

logger = logging.getLogger(__name__)

SILENCE = 20.0
"""Seconds without bytes after which a peer counts as lost: its host has lost power or network. The death of a process
closes the connection, which is detected at once."""
ALIVE = 1.0  # seconds between two heartbeats
JOIN = 300.0  # seconds in which all processes must have started
NEVER = 30 * 24 * 3600  # seconds: JAX's heartbeat aborts processes that were suspended for as long
FAREWELL = 2.0  # seconds for followers to end after the leader
_LENGTHS = struct.Struct("!II")
_MAX_LENGTHS = (1 << 20, 1 << 30)  # bytes of a frame's object and of its array


class Address(NamedTuple):
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Reads HOST:PORT, with an IPv6 address in brackets. Raises ValueError."""
        host, colon, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            host = ""
        if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65535):
            raise ValueError(
                f"{text!r:.100} is not HOST:PORT, with a port from 1 to 65534, such as 10.0.0.1:5000 or [fd00::1]:5000"
            )
        return cls(host, int(port))

    @property
    def next(self) -> Address:
        """The leader's address for messages."""
        return self._replace(port=self.port + 1)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Place(NamedTuple):
    """A process in a group."""

    address: Address  # of rank 0, the same for all
    nodes: int
    rank: int


class Message(NamedTuple):
    kind: str
    fields: Mapping[str, Any]
    array: np.ndarray | None


class _Connection:
    """A connection to a peer. Its thread calls `received` with messages, and `lost` with the reason of the end."""

    def __init__(
        self, sock: socket.socket, received: Callable[[Message], None], lost: Callable[[str], None],
        first: float | None = None,
    ) -> None:  # fmt: skip
        """`first`: maximum number of seconds before the first bytes; None: `SILENCE`, as after them."""
        self._sock, self._received, self._lost, self._first = sock, received, lost, first
        self._sending, self.closed = threading.Lock(), threading.Event()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        sock.settimeout(SILENCE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self) -> None:
        for work in (self._read, self._live):
            threading.Thread(target=work, name="specjax-hosts", daemon=True).start()

    def send(self, kind: str, array: np.ndarray | None = None, **fields: Any) -> None:
        """Sends a message. Calls `lost` instead of raising an exception."""
        if array is not None:
            fields |= {"dtype": array.dtype.str, "shape": array.shape}
        header, body = json.dumps({"kind": kind, **fields}).encode(), b"" if array is None else array.tobytes()
        try:
            with self._sending:
                self._sock.sendall(_LENGTHS.pack(len(header), len(body)) + header + body)
        except OSError as error:
            if not self.closed.is_set():
                self._lost(str(error))

    def receive(self) -> Message:
        """The next message. Raises OSError if the peer is lost, ValueError for bytes of another protocol."""
        sizes = _LENGTHS.unpack(self._bytes(_LENGTHS.size))
        if any(size > most for size, most in zip(sizes, _MAX_LENGTHS, strict=True)):
            raise ValueError("a frame that is too long")
        header, body = (self._bytes(size) for size in sizes)
        fields = json.loads(header)
        kind, dtype, shape = fields.pop("kind"), fields.pop("dtype", None), fields.pop("shape", None)
        return Message(kind, fields, None if dtype is None else np.frombuffer(body, dtype).reshape(shape))

    def close(self) -> None:
        """Closes the connection, without a call of `lost`."""
        self.closed.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
        self._sock.close()

    def _bytes(self, count: int) -> bytes:
        data, quiet = bytearray(), 0.0
        while len(data) < count:
            while not self._poll.poll(1e3 * ALIVE):
                quiet += ALIVE  # excludes time in which this process was suspended
                if quiet > (limit := SILENCE if self._first is None else self._first):
                    raise TimeoutError(f"no sign of life for {limit:g} s")
            if not (part := self._sock.recv(min(count - len(data), 1 << 20))):
                raise ConnectionError("the connection was closed")
            self._first = None
            data += part
        return bytes(data)

    def _read(self) -> None:
        while True:
            try:
                message = self.receive()
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                if not self.closed.is_set():
                    self.closed.set()
                    self._lost(str(error))
                return
            if message.kind != "alive":
                self._received(message)

    def _live(self) -> None:
        while not self.closed.wait(ALIVE):
            self.send("alive")


class Group(ABC):
    """The processes that share a model, from the view of this process. See `Leader` and `Follower`.

    Attributes:
        place: the place of this process.
        settings: settings that all processes must share, by name; compared when they join, before models are loaded.
    """

    def __init__(self, place: Place, settings: Mapping[str, str] = MappingProxyType({})) -> None:
        self.place, self.settings = place, settings
        self._connections: dict[int, _Connection] = {}  # by rank
        self._ending, self._leaving = threading.Lock(), False

    def _connect_devices(self) -> None:
        """Connects JAX to the devices of all processes. JAX's backend must not have started."""
        jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM instead of the server
        if jax.config.values["jax_cpu_collectives_implementation"] is None:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address, nodes, rank = self.place
        jax.distributed.initialize(
            str(address), num_processes=nodes, process_id=rank, initialization_timeout=int(JOIN),
            coordinator_bind_address=str(address), cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=NEVER, shutdown_timeout_seconds=int(JOIN),
        )  # fmt: skip

    def end(self, message: str) -> NoReturn:
        """Logs the message, sends it to the other processes, and ends this process with status 1. Thread-safe."""
        with self._ending:
            if self._leaving:
                threading.Event().wait()  # another thread ends the process
            self._leaving = True
            logger.error("%s; all processes of the group end", message)
            for connection in self._connections.values():
                connection.send("failed", message=message)
            sys.stderr.flush()
            os._exit(1)

    def fail(self, message: str) -> NoReturn:
        """Calls `end` after a delay, in which the loss of a peer may be detected, which is then the cause."""
        time.sleep(ALIVE)
        self.end(message)

    def _lost(self, rank: int, reason: str) -> None:
        if not self._leaving:
            self.end(f"Node rank {rank} of {self.place.nodes} is gone: {reason}")

    @abstractmethod
    def join(self) -> None:
        """Connects to the other processes and to JAX's devices. Raises TimeoutError."""

    @abstractmethod
    def agree(self, facts: Mapping[str, str], number: int) -> int:
        """The minimum of the processes' numbers. Ends all processes if the facts of one differ from the leader's."""


def _differences(leader: Mapping[str, str], other: Mapping[str, str]) -> str:
    """The differing facts of the leader and another process, with both values; empty if there are none."""
    names = [name for name in (*leader, *(other.keys() - leader.keys())) if leader.get(name) != other.get(name)]
    return "; ".join(f"{name} {other.get(name)} there, {leader.get(name)} on the leader" for name in names)


class Leader(Group):
    """Rank 0. Raises OSError if it cannot listen at its address."""

    def __init__(self, place: Place, settings: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(place, settings)
        host, port = place.address.next
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._sock = socket.create_server(address[:2], family=family, backlog=place.nodes)
        # By rank: messages for `agree`, then digests, in the order of the leader's calls.
        self._unread = {rank: queue.SimpleQueue[Message]() for rank in range(1, place.nodes)}

    def join(self) -> None:
        """Waits for all followers, and connects JAX's devices. Raises TimeoutError."""
        until = time.monotonic() + JOIN
        logger.info("Waiting for %d followers at %s", self.place.nodes - 1, self.place.address.next)
        with self._sock:
            while missing := sorted(set(self._unread) - set(self._connections)):
                self._sock.settimeout(max(until - time.monotonic(), 0.01))
                try:
                    sock, (host, *_) = self._sock.accept()
                except TimeoutError:
                    ranks = ", ".join(map(str, missing))
                    raise TimeoutError(f"--node-rank {ranks} did not join within {JOIN:g} s") from None
                self._welcome(sock, host)
        self._connect_devices()

    def _welcome(self, sock: socket.socket, host: str) -> None:
        rank = 0
        connection = _Connection(
            sock, lambda message: self._received(rank, message), lambda reason: self._lost(rank, reason)
        )
        try:
            hello = connection.receive()
            if hello.kind != "hello":
                raise ValueError(hello.kind)
            rank, count = int(hello.fields["rank"]), int(hello.fields["count"])
            different = _differences(self.settings, hello.fields["settings"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("A connection from %s, which is not a follower, was closed: %s", host, error)
            connection.close()
            return
        problem = None
        if count != self.place.nodes:
            problem = f"node rank {rank} was started with --nnodes {count}, the leader with {self.place.nodes}"
        elif rank not in self._unread or rank in self._connections:
            problem = f"two processes were started with --node-rank {rank}"
        elif different:
            problem = f"node rank {rank} was started with other settings than the leader: {different}"
        self._connections[rank if problem is None else -1] = connection
        if problem is not None:
            self.end(problem)
        logger.info("Node rank %d joined from %s", rank, host)
        connection.start()

    def _received(self, rank: int, message: Message) -> None:
        if message.kind == "failed":
            self.end(f"Node rank {rank} failed: {message.fields['message']}")
        if message.kind == "stop":  # the follower received a signal
            logger.info("Node rank %d received a signal to stop", rank)
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self._unread[rank].put(message)

    def _next_fields(self) -> dict[int, Mapping[str, Any]]:
        """Waits for the next message of each follower."""
        return {rank: messages.get().fields for rank, messages in self._unread.items()}

    def send(self, kind: str, array: np.ndarray | None = None, **fields: Any) -> None:
        """Sends a message to all followers. They receive messages that are sent under one lock in order."""
        for connection in self._connections.values():
            connection.send(kind, array, **fields)

    def agree(self, facts: Mapping[str, str], number: int) -> int:
        others = self._next_fields()
        for rank, fields in others.items():
            if different := _differences(facts, fields["facts"]):
                self.end(f"Node rank {rank} differs from the leader: {different}")
        least = min(number, *(fields["number"] for fields in others.values()))
        self.send("agree", number=least)
        return least

    def compare(self, digest: str, what: str) -> None:
        """Waits for the next digest of each follower. Ends the group if one differs; `what` names the program in the
        message. Call from one thread at a time."""
        for rank, fields in self._next_fields().items():
            if (other := fields["digest"]) != digest:
                self.end(
                    f"Node rank {rank} has diverged: {what} gave other tokens there (digest {other}) than on the "
                    f"leader ({digest})"
                )

    def stop(self, status: int, reason: str = "") -> None:
        """Ends the followers with this status, and waits up to `FAREWELL` seconds. End this process afterwards. The
        `reason` of a failure is for the followers' logs."""
        with self._ending:
            self._leaving = True
        self.send("stop", status=status, reason=reason)
        until = time.monotonic() + FAREWELL
        for connection in self._connections.values():
            connection.closed.wait(max(until - time.monotonic(), 0))


class Follower(Group):
    """Rank 1 or higher."""

    def __init__(self, place: Place, settings: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(place, settings)
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def join(self) -> None:
        """Connects to the leader, which may start later, and JAX's devices. Raises TimeoutError."""
        until = time.monotonic() + JOIN
        address = self.place.address.next
        logger.info("Node rank %d joins the leader at %s", self.place.rank, address)
        while True:
            try:
                sock = socket.create_connection(address, timeout=5.0)
                break
            except OSError as error:
                if time.monotonic() > until:
                    raise TimeoutError(f"no leader at {address} within {JOIN:g} s: {error}") from None
                time.sleep(0.2)
        # The leader may prepare its GPU between listening and accepting.
        connection = _Connection(sock, self._received, lambda reason: self._lost(0, reason), first=JOIN)
        self._connections[0] = connection
        connection.send("hello", rank=self.place.rank, count=self.place.nodes, settings=dict(self.settings))
        connection.start()
        self._connect_devices()

    def _received(self, message: Message) -> None:
        if message.kind == "failed":
            self._leaving = True
            self._exit(1, "The leader has ended the group: %s", message.fields["message"])
        if message.kind == "stop":
            self._leaving = True
            status = int(message.fields["status"])
            failed = f": it failed: {message.fields['reason']}" if status else ""
            self._exit(status, "The leader has ended the group%s", failed)
        self._messages.put(message)

    def _exit(self, status: int, text: str, *values: Any) -> NoReturn:
        logger.log(logging.ERROR if status else logging.INFO, text, *values)
        sys.stderr.flush()
        os._exit(status)

    def receive(self) -> Message:
        """Waits for the next message of the leader's engine."""
        return self._messages.get()

    def report(self, digest: str) -> None:
        """Sends the digest of the next launched program."""
        self._connections[0].send("digest", digest=digest)

    def ask_to_stop(self) -> None:
        """Asks the leader to end the group, as after a signal to the leader. Before the leader is found, ends this
        process with status 0."""
        if not self._connections:
            self._leaving = True
            self._exit(0, "Node rank %d had not found its leader", self.place.rank)
        self._connections[0].send("stop")

    def agree(self, facts: Mapping[str, str], number: int) -> int:
        self._connections[0].send("agree", facts=dict(facts), number=number)
        return int(self.receive().fields["number"])
