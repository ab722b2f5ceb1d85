"""The server process: its socket, uvicorn, signals, and the shutdown.

bind -> listen, load in the background (503 meanwhile) -> ready -> SIGTERM or Ctrl-C: drain (503 meanwhile) -> exit 0
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

try:
    import resource
except ImportError:  # Windows
    resource = None

import uvicorn
from starlette.types import ASGIApp

from specjax.cli.flags import ServerSettings
from specjax.serve.connection import connection_class, is_answering
from specjax.serve.runner import SHUT_DOWN, Runner, State

logger = logging.getLogger("specjax.serve")

SIGNALS = (signal.SIGINT, signal.SIGTERM)

FORCED_GRACE = 5.0
"""Seconds for the last answers of aborted requests, before connections are cut."""

ENGINE_GRACE = 1.0
"""Seconds for the engine to abort its requests, before they are aborted without it."""

OTHER_FILES = 256
"""Open files of a server beside its connections."""


class PortError(Exception):
    """The server cannot listen on this address."""


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Called before anything slow begins.

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


def allow_files(connections: int) -> None:
    """Raises this process's limit of open files, as far as allowed, for so many connections."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # it is the user's limit, and a server with a lower one works
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to `Server`: uvicorn would raise them again at the end, and the exit status would not be 0."""
        yield


class Server:
    """Serves an app until a signal comes, or until the engine fails."""

    def __init__(self, app: ASGIApp, runner: Runner, sock: socket.socket, settings: ServerSettings) -> None:
        self._runner, self._sock, self._timeout = runner, sock, settings.shutdown_timeout
        config = uvicorn.Config(
            app,
            http=connection_class(settings),
            ws="none",
            log_config=None,
            access_log=False,  # the middleware's lines have the request's id
            lifespan="off",
            # A client that does not read must not keep the process alive.
            timeout_graceful_shutdown=int(settings.shutdown_timeout + FORCED_GRACE) + 1,
        )
        self._uvicorn = _Uvicorn(config)
        self._draining: asyncio.Task[None] | None = None

    def run(self) -> BaseException | None:
        """Blocks until the end. Returns the error of an engine that failed."""
        asyncio.run(self._serve())
        return self._runner.failure

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._signalled, number)

        def changed() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and so does the process
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
        if self._runner.failure is not None:
            self._exit(FORCED_GRACE)
        elif self._runner.state is State.READY:
            logger.info("The server is fired up and ready to roll! %s", url(self._sock))

    def _signalled(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._draining is not None:
            logger.warning("%s again: stopping at once", name)
            self._draining.cancel()
            self._uvicorn.force_exit = self._uvicorn.should_exit = True
            return
        loaded = self._runner.state is State.READY
        running = self._runner.unfinished if loaded else 0
        logger.info("%s: shutting down", name)
        if running:
            logger.info("%d requests may go on for %g s; once more stops at once", running, self._timeout)
        self._runner.drain()
        self._draining = asyncio.ensure_future(self._drain(loaded))

    async def _drain(self, loaded: bool) -> None:
        """Lets running requests finish until the deadline, then ends them with an error for their clients.

        Meanwhile the socket still listens: new requests get a 503 instead of a refused connection.
        """
        deadline = asyncio.get_running_loop().time() + self._timeout
        if loaded and not await self._quiet(deadline):
            logger.warning("%d requests did not finish in time", self._runner.pending)
            self._runner.abort_all(SHUT_DOWN)
            if not await self._quiet(deadline + ENGINE_GRACE):
                self._runner.end_all(SHUT_DOWN)
        self._exit(max(deadline - asyncio.get_running_loop().time(), 0) + FORCED_GRACE)

    async def _quiet(self, deadline: float) -> bool:
        """Waits until nothing runs and all answers are written. False: something still runs at the deadline."""
        while self._runner.pending or any(map(is_answering, list(self._uvicorn.server_state.connections))):
            if asyncio.get_running_loop().time() >= deadline:
                return not self._runner.pending
            await asyncio.sleep(0.05)
        return True

    def _exit(self, seconds: float) -> None:
        """Takes no more connections, and gives the open ones so many seconds."""
        self._uvicorn.config.timeout_graceful_shutdown = int(seconds) + 1
        self._uvicorn.should_exit = True
