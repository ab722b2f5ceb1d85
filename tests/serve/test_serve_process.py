"""`specjax serve` as users start and end it: a process over a tiny random Llama in a folder."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from generate_helpers import saved_model
from server_helpers import SECONDS, check_error, free_port, in_background, parse_events, received, request
from train_helpers import with_kernels

import specjax
from specjax.cli import serve
from specjax.serve.errors import SHUT_DOWN


class Process:
    """The command, with its output in files: a pipe would have to be read all the time."""

    def __init__(self, folder: Path, flags: list[str], environment: dict[str, str]) -> None:
        self._err, self._out, self.cwd, self.home = (folder / name for name in ("err", "out", "cwd", "home"))
        for path in (folder, self.cwd, self.home):
            path.mkdir()
        with self._err.open("wb") as err, self._out.open("wb") as out:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "specjax.serve", *flags], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                cwd=self.cwd, env=environment | {"HOME": str(self.home)},
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self._err.read_text(encoding="utf-8").replace("\r", "\n")

    @property
    def out(self) -> str:
        return self._out.read_text(encoding="utf-8")

    def wait_for(self, pattern: str) -> re.Match:
        deadline = time.monotonic() + SECONDS
        while (match := re.search(pattern, self.log, re.MULTILINE)) is None:
            assert self.popen.poll() is None and time.monotonic() < deadline, self.log
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(0.05)
        return match

    def wait_ready(self) -> Process:
        self.wait_for("ready to roll")
        return self

    @property
    def url(self) -> str:
        return self.wait_for(r"Listening on (http://[\w.:]+);")[1]

    def client(self, key: str | None = None) -> httpx.Client:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, timeout=SECONDS, headers=headers, trust_env=False)

    def send(self, number: int) -> None:
        self.popen.send_signal(number)

    def status(self, seconds: float = SECONDS) -> int:
        return self.popen.wait(seconds)

    def kill(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()


pytestmark = pytest.mark.process

PROMPT_END = 20.0
"""Time limit in seconds of an end that has nothing to wait for; far below all time-outs that it must not use."""
CONTEXT = 4096
KEY = "open-sesame-4711"
QUICK = [
    "--max-running-requests", "2", "--speculative-num-draft-tokens", "4", "--decode-log-interval", "10",
    "--speculative-ngram-max-match-window-size", "4", "--speculative-ngram-capacity", "4096",
    "--chunked-prefill-size", "16",
]  # fmt: skip
ALL_COMPILED = " programs in the background in "
"""Before this line two requests may run one after the other."""
LONG = {"prompt": "a", "max_tokens": 3500, "ignore_eos": True}
"""Seconds of decoding: much longer than sending a signal takes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def model(folder) -> Path:
    """A folder of Hugging Face, with a tokenizer and a chat template."""
    return Path(saved_model(folder / "model", max_position_embeddings=CONTEXT))


@pytest.fixture(scope="module")
def environment(folder) -> dict[str, str]:
    """A cache folder without programs, and JAX's default settings."""
    code = Path(specjax.__file__).parents[1]
    paths = [str(code), str(code / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_COMPILATION", "XDG_"))}
    variables |= {"SPECJAX_CACHE": str(with_kernels(folder / "cache")), "COLUMNS": "100"}
    return variables | {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture(scope="module")
def launch(folder, environment) -> Iterator[Callable[..., Process]]:
    """launch(flags) -> the process, killed at the end of the module."""
    processes: list[Process] = []

    def start(*flags: Any) -> Process:
        processes.append(Process(folder / f"run{len(processes)}", [*QUICK, *map(str, flags)], environment))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


@pytest.fixture(scope="module")
def config(folder, model) -> Path:
    file = folder / "my.toml"
    file.write_text(
        f'model = "{model}"\nrandom-seed = 7\n[server]\nport = {free_port()}\n'
        f'served-model-name = "from-file"\napi-key = "{KEY}"\n'
    )
    return file


class Shared:
    """The first start over a cache without programs, and its answers before it is ready."""

    def __init__(self, process: Process) -> None:
        self.process = process
        with process.client() as client:
            self.health = [client.get("/health")]
            process.wait_ready()
            self.health.append(client.get("/health"))
        self.unseeded = [generate(process), generate(process)]


def generate(process: Process, **sampling: Any) -> list[int]:
    """Generated tokens of a prompt of tokens, which needs no tokenizer."""
    body = {"input_ids": [70, 71, 72], "sampling_params": {"max_new_tokens": 30, "ignore_eos": True} | sampling}
    with process.client(KEY) as client:
        return client.post("/generate", json=body).json()["output_ids"]


@pytest.fixture(scope="module")
def shared(launch, config) -> Shared:
    return Shared(launch("--config", config, "--port", 0, "--served-model-name", "tiny"))


@pytest.fixture(scope="module")
def second(shared, launch, config, folder, model) -> Process:
    """A second server, with settings from the file except the tokenizer and the template."""
    words = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    words["model"]["merges"] = []
    shutil.copytree(model, folder / "letters", ignore=shutil.ignore_patterns("*.safetensors", "chat_template*"))
    (folder / "letters" / "tokenizer.json").write_text(json.dumps(words), encoding="utf-8")
    (folder / "short.jinja").write_text("{{ messages[0].content }}")
    shared.process.wait_for(ALL_COMPILED)
    flags = ["--chat-template", folder / "short.jinja", "--tokenizer-path", folder / "letters"]
    return launch("--config", config, *flags)


# While it runs.

STAMP = r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] "


def test_log_of_a_start_and_of_steps(shared):
    lines = [
        r"Listening on http://127\.0\.0\.1:\d+; requests get a 503 until the model is loaded",
        r"Loading \S+: [\d.]+\wB in [\d.]+ s",
        r"Loaded \S+ on \S+ in [\d.]+ s; activations in float32",
        rf"KV pool: {2 * CONTEXT} tokens in pages of 16, \d+\.\d\d GB for the target, \d+\.\d\d GB for the draft",
        r"Speculation:\n  algorithm  NGRAM\n  tree       up to 4 tokens; .*\n  drafts     in steps where",
        r"Compiling: \d+ buckets? in [\d.]+ s",
        r"The server is fired up and ready to roll! http://127\.0\.0\.1:\d+",
    ]
    places = [match.start() for line in lines if (match := re.search(line, shared.process.log))]
    assert len(places) == len(lines) and places == sorted(places), shared.process.log
    assert shared.process.out == ""
    loading, ready = shared.health
    assert ready.status_code == 200 and int(loading.headers["Retry-After"]) > 0
    assert check_error(loading, 503)["message"] == "the model is loading"
    # SGLang's lines, which scripts search for.
    generate(shared.process, max_new_tokens=60)
    shared.process.wait_for(
        STAMP + r"Prefill batch\. #new-seq: 1, #new-token: 3, #cached-token: 0, token usage: 0\.\d\d, "
        r"#running-req: \d, #queue-req: 0$"
    )
    shared.process.wait_for(
        STAMP + r"Decode batch\. #running-req: 1, #token: \d+, token usage: 0\.\d\d, accept len: [1-4]\.\d\d, "
        r"gen throughput \(token/s\): \d+\.\d\d, #queue-req: 0, nodes: \d \d+%(, \d \d+%)*$"
    )


def test_key_and_name_from_file_and_flags(shared):
    for key in (None, "wrong", KEY + "x"):
        with shared.process.client(key) as client:
            assert client.get("/health").status_code == 200
            for method, path in [("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/flush_cache")]:
                assert check_error(client.request(method, path), 401)["code"] == "invalid_api_key"
    with shared.process.client(KEY) as client:
        (card,) = client.get("/v1/models").json()["data"]
        assert card["id"] == "tiny", "a flag takes precedence over the file"
        assert client.post("/v1/completions", json={"prompt": "a", "model": "tiny"}).json()["model"] == "tiny"
        assert client.post("/v1/completions", json={"prompt": "a", "model": "from-file"}).status_code == 404


# A second one.


def prompt_tokens(process: Process, path: str, **body: Any) -> int:
    with process.client(KEY) as client:
        answer = client.post(path, json=body | {"max_tokens": 1})
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens"]


def test_second_server(shared, second, config, folder):
    """It reads all programs from the cache, and its own settings from the file and flags."""

    def files() -> dict[Path, int]:
        paths = [path for path in (folder / "cache").rglob("*") if "starts" not in path.parts]
        # The time of a stored program is the time of its last use.
        return {path: 0 if path.parent.name == "programs" else path.stat().st_mtime_ns for path in paths}

    before = files()
    assert any(path.is_file() for path in before)
    second.wait_ready()
    second.wait_for(ALL_COMPILED)
    assert files() == before, "all programs were on disk"

    port = re.search(r"port = (\d+)", config.read_text())[1]
    assert second.url.endswith(f":{port}")
    assert not shared.process.url.endswith(f":{port}"), "a flag takes precedence over the file"
    assert [generate(second), generate(second)] == shared.unseeded, "--random-seed"
    assert shared.unseeded[0] != shared.unseeded[1]
    assert generate(second, temperature=0) == generate(shared.process, temperature=0)

    chat = {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "12345"}]}
    assert prompt_tokens(second, **chat) == 5, "--chat-template and --tokenizer-path"
    assert prompt_tokens(shared.process, **chat) > 5
    text = {"path": "/v1/completions", "prompt": "hell"}
    assert (prompt_tokens(second, **text), prompt_tokens(shared.process, **text)) == (4, 1)

    with second.client(KEY) as idle:
        assert idle.get("/v1/models").json()["data"][0]["id"] == "from-file"
        second.send(signal.SIGTERM)
        assert second.status(PROMPT_END) == 0, "an idle connection delays nothing"
    assert generate(shared.process, temperature=0)
    for process in (shared.process, second):
        assert KEY not in process.log
        assert list(process.cwd.rglob("*")) == list(process.home.rglob("*")) == [], "files outside of the cache"


def test_port_in_use(shared, launch, model):
    port = shared.process.url.rpartition(":")[2]
    refused = launch("--model", model, "--port", port)
    assert refused.status() == 2
    assert refused.log == (
        f"specjax serve: --host 127.0.0.1 --port {port}: Address already in use; "
        "choose another --port (0 = any free one)\n"
    ), "nothing has been loaded"


# How it ends.


def complete(process: Process, **body: Any) -> httpx.Response:
    with process.client() as client:
        return client.post("/v1/completions", json=LONG | body)


@contextlib.contextmanager
def streaming(process: Process, **body: Any) -> Iterator[Iterator[bytes]]:
    """The bytes of a stream that has begun."""
    body = LONG | {"stream": True} | body
    with process.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        rest = answer.iter_bytes()
        yield itertools.chain([next(rest)], rest)


def test_sigterm_completes_requests(launch, model):
    server = launch("--model", model, "--port", 0, "--shutdown-timeout", SECONDS).wait_ready()
    server.wait_for(ALL_COMPILED)
    whole = in_background(complete, server, max_tokens=2000)
    with (
        server.client() as kept,
        streaming(server, max_tokens=2500, stream_options={"include_usage": True}) as stream,
    ):
        assert kept.get("/health").status_code == 200
        server.wait_for("Decode batch. #running-req: 2")
        server.send(signal.SIGTERM)
        server.wait_for("SIGTERM: shutting down")
        refusals = [kept.get("/health"), kept.post("/v1/completions", json=LONG)]
        with contextlib.suppress(httpx.TransportError):
            while True:  # until the end
                refusals.append(complete(server))
                time.sleep(0.05)
        events = parse_events(b"".join(stream))
    assert len(refusals) > 2
    for answer in refusals:
        assert check_error(answer, 503)["message"] == SHUT_DOWN
        assert int(answer.headers["Retry-After"]) > 0 and answer.headers["Connection"] == "close"
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert events[-1]["usage"]["completion_tokens"] == 2500
    assert whole.result(SECONDS).json()["usage"]["completion_tokens"] == 2000
    assert server.status(PROMPT_END) == 0
    assert "Traceback" not in server.log


@contextlib.contextmanager
def unread(process: Process) -> Iterator[None]:
    """A client that requests a stream and never reads it."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # soon full
        sock.connect(("127.0.0.1", int(process.url.rpartition(":")[2])))
        sock.sendall(request("/v1/completions", LONG | {"stream": True}))
        yield


SHUT_DOWN_ERROR = {"message": SHUT_DOWN, "type": "server_error", "param": None, "code": "unavailable"}


def check_shut_down(stream: Iterator[bytes]) -> None:
    """The last event of a stream is the error of a server that ends."""
    *_, last, end = b"".join(stream).decode().split("\n\n")
    assert json.loads(last.removeprefix("data: ")) == {"error": SHUT_DOWN_ERROR} and end == ""


def test_requests_that_exceed_the_shutdown_timeout_get_an_error(launch, model):
    long_name = "x" * 5000  # in each event, so that unread events fill the buffer
    flags = ["--shutdown-timeout", 1, "--served-model-name", long_name]
    server = launch("--model", model, "--port", 0, *flags)
    server.wait_ready().wait_for(ALL_COMPILED)
    with unread(server), streaming(server) as stream:
        server.wait_for("#running-req: 2")
        whole = in_background(complete, server)
        server.wait_for("#queue-req: 1")
        server.send(signal.SIGINT)
        begun = time.monotonic()
        check_shut_down(stream)
        status = server.status(PROMPT_END)
    assert status == 0 and time.monotonic() - begun < 5, "a client that does not read delays nothing"
    assert check_error(whole.result(SECONDS), 503) == SHUT_DOWN_ERROR
    assert "Traceback" not in server.log


def test_second_signal_ends_requests_with_an_error(launch, model):
    server = launch("--model", model, "--port", 0, "--shutdown-timeout", SECONDS).wait_ready()
    unfinished = request("/v1/completions", LONG)[:-1]
    with (
        streaming(server) as stream,
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as slow,
    ):
        slow.sendall(unfinished)
        whole = in_background(complete, server)
        server.wait_for("Prefill batch[^\n]*\n(.*\n)*.*Prefill batch")
        server.send(signal.SIGINT)
        server.wait_for("SIGINT: shutting down")
        server.send(signal.SIGHUP)  # closed terminals send it, too
        server.send(signal.SIGTERM)
        check_shut_down(stream)
        head, _, body = received(slow).partition(b"\r\n\r\n")
        assert server.status(PROMPT_END) == 0
    assert check_error(whole.result(SECONDS), 503) == SHUT_DOWN_ERROR
    assert head.startswith(b"HTTP/1.1 503") and json.loads(body) == {"error": SHUT_DOWN_ERROR}
    assert "2 requests may continue" in server.log and "SIGTERM again: stopping at once" in server.log
    assert "Traceback" not in server.log


def test_hangup(launch, model):
    """It drains, unless the process was started to ignore it, as by `nohup`."""
    server = launch("--model", model, "--port", 0).wait_ready()
    with streaming(server, max_tokens=1000) as stream:
        server.send(signal.SIGHUP)
        assert parse_events(b"".join(stream))[-1]["choices"][0]["finish_reason"] == "length"
        assert server.status(PROMPT_END) == 0
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        server = launch("--model", model, "--port", 0)
    finally:
        signal.signal(signal.SIGHUP, before)
    server.wait_ready().send(signal.SIGHUP)
    assert complete(server, max_tokens=3).status_code == 200
    server.send(signal.SIGTERM)
    assert server.status(PROMPT_END) == 0
    assert "SIGHUP" not in server.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_it_loads_or_compiles(launch, model, number):
    # A context length of its own: the cache has no programs for it.
    context = CONTEXT - 64 * number
    server = launch("--model", model, "--port", 0, "--context-length", context)
    server.wait_for("Speculation:" if number == signal.SIGTERM else "Listening on ")
    server.wait_for("Started server process")
    server.send(number)
    assert server.status(PROMPT_END) == 0
    assert "Traceback" not in server.log


# Starts that fail.


def damaged(model: Path) -> Path:
    folder = shutil.copytree(model, model.parent / "damaged")
    (folder / "config.json").write_text("{")
    return folder


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (lambda model: ["--model", "/no/such/model"], "the model '/no/such/model' looks like a path, and there is no"),
        (lambda model: ["--model", damaged(model)], "config.json"),
        (lambda model: ["--model", model, "--chat-template", "/no/such.jinja"], "/no/such.jinja"),
        (lambda model: ["--model", model, "--context-length", 5000], "--context-length 5000 exceeds the model's 4096"),
        (lambda model: ["--model", model, "--host", "no.such.invalid"], "--host no.such.invalid --port 0: "),
    ],
    ids=["no model", "damaged", "no template", "context", "host"],
)
def test_failed_start_names_the_reason(launch, model, flags, message):
    failed = launch("--port", 0, *flags(model))
    assert failed.status() == 2
    last = failed.log.splitlines()[-1]
    assert last.startswith("specjax serve: ") and message in last
    assert "Traceback" not in failed.log and "fired up" not in failed.log
    assert failed.out == ""


def test_broken_log_ends_no_request(monkeypatch):
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Broken())
    serve._LogHandler().handle(logging.makeLogRecord({"msg": "Decode batch."}))
