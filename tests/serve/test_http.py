"""HTTP around the routes: methods, types and sizes of bodies, keys, origins, certificates, shutdown."""

from __future__ import annotations

import gzip
import json
import re
import signal
import ssl

import httpx
import openai
import pytest
import trustme
from body_helpers import CHAT, COMPLETE, GENERATE, LEAST, MESSAGES
from engine_helpers import make_engine, shared_engine, toy
from server_helpers import (
    MODEL,
    SECONDS,
    Hang,
    Running,
    braked,
    check_error,
    received,
    request,
    running,
    wait_until,
)

from specjax.cli.flags import ServerSettings
from specjax.cli.serve import main
from specjax.serve import middleware
from specjax.serve.errors import SHUT_DOWN, State
from specjax.serve.server import check_certificate

BODY = {"prompt": "hello", "max_tokens": 2}
HEAD = f"POST {COMPLETE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()


@pytest.fixture(scope="module")
def server():
    with running(shared_engine("NONE")) as served:
        yield served


def test_request_ids(server, caplog):
    """A client's id is used if it is short and plain; no id can forge a line of the log."""
    caplog.set_level("INFO", "specjax.serve")
    ids = {"abc-1": True, "x" * 128: True, "x" * 129: False, "a\tb": False, "": False, 'x" 200, request y': False}
    with server.client() as client:
        for id, used in ids.items():
            answer = client.get("/v1/models", headers={"X-Request-Id": id})
            assert (answer.headers["X-Request-Id"] == id) == used and answer.headers["X-Request-Id"]
        client.get("/%0a[2026] forged", headers={"X-Request-Id": "plain-1"})
    lines = [record.getMessage() for record in caplog.records if record.name == "specjax.serve"]
    assert '"GET /v1/models HTTP/1.1" 200, request abc-1' in lines[0]
    assert "404, request plain-1: there is no " in lines[-1] and "\n" not in lines[-1]


def test_log_has_reasons_of_refusals_and_no_probes(server, caplog):
    caplog.set_level("INFO", "specjax.serve")
    with server.client() as client:
        client.post("/v1/completions", json={"prompt": "x", "max_tokens": -20}, headers={"X-Request-Id": "a"})
        client.post("/v1/completions", json={"prompt": "x", "user\n\x1b": "\n" * 999}, headers={"X-Request-Id": "b"})
        client.post("/v1/completions", json={"prompt": "x", "model": "\nä"}, headers={"X-Request-Id": "c"})
        client.get("/health")
    lines = [line for record in caplog.records if '1.1" ' in (line := record.getMessage())]
    assert lines[0].endswith("400, request a: max_tokens must be at least 0, got -20")
    assert "404, request c: no model " in lines[-1] and "health" not in caplog.text
    assert all(line.isascii() and line.isprintable() and len(line) < 500 for line in lines)


def test_long_paths_and_methods_are_cut(server, caplog):
    """In the log and in answers, to 256 printable bytes."""
    caplog.set_level("DEBUG", "specjax.serve")
    paths = ("/" + "x" * 40_000, "/" + "%0a%1b" * 6000, "/" + "%C3%B6" * 6000, "/v1/models" + "?x" * 20_000)
    for method, path in [*(("GET", path) for path in paths), ("M" * 40_000, "/health")]:
        with server.connected(f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()) as sock:
            answer = received(sock)
        assert answer.startswith(b"HTTP/1.1 ") and len(answer) < 1200
        line = caplog.records[-1].getMessage()
        assert len(line.encode()) < 750 and line.isascii() and line.isprintable()


def test_internal_error_hides_its_message(server, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("secret")

    monkeypatch.setattr(server.engine, "flush_cache", fail)
    answer = server.post("/flush_cache", {})
    assert answer.headers["x-request-id"] in caplog.text and "secret" in caplog.text
    assert check_error(answer, 500)["type"] == "server_error" and "secret" not in answer.text


# Large bodies.


def test_bodies_of_all_requests_share_a_limit(server, monkeypatch):
    monkeypatch.setattr(middleware, "MAX_BODIES", 3000)
    with server.connected(HEAD + b"Content-Length: 2900\r\n\r\n" + b" " * 2800):

        def refused() -> bool:
            answer = server.complete("x" * 500, max_tokens=1)
            return answer.status_code == 503 and "bodies" in answer.text and "retry-after" in answer.headers

        wait_until(refused)
    wait_until(lambda: server.complete("x", max_tokens=1).status_code == 200)


def test_large_body_is_a_413(server, monkeypatch):
    with server.connected(request(CHAT, {}, length=middleware.MAX_BODY + 1)) as sock:
        assert sock.recv(4096).startswith(b"HTTP/1.1 413"), "by the announced length alone"
    monkeypatch.setattr(middleware, "MAX_BODY", 1000)
    body = json.dumps({"prompt": "x" * 2000}).encode()
    chunks = (body[i : i + 100] for i in range(0, len(body), 100))  # without a Content-Length
    with server.client(headers={"Content-Type": "application/json"}) as client:
        check_error(client.post(COMPLETE, content=body), 413, text="1000")
        check_error(client.post(COMPLETE, content=chunks), 413)


# Methods, types, keys.


def test_types_and_encodings_of_bodies(server):
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    with server.client() as client:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            answer = client.post(COMPLETE, content=body, headers={"Content-Type": kind})
            check_error(answer, 415, text="application/json")
        for kind in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"):
            assert client.post(COMPLETE, content=body, headers={"Content-Type": kind}).status_code == 200
        client.headers["Content-Type"] = "application/json"
        packed = client.post(COMPLETE, content=gzip.compress(body), headers={"Content-Encoding": "gzip"})
        check_error(packed, 415, text="without Content-Encoding, got 'gzip'")
        assert client.post(COMPLETE, content=body, headers={"Content-Encoding": "identity"}).status_code == 200
        for size in (2**14, 10**6):
            check_error(client.post(COMPLETE, content=b'{"prompt": "' + b"x" * size), 400)
    server.wait_idle()


def test_methods_and_paths(server):
    with server.client() as client:
        check_error(client.get("/v1/nothing"), 404, text="/v1/nothing")
        check_error(client.get("/v1/models/other"), 404, "model")
        for method, path, allowed in (
            ("POST", "/", "GET, HEAD"), ("GET", CHAT, "POST"), ("GET", COMPLETE, "POST"),
            ("GET", GENERATE, "POST, PUT"), ("POST", "/v1/models", "GET, HEAD"), ("PUT", "/health", "GET, HEAD"),
            ("GET", "/flush_cache", "POST"), ("PATCH", "/v1/models/toy", "GET, HEAD"),
        ):  # fmt: skip
            refused = client.request(method, path)
            check_error(refused, 405)
            assert refused.headers["allow"] == allowed
        answer = client.post(f"{COMPLETE}/", json=BODY, headers={"Host": "evil.example"})
        assert answer.status_code == 404 and "location" not in answer.headers and answer.json()["error"]
        assert client.put(GENERATE, json={"text": "x", "sampling_params": {"max_new_tokens": 1}}).status_code == 200


def test_head_is_get_without_a_body(server):
    with server.client() as client:
        document = client.get("/openapi.json").json()["paths"]
        paths = [path for path, methods in document.items() if "get" in methods and "{" not in path]
        assert {"/", "/health", "/v1/models", "/metrics", "/health_generate"} <= {*paths}
        for path in (*paths, "/v1/models/toy", "/openapi.json", "/docs"):
            got, head = client.get(path), client.head(path)
            assert (head.status_code, head.content) == (got.status_code, b"") == (200, b""), path
            assert head.headers.keys() == got.headers.keys()
            assert head.headers["content-type"] == got.headers["content-type"]
            if path in ("/", "/health", "/v1/models"):
                assert head.headers["content-length"] == got.headers["content-length"]
        assert client.head("/v1/models/other").status_code == 404 and client.head("/nothing").content == b""
        for path in (CHAT, COMPLETE, "/v1/messages", "/tokenize"):
            refused = client.head(path)
            assert (refused.status_code, refused.headers["allow"], refused.content) == (405, "POST", b"")
    with server.connected(b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n") as sock:
        answer = received(sock)
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"\r\n\r\n")


@pytest.fixture(scope="module")
def locked():
    settings = ServerSettings(api_key=("other key", "söcret"), allowed_origins=("https://my.site",))
    with running(make_engine(toy(), "NONE"), settings) as served:
        yield served


def test_api_key(locked: Running):
    wrong = (
        {},
        {"Authorization": "Bearer other"},
        {"Authorization": "söcret".encode()},
        {"Authorization": "Basic c8O2Y3JldA=="},
    )
    paths = ("/v1/models", "/model_info", "/docs", "/openapi.json", "/nothing", "//health", "/health/", "//")
    with locked.client() as client:
        assert client.get("/health").status_code == 200
        for headers in wrong:
            for path, body in (LEAST | {"/flush_cache": {}}).items():
                assert check_error(client.post(path, json=body, headers=headers), 401)["code"] == "invalid_api_key"
            for path in paths:  # the whole address: httpx would take the first part of //health as a host
                check_error(client.get(locked.base + path, headers=headers), 401)
            assert client.get("/", headers=headers).status_code == 200, "the page has no secrets"
        right = {"Authorization": "Bearer söcret".encode()}
        assert client.get("/v1/models", headers=right).status_code == 200
        assert client.get("/v1/models", headers={"Authorization": "Bearer other key"}).status_code == 200
        assert client.post(COMPLETE, json={"prompt": "x", "max_tokens": 1}, headers=right).status_code == 200
        assert client.get(MESSAGES, headers={"x-api-key": "other key"}).status_code == 405


# Origins and certificates.

PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


def check_origin(server: Running, origin: str, headers: dict[str, str]) -> None:
    """Checks that a page of this origin may call the server. The preflight needs no key."""
    with server.client() as client:
        preflight = client.options(CHAT, headers={"Origin": origin, **PREFLIGHT})
        assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] in (origin, "*")
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        answer = client.get("/v1/models", headers={"Origin": origin, **headers})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] in (origin, "*")
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()


def test_allowed_origins(locked, server):
    check_origin(locked, "https://my.site", {"Authorization": "Bearer other key"})
    with locked.client(headers={"Origin": "https://my.site"}) as client:
        refused = client.get("/v1/models")
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://my.site"
    for closed in (locked, server):
        with closed.client(headers={"Origin": "https://other.site"}) as client:
            preflight = client.options(CHAT, headers=PREFLIGHT)
            assert preflight.status_code >= 400 and "access-control-allow-origin" not in preflight.headers
            assert "access-control-allow-origin" not in client.get("/v1/models").headers


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """A certificate authority, and the folder of a certificate and keys."""
    folder, authority = tmp_path_factory.mktemp("certificates"), trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(folder / "both.pem")
    certificate.cert_chain_pems[0].write_to_path(folder / "server.pem")
    certificate.private_key_pem.write_to_path(folder / "server.key")
    trustme.CA().issue_cert("127.0.0.1").private_key_pem.write_to_path(folder / "other.key")
    return authority, folder


@pytest.mark.parametrize("files", [("both.pem", None), ("server.pem", "server.key")])
def test_https(authority, files):
    """The server allows all origins, too."""
    authority, folder = authority
    certificate, key = (None if name is None else str(folder / name) for name in files)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    settings = ServerSettings(ssl_certfile=certificate, ssl_keyfile=key, allowed_origins=("*",))
    check_certificate(settings)
    with running(make_engine(toy(), "NONE"), settings) as server:
        assert server.base.startswith("https://127.0.0.1:")
        with (
            httpx.Client(verify=trusting) as http,
            openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", http_client=http) as client,
        ):
            stream = client.completions.create(model=MODEL, prompt="hello", max_tokens=9, stream=True)
            assert "".join(chunk.choices[0].text for chunk in stream)
            preflight = http.options(f"{server.base}{CHAT}", headers={"Origin": "http://any", **PREFLIGHT})
            assert preflight.headers["access-control-allow-origin"] in ("http://any", "*")
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"{server.base}/health")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.base.replace('https', 'http')}/health")


@pytest.mark.parametrize(
    ("certificate", "key", "text"),
    [
        ("absent.pem", None, "absent.pem"),
        ("server.pem", None, "server.pem, in PEM form with a private key: "),
        ("server.pem", "other.key", "other.key.*KEY_VALUES_MISMATCH"),
        (None, "server.key", "needs --ssl-certfile"),
    ],
)
def test_unusable_certificate_is_refused_first(authority, certificate, key, text, capsys):
    files = {"ssl_certfile": certificate, "ssl_keyfile": key}
    paths = {name: str(authority[1] / file) for name, file in files.items() if file is not None}
    with pytest.raises(ValueError, match=text):
        check_certificate(ServerSettings(**paths))
    argv = [part for name, path in paths.items() for part in (f"--{name.replace('_', '-')}", path)]
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert re.search(text, printed.err, re.MULTILINE) and not printed.out
    assert main(["--dry-run", *argv]) == 2
    assert capsys.readouterr() == printed


# Start and shutdown.


def test_requests_while_loading(hang, monkeypatch):
    """Also while the engine is allocated."""
    engine, allocate = make_engine(toy(), "NONE"), Hang()
    monkeypatch.setattr(engine, "wait_until_allocated", allocate)
    with running(engine, load=lambda: hang() or engine) as server, server.client() as client:
        for answer in (client.get("/health"), client.get("/v1/models"), client.post(COMPLETE, json=BODY)):
            assert "loading" in check_error(answer, 503)["message"] and int(answer.headers["retry-after"]) > 0
        server.runner.drain()
        assert client.get("/metrics").status_code == 503, "there are no metrics yet"
        server.runner._state = State.LOADING
        hang.let_go.set()
        assert allocate.began.wait(SECONDS)
        assert client.get("/health").status_code == 503 and server.runner.state is State.LOADING
        allocate.let_go.set()
        wait_until(lambda: client.get("/health").status_code == 200)
        assert client.post(COMPLETE, json=BODY).status_code == 200


def test_routes_during_a_drain():
    """Metrics and states are answered."""
    engine = make_engine(toy(), "NONE")
    with (
        running(engine) as server,
        braked(engine, after=4),
        server.client() as client,
        client.stream("POST", COMPLETE, json=BODY | {"max_tokens": 100, "stream": True}),
    ):
        server.runner.drain()
        for answer in (server.complete("x"), *map(client.get, ("/health", "/health_generate"))):
            assert "shutting down" in check_error(answer, 503)["message"] and answer.headers["retry-after"]
        for path in ("/metrics", "/server_info", "/model_info", "/v1/models", "/v1/loads", "/get_load"):
            assert client.get(path).status_code == client.head(path).status_code == 200, path
        assert client.get("/get_load").json()[0]["num_reqs"] == 1
        assert client.post("/abort_request", json={"rid": "unknown"}).status_code == 200
        assert "\nsglang:num_running_reqs{" in client.get("/metrics").text


def test_drain_does_not_wait_for_a_stuck_engine(hang, monkeypatch):
    monkeypatch.setattr(engine := make_engine(toy(), "NONE"), "step", hang)
    with running(engine, idle_at_end=False) as server:
        server.server._timeout = 0.0
        with server.connected(request(COMPLETE, BODY)) as sock:
            assert hang.began.wait(SECONDS)
            server.server.signal(signal.SIGTERM)
            answer = received(sock)
        assert answer.startswith(b"HTTP/1.1 503") and SHUT_DOWN.encode() in answer
        wait_until(lambda: server.server.ended)
        hang.let_go.set()
    assert server.runner.failure is None
