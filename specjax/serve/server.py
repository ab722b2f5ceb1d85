"""The server process: its socket, uvicorn with its connections, signals, and the shutdown.

bind -> listen, load in the background (503 meanwhile) -> ready -> SIGTERM or Ctrl-C: drain (503 meanwhile) -> exit 0
                                                                   once more: exit at once

uvicorn limits neither the time for headers, nor the time for the rest of an answered body, nor silent connections, and
answers malformed requests with plain text; `Connection` does. `specjax.serve.middleware` limits the time of bodies that
the app reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http
import logging
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from typing import Any, Literal

import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from specjax.serve.errors import SHUT_DOWN, ApiError, State, unavailable
from specjax.serve.middleware import CROWDED, WHOLE, log_answer, request_id
from specjax.serve.runner import Service
from specjax.serve.server_settings import ServerSettings

logger = logging.getLogger("specjax.serve")

SIGNALS = (signal.SIGINT, signal.SIGTERM)

FORCED_GRACE = 5.0  # seconds for the last answers of aborted requests, before connections are cut


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ValueError if the port is taken, or the host is not this machine's."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # `::` takes IPv4, too
        sock = socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=both)
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while")[0]
        if error.errno == errno.EADDRINUSE:
            reason += "; stop what listens there, or choose another --port (0 = any free one)"
        raise ValueError(f"--host {host} --port {port}: {reason}") from error
    sock.setblocking(False)
    return sock


def allow_files(connections: int) -> None:
    """Increases this process's limit of open files for `connections`, as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 256
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # the server also works with a lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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
        advice = ""
        if isinstance(error, ssl.SSLError) and error.reason != "KEY_VALUES_MISMATCH":
            advice = "; in PEM form there must be a certificate and, there or in --ssl-keyfile, its private key"
        raise ValueError(f"{place}: {error.strerror or error}{advice}") from error


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to `Server`: uvicorn would raise them again at the end and change the exit status."""
        yield


class Server:
    """Serves an app until a signal comes, or until the engine fails."""

    def __init__(self, app: ASGIApp, runner: Service, sock: socket.socket, settings: ServerSettings) -> None:
        self._runner, self._sock, self._settings = runner, sock, settings
        self._timeout = settings.shutdown_timeout
        config = uvicorn.Config(
            app,
            http=connection_class(settings),
            ws="none",
            log_config=None,
            access_log=False,  # the middleware's lines have the request's id
            lifespan="off",
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
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
        await self._uvicorn.serve(sockets=[self._sock])

    def _changed(self) -> None:
        if self._runner.failure is not None:
            self._exit(FORCED_GRACE)
        elif self._runner.state is State.READY:
            logger.info("The server is fired up and ready to roll! %s", url(self._sock, self._settings))

    def _signalled(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._draining is not None:
            logger.warning("%s again: stopping at once", name)
            self._draining.cancel()
            self._uvicorn.force_exit = self._uvicorn.should_exit = True
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
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._timeout
        connections: Any = self._uvicorn.server_state.connections
        if loaded:
            while clock() < deadline and (
                self._runner.places.taken or any(connection.is_answering for connection in connections)
            ):
                await asyncio.sleep(0.05)
            if self._runner.places.taken:
                logger.warning("%d requests did not finish in time", self._runner.places.taken)
                self._runner.end_all(SHUT_DOWN)
        self._exit(max(deadline - clock(), 0) + FORCED_GRACE)

    def _exit(self, seconds: float) -> None:
        """Accepts no more connections, and cuts the open ones after `seconds`."""
        self._uvicorn.config.timeout_graceful_shutdown = int(seconds) + 1
        self._uvicorn.should_exit = True


LINGER = 1.0  # seconds until a refused connection is cut; cutting it at once could discard the answer


class Connection(H11Protocol):
    settings: ServerSettings  # set by `connection_class`

    _began = 0.0  # time of the first byte of the incomplete request, or of the connection
    _heard = 0.0  # time of the last byte
    _timer: asyncio.TimerHandle | None = None
    _refused = False  # True after the last answer

    @property
    def part(self) -> Literal["headers", "body"] | None:
        """The incomplete part of the current request. None: uvicorn's keep-alive or the app limits the time."""
        # h11's states are classes, compared here by name.
        state = str(self.conn.their_state)
        if state == "SEND_BODY":
            return "body"
        return "headers" if state == "IDLE" and self.conn.trailing_data[0] else None

    @property
    def is_answering(self) -> bool:
        """True if a part of an answer has been written."""
        return self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete

    @property
    def _open(self) -> bool:
        """True if the app has a request without a complete answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        count, most = len(self.connections), self.settings.max_connections
        if count > 2 * most:
            transport.abort()
        elif count > most:
            self.app_state = self.app_state | {CROWDED: count}
        self._began = self._heard = self.loop.time()
        self._watch(self.settings.receive_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._heard = self.loop.time()
        if self.part is None:
            self._began = self._heard
        super().data_received(data)
        if self._refused or self.transport.is_closing():
            return
        if self.part is not None:
            if self._timer is None:
                self._watch(self.settings.receive_timeout)
        elif self.cycle is not None and self.cycle.response_complete and self.timeout_keep_alive_task is None:
            # uvicorn stops its idle timer at any byte, even of the rest of an answered body.
            handler = self.timeout_keep_alive_handler
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, handler)

    def send_400_response(self, msg: str) -> None:
        """Adds the parser's error, which uvicorn is handling, to `msg`."""
        error = sys.exc_info()[1]
        about = f": {error!s:.200}" if error is not None and str(error) else ""
        self._refuse(ApiError(getattr(error, "error_status_hint", 400), f"{msg.rstrip('.')}{about}"))

    def shutdown(self) -> None:
        """Called when the server stops: refuses an incomplete request, and lets an answer end."""
        if self._refused:
            self.transport.abort()
        elif self.part is not None and not self.is_answering:
            self._refuse(unavailable(SHUT_DOWN, retry_after=30))
        else:
            super().shutdown()

    def _watch(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._look)

    def _look(self) -> None:
        """Refuses a client that is too slow. A connection has one timer, and none while the app works."""
        self._timer = None
        if self._refused or self.transport.is_closing():
            return
        part, pause = self.part, self.settings.receive_timeout
        if part is None:
            if self.cycle is None:  # connected, and nothing sent
                self.transport.close()
            return
        end = self._began + pause if part == "headers" else min(self._heard + pause, self._began + WHOLE * pause)
        left = end - self.loop.time()
        if left > 0 or (part == "body" and self._open):  # the middleware limits a body that the app reads
            self._watch(max(left, pause / 10))
        elif part == "body":  # answered already
            self.transport.close()
        else:
            self._refuse(ApiError(408, f"the headers were not complete within {pause:g} s (--receive-timeout)"))

    def _refuse(self, error: ApiError) -> None:
        """Sends an error without the app, and ends the connection."""
        if self.is_answering:  # too late for another answer
            self.transport.close()
            return
        scope, id = {"method": "-", "path": "-", "http_version": "1.1", "client": self.client}, request_id(Headers())
        if self._open:
            scope = dict(self.cycle.scope)
            id = request_id(Headers(scope=scope))
            self.cycle.disconnected = True  # the app writes no answer then
            self.cycle.message_event.set()
        answer = error.response()
        answer.headers.update({"connection": "close", "x-request-id": id})
        fields = [b"%s: %s" % field for field in (*self.server_state.default_headers, *answer.raw_headers)]
        first = f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}".encode()
        self.transport.write(b"\r\n".join([first, *fields, b"", bytes(answer.body)]))
        log_answer(scope, error.status, id)
        self._refused = True
        self.flow.resume_reading()
        with contextlib.suppress(OSError):  # the client has left
            if self.transport.can_write_eof():
                self.transport.write_eof()
        self.loop.call_later(LINGER, self.transport.abort)


def connection_class(settings: ServerSettings) -> type[asyncio.Protocol]:
    """The `http` of `uvicorn.Config`."""
    return type("Connection", (Connection,), {"settings": settings})
