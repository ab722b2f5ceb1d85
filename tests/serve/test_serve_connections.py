"""What connections may do to a server: send what is not HTTP, be slow, be many, and come while it stops."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
from collections.abc import Iterator

import pytest
from engine_helpers import make_engine, shared_engine, toy
from server_helpers import SECONDS, Running, answer_of, braked, running, slow_down, wait_until

from specjax.cli.flags import ServerSettings
from specjax.serve import middleware
from specjax.serve.errors import SHUT_DOWN
from specjax.serve.server import allow_files

COMPLETE = "/v1/completions"
BODY = json.dumps({"prompt": "hello", "max_tokens": 2}).encode()
HEAD = f"POST {COMPLETE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()
HALF = HEAD + b"Content-Length: 1000\r\n\r\n" + BODY
SLOW = ServerSettings(receive_timeout=0.5)
"""What a test sends at once must be there by then, on a busy machine, too."""


@pytest.fixture(scope="module")
def server():
    with running(shared_engine("NONE")) as served:
        yield served


@pytest.fixture(scope="module")
def impatient():
    with running(make_engine(toy()), SLOW) as served:  # the other server runs the shared engine
        yield served


@contextlib.contextmanager
def connected(server: Running, sent: bytes = b"") -> Iterator[socket.socket]:
    host, port = server.base.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=SECONDS) as sock:
        sock.sendall(sent)
        yield sock


def check_refusal(sock: socket.socket, status: int, said: str) -> dict[str, str]:
    """An answer in OpenAI's form, after which the connection ends. Returns its headers."""
    found, headers, body = answer_of(sock)
    assert found == status
    assert headers["content-type"] == "application/json" and headers["connection"] == "close"
    assert headers["x-request-id"] and "date" in headers
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"} and said in error["message"]
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    return headers


GARBAGE = {
    "words": (b"hello world\r\n\r\n", 400),
    "bytes": (bytes(range(256)) * 4, 400),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200, 400),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "length": (HEAD + b"Content-Length: -5\r\n\r\n", 400),
    "two lengths": (HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
    "header": (b"GET /health HTTP/1.1\r\nHost: x\r\nA b: c\r\n\r\n", 400),
    "chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    "large": (b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 200_000, 431),
}


@pytest.mark.parametrize("case", GARBAGE)
def test_what_is_not_http(server, case):
    sent, status = GARBAGE[case]
    with connected(server, sent) as sock:
        check_refusal(sock, status, "Invalid HTTP request" if status == 400 else "")
    assert server.complete(max_tokens=1).status_code == 200


def test_garbage_behind_a_request(server):
    """The request is answered, then the garbage is."""
    ask = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with connected(server, ask + b"garbage\r\n\r\n") as sock:
        data = b""
        while part := sock.recv(65536):
            data += part
    assert data.startswith(b"HTTP/1.1 200") and data.count(b"HTTP/1.1 400") == 1 and b'{"status":"ok"}' in data


def test_garbage_behind_a_stream_waits_for_its_end(server, monkeypatch):
    slow_down(server.engine, monkeypatch, 0.02)
    body = json.dumps({"prompt": "hello", "max_tokens": 50, "stream": True}).encode()
    with connected(server, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body) as sock:
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        sock.sendall(b"garbage\r\n\r\n")  # waits until the stream has ended
        data = b""
        while part := sock.recv(65536):
            data += part
    assert b"[DONE]" in data
    server.wait_idle()


def test_the_clients_request_id_is_kept(server):
    sent = HEAD + b"X-Request-Id: mine-1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    with connected(server, sent) as sock:
        assert check_refusal(sock, 400, "Invalid HTTP request")["x-request-id"] == "mine-1"


def test_ids_cannot_forge_log_lines(server, caplog):
    caplog.set_level("INFO", "specjax.serve")
    with server.client() as client:
        client.get("/health", headers={"X-Request-Id": 'x" 200, request y'})
        client.get("/%0a[2026] forged", headers={"X-Request-Id": "plain-1"})
    lines = [record.getMessage() for record in caplog.records if record.name == "specjax.serve"]
    assert r'request "x\" 200, request y"' in lines[-2]
    assert lines[-1].endswith("404, request plain-1") and "\n" not in lines[-1]


def test_an_error_of_ours_has_a_request_id(server, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("secret")

    monkeypatch.setattr(server.engine, "flush_cache", fail)
    answer = server.post("/flush_cache", {})
    assert answer.status_code == 500 and answer.headers["x-request-id"] in caplog.text
    assert "secret" in caplog.text and "secret" not in answer.text and answer.json()["error"]["type"] == "server_error"


# Slow ones.


@pytest.mark.parametrize("sent", [b"P", b"POST /v1/completions HTTP/1.1\r\nHo", HEAD], ids=["byte", "word", "lines"])
def test_headers_that_never_end(impatient, sent):
    with connected(impatient, sent) as sock:
        check_refusal(sock, 408, "0.5 s (--receive-timeout)")


def test_headers_that_come_byte_by_byte(impatient):
    with connected(impatient, b"GET /health HTTP/1.1\r\nA: ") as sock, contextlib.suppress(OSError):
        sock.settimeout(0.02)
        while True:  # each is progress, and yet it ends
            sock.sendall(b"a")
            with contextlib.suppress(TimeoutError):
                assert sock.recv(65536).startswith(b"HTTP/1.1 408")
                break


@pytest.mark.parametrize("sent", [HALF, HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab"], ids=["length", "chunked"])
def test_body_that_never_ends(impatient, sent):
    with connected(impatient, sent) as sock:
        check_refusal(sock, 408, "0.5 s without a byte, 5 s for the whole")
    assert not impatient.engine.unfinished


def test_body_that_comes_byte_by_byte(impatient, monkeypatch):
    monkeypatch.setattr(middleware, "WHOLE", 2.0)
    with connected(impatient, HALF) as sock:
        sock.settimeout(0.02)
        while True:
            sock.sendall(b" ")
            with contextlib.suppress(TimeoutError):
                assert sock.recv(65536).startswith(b"HTTP/1.1 408")
                break


@pytest.mark.parametrize("sent", [b"", HALF.replace(COMPLETE.encode(), b"/nothing")], ids=["silent", "after answer"])
def test_connection_that_says_no_more(impatient, sent):
    with connected(impatient, sent) as sock:
        data = b""
        while part := sock.recv(65536):
            data += part
    assert b"408" not in data and data.startswith(b"HTTP/1.1 404" if sent else b"")
    wait_until(lambda: not impatient.server.connections)


def test_rest_of_a_refused_body_does_not_keep_the_connection(server, monkeypatch):
    """uvicorn forgets its keep-alive time-out with each byte that comes."""
    monkeypatch.setattr(server.server._uvicorn.config, "timeout_keep_alive", 0.1)
    sent = HEAD.replace(COMPLETE.encode(), b"/nothing") + b"Content-Length: 4\r\n\r\nab"
    with connected(server, sent) as sock:
        data = b""
        while not data.endswith(b"}}"):
            data += sock.recv(65536)
        assert data.startswith(b"HTTP/1.1 404")
        with contextlib.suppress(ConnectionError):  # it is closed already
            sock.sendall(b"cd")
            assert sock.recv(65536) == b"", "closed as an idle one"


def test_a_slow_client_with_time_is_served(server):
    with connected(server) as sock:
        sent = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
        for start in range(0, len(sent), 7):
            sock.sendall(sent[start : start + 7])
        status, _, body = answer_of(sock)
    assert status == 200 and body["usage"]["completion_tokens"] == 2


def test_running_requests_are_not_timed(impatient, monkeypatch):
    """Longer than a request may take to come."""
    monkeypatch.setattr(middleware, "WHOLE", 2.0)
    slow_down(impatient.engine, monkeypatch, 0.25)
    answer = impatient.complete(max_tokens=6, ignore_eos=True)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 6


# Many.


def test_too_many_connections():
    with running(make_engine(toy()), ServerSettings(max_connections=3)) as server:
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(connected(server))
            wait_until(lambda: server.server.connections == 3)
            with connected(server, HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY) as sock:
                headers = check_refusal(sock, 503, "4 connections are open, too many (--max-connections)")
                assert int(headers["retry-after"]) > 0
            with server.client() as client:
                assert client.get("/health").status_code == 200, "who asks for health is no load"
            wait_until(lambda: server.server.connections == 3)
            for _ in range(3):
                stack.enter_context(connected(server))
            wait_until(lambda: server.server.connections == 6)
            with connected(server) as sock, contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b"", "cut"
        wait_until(lambda: not server.server.connections)
        assert server.complete(max_tokens=1).status_code == 200


def test_bodies_share_a_limit(server, monkeypatch):
    monkeypatch.setattr(middleware, "MAX_BODIES", 3000)
    with connected(server, HEAD + b"Content-Length: 2900\r\n\r\n" + b" " * 2800):
        large = json.dumps({"prompt": "x" * 500, "max_tokens": 1})

        def refused() -> bool:
            answer = server.post(COMPLETE, json.loads(large))
            return answer.status_code == 503 and "bodies" in answer.text and "retry-after" in answer.headers

        wait_until(refused)
    wait_until(lambda: server.complete("x", max_tokens=1).status_code == 200)


def test_limit_of_open_files(monkeypatch):
    resource = pytest.importorskip("resource")
    found = []
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: found.append(limits))
    for limits, connections in (((256, 4096), 1000), ((256, 1000), 2000), ((4096, 4096), 1000), ((256, -1), 1000)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limits=limits: limits)
        allow_files(connections)
    assert found == [(1256, 4096), (1000, 1000), (1256, -1)]


# While it stops.


def test_draining_answers_until_the_end():
    engine = shared_engine("NONE")
    with running(engine) as server:
        server.server._timeout = SECONDS
        body = {"prompt": "hello", "max_tokens": 40, "stream": True, "ignore_eos": True}
        with (
            braked(engine, after=4) as brake,
            server.client() as client,
            server.client() as kept,
            client.stream("POST", COMPLETE, json=body) as stream,
            connected(server, HALF) as half,
            connected(server, b"GET / HT") as partial,
        ):
            assert kept.get("/health").status_code == 200
            chunks = stream.iter_raw()
            data = next(chunks)
            server.server.signal(signal.SIGTERM)
            wait_until(lambda: kept.get("/health").status_code == 503)
            for answer in (server.complete("x"), kept.post(COMPLETE, json={"prompt": "x"})):  # new and kept connections
                assert answer.status_code == 503 and answer.json()["error"]["message"] == SHUT_DOWN
                assert int(answer.headers["retry-after"]) > 0 and answer.headers["connection"] == "close"
            brake.release()
            data += b"".join(chunks)
            for sock in (half, partial):
                check_refusal(sock, 503, SHUT_DOWN)
        assert data.endswith(b"data: [DONE]\n\n") and b'"finish_reason": "length"' in data
        wait_until(lambda: server.server.ended)
        with pytest.raises(ConnectionRefusedError), connected(server):
            pass


def test_draining_does_not_wait_for_a_stuck_engine(monkeypatch):
    engine, let_go = shared_engine("NONE"), threading.Event()
    began = threading.Event()

    def hang():
        began.set()
        assert let_go.wait(SECONDS)
        return []

    monkeypatch.setattr(engine, "step", hang)
    with running(engine, idle_at_end=False) as server:
        server.server._timeout = 0.0
        with connected(server, HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY) as sock:
            assert began.wait(SECONDS)
            server.server.signal(signal.SIGTERM)
            status, _, body = answer_of(sock)
        assert status == 503 and body["error"]["message"] == SHUT_DOWN
        wait_until(lambda: server.server.ended)
        let_go.set()
    assert server.runner.failure is None
    engine.reset("the test has ended")
