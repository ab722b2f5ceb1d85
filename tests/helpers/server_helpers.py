"""A real server (uvicorn, a socket, the engine's thread) over a table model, in the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from engine_helpers import check_idle

from specjax.cli.flags import ServerSettings
from specjax.cli.serve import make_app
from specjax.engine import Engine
from specjax.serve.errors import State
from specjax.serve.runner import Runner, Service
from specjax.serve.server import Server, listen, url

MODEL = "toy"
SECONDS = 240.0
"""Time limit of every wait in seconds. Even on a busy machine only a hang takes so long."""


@dataclass
class Running:
    """A running server and its engine."""

    base: str
    engine: Engine
    runner: Any  # a `Service`
    server: InThread

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.base, timeout=SECONDS, **options)

    def get(self, path: str) -> httpx.Response:
        with self.client() as client:
            return client.get(path)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, **options)

    def chat(self, text: str = "hello", **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    def complete(self, prompt: Any = "hello", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def events(self, path: str, body: Any) -> list[Any]:
        """The parsed events of a stream, which ends with [DONE]."""
        with self.client() as client, client.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            return parse_events(response.read())

    @contextlib.contextmanager
    def connected(self, data: bytes = b"") -> Iterator[socket.socket]:
        """A connection on which `data` was sent."""
        host, port = self.base.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=SECONDS) as sock:
            sock.sendall(data)
            yield sock

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Runs no step and no command inside the block."""
        let_go = threading.Event()
        self.runner.call(lambda engine: let_go.wait(SECONDS))
        try:
            yield
        finally:
            let_go.set()

    def wait_for_command(self) -> None:
        """Waits until a stopped engine has a command to execute before its next step, such as an abort."""
        wait_until(lambda: self.runner._commands)

    def wait_idle(self) -> None:
        """Waits until nothing runs, and checks that all pages and slots are free."""
        wait_until(lambda: not self.runner.unfinished)
        for rank in self.runner.ranks:
            wait_until(lambda rank=rank: not rank.engine.unfinished)
            rank.call(check_idle).result(SECONDS)


def check_error(response: httpx.Response, status: int, param: str | None = None, text: str = "") -> dict[str, Any]:
    """Checks an error in OpenAI's form. Returns the error."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, body
    error = body["error"]
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    assert param is None or error["param"] == param, error
    assert text in error["message"], error
    return error


def request(path: str, body: Any, *, length: int | None = None) -> bytes:
    """The bytes of a POST. `length`: the Content-Length, if not the body's own length."""
    data = json.dumps(body).encode()
    lines = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{lines}Content-Length: {len(data) if length is None else length}\r\n\r\n".encode() + data


def received(sock: socket.socket) -> bytes:
    """All bytes until the end of a connection."""
    data = b""
    while part := sock.recv(65536):
        data += part
    return data


def parse_events(data: bytes) -> list[Any]:
    """The events of a stream. Each must be one line of JSON, and the last [DONE]."""
    assert data.endswith(b"\n\n")
    lines = data.decode("utf-8").removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines), lines
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def in_background(function: Callable[..., Any], *arguments: Any, **options: Any) -> Future:
    """Calls a function in a new thread."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function, *arguments, **options)
    pool.shutdown(wait=False)
    return future


def wait_until(condition: Callable[[], Any], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not true within {seconds:g} s"
        time.sleep(0.005)


def free_port() -> int:
    """A free port, for a server that others know before it listens, or that restarts at its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@contextlib.contextmanager
def running(
    engine: Engine,
    settings: ServerSettings | None = None,
    *,
    model: str = MODEL,
    load: Callable[[], Engine] | None = None,
    service: Callable[[ServerSettings], Service] | None = None,
    idle_at_end: bool = True,
) -> Iterator[Running]:
    """A server over `engine`, stopped at the end.

    Args:
        load: called in the runner's thread to get the engine; without it, the server is ready at once.
        service: makes the `Service`; default a `Runner`.
        idle_at_end: at the end, wait until the engine is idle, and check that its pages are free.
    """
    settings = replace(settings or ServerSettings(), shutdown_timeout=1.0)
    sock = listen("127.0.0.1", 0)
    make = service or (lambda settings: Runner(load or (lambda: engine), settings, warm_up=False))
    runner = make(settings)
    server = InThread(make_app(runner, settings, model=model), runner, sock, settings)
    server.start()
    if load is None:
        wait_until(lambda: runner.state is State.READY)
    served = Running(url(sock, settings), engine, runner, server)
    try:
        yield served
        if idle_at_end:
            served.wait_idle()
    finally:
        server.stop()
        assert runner.stop(SECONDS)


class InThread(Server):
    """A server in a thread. Python handles signals in the main thread, so tests call `signal`."""

    def __init__(self, app: Any, runner: Runner, sock: socket.socket, settings: ServerSettings) -> None:
        super().__init__(app, runner, sock, settings)
        self._thread = threading.Thread(target=asyncio.run, args=(self._main(),), daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._runner.start()
        await self._listen()

    def signal(self, number: int) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._signalled, number)

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._exit, 1.0)
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()


class Hang:
    """A function of any arguments that hangs until `let_go` is set. `began` is set in its first call."""

    def __init__(self) -> None:
        self.began, self.let_go = threading.Event(), threading.Event()

    def __call__(self, *_: Any, **options: Any) -> Any:
        self.began.set()
        assert self.let_go.wait(SECONDS)
        return []


class Brake:
    """Stops an engine before a step while a test looks at its requests.

    Args:
        after: number of steps that may run before.
    """

    def __init__(self, step: Callable[[], Any], after: int) -> None:
        self._step, self._asked, self._allowed = step, 0, float(after)
        self._changed = threading.Condition()

    def step(self) -> Any:
        with self._changed:
            self._asked += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._asked <= self._allowed, SECONDS), "the brake is still on"
        return self._step()

    def wait(self) -> None:
        """Waits until the engine is stopped before a step."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._asked > self._allowed, SECONDS), "nothing runs"

    def allow(self, steps: float) -> None:
        """Allows more steps. Commands to the engine, such as aborts, run between two steps."""
        with self._changed:
            self._allowed += steps
            self._changed.notify_all()

    def release(self) -> None:
        self.allow(math.inf)


@contextlib.contextmanager
def braked(engine: Engine, *, after: int) -> Iterator[Brake]:
    """Stops an engine after a number of steps; it continues at the end of the block."""
    brake = Brake(engine.step, after)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", brake.step)
        try:
            yield brake
        finally:
            brake.release()


def slow_down(engine: Engine, monkeypatch: Any, seconds: float = 0.1) -> None:
    """Slows the steps down, so that requests run while a test looks at them."""
    step = engine.step

    def slow() -> Any:
        time.sleep(seconds)
        return step()

    monkeypatch.setattr(engine, "step", slow)
