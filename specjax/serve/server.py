"""The server process: its socket, uvicorn with its connections, signals, and the shutdown.

bind -> listen, load in the background (503 meanwhile) -> ready -> signal: drain (503 meanwhile) -> exit 0
                                                                   once more: end requests with an error, exit 0

The signals are SIGTERM, SIGHUP and Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import math
import resource
import signal
import socket
import ssl
import time
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from specjax.serve.connection import Connection
from specjax.serve.errors import SHUT_DOWN, State
from specjax.serve.runner import Service
from specjax.serve.server_settings import ServerSettings

logger = logging.getLogger("specjax.serve")

SIGNALS = [signal.SIGINT, signal.SIGTERM]
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else started by `nohup`
    SIGNALS.append(signal.SIGHUP)

SEND_BUFFER = 256 * 2**10  # bytes of a connection in the kernel; its own limit of 4 MB hides how much a client reads
TRIM_PAUSE = 30  # seconds between two calls of `trim_heap`
LAST_ANSWERS = 1.0  # seconds for the errors of ended requests, before connections are cut


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ValueError if the port is taken, or the host is not this machine's."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # `::` takes IPv4, too
        sock = socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=both)
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while")[0]
        if error.errno == errno.EADDRINUSE:
            reason += "; choose another --port (0 = any free one)"
        raise ValueError(f"--host {host} --port {port}: {reason}") from error
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # connections inherit it
    sock.setblocking(False)
    return sock


def allow_files() -> None:
    """Raises this process's limit of open files as far as allowed: each connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # the server also works with a lower limit
        wanted = 65536 if hard == resource.RLIM_INFINITY else hard  # macOS refuses an infinite limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def trim_heap() -> None:
    """Returns memory to the system that glibc holds between pieces in use, a few megabytes in 10,000 requests. It takes
    some milliseconds. Other C libraries have no such function."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def url(sock: socket.socket, settings: ServerSettings) -> str:
    host, port = sock.getsockname()[:2]
    scheme = "http" if settings.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def check_certificate(settings: ServerSettings) -> None:
    """Raises ValueError if the certificate or its key cannot be read."""
    certificate, key = settings.ssl_certfile, settings.ssl_keyfile
    if certificate is None:
        if key is not None:
            raise ValueError(f"--ssl-keyfile {key} needs --ssl-certfile, the certificate that it belongs to")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:
        place = f"--ssl-certfile {certificate}" + (f" --ssl-keyfile {key}" if key else "")
        raise ValueError(f"{place}, in PEM form with a private key: {error.strerror or error}") from error


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to `Server`: uvicorn would raise them again at the end and change the exit status."""
        yield


class Server:
    """Serves an app until a signal comes, or until the engine fails.

    Attributes:
        deadline: time of `time.monotonic` at which the process should end; infinity while it serves.
    """

    deadline = math.inf

    def __init__(self, app: ASGIApp, runner: Service, sock: socket.socket, settings: ServerSettings) -> None:
        self._runner, self._sock, self._settings = runner, sock, settings
        self._timeout = settings.shutdown_timeout
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            log_config=None,
            access_log=False,  # the middleware's lines have the request's id
            lifespan="off",
            callback_notify=self._each_second,
            timeout_notify=0,  # seconds in addition to one
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
        )
        self._uvicorn = _Uvicorn(config)
        self._draining: asyncio.Task[None] | None = None
        self._seconds = 0

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
        await self._listen()

    async def _listen(self) -> None:
        """Runs uvicorn until all connections have ended, or `_exit` cuts them."""
        self._serving = asyncio.ensure_future(self._uvicorn.serve(sockets=[self._sock]))
        with contextlib.suppress(asyncio.CancelledError):  # by `_exit`
            await self._serving

    async def _each_second(self) -> None:
        for connection in list(self._uvicorn.server_state.connections):
            assert isinstance(connection, Connection)
            connection.check_pace()
        self._seconds += 1
        if self._seconds % TRIM_PAUSE == 0:
            asyncio.get_running_loop().run_in_executor(None, trim_heap)

    def _changed(self) -> None:
        if self._runner.failure is not None:
            self._exit(LAST_ANSWERS)
        elif self._runner.state is State.READY:
            logger.info("The server is fired up and ready to roll! %s", url(self._sock, self._settings))

    def _signalled(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._draining is not None:
            if number != signal.SIGHUP:  # which closed terminals send twice, and systemd after SIGTERM
                logger.warning("%s again: stopping at once", name)
                self._draining.cancel()
                self._runner.end_all(SHUT_DOWN)
                self._exit(LAST_ANSWERS)
            return
        logger.info("%s: shutting down", name)
        loaded = self._runner.state is State.READY
        if loaded and (running := self._runner.unfinished):
            logger.info("%d requests may continue for %g s; once more stops at once", running, self._timeout)
        self._runner.drain()
        self._draining = asyncio.ensure_future(self._drain(loaded))

    async def _drain(self, loaded: bool) -> None:
        """Lets running requests finish until the deadline, then ends them with an error for their clients.

        Meanwhile the socket still listens: new requests get a 503 instead of a refused connection.
        """
        self.deadline = time.monotonic() + self._timeout
        if loaded:
            last = self.deadline - min(LAST_ANSWERS, self._timeout / 4)
            while time.monotonic() < last and self._runner.places.taken:
                await asyncio.sleep(0.05)
            if self._runner.places.taken:
                logger.warning("%d requests did not finish in time", self._runner.places.taken)
                self._runner.end_all(SHUT_DOWN)
        # uvicorn looks every 0.1 s, and the end of the process takes about 0.2 s.
        self._exit(max(self.deadline - 0.2 - time.monotonic(), 0.3))

    def _exit(self, seconds: float) -> None:
        """Accepts no more connections, and cuts the open ones after `seconds`: a client that does not read must not
        keep the process alive."""
        self.deadline = min(self.deadline, time.monotonic() + seconds)
        self._uvicorn.should_exit = True
        asyncio.get_running_loop().call_later(seconds, self._serving.cancel)
