"""Limits of connections: headers, their framing, clients that send or read slowly, and those that close."""

from __future__ import annotations

import contextlib
import json
import socket
import time

import pytest
from body_helpers import CHAT, COMPLETE, HELLO
from engine_helpers import make_engine, shared_engine, toy
from server_helpers import SECONDS, Running, received, request, running, wait_until

from specjax.serve import connection
from specjax.serve.connection import MAX_HEADER, MAX_LINES

POST = f"POST {COMPLETE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
BODY = b'{"prompt": "x", "max_tokens": 1}'
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


@pytest.fixture(scope="module")
def server():
    with running(shared_engine("NONE")) as served:
        yield served


def check_refused(data: bytes, status: int) -> None:
    """Checks that one error in OpenAI's form is the whole answer."""
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and data.count(b"HTTP/1.1") == 1, data
    assert b"connection: close" in head.lower() and json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])["error"]


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"transfer-encoding: Chunked\r\ncontent-length: %d\r\n" % len(CHUNKED),
        b"Transfer-Encoding:\t chunked \r\nContent-Length: 0\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
    ],
)
@pytest.mark.parametrize("start", [POST, GET], ids=["POST", "GET"])
def test_ambiguous_framing_is_refused(server, start, framing):
    """Neither the request nor one behind it is served."""
    with server.connected(start + framing + b"\r\n" + CHUNKED + GET + b"\r\n") as sock:
        check_refused(received(sock), 400)


def with_headers(*lines: bytes) -> bytes:
    return GET + b"Connection: close\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


TRAILERS = POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n"
LARGE = {
    "one": with_headers(b"A: " + b"x" * MAX_HEADER),
    "spaces": with_headers(b"A:" + b" " * MAX_HEADER + b"x"),
    "many": with_headers(*(b"A%d: x" % i for i in range(MAX_LINES))),
    "folded": with_headers(b"A: x", *([b" y"] * MAX_LINES)),
    "path": b"GET /" + b"x" * MAX_HEADER + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "trailers": TRAILERS + b"A: x\r\n" * (MAX_LINES + 1) + b"\r\n",
    "long trailers": TRAILERS + (b"A: " + b"x" * (MAX_HEADER // 2) + b"\r\n") * 2 + b"\r\n",
}


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", LARGE)
def test_large_headers_are_a_431(server, name, parts):
    data = LARGE[name]
    with server.connected() as sock:
        size = -(-len(data) // parts)
        for i in range(0, len(data), size):
            sock.sendall(data[i : i + size])
            time.sleep(0.02 * (parts > 1))
        check_refused(received(sock), 431)


def test_headers_within_the_limits(server):
    many = (b"A%d: x" % i for i in range(MAX_LINES - 2))
    for data in (with_headers(*many), with_headers(b"A: " + b"x" * (MAX_HEADER - 200))):
        with server.connected(data) as sock:
            assert received(sock).startswith(b"HTTP/1.1 200 ")


def test_requests_of_one_connection(server):
    """A body sent after 100 Continue, an upgrade that is not supported, and pipelined requests."""
    with server.connected(POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY)) as sock:
        assert sock.recv(4096).startswith(b"HTTP/1.1 100 ")
        sock.sendall(BODY + (GET + b"\r\n") * 3 + with_headers())
        assert received(sock).count(b"HTTP/1.1 200 OK") == 5
    with server.connected(GET + b"Upgrade: websocket\r\nConnection: upgrade, close\r\n\r\n") as sock:
        assert received(sock).startswith(b"HTTP/1.1 200 ")


def test_invalid_rest_of_a_refused_body(server, caplog):
    """No traceback is logged."""
    with server.connected(POST.replace(COMPLETE.encode(), b"/nothing") + b"Transfer-Encoding: chunked\r\n\r\n") as sock:
        assert sock.recv(4096).startswith(b"HTTP/1.1 404 ")
        sock.sendall(b"zzz\r\n")
        with contextlib.suppress(ConnectionError):
            received(sock)
    assert "Fatal error" not in caplog.text and "Traceback" not in caplog.text


# Clients that send slowly.

SLOW = {
    "header": (GET + b"A: ", b"x", 408),
    "first line": (b"G", b"E", 408),
    "body": (POST + b"Content-Length: 1000\r\n\r\n", b" ", 408),
    "chunks": (POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n", 408),
    "length of a chunk": (POST + b"Transfer-Encoding: chunked\r\n\r\n", b"0", 408),
    "nothing": (POST + b"Content-Length: 1000\r\n\r\n", b"", 408),
    "answered": (b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n", b" ", 404),
}


def test_slow_senders_are_closed(server, monkeypatch):
    """Idle connections stay open, and other clients are answered."""
    monkeypatch.setattr(connection, "SENDING", 2)
    with contextlib.ExitStack() as stack:
        idle = stack.enter_context(server.connected())
        socks = {name: stack.enter_context(server.connected(start)) for name, (start, _, _) in SLOW.items()}
        answers = dict.fromkeys(socks, b"")
        left, deadline = set(socks), time.monotonic() + SECONDS
        while left:
            assert time.monotonic() < deadline, left
            assert server.get("/health").status_code == 200
            for name in sorted(left):
                socks[name].settimeout(0.05)
                try:
                    socks[name].sendall(SLOW[name][1])
                    part = socks[name].recv(65536)
                except TimeoutError:
                    continue
                except ConnectionError:
                    part = b""
                answers[name] += part
                left -= set() if part else {name}
        for name, answer in answers.items():
            assert answer.startswith(b"HTTP/1.1 %d " % SLOW[name][2]), (name, answer)
        idle.sendall(with_headers())
        assert received(idle).startswith(b"HTTP/1.1 200 ")
    server.wait_idle()


def test_body_at_a_sufficient_pace(server, monkeypatch):
    monkeypatch.setattr(connection, "SENDING", 2)
    monkeypatch.setattr(connection, "MIN_BYTES", 10)
    body = BODY + b" " * 300
    with server.connected(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)) as sock:
        for i in range(0, len(body), 30):  # four seconds, 75 bytes in each
            sock.sendall(body[i : i + 30])
            time.sleep(0.4)
        assert received(sock).startswith(b"HTTP/1.1 200 ")


# Clients that do not read.


@pytest.fixture
def long():
    with running(make_engine(toy(), "NONE", context_length=65536, max_total_tokens=9 * 65536)) as served:
        yield served


STREAM = {"messages": HELLO, "n": 4, "max_tokens": 60_000, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}


@contextlib.contextmanager
def unread(server: Running, body: dict):
    """A client with a small buffer that does not read."""
    host, port = server.base.removeprefix("http://").split(":")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((host, int(port)))
        sock.sendall(request(CHAT, body))
        yield sock


def test_client_that_never_reads_is_cut_off(long, monkeypatch, caplog):
    monkeypatch.setattr(connection, "READING", 3)
    with unread(long, STREAM | {"stream": True}):
        wait_until(lambda: long.runner.unfinished == 4)
        long.wait_idle()
    assert "read less than" in caplog.text and long.runner.traffic.aborted == 4


def test_unread_whole_answers(server, monkeypatch, caplog):
    """Also while the next request of the connection waits with its answer."""
    monkeypatch.setattr(connection, "READING", 3)
    with unread(server, {}) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 500)
        wait_until(lambda: "read less than" in caplog.text)
        wait_until(lambda: not server.server._uvicorn.server_state.connections)


def test_steady_reader_is_not_cut_off(server, monkeypatch, caplog):
    """The buffer of a client that reads slower than the server writes may be as full in each check."""
    monkeypatch.setattr(connection, "READING", 2)
    with server.connected((GET.replace(b"/health", b"/") + b"\r\n") * 1000) as sock:
        end = time.monotonic() + 7
        while time.monotonic() < end:
            assert sock.recv(50_000)
            time.sleep(0.1)
        assert "read less than" not in caplog.text
        assert any(each.flow.write_paused for each in server.server._uvicorn.server_state.connections)
