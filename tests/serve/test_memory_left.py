"""No request, refused or answered, keeps memory after its end, also without the garbage collector."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from body_helpers import CHAT, COMPLETE, EVERY_LEAST, GENERATE, MESSAGES, RESPONSES
from engine_helpers import make_engine, toy
from server_helpers import Running, in_background, received, request, running, wait_until

LIBC = ctypes.CDLL(None)
pytestmark = pytest.mark.skipif(not hasattr(LIBC, "malloc_trim"), reason="needs Linux and glibc")

COUNT = 50  # requests of each kind
MOST = 100_000  # bytes that one may leave
CONTEXT = 1024
TEXT = {COMPLETE: "prompt", GENERATE: "text", RESPONSES: "input"}
LIMITS = {COMPLETE: "max_tokens", CHAT: "max_tokens", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}
WRONG_FORMAT = {"type": "json_schema", "schema": {"type": "nothing"}}
GRAMMARS: dict[str, dict[str, Any]] = {
    COMPLETE: {"regex": "(("},
    CHAT: {"regex": "(("},
    GENERATE: {"sampling_params": {"regex": "(("}},
    RESPONSES: {"text": {"format": WRONG_FORMAT | {"name": "x"}}},
    MESSAGES: {"output_config": {"format": WRONG_FORMAT}},
}
IMAGE = {"type": "base64", "media_type": "image/png", "data": "A" * 4 * MOST}
URL = f"data:image/png;base64,{IMAGE['data']}"
IMAGES: dict[str, dict[str, Any]] = {
    COMPLETE: {"prompt": "a", "image_data": URL},
    CHAT: {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}]},
    GENERATE: {"text": "a", "image_data": URL},
    RESPONSES: {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]},
    MESSAGES: {"messages": [{"role": "user", "content": [{"type": "image", "source": IMAGE}]}], "max_tokens": 9},
}


def resident() -> int:
    """Resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def resident_idle(server: Running) -> int:
    """The same once nothing is connected."""
    server.wait_idle()
    wait_until(lambda: not server.server._uvicorn.server_state.connections)
    LIBC.malloc_trim(0)
    return resident()


def body(path: str, text: str, **more: Any) -> dict[str, Any]:
    chat = {"messages": [{"role": "user", "content": text}]}
    return EVERY_LEAST[path] | ({TEXT[path]: text} if path in TEXT else chat) | more


def limited(path: str, tokens: int, **more: Any) -> dict[str, Any]:
    """A long prompt, with an unknown field of several times `MOST` bytes."""
    limit = {"max_new_tokens": tokens, "ignore_eos": True}
    more |= {"sampling_params": limit} if path == GENERATE else {LIMITS[path]: tokens}
    return body(path, "ab " * (CONTEXT // 4), other="x" * 4 * MOST, **more)


def closing(data: bytes) -> bytes:
    """The request, after whose answer the connection is closed."""
    return data.replace(b"Host: x\r\n", b"Host: x\r\nConnection: close\r\n", 1)


Send = Callable[[Running], str]
"""Sends a request. Returns the status of the answer, or nothing."""


def sends(path: str, content: Any, change: Callable[[bytes], bytes] = bytes) -> Send:
    data = closing(change(request(path, content)))

    def send(server: Running) -> str:
        with contextlib.suppress(ConnectionError), server.connected(data) as sock:
            return received(sock)[9:12].decode()
        return ""  # refused before the body was read

    return send


def leaves(path: str, content: Any) -> Send:
    """Disconnects while the request runs."""
    data = request(path, content)

    def send(server: Running) -> str:
        with server.blocked():
            with server.connected(data):
                wait_until(lambda: server.runner.unfinished)
            wait_until(lambda: not server.runner.unfinished)
        return ""

    return send


def leaves_early(path: str, content: Any) -> Send:
    """Disconnects before the last byte of the body."""
    data = request(path, content)[:-1]

    def send(server: Running) -> str:
        with server.connected(data):
            pass
        wait_until(lambda: not server.server._uvicorn.server_state.connections)
        return ""

    return send


def aborts(path: str, content: Any) -> Send:
    send = sends(path, content)

    def abort(server: Running) -> str:
        with server.blocked():
            answer = in_background(send, server)
            wait_until(lambda: server.runner.unfinished)
            server.runner.abort_named(None)
        return answer.result()

    return abort


def fails(path: str, content: Any) -> Send:
    """Runs into a failed step."""
    send = sends(path, content)

    def fail() -> Any:
        raise RuntimeError("the device is on fire")

    def failed(server: Running) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.engine, "_plan", fail)
            return send(server)

    return failed


def waits(path: str, content: Any) -> Send:
    """Finds a full queue."""
    send = sends(path, content)

    def refused(server: Running) -> str:
        with server.runner.places.reserve(server.runner.capacity):
            return send(server)

    return refused


Kinds = Iterator[tuple[str, Send, str]]
"""Names, requests, and the first digit of the answers."""


def refused(path: str) -> Kinds:
    big = "a " * (2 * MOST)
    yield "too many tokens", sends(path, body(path, big)), "4"
    yield "no such model", sends(path, body(path, big, model="none")), "4"
    cold = {"sampling_params": {"temperature": -1}} if path == GENERATE else {"temperature": -1}
    yield "wrong field", sends(path, body(path, big, **cold)), "4"
    yield "wrong type", sends(path, {key: {"x": big} for key in body(path, "")}), "4"
    yield "parameter that the engine refuses", sends(path, limited(path, 10**6)), "4"
    yield "wrong grammar", sends(path, limited(path, 4) | GRAMMARS[path]), "4"
    yield "image", sends(path, IMAGES[path]), "4"
    yield "invalid JSON", sends(path, big, lambda data: data[:-1] + b"]"), "4"
    yield "other type", sends(path, big, lambda data: data.replace(b"application/json", b"text/plain")), ""
    yield "full queue", waits(path, body(path, big)), "5"
    yield "disconnect before the end of the body", leaves_early(path, body(path, big)), ""


def run(path: str) -> Kinds:
    yield "failed step", fails(path, limited(path, 4)), "5"
    yield "failed step of a stream", fails(path, limited(path, 4, stream=True)), "52"
    yield "answer", sends(path, limited(path, 2)), "2"
    yield "stream", sends(path, limited(path, 2, stream=True)), "2"
    yield "aborted", aborts(path, limited(path, 9)), "42"
    yield "aborted stream", aborts(path, limited(path, 9, stream=True)), "42"
    yield "disconnect", leaves(path, limited(path, 9)), ""
    yield "disconnect from a stream", leaves(path, limited(path, 9, stream=True)), ""


@pytest.fixture(scope="module")
def server():
    long = {"context_length": CONTEXT, "max_total_tokens": 4 * CONTEXT, "chunked_prefill_size": CONTEXT}
    with running(make_engine(toy(end=-50.0), "NGRAM", **long)) as served:
        yield served


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("kinds", [refused, pytest.param(run, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "path", [path if path == COMPLETE else pytest.param(path, marks=pytest.mark.slow) for path in EVERY_LEAST]
)
def test_no_request_keeps_memory(server, path, kinds):
    for name, send, status in kinds(path):
        answer = send(server)  # later ones need no new programs and buffers
        assert answer[:1] in status or not status, (name, answer)
        least = float("inf")
        with no_collector():
            for _ in range(3):  # what a request keeps is kept each time; the allocator grows once
                before = resident_idle(server)
                for _ in range(COUNT):
                    send(server)
                least = min(least, (resident_idle(server) - before) / COUNT)
                if least < MOST:
                    break
        assert least < MOST, f"{name}: {least / 1000:.0f} KB after each request"


def test_server_returns_free_memory(server, monkeypatch):
    """Also where pieces in use lie between free ones."""
    pieces = [b"x" * size for _ in range(1000) for size in (100_000, 1_000)]
    full = resident()
    pieces = pieces[1::2]
    monkeypatch.setattr("specjax.serve.server.TRIM_PAUSE", 1)
    wait_until(lambda: resident() < full - 80_000_000)
