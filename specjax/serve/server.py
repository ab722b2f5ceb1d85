"""A process that serves: its socket, uvicorn, signals, and an end without loose ends.

bind -> listen, load behind (503 meanwhile) -> ready -> SIGTERM or Ctrl-C: drain -> exit 0
                                                        once more: exit at once
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from specjax.serve.runner import SHUT_DOWN, Runner, State

logger = logging.getLogger("specjax.serve")

SIGNALS = (signal.SIGINT, signal.SIGTERM)

FORCED_GRACE = 5.0
"""Seconds in which aborted requests may tell their clients, before connections are cut."""


class PortError(Exception):
    """The address cannot be listened on."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, made before anything slow begins.

    Raises:
        PortError: the port is taken, or the host is not one of this machine's addresses.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise PortError(f"--host {host} --port {port}: {error.strerror or error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        taken = error.errno == errno.EADDRINUSE
        hint = "; stop what listens there, or choose another --port (0 = any free one)" if taken else ""
        raise PortError(f"--host {host} --port {port}: {error.strerror}{hint}") from error
    return sock


def url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours: uvicorn would raise them again at the end, and the exit status would not be 0."""
        yield


class Server:
    """Serves an app until a signal comes, or until the engine fails."""

    def __init__(self, app: ASGIApp, runner: Runner, sock: socket.socket, *, shutdown_timeout: float) -> None:
        self._runner, self._sock, self._timeout = runner, sock, shutdown_timeout
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,  # the gate's lines have the request's id
            lifespan="off",
            # A client that does not read must not keep the process alive.
            timeout_graceful_shutdown=int(shutdown_timeout + FORCED_GRACE) + 1,
        )
        self._uvicorn = _Uvicorn(config)
        self._draining: asyncio.Task[None] | None = None

    def run(self) -> BaseException | None:
        """Blocks until the end. Returns what made the engine fail, if it did."""
        asyncio.run(self._serve())
        return self._runner.failure

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._signalled, number)

        def changed() -> None:
            loop.call_soon_threadsafe(self._changed)

        self._runner.on_change = changed
        self._runner.start()
        try:
            await self._uvicorn.serve(sockets=[self._sock])
        finally:
            self._runner.on_change = lambda: None
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _changed(self) -> None:
        if self._runner.state is State.FAILED:
            self._uvicorn.should_exit = True
        elif self._runner.state is State.READY:
            logger.info("The server is fired up and ready to roll! %s", url(self._sock))

    def _signalled(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._draining is not None:
            logger.warning("%s again: stopping at once", name)
            self._draining.cancel()
            self._uvicorn.force_exit = True
            return
        loaded = self._runner.state is State.READY
        running = self._runner.unfinished if loaded else 0
        logger.info("%s: shutting down", name)
        if running:
            logger.info("%d requests may go on for %g s; once more stops at once", running, self._timeout)
        self._runner.drain()
        self._uvicorn.should_exit = True
        self._draining = asyncio.ensure_future(self._drain(loaded))

    async def _drain(self, loaded: bool) -> None:
        """Running requests may finish; then they are ended, with an error that their clients see."""
        if not loaded:
            return
        deadline = asyncio.get_running_loop().time() + self._timeout
        while self._runner.unfinished and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        if self._runner.unfinished:
            logger.warning("%d requests did not finish in time", self._runner.unfinished)
            self._runner.abort_all(SHUT_DOWN)
