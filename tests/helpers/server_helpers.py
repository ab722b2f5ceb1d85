"""A real server (uvicorn, a socket, the engine's thread) over a table model, in the test's own process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
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
"""Most that anything here waits for: only what hangs takes so long, however busy the machine is."""


@dataclass
class Running:
    """A server that runs, and the engine behind it."""

    base: str
    engine: Engine
    runner: Any  # a `Service`
    server: InThread

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.base, timeout=SECONDS, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, **options)

    def chat(self, text: str = "hello", **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    def complete(self, prompt: Any = "hello", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def events(self, path: str, body: Any) -> list[Any]:
        """The parsed events of a stream; the last must be [DONE]."""
        with self.client() as client, client.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            return parse_events(response.read())

    def wait_for_command(self) -> None:
        """Until an engine that stands still has something to do before its next step: to end a request, say."""
        wait_until(lambda: self.runner._commands)

    def wait_idle(self) -> None:
        """Until nothing runs; then every page and slot must be back."""
        wait_until(lambda: not self.runner.unfinished)
        for rank in self.runner.ranks:
            wait_until(lambda rank=rank: not rank.engine.unfinished)
            rank.call(check_idle).result(SECONDS)


def answer_of(sock: socket.socket) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON of what a raw connection gets until its end."""
    data = b""
    while part := sock.recv(65536):
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    assert int(headers["content-length"]) == len(body), data
    return int(first.split()[1]), headers, json.loads(body)


def parse_events(data: bytes) -> list[Any]:
    """What a stream holds, checked to the byte: events of one line of JSON each, then [DONE]."""
    assert data.endswith(b"\n\n")
    lines = data.decode("utf-8").removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines), lines
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def begun(send: Callable[[], httpx.Response]) -> httpx.Response:
    """A stream of a request with a short timeout. Where that was over before the stream began, as it may be on a busy
    machine, the answer is a 408, and the request is sent again."""
    for _ in range(50):
        if (answer := send()).status_code != 408:
            break
    return answer


def wait_until(true: Callable[[], Any], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.005)


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
    """A server over `engine`, stopped at the end; then nothing may be left in the engine.

    With `load` it is not waited for: that is called in its thread to get the engine. `service`: makes what drives the
    engine, for others than a `Runner`.
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
    """Signals go to the main thread, so this one is told by hand."""

    def __init__(self, app: Any, runner: Runner, sock: socket.socket, settings: ServerSettings) -> None:
        super().__init__(app, runner, sock, settings)
        self._thread = threading.Thread(target=asyncio.run, args=(self._main(),), daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._runner.start()
        await self._uvicorn.serve(sockets=[self._sock])

    def signal(self, number: int) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._signalled, number)

    @property
    def connections(self) -> int:
        return len(self._uvicorn.server_state.connections)

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._uvicorn.should_exit = True
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()


class Brake:
    """Holds an engine before a step, with its requests where they are, for as long as a test looks at them.

    Args:
        after: steps that may run at first.
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
        """Until the engine stands before a step that may not run."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._asked > self._allowed, SECONDS), "nothing runs"

    def allow(self, steps: float) -> None:
        """Lets so many more steps run. Commands to the engine, aborts among them, run between two steps."""
        with self._changed:
            self._allowed += steps
            self._changed.notify_all()

    def release(self) -> None:
        self.allow(math.inf)


@contextlib.contextmanager
def braked(engine: Engine, *, after: int) -> Iterator[Brake]:
    """An engine that stands still after so many steps that had something to do; it runs on at the end."""
    brake = Brake(engine.step, after)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", brake.step)
        try:
            yield brake
        finally:
            brake.release()


def slow_down(engine: Engine, monkeypatch: Any, seconds: float = 0.1) -> None:
    """Steps that take a while, so that something is running when a test looks."""
    step = engine.step

    def slow() -> Any:
        time.sleep(seconds)
        return step()

    monkeypatch.setattr(engine, "step", slow)
